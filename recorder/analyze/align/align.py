"""Compares a trainer with an inference engine, and names the first module whose values differ beyond noise.

Tokens, log-probabilities and weights of the two are compared, too.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from ...errors import LookupFailedError
from ...run.reply import Reply, StateLine, Table, plain
from ...run.run import Run
from ...system.text import counted, listed, number, site_in_words
from ..diff.renames import NO_RENAMES, Rename, Renames
from .search import TO_RECORD_ALL, ExpertsApart, LogprobsApart, Parting, Search, ValueApart
from .sequences import JoinedTokens, TokenAt, TokensApart, compare_tokens, match_samples
from .tokens import ENGINE, TRAINER, AlignedRun
from .weights import EQUAL, MERGED, UNKNOWN, WRONG, ModelParameters, WeightState, compare_weights, told_weight

CLIP = 0.2
"""PPO's default clip range. A token counts as clipped if its probability in the trainer, divided by that in the engine,
differs from 1 by more than this."""
ASSUMED = "assumed, for the dtype and for the rounding before a module"


@dataclass(frozen=True, slots=True, kw_only=True)
class Aligned:
    """The result of `align`."""

    num_tokens: int
    """The number of tokens that both sides have."""
    num_samples: int
    joined_by: str
    """How the samples of both sides were matched: by the ``names`` that the program gave, or by their ``tokens``."""
    num_unknown: int
    """The number of calls of the model, in trainer and engine together, whose tokens are not known."""
    step: int
    """The first of the trainer's steps whose tokens are compared."""
    tokens: list[TokensApart]
    logprobs: LogprobsApart | None
    values: list[ValueApart]
    """All compared values, in the trainer's order of execution."""
    experts: dict[str, ExpertsApart]
    """For each block with a router, by its module path, how the choices of experts differ."""
    bounds: str
    parting: Parting | None
    search: Search
    weights: list[WeightState]
    weights_step: int | None
    """The trainer's step whose parameters the engine should have; None if no parameters were compared."""
    notes: list[str]

    @property
    def told(self) -> str:
        """The result, as a sentence."""
        wrong = [state for state in self.weights if state.state in WRONG]
        if self.parting is not None:
            value, of = self.parting.value, f" ({self.parting.class_name})" if self.parting.class_name else ""
            apart = f"{value.text}{of}, by up to {value.largest:.2g}, where noise explains {value.bound:.2g}"
            if self.parting.text.startswith("weights") and f": {value.module_path}." not in self.parting.text:
                return f"{self.parting.text}; trainer and engine part from {apart}"
            return f"trainer and engine part at {apart}: {self.parting.text}"
        if wrong:
            return f"weights differ: {told_weight(wrong[0])}, and no value of a module differs beyond noise"
        differ = sum(one.is_finding for one in self.tokens)
        return (f"the tokens of {counted(differ, 'sample')} differ; " if differ else "") + self._told_values

    @property
    def _told_values(self) -> str:
        if self.logprobs is not None and self._are_logprobs_apart:
            text = f"log-probabilities differ by {self.logprobs.mean_abs:.2g} on average"
            why = "logits are changed after the last module (a temperature?), or values of these tokens are missing"
            return f"{text}, where rounding explains {self.search.logprobs_bound:.2g}, and no value differs: {why}"
        if not self.values:
            return "no value of a module was recorded on both sides"
        if (unsure := self.search.unsure) is not None:
            apart = f"{unsure.text} differs by up to {unsure.largest:.2g}"
            if self.search.noise and unsure.num_beyond:
                text = f"cannot tell: {apart}, where rounding explains {unsure.bound:.2g}, and --noise allows it"
                return f"{text}; a fault would look the same"
            if self.search.noise:
                text = f"cannot tell: {apart}, which is more than --noise measures, and no more than rounding may be"
                return f"{text}; a fault as small would not show"
            why = self.search.set_aside
            how = f"with this --noise ({why})" if why else "without --noise"
            text = f"{apart}, the most of {counted(len(self.values), 'value')}, which may be rounding"
            return f"cannot tell {how}: {text}; a fault as small would not show"
        within = [value for value in self.values if not value.num_beyond]
        worst = max(within or self.values, key=lambda value: value.largest / (value.bound or 1))
        text = f"{counted(len(within), 'value')} of the modules agree within noise; the farthest is {worst.text}"
        return f"{text}, by up to {worst.largest:.2g} (bound {worst.bound:.2g})"

    @property
    def is_fine(self) -> bool:
        """Whether values and log-probabilities differ by noise at most, and tokens and weights not at all."""
        is_wrong = any(state.state in WRONG for state in self.weights) or any(one.is_finding for one in self.tokens)
        return self.parting is None and not is_wrong and not self._are_logprobs_apart

    @property
    def _are_logprobs_apart(self) -> bool:
        if self.logprobs is None or self.num_unknown:  # after unknown tokens, the value may be another token's
            return False
        return self.logprobs.mean_abs > self.search.logprobs_bound


