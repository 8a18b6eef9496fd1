"""Combines statistics of a tensor's pieces, of its chunks on several ranks, or of any rows.

`Combine` in `columns` says for which columns values are added, and for which the least or the greatest value is taken.
This module has the formulae of `Combine.MOMENTS`, and adds up histograms and units (channels). Means and standard
deviations are exact to rounding, even where the standard deviation is far below the mean: Chan, Golub, LeVeque,
Updating formulae and a pairwise algorithm for computing sample variances, 1979. Only `count_nonfinite` reads elements.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ..columns import COUNTS, MEASURED, NONFINITE, STATISTIC_COLUMNS, STATISTICS, Combine
from ..errors import CorruptError
from ..records import Measured
from .histogram import Histogram
from .keys import array_of, column_of
from .units import Units

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
Integers = npt.NDArray[np.int64]
Columns = dict[str, npt.NDArray[Any]]
"""Arrays of statistics by name. NaN stands for null."""
_CHUNK_ITEMS = 1 << 16
_JOIN = {Combine.SUM: np.add, Combine.MIN: np.minimum, Combine.MAX: np.maximum}
_OF_NONE = {Combine.SUM: 0.0, Combine.MIN: math.inf, Combine.MAX: -math.inf}
"""For each way of combining a column, the number that takes the place of a row without values."""
_NEEDS = {"mean": ("sum",), "std": ("sum", "mean"), "l2": ("sum_sq",)}
"""The columns from which a statistic is computed. A group has the statistic only if all its rows have these columns."""


class Moments:
    """The statistics of a tensor. Its pieces are added one after the other."""

    def __init__(self) -> None:
        self.count = self.nan_count = self.inf_count = self.zero_count = 0
        self.mean = self.deviations = self.sum = self.sum_sq = self.sum_abs = self.sum_fourth = 0.0
        self.min, self.max = math.inf, -math.inf

    def merge(
        self, count: int, low: float, high: float, total: float, deviations: float, sum_abs: float, sum_fourth: float
    ) -> None:
        """Add a piece of `count` > 0 finite values. `deviations` sums their squared distances from their mean."""
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
    """Return a tensor's statistics from the moments of all its pieces."""
    count = moments.count
    counts = moments.nan_count, moments.inf_count, moments.zero_count
    if not count:
        return Measured(nan_count=counts[0], inf_count=counts[1], zero_count=counts[2])
    # Processors disagree on which of 0.0 and -0.0 is the lesser, so every zero statistic is made 0.0.
    low, high, total, sum_sq = moments.min + 0.0, moments.max + 0.0, moments.sum, moments.sum_sq
    if low == high:  # a constant's mean is the constant, and its standard deviation 0; rounding would give 1e-18
        mean, std = low, 0.0
    else:
        mean, std = total / count, math.sqrt(moments.deviations / count)
    l2 = math.sqrt(sum_sq)
    # A NaN here is an overflow and no missing value: infinities of both signs were added.
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
    """Combine the values of each group of rows by `how`: `SUM`, `MIN` or `MAX`.

    A group is a range of rows, and `starts` has the index at which each nonempty group begins. If `values` has several
    axes, values are combined element by element. Rows whose `has_values` is False do not count.
    """
    if has_values is not None:
        values = np.where(has_values.reshape(-1, *(1,) * (values.ndim - 1)), values, _OF_NONE[how])
    return _JOIN[how].reduceat(values, starts, axis=0) if len(starts) else values[:0]


def merge(
    rows: Mapping[str, Floats], num_finite: npt.NDArray[Any], has_values: Flags, starts: Integers
) -> dict[str, Floats]:
    """Return the statistics of groups of rows that share no elements. A statistic that overflows is infinite.

    `rows` has each statistic of all rows, group by group, with NaN for null; a group begins at each of `starts`.
    `num_finite` is the number of a row's finite elements. Rows whose `has_values` is False do not count. A statistic is
    NaN if no row of the group counts, or if a row that counts does not have the statistic.
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
    is_missing = {name: join(Combine.MAX, has_values & np.isnan(rows[name]), starts) for name in STATISTICS}
    for name, values in merged.items():
        is_null = np.logical_or.reduce(
            [count == 0, is_missing[name], *(is_missing[other] for other in _NEEDS.get(name, ()))]
        )
        merged[name] = np.where(is_null, np.nan, np.where(np.isnan(values), math.inf, values))
    return merged


def combine_chunks(
    chunks: Mapping[str, Floats], numels: Floats, factors: Floats, starts: npt.NDArray[np.int64]
) -> Columns:
    """Return the statistics of groups of chunks. Chunks of a group share no elements.

    `chunks` has each statistic and count of all chunks, group by group, as float64 with NaN for null; a group begins at
    each of `starts`. A chunk has `numels` elements, and its values are multiplied by its factor. A statistic is null if
    a chunk that has elements does not have the statistic.
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
    # A group of one chunk keeps its measured statistics unchanged, because sum / n may differ from the measured mean in
    # the last digit.
    same = (np.diff([*starts, len(numels)]) == 1) & (factors[starts] == 1.0)
    for name in STATISTICS:
        merged[name] = np.where(same, chunks[name][starts], np.where(is_known, merged[name], np.nan))
    return {**merged, **{name: np.where(is_known, values, np.nan) for name, values in counts.items()}}


