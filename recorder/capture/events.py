"""What happened that a person should know: said in the log, a few of each kind, and kept for `recorder doctor`.

Anyone may add; only the writer thread (or whoever ends the recording) says it, since a log handler may write to a slow
or full disk. Whatever such a handler raises ends here.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from .. import voice

_logger = logging.getLogger("recorder")
_MAX_KEPT_OF_A_KIND = 100
"""Events of a kind that the manifest keeps; the others are counted as one."""
_REST = "\0rest"
"""The key of those others."""
_MAX_LINES = 5
_WINDOW_S = 300.0
"""At most so many lines of a kind in so long; then one says how many more there were."""


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


class _Speech:
    """What was said of one kind lately."""

    __slots__ = ("level", "num_held", "num_said", "num_unkept", "since_s")

    def __init__(self, since_s: float) -> None:
        self.since_s = since_s
        self.num_said = 0
        self.num_held = 0
        """Not said, for there were enough."""
        self.num_unkept = 0
        """Of those without room of their own, how many are in `num_held` or said already."""
        self.level = logging.INFO


class Events:
    """A bounded list of events, each kind and key once with a count."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._kept: dict[tuple[str, str], dict[str, Any]] = {}
        self._num_kept: dict[str, int] = {}
        self._unsaid: deque[tuple[str, int, str, BaseException | None]] = deque()
        self._speeches: dict[str, _Speech] = {}
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
        """Log what was added since the last call: of each kind a few lines, then how many more there were.

        Args:
            is_last: no call will follow, so that nothing may be held back for later.
        """
        if not voice.can_say(_logger):
            return  # it stays unsaid; the manifest has it
        while self._unsaid:
            kind, level, message, exception = self._unsaid.popleft()
            speech = self._speech(kind)
            if speech.num_said >= _MAX_LINES:
                speech.num_held += 1
                speech.level = max(speech.level, level)
                continue
            speech.num_said += 1
            with contextlib.suppress(Exception):  # a handler may fail: it may write to the same sick disk
                voice.log(_logger, level, "recorder: %s", message)
                if exception is not None:
                    voice.log(_logger, logging.DEBUG, "where it happened", exc_info=exception)
        for kind in list(self._speeches):
            speech = self._speech(kind)  # it says the rest of an old one
            if is_last:
                self._say_rest(kind, speech)

    def as_list(self) -> list[dict[str, Any]]:
        """For the manifest."""
        return [dict(event) for event in list(self._kept.values())]

    def _speech(self, kind: str) -> _Speech:
        """What was said of this kind; a new one where that is long ago."""
        now = self._clock()
        speech = self._speeches.get(kind)
        if speech is None:
            speech = self._speeches[kind] = _Speech(now)
        elif now - speech.since_s >= _WINDOW_S:
            self._say_rest(kind, speech)
            speech.since_s, speech.num_said = now, 0
        return speech

    def _say_rest(self, kind: str, speech: _Speech) -> None:
        rest = self._kept.get((kind, _REST))
        num_unkept = rest["count"] if rest is not None else 0
        num_more, speech.num_held = speech.num_held + num_unkept - speech.num_unkept, 0
        speech.num_unkept = num_unkept
        if num_more:
            text = "recorder: and %d more of this kind (%s); recorder doctor lists them"
            with contextlib.suppress(Exception):
                voice.log(_logger, speech.level, text, num_more, kind)
