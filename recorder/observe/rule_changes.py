"""What commands make of the rules of a run that is under way: `RuleChanges`.

A command is in force from a step that has not begun when it is taken, so that every step has one set of rules from its
first value to its last. The training thread takes commands; any thread may ask what became of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..format.commands import (
    ENDED,
    IN_FORCE,
    MISSED,
    PAUSE,
    REFUSED,
    RESUME,
    SET,
    UNDO,
    WAITING,
    Answer,
    Command,
    Span,
    rules_of,
    without,
)
from ..rules import Rule, Schedule

_MAX_RULES = 256
"""Rules that a run may be sent: each is looked at once a step, whether it is in force or not."""


class _Taken(NamedTuple):
    """A command, and what was known when it was taken."""

    command: Command
    next_step: int
    """The first step that had not begun."""
    rules: tuple[Rule, ...]
    refused: str
    """Why it is not done; empty where it is."""
    note: str
    """What there is to say of it otherwise."""


class _Held(NamedTuple):
    """The steps at which a command is done: none where `until` lies before `since`."""

    since: int
    until: int | None
    ended_by: int = 0
    """The number of the command that ended it early; 0 where none did."""


class RuleChanges:
    """The commands that were taken, in their order, and the steps of every rule that they make."""

    def __init__(self, own: Sequence[Rule]) -> None:
        self._own = tuple(own)
        self._taken: tuple[_Taken, ...] = ()

    def problem(self, command: Command) -> str | None:
        """Return why a command cannot be done, whatever the model is; None where it can."""
        if command.kind == UNDO:
            target = next((one for one in self._taken if one.command.number == command.undoes), None)
            if target is None:
                return f"there is no command {command.undoes} that changes rules"
            if target.command.kind not in (SET, PAUSE):
                return f"command {command.undoes} is of kind {target.command.kind}; undo undoes a set or a pause"
        num_rules = sum(len(one.rules) for one in self._taken)
        if num_rules + len(command.rules) > _MAX_RULES:
            return f"this run was sent {num_rules} rules, and takes at most {_MAX_RULES}"
        return None

    def take(self, command: Command, next_step: int, *, refused: str = "", note: str = "") -> None:
        """Take a command, or note that it is refused, and why.

        Args:
            command: the command.
            next_step: the first step that has not begun.
            refused: why it is not done; its rules never apply then.
            note: what there is to say of it otherwise, for people.
        """
        rules = rules_of(command) if command.kind == SET else ()
        self._taken = (*self._taken, _Taken(command, next_step, rules, refused, note))

    def schedules(self) -> list[Schedule]:
        """Return the steps of every rule: the run's own, and then those of each command, in the order of taking."""
        held = self._held()
        paused = [held.get(taken.command.number) for taken in self._taken if taken.command.kind == PAUSE]
        pauses = [(one.since, one.until) for one in paused if one is not None and not _is_empty(one)]
        schedules = [rule.steps.within(without((0, None), pauses)) if pauses else rule.steps for rule in self._own]
        for taken in self._taken:
            one = held.get(taken.command.number)
            spans: list[Span] = [] if one is None or _is_empty(one) else without((one.since, one.until), pauses)
            schedules += [rule.steps.within(spans) for rule in taken.rules]
        return schedules

    def answers(self, step: int) -> list[Answer]:
        """Return what is to be said of each command at a step. Any thread."""
        held = self._held()
        return [_answer(taken, held.get(taken.command.number), step) for taken in self._taken]

    def _held(self) -> dict[int, _Held]:
        """Return the steps of each command that is done, by its number."""
        taken = sorted(self._taken, key=lambda one: one.command.number)
        held: dict[int, _Held] = {}
        for one in taken:
            if not one.refused:
                command = one.command
                held[command.number] = _Held(max(command.from_step, one.next_step), command.to_step)
        for one in taken:
            command = one.command
            if one.refused or command.kind not in (UNDO, RESUME):
                continue
            last = held[command.number].since - 1
            for other in taken:
                number = other.command.number
                is_meant = number == command.undoes or (
                    command.kind == RESUME and other.command.kind == PAUSE and number < command.number
                )
                if is_meant and number in held and (held[number].until is None or last < (held[number].until or 0)):
                    held[number] = held[number]._replace(until=last, ended_by=command.number)
        return held


def _is_empty(held: _Held | None) -> bool:
    return held is None or (held.until is not None and held.until < held.since)


def _answer(taken: _Taken, held: _Held | None, step: int) -> Answer:
    command = taken.command
    given = {
        "number": command.number,
        "id": command.id,
        "kind": command.kind,
        "by": command.by,
        "rules": command.rules,
    }
    if held is None:
        return Answer(**given, state=REFUSED, why=taken.refused)  # type: ignore[arg-type]
    why = [taken.note] if taken.note else []
    is_late = held.since > command.from_step
    if is_late:
        why.append(f"learned of it at step {taken.next_step - 1}")
    if held.ended_by:
        why.append(f"ended by command {held.ended_by}")
    if _is_empty(held):
        state = MISSED if is_late and not held.ended_by else ENDED
        return Answer(**given, state=state, why="; ".join(why))  # type: ignore[arg-type]
    if step < held.since:
        state = WAITING
    elif command.kind in (UNDO, RESUME) or (held.until is not None and step > held.until):
        state = ENDED
    else:
        state = IN_FORCE
    return Answer(**given, state=state, since=held.since, until=held.until, why="; ".join(why))  # type: ignore[arg-type]
