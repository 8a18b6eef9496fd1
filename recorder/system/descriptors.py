"""Tells whether a descriptor that we keep still means the file that we opened.

A program that becomes a daemon closes all descriptors, ours too, and the kernel gives their numbers to the files that
it opens next. Nothing here may write, or close what is not ours.
"""

from __future__ import annotations

import errno
import os


class Descriptor(int):
    """An open descriptor that knows its file; a plain number everywhere else."""

    _file: tuple[int, int]

    @classmethod
    def of(cls, number: int) -> Descriptor:
        """Take over a descriptor that was opened just now; close it and raise where its file cannot be identified."""
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
        """Whether nobody has closed it."""
        try:
            status = os.fstat(self)
        except OSError as error:
            return error.errno != errno.EBADF  # a server's file that is gone, say: still ours to close
        return (status.st_dev, status.st_ino) == self._file


def require_ours(descriptor: int) -> None:
    """Raise where somebody has closed a `Descriptor`, as the kernel does until the number is used again.

    Raises:
        OSError: EBADF.
    """
    if isinstance(descriptor, Descriptor) and not descriptor.is_ours:
        raise OSError(errno.EBADF, "somebody else closed the descriptor")
