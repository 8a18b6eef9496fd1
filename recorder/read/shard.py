"""Owns the reading of one shard's batches: decoded by Arrow, then checked, and only then shown to anybody.

Must never return a column whose bytes were not compared with their checksum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from ..errors import CorruptError, UnsupportedError
from ..format.integrity import BatchHeader, check_batch
from ..format.schema import SCHEMA
from .files import ByteSource, MappedFile
from .messages import (
    FIRST_MESSAGE,
    PREFIX_BYTES,
    SCHEMA_MESSAGE,
    Block,
    Message,
    block_at,
    check_block,
    check_declared_sizes,
    footer_blocks,
    parse_message,
)

HOLE_BYTES = 1 << 16
"""A payload buffer below this is read along with the light columns around it."""


class CheckedBatch(NamedTuple):
    """A batch whose bytes are those that were written, with what its metadata says."""

    batch: Any
    header: BatchHeader


class Shard:
    """The batches of one file, by their number. The seal is none of them; a salvaged file may lack some."""

    def __init__(self, open_source: Callable[[], ByteSource], schema: Any, blocks: Mapping[int, Block]) -> None:
        self._open_source = open_source
        self.schema = schema
        self.blocks = blocks

    def read(self, number: int, columns: Sequence[str]) -> CheckedBatch:
        """Some columns of one batch, checked.

        Raises:
            CorruptError: the bytes are not those that were written, or there is no such batch.
        """
        with self._open_source() as source:
            if number not in self.blocks:
                raise CorruptError(f"{source.where}: batch {number} is missing or damaged")
            checked = read_batch(source, self.blocks[number], self.schema, columns)
            if checked.header.number != number:
                raise CorruptError(f"{source.where}: batch {checked.header.number} stands where {number} should")
            return checked


def open_sealed(path: Path, extra: Sequence[Any] = (), without: Sequence[str] = ()) -> tuple[Shard, BatchHeader]:
    """A sealed shard (or an index, which has other columns) by its footer, and its seal, which must agree.

    Raises:
        CorruptError: footer, schema or seal are not what was written. `salvage` may still find batches.
        FileNotFoundError: it is gone.
    """
    source = MappedFile(path)
    schema = read_schema(source, extra, without)[0]
    blocks = footer_blocks(source)
    if not blocks:
        raise CorruptError(f"{path}: the footer lists no batches, not even the seal")
    seal = read_batch(source, blocks[-1], schema, ()).header
    if seal.num_batches != len(blocks):
        raise CorruptError(f"{path}: the footer lists {len(blocks)} batches, but the last one says {seal.num_batches}")
    return Shard(lambda: source, schema, dict(enumerate(blocks[:-1]))), seal


def read_schema(source: ByteSource, extra: Sequence[Any] = (), without: Sequence[str] = ()) -> tuple[Any, Block]:
    """The schema in the first message, compared with FORMAT.md's, and where that message lies.

    Args:
        source: the file.
        extra: further fields that must be there.
        without: columns of FORMAT.md that this kind of file does not have.

    Raises:
        CorruptError: a column is missing or has another type.
        UnsupportedError: a column of a kind that no version 1 file may have.
    """
    found = block_at(source, FIRST_MESSAGE)
    if found is None or found[1].kind != SCHEMA_MESSAGE:
        raise CorruptError(f"{source.where}: does not begin with a schema")
    block = found[0]
    try:
        schema = pa.ipc.read_schema(source.read(block.offset, block.end - block.offset))
    except (pa.ArrowException, OSError) as error:
        raise CorruptError(f"{source.where}: the schema is damaged ({error})") from error
    for field in [*(field for field in SCHEMA if field.name not in without), *extra]:
        places = schema.get_all_field_indices(field.name)
        if len(places) != 1 or schema.field(places[0]).type != field.type:
            raise CorruptError(f"{source.where}: the schema has no single column {field.name!r} of type {field.type}")
    for field in schema:
        if _num_buffers(field.type) == 0:
            raise UnsupportedError(f"{source.where}: column {field.name!r} is of type {field.type}, which is not flat")
    return schema, block


def read_batch(source: ByteSource, block: Block, schema: Any, columns: Sequence[str]) -> CheckedBatch:
    """Read, decode and check some columns of one batch."""
    check_block(block, source)
    where = f"{source.where}, batch at byte {block.offset}"
    prefix = source.read(block.offset, block.metadata_bytes)
    message = parse_message(prefix.slice(PREFIX_BYTES), where)
    if message.body_bytes != block.body_bytes:
        raise CorruptError(f"{where}: has {message.body_bytes} bytes, the footer says {block.body_bytes}")
    hole = None if "data" in columns else _payload_range(message, block, schema)
    whole = source.read(block.offset, block.end - block.offset, hole)
    check_declared_sizes(message, whole.slice(block.metadata_bytes), where)
    try:
        batch = pa.ipc.read_record_batch(pa.ipc.read_message(whole), schema).select(list(columns))
        batch.validate(full=True)
    except (pa.ArrowException, OSError) as error:
        raise CorruptError(f"{where}: {error}") from error
    return CheckedBatch(batch, check_batch(batch, message.custom_metadata, where=where))


def _payload_range(message: Message, block: Block, schema: Any) -> range | None:
    """Where in the message the payloads lie, if it is worth to leave them out."""
    place = schema.get_field_index("data")
    if place < 0 or message.is_compressed:
        return None
    index = sum(_num_buffers(field.type) for field in list(schema)[:place]) + 2  # behind validity and offsets
    if index >= len(message.buffers):
        return None
    offset, length = message.buffers[index]
    start = block.metadata_bytes + offset
    if length < HOLE_BYTES or offset < 0 or start + length > block.end - block.offset:
        return None
    return range(start, start + length)


def _num_buffers(column_type: Any) -> int:
    """Buffers of a flat column in a message; 0 for a type that is not flat."""
    types = pa.types
    if types.is_string(column_type) or types.is_large_string(column_type):
        return 3
    if types.is_binary(column_type) or types.is_large_binary(column_type):
        return 3
    return 2 if types.is_primitive(column_type) or types.is_fixed_size_binary(column_type) else 0
