"""Carries commands between the directories of one run if its nodes share no file system: `Carrier`.

For each directory one rank carries commands. It copies the commands of its directory into the store of the process
group, and writes the commands of other directories from the store into its own as files, which the writer threads find
like any others. No collective is issued, and training's connections are not used.

The carrier runs on its own thread, which may wait for the store and for the disk; training and the writer thread never
wait for it. Every failure ends in a log line. A carrier ends once it knows that all ranks share one directory.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ..capture.topology import JobRank, JobStore, is_distributed, open_job_store
from ..errors import CommandError, RunError
from ..format.commands import COMMAND_BYTES, MAX_COMMANDS, UNDO, Command, read_command
from ..format.rundir import RUN_MANIFEST, parse_json
from ..storage.commands import CommandFolder, Refusal, send
from ..system.log import Events

APART_EVENT = "nodes_apart"
_LOOK_S = 0.2
_MAX_LOOKS_PER_S = 250
"""The most looks a second at the store by all carriers; with 512 directories each looks every two seconds."""
_PATIENCE_S = 5.0
"""The seconds that a command's text may come after its number; then the rank that took the number counts as gone."""
_LAST_S = 1.0
"""How long the end of a recording waits for the last commands to be carried, and then for a call that was cut off."""


class Carrier:
    """Carries commands between this rank's directory and the store, unless another rank of the directory does."""

    def __init__(self, topology: JobRank, events: Events, *, dir_setting: str) -> None:
        """Carry nothing yet. Each command that cannot be carried becomes an event.

        `dir_setting` is the setting `dir`, which separates recordings of one job; all nodes have the same setting.
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
        """Start the thread once a process group exists; a second call does nothing. A failure to start is logged."""
        if self._thread is not None or self._is_over.is_set() or not is_distributed():
            return
        self._thread = threading.Thread(target=self._run, args=(run_dir,), name="recorder-carrier", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            self._events.add("uncarried", f"commands are not carried between nodes: {error}", level=logging.INFO)

    def close(self) -> None:
        """Carry the last commands and end in bounded time; a store that does not answer is cut off.

        The thread must end before the interpreter does: a thread that returns from the store later aborts the process.
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
            while is_distributed():  # without a group nobody trains, and the process that holds the store may end
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
        """Register this rank's directory in the store; return whether this rank carries for the directory.

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
        """Write one command into the directory, if the directory does not have the command.

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
                raise CommandError(f"{where}: the command that it undoes is not here")
            command = replace(command, undoes=number)
        self._numbers[command.id] = send(run_dir, command).number


def _digest(value: bytes) -> str:
    return hashlib.blake2b(value, digest_size=16).hexdigest()
