"""The element types that rows may carry, by torch's names, and bytes as arrays of these types.

Never imports torch, nor ml_dtypes before it is needed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import CorruptError, UnsupportedError

ITEM_BYTES: dict[str, int] = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "uint16": 2,
    "int16": 2,
    "uint32": 4,
    "int32": 4,
    "uint64": 8,
    "int64": 8,
    "float4_e2m1fn_x2": 1,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "complex32": 4,
    "complex64": 8,
    "complex128": 16,
}
"""Bytes of one element; `float4_e2m1fn_x2` counts pairs, as torch does."""

_NUMPY_SPELLING: dict[str, Any] = {
    "float4_e2m1fn_x2": np.uint8,
    "complex32": [("real", "<f2"), ("imag", "<f2")],
}
"""numpy has no such types: packed pairs stay bytes, half complex becomes a record of two halves."""

_ML_DTYPES = frozenset(name for name in ITEM_BYTES if name.startswith("float8") or name == "bfloat16")


def item_bytes(dtype: str) -> int:
    """Bytes of one element of torch's `dtype` (its name without the prefix).

    Raises:
        UnsupportedError: this version does not know the name.
    """
    try:
        return ITEM_BYTES[dtype]
    except KeyError:
        raise UnsupportedError(f"dtype {dtype!r}: unknown to this version; known are {', '.join(ITEM_BYTES)}") from None


def numpy_dtype(dtype: str) -> np.dtype[Any]:
    """The little-endian numpy dtype of torch's `dtype`; bfloat16 and the 8-bit floats come from ml_dtypes.

    Raises:
        UnsupportedError: the name is unknown, or ml_dtypes is missing or too old for it.
    """
    item_bytes(dtype)
    if dtype in _ML_DTYPES:
        try:
            import ml_dtypes

            item_dtype: np.dtype[Any] = np.dtype(getattr(ml_dtypes, dtype))
            return item_dtype
        except (ImportError, AttributeError):
            raise UnsupportedError(
                f"dtype {dtype!r} needs a newer ml_dtypes: pip install --upgrade ml_dtypes"
            ) from None
    spelled: np.dtype[Any] = np.dtype(_NUMPY_SPELLING.get(dtype, dtype))
    return spelled.newbyteorder("<")


def as_array(data: npt.NDArray[np.uint8], dtype: str, shape: Sequence[int]) -> npt.NDArray[Any]:
    """Little-endian C-order bytes as an array of torch's `dtype`."""
    check_bytes(data, dtype, shape)
    try:
        return data.view(numpy_dtype(dtype)).reshape(shape)
    except ValueError as error:  # an empty tensor with sizes beyond numpy's
        raise UnsupportedError(f"numpy has no array of shape {list(shape)}: {error}") from error


def check_bytes(data: npt.NDArray[np.uint8], dtype: str, shape: Sequence[int]) -> None:
    """Refuse bytes that are not exactly one tensor.

    Raises:
        CorruptError: they are too few or too many.
    """
    if data.nbytes != math.prod(shape) * item_bytes(dtype):
        raise CorruptError(f"{data.nbytes} bytes are not a {dtype} tensor of shape {list(shape)}")
