"""The rule on an evaluation whose outputs, or whose input, are unlike those of the training."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...system.text import number
from ..given import are_first_arguments, holds_labels
from ..rows import MAX_STEPS, Flags, Floats, Memory, Rows, SeriesKey, ends, grouped
from ..rule import CALIBRATED, CheckRule, Finding, PartsRule, Setting, Severity, StreakRule

_LEAST_ELEMENTS = 8
_ENOUGH, _CERTAIN = 3, 5
"""The number of records of each mode, and the standard errors of their means, from which on inputs are compared."""


_PREPARE = "prepare the samples of the evaluation as those of the training; augmentation may differ on purpose"


class _Evaluation(CheckRule):
    name = "evaluation_output"
    sentence = "An output in evaluation has another size than in training, or its input is another."
    sites, columns, reads_probe = ("output", "input"), ("sum_sq", "numel"), True
    more_columns = ("mean", "std")
    settings = (
        Setting("ratio", 30, "times", CALIBRATED),
        Setting("records", 2, "evaluations", CALIBRATED),
        Setting("shift", 0.5, "standard deviations of the input in training", "batches of one set are nearer"),
        Setting("scale", 2, "times the standard deviation of the input in training", "mixed samples have 0.7"),
    )
    needs = "needs outputs of an evaluation and of the training"
    advice = "look at the running statistics of norms, and at operations that the module does in only one mode"


class _OutputApart(_Evaluation, StreakRule):
    """An output in evaluation that is far larger or smaller than the same output in training.

    Only the first such module of a step is reported, because the modules after it take its output.
    """

    what = "the output in evaluation has another size than in training"
    of_input = "the input in evaluation has another size than in training"
    measure, limit = "larger over smaller root mean square", "ratio"
    may_recover = True

    def set_up(self) -> None:
        self._trained = Memory()
        """By output and rank, the output's last root mean square in training."""
        self._lane = Memory()
        """By output and rank in evaluation, the lane (index) of the output in training; NaN if there is none so far."""
        self._has_evaluation = False

    def judge(self, rows: Rows) -> tuple[Flags, Floats]:
        rms = rows.rms
        is_trained = rows.where("trained", lambda key: key.mode == "train")
        lanes = self._lane[rows.lanes]
        for lane in np.unique(rows.lanes[np.isnan(lanes) & ~is_trained]).tolist():
            key = self.catalog.key_of(lane)._replace(mode="train")
            trained = self.catalog.find(key, int(self.catalog.rank_of[lane]))
            if trained is not None:
                self._lane[np.array([lane])] = float(trained)
        self._has_evaluation |= not is_trained.all()
        known = np.nan_to_num(self._lane[rows.lanes], nan=-1).astype(np.int64)
        # A model may return its loss in training and logits in an evaluation, and Lightning's root both in training.
        is_usual = is_trained & (rms > 0) & (rows["numel"] > 1)
        trainings, sizes = rows.take(is_usual), rms[is_usual]
        keys = trainings.lanes * MAX_STEPS + trainings.steps
        # A record in training of the same step, or of one before: the last of these rows may be of a later one.
        latest = np.searchsorted(keys, known * MAX_STEPS + rows.steps, side="right") - 1
        is_here = np.r_[trainings.lanes, -1][latest] == known
        usual = np.where(is_here, np.r_[sizes, np.nan][latest], self._trained[np.maximum(known, 0)])
        self._trained[trainings.lanes[ends(trainings.lanes)]] = sizes[ends(trainings.lanes)]
        with np.errstate(all="ignore"):
            times = rms / np.where(known >= 0, usual, np.nan)
            times = np.nan_to_num(np.maximum(times, 1 / times), posinf=0.0)
        is_far = ~is_trained & (times > self.thresholds["ratio"]) & (rows["numel"] >= _LEAST_ELEMENTS)
        at = np.flatnonzero(is_far)
        if len(at):  # lanes are numbered in the order in which values first appear
            ids, _ = grouped(rows.ranks[at], rows.steps[at])
            first = np.full(int(ids.max()) + 1, np.iinfo(np.int64).max)
            np.minimum.at(first, ids, rows.lanes[at])
            is_far[at] = rows.lanes[at] == first[ids]
        return is_far, times

    def finding(self, lane: int, step: int, what: str, *size: Any) -> Finding:
        """Return a finding. What is wrong with an input is wrong with the samples, and not with the modules."""
        one = super().finding(lane, step, what, *size)
        return one._replace(what=self.of_input, advice=_PREPARE) if one.site == "input" else one

    def finish(self) -> Iterable[Finding]:
        yield from super().finish()
        if not self._has_evaluation:
            self.why_not_judged = self.needs


