"""The rule on attention: logits that are too large, and weights that are all on one position.

It reads softmax modules whose path speaks of attention, the weights that `MultiheadAttention` returns, and taps that
are called ``attention`` or ``attention.logits``. A fused attention shows neither, and is not judged.
"""

from __future__ import annotations

import re
from typing import ClassVar

import numpy as np

from ..rows import Flags, Floats, Rows, SeriesKey
from ..rule import PartsRule, Rule, Setting, StreakRule

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
