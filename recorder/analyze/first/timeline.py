"""Orders the recorded rows of a run by time, and reads the tensor of a row. Payloads are read only on request."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ...columns import COUNTS, SCHEMA, STATISTICS, TIME_ORDER, note_members, stage_of
from ...errors import RunError
from ...numerics.keys import SERIES_KEY, VALUE_KEY, Groups, Integers, Times, codes, common_ids, encode, group, holds
from ...numerics.moments import integers
from ...run.run import RecordedWriter, Run
from ...run.selection import PER_RANK
from ...run.step_ranges import Attempts, first_parts, with_coded_texts
from ...sites import AT_LEAST, NUMBERS

_KEY = ("step", "micro_step", "call", "repeat", "mode", "phase", "rank", "attempt", "scope",
        "root", "module_path", "site", "name")  # fmt: skip
_COLUMNS = (*_KEY, "seq", "time_ns", "dtype", "shape", "numel", "offsets", "placements", "mesh", "note", *STATISTICS,
            *COUNTS, "fingerprint", "encoding")  # fmt: skip

NAME = ("root", "module_path", "site", "name")
VALUE_COLUMNS = (*_KEY, "dtype", "shape")
"""The columns of a table from which a `RecordedValue` is made."""
_WINDOW_ROWS = 50_000
_LATEST = 1 << 61
"""A number that is larger than every sequence number or time of a row."""
_BEGINNING = -(1 << 62)
"""A number that is smaller than every step."""


_FIELDS, _TEXT = [SCHEMA.field(name) for name in _COLUMNS], pa.dictionary(pa.int32(), pa.string())
_SCHEMA = pa.schema([f.with_type(_TEXT) if f.type == pa.string() and f.name != "fingerprint" else f for f in _FIELDS])


ValueName = tuple[str, str, str, str]
"""The root, module path, site and name of a value. They are the same at every step."""


def is_counted_at_least(note: str | None) -> bool:
    """Return whether a count of 1, in a row with this note, means that at least one element is NaN or infinite."""
    return note_members(note).get("counts") == AT_LEAST


class RecordedValue(NamedTuple):
    """One record of a value: its names, and the step and the rank at which it was seen."""

    step: int
    module_path: str
    site: str
    name: str
    rank: int | None
    """The rank of the record; None if the record of a merged run is for all ranks."""
    micro_step: int | None
    call: int
    repeat: int
    mode: str
    phase: str
    scope: str | None
    root: str
    attempt: int
    dtype: str
    shape: str
    module_class: str
    """The class of the module; empty if the run does not say it."""
    source: str
    """The file and line of the module's class; empty if the run does not say it."""
    model: str
    """The name of the model with a colon, to be put before a path. Empty for the only model of a run."""

    @property
    def key(self) -> ValueName:
        return self.root, self.module_path, self.site, self.name


class FirstRows(NamedTuple):
    """The first record of each value, and records of masks that grew. Later records are compared with these records."""

    table: Any
    nan: Integers
    inf: Integers
    """The number of infinite elements of each record, 0 if unknown. `nan` has the number of NaN."""


