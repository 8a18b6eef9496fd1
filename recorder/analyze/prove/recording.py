"""Shows whether a program trains the same with the recorder (`prove`), or on another number of ranks (`prove_world`).

`judge` compares two launches without the recorder with a recorded one. It starts no process and opens no file. On
another number of ranks, sums are rounded differently. To measure how far rounding goes, one more launch changes the
inputs in the last place; see `recorder.analyze.diff.noise`. torch is never imported here.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from ...config import FLAG, PREFIX
from ...errors import LookupFailedError, RunError
from ...numerics.keys import by_key
from ...run.run import Run
from ...run.status import CHANGED, UNCHANGED, UNKNOWN, Proof
from ...system.text import counted, listed, named, number
from ..diff.diff import diff
from ..diff.reply import accusations
from .launches import MAX_LISTED, RESUMED, Launches, Observed, Proven, count_kinds, on_ranks, values_named
from .resume import judge_resume, of_kind, start_of

_ORDER = ("flag", "grad", "param", "buffer", "optim", "setting", "rng")
"""The kinds of values. A difference of one kind causes differences of the later kinds."""
_UNSEEDED = ("rng python", "rng numpy")
"""The random states that the operating system seeds in each process, unless the program does."""


class _FirstDifference(NamedTuple):
    step: int | None
    """The first step with a difference on any rank; None if there is none."""
    differences: Sequence[tuple[int, str]]
    """The rank and the key of each difference at this step."""
    compared: Mapping[str, int]
    """The number of values that were compared, by kind."""


def judge(plain: Observed, again: Observed, recorded: Observed, *, num_steps: int) -> Proof:
    """Judge whether the recorder has changed the training.

    `plain` and `again` are two launches without the recorder. Where they differ, the program does not repeat itself.
    Each launch was asked to make `num_steps` steps.
    """
    notes: list[str] = []
    num_steps_compared = min(plain.num_steps, recorded.num_steps)
    itself = other = _FirstDifference(None, (), {})

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
        notes.append(f"not compared, because the program does not seed: {values_named(sorted(ignored))}")
    looks = [seen.looks[0].digests for seen in plain.ranks.values() if seen.looks]
    if unread := sorted({key for look in looks for key, digest in look.items() if "unread" in digest}):
        notes.append(f"not compared, because their bits cannot be read: {listed(unread, MAX_LISTED)}")
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


def _compare(a: Observed, b: Observed, ignored: set[str]) -> _FirstDifference:
    differences: list[tuple[int, tuple[int, str]]] = []
    compared: Counter[str] = Counter()
    for rank in a.ranks.keys() & b.ranks.keys():
        for one, other in zip(a.ranks[rank].looks, b.ranks[rank].looks, strict=False):
            keys = (one.digests.keys() | other.digests.keys()) - ignored
            differing = [key for key in keys if one.digests.get(key) != other.digests.get(key)]
            compared += count_kinds(keys)
            differences += [(one.step, (rank, key)) for key in differing]
            if differing:
                break
    of_steps = by_key(differences)
    first = min(of_steps, default=None)
    return _FirstDifference(first, [] if first is None else sorted(of_steps[first]), compared)


def _ends(a: Observed, b: Observed) -> str:
    if a.ranks.keys() != b.ranks.keys():
        then = named("rank", sorted(b.ranks)) if b.ranks else "none"
        return f"{named('rank', sorted(a.ranks))} trained, then {then} (exit codes {a.exit_code} and {b.exit_code})"
    for rank in a.ranks:
        if a.ranks[rank].num_steps != b.ranks[rank].num_steps:
            steps = f"{counted(a.ranks[rank].num_steps, 'step')}, then {b.ranks[rank].num_steps}"
            return f"rank {rank} took {steps} (exit codes {a.exit_code} and {b.exit_code})"
        if len(a.ranks[rank].looks) != len(b.ranks[rank].looks):
            return f"rank {rank}: a different number of other optimizers' steps between two steps"
    if a.exit_code != b.exit_code:
        return f"the program ended with exit code {a.exit_code}, then with {b.exit_code}"
    return ""


def _described(differences: Sequence[tuple[int, str]]) -> str:
    of_kinds = by_key((key.partition(" ")[0], (rank, key)) for rank, key in differences)
    kinds = [of_kinds[kind] for kind in _ORDER if kind in of_kinds]
    return "; ".join(values_named(key for _, key in some) + on_ranks({rank for rank, _ in some}) for some in kinds)


def _compare_printed(plain: Observed, again: Observed, recorded: Observed, notes: list[str]) -> tuple[str, int]:
    """Return in words how a rank's printed lines differ under the recorder, and how many lines were compared."""
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
        notes.append(f"not compared, because two launches without the recorder differ there, too, as in times: {lines}")
    return problem, num_compared


