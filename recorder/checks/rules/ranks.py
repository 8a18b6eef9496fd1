"""Rules that compare ranks: outlying ranks, replicas that differ, and running statistics of batch norms."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar

import numpy as np

from ..rows import Catalog, Flags, Floats, Integers, Memory, Rows, SeriesKey, grouped, previous, streaks
from ..rule import Finding, PartsRule, Rule, Setting, Severity, StreakRule

_LEAST_SPREAD = 0.01
"""Least spread of logarithms: peers that agree better than to 1 % do so by chance."""


class Replica(Rule):
    """Parameters, gradients or optimizer state that ranks share, and that are not the same to the last bit."""

    name: ClassVar[str] = "replica"
    sentence: ClassVar[str] = "A parameter, a gradient or an optimizer state differs between ranks that share it."
    severity: ClassVar[Severity] = Severity.ERROR
    sites: ClassVar[tuple[str, ...]] = ("param", "grad", "optim", "buffer")
    columns: ClassVar[tuple[str, ...]] = ()
    needs: ClassVar[str] = "it needs parameters, gradients or optimizer states of several ranks"
    advice: ClassVar[str] = "find what one rank did without the others; `recorder first` shows what each rank holds"

    def add(self, rows: Rows) -> Iterable[Finding]:
        """Nothing: whoever feeds the rows compares them, because numbers do not tell whether bits are equal."""
        return ()

    def finish(self) -> Iterable[Finding]:
        """What the comparison found."""
        if self.replicas is None:
            self.why_not_judged = f"{self.needs}, and only the rows of a whole run were compared"
            return ()
        self.why_not_judged = self.replicas.why_not_compared
        return self.replicas.findings


class OutlierRank(StreakRule):
    """A rank whose values are unlike those of all its data-parallel peers."""

    name: ClassVar[str] = "outlier_rank"
    sentence: ClassVar[str] = (
        "One rank's activations, local gradients or loss are unlike those of its data-parallel peers."
    )
    sites: ClassVar[tuple[str, ...]] = ("output", "grad_output", "grad", "scalar")
    columns: ClassVar[tuple[str, ...]] = ("sum_sq", "numel")
    settings: ClassVar[tuple[Setting, ...]] = (
        Setting(name="z", default=8, unit="robust standard deviations", source="calibrated on sound trainings"),
        Setting(name="ratio", default=1.5, unit="times the median", source="calibrated on sound trainings"),
        Setting(name="ranks", default=4, unit="ranks", source="of fewer nobody can say which is the odd one"),
        Setting(name="records", default=8, unit="records", source="calibrated on sound trainings"),
    )  # fmt: skip
    what: ClassVar[str] = "the rank is unlike its data-parallel peers"
    measure: ClassVar[str] = "robust z"
    limit: ClassVar[str] = "z"
    advice: ClassVar[str] = "compare this rank's data, weights and hardware with those of another"

    def __init__(self, catalog: Catalog, thresholds: Mapping[str, float] | None = None) -> None:
        super().__init__(catalog, thresholds)
        self._most_ranks = 0

    def wants(self, key: SeriesKey) -> bool:
        """What differs over ranks as their batches do."""
        return key.differs_by_batch

    def judge(self, rows: Rows) -> tuple[Flags, Floats]:
        """By the distance from the median of the peers, in units of how far they usually are from it."""
        peers = self.catalog.peers_of[rows.lanes]
        ids, firsts = grouped(rows.series, peers, rows.steps)
        num_ranks = num_distinct(ids, rows.ranks, len(firsts))
        self._most_ranks = max(self._most_ranks, int(num_ranks.max(initial=0)))
        z = np.zeros(len(rows))
        (known,) = np.nonzero((num_ranks >= self.thresholds["ranks"])[ids] & (np.nan_to_num(rows.rms) > 0))
        if not len(known):
            return np.zeros(len(rows), np.bool_), z
        logs, of = np.log(rows.rms[known]), grouped(ids[known])[0]
        away = logs - medians(of, logs)[of]
        usual = np.maximum(1.4826 * medians(of, np.abs(away)), _LEAST_SPREAD)
        z[known] = np.abs(away) / usual[of]
        is_far = np.zeros(len(rows), np.bool_)
        is_far[known] = np.abs(away) > np.log(self.thresholds["ratio"])
        return is_far & (z > self.thresholds["z"]), z

    def finish(self) -> Iterator[Finding]:
        """Say where there were too few ranks."""
        yield from super().finish()
        if self._most_ranks < self.thresholds["ranks"]:
            self.why_not_judged = (
                f"it needs {self.thresholds['ranks']:.0f} data-parallel ranks, and there are {self._most_ranks}"
            )


def num_distinct(ids: Integers, ranks: Integers, num_groups: int) -> Integers:
    """How many ranks each group has."""
    _, firsts = grouped(ids, ranks)
    return np.bincount(ids[firsts], minlength=num_groups)


def medians(groups: Integers, values: Floats) -> Floats:
    """The median of each group, the lower of the two in the middle."""
    order = np.lexsort((values, groups))
    counts = np.bincount(groups)
    starts = np.cumsum(counts) - counts
    return np.asarray(values[order][starts + (counts - 1) // 2])


_AFTER = Setting(name="after", default=20, unit="records", source="momentum 0.1 forgets the beginning by then")
_RECORDS = Setting(name="records", default=3, unit="records", source="calibrated on sound trainings")
_DRIFT = Setting(name="drift", default=0.5, unit="of the value before", source="calibrated on sound trainings")
_RATIO = Setting(name="ratio", default=2, unit="times the median of ranks", source="calibrated on sound trainings")


class _Variance(Rule):
    """What both parts read."""

    name: ClassVar[str] = "running_statistics"
    sentence: ClassVar[str] = (
        "The running variance of a batch norm goes on leaping long after the beginning, or is apart over ranks."
    )
    sites: ClassVar[tuple[str, ...]] = ("buffer",)
    columns: ClassVar[tuple[str, ...]] = ("mean",)
    settings: ClassVar[tuple[Setting, ...]] = (_DRIFT, _RATIO, _AFTER, _RECORDS)
    advice: ClassVar[str] = "evaluation will not be like training: look at the inputs of this norm, and at its momentum"

    def __init__(self, catalog: Catalog, thresholds: Mapping[str, float] | None = None) -> None:
        super().__init__(catalog, thresholds)
        self._num = Memory(0.0)

    def wants(self, key: SeriesKey) -> bool:
        """The running variance."""
        return key.site == "buffer" and key.name.endswith("running_var")

    def _is_late(self, rows: Rows) -> Flags:
        num = streaks(rows.lanes, np.ones(len(rows), np.bool_), self._num)
        return np.asarray(num > self.thresholds["after"])


class _Leaping(_Variance, StreakRule):
    """A variance that leaps from record to record."""

    what: ClassVar[str] = "the running variance leaps from record to record"
    measure: ClassVar[str] = "change from the record before"
    limit: ClassVar[str] = "drift"

    def __init__(self, catalog: Catalog, thresholds: Mapping[str, float] | None = None) -> None:
        super().__init__(catalog, thresholds)
        self._value = Memory()

    def judge(self, rows: Rows) -> tuple[Flags, Floats]:
        """By the change of its mean, once there were enough records."""
        values = rows["mean"]
        before = previous(rows.lanes, values, self._value)
        with np.errstate(all="ignore"):
            change = np.nan_to_num(np.abs(values - before) / np.minimum(np.abs(values), np.abs(before)))
        return (change > self.thresholds["drift"]) & self._is_late(rows), change


class _Apart(_Variance, StreakRule):
    """A variance of one rank that is not that of the others."""

    what: ClassVar[str] = "the running variance is not that of the other ranks"
    measure: ClassVar[str] = "times the median of ranks, or the median over it"
    limit: ClassVar[str] = "ratio"

    def judge(self, rows: Rows) -> tuple[Flags, Floats]:
        """By the distance from the median of the ranks that hold this norm, once there were enough records."""
        is_late = self._is_late(rows)
        ratio = np.ones(len(rows))
        (known,) = np.nonzero(rows["mean"] > 0)
        if len(known):
            ids, firsts = grouped(rows.series[known], self.catalog.peers_of[rows.lanes[known]], rows.steps[known])
            logs = np.log(rows["mean"][known])
            is_compared = num_distinct(ids, rows.ranks[known], len(firsts))[ids] > 1
            ratio[known] = np.where(is_compared, np.exp(np.abs(logs - medians(ids, logs)[ids])), 1.0)
        return (ratio > self.thresholds["ratio"]) & is_late, ratio


class RunningStatistics(_Variance, PartsRule):
    """Running statistics of a batch norm by which evaluation will not be as training was."""

    parts: ClassVar[tuple[type[StreakRule], ...]] = (_Leaping, _Apart)
