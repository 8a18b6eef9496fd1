"""``recorder diff``: shows where two runs differ, the first divergent module on top."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import pyarrow.compute as pc
import typer

from ...analyze.diff.culprits.findings import Culprit
from ...analyze.diff.diff import compare_runs, payload_bytes
from ...analyze.diff.pairing.compare import Tolerance
from ...analyze.diff.pairing.noise import Drifted
from ...analyze.diff.pairing.rename_hints import RenameHint
from ...analyze.diff.pairing.renames import NO_RENAMES, Renames, read_renames
from ...analyze.diff.result import Diff, Difference
from ...analyze.histograms import bins_of, histogram_of_row, share_apart, subnormal_count
from ...analyze.selection import GlobalOptions, Selection
from ...analyze.units import UnitsApart
from ...format.numbers.histogram import Histogram
from ...globalview.run import Run, open_run
from ...system.text import counted, named
from ..drawing.histograms import SCALE, WIDTH, extent, histogram_line
from ..options import (
    Json,
    LayoutOption,
    LossOption,
    ModuleOption,
    NameOption,
    SchedulerOption,
    SiteOption,
    StepOption,
    complete_run,
)
from ..output import Column, Table, number, plain, print_json, progress, say, span
from ..paths import local_path
from ..scheduler import mapper_for

EPILOG = "Examples: recorder diff run-ddp run-fsdp --rtol 1e-4 --atol 1e-6    recorder diff @-2 @-1 --site grad --brief"

_FEW = 5
"""The number of lines of each table, and of culprits, where nobody asks for more."""
_JSON_ROWS = 20
_MAX_JSON_BINS = 4096
"""More than there are powers of two."""
_MAX_ULP = 9999
"""The most representable numbers between two floats that are shown; a larger count tells nobody anything."""
_MODULE_DROPS = ("nonfinite", "cosine", "first value", "compared", "stats apart")
_HISTOGRAM_DROPS = ("infinite", "subnormal", "zero")
_UNITS_DROPS = ("dead", "rank", "units")
_VALUE_DROPS = ("max ulp", "max rel", "cosine", "elements", "type", "rank", "shape", "statistics")
_EMPTY = dict.fromkeys(("max abs", "of max", "cosine", "max rel", "max ulp", "elements", "rank"), "-")
"""The cell of a column without a distance, where only statistics, shapes or one run's ranks differ."""
_HOW = {
    "values": "values",
    "statistics": "statistics, without values to compare",
    "fingerprint": "fingerprints only: there is nothing else to compare",
    "shape": "shapes",
    "dtype": "types; the values are equal",
    "after_tap": "one run took the gradient behind the module, of the uses outside it alone",
}
_OF_MAX = "of max: max abs relative to the largest magnitude in either tensor"
_APART = "apart: the share of values that would have to change sign or power of two for both to be spread alike"
_DEAD = "dead: units with no value but zero; farthest: the unit whose root of the mean square (rms) differs most"
_STATS_APART = "stats apart: where only statistics are there, how far these are apart in the same measure"