def prove(launches: Launches, command: Sequence[str]) -> Proven:
    """Run a program three times and judge whether the recorder changes it. If so, run the program a fourth time."""
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


_NUM_RANKS = re.compile(r"(--nproc[-_]per[-_]node|--num[-_]processes|-np)(=(.*))?")
"""Matches the option of torchrun, `accelerate launch` or mpirun that says how many ranks are started."""
_RULES = "site=param,buffer,grad,optim keep=tensor,stats,fingerprint; site=input,output,grad_output keep=stats"
"""The recording rules if the user has none. They keep state and gradients in full, to tell rounding from an error."""


def asked_ranks(command: Sequence[str]) -> str:
    """Return, as text, how many ranks a command's options ask for. Return an empty string if no option says so."""
    for word, following in zip(command, [*command[1:], ""], strict=True):
        if option := _NUM_RANKS.fullmatch(word):
            return option[3] or following
    return ""


def on_other_ranks(command: Sequence[str], num_ranks: int) -> list[str]:
    """Return the command with another number of ranks. Raises LookupFailedError if it has no option for the number."""
    changed = list(command)
    for i, word in enumerate(command):
        if option := _NUM_RANKS.fullmatch(word):
            changed[i : i + 1 + (option[2] is None)] = [option[1], str(num_ranks)]
            return changed
    raise LookupFailedError(
        "--world changes how many ranks --nproc-per-node of torchrun starts (or --num-processes of accelerate, -np of "
        "mpirun), and the command has no such option; give the command for the other ranks with --with"
    )


class Batches(NamedTuple):
    """How the batches of two launches on different numbers of ranks compare."""

    problem: str
    """How the samples differ, at the first step with a difference; empty if there is none."""
    step: int | None
    order: str
    """In words, whether the samples of each step come in the same order; empty if the samples differ."""
    num_samples: int


def compare_batches(one: Observed, other: Observed, start: int) -> Batches:
    """Compare each step's samples, over all ranks: first as a set, then as a sequence. `start` is the first step."""
    pairs = [(_samples(one, i), _samples(other, i)) for i in range(min(one.num_steps, other.num_steps))]
    num_samples = sum(len(first) for first, _ in pairs)
    for step, (first, second) in enumerate(pairs, start):
        common = Counter(first) & Counter(second)
        if len(first) != len(second):
            text = f"a step reads {counted(len(second), 'sample')} and not {len(first)}"
            return Batches(f"{text}: is the batch size meant for each rank?", step, "", num_samples)
        if common.total() < len(first):
            firsts, seconds = (Counter(chain.from_iterable(side)) for side in zip(*pairs, strict=True))
            over_all = "" if firsts != seconds else "; over all steps the samples are the same"
            text = f"the step has {common.total()} of its {counted(len(first), 'sample')} in common{over_all}"
            return Batches(text, step, "", num_samples)
    is_sequence = all(first == second for first, second in pairs)
    order = "in the same order" if is_sequence else "in another order over the ranks"
    return Batches("", None, order, num_samples)


def _samples(seen: Observed, i: int) -> list[str]:
    """Return the digests of the samples of step `i`: all ranks' first micro-batches, then all their second ones."""
    batches = [
        [batch for look in rank.looks if look.step == i for batch in of_kind(look.digests, "batch").values()]
        for rank in seen.ranks.values()
    ]
    num = max(map(len, batches), default=0)
    return [sample for k in range(num) for of_rank in batches for sample in " ".join(of_rank[k : k + 1]).split()]


