"""Owns one question: whether a descriptor that we keep still means what we opened.

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
        """Take over a descriptor that was opened just now; it is closed where nothing can be learned of it."""
        try:
            found = os.fstat(number)
        except OSError:
            os.close(number)
            raise
        kept = cls(number)
        kept._file = found.st_dev, found.st_ino
        return kept

    @property
    def is_ours(self) -> bool:
        """Whether nobody has closed it."""
        try:
            found = os.fstat(self)
        except OSError as error:
            return error.errno != errno.EBADF  # a server's file that is gone, say: still ours to close
        return (found.st_dev, found.st_ino) == self._file


def require_ours(descriptor: int) -> None:
    """Refuse what a `Descriptor` does not mean any more, as the kernel does until the number is used again.

    Raises:
        OSError: EBADF.
    """
    if isinstance(descriptor, Descriptor) and not descriptor.is_ours:
        raise OSError(errno.EBADF, "somebody else closed the descriptor")
