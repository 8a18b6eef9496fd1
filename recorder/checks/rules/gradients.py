"""Rules on gradients: vanishing and exploding ones, and those of several objectives.

`recorder.objective(name, tensor)` returns a view of a shared tensor for one objective, so that the gradient through the
view is the gradient of this objective alone. The rule `objectives` compares the gradients of the objectives of one
module. The gradient at a loss, a single number, is only the weight of the loss in the sum. It does not show how
strongly the objective acts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from ...sites import OBJECTIVE, OBJECTIVE_COSINE, objectives_in
from ..rows import (
    Catalog,
    Flags,
    Floats,
    Integers,
    Rows,
    SeriesKey,
    grouped,
    modules_of,
)  # fmt: skip
from ..rule import CALIBRATED, CheckRule, Finding, Setting, Severity, StreakRule


def is_weight(catalog: Catalog, rows: Rows) -> Flags:
    """Return, for each row, whether its parameter has at least two dimensions, unlike biases and gains."""
    of_series = np.array([len(about.shape) > 1 for about in catalog.about], np.bool_)
    return np.asarray(of_series[rows.series])


def template(path: str) -> str:
    """Return a module path with # for each number, so that all layers of a stack have the same text."""
    return ".".join("#" if part.isdecimal() else part for part in path.split("."))


ONE_ELEMENT = "the norm is over one element: its output is its bias, whatever its input, and no gradient passes it"


class Vanishing(StreakRule):
    """Gradients that get lost on their way from the loss to a weight.

    The finding is a note if the gradients of weights before and after it, in the order of the forward, are not small: a
    gradient passes the weight by, as it passes queries and keys by while all scores of an attention are equal.
    """

    name = "vanishing"
    sentence = "The gradient of a weight is tiny, and far below the largest of the other weights."
    sites, columns = ("grad",), ("sum_sq", "numel")
    settings = (
        Setting("rms", 1e-7, "root mean square", "smdebug's VanishingGradient, of the mean magnitude"),
        Setting("share", 1e-4, "of the largest", CALIBRATED),
        Setting("records", 3, "records", CALIBRATED),
    )
    what = "the gradient vanishes: it is tiny, and far below that of other weights"
    may_recover = True
    measure, limit = "root mean square", "rms"
    advice = "look at the outputs between this layer and the loss: saturated, or scaled down"

    def set_up(self) -> None:
        self._places: dict[tuple[str, str], int] = {}
        """By root and path of a module, its place in the order of the forward. `_num_series` series were looked at."""
        self._num_series = 0
        self._spans: dict[str, tuple[int, int]] = {}
        """By root, the first and the last place of a large gradient when a gradient was last small."""

    def add(self, rows: Rows) -> Iterator[Finding]:
        """Judge the gradients that are finite and not zero. The others do not show that a gradient is back."""
        rows = rows.take((np.nan_to_num(rows.rms) > 0) & (np.nan_to_num(rows["nan_count"]) == 0))
        yield from super().add(rows) if len(rows) else ()

    def finish(self) -> Iterator[Finding]:
        """Report the norms that pass no gradient on, because each of their samples is one element."""
        yield from super().finish()
        for lane in range(self.catalog.num_lanes):
            key, shape = self.catalog.key_of(lane), self.catalog.about_of(lane).shape
            is_norm = (key.site, key.name, shape) == ("grad", "weight", (1,))
            if is_norm and "LayerNorm" in self.catalog.class_of(key):
                one = self.finding(lane, 0, ONE_ELEMENT, "", 0.0, 0.0, since=0)
                yield one._replace(advice="normalise over more elements, or leave the norm out")

    def judge(self, rows: Rows) -> tuple[Flags, Floats]:
        """Judge by the root mean square, alone and relative to the largest one of the same step and rank."""
        rms = np.where(is_weight(self.catalog, rows), np.nan_to_num(rows.rms), 0.0)
        ids, firsts = grouped(rows.ranks, rows.steps)
        largest = np.zeros(len(firsts))
        np.maximum.at(largest, ids, rms)
        is_small = (rms > 0) & (rms < self.thresholds["rms"]) & (rms < self.thresholds["share"] * largest[ids])
        if is_small.any():
            self._note_span(rows.lanes[~is_small & (rms > self.thresholds["share"] * largest[ids])])
        return is_small, rms

    def severity_of(self, lane: int) -> Severity:
        return Severity.NOTE if self._is_passed_by(lane) else self.severity

    def what_of(self, lane: int) -> str:
        return self.what + (" before and after it" if self._is_passed_by(lane) else "")

    def _note_span(self, lanes: Integers) -> None:
        """Note from which to which place of the forward the gradients of `lanes`, which are large, reach."""
        series = self.catalog.series
        for number in range(self._num_series, len(series)):
            if series[number].site == "output":
                self._places.setdefault((series[number].root, series[number].module_path), number)
        self._num_series, self._spans = len(series), {}
        for lane in np.unique(lanes).tolist():
            root, place = self.catalog.key_of(lane).root, self._place_of(lane)
            if place >= 0:
                first, last = self._spans.get(root, (place, place))
                self._spans[root] = min(first, place), max(last, place)

    def _place_of(self, lane: int) -> int:
        key = self.catalog.key_of(lane)
        return self._places.get((key.root, key.module_path), -1)

    def _is_passed_by(self, lane: int) -> bool:
        """Return whether weights of modules that ran before and of modules that ran after have larger gradients."""
        first, last = self._spans.get(self.catalog.key_of(lane).root, (0, 0))
        return first < self._place_of(lane) < last


