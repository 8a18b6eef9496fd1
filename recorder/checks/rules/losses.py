"""The rule on the loss over the steps: a loss that stands still, rises, leaps, or has the wrong sign."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ...sites import UPDATE
from ...system.text import number
from ..given import GUESSED, OtherData, Targets, holds_labels, is_of_batch
from ..normal import Moves
from ..rows import Flags, Floats, Integers, Memory, Rows, SeriesKey
from ..rule import CALIBRATED, Finding, Setting, Severity
from .curves import CurveRule, JudgedSample, Rings
from .programs import NEGATED
from .validations import is_validation

_NUM_BLOCKS = 32
"""The most blocks of a loss, whose means hardly depend on each other. With more samples, two blocks become one."""
_STAYS = ", and stays up"
_STANDS = " stands still where it began"
WRONG_SIGN = "without bound"
_BOTTOMLESS = f" falls below zero {WRONG_SIGN}"
_NEGATED = f" falls {WRONG_SIGN}: it is the negative of a loss that is never negative"
_HARDLY = 1e-3
"""Below this part of the weights' norm, the lengths of all updates are said to be small. The rule has a lower limit."""
_CLASSES = re.compile(r"NllLoss of (\d+) classes")
"""What the manifest says of a loss that is the mean cross-entropy of classes."""


class _LastSamples(NamedTuple):
    """What the last samples of curves show."""

    middle: Floats
    """The median of the last samples."""
    is_down: Flags
    """Whether the loss has fallen since its beginning."""
    found: tuple[tuple[Flags, Floats, Floats, str, str], ...]
    """By condition: where it holds, the measured numbers, their thresholds, and the words for both."""


