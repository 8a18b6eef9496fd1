"""What the shippers of all runs share: the destination, the settings, and the account of what goes wrong."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ...errors import RunError, StoreError
from ..counters import Counters, Health
from ..destination import DamagedError, Destination
from ..settings import DaemonSettings
from ..watching import RefusedError

logger = logging.getLogger("recorder.daemon")

LOOK_S = 2.0
"""How often a writer at work is looked at, where `fresh_s` allows that."""


@dataclass(slots=True, kw_only=True)
class Shipping:
    """What all runs share."""

    destination: Destination
    settings: DaemonSettings
    counters: Counters = field(default_factory=Counters)
    health: Health = field(default_factory=Health)
    node: str = ""
    """The name of this node at the destination; the daemon sets it before it ships a run."""
    is_stopping: Callable[[], bool] = lambda: False
    is_over: Callable[[], bool] = lambda: False
    """Whether a stop has waited for as long as it may: the processes of errands end at once."""
    is_once: bool = False
    """Whether open shards go as they are, because there may be no other time."""
    at_once: Any = field(default_factory=threading.Lock)
    """Held while a snapshot of many bytes is in memory."""
    said: dict[str, str] = field(default_factory=dict)
    """The last error of each run, so that a job that fails again and again is said once."""

    @property
    def look_s(self) -> float:
        """How often a writer at work is looked at, seconds."""
        return min(LOOK_S, self.settings.fresh_s / 5)

    def uploaded(self, kind: str, num_bytes: int) -> None:
        """Count an object that was put."""
        self.counters.add("uploads", kind)
        self.counters.add("uploaded_bytes", kind, num_bytes)

    def refused(self, error: RefusedError) -> None:
        """Count a file that is not what its name says, and log it."""
        self.counters.add("refused_files", "content")
        logger.error("%s; it is not shipped", error)

    def failed(self, error: Exception, where: str) -> None:
        """Count an error of a job and log it once; the job is tried again."""
        kind = error.kind if isinstance(error, StoreError) else "internal"
        kind = "local" if isinstance(error, (OSError, RunError, RefusedError)) else kind
        kind = "damaged" if isinstance(error, DamagedError) else kind
        self.counters.add("errors", kind)
        if isinstance(error, StoreError):
            is_first = not self.health.problem
            self.health.failed(str(error))
            if kind in ("refused", "anonymous"):
                self.destination.renew()
            if is_first:
                logger.warning("the store fails, and is tried again: %s", error, extra={"kind": kind, "where": where})
        elif not isinstance(error, FileNotFoundError):
            text, is_ours = f"{type(error).__name__}: {error}", kind == "internal"
            if self.said.get(where) != text:
                self.said[where] = text
                logger.warning("%s: %s", where, text, exc_info=error if is_ours else None)
            if kind == "damaged":
                self.health.failed(text)
