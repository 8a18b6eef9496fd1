"""Owns what stands in one writer's directory: its manifest and its shards, as they were found.

Must never follow a symbolic link, and never take a name for more than what `format.rundir` says that it is.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from ..errors import NotARunError, RunError
from ..format.rundir import WRITER_MANIFEST, check_version, parse_rank_dir, parse_shard_name, read_json, shard_name
from ..format.schema import SCHEMA
from .rows import ShardRows, load_open, load_sealed

logger = logging.getLogger(__name__)

GLOBAL_DIR = "global"
_NUM_TRIES = 3
"""A shard may be sealed or retired between listing and opening; the second listing knows its new name."""
_QUIET_S = 60.0
"""A writer on another host whose open shard has not grown for so long is taken for dead."""


@dataclass(slots=True)
class Balance:
    """The accounts of one writer: `observed = written + sum of dropped`, and what retention removed of the written."""

    observed: int = 0
    written: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    retired_rows: int = 0
    retired_bytes: int = 0

    @classmethod
    def read(cls, ledger: Any) -> Balance:
        """From JSON of a stranger: what is no count is none."""
        ledger = ledger if isinstance(ledger, dict) else {}
        dropped, retired = ledger.get("dropped"), ledger.get("retired")
        dropped = dropped if isinstance(dropped, dict) else {}
        retired = retired if isinstance(retired, dict) else {}
        return cls(
            observed=_count(ledger.get("observed")),
            written=_count(ledger.get("written")),
            dropped={reason: _count(number) for reason, number in dropped.items() if _count(number)},
            retired_rows=_count(retired.get("rows")),
            retired_bytes=_count(retired.get("bytes")),
        )

    @property
    def num_dropped(self) -> int:
        return sum(self.dropped.values())

    @property
    def num_missing(self) -> int:
        """Rows that were numbered and are neither written nor counted as dropped."""
        return self.observed - self.written - self.num_dropped


class RecordedWriter:
    """One process lifetime: what it says of itself and what it left."""

    def __init__(self, directory: Path, rank: int | None, shards: list[ShardRows]) -> None:
        self.directory = directory
        self.name = directory.name
        self.rank = rank
        """None in a merged run."""
        self.shards = shards
        self.manifest: dict[str, Any] = {}
        self.manifest_problem: str | None = None
        path = directory / WRITER_MANIFEST
        if not os.path.lexists(path):
            return  # it has only just begun, or was killed before it could say more
        try:
            self.manifest = read_json(path)
            check_version(self.manifest, str(path))
        except RunError as error:
            self.manifest_problem = str(error)
            logger.warning("%s", error)

    @property
    def attempt(self) -> int:
        return _count(self.manifest.get("attempt"))

    @property
    def started_ns(self) -> int:
        return _count(self.manifest.get("started_ns"))

    @property
    def is_counted(self) -> bool:
        """Whether its steps were merely counted from 0, and so cannot be joined with those of another attempt."""
        return self.manifest.get("step_source") == "counted"

    @property
    def num_rows(self) -> int:
        return sum(shard.num_rows for shard in self.shards)

    def column(self, name: str) -> Any:
        """A light column of all its rows, as `pa.ChunkedArray`."""
        batches = [batch for shard in self.shards for batch in shard.columns([name])]
        return pa.chunked_array([batch.column(name) for batch in batches], SCHEMA.field(name).type)

    @property
    def shard_bytes(self) -> int:
        """Size of the shards when they were opened."""
        return sum(shard.size_bytes for shard in self.shards)

    @property
    def disk_bytes(self) -> int:
        """Size of everything in the directory now, indexes and manifest included."""
        return sum(_size_bytes(self.directory / name) for name in list_directory(self.directory, directories=False))

    @cached_property
    def balance(self) -> Balance:
        """The newest accounts there are: in the manifest, or in the last batch of a shard."""
        ledgers = [self.manifest.get("ledger"), *(shard.last_ledger() for shard in self._newest_shards())]
        return max(map(Balance.read, ledgers), key=lambda balance: (balance.observed, balance.written))

    @cached_property
    def state(self) -> str:
        """``closed``, ``recording``, or ``unclosed``: it was killed, or its host cannot be asked and it is quiet."""
        if self.manifest.get("state") == "closed":
            return "closed"
        return "recording" if self._is_alive() else "unclosed"

    @cached_property
    def last_step(self) -> int | None:
        """The largest step of its rows; None without rows."""
        steps = [pc.max(batch.column("step")).as_py() for shard in self.shards for batch in shard.columns(["step"])]
        return max((step for step in steps if step is not None), default=None)

    @property
    def ending(self) -> str:
        """Where the record of an ``unclosed`` writer stops, as a sentence; empty for any other."""
        if self.state != "unclosed":
            return ""
        who = "global" if self.rank is None else f"rank {self.rank}"
        how = "its process ended without closing" if self._is_here else "not closed, on another host and quiet"
        end = "there are no rows of it" if self.last_step is None else f"the record ends in step {self.last_step}"
        num_lost = self.balance.num_missing
        rows = (
            "1 row that was on its way is lost" if num_lost == 1 else f"{num_lost} rows that were on their way are lost"
        )
        lost = f", and {rows}" if num_lost > 0 else "; rows of the last steps may be missing"
        return f"{who} (writer {self.name}): {how}; {end}{lost}"

    @property
    def problems(self) -> list[str]:
        """What is damaged, and so missing from the rows; one message each."""
        found = [self.manifest_problem] if self.manifest_problem else []
        for shard in self.shards:
            found += shard.damage
        return found

    def _newest_shards(self) -> Iterator[ShardRows]:
        seen = set()
        for shard in reversed(self.shards):
            kind = shard.path.name.lstrip("_").partition("-")[0]
            if kind not in seen:
                seen.add(kind)
                yield shard

    @property
    def _is_here(self) -> bool:
        """Whether it says of itself that it ran on this host."""
        return self.manifest.get("host") == os.uname().nodename

    def _is_alive(self) -> bool:
        pid = self.manifest.get("pid")
        if self._is_here and type(pid) is int and pid > 0:
            if _is_zombie(pid):
                return False
            try:
                os.kill(pid, 0)
            except (ProcessLookupError, OverflowError):
                return False
            except PermissionError:
                return True
            return True
        changed_s = max((_changed_s(path) for path in (self.directory, *(s.path for s in self.shards))), default=0.0)
        return time.time() - changed_s < _QUIET_S


def find_writers(run: Path) -> list[RecordedWriter]:
    """Every writer of a run, by rank and then by start.

    Raises:
        NotARunError: a directory cannot be listed.
    """
    writers = []
    for name in list_directory(run, directories=True):
        rank = parse_rank_dir(name)
        if rank is not None or name == GLOBAL_DIR:
            for writer in list_directory(run / name, directories=True):
                writers.append(_load_writer(run / name / writer, rank))
    return sorted(writers, key=lambda w: (-1 if w.rank is None else w.rank, w.attempt, w.started_ns, w.name))


def list_directory(path: Path, *, directories: bool) -> list[str]:
    """Sorted names of the real directories, or of the regular files, in a directory. Links are neither.

    Raises:
        NotARunError: it cannot be listed.
    """
    try:
        with os.scandir(path) as entries:
            return sorted(
                entry.name
                for entry in entries
                if (entry.is_dir(follow_symlinks=False) if directories else entry.is_file(follow_symlinks=False))
            )
    except OSError as error:
        raise NotARunError(f"{path}: cannot be listed ({error.strerror})") from error


def _load_writer(directory: Path, rank: int | None) -> RecordedWriter:
    for is_last_try in [False] * (_NUM_TRIES - 1) + [True]:
        shards = []
        try:
            for kind, number, is_open in _list_shards(directory):
                load = load_open if is_open else load_sealed
                shards.append(load(directory / shard_name(kind, number)))
        except FileNotFoundError as error:
            if is_last_try:
                raise NotARunError(f"{error.filename}: keeps vanishing while it is read; try again") from error
            continue
        break
    return RecordedWriter(directory, rank, shards)


def _list_shards(directory: Path) -> list[tuple[str, int, bool]]:
    """Kind, number and whether it is open, once a shard, in the order of their numbers."""
    found: dict[tuple[int, str], bool] = {}
    for name in list_directory(directory, directories=False):
        if shard := parse_shard_name(name):
            key = (shard.number, shard.kind)
            found[key] = shard.is_open and found.get(key, True)  # sealed a moment ago, it may still have both names
    return [(kind, number, is_open) for (number, kind), is_open in sorted(found.items())]


def _is_zombie(pid: int) -> bool:
    """Whether a process has ended and merely waits for its parent to ask how; signals still reach it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[:1] == ["Z"]
    except (OSError, ValueError):
        return False  # not Linux, or gone


def _changed_s(path: Path) -> float:
    try:
        return path.stat(follow_symlinks=False).st_mtime
    except OSError:
        return 0.0


def _size_bytes(path: Path) -> int:
    try:
        return path.stat(follow_symlinks=False).st_size
    except OSError:
        return 0


def _count(value: Any) -> int:
    """A count out of JSON; 0 for anything else."""
    return value if type(value) is int and 0 <= value < 1 << 63 else 0
