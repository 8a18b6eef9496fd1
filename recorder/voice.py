"""Owns one question: whether a line can be logged now without waiting for somebody to read it.

Standard error may be a pipe that is full and that nobody reads. What is said there in passing must not hold up the
thread that writes, nor the end of the process. Nothing here may write, or change anybody's logging.
"""

from __future__ import annotations

import logging
import select
import sys
import time
from collections.abc import Iterator
from typing import Any


def can_say(logger: logging.Logger, deadline_s: float = 0.0) -> bool:
    """Whether every stream that `logger` writes to takes a line now, or does before the deadline."""
    until_s = time.monotonic() + deadline_s
    return all(has_room(stream, max(until_s - time.monotonic(), 0.0)) for stream in _streams(logger))


def has_room(stream: Any, deadline_s: float) -> bool:
    """Whether a short text can be written to a stream without waiting; a pipe with any room takes a page at once."""
    if stream is None or getattr(stream, "closed", False):
        return False
    try:
        descriptor = stream.fileno()
    except (AttributeError, OSError, ValueError):
        return True  # a notebook's, a test's: no pipe that could be full
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    ready = poll.poll(1000 * deadline_s)
    return bool(ready) and not ready[0][1] & (select.POLLERR | select.POLLNVAL)


def _streams(logger: logging.Logger) -> Iterator[Any]:
    """Where its handlers write; standard error where it has none."""
    if not logger.hasHandlers():
        yield sys.stderr
    current: logging.Logger | None = logger
    while current is not None:
        for handler in current.handlers:
            stream = getattr(handler, "stream", None)
            if stream is not None:
                yield stream
        current = current.parent if current.propagate else None
