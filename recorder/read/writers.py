"""Owns what stands in one writer's directory: its manifest and its shards, as they were found.

Must never follow a symbolic link, and never take a name for more than what `format.rundir` says that it is.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from ..errors import NotARunError, RunError
from ..format.rundir import WRITER_MANIFEST, check_version, parse_rank_dir, parse_shard_name, shard_name
from ..format.schema import SCHEMA
from ..format.status import STATUS, STATUS_BYTES
from ..processes import runs
from .places import OpenPlace, Place, store_of
from .rows import ShardRows, each_of, load_open, load_sealed

logger = logging.getLogger(__name__)

GLOBAL_DIR = "global"
_NUM_TRIES = 10
"""A shard may be sealed or retired between listing and opening; the next listing knows its new name. A writer with
small shards on a fast disk may do so several times in a row."""
_MAX_SHARED = 8
"""Different values of a member that are compared with each further one."""
_QUIET_S = 60.0
"""A writer on another host that has shown nothing new for so long is taken for dead."""


@dataclass(slots=True)
class Balance:
    """The accounts of one writer: `observed = written + sum of dropped`, and what retention removed of the written."""

    observed: int = 0
    written: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    retired_rows: int = 0
    retired_bytes: int = 0
    suspect: int = 0
    """Written rows of which nobody knows whether the medium has them: a sync of their file has failed."""

    @classmethod
    def read(cls, ledger: Any) -> Balance:
        """From JSON of a stranger: what is no count is none."""
        ledger = ledger if isinstance(ledger, dict) else {}
        dropped, retired = ledger.get("dropped"), ledger.get("retired")
        dropped = dropped if isinstance(dropped, dict) else {}
        retired = retired if isinstance(retired, dict) else {}
        return cls(
            observed=count(ledger.get("observed")),
            written=count(ledger.get("written")),
            dropped={reason: count(number) for reason, number in dropped.items() if count(number)},
            retired_rows=count(retired.get("rows")),
            retired_bytes=count(retired.get("bytes")),
            suspect=count(ledger.get("suspect")),
        )

    @property
    def num_dropped(self) -> int:
        return sum(self.dropped.values())

    @property
    def num_missing(self) -> int:
        """Rows that were numbered and are neither written nor counted as dropped."""
        return self.observed - self.written - self.num_dropped

    @property
    def is_possible(self) -> bool:
        """Whether no more was removed than was ever written."""
        return self.retired_rows <= self.written


class RecordedWriter:
    """One process lifetime: what it says of itself and what it left."""

    def __init__(self, directory: Place, rank: int | None, shards: list[ShardRows]) -> None:
        self.directory: OpenPlace = directory
        self.name = directory.name
        self.rank = rank
        """None in a merged run."""
        self.shards = shards
        self.manifest: dict[str, Any] = {}
        self.manifest_problem: str | None = None
        self.retired_later: list[dict[str, Any]] = []
        """What later writers of the rank say that they have deleted of it."""
        path, store = directory / WRITER_MANIFEST, store_of(directory)
        try:
            store.look_at(path)
        except OSError:
            return  # it has only just begun, or was killed before it could say more
        try:
            self.manifest = store.read_json(path)
            check_version(self.manifest, str(path))
        except RunError as error:
            self.manifest_problem = str(error)
            logger.warning("%s", error)

    @property
    def attempt(self) -> int:
        return count(self.manifest.get("attempt"))

    @property
    def started_ns(self) -> int:
        return count(self.manifest.get("started_ns"))

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
        names = store_of(self.directory).list_directory(self.directory, directories=False)
        return sum(_size_bytes(self.directory / name) for name in names)

    @cached_property
    def balance(self) -> Balance:
        """The newest accounts there are: in the manifest, the last batch of a shard, or the last status."""
        ledgers = [self.manifest.get("ledger"), *(shard.last_ledger() for shard in self.newest_shards())]
        ledgers += [note.get("ledger") for note in self.retired_later]  # it may have gone with its shard
        balance = max(map(Balance.read, ledgers), key=lambda balance: (balance.observed, balance.written))
        if self._last_words:
            retired = {"rows": balance.retired_rows, "bytes": balance.retired_bytes}
            balance = Balance.read({"retired": retired, **self._last_words})
        for size in self.retired_shards.values():
            balance.retired_rows += count(size.get("rows"))
            balance.retired_bytes += count(size.get("bytes"))
        return balance

    @cached_property
    def retired_shards(self) -> dict[tuple[str, int], dict[str, Any]]:
        """Shards of it that a later writer has deleted, by kind and number, with how many rows they had."""
        found = {}
        present = {name[:2] for shard in self.shards if (name := parse_shard_name(shard.path.name))}
        for note in self.retired_later:
            for text, size in _object(note.get("shards")).items():
                name = parse_shard_name(text)
                if name is not None and name[:2] not in present:
                    found[name[:2]] = _object(size)
        return found

    @cached_property
    def state(self) -> str:
        """``closed``, ``recording``, or ``unclosed``: it was killed, or its host cannot be asked and it is quiet."""
        if self.manifest.get("state") == "closed" or self._last_words:
            return "closed"
        return "recording" if self._is_alive() else "unclosed"

    @cached_property
    def _last_words(self) -> dict[str, Any]:
        """The status of a writer that has closed on a disk which did not take its manifest any more; else nothing.

        It is rewritten in place, which asks a disk for less than a new file.
        """
        if self.manifest.get("state") == "closed":
            return {}
        try:
            status = store_of(self.directory).read_json(self.directory / STATUS, STATUS_BYTES)
        except RunError:
            return {}
        its_own = {"writer": self.name, **{name: self.manifest.get(name) for name in ("pid", "started_ns")}}
        is_its_own = all(status.get(name) == value for name, value in its_own.items() if value is not None)
        return status if is_its_own and status.get("state") == "closed" else {}

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
        is_gone = runs(self.manifest) is False
        how = "its process ended without closing" if is_gone else "not closed, out of sight from here and quiet"
        end = "there are no rows of it" if self.last_step is None else f"the record ends in step {self.last_step}"
        num_lost = self.balance.num_missing
        rows = "1 row that was on its way is" if num_lost == 1 else f"{num_lost} rows that were on their way are"
        # What was seen after the last flush is in no account.
        lost = f", and at least {rows} lost" if num_lost > 0 else "; rows of the last steps may be missing"
        return f"{who} (writer {self.name}): {how}; {end}{lost}"

    @property
    def problems(self) -> list[str]:
        """What is damaged, and so missing from the rows; one message each."""
        found = [self.manifest_problem] if self.manifest_problem else []
        for shard in self.shards:
            found += shard.damage
        return found

    def newest_shards(self) -> Iterator[ShardRows]:
        """The last one of each kind."""
        seen = set()
        for shard in reversed(self.shards):
            kind = shard.path.name.lstrip("_").partition("-")[0]
            if kind not in seen:
                seen.add(kind)
                yield shard

    def _is_alive(self) -> bool:
        is_running = runs(self.manifest)
        if is_running is not None:
            return is_running
        signs = (self.directory, self.directory / STATUS, *(shard.path for shard in self.shards))
        changed_s = max(map(_changed_s, signs))
        return time.time() - changed_s < _QUIET_S


def find_writers(run: Place) -> list[RecordedWriter]:
    """Every writer of a run, by rank and then by start.

    Raises:
        NotARunError: a directory cannot be listed.
    """
    store = store_of(run)
    found = []
    for name, rank in writer_folders(run):
        found += [(run / name / writer, rank) for writer in list_writers(run / name)]
    writers: list[RecordedWriter] = []
    shared: dict[str, list[Any]] = {}
    for writer in store.each(lambda one: _load_writer(*one), found):
        _share_members(writer.manifest, shared)
        writers.append(writer)
    _find_copies(writers)
    _share_notes(writers)
    return sorted(writers, key=lambda w: (-1 if w.rank is None else w.rank, w.attempt, w.started_ns, w.name))


def writer_folders(run: Place) -> list[tuple[str, int | None]]:
    """The directories in a run that hold writers, and whose they are; None for global rows.

    Raises:
        NotARunError: the run cannot be listed, or one of them is a link.
    """

    def is_one(name: str) -> bool:
        return name == GLOBAL_DIR or parse_rank_dir(name) is not None

    names = store_of(run).list_directory(run, directories=True, is_part=is_one)
    return [(name, parse_rank_dir(name)) for name in names if is_one(name)]


def list_writers(folder: Place) -> list[str]:
    """The writers in the directory of a rank, whose names may be any. NotARunError: as for `writer_folders`."""
    return store_of(folder).list_directory(folder, directories=True, is_part=lambda name: True)


def _share_members(manifest: dict[str, Any], shared: dict[str, list[Any]]) -> None:
    """Have what manifests say alike be in memory once: of 4,096 ranks each lists all ranks, and all modules."""
    for name, value in manifest.items():
        if isinstance(value, dict | list):
            known = shared.setdefault(name, [])
            same = next((one for one in known if one == value), value)
            manifest[name] = same
            if same is value:
                known[:] = [value, *known[: _MAX_SHARED - 1]]


def _find_copies(writers: list[RecordedWriter]) -> None:
    """Call a writer's directory that was copied under another name what it is: its rows are there twice."""
    lifetimes: dict[tuple[Any, ...], list[RecordedWriter]] = {}
    for writer in writers:
        its = [writer.manifest.get(name) for name in ("writer", "run_id", "pid", "started_ns")]
        if isinstance(its[0], str):
            key = (writer.rank, *(value if isinstance(value, (int, str)) else None for value in its))
            lifetimes.setdefault(key, []).append(writer)
    for same in lifetimes.values():
        original = next((writer for writer in same if writer.name == writer.manifest["writer"]), same[0])
        for writer in same:
            if writer is not original and writer.name != writer.manifest["writer"] and not writer.manifest_problem:
                what = f"is a copy of {original.name} beside it, so its rows are there twice"
                writer.manifest_problem = f"{writer.directory}: {what}; remove the copy"
                logger.warning("%s", writer.manifest_problem)


