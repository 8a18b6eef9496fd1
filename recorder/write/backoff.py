"""The response to an error of the disk: the reason for the ledger, and a pause before the next attempt."""

from __future__ import annotations

import errno
from collections.abc import Callable

from .ledger import DISK_FULL, NO_MEMORY, WRITE_ERROR

_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 30.0


class Backoff:
    """The reason why rows are dropped for now, and the end of the pause, which each failure in a row doubles."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.reason: str | None = None
        """The reason why the last attempt failed; None where it succeeded."""
        self._clock = clock
        self._pause_s = _FIRST_PAUSE_S
        self._until_s = float("-inf")

    @property
    def is_over(self) -> bool:
        """Whether the pause is over, so that another attempt is worth it."""
        return self._clock() >= self._until_s

    def failed(self, reason: str) -> None:
        self.reason = reason
        self._until_s = self._clock() + self._pause_s
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)

    def succeeded(self) -> None:
        self.reason, self._pause_s, self._until_s = None, _FIRST_PAUSE_S, float("-inf")


def drop_reason(error: OSError) -> str:
    """Return the reason in the ledger for rows that were lost to an error of the disk."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DISK_FULL
    if error.errno == errno.ENOMEM:
        return NO_MEMORY
    return f"{WRITE_ERROR}:{errno.errorcode.get(error.errno or 0, 'UNKNOWN')}"
