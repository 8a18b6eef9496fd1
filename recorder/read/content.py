"""Owns how much the content of equal tensors says: nothing where any tensor might have it, or few could have another.

Must never read.
"""

from __future__ import annotations

import math
from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt

_MIN_BITS = 10
"""Of whole numbers; fewer are equal by chance, as the classes of a few samples are."""


class Content(Enum):
    """What equal tensors hold."""

    NOTHING = 0
    """One number throughout, NaN, or so few whole numbers that they may be equal by chance."""
    WHOLE = 1
    """Whole numbers: indices, masks, classes."""
    NUMBERS = 2
    """Numbers that no two tensors have by chance."""


def content_by(low: float | None, high: float | None, total: float | None, numel: int, *, is_float: bool) -> Content:
    """By the least and the greatest finite number of a tensor, their sum, and how many there are."""
    if low is None or high is None:
        return Content.NOTHING
    if is_float and not (low.is_integer() and high.is_integer() and total is not None and float(total).is_integer()):
        return Content.NUMBERS
    bits = numel * math.log2(high - low + 1)
    return Content.WHOLE if bits >= _MIN_BITS else Content.NOTHING


def content_of(items: npt.NDArray[Any]) -> Content:
    """By the values themselves."""
    kind = items.dtype.kind
    try:
        wide = items.astype(np.float64 if kind != "c" else np.complex128)
    except (TypeError, ValueError):  # elements that are no numbers: pairs, bytes
        return Content.NUMBERS if items.size and (items != items.flat[0]).any() else Content.NOTHING
    if not items.size or np.isnan(wide).any():
        return Content.NOTHING
    if kind == "c":
        return Content.NUMBERS if (wide != wide.flat[0]).any() else Content.NOTHING
    finite = wide[np.isfinite(wide)]
    if not finite.size or (finite.size == wide.size and finite.min() == finite.max()):
        return Content.NOTHING
    low, high = float(finite.min()), float(finite.max())
    return content_by(low, high, float(finite.sum()), items.size, is_float=kind not in "biu")


def is_repeated(items: npt.NDArray[Any], dim: int) -> bool:
    """Whether a tensor is one slice repeated along a dim, as `expand` makes them."""
    return bool((items == items.take([0], axis=dim)).all())
