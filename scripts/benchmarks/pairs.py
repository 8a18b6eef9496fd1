"""Statistics of pairs: what was measured with something, against what was measured without it in the same round."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple


class Spread(NamedTuple):
    """Where the ratios of some pairs lie."""

    median: float
    low: float
    """First quartile."""
    high: float
    """Third quartile."""
    least: float
    most: float
    num_pairs: int


def spread(values: Sequence[float]) -> Spread:
    """Median, quartiles (those of the middle of the values, ends included) and extremes."""
    if not values:
        raise ValueError("a spread of nothing")
    ordered = sorted(values)
    low, _, high = statistics.quantiles(ordered, n=4, method="inclusive") if len(ordered) > 1 else 3 * ordered
    return Spread(statistics.median(ordered), low, high, ordered[0], ordered[-1], len(ordered))


def noise_of(same: Spread) -> float:
    """How far apart two of the same kind were, relatively: the farthest of their pairs."""
    return max(abs(same.least - 1), abs(same.most - 1))


def is_distinguishable(ratio: Spread, noise: float) -> bool:
    """Whether a median ratio is farther from 1 than two of the same kind were from each other in any round."""
    return abs(ratio.median - 1) > noise
