"""Rules on the units of a layer: units that are dead, and units far larger than all others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from ..rows import Catalog, Flags, Floats, Memory, Rows, began
from ..rule import Setting, StreakRule


class DeadUnits(StreakRule):
    """Units of a layer that no sample activates."""

    name: ClassVar[str] = "dead_units"
    sentence: ClassVar[str] = "Most units of a layer are zero in more than 99 % of their values, record after record."
    sites: ClassVar[tuple[str, ...]] = ("output",)
    columns: ClassVar[tuple[str, ...]] = ("units.dead_share",)
    keep: ClassVar[str] = "units"
    settings: ClassVar[tuple[Setting, ...]] = (
        Setting(name="share", default=0.5, unit="of the units", source="smdebug's DeadRelu"),
        Setting(name="grown", default=0.2, unit="of the units, more than at first", source="as `begun`"),
        Setting(
            name="begun", default=0.7, unit="of the units, where so many are dead at first",
            source="calibrated on sound trainings: deep layers without a norm begin with up to 0.69",
        ),
        Setting(name="records", default=5, unit="records", source="a branch that begins at zero has left it by then"),
    )  # fmt: skip
    what: ClassVar[str] = "most units are zero for nearly all samples"
    measure: ClassVar[str] = "share of dead units"
    limit: ClassVar[str] = "share"
    advice: ClassVar[str] = "look at the bias and the scale of what comes before, and at the learning rate"

    def __init__(self, catalog: Catalog, thresholds: Mapping[str, float] | None = None) -> None:
        super().__init__(catalog, thresholds)
        self._began = Memory()

    def judge(self, rows: Rows) -> tuple[Flags, Floats]:
        """By the share of units that are dead at the record, beside the share that were at the first one."""
        lanes, share = rows.lanes, np.nan_to_num(rows["units.dead_share"])
        usual = np.minimum(began(lanes, share, self._began) + self.thresholds["grown"], self.thresholds["begun"])
        return share > np.maximum(usual, self.thresholds["share"]), share


class OutlierUnits(StreakRule):
    """Units far larger than the others: massive activations."""

    name: ClassVar[str] = "outlier_units"
    sentence: ClassVar[str] = "A unit is many times larger than the units of its layer usually are."
    sites: ClassVar[tuple[str, ...]] = ("output",)
    columns: ClassVar[tuple[str, ...]] = ("units.largest",)
    keep: ClassVar[str] = "units"
    settings: ClassVar[tuple[Setting, ...]] = (
        Setting(name="ratio", default=1000, unit="times the median", source="Sun et al. 2024: massive activations"),
        Setting(name="records", default=3, unit="records", source="calibrated on sound trainings"),
    )  # fmt: skip
    what: ClassVar[str] = "a unit is far larger than the others"
    measure: ClassVar[str] = "times the median unit"
    limit: ClassVar[str] = "ratio"
    advice: ClassVar[str] = (
        "keep this layer out of low precision, and look with run.units where the unit begins to grow"
    )

    def judge(self, rows: Rows) -> tuple[Flags, Floats]:
        """By the largest magnitude beside the root mean square of the median unit."""
        ratio = rows["units.largest"]
        return np.nan_to_num(ratio) > self.thresholds["ratio"], ratio
