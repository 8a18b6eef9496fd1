"""Histograms that count a tensor's values by sign and power of two (see "Histogram" in FORMAT.md).

All dtypes have the same bins, so histograms of chunks, ranks, steps and runs can be added up.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import CorruptError
from ..records import Measured
from ..sites import MAX_COUNT
from .dtypes import ITEM_BYTES, numpy_dtype

Counts = npt.NDArray[np.int64]
_Bins = npt.NDArray[np.uint64]
_HEAD = struct.Struct("<BBh")
"""The first bytes of an encoded histogram: the number of bytes of a count, 0, and the exponent of the first bin."""
LOWEST, HIGHEST = -1074, 1023
"""The exponents of the lowest and of the highest possible bin."""
_SUBNORMAL = {-127: -149, -1023: -1074}
"""By the exponent of the bin of a dtype's subnormal values: the exponent of the smallest subnormal value."""
NORMAL_EXPONENTS = {"float16": (-14, 15), "float8_e4m3fn": (-6, 8), "float8_e5m2": (-14, 15), "float32": (-126, 127)}
NORMAL_EXPONENTS |= {"bfloat16": NORMAL_EXPONENTS["float32"]}
"""The exponents of a type's least normal number and of its largest numbers."""
_NO_COUNTS = np.zeros(2, np.int64)
_TYPES = {width: np.dtype(f"<u{width}") for width in (1, 2, 4, 8)}


