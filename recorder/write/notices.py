"""Owns what the writer says in the log: one line for each kind of trouble, and again after a while, never more.

It never raises: standard error may lie on the same sick disk.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator

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
        if now - self._last_s.get(kind, float("-inf")) < _SILENCE_S:
            return
        self._last_s[kind] = now
        with contextlib.suppress(Exception):
            self._logger.log(level, "recorder: %s", message)

    def failed(self, what: str, error: BaseException) -> None:
        """Log that something failed, once for each kind of failure."""
        self.say(what, f"{what} ({type(error).__name__}: {error})")

    @contextlib.contextmanager
    def on_error(self, what: str) -> Iterator[None]:
        """Log an OSError of the body and go on after it."""
        try:
            yield
        except OSError as error:
            self.failed(what, error)
