"""Reads the batches of one shard. A batch is decoded by Arrow, then checked, and only then returned.

A sealed shard has a footer. A shard without a sound footer is salvaged: it is being written, was left by a kill, or is
damaged. It is then read as an IPC stream, which begins after the first 8 bytes. Nothing here may return a column whose
checksum was not compared, or write to a file: `recorder repair` does that.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from crc32c import crc32c

from ..columns import COLUMN_OF, COLUMNS, METADATA_COLUMNS, SCHEMA, SCHEMAS, lacks_rightly
from ..errors import CorruptError, RunError, UnsupportedError
from ..format.integrity import BatchHeader, ColumnKind, buffer_crcs, check_batch, column_kind, read_header
from ..numerics.keys import array_of
from ..storage.locations import Location, store_of
from ..storage.untrusted_files import ByteSource
from .messages import (
    BATCH_MESSAGE,
    CONTINUATION,
    FIRST_MESSAGE,
    MAX_METADATA_BYTES,
    PREFIX_BYTES,
    SCHEMA_MESSAGE,
    Message,
    MessageBlock,
    block_at,
    check_block,
    check_declared_sizes,
    footer_blocks,
    padding_of,
    parse_message,
)

INDEX_ONLY = ("batch", "row")
"""The columns that only an index has: the number of the row's batch in the shard, and the row's index in the batch."""
_POSITION_FIELDS = [pa.field(name, pa.int32(), nullable=False) for name in INDEX_ONLY]
_NEVER_NULL = {*INDEX_ONLY, *(column.name for column in COLUMNS if column.is_required)}
_BOUNDS = {column.name: column.bounds for column in COLUMNS if column.bounds}
_BOUNDS |= dict.fromkeys(INDEX_ONLY, (0, (1 << 31) - 1))
"""For each column of counts, the least and the greatest allowed value."""
_SIGNED = {bits: np.dtype(f"i{bits // 8}") for bits in (32, 64)}
_UNSIGNED = {num_bytes: np.dtype(f"u{num_bytes}") for num_bytes in (4, 8)}
_MAX_BATCHES = 1 << 31
"""The bound on the number of batches of a shard. An index stores a batch's number as int32."""


ARROW_ERRORS = (pa.ArrowException, OSError, EOFError, StopIteration, UnicodeDecodeError)


class CheckedBatch(NamedTuple):
    """A batch that has passed its checksums, with its header."""

    batch: Any
    header: BatchHeader
    whole: Any
    """The message as it is in the file. Columns that were not requested may be zeros here."""


class Layout:
    """The schema of a file, with the place of each column's buffers among the buffers of a message."""

    def __init__(self, schema: Any, *, is_index: bool = False) -> None:
        self.schema = schema
        self.preamble = schema.serialize()
        """The serialized schema, which precedes the batches in a stream."""
        self.names = list(schema.names)
        self._starts = list(accumulate((_num_buffers(field.type) for field in schema), initial=0))
        self._kinds = [column_kind(field.type) for field in schema]
        self._index_of = {name: index for index, name in enumerate(self.names)}
        ours = {
            *COLUMN_OF,
            *(INDEX_ONLY if is_index else ()),
        }  # an unknown column may have the name of an index column
        self.counts = ours & _BOUNDS.keys()
        self._never_null = ours & _NEVER_NULL

    def has(self, column: str) -> bool:
        """Return whether the file has a column. A file of an earlier version may lack it."""
        return column in self._index_of

    def indices(self, columns: Sequence[str]) -> list[int]:
        return sorted(self._index_of[name] for name in columns)

    def buffers_of(self, indices: Sequence[int], message: Message, where: str) -> list[tuple[int, int]]:
        """Return the offset in the body and the length of each buffer of some columns."""
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
        """Raise CorruptError for nulls in columns that must have none. Arrow checks that the null counts are true."""
        for index in indices:
            if message.nodes[index][1] and self.names[index] in self._never_null:
                raise CorruptError(f"{where}: column {self.names[index]!r} has nulls, which it must not")

    def crcs_of(self, message: Message, body: memoryview) -> Callable[[str], list[int | None]]:
        """Return a function that computes a column's checksums from an uncompressed message, for `check_batch`.

        `buffers_of` must have checked the buffers. Arrow would take five times as long for a column of a few rows.
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
        """Return a column's integers from an uncompressed message, or None for nulls or no rows. Faster than Arrow."""
        index = self._index_of[name]
        num_rows, num_nulls = message.nodes[index]
        if num_nulls or not num_rows:
            return None
        start = message.buffers[self._starts[index] + 1][0]
        return np.frombuffer(body, _SIGNED[self._kinds[index].bit_width], num_rows, start)


