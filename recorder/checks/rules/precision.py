"""Rules on types of few bits: values at the lower or the upper end of what the type can hold."""

from __future__ import annotations

import re
from typing import ClassVar

import numpy as np

from ..rows import Flags, Floats, Rows, SeriesKey
from ..rule import PartsRule, Rule, Setting, StreakRule

_SITES = ("input", "output", "grad_input", "grad_output", "param", "grad", "tap")
_SCALE = re.compile(r"(.*[._])?scale(_inv)?")
_SETTINGS = (
    Setting(name="low", default=0.5, unit="of the values", source="calibrated on sound trainings"),
    Setting(name="high", default=0.1, unit="of the values", source="calibrated on sound trainings"),
    Setting(name="scale", default=1e14, unit="or its inverse", source="torchao: 448 / 1e-12 for a tensor of zeros"),
    Setting(name="records", default=3, unit="records", source="a GradScaler has found its scale by then"),
)  # fmt: skip


class _Part(Rule):
    name: ClassVar[str] = "low_precision"
    sentence: ClassVar[str] = (
        "Values lie where their type has few bits left, or at its end, as those of float16 and float8 may."
    )
    sites: ClassVar[tuple[str, ...]] = _SITES
    keep: ClassVar[str] = "histogram"
    settings: ClassVar[tuple[Setting, ...]] = _SETTINGS
    measure: ClassVar[str] = "share of values"


class _Low(_Part, StreakRule):
    columns: ClassVar[tuple[str, ...]] = ("histogram.subnormal_share",)
    what: ClassVar[str] = "most values are so small that the type loses their bits"
    limit: ClassVar[str] = "low"
    advice: ClassVar[str] = "scale up what is cast: a GradScaler, or the scale of the float8 recipe"

    def judge(self, rows: Rows) -> tuple[Flags, Floats]:
        """By the share of values below the least normal number."""
        share = rows["histogram.subnormal_share"]
        return np.nan_to_num(share) > self.thresholds["low"], share


class _High(_Part, StreakRule):
    columns: ClassVar[tuple[str, ...]] = ("histogram.top_share",)
    what: ClassVar[str] = "many values are at the upper end of the type"
    limit: ClassVar[str] = "high"
    advice: ClassVar[str] = "scale down what is cast, or keep it in bfloat16"

    def judge(self, rows: Rows) -> tuple[Flags, Floats]:
        """By the share of values in the highest power of two."""
        share = rows["histogram.top_share"]
        return np.nan_to_num(share) > self.thresholds["high"], share


class _Scale(_Part, StreakRule):
    columns: ClassVar[tuple[str, ...]] = ("absmax", "min")
    what: ClassVar[str] = "a scale of float8 is at the end of what it can be"
    measure: ClassVar[str] = "the scale"
    limit: ClassVar[str] = "scale"
    advice: ClassVar[str] = "look at the tensor that is scaled: it is all zeros, or far too large"

    def wants(self, key: SeriesKey) -> bool:
        """A scale, which stands beside the data of a float8 tensor."""
        return key.site in self.sites and "." in key.name and _SCALE.fullmatch(key.name) is not None

    def judge(self, rows: Rows) -> tuple[Flags, Floats]:
        """By the largest and the least scale of the tensor."""
        end, high, low = self.thresholds["scale"], np.nan_to_num(rows["absmax"]), rows["min"]
        is_low = (low < 1 / end) & (rows["numel"] > 0)
        return (high > end) | is_low, np.where(is_low, low, high)


class LowPrecision(_Part, PartsRule):
    """Values that their type can hardly hold, above all float16 and float8."""

    columns: ClassVar[tuple[str, ...]] = (*_Low.columns, *_High.columns)
    parts: ClassVar[tuple[type[StreakRule], ...]] = (_Low, _High, _Scale)
    advice: ClassVar[str] = _Low.advice
