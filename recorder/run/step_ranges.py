"""Cuts a run into ranges of steps, so that several processes can work on them.

The ranges are the same in all processes, and results are joined in the order of the ranges. So no bit of a result
depends on the machine. A mapper must never hold the results of more than a few ranges.
"""

from __future__ import annotations

import copyreg
import hashlib
import json
import logging
import pickle
import shutil
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ..errors import ClusterError, RecorderError, RunError
from ..globalview.run_topology import find_superseded
from ..globalview.view import GlobalView
from ..numerics.keys import array_of, column_of
from ..numerics.moments import integers
from ..read.metadata import SIZE_COLUMNS, StepSizes
from ..system.executors import check_versions, keep, versions, worker_name
from .run import RecordedWriter, Run, open_run

MAX_ROWS = 200_000
"""The most rows in a range, over all ranks; it bounds the memory for columns. A single step may have more rows."""
MAX_BYTES = 256 << 20
"""The most decoded payload bytes in a range, over all ranks: a second of work. A single step may have more bytes."""

T = TypeVar("T")
Steps = tuple[int, int]
TablesOf = Callable[[Sequence[Any], Steps], Iterator[Any]]
"""Makes tables from the rows of some writers at some steps. All tables have one schema with a column ``step``."""


class Mapper(Protocol):
    """Calls a function for each range, in this process or in other processes."""

    def __call__(
        self, make: Callable[..., Callable[..., T]], arguments: tuple[Any, ...], ranges: Iterable[tuple[Any, ...]], /
    ) -> Iterator[T]:
        """Yield the results in the order of the ranges. Only few results are computed ahead of the caller.

        In each process, `make` is called once with `arguments` (runs, tuples of runs, plain data). The function that
        `make` returns is then called for each of the `ranges`. `make` is a class or function at module level.
        """


def map_serially(
    make: Callable[..., Callable[..., T]], arguments: tuple[Any, ...], ranges: Iterable[tuple[Any, ...]], /
) -> Iterator[T]:
    """Work on the ranges in this thread, one after the other. This mapper is used without a cluster."""
    work = make(*arguments)
    for arguments_of_one in ranges:
        yield work(*arguments_of_one)


def global_step_ranges(view: GlobalView) -> list[Steps]:
    """Return ascending ranges that cover all steps of a run's global view (the tensors of all ranks put together)."""
    return view.windows(MAX_ROWS, MAX_BYTES)


def cut_evenly(first: int, end: int, num_rows: int, max_rows: int) -> list[Steps]:
    """Cut steps into ranges of about `max_rows` rows, on the assumption that all steps have equally many."""
    length = max(max_rows * (end - first) // max(num_rows, 1), 1)
    return [(start, min(start + length, end)) for start in range(first, end, length)]


def attempt_step_ranges(run: Run) -> list[tuple[int, int, int]]:
    """Return ranges (attempt, first, last) of steps that cover all rows that the ranks recorded, in this order."""
    sizes_of: dict[int, list[StepSizes]] = {}
    for writer in run.writers:
        for shard in writer.shards:
            for batch in shard.columns(["attempt", *SIZE_COLUMNS]):
                attempts = array_of(batch.column("attempt"))
                for attempt in np.unique(attempts).tolist():
                    of_attempt = batch.filter(column_of(attempts == attempt))
                    sizes_of.setdefault(attempt, []).append(StepSizes.of([of_attempt]))
    return [
        (attempt, *step_range[:2])
        for attempt, sizes in sorted(sizes_of.items())
        for step_range in StepSizes.sum(sizes).cut(MAX_ROWS, MAX_BYTES)
    ]


def first_parts(writers: Iterable[RecordedWriter], steps: Steps | None, columns: Sequence[str]) -> Iterator[Any]:
    """Yield those rows of some steps (None: all) that are the first part of a tensor, one table for each batch."""
    for shard in (shard for writer in writers for shard in writer.shards):
        for batch in shard.columns((*columns, "part"), steps):
            at, part = (array_of(batch.column(name)) for name in ("step", "part"))
            is_wanted = part == 0
            if steps is not None:  # a batch may also have rows of other steps
                is_wanted &= (at >= steps[0]) & (at < steps[1])
            table = pa.Table.from_batches([batch])
            yield table if is_wanted.all() else table.filter(column_of(is_wanted))


def with_coded_texts(table: Any, schema: Any) -> Any:
    """Return a table with the columns of a schema. Texts are dictionary-encoded where the schema says so."""
    columns = [table.column(name) for name in schema.names]
    made = [
        c.dictionary_encode() if pa.types.is_dictionary(t) else c for c, t in zip(columns, schema.types, strict=True)
    ]
    return pa.Table.from_arrays(made, schema=schema)


_PENDING_ROWS = 250_000
_COMPRESSED = pa.ipc.IpcWriteOptions(compression="lz4")
_BYTES_A_ROW = 500
"""A bound on the size of a row in a file, in bytes. No larger row was seen."""


@contextmanager
def cut_rows(
    run: Run, ranges: Sequence[Steps], tables: TablesOf, max_pending_rows: int = _PENDING_ROWS
) -> Iterator[Callable[[Steps], Iterator[Any]]]:
    """Make a function that returns the tables of one range, as `tables` would make them for this range alone.

    The half-open `ranges` are ascending and disjoint. If the disk has room, rows are read only once, and are cut into a
    temporary file for each range, `max_pending_rows` at a time. Twice as many rows, plus one table, are then in memory.
    """
    with ExitStack() as stack:
        folder = None
        if len(ranges) > 1:
            with suppress(OSError):  # the disk may have no room for temporary files
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="recorder-")))
        if folder is not None:
            has_room = shutil.disk_usage(folder).free >= run.num_rows * _BYTES_A_ROW
            folder = folder if has_room and _fill(folder, run, ranges, tables, max_pending_rows) else None
        if folder is None:
            yield lambda steps: tables(run.writers, steps)
        else:
            yield lambda steps: _read(folder / str(ranges.index(steps)))


