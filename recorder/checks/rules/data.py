"""The rule on what a training is fed: batches that two ranks share or that come again, inputs and labels that stay."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import ClassVar

import numpy as np

from ..rows import Catalog, Integers, Memory, Rows, SeriesKey, Streaks, grouped, previous
from ..rule import Finding, Rule, Setting

_BATCH = ("mean", "std", "absmax", "l2")
"""Statistics of which two different batches hardly ever have all alike."""
_PRIMES = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93], np.uint64)
_LABELS = re.compile(r"(.*[._\]\[])?(labels?|targets?|y)[\]']*", re.IGNORECASE)
_LEAST_ELEMENTS = 8
"""The values of fewer may well be equal by chance."""


class Data(Rule):
    """Batches that cannot teach what they should: of two ranks alike, the same again and again, or all of one value."""

    name: ClassVar[str] = "data"
    sentence: ClassVar[str] = (
        "Two data-parallel ranks get the same batch, a batch comes again and again, or an input or the labels are "
        "constant."
    )
    sites: ClassVar[tuple[str, ...]] = ("input",)
    columns: ClassVar[tuple[str, ...]] = (*_BATCH, "min", "max")
    settings: ClassVar[tuple[Setting, ...]] = (
        Setting(name="records", default=3, unit="records", source="a sampler that is left out repeats every batch"),
        Setting(name="repeats", default=20, unit="records", source="calibrated on sound trainings"),
        Setting(name="period", default=4, unit="records", source="a shorter cycle is no training set"),
    )
    advice: ClassVar[str] = "look at the data loader: its sampler, its seed on each rank, and whether it moves on"

    def __init__(self, catalog: Catalog, thresholds: Mapping[str, float] | None = None) -> None:
        super().__init__(catalog, thresholds)
        self._same: dict[tuple[int, int], tuple[int, int]] = {}
        """By lane and by the lane whose batch it repeats, in how many records in a row, and since which step."""
        self._said: set[int] = set()
        self._before = [Memory() for _ in range(max(int(self.thresholds["period"]), 1))]
        """By the lane that stands for a rank, the marks of its last batches."""
        self._repeats = Streaks()
        self._still = _Still(catalog, self.thresholds["repeats"])

    def wants(self, key: SeriesKey) -> bool:
        """What the whole model is trained with. In a validation all ranks may well look at the same samples."""
        return key.site == "input" and not key.module_path and key.mode == "train"

    def add(self, rows: Rows) -> Iterator[Finding]:
        """Compare what ranks were called with, with each other and with what it was before."""
        bits = np.array([(rows[name] + 0.0).view(np.uint64) for name in _BATCH]) * _PRIMES[:, None]
        marks = (bits.sum(axis=0) ^ (rows.series.astype(np.uint64) * _PRIMES[0])).view(np.int64)
        samples, firsts = grouped(rows.steps, rows.ranks)
        totals = np.zeros(len(firsts), np.int64)
        with np.errstate(over="ignore"):
            np.add.at(totals, samples, marks)
        steps, owners, parts = rows.steps[firsts], rows.lanes[firsts], self.catalog.part_of[rows.lanes[firsts]]
        for at in np.split(np.arange(len(firsts)), np.flatnonzero(np.diff(steps)) + 1):
            if len(at) > 1:
                yield from self._of_ranks(int(steps[at[0]]), owners[at], parts[at], totals[at])
        yield from self._again(steps, owners, totals)
        for lane, step, words, num, since in self._still.add(rows):
            yield self._in_a_row(lane, step, words, num, "repeats", since)

    def _in_a_row(self, lane: int, step: int, what: str, num: int, limit: str, since: int | None) -> Finding:
        return self.finding(lane, step, what, "records in a row", num, self.thresholds[limit], since=since)

    def _of_ranks(self, step: int, lanes: Integers, parts: Integers, totals: Integers) -> Iterator[Finding]:
        """Ranks with the same batch."""
        order = np.argsort(totals, kind="stable")
        same = np.flatnonzero((np.diff(totals[order]) == 0) & (np.diff(parts[order]) != 0))
        going_on = {}
        for index in same.tolist():
            first, second = sorted((int(lanes[order[index]]), int(lanes[order[index + 1]])))
            num, since = self._same.get((first, second), (0, step))
            num += 1
            going_on[first, second] = num, since
            if num >= self.thresholds["records"] and second not in self._said:
                self._said.add(second)
                rank = int(self.catalog.rank_of[first])
                what = f"the batch is that of rank {rank}"
                yield self._in_a_row(second, step, what, num, "records", since)
        self._same = going_on

    def _again(self, steps: Integers, owners: Integers, totals: Integers) -> Iterator[Finding]:
        """Batches that were there a few records before."""
        order = np.argsort(owners, kind="stable")
        steps, lanes = steps[order], owners[order]
        marks = (totals[order].view(np.uint64) >> np.uint64(11)).astype(np.float64)  # exact: 53 bits
        was, period = marks, np.zeros(len(marks), np.int64)
        for number, memory in enumerate(self._before, 1):
            was = previous(lanes, was.copy(), memory)
            period = np.where((period == 0) & (was == marks), number, period)
        for index, num, since in self._repeats.reached(lanes, steps, period > 0, self.thresholds["repeats"]):
            what = f"the batch is that of {int(period[index])} records before, again and again"
            yield self._in_a_row(int(lanes[index]), int(steps[index]), what, num, "repeats", since)


class _Still:
    """Inputs and labels that stay as they are, or whose elements are all equal."""

    def __init__(self, catalog: Catalog, repeats: float) -> None:
        self._catalog, self._repeats = catalog, repeats
        self._last = Memory()
        told = Memory(0.0)
        self._same, self._flat = Streaks(told), Streaks(told)

    def add(self, rows: Rows) -> Iterator[tuple[int, int, str, int, int | None]]:
        """Lane, step, words, number of records and first step of what is found."""
        rows = rows.by_lane()
        is_label = self._catalog.mark("labels", lambda key: _LABELS.fullmatch(key.name) is not None)[rows.series]
        is_float = np.array(["float" in about.dtype for about in self._catalog.about], np.bool_)[rows.series]
        marks = rows["l2"] + 1e-3 * rows["mean"]
        is_same = is_label & (marks == previous(rows.lanes, marks, self._last))
        is_flat = (rows["min"] == rows["max"]) & (is_label | is_float) & (rows["numel"] >= _LEAST_ELEMENTS)
        kinds = (
            (self._same, is_same, "the labels never change"),
            (self._flat, is_flat, "all labels of a batch are equal"),
        )
        for streaks, flags, of_labels in kinds:
            for index, num, since in streaks.reached(rows.lanes, rows.steps, flags, self._repeats):
                words = of_labels if is_label[index] else "all elements of the input are equal"
                yield int(rows.lanes[index]), int(rows.steps[index]), words, num, since