class Timeline:
    """The rows of a run, one per tensor, sorted by step, then by each rank's order of execution.

    If a restart repeated a step, only the rows of the newer attempt are kept. Stages of a pipeline follow one another,
    micro-batch by micro-batch. The first `num_firsts` rows are the first records of values at earlier steps. They only
    serve for comparison.
    """

    def __init__(
        self, run: Run, attempts: Attempts, steps: tuple[int, int], tables: Iterable[Any],
        firsts: FirstRows | None = None,
    ) -> None:  # fmt: skip
        """Load the `tables` of `whole_rows` for `steps` = (first, last), without the step `last`.

        `attempts` has seen the rows of all writers at these steps, or sees them now. `firsts` are the first records of
        values at earlier steps.
        """
        self.run, self.attempts, self.steps = run, attempts, steps
        self.firsts = firsts
        table = pa.concat_tables([_SCHEMA.empty_table(), *tables]).unify_dictionaries().combine_chunks()
        # In a merged run, rows for all ranks and rows of single ranks are numbered apart. So the time orders them.
        columns = ("attempt", "step", "time_ns") if run.is_merged else TIME_ORDER
        in_time = [integers(table.column(name)) for name in columns]
        # A probe on a device writes the row of a value that turned NaN or infinite late, after the scalars of the step.
        in_time[-1] = in_time[-1] - np.where(holds(table.column("note"), is_counted_at_least), _LATEST, 0)
        table = table.take(pa.array(np.lexsort(in_time[::-1])))
        num_rows, table = table.num_rows, attempts.counting(table)
        self.num_superseded = num_rows - table.num_rows
        """The number of rows that the timeline leaves out because a restart repeated their steps."""
        codes_of_steps, ranks = codes(table.column("step")), codes(table.column("rank"))
        # The index of a row among the rows of its rank and step serves as a time that is common to all ranks.
        is_other_rank = (np.diff(ranks) != 0) & (not run.is_merged)
        starts = np.flatnonzero(np.r_[True, (np.diff(codes_of_steps) != 0) | is_other_rank])
        lengths = np.diff(np.r_[starts, len(ranks)])
        num_before = np.arange(len(ranks)) - np.repeat(starts, lengths) if len(ranks) else np.zeros(0, np.int64)
        order = _times(run, table, codes_of_steps, ranks, num_before).order()
        table, num_before = table.take(pa.array(order)), num_before[order]
        self.num_firsts = 0 if firsts is None else int(firsts.table.num_rows)
        if firsts is not None:
            table = pa.concat_tables([firsts.table, table])
            num_before = np.r_[np.zeros(self.num_firsts, np.int64), num_before]
        self.table = table
        self.num_before: Integers = num_before
        """For each row, the number of earlier rows of the same rank and step."""

    @cached_property
    def codes(self) -> dict[str, Integers]:
        """For each column that identifies values, the rows' texts or numbers as integer codes."""
        return {name: codes(self.table.column(name)) for name in dict.fromkeys((*VALUE_KEY, *SERIES_KEY, "rank"))}

    @cached_property
    def series(self) -> Groups:
        """The rows grouped by value and rank. A group has the rows of all steps."""
        return group([self.codes[name] for name in (*SERIES_KEY, "rank")])

    def before(self, rank: int | None) -> Timeline:
        """Return the timeline of a rank over all steps before this range. It includes rows for all ranks."""
        writers = [writer for writer in self.run.writers if writer.rank in (rank, None)]
        steps = _BEGINNING, self.steps[0]
        return Timeline(self.run, self.attempts, steps, whole_rows(writers, steps))

    def is_equal(self, name: str, value: object) -> npt.NDArray[np.bool_]:
        """Return a mask of the rows that have `value` in the column `name`. None stands for null."""
        column = self.table.column(name)
        if isinstance(value, str):
            return holds(column, value.__eq__)
        flags = column.is_null() if value is None else pc.equal(column, value).fill_null(False)
        return np.array(flags.to_numpy(), np.bool_)

    def texts(self, names: Sequence[str], rows: Integers) -> set[tuple[Any, ...]]:
        """Return the distinct combinations of texts in the columns `names` of the given rows."""
        table = self.table.select(names).take(pa.array(rows))
        return set(zip(*(column.to_pylist() for column in table.columns), strict=True))

    def value(self, row: int) -> RecordedValue:
        return self.value_in(self.table, row)

    def value_in(self, table: Any, row: int) -> RecordedValue:
        """Return the value that a row of `table` records. The table has the columns `VALUE_COLUMNS` of this run."""
        values = {name: table.column(name)[row].as_py() for name in VALUE_COLUMNS}
        info = self.run.modules.get((values["root"], values["module_path"]))
        model = f"{values['root']}: " if self.run.has_models else ""
        about = ("", "") if info is None else (info.class_name, info.source)
        return RecordedValue(**values, module_class=about[0], source=about[1], model=model)

    def arrays(self, rows: Integers) -> Iterator[tuple[int, npt.NDArray[Any] | RunError]]:
        """Yield the index of each row with its tensor, or with the error of reading it, in the order of steps."""
        table = self.table.take(pa.array(rows))
        steps = integers(table.column("step"))
        view = self.run.view(layouts=PER_RANK)
        for first, last in view.windows(_WINDOW_ROWS):
            inside = np.flatnonzero((steps >= first) & (steps < last))
            if not len(inside):
                continue
            there = view.rows(first, last)
            wanted, present = common_ids(table.take(pa.array(inside)), there.table, ("step", "rank", "attempt", "seq"))
            row_of = dict(zip(present.tolist(), range(len(present)), strict=True))
            for number, row in zip(wanted.tolist(), rows[inside].tolist(), strict=True):
                try:
                    yield row, there.array(row_of[number]) if number in row_of else self.array(row)
                except RunError as error:
                    yield row, error

    def array(self, row: int) -> npt.NDArray[Any]:
        """Return the tensor of a row. Raises RunError if the tensor was not recorded, or cannot be read."""
        question = {name: self.table.column(name)[row].as_py() for name in _KEY}
        return self.run.array(question.pop("module_path"), **question)


def whole_rows(writers: Sequence[RecordedWriter], steps: tuple[int, int]) -> Iterator[Any]:
    """Yield the rows of some writers at `steps`, one row per tensor. Each batch is a table with encoded texts."""
    for table in first_parts(writers, steps, _COLUMNS):
        yield with_coded_texts(table, _SCHEMA)


def _times(run: Run, table: Any, steps: Integers, ranks: Integers, num_before: Integers) -> Times:
    """Return the keys that order rows by time. `num_before` is the index of each row within its rank and step."""
    mode, phase, micro_step = codes(table.column("mode")), table.column("phase"), codes(table.column("micro_step"))
    is_forward, is_backward = holds(phase, "forward".__eq__), holds(phase, ("backward", "recompute").__contains__)
    return Times(steps, mode, is_forward, is_backward, num_before, _stages(run, table), micro_step, ranks)


def _stages(run: Run, table: Any) -> Integers:
    if run.is_merged:
        notes, texts = encode(table.column("note"))
        of_text = np.array([-1 if (stage := stage_of(text)[0]) is None else stage for text in texts] + [-1], np.int64)
        return of_text[notes]
    stages = np.full(table.num_rows, -1, np.int64)
    of_root = {(run.writers[number].rank, root): stage.number for (number, root), stage in run.topology.stages.items()}
    if of_root:
        is_value = ~holds(table.column("site"), NUMBERS.__contains__)
        ranks, (roots, names) = integers(table.column("rank")), encode(table.column("root"))
        for (rank, root), stage in of_root.items():
            if root in names:
                stages[is_value & (ranks == rank) & (roots == names.index(root))] = stage
    return stages
