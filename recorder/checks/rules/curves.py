"""Rules on training curves: the loss over the steps, and the norm of all gradients of a rank over the steps."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from operator import attrgetter
from typing import ClassVar, NamedTuple

import numpy as np

from ...sites import EVALUATION_LOSS, LABELS, UPDATE, is_validation_loss
from ...system.text import module_in_words, number
from ..normal import Moves
from ..rows import Floats, Integers, Memory, Rows, SeriesKey, concatenate, grouped, previous
from ..rule import CALIBRATED, CheckRule, Finding, Setting, Severity

_LOSS, _NORM = "loss", "norm of all gradients"
_RECOVERED = 10
"""Spikes are over once each curve that spiked has had this many records in a row below the spike's limit."""
_FADING = 0.97
"""The factor by which the remembered largest sample shrinks with each further sample: 23 samples halve it."""
_NUM_BLOCKS = 32
"""The most blocks of a loss, whose means hardly depend on each other. With more samples, two blocks become one."""
_KEPT_STEPS = 16
_MAX_KEPT_ROWS = 400_000
_TINY = 1e-3
"""A value below this share of the largest so far is no spike."""
_MAX_DETAILS = 20
_MAY_MOVE = ("input", "output", "grad_output", "param", "grad")
_MOVED = math.log(2)
RISEN = "the learning rate"
"""The first words of a finding's detail if a learning rate rose before the finding."""
_SAME_IN_BOTH = (
    "see whether labels, preprocessing and loss of the validation are those of training; if they are, nothing of what "
    "is learned holds for other data"
)
_GAP = "validation over training, less 1"
_MAX_SEEN = 4_096
_STAYS = ", and stays up"
_MAX_TARGETS = 256
_FEWEST_TARGETS = 3
_CERTAIN = 5
"""The number of standard deviations that a fall must have to be no noise."""
_ROSE = 3.0
"""A learning rate that rises by this factor from one record to the next is named beside a spike that follows."""


class CurveKey(NamedTuple):
    """The names that identify a curve."""

    kind: str
    """The kind of curve: `_LOSS` or `_NORM`."""
    rank: int
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
        self.num = Memory(0.0)
        """By curve, the number of samples before the step that is being judged."""
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
        order = np.argsort(steps, kind="stable")
        curves, steps, values = curves[order], steps[order], values[order]
        for at in np.split(np.arange(len(steps)), np.flatnonzero(np.diff(steps)) + 1):
            if not len(at):
                continue
            self.step = int(steps[at[0]])
            for one in self.judge(curves[at], values[at]):
                self.reported = int(curves[at[one.number]])
                lane = self._blamed(rows, self.reported, self.step, shares)
                yield self.finding(lane, self.step, one.what, one.measure, one.value, one.threshold, one.severity,
                                   one.since)  # fmt: skip
            num = self.num[curves[at]] + 1
            self.num[curves[at]] = num
            self.most = max(self.most, int(num.max()))

    @abstractmethod
    def judge(self, curves: Integers, values: Floats) -> Iterator[JudgedSample]:
        """Judge the samples of one step, at most one sample of each curve."""

    def _samples(self, rows: Rows) -> tuple[Integers, Integers, Floats, Floats]:
        """Return each sample's curve, step and value. Also return by row the growth of a gradient's sum of squares."""
        curve_of = self._curves_of(rows.lanes)
        ids, starts = grouped(curve_of, rows.steps)
        squares, means = np.nan_to_num(rows["sum_sq"]), np.nan_to_num(rows["mean"])
        counts = np.bincount(ids)
        losses, norms = np.bincount(ids, means) / counts, np.sqrt(np.bincount(ids, squares))
        by_count = np.argsort(counts, kind="stable")  # the last of several steps of a curve has the most values
        curves = curve_of[starts][by_count]
        self.num_values[curves] = np.maximum(self.num_values[curves], counts[by_count])
        values = np.where(rows.at("scalar")[starts], losses, norms)
        order = np.argsort(rows.lanes, kind="stable")
        shares = np.zeros(len(rows))
        shares[order] = squares[order] - np.nan_to_num(previous(rows.lanes[order], squares[order], self._before))
        all_curves = curve_of[starts]
        least = previous(all_curves, counts.astype(np.float64), self._num_before)
        if self.catalog.is_at_end:  # if there are several losses, as in a GAN, the last step may lack some
            least = self.num_values[all_curves]
        is_sample = ~(counts < least) | ~rows.at("scalar")[starts]
        starts, values = starts[is_sample], values[is_sample]
        return curve_of[starts], rows.steps[starts], values, shares

    def _curves_of(self, lanes: Integers) -> Integers:
        numbers = self._number[lanes]
        for lane in np.unique(lanes[np.isnan(numbers)]).tolist():
            key, rank = self.catalog.key_of(lane), int(self.catalog.rank_of[lane])
            is_loss = key.site == "scalar"
            kind, name = (_LOSS, f"{key.name} {key.mode}") if is_loss else (_NORM, key.scope)
            curve = CurveKey(kind, rank, name, self.training)
            if curve not in self._number_of:
                self._number_of[curve] = len(self.keys)
                self.is_loss[np.array([len(self.keys)])] = float(is_loss)
                self.keys.append(curve)
                self.lanes.append(lane)
            self._number[np.array([lane])] = float(self._number_of[curve])
        return self._number[lanes].astype(np.int64)

    def _blamed(self, rows: Rows, curve: int, step: int, shares: Floats) -> int:
        kind, rank, scope, _ = self.keys[curve]
        if kind == _LOSS:
            return self.lanes[curve]
        is_part = rows.where(f"grad of scope {scope}", lambda key: key.site == "grad" and key.scope == scope)
        there = np.flatnonzero(is_part & (rows.steps == step) & (rows.ranks == rank))
        return int(rows.lanes[there[np.argmax(shares[there])]]) if len(there) else self.lanes[curve]

    def words(self, curve: int) -> str:
        """Return the name of the curve in a finding."""
        if self.keys[curve].kind != _LOSS:
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


