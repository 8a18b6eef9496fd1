"""Passes commands that change the rules of a running recording from the writer thread to the training thread.

The training thread takes commands as a step begins, and applies them from a later step on. So every step has one set of
rules from its first value to its last. Without commands, a step costs one check of an empty queue. On trouble, such as
a value that turns NaN, the rank sends a command to itself: rules that keep statistics only at some steps keep them at
the next steps, too. Nothing here may raise into training, wait, or touch a file.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from ..format.commands import (
    ENDED,
    IN_FORCE,
    MAX_COMMANDS,
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
from ..observe.clock import Clock
from ..observe.selection import RuleSelection
from ..observe.tree import has_compiled_anything
from ..records import KEEP_FINGERPRINT, KEEP_STATS
from ..rules import EVERY, Rule, Schedule, ring_window
from ..sites import OF_CALLS
from ..system.text import listed
from .hooks.root import Root
from .program_values.tap_rows import TapRows

_MORE_STEPS, _MOST_TROUBLES = 3, 3
"""The number of steps for which trouble makes the rules keep more, and how often this may happen in a run."""


class RuleCommands:
    """The queue of commands that change the rules of one recording."""

    def __init__(
        self, own: Sequence[Rule], *, selection: RuleSelection, clock: Clock, roots: Sequence[Root], taps: TapRows
    ) -> None:
        """Begin without commands. `own` are the run's first rules. Later roots (models under hooks) join `roots`."""
        self.changed: Callable[[], None] = lambda: None
        """A function that is called on the training thread after rules were added."""
        self.heeded: Callable[[str], None] = lambda text: None
        """Called with a sentence, on the training thread, when trouble makes the rules keep more."""
        self._sparse = [rule for rule in own if rule.keep & KEEP_STATS and rule.steps != EVERY]
        self._trouble = ""
        self._num_troubles, self._heeded_until = 0, -1
        self._own = own
        self._selection = selection
        self._clock = clock
        self._roots = roots
        self._taps = taps
        self._changes = RuleChanges(own)
        self._told: deque[Command] = deque()

    def tell(self, command: Command) -> None:
        """Queue a command for the training thread. Called on any thread; never waits."""
        self._told.append(command)

    def keep_more(self, why: str) -> None:
        """Keep statistics of the steps that begin next, because of trouble. Called on any thread; never waits."""
        self._trouble = self._trouble or why

    def _heed_trouble(self, step: int) -> None:
        why, self._trouble = self._trouble, ""
        last = step + _MORE_STEPS - 1
        is_kept_anyway = all(one in rule.steps for rule in self._sparse for one in range(step, last + 1))
        if is_kept_anyway or step <= self._heeded_until or self._num_troubles == _MOST_TROUBLES:
            return
        self._num_troubles, self._heeded_until = self._num_troubles + 1, last
        more = [
            replace(rule, steps=EVERY, keep=rule.keep & (KEEP_STATS | KEEP_FINGERPRINT), unit_dim=None).text
            for rule in self._sparse
        ]
        number = MAX_COMMANDS + self._num_troubles  # commands that people send have smaller numbers
        rules = tuple(dict.fromkeys(more))
        self._told.append(Command(kind=SET, from_step=step, to_step=last, rules=rules, reason=why, number=number))

    def answers(self) -> list[Answer]:
        """Return the present state of each command. Called on any thread."""
        told = [command.answer(WAITING) for command in list(self._told)]
        answers = self._changes.answers(self._clock.step)
        taken = {answer.number for answer in answers}
        return answers + [answer for answer in told if answer.number not in taken]

    def step_changes(self, step: int) -> None:
        """Take the commands that have arrived, as a step begins. Commands from outside take effect at a later step."""
        if self._trouble:
            self._heed_trouble(step)
        while self._told:
            command = self._told[0]  # a command leaves the queue last, so that an interrupt never loses the command
            is_sent = command.number <= MAX_COMMANDS
            if not self._changes.has_taken(command):
                try:
                    refused = self._changes.problem(command) or self._add_rules(command)
                    note = "" if refused else self._note(command) if is_sent else command.reason
                except Exception as error:
                    refused, note = f"{type(error).__name__}: {error}", ""
                is_added = self._selection.num_rules > self._changes.num_rules
                rules = rules_of(command) if is_added else ()
                self._changes.take(command, step + is_sent, rules, refused=refused, note=note)
                if not is_sent and not refused:
                    self.heeded(
                        f"{command.reason}; statistics of steps {command.from_step} to {command.to_step} are kept, too"
                    )
            self._selection.reschedule(self._changes.schedules())
            self._told.popleft()

    def _add_rules(self, command: Command) -> str:
        """Add a command's rules to the selection and the modules. Return why the rules are refused, or ""."""
        if command.kind != SET:
            return ""
        rules = rules_of(command)
        if (problem := self._problem_of_ring(rules)) is not None:
            return problem
        if self._selection.num_rules == self._changes.num_rules:  # if this is false, an interrupt came after `extend`
            self._selection.extend(rules)
        meant = [(root, one) for root in self._roots for one in root.modules if one.is_meant_by(rules)]
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
        for root in self._roots:
            root.reselect(rules)
        self._taps.reselect()
        self.changed()
        return ""

    def _problem_of_ring(self, rules: Sequence[Rule]) -> str | None:
        """Return why rules cannot keep values in the ring. Return None if they can, or if they need no ring."""
        if (wanted := ring_window(rules)) is None:
            return None
        window = ring_window(self._own)
        if window is None or not self._selection.has_ring:
            return "keep=ring needs a ring, which this run does not have from its start on; keep=tensor writes at once"
        if wanted != window:
            return f"the ring of this run has before={window.before} after={window.after}, and there is one ring"
        return None

    def _note(self, command: Command) -> str:
        if command.kind != SET:
            return ""
        rules = rules_of(command)
        is_of_modules = all(site in OF_CALLS for rule in rules for site in rule.site)
        meant = any(one.is_meant_by(rules) for root in self._roots for one in root.modules)
        return "it selects no module of this rank" if is_of_modules and not meant else ""


