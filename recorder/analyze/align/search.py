"""Finds the first value that differs between a trainer and an inference engine by more than noise, and the cause.

Every value that both sides have is compared token by token, in the order of execution. Each value has a bound, the
difference that noise explains. For the first value beyond its bound, causes are tried in this order: weights, inputs
(positions and other whole numbers), dtype, the module itself.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ...numerics.keys import by_key
from ...system.text import counted, listed, value_in_words
from .sequences import JoinedTokens, TokenAt, ValuePair
from .tokens import AlignedRun, Array, Floats, Integers, ValueName
from .weights import EQUAL, MERGED, OTHER, TRAINER_ONLY, UNKNOWN, WRONG, WeightState, told_weight

Flags = npt.NDArray[np.bool_]
_SMALL = 0.5
"""The least norm by which a token's difference is divided, as a fraction of the median norm of all tokens. A sketch
(eight sums of a token's elements, with random signs) is smaller by chance in 1 of 100 cases."""


class LogprobsApart(NamedTuple):
    """Statistics of the differences between the tokens' log-probabilities: the trainer's minus the engine's."""

    num_tokens: int
    mean: float
    mean_abs: float
    k3: float
    """The k3 estimate of the divergence KL(engine | trainer): the mean of (r - 1) - log r, where r is the trainer's
    probability over the engine's (Schulman, "Approximating KL divergence", 2020)."""
    clipped: float
    largest: TokenAt


class ValueApart(NamedTuple):
    """How much one value differs between trainer and engine, over all common tokens. Its sketches are compared."""

    module_path: str
    site: str
    name: str
    dtype_trainer: str
    dtype_engine: str
    num_tokens: int
    num_beyond: int
    """The number of tokens at which the value differs by more than `bound`."""
    median: float
    largest: float
    bound: float

    @property
    def text(self) -> str:
        return value_in_words(self.module_path, self.site, self.name)


class PositionsApart(NamedTuple):
    """How much one value differs between trainer and engine, at the tokens in a range of positions."""

    first: int
    last: int
    num_tokens: int
    mean: float


class Parting(NamedTuple):
    """The first value that differs beyond its bound, and why."""

    value: ValueApart
    class_name: str
    first: TokenAt
    worst: TokenAt
    at_once: tuple[int, int]
    """Two counts of the tokens that the engine ran together, as a prompt: those beyond the bound, and all of them."""
    one_by_one: tuple[int, int]
    """Two counts of the tokens that the engine decoded with a cache: those beyond the bound, and all of them."""
    positions: list[PositionsApart]
    reason: str
    """The kind of cause: ``weights``, ``inputs``, ``dtype`` or ``module``."""
    text: str
    """The cause of the difference, as a sentence."""


class ComparedTokens(NamedTuple):
    """How much one value differs between trainer and engine, at each token."""

    name: ValueName
    slots: Integers
    apart: Floats
    is_beyond: Flags


class ExpertsApart(NamedTuple):
    """The tokens for which the routers of trainer and engine chose different experts, and each expert's load."""

    num_other: int
    num_tokens: int
    load_trainer: list[int]
    """For each expert, by its number, how many times the trainer's router chose the expert."""
    load_engine: list[int]


def apart_by_token(a: Floats, b: Floats) -> Floats:
    """Return the relative difference of two values at each token: the norm of a - b over the larger norm of the two.

    The result is infinite for a token where one side has a NaN or an infinity that the other side does not have.
    """
    is_finite = np.isfinite(a) & np.isfinite(b)
    is_other = ~is_finite & (a != b) & ~(np.isnan(a) & np.isnan(b))
    a, b = np.where(is_finite, a, 0.0), np.where(is_finite, b, 0.0)
    sizes = np.maximum(np.linalg.norm(a, axis=1), np.linalg.norm(b, axis=1))
    floor = max(_SMALL * float(np.median(sizes)), np.finfo(np.float64).tiny)
    apart: Floats = np.linalg.norm(a - b, axis=1) / np.maximum(sizes, floor)
    apart[is_other.any(axis=1)] = np.inf
    return apart


BOUNDS = {"float64": 2e-10, "float32": 4e-5, "float16": 2e-2, "bfloat16": 1e-1}
"""By dtype, the largest relative difference at a token that rounding causes in the first modules. Used where no noise
was measured. In 16-bit types, which round once per value, it is a dozen roundings; in float32, where the order of sums
differs as well, it is some hundred. A sketch may show twice the difference of the values."""
_TIMES_BEFORE = 4.0
"""A value counts as differing only if it is this many times as far apart as any value before it. Rounding grows slowly
from module to module, but a fault begins at once."""
_TIMES_NOISE = 10.0
"""A value differs if trainer and engine are more than this many times as far apart as two runs of the engine."""
_CERTAIN = 0.5
"""A difference between this fraction of a measured bound and the whole bound may still be a fault at all tokens."""
_FLOOR = 0.1
"""A bound from measured noise is at least this fraction of the assumed bound, since a repeated run may show no noise by
luck. An output that differs by less than this fraction of the bound agrees."""
_NO_ADAPTER, _NUM_ERRORS = 2e-3, 6.0
"""An adapter counts as merged if its factor in the engine is at least the first number plus the second number of
standard errors."""
_MAX_AGREEING = 16
"""A value beyond its bound counts only if at least one of this many later outputs is beyond its bound, too. A
transformer layer has that many outputs. Its first residual may be so large that it hides a wrong scale of the whole
attention."""
_TELLING = 1e-3
"""If rounding makes values differ by more than this, the rounding may hide a fault that changes log-probabilities."""
_LEAST_MEAN, _MAX_MEAN, _TIMES_LOGITS = 0.01, 0.2, 50.0
"""Limits of the mean magnitude of the differences of log-probabilities. Up to the first there is no finding. Beyond the
second, rounding does not explain the differences. The third is the largest factor between a relative difference of
logits and that of their log-probabilities."""
TO_RECORD_ALL = "record all with RECORDER_RULES='leaf=yes site=output keep=tokens; site=param keep=fingerprint'"
_NUM_BINS = 8
_MAX_EXPERTS = 64
"""The largest number of experts per token. A value with more whole numbers per token is not a router's choice."""


class Search:
    """Compares the two sides value by value, and finds the first value that differs beyond its bound."""

    def __init__(
        self,
        trainer: AlignedRun,
        engine: AlignedRun,
        noise: Sequence[AlignedRun],
        joined: JoinedTokens,
        weights: Sequence[WeightState],
    ) -> None:
        self._trainer, self._engine = trainer, engine
        self.joined = joined
        self.weights = list(weights)
        self.texts = {**engine.texts, **trainer.texts}
        self.values: list[ValueApart] = []
        self.experts: dict[str, ExpertsApart] = {}
        self._num_chosen: list[tuple[int, str]] = []
        """For each router that chooses another number of experts in the engine: the number of earlier values, a
        sentence."""
        self._merged: dict[str, float] = {}
        """Maps the path of each module into which the engine has merged an adapter to the factor of this adapter."""
        self.few_compared = ""
        """A clause that says how few of the engine's modules both sides recorded. Empty if they are a fifth or more."""
        self.notes: list[str] = []
        self.compared: list[ComparedTokens] = []
        self._coarsest = 0.0
        """The largest of `BOUNDS` for the dtypes so far. Rounding errors of a coarse dtype stay in all later values."""
        self.unsure: ValueApart | None = None
        """Of the values whose difference may be rounding or a fault, the one with the largest difference."""
        self.set_aside = ""
        """Why a run that was given as `noise` was not used; empty if every such run was used."""
        self.noise = [(side.run.name, own) for side in noise if (own := self._measured(side))]
        self._before = 0.0
        """The largest difference of any token, among the values so far that stayed within their bounds."""
        self._is_rerouted = np.zeros(len(joined.tokens), bool)
        """For each token, whether any router so far has chosen different experts for it in trainer and engine."""

    def find(self) -> Parting | None:
        """Compare all values; return the first one beyond its bound that later modules confirm, or None."""
        unsure = [self.values[-1] for name in self._trainer.values if self._compare(name)]
        num_both = len({value.module_path for value in self.values})
        num = sum(root == self._engine.root and ".experts." not in path for root, path in self._engine.run.modules)
        if 5 * num_both < num:
            self.few_compared = f"{num_both} of {num} modules were recorded for these tokens on both sides"
        begin = self._note_types()
        beyond = [number for number, one in enumerate(self.compared) if one.is_beyond.any() or number == begin]
        first = next((number for number in beyond if number == begin or self._is_followed(number)), None)
        others = self._note_cancelled([number for number in beyond if first is None or number < first])
        self.unsure = max(unsure + ([] if self.noise else others), key=lambda value: value.largest, default=None)
        judged = [self._judged(state, first) for state in self.weights]
        other = UNKNOWN if any(state.state == TRAINER_ONLY for state in judged) else OTHER  # it moves later values
        self.weights = [state._replace(state=other) if state.state == OTHER else state for state in judged]
        return None if first is None else self._parting(first, self.compared[first])

    @property
    def logprobs_bound(self) -> float:
        """The mean difference of log-probabilities that the rounding of the compared values explains."""
        return min(_MAX_MEAN, max(_LEAST_MEAN, _TIMES_LOGITS * self._coarsest)) if self.values else _MAX_MEAN

    def _compare(self, name: ValueName) -> bool:
        """Compare one value of both sides. Return True if its difference may be either rounding or a fault."""
        dtype = next(iter(self._trainer.values[name].values())).dtype
        if "int" in dtype:
            self._compare_experts(name)
        if dtype not in BOUNDS or (pair := self.joined.pair(name)) is None:
            return False
        apart, (bound, explained) = apart_by_token(pair.trainer, pair.engine), self._bound(name, pair)
        # In a 16-bit type, rounding swaps experts of almost equal score, and the token then takes another path.
        is_beyond = (apart > bound) & ~(self._is_rerouted[pair.slots] & (self._coarsest > _TELLING))
        num_beyond, largest = int(is_beyond.sum()), float(apart.max())
        if not num_beyond:
            self._before = max(self._before, largest)
        self.compared.append(ComparedTokens(name, pair.slots, apart, is_beyond))
        self.values.append(
            ValueApart(
                *name[:3], pair.dtype_trainer, pair.dtype_engine, num_tokens=len(apart), bound=bound,
                num_beyond=num_beyond, median=float(np.median(apart)), largest=largest,
            )
        )  # fmt: skip
        return explained < largest and not num_beyond

    def _note_types(self) -> int | None:
        """Return the index of the first value whose dtypes differ between the two sides; None if there is none.

        If already the first of all values has two dtypes, add a note and return None.
        """
        self._first_other = next((i for i, one in enumerate(self.values) if one.dtype_trainer != one.dtype_engine), -1)
        if self._first_other:
            return self._first_other if self._first_other > 0 else None
        ours, theirs = self.values[0].dtype_trainer, self.values[0].dtype_engine
        text = f"the trainer computes in {ours}, the engine in {theirs}: what the narrower type rounds is noise"
        advice = "" if self.noise else f", which --noise measures by a run of the engine in {ours}"
        self.notes.append(text + advice)
        return None

    def _note_cancelled(self, numbers: Sequence[int]) -> list[ValueApart]:
        """Note which values differ although later values agree. Return those not computed from positions."""
        shifted = [self.values[number] for number in numbers if self._is_of_positions(number)]
        others = [self.values[number] for number in numbers if self.values[number] not in shifted]
        for own, why in (shifted, ", as if whole samples are at other positions"), (others, ""):
            if own:
                text = f"{own[0].text} differs by up to {own[0].largest:.2g}, and what follows does not"
                self.notes.append(f"{text}{why} (values: {len(own)})")
        return others

    def _bound(self, name: ValueName, pair: ValuePair) -> tuple[float, float]:
        """Return two bounds: a value beyond the first differs, and a value within the second agrees."""
        self._coarsest = max(self._coarsest, *(BOUNDS.get(dtype, 0.0) for dtype in pair[3:]))
        assumed = max(self._coarsest, _TIMES_BEFORE * self._before)
        if not (measured := [own[name] for _, own in self.noise if name in own]):
            return assumed, _TELLING
        bound = max(_TIMES_NOISE * max(measured), _FLOOR * self._coarsest)
        # Two runs of an engine in one 16-bit type may round every token alike, and then they show almost no noise.
        rounds_alike = self._coarsest > _TELLING and pair.dtype_trainer == pair.dtype_engine
        return max(bound, assumed) if rounds_alike else bound, max(_TELLING, _CERTAIN * bound)

    def _measured(self, side: AlignedRun) -> dict[ValueName, float]:
        """Return by how much each value differs between `side`, a repeated run, and the engine.

        The result is empty, and a note says why, if the run cannot measure noise.
        """
        found, types, why, num = dict[ValueName, float](), set[str](), "", 0
        for name in self._trainer.values:
            pair, other = self.joined.pair(name), side.pick(side.like(name))
            if pair is None or pair.dtype_trainer not in BOUNDS or other is None:
                continue
            _, here, there = np.intersect1d(pair.slots, other[1], return_indices=True)
            here = here if other[0].shape[1] == pair.engine.shape[1] else here[:0]
            num += bool(here.size)
            types |= {other[2]} - {pair.dtype_trainer} if here.size else set()
            if here.size and other[2] == pair.dtype_trainer:  # noise of one dtype says nothing about another dtype
                found[name] = float(apart_by_token(pair.engine[here], other[0][there].astype(np.float64)).max())
                if len(found) == 1 and found[name] > max(BOUNDS.get(dtype, 0.0) for dtype in pair[3:]):
                    why = f"its {name.module_path!r} computes something else, so it is another model"
        if 2 * len(found) <= num:
            other_types = f"it computes in {', '.join(sorted(types))}, and the trainer does not"
            why = other_types if types else "it has no common tokens, or no common modules"
        elif not any(found.values()):
            why = "it equals the engine to the last bit; run the engine in other batches"
        if why:
            self.set_aside = why
            self.notes.append(f"--noise {side.run.name} is set aside: {why}")
        return {} if why else found

    def _is_followed(self, number: int) -> bool:
        """Return whether later modules differ, too. If not, the value is unused, or its difference cancels out."""
        one, following = self.compared[number], self.compared[number + 1 :]
        later = [other for other in following if other.name.site == "output" and other.name[0] != one.name[0]]
        is_of_positions = self._is_of_positions(number)
        if is_of_positions and (one.name.site == "input" or not self._is_shifted[one.slots[one.is_beyond]].all()):
            return one.name.site == "output"  # an input is the output of another module, which was judged
        return not later or any(other.is_beyond.any() for other in later[: 1 if is_of_positions else _MAX_AGREEING])

    def _is_of_positions(self, number: int) -> bool:
        """Return whether a value is computed from positions or token ids, as by an embedding.

        This holds for the output of a module with such an input, and for an input that equals such an output.
        """
        one = self.compared[number]
        if one.name.site == "input":
            outputs = [at for at, of in enumerate(self.compared[:number]) if of.name.site == "output"]
            same = [at for at in outputs if np.array_equal(self.compared[at].apart, one.apart)]
            return any(map(self._is_of_positions, same))
        is_innermost = not self._trainer.ran_inside(one.name[0])
        names = [name for name in self._trainer.values if name[:2] == (one.name[0], "input") and is_innermost]
        pairs = filter(None, map(self.joined.pair, names))
        return any("int" in pair.dtype_trainer and pair.trainer.shape[1] == 1 for pair in pairs)

    def _judged(self, state: WeightState, number: int | None) -> WeightState:
        """Return the state of a parameter. For a parameter that only the trainer has, decide its state.

        Such a parameter, for example of an adapter, counts as merged if an output that it affects agrees.
        """
        if state.state != TRAINER_ONLY or not self.values:
            return state
        theirs, path = {name.module_path for name in self._engine.values}, state.module_path
        while path and path not in theirs:
            path = path.rpartition(".")[0]
        block, order = f"{path.rpartition('.')[0]}.", {name: i for i, name in enumerate(self._trainer.values)}
        at = max((i for name, i in order.items() if f"{name.module_path}.".startswith(f"{path}.")), default=-1)
        until = len(order) if number is None else order[self.compared[number].name]
        is_merged = number is None or any(
            at <= order[one.name] < until and one.name.site == "output" and not one.is_beyond.any()
            and (one.name.module_path == path or not one.name.module_path.startswith(block))
            for one in self.compared
        )  # fmt: skip
        told = "" if at > until else self._adapter_of(path, is_merged)
        return state._replace(state=told or (MERGED if is_merged else UNKNOWN if at > until else TRAINER_ONLY))

    def _adapter_of(self, path: str, is_merged: bool) -> str:
        """Return the state of a module's adapter. Return an empty string if the state is unknown.

        The module's inputs must be equal on both sides. Sketches are linear: in a merged layer, the output's sketch is
        that of the base layer plus a multiple of that of `lora_B`. DoRA rescales this sum.
        """
        parts = tuple(f"{path}.{part}." for part in ("base_layer", "lora_B", "lora_magnitude_vector"))
        names = (name for name in self._trainer.values if f"{name.module_path}.".startswith(parts))
        pairs = [pair for name in names if (pair := self.joined.pair(name, ValueName(path, "output", "", 0)))]
        if len(pairs) < 2 or not np.array_equal(pairs[0].slots, pairs[1].slots) or not pairs[1].trainer.any():
            return ""
        apart, adapter = pairs[0].engine - pairs[0].trainer, pairs[1].trainer
        times = float((apart * adapter).sum() / (adapter**2).sum())
        rest = np.linalg.norm(apart - times * adapter)
        error = rest / np.linalg.norm(adapter) / np.sqrt(apart.size)
        if abs(times) < _NO_ADAPTER + _NUM_ERRORS * error:
            return TRAINER_ONLY if error < _NO_ADAPTER else ""
        if not is_merged and len(pairs) == 2 and rest > self._coarsest * np.linalg.norm(pairs[0].engine):
            return OTHER
        self._merged[path] = times
        return MERGED

    def _parting(self, number: int, one: ComparedTokens) -> Parting:
        positions = self.joined.positions[one.slots]
        beyond = np.flatnonzero(one.is_beyond if one.is_beyond.any() else one.apart >= 0)
        first, worst = int(beyond[np.argmin(positions[beyond])]), int(np.argmax(one.apart))
        first_at, worst_at = (self.joined.at(int(one.slots[at]), float(one.apart[at])) for at in (first, worst))
        continued = self.joined.is_continued[one.slots]
        at_once, one_by_one = ((int(one.is_beyond[how].sum()), int(how.sum())) for how in (~continued, continued))
        width = -(-(int(positions.max()) + 1) // _NUM_BINS)
        bins = [
            PositionsApart(low, low + width - 1, int(inside.sum()), float(one.apart[inside].mean()))
            for low in range(0, width * _NUM_BINS, width)
            if (inside := positions // width == low // width).any()
        ]
        reason, text = self._reason(number, one.name, one.slots[beyond])
        return Parting(
            self.values[number], self._class_name(one.name.module_path), first_at, worst_at, at_once, one_by_one, bins,
            reason, text,
        )  # fmt: skip

    def _class_name(self, path: str) -> str:
        info = self._trainer.run.modules.get((self._trainer.root, path))
        return info.class_name if info else ""

    def _reason(self, number: int, name: ValueName, beyond: Integers) -> tuple[str, str]:
        value, path = self.values[number], name.module_path
        if name.site == "input":
            path = path.rpartition(".")[0]
        num_before = sum(bool(np.isin(beyond, one.slots).mean() > 0.5) for one in self.compared[:number])
        are_few = not self.few_compared and 5 * num_before < number
        few_before = f"{num_before} of the {number} values before" if are_few else ""
        if few_before:
            self.notes.append(f"{few_before} {value.text} were recorded for these tokens; {TO_RECORD_ALL}")
        if wrong := self._wrong_until(number):
            # Each adapter has a pair of parameters; only the first of them is named.
            one_each = {one.name.partition(".lora_")[0]: one for one in reversed(wrong)}
            told = "; ".join(map(told_weight, [*one_each.values()][:-4:-1]))
            merged = f"; merged are the adapters of {listed(map(repr, self._merged), 3)}" if self._merged else ""
            return "weights", f"weights differ: {told}{merged}"
        if text := self._of_inputs(path, beyond):
            return "inputs", f"inputs differ: {text}"
        if value.dtype_trainer != value.dtype_engine and self._first_other:
            types = f"{value.dtype_trainer} in the trainer, {value.dtype_engine} in the engine"
            return "dtype", f"the type of the values differs: {types}"
        if text := next((text for at, text in self._num_chosen if at <= number), ""):
            return "module", text
        if "Dropout" in self._class_name(path):
            return "module", "dropout drops elements on one side, or others on each; evaluation mode turns dropout off"
        few = self.few_compared or (few_before and f"{few_before} this one were recorded for these tokens")
        if why := few or ("" if number else "no module that runs before it was compared"):
            return "module", f"{why}, so the cause is this module, or any before it"
        return "module", self._alone_near(path) or self._of_code(number, name, path)

    def _of_inputs(self, path: str, beyond: Integers) -> str:
        if (self.joined.begins > self.joined.bases)[beyond].all():
            text = "the trainer has packed these samples behind other samples without position_ids or cu_seqlens"
            return f"{text}, so each attends to the samples before it"
        samples = self.joined.samples
        for what, slots, ours, theirs in self._whole_inputs(path, beyond):
            differs = np.flatnonzero((np.sort(ours) != np.sort(theirs)).any(axis=1))
            if differs.size and np.isin(samples[beyond], samples[slots[differs]]).all():
                at = int(differs[0])
                token = self.joined.at(int(slots[at]), 0.0)
                numbers = (", ".join(f"{one:.0f}" for one in side[at]) for side in (ours, theirs))
                text = "{} {} in the trainer and {} in the engine".format(what, *numbers)
                return f"{text} for {token.sample}, position {token.position}"
        return ""

    def _alone_near(self, path: str) -> str:
        """Say which module in or near `path` runs on only one side. Empty if there is none, or one on each side."""
        for around in (path, path.rpartition(".")[0]):
            here, there = (side.ran_inside(around) for side in (self._trainer, self._engine))
            if (alone := sorted(here ^ there)) and (here <= there or there <= here):
                side = "engine" if here < there else "trainer"
                why = " (an adapter that was not merged, or is switched off?)" if "lora" in alone[0] else ""
                return f"{alone[0]!r} runs in the {side} alone{why}"
        return ""

    def _of_code(self, number: int, name: ValueName, path: str) -> str:
        """Say which module's code computes something else. All inputs of the module were compared."""
        parent = path.rpartition(".")[0]
        has_weight = any(one[:2] == (f"{path}.weight", EQUAL) for one in self.weights)
        scales = self._scales_below(f"{parent}.")
        before = f"{'its weights and ' if has_weight else ''}what runs before it agree{scales}"
        if name.site == "input":
            return f"{before}, so {repr(path) if path else 'the root'} passes on something else in its own code"
        if any(one.module_path == path and one.site == "input" for one in self.values):
            return f"{before}, so the module itself computes something else"
        # The first token attends to itself alone: no mask, scale or position changes its attention output.
        is_beyond = self.compared[number].is_beyond
        first = is_beyond[self.joined.positions[self.compared[number].slots] == 0]
        is_at_all = first.size and first.all() and is_beyond.mean() > 0.9
        is_dropped = "Attention" in self._class_name(parent) and is_at_all and not scales
        of_attention = " (as by dropout in training mode, or by a rounded cache)" if is_dropped else ""
        return f"{before}, so it is the module itself, or its inputs{of_attention}: its inputs were not compared"

    def _scales_below(self, parent: str) -> str:
        """Say by which factors adapters of the modules below `parent` are merged. Return "" if no adapter is merged."""
        scales = by_key((f"{times:.2g}", of) for of, times in self._merged.items() if of.startswith(parent))
        if not scales:
            return ""
        odd, *others = sorted(scales, key=lambda times: len(scales[times]))
        rest = f"{', '.join(others)} times, that of {listed(map(repr, scales[odd]), 3)} " if others else ""
        return f", adapters are merged {rest}{odd} times (lora_alpha / r?)"

    def _wrong_until(self, number: int) -> list[WeightState]:
        """Return the wrong parameters that may explain a value's difference, first those of the value's module.

        Modules that run later, or whose outputs agree, are left out.
        """
        path, order = self.values[number].module_path, list(dict.fromkeys(name[0] for name in self._trainer.values))
        outputs = [one for one in self.values[:number] if one.site == "output"]
        agree = {one.module_path for one in outputs if one.largest < _FLOOR * one.bound}
        late = set(order[order.index(path) + 1 :]) | agree
        wrong = [one for one in self.weights if one.state in WRONG and one.module_path not in late - {path}]
        return sorted(wrong, key=lambda one: not f"{one.module_path}.".startswith(f"{path}."))

    def _whole_inputs(self, path: str, beyond: Integers) -> Iterator[tuple[str, Integers, Array, Array]]:
        given = self.joined.given[beyond]
        known = (given >= 0).all(axis=1) & ~self._is_shifted[beyond]
        yield "the model was given the position", beyond[known], given[known, :1], given[known, 1:]
        for name in self._trainer.values:
            pair = self.joined.pair(name) if (name.module_path, name.site) == (path, "input") else None
            if pair is not None and "int" in pair.dtype_trainer:
                at = np.isin(pair.slots, beyond)
                what = f"{path!r} was given {name.name}".removesuffix(" input")
                yield what, pair.slots[at], pair.trainer[at], pair.engine[at]

    @functools.cached_property
    def _is_shifted(self) -> Flags:
        """By token, whether one side shifts all positions of the token's sample. Rotary embeddings tolerate a shift."""
        joined = self.joined
        shift = joined.given[:, 0] - joined.given[:, 1]
        at = np.flatnonzero(joined.is_joined & (joined.given >= 0).all(axis=1))
        numbers, shifts = np.unique(np.stack([joined.begins[at], shift[at]]), axis=1)
        return np.isin(joined.begins, numbers[(np.bincount(numbers)[numbers] == 1) & (shifts != 0)])

    def _compare_experts(self, name: ValueName) -> None:
        pair = self.joined.pair(name)
        block = name.module_path.rpartition(".")[0]
        if pair is None and (self._trainer.root, f"{block}.experts") in self._trainer.run.modules:
            ours, theirs = self._trainer.pick(name), self._engine.pick(self._engine.like(name))
            if ours and theirs and ours[3] != theirs[3]:
                text = f"{name.module_path!r} chooses {counted(ours[3], 'expert')} of a token in the trainer"
                self._num_chosen.append((len(self.values), f"{text}, and {theirs[3]} in the engine"))
        if pair is None or not 1 < pair.trainer.shape[1] <= _MAX_EXPERTS:
            return
        is_other = (np.sort(pair.trainer) != np.sort(pair.engine)).any(axis=1)
        self._is_rerouted[pair.slots[is_other]] = True
        num_experts = int(max(pair.trainer.max(), pair.engine.max())) + 1
        loads = (np.bincount(a.astype(np.int64).ravel(), minlength=num_experts) for a in (pair.trainer, pair.engine))
        self.experts[block] = ExpertsApart(int(is_other.sum()), len(pair.slots), *(load.tolist() for load in loads))
