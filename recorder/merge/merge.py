"""Owns a merge from beginning to end: plan, workers, resumption, publication, and what it has to report.

Must never change the source, and never hand a run to a worker: each opens its own.
"""

from __future__ import annotations

import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, ProcessPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..errors import ClusterError, NotARunError, WriteError
from ..read.overrides import check_overrides
from ..read.places import Place
from ..read.run import Run, open_run
from .findings import Summary, combine, num_problems, of_damage
from .manifests import of_run, of_source, of_units
from .output import Output, open_output
from .plan import Inputs, Unit
from .unit import UNKNOWN, UnitBuilder, UnitReport, read_report

Report = Callable[[int], None]
"""Told how many bytes were merged since the last call."""
Progress = Callable[[str, int], AbstractContextManager[Report]]
"""Makes a report from a title and the number of bytes to come."""

_SHARDS_PER_UNIT = 200
"""A worker of a cluster opens the run once for a task: 0.3 ms a shard, so tasks grow with the run."""
_TASKS_PER_WORKER = 2
"""One that it does, and one that waits while this thread is busy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeReport:
    """How a merge went. Sizes are in bytes."""

    path: Path
    num_units: int
    num_kept_units: int
    """Finished by an earlier call, from the same rows."""
    num_tensors: int
    num_rows: int
    source_bytes: int
    """Payload of the source, decoded."""
    merged_bytes: int
    """The part of it that this call merged."""
    written_bytes: int
    """Size of the merged shards, those kept included."""
    elapsed_s: float
    findings: Summary

    @property
    def num_problems(self) -> int:
        """Findings that mean that something is wrong or missing."""
        return num_problems(self.findings)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """What a worker needs to know beside its units."""

    run: Place
    out: Path
    loss: str
    layouts: tuple[str, ...]
    manifest: Mapping[str, Any] = field(hash=False)
    num_shards: int
    num_workers: int
    call: str
    """Of the output; see `Output.call`."""
    is_alone: bool
    """The worker is a process that does one task after the other: it keeps the run open between them."""

    @property
    def options(self) -> dict[str, Any]:
        return {"loss": self.loss, "layouts": list(self.layouts)}


@contextmanager
def silent(title: str, total_bytes: int) -> Iterator[Report]:
    """No progress bar."""
    yield lambda num_bytes: None


def merge_run(
    run: Run,
    out: Path,
    *,
    executor: Executor | None = None,
    num_workers: int = 1,
    helps: bool = True,
    check_folder: Callable[[Path], None] = lambda folder: None,
    loss: str = "mean",
    layouts: Sequence[str] = (),
    progress: Progress = silent,
) -> MergeReport:
    """Write the global view of a run as a run of its own, or bring such a run up to date.

    Args:
        run: what to merge; it is not changed, and may still be recorded.
        out: a directory that does not exist yet, is empty, or is a merge of this run with these options.
        executor: shares the work with this thread, where there is more than a unit of it. It is not shut down.
        num_workers: tasks that the executor does at once.
        helps: this thread builds units, too; else it only hands them out.
        check_folder: called before the first unit with the folder in which they are built; what it raises ends the
            merge. For executors of other machines, which may not see it.
        loss: as in `Run.view`.
        layouts: as in `Run.view`.
        progress: makes the progress bar.

    Raises:
        WriteError: `out` is something else, or cannot be written. What is finished is kept for the next call.
        RunError: the run cannot be read at all, or an option makes no sense.
    """
    if run.is_merged:
        source = run.manifest["merged_from"].get("run_id")
        raise NotARunError(f"{run.path}: is the merge of run {source} already; every command reads it as it is")
    started_s = time.monotonic()
    check_overrides(layouts, run)
    view = run.view(loss=loss, layouts=layouts)
    out, options = Path(os.path.abspath(out)), {"loss": loss, "layouts": list(layouts)}
    with open_output(out, run, options) as output:
        job = _Job(
            run=run.path.absolute(),
            out=out,
            loss=loss,
            layouts=tuple(layouts),
            manifest=of_units(run),
            num_shards=sum(len(writer.shards) for writer in run.writers),
            num_workers=num_workers,
            call=output.call,
            is_alone=isinstance(executor, ProcessPoolExecutor),
        )
        inputs = Inputs(run, job.options)
        found = {name for name in output.units() if not _report_of(output, name).is_damaged}
        units = [unit for window in inputs.windows(inputs.kept_windows(found)) for unit in inputs.units(window)]
        missing = [unit for unit in units if unit.name not in found]
        merged_bytes = sum(unit.payload_bytes for unit in missing)
        try:
            output.clear({unit.name for unit in units if unit.name in found})
            with output.building() as folder, progress("merge", merged_bytes) as report:
                if executor is not None:
                    check_folder(folder)
                builder = UnitBuilder(run, view, inputs, job.manifest)

                def build(units: Sequence[Unit]) -> None:
                    for unit in units:
                        _build(builder, output, unit)
                        report(unit.payload_bytes)

                if executor is None or (helps and len(missing) < 2):
                    build(missing)
                else:
                    build(_hand_out(executor, job, missing, build if helps else None, report, output.stop_building))
            reports = [_report_of(output, unit.name) for unit in units]
            manifest = of_run(run, {"path": str(run.path.absolute()), **options})
            output.publish([unit.name for unit in units], of_source(run), manifest)
        except (OSError, BrokenExecutor, ClusterError) as error:
            raise WriteError(
                f"{job.out}: the merge stopped ({error or type(error).__name__}); "
                "what is finished is kept: run the same command again once the cause is gone"
            ) from error
    damage = [*run.problems, *(text for one in reports for text in one.damage)]
    return MergeReport(
        path=job.out,
        num_units=len(units),
        num_kept_units=len(units) - len(missing),
        num_tensors=sum(one.num_tensors for one in reports),
        num_rows=sum(one.num_rows for one in reports),
        source_bytes=sum(one.source_bytes for one in reports),
        merged_bytes=merged_bytes,
        written_bytes=sum(one.written_bytes for one in reports),
        elapsed_s=time.monotonic() - started_s,
        findings=combine([of_damage(damage), *(one.findings for one in reports)]),
    )


def _hand_out(
    executor: Executor,
    job: _Job,
    units: Sequence[Unit],
    build: Callable[[Sequence[Unit]], None] | None,
    report: Report,
    stop: Callable[[], None],
) -> list[Unit]:
    """Have units built elsewhere, and from the end of the list here with `build`, until all are taken.

    Where that fails, `stop` is called: those at work then fail, too, instead of going on.

    Returns:
        Units that were not built: the run has changed since it was opened here.
    """
    size = 1 if job.is_alone else 1 + job.num_shards // _SHARDS_PER_UNIT
    waiting = deque(units[start : start + size] for start in range(0, len(units), size))
    running: dict[Future[list[Unit]], Sequence[Unit]] = {}
    left: list[Unit] = []
    try:
        while waiting or running:
            # A few at a time: a pool of 3.11 whose worker dies hangs over tasks that were cancelled. The last one is
            # this thread's: else it would wait at the end for whoever had two to do.
            while len(waiting) > (build is not None) and len(running) < _TASKS_PER_WORKER * job.num_workers:
                task = waiting.popleft()
                running[executor.submit(_work, job, task)] = task
            if waiting and build is not None:
                build(waiting.pop())
            else:
                wait(running, return_when=FIRST_COMPLETED)
            for future in [future for future in running if future.done()]:
                left += _take(future, running.pop(future), report)
    except BaseException:
        stop()
        wait(running)  # those at work still write there
        raise
    return sorted(left, key=units.index)


def _take(future: Future[list[Unit]], task: Sequence[Unit], report: Report) -> list[Unit]:
    """What a worker has left of a task."""
    undone = future.result()
    report(sum(unit.payload_bytes for unit in task) - sum(unit.payload_bytes for unit in undone))
    return undone


def _work(job: _Job, units: Sequence[Unit]) -> list[Unit]:
    """Build units with a run of our own; any process or thread. Returns those that this run does not hold so."""
    builder, output = (_kept_open if job.is_alone else _open)(job)
    left = []
    for unit in units:
        if builder.is_as_planned(unit):
            _build(builder, output, unit)
        else:
            left.append(unit)
    return left


def _open(job: _Job) -> tuple[UnitBuilder, Output]:
    run = open_run(job.run)
    builder = UnitBuilder(run, run.view(loss=job.loss, layouts=job.layouts), Inputs(run, job.options), job.manifest)
    return builder, Output(job.out, job.call)


_kept_open = lru_cache(maxsize=1)(_open)


def _build(builder: UnitBuilder, output: Output, unit: Unit) -> None:
    folder = output.begin()
    try:
        builder.build(unit, folder)
        output.finish(folder, unit.name)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _report_of(output: Output, name: str) -> UnitReport:
    """What became of a finished unit; one whose manifest says nothing of it counts as damaged."""
    try:
        return read_report(output.manifest_of(name))
    except (KeyError, TypeError):
        return UNKNOWN
