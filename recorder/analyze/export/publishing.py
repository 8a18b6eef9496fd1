"""How a file or a folder of another format gets its name: once it is whole, and never over something else.

What ends the process in an orderly way, Ctrl-C and SIGTERM, leaves nothing half-made behind.
"""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from ...errors import WriteError
from ...run.finding import find_run_around

_OR_FORCE = ", or --force to replace it"
_TERMINATED = 143
"""What a shell says of a program that SIGTERM has ended."""


@contextmanager
def published_file(path: Path, *, force: bool | None = None) -> Iterator[BinaryIO]:
    """A new file that gets its name when the block ends well, and else leaves nothing behind.

    Args:
        path: the name.
        force: replace a file that has it; None where that cannot be asked for.

    Raises:
        WriteError: the name is taken, or cannot be written.
    """
    instead = _OR_FORCE if force is not None else ""
    _check_outside_runs(path)
    if not force and os.path.lexists(path):
        raise WriteError(f"{path}: exists; choose another name{instead}")
    if path.is_dir():
        raise WriteError(f"{path}: is a directory; name the file to write")
    if path.exists() and not path.is_file():  # root could put a file in the place of /dev/null
        raise WriteError(f"{path}: is a device or a pipe, which is never replaced; name the file to write")
    temporary = _temporary(path)
    with _sigterm_raises():
        try:
            file = temporary.open("xb")
        except OSError as error:
            raise WriteError(f"{path}: cannot be written ({error.strerror}); choose a folder that exists") from error
        try:
            with file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            _name(temporary, path, instead, force=bool(force))
            _sync_directory(path.parent)
        except OSError as error:
            raise WriteError(f"{path}: cannot be written ({error.strerror})") from error
        finally:
            with suppress(FileNotFoundError):
                temporary.unlink()


@contextmanager
def published_folder(path: Path) -> Iterator[Path]:
    """A new folder, for files that whoever makes them syncs; it gets its name when the block ends well.

    Raises:
        WriteError: there is something that is no empty directory, or it cannot be written.
    """
    _check_outside_runs(path)
    if os.path.lexists(path) and not (path.is_dir() and not path.is_symlink() and not any(path.iterdir())):
        raise WriteError(f"{path}: exists; choose another name")
    temporary = _temporary(path)
    with _sigterm_raises():
        try:
            temporary.mkdir()
        except OSError as error:
            raise WriteError(f"{path}: cannot be written ({error.strerror}); choose a folder that exists") from error
        try:
            yield temporary
            _sync_directory(temporary)
            os.rename(temporary, path)  # replaces an empty directory, and nothing else
            _sync_directory(path.parent)
        except OSError as error:
            raise WriteError(f"{path}: cannot be written ({error.strerror})") from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def _sigterm_raises() -> Iterator[None]:
    """Have SIGTERM end the block by SystemExit, so that what is half-made goes; a program's own handler is left."""
    is_ours = threading.current_thread() is threading.main_thread()
    if not is_ours or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def end(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one must not interrupt the removal
        raise SystemExit(_TERMINATED)

    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _check_outside_runs(path: Path) -> None:
    if (run := find_run_around(path.parent)) is not None:
        raise WriteError(f"{path}: lies inside the run {run}, which is never changed; choose another folder")


def _temporary(path: Path) -> Path:
    return path.with_name(f".recorder-{os.getpid()}.tmp")


def _name(temporary: Path, path: Path, instead: str, *, force: bool) -> None:
    if force:
        os.replace(temporary, path)
        return
    try:
        os.link(temporary, path)  # unlike a rename, never replaces what came since
    except FileExistsError:
        raise WriteError(f"{path}: exists by now; choose another name{instead}") from None
    except OSError:  # a file system without hard links
        os.rename(temporary, path)


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
