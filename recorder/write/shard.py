"""Writes one Arrow IPC file with checked batches, from creation to seal: a shard, or the index of a shard.

The caller handles errors, because it knows whether to begin another file. Arrow's own file writer would call Python for
each of the 100 buffers of a batch. It would take 5 times as much CPU time, and hand the GIL over 100 times. So each
batch is written as a stream into memory in one call. A file differs from a stream only in its footer, whose list of
batches is filled in here.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from crc32c import crc32c

from ..columns import SCHEMA
from ..format.integrity import FILE_CRC_KEY, NO_DIGITS, Crcs, batch_crcs, batch_metadata, joined_crc, seal_metadata
from ..format.rundir import index_name, open_name
from .file import AppendFile, Disk, PageMemory

_MAGIC = b"ARROW1"
_PREFIX_BYTES = 8
"""The bytes before a message's metadata: a continuation marker, and the length of the metadata."""
_END_OF_STREAM = struct.pack("<II", 0xFFFFFFFF, 0)
_FOOTER_BATCHES = 3
"""The index of `recordBatches` in the table Footer of Arrow's File.fbs."""
_HEADER, _BODY_LENGTH, _BUFFERS = 2, 3, 2
"""The indexes of `header` and `bodyLength` in Arrow's table Message, and of `buffers` in RecordBatch."""
_BUFFER = struct.Struct("<qq")
"""The layout of Arrow's struct Buffer: the buffer's offset in the body, and its length."""
_SLACK_BYTES = 64 << 10
"""The most bytes that a message adds to its batch: custom metadata, and zstd's frames around 100 buffers."""

_LARGE_BYTES = 1 << 20
"""From this many bytes on, joining a payload's checksum to the file's is cheaper than reading the payload again."""


class FooterBlock(NamedTuple):
    """An entry of the footer, with the position of a batch in its file."""

    offset: int
    metadata_bytes: int
    body_bytes: int


class Payload(NamedTuple):
    """The values of the column `data` of a batch, to be written from their own memory."""

    values: npt.NDArray[np.uint8]
    """The bytes of all values; they start at a multiple of `file.GRAIN_BYTES` in memory and in the file."""
    ends: npt.NDArray[np.int64]
    """The column's offsets: a 0, then the end of each row's value."""
    crc: int
    """The CRC32C of the values."""

    @property
    def nbytes(self) -> int:
        return int(self.ends[-1])