def command(
    a: Annotated[
        str, typer.Argument(metavar="A", help="A run; its order of execution counts.", autocompletion=complete_run)
    ] = "@-2",
    b: Annotated[
        str, typer.Argument(metavar="B", help="The run to compare with it.", autocompletion=complete_run)
    ] = "@-1",
    rtol: Annotated[
        float,
        typer.Option(
            min=0,
            help="Allowed |a - b| of two elements, relative to the larger of |a| and |b|. Elements near zero, which "
            "rounding alone moves by any factor, need --atol beside it.",
        ),
    ] = 0.0,
    atol: Annotated[float, typer.Option(min=0, help="Allowed |a - b| of two elements, as it is.")] = 0.0,
    ulp: Annotated[int, typer.Option(min=0, help="Allowed representable numbers between two floats.")] = 0,
    noise: Annotated[
        list[str] | None,
        typer.Option(
            metavar="RUN",
            autocompletion=complete_run,
            help="A repeat of A, or its twin under RECORDER_JITTER=1; may be given again. A difference counts only "
            "where it is more than 10 times what noise does at that tensor and step.",
        ),
    ] = None,
    rename: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            parser=local_path,
            help="Modules that have other names in B: lines such as encoder.layers = blocks.",
        ),
    ] = None,
    module: ModuleOption = None,
    site: SiteOption = None,
    name: NameOption = None,
    step: StepOption = None,
    loss: LossOption = "mean",
    layout: LayoutOption = None,
    common: Annotated[
        bool, typer.Option("--common", help="Ignore values that one run lacks, or kept nothing comparable of.")
    ] = False,
    limit: Annotated[
        int | None,
        typer.Option(min=0, help="Lines of each table, those of single values too; 0: all. Else few, of modules."),
    ] = None,
    brief: Annotated[bool, typer.Option("--brief", help="The answer alone, without tables.")] = False,
    scheduler: SchedulerOption = None,
    as_json: Json = False,
) -> int:
    """Compare two runs value by value, whatever their layouts.

    The global tensors are compared: one process, DDP and FSDP of any number of ranks. They are compared exactly, unless
    a tolerance is given; an element within any tolerance is equal. --loss and --layout hold for both runs.

    The answer comes first: equal, different, or equal as far as compared, and of how many values. Then the culprits:
    the stages (forward, recompute, backward, reduction, update) that differ although all that they are made from
    agrees. The rest inherits, in the order in which it differs first.

    Columns: max abs is the largest difference of two elements; of max is that difference relative to the largest
    magnitude in either tensor; max rel and max ulp are of single elements, so that one near zero may make them large
    and mean nothing. The kind is partial where a run lacks ranks of a value. Where rules with keep=histogram kept them
    in both runs, the histograms of the first values that differ stand side by side, in the same powers of two. Where
    rules with keep=units kept them, the table of units says how many differ or are dead, and which is farthest apart.

    Exit code 1: they differ, rows of a run contradict each other, or values cannot be read. 2: they have nothing in
    common, or a --noise twin moved nothing.
    """
    runs = (open_run(a), open_run(b))
    return show_diff(
        *runs,
        Selection(module=module, site=site, name=name, step=step),
        Tolerance(rtol, atol, ulp),
        GlobalOptions(across_ranks=True, loss=loss, layouts=layout or []),
        noise=[open_run(path) for path in noise or []],
        renames=read_renames(rename) if rename is not None else NO_RENAMES,
        common=common,
        limit=limit,
        scheduler=scheduler,
        is_brief=brief,
        as_json=as_json,
    )


def show_diff(
    a: Run,
    b: Run,
    selection: Selection,
    tolerance: Tolerance,
    options: GlobalOptions,
    *,
    noise: Sequence[Run] = (),
    renames: Renames = NO_RENAMES,
    common: bool,
    limit: int | None = None,
    scheduler: str | None = None,
    is_brief: bool = False,
    as_json: bool,
) -> int:
    """Print how two runs compare and return the exit code: 1 if they differ, or a run contradicts itself.

    The answer comes first. Without a limit there are few lines of modules and none of single values.
    """
    with (
        mapper_for(scheduler) as mapper,
        progress("diff", payload_bytes(a) + payload_bytes(b)) as report,
    ):
        result = compare_runs(
            a,
            b,
            selection,
            tolerance,
            options,
            noise=noise,
            renames=renames,
            common=common,
            report=report,
            mapper=mapper,
        )
    if as_json:
        _print_json(a, b, result, _JSON_ROWS if limit is None else limit)
        return _exit_code(result)
    most = _FEW if limit is None else limit
    if not is_brief:
        say(f"A: {_run(a)}")
        say(f"B: {_run(b)}")
        for run in noise:
            say(f"noise: {_run(run)}{f', jitter {run.jitter}' if run.jitter else ''}")
    say(_verdict(result, tolerance, common=common, has_noise=bool(noise)))
    for line in _reasons(result, common=common):
        say(line)
    for line in _faults(result, most):
        say(line)
    for line in _accusations(result.culprits, most):
        say(line)
    if result.first is not None:
        say(_describe(result.first))
    if is_brief:
        return _exit_code(result)
    for line in (*_renamed(result.hints, most), *_notes(result, common=common, has_noise=bool(noise))):
        say(line)
    if result.first is not None:
        _print_modules(result, most)
        if limit is None:
            num = counted(result.table.num_rows, "value")
            say(f"{num} in all: --limit 20 lists the first of them, --limit 0 all; --brief leaves the tables out")
        else:
            _print_values(result, limit)
        _print_histograms(result, most)
        _print_units(result, most)
    _print_only("A", result.only_a, result.steps_only_a, most)
    _print_only("B", result.only_b, result.steps_only_b, most)
    return _exit_code(result)


