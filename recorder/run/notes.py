"""Sentences about a run that several commands print: its jitter, its dumps, and the commands that were sent to it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from ..format.commands import DUMP, ENDED, MISSED, PAUSE, REFUSED, SET, WAITING, Answer, Command
from ..system.text import counted, printable, size, span
from .run import Run, RunDump
from .status import CHANGED, UNCHANGED, Proof, RankNow


def jitter_note(run: Run) -> str:
    """Return the note that a training was changed on purpose, or was to be."""
    if run.jitter_moved == ():
        return f"note: jitter = {run.jitter} was asked for, and nothing of the model was moved: this run is no twin"
    return f"note: the model's inputs were moved by a last place on purpose (jitter = {run.jitter})"


def proof_state(proof: Proof) -> str:
    """Return the state of the line that tells a verdict of `recorder prove`."""
    return {UNCHANGED: "ok", CHANGED: "missing"}.get(proof.verdict, "note")


def told_note(run: Run) -> str | None:
    """Return the note that a run was told something while it was under way; None where all of it were dumps."""
    if not (num_told := run.commands.num_beside_dumps):
        return None
    numbers = counted(num_told, "command")
    return f"note: the run was sent {numbers} while it was under way, which recorder doctor lists"


def dump_note(dump: RunDump) -> str:
    """Return the sentence that tells of a trigger and of what it left."""
    steps = f"steps {dump.first_step} to {dump.last_step}"
    ranks = f", rank{'s' * (len(dump.ranks) > 1)} {span(list(dump.ranks))}" if dump.ranks else ""
    missed = f"; rank{'s' * (len(dump.missed) > 1)} {span(list(dump.missed))} too late" if dump.missed else ""
    left = f"{counted(dump.num_rows, 'row')}, {size(dump.num_bytes)}"
    return f"dump of {steps}{ranks}: {left}{missed}: {printable(dump.reason)} ({printable(dump.by)})"


def dump_members(dump: RunDump) -> dict[str, object]:
    """Return what JSON has of a dump."""
    return {
        "first_step": dump.first_step,
        "last_step": dump.last_step,
        "reason": dump.reason,
        "by": dump.by,
        "time_ns": dump.time_ns,
        "ranks": list(dump.ranks),
        "missed_ranks": list(dump.missed),
        "rows": dump.num_rows,
        "bytes": dump.num_bytes,
    }


def state_word(kind: str, state: str) -> str:
    """Return the word for what a rank says of a command: rules and a pause last and have ended; all else is done."""
    return "done" if state == ENDED and kind not in (SET, PAUSE) else state


def steps_phrase(since: int, until: int | None) -> str:
    """Return from which step on, or to which, a rank does a command."""
    return f"from step {since} on" if until is None else f"from step {since} to {until}"


def describe(command: Command) -> str:
    """Return what a command is for, in words."""
    steps = f"from step {command.from_step} on"
    if command.to_step is not None:
        steps = f"at steps {command.from_step} to {command.to_step}"
    if command.from_step == command.to_step:
        steps = f"at step {command.from_step}"
    what = "; ".join(command.rules) or (f"command {command.undoes}" if command.undoes is not None else "")
    reason = f" ({command.reason})" if command.reason else ""
    return f"{command.kind} {steps}{': ' if what else ''}{what}{reason}"


def command_members(command: Command) -> dict[str, Any]:
    """Return a command as JSON has it."""
    return {
        "number": command.number,
        "kind": command.kind,
        "from_step": command.from_step,
        "to_step": command.to_step,
        "rules": list(command.rules),
        "undoes": command.undoes,
        "reason": command.reason,
        "by": command.by,
        "created_ns": command.created_ns,
        "id": command.id,
    }


class Told(NamedTuple):
    """A command, and what became of it."""

    command: Command
    lines: Sequence[str]
    """What its ranks say; those that say the same together."""
    is_done: bool
    """Whether every rank of the run did it, from its first step on."""


def told(run: Run, *, with_dumps: bool = False, shown: Sequence[RankNow] = ()) -> Iterator[Told]:
    """Yield what a run was told, by number. What was dumped is shown by what it left, unless it is asked for here.

    Args:
        run: the run.
        with_dumps: whether to yield dumps, too.
        shown: what the ranks' statuses say, which is ahead of their manifests in a run under way.
    """
    newest = {writer.rank: writer.manifest for writer in run.writers if writer.manifest.members}
    for command in run.commands.sound:
        if command.kind == DUMP and not with_dumps:
            continue
        answers = {
            rank: answer
            for rank, manifest in newest.items()
            for answer in manifest.commands
            if answer.id == command.id and rank is not None  # a daemon may have carried it to another number
        }
        for now in shown:
            for answer in now.status.commands:
                known = answers.get(now.rank)
                if answer.id == command.id and (known is None or known.is_before(answer)):
                    answers[now.rank] = answer
        unheard = sorted(rank for rank in newest if rank is not None and rank not in answers)
        lines = _outcomes(command, answers)
        if unheard:
            lines.append(f"{counted(len(unheard), 'rank')} ({span(unheard)}): never heard of it")
        is_done = not unheard and all(_is_done(command, answer) for answer in answers.values())
        yield Told(command, lines, is_done)


def _is_done(command: Command, answer: Answer) -> bool:
    is_late = answer.since is not None and answer.since > command.from_step
    return answer.state not in (REFUSED, MISSED, WAITING) and not is_late


def answer_members(run: Run, command: Command, shown: Sequence[RankNow] = ()) -> list[dict[str, Any]]:
    """Return what each rank says of a command, as JSON has it; `shown` as `told` takes it."""
    ahead = {now.rank: answer for now in shown for answer in now.status.commands if answer.id == command.id}
    said = [
        (writer.rank, answer)
        for writer in run.writers
        for answer in writer.manifest.commands
        if answer.id == command.id and writer.rank is not None
    ]
    said += [(rank, answer) for rank, answer in ahead.items() if rank not in dict(said)]
    members = []
    for rank, answer in said:
        newest = ahead[rank] if rank in ahead and answer.is_before(ahead[rank]) else answer
        members.append({"rank": rank, **newest.short_members()})
    return members


def _outcomes(command: Command, answers: dict[int, Answer]) -> list[str]:
    """Return what became of one command, ranks that say the same together."""
    groups: dict[tuple[str, int | None, int | None, str], list[int]] = {}
    for rank, answer in sorted(answers.items()):
        groups.setdefault((answer.state, answer.since, answer.until, answer.why), []).append(rank)
    outcomes = []
    for (state, since, until, why), ranks in groups.items():
        steps = "" if since is None else f", {steps_phrase(since, until)}"
        because = f" ({why})" if why else ""
        word = state_word(command.kind, state)
        outcomes.append(f"{counted(len(ranks), 'rank')} ({span(ranks)}): {word}{steps}{because}")
    return outcomes
