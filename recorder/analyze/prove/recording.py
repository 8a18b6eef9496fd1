"""Shows whether a program trains the same with the recorder: `prove` runs the program three times and compares.

`judge` compares two plain launches with a recorded one, without any process or file. torch is never imported here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ...config import FLAG, PREFIX
from ...run.status import CHANGED, UNCHANGED, UNKNOWN, Proof
from ...system.text import counted, listed, named
from .launches import MAX_LISTED, Launches, Observed, Proven, count_kinds, on_ranks, values_named

_ORDER = ("flag", "grad", "param", "buffer", "optim", "setting", "rng")
"""The kinds of values. A difference of one kind causes differences of the later kinds."""
_UNSEEDED = ("rng python", "rng numpy")
"""The random states that the operating system seeds in each process, unless the program does."""


class _Difference(NamedTuple):
    step: int
    rank: int
    key: str


class _Course(NamedTuple):
    step: int | None
    """The first step with a difference, with its differences on all ranks."""
    differences: Sequence[_Difference]
    compared: Mapping[str, int]
    """The number of values that were compared, by kind."""


def judge(plain: Observed, again: Observed, recorded: Observed, *, num_steps: int) -> Proof:
    """Return whether the recorder has changed the training.

    Differences between the two plain launches, `plain` and `again`, are the program's own. Each launch was asked to
    make `num_steps` steps.
    """
    notes: list[str] = []
    num_steps_compared = min(plain.num_steps, recorded.num_steps)
    itself = other = _Course(None, (), {})

    def tell(verdict: str, text: str, first_step: int | None = None) -> Proof:
        return Proof(
            verdict=verdict, text=text, steps=num_steps_compared, ranks=len(plain.ranks), first_step=first_step,
            notes=tuple(notes), compared=dict(other.compared),
        )  # fmt: skip

    if not plain.ranks:
        text = "without the recorder no step of an optimizer was seen before the program ended"
        return tell(UNKNOWN, f"{UNKNOWN}: {text} with exit code {plain.exit_code}")
    ignored = _unseeded(plain, again)
    if ignored:
        notes.append(f"not compared, since the program does not seed it: {values_named(sorted(ignored))}")
    looks = [seen.looks[0].digests for seen in plain.ranks.values() if seen.looks]
    if unread := sorted({key for look in looks for key, digest in look.items() if "unread" in digest}):
        notes.append(f"not compared, since their bits cannot be read here: {listed(unread, MAX_LISTED)}")
    itself, other = _compare(plain, again, ignored), _compare(plain, recorded, ignored)
    if (own := _ends(plain, again)) and itself.step is None:
        return tell(UNKNOWN, f"{UNKNOWN}: without the recorder the program differs by itself: {own}")
    if other.step is not None and (itself.step is None or other.step < itself.step):
        text = f"from step {other.step} on: {_described(other.differences)}"
        return tell(CHANGED, f"{CHANGED} {text}", other.step)
    if itself.step is not None:
        text = f"the program differs by itself from step {itself.step} on: {_described(itself.differences)}"
        notes.append("fix seeds and set torch.use_deterministic_algorithms(True), so that the program repeats itself")
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
        f"{UNCHANGED}: {counted(num_steps_compared, 'step')} of {counted(len(plain.ranks), 'rank')}, "
        f"{sum(other.compared.values()):,} values and {counted(num_lines, 'printed line')}, bit by bit"
    )
    return tell(UNCHANGED, text)


def _unseeded(plain: Observed, again: Observed) -> set[str]:
    both = [(seen.looks[:1], again.ranks[rank].looks[:1]) for rank, seen in plain.ranks.items() if rank in again.ranks]
    pairs = [(a.digests, b.digests) for one, other in both for a, b in zip(one, other, strict=False)]
    return {key for key in _UNSEEDED if any(a.get(key) != b.get(key) for a, b in pairs)}


def _compare(a: Observed, b: Observed, ignored: set[str]) -> _Course:
    differences: list[_Difference] = []
    compared: Counter[str] = Counter()
    for rank in a.ranks.keys() & b.ranks.keys():
        for one, other in zip(a.ranks[rank].looks, b.ranks[rank].looks, strict=False):
            keys = (one.digests.keys() | other.digests.keys()) - ignored
            differing = [key for key in keys if one.digests.get(key) != other.digests.get(key)]
            compared += count_kinds(keys)
            differences += [_Difference(one.step, rank, key) for key in differing]
            if differing:
                break
    first = min((difference.step for difference in differences), default=None)
    return _Course(first, sorted(one for one in differences if one.step == first), compared)


def _ends(a: Observed, b: Observed) -> str:
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
    kinds = [[one for one in differences if one.key.startswith(f"{kind} ")] for kind in _ORDER]
    return "; ".join(
        values_named(one.key for one in some) + on_ranks({one.rank for one in some}) for some in kinds if some
    )


def _compare_printed(plain: Observed, again: Observed, recorded: Observed, notes: list[str]) -> tuple[str, int]:
    """Return the first difference in the lines that ranks printed, and how many lines were compared."""
    num_compared = num_left_out = 0
    problem = ""
    for rank in plain.ranks:
        first, second, third = (Counter(seen.ranks[rank].printed) for seen in (plain, again, recorded))
        common = first & second
        own = (first - common).total()
        num_compared, num_left_out = num_compared + common.total(), num_left_out + own
        missing, more = common - third, third - common
        if missing and not problem:
            problem = f"rank {rank} does not print {next(iter(missing))[:80]!r} under the recorder"
        elif more.total() > max(own, (second - common).total()) and not problem:
            problem = f"rank {rank} prints {next(iter(more))[:80]!r} under the recorder"
    if num_left_out:
        lines = counted(num_left_out, "printed line")
        notes.append(f"not compared, since two launches without the recorder differ there, as times do: {lines}")
    return problem, num_compared


def prove(launches: Launches, command: Sequence[str]) -> Proven:
    """Run a program three times and judge whether the recorder changes it; if it seems so, run it a fourth time."""
    ours = (PREFIX, f"_{PREFIX}")
    bare = {name: value for name, value in launches.environ.items() if name != FLAG and not name.startswith(ours)}
    num_steps = launches.num_steps
    plain = launches.launch("without the recorder", command, bare)
    if not plain.ranks:
        return launches.proven(judge(plain, plain, plain, num_steps=num_steps))
    again = launches.launch("without the recorder once more", command, bare)
    recorded = launches.launch("with the recorder", command)
    proof = judge(plain, again, recorded, num_steps=num_steps)
    if proof.verdict == CHANGED:
        third = launches.launch("without the recorder, to be sure", command, bare)
        sure = judge(plain, third, recorded, num_steps=num_steps)
        proof = sure if sure.verdict != CHANGED else proof
    return launches.proven(proof, recorded)
