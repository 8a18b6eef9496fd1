"""Rules on modules' outputs: dead or saturated outputs, dead or outlying units (channels), attention, low precision."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import ClassVar

import numpy as np

from ...sites import LABELS
from ..rows import Flags, Floats, Memory, Rows, SeriesKey, began, previous
from ..rule import CALIBRATED, CheckRule, Finding, PartsRule, Setting, Severity, StreakRule

_LEAST_ELEMENTS = 8
_TANH = ("Tanh", "Hardtanh", "Softsign")
_SIGMOID = ("Sigmoid", "Hardsigmoid")
_CHOOSES = re.compile("top_?k|one_?hot", re.IGNORECASE)
_HAS_LEFT_ZERO = "a branch that begins at zero has left zero by then"
_THREE_RECORDS = Setting("records", 3, "records", CALIBRATED)

_OF_DROPOUT = (
    "look at the probability of the dropout, and at what comes before: a learning rate that is too high kills a ReLU"
)


class Dead(StreakRule):
    name = "dead"
    sentence = "An output is zero in nearly all elements, record after record."
    sites, columns, more_columns = ("output",), ("zero_count", "numel"), ("sum", "sum_sq")
    settings = (
        Setting("share", 0.99, "of the elements", "smdebug's DeadRelu"),
        Setting("records", 5, "records", _HAS_LEFT_ZERO),
    )
    what = "the output is zero in nearly all elements"
    measure, limit = "share of zeros", "share"
    advice = "look at the bias and the scale of what comes before, and at the learning rate"
    may_recover = True

    def set_up(self) -> None:
        self._are_used = self._are_first = np.zeros(0, np.bool_)
        self._lived, self._share, self._varied, self._not_ones = Memory(0.0), Memory(), Memory(0.0), Memory(0.0)
        """By output and rank, 1 if a record was not zero, the last share of zeros, 1 if it was another before, and 1 if
        a record had other elements than 0 and 1."""

    def judge(self, rows: Rows) -> tuple[Flags, Floats]:
        """Judge by the share of zeros. Single numbers and non-float masks may well be zero, and are left out."""
        share = np.nan_to_num(rows["zero_count"] / np.maximum(rows["numel"], 1))
        if len(self._are_used) < len(self.catalog.series):
            self._look_at_series()
        is_zero = share >= self.thresholds["share"]
        self._lived[rows.lanes[~is_zero]] = 1.0
        before = previous(rows.lanes, share, self._share)
        self._varied[rows.lanes[(share == 1) | (share != before) & ~np.isnan(before)]] = 1.0
        self._not_ones[rows.lanes[rows["sum"] != rows["sum_sq"]]] = 1.0
        return is_zero & rows.are_float() & (rows["numel"] >= _LEAST_ELEMENTS) & self._are_used[rows.series], share

    def revised(self, one: Finding) -> Finding:
        """Make it a note if a further tensor was never anything else but zeros, or has always as many of them.

        A program may make a tensor of zeros: T5 makes one, and gives it a gradient where activations are checkpointed.
        A one-hot has ones alone, and a top-k as many other elements in each record.
        """
        if (lane := self._lanes.get(one)) is None:
            return one
        name = self.catalog.class_of(self.catalog.key_of(lane))
        if "Dropout" in name:
            return one._replace(advice=_OF_DROPOUT)
        is_made = not self._are_first[self.catalog.series_of[lane]] and not self._lived.of(lane)
        is_fixed = not self._varied.of(lane) and (_CHOOSES.search(name) is not None or not self._not_ones.of(lane))
        return one._replace(severity=Severity.NOTE) if is_made or is_fixed else one

    def _look_at_series(self) -> None:
        """Find which series are the first tensors of their modules, and which are such tensors or have a gradient."""
        series = self.catalog.series
        pairs = [*zip(series, self.catalog.about, strict=True)][::-1]
        firsts = {key[:2]: key.name for key, about in pairs if key.site == "output" and about.shape}
        trained = {(*key[:2], key.name) for key in series if key.site == "grad_output"}
        self._are_first = np.array([key.name in ("", firsts.get(key[:2])) for key in series])
        self._are_used = self._are_first | np.array([(*key[:2], key.name) in trained for key in series])


class Saturated(StreakRule):
    name = "saturated"
    sentence = "A sigmoid or a tanh is near its ends in nearly all elements, record after record."
    sites, columns = ("output",), ("sum_sq", "sum", "numel")
    settings = (
        Setting("slope", 0.02, "fraction of the largest slope", CALIBRATED),
        Setting("records", 5, "records", CALIBRATED),
    )
    what = "nearly all elements are at the ends of the function, where it has no slope"
    measure, limit = "mean slope", "slope"
    advice = "scale down what comes before, or normalise it"
    may_recover = True

    def set_up(self) -> None:
        self._labels: dict[tuple[int, int], tuple[float, float]] = {}
        """By rank and step of the current rows, the number of labels and their mean, if all are 0 or 1."""
        self._are_unlike = Memory(0.0)
        """By output and rank, 1 if a saturated record had another mean than the labels, or another size."""

    def wants(self, key: SeriesKey) -> bool:
        return super().wants(key) or key.name == LABELS

    def add(self, rows: Rows) -> Iterator[Finding]:
        labels = rows.take(rows.where("labels of the loss", lambda key: key.name == LABELS))
        labels = labels.take(labels["sum"] == labels["sum_sq"])
        places = zip(labels.ranks.tolist(), labels.steps.tolist(), strict=True)
        numbers = zip(labels["numel"].tolist(), (labels["sum"] / labels["numel"]).tolist(), strict=True)
        self._labels = dict(zip(places, numbers, strict=True))
        yield from super().add(rows.take(rows.at("output")))

    def revised(self, one: Finding) -> Finding:
        """Make it a note where the outputs are as often 0 and 1 as the labels: a classifier is sure of its classes.

        It is one, too, if the last output is not near the ends any more.
        """
        lane = self._lanes.get(one)
        if lane is None or self._are_unlike.of(lane):
            return super().revised(one)
        return one._replace(severity=Severity.NOTE, what=f"{one.what}; the labels of the loss have the same mean")

    def judge(self, rows: Rows) -> tuple[Flags, Floats]:
        """Judge by the mean derivative, computed from the sums: 1 - y^2 for a tanh, 4 y (1 - y) for a sigmoid."""
        is_tanh = rows.where("tanh", lambda key: self.catalog.class_of(key) in _TANH)
        is_sigmoid = rows.where("sigmoid", lambda key: self.catalog.class_of(key) in _SIGMOID)
        count = np.maximum(rows["numel"], 1)
        mean, square = rows["sum"] / count, rows["sum_sq"] / count
        slope = np.where(is_tanh, 1 - square, np.where(is_sigmoid, 4 * (mean - square), 1.0))
        is_flat = (slope < self.thresholds["slope"]) & (rows["numel"] > 0)
        for index in np.flatnonzero(is_flat).tolist():
            at = int(rows.ranks[index]), int(rows.steps[index])
            numel, of_labels = self._labels.get(at, (math.nan, math.nan))
            is_alike = rows["numel"][index] == numel and abs(mean[index] - of_labels) < self.thresholds["slope"]
            if not (is_alike and is_sigmoid[index]):
                self._are_unlike[rows.lanes[[index]]] = 1.0
        return is_flat, slope


class DeadUnits(StreakRule):
    name = "dead_units"
    sentence = "Most units of a layer are zero in more than 99 % of their values, record after record."
    sites, columns, keep = ("output",), ("units.dead_share",), "units"
    settings = (
        Setting("share", 0.5, "of the units", "smdebug's DeadRelu"),
        Setting("grown", 0.2, "of the units, more than at first", "as `begun`"),
        Setting(
            "begun", 0.7, "of the units, where so many are dead at first",
            "calibrated on sound trainings: deep layers without a norm begin with up to 0.69",
        ),
        Setting("records", 5, "records", _HAS_LEFT_ZERO),
    )  # fmt: skip
    what = "most units are zero for nearly all samples"
    measure, limit = "share of dead units", "share"
    advice = Dead.advice

    def set_up(self) -> None:
        self._began = Memory()

    def judge(self, rows: Rows) -> tuple[Flags, Floats]:
        share = np.nan_to_num(rows["units.dead_share"])
        at_first = began(rows.lanes, share, self._began)
        usual = np.minimum(at_first + self.thresholds["grown"], self.thresholds["begun"])
        return share > np.maximum(usual, self.thresholds["share"]), share


class _Above(StreakRule):
    def judge(self, rows: Rows) -> tuple[Flags, Floats]:
        """Judge by the first of the rule's columns, whose values must not exceed the limit."""
        values = rows[self.columns[0]]
        return np.nan_to_num(values) > self.thresholds[self.limit], values


