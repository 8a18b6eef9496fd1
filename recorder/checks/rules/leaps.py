"""Rules on leaps of the loss and of the norm of all gradients."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from operator import attrgetter

import numpy as np

from ...sites import LABELS
from ...system.text import number, value_in_words
from ..given import OtherData, Targets
from ..rows import Floats, Integers, Memory, Rows, SeriesKey, concatenate, previous
from ..rule import CALIBRATED, Finding, Setting, Severity
from .curves import LOSS, NORM, CurveRule, JudgedSample, Rings

_RECOVERED = 10
"""Spikes are over once each curve that spiked has had this many records in a row below the spike's limit."""
_FADING = 0.97
"""The factor by which the remembered largest sample shrinks with each further sample: 23 samples halve it."""
_KEPT_STEPS = 16
_MAX_KEPT_ROWS = 400_000
_TINY = 1e-3
"""A value below this share of the largest so far is no spike."""
_MAX_DETAILS = 20
_MAY_MOVE = ("input", "output", "grad_output", "param", "grad")
_MOVED = math.log(2)
RISEN = "the learning rate"
"""The first words of a finding's detail if a learning rate rose before the finding."""
_FACTORS = 4
"""The number of standard deviations of the logarithms of a loss that a small spike must exceed, too."""
_ROSE = 3.0
"""A learning rate that rises by this factor from one record to the next is named beside a spike that follows."""
_GROWN = "at this step parameters got their first gradient, as those of a new term of the loss do"


class Recent:
    """Keeps the rows of the last few steps, to find the value that moved first and the learning rate that rose."""

    def __init__(self) -> None:
        self._kept: deque[Rows] = deque()
        """Batches of rows, the oldest first."""

    def add(self, rows: Rows) -> None:
        if not len(rows):
            return
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
            # A single number that the model returns is the loss, or a part of it.
            is_loss = near.where("of the model", lambda key: key.site == "output" and not key.module_path)
            is_other = (near.ranks == rank) & ~near.at("scalar") & ~(is_loss & (near["numel"] == 1))
            parts.append(near.take(is_other & ~np.isnan(near.rms) & (near.rms > 0)))
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
                model = f"{key.root}: " if len({root for root, _ in rows.catalog.modules}) > 1 else ""
                where = model + value_in_words(key.module_path, key.site, key.name)
                return f"{where} moved first, at step {int(steps[line])}"
        return ""

    def risen_rate(self, one: Finding) -> str:
        """Name the learning rate that rose most shortly before a finding. Return an empty string if none rose."""
        rank = one.ranks[0] if one.ranks else -1
        if not self._kept:
            return ""
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
        self._recent, self._targets, self._other_data = Recent(), Targets(), OtherData()
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
        self._targets.add(rows)
        self._other_data.add(rows)
        is_curve = rows.where("loss or grad", lambda key: key.is_loss or key.site == "grad")
        for one in super().add(rows.take(is_curve)) if is_curve.any() else ():
            self._num_details += 1
            if self._num_details <= _MAX_DETAILS:
                told = self._recent.risen_rate(one), self._recent.first_moved(one)
                one = one._replace(detail="; ".join(filter(None, [*told, one.detail])))
            if one.site == "scalar" and (self.keys[self.reported].rank, one.step) in self.grown_at:
                one = one._replace(severity=Severity.NOTE, detail=_GROWN)
            yield self._targets.as_note(one)

    def revised(self, one: Finding) -> Finding:
        return self._other_data.as_note(super().revised(one))

    def has_passed(self, its_curves: list[int], curves: Integers, steps: Integers, values: Floats) -> bool:
        if self._spiking:
            return False
        self._rings.grow(curves)
        passed = []
        for curve in its_curves:
            num, total, peak = int(self.num.of(curve)), self._total.of(curve), self._peak.of(curve)
            ratio = self.thresholds["loss_ratio" if self.is_loss.of(curve) == 1 else "ratio"]
            ring = self._rings.values[curve].tolist()
            for value in values[curves == curve].tolist():
                mean = total / min(max(num, 1), self._window)
                if num >= self.thresholds["least"] and value > abs(mean) * ratio and value > _TINY * peak:
                    limit, _ = self._limits(curve, np.array(ring), mean, peak)
                    if value > min(limit, self._mild.get(curve, (0, math.inf))[1]):
                        return False
                peak = max(peak, value) if math.isfinite(value) else peak
                slot = num % self._window
                total = total + value - (0.0 if math.isnan(ring[slot]) else ring[slot])
                ring[slot] = value
                num += 1
            passed.append((curve, total, peak, ring))
        for curve, total, peak, ring in passed:
            self._total[np.array([curve])], self._peak[np.array([curve])] = total, peak
            self._rings.values[curve] = ring
        return True

    def judge(self, curves: Integers, values: Floats) -> Iterator[JudgedSample]:
        self._rings.grow(curves)
        num = self.num[curves].astype(np.int64)
        mean = self._total[curves] / np.clip(num, 1, self._window)
        ratio = np.where(self.is_loss[curves] == 1, self.thresholds["loss_ratio"], self.thresholds["ratio"])
        # Reading the ring buffers takes the most time. So they are read only if the mean does not prove a sample sound.
        may_spike = (num >= self.thresholds["least"]) & (values > np.abs(mean) * ratio)
        may_spike &= values > _TINY * self._peak[curves]
        peaks = self._peak[curves]
        self._peak[curves] = np.maximum(peaks, np.where(np.isfinite(values), values, 0.0))
        for index in np.flatnonzero(may_spike).tolist():
            curve, value, ring = int(curves[index]), float(values[index]), self._rings.values[curves[index]]
            limit, largest = self._limits(curve, ring, float(mean[index]), float(peaks[index]))
            next_sample, limit_before = self._mild.get(curve, (-1, np.inf))
            what, kind = f"{self.words(curve)} spikes over the mean of the records before", self.keys[curve].kind
            if next_sample == num[index] and value > limit_before:
                yield JudgedSample(index, f"{what}, and stays up", kind, value, limit_before)
            elif value > limit:
                is_mild = kind == LOSS and value < largest * self.thresholds["ratio"]
                if is_mild:
                    self._mild[curve] = int(num[index]) + 1, limit
                self._spiking.setdefault(curve, (limit, 0))
                yield JudgedSample(index, what, kind, value, limit, Severity.NOTE if is_mild else None)
        self._spiking = {
            one: how
            for one, how in self._spiking.items()
            if self.keys[one].training == self.training and one not in self.replaced
        }
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

    def _limits(self, curve: int, ring: Floats, mean: float, peak: float) -> tuple[float, float]:
        """Return the limit above which a sample is a spike, and the largest of the samples in a curve's ring buffer."""
        is_loss = self.is_loss.of(curve) == 1
        # A loss that has been zero for so long, as of a margin that is kept, has no range but that before.
        largest = float(np.nanmax(np.abs(ring))) or peak
        limit = mean + self.thresholds["sigmas"] * float(np.nanstd(ring))
        limit = max(limit, largest * self.thresholds["loss_ratio" if is_loss else "ratio"])
        if is_loss:
            limit = max(limit, min(_limit_of_factors(ring), largest * self.thresholds["ratio"]))
        return limit, largest