def _faults(result: Diff, limit: int) -> Iterator[str]:
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
            shown = ", ".join(map(repr, paths[: limit or None])) + _cut(len(paths), limit)
            yield f"modules of {name} without a partner ({len(paths)}): {shown}"


def _exit_code(result: Diff) -> int:
    return int(not result.is_equal or bool(result.problems_a or result.problems_b))


def _describe(first: Difference) -> str:
    value = " ".join(filter(None, (repr(first.module_path), first.site, first.name)))
    when = "" if first.micro_step is None else f", micro_step {first.micro_step}"
    ranks = _ranks(first.rank_a, first.rank_b)
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
        apart = f": {_statistic(first._asdict())}"
    if first.nonfinite_a or first.nonfinite_b:
        apart += f"; NaN or infinite in {first.nonfinite_a} elements of A, {first.nonfinite_b} of B"
    return f"first difference: step {first.step}{when}, {value}{rank}: {kind}{apart}"


def _renamed(hints: Sequence[RenameHint], limit: int) -> Iterator[str]:
    """Yield lines that propose the content of a file of renamed modules."""
    if not hints:
        return
    num_modules, num_same = (sum(getattr(hint, name) for hint in hints) for name in ("num_modules", "num_same"))
    same = f", {num_same} of them equal first parameters" if num_same else ""
    alike = f"{counted(num_modules, 'module')} that A has alone and as many of B have tensors of the same shapes{same}"
    yield f"hint: {alike}; if they are the same, --rename FILE pairs them, with these lines{_cut(len(hints), limit)}"
    for hint in hints[: limit or None]:
        yield f"  {hint.line}"


def _accusations(culprits: Sequence[Culprit], limit: int) -> Iterator[str]:
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
        return f"{value} differs: {_statistic({**culprit._asdict(), 'statistic_rel': None})}"
    return f"{value} differs" + (f" ({culprit.kind})" if culprit.kind else "")


def _print_modules(result: Diff, limit: int) -> None:
    modules = result.modules.to_pylist()
    has_roots = len({module["root"] for module in modules}) > 1
    titles = [*(["root"] if has_roots else []), "module", "first step", "first value", "differ", "compared"]
    titles += ["max abs", "of max", "stats apart", "cosine", "nonfinite"]
    has_statistics = any(module["by_statistics"] for module in modules)
    lines = [
        [module["root"]] * has_roots
        + [module["module_path"] or "''", str(module["first_step"])]
        + [" ".join(filter(None, (module["first_site"], module["first_name"])))]
        + [str(module["differing"]), str(module["compared"]), number(module["max_abs"]), number(module["of_max"])]
        + [number(module["statistic_rel"]), _cosine(module["min_cosine"])]
        + [f"{module['nonfinite_a']}|{module['nonfinite_b']}"]
        for module in modules[: limit or None]
    ]
    title = f"modules that differ ({len(modules)}), in the order in which they do{_cut(len(modules), limit)}"
    texts = ("root", "module", "first value")
    absent = () if has_statistics else ("stats apart",)
    legend = f"{_OF_MAX}; {_STATS_APART}" if has_statistics else _OF_MAX
    _print(titles, lines, title, _MODULE_DROPS, texts=texts, absent=absent, legend=legend)


