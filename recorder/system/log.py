"""Logs the package's lines through `logging`, never to standard output, and without waiting.

Standard output belongs to the program, and another program may parse it. Standard error may be a full pipe that nobody
reads. A line to it must delay neither the thread that writes it nor the end of the process. Nothing here may change the
program's logging.

Any thread may add an event. Only the writer thread, or the thread that ends the recording, logs it, because a log
handler may write to a slow or full disk. An exception of such a handler is not passed on.
"""

from __future__ import annotations

import contextlib
import logging
import select
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from .processes import loaded

_WINDOW_S = 300.0
"""The period in seconds for which a `LimitedLog` limits lines."""


def log(logger: logging.Logger, level: int, text: str, *args: object, exc_info: Any = None) -> None:
    """Log a line as `logger.log` does, but to standard error if a handler would write it to standard output.

    The line has the handler's format, and the handler's level and filters apply. If another handler writes the line to
    standard error anyway, the line appears once. If logging is not configured, lines of level WARNING or above go to
    standard error, as Python does, after the package's name. An exception of a program's handler is raised here.
    """
    if not logger.isEnabledFor(level):
        return
    handlers = list(_handlers(logger))
    if not handlers and logging.lastResort is not None:
        handlers = [_unconfigured]
    if not any(handler is _unconfigured or _writes_to_stdout(handler) for handler in handlers):
        if any(
            type(one) is logging.StreamHandler and one.stream is sys.stderr and level >= one.level for one in handlers
        ):
            _write("")
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
    if not aside or any(_stream(handler) is sys.stderr for handler in handlers):
        return
    for line in dict.fromkeys(handler.format(record) for handler in aside if handler.filter(record)):
        _write(f"{line}\n")


def _write(text: str) -> None:
    """Write lines to standard error, from the start of a line even if tqdm has drawn a bar on the current line.

    A terminal shows the bar again below the lines. tqdm's own `write` is not used: it takes a lock, for which a thread
    may have to wait.
    """
    if sys.stderr is not None:
        tqdm = loaded("tqdm.std", "tqdm")
        if tqdm is not None and getattr(tqdm, "_instances", None):
            text = ("\r\033[K" if sys.stderr.isatty() else "\n") + text
        sys.stderr.write(text)
        sys.stderr.flush()


class _OnStandardError(logging.Handler):
    """Stands in for `logging.lastResort`, whose lines do not name the package."""

    def emit(self, record: logging.LogRecord) -> None:
        _write(f"{self.format(record)}\n")


_unconfigured = _OnStandardError(logging.WARNING)
_unconfigured.setFormatter(logging.Formatter("recorder: %(message)s"))


def say(logger: logging.Logger, level: int, text: str, *args: object, exc_info: Any = None) -> None:
    """Log a line as `log` does, but ignore exceptions of the program's handlers. Their disk may be failing, too."""
    with contextlib.suppress(Exception):
        log(logger, level, text, *args, exc_info=exc_info)


def tell(
    logger: logging.Logger,
    lines: Callable[[], Sequence[str]],
    deadline_s: float,
    is_first: Callable[[], bool] = lambda: True,
) -> None:
    """Log lines at level INFO that users see even if logging is not configured.

    If it is not configured, the lines go to standard error. Otherwise the user's levels and handlers decide, except
    that a handler for standard output writes to standard error. `lines` is called once the streams have room, within
    `deadline_s`. `is_first` is called last, and returns False if another thread has begun to write.
    """
    with contextlib.suppress(Exception):
        root = logging.getLogger()
        is_configured = (
            logger.hasHandlers()
            or logger.level != logging.NOTSET
            or root.level != logging.WARNING
            or root.manager.disable >= logging.INFO
        )
        if (is_configured and not logger.isEnabledFor(logging.INFO)) or not can_say(logger, deadline_s):
            return
        texts = lines()
        if not is_first():
            return
        if is_configured:
            for line in texts:
                log(logger, logging.INFO, "%s", line)
        else:
            _write("".join(f"recorder: {line}\n" for line in texts))


class LimitedLog:
    """A log with at most `max_lines` lines of each kind per five minutes. Used by one thread."""

    def __init__(self, logger: logging.Logger, clock: Callable[[], float], *, max_lines: int = 1) -> None:
        """Make a log in which no line is logged yet. `clock` returns seconds."""
        self._logger = logger
        self._clock = clock
        self._max_lines = max_lines
        self._windows: dict[str, tuple[float, int]] = {}
        """For each kind of line: the start of the kind's current five minutes, and the number of lines logged since."""

    def say(
        self, kind: str, message: str, *, level: int = logging.WARNING, exception: BaseException | None = None
    ) -> bool:
        """Log `message`, and at DEBUG the traceback. Return False if the limit or a full stream prevents it."""
        self.begin_anew(kind)
        since_s, num_said = self._windows.get(kind, (self._clock(), 0))
        if num_said >= self._max_lines or not can_say(self._logger):
            return False
        self._windows[kind] = since_s, num_said + 1
        say(self._logger, level, "%s", message)
        if exception is not None:
            say(self._logger, logging.DEBUG, "where it happened", exc_info=exception)
        return True

    def begin_anew(self, kind: str) -> bool:
        """Begin the next five minutes of a kind if the current ones are over. Return True if they were over."""
        now = self._clock()
        if now - self._windows.get(kind, (now, 0))[0] < _WINDOW_S:
            return False
        self._windows[kind] = now, 0
        return True


