"""Where a trainer and an engine part: tokens, log-probabilities, weights, and the first module beyond noise."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...errors import LookupFailedError
from ...run.run import Run
from ..diff.renames import NO_RENAMES, Renames
from .search import Floats, JoinedTokens, LogprobsApart, Parting, Search, TokenAt, ValueApart
from .sequences import TokensApart, compare_tokens, match_samples
from .tokens import Side
from .weights import WRONG, WeightState, compare_weights

CLIP = 0.2
"""A ratio of probabilities that is farther from 1 is clipped, as PPO clips it by default."""


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
    experts: dict[str, tuple[int, int]]
    """By block of experts: the tokens for which the two sides chose other experts, and the tokens compared."""
    bounds: str
    """How the bounds were found."""
    parting: Parting | None
    weights: list[WeightState]
    weights_step: int | None
    """The trainer's step whose parameters the engine should have; None if no call of the engine says."""
    notes: list[str]

    @property
    def is_fine(self) -> bool:
        """Whether nothing is beyond noise."""
        is_wrong = any(state.state in WRONG for state in self.weights) or any(one.is_finding for one in self.tokens)
        return self.parting is None and not is_wrong


def align(
    trainer: Run,
    engine: Run,
    *,
    noise: Sequence[Run] = (),
    renames: Renames = NO_RENAMES,
    step: str | None = None,
) -> Aligned:
    """Compare what a trainer and an engine compute of the same tokens.

    Args:
        trainer: the run of the trainer; its order of execution counts.
        engine: the run of the engine, which wrote the tokens.
        noise: further runs of the engine, such as one with other batches: what they differ in is noise.
        renames: names of the engine's modules.
        step: the trainer's steps to compare, as in rules; None: all. Of a token in several steps the first counts.

    Raises:
        LookupFailedError: the tokens of a run's calls were not recorded, or the two have no token in common.
    """
    if renames:
        renames.check_used(engine.module_paths)
    ours, theirs = Side(trainer, step=step), Side(engine, renames=renames)
    sides = [ours, theirs, *(Side(run, renames=renames) for run in noise)]
    by_name = all(side.is_named for side in sides)
    matches = [match_samples(ours, side, by_name=by_name) for side in sides[1:]]
    told = compare_tokens(ours, theirs, matches[0])
    joined = JoinedTokens(ours, theirs, list(zip(sides[1:], matches, strict=True)))
    if not joined.num_tokens:
        why = next((one.text for one in told), "the tokens of one of them are not known; say them with recorder.tokens")
        raise LookupFailedError(f"{trainer.name} and {engine.name} have no token in common: {why}")
    history = Side(trainer) if step is not None else ours  # the parameters of all steps
    of_weights, states = compare_weights(history, theirs, joined.steps)
    search = Search(ours, theirs, sides[2:], joined, states)
    parting = search.find()
    return Aligned(
        num_tokens=joined.num_tokens, num_samples=joined.num_samples, joined_by="names" if by_name else "tokens",
        num_unknown=ours.num_unknown + theirs.num_unknown, step=joined.step, tokens=told,
        logprobs=_logprobs(ours, joined), values=search.values, experts=search.experts,
        bounds=f"10 times what {', '.join(run.name for run in noise)} differ in" if noise else "assumed for the type",
        parting=parting, weights=states, weights_step=of_weights, notes=[*search.notes, *_unpaired(ours, theirs)],
    )  # fmt: skip


def _logprobs(trainer: Side, joined: JoinedTokens) -> LogprobsApart | None:
    """Return how far the log-probabilities of the trainer's tokens are apart; None if no logits are on both sides."""
    largest_id = max((token for sample in trainer.samples for token in sample.tokens), default=0)
    for name in reversed(trainer.values):
        if name.site != "output" or name.is_cache or (pair := joined.pair(name)) is None:
            continue
        chosen = [
            (row, following, number, position + 1)
            for row, slot in enumerate(pair.slots.tolist())
            for number, position in ((int(joined.samples[slot]), int(joined.positions[slot])),)
            for following in trainer.samples[number].tokens[position + 1 : position + 2]
            if following >= 0
        ]
        if pair.trainer.shape[1] <= largest_id or not chosen:
            continue
        rows, tokens, samples, positions = (np.array(one, np.int64) for one in zip(*chosen, strict=True))
        apart = _logprob(pair.trainer[rows], tokens) - _logprob(pair.engine[rows], tokens)
        with np.errstate(over="ignore"):
            ratio = np.exp(apart)
        worst = int(np.argmax(np.abs(apart)))
        largest = TokenAt(
            trainer.name_of(samples[worst]), int(positions[worst]), int(tokens[worst]), float(apart[worst])
        )
        return LogprobsApart(
            len(apart), float(apart.mean()), float(np.abs(apart).mean()), float((ratio - 1 - apart).mean()),
            float((np.abs(ratio - 1) > CLIP).mean()), largest,
        )  # fmt: skip
    return None


def _logprob(logits: Floats, tokens: npt.NDArray[np.int64]) -> Floats:
    top = logits.max(axis=1, keepdims=True)
    total = np.log(np.exp(logits - top).sum(axis=1)) + top[:, 0]
    return np.asarray(logits[np.arange(len(tokens)), tokens] - total)


def _unpaired(trainer: Side, engine: Side) -> Iterator[str]:
    for word, one, other in (("trainer", trainer, engine), ("engine", engine, trainer)):
        paths = dict.fromkeys(name.module_path for name in one.values if name.site == "output")
        theirs = {name.module_path for name in other.values}
        if alone := [path for path in paths if path not in theirs]:
            some = ", ".join(map(repr, alone[:3]))
            yield f"{len(alone)} of {len(paths)} modules are in the {word} alone, such as {some}; --rename pairs them"
