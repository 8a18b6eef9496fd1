"""Owns ``recorder merge --catalog``: what was written where, with a progress bar."""

from __future__ import annotations

import sys
from pathlib import Path

from ..analyze.catalog import write_catalog
from ..read.run import Run
from ..units import size
from .output import counted, print_json, printable_line, progress, say


def catalog_typed(run: Run, out: Path, *, as_json: bool) -> int:
    """Write the file, say so, and return the exit code: 1 if something of the run could not be read."""
    with progress("catalog", sum(writer.shard_bytes for writer in run.writers)) as report:
        done = write_catalog(run, out, report=report)
    notes = [f"{done.num_superseded} rows of steps that a restart did again were left out"] * (done.num_superseded > 0)
    recording = sum(writer.state == "recording" for writer in run.writers)
    notes += [f"{counted(recording, 'writer')} at work; what comes is not in it"] * (recording > 0)
    notes += run.endings
    if as_json:
        print_json(
            {
                "run": str(run.path),
                "path": str(done.path),
                "rows": done.num_rows,
                "bytes": done.num_bytes,
                "superseded": done.num_superseded,
                "problems": done.problems,
                "notes": notes,
            }
        )
        return int(bool(done.problems))
    told = [f"finding: {problem}" for problem in done.problems] + [f"note: {note}" for note in notes]
    for line in told:
        print(printable_line(line), file=sys.stderr)
    say(f"{done.path}: {counted(done.num_rows, 'row')} of {counted(len(run.ranks), 'rank')}, {size(done.num_bytes)}")
    return int(bool(done.problems))
