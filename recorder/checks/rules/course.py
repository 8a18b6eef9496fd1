"""Rules on the course of a number over the steps: the loss, and the norm of all gradients of a rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

import numpy as np

from ..rows import Catalog, Flags, Floats, Integers, Memory, Rows, SeriesKey, grouped, previous
from ..rule import Finding, Rule, Setting, Severity

_LOSS, _NORM = "loss", "norm of all gradients"
_GROWTH = 64


class _Courses:
    """What each course is of, by its number."""

    def __init__(self) -> None:
        self.numbers: dict[tuple[str, int, str], int] = {}
        self.keys: list[tuple[str, int, str]] = []
        """Kind, rank, and name or scope."""
        self.lanes: list[int] = []
        """A lane by which it is named."""

    def number(self, key: tuple[str, int, str], lane: int) -> int:
        """The number of a course, a new one where it is new."""
        if key not in self.numbers:
            self.numbers[key] = len(self.lanes)
            self.keys.append(key)
            self.lanes.append(lane)
        return self.numbers[key]


class CourseRule(Rule):
    """The base of rules that look at the loss and at the norm of all gradients, step by step."""

    sites: ClassVar[tuple[str, ...]] = ("scalar", "grad")
    columns: ClassVar[tuple[str, ...]] = ("mean", "sum_sq")
    reads_norm: ClassVar[bool] = True

    def __init__(self, catalog: Catalog, thresholds: Mapping[str, float] | None = None) -> None:
        super().__init__(catalog, thresholds)
        self._courses = _Courses()
        self._number = Memory()
        """By lane, the number of its course."""
        self._before = Memory()
        """By lane of a gradient, its sum of squares at its last record."""
        self.most = 0
        """Samples of the longest course."""

    def wants(self, key: SeriesKey) -> bool:
        """A loss, or a gradient of a parameter."""
        return key.is_loss or (self.reads_norm and key.site == "grad")

    def add(self, rows: Rows) -> Iterator[Finding]:
        """Make the samples of each step, and judge them."""
        courses, steps, values, shares = self._samples(rows)
        order = np.argsort(steps, kind="stable")
        courses, steps, values = courses[order], steps[order], values[order]
        for at in np.split(np.arange(len(steps)), np.flatnonzero(np.diff(steps)) + 1):
            if len(at):
                for place, what, measure, number, threshold in self.judge(courses[at], values[at]):
                    course = int(courses[at[place]])
                    lane = self._blamed(rows, course, int(steps[at[place]]), shares)
                    yield self.finding(lane, int(steps[at[place]]), what, measure, number, threshold)

    def judge(self, courses: Integers, values: Floats) -> Iterator[tuple[int, str, str, float, float]]:
        """Judge the samples of a step: place of the sample, words, measure, number, threshold."""
        raise NotImplementedError

    def kind(self, course: int) -> str:
        """What a course is of."""
        return self._courses.keys[course][0]

    def _samples(self, rows: Rows) -> tuple[Integers, Integers, Floats, Floats]:
        """Number of the course, step and value of each sample; and by row, how much a gradient's square has grown."""
        is_loss = self.catalog.mark("loss", lambda key: key.is_loss)[rows.series]
        course_of = self._course_of(rows.lanes)
        ids, starts = grouped(course_of, rows.steps)
        squares, means = np.nan_to_num(rows["sum_sq"]), np.nan_to_num(rows["mean"])
        num = np.bincount(ids)
        values = np.where(is_loss[starts], np.bincount(ids, means) / num, np.sqrt(np.bincount(ids, squares)))
        order = np.argsort(rows.lanes, kind="stable")
        shares = np.zeros(len(rows))
        shares[order] = squares[order] - np.nan_to_num(previous(rows.lanes[order], squares[order], self._before))
        return course_of[starts], rows.steps[starts], values, shares

    def _course_of(self, lanes: Integers) -> Integers:
        """The course that each row belongs to."""
        found = self._number[lanes]
        for lane in np.unique(lanes[np.isnan(found)]).tolist():
            key, rank = self.catalog.series[int(self.catalog.series_of[lane])], int(self.catalog.rank_of[lane])
            what = (_LOSS, rank, f"{key.name} {key.mode}") if key.is_loss else (_NORM, rank, key.scope)
            self._number[np.array([lane])] = np.array([self._courses.number(what, lane)], np.float64)
        return self._number[lanes].astype(np.int64)

    def _blamed(self, rows: Rows, course: int, step: int, shares: Floats) -> int:
        """The lane that a finding names: of a norm the gradient that grew most."""
        if self.kind(course) == _LOSS:
            return self._courses.lanes[course]
        _, rank, scope = self._courses.keys[course]
        keys = self.catalog.series
        is_of_it = np.array([key.site == "grad" and key.scope == scope for key in keys], np.bool_)[rows.series]
        there = np.flatnonzero(is_of_it & (rows.steps == step) & (rows.ranks == rank))
        return int(rows.lanes[there[np.argmax(shares[there])]]) if len(there) else self._courses.lanes[course]

    def words(self, course: int) -> str:
        """What a finding calls the course."""
        return "the loss" if self.kind(course) == _LOSS else "the norm of all gradients, most of it here,"


