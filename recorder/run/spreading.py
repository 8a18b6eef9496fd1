"""How other processes answer a question: they open the very run that this process has opened, and work on ranges of it.

A mapper has any executor work on the ranges: processes, a Dask cluster, Ray. A worker gets names, options and ranges of
steps, and opens runs itself; rows and payloads of a run never go to it.
"""

from __future__ import annotations

import copyreg
import hashlib
import json
import logging
import pickle
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

from ..errors import ClusterError, RecorderError, RunError
from ..system.executors import check_versions, keep, versions, worker_name
from .run import Run, open_run
from .step_ranges import Mapper

SEES_AS_HERE = "every worker has to see runs and output as the process does that hands out the work"


class ChangedError(RunError):
    """A run is not any more, or not yet, what it was where it was opened first: it is still recorded, most likely."""


class RunAsOpened(NamedTuple):
    """A run for another process, and the versions that this process has to have."""

    path: str
    identity: tuple[object, ...]
    digest: str
    versions: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, run: Run) -> RunAsOpened:
        return cls(str(run.path.absolute()), _identity(run), digest(run), tuple(versions().items()))

    def open(self) -> Run:
        """The run, as it is now.

        Raises:
            ClusterError: this process has other versions, or sees no run or another run under this path.
        """
        check_versions(worker_name(), versions(), dict(self.versions))
        try:
            run = open_run(self.path)
        except (RecorderError, OSError) as error:
            raise ClusterError(f"{worker_name()}: does not see the run ({error}); {SEES_AS_HERE}") from error
        if _identity(run) != self.identity:
            raise ClusterError(f"{worker_name()}: sees another run at {self.path}; {SEES_AS_HERE}")
        return run

    def open_unchanged(self) -> Run:
        """The run, as it was when it was opened first.

        Raises:
            ClusterError: as of `open`.
            ChangedError: it holds something else by now.
        """
        run = self.open()
        if digest(run) != self.digest:
            raise ChangedError(f"{self.path}: is not what it was when it was opened")
        return run


def digest(run: Run) -> str:
    """A digest of what the opening of a run has found: its writers, what they say, and their files."""
    writers = [
        [one.rank, one.name, one.manifest.members, [[s.path.name, s.is_sealed, s.size_bytes] for s in one.shards]]
        for one in run.writers
    ]
    text = json.dumps([run.manifest.members, writers], sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(errors="backslashreplace"), digest_size=16).hexdigest()


def _identity(run: Run) -> tuple[object, ...]:
    return run.manifest.run_id, run.manifest.created_ns


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
