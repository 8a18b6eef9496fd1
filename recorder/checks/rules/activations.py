"""Rules on what modules return: dead and saturated outputs, dead and outlying units, attention, low precision."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from ..rows import Catalog, Flags, Floats, Memory, Rows, SeriesKey, began
from ..rule import PartsRule, Rule, Setting, StreakRule

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


_WORD = r"(.*[./_])?(self_?)?(attention|attn)"
_LOGITS = re.compile(_WORD + r"[./_](logits|scores)")
_WEIGHTS = re.compile(_WORD + r"([./_](weights|probs|probabilities))?")
_MIN_POSITIONS = 4
_LOGIT = Setting(name="logit", default=100, unit="largest logit", source="Megatron-LM's and MuonClip's threshold")
_ENTROPY = Setting(name="entropy", default=0.1, unit="nats", source="calibrated on sound trainings")
_RECORDS = Setting(name="records", default=3, unit="records", source="calibrated on sound trainings")


class _Attention(Rule):
    """What both parts have in common."""

    name: ClassVar[str] = "attention"
    sentence: ClassVar[str] = "Attention has logits that are too large, or nearly all its weight on single positions."
    sites: ClassVar[tuple[str, ...]] = ("input", "output", "tap")
    columns: ClassVar[tuple[str, ...]] = ("max", "sum", "sum_sq")
    settings: ClassVar[tuple[Setting, ...]] = (_LOGIT, _ENTROPY, _RECORDS)
    advice: ClassVar[str] = "normalise or clip queries and keys, or lower the learning rate of their weights"

    def class_of(self, key: SeriesKey) -> str:
        """The class of the module that a value is of."""
        module = self.catalog.modules.get((key.root, key.module_path))
        return "" if module is None else module.class_name

    def is_softmax(self, key: SeriesKey) -> bool:
        """Whether a value is of a softmax of attention. Other softmaxes, as that of a classifier, may well be sure."""
        return self.class_of(key) == "Softmax" and ("attention" in key.module_path or "attn" in key.module_path)


class _Logits(_Attention, StreakRule):
    """The largest logit."""

    what: ClassVar[str] = "the logits of attention are too large"
    measure: ClassVar[str] = "largest logit"
    limit: ClassVar[str] = "logit"

    def wants(self, key: SeriesKey) -> bool:
        """Inputs of a softmax, and taps that are called so."""
        is_tap = key.site == "tap" and _LOGITS.fullmatch(key.name) is not None
        return is_tap or (key.site == "input" and self.is_softmax(key))

    def judge(self, rows: Rows) -> tuple[Flags, Floats]:
        """By the maximum of finite elements, so that a mask does not count."""
        return rows["max"] > self.thresholds["logit"], rows["max"]


class _Entropy(_Attention, StreakRule):
    """How far the weights are spread."""

    what: ClassVar[str] = "the weights of attention are nearly all on single positions"
    measure: ClassVar[str] = "entropy of order 2"
    limit: ClassVar[str] = "entropy"

    def wants(self, key: SeriesKey) -> bool:
        """Outputs of a softmax, the second output of `MultiheadAttention`, and taps that are called so."""
        if key.site == "output":
            return self.is_softmax(key) or (self.class_of(key) == "MultiheadAttention" and key.name == "1")
        return key.site == "tap" and _WEIGHTS.fullmatch(key.name) is not None

    def judge(self, rows: Rows) -> tuple[Flags, Floats]:
        """By the mean square of the weights of a row: weights of a row add up to 1, so the sum counts the rows."""
        num_positions = np.array([about.shape[-1] if about.shape else 0 for about in self.catalog.about], np.int64)
        with np.errstate(all="ignore"):
            entropy = -np.log(rows["sum_sq"] / rows["sum"])
        is_judged = (num_positions[rows.series] >= _MIN_POSITIONS) & np.isfinite(entropy)
        return is_judged & (entropy < self.thresholds["entropy"]), entropy


class Attention(_Attention, PartsRule):
    """Attention that saturates: its gradients vanish, or its logits overflow."""

    needs: ClassVar[str] = (
        "needs weights or logits of attention: a Softmax module, MultiheadAttention with need_weights, or "
        "recorder.tap('attention', weights)"
    )
    parts: ClassVar[tuple[type[StreakRule], ...]] = (_Logits, _Entropy)


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
