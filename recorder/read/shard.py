"""The reading of one shard's batches: decoded by Arrow, then checked, and only then shown to anybody.

Must never return a column whose bytes were not compared with their checksum.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from crc32c import crc32c

from ..columns import COLUMN_OF, COLUMNS, SCHEMA, lacks_rightly
from ..errors import CorruptError, RunError, UnsupportedError
from ..format.integrity import BatchHeader, ColumnKind, buffer_crcs, check_batch, column_kind
from ..storage.locations import Location, store_of
from ..storage.untrusted_files import ByteSource
from .messages import (
    CONTINUATION,
    FIRST_MESSAGE,
    PREFIX_BYTES,
    SCHEMA_MESSAGE,
    Message,
    MessageBlock,
    block_at,
    check_block,
    check_declared_sizes,
    footer_blocks,
    parse_message,
)

_NEVER_NULL = frozenset(column.name for column in COLUMNS if column.is_required) | {"batch", "row"}
_BOUNDS = {column.name: column.bounds for column in COLUMNS if column.bounds} | dict.fromkeys(
    ("batch", "row"), (0, (1 << 31) - 1)
)
"""Least and greatest value of the columns that count."""
_SIGNED = {bits: np.dtype(f"i{bits // 8}") for bits in (32, 64)}
_UNSIGNED = {num_bytes: np.dtype(f"u{num_bytes}") for num_bytes in (4, 8)}
_MAX_BATCHES = 1 << 31
"""The index names a batch by an int32."""


ARROW_ERRORS = (pa.ArrowException, OSError, EOFError, StopIteration, UnicodeDecodeError)
"""What pyarrow raises over damaged bytes."""


class CheckedBatch(NamedTuple):
    """A batch whose bytes are those that were written, with what its metadata says."""

    batch: Any
    header: BatchHeader
    whole: Any
    """The message as it stands in the file; bytes of columns that were not asked for may be zeros."""


class Layout:
    """A schema, and which of a message's buffers belong to which column."""

    def __init__(self, schema: Any, extra: tuple[Any, ...] = ()) -> None:
        """Take a schema whose columns have different names; `extra` as in `read_layout`."""
        self.schema = schema
        self.preamble = schema.serialize()
        """What stands before the batches of a stream."""
        self.names = list(schema.names)
        self._starts = list(accumulate((_num_buffers(field.type) for field in schema), initial=0))
        self._kinds = [column_kind(field.type) for field in schema]
        self._index_of = {name: index for index, name in enumerate(self.names)}
        ours = {*COLUMN_OF, *(field.name for field in extra)}  # a foreign column may be called like one of an index
        self.counts = ours & _BOUNDS.keys()
        """Columns of whole numbers that have bounds."""
        self._never_null = ours & _NEVER_NULL

    def has(self, column: str) -> bool:
        """Whether the file has a column; where it is of an earlier version than the column, it has none."""
        return column in self._index_of

    def indices(self, columns: Sequence[str]) -> list[int]:
        """Where columns stand in the schema, ascending."""
        return sorted(self._index_of[name] for name in columns)

    def buffers_of(self, indices: Sequence[int], message: Message, where: str) -> list[tuple[int, int]]:
        """Offset and length, in the body, of the buffers of some columns."""
        if len(message.nodes) != len(self.names):
            raise CorruptError(f"{where}: has {len(message.nodes)} columns, its schema {len(self.names)}")
        starts = self._starts
        if len(message.buffers) != starts[-1]:
            raise CorruptError(f"{where}: has {len(message.buffers)} buffers, its columns need {starts[-1]}")
        buffers = [buffer for index in indices for buffer in message.buffers[starts[index] : starts[index + 1]]]
        for offset, size in buffers:
            if offset < 0 or size < 0 or offset + size > message.body_bytes:
                raise CorruptError(f"{where}: a buffer lies outside its message")
        return buffers

    def check_nulls(self, indices: Sequence[int], message: Message, where: str) -> None:
        """Refuse nulls in columns that have none; that a message counts them right is Arrow's to check."""
        for index in indices:
            if message.nodes[index][1] and self.names[index] in self._never_null:
                raise CorruptError(f"{where}: column {self.names[index]!r} has nulls, which it must not")

    def crcs_of(self, message: Message, body: memoryview) -> Callable[[str], list[int | None]]:
        """What `check_batch` asks for: checksums off an uncompressed message, whose buffers `buffers_of` has checked.

        Arrow's own way to the same bytes takes five times as long for a column of a few rows.
        """
        starts = self._starts
        kinds, index_of, nodes, buffers = self._kinds, self._index_of, message.nodes, message.buffers

        def crcs(name: str) -> list[int | None]:
            index = index_of[name]
            (num_rows, num_nulls), kind, first, stop = nodes[index], kinds[index], starts[index], starts[index + 1]
            fast = None if num_nulls else _crcs_without_nulls(kind, num_rows, buffers[first + 1 : stop], body)
            if fast is not None:
                return fast
            parts = [body[start : start + size] for start, size in buffers[first:stop]]
            return buffer_crcs(kind, num_rows, num_nulls, parts)

        return crcs

    def values_of(self, name: str, message: Message, body: memoryview) -> npt.NDArray[Any] | None:
        """The whole numbers of a column off an uncompressed message, faster than by Arrow; None if some are null."""
        index = self._index_of[name]
        num_rows, num_nulls = message.nodes[index]
        if num_nulls or not num_rows:
            return None
        start = message.buffers[self._starts[index] + 1][0]
        return np.frombuffer(body, _SIGNED[self._kinds[index].bit_width], num_rows, start)


