"""Rules on parameters: initialisation, updates that are too large, and parameters that do not change."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import ClassVar

import numpy as np

from ...sites import SKIPPED
from ..normal import EXACT, Movement
from ..rows import Catalog, Flags, Floats, Integers, Memory, Rows, SeriesKey, began, begins, previous
from ..rule import Finding, Rule, Setting, Severity, StreakRule
from .gradients import is_weight, template

_NARROW = ("bfloat16", "float16", "float8")
"""Types in which a small update rounds away; that is known, and no mistake of the program's."""
_LEAST_ELEMENTS = 16
"""The statistics of a smaller weight are those of a few numbers."""
_MAX_SKIPPED = 10_000
_MAX_STEPS = 1 << 40


class Update(StreakRule):
    """An update that is as large as the weight itself."""

    name: ClassVar[str] = "update"
    sentence: ClassVar[str] = "A step of the optimizer changes a weight by a large part of its norm."
    sites: ClassVar[tuple[str, ...]] = ("param",)
    columns: ClassVar[tuple[str, ...]] = ("sum_sq", "sum", "numel")
    settings: ClassVar[tuple[Setting, ...]] = (
        Setting(
            name="ratio", default=0.5, unit="of the weight's norm, at least",
            source="usual is 1e-3; smdebug's WeightUpdateRatio allows 10",
        ),
        Setting(name="began", default=1e-2, unit="root mean square", source="what begins at zero grows by any factor"),
    )  # fmt: skip
    what: ClassVar[str] = "one step changed the weight by a large part of its norm"
    measure: ClassVar[str] = "update over weight, at least"
    limit: ClassVar[str] = "ratio"
    advice: ClassVar[str] = "the learning rate is too high for this weight, or warm-up is missing"

    def __init__(self, catalog: Catalog, thresholds: Mapping[str, float] | None = None) -> None:
        super().__init__(catalog, thresholds)
        self._movement, self._began = Movement(), Memory()

    def judge(self, rows: Rows) -> tuple[Flags, Floats]:
        """By how far norm and sum moved: the update is no smaller than that, and two records of them are enough."""
        lanes, rms = rows.lanes, np.nan_to_num(rows.rms)
        is_begun = began(lanes, rms, self._began) >= self.thresholds["began"]
        ratio = np.nan_to_num(self._movement.ratio(rows), posinf=0.0)
        is_large = (ratio > self.thresholds["ratio"]) & is_begun
        return is_large & is_weight(self.catalog, rows) & (rows["numel"] >= _LEAST_ELEMENTS), ratio


