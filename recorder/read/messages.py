"""Reads the framing of Arrow IPC files: each message's offset and declared sizes. Arrow itself allocates nothing yet.

pyarrow does not show a batch's offset in its file, its declared sizes, or its metadata before decoding. The metadata
are flatbuffers, laid out by Arrow's Message.fbs and File.fbs (format version 5). No offset in a file is trusted.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import pyarrow as pa

from ..errors import CorruptError
from ..storage.untrusted_files import ByteSource

MAGIC = b"ARROW1"
TAIL_BYTES = 4 + len(MAGIC)
"""The size of the end of a sealed file: the footer's length and the magic, in bytes."""
FIRST_MESSAGE = 8
"""The offset of the first message in an IPC file, after the magic and two bytes of padding."""
PREFIX_BYTES = 8
CONTINUATION = 0xFFFFFFFF

MAX_METADATA_BYTES = 1 << 20
"""The largest allowed size of a message's metadata, in bytes. The recorder's messages have less than 20 KiB."""
MAX_BATCH_BYTES = 1 << 30
"""The largest allowed size of a decoded batch. The recorder writes at most 40 MiB of payload, plus metadata."""

_MAX_RATIO = 128
"""The largest allowed ratio of decompressed to compressed bytes. Constant columns reach 13, zip bombs thousands."""
_MIN_DECLARED_BYTES = 1 << 20
_MAX_PAIRS = 64
"""The most pairs in a message's custom metadata. The recorder writes 2. Many pairs of shared bytes are slow."""

_VERSION_5 = 4
"""The number of Arrow's version 5 in Message.fbs (V1 is 0). Older versions may note compression in custom metadata."""
SCHEMA_MESSAGE = 1
BATCH_MESSAGE = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageBlock:
    """Where one message lies in its file: its offset and its sizes."""

    offset: int
    metadata_bytes: int
    """The size of the metadata, with prefix and padding. The body begins this many bytes after `offset`."""
    body_bytes: int

    @property
    def end(self) -> int:
        return self.offset + self.metadata_bytes + self.body_bytes


class Message(NamedTuple):
    """What a message declares about itself. It is only checked that the fields lie within the message."""

    kind: int
    body_bytes: int
    nodes: tuple[tuple[int, int], ...]
    """For each column of a batch, the number of rows and the number of nulls."""
    buffers: tuple[tuple[int, int], ...]
    """For each buffer of a batch, in Arrow's order, its offset in the body and its length in bytes."""
    is_compressed: bool
    custom_metadata: dict[bytes, bytes]


class _Table:
    def __init__(self, data: memoryview, position: int) -> None:
        self.data = data
        self.position = position
        self.vtable = position - self.unpack("<i", position)
        self.vtable_bytes = self.unpack("<H", self.vtable)

    def unpack(self, layout: str, position: int) -> int:
        if position < 0:
            raise struct.error("offset below the message")
        value: int = struct.unpack_from(layout, self.data, position)[0]
        return value

    def field(self, index: int) -> int:
        """Return the position of a field's value. Return 0 if the field is absent."""
        entry = 4 + 2 * index
        offset = self.unpack("<H", self.vtable + entry) if entry < self.vtable_bytes else 0
        return self.position + offset if offset else 0

    def number(self, index: int, layout: str) -> int:
        position = self.field(index)
        return self.unpack(layout, position) if position else 0

    def table(self, index: int) -> _Table | None:
        position = self.field(index)
        return _Table(self.data, position + self.unpack("<I", position)) if position else None

    def vector(self, index: int, item_bytes: int) -> memoryview:
        """Return the bytes of a vector of scalars or structs. Empty if the field is absent."""
        position = self.field(index)
        if not position:
            return self.data[:0]
        start = position + self.unpack("<I", position)
        num_bytes = self.unpack("<I", start) * item_bytes
        if start + 4 + num_bytes > len(self.data):
            raise struct.error("vector beyond the message")
        return self.data[start + 4 : start + 4 + num_bytes]

    def tables(self, index: int) -> list[_Table]:
        position = self.field(index)
        if not position:
            return []
        start = position + self.unpack("<I", position) + 4
        num_items = len(self.vector(index, 4)) // 4
        table_starts = [start + 4 * item for item in range(num_items)]
        return [_Table(self.data, table_start + self.unpack("<I", table_start)) for table_start in table_starts]


def _root(data: memoryview) -> _Table:
    return _Table(data, struct.unpack_from("<I", data, 0)[0])


def parse_message(metadata: pa.Buffer, where: str) -> Message:
    """Parse a message's metadata, a flatbuffer. `metadata` begins after the prefix."""
    try:
        root = _root(memoryview(metadata))
        header = root.table(2)
        if root.number(0, "<h") != _VERSION_5:
            raise struct.error("not of Arrow's format version 5")
        kind = root.number(1, "<B")
        nodes: tuple[tuple[int, int], ...] = ()
        buffers: tuple[tuple[int, int], ...] = ()
        is_compressed = False
        if kind == BATCH_MESSAGE and header is not None:
            nodes = tuple(struct.iter_unpack("<qq", header.vector(1, 16)))
            buffers = tuple(struct.iter_unpack("<qq", header.vector(2, 16)))
            is_compressed = header.table(3) is not None
        if len(root.vector(4, 4)) > 4 * _MAX_PAIRS:
            raise struct.error("too many pairs")
        texts = [(pair.vector(0, 1), pair.vector(1, 1)) for pair in root.tables(4)]
        if sum(len(key) + len(value) for key, value in texts) > len(root.data):
            raise struct.error("pairs that share their bytes")  # many pairs could refer to the same long text
        pairs = {bytes(key): bytes(value) for key, value in texts}
        return Message(kind, root.number(3, "<q"), nodes, buffers, is_compressed, pairs)
    except struct.error as error:
        raise CorruptError(f"{where}: message metadata is damaged ({error})") from error


