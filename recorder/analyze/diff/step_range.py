"""One range of steps of two runs, compared: the unit of work that a mapper hands to this process or to another.

What comes of a range can be pickled; the rows stay in the process that read them.
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
from .align import align
from .compare import Tolerance
from .culprits.findings import RangeSteps
from .noise import NoiseMeasure, measure
from .pairs import (
    PairedSteps,
    RunSteps,
    Verdicts,
    comparable,
    judge,
    moved_roots,
    without_other_micro_steps,
    without_recomputed,
)
from .renames import Renames, UnpairedModules
from .result import MODULE, VALUE, by_value


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffOptions:
    """What is asked of two runs."""

    selection: Selection
    """The values that are compared."""
    tolerance: Tolerance
    """How far elements may be apart and still be equal."""
    global_view: GlobalOptions
    """How the ranks of each run make global tensors."""
    noise: Sequence[Run]
    """Repeats or perturbed twins of the first run: a difference counts where it is larger than theirs."""
    renames: Renames
    """What the modules of the second run are called in the first."""
    common: bool
    """True where values that one run alone has make no difference."""


class KnownValues:
    """What one run has."""

    def __init__(self) -> None:
        self.num_rows = 0
        self.num_selected = 0
        self.steps: set[int] = set()
        """The steps of the selected values."""
        self._values: dict[str, dict[Any, None]] = {name: {} for name in ("step", *VALUE)}

    def add(self, side: RunSteps) -> None:
        self.num_rows += side.rows.table.num_rows
        self.num_selected += side.table.num_rows
        self.steps.update(side.table.column("step").unique().to_pylist())
        for name, known in self._values.items():
            known.update(dict.fromkeys(side.rows.table.column(name).unique().to_pylist()))

    def join(self, other: KnownValues) -> None:
        self.num_rows += other.num_rows
        self.num_selected += other.num_selected
        self.steps |= other.steps
        for name, known in self._values.items():
            known.update(other._values[name])

    def table(self) -> Any:
        """Its distinct values, each column by itself: the rows mean nothing."""
        length = max(map(len, self._values.values()))
        return pa.table({name: [*known, *[None] * (length - len(known))] for name, known in self._values.items()})

    def known(self, column: str, selection: Selection) -> list[Any]:
        """The values of a column that are selected."""
        table = pa.table({column: list(self._values[column])})
        narrowed = selection.narrow(table) if column in selection.columns else table
        return sorted(narrowed.column(column).to_pylist())


class PayloadReport:
    """Tells of bytes done, and counts them; in another process it only counts."""

    def __init__(self, report: Callable[[int], None] = lambda num_bytes: None) -> None:
        self._report = report
        self.num_bytes = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return PayloadReport, ()

    def __call__(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self._report(num_bytes)


@dataclass
class RangeResult:
    """What came of a range of steps: from `first` up to, but not including, `last`; None where nothing bounds it."""

    first: int | None
    last: int | None
    num_bytes: int
    problems: tuple[Problems, Problems]
    handed_on: tuple[int, int]
    recomputed: tuple[int, int]
    seen: tuple[KnownValues, KnownValues]
    unpaired: tuple[UnpairedModules, UnpairedModules]
    only: tuple[Any, Any]
    steps: RangeSteps | None
    """With the next three: where there are pairs."""
    judged: Verdicts | None
    measured: NoiseMeasure | None
    moved: list[set[str]]
    """For each noise run, the roots in which it differs from the first run."""
    compared: Any
    """How many pairs of each module there are."""
    num_on_other_parts: int
    """Values of single ranks that both runs have and that are of other parts of the batch."""
    num_in_other_micro_steps: int
    """Values of the first run in micro-steps of a batch that the second divides into other numbers of them."""
    rows: PairedSteps | None
    """Where they were read in this process."""

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"rows": None}


class RangeComparer:
    """Compares ranges of steps."""

    def __init__(
        self,
        a: Run,
        b: Run,
        options: DiffOptions,
        own_names: tuple[Mapping[str, str], Mapping[str, str]],
        report: PayloadReport,
    ) -> None:
        how = options.global_view
        self._views = [run.view(loss=how.loss, layouts=how.layouts) for run in (a, b, *options.noise)]
        self.jitter_eps = max((run.jitter_eps for run in options.noise), default=0.0)
        """By which share the inputs of the noise runs were moved."""
        self._selection = options.selection
        self._tolerance = options.tolerance
        self._renames = options.renames
        self._own_names = own_names
        self._report = report

    def rows(self, first: int | None, last: int | None) -> PairedSteps:
        """What is compared of a range of steps."""
        return self._read(first, last)[0]

    def __call__(self, first: int | None, last: int | None) -> RangeResult:
        before = self._report.num_bytes
        compared, handed_on, recomputed, num_in_other_micro_steps = self._read(first, last)
        a, b, pairs = compared
        problems = Problems(self._selection), Problems(self._selection)
        seen, only = (KnownValues(), KnownValues()), []
        unpaired = UnpairedModules(self._own_names[0]), UnpairedModules(self._own_names[1])
        steps = pc.unique(a.table.column("step")), pc.unique(b.table.column("step"))
        for number, (side, others, unpaired_rows) in enumerate(
            zip((a, b), reversed(steps), (pairs.only_a, pairs.only_b), strict=True)
        ):
            problems[number].add(side.rows.findings)
            seen[number].add(side)
            unpaired[number].add(side.table)
            alone = side.table.take(pa.array(unpaired_rows))
            only.append(by_value(alone.filter(pc.is_in(alone.column("step"), others))))
            self._report(side.payload_bytes(unpaired_rows))
        judged = measured = counts = known = None
        moved: list[set[str]] = []
        if len(pairs.a):
            judged = judge(a, b, pairs, self._tolerance, self._report)
            noise = [RunSteps.read(view, self._selection, first, last) for view in self._views[2:]]
            measured = measure(judged, compared, noise)
            moved = [moved_roots(a, side) for side in noise]
            counts = a.table.select(MODULE).take(pa.array(pairs.a)).group_by(MODULE).aggregate([([], "count_all")])
            known = RangeSteps.of(compared)
        return RangeResult(
            first=first,
            last=last,
            num_bytes=self._report.num_bytes - before,
            problems=problems,
            handed_on=handed_on,
            recomputed=recomputed,
            seen=seen,
            unpaired=unpaired,
            only=(only[0], only[1]),
            steps=known,
            judged=judged,
            measured=measured,
            moved=moved,
            num_on_other_parts=group_rows(a.table.take(pa.array(pairs.on_other_parts)), VALUE_KEY).num_groups,
            num_in_other_micro_steps=num_in_other_micro_steps,
            compared=counts,
            rows=compared,
        )

    def _read(self, first: int | None, last: int | None) -> tuple[PairedSteps, tuple[int, int], tuple[int, int], int]:
        a = RunSteps.read(self._views[0], self._selection, first, last)
        b = RunSteps.read(self._views[1], self._selection, first, last, self._renames)
        a, b, handed_on = comparable(a, b)
        a, b, recomputed = without_recomputed(a, b)
        a, b, num_in_other_micro_steps = without_other_micro_steps(a, b)
        return PairedSteps(a, b, align(a.table, b.table)), handed_on, recomputed, num_in_other_micro_steps
