"""Checks every byte of a run, seals what killed processes left open, and merges a run's ranks."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import Annotated, Any

import typer

from ...errors import LookupFailedError
from ...merge.merge import MergeReport, merge_run
from ...records import PART_BYTES
from ...run.finding import command_of_merge, scheme_of
from ...run.reply import Reply, Table, table_of
from ...run.run import Run, open_run
from ...system.executors import open_cluster
from ...system.processes import available_cores, set_malloc
from ...system.text import counted, size
from ...upkeep.repair import Outcome, repair_run
from ...upkeep.verify import verify
from .. import hide_pandas, options
from ..output import progress

EXAMPLES = {
    "verify": ("recorder verify recordings", "recorder verify @-2 --json"),
    "repair": ("recorder repair recordings --dry-run", "recorder repair @-1"),
    "merge": (
        "recorder merge recordings -o merged",
        "recorder merge recordings -o alone --layout 'blocks.1.*=per_rank'",
    ),
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
    if path is not None and scheme_of(path) is not None:  # before any request to the store
        raise LookupFailedError(f"{path}: repair writes, and runs in a store are only read; repair a copy on a disk")
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


_MAX_SHOWN = 3
_KINDS = {
    "corrupt": "not readable",
    "inconsistent": "refused, because the ranks' chunks do not fit",
    "layout_changes": "alike on all ranks at some steps, and not at others",
    "replicas_differ": "replicas that differ",
    "buffers_differ": "buffers that differ between ranks (the first rank's is taken)",
    "partial": "partial, because ranks are missing",
    "unknown_encoding": "without their values, which a later version of recorder wrote in a way unknown to this one",
    "unknown_column": "without columns that a later version of recorder has written",
    "stranger": "left out, because it belongs to another run",
    "per_rank": "kept per rank",
    "inferred": "put together as their shapes suggest, and nothing else says",
    "between_stages": "kept per rank, because it goes from one pipeline stage to another",
    "superseded": "left out, because a newer attempt recorded the same steps",
}
"""The text for each kind of finding. A kind without a text is printed by its name."""
_OF_WRITERS = ("stranger", "superseded")
"""The kinds of findings that count units of work, not rows, so that their counts are not printed as numbers of rows."""
_KEPT_BYTES = 128 << 20


def merge_command(
    out: Annotated[
        Path,
        options.out_option(
            "OUT", "Where: a new or empty directory, or an earlier merge of this run, which is brought up to date."
        ),
    ],
    path: options.RunPath = None,
    loss: options.LossOption = "mean",
    layout: options.LayoutOption = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Processes; by default the cores that this one may use.")
    ] = None,
    scheduler: options.SchedulerOption = None,
) -> Reply:
    """Write the global view of a run as a run.

    Every command reads a merged run like any other run. The same command, typed again, continues an interrupted merge,
    and adds what is new if the run has grown. Rows that cannot be assembled stay per rank.

    Exit code 1: the run was merged, but chunks do not fit, parameters, gradients or optimizer states differ between
    replicas, ranks are missing at a step, or shards are damaged. Buffers that differ (the next forward broadcasts
    them), rows that stay per rank and older attempts do not count. Exit code 2: nothing was published.
    """
    if scheduler is not None:
        options.refuse("not with --scheduler, whose workers do the work", jobs=jobs)
    run = open_run(path)
    try:
        report = _merge(run, out, loss=loss, layouts=layout or [], jobs=jobs, scheduler=scheduler)
    except KeyboardInterrupt:
        if (command := command_of_merge(Path(os.path.abspath(out)))) is not None:
            print(f"recorder: interrupted; what is finished is kept, and goes on with: {command}", file=sys.stderr)
        raise
    return Reply(
        members=lambda: _members(run, report), parts=lambda: _lines(run, report), exit_code=int(report.num_problems > 0)
    )


def _merge(
    run: Run, out: Path, *, loss: str, layouts: Sequence[str], jobs: int | None, scheduler: str | None
) -> MergeReport:
    _prepare()
    merge = partial(merge_run, run, out, loss=loss, layouts=layouts, progress=progress)
    if scheduler is not None:
        with open_cluster(scheduler) as (executor, num_workers):
            return merge(executor=executor, num_workers=num_workers, helps=False)
    num_workers = (available_cores() if jobs is None else jobs) - 1
    with _workers(num_workers) as executor:
        return merge(executor=executor, num_workers=num_workers)


@contextmanager
def _workers(num_workers: int) -> Iterator[Executor | None]:
    """Start worker processes for a merge; they are spawned, because forked processes would inherit Arrow's locks."""
    if num_workers < 1:
        yield None
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_workers, mp_context=context, initializer=_begin_worker) as executor:
        yield executor


