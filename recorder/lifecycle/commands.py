"""Receives the commands that are sent to a run under way (`Commands`), and carries them between nodes (`Carrier`).

A command is a small immutable file in the run's directory (`format.commands` describes its content). The sender
(`recorder set`, `recorder dump`, or the writer thread of any rank) names steps that lie ahead. Each rank's writer
thread finds the file, carries the command out through the callback of its kind, and answers in its manifest and its
status. No collective is issued, and training waits for nothing.

One rank of each node looks into the run's directory. It notifies the other ranks of the node by the node's mark, a
sparse file in the node's own memory. The time of the mark shows that this rank is at work, and the length of the mark
is the number of commands found. So 4,096 ranks of 512 nodes make 250 system calls a second on the shared file system,
and 40 on each node's own.

If nodes share no file system, one rank carries commands for each directory. It copies the commands of its directory
into the store of the process group. It writes the commands of other directories, from the store, as files into its own
directory, where the writer threads find them like any others. Training's connections are not used. The carrier runs on
its own thread, which may wait for the store and for the disk. Training and the writer thread never wait for the
carrier. Every failure ends in a log line. A carrier ends once it knows that all ranks share one directory.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from ..capture.parallel.topology import JobRank, JobStore, is_distributed, open_job_store
from ..errors import CommandError, RunError
from ..format.commands import (
    COMMAND_BYTES,
    DUMP,
    ENDED,
    MAX_COMMANDS,
    REFUSED,
    UNDO,
    WAITING,
    Answer,
    Command,
    CommandFolder,
    Refusal,
    read_command,
    send,
)
from ..format.rundir import RUN_MANIFEST, parse_json
from ..system.log import Events

APART_EVENT = "nodes_apart"
_LOOK_S = 0.2
_MAX_LOOKS_PER_S = 250
"""The most reads a second of the store by all carriers, or of a run's directory by all nodes: every 2 s on 512."""
_PATIENCE_S = 5.0
"""If the store has a number without a command for so many seconds, the rank that took the number counts as gone."""
_LAST_S = 1.0
"""The seconds to wait for the last commands at the end of a recording, and again after the connection was cut."""


