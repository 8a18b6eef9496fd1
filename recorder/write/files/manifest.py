"""Writes manifests: whole or not at all, durable, with the checksum in front. Reads none."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from ...format.rundir import encode_manifest
from .file import Disk, name_newly, write_all

Unsynced = Callable[[OSError], None]
"""Takes the error of a failed sync: the manifest is there, but a loss of power may take it."""


def replace_manifest(disk: Disk, path: Path, obj: Mapping[str, object], *, unsynced: Unsynced | None = None) -> None:
    """Replace `path` by a manifest of `obj` such that a reader sees the old file or the new one, also after a crash.

    Args:
        disk: the disk.
        path: the path of the manifest.
        obj: its content.
        unsynced: takes the error of a failed sync; None to leave the old file and raise.

    Raises:
        OSError: the disk refused; the old file is untouched, or the new one is there and may not be durable.
    """
    with _written_beside(disk, path, obj, unsynced) as temporary:
        disk.replace(temporary, path)
        with _report_unsynced(unsynced):
            disk.persist_directory(path.parent)


def create_manifest(disk: Disk, path: Path, obj: Mapping[str, object], *, unsynced: Unsynced | None = None) -> bool:
    """Write a manifest of `obj` unless `path` exists, so that the first process wins; return False where it existed.

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
        with _report_unsynced(unsynced):
            disk.persist_directory(path.parent)
        return True


def _create_in_place(disk: Disk, path: Path, obj: Mapping[str, object], unsynced: Unsynced | None) -> bool:
    """Write a manifest in place, where a file system has no links and no such renames: it is briefly not whole."""
    try:
        _write(disk, path, obj, unsynced)
    except FileExistsError:
        return False
    return True


@contextlib.contextmanager
def _written_beside(disk: Disk, path: Path, obj: Mapping[str, object], unsynced: Unsynced | None) -> Iterator[Path]:
    """Yield a temporary file next to `path`, and remove whatever is left of it afterwards."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}-{os.urandom(4).hex()}.tmp")
    _write(disk, temporary, obj, unsynced)
    try:
        yield temporary
    finally:
        with contextlib.suppress(OSError):
            disk.unlink(temporary)


def _write(disk: Disk, path: Path, obj: Mapping[str, object], unsynced: Unsynced | None) -> None:
    """Create the file `path`, whole and synced, or leave no file."""
    descriptor = disk.create(path)
    try:
        try:
            write_all(disk, descriptor, [memoryview(encode_manifest(obj))], 0, path)
            with _report_unsynced(unsynced):
                disk.persist(descriptor)
        finally:
            with _report_unsynced(unsynced):
                disk.close(descriptor)
    except BaseException:
        with contextlib.suppress(OSError):
            disk.unlink(path)
        raise


@contextlib.contextmanager
def _report_unsynced(unsynced: Unsynced | None) -> Iterator[None]:
    """Pass an error of a sync to `unsynced`; raise it where there is none."""
    try:
        yield
    except OSError as error:
        if unsynced is None:
            raise
        unsynced(error)
