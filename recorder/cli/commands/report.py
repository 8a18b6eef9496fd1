from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ...analyze.align.align import Aligned
from ...analyze.align.align import align as compare_tokens_of
from ...errors import LookupFailedError
from ...report.collect import num_looks
from ...report.picture import PANELS, write_picture
from ...report.report import write_report
from ...report.tokens import tokens_block
from ...report.top import told_by_doctor
from ...run.reply import Reply
from ...run.run import Run, open_run
from ...system.text import size
from ..options import RunPath, out_option, run_option
from ..output import progress
from ..paths import other_run

EPILOG = "Examples: recorder report recordings -o report.html    recorder report @-1 --png map -o map.png"


def command(
    path: RunPath = None,
    out: Annotated[Path | None, out_option("PATH", "The file; without: report.html, or PANEL.png.")] = None,
    against: Annotated[str | None, run_option(help="A second run, to be drawn beside the first.")] = None,
    align: Annotated[
        str | None,
        run_option(help="The run of the engine that wrote the tokens, or RUN itself: a map of its tokens."),
    ] = None,
    statistics: Annotated[
        str | None,
        typer.Option(
            help="Which to draw, with commas: absmax, l2, mean, std, min, max; by default as many as there is room for."
        ),
    ] = None,
    png: Annotated[
        str | None,
        typer.Option(metavar="PANEL", help=f"Draw a panel alone, as PNG, without a browser: {', '.join(PANELS)}."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that exists.")] = False,
) -> Reply:
    """Draw a run as one HTML file: the loss, maps, lines, ranks.

    The file needs no network and runs no scripts but its own: send it, or keep it beside the job's other results.

    It holds numbers and small pictures for drawing, and no tensors. In a long run, a column of the map stands for
    several steps. With many ranks, the file shows the lowest, the median and the highest rank, and ranks that are odd.

    Exit code 1: something of the run is damaged or missing, as recorder doctor says.
    """
    run = open_run(path)
    run.keep_columns()
    if png is not None:
        if against is not None:
            raise LookupFailedError("--png draws one run; leave out --against, or leave out --png for the page of both")
        return _picture(run, png, out or Path(f"{png}.png"), force)
    other = None if against is None else other_run(against, {"the run to draw": run}, "--against")
    more = [] if align is None else [tokens_block(_aligned(run, align))]
    out = out or Path("report.html")
    names = [name.strip() for name in statistics.split(",")] if statistics is not None else []
    if "" in names:
        raise LookupFailedError(f"--statistics {statistics}: expected names with commas between")
    with progress("report", num_looks(run, other) + run.num_rows, unit="rows") as report:
        checks = told_by_doctor(run)
        report(run.num_rows)
        num_bytes = write_report(
            run, out, against=other, statistics=names, checks=checks, more=more, force=force, report=report
        )
    num_missing = sum(check.state == "missing" for check in checks)
    return Reply(
        members=lambda: {"run": str(run.path), "path": str(out), "bytes": num_bytes, "missing": num_missing},
        parts=lambda: [f"{out}: {size(num_bytes)}"],
        exit_code=int(num_missing > 0),
    )


def _picture(run: Run, panel: str, out: Path, force: bool) -> Reply:
    if panel not in PANELS:
        names = ", ".join(PANELS)
        raise LookupFailedError(f"--png {panel}: expected {names}; the buttons of the page save its other panels")
    num_bytes = write_picture(run, out, panel, force=force)
    members = {"run": str(run.path), "path": str(out), "bytes": num_bytes}
    return Reply(members=lambda: members, parts=lambda: [f"{out}: {size(num_bytes)}"])


def _aligned(run: Run, engine: str) -> Aligned:
    other = open_run(engine)
    return compare_tokens_of(run, None if str(other.path) == str(run.path) else other)