def norm_of_parts(norms: npt.NDArray[Any], axis: int) -> Floats:
    """Return the norms of tensors from the norms of their parts, which lie along `axis`. NaN if a part is."""
    return np.asarray(np.sqrt(np.square(norms.astype(np.float64, copy=False)).sum(axis=axis)))


def sum_of_chunks(values: Floats, numels: Floats, groups: Integers, whole: npt.NDArray[Any]) -> Floats:
    """Return the sum over each group of chunks. NaN if the chunks have fewer elements than the tensor (`whole`)."""
    sums = np.asarray(np.bincount(groups, values), np.float64)
    sums[np.bincount(groups, numels) < whole] = np.nan
    return sums


def numbers(column: Any) -> Floats:
    """Return a column as float64, with NaN for null."""
    return np.asarray(array_of(column.cast(pa.float64(), safe=False), math.nan), np.float64)


def integers(column: Any, null: int = -1) -> Integers:
    """Return a column as int64, with the integer `null` for null."""
    return np.asarray(array_of(column.cast(pa.int64()), null), np.int64)


def combine_rows(table: Any, groups: Integers, num_groups: int) -> dict[str, Any]:
    """Return the statistics of each group of rows, as columns of length `num_groups`. Each group has at least one row.

    `table` has `numel`, the statistics and the counts. If its rows are already combined rows, it also has `rows` and
    `rows_without`. The result has all of these columns: `rows_without` counts the rows without statistics, and `numel`
    counts the elements of rows with statistics. A statistic is null for a group without finite elements, and if a row
    of the group lacks the statistic because its file has an earlier version.
    """
    order = np.argsort(groups, kind="stable")
    starts = np.searchsorted(groups[order], np.arange(num_groups))

    def add(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        merged: npt.NDArray[Any] = join(Combine.SUM, values[order], starts)
        return merged

    is_known = np.logical_and.reduce([array_of(table.column(name).is_valid()) for name in (MEASURED, *NONFINITE)])
    own_counts = {name: np.where(is_known, integers(table.column(name), 0), 0) for name in COUNTS}
    numel = np.where(is_known, integers(table.column("numel")), 0)
    known = {name: numbers(table.column(name))[order] for name in STATISTICS}
    # Rows of complex tensors have counts alone. The counts are added; the statistics stay unknown.
    finite = (numel - np.add.reduce([own_counts[name] for name in NONFINITE]))[order]
    merged = merge(known, finite, is_known[order] & ~np.isnan(known["mean"]) & (finite > 0), starts)
    columns = {name: column_of(merged[name], mask=np.isnan(merged[name])) for name in STATISTICS}
    rows = integers(table.column("rows")) if "rows" in table.column_names else np.ones(len(groups), np.int64)
    without = integers(table.column("rows_without")) if "rows" in table.column_names else (~is_known).astype(np.int64)
    nothing = add(is_known.astype(np.int64)) == 0
    counts = {}
    for name, value in own_counts.items():
        is_lacking = add((is_known & array_of(table.column(name).is_null())).astype(np.int64)) > 0
        counts[name] = column_of(add(value), mask=nothing | is_lacking)
    head = {"rows": column_of(add(rows)), "rows_without": column_of(add(without)), "numel": column_of(add(numel))}
    return head | columns | counts


def long_form(table: Any, keys: Sequence[str], statistics: Sequence[str]) -> Any:
    """Return a table with a row for each non-null number: the columns `keys`, ``statistic`` (a name) and ``value``."""
    schema = pa.schema([*map(table.schema.field, keys), ("statistic", pa.string()), ("value", pa.float64())])
    tables = [schema.empty_table()]
    for name in statistics:
        known = table.filter(table.column(name).is_valid())
        columns = [*known.select(keys).columns, pa.repeat(name, known.num_rows), known.column(name).cast(pa.float64())]
        tables.append(pa.table(columns, schema=schema))
    return pa.concat_tables(tables)


def count_nonfinite(array: npt.NDArray[Any]) -> tuple[int, int]:
    """Return the numbers of NaN and of infinite elements. A complex element with a NaN part counts as NaN."""
    if array.dtype.kind in "biu":
        return 0, 0
    num_nan = num_inf = 0
    flat = array.reshape(-1)
    for start in range(0, flat.size, _CHUNK_ITEMS):
        chunk = flat[start : start + _CHUNK_ITEMS]
        if chunk.dtype.names:  # complex32 is stored as pairs of halves
            chunk = chunk["real"].astype(np.float32) + 1j * chunk["imag"].astype(np.float32)
        elif chunk.dtype.kind == "V" or chunk.dtype.itemsize < 4:  # the ufuncs of ml_dtypes are slow
            chunk = chunk.astype(np.float32)
        num_finite = int(np.count_nonzero(np.isfinite(chunk)))
        if num_finite < chunk.size:
            is_nan = int(np.count_nonzero(np.isnan(chunk)))
            num_nan += is_nan
            num_inf += chunk.size - num_finite - is_nan
    return num_nan, num_inf


def added(histograms: Iterable[Histogram]) -> Histogram:
    """Return the sum of several histograms."""
    return sum(histograms, Histogram())


def join_histograms(pieces: Sequence[tuple[bytes | None, float, float]]) -> bytes | str | None:
    """Return a tensor's encoded histogram. `pieces`: the encoded histogram, factor and number of elements of chunks.

    Return None if a chunk with elements has no histogram. If the histogram is missing for another reason, return that
    reason as a text.
    """
    (first, factor, _), *others = pieces
    if first is None or (not others and factor == 1.0):
        return first
    if any(data is None and numel for data, _, numel in pieces):
        return None
    try:
        scaled = [Histogram.from_bytes(data).scaled(factor) for data, factor, _ in pieces if data is not None]
    except CorruptError:
        return "damaged"
    known = [one for one in scaled if one is not None]
    return added(known).to_bytes() if len(known) == len(scaled) else "scaled by a factor that is no power of two"


def added_by_group(column: Any, groups: Integers, num_groups: int) -> list[bytes | None]:
    """Add up the histograms of each group of rows. A group has None if none of its rows has a histogram."""
    totals: list[Histogram | None] = [None] * num_groups
    indices = np.flatnonzero(array_of(column.is_valid())) if column.null_count < len(column) else np.zeros(0, np.int64)
    rows = column.take(column_of(indices)).to_pylist()
    for group, data in zip(groups[indices].tolist(), rows, strict=True):
        with contextlib.suppress(CorruptError):
            one, known = Histogram.from_bytes(data), totals[group]
            totals[group] = one if known is None else known + one
    return [None if one is None else one.to_bytes() for one in totals]


class ChunkUnits(NamedTuple):
    """The sums over the units (neurons or channels) of a chunk, and which units of the tensor they are."""

    units: Units
    ranges: Iterable[tuple[int, int, int]]
    """Ranges of units. Each is the first unit in the chunk, the first unit in the tensor, and the number of units."""


def joined(pieces: Iterable[ChunkUnits], shape: Sequence[int], dim: int) -> Units:
    """Return the sums over a tensor's units, from its chunks. Raises ValueError if the chunks do not fit together."""
    num = shape[dim]
    sums, zeros = np.zeros((3, num)), np.zeros(num, np.int64)
    for units, ranges in pieces:
        if units.dim != dim:
            raise ValueError(f"units of dim {units.dim} cannot be joined with units of dim {dim}")
        for local, start, size in ranges:
            if local + size > len(units) or start + size > num:
                raise ValueError(f"{len(units)} units do not include units {local} to {local + size}")
            at, own = slice(start, start + size), slice(local, local + size)
            sums[0, at] += units.sum[own]
            sums[1, at] += units.sum_sq[own]
            np.maximum(sums[2, at], units.absmax[own], out=sums[2, at])
            zeros[at] += units.zero_count[own]
    num_values = math.prod(shape) // num if num else 0
    return Units(dim=dim, sum=sums[0], sum_sq=sums[1], absmax=sums[2], zero_count=zeros, num_values=num_values)
