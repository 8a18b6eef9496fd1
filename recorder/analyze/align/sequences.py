"""Whether the two sides have the same samples, token by token, and how the samples differ that they do not share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ...system.text import counted
from .tokens import SampleTokens, Side

_MAX_SAMPLES = 64
"""The most samples without a partner that are looked at."""
_MAX_SHIFT = 64
"""The most tokens that one side may have in front of the other's."""
_MIN_SHARE = 0.5
"""Two samples with fewer tokens in common, as a share of the shorter one, are two samples."""


class TokensApart(NamedTuple):
    """One sample whose tokens differ, or a remark about samples."""

    text: str
    is_finding: bool
    sample: str = ""
    position: int | None = None
    """The first position at which the tokens differ."""


class _Match(NamedTuple):
    """How well a sample of the trainer fits one of the engine."""

    num_same: int
    shift: int
    """The tokens that the trainer has in front of the engine's first; negative: the engine has more in front."""
    number: int


def compare_tokens(trainer: Side, engine: Side, *, by_name: bool) -> list[TokensApart]:
    """Return what is to say about samples that differ; nothing where the engine's samples are the trainer's."""
    pairs = _named_pairs(trainer, engine) if by_name else _unnamed_pairs(trainer, engine)
    told = [one for number, match in pairs for one in _told(trainer, engine, number, match)]
    absent = [number for number, match in pairs if match is None]
    if absent and len(absent) < len(engine.samples):
        text = f"{counted(len(absent), 'sample')} of the engine's {len(engine.samples)} are not in the trainer"
        told.append(TokensApart(text, is_finding=False))
    elif absent:
        text = f"none of the engine's {counted(len(absent), 'sample')} is in the trainer"
        told.append(TokensApart(text, is_finding=True))
    return told


def _named_pairs(trainer: Side, engine: Side) -> list[tuple[int, _Match | None]]:
    by_name = {sample.name: number for number, sample in enumerate(trainer.samples)}
    return [
        (number, None if sample.name not in by_name else _Match(0, 0, by_name[sample.name]))
        for number, sample in enumerate(engine.samples)
    ]


def _unnamed_pairs(trainer: Side, engine: Side) -> list[tuple[int, _Match | None]]:
    ends = {one: number for number, sample in enumerate(trainer.samples) for one in sample.hashes}
    pairs: list[tuple[int, _Match | None]] = []
    num_tried = 0
    for number, sample in enumerate(engine.samples):
        if sample.hashes and sample.hashes[-1] in ends:
            pairs.append((number, _Match(len(sample.tokens), 0, ends[sample.hashes[-1]])))
            continue
        num_tried += 1
        pairs.append((number, _nearest(trainer.samples, sample) if num_tried <= _MAX_SAMPLES else None))
    return pairs


def _nearest(samples: Sequence[SampleTokens], sample: SampleTokens) -> _Match | None:
    """Return the trainer's sample that shares most tokens with one of the engine, perhaps shifted; None without any."""
    best = max(
        (
            _Match(_num_same(one.tokens, sample.tokens, shift), -abs(shift), number)._replace(shift=shift)
            for number, one in enumerate(samples)
            for shift in sorted(range(-_MAX_SHIFT, _MAX_SHIFT + 1), key=abs)
        ),
        key=lambda match: (match.num_same, -abs(match.shift)),
        default=None,
    )
    if best is None:
        return None
    shorter = min(len(samples[best.number].tokens), len(sample.tokens))
    return best if best.num_same >= max(2, _MIN_SHARE * shorter) else None


def _num_same(ours: Sequence[int], theirs: Sequence[int], shift: int) -> int:
    pairs = zip(ours[max(shift, 0) :], theirs[max(-shift, 0) :], strict=False)
    return sum(a == b for a, b in pairs)


def _told(trainer: Side, engine: Side, number: int, match: _Match | None) -> Iterator[TokensApart]:
    if match is None:
        return
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
            yield TokensApart(f"{text}{order}", is_finding=True, sample=name, position=position)
            return
    rest = theirs[len(ours) :]
    is_padding = set(rest) <= trainer.padding | engine.padding or (len(set(rest)) == 1 and len(rest) > 1)
    if rest and not is_padding:  # what an engine writes behind the end of a sample that others of its batch outlive
        text = f"{name}: the trainer's ends after {counted(len(ours), 'token')}, and the engine's has {len(rest)} more"
        yield TokensApart(f"{text} (truncated?)", is_finding=True, sample=name, position=len(ours))