def _share_notes(writers: list[RecordedWriter]) -> None:
    """Tell each writer what later ones of its rank have deleted of it."""
    of_rank: dict[int | None, dict[str, RecordedWriter]] = {}
    for writer in writers:
        of_rank.setdefault(writer.rank, {})[writer.name] = writer
    for members in of_rank.values():
        for later in members.values() if len(members) > 1 else ():
            manifest = later.manifest
            if later.state == "recording":  # it may have deleted something since; a deletion is noted before
                with contextlib.suppress(RunError):
                    manifest = store_of(later.directory).read_json(later.directory / WRITER_MANIFEST)
            for name, note in _object(manifest.get("retired_earlier")).items():
                if name in members and name != later.name:
                    members[name].retired_later.append(_object(note))


def load_balances(writers: Iterable[RecordedWriter]) -> None:
    """Read what the accounts of several writers are made of, at once where each waits for a store."""
    shards = [shard for writer in writers for shard in writer.newest_shards()]
    for _ in each_of(shards, ShardRows.last_ledger):
        pass  # kept by the shard


def _load_writer(directory: Place, rank: int | None) -> RecordedWriter:
    store = store_of(directory)
    for is_last_try in [False] * (_NUM_TRIES - 1) + [True]:
        try:
            shards = list(store.each(lambda one: _load_shard(directory, *one), _list_shards(directory)))
        except FileNotFoundError as error:
            if is_last_try:
                raise NotARunError(f"{error.filename}: keeps vanishing while it is read; try again") from error
            store.refresh()
            continue
        break
    writer = RecordedWriter(directory, rank, shards)
    for shard in shards:
        if shard.tail_damage:
            shard.note_tail(writer.state == "recording")
    return writer


