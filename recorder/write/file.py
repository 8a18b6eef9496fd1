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

from ..descriptors import Descriptor, require_ours

GRAIN_BYTES = 4096
"""Addresses, lengths and offsets of direct writes are multiples of this; no common disk asks for more."""
HEAD_BYTES = 2 * GRAIN_BYTES
"""Room in front of what is appended: the schema that Arrow puts before each message lands there, then the tail."""
FILE_MODES = {"owner": 0o600, "group": 0o640, "all": 0o644}
"""By the setting `permissions`."""
_NO_PROGRESS_LIMIT = 3


class Disk:
    """The disk as the writer sees it. Every method may raise OSError, and any of them may block.

    A descriptor that somebody else has closed is EBADF for all of them, whatever its number means by now.
    """

    file_mode = 0o600
    """Who may read what is created; a directory may be entered by the same."""
    keeps_reserve = False
    """Whether to lay a descriptor by for the day when the process has no other; see `release_reserve`."""
    _reserve: Descriptor | None = None

    def make_directory(self, path: Path) -> None:
        """Create a directory; FileExistsError where it exists."""
        mode = self.file_mode | (self.file_mode & 0o444) >> 2
        os.mkdir(path, mode)
        if self.file_mode != Disk.file_mode:
            with contextlib.suppress(OSError):  # whoever asks for readers means it, whatever the umask says
                os.chmod(path, mode)

    def remove_directory(self, path: Path) -> None:
        """Remove an empty directory."""
        os.rmdir(path)

    def create(self, path: Path) -> int:
        """A new file, never through a link; FileExistsError where it exists."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = self._open(path, flags)
        if self.file_mode != Disk.file_mode:
            with contextlib.suppress(OSError):
                os.fchmod(descriptor, self.file_mode)
        return descriptor

    def set_direct(self, descriptor: int, wanted: bool) -> bool:
        """Switch writes past the page cache on or off. False where the file system cannot."""
        try:
            require_ours(descriptor)
            flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
            fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT if wanted else flags & ~os.O_DIRECT)
        except OSError:
            return False
        return True

    def write(self, descriptor: int, data: memoryview, offset: int) -> int:
        """Write from the front of `data`, perhaps less than all of it; returns how many bytes."""
        require_ours(descriptor)
        return os.pwrite(descriptor, data, offset)

    def truncate(self, descriptor: int, nbytes: int) -> None:
        require_ours(descriptor)
        os.ftruncate(descriptor, nbytes)

    def sync(self, descriptor: int) -> None:
        require_ours(descriptor)
        os.fsync(descriptor)

    def close(self, descriptor: int) -> None:
        require_ours(descriptor)
        os.close(descriptor)
        if self.keeps_reserve and self._reserve is None:
            with contextlib.suppress(OSError):  # a file that nobody else can have open, unlike /dev/null
                self._reserve = Descriptor.of(os.memfd_create("recorder-reserve", os.MFD_CLOEXEC))

    def release_reserve(self) -> None:
        """Close the descriptor that was laid by."""
        reserve, self._reserve = self._reserve, None
        if reserve is not None and reserve.is_ours:
            with contextlib.suppress(OSError):
                os.close(reserve)

    def _open(self, path: Path, flags: int) -> Descriptor:
        try:
            return Descriptor.of(os.open(path, flags, self.file_mode))
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE) or self._reserve is None:
                raise
        self.release_reserve()
        return Descriptor.of(os.open(path, flags, self.file_mode))

    def is_linked(self, descriptor: int) -> bool:
        """False where the file has no name any more: a removed directory goes on taking writes without an error."""
        require_ours(descriptor)
        return os.fstat(descriptor).st_nlink > 0

    def link(self, path: Path, final: Path) -> None:
        """Give a file another name; FileExistsError rather than overwriting."""
        os.link(path, final, follow_symlinks=False)

    def replace(self, path: Path, final: Path) -> None:
        """Give a file its final name, whatever had it before; a crash leaves the one or the other."""
        os.replace(path, final)

    def is_same(self, path: Path, final: Path) -> bool:
        """Whether two names are of one file."""
        return os.path.samestat(os.lstat(path), os.lstat(final))

    def sync_directory(self, path: Path) -> None:
        """Make the names in a directory durable, where the file system knows how."""
        descriptor = self._open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise
        finally:
            with contextlib.suppress(OSError):  # what a directory's descriptor says when it is closed means nothing
                Disk.close(self, descriptor)

    def unlink(self, path: Path) -> None:
        os.unlink(path)

    def free_bytes(self, path: Path) -> int:
        """What an unprivileged user may still write to the file system of `path`."""
        found = os.statvfs(path)
        return found.f_bavail * found.f_frsize


_WIPE_ON_FORK = 18
"""MADV_WIPEONFORK (Linux 4.14), which `mmap` does not name."""


class PageMemory:
    """Page-aligned private memory that is empty in forked children; untouched pages cost nothing."""

    def __init__(self, nbytes: int) -> None:
        self.data = self._map(nbytes)

    def reserve(self, nbytes: int) -> None:
        """Make `data` at least this long; its content is lost where it has to grow."""
        if len(self.data) < nbytes:
            self.data = self._map(nbytes)

    @staticmethod
    def _map(nbytes: int) -> npt.NDArray[np.uint8]:
        region = mmap.mmap(-1, _round_up(nbytes, mmap.PAGESIZE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # Not MADV_DONTFORK: a child that frees this would unmap what the kernel has since put at its address.
        with contextlib.suppress(OSError):
            region.madvise(_WIPE_ON_FORK)
        return np.frombuffer(region, np.uint8)


class AppendFile:
    """A file that grows by whole pieces, each laid out in shared memory first, directly to the disk where it can.

    A direct write covers whole blocks: the last one is filled up with zeros, and written again with what follows it.
    """

    def __init__(self, disk: Disk, path: Path, memory: PageMemory, *, is_direct: bool) -> None:
        self.path = path
        self.end = 0
        """Bytes that were appended and written; the file may have zeros after them."""
        self.synced_end = 0
        """Bytes that the disk has said to hold for good."""
        self.is_sick = False
        """A sync has failed: it must not be tried again, the kernel may have dropped pages and say yes."""
        self._disk = disk
        self._memory = memory
        self._descriptor = disk.create(path)
        self._grain = GRAIN_BYTES if is_direct and disk.set_direct(self._descriptor, True) else 1
        self._tail = b""
        self._is_name_durable = False

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
        """Make what was appended survive a loss of power, the first time with the name of the file."""
        self._sync_content()
        if not self._is_name_durable:
            self._disk.sync_directory(self.path.parent)
            self._is_name_durable = True
        self.synced_end = self.end

    def publish(self, final: Path) -> None:
        """Cut off the zeros, sync, close, and give the file its final name; FileExistsError where that is taken."""
        self._disk.truncate(self._descriptor, self.end)
        self._sync_content()
        self.synced_end = self.end
        self.close()
        publish(self._disk, self.path, final)

    def cut_back(self) -> None:
        """Remove what a failed append may have left."""
        self._disk.truncate(self._descriptor, self.end)

    def close(self) -> None:
        """Close once; a second call does nothing, also after an error."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            self._disk.close(descriptor)

    def _sync_content(self) -> None:
        self.is_sick = True
        self._disk.sync(self._descriptor)
        self.is_sick = False

    def _write(self, data: memoryview, offset: int) -> None:
        while True:
            try:
                return write_all(self._disk, self._descriptor, data, offset, self.path)
            except OSError as error:
                if error.errno != errno.EINVAL or self._grain == 1:
                    raise
                # Larger blocks than ours, or a write that was cut short within one: again through the page cache.
                self._disk.set_direct(self._descriptor, False)
                self._grain = 1


