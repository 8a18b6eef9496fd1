"""Owns how a manifest reaches the disk: whole or not at all, durable, its checksum in front. Must never read one."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from ..format.rundir import encode_manifest
from .file import Disk, write_all


def replace_manifest(disk: Disk, path: Path, obj: Mapping[str, object]) -> None:
    """Replace `path` by a manifest of `obj` such that a reader, or a crash, sees the old file or the new one.

    Raises:
        OSError: the disk refused; the old file is untouched, or the new one is there and may not be durable.
    """
    with _written_beside(disk, path, obj) as temporary:
        disk.replace(temporary, path)
        disk.sync_directory(path.parent)


def create_manifest(disk: Disk, path: Path, obj: Mapping[str, object]) -> bool:
    """Like `replace_manifest`, but the first to come wins: False where `path` existed already.

    Raises:
        OSError: the disk refused.
    """
    with _written_beside(disk, path, obj) as temporary:
        try:
            disk.link(temporary, path)
        except FileExistsError:
            return False
        disk.sync_directory(path.parent)
        return True


@contextlib.contextmanager
def _written_beside(disk: Disk, path: Path, obj: Mapping[str, object]) -> Iterator[Path]:
    """Yield a synced temporary file next to `path`; whatever is left of it afterwards goes."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}-{os.urandom(4).hex()}.tmp")
    descriptor = disk.create(temporary)
    try:
        try:
            write_all(disk, descriptor, [memoryview(encode_manifest(obj))], 0, temporary)
            disk.sync(descriptor)
        finally:
            disk.close(descriptor)
        yield temporary
    finally:
        with contextlib.suppress(OSError):
            disk.unlink(temporary)
