"""The rule on updates: how far the steps of an optimizer move the weights, and its learning rate."""

from __future__ import annotations

import math
import re
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, ClassVar

import numpy as np

from ...sites import UPDATE
from ...system.text import number
from ..normal import Movement
from ..rows import (
    IS_PROBE,
    MAX_STEPS,
    Flags,
    Floats,
    Memory,
    Rows,
    SeriesKey,
    Streaks,
    began,
    grouped,
    previous,
)  # fmt: skip
from ..rule import CALIBRATED, CheckRule, Finding, PartsRule, Setting, Severity, StreakRule
from .gradients import is_weight
from .leaps import Recent

_LEAST_ELEMENTS = 16
"""The least number of elements of a weight that is judged. The statistics of fewer elements mean little."""
_MANY = 256
"""The least number of elements of a parameter that counts among the weights of a model."""
_CLIPS = "nothing is wrong if the weight is to be clipped, as that of a WGAN's critic"
_FEW_ZEROS = 0.1
"""The most elements of a gradient that are zero where all elements of the parameter are updated."""
_FRESH = 2
"""An Adam whose first update is at this step or before it has begun with the run. Its first update has full size."""
_FALLEN, _RISEN, _AT_ONCE = 0.01, 0.1, 0.95
"""A learning rate at these parts of its top has fallen to almost nothing, has risen again, or is at its top."""
FADED = 1e-5
"""A learning rate at this part of its top moves hardly any weight of 32 bits."""
_LASTING_STEPS, _LASTING = 20, 0.1
"""Such a rate is found if it stays for so many steps, and for this part of all steps."""
_MANY_FALLS = 20
"""A rate that has fallen less often may be that of a ReduceLROnPlateau, once nothing is left to learn."""
SCHEDULE = "look at the schedule of the learning rate, and whether it is stepped as often as it was made for"
_STAIRS, _STAIR = 3, 5
"""A learning rate climbs stairs if it has risen so many times or more, each time after equally many steps: a _STAIR."""


class _Update(CheckRule):
    name = "update"
    sentence = "Steps of the optimizer change a weight by a large part of its norm, or all steps only shrink it."
    sites: ClassVar[tuple[str, ...]] = ("param", UPDATE)
    columns, reads_probe = ("sum_sq", "sum", "numel"), True
    settings = (
        Setting("updates", 3, "first updates, judged by records", "from a random start they are large"),
        Setting("ratio", 0.5, "of the weight's norm, at least", "usual is 1e-3; smdebug's WeightUpdateRatio allows 10"),
        Setting("began", 1e-2, "root mean square", "a weight that begins at zero grows by any factor"),
        Setting("left", 0.5, "of the norm at first", "the weight has then lost more than half of its norm"),
        Setting("inward", 0.71, "of an update's length", "the rest is less than half of its square"),
        Setting("shrinking", 10, "updates in a row", "ours"),
        Setting("turnover", 0.08, "of the norm of all weights, in an update", CALIBRATED),
        Setting("lasting", 20, "updates, of which the median counts", CALIBRATED),
        Setting("first", 0.5, "of the learning rate of an Adam, at most", "the first update is 1"),
        Setting("starved", 0.1, "of the learning rate of an Adam, for a warning", "an update by pure noise is 0.23"),
    )  # fmt: skip
    advice = "the learning rate is too high for this weight, warm-up is missing, or something else wrote into it"

    def _is_searched(self, key: SeriesKey) -> bool:
        """Whether a step of the parameter's optimizer is a search of many updates, as that of LBFGS is."""
        return self.catalog.rate_of(key.root, key.module_path, key.name).startswith("lr.LBFGS")