class Spike(CourseRule):
    """A loss or a norm of gradients far outside what the last records were."""

    name: ClassVar[str] = "spike"
    sentence: ClassVar[str] = "The loss or the norm of all gradients leaps out of what it was over the last records."
    settings: ClassVar[tuple[Setting, ...]] = (
        Setting(name="sigmas", default=6, unit="standard deviations", source="OLMo-core's stability monitor"),
        Setting(name="window", default=128, unit="records", source="OLMo-core's stability monitor"),
        Setting(name="least", default=32, unit="records", source="calibrated on sound trainings"),
        Setting(name="ratio", default=2, unit="times the mean", source="calibrated on sound trainings"),
    )
    advice: ClassVar[str] = "look at the batch and at the learning rate of this step, and at what moved first"

    def __init__(self, catalog: Catalog, thresholds: Mapping[str, float] | None = None) -> None:
        super().__init__(catalog, thresholds)
        self._window = max(int(self.thresholds["window"]), 2)
        self._last: Floats = np.full((0, self._window), np.nan)
        self._num: Integers = np.zeros(0, np.int64)
        self._total: Floats = np.zeros(0)
        """By course, the sum of what is in its ring."""

    def judge(self, courses: Integers, values: Floats) -> Iterator[tuple[int, str, str, float, float]]:
        """Judge each sample by the ring of those before it."""
        missing = int(courses.max()) + 1 - len(self._num)
        if missing > 0:
            self._num = np.append(self._num, np.zeros(missing + _GROWTH, np.int64))
            self._total = np.append(self._total, np.zeros(missing + _GROWTH))
            self._last = np.append(self._last, np.full((missing + _GROWTH, self._window), np.nan), axis=0)
        num = self._num[courses]
        mean = self._total[courses] / np.clip(num, 1, self._window)
        least = np.abs(mean) * self.thresholds["ratio"]
        # The spread is worked out only where the ratio alone does not say that all is well: it takes the most time.
        for place in np.flatnonzero((num >= self.thresholds["least"]) & (values > least)).tolist():
            spread = float(np.nanstd(self._last[courses[place]]))
            limit = max(float(mean[place]) + self.thresholds["sigmas"] * spread, float(least[place]))
            if values[place] > limit:
                what = f"{self.words(int(courses[place]))} spikes over the mean of the records before"
                yield place, what, self.kind(int(courses[place])), float(values[place]), limit
        slots = num % self._window
        self._total[courses] += values - np.nan_to_num(self._last[courses, slots])
        self._last[courses, slots] = values
        self._num[courses] += 1
        self.most = max(self.most, int(self._num.max()))

    def finish(self) -> Iterator[Finding]:
        """Say where there were too few records."""
        if self.most <= self.thresholds["least"]:
            self.why_not_judged = f"it needs {self.thresholds['least']:.0f} records before, and there are {self.most}"
        yield from ()


