"""Owns the system calls on files being written, and the memory that they write from.

Nothing above this module opens, writes, syncs or renames a shard: tests replace `Disk` to make a disk slow, full or
sick. Nothing here may copy a payload, but for less than a block of it, or write into the memory where it lies.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ..descriptors import Descriptor, require_ours
from ..memory import private_memory
from ..native import address
from .syncing import StuckError, SyncThread

GRAIN_BYTES = 4096
"""Addresses, lengths and offsets of direct writes are multiples of this; no common disk asks for more."""
HEAD_BYTES = 2 * GRAIN_BYTES
"""Room in front of what is appended: the schema that Arrow puts before each message lands there, then the tail."""
FILE_MODES = {"owner": 0o600, "group": 0o640, "all": 0o644}
"""By the setting `permissions`."""
_NO_PROGRESS_LIMIT = 3
_AT_CWD, _NO_REPLACE = -100, 1


class Disk:
    """The disk as the writer sees it. Every method may raise OSError, and any of them may block.

    A descriptor that somebody else has closed is EBADF for all of them, whatever its number means by now.
    """

    file_mode = 0o600
    """Who may read what is created; a directory may be entered by the same."""
    keeps_reserve = False
    """Whether to lay a descriptor by for the day when the process has no other; see `release_reserve`."""
    syncs: SyncThread | None = None
    """Where `persist` waits a bounded time; None where it waits for as long as it takes."""
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

    def write(self, descriptor: int, data: memoryview, offset: int, *behind: memoryview) -> int:
        """Write from the front of `data` and what goes `behind` it, perhaps less than all; returns how many bytes."""
        require_ours(descriptor)
        return os.pwritev(descriptor, [data, *behind], offset)

    def truncate(self, descriptor: int, nbytes: int) -> None:
        require_ours(descriptor)
        os.ftruncate(descriptor, nbytes)

    def sync(self, descriptor: int) -> None:
        require_ours(descriptor)
        os.fsync(descriptor)

    def persist(self, descriptor: int) -> None:
        """`sync`, waited for as long as `syncs` says."""
        if self.syncs is None:
            self.sync(descriptor)
        else:
            self.syncs.do(partial(self.sync, descriptor))

    def persist_directory(self, path: Path) -> None:
        """`sync_directory`, waited for as long as `syncs` says."""
        if self.syncs is None:
            self.sync_directory(path)
        else:
            self.syncs.do(partial(self.sync_directory, path))

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

    def rename(self, path: Path, final: Path) -> None:
        """Give a file another name instead of its own; FileExistsError rather than overwriting."""
        libc = ctypes.CDLL(None, use_errno=True)
        if not hasattr(libc, "renameat2"):
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), str(path), None, str(final))
        if libc.renameat2(_AT_CWD, os.fsencode(path), _AT_CWD, os.fsencode(final), _NO_REPLACE) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), str(path), None, str(final))

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
        region = private_memory(_round_up(nbytes, mmap.PAGESIZE))
        return np.frombuffer(region, np.uint8)


class AppendFile:
    """A file that grows by whole pieces, directly to the disk where it can, each laid out in shared memory first.

    A direct write covers whole blocks: the last one is filled up with zeros, and written again with what follows it.
    Values alone are written from where they lie, and that memory is never written to.
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

    @property
    def is_direct(self) -> bool:
        """Whether writes go past the page cache."""
        return self._grain > 1

    def place(self, nbytes: int) -> int:
        """Where in the memory to lay out the next piece, of at most `nbytes`. What lies before may be overwritten."""
        self._memory.reserve(HEAD_BYTES + nbytes + 2 * GRAIN_BYTES)
        return HEAD_BYTES + len(self._tail)

    def append(self, nbytes: int) -> None:
        """Write the `nbytes` that lie at `place`. After an OSError the piece counts as never appended."""
        self._require_linked()
        data, tail_bytes = self._memory.data, len(self._tail)
        start = HEAD_BYTES + tail_bytes
        stop, padded = start + nbytes, HEAD_BYTES + _round_up(tail_bytes + nbytes, self._grain)
        data[HEAD_BYTES:start] = np.frombuffer(self._tail, np.uint8)
        data[stop:padded] = 0
        self._write(self.end - tail_bytes, data[HEAD_BYTES:padded].data)
        self._tail = data[stop - (tail_bytes + nbytes) % self._grain : stop].tobytes()
        self.end += nbytes

    def gap(self, lead_bytes: int) -> int:
        """Bytes to put behind `lead_bytes` of the next piece, to come to a multiple of `GRAIN_BYTES` of the file."""
        return -(self.end + lead_bytes) % GRAIN_BYTES

    def append_bytes(self, piece: bytes) -> None:
        """`append` for a small piece that exists already."""
        start = self.place(len(piece))
        self._memory.data[start : start + len(piece)] = np.frombuffer(piece, np.uint8)
        self.append(len(piece))

    def append_around(self, lead: bytes, values: npt.NDArray[np.uint8], trail: bytes) -> None:
        """`append` for a piece with values in its middle, which are written from where they lie.

        Args:
            lead: what comes before the values, with the `gap`: they begin at a multiple of `GRAIN_BYTES` of the file.
            values: begin at one in memory, too.
            trail: what comes behind them.
        """
        assert address(values) % GRAIN_BYTES == 0, "direct writes refuse such values"
        self._require_linked()
        rest = len(values) - len(values) % self._grain
        head, foot = self._tail + lead, values[rest:].tobytes() + trail
        stop, padded = len(head) + len(foot), len(head) + _round_up(len(foot), self._grain)
        self._memory.reserve(padded)
        data = self._memory.data
        data[:stop] = np.frombuffer(head + foot, np.uint8)
        data[stop:padded] = 0
        self._write(
            self.end - len(self._tail), data[: len(head)].data, values[:rest].data, data[len(head) : padded].data
        )
        self._tail = foot[len(foot) - len(foot) % self._grain :]
        self.end += len(lead) + len(values) + len(trail)

    def sync(self) -> None:
        """Make what was appended survive a loss of power, the first time with the name of the file."""
        self._sync_content()
        if not self._is_name_durable:
            self._disk.persist_directory(self.path.parent)
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

    def _require_linked(self) -> None:
        if not self._disk.is_linked(self._descriptor):
            raise FileNotFoundError(errno.ENOENT, "the file was removed while it was being written", str(self.path))

    def _sync_content(self) -> None:
        self.is_sick = True
        try:
            self._disk.persist(self._descriptor)
        except StuckError:
            self.is_sick = False
            raise
        self.is_sick = False

    def _write(self, offset: int, *pieces: memoryview) -> None:
        while True:
            try:
                return write_all(self._disk, self._descriptor, pieces, offset, self.path)
            except OSError as error:
                if error.errno != errno.EINVAL or self._grain == 1:
                    raise
                # Larger blocks than ours, or a write that was cut short within one: again through the page cache.
                self._disk.set_direct(self._descriptor, False)
                self._grain = 1


