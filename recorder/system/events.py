"""Events that a person should know of: a few of each kind are logged, and all are kept for `recorder doctor`.

Any thread may add an event; only the writer thread (or whoever ends the recording) logs it, since a log handler may
write to a slow or full disk. Whatever such a handler raises ends here.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from . import log

_logger = logging.getLogger("recorder")
_MAX_KEPT_OF_A_KIND = 100
"""Events of one kind that the manifest lists; later ones share a single entry with a count."""
_REST = "\0rest"
"""The key of that single entry."""
_MAX_LINES = 5
"""Lines of one kind that are logged in five minutes; one more line says how many were held back."""


class _Held:
    """The events of one kind that were held back, because enough lines were logged."""

    __slots__ = ("level", "num_lines", "num_unkept")

    def __init__(self) -> None:
        self.num_lines = 0
        self.num_unkept = 0
        """Events without an entry of their own that a line has already counted."""
        self.level = logging.INFO


class Events:
    """A bounded list of events, in which each kind and key stands once, with a count."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._kept: dict[tuple[str, str], dict[str, Any]] = {}
        self._num_kept: dict[str, int] = {}
        self._unsaid: deque[tuple[str, int, str, BaseException | None]] = deque()
        self._log = log.LimitedLog(_logger, clock, max_lines=_MAX_LINES)
        self._held: dict[str, _Held] = {}
        self.has_changed = False

    def add(
        self,
        kind: str,
        message: str,
        *,
        key: str = "",
        level: int = logging.WARNING,
        exception: BaseException | None = None,
    ) -> None:
        """Note an event; the first of its kind and key will be logged. Any thread, never blocks."""
        known = self._kept.get((kind, key)) or self._kept.get((kind, _REST))
        if known is not None:
            known["count"] += 1
            return
        num_kept = self._num_kept[kind] = self._num_kept.get(kind, 0) + 1
        is_last = num_kept > _MAX_KEPT_OF_A_KIND
        if is_last:
            key, message = _REST, "more of this kind, which are only counted"
        self._kept[kind, key] = {"kind": kind, "message": message, "time_ns": time.time_ns(), "count": 1}
        if not is_last:
            self._unsaid.append((kind, level, message, exception))
        self.has_changed = True

    def say(self, *, is_last: bool = False) -> None:
        """Log the events that were added since the last call: a few lines of each kind, then how many more there were.

        Args:
            is_last: no call will follow, so that nothing may be held back for later.
        """
        if not log.can_say(_logger):
            return  # it stays unsaid; the manifest has it
        while self._unsaid:
            kind, level, message, exception = self._unsaid.popleft()
            held = self._held.setdefault(kind, _Held())
            if self._log.begin_anew(kind):
                self._say_rest(kind, held)
            if not self._log.say(kind, message, level=level, exception=exception):
                held.num_lines += 1
                held.level = max(held.level, level)
        for kind, held in self._held.items():
            if self._log.begin_anew(kind) or is_last:
                self._say_rest(kind, held)

    def as_list(self) -> list[dict[str, Any]]:
        """Return all events, as the manifest lists them."""
        return [dict(event) for event in list(self._kept.values())]

    def _say_rest(self, kind: str, held: _Held) -> None:
        rest = self._kept.get((kind, _REST))
        num_unkept = rest["count"] if rest is not None else 0
        num_more, held.num_lines = held.num_lines + num_unkept - held.num_unkept, 0
        held.num_unkept = num_unkept
        if num_more:
            text = "and %d more of this kind (%s); recorder doctor lists them"
            log.say(_logger, held.level, text, num_more, kind)
