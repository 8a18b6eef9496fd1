"""Follows a run while it is written. Each batch of rows is returned once, in the order of steps.

The cost of a look at the run grows with the new data and the number of ranks, but not with the size of the run. Batches
that are no longer needed are forgotten. This module must never write, and never trust an earlier listing.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace
from typing import NamedTuple

from ..errors import NotARunError
from ..format.manifest import RunManifest
from ..format.rundir import RUN_MANIFEST, WRITER_MANIFEST, Shared, open_name, shard_name
from ..read.shard_rows import ShardRows, Steps, load_open, load_sealed
from ..read.writers import RecordedWriter, list_shards, list_writers, writer_folders
from ..sites import PROBE
from ..storage.locations import Location, store_of
from ..storage.untrusted_files import FileFacts
from .status import ENDED, RankNow, RunWatch

_MAX_BATCHES = 64
"""The most new batches that are found in an open shard at a time."""
_DERIVED = ("balance", "retired_shards", "state", "_last_words", "last_step")
"""The cached properties that must be computed anew for a copy of a writer that has only some of the rows."""
NEVER = 1 << 62
"""A step number that is larger than all others."""


class _Batch(NamedTuple):
    shard: ShardRows
    number: int
    steps: Steps
    num_rows: int


@dataclass(slots=True)
class _ShardsOfKind:
    """One writer's shards of one kind (such as statistics), and how far they were read, in the order of steps."""

    kind: str
    known: dict[int, bool] = field(default_factory=dict)
    """By shard number: whether the shard was open (not sealed) at the last listing."""
    next_shard: int = 0
    shard: ShardRows | None = None
    waiting: list[int] = field(default_factory=list)
    """The numbers of `shard`'s batches that were found, but not yet added to the writer's `pending` batches."""
    size_bytes: int = -1
    """The size in bytes of the open shard when it was last read."""
    reached: int = -1
    """The largest step in the batches that were added to the writer's `pending` batches; -1 before the first."""
    is_read: bool = False
    """True if there is nothing more to read, as far as is known."""


class _Followed:
    def __init__(self, directory: Location, rank: int | None, writer: RecordedWriter, seen: FileFacts | None) -> None:
        self.directory, self.rank = directory, rank
        self.writer = writer
        self.manifest_seen = seen
        """The size and the time stamp of the manifest's file when it was last read. None if there was no manifest."""
        self.lanes: dict[str, _ShardsOfKind] = {}
        self.pending: list[_Batch] = []
        self.is_at_work = True
        self.probe: tuple[int, int] | None = None
        """The number and size in bytes of the newest shard of the probe (one number of each value at every step)."""

    @property
    def reached(self) -> int:
        return max((lane.reached for lane in self.lanes.values()), default=-1)


