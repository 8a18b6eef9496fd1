"""Decodes, compares and draws histograms of values, and sums over units (neurons or channels), of recorded rows.

A missing or damaged histogram is None here. `recorder verify` reports damage.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ..columns import parse_shape
from ..errors import CorruptError
from ..sites import MAX_COUNT
from .histogram import HIGHEST, LOWEST, NORMAL_EXPONENTS, Histogram
from .moments import Floats
from .units import Units


class Bins(NamedTuple):
    """The fractions of tensors' values in bins of magnitudes. All tensors have the same bins."""

    first: int
    """The exponent of the first bin, whose values begin at 2^first."""
    exponents_per_bin: int
    shares: list[list[float]]
    """For each tensor, the fraction of its values in each bin. All lists have the same length, which is 0 if no tensor
    has a finite value other than zero."""

    @property
    def last(self) -> int:
        """The largest exponent in the last bin."""
        return self.first + self.exponents_per_bin * max(map(len, self.shares), default=0) - 1


def histogram_of_row(row: Mapping[str, Any], suffix: str = "") -> Histogram | None:
    """Return the histogram in a row, or None without one. The names of the row's columns end in `suffix`."""
    data = row[f"histogram{suffix}"]
    if data is None:
        return None
    counts = {name: row[f"{name}{suffix}"] or 0 for name in ("zero_count", "nan_count")}
    try:
        return Histogram.from_bytes(data, **counts)
    except CorruptError:
        return None


def bins_of(histograms: Sequence[Histogram], max_bins: int) -> Bins:
    """Return the fractions of the values of several histograms in common bins, at most `max_bins` of them."""
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
    """Return the fraction of values that must change sign or power of two to make two distributions equal.

    The fraction is 0 for equal distributions, and 1 if no bin has values of both. Return None if one has no values.
    """
    if not _num_all(a) or not _num_all(b):
        return None
    both = a + b
    shares = [_all_counts(one, both) / _num_all(one) for one in (a, b)]
    return float(np.abs(shares[0] - shares[1]).sum() / 2)


def subnormal_count(histogram: Histogram, dtype: str) -> int | None:
    """Return the number of nonzero values below a dtype's smallest normal number. Return None for an unknown dtype."""
    if dtype not in NORMAL_EXPONENTS:
        return None
    return int(histogram.counts[:, histogram.exponents < NORMAL_EXPONENTS[dtype][0]].sum())


def _num_all(histogram: Histogram) -> int:
    return histogram.num_values + histogram.nan_count


def _all_counts(histogram: Histogram, frame: Histogram) -> Floats:
    """Return a histogram's counts in the bins of the wider `frame`, then those of -inf, inf, zeros and NaN."""
    counts = np.zeros(frame.counts.shape)
    at = histogram.first - frame.first
    counts[:, at : at + histogram.counts.shape[1]] = histogram.counts
    rest = [*histogram.infinite, histogram.zero_count, histogram.nan_count]
    return np.concatenate((counts.reshape(-1), np.array(rest, np.float64)))


class UnitsApart(NamedTuple):
    """The comparison of two tensors by their units (neurons or channels)."""

    units_a: int
    units_b: int
    units_dead_a: int
    units_dead_b: int
    units_apart: int | None
    """The number of units that differ. None if the tensors differ in their number of units, or in the dim of units."""
    unit: int | None
    """The index of the unit whose root mean square differs most. None if no root mean square differs."""
    unit_rms_a: float | None
    unit_rms_b: float | None


def units_of_row(data: bytes | None, shape: Any) -> Units | None:
    """Decode a row's columns `units` and `shape`. Return None if the row has no valid units."""
    if data is None:
        return None
    try:
        return Units.from_bytes(data, parse_shape(shape))
    except CorruptError:
        return None


def units_apart(a: Units | None, b: Units | None) -> UnitsApart | None:
    """Compare two tensors by their units (neurons or channels). Return None if one of them has no units."""
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


Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]
_HEAD_BYTES = 4
_TYPES = {width: np.dtype(f"<u{width}") for width in (1, 2, 4, 8)}
_MOST_BYTES = 1 << 20
"""The most bytes of rows that are decoded at a time. The results then fit into a cache."""


class Histograms(NamedTuple):
    """The histograms of several rows, all with the same number of bins."""

    rows: Ints
    """For each histogram, the index of the row in the column `histogram`."""
    exponents: Ints
    """The exponent of each bin, of shape (rows, bins)."""
    counts: Ints
    """The counts of negative and of positive values, of shape (rows, 2, bins)."""
    infinite: Ints
    """The counts of negative and of positive infinities, of shape (rows, 2)."""


class ManyUnits(NamedTuple):
    """The sums over units (neurons or channels) of several rows, all with the same number of units."""

    rows: Ints
    """For each row of the arrays below, the index of the row in the column `units`."""
    sum: Floats
    """The sum of each unit's values. `sum`, `sum_sq`, `absmax` and `zero_count` have the shape (rows, units)."""
    sum_sq: Floats
    absmax: Floats
    zero_count: Ints
    num_values: Ints
    """For each row, the number of elements in one unit."""