def write_all(disk: Disk, descriptor: int, pieces: Iterable[memoryview], offset: int, path: Path) -> None:
    """Write all pieces one behind the other, in as many writes as the disk takes them.

    Raises:
        OSError: the disk refused, perhaps after some of it.
    """
    left = [piece for piece in pieces if piece]
    num_stalls = 0
    while left:
        num_written = disk.write(descriptor, left[0], offset, *left[1:])
        num_stalls = 0 if num_written else num_stalls + 1
        if num_stalls == _NO_PROGRESS_LIMIT:
            raise OSError(errno.EIO, "writes make no progress", str(path))
        offset += num_written
        while left and num_written >= len(left[0]):
            num_written -= len(left.pop(0))
        if left:
            left[0] = left[0][num_written:]


def publish(disk: Disk, path: Path, final: Path) -> None:
    """Move a synced file from its open name to its final one, and never over another file.

    Raises:
        FileExistsError: the final name is taken.
        OSError: the disk refused; the file has its open name.
    """
    try:
        has_both_names = name_newly(disk, path, final)
    except FileExistsError:
        raise
    except OSError:
        if os.path.lexists(final):
            raise
        disk.replace(path, final)  # the directory is ours alone, so nobody races
        return
    if has_both_names:
        # Under both it is readable, and readers prefer the final one: the old one goes only once the new is durable.
        with contextlib.suppress(OSError):
            disk.persist_directory(path.parent)
            disk.unlink(path)


def name_newly(disk: Disk, path: Path, final: Path) -> bool:
    """Give a file a name that no other has, by a link or, where the file system makes none, by a rename.

    Returns:
        Whether it has its old name, too.

    Raises:
        FileExistsError: the name is taken.
        OSError: the disk does neither.
    """
    try:
        disk.link(path, final)
    except FileExistsError:
        if not disk.is_same(path, final):  # NFS may repeat a request that has succeeded
            raise
    except OSError as refusal:
        try:
            disk.rename(path, final)
        except FileExistsError:
            raise
        except OSError:
            raise refusal from None
        return False
    return True


def _round_up(nbytes: int, grain: int) -> int:
    return -(-nbytes // grain) * grain
