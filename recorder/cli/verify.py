"""Owns ``recorder verify``: the findings of `read.verify`, with a progress bar."""

from __future__ import annotations

from ..read.run import Run
from ..read.verify import verify
from ..units import size
from .output import counted, print_json, progress, say


def verify_run(run: Run, *, as_json: bool) -> int:
    """Print what is wrong and return the exit code: 1 if any of it is a fault."""
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
        verdict = counted(num_faults, "fault") if num_faults else "no faults"
        num_shards = sum(len(writer.shards) for writer in run.writers)
        found_text = f"{counted(num_shards, 'shard')}, {counted(run.num_rows, 'row')}, {size(total_bytes)} checked"
        say(f"{run.name}: {found_text}: {verdict}")
    return int(num_faults > 0)
