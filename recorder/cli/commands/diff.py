"""``recorder diff``: shows where two runs differ, the first divergent module on top."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from ...analyze.diff.diff import compare_runs, payload_bytes
from ...analyze.diff.pairing.compare import Tolerance
from ...analyze.diff.pairing.renames import NO_RENAMES, Renames, read_renames
from ...analyze.diff.result import Diff
from ...numerics.apart import UnitsApart, bins_of, histogram_of_row, share_apart, subnormal_count
from ...run.reply import plain
from ...run.run import Run
from ...run.selection import GlobalOptions, Selection
from ...system.text import counted, moment
from ..differences.sentences import accusations, describe, faults, notes, reasons, rename_lines, verdict
from ..differences.tables import print_histograms, print_modules, print_only, print_units, print_values
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
from ..output import print_json, progress, say
from ..paths import local_path, other_runs, two_runs
from ..scheduler import mapper_for

EPILOG = "Examples: recorder diff run-ddp run-fsdp --rtol 1e-4 --atol 1e-6    recorder diff @-2 @-1 --site grad --brief"

_FEW = 5
"""The number of lines of each table, and of culprits, where nobody asks for more."""
_JSON_ROWS = 20
_MAX_JSON_BINS = 4096
"""More than there are powers of two."""


def command(
    a: Annotated[
        str | None,
        typer.Argument(
            metavar="A",
            help="A run; its order of execution counts. Without B: a folder, whose last two runs are compared.",
            autocompletion=complete_run,
        ),
    ] = None,
    b: Annotated[
        str | None, typer.Argument(metavar="B", help="The run to compare with it.", autocompletion=complete_run)
    ] = None,
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
    runs = two_runs(a, b)
    twins = other_runs("--noise", noise or [], {"A": runs[0], "B": runs[1]})
    return show_diff(
        *runs,
        Selection(module=module, site=site, name=name, step=step),
        Tolerance(rtol, atol, ulp),
        GlobalOptions(across_ranks=True, loss=loss, layouts=layout or []),
        noise=twins,
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
    say(f"A: {_run(a)}")
    say(f"B: {_run(b)}")
    for run in () if is_brief else noise:
        say(f"noise: {_run(run)}{f', jitter {run.jitter}' if run.jitter else ''}")
    say(verdict(result, tolerance, common=common, has_noise=bool(noise)))
    for line in reasons(result, common=common):
        say(line)
    for line in faults(result, most):
        say(line)
    for line in accusations(result.culprits, most):
        say(line)
    if result.first is not None:
        say(describe(result.first))
    if is_brief:
        return _exit_code(result)
    for line in (*rename_lines(result.hints, most), *notes(result, common=common, has_noise=bool(noise))):
        say(line)
    if result.first is not None:
        print_modules(result, most)
        if limit is None:
            num = counted(result.table.num_rows, "value")
            say(f"{num} in all: --limit 20 lists the first of them, --limit 0 all; --brief leaves the tables out")
        else:
            print_values(result, limit)
        print_histograms(result, most)
        print_units(result, most)
    print_only("A", result.only_a, result.steps_only_a, most)
    print_only("B", result.only_b, result.steps_only_b, most)
    return _exit_code(result)


def _exit_code(result: Diff) -> int:
    return int(not result.is_equal or bool(result.problems_a or result.problems_b))


def _with_details(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row that differs with the members `histogram`, which JSON can have, in place of bytes, and `units`."""
    a, b = histogram_of_row(row, "_a"), histogram_of_row(row, "_b")
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


def _run(run: Run) -> str:
    """Return the name of a run, its path, and when it began; the path alone where it ends with the name."""
    named = str(run.path) if run.name == run.path.name else f"{run.name} ({run.path})"
    return f"{named}, started {moment(run.started_ns)}" if run.started_ns else named


def _print_json(a: Run, b: Run, result: Diff, limit: int) -> None:
    tables = {name: getattr(result, name) for name in ("modules", "table", "only_a", "only_b")}
    shown = {name: table.slice(0, limit or None).to_pylist() for name, table in tables.items()}
    counts = {f"num_{name}": table.num_rows for name, table in tables.items()}
    shown["differing"] = list(map(_with_details, shown.pop("table")))
    counts["num_differing"] = counts.pop("num_table")
    rest = {name: plain(value) for name, value in result._asdict().items() if name not in tables}
    runs: dict[str, object] = {}
    for side, run in (("a", a), ("b", b)):
        runs |= {side: str(run.path), f"name_{side}": run.name, f"started_ns_{side}": run.started_ns}
    print_json({**runs, **rest, **counts, **shown})
