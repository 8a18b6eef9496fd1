"""Rules that compare ranks: outlying ranks, replicas that differ, and running statistics of batch norms."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ..rows import Flags, Floats, Integers, Memory, Rows, SeriesKey, grouped, previous, streaks
from ..rule import CALIBRATED, Finding, PartsRule, Rule, Setting, Severity, StreakRule

_LEAST_DEVIATION = 0.01
"""Least standard deviation of logarithms: peers that agree to better than 1 % do so by chance."""


class Replica(Rule):
    """Parameters, gradients or optimizer state that ranks share, and that are not bitwise equal."""

    name = "replica"
    sentence = "A parameter, a gradient or an optimizer state differs between ranks that share it."
    severity = Severity.ERROR
    sites, columns = ("param", "grad", "optim", "buffer"), ()
    needs = "it needs parameters, gradients or optimizer states of several ranks"
    advice = "find what one rank did without the others; `recorder first` shows what each rank holds"

    def add(self, rows: Rows) -> Iterable[Finding]:
        """Find nothing: the caller compares the replicas, because numbers cannot show that bits are equal."""
        return ()

    def finish(self) -> Iterable[Finding]:
        if self.replicas is None:
            self.why_not_judged = f"{self.needs}, and only the rows of a whole run were compared"
            return ()
        self.why_not_judged = self.replicas.why_not_compared
        return self.replicas.findings


class OutlierRank(StreakRule):
    """A rank whose values are unlike those of all its data-parallel peers."""

    name = "outlier_rank"
    sentence = "One rank's activations, local gradients or loss are unlike those of its data-parallel peers."
    sites, columns = ("output", "grad_output", "grad", "scalar"), ("sum_sq", "numel")
    settings = (
        Setting("z", 8, "robust standard deviations", CALIBRATED),
        Setting("ratio", 1.5, "times the median", CALIBRATED),
        Setting("ranks", 4, "ranks", "of fewer nobody can say which is the odd one"),
        Setting("records", 8, "records", CALIBRATED),
    )
    what = "the rank is unlike its data-parallel peers"
    measure, limit = "robust z", "z"
    advice = "compare this rank's data, weights and hardware with those of another"

    def set_up(self) -> None:
        self._most_ranks = 0

    def wants(self, key: SeriesKey) -> bool:
        return key.differs_by_batch

    def judge(self, rows: Rows) -> tuple[Flags, Floats]:
        """By the distance from the median of the peers, in units of the peers' usual distance."""
        peers = self.catalog.peers_of[rows.lanes]
        ids, firsts = grouped(rows.series, peers, rows.steps)
        num_ranks = num_distinct(ids, rows.ranks, len(firsts))
        self._most_ranks = max(self._most_ranks, int(num_ranks.max(initial=0)))
        z, is_far = np.zeros(len(rows)), np.zeros(len(rows), np.bool_)
        (known,) = np.nonzero((num_ranks >= self.thresholds["ranks"])[ids] & (np.nan_to_num(rows.rms) > 0))
        if len(known):
            logs, groups = np.log(rows.rms[known]), grouped(ids[known])[0]
            away = np.abs(logs - medians(groups, logs)[groups])
            usual = np.maximum(1.4826 * medians(groups, away), _LEAST_DEVIATION)
            z[known] = away / usual[groups]
            is_far[known] = away > np.log(self.thresholds["ratio"])
        return is_far & (z > self.thresholds["z"]), z

    def finish(self) -> Iterable[Finding]:
        super().finish()
        if self._most_ranks < self.thresholds["ranks"]:
            needed = f"{self.thresholds['ranks']:.0f} data-parallel ranks"
            self.why_not_judged = f"it needs {needed}, and there are {self._most_ranks}"
        return ()


def num_distinct(ids: Integers, ranks: Integers, num_groups: int) -> Integers:
    """How many ranks each group has."""
    _, firsts = grouped(ids, ranks)
    return np.bincount(ids[firsts], minlength=num_groups)


def medians(groups: Integers, values: Floats) -> Floats:
    """The median of each group; of an even number of values the lower of the two in the middle."""
    order = np.lexsort((values, groups))
    counts = np.bincount(groups)
    starts = np.cumsum(counts) - counts
    return np.asarray(values[order][starts + (counts - 1) // 2])


class _Variance(Rule):
    """What the rule and its parts have in common."""

    name = "running_statistics"
    sentence = "The running variance of a batch norm goes on leaping long after the beginning, or is apart over ranks."
    sites, columns = ("buffer",), ("mean",)
    settings = (
        Setting("drift", 0.5, "of the value before", CALIBRATED),
        Setting("ratio", 2, "times the median of ranks", CALIBRATED),
        Setting("after", 20, "records", "momentum 0.1 forgets the beginning by then"),
        Setting("records", 3, "records", CALIBRATED),
    )
    advice = "evaluation will not be like training: look at the inputs of this norm, and at its momentum"

    def set_up(self) -> None:
        super().set_up()
        self._num, self._value = Memory(0.0), Memory()

    def wants(self, key: SeriesKey) -> bool:
        return key.site == "buffer" and key.name.endswith("running_var")

    def is_late(self, rows: Rows) -> Flags:
        num = streaks(rows.lanes, np.ones(len(rows), np.bool_), self._num)
        return np.asarray(num > self.thresholds["after"])


class _Leaping(_Variance, StreakRule):
    what = "the running variance leaps from record to record"
    measure, limit = "change from the record before", "drift"

    def judge(self, rows: Rows) -> tuple[Flags, Floats]:
        values = rows["mean"]
        before = previous(rows.lanes, values, self._value)
        with np.errstate(all="ignore"):
            change = np.nan_to_num(np.abs(values - before) / np.minimum(np.abs(values), np.abs(before)))
        return (change > self.thresholds["drift"]) & self.is_late(rows), change


class _Apart(_Variance, StreakRule):
    what = "the running variance is not that of the other ranks"
    measure, limit = "times the median of ranks, or the median over it", "ratio"

    def judge(self, rows: Rows) -> tuple[Flags, Floats]:
        is_late, ratio = self.is_late(rows), np.ones(len(rows))
        (known,) = np.nonzero(rows["mean"] > 0)
        if len(known):
            ids, firsts = grouped(rows.series[known], self.catalog.peers_of[rows.lanes[known]], rows.steps[known])
            logs = np.log(rows["mean"][known])
            is_compared = num_distinct(ids, rows.ranks[known], len(firsts))[ids] > 1
            ratio[known] = np.where(is_compared, np.exp(np.abs(logs - medians(ids, logs)[ids])), 1.0)
        return (ratio > self.thresholds["ratio"]) & is_late, ratio


class RunningStatistics(_Variance, PartsRule):
    """Running statistics of a batch norm with which evaluation will differ from training."""

    parts = (_Leaping, _Apart)