def padding_of(metadata: pa.Buffer) -> memoryview:
    """Return the padding of a batch's metadata: the bytes after all declared content. They should be zeros."""
    root = _root(memoryview(metadata))
    header = root.table(2)
    vectors = [vector for pair in root.tables(4) for vector in ((pair, 0, 1), (pair, 1, 1))]
    vectors += [(header, 1, 16), (header, 2, 16)] if header is not None else []
    ends = [0]
    for table, index, item_bytes in vectors:
        if position := table.field(index):
            ends.append(position + table.unpack("<I", position) + 4 + len(table.vector(index, item_bytes)))
    return root.data[max(ends) :]


def block_at(source: ByteSource, offset: int) -> tuple[MessageBlock, Message] | None:
    """Return place and content of the message at `offset`. Return None at the end of the stream or of the file."""
    if offset == source.size_bytes:
        return None
    mark, metadata_bytes = struct.unpack("<II", source.read(offset, PREFIX_BYTES))
    if mark == CONTINUATION and metadata_bytes == 0:
        return None
    if mark != CONTINUATION or not 0 < metadata_bytes <= MAX_METADATA_BYTES:
        raise CorruptError(f"{source.where}: no message begins at byte {offset}")
    message = parse_message(source.read(offset + PREFIX_BYTES, metadata_bytes), source.where)
    block = MessageBlock(offset=offset, metadata_bytes=PREFIX_BYTES + metadata_bytes, body_bytes=message.body_bytes)
    if not 0 <= message.body_bytes <= MAX_BATCH_BYTES or block.end > source.size_bytes:
        raise CorruptError(f"{source.where}: the message at byte {offset} ends beyond the file")
    return block, message


def footer_bytes(source: ByteSource) -> int:
    """Return the size in bytes of a sealed file's footer, which lies before the last 10 bytes."""
    if source.size_bytes < FIRST_MESSAGE + TAIL_BYTES:
        raise CorruptError(f"{source.where}: {source.size_bytes} bytes are too few for a sealed shard")
    num_bytes, magic = struct.unpack("<i6s", source.read(source.size_bytes - TAIL_BYTES, TAIL_BYTES))
    if magic != MAGIC or not 0 < num_bytes <= source.size_bytes - FIRST_MESSAGE - TAIL_BYTES:
        raise CorruptError(f"{source.where}: has no footer, so it was cut or never sealed")
    return int(num_bytes)


def footer_blocks(source: ByteSource) -> list[MessageBlock]:
    """Return where the batches of a sealed file lie, as its footer says. This is checked when a batch is read."""
    try:
        items = list(struct.iter_unpack("<qi4xq", _footer(source).vector(3, 24)))
    except struct.error as error:
        raise CorruptError(f"{source.where}: the footer is damaged ({error})") from error
    return [MessageBlock(offset=offset, metadata_bytes=meta, body_bytes=body) for offset, meta, body in items]


def footer_text(source: ByteSource, key: bytes) -> range | None:
    """Return where in a sealed file a value of the footer's `custom_metadata` lies. None if there is no such key."""
    try:
        footer = _footer(source)
        for pair in footer.tables(4):
            if bytes(pair.vector(0, 1)) == key:
                start = pair.field(1) + pair.unpack("<I", pair.field(1)) + 4
                start += source.size_bytes - TAIL_BYTES - len(footer.data)
                return range(start, start + len(pair.vector(1, 1)))
    except struct.error as error:
        raise CorruptError(f"{source.where}: the footer is damaged ({error})") from error
    return None


def _footer(source: ByteSource) -> _Table:
    num_bytes = footer_bytes(source)
    return _root(memoryview(source.read(source.size_bytes - TAIL_BYTES - num_bytes, num_bytes)))


def check_block(block: MessageBlock, source: ByteSource) -> None:
    """Raise CorruptError if a block in the footer lies outside the file, or is larger than the recorder's blocks."""
    is_sane = block.offset >= FIRST_MESSAGE and PREFIX_BYTES < block.metadata_bytes <= MAX_METADATA_BYTES
    if not is_sane or not 0 <= block.body_bytes <= MAX_BATCH_BYTES or block.end > source.size_bytes:
        raise CorruptError(f"{source.where}: the footer lists a batch at byte {block.offset} that cannot be there")


def check_declared_sizes(buffers: Sequence[tuple[int, int]], body: pa.Buffer, where: str) -> None:
    """Raise CorruptError if compressed buffers declare more than `MAX_BATCH_BYTES`, or too much for `body`'s size."""
    total_bytes = 0
    for offset, length in buffers:
        if 0 < length < 8:
            raise CorruptError(f"{where}: a compressed buffer of {length} bytes has no room for its length")
        if length:
            (declared_bytes,) = struct.unpack("<q", body.slice(offset, 8))
            total_bytes += max(declared_bytes, 0)  # the length -1 marks a buffer that is stored uncompressed
    max_bytes = min(MAX_BATCH_BYTES, max(_MIN_DECLARED_BYTES, _MAX_RATIO * body.size))
    if total_bytes > max_bytes:
        raise CorruptError(f"{where}: declares {total_bytes} bytes, more than the {max_bytes} a batch may have")
