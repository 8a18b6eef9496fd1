"""Commands to runs under way: from the store to the run directories of this node, and what their ranks answer.

A command changes what is recorded, and nothing else, whoever sends it; it is judged here and once more by each writer.
Nothing is carried but with `accept_commands`. With a key, a command needs a signature over its run, its number and its
text, so that it can be sent neither to another run nor again. Must never carry what is not a command.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import time
from dataclasses import replace
from pathlib import Path

from ..errors import CommandError, ConfigError, RunError
from ..format.commands import COMMAND_BYTES, COMMANDS, MAX_COMMANDS, UNDO, Command, command_name, parse_command_name
from ..format.commands import read_command as read_members
from ..format.rundir import RUN_MANIFEST, parse_json
from ..storage.commands import CommandFolder, send
from .destination import Destination, TakenError
from .shipping.run import RunShipper

logger = logging.getLogger("recorder.daemon")

_OLDEST_S = 3600.0
"""A command that is older when it is first seen is stale: whoever sent it has given it up."""
_NEWEST_S = 300.0
"""How far clocks may differ."""
_LEAST_KEY_BYTES = 16


def read_key(path: str) -> bytes:
    """Return the key of a file; empty where none is named.

    Raises:
        ConfigError: it cannot be read, or is too short.
    """
    if not path:
        return b""
    try:
        key = Path(path).read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"key_file = {path!r}: cannot be read ({error.strerror})") from None
    if len(key) < _LEAST_KEY_BYTES:
        raise ConfigError(f"key_file = {path!r}: holds {len(key)} bytes; a key has {_LEAST_KEY_BYTES} at least")
    return key


def signature(key: bytes, run_id: str, number: int, text: bytes) -> bytes:
    """Return the signature of a command: hexadecimal HMAC-SHA256 of its run, its number and its text."""
    words = b"\0".join((b"recorder command", run_id.encode(), b"%d" % number, text))
    return hmac.new(key, words, hashlib.sha256).hexdigest().encode()


def _signature_name(number: int, command: Command) -> str:
    """Return the name of a signature, which whoever was slower or was killed does not keep from others."""
    return f"{number:06d}-{command.id}.hmac"


class StoreCarrier:
    """Carries the commands of one run. One job at a time."""

    def __init__(self, run: RunShipper) -> None:
        self._run = run
        self._folder = CommandFolder(Path(run.path))
        self._known: dict[str, int] = {}
        """Numbers here of the commands that are here, by their ids."""
        self._ids: dict[int, str] = {}
        """Ids of the store's commands by their numbers there."""
        self._next = 1

    def carry(self) -> None:
        """Carry what is new. While nothing is, this is one request."""
        run = self._run
        key = read_key(run.shared.settings.key_file)
        while self._next <= MAX_COMMANDS:
            name = f"{run.key}/{COMMANDS}/{command_name(self._next)}"
            held = run.shared.destination.get(name)
            if held is None:
                return
            result, why = self._take(self._next, held[0], key)
            if result:
                run.shared.counters.add("commands", result)
                logger.log(
                    logging.INFO if result == "carried" else logging.ERROR, "%s: command %d: %s%s",
                    run.key, self._next, result, f": {why}" if why else "",
                )  # fmt: skip
            self._next += 1

    def _take(self, number: int, text: bytes, key: bytes) -> tuple[str, str]:
        """Carry one command; return what became of it, which is empty for one that was carried before, and why."""
        for one in self._folder.look(is_told=True):
            if isinstance(one, Command):
                self._known.setdefault(one.id, one.number)
        if len(text) > COMMAND_BYTES:
            return "oversized", f"{len(text)} bytes"
        try:
            command = read_members(parse_json(text, command_name(number)), command_name(number), number)
        except (CommandError, RunError) as error:
            return "invalid", str(error)
        if key:
            signed = self._run.shared.destination.get(f"{self._run.key}/{COMMANDS}/{_signature_name(number, command)}")
            wanted = signature(key, self._run.there.run_id, number, text)
            if signed is None or not hmac.compare_digest(signed[0], wanted):
                return "unsigned", "its signature is missing or wrong"
        if command.id in self._ids.values():
            return "replayed", f"its id {command.id} was seen under another number"
        self._ids[number] = command.id
        if command.id in self._known:
            return "", ""
        age_s = time.time() - command.created_ns / 1e9
        if not -_NEWEST_S <= age_s <= _OLDEST_S:
            return "stale", f"it was made {age_s:.0f} s ago"
        if command.kind == UNDO:
            undone = self._known.get(self._ids.get(command.undoes or 0, ""))
            if undone is None:
                return "invalid", f"command {command.undoes}, which it undoes, is not here"
            command = replace(command, undoes=undone)
        try:
            self._known[command.id] = send(Path(self._run.path), command).number
        except CommandError as error:
            return "failed", str(error)
        return "carried", ""


def send_to_store(destination: Destination, run: str, command: Command, key: bytes) -> Command:
    """Put a command for a run at a destination, signed where there is a key; return it with its number.

    Raises:
        CommandError: there is no such run, or no writer would take the command.
    """
    held = destination.get(f"{run}/{RUN_MANIFEST}")
    if held is None:
        raise CommandError(f"{destination.url}/{run}: no such run; `recorder ls {destination.url}` lists them")
    run_id = str(parse_json(held[0], run).get("run_id"))
    text = command.encode()
    names = [name.rpartition("/")[2] for name, _ in destination.listing(f"{run}/{COMMANDS}/")]
    first = max((number for name in names if (number := parse_command_name(name)) is not None), default=0) + 1
    for number in range(first, MAX_COMMANDS + 1):
        with contextlib.suppress(TakenError):  # somebody was faster
            if key:  # the signature is there first: a daemon may look at any moment
                signed = f"{run}/{COMMANDS}/{_signature_name(number, command)}"
                destination.put_if(signed, signature(key, run_id, number, text), None)
            destination.put_if(f"{run}/{COMMANDS}/{command_name(number)}", text, None)
            return replace(command, number=number)
    raise CommandError(f"{destination.url}/{run}: the run has had {MAX_COMMANDS} commands, and takes no more")
