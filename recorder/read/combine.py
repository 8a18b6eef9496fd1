"""Owns the statistics of a global tensor, combined from those of its pieces; no payload is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..format.fingerprint import MODULUS, moved, to_text
from ..format.schema import COUNTS, STATISTICS
from ..layout.regions import Ints as Shape

Floats = npt.NDArray[np.float64]
Columns = dict[str, npt.NDArray[Any]]
"""Statistics by name; NaN stands for null."""


def combine(pieces: Mapping[str, Floats], numels: Floats, factors: Floats, starts: npt.NDArray[np.int64]) -> Columns:
    """Statistics of groups of pieces that share no element (Chan, Golub, LeVeque 1979 for the variance).

    Args:
        pieces: each statistic of all pieces, group by group, as float64; counts too; NaN for null.
        numels: elements of each piece.
        factors: what each piece's values are multiplied with.
        starts: where each group begins.

    Returns:
        Each statistic of every group; null wherever some piece has none although it has elements.
    """
    if not len(starts):
        return {name: np.zeros(0) for name in (*STATISTICS, *COUNTS)}
    own_counts = {name: np.where(numels == 0, 0.0, pieces[name]) for name in COUNTS}
    counts = {name: np.add.reduceat(column, starts) for name, column in own_counts.items()}
    num_finite = numels - own_counts["nan_count"] - own_counts["inf_count"]
    is_known = np.logical_and.reduceat(~np.isnan(own_counts["nan_count"]), starts)
    has_values = (num_finite > 0) & ~np.isnan(pieces["sum"])
    lacks = np.logical_or.reduceat((num_finite > 0) & np.isnan(pieces["sum"]), starts)  # such as complex numbers
    negative = factors < 0
    low = np.where(negative, pieces["max"], pieces["min"]) * factors
    high = np.where(negative, pieces["min"], pieces["max"]) * factors
    weight = np.where(has_values, num_finite, 0.0)

    def total(values: Floats) -> Floats:
        found: Floats = np.add.reduceat(np.where(has_values, values, 0.0), starts)
        return found

    with np.errstate(all="ignore"):
        num = np.add.reduceat(weight, starts)
        sums, squares = total(pieces["sum"] * factors), total(pieces["sum_sq"] * factors**2)
        mean = sums / num
        of_group = np.repeat(np.arange(len(starts)), np.diff([*starts, len(numels)]))
        spread = (pieces["std"] * factors) ** 2 + (pieces["mean"] * factors - mean[of_group]) ** 2
        std = np.sqrt(total(weight * spread) / num)
        found = {
            "mean": mean,
            "std": std,
            "min": np.minimum.reduceat(np.where(has_values, low, np.inf), starts),
            "max": np.maximum.reduceat(np.where(has_values, high, -np.inf), starts),
            "absmax": np.maximum.reduceat(np.where(has_values, np.abs(pieces["absmax"] * factors), 0.0), starts),
            "l2": np.sqrt(squares),
            "sum": sums,
            "sum_sq": squares,
        }
    # One piece alone keeps what was measured, bit by bit: a mean is not always sum / n to the last digit.
    alone = np.diff([*starts, len(numels)]) == 1
    for name in STATISTICS:
        first = pieces[name][starts]
        same = alone & (factors[starts] == 1.0)
        found[name] = np.where(same, first, np.where((num > 0) & is_known & ~lacks, found[name], np.nan))
    return {**found, **{name: np.where(is_known, values, np.nan) for name, values in counts.items()}}


def combine_fingerprints(
    fingerprints: Sequence[str | None], moves: Sequence[Shape | None], item_bytes: int
) -> str | None:
    """The fingerprint of a whole tensor from those of its pieces; None where one is missing.

    Args:
        fingerprints: of the pieces, as in their rows.
        moves: where each lies, if its fingerprint was taken at the origin; None where it knows its place.
        item_bytes: bytes of an element.
    """
    total = 0
    for text, offsets in zip(fingerprints, moves, strict=True):
        if text is None:
            return None
        try:
            value = int(text, 16)
        except ValueError:
            return None
        total += moved(value, item_bytes, offsets) if offsets is not None else value
    return to_text(total % MODULUS)