class Unchanged(StreakRule):
    """A parameter that stays as it is although it has a gradient."""

    name: ClassVar[str] = "unchanged"
    sentence: ClassVar[str] = "A parameter has a gradient, and its values stay as they are."
    sites: ClassVar[tuple[str, ...]] = ("param", "grad", "scalar")
    columns: ClassVar[tuple[str, ...]] = EXACT
    settings: ClassVar[tuple[Setting, ...]] = (
        Setting(name="records", default=3, unit="records", source="smdebug's UnchangedTensor; TrainCheck"),
        Setting(name="share", default=1e-4, unit="of the largest gradient", source="below it are roundings"),
    )
    what: ClassVar[str] = "the parameter has a gradient and does not change"
    measure: ClassVar[str] = "records without a change"
    limit: ClassVar[str] = "records"
    advice: ClassVar[str] = "look whether the optimizer steps this very parameter, and at its learning rate"

    def __init__(self, catalog: Catalog, thresholds: Mapping[str, float] | None = None) -> None:
        super().__init__(catalog, thresholds)
        self._values = {name: Memory() for name in EXACT}
        self._gradient = Memory(0.0)
        """By lane of a gradient, its largest root mean square so far."""
        self._largest = 0.0
        self._step = Memory()
        self._numbers: dict[tuple[str, str, str, int], int] = {}
        """By root, module, name and rank of a parameter."""
        self._number = Memory()
        """By lane of a parameter or a gradient, the number of the parameter."""
        self._had: tuple[Integers, Integers] = np.zeros(0, np.int64), np.zeros(0, np.int64)
        """Lanes and steps of gradients, of the rows in hand and of the last step before them."""
        self._skipped: dict[tuple[int, int], None] = {}
        """The last steps that GradScaler skipped, by rank and step."""

    def wants(self, key: SeriesKey) -> bool:
        """Parameters, their gradients, and whether GradScaler skipped a step."""
        return key.site in ("param", "grad") or (key.site, key.name) == ("scalar", SKIPPED)

    def add(self, rows: Rows) -> Iterator[Finding]:
        """Remember gradients and skipped steps, then look at the parameters that have a gradient."""
        sites = [{"param": 0, "grad": 1}.get(key.site, 2) for key in self.catalog.series]
        site = np.array(sites, np.int64)[rows.series]
        gradients, scalars = rows.take(site == 1).by_lane(), rows.take(site == 2)
        rms, firsts = np.nan_to_num(gradients.rms), np.flatnonzero(begins(gradients.lanes))
        if len(firsts):
            lanes = gradients.lanes[firsts]
            self._gradient[lanes] = np.maximum(np.maximum.reduceat(rms, firsts), self._gradient[lanes])
        self._largest = max(self._largest, float(rms.max(initial=0.0)))
        self._note_gradients(gradients.take(rms > 0))
        skipped = scalars.take(np.nan_to_num(scalars["mean"]) > 0)
        self._skipped |= dict.fromkeys(zip(skipped.ranks.tolist(), skipped.steps.tolist(), strict=True))
        for old in list(self._skipped)[:-_MAX_SKIPPED]:
            del self._skipped[old]
        if (site == 0).any():
            yield from (one for one in super().add(rows.take(site == 0)) if self._has_gradient(one))

    def judge(self, rows: Rows) -> tuple[Flags, Floats]:
        """By statistics that agree with those of the record before, where the step between had a gradient.

        Where no gradients of that step were recorded, it is taken to have had one.
        """
        flags = np.ones(len(rows), np.bool_)
        for name, memory in self._values.items():
            flags &= rows[name] == previous(rows.lanes, rows[name], memory)
        flags = rows.over_chunks((~flags).astype(np.float64)) == 0
        before = previous(rows.lanes, rows.steps.astype(np.float64), self._step)
        for index in np.flatnonzero(flags).tolist() if self._skipped else ():
            flags[index] = (int(rows.ranks[index]), int(before[index])) not in self._skipped
        at = np.flatnonzero(flags)
        if len(at):
            steps = np.nan_to_num(before[at], nan=-1).astype(np.int64)
            had = self._numbers_of(self._had[0]) * _MAX_STEPS + self._had[1]
            is_judged = np.isin(self._numbers_of(rows.lanes[at]) * _MAX_STEPS + steps, had)
            flags[at] = is_judged | ~np.isin(steps, self._had[1])
        return flags, np.full(len(rows), float(self.records))

    def _note_gradients(self, rows: Rows) -> None:
        """Remember which parameters have a gradient: an expert that no sample goes to has none, and may stay."""
        lanes, steps = self._had
        is_last = steps == steps.max(initial=-1)
        self._had = np.r_[lanes[is_last], rows.lanes], np.r_[steps[is_last], rows.steps]

    def _numbers_of(self, lanes: Integers) -> Integers:
        """By row, the number of its parameter."""
        known = self._number[lanes]
        for lane in np.unique(lanes[np.isnan(known)]).tolist():
            key = self.catalog.series[int(self.catalog.series_of[lane])]
            of = key.root, key.module_path, key.name, int(self.catalog.rank_of[lane])
            self._number[np.array([lane])] = np.array([self._numbers.setdefault(of, len(self._numbers))], np.float64)
        return self._number[lanes].astype(np.int64)

    def severity_of(self, lane: int) -> Severity:
        """A note for types in which small updates round away."""
        dtype = self.catalog.about[int(self.catalog.series_of[lane])].dtype
        return Severity.NOTE if dtype.startswith(_NARROW) else self.severity

    def _has_gradient(self, one: Finding) -> bool:
        rank = one.ranks[0] if one.ranks else -1
        for number, key in enumerate(self.catalog.series):
            if key.site == "grad" and (key.root, key.module_path, key.name) == (one.root, one.module_path, one.name):
                lane = self.catalog.find(self.catalog.series[number], rank)
                least = self._largest * self.thresholds["share"]
                if lane is not None and self._gradient[np.array([lane])][0] > least:
                    return True
        return False


