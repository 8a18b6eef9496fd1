"""Owns how a batch becomes the bytes of an Arrow IPC file; never touches files.

Arrow's own file writer would call back into Python for every buffer, 100 times a batch: 5 times the CPU, and as many
hand-overs of the GIL. So each batch is written as a stream into memory in one call, and the footer, which is all that
a file has beyond a stream, gets its list of batches here.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

_MAGIC = b"ARROW1"
_PREFIX_BYTES = 8
"""Continuation mark and length, before a message's metadata."""
_END_OF_STREAM = struct.pack("<II", 0xFFFFFFFF, 0)
_FOOTER_BATCHES = 3
"""Position of `recordBatches` in the table Footer of Arrow's File.fbs."""
_SLACK_BYTES = 64 << 10
"""More than what a message may hold beside the batch: the custom metadata, and zstd's frames around 100 buffers."""


class Block(NamedTuple):
    """Where a batch lies in its file: an entry of the footer."""

    offset: int
    metadata_bytes: int
    body_bytes: int


class Layout:
    """The fixed parts of files of one schema, and the way from a batch to its message."""

    def __init__(self, schema: pa.Schema, compression: str | None = None) -> None:
        self.schema = schema
        # Without threads: Arrow's would compete with training for the cores.
        self._options = pa.ipc.IpcWriteOptions(compression=compression, use_threads=False)
        message = schema.serialize().to_pybytes()
        self._schema_bytes = len(message)
        self.preamble = _MAGIC.ljust(8, b"\0") + message
        self._footer = _empty_footer(schema)

    def max_message_bytes(self, batch: pa.RecordBatch) -> int:
        """Bytes that `write` may need for `batch`."""
        return int(1.01 * pa.ipc.get_record_batch_size(batch)) + _SLACK_BYTES

    def write(
        self, batch: pa.RecordBatch, metadata: Mapping[bytes, bytes], memory: npt.NDArray[np.uint8], start: int
    ) -> Block:
        """Lay the message of a batch out at `start`. The schema is written before it: those bytes are overwritten.

        Returns:
            The block, with its offset counted from `start`.
        """
        assert start >= self._schema_bytes, "the schema needs room before the message"
        sink = pa.FixedSizeBufferWriter(pa.py_buffer(memory[start - self._schema_bytes :]))
        pa.ipc.new_stream(sink, self.schema, options=self._options).write_batch(batch, custom_metadata=metadata)
        message_bytes = sink.tell() - self._schema_bytes
        metadata_bytes = _PREFIX_BYTES + int.from_bytes(memory[start + 4 : start + 8].tobytes(), "little")
        return Block(0, metadata_bytes, message_bytes - metadata_bytes)

    def ending(self, blocks: Sequence[Block]) -> bytes:
        """Everything after the last batch."""
        footer = bytearray(self._footer)
        field = _footer_batches_field(footer)
        footer += bytes((4 - len(footer)) % 8)  # the length takes 4 bytes, and the blocks want to be aligned to 8
        struct.pack_into("<I", footer, field, len(footer) - field)
        footer += struct.pack("<I", len(blocks)) + b"".join(struct.pack("<qi4xq", *block) for block in blocks)
        return _END_OF_STREAM + footer + struct.pack("<i", len(footer)) + _MAGIC


def _empty_footer(schema: pa.Schema) -> bytes:
    sink = pa.BufferOutputStream()
    pa.ipc.new_file(sink, schema).close()
    file: bytes = sink.getvalue().to_pybytes()
    (nbytes,) = struct.unpack("<i", file[-10:-6])
    return file[-10 - nbytes : -10]


def _footer_batches_field(footer: bytearray) -> int:
    """Where a footer holds the offset of its list of batches (flatbuffers: root, its vtable, the field's slot)."""
    (table,) = struct.unpack_from("<I", footer, 0)
    (vtable_distance,) = struct.unpack_from("<i", footer, table)
    (field,) = struct.unpack_from("<H", footer, table - vtable_distance + 4 + 2 * _FOOTER_BATCHES)
    assert field, "Arrow writes the list of batches also where it is empty"
    return int(table) + int(field)