class _Large(_Update, StreakRule):
    what = "one update is large against the weight"
    measure, limit = "update over weight, at least", "ratio"
    may_recover = True

    def set_up(self) -> None:
        self._movement, self._began = Movement(), Memory()
        self._largest, self._square, self._clipped, self._num_clipped = Memory(), Memory(), Streaks(), Memory(0.0)
        """By parameter and rank: the last largest magnitude and sum of squares, and the most records in a row in which
        both ends lie at one magnitude, and the sum changes."""
        self._param_of: dict[int, int] = {}
        """Maps the lane (a series on one rank) of a parameter's updates to the parameter's lane; -1 if unknown."""
        self._num_updates = Memory(0.0)
        """By parameter and rank, the number of the parameter's updates that the probe has measured so far."""
        self._updates: Rows | None = None
        """The probe's rows of updates that belong to the rows being judged."""
        self._recent = Recent()

    def wants(self, key: SeriesKey) -> bool:
        return super().wants(key) or key.is_rate

    def add(self, rows: Rows) -> Iterator[Finding]:
        self._recent.add(rows.take(rows.where("rate", attrgetter("is_rate"))))
        self._updates = self._without_first(rows.take(rows.at(UPDATE)).by_lane())
        for one in super().add(rows.take(rows.at("param"))):
            yield self.with_detail(one, self._recent.risen_rate(one))

    def judge(self, rows: Rows) -> tuple[Flags, Floats]:
        """Judge by the updates' sizes from the probe. Without them, changes of norm and sum give a lower bound."""
        lanes, rms = rows.lanes, np.nan_to_num(rows.rms)
        is_begun = began(lanes, rms, self._began) >= self.thresholds["began"]
        ratio, is_recorded = np.zeros(len(rows)), rows[IS_PROBE] != 1
        ratio[is_recorded] = np.nan_to_num(self._movement.ratio(rows.take(is_recorded)), posinf=0.0)
        self._look_up(rows, ratio)
        recorded = rows.take(is_recorded)
        is_clipped = recorded["absmax"] == previous(recorded.lanes, recorded["absmax"], self._largest)
        is_clipped &= recorded["min"] == -recorded["max"]
        is_clipped &= recorded["sum_sq"] != previous(recorded.lanes, recorded["sum_sq"], self._square)
        lengths = self._clipped.lengths(recorded.lanes, recorded.steps, is_clipped)[0] * is_clipped
        most = np.zeros(self.catalog.num_lanes)
        np.maximum.at(most, recorded.lanes, lengths)
        lanes = np.unique(recorded.lanes)
        self._num_clipped[lanes] = np.maximum(self._num_clipped[lanes], most[lanes])
        is_large = (ratio > self.thresholds["ratio"]) & is_begun & ~rows.where("searched", self._is_searched)
        return is_large & is_weight(self.catalog, rows) & (rows["numel"] >= _LEAST_ELEMENTS), ratio

    def revised(self, one: Finding) -> Finding:
        """Make a finding a note if the program clips the weight: both ends stay at one magnitude, and others move."""
        lane = self._lanes.get(one)
        if lane is None or self._num_clipped.of(lane) < self.thresholds["updates"]:
            return one
        what = f"{one.what}, and its largest magnitude has stayed {number(self._largest.of(lane))}: it is clipped"
        return one._replace(severity=Severity.NOTE, what=what, advice=_CLIPS)

    def _without_first(self, updates: Rows) -> Rows:
        """Leave out the first rows of each parameter on each rank. The rows are sorted by parameter and rank."""
        numbers = self._num_updates.sums(updates.lanes, np.ones(len(updates))) - 1
        return updates.take(numbers >= self.thresholds["updates"])

    def _look_up(self, rows: Rows, ratio: Floats) -> None:
        """Replace a parameter's ratio by the measured ratio if the probe has measured the size of the update."""
        updates = self._updates
        if updates is None or not len(updates) or not len(rows):
            return
        for lane in np.unique(updates.lanes).tolist():
            if lane not in self._param_of:
                key = self.catalog.key_of(lane)._replace(site="param")
                found = self.catalog.find(key, int(self.catalog.rank_of[lane]))
                self._param_of[lane] = -1 if found is None else found
        whose = np.array([self._param_of[lane] for lane in updates.lanes.tolist()], np.int64)
        wanted, known = whose * MAX_STEPS + updates.steps, rows.lanes * MAX_STEPS + rows.steps
        order = np.argsort(known, kind="stable")
        at = order[np.minimum(np.searchsorted(known, wanted, sorter=order), len(known) - 1)]
        is_same = known[at] == wanted
        with np.errstate(all="ignore"):
            size = np.sqrt(updates["sum_sq"] / rows["sum_sq"][at])
        ratio[at[is_same]] = np.nan_to_num(size[is_same], posinf=0.0)


