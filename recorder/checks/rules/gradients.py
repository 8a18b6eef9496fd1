"""Rules on gradients: of parameters that vanish, explode or are missing, and of objectives that share a tensor.

`recorder.objective(name, tensor)` hands a shared tensor to one objective, so that the gradient that comes back through
the tensor is of that objective alone. The rule `objectives` compares these gradients of one module. The gradient of a
loss, which is a single number, is only the weight with which the loss is added, and says nothing of how hard the
objective pulls.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

import numpy as np

from ..rows import Catalog, Flags, Floats, Integers, Memory, Rows, SeriesKey, Spells, ends, grouped
from ..rule import Finding, Rule, Setting, Severity, StreakRule

_LASTING = 0.1
"""Of the steps so far: for how long a gradient has to be zero."""
_MOST_FOUND = 5_000
"""Findings that wait for the end of the run."""


def is_weight(catalog: Catalog, rows: Rows) -> Flags:
    """Which rows are of parameters of two dims and more: biases and gains differ from them by nature."""
    of_series = np.array([len(about.shape) > 1 for about in catalog.about], np.bool_)
    return np.asarray(of_series[rows.series])


class Vanishing(StreakRule):
    """A gradient that is tiny, and far below those of other layers."""

    name: ClassVar[str] = "vanishing"
    sentence: ClassVar[str] = "The gradient of a weight is tiny, and far below the largest of the other weights."
    sites: ClassVar[tuple[str, ...]] = ("grad",)
    columns: ClassVar[tuple[str, ...]] = ("sum_sq", "numel")
    settings: ClassVar[tuple[Setting, ...]] = (
        Setting(
            name="rms",
            default=1e-7,
            unit="root mean square",
            source="smdebug's VanishingGradient, of the mean magnitude",
        ),
        Setting(name="share", default=1e-4, unit="of the largest", source="calibrated on sound trainings"),
        Setting(name="records", default=3, unit="records", source="calibrated on sound trainings"),
    )
    what: ClassVar[str] = "the gradient vanishes: it is tiny, and far below that of other weights"
    measure: ClassVar[str] = "root mean square"
    limit: ClassVar[str] = "rms"
    advice: ClassVar[str] = "look at the outputs between this layer and the loss: saturated, or scaled down"

    def judge(self, rows: Rows) -> tuple[Flags, Floats]:
        """By the size alone, and beside the largest of the same step and rank."""
        rms = np.where(is_weight(self.catalog, rows), np.nan_to_num(rows.rms), 0.0)
        ids, firsts = grouped(rows.ranks, rows.steps)
        largest = np.zeros(len(firsts))
        np.maximum.at(largest, ids, rms)
        is_small = (rms > 0) & (rms < self.thresholds["rms"]) & (rms < self.thresholds["share"] * largest[ids])
        return is_small, rms


class Exploding(StreakRule):
    """Gradients that grow by a large factor on their way from the last layers to the first.

    Gradients of outputs show it. Those of weights may not, because where they grow backwards, activations shrink.
    """

    name: ClassVar[str] = "exploding"
    sentence: ClassVar[str] = "Gradients grow by a large factor on their way from the last layers to the first."
    sites: ClassVar[tuple[str, ...]] = ("grad_output",)
    columns: ClassVar[tuple[str, ...]] = ("sum_sq", "numel")
    settings: ClassVar[tuple[Setting, ...]] = (
        Setting(name="growth", default=1e3, unit="first third over last third", source="calibrated on sound trainings"),
        Setting(name="layers", default=6, unit="outputs", source="of fewer a third is a single one"),
        Setting(name="records", default=3, unit="records", source="calibrated on sound trainings"),
    )
    what: ClassVar[str] = "gradients explode on their way to the first layers"
    measure: ClassVar[str] = "growth"
    limit: ClassVar[str] = "growth"
    advice: ClassVar[str] = "normalise between layers, start from smaller weights, or clip gradients"

    def judge(self, rows: Rows) -> tuple[Flags, Floats]:
        """By the means of logarithms of a third of the outputs each; series are in the order of the first backward."""
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
        of_last, of_first = (_means(ids[some], logs[some], len(counts)) for some in (depths < 1 / 3, depths >= 2 / 3))
        named = known[starts + counts - 1]
        with np.errstate(all="ignore"):
            growth[named] = np.nan_to_num(10 ** (of_first - of_last))
        flags[named] = (growth[named] > self.thresholds["growth"]) & (counts >= self.thresholds["layers"])
        return flags, growth


class NoGradient(Rule):
    """A parameter that an optimizer has, and whose gradient is zero throughout, or never there."""

    name: ClassVar[str] = "no_gradient"
    sentence: ClassVar[str] = "A parameter of the optimizer has a gradient of zeros alone, or never has one."
    sites: ClassVar[tuple[str, ...]] = ("grad", "param")
    columns: ClassVar[tuple[str, ...]] = ("zero_count", "numel")
    settings: ClassVar[tuple[Setting, ...]] = (
        Setting(name="records", default=3, unit="records", source="smdebug's UnchangedTensor"),
    )
    advice: ClassVar[str] = (
        "look for a detach, requires_grad=False, a layer that is not called, or units that are all dead"
    )

    def __init__(self, catalog: Catalog, thresholds: Mapping[str, float] | None = None) -> None:
        super().__init__(catalog, thresholds)
        self._zeros = _Zeros(catalog, self.thresholds)
        self._records = Memory(0.0)
        """By lane of a parameter."""
        self._has_gradients = False

    def add(self, rows: Rows) -> Iterator[Finding]:
        """Look for gradients of zeros, and remember which parameters there are."""
        is_grad = np.array([key.site == "grad" for key in self.catalog.series], np.bool_)[rows.series]
        params = rows.take(~is_grad).by_lane()
        np_last = ends(params.lanes)
        lanes = params.lanes[np_last]
        self._records[lanes] = self._records[lanes] + np.bincount(params.lanes)[lanes] if len(lanes) else np.zeros(0)
        if is_grad.any():
            self._has_gradients = True
            yield from self._zeros.add(rows.take(is_grad))

    def finish(self) -> Iterator[Finding]:
        """Name the parameters that never had a gradient."""
        if not self._has_gradients:
            self.why_not_judged = "needs keep=stats: there are no rows of grad"
            return
        keys = self.catalog.series
        having = {(key.root, key.module_path, key.name) for key in keys if key.site == "grad"}
        alike = {(root, template(path), name) for root, path, name in having}
        called = {(key.root, key.module_path) for key in keys if key.site == "output"}
        for lane in range(self.catalog.num_lanes):
            key = keys[int(self.catalog.series_of[lane])]
            module = self.catalog.modules.get((key.root, key.module_path))
            is_asked = module is None or "grad" in module.sites
            never = key.site == "param" and (key.root, key.module_path, key.name) not in having
            if never and is_asked and self._records[np.array([lane])][0] >= self.thresholds["records"]:
                is_odd = (key.root, template(key.module_path), key.name) in alike
                what = "never had a gradient" + (", and those of its like have" if is_odd else "")
                if module is not None and "output" in module.sites and (key.root, key.module_path) not in called:
                    what += ": its module is never called"
                    is_odd = False
                severity = Severity.WARNING if is_odd else Severity.NOTE
                num = float(self._records[np.array([lane])][0])
                yield self.finding(lane, 0, what, "records without", num, self.thresholds["records"], severity)
        yield from self._zeros.finish()


class _Zeros(StreakRule):
    """The part of `NoGradient` that each row shows."""

    name: ClassVar[str] = NoGradient.name
    sentence: ClassVar[str] = NoGradient.sentence
    sites: ClassVar[tuple[str, ...]] = ("grad",)
    columns: ClassVar[tuple[str, ...]] = ("zero_count", "numel")
    settings: ClassVar[tuple[Setting, ...]] = NoGradient.settings
    what: ClassVar[str] = "the gradient is zero in all elements"
    measure: ClassVar[str] = "share of zeros"
    limit: ClassVar[str] = "records"
    advice: ClassVar[str] = NoGradient.advice

    def __init__(self, catalog: Catalog, thresholds: Mapping[str, float]) -> None:
        super().__init__(catalog, thresholds)
        self._spells = Spells(weight=1e6)
        self._found: dict[int, Finding] = {}
        """By lane; how bad it is the end of the run tells."""
        self._first_step: int | None = None

    def add(self, rows: Rows) -> Iterator[Finding]:
        """Look for zeros that last."""
        if self._first_step is None:
            self._first_step = int(rows.steps[0])
        rows = rows.take(np.nan_to_num(rows["nan_count"]) == 0).by_lane()  # NaN does not say that it is alive
        flags, values = self.judge(rows)
        lasting = np.asarray(_LASTING * (rows.steps - self._first_step), np.float64)
        for row, since in self._spells.begun(rows.lanes, rows.steps, flags, self.records, lasting):
            lane, step = int(rows.lanes[row]), int(rows.steps[row])
            one = self.finding(lane, step, self.what, self.measure, values[row], 1.0, since=since)
            if len(self._found) < _MOST_FOUND or lane in self._found:
                self._found[lane] = one
            else:
                yield one

    def finish(self) -> Iterator[Finding]:
        """Say what was found; an expert that no sample goes to for a while has a gradient again, and is a note."""
        for lane, one in self._found.items():
            if self._spells.has_ended(lane):
                one = one._replace(severity=Severity.NOTE, what=f"{one.what}, and later it is not")
            yield one

    def judge(self, rows: Rows) -> tuple[Flags, Floats]:
        """By the count of zeros."""
        zeros, numel = rows.over_chunks(rows["zero_count"]), rows.over_chunks(rows["numel"])
        share = np.nan_to_num(zeros / np.maximum(numel, 1))
        return (share >= 1) & (numel > 0), share


def _means(groups: Integers, values: Floats, num_groups: int) -> Floats:
    """The mean of each group, NaN of one without values."""
    with np.errstate(all="ignore"):
        return np.bincount(groups, values, num_groups) / np.bincount(groups, minlength=num_groups)


def template(path: str) -> str:
    """A module path without the numbers in it: the layers of a stack have it in common."""
    return ".".join("#" if part.isdecimal() else part for part in path.split("."))


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