class Shard:
    """The batches of one file, by number. A salvaged file may lack some. The seal, an empty last batch, is left out."""

    def __init__(
        self, open_source: Callable[[], ByteSource], layout: Layout, blocks: Mapping[int, MessageBlock]
    ) -> None:
        self.open_source = open_source
        self._layout = layout
        self.blocks = blocks

    @property
    def schema(self) -> Any:
        return self._layout.schema

    def read(self, number: int, columns: Sequence[str]) -> CheckedBatch:
        """Return checked columns of a batch. A column that the file lacks is null. Raise CorruptError for damage."""
        with self.open_source() as source:
            if number not in self.blocks:
                raise CorruptError(f"{source.where}: batch {number} is missing or damaged")
            checked = read_batch(source, self.blocks[number], self._layout, columns)
            if checked.header.number != number:
                raise CorruptError(f"{source.where}: batch {checked.header.number} stands where {number} should")
            return checked


def open_sealed(path: Location, *, is_index: bool = False) -> tuple[Shard, BatchHeader]:
    """Open a sealed shard or an index, and return it with the header of its seal (the empty last batch).

    Raises CorruptError if footer and seal disagree on the number of batches; `salvage` may still find batches. Raises
    FileNotFoundError if the file is gone.
    """
    with store_of(path).open_sealed(path) as source:
        layout = read_layout(source, is_index=is_index)[0]
        blocks = footer_blocks(source)
        if not blocks:
            raise CorruptError(f"{path}: the footer lists no batches, not even the seal")
        seal = read_batch(source, blocks[-1], layout, ()).header
        if seal.num_batches != len(blocks):
            raise CorruptError(
                f"{path}: the footer lists {len(blocks)} batches, but the last one says {seal.num_batches}"
            )
    return Shard(lambda: source, layout, dict(enumerate(blocks[:-1]))), seal


def read_layout(source: ByteSource, *, is_index: bool = False) -> tuple[Layout, MessageBlock]:
    """Return the file's layout and the place of its first message. The schema must agree with the registry of columns.

    A column may be missing if it is newer than the file, and there may be columns that the registry does not know. An
    index has `INDEX_ONLY` besides the columns of FORMAT.md, and no payload. CorruptError is raised if a column is
    missing or has another type. UnsupportedError is raised for a type that no version 1 file may have.
    """
    schema_message = block_at(source, FIRST_MESSAGE)
    if schema_message is None or schema_message[1].kind != SCHEMA_MESSAGE:
        raise CorruptError(f"{source.where}: does not begin with a schema")
    block = schema_message[0]
    message = source.read(block.offset, block.end - block.offset).to_pybytes()
    try:
        return _parse_layout(message, is_index), block
    except RunError as error:
        raise type(error)(f"{source.where}: {error}") from error


@lru_cache(maxsize=16)  # schemas are cached, because the shards of a run have few different schemas
def _parse_layout(message: bytes, is_index: bool) -> Layout:
    try:
        schema = pa.ipc.read_schema(pa.py_buffer(message))
        schema.names  # noqa: B018 (untrusted input, which may be no text)
    except ARROW_ERRORS as error:
        raise CorruptError(f"the schema is damaged ({error})") from error
    for wanted in [*(one for one in SCHEMA if one.name != "data"), *_POSITION_FIELDS] if is_index else SCHEMA:
        indices = schema.get_all_field_indices(wanted.name)
        if not indices and wanted.name in COLUMN_OF and lacks_rightly(schema, COLUMN_OF[wanted.name]):
            continue
        if len(indices) != 1 or schema.field(indices[0]).type != wanted.type:
            raise CorruptError(f"the schema has no single column {wanted.name!r} of type {wanted.type}")
    if len(set(schema.names)) != len(schema.names):
        raise CorruptError("two columns of the schema have the same name")
    for column in schema:
        if _num_buffers(column.type) == 0:
            raise UnsupportedError(f"column {column.name!r} is of type {column.type}, which is not flat")
    return Layout(schema, is_index=is_index)