class Bounds(NamedTuple):
    """The least and the greatest possible number, both included."""

    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Histogram:
    """The counts of a tensor's values by sign and exponent. The sum of two histograms counts the values of both."""

    first: int = 0
    """The exponent of the first bin."""
    counts: Counts = field(default_factory=lambda: np.zeros((2, 0), np.int64))
    """The counts of values with 2^exponent <= |x| < 2^(exponent + 1), of shape (2, bins), negative values first."""
    infinite: Counts = field(default_factory=_NO_COUNTS.copy)
    """The counts of negative and of positive infinities, of shape (2,)."""
    zero_count: int = 0
    nan_count: int = 0
    min: float | None = None
    """The least finite value; None if unknown."""
    max: float | None = None

    @property
    def exponents(self) -> Counts:
        """The exponent of each bin."""
        return np.arange(self.first, self.first + self.counts.shape[1])

    @property
    def num_values(self) -> int:
        """The number of values without NaN."""
        return int(self.counts.sum() + self.infinite.sum()) + self.zero_count

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Histogram) and (
            (self.to_bytes(), self.zero_count, self.nan_count, self.min, self.max)
            == (other.to_bytes(), other.zero_count, other.nan_count, other.min, other.max)
        )

    __hash__ = None  # type: ignore[assignment]

    def __str__(self) -> str:
        lines = [f"{'exponent':>8} {'negative':>10} {'positive':>10}"]
        for exponent, negative, positive in zip(self.exponents.tolist(), *self.counts.tolist(), strict=True):
            lines.append(f"{exponent:8} {negative:10} {positive:10}")
        below, above = self.infinite.tolist()
        rest = {"zero": self.zero_count, "NaN": self.nan_count, "-inf": below, "inf": above}
        return "\n".join([*lines, ", ".join(f"{name}: {number}" for name, number in rest.items())])

    def __add__(self, other: Histogram) -> Histogram:
        own = [one for one in (self, other) if one.counts.size]
        first = min((one.first for one in own), default=0)
        counts = np.zeros((2, max((one.first + one.counts.shape[1] for one in own), default=first) - first), np.int64)
        for one in own:
            counts[:, one.first - first : one.first - first + one.counts.shape[1]] += one.counts
        lows, highs = ([x for x in pair if x is not None] for pair in ((self.min, other.min), (self.max, other.max)))
        return Histogram(
            first=first,
            counts=counts,
            infinite=self.infinite + other.infinite,
            zero_count=self.zero_count + other.zero_count,
            nan_count=self.nan_count + other.nan_count,
            min=min(lows, default=None) if self._knows_range and other._knows_range else None,
            max=max(highs, default=None) if self._knows_range and other._knows_range else None,
        )

    @property
    def _knows_range(self) -> bool:
        return self.min is not None or not (self.zero_count or self.counts.any())

    def scaled(self, factor: float) -> Histogram | None:
        """Return the histogram of the values times a factor. Return None unless the factor is a power of two."""
        power, exponent = math.frexp(abs(factor))
        shifted = self.first + exponent - 1
        is_inside = not self.counts.size or (shifted >= LOWEST and shifted + self.counts.shape[1] - 1 <= HIGHEST)
        if power != 0.5 or not is_inside:
            return None
        flip = -1 if factor < 0 else 1
        ends = [None if x is None else x * factor for x in (self.min, self.max)][::flip]
        return replace(
            self,
            first=shifted if self.counts.size else 0,
            counts=self.counts[::flip],
            infinite=self.infinite[::flip],
            min=ends[0],
            max=ends[1],
        )

    def quantile(self, q: float) -> Bounds:
        """Return bounds of quantile `q` (0.5: the lower median), NaN left out. Raises ValueError without values."""
        if not 0 <= q <= 1:
            raise ValueError(f"q = {q}: expected a number from 0 to 1")
        if not self.num_values:
            raise ValueError("a histogram without values has no quantiles")
        at = math.floor(q * (self.num_values - 1))
        for bounds, count in self._ascending():
            at -= count
            if at < 0:
                return self._clipped(bounds)
        raise AssertionError("the counts do not add up")

    def _ascending(self) -> Iterable[tuple[Bounds, int]]:
        negative, positive = self.counts.tolist()
        of_bins = list(map(_bounds, self.exponents.tolist()))
        yield Bounds(-math.inf, -math.inf), int(self.infinite[0])
        for bounds, count in zip(reversed(of_bins), reversed(negative), strict=True):
            yield Bounds(-bounds.high, -bounds.low), count
        yield Bounds(0.0, 0.0), self.zero_count
        yield from zip(of_bins, positive, strict=True)
        yield Bounds(math.inf, math.inf), int(self.infinite[1])

    def _clipped(self, bounds: Bounds) -> Bounds:
        if self.min is None or self.max is None or math.isinf(bounds.low):
            return bounds
        return Bounds(max(bounds.low, self.min), min(bounds.high, self.max))

    def buckets(self, max_buckets: int = 1 << 16) -> tuple[npt.NDArray[np.float64], Counts]:
        """Return ascending edges, and the number of finite values between neighbouring edges, for tools that draw.

        Each bin becomes a bucket. Zeros lie in the middle bucket, between the negative and the positive edges. If there
        would be more than `max_buckets`, the middle bucket also gets the bins of the smallest magnitudes. NaN and
        infinities are left out.
        """
        (used,) = np.nonzero(self.counts[0] | self.counts[1])
        first, last = (int(used[0]), int(used[-1]) + 1) if len(used) else (0, 0)
        kept = max(first, last - (max_buckets - 1) // 2)
        negative, positive = self.counts[:, kept:last]
        least = _bounds(self.first + kept).low if last else 1.0
        powers = [least, *(_power(self.first + index + 1) for index in range(kept, last))]
        edges = np.minimum(np.array([*(-x for x in reversed(powers)), *powers]), np.finfo(np.float64).max)
        middle = self.zero_count + int(self.counts[:, :kept].sum())
        return np.maximum(edges, -np.finfo(np.float64).max), np.concatenate((negative[::-1], [middle], positive))

    def rebinned(self, edges: Sequence[float]) -> npt.NDArray[np.float64]:
        """Return the counts of finite values between ascending edges, for drawing. A bin's values are spread evenly."""
        at = np.asarray(edges, np.float64)
        if at.ndim != 1 or len(at) < 2 or not (np.diff(at) > 0).all():
            raise ValueError("edges: expected at least two ascending numbers")
        counts = np.zeros(len(at) - 1)
        for whole, count in self._ascending():
            if not count or math.isinf(whole.low):
                continue
            bounds = self._clipped(whole)
            if bounds.low == bounds.high:
                index = int(np.searchsorted(at, bounds.low, side="right")) - 1
                index -= index == len(counts) and bounds.low == at[-1]
                if 0 <= index < len(counts):
                    counts[index] += count
            else:
                inside = np.clip(at, bounds.low, bounds.high)
                counts += count * (np.diff(inside / 2) / (bounds.high / 2 - bounds.low / 2))
        return counts

    def to_bytes(self) -> bytes:
        """Encode the counts for the column `histogram` in the shortest form. Equal counts have equal bytes."""
        return _packed(self.first, self.counts[0], self.counts[1], self.infinite)

    @classmethod
    def from_bytes(cls, data: bytes, *, zero_count: int = 0, nan_count: int = 0) -> Histogram:
        """Decode the column `histogram`; other columns count zeros and NaN. Raises CorruptError for invalid bytes."""
        if len(data) < _HEAD.size:
            raise CorruptError(f"a histogram has {len(data)} bytes: expected at least {_HEAD.size}")
        width, layout, first = _HEAD.unpack_from(data)
        num_bytes = len(data) - _HEAD.size
        if width not in (1, 2, 4, 8) or layout or num_bytes % (2 * width) or num_bytes < 2 * width:
            raise CorruptError(f"a histogram of {len(data)} bytes begins with {width}, {layout}: this is no histogram")
        numbers = np.frombuffer(data, f"<u{width}", offset=_HEAD.size).astype(np.int64)
        num_bins = len(numbers) // 2 - 1
        is_inside = not num_bins or LOWEST <= first <= HIGHEST + 1 - num_bins
        if ((numbers < 0) | (numbers >= MAX_COUNT)).any() or not is_inside:
            raise CorruptError(f"a histogram of {num_bins} bins from exponent {first} on: these are no valid bins")
        return cls(
            first=first if num_bins else 0,
            counts=numbers[2:].reshape(2, num_bins),
            infinite=numbers[:2],
            zero_count=zero_count,
            nan_count=nan_count,
        )


def _packed(first: int, negative: Counts, positive: Counts, infinite: Counts) -> bytes:
    (used,) = (negative | positive).nonzero()
    begin, end = (int(used[0]), int(used[-1]) + 1) if len(used) else (0, 0)
    numbers = np.concatenate((infinite, negative[begin:end], positive[begin:end]))
    largest = int(numbers.max())
    width = 1 if largest < 1 << 8 else 2 if largest < 1 << 16 else 4 if largest < 1 << 32 else 8
    return _HEAD.pack(width, 0, first + begin if end else 0) + numbers.astype(_TYPES[width]).tobytes()


def _bounds(exponent: int) -> Bounds:
    return Bounds(math.ldexp(1.0, _SUBNORMAL.get(exponent, exponent)), _power(exponent + 1))


def _power(exponent: int) -> float:
    return math.ldexp(1.0, exponent) if exponent <= HIGHEST else math.inf


# The writer counts in an array whose layout depends on the element type. The compiled loops fill the same array.

NUM_BINS = dict.fromkeys(("float32", "bfloat16", "float16"), 512) | {"float64": 4096}
NUM_BINS |= dict.fromkeys(("int16", "uint16", "int32", "uint32", "int64", "uint64"), 256)
BY_PATTERN = frozenset(name for name, size in ITEM_BYTES.items() if size == 1 and name != "float4_e2m1fn_x2")
NUM_BINS |= dict.fromkeys(BY_PATTERN, 256)
"""The length of the array in which values are counted. A float type has one half for each sign, by the exponent bits of
float32 or float64; an integer type has one half for each sign, by the length in bits; a type of one byte has one entry
for each bit pattern."""


def of_bins(dtype: str, bins: _Bins) -> bytes:
    """Encode an array of `NUM_BINS` counts for the column `histogram`. Zeros and NaN are left out."""
    if dtype in BY_PATTERN:
        with np.errstate(all="ignore"):
            codes = np.arange(256, dtype=np.uint8)
            patterns = codes if dtype == "bool" else codes.view(numpy_dtype(dtype))
            return _of_values(patterns.astype(np.float64), bins.astype(np.int64)).to_bytes()
    positive, negative = bins.view(np.int64).reshape(2, -1)
    if NUM_BINS[dtype] == 256:
        return _packed(0, negative[1:65], positive[1:65], _NO_COUNTS)
    bias = 1023 if dtype == "float64" else 127
    return _packed(-bias, negative[:-1], positive[:-1], bins.view(np.int64)[:: -len(positive)])


def _of_values(values: npt.NDArray[np.float64], times: Counts) -> Histogram:
    """Return the histogram of distinct values, each of which occurs `times`. They must be exact in float64."""
    counts, infinite = np.zeros((2, 256), np.int64), np.zeros(2, np.int64)
    is_positive = (values > 0).astype(np.int64)
    np.add.at(infinite, is_positive[np.isinf(values)], times[np.isinf(values)])
    is_counted = np.isfinite(values) & (values != 0)
    exponents = np.frexp(values[is_counted])[1] - 1
    np.add.at(counts, (is_positive[is_counted], exponents + 128), times[is_counted])
    return Histogram(first=-128, counts=counts, infinite=infinite)


def of_row(measured: Measured) -> Histogram | None:
    """Return the histogram in measured statistics. Return None if no histogram was measured."""
    if measured.histogram is None:
        return None
    counts = {"zero_count": measured.zero_count or 0, "nan_count": measured.nan_count or 0}
    return replace(Histogram.from_bytes(measured.histogram, **counts), min=measured.min, max=measured.max)
