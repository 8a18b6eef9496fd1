"""Owns ``recorder stats``: statistics of values, or combined over steps, modules and ranks, as a table or JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..analyze.reasons import WHY
from ..analyze.selection import GlobalOptions, Selection
from ..analyze.stats import INNER, statistics
from ..format.schema import COUNTS, STATISTICS
from ..read.run import Run
from .cluster import spread_by
from .output import Column, Table, number, print_json, say

_KEYS = (
    "step", "micro_step", "call", "repeat", "attempt", "rank", "root", "module_path", "site", "name", INNER, "mode",
    "phase", "scope", "dtype", "shape",
)  # fmt: skip
_ALWAYS = ("step", "rank", "module_path", "site", "name", "shape")
_TITLES = {"module_path": "module", "rows_without": "without"}
_SHOWN = ("mean", "std", "min", "max", "absmax", "l2")
_TEXTS = ("root", "module_path", "site", "name", INNER, "mode", "phase", "scope", "dtype", "shape", WHY)
_DROPS = ("shape", "numel", "min", "max", "rows", "name", "std", "zero_count", "l2", "inf_count", "nan_count", "mean")
"""Columns that a narrow terminal does without, the least important first."""


def show_stats(
    run: Run,
    selection: Selection,
    options: GlobalOptions,
    *,
    by: Sequence[str],
    last: int,
    scheduler: str | None = None,
    as_json: bool,
) -> int:
    """Print statistics and return the exit code: 1 if something is missing, or contradicts itself."""
    with spread_by(scheduler, run) as spread:
        found = statistics(run, selection, options, by=by, spread=spread)
    if as_json:
        told = {"run": str(run.path), "problems": [*found.problems, *run.problems], "notes": found.notes}
        print_json(told | {"rows": found.table.to_pylist()})
        return int(bool(found.problems) or not found.is_whole)
    table = found.table
    num_rows = table.num_rows
    if last and num_rows > last:
        table = table.slice(num_rows - last)
    what = "global tensors" if options.across_ranks else "each rank's own"
    cut = f", the last {last} of {num_rows} rows (--last 0 shows all)" if table.num_rows < num_rows else ""
    _print(table, title=f"{run.name}: statistics of {what}{cut}")
    for problem in found.problems:
        say(f"finding: {problem}")
    for note in found.notes:
        say(f"note: {note}")
    return int(bool(found.problems) or not found.is_whole)


def _print(table: Any, title: str) -> None:
    keys = [name for name in _KEYS if name in table.column_names and _is_worth(table, name)]
    counts = [name for name in ("rows", "rows_without", "numel") if name in table.column_names]
    shown = [*keys, *counts, *_SHOWN, *COUNTS, *([WHY] if has_why(table) else [])]
    rows = table.select(shown).to_pylist()
    columns = [
        Column(
            title=_TITLES.get(name, name.removesuffix("_count")),
            is_number=name not in _TEXTS,
            is_whole=name in ("site", "shape", "dtype"),
            is_prose=name == WHY,
            drop=len(_DROPS) - _DROPS.index(name) if name in _DROPS else 0,
            dull="0" if name in (*COUNTS, "rows_without") else None,
        )
        for name in shown
    ]
    lines = [[_text(name, row[name]) for name in shown] for row in rows]
    Table(columns, lines, title=title).print()


def has_why(table: Any) -> bool:
    """Whether a row of a table says why it has no statistics, or no global tensor."""
    return WHY in table.column_names and table.column(WHY).null_count < table.num_rows


def _is_worth(table: Any, name: str) -> bool:
    """Keys that say something: those that vary, and those that are asked for mostly."""
    distinct = table.column(name).unique().to_pylist()
    return len(distinct) > 1 or (name in _ALWAYS and distinct not in ([None], [""]))


def _text(name: str, value: Any) -> str:
    if name == "module_path":
        return value or "''"
    if name in STATISTICS:
        return number(value)
    return "" if value is None else str(value)
