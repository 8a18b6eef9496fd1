"""Commands to a run that is being recorded, writers' answers to them, and the capture rules that result.

A command is one small file that never changes, such as ``_commands/000001.json``. It names the steps to which it
applies. These steps lie ahead when the command is sent, so all ranks act at the same steps without communication. A
writer answers in its manifest and its status file. A command only selects what is recorded, and has no path, size or
code.

A command appears complete under the next free number. Whoever may write to the run's directory may send commands. Even
so, every file of a command is untrusted input. Nothing but `send` and `CommandFolder` touches a file.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import CommandError, ConfigError, CorruptError, RecorderError, RunError
from ..records import KEEP_RING
from ..rules import EXPRESSION, Rule, parse_rules
from ..sites import FORMAT_NAME, FORMAT_VERSION
from ..system.processes import sync_directory
from ..system.text import one_line
from .rundir import Members, check_version, encode_manifest, read_json

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
    """The capture rules of a ``set``. Each rule is a text that `rules.parse_rules` reads."""
    undoes: int | None = None
    """The number of the command that an ``undo`` ends. That command's last step is the one before `from_step`."""
    reason: str = ""
    by: str = ""
    """The sender: a user and a host, or a rank."""
    attempt: int = 0
    """The job's highest attempt (restart number) when the command was sent. Later attempts do not repeat a ``dump``."""
    created_ns: int = field(default_factory=time.time_ns)
    """The time at which the command was made, by the sender's clock."""
    id: str = field(default_factory=lambda: os.urandom(8).hex())
    """A random id. A command copied to another node may get a second number there, but is done once per id."""
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

    def answer(self, state: str, *, since: int | None = None, until: int | None = None, why: str = "") -> Answer:
        """Return a writer's answer to this command."""
        return Answer(
            number=self.number, id=self.id, kind=self.kind, state=state, since=since, until=until, why=why, by=self.by,
            rules=self.rules,
        )  # fmt: skip


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
        return f"steps go from 0 to {_MAX_STEP - 1}; got from_step {command.from_step}, to_step {command.to_step}"
    if command.to_step is not None and command.to_step < command.from_step:
        return f"its last step, {command.to_step}, lies before its first, {command.from_step}"
    if not _ID.fullmatch(command.id):
        return f"its id is {command.id[:40]!r}, expected 16 hexadecimal digits"
    if command.kind == DUMP and command.to_step is None:
        return "a dump needs a last step"
    if (command.kind == UNDO) != (command.undoes is not None):
        return "an undo must name the command to undo" if command.kind == UNDO else "only an undo has 'undoes'"
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


_MAX_ENTRIES = 2 * MAX_COMMANDS
"""The most names that are read from a directory. The package never makes more."""
_UNFINISHED_S = 5.0
"""The seconds for which a damaged file is read again before it is refused. On a file system without links, a new
command is incomplete at first."""
_FRESH_S = 2.5
"""For this many seconds after a change, `look` lists the directory each time, as file times may be 2 s off."""
_RELIST_S = 5.0
"""After so many seconds, `look` lists the directory even without a visible change: network file systems lag."""


def send(run_dir: Path, command: Command) -> Command:
    """Write a command for all ranks of a run, and return it with its number. Called on any thread; may block.

    Raises CommandError if no writer would accept the command or if the disk refuses it. Then no file is left behind.
    """
    text = command.encode()
    folder = run_dir / COMMANDS
    try:
        _make_folder(folder)
        with _written_beside(folder, command.id, text) as temporary:
            for number in range(max(_numbers(folder), default=0) + 1, MAX_COMMANDS + 1):
                if _publish(temporary, folder / command_name(number), text):
                    sync_directory(folder)
                    return replace(command, number=number)
        raise CommandError(f"{folder}: the run has had {MAX_COMMANDS} commands, and takes no more")
    except OSError as error:
        hint = "; send it as the user who trains" if error.errno in (errno.EACCES, errno.EPERM) else ""
        raise CommandError(f"{folder}: the command cannot be written ({error.strerror}){hint}") from error


def _make_folder(folder: Path) -> None:
    above = os.stat(folder.parent)
    try:
        os.mkdir(folder, stat.S_IMODE(above.st_mode))
    except FileExistsError:
        if not stat.S_ISDIR(os.lstat(folder).st_mode):
            raise NotADirectoryError(errno.ENOTDIR, "it is no directory", str(folder)) from None
    else:
        os.chmod(folder, stat.S_IMODE(above.st_mode))  # the mode of the run's directory, not the umask's
        _give_to_owner(folder, above)
        sync_directory(folder.parent)


