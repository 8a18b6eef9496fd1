"""A lock on a folder, for work that two processes must not do there at once. It writes nothing there."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from ..errors import WriteError


@contextlib.contextmanager
def locked_folder(folder: Path, work: str) -> Iterator[None]:
    """Keep other processes from the same work in a folder; on a file system without locks nothing keeps them.

    Args:
        folder: where; it exists.
        work: what it is, such as ``merge``, for the message.

    Raises:
        WriteError: another process is at this work there.
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