class _Shrinking(_Large):
    """A weight that has lost most of its norm. Its updates point at zero."""

    what = "the weight has lost most of its norm, because its updates do little but shrink it"
    measure, limit = "of the norm at first", "left"
    advice = "weight decay outweighs the gradient: reduce it, or look why the weight has hardly any gradient"

    def set_up(self) -> None:
        super().set_up()
        self._norm, self._step, self._length = Memory(), Memory(), Memory()
        self.thresholds["records"] = self.thresholds["shrinking"]

    def judge(self, rows: Rows) -> tuple[Flags, Floats]:
        """Judge by the norm's loss at a record, as a fraction of the length of the update before the record."""
        lanes, steps, norm = rows.lanes, rows.steps.astype(np.float64), np.sqrt(rows["sum_sq"])
        ratio = np.full(len(rows), np.nan)
        self._look_up(rows, ratio)
        with np.errstate(all="ignore"):
            left = norm / began(lanes, norm, self._began)
        lost = previous(lanes, norm, self._norm) - norm
        length = previous(lanes, ratio * norm, self._length)
        is_inward = (lost > self.thresholds["inward"] * length) & (steps - previous(lanes, steps, self._step) == 1)
        return is_inward & (left < self.thresholds["left"]) & is_weight(self.catalog, rows) & (
            rows["numel"] >= _LEAST_ELEMENTS
        ), left


class _Uphill(_Update, StreakRule):
    """A learning rate below zero, as of a schedule that goes on falling past its end."""

    what = "the learning rate is below zero: each update follows the gradient uphill"
    measure, limit = "learning rate", "rate"
    advice = "look at the schedule, which may go on beyond its last step"

    def set_up(self) -> None:
        self.thresholds["rate"] = 0.0

    def wants(self, key: SeriesKey) -> bool:
        return key.is_rate

    def judge(self, rows: Rows) -> tuple[Flags, Floats]:
        return rows["mean"] < 0, rows["mean"]


@dataclass(eq=False, slots=True)
class _Wave:
    """The course of a learning rate."""

    top: float = 0.0
    has_fallen: bool = False
    at: int | None = None
    """The step at which the rate has risen again, while it has not fallen again."""
    risen: float = 0.0
    """The rate at this step."""
    highest: float = 0.0
    """The highest rate since this step."""
    num: int = 0
    """The number of rises that were slow."""
    first: int = 0
    """The step of the first one of these."""

    def add(self, step: int, rate: float) -> None:
        self.top, self.highest = max(self.top, rate), max(self.highest, rate)
        if rate <= _FALLEN * self.top and self.top > 0:
            self.end_rise()
            self.has_fallen = True
        elif self.has_fallen and rate >= _RISEN * self.top:
            self.has_fallen, self.at, self.risen, self.highest = False, step, rate, rate

    def end_rise(self) -> None:
        """Note the rise that is over, unless the rate was at its top at once, as after a restart."""
        if self.at is not None and self.risen < _AT_ONCE * self.highest:
            self.num, self.first = self.num + 1, self.first if self.num else self.at
        self.at = None