@dataclass(eq=False, slots=True)
class _Mean:
    """The means and standard deviations of the records of an input, added up."""

    num: int = 0
    mean: float = 0.0
    square: float = 0.0
    """The sum of the squares of the means."""
    std: float = 0.0

    def add(self, means: Floats, stds: Floats) -> None:
        self.num, self.mean = self.num + len(means), self.mean + float(means.sum())
        self.square, self.std = self.square + float((means**2).sum()), self.std + float(stds.sum())

    @property
    def error(self) -> float:
        """The standard error of the mean."""
        mean = self.mean / self.num
        return math.sqrt(max(self.square / self.num - mean * mean, 0.0) / self.num)


class _InputApart(_Evaluation):
    """A model's first argument that has another mean or scale in evaluation: it is prepared in another way."""

    advice = _PREPARE

    def set_up(self) -> None:
        self._seen: dict[tuple[str, str], dict[bool, _Mean]] = {}
        """By model and argument, what its first rank was given in evaluation and in training."""
        self._lanes: dict[tuple[str, str], tuple[int, int, int]] = {}
        """By model and argument: the lane and the last step in evaluation, and the rank."""

    def wants(self, key: SeriesKey) -> bool:
        return key.site == "input" and not key.module_path and not holds_labels(key)

    def add(self, rows: Rows) -> Iterator[Finding]:
        rows = rows.without_probe()
        are_first_arguments(rows)  # the catalog learns their names
        rows = rows.take(rows.are_float() & (rows["std"] > 0)).by_lane()
        for lane in np.unique(rows.lanes).tolist():
            key, rank, own = self.catalog.key_of(lane), int(self.catalog.rank_of[lane]), rows.lanes == lane
            given, is_trained = (key.root, key.name), key.mode == "train"
            known = self._lanes.setdefault(given, (lane, 0, rank))
            if known[2] == rank:
                self._seen.setdefault(given, {True: _Mean(), False: _Mean()})[is_trained].add(
                    rows["mean"][own], rows["std"][own]
                )
                if not is_trained:
                    self._lanes[given] = lane, int(rows.steps[own][-1]), rank
        return iter(())

    def finish(self) -> Iterator[Finding]:
        self.why_not_judged = self.needs
        for given, modes in self._seen.items():
            trained, evaluated = modes[True], modes[False]
            is_first = self.catalog.first_arguments.get(given[0], given[1]) == given[1]
            if not is_first or min(trained.num, evaluated.num) < _ENOUGH:
                continue
            self.why_not_judged = ""
            means = [one.mean / one.num for one in (evaluated, trained)]
            stds = [one.std / one.num for one in (evaluated, trained)]
            apart, scale = abs(means[0] - means[1]), max(stds[0] / stds[1], stds[1] / stds[0])
            is_sure = apart > _CERTAIN * math.hypot(trained.error, evaluated.error)
            is_shifted = is_sure and apart > self.thresholds["shift"] * stds[1]
            if is_shifted or scale > self.thresholds["scale"]:
                what = "the input in evaluation is unlike that in training: "
                what += "its mean is {} and its standard deviation {}, and {} and {} in training".format(
                    *(number(one) for pair in zip(means, stds, strict=True) for one in pair)
                )
                lane, step, _ = self._lanes[given]
                one = self.finding(lane, step, what, "", 0.0, 0.0, Severity.NOTE)
                yield one._replace(advice=self.advice)


class EvaluationOutput(_Evaluation, PartsRule):
    parts = (_OutputApart, _InputApart)

    def revised(self, one: Finding) -> Finding:
        return self._parts[0].revised(one)
