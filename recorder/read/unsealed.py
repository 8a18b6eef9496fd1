"""What is said of rows that writers which are over have left in open shards. Never says how they end."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import NamedTuple

from .finding import typed_for
from .run import RecordedRun


class Unsealed(NamedTuple):
    """Rows in open shards of writers that are not recording any more."""

    num_rows: int
    num_files: int


def unsealed(run: RecordedRun) -> Unsealed:
    """Count them; a merged run has none, and no writer that could be repaired."""
    over = [] if run.is_merged else [writer for writer in run.writers if writer.state != "recording"]
    rows = [shard.num_rows for writer in over for shard in writer.shards if not shard.is_sealed]
    return Unsealed(sum(rows), sum(number > 0 for number in rows))


def unsealed_note(run: RecordedRun) -> str:
    """What they mean and what to do, as a sentence; empty where there are none."""
    num_rows, num_files = unsealed(run)
    if not num_rows:
        return ""
    rows = "1 row is" if num_rows == 1 else f"{num_rows} rows are"
    files = "1 open file" if num_files == 1 else f"{num_files} open files"
    them = "it" if num_rows == 1 else "them"
    target = typed_for(run.path, run.name) if isinstance(run.path, Path) else "COPY"
    seals = f"`{shlex.join(['recorder', 'repair', target])}` seals {'it' if num_files == 1 else 'them'}"
    if target == "COPY":
        seals += " in a copy on a disk"
    return f"{rows} in {files}: recorder reads {them}, other readers do not; {seals}"
