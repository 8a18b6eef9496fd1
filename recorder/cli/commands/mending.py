"""Checks every byte of a run, seals what killed processes left open, and merges a run's ranks."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import wait
from pathlib import Path
from typing import Annotated

import typer

from ...merge.merge import merge_run, reply_of
from ...records import PART_BYTES
from ...run.finding import command_of_merge
from ...run.reply import Reply
from ...run.run import open_run
from ...system.executors import open_cluster
from ...system.processes import available_cores, set_malloc
from ...upkeep.repair import repair_reply
from ...upkeep.verify import verify_reply
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
    return verify_reply(open_run(path), progress)


def repair_command(
    path: options.RunPath = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be done, and change nothing.")] = False,
    assume_dead: Annotated[
        bool,
        typer.Option(
            "--assume-dead",
            help="The job is over: also repair writers on other hosts, or with a pid in use, if quiet for a minute.",
        ),
    ] = False,
) -> Reply:
    """Seal what killed processes left open.

    The newest rows of a killed process are in open shards, which only recorder reads; sealed shards are for every Arrow
    reader. Missing or damaged indexes are made again, and half-written files are removed. A writer that may be alive is
    left alone. The command can be interrupted, and run again.

    Exit code 1: something is lost for good, such as a write that was cut. 2: a file could not be repaired.
    """
    return repair_reply(path, is_dry=dry_run, assume_dead=assume_dead, progress=progress)


def merge_command(
    out: Annotated[
        Path,
        options.out_option(
            "OUT", "The directory to write: a new or empty one, or an earlier merge of this run, which is updated."
        ),
    ],
    path: options.RunPath = None,
    loss: options.LossOption = "mean",
    layout: options.LayoutOption = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="The number of processes; by default the number of cores.")
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
        options.refuse("it cannot be combined with --scheduler, whose workers do the work", jobs=jobs)
    run = open_run(path)
    try:
        with _executor(jobs, scheduler) as (executor, num_workers):
            report = merge_run(
                run, out, loss=loss, layouts=layout or [], progress=progress,
                executor=executor, num_workers=num_workers, helps=scheduler is None,
            )  # fmt: skip
    except KeyboardInterrupt:
        if (command := command_of_merge(Path(os.path.abspath(out)))) is not None:
            print(f"recorder: interrupted; what is finished is kept, and goes on with: {command}", file=sys.stderr)
        raise
    return reply_of(run, report)


@contextmanager
def _executor(jobs: int | None, scheduler: str | None) -> Iterator[tuple[Executor | None, int]]:
    """Start the workers of a merge, and yield them and their number. This process is prepared for merging, too.

    Worker processes are spawned, because forked processes would inherit Arrow's locks.
    """
    _prepare()
    num_workers = (available_cores() if jobs is None else jobs) - 1
    if scheduler is not None:
        with open_cluster(scheduler) as workers:
            yield workers
    elif num_workers < 1:
        yield None, num_workers
    else:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(num_workers, mp_context=context, initializer=_begin_worker) as executor:
            yield executor, num_workers


def _begin_worker() -> None:
    """Prepare a worker process. It ends quietly on an interrupt, and also if the merging process is killed."""
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    hide_pandas()
    _prepare()
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent.sentinel,), name="merge-parent", daemon=True).start()


def _prepare() -> None:
    """Tune the memory of this process for merging, its only task.

    glibc keeps the memory of freed payloads. Otherwise the kernel would zero the same pages for each payload, which
    takes 10 % of a merge. The objects that exist now are frozen. The garbage collection before each window of steps
    then skips them, which saves 9 % of the processor time.
    """
    gc.freeze()
    set_malloc(M_MMAP_THRESHOLD=PART_BYTES, M_TRIM_THRESHOLD=128 << 20)


def _end_with(sentinel: int) -> None:
    wait([sentinel])
    os._exit(1)
