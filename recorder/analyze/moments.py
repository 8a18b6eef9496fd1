"""Owns the statistics of rows combined into those of groups of rows, and counts of arrays. Never reads a run.

Means and spreads combine exactly to rounding, also where the spread is far below the mean: Chan, Golub, LeVeque,
Updating formulae and a pairwise algorithm for computing sample variances, 1979.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ..format.schema import COUNTS, STATISTICS

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
_CHUNK_ITEMS = 1 << 16


def numbers(column: Any) -> Floats:
    """A column of numbers as float64; NaN for null."""
    return np.asarray(column.cast(pa.float64(), safe=False).fill_null(math.nan).to_numpy(), np.float64)


def integers(column: Any, null: int = -1) -> Integers:
    """A column of whole numbers as int64."""
    return np.asarray(column.cast(pa.int64()).fill_null(null).to_numpy(), np.int64)


def combine(table: Any, groups: Integers, num_groups: int) -> dict[str, Any]:
    """The statistics of each group, as columns of length `num_groups`.

    Args:
        table: rows with `numel`, the statistics and the counts; and `rows`, `rows_without` where they are combined
            from rows themselves.
        groups: which group each row is of.
        num_groups: each has at least one row.

    Returns:
        Columns `rows`, `rows_without` (how many rows have no statistics and are not in them), `numel` (of those that
        are), the statistics and the counts. Statistics of a group with no finite element are null.
    """
    order = np.argsort(groups, kind="stable")
    starts = np.searchsorted(groups[order], np.arange(num_groups))

    def add(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return np.add.reduceat(values[order], starts) if num_groups else values[:0]

    is_known = table.column("nan_count").is_valid().to_numpy() & table.column("inf_count").is_valid().to_numpy()
    nan, inf, zero = (np.where(is_known, integers(table.column(name), 0), 0) for name in COUNTS)
    numel = np.where(is_known, integers(table.column("numel")), 0)
    known = {name: numbers(table.column(name)) for name in STATISTICS}
    # Complex rows have counts alone: they add to the counts, and nothing is known of their values.
    has_values = is_known & ~np.isnan(known["mean"])
    finite = np.where(has_values, numel - nan - inf, 0)
    with np.errstate(all="ignore"):
        total, squares = (add(np.where(has_values, known[name], 0.0)) for name in ("sum", "sum_sq"))
        low = _extreme(np.minimum, np.where(has_values, known["min"], math.inf), order, starts)
        high = _extreme(np.maximum, np.where(has_values, known["max"], -math.inf), order, starts)
        count = add(finite)
        is_constant = low == high
        mean = np.where(is_constant, low, total / count)
        away = np.where(has_values, known["mean"], 0.0) - mean[groups]
        deviations = add(np.where(has_values, finite * (known["std"] ** 2 + away**2), 0.0))
        std = np.where(is_constant, 0.0, np.sqrt(deviations / count))
        values = {
            "mean": mean,
            "std": std,
            "min": low,
            "max": high,
            "absmax": np.maximum(-low, high),
            "l2": np.sqrt(squares),
            "sum": total,
            "sum_sq": squares,
        }
    is_empty = count == 0
    # What overflowed is infinite, as in a row; infinities of both signs leave NaN.
    columns: dict[str, Any] = {
        name: pa.array(np.where(np.isnan(value), math.inf, value), pa.float64(), mask=is_empty)
        for name, value in values.items()
    }
    rows = integers(table.column("rows")) if "rows" in table.column_names else np.ones(len(groups), np.int64)
    without = integers(table.column("rows_without")) if "rows" in table.column_names else (~is_known).astype(np.int64)
    nothing = add(is_known.astype(np.int64)) == 0
    counts = {name: pa.array(add(value), mask=nothing) for name, value in zip(COUNTS, (nan, inf, zero), strict=True)}
    head = {"rows": pa.array(add(rows)), "rows_without": pa.array(add(without)), "numel": pa.array(add(numel))}
    return head | columns | counts


def _extreme(function: np.ufunc, values: Floats, order: Integers, starts: Integers) -> Floats:
    return np.asarray(function.reduceat(values[order], starts) if len(starts) else values[:0])


def count_nonfinite(array: npt.NDArray[Any]) -> tuple[int, int]:
    """How many elements are NaN, how many infinite; a complex one is NaN if a part is, else infinite if a part is."""
    if array.dtype.kind in "biu":
        return 0, 0
    num_nan = num_inf = 0
    flat = array.reshape(-1)
    for start in range(0, flat.size, _CHUNK_ITEMS):
        chunk = flat[start : start + _CHUNK_ITEMS]
        if chunk.dtype.names:  # complex32, as pairs of halves
            chunk = chunk["real"].astype(np.float32) + 1j * chunk["imag"].astype(np.float32)
        elif chunk.dtype.kind == "V" or chunk.dtype.itemsize < 4:  # ml_dtypes' own functions are slow
            chunk = chunk.astype(np.float32)
        num_finite = int(np.count_nonzero(np.isfinite(chunk)))
        if num_finite < chunk.size:
            is_nan = int(np.count_nonzero(np.isnan(chunk)))
            num_nan += is_nan
            num_inf += chunk.size - num_finite - is_nan
    return num_nan, num_inf