def read_ranges(run: Run, ranges: Sequence[Steps], tables: TablesOf, mapper: Mapper) -> Generator[Iterable[Any]]:
    """Yield the tables of each range, as `cut_rows` makes them. Workers need `tables` to be picklable.

    This process reads a range, and all later ranges, itself if a worker logged a message at the range or knew other
    batches. So the messages on damage, and the rows left out, are the same as without workers.
    """
    left = list(ranges)
    if mapper is not map_serially and len(ranges) > 1:
        for found in mapper(RangeReader, (run, tables, _batches(run)), ((one,) for one in ranges)):
            if found is None:
                break
            del left[0]
            yield found
    with cut_rows(run, left, tables) as tables_of:
        for steps in left:
            yield tables_of(steps)


class RangeReader:
    """Reads the tables of ranges in a worker. `batches` is a digest of the batches that the calling process knows."""

    def __init__(self, run: Run, tables: TablesOf, batches: str) -> None:
        self._run, self._tables, self._batches = run, tables, batches

    def __call__(self, steps: Steps) -> list[Any] | None:
        """Return the tables of a range. Return None if the calling process has to read the range."""
        with _heard() as messages:
            tables = list(self._tables(self._run.writers, steps))
        return None if messages or _batches(self._run) != self._batches else tables


def _batches(run: Run) -> str:
    """Return a digest of the numbers of all batches, by shard. Batches that were found to be damaged are left out."""
    return _digest_of([[shard.numbers for shard in writer.shards] for writer in run.writers])


def _fill(folder: Path, run: Run, ranges: Sequence[Steps], tables: TablesOf, max_pending_rows: int) -> bool:
    starts = np.array([first for first, _ in ranges], np.int64)
    pending: list[Any] = []
    num_pending = 0
    try:
        for table in tables(run.writers, (ranges[0][0], ranges[-1][1])):
            pending.append(table)
            num_pending += table.num_rows
            if num_pending >= max_pending_rows:
                _append(folder, starts, pending)
                num_pending = 0
        _append(folder, starts, pending)
    except OSError:
        return False
    return True


def _append(folder: Path, starts: npt.NDArray[np.int64], pending: list[Any]) -> None:
    """Append the pending rows to the files of their ranges. Each file gets one more Arrow stream."""
    if not any(table.num_rows for table in pending):
        return
    table = pa.concat_tables(pending).unify_dictionaries().combine_chunks()
    pending.clear()
    indices = np.searchsorted(starts, array_of(table.column("step")), side="right") - 1
    order = np.argsort(indices, kind="stable")
    table, indices = table.take(column_of(order)), indices[order]
    found, firsts = np.unique(indices, return_index=True)
    for index, first, last in zip(found.tolist(), firsts.tolist(), [*firsts[1:].tolist(), len(indices)], strict=True):
        with (
            (folder / str(index)).open("ab") as file,
            pa.ipc.new_stream(file, table.schema, options=_COMPRESSED) as stream,
        ):
            stream.write_table(table.slice(first, last - first))


def _read(path: Path) -> Iterator[Any]:
    """Yield the tables in the file of a range. A range without rows has no file."""
    if not path.exists():
        return
    with path.open("rb") as file:
        size = path.stat().st_size
        while file.tell() < size:
            yield pa.ipc.open_stream(file).read_all()