def align(
    trainer: Run,
    engine: Run | None = None,
    *,
    noise: Sequence[Run] = (),
    renames: Renames = NO_RENAMES,
    step: str | None = None,
) -> Aligned:
    """Compare what a trainer and an engine compute for the same tokens.

    Args:
        trainer: the run of the trainer; values are compared in its order of execution.
        engine: the run of the engine that wrote the tokens; None if one program generates and trains. Then calls with
            gradients in the trainer's run are the trainer's, and calls that decode are the engine's.
        noise: further runs of the engine, such as one with other batches; their differences from `engine` are noise.
        renames: the trainer's names for modules that the engine names differently.
        step: the trainer's steps to compare, as in rules; None for all. A token in several steps counts in the first.

    Raises:
        LookupFailedError: the tokens of a run's calls were not recorded, or the two runs have no token in common.
    """
    if engine is None:
        ours, theirs = AlignedRun(trainer, step=step, part=TRAINER), AlignedRun(trainer, renames=renames, part=ENGINE)
    else:
        renames = renames or _below_a_wrapper(trainer, engine)
        ours, theirs = AlignedRun(trainer, step=step), AlignedRun(engine, renames=renames)
    renames.check_used(theirs.run.module_paths)
    sides = [ours, theirs, *(AlignedRun(run, renames=renames) for run in noise)]
    by_name = all(side.samples and all(sample.name is not None for sample in side.samples) for side in sides)
    matches = [match_samples(ours, side, by_name=by_name) for side in sides[1:]]
    told = compare_tokens(ours, theirs, matches[0])
    joined = JoinedTokens(ours, theirs, list(zip(sides[1:], matches, strict=True)))
    if not joined.num_tokens:
        why = next((one.text for one in told), "the tokens of one run are not known; pass them to recorder.tokens")
        which = f"trainer and engine of {trainer.name}" if engine is None else f"{trainer.name} and {engine.name}"
        raise LookupFailedError(f"{which} have no token in common: {why}")
    of_weights, states = None, list[WeightState]()
    if engine is not None:  # without an engine's run, both sides have the same parameters
        parameters = ModelParameters(trainer, ours.root), ModelParameters(engine, theirs.root, renames)
        of_weights, states = compare_weights(*parameters, joined.steps)
    search = Search(ours, theirs, sides[2:], joined, states)
    parting = search.find()
    if search.noise and parting is None:
        plain = Search(ours, theirs, [], joined, states)
        beyond = found.value if (found := plain.find()) else plain.unsure
        search.unsure = beyond if beyond and beyond.num_beyond else search.unsure
    names = ", ".join(name for name, _ in search.noise)
    return Aligned(
        num_tokens=joined.num_tokens, num_samples=joined.num_samples, joined_by="names" if by_name else "tokens",
        num_unknown=ours.num_unknown + theirs.num_unknown, step=joined.step, tokens=told,
        logprobs=_logprobs(joined), values=search.values, experts=search.experts,
        bounds=f"10 times the differences of {names}, and the rounding of 16 bits" if names else ASSUMED,
        parting=parting, search=search, weights=search.weights, weights_step=of_weights,
        notes=[*search.notes, *_unpaired(ours, theirs, search.few_compared)],
    )  # fmt: skip


def _logprobs(joined: JoinedTokens) -> LogprobsApart | None:
    """Return statistics of the tokens' log-probability differences. Return None if no token has one on both sides."""
    apart = joined.logprobs[0] - joined.logprobs[1]
    known = np.flatnonzero(~np.isnan(apart))
    if not known.size:
        return None
    worst = int(known[np.argmax(np.abs(apart[known]))])
    largest, apart = joined.at(worst, float(apart[worst])), apart[known]
    with np.errstate(over="ignore"):
        ratio = np.exp(apart)
    return LogprobsApart(
        len(apart), float(apart.mean()), float(np.abs(apart).mean()), float((ratio - 1 - apart).mean()),
        float((np.abs(ratio - 1) > CLIP).mean()), largest,
    )  # fmt: skip


