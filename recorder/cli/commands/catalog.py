"""``recorder catalog``: writes all rows of all ranks to one Parquet file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ...analyze.export.export import write_catalog
from ...run.reply import Aside, Reply
from ...run.run import open_run
from ...system.text import counted, size
from ..options import RunPath
from ..output import progress
from ..paths import local_path

EPILOG = "Examples: recorder catalog recordings -o rows.parquet    recorder catalog @-2 -o before.parquet --json"


def command(
    out: Annotated[Path, typer.Option("-o", "--out", metavar="FILE", help="The new file to write.", parser=local_path)],
    path: RunPath = None,
) -> Reply:
    """Write all rows of all ranks as one Parquet file.

    The file has the rows as the ranks wrote them, without tensors. Of a step that several attempts recorded it has only
    the rows of the attempt that counts. DuckDB, Spark, Trino and pandas read the file.

    Exit code 1: something is damaged, and is not in the file.
    """
    run = open_run(path)
    with progress("catalog", sum(writer.shard_bytes for writer in run.writers)) as report:
        done = write_catalog(run, out, report=report)
    notes = [f"{done.num_superseded} rows of steps that a restart did again were left out"] * (done.num_superseded > 0)
    recording = sum(writer.state == "recording" for writer in run.writers)
    notes += [f"{counted(recording, 'writer')} at work; later rows are not in it"] * (recording > 0)
    notes += [f"column {name!r} is unknown to this version, and not in it" for name in run.unknown_columns()]
    notes += run.endings
    rows = f"{counted(done.num_rows, 'row')} of {counted(len(run.ranks), 'rank')}"
    return Reply(
        members=lambda: {
            "run": str(run.path), "path": str(done.path), "rows": done.num_rows, "bytes": done.num_bytes,
            "superseded": done.num_superseded, "problems": done.problems, "notes": notes,
        },
        parts=lambda: [
            *(Aside(f"finding: {problem}") for problem in done.problems),
            *(Aside(f"note: {note}") for note in notes),
            f"{done.path}: {rows}, {size(done.num_bytes)}",
        ],
        exit_code=int(bool(done.problems)),
    )  # fmt: skip
