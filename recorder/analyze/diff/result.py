"""The answer of `diff`: its named tuples, the table of the modules that differ, and sentences that tell the answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from ...numerics.keys import Integers, group_rows
from ...numerics.moments import Floats, integers, numbers
from .culprit_findings import Culprit
from .noise import Drifted, LoudNoise
from .renames import RenameHint
from .step_range import MODULE


class Difference(NamedTuple):
    """One value that differs."""

    step: int
    module_path: str
    site: str
    name: str
    kind: str
    """``values``, ``statistics`` (no values to compare), ``fingerprint`` (nothing else to compare), ``shape``,
    ``dtype`` (the values are equal), ``after_tap`` (a gradient that one run took behind the module, of the uses outside
    it alone), or ``partial``: one run lacks ranks of it, so that it had to differ."""
    micro_step: int | None
    call: int
    rank_a: int | None
    """None: of all ranks."""
    rank_b: int | None
    max_abs: float | None
    of_max: float | None
    """`max_abs` relative to the largest magnitude in either tensor."""
    max_rel: float | None
    max_ulp: int | None
    nonfinite_a: int | None
    nonfinite_b: int | None
    statistic: str | None
    """Where only statistics could be compared, the one that is farthest apart."""
    statistic_a: float | None
    statistic_b: float | None
    statistic_rel: float | None
    """By how much, of the largest magnitude; of a norm the larger one. None for a count."""
    noise: float | None
    """How far noise moves it, in the same measure; None without noise runs, or where they lack the value."""
    lacks_a: str | None
    """Ranks that are missing in the first run's value, as JSON."""
    lacks_b: str | None


class LackingRanks(NamedTuple):
    """Values that lack ranks in one run, and not in the other."""

    run: str
    """``a`` or ``b``."""
    ranks: list[int]
    num_values: int


class LeftOut(NamedTuple):
    """Values that both runs have and that could not be compared."""

    num_values: int
    why: str
    modules: Sequence[str] = ()
    """Those whose values these are, where that says more than `why`."""


class Diff(NamedTuple):
    """How two runs compare."""

    is_equal: bool
    """Within the tolerance; all could be read; and unless only common values were asked for, neither has a value, or
    something of a value, at a common step that the other lacks. What is `left_out` does not count."""
    verdict: str
    """``equal``, ``different``, or ``equal as far as compared`` where something that both have could not be."""
    first: Difference | None
    """The first value that differs, in the order of execution of the first run."""
    culprits: list[Culprit]
    """The stages that differ although all that they are made from agrees, the first on top; what else differs inherits.
    Of the first steps with differences."""
    table: Any
    """`pa.Table` of the values that differ, in that order: value, kind, dtypes, shapes, distances and, where rules
    kept them, the histograms of both as the column of a run has them, and how the units of both compare."""
    modules: Any
    """`pa.Table`: a row for each module that differs, the first that does so on top."""
    only_a: Any
    """`pa.Table`: values of common steps that only the first run has, by root, module_path, site, name."""
    only_b: Any
    num_compared: int
    num_by_fingerprint: int
    """Pairs that are equal by fingerprint; their payloads were not read."""
    num_by_values: int
    num_by_statistics: int
    num_incomparable: int
    """Pairs of which one side has something that is missing on the other, and nothing that could be compared."""
    num_bare: int
    """Pairs of which neither run kept values, statistics or a fingerprint; they make no difference."""
    left_out: list[LeftOut]
    """What else could not be compared, by why; `num_compared` counts it."""
    unread: dict[str, int]
    """Values that could not be read and so were compared by their statistics, if at all: how many, by what the reading
    said."""
    damage: list[str]
    """What else is damaged in one of the runs, or in one of the noise: its rows are not there."""
    partial: list[LackingRanks]
    """Pairs of which one run lacks ranks, whether or not they differ."""
    steps_only_a: list[int]
    steps_only_b: list[int]
    has_common_modules: bool = True
    """False where each run has modules, and none is common: what was compared are numbers of the program."""
    unpaired_a: Sequence[str] = ()
    """Where modules were renamed: those of the first run that the second has under no name."""
    unpaired_b: Sequence[str] = ()
    """By its own names."""
    problems_a: Sequence[str] = ()
    """What contradicts itself in the rows of the first run, or in the layouts that were given."""
    problems_b: Sequence[str] = ()
    hints: Sequence[RenameHint] = ()
    """Modules that each run has alone and that look alike: what a file of renamed modules would say of them."""
    num_handed_on_a: int = 0
    """Rows of what pipeline stages of the first run hand to each other, where the second is not cut alike: no
    difference."""
    num_handed_on_b: int = 0
    num_recomputed_a: int = 0
    """Rows that the first run alone made again for its backward, at steps at which the second did so nowhere: no
    difference."""
    num_recomputed_b: int = 0
    drifted: Drifted | None = None
    """Parameters that rounding drove apart, which hides errors smaller than what that does."""
    loud_noise: LoudNoise | None = None
    """Set where the noise runs differ from the first run by more than roundings do."""
    still_roots: Sequence[str] = ()
    """Roots with differences in which no noise run differs from the first run: any difference counts there."""

    @property
    def num_left_out(self) -> int:
        """Values that both runs have and that could not be compared."""
        return sum(one.num_values for one in self.left_out) + self.num_incomparable + self.num_bare


def by_module(table: Any, compared: Any) -> Any:
    """Return the modules that differ, in the order in which they first differ."""
    groups = group_rows(table, MODULE)
    firsts = table.take(pa.array(groups.firsts))
    order = np.argsort(groups.ids, kind="stable")
    starts = np.searchsorted(groups.ids[order], np.arange(groups.num_groups))
    columns = {name: firsts.column(name) for name in (*MODULE, "step", "site", "name", "kind")}
    columns["differing"] = pa.array(np.bincount(groups.ids, minlength=groups.num_groups))
    totals = compared.group_by(MODULE).aggregate([("count_all", "sum")]).to_pylist()
    of_module = {tuple(total[name] for name in MODULE): total["count_all_sum"] for total in totals}
    keys = zip(*(firsts.column(name).to_pylist() for name in MODULE), strict=True)
    columns["compared"] = pa.array([of_module[key] for key in keys], pa.int64())
    for name in ("max_abs", "of_max", "max_rel", "max_ulp", "statistic_rel"):
        values = numbers(table.column(name))
        columns[name] = _extreme(np.fmax, values, order, starts)
    by_statistics = np.bincount(groups.ids, table.column("statistic").is_valid().to_numpy(), groups.num_groups)
    columns["by_statistics"] = pa.array(by_statistics.astype(np.int64))
    columns["min_cosine"] = _extreme(np.fmin, numbers(table.column("cosine")), order, starts)
    for name in ("nonfinite_a", "nonfinite_b"):
        counts = integers(table.column(name), 0)
        columns[name] = pa.array(np.add.reduceat(counts[order], starts) if len(starts) else counts)
    return pa.table(columns).rename_columns(
        ["first_step" if n == "step" else f"first_{n}" if n in ("site", "name", "kind") else n for n in columns]
    )


def _extreme(function: np.ufunc, values: Floats, order: Integers, starts: Integers) -> Any:
    """Return the extreme of each group, nulls left out; null where a group has nothing else."""
    extremes = function.reduceat(values[order], starts) if len(starts) else values
    return pa.array(extremes, mask=np.isnan(extremes))


def first_difference(table: Any) -> Difference | None:
    """Return the first value that differs; None if none does."""
    if not table.num_rows:
        return None
    row = table.slice(0, 1).to_pylist()[0]
    return Difference(**{name: row[name] for name in Difference._fields})
