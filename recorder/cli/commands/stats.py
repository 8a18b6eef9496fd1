"""``recorder stats``: shows statistics of values, or combined over steps, modules and ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import pyarrow.compute as pc
import typer

from ...analyze.stats import HISTOGRAM, INNER, WHY, statistics
from ...columns import COUNTS, STATISTICS
from ...errors import LookupFailedError
from ...numerics.distributions import (
    HISTOGRAM_LEGEND,
    HISTOGRAM_WIDTH,
    bins_of,
    extent,
    histogram_line,
    histogram_of_row,
    subnormal_count,
)
from ...numerics.histogram import Histogram
from ...rules import hint
from ...run.reply import Table, TableColumn
from ...run.selection import GlobalOptions, Selection
from ...system.text import number
from ..options import (
    Json,
    LayoutOption,
    LossOption,
    ModulePatterns,
    NameOption,
    PartialOption,
    RankOption,
    RunOrModule,
    SchedulerOption,
    SiteOption,
    StepOption,
    mapper_for,
    refuse,
)
from ..output import print_json, print_table, say
from ..paths import run_and_module

EPILOG = (
    "Examples: recorder stats recordings 'blocks.*' --site grad --by module --sort -absmax --top 10    "
    "recorder stats recordings --site scalar --last 20"
)

_KEYS = (
    "step", "micro_step", "call", "repeat", "attempt", "rank", "root", "module_path", "site", "name", INNER, "mode",
    "phase", "scope", "dtype", "shape",
)  # fmt: skip
_ALWAYS = ("step", "rank", "module_path", "site", "name", "shape")
_TITLES = {"module_path": "module", "rows_without": "without"}
_SHOWN_ROWS = 50
_SUBNORMAL = "subnormal"
_SHOWN = ("mean", "std", "min", "max", "absmax", "l2")
_TEXTS = ("root", "module_path", "site", "name", INNER, "mode", "phase", "scope", "dtype", "shape", HISTOGRAM, WHY)
_DROPS = (
    "shape", "numel", _SUBNORMAL, "min", "max", "rows", "name", "std", HISTOGRAM, "zero_count", "l2", "inf_count",
    "nan_count", "mean",
)  # fmt: skip
"""Columns that a narrow terminal leaves out, the least important first."""


def command(
    path: RunOrModule = None,
    module: ModulePatterns = None,
    site: SiteOption = None,
    name: NameOption = None,
    step: StepOption = None,
    rank: RankOption = None,
    by: Annotated[
        list[str] | None,
        typer.Option(
            help="Combine over all that agree in these: step, module, site, name, rank, with commas. Sites, phases and "
            "modes are never mixed; ranks only with --global."
        ),
    ] = None,
    across_ranks: Annotated[
        bool, typer.Option("--global", help="Show the global tensors: all ranks together, replicas counted once.")
    ] = False,
    loss: LossOption = "mean",
    layout: LayoutOption = None,
    partial: PartialOption = False,
    sort: Annotated[
        str | None,
        typer.Option(metavar="COLUMN", help="Sort by a column: l2 or l2:asc, or -l2 or l2:desc, the largest first."),
    ] = None,
    top: Annotated[
        int | None, typer.Option(min=0, help="Rows to show, counted from the start; 0: all. With --sort 50.")
    ] = None,
    last: Annotated[
        int | None, typer.Option(min=0, help="Rows to show, counted from the end; 0: all. Without --sort 50.")
    ] = None,
    scheduler: SchedulerOption = None,
    as_json: Json = False,
) -> int:
    """Show statistics over steps, ranks and modules.

    --by and --global combine them exactly, without reading a tensor; --loss and --layout belong to --global. Where
    they are combined, the column rows is how many rows stand in a line, and without is how many of these have no
    statistics and so are in none of its numbers.

    Where a rule with keep=histogram kept them, the histograms are drawn: which share is in which power of two. Of
    combined rows these are added up, of those that have one.

    Values that lack ranks have no numbers or, with --partial, the numbers of the other ranks.

    Exit code 1: something is damaged or missing; with --global also where ranks' rows contradict each other, or
    --layout does not fit them.
    """
    if top is not None:
        refuse("not with --top, which counts from the start", last=last)
    run, module = run_and_module(path, module)
    selection = Selection(module=module, site=site, name=name, step=step, rank=rank)
    options = GlobalOptions(across_ranks=across_ranks, loss=loss, layouts=layout or [], partial=partial)
    with mapper_for(scheduler) as mapper:
        answer = statistics(run, selection, options, by=by or [], with_histograms=not as_json, mapper=mapper)
    table, sorted_by = answer.table, ""
    if sort is not None:
        sorted_by, direction = _order(table, sort)
        table = table.take(pc.sort_indices(table, [(sorted_by, direction)]))  # nulls stand last
    asked = {word.strip() for words in by or [] for word in words.split(",")}
    keys = [name for name in _KEYS if name in table.column_names]
    keys = [
        name for name in keys if _TITLES.get(name, name) in asked or _is_worth(table, name)
    ]  # before rows are left out
    if as_json:
        table = table.slice(0, top or None)
        document = {"run": str(run.path), "problems": [*answer.problems, *answer.damage], "notes": answer.notes}
        print_json(document | {"rows": table.to_pylist()})
        return int(bool(answer.problems) or not answer.is_whole)
    num_rows = table.num_rows
    is_first = top is not None or (sort is not None and last is None)
    shown = next((limit for limit in (top, last) if limit is not None), _SHOWN_ROWS)
    if shown and num_rows > shown:
        table = table.slice(0 if is_first else num_rows - shown, shown)
    tensors = "global tensors" if options.across_ranks else "each rank's own"
    which, option = ("first", "--top") if is_first else ("last", "--last")
    cut = f", the {which} {shown} of {num_rows} rows ({option} 0 shows all)" if table.num_rows < num_rows else ""
    _print(table, keys, sorted_by, by_value=not asked, title=f"{run.name}: statistics of {tensors}{cut}")
    for problem in answer.problems:
        say(f"finding: {problem}")
    for note in answer.notes:
        say(f"note: {note}")
    return int(bool(answer.problems) or not answer.is_whole)


def _order(table: Any, sort: str) -> tuple[str, str]:
    """Return a column and Arrow's word for a direction: ``-l2`` and ``l2:desc`` are descending."""
    column, _, order = sort.removeprefix("-").partition(":")
    column = next((name for name, title in _TITLES.items() if title == column), column)
    column = f"{column}_count" if f"{column}_count" in COUNTS else column
    if order not in ("", "asc", "desc") or (order and sort.startswith("-")):
        raise LookupFailedError(f"--sort {sort}: expected COLUMN, COLUMN:asc, COLUMN:desc or -COLUMN")
    names = [name for name in table.column_names if name != HISTOGRAM]  # bytes, which have no order
    if column not in names:
        raise LookupFailedError(
            f"--sort {sort}: there is no column {column!r}"
            + hint(column, names, otherwise=f"; columns are {', '.join(names)}")
        )
    return column, "descending" if order == "desc" or sort.startswith("-") else "ascending"


