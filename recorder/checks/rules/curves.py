"""The base of rules on curves: the loss, and the norm of all gradients, over the steps."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from typing import ClassVar, NamedTuple

import numpy as np

from ..rows import Flags, Floats, Integers, Memory, Rows, SeriesKey, grouped, previous
from ..rule import CheckRule, Finding, Severity

LOSS, NORM = "loss", "norm of all gradients"
_LEAST_NEW = 0.5
"""The least part of the sum of squares that new gradients have where a norm begins anew. Less raises it 1.4 times."""
_LEAST_GROWN = 0.01
"""The least part of the sum of squares that new gradients have where they come with a new term of the loss."""
_FEW_CURVES = 8
_STEPS_AT_ONCE = 64
"""How many steps are judged at once. Where one of them may show something, each of them is judged by itself."""


class CurveKey(NamedTuple):
    """The names that identify a curve."""

    kind: str
    """The kind of curve: `LOSS` or `NORM`."""
    rank: int
    root: str
    """The name of the model that has the loss. Empty for gradients, whose norm is that of all models."""
    name: str
    """The name and mode of a loss, or the scope of gradients."""
    training: int
    """The number of the training. Each training of a process has curves of its own."""


class JudgedSample(NamedTuple):
    """A sample of a curve that a rule reports."""

    number: int
    """The index of the sample among all samples of its step."""
    what: str
    measure: str
    value: float
    threshold: float
    severity: Severity | None = None
    """The severity of the finding; None for the rule's own severity."""
    since: int | None = None
    """The step at which the condition began, if the rule waited for further samples."""


_RIVALS = "other models have losses, too, and models that are trained against each other move each other's losses"
_UNEVEN = "the number of calls of the model before a backward varies, and a sum over them varies with it"


