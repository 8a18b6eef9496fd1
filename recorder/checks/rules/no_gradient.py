"""The rule on parameters that never have a gradient, and on gradients of zeros alone."""

from __future__ import annotations

from collections.abc import Iterator, Set
from operator import attrgetter

import numpy as np

from ...system.text import module_in_words
from ..rows import (
    IS_PROBE,
    MAX_STEPS,
    Flags,
    Floats,
    Memory,
    Rows,
    SeriesKey,
    Spells,
    began,
    begins,
    ends,
    grouped,
    modules_of,
)  # fmt: skip
from ..rule import Finding, Setting, Severity, StreakRule, WaitingFindings
from .accumulation import Accumulation
from .gradients import template

_LASTING = 0.1
"""A gradient is reported if it has been zero for at least this fraction of the steps so far."""
_Param = tuple[str, str, str]
"""A parameter: the root, the module path and the name."""
_NO_SUM = 1e-3
"""A sum of gradients below this part of the largest possible sum is zero but for rounding."""
_ROUNDED = 1e-9
"""A difference of sums of squares below this part of them may be rounding."""
_OF_DIFFERENCES = ", as only differences of these outputs enter the loss: their gradients sum up to zero"
_NEAR_ZERO = 0.02
"""A loss that was last below this part of the largest has come near zero little by little."""
_SATISFIED = "; the loss has fallen to zero"
_KEEP = "nothing is wrong if only the differences of these outputs are meant to be learnt"
_ZEROED = "something zeroes the gradients between the backward and the update"
_NO_LOSS = "the loss does not depend on the model's outputs, because their gradients are zero, too"
_TERMS = "look at the factors of the loss, such as weights, masks or advantages that are all zero"
NO_GRADIENT = "never had a gradient"
_IS_FROZEN, _UNFREEZE = ": its requires_grad is False", "set its requires_grad to True, unless it is frozen on purpose"
_WAS_FROZEN = "; its module had parameters whose requires_grad was False"
_LATER_HAVE = "though modules that are called after it have"
_OTHER_MODEL_HAS = "though another model of its optimizer has"
_CUT_OFF = "look for a detach, or a reentrant checkpoint of which no input requires a gradient"
NO_INPUT = "; that of the bias is not: the input of the module is zero"
_MAKE_INPUT = "look at what makes the input of this module"
_ENDS_IN = "; it becomes zero between the outputs of {} and {}"
_AT_END = (
    "look at what is computed between the two: a value that is constant, saturated or rounded passes no gradient on"
)
_FACTORS = ", as are all parameters of the module: a product of factors that are all zero has no gradient"
_BEGIN = "let one of the factors begin with other values than zero"
_NO_TERM = ", nor had the module's output: the loss does not depend on it"
_ADD_TERM = (
    "see whether a term of the loss was left out, or the output is detached; nothing is wrong if it is not needed"
)
_GONE_STEPS, _GONE = 20, 0.1
"""A gradient is gone for good if it came at none of so many last steps, nor in this part of all steps."""
_CLEAR = "call zero_grad before the backward, not between the backward and the step of the optimizer"


