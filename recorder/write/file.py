"""Makes the system calls on files that are being written, and owns the memory from which the files are written.

Only this module opens, writes, syncs or renames a shard, so that tests can replace `Disk` by a disk that is slow, full
or failing. Syncs have a thread of their own. Nothing here may write into the memory of a payload, or copy more of a
payload than its incomplete last block.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ..native import address
from ..system.processes import Descriptor, private_memory, require_ours

GRAIN_BYTES = 4096
"""The alignment in bytes of the addresses, lengths and offsets of direct writes. No common disk needs more."""
HEAD_BYTES = 2 * GRAIN_BYTES
"""The bytes of memory kept free before each part of a file. Arrow writes its schema into them, not the file."""
FILE_MODES = {"owner": 0o600, "group": 0o640, "all": 0o644}
"""The mode of a new file for each value of the setting `permissions`."""
_NO_PROGRESS_LIMIT = 3
_AT_CWD, _NO_REPLACE = -100, 1


class Disk:
    """The system calls that the writer makes on files. Every method may raise OSError, and may block.

    A call with a descriptor that other code has closed raises EBADF, even if another file has its number now.
    """

    file_mode = 0o600
    """The mode of new files. Users who may read new files may also enter new directories."""
    keeps_reserve = False
    """True to keep a descriptor in reserve, which is closed once the process runs out of descriptors."""
    syncs: SyncThread | None = None
    """The thread on which `persist` syncs, so that the wait for a sync is bounded; None to sync without a bound."""
    _reserve: Descriptor | None = None

    def make_directory(self, path: Path) -> None:
        """Create a directory. Raises FileExistsError if it exists."""
        mode = self.file_mode | (self.file_mode & 0o444) >> 2
        os.mkdir(path, mode)
        if self.file_mode != Disk.file_mode:
            with contextlib.suppress(OSError):  # a umask must not restrict the setting `permissions`
                os.chmod(path, mode)

    def remove_directory(self, path: Path) -> None:
        os.rmdir(path)

    def create(self, path: Path) -> int:
        """Create a file, never through a symbolic link. Raises FileExistsError if it exists."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = self._open(path, flags)
        if self.file_mode != Disk.file_mode:
            with contextlib.suppress(OSError):
                os.fchmod(descriptor, self.file_mode)
        return descriptor

    def set_direct(self, descriptor: int, wanted: bool) -> bool:
        """Switch writes past the page cache on or off. Return False if the file system cannot do this."""
        try:
            require_ours(descriptor)
            flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
            fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT if wanted else flags & ~os.O_DIRECT)
        except OSError:
            return False
        return True

    def write(self, descriptor: int, data: memoryview, offset: int, *behind: memoryview) -> int:
        """Write `data` and then the buffers `behind`. Return how many bytes were written, perhaps not all."""
        require_ours(descriptor)
        return os.pwritev(descriptor, [data, *behind], offset)

    def truncate(self, descriptor: int, nbytes: int) -> None:
        require_ours(descriptor)
        os.ftruncate(descriptor, nbytes)

    def sync(self, descriptor: int) -> None:
        require_ours(descriptor)
        os.fsync(descriptor)

    def persist(self, descriptor: int) -> None:
        """Sync a file, and wait for as long as `syncs` allows."""
        self._wait_for(partial(self.sync, descriptor))

    def persist_directory(self, path: Path) -> None:
        """Sync a directory, and wait for as long as `syncs` allows."""
        self._wait_for(partial(self.sync_directory, path))

    def _wait_for(self, sync: Callable[[], None]) -> None:
        if self.syncs is None:
            sync()
        else:
            self.syncs.do(sync)

    def close(self, descriptor: int) -> None:
        require_ours(descriptor)
        os.close(descriptor)
        if self.keeps_reserve and self._reserve is None:
            with contextlib.suppress(OSError):  # a memfd, as other code may have /dev/null open
                self._reserve = Descriptor.of(os.memfd_create("recorder-reserve", os.MFD_CLOEXEC))

    def release_reserve(self) -> None:
        """Close the descriptor that is kept in reserve."""
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
        """Return True if the file still has a name. Writes to a file that was removed would give no error."""
        require_ours(descriptor)
        return os.fstat(descriptor).st_nlink > 0

    def link(self, path: Path, final: Path) -> None:
        """Give a file a second name. Raises FileExistsError if the name is taken."""
        os.link(path, final, follow_symlinks=False)

    def rename(self, path: Path, final: Path) -> None:
        """Rename a file. Raises FileExistsError if the name is taken."""
        libc = ctypes.CDLL(None, use_errno=True)
        if not hasattr(libc, "renameat2"):
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), str(path), None, str(final))
        if libc.renameat2(_AT_CWD, os.fsencode(path), _AT_CWD, os.fsencode(final), _NO_REPLACE) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), str(path), None, str(final))

    def replace(self, path: Path, final: Path) -> None:
        """Give a file its final name, in place of any other file of that name. A crash leaves one of the two files."""
        os.replace(path, final)

    def is_same(self, path: Path, final: Path) -> bool:
        return os.path.samestat(os.lstat(path), os.lstat(final))

    def sync_directory(self, path: Path) -> None:
        """Make the names in a directory durable, if the file system supports this."""
        descriptor = self._open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise
        finally:
            with contextlib.suppress(OSError):  # an error on closing a directory has no consequence
                Disk.close(self, descriptor)

    def unlink(self, path: Path) -> None:
        os.unlink(path)

    def free_bytes(self, path: Path) -> int:
        """Return the bytes that an unprivileged user may still write to the file system of `path`."""
        status = os.statvfs(path)
        return status.f_bavail * status.f_frsize


