"""Owns the rows on their way into one RecordBatch, and the contiguous buffer of their payloads.

The columns are built a column at a time when the batch is complete: no Python statement runs per row and column.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from ..format.codec import Encoder, max_encoded_bytes
from ..format.schema import SCHEMA
from ..records import PART_BYTES, Chunk, Measured, Moment, Origin, Staged
from .file import PageMemory

NOT_MEASURED = Measured()
_LAYOUT_COLUMNS = ("global_shape", "offsets", "placements", "mesh", "layout_source")
_TEXT = pa.string()
_FIELDS = [(field.name, _TEXT if field.type == _TEXT else field.type) for field in SCHEMA]
_NUMPY_TYPES = {pa.int32(): np.int32, pa.int64(): np.int64, pa.float64(): np.float64}
_CACHED_TEXTS = 4096
MAX_ROWS = 4096
"""Rows of one batch at most."""


class _Row(NamedTuple):
    """One row as it waits for its batch; fields that are columns carry the column's name."""

    seq: int
    origin: Origin
    moment: Moment
    phase: str
    call: int
    repeat: int
    scope: str | None
    dtype: str
    shape: tuple[int, ...]
    chunk: Chunk | None
    note: str | None
    time_ns: int
    measured: Measured
    part: int
    flat_offset: int
    encoding: str | None
    payload_bytes: int | None


def max_payload_bytes(batch_bytes: int) -> int:
    """Payload of one batch at most: it is written once it has `batch_bytes`, and any part must fit an empty one."""
    return max(batch_bytes, max_encoded_bytes(PART_BYTES))


class RowBatch:
    """Rows of one kind that will be written together."""

    def __init__(
        self, *, attempt: int, rank: int, encoder: Encoder, batch_bytes: int, max_rows: int = MAX_ROWS
    ) -> None:
        """Start empty.

        Args:
            attempt: the column's value.
            rank: the column's value.
            encoder: for the payloads.
            batch_bytes: payload at which the batch is full.
            max_rows: rows at which it is, too.
        """
        self._constants = {"attempt": attempt, "rank": rank}
        self._encoder = encoder
        self._batch_bytes = batch_bytes
        self._max_rows = max_rows
        self._rows: list[_Row] = []
        self._ends = [0]
        self._payload = PageMemory(max_payload_bytes(batch_bytes)).data

    @property
    def num_rows(self) -> int:
        return len(self._rows)

    @property
    def is_full(self) -> bool:
        return self._ends[-1] >= self._batch_bytes or len(self._rows) >= self._max_rows

    def has_room(self, payload_bytes: int) -> bool:
        """Whether a payload can be added before the batch is written; an empty batch takes any part."""
        return self._ends[-1] + max_encoded_bytes(payload_bytes) <= len(self._payload)

    def add(self, staged: Staged, measured: Measured) -> None:
        """Add a row without a payload."""
        self._add(staged, measured, 0, 0, None, None)
        self._ends.append(self._ends[-1])

    def add_part(self, staged: Staged, measured: Measured, part: int) -> None:
        """Encode one part of the payload, and add its row; statistics go with part 0."""
        data = staged.block.data
        numel = _shape_columns(staged.shape)[1]
        item_bytes = len(data) // numel if numel else 1
        start = part * PART_BYTES
        piece = data[start : start + PART_BYTES]
        encoding, nbytes = self._encoder.encode(piece, item_bytes, self._payload[self._ends[-1] :])
        self._add(staged, NOT_MEASURED if part else measured, part, start // item_bytes, encoding, len(piece))
        self._ends.append(self._ends[-1] + nbytes)

    def _add(
        self,
        staged: Staged,
        measured: Measured,
        part: int,
        flat_offset: int,
        encoding: str | None,
        payload_bytes: int | None,
    ) -> None:
        self._rows.append(
            _Row(
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
                _merge_notes(staged.note, measured.note),
                staged.time_ns,
                measured,
                part,
                flat_offset,
                encoding,
                payload_bytes,
            )
        )

    def build(self) -> pa.RecordBatch:
        """The rows as a batch. It borrows the payload buffer: write it before `clear`."""
        rows = _spread(_Row._fields, self._rows)
        columns = (
            _spread(Measured._fields, rows["measured"])
            | rows
            | _spread(Origin._fields, rows["origin"])
            | _spread(Moment._fields, rows["moment"])
            | _spread(("shape", "numel"), map(_shape_columns, rows["shape"]))
            | _spread(_LAYOUT_COLUMNS, map(_layout_columns, rows["chunk"]))
        )
        columns["fingerprint"] = tuple(None if value is None else f"{value:016x}" for value in columns["fingerprint"])
        return pa.RecordBatch.from_arrays([self._array(field, columns) for field in _FIELDS], schema=SCHEMA)

    def clear(self) -> None:
        """Forget the rows; the payload buffer is used again."""
        self._rows.clear()
        self._ends = [0]

    def _array(self, field: tuple[str, pa.DataType], columns: Mapping[str, Sequence[Any]]) -> pa.Array:
        name, column_type = field
        if name == "data":
            return self._payload_array(columns["encoding"])
        if name in self._constants:
            return _number_array([self._constants[name]] * self.num_rows, column_type)
        values = columns.get(name)
        if values is None or values.count(None) == self.num_rows:
            return pa.nulls(self.num_rows, column_type)
        return _text_array(values) if column_type is _TEXT else _number_array(values, column_type)

    def _payload_array(self, encodings: Sequence[str | None]) -> pa.Array:
        if encodings.count(None) == self.num_rows:
            return pa.nulls(self.num_rows, pa.large_binary())
        offsets = pa.py_buffer(np.array(self._ends, np.int64))
        payload = pa.py_buffer(self._payload[: self._ends[-1]])
        return pa.Array.from_buffers(pa.large_binary(), self.num_rows, [_validity(encodings), offsets, payload])


def _spread(names: Sequence[str], rows: Iterable[Sequence[Any]]) -> dict[str, Sequence[Any]]:
    """Columns by name from rows; no rows at all is the caller's mistake."""
    return dict(zip(names, zip(*rows, strict=True), strict=True))


# `pa.array` and `pa.scalar` import pandas to see whether they were given one of its types: a second of the training
# process's interpreter, and 50 MB. So arrays are made from buffers.


def _number_array(values: Sequence[Any], column_type: pa.DataType) -> pa.Array:
    validity = _validity(values)
    filled = values if validity is None else [0 if value is None else value for value in values]
    data = np.array(filled, _NUMPY_TYPES[column_type])
    return pa.Array.from_buffers(column_type, len(values), [validity, pa.py_buffer(data)])


def _text_array(values: Sequence[str | None]) -> pa.Array:
    # A module may be named by half a surrogate pair; one such name must not cost the whole batch.
    encoded = {value: b"" if value is None else value.encode("utf-8", "backslashreplace") for value in set(values)}
    pieces = list(map(encoded.__getitem__, values))
    offsets = np.zeros(len(pieces) + 1, np.int32)
    np.cumsum(list(map(len, pieces)), out=offsets[1:])
    buffers = [_validity(values), pa.py_buffer(offsets), pa.py_buffer(b"".join(pieces))]
    return pa.Array.from_buffers(_TEXT, len(pieces), buffers)


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
    """The row's note: what capture says, and why statistics are missing (``word:detail``) as one more key."""
    if measured is None:
        return staged
    key, _, detail = measured.partition(":")
    return _json({**(json.loads(staged) if staged else {}), key: detail or True})


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))