class Jump(CourseRule):
    """A norm of gradients many times the largest of the beginning."""

    name: ClassVar[str] = "jump"
    sentence: ClassVar[str] = "The norm of all gradients is many times the largest of the first records."
    severity: ClassVar[Severity] = Severity.ERROR
    sites: ClassVar[tuple[str, ...]] = ("grad",)
    columns: ClassVar[tuple[str, ...]] = ("sum_sq",)
    settings: ClassVar[tuple[Setting, ...]] = (
        Setting(name="ratio", default=10, unit="times the largest", source="Megatron-LM's check for large gradients"),
        Setting(name="first", default=100, unit="records", source="Megatron-LM's check for large gradients"),
    )
    advice: ClassVar[str] = "a rank alone: suspect its hardware or its data; all ranks: the step before was too large"

    def __init__(self, catalog: Catalog, thresholds: Mapping[str, float] | None = None) -> None:
        super().__init__(catalog, thresholds)
        self._largest: Floats = np.zeros(0)
        self._num: Integers = np.zeros(0, np.int64)
        self._is_up: Flags = np.zeros(0, np.bool_)
        """By course, whether its last sample was so large: the first of such is said."""

    def wants(self, key: SeriesKey) -> bool:
        """A gradient of a parameter."""
        return key.site == "grad"

    def judge(self, courses: Integers, values: Floats) -> Iterator[tuple[int, str, str, float, float]]:
        """Judge each sample by the largest of the first."""
        missing = int(courses.max()) + 1 - len(self._num)
        if missing > 0:
            self._num = np.append(self._num, np.zeros(missing + _GROWTH, np.int64))
            self._largest = np.append(self._largest, np.zeros(missing + _GROWTH))
            self._is_up = np.append(self._is_up, np.zeros(missing + _GROWTH, np.bool_))
        is_early = self._num[courses] < self.thresholds["first"]
        early = courses[is_early]
        self._largest[early] = np.maximum(self._largest[early], values[is_early])
        self._num[courses] += 1
        self.most = max(self.most, int(self._num.max()))
        limit = self._largest[courses] * self.thresholds["ratio"]
        is_over = ~is_early & (values > limit) & (limit > 0)
        for place in np.flatnonzero(is_over & ~self._is_up[courses]).tolist():
            what = f"{self.words(int(courses[place]))} jumps above the largest of the first records"
            yield place, what, _NORM, float(values[place]), float(limit[place])
        self._is_up[courses] = is_over

    def finish(self) -> Iterator[Finding]:
        """Say where there were too few records."""
        if self.most <= self.thresholds["first"]:
            self.why_not_judged = f"it needs {self.thresholds['first']:.0f} records before, and there are {self.most}"
        yield from ()


class LossStuck(CourseRule):
    """A loss that stands still where it began, or that has risen far above it."""

    name: ClassVar[str] = "loss"
    sentence: ClassVar[str] = "The loss stands still where it began, or rises far above where it began."
    sites: ClassVar[tuple[str, ...]] = ("scalar",)
    columns: ClassVar[tuple[str, ...]] = ("mean",)
    reads_norm: ClassVar[bool] = False
    settings: ClassVar[tuple[Setting, ...]] = (
        Setting(name="records", default=10, unit="records", source="smdebug's LossNotDecreasing"),
        Setting(name="spread", default=1e-3, unit="of the loss", source="calibrated on sound trainings"),
        Setting(name="drop", default=0.01, unit="of the loss", source="calibrated on sound trainings"),
        Setting(name="rise", default=3, unit="times the beginning", source="calibrated on sound trainings"),
    )
    advice: ClassVar[str] = "compare the gradients and the learning rate with those of a training that learns"

    def __init__(self, catalog: Catalog, thresholds: Mapping[str, float] | None = None) -> None:
        super().__init__(catalog, thresholds)
        self._first: dict[int, list[float]] = {}
        self._last: dict[int, list[float]] = {}
        self._said: set[tuple[int, str]] = set()

    def judge(self, courses: Integers, values: Floats) -> Iterator[tuple[int, str, str, float, float]]:
        """Compare the last records of each loss with its first."""
        records = max(int(self.thresholds["records"]), 2)
        for place, (course, value) in enumerate(zip(courses.tolist(), values.tolist(), strict=True)):
            first, last = self._first.setdefault(course, []), self._last.setdefault(course, [])
            if len(first) < records:
                first.append(value)
                continue
            last.append(value)
            del last[:-records]
            self.most = max(self.most, records + len(last))
            if len(last) < records:
                continue
            began, now = sum(first) / records, sum(last) / records
            spread = (max(last) - min(last)) / abs(now) if now else 0.0
            if now > began * self.thresholds["rise"] > 0 and (course, "rise") not in self._said:
                self._said.add((course, "rise"))
                limit = began * self.thresholds["rise"]
                yield place, "the loss has risen far above where it began", "mean of the last", now, limit
            is_down = now < began - abs(began) * self.thresholds["drop"]
            if not is_down and spread < self.thresholds["spread"] and (course, "stuck") not in self._said:
                self._said.add((course, "stuck"))
                limit = self.thresholds["spread"]
                yield place, "the loss stands still where it began", "spread over the last records", spread, limit

    def finish(self) -> Iterator[Finding]:
        """Say where there were too few records."""
        needed = 2 * int(self.thresholds["records"])
        if self.most < needed:
            self.why_not_judged = f"it needs {needed} records of a loss, and there are fewer"
        yield from ()
