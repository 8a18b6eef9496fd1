"""Commands to a run that is being recorded, writers' answers to them, and the capture rules that result.

A command is one small file that never changes, such as ``_commands/000001.json``. It names the steps to which it
applies. These steps lie ahead when the command is sent, so all ranks act at the same steps without communication. A
writer answers in its manifest and its status file. A command only selects what is recorded: it never contains a path, a
size or code. Nothing here touches a file; `storage.commands` sends and finds commands.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from os import urandom
from typing import Any

from ..errors import CommandError, ConfigError, RunError
from ..records import KEEP_RING
from ..rules import EXPRESSION, Rule, parse_rules
from ..sites import FORMAT_NAME, FORMAT_VERSION
from ..system.text import one_line
from .rundir import Members, check_version, encode_manifest

COMMANDS = "_commands"
COMMAND_BYTES = 4096
"""The largest size of a command's file in bytes; a larger file is no command."""
MAX_COMMANDS = 4096
"""The highest number that a command of a run may have."""

SET, UNDO, PAUSE, RESUME, DUMP = "set", "undo", "pause", "resume", "dump"
KINDS = (SET, UNDO, PAUSE, RESUME, DUMP)

_MAX_RULES = 16
_MAX_STEP = 1 << 53
_MAX_TEXT = 200
_ID = re.compile(r"[0-9a-f]{16}")
_NAME = re.compile(r"([0-9]{6})\.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """An instruction to a run that is being recorded."""

    kind: str
    """``set`` adds capture rules to the run's own. ``undo`` ends another command. ``pause`` stops the recording, and
    ``resume`` ends a pause. ``dump`` writes the values that the ring (a buffer of recent steps in memory) holds."""
    from_step: int
    to_step: int | None = None
    rules: tuple[str, ...] = ()
    """The capture rules of a ``set``. Each is a text that `rules.parse_rules` reads."""
    undoes: int | None = None
    """The number of the command that an ``undo`` ends. That command's last step is the one before `from_step`."""
    reason: str = ""
    by: str = ""
    """The sender: a user and a host, or a rank."""
    attempt: int = 0
    """The job's highest attempt (restart number) when the command was sent. Later attempts do not repeat a ``dump``."""
    created_ns: int = field(default_factory=time.time_ns)
    """The time at which the command was made, by the sender's clock."""
    id: str = field(default_factory=lambda: urandom(8).hex())
    """A random id. A command copied to another node may get a second number there; by its id it is done only once."""
    number: int = 0
    """The command's number in the run, from its file's name; 0 before it is sent."""

    def encode(self) -> bytes:
        """Return the bytes of the command's file. Raises CommandError if the command is invalid or too long."""
        if (problem := problem_of(self)) is not None:
            raise CommandError(problem)
        members = {
            "format": FORMAT_NAME,
            "version": list(FORMAT_VERSION),
            "kind": self.kind,
            "from_step": self.from_step,
            "to_step": self.to_step,
            **({"rules": list(self.rules)} if self.rules else {}),
            **({} if self.undoes is None else {"undoes": self.undoes}),
            "reason": self.reason[:_MAX_TEXT],
            "by": self.by[:_MAX_TEXT],
            "attempt": self.attempt,
            "created_ns": self.created_ns,
            "id": self.id,
        }
        text = encode_manifest(members)
        if len(text) > COMMAND_BYTES:
            raise CommandError(
                f"the command takes {len(text)} bytes; at most {COMMAND_BYTES} are read: shorten its rules"
            )
        return text


def command_name(number: int) -> str:
    """Return the file name of the command with a number, such as `000001.json`."""
    return f"{number:06d}.json"


def parse_command_name(name: str) -> int | None:
    """Return the number in a command's file name. Return None if `command_name` did not make the name."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match is not None and match[1].isascii() and 0 < int(match[1]) <= MAX_COMMANDS else None


def read_command(raw: dict[str, Any], where: str, number: int) -> Command:
    """Return the command in untrusted JSON. Raises CommandError, which begins with `where`, for an invalid command."""
    try:
        check_version(raw, where)
    except RunError as error:
        raise CommandError(str(error)) from None
    problems: list[str] = []
    members = Members(raw, problems)
    from_step = members.optional_count("from_step")
    read = members.plain(Command, "from_step", "number")
    read |= {name: one_line(read[name])[:_MAX_TEXT] for name in ("reason", "by")}
    command = Command(**read, from_step=-1 if from_step is None else from_step, number=number)
    problem = problems[0] if problems else problem_of(command)
    if problem is not None:
        raise CommandError(f"{where}: {problem}")
    return command


def problem_of(command: Command) -> str | None:
    """Return the reason why writers would refuse a command. Return None if they would accept it."""
    if command.kind not in KINDS:
        return f"unknown kind {command.kind[:40]!r}; this version knows {', '.join(KINDS)}"
    if not 0 <= command.from_step < _MAX_STEP or (command.to_step is not None and command.to_step >= _MAX_STEP):
        return f"steps go from 0 to {_MAX_STEP - 1}; it has from_step {command.from_step}, to_step {command.to_step}"
    if command.to_step is not None and command.to_step < command.from_step:
        return f"its last step, {command.to_step}, lies before its first, {command.from_step}"
    if not _ID.fullmatch(command.id):
        return f"its id is {command.id[:40]!r}, expected 16 hexadecimal digits"
    if command.kind == DUMP and command.to_step is None:
        return "a dump has a last step"
    if (command.kind == UNDO) != (command.undoes is not None):
        return "an undo names the command that it undoes" if command.kind == UNDO else "only an undo has 'undoes'"
    if command.kind in (UNDO, RESUME) and command.to_step is not None:
        return f"a command of kind {command.kind} has no last step"
    if command.kind == SET:
        return _problem_of_rules(command)
    return "only a set has rules" if command.rules else None


def rules_of(command: Command) -> tuple[Rule, ...]:
    """Parse the rules of a command for which `problem_of` returns None."""
    return parse_rules(list(command.rules))


def _problem_of_rules(command: Command) -> str | None:
    if not 0 < len(command.rules) <= _MAX_RULES:
        return f"a set has 1 to {_MAX_RULES} rules; this one has {len(command.rules)}"
    try:
        rules = rules_of(command)
    except ConfigError as error:
        return str(error)
    for rule in rules:
        if rule.keep & KEEP_RING:
            return f"{rule.text!r} keeps a ring, whose memory is set apart as a run starts; keep=tensor writes at once"
        patterns = (*rule.module, *rule.cls, *rule.name)
        if any(pattern.removeprefix("!").startswith(EXPRESSION) for pattern in patterns):
            # Some regular expressions run for ever in Python's `re`, and training would have to wait.
            return f"{rule.text!r} has a regular expression; in a run under way rules have names and * ? [] alone"
    return None


WAITING, IN_FORCE, ENDED, MISSED, REFUSED = "waiting", "in force", "ended", "missed", "refused"
STATES = (WAITING, IN_FORCE, ENDED, MISSED, REFUSED)
"""The states of a command at one writer: its steps have not begun; it is in force; its steps are over; the writer
learned of it after its last step; the writer refused it. A later version of the format may add states."""
_PROGRESS = (WAITING, IN_FORCE)
"""The states that later change, in the order in which a command passes through them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A writer's answer to one command."""

    number: int
    id: str
    kind: str
    state: str
    """The state of the command at the writer, one of `STATES`."""
    since: int | None = None
    """The first step at which the writer obeys. It lies after `from_step` if the writer learned of the command late."""
    until: int | None = None
    why: str = ""
    """A sentence: why the command was missed or refused, or what it did."""
    by: str = ""
    rules: tuple[str, ...] = ()

    def members(self) -> dict[str, Any]:
        """Return the answer as an object for a writer's manifest, without empty members."""
        return self.short_members() | {
            name: value for name, value in (("by", self.by), ("rules", list(self.rules))) if value
        }

    def short_members(self) -> dict[str, Any]:
        """Return the answer as a short object for a status file, which has little room."""
        names = ("number", "id", "kind", "state", "since", "until")
        members = {name: getattr(self, name) for name in names} | {"why": self.why[:_MAX_TEXT] or None}
        return {name: value for name, value in members.items() if value is not None}

    def is_before(self, other: Answer) -> bool:
        """Return whether this answer is older than `other`, which the same writer gave to the same command."""
        known = len(_PROGRESS)
        one, two = (_PROGRESS.index(of.state) if of.state in _PROGRESS else known for of in (self, other))
        return one < two

    @classmethod
    def read(cls, members: Members) -> Answer:
        answer = cls(**members.plain(cls))
        return replace(answer, why=answer.why[:_MAX_TEXT], by=answer.by[:_MAX_TEXT])


def rules_in_force(rules: Sequence[Rule], answers: Iterable[Answer]) -> list[Rule]:
    """Return a writer's and its commands' rules, with the steps of each. Raises ConfigError for a wrong rule."""
    held = [answer for answer in answers if answer.since is not None and answer.state != REFUSED]
    pauses = [span for answer in held if answer.kind == PAUSE and (span := _span(answer)) is not None]
    sets = [(answer, span) for answer in held if answer.kind == SET and (span := _span(answer)) is not None]
    if not pauses and not sets:
        return list(rules)
    in_force = list(rules) if not pauses else [_at(rule, without((0, None), pauses)) for rule in rules]
    for answer, span in sets:
        sent = parse_rules(list(answer.rules), takes_unknown_sites=True)
        in_force += [_at(rule, without(span, pauses)) for rule in sent]
    return [rule for rule in in_force if rule.steps.slices or rule.steps.powers_of_two]


Span = tuple[int, int | None]
"""A range of steps: the first and the last step; the last step is None for a range without an end."""


def _at(rule: Rule, spans: Sequence[Span]) -> Rule:
    return replace(rule, steps=rule.steps.within(spans), written="")


def _span(answer: Answer) -> Span | None:
    assert answer.since is not None, "commands without a first step were left out"
    return None if answer.until is not None and answer.until < answer.since else (answer.since, answer.until)


def without(span: Span, pauses: Iterable[Span]) -> list[Span]:
    """Return the ranges of steps within `span` that no pause covers."""
    first, last = span
    spans: list[Span] = []
    for begin, end in sorted(pauses, key=lambda pause: pause[0]):
        if last is not None and begin > last:
            break
        if begin > first:
            spans.append((first, begin - 1))
        if end is None:
            return spans
        first = max(first, end + 1)
    if last is None or first <= last:
        spans.append((first, last))
    return spans
