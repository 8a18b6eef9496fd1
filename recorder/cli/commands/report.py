"""``recorder report``: writes a run as one HTML file to look at, with a progress bar."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ...errors import LookupFailedError
from ...globalview.run import Run, open_run
from ...read.writers import load_balances
from ...report.collect import num_looks
from ...report.report import write_report
from ...report.top import Told
from ...system.units import size
from ..options import Json, RunPath, complete_run
from ..output import print_json, progress, say
from ..paths import local_path
from .doctor import checks_of

EPILOG = "Example: recorder report recordings -o report.html"


def command(
    path: RunPath = None,
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", metavar="PATH", help="The file; without: report.html.", parser=local_path),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(metavar="RUN", help="A second run, to be drawn beside the first.", autocompletion=complete_run),
    ] = None,
    statistics: Annotated[
        str | None,
        typer.Option(
            help="Which to draw, with commas: absmax, l2, mean, std, min, max; by default as many as there is room for."
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that exists.")] = False,
    as_json: Json = False,
) -> int:
    """Draw a run as one HTML file: maps, lines, graph, ranks.

    The file needs no network and runs no scripts but its own: send it, or keep it beside the job's other results.

    It holds numbers and small pictures for drawing, and no tensors. Of a long run a column of the map stands for
    several steps. Of many ranks it shows the lowest, the median, the highest, and those that are odd.

    Exit code 1: something of the run is damaged or missing, as recorder doctor says.
    """
    run = open_run(path)
    other = open_run(against) if against is not None else None
    names = [name.strip() for name in statistics.split(",")] if statistics is not None else []
    if "" in names:
        raise LookupFailedError(f"--statistics {statistics}: expected names with commas between")
    checks = told_by_doctor(run)
    with progress("report", num_looks(run, other), unit="rows") as report:
        done = write_report(
            run, out or Path("report.html"), against=other, statistics=names, checks=checks, force=force, report=report
        )
    num_missing = sum(check.state == "missing" for check in checks)
    if as_json:
        print_json({"run": str(run.path), "path": str(done.path), "bytes": done.num_bytes, "missing": num_missing})
    else:
        say(f"{done.path}: {size(done.num_bytes)}")
    return int(num_missing > 0)


def told_by_doctor(run: Run) -> list[Told]:
    """What `recorder doctor` says of a run."""
    load_balances(run.writers)
    return [Told(check.state, check.text, check.members) for check in checks_of(run)]
