"""What the campaigns on durability share: the rows of a run by a reader of their own, numbers for a table, progress."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.rigs.writer import read_open, read_sealed


def writer_directories(folder: Path) -> list[Path]:
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


CHANGES = ("open", "pwritev", "ftruncate", "fsync", "mkdir", "link", "rename", "replace", "unlink", "rmdir")
"""Functions of `os` that change the file system."""


def is_killed_at(number: int, work: Callable[[], object]) -> bool:
    """Do something in a child that is killed before its change of the file system of this number.

    Returns whether the child was killed; False where it came to its end, because it makes fewer changes.
    """
    pid = os.fork()
    if pid == 0:
        _die_at(number)
        try:
            work()
        except BaseException as error:
            print(f"killed at {number}: {error!r}", file=sys.stderr)
            os._exit(3)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in (0, -signal.SIGKILL), f"to be killed at {number}: ended with {code}"
    return code != 0


def _die_at(number: int) -> None:
    left = number

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def instead(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        return instead

    for name in CHANGES:
        setattr(os, name, counted(getattr(os, name)))


def memory_folder() -> str | None:
    """A folder in memory, where thousands of files cost no syncs; None where there is none."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def deadline_s(minutes: float | None) -> float:
    """On the monotonic clock, the end of so many minutes from now; infinity where there is no limit."""
    return time.monotonic() + 60 * minutes if minutes else float("inf")


def exit_code(problems: Sequence[str]) -> int:
    """Print the first problems; 1 where there is any."""
    for text in problems[:20]:
        print(f"PROBLEM: {text}")
    return int(bool(problems))


class Progress:
    """One line every few seconds on a terminal, and one a minute into a pipe or a file; a total of 0 is unknown."""

    def __init__(self, total: int, what: str) -> None:
        self._total, self._what = total, what
        self._start_s = self._last_s = time.monotonic()

    def show(self, done: int, more: str = "") -> None:
        now_s = time.monotonic()
        if now_s - self._last_s >= (2 if sys.stderr.isatty() else 60):
            self._last_s = now_s
            of = f" of {self._total}" if self._total else ""
            text = f"{now_s - self._start_s:6.0f} s  {done}{of} {self._what}  {more}"
            print(text, file=sys.stderr, flush=True)
