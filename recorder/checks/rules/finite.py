"""The rule that finds NaN and infinities, and says which module made them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar

import numpy as np

from ...sites import SITES, SKIPPED, may_mask
from ..rows import Catalog, Flags, Floats, Memory, Rows, SeriesKey, begins
from ..rule import Finding, Rule, Setting, Severity, StreakRule

_MOST_SKIPPED = 20
"""A scale of 2^16 is halved to 1 by then: what overflows still, overflows at any scale."""


class NonFinite(Rule):
    """NaN or infinities, at the module that made them, once for each spell of steps that have any."""

    name: ClassVar[str] = "nonfinite"
    sentence: ClassVar[str] = "A value holds NaN, or infinities that are no mask."
    severity: ClassVar[Severity] = Severity.ERROR
    sites: ClassVar[tuple[str, ...]] = SITES
    columns: ClassVar[tuple[str, ...]] = ("nan_count", "inf_count", "numel")
    settings: ClassVar[tuple[Setting, ...]] = (
        Setting(name="elements", default=1, unit="elements", source="smdebug's ExplodingTensor"),
    )
    advice: ClassVar[str] = "recorder first shows what was last healthy before it"

    def __init__(self, catalog: Catalog, thresholds: Mapping[str, float] | None = None) -> None:
        super().__init__(catalog, thresholds)
        self._masks: dict[tuple[int, float], float] = {}
        """By lane and number of elements, how many were infinite in the first such record, where any ever were."""
        self._is_known = Memory(0.0)
        """By lane: 1 where the first record was finite, 2 where it held infinities alone."""
        self._bad_step: int | None = None
        """The last step that had such a value, and was not skipped."""
        self._last_skipped: int | None = None
        """The last step that had such a value and was skipped."""
        self._num_skipped = 0
        """Such steps in a row."""
        self._last_step: int | None = None
        """The last step that there were rows of."""

    def add(self, rows: Rows) -> Iterator[Finding]:
        """Look for rows that are not finite, and name the first of each spell of steps that have any."""
        nan, inf = np.nan_to_num(rows["nan_count"]), np.nan_to_num(rows["inf_count"])
        is_bad = (nan + inf >= self.thresholds["elements"]) & ~self._excused(rows, nan, inf)
        if is_bad.any():
            yield from self._spells(rows, is_bad, nan, inf)
        self._last_step = int(rows.steps[-1])

    def _excused(self, rows: Rows, nan: Floats, inf: Floats) -> Flags:
        """Infinite from the first record on, as a mask is, and no more so than the first of this size."""
        excused = np.zeros(len(rows), np.bool_)
        order = np.argsort(rows.lanes, kind="stable")
        firsts = order[begins(rows.lanes[order])]
        firsts = firsts[self._is_known[rows.lanes[firsts]] == 0]
        began_infinite = (inf[firsts] > 0) & (nan[firsts] == 0)
        self._is_known[rows.lanes[firsts]] = np.where(began_infinite, 2.0, 1.0)
        is_maskable = self.catalog.mark("may_mask", lambda key: may_mask(key.site, key.name))
        candidates = (inf > 0) & (nan == 0) & is_maskable[rows.series] & (self._is_known[rows.lanes] == 2)
        for index in np.flatnonzero(candidates).tolist():
            known = self._masks.setdefault((int(rows.lanes[index]), float(rows["numel"][index])), float(inf[index]))
            excused[index] = inf[index] <= known
        return excused

    def _spells(self, rows: Rows, is_bad: Flags, nan: Floats, inf: Floats) -> Iterator[Finding]:
        """The first bad value of each spell, on the ranks that have it first: others have it from them."""
        steps = np.unique(rows.steps)
        for step in np.unique(rows.steps[is_bad]).tolist():
            at = int(np.searchsorted(steps, step))
            before = int(steps[at - 1]) if at else self._last_step
            if before is not None and self._bad_step == before:
                self._bad_step = step
                continue
            if before is None or self._last_skipped != before:
                self._num_skipped = 0
            start, end = np.searchsorted(rows.steps, [step, step + 1])
            one_step = rows.take(slice(start, end))
            firsts = np.flatnonzero(np.r_[True, np.diff(one_step.ranks) != 0])
            indices = np.arange(end - start) - np.repeat(firsts, np.diff(np.r_[firsts, end - start]))
            bad = np.flatnonzero(is_bad[start:end])
            first = bad[np.argmin(indices[bad])]
            earliest = bad[(indices[bad] == indices[first]) & (one_step.series[bad] == one_step.series[first])]
            for index in earliest.tolist():
                counts = float(nan[start + index]), float(inf[start + index])
                one = self._say(one_step, is_bad[start:end], index, *counts)
                self._last_skipped = step
                if one.severity > Severity.NOTE:  # a skipped step hides nothing that comes after it
                    self._bad_step = step
                yield one

    def _say(self, rows: Rows, is_bad: Flags, index: int, nan: float, inf: float) -> Finding:
        """A finding on the module that made it, which the other rows of the step and rank tell."""
        same_step = (rows.steps == rows.steps[index]) & (rows.ranks == rows.ranks[index])
        keys = self.catalog.series
        key = keys[int(rows.series[index])]
        is_of_module = np.array([(one.root, one.module_path) == (key.root, key.module_path) for one in keys], np.bool_)
        of_module = same_step & is_of_module[rows.series]
        sites = {site: of_module & _at_site(keys, site)[rows.series] for site in ("input", "param")}
        skipped = same_step & np.array([one.site == "scalar" and one.name == SKIPPED for one in keys])[rows.series]
        what = "the value is not finite"
        if (sites["param"] & is_bad).any() and key.site != "param":
            what += ", and neither is a parameter of the module"
        elif key.site == "output" and (sites["input"] & is_bad).any():
            what += ", and neither is its input"
        elif key.site == "output" and sites["input"].any():
            what += ", and its input is: the module made it"
        elif key.site in ("output", "tap"):
            what += ", and all values before it in this step are"
        severity = self.severity
        if (np.nan_to_num(rows["mean"][skipped]) > 0).any():
            self._num_skipped += self._last_skipped != int(rows.steps[index])
            what += "; GradScaler skipped the update"
            if self._num_skipped < _MOST_SKIPPED:
                severity = Severity.NOTE
            else:
                what += f", as it did {_MOST_SKIPPED} times in a row"
        measure = "NaN and infinite elements" if nan and inf else "NaN elements" if nan else "infinite elements"
        lane, step = int(rows.lanes[index]), int(rows.steps[index])
        return self.finding(lane, step, what, measure, nan + inf, self.thresholds["elements"], severity)


def _at_site(keys: Iterable[SeriesKey], site: str) -> Flags:
    return np.array([key.site == site for key in keys], np.bool_)


class Skipped(StreakRule):
    """Steps that `GradScaler` skips one after the other."""

    name: ClassVar[str] = "skipped"
    sentence: ClassVar[str] = "GradScaler skips one step after the other: the parameters stay as they are."
    severity: ClassVar[Severity] = Severity.ERROR
    sites: ClassVar[tuple[str, ...]] = ("scalar",)
    columns: ClassVar[tuple[str, ...]] = ("mean",)
    settings: ClassVar[tuple[Setting, ...]] = (
        Setting(name="records", default=_MOST_SKIPPED, unit="records", source="a scale of 2^16 is halved to 1 by then"),
    )
    needs: ClassVar[str] = "there is no GradScaler that says which steps it skips"
    what: ClassVar[str] = "GradScaler skips one step after the other"
    measure: ClassVar[str] = "records in a row"
    limit: ClassVar[str] = "records"
    advice: ClassVar[str] = "begin with a smaller scale, and look for what overflows at any scale"

    def wants(self, key: SeriesKey) -> bool:
        """Whether a step was skipped."""
        return (key.site, key.name) == ("scalar", SKIPPED)

    def judge(self, rows: Rows) -> tuple[Flags, Floats]:
        """By the scalar alone."""
        return rows["mean"] > 0, np.full(len(rows), float(self.records))
