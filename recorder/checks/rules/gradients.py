"""Rules on gradients: vanishing, exploding and missing ones, and those of several objectives.

`recorder.objective(name, tensor)` returns a view of a shared tensor for one objective, so that the gradient through the
view is the gradient of this objective alone. The rule `objectives` compares the gradients of the objectives of one
module. The gradient at a loss, a single number, is only the weight of the loss in the sum. It does not show how
strongly the objective acts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass

import numpy as np

from ...sites import OBJECTIVE, OBJECTIVE_COSINE, objectives_in
from ..rows import (
    IS_PROBE,
    Catalog,
    Flags,
    Floats,
    Integers,
    Memory,
    Rows,
    SeriesKey,
    Spells,
    began,
    grouped,
    modules_of,
)  # fmt: skip
from ..rule import CALIBRATED, CheckRule, Finding, Setting, Severity, StreakRule, WaitingFindings

_LASTING = 0.1
"""A gradient is reported if it has been zero for at least this fraction of the steps so far."""
_Param = tuple[str, str, str]
"""A parameter: the root, the module path and the name."""
_NO_SUM = 1e-3
"""A sum of gradients below this part of the largest possible sum is zero but for rounding."""
_OF_DIFFERENCES = ", as only differences of these outputs enter the loss: their gradients sum up to zero"
_KEEP = "nothing is wrong if only the differences of these outputs are meant to be learnt"
_ZEROED = "something zeroes the gradients between the backward and the update"
_CLEAR = "call zero_grad before the backward, not between the backward and the step of the optimizer"


def is_weight(catalog: Catalog, rows: Rows) -> Flags:
    """Return, for each row, whether its parameter has at least two dimensions, unlike biases and gains."""
    of_series = np.array([len(about.shape) > 1 for about in catalog.about], np.bool_)
    return np.asarray(of_series[rows.series])


def template(path: str) -> str:
    """Return a module path with # for each number, so that all layers of a stack have the same text."""
    return ".".join("#" if part.isdecimal() else part for part in path.split("."))


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


