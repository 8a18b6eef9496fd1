"""The rows of a run range by range of steps, each batch read once, as numbers that one can index with.

Never reads a payload. Rows of recomputed forwards are left out: they are values that are there already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ..columns import COUNTS, SCHEMA, STATISTICS
from ..numerics.keys import Integers, codes, encode, group
from ..numerics.moments import combine_rows, integers, numbers
from ..read.writers import RecordedWriter
from ..run.run import Run
from ..run.step_ranges import Attempts, cut_rows

RANGE_ROWS = 200_000
"""Rows of a range of steps, of all ranks, which are in memory together; a single step may have more."""
SERIES_KEY = ("root", "module_path", "site", "name", "mode")
"""The columns that name a series. Calls and micro-steps of one step are drawn as one value."""
_RECOMPUTED = "recompute"
_COLUMNS = (
    "step", "rank", "attempt", "seq", *SERIES_KEY, "phase", "dtype", "shape", "global_shape", "numel", "note",
    "placements", *STATISTICS, *COUNTS, "micro_step", "call", "repeat", "encoding", "payload_bytes",
    "histogram", "units",
)  # fmt: skip

Steps = tuple[int, int]


class DrawnSeries(NamedTuple):
    """The names of a series of values."""

    root: str
    module_path: str
    site: str
    name: str
    mode: str


class StepRows:
    """The rows of a run, range by range of steps."""

    def __init__(
        self, run: Run, tables_of: Callable[[Steps], Iterator[Any]], ranges: Sequence[Steps], schema: Any
    ) -> None:
        """Hold what `step_rows` prepares."""
        self.ranges = list(ranges)
        self._schema = schema
        self._tables_of = tables_of
        self._attempts = Attempts(run)

    def __iter__(self) -> Iterator[Any]:
        """Yield a table for each range of steps: the rows that count, sorted by rank and `seq`."""
        for steps in self.ranges:
            table = pa.concat_tables([self._schema.empty_table(), *self._tables_of(steps)])
            table = table.unify_dictionaries().combine_chunks()
            counts = self._attempts.counting(table)
            table = table if counts.all() else table.filter(pa.array(counts))
            order = np.lexsort([integers(table.column("seq")), integers(table.column("rank"))])
            yield table.take(pa.array(order))


@contextmanager
def step_rows(
    run: Run, ranges: Sequence[Steps] | None = None, *, further: Sequence[str] = (), max_pending_rows: int = RANGE_ROWS
) -> Iterator[StepRows]:
    """Read the rows of a run, as often as one likes; what is too much for the memory lies on a disk meanwhile.

    Args:
        run: whose rows.
        ranges: of steps, half-open, ascending, apart from each other; by default all, `RANGE_ROWS` rows at a time.
        further: columns that the tables have besides.
        max_pending_rows: rows that are in memory together on their way to the disk.
    """
    schema = pa.schema(
        [
            pa.field(name, pa.dictionary(pa.int32(), pa.string()))
            if SCHEMA.field(name).type == pa.string()
            else SCHEMA.field(name)
            for name in dict.fromkeys((*_COLUMNS, *further))
        ]
    )
    ranges = run.view().windows(RANGE_ROWS) if ranges is None else ranges
    with cut_rows(run, ranges, partial(_tables, schema), max_pending_rows) as tables_of:
        yield StepRows(run, tables_of, ranges, schema)


def _tables(schema: Any, writers: Sequence[RecordedWriter], steps: Steps) -> Iterator[Any]:
    for writer in writers:
        for shard in writer.shards:
            for batch in shard.columns((*schema.names, "part"), steps):
                at, part = (batch.column(name).to_numpy() for name in ("step", "part"))
                is_wanted = (at >= steps[0]) & (at < steps[1]) & (part == 0)
                table = pa.Table.from_batches([batch])
                if not is_wanted.all():
                    table = table.filter(pa.array(is_wanted))
                if _RECOMPUTED in batch.column("phase").unique().to_pylist():
                    table = table.filter(pc.not_equal(table.column("phase"), _RECOMPUTED))
                columns = [
                    table.column(field.name).dictionary_encode()
                    if pa.types.is_dictionary(field.type)
                    else table.column(field.name)
                    for field in schema
                ]
                yield pa.Table.from_arrays(columns, schema=schema)


class SeriesValues(NamedTuple):
    """The statistics of each series, step and rank, one value a line; calls and micro-steps are combined."""

    series: Integers
    steps: Integers
    ranks: Integers
    """The rank of each value; -1 for a value of all ranks."""
    numbers: dict[str, npt.NDArray[np.float64]]
    """The numbers of each statistic or count; NaN where a row has no number."""


def keys_of(table: Any) -> tuple[Integers, list[DrawnSeries], Integers]:
    """Return for each row the number of its series in this table, then the series, and the first row of each series."""
    coded = [encode(table.column(name)) for name in SERIES_KEY]
    groups = group([numbers + 1 for numbers, _ in coded])
    texts = [
        [words[number] if number >= 0 else "" for number in numbers[groups.firsts].tolist()] for numbers, words in coded
    ]
    return groups.ids, [DrawnSeries(*key) for key in zip(*texts, strict=True)], groups.firsts


def values_of(table: Any, series: Integers, names: Sequence[str]) -> SeriesValues:
    """Return the values of a table; `series` gives the series of each row."""
    steps, ranks = integers(table.column("step")), integers(table.column("rank"))
    groups = group([series, codes(table.column("step")), ranks + 1])
    if groups.num_groups == table.num_rows:
        columns = {name: numbers(table.column(name)) for name in names}
        return SeriesValues(series, steps, ranks, columns)
    combined = combine_rows(table, groups.ids, groups.num_groups)
    columns = {name: numbers(combined[name]) for name in names}
    return SeriesValues(series[groups.firsts], steps[groups.firsts], ranks[groups.firsts], columns)