class IpcFormat:
    """The bytes that all files of one schema share, and the functions that turn batches into messages."""

    def __init__(self, schema: pa.Schema, compression: str | None = None) -> None:
        self.schema = schema
        self.is_compressed = compression is not None
        # Arrow's threads are off, because they would compete with training for the cores.
        self._options = pa.ipc.IpcWriteOptions(compression=compression, use_threads=False)
        message = schema.serialize().to_pybytes()
        self._schema_bytes = len(message)
        self.preamble = _MAGIC.ljust(8, b"\0") + message
        self._footer = _with_checksum(_empty_footer(schema))
        num_buffers = [field.type.num_buffers for field in schema]
        self._num_buffers = sum(num_buffers)
        self._payload_buffer = sum(num_buffers[: schema.get_field_index("data") + 1]) - 1

    def max_message_bytes(self, batch: pa.RecordBatch) -> int:
        """Return the most bytes that `write` may need for `batch`."""
        return int(1.01 * pa.ipc.get_record_batch_size(batch)) + _SLACK_BYTES

    def write(
        self, batch: pa.RecordBatch, metadata: Mapping[bytes, bytes], memory: npt.NDArray[np.uint8], start: int
    ) -> FooterBlock:
        """Write a batch's message into `memory` at `start`. Arrow overwrites the bytes before `start` with the schema.

        Return the batch's entry of the footer, with its offset counted from `start`.
        """
        assert start >= self._schema_bytes, "Arrow writes the schema into the memory before `start`"
        sink = pa.FixedSizeBufferWriter(pa.py_buffer(memory[start - self._schema_bytes :]))
        pa.ipc.new_stream(sink, self.schema, options=self._options).write_batch(batch, custom_metadata=metadata)
        message_bytes = sink.tell() - self._schema_bytes
        metadata_bytes = _PREFIX_BYTES + int.from_bytes(memory[start + 4 : start + 8].tobytes(), "little")
        return FooterBlock(0, metadata_bytes, message_bytes - metadata_bytes)

    def write_around(
        self, batch: pa.RecordBatch, metadata: Mapping[bytes, bytes], payload: Payload, gap_behind: Callable[[int], int]
    ) -> tuple[bytes, bytes, FooterBlock]:
        """Return the bytes before a batch's payload, the bytes after it, and the batch's entry of the footer.

        The payload itself is appended without a copy. The column `data` of the batch is empty in all rows, and
        `payload` has the values of the column. `gap_behind` is `AppendFile.gap` of the file. The offset in the entry of
        the footer counts from the first byte that is returned.
        """
        sink = pa.BufferOutputStream()
        pa.ipc.new_stream(sink, self.schema, options=self._options).write_batch(batch, custom_metadata=metadata)
        message = bytearray(memoryview(sink.getvalue())[self._schema_bytes :])
        metadata_bytes = _PREFIX_BYTES + int.from_bytes(message[4:8], "little")
        buffers, body_length = _batch_fields(message)
        values = buffers + _BUFFER.size * self._payload_buffer
        (body_bytes,) = struct.unpack_from("<q", message, body_length)
        offsets, offsets_bytes, split, _ = struct.unpack_from("<4q", message, values - _BUFFER.size)
        content = np.frombuffer(message, np.uint8)[: metadata_bytes + body_bytes]
        content[metadata_bytes + offsets : metadata_bytes + offsets + offsets_bytes] = payload.ends.view(np.uint8)
        lead_bytes = metadata_bytes + split  # the columns after `data` come after the payload
        gap = gap_behind(lead_bytes)
        padding = -payload.nbytes % 8
        more = gap + payload.nbytes + padding
        _BUFFER.pack_into(message, values, split + gap, payload.nbytes)
        num_later = self._num_buffers - self._payload_buffer - 1
        later = np.frombuffer(message, "<i8", 2 * num_later, values + _BUFFER.size)
        later[::2] += more
        struct.pack_into("<q", message, body_length, body_bytes + more)
        lead, trail = content[:lead_bytes].tobytes() + bytes(gap), bytes(padding) + content[lead_bytes:].tobytes()
        return lead, trail, FooterBlock(0, metadata_bytes, body_bytes + more)

    def ending(self, blocks: Sequence[FooterBlock], crc: int) -> bytes:
        """Return the bytes after the last batch, with the file's checksum. `crc` is that of all earlier bytes."""
        footer = bytearray(self._footer)
        (table,) = struct.unpack_from("<I", footer, 0)
        field = _field(footer, int(table), _FOOTER_BATCHES)
        footer += bytes((4 - len(footer)) % 8)  # the length takes 4 bytes, and blocks are aligned to 8
        struct.pack_into("<I", footer, field, len(footer) - field)
        footer += struct.pack("<I", len(blocks)) + b"".join(struct.pack("<qi4xq", *block) for block in blocks)
        ending = bytearray(_END_OF_STREAM + footer + struct.pack("<i", len(footer)) + _MAGIC)
        digits = ending.index(NO_DIGITS, ending.index(FILE_CRC_KEY))
        ending[digits : digits + len(NO_DIGITS)] = b"%08x" % crc32c(ending, crc)
        return bytes(ending)


def _batch_fields(message: bytearray) -> tuple[int, int]:
    """Return two positions in a batch's message (flatbuffers): the first entry of `buffers`, and `bodyLength`."""
    (root,) = struct.unpack_from("<I", message, _PREFIX_BYTES)
    root += _PREFIX_BYTES
    header = _field(message, root, _HEADER)
    header += struct.unpack_from("<I", message, header)[0]
    buffers = _field(message, header, _BUFFERS)
    buffers += struct.unpack_from("<I", message, buffers)[0]
    return buffers + 4, _field(message, root, _BODY_LENGTH)


def _field(message: bytearray, table: int, number: int) -> int:
    (vtable_distance,) = struct.unpack_from("<i", message, table)
    (field,) = struct.unpack_from("<H", message, table - vtable_distance + 4 + 2 * number)
    assert field, "a flatbuffer of a batch with rows must have all fields"
    return int(table) + int(field)


