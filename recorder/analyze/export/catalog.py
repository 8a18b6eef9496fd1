"""The catalog of a run: one Parquet file with a row for each row on disk, its payload left out.

Ranks come in blocks, and each block is in the order of attempt, step, rank and seq: so every file of the run is read
about once whatever their number, memory holds one block, and both a step and a rank are found by the statistics of the
row groups. Must never hold more than a block, and never leave a file that is not whole under its name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby, pairwise
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from ...columns import METADATA_COLUMNS, SCHEMA, TIME_ORDER
from ...run.run import RecordedWriter, Run
from ...run.step_ranges import writer_step_ranges
from .files import published_file

_ROWS_A_BLOCK = 1 << 19
"""What memory holds, at 1 to 2 kB a row; a rank with more comes in ranges of steps."""
_ROWS_A_GROUP = 1 << 17
_COLUMNS = ("run_id", "writer", *METADATA_COLUMNS)
_FIELDS = [pa.field("run_id", pa.string()), pa.field("writer", pa.string())]
_TEXTS = [*_COLUMNS[:2], *(name for name in METADATA_COLUMNS if SCHEMA.field(name).type == pa.string())]
_FIRST_STEP, _LAST_STEP = -(1 << 62), 1 << 62

Integers = npt.NDArray[np.int64]


class Catalog(NamedTuple):
    """What was written."""

    path: Path
    num_rows: int
    num_bytes: int
    """Size of the file."""
    num_superseded: int
    """Rows of steps that a restart did again; not in the file."""
    problems: list[str]
    """What is damaged in the run, or belongs to another, and so is not in the file."""


def write_catalog(
    run: Run,
    path: str | PathLike[str],
    *,
    report: Callable[[int], None] = lambda done: None,
    rows_a_block: int = _ROWS_A_BLOCK,
) -> Catalog:
    """Write all rows of a run but their payloads, those of the attempt that counts at each step.

    Args:
        run: from `open_run`; recorded or merged.
        path: the file to write; it appears once it is whole.
        report: told how many bytes of shards were done since the last call.
        rows_a_block: rows in memory at once.

    Raises:
        WriteError: the file exists, or cannot be written.
    """
    path = Path(path)
    topology = run.topology
    counting = _Counting(run)
    num_rows = 0
    with published_file(path) as file, _open(file, run) as parquet:
        for block in _blocks(run.writers, rows_a_block):
            writers = [run.writers[number] for number in block]
            for first, last in _ranges(writers, rows_a_block):
                table = _rows(run, writers, counting, block, first, last)
                parquet.write_table(table, row_group_size=_ROWS_A_GROUP)
                num_rows += table.num_rows
            report(sum(writer.shard_bytes for writer in writers))
    left_out = [
        f"writer {topology.describe(number)} belongs to another run; left out" for number in topology.foreign_writers
    ]
    return Catalog(path, num_rows, path.stat().st_size, counting.num_superseded, [*run.problems, *left_out])


def _open(file: BinaryIO, run: Run) -> Any:
    fields = [*_FIELDS, *(SCHEMA.field(name).with_nullable(True) for name in METADATA_COLUMNS)]
    schema = pa.schema(fields, metadata={b"recorder_run_id": run.run_id.encode(), **(SCHEMA.metadata or {})})
    order = [pq.SortingColumn(_COLUMNS.index(name), nulls_first=True) for name in TIME_ORDER]
    return pq.ParquetWriter(
        file, schema, compression="zstd", use_dictionary=_TEXTS, sorting_columns=order, write_page_index=True
    )


def _blocks(writers: Sequence[RecordedWriter], max_rows: int) -> Iterator[list[int]]:
    """Numbers of the writers of neighbouring ranks, together of about so many rows; a rank is never cut."""
    block: list[int] = []
    num_rows = 0
    for _, of_rank in groupby(range(len(writers)), lambda number: writers[number].rank):
        numbers = list(of_rank)
        rows = sum(writers[number].num_rows for number in numbers)
        if block and num_rows + rows > max_rows:
            yield block
            block, num_rows = [], 0
        block += numbers
        num_rows += rows
    if block:
        yield block


def _ranges(writers: Sequence[RecordedWriter], max_rows: int) -> Iterator[tuple[int, int]]:
    """Half-open ranges of steps with about so many rows, which together are all."""
    if sum(writer.num_rows for writer in writers) <= max_rows:
        yield _FIRST_STEP, _LAST_STEP
        return
    starts = [first for first, _ in writer_step_ranges(writers, max_rows)]
    yield from pairwise([_FIRST_STEP, *starts[1:], _LAST_STEP])


def _rows(
    run: Run, writers: Sequence[RecordedWriter], counting: _Counting, numbers: Sequence[int], first: int, last: int
) -> Any:
    """The rows of some writers and steps that count, in order."""
    metadata = run.metadata(writers, None if first == _FIRST_STEP and last == _LAST_STEP else (first, last))
    metadata.load(METADATA_COLUMNS)
    positions = metadata.in_order()
    steps = metadata.numbers("step")[positions]
    within = (steps >= first) & (steps < last)
    positions, steps = positions[within], steps[within]
    of_block = metadata.writer_numbers(positions)
    counts = counting.select(np.asarray(numbers, np.int64)[of_block], steps)
    positions, of_block = positions[counts], of_block[counts]
    names = pa.DictionaryArray.from_arrays(pa.array(of_block), [writer.name for writer in writers])
    run_ids = pa.DictionaryArray.from_arrays(pa.array(np.zeros(len(positions), np.int32)), [run.run_id])
    columns = [run_ids.cast(pa.string()), names.cast(pa.string())]
    columns += [metadata.take(name, positions) for name in METADATA_COLUMNS]
    return pa.Table.from_arrays(columns, list(_COLUMNS))


class _Counting:
    """Tells which rows count: those of this run, and at a step of several launches those of the launch that counts."""

    def __init__(self, run: Run) -> None:
        self.num_superseded = 0
        self._is_stranger = np.zeros(len(run.writers), np.bool_)
        self._is_stranger[run.topology.foreign_writers] = True
        self._launches = np.array(run.topology.launch_indices(), np.int64)
        self._steps, self._wins = np.zeros(0, np.int64), np.zeros(0, np.int64)
        if len(set(self._launches.tolist())) < 2:
            return
        steps_of: dict[int, Integers] = {}
        first_of: dict[int, int] = {}
        for number, writer in enumerate(run.writers):
            if not self._is_stranger[number]:
                # All writers of a launch win or lose together, so that one can speak for them.
                one = first_of.setdefault(int(self._launches[number]), number)
                own = [batch.column("step").to_numpy() for shard in writer.shards for batch in shard.columns(["step"])]
                steps_of[one] = np.unique(np.concatenate([steps_of.get(one, np.zeros(0, np.int64)), *own]))
        winners = run.topology.winners({number: steps.tolist() for number, steps in steps_of.items()})
        self._steps = np.array(sorted(winners), np.int64)
        self._wins = np.array([winners[step] for step in self._steps.tolist()], np.int64)

    def select(self, writers: Integers, steps: Integers) -> npt.NDArray[np.bool_]:
        """Return which rows count, by the numbers of their writers and their steps."""
        counts = ~self._is_stranger[writers]
        if len(self._steps):
            at = np.minimum(np.searchsorted(self._steps, steps), len(self._steps) - 1)
            is_superseded = counts & (self._launches[writers] != self._wins[at])
            self.num_superseded += int(is_superseded.sum())
            counts &= ~is_superseded
        return np.asarray(counts)
