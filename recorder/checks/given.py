"""What a model is given over the steps, where a change of it explains a leap of the loss or of the gradients."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from ..sites import is_labels
from ..system.text import number
from .rows import Flags, Floats, Integers, Rows, SeriesKey, concatenate, grouped
from .rule import Finding, Severity

IGNORED = -100
"""The label that a cross-entropy of PyTorch ignores unless it is told of another one."""
_MAX_TARGETS = 256
_FEWEST_TARGETS = 3
_CERTAIN = 5
"""The number of standard deviations by which the mean of the targets must have changed."""
_NUM_TARGETS = 64
_GREW = 1.5
"""Targets have grown if the last ones are this many times as large as the first ones."""
_LEAST_BATCHES = 8
"""The number of batches whose range counts as known, and the number of other ones after which data have changed."""
GUESSED = 0.02
"""How far a loss of probabilities may be from that of a model that gives each sample the same ones."""
_NEAR_STEPS = 2
"""A leap comes at most this many steps after other data, to which a mean of labels or of losses may answer later."""


class Targets:
    """The sizes of the targets of a loss. They change where a network makes the targets, as in a DQN."""

    def __init__(self) -> None:
        self._first: list[Rows] = []
        """The first rows of the process, of all ranks: `_MAX_TARGETS`. Later trainings of the process have none."""
        self._last: list[Rows] = []
        """The last rows: at least `_MAX_TARGETS`, and those that are being judged."""

    def add(self, rows: Rows) -> None:
        rows = rows.take(rows.where("targets", lambda key: is_of_batch(key) and holds_labels(key)))
        if not len(rows):
            return
        if (room := _MAX_TARGETS - sum(map(len, self._first))) > 0:
            self._first.append(rows.take(slice(room)))
        self._last.append(rows)
        while len(self._last) > 1 and sum(map(len, self._last[1:])) >= _MAX_TARGETS:
            del self._last[0]

    def change(self, one: Finding, window: int) -> str:
        """Say how the targets changed in the `window` steps before a finding. Return "" if only their noise did."""
        steps, sizes = self._sizes(self._last, one)
        now = sizes[steps > one.step - window // 2]  # a median rises once half of its window is above
        return self._told(sizes[steps <= one.step - window], now)

    def as_note(self, one: Finding) -> Finding:
        """Make a leap a note if targets that are no classes have grown since the first steps, and may explain it.

        A gradient grows as its targets do, and a squared loss as their square. The step of the leap does not count.
        """
        first, last = (self._sizes(some, one, is_numeric=True) for some in (self._first, self._last))
        before = first[1][first[0] < one.step][:_NUM_TARGETS]
        now = last[1][last[0] < one.step][-_NUM_TARGETS:]
        growth = now.mean() / before.mean() if len(before) and before.mean() > 0 else 0.0
        is_explained = growth > _GREW and one.value <= one.threshold * growth**2
        if not is_explained or not (told := self._told(before, now)):
            return one
        return one._replace(severity=Severity.NOTE, detail="; ".join(filter(None, [told, one.detail])))

    def num_candidates(self, root: str) -> int:
        """Return the number n of samples if the labels of a model are always 0 to n - 1, as in a contrastive loss.

        Return 0 for other labels.
        """
        rows = concatenate(self._first) if self._first else None
        if rows is None:
            return 0
        is_own = np.array([key.root == root for key in rows.catalog.series], np.bool_)
        rows = rows.take(is_own[rows.series])
        are_numbers = number_the_samples(rows) & (rows["min"] == 0)
        sizes = {int(one) for one in rows["numel"][are_numbers]}
        return sizes.pop() if are_numbers.all() and len(sizes) == 1 else 0

    def loss_of_guess(self, root: str) -> tuple[float, float, str]:
        """Return bounds of the loss of a model that has learnt nothing of its inputs, and what it gives, in words.

        The loss is the entropy of labels that are 0 or 1, and the variance of other numbers, for squared differences.
        The bounds are NaN for classes, which are whole numbers, and for labels between 0 and 1, which may be smoothed.
        """
        nothing = math.nan, math.nan, ""
        if not self._first:
            return nothing
        # The last rows are of whole batches of rows: the same ones must count however rows are cut.
        rows = concatenate([*self._first, concatenate(self._last).take(slice(-_MAX_TARGETS, None))])
        shapes = [about.shape for about in rows.catalog.about]
        are_single = np.array([shape[:1] == (math.prod(shape),) != (0,) for shape in shapes], np.bool_)
        is_known = np.isfinite(rows["sum"]) & (rows["numel"] > 0) & (rows["nan_count"] + rows["inf_count"] == 0)
        is_own = np.array([key.root == root for key in rows.catalog.series], np.bool_)
        is_single = are_single[rows.series]
        rows, is_single = rows.take(chosen := is_own[rows.series] & rows.are_float() & is_known), is_single[chosen]
        if not len(rows):
            return nothing
        num, total, squares = (float(rows[name].sum()) for name in ("numel", "sum", "sum_sq"))
        mean = total / num
        if is_single.all() and np.allclose(rows["sum"], rows["sum_sq"], rtol=1e-9, atol=0) and 0 < mean < 1:
            entropy = -mean * math.log(mean) - (1 - mean) * math.log(1 - mean)
            error = min(GUESSED, 0.05 * entropy)
            return entropy - error, entropy + error, "each sample the same probability"
        if rows["min"].min() >= 0 and rows["max"].max() <= 1:
            return nothing
        variance = squares / num - mean * mean
        words = "each sample the mean of the labels" if is_single.all() else "the mean of the labels everywhere"
        return 0.95 * variance, 1.1 * variance, words  # what it gives still moves

    @staticmethod
    def _sizes(some: list[Rows], one: Finding, *, is_numeric: bool = False) -> tuple[Integers, Floats]:
        if not some:
            return np.zeros(0, np.int64), np.zeros(0)
        rows = concatenate(some)
        rows = rows.take(np.isin(rows.ranks, one.ranks) & (rows.steps <= one.step) & ~np.isnan(rows.rms))
        if is_numeric:
            begin = max((step for step in rows.catalog.trainings if step <= one.step), default=0)
            rows = rows.take(rows.are_float() & (rows.steps >= begin))
        order = np.argsort(rows.steps, kind="stable")
        return rows.steps[order], rows.rms[order]

    @staticmethod
    def _told(before: Floats, now: Floats) -> str:
        if min(len(before), len(now)) < _FEWEST_TARGETS:
            return ""
        noise = math.sqrt(before.var() / len(before) + now.var() / len(now))
        is_changed = abs(now.mean() - before.mean()) > _CERTAIN * noise
        return (
            f"the targets of the loss went from {number(before.mean())} to {number(now.mean())} on average"
            if is_changed
            else ""
        )


class Course:
    """The range of a number over the steps, and the steps at which the number left its range and did not return."""

    def __init__(self) -> None:
        self._low, self._high, self._num = math.inf, -math.inf, 0
        self._left: list[tuple[int, float]] = []
        """The last steps and numbers out of the range, one after the other."""

    def changes(self, steps: Integers, values: Floats) -> Iterator[tuple[int, float, float]]:
        """Take the next numbers. Yield the step of each change, and the numbers in the middle before it and since."""
        margin = (self._high - self._low) / 2
        low, high = float(values.min()), float(values.max())
        if not self._left and self._num >= _LEAST_BATCHES and self._low - margin <= low <= high <= self._high + margin:
            self._low, self._high, self._num = min(low, self._low), max(high, self._high), self._num + len(values)
            return
        for step, value in zip(steps.tolist(), values.tolist(), strict=True):
            margin = (self._high - self._low) / 2
            if self._num < _LEAST_BATCHES or self._low - margin <= value <= self._high + margin:
                self._low, self._high, self._num = min(value, self._low), max(value, self._high), self._num + 1
                self._left.clear()
                continue
            if self._left and (value > self._high) != (self._left[0][1] > self._high):
                self._left.clear()
            self._left.append((step, value))
            if len(self._left) >= _LEAST_BATCHES:
                before, since = (self._low + self._high) / 2, [one for _, one in self._left]
                self._low, self._high, self._num = min(since), max(since), len(since)
                yield self._left[0][0], before, (self._low + self._high) / 2
                self._left.clear()


class OtherData:
    """The steps from which on a model gets other data on purpose: longer samples, or labels of other classes."""

    def __init__(self) -> None:
        self._courses: dict[tuple[int, str], Course] = {}
        """By input on the lowest rank, the course of its number of elements, and that of the size of its labels."""
        self._ranks: dict[str, int] = {}
        """By model, the lowest rank on which it has inputs."""
        self._changes: list[tuple[str, int, str]] = []
        """Of each change, the model, the step and the words."""

    def add(self, rows: Rows) -> None:
        rows = rows.take(rows.where("batch", is_of_batch))
        rows = rows.take(
            np.isin(rows.lanes, [lane for lane in np.unique(rows.lanes).tolist() if self._is_first(rows, lane)])
        )
        if not len(rows):
            return
        lanes, steps, numels = _sums(rows, rows["numel"])
        _, _, squares = _sums(rows, rows["sum_sq"])
        for lane in np.unique(lanes).tolist():
            key, about, at = rows.catalog.key_of(lane), rows.catalog.about_of(lane), lanes == lane
            what = "the labels" if holds_labels(key) else "the inputs"
            self._follow(key.root, (lane, f"{what} of a step have {{1}} elements, not {{0}}"), steps[at], numels[at])
            if what == "the labels" and "int" in about.dtype and not self._are_tokens(rows, lane):
                of_classes = f"{what} are of other classes: the root mean square of their numbers is {{1}}, not {{0}}"
                with np.errstate(all="ignore"):
                    self._follow(key.root, (lane, of_classes), steps[at], np.sqrt(squares[at] / numels[at]))

    def _is_first(self, rows: Rows, lane: int) -> bool:
        rank = int(rows.catalog.rank_of[lane])
        return self._ranks.setdefault(rows.catalog.key_of(lane).root, rank) == rank

    def as_note(self, one: Finding) -> Finding:
        """Make a leap a note if other data came just before it and stayed, as in a curriculum or with a new task."""
        near = range(one.first_step - _NEAR_STEPS, one.first_step + 1)
        told = next((words for root, step, words in self._changes if root == one.root and step in near), "")
        return one._replace(severity=Severity.NOTE, detail="; ".join(filter(None, [told, one.detail]))) if told else one

    def _follow(self, root: str, course: tuple[int, str], steps: Integers, values: Floats) -> None:
        is_known = np.isfinite(values)
        if is_known.any():
            for step, before, since in self._courses.setdefault(course, Course()).changes(
                steps[is_known], values[is_known]
            ):
                told = course[1].format(number(before), number(since))
                self._changes.append((root, step, f"from step {step} on {told}"))

    @staticmethod
    def _are_tokens(rows: Rows, lane: int) -> bool:
        """Return whether labels are as many as an input of whole numbers has. Then they are no classes of samples."""
        series = zip(rows.catalog.series, rows.catalog.about, strict=True)
        root, num = rows.catalog.key_of(lane).root, math.prod(rows.catalog.about_of(lane).shape)
        return any(
            is_of_batch(key) and key.root == root and not holds_labels(key)
            and "int" in about.dtype and math.prod(about.shape) == num
            for key, about in series
        )  # fmt: skip


def number_the_samples(rows: Rows) -> Flags:
    """Return which rows are of labels that are n whole numbers, one after the other, as those of contrastive losses."""
    low, numel = rows["min"], rows["numel"]
    is_range = ~rows.are_float() & (rows["max"] - low + 1 == numel)
    return np.asarray(is_range & (rows["sum"] == numel * (low + (numel - 1) / 2)))


def are_first_arguments(rows: Rows) -> Flags:
    """Return which rows are of a model's first argument that is no label. Masks or states after it may be zero."""
    names = rows.catalog.first_arguments

    def is_first(key: SeriesKey) -> bool:
        is_given = is_of_batch(key) and not holds_labels(key)
        return is_given and names.setdefault(key.root, key.name) == key.name

    return rows.where("first argument", is_first)


def holds_labels(key: SeriesKey) -> bool:
    """Return whether a series has labels, by its name."""
    return is_labels(key.name) is not None


def is_of_batch(key: SeriesKey) -> bool:
    """Return whether a series is an argument of a complete model in training, or the labels of its loss."""
    return key.site == "input" and not key.module_path and key.mode == "train"


def _sums(rows: Rows, values: Floats) -> tuple[Integers, Integers, Floats]:
    """Return, for each lane and step, in their order, the sum of values over the calls of a step."""
    ids, firsts = grouped(rows.lanes, rows.steps)
    return rows.lanes[firsts], rows.steps[firsts], np.bincount(ids, np.nan_to_num(values)).astype(np.float64)
