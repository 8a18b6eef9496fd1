"""One IPC file with checked batches, from creation to seal: a shard, or the index of a shard.

The caller handles errors: it knows whether to begin another file.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from crc32c import crc32c

from ...columns import SCHEMA
from ...format.integrity import Crcs, batch_crcs, batch_metadata, seal_metadata
from ...format.rundir import index_name, open_name
from .file import AppendFile, Disk, PageMemory
from .ipc import FooterBlock, IpcFormat, Payload

_INDEX_BATCH_ROWS = 8192
_INDEX_BATCH_BYTES = 4 << 20
_COMPRESS_ALONE = pa.ipc.IpcWriteOptions(compression="zstd", use_threads=False)
_READ_ALONE = pa.ipc.IpcReadOptions(use_threads=False)


class StoredShard(NamedTuple):
    """A shard that is no longer written: it is sealed, or was left without a seal."""

    path: Path
    num_rows: int
    num_bytes: int


class BatchFile:
    """An IPC file whose batches carry a number, the ledger and checksums, and which ends with a seal."""

    def __init__(self, disk: Disk, path: Path, layout: IpcFormat, memory: PageMemory, *, is_direct: bool) -> None:
        """Create the file at `path`, with its schema in it.

        Raises:
            OSError: the file was not created, or was removed again.
        """
        self.num_rows = 0
        self._disk = disk
        self._layout = layout
        self._memory = memory
        self._blocks: list[FooterBlock] = []
        self._file = AppendFile(disk, path, memory, is_direct=is_direct)
        self._crc = crc32c(layout.preamble)
        try:
            self._file.append_bytes(layout.preamble)
        except BaseException:
            self.discard()
            raise

    @property
    def num_bytes(self) -> int:
        return self._file.end

    @property
    def is_direct(self) -> bool:
        return self._file.is_direct

    @property
    def is_synced(self) -> bool:
        return self._file.synced_end == self._file.end

    @property
    def is_sick(self) -> bool:
        return self._file.is_sick

    @property
    def num_batches(self) -> int:
        return len(self._blocks)

    def append(
        self,
        batch: pa.RecordBatch,
        ledger: Mapping[str, object],
        *,
        crcs: Crcs | None = None,
        payload: Payload | None = None,
    ) -> None:
        """Write one batch, which must not be a slice. After an OSError the file may be longer than before.

        `ledger` includes this batch. `crcs` are the checksums of the batch, if they are already known. `payload` has
        the values of `data`, if the batch itself has none.
        """
        metadata = batch_metadata(batch, number=self.num_batches, ledger=ledger, crcs=crcs)
        self._append(batch, metadata, payload)
        self.num_rows += batch.num_rows

    def append_around(self, batch: pa.RecordBatch, ledger: Mapping[str, object], memory: PageMemory) -> None:
        """Append a batch that contains its payload, in the layout of a writer's batches.

        `ledger` includes this batch. The payload is copied to `memory`, which must not be the file's own.
        """
        data_field = batch.schema.get_field_index("data")
        validity, offsets, values = batch.column(data_field).buffers()
        ends = np.frombuffer(offsets, np.int64)[: batch.num_rows + 1] if offsets is not None else np.zeros(1, np.int64)
        if not ends[-1] or ends[0]:
            self.append(batch, ledger)
            return
        crcs = batch_crcs(batch)
        memory.reserve(int(ends[-1]))
        payload = Payload(memory.data[: ends[-1]], ends)
        payload.values[:] = np.frombuffer(values, np.uint8)[: ends[-1]]
        buffers = [validity, pa.py_buffer(np.zeros_like(ends)), pa.py_buffer(b"")]
        empty = pa.Array.from_buffers(batch.schema[data_field].type, batch.num_rows, buffers)
        bare = batch.set_column(data_field, batch.schema[data_field], empty)
        self.append(bare, ledger, crcs=crcs, payload=payload)

    def sync(self) -> None:
        self._file.sync()

    def seal(self, final: Path, ledger: Mapping[str, object]) -> None:
        """Write the seal and the footer, and publish the file under the path `final`."""
        number = self.num_batches
        schema = self._layout.schema
        empty = pa.RecordBatch.from_arrays([pa.nulls(0, field.type) for field in schema], schema=schema)
        self._append(empty, seal_metadata(number=number, num_batches=number + 1, ledger=ledger, has_file_crc=True))
        self._file.append_bytes(self._layout.ending(self._blocks, self._crc))
        self._file.publish(final)

    def abandon(self) -> StoredShard | None:
        """Stop writing, and leave the appended batches for readers to salvage; return None if there are no batches."""
        if not self.num_rows:
            self.discard()
            return None
        if not self.is_sick:  # after a failed sync the file is not touched again
            with contextlib.suppress(OSError):
                self._file.cut_back()
        with contextlib.suppress(OSError):
            self._file.close()
        return StoredShard(self._file.path, self.num_rows, self.num_bytes)

    def discard(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()
        with contextlib.suppress(OSError):
            self._disk.unlink(self._file.path)

    def _append(self, batch: pa.RecordBatch, metadata: Mapping[bytes, bytes], payload: Payload | None = None) -> None:
        offset = self._file.end
        if payload is None:
            start = self._file.next_start(self._layout.max_message_bytes(batch))
            block = self._layout.write(batch, metadata, self._memory.data, start)
            crc = crc32c(self._memory.data[start : start + block.metadata_bytes + block.body_bytes].data, self._crc)
            self._file.append(block.metadata_bytes + block.body_bytes)
        else:
            lead, trail, block = self._layout.write_around(batch, metadata, payload, self._file.gap)
            crc = crc32c(trail, crc32c(payload.values.data, crc32c(lead, self._crc)))
            self._file.append_around(lead, payload.values, trail)
        self._crc = crc
        self._blocks.append(block._replace(offset=offset))


class Index:
    """The metadata columns of a growing shard, with batch and row number of each row, in memory until the seal.

    A row takes 350 bytes, and a shard may have 65,536 rows, so rows wait compressed, at a twentieth of that size.
    """

    def __init__(self, schema: pa.Schema = SCHEMA) -> None:
        """Begin the index of a shard with this schema, which may be of any version."""
        position_fields = [pa.field(name, pa.int32(), nullable=False) for name in ("batch", "row")]
        self._light = [name for name in schema.names if name != "data"]
        self._schema = pa.schema([*map(schema.field, self._light), *position_fields], metadata=schema.metadata)
        self._waiting: list[pa.Buffer] = []
        self._pending: list[pa.RecordBatch] = []
        self._num_pending_rows = 0
        self._num_pending_bytes = 0
        """The bytes of the column `units` of the pending rows."""
        self._num_batches = 0

    def add(self, batch: pa.RecordBatch) -> None:
        """Keep all columns of the next batch except its payload."""
        self._pending.append(batch.select(self._light))
        self._num_pending_rows += batch.num_rows
        self._num_pending_bytes += batch.column("units").nbytes if "units" in self._light else 0
        if self._num_pending_rows >= _INDEX_BATCH_ROWS or self._num_pending_bytes >= _INDEX_BATCH_BYTES:
            self._compress_pending()

    def write(self, disk: Disk, shard: Path, shard_bytes: int, memory: PageMemory) -> int:
        """Write the index next to the sealed `shard`; return the size of the index in bytes."""
        final = shard.with_name(index_name(shard.name))
        metadata = {**(self._schema.metadata or {}), b"recorder_shard_bytes": b"%d" % shard_bytes}
        layout = IpcFormat(self._schema.with_metadata(metadata))
        file = BatchFile(disk, final.with_name(open_name(final.name)), layout, memory, is_direct=False)
        try:
            for waiting in self._waiting:
                file.append(pa.ipc.open_stream(waiting, options=_READ_ALONE).read_next_batch(), {})
            if self._pending:
                file.append(self._take_pending(), {})
            file.seal(final, {})
        except BaseException:
            file.discard()
            raise
        return file.num_bytes

    def _compress_pending(self) -> None:
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, self._schema, options=_COMPRESS_ALONE) as stream:
            stream.write_batch(self._take_pending())
        self._waiting.append(sink.getvalue())

    def _take_pending(self) -> pa.RecordBatch:
        (light,) = pa.Table.from_batches(self._pending).combine_chunks().to_batches()
        sizes = [batch.num_rows for batch in self._pending]
        numbers = np.repeat(np.arange(self._num_batches, self._num_batches + len(sizes), dtype=np.int32), sizes)
        rows = np.concatenate([np.arange(size, dtype=np.int32) for size in sizes])
        position_columns = [
            pa.Array.from_buffers(pa.int32(), len(rows), [None, pa.py_buffer(n)]) for n in (numbers, rows)
        ]
        self._num_batches += len(sizes)
        self._pending, self._num_pending_rows, self._num_pending_bytes = [], 0, 0
        return pa.RecordBatch.from_arrays([*light.columns, *position_columns], schema=self._schema)
