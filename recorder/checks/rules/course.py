"""Rules on the course of a number over the steps: the loss, and the norm of all gradients of a rank."""

from __future__ import annotations

import math
import re
from abc import abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping
from typing import ClassVar, NamedTuple

import numpy as np

from ..rows import Catalog, Flags, Floats, Integers, Memory, Rows, SeriesKey, concatenate, grouped, previous
from ..rule import Finding, Rule, Setting, Severity

_LOSS, _NORM = "loss", "norm of all gradients"
_GROWTH = 64
_FADING = 0.97
"""Of the largest of the last samples with each further one: it is half after 23."""
_VALIDATION = re.compile(r"(.*[./_])?(val|valid|validation|eval|evaluation|test|dev)[./_]loss", re.IGNORECASE)
_KEPT_STEPS = 8
_MAX_KEPT_ROWS = 400_000
_MAX_DETAILS = 20
_MAY_MOVE = ("input", "output", "grad_output", "param", "grad")
_MOVED = math.log(2)


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


class Said(NamedTuple):
    """What is said of a sample."""

    sample: int
    """Which one of its step."""
    what: str
    measure: str
    value: float
    threshold: float
    severity: Severity | None = None
    """That of the rule where there is none."""


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
        """Make the samples of each step, and judge them. A loss that is NaN is no sample."""
        is_scalar = self.catalog.mark("scalar", lambda key: key.site == "scalar")[rows.series]
        rows = rows.take(~(is_scalar & np.isnan(rows["mean"])))
        courses, steps, values, shares = self._samples(rows)
        order = np.argsort(steps, kind="stable")
        courses, steps, values = courses[order], steps[order], values[order]
        for at in np.split(np.arange(len(steps)), np.flatnonzero(np.diff(steps)) + 1):
            if len(at):
                for one in self.judge(courses[at], values[at]):
                    course, step = int(courses[at[one.sample]]), int(steps[at[one.sample]])
                    lane = self._blamed(rows, course, step, shares)
                    yield self.finding(lane, step, one.what, one.measure, one.value, one.threshold, one.severity)

    @abstractmethod
    def judge(self, courses: Integers, values: Floats) -> Iterator[Said]:
        """Judge the samples of a step."""

    def kind(self, course: int) -> str:
        """What a course is of."""
        return self._courses.keys[course][0]

    def _samples(self, rows: Rows) -> tuple[Integers, Integers, Floats, Floats]:
        """Number of the course, step and value of each sample; and by row, how much a gradient's square has grown."""
        is_loss = self.catalog.mark("scalar", lambda key: key.site == "scalar")[rows.series]
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
        courses = self._number[lanes]
        for lane in np.unique(lanes[np.isnan(courses)]).tolist():
            key, rank = self.catalog.series[int(self.catalog.series_of[lane])], int(self.catalog.rank_of[lane])
            what = (_LOSS, rank, f"{key.name} {key.mode}") if key.site == "scalar" else (_NORM, rank, key.scope)
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


