"""Owns the rows on their way into one RecordBatch, and the contiguous buffer of their payloads.

The columns are built a column at a time when the batch is complete: no Python statement runs per row and column.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from crc32c import crc32c

from ..format.codec import Encoder, max_encoded_bytes
from ..format.integrity import Crcs, checksum, column_crcs
from ..format.schema import SCHEMA
from ..records import PART_BYTES, Chunk, Measured, Moment, Origin, Piece, Segment, Staged
from .file import PageMemory
from .ipc import Payload

NOT_MEASURED = Measured()
_LAYOUT_COLUMNS = ("global_shape", "offsets", "placements", "mesh", "layout_source")
_TEXT = "string"
_TYPES = {str(field.type): field.type for field in SCHEMA}
"""By their names: Arrow makes a type's name anew whenever the type is a key, or compared."""
_FIELDS = [(field.name, str(field.type)) for field in SCHEMA]
_NUMPY_NAMES = {"int32": "i4", "int64": "i8", "double": "f8"}
_VARIED = {field.name for field in SCHEMA if field.type == pa.float64()} | {"fingerprint"}
"""Columns that are not looked through for one and the same value; zeros of both signs are equal, and not the same."""
_CACHED_TEXTS = 4096
_CACHED_COLUMNS, _CACHED_ROWS = 1024, 256
"""Columns of one value that are kept: how many of them, and of how many rows at most; 2 MiB in all."""
_ROW = (
    "seq",
    "origin",
    "moment",
    "phase",
    "call",
    "repeat",
    "scope",
    "dtype",
    "shape",
    "chunk",
    "note",
    "time_ns",
    "measured",
    "part",
    "flat_offset",
    "encoding",
    "payload_bytes",
)
"""What a row is while it waits for its batch, in order; columns by their names. A plain tuple is made in a fifth of the
time that one with names takes."""
MAX_ROWS = 4096
"""Rows of one batch at most."""


def max_payload_bytes(batch_bytes: int) -> int:
    """Payload that a batch copies at most: it is written once it has `batch_bytes`, and an empty one takes any part."""
    return max(batch_bytes, max_encoded_bytes(PART_BYTES))


class Built(NamedTuple):
    """A batch that is ready to be written."""

    batch: pa.RecordBatch
    crcs: Crcs
    payload: Payload | None
    """The values of `data` where the batch has none itself; borrowed: write it before `clear`."""
    steps: Sequence[int]
    """Of its rows."""


