"""What a run says beside its rows: its modules, what triggers had it write of its ring, the commands that it was sent.

What manifests and commands say is untrusted input, which `format.manifest` has checked. Opens no shard.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..errors import RecorderError
from ..format.commands import COMMAND_BYTES, COMMANDS, DUMP, Command, command_name, parse_command_name, read_command
from ..format.manifest import RingDump
from ..format.roots import Module
from ..storage.locations import Location, store_of
from .writers import RecordedWriter

_MAX_LISTED = 5
_MAX_DEPTH = 200
"""Levels of a module tree; what is above a deeper path is not listed."""


def read_modules(writers: Iterable[RecordedWriter]) -> dict[tuple[str, str], Module]:
    """Modules by root and path, in the order of `named_modules()`; the newest writer that knows one describes it."""
    return {
        (root.name, module.path): module
        for writer in writers
        for root in writer.manifest.roots
        for module in root.modules
    }


def list_paths(known: Iterable[str], recorded: Iterable[str]) -> dict[str, None]:
    """Paths of modules and of what contains them, in the order of the tree."""
    paths: dict[str, None] = {"": None}
    for path in (*known, *recorded):
        if path not in paths:
            parts = path.split(".")
            ends = range(1 if len(parts) <= _MAX_DEPTH else len(parts), len(parts) + 1)
            paths |= dict.fromkeys(".".join(parts[:end]) for end in ends)
    return paths


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDump:
    """The steps that all ranks were asked for by one trigger."""

    attempt: int
    """The launch that wrote it; a restart may take the same steps again."""
    first_step: int
    last_step: int
    reason: str
    by: str
    """Who pulled the trigger first: a rank, or a user and a host."""
    time_ns: int
    """When the first rank began."""
    ranks: tuple[int, ...]
    """The ranks that learned of the trigger."""
    missed: tuple[int, ...]
    """The ranks that had given up some of these steps by then."""
    num_rows: int
    num_bytes: int
    """Bytes of the payloads, before they were encoded."""


def dumps_of(writers: Sequence[RecordedWriter]) -> list[RunDump]:
    """Return the dumps of a run, by their time. Ranks that see the same at once, and name the same steps, make one."""
    groups: dict[tuple[int, int, int, str], list[tuple[int | None, RingDump]]] = {}
    for writer in writers:
        for dump in writer.manifest.dumps:
            key = (writer.attempt, dump.first_step, dump.last_step, dump.reason)
            groups.setdefault(key, []).append((writer.rank, dump))
    dumps = [
        RunDump(
            attempt=attempt,
            first_step=members[0][1].first_step,
            last_step=members[0][1].last_step,
            reason=members[0][1].reason,
            by=min((dump for _, dump in members), key=lambda dump: dump.time_ns).by,
            time_ns=min(dump.time_ns for _, dump in members),
            ranks=tuple(sorted({rank for rank, _ in members if rank is not None})),
            missed=tuple(sorted({rank for rank, dump in members if rank is not None and dump.num_missed})),
            num_rows=sum(dump.num_rows for _, dump in members),
            num_bytes=sum(dump.num_bytes for _, dump in members),
        )
        for (attempt, *_), members in groups.items()
    ]
    return sorted(dumps, key=lambda dump: (dump.time_ns, dump.first_step))


class SentCommands(NamedTuple):
    """All commands of a run by number, and a sentence for each file in the place of one that holds none."""

    sound: tuple[Command, ...] = ()
    problems: tuple[str, ...] = ()

    @property
    def num_beside_dumps(self) -> int:
        """How many commands asked for something else than a dump of the ring."""
        return sum(command.kind != DUMP for command in self.sound)


def read_commands(run: Location) -> SentCommands:
    """Read the commands of a run; one that was sent none has no directory for them."""
    store, folder = store_of(run), run / COMMANDS
    sound: list[Command] = []
    problems: list[str] = []
    try:
        names = store.list_directory(folder, directories=False) if store.exists(folder) else []
    except RecorderError as error:
        return SentCommands(problems=(str(error),))
    for number in sorted(number for name in names if (number := parse_command_name(name)) is not None):
        path = folder / command_name(number)
        try:
            sound.append(read_command(store.read_json(path, COMMAND_BYTES), f"{COMMANDS}/{path.name}", number))
        except (RecorderError, OSError) as error:
            problems.append(str(error))
    return SentCommands(tuple(sound), tuple(problems))