def _print_values(result: Diff, limit: int) -> None:
    rows = result.table.slice(0, limit or None).to_pylist()
    titles = ["step", "module", "value", "rank", "kind", "shape", "type", "elements", "max abs", "of max", "statistics"]
    titles += ["cosine", "max rel", "max ulp"]
    lines = [
        [
            str(row["step"]),
            row["module_path"] or "''",
            " ".join(filter(None, (row["site"], row["name"], _beside(row)))),
            _ranks(row["rank_a"], row["rank_b"]),
            row["kind"],
            _two(row["shape_a"], row["shape_b"]),
            _two(row["dtype_a"], row["dtype_b"]),
            "" if row["num_outside"] is None else f"{row['num_outside']}/{row['numel']}",
            number(row["max_abs"]),
            number(row["of_max"]),
            "" if row["statistic"] is None else _statistic(row),
            _cosine(row["cosine"]),
            number(row["max_rel"]),
            _whole(row["max_ulp"]),
        ]
        for row in rows
    ]
    num_rows = result.table.num_rows
    title = f"values that differ ({num_rows}), in the order of execution{_cut(num_rows, limit)}"
    texts = ("module", "value", "rank", "kind", "shape", "type", "statistics")
    absent = () if any(row["statistic"] is not None for row in rows) else ("statistics",)
    _print(titles, lines, title, _VALUE_DROPS, texts=texts, absent=absent)


def _print_histograms(result: Diff, limit: int) -> None:
    """Print the histograms of the first values that differ and have them in both runs, in the same bins."""
    table = result.table
    table = table.filter(pc.and_(table.column("histogram_a").is_valid(), table.column("histogram_b").is_valid()))
    rows = table.slice(0, limit or None).to_pylist()
    rows_with_histograms = [(row, *_histograms(row)) for row in rows]
    pairs = [(row, a, b) for row, a, b in rows_with_histograms if a is not None and b is not None]
    if not pairs:
        return
    bins = bins_of([one for _, a, b in pairs for one in (a, b)], WIDTH)
    drawn = [histogram_line(shares) for shares in bins.shares]
    titles = ["step", "module", "value", "rank", "A", "B", "apart", "zero", "subnormal", "infinite"]
    lines = []
    for number_of, (row, a, b) in enumerate(pairs):
        of_subnormals = [subnormal_count(one, row[f"dtype_{side}"]) for side, one in (("a", a), ("b", b))]
        lines.append(
            [
                str(row["step"]),
                row["module_path"] or "''",
                " ".join(filter(None, (row["site"], row["name"], _beside(row)))),
                _ranks(row["rank_a"], row["rank_b"]),
                *drawn[2 * number_of : 2 * number_of + 2],
                _percent(share_apart(a, b)),
                f"{a.zero_count}|{b.zero_count}",
                "|".join("-" if count is None else str(count) for count in of_subnormals),
                f"{int(a.infinite.sum())}|{int(b.infinite.sum())}",
            ]
        )
    title = f"histograms of values that differ ({table.num_rows}): {extent(bins)}{_cut(table.num_rows, limit)}"
    texts = ("module", "value", "rank", "A", "B")
    absent = () if any(line[3] for line in lines) else ("rank",)
    _print(titles, lines, title, _HISTOGRAM_DROPS, texts=texts, absent=absent, legend=f"{_APART}; {SCALE}")


