"""Commands that change the rules of a recording: from the writer thread, which hears them, to training.

Training takes them as a step begins, and does them from a later step on; while there are none, that costs one look at
an empty queue a step. Nothing here may raise into training, wait, or touch a file.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from ..config import Settings
from ..format.commands import SET, WAITING, Answer, Command, rules_of
from ..observe.clock import Clock
from ..observe.compiled import has_compiled_anything
from ..observe.rule_changes import RuleChanges
from ..observe.selection import Selection
from ..rules import Rule, ring_window
from ..sites import OF_CALLS
from ..system.text import listed
from ..taps.rows import TapRows
from .hooks.root import Root


class ChangedRecording(Protocol):
    """The part of a recording whose rules change."""

    @property
    def settings(self) -> Settings: ...

    @property
    def selection(self) -> Selection: ...

    @property
    def clock(self) -> Clock: ...

    @property
    def roots(self) -> Sequence[Root]: ...

    @property
    def tap_rows(self) -> TapRows: ...


class RuleCommands:
    """The commands of one recording that change its rules."""

    def __init__(self, recording: ChangedRecording) -> None:
        self.changed: Callable[[], None] = lambda: None
        """Called on the training thread once rules were added."""
        self._recording = recording
        self._changes = RuleChanges(recording.settings.rules)
        self._told: deque[Command] = deque()
        self._added: set[int] = set()
        """The numbers of commands whose rules the selection has."""

    def tell(self, command: Command) -> None:
        """Hand a command to training. Any thread, never waits."""
        self._told.append(command)

    def answers(self) -> list[Answer]:
        """Return what is to be said of each command now. Any thread."""
        told = [
            Answer(number=one.number, id=one.id, kind=one.kind, state=WAITING, by=one.by, rules=one.rules)
            for one in list(self._told)
        ]
        answers = self._changes.answers(self._recording.clock.step)
        taken = {answer.number for answer in answers}
        return answers + [answer for answer in told if answer.number not in taken]

    def step_changes(self, step: int) -> None:
        """Take what was told, as a step begins; it is in force from the next step on at the earliest."""
        while self._told:
            command = self._told[0]  # it stays until it is done, so that an interrupt loses none
            try:
                refused = self._changes.problem(command) or self._add_rules(command)
                note = "" if refused else self._note(command)
            except Exception as error:
                refused, note = f"{type(error).__name__}: {error}", ""
            self._changes.take(command, step + 1, refused=refused, note=note)
            self._told.popleft()
            self._recording.selection.reschedule(self._changes.schedules())

    def _add_rules(self, command: Command) -> str:
        """Have selection and modules take the rules of a command; return why that cannot be, or nothing."""
        if command.kind != SET:
            return ""
        recording = self._recording
        rules = rules_of(command)
        if (problem := self._problem_of_ring(rules)) is not None:
            return problem
        if command.number not in self._added:
            self._added.add(command.number)
            recording.selection.extend(rules)
        meant = [(root, one) for root in recording.roots for one in root.watches if one.is_meant_by(rules)]
        if has_compiled_anything() and (lacking := [one.node_path for _, one in meant if one.lacks_hooks()]):
            return (
                f"something was compiled in this process, and hooks on {_shown(lacking)} would make it compile again; "
                "name modules and sites that the run's own rules have, or param, grad, buffer and optim"
            )
        is_of_calls = all(site in OF_CALLS for rule in rules for site in rule.site)
        if is_of_calls and meant and all(one.is_hidden and not root.is_seen_at_tap(one) for root, one in meant):
            return (
                f"{_shown([one.node_path for _, one in meant])} is compiled or cannot be called, so that its calls are "
                "not seen; RECORDER_COMPILED=tap from the start of the run shows what is compiled"
            )
        for root in recording.roots:
            root.reselect(rules)
        recording.tap_rows.reselect()
        self.changed()
        return ""

    def _problem_of_ring(self, rules: Sequence[Rule]) -> str | None:
        """Return why rules cannot hold values in a ring; None where they need none, or the run's own will do."""
        if (wanted := ring_window(rules)) is None:
            return None
        window = ring_window(self._recording.settings.rules)
        if window is None or not self._recording.selection.has_ring:
            return "keep=ring needs a ring, which this run does not have from its start on; keep=tensor writes at once"
        if wanted != window:
            return f"the ring of this run has before={window.before} after={window.after}, and there is one ring"
        return None

    def _note(self, command: Command) -> str:
        """Return what there is to say of a command that is done."""
        if command.kind != SET:
            return ""
        rules = rules_of(command)
        is_of_modules = all(site in OF_CALLS for rule in rules for site in rule.site)
        meant = any(one.is_meant_by(rules) for root in self._recording.roots for one in root.watches)
        return "it selects no module of this rank" if is_of_modules and not meant else ""


def _shown(paths: Sequence[str]) -> str:
    return listed((repr(path) if path else "the whole model" for path in paths), 3)
