"""SIGTERM: what is in memory reaches the disk before the process goes, as it would have gone without us.

Only where nobody else handles the signal, or by chaining to who does. The main thread may be stuck in a collective and
never run a Python handler; then the writer thread, which reads the wake-up pipe, ends the process by the same signal.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

_MAIN_THREAD_GRACE_S = 0.5
"""How long the main thread has to run its handler before the writer thread acts."""


class TerminationWatch:
    """The handler of SIGTERM while a recording runs."""

    def __init__(self, *, flush: Callable[[], object], finish: Callable[[], object]) -> None:
        """Nothing happens before `install`.

        Args:
            flush: bring what is in memory to disk; bounded in time, any thread.
            finish: the same and end the recording; the process is about to go.
        """
        self._flush = flush
        self._finish = finish
        self._previous: Any = None
        self._is_installed = False
        self._pipe: tuple[int, int] | None = None
        self._seen_s: float | None = None
        self._is_handled = False
        self._pid = os.getpid()

    def install(self) -> None:
        """Take over SIGTERM's default action or chain to a Python handler; only the main thread can."""
        if threading.current_thread() is not threading.main_thread():
            return
        previous = signal.getsignal(signal.SIGTERM)
        if previous is None or previous is signal.SIG_IGN:
            return
        self._previous = previous
        signal.signal(signal.SIGTERM, self._handle)
        self._is_installed = True
        read_end, write_end = os.pipe()
        os.set_blocking(read_end, False)
        os.set_blocking(write_end, False)
        other = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        if other != -1:  # an event loop needs it more than we do
            signal.set_wakeup_fd(other)
            os.close(read_end)
            os.close(write_end)
        else:
            self._pipe = read_end, write_end

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._is_handled = True
        if callable(self._previous):
            if os.getpid() == self._pid:
                self._flush()
            self._previous(number, frame)
            self._is_handled = False
            return
        if os.getpid() == self._pid:
            self._finish()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)

    def poll(self) -> None:
        """On the writer thread: notice a SIGTERM that the main thread does not get to."""
        if self._pipe is None or callable(self._previous):
            return
        now = time.monotonic()
        if self._seen_s is None:
            with contextlib.suppress(BlockingIOError):
                if signal.SIGTERM in os.read(self._pipe[0], 4096):
                    self._seen_s = now
                    threading.Thread(target=self._end_process, name="recorder-sigterm", daemon=True).start()

    def _end_process(self) -> None:
        """The main thread is stuck, perhaps in a collective: flush, then die of the same signal."""
        time.sleep(_MAIN_THREAD_GRACE_S)
        if self._is_handled or not self._is_installed:
            return
        self._finish()
        ctypes.CDLL(None).signal(int(signal.SIGTERM), 0)  # SIG_DFL; signal.signal works in the main thread only
        os.kill(os.getpid(), signal.SIGTERM)

    def uninstall(self) -> None:
        """Give the signal back, unless someone else has taken it since."""
        if not self._is_installed:
            return
        self._is_installed = False
        with contextlib.suppress(ValueError):  # not the main thread: the handler stays and only chains
            if signal.getsignal(signal.SIGTERM) == self._handle:
                signal.signal(signal.SIGTERM, self._previous)
            if self._pipe is not None:
                current = signal.set_wakeup_fd(-1)
                if current != self._pipe[1]:
                    signal.set_wakeup_fd(current)
        if self._pipe is not None:
            for end in self._pipe:
                os.close(end)
            self._pipe = None

    def abandon(self) -> None:
        """In a forked child: the default action again, and no byte into the parent's pipe."""
        if self._is_installed:
            self._is_installed = False
            with contextlib.suppress(ValueError):
                if signal.getsignal(signal.SIGTERM) == self._handle:
                    signal.signal(signal.SIGTERM, self._previous)
                signal.set_wakeup_fd(-1)
            if self._pipe is not None:
                for end in self._pipe:
                    os.close(end)
                self._pipe = None
