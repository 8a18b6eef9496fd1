"""Owns ``recorder export``: what was written where, with a progress bar."""

from __future__ import annotations

import sys
from pathlib import Path

from ..analyze.export import Export, format_of
from ..analyze.selection import GlobalOptions, Selection
from ..read.run import Run
from ..units import size
from .cluster import spread_by
from .output import counted, print_json, printable_line, progress, say


def export_typed(
    run: Run,
    out: Path,
    selection: Selection,
    options: GlobalOptions,
    *,
    to: str | None,
    payload: bool,
    force: bool,
    scheduler: str | None = None,
    as_json: bool,
) -> int:
    """Write the file, say so, and return the exit code: 1 if something is missing, or ranks' rows contradict others."""
    to = to or format_of(out)
    with spread_by(scheduler, run) as spread:
        planned = Export(run, to, selection, options, payload=payload, spread=spread)
        with progress("export", planned.total_bytes) as report:
            done = planned.write(out, force=force, report=report)
    if as_json:
        found = {"path": str(done.path), "format": to, "rows": done.num_rows, "bytes": done.num_bytes}
        print_json(found | {"problems": [*done.problems, *run.problems], "notes": done.notes})
    else:
        what = counted(done.num_rows, "row" if to == "parquet" else "tensor")
        say(f"{done.path}: {what}, {size(done.num_bytes)}")
        told = [f"finding: {problem}" for problem in done.problems] + [f"note: {note}" for note in done.notes]
        for line in told:
            print(printable_line(line), file=sys.stderr)
    return int(bool(done.problems) or not done.is_whole)