class _Alike(NamedTuple):
    """Rows whose encoded bytes have the same length and the same first bytes."""

    rows: Ints
    width: int
    """The number of bytes of each count."""
    second: int
    """The second byte of the encoding; the first byte is the width."""
    data: Bytes
    """The encoded bytes, of shape (rows, bytes)."""


def histograms_of(column: Any, rows: Ints) -> Iterator[Histograms]:
    """Decode `rows` of the column `histogram`, which must not be null. Damaged histograms are left out."""
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
    """Decode `rows` of the column `units`, which must not be null. Damaged rows are left out.

    `shapes` are the shapes of tensors, with None for an invalid one. `shape_of` has, for each row, the index of its
    shape in `shapes`.
    """
    for alike in _alike(column, rows, head_bytes=_HEAD_BYTES):
        num, rest = divmod(alike.data.shape[1] - _HEAD_BYTES, 24 + alike.width)
        dim, has_layout = alike.second, alike.data[0, 2:_HEAD_BYTES].any()
        sizes = [shape[dim] if shape is not None and dim < len(shape) else -1 for shape in shapes]
        largest = np.iinfo(np.int64).max
        numels = [0 if shape is None else min(math.prod(shape), largest) for shape in shapes]
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


def _alike(column: Any, rows: Ints, head_bytes: int) -> Iterator[_Alike]:
    """Yield `rows` of a column of bytes, grouped by length and first bytes, at most `_MOST_BYTES` at a time."""
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


BLOCKS = "▁▂▃▄▅▆▇█"
NOT_FINITE = "!"
"""The character that is drawn for a tensor with a NaN or an infinity."""
_LOG_RATIO = 1000.0


def spark_line(values: Sequence[float | None], bad: Sequence[bool], width: int = 24) -> str:
    """Draw a series in at most `width` characters. In a longer series, a character shows the largest of several values.

    None and values that are not finite leave a gap. `bad` has an entry for each value; True draws `NOT_FINITE`.
    """
    known = [value for value in values if value is not None and math.isfinite(value)]
    largest = max(map(abs, known), default=0.0) or 1.0
    is_log = bool(known) and min(known) > 0 and largest > _LOG_RATIO * min(known)
    scaled = [_scale(value, largest, is_log) for value in values]
    low = min((value for value in scaled if value is not None), default=0.0)
    high = max((value for value in scaled if value is not None), default=0.0)
    line = []
    num = min(len(values), width)
    for i in range(num):
        start, stop = len(values) * i // num, len(values) * (i + 1) // num
        bucket = [value for value in scaled[start:stop] if value is not None]
        if any(bad[start:stop]):
            line.append(NOT_FINITE)
        elif not bucket:
            line.append(" ")
        else:
            share = (max(bucket) - low) / (high - low) if high > low else 0.0
            line.append(BLOCKS[min(int(share * len(BLOCKS)), len(BLOCKS) - 1)])
    return "".join(line)


def _scale(value: float | None, largest: float, is_log: bool) -> float | None:
    """Return the logarithm of a value, or the value as a fraction of `largest`, so that differences cannot overflow."""
    if value is None or not math.isfinite(value):
        return None
    return math.log(value) if is_log else value / largest


HISTOGRAM_WIDTH = 24
_LEAST = 1e-6
HISTOGRAM_LEGEND = "the lowest block is one in a million, each higher one 5.6 times more, the full one all"


def histogram_line(shares: Sequence[float]) -> str:
    """Draw the fraction of values in each bin on a logarithmic scale. Outliers stay visible; an empty bin is a gap."""
    return "".join(_block(share) for share in shares)


def histogram_lines(histograms: Sequence[Histogram | None]) -> tuple[list[str], str]:
    """Draw histograms in common bins, and return in words the magnitudes that the lines cover."""
    known = [one for one in histograms if one is not None]
    if not known:
        return [], ""
    bins = bins_of(known, HISTOGRAM_WIDTH)
    lines = map(histogram_line, bins.shares)
    return ["" if one is None else next(lines) for one in histograms], extent(bins)


def extent(bins: Bins) -> str:
    """Return the magnitudes of a drawn line, such as ``|x| from 2^-20 to 2^4, 2 powers of two a character``."""
    if not any(bins.shares):
        return "of no finite value but zero"
    wide = f", {bins.exponents_per_bin} powers of two a character" if bins.exponents_per_bin > 1 else ""
    return f"|x| from 2^{bins.first} to 2^{bins.last + 1}{wide}"


def _block(share: float) -> str:
    if share <= 0:
        return " "
    height = 1 - math.log(min(share, 1.0)) / math.log(_LEAST)
    return BLOCKS[max(0, min(math.floor(height * len(BLOCKS)), len(BLOCKS) - 1))]
