"""Counts the values of one tensor by sign and power of two, for its histogram; never calls torch.

The compiled loops fill the same array to the same counts. `numerics.histogram` says what each entry of it means.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from ...numerics.dtypes import item_bytes
from ...numerics.histogram import BY_PATTERN, NUM_BINS

Bins = npt.NDArray[np.uint64]
_FLOATS = {"bfloat16": (2, 7), "float32": (4, 23), "float64": (8, 52)}
"""Bytes of an element, and below which bit its exponent ends."""
_ITEMS = 1 << 15


def count(data: npt.NDArray[np.uint8], dtype: str, decoded: Iterable[npt.NDArray[Any]]) -> Bins:
    """Count the values of a tensor.

    Args:
        data: its bytes.
        dtype: its element type, one of `NUM_BINS`.
        decoded: its values chunk by chunk, of float16 as float32; looked at for float16 and integers.
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