def write_all(disk: Disk, descriptor: int, data: memoryview, offset: int, path: Path) -> None:
    """Write all of `data`, in as many pieces as the disk takes it.

    Raises:
        OSError: the disk refused, perhaps after some of it.
    """
    num_done = num_stalls = 0
    while num_done < len(data):
        num_written = disk.write(descriptor, data[num_done:], offset + num_done)
        num_stalls = 0 if num_written else num_stalls + 1
        if num_stalls == _NO_PROGRESS_LIMIT:
            raise OSError(errno.EIO, "writes make no progress", str(path))
        num_done += num_written


def publish(disk: Disk, path: Path, final: Path) -> None:
    """Move a synced file from its open name to its final one, and never over another file.

    Raises:
        FileExistsError: the final name is taken.
        OSError: the disk refused; the file has its open name.
    """
    try:
        disk.link(path, final)
    except OSError as error:
        if isinstance(error, FileExistsError):
            if not disk.is_same(path, final):  # NFS may repeat a request that has succeeded
                raise
        elif error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK) or os.path.lexists(final):
            raise
        else:
            disk.replace(path, final)  # a file system without links; the directory is ours alone, so nobody races
            return
    # Under both names it is readable, and readers prefer the final one: the old one goes only once the new is durable.
    with contextlib.suppress(OSError):
        disk.sync_directory(path.parent)
        disk.unlink(path)


def _round_up(nbytes: int, grain: int) -> int:
    return -(-nbytes // grain) * grain