def judge_world(one: Observed, other: Observed, runs: Sequence[Run], start: int) -> Proof:
    """Judge whether launches on different numbers of ranks train one model. The third of `runs` measures rounding."""
    batches = compare_batches(one, other, start)
    notes: list[str] = []
    compared = {"samples": batches.num_samples}
    ranks = f"on {len(one.ranks)} and on {counted(len(other.ranks), 'rank')}"
    num_steps = min(one.num_steps, other.num_steps)

    def tell(verdict: str, text: str, first_step: int | None = None) -> Proof:
        return Proof(
            subject="world", verdict=verdict, text=f"{verdict}{text}", steps=num_steps, ranks=len(other.ranks),
            first_step=first_step, notes=tuple(notes), compared=compared,
        )  # fmt: skip

    if one.ranks and not other.ranks:
        return tell(UNKNOWN, f": on other ranks, the program took no step, and ended with exit code {other.exit_code}")
    if one.num_steps != other.num_steps or not num_steps:
        codes = f"exit codes {one.exit_code} and {other.exit_code}"
        return tell(UNKNOWN, f": {ranks}, the program took {one.num_steps} and {other.num_steps} steps ({codes})")
    if len(one.ranks) == len(other.ranks):
        return tell(UNKNOWN, f": both launches had {counted(len(one.ranks), 'rank')}")
    if batches.step is not None:
        return tell(CHANGED, f" from step {batches.step} on: {ranks}, {batches.problem}", batches.step)
    notes.append(f"the samples of each step are the same, {batches.order}")
    try:
        first, second, moved = runs
        result = diff(first, second, noise=[moved])
        apart, by_rounding = (_farthest(first, run) for run in (second, moved))
    except (RunError, ValueError) as error:
        return tell(UNKNOWN, f": {error}" if isinstance(error, RunError) else ": not every launch has left one run")
    compared["values of the whole model"] = result.num_compared - result.num_left_out
    notes.append(
        f"parameters are at most {apart} of their largest magnitude apart; rounding moves them by {by_rounding}"
    )
    if not result.is_equal:
        lines = accusations(result.culprits, 3, has_models=first.has_models)
        culprits = [line.removeprefix("culprit: ") for line in lines]
        text = "; ".join(culprits) or "the values differ by more than rounding: recorder diff shows which"
        return tell(CHANGED, f": {ranks}, {text}", min((one.step for one in result.culprits), default=None))
    values = f"{compared['values of the whole model']:,} values of the whole model"
    return tell(UNCHANGED, f": {counted(num_steps, 'step')} {ranks}: {values} within rounding, as measured")


def _farthest(one: Run, other: Run) -> str:
    apart = diff(one, other, site="param").table.column("of_max").to_pylist()
    return number(max((distance for distance in apart if distance is not None), default=0.0))


def prove_world(
    launches: Launches, command: Sequence[str], other_command: Sequence[str], resumed_command: Sequence[str] = ()
) -> Proven:
    """Run a program on its own number of ranks and on another one, and compare the two models.

    A launch on the program's own ranks with slightly moved inputs measures rounding. With `resumed_command`, the
    program is first killed, and these three launches continue from its checkpoint.
    """
    if launches.environ.keys().isdisjoint(("RECORDER_RULES", "RECORDER_PRESET")):
        launches.environ = {**launches.environ, "RECORDER_RULES": _RULES}
    start, num_steps = 0, launches.num_steps
    if resumed_command:
        what = "resumed on the same ranks, for one step"
        killed, resumed = launches.launch_to_resume(command, what, resumed_command, 1)
        proof = judge_resume(killed, resumed, num_steps=num_steps)
        if proof.verdict != UNCHANGED:
            return launches.proven(proof, killed, resumed)
        start = killed.steps[start_of(killed, resumed) or 0]

    def launch(what: str, command: Sequence[str], **settings: str) -> Observed:
        its_environ = {**launches.environ, **settings}
        return launches.launch(what, command, its_environ, num_steps=num_steps - start, resume=RESUMED)

    one = launch("on its ranks", resumed_command or command)
    moved = launch("with moved inputs, which shows rounding", resumed_command or command, RECORDER_JITTER="1")
    other = launch("on other ranks", other_command)
    seen = (one, other, moved)
    runs = [run for launched in seen for run in launches.runs_of(launched)]
    return launches.proven(judge_world(one, other, runs, start), *seen)
