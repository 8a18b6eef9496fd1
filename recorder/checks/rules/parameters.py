"""Rules on parameters and gradients: initialisation, updates, vanishing, exploding and missing gradients, objectives.

`recorder.objective(name, tensor)` returns a view of a shared tensor for one objective, so that the gradient through the
view is the gradient of this objective alone. The rule `objectives` compares the gradients of the objectives of one
module. The gradient at a loss, a single number, is only the weight of the loss in the sum. It does not show how
strongly the objective acts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass
from operator import attrgetter

import numpy as np

from ...sites import OBJECTIVE, OBJECTIVE_COSINE, UPDATE, objectives_in, tells_skip
from ...system.text import number
from ..normal import EXACT, Movement
from ..rows import (
    IS_PROBE,
    MAX_STEPS,
    Catalog,
    Flags,
    Floats,
    Integers,
    Memory,
    Rows,
    SeriesKey,
    Spells,
    Streaks,
    began,
    begins,
    ends,
    grouped,
    previous,
)  # fmt: skip
from ..rule import CALIBRATED, CheckRule, Finding, PartsRule, Setting, Severity, StreakRule, WaitingFindings

_LASTING = 0.1
"""A gradient is reported if it has been zero for at least this fraction of the steps so far."""
_Param = tuple[str, str, str]
"""A parameter: the root, the module path and the name."""
_NARROW = ("bfloat16", "float16", "float8")
"""Types that round small updates away. This is expected and no mistake of the program."""
_LEAST_ELEMENTS = 16
"""The least number of elements of a weight that is judged. The statistics of fewer elements mean little."""
_MAX_SKIPPED = 10_000
_NO_SUM = 1e-3
"""A sum of gradients below this part of the largest possible sum is zero but for rounding."""


def is_weight(catalog: Catalog, rows: Rows) -> Flags:
    """Return, for each row, whether its parameter has at least two dimensions, unlike biases and gains."""
    of_series = np.array([len(about.shape) > 1 for about in catalog.about], np.bool_)
    return np.asarray(of_series[rows.series])


def _modules_of(rows: Rows) -> tuple[Integers, list[tuple[str, str]]]:
    """Return the number of each row's module, and the modules, by root and path, in the order of their numbers."""
    numbers: dict[tuple[str, str], int] = {}
    of_series = [numbers.setdefault((key.root, key.module_path), len(numbers)) for key in rows.catalog.series]
    return np.array(of_series, np.int64)[rows.series], list(numbers)


def _tells_skip(key: SeriesKey) -> bool:
    return tells_skip(key.site, key.name)


def template(path: str) -> str:
    """Return a module path with # for each number, so that all layers of a stack have the same text."""
    return ".".join("#" if part.isdecimal() else part for part in path.split("."))


class Vanishing(StreakRule):
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

    def add(self, rows: Rows) -> Iterator[Finding]:
        """Judge the gradients that are finite and not zero. The others do not show that a gradient is back."""
        rows = rows.take((np.nan_to_num(rows.rms) > 0) & (np.nan_to_num(rows["nan_count"]) == 0))
        yield from super().add(rows) if len(rows) else ()

    def judge(self, rows: Rows) -> tuple[Flags, Floats]:
        """Judge by the root mean square, alone and relative to the largest one of the same step and rank."""
        rms = np.where(is_weight(self.catalog, rows), np.nan_to_num(rows.rms), 0.0)
        ids, firsts = grouped(rows.ranks, rows.steps)
        largest = np.zeros(len(firsts))
        np.maximum.at(largest, ids, rms)
        is_small = (rms > 0) & (rms < self.thresholds["rms"]) & (rms < self.thresholds["share"] * largest[ids])
        return is_small, rms


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


