"""The commands that a run was sent, as its files say. Opens no shard."""

from __future__ import annotations

from typing import NamedTuple

from ..errors import RecorderError
from ..format.commands import COMMAND_BYTES, COMMANDS, Command, command_name, parse_command_name, read_command
from ..storage.locations import Location, store_of


class SentCommands(NamedTuple):
    """All commands of a run by number, and a sentence for each file in the place of one that holds none."""

    sound: tuple[Command, ...] = ()
    problems: tuple[str, ...] = ()


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