class _Course(_Update):
    """What the course of a learning rate tells, on the lowest rank that has the rate."""

    kind: ClassVar[type[_Wave | _Stairs | _Fade]]

    def set_up(self) -> None:
        self._courses: dict[int, Any] = {}
        """By learning rate on the lowest rank that has it, an object of `kind`."""
        self._first: dict[int, int] = {}
        """By series of a learning rate, its index on the lowest rank."""

    def wants(self, key: SeriesKey) -> bool:
        return key.is_rate

    def add(self, rows: Rows) -> Iterator[Finding]:
        for lane in np.unique(rows.lanes).tolist():
            if self._first.setdefault(int(self.catalog.series_of[lane]), lane) == lane:
                own, course = rows.take(rows.lanes == lane), self._courses.setdefault(lane, self.kind())
                for step, rate in zip(own.steps.tolist(), own["mean"].tolist(), strict=True):
                    course.add(step, rate)
        return iter(())


class _Waving(_Course):
    """A learning rate that falls to almost nothing and then rises again little by little, as a cosine does."""

    kind = _Wave
    advice = (
        "a CosineAnnealingLR does so if its T_max is less than the number of calls of its step(), such as a number of "
        "epochs where step() is called for each batch; nothing is wrong if it is meant to rise again"
    )

    def finish(self) -> Iterator[Finding]:
        for lane, wave in self._courses.items():
            wave.end_rise()
            if wave.num:
                what = "the learning rate falls to almost nothing and rises again little by little"
                what += f", {wave.num} times" * (wave.num > 1)
                yield self.finding(lane, wave.first, what, "", 0.0, 0.0, Severity.NOTE)


@dataclass(eq=False, slots=True)
class _Stairs:
    """A learning rate that may have risen step by step, as that of a warm-up, from one epoch to the next."""

    began: float = 0.0
    rate: float = 0.0
    since: int = -1
    """The first step with this rate; -1 if there is none."""
    last: int = 0
    gap: int = 0
    """The number of steps between any two rises; 0 before the first one, and -1 after another change of the rate."""
    num: int = 0

    def add(self, step: int, rate: float) -> None:
        if self.since < 0:
            self.began, self.rate, self.since = rate, rate, step
        elif rate != self.rate:
            gap = step - self.since
            self.gap = gap if rate > self.rate and self.gap in (0, gap) else -1
            self.rate, self.since, self.num = rate, step, self.num + 1
        self.last = step

    @property
    def is_climbed(self) -> bool:
        """Whether the rate has not stopped rising."""
        return self.num >= _STAIRS and self.gap >= _STAIR and self.last - self.since <= self.gap


class _Climbing(_Course):
    """A learning rate that still rises at the end, once in an epoch, as that of a warm-up made for updates."""

    kind = _Stairs
    advice = (
        "call the schedule's step() after each update if its warm-up counts updates; nothing is wrong if it counts "
        "epochs"
    )

    def finish(self) -> Iterator[Finding]:
        for lane, stairs in self._courses.items():
            if stairs.is_climbed:
                rates = f"from {number(stairs.began)} to {number(stairs.rate)}"
                what = f"the learning rate still rises at the end, {rates}, once in {stairs.gap} steps"
                yield self.finding(lane, stairs.since, what, "", 0.0, 0.0, Severity.NOTE)


@dataclass(eq=False, slots=True)
class _Fade:
    """A learning rate that may have fallen to almost nothing for good."""

    first: int = -1
    last: int = 0
    rate: float = 0.0
    top: float = 0.0
    before: float = 0.0
    """The last rate that was more than almost nothing."""
    since: int = -1
    """The first step of those with almost nothing; -1 if the rate is more."""
    num_falls: int = 0

    def add(self, step: int, rate: float) -> None:
        self.num_falls += rate < self.rate
        self.first, self.last, self.rate = step if self.first < 0 else self.first, step, rate
        self.top = max(self.top, rate)
        if rate > FADED * self.top:
            self.before, self.since = rate, -1
        elif self.since < 0:
            self.since = step

    @property
    def is_lasting(self) -> bool:
        """Whether the rate fell step by step, unlike that of parameters that are frozen, and stays for long."""
        is_fallen = self.since >= 0 and 0 < self.before < _RISEN * self.top
        return is_fallen and self.last - self.since >= max(_LASTING_STEPS, _LASTING * (self.last - self.first))


