"""Owns how the library says something: through `logging`, but never on standard output, and without waiting.

Standard output is the program's: somebody may parse it. Standard error may be a pipe that is full and that nobody
reads: what is said there in passing must not hold up the thread that writes, nor the end of the process. Nothing here
may change anybody's logging.
"""

from __future__ import annotations

import logging
import select
import sys
import time
from collections.abc import Iterator
from typing import Any


def log(logger: logging.Logger, level: int, text: str, *args: object, exc_info: Any = None) -> None:
    """Log a line, as `logger.log` does; what a handler would write to standard output goes to standard error.

    The line has the format that the handler gives it, and the handler's level and filters decide. Where another handler
    writes the line to standard error anyway, it stands there once.

    Raises:
        Exception: as handlers of the program may.
    """
    if not logger.isEnabledFor(level):
        return
    handlers = list(_handlers(logger))
    if not any(map(_writes_to_stdout, handlers)):
        logger.log(level, text, *args, exc_info=exc_info, stacklevel=2)
        return
    if isinstance(exc_info, BaseException):
        exc_info = (type(exc_info), exc_info, exc_info.__traceback__)
    record = logger.makeRecord(logger.name, level, __file__, 0, text, args, exc_info)
    if not logger.filter(record):
        return
    handlers = [handler for handler in handlers if level >= handler.level]
    aside = [handler for handler in handlers if _writes_to_stdout(handler)]
    for handler in handlers:
        if handler not in aside:
            handler.handle(record)
    if any(_stream(handler) is sys.stderr for handler in handlers):
        return
    for line in dict.fromkeys(handler.format(record) for handler in aside if handler.filter(record)):
        if sys.stderr is not None:
            sys.stderr.write(f"{line}\n")
            sys.stderr.flush()


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
    """Where a line of it is written; standard error where it has no handlers."""
    if not logger.hasHandlers():
        yield sys.stderr
    for handler in _handlers(logger):
        stream = _stream(handler)
        if stream is not None:
            yield sys.stderr if _writes_to_stdout(handler) else stream


def _handlers(logger: logging.Logger) -> Iterator[logging.Handler]:
    """Its own, and those of the loggers above that it hands its lines on to."""
    current: logging.Logger | None = logger
    while current is not None:
        yield from current.handlers
        current = current.parent if current.propagate else None


def _stream(handler: logging.Handler) -> Any:
    """What a handler writes to; rich's has a console in between."""
    stream = getattr(handler, "stream", None)
    return stream if stream is not None else getattr(getattr(handler, "console", None), "file", None)


def _writes_to_stdout(handler: logging.Handler) -> bool:
    stream = _stream(handler)
    if stream is None or stream is sys.stderr:
        return False
    if stream is sys.stdout or stream is sys.__stdout__:
        return True
    try:
        return bool(stream.fileno() == 1)
    except (AttributeError, OSError, ValueError):
        return False