class LossStuck(CurveRule):
    name = "loss"
    sentence = "The loss never falls beyond its noise, rises, leaps and stays up, or has the wrong sign."
    sites, columns = ("scalar",), ("mean",)
    settings = (
        Setting("records", 10, "records", "smdebug's LossNotDecreasing"),
        Setting("spread", 1e-3, "of the loss", "smdebug's LossNotDecreasing, of a decrease"),
        Setting("drop", 0.01, "of the loss", CALIBRATED),
        Setting("rise", 3, "times the beginning", CALIBRATED),
        Setting("leap", 5, "times the median of the records before", CALIBRATED),
        Setting("ranges", 10, "ranges of the records before, above twice their median", CALIBRATED),
        Setting("share", 0.1, "of the beginning", "a leap of a loss near zero does not count"),
        Setting("negated", 10, "times the beginning", "the loss of a network that another one opposes has its bounds"),
        Setting("bottomless", 1e6, "times the beginning", "logarithms of densities and scores of critics reach 1e3"),
        Setting("shown", 0.2, "of the loss", "a fall that the noise must not hide"),
        Setting("moved", 1e-4, "of the weights' norm, in all updates", "fine-tuning has 1e-5 in one update"),
    )  # fmt: skip
    advice = "look at the learning rate, at the labels, and at the sizes of gradients and updates"

    def set_up(self) -> None:
        super().set_up()
        self._window = max(int(self.thresholds["records"]), 2)
        self._rings, self._earlier, self._steps = (Rings(self._window) for _ in range(3))
        """By curve: the last samples, the samples before these, and the steps of the last samples."""
        self._began, self._noise = Memory(), Memory()
        """By curve, the mean and the standard deviation of the curve's first records."""
        self._is_reported = [Memory(0.0) for _ in range(5)]
        """By curve, 1 if it was reported: a rise, a loss that stands still, two wrong signs, a leap."""
        self._still: dict[int, Finding] = {}
        """By curve, the finding of a loss that stands still, as long as the loss has not fallen since: a warm-up."""
        self._moves, self._blocks = Moves(), Rings(_NUM_BLOCKS)
        """By curve, the sums of its samples in blocks of equal size, which doubles when there are too many."""
        self._middle = Memory()
        """By curve, the median of the last samples."""
        self._risen: dict[Finding, int] = {}
        """The curve of each finding of a rise or a leap."""
        self._targets, self._other_data = Targets(), OtherData()

    def wants(self, key: SeriesKey) -> bool:
        return key.is_loss or key.site in ("param", UPDATE) or is_of_batch(key)

    def add(self, rows: Rows) -> Iterator[Finding]:
        """Judge the losses. A loss that leaps as its targets change is a note: a network of targets may be renewed."""
        self._targets.add(rows)
        self._other_data.add(rows)
        rows = self._moves.add(rows)
        for one in super().add(rows) if len(rows) else ():
            if changed := self._targets.change(one, self._window):
                severity = Severity.NOTE if one.what.endswith(_STAYS) else one.severity
                one = one._replace(severity=severity, detail=changed)
            if WRONG_SIGN in one.what:
                advice = "look at the sign of the loss and of each of its terms"
                one = one._replace(severity=self.severity, detail="", advice=advice)
            else:
                self._risen[one] = self.reported
            yield one

    def revised(self, one: Finding) -> Finding:
        """Make a rise or a leap a note if the loss has come back by the end, as where a task becomes harder.

        A leap with other data, as with a new task, is one even if the loss stays up.
        """
        revised = super().revised(one)
        revised = self._other_data.as_note(revised) if one.what.endswith(_STAYS) else revised
        if one not in self._risen or not self._middle.of(self._risen[one]) < one.threshold:
            return revised
        what = f"{one.what.removesuffix(_STAYS)}, and comes back later"
        return revised._replace(severity=Severity.NOTE, what=what)

    def has_passed(self, its_curves: list[int], curves: Integers, steps: Integers, values: Floats) -> bool:
        if self._still or self.replaced:
            return False
        self._grow(curves)
        size, passed = self._window, []
        for curve in its_curves:
            new, its_steps, num = values[curves == curve], steps[curves == curve], int(self.num.of(curve))
            order = np.arange(num, num + size) % size  # the oldest sample first
            kept = np.concatenate([self._earlier.values[curve, order], self._rings.values[curve, order], new])
            rings = np.lib.stride_tricks.sliding_window_view(kept[size + 1 :], size)
            earlier = np.lib.stride_tricks.sliding_window_view(kept[1:-size], size)
            nums = np.arange(num, num + len(new))
            began, noise = self._began.of(curve), self._noise.of(curve)
            if num < size <= num + len(new):
                began, noise = float(rings[size - num - 1].mean()), float(rings[size - num - 1].std())
            begun = np.full(len(new), began), np.full(len(new), noise)
            seen = self._seen(np.full(len(new), curve), nums + 1, rings, earlier, begun)
            if any(flags.any() for flags, *_ in seen.found):
                return False
            passed.append((np.array([curve]), nums, new, its_steps, kept, seen.middle[-1:], (began, noise)))
        for at, nums, new, its_steps, kept, middle, (began, noise) in passed:
            last = slice(-min(size, len(new)), None)
            for sample, one in zip(nums[:, np.newaxis], new[:, np.newaxis], strict=True):
                self._put_blocks(at, sample, one)
            self._earlier.put(at, nums[last], kept[size:-size][last])
            self._rings.put(at, nums[last], new[last])
            self._steps.put(at, nums[last], its_steps[last].astype(np.float64))
            self._middle[at], self._began[at], self._noise[at] = middle, began, noise
        return True

    def judge(self, curves: Integers, values: Floats) -> Iterator[JudgedSample]:
        self._grow(curves)
        num = self.num[curves].astype(np.int64)
        self._put_blocks(curves, num, values)
        self._earlier.put(curves, num, self._rings.put(curves, num, values))
        self._steps.put(curves, num, np.full(len(curves), float(self.step)))
        num, ring = num + 1, self._rings.values[curves]
        is_begun = num == self._window
        if is_begun.any():
            began = ring[is_begun]
            self._began[curves[is_begun]], self._noise[curves[is_begun]] = began.mean(axis=1), began.std(axis=1)
        seen = self._seen(curves, num, ring, self._earlier.values[curves], (self._began[curves], self._noise[curves]))
        self._middle[curves] = seen.middle
        for reported, (flags, numbers, thresholds, what, measure) in zip(self._is_reported, seen.found, strict=True):
            for index in np.flatnonzero(flags & (reported[curves] == 0)).tolist():
                curve, value, threshold = int(curves[index]), float(numbers[index]), float(thresholds[index])
                said, since = self.words(curve) + what, None
                if what.endswith(_STAYS):
                    since = int(self._steps.values[curve].min())
                if what == _STANDS:
                    self._still[curve] = self.finding(self.lanes[curve], self.step, said, measure, value, threshold)
                else:
                    yield JudgedSample(index, said, measure, value, threshold, since=since)
            reported[curves[flags]] = 1.0
        for curve in (*curves[seen.is_down].tolist(), *self.replaced):
            self._still.pop(curve, None)

    def _grow(self, curves: Integers) -> None:
        for rings in (self._rings, self._earlier, self._steps, self._blocks):
            rings.grow(curves)

    def _seen(
        self, curves: Integers, num: Integers, ring: Floats, earlier: Floats, begun: tuple[Floats, Floats]
    ) -> _LastSamples:
        """Look at the last samples of curves. `num` counts each curve's samples.

        `ring` and `earlier` are of shape (curves, samples). `begun` are the means and the noise of the first records.
        """
        now, (low, middle, high) = ring.mean(axis=1), _quantiles(ring)
        began, noise = begun
        with np.errstate(all="ignore"):
            spread = np.nan_to_num((high - low) / np.abs(now), posinf=0.0)
        is_late = num >= 2 * self._window
        limit = np.maximum(began * self.thresholds["rise"], began + 3 * noise)  # some lie around zero
        is_risen = is_late & (middle > limit) & (began > 0)  # one bad batch moves the mean, but not the median
        is_down = now < began - np.abs(began) * self.thresholds["drop"]
        # An advantage over the mean of its group makes a loss whose value is always 0, and whose gradient is not.
        is_stuck = is_late & ~is_down & (spread < self.thresholds["spread"]) & (now != 0)
        limits = np.full(len(curves), self.thresholds["spread"])
        negated = self.catalog.mark("negated", self._is_negated)[self.catalog.series_of[np.array(self.lanes)[curves]]]
        below = np.abs(began) * np.where(negated, self.thresholds["negated"], self.thresholds["bottomless"])
        is_below = is_late & (-middle > below) & (negated | (-middle > self.thresholds["bottomless"]))
        least, usual, most = _quantiles(earlier)
        beyond = np.maximum(2 * usual, usual + self.thresholds["ranges"] * (most - least))
        top = np.minimum(self.thresholds["leap"] * usual, beyond)
        is_leapt = is_late & ~is_risen & (low > top) & (top > 0) & (low > self.thresholds["share"] * np.abs(began))
        return _LastSamples(
            middle,
            is_down,
            (
                (is_risen, middle, limit, " has risen far above where it began", "median of the last"),
                (is_stuck, spread, limits, _STANDS, "spread over the last records"),
                (is_below & negated, -middle, below, _NEGATED, "median of the last times -1"),
                (is_below & ~negated, -middle, below, _BOTTOMLESS, "median of the last times -1"),
                (is_leapt, low, top, " has leapt above the records before" + _STAYS, "smallest of the last"),
            ),
        )

    def _is_negated(self, key: SeriesKey) -> bool:
        root = self.catalog.modules.get((key.root, ""))
        return key.is_loss and root is not None and root.loss_argument.startswith(NEGATED)

    def _put_blocks(self, curves: Integers, num: Integers, values: Floats) -> None:
        blocks, full = self._blocks.values, curves[(num >= _NUM_BLOCKS) & (num & (num - 1) == 0)]
        blocks[full, : _NUM_BLOCKS // 2] = blocks[full, ::2] + blocks[full, 1::2]
        sizes = _block_size(num)
        at = num // sizes
        blocks[curves, at] = np.where(num % sizes == 0, values, blocks[curves, at] + values)

    def finish(self) -> Iterator[Finding]:
        if self.most < 2 * self._window:
            self.why_not_judged = f"it needs {2 * self._window} records of a loss, and there are fewer"
        for curve, one in self._still.items():
            yield self.among_rivals(curve, one._replace(detail=self._told_guess(self._middle.of(curve), curve)))
        yield from () if self._still else self._never_fell()  # a fine-tuning may begin at its floor: a note

    def _never_fell(self) -> Iterator[Finding]:
        """Report the loss if no loss of the training ever left the noise in which it began, over all ranks together."""
        losses: dict[tuple[str, int], list[int]] = {}
        for curve, key in enumerate(self.keys):
            num, lane = int(self.num.of(curve)), self.lanes[curve]
            is_whole = max(10 * self._window, self.step / 2) <= num  # a run that goes on has learnt before
            if is_whole and self._middle.of(curve) and not is_validation(self.catalog.key_of(lane)):
                losses.setdefault((key.name, num), []).append(curve)
        found = [self._quarters(np.array(curves), num) for (_, num), curves in losses.items()]
        if not found or not self._moves.num:
            return
        (means, shown, _), curves, moved = found[0], next(iter(losses.values())), self._moves.total
        still, fall = moved < self.thresholds["moved"], float((means[0] - min(means)) / abs(np.mean(means)))
        what, measure = self._by_guessing(means, curves[0]), ""
        details = [f"its quarters are {', '.join(map(number, means))}"]
        if any(has_fallen for _, _, has_fallen in found):
            if len(found) > 1 or not what:
                return
            still = False
        else:
            what = f"the loss has not fallen beyond its noise, and the weights {'hardly ' * (moved < _HARDLY)}move"
            measure = "fall of the loss"
            details += [f"a fall by {number(100 * shown)} % would show", self._told_guess(means[-1], curves[0])]
        details.append(f"the lengths of all updates add up to {number(moved)} times the norm of the weights")
        lane, ranks = self.lanes[curves[0]], tuple(sorted({self.keys[curve].rank for curve in curves} - {-1}))
        one = self.finding(lane, self.step, what, measure, fall, shown, Severity(int(still)))
        yield self.among_rivals(int(curves[0]), one._replace(ranks=ranks, detail="; ".join(filter(None, details))))

    def _by_guessing(self, means: list[float], curve: int) -> str:
        """Say that a loss is never below that of a model that guesses. Return "" if it is. `means` are of quarters."""
        began_with, *guesses = (self._guess(mean, curve) for mean in means)
        if all(guesses) and (began_with or means[0] > means[1]):
            verb, guess = "has hardly left" if began_with else "stays at", guesses[-1]  # it may begin sure and wrong
        else:
            num = self._num_classes(self.keys[curve].root)
            if num < 2 or math.log(num) - GUESSED >= min(means[1:]) or means[-1] >= 2 * math.log(num):
                return ""
            verb, guess = "never gets below", f"each of {num} classes the same probability"
        return f"the loss {verb} that of a model that gives {guess}"

    def _guess(self, loss: float, curve: int) -> str:
        """Say what a model gives that has learnt nothing of its inputs and has this loss. Return "" for another loss.

        A loss of classes then is the logarithm of their number. The classes are the last dim of the output of a model
        whose loss has whole-numbered labels.
        """
        about, own = list(zip(self.catalog.series, self.catalog.about, strict=True)), self.keys[curve].root
        roots = {key.root for key, one in about if holds_labels(key) and "int" in one.dtype}
        sizes = (
            one.shape[-1:] for key, one in about if (key.site, key.module_path) == ("output", "") and key.root in roots
        )
        num = next((size[0] for size in sizes if size > (1,) and abs(math.log(size[0]) - loss) < GUESSED), 0)
        if num:
            return f"each of {num} classes the same probability"
        candidates = self._targets.num_candidates(own)
        if candidates > 1 and abs(math.log(candidates) - loss) < GUESSED:
            return f"each of {candidates} samples of the batch the same probability"
        low, high, words = self._targets.loss_of_guess(own)
        return words * (low < loss < high)

    def _num_classes(self, root: str) -> int:
        """Return the number of classes if the whole loss of a model is a cross-entropy of the classes; else 0."""
        model = self.catalog.modules.get((root, ""))
        known = None if model is None else _CLASSES.fullmatch(model.labels_of)
        return 0 if known is None else int(known[1])

    def _told_guess(self, loss: float, curve: int) -> str:
        return f"a model that gives {guess} has this loss" if (guess := self._guess(loss, curve)) else ""

    def _quarters(self, curves: Integers, num: int) -> tuple[list[float], float, bool]:
        """Return the loss in the quarters of the run, which fall shows, and whether it fell, or may have fallen."""
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
        return means, shown, bool(fell or shown > self.thresholds["shown"])


def _block_size(num: Integers) -> Integers:
    """Return how many samples a block has once a curve has had more than `num` samples."""
    return np.asarray(2 ** np.ceil(np.log2(np.maximum((num + 1) / _NUM_BLOCKS, 1))), np.int64)


def _quantiles(values: Floats) -> tuple[Floats, Floats, Floats]:
    """Return the least, the median and the largest value of each row; NaN for a row with a NaN."""
    ascending, num = np.sort(values, axis=1), values.shape[1]  # one sort takes a fifth of the time of `np.median`
    most = ascending[:, -1]  # NaNs come last
    is_known = most == most
    middle = (ascending[:, (num - 1) // 2] + ascending[:, num // 2]) / 2
    return np.where(is_known, ascending[:, 0], np.nan), np.where(is_known, middle, np.nan), most
