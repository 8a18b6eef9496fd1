"""The units of two rows laid side by side: how many are dead, and which is farthest apart.

Never reads a run. What a row lacks, or has damaged, is None here; `recorder verify` tells of damage.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ..errors import CorruptError
from ..format.numbers.units import Units
from ..read.shards.decode import parse_shape


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
