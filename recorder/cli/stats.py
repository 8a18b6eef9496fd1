"""Owns ``recorder stats``: statistics of values, or combined over steps, modules and ranks, as a table or JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow.compute as pc

from ..analyze.reasons import WHY
from ..analyze.selection import GlobalOptions, Selection
from ..analyze.stats import INNER, statistics
from ..errors import LookupFailedError
from ..format.schema import COUNTS, STATISTICS
from ..patterns import hint
from ..read.run import Run
from .cluster import spread_by
from .output import Column, Table, number, print_json, say

_KEYS = (
    "step", "micro_step", "call", "repeat", "attempt", "rank", "root", "module_path", "site", "name", INNER, "mode",
    "phase", "scope", "dtype", "shape",
)  # fmt: skip
_ALWAYS = ("step", "rank", "module_path", "site", "name", "shape")
_TITLES = {"module_path": "module", "rows_without": "without"}
_SHOWN_ROWS = 50
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
    sort: str | None,
    top: int | None,
    last: int | None,
    scheduler: str | None = None,
    as_json: bool,
) -> int:
    """Print statistics and return the exit code: 1 if something is missing, or contradicts itself.

    Raises:
        LookupFailedError: nothing is selected, or there is no column to sort by.
    """
    with spread_by(scheduler, run) as spread:
        found = statistics(run, selection, options, by=by, spread=spread)
    table, sorted_by = found.table, ""
    if sort is not None:
        sorted_by, direction = _order(table, sort)
        table = table.take(pc.sort_indices(table, [(sorted_by, direction)]))  # what is null stands last
    asked = {word.strip() for one in by for word in one.split(",")}
    keys = [name for name in _KEYS if name in table.column_names]
    keys = [name for name in keys if _TITLES.get(name, name) in asked or _is_worth(table, name)]  # before it is cut
    if as_json:
        table = table.slice(0, top or None)
        told = {"run": str(run.path), "problems": [*found.problems, *found.damage], "notes": found.notes}
        print_json(told | {"rows": table.to_pylist()})
        return int(bool(found.problems) or not found.is_whole)
    num_rows = table.num_rows
    is_first = top is not None or (sort is not None and last is None)
    shown = next((limit for limit in (top, last) if limit is not None), _SHOWN_ROWS)
    if shown and num_rows > shown:
        table = table.slice(0 if is_first else num_rows - shown, shown)
    what = "global tensors" if options.across_ranks else "each rank's own"
    which, option = ("first", "--top") if is_first else ("last", "--last")
    cut = f", the {which} {shown} of {num_rows} rows ({option} 0 shows all)" if table.num_rows < num_rows else ""
    _print(table, keys, sorted_by, title=f"{run.name}: statistics of {what}{cut}")
    for problem in found.problems:
        say(f"finding: {problem}")
    for note in found.notes:
        say(f"note: {note}")
    return int(bool(found.problems) or not found.is_whole)


def _order(table: Any, sort: str) -> tuple[str, str]:
    """The column that is meant and the direction, which Arrow calls so: ``-l2`` and ``l2:desc`` are descending."""
    column, _, order = sort.removeprefix("-").partition(":")
    column = next((name for name, title in _TITLES.items() if title == column), column)
    column = f"{column}_count" if f"{column}_count" in COUNTS else column
    if order not in ("", "asc", "desc") or (order and sort.startswith("-")):
        raise LookupFailedError(f"--sort {sort}: expected COLUMN, COLUMN:asc, COLUMN:desc or -COLUMN")
    if column not in table.column_names:
        raise LookupFailedError(
            f"--sort {sort}: there is no column {column!r}"
            + hint(column, table.column_names, otherwise=f"; columns are {', '.join(table.column_names)}")
        )
    return column, "descending" if order == "desc" or sort.startswith("-") else "ascending"


def _print(table: Any, keys: Sequence[str], sorted_by: str, title: str) -> None:
    counts = [name for name in ("rows", "rows_without", "numel") if name in table.column_names]
    numbers = [*_SHOWN, *COUNTS, *([WHY] if has_why(table) else [])]
    shown = list(dict.fromkeys([*keys, *([sorted_by] if sorted_by else []), *counts, *numbers]))
    rows = table.select(shown).to_pylist()
    columns = [
        Column(
            title=_TITLES.get(name, name.removesuffix("_count")),
            is_number=name not in _TEXTS,
            is_whole=name in ("site", "shape", "dtype"),
            is_prose=name == WHY,
            drop=len(_DROPS) - _DROPS.index(name) if name in _DROPS and name != sorted_by else 0,
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
