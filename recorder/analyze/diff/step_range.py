"""Compares two runs over one range of steps, in this process or another. Also defines the result over all ranges.

The result of a range can be pickled; the rows of the range stay in the process that read them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from ...numerics.keys import VALUE_KEY, group_rows
from ...run.notes import Problems
from ...run.run import Run
from ...run.selection import GlobalOptions, Selection
from .compare import Tolerance
from .culprit_findings import Culprit, RangeSteps
from .noise import Drifted, LoudNoise, NoiseMeasure, measure
from .pairs import PairedSteps, RunSteps, Verdicts, align, comparable, judge, moved_roots
from .renames import RenameHint, Renames, UnpairedModules

MODULE = ["root", "module_path"]
VALUE = [*MODULE, "site", "name"]
_ONLY = [*VALUE, "rows", "first_step", "last_step"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffOptions:
    """The options of a comparison of two runs."""

    selection: Selection
    tolerance: Tolerance
    """The distances up to which elements count as equal."""
    global_view: GlobalOptions
    """The options for joining the ranks' values of each run into global tensors."""
    noise: Sequence[Run]
    """Repeats or perturbed repeats (twins) of the first run. Only differences larger than theirs count."""
    renames: Renames
    """The names that the modules of the second run have in the first run."""
    common: bool
    """True if values that only one run has do not count as differences."""


class SideTotals:
    """The results that concern one of the two runs, for a range of steps or for all ranges joined so far."""

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

    def only_here(self) -> Any:
        """Return the tables of `only` as one table, with one row for each value."""
        aggregates = [("rows", "sum"), ("first_step", "min"), ("last_step", "max")]
        groups = pa.concat_tables(self.only).group_by(VALUE, use_threads=False)
        return groups.aggregate(aggregates).rename_columns(_ONLY)


class PayloadReport:
    """Counts the payload bytes that have been compared, and reports them. A copy in another process only counts."""

    def __init__(self, report: Callable[[int], None] = lambda num_bytes: None) -> None:
        self._report = report
        self.num_bytes = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return PayloadReport, ()

    def __call__(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self._report(num_bytes)


def by_value(rows: Any) -> Any:
    """Return a table with a row for each value, in order: the number of its rows, its first step and its last step."""
    aggregates = [([], "count_all"), ("step", "min"), ("step", "max")]
    return rows.group_by(VALUE, use_threads=False).aggregate(aggregates).rename_columns(_ONLY)


@dataclass
class RangeResult:
    """The result of comparing the steps from `first` up to, but not including, `last`. None means no bound."""

    first: int | None
    last: int | None
    num_bytes: int
    sides: tuple[SideTotals, SideTotals]
    steps: RangeSteps | None
    """Facts about the steps. This field, `judged` and `measured` are None if no rows could be paired."""
    judged: Verdicts | None
    measured: NoiseMeasure | None
    moved: list[set[str]]
    """For each noise run, the roots (models) in which the noise run differs from the first run."""
    compared: Any
    """A table with the number of paired rows of each module; None if there are no pairs."""
    num_on_other_parts: int
    """The number of values of single ranks that both runs have, but for different parts of the batch."""
    num_in_other_micro_steps: int
    """The number of values of the first run whose batch the second run divides into more or fewer micro-steps."""
    rows: PairedSteps | None
    """The paired rows of both runs, if they were read in this process; else None."""

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"rows": None}