class OutlierUnits(_Above):
    name = "outlier_units"
    sentence = "A unit is many times larger than the units of its layer usually are."
    sites, columns, keep = ("output",), ("units.largest",), "units"
    settings = (Setting("ratio", 1000, "times the median", "Sun et al. 2024: massive activations"), _THREE_RECORDS)
    what = "a unit is far larger than the others"
    measure, limit = "times the median unit", "ratio"
    advice = "keep this layer out of low precision, and look with run.units where the unit begins to grow"


_WORD = r"(.*[./_])?(self_?)?(attention|attn)"
_LOGITS = re.compile(_WORD + r"[./_](logits|scores)")
_WEIGHTS = re.compile(_WORD + r"([./_](weights|probs|probabilities))?")
_MIN_POSITIONS = 4


class _Attention(CheckRule):
    name = "attention"
    sentence = "Attention has logits that are too large, or nearly all its weight on single positions."
    sites, columns = ("input", "output", "tap"), ("max", "sum", "sum_sq")
    settings = (
        Setting("logit", 100, "largest logit", "Megatron-LM's and MuonClip's threshold"),
        Setting("entropy", 0.1, "nats", CALIBRATED),
        _THREE_RECORDS,
    )
    advice = "normalise or clip queries and keys, or lower the learning rate of their weights"

    def is_softmax(self, key: SeriesKey) -> bool:
        """Return whether the value belongs to a softmax in attention. A classifier's softmax may choose one class."""
        is_attention = "attention" in key.module_path or "attn" in key.module_path
        return is_attention and self.catalog.class_of(key) == "Softmax"


