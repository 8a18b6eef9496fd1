"""The thread on which the writer's syncs run, so that a sync that hangs holds up nothing else.

A file whose sync has failed or was given up must never be synced again: the caller knows which files these are.
"""

from __future__ import annotations

import contextlib
import errno
import queue
import threading
import time
from collections.abc import Callable

_LONGEST_S = 10.0
"""How long the writer waits for a sync, while the pool takes the new records."""
_SHORTEST_S = 0.05
_END_S = 0.2


class StuckError(TimeoutError):
    """An earlier sync has not come back, so that nothing was synced; the call may be repeated."""


class SyncThread:
    """Runs one sync at a time. Only the writer thread calls methods other than `hurry`."""

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
            StuckError: the sync was not tried.
            OSError: the sync failed, or (`ETIMEDOUT`) its result is not known yet.
        """
        if self._given_up is not None and not self._given_up.is_done.is_set():
            raise StuckError(errno.ETIMEDOUT, "an earlier sync has not come back")
        self._given_up = None
        if not self._runs():
            sync()
            return
        request = _Sync(sync)
        self._work.put(request)
        left_s = self._until_s - time.monotonic()
        longest_s = min(_LONGEST_S, max(left_s, _SHORTEST_S)) if left_s > 0 else _LONGEST_S  # then nobody waits
        if not request.is_done.wait(longest_s):
            self._given_up = request
            raise TimeoutError(errno.ETIMEDOUT, f"a sync has not come back within {longest_s:.1f} s")
        if request.error is not None:
            raise request.error

    def stop(self) -> None:
        """End the thread; a thread that hangs in a sync is left behind."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._work.put(None)
            thread.join(_END_S)

    def _runs(self) -> bool:
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="recorder-sync", daemon=True)
            with contextlib.suppress(RuntimeError):  # no thread is left: the writer syncs itself
                thread.start()
                self._thread = thread
        return self._thread is not None

    def _run(self) -> None:
        while (request := self._work.get()) is not None:
            try:
                request.sync()
            except BaseException as error:
                request.error = error
            request.is_done.set()


class _Sync:
    def __init__(self, sync: Callable[[], None]) -> None:
        self.sync = sync
        self.error: BaseException | None = None
        self.is_done = threading.Event()
