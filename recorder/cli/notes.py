"""Sentences about a run that several commands print."""

from __future__ import annotations

from ..format.proof import CHANGED, UNCHANGED, Proof
from ..globalview.run import Run
from ..system.text import counted


def jitter_note(run: Run) -> str:
    """Return the note that a training was changed on purpose, or was to be."""
    if run.jitter_moved == ():
        return f"note: jitter = {run.jitter} was asked for, and nothing of the model was moved: this run is no twin"
    return f"note: the model's inputs were moved by a last place on purpose (jitter = {run.jitter})"


def proof_state(proof: Proof) -> str:
    """Return the state of the line that tells a verdict of `recorder prove`."""
    return {UNCHANGED: "ok", CHANGED: "missing"}.get(proof.verdict, "note")


def told_note(run: Run) -> str:
    """Return the note that a run was told something while it was under way."""
    numbers = counted(len(run.commands.sound), "command")
    return f"note: the run was sent {numbers} while it was under way, which recorder doctor lists"
