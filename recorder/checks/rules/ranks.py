"""Rules that compare ranks: one that is unlike its peers, a batch that two of them have, running statistics apart."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

import numpy as np

from ..rows import Catalog, Flags, Floats, Integers, Memory, Rows, SeriesKey, grouped, previous, streaks
from ..rule import Finding, Rule, Setting, StreakRule

_DATA = ("mean", "std", "absmax", "l2")
"""Statistics of which two different batches hardly ever have all alike."""
_PRIMES = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93], np.uint64)
_LEAST_SPREAD = 0.01
"""Least spread of logarithms: peers that agree better than to 1 % do so by chance."""


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
        Setting(name="records", default=3, unit="records", source="calibrated on sound trainings"),
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
        return key.site in ("output", "grad_output") or key.is_loss or (key.site == "grad" and key.scope == "local")

    def judge(self, rows: Rows) -> tuple[Flags, Floats]:
        """By the distance from the median of the peers, in units of how far they usually are from it."""
        peers = self.catalog.peers_of[rows.lanes]
        ids, firsts = grouped(rows.series, peers, rows.steps)
        num_ranks = _distinct(ids, rows.ranks, len(firsts))
        self._most_ranks = max(self._most_ranks, int(num_ranks.max(initial=0)))
        z = np.zeros(len(rows))
        (known,) = np.nonzero((num_ranks >= self.thresholds["ranks"])[ids] & (np.nan_to_num(rows.rms) > 0))
        if not len(known):
            return np.zeros(len(rows), np.bool_), z
        logs, of = np.log(rows.rms[known]), grouped(ids[known])[0]
        away = logs - _medians(of, logs)[of]
        usual = np.maximum(1.4826 * _medians(of, np.abs(away)), _LEAST_SPREAD)
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


class RepeatedBatch(Rule):
    """Two data-parallel ranks that get the same batch, step after step."""

    name: ClassVar[str] = "repeated_batch"
    sentence: ClassVar[str] = "Two data-parallel ranks get the same batch, step after step."
    sites: ClassVar[tuple[str, ...]] = ("input",)
    columns: ClassVar[tuple[str, ...]] = _DATA
    settings: ClassVar[tuple[Setting, ...]] = (
        Setting(name="records", default=3, unit="records", source="a sampler that is left out repeats every batch"),
    )
    advice: ClassVar[str] = "give the data loader a DistributedSampler, or another seed for each rank"

    def __init__(self, catalog: Catalog, thresholds: Mapping[str, float] | None = None) -> None:
        super().__init__(catalog, thresholds)
        self._num: dict[tuple[int, int], int] = {}
        """By lane and by the lane whose batch it repeats, in how many records in a row."""
        self._said: set[int] = set()
        self._num_parts = 0

    def wants(self, key: SeriesKey) -> bool:
        """What the whole model is trained with. In a validation all ranks may well look at the same samples."""
        return key.site == "input" and not key.module_path and key.mode == "train"

    def add(self, rows: Rows) -> Iterator[Finding]:
        """Compare what ranks were called with, step by step."""
        parts = self.catalog.part_of[rows.lanes]
        self._num_parts = max(self._num_parts, len(np.unique(parts)))
        if self._num_parts < 2:
            return
        bits = np.array([rows[name].view(np.uint64) for name in _DATA]) * _PRIMES[:, None]
        marks = (bits.sum(axis=0) ^ (rows.series.astype(np.uint64) * _PRIMES[0])).view(np.int64)
        samples, firsts = grouped(rows.steps, rows.ranks)
        totals = np.zeros(len(firsts), np.int64)
        with np.errstate(over="ignore"):
            np.add.at(totals, samples, marks)
        steps, owners = rows.steps[firsts], rows.lanes[firsts]
        for at in np.split(np.arange(len(firsts)), np.flatnonzero(np.diff(steps)) + 1):
            yield from self._step(int(steps[at[0]]), owners[at], parts[firsts[at]], totals[at])

    def _step(self, step: int, lanes: Integers, parts: Integers, totals: Integers) -> Iterator[Finding]:
        order = np.argsort(totals, kind="stable")
        same = np.flatnonzero((np.diff(totals[order]) == 0) & (np.diff(parts[order]) != 0))
        going_on = {}
        for place in same.tolist():
            first, second = sorted((int(lanes[order[place]]), int(lanes[order[place + 1]])))
            going_on[first, second] = num = self._num.get((first, second), 0) + 1
            if num >= self.thresholds["records"] and second not in self._said:
                self._said.add(second)
                rank = int(self.catalog.rank_of[first])
                what = f"the batch is that of rank {rank}"
                limit = self.thresholds["records"]
                yield self.finding(second, step, what, "records in a row", num, limit)
        self._num = going_on

    def finish(self) -> Iterator[Finding]:
        """Say where there is nobody to compare with."""
        if self._num_parts < 2:
            self.why_not_judged = "it needs two ranks with batches of their own"
        yield from ()


class RunningStatistics(StreakRule):
    """Running statistics of a batch norm that leap from record to record, long after the beginning."""

    name: ClassVar[str] = "running_statistics"
    sentence: ClassVar[str] = "The running variance of a batch norm goes on leaping long after the beginning."
    sites: ClassVar[tuple[str, ...]] = ("buffer",)
    columns: ClassVar[tuple[str, ...]] = ("mean",)
    settings: ClassVar[tuple[Setting, ...]] = (
        Setting(name="drift", default=0.5, unit="of the value before", source="calibrated on sound trainings"),
        Setting(name="after", default=20, unit="records", source="momentum 0.1 forgets the beginning by then"),
        Setting(name="records", default=3, unit="records", source="calibrated on sound trainings"),
    )  # fmt: skip
    what: ClassVar[str] = "the running variance leaps from record to record"
    measure: ClassVar[str] = "change from the record before"
    limit: ClassVar[str] = "drift"
    advice: ClassVar[str] = "evaluation will not be like training: look at the inputs of this norm, and at its momentum"

    def __init__(self, catalog: Catalog, thresholds: Mapping[str, float] | None = None) -> None:
        super().__init__(catalog, thresholds)
        self._value, self._num = Memory(), Memory(0.0)

    def wants(self, key: SeriesKey) -> bool:
        """The running variance."""
        return key.site == "buffer" and key.name.endswith("running_var")

    def judge(self, rows: Rows) -> tuple[Flags, Floats]:
        """By the change of its mean, once there were enough records."""
        values = rows["mean"]
        before = previous(rows.lanes, values, self._value)
        num = streaks(rows.lanes, np.ones(len(rows), np.bool_), self._num)
        with np.errstate(all="ignore"):
            change = np.nan_to_num(np.abs(values - before) / np.minimum(np.abs(values), np.abs(before)))
        return (change > self.thresholds["drift"]) & (num > self.thresholds["after"]), change


def _distinct(ids: Integers, ranks: Integers, num_groups: int) -> Integers:
    """How many ranks each group has."""
    _, firsts = grouped(ids, ranks)
    return np.bincount(ids[firsts], minlength=num_groups)


def _medians(groups: Integers, values: Floats) -> Floats:
    """The median of each group, the lower of the two in the middle."""
    order = np.lexsort((values, groups))
    counts = np.bincount(groups)
    starts = np.cumsum(counts) - counts
    return np.asarray(values[order][starts + (counts - 1) // 2])
