"""Owns the system calls on files being written, and the memory that they write from.

Nothing above this module opens, writes, syncs or renames a shard: tests replace `Disk` to make a disk slow, full or
sick. Nothing here may copy a payload more than once, or hold the GIL while it does.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ..format.rundir import sync_directory

GRAIN_BYTES = 4096
"""Addresses, lengths and offsets of direct writes are multiples of this; no common disk asks for more."""
HEAD_BYTES = 2 * GRAIN_BYTES
"""Room in front of what is appended: the schema that Arrow puts before each message lands there, then the tail."""
_NO_PROGRESS_LIMIT = 3


class Disk:
    """The disk as the writer sees it. Every method may raise OSError, and any of them may block."""

    def make_directory(self, path: Path) -> None:
        """Create a directory for the owner alone; FileExistsError where it exists."""
        os.mkdir(path, 0o700)

    def create(self, path: Path) -> int:
        """A new file for the owner alone, never through a link; FileExistsError where it exists."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)

    def set_direct(self, descriptor: int, wanted: bool) -> bool:
        """Switch writes past the page cache on or off. False where the file system cannot."""
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        try:
            fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT if wanted else flags & ~os.O_DIRECT)
        except OSError:
            return False
        return True

    def write(self, descriptor: int, data: memoryview, offset: int) -> int:
        """Write from the front of `data`, perhaps less than all of it; returns how many bytes."""
        return os.pwrite(descriptor, data, offset)

    def truncate(self, descriptor: int, nbytes: int) -> None:
        os.ftruncate(descriptor, nbytes)

    def sync(self, descriptor: int) -> None:
        os.fsync(descriptor)

    def close(self, descriptor: int) -> None:
        os.close(descriptor)

    def is_linked(self, descriptor: int) -> bool:
        """False where the file has no name any more: a removed directory goes on taking writes without an error."""
        return os.fstat(descriptor).st_nlink > 0

    def publish(self, path: Path, final: Path) -> None:
        """Give a file its final name; FileExistsError rather than overwriting."""
        try:
            os.link(path, final, follow_symlinks=False)
        except FileExistsError:
            # NFS may repeat a request that has succeeded.
            if not os.path.samestat(os.lstat(path), os.lstat(final)):
                raise
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK) or os.path.lexists(final):
                raise
            os.rename(path, final)  # a file system without links; the directory is ours alone, so nobody races
            return
        # Under both names it is readable, and readers prefer the final one.
        with contextlib.suppress(OSError):
            os.unlink(path)

    def sync_directory(self, path: Path) -> None:
        """Make the names in a directory durable."""
        sync_directory(path)

    def unlink(self, path: Path) -> None:
        os.unlink(path)

    def free_bytes(self, path: Path) -> int:
        """What an unprivileged user may still write to the file system of `path`."""
        found = os.statvfs(path)
        return found.f_bavail * found.f_frsize


class PageMemory:
    """Page-aligned private memory that is not copied into forked children; untouched pages cost nothing."""

    def __init__(self, nbytes: int) -> None:
        self.data = self._map(nbytes)

    def reserve(self, nbytes: int) -> None:
        """Make `data` at least this long; its content is lost where it has to grow."""
        if len(self.data) < nbytes:
            self.data = self._map(nbytes)

    @staticmethod
    def _map(nbytes: int) -> npt.NDArray[np.uint8]:
        region = mmap.mmap(-1, _round_up(nbytes, mmap.PAGESIZE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        region.madvise(mmap.MADV_DONTFORK)
        return np.frombuffer(region, np.uint8)


class AppendFile:
    """A file that grows by whole pieces, each laid out in shared memory first, directly to the disk where it can.

    A direct write covers whole blocks: the last one is filled up with zeros, and written again with what follows it.
    """

    def __init__(self, disk: Disk, path: Path, memory: PageMemory, *, is_direct: bool) -> None:
        self.path = path
        self.end = 0
        """Bytes that were appended and written; the file may have zeros after them."""
        self._disk = disk
        self._memory = memory
        self._descriptor = disk.create(path)
        self._grain = GRAIN_BYTES if is_direct and disk.set_direct(self._descriptor, True) else 1
        self._tail = b""

    def place(self, nbytes: int) -> int:
        """Where in the memory to lay out the next piece, of at most `nbytes`. What lies before may be overwritten."""
        self._memory.reserve(HEAD_BYTES + nbytes + 2 * GRAIN_BYTES)
        return HEAD_BYTES + len(self._tail)

    def append(self, nbytes: int) -> None:
        """Write the `nbytes` that lie at `place`. After an OSError the piece counts as never appended."""
        if not self._disk.is_linked(self._descriptor):
            raise FileNotFoundError(errno.ENOENT, "the file was removed while it was being written", str(self.path))
        data = self._memory.data
        tail_bytes = len(self._tail)
        stop = HEAD_BYTES + tail_bytes + nbytes
        padded = HEAD_BYTES + _round_up(tail_bytes + nbytes, self._grain)
        data[HEAD_BYTES : HEAD_BYTES + tail_bytes] = np.frombuffer(self._tail, np.uint8)
        data[stop:padded] = 0
        self._write(data[HEAD_BYTES:padded].data, self.end - tail_bytes)
        self._tail = data[stop - (tail_bytes + nbytes) % self._grain : stop].tobytes()
        self.end += nbytes

    def append_bytes(self, piece: bytes) -> None:
        """`append` for a small piece that exists already."""
        start = self.place(len(piece))
        self._memory.data[start : start + len(piece)] = np.frombuffer(piece, np.uint8)
        self.append(len(piece))

    def sync(self) -> None:
        self._disk.sync(self._descriptor)

    def publish(self, final: Path) -> None:
        """Cut off the zeros, sync, close, and give the file its final name (not durable before `sync_directory`)."""
        self._disk.truncate(self._descriptor, self.end)
        self._disk.sync(self._descriptor)
        self.close()
        self._disk.publish(self.path, final)

    def cut_back(self) -> None:
        """Remove what a failed append may have left."""
        self._disk.truncate(self._descriptor, self.end)

    def close(self) -> None:
        """Close once; a second call does nothing, also after an error."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            self._disk.close(descriptor)

    def _write(self, data: memoryview, offset: int) -> None:
        num_done = num_stalls = 0
        while num_done < len(data):
            try:
                num_written = self._disk.write(self._descriptor, data[num_done:], offset + num_done)
            except OSError as error:
                if error.errno != errno.EINVAL or self._grain == 1:
                    raise
                # Larger blocks than ours, or a write that was cut short within one: go on through the page cache.
                self._disk.set_direct(self._descriptor, False)
                self._grain = 1
                continue
            num_stalls = 0 if num_written else num_stalls + 1
            if num_stalls == _NO_PROGRESS_LIMIT:
                raise OSError(errno.EIO, "writes make no progress", str(self.path))
            num_done += num_written


def _round_up(nbytes: int, grain: int) -> int:
    return -(-nbytes // grain) * grain