def _begin_worker() -> None:
    """Make a worker end with the merge: quietly on an interrupt, and also if the merging process is killed."""
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    hide_pandas()
    _prepare()
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent.sentinel,), name="merge-parent", daemon=True).start()


def _prepare() -> None:
    """Tune the memory of this process for merging, its only task.

    glibc keeps the memory of freed payloads, because otherwise the kernel would zero the same pages for each payload,
    which takes 10 % of a merge. The garbage collection before each window of steps skips the objects that exist now,
    which saves 9 % of the processor time.
    """
    gc.freeze()
    set_malloc(M_MMAP_THRESHOLD=PART_BYTES, M_TRIM_THRESHOLD=_KEPT_BYTES)


def _end_with(sentinel: int) -> None:
    wait([sentinel])
    os._exit(1)


def _lines(run: Run, report: MergeReport) -> Iterator[str]:
    for kind, entry in report.findings.items():
        how_many = "" if kind in _OF_WRITERS else f": {counted(entry['count'], 'row')}"
        yield f"{'finding' if entry['num_problems'] else 'note'}: {_KINDS.get(kind, kind)}{how_many}"
        for example in entry["first"][:_MAX_SHOWN]:
            yield f"  {_describe(example)}"
        if len(entry["first"]) > _MAX_SHOWN:
            yield "  and more"
    recording = [writer for writer in run.writers if writer.state == "recording"]
    if recording:
        yield f"note: {counted(len(recording), 'writer')} still at work; merge again for later rows"
    for ending in run.endings:
        yield f"note: {ending}"
    num_dropped = sum(writer.balance.num_dropped for writer in run.writers)
    if num_dropped:
        yield f"note: {counted(num_dropped, 'row')} had been dropped while it was recorded; recorder doctor says why"
    kept = f", {report.num_kept_units} of {counted(report.num_units, 'unit')} kept" if report.num_kept_units else ""
    is_measurable = report.merged_bytes >= 1e6 and report.elapsed_s >= 1
    rate = f", {report.merged_bytes / 1e6 / report.elapsed_s:.0f} MB/s" if is_measurable else ""
    yield (
        f"{report.path}: {counted(report.num_tensors, 'tensor')} of {counted(len(run.ranks), 'rank')}, "
        f"{size(report.source_bytes)} of values, {size(run.size_bytes)} in, {size(report.written_bytes)} out{kept}; "
        f"{size(report.merged_bytes)} merged in {report.elapsed_s:.1f} s{rate}"
    )
    verdict = counted(report.num_problems, "finding") if report.num_problems else _NO_FINDINGS
    yield f"{report.path.name}: {verdict}"


_NO_FINDINGS = "no findings (of ranks that are missing, replicas that differ, and layouts that contradict each other)"


def _describe(example: dict[str, Any]) -> str:
    if example["step"] is None or (example["step"] < 0 and not example["module_path"]):
        return str(example["text"])
    where = ":".join(str(example[name]) for name in ("module_path", "site", "name") if example[name])
    return f"step {example['step']} {where}: {example['text']}"


def _members(run: Run, report: MergeReport) -> dict[str, Any]:
    return {
        "run": str(run.path),
        "out": str(report.path),
        "tensors": report.num_tensors,
        "rows": report.num_rows,
        "payload_bytes": report.source_bytes,
        "bytes_in": run.size_bytes,
        "bytes_out": report.written_bytes,
        "merged_bytes": report.merged_bytes,
        "seconds": report.elapsed_s,
        "units": report.num_units,
        "kept_units": report.num_kept_units,
        "problems": report.num_problems,
        "findings": report.findings,
    }