def _below_a_wrapper(trainer: Run, engine: Run) -> Renames:
    """Return renames that undo a wrapper around one run's model, such as PEFT's. Without a wrapper, return none."""
    ours, theirs = ({path for _, path in run.modules if path} for run in (trainer, engine))
    for outer, inner in ((ours, theirs), (theirs, ours)):
        last = f".{min(inner, default='')}"
        tops = [path.removesuffix(last) for path in outer if path.endswith(last)]
        tops = [top for top in tops if 2 * sum(f"{top}.{path}" in outer for path in inner) > len(inner)]
        if len(tops) == 1 and 2 * len(outer & inner) < len(inner):
            return Renames([Rename(tops[0], "", "") if outer is ours else Rename("", tops[0], "")])
    return NO_RENAMES


def _unpaired(trainer: AlignedRun, engine: AlignedRun, few: str) -> Iterator[str]:
    if few:
        yield f"{few}; {TO_RECORD_ALL}"
    paths = dict.fromkeys(name.module_path for name in trainer.values if name.site == "output")
    theirs = {name.module_path for name in engine.values}
    if alone := [path for path in paths if path and path not in theirs]:
        leaves = theirs - {path.rpartition(".")[0] for path in theirs}
        is_inside = all(not leaves.isdisjoint(itertools.accumulate(path.split("."), "{}.{}".format)) for path in alone)
        how = ", inside modules that the engine does not split" if is_inside else "; --rename pairs modules"
        yield f"{len(alone)} of {len(paths)} modules are in the trainer alone: {listed(map(repr, alone), 3)}{how}"


_FEW = 8


def reply_of(trainer: Run, engine: Run | None, found: Aligned, *, limit: int | None, of_weights: bool) -> Reply:
    """Return the reply of `recorder align`. The exit code is 1 if anything differs, or any weight with `of_weights`."""
    most = _FEW if limit is None else limit or None
    is_wrong = any(state.state in WRONG for state in found.weights) if of_weights else not found.is_fine
    return Reply(
        members=lambda: _members(trainer, engine, found),
        parts=lambda: _weight_parts(found, most) if of_weights else _parts(trainer, engine, found, most),
        exit_code=int(is_wrong),
    )


def _members(trainer: Run, engine: Run | None, found: Aligned) -> dict[str, Any]:
    members = {one.name: plain(getattr(found, one.name)) for one in fields(found) if one.name != "search"}
    return {"trainer": str(trainer.path), "engine": str((engine or trainer).path), "is_fine": found.is_fine, **members}


def _parts(trainer: Run, engine: Run | None, found: Aligned, most: int | None) -> Iterator[str | StateLine | Table]:
    yield f"trainer: {trainer.name} ({trainer.path}), step {found.step}"
    yield f"engine: {engine.name} ({engine.path})" if engine else "engine: the calls of the same run that decode"
    samples = f"{counted(found.num_samples, 'sample')}, joined by {found.joined_by}"
    is_told = bool(found.values) and found.search.unsure is None
    yield StateLine("fault" if not found.is_fine else "ok" if is_told else "note", found.told)
    if found.parting is not None:
        (bad, prompts), (bad_decoded, decoded) = found.parting.at_once, found.parting.one_by_one
        where = f"{bad} of {prompts} tokens of prompts, {bad_decoded} of {decoded} decoded tokens"
        yield f"where: {where}; first {_at(found.parting.first)}; worst {_at(found.parting.worst)}"
    yield f"compared: {counted(found.num_tokens, 'token')} of {samples}; bounds are {found.bounds}"
    for one in found.tokens[:most]:
        yield StateLine("fault" if one.is_finding else "note", one.text)
    if (apart := found.logprobs) is not None:
        yield (
            f"log-probabilities of {counted(apart.num_tokens, 'token')}, trainer minus engine: mean "
            f"{number(apart.mean)}, mean magnitude {number(apart.mean_abs)}, largest {number(apart.largest.apart)} at "
            f"{_at(apart.largest)}; KL (k3) {number(apart.k3)}; {apart.clipped:.1%} of the ratios are beyond {CLIP:g}"
        )
    if engine is not None:
        yield _weights_line(found)
    if found.experts:
        block, its = max(found.experts.items(), key=lambda item: item[1].num_other / max(item[1].num_tokens, 1))
        fullest = max(range(len(its.load_trainer)), key=its.load_trainer.__getitem__)
        share, of_engine = (load[fullest] / max(sum(load), 1) for load in (its.load_trainer, its.load_engine))
        text = f"most other choices at {block!r}, for {its.num_other} of {its.num_tokens} tokens"
        text += f"; expert {fullest} has {share:.0%} of its choices (engine: {of_engine:.0%})"
        state = "note" if its.num_other else "ok"
        yield StateLine(state, f"experts of {counted(len(found.experts), 'router')}: {text}")
    if found.num_unknown:
        advice = "left out; name their samples with recorder.tokens(sample_ids=...)"
        yield StateLine("note", f"the tokens of {counted(found.num_unknown, 'call')} are not known: {advice}")
    for note in found.notes:
        yield StateLine("note", note)
    if found.parting is not None:
        yield _values_table(found.values, found.parting.value, most)
        bins = found.parting.positions
        rows = [(f"{one.first} to {one.last}", str(one.num_tokens), f"{one.mean:.2g}") for one in bins]
        titles = ("positions", "tokens", "mean apart")
        yield Table(titles, rows, numbers=titles, title=f"{found.parting.value.text} by position")