class NoGradient(StreakRule):
    name = "no_gradient"
    sentence = "A parameter of the optimizer has a gradient of zeros alone, or never has one."
    sites, columns = ("grad", "param"), ("zero_count", "numel")
    settings = (
        Setting("records", 3, "records", "smdebug's UnchangedTensor"),
        Setting("channels", 0.7, "of the channels of a batch norm", "as `dead_units`"),
    )
    what = "the gradient is zero in all elements"
    measure, limit = "share of zeros", "records"
    advice = "look for a detach, requires_grad=False, a layer that is not called, or units that are all dead"

    def set_up(self) -> None:
        self._spells = Spells(weight=1e6)
        self._waiting = WaitingFindings(", but not later", [self._spells])
        self._first_step: int | None = None
        """The first step at which any gradient was recorded."""
        self._num_params = Memory(0.0)
        """By parameter and rank, the number of the parameter's records."""
        self._largest_sum: dict[tuple[str, str], float] = {}
        """By root and path of a module, the largest sum of its output's gradients in a step, in parts of the most that
        gradients of this length can sum up to."""

    def wants(self, key: SeriesKey) -> bool:
        is_gradient = key.site in self.sites and not key.name.endswith("indices")  # of a sparse gradient
        return is_gradient or key.site == "grad_output"

    def add(self, rows: Rows) -> Iterator[Finding]:
        is_grad = rows.at("grad")
        self._note_sums(rows.take(rows.at("grad_output")))
        params = rows.take(rows.at("param")).by_lane()
        self._num_params.sums(params.lanes, np.ones(len(params)))
        if not is_grad.any():
            return
        rows = rows.take(is_grad)
        if self._first_step is None:
            self._first_step = int(rows.steps[0])
        rows = rows.take(np.nan_to_num(rows["nan_count"]) == 0).by_lane()  # a NaN does not prove that a gradient flows
        flags, values = self.judge(rows)
        lasting = np.asarray(_LASTING * (rows.steps - self._first_step), np.float64)
        for row, since in self._spells.begun(rows.lanes, rows.steps, flags, self.records, lasting):
            lane, step = int(rows.lanes[row]), int(rows.steps[row])
            of_norm = "the gradient is zero in most channels of a batch norm: they are dead"
            what = self.what if values[row] == 1 else of_norm
            one = self.finding(lane, step, what, self.measure, values[row], 1.0, since=since)
            yield from self._waiting.keep(lane, one)

    def _note_sums(self, rows: Rows) -> None:
        """Note the sums of the gradients of modules' outputs over the calls of a step: the gradient of a bias."""
        modules, known = _modules_of(rows)
        ids, firsts = grouped(modules, rows.ranks, rows.steps)
        total, squares, num = (np.bincount(ids, np.nan_to_num(rows[name])) for name in ("sum", "sum_sq", "numel"))
        with np.errstate(all="ignore"):
            share = np.nan_to_num(np.abs(total) / np.sqrt(num * squares), nan=1.0)
        for module, one in zip(modules[firsts].tolist(), share.tolist(), strict=True):
            self._largest_sum[known[module]] = max(self._largest_sum.get(known[module], 0.0), one)

    def judge(self, rows: Rows) -> tuple[Flags, Floats]:
        zeros, numel = rows.over_chunks(rows["zero_count"]), rows.over_chunks(rows["numel"])
        share = np.nan_to_num(zeros / np.maximum(numel, 1))
        # A batch norm's channel has values above and below its bias, so that a few samples do not close it by chance.
        is_bias = rows.where(
            "bias of channels", lambda key: key.name == "bias" and "BatchNorm" in self.catalog.class_of(key)
        )
        least = np.where(is_bias, self.thresholds["channels"], 1.0)
        return ((share >= 1) | (share > least)) & (numel > 0), share

    def finish(self) -> Iterator[Finding]:
        """Report the parameters that never had a gradient, and the gradients that are zero in all elements.

        An expert that gets no sample for a while has a gradient again later, and the finding becomes a note.
        """
        if self._first_step is None:
            self.why_not_judged = "needs keep=stats: there are no rows of grad"
            return
        keys = self.catalog.series
        # The gradient of an embedding may be sparse, and is then recorded as `weight.values`.
        having = {(key.root, key.module_path, key.name.partition(".")[0]) for key in keys if key.site == "grad"}
        alike = {(root, template(path), name) for root, path, name in having}
        frozen = {(*of, name) for of, facts in self.catalog.modules.items() for name in facts.frozen}
        params = frozen | {(key.root, key.module_path, key.name) for key in keys if key.site == "param"}
        alone = frozen & _alone(params, having)
        last = _last([*self.catalog.modules], frozen, having)
        having |= alone | last
        for one in sorted(alone | last):
            severity, others = self.severity, "the layers around it, alike,"
            if one in last:
                severity, others = Severity.NOTE, "all other layers"
            what = f"never had a gradient: its requires_grad is False, and that of {others} is True"
            yield Finding(
                self.name, severity, 0, one[0], one[1], "param", one[2], ranks=(), what=what, measure="",
                value=0.0, threshold=0.0, advice="set its requires_grad to True, unless it is frozen on purpose",
            )  # fmt: skip
        called = {(key.root, key.module_path) for key in keys if key.site == "output"}
        for lane in range(self.catalog.num_lanes):
            key, num = self.catalog.key_of(lane), self._num_params.of(lane)
            module = self.catalog.modules.get((key.root, key.module_path))
            is_asked = module is None or "grad" in module.sites
            never = key.site == "param" and (key.root, key.module_path, key.name) not in having
            if never and is_asked and num >= self.thresholds["records"]:
                is_odd = (key.root, template(key.module_path), key.name) in alike
                what = "never had a gradient" + (", while this parameter of other layers has" if is_odd else "")
                if module is not None and "output" in module.sites and (key.root, key.module_path) not in called:
                    what += ": its module is never called"
                    is_odd = False
                elif module is not None and key.name in module.frozen:
                    what, is_odd = "never had a gradient: its requires_grad is False", False
                severity = Severity.WARNING if is_odd else Severity.NOTE
                measure, limit = "records without a gradient", self.thresholds["records"]
                yield self.finding(lane, 0, what, measure, num, limit, severity)
        for found in self._waiting.finish():
            is_bias = found.name == "bias" and self._largest_sum.get((found.root, found.module_path), 1.0) < _NO_SUM
            what = f"{found.what}, as only differences of these outputs enter the loss: their gradients sum up to zero"
            yield found._replace(severity=Severity.NOTE, what=what) if is_bias else found


