"""The rule on objectives that share a part of the model: one whose gradients drown those of another.

`recorder.objective(name, tensor)` hands a shared tensor to one objective, so that the gradient that comes back through
it is that objective's alone. The rule compares these gradients of one module.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from ..rows import Flags, Floats, Integers, Rows, SeriesKey, grouped
from ..rule import Setting, StreakRule

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

    def wants(self, key: SeriesKey) -> bool:
        """Gradients of taps that `recorder.objective` put."""
        return key.site == "tap" and key.phase == "backward" and key.name.startswith(PREFIX)

    def judge(self, rows: Rows) -> tuple[Flags, Floats]:
        """By the largest and the smallest root mean square of the objectives at one module."""
        rms = np.nan_to_num(rows.rms)
        ids, firsts = grouped(self._modules()[rows.series], rows.ranks, rows.steps)
        smallest, largest = np.full(len(firsts), np.inf), np.zeros(len(firsts))
        np.minimum.at(smallest, ids, rms)
        np.maximum.at(largest, ids, rms)
        with np.errstate(all="ignore"):
            ratio = np.where(rms == largest[ids], rms / smallest[ids], 1.0)
        return (ratio > self.thresholds["ratio"]) & (rms > 0), np.minimum(np.nan_to_num(ratio), 1e30)

    def _modules(self) -> Integers:
        """By series, the number of the module that its tensor belongs to."""
        numbers: dict[tuple[str, str], int] = {}
        modules = [numbers.setdefault((key.root, key.module_path), len(numbers)) for key in self.catalog.series]
        return np.array(modules, np.int64)