class Attempts:
    """Decides which attempt counts at each step. Tables must have the rows of all ranks at a step."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._newest: dict[int, int] = {}
        """For each step, the attempt whose rows count."""
        self._is_one = True
        if len({writer.attempt for writer in run.writers}) > 1:  # an attempt may have no rows
            batches = (b for writer in run.writers for shard in writer.shards for b in shard.columns(["attempt"]))
            self._is_one = len({one for batch in batches for one in batch.column("attempt").unique().to_pylist()}) < 2

    def counting(self, table: Any) -> Any:
        """Return the rows that count. If attempts share a step, the newest attempt that completed it counts."""
        if self._is_one:
            return table
        steps, ranks, attempts = (integers(table.column(name)) for name in ("step", "rank", "attempt"))
        run, topology = self._run, self._run.topology
        if not self._newest.keys() >= set(np.unique(steps).tolist()):
            steps_of = {}
            for number, writer in enumerate(run.writers):
                own = (attempts == writer.attempt) & (ranks == (-1 if writer.rank is None else writer.rank))
                steps_of[number] = np.unique(steps[own]).tolist()
            attempt_at = {launch: run.writers[number].attempt for number, launch in enumerate(topology.launches)}
            winners = {step: attempt_at[launch] for step, launch in topology.winners(steps_of).items()}
            self._newest = winners | self._newest
        return table.filter(column_of(~find_superseded(self._newest, attempts, steps)))


SEES_AS_HERE = "every worker must see runs and output at the same paths as this process"


class ChangedError(RunError):
    """A run has changed since it was first opened. Most likely it is still being recorded."""


class RunAsOpened(NamedTuple):
    """A run for a worker to open. The worker must have the software versions of the process that opened it first."""

    path: str
    identity: tuple[object, ...]
    digest: str
    versions: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, run: Run) -> RunAsOpened:
        return cls(str(run.path.absolute()), _identity(run), digest(run), tuple(versions().items()))

    def open(self) -> Run:
        """Return the run as it is now.

        Raises ClusterError if this process has other versions, or finds no run or another run at this path.
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
        """Return the run, which must be as it was when it was first opened.

        Raises ClusterError as `open` does, and ChangedError if the run has changed since.
        """
        run = self.open()
        if digest(run) != self.digest:
            raise ChangedError(f"{self.path}: is not what it was when it was opened")
        return run


def digest(run: Run) -> str:
    """Return a digest of what opening a run reads: the writers, their manifests, and the sizes of their files."""
    writers = [
        [one.rank, one.name, one.manifest.members, [[s.path.name, s.is_sealed, s.size_bytes] for s in one.all_shards]]
        for one in run.writers
    ]
    return _digest_of([run.manifest.members, writers])


def _digest_of(facts: list[Any]) -> str:
    text = json.dumps(facts, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(errors="backslashreplace"), digest_size=16).hexdigest()


def _identity(run: Run) -> tuple[object, ...]:
    return run.manifest.run_id, run.manifest.created_ns


_RANGES_PER_WORKER = 2
"""The number of ranges that a worker has at a time. One range waits while the worker is busy with another."""
_LOGGER = (__package__ or "recorder").partition(".")[0]

logger = logging.getLogger(__name__)


def spread_over(executor: Executor, num_workers: int) -> Mapper:
    """Return a mapper that sends ranges to an executor. The workers must find the runs at the same paths.

    The executor works on `num_workers` calls at once; it is not shut down. If a worker finds that a run has changed (it
    is still being recorded), this process works on the range. The mapper raises the errors of ranges. It raises
    ClusterError if a worker finds no run or another run, has other versions, or was lost. Warnings of workers are
    logged here, each text once. Warnings about opening a run are not logged, because this process has opened the run
    too. Warnings from a range for which a worker returns None are not logged either, as this process then does the
    work.
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
                for level, text in messages if answer is not None else ():
                    if text not in told:
                        told.add(text)
                        logger.log(level, "%s", text)
                yield answer
        finally:
            for future, _ in running:
                future.cancel()

    return spread


copyreg.pickle(Run, lambda run: (RunAsOpened.open_unchanged, (RunAsOpened.of(run),)))


# The functions below run in workers.


def _work_on(shipped: bytes, wanted: tuple[Any, ...]) -> tuple[Any, list[tuple[int, str]]]:
    work, said = keep(shipped, lambda: _made(shipped))
    with _heard() as messages:
        answer = work(*wanted)
    return answer, [*said, *messages]


def _made(shipped: bytes) -> tuple[Callable[..., Any], list[tuple[int, str]]]:
    make, arguments = pickle.loads(shipped)
    with _heard() as messages:
        return make(*arguments), messages


@contextmanager
def _heard() -> Iterator[list[tuple[int, str]]]:
    """Collect the warnings of this thread. The calling process logs them."""
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
