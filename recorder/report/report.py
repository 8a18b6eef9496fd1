"""Writes the page of a run: `write_report`. The file gets its name once it is whole."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ..analyze.export.publishing import published_file
from ..run.run import Run
from .collect import Report, collect
from .page import page
from .top import Finding, Told


class Written(NamedTuple):
    """The file that was written."""

    path: Path
    num_bytes: int


def write_report(
    run: Run,
    path: Path,
    *,
    against: Run | None = None,
    statistics: Sequence[str] = (),
    checks: Sequence[Told] = (),
    judged: Sequence[Finding] = (),
    force: bool = False,
    report: Report = lambda num_rows: None,
) -> Written:
    """Write the page of a run as one HTML file.

    Args:
        run: what is drawn.
        path: the file.
        against: another run, to be drawn beside it.
        statistics: those that are drawn; by default as many as there is room for.
        checks: what `recorder doctor` says of the run.
        judged: what `recorder check` says of it.
        force: replace a file that exists.
        report: called with how many rows were looked at.

    Raises:
        LookupFailedError: there is nothing to draw; the message says what to record the next time.
        WriteError: the file exists, or cannot be written.
    """
    num_bytes = 0
    title = f"{run.name} against {against.name}" if against is not None else run.name
    blocks = collect(run, against=against, statistics=statistics, checks=checks, judged=judged, report=report)
    with published_file(path, force=force) as file:
        for piece in page(f"{title} - recorder", blocks):
            num_bytes += file.write(piece)
    return Written(path, num_bytes)
