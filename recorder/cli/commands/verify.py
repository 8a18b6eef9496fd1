"""``recorder verify``: shows the findings of `upkeep.verify`, with a progress bar."""

from __future__ import annotations

from ...run.run import open_run
from ...system.text import counted, size
from ...upkeep.verify import verify
from ..options import Json, RunPath
from ..output import print_json, progress, say

EPILOG = "Examples: recorder verify recordings    recorder verify @-2 --json"


def command(path: RunPath = None, as_json: Json = False) -> int:
    """Check every byte of a run.

    It checks checksums, seals, footers, indexes and accounts. Exit code 1: something is wrong.
    """
    run = open_run(path)
    total_bytes = sum(writer.shard_bytes for writer in run.writers)
    with progress("verify", total_bytes) as report:
        findings = list(verify(run, report))
    num_faults = sum(finding.is_fault for finding in findings)
    if as_json:
        listed = [{"fault": finding.is_fault, "text": finding.text} for finding in findings]
        print_json({"run": str(run.path), "rows": run.num_rows, "bytes": total_bytes, "findings": listed})
    else:
        for finding in findings:
            say(f"{'fault' if finding.is_fault else 'note'}: {finding.text}")
        verdict = counted(num_faults, "fault") if num_faults else "no faults"
        num_shards = sum(len(writer.shards) for writer in run.writers)
        checked = f"{counted(num_shards, 'shard')}, {counted(run.num_rows, 'row')}, {size(total_bytes)} checked"
        say(f"{run.name}: {checked}: {verdict}")
    return int(num_faults > 0)
