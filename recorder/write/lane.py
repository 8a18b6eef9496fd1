"""Owns one kind of shard in a writer directory: the batch being filled, and the file being written.

A refusal of the disk never raises from here: rows are dropped with a reason, and the disk is left alone for a while.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pyarrow as pa

from ..format.rundir import open_name, shard_name
from ..records import KEEP_TENSOR, PART_BYTES, Measured, Staged
from .backoff import Backoff, drop_reason
from .file import Disk, PageMemory
from .ipc import Layout
from .ledger import QUOTA, WRITER_ERROR, Ledger
from .notices import Notices
from .quota import Floor, Quota
from .rows import RowBatch
from .settings import WriteSettings
from .shard import BatchFile, Index, StoredShard


class Lane:
    """Rows of one kind, on their way from memory into shards of a writer directory. Writer thread only."""

    def __init__(
        self,
        kind: str,
        *,
        directory: Path,
        batch: RowBatch,
        layout: Layout,
        has_index: bool,
        settings: WriteSettings,
        disk: Disk,
        memory: PageMemory,
        ledger: Ledger,
        quota: Quota,
        floor: Floor,
        retire: Callable[[StoredShard], None],
        notices: Notices,
        clock: Callable[[], float],
    ) -> None:
        self.written_bytes = 0
        self._kind = kind
        self._directory = directory
        self._batch = batch
        self._backoff = Backoff(clock)
        self._layout = layout
        self._has_index = has_index
        self._settings = settings
        self._disk = disk
        self._memory = memory
        self._ledger = ledger
        self._quota = quota
        self._floor = floor
        self._retire = retire
        self._notices = notices
        self._clock = clock
        self._max_shard_bytes = min(settings.shard_bytes, quota.max_shard_bytes(kind))
        self._next_number = 0
        self._shard: BatchFile | None = None
        self._index = Index()
        self._oldest_row_s = 0.0
        self._oldest_unsynced_s: float | None = None

    @property
    def refusal(self) -> str | None:
        """Why rows are dropped unseen for now; None where they are welcome."""
        return None if self._backoff.is_over else self._backoff.reason

    @property
    def num_pending_rows(self) -> int:
        """Rows taken but not written."""
        return self._batch.num_rows

    def add(self, staged: Staged, measured: Measured, part: int) -> None:
        """Take one row; the payload is copied. A batch without room for it is written first."""
        has_payload = bool(staged.keep & KEEP_TENSOR)
        if has_payload and not self._batch.has_room(min(len(staged.block.data), PART_BYTES)):
            self.flush()
        if self._batch.num_rows == 0:
            self._oldest_row_s = self._clock()
        if has_payload:
            self._batch.add_part(staged, measured, part)
        else:
            self._batch.add(staged, measured)

    def flush_if_full(self) -> None:
        if self._batch.is_full:
            self.flush()

    def keep_up(self) -> None:
        """Flush and sync what is due."""
        now = self._clock()
        if self._batch.num_rows and now >= self._oldest_row_s + self._settings.flush_interval_s:
            self.flush()
        if self._oldest_unsynced_s is not None and now >= self._oldest_unsynced_s + self._settings.sync_interval_s:
            self.sync()

    def flush(self) -> bool:
        """Write the batch, or drop its rows and count them. True where nothing was dropped."""
        num_rows = self._batch.num_rows
        if num_rows == 0:
            return True
        dropped_for: str | None = WRITER_ERROR
        try:
            dropped_for = self._write(self._batch.build())
        finally:
            self._batch.clear()
            if dropped_for is not None:
                self._ledger.drop(dropped_for, num_rows)
        return dropped_for is None

    def sync(self) -> bool:
        """Make what was written durable. True where it is."""
        if self._oldest_unsynced_s is None or self._shard is None:
            return True
        self._oldest_unsynced_s = None
        try:
            self._shard.sync()
        except OSError as error:
            # The kernel may have thrown the pages away and say yes the next time: this file is not touched again.
            self._give_up_shard(error, cut_back=False)
            return False
        return True

    def seal(self, ledger: Mapping[str, object]) -> bool:
        """End the shard and publish it, with its index. True where there was none, or all went well."""
        shard, self._shard = self._shard, None
        index, self._index = self._index, Index()
        self._oldest_unsynced_s = None
        if shard is None:
            return True
        name = shard_name(self._kind, self._next_number - 1)
        final = self._directory / name
        before = shard.num_bytes
        try:
            shard.seal(final, ledger)
        except OSError as error:
            self._shard = shard
            self._add_bytes(shard.num_bytes - before)
            self._give_up_shard(error)
            return False
        index_bytes = self._write_index(index, final, shard.num_bytes)
        self._add_bytes(shard.num_bytes - before + index_bytes)
        self._quota.keep(self._kind, StoredShard(final, shard.num_rows, shard.num_bytes + index_bytes))
        with self._notices.on_error(f"{self._directory} cannot be synced"):
            self._disk.sync_directory(self._directory)
        return True

    def _write(self, batch: pa.RecordBatch) -> str | None:
        """Write a batch. Returns why its rows must be dropped, or None."""
        reason = self._refuse(self._layout.max_message_bytes(batch))
        if reason is not None:
            self._backoff.failed(reason)
            return reason
        for _ in range(2):  # once more in another shard: the first may have met a limit of its own
            try:
                self._append(batch)
            except OSError as error:
                reason = drop_reason(error)
                self._give_up_shard(error)
            else:
                self._backoff.succeeded()
                self._rotate_if_full()
                return None
        assert reason is not None
        self._backoff.failed(reason)
        return reason

    def _refuse(self, num_bytes: int) -> str | None:
        """Why `num_bytes` must not be written, after making room for them where that is allowed."""
        try:
            reason = self._floor.refusal(self._directory, num_bytes)
        except OSError as error:
            self._notices.failed(f"{self._directory} cannot be used; rows are dropped", error)
            reason = drop_reason(error)
        if reason is not None:
            return reason
        may_retire = self._settings.on_quota == "retire" and self._quota.could_fit(self._kind, num_bytes)
        while may_retire and not self._quota.fits(self._kind, num_bytes):
            oldest = self._quota.retire(self._kind)
            assert oldest is not None, "could_fit promised that enough can go"
            self._retire(oldest)
        if self._quota.fits(self._kind, num_bytes):
            return None
        self._notices.say(
            QUOTA, f"{self._directory}: the {self._kind} have used up their part of max_bytes; rows are dropped"
        )
        return QUOTA

    def _append(self, batch: pa.RecordBatch) -> None:
        if self._shard is None:
            self._shard = self._begin_shard()
        shard, before = self._shard, self._shard.num_bytes
        shard.append(batch, self._ledger.snapshot(about_to_write=batch.num_rows))
        self._ledger.add_written(batch.num_rows)
        self._add_bytes(shard.num_bytes - before)
        if self._has_index:
            self._index.add(batch)
        if self._oldest_unsynced_s is None:
            self._oldest_unsynced_s = self._clock()

    def _begin_shard(self) -> BatchFile:
        name = shard_name(self._kind, self._next_number)
        path = self._directory / open_name(name)
        is_direct = self._settings.direct_io == "auto"
        shard = BatchFile(self._disk, path, self._layout, self._memory, is_direct=is_direct)
        self._next_number += 1
        self._add_bytes(shard.num_bytes)
        return shard

    def _rotate_if_full(self) -> None:
        shard = self._shard
        assert shard is not None
        if shard.num_bytes >= self._max_shard_bytes or shard.num_rows >= self._settings.shard_rows:
            self.seal(self._ledger.snapshot())

    def _give_up_shard(self, error: OSError, *, cut_back: bool = True) -> None:
        """Leave the shard as it is, open and readable up to its last batch; the next batch begins another."""
        self._notices.failed(f"{self._directory}: a {self._kind} shard cannot be written; the next one is tried", error)
        shard, self._shard = self._shard, None
        self._index = Index()
        self._oldest_unsynced_s = None
        if shard is None:
            return
        left = shard.abandon(cut_back=cut_back)
        if left is None:
            self._quota.add(self._kind, -shard.num_bytes)
        else:
            self._quota.keep(self._kind, left)

    def _write_index(self, index: Index, shard: Path, shard_bytes: int) -> int:
        num_bytes = 0
        if self._has_index:
            with self._notices.on_error(f"{shard}: its index cannot be written; readers do without"):
                num_bytes = index.write(self._disk, shard, shard_bytes, self._memory)
        return num_bytes

    def _add_bytes(self, num_bytes: int) -> None:
        self._quota.add(self._kind, num_bytes)
        self.written_bytes += num_bytes
