"""The rule on the running statistics of batch norms: variances that leap, or that are apart over ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from ..rows import Catalog, Flags, Floats, Memory, Rows, SeriesKey, grouped, previous, streaks
from ..rule import PartsRule, Rule, Setting, StreakRule
from .ranks import medians, num_distinct

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
