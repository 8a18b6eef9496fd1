"""Asks all runs of a folder as tables, and registers them in a catalog."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Annotated

import typer

from ...analyze.export.tables import CONFIGURED, ask, is_configured, opened_tables
from ...errors import LookupFailedError, RecorderError
from ...run.finding import find_folder, find_run
from ...run.notes import damages
from ...run.reply import Aside, Reply, table_of
from ...run.run import Run
from ...system.text import counted
from .. import options
from ..paths import opened_runs

EXAMPLES = {
    "sql": (
        "recorder sql 'select name, state, last_step from runs'",
        "recorder sql 'select rule, count(*) n from findings group by all' recordings --json",
    ),
    "catalog": ("recorder catalog", "recorder catalog recordings --catalog fleet-catalog --json"),
}


def sql_command(
    question: Annotated[str, typer.Argument(metavar="QUERY", help="A query in DuckDB's SQL.", show_default=False)],
    path: options.RunsPath = None,
    catalog: options.CatalogPlace = None,
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
    nonfinite = [
        {"row": number, "column": column, "value": repr(value)}
        for number, row in enumerate(answer.rows)
        for column, value in zip(answer.columns, row, strict=True)
        if isinstance(value, float) and not math.isfinite(value)
    ]
    plain = json.loads(json.dumps(answer.rows, default=str))
    return Reply(
        members=lambda: {"columns": answer.columns, "rows": plain, "nonfinite": nonfinite, "problems": problems},
        parts=lambda: [*(Aside(f"note: {one}") for one in problems), table_of(answer.columns, rows, numbers=numbers)],
        exit_code=int(bool(problems)),
    )


def catalog_command(
    path: options.RunsPath = None, catalog: options.CatalogPlace = None, scheduler: options.SchedulerOption = None
) -> Reply:
    """Register runs in an Iceberg catalog, as tables.

    Other programs read the tables, of all runs of a folder or a store: runs, rows (without tensors), probe and
    findings. A run that is registered as it is costs a look at its manifests; one that has grown since is put in place
    of its earlier rows. `recorder sql` asks the tables.

    Exit code 1: something is damaged, or a run cannot be read, and is not in the catalog.
    """
    where = catalog or (CONFIGURED if is_configured(CONFIGURED) else None)
    if where is None:
        where = str((find_folder(path) or find_run(path)[0].parent) / "_catalog")
        if "://" in where:
            raise LookupFailedError(f"--catalog: name a folder of this machine, or a catalog of pyiceberg, for {path}")
    registered: dict[str, int] = {}
    problems: list[str] = []
    num_known = 0

    def lines() -> Iterator[str | Aside]:
        yield from (Aside(f"finding: {problem}") for problem in problems)
        rows = counted(sum(registered.values()), "row")
        yield f"{where}: {counted(len(registered), 'run')} registered, {rows}; {num_known} were there as they are"

    with options.mapper_for(scheduler) as mapper, opened_tables(where, is_new=True) as tables:
        for run in opened_runs(path, problems):
            try:
                if tables.has(run):
                    num_known += 1
                    continue
                registered[str(run.path)] = tables.register(run, mapper)
                problems.extend(run.problems)
            except RecorderError as error:
                problems.append(str(error))
        tables.tidy()
    return Reply(
        members=lambda: {"catalog": where, "registered": registered, "unchanged": num_known, "problems": problems},
        parts=lines,
        exit_code=int(bool(problems)),
    )
