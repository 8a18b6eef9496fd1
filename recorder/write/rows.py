"""Collects the rows of one RecordBatch, and the contiguous buffer of their payloads.

The columns are built one at a time when the batch is complete, so that no Python statement runs per row and column.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from crc32c import crc32c

from ..columns import SCHEMA
from ..format.codec import Encoder, max_encoded_bytes
from ..format.integrity import Crcs, column_crcs
from ..records import PART_BYTES, Chunk, Measured, Staged, StepPosition, ValuePlace
from .file import PageMemory
from .shard import Payload

NOT_MEASURED = Measured()
_LAYOUT_COLUMNS = ("global_shape", "offsets", "placements", "mesh", "layout_source")
_TEXT, _BYTES = "string", "binary"
_TYPES = {str(field.type): field.type for field in SCHEMA}
"""The column types by name. Arrow would build a type's name again whenever the type is hashed or compared."""
_FIELDS = [(field.name, str(field.type)) for field in SCHEMA]
_NUMPY_NAMES = {"int32": "i4", "int64": "i8", "double": "f8"}
_VARIED = {field.name for field in SCHEMA if field.type == pa.float64()} | {"fingerprint", "units"}
"""The columns that are never written as one repeated value, because that value is cached. 0.0 and -0.0 are equal but
have different bits, and the column `units` has too many different values.
"""
_CACHED_TEXTS = 4096
_CACHED_COLUMNS, _CACHED_ROWS = 1024, 256
"""The most columns of one repeated value to cache, and the most rows of a cached column: 2 MiB in all."""
_WHY_NOT = "why_not"
_OF_MEASURED = tuple(_WHY_NOT if name == "note" else name for name in Measured._fields)
_OF_PAYLOAD = ("part", "flat_offset", "encoding", "payload_bytes")
_CELLS = (*_OF_MEASURED, *Staged._fields, *_OF_PAYLOAD)
"""The names of a row's cells, in the order of `RowBatch._cells`."""
_NO_PAYLOAD = (0, 0, None, None)
MAX_ROWS = 4096


class BuiltBatch(NamedTuple):
    """A batch that is ready to be written."""

    batch: pa.RecordBatch
    crcs: Crcs
    payload: Payload | None
    """The values of the column `data`; None if `batch` contains them. Their memory is reused after `RowBatch.clear`."""
    steps: Sequence[int]


