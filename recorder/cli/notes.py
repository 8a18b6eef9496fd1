"""Sentences about a run that several commands print."""

from __future__ import annotations

from ..run.run import Run, RunDump
from ..run.status import CHANGED, UNCHANGED, Proof
from ..system.text import counted, printable, size, span


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