class PageMemory:
    """Page-aligned private memory, which is empty in forked children. Pages that were never touched cost nothing."""

    def __init__(self, nbytes: int) -> None:
        self.data = self._map(nbytes)

    def reserve(self, nbytes: int) -> None:
        """Make `data` at least `nbytes` long. If `data` has to grow, its content is lost."""
        if len(self.data) < nbytes:
            self.data = self._map(nbytes)

    @staticmethod
    def _map(nbytes: int) -> npt.NDArray[np.uint8]:
        region = private_memory(_round_up(nbytes, mmap.PAGESIZE))
        return np.frombuffer(region, np.uint8)


class AppendFile:
    """A file that grows part by part. Each part is laid out in a `PageMemory` first.

    If possible, a write goes past the page cache. Such a direct write covers complete blocks: the last block is padded
    with zeros, and written again with the next part. Only payload values are written from their own memory, which this
    class never changes.
    """

    def __init__(self, disk: Disk, path: Path, memory: PageMemory, *, is_direct: bool) -> None:
        self.path = path
        self.end = 0
        """The number of bytes that were appended and written. In the file, zeros may follow."""
        self.synced_end = 0
        """The number of bytes that a successful sync has covered."""
        self.is_sick = False
        """True after a failed sync. The file must not be synced again: the kernel may drop pages and report success."""
        self._disk = disk
        self._memory = memory
        self._descriptor = disk.create(path)
        self._grain = GRAIN_BYTES if is_direct and disk.set_direct(self._descriptor, True) else 1
        self._tail = b""
        self._is_name_durable = False

    @property
    def is_direct(self) -> bool:
        return self._grain > 1

    @property
    def is_synced(self) -> bool:
        return self.synced_end == self.end

    def next_start(self, nbytes: int) -> int:
        """Return the offset in memory for a next part of up to `nbytes`. `append` overwrites the memory before it."""
        self._memory.reserve(HEAD_BYTES + nbytes + 2 * GRAIN_BYTES)
        return HEAD_BYTES + len(self._tail)

    def append(self, nbytes: int) -> None:
        """Append to the file `nbytes` of memory, from `next_start` on. After an OSError nothing counts as appended."""
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
        """Return how many bytes of padding after `lead_bytes` of the next part reach a multiple of `GRAIN_BYTES`."""
        return -(self.end + lead_bytes) % GRAIN_BYTES

    def append_bytes(self, data: bytes) -> None:
        """Append a few bytes from a bytes object."""
        start = self.next_start(len(data))
        self._memory.data[start : start + len(data)] = np.frombuffer(data, np.uint8)
        self.append(len(data))

    def append_around(self, lead: bytes, values: npt.NDArray[np.uint8], trail: bytes) -> None:
        """Append `lead`, `values` and `trail` as one part. `values` are written from their own memory.

        The values must begin at a multiple of `GRAIN_BYTES` in memory. They do so in the file because `lead` ends with
        the padding that `gap` returns.
        """
        assert address(values) % GRAIN_BYTES == 0, "direct writes refuse values at other addresses"
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
        """Make the appended bytes durable. The first call also makes the file's name durable."""
        self._sync_content()
        if not self._is_name_durable:
            self._disk.persist_directory(self.path.parent)
            self._is_name_durable = True
        self.synced_end = self.end

    def publish(self, final: Path) -> None:
        """Cut off trailing zeros, sync, close and rename the file. Raises FileExistsError if `final` is taken."""
        self._disk.truncate(self._descriptor, self.end)
        self._sync_content()
        self.synced_end = self.end
        self.close()
        publish(self._disk, self.path, final)

    def cut_back(self) -> None:
        """Remove bytes that a failed append may have left."""
        self._disk.truncate(self._descriptor, self.end)

    def close(self) -> None:
        """Close the file. A second call does nothing, even after an error."""
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

    def _write(self, offset: int, *buffers: memoryview) -> None:
        while True:
            try:
                return write_all(self._disk, self._descriptor, buffers, offset, self.path)
            except OSError as error:
                if error.errno != errno.EINVAL or self._grain == 1:
                    raise
                # The disk's blocks are larger, or a write ended within a block: try again through the page cache.
                self._disk.set_direct(self._descriptor, False)
                self._grain = 1


