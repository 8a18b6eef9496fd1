"""Shows whether a program trains one model on two numbers of ranks: `prove_world` runs it on both, and compares.

Sums over other ranks round otherwise. How far rounding goes is measured by a launch whose inputs are moved by one part
in the last place; see `recorder.analyze.diff.noise`. torch is never imported here.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

from ...errors import LookupFailedError, RunError
from ...run.run import Run
from ...run.status import CHANGED, UNCHANGED, UNKNOWN, Proof
from ...system.text import counted, number
from ..diff.diff import diff
from ..diff.reply import accusations
from .launches import RESUMED, Launches, Observed, Proven
from .resume import judge_resume, of_kind, start_of

_NUM_RANKS = re.compile(r"(--nproc[-_]per[-_]node|--num[-_]processes|-np)(=(.*))?")
"""The option of torchrun, `accelerate launch` or mpirun that says how many ranks are started."""
_RULES = "site=param,buffer,grad,optim keep=tensor,stats,fingerprint; site=input,output,grad_output keep=stats"
"""What is recorded unless the user has rules: state and gradients in full, which tell rounding from an error best."""


def asked_ranks(command: Sequence[str]) -> str:
    """Return how many ranks a command starts, as it says; empty if it does not say."""
    for word, following in zip(command, [*command[1:], ""], strict=True):
        if option := _NUM_RANKS.fullmatch(word):
            return option[3] or following
    return ""


def on_other_ranks(command: Sequence[str], num_ranks: int) -> list[str]:
    """Return a command that starts another number of ranks. Raises LookupFailedError if it has no option for that."""
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
    """How the batches of two launches on other ranks compare."""

    problem: str
    """What is read otherwise at the first step at which other samples are read; empty if there is none."""
    step: int | None
    order: str
    """Whether the samples of each step come in the same order."""
    num_samples: int


def compare_batches(one: Observed, other: Observed, start: int) -> Batches:
    """Compare the samples of each step, over all ranks: as a set, and as a sequence. `start` is the first step."""
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
    """Return the digests of the samples of a step: of the first micro-batch of each rank, then of the next one."""
    batches = [
        [batch for look in rank.looks if look.step == i for batch in of_kind(look.digests, "batch").values()]
        for rank in seen.ranks.values()
    ]
    num = max(map(len, batches), default=0)
    return [sample for k in range(num) for of_rank in batches for sample in " ".join(of_rank[k : k + 1]).split()]


def judge_world(one: Observed, other: Observed, runs: Sequence[Run], start: int) -> Proof:
    """Return whether two launches on other ranks train one model. `runs` are theirs, and that which shows rounding."""
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
        culprits = [line.removeprefix("culprit: ") for line in accusations(result.culprits, 3)]
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
    """Run a program on its ranks, once more with moved inputs, and on other ranks, and judge whether it is one model.

    With a command that resumes it, the program is killed first, and all of these go on from its checkpoint.
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