def can_say(logger: logging.Logger, deadline_s: float = 0.0) -> bool:
    """Whether all streams of `logger` can take a line now, or before the deadline."""
    until_s = time.monotonic() + deadline_s
    return all(has_room(stream, max(until_s - time.monotonic(), 0.0)) for stream in _streams(logger))


def has_room(stream: Any, deadline_s: float) -> bool:
    """Whether a short text can be written to a stream without waiting. A pipe that is not full takes a page at once."""
    if stream is None or getattr(stream, "closed", False):
        return False
    try:
        descriptor = stream.fileno()
    except (AttributeError, OSError, ValueError):
        return True  # a stream of a notebook or a test has no descriptor, and is never full
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    ready = poll.poll(1000 * deadline_s)
    return bool(ready) and not ready[0][1] & (select.POLLERR | select.POLLNVAL)


def _streams(logger: logging.Logger) -> Iterator[Any]:
    """Yield the streams to which `logger` writes. Without handlers this is standard error."""
    if not logger.hasHandlers():
        yield sys.stderr
    for handler in _handlers(logger):
        stream = _stream(handler)
        if stream is not None:
            yield sys.stderr if _writes_to_stdout(handler) else stream


def _handlers(logger: logging.Logger) -> Iterator[logging.Handler]:
    current: logging.Logger | None = logger
    while current is not None:
        yield from current.handlers
        current = current.parent if current.propagate else None


def _stream(handler: logging.Handler) -> Any:
    """Return the stream of a handler. The handler of rich has its stream in a console."""
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


_logger = logging.getLogger("recorder")
_MAX_KEPT_OF_A_KIND = 100
"""The most events of one kind that the manifest lists. Later events share one entry with a count."""
_REST = "\0rest"
"""The key of the shared entry for events of a kind that have no entry of their own."""
_MAX_LINES = 5
"""The most lines of one kind in five minutes. One more line says how many were suppressed."""


@dataclass(slots=True)
class _HeldBack:
    """The events of one kind that were not logged because of the limit."""

    num_lines: int = 0
    num_unkept: int = 0
    """The number of events without own entries that the logged counts include so far."""
    level: int = logging.INFO


class Events:
    """A bounded list of events. Equal kinds and keys share one entry with a count."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._kept: dict[tuple[str, str], dict[str, Any]] = {}
        self._num_kept: dict[str, int] = {}
        self._unsaid: deque[tuple[str, int, str, BaseException | None]] = deque()
        self._log = LimitedLog(_logger, clock, max_lines=_MAX_LINES)
        self._held: dict[str, _HeldBack] = {}
        self.has_changed = False

    def add(
        self,
        kind: str,
        message: str,
        *,
        key: str = "",
        level: int = logging.WARNING,
        exception: BaseException | None = None,
        whose: str = "",
    ) -> None:
        """Add an event. The first of its kind and key will be logged, after `whose`. Any thread; never waits."""
        known = self._kept.get((kind, key)) or self._kept.get((kind, _REST))
        if known is not None:
            known["count"] += 1
            return
        num_kept = self._num_kept[kind] = self._num_kept.get(kind, 0) + 1
        is_last = num_kept > _MAX_KEPT_OF_A_KIND
        if is_last:
            key, message = _REST, "more events of this kind, which are only counted"
        self._kept[kind, key] = {"kind": kind, "message": message, "time_ns": time.time_ns(), "count": 1}
        if not is_last:
            self._unsaid.append((kind, level, whose + message, exception))
        self.has_changed = True

    def say(self, *, is_last: bool = False) -> None:
        """Log the events since the last call: some lines of each kind, then a count. `is_last`: log all counts now."""
        if not can_say(_logger):
            return  # the event is not logged, but the manifest has it
        while self._unsaid:
            kind, level, message, exception = self._unsaid.popleft()
            held = self._held.setdefault(kind, _HeldBack())
            if self._log.begin_anew(kind):
                self._say_rest(kind, held)
            if not self._log.say(kind, message, level=level, exception=exception):
                held.num_lines += 1
                held.level = max(held.level, level)
        for kind, held in self._held.items():
            if self._log.begin_anew(kind) or is_last:
                self._say_rest(kind, held)

    def as_list(self) -> list[dict[str, Any]]:
        return [dict(event) for event in list(self._kept.values())]

    def _say_rest(self, kind: str, held: _HeldBack) -> None:
        rest = self._kept.get((kind, _REST))
        num_unkept = rest["count"] if rest is not None else 0
        num_more, held.num_lines = held.num_lines + num_unkept - held.num_unkept, 0
        held.num_unkept = num_unkept
        if num_more:
            text = "and %d more of this kind (%s); recorder doctor lists them"
            say(_logger, held.level, text, num_more, kind)