def _alone(params: Set[_Param], having: Set[_Param]) -> set[_Param]:
    """Return parameters without a gradient, if three or more like layers have one, and the layer is not first or last.

    If layers are frozen on purpose, they are the first ones, or all but the last one.
    """
    kinds: dict[_Param, list[_Param]] = {}
    for root, path, name in params:
        kinds.setdefault((root, template(path), name), []).append((root, path, name))
    alone: set[_Param] = set()
    for alike in kinds.values():
        lacking = [one for one in alike if one not in having]
        if len(alike) > 3 and len(lacking) == 1:
            alike.sort(key=lambda one: [int(part) for part in one[1].split(".") if part.isdecimal()])
            alone.update(one for one in lacking if one in alike[1:-1])
    return alone


def _last(modules: list[tuple[str, str]], frozen: Set[_Param], having: Set[_Param]) -> set[_Param]:
    """Return the frozen parameters if these are of the model's last layer alone, such as a head, unlike all others."""
    known = {one[:2] for one in frozen | having}
    of = [module for module in modules if module in known]
    is_head = len(of) > 3 and template(of[-1][1]) not in [template(path) for _, path in of[:-1]]
    return set(frozen) if is_head and {one[:2] for one in frozen} == {of[-1]} and not frozen & having else set()


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
        ids, firsts = grouped(_modules_of(rows)[0], rows.ranks, rows.steps)
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


