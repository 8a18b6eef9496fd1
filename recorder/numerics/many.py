"""Histograms and sums of units of many rows at once, as arrays, for questions that are asked of each row of a long run.

`histogram` and `units` say what the bytes mean, and why those of one row are none. Here such rows are left out. No
Python loop runs over rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ..sites import MAX_COUNT
from .histogram import HIGHEST, LOWEST

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
_HEAD_BYTES = 4
_TYPES = {width: np.dtype(f"<u{width}") for width in (1, 2, 4, 8)}
_MOST_BYTES = 1 << 20
"""The bytes of the rows that are looked at together: what is made of them fits into a cache."""


class Histograms(NamedTuple):
    """Histograms of rows that have the same number of bins."""

    rows: Ints
    """Which rows of the column."""
    exponents: Ints
    """Shape (rows, bins)."""
    counts: Ints
    """Shape (rows, 2, bins): of the negative values and of the positive ones."""
    infinite: Ints
    """Shape (rows, 2)."""


class ManyUnits(NamedTuple):
    """Sums of units of rows that have the same number of units."""

    rows: Ints
    """Which rows of the column."""
    sum: Floats
    """Shape (rows, units), as the three that follow."""
    sum_sq: Floats
    absmax: Floats
    zero_count: Ints
    num_values: Ints
    """How many elements each unit of a row has."""


class _Alike(NamedTuple):
    """Rows whose bytes have the same length and the same beginning."""

    rows: Ints
    width: int
    """Bytes of a count."""
    second: int
    """The byte behind that."""
    data: Bytes
    """Shape (rows, bytes)."""


def histograms_of(column: Any, rows: Ints) -> Iterator[Histograms]:
    """Those of rows of a column of bytes, which are not null there."""
    for alike in _alike(column, rows, head_bytes=2):
        num_bytes = alike.data.shape[1] - _HEAD_BYTES
        if alike.second or num_bytes % (2 * alike.width) or num_bytes < 2 * alike.width:
            continue
        numbers = _counts(alike.data[:, _HEAD_BYTES:], alike.width)
        num_bins = numbers.shape[1] // 2 - 1
        first = _view(alike.data[:, 2:_HEAD_BYTES], np.dtype("<i2"))[:, 0].astype(np.int64)
        is_one = ((numbers >= 0) & (numbers < MAX_COUNT)).all(axis=1)
        if num_bins:
            is_one &= (first >= LOWEST) & (first <= HIGHEST + 1 - num_bins)
        numbers, first = numbers[is_one], first[is_one]
        yield Histograms(
            rows=alike.rows[is_one],
            exponents=first[:, None] + np.arange(num_bins),
            counts=numbers[:, 2:].reshape(len(numbers), 2, num_bins),
            infinite=numbers[:, :2],
        )


def units_of(column: Any, rows: Ints, shapes: Sequence[tuple[int, ...] | None], shape_of: Ints) -> Iterator[ManyUnits]:
    """Those of rows of a column of bytes, which are not null there.

    Args:
        column: of bytes, as a batch or a table has it.
        rows: indices in the column.
        shapes: of tensors; None for one that is none.
        shape_of: by index in the column, which of these the row's tensor has.
    """
    for alike in _alike(column, rows, head_bytes=_HEAD_BYTES):
        num, rest = divmod(alike.data.shape[1] - _HEAD_BYTES, 24 + alike.width)
        dim, has_layout = alike.second, alike.data[0, 2:_HEAD_BYTES].any()
        sizes = [shape[dim] if shape is not None and dim < len(shape) else -1 for shape in shapes]
        numels = [_numel(shape) for shape in shapes]
        is_one = np.array(sizes, np.int64)[shape_of[alike.rows]] == num
        if rest or has_layout or not num or not is_one.any():
            continue
        num_values = np.array(numels, np.int64)[shape_of[alike.rows]] // num
        end = _HEAD_BYTES + 24 * num
        sums = _view(alike.data[:, _HEAD_BYTES:end], np.dtype("<f8")).astype(np.float64, copy=False).reshape(-1, 3, num)
        zeros = _counts(alike.data[:, end:], alike.width)
        is_one &= ((zeros >= 0) & (zeros <= np.minimum(num_values, MAX_COUNT)[:, None])).all(axis=1)
        is_one &= (sums[:, 1:] >= 0).all(axis=(1, 2))
        sums, zeros = sums[is_one], zeros[is_one]
        yield ManyUnits(alike.rows[is_one], sums[:, 0], sums[:, 1], sums[:, 2], zeros, num_values[is_one])


def _numel(shape: tuple[int, ...] | None) -> int:
    numel = 0 if shape is None else 1
    for size in shape or ():
        numel *= size
    return min(numel, np.iinfo(np.int64).max)


def _alike(column: Any, rows: Ints, head_bytes: int) -> Iterator[_Alike]:
    """Rows of a column by how many bytes they have and how these begin, a bounded number of bytes at a time."""
    if not len(rows):
        return
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    _, offsets, buffer = array.buffers()
    if buffer is None:
        return
    data = np.frombuffer(buffer, np.uint8)
    ends = np.frombuffer(offsets, "<i4", len(array) + 1, 4 * array.offset).astype(np.int64)
    sizes = ends[1:] - ends[:-1]
    rows = rows[sizes[rows] >= _HEAD_BYTES]
    if not len(rows):
        return
    heads = np.lib.stride_tricks.sliding_window_view(data, _HEAD_BYTES)[ends[rows]]
    numbers = _view(heads[:, :head_bytes], _TYPES[head_bytes])[:, 0].astype(np.int64)
    keys = sizes[rows] << 32 | numbers
    order = np.argsort(keys, kind="stable")
    for some in np.split(order, np.flatnonzero(np.diff(keys[order])) + 1):
        first = int(some[0])
        width, second = heads[first, :2].tolist()
        if width not in _TYPES:
            continue
        size = int(sizes[rows[first]])
        windows = np.lib.stride_tricks.sliding_window_view(data, size)
        num_rows = max(_MOST_BYTES // size, 1)
        for start in range(0, len(some), num_rows):
            own = rows[some[start : start + num_rows]]
            yield _Alike(own, width, second, windows[ends[own]])


def _view(data: Bytes, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    return np.ascontiguousarray(data).view(dtype)


def _counts(data: Bytes, width: int) -> Ints:
    return np.asarray(_view(data, _TYPES[width]).astype(np.int64))
