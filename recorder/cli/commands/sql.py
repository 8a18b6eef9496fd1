from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Annotated

import typer

from ...analyze.export.tables import ask, opened_tables
from ...errors import LookupFailedError
from ...run.notes import damages
from ...run.reply import Aside, Reply, table_of
from ...run.run import Run
from ..options import CatalogPlace, RunsPath
from ..paths import opened_runs

EPILOG = (
    "Examples: recorder sql 'select name, state, last_step from runs'    "
    "recorder sql 'select rule, count(*) n from findings group by all' recordings --json"
)


def command(
    question: Annotated[str, typer.Argument(metavar="QUERY", help="A query in DuckDB's SQL.", show_default=False)],
    path: RunsPath = None,
    catalog: CatalogPlace = None,
) -> Reply:
    """Ask all runs of a folder, or of a catalog, in SQL.

    DuckDB answers. The tables are runs, rows (a row a value, without tensors), probe (a number of each value at every
    step) and findings (of all rules). Those that a query names are made from the runs, each time; with --catalog they
    are those that `recorder catalog` has registered.
    """
    if catalog and path:
        raise LookupFailedError(
            f"sql {path} --catalog {catalog}: the catalog has runs of its own; leave one of them out"
        )
    problems: list[str] = []

    def opened() -> Iterator[Run]:
        for run in opened_runs(path, problems):
            yield run
            problems.extend(damages(run))

    with opened_tables(catalog) if catalog else nullcontext(opened()) as tables:
        answer = ask(question, tables)
    rows = [["" if value is None else str(value) for value in row] for row in answer.rows]
    is_number = [all(isinstance(row[at], (int, float)) for row in answer.rows) for at in range(len(answer.columns))]
    numbers = [name for name, is_one in zip(answer.columns, is_number, strict=True) if is_one]
    plain = json.loads(json.dumps(answer.rows, default=str))
    return Reply(
        members=lambda: {"columns": answer.columns, "rows": plain, "problems": problems},
        parts=lambda: [*(Aside(f"note: {one}") for one in problems), table_of(answer.columns, rows, numbers=numbers)],
        exit_code=int(bool(problems)),
    )