class Shard:
    """The batches of one file, by their number. The seal is none of them; a salvaged file may lack some."""

    def __init__(
        self, open_source: Callable[[], ByteSource], layout: Layout, blocks: Mapping[int, MessageBlock]
    ) -> None:
        self._open_source = open_source
        self._layout = layout
        self.blocks = blocks

    @property
    def schema(self) -> Any:
        return self._layout.schema

    def read(self, number: int, columns: Sequence[str]) -> CheckedBatch:
        """Some columns of one batch, checked; of nulls where the file is of a version that did not have them.

        Raises:
            CorruptError: the bytes are not those that were written, or there is no such batch.
            FileNotFoundError: the file is gone.
        """
        with self._open_source() as source:
            if number not in self.blocks:
                raise CorruptError(f"{source.where}: batch {number} is missing or damaged")
            checked = read_batch(source, self.blocks[number], self._layout, columns)
            if checked.header.number != number:
                raise CorruptError(f"{source.where}: batch {checked.header.number} stands where {number} should")
            return checked


def open_sealed(
    path: Location, extra: tuple[Any, ...] = (), without: tuple[str, ...] = ()
) -> tuple[Shard, BatchHeader]:
    """A sealed shard (or an index, which has other columns) by its footer, and its seal, which must agree.

    Raises:
        CorruptError: footer, schema or seal are not what was written. `salvage` may still find batches.
        FileNotFoundError: it is gone.
    """
    with store_of(path).open_sealed(path) as source:
        layout = read_layout(source, extra, without)[0]
        blocks = footer_blocks(source)
        if not blocks:
            raise CorruptError(f"{path}: the footer lists no batches, not even the seal")
        seal = read_batch(source, blocks[-1], layout, ()).header
        if seal.num_batches != len(blocks):
            raise CorruptError(
                f"{path}: the footer lists {len(blocks)} batches, but the last one says {seal.num_batches}"
            )
    return Shard(lambda: source, layout, dict(enumerate(blocks[:-1]))), seal