class RowBatch:
    """Rows of one kind that will be written together."""

    def __init__(
        self, *, attempt: int, rank: int, encoder: Encoder, batch_bytes: int, max_rows: int = MAX_ROWS,
        is_payload_apart: bool = True,
    ) -> None:  # fmt: skip
        """Begin empty. The batch is full at `batch_bytes` of payload or at `max_rows` rows.

        `attempt` and `rank` are the values of the columns of these names. `is_payload_apart` is True if a built batch
        leaves the payload in its own memory.
        """
        self._constants = {"attempt": attempt, "rank": rank}
        self._encoder = encoder
        self._batch_bytes = batch_bytes
        self.max_rows = max_rows
        self._cells: list[Any] = []
        """The cells of all rows in one flat list, row after row. An object for each row would make the garbage
        collector search the complete process more often."""
        self._num_rows = 0
        self._ends = [0]
        self._detail_bytes = 0
        """The bytes that all rows together take in the column `units` (sums of neurons or channels)."""
        self._payload_crc = 0
        max_bytes = max(batch_bytes, max_encoded_bytes(PART_BYTES))  # an empty batch has room for any part
        self._payload = PageMemory(max_bytes).data[:max_bytes]
        self._is_payload_apart = is_payload_apart

    @property
    def num_rows(self) -> int:
        return self._num_rows

    @property
    def is_full(self) -> bool:
        return self._ends[-1] + self._detail_bytes >= self._batch_bytes or self._num_rows >= self.max_rows

    def add(self, staged: Staged, measured: Measured) -> None:
        self._extend([*measured, *staged, *_NO_PAYLOAD], [self._ends[-1]])
        self._detail_bytes += 0 if measured.units is None else len(measured.units)

    def add_all(self, records: Sequence[Staged], measured: Sequence[Measured]) -> None:
        """Add rows without payloads and without sums of units (channels). No Python statement runs per row."""
        rows = zip(measured, records, [_NO_PAYLOAD] * len(records), strict=True)
        cells = list(itertools.chain.from_iterable(itertools.chain.from_iterable(rows)))
        self._extend(cells, [self._ends[-1]] * len(records))

    def add_part(self, staged: Staged, measured: Measured, part: int) -> bool:
        """Encode one part of a record's payload, and add a row for it. Return False if there was no room.

        The row of part 0 has the statistics. An empty batch has room for any part.
        """
        data = staged.block.data
        numel = _shape_columns(staged.shape)[1]
        item_bytes = len(data) // numel if numel else 1
        start = part * PART_BYTES
        if staged.num_parts > 1:
            data = data[start : start + PART_BYTES]
        if self._ends[-1] + max_encoded_bytes(len(data)) > len(self._payload):
            return False
        begin = self._ends[-1]
        encoding, nbytes = self._encoder.encode(data, item_bytes, self._payload[begin:], staged.origin)
        end = begin + nbytes
        # The checksum is computed while the bytes are in the CPU's cache.
        crc = crc32c(self._payload[begin:end].data, self._payload_crc)
        its = NOT_MEASURED if part else measured
        self._extend([*its, *staged, part, start // item_bytes, encoding, len(data)], [end])
        self._detail_bytes += 0 if its.units is None else len(its.units)
        self._payload_crc = crc
        return True

    def _extend(self, cells: list[Any], ends: list[int]) -> None:
        try:
            self._cells += cells
            self._ends += ends
        except MemoryError:
            del self._cells[self._num_rows * len(_CELLS) :], self._ends[self._num_rows + 1 :]
            raise
        self._num_rows += len(ends)

    def build(self) -> BuiltBatch:
        """Return the batch of all rows. It uses the payload buffer, so it must be written before `clear` is called."""
        rows = _columns_of_cells(_CELLS, self._cells)
        if any(rows["part"]):
            rows["seq"] = [seq + part for seq, part in zip(rows["seq"], rows["part"], strict=True)]
        if rows[_WHY_NOT].count(None) < self._num_rows:
            rows["note"] = list(map(_merge_notes, rows["note"], rows[_WHY_NOT]))
        columns = (
            rows
            | _columns_of_cells(ValuePlace._fields, list(itertools.chain.from_iterable(rows["origin"])))
            | _columns_of_repeated(StepPosition._fields, rows["moment"])
            | _columns_of_repeated(("shape", "numel"), rows["shape"], _shape_columns)
            | _columns_of_repeated(_LAYOUT_COLUMNS, rows["chunk"], _layout_columns)
        )
        ends = np.array(self._ends, np.int64)
        made = [self._column(name, type_name, columns, ends) for name, type_name in _FIELDS]
        return BuiltBatch(
            pa.RecordBatch.from_arrays([column.array for column in made], schema=SCHEMA),
            {name: column.crcs for (name, _), column in zip(_FIELDS, made, strict=True)},
            Payload(self._values, ends, self._payload_crc) if self._is_payload_apart else None,
            columns["step"],
        )

    @property
    def _values(self) -> npt.NDArray[np.uint8]:
        return self._payload[: self._ends[-1]]

    def clear(self) -> None:
        """Forget the rows. The memory of their payloads is used for the next rows."""
        self._cells.clear()
        self._num_rows = 0
        self._ends = [0]
        self._detail_bytes = 0
        self._payload_crc = 0

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
            numbers = np.array([value for value in values if value is not None], ">u8")
            array = _texts(numbers.tobytes().hex().encode(), (0 if value is None else 16 for value in values), values)
        elif type_name == _BYTES:
            array = _texts(b"".join(filter(None, values)), (len(value or b"") for value in values), values, _BYTES)
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
    """Return a column of one repeated value, as most columns are. Columns are cached, because making one is slower."""
    make = _make_constant if num_rows <= _CACHED_ROWS else _make_constant.__wrapped__
    return make(type_name, value, num_rows)


@lru_cache(_CACHED_COLUMNS)
def _make_constant(type_name: str, value: Any, num_rows: int) -> _Column:
    if value is None:
        array = pa.nulls(num_rows, _TYPES[type_name])
        return _Column(array, column_crcs(array))
    if type_name in (_TEXT, _BYTES):
        text = _utf8(value) if isinstance(value, str) else value
        content = [np.arange(num_rows + 1, dtype=np.int32) * np.int32(len(text)), text * num_rows]
    else:
        content = [np.full(num_rows, value, _NUMPY_NAMES[type_name])]
    array = pa.Array.from_buffers(_TYPES[type_name], num_rows, [None, *map(pa.py_buffer, content)])
    return _Column(array, column_crcs(array))


def _columns_of_cells(names: Sequence[str], cells: list[Any]) -> dict[str, Sequence[Any]]:
    """Turn a flat list of cells, row after row, into columns by name. There must be at least one row."""
    return {name: cells[start :: len(names)] for start, name in enumerate(names)}


def _columns_of_repeated(
    names: Sequence[str], values: Sequence[Any], columns_of: Callable[[Any], Sequence[Any]] = tuple
) -> dict[str, Sequence[Any]]:
    """Return columns by name for mostly equal values. `columns_of` makes the cells, once for each distinct value."""
    first = values[0]
    if values.count(first) == len(values):
        return {name: (cell,) * len(values) for name, cell in zip(names, columns_of(first), strict=True)}
    made = {value: columns_of(value) for value in set(values)}
    return _columns_of_cells(names, list(itertools.chain.from_iterable(map(made.__getitem__, values))))


# `pa.array` and `pa.scalar` import pandas to check for pandas types. The import keeps the training process's
# interpreter busy for a second, and takes 50 MB. So arrays are made from buffers.


def _number_array(values: Sequence[Any], type_name: str) -> pa.Array:
    validity = None
    try:
        data = np.array(values, _NUMPY_NAMES[type_name])
        has_gaps = bool(np.isnan(data).any())  # numpy turns None into NaN in a float column only
    except TypeError:
        has_gaps = True
    if has_gaps:  # to search floats for None is as slow as to make the column
        validity = _validity(values)
        data = np.array([0 if value is None else value for value in values], _NUMPY_NAMES[type_name])
    return pa.Array.from_buffers(_TYPES[type_name], len(values), [validity, pa.py_buffer(data)])


def _text_array(values: Sequence[str | None]) -> pa.Array:
    texts = [value or "" for value in values]
    whole = "".join(texts)
    if whole.isascii():
        return _texts(whole.encode(), map(len, texts), values)
    encoded = list(map(_utf8, texts))
    return _texts(b"".join(encoded), map(len, encoded), values)


def _texts(data: bytes, lengths: Iterable[int], values: Sequence[Any], type_name: str = _TEXT) -> pa.Array:
    offsets = np.zeros(len(values) + 1, np.int32)
    np.cumsum(np.fromiter(lengths, np.int32, len(values)), out=offsets[1:])
    buffers = [_validity(values), pa.py_buffer(offsets), pa.py_buffer(data)]
    return pa.Array.from_buffers(_TYPES[type_name], len(values), buffers)


def _utf8(text: str) -> bytes:
    # A module's name may contain half a surrogate pair. One such name must not make the complete batch fail.
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


def _merge_notes(staged: str | None, measured: str | None) -> str | None:
    """Add the reason for missing statistics (``key:detail``) to a record's note, which is JSON or None."""
    if measured is None:
        return staged
    key, _, detail = measured.partition(":")
    return _json({**(json.loads(staged) if staged else {}), key: detail or True})


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))