class _Update(CheckRule):
    name = "update"
    sentence = "A step of the optimizer changes a weight by a large part of its norm, or all steps only shrink it."
    sites, columns, reads_probe = ("param", UPDATE), ("sum_sq", "sum", "numel"), True
    settings = (
        Setting("updates", 3, "first updates, judged by records", "from a random start they are large"),
        Setting("ratio", 0.5, "of the weight's norm, at least", "usual is 1e-3; smdebug's WeightUpdateRatio allows 10"),
        Setting("began", 1e-2, "root mean square", "a weight that begins at zero grows by any factor"),
        Setting("left", 0.5, "of the norm at first", "the weight has then lost more than half of its norm"),
        Setting("inward", 0.71, "of an update's length", "the rest is less than half of its square"),
        Setting("shrinking", 10, "updates in a row", "ours"),
    )  # fmt: skip
    advice = "the learning rate is too high for this weight, warm-up is missing, or something else wrote into it"


class _Large(_Update, StreakRule):
    what = "one step changed the weight by a large part of its norm"
    measure, limit = "update over weight, at least", "ratio"

    def set_up(self) -> None:
        self._movement, self._began = Movement(), Memory()
        self._param_of: dict[int, int] = {}
        """Maps the lane (a series on one rank) of a parameter's updates to the parameter's lane; -1 if unknown."""
        self._num_updates = Memory(0.0)
        """By parameter and rank, the number of the parameter's updates that the probe has measured so far."""
        self._updates: Rows | None = None
        """The probe's rows of updates that belong to the rows being judged."""

    def add(self, rows: Rows) -> Iterator[Finding]:
        self._updates = self._without_first(rows.take(rows.at(UPDATE)).by_lane())
        yield from super().add(rows.take(rows.at("param")))

    def judge(self, rows: Rows) -> tuple[Flags, Floats]:
        """Judge by the updates' sizes from the probe. Without them, changes of norm and sum give a lower bound."""
        lanes, rms = rows.lanes, np.nan_to_num(rows.rms)
        is_begun = began(lanes, rms, self._began) >= self.thresholds["began"]
        ratio, is_recorded = np.zeros(len(rows)), rows[IS_PROBE] != 1
        ratio[is_recorded] = np.nan_to_num(self._movement.ratio(rows.take(is_recorded)), posinf=0.0)
        self._look_up(rows, ratio)
        is_large = (ratio > self.thresholds["ratio"]) & is_begun & ~rows.where("searched", self._is_searched)
        return is_large & is_weight(self.catalog, rows) & (rows["numel"] >= _LEAST_ELEMENTS), ratio

    def _is_searched(self, key: SeriesKey) -> bool:
        """Whether a step of the parameter's optimizer is a search of many updates, as that of LBFGS is."""
        module = self.catalog.modules.get((key.root, key.module_path))
        return module is not None and module.rates.get(key.name, "").startswith("lr.LBFGS")

    def _without_first(self, updates: Rows) -> Rows:
        """Leave out the first rows of each parameter on each rank. The rows are sorted by parameter and rank."""
        numbers = self._num_updates.sums(updates.lanes, np.ones(len(updates))) - 1
        return updates.take(numbers >= self.thresholds["updates"])

    def _look_up(self, rows: Rows, ratio: Floats) -> None:
        """Replace a parameter's ratio by the measured ratio if the probe has measured the size of the update."""
        updates = self._updates
        if updates is None or not len(updates) or not len(rows):
            return
        for lane in np.unique(updates.lanes).tolist():
            if lane not in self._param_of:
                key = self.catalog.key_of(lane)._replace(site="param")
                found = self.catalog.find(key, int(self.catalog.rank_of[lane]))
                self._param_of[lane] = -1 if found is None else found
        whose = np.array([self._param_of[lane] for lane in updates.lanes.tolist()], np.int64)
        wanted, known = whose * MAX_STEPS + updates.steps, rows.lanes * MAX_STEPS + rows.steps
        order = np.argsort(known, kind="stable")
        at = order[np.minimum(np.searchsorted(known, wanted, sorter=order), len(known) - 1)]
        is_same = known[at] == wanted
        with np.errstate(all="ignore"):
            size = np.sqrt(updates["sum_sq"] / rows["sum_sq"][at])
        ratio[at[is_same]] = np.nan_to_num(size[is_same], posinf=0.0)


