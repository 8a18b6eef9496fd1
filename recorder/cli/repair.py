"""Owns ``recorder repair``: what was done, as a table and a verdict."""

from __future__ import annotations

from collections import Counter

from ..errors import LookupFailedError
from ..read.places import scheme_of
from ..read.run import Run
from ..repair import Outcome, repair_run
from ..units import size
from .output import Column, Table, counted, print_json, progress, say

_COLUMNS = (
    Column(title="what"),
    Column(title="file"),
    Column(title="rows", is_number=True, drop=2),
    Column(title="size", is_number=True, drop=1),
    Column(title="of it", is_prose=True),
)


def check_place(path: str | None) -> None:
    """Refuse a run that cannot be repaired where it is, before anything is asked of a store.

    Raises:
        LookupFailedError: the run is in a store.
    """
    if path is not None and scheme_of(path) is not None:
        raise LookupFailedError(f"{path}: repair writes, and runs in a store are only read; repair a copy on a disk")


def repair_typed(run: Run, *, is_dry: bool, assume_dead: bool, as_json: bool) -> int:
    """Repair a run and return the exit code: 1 if something is lost for good, 2 if the disk refused."""
    open_bytes = sum(shard.size_bytes for writer in run.writers for shard in writer.shards)
    with progress("repair", open_bytes) as report:
        outcomes = list(repair_run(run, is_dry=is_dry, assume_dead=assume_dead, report=report))
    counts = Counter(outcome.what for outcome in outcomes)
    if as_json:
        found = [
            {"what": o.what, "path": str(o.path), "rows": o.rows, "bytes": o.num_bytes, "text": o.text}
            for o in outcomes
        ]
        print_json({"run": str(run.path), "dry_run": is_dry, "outcomes": found})
    else:
        if outcomes:
            Table(_COLUMNS, [_cells(run, outcome) for outcome in outcomes]).print()
        say(f"{run.name}: {_verdict(outcomes, counts)}{' (dry run: nothing was changed)' if is_dry else ''}")
    return 2 if counts["failed"] else int(counts["lost"] > 0)


def _cells(run: Run, outcome: Outcome) -> list[str]:
    path = outcome.path.relative_to(run.path) if outcome.path.is_relative_to(run.path) else outcome.path
    rows = f"{outcome.rows:,}" if outcome.rows else ""
    return [outcome.what, str(path), rows, size(outcome.num_bytes) if outcome.num_bytes else "", outcome.text]


def _verdict(outcomes: list[Outcome], counts: Counter[str]) -> str:
    rows = sum(outcome.rows for outcome in outcomes if outcome.what == "sealed")
    texts = [f"{counted(counts['sealed'], 'shard')} sealed with {counted(rows, 'row')}"] if counts["sealed"] else []
    if counts["indexed"]:
        texts.append(f"{counted(counts['indexed'], 'index file')} made")
    if counts["removed"]:
        texts.append(f"{counted(counts['removed'], 'file')} removed")
    if counts["skipped"]:
        they = "it" if counts["skipped"] == 1 else "they"
        texts.append(f"{counted(counts['skipped'], 'writer')} left alone, because {they} may be alive")
    if counts["lost"]:
        texts.append(f"{counts['lost']} lost for good")
    if counts["failed"]:
        texts.append(f"{counted(counts['failed'], 'file')} not repaired, because the disk refused")
    return ", ".join(texts) or "nothing to repair"
