"""Rules on what modules return: outputs that are dead, or at the ends of a saturating function."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from ..rows import Flags, Floats, Rows
from ..rule import Setting, StreakRule

_LEAST_ELEMENTS = 8
_TANH = ("Tanh", "Hardtanh", "Softsign")
_SIGMOID = ("Sigmoid", "Hardsigmoid")


class Dead(StreakRule):
    """An output that is zero in nearly all elements, as of a layer of ReLUs that no input opens any more."""

    name: ClassVar[str] = "dead"
    sentence: ClassVar[str] = "An output is zero in nearly all elements, record after record."
    sites: ClassVar[tuple[str, ...]] = ("output",)
    columns: ClassVar[tuple[str, ...]] = ("zero_count", "numel")
    settings: ClassVar[tuple[Setting, ...]] = (
        Setting(name="share", default=0.99, unit="of the elements", source="smdebug's DeadRelu"),
        Setting(name="records", default=5, unit="records", source="a branch that begins at zero has left it by then"),
    )  # fmt: skip
    what: ClassVar[str] = "the output is zero in nearly all elements"
    measure: ClassVar[str] = "share of zeros"
    limit: ClassVar[str] = "share"
    advice: ClassVar[str] = "look at the bias and the scale of what comes before, and at the learning rate"

    def judge(self, rows: Rows) -> tuple[Flags, Floats]:
        """By the count of zeros; of masks, which are no floats, and of single numbers zeros mean nothing."""
        is_float = np.array(["float" in about.dtype for about in self.catalog.about], np.bool_)[rows.series]
        share = np.nan_to_num(rows["zero_count"] / np.maximum(rows["numel"], 1))
        return (share >= self.thresholds["share"]) & is_float & (rows["numel"] >= _LEAST_ELEMENTS), share


class Saturated(StreakRule):
    """A sigmoid or tanh that is near its ends in nearly all elements."""

    name: ClassVar[str] = "saturated"
    sentence: ClassVar[str] = "A sigmoid or a tanh is near its ends in nearly all elements, record after record."
    sites: ClassVar[tuple[str, ...]] = ("output",)
    columns: ClassVar[tuple[str, ...]] = ("sum_sq", "sum", "numel")
    settings: ClassVar[tuple[Setting, ...]] = (
        Setting(name="slope", default=0.02, unit="of the largest slope", source="calibrated on sound trainings"),
        Setting(name="records", default=5, unit="records", source="calibrated on sound trainings"),
    )  # fmt: skip
    what: ClassVar[str] = "nearly all elements are at the ends of the function, where it has no slope"
    measure: ClassVar[str] = "mean slope"
    limit: ClassVar[str] = "slope"
    advice: ClassVar[str] = "scale down what comes before, or normalise it"

    def judge(self, rows: Rows) -> tuple[Flags, Floats]:
        """By the mean of the derivative, which the sums tell: 1 - y^2 of a tanh, 4 y (1 - y) of a sigmoid."""
        modules, keys = self.catalog.modules, self.catalog.series
        classes = [modules[key.root, key.module_path].class_name if (key.root, key.module_path) in modules else ""
                   for key in keys]  # fmt: skip
        is_tanh, is_sigmoid = (np.array([name in some for name in classes])[rows.series] for some in (_TANH, _SIGMOID))
        count = np.maximum(rows["numel"], 1)
        mean, square = rows["sum"] / count, rows["sum_sq"] / count
        slope = np.where(is_tanh, 1 - square, np.where(is_sigmoid, 4 * (mean - square), 1.0))
        return (slope < self.thresholds["slope"]) & (rows["numel"] > 0), slope