class CurveRule(CheckRule):
    """The base of rules that judge the loss and the norm of all gradients, step by step."""

    sites: ClassVar[tuple[str, ...]] = ("scalar", "grad")
    columns: ClassVar[tuple[str, ...]] = ("mean", "sum_sq")
    reads_probe: ClassVar[bool] = True
    needs_more_than: ClassVar[str] = ""
    """The setting that a curve's number of samples must exceed before the rule judges the curve; empty without one."""

    def set_up(self) -> None:
        self.keys: list[CurveKey] = []
        self.lanes: list[int] = []
        """By curve, the lane (the index of a series on one rank) that findings on the curve name."""
        self._number_of: dict[CurveKey, int] = {}
        self._number = Memory()
        self._before = Memory()
        """By gradient and rank, the gradient's sum of squares at its last record."""
        self.is_loss = Memory(0.0)
        """By curve, 1 for a loss and 0 for a norm."""
        self.num_values = Memory(0.0)
        """By curve, the largest number of values in a step; a sample of a loss is the mean of a step's values."""
        self._num_before = Memory()
        """By curve, the number of values in its last step."""
        self.grown_at: set[tuple[int, int]] = set()
        """The ranks and the steps, but for the first one, at which gradients came that were never there before."""
        self.num = Memory(0.0)
        """By curve, the number of samples before the step that is being judged."""
        self._first, self._last = Memory(), Memory()
        """By curve, the steps of its first and of its last sample so far."""
        self._newest: dict[int, int] = {}
        """By curve that was replaced, the curve that has replaced it last."""
        self.replaced: set[int] = set()
        self.most = 0
        self.reported = -1
        """The curve of the last finding."""
        self.step = -1
        self.training = 0

    def wants(self, key: SeriesKey) -> bool:
        return key.site in self.sites and (key.is_loss or key.site == "grad")

    def add(self, rows: Rows) -> Iterator[Finding]:
        """Compute the samples of each step, and judge them.

        A loss that is NaN is no sample, nor is the loss of a step that has fewer losses than the step before: the last
        step of an epoch may have fewer micro-batches, and some programs divide each loss by their number.
        """
        rows = rows.take(~(rows.at("scalar") & np.isnan(rows["mean"])))
        trainings = np.searchsorted(self.catalog.trainings, rows.steps, "right")
        for training in np.unique(trainings).tolist():
            if training != self.training:
                self.training, self._number = training, Memory()
            yield from self._add(rows.take(trainings == training))

    def _add(self, rows: Rows) -> Iterator[Finding]:
        curves, steps, values, shares = self._samples(rows)
        if not len(steps):
            return
        order = np.argsort(steps, kind="stable")
        curves, steps, values = curves[order], steps[order], values[order]
        its_curves, firsts = np.unique(curves, return_index=True)
        new = np.isnan(self._first[its_curves])
        self._first[its_curves[new]] = steps[firsts[new]].astype(np.float64)
        self._last[curves] = steps.astype(np.float64)
        begins = np.flatnonzero(np.diff(steps, prepend=steps[0] - 1))
        for at in np.split(np.arange(len(steps)), begins[_STEPS_AT_ONCE::_STEPS_AT_ONCE]):
            yield from self._judge_steps(rows, curves[at], steps[at], values[at], shares)

    def _judge_steps(
        self, rows: Rows, curves: Integers, steps: Integers, values: Floats, shares: Floats
    ) -> Iterator[Finding]:
        its_curves, nums = np.unique(curves, return_counts=True)
        if len(its_curves) <= _FEW_CURVES and self.has_passed(its_curves.tolist(), curves, steps, values):
            self.num[its_curves] = self.num[its_curves] + nums
            self.most = max(self.most, int(self.num[its_curves].max()))
            self.step = int(steps[-1])
            return
        for at in np.split(np.arange(len(steps)), np.flatnonzero(np.diff(steps)) + 1):
            self.step = int(steps[at[0]])
            for one in self.judge(curves[at], values[at]):
                self.reported = int(curves[at[one.number]])
                lane = self._blamed(rows, self.reported, self.step, shares)
                found = self.finding(
                    lane, self.step, one.what, one.measure, one.value, one.threshold, one.severity, one.since
                )
                yield self.among_rivals(self.reported, found)
            num = self.num[curves[at]] + 1
            self.num[curves[at]] = num
            self.most = max(self.most, int(num.max()))

    def has_passed(self, its_curves: list[int], curves: Integers, steps: Integers, values: Floats) -> bool:
        """Judge samples of several steps at once, of few curves, in the order of the steps.

        Return True if none can be reported, and the rule has taken the samples. Otherwise the rule is unchanged, and
        `judge` is called for each step. For few curves this takes a tenth of the time of `judge`.
        """
        return False

    @abstractmethod
    def judge(self, curves: Integers, values: Floats) -> Iterator[JudgedSample]:
        """Judge the samples of one step, at most one sample of each curve."""

    def _samples(self, rows: Rows) -> tuple[Integers, Integers, Floats, Floats]:
        """Return each sample's curve, step and value. Also return by row the growth of a gradient's sum of squares."""
        new = np.flatnonzero(np.isnan(self._number[rows.lanes]))
        new = new[np.argsort(rows.steps[new], kind="stable")]
        firsts = new[np.unique(rows.lanes[new], return_index=True)[1]]
        curve_of = self._curves_of(rows.lanes)
        ids, starts = grouped(curve_of, rows.steps)
        squares, means = np.nan_to_num(rows["sum_sq"]), np.nan_to_num(rows["mean"])
        counts = np.bincount(ids)
        losses, norms = np.bincount(ids, means) / counts, np.sqrt(np.bincount(ids, squares))
        news = np.bincount(ids[firsts], squares[firsts], len(starts))
        self._note_growth(curve_of[starts], rows.steps[starts], news > _LEAST_GROWN * np.bincount(ids, squares))
        has_new = (news > 0) & (news >= _LEAST_NEW * np.bincount(ids, squares))
        all_curves = self._of_more_values(curve_of[starts], rows.steps[starts], has_new, counts)
        by_count = np.argsort(counts, kind="stable")  # the last of several steps of a curve has the most values
        curves = all_curves[by_count]
        self.num_values[curves] = np.maximum(self.num_values[curves], counts[by_count])
        values = np.where(rows.at("scalar")[starts], losses, norms)
        order = np.argsort(rows.lanes, kind="stable")
        shares = np.zeros(len(rows))
        shares[order] = squares[order] - np.nan_to_num(previous(rows.lanes[order], squares[order], self._before))
        least = previous(all_curves, counts.astype(np.float64), self._num_before)
        if self.catalog.is_at_end:  # if there are several losses, as in a GAN, the last step may lack some
            least = self.num_values[all_curves]
        is_sample = ~(counts < least) | ~rows.at("scalar")[starts]
        starts, values = starts[is_sample], values[is_sample]
        return all_curves[is_sample], rows.steps[starts], values, shares

    def _note_growth(self, curves: Integers, steps: Integers, has_new: Flags) -> None:
        for one in np.flatnonzero(has_new).tolist():
            if self.num_values.of(curves[one]) > 0 or (steps[curves == curves[one]] < steps[one]).any():
                self.grown_at.add((self.keys[curves[one]].rank, int(steps[one])))

    def _of_more_values(self, curves: Integers, steps: Integers, has_new: Flags, counts: Integers) -> Integers:
        """Return the curves of samples. A norm of more gradients, or a mean of more losses, begins another curve.

        That is so from the step on at which a program unfreezes a part of the model, or adds a loss with a backward of
        its own. `has_new` says of which norms a good part are gradients that were never there before. `counts` are the
        numbers of values.
        """
        has_more = np.where(self.is_loss[curves] == 1, counts > self.num_values[curves], has_new)
        if not has_more.any() and not self._newest:
            return curves
        found = curves.copy()
        for first in np.unique(curves).tolist():
            curve, is_loss = self._newest.get(first, first), self.is_loss.of(first) == 1
            most = self.num_values.of(curve)
            at = np.flatnonzero(curves == first)
            found[at] = curve
            for one in () if not has_more[at].any() else at[np.argsort(steps[at], kind="stable")].tolist():
                num = int(counts[one])
                if (num > most if is_loss else has_new[one]) and most > 0:
                    self.replaced.add(curve)
                    self._newest[first] = curve = self._new_curve(self.keys[first], self.lanes[first])
                found[one], most = curve, max(most, num)
        return found

    def _new_curve(self, key: CurveKey, lane: int) -> int:
        self.is_loss[np.array([len(self.keys)])] = float(key.kind == LOSS)
        self.keys.append(key)
        self.lanes.append(lane)
        return len(self.keys) - 1

    def _curves_of(self, lanes: Integers) -> Integers:
        numbers = self._number[lanes]
        for lane in np.unique(lanes[np.isnan(numbers)]).tolist():
            key, rank = self.catalog.key_of(lane), int(self.catalog.rank_of[lane])
            is_loss = key.site == "scalar"
            names = (LOSS, rank, key.root, f"{key.name} {key.mode}") if is_loss else (NORM, rank, "", key.scope)
            curve = CurveKey(*names, self.training)
            if curve not in self._number_of:
                self._number_of[curve] = self._new_curve(curve, lane)
            self._number[np.array([lane])] = float(self._number_of[curve])
        return self._number[lanes].astype(np.int64)

    def _blamed(self, rows: Rows, curve: int, step: int, shares: Floats) -> int:
        kind, rank, _, scope, _ = self.keys[curve]
        if kind == LOSS:
            return self.lanes[curve]
        is_part = rows.where(f"grad of scope {scope}", lambda key: key.site == "grad" and key.scope == scope)
        there = np.flatnonzero(is_part & (rows.steps == step) & (rows.ranks == rank))
        return int(rows.lanes[there[np.argmax(shares[there])]]) if len(there) else self.lanes[curve]

    def revised(self, one: Finding) -> Finding:
        """Make a finding a note if the number of the model's calls in a step varies: losses may be sums over them."""
        modules = self.catalog.modules.items()
        if not any(facts.has_uneven_calls for (root, _), facts in modules if one.root in ("", root)):
            return one
        return one._replace(severity=Severity.NOTE, detail=one.detail or _UNEVEN)

    def among_rivals(self, curve: int, one: Finding) -> Finding:
        """Make a finding on a loss a note if another model has losses at the same time, as in a GAN."""
        key, since, until = self.keys[curve], self._first.of(curve), self._last.of(curve)
        has_rivals = any(
            (other.kind, other.rank, other.training) == (LOSS, key.rank, key.training) and other.root != key.root
            and self._first.of(number) <= until and since <= self._last.of(number)
            for number, other in enumerate(self.keys)
        )  # fmt: skip
        if key.kind != LOSS or not has_rivals:
            return one
        return one._replace(severity=Severity.NOTE, detail="; ".join(filter(None, [one.detail, _RIVALS])))

    def words(self, curve: int) -> str:
        """Return the name of the curve in a finding."""
        if self.keys[curve].kind != LOSS:
            return "the norm of all gradients, most of it here,"
        number = self.num_values.of(curve)
        return f"the loss (the mean of {number:.0f} in a step)" if number > 1 else "the loss"

    def finish(self) -> Iterable[Finding]:
        if self.most <= (least := self.thresholds.get(self.needs_more_than, -1)):
            self.why_not_judged = f"it needs {least:.0f} earlier records, and there are {self.most}"
        return ()


class Rings:
    """The last values of each curve, in ring buffers."""

    def __init__(self, size: int) -> None:
        self._size = size
        self.values: Floats = np.full((0, size), np.nan)
        """An array of shape (curves, size), unordered within a curve; NaN until a curve has had `size` values."""

    def grow(self, curves: Integers) -> None:
        missing = int(curves.max()) + 1 - len(self.values)
        if missing > 0:
            self.values = np.append(self.values, np.full((max(missing, 64), self._size), np.nan), axis=0)

    def put(self, curves: Integers, num: Integers, values: Floats) -> Floats:
        """Store one new value of each curve. Return the values that it overwrites. `num` counts each curve's values."""
        slots = num % self._size
        replaced = self.values[curves, slots]
        self.values[curves, slots] = values
        return replaced
