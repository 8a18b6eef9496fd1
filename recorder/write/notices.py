"""The log of the writer: one line for each kind of trouble, and one more after a while.

It never raises and never waits: standard error may lie on the same sick disk, or be a pipe that nobody reads.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from ..system.log import LimitedLog
from .backoff import drop_reason


class Notices(LimitedLog):
    """A log in which each kind of trouble appears at most once in five minutes. Writer thread only."""

    def failed(self, problem: str, error: BaseException, *, is_aside: bool = False) -> None:
        """Log that something failed, once for each kind of failure.

        Args:
            problem: the thing that failed, and the consequence.
            error: the cause; errors of the disk have the kind of their errno, whatever was tried.
            is_aside: True where no rows are lost. A first line of that sort must not silence a line about lost rows.
        """
        kind = f"{drop_reason(error)} {is_aside}" if isinstance(error, OSError) else problem
        self.say(kind, f"{problem} ({type(error).__name__}: {error})")

    @contextlib.contextmanager
    def on_error(self, problem: str, *, is_aside: bool = False) -> Iterator[None]:
        """Log an OSError of the body and go on after it."""
        try:
            yield
        except OSError as error:
            self.failed(problem, error, is_aside=is_aside)
