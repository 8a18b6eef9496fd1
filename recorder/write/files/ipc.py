"""Turns batches into the bytes of an Arrow IPC file. Touches no file.

Arrow's own file writer would call back into Python for every buffer, 100 times a batch: 5 times the CPU time, and 100
hand-overs of the GIL. So each batch is written as a stream into memory in one call. A file differs from a stream only
in its footer, whose list of batches is filled in here.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from crc32c import crc32c

from ...format.integrity import FILE_CRC_KEY, NO_DIGITS

_MAGIC = b"ARROW1"
_PREFIX_BYTES = 8
"""The bytes of the continuation mark and the length before a message's metadata."""
_END_OF_STREAM = struct.pack("<II", 0xFFFFFFFF, 0)
_FOOTER_BATCHES = 3
"""The index of `recordBatches` in the table Footer of Arrow's File.fbs."""
_HEADER, _BODY_LENGTH, _BUFFERS = 2, 3, 2
"""The indexes of `header` and `bodyLength` in Arrow's table Message, and of `buffers` in RecordBatch."""
_BUFFER = struct.Struct("<qq")
"""The layout of a buffer: its offset in the body, and its length."""
_SLACK_BYTES = 64 << 10
"""The most bytes that a message adds to its batch: custom metadata, and zstd's frames around 100 buffers."""


class FooterBlock(NamedTuple):
    """An entry of the footer, with the position of a batch in its file."""

    offset: int
    metadata_bytes: int
    body_bytes: int


class Payload(NamedTuple):
    """The values of the column `data` of a batch, to be written from their own memory."""

    values: npt.NDArray[np.uint8]
    """The bytes, as many as the last of `ends`; they start at a multiple of `file.GRAIN_BYTES` in memory and file."""
    ends: npt.NDArray[np.int64]
    """The column's offsets: a 0, then the end of each row's value."""

    @property
    def nbytes(self) -> int:
        return int(self.ends[-1])


class IpcFormat:
    """The fixed parts of files of one schema, and the functions that turn batches into messages."""

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
        """Write the message of a batch at `start`. Arrow writes the schema before it, and overwrites the bytes there.

        The block, with its offset counted from `start`, is returned.
        """
        assert start >= self._schema_bytes, "the schema needs room before the message"
        sink = pa.FixedSizeBufferWriter(pa.py_buffer(memory[start - self._schema_bytes :]))
        pa.ipc.new_stream(sink, self.schema, options=self._options).write_batch(batch, custom_metadata=metadata)
        message_bytes = sink.tell() - self._schema_bytes
        metadata_bytes = _PREFIX_BYTES + int.from_bytes(memory[start + 4 : start + 8].tobytes(), "little")
        return FooterBlock(0, metadata_bytes, message_bytes - metadata_bytes)

    def write_around(
        self, batch: pa.RecordBatch, metadata: Mapping[bytes, bytes], payload: Payload, gap_behind: Callable[[int], int]
    ) -> tuple[bytes, bytes, FooterBlock]:
        """Make the message of a batch around its payload, which is appended without a copy.

        The column `data` of the batch is empty in all rows, and `payload` has its values. `gap_behind` is
        `AppendFile.gap` of the file. Returned are the bytes before the values, the bytes after the values, and the
        block, with its offset from the first byte.
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
        """Return everything after the last batch, with the checksum of the complete file; `crc` is of all before."""
        footer = bytearray(self._footer)
        field = _footer_batches_field(footer)
        footer += bytes((4 - len(footer)) % 8)  # the length takes 4 bytes, and blocks are aligned to 8
        struct.pack_into("<I", footer, field, len(footer) - field)
        footer += struct.pack("<I", len(blocks)) + b"".join(struct.pack("<qi4xq", *block) for block in blocks)
        ending = bytearray(_END_OF_STREAM + footer + struct.pack("<i", len(footer)) + _MAGIC)
        digits = ending.index(NO_DIGITS, ending.index(FILE_CRC_KEY))
        ending[digits : digits + len(NO_DIGITS)] = b"%08x" % crc32c(ending, crc)
        return bytes(ending)


def _batch_fields(message: bytearray) -> tuple[int, int]:
    """Return the positions of the first entry of `buffers` and of `bodyLength` in a batch's message (flatbuffers)."""
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
    assert field, "Arrow writes each field of a batch that has rows"
    return int(table) + int(field)


def _empty_footer(schema: pa.Schema) -> bytes:
    sink = pa.BufferOutputStream()
    pa.ipc.new_file(sink, schema).close()
    file: bytes = sink.getvalue().to_pybytes()
    (nbytes,) = struct.unpack("<i", file[-10:-6])
    return file[-10 - nbytes : -10]


def _with_checksum(footer: bytes) -> bytes:
    """Put a new root table (flatbuffers) before a footer of Arrow, with the file's checksum as `custom_metadata`.

    pyarrow writes this metadata since version 21, but version 20 is supported, too. The old root stays in the bytes,
    unused.
    """
    (old,) = struct.unpack_from("<I", footer, 0)
    strings = b"".join(
        struct.pack("<I", len(text)) + (text + b"\0").ljust(-(-(len(text) + 1) // 4) * 4, b"\0")
        for text in (FILE_CRC_KEY, NO_DIGITS)
    )
    head_bytes = 72 + len(strings)
    head_bytes += -head_bytes % 8  # keeps the old footer's 8-byte alignment
    version = struct.unpack_from("<h", footer, _field(bytearray(footer), old, 0))[0]
    vectors = []
    for number, slot in enumerate((24, 28, 32), start=1):  # schema, dictionaries, batches
        at = _field(bytearray(footer), old, number)
        vectors.append(head_bytes + at + struct.unpack_from("<I", footer, at)[0] - slot)
    value = 72 + 4 + -(-(len(FILE_CRC_KEY) + 1) // 4) * 4
    head = struct.pack("<I7H2x", 20, 14, 24, 20, 4, 8, 12, 16)  # head: root table at 20; root's vtable at offset 4
    head += struct.pack("<i4Ih2x", 16, *vectors, 44 - 36, version)  # the root table, at offset 20
    head += struct.pack("<II", 1, 60 - 48)  # at offset 44 the root's metadata: one pair
    head += struct.pack("<4H", 8, 12, 4, 8)  # at offset 52 the pair's vtable
    head += struct.pack("<iII", 8, 72 - 64, value - 68)  # at offset 60 the pair; its texts are at offset 72
    return (head + strings).ljust(head_bytes, b"\0") + footer


def _footer_batches_field(footer: bytearray) -> int:
    """Return the position of the offset of the list of batches in a footer (flatbuffers)."""
    (table,) = struct.unpack_from("<I", footer, 0)
    return _field(footer, int(table), _FOOTER_BATCHES)
