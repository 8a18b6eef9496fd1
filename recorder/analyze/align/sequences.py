"""Whether the two sides have the same samples, token by token, and how the samples differ that they do not share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ...system.text import counted
from .tokens import Side

_MAX_SAMPLES = 32
"""The most samples without a partner that are looked at, and eight times as many of the trainer's beside each."""
_MAX_SHIFT = 4
_NUM_LOOKED_AT = 64
"""The first tokens of two samples by which they are found to be one."""


class TokensApart(NamedTuple):
    """One sample whose tokens differ, or a remark about samples."""

    text: str
    is_finding: bool
    sample: str = ""
    position: int | None = None
    """The first position at which the tokens differ."""


class Match(NamedTuple):
    """The trainer's sample that a sample of the engine is."""

    number: int
    shift: int
    """How many more tokens the trainer's has in front; negative where the engine's has more."""
    num_joined: int
    """The positions, from 0, that are the same token on both sides."""


def match_samples(trainer: Side, other: Side, *, by_name: bool) -> list[Match | None]:
    """Return the trainer's sample for each sample of another side, which nobody else is; None without one."""
    if by_name:
        numbers = {sample.name: number for number, sample in enumerate(trainer.samples)}
        named = [numbers.get(sample.name) for sample in other.samples]
        return [None if one is None else Match(one, 0, len(trainer.samples[one].tokens)) for one in named]
    ends: dict[int, list[int]] = {}
    for number, sample in reversed(list(enumerate(trainer.samples))):
        for one in dict.fromkeys(sample.hashes):
            ends.setdefault(one, []).append(number)
    found: list[Match | None] = []
    taken: set[int] = set()
    for sample in other.samples:
        free = ends.get(sample.hashes[-1], []) if sample.hashes else []
        while free and free[-1] in taken:
            free.pop()
        found.append(Match(free[-1], 0, len(sample.tokens)) if free else None)
        taken |= {free[-1]} if free else set()
    rest = [number for number in range(len(trainer.samples)) if number not in taken][: 8 * _MAX_SAMPLES]
    for number in [number for number, one in enumerate(found) if one is None][:_MAX_SAMPLES]:
        found[number] = _nearest(trainer, rest, other.samples[number].tokens)
    return found


def _nearest(trainer: Side, numbers: Sequence[int], theirs: Sequence[int]) -> Match | None:
    """Return the trainer's sample, of some, that shares most tokens with one of the engine; None if all share few."""
    tries = [
        (_num_same(ours, theirs, shift), -abs(shift), -number, shift)
        for number in numbers
        for ours in (trainer.samples[number].tokens,)
        for shift in {*range(-_MAX_SHIFT, _MAX_SHIFT + 1), _num_alike(ours), -_num_alike(theirs)}
        if 2 * _num_same(ours, theirs, shift) >= max(4, min(len(ours), len(theirs), _NUM_LOOKED_AT))
    ]
    if not tries:
        return None
    _, _, number, shift = max(tries)
    pairs = enumerate(zip(trainer.samples[-number].tokens, theirs, strict=False))
    shorter = min(len(trainer.samples[-number].tokens), len(theirs))
    return Match(-number, shift, 0 if shift else next((at for at, (a, b) in pairs if a != b), shorter))


def compare_tokens(trainer: Side, engine: Side, matches: Sequence[Match | None]) -> list[TokensApart]:
    """Return what is to say about samples that differ; nothing where the engine's samples are the trainer's."""
    told = [one for number, match in enumerate(matches) if match for one in _told(trainer, engine, number, match)]
    if absent := matches.count(None):
        text = f"{absent} of the engine's {counted(len(engine.samples), 'sample')} are not in the trainer"
        told.append(TokensApart(text, is_finding=absent == len(matches)))
    return told


def _num_same(ours: Sequence[int], theirs: Sequence[int], shift: int) -> int:
    ours, theirs = ours[max(shift, 0) :][:_NUM_LOOKED_AT], theirs[max(-shift, 0) :][:_NUM_LOOKED_AT]
    return sum(a == b for a, b in zip(ours, theirs, strict=False))


def _num_alike(tokens: Sequence[int]) -> int:
    """Return how many tokens in front are one and the same, as padding is."""
    return next((number for number, token in enumerate(tokens) if token != tokens[0]), 0)


def _told(trainer: Side, engine: Side, number: int, match: Match) -> Iterator[TokensApart]:
    theirs, ours = engine.samples[number].tokens, trainer.samples[match.number].tokens
    name = trainer.name_of(match.number)
    if match.shift:
        side, longer = ("trainer", ours) if match.shift > 0 else ("engine", theirs)
        front = longer[: abs(match.shift)]
        why = "padding that no mask names" if len(set(front)) == 1 and len(front) > 1 else "another tokenizer's BOS"
        text = f"{name}: the {side} alone has {counted(len(front), 'token')} in front: {front[:8]} ({why}?)"
        yield TokensApart(text, is_finding=True, sample=name, position=0)
        return
    for position, (a, b) in enumerate(zip(ours, theirs, strict=False)):
        if a != b and min(a, b) >= 0:
            text = f"{name}: the token at position {position} is {a} in the trainer and {b} in the engine"
            other = next((one for one, of in enumerate(trainer.samples) if of.tokens[: len(theirs)] == theirs), None)
            order = "" if other is None else f"; these are the tokens of the trainer's {trainer.name_of(other)}"
            if any(of.tokens[:position] == theirs[:position] for of in engine.samples if of.tokens != theirs):
                order = order or "; or a beam that changed its row, which sample_ids in recorder.tokens follow"
            yield TokensApart(f"{text}{order}", is_finding=True, sample=name, position=position)
            return
    rest = theirs[len(ours) :]
    is_padding = set(rest) <= trainer.padding | engine.padding or (len(set(rest)) == 1 and len(rest) > 1)
    if rest and not is_padding:  # what an engine writes behind the end of a sample that others of its batch outlive
        text = f"{name}: the trainer's ends after {counted(len(ours), 'token')}, and the engine's has {len(rest)} more"
        yield TokensApart(f"{text} (truncated?)", is_finding=True, sample=name, position=len(ours))
