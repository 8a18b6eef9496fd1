"""What the campaigns on durability share: the rows of a run by a reader of their own, numbers for a table, progress."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.rigs.writer import read_open, read_sealed


def writer_directories(folder: Path) -> list[Path]:
    """Every writer's directory below a folder of runs."""
    return sorted(folder.glob("*/rank=*/*"))


def shards_of(directory: Path) -> list[tuple[Path, bool]]:
    """The shards of a writer and whether each is sealed; of one under both names the sealed one."""
    sealed = sorted(directory.glob("*.arrow"))
    names = {path.name for path in sealed}
    is_twin = {path: path.name[1:].removesuffix(".open") in names for path in directory.glob("_*.arrow.open")}
    return [(path, True) for path in sealed] + [(path, False) for path in sorted(is_twin) if not is_twin[path]]


def batches_of(directory: Path) -> Iterator[tuple[Any, Any]]:
    """Batches and headers of a writer, by pyarrow and the checksums alone: not by the package's readers."""
    for path, is_sealed in shards_of(directory):
        for batch, header in read_sealed(path) if is_sealed else read_open(path):
            if batch.num_rows:
                yield batch, header


def copy_live(run: Path, copy: Path) -> Path:
    """A copy of what is still being written, without the temporary files, which vanish at any time."""
    return Path(shutil.copytree(run, copy, ignore=shutil.ignore_patterns("*.tmp")))


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest of the values that so many are not above."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


class Progress:
    """One line every few seconds on a terminal, and one a minute into a pipe or a file."""

    def __init__(self, total: int, what: str) -> None:
        self._total, self._what = total, what
        self._start_s = self._last_s = time.monotonic()

    def show(self, done: int, more: str = "") -> None:
        now_s = time.monotonic()
        if now_s - self._last_s >= (2 if sys.stderr.isatty() else 60):
            self._last_s = now_s
            text = f"{now_s - self._start_s:6.0f} s  {done} of {self._total} {self._what}  {more}"
            print(text, file=sys.stderr, flush=True)
