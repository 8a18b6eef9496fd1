"""Writes the manifests and the status file of a writer, each with a checksum at its start. Reads no file.

A manifest is written completely or not at all, and durably. `_status.json` is for people who watch the writer. It is
one disk block, which the writer thread overwrites in place and never syncs.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ..format.rundir import STATUS, encode_manifest, encode_status
from .file import Disk, name_newly, write_all

Unsynced = Callable[[OSError], None]
"""A function that takes the error of a failed sync. The manifest exists, but a loss of power may remove it."""


def replace_manifest(disk: Disk, path: Path, obj: Mapping[str, object], *, unsynced: Unsynced | None = None) -> None:
    """Replace `path` by a manifest of `obj`. Readers see the old file or the new file, even after a crash.

    `unsynced` is called with the error of a failed sync. If `unsynced` is None, the error is raised. After an OSError
    the old file is unchanged, or the new file exists and may not be durable.
    """
    with _written_beside(disk, path, obj, unsynced) as temporary:
        disk.replace(temporary, path)
        with _report_unsynced(unsynced):
            disk.persist_directory(path.parent)


def create_manifest(disk: Disk, path: Path, obj: Mapping[str, object], *, unsynced: Unsynced | None = None) -> bool:
    """Write a manifest of `obj` to `path`. Return False if `path` exists: the first process wins.

    Raises:
        OSError: the disk refused.
    """
    with _written_beside(disk, path, obj, unsynced) as temporary:
        try:
            name_newly(disk, temporary, path)
        except FileExistsError:
            return False
        except OSError:  # without links and exclusive renames in the file system, readers may see an incomplete file
            try:
                _write(disk, path, obj, unsynced)
            except FileExistsError:
                return False
        with _report_unsynced(unsynced):
            disk.persist_directory(path.parent)
        return True


@contextlib.contextmanager
def _written_beside(disk: Disk, path: Path, obj: Mapping[str, object], unsynced: Unsynced | None) -> Iterator[Path]:
    """Write a manifest of `obj` to a temporary file next to `path`. Yield the file's path, then remove the file."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}-{os.urandom(4).hex()}.tmp")
    _write(disk, temporary, obj, unsynced)
    try:
        yield temporary
    finally:
        with contextlib.suppress(OSError):
            disk.unlink(temporary)


def _write(disk: Disk, path: Path, obj: Mapping[str, object], unsynced: Unsynced | None) -> None:
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
    try:
        yield
    except OSError as error:
        if unsynced is None:
            raise
        unsynced(error)


_RECENT_S = 10.0
"""The seconds over which the status averages rates. One step may take seconds."""


class StatusFile:
    """The status file of a writer, one disk block. A write replaces the block in place, without sync or rename."""

    def __init__(self, disk: Disk, clock: Callable[[], float]) -> None:
        self._disk = disk
        self._clock = clock
        self._descriptor: int | None = None
        self._samples: deque[tuple[float, int, int]] = deque()
        """Tuples of time, step and bytes written, oldest first. Only the first may be older than `_RECENT_S`."""

    def write(self, directory: Path, status: Mapping[str, Any], *, written_bytes: int) -> None:
        """Write `status`, which has a member ``step``, with the recent growth of the step and of the written bytes."""
        status = {
            **status,
            "time_ns": time.time_ns(),
            "written_bytes": written_bytes,
            "recent": self._recent(status["step"], written_bytes),
        }
        try:
            if self._descriptor is None:
                self._descriptor = self._disk.create(directory / STATUS)
            self._disk.write(self._descriptor, memoryview(encode_status(status)), 0)
        except OSError as error:
            if error.errno == errno.EBADF:  # other code has closed the descriptor, so the next write creates a new file
                self._descriptor = None
                with contextlib.suppress(OSError):
                    self._disk.unlink(directory / STATUS)

    def close(self) -> None:
        """Close the file. A later `write` does nothing, because the file's name is taken."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            with contextlib.suppress(OSError):
                self._disk.close(descriptor)

    def _recent(self, step: int, written_bytes: int) -> dict[str, float]:
        samples, now = self._samples, self._clock()
        samples.append((now, step, written_bytes))
        while len(samples) > 2 and now - samples[1][0] >= _RECENT_S:
            samples.popleft()
        since_s, old_step, old_bytes = samples[0]
        return {
            "seconds": round(now - since_s, 3),
            "steps": max(step - old_step, 0),
            "bytes": max(written_bytes - old_bytes, 0),
        }
