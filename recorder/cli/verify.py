"""Owns ``recorder verify``: the findings of `read.verify`, with a progress bar."""

from __future__ import annotations

from pathlib import Path

from ..read.run import open_run
from ..read.verify import verify
from .output import print_json, progress, say, size


def verify_run(path: Path, *, as_json: bool) -> int:
    """Print what is wrong and return the exit code: 1 if any of it is a fault."""
    run = open_run(path)
    total_bytes = sum(writer.shard_bytes for writer in run.writers)
    with progress("verify", total_bytes) as report:
        findings = list(verify(run, report))
    num_faults = sum(finding.is_fault for finding in findings)
    if as_json:
        found = [{"fault": finding.is_fault, "text": finding.text} for finding in findings]
        print_json({"run": str(run.path), "rows": run.num_rows, "bytes": total_bytes, "findings": found})
    else:
        for finding in findings:
            say(f"{'fault' if finding.is_fault else 'note'}: {finding.text}")
        verdict = f"{num_faults} faults" if num_faults else "no faults"
        num_shards = sum(len(writer.shards) for writer in run.writers)
        say(f"{run.path.name}: {num_shards} shards, {run.num_rows} rows, {size(total_bytes)} checked: {verdict}")
    return int(num_faults > 0)
