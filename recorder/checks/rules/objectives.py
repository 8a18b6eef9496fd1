"""The rule on objectives that share a part of the model: one whose gradients drown those of another.

`recorder.objective(name, tensor)` hands a shared tensor to one objective, so that the gradient that comes back through
it is that objective's alone. The rule compares these gradients of one module. The gradient of a loss, which is a single
number, is only the weight with which it is added, and says nothing of how hard the objective pulls.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

import numpy as np

from ..rows import Catalog, Flags, Floats, Integers, Rows, SeriesKey, grouped
from ..rule import Finding, Setting, StreakRule

PREFIX = "objective."
"""Of the names of taps that `recorder.objective` puts."""


class Objectives(StreakRule):
    """An objective whose gradients at a shared tensor are many times those of another."""

    name: ClassVar[str] = "objectives"
    sentence: ClassVar[str] = "The gradient of one objective at a shared tensor drowns that of another."
    sites: ClassVar[tuple[str, ...]] = ("tap",)
    columns: ClassVar[tuple[str, ...]] = ("sum_sq", "numel")
    settings: ClassVar[tuple[Setting, ...]] = (
        Setting(name="ratio", default=30, unit="times the smallest", source="calibrated on sound trainings"),
        Setting(name="records", default=10, unit="records", source="calibrated on sound trainings"),
    )
    needs: ClassVar[str] = "needs objectives: recorder.objective('main', hidden) in the model, and site=tap keep=stats"
    what: ClassVar[str] = "the gradient of this objective drowns that of another"
    measure: ClassVar[str] = "times the smallest gradient"
    limit: ClassVar[str] = "ratio"
    advice: ClassVar[str] = "weigh the objectives anew, or look why the others have hardly any gradient"

    def __init__(self, catalog: Catalog, thresholds: Mapping[str, float] | None = None) -> None:
        super().__init__(catalog, thresholds)
        self._has_shared = False

    def wants(self, key: SeriesKey) -> bool:
        """Gradients of taps that `recorder.objective` put."""
        return key.site == "tap" and key.phase == "backward" and key.name.startswith(PREFIX)

    def judge(self, rows: Rows) -> tuple[Flags, Floats]:
        """By the largest and the smallest root mean square of the objectives at one module."""
        is_shared = rows["numel"] > 1
        self._has_shared |= bool(is_shared.any())
        rms = np.where(is_shared, np.nan_to_num(rows.rms), np.nan)
        ids, firsts = grouped(self._modules()[rows.series], rows.ranks, rows.steps)
        smallest, largest = np.full(len(firsts), np.inf), np.zeros(len(firsts))
        np.minimum.at(smallest, ids[is_shared], rms[is_shared])
        np.maximum.at(largest, ids[is_shared], rms[is_shared])
        with np.errstate(all="ignore"):
            ratio = np.where(rms == largest[ids], rms / smallest[ids], 1.0)
        return (ratio > self.thresholds["ratio"]) & (rms > 0), np.minimum(np.nan_to_num(ratio), 1e30)

    def finish(self) -> Iterator[Finding]:
        """Say where all objectives are losses."""
        yield from super().finish()
        if not self._has_shared:
            self.why_not_judged = "needs the tensor that the objectives share: what they were handed are single numbers"

    def _modules(self) -> Integers:
        """By series, the number of the module that its tensor belongs to."""
        numbers: dict[tuple[str, str], int] = {}
        modules = [numbers.setdefault((key.root, key.module_path), len(numbers)) for key in self.catalog.series]
        return np.array(modules, np.int64)
