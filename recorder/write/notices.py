"""Owns what the writer says in the log: one line for each kind of trouble, and again after a while, never more.

It never raises and never waits: standard error may lie on the same sick disk, or be a pipe that nobody reads.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator

from ..voice import can_say, log
from .backoff import drop_reason

_SILENCE_S = 300.0


class Notices:
    """A log in which each kind of message appears at most once in five minutes. Writer thread only."""

    def __init__(self, logger: logging.Logger, clock: Callable[[], float]) -> None:
        self._logger = logger
        self._clock = clock
        self._last_s: dict[str, float] = {}

    def say(self, kind: str, message: str, *, level: int = logging.WARNING) -> None:
        """Log `message` unless one of its kind was logged lately."""
        now = self._clock()
        if now - self._last_s.get(kind, float("-inf")) < _SILENCE_S or not can_say(self._logger):
            return
        self._last_s[kind] = now
        with contextlib.suppress(Exception):
            log(self._logger, level, "recorder: %s", message)

    def failed(self, what: str, error: BaseException, *, is_aside: bool = False) -> None:
        """Log that something failed, once for each kind of failure.

        Args:
            what: what could not be done, and what follows.
            error: why; what the disk refuses has the kind of its errno, whatever was tried.
            is_aside: no rows are lost by it. A first line of that sort must not silence one of the other.
        """
        kind = f"{drop_reason(error)} {is_aside}" if isinstance(error, OSError) else what
        self.say(kind, f"{what} ({type(error).__name__}: {error})")

    @contextlib.contextmanager
    def on_error(self, what: str, *, is_aside: bool = False) -> Iterator[None]:
        """Log an OSError of the body and go on after it."""
        try:
            yield
        except OSError as error:
            self.failed(what, error, is_aside=is_aside)