class GrowingRun:
    """A run that may grow. `look` lists its files, `advance` finds more batches, and `writers` returns the batches."""

    def __init__(self, location: Location, manifest: RunManifest) -> None:
        self.location, self.manifest = location, manifest
        self.ranks: list[RankNow] = []
        self._store = store_of(location)
        self._watch = RunWatch(location)
        self._followed: dict[Location, _Followed] = {}
        self._shared = Shared()
        self.num_rows = 0
        self.has_again = False
        """True if a restarted rank recorded steps before `done_before` again. The drawing must then begin anew."""
        self.done_before = 0
        """The first step whose rows are still needed. Rows of earlier steps are forgotten."""

    def look(self) -> bool:
        """List the run. Return whether there is more to read, or whether the state of a rank has changed.

        Raises NotARunError if the run is gone, or the directory holds another run.
        """
        before = self._said
        self.ranks = self._watch.look()  # this also refreshes the store
        now = RunManifest.read(self._store.read_json(self.location / RUN_MANIFEST))
        if (now.run_id, now.created_ns) != (self.manifest.run_id, self.manifest.created_ns):
            raise NotARunError(f"{self.location}: the directory holds another run now")
        at_work = {rank.rank for rank in self.ranks if rank.state not in (*ENDED, "silent")}
        newest_of: dict[int | None, str] = {rank.rank: rank.status.writer for rank in self.ranks}
        has_more = False
        for name, rank in writer_folders(self.location):
            parent = self.location / name
            newest = newest_of.get(rank)
            for one in list_writers(parent):
                followed = self._follow(parent / one, rank)
                followed.is_at_work = rank in at_work and (newest is None or one == newest)
                has_more |= self._look_at_shards(followed)
        return has_more or self._said != before

    @property
    def _said(self) -> list[tuple[object, ...]]:
        return [(rank.rank, rank.state, rank.status.step, rank.status.num_dropped) for rank in self.ranks]

    def _follow(self, directory: Location, rank: int | None) -> _Followed:
        followed = self._followed.get(directory)
        seen = None
        with suppress(OSError):  # the writer may have only just begun
            seen = self._store.look_at(directory / WRITER_MANIFEST)
        if followed is None:
            writer = RecordedWriter(directory, rank, [], self._shared)
            followed = self._followed[directory] = _Followed(directory, rank, writer, seen)
        elif seen is not None and seen != followed.manifest_seen:
            followed.writer = RecordedWriter(directory, rank, [], self._shared)
            followed.manifest_seen = seen
        return followed

    def _look_at_shards(self, followed: _Followed) -> bool:
        has_more = False
        for kind, number, is_open in list_shards(followed.directory):
            if kind == PROBE:
                name = shard_name(kind, number)
                if number >= (followed.probe or (0, 0))[0]:
                    with suppress(OSError):  # the shard was sealed; the next call finds the sealed shard
                        found = self._store.look_at(followed.directory / (open_name(name) if is_open else name))
                        followed.probe = number, found.size_bytes
                continue
            lane = followed.lanes.setdefault(kind, _ShardsOfKind(kind))
            lane.known[number] = is_open
        for lane in followed.lanes.values():
            lane.is_read = not self._may_have_more(followed, lane)
            has_more |= not lane.is_read
        return has_more

    def _may_have_more(self, followed: _Followed, lane: _ShardsOfKind) -> bool:
        if lane.waiting or any(number >= lane.next_shard for number in lane.known):
            return True
        if lane.shard is None or lane.shard.is_complete:
            return False
        if not lane.known.get(lane.next_shard - 1, False):
            return True  # the shard was sealed since the last call
        try:
            return self._store.look_at(lane.shard.path).size_bytes != lane.size_bytes
        except OSError:
            return True

    def advance(self, max_rows: int) -> bool:
        """Find about `max_rows` more rows, first of ranks that are furthest behind. Return False if all is read."""
        stop = self.num_rows + max_rows
        lanes = list(self._unread())
        behind = [(lane.reached, index) for index, (_, lane) in enumerate(lanes)]
        heapify(behind)
        while behind and self.num_rows < stop:
            _, index = behind[0]
            followed, lane = lanes[index]
            try:
                lane.is_read = not self._take(followed, lane)
            except (FileNotFoundError, NotARunError):  # the shard was removed or sealed; the next call notices this
                lane.shard, lane.waiting, lane.is_read = None, [], True
            if lane.is_read:
                heappop(behind)
            else:
                heapreplace(behind, (lane.reached, index))
        return bool(behind)

    def _unread(self) -> Iterator[tuple[_Followed, _ShardsOfKind]]:
        for followed in self._followed.values():
            for lane in followed.lanes.values():
                if not lane.is_read:
                    yield followed, lane

    def _take(self, followed: _Followed, lane: _ShardsOfKind) -> bool:
        while not lane.waiting:
            if lane.shard is not None and not lane.shard.is_complete:
                with suppress(OSError):
                    lane.size_bytes = self._store.look_at(lane.shard.path).size_bytes
                lane.waiting = lane.shard.grow(_MAX_BATCHES)
                if not lane.waiting and not lane.shard.is_complete:
                    return False
                continue
            number = min((one for one in lane.known if one >= lane.next_shard), default=None)
            if number is None:
                return False
            lane.next_shard = number + 1
            lane.shard = self._load(followed, lane, number)
            lane.waiting = lane.shard.numbers
        shard, number = lane.shard, lane.waiting.pop(0)
        assert shard is not None
        steps = shard.steps_of(number)
        if steps is None:
            shard.forget(number)  # the batch is damaged, which `recorder verify` reports
            return True
        batch = _Batch(shard, number, steps, shard.only([number]).num_rows)
        if steps[0] < self.done_before and followed.writer.attempt > 0:
            self.has_again = True
        followed.pending.append(batch)
        lane.reached = max(lane.reached, steps[1] - 1)
        self.num_rows += batch.num_rows
        return True

    def _load(self, followed: _Followed, lane: _ShardsOfKind, number: int) -> ShardRows:
        path = followed.directory / shard_name(lane.kind, number)
        if lane.known[number]:
            open_path = path.with_name(open_name(path.name))
            with suppress(FileNotFoundError):
                lane.size_bytes = self._store.look_at(open_path).size_bytes
                return load_open(path, _MAX_BATCHES)
        return load_sealed(path)

    @property
    def probe(self) -> list[tuple[int, int] | None]:
        """The number and size of each writer's newest shard of the probe. A change means that there is more to read."""
        return [one.probe for one in self._followed.values()]

    @property
    def horizon(self) -> int:
        """The first step that may still get rows. All earlier steps are complete, as far as the files show."""
        steps = [lane.reached for _, lane in self._unread()]
        steps += [one.reached for one in self._followed.values() if one.is_at_work and one.lanes]
        return min(steps, default=NEVER)

    @property
    def is_over(self) -> bool:
        """True if a rank has begun, and no rank is recording any more."""
        return bool(self._followed) and not any(rank.num_alive for rank in self.ranks)

    @property
    def first_pending(self) -> int:
        """The first step of the rows that were found and are still needed. `NEVER` if there are none."""
        return min((max(one.steps[0], self.done_before) for one in self._pending), default=NEVER)

    @property
    def end_pending(self) -> int:
        """The step after the last step of the rows that were found and are still needed. 0 if there are none."""
        return max((one.steps[1] for one in self._pending), default=0)

    @property
    def num_pending(self) -> int:
        """The number of rows in the batches that are still needed. Some rows may be of steps before `done_before`."""
        return sum(one.num_rows for one in self._pending)

    @property
    def _pending(self) -> Iterator[_Batch]:
        return (one for followed in self._followed.values() for one in followed.pending)

    def num_rows_of(self, steps: Steps) -> int:
        """Return the number of rows in the batches that `writers` returns for the same steps."""
        return sum(one.num_rows for one in self._pending if one.steps[0] < steps[1] and steps[0] < one.steps[1])

    def writers(self, steps: Steps) -> tuple[RecordedWriter, ...]:
        """Return copies of the writers, with only those batches that may hold rows of the given steps."""
        writers = []
        for followed in self._followed.values():
            numbers: dict[int, tuple[ShardRows, list[int]]] = {}
            for one in followed.pending:
                if one.steps[0] < steps[1] and steps[0] < one.steps[1]:
                    numbers.setdefault(id(one.shard), (one.shard, []))[1].append(one.number)
            writer = copy.copy(followed.writer)
            for name in _DERIVED:
                writer.__dict__.pop(name, None)
            writer.shards = writer.all_shards = [shard.only(some) for shard, some in numbers.values()]
            writers.append(writer)

        def order(one: RecordedWriter) -> tuple[int, int, int, str]:
            return -1 if one.rank is None else one.rank, one.attempt, one.started_ns, one.name

        return tuple(sorted(writers, key=order))

    def done(self, step: int) -> None:
        self.done_before = max(self.done_before, step)
        for followed in self._followed.values():
            for one in followed.pending:
                if one.steps[1] <= step:
                    one.shard.forget(one.number)
            followed.pending = [one for one in followed.pending if one.steps[1] > step]