def _load_shard(directory: Place, kind: str, number: int, is_open: bool) -> ShardRows:
    return (load_open if is_open else load_sealed)(directory / shard_name(kind, number))


def _list_shards(directory: Place) -> list[tuple[str, int, bool]]:
    """Kind, number and whether it is open, once a shard, in the order of their numbers."""
    found: dict[tuple[int, str], bool] = {}
    store = store_of(directory)
    for name in store.list_directory(directory, directories=False, is_part=lambda name: bool(parse_shard_name(name))):
        if shard := parse_shard_name(name):
            key = (shard.number, shard.kind)
            found[key] = shard.is_open and found.get(key, True)  # sealed a moment ago, it may still have both names
    return [(kind, number, is_open) for (number, kind), is_open in sorted(found.items())]


def _changed_s(path: Place) -> float:
    try:
        return store_of(path).look_at(path).changed_ns / 1e9
    except OSError:
        return 0.0


def _size_bytes(path: Place) -> int:
    try:
        return store_of(path).look_at(path).size_bytes
    except OSError:
        return 0


def _object(value: Any) -> dict[str, Any]:
    """An object out of JSON; an empty one for anything else."""
    return value if isinstance(value, dict) else {}


def count(value: Any) -> int:
    """A count out of JSON; 0 for anything else."""
    return value if type(value) is int and 0 <= value < 1 << 63 else 0