class _Recent:
    """The sizes of values over the last few steps, by which one sees what moved first."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._kept: deque[Rows] = deque()
        """Rows of batches, oldest first."""

    def add(self, rows: Rows) -> None:
        """Keep the batches of the last steps, and no more rows than a bound."""
        self._kept.append(rows)
        first = int(rows.steps[-1]) - _KEPT_STEPS
        while len(self._kept) > 1 and (
            int(self._kept[0].steps[-1]) < first or sum(map(len, self._kept)) > _MAX_KEPT_ROWS
        ):
            self._kept.popleft()

    def first_moved(self, one: Finding) -> str:
        """The value that was the first to leave what it was, up to the step of a finding, in words."""
        rank = one.ranks[0] if one.ranks else -1
        parts = []
        for rows in self._kept:
            start, end = np.searchsorted(rows.steps, [one.step - _KEPT_STEPS, one.step + 1])
            near = rows.take(slice(start, end))
            parts.append(near.take((near.ranks == rank) & ~np.isnan(near.rms) & (near.rms > 0)))
        rows = concatenate(parts)
        if not len(rows):
            return ""
        lanes, columns = np.unique(rows.lanes, return_inverse=True)
        steps, lines = np.unique(rows.steps, return_inverse=True)
        sizes = np.full((len(steps), len(lanes)), np.nan)
        sizes[lines, columns] = np.log(rows.rms)
        for line in range(2, len(steps)):
            before = sizes[:line]
            middle = np.median(before, axis=0)
            usual = np.abs(before - middle).max(axis=0)
            is_moved = np.abs(sizes[line] - middle) > np.fmax(_MOVED, 3 * usual)
            indices = np.flatnonzero((lines == line) & is_moved[columns])
            if len(indices):
                key = self._catalog.series[int(rows.series[indices[0]])]
                name = f" {key.name}" if key.name else ""
                return f"'{key.module_path}' {key.site}{name} moved first, at step {int(steps[line])}"
        return ""


class Spike(CourseRule):
    """A loss or a norm of gradients far outside what the last records were.

    The loss of a small batch leaps with a single hard sample. So a small leap of one record alone is a note.
    """

    name: ClassVar[str] = "spike"
    sentence: ClassVar[str] = "The loss or the norm of all gradients leaps out of what it was over the last records."
    settings: ClassVar[tuple[Setting, ...]] = (
        Setting(name="sigmas", default=6, unit="standard deviations", source="OLMo-core's stability monitor"),
        Setting(name="window", default=128, unit="records", source="OLMo-core's stability monitor"),
        Setting(name="least", default=32, unit="records", source="calibrated on sound trainings"),
        Setting(name="ratio", default=3, unit="times the largest of them", source="calibrated on sound trainings"),
        Setting(
            name="loss_ratio",
            default=1.3,
            unit="times the largest of them",
            source="as above, for a loss; below `ratio` it is a note unless it stays up",
        ),
    )
    advice: ClassVar[str] = "look at the batch and at the learning rate of this step, and at what moved first"

    def __init__(self, catalog: Catalog, thresholds: Mapping[str, float] | None = None) -> None:
        super().__init__(catalog, thresholds)
        self._recent = _Recent(catalog)
        self._num_details = 0
        self._loss: Flags = np.zeros(0, np.bool_)
        """By course, whether it is of a loss."""
        self._window = max(int(self.thresholds["window"]), 2)
        self._last: Floats = np.full((0, self._window), np.nan)
        self._num: Integers = np.zeros(0, np.int64)
        self._total: Floats = np.zeros(0)
        """By course, the sum of what is in its ring."""
        self._mild: dict[int, tuple[int, float]] = {}
        """By course, the number of the sample that tells whether a small spike stays up, and the limit of it."""

    def wants(self, key: SeriesKey) -> bool:
        """A loss or a gradient, and what may have moved before them."""
        return super().wants(key) or key.site in _MAY_MOVE

    def add(self, rows: Rows) -> Iterator[Finding]:
        """Judge the courses, and say what moved before one that spikes."""
        self._recent.add(rows)
        is_course = self.catalog.mark("loss or grad", lambda key: key.is_loss or key.site == "grad")[rows.series]
        for one in super().add(rows.take(is_course)) if is_course.any() else ():
            self._num_details += 1
            moved = self._recent.first_moved(one) if self._num_details <= _MAX_DETAILS else ""
            yield one._replace(detail=moved)

    def judge(self, courses: Integers, values: Floats) -> Iterator[Said]:
        """Judge each sample by the ring of those before it."""
        missing = int(courses.max()) + 1 - len(self._num)
        if missing > 0:
            self._num = np.append(self._num, np.zeros(missing + _GROWTH, np.int64))
            self._total = np.append(self._total, np.zeros(missing + _GROWTH))
            self._last = np.append(self._last, np.full((missing + _GROWTH, self._window), np.nan), axis=0)
        num = self._num[courses]
        mean = self._total[courses] / np.clip(num, 1, self._window)
        ratio = np.where(self._is_loss(courses), self.thresholds["loss_ratio"], self.thresholds["ratio"])
        # What the ring holds is looked at only where its mean does not say that all is well: it takes the most time.
        for index in np.flatnonzero((num >= self.thresholds["least"]) & (values > np.abs(mean) * ratio)).tolist():
            course, value, ring = int(courses[index]), float(values[index]), self._last[courses[index]]
            largest = float(np.nanmax(np.abs(ring)))
            limit = float(mean[index]) + self.thresholds["sigmas"] * float(np.nanstd(ring))
            limit = max(limit, largest * float(ratio[index]))
            at, limit_before = self._mild.get(course, (-1, np.inf))
            what = f"{self.words(course)} spikes over the mean of the records before"
            if at == num[index] and value > limit_before:
                yield Said(index, f"{what}, and stays up", self.kind(course), value, limit_before)
            elif value > limit:
                is_mild = self.kind(course) == _LOSS and value < largest * self.thresholds["ratio"]
                if is_mild:
                    self._mild[course] = int(num[index]) + 1, limit
                yield Said(index, what, self.kind(course), value, limit, Severity.NOTE if is_mild else None)
        slots = num % self._window
        self._total[courses] += values - np.nan_to_num(self._last[courses, slots])
        self._last[courses, slots] = values
        self._num[courses] += 1
        self.most = max(self.most, int(self._num.max()))

    def _is_loss(self, courses: Integers) -> Flags:
        for course in range(len(self._loss), int(courses.max()) + 1):
            self._loss = np.append(self._loss, self.kind(course) == _LOSS)
        return self._loss[courses]

    def finish(self) -> Iterator[Finding]:
        """Say where there were too few records."""
        if self.most <= self.thresholds["least"]:
            self.why_not_judged = f"it needs {self.thresholds['least']:.0f} earlier records, and there are {self.most}"
        yield from ()


class Jump(CourseRule):
    """A norm of gradients many times the largest of the beginning, and of the last records.

    A training that leaves a plateau has gradients far larger than on it, but not from one record to the next.
    """

    name: ClassVar[str] = "jump"
    sentence: ClassVar[str] = "The norm of all gradients is many times the largest of the first records."
    severity: ClassVar[Severity] = Severity.ERROR
    sites: ClassVar[tuple[str, ...]] = ("grad",)
    columns: ClassVar[tuple[str, ...]] = ("sum_sq",)
    settings: ClassVar[tuple[Setting, ...]] = (
        Setting(name="ratio", default=10, unit="times the largest", source="Megatron-LM's check for large gradients"),
        Setting(name="first", default=100, unit="records", source="Megatron-LM's check for large gradients"),
        Setting(
            name="sudden", default=3, unit="times the last ones", source="gradients that leave a plateau grow slowly"
        ),
    )
    advice: ClassVar[str] = "a rank alone: suspect its hardware or its data; all ranks: the step before was too large"

    def __init__(self, catalog: Catalog, thresholds: Mapping[str, float] | None = None) -> None:
        super().__init__(catalog, thresholds)
        self._largest: Floats = np.zeros(0)
        self._num: Integers = np.zeros(0, np.int64)
        self._is_up: Flags = np.zeros(0, np.bool_)
        """By course, whether its last sample was so large: the first of such is said."""
        self._recent: Floats = np.zeros(0)
        """By course, the largest of the last samples; it fades with each of them."""

    def wants(self, key: SeriesKey) -> bool:
        """A gradient of a parameter."""
        return key.site == "grad"

    def judge(self, courses: Integers, values: Floats) -> Iterator[Said]:
        """Judge each sample by the largest of the first."""
        missing = int(courses.max()) + 1 - len(self._num)
        if missing > 0:
            self._num = np.append(self._num, np.zeros(missing + _GROWTH, np.int64))
            self._largest = np.append(self._largest, np.zeros(missing + _GROWTH))
            self._recent = np.append(self._recent, np.zeros(missing + _GROWTH))
            self._is_up = np.append(self._is_up, np.zeros(missing + _GROWTH, np.bool_))
        is_early = self._num[courses] < self.thresholds["first"]
        early = courses[is_early]
        self._largest[early] = np.maximum(self._largest[early], values[is_early])
        self._num[courses] += 1
        self.most = max(self.most, int(self._num.max()))
        limit = np.maximum(
            self._largest[courses] * self.thresholds["ratio"], self._recent[courses] * self.thresholds["sudden"]
        )
        self._recent[courses] = np.maximum(self._recent[courses] * _FADING, values)
        is_over = ~is_early & (values > limit) & (limit > 0)
        for index in np.flatnonzero(is_over & ~self._is_up[courses]).tolist():
            what = f"{self.words(int(courses[index]))} jumps above the largest of the first records"
            yield Said(index, what, _NORM, float(values[index]), float(limit[index]))
        self._is_up[courses] = is_over

    def finish(self) -> Iterator[Finding]:
        """Say where there were too few records."""
        if self.most <= self.thresholds["first"]:
            self.why_not_judged = f"it needs {self.thresholds['first']:.0f} earlier records, and there are {self.most}"
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
        Setting(name="spread", default=1e-3, unit="of the loss", source="smdebug's LossNotDecreasing, of a decrease"),
        Setting(name="drop", default=0.01, unit="of the loss", source="calibrated on sound trainings"),
        Setting(name="rise", default=3, unit="times the beginning", source="calibrated on sound trainings"),
    )
    advice: ClassVar[str] = "compare the gradients and the learning rate with those of a training that learns"

    def __init__(self, catalog: Catalog, thresholds: Mapping[str, float] | None = None) -> None:
        super().__init__(catalog, thresholds)
        self._window = max(int(self.thresholds["records"]), 2)
        self._rings = Rings(self._window)
        self._began: Floats = np.zeros(0)
        """By course, the mean of its first records."""
        self._is_said: Flags = np.zeros((0, 2), np.bool_)

    def judge(self, courses: Integers, values: Floats) -> Iterator[Said]:
        """Compare the last records of each loss with its first."""
        num, ring = self._rings.add(courses, values)
        missing = len(self._rings.num) - len(self._began)
        self._began = np.append(self._began, np.zeros(missing))
        self._is_said = np.append(self._is_said, np.zeros((missing, 2), np.bool_), axis=0)
        self.most = max(self.most, int(num.max()))
        is_begun = num == self._window
        now = ring.mean(axis=1)
        self._began[courses[is_begun]] = now[is_begun]
        began = self._began[courses]
        with np.errstate(all="ignore"):
            spread = np.nan_to_num((ring.max(axis=1) - ring.min(axis=1)) / np.abs(now), posinf=0.0)
        is_late = num >= 2 * self._window
        limit = began * self.thresholds["rise"]
        is_risen = is_late & (now > limit) & (limit > 0)
        is_down = now < began - np.abs(began) * self.thresholds["drop"]
        is_stuck = is_late & ~is_down & (spread < self.thresholds["spread"])
        for index in np.flatnonzero(is_risen & ~self._is_said[courses, 0]).tolist():
            self._is_said[courses[index], 0] = True
            what = "the loss has risen far above where it began"
            yield Said(index, what, "mean of the last", float(now[index]), float(limit[index]))
        for index in np.flatnonzero(is_stuck & ~self._is_said[courses, 1]).tolist():
            self._is_said[courses[index], 1] = True
            what, measure = "the loss stands still where it began", "spread over the last records"
            yield Said(index, what, measure, float(spread[index]), self.thresholds["spread"])

    def finish(self) -> Iterator[Finding]:
        """Say where there were too few records."""
        needed = 2 * self._window
        if self.most < needed:
            self.why_not_judged = f"it needs {needed} records of a loss, and there are fewer"
        yield from ()


class Overfitting(CourseRule):
    """A validation loss that rises while it is far above the loss in training.

    The loss of a small validation set goes up and down. So it has to rise farther than before.
    """

    name: ClassVar[str] = "overfitting"
    sentence: ClassVar[str] = "The validation loss rises from its best, far above the loss in training."
    sites: ClassVar[tuple[str, ...]] = ("scalar",)
    columns: ClassVar[tuple[str, ...]] = ("mean",)
    reads_norm: ClassVar[bool] = False
    settings: ClassVar[tuple[Setting, ...]] = (
        Setting(name="gap", default=0.5, unit="of the loss in training", source="smdebug's Overfit has 0.1"),
        Setting(name="rise", default=0.1, unit="of the best validation loss", source="calibrated on sound trainings"),
        Setting(name="records", default=3, unit="validations", source="calibrated on sound trainings"),
    )
    needs: ClassVar[str] = "needs losses: recorder.scalar('train/loss', loss), recorder.scalar('validation/loss', loss)"
    advice: ClassVar[str] = "stop at the best validation, or use more data, dropout or weight decay"

    def __init__(self, catalog: Catalog, thresholds: Mapping[str, float] | None = None) -> None:
        super().__init__(catalog, thresholds)
        self._facts: Integers = np.zeros((0, 2), np.int64)
        """By course, its rank, and 1 if it is of a validation."""
        self._total: Floats = np.zeros(_GROWTH)
        """By rank, the sum of its losses in training since its last validation."""
        self._num: Floats = np.zeros(_GROWTH)
        self._last_trained: dict[int, float] = {}
        """By rank, the mean of these."""
        self._best: dict[int, float] = {}
        """By course of a validation."""
        self._recovered: dict[int, float] = {}
        """By course, the largest rise over its best that a better one followed."""
        self._rise: dict[int, float] = {}
        """By course, the largest rise since its best."""
        self._num_above: dict[int, int] = {}
        self._found: dict[int, tuple[Finding, float]] = {}
        """By course, what was found, and the best validation by then."""
        self._course = -1
        self._has_validation = False

    def wants(self, key: SeriesKey) -> bool:
        """A loss, also one that is called ``validation_loss``."""
        return key.is_loss or is_validation(key)

    def add(self, rows: Rows) -> Iterator[Finding]:
        """Judge the validations; whether one was better later the end of the run tells."""
        for one in super().add(rows):
            if self._course not in self._found or self._best[self._course] < self._found[self._course][1]:
                self._found[self._course] = one, self._best[self._course]
        yield from ()

    def judge(self, courses: Integers, values: Floats) -> Iterator[Said]:
        """Hold each validation against its best and against the losses in training since the last one."""
        new = [self._facts_of(course) for course in range(len(self._facts), int(courses.max()) + 1)]
        if new:
            self._facts = np.concatenate([self._facts, np.array(new, np.int64)])
        ranks, is_valid = self._facts[courses, 0] + 1, self._facts[courses, 1] == 1
        missing = int(ranks.max()) + 1 - len(self._num)
        if missing > 0:
            self._num, self._total = (np.append(some, np.zeros(missing)) for some in (self._num, self._total))
        self._num += np.bincount(ranks[~is_valid], minlength=len(self._num))
        self._total += np.bincount(ranks[~is_valid], values[~is_valid], len(self._num))
        for index in np.flatnonzero(is_valid).tolist():
            self._has_validation = True
            yield from self._validated(index, int(courses[index]), int(ranks[index]), float(values[index]))
        self._num[ranks[is_valid]] = self._total[ranks[is_valid]] = 0

    def _facts_of(self, course: int) -> tuple[int, int]:
        lane = self._courses.lanes[course]
        key = self.catalog.series[int(self.catalog.series_of[lane])]
        return int(self.catalog.rank_of[lane]), int(is_validation(key))

    def _validated(self, index: int, course: int, rank: int, value: float) -> Iterator[Said]:
        if self._num[rank]:
            self._last_trained[rank] = float(self._total[rank] / self._num[rank])
        trained = self._last_trained.get(rank)
        best = self._best.get(course, value)
        if value < best:
            self._recovered[course] = max(self._rise.pop(course, 1.0), self._recovered.get(course, 1.0))
            best = value
        self._best[course] = best
        if best > 0:
            self._rise[course] = max(self._rise.get(course, 1.0), value / best)
        if trained is None or trained <= 0:
            return
        gap = (value - trained) / trained
        least = max(1 + self.thresholds["rise"], self._recovered.get(course, 1.0))
        is_above = gap > self.thresholds["gap"] and value > best * least
        self._num_above[course] = self._num_above.get(course, 0) + 1 if is_above else 0
        if self._num_above[course] == self.thresholds["records"]:
            self._course = course
            what = "the validation loss has risen from its best, and the loss in training has not"
            yield Said(index, what, "validation over training, less 1", gap, self.thresholds["gap"])

    def finish(self) -> Iterator[Finding]:
        """Say what was found, and where there is nothing to compare."""
        for course, (one, best) in self._found.items():
            if self._best[course] < best:
                one = one._replace(severity=Severity.NOTE, what=f"{one.what}; later it is better still")
            yield one
        if not self._has_validation:
            self.why_not_judged = "needs a validation loss: recorder.scalar('validation/loss', loss)"
        elif not self._last_trained:
            self.why_not_judged = "needs a loss in training: recorder.scalar('train/loss', loss)"
        yield from ()


def is_validation(key: SeriesKey) -> bool:
    """Whether a scalar is the loss of a validation."""
    return key.site == "scalar" and (
        _VALIDATION.fullmatch(key.name) is not None or (key.is_loss and key.mode in ("eval", "no_grad"))
    )


class Rings:
    """The last values of each course."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._values: Floats = np.full((0, size), np.nan)
        self.num: Integers = np.zeros(0, np.int64)
        """By course, its values so far."""

    def add(self, courses: Integers, values: Floats) -> tuple[Integers, Floats]:
        """Take in a value of each course; how many each has now, and its last ones, NaN where there are fewer."""
        missing = int(courses.max()) + 1 - len(self.num)
        if missing > 0:
            self.num = np.append(self.num, np.zeros(missing + _GROWTH, np.int64))
            self._values = np.append(self._values, np.full((missing + _GROWTH, self._size), np.nan), axis=0)
        self._values[courses, self.num[courses] % self._size] = values
        self.num[courses] += 1
        return self.num[courses], self._values[courses]
