"""How the statistics of parts make those of the whole: of a tensor's pieces, of its chunks, or of rows of any kind.

Which columns add, and of which the least or the greatest counts, the registry says (`Combine`); the formulae of
`Combine.MOMENTS` stand here. Means and spreads are exact to rounding, also where the spread is far below the mean:
Chan, Golub, LeVeque, Updating formulae and a pairwise algorithm for computing sample variances, 1979. Only
`count_nonfinite` looks at elements.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ..columns import COUNTS, MEASURED, NONFINITE, STATISTIC_COLUMNS, STATISTICS, Combine
from ..records import Measured

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
Integers = npt.NDArray[np.int64]
Columns = dict[str, npt.NDArray[Any]]
"""Statistics by name; NaN stands for null."""
_CHUNK_ITEMS = 1 << 16
_JOIN = {Combine.SUM: np.add, Combine.MIN: np.minimum, Combine.MAX: np.maximum}
_OF_NONE = {Combine.SUM: 0.0, Combine.MIN: math.inf, Combine.MAX: -math.inf}
"""What rows without values contribute, by how their column is combined."""
_NEEDS = {"mean": ("sum",), "std": ("sum", "mean"), "l2": ("sum_sq",)}
"""The other columns that a statistic is made of. Where a row lacks one, the group has no such statistic."""


class Moments:
    """The statistics of a tensor, put together from those of its pieces, one after the other."""

    def __init__(self) -> None:
        self.count = self.nan_count = self.inf_count = self.zero_count = 0
        self.mean = self.deviations = self.sum = self.sum_sq = self.sum_abs = self.sum_fourth = 0.0
        self.min, self.max = math.inf, -math.inf

    def merge(
        self,
        count: int,
        low: float,
        high: float,
        total: float,
        deviations: float,
        sum_abs: float,
        sum_fourth: float,
    ) -> None:
        """Take in the finite values of a piece, of which there is at least one.

        Args:
            count: how many.
            low: the least.
            high: the greatest.
            total: their sum.
            deviations: the sum of the squared differences from their own mean.
            sum_abs: the sum of their magnitudes.
            sum_fourth: the sum of their fourth powers.
        """
        self.min, self.max = min(self.min, low), max(self.max, high)
        mean = total / count
        away = mean - self.mean
        all_count = self.count + count
        self.deviations += deviations + away * away * (self.count * count / all_count)
        self.mean += away * (count / all_count)
        self.count = all_count
        self.sum += total
        self.sum_sq += deviations + mean * mean * count
        self.sum_abs += sum_abs
        self.sum_fourth += sum_fourth


def measured(moments: Moments) -> Measured:
    """The statistics of a tensor, once all its pieces are in."""
    count = moments.count
    counts = moments.nan_count, moments.inf_count, moments.zero_count
    if not count:
        return Measured(nan_count=counts[0], inf_count=counts[1], zero_count=counts[2])
    # Which of two zeros is the lesser depends on the processor; of the statistics none is -0.0.
    low, high, total, sum_sq = moments.min + 0.0, moments.max + 0.0, moments.sum, moments.sum_sq
    if low == high:  # a constant tensor has exactly its value as mean, and no spread; rounding would say 1e-18
        mean, std = low, 0.0
    else:
        mean, std = total / count, math.sqrt(moments.deviations / count)
    l2 = math.sqrt(sum_sq)
    # Infinities of both signs met where one is NaN: what overflowed is not a missing value.
    return Measured(
        mean if mean == mean else math.inf,
        std if std == std else math.inf,
        low,
        high,
        max(0.0 - low, high),
        l2 if l2 == l2 else math.inf,
        total if total == total else math.inf,
        sum_sq if sum_sq == sum_sq else math.inf,
        moments.sum_abs,
        moments.sum_fourth,
        *counts,
    )


def join(how: Combine, values: npt.NDArray[Any], starts: Integers, has_values: Flags | None = None) -> Any:
    """A column of groups from that of their rows.

    Args:
        how: `SUM`, `MIN` or `MAX`.
        values: of the rows, group by group. Further axes are those of a row's own list, joined element by element.
        starts: where each group begins; each has a row.
        has_values: which rows count; without, all do.
    """
    if has_values is not None:
        values = np.where(has_values.reshape(-1, *(1,) * (values.ndim - 1)), values, _OF_NONE[how])
    return _JOIN[how].reduceat(values, starts, axis=0) if len(starts) else values[:0]


def merge(
    rows: Mapping[str, Floats], num_finite: npt.NDArray[Any], has_values: Flags, starts: Integers
) -> dict[str, Floats]:
    """The statistics of groups of rows that share no element.

    Args:
        rows: each statistic of all rows, group by group; NaN for null.
        num_finite: finite elements of each row.
        has_values: the rows with finite elements that count.
        starts: where each group begins; each has a row.

    Returns:
        Each statistic of every group; NaN for null: where no row counts, or one that does lacks it. What overflowed is
        infinite, as in a row.
    """
    with np.errstate(all="ignore"):
        merged: dict[str, Floats] = {
            one.name: join(one.combine, rows[one.name], starts, has_values)
            for one in STATISTIC_COLUMNS
            if one.combine in _JOIN
        }
        count = join(Combine.SUM, num_finite, starts, has_values)
        is_constant = merged["min"] == merged["max"]
        mean = np.where(is_constant, merged["min"], merged["sum"] / count)
        away = rows["mean"] - np.repeat(mean, np.diff(np.append(starts, len(num_finite))))
        deviations = join(Combine.SUM, num_finite * (rows["std"] ** 2 + away**2), starts, has_values)
        merged["mean"] = mean
        merged["std"] = np.where(is_constant, 0.0, np.sqrt(deviations / count))
        merged["l2"] = np.sqrt(merged["sum_sq"])
    lacks = {name: _any(has_values & np.isnan(rows[name]), starts) for name in STATISTICS}
    for name, values in merged.items():
        is_null = np.logical_or.reduce([count == 0, lacks[name], *(lacks[other] for other in _NEEDS.get(name, ()))])
        merged[name] = np.where(is_null, np.nan, np.where(np.isnan(values), math.inf, values))
    return merged


def _any(flags: Flags, starts: Integers) -> Flags:
    return np.asarray(np.logical_or.reduceat(flags, starts) if len(starts) else flags[:0])


def combine_chunks(
    chunks: Mapping[str, Floats], numels: Floats, factors: Floats, starts: npt.NDArray[np.int64]
) -> Columns:
    """Statistics of groups of chunks that share no element.

    Args:
        chunks: each statistic of all chunks, group by group, as float64; counts too; NaN for null.
        numels: elements of each chunk.
        factors: what each chunk's values are multiplied with.
        starts: where each group begins.

    Returns:
        Each statistic of every group; null wherever some chunk has none although it has elements.
    """
    if not len(starts):
        return {name: np.zeros(0) for name in (*STATISTICS, *COUNTS)}
    own_counts = {name: np.where(numels == 0, 0.0, chunks[name]) for name in COUNTS}
    counts = {name: join(Combine.SUM, column, starts) for name, column in own_counts.items()}
    num_finite = numels - np.add.reduce([own_counts[name] for name in NONFINITE])
    is_known = np.logical_and.reduceat(~np.isnan(own_counts[MEASURED]), starts)
    negative = factors < 0
    with np.errstate(all="ignore"):
        scaled = {
            one.name: chunks[one.name] * (factors if one.has_sign else np.abs(factors)) ** one.degree
            for one in STATISTIC_COLUMNS
        }
        lows, highs = scaled["min"], scaled["max"]
        scaled |= {"min": np.where(negative, highs, lows), "max": np.where(negative, lows, highs)}
    merged = merge(scaled, num_finite, num_finite > 0, starts)
    # One chunk alone keeps what was measured, bit by bit: a mean is not always sum / n to the last digit.
    same = (np.diff([*starts, len(numels)]) == 1) & (factors[starts] == 1.0)
    for name in STATISTICS:
        merged[name] = np.where(same, chunks[name][starts], np.where(is_known, merged[name], np.nan))
    return {**merged, **{name: np.where(is_known, values, np.nan) for name, values in counts.items()}}


def numbers(column: Any) -> Floats:
    """A column of numbers as float64; NaN for null."""
    return np.asarray(column.cast(pa.float64(), safe=False).fill_null(math.nan).to_numpy(), np.float64)


def integers(column: Any, null: int = -1) -> Integers:
    """A column of whole numbers as int64."""
    return np.asarray(column.cast(pa.int64()).fill_null(null).to_numpy(), np.int64)


def combine_rows(table: Any, groups: Integers, num_groups: int) -> dict[str, Any]:
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
