"""Compares two plain launches of a program and a recorded one: `judge`. Pure: it knows of no processes and no files."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ...run.status import CHANGED, UNCHANGED, UNKNOWN, Proof
from ...system.text import counted, listed, named
from .observed import Observed, RankSeen

_KINDS = {
    "grad": "gradient",
    "param": "parameter",
    "buffer": "buffer",
    "optim": "optimizer state",
    "rng": "random state",
}
"""What people call each kind, in the order in which a difference of one makes one of the next."""
_UNSEEDED = ("rng python", "rng numpy")
"""Random states that the operating system seeds in each process, unless the program does."""
_MAX_LISTED = 4


class _Difference(NamedTuple):
    """A value that two launches do not share."""

    step: int
    rank: int
    key: str


@dataclass(frozen=True, slots=True)
class _Course:
    """How two launches compare."""

    differences: Sequence[_Difference]
    """Those of the first step that differs, on all ranks."""
    num_compared: int

    @property
    def step(self) -> int | None:
        return self.differences[0].step if self.differences else None


def judge(plain: Observed, again: Observed, recorded: Observed, *, num_steps: int) -> Proof:
    """Say whether the recorder has changed the training.

    Args:
        plain: the program without the recorder.
        again: the same once more: what differs here differs by itself.
        recorded: the program with the recorder.
        num_steps: how many steps were asked for.
    """
    notes: list[str] = []
    compared = min(plain.num_steps, recorded.num_steps)

    def tell(verdict: str, text: str, first_step: int | None = None) -> Proof:
        return Proof(
            verdict=verdict,
            text=text,
            steps=compared,
            ranks=len(plain.ranks),
            first_step=first_step,
            notes=tuple(notes),
            time_ns=time.time_ns(),
        )

    if not plain.ranks:
        text = "without the recorder no step of an optimizer was seen before the program ended"
        return tell(UNKNOWN, f"{UNKNOWN}: {text} with exit code {plain.exit_code}")
    ignored = _unseeded(plain, again)
    if ignored:
        generators = " and ".join(sorted(key.partition(" ")[2] for key in ignored))
        notes.append(f"the random state of {generators} is not compared: the program does not seed it")
    if unread := _unread(plain):
        notes.append(f"not compared, since their bits cannot be read here: {listed(unread, _MAX_LISTED)}")
    itself, other = _compare(plain, again, ignored), _compare(plain, recorded, ignored)
    if (own := _ends(plain, again)) and itself.step is None:
        return tell(UNKNOWN, f"{UNKNOWN}: without the recorder the program differs by itself: {own}")
    if other.step is not None and (itself.step is None or other.step < itself.step):
        text = f"from step {other.step} on: {_described(other.differences)}"
        return tell(CHANGED, f"{CHANGED} {text}", other.step)
    if itself.step is not None:
        text = f"differs by itself from step {itself.step} on: {_described(itself.differences)}"
        if itself.step:
            notes.append(f"up to step {itself.step - 1} the recorder changed nothing")
        return tell(UNKNOWN, f"{UNKNOWN}: {text}", itself.step)
    if ends := _ends(plain, recorded):
        return tell(CHANGED, f"{CHANGED}: {ends}")
    lines, num_lines = _compare_printed(plain, again, recorded, notes)
    if lines:
        return tell(CHANGED, f"{CHANGED}: {lines}")
    if plain.num_steps < num_steps:
        notes.append(f"the program ended by itself after {counted(plain.num_steps, 'step')} of {num_steps}")
    if plain.exit_code:
        notes.append(f"the program ends with exit code {plain.exit_code}, with the recorder and without")
    text = (
        f"{UNCHANGED}: {counted(compared, 'step')} of {counted(len(plain.ranks), 'rank')}, "
        f"{other.num_compared:,} values and {counted(num_lines, 'printed line')}, bit by bit"
    )
    return tell(UNCHANGED, text)


def _unseeded(plain: Observed, again: Observed) -> set[str]:
    """Return the random states that differ from the first step on because nobody has seeded them."""
    unseeded = set()
    for rank, seen in plain.ranks.items():
        other = again.ranks.get(rank)
        if other is not None and other.looks and seen.looks:
            a, b = seen.looks[0].digests, other.looks[0].digests
            unseeded |= {key for key in _UNSEEDED if a.get(key) != b.get(key)}
    return unseeded


def _unread(plain: Observed) -> list[str]:
    looks = [seen.looks[0] for seen in plain.ranks.values() if seen.looks]
    return sorted({key for look in looks for key, digest in look.digests.items() if digest.startswith("unread")})


def _compare(a: Observed, b: Observed, ignored: set[str]) -> _Course:
    """Compare the ranks that both have, up to the first step that differs."""
    differences: list[_Difference] = []
    num_compared = 0
    for rank in a.ranks.keys() & b.ranks.keys():
        for one, other in zip(a.ranks[rank].looks, b.ranks[rank].looks, strict=False):
            keys = (one.digests.keys() | other.digests.keys()) - ignored
            differing = [key for key in keys if one.digests.get(key) != other.digests.get(key)]
            num_compared += len(keys)
            differences += [_Difference(one.step, rank, key) for key in differing]
            if differing:
                break
    first = min((difference.step for difference in differences), default=None)
    return _Course(sorted(one for one in differences if one.step == first), num_compared)


def _ends(a: Observed, b: Observed) -> str:
    """Say how two launches ended differently; empty where they did not."""
    if a.ranks.keys() != b.ranks.keys():
        then = named("rank", sorted(b.ranks)) if b.ranks else "none"
        return f"{named('rank', sorted(a.ranks))} trained, then {then} (exit codes {a.exit_code} and {b.exit_code})"
    for rank in a.ranks:
        if a.ranks[rank].num_steps != b.ranks[rank].num_steps:
            steps = f"{counted(a.ranks[rank].num_steps, 'step')}, then {b.ranks[rank].num_steps}"
            return f"rank {rank} took {steps} (exit codes {a.exit_code} and {b.exit_code})"
        if len(a.ranks[rank].looks) != len(b.ranks[rank].looks):
            return f"rank {rank}: another number of optimizer steps between two steps"
    if a.exit_code != b.exit_code:
        return f"the program ended with exit code {a.exit_code}, then with {b.exit_code}"
    return ""


def _described(differences: Sequence[_Difference]) -> str:
    """Name what differs at one step: kind by kind, with ranks."""
    told = []
    for kind, noun in _KINDS.items():
        ranks_of: dict[str, list[int]] = {}
        for one in differences:
            its_kind, _, name = one.key.partition(" ")
            if its_kind == kind:
                ranks_of.setdefault(name, []).append(one.rank)
        if ranks_of:
            names = listed(list(ranks_of), _MAX_LISTED)
            ranks = sorted({rank for some in ranks_of.values() for rank in some})
            told.append(f"{noun} {names} on {named('rank', ranks)}")
    return "; ".join(told)


def _compare_printed(plain: Observed, again: Observed, recorded: Observed, notes: list[str]) -> tuple[str, int]:
    """Return the first difference of what ranks printed, and how many lines were compared."""
    num_compared = num_left_out = 0
    problem = ""
    for rank in plain.ranks:
        first, second, third = (_lines(seen.ranks[rank]) for seen in (plain, again, recorded))
        common = first & second
        own = (first - common).total()
        num_compared, num_left_out = num_compared + common.total(), num_left_out + own
        missing, more = common - third, third - common
        if missing and not problem:
            problem = f"rank {rank} does not print {_shown(missing)} under the recorder"
        elif more.total() > max(own, (second - common).total()) and not problem:
            problem = f"rank {rank} prints {_shown(more)} under the recorder"
    if num_left_out:
        lines = counted(num_left_out, "printed line")
        notes.append(f"{lines} not compared: they differ without the recorder, too, as times do")
    return problem, num_compared


def _lines(seen: RankSeen) -> Counter[str]:
    return Counter(seen.printed)


def _shown(lines: Counter[str]) -> str:
    return repr(next(iter(lines))[:80])