class _Logits(_Attention, StreakRule):
    what = "the logits of attention are too large"
    measure, limit = "largest logit", "logit"

    def wants(self, key: SeriesKey) -> bool:
        is_tap = key.site == "tap" and _LOGITS.fullmatch(key.name) is not None
        return is_tap or (key.site == "input" and self.is_softmax(key))

    def judge(self, rows: Rows) -> tuple[Flags, Floats]:
        """Judge by the largest finite element, so that a mask of infinities does not count."""
        return rows["max"] > self.thresholds["logit"], rows["max"]


class _Entropy(_Attention, StreakRule):
    what = "the weights of attention are nearly all on single positions"
    measure, limit = "entropy of order 2", "entropy"

    def wants(self, key: SeriesKey) -> bool:
        if key.site == "output":
            return self.is_softmax(key) or (self.catalog.class_of(key) == "MultiheadAttention" and key.name == "1")
        return key.site == "tap" and _WEIGHTS.fullmatch(key.name) is not None

    def judge(self, rows: Rows) -> tuple[Flags, Floats]:
        """Judge by the mean square of the weights. Each query's weights add up to 1, so the sum counts queries."""
        num_positions = np.array([about.shape[-1] if about.shape else 0 for about in self.catalog.about], np.int64)
        with np.errstate(all="ignore"):
            entropy = -np.log(rows["sum_sq"] / rows["sum"])
        is_judged = (num_positions[rows.series] >= _MIN_POSITIONS) & np.isfinite(entropy)
        return is_judged & (entropy < self.thresholds["entropy"]), entropy


class Attention(_Attention, PartsRule):
    """Attention that saturates, so that its gradients vanish or its logits overflow."""

    needs = (
        "needs weights or logits of attention: a Softmax module, MultiheadAttention with need_weights, or "
        "recorder.tap('attention', weights)"
    )
    parts = (_Logits, _Entropy)


_SCALE = re.compile(r"(.*[._])?scale(_inv)?")


class _Precision(CheckRule):
    name = "low_precision"
    sentence = "Values of float16 or float8 are so small that their type has few bits left, or at the type's upper end."
    sites = ("input", "output", "grad_input", "grad_output", "param", "grad", "tap")
    keep = "histogram"
    settings = (
        Setting("low", 0.5, "of the values", CALIBRATED),
        Setting("high", 0.1, "of the values", CALIBRATED),
        Setting("scale", 1e14, "or its inverse", "torchao: 448 / 1e-12 for a tensor of zeros"),
        Setting("records", 3, "records", "a GradScaler has found its scale after so many steps"),
    )
    measure: ClassVar[str] = "share of values"


class _Low(_Precision, _Above):
    columns = ("histogram.subnormal_share",)
    what, limit = "most values are so small that the type loses their bits", "low"
    advice = "scale the values up before the cast: a GradScaler, or the scale of the float8 recipe"


class _High(_Precision, _Above):
    columns = ("histogram.top_share",)
    what, limit = "many values are at the upper end of the type", "high"
    advice = "scale the values down before the cast, or keep them in bfloat16"


class _Scale(_Precision, StreakRule):
    columns = ("absmax", "min")
    what = "a scale of float8 is at its lowest or highest value"
    measure, limit = "the scale", "scale"
    advice = "look at the tensor that is scaled: it is all zeros, or far too large"

    def wants(self, key: SeriesKey) -> bool:
        return key.site in self.sites and "." in key.name and _SCALE.fullmatch(key.name) is not None

    def judge(self, rows: Rows) -> tuple[Flags, Floats]:
        end, high, low = self.thresholds["scale"], np.nan_to_num(rows["absmax"]), rows["min"]
        is_low = (low < 1 / end) & (rows["numel"] > 0)
        return (high > end) | is_low, np.where(is_low, low, high)


class LowPrecision(_Precision, PartsRule):
    """Values that their type can hardly represent, above all in float16 and float8."""

    columns = (*_Low.columns, *_High.columns)
    parts = (_Low, _High, _Scale)
    advice = _Low.advice