class Initialisation(Rule):
    """Weights that begin alike in all elements, or on another scale than their like."""

    name: ClassVar[str] = "initialisation"
    sentence: ClassVar[str] = (
        "A weight begins with equal elements, or on another scale than the same weight of other layers."
    )
    sites: ClassVar[tuple[str, ...]] = ("param",)
    columns: ClassVar[tuple[str, ...]] = ("std", "mean", "numel")
    settings: ClassVar[tuple[Setting, ...]] = (
        Setting(name="ratio", default=8, unit="times the median", source="calibrated on sound trainings"),
        Setting(name="alike", default=3, unit="layers", source="calibrated on sound trainings"),
    )  # fmt: skip
    advice: ClassVar[str] = "look at how this layer is initialised"

    def __init__(self, catalog: Catalog, thresholds: Mapping[str, float] | None = None) -> None:
        super().__init__(catalog, thresholds)
        self._first_step: int | None = None
        self._std, self._mean = Memory(), Memory()
        self._lanes: list[int] = []

    def add(self, rows: Rows) -> Iterator[Finding]:
        """Remember the first record of each weight."""
        if self._first_step is None:
            self._first_step = int(rows.steps[0])
            first = rows.take(
                (rows.steps == self._first_step) & is_weight(self.catalog, rows) & (rows["numel"] >= _LEAST_ELEMENTS)
            )
            self._std[first.lanes], self._mean[first.lanes] = first["std"], first["mean"]
            self._lanes = np.unique(first.lanes).tolist()
        yield from ()

    def finish(self) -> Iterator[Finding]:
        """Compare each weight with its like on the same rank."""
        if self._first_step is None or self._first_step > 1:
            self.why_not_judged = f"the first parameters are of step {self._first_step}, and no longer as they began"
            return
        alike: dict[tuple[int, str, str, str], list[int]] = {}
        for lane in self._lanes:
            key = self.catalog.series[int(self.catalog.series_of[lane])]
            std, mean = self._std[np.array([lane])][0], self._mean[np.array([lane])][0]
            if std == 0 and mean != 0:
                yield self.finding(lane, self._first_step, "all elements of the weight begin equal", "std", 0.0, 0.0)
            elif std > 0:
                of = int(self.catalog.rank_of[lane]), key.root, template(key.module_path), key.name
                alike.setdefault(of, []).append(lane)
        for lanes in alike.values():
            if len(lanes) >= self.thresholds["alike"]:
                yield from self._odd(np.array(lanes))

    def _odd(self, lanes: Integers) -> Iterator[Finding]:
        """Those of another scale, a fan-in of their own allowed for."""
        scales = self._std[lanes] * np.sqrt([self._fan_in(lane) for lane in lanes.tolist()])
        ratios = scales / np.median(scales)
        limit = self.thresholds["ratio"]
        for index in np.flatnonzero((ratios > limit) | (ratios < 1 / limit)).tolist():
            what = "the weight begins on another scale than that of other layers"
            step = self._first_step or 0
            yield self.finding(int(lanes[index]), step, what, "times the median", ratios[index], limit)

    def _fan_in(self, lane: int) -> float:
        shape = self.catalog.about[int(self.catalog.series_of[lane])].shape
        return float(max(math.prod(shape[1:]), 1))