def _limit_of_factors(ring: Floats) -> float:
    """Return the limit of a loss that varies by factors, as one of a training set that is learnt by heart does."""
    known = ring[~np.isnan(ring)]
    if not len(known) or known.min() <= 0:
        return 0.0
    logs = np.log(known)
    with np.errstate(over="ignore"):
        return float(np.exp(logs.mean() + _FACTORS * logs.std()))


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
    advice = "look at the batch and at the learning rate; if one rank of several jumps alone, also at its hardware"

    def set_up(self) -> None:
        super().set_up()
        self._targets = Targets()
        self._largest, self._is_up, self._recent = Memory(0.0), Memory(0.0), Memory(0.0)
        """Three numbers by curve. The first is the largest of the first samples. The second is 1 while the curve is
        above its limit, since only the first sample above it is reported. The third is the largest of the last samples,
        and shrinks with each further sample."""

    def wants(self, key: SeriesKey) -> bool:
        return super().wants(key) or key.name == LABELS

    def add(self, rows: Rows) -> Iterator[Finding]:
        self._targets.add(rows)
        is_gradient = rows.at("grad")
        for one in super().add(rows.take(is_gradient)) if is_gradient.any() else ():
            yield self._targets.as_note(one)

    def has_passed(self, its_curves: list[int], curves: Integers, steps: Integers, values: Floats) -> bool:
        passed = []
        for curve in its_curves:
            num, largest, recent = self.num.of(curve), self._largest.of(curve), self._recent.of(curve)
            for value in values[curves == curve].tolist():
                limit = max(largest * self.thresholds["ratio"], recent * self.thresholds["sudden"])
                if num < self.thresholds["first"]:
                    largest = max(largest, value)
                elif not value <= limit or limit <= 0:
                    return False
                recent = max(recent * _FADING, value)
                num += 1
            passed.append((curve, largest, recent))
        for curve, largest, recent in passed:
            at = np.array([curve])
            self._largest[at], self._recent[at], self._is_up[at] = largest, recent, 0.0
        return True

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
            yield JudgedSample(index, what, NORM, float(values[index]), float(limit[index]))
        self._is_up[curves] = is_over.astype(np.float64)
