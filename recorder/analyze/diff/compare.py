"""Measures how far two arrays are apart, in blocks of elements. This module knows nothing of runs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ...errors import LookupFailedError

_CHUNK_ITEMS = 1 << 15
"""The number of elements that are compared at a time. Their intermediate results stay in the processor's cache; with a
million elements at a time, a comparison takes three times as long."""
_CHUNK_BYTES = 1 << 18
_ULP_BITS = {"float16": 16, "bfloat16": 16, "float32": 32, "float64": 64}
_EXACT_WHOLE = 2.0**52
"""Whole numbers below this bound, and their differences, are exact in float64."""

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Tolerance:
    """Limits for the difference of two elements. Two elements count as equal if at least one limit holds.

    Raises LookupFailedError if a tolerance is negative or not a number.
    """

    rtol: float = 0.0
    """The allowed difference relative to the larger of the two magnitudes, as in `math.isclose`."""
    atol: float = 0.0
    ulp: int = 0
    """The allowed number of representable numbers between the two elements, if both have the same float type."""

    def __post_init__(self) -> None:
        for name, value in (("rtol", self.rtol), ("atol", self.atol), ("ulp", self.ulp)):
            if not value >= 0:
                raise LookupFailedError(f"{name} {value!r}: a tolerance is 0 or more")

    @property
    def is_exact(self) -> bool:
        return not (self.rtol or self.atol or self.ulp)


class Distance(NamedTuple):
    """How far two arrays of one shape are apart. Elements that are NaN or infinite are only counted."""

    numel: int = 0
    num_outside: int = 0
    """The number of elements that differ by more than the tolerance. NaN equals NaN, and an infinity equals itself."""
    max_abs: float = 0.0
    of_max: float = 0.0
    """`max_abs` divided by the largest magnitude in either array. Rounding of elements near zero hardly changes
    `of_max`, but may change `max_rel` and `max_ulp` by any factor."""
    l2_apart: float = 0.0
    max_rel: float = 0.0
    """The largest |b - a| / max(|a|, |b|) of all elements, from 0 to 2."""
    max_ulp: int | None = 0
    """The largest distance in units in the last place. None if the dtypes differ, or are no floats of 16 to 64 bits."""
    cosine: float | None = None
    """The cosine between the two arrays as vectors; None if one of the arrays is zero."""
    nonfinite_a: int = 0
    nonfinite_b: int = 0


IDENTICAL = Distance()
"""The distance between two arrays with the same dtype and bits. It is known without a measurement."""


def are_identical(a: Array, b: Array) -> bool:
    """Return whether two arrays of one shape have the same dtype and bits. `compare` takes ten times as long."""
    if a.dtype != b.dtype:
        return False
    one, two = (np.ascontiguousarray(values).reshape(-1).view(np.uint8) for values in (a, b))
    return all(
        np.array_equal(one[at : at + _CHUNK_BYTES], two[at : at + _CHUNK_BYTES])
        for at in range(0, one.size, _CHUNK_BYTES)
    )


def compare(a: Array, b: Array, tolerance: Tolerance) -> Distance:
    """Return the distance between two arrays of one shape, which have dtypes of numpy or ml_dtypes.

    Elements are compared in float64 or complex128. 64-bit integers are compared exactly.
    """
    assert a.shape == b.shape
    flat_a, flat_b = a.reshape(-1), b.reshape(-1)
    bits = _ULP_BITS.get(str(a.dtype)) if a.dtype == b.dtype else None
    chunks = [
        _compare(flat_a[at : at + _CHUNK_ITEMS], flat_b[at : at + _CHUNK_ITEMS], bits, tolerance)
        for at in range(0, flat_a.size, _CHUNK_ITEMS)
    ]
    distances = [distance for distance, _, _ in chunks]
    dot, squares_a, squares_b = (math.fsum(products[i] for _, _, products in chunks) for i in range(3))
    norm = math.sqrt(squares_a) * math.sqrt(squares_b)
    max_abs = max((one.max_abs for one in distances), default=0.0)
    return Distance(
        numel=flat_a.size,
        num_outside=sum(one.num_outside for one in distances),
        max_abs=max_abs,
        of_max=max_abs / max(magnitude for _, magnitude, _ in chunks) if max_abs else 0.0,
        l2_apart=math.hypot(*(one.l2_apart for one in distances)),
        max_rel=max((one.max_rel for one in distances), default=0.0),
        max_ulp=None if bits is None else max((one.max_ulp or 0 for one in distances), default=0),
        cosine=min(max(dot / norm, -1.0), 1.0) if norm and math.isfinite(norm) else None,
        nonfinite_a=sum(one.nonfinite_a for one in distances),
        nonfinite_b=sum(one.nonfinite_b for one in distances),
    )


_Chunk = tuple[Distance, float, tuple[float, ...]]
"""The result for one block: the distance, the largest |a| or |b|, and the scalar products a.b, a.a and b.b."""


def _dot(one: Array, two: Array) -> float:
    """Return the real part of a scalar product. The last bits of BLAS results depend on the number of threads."""
    products = one * two if one.dtype.kind != "c" else one.real * two.real + one.imag * two.imag
    return float(np.add.reduce(products))


def _compare(a: Array, b: Array, bits: int | None, tolerance: Tolerance) -> _Chunk:
    wide_a, wide_b = wide(a), wide(b)
    if wide_a.dtype != wide_b.dtype:
        wide_a, wide_b = wide_a.astype(np.complex128), wide_b.astype(np.complex128)
    is_equal = _equal(a, b, wide_a, wide_b)
    is_finite_a, is_finite_b = np.isfinite(wide_a), np.isfinite(wide_b)
    nonfinite_a, nonfinite_b = (flags.size - int(np.count_nonzero(flags)) for flags in (is_finite_a, is_finite_b))
    num_alone = 0
    if nonfinite_a or nonfinite_b:
        both = is_finite_a & is_finite_b
        num_alone = int(np.count_nonzero(~both & ~is_equal))
        a, b, wide_a, wide_b, is_equal = a[both], b[both], wide_a[both], wide_b[both], is_equal[both]
    with np.errstate(all="ignore"):
        products = tuple(_dot(one, two) for one, two in ((wide_a, wide_b), (wide_a, wide_a), (wide_b, wide_b)))
    if is_equal.all():
        equal = Distance(num_outside=num_alone, nonfinite_a=nonfinite_a, nonfinite_b=nonfinite_b)
        return equal, float(np.abs(wide_a).max(initial=0.0)), products
    large = np.flatnonzero(~is_equal & _is_rounded(a, b, wide_a, wide_b))
    pairs = zip(_unrounded(a, wide_a, large), _unrounded(b, wide_b, large), strict=True)
    # Each pair's distance, and the larger magnitude.
    exact = [(abs(two - one), max(abs(one), abs(two))) for one, two in pairs]
    with np.errstate(all="ignore"):
        scale = np.maximum(np.abs(wide_a), np.abs(wide_b))
        apart = np.abs(np.subtract(wide_b, wide_a, out=wide_b))
        apart[large] = [float(distance) for distance, _ in exact]
        relative = np.divide(apart, scale, out=np.zeros_like(apart), where=scale > 0)
        l2_apart = math.sqrt(_dot(apart, apart))
    steps = None if bits is None else _steps(a, b, bits)
    is_outside = ~is_equal
    if not tolerance.is_exact:
        is_outside &= apart > tolerance.atol
        is_outside &= apart > tolerance.rtol * scale
        if steps is not None:
            is_outside &= steps > tolerance.ulp
        is_outside[large] = [far > tolerance.atol and far > tolerance.rtol * size for far, size in exact]
    distance = Distance(
        num_outside=num_alone + int(np.count_nonzero(is_outside)), max_abs=float(apart.max()),
        l2_apart=l2_apart, max_rel=float(relative.max()), max_ulp=0 if steps is None else int(steps.max()),
        nonfinite_a=nonfinite_a, nonfinite_b=nonfinite_b,
    )  # fmt: skip
    return distance, float(scale.max()), products


def wide(values: Array) -> Array:
    """Return values as float64 or complex128, in which they are compared."""
    if values.dtype.names:  # complex32 is stored as pairs of float16
        wide = np.empty(values.shape, np.complex128)
        wide.real, wide.imag = values["real"], values["imag"]
        return wide
    return values.astype(np.complex128 if values.dtype.kind == "c" else np.float64)


def _equal(a: Array, b: Array, wide_a: Array, wide_b: Array) -> npt.NDArray[np.bool_]:
    """Return a mask of the elements that are exactly equal. No 64-bit integer is rounded to float64."""
    if a.dtype.kind in "iu" and b.dtype.kind in "iu":
        return np.asarray(a == b)
    both_nan = np.isnan(wide_a) & np.isnan(wide_b)
    is_equal = (wide_a == wide_b) | both_nan
    at = np.flatnonzero(is_equal & _is_rounded(a, b, wide_a, wide_b))
    pairs = zip(_unrounded(a, wide_a, at), _unrounded(b, wide_b, at), strict=True)
    is_equal[at] = [one == two for one, two in pairs]
    return np.asarray(is_equal)


def _is_rounded(a: Array, b: Array, wide_a: Array, wide_b: Array) -> npt.NDArray[np.bool_]:
    """Return a mask of the pairs of elements in which float64 may have rounded a 64-bit integer."""
    if not any(values.dtype.kind in "iu" and values.dtype.itemsize == 8 for values in (a, b)):
        return np.zeros(a.shape, np.bool_)
    sizes = np.fmax(np.abs(wide_a), np.abs(wide_b))
    return np.asarray((sizes >= _EXACT_WHOLE) & np.isfinite(sizes))


def _unrounded(values: Array, wide: Array, at: npt.NDArray[np.int64]) -> list[Any]:
    """Return the elements at the indices `at` as Python numbers. Whole numbers become `int`, which never rounds."""
    if values.dtype.kind in "iu":
        return list(values[at].tolist())
    reals = (one.real if isinstance(one, complex) and not one.imag else one for one in wide[at].tolist())
    return [int(one) if isinstance(one, float) and one.is_integer() else one for one in reals]


def _steps(a: Array, b: Array, bits: int) -> npt.NDArray[np.uint64]:
    """Return how many representable numbers the floats of each pair are apart. -0 and 0 are one number."""
    one, two = (_ordered(values, bits) for values in (a, b))
    # Distances between float64 numbers need all 64 bits, so the subtraction may wrap around.
    return (np.maximum(one, two) - np.minimum(one, two)).view(np.uint64)


def _ordered(values: Array, bits: int) -> npt.NDArray[np.int64]:
    codes = np.ascontiguousarray(values).view(f"<i{bits // 8}").astype(np.int64)
    magnitudes = codes & ((1 << (bits - 1)) - 1)
    return np.where(codes < 0, -magnitudes, magnitudes)
