"""Writes the shards of one kind: fills a batch in memory, appends it to a file, and begins another file in time.

This module raises no error of the disk. It drops rows with a reason, and pauses before it uses the disk again.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..config import Settings
from ..format.rundir import open_name, shard_name
from ..records import KEEP_TENSOR, Measured, Staged
from ..rules import Schedule
from .file import Disk, PageMemory, StuckError
from .ledger import NO_MEMORY, QUOTA, WRITER_ERROR, Backoff, Ledger, Notices, drop_reason
from .quota import DiskFloor, HeldShard, Quota
from .rows import BuiltBatch, RowBatch
from .shard import BatchFile, Index, IpcFormat, StoredShard

_FLUSH_SHARE = 0.8
"""A batch is written at this share of `flush_interval_s`, because its rows have waited before they came into it."""
_MAY_SYNC_AGAIN = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""The errno values of a sync that lacked a descriptor or memory. Such a sync may be tried again."""


@dataclass(eq=False, kw_only=True)
class RotatingShards:
    """Moves rows of one kind from memory into one shard after another. Used on the writer thread only."""

    kind: str
    directory: Path
    batch: RowBatch
    layout: IpcFormat
    has_index: bool
    settings: Settings
    disk: Disk
    memory: PageMemory
    ledger: Ledger
    quota: Quota
    floor: DiskFloor
    keep_steps: Schedule
    retire: Callable[[str, HeldShard], None]
    notices: Notices
    clock: Callable[[], float]

    def __post_init__(self) -> None:
        self.written_bytes = 0
        self.last_written_step: int | None = None
        """The highest step of a row that was written."""
        self.is_direct: bool | None = None
        """True if writes go past the page cache; None before the first write."""
        self._backoff = Backoff(self.clock)
        self._syncing = Backoff(self.clock)
        self._max_shard_bytes = min(self.settings.shard_bytes, self.quota.max_shard_bytes(self.kind))
        self._next_number = 0
        self._shard: BatchFile | None = None
        self._index: Index | None = None
        self._first_step = self._last_step = 0
        """The lowest and the highest step of the rows in the shard."""
        self._is_kept = False
        """True if the steps of the shard are kept for good, so that the shard is not deleted to make room."""
        self._step: int | None = None
        self._num_unsynced_rows = 0
        self._oldest_row_s = 0.0
        self._oldest_unsynced_s: float | None = None
        self._seal_at_s = float("inf")

    @property
    def refusal(self) -> str | None:
        """The reason why rows are dropped for now; None while rows are taken."""
        reason = self._backoff.reason
        return None if reason is None or self._backoff.is_over else reason

    def add(self, staged: Staged, measured: Measured, part: int) -> None:
        """Take one row and encode its payload. A batch that has no room for the row is written first."""
        if staged.moment.step != self._step:
            self._begin_step(staged.moment.step)
        if not staged.keep & KEEP_TENSOR:
            self.batch.add(staged, measured)
        elif not self.batch.add_part(staged, measured, part):
            self.flush()
            has_room = self.batch.add_part(staged, measured, part)
            assert has_room, "an empty batch has room for any part"
        if self.batch.num_rows == 1:
            self._oldest_row_s = self.clock()

    def add_small(self, records: Sequence[Staged], measured: Sequence[Measured]) -> int:
        """Take the first records as long as they are of one step and fit into the batch. Return the number taken.

        A record with a payload is taken alone.
        """
        step = records[0].moment.step
        if records[0].keep & KEEP_TENSOR:
            self.add(records[0], measured[0], 0)
            return 1
        if step != self._step:
            self._begin_step(step)
        if not self.batch.num_rows:
            self._oldest_row_s = self.clock()
        room = records[: self.batch.max_rows - self.batch.num_rows]
        ends = (number for number, one in enumerate(room) if one.moment.step != step or one.keep & KEEP_TENSOR)
        num = next(ends, len(room))
        self.batch.add_all(records[:num], measured[:num])
        return num

    def _begin_step(self, step: int) -> None:
        """Begin a new step. A shard has only steps that are kept for good, or only steps that may be deleted later."""
        is_kept = step in self.keep_steps
        if is_kept != self._is_kept:  # retention deletes only complete shards
            self.flush()
            self.seal(self.ledger.snapshot())
            self._is_kept = is_kept
        self._step = step

    def ran_out_of_memory(self, error: MemoryError) -> str:
        """Drop rows for a while, as after an error of the disk. Return the drop reason."""
        self.notices.failed("the writer has no memory; rows are dropped", error)
        self._backoff.failed(NO_MEMORY)
        return NO_MEMORY

    def flush_if_full(self) -> None:
        if self.batch.is_full:
            self.flush()

    def flush_due(self) -> None:
        """Flush, sync and seal, each if it is due."""
        now = self.clock()
        if self.batch.num_rows and now >= self._oldest_row_s + _FLUSH_SHARE * self.settings.flush_interval_s:
            self.flush()
        since_s = self._oldest_unsynced_s
        if since_s is not None and now >= since_s + self.settings.sync_interval_s and self._syncing.is_over:
            self.sync()
        if self._shard is not None and self._shard.num_rows and now >= self._seal_at_s:
            self.seal(self.ledger.snapshot())

    def flush(self) -> bool:
        """Write the batch, or drop and count its rows. Return True if no row was dropped."""
        num_rows = self.batch.num_rows
        if num_rows == 0:
            return True
        dropped_for: str | None = WRITER_ERROR
        try:
            dropped_for = self._write(self.batch.build())
        except MemoryError as error:
            dropped_for = self.ran_out_of_memory(error)
        finally:
            self.batch.clear()
            if dropped_for is not None:
                self.ledger.drop(dropped_for, num_rows)
        self._rotate_if_full()
        return dropped_for is None

    def sync(self) -> bool:
        """Make the written rows durable. Return True if all are durable."""
        if self._oldest_unsynced_s is None or self._shard is None:
            return True
        try:
            self._shard.file.sync()
        except OSError as error:
            # A disk that fails each sync is synced less often. Otherwise each failure would cost a shard.
            self._syncing.failed(drop_reason(error))
            may_sync_again = isinstance(error, StuckError) or error.errno in _MAY_SYNC_AGAIN
            if may_sync_again and not self._shard.file.is_sick:
                self.notices.failed(f"{self.directory}: a {self.kind} shard cannot be synced now", error)
            else:
                self._give_up_shard(
                    error, "synced; a new shard is begun, and rows that a loss of power may take are counted"
                )
            return False
        self._syncing.succeeded()
        self._oldest_unsynced_s = None
        self._count_synced()
        return True

    def seal(self, ledger: Mapping[str, object]) -> bool:
        """End the shard, and publish it with its index. Return False if the shard could not be sealed."""
        shard = self._shard
        if shard is None:
            return True
        name = shard_name(self.kind, self._next_number - 1)
        final = self.directory / name
        before = shard.num_bytes
        try:
            shard.seal(final, ledger)
        except OSError as error:
            self._add_bytes(shard.num_bytes - before)
            self._give_up_shard(error, "sealed; it stays open and readable")
            return False
        except BaseException:
            self._add_bytes(shard.num_bytes - before)
            self._leave_shard(shard)
            raise
        index, self._index = self._index, None
        self._shard = self._oldest_unsynced_s = None
        self._count_synced()
        self._add_bytes(shard.num_bytes - before)
        stored = StoredShard(final, shard.num_rows, shard.num_bytes)
        try:
            if index is not None:
                with self.notices.on_error(f"{final}: its index cannot be written; readers need none", is_aside=True):
                    index_bytes = index.write(self.disk, final, shard.num_bytes, self.memory)
                    self._add_bytes(index_bytes)
                    stored = stored._replace(num_bytes=shard.num_bytes + index_bytes)
        finally:
            self.quota.keep(self.kind, HeldShard(stored, self._last_step, self._is_kept))
        with self.notices.on_error(f"{self.directory} cannot be synced"):
            self.disk.persist_directory(self.directory)
        return True

    def restart(self) -> None:
        """Begin again after the recorder's own error. The open shard stays readable; pending rows are dropped."""
        self.ledger.drop(WRITER_ERROR, self.batch.num_rows)
        self.abandon_open()

    def abandon_open(self) -> None:
        """Close the open shard and forget the pending rows. The caller counts these rows as dropped."""
        self.batch.clear()
        if self._shard is not None:
            self._leave_shard(self._shard)

    def _write(self, built: BuiltBatch) -> str | None:
        reason = self._refuse(
            self.layout.max_message_bytes(built.batch) + (built.payload.nbytes if built.payload else 0)
        )
        if reason is not None:
            self._backoff.failed(reason)
            return reason
        for _ in range(2):  # tried again in a new shard, because the old file may have reached a size limit
            try:
                self._append(built)
            except OSError as error:
                reason = drop_reason(error)
                self._give_up_shard(
                    error, "written; a new shard is tried, and rows that cannot be written are dropped and counted"
                )
            else:
                self._backoff.succeeded()
                return None
        assert reason is not None
        self._backoff.failed(reason)
        return reason

    def _refuse(self, num_bytes: int) -> str | None:
        """Return why `num_bytes` must not be written, or None. Old shards are deleted for room first, if allowed."""
        try:
            reason = self.floor.refusal(self.directory, num_bytes)
        except OSError as error:
            self.notices.failed(f"{self.directory} cannot be used; rows are dropped", error)
            reason = drop_reason(error)
        if reason is not None:
            return reason
        if self._make_room(num_bytes):
            return None
        self.notices.say(
            QUOTA,
            f"{self.directory}: {self.kind} rows have used up their part of max_bytes and are dropped; raise max_bytes",
        )
        return QUOTA

    def _make_room(self, num_bytes: int) -> bool:
        kind, quota = self.kind, self.quota
        while not quota.fits(kind, num_bytes):
            if self.settings.on_quota != "retire" or not quota.could_fit(kind, num_bytes):
                return False
            dispensable = quota.most_dispensable(kind)
            if dispensable is None:
                return False
            self.retire(kind, dispensable)
        return True

    def _append(self, built: BuiltBatch) -> None:
        if self._shard is None:
            self._shard = self._begin_shard()
        shard, before, batch = self._shard, self._shard.num_bytes, built.batch
        ledger = self.ledger.snapshot(about_to_write=batch.num_rows)
        try:
            shard.append(batch, ledger, crcs=built.crcs, payload=built.payload)
        except OSError:
            raise
        except BaseException:  # after this error a footer could contradict the batches
            self._leave_shard(shard)
            raise
        self.ledger.add_written(batch.num_rows)
        self.is_direct = shard.file.is_direct
        self._add_bytes(shard.num_bytes - before)
        if self._oldest_unsynced_s is None:
            self._oldest_unsynced_s = self.clock()
        self._num_unsynced_rows += batch.num_rows
        low, high = min(built.steps), max(built.steps)
        self.last_written_step = high if self.last_written_step is None else max(high, self.last_written_step)
        is_first = shard.num_rows == batch.num_rows
        self._first_step = low if is_first else min(low, self._first_step)
        self._last_step = high if is_first else max(high, self._last_step)
        self.quota.saw(built.steps[-1])
        if self._index is not None:
            try:
                self._index.add(batch)
            except MemoryError:  # the rows are written, so they must not be counted as lost
                self._index = None

    def _begin_shard(self) -> BatchFile:
        name = shard_name(self.kind, self._next_number)
        path = self.directory / open_name(name)
        is_direct = self.settings.direct_io == "auto"
        self._next_number += 1  # the number grows after a failure, too, so that a name that is taken is not tried again
        shard = BatchFile(self.disk, path, self.layout, self.memory, is_direct=is_direct)
        self._index = Index() if self.has_index else None
        if self.kind != "tensors" and self.settings.seal_stats_s:
            self._seal_at_s = self.clock() + self.settings.seal_stats_s
        self._add_bytes(shard.num_bytes)
        return shard

    def _rotate_if_full(self) -> None:
        shard = self._shard
        if shard is None:
            return
        max_steps = self.quota.max_shard_steps
        has_many_steps = max_steps is not None and self._last_step - self._first_step >= max_steps
        if (
            shard.num_bytes >= self._max_shard_bytes
            or shard.num_rows >= self.settings.shard_rows
            or (has_many_steps and shard.num_rows)
        ):
            self.seal(self.ledger.snapshot())

    def _give_up_shard(self, error: OSError, verb: str) -> None:
        """Log that the shard cannot be `verb` (such as "synced"), and leave it. The next batch begins a new shard."""
        self.notices.failed(f"{self.directory}: a {self.kind} shard cannot be {verb}", error)
        if self._shard is not None:
            self._leave_shard(self._shard)

    def _leave_shard(self, shard: BatchFile) -> None:
        """Leave the shard open and readable up to its last batch. Rows that cannot be synced are counted as suspect."""
        self._shard = self._index = self._oldest_unsynced_s = None
        if not shard.file.is_synced and not shard.file.is_sick:
            with contextlib.suppress(OSError):
                shard.file.sync()
        if shard.file.is_synced:
            self._count_synced()
        else:
            self.ledger.add_suspect(self._num_unsynced_rows)
            self._num_unsynced_rows = 0
        left = shard.abandon()
        if left is None:
            self.quota.add(self.kind, -shard.num_bytes)
        else:
            self.quota.keep(self.kind, HeldShard(left, self._last_step, self._is_kept))

    def _count_synced(self) -> None:
        self.ledger.add_synced(self._num_unsynced_rows)
        self._num_unsynced_rows = 0

    def _add_bytes(self, num_bytes: int) -> None:
        self.quota.add(self.kind, num_bytes)
        self.written_bytes += num_bytes