class _Recent:
    """Keeps the rows of the last few steps, to find the value that moved first and the learning rate that rose."""

    def __init__(self) -> None:
        self._kept: deque[Rows] = deque()
        """Batches of rows, the oldest first."""

    def add(self, rows: Rows) -> None:
        self._kept.append(rows)
        first = int(rows.steps[-1]) - _KEPT_STEPS
        while len(self._kept) > 1 and (
            int(self._kept[0].steps[-1]) < first or sum(map(len, self._kept)) > _MAX_KEPT_ROWS
        ):
            self._kept.popleft()

    def first_moved(self, one: Finding) -> str:
        """Name the value that first left its usual range before a finding. Return an empty string if none did."""
        rank = one.ranks[0] if one.ranks else -1
        parts = []
        for rows in self._kept:
            start, end = np.searchsorted(rows.steps, [one.step - _KEPT_STEPS, one.step + 1])
            near = rows.take(slice(start, end))
            parts.append(near.take((near.ranks == rank) & ~near.at("scalar") & ~np.isnan(near.rms) & (near.rms > 0)))
        rows = concatenate(parts)
        if not len(rows):
            return ""
        lanes, columns = np.unique(rows.lanes, return_inverse=True)
        steps, lines = np.unique(rows.steps, return_inverse=True)
        sizes = np.full((len(steps), len(lanes)), np.nan)
        sizes[lines, columns] = np.log(rows.rms)
        for line in range(max(len(steps) // 2, 2), len(steps)):
            before = sizes[:line]
            middle = np.median(before, axis=0)
            usual = np.abs(before - middle).max(axis=0)
            # A value that moved and returned to its range before the finding did not cause the finding.
            is_moved = (np.abs(sizes[line:] - middle) > np.fmax(_MOVED, 3 * usual)).all(axis=0)
            indices = np.flatnonzero((lines == line) & is_moved[columns])
            if len(indices):
                key = rows.catalog.key_of(int(rows.lanes[indices[0]]))
                name = f" {key.name}" if key.name else ""
                return f"{module_in_words(key.module_path)} {key.site}{name} moved first, at step {int(steps[line])}"
        return ""

    def risen_rate(self, one: Finding) -> str:
        """Name the learning rate that rose most shortly before a finding. Return an empty string if none rose."""
        rank = one.ranks[0] if one.ranks else -1
        kept = [rows.take(rows.where("rate", attrgetter("is_rate")) & (rows.ranks == rank)) for rows in self._kept]
        rates = concatenate(kept).by_lane()
        values, steps = rates["mean"], rates.steps
        before = previous(rates.lanes, values, Memory())
        is_near = (steps >= one.step - _KEPT_STEPS) & (steps <= one.step) & (before > 0)
        factors = np.where(is_near, values / np.where(before > 0, before, 1.0), 0.0)
        if not factors.max(initial=0.0) >= _ROSE:
            return ""
        at = int(np.argmax(factors))
        name, change = rates.catalog.key_of(int(rates.lanes[at])).name, f"{number(before[at])} to {number(values[at])}"
        return f"{RISEN} {name} rose {number(factors[at])} times at step {int(steps[at])}, from {change}"


class Spike(CurveRule):
    """A loss or a norm of gradients that is far outside the range of the last records.

    A single hard sample makes the loss of a small batch jump. So a small spike of only one record is a note.
    """

    name = "spike"
    sentence = "The loss or the norm of all gradients leaps out of its range over the last records."
    settings = (
        Setting("sigmas", 6, "standard deviations", "OLMo-core's stability monitor"),
        Setting("window", 128, "records", "OLMo-core's stability monitor"),
        Setting("least", 32, "records", CALIBRATED),
        Setting("ratio", 3, "times the largest of them", CALIBRATED),
        Setting(
            "loss_ratio", 1.3, "times the largest of them",
            "as above, for a loss; below `ratio` it is a note unless it stays up",
        ),
    )  # fmt: skip
    needs_more_than = "least"
    advice = "look at the batch and at the learning rate of this step, and at what moved first"

    def set_up(self) -> None:
        super().set_up()
        self._recent = _Recent()
        self._num_details = 0
        self._window = max(int(self.thresholds["window"]), 2)
        self._rings = Rings(self._window)
        self._total = Memory(0.0)
        """By curve, the sum of the values in its ring buffer."""
        self._peak = Memory(0.0)
        """By curve, the largest finite value so far. A value far below it is no spike, as of a loss that reached 0."""
        self._mild: dict[int, tuple[int, float]] = {}
        """By curve with a small spike: the number of the next sample, and the limit above which the curve stays up."""
        self._spiking: dict[int, tuple[float, int]] = {}
        """For each curve with a spike: the limit of its first spike, and how many records in a row were below this
        limit since. All spikes are over once each of these curves has had enough records below its limit."""

    def wants(self, key: SeriesKey) -> bool:
        return super().wants(key) or key.site in _MAY_MOVE or key.is_rate

    def add(self, rows: Rows) -> Iterator[Finding]:
        self._recent.add(rows)
        is_curve = rows.where("loss or grad", lambda key: key.is_loss or key.site == "grad")
        for one in super().add(rows.take(is_curve)) if is_curve.any() else ():
            self._num_details += 1
            if self._num_details <= _MAX_DETAILS:
                told = self._recent.risen_rate(one), self._recent.first_moved(one)
                one = one._replace(detail="; ".join(filter(None, told)))
            yield one

    def judge(self, curves: Integers, values: Floats) -> Iterator[JudgedSample]:
        self._rings.grow(curves)
        num = self.num[curves].astype(np.int64)
        mean = self._total[curves] / np.clip(num, 1, self._window)
        ratio = np.where(self.is_loss[curves] == 1, self.thresholds["loss_ratio"], self.thresholds["ratio"])
        # Reading the ring buffers takes the most time. So they are read only if the mean does not prove a sample sound.
        may_spike = (num >= self.thresholds["least"]) & (values > np.abs(mean) * ratio)
        may_spike &= values > _TINY * self._peak[curves]
        self._peak[curves] = np.maximum(self._peak[curves], np.where(np.isfinite(values), values, 0.0))
        for index in np.flatnonzero(may_spike).tolist():
            curve, value, ring = int(curves[index]), float(values[index]), self._rings.values[curves[index]]
            largest = float(np.nanmax(np.abs(ring)))
            limit = float(mean[index]) + self.thresholds["sigmas"] * float(np.nanstd(ring))
            limit = max(limit, largest * float(ratio[index]))
            next_sample, limit_before = self._mild.get(curve, (-1, np.inf))
            what, kind = f"{self.words(curve)} spikes over the mean of the records before", self.keys[curve].kind
            if next_sample == num[index] and value > limit_before:
                yield JudgedSample(index, f"{what}, and stays up", kind, value, limit_before)
            elif value > limit:
                is_mild = kind == _LOSS and value < largest * self.thresholds["ratio"]
                if is_mild:
                    self._mild[curve] = int(num[index]) + 1, limit
                self._spiking.setdefault(curve, (limit, 0))
                yield JudgedSample(index, what, kind, value, limit, Severity.NOTE if is_mild else None)
        self._spiking = {one: how for one, how in self._spiking.items() if self.keys[one].training == self.training}
        if self._spiking:
            for curve, value in zip(curves.tolist(), values.tolist(), strict=True):
                if curve in self._spiking:  # a NaN loss is no sample, so its spike never ends
                    limit, num_below = self._spiking[curve]
                    self._spiking[curve] = limit, num_below + 1 if value <= limit else 0
            if min(num_below for _, num_below in self._spiking.values()) >= _RECOVERED:
                self.catalog.recovered_at.append(self.step)
                self._spiking.clear()
        replaced = self._rings.put(curves, num, values)
        self._total[curves] = self._total[curves] + values - np.nan_to_num(replaced)


class Jump(CurveRule):
    """A norm of gradients far larger than all of the first records, and clearly larger than the last records.

    When a training leaves a plateau, its gradients grow far larger, but not from one record to the next.
    """

    name = "jump"
    sentence = "The norm of all gradients is many times the largest of the first records."
    severity = Severity.ERROR
    sites, columns = ("grad",), ("sum_sq",)
    settings = (
        Setting("ratio", 10, "times the largest", "Megatron-LM's check for large gradients"),
        Setting("first", 100, "records", "Megatron-LM's check for large gradients"),
        Setting("sudden", 3, "times the last ones", "gradients that leave a plateau grow slowly"),
    )
    needs_more_than = "first"
    advice = "a rank alone: suspect its hardware or its data; all ranks: the step before was too large"

    def set_up(self) -> None:
        super().set_up()
        self._largest, self._is_up, self._recent = Memory(0.0), Memory(0.0), Memory(0.0)
        """Three numbers by curve. The first is the largest of the first samples. The second is 1 while the curve is
        above its limit, since only the first sample above it is reported. The third is the largest of the last samples,
        and shrinks with each further sample."""

    def judge(self, curves: Integers, values: Floats) -> Iterator[JudgedSample]:
        is_early = self.num[curves] < self.thresholds["first"]
        early = curves[is_early]
        self._largest[early] = np.maximum(self._largest[early], values[is_early])
        largest, recent = self._largest[curves], self._recent[curves]
        limit = np.maximum(largest * self.thresholds["ratio"], recent * self.thresholds["sudden"])
        self._recent[curves] = np.maximum(recent * _FADING, values)
        is_over = ~is_early & (values > limit) & (limit > 0)
        for index in np.flatnonzero(is_over & (self._is_up[curves] == 0)).tolist():
            what = f"{self.words(int(curves[index]))} jumps above the largest of the first records"
            yield JudgedSample(index, what, _NORM, float(values[index]), float(limit[index]))
        self._is_up[curves] = is_over.astype(np.float64)


class LossStuck(CurveRule):
    name = "loss"
    sentence = "The loss never falls beyond its noise, rises far, or leaps and stays up."
    sites, columns = ("scalar",), ("mean",)
    settings = (
        Setting("records", 10, "records", "smdebug's LossNotDecreasing"),
        Setting("spread", 1e-3, "of the loss", "smdebug's LossNotDecreasing, of a decrease"),
        Setting("drop", 0.01, "of the loss", CALIBRATED),
        Setting("rise", 3, "times the beginning", CALIBRATED),
        Setting("leap", 5, "times the median of the records before", CALIBRATED),
        Setting("share", 0.1, "of the beginning", "a leap of a loss near zero does not count"),
        Setting("shown", 0.2, "of the loss", "a fall that the noise must not hide"),
        Setting("moved", 1e-4, "of the weights' norm, in all updates", "fine-tuning has 1e-5 in one update"),
    )  # fmt: skip
    advice = "compare the gradients and the learning rate with those of a training that learns"

    def set_up(self) -> None:
        super().set_up()
        self._window = max(int(self.thresholds["records"]), 2)
        self._rings, self._earlier, self._steps = (Rings(self._window) for _ in range(3))
        """By curve: the last samples, the samples before these, and the steps of the last samples."""
        self._began, self._noise = Memory(), Memory()
        """By curve, the mean and the standard deviation of the curve's first records."""
        self._is_reported = Memory(0.0), Memory(0.0), Memory(0.0)
        """By curve, 1 if it was reported: a rise (first memory), a loss that stands still (second), a leap (third)."""
        self._still: dict[int, Finding] = {}
        """By curve, the finding of a loss that stands still, as long as the loss has not fallen since: a warm-up."""
        self._moves, self._blocks = Moves(), Rings(_NUM_BLOCKS)
        """By curve, the sums of its samples in blocks of equal size, which doubles when there are too many."""
        self._middle = Memory()
        """By curve, the median of the last samples."""
        self._risen: dict[Finding, int] = {}
        """The curve of each finding of a rise or a leap."""
        self._targets: list[Rows] = []
        """The rows of the labels of the last losses, and of those that are being judged."""

    def wants(self, key: SeriesKey) -> bool:
        return key.is_loss or key.site in ("param", UPDATE) or key.name == LABELS

    def add(self, rows: Rows) -> Iterator[Finding]:
        """Judge the losses. A loss that leaps as its targets change is a note: a network of targets may be renewed."""
        targets = rows.take(rows.where("targets", lambda key: key.name == LABELS))
        self._targets += [targets] if len(targets) else []
        while len(self._targets) > 1 and sum(map(len, self._targets[1:])) >= _MAX_TARGETS:
            del self._targets[0]
        rows = self._moves.add(rows)
        for one in super().add(rows) if len(rows) else ():
            if changed := self._changed_targets(one):
                severity = Severity.NOTE if one.what.endswith(_STAYS) else one.severity
                one = one._replace(severity=severity, detail=changed)
            self._risen[one] = self.reported
            yield one

    def revised(self, one: Finding) -> Finding:
        """Make a rise or a leap a note if the loss has come back by the end, as where a task becomes harder."""
        if one not in self._risen or not self._middle.of(self._risen[one]) < one.threshold:
            return one
        what = f"{one.what.removesuffix(_STAYS)}, and comes back later"
        return one._replace(severity=Severity.NOTE, what=what)

    def _changed_targets(self, one: Finding) -> str:
        """Return how the targets of a loss changed before a finding, beyond their noise. Empty if they did not."""
        if not self._targets:
            return ""
        rows = concatenate(self._targets)
        rows = rows.take(np.isin(rows.ranks, one.ranks) & (rows.steps <= one.step) & ~np.isnan(rows.rms))
        before = rows.rms[rows.steps <= one.step - self._window]
        now = rows.rms[rows.steps > one.step - self._window // 2]  # a median rises once half of its window is above
        if min(len(before), len(now)) < _FEWEST_TARGETS:
            return ""
        noise = math.sqrt(before.var() / len(before) + now.var() / len(now))
        is_changed = abs(now.mean() - before.mean()) > _CERTAIN * noise
        return f"its targets went from {number(before.mean())} to {number(now.mean())} on average" if is_changed else ""

    def judge(self, curves: Integers, values: Floats) -> Iterator[JudgedSample]:
        for rings in (self._rings, self._earlier, self._steps, self._blocks):
            rings.grow(curves)
        num = self.num[curves].astype(np.int64)
        self._put_blocks(curves, num, values)
        self._earlier.put(curves, num, self._rings.put(curves, num, values))
        self._steps.put(curves, num, np.full(len(curves), float(self.step)))
        num, ring = num + 1, self._rings.values[curves]
        now, middle = ring.mean(axis=1), np.median(ring, axis=1)
        self._middle[curves] = middle
        is_begun = num == self._window
        self._began[curves[is_begun]], self._noise[curves[is_begun]] = now[is_begun], ring[is_begun].std(axis=1)
        began = self._began[curves]
        with np.errstate(all="ignore"):
            spread = np.nan_to_num((ring.max(axis=1) - ring.min(axis=1)) / np.abs(now), posinf=0.0)
        is_late = num >= 2 * self._window
        limit = np.maximum(began * self.thresholds["rise"], began + 3 * self._noise[curves])  # some lie around zero
        is_risen = is_late & (middle > limit) & (began > 0)  # one bad batch moves the mean, but not the median
        is_down = now < began - np.abs(began) * self.thresholds["drop"]
        is_stuck = is_late & ~is_down & (spread < self.thresholds["spread"])
        limits = np.full(len(curves), self.thresholds["spread"])
        top, low = self.thresholds["leap"] * np.median(self._earlier.values[curves], axis=1), ring.min(axis=1)
        is_leapt = is_late & ~is_risen & (low > top) & (top > 0) & (low > self.thresholds["share"] * np.abs(began))
        found = (
            (is_risen, middle, limit, " has risen far above where it began", "median of the last"),
            (is_stuck, spread, limits, " stands still where it began", "spread over the last records"),
            (is_leapt, low, top, " has leapt above the records before" + _STAYS, "smallest of the last"),
        )
        for reported, (flags, numbers, thresholds, what, measure) in zip(self._is_reported, found, strict=True):
            for index in np.flatnonzero(flags & (reported[curves] == 0)).tolist():
                curve, value, threshold = int(curves[index]), float(numbers[index]), float(thresholds[index])
                said, since = self.words(curve) + what, None
                if flags is is_leapt:
                    since = int(self._steps.values[curve].min())
                if flags is is_stuck:
                    self._still[curve] = self.finding(self.lanes[curve], self.step, said, measure, value, threshold)
                else:
                    yield JudgedSample(index, said, measure, value, threshold, since=since)
            reported[curves[flags]] = 1.0
        for curve in curves[is_down].tolist():
            self._still.pop(curve, None)

    def _put_blocks(self, curves: Integers, num: Integers, values: Floats) -> None:
        blocks, full = self._blocks.values, curves[(num >= _NUM_BLOCKS) & (num & (num - 1) == 0)]
        blocks[full, : _NUM_BLOCKS // 2] = blocks[full, ::2] + blocks[full, 1::2]
        sizes = _block_size(num)
        at = num // sizes
        blocks[curves, at] = np.where(num % sizes == 0, values, blocks[curves, at] + values)

    def finish(self) -> Iterator[Finding]:
        if self.most < 2 * self._window:
            self.why_not_judged = f"it needs {2 * self._window} records of a loss, and there are fewer"
        yield from self._still.values() or self._never_fell()  # a fine-tuning may begin at its floor: a note

    def _never_fell(self) -> Iterator[Finding]:
        """Report the loss if no loss of the training ever left the noise in which it began, over all ranks together."""
        losses: dict[tuple[str, int], list[int]] = {}
        for curve, key in enumerate(self.keys):
            num, lane = int(self.num.of(curve)), self.lanes[curve]
            is_whole = max(10 * self._window, self.step / 2) <= num  # a run that goes on has learnt before
            if is_whole and not is_validation(self.catalog.key_of(lane)):
                losses.setdefault((key.name, num), []).append(curve)
        found = [self._quarters(np.array(curves), num) for (_, num), curves in losses.items()]
        if not found or not all(means for means, _ in found) or not self._moves.num:
            return
        (means, shown), curves, moved = found[0], next(iter(losses.values())), self._moves.total
        still, fall = moved < self.thresholds["moved"], float((means[0] - min(means)) / abs(np.mean(means)))
        what = f"the loss has not fallen beyond its noise, and the weights {'hardly ' * still}move"
        lane, ranks = self.lanes[curves[0]], tuple(sorted({self.keys[curve].rank for curve in curves} - {-1}))
        one = self.finding(lane, self.step, what, "fall of the loss", fall, shown, Severity(int(still)))
        detail = f"its quarters are {', '.join(map(number, means))}; a fall by {number(100 * shown)} % would show"
        yield one._replace(
            ranks=ranks,
            detail=f"{detail}; the lengths of all updates add up to {number(moved)} times the norm of the weights",
        )

    def _quarters(self, curves: Integers, num: int) -> tuple[list[float], float]:
        """Return the loss in the quarters of the run, and which fall shows; no loss if it fell, or may have fallen."""
        size = int(_block_size(np.array(num - 1)))
        blocks = self._blocks.values[curves, : num // size].mean(axis=0) / size
        quarters, usual, num_blocks = np.array_split(blocks, 4), blocks[1:].mean(), len(blocks)
        means = [float(one.mean()) for one in quarters]
        spread = math.sqrt(sum(float(one.var()) * len(one) for one in quarters) / (num_blocks - 4))
        apart = 8 * spread / math.sqrt(num_blocks)  # of four equal means, 95 of 100 lie within this range
        shown = apart / max(abs(float(blocks.mean())), 1e-30)
        fell = self._began[curves].mean() - usual > 3 * spread * math.sqrt(size / self._window)
        fell |= (blocks[0] - usual > 3 * blocks[1:].std()) | (np.ptp(means) > apart) | (spread == 0)
        fell = fell or np.corrcoef(blocks, np.arange(num_blocks))[0, 1] * math.sqrt(num_blocks) < -1.65  # a slope
        return ([] if fell or shown > self.thresholds["shown"] else means), shown


def _block_size(num: Integers) -> Integers:
    """Return how many samples a block has once a curve has had more than `num` samples."""
    return np.asarray(2 ** np.ceil(np.log2(np.maximum((num + 1) / _NUM_BLOCKS, 1))), np.int64)


class Overfitting(CurveRule):
    """A validation loss that rises while it is far above the training loss, or that never falls while training does.

    The validation loss on a small data set goes up and down. So a finding needs a larger rise than any before it. A
    loss that never falls is judged at the end, by what validations in a row differ. Where the two losses did not begin
    at one value, they may be of other kinds, and the finding is a note.
    """

    name = "overfitting"
    sentence = "The validation loss rises from its best, or never falls, far above the loss in training."
    sites, columns = ("scalar",), ("mean",)
    settings = (
        Setting("gap", 0.5, "of the loss in training", "smdebug's Overfit has 0.1"),
        Setting("rise", 0.1, "of the best validation loss", CALIBRATED),
        Setting("records", 3, "validations", CALIBRATED),
        Setting("flat", 5, "validations, of which none is below the first by more than they differ", CALIBRATED),
    )
    needs = "needs losses: recorder.scalar('train/loss', loss), recorder.scalar('validation/loss', loss)"
    advice = "stop at the best validation, or use more data, dropout or weight decay"

    def set_up(self) -> None:
        super().set_up()
        self._total, self._num_trained = Memory(0.0), Memory(0.0)
        """By rank plus 1, the sum and the number of the training losses since the rank's last validation."""
        self._began, self._num_began = Memory(0.0), Memory(0.0)
        """By rank plus 1, the largest of the first training losses, and their number."""
        self._trained: dict[int, float] = {}
        """By rank plus 1, the mean training loss at the rank's last validation."""
        self._seen: defaultdict[int, deque[tuple[int, float, float]]] = defaultdict(lambda: deque(maxlen=_MAX_SEEN))
        """By curve of a validation, the last ones: step, loss, and the loss in training before it (NaN if unknown)."""

    def wants(self, key: SeriesKey) -> bool:
        return key.is_loss or is_validation(key)

    def judge(self, curves: Integers, values: Floats) -> Iterator[JudgedSample]:
        """Keep the validations. The findings come from `finish`, because a later validation may be better."""
        lanes = np.array(self.lanes)[curves]
        ranks = self.catalog.rank_of[lanes] + 1
        is_valid = self.catalog.mark("validation", is_validation)[self.catalog.series_of[lanes]]
        num, total = np.bincount(ranks[~is_valid]), np.bincount(ranks[~is_valid], values[~is_valid])
        known = np.arange(len(num))
        self._num_trained[known] = self._num_trained[known] + num
        self._total[known] = self._total[known] + total
        first = known[(num > 0) & (self._num_began[known] < self.thresholds["records"])]
        self._num_began[first] = self._num_began[first] + 1
        self._began[first] = np.maximum(self._began[first], total[first] / num[first])
        for index in np.flatnonzero(is_valid).tolist():
            rank = int(ranks[index])
            if num_trained := self._num_trained.of(rank):
                self._trained[rank] = self._total.of(rank) / num_trained
            self._seen[int(curves[index])].append((self.step, float(values[index]), self._trained.get(rank, math.nan)))
        self._num_trained[ranks[is_valid]] = self._total[ranks[is_valid]] = 0.0
        return iter(())

    def finish(self) -> Iterator[Finding]:
        for curve, seen in self._seen.items():
            # What a model without gradients gives between any two updates is a reference, and no validation.
            steps = [step for step, _, _ in seen]
            is_found = self.catalog.key_of(self.lanes[curve]).name == EVALUATION_LOSS
            if (
                not (is_found and (np.diff(steps) == 1).all())
                and (one := self._never_fell(curve) or self._risen(curve)) is not None
            ):
                yield one
        if not self._seen:
            self.why_not_judged = "needs a validation loss: recorder.scalar('validation/loss', loss)"
        elif not self._trained:
            self.why_not_judged = "needs a loss in training: recorder.scalar('train/loss', loss)"

    def _risen(self, curve: int) -> Finding | None:
        """Return a finding if the loss rises farther above its best than before each of the best ones before it."""
        found: Finding | None = None
        best = best_then = math.inf
        rise = recovered = 1.0
        num_above = 0
        for step, value, trained in self._seen[curve]:
            if value < best:
                recovered, rise, best = max(rise, recovered), 1.0, value
            if best > 0:
                rise = max(rise, value / best)
            gap = value / trained - 1 if trained > 0 else math.nan
            is_above = gap > self.thresholds["gap"] and value > best * max(1 + self.thresholds["rise"], recovered)
            num_above = num_above + 1 if is_above else 0
            if num_above == self.thresholds["records"] and best < best_then:
                what, best_then = "the validation loss has risen from its best, and the loss in training has not", best
                found = self.finding(self.lanes[curve], step, what, _GAP, gap, self.thresholds["gap"])
        if found is not None and best < best_then:
            found = found._replace(severity=Severity.NOTE, what=f"{found.what}; later the loss reaches a new minimum")
        return found

    def _never_fell(self, curve: int) -> Finding | None:
        """Return a finding if a loss stayed where training began, and the training loss fell, both by their noise.

        It is a note if the training loss is not far below, or if the loss began far above, as another kind of loss may.
        """
        seen = [one for one in self._seen[curve] if not math.isnan(one[2])]
        if len(seen) < self.thresholds["flat"]:
            return None
        steps, values, trained = np.array(seen).T
        began, last, limit = self._began.of(self.keys[curve].rank + 1), trained[-1], self.thresholds["gap"]
        # Second differences of noise are 1.95 times its deviation, and have no trend. A model learns how frequent each
        # class is even where the labels of the validation are wrong.
        noise = np.abs(np.diff([values, trained], 2)).mean(axis=1) / 1.95
        least = max(3 * noise[0], self.thresholds["rise"] * (began - last))
        lowest = np.convolve(values, np.ones(3) / 3, "valid").min()
        has_trained = 0 < last < began and trained[0] - last > _CERTAIN * noise.sum()
        if not has_trained or max(values[0], began) - lowest > least:
            return None
        is_sure = values[-1] > last * (1 + limit) and values[0] < began * (1 + limit)
        severity, gap = self.severity if is_sure else Severity.NOTE, values[-1] / last - 1
        what = "the validation loss never fell, and the loss in training did"
        one = self.finding(self.lanes[curve], int(steps[-1]), what, _GAP, gap, limit, severity, int(steps[0]))
        return one._replace(advice=_SAME_IN_BOTH)


def is_validation(key: SeriesKey) -> bool:
    """Return whether a series is the loss of a validation."""
    return is_validation_loss(key.site, key.name) or (key.is_loss and key.mode in ("eval", "no_grad"))
