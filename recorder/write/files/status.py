"""`_status.json` of one writer directory, for people who watch the writer. Writer thread only.

An error of the disk leaves a stale status and nothing else: it is neither logged nor counted, and nothing waits.
"""

from __future__ import annotations

import contextlib
import errno
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ...format.rundir import STATUS, encode_status
from .file import Disk

_RECENT_S = 10.0
"""Rates are taken over about this time: a step may take seconds."""


class StatusFile:
    """The status file, which one write replaces in place, without sync or rename; it takes one block of the disk."""

    def __init__(self, disk: Disk, clock: Callable[[], float]) -> None:
        self._disk = disk
        self._clock = clock
        self._descriptor: int | None = None
        self._samples: deque[tuple[float, int, int]] = deque()
        """Samples of time, step and bytes written; the first is at least `_RECENT_S` old, if any is."""

    def write(self, directory: Path, status: Mapping[str, Any], *, written_bytes: int) -> None:
        """Write the members of `status` (with ``step``), and how fast step and bytes grow."""
        status = {
            **status,
            "time_ns": time.time_ns(),
            "written_bytes": written_bytes,
            "recent": self._recent(status["step"], written_bytes),
        }
        try:
            if self._descriptor is None:
                self._descriptor = self._disk.create(directory / STATUS)
            self._disk.write(self._descriptor, memoryview(encode_status(status)), 0)
        except OSError as error:
            if error.errno == errno.EBADF:  # somebody closed it: the next write makes another
                self._descriptor = None
                with contextlib.suppress(OSError):
                    self._disk.unlink(directory / STATUS)

    def close(self) -> None:
        """Close the file; a later `write` finds its name taken, and does nothing."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            with contextlib.suppress(OSError):
                self._disk.close(descriptor)

    def _recent(self, step: int, written_bytes: int) -> dict[str, float]:
        samples, now = self._samples, self._clock()
        samples.append((now, step, written_bytes))
        while len(samples) > 2 and now - samples[1][0] >= _RECENT_S:
            samples.popleft()
        since_s, old_step, old_bytes = samples[0]
        return {
            "seconds": round(now - since_s, 3),
            "steps": max(step - old_step, 0),
            "bytes": max(written_bytes - old_bytes, 0),
        }
