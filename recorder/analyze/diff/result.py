"""The answer of `diff`: its named tuples, the table of the modules that differ, and sentences that tell the answer."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ...numerics.keys import Integers, group_rows
from ...numerics.moments import Floats, integers, numbers
from ...system.text import counted, named, number
from .compare import Tolerance
from .culprit_findings import Culprit
from .noise import Drifted, LoudNoise
from .renames import RenameHint
from .step_range import MODULE, DiffOptions


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


_HOW = {
    "values": "values",
    "statistics": "statistics, without values to compare",
    "fingerprint": "fingerprints only: there is nothing else to compare",
    "shape": "shapes",
    "dtype": "types; the values are equal",
    "after_tap": "one run took the gradient behind the module, of the uses outside it alone",
}


def verdict(result: Diff, options: DiffOptions) -> str:
    """Return the answer: equal, different, or equal as far as compared, and of how many values."""
    tolerance = options.tolerance
    num_compared = result.num_compared - result.num_left_out
    num_equal = num_compared - result.table.num_rows
    within = "exactly" if tolerance.is_exact else f"within {_tolerances(tolerance)}"
    if options.noise:
        within = "within the noise" + (f" or {_tolerances(tolerance)}" if not tolerance.is_exact else "")
    of_all = "" if num_compared == result.num_compared else f"{num_compared} of "
    unpaired = (
        (name, pc.sum(table.column("rows")).as_py()) for name, table in (("A", result.only_a), ("B", result.only_b))
    )
    alone = "".join(f", {num} in {name} alone" for name, num in unpaired if num and not options.common)
    num_shapes = sum(
        row["shape_a"] != row["shape_b"] for row in result.table.select(["shape_a", "shape_b"]).to_pylist()
    )
    ways = {
        "fingerprint": num_compared - result.num_by_values - result.num_by_statistics - num_shapes,
        "values": result.num_by_values,
        "statistics": result.num_by_statistics,
    } | ({"shape": num_shapes} if num_shapes else {})
    return (
        f"{result.verdict}: {of_all}{counted(result.num_compared, 'value')} compared: {num_equal} equal {within}, "
        f"{result.table.num_rows} differ{alone} "
        f"(compared by: {', '.join(f'{way} {num}' for way, num in ways.items())})"
    )


def reasons(result: Diff, *, common: bool) -> Iterator[str]:
    """Yield reasons for a verdict other than equal where no value differs."""
    if result.first is None and result.verdict == "different":
        yield "what could be compared is equal, but one run lacks values that the other has; --common ignores that"
    for left_out in result.left_out:
        yield f"not compared: {counted(left_out.num_values, 'value')}: {left_out.why}"
    if result.num_incomparable:
        values = counted(result.num_incomparable, "value")
        way_out = "" if common else "; --common ignores that"
        yield f"not compared: {values}: one run has nothing of what the other kept of them{way_out}"


def faults(result: Diff, limit: int) -> Iterator[str]:
    """Yield lines about what is wrong with the runs themselves, or missing in them."""
    for text, num in list(result.unread.items())[: limit or None]:
        yield f"cannot be read: {counted(num, 'value')}, compared by statistics if there are any: {text}"
    for text in result.damage[: limit or None]:
        yield f"cannot be read: rows that are left out: {text}"
    hidden = sum(max(0, num - limit) for num in (len(result.unread), len(result.damage))) if limit else 0
    if hidden:
        yield f"{hidden} more of these (--limit 0 shows all)"
    for partial in result.partial:
        num_values = counted(partial.num_values, "value")
        yield f"{partial.run.upper()} lacks {named('rank', partial.ranks)} in {num_values}"
    for name, problems in (("A", result.problems_a), ("B", result.problems_b)):
        for problem in problems:
            yield f"finding in {name}: {problem}"
    for name, paths in (("A", result.unpaired_a), ("B", result.unpaired_b)):
        if paths:
            shown = ", ".join(map(repr, paths[: limit or None])) + cut_text(len(paths), limit)
            yield f"modules of {name} without a partner ({len(paths)}): {shown}"


def describe(first: Difference) -> str:
    """Return where the first value that differs is, and how far its two sides are apart."""
    value = " ".join(filter(None, (repr(first.module_path), first.site, first.name)))
    when = "" if first.micro_step is None else f", micro_step {first.micro_step}"
    ranks = rank_cell(first.rank_a, first.rank_b)
    rank = f", rank {ranks}" if ranks else ""
    kind = _HOW.get(first.kind, "")
    if first.kind == "partial":
        both = (("A", first.lacks_a), ("B", first.lacks_b))
        kind = " and ".join(f"{run} lacks {named('rank', json.loads(lost))}" for run, lost in both if lost)
    apart = ""
    if first.max_abs:
        of_max = "" if first.of_max is None else f", {number(first.of_max)} of the largest magnitude"
        apart = f" by up to {number(first.max_abs)}{of_max}"
    elif first.statistic is not None:
        apart = f": {statistic_cell(first._asdict())}"
    if first.nonfinite_a or first.nonfinite_b:
        apart += f"; NaN or infinite in {first.nonfinite_a} elements of A, {first.nonfinite_b} of B"
    return f"first difference: step {first.step}{when}, {value}{rank}: {kind}{apart}"


def rename_lines(hints: Sequence[RenameHint], limit: int) -> Iterator[str]:
    """Yield lines that propose the content of a file of renamed modules."""
    if not hints:
        return
    num_modules, num_same = (sum(getattr(hint, name) for hint in hints) for name in ("num_modules", "num_same"))
    same = f", {num_same} of them equal first parameters" if num_same else ""
    alike = f"{counted(num_modules, 'module')} that A has alone and as many of B have tensors of the same shapes{same}"
    cut = cut_text(len(hints), limit)
    yield f"hint: {alike}; if they are the same, --rename FILE pairs them, with these lines{cut}"
    for hint in hints[: limit or None]:
        yield f"  {hint.line}"


def accusations(culprits: Sequence[Culprit], limit: int) -> Iterator[str]:
    """Yield a line for each culprit."""
    for culprit in culprits[: limit or None]:
        rank = f", {named('rank', culprit.ranks)}" if culprit.ranks else ""
        if culprit.micro_batches:
            some = ", ".join(map(str, culprit.micro_batches))
            rank += f", micro-batch{'es' * (len(culprit.micro_batches) > 1)} {some}"
        yield f"culprit: step {culprit.step}, {culprit.phase} of {_accused(culprit)}{rank}: {_symptom(culprit)}"
        if culprit.hint:
            yield f"hint: {culprit.hint}"
    if len(culprits) > 1:
        yield "note: of several culprits the first is sure; the others may follow from it"
    if limit and len(culprits) > limit:
        yield f"{len(culprits) - limit} more culprits (--limit 0 shows all)"


def _accused(culprit: Culprit) -> str:
    if culprit.module_path is None:
        few = "all parameters" if culprit.num_params else "some parameters"
        touched = f"{culprit.num_params} parameters" if culprit.num_params > 1 else few
        if culprit.stages:
            touched += f" of stage{'s' * (len(culprit.stages) > 1)} {', '.join(map(str, culprit.stages))}"
        return f"{touched} alike" + (f" ({culprit.why})" if culprit.why else "")
    return f"{culprit.module_path!r}" + (f" ({culprit.why})" if culprit.why else "")


def _symptom(culprit: Culprit) -> str:
    """Return the value that shows a culprit, and the way in which it differs."""
    is_there = culprit.seen_at == culprit.module_path or culprit.site == "scalar"
    of = "" if is_there else f" of {culprit.seen_at!r}"
    value = " ".join(filter(None, (culprit.site, culprit.name))) + of
    if culprit.alone_in is not None:
        return f"{value} is in {culprit.alone_in.upper()} alone"
    if culprit.statistic is None and culprit.nonfinite_a != culprit.nonfinite_b:
        return f"{value} is NaN or infinite in {culprit.nonfinite_b} elements, {culprit.nonfinite_a} in A"
    if culprit.factor is not None:
        return f"{value} is {number(culprit.factor)} times what it was"
    if culprit.max_abs:
        of_max = "" if culprit.of_max is None else f", {number(culprit.of_max)} of the largest magnitude"
        noise = f", {culprit.max_abs / culprit.noise:.3g} times the noise" if culprit.noise else ""
        return f"{value} differs by up to {number(culprit.max_abs)}{of_max}{noise}"
    if culprit.statistic is not None:
        return f"{value} differs: {statistic_cell({**culprit._asdict(), 'statistic_rel': None})}"
    return f"{value} differs" + (f" ({culprit.kind})" if culprit.kind else "")


def notes(result: Diff, options: DiffOptions) -> Iterator[str]:
    """Yield lines about what was not compared, and about how far the noise can be trusted."""
    num_only = sum(table.num_rows for table in (result.only_a, result.only_b))
    if result.num_bare:
        yield f"note: of {counted(result.num_bare, 'value')} neither run kept anything that could be compared"
    for run, other, num in (("A", "B", result.num_handed_on_a), ("B", "A", result.num_handed_on_b)):
        if num:
            rows = f"{counted(num, 'row')} of {run} that one pipeline stage hands to another"
            yield f"note: {rows} are not compared: {other} is not cut into stages so"
    for run, other, num in (("A", "B", result.num_recomputed_a), ("B", "A", result.num_recomputed_b)):
        if num:
            rows = f"{counted(num, 'row')} that {run} recomputed for its backward"
            yield f"note: {rows} are not compared: {other} recomputed nothing at these steps"
    if result.still_roots:
        roots = ", ".join(map(repr, result.still_roots))
        yield f"warning: the noise runs moved nothing in {roots}, where every difference counts"
    if result.loud_noise is not None:
        step, share = result.loud_noise
        yield (
            f"warning: at step {step} the noise runs are {share:.2g} of the norm away from A, more than roundings "
            "do in a step, and may hide errors; a twin is recorded as A was: same ranks, seeds and program"
        )
    if result.drifted is not None:
        yield _drifted(result.drifted)
    if options.noise and _is_open(result):
        yield (
            "note: statistics alone do not tell an update that is wrong from one of which rounding decided an element, "
            "as it may with Adam; tensors of param, grad and optim do, and two or three more twins (--noise again) may"
        )
    if num_only and options.common:
        yield f"note: {counted(num_only, 'value')} that one run alone has do not count (--common)"


def _is_open(result: Diff) -> bool:
    """Whether an update is a culprit, but no parameter that differs was compared by its values."""
    kinds = zip(result.table.column("site").to_pylist(), result.table.column("kind").to_pylist(), strict=True)
    return any(culprit.phase == "update" for culprit in result.culprits) and ("param", "values") not in kinds


def _drifted(drifted: Drifted) -> str:
    params = counted(drifted.num_params, "parameter")
    return (
        f"note: from step {drifted.step} on rounding has driven {params} farther apart than the twins show: what is "
        f"made from them has to be {drifted.times_noise:.3g} times as far apart as else to count as different, and "
        "smaller errors are not found (--noise may be given again, with other twins)"
    )


def _tolerances(tolerance: Tolerance) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in asdict(tolerance).items() if value)


_MAX_ULP = 9999
"""The most representable numbers between two floats that are shown; a larger count tells nobody anything."""


def beside(row: dict[str, Any]) -> str:
    """Return what tells a value from others of the same module, site and name."""
    micro_step = f"micro_step={row['micro_step']}" if row["micro_step"] else ""
    call = f"call={row['call']}" if row["call"] else ""
    mode = row["mode"] if row["mode"] != "train" else ""
    return " ".join(filter(None, (micro_step, call, mode, row["phase"] if row["phase"] == "recompute" else "")))


def statistic_cell(row: dict[str, Any]) -> str:
    """Return the statistic that is farthest apart, with enough digits to tell both values apart."""
    a, b = row["statistic_a"], row["statistic_b"]
    digits = (".0f",) if row["statistic"].endswith("_count") else (".4g", ".8g", ".17g")
    texts = [tuple("none" if value is None else format(value, form) for value in (a, b)) for form in digits]
    text_a, text_b = next((pair for pair in texts if pair[0] != pair[1]), texts[-1])
    apart = "" if row["statistic_rel"] is None else f", {number(row['statistic_rel'])} apart"
    return f"{row['statistic'].removesuffix('_count')} {text_a} | {text_b}{apart}"


def rank_cell(a: int | None, b: int | None) -> str:
    """Return the ranks of a value in both runs; empty if both values are of all ranks."""
    return "" if a is None and b is None else pair_cell("all" if a is None else a, "all" if b is None else b)


def pair_cell(a: object, b: object) -> str:
    """Return what both runs have: once where it is the same."""
    return str(a) if a == b else f"{a} | {b}"


def whole_cell(value: float | int | None) -> str:
    """Return a count of representable numbers, up to the largest that tells anybody anything."""
    if value is None:
        return ""
    return f"{int(value)}" if value <= _MAX_ULP else f">{_MAX_ULP}"


def cosine_cell(value: float | None) -> str:
    """Return a cosine, with enough digits for one that is near 1."""
    return "" if value is None else f"{value:.6f}"


def percent_cell(share: float | None) -> str:
    """Return a share in percent."""
    return "" if share is None else f"{share:.3%}" if share < 0.01 else f"{share:.1%}"


def cut_text(count: int, limit: int) -> str:
    """Return what says that a list is cut; empty where it is not."""
    return f"; the first {limit} (--limit 0 shows all)" if limit and count > limit else ""