def _print(table: Any, keys: Sequence[str], sorted_by: str, *, by_value: bool, title: str) -> None:
    """Print a table; `by_value`: its rows are of single values, so that each has one type."""
    drawn, of_histograms = _histograms(table)
    drawn |= _subnormals(table) if drawn and by_value else {}
    counts = [name for name in ("rows", "rows_without", "numel") if name in table.column_names]
    numbers = [*_SHOWN, *COUNTS, *drawn, *([WHY] if has_why(table) else [])]
    shown = list(dict.fromkeys([*keys, *([sorted_by] if sorted_by else []), *counts, *numbers]))
    rows = table.select([name for name in shown if name not in drawn]).to_pylist()
    columns = [
        TableColumn(
            title=_TITLES.get(name, name.removesuffix("_count")),
            is_number=name not in _TEXTS,
            is_whole=name in ("site", "shape", "dtype", HISTOGRAM),
            is_prose=name == WHY,
            drop=len(_DROPS) - _DROPS.index(name) if name in _DROPS and name != sorted_by else 0,
            dull="0" if name in (*COUNTS, "rows_without", _SUBNORMAL) else None,
        )
        for name in shown
    ]
    lines = [
        [drawn[name][index] if name in drawn else _text(name, row[name]) for name in shown]
        for index, row in enumerate(rows)
    ]
    print_table(Table(columns, lines, title=title, subtitle=of_histograms))


def _histograms(table: Any) -> tuple[dict[str, list[str]], str]:
    """Draw the histograms of the rows, all in the same powers of two.

    Returns:
        A column of lines by its name, and what the lines are; neither where no row has a histogram.
    """
    histograms = [_histogram(data) for data in table.column(HISTOGRAM).to_pylist()]
    known = [one for one in histograms if one is not None]
    if not known:
        return {}, ""
    bins = bins_of(known, HISTOGRAM_WIDTH)
    lines = iter(map(histogram_line, bins.shares))
    drawn = ["" if one is None else next(lines) for one in histograms]
    return {HISTOGRAM: drawn}, f"histogram: of the values that are not zero, {extent(bins)}; {HISTOGRAM_LEGEND}"


def _subnormals(table: Any) -> dict[str, list[str]]:
    """Count in each row the values below the least normal number of its type; the column by its name."""
    counts = [
        None if (one := _histogram(data)) is None else subnormal_count(one, dtype)
        for data, dtype in zip(table.column(HISTOGRAM).to_pylist(), table.column("dtype").to_pylist(), strict=True)
    ]
    return {_SUBNORMAL: ["" if count is None else str(count) for count in counts]}


def _histogram(data: bytes | None) -> Histogram | None:
    return histogram_of_row({"histogram": data, "zero_count": 0, "nan_count": 0})


def has_why(table: Any) -> bool:
    """Whether a row of a table says why it has no statistics, or no global tensor."""
    return WHY in table.column_names and table.column(WHY).null_count < table.num_rows


def _is_worth(table: Any, name: str) -> bool:
    """Whether a key column is worth showing: it varies, or people mostly want it."""
    distinct = table.column(name).unique().to_pylist()
    return len(distinct) > 1 or (name in _ALWAYS and distinct not in ([None], [""]))


def _text(name: str, value: Any) -> str:
    if name == "module_path":
        return value or "''"
    if name in STATISTICS:
        return number(value)
    return "" if value is None else str(value)
