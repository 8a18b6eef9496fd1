"""Turns columns into arrays and integers, to find rows that are equal in some columns and match rows of two tables.

`by_key` groups a few Python objects. Nothing here may call `pa.array`, `pa.scalar` or `to_numpy`: these
import pandas to check for its types, which takes 0.15 s and 40 MB.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ..columns import KEY

K = TypeVar("K")
V = TypeVar("V")
Integers = npt.NDArray[np.int64]

VALUE_KEY = KEY
"""The columns that, with the rank, identify a value in a run."""
SERIES_KEY = tuple(name for name in KEY if name != "step")
"""The columns that identify a series: one value over all steps."""


_NONE = -1
"""The value of `Times.stage` for a row that is not from a pipeline."""
POSITIVE = np.int64((1 << 63) - 1)
NULL = np.iinfo(np.int64).min + 7
"""The integer for null in `bits_of`. As float64 these bits are subnormal, and no statistic is subnormal."""


def by_key(pairs: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    """Return the values of (key, value) pairs in a list for each key. Keys and values keep their order."""
    values: dict[K, list[V]] = {}
    for key, value in pairs:
        values.setdefault(key, []).append(value)
    return values


class Groups(NamedTuple):
    """Groups of rows that are equal in some columns. Groups are numbered in the order of their first rows."""

    ids: Integers
    firsts: Integers

    @property
    def num_groups(self) -> int:
        return len(self.firsts)


def array_of(column: Any, null: float = 0) -> npt.NDArray[Any]:
    """Return a column of numbers or booleans, with `null` for null. The array may be a read-only view of the column."""
    if isinstance(column, pa.ChunkedArray):
        chunks = [array_of(chunk, null) for chunk in column.chunks] or [array_of(pa.nulls(0, column.type))]
        return chunks[0] if len(chunks) == 1 else np.concatenate(chunks)
    if pa.types.is_boolean(column.type):
        return array_of(column.cast(pa.uint8()), null).view(np.bool_)
    if not column.null_count:
        return np.from_dlpack(column)
    data = pa.Array.from_buffers(column.type, len(column), [None, column.buffers()[1]], offset=column.offset)
    return np.where(array_of(column.is_valid()), np.from_dlpack(data), np.asarray(null, np.from_dlpack(data).dtype))


def column_of(array: npt.NDArray[Any], *, mask: npt.NDArray[np.bool_] | None = None) -> pa.Array:
    """Return numbers or booleans as a column, which is null where `mask` is True. The column may be a view."""
    validity = None if mask is None else pa.py_buffer(np.packbits(~mask, bitorder="little"))
    data = np.packbits(array, bitorder="little") if array.dtype == np.bool_ else np.ascontiguousarray(array)
    return pa.Array.from_buffers(pa.from_numpy_dtype(array.dtype), len(array), [validity, pa.py_buffer(data)])


def codes(column: Any) -> Integers:
    """Return a column as integers from 0 on. Equal values have equal integers, and null counts as a value."""
    if pa.types.is_floating(column.type):
        bits = array_of(column.cast(pa.float64()), np.nan).view(np.int64)
        numbers = np.unique(bits, return_inverse=True)[1].reshape(-1) * 2
        return np.asarray(numbers + array_of(column.is_null()), np.int64)
    if pa.types.is_integer(column.type):
        import pyarrow.compute as pc  # imported late, because it takes 30 ms, and a training groups no columns

        zero = (pc.min(column).as_py() or 0) - bool(column.null_count)
        return np.asarray(array_of(column.cast(pa.int64()), zero) - zero, np.int64)
    return encode(column)[0] + 1


def encode(column: Any) -> tuple[Integers, list[str]]:
    """Return a column of texts as indices into a list of its distinct texts, and this list. Null is -1."""
    chunked = column if isinstance(column, pa.ChunkedArray) else pa.chunked_array([column])
    encoded = chunked.dictionary_encode().unify_dictionaries()
    pieces = [array_of(chunk.indices, -1) for chunk in encoded.chunks]
    texts = encoded.chunk(0).dictionary.to_pylist() if encoded.num_chunks else []
    return np.concatenate([np.zeros(0, np.int64), *pieces]).astype(np.int64), texts


def holds(column: Any, test: Callable[[str], bool]) -> npt.NDArray[np.bool_]:
    """Return a mask of the texts that pass `test`, which is called once per distinct text. Null never passes."""
    ids, texts = encode(column)
    return np.array([*map(test, texts), False], np.bool_)[ids]


def group(columns: Sequence[Integers]) -> Groups:
    """Group rows that are equal in all of several columns of integers."""
    _, firsts, ids = np.unique(mix(columns), return_index=True, return_inverse=True)
    by_appearance = np.argsort(firsts)
    rank = np.empty(len(firsts), np.int64)
    rank[by_appearance] = np.arange(len(firsts))
    return Groups(rank[ids], firsts[by_appearance].astype(np.int64))


def group_rows(table: Any, names: Sequence[str]) -> Groups:
    """Group the rows of a `pa.Table` that are equal in all columns in `names`."""
    return group([codes(table.column(name)) for name in names] or [np.zeros(table.num_rows, np.int64)])


def by_distinct(table: Any, names: Sequence[str], of: Callable[..., Any], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Return the result of `of` for each row's cells in some columns. `of` is called once for each distinct row."""
    groups = group_rows(table, names)
    cells = (table.column(name).take(column_of(groups.firsts)).to_pylist() for name in names)
    return np.array([of(*row) for row in zip(*cells, strict=True)], dtype)[groups.ids]