class RowBatch:
    """Rows of one kind that will be written together."""

    def __init__(
        self,
        *,
        attempt: int,
        rank: int,
        encoder: Encoder,
        batch_bytes: int,
        max_rows: int = MAX_ROWS,
        is_payload_apart: bool = True,
    ) -> None:
        """Start empty.

        Args:
            attempt: the column's value.
            rank: the column's value.
            encoder: for the payloads.
            batch_bytes: payload at which the batch is full, unless that lies in a segment, which says so itself.
            max_rows: rows at which it is, too.
            is_payload_apart: whether what is built leaves the payload where it is.
        """
        self._constants = {"attempt": attempt, "rank": rank}
        self._encoder = encoder
        self._batch_bytes = batch_bytes
        self._max_rows = max_rows
        self._rows: list[tuple[Any, ...]] = []
        self._ends = [0]
        self._payload_crc = 0
        max_bytes = max_payload_bytes(batch_bytes)
        self._payload = PageMemory(max_bytes).data[:max_bytes]
        self._is_payload_apart = is_payload_apart
        self._segment: Segment | None = None
        """Where the payloads lie, from its beginning on, instead of in the memory."""
        self._has_parts = False
        """Whether payloads are among them that never were in a segment."""

    @property
    def num_rows(self) -> int:
        return len(self._rows)

    @property
    def is_borrowing(self) -> bool:
        """Whether its payloads lie in memory that others wait for."""
        return self._segment is not None

    @property
    def is_full(self) -> bool:
        max_bytes = self._batch_bytes if self._segment is None else self._segment.max_bytes
        return self._ends[-1] >= max_bytes or len(self._rows) >= self._max_rows

    def _continues(self, piece: Piece) -> bool:
        return self._segment is not None and piece.segment is self._segment and piece.start == self._ends[-1]

    def add(self, staged: Staged, measured: Measured) -> None:
        """Add a row without a payload."""
        self._add(staged, measured, 0, 0, None, None)
        self._ends.append(self._ends[-1])

    def add_piece(self, staged: Staged, measured: Measured, piece: Piece) -> bool:
        """Add a row with a payload that is encoded already: it stays where it is, if the batch's payloads lie there.

        Returns:
            Whether the batch takes it; an empty one does.
        """
        is_first = self._is_payload_apart and not piece.start  # of its segment, which a batch can borrow
        is_borrowed = self._continues(piece) or (is_first and not self._ends[-1] and self._segment is None)
        num_bytes = piece.stop - piece.start
        if not is_borrowed:
            # A batch of pieces that came too late to be borrowed ends for a segment, or none would ever borrow again.
            if (is_first and num_bytes and not self._has_parts) or not self._has_room(num_bytes):
                return False
            self._payload[self._ends[-1] : self._ends[-1] + num_bytes] = piece.data
        kernels = self._encoder.kernels
        if piece.crc is None or kernels is None:
            crc = checksum(piece.data.data, kernels, self._payload_crc)
        else:
            crc = kernels.join_crc32c(self._payload_crc, piece.crc, num_bytes)
        self._add(staged, measured, 0, 0, piece.encoding, piece.payload_bytes)
        # Nothing fails from here on: a record that does leaves the batch as it was.
        self._segment = piece.segment if is_borrowed else None
        self._payload_crc = crc
        self._ends.append(self._ends[-1] + num_bytes)
        return True

    def add_part(self, staged: Staged, measured: Measured, part: int) -> bool:
        """Encode one part of the payload, and add its row; statistics go with part 0.

        Returns:
            Whether there was room; there is in an empty batch.
        """
        data = staged.block.data
        numel = _shape_columns(staged.shape)[1]
        item_bytes = len(data) // numel if numel else 1
        start = part * PART_BYTES
        if staged.num_parts > 1:
            data = data[start : start + PART_BYTES]
        if not self._has_room(max_encoded_bytes(len(data))):
            return False
        begin = self._ends[-1]
        encoding, nbytes = self._encoder.encode(data, item_bytes, self._payload[begin:], staged.origin)
        end = begin + nbytes
        crc = checksum(self._payload[begin:end].data, self._encoder.kernels, self._payload_crc)  # while it is in cache
        self._add(staged, NOT_MEASURED if part else measured, part, start // item_bytes, encoding, len(data))
        self._has_parts = True
        self._payload_crc = crc
        self._ends.append(end)
        return True

    def _has_room(self, num_bytes: int) -> bool:
        return self._segment is None and self._ends[-1] + num_bytes <= len(self._payload)

    def _add(
        self,
        staged: Staged,
        measured: Measured,
        part: int,
        flat_offset: int,
        encoding: str | None,
        payload_bytes: int | None,
    ) -> None:
        note = staged.note if measured.note is None else _merge_notes(staged.note, measured.note)
        self._rows.append(
            (
                staged.seq + part,
                staged.origin,
                staged.moment,
                staged.phase,
                staged.call,
                staged.repeat,
                staged.scope,
                staged.dtype,
                staged.shape,
                staged.chunk,
                note,
                staged.time_ns,
                measured,
                part,
                flat_offset,
                encoding,
                payload_bytes,
            )
        )

    def build(self) -> Built:
        """The rows as a batch. It borrows the payload buffer: write it before `clear`."""
        rows = _spread(_ROW, self._rows)
        measured = rows["measured"]
        is_bare = measured[0] is NOT_MEASURED and measured.count(NOT_MEASURED) == len(measured)
        columns = (
            (_spread_alike if is_bare else _spread)(Measured._fields, measured)
            | rows
            | _spread(Origin._fields, rows["origin"])
            | _spread_alike(Moment._fields, rows["moment"])
            | _spread_alike(("shape", "numel"), rows["shape"], _shape_columns)
            | _spread_alike(_LAYOUT_COLUMNS, rows["chunk"], _layout_columns)
        )
        ends = np.array(self._ends, np.int64)
        made = [self._column(name, type_name, columns, ends) for name, type_name in _FIELDS]
        return Built(
            pa.RecordBatch.from_arrays([column.array for column in made], schema=SCHEMA),
            {name: column.crcs for (name, _), column in zip(_FIELDS, made, strict=True)},
            Payload(self._values, ends) if self._is_payload_apart else None,
            columns["step"],
        )

    @property
    def _values(self) -> npt.NDArray[np.uint8]:
        memory = self._payload if self._segment is None else self._segment.data
        return memory[: self._ends[-1]]

    def clear(self) -> None:
        """Forget the rows; the payload buffer is used again, and a segment let go."""
        self._rows.clear()
        if self._segment is not None:
            self._segment.is_closed = True
            self._segment = None
        self._ends = [0]
        self._payload_crc = 0
        self._has_parts = False

    def _column(
        self, name: str, type_name: str, columns: Mapping[str, Sequence[Any]], ends: npt.NDArray[np.int64]
    ) -> _Column:
        if name == "data":
            return self._payload_column(columns["encoding"], ends)
        if name in self._constants:
            return _constant(type_name, self._constants[name], self.num_rows)
        values = columns.get(name)
        if values is None:
            return _constant(type_name, None, self.num_rows)
        first = values[0]
        if (first is None or name not in _VARIED) and values.count(first) == len(values):
            return _constant(type_name, first, len(values))
        if name == "fingerprint":
            array = _hex_array(values)
        else:
            array = _text_array(values) if type_name == _TEXT else _number_array(values, type_name)
        return _Column(array, column_crcs(array))

    def _payload_column(self, encodings: Sequence[str | None], ends: npt.NDArray[np.int64]) -> _Column:
        if encodings.count(None) == self.num_rows:
            return _constant("large_binary", None, self.num_rows)
        validity = _validity(encodings)
        crcs = [None if validity is None else crc32c(validity), crc32c(ends.data), self._payload_crc]
        if self._is_payload_apart:
            ends = np.zeros_like(ends)
        buffers = [validity, pa.py_buffer(ends), pa.py_buffer(self._values)]
        return _Column(pa.Array.from_buffers(pa.large_binary(), self.num_rows, buffers), crcs)


class _Column(NamedTuple):
    array: pa.Array
    crcs: list[int | None]


def _constant(type_name: str, value: Any, num_rows: int) -> _Column:
    """A column of one value; most are, and they cost more than what they say."""
    make = _make_constant if num_rows <= _CACHED_ROWS else _make_constant.__wrapped__
    return make(type_name, value, num_rows)


@lru_cache(_CACHED_COLUMNS)
def _make_constant(type_name: str, value: Any, num_rows: int) -> _Column:
    if value is None:
        array = pa.nulls(num_rows, _TYPES[type_name])
        return _Column(array, column_crcs(array))
    if type_name == _TEXT:
        text = _utf8(value)
        content = [np.arange(num_rows + 1, dtype=np.int32) * np.int32(len(text)), text * num_rows]
    else:
        content = [np.full(num_rows, value, _NUMPY_NAMES[type_name])]
    array = pa.Array.from_buffers(_TYPES[type_name], num_rows, [None, *map(pa.py_buffer, content)])
    return _Column(array, column_crcs(array))


def _spread(names: Sequence[str], rows: Iterable[Sequence[Any]]) -> dict[str, Sequence[Any]]:
    """Columns by name from rows; no rows at all is the caller's mistake."""
    return dict(zip(names, zip(*rows, strict=True), strict=True))


def _spread_alike(
    names: Sequence[str], things: Sequence[Any], columns_of: Callable[[Any], Sequence[Any]] = tuple
) -> dict[str, Sequence[Any]]:
    """The same from things of which most are equal, and equal ones are the same."""
    first = things[0]
    if things.count(first) == len(things):
        return {name: (value,) * len(things) for name, value in zip(names, columns_of(first), strict=True)}
    made = {thing: columns_of(thing) for thing in set(things)}
    return _spread(names, map(made.__getitem__, things))


# `pa.array` and `pa.scalar` import pandas to see whether they were given one of its types: a second of the training
# process's interpreter, and 50 MB. So arrays are made from buffers.


def _number_array(values: Sequence[Any], type_name: str) -> pa.Array:
    validity = _validity(values)
    filled = values if validity is None else [0 if value is None else value for value in values]
    data = np.array(filled, _NUMPY_NAMES[type_name])
    return pa.Array.from_buffers(_TYPES[type_name], len(values), [validity, pa.py_buffer(data)])


def _text_array(values: Sequence[str | None]) -> pa.Array:
    texts = [value or "" for value in values]
    whole = "".join(texts)
    if whole.isascii():
        return _texts(whole.encode(), map(len, texts), values)
    pieces = list(map(_utf8, texts))
    return _texts(b"".join(pieces), map(len, pieces), values)


def _hex_array(values: Sequence[int | None]) -> pa.Array:
    """Fingerprints, as `fingerprint.to_text` spells each."""
    numbers = np.array([value for value in values if value is not None], ">u8")
    return _texts(numbers.tobytes().hex().encode(), (0 if value is None else 16 for value in values), values)


def _texts(data: bytes, lengths: Iterable[int], values: Sequence[Any]) -> pa.Array:
    offsets = np.zeros(len(values) + 1, np.int32)
    np.cumsum(np.fromiter(lengths, np.int32, len(values)), out=offsets[1:])
    buffers = [_validity(values), pa.py_buffer(offsets), pa.py_buffer(data)]
    return pa.Array.from_buffers(_TYPES[_TEXT], len(values), buffers)


def _utf8(text: str) -> bytes:
    # A module may be named by half a surrogate pair; one such name must not cost the whole batch.
    return text.encode("utf-8", "backslashreplace")


def _validity(values: Sequence[Any]) -> pa.Buffer | None:
    if values.count(None) == 0:
        return None
    return pa.py_buffer(np.packbits([value is not None for value in values], bitorder="little"))


@lru_cache(_CACHED_TEXTS)
def _shape_columns(shape: tuple[int, ...]) -> tuple[str, int]:
    return _json(shape), math.prod(shape)


@lru_cache(_CACHED_TEXTS)
def _layout_columns(chunk: Chunk | None) -> tuple[str | None, ...]:
    if chunk is None:
        return (None,) * len(_LAYOUT_COLUMNS)
    offsets = None if chunk.offsets is None else _json(chunk.offsets)
    return _json(chunk.global_shape), offsets, chunk.placements, chunk.mesh, chunk.layout_source


def _merge_notes(staged: str | None, measured: str) -> str:
    """The row's note: what capture says, and why statistics are missing (``word:detail``) as one more key."""
    key, _, detail = measured.partition(":")
    return _json({**(json.loads(staged) if staged else {}), key: detail or True})


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))
