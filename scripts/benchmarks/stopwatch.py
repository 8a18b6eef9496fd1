"""The one stopwatch: wall time, and CPU time by thread, of the process that it runs in. Never imports `recorder`."""

from __future__ import annotations

import threading
import time
from typing import NamedTuple

WRITER_THREAD = "recorder-writer"
THREADS = ("training", "writer", "others")


class Lap(NamedTuple):
    """What passed since the start."""

    wall_s: float
    cpu_s: dict[str, float]
    """CPU seconds of `THREADS`: the one that asks, the recorder's writer, all others together."""

    @property
    def total_cpu_s(self) -> float:
        return sum(self.cpu_s.values())


class Stopwatch:
    """Runs from when it is made. Use it on the training thread alone."""

    def __init__(self) -> None:
        self._started_s = time.perf_counter()
        self._before = cpu_by_thread()

    def lap(self) -> Lap:
        wall_s, now = time.perf_counter() - self._started_s, cpu_by_thread()
        return Lap(wall_s, {name: max(0.0, now[name] - self._before[name]) for name in THREADS})


def cpu_by_thread() -> dict[str, float]:
    """CPU seconds so far."""
    training_s, total_s, writer_s = time.thread_time(), time.process_time(), 0.0
    for thread in threading.enumerate():
        if thread.name == WRITER_THREAD and thread.ident is not None:
            try:
                writer_s += time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
            except OSError:  # it has just ended
                continue
    return {"training": training_s, "writer": writer_s, "others": total_s - training_s - writer_s}
