"""The form of `_prove.json`: what `recorder prove` found of the program of a run. No row depends on it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from .members import Members
from .rundir import encode_manifest

PROOF = "_prove.json"
PROOF_BYTES = 1 << 20
"""A larger file was not written by us."""
UNCHANGED, CHANGED, UNKNOWN = "unchanged", "changed", "cannot tell"
VERDICTS = (UNCHANGED, CHANGED, UNKNOWN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """Whether a program trained under the recorder as it does without."""

    verdict: str
    """One of `VERDICTS`; what a later version may add counts as ``cannot tell`` for exit codes."""
    text: str
    """The verdict as a sentence."""
    steps: int = 0
    """How many optimizer steps were compared."""
    ranks: int = 0
    """How many ranks were compared."""
    first_step: int | None = None
    """The first step that differs, counted from 0 at the start of the program; None: none does."""
    notes: tuple[str, ...] = ()
    """What was not compared, and why."""
    time_ns: int = 0
    """When the verdict was found, since the epoch."""

    def encode(self) -> bytes:
        """Return the text of the file."""
        return encode_manifest({**asdict(self), "notes": list(self.notes)})

    @classmethod
    def read(cls, raw: dict[str, Any]) -> Proof:
        """Read the object of a file, which is untrusted input."""
        members = Members(raw)
        notes = raw.get("notes")
        return cls(
            verdict=members.text("verdict") or UNKNOWN,
            text=members.text("text"),
            steps=members.count("steps"),
            ranks=members.count("ranks"),
            first_step=members.optional_count("first_step"),
            notes=tuple(note for note in notes if isinstance(note, str)) if isinstance(notes, list) else (),
            time_ns=members.count("time_ns"),
        )
