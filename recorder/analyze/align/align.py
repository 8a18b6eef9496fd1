"""Where a trainer and an engine part: tokens, log-probabilities, weights, and the first module beyond noise."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ...errors import LookupFailedError
from ...run.run import Run
from ...system.text import counted, listed
from ..diff.renames import NO_RENAMES, Rename, Renames
from .apart import ExpertsApart, LogprobsApart, Parting, ValueApart
from .search import Search
from .sequences import JoinedTokens, TokensApart, compare_tokens, match_samples
from .tokens import ENGINE, TRAINER, Side
from .weights import WRONG, ModelParameters, WeightState, compare_weights, told_weight

CLIP = 0.2
"""A ratio of probabilities that is farther from 1 is clipped, as PPO clips it by default."""
ASSUMED = "assumed, for the type and for what rounding does before a module"


@dataclass(frozen=True, slots=True, kw_only=True)
class Aligned:
    """What `align` has found."""

    num_tokens: int
    """The tokens that both sides have."""
    num_samples: int
    joined_by: str
    """``names`` that the program gave, or ``tokens``."""
    num_unknown: int
    """The calls of both sides of which nobody can tell the tokens."""
    step: int
    """The trainer's step whose calls are compared, the first of them."""
    tokens: list[TokensApart]
    logprobs: LogprobsApart | None
    values: list[ValueApart]
    """All compared values, in the order of execution."""
    experts: dict[str, ExpertsApart]
    """By block of experts."""
    bounds: str
    parting: Parting | None
    search: Search
    weights: list[WeightState]
    weights_step: int | None
    """The trainer's step whose parameters the engine should have; None if no call of the engine says."""
    notes: list[str]

    @property
    def told(self) -> str:
        """The answer, as a sentence."""
        wrong = [state for state in self.weights if state.state in WRONG]
        if self.parting is not None:
            value, of = self.parting.value, f" ({self.parting.class_name})" if self.parting.class_name else ""
            apart = f"{value.text}{of}, by up to {value.largest:.2g}, where noise explains {value.bound:.2g}"
            if self.parting.text.startswith("weights") and f": {value.module_path}." not in self.parting.text:
                return f"{self.parting.text}; trainer and engine part from {apart}"
            return f"trainer and engine part at {apart}: {self.parting.text}"
        if wrong:
            return f"weights differ: {told_weight(wrong[0])}, and no value of a module parts beyond noise"
        differ = sum(one.is_finding for one in self.tokens)
        return (f"the tokens of {counted(differ, 'sample')} differ; " if differ else "") + self._told_values

    @property
    def _told_values(self) -> str:
        if not self.values:
            return "no value of a module is on both sides"
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
        """Whether nothing is beyond noise."""
        is_wrong = any(state.state in WRONG for state in self.weights) or any(one.is_finding for one in self.tokens)
        return self.parting is None and not is_wrong


def align(
    trainer: Run,
    engine: Run | None = None,
    *,
    noise: Sequence[Run] = (),
    renames: Renames = NO_RENAMES,
    step: str | None = None,
) -> Aligned:
    """Compare what a trainer and an engine compute of the same tokens.

    Args:
        trainer: the run of the trainer; its order of execution counts.
        engine: the run of the engine, which wrote the tokens; None if the trainer's run has both, as where one program
            generates and trains: then its calls with gradients are the trainer's, and those that decode the engine's.
        noise: further runs of the engine, such as one with other batches: what they differ in is noise.
        renames: names of the engine's modules.
        step: the trainer's steps to compare, as in rules; None: all. Of a token in several steps the first counts.

    Raises:
        LookupFailedError: the tokens of a run's calls were not recorded, or the two have no token in common.
    """
    if engine is None:
        ours, theirs = Side(trainer, step=step, part=TRAINER), Side(trainer, renames=renames, part=ENGINE)
    else:
        renames = renames or _below_a_wrapper(trainer, engine)
        ours, theirs = Side(trainer, step=step), Side(engine, renames=renames)
    renames.check_used(theirs.run.module_paths)
    sides = [ours, theirs, *(Side(run, renames=renames) for run in noise)]
    by_name = all(side.samples and all(sample.name is not None for sample in side.samples) for side in sides)
    matches = [match_samples(ours, side, by_name=by_name) for side in sides[1:]]
    told = compare_tokens(ours, theirs, matches[0])
    joined = JoinedTokens(ours, theirs, list(zip(sides[1:], matches, strict=True)))
    if not joined.num_tokens:
        why = next((one.text for one in told), "the tokens of one of them are not known; say them with recorder.tokens")
        which = f"trainer and engine of {trainer.name}" if engine is None else f"{trainer.name} and {engine.name}"
        raise LookupFailedError(f"{which} have no token in common: {why}")
    of_weights, states = None, list[WeightState]()
    if engine is not None:  # else the parameters are the same ones
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
        bounds=f"10 times what {names} differ in, and what 16 bits round" if names else ASSUMED,
        parting=parting, search=search, weights=search.weights, weights_step=of_weights,
        notes=[*search.notes, *_unpaired(ours, theirs, search.few_compared)],
    )  # fmt: skip


def _logprobs(joined: JoinedTokens) -> LogprobsApart | None:
    """Return how far the log-probabilities of the tokens are apart; None if no token has one on both sides."""
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
    """Pair the modules of a model with those of one inside a wrapper, as PEFT has it; nothing where names are alike."""
    ours, theirs = ({path for _, path in run.modules if path} for run in (trainer, engine))
    for outer, inner in ((ours, theirs), (theirs, ours)):
        last = f".{min(inner, default='')}"
        tops = [path.removesuffix(last) for path in outer if path.endswith(last)]
        tops = [top for top in tops if 2 * sum(f"{top}.{path}" in outer for path in inner) > len(inner)]
        if len(tops) == 1 and 2 * len(outer & inner) < len(inner):
            return Renames([Rename(tops[0], "", "") if outer is ours else Rename("", tops[0], "")])
    return NO_RENAMES


def _unpaired(trainer: Side, engine: Side, few: str) -> Iterator[str]:
    if few:
        yield f"{few}; record all with RECORDER_RULES='leaf=yes site=output keep=tokens; site=param keep=fingerprint'"
    paths = dict.fromkeys(name.module_path for name in trainer.values if name.site == "output")
    theirs = {name.module_path for name in engine.values}
    if alone := [path for path in paths if path and path not in theirs]:
        leaves = theirs - {path.rpartition(".")[0] for path in theirs}
        is_inside = all(not leaves.isdisjoint(itertools.accumulate(path.split("."), "{}.{}".format)) for path in alone)
        how = ", inside modules that the engine has whole" if is_inside else "; --rename pairs them"
        yield f"{len(alone)} of {len(paths)} modules are in the trainer alone: {listed(map(repr, alone), 3)}{how}"