def read_batch(source: ByteSource, block: MessageBlock, layout: Layout, columns: Sequence[str]) -> CheckedBatch:
    """Read, decode and check some columns of one batch. The bytes of other columns are not read."""
    check_block(block, source)
    where = f"{source.where}, batch at byte {block.offset}"
    prefixed = source.read(block.offset, block.metadata_bytes)
    if struct.unpack("<II", prefixed[:PREFIX_BYTES]) != (CONTINUATION, block.metadata_bytes - PREFIX_BYTES):
        raise CorruptError(f"{where}: no message of the length in the footer begins at this byte")
    message = parse_message(prefixed.slice(PREFIX_BYTES), where)
    if message.body_bytes != block.body_bytes:
        raise CorruptError(f"{where}: has {message.body_bytes} bytes, the footer says {block.body_bytes}")
    # If the file has none of the columns, read `attempt`: it shows the true number of rows, and it compresses best.
    read = [name for name in columns if layout.has(name) or name not in COLUMN_OF] or ["attempt"]
    is_all = read == layout.names
    indices = layout.indices(read)
    buffers = layout.buffers_of(indices, message, where)
    begin = block.metadata_bytes
    own = (range(begin + offset, begin + offset + size) for offset, size in buffers)
    wanted = None if is_all else [range(begin), *own]
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
            _check_counts(array_of(batch.column(index).drop_null()) if counts is None else counts, name, where)
    if len(read) != len(columns) or not layout.has(columns[0]):
        batch = _with_nulls(batch, columns)
    return CheckedBatch(batch, header, whole)


def _with_nulls(batch: Any, columns: Sequence[str]) -> Any:
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
    """Compute what `buffer_crcs` would for a column without nulls, in half the time. None if that is not possible.

    `buffers` has the offset in the body and the length of each buffer except the validity bitmap.
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


def _check_counts(values: npt.NDArray[Any], name: str, where: str) -> None:
    if not len(values):
        return
    lowest, highest = _BOUNDS[name]
    if lowest == 0:  # read as unsigned, negative numbers exceed every allowed count, so one comparison suffices
        is_possible = np.maximum.reduce(values.view(_UNSIGNED[values.itemsize])) <= highest
    else:
        is_possible = lowest <= values.min() <= values.max() <= highest
    if not is_possible:
        raise CorruptError(
            f"{where}: column {name!r} holds {values.min()} to {values.max()}; "
            f"expected numbers from {lowest} to {highest}"
        )


def _decode(whole: Any, layout: Layout, indices: Sequence[int], message: Message) -> Any:
    """Decode the batch in a message. Of a compressed batch, only the columns at `indices` are decompressed."""
    if not message.is_compressed:
        return pa.ipc.read_record_batch(pa.ipc.read_message(whole), layout.schema)
    stream = pa.py_buffer(b"".join([layout.preamble, whole]))
    options = pa.ipc.IpcReadOptions(included_fields=list(indices), use_threads=False)
    return pa.ipc.open_stream(stream, options=options).read_next_batch()


def _num_buffers(column_type: Any) -> int:
    """Return the number of buffers of a flat column in a message. Return 0 for a type that is not flat."""
    types = pa.types
    with_offsets = (types.is_string, types.is_large_string, types.is_binary, types.is_large_binary)
    if any(is_kind(column_type) for is_kind in with_offsets):
        return 3
    return 2 if types.is_primitive(column_type) or types.is_fixed_size_binary(column_type) else 0


_SCAN_BYTES = 4 << 20
_MAX_CANDIDATES = 10_000
"""The most offsets that are tried to find a batch after damage. This bounds the cost of hostile bytes."""
_MAX_REREADS = 4
"""The most bytes that may be read in vain after damage, as a multiple of the file's size on disk."""
_MAX_PADDING_BYTES = 64
"""The largest alignment, in bytes, to which any writer pads a message's metadata."""
_AGAIN_S = 0.01
"""The seconds until an incomplete batch is read again. It may be seen while a direct write replaces a cached page."""


