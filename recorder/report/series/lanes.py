"""Which ranks are drawn as lines of their own, and how the others are summed up: lowest, median, highest, the odd ones.

Of a few ranks each has a lane. Of many, three lanes hold their spread, and a few more those ranks that are most often
far from the median of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ...numerics.keys import Integers, group
from ...run.run import Run
from ..rows import Values

MAX_RANKS = 8
"""More are summed up."""
MAX_ODD = 4
SPREAD = ("low", "median", "high")
_GLOBAL = "global"
_FAR = 8.0
"""A value so many quartile ranges from the median of the ranks is far from it."""
_LEAST_SHARE = 1e-3
"""What quartiles are apart at least, as a share of the median's magnitude: ranks that agree differ by roundings."""
_MIN_RANKS = 3
"""Fewest ranks: where two differ, nobody can say which of them is odd."""


class Lanes:
    """The lanes of a run, by number."""

    def __init__(self, run: Run, *, can_have_global: bool = True) -> None:
        """Lanes for the ranks that a run has, and for all of them together unless that would take too long."""
        self.ranks: list[int] = run.ranks
        self.is_merged = run.is_merged
        self.has_spread = len(self.ranks) > MAX_RANKS
        self.has_global = self.is_merged or (can_have_global and len(self.ranks) > 1)
        kinds = [_GLOBAL] if self.has_global else []
        own = () if self.has_spread else self.ranks
        self._first = len(kinds)
        self.kinds = [*kinds, *(SPREAD if self.has_spread else ()), *("rank" for _ in own)]
        self.odd: list[int] = []
        self._lane_of_rank = np.full((max(self.ranks, default=0) + 2), -1, np.int64)
        for index, rank in enumerate(own):
            self._lane_of_rank[rank] = self._first + index
        if self.is_merged:
            self._lane_of_rank[-1] = 0  # a value of all ranks has rank -1

    def __len__(self) -> int:
        """How many there are, and room for those of odd ranks."""
        return len(self.kinds) + MAX_ODD * self.has_spread

    def set_odd(self, ranks: Sequence[int]) -> None:
        """Give lanes to the ranks that were found odd."""
        self.odd = list(ranks)[:MAX_ODD]
        for index, rank in enumerate(self.odd):
            self._lane_of_rank[rank] = len(self.kinds) + index

    def of_ranks(self, ranks: Integers) -> Integers:
        """The lane of each rank; -1 for one without."""
        return np.asarray(self._lane_of_rank[ranks], np.int64)

    @property
    def spread_lanes(self) -> range:
        return range(self._first, self._first + len(SPREAD))

    def described(self) -> list[dict[str, Any]]:
        """What the page knows of each."""
        ranks = [None] * len(self.kinds)
        own = [*(() if self.has_spread else self.ranks)]
        described = [{"kind": kind, "rank": None} for kind in self.kinds[: len(ranks) - len(own)]]
        described += [{"kind": "rank", "rank": rank} for rank in own]
        return described + [{"kind": "odd", "rank": rank} for rank in self.odd]


class Spread(NamedTuple):
    """How the ranks' values of each series and step lie."""

    series: Integers
    steps: Integers
    numbers: dict[str, tuple[npt.NDArray[np.float64], ...]]
    """By statistic the lowest, the median and the highest; NaN where no rank has one."""
    deviation: npt.NDArray[np.float64]
    """For each value, not each series and step: how many quartile ranges it is from the median; NaN where unknown."""


def spread_of(values: Values, judged_by: str | None) -> Spread:
    """Order the ranks' values of each series and step; deviations are those of the statistic `judged_by`."""
    groups = group([values.series, values.steps - values.steps.min(initial=0)])
    ids = groups.ids
    quantiles: dict[str, tuple[npt.NDArray[np.float64], ...]] = {}
    deviation = np.full(len(ids), np.nan)
    for name, numbers in values.numbers.items():
        order = np.lexsort([numbers, ids])  # NaN stands last
        in_order = numbers[order]
        starts = np.searchsorted(ids[order], np.arange(groups.num_groups))
        counts = np.bincount(ids, ~np.isnan(numbers), groups.num_groups).astype(np.int64)

        def at(share: float, starts: Integers = starts, counts: Integers = counts,
               in_order: npt.NDArray[np.float64] = in_order) -> npt.NDArray[np.float64]:  # fmt: skip
            index = starts + np.maximum((share * (counts - 1)).astype(np.int64), 0)
            return np.where(counts > 0, in_order[index], np.nan)

        quantiles[name] = at(0.0), at(0.5), at(1.0)
        if name == judged_by:
            median = quantiles[name][1]
            quartiles = np.maximum(at(0.75) - at(0.25), _LEAST_SHARE * np.abs(median))
            apart = np.abs(numbers - median[ids])
            with np.errstate(divide="ignore", invalid="ignore"):
                deviation = np.where(apart == 0, 0.0, apart / quartiles[ids])
            deviation[(counts < _MIN_RANKS)[ids]] = np.nan
            deviation = np.where(np.isinf(deviation), 1e6, np.minimum(deviation, 1e6))
    return Spread(values.series[groups.firsts], values.steps[groups.firsts], quantiles, deviation)


class OddRanks:
    """Counts how often each rank is far from the others."""

    def __init__(self, ranks: Sequence[int]) -> None:
        size = max(ranks, default=0) + 1
        self.far = np.zeros(size, np.int64)
        """By rank, values far from the median of all."""
        self.alone = np.zeros(size, np.int64)
        """By rank, values that are not finite where most ranks' are."""
        self.compared = np.zeros(size, np.int64)

    def add(self, values: Values, spread: Spread) -> None:
        """Values of all ranks, and how they lie."""
        is_own = values.ranks >= 0
        ranks, deviation = values.ranks[is_own], spread.deviation[is_own]
        size = len(self.far)
        self.compared += np.bincount(ranks[~np.isnan(deviation)], minlength=size)
        self.far += np.bincount(ranks[deviation > _FAR], minlength=size)
        if {"nan_count", "inf_count"} <= values.numbers.keys():
            groups = group([values.series, values.steps - values.steps.min(initial=0)])
            bad = (values.numbers["nan_count"] > 0) | (values.numbers["inf_count"] > 0)
            share = np.bincount(groups.ids, bad, groups.num_groups) / np.bincount(
                groups.ids, minlength=groups.num_groups
            )
            self.alone += np.bincount(values.ranks[is_own & bad & (share < 0.5)[groups.ids]], minlength=size)

    def found(self) -> list[int]:
        """The odd ranks, the oddest first; none where all are alike."""
        score = self.far + self.alone
        usual = float(np.median(score)) if len(score) else 0.0
        order = np.argsort(-score, kind="stable")
        return [int(rank) for rank in order if score[rank] > 3 * usual + 2]