class _Shrinking(_Large):
    """A weight that has lost most of its norm. Its updates point at zero."""

    what = "the weight has lost most of its norm, because its updates do little but shrink it"
    measure, limit = "of the norm at first", "left"
    advice = "weight decay outweighs the gradient: reduce it, or look why the weight has hardly any gradient"

    def set_up(self) -> None:
        super().set_up()
        self._norm, self._step, self._length = Memory(), Memory(), Memory()
        self.thresholds["records"] = self.thresholds["shrinking"]

    def judge(self, rows: Rows) -> tuple[Flags, Floats]:
        """Judge by the norm's loss at a record, as a fraction of the length of the update before the record."""
        lanes, steps, norm = rows.lanes, rows.steps.astype(np.float64), np.sqrt(rows["sum_sq"])
        ratio = np.full(len(rows), np.nan)
        self._look_up(rows, ratio)
        with np.errstate(all="ignore"):
            left = norm / began(lanes, norm, self._began)
        lost = previous(lanes, norm, self._norm) - norm
        length = previous(lanes, ratio * norm, self._length)
        is_inward = (lost > self.thresholds["inward"] * length) & (steps - previous(lanes, steps, self._step) == 1)
        return is_inward & (left < self.thresholds["left"]) & is_weight(self.catalog, rows) & (
            rows["numel"] >= _LEAST_ELEMENTS
        ), left


class _Uphill(_Update, StreakRule):
    """A learning rate below zero, as of a schedule that goes on falling past its end."""

    what = "the learning rate is below zero: each update follows the gradient uphill"
    measure, limit = "learning rate", "rate"
    advice = "look at the schedule, which may go on beyond its last step"

    def set_up(self) -> None:
        self.thresholds["rate"] = 0.0

    def wants(self, key: SeriesKey) -> bool:
        return key.is_rate

    def judge(self, rows: Rows) -> tuple[Flags, Floats]:
        return rows["mean"] < 0, rows["mean"]


class Update(_Update, PartsRule):
    parts = (_Large, _Shrinking, _Uphill)


