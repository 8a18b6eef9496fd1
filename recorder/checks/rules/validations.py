"""The rule on the losses of validations."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterator

import numpy as np

from ...sites import EVALUATION_LOSS, is_validation_loss
from ...system.text import number
from ..rows import Flags, Floats, Integers, Memory, SeriesKey
from ..rule import CALIBRATED, Finding, Setting, Severity
from .curves import CurveRule, JudgedSample

_SAME_IN_BOTH = (
    "see whether labels, preprocessing and loss of the validation are those of training; if they are, nothing of what "
    "is learned holds for other data"
)
_GAP = "validation over training, less 1"
_MAX_SEEN = 4_096
_CERTAIN = 5
"""The number of standard deviations that a fall must have to be no noise."""


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
        self._parts: dict[int, float] = {}
        """By rank plus 1, the number of parts of a loss that are losses of a step. 1 if they are losses themselves."""
        self._trained: dict[int, float] = {}
        """By rank plus 1, the mean training loss at the rank's last validation."""
        self._seen: defaultdict[int, deque[tuple[int, float, float]]] = defaultdict(lambda: deque(maxlen=_MAX_SEEN))
        """By curve of a validation, the last ones: step, loss, and the loss in training before it (NaN if unknown)."""

    def wants(self, key: SeriesKey) -> bool:
        return key.is_loss or is_validation(key)

    def has_passed(self, its_curves: list[int], curves: Integers, steps: Integers, values: Floats) -> bool:
        ranks, is_valid, values = self._of_ranks(curves, values)
        if is_valid.any() or (self._num_began[ranks] < self.thresholds["records"]).any():
            return False
        known = np.arange(ranks.max() + 1)
        total = self._total[known]
        np.add.at(total, ranks, values)  # one after the other, so that the bits do not depend on the batch
        self._num_trained[known] = self._num_trained[known] + np.bincount(ranks)
        self._total[known] = total
        return True

    def judge(self, curves: Integers, values: Floats) -> Iterator[JudgedSample]:
        """Keep the validations. The findings come from `finish`, because a later validation may be better."""
        ranks, is_valid, values = self._of_ranks(curves, values)
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
                if rank not in self._parts:
                    self._learn_parts(rank, float(values[index]))
                self._trained[rank] = self._total.of(rank) / num_trained
            self._seen[int(curves[index])].append((self.step, float(values[index]), self._trained.get(rank, math.nan)))
        self._num_trained[ranks[is_valid]] = self._total[ranks[is_valid]] = 0.0
        return iter(())

    def _of_ranks(self, curves: Integers, values: Floats) -> tuple[Integers, Flags, Floats]:
        """Return each sample's rank plus 1, whether the sample is of a validation, and the loss that the sample is."""
        lanes = np.array(self.lanes)[curves]
        ranks = self.catalog.rank_of[lanes] + 1
        is_valid = self.catalog.mark("validation", is_validation)[self.catalog.series_of[lanes]]
        parts = np.array([self._parts.get(rank, 1.0) for rank in ranks.tolist()])
        return ranks, is_valid, np.where(is_valid, values, parts * values)

    def _learn_parts(self, rank: int, validation: float) -> None:
        """Learn from where the two losses began whether a step's losses are parts of one, divided by their number.

        The sum of such losses then is the loss in training, and not their mean.
        """
        of_training = (
            self.num_values.of(curve)
            for curve, key in enumerate(self.keys)
            if key.rank + 1 == rank and not is_validation(self.catalog.key_of(self.lanes[curve]))
        )
        number = max(of_training, default=1.0)
        began = self._began.of(rank)
        are_parts = min(began, validation) > 0 and abs(math.log(validation / began / number)) < abs(
            math.log(validation / began)
        )
        self._parts[rank] = number if are_parts else 1.0
        at = np.array([rank])
        self._began[at] = self._began[at] * self._parts[rank]
        self._total[at] = self._total[at] * self._parts[rank]

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

    def revised(self, one: Finding) -> Finding:
        return one  # losses of validations are compared, and not those of steps

    def _risen(self, curve: int) -> Finding | None:
        """Return a finding if the loss rises farther above its best than before each of the best ones before it."""
        found: Finding | None = None
        best = best_then = math.inf
        best_step, rise, recovered, num_above = 0, 1.0, 1.0, 0
        for step, value, trained in self._seen[curve]:
            if value < best:
                recovered, rise, best, best_step = max(rise, recovered), 1.0, value, step
            if best > 0:
                rise = max(rise, value / best)
            gap = value / trained - 1 if trained > 0 else math.nan
            is_above = gap > self.thresholds["gap"] and value > best * max(1 + self.thresholds["rise"], recovered)
            num_above = num_above + 1 if is_above else 0
            if num_above == self.thresholds["records"] and best < best_then:
                what, best_then = "the validation loss has risen from its best, and the loss in training has not", best
                found = self.finding(self.lanes[curve], step, what, _GAP, gap, self.thresholds["gap"], since=best_step)
                least, losses = f"its least is {number(best)} at step {best_step}", (number(value), number(trained))
                found = found._replace(detail=f"{least}; at step {step} it is {losses[0]}, and in training {losses[1]}")
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
