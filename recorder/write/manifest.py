"""Owns how a manifest reaches the disk: whole or not at all, durable, its checksum in front. Must never read one."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from ..format.rundir import encode_manifest
from .file import Disk, name_newly, write_all

Unsynced = Callable[[OSError], None]
"""Told that a manifest is there although the disk would not sync it: a loss of power may take it."""


def replace_manifest(disk: Disk, path: Path, obj: Mapping[str, object], *, unsynced: Unsynced | None = None) -> None:
    """Replace `path` by a manifest of `obj` such that a reader sees the old file or the new one, also after a crash.

    Args:
        disk: where.
        path: the manifest.
        obj: its content.
        unsynced: what to do about a sync that fails; None to leave the old file and raise.

    Raises:
        OSError: the disk refused; the old file is untouched, or the new one is there and may not be durable.
    """
    with _written_beside(disk, path, obj, unsynced) as temporary:
        disk.replace(temporary, path)
        with _told(unsynced):
            disk.persist_directory(path.parent)


def create_manifest(disk: Disk, path: Path, obj: Mapping[str, object], *, unsynced: Unsynced | None = None) -> bool:
    """Like `replace_manifest`, but the first to come wins: False where `path` existed already.

    Raises:
        OSError: the disk refused.
    """
    with _written_beside(disk, path, obj, unsynced) as temporary:
        try:
            name_newly(disk, temporary, path)
        except FileExistsError:
            return False
        except OSError:
            if not _create_in_place(disk, path, obj, unsynced):
                return False
        with _told(unsynced):
            disk.persist_directory(path.parent)
        return True


def _create_in_place(disk: Disk, path: Path, obj: Mapping[str, object], unsynced: Unsynced | None) -> bool:
    """Where a file system neither links nor renames without overwriting: for an instant the file is not whole."""
    try:
        _write(disk, path, obj, unsynced)
    except FileExistsError:
        return False
    return True


@contextlib.contextmanager
def _written_beside(disk: Disk, path: Path, obj: Mapping[str, object], unsynced: Unsynced | None) -> Iterator[Path]:
    """Yield a temporary file next to `path`; whatever is left of it afterwards goes."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}-{os.urandom(4).hex()}.tmp")
    _write(disk, temporary, obj, unsynced)
    try:
        yield temporary
    finally:
        with contextlib.suppress(OSError):
            disk.unlink(temporary)


def _write(disk: Disk, path: Path, obj: Mapping[str, object], unsynced: Unsynced | None) -> None:
    """Make the file `path`, whole and synced, or leave none."""
    descriptor = disk.create(path)
    try:
        try:
            write_all(disk, descriptor, [memoryview(encode_manifest(obj))], 0, path)
            with _told(unsynced):
                disk.persist(descriptor)
        finally:
            with _told(unsynced):
                disk.close(descriptor)
    except BaseException:
        with contextlib.suppress(OSError):
            disk.unlink(path)
        raise


@contextlib.contextmanager
def _told(unsynced: Unsynced | None) -> Iterator[None]:
    """Have a sync that fails told, where somebody listens."""
    try:
        yield
    except OSError as error:
        if unsynced is None:
            raise
        unsynced(error)
