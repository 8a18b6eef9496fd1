"""The rule on what a model is given: batches that repeat or are empty, and the labels of its loss."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from ... import sites
from ...system.text import counted, number
from ..given import IGNORED, are_first_arguments, holds_labels, is_of_batch
from ..rows import (
    MAX_STEPS,
    Flags,
    Floats,
    Integers,
    Memory,
    Rows,
    SeriesKey,
    Streaks,
    as_exact_floats,
    began,
    begins,
    ends,
    grouped,
    previous,
)  # fmt: skip
from ..rule import CALIBRATED, CheckRule, Finding, Setting, Severity
from .padding import Padding

ONE_BATCH = "the batch is that of rank"
_BATCH = ("mean", "std", "absmax", "l2")
"""The statistics that two different batches hardly ever have in common."""
_LARGER = "the input is far larger than in any batch before"
_LARGER_AT_FIRST = "the input is far larger than in most of the first batches"
_FEW = 1 / 8
"""The most of the first batches that may be far larger than most of them. More are another kind of batch."""
_LOOK_AT_IT = "look at the samples of this batch, and at what scales them"
_APART = 4_000.0
"""More than the logarithms of two sizes can differ."""
_LEAST_ELEMENTS = 8
"""The least number of elements of a tensor that is judged. The elements of a smaller tensor may be equal by chance."""
_SAME_LABELS, _ONE_CLASS = "the labels never change", "all labels of a batch are equal"
ALL_IGNORED = f"all labels are {IGNORED}, which the loss ignores"
_RANKED = "; each stands for one of several candidates, of which the first may be right on purpose"
_OF_SEVERAL = "; other losses of the same backward have other labels, as that of a domain beside that of a class"
_DOMAIN = "nothing is wrong if these labels name what a whole batch is, such as its domain"
_REPEATS = "the batch repeats that of "
_AGAIN = f"{_REPEATS}1 record before, again and again"
_NORMALISE = "subtract the mean of the inputs, and divide by their standard deviation"
_NORMALISE_LABELS = "subtract the mean of the labels, or begin with it as the bias of the last layer"
_BEYOND = "the labels are from {} to {}, and {}"
_INTO_RANGE = "scale the labels into this range, or leave out the function that gives the output its bounds"
_BOUNDS = {
    "BinaryCrossEntropy": (0.0, 1.0, "the binary cross-entropy expects probabilities, 0 to 1",
                           "scale the labels to 0 and 1, as by dividing a mask by 255"),
    " of Sigmoid": (0.0, 1.0, "the sigmoid of the output returns 0 to 1", _INTO_RANGE),
    " of Softmax": (0.0, 1.0, "the softmax of the output returns 0 to 1", _INTO_RANGE),
    " of Tanh": (-1.0, 1.0, "the tanh of the output returns -1 to 1", _INTO_RANGE),
    " of Relu": (0.0, math.inf, "the ReLU of the output returns nothing below 0", _INTO_RANGE),
}  # fmt: skip
"""By a part of the function that has the labels: their least and largest sound value, why, and the advice."""
_NO_BOUNDS = (-math.inf, math.inf)
_OVERSHOOT, _FAR_BELOW = 0.5, 0.25
"""How far labels may lie beyond, as of an image that was made larger by a bicubic interpolation; how far below they
may lie in parts of the largest magnitude."""
_INPUT_SIZE = "the input is not normalised; its mean is {} and its standard deviation {}"
_LABELS_SIZE = "the labels are not normalised; their mean is {} and their standard deviation {}"
_IN_ORDER = "shuffle the training set anew in each epoch; a DistributedSampler does so after its set_epoch(epoch)"
_MOST = 0.75
"""The least fraction of batches of one class where the samples are sorted by class."""
_OFTEN = 0.45
"""The least fraction of batches that repeat the batch before where two workers of a data loader draw the same."""
_WORKERS = (
    "look whether the workers of the data loader draw from generators with one seed; nothing is wrong if each batch is "
    "meant to be used several times"
)
_SHUFFLE = "look whether the data set is sorted by class, and whether the loader shuffles it"
_FULL_BATCH = "; it was so at every step: this is full-batch training, or a loader that never moved on"
_SHUFFLED = "; the same samples come in another order each time, as in full-batch training with a loader that shuffles"
_KEPT = "; these are the very same tensors each time: this is full-batch training, or a batch that was drawn once"
_WHOLE = "; a data loader of the program has one batch, so this is full-batch training"
_MEANT = "nothing is wrong if each step is meant to see all samples"
_EPISODE = "nothing is wrong if each batch is made of equally many samples of each class, in this order"


class Data(CheckRule):
    name = "data"
    sentence = (
        "Two data-parallel ranks get the same batch, a batch is repeated or is empty, an input or the labels are "
        "constant or not normalised, or padding is not left out."
    )
    sites, columns, reads_probe = ("input",), (*_BATCH, "min", "max"), True
    more_columns = ("fingerprint.hash",)
    settings = (
        Setting("records", 3, "records", "a missing sampler repeats every batch"),
        Setting("repeats", 20, "records", CALIBRATED),
        Setting("period", 4, "records", "a shorter cycle is no training set"),
        Setting("size", 4.0, "root mean squares", CALIBRATED),
        Setting("tiny", 0.01, "as the largest magnitude, or of the mean", "a byte that is divided by 255 twice"),
        Setting("spread", 0.05, "of the mean of labels", "a last bias of 20 is far for an Adam of 1e-3"),
        Setting("leap", 100, "times the largest input before", "a loud batch has up to ten times"),
        Setting("known", 32, "records", "as `least` of `spike`"),
    )
    advice = "look at the data loader: its sampler, its seed on each rank, and whether its batches change"

    def set_up(self) -> None:
        self._same: dict[tuple[int, int], tuple[int, int]] = {}
        """By pair of inputs on two ranks with equal batches: for how many records in a row, and since which step."""
        self._reported: set[int] = set()
        self._before = [Memory() for _ in range(max(int(self.thresholds["period"]), 1))]
        """By first input of a rank, hashes of the rank's last batches. The first memory has the latest batch's hash."""
        self._repeats, self._sizes = Streaks(), Streaks()
        self._last, reported = Memory(), Memory(0.0)
        self._constant_labels, self._flat, self._empty = Streaks(reported), Streaks(reported), Streaks(reported)
        self._held: list[tuple[int, Finding]] = []
        """The findings that later records may contradict or explain, each with the input and rank."""
        self._classes: dict[int, tuple[int, list[Floats]]] = {}
        """By labels of whole numbers and rank: the first step; the class of each batch with equal labels, else NaN."""
        self._num_new, self._mixed, self._numbered = Memory(0.0), Memory(), Memory(0.0)
        """By rank: how often batch or labels were new; the last step with labels of two classes; 1 if they count up."""
        self._num_repeated = Memory(0.0)
        """By rank: how often batch or labels were those of the record before."""
        self._balanced = Memory(0.0)
        """By rank: the number of classes if the last recorded labels have each class equally often; else 0."""
        self._courses: dict[int, list[tuple[Integers, Floats]]] = {}
        """By first input of a rank, the steps and the hashes of its batches, piece by piece."""
        self._last_order, self._last_l2, self._reordered, self._unmoved = Memory(), Memory(), Memory(), Memory()
        """By rank: hash and l2 of the last recorded batch or labels; the last step at which they came in a new order,
        and the last at which they came in the order of the record before."""
        self._last_least, self._alike = Memory(), Memory(0.0)
        """By rank: the least element of the last recorded batch; 1 if another batch had the same l2, as where each
        sample is normalised by itself. The l2 of such batches does not tell one from another."""
        self._had_values = Memory()
        """By input and rank, the first step at which an element was not zero; NaN if there is none so far."""
        self._most, self._num_sizes = Memory(), Memory(0.0)
        """By first input and rank, the logarithm of the largest root mean square so far, and the number of records."""
        self._first_sizes: dict[int, list[tuple[int, float]]] = {}
        """By first input and rank, the step and the logarithm of the root mean square of each of its first records."""
        self._first_numel = Memory()
        """By input and rank, the elements of its first record: a single one, such as a time, is no batch."""
        self._not_normalised: dict[int, Finding] = {}
        """By series, the first finding that an input, or labels, are not normalised."""
        self._out_of_range = Streaks()
        self._padding = Padding(self.catalog, self.finding)

    def wants(self, key: SeriesKey) -> bool:
        """Return whether a series is an input of the complete model in training. A validation may repeat samples."""
        return is_of_batch(key)

    def add(self, rows: Rows) -> Iterator[Finding]:
        is_label = rows.where("labels", holds_labels)
        known = rows.without_probe().by_lane()
        began(known.lanes, known["numel"], self._first_numel)
        is_no_batch = is_label | (rows.are_float() & (rows["l2"] == 0)) | (self._first_numel[rows.lanes] == 1)
        told = rows.take(_tells_apart(rows) & ~is_no_batch)
        recorded = told.without_probe()
        steps, lanes, totals = _batches(recorded, recorded.fingerprints(_BATCH))
        for at in np.split(np.arange(len(steps)), np.flatnonzero(np.diff(steps)) + 1):
            if len(at) > 1:
                yield from self._shared(int(steps[at[0]]), lanes[at], totals[at])
        self._judge_repeats(*_batches(told, (_sizes(told) + 0.0).view(np.uint64)))
        self._note_order(rows.take(rows["fingerprint.hash"] >= 0).by_lane())
        firsts = rows.take(are_first_arguments(rows)).by_lane()
        yield from self._emptied(firsts)
        yield from self._leapt(firsts)
        self._judge_size(firsts.without_probe(), is_label=False)
        self._judge_size(rows.take(is_label).without_probe().by_lane(), is_label=True)
        self._padding.add(rows.without_probe())
        yield from self._beyond_bounds(rows.take(is_label).without_probe().by_lane())
        self._judge_labels(rows.take(is_label).by_lane())
        self._judge_flat(rows.without_probe().by_lane())

    def finish(self) -> Iterator[Finding]:
        """Yield the held findings that no later record contradicts."""
        yield from self._in_order()
        yield from self._often_repeated()
        yield from self._not_normalised.values()
        yield from self._padding.finish()
        yield from self._large_at_first()
        are_sorted = dict(self._sorted())
        yield from are_sorted.values()
        of_lane = [(self.catalog.key_of(lane).root, rank) for lane, rank in enumerate(self.catalog.rank_of.tolist())]
        changed = {one for lane, one in enumerate(of_lane) if self._num_new.of(lane) > 1}
        alike = {
            one
            for lane, one in enumerate(of_lane)
            if self._alike.of(lane) and not holds_labels(self.catalog.key_of(lane))
        }
        full = {of_lane[lane] for lane, one in self._held if one.what == _AGAIN} - changed - alike
        for lane, one in self._held:
            is_void = one.what.startswith(_REPEATS) and of_lane[lane] in alike
            is_void |= one.what == _SAME_LABELS and (of_lane[lane] in full or self._numbered.of(lane) == 1)
            is_void |= one.what == _SAME_LABELS and self._reordered.of(lane) > one.first_step
            is_void |= one.what.startswith(_ONE_CLASS) and lane in are_sorted
            is_void |= one.what in (_ONE_CLASS, ALL_IGNORED) and self._mixed.of(lane) > one.first_step
            if not is_void:
                changes, is_full = of_lane[lane] in changed, of_lane[lane] in full
                yield self._in_context(lane, one, changes=changes, is_full=is_full)

    def _in_context(self, lane: int, one: Finding, *, changes: bool, is_full: bool) -> Finding:
        """Return a held finding as a note where what it reports may be meant, with advice for its kind.

        `changes` and `is_full` say whether the inputs of the rank change, and whether they are one batch again.
        """
        root = self.catalog.modules.get((self.catalog.key_of(lane).root, ""))
        given = None if root is None else root.given_again
        is_kept = given is not None and (not changes or given <= one.first_step)
        num_samples = next(iter(self.catalog.about_of(lane).shape), 0)
        is_whole = root is not None and num_samples in root.whole_sets and not changes
        is_meant, more = is_kept or is_whole, ""
        if one.what == _AGAIN:
            more = _FULL_BATCH * is_full
            if is_meant or (is_full and self._is_shuffled(lane, one.first_step)):
                more = _KEPT if is_kept else _WHOLE if is_whole else _SHUFFLED
                one = one._replace(severity=Severity.NOTE, advice=_MEANT)
        elif one.what == _SAME_LABELS:
            if is_meant:
                more = _KEPT if is_kept and not changes else _WHOLE if is_whole else ""
                one = one._replace(severity=Severity.NOTE, advice=_MEANT if more else one.advice)
            if self._are_of_episode(lane):
                one = one._replace(severity=Severity.NOTE, advice=_EPISODE)
        elif one.what.startswith(_ONE_CLASS):
            one = one._replace(advice=_SHUFFLE)
            if self._are_ranked(lane):
                one, more = one._replace(severity=Severity.NOTE), _RANKED
            elif one.what == _ONE_CLASS and root is not None and root.has_many_labels:
                one, more = one._replace(severity=Severity.NOTE, advice=_DOMAIN), _OF_SEVERAL
        return one._replace(what=one.what + more)

    def _in_order(self) -> Iterator[Finding]:
        """Report, on rank 0, batches that come in the same order in each epoch. A shorter cycle is another finding."""
        for lane, pieces in self._courses.items():
            steps, hashes = (np.concatenate(some) for some in zip(*pieces, strict=True))
            earlier = np.flatnonzero(hashes[:-1] == hashes[-1])
            if not len(earlier) or len(steps) != steps[-1] - steps[0] + 1 or self._alike.of(lane):
                continue
            period = len(hashes) - 1 - int(earlier[-1])
            others = np.flatnonzero(hashes[period:] != hashes[:-period])
            first = period + (int(others[-1]) + 1 if len(others) else 0)
            if period > self.thresholds["period"] and len(hashes) - first >= max(period, self.thresholds["repeats"]):
                what = f"the batches come in the same order again in each epoch of {period} steps"
                since, num = int(steps[first]), len(hashes) - first
                one = self._in_a_row(lane, int(steps[-1]), what, num, "repeats", since)
                yield one._replace(severity=Severity.NOTE, advice=_IN_ORDER)

    def _often_repeated(self) -> Iterator[Finding]:
        """Report batches that are those of the record before in about half of the records or more, but not in all."""
        again = {lane for lane, one in self._held if one.what.startswith(_REPEATS)}
        for lane in self._courses.keys() - again:
            num, num_new = self._num_repeated.of(lane), self._num_new.of(lane)
            share = num / (num + num_new)
            if num >= self.thresholds["repeats"] and share >= _OFTEN and not self._alike.of(lane):
                what = f"{_REPEATS}the record before in {share:.0%} of the records"
                step = int(self._courses[lane][-1][0][-1])
                one = self.finding(lane, step, what, "records", num, self.thresholds["repeats"])
                yield one._replace(severity=Severity.NOTE, advice=_WORKERS)

    def _sorted(self) -> Iterator[tuple[int, Finding]]:
        """Yield labels that are sorted: most batches have one class, which is another one after some batches."""
        for lane, (first, pieces) in self._classes.items():
            classes = np.concatenate(pieces)
            ends = np.flatnonzero(np.diff(np.nan_to_num(classes, nan=-1.0), append=-2.0))
            lengths = np.diff(ends, prepend=-1)
            filled = classes[ends][(lengths >= self.thresholds["records"]) & ~np.isnan(classes[ends])]
            share = 1 - float(np.isnan(classes).mean())
            if len(classes) >= self.thresholds["repeats"] and share >= _MOST and len(set(filled.tolist())) > 1:
                what = f"the samples are sorted: most batches ({share:.0%}) have labels of one class alone"
                one = self.finding(lane, first + len(classes) - 1, what, "", 0.0, 0.0, since=first)
                yield lane, one._replace(advice=_SHUFFLE)

    def _is_shuffled(self, lane: int, since: int) -> bool:
        """Return whether all records from a step on had the elements of the record before in another order."""
        return self._reordered.of(lane) > since and not self._unmoved.of(lane) >= since

    def _are_of_episode(self, lane: int) -> bool:
        """Return whether labels have each class equally often, and no module scores these classes.

        In the episodes of few-shot learning, distances between outputs score the classes.
        """
        num_scores = self._balanced.of(lane) * math.prod(self.catalog.about_of(lane).shape)
        shapes = self._shapes(self.catalog.key_of(lane).root, "output").values()
        return num_scores > 0 and all(math.prod(shape) != num_scores for shape in shapes)

    def _shapes(self, root: str, site: str) -> dict[tuple[str, str], tuple[int, ...]]:
        """Return the shapes of outputs or of their gradients in training, by module path and name."""
        about = zip(self.catalog.series, self.catalog.about, strict=True)
        known = {key: one.shape for key, one in about if (key.root, key.site, key.mode) == (root, site, "train")}
        return {(key.module_path, key.name): shape for key, shape in known.items() if shape}

    def _are_ranked(self, lane: int) -> bool:
        """Return whether a model scores or encodes several candidates for each label, so that labels are no classes."""
        root, labels = self.catalog.key_of(lane).root, self.catalog.about_of(lane)
        outputs, gradients = self._shapes(root, "output"), self._shapes(root, "grad_output")
        num, scores = math.prod(labels.shape), {math.prod(shape) for shape in outputs.values() if shape[-1] == 1}
        of_root = {shape for (path, _), shape in outputs.items() if not path}
        is_scored = bool(of_root) and all(num < math.prod(shape) in scores for shape in of_root)
        # If a module is called twice, the first output and the first gradient are those of two calls.
        both = ((at[0], *sorted((shape, gradients.get(at, shape)), key=len)) for at, shape in outputs.items())
        is_encoded = any(
            one == (num, *many[2:]) and many[0] == num and (not path or (num, many[1]) in of_root)
            for path, one, many in both
            if len(one) < len(many)
        )
        return "int" in labels.dtype and (is_scored or is_encoded)

    def _in_a_row(self, lane: int, step: int, what: str, num: int, limit: str, since: int | None) -> Finding:
        return self.finding(lane, step, what, "records in a row", num, self.thresholds[limit], since=since)

    def _shared(self, step: int, lanes: Integers, totals: Integers) -> Iterator[Finding]:
        order = np.argsort(totals, kind="stable")
        parts = self.catalog.part_of[lanes]
        going_on = {}
        for index in np.flatnonzero((np.diff(totals[order]) == 0) & (np.diff(parts[order]) != 0)).tolist():
            first, second = sorted((int(lanes[order[index]]), int(lanes[order[index + 1]])))
            before, since = self._same.get((first, second), (0, step))
            num = before + 1
            going_on[first, second] = num, since
            if num >= self.thresholds["records"] and second not in self._reported:
                self._reported.add(second)
                what = f"{ONE_BATCH} {int(self.catalog.rank_of[first])}"
                yield self._in_a_row(second, step, what, num, "records", since)
        self._same = going_on

    def _judge_repeats(self, steps: Integers, lanes: Integers, totals: Integers) -> None:
        order = np.argsort(lanes, kind="stable")
        steps, lanes = steps[order], lanes[order]
        hashes = as_exact_floats(totals[order].view(np.uint64))
        was, period = hashes, np.zeros(len(hashes), np.int64)
        for back, memory in enumerate(self._before, 1):
            was = previous(lanes, was.copy(), memory)
            period = np.where((period == 0) & (was == hashes), back, period)
        for lane in np.unique(lanes[self.catalog.rank_of[lanes] <= 0]).tolist():
            self._courses.setdefault(lane, []).append((steps[lanes == lane], hashes[lanes == lane]))
        self._num_new.sums(lanes, (period != 1).astype(np.float64))
        self._num_repeated.sums(lanes, (period == 1).astype(np.float64))
        for index, num, since in self._repeats.reached(lanes, steps, period > 0, self.thresholds["repeats"]):
            what = f"{_REPEATS}{counted(int(period[index]), 'record')} before, again and again"
            lane = int(lanes[index])
            self._held.append((lane, self._in_a_row(lane, int(steps[index]), what, num, "repeats", since)))

    def _emptied(self, rows: Rows) -> Iterator[Finding]:
        """Report inputs that are all zeros, if an input had other values before, or has others on another rank."""
        has_values = (np.nan_to_num(rows["l2"], nan=1.0) != 0) | (rows["nan_count"] + rows["inf_count"] > 0)
        began(rows.lanes[has_values], rows.steps[has_values].astype(np.float64), self._had_values)
        ids, _ = grouped(rows.series, rows.steps)
        is_elsewhere = np.bincount(ids, has_values)[ids] > 0
        is_empty = ~has_values & (rows["numel"] >= _LEAST_ELEMENTS)
        is_empty &= is_elsewhere | (self._had_values[rows.lanes] < rows.steps)
        what = "all elements of the input are zero"
        for index, num, since in self._empty.reached(rows.lanes, rows.steps, is_empty, self.thresholds["records"]):
            yield self._in_a_row(int(rows.lanes[index]), int(rows.steps[index]), what, num, "records", since)

    def _leapt(self, rows: Rows) -> Iterator[Finding]:
        """Report a batch that is far larger than all batches before. Norms may hide it from the loss."""
        rms = rows.rms
        is_known = np.isfinite(rms) & (rms > 0) & rows.are_float()
        rows, sizes = rows.take(is_known), np.log(rms[is_known])
        lanes, is_first, is_last = rows.lanes, begins(rows.lanes), ends(rows.lanes)
        groups = np.cumsum(is_first) - 1
        # The sizes of one lane, raised above those of the lane before, make one course of maxima of all lanes.
        most = np.maximum.accumulate(sizes + _APART * groups) - _APART * groups
        before = np.fmax(np.where(is_first, np.nan, np.roll(most, 1)), self._most[lanes])
        num = self._num_sizes[lanes] + np.arange(len(rows)) - np.flatnonzero(is_first)[groups]
        for at in np.flatnonzero(num < self.thresholds["known"]).tolist():
            self._first_sizes.setdefault(int(lanes[at]), []).append((int(rows.steps[at]), float(sizes[at])))
        self._num_sizes[lanes[is_last]] = num[is_last] + 1
        self._most[lanes[is_last]] = np.fmax(most, self._most[lanes])[is_last]
        is_far = (num >= self.thresholds["known"]) & (sizes - before > math.log(self.thresholds["leap"]))
        for index in np.flatnonzero(is_far).tolist():
            lane, step, times = int(lanes[index]), int(rows.steps[index]), math.exp(sizes[index] - before[index])
            one = self.finding(lane, step, _LARGER, "times the largest", times, self.thresholds["leap"])
            yield one._replace(advice=_LOOK_AT_IT)

    def _large_at_first(self) -> Iterator[Finding]:
        """Report the first of a few batches at the beginning that are far larger than most of them."""
        for lane, seen in self._first_sizes.items():
            steps, sizes = np.array([step for step, _ in seen]), np.array([size for _, size in seen])
            above = sizes - np.median(sizes)
            is_far = above > math.log(self.thresholds["leap"])
            if len(seen) >= self.thresholds["known"] and 0 < is_far.sum() <= _FEW * len(seen):
                at, limit = int(np.argmax(is_far)), self.thresholds["leap"]
                one = self.finding(
                    lane, int(steps[at]), _LARGER_AT_FIRST, "times the median", math.exp(above[at]), limit
                )
                yield one._replace(advice=_LOOK_AT_IT)

    def _judge_size(self, rows: Rows, *, is_label: bool) -> None:
        """Look for a first argument that is far larger, smaller or more even than layers expect, but for norms.

        Labels are expected to be not far from zero for their spread. A last layer has to learn their mean first.
        """
        # A critic gets real and made samples: the largest call of a step counts.
        order = np.lexsort((np.nan_to_num(rows.rms), rows.steps, rows.lanes))
        rows = rows.take(order[ends(rows.lanes[order] * MAX_STEPS + rows.steps[order])])
        rms, limit, std, least = rows.rms, self.thresholds["size"], rows["std"], self.thresholds["tiny"]
        # Without a wrapper, a later rank may be a later stage of a pipeline.
        is_parallel = rows.where("parallel", lambda key: key.root in self.catalog.parallel_roots)
        is_tiny = (rows["absmax"] < least) | (std < least * np.abs(rows["mean"]))
        is_far = (rms > limit) | is_tiny
        if is_label:
            is_tiny = std < self.thresholds["spread"] * np.abs(rows["mean"])
            is_far = is_tiny & (np.abs(rows["mean"]) > limit)
        is_far &= rows.are_float() & (std > 0) & (is_parallel | (rows.ranks <= 0))
        for index, _, since in self._sizes.reached(rows.lanes, rows.steps, is_far, self.thresholds["records"]):
            lane, step = int(rows.lanes[index]), int(rows.steps[index])
            of_root = (one for one in self.catalog.series if one.root == self.catalog.key_of(lane).root)
            first = next((one for one in of_root if one.site == "output" and one.module_path), None)
            if is_label or first is None or "norm" not in self.catalog.class_of(first).lower():
                words = _LABELS_SIZE if is_label else _INPUT_SIZE
                what = words.format(*(number(float(rows[name][index])) for name in ("mean", "std")))
                of_size = ("", 0.0, 0.0) if is_tiny[index] else ("root mean square", float(rms[index]), limit)
                one = self.finding(lane, step, what, *of_size, Severity.NOTE, since)
                advice = _NORMALISE_LABELS if is_label else _NORMALISE
                one, series = one._replace(advice=advice), int(rows.series[index])
                known = self._not_normalised.get(series, one)
                self._not_normalised[series] = min(known, one, key=lambda some: (some.first_step, some.ranks))

    def _note_order(self, rows: Rows) -> None:
        hashes, sizes = rows["fingerprint.hash"], _sizes(rows)
        is_moved = hashes != previous(rows.lanes, hashes, self._last_order)
        is_same = sizes == previous(rows.lanes, sizes, self._last_l2)
        for memory, flags in ((self._reordered, is_moved & is_same), (self._unmoved, ~is_moved)):
            memory[rows.lanes[flags]] = rows.steps[flags].astype(np.float64)
        is_other = is_same & (rows["min"] != previous(rows.lanes, rows["min"], self._last_least))
        self._alike[rows.lanes[is_other]] = 1.0

    def _beyond_bounds(self, rows: Rows) -> Iterator[Finding]:
        """Report labels that an output with bounds cannot reach, and labels that are no probabilities."""
        functions = [self._labels_of(key) if key.name == sites.LABELS else "" for key in self.catalog.series]
        parts = [next((part for part in _BOUNDS if part in one), "") for one in functions]
        least, most = np.array([_BOUNDS.get(part, _NO_BOUNDS)[:2] for part in parts])[rows.series].T
        by_element = np.array([one.endswith(" by element") for one in functions], np.bool_)[rows.series]
        low, high = rows["min"], rows["max"]
        # A program that takes the mean itself may leave out labels such as -1.
        is_low = (low < least - np.maximum(_OVERSHOOT, _FAR_BELOW * rows["absmax"])) & ~by_element
        is_beyond = is_low | (high > most + _OVERSHOOT)
        for index, _, _ in self._out_of_range.reached(rows.lanes, rows.steps, is_beyond, 1):
            lane, step, part = int(rows.lanes[index]), int(rows.steps[index]), parts[int(rows.series[index])]
            what = _BEYOND.format(number(float(low[index])), number(float(high[index])), _BOUNDS[part][2])
            severity = Severity.NOTE if by_element[index] else self.severity
            yield self.finding(lane, step, what, "", 0.0, 0.0, severity)._replace(advice=_BOUNDS[part][3])

    def _labels_of(self, key: SeriesKey) -> str:
        root = self.catalog.modules.get((key.root, ""))
        return "" if root is None else root.labels_of

    def _judge_labels(self, rows: Rows) -> None:
        """Look for labels, of several classes, that are those of the record before. The probe has their l2 alone."""
        sizes = _sizes(rows)
        with np.errstate(all="ignore"):
            roots, numel = sizes / np.sqrt(rows["numel"]), rows["numel"]
            distance = (rows["max"] - rows["min"]) / (numel - 1)
            is_even = np.abs(12 * rows["std"] ** 2 / (numel + 1) / (numel - 1) - distance**2) < 1e-6 * distance**2
        is_float, is_told = rows.are_float(), rows["std"] != 0
        is_mixed = np.where(is_float, rows["std"] > 0, np.abs(roots - np.round(roots)) > 1e-6 * roots)
        of_classes = ~is_float & (numel >= _LEAST_ELEMENTS)
        for lane in np.unique(rows.lanes[of_classes]).tolist():
            chosen = of_classes & (rows.lanes == lane)
            known = self._classes.setdefault(lane, (int(rows.steps[chosen][0]), []))
            known[1].append(np.where(is_mixed, np.nan, np.round(roots))[chosen])
        self._mixed[rows.lanes[is_mixed]] = rows.steps[is_mixed].astype(np.float64)
        self._numbered[rows.lanes[distance >= 0]] = (is_even & (distance >= 1))[distance >= 0].astype(np.float64)
        self._balanced[rows.lanes[distance >= 0]] = _balanced(rows)[distance >= 0]
        is_same = sizes == previous(rows.lanes, sizes, self._last)
        self._num_new.sums(rows.lanes, (~is_same).astype(np.float64))
        is_same &= is_mixed | (is_float & is_told & (sizes > 0))
        ids, firsts = grouped(rows.lanes, rows.steps)  # LBFGS calls a model with one batch many times a step
        are_same = np.bincount(ids, ~is_same, len(firsts)) == 0
        self._hold(rows.take(firsts), self._constant_labels, are_same, np.full(len(firsts), _SAME_LABELS))

    def _judge_flat(self, rows: Rows) -> None:
        is_label = rows.where("labels", holds_labels)
        is_judged = is_label | are_first_arguments(rows)
        is_masked = is_label & _are_of_one_class(rows)
        is_ignored = (rows["max"] == IGNORED) & ~rows.are_float()
        is_flat = ((rows["min"] == rows["max"]) & is_judged & (rows["numel"] >= _LEAST_ELEMENTS)) | is_masked
        of_masked = f"{_ONE_CLASS}, except labels {IGNORED}, which the loss ignores"
        of_label = np.where(is_ignored, ALL_IGNORED, _ONE_CLASS)
        what = np.where(is_label, np.where(is_masked, of_masked, of_label), "all elements of the input are equal")
        self._hold(rows, self._flat, is_flat, what)

    def _hold(self, rows: Rows, streaks: Streaks, flags: Flags, what: npt.NDArray[np.str_]) -> None:
        is_note = rows.where("made", lambda key: key.name == sites.LABELS) & rows.are_float()
        is_note |= ~rows.where("labels", holds_labels) & ~rows.are_float()  # kinds or classes may be of one kind
        for index, num, since in streaks.reached(rows.lanes, rows.steps, flags, self.thresholds["repeats"]):
            lane = int(rows.lanes[index])
            found = self._in_a_row(lane, int(rows.steps[index]), str(what[index]), num, "repeats", since)
            # The targets of two nets that train against each other are of one value, on purpose.
            self._held.append((lane, found._replace(severity=Severity.NOTE) if is_note[index] else found))


class EmptyBatch(Data):
    """The part of the rule `data` that runs in training: inputs that become all zeros, or far larger than before."""

    def add(self, rows: Rows) -> Iterator[Finding]:
        firsts = rows.take(are_first_arguments(rows)).by_lane()
        yield from self._emptied(firsts)
        yield from self._leapt(firsts)


def _are_of_one_class(rows: Rows) -> Flags:
    """Return, for each row of labels, whether all labels that the loss does not ignore are equal.

    Only two different elements, `low` and `high`, have a mean square of (low + high) mean - low high.
    """
    low, high, mean, numel = rows["min"], rows["max"], rows["mean"], rows["numel"]
    with np.errstate(all="ignore"):
        is_of_two = np.abs(rows["l2"] ** 2 / numel - (low + high) * mean + low * high) <= 1e-9 * low * low
        num_high = np.round(numel * (mean - low) / (high - low))
    return np.asarray((low == IGNORED) & (high >= 0) & is_of_two & (num_high >= _LEAST_ELEMENTS))


def _balanced(rows: Rows) -> Floats:
    """Return the number k of classes for each row of labels whose statistics are those of 0 to k - 1 equally often.

    For other rows, return 0.
    """
    num = rows["max"] + 1
    with np.errstate(all="ignore"):
        is_even = np.abs(12 * rows["std"] ** 2 / (num**2 - 1) - 1) < 1e-6
        is_even &= (np.abs(2 * rows["mean"] - num + 1) < 1e-6 * num) & (np.mod(rows["numel"], num) == 0)
    return np.where(is_even & (rows["min"] == 0) & (num < rows["numel"]) & ~rows.are_float(), num, 0.0)


def _sizes(rows: Rows) -> Floats:
    return rows["l2"].astype(np.float32).astype(np.float64)  # the probe has only the digits of a float32


def _tells_apart(rows: Rows) -> Flags:
    """Return, for each row, whether its statistics can tell its batch from another batch.

    Batches of one-hot rows, of signs, or of rows of length 1 have equal l2: numel over l2 squared is a whole number.
    """
    with np.errstate(all="ignore"):
        ratio = np.nan_to_num(rows["numel"] / rows["l2"] ** 2, nan=1.0, posinf=0.0)  # complex numbers have no l2
    return (ratio < 0.5) | (np.abs(ratio - np.round(ratio)) > 1e-6 * ratio)


def _batches(rows: Rows, hashes: npt.NDArray[np.uint64]) -> tuple[Integers, Integers, Integers]:
    samples, firsts = grouped(rows.steps, rows.ranks)
    totals = np.zeros(len(firsts), np.int64)
    with np.errstate(over="ignore"):
        np.add.at(totals, samples, (hashes ^ rows.series.astype(np.uint64)).view(np.int64))
    return rows.steps[firsts], rows.lanes[firsts], totals