def _print_units(result: Diff, limit: int) -> None:
    """Print how the units of the first values that differ, and have them in both runs, compare."""
    table = result.table.filter(pc.field("units_a").is_valid())
    rows = table.slice(0, limit or None).to_pylist()
    if not rows:
        return
    titles = ["step", "module", "value", "rank", "units", "differ", "dead", "farthest", "its rms"]
    lines = [
        [
            str(row["step"]),
            row["module_path"] or "''",
            " ".join(filter(None, (row["site"], row["name"], _beside(row)))),
            _ranks(row["rank_a"], row["rank_b"]),
            _two(row["units_a"], row["units_b"]),
            "-" if row["units_apart"] is None else str(row["units_apart"]),
            f"{row['units_dead_a']}|{row['units_dead_b']}",
            "-" if row["unit"] is None else str(row["unit"]),
            "-" if row["unit"] is None else f"{number(row['unit_rms_a'])}|{number(row['unit_rms_b'])}",
        ]
        for row in rows
    ]
    absent = () if any(line[3] for line in lines) else ("rank",)
    title = f"units of values that differ ({table.num_rows}){_cut(table.num_rows, limit)}"
    _print(titles, lines, title, _UNITS_DROPS, texts=("module", "value", "rank"), absent=absent, legend=_DEAD)


def _histograms(row: dict[str, Any]) -> tuple[Histogram | None, Histogram | None]:
    return histogram_of_row(row, "_a"), histogram_of_row(row, "_b")