class NoGradient(StreakRule):
    name = "no_gradient"
    sentence = "A parameter of the optimizer has a gradient of zeros alone, or never has one."
    sites, columns, reads_probe = ("grad", "param"), ("zero_count", "numel"), True
    more_columns = ("sum_sq", "micro_step")
    settings = (
        Setting("records", 3, "records", "smdebug's UnchangedTensor"),
        Setting("channels", 0.7, "of the channels of a batch norm", "as `dead_units`"),
    )
    what = "the gradient is zero in all elements"
    measure, limit = "share of zeros", "records"
    advice = "look for a detach, requires_grad=False, a layer that is not called, or units that are all dead"

    def set_up(self) -> None:
        self._spells = Spells(weight=1e6)
        self._waiting = WaitingFindings(self._ended, [self._spells])
        self._num, self._num_zero = Memory(0.0), Memory(0.0)
        """By gradient and rank, the number of steps at which its norm is known, and of those at which it is zero."""
        self._first_step: int | None = None
        """The first step at which any gradient was recorded."""
        self._num_params = Memory(0.0)
        """By parameter and rank, the number of the parameter's records."""
        self._began, self._moved = Memory(), Memory(0.0)
        """By parameter and rank, its first sum of squares, and 1 if a later one is another, as of a moving average."""
        self._largest_sum: dict[tuple[str, str], float] = {}
        """By root and path of a module, the largest sum of its output's gradients in a step, in parts of the most that
        gradients of this length can sum up to."""

    def wants(self, key: SeriesKey) -> bool:
        is_gradient = key.site in self.sites and not key.name.endswith("indices")  # of a sparse gradient
        return is_gradient or key.site == "grad_output"

    def add(self, rows: Rows) -> Iterator[Finding]:
        recorded = rows.without_probe()
        self._note_sums(recorded)
        params = recorded.take(recorded.at("param")).by_lane()
        self._num_params.sums(params.lanes, np.ones(len(params)))
        began(params.lanes, params["sum_sq"], self._began)
        self._moved[params.lanes[params["sum_sq"] != self._began[params.lanes]]] = 1.0
        if self._first_step is None:
            if not (is_grad := recorded.at("grad")).any():
                return
            self._first_step = int(recorded.steps[is_grad][0])
        rows = rows.take(rows.at("grad"))
        rows = rows.take(np.nan_to_num(rows["nan_count"]) == 0).by_lane()  # a NaN does not prove that a gradient flows
        size = rows.over_chunks(rows["sum_sq"])
        self._num.sums(rows.lanes, np.ones(len(rows)))
        self._num_zero.sums(rows.lanes, (size == 0).astype(np.float64))
        # Between two records, the probe shows that a gradient flows. Its norm does not tell which channels are dead.
        rows = rows.take((rows[IS_PROBE] != 1) | ((size > 0) & ~self._are_of_channels(rows)))
        flags, values = self.judge(rows)
        lasting = np.asarray(_LASTING * (rows.steps - self._first_step), np.float64)
        for row, since in self._spells.begun(rows.lanes, rows.steps, flags, self.records, lasting):
            lane, step = int(rows.lanes[row]), int(rows.steps[row])
            of_norm = "the gradient is zero in most channels of a batch norm: they are dead"
            what = self.what if values[row] == 1 else of_norm
            one = self.finding(lane, step, what, self.measure, values[row], 1.0, since=since)
            yield from self._waiting.keep(lane, one)

    def _ended(self, lane: int) -> str:
        return " in most records" if self._num_zero.of(lane) > self._num.of(lane) / 2 else ", but not later"

    def _note_sums(self, rows: Rows) -> None:
        """Note the sums of the gradients of a module's output, at the steps at which its parameters have gradients.

        A bias has the sum over some micro-steps of the step, one after the other. The others are thrown away, as those
        in which a critic gets the loss of the generator, or a call of `torch.autograd.grad`. The nearest sum to zero
        counts.
        """
        modules, known = modules_of(rows)
        places = grouped(modules, rows.ranks, rows.steps)[0]
        chosen = rows.at("grad_output") & (rows["sum_sq"] > 0) & np.isin(places, places[rows.at("grad")])
        rows, modules, places = rows.take(chosen), modules[chosen], places[chosen]
        ids, firsts = grouped(places, np.nan_to_num(rows["micro_step"]).astype(np.int64))
        values = np.array([np.bincount(ids, np.nan_to_num(rows[name])) for name in ("sum", "sum_sq", "numel")])
        places, least = places[firsts], np.full(len(firsts), np.inf)
        sums, starts, length = np.zeros_like(values), np.arange(len(firsts)), 0
        while len(starts):  # as many rounds as a step has micro-steps
            sums[:, starts] += values[:, starts + length]
            total, squares, num = sums[:, starts]
            least[starts] = np.minimum(least[starts], np.abs(total) / np.sqrt(num * squares))
            length += 1
            starts = starts[starts + length < len(firsts)]
            starts = starts[places[starts] == places[starts + length]]
        _, begins = np.unique(places, return_index=True)
        shares = np.minimum.reduceat(least, begins) if len(begins) else least
        for module, one in zip(modules[firsts][begins].tolist(), shares.tolist(), strict=True):
            self._largest_sum[known[module]] = max(self._largest_sum.get(known[module], 0.0), one)

    def judge(self, rows: Rows) -> tuple[Flags, Floats]:
        zeros, numel = rows.over_chunks(rows["zero_count"]), rows.over_chunks(rows["numel"])
        share = np.nan_to_num(zeros / np.maximum(numel, 1))
        # A batch norm's channel has values above and below its bias, so that a few samples do not close it by chance.
        least = np.where(self._are_of_channels(rows), self.thresholds["channels"], 1.0)
        return ((share >= 1) | (share > least)) & (numel > 0), share

    def _are_of_channels(self, rows: Rows) -> Flags:
        return rows.where(
            "bias of channels", lambda key: key.name == "bias" and "BatchNorm" in self.catalog.class_of(key)
        )

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
        zeroed = {root for root, path, name in having if "bias" in name and self._sum_of(root, path, 0.0) > _NO_SUM}
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
        idle = self._idle(having)
        for lane in range(self.catalog.num_lanes):
            key, num = self.catalog.key_of(lane), self._num_params.of(lane)
            if self._num_zero.of(lane) < self._num.of(lane) and key.scope != "local":  # which the backward makes
                zeroed.discard(key.root)
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
                elif (
                    not is_odd and not self._moved.of(lane) and (why := idle.get((key.root, key.module_path, key.name)))
                ):
                    what, is_odd = f"never had a gradient, {why}", True
                severity = Severity.WARNING if is_odd else Severity.NOTE
                measure, limit = "records without a gradient", self.thresholds["records"]
                yield self.finding(lane, 0, what, measure, num, limit, severity)
        for found in self._waiting.finish():
            if found.root in zeroed:
                found = found._replace(what=f"{found.what}, in all parameters of the model: {_ZEROED}", advice=_CLEAR)
            elif found.name == "bias" and self._sum_of(found.root, found.module_path, 1.0) < _NO_SUM:
                found = found._replace(severity=Severity.NOTE, what=found.what + _OF_DIFFERENCES, advice=_KEEP)
            yield found

    def _sum_of(self, root: str, path: str, otherwise: float) -> float:
        return self._largest_sum.get((root, path), otherwise)

    def _idle(self, having: Set[_Param]) -> dict[_Param, str]:
        """Return parameters that should have a gradient, because an optimizer has them, each with a further reason.

        A module that is called before the first one with a gradient is cut off from the loss, as by a `detach`.
        """
        modules = self.catalog.modules.items()
        held = {(*of, name): rate.rpartition(".")[0] for of, one in modules for name, rate in one.rates.items()}
        of_idle = {*held.values()} - {held[one] for one in having & held.keys()}
        order: dict[tuple[str, str], int] = {}
        for key in self.catalog.series:
            if key.site == "output" and key.mode == "train":
                order.setdefault((key.root, key.module_path), len(order))
        firsts: dict[str, int] = {}
        for one in having:
            if one[:2] in order:
                firsts[one[0]] = min(firsts.get(one[0], len(order)), order[one[:2]])
        lacking = {one for one in held if one not in having}
        found = {one: "nor had any other parameter of its optimizer" for one in lacking if held[one] in of_idle}
        cut = {one for one in lacking - found.keys() if one[:2] in order and order[one[:2]] < firsts.get(one[0], -1)}
        return found | dict.fromkeys(cut, "though modules that are called after it have")


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
