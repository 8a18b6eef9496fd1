"""Checks every byte of a run, and seals what killed processes left open."""

from __future__ import annotations

from collections import Counter
from typing import Annotated

import typer

from ...errors import LookupFailedError
from ...run.finding import scheme_of
from ...run.reply import Reply, Table, table_of
from ...run.run import Run, open_run
from ...system.text import counted, size
from ...upkeep.repair import Outcome, repair_run
from ...upkeep.verify import verify
from .. import options
from ..output import progress

EXAMPLES = {
    "verify": ("recorder verify recordings", "recorder verify @-2 --json"),
    "repair": ("recorder repair recordings --dry-run", "recorder repair @-1"),
}


def verify_command(path: options.RunPath = None) -> Reply:
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


def repair_command(
    path: options.RunPath = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and change nothing.")] = False,
    assume_dead: Annotated[
        bool,
        typer.Option(
            "--assume-dead",
            help="The job is over: repair also writers on other hosts, or with a pid in use, if quiet for a minute.",
        ),
    ] = False,
) -> Reply:
    """Seal what killed processes left open.

    The newest rows of a killed process are in open shards, which only recorder reads; sealed shards are for every Arrow
    reader. Missing or damaged indexes are made again, and half-written files are removed. A writer that may be alive is
    left alone. The command can be interrupted, and run again.

    Exit code 1: something is lost for good, such as a write that was cut. 2: a file could not be repaired.
    """
    check_is_local(path)
    run = open_run(path)
    open_bytes = sum(shard.size_bytes for writer in run.writers for shard in writer.all_shards)
    with progress("repair", open_bytes) as report:
        outcomes = list(repair_run(run, is_dry=dry_run, assume_dead=assume_dead, report=report))
    counts = Counter(outcome.what for outcome in outcomes)
    entries = [
        {"what": one.what, "path": str(one.path), "rows": one.rows, "bytes": one.num_bytes, "text": one.text}
        for one in outcomes
    ]
    verdict = f"{run.name}: {_verdict(outcomes, counts)}{' (dry run: nothing was changed)' if dry_run else ''}"
    return Reply(
        members=lambda: {"run": str(run.path), "dry_run": dry_run, "outcomes": entries},
        parts=lambda: [*([_table(run, outcomes)] if outcomes else []), verdict],
        exit_code=2 if counts["failed"] else int(counts["lost"] > 0),
    )


def check_is_local(path: str | None) -> None:
    """Raise LookupFailedError for a run in a store, before any request to the store."""
    if path is not None and scheme_of(path) is not None:
        raise LookupFailedError(f"{path}: repair writes, and runs in a store are only read; repair a copy on a disk")


def _table(run: Run, outcomes: list[Outcome]) -> Table:
    rows = []
    for outcome in outcomes:
        path = outcome.path.relative_to(run.path) if outcome.path.is_relative_to(run.path) else outcome.path
        num_rows = f"{outcome.rows:,}" if outcome.rows else ""
        num_bytes = size(outcome.num_bytes) if outcome.num_bytes else ""
        rows.append([outcome.what, str(path), num_rows, num_bytes, outcome.text])
    titles = ("what", "file", "rows", "size", "why")
    return table_of(titles, rows, numbers=("rows", "size"), prose=("why",), drops=("rows", "size"))


def _verdict(outcomes: list[Outcome], counts: Counter[str]) -> str:
    rows = sum(outcome.rows for outcome in outcomes if outcome.what == "sealed")
    they = "it" if counts["skipped"] == 1 else "they"
    texts = {
        "sealed": f"{counted(counts['sealed'], 'shard')} sealed with {counted(rows, 'row')}",
        "indexed": f"{counted(counts['indexed'], 'index file')} made",
        "removed": f"{counted(counts['removed'], 'file')} removed",
        "skipped": f"{counted(counts['skipped'], 'writer')} left alone, because {they} may be alive",
        "lost": f"{counts['lost']} lost for good",
        "failed": f"{counted(counts['failed'], 'file')} not repaired, because the disk refused",
    }
    return ", ".join(text for what, text in texts.items() if counts[what]) or "nothing to repair"