def write_all(disk: Disk, descriptor: int, buffers: Iterable[memoryview], offset: int, path: Path) -> None:
    """Write all buffers one after the other, in as many writes as the disk needs.

    Raises:
        OSError: the disk refused, perhaps after it has taken some bytes.
    """
    left = [buffer for buffer in buffers if buffer]
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
    """Move a synced file from its open name to its final name, but never over another file.

    Raises:
        FileExistsError: the final name is taken.
        OSError: the disk refused. The file keeps its open name.
    """
    try:
        has_both_names = name_newly(disk, path, final)
    except FileExistsError:
        raise
    except OSError:
        if os.path.lexists(final):
            raise
        disk.replace(path, final)  # no other process writes in this directory
        return
    if has_both_names:
        # A file with both names is readable, and readers prefer the final name. The final name is made durable first.
        with contextlib.suppress(OSError):
            disk.persist_directory(path.parent)
            disk.unlink(path)


def name_newly(disk: Disk, path: Path, final: Path) -> bool:
    """Give a file a name that no other file has, by a link, or by a rename if the file system has no links.

    Returns:
        True if the file still has its old name, too.

    Raises:
        FileExistsError: the name is taken.
        OSError: the disk refused both the link and the rename.
    """
    try:
        disk.link(path, final)
    except FileExistsError:
        if not disk.is_same(path, final):  # NFS may repeat a request that has succeeded already
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


_LONGEST_SYNC_S = 10.0
"""The longest wait of the writer for one sync, in seconds. Meanwhile new records fill the pool."""
_SHORTEST_SYNC_S = 0.05
_SYNC_AT_END_S = 0.2


class StuckError(TimeoutError):
    """Raised when an earlier sync has not returned. Nothing was synced, and the call may be repeated."""


class SyncThread:
    """Runs syncs on a thread, one at a time. Only the writer thread calls methods other than `hurry`."""

    def __init__(self) -> None:
        self._until_s = float("inf")
        self._work: queue.SimpleQueue[_Sync | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._given_up: _Sync | None = None

    def hurry(self, until_s: float) -> None:
        """Set the time (`time.monotonic`) at which all waits for syncs end, for `close`. Called on any thread."""
        self._until_s = until_s

    def do(self, sync: Callable[[], None]) -> None:
        """Sync, and wait a bounded time for the sync.

        Raises:
            StuckError: an earlier sync has not returned, so this sync was not tried.
            OSError: the sync failed, or (`ETIMEDOUT`) its result is not known yet.
        """
        if self._given_up is not None and not self._given_up.is_done.is_set():
            raise StuckError(errno.ETIMEDOUT, "an earlier sync has not returned")
        self._given_up = None
        if not self._runs():
            sync()
            return
        request = _Sync(sync)
        self._work.put(request)
        left_s = self._until_s - time.monotonic()
        longest_s = (
            min(_LONGEST_SYNC_S, max(left_s, _SHORTEST_SYNC_S)) if left_s > 0 else _LONGEST_SYNC_S
        )  # after `until_s`, `close` no longer waits for this thread
        if not request.is_done.wait(longest_s):
            self._given_up = request
            raise TimeoutError(errno.ETIMEDOUT, f"a sync has not returned within {longest_s:.1f} s")
        if request.error is not None:
            raise request.error

    def stop(self) -> None:
        """End the thread. A thread that hangs in a sync is abandoned."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._work.put(None)
            thread.join(_SYNC_AT_END_S)

    def _runs(self) -> bool:
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="recorder-sync", daemon=True)
            with contextlib.suppress(RuntimeError):  # no thread can be started, so the writer thread syncs
                thread.start()
                self._thread = thread
        return self._thread is not None

    def _run(self) -> None:
        while (request := self._work.get()) is not None:
            try:
                request.sync()
            except BaseException as error:
                request.error = error
            request.is_done.set()


class _Sync:
    def __init__(self, sync: Callable[[], None]) -> None:
        self.sync = sync
        self.error: BaseException | None = None
        self.is_done = threading.Event()