class Exploding(StreakRule):
    """Gradients that grow by a large factor on their way from the last layers to the first.

    Gradients of outputs show the growth. Gradients of weights may not: activations are small where gradients are large.
    """

    name = "exploding"
    sentence = "Gradients grow by a large factor on their way from the last layers to the first."
    sites, columns = ("grad_output",), ("sum_sq", "numel")
    settings = (
        Setting("growth", 1e3, "first third over last third", CALIBRATED),
        Setting("layers", 6, "outputs", "of fewer a third is a single one"),
        Setting("records", 3, "records", CALIBRATED),
    )
    what = "gradients explode on their way to the first layers"
    measure, limit = "growth", "growth"
    advice = "normalise between layers, start from smaller weights, or clip gradients"

    def judge(self, rows: Rows) -> tuple[Flags, Floats]:
        """Judge by mean logarithms of gradients in the first and the last third of outputs, in backward order."""
        rms = np.nan_to_num(rows.rms)
        flags, growth = np.zeros(len(rows), np.bool_), np.zeros(len(rows))
        (known,) = np.nonzero(rms > 0)
        if not len(known):
            return flags, growth
        ids, _ = grouped(rows.ranks[known], rows.steps[known])
        order = np.lexsort((rows.series[known], ids))
        known, ids = known[order], ids[order]
        counts = np.bincount(ids)
        starts = np.cumsum(counts) - counts
        depths = (np.arange(len(ids)) - starts[ids]) / counts[ids]
        logs = np.log10(rms[known])
        is_last, is_first = depths < 1 / 3, depths >= 2 / 3
        named = known[starts + counts - 1]
        with np.errstate(all="ignore"):
            of_last, of_first = (
                np.bincount(ids[some], logs[some], len(counts)) / np.bincount(ids[some], minlength=len(counts))
                for some in (is_last, is_first)
            )
            growth[named] = np.nan_to_num(10 ** (of_first - of_last))
        flags[named] = (growth[named] > self.thresholds["growth"]) & (counts >= self.thresholds["layers"])
        return flags, growth


class Objectives(StreakRule):
    name = "objectives"
    sentence = "The gradient of one objective at a shared tensor drowns that of another."
    sites, columns = ("tap",), ("sum_sq", "numel")
    settings = (Setting("ratio", 30, "times the smallest", CALIBRATED), Setting("records", 10, "records", CALIBRATED))
    needs = "needs objectives: recorder.objective('main', hidden) in the model, and site=tap keep=stats"
    what = "the gradient of this objective drowns that of another"
    measure, limit = "times the smallest gradient", "ratio"
    advice = "weigh the objectives anew, or look why the others have hardly any gradient"

    def set_up(self) -> None:
        self._has_shared = False

    def wants(self, key: SeriesKey) -> bool:
        return key.site == "tap" and key.phase == "backward" and key.name.startswith(OBJECTIVE)

    def judge(self, rows: Rows) -> tuple[Flags, Floats]:
        """Judge by the ratio of the largest to the smallest root mean square among the objectives of one module."""
        is_shared = rows["numel"] > 1
        self._has_shared |= bool(is_shared.any())
        rms = np.where(is_shared, np.nan_to_num(rows.rms), np.nan)
        ids, firsts = grouped(modules_of(rows)[0], rows.ranks, rows.steps)
        smallest, largest = np.full(len(firsts), np.inf), np.zeros(len(firsts))
        np.minimum.at(smallest, ids[is_shared], rms[is_shared])
        np.maximum.at(largest, ids[is_shared], rms[is_shared])
        with np.errstate(all="ignore"):
            ratio = np.where(rms == largest[ids], rms / smallest[ids], 1.0)
        return (ratio > self.thresholds["ratio"]) & (rms > 0), np.minimum(np.nan_to_num(ratio), 1e30)

    def finish(self) -> Iterable[Finding]:
        super().finish()
        if not self._has_shared:
            self.why_not_judged = "needs the tensor that the objectives share: they got only single numbers"
        return ()


