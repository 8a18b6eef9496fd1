from __future__ import annotations

from ...run.reply import Reply
from ...run.run import open_run
from ...system.text import counted, size
from ...upkeep.verify import verify
from ..options import RunPath
from ..output import progress

EPILOG = "Examples: recorder verify recordings    recorder verify @-2 --json"


def command(path: RunPath = None) -> Reply:
    """Check every byte of a run.

    It checks checksums, seals, footers, indexes and accounts. Exit code 1: something is wrong.
    """
    run = open_run(path)
    total_bytes = run.size_bytes
    with progress("verify", total_bytes) as report:
        findings = list(verify(run, report))
    num_faults = sum(finding.is_fault for finding in findings)
    num_shards = sum(len(writer.all_shards) for writer in run.writers)
    checked = f"{counted(num_shards, 'shard')}, {counted(run.num_all_rows, 'row')}, {size(total_bytes)} checked"
    verdict = counted(num_faults, "fault") if num_faults else "no faults"
    return Reply(
        members=lambda: {
            "run": str(run.path),
            "rows": run.num_all_rows,
            "bytes": total_bytes,
            "findings": [{"fault": finding.is_fault, "text": finding.text} for finding in findings],
        },
        parts=lambda: [
            *(f"{'fault' if finding.is_fault else 'note'}: {finding.text}" for finding in findings),
            f"{run.name}: {checked}: {verdict}",
        ],
        exit_code=int(num_faults > 0),
    )
