"""Sends commands to a run, as files in the run's directory, and finds new ones.

A command appears complete under the next free number, and never changes. Whoever may write to the run's directory may
send commands. Even so, every file of a command is untrusted input. The content of commands is not checked here.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from ..errors import CommandError, CorruptError, RecorderError
from ..format.commands import (
    COMMAND_BYTES,
    COMMANDS,
    MAX_COMMANDS,
    Command,
    command_name,
    parse_command_name,
    read_command,
)
from ..format.rundir import read_json
from ..system.processes import sync_directory

_MAX_ENTRIES = 2 * MAX_COMMANDS
"""The most names that are read from a directory. The package never makes more."""
_UNFINISHED_S = 5.0
"""The seconds for which a damaged file is read again before it is refused. On a file system without links, a new
command is incomplete at first."""
_FRESH_S = 2.5
"""For this many seconds after a change, `look` lists the directory each time, as file times may have steps of 2 s."""
_RELIST_S = 5.0
"""After this many seconds, `look` lists the directory even without a visible change: network file systems lag
behind."""


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
        os.chmod(folder, stat.S_IMODE(above.st_mode))  # the mode of the run's directory, whatever the umask
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
        """Return the commands since the last call, by number. `is_told`: the caller knows that there is a new one."""
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
        except OSError:  # no command was sent yet, or the disk is gone, which the writer notices itself
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