class RangeComparer:
    """Compares ranges of steps of two runs."""

    def __init__(
        self, a: Run, b: Run, options: DiffOptions, own_names: tuple[Mapping[str, str], Mapping[str, str]],
        report: PayloadReport,
    ) -> None:  # fmt: skip
        how = options.global_view
        self.views = [run.view(loss=how.loss, layouts=how.layouts) for run in (a, b, *options.noise)]
        """The global views of the two runs and of the noise runs."""
        self.jitter_eps = max((run.jitter_eps for run in options.noise), default=0.0)
        """The largest share by which the inputs of any noise run were perturbed; 0 without noise runs."""
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
            noise = [RunSteps.read(view, selection, first, last) for view in self.views[2:]]
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
        """Return the paired rows, and `num_in_other_micro_steps`. Store in `sides` how many rows were left out."""
        a = RunSteps.read(self.views[0], self._options.selection, first, last)
        b = RunSteps.read(self.views[1], self._options.selection, first, last, self._options.renames)
        a, b, handed_on, recomputed, num_in_other_micro_steps = comparable(a, b)
        for side, *left_out in zip(sides, handed_on, recomputed, strict=False):
            side.num_handed_on, side.num_recomputed = left_out
        return PairedSteps(a, b, align(a.table, b.table)), num_in_other_micro_steps


class Difference(NamedTuple):
    """One value that differs between two runs."""

    step: int
    root: str
    module_path: str
    site: str
    name: str
    kind: str
    """The kind of the difference: ``values``, ``statistics`` (no values to compare), ``fingerprint`` (nothing else to
    compare), ``shape``, ``dtype`` (the values are equal), ``after_tap`` (one run's gradient covers only the value's
    uses outside its module), or ``partial`` (one run lacks ranks of the value)."""
    micro_step: int | None
    call: int
    rank_a: int | None
    """The rank of the first run's row; None if the row is for all ranks."""
    rank_b: int | None
    max_abs: float | None
    of_max: float | None
    """`max_abs` divided by the largest magnitude in either tensor."""
    max_rel: float | None
    max_ulp: int | None
    nonfinite_a: int | None
    nonfinite_b: int | None
    statistic: str | None
    """The name of the statistic that is farthest apart; None unless statistics were compared."""
    statistic_a: float | None
    statistic_b: float | None
    statistic_rel: float | None
    """How far the statistic is apart, as a share of the largest magnitude (of the larger norm for a norm). None for
    counts."""
    noise: float | None
    """The `max_abs` (or `statistic_rel`) that noise alone causes. None if no noise run has the value."""
    lacks_a: str | None
    """The ranks that are missing from the first run's value, as JSON."""
    lacks_b: str | None


class LackingRanks(NamedTuple):
    """A count of the values that lack ranks in one run but not in the other run."""

    run: str
    """The run that lacks the ranks: ``a`` or ``b``."""
    ranks: list[int]
    num_values: int


class LeftOut(NamedTuple):
    """Values that both runs have but that could not be compared."""

    num_values: int
    why: str
    modules: Sequence[str] = ()
    """The paths of the modules of the values; empty if `why` tells enough."""


