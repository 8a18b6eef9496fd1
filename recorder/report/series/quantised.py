"""Numbers as small codes for drawing, series by series: as exact as a screen shows.

With two bytes a number has three or four digits, with one byte one or two, and the page shows no more of it than these.

A series is scaled to its own range, linearly, or by the inverse hyperbolic sine where its magnitudes span more than
`_WIDE`: that is a logarithm for both signs, and linear around zero. Codes are then differences, first of a lane from
the lane before it, so that replicas cost nothing, then of a column from the one before it.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

NO_ROW, NO_NUMBER, FIRST = 0, 1, 2
"""Codes of a cell of which nothing was recorded, and of one whose row has no such statistic; numbers begin behind."""
FINE, COARSE = 65534, 254
"""How many numbers a code tells apart: with two bytes, and with one."""
_WIDE = 64.0
_MAX_SPAN = 1e9
"""What is so much smaller than the largest of its series is drawn as if it were zero."""
_LARGEST = float(np.finfo(np.float32).max)


class Quantised(NamedTuple):
    """Codes of an array of series, lanes and columns, and how each series is scaled."""

    codes: npt.NDArray[Any]
    """uint8 or uint16; differences, to be summed along columns and then along lanes, modulo their width."""
    low: npt.NDArray[np.float32]
    high: npt.NDArray[np.float32]
    unit: npt.NDArray[np.float32]
    """What the inverse hyperbolic sine is taken of is measured in this; 0 where a series is linear."""


def quantise(values: npt.NDArray[np.float32], has_row: npt.NDArray[np.bool_], levels: int) -> Quantised:
    """Codes of numbers.

    Args:
        values: by series, lane and column; NaN where there is none.
        has_row: where something was recorded, if not this statistic.
        levels: `FINE` or `COARSE`.
    """
    by_series = len(values), math.prod(values.shape[1:])  # there may be no series, as in a run of scalars alone
    flat = np.clip(values.reshape(by_series).astype(np.float64), -_LARGEST, _LARGEST)
    is_number = ~np.isnan(flat)
    sizes = np.abs(np.where(is_number, flat, 0.0))
    largest = sizes.max(axis=1, initial=0.0)
    smallest = np.where(sizes > 0, sizes, np.inf).min(axis=1, initial=np.inf)
    is_wide = largest > _WIDE * smallest
    unit = np.where(is_wide, np.maximum(smallest, largest / _MAX_SPAN), 0.0).astype(np.float32)
    divisor = np.where(unit > 0, unit, 1.0).astype(np.float64)[:, None]
    scaled = np.where((unit > 0)[:, None], np.arcsinh(flat / divisor), flat)
    low = np.where(is_number, scaled, np.inf).min(axis=1, initial=np.inf)
    high = np.where(is_number, scaled, -np.inf).max(axis=1, initial=-np.inf)
    low, high = (np.where(np.isfinite(ends), ends, 0.0) for ends in (low, high))
    span = np.where(high > low, high - low, 1.0)[:, None]
    steps = np.rint((np.where(is_number, scaled, 0.0) - low[:, None]) / span * (levels - 1))
    rows = has_row.reshape(by_series)
    codes = np.where(is_number, FIRST + np.clip(steps, 0, levels - 1), np.where(rows, NO_NUMBER, NO_ROW))
    kind = np.uint8 if levels <= COARSE else np.uint16
    differences = _differences(codes.astype(kind).reshape(values.shape))
    return Quantised(differences, low.astype(np.float32), high.astype(np.float32), unit)


def _differences(codes: npt.NDArray[Any]) -> npt.NDArray[Any]:
    differences = codes.copy()
    differences[:, 1:] -= codes[:, :-1]
    along = differences.copy()
    along[:, :, 1:] -= differences[:, :, :-1]
    return along


def planes(codes: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """The bytes of codes, the low ones first: alike bytes together, which deflate better."""
    if codes.dtype == np.uint8:
        return codes.reshape(-1)
    return np.concatenate([(codes & 0xFF).reshape(-1), (codes >> 8).reshape(-1)]).astype(np.uint8)
