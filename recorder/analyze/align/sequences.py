"""Finds which samples and tokens a trainer and an engine share, and how their remaining samples differ."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ...errors import LookupFailedError
from ...numerics.keys import by_key
from ...system.text import counted
from .tokens import AlignedRun, Floats, Integers, ValueName

_MAX_SAMPLES = 32
"""How many unmatched samples of the engine are examined. Each is compared with up to 8 times as many of the
trainer's."""
_MAX_SHIFT = 4
_LEAST_SHARED = 4
"""A message names a sample of the trainer beside the engine's unmatched samples if this many first tokens are equal."""
_LEAST_ALIKE = 0.8
"""Tokens count as inserted into one of two samples if at least this fraction of the other tokens is equal."""
_NUM_LOOKED_AT = 64
"""How many of the first tokens of two samples are compared to find out whether they are the same sample."""


class TokensApart(NamedTuple):
    """One sample whose tokens differ between trainer and engine, or a remark about samples."""

    text: str
    is_finding: bool
    sample: str = ""
    position: int | None = None
    """The first position in the sample at which the tokens differ."""


class Match(NamedTuple):
    """The trainer's sample that corresponds to one sample of the engine, or of a run given as noise."""

    number: int
    shift: int
    """How many more tokens the trainer's sample has in front; negative if the other side's sample has more."""
    num_joined: int
    """How many tokens from position 0 on are equal on both sides. With a shift, 0 unless the sample is packed."""


def match_samples(trainer: AlignedRun, other: AlignedRun, *, by_name: bool) -> list[Match | None]:
    """Return the trainer's sample that matches each sample of the other side. An item is None if no sample matches."""
    if by_name:
        numbers = {sample.name: number for number, sample in enumerate(trainer.samples)}
        return [_match(trainer, numbers.get(sample.name), sample.tokens) for sample in other.samples]
    backwards = reversed(list(enumerate(trainer.samples)))
    ends = by_key((one, number) for number, sample in backwards for one in dict.fromkeys(sample.hashes))
    found: list[Match | None] = []
    taken: set[int] = set()
    for sample in other.samples:
        num_sure = len(sample.sure)
        free = ends.get(sample.hashes[num_sure - 1], []) if num_sure else []
        while free and free[-1] in taken:
            free.pop()
        found.append(_match(trainer, free[-1] if free else None, sample.tokens))
        taken |= {free[-1]} if free else set()
    rest = [number for number in range(len(trainer.samples)) if number not in taken][: 8 * _MAX_SAMPLES]
    for number in [number for number, one in enumerate(found) if one is None][:_MAX_SAMPLES]:
        theirs = other.samples[number].sure
        found[number] = _packed(trainer, theirs) or _nearest(trainer, rest, theirs)
    return found


def _packed(trainer: AlignedRun, theirs: list[int]) -> Match | None:
    """Return the trainer's sample that has the engine's behind other tokens, or None. Padding does not count."""
    for number, ours in enumerate(sample.tokens for sample in trainer.samples):
        for at in range(_MAX_SHIFT + 1, len(ours) - max(len(theirs), _MAX_SHIFT) + 1) if theirs else ():
            if ours[at] == theirs[0] and ours[at : at + len(theirs)] == theirs and len(set(ours[:at])) > 1:
                return Match(number, at, len(theirs))
    return None


def _nearest(trainer: AlignedRun, numbers: Sequence[int], theirs: Sequence[int]) -> Match | None:
    """Return the trainer's sample that shares the most tokens with a given one. Return None if all share few."""
    tries = [
        (_num_same(ours, theirs, shift), -abs(shift), -number, shift)
        for number in numbers
        for ours in (trainer.samples[number].tokens,)
        for shift in {*range(-_MAX_SHIFT, _MAX_SHIFT + 1), _num_alike(ours), -_num_alike(theirs)}
        if 2 * _num_same(ours, theirs, shift) >= max(4, min(len(ours), len(theirs), _NUM_LOOKED_AT))
        and (not shift or _is_inserted(ours, theirs, shift))
    ]
    if not tries:
        return None
    _, _, number, shift = max(tries)
    return Match(-number, shift, 0) if shift else _match(trainer, -number, theirs)


def compare_tokens(trainer: AlignedRun, engine: AlignedRun, matches: Sequence[Match | None]) -> list[TokensApart]:
    """Return a remark for each sample that differs. Empty if all of the engine's samples equal the trainer's."""
    told = [one for number, match in enumerate(matches) if match for one in _told(trainer, engine, number, match)]
    if absent := matches.count(None):
        text = f"{absent} of the engine's {counted(len(engine.samples), 'sample')} are not in the trainer's run"
        taken = {match.number for match in matches if match}
        rest = [one.sure for one, match in zip(engine.samples, matches, strict=True) if match is None]
        for number, own in enumerate(one.tokens for one in trainer.samples):
            shared = 0 if number in taken else max(_num_shared(own, one) for one in rest[:_MAX_SAMPLES])
            if shared >= _LEAST_SHARED:
                name = trainer.name_of(number)
                text += f"; {name} begins with {shared} tokens of one of these, and the engine did not write the rest"
                break
        told.append(TokensApart(text, is_finding=absent == len(matches)))
    return told