class Carrier:
    """Carries commands between a run directory and the job's store. Only one rank does so for each directory."""

    def __init__(self, topology: JobRank, events: Events, *, dir_setting: str) -> None:
        """Carry nothing yet. Each command that cannot be carried is reported as an event.

        `dir_setting` is the setting `dir`, equal on all nodes. It separates recordings of one job.
        """
        self._topology = topology
        self._dir_digest = _digest(dir_setting.encode(errors="surrogateescape"))
        self._events = events
        self._numbers: dict[str, int] = {}
        """The numbers of the commands in the directory, by the commands' ids."""
        self._carried: set[str] = set()
        """The ids of the commands that the store has."""
        self._next = 1
        self._late_since_s: float | None = None
        self._has_joined = False
        self._num_apart = 1
        self._store: JobStore | None = None
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, run_dir: Path) -> None:
        """Start the thread if there is a process group. A second call does nothing. A failure to start is logged."""
        if self._thread is not None or self._is_over.is_set() or not is_distributed():
            return
        self._thread = threading.Thread(target=self._run, args=(run_dir,), name="recorder-carrier", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            self._events.add("uncarried", f"commands are not carried between nodes: {error}", level=logging.INFO)

    def close(self) -> None:
        """Carry the last commands, and end in bounded time. A store that does not answer is cut off.

        The thread must end before the interpreter does. A thread that returns from the store later aborts the process.
        """
        self._is_over.set()
        thread = self._thread
        if thread is None or not thread.is_alive() or thread is threading.current_thread():
            return
        thread.join(_LAST_S)
        if thread.is_alive() and (store := self._store) is not None:
            store.cut()
            thread.join(_LAST_S)

    def _run(self, run_dir: Path) -> None:
        try:
            prefix = f"recorder/commands/{run_dir.name}/{self._topology.attempt}/{self._dir_digest}/"
            self._store = store = open_job_store(prefix)
            if store is None or not self._is_first(store, run_dir):
                return
            folder = CommandFolder(run_dir)
            while is_distributed():  # without a group nobody trains, and the store's process may end
                is_last = self._is_over.is_set()
                if not self._is_needed(store):
                    return
                self._carry(store, run_dir, folder.look(is_told=is_last))
                if is_last:
                    return
                self._is_over.wait(max(_LOOK_S, self._num_apart / _MAX_LOOKS_PER_S))
        except Exception as error:
            self._fail(error)
        finally:
            store, self._store = self._store, None
            if store is not None:
                store.close()

    def _fail(self, error: Exception) -> None:
        if self._num_apart > 1 and not self._is_over.is_set():
            why = next(iter(str(error).splitlines()), "") or type(error).__name__
            text = f"commands are not carried between nodes any more, for the job's store fails: {why[:120]}"
            self._events.add("uncarried", text)

    def _is_first(self, store: JobStore, run_dir: Path) -> bool:
        """Register this rank's directory in the store. Return True if no other rank has registered it before.

        Two ranks have the same directory if they read the same manifest of the run, which contains the time of its
        writing in nanoseconds.
        """
        digest = _digest((run_dir / RUN_MANIFEST).read_bytes())
        me = str(self._topology.rank)
        is_first = store.first(f"directory/{digest}", me) == me
        if is_first and store.add(f"found/{digest}", 1) == 1:  # a second recording of this process is not counted again
            store.add("directories", 1)
        if store.add(f"joined/{me}", 1) == 1:
            store.add("ranks", 1)
        return is_first

    def _is_needed(self, store: JobStore) -> bool:
        if not self._has_joined:
            self._has_joined = store.add("ranks", 0) >= self._topology.world_size
            num_apart = store.add("directories", 0)
            if num_apart > 1 == self._num_apart:
                text = (
                    "nodes share no file system: each has a directory of this run, and the job's store carries commands"
                )
                self._events.add(APART_EVENT, text, level=logging.INFO)
            self._num_apart = num_apart
        return self._num_apart > 1 or not self._has_joined

    def _carry(self, store: JobStore, run_dir: Path, new: Sequence[Command | Refusal]) -> None:
        commands = [one for one in new if isinstance(one, Command)]
        for command in commands:
            self._numbers.setdefault(command.id, command.number)
        self._take(store, run_dir)
        for command in commands:
            if command.id not in self._carried:
                self._carried.add(command.id)
                undone = next((one for one, number in self._numbers.items() if number == command.undoes), "")
                store.put(f"text/{store.add('last', 1)}", undone.encode() + b"\n" + command.encode())

    def _take(self, store: JobStore, run_dir: Path) -> None:
        last = min(store.add("last", 0), MAX_COMMANDS)
        while self._next <= last:
            text = store.get(f"text/{self._next}")
            if text is None:
                now = time.monotonic()
                self._late_since_s = self._late_since_s or now
                if now - self._late_since_s < _PATIENCE_S:
                    return
            else:
                try:
                    self._write(text, run_dir)
                except (CommandError, RunError) as error:
                    self._events.add(
                        "uncarried", f"a command from another node is not done: {error}", key=str(self._next)
                    )
            self._late_since_s = None
            self._next += 1

    def _write(self, text: bytes, run_dir: Path) -> None:
        """Write a command from another node into this rank's directory, unless the directory has it.

        Raises:
            CommandError: the text is no command, or the command cannot be written.
            RunError: the text is damaged.
        """
        undone, _, text = text.partition(b"\n")
        where = f"command {self._next} of the job's store"
        if len(text) > COMMAND_BYTES:
            raise CommandError(f"{where}: larger than the {COMMAND_BYTES} bytes that a command may have")
        command = read_command(parse_json(text, where), where, self._next)
        self._carried.add(command.id)
        if command.id in self._numbers:
            return
        if command.kind == UNDO:
            number = self._numbers.get(undone.decode(errors="replace"))
            if number is None:
                raise CommandError(f"{where}: the command to undo is not in this directory")
            command = replace(command, undoes=number)
        self._numbers[command.id] = send(run_dir, command).number


def _digest(value: bytes) -> str:
    return hashlib.blake2b(value, digest_size=16).hexdigest()


_ALONE_S = 2.0
"""The seconds between a rank's own reads of the run's directory, if no rank reads for the node. More over 500 ranks."""
_LEADER_GONE_S = 3.0
"""A node's mark counts as abandoned once its time is older than the interval of reads plus this many seconds."""
_MAX_SHOWN = 8
"""The number of newest answers to commands that fit in a status."""


class Commands:
    """The commands of one run, as one rank receives them. Writer thread only, except `answer` and pure reads."""

    def __init__(
        self,
        topology: JobRank,
        events: Events,
        *,
        clock: Callable[[], float] = time.monotonic,
        marks: Path | None = None,
    ) -> None:
        """Prepare, without reading the directory yet. Each file that is refused is reported as an event.

        `clock` is monotonic, in seconds. `marks` is the folder of the node's mark; None for the node's own memory.
        """
        self.num_refused = 0
        """The number of refused files. Each had the name of a command, but contained no command."""
        self.has_changed = False
        """True if an answer has changed since the answers were last shown. Reset once they are shown."""
        self._topology = topology
        self._events = events
        self._clock = clock
        self._marks = marks or _node_memory()
        self._takers: dict[str, Callable[[Command], None]] = {}
        self._answers: dict[int, Answer] = {}
        self._ids: set[str] = set()
        self._folder: CommandFolder | None = None
        self._run_dir: Path | None = None
        self._mark: _NodeMark | None = None
        self._next_look_s = 0.0
        self._num_told = 0
        num_nodes = -(-topology.world_size // max(topology.local_world_size, 1))
        self._look_s = max(_LOOK_S, num_nodes / _MAX_LOOKS_PER_S)
        self._alone_s = max(_ALONE_S, topology.world_size / _MAX_LOOKS_PER_S)

    def on(self, kind: str, take: Callable[[Command], None]) -> None:
        """Call `take` once with each command of a kind, on the writer thread. A command is refused if `take` raises.

        If `take` sets no answer, the answer is ``waiting``.
        """
        self._takers[kind] = take

    def answer(
        self, command: Command, state: str, *, since: int | None = None, until: int | None = None, why: str = ""
    ) -> None:
        """Set the answer to a command, in place of an earlier answer. Called on any thread; never waits."""
        self._answers[command.number] = command.answer(state, since=since, until=until, why=why)
        self.has_changed = True

    def answer_all(self, answers: Iterable[Answer]) -> None:
        """Set the answers to some commands. An answer that has not changed is not reported again. Any thread."""
        for answer in answers:
            if self._answers.get(answer.number) != answer:
                self._answers[answer.number] = answer
                self.has_changed = True

    def answers(self) -> list[Answer]:
        """Return all answers by number. Called on any thread."""
        return [self._answers[number] for number in sorted(self._answers)]

    def newest_answers(self) -> list[Answer]:
        """Return the newest answers, as many as fit in a status. Called on any thread."""
        return [answer for answer in self.answers() if answer.number <= MAX_COMMANDS][-_MAX_SHOWN:]

    def send(self, command: Command) -> Command:
        """Send a command to all ranks of the run, including this rank, and return it with its number.

        Raises:
            CommandError: the disk refuses, or the run has no directory yet. Nothing was sent.
        """
        if self._run_dir is None:
            raise CommandError("the run has no directory yet, so no rank can receive the command")
        sent = send(self._run_dir, replace(command, attempt=max(command.attempt, self._topology.attempt)))
        self._look(is_told=True)
        return sent

    def look(self) -> None:
        """Look for commands of other ranks at once, for example before sending one that another rank may have sent."""
        if self._folder is not None:
            self._look(is_told=True)

    def poll(self, run_dir: Path | None) -> None:
        """Look for new commands, if it is time to, and carry them out. `run_dir` is None until the writer makes it."""
        if run_dir is None:
            return
        if self._folder is None:
            self._run_dir, self._folder = run_dir, CommandFolder(run_dir, self._clock)
            if self._topology.local_world_size > 1:
                self._mark = _NodeMark(self._marks, run_dir, self._topology)
        now = self._clock()
        if self._mark is not None and self._topology.local_rank != 0:
            known = self._mark.read(self._look_s + _LEADER_GONE_S)
            if known is not None:
                if known > self._num_told:
                    self._look(is_told=True)
                    self._num_told = known if not self._folder.has_unfinished else self._num_told
                return
            look_s = self._alone_s
        else:
            look_s = self._look_s
        if now >= self._next_look_s:
            self._next_look_s = now + look_s
            self._look(is_told=False)
            if self._mark is not None and self._topology.local_rank == 0:
                self._mark.write(self._folder.num_seen)

    def close(self) -> None:
        """Remove the node's mark, if this rank writes it."""
        if self._mark is not None and self._topology.local_rank == 0:
            self._mark.remove()

    def _look(self, *, is_told: bool) -> None:
        assert self._folder is not None
        for command in self._folder.look(is_told=is_told):
            if isinstance(command, Refusal):
                self.num_refused += 1
                self.has_changed = True
                self._events.add("command_refused", f"a command is not done: {command.why}", key=str(command.number))
            elif command.id in self._ids:
                self.answer(command, ENDED, why="an earlier command with the same id was done")
            else:
                self._ids.add(command.id)
                self._take(command)

    def _take(self, command: Command) -> None:
        take = self._takers.get(command.kind)
        if command.kind == DUMP and command.attempt < self._topology.attempt:
            self.answer(command, ENDED, why="the command was sent to an earlier launch")
        elif take is None:
            self.answer(command, REFUSED, why=f"nothing in this run takes commands of kind {command.kind}")
        else:
            self.answer(command, WAITING)
            try:
                take(command)
            except Exception as error:
                self.answer(command, REFUSED, why=str(error) or type(error).__name__)
        answer = self._answers[command.number]
        if answer.state == REFUSED:
            who = f" from {command.by}" if command.by else ""
            text = f"command {command.number} ({command.kind}{who}) is refused: {answer.why}"
            self._events.add("command_refused", text, key=str(command.number))


class _NodeMark:
    """The file that tells a node's ranks how many commands local rank 0 has found. Errors count as a missing file."""

    def __init__(self, folder: Path, run_dir: Path, topology: JobRank) -> None:
        digest = hashlib.blake2b(os.fsencode(run_dir), digest_size=8).hexdigest()
        self._path = folder / f"recorder-{os.geteuid()}-{digest}-{topology.attempt}"
        self._length = -1

    def write(self, length: int) -> None:
        """Record in the file that this rank is at work, and how many commands it has found."""
        with contextlib.suppress(OSError):
            if length != self._length:
                flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
                descriptor = os.open(self._path, flags, 0o600)
                try:
                    if _is_ours(os.fstat(descriptor)):
                        os.ftruncate(descriptor, length)
                        self._length = length
                finally:
                    os.close(descriptor)
            os.utime(self._path, follow_symlinks=False)

    def read(self, patience_s: float) -> int | None:
        """Return how many commands local rank 0 has found. Return None if the file is older than `patience_s`."""
        try:
            stat_result = os.stat(self._path, follow_symlinks=False)
        except OSError:
            return None
        is_alive = _is_ours(stat_result) and abs(time.time() - stat_result.st_mtime) < patience_s
        return stat_result.st_size if is_alive else None

    def remove(self) -> None:
        with contextlib.suppress(OSError):
            if _is_ours(os.stat(self._path, follow_symlinks=False)):
                os.unlink(self._path)


def _is_ours(stat_result: os.stat_result) -> bool:
    return stat.S_ISREG(stat_result.st_mode) and stat_result.st_uid == os.geteuid()


def _node_memory() -> Path:
    memory = Path("/dev/shm")
    return memory if os.access(memory, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())