class _Fading(_Course):
    """A learning rate that falls to almost nothing long before the end, as that of a schedule stepped too often."""

    kind = _Fade
    advice = SCHEDULE

    def finish(self) -> Iterator[Finding]:
        for lane, fade in self._courses.items():
            if fade.is_lasting:
                what = f"the learning rate has fallen to {number(fade.rate)} from {number(fade.top)}, and stays there"
                severity = self.severity if fade.num_falls >= _MANY_FALLS else Severity.NOTE
                yield self.finding(lane, fade.since, what, "", 0.0, 0.0, severity, fade.since)


class _Restless(_Update):
    """A model of which update after update moves all weights together by a large part of their norm."""

    advice = "the learning rate is too high, or its warm-up leads too high"

    def set_up(self) -> None:
        self._ratios: dict[tuple[str, int], deque[float]] = {}
        """By root and rank, the sizes of the last updates over the weights; empty once they were found to be large."""
        self._num = Counter[tuple[str, int]]()

    def wants(self, key: SeriesKey) -> bool:
        return key.site in self.sites and not self._is_searched(key)

    def add(self, rows: Rows) -> Iterator[Finding]:
        """Judge the sizes of the probe. The updates of the beginning may be large, from a small random start."""
        rows, limit = rows.take(rows["numel"] >= _MANY), self.thresholds["turnover"]
        lasting, roots = int(self.thresholds["lasting"]), dict[str, int]()
        of_series = np.array([roots.setdefault(key.root, len(roots)) for key in self.catalog.series], np.int64)
        ids, firsts = grouped(rows.steps, rows.ranks, of_series[rows.series])
        weights, moved = (np.bincount(ids, np.nan_to_num(rows["sum_sq"]) * rows.at(site)) for site in self.sites)
        for first, before, square in zip(firsts.tolist(), weights.tolist(), moved.tolist(), strict=True):
            lane, step = int(rows.lanes[first]), int(rows.steps[first])
            whose = self.catalog.key_of(lane).root, int(rows.ranks[first])
            self._num[whose] += before > 0 and square > 0
            if self._num[whose] <= lasting or not before or not square:
                continue
            ratios = self._ratios.setdefault(whose, deque(maxlen=lasting))
            ratios.append(math.sqrt(square / before))
            if len(ratios) == lasting and (usual := float(np.median(ratios))) > limit:
                self._ratios[whose] = deque(maxlen=0)
                what, since = "update after update moves the weights of the model far", step - lasting + 1
                one = self.finding(lane, step, what, "median of update over weights", usual, limit, since=since)
                yield one._replace(module_path="", site="param", name="")


@dataclass(eq=False, slots=True)
class _Parts:
    """The updates of the parameters with one learning rate, on the first rank with some."""

    rank: int
    lane: int
    """The index of one of the parameters, on the rank."""
    since: int
    num: int = 0
    most: float = 0.0
    """The largest root mean square of a parameter's update so far, in parts of the learning rate."""