def common_ids(a: Any, b: Any, names: Sequence[str]) -> tuple[Integers, Integers]:
    """Return an id for each row of two tables. Rows that are equal in the columns `names` have the same id."""
    both = pa.concat_tables([a.select(list(names)), b.select(list(names))])
    ids = group_rows(both, names).ids
    return ids[: a.num_rows], ids[a.num_rows :]


def join(a: Integers, b: Integers) -> tuple[Integers, Integers]:
    """Return all pairs of positions at which `a` and `b` have equal numbers, ordered by the position in `a`."""
    order = np.argsort(b, kind="stable")
    in_order = b[order]
    begins, ends = np.searchsorted(in_order, a, "left"), np.searchsorted(in_order, a, "right")
    counts = ends - begins
    left = np.repeat(np.arange(len(a)), counts)
    within = np.arange(len(left)) - np.repeat(np.cumsum(counts) - counts, counts)
    return left, order[np.repeat(begins, counts) + within].astype(np.int64)


def pack(columns: Sequence[npt.NDArray[Any]]) -> Integers:
    """Return a number for each row, equal for equal rows. The numbers sort as the rows do, and have no gaps."""
    numbers: Integers = np.unique(mix(columns), return_inverse=True)[1].reshape(-1)
    return numbers


def mix(columns: Sequence[npt.NDArray[Any]]) -> Integers:
    """Return a number for each row, equal for equal rows. The numbers sort as the rows do, and may have gaps.

    The result may be one of `columns` itself, so it must not be changed.
    """
    mixed, size = np.zeros(0, np.int64), 1
    for column in columns:
        values = column.astype(np.int64, copy=False)
        low, high = (int(values.min()), int(values.max())) if len(values) else (0, 0)
        if size > 1 and size * (high - low + 1) >= 1 << 62:
            mixed = np.unique(mixed, return_inverse=True)[1].reshape(-1)
            size = int(mixed.max()) + 1
        if size * (high - low + 1) >= 1 << 62:
            values = np.unique(values, return_inverse=True)[1].reshape(-1)
            low, high = 0, int(values.max())
        values = values - low if low else values
        if size > 1:
            mixed = mixed * (high - low + 1)
            mixed += values
        else:  # the columns so far are equal in all rows
            mixed = values
        size *= high - low + 1
    return mixed


def bits_of(column: Any) -> Integers:
    """Return the bits of a column of 64-bit numbers as integers, with `NULL` for null."""
    bits: Integers = array_of(column).view(np.int64).copy()
    if column.null_count:
        bits[array_of(column.is_null())] = NULL
    return bits


def digest(columns: Sequence[Integers]) -> Integers:
    """Return a hash of each row. Equal rows have equal hashes; different rows do with a chance of 1 in 2^64."""
    total = np.zeros(len(columns[0]), np.uint64)
    for column in columns:
        total = (total ^ (total >> np.uint64(29)) ^ column.view(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
    return total.view(np.int64)


class Times(NamedTuple):
    """The columns that say when rows were recorded: one array each, with one entry per row."""

    step: Integers
    mode: Integers
    is_forward: npt.NDArray[np.bool_]
    is_backward: npt.NDArray[np.bool_]
    """True for a row that was recorded during a backward, even if it is a value of a recomputed forward."""
    seq: Integers
    """The position of the row in its rank's order of execution."""
    stage: Integers
    """The pipeline stage of the row; -1 for a row that is not from a pipeline."""
    micro_step: Integers
    """The index of the micro-batch in a pipeline; 0 for other rows."""
    rank: Integers

    def order(self) -> Integers:
        """Return the indices of the rows in the order of execution.

        `seq` orders only the rows of one rank, so the order of pipeline stages is added here. Forwards pass through the
        stages upwards, and backwards pass downwards. Micro-batches are put one after the other, though in fact they
        overlap in time.
        """
        if (self.stage == _NONE).all():
            return np.lexsort([self.rank, self.seq, self.step])
        kind = np.where(self.is_forward, 0, np.where(self.is_backward, 1, 2))
        stage_order = np.where(self.stage == _NONE, 0, np.where(self.is_backward, -self.stage, self.stage))
        micro_step = np.where(self.stage == _NONE, 0, self.micro_step)
        begins = self.seq.copy()  # when the first stage of those that took part began the micro-batch
        staged = np.flatnonzero(self.stage != _NONE)
        keys = np.stack([self.step, self.mode, kind])[:, staged]
        groups = np.unique(keys, axis=1, return_inverse=True)[1].reshape(-1)
        by_stage = np.lexsort([self.seq[staged], self.stage[staged], groups])
        is_first = np.r_[True, np.diff(groups[by_stage]) > 0]
        begins[staged] = self.seq[staged][by_stage][is_first][groups]
        return np.lexsort([self.rank, self.seq, stage_order, micro_step, kind, self.mode, begins, self.step])
