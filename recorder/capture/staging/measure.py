"""Computes statistics and fingerprint of one tensor, for the writer thread. Never calls torch.

The compiled C loops of `recorder.native` compute all results in one pass, 4 to 9 times as fast as the functions here.
If the compiled loops are missing, these functions compute the same bits. They use numpy, because numpy's reductions run
on the calling thread alone, whatever the size. Numpy has no global modes, and does not touch training's threads or
random generators.

`recorder/numerics/histogram.py` defines the counts of a histogram. `recorder/numerics/units.py` defines the sums of
units (neurons or channels).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import compress
from typing import Any

import numpy as np
import numpy.typing as npt

from ...format.fingerprint import compiled_weights, fingerprint, flat_fingerprint, moved
from ...native import HELD_BYTES, KINDS, TABLE_KINDS, TOGETHER_KINDS, Kernels, LoopsPlan, Weights, address
from ...numerics.dtypes import ITEM_BYTES, item_bytes, numpy_dtype
from ...numerics.histogram import BY_PATTERN, NUM_BINS, of_bins
from ...numerics.moments import Moments, measured
from ...numerics.units import Sides, packed, sides_of
from ...records import KEEP_FINGERPRINT, KEEP_HISTOGRAM, KEEP_STATS, KEEP_UNITS, Chunk, Measured, Staged

_CHUNK_ITEMS = 1 << 15
"""The number of elements that numpy reduces at a time. With a float64 copy they fit in the second-level cache."""

_NOTHING = Measured()
_NO_UNITS_OF_RUN = "no_units:a run of a flattened tensor"
_Values = npt.NDArray[Any]


def measure(
    data: npt.NDArray[np.uint8], dtype: str, shape: tuple[int, ...], chunk: Chunk | None, keep: int, unit_dim: int = -1,
    *, kernels: Kernels | None = None,
) -> Measured:  # fmt: skip
    """Return the results that the bits of `keep` ask for: statistics, histogram, sums of each unit, fingerprint.

    `data` has the tensor's bytes, and `chunk` the tensor's position in a global tensor. A unit is a neuron or channel;
    a negative `unit_dim` counts from the last dim. `kernels` are the compiled loops, or None to measure in Python.
    UnsupportedError is raised if the dtype is unknown.
    """
    is_run = chunk is not None and chunk.flat_start is not None
    by_loops = keep & ~(KEEP_FINGERPRINT | KEEP_UNITS) if is_run else keep
    plan = None if kernels is None or not len(data) else host_measure(dtype, shape, by_loops, unit_dim, kernels)
    if plan is not None:
        if plan.loops.items * plan.loops.item_bytes != len(data):
            raise ValueError(f"{len(data)} bytes are no tensor of shape {shape} of {dtype}")
        results = np.empty(plan.nbytes, np.uint8)
        plan.launch(address(data), address(results))
        statistics = plan.read(results, chunk)
        if not is_run:
            return statistics
        if keep & KEEP_UNITS and dtype in NUM_BINS:
            statistics = statistics._replace(note=_NO_UNITS_OF_RUN)
    else:
        statistics = _statistics_of(data, dtype, shape, is_run, keep, unit_dim) if keep & KEEP_STATS else _NOTHING
    if not keep & KEEP_FINGERPRINT:
        return statistics
    value = _fingerprint(data, item_bytes(dtype), shape, chunk, kernels)
    return Measured(fingerprint=value) if statistics is _NOTHING else statistics._replace(fingerprint=value)


def _statistics_of(
    data: npt.NDArray[np.uint8], dtype: str, shape: tuple[int, ...], is_run: bool, keep: int, unit_dim: int
) -> Measured:
    """Compute statistics, histogram and sums of units (neurons or channels) without the compiled loops."""
    statistics = _statistics(data, dtype)
    if keep & KEEP_HISTOGRAM and dtype in NUM_BINS:
        statistics = statistics._replace(histogram=of_bins(dtype, count(data, dtype, _chunks(data, dtype))))
    if not keep & KEEP_UNITS or dtype not in NUM_BINS:
        return statistics
    if is_run:
        return statistics._replace(note=_NO_UNITS_OF_RUN)
    sides = sides_of(shape, unit_dim)
    if not isinstance(sides, Sides):
        return statistics._replace(note=f"no_units:{sides}")
    with np.errstate(all="ignore"):
        sums, zeros = unit_sums(_chunks(data, dtype), sides)
    return statistics._replace(units=packed(sides.dim, sums, zeros))


class HostMeasure:
    """A plan by which the compiled loops measure a host tensor in place. It also reads the results."""

    __slots__ = ("_dtype", "_sides", "kernels", "loops", "nbytes")

    def __init__(self, dtype: str, shape: tuple[int, ...], keep: int, unit_dim: int, kernels: Kernels) -> None:
        """Plan the measuring; `host_measure` describes the arguments."""
        num_bytes = item_bytes(dtype)
        self._dtype, self.kernels = dtype, kernels
        self._sides = sides_of(shape, unit_dim) if keep & KEEP_UNITS and dtype in NUM_BINS else None
        sides = self._sides if isinstance(self._sides, Sides) else None
        self.loops = LoopsPlan(
            math.prod(shape), dtype, table=_decoded(dtype) if dtype in TABLE_KINDS else None,
            weights=compiled_weights(num_bytes, shape) if keep & KEEP_FINGERPRINT else None,
            num_bins=NUM_BINS[dtype] if keep & KEEP_HISTOGRAM and dtype in NUM_BINS else 0,
            num_units=0 if sides is None else sides.num, unit_inner=0 if sides is None else sides.inner,
            has_statistics=bool(keep & KEEP_STATS),
        )  # fmt: skip
        self.nbytes = self.loops.num_bytes

    def launch(self, at: int, out: int, num_threads: int = 1, held_bytes: int = HELD_BYTES) -> None:
        """Measure the elements at address `at`, and write the results to `out`, as `Kernels.measure_at` does."""
        self.kernels.measure_at(at, self.loops, out, num_threads=num_threads, held_bytes=held_bytes)

    def read(self, data: npt.NDArray[np.uint8], chunk: Chunk | None) -> Measured:
        """Return the statistics. `data` contains the results of `launch`. Called on the writer thread."""
        statistics, bins, sums = self.loops.read(data)
        if statistics.fingerprint is not None and chunk is not None and chunk.offsets is not None:
            fingerprint_there = moved(statistics.fingerprint, item_bytes(self._dtype), chunk.offsets)
            statistics = statistics._replace(fingerprint=fingerprint_there)
        if self.loops.num_bins:
            statistics = statistics._replace(histogram=of_bins(self._dtype, bins))
        if isinstance(self._sides, Sides):
            units = packed(self._sides.dim, sums[:3], sums[3].view(np.int64))
            return statistics._replace(units=units)
        return statistics if self._sides is None else statistics._replace(note=f"no_units:{self._sides}")


@lru_cache(maxsize=512)  # each cached plan may hold the weights of a fingerprint, mostly 32 KiB
def host_measure(dtype: str, shape: tuple[int, ...], keep: int, unit_dim: int, kernels: Kernels) -> HostMeasure | None:
    """Return a plan by which the compiled loops measure a nonempty tensor. Return None if Python must measure it.

    The result is also None if `keep` has neither `KEEP_STATS` nor `KEEP_FINGERPRINT`. A negative `unit_dim` counts from
    the end.
    """
    if not keep & (KEEP_STATS | KEEP_FINGERPRINT) or dtype not in KINDS:
        return None
    return HostMeasure(dtype, shape, keep, unit_dim, kernels)


def measure_small(records: Sequence[Staged], *, kernels: Kernels | None = None) -> list[Measured]:
    """Measure small records as `measure` does, most of them with one call of the compiled loops.

    The `keep` of each record asks for statistics, and perhaps for a fingerprint.
    """
    may_join = [
        kernels is not None and s.chunk is None and s.dtype in TOGETHER_KINDS and s.block.num_bytes > 0 for s in records
    ]
    joined = list(compress(records, may_join))
    measured = []
    if kernels is not None and joined:
        blocks = [s.block for s in joined]
        measured = kernels.measure_small(
            [block.address for block in blocks],
            [block.num_bytes // ITEM_BYTES[s.dtype] for block, s in zip(blocks, joined, strict=True)],
            [s.dtype for s in joined],
            [_weights(s) if s.keep & KEEP_FINGERPRINT else None for s in joined],
        )()
    if len(joined) == len(records):
        return measured
    of_kernels = iter(measured)
    return [
        next(of_kernels) if is_joined else measure(s.block.data, s.dtype, s.shape, s.chunk, s.keep, kernels=kernels)
        for s, is_joined in zip(records, may_join, strict=True)
    ]


def _weights(staged: Staged) -> Weights:
    weights = compiled_weights(ITEM_BYTES[staged.dtype], staged.shape)
    if weights.num_words * weights.word_bytes != staged.block.num_bytes:
        raise ValueError(f"{staged.block.num_bytes} bytes are no tensor of shape {staged.shape} of {staged.dtype}")
    return weights


def _fingerprint(
    data: npt.NDArray[np.uint8], item_bytes: int, shape: tuple[int, ...], chunk: Chunk | None, kernels: Kernels | None
) -> int:
    if chunk is None:
        return fingerprint(data, item_bytes, shape, None, kernels)
    if chunk.flat_start is not None and chunk.flat_shape is not None and chunk.offsets is not None:
        in_box = flat_fingerprint(data, item_bytes, chunk.flat_shape, chunk.flat_start, kernels)
        return moved(in_box, item_bytes, chunk.offsets)
    if chunk.flat_start is not None:
        return flat_fingerprint(data, item_bytes, chunk.flat_shape or chunk.global_shape, chunk.flat_start, kernels)
    return fingerprint(data, item_bytes, shape, chunk.offsets, kernels)


def _statistics(data: npt.NDArray[np.uint8], dtype: str) -> Measured:
    if dtype == "float4_e2m1fn_x2":
        return Measured(note=f"no_statistics:{dtype}")
    if dtype.startswith("complex"):
        return _count_complex(data, dtype)
    moments = _Chunks(min(len(data), _CHUNK_ITEMS))
    # The powers of values near the largest double overflow to inf. The recorded statistic is then inf.
    with np.errstate(all="ignore"):
        for values in _chunks(data, dtype):
            moments.add(values)
        return measured(moments)


class _Chunks(Moments):
    """Computes the moments of a tensor, whose elements are added piece by piece."""

    def __init__(self, max_items: int) -> None:
        super().__init__()
        self._wide = np.empty(max_items, np.float64)
        self._powers = np.empty(max_items, np.float64)
        self._mask = np.empty(max_items, np.bool_)

    def add(self, values: _Values) -> None:
        """Add the next piece of the tensor, which has at least one value."""
        mask = self._mask[: len(values)]
        self.zero_count += len(values) - int(np.count_nonzero(np.not_equal(values, 0, out=mask)))
        low, high = float(values.min()), float(values.max())
        if not (math.isfinite(low) and math.isfinite(high)):
            values = self._finite(values)
            if not len(values):
                return
            low, high = float(values.min()), float(values.max())
        wide, powers = self._wide[: len(values)], self._powers[: len(values)]
        np.copyto(wide, values)
        total = float(np.add.reduce(wide))
        sum_abs = float(np.add.reduce(np.abs(wide, out=powers)))
        np.multiply(wide, wide, out=powers)
        sum_fourth = float(np.add.reduce(np.multiply(powers, powers, out=powers)))
        np.subtract(wide, total / len(values), out=wide)
        np.multiply(wide, wide, out=wide)
        self.merge(len(values), low, high, total, float(np.add.reduce(wide)), sum_abs, sum_fourth)

    def _finite(self, values: _Values) -> _Values:
        nan_count = int(np.count_nonzero(np.isnan(values)))
        finite = values[np.isfinite(values)]
        self.nan_count += nan_count
        self.inf_count += len(values) - len(finite) - nan_count
        return finite


def _chunks(data: npt.NDArray[np.uint8], dtype: str) -> Iterator[_Values]:
    """Yield the elements in pieces of a dtype that numpy reduces fast. A piece may overwrite the previous piece."""
    if not dtype.startswith(("bfloat16", "float16", "float8")):
        values = data.view(np.uint8 if dtype == "bool" else numpy_dtype(dtype))
        for start in range(0, len(values), _CHUNK_ITEMS):
            yield values[start : start + _CHUNK_ITEMS]
        return
    codes = data.view(np.dtype(f"<u{item_bytes(dtype)}"))
    decoded = np.empty(min(len(codes), _CHUNK_ITEMS), np.float32)
    for start in range(0, len(codes), _CHUNK_ITEMS):
        chunk = codes[start : start + _CHUNK_ITEMS]
        values = decoded[: len(chunk)]
        if dtype == "bfloat16":
            bits = values.view(np.uint32)
            np.copyto(bits, chunk)
            np.left_shift(bits, 16, out=bits)
        else:
            np.take(_decoded(dtype), chunk, out=values, mode="clip")
        yield values


@lru_cache(maxsize=8)
def _decoded(dtype: str) -> npt.NDArray[np.float32]:
    """Return the values of an 8 or 16 bit float by bit pattern. For float16 a look-up is twice as fast as numpy."""
    num_bytes = item_bytes(dtype)
    codes = np.arange(1 << 8 * num_bytes, dtype=np.dtype(f"<u{num_bytes}"))
    with np.errstate(all="ignore"):
        return codes.view(numpy_dtype(dtype)).astype(np.float32)


def _count_complex(data: npt.NDArray[np.uint8], dtype: str) -> Measured:
    """Count NaN, infinite and zero elements. An element with a NaN part is NaN, even if the other part is infinite."""
    parts = data.view(np.dtype(f"<f{item_bytes(dtype) // 2}"))
    nan_count = inf_count = zero_count = 0
    for start in range(0, len(parts), 2 * _CHUNK_ITEMS):
        chunk = parts[start : start + 2 * _CHUNK_ITEMS]
        is_nan, is_inf, is_zero = (
            # The flags of the real and the imaginary part of an element are read as one 16-bit number.
            flags.view(np.uint16)
            for flags in (np.isnan(chunk), np.isinf(chunk), np.equal(chunk, 0))
        )
        nan_count += int(np.count_nonzero(is_nan))
        inf_count += int(np.count_nonzero((is_inf != 0) & (is_nan == 0)))
        zero_count += int(np.count_nonzero(is_zero == 0x0101))
    return Measured(nan_count=nan_count, inf_count=inf_count, zero_count=zero_count, note=f"no_statistics:{dtype}")


Bins = npt.NDArray[np.uint64]
_FLOATS = {"bfloat16": (2, 7), "float32": (4, 23), "float64": (8, 52)}
"""Maps a float dtype to the number of bytes of an element and the number of bits below the exponent."""
_ITEMS = 1 << 15


def count(data: npt.NDArray[np.uint8], dtype: str, decoded: Iterable[npt.NDArray[Any]]) -> Bins:
    """Count the values of a tensor by sign and power of two, for its histogram. The dtype is one of `NUM_BINS`.

    `decoded` yields the values piece by piece, float16 as float32. It is read only for float16 and integers.
    """
    bins = np.zeros(NUM_BINS[dtype], np.uint64)
    if dtype in BY_PATTERN:
        bins += np.bincount(data, minlength=256).astype(np.uint64)
    elif dtype in _FLOATS:
        num_bytes, shift = _FLOATS[dtype]
        bits = data.view(f"<u{num_bytes}")
        for start in range(0, len(bits), _ITEMS):
            _count_floats(bits[start : start + _ITEMS], shift, bins)
    else:
        for values in decoded:
            if dtype == "float16":
                _count_floats(values.view(np.uint32), 23, bins)
            else:
                _count_integers(values, item_bytes(dtype), bins)
    return bins


def _count_floats(bits: npt.NDArray[Any], shift: int, bins: Bins) -> None:
    half = len(bins) // 2
    counts = np.bincount((bits >> bits.dtype.type(shift)).astype(np.int64), minlength=len(bins)).astype(np.uint64)
    for sign in (0, half):
        zero, infinite = (bits.dtype.type((sign + exponent) << shift) for exponent in (0, half - 1))
        counts[sign] -= np.uint64(np.count_nonzero(bits == zero))
        counts[sign + half - 1] = np.count_nonzero(bits == infinite)
    bins += counts


def _count_integers(values: npt.NDArray[Any], num_bytes: int, bins: Bins) -> None:
    is_negative = values < 0
    unsigned = values.astype(f"u{num_bytes}")
    magnitudes = np.where(is_negative, -unsigned, unsigned).astype(np.uint64)
    upper, lower = (magnitudes >> np.uint64(32)).astype(np.float64), (magnitudes & np.uint64(0xFFFFFFFF)).astype(float)
    lengths = np.where(upper > 0, np.frexp(upper)[1] + 32, np.frexp(lower)[1])
    bins += np.bincount(lengths + 128 * is_negative, minlength=len(bins)).astype(np.uint64)


_LANES = 8


def unit_sums(
    chunks: Iterable[npt.NDArray[Any]], sides: Sides
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """Return sums over the finite values of each unit (neuron or channel), and the number of zeros of each unit.

    The sums have three rows with a column for each unit: the sum of x, the sum of x^2 and the largest magnitude.
    `chunks` are the pieces of the flattened tensor, in order. `bincount` adds in the order of the elements. If the
    values of a unit are adjacent in memory, they are first added to eight partial sums. The partial sums are added in
    pairs, and the result to the unit's sum.
    """
    num, inner, first = sides.num, sides.inner, 0
    sums, zeros = np.zeros((3, num)), np.zeros(num, np.int64)
    for values in chunks:
        is_zero = np.equal(values, 0)
        wide = values.astype(np.float64)
        wide[~np.isfinite(wide)] = 0.0
        at = first + np.arange(len(values))
        units = at // inner % num
        terms = [wide, wide * wide]
        of_terms = units
        if inner > 1:
            runs = at // inner - first // inner
            lanes = np.where(runs == 0, at - first, at % inner) % _LANES
            num_runs = int(runs[-1]) + 1
            terms = [_joined(runs * _LANES + lanes, term, num_runs) for term in terms]
            of_terms = (first // inner + np.arange(num_runs)) % num
        order = np.concatenate((np.arange(num), of_terms))
        for total, term in zip(sums, terms, strict=False):
            total[:] = np.bincount(order, np.concatenate((total, term)), num)
        np.maximum.at(sums[2], units, np.abs(wide))
        zeros += np.bincount(units[is_zero], minlength=num)
        first += len(values)
    return sums, zeros


def _joined(lanes: npt.NDArray[np.int64], term: npt.NDArray[np.float64], num_runs: int) -> npt.NDArray[np.float64]:
    r = np.bincount(lanes, term, num_runs * _LANES).reshape(num_runs, _LANES).T
    sums: npt.NDArray[np.float64] = ((r[0] + r[1]) + (r[2] + r[3])) + ((r[4] + r[5]) + (r[6] + r[7]))
    return sums