class _Starved(_Update):
    """An Adam whose updates are far smaller than its learning rate. Its first update moves each element by this rate.

    Adam divides the mean of the gradients by the root of the mean of their squares. In pure noise this is 0.23.
    """

    advice = (
        "its eps is as large as the gradients or larger: lower eps, or look at the factors of the loss; weights of 16 "
        "bits round small updates away"
    )

    def set_up(self) -> None:
        self._seen: dict[str, _Parts] = {}
        """By learning rate."""
        self._dense: set[tuple[str, str, str]] = set()
        """The parameters, by root, path and name, of which a gradient had few zeros: not the rows of a few words."""

    def wants(self, key: SeriesKey) -> bool:
        return _OF_ADAM(self._rate_of(key)) is not None

    def _rate_of(self, key: SeriesKey) -> str:
        """Return the name of a learning rate, or of that of an update's parameter."""
        if key.is_rate:
            return key.name
        return self.catalog.rate_of(key.root, key.module_path, key.name) if key.site in ("grad", UPDATE) else ""

    def add(self, rows: Rows) -> Iterator[Finding]:
        """Look at the updates by each learning rate, until one of them has the size that it should have."""
        series, of_rows = np.unique(rows.series, return_inverse=True)
        rates = [self._rate_of(self.catalog.series[number]) for number in series.tolist()]
        for rate in dict.fromkeys(rates):
            if rate not in self._seen or self._seen[rate].most < self.thresholds["first"]:
                self._look(rate, rows.take(np.array([one == rate for one in rates], np.bool_)[of_rows]))
        return iter(())

    def _look(self, rate: str, rows: Rows) -> None:
        is_rate, is_update = rows.where("rate", attrgetter("is_rate")), rows.at(UPDATE)
        has_few_zeros = rows.at("grad") & (rows["zero_count"] < _FEW_ZEROS * rows["numel"])
        self._dense |= {self._parameter(number) for number in np.unique(rows.series[has_few_zeros]).tolist()}
        updates = np.unique(rows.series[is_update]).tolist()
        is_update &= np.isin(rows.series, [number for number in updates if self._parameter(number) in self._dense])
        if not is_update.any():
            return
        rank = self._seen[rate].rank if rate in self._seen else int(rows.ranks[is_update].min())
        own = rows.take((is_rate | is_update) & (rows.ranks == rank))
        is_rate, (ids, firsts) = own.where("rate", attrgetter("is_rate")), grouped(own.steps)
        sizes = np.zeros((2, len(firsts)))
        np.maximum.at(sizes[0], ids, np.where(is_rate, own["mean"], 0))
        np.maximum.at(sizes[1], ids, np.where(is_rate, 0, np.nan_to_num(own.rms)))
        (both,) = np.nonzero((sizes > 0).all(axis=0))
        if len(both):
            since, lane = int(own.steps[firsts[both[0]]]), int(own.lanes[~is_rate][0])
            seen = self._seen.setdefault(rate, _Parts(rank, lane, since))
            seen.num, seen.most = seen.num + len(both), max(seen.most, float((sizes[1, both] / sizes[0, both]).max()))

    def _parameter(self, series: int) -> tuple[str, str, str]:
        key = self.catalog.series[series]
        return key.root, key.module_path, key.name

    def finish(self) -> Iterator[Finding]:
        for rate, seen in self._seen.items():
            is_fresh = seen.since <= _FRESH  # a later one may go on from a checkpoint, near the end of its training
            if is_fresh and seen.num >= self.thresholds["lasting"] and seen.most < self.thresholds["first"]:
                what = (
                    f"no update of {rate.split('.')[1]} moves a parameter by more than {number(100 * seen.most)} % of "
                )
                severity = self.severity if seen.most < self.thresholds["starved"] else Severity.NOTE
                one = self.finding(seen.lane, seen.since, f"{what}its learning rate {rate}", "", 0.0, 0.0, severity)
                yield one._replace(module_path="", site="param", name="", ranks=())


_OF_ADAM = re.compile(r"lr\.N?Adam(W)?\b").match


class Update(_Update, PartsRule):
    parts = (_Large, _Shrinking, _Uphill, _Waving, _Climbing, _Fading, _Restless, _Starved)
    sites = (*_Update.sites, "grad")
    more_columns = ("absmax", "min", "max", "mean", "zero_count")

    def revised(self, one: Finding) -> Finding:
        return self._parts[0].revised(one)