def _shown(paths: Sequence[str]) -> str:
    return listed((repr(path) if path else "the whole model" for path in paths), 3)


_MAX_RULES = 256
"""The most rules that commands may add to a run. Each rule is checked at every step, even one that is not in force."""


class _Taken(NamedTuple):
    """A command that the training thread has taken, with the facts at that moment."""

    command: Command
    next_step: int
    """The first step that had not begun when training took the command."""
    rules: tuple[Rule, ...]
    refused: str
    """The reason why the command is refused. Empty if the command is not refused."""
    note: str
    """A remark for people, or an empty text."""


class _StepsInForce(NamedTuple):
    """The first and last step at which a command is in force. There is no step if `until` is less than `since`."""

    since: int
    until: int | None
    ended_by: int = 0
    """The number of the command that ended this command early; 0 if no command did."""


class RuleChanges:
    """The commands that training has taken, in order, and the resulting steps of every rule.

    The training thread takes commands. Any thread may read their state.
    """

    def __init__(self, own: Sequence[Rule]) -> None:
        self._own = tuple(own)
        self._taken: tuple[_Taken, ...] = ()

    def problem(self, command: Command) -> str | None:
        """Return the reason to refuse a command that holds for every model. Return None if the command can be taken."""
        if command.kind == UNDO:
            target = next((one for one in self._taken if one.command.number == command.undoes), None)
            if target is None:
                return f"there is no command {command.undoes} that changes rules"
            if target.command.kind not in (SET, PAUSE):
                return f"command {command.undoes} is of kind {target.command.kind}; undo undoes a set or a pause"
        num_rules = self.num_rules - len(self._own)
        if num_rules + len(command.rules) > _MAX_RULES:
            return f"this run was sent {num_rules} rules, and takes at most {_MAX_RULES}"
        return None

    @property
    def num_rules(self) -> int:
        """Return the number of rules: those of the run and those that commands have added."""
        return len(self._own) + sum(len(taken.rules) for taken in self._taken)

    def has_taken(self, command: Command) -> bool:
        """Whether this command was taken already. An interrupt may have left it in the queue."""
        return any(taken.command is command for taken in self._taken)

    def take(self, command: Command, next_step: int, rules: tuple[Rule, ...], *, refused: str, note: str) -> None:
        """Take a command, or note that the command is refused. `next_step` is the first step that has not begun.

        `rules` are the command's rules if they were added to the selection. They are given even if the command was
        `refused` after that; the rules of a refused command never apply. `note` is a remark for people.
        """
        self._taken = (*self._taken, _Taken(command, next_step, rules, refused, note))

    def schedules(self) -> list[Schedule]:
        """Return the steps of every rule: the run's own rules, then each command's rules in the order of arrival."""
        in_force = self._steps_in_force()
        paused = [in_force.get(taken.command.number) for taken in self._taken if taken.command.kind == PAUSE]
        pauses = [(one.since, one.until) for one in paused if one is not None and not _is_empty(one)]
        schedules = [rule.steps.within(without((0, None), pauses)) if pauses else rule.steps for rule in self._own]
        for taken in self._taken:
            one = in_force.get(taken.command.number)
            spans: list[Span] = [] if one is None or _is_empty(one) else without((one.since, one.until), pauses)
            schedules += [rule.steps.within(spans) for rule in taken.rules]
        return schedules

    def answers(self, step: int) -> list[Answer]:
        in_force = self._steps_in_force()
        return [_answer(taken, in_force.get(taken.command.number), step) for taken in self._taken]

    def _steps_in_force(self) -> dict[int, _StepsInForce]:
        taken = sorted(self._taken, key=lambda one: one.command.number)
        in_force: dict[int, _StepsInForce] = {}
        for one in taken:
            if not one.refused:
                command = one.command
                in_force[command.number] = _StepsInForce(max(command.from_step, one.next_step), command.to_step)
        for one in taken:
            command = one.command
            if one.refused or command.kind not in (UNDO, RESUME):
                continue
            last = in_force[command.number].since - 1
            for other in taken:
                number = other.command.number
                is_meant = number == command.undoes or (
                    command.kind == RESUME and other.command.kind == PAUSE and number < command.number
                )
                if (
                    is_meant
                    and number in in_force
                    and (in_force[number].until is None or last < (in_force[number].until or 0))
                ):
                    in_force[number] = in_force[number]._replace(until=last, ended_by=command.number)
        return in_force


def _is_empty(in_force: _StepsInForce | None) -> bool:
    return in_force is None or (in_force.until is not None and in_force.until < in_force.since)


def _answer(taken: _Taken, in_force: _StepsInForce | None, step: int) -> Answer:
    command = taken.command
    if in_force is None:
        return command.answer(REFUSED, why=taken.refused)
    why = [taken.note] if taken.note else []
    is_late = in_force.since > command.from_step
    if is_late:
        why.append(f"learned of it at step {taken.next_step - 1}")
    if in_force.ended_by:
        why.append(f"ended by command {in_force.ended_by}")
    if _is_empty(in_force):
        state = MISSED if is_late and not in_force.ended_by else ENDED
        return command.answer(state, why="; ".join(why))
    if step < in_force.since:
        state = WAITING
    elif command.kind in (UNDO, RESUME) or (in_force.until is not None and step > in_force.until):
        state = ENDED
    else:
        state = IN_FORCE
    return command.answer(state, since=in_force.since, until=in_force.until, why="; ".join(why))
