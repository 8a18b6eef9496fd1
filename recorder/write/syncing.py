"""Owns the thread on which the writer's syncs run, so that one that never comes back holds up nothing but itself.

It must never sync a file again whose sync has failed or was given up: the caller knows which these are.
"""

from __future__ import annotations

import contextlib
import errno
import queue
import threading
import time
from collections.abc import Callable

_LONGEST_S = 10.0
"""How long a sync is waited for. The pool takes what training makes meanwhile; a machine may be that busy."""
_SHORTEST_S = 0.05
_END_S = 0.2


class StuckError(TimeoutError):
    """Nothing was synced, because an earlier sync has not come back: this one may be tried again."""


class SyncThread:
    """Runs one sync at a time. All methods but `hurry` are the writer thread's."""

    def __init__(self) -> None:
        self._until_s = float("inf")
        self._work: queue.SimpleQueue[_Sync | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._given_up: _Sync | None = None

    def hurry(self, until_s: float) -> None:
        """Wait for no sync beyond this time of `time.monotonic`. Any thread."""
        self._until_s = until_s

    def do(self, sync: Callable[[], None]) -> None:
        """Sync, and wait for it a bounded time.

        Raises:
            StuckError: it was not tried.
            OSError: it failed, or (`ETIMEDOUT`) nobody knows yet.
        """
        if self._given_up is not None and not self._given_up.is_done.is_set():
            raise StuckError(errno.ETIMEDOUT, "an earlier sync has not come back")
        self._given_up = None
        if not self._runs():
            sync()
            return
        one = _Sync(sync)
        self._work.put(one)
        left_s = self._until_s - time.monotonic()
        longest_s = min(_LONGEST_S, max(left_s, _SHORTEST_S)) if left_s > 0 else _LONGEST_S  # then nobody waits
        if not one.is_done.wait(longest_s):
            self._given_up = one
            raise TimeoutError(errno.ETIMEDOUT, f"a sync has not come back within {longest_s:.1f} s")
        if one.error is not None:
            raise one.error

    def stop(self) -> None:
        """End the thread; one that hangs is left behind."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._work.put(None)
            thread.join(_END_S)

    def _runs(self) -> bool:
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="recorder-sync", daemon=True)
            with contextlib.suppress(RuntimeError):  # no thread to be had: the writer waits itself
                thread.start()
                self._thread = thread
        return self._thread is not None

    def _run(self) -> None:
        while (one := self._work.get()) is not None:
            try:
                one.sync()
            except BaseException as error:
                one.error = error
            one.is_done.set()


class _Sync:
    def __init__(self, sync: Callable[[], None]) -> None:
        self.sync = sync
        self.error: BaseException | None = None
        self.is_done = threading.Event()
