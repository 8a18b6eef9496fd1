"""Shows whether a program trains the same with the recorder: `prove` runs the program three times and compares.

`judge` compares two plain launches with a recorded one, without any process or file. torch is never imported here.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from ...config import FLAG, PREFIX, load_settings
from ...run.finding import runs_in
from ...run.status import CHANGED, UNCHANGED, UNKNOWN, Proof
from ...system.text import counted, listed, named
from .launches import KINDS, Launches, Observed, Proven, keep

_NOUNS = {
    "grad": "gradient",
    "param": "parameter",
    "buffer": "buffer",
    "optim": "optimizer state",
    "rng": "random state",
}
"""The word for each kind of digest. A difference of one kind causes differences of the later kinds."""
_UNSEEDED = ("rng python", "rng numpy")
"""The random states that the operating system seeds in each process, unless the program does."""
_MAX_LISTED = 4


class _Difference(NamedTuple):
    step: int
    rank: int
    key: str


@dataclass(frozen=True, slots=True)
class _Course:
    differences: Sequence[_Difference] = ()
    """The differences on all ranks at the first step with a difference."""
    compared: Mapping[str, int] = field(default_factory=Counter)
    """The number of values that were compared, by kind."""

    @property
    def step(self) -> int | None:
        return self.differences[0].step if self.differences else None


def judge(plain: Observed, again: Observed, recorded: Observed, *, num_steps: int) -> Proof:
    """Return whether the recorder has changed the training.

    Differences between the two plain launches, `plain` and `again`, are the program's own. Each launch was asked to
    make `num_steps` steps.
    """
    notes: list[str] = []
    num_steps_compared = min(plain.num_steps, recorded.num_steps)
    itself, other = _Course(), _Course()

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
        generators = " and ".join(sorted(key.partition(" ")[2] for key in ignored))
        notes.append(f"the random state of {generators} is not compared: the program does not seed it")
    looks = [seen.looks[0].digests for seen in plain.ranks.values() if seen.looks]
    if unread := sorted({key for look in looks for key, digest in look.items() if digest.startswith("unread")}):
        notes.append(f"not compared, since their bits cannot be read here: {listed(unread, _MAX_LISTED)}")
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
    unseeded = set()
    for rank, seen in plain.ranks.items():
        other = again.ranks.get(rank)
        if other is not None and other.looks and seen.looks:
            a, b = seen.looks[0].digests, other.looks[0].digests
            unseeded |= {key for key in _UNSEEDED if a.get(key) != b.get(key)}
    return unseeded


def _compare(a: Observed, b: Observed, ignored: set[str]) -> _Course:
    differences: list[_Difference] = []
    compared: Counter[str] = Counter()
    for rank in a.ranks.keys() & b.ranks.keys():
        for one, other in zip(a.ranks[rank].looks, b.ranks[rank].looks, strict=False):
            keys = (one.digests.keys() | other.digests.keys()) - ignored
            differing = [key for key in keys if one.digests.get(key) != other.digests.get(key)]
            compared.update(KINDS[key.partition(" ")[0]] for key in keys)
            differences += [_Difference(one.step, rank, key) for key in differing]
            if differing:
                break
    first = min((difference.step for difference in differences), default=None)
    return _Course(sorted(one for one in differences if one.step == first), compared)


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
    told = []
    for kind, noun in _NOUNS.items():
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
            problem = f"rank {rank} does not print {_shown(missing)} under the recorder"
        elif more.total() > max(own, (second - common).total()) and not problem:
            problem = f"rank {rank} prints {_shown(more)} under the recorder"
    if num_left_out:
        lines = counted(num_left_out, "printed line")
        notes.append(f"{lines} not compared: they differ without the recorder, too, as times do")
    return problem, num_compared


def _shown(lines: Counter[str]) -> str:
    return repr(next(iter(lines))[:80])


def prove(
    command: Sequence[str], environ: Mapping[str, str], *, num_steps: int, report: Callable[[str], None]
) -> Proven:
    """Run a program three times and judge whether the recorder changes it; if it seems so, run it a fourth time.

    `environ` is the environment that records, with the user's settings. `report` is called with a text about the next
    launch. Raises LookupFailedError if two processes trained as one rank, and OSError if the command cannot be run.
    """
    ours = (PREFIX, f"_{PREFIX}")
    bare = {name: value for name, value in environ.items() if name != FLAG and not name.startswith(ours)}
    folder = Path(load_settings(environ=environ).settings.dir).absolute()
    before = {run.location.name for run in runs_in(folder)} if folder.is_dir() else set()
    with tempfile.TemporaryDirectory(prefix="recorder-prove-") as temporary:
        launches = Launches(command, Path(temporary), num_steps, report)
        plain = launches.launch("without the recorder", bare)
        if plain.ranks:
            again = launches.launch("without the recorder once more", bare)
            recorded = launches.launch("with the recorder", environ)
            proof = judge(plain, again, recorded, num_steps=num_steps)
            if proof.verdict == CHANGED:
                third = launches.launch("without the recorder, to be sure", bare)
                sure = judge(plain, third, recorded, num_steps=num_steps)
                proof = sure if sure.verdict != CHANGED else proof
        else:
            proof, recorded = judge(plain, plain, plain, num_steps=num_steps), plain
        said = launches.said
    proof, runs = keep(proof, [command], folder, before, [recorded] if proof.ranks else [])
    return Proven(proof, runs, said)