def _at(token: TokenAt) -> str:
    of = f" (token {token.token})" if token.token >= 0 else ""
    return f"{token.sample}, position {token.position}{of}"


def _weights_line(found: Aligned) -> StateLine:
    states = Counter(state.state for state in found.weights)
    num = len(found.weights) - states[UNKNOWN]
    if not num:
        why = "of steps or dtypes that cannot be compared" if found.weights else "not at the same steps of both sides"
        return StateLine("note", f"weights were not compared: they are {why} (record site=param keep=fingerprint)")
    wrong = [state for state in found.weights if state.state in WRONG]
    if not wrong:
        rest = f", {states[UNKNOWN]} are not comparable (not updated, or not recorded)" if states[UNKNOWN] else ""
        rest += f", {states[MERGED]} of the trainer alone are merged, as values agree" if states[MERGED] else ""
        state = "note" if states[MERGED] else "ok"
        return StateLine(state, f"weights: {states[EQUAL]} of {len(found.weights)} parameters are the trainer's{rest}")
    version = Counter(state.step for state in found.weights if state.step is not None).most_common(1)
    most = f"; most of the engine's are of step {version[0][0]}" if version else ""
    text = f"{len(wrong)} of {num} comparable parameters are not those of step {found.weights_step}{most}"
    return StateLine("fault", f"weights: {text}; first: {told_weight(wrong[0])}")


def _weight_parts(found: Aligned, most: int | None) -> Iterator[str | StateLine | Table]:
    yield _weights_line(found)
    if not found.weights:
        return
    order = sorted(found.weights, key=lambda state: state.state not in WRONG)[:most]
    rows = [[one.name, one.state, *("" if n is None else str(n) for n in one[2:4]), one.fused] for one in order]
    titles = ("parameter", "state", "of step", "behind", "slice of")
    title = f"the engine's parameters, wrong ones first ({len(order)} of {len(found.weights)})"
    yield Table(titles, rows, numbers=titles[2:4], whole=titles[:1], title=title)


def _values_table(values: Sequence[ValueApart], first: ValueApart, most: int | None) -> Table:
    at = values.index(first)
    shown = [*values[max(0, at - 2) : at], *values[at:][:most]]
    rows = [
        (repr(one.module_path), site_in_words(one.site, one.name), f"{one.num_beyond}/{one.num_tokens}",
         f"{one.median:.2g}", f"{one.largest:.2g}", f"{one.bound:.2g}", one.dtype_trainer, one.dtype_engine)
        for one in shown
    ]  # fmt: skip
    titles = ("module", "value", "beyond", "median", "largest", "bound", "trainer", "engine")
    title = f"values in the order of execution, from just before the first that parts ({len(shown)} of {len(values)})"
    numbers, drops = ("beyond", "median", "largest", "bound"), ("median", "trainer", "engine")
    return Table(titles, rows, numbers=numbers, whole=("module",), drops=drops, title=title)