def read_layout(
    source: ByteSource, extra: tuple[Any, ...] = (), without: tuple[str, ...] = ()
) -> tuple[Layout, MessageBlock]:
    """The schema in the first message, compared with the registry of columns, and where that message lies.

    Columns of a later version than the file's may be missing, and there may be some that the registry does not know.

    Args:
        source: the file.
        extra: further fields that must be there.
        without: columns of FORMAT.md that this kind of file does not have.

    Raises:
        CorruptError: a column is missing or has another type.
        UnsupportedError: a column of a kind that no version 1 file may have.
    """
    schema_message = block_at(source, FIRST_MESSAGE)
    if schema_message is None or schema_message[1].kind != SCHEMA_MESSAGE:
        raise CorruptError(f"{source.where}: does not begin with a schema")
    block = schema_message[0]
    message = source.read(block.offset, block.end - block.offset).to_pybytes()
    try:
        return _parse_layout(message, extra, without), block
    except RunError as error:
        raise type(error)(f"{source.where}: {error}") from error


@lru_cache(maxsize=16)  # the shards of a run have the same few schemas
def _parse_layout(message: bytes, extra: tuple[Any, ...], without: tuple[str, ...]) -> Layout:
    try:
        schema = pa.ipc.read_schema(pa.py_buffer(message))
        schema.names  # noqa: B018 (untrusted input, which may be no text)
    except ARROW_ERRORS as error:
        raise CorruptError(f"the schema is damaged ({error})") from error
    for field in [*(field for field in SCHEMA if field.name not in without), *extra]:
        indices = schema.get_all_field_indices(field.name)
        if not indices and field.name in COLUMN_OF and lacks_rightly(schema, COLUMN_OF[field.name]):
            continue
        if len(indices) != 1 or schema.field(indices[0]).type != field.type:
            raise CorruptError(f"the schema has no single column {field.name!r} of type {field.type}")
    if len(set(schema.names)) != len(schema.names):
        raise CorruptError("two columns of the schema have the same name")
    for field in schema:
        if _num_buffers(field.type) == 0:
            raise UnsupportedError(f"column {field.name!r} is of type {field.type}, which is not flat")
    return Layout(schema, extra)


def read_batch(source: ByteSource, block: MessageBlock, layout: Layout, columns: Sequence[str]) -> CheckedBatch:
    """Read, decode and check some columns of one batch; the bytes of the others are not touched.

    Columns that the file is too old to have are nulls.
    """
    check_block(block, source)
    where = f"{source.where}, batch at byte {block.offset}"
    prefixed = source.read(block.offset, block.metadata_bytes)
    if struct.unpack("<II", prefixed[:PREFIX_BYTES]) != (CONTINUATION, block.metadata_bytes - PREFIX_BYTES):
        raise CorruptError(f"{where}: no message of the length begins there that the footer says")
    message = parse_message(prefixed.slice(PREFIX_BYTES), where)
    if message.body_bytes != block.body_bytes:
        raise CorruptError(f"{where}: has {message.body_bytes} bytes, the footer says {block.body_bytes}")
    # The length of `attempt` says how many rows there really are; it is compressed the most.
    read = [name for name in columns if layout.has(name) or name not in COLUMN_OF] or ["attempt"]
    is_all = read == layout.names
    indices = layout.indices(read)
    buffers = layout.buffers_of(indices, message, where)
    wanted = None if is_all else [range(block.metadata_bytes), *_behind(block.metadata_bytes, buffers)]
    whole = source.read(block.offset, block.end - block.offset, wanted)
    if message.is_compressed:
        check_declared_sizes(buffers, whole.slice(block.metadata_bytes), where)
    try:
        batch = _decode(whole, layout, indices, message)
        batch = batch if is_all else batch.select(read)
        batch.validate(full=True)
    except ARROW_ERRORS as error:
        raise CorruptError(f"{where}: {error}") from error
    body = None if message.is_compressed else memoryview(whole)[block.metadata_bytes :]
    crcs_of = None if body is None else layout.crcs_of(message, body)
    header = check_batch(batch, message.custom_metadata, crcs_of=crcs_of, where=where)
    if not 0 <= header.number < _MAX_BATCHES:
        raise CorruptError(f"{where}: its number is {header.number}; expected one below {_MAX_BATCHES}")
    layout.check_nulls(indices, message, where)
    for index, name in enumerate(read):
        if name in layout.counts:
            counts = None if body is None else layout.values_of(name, message, body)
            _check_counts(_values(batch.column(index)) if counts is None else counts, name, where)
    if len(read) != len(columns) or not layout.has(columns[0]):
        batch = _with_nulls(batch, columns)
    return CheckedBatch(batch, header, whole)