def _give_to_owner(path: Path, above: os.stat_result) -> None:
    """Give a file that root has written to the user who trains."""
    if (os.geteuid(), os.getegid()) != (above.st_uid, above.st_gid):
        with contextlib.suppress(OSError):
            os.chown(path, above.st_uid, above.st_gid, follow_symlinks=False)


@contextlib.contextmanager
def _written_beside(folder: Path, name: str, text: bytes) -> Iterator[Path]:
    temporary = folder / f"{name}-{os.urandom(4).hex()}.tmp"
    try:
        _create(temporary, text)
        yield temporary
    finally:
        with contextlib.suppress(OSError):
            os.unlink(temporary)


def _create(path: Path, text: bytes) -> None:
    above = os.stat(path.parent)
    mode = 0o600 | (stat.S_IMODE(above.st_mode) & 0o044)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    try:
        try:
            if os.write(descriptor, text) != len(text):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            os.fchmod(descriptor, mode)
            _give_to_owner(path, above)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(path)
        raise


def _publish(temporary: Path, final: Path, text: bytes) -> bool:
    """Give the file its final name. Return False if another command has the name."""
    try:
        os.link(temporary, final, follow_symlinks=False)
    except FileExistsError:
        # NFS may repeat a request that has succeeded. The existing link is then ours.
        return os.path.samestat(os.lstat(temporary), os.lstat(final))
    except OSError:
        if os.path.lexists(final):
            return False
        try:
            _create(final, text)  # the file system has no links: readers wait until the file is complete
        except FileExistsError:
            return False
    return True


def _numbers(folder: Path) -> list[int]:
    with os.scandir(folder) as entries:
        names = [entry.name for entry, _ in zip(entries, range(_MAX_ENTRIES), strict=False)]
    return sorted(number for name in names if (number := parse_command_name(name)) is not None)


class Refusal(NamedTuple):
    """A file that has a command's name but contains no valid command."""

    number: int
    why: str


class CommandFolder:
    """Finds the new commands of one run, each once. Used by one thread. Usually `look` costs one system call."""

    def __init__(self, run_dir: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder = run_dir / COMMANDS
        self._clock = clock
        self._seen: set[int] = set()
        self._damaged_since_s: dict[int, float] = {}
        self._changed_ns = -1
        self._changed_s = self._listed_s = float("-inf")

    @property
    def num_seen(self) -> int:
        """The number of files found so far, including refused ones."""
        return len(self._seen)

    @property
    def has_unfinished(self) -> bool:
        """True if a file was found that may be incomplete."""
        return bool(self._damaged_since_s)

    def look(self, *, is_told: bool = False) -> list[Command | Refusal]:
        """Return the commands since the last call, by number. `is_told`: the caller knows of a new command."""
        now = self._clock()
        try:
            folder_stat = os.stat(self._folder, follow_symlinks=False)
            if not stat.S_ISDIR(folder_stat.st_mode):
                return []
            if folder_stat.st_mtime_ns != self._changed_ns:
                self._changed_ns, self._changed_s = folder_stat.st_mtime_ns, now
            is_fresh = now - self._changed_s < _FRESH_S or now - self._listed_s >= _RELIST_S
            if not (is_told or is_fresh or self._damaged_since_s):
                return []
            self._listed_s = now
            new = [number for number in _numbers(self._folder) if number not in self._seen]
        except OSError:  # no command was sent yet, or the disk is gone, which the writer notices by other means
            return []
        return [one for number in new if (one := self._read(number, now)) is not None]

    def _read(self, number: int, now: float) -> Command | Refusal | None:
        name = f"{COMMANDS}/{command_name(number)}"
        command: Command | Refusal
        try:
            command = read_command(read_json(self._folder / command_name(number), COMMAND_BYTES), name, number)
        except CommandError as error:
            command = Refusal(number, str(error))
        except (RecorderError, OSError) as error:
            since_s = self._damaged_since_s.setdefault(number, now)
            if isinstance(error, CorruptError | OSError) and now - since_s < _UNFINISHED_S:
                return None
            command = Refusal(number, str(error))
        self._damaged_since_s.pop(number, None)
        self._seen.add(number)
        return command