def _empty_footer(schema: pa.Schema) -> bytes:
    sink = pa.BufferOutputStream()
    pa.ipc.new_file(sink, schema).close()
    file: bytes = sink.getvalue().to_pybytes()
    (nbytes,) = struct.unpack("<i", file[-10:-6])
    return file[-10 - nbytes : -10]


def _with_checksum(footer: bytes) -> bytes:
    """Put a new flatbuffers root table before an Arrow footer, with room for a file checksum in `custom_metadata`.

    pyarrow itself writes this metadata only since version 21, and version 20 is supported, too. The old root stays in
    the bytes, unused.
    """
    (old,) = struct.unpack_from("<I", footer, 0)
    strings = b"".join(
        struct.pack("<I", len(text)) + (text + b"\0").ljust(-(-(len(text) + 1) // 4) * 4, b"\0")
        for text in (FILE_CRC_KEY, NO_DIGITS)
    )
    head_bytes = 72 + len(strings)
    head_bytes += -head_bytes % 8  # the new bytes keep the 8-byte alignment of the old footer
    version = struct.unpack_from("<h", footer, _field(bytearray(footer), old, 0))[0]
    vectors = []
    for number, slot in enumerate((24, 28, 32), start=1):  # the old fields: schema, dictionaries, batches
        at = _field(bytearray(footer), old, number)
        vectors.append(head_bytes + at + struct.unpack_from("<I", footer, at)[0] - slot)
    value = 72 + 4 + -(-(len(FILE_CRC_KEY) + 1) // 4) * 4
    head = struct.pack("<I7H2x", 20, 14, 24, 20, 4, 8, 12, 16)  # head: root table at 20; root's vtable at offset 4
    head += struct.pack("<i4Ih2x", 16, *vectors, 44 - 36, version)  # the root table, at offset 20
    head += struct.pack("<II", 1, 60 - 48)  # at offset 44 the root's metadata: one pair
    head += struct.pack("<4H", 8, 12, 4, 8)  # at offset 52 the pair's vtable
    head += struct.pack("<iII", 8, 72 - 64, value - 68)  # at offset 60 the pair; its texts are at offset 72
    return (head + strings).ljust(head_bytes, b"\0") + footer


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
    """An IPC file that ends with a seal. Each batch carries its number, the counts of rows so far, and checksums."""

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
        self.file = AppendFile(disk, path, memory, is_direct=is_direct)
        self._crc = crc32c(layout.preamble)
        try:
            self.file.append_bytes(layout.preamble)
        except BaseException:
            self.discard()
            raise

    @property
    def num_bytes(self) -> int:
        return self.file.end

    def append(
        self, batch: pa.RecordBatch, ledger: Mapping[str, object], *, crcs: Crcs | None = None,
        payload: Payload | None = None,
    ) -> None:  # fmt: skip
        """Write one batch, which must not be a slice. After an OSError the file may be longer than before.

        `ledger` has the counts of rows, with this batch. `crcs` are the checksums of the batch, if they are already
        known. `payload` has the values of the column `data`, if the batch itself does not contain them.
        """
        metadata = batch_metadata(batch, number=len(self._blocks), ledger=ledger, crcs=crcs)
        self._append(batch, metadata, payload)
        self.num_rows += batch.num_rows

    def append_around(self, batch: pa.RecordBatch, ledger: Mapping[str, object], memory: PageMemory) -> None:
        """Append a batch that contains its payload. The file gets the layout that a writer's batches have.

        `ledger` has the counts of rows, with this batch. The payload is copied to `memory`, which must not be the
        file's own buffer.
        """
        data_field = batch.schema.get_field_index("data")
        validity, offsets, values = batch.column(data_field).buffers()
        ends = np.frombuffer(offsets, np.int64)[: batch.num_rows + 1] if offsets is not None else np.zeros(1, np.int64)
        if not ends[-1] or ends[0]:
            self.append(batch, ledger)
            return
        crcs = batch_crcs(batch)
        memory.reserve(int(ends[-1]))
        payload = Payload(memory.data[: ends[-1]], ends, crcs["data"][-1] or 0)
        payload.values[:] = np.frombuffer(values, np.uint8)[: ends[-1]]
        buffers = [validity, pa.py_buffer(np.zeros_like(ends)), pa.py_buffer(b"")]
        empty = pa.Array.from_buffers(batch.schema[data_field].type, batch.num_rows, buffers)
        bare = batch.set_column(data_field, batch.schema[data_field], empty)
        self.append(bare, ledger, crcs=crcs, payload=payload)

    def seal(self, final: Path, ledger: Mapping[str, object]) -> None:
        """Write the seal and the footer, and publish the file under the path `final`."""
        number = len(self._blocks)
        schema = self._layout.schema
        empty = pa.RecordBatch.from_arrays([pa.nulls(0, field.type) for field in schema], schema=schema)
        self._append(empty, seal_metadata(number=number, ledger=ledger, has_file_crc=True))
        self.file.append_bytes(self._layout.ending(self._blocks, self._crc))
        self.file.publish(final)

    def abandon(self) -> StoredShard | None:
        """Stop writing, and leave the batches for readers to salvage. Delete a file without batches."""
        if not self.num_rows:
            self.discard()
            return None
        if not self.file.is_sick:  # after a failed sync the file must not be used again
            with contextlib.suppress(OSError):
                self.file.cut_back()
        with contextlib.suppress(OSError):
            self.file.close()
        return StoredShard(self.file.path, self.num_rows, self.num_bytes)

    def discard(self) -> None:
        with contextlib.suppress(OSError):
            self.file.close()
        with contextlib.suppress(OSError):
            self._disk.unlink(self.file.path)

    def _append(self, batch: pa.RecordBatch, metadata: Mapping[bytes, bytes], payload: Payload | None = None) -> None:
        offset = self.file.end
        if payload is None:
            start = self.file.next_start(self._layout.max_message_bytes(batch))
            block = self._layout.write(batch, metadata, self._memory.data, start)
            crc = crc32c(self._memory.data[start : start + block.metadata_bytes + block.body_bytes].data, self._crc)
            self.file.append(block.metadata_bytes + block.body_bytes)
        else:
            lead, trail, block = self._layout.write_around(batch, metadata, payload, self.file.gap)
            crc = crc32c(lead, self._crc)
            if payload.nbytes < _LARGE_BYTES:
                crc = crc32c(payload.values.data, crc)
            else:
                crc = joined_crc(crc, payload.crc, payload.nbytes)
            crc = crc32c(trail, crc)
            self.file.append_around(lead, payload.values, trail)
        self._crc = crc
        self._blocks.append(block._replace(offset=offset))


class Index:
    """The index of a growing shard: all columns but the payload, and each row's batch number and row number.

    The index stays in memory until the shard is sealed. A row takes 350 bytes, and a shard may have 65,536 rows, so
    rows wait compressed, at a twentieth of that size.
    """

    def __init__(self, schema: pa.Schema = SCHEMA) -> None:
        """Begin the index of a shard with this schema, which may be a schema of any format version."""
        position_fields = [pa.field(name, pa.int32(), nullable=False) for name in ("batch", "row")]
        self._light = [name for name in schema.names if name != "data"]
        self._schema = pa.schema([*map(schema.field, self._light), *position_fields], metadata=schema.metadata)
        self._waiting: list[pa.Buffer] = []
        self._pending: list[pa.RecordBatch] = []
        self._num_pending_rows = 0
        self._num_pending_bytes = 0
        """The bytes that the column `units` (sums of neurons or channels) takes in the pending rows."""
        self._num_batches = 0

    def add(self, batch: pa.RecordBatch) -> None:
        """Keep all columns of the next batch except its payload."""
        self._pending.append(batch.select(self._light))
        self._num_pending_rows += batch.num_rows
        self._num_pending_bytes += batch.column("units").nbytes if "units" in self._light else 0
        if self._num_pending_rows >= _INDEX_BATCH_ROWS or self._num_pending_bytes >= _INDEX_BATCH_BYTES:
            self._compress_pending()

    def write(self, disk: Disk, shard: Path, shard_bytes: int, memory: PageMemory) -> int:
        """Write the index next to the sealed `shard`. Return the size of the index in bytes."""
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