def _with_nulls(batch: Any, columns: Sequence[str]) -> Any:
    """The batch with exactly these columns, those that it lacks as nulls."""
    if not columns:
        return batch.select([])
    have = set(batch.schema.names)
    arrays = [
        batch.column(name) if name in have else pa.nulls(batch.num_rows, COLUMN_OF[name].type) for name in columns
    ]
    return pa.RecordBatch.from_arrays(arrays, list(columns))


def _crcs_without_nulls(
    kind: ColumnKind, num_rows: int, buffers: Sequence[tuple[int, int]], body: memoryview
) -> list[int | None] | None:
    """Return what `buffer_crcs` returns for most columns, in half the time; None where it would return anything else.

    Args:
        kind: the type of the column, which has no nulls.
        num_rows: the number of its rows.
        buffers: offset in the body and length of each buffer but the validity bitmap.
        body: the body of the message.
    """
    start, size = buffers[0]
    if not kind.offset_bytes:
        num_bytes = (num_rows * kind.bit_width + 7) // 8
        return [None, crc32c(body[start : start + num_bytes])] if 0 < num_bytes <= size else None
    num_bytes = (num_rows + 1) * kind.offset_bytes
    last = body[start + num_bytes - kind.offset_bytes : start + num_bytes]
    used_bytes = int.from_bytes(last, "little", signed=True)
    content, room = buffers[1]
    if not num_rows or num_bytes > size or not 0 <= used_bytes <= room:
        return None
    offsets = crc32c(body[start : start + num_bytes])
    return [None, offsets, crc32c(body[content : content + used_bytes])]


def _behind(start: int, buffers: Sequence[tuple[int, int]]) -> list[range]:
    """Return buffers with their offsets counted from `start` bytes before the body."""
    return [range(start + offset, start + offset + size) for offset, size in buffers]


def _values(column: Any) -> npt.NDArray[Any]:
    """The numbers of a column, without its nulls."""
    values: npt.NDArray[Any] = (column.drop_null() if column.null_count else column).to_numpy()
    return values


def _check_counts(values: npt.NDArray[Any], name: str, where: str) -> None:
    """Refuse numbers that no recorder can have counted, before anything is computed with them."""
    if not len(values):
        return
    lowest, highest = _BOUNDS[name]
    if lowest == 0:  # as unsigned, a number below zero is one above any count: a single look at the values
        is_possible = np.maximum.reduce(values.view(_UNSIGNED[values.itemsize])) <= highest
    else:
        is_possible = lowest <= values.min() <= values.max() <= highest
    if not is_possible:
        raise CorruptError(
            f"{where}: column {name!r} holds {values.min()} to {values.max()}; "
            f"expected numbers from {lowest} to {highest}"
        )


def _decode(whole: Any, layout: Layout, indices: Sequence[int], message: Message) -> Any:
    """The batch; of a compressed one only the wanted columns, since each costs its decompression."""
    if not message.is_compressed:
        return pa.ipc.read_record_batch(pa.ipc.read_message(whole), layout.schema)
    stream = pa.py_buffer(b"".join([layout.preamble, whole]))
    options = pa.ipc.IpcReadOptions(included_fields=list(indices), use_threads=False)
    return pa.ipc.open_stream(stream, options=options).read_next_batch()


def _num_buffers(column_type: Any) -> int:
    """Buffers of a flat column in a message; 0 for a type that is not flat."""
    types = pa.types
    if types.is_string(column_type) or types.is_large_string(column_type):
        return 3
    if types.is_binary(column_type) or types.is_large_binary(column_type):
        return 3
    return 2 if types.is_primitive(column_type) or types.is_fixed_size_binary(column_type) else 0
