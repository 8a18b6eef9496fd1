"""Histograms and units of rows side by side: shares in the same bins, dead units, and how far two rows are apart.

What a row lacks, or has damaged, is None here; `recorder verify` tells of damage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from ..columns import parse_shape
from ..errors import CorruptError
from .histogram import NORMAL_EXPONENTS, Histogram
from .moments import Floats, Integers
from .units import Units


class Bins(NamedTuple):
    """Shares of the values of several tensors by magnitude, in the same bins."""

    first: int
    """The exponent of the first bin: its values are from 2^first on."""
    exponents_per_bin: int
    """How many powers of two each bin has."""
    shares: list[list[float]]
    """For each tensor the share of its values, of all signs and with those that are zero or not finite counted, that
    lies in each bin; all of the same length, which is 0 where every value is zero or not finite."""

    @property
    def last(self) -> int:
        """The exponent of the last power of two."""
        return self.first + self.exponents_per_bin * max(map(len, self.shares), default=0) - 1


def histogram_of_row(row: Mapping[str, Any], suffix: str = "") -> Histogram | None:
    """That of a row, by the names of its columns; None where it has none.

    Args:
        row: with `histogram`, `zero_count` and `nan_count`.
        suffix: what follows these names.
    """
    data = row[f"histogram{suffix}"]
    if data is None:
        return None
    counts = {name: row[f"{name}{suffix}"] or 0 for name in ("zero_count", "nan_count")}
    try:
        return Histogram.from_bytes(data, **counts)
    except CorruptError:
        return None


def added_by_group(column: Any, groups: Integers, num_groups: int) -> list[bytes | None]:
    """Add up the histograms of each group; None where none of its rows has one.

    Args:
        column: the column `histogram` of the rows.
        groups: which group each row is of.
        num_groups: how many there are.
    """
    totals: list[Histogram | None] = [None] * num_groups
    indices = np.flatnonzero(column.is_valid().to_numpy()) if column.null_count < len(column) else np.zeros(0, np.int64)
    rows = column.take(pa.array(indices, pa.int64())).to_pylist()
    for group, data in zip(groups[indices].tolist(), rows, strict=True):
        one = histogram_of_row({"histogram": data, "zero_count": 0, "nan_count": 0})
        if one is not None:
            known = totals[group]
            totals[group] = one if known is None else known + one
    return [None if one is None else one.to_bytes() for one in totals]


def bins_of(histograms: Sequence[Histogram], max_bins: int) -> Bins:
    """The shares of each in the same bins, no more than `max_bins`."""
    used = [one.exponents[one.counts.any(axis=0)] for one in histograms]
    known = [exponents for exponents in used if len(exponents)]
    if not known:
        return Bins(0, 1, [[] for _ in histograms])
    first = int(min(exponents[0] for exponents in known))
    length = int(max(exponents[-1] for exponents in known)) + 1 - first
    width = -(-length // max_bins)
    shares = []
    for one, exponents in zip(histograms, used, strict=True):
        binned = np.zeros(-(-length // width))
        counts = one.counts.sum(axis=0)[exponents - one.first]
        np.add.at(binned, (exponents - first) // width, counts)
        shares.append((binned / max(1, _num_all(one))).tolist())
    return Bins(first, width, shares)


def share_apart(a: Histogram, b: Histogram) -> float | None:
    """Which share of the values would have to change sign or power of two for the two to be spread alike.

    From 0 for the same shares to 1 where no bin has values of both. None where there are no values.
    """
    if not _num_all(a) or not _num_all(b):
        return None
    both = a + b
    shares = [_all_counts(one, both) / _num_all(one) for one in (a, b)]
    return float(np.abs(shares[0] - shares[1]).sum() / 2)


def subnormal_count(histogram: Histogram, dtype: str) -> int | None:
    """How many values that are not zero are below the least normal number of a type; None for other types."""
    if dtype not in NORMAL_EXPONENTS:
        return None
    return int(histogram.counts[:, histogram.exponents < NORMAL_EXPONENTS[dtype][0]].sum())


def _num_all(histogram: Histogram) -> int:
    return histogram.num_values + histogram.nan_count


def _all_counts(histogram: Histogram, frame: Histogram) -> Floats:
    """Its counts in the bins of `frame`, which has all of its bins, and behind them what is zero or not finite."""
    counts = np.zeros(frame.counts.shape)
    at = histogram.first - frame.first
    counts[:, at : at + histogram.counts.shape[1]] = histogram.counts
    rest = [*histogram.infinite, histogram.zero_count, histogram.nan_count]
    return np.concatenate((counts.reshape(-1), np.array(rest, np.float64)))


class UnitsApart(NamedTuple):
    """How the units of two values compare."""

    units_a: int
    """How many there are."""
    units_b: int
    units_dead_a: int
    """How many have no value but zero."""
    units_dead_b: int
    units_apart: int | None
    """How many have other sums; None where the two have not as many units, or have them along other dims."""
    unit: int | None
    """The unit whose root of the mean square is farthest apart; None where none has another."""
    unit_rms_a: float | None
    """The root of its mean square."""
    unit_rms_b: float | None


def units_of_row(data: bytes | None, shape: Any) -> Units | None:
    """Those of a row; None where it has none.

    Args:
        data: the column `units`.
        shape: the column `shape`.
    """
    if data is None:
        return None
    try:
        return Units.from_bytes(data, parse_shape(shape))
    except CorruptError:
        return None


def units_apart(a: Units | None, b: Units | None) -> UnitsApart | None:
    """How they compare; None where one of them is not there."""
    if a is None or b is None:
        return None
    counts = (len(a), len(b), a.num_dead, b.num_dead)
    if (a.dim, len(a)) != (b.dim, len(b)):
        return UnitsApart(*counts, None, None, None, None)
    pairs = ((a.sum, b.sum), (a.sum_sq, b.sum_sq), (a.absmax, b.absmax), (a.zero_count, b.zero_count))
    differs = ~np.logical_and.reduce([np.equal(one, two) | (np.isnan(one) & np.isnan(two)) for one, two in pairs])
    with np.errstate(invalid="ignore"):
        away = np.abs(a.rms - b.rms)
    away = np.nan_to_num(np.where(a.rms == b.rms, 0.0, away), nan=np.inf)
    unit = int(away.argmax()) if away.any() else None
    rms = (None, None) if unit is None else (float(a.rms[unit]), float(b.rms[unit]))
    return UnitsApart(*counts, int(differs.sum()), unit, *rms)