class Unchanged(StreakRule):
    name = "unchanged"
    sentence = "A parameter has a gradient, and its values do not change."
    sites, columns = ("param", "grad", "scalar"), EXACT
    settings = (
        Setting("records", 3, "records", "smdebug's UnchangedTensor; TrainCheck"),
        Setting("share", 1e-4, "of the largest gradient", "smaller gradients are roundings"),
        Setting("rounded", 0.5, "of all elements, of a narrow type", CALIBRATED),
        Setting("steps", 20, "steps, of a narrow type", "a warm-up begins with small updates"),
    )
    what = "the parameter has a gradient and does not change"
    measure, limit = "records without a change", "records"
    advice = "look whether the optimizer steps this very parameter, and at its learning rate"

    def set_up(self) -> None:
        self._values = {name: Memory() for name in EXACT}
        self._gradient = Memory(0.0)
        """By gradient and rank, the gradient's largest root mean square so far."""
        self._largest = 0.0
        self._step = Memory()
        self._numbers: dict[tuple[str, str, str, int], int] = {}
        """The number of each parameter, by root, module path, name and rank."""
        self._number = Memory()
        """By lane of a parameter or a gradient (the index of its series on one rank), the number of the parameter."""
        self._still = Streaks()
        """As `_streaks`, with the records that stay because their gradient is zero."""
        self._told: Integers = np.zeros(0, np.int64)
        """The steps with rows of gradients, zeros among them, in the current rows and at the last step before."""
        self._had: tuple[Integers, Integers] = np.zeros(0, np.int64), np.zeros(0, np.int64)
        """The lanes (series on one rank) and steps of gradients, in the current rows and at the last step before."""
        self._stays: dict[int, int] = {}
        """Maps the lane (a series on one rank) of an unchanged 16- or 8-bit parameter to its last unchanged step."""
        self._with_gradient: set[int] = set()
        """The lanes (series on one rank) of parameters that had a gradient in a record, and did not change."""
        self._numel = Memory()
        """By parameter and rank, the parameter's number of elements."""
        self._skipped: dict[tuple[int, int], None] = {}
        """The last steps that GradScaler skipped, as keys of (rank, step)."""
        self._rates: dict[tuple[str, int], tuple[Integers, Floats, float]] = {}
        """By name and rank: the steps and values of the last learning rates, and the largest rate before them."""

    def wants(self, key: SeriesKey) -> bool:
        return key.site in ("param", "grad") or tells_skip(key.site, key.name) or key.is_rate

    def add(self, rows: Rows) -> Iterator[Finding]:
        is_param = rows.at("param")
        self._note_rates(rows.take(rows.where("rate", attrgetter("is_rate"))).by_lane())
        gradients, scalars = rows.take(rows.at("grad")).by_lane(), rows.take(rows.where("skipped", _tells_skip))
        rms, firsts = np.nan_to_num(gradients.rms), np.flatnonzero(begins(gradients.lanes))
        if len(firsts):
            lanes = gradients.lanes[firsts]
            self._gradient[lanes] = np.maximum(np.maximum.reduceat(rms, firsts), self._gradient[lanes])
        self._largest = max(self._largest, float(rms.max(initial=0.0)))
        self._told = np.r_[self._told[self._told == self._told.max(initial=-1)], np.unique(gradients.steps)]
        self._note_gradients(gradients.take(rms > 0))
        skipped = scalars.take(np.nan_to_num(scalars["mean"]) > 0)
        self._skipped |= dict.fromkeys(zip(skipped.ranks.tolist(), skipped.steps.tolist(), strict=True))
        for old in list(self._skipped)[:-_MAX_SKIPPED]:
            del self._skipped[old]
        if is_param.any():
            params = rows.take(is_param)
            self._numel[params.lanes] = params["numel"]
            for one in super().add(rows.take(is_param)):
                if self._has_gradient(one):
                    yield one._replace(detail=self._rate_at(one))

    def _note_rates(self, rows: Rows) -> None:
        """Remember the last learning rates, and the largest rate before these."""
        for start, end in zip(np.flatnonzero(begins(rows.lanes)), np.flatnonzero(ends(rows.lanes)) + 1, strict=True):
            lane = int(rows.lanes[start])
            key = self.catalog.key_of(lane).name, int(self.catalog.rank_of[lane])
            _, before, largest = self._rates.get(key, (rows.steps[:0], np.zeros(0), 0.0))
            largest = max(float(before.max(initial=0.0)), largest)
            self._rates[key] = rows.steps[start:end], rows["mean"][start:end], largest

    def _rate_at(self, one: Finding) -> str:
        """Return the learning rate of a parameter at the step of its finding, in words; empty if it is not known."""
        module, rank = self.catalog.modules.get((one.root, one.module_path)), one.ranks[0] if one.ranks else -1
        rates = self._rates.get((module.rates.get(one.name, ""), rank)) if module is not None else None
        if rates is None or not (end := int(np.searchsorted(rates[0], one.step, "right"))):
            return ""
        last, largest = float(rates[1][end - 1]), max(float(rates[1][:end].max()), rates[2])
        return f"its learning rate is {number(last)}, and was at most {number(largest)}"

    def judge(self, rows: Rows) -> tuple[Flags, Floats]:
        """Flag a parameter's record if it equals the previous record in all statistics, and there was a gradient then.

        If no gradient at all was recorded at the previous record's step, the parameter counts as having one.
        """
        flags = np.ones(len(rows), np.bool_)
        for name, memory in self._values.items():
            flags &= rows[name] == previous(rows.lanes, rows[name], memory)
        flags = rows.over_chunks((~flags).astype(np.float64)) == 0
        before = previous(rows.lanes, rows.steps.astype(np.float64), self._step)
        for index in np.flatnonzero(flags).tolist() if self._skipped else ():
            flags[index] = (int(rows.ranks[index]), int(before[index])) not in self._skipped
        at, stays = np.flatnonzero(flags), flags
        if len(at):
            steps = np.nan_to_num(before[at], nan=-1).astype(np.int64)
            had = self._numbers_of(self._had[0]) * MAX_STEPS + self._had[1]
            is_judged = np.isin(self._numbers_of(rows.lanes[at]) * MAX_STEPS + steps, had)
            flags[at] = is_judged | ~np.isin(steps, self._had[1])
            stays = flags.copy()
            flags[at] &= is_judged | ~np.isin(steps, self._told)
            self._with_gradient.update(rows.lanes[at[is_judged]].tolist())
        self._still.lengths(rows.lanes, rows.steps, stays)
        for lane, step, is_same in zip(rows.lanes.tolist(), rows.steps.tolist(), stays.tolist(), strict=True):
            if not is_same:
                self._stays.pop(lane, None)
            elif self.severity_of(lane) == Severity.NOTE:
                self._stays[lane] = step
        return flags, np.full(len(rows), float(self.records))

    def finish(self) -> Iterator[Finding]:
        """Report that no parameter ever has a gradient, or that most of a model has a type that rounds updates away."""
        yield from super().finish()
        lanes = [
            lane for lane, step in self._stays.items() if step - self._streaks.since(lane) >= self.thresholds["steps"]
        ]
        is_param = self.catalog.mark("param", lambda key: key.site == "param")[self.catalog.series_of]
        has_zeros = any(key.site == "grad" for key in self.catalog.series)
        none = "every gradient is zero" if has_zeros else "no parameter ever has a gradient"
        for lane in () if self._largest else np.flatnonzero(is_param).tolist():
            key, num, since = self.catalog.key_of(lane), self._still.length(lane), self._still.since(lane)
            module = self.catalog.modules.get((key.root, key.module_path))
            is_asked = module is not None and "grad" in module.sites and key.name not in module.frozen
            if is_asked and num >= self.records:
                what = f"{none} as the optimizer steps, and the parameter does not change"
                one = self.finding(lane, since, what, self.measure, num, self.records, self.severity_of(lane))
                yield one._replace(advice="look whether something clears the gradients before the optimizer steps")
        for rank in sorted({int(self.catalog.rank_of[lane]) for lane in lanes}):
            own = np.array([lane for lane in lanes if self.catalog.rank_of[lane] == rank])
            total = float(np.nansum(self._numel[np.flatnonzero(is_param & (self.catalog.rank_of == rank))]))
            share, largest = float(self._numel[own].sum()) / total, int(own[np.argmax(self._numel[own])])
            if share > self.thresholds["rounded"]:
                what = "most of the model does not change: the updates are smaller than its type can resolve"
                since = self._streaks.since(largest)
                yield self.finding(largest, self._stays[largest], what, "share of elements", share,
                                   self.thresholds["rounded"], Severity.WARNING, since)  # fmt: skip

    def _note_gradients(self, rows: Rows) -> None:
        """Remember which parameters have a gradient. An expert without samples has no gradient, and need not change."""
        lanes, steps = self._had
        is_last = steps == steps.max(initial=-1)
        self._had = np.r_[lanes[is_last], rows.lanes], np.r_[steps[is_last], rows.steps]

    def _numbers_of(self, lanes: Integers) -> Integers:
        known = self._number[lanes]
        for lane in np.unique(lanes[np.isnan(known)]).tolist():
            key = self.catalog.key_of(lane)
            param = key.root, key.module_path, key.name, int(self.catalog.rank_of[lane])
            self._number[np.array([lane])] = float(self._numbers.setdefault(param, len(self._numbers)))
        return self._number[lanes].astype(np.int64)

    def what_of(self, lane: int) -> str:
        if lane in self._with_gradient:
            return self.what
        return "the parameter does not change, and no gradient was recorded at these steps"

    def severity_of(self, lane: int) -> Severity:
        """Return the severity, which is a note for a parameter of a type that rounds small updates away."""
        return Severity.NOTE if self.catalog.about_of(lane).dtype.startswith(_NARROW) else self.severity

    def _has_gradient(self, one: Finding) -> bool:
        rank, least = one.ranks[0] if one.ranks else -1, self._largest * self.thresholds["share"]
        param = one.root, one.module_path, one.name
        keys = (key for key in self.catalog.series if key.site == "grad")
        lanes = [self.catalog.find(key, rank) for key in keys if (key.root, key.module_path, key.name) == param]
        return any(lane is not None and self._gradient.of(lane) > least for lane in lanes)