@dataclass(slots=True)
class _Agreement:
    """The cosines between the gradients of two objectives. Cosines below zero at the end are counted separately."""

    first_step: int
    num_records: int = 0
    num_opposed: int = 0
    """The number of cosines below the negative threshold."""
    num_early: int = 0
    """The number of cosines below the negative threshold among the first records."""
    total: float = 0.0
    """The sum of all cosines."""
    num: int = 0
    cosine: float = 0.0
    positive: float = 0.0
    """The fraction of cosines above zero. As `cosine`, a running mean, later mostly of the last records."""
    latest: tuple[int, float, float] = (0, 0.0, 0.0)
    """`num`, `cosine` and `positive`, with the cosines below zero at the end included."""
    num_below: int = 0
    total_below: float = 0.0
    """The sum of the cosines since the last one above zero. `num_below` is the number of these cosines."""
    since: int = 0
    found: Finding | None = None
    balance: int = 0
    """The number of cosines below zero less the number above zero, from the first opposed step of the finding on."""

    def add(self, step: int, cosine: float, window: float) -> None:
        num, mean, positive = self.latest
        weight = 1 / min(num + 1, window)
        self.latest = num + 1, mean + (cosine - mean) * weight, positive + ((cosine > 0) - positive) * weight
        if cosine < 0:
            self.since = self.since if self.num_below else step
            self.num_below, self.total_below = self.num_below + 1, self.total_below + cosine
        else:
            self.num, self.cosine, self.positive = self.latest
            self.num_below, self.total_below = 0, 0.0


class Flip(CheckRule):
    name = "flip"
    sentence = "The gradients of two objectives agreed at a shared tensor, and oppose each other from a step on."
    sites, columns = ("scalar",), ("mean",)
    settings = (
        Setting("cosine", 0.15, "before, and as far below zero since", "ours"),
        Setting("share", 0.85, "of cosines above zero before", "ours"),
        Setting("before", 15, "records", "ours"),
        Setting("records", 10, "records", "ours"),
        Setting("window", 100, "records", "ours: how far the rule looks back"),
    )
    needs = "needs two objectives of one tensor: recorder.objective('main', hidden) in the model, and site=scalar"
    advice = "look at what changed at this step: data, weights of the losses, labels of one objective"

    def set_up(self) -> None:
        self._pairs: dict[int, _Agreement] = {}

    def wants(self, key: SeriesKey) -> bool:
        return key.site == "scalar" and key.name.startswith(OBJECTIVE_COSINE)

    def add(self, rows: Rows) -> Iterable[Finding]:
        ids, firsts = grouped(rows.lanes, rows.steps)
        means = np.bincount(ids, rows["mean"]) / np.bincount(ids)
        for at, cosine in sorted(zip(firsts.tolist(), means.tolist(), strict=True), key=lambda one: rows.steps[one[0]]):
            lane, step = int(rows.lanes[at]), int(rows.steps[at])
            pair = self._pairs.setdefault(lane, _Agreement(step))
            if not math.isfinite(cosine):
                continue
            is_opposed = cosine < -self.thresholds["cosine"]
            pair.num_early += is_opposed and pair.num_records < self.thresholds["before"]
            pair.num_records, pair.num_opposed, pair.total = (
                pair.num_records + 1, pair.num_opposed + is_opposed, pair.total + cosine
            )  # fmt: skip
            pair.add(step, cosine, self.thresholds["window"])
            if pair.found is not None:
                pair.balance += 1 if cosine < 0 else -1
            elif pair.num_below >= self.thresholds["records"]:
                pair.balance = pair.num_below
                pair.found = self._judge(lane, step, pair)
        return ()

    def _judge(self, lane: int, step: int, pair: _Agreement) -> Finding | None:
        least, since = self.thresholds["cosine"], pair.total_below / pair.num_below
        has_agreed = pair.num >= self.thresholds["before"] and pair.positive >= self.thresholds["share"]
        if not has_agreed or pair.cosine < least or since > -least:
            return None
        what = f"{self._words(lane)} agreed, and oppose each other since"
        one = self.finding(lane, step, what, "cosine", since, -least, since=pair.since)
        return one._replace(
            detail=f"cosine about {pair.cosine:.2f} before, and {since:.2f} in the records up to step {step}"
        )

    def _words(self, lane: int) -> str:
        names, number = objectives_in(self.catalog.key_of(lane).name, OBJECTIVE_COSINE)
        first, second = names.split(":", 1)
        where = f" at tensor {number}" if number else ""
        return f"the gradients of the objectives {first!r} and {second!r}{where}"

    def _opposed(self, lane: int, pair: _Agreement) -> Finding | None:
        """Return a note if two objectives' gradients oppose each other from the first record to the last; else None."""
        before, share = self.thresholds["before"], self.thresholds["share"]
        is_so = pair.num_early >= share * before and pair.num_opposed >= share * pair.num_records
        if not is_so or pair.num_records < before + self.thresholds["records"]:
            return None
        what, mean = f"{self._words(lane)} oppose each other from the first record on", pair.total / pair.num_records
        one = self.finding(lane, pair.first_step, what, "mean cosine", mean, -self.thresholds["cosine"], Severity.NOTE)
        return one._replace(advice="if both are meant to be learnt here, weigh them anew, or give each its own layers")

    def finish(self) -> Iterable[Finding]:
        if not self._pairs:
            self.why_not_judged = self.needs
        for lane, pair in self._pairs.items():
            one = pair.found or self._opposed(lane, pair)
            if pair.found is not None and pair.balance < 0:
                what = pair.found.what.replace("oppose each other since", "opposed each other for a while")
                one = pair.found._replace(severity=Severity.NOTE, what=what)
            if one is not None:
                yield one