def _with_details(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row that differs with the members `histogram`, which JSON can have, in place of bytes, and `units`."""
    a, b = _histograms(row)
    units = {name: row[name] for name in UnitsApart._fields}
    rest = {name: value for name, value in row.items() if name not in ("histogram_a", "histogram_b", *units)}
    rest["units"] = None if units["units_a"] is None else units
    if a is None or b is None:
        return rest | {"histogram": None}
    bins = bins_of([a, b], _MAX_JSON_BINS)
    histogram: dict[str, Any] = {"first_exponent": bins.first, "exponents_per_bin": bins.exponents_per_bin}
    histogram |= {"apart": share_apart(a, b)}
    for side, one, shares in (("a", a, bins.shares[0]), ("b", b, bins.shares[1])):
        histogram[f"share_{side}"] = shares
        histogram[f"subnormal_count_{side}"] = subnormal_count(one, row[f"dtype_{side}"])
    return rest | {"histogram": histogram}


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.3%}" if share < 0.01 else f"{share:.1%}"


def _print_only(run: str, only: Any, steps: list[int], limit: int) -> None:
    if only.num_rows:
        lines = [
            [
                row["module_path"] or "''",
                " ".join(filter(None, (row["site"], row["name"]))),
                str(row["rows"]),
                str(row["first_step"])
                if row["first_step"] == row["last_step"]
                else f"{row['first_step']}..{row['last_step']}",
            ]
            for row in only.slice(0, limit or None).to_pylist()
        ]
        title = f"only in {run}, at steps that both have{_cut(only.num_rows, limit)}"
        columns = [Column(title="module"), Column(title="value"), Column(title="rows", is_number=True)]
        Table([*columns, Column(title="steps")], lines, title=title).print()
    if steps:
        say(f"steps only in {run}: {span(steps)} (not compared; no difference by itself)")


def _run(run: Run) -> str:
    """Return the name of a run and its path; the path alone where it ends with the name."""
    return str(run.path) if run.name == run.path.name else f"{run.name} ({run.path})"


def _verdict(result: Diff, tolerance: Tolerance, *, common: bool, has_noise: bool) -> str:
    num_compared = result.num_compared - result.num_left_out
    num_equal = num_compared - result.table.num_rows
    within = "exactly" if tolerance.is_exact else f"within {_tolerances(tolerance)}"
    if has_noise:
        within = "within the noise" + (f" or {_tolerances(tolerance)}" if not tolerance.is_exact else "")
    of_all = "" if num_compared == result.num_compared else f"{num_compared} of "
    unpaired = (
        (name, pc.sum(table.column("rows")).as_py()) for name, table in (("A", result.only_a), ("B", result.only_b))
    )
    alone = "".join(f", {num} in {name} alone" for name, num in unpaired if num and not common)
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


def _reasons(result: Diff, *, common: bool) -> Iterator[str]:
    """Yield reasons for a verdict other than equal where no value differs."""
    if result.first is None and result.verdict == "different":
        yield "what could be compared is equal, but one run lacks values that the other has; --common ignores that"
    for left_out in result.left_out:
        yield f"not compared: {counted(left_out.num_values, 'value')}: {left_out.why}"
    if result.num_incomparable:
        values = counted(result.num_incomparable, "value")
        way_out = "" if common else "; --common ignores that"
        yield f"not compared: {values}: one run has nothing of what the other kept of them{way_out}"


def _notes(result: Diff, *, common: bool, has_noise: bool) -> Iterator[str]:
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
    if has_noise and _is_open(result):
        yield (
            "note: statistics alone do not tell an update that is wrong from one of which rounding decided an element, "
            "as it may with Adam; tensors of param, grad and optim do, and two or three more twins (--noise again) may"
        )
    if num_only and common:
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


def _print_json(a: Run, b: Run, result: Diff, limit: int) -> None:
    tables = {name: getattr(result, name) for name in ("modules", "table", "only_a", "only_b")}
    shown = {name: table.slice(0, limit or None).to_pylist() for name, table in tables.items()}
    counts = {f"num_{name}": table.num_rows for name, table in tables.items()}
    shown["differing"] = list(map(_with_details, shown.pop("table")))
    counts["num_differing"] = counts.pop("num_table")
    rest = {name: plain(value) for name, value in result._asdict().items() if name not in tables}
    print_json({"a": str(a.path), "b": str(b.path), **rest, **counts, **shown})


def _print(
    titles: list[str], lines: list[list[str]], title: str, drops: tuple[str, ...], *, texts: tuple[str, ...],
    absent: Sequence[str] = (), legend: str = "",
) -> None:  # fmt: skip
    """Print a table without the columns that are `absent`."""
    kept = [i for i, name in enumerate(titles) if name not in absent]
    titles, lines = [titles[i] for i in kept], [[line[i] for i in kept] for line in lines]
    columns = [
        Column(
            title=name,
            is_number=name not in texts,
            is_whole=name in ("kind", "shape"),
            is_prose=name == "statistics",
            drop=len(drops) - drops.index(name) if name in drops else 0,
            dull="0|0" if name == "nonfinite" else _EMPTY.get(name),
        )
        for name in titles
    ]
    Table(columns, lines, title=title, subtitle=legend).print()


def _beside(row: dict[str, Any]) -> str:
    """Return what tells a value from others of the same module, site and name."""
    micro_step = f"micro_step={row['micro_step']}" if row["micro_step"] else ""
    call = f"call={row['call']}" if row["call"] else ""
    mode = row["mode"] if row["mode"] != "train" else ""
    return " ".join(filter(None, (micro_step, call, mode, row["phase"] if row["phase"] == "recompute" else "")))


def _statistic(row: dict[str, Any]) -> str:
    """Return the statistic that is farthest apart, with enough digits to tell both values apart."""
    a, b = row["statistic_a"], row["statistic_b"]
    digits = (".0f",) if row["statistic"].endswith("_count") else (".4g", ".8g", ".17g")
    texts = [tuple("none" if value is None else format(value, form) for value in (a, b)) for form in digits]
    text_a, text_b = next((pair for pair in texts if pair[0] != pair[1]), texts[-1])
    apart = "" if row["statistic_rel"] is None else f", {number(row['statistic_rel'])} apart"
    return f"{row['statistic'].removesuffix('_count')} {text_a} | {text_b}{apart}"


def _ranks(a: int | None, b: int | None) -> str:
    return "" if a is None and b is None else _two("all" if a is None else a, "all" if b is None else b)


def _two(a: object, b: object) -> str:
    return str(a) if a == b else f"{a} | {b}"


def _whole(value: float | int | None) -> str:
    if value is None:
        return ""
    return f"{int(value)}" if value <= _MAX_ULP else f">{_MAX_ULP}"


def _cosine(value: float | None) -> str:
    return "" if value is None else f"{value:.6f}"


def _cut(count: int, limit: int) -> str:
    return f"; the first {limit} (--limit 0 shows all)" if limit and count > limit else ""
