"""The ledger of one writer: the numbers of rows that were observed, written, dropped, passed and deleted.

Once all work is done, observed = written + dropped (for any reason) + passed. Rows have passed if they waited in memory
for a trigger, and no trigger asked for their step. `drop` is called from hooks, signal handlers and finalizers, so it
takes no lock and never waits. An error of the disk becomes a drop reason, a pause before the next attempt, and one log
line for each kind of trouble. The log never raises and never waits, because standard error may lie on the same sick
disk, or be a pipe that nobody reads.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

from ..system.log import LimitedLog

INTERRUPTED = "interrupted"
"""The drop reason for rows that got a number, but were interrupted before they were recorded or dropped."""
ABANDONED = "abandoned_at_close"
CLOSED = "closed"
WRITER_DEAD = "writer_dead"
WRITER_ERROR = "writer_error"
QUOTA = "quota"
DISK_FLOOR = "disk_floor"
DISK_FULL = "disk_full"
NO_MEMORY = "no_memory"
DUMP_BYTES = "dump_bytes"
"""The drop reason for rows of a dump that exceed the limit on the bytes of all dumps together."""
WRITE_ERROR = "write_error"
"""The prefix of the drop reasons for other disk errors. A colon and the name of the errno follow."""


class _Tally:
    """A counter that any thread may increment at any time. Advancing a C iterator is atomic under the GIL."""

    __slots__ = ("_ticks",)

    def __init__(self) -> None:
        self._ticks = itertools.count()

    def add(self, number: int) -> None:
        for _ in range(number):
            next(self._ticks)

    def value(self) -> int:
        """Return the count so far. It is read from the iterator's repr, which does not advance the iterator."""
        return int(repr(self._ticks).removeprefix("count(").removesuffix(")"))


class Ledger:
    """Counts rows until it is closed. From then on the counts add up, and only the count of suspect rows may change."""

    def __init__(self, observed: Callable[[], int]) -> None:
        """Begin at zero. `observed` returns the number of rows numbered so far, and may be called on any thread."""
        self._observed = observed
        self._dropped: dict[str, _Tally] = {}
        self._written = 0
        self._passed = 0
        self._retired_rows = 0
        self._retired_bytes = 0
        self._suspect = self._synced = 0
        self._lock = threading.RLock()
        """Guards counts that the writer changes while other code, even a signal handler, reads. `drop` is lock-free."""
        self._final: dict[str, Any] | None = None

    def drop(self, reason: str, num_rows: int = 1) -> None:
        """Count rows that will not be written. Called on any thread; re-entrant, never waits."""
        tally = self._dropped.get(reason)
        if tally is None:
            tally = self._dropped.setdefault(reason, _Tally())
        tally.add(num_rows)

    def add_written(self, num_rows: int) -> None:
        with self._lock:
            self._written += num_rows

    def add_passed(self, num_rows: int) -> None:
        """Count rows whose steps passed before a trigger asked for them. They do not count as lost."""
        with self._lock:
            self._passed += num_rows

    def add_retired(self, num_rows: int, num_bytes: int) -> None:
        with self._lock:
            self._retired_rows += num_rows
            self._retired_bytes += num_bytes

    def add_synced(self, num_rows: int) -> None:
        """Count written rows that a sync has made durable."""
        with self._lock:
            self._synced += num_rows

    def add_suspect(self, num_rows: int) -> None:
        """Count written rows that may not be durable. The last syncs may call this after `close`."""
        with self._lock:
            self._suspect += num_rows
            if self._final is not None and self._suspect:
                self._final = {**self._final, "suspect": self._suspect}

    def snapshot(self, *, about_to_write: int = 0) -> dict[str, Any]:
        """Return the counts as JSON-ready data. `about_to_write` rows, those of the next batch, count as written."""
        with self._lock:
            return self._final or self._accounts(about_to_write)

    def close(self, leftover_reason: str) -> dict[str, Any]:
        """Count unaccounted rows as dropped for `leftover_reason`, then freeze and return the counts."""
        with self._lock:
            if self._final is None:
                final = self._accounts(0)
                accounted = final["written"] + sum(final["dropped"].values()) + final.get("passed", 0)
                leftover = final["observed"] - accounted
                if leftover > 0:
                    final["dropped"][leftover_reason] = final["dropped"].get(leftover_reason, 0) + leftover
                self._final = final
            return self._final

    def _accounts(self, about_to_write: int) -> dict[str, Any]:
        # Drops are read before `observed`. A row is numbered before it is dropped, so drops never exceed `observed`.
        dropped = {reason: tally.value() for reason, tally in list(self._dropped.items())}
        return {
            "observed": self._observed(),
            "written": self._written + about_to_write,
            "dropped": {reason: count for reason, count in dropped.items() if count},
            **({"passed": self._passed} if self._passed else {}),
            "retired": {"rows": self._retired_rows, "bytes": self._retired_bytes},
            **({"suspect": self._suspect} if self._suspect else {}),
            **({"synced": self._synced} if self._synced else {}),
        }


class Notices(LimitedLog):
    """A log in which each kind of trouble appears at most once in five minutes. Writer thread only."""

    def failed(self, problem: str, error: BaseException, *, is_aside: bool = False) -> None:
        """Log a problem with its error, at most once in five minutes. OSErrors of one errno count as one problem.

        `is_aside` is True if no rows are lost. A line about such an error must not suppress a line about lost rows.
        """
        kind = f"{drop_reason(error)} {is_aside}" if isinstance(error, OSError) else problem
        self.say(kind, f"{problem} ({type(error).__name__}: {error})")

    @contextlib.contextmanager
    def on_error(self, problem: str, *, is_aside: bool = False) -> Iterator[None]:
        """Log an OSError that the ``with`` block raises, and suppress it."""
        try:
            yield
        except OSError as error:
            self.failed(problem, error, is_aside=is_aside)


_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 30.0


class Backoff:
    """A pause after a failure, doubled after each further failure. During the pause rows are dropped, for `reason`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.reason: str | None = None
        """The reason why the last attempt failed; None if it succeeded."""
        self._clock = clock
        self._pause_s = _FIRST_PAUSE_S
        self._until_s = float("-inf")

    @property
    def is_over(self) -> bool:
        """True once the pause is over, so that another attempt makes sense."""
        return self._clock() >= self._until_s

    def failed(self, reason: str) -> None:
        self.reason = reason
        self._until_s = self._clock() + self._pause_s
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)

    def succeeded(self) -> None:
        self.reason, self._pause_s, self._until_s = None, _FIRST_PAUSE_S, float("-inf")


def drop_reason(error: OSError) -> str:
    """Return the drop reason for rows that were lost to an error of the disk."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DISK_FULL
    if error.errno == errno.ENOMEM:
        return NO_MEMORY
    return f"{WRITE_ERROR}:{errno.errorcode.get(error.errno or 0, 'UNKNOWN')}"