class NoGradient(StreakRule):
    name = "no_gradient"
    sentence = "A parameter of the optimizer has a gradient of zeros alone, or never has one."
    sites, columns, reads_probe = ("grad", "param"), ("zero_count", "numel"), True
    more_columns = ("sum_sq", "micro_step", "mean")
    settings = (
        Setting("records", 3, "records", "smdebug's UnchangedTensor"),
        Setting("channels", 0.7, "of the channels of a batch norm", "as `dead_units`"),
    )
    what = "the gradient is zero in all elements"
    measure, limit = "share of zeros", "records"
    advice = "look for a detach, requires_grad=False, a layer that is not called, or units that are all dead"

    def set_up(self) -> None:
        self._accumulation = Accumulation(self.catalog, self.finding)
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
        self._is_zero = Memory(1.0)
        """By parameter and rank, 1 if the parameter was zero in every record."""
        self._is_driven: dict[str, bool] = {}
        """By root with gradients of outputs, whether one of them was not zero."""
        self._outputs: dict[tuple[str, str], bool] = {}
        """By root and path of a module with gradients of its output in training, whether one of them was not zero."""
        self._last = Memory()
        """By gradient and rank, the last step at which the gradient came."""
        self._stepped: dict[tuple[str, int], int] = {}
        """By learning rate and rank, the last step of its optimizer."""
        self._largest_loss, self._last_loss = Memory(0.0), Memory(0.0)
        """By loss and rank, the largest value, and the last one above zero."""
        self._largest_sum: dict[tuple[str, str], float] = {}
        """By root and path of a module, the largest sum of its output's gradients in a step, in parts of the most that
        gradients of this length can sum up to."""

    def wants(self, key: SeriesKey) -> bool:
        is_gradient = key.site in self.sites and not key.name.endswith("indices")  # of a sparse gradient
        return is_gradient or self._accumulation.wants(key) or key.is_loss or key.is_rate

    def add(self, rows: Rows) -> Iterator[Finding]:
        recorded = rows.without_probe()
        self._note_sums(recorded)
        self._accumulation.add(recorded)
        self._note_outputs(recorded)
        rates = recorded.take(recorded.where("rate", attrgetter("is_rate"))).by_lane()
        for lane, step in zip(rates.lanes[ends(rates.lanes)].tolist(), rates.steps[ends(rates.lanes)], strict=True):
            self._stepped[self.catalog.key_of(lane).name, int(self.catalog.rank_of[lane])] = int(step)
        satisfied = self._satisfied_steps(recorded.take(recorded.where("loss", attrgetter("is_loss"))))
        params = recorded.take(recorded.at("param")).by_lane()
        self._num_params.sums(params.lanes, np.ones(len(params)))
        began(params.lanes, params["sum_sq"], self._began)
        self._moved[params.lanes[params["sum_sq"] != self._began[params.lanes]]] = 1.0
        self._is_zero[params.lanes[params["sum_sq"] != 0]] = 0.0
        if self._first_step is None:
            if not (is_grad := recorded.at("grad")).any():
                return
            self._first_step = int(recorded.steps[is_grad][0])
        rows = rows.take(rows.at("grad"))
        self._last[rows.lanes] = rows.steps.astype(np.float64)  # in the order of the steps
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
            if int(rows.ranks[row]) * MAX_STEPS + step in satisfied:
                one = one._replace(severity=Severity.NOTE, what=what + _SATISFIED)
            yield from self._waiting.keep(lane, one)

    def _satisfied_steps(self, losses: Rows) -> set[int]:
        """Return the steps, as rank * MAX_STEPS + step, at which all losses are zero, and came there little by little.

        A loss that has reached the least it can be, as that of a margin which all samples keep, has no gradient. A loss
        that a mask or a factor makes zero leaps there.
        """
        losses = losses.by_lane()
        values, places = losses["mean"], losses.ranks * MAX_STEPS + losses.steps
        is_reached = np.zeros(len(losses), np.bool_)
        for first, last in zip(
            np.flatnonzero(begins(losses.lanes)), np.flatnonzero(ends(losses.lanes)) + 1, strict=True
        ):
            lane, some = losses.lanes[[first]], values[first:last]
            # The largest loss so far, and the last one above zero, with those of earlier rows at the front.
            above = np.where(some > 0, some, 0.0)
            largest = np.maximum.accumulate(np.r_[self._largest_loss[lane], above])
            at = np.maximum.accumulate(np.where(above > 0, np.arange(1, len(some) + 1), 0))
            latest = np.r_[self._last_loss[lane], above][at]
            is_reached[first:last] = (some == 0) & (latest < _NEAR_ZERO * largest[1:])
            self._largest_loss[lane], self._last_loss[lane] = largest[-1], latest[-1]
        return set(np.setdiff1d(places[is_reached], places[~is_reached]).tolist())

    def _ended(self, lane: int) -> str:
        return " in most records" if self._num_zero.of(lane) > self._num.of(lane) / 2 else ", but not later"

    def _note_outputs(self, rows: Rows) -> None:
        of_outputs = rows.take(rows.at("grad_output"))
        nonzero = set(of_outputs.lanes[of_outputs["sum_sq"] != 0].tolist())
        for lane in np.unique(of_outputs.lanes).tolist():
            key, is_driven = self.catalog.key_of(lane), lane in nonzero
            self._is_driven[key.root] = self._is_driven.get(key.root, False) or is_driven
            module = key.root, key.module_path
            self._outputs[module] = self._outputs.get(module, False) or is_driven

    def _note_sums(self, rows: Rows) -> None:
        """Note the sums of the gradients of a module's output, at the steps at which its parameters have gradients.

        A bias has the sum over some micro-steps of the step, one after the other. The others are thrown away, as those
        in which a critic gets the loss of the generator, or a call of `torch.autograd.grad`. So is one call of a
        micro-step, whose gradient the loss is given, as that of a gradient penalty. The nearest sum to zero counts.
        """
        modules, known = modules_of(rows)
        places = grouped(modules, rows.ranks, rows.steps)[0]
        chosen = rows.at("grad_output") & (rows["sum_sq"] > 0) & np.isin(places, places[rows.at("grad")])
        rows, modules, places = rows.take(chosen), modules[chosen], places[chosen]
        ids, firsts = grouped(places, np.nan_to_num(rows["micro_step"]).astype(np.int64))
        of_rows = np.array([np.nan_to_num(rows[name]) for name in ("sum", "sum_sq", "numel")])
        values = np.array([np.bincount(ids, one) for one in of_rows])
        places, least = places[firsts], np.full(len(firsts), np.inf)
        total, squares, num = values[:, ids] - of_rows
        is_left = (num > 0) & (squares > _ROUNDED * values[1, ids])
        np.minimum.at(least, ids[is_left], np.abs(total[is_left]) / np.sqrt(num[is_left] * squares[is_left]))
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
        layers = _like_layers(params)
        alone = frozen & _alone(layers, having)
        last = _last([*self.catalog.modules], frozen, having)
        behind = (frozen & _behind(layers, having)) - alone - last
        having |= alone | last | behind
        for one in sorted(alone | last | behind):
            severity, others = self.severity, "the layers around it, alike,"
            if one not in alone:
                severity, others = Severity.NOTE, "all other layers" if one in last else "a layer before it, alike,"
            what = f"{NO_GRADIENT}{_IS_FROZEN}, and that of {others} is True"
            yield Finding(
                self.name, severity, 0, one[0], one[1], "param", one[2], ranks=(), what=what, measure="",
                value=0.0, threshold=0.0, advice=_UNFREEZE,
            )  # fmt: skip
        called = {(key.root, key.module_path) for key in keys if key.site == "output"}
        idle = self._idle(having)
        for lane in range(self.catalog.num_lanes):
            key, num = self.catalog.key_of(lane), self._num_params.of(lane)
            if self._num_zero.of(lane) < self._num.of(lane) and key.scope != "local":  # which the backward makes
                zeroed.discard(key.root)
                self._is_driven[key.root] = True
            module = self.catalog.modules.get((key.root, key.module_path))
            is_asked = module is None or "grad" in module.sites
            never = key.site == "param" and (key.root, key.module_path, key.name) not in having
            if never and is_asked and num >= self.thresholds["records"]:
                is_odd = (key.root, template(key.module_path), key.name) in alike
                what = NO_GRADIENT + (", while this parameter of other layers has" if is_odd else "")
                is_cut = False
                of_attention = self.catalog.modules.get((key.root, key.module_path.rpartition(".")[0]))
                is_inside = of_attention is not None and of_attention.class_name == "MultiheadAttention"
                is_seen = (key.root, key.module_path) in called or is_inside  # its weights are used without a call
                if module is not None and "output" in module.sites and not is_seen:
                    what += ": its module is never called"
                    is_odd = False
                elif module is not None and key.name in module.frozen:
                    what, is_odd = NO_GRADIENT + _IS_FROZEN, False
                elif module is not None and module.unfrozen is not None:  # perhaps just now
                    what, is_odd = NO_GRADIENT + _WAS_FROZEN, False
                elif (
                    not is_odd and not self._moved.of(lane) and (why := idle.get((key.root, key.module_path, key.name)))
                ):
                    what, is_odd, is_cut = f"{NO_GRADIENT}, {why}", True, True
                elif not is_odd and self._is_unused(key):
                    what = NO_GRADIENT + _NO_TERM
                severity = Severity.WARNING if is_odd else Severity.NOTE
                measure, limit = "records without a gradient", self.thresholds["records"]
                found = self.finding(lane, 0, what, measure, num, limit, severity, since=0)
                if what.endswith(_IS_FROZEN):
                    found = found._replace(advice=_UNFREEZE)
                elif what.endswith(_NO_TERM):
                    found = found._replace(advice=_ADD_TERM)
                yield found._replace(advice=_CUT_OFF) if is_cut else found
            elif key.site == "grad" and key.scope != "local" and self._is_frozen_since(lane):
                since = int(self._last.of(lane))
                what = f"its last gradient was at step {since}{_IS_FROZEN}"
                found = self.finding(lane, since, what, "", 0.0, 0.0, Severity.NOTE, since=since)
                yield found._replace(advice=_UNFREEZE)
        yield from self._accumulation.finish()
        for found in self._waiting.finish():
            if found.root in zeroed:
                found = found._replace(what=f"{found.what}, in all parameters of the model: {_ZEROED}", advice=_CLEAR)
            elif not self._is_driven.get(found.root, True):
                found = found._replace(what=f"{found.what}, in all parameters of the model: {_NO_LOSS}", advice=_TERMS)
            elif found.name == "bias" and self._sum_of(found.root, found.module_path, 1.0) < _NO_SUM:
                found = found._replace(severity=Severity.NOTE, what=found.what + _OF_DIFFERENCES, advice=_KEEP)
            elif found.what == self.what:
                found = self._explained(found)
            yield found

    def _explained(self, found: Finding) -> Finding:
        """Say of a gradient that is zero in all elements where it becomes zero, if that can be told."""
        module = self.catalog.modules.get((found.root, found.module_path))
        own = {lane: key for lane in range(self.catalog.num_lanes)
               if (key := self.catalog.key_of(lane))[:2] == (found.root, found.module_path)}  # fmt: skip
        params = [lane for lane, key in own.items() if key.site == "param"]
        of_bias = [lane for lane, key in own.items() if (key.site, key.name) == ("grad", "bias")]
        is_affine = module is not None and ("Linear" in module.class_name or "Conv" in module.class_name)
        if is_affine and found.name == "weight" and any(self._num_zero.of(one) < self._num.of(one) for one in of_bias):
            return found._replace(what=found.what + NO_INPUT, advice=_MAKE_INPUT)
        if len(params) > 1 and all(self._is_zero.of(lane) for lane in params):
            return found._replace(what=found.what + _FACTORS, advice=_BEGIN)
        order = dict.fromkeys(
            key.module_path for key in self.catalog.series
            if (key.root, key.site, key.mode) == (found.root, "output", "train")
        )  # fmt: skip
        driven = {path: one for path in order if (one := self._outputs.get((found.root, path))) is not None}
        first = next((at for at, is_driven in enumerate(driven.values()) if is_driven), 0)
        if driven.get(found.module_path, True) or not first or not all([*driven.values()][first:]):
            return found
        between = map(module_in_words, [*driven][first - 1 : first + 1])
        return found._replace(what=found.what + _ENDS_IN.format(*between), advice=_AT_END)

    def _is_unused(self, key: SeriesKey) -> bool:
        """Return whether no gradient came to the output of a module, though gradients of outputs are recorded."""
        module = self.catalog.modules.get((key.root, key.module_path))
        is_asked = module is not None and "grad_output" in module.sites
        return (
            is_asked and self._outputs.get((key.root, "")) is True and (key.root, key.module_path) not in self._outputs
        )

    def _is_frozen_since(self, lane: int) -> bool:
        """Return whether a gradient came no more because its parameter was frozen, and its optimizer went on."""
        key = self.catalog.key_of(lane)
        module = self.catalog.modules.get((key.root, key.module_path))
        if module is None or key.name not in module.frozen:
            return False
        rate = self.catalog.rate_of(key.root, key.module_path, key.name)
        newest = self._stepped.get((rate, int(self.catalog.rank_of[lane])), 0)
        return newest - self._last.of(lane) > max(_GONE_STEPS, _GONE * (newest - (self._first_step or 0)))

    def _sum_of(self, root: str, path: str, otherwise: float) -> float:
        return self._largest_sum.get((root, path), otherwise)

    def _idle(self, having: Set[_Param]) -> dict[_Param, str]:
        """Return parameters that should have a gradient, because an optimizer has them, each with a further reason.

        A module that is called before the first one with a gradient is cut off from the loss, as by a `detach`. So is
        a model whose parameters never have one.
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
        graphless = {of for of, facts in modules if facts.graphless}  # under no_grad, on purpose
        lacking = {one for one in held if one not in having and one[:2] not in graphless}
        found = {one: "nor had any other parameter of its optimizer" for one in lacking if held[one] in of_idle}
        cut = {one for one in lacking - found.keys() if one[:2] in order and order[one[:2]] < firsts.get(one[0], -1)}
        roots = {one[0] for one in having}
        whole = {one for one in lacking - found.keys() if one[:2] in order and one[0] not in roots}
        return found | dict.fromkeys(cut, _LATER_HAVE) | dict.fromkeys(whole, _OTHER_MODEL_HAS)


def _alone(layers: list[list[_Param]], having: Set[_Param]) -> set[_Param]:
    """Return parameters without a gradient, if three or more like layers have one, and the layer is not first or last.

    If layers are frozen on purpose, they are the first ones, or all but the last one.
    """
    alone: set[_Param] = set()
    for alike in layers:
        lacking = [one for one in alike if one not in having]
        if len(alike) > 3 and len(lacking) == 1:
            alone.update(one for one in lacking if one in alike[1:-1])
    return alone


def _behind(layers: list[list[_Param]], having: Set[_Param]) -> set[_Param]:
    """Return parameters without a gradient, if a like layer before has one. Layers frozen on purpose are the first."""
    behind: set[_Param] = set()
    for alike in layers:
        first = next((at for at, one in enumerate(alike) if one in having), len(alike))
        behind.update(one for one in alike[first:] if one not in having)
    return behind


def _like_layers(params: Set[_Param]) -> list[list[_Param]]:
    """Return the parameters of layers that are alike, in the order of the layers."""
    kinds: dict[_Param, list[_Param]] = {}
    for root, path, name in params:
        kinds.setdefault((root, template(path), name), []).append((root, path, name))
    for alike in kinds.values():
        alike.sort(key=lambda one: [int(part) for part in one[1].split(".") if part.isdecimal()])
    return list(kinds.values())


def _last(modules: list[tuple[str, str]], frozen: Set[_Param], having: Set[_Param]) -> set[_Param]:
    """Return the frozen parameters if these are of the model's last layer alone, such as a head, unlike all others."""
    known = {one[:2] for one in frozen | having}
    of = [module for module in modules if module in known]
    is_head = len(of) > 3 and template(of[-1][1]) not in [template(path) for _, path in of[:-1]]
    return set(frozen) if is_head and {one[:2] for one in frozen} == {of[-1]} and not frozen & having else set()
