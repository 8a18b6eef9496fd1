"""What the operating system gives a process: memory for tensors, file descriptors, and locks on folders.

A program that becomes a daemon closes every descriptor, also those of the recorder, and the kernel gives the numbers to
the files that the program opens next. Must never write to a descriptor, or close one, that is no longer the recorder's.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

from ..errors import WriteError

_WIPE_ON_FORK = 18
"""MADV_WIPEONFORK (Linux 4.14), which `mmap` does not name."""


def private_memory(nbytes: int) -> mmap.mmap:
    """Return page-aligned memory that is empty in forked children; pages that are not touched cost nothing.

    Its pages are large where the system has large ones: a direct write pins each page that it is made from.

    Raises:
        OSError: there is no such memory left.
    """
    region = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # Not MADV_DONTFORK: a child that frees this would unmap what the kernel has since put at its address.
    for advice in (_WIPE_ON_FORK, mmap.MADV_HUGEPAGE):
        with contextlib.suppress(OSError):
            region.madvise(advice)
    return region


class Descriptor(int):
    """A file descriptor that remembers which file it was opened for. It is an `int`, and is used as one."""

    _file: tuple[int, int]

    @classmethod
    def of(cls, number: int) -> Descriptor:
        """Return a new descriptor as a `Descriptor`; close it and raise where its file cannot be identified."""
        try:
            status = os.fstat(number)
        except OSError:
            os.close(number)
            raise
        kept = cls(number)
        kept._file = status.st_dev, status.st_ino
        return kept

    @property
    def is_ours(self) -> bool:
        """Whether the descriptor still means the file that it was opened for."""
        try:
            status = os.fstat(self)
        except OSError as error:
            return error.errno != errno.EBADF  # a server's file that is gone, say: still ours to close
        return (status.st_dev, status.st_ino) == self._file


def require_ours(descriptor: int) -> None:
    """Raise the error that the kernel raises for a closed descriptor, also where the number is in use again.

    Raises:
        OSError: EBADF.
    """
    if isinstance(descriptor, Descriptor) and not descriptor.is_ours:
        raise OSError(errno.EBADF, "somebody else closed the descriptor")


@contextlib.contextmanager
def locked_folder(folder: Path, work: str) -> Iterator[None]:
    """Lock a folder, so that no other process does the same work there. A file system without locks locks nothing.

    Args:
        folder: an existing folder.
        work: the name of the work in the message, such as ``merge``.

    Raises:
        WriteError: another process holds the lock.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise WriteError(f"{folder}: another {work} is at work there; wait for it") from error
        yield
    finally:
        os.close(descriptor)