class Initialisation(CheckRule):
    name = "initialisation"
    sentence = "A weight begins with equal elements, or with another scale than the same weight of other layers."
    sites, columns = ("param",), ("std", "mean", "numel")
    settings = (
        Setting("ratio", 8, "times the median", CALIBRATED),
        Setting("alike", 3, "layers", CALIBRATED),
        Setting("apart", 2, "times the others, which are equal", "gains of torch.nn.init are 1 to 5/3"),
        Setting("sigmas", 6, "standard errors", "within which the others are equal"),
    )  # fmt: skip
    advice = "look at how this layer is initialised"

    def set_up(self) -> None:
        self._first_step: int | None = None
        self._std, self._mean = Memory(), Memory()
        self._lanes: list[int] = []

    def add(self, rows: Rows) -> Iterable[Finding]:
        if self._first_step is None:
            self._first_step = int(rows.steps[0])
            is_judged = is_weight(self.catalog, rows) & (rows["numel"] >= _LEAST_ELEMENTS)
            first = rows.take(is_judged & (rows.steps == self._first_step))
            self._std[first.lanes], self._mean[first.lanes] = first["std"], first["mean"]
            self._lanes = np.unique(first.lanes).tolist()
        return ()

    def finish(self) -> Iterator[Finding]:
        if self._first_step is None or self._first_step > 1:
            self.why_not_judged = f"the first recorded parameters are of step {self._first_step}, after updates"
            return
        alike: dict[tuple[int, str, str, str], list[int]] = {}
        for lane in self._lanes:
            key, std = self.catalog.key_of(lane), self._std.of(lane)
            if std == 0 and self._mean.of(lane) != 0:
                yield self.finding(lane, self._first_step, "all elements of the weight begin equal", "std", 0.0, 0.0)
            elif std > 0:
                rank = int(self.catalog.rank_of[lane])
                alike.setdefault((rank, key.root, template(key.module_path), key.name), []).append(lane)
        for lanes in alike.values():
            if len(lanes) >= self.thresholds["alike"]:
                yield from self._odd(lanes, self._first_step)

    def _odd(self, lanes: list[int], step: int) -> Iterator[Finding]:
        fans = [float(max(math.prod(self.catalog.about_of(lane).shape[1:]), 1)) for lane in lanes]
        scales = self._std[np.array(lanes)] * np.sqrt(fans)
        ratios = scales / np.median(scales)
        limit = self.thresholds["ratio"]
        odd = np.flatnonzero((ratios > limit) | (ratios < 1 / limit)).tolist()
        if not odd and len({self.catalog.about_of(lane).shape for lane in lanes}) == 1:
            logs, limit = np.log(scales), self.thresholds["apart"]
            error = self.thresholds["sigmas"] / math.sqrt(2 * math.prod(self.catalog.about_of(lanes[0]).shape))
            for index in (int(np.argmin(logs)), int(np.argmax(logs))):
                others = np.delete(logs, index)
                is_equal = len(others) >= self.thresholds["alike"] and np.ptp(others) <= error
                odd += [index] * bool(is_equal and abs(logs[index] - others.mean()) > max(math.log(limit), error))
        for index in odd:
            what = "the weight begins on another scale than that of other layers"
            yield self.finding(lanes[index], step, what, "times the median", ratios[index], limit)
