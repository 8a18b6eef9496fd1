"""The statistics of rows combined into those of groups of rows, and counts of arrays. Never reads a run."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ..format.moments import Floats, Integers, join, merge
from ..format.schema import COUNTS, MEASURED, NONFINITE, STATISTICS, Combine

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
        are), the statistics and the counts. Statistics of a group with no finite element are null, and so is one
        that some row of the group lacks, because its file is of an earlier version.
    """
    order = np.argsort(groups, kind="stable")
    starts = np.searchsorted(groups[order], np.arange(num_groups))

    def add(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        merged: npt.NDArray[Any] = join(Combine.SUM, values[order], starts)
        return merged

    is_known = np.logical_and.reduce([table.column(name).is_valid().to_numpy() for name in (MEASURED, *NONFINITE)])
    own_counts = {name: np.where(is_known, integers(table.column(name), 0), 0) for name in COUNTS}
    numel = np.where(is_known, integers(table.column("numel")), 0)
    known = {name: numbers(table.column(name))[order] for name in STATISTICS}
    # Complex rows have counts alone: they add to the counts, and nothing is known of their values.
    finite = (numel - np.add.reduce([own_counts[name] for name in NONFINITE]))[order]
    merged = merge(known, finite, is_known[order] & ~np.isnan(known["mean"]) & (finite > 0), starts)
    columns = {name: pa.array(merged[name], pa.float64(), mask=np.isnan(merged[name])) for name in STATISTICS}
    rows = integers(table.column("rows")) if "rows" in table.column_names else np.ones(len(groups), np.int64)
    without = integers(table.column("rows_without")) if "rows" in table.column_names else (~is_known).astype(np.int64)
    nothing = add(is_known.astype(np.int64)) == 0
    counts = {}
    for name, value in own_counts.items():
        is_lacking = add((is_known & table.column(name).is_null().to_numpy()).astype(np.int64)) > 0
        counts[name] = pa.array(add(value), mask=nothing | is_lacking)
    head = {"rows": pa.array(add(rows)), "rows_without": pa.array(add(without)), "numel": pa.array(add(numel))}
    return head | columns | counts


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
