from __future__ import annotations

from collections.abc import Iterator

from ...analyze.export.tables import CONFIGURED, is_configured, opened_tables
from ...errors import LookupFailedError, RecorderError
from ...run.finding import find_folder, find_run
from ...run.reply import Aside, Reply
from ...system.text import counted
from ..options import CatalogPlace, RunsPath, SchedulerOption, mapper_for
from ..paths import opened_runs

EPILOG = "Examples: recorder catalog    recorder catalog recordings --catalog fleet-catalog --json"


def command(path: RunsPath = None, catalog: CatalogPlace = None, scheduler: SchedulerOption = None) -> Reply:
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

    with mapper_for(scheduler) as mapper, opened_tables(where, is_new=True) as tables:
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
