"""Numbers that rules read out of histograms and sums of units: what is in the bytes of a row, as a few numbers.

A rule is fed columns of numbers alone. Each number here is null where the row lacks the bytes, or where they say
nothing of it. Bytes that are damaged are none.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ...columns import parse_shape
from ...errors import RunError
from ...numerics.histogram import NORMAL_EXPONENTS
from ...numerics.keys import encode
from ...numerics.many import Histograms, ManyUnits, histograms_of, units_of

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

ACTIVE = 0.01
"""A unit that is not zero in a smaller share of its values is dead."""
LEAST_VALUES = 32
"""Of fewer values of a unit, nobody can say that it is dead."""

_NO_ENDS = (0, 0)


class _Ends(NamedTuple):
    """Histograms of rows, each with the exponents of its type's least normal number and of its largest ones."""

    histograms: Histograms
    lowest: Integers
    highest: Integers


def _dead_share(units: ManyUnits) -> Floats:
    """The share of units that are dead, where each has enough values."""
    zero_share = units.zero_count / np.maximum(units.num_values, 1)[:, None]
    share = np.mean(1 - zero_share < ACTIVE, axis=1)
    return np.where(units.num_values >= LEAST_VALUES, share, np.nan)


def _largest(units: ManyUnits) -> Floats:
    """The largest magnitude of a unit, in the root mean squares of the median of the units that are not dead."""
    sizes = np.sqrt(units.sum_sq / np.maximum(units.num_values, 1)[:, None])
    num = np.count_nonzero(sizes, axis=1)
    is_told = (num >= 2) & np.isfinite(sizes).all(axis=1)
    ascending = np.sort(np.where(sizes > 0, sizes, np.inf), axis=1)
    indices = np.arange(len(sizes)), np.maximum(num - 1, 0) // 2, np.minimum(num // 2, sizes.shape[1] - 1)
    middle = (ascending[indices[0], indices[1]] + ascending[indices[0], indices[2]]) / 2
    return np.where(is_told, units.absmax.max(axis=1) / middle, np.nan)


def _subnormal_share(one: _Ends) -> Floats:
    """Which share of the values that are not zero lies below the least normal number of the type."""
    counts = one.histograms.counts.sum(axis=1)
    return _share((counts * (one.histograms.exponents < one.lowest[:, None])).sum(axis=1), one.histograms)


def _top_share(one: _Ends) -> Floats:
    """Which share of the values that are not zero lies in the highest power of two of the type, or is infinite.

    Of positive values alone: the negative ones may be a mask.
    """
    counts = one.histograms.counts[:, 1] * (one.histograms.exponents >= one.highest[:, None])
    return _share(counts.sum(axis=1) + one.histograms.infinite[:, 1], one.histograms)


def _share(counts: Integers, histograms: Histograms) -> Floats:
    totals = histograms.counts.sum(axis=(1, 2)) + histograms.infinite.sum(axis=1)
    return np.asarray(counts / totals)


_OF_UNITS = {"units.dead_share": _dead_share, "units.largest": _largest}
_OF_HISTOGRAMS = {"histogram.subnormal_share": _subnormal_share, "histogram.top_share": _top_share}
SOURCES = dict.fromkeys(_OF_UNITS, "units") | dict.fromkeys(_OF_HISTOGRAMS, "histogram")
"""The numbers, by the name that rules give them: which bytes of a row each is read out of."""


def columns_of(names: Sequence[str], table: Any) -> list[Any]:
    """These numbers of each row of a table, which has the bytes and the columns `dtype` and `shape`."""
    columns = {name: np.full(table.num_rows, np.nan) for name in names}
    dtype_of, dtypes = encode(table.column("dtype"))
    of_units, of_histograms = ([name for name in names if name in some] for some in (_OF_UNITS, _OF_HISTOGRAMS))
    with np.errstate(all="ignore"):
        if of_units:
            is_float = np.array([*("float" in dtype for dtype in dtypes), False], np.bool_)[dtype_of]
            shape_of, texts = encode(table.column("shape"))
            shapes = [*map(_shape, texts), None]
            for units in units_of(table.column("units"), _there(table, "units", is_float), shapes, shape_of):
                for name in of_units:
                    columns[name][units.rows] = _OF_UNITS[name](units)
        if of_histograms:
            ends = np.array([*(NORMAL_EXPONENTS.get(dtype, _NO_ENDS) for dtype in dtypes), _NO_ENDS], np.int64)[
                dtype_of
            ]
            rows = _there(table, "histogram", ends[:, 0] < ends[:, 1])
            for histograms in histograms_of(table.column("histogram"), rows):
                one = _Ends(histograms, *ends[histograms.rows].T)
                for name in of_histograms:
                    columns[name][histograms.rows] = _OF_HISTOGRAMS[name](one)
    return [pa.array(columns[name]) for name in names]


def _there(table: Any, column: str, chosen: npt.NDArray[np.bool_]) -> Integers:
    """The rows among those that are chosen that have the bytes."""
    return np.flatnonzero(chosen & table.column(column).is_valid().to_numpy(zero_copy_only=False))


def _shape(text: str) -> tuple[int, ...] | None:
    with suppress(RunError):
        return parse_shape(text)
    return None