class Diff(NamedTuple):
    """The result of comparing two runs."""

    is_equal: bool
    """True if all values could be read and are equal within the tolerance. Both runs must also have the same values,
    with comparable data, at common steps, unless only common values are compared. Values in `left_out` do not count."""
    verdict: str
    """``equal``, ``different``, or ``equal as far as compared`` if some value of both runs could not be compared."""
    first: Difference | None
    """The first value that differs, in the order of execution of the first run."""
    culprits: list[Culprit]
    """The computations that differ although all their inputs agree, in the order of time. Other differences are
    inherited from inputs. Only the first steps with differences are searched."""
    table: Any
    """`pa.Table` with a row for each value that differs, in the order of execution: value, kind, dtypes, shapes and
    distances; if rules kept them, also the histograms of both runs and a comparison of units (channels or neurons)."""
    modules: Any
    """`pa.Table` with a row for each module that differs, ordered by the first difference."""
    only_a: Any
    """A row (`pa.Table`) per value (root, module_path, site, name) that only the first run has, at common steps."""
    only_b: Any
    num_compared: int
    num_by_fingerprint: int
    """The number of pairs with equal fingerprints, whose payloads were not read."""
    num_by_values: int
    num_by_statistics: int
    num_incomparable: int
    """The number of pairs that could not be compared, because one row lacks the data that the other row has."""
    num_bare: int
    """The number of pairs without values, statistics or fingerprints in either run. They do not count as different."""
    left_out: list[LeftOut]
    """Further values that could not be compared, by reason. `num_incomparable` and `num_bare` do not count them, but
    `num_compared` does."""
    unread: dict[str, int]
    """The number of values that could not be read, by error text. They were compared by statistics if possible."""
    damage: list[str]
    """Descriptions of damaged shards of the compared runs and the noise runs. The damaged rows are missing."""
    partial: list[LackingRanks]
    """Counts of the pairs in which one run lacks ranks, whether or not the pair differs."""
    steps_only_a: list[int]
    steps_only_b: list[int]
    has_common_modules: bool = True
    """False if both runs have modules but no module in common, so that only the program's own numbers were compared."""
    unpaired_a: Sequence[str] = ()
    """If modules were renamed, the modules of the first run without a partner in the second run."""
    unpaired_b: Sequence[str] = ()
    """If modules were renamed, the modules of the second run without a partner in the first run, by their own names."""
    problems_a: Sequence[str] = ()
    """Contradictions in the rows of the first run, or in the layouts that the caller gave."""
    problems_b: Sequence[str] = ()
    hints: Sequence[RenameHint] = ()
    """Lines proposed for a file of renamed modules, derived from similar modules that only one run has."""
    num_handed_on_a: int = 0
    """The number of rows of the first run that are not compared because ranks pass the values to each other, from stage
    to stage or to experts and back, and the second run has other stages or experts."""
    num_handed_on_b: int = 0
    num_recomputed_a: int = 0
    """The number of recomputed rows of the first run that are not compared, because the second run recomputed nothing
    at these steps."""
    num_recomputed_b: int = 0
    drifted: Drifted | None = None
    """The parameters that rounding drove apart, which hides smaller errors. None if there are none."""
    loud_noise: LoudNoise | None = None
    """Set if the noise runs differ from the first run by more than rounding explains; else None."""
    num_probed: int = 0
    """The number of norms of the probe (``keep=probe``) that were compared. They do not count as values."""
    num_probes_differing: int = 0
    still_roots: Sequence[str] = ()
    """The roots (models) in which no noise run differs from the first run. There every difference counts."""

    @classmethod
    def of(cls, table: Any, compared: Any, **facts: Any) -> Diff:
        """Return the result with the differing rows and further facts. `compared` has the modules of all rows."""
        first = table.select(Difference._fields).slice(0, 1).to_pylist()
        one = Difference(**first[0]) if first else None
        return cls(first=one, table=table, modules=_by_module(table, compared), **facts)

    @property
    def num_left_out(self) -> int:
        """The number of values that both runs have but that could not be compared."""
        return sum(one.num_values for one in self.left_out) + self.num_incomparable + self.num_bare


def _by_module(table: Any, compared: Any) -> Any:
    """Return a table of the modules that differ, in the order in which they first differ."""
    firsts, largest = ("step", "site", "name", "kind"), ("max_abs", "of_max", "max_rel", "max_ulp", "statistic_rel")
    sums = ("nonfinite_a", "nonfinite_b")
    numbers = table.column("max_ulp").cast(pa.float64(), safe=False)
    table = table.set_column(table.column_names.index("max_ulp"), "max_ulp", numbers)
    of_modules = table.group_by(MODULE, use_threads=False).aggregate(
        [*((name, "first") for name in firsts), ([], "count_all"), *((name, "max") for name in largest)]
        + [("statistic", "count"), ("cosine", "min")]
        + [(name, "sum", pc.ScalarAggregateOptions(min_count=0)) for name in sums]
    )
    totals = compared.group_by(MODULE).aggregate([("count_all", "sum")]).to_pylist()
    total_of = {tuple(total[name] for name in MODULE): total["count_all_sum"] for total in totals}
    modules = zip(*(of_modules.column(name).to_pylist() for name in MODULE), strict=True)
    names = [*MODULE, *(f"first_{name}" for name in firsts), "differing"]
    named = of_modules.rename_columns([*names, *largest, "by_statistics", "min_cosine", *sums])
    return named.add_column(len(names), "compared", pa.array([total_of[module] for module in modules], pa.int64()))
