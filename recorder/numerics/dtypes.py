"""Dtypes by torch's names, bytes as arrays of these dtypes, and the boxes that cover a run of a flattened tensor.

Nothing here imports torch. ml_dtypes is imported only where it is needed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import CorruptError, UnsupportedError

ITEM_BYTES: dict[str, int] = {
    **{"bool": 1, "uint8": 1, "int8": 1, "uint16": 2, "int16": 2, "uint32": 4, "int32": 4, "uint64": 8, "int64": 8},
    **dict.fromkeys(("float4_e2m1fn_x2", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"), 1),
    **{"float8_e8m0fnu": 1, "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8},
    **{"complex32": 4, "complex64": 8, "complex128": 16},
}
"""The bytes of one element of each torch dtype. An element of `float4_e2m1fn_x2` is a pair of numbers."""

_NUMPY_SPELLING: dict[str, Any] = {"float4_e2m1fn_x2": np.uint8, "complex32": [("real", "<f2"), ("imag", "<f2")]}
"""The numpy dtypes for torch dtypes that numpy lacks. Pairs of float4 stay bytes; complex32 is a pair of float16."""

_ML_DTYPES = frozenset(name for name in ITEM_BYTES if name.startswith("float8") or name == "bfloat16")


def item_bytes(dtype: str) -> int:
    """Return the bytes of an element of `dtype`, such as ``bfloat16``. Raises UnsupportedError for an unknown dtype."""
    try:
        return ITEM_BYTES[dtype]
    except KeyError:
        raise UnsupportedError(f"dtype {dtype!r}: unknown to this version; known are {', '.join(ITEM_BYTES)}") from None


def numpy_dtype(dtype: str) -> np.dtype[Any]:
    """Return the little-endian dtype of numpy or ml_dtypes for torch's `dtype`. Raises UnsupportedError without one."""
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
    """View little-endian C-order bytes as an array of torch's `dtype`."""
    check_bytes(data, dtype, shape)
    try:
        return data.view(numpy_dtype(dtype)).reshape(shape)
    except ValueError as error:  # an empty tensor may have sizes that numpy does not support
        raise UnsupportedError(f"numpy has no array of shape {list(shape)}: {error}") from error


def check_bytes(data: npt.NDArray[np.uint8], dtype: str, shape: Sequence[int]) -> None:
    """Raise CorruptError unless the bytes are as many as a tensor of this dtype and shape has."""
    if data.nbytes != math.prod(shape) * item_bytes(dtype):
        raise CorruptError(f"{data.nbytes} bytes are not a {dtype} tensor of shape {list(shape)}")


def flat_boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield, in order, boxes (start, shape) that cover the elements from `start` to `stop` of a flattened tensor."""
    if start >= stop:
        return
    if not shape:
        yield (), ()
        return
    row = math.prod(shape[1:])
    first, last = start // row, (stop - 1) // row
    if first == last and (start != first * row or stop != (first + 1) * row):
        for inner_start, inner_shape in flat_boxes(shape[1:], start - first * row, stop - first * row):
            yield (first, *inner_start), (1, *inner_shape)
        return
    head_stop = first + (start > first * row)
    tail_start = last + (stop == (last + 1) * row)
    if head_stop > first:
        for inner_start, inner_shape in flat_boxes(shape[1:], start - first * row, row):
            yield (first, *inner_start), (1, *inner_shape)
    if tail_start > head_stop:
        yield (head_stop, *(0,) * (len(shape) - 1)), (tail_start - head_stop, *shape[1:])
    if tail_start == last:
        for inner_start, inner_shape in flat_boxes(shape[1:], 0, stop - last * row):
            yield (last, *inner_start), (1, *inner_shape)
