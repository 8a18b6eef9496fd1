"""Compares one range of steps of two runs, in this process or in another one, as a mapper decides.

The result of a range can be pickled; its rows stay in the process that read them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from ...numerics.keys import VALUE_KEY, group_rows
from ...run.notes import Problems
from ...run.run import Run
from ...run.selection import GlobalOptions, Selection
from .compare import Tolerance
from .culprit_findings import RangeSteps
from .noise import NoiseMeasure, measure
from .pairs import (
    PairedSteps,
    RunSteps,
    Verdicts,
    align,
    comparable,
    judge,
    moved_roots,
    without_other_micro_steps,
    without_recomputed,
)
from .renames import Renames, UnpairedModules

MODULE = ["root", "module_path"]
VALUE = [*MODULE, "site", "name"]
_ONLY = [*VALUE, "rows", "first_step", "last_step"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffOptions:
    """The options of a comparison."""

    selection: Selection
    tolerance: Tolerance
    """The distances up to which elements count as equal."""
    global_view: GlobalOptions
    """The options for joining the ranks' values of each run into global tensors."""
    noise: Sequence[Run]
    """Repeats or perturbed twins of the first run; only differences larger than theirs count."""
    renames: Renames
    """The names that the modules of the second run have in the first run."""
    common: bool
    """True if values that only one run has do not count as differences."""


class SideTotals:
    """The results for one of the two runs in a range of steps, or in all ranges joined so far."""

    def __init__(self, selection: Selection, own_names: Mapping[str, str]) -> None:
        self.problems = Problems(selection)
        self.steps: set[int] = set()
        self.unpaired = UnpairedModules(own_names)
        self.only: list[Any] = []
        """Tables of values that the other run does not have, as `by_value` makes them."""
        self.num_handed_on = self.num_recomputed = 0

    def join(self, later: SideTotals) -> None:
        self.problems.join(later.problems)
        self.steps |= later.steps
        self.unpaired.join(later.unpaired)
        self.only += later.only
        self.num_handed_on += later.num_handed_on
        self.num_recomputed += later.num_recomputed


class PayloadReport:
    """Counts the payload bytes that are compared, and reports them unless it runs in another process."""

    def __init__(self, report: Callable[[int], None] = lambda num_bytes: None) -> None:
        self._report = report
        self.num_bytes = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return PayloadReport, ()

    def __call__(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self._report(num_bytes)


def by_value(rows: Any) -> Any:
    """Return the number of rows of each value, and its first and last step, in the order of the rows."""
    aggregates = [([], "count_all"), ("step", "min"), ("step", "max")]
    return rows.group_by(VALUE, use_threads=False).aggregate(aggregates).rename_columns(_ONLY)


def join_ranges(tables: Sequence[Any]) -> Any:
    """Join the tables that `by_value` made for several ranges of steps."""
    aggregates = [("rows", "sum"), ("first_step", "min"), ("last_step", "max")]
    return pa.concat_tables(tables).group_by(VALUE, use_threads=False).aggregate(aggregates).rename_columns(_ONLY)


@dataclass
class RangeResult:
    """The result of a range of steps, from `first` up to, but not including, `last`; None means no bound."""

    first: int | None
    last: int | None
    num_bytes: int
    sides: tuple[SideTotals, SideTotals]
    steps: RangeSteps | None
    """The facts about the steps; this field, `judged` and `measured` are None if there are no pairs."""
    judged: Verdicts | None
    measured: NoiseMeasure | None
    moved: list[set[str]]
    """For each noise run, the roots in which it differs from the first run."""
    compared: Any
    """A table with the number of pairs of each module; None if there are no pairs."""
    num_on_other_parts: int
    """The number of values of single ranks that both runs have, but for different parts of the batch."""
    num_in_other_micro_steps: int
    """The number of values of the first run whose batch has another number of micro-steps in the second run."""
    rows: PairedSteps | None
    """The rows, if they were read in this process; else None."""

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"rows": None}


class RangeComparer:
    """Compares ranges of steps of two runs."""

    def __init__(
        self, a: Run, b: Run, options: DiffOptions, own_names: tuple[Mapping[str, str], Mapping[str, str]],
        report: PayloadReport,
    ) -> None:  # fmt: skip
        how = options.global_view
        self._views = [run.view(loss=how.loss, layouts=how.layouts) for run in (a, b, *options.noise)]
        self.jitter_eps = max((run.jitter_eps for run in options.noise), default=0.0)
        """The largest share by which the inputs of a noise run were moved."""
        self._options, self._own_names, self._report = options, own_names, report

    def rows(self, first: int | None, last: int | None) -> PairedSteps:
        return self._read(first, last)[0]

    def __call__(self, first: int | None, last: int | None) -> RangeResult:
        before, selection = self._report.num_bytes, self._options.selection
        sides = SideTotals(selection, self._own_names[0]), SideTotals(selection, self._own_names[1])
        compared, num_in_other_micro_steps = self._read(first, last, sides)
        a, b, pairs = compared
        steps = pc.unique(b.table.column("step")), pc.unique(a.table.column("step"))
        for total, side, others, unpaired in zip(sides, (a, b), steps, (pairs.only_a, pairs.only_b), strict=True):
            total.problems.add(side.rows.findings)
            total.steps.update(side.table.column("step").unique().to_pylist())
            total.unpaired.add(side.table)
            alone = side.table.take(pa.array(unpaired))
            total.only.append(by_value(alone.filter(pc.is_in(alone.column("step"), others))))
            self._report(side.payload_bytes(unpaired))
        judged = measured = counts = known = None
        moved: list[set[str]] = []
        if len(pairs.a):
            judged = judge(a, b, pairs, self._options.tolerance, self._report)
            noise = [RunSteps.read(view, selection, first, last) for view in self._views[2:]]
            measured = measure(judged, compared, noise)
            moved = [moved_roots(a, side) for side in noise]
            counts = a.table.select(MODULE).take(pa.array(pairs.a)).group_by(MODULE).aggregate([([], "count_all")])
            known = RangeSteps.of(compared)
        return RangeResult(
            first=first,
            last=last,
            num_bytes=self._report.num_bytes - before,
            sides=sides,
            steps=known,
            judged=judged,
            measured=measured,
            moved=moved,
            num_on_other_parts=group_rows(a.table.take(pa.array(pairs.on_other_parts)), VALUE_KEY).num_groups,
            num_in_other_micro_steps=num_in_other_micro_steps,
            compared=counts,
            rows=compared,
        )

    def _read(self, first: int | None, last: int | None, sides: Sequence[SideTotals] = ()) -> tuple[PairedSteps, int]:
        """Pair the rows; record in `sides` what was left out, and return the number of values in other micro-steps."""
        a = RunSteps.read(self._views[0], self._options.selection, first, last)
        b = RunSteps.read(self._views[1], self._options.selection, first, last, self._options.renames)
        a, b, handed_on = comparable(a, b)
        a, b, recomputed = without_recomputed(a, b)
        a, b, num_in_other_micro_steps = without_other_micro_steps(a, b)
        for side, *left_out in zip(sides, handed_on, recomputed, strict=False):
            side.num_handed_on, side.num_recomputed = left_out
        return PairedSteps(a, b, align(a.table, b.table)), num_in_other_micro_steps