@dataclass(slots=True)
class Salvaged:
    """What could be read of a shard without its footer."""

    layout: Layout = field(default_factory=lambda: Layout(SCHEMA))
    blocks: dict[int, MessageBlock] = field(default_factory=dict)
    """The batches whose columns passed all checks (payloads are not checked), by batch number and in file order."""
    rows_of: dict[int, int] = field(default_factory=dict)
    last_header: BatchHeader | None = None
    """The header of the last batch that was read. This batch may be the seal (an empty last batch)."""
    num_trailing_bytes: int = 0
    """The number of bytes after the last complete batch (an unfinished write or damage); 0 if all are zeros."""
    damage: list[str] = field(default_factory=list)
    """A message for each damaged range of bytes that was skipped. A complete batch follows such a range."""
    tail_damage: str = ""
    """Why the bytes after the last complete batch are damage. Empty if they may be an unfinished write."""
    end: int = 0
    """The offset after the last complete batch. 0 if not even the schema was read."""

    @property
    def is_sealed(self) -> bool:
        return self.last_header is not None and self.last_header.is_seal


def salvage(
    open_source: Callable[[], ByteSource], after: Salvaged | None = None, max_batches: int | None = None
) -> Salvaged:
    """Read all complete batches whose metadata columns are unchanged, even after damaged bytes.

    `after` is the result of an earlier read of the file: then only later batches are read. `max_batches` bounds the
    number of batches. FileNotFoundError is raised if the file is gone.
    """
    with open_source() as source:
        walk = _Walk(source, max_batches)
        walk.run(after)
    return walk.found


