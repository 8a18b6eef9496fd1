"""A mapper that has any executor work on the ranges of a question: processes, a Dask cluster, Ray.

A worker gets names, options and ranges of steps, and opens runs itself; rows and payloads of a run never go to it.
"""

from __future__ import annotations

import copyreg
import logging
import pickle
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from typing import Any, TypeVar

from ..globalview.reopening import ChangedError, RunAsOpened
from ..globalview.run import Run
from ..system.executors import keep
from .step_ranges import Mapper

_RANGES_PER_WORKER = 2
"""One that a worker works on, and one that waits."""
_LOGGER = (__package__ or "recorder").partition(".")[0]

T = TypeVar("T")
logger = logging.getLogger(__name__)


def spread_over(executor: Executor, num_workers: int) -> Mapper:
    """A mapper that gives ranges to an executor, whose workers see the runs under the paths that they have here.

    A range of a run that a worker finds changed, because the run is being recorded, is worked on here. What a worker
    warns of is logged here, each text once. Besides what a range raises, the mapper raises ClusterError: a worker sees
    no run or another one, has other versions, or was lost.

    Args:
        executor: it is not shut down.
        num_workers: how many calls the executor does at once.
    """

    def spread(
        make: Callable[..., Callable[..., T]], arguments: tuple[Any, ...], ranges: Iterable[tuple[Any, ...]], /
    ) -> Iterator[T]:
        shipped = pickle.dumps((make, arguments))
        left, running, work, told = iter(ranges), deque[Any](), None, set[str]()
        try:
            while True:
                while len(running) < _RANGES_PER_WORKER * num_workers and (wanted := next(left, None)) is not None:
                    running.append((executor.submit(_work_on, shipped, wanted), wanted))
                if not running:
                    return
                future, wanted = running.popleft()
                try:
                    answer, messages = future.result()
                except ChangedError:
                    work = work or make(*arguments)
                    answer, messages = work(*wanted), []
                for level, text in messages:
                    if text not in told:
                        told.add(text)
                        logger.log(level, "%s", text)
                yield answer
        finally:
            for future, _ in running:
                future.cancel()

    return spread


copyreg.pickle(Run, lambda run: (RunAsOpened.open_unchanged, (RunAsOpened.of(run),)))


# What follows is called by the workers.


def _work_on(shipped: bytes, wanted: tuple[Any, ...]) -> tuple[Any, list[tuple[int, str]]]:
    """The answer to a range, and what was warned of."""
    with _heard() as messages:
        return keep(shipped, lambda: _made(shipped))(*wanted), messages


def _made(shipped: bytes) -> Callable[..., Any]:
    make, arguments = pickle.loads(shipped)
    made: Callable[..., Any] = make(*arguments)
    return made


@contextmanager
def _heard() -> Iterator[list[tuple[int, str]]]:
    """Collects what this thread logs: it is for whoever asked, not for the log of a worker."""
    messages: list[tuple[int, str]] = []
    thread = threading.get_ident()

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.thread == thread:
                messages.append((record.levelno, record.getMessage()))

    library, handler = logging.getLogger(_LOGGER), Collector(logging.WARNING)
    library.addHandler(handler)
    try:
        yield messages
    finally:
        library.removeHandler(handler)
