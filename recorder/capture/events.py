"""What happened that a person should know: each said once in the log and kept for `recorder doctor`.

Anyone may add; only the writer thread (or whoever ends the recording) says it, since a log handler may write to a slow
or full disk.
"""

from __future__ import annotations

import logging
import signal
import time
from collections import deque
from typing import Any

_logger = logging.getLogger("recorder")
_MAX_KEPT = 200
"""Events that the manifest keeps; later kinds are still counted."""


def comes_from_signal_handler(error: BaseException) -> bool:
    """Whether a signal handler of the user raised this while our code happened to run: it is not ours to catch."""
    handlers = (signal.getsignal(number) for number in signal.valid_signals())
    codes = {code for handler in handlers if (code := getattr(handler, "__code__", None)) is not None}
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code in codes:
            return True
        trace = trace.tb_next
    return False


class Events:
    """A bounded list of events, each kind and key once with a count."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, str], dict[str, Any]] = {}
        self._unsaid: deque[tuple[int, str, BaseException | None]] = deque()
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
        known = self._kept.get((kind, key))
        if known is not None:
            known["count"] += 1
            return
        if len(self._kept) >= _MAX_KEPT:
            return
        self._kept[kind, key] = {"kind": kind, "message": message, "time_ns": time.time_ns(), "count": 1}
        self._unsaid.append((level, message, exception))
        self.has_changed = True

    def say(self) -> None:
        """Log what was added since the last call."""
        while self._unsaid:
            level, message, exception = self._unsaid.popleft()
            _logger.log(level, "recorder: %s", message)
            if exception is not None:
                _logger.debug("where it happened", exc_info=exception)

    def as_list(self) -> list[dict[str, Any]]:
        """For the manifest."""
        return [dict(event) for event in list(self._kept.values())]