def _is_inserted(ours: Sequence[int], theirs: Sequence[int], shift: int) -> bool:
    """Return whether two samples are equal except for tokens inserted into one of them, in front or in between."""
    begin = _num_shared(ours, theirs)
    length = min(len(ours) - max(shift, 0), len(theirs) - max(-shift, 0), _NUM_LOOKED_AT)
    return begin + _num_same(ours[begin:], theirs[begin:], shift) >= _LEAST_ALIKE * length


def _num_shared(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """Return how many of the first tokens of two samples are equal."""
    both = min(len(ours), len(theirs))
    return next((at for at in range(both) if ours[at] != theirs[at]), both)


def _num_same(ours: Sequence[int], theirs: Sequence[int], shift: int) -> int:
    ours, theirs = ours[max(shift, 0) :][:_NUM_LOOKED_AT], theirs[max(-shift, 0) :][:_NUM_LOOKED_AT]
    return sum(a == b for a, b in zip(ours, theirs, strict=False))


def _match(trainer: AlignedRun, number: int | None, theirs: Sequence[int]) -> Match | None:
    if number is None:
        return None
    pairs = list(zip(trainer.samples[number].tokens, theirs, strict=False))
    return Match(number, 0, next((at for at, (a, b) in enumerate(pairs) if a != b and min(a, b) >= 0), len(pairs)))


def _num_alike(tokens: Sequence[int]) -> int:
    """Return how many tokens at the start of a sample are equal to each other, as padding is."""
    return next((number for number, token in enumerate(tokens) if token != tokens[0]), 0)


def _num_prompt(side: AlignedRun, sample: int) -> int:
    """Return the length of a sample's prompt: its tokens in calls that do not continue from a cache."""
    ends = (
        call.positions[(call.samples == sample) & ~call.is_continued].max(initial=-1) for call in side.calls.values()
    )
    return max(map(int, ends), default=-1) + 1


def _told(trainer: AlignedRun, engine: AlignedRun, number: int, match: Match) -> Iterator[TokensApart]:
    theirs, ours = engine.samples[number].sure, trainer.samples[match.number].tokens
    name = trainer.name_of(match.number)
    if match.shift and not match.num_joined:
        side, longer, shorter = ("trainer", ours, theirs) if match.shift > 0 else ("engine", theirs, ours)
        num, at = abs(match.shift), next((at for at, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), 0)
        at = 0 if longer[num:][:at] == shorter[:at] or longer[at + num :][:num] != shorter[at:][:num] else at
        own = longer[at : at + num]
        where, why = (f"at position {at}", "another chat template") if at else ("in front", "another tokenizer's BOS")
        why = "padding that no mask covers" if len(set(own)) == 1 and num > 1 else why
        text = f"{name}: the {side} alone has {counted(num, 'token')} {where}: {own[:8]} ({why}?)"
        yield TokensApart(text, is_finding=True, sample=name, position=at)
        return
    position = match.num_joined
    if position < min(len(ours), len(theirs)):
        numbers = f"{ours[position]} in the trainer and {theirs[position]} in the engine"
        other = next((one for one, of in enumerate(trainer.samples) if of.tokens[: len(theirs)] == theirs), None)
        order = "" if other is None else f"; they are the tokens of the trainer's {trainer.name_of(other)}"
        prompt = theirs[: _num_prompt(engine, number)]
        rows = [of.tokens for of in engine.samples if of.tokens[: len(prompt)] == prompt]
        has_other_end = ours[position + 1 : len(theirs)] != theirs[position + 1 : len(ours)]
        places = enumerate(ours[: len(theirs)])
        if not order and has_other_end and all(any(row[at : at + 1] == [of] for row in rows) for at, of in places):
            raise LookupFailedError(
                f"{engine.run.name}: texts change their rows between calls, as beams do, and nothing says whose a row "
                "is: let the engine write without beams, or say it with recorder.tokens(sample_ids=...)"
            )
        text = f"{name}: the token at position {position} is {numbers}{order}"
        yield TokensApart(text, is_finding=True, sample=name, position=position)
        return
    rest = theirs[len(ours) :]
    is_padding = set(rest) <= trainer.padding | engine.padding or (len(set(rest)) == 1 and len(rest) > 1)
    if rest and not is_padding:  # an engine writes on behind the end of a sample while other samples of the batch go on
        text = f"{name}: the trainer's ends after {counted(len(ours), 'token')}, and the engine's has {len(rest)} more"
        yield TokensApart(f"{text} (truncated?)", is_finding=True, sample=name, position=len(ours))


class TokenAt(NamedTuple):
    """One token of one sample, and how far trainer and engine are apart in a value of this token."""

    sample: str
    position: int
    """The position in the sample, from 0; padding does not count."""
    token: int
    apart: float
    """The distance of the value, or of the log-probability, between trainer and engine at this token."""


class ValuePair(NamedTuple):
    """One value in the trainer and in the engine, with one row for each token."""

    slots: Integers
    """For each row, the number of its token (its slot in `JoinedTokens`)."""
    trainer: Floats
    engine: Floats
    dtype_trainer: str
    dtype_engine: str


class JoinedTokens:
    """The tokens that both sides have. Each token has a number, its slot, in the order of the trainer's samples."""

    def __init__(
        self, trainer: AlignedRun, engine: AlignedRun, others: Sequence[tuple[AlignedRun, Sequence[Match | None]]]
    ) -> None:
        """Number the tokens of all sides. `others` are the engine and runs of noise, with their samples' matches."""
        self._trainer, self._engine = trainer, engine
        lengths = np.array([len(sample.tokens) for sample in trainer.samples], np.int64)
        bases = np.cumsum(lengths) - lengths
        num_slots = int(lengths.sum())
        trainer.number(bases, lengths, num_slots)
        for side, matches in others:
            own = [(bases[one.number] + max(one.shift, 0), one.num_joined) if one else (0, 0) for one in matches]
            first, limits = np.array(own, np.int64).reshape(-1, 2).T
            side.number(first, limits, num_slots)
        self.name_of = trainer.name_of
        self.samples = np.repeat(np.arange(len(lengths)), lengths)
        self.positions = np.arange(num_slots) - bases[self.samples]
        self.tokens = np.array([token for sample in trainer.samples for token in sample.tokens], np.int64)
        ours, theirs = _by_slot(trainer, num_slots), _by_slot(engine, num_slots)
        self.given = np.stack([ours[:, 1], theirs[:, 1]], axis=1).astype(np.int64)
        """By slot (token number), the positions given to the models of trainer and engine; -1 if none was recorded."""
        self.is_continued = theirs[:, 2] > 0
        self.begins, self.bases = np.arange(num_slots) - theirs[:, 5].astype(np.int64), bases[self.samples]
        """By slot (token number), the slot at which the token's sample begins, in the engine and in the trainer."""
        self.is_joined = (ours[:, 0] * theirs[:, 0]) > 0
        joined = np.flatnonzero(self.is_joined)
        self.num_tokens, self.num_samples = len(joined), len(np.unique(self.samples[joined]))
        joined = joined[np.argsort(ours[joined, 3], kind="stable")]
        self.step = int(ours[joined[0], 3]) if joined.size else 0
        """The first step of the trainer that has a token in common with the engine."""
        self.logprobs = np.stack([ours[:, 4], theirs[:, 4]])
        """By slot (token number), the log-probability in the trainer and in the engine; NaN where it is not known."""
        self.steps = dict(np.stack([theirs[joined, 3], ours[joined, 3]], axis=1).astype(np.int64).tolist())
        """Maps each step of the engine to the last step of the trainer that has one of its tokens."""

    def at(self, slot: int, apart: float) -> TokenAt:
        """Return the token in a slot, with its position, the name of its sample, and the distance `apart`."""
        number, position = int(self.samples[slot]), int(self.positions[slot])
        return TokenAt(self.name_of(number), position, int(self.tokens[slot]), apart)

    def pair(self, name: ValueName, engine: ValueName | None = None) -> ValuePair | None:
        """Return one value of trainer and engine, at the tokens that both have. Return None if there are none."""
        ours, theirs = self._trainer.pick(name), self._engine.pick(engine or self._engine.like(name))
        if ours is None or theirs is None or ours[3] != theirs[3]:
            return None
        slots, at, at_theirs = np.intersect1d(ours[1], theirs[1], return_indices=True)
        if not slots.size:
            return None
        a, b = ours[0][at].astype(np.float64), theirs[0][at_theirs].astype(np.float64)
        return ValuePair(slots, a, b, ours[2], theirs[2])


def _by_slot(side: AlignedRun, num_slots: int) -> Floats:
    """Return the facts about each token of one side, by slot (token number).

    The columns are: is present, given position, is continued, first step, log-probability, position on this side.
    """
    found = np.zeros((num_slots, 6))
    found[:, 4] = np.nan
    for key, call in reversed(side.calls.items()):
        has_slot = side.slots[key] >= 0
        is_there, step = np.ones(len(call.at)), np.full(len(call.at), call.step)
        rows = np.stack([is_there, call.given, call.is_continued, step], axis=1)
        found[side.slots[key][has_slot], :4] = rows[has_slot]
        found[side.slots[key][has_slot], 5] = call.positions[has_slot]
        has_slot &= ~np.isnan(call.logprobs)
        found[side.slots[key][has_slot], 4] = call.logprobs[has_slot]
    return found