class _Walk:
    """One pass over the batches of a stream, up to the seal (an empty last batch) or to the end of the file."""

    def __init__(self, source: ByteSource, max_batches: int | None) -> None:
        self.source = source
        self.found = Salvaged()
        self._max_batches = max_batches
        self._candidates_left = _MAX_CANDIDATES
        self._bytes_left = _MAX_REREADS * sum(map(len, source.data_ranges(0)))

    def run(self, after: Salvaged | None = None) -> None:
        if after is not None and after.end:
            found = self.found
            found.layout, found.last_header, found.end = after.layout, after.last_header, after.end
        elif not self._read_schema():
            return
        offset, looked_again_at = self.found.end, -1
        while not self.found.is_sealed and offset < self.source.size_bytes:
            if self._max_batches is not None and len(self.found.blocks) >= self._max_batches:
                break
            try:
                self.found.end = offset = self._take(offset)
            except CorruptError as error:
                if self._is_zero_from(offset):
                    return
                following = self._next_batch(offset + 8)
                if following is None and not is_cut_write(self.source, offset) and looked_again_at != offset:
                    looked_again_at = offset
                    time.sleep(_AGAIN_S)
                    continue
                if following is None:
                    self._end_at(offset, error)
                    return
                self.found.damage.append(f"{error}; {following - offset} bytes skipped")
                offset = following

    def _read_schema(self) -> bool:
        """Find the schema, or the first batch if the schema is damaged. Return False if there is neither."""
        offset = FIRST_MESSAGE
        if self.source.size_bytes <= offset:
            return False
        try:
            self.found.layout, block = read_layout(self.source)
            self.found.end = block.end
        except RunError as error:
            following = None
            for schema in SCHEMAS:  # the schema of this version or of an earlier one may fit; checksums decide
                self.found.layout = Layout(schema)
                if (following := self._next_batch(offset)) is not None:
                    break
            if following is None:
                if not self._is_zero_from(offset):
                    self._end_at(offset, error)
                return False
            self.found.damage.append(str(error))
            self.found.end = following
        return True

    def _end_at(self, offset: int, error: RunError) -> None:
        self.found.num_trailing_bytes = self.source.size_bytes - offset
        if not is_cut_write(self.source, offset):
            self.found.tail_damage = (
                f"{error}; no batch follows, and these {self.found.num_trailing_bytes} bytes are no unfinished write"
            )

    def _take(self, offset: int) -> int:
        block, checked = self._read(offset)
        self.found.last_header = checked.header
        if not self.found.is_sealed:
            self.found.blocks[checked.header.number] = block
            self.found.rows_of[checked.header.number] = checked.batch.num_rows
        return block.end

    def _read(self, offset: int) -> tuple[MessageBlock, CheckedBatch]:
        message = block_at(self.source, offset)
        if message is None or message[1].kind != BATCH_MESSAGE:
            raise CorruptError(f"{self.source.where}: no batch begins at byte {offset}")
        checked = read_batch(self.source, message[0], self.found.layout, METADATA_COLUMNS)
        if self.found.last_header is not None and checked.header.number <= self.found.last_header.number:
            raise CorruptError(
                f"{self.source.where}: batch {checked.header.number} follows {self.found.last_header.number}"
            )
        return message[0], checked

    def _next_batch(self, offset: int) -> int | None:
        for candidate in self._candidates(offset):
            self._candidates_left -= 1
            if self._candidates_left < 0 or self._bytes_left < 0:
                return None
            try:
                self._bytes_left -= self._read(candidate)[0].body_bytes
                return candidate
            except CorruptError:
                self._bytes_left -= _declared_bytes(self.source, candidate)
        return None

    def _candidates(self, offset: int) -> Iterator[int]:
        """Yield each multiple of 8 where a continuation mark and a possible length stand: a message may begin there."""
        for start, num_bytes in self._pieces(offset + -offset % 8):
            num_bytes -= num_bytes % 8
            words = np.frombuffer(self.source.read(start, num_bytes), "<u4").reshape(-1, 2)
            is_mark = (words[:, 0] == CONTINUATION) & (words[:, 1] > 0) & (words[:, 1] <= MAX_METADATA_BYTES)
            for index in np.flatnonzero(is_mark):
                yield start + 8 * int(index)

    def _is_zero_from(self, offset: int) -> bool:
        pieces = self._pieces(offset)
        return not any(np.frombuffer(self.source.read(*piece), np.uint8).any() for piece in pieces)

    def _pieces(self, offset: int) -> Iterator[tuple[int, int]]:
        """Yield offset and size of pieces of the file from `offset` on. Holes in the file are left out."""
        for extent in self.source.data_ranges(offset):
            for start in range(extent.start, extent.stop, _SCAN_BYTES):
                yield start, min(_SCAN_BYTES, extent.stop - start)


def is_cut_write(source: ByteSource, offset: int) -> bool:
    """Return whether the message at `offset` is an unfinished write: sound bytes, but the file ends in it."""
    rest_bytes: int = source.size_bytes - offset
    prefix = bytes(source.read(offset, min(PREFIX_BYTES, rest_bytes)))
    if rest_bytes < PREFIX_BYTES:
        return prefix[:4] == struct.pack("<I", CONTINUATION)[: len(prefix)]
    mark, metadata_bytes = map(int, struct.unpack("<II", prefix))
    if mark != CONTINUATION or metadata_bytes > MAX_METADATA_BYTES:
        return False
    held_bytes = min(metadata_bytes, rest_bytes - PREFIX_BYTES)
    metadata = source.read(offset + PREFIX_BYTES, held_bytes)
    try:
        message = parse_message(metadata, source.where)
        if message.kind != BATCH_MESSAGE:
            return held_bytes < metadata_bytes
        read_header(message.custom_metadata, source.where)
    except CorruptError:
        return held_bytes < metadata_bytes
    # The metadata are complete. If they are unsound, a length beyond the file's end is damage, not an unfinished write.
    padding = padding_of(metadata)
    last = max((start + size for start, size in message.buffers), default=0)
    is_sound = not any(padding) and metadata_bytes - (held_bytes - len(padding)) < _MAX_PADDING_BYTES
    is_sound = is_sound and message.body_bytes == last + -last % 8
    return is_sound and PREFIX_BYTES + metadata_bytes + message.body_bytes > rest_bytes


def _declared_bytes(source: ByteSource, offset: int) -> int:
    try:
        message = block_at(source, offset)
    except CorruptError:
        return 0
    return message[0].body_bytes if message else 0
