"""What there is to draw of a run: its modules, series and steps, as one look over all rows finds them, and the lanes.

A lane is a line that is drawn of a series. Of a few ranks each has a lane. Of many ranks, three lanes hold the lowest,
the median and the highest value, and a few more lanes hold those ranks that are most often far from the median of all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..numerics.keys import Integers, group
from ..numerics.moments import integers
from ..read.manifests import list_paths
from ..run.run import Run
from ..sites import SITE_OF, Kind
from .blocks import PageBlock
from .step_rows import DrawnSeries, SeriesValues, keys_of


@dataclass(slots=True)
class Axes:
    """The series, steps and shapes to draw. Numbers of the step, such as the loss, have steps of their own."""

    index: dict[DrawnSeries, int] = field(default_factory=dict)
    """The number of each series, in the order in which the series were first seen."""
    _of_any_root: dict[tuple[str, ...], int] = field(default_factory=dict)
    """By what names a series but its root, the number of the one that is called so; -1 where there are several. Stages
    of a pipeline are roots of their own, and a value of the whole model has the root of one of them, or none."""
    is_scalar: list[bool] = field(default_factory=list)
    shapes: list[str] = field(default_factory=list)
    """Shapes of the whole tensors where rows name them, else as a rank held them, by the first row of each series."""
    dtypes: list[str] = field(default_factory=list)
    numels: list[int] = field(default_factory=list)
    first_steps: list[int] = field(default_factory=list)
    steps: set[int] = field(default_factory=set)
    scalar_steps: set[int] = field(default_factory=set)
    num_steps: int = 0
    """How many steps have a row, either of a module or of a number of the step."""
    first_step: int | None = None
    last_step: int | None = None
    num_rows: int = 0
    below: str | None = None
    """Only this module, the modules below it and numbers of the step are drawn; None draws everything."""

    def numbers_of(self, table: Any) -> Integers:
        """Return for each row of a table the number of its series; -1 where the series is not drawn."""
        ids, keys, _ = keys_of(table)
        of_table = [self.index[key] if key in self.index else self._of_any_root.get(key[1:], -1) for key in keys]
        return np.array([*of_table, -1], np.int64)[ids]

    def _is_wanted(self, key: DrawnSeries) -> bool:
        if not self.below or is_number(key.site):
            return True
        return key.module_path == self.below or key.module_path.startswith(f"{self.below}.")

    def add(self, table: Any) -> None:
        """Add the rows of a range of steps, which are sorted by rank and `seq`."""
        ids, keys, firsts = keys_of(table)
        steps, sequence = integers(table.column("step")), integers(table.column("seq"))
        self.num_rows += table.num_rows
        scalar = np.array([is_number(key.site) for key in keys] + [False])[ids]
        of_scalars, of_modules = (set(np.unique(steps[some]).tolist()) for some in (scalar, ~scalar))
        found = of_scalars | of_modules
        self.num_steps += len(found - self.steps - self.scalar_steps)
        self.scalar_steps |= of_scalars
        self.steps |= of_modules
        if found:
            self.first_step = min(found) if self.first_step is None else min(self.first_step, *found)
            self.last_step = max(found) if self.last_step is None else max(self.last_step, *found)
        for number in np.argsort(sequence[firsts], kind="stable").tolist():
            key, row = keys[number], int(firsts[number])
            if key in self.index or not self._is_wanted(key):
                continue
            self._of_any_root[key[1:]] = -1 if key[1:] in self._of_any_root else len(self.index)
            self.index[key] = len(self.index)
            whole, own, dtype, numel = (
                table.column(name)[row].as_py() for name in ("global_shape", "shape", "dtype", "numel")
            )
            self.is_scalar.append(is_number(key.site))
            self.shapes.append(whole or own)
            self.dtypes.append(dtype)
            self.numels.append(numel)
            self.first_steps.append(int(steps[row]))


def is_number(site: str) -> bool:
    """Whether the values of a site are numbers of the step, such as the loss."""
    return site in SITE_OF and SITE_OF[site].kind is Kind.NUMBER


def modules_block(run: Run, series: list[DrawnSeries]) -> tuple[PageBlock, Mapping[str, int]]:
    """Return the block of the modules, in the order of execution, and the number of each module by its path."""
    order = dict.fromkeys(dict.fromkeys(key.module_path for key in series))
    # What only contains others, or was not recorded, stands behind; the page puts it where its children are.
    known = list_paths((path for _, path in run.modules), order)
    paths = [*order, *(path for path in known if path not in order)]
    infos = {path: info for (_, path), info in run.modules.items()}
    rows = [
        [path, infos[path].class_name if path in infos else "", infos[path].source if path in infos else ""]
        for path in paths
    ]
    block = PageBlock(name="modules", data={"modules": rows, "num_executed": len(order)})
    return block, {path: number for number, path in enumerate(paths)}


MAX_RANKS = 8
"""The most ranks that each have a lane of their own; a larger number of ranks is summed up in three lanes."""
MAX_ODD = 4
SPREAD = ("low", "median", "high")
_GLOBAL = "global"
_FAR = 8.0
"""A value is far from the median of the ranks where the two lie this many quartile ranges apart."""
_LEAST_SHARE = 1e-3
"""The least distance that quartiles are taken to have, as a share of the median: ranks that agree differ by
roundings."""
_MIN_RANKS = 3
"""The fewest ranks that are compared: where two ranks differ, nobody can say which of the two is odd."""


class Lanes:
    """The lanes of a run, by number."""

    def __init__(self, run: Run, *, can_have_global: bool = True) -> None:
        """Make lanes for the ranks of a run, and one lane for all ranks together unless that would take too long."""
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
        """Return the number of lanes, with the lanes that are kept free for odd ranks."""
        return len(self.kinds) + MAX_ODD * self.has_spread

    def set_odd(self, ranks: Sequence[int]) -> None:
        """Give lanes to the ranks that were found odd."""
        self.odd = list(ranks)[:MAX_ODD]
        for index, rank in enumerate(self.odd):
            self._lane_of_rank[rank] = len(self.kinds) + index

    def of_ranks(self, ranks: Integers) -> Integers:
        """Return the lane of each rank; -1 for a rank without a lane."""
        return np.asarray(self._lane_of_rank[ranks], np.int64)

    @property
    def spread_lanes(self) -> range:
        return range(self._first, self._first + len(SPREAD))

    def described(self) -> list[dict[str, Any]]:
        """Return the kind and the rank of each lane, for the page."""
        ranks = [None] * len(self.kinds)
        own = [*(() if self.has_spread else self.ranks)]
        described = [{"kind": kind, "rank": None} for kind in self.kinds[: len(ranks) - len(own)]]
        described += [{"kind": "rank", "rank": rank} for rank in own]
        return described + [{"kind": "odd", "rank": rank} for rank in self.odd]


class Spread(NamedTuple):
    """How far apart the ranks' values of each series and step are."""

    series: Integers
    steps: Integers
    numbers: dict[str, tuple[npt.NDArray[np.float64], ...]]
    """The lowest, the median and the highest value of each statistic; NaN where no rank has a value."""
    deviation: npt.NDArray[np.float64]
    """For each value, not each series and step: how many quartile ranges it is from the median; NaN where unknown."""


def spread_of(values: SeriesValues, judged_by: str | None) -> Spread:
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
        """The number of values of each rank that are far from the median of all ranks."""
        self.alone = np.zeros(size, np.int64)
        """The number of values of each rank that are not finite where most ranks' values are."""
        self.compared = np.zeros(size, np.int64)

    def add(self, values: SeriesValues, spread: Spread) -> None:
        """Count the values of all ranks that are far from the median in `spread`, or alone in not being finite."""
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
        """Return the odd ranks, the oddest first; an empty list where all ranks are alike."""
        score = self.far + self.alone
        usual = float(np.median(score)) if len(score) else 0.0
        order = np.argsort(-score, kind="stable")
        return [int(rank) for rank in order if score[rank] > 3 * usual + 2]
