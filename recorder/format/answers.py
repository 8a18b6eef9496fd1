"""The form of what a writer says of a command, in its manifest and its status. Touches no file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .members import Members

WAITING, IN_FORCE, ENDED, MISSED, REFUSED = "waiting", "in force", "ended", "missed", "refused"
STATES = (WAITING, IN_FORCE, ENDED, MISSED, REFUSED)
"""What a writer says of a command: its steps lie ahead; it is done now, or was done; the writer learned of it too late
for any of its steps; the writer does not do it. A later version may have more."""
_PROGRESS = (WAITING, IN_FORCE)
"""States after which a writer has more to say, the first one first."""
_MAX_TEXT = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a writer says of one command."""

    number: int
    id: str
    kind: str
    state: str
    """One of `STATES`."""
    since: int | None = None
    """The first step at which this writer does it; behind the command's own where the writer learned of it late."""
    until: int | None = None
    """The last step at which this writer does it, where that is known."""
    why: str = ""
    """Why the command was missed or refused, or what it left; a sentence."""
    by: str = ""
    """Who sent the command."""
    rules: tuple[str, ...] = ()
    """The rules of a command that has some."""

    def members(self) -> dict[str, Any]:
        """Return it for a manifest, without what it does not say."""
        return self.short_members() | {
            name: value for name, value in (("by", self.by), ("rules", list(self.rules))) if value
        }

    def short_members(self) -> dict[str, Any]:
        """Return it for a status, which has little room."""
        members = {
            "number": self.number,
            "id": self.id,
            "kind": self.kind,
            "state": self.state,
            "since": self.since,
            "until": self.until,
            "why": self.why[:_MAX_TEXT] or None,
        }
        return {name: value for name, value in members.items() if value is not None}

    def is_before(self, other: Answer) -> bool:
        """Whether the same writer has said this before it said another answer to the same command."""
        known = len(_PROGRESS)
        one, two = (_PROGRESS.index(of.state) if of.state in _PROGRESS else known for of in (self, other))
        return one < two

    @classmethod
    def read(cls, members: Members) -> Answer:
        """Read it from an object of unknown origin."""
        return cls(
            number=members.count("number"),
            id=members.text("id"),
            kind=members.text("kind"),
            state=members.text("state"),
            since=members.optional_count("since"),
            until=members.optional_count("until"),
            why=members.text("why")[:_MAX_TEXT],
            by=members.text("by")[:_MAX_TEXT],
            rules=members.texts("rules"),
        )
