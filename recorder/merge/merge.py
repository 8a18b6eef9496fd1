"""Runs a merge from beginning to end: planning, workers, resuming, publishing and the report.

A merge must never change the source run. It must never pass an open run to a worker: each worker opens the run itself.
"""

from __future__ import annotations

import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, ProcessPoolExecutor, wait
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..errors import ClusterError, NotARunError, WriteError
from ..globalview.planner import check_overrides
from ..run.reply import Progress, Reply, Report
from ..run.run import Run
from ..run.step_ranges import SEES_AS_HERE, RunAsOpened
from ..system.executors import worker_name
from ..system.text import counted, size
from .output import Output, of_run, of_source, of_units, open_output
from .unit import Inputs, Summary, Unit, UnitBuilder, combine, num_problems, of_damage, of_unknown_columns, read_report

_SHARDS_PER_UNIT = 200
"""A task gets one more unit per this many shards, because opening the run for a task takes 0.3 ms a shard."""
_SEES_TRIES = 5
_SEES_PAUSE_S = 0.5
"""The seconds between attempts to find the output folder. A network file system may show it a few seconds late."""
_TASKS_PER_WORKER = 2
"""The number of tasks per worker. The second task waits in case this thread is too busy to submit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeReport:
    """The result of a merge. Sizes are in bytes."""

    path: Path
    num_units: int
    num_kept_units: int
    """The number of units of work that an earlier merge finished from the same rows."""
    num_tensors: int
    num_rows: int
    source_bytes: int
    """The decoded payload bytes of the source run."""
    merged_bytes: int
    """The part of `source_bytes` that this call merged."""
    written_bytes: int
    """The bytes of all merged shards, including those of kept units."""
    elapsed_s: float
    findings: Summary

    @property
    def num_problems(self) -> int:
        """The number of findings that mean an error or missing rows."""
        return num_problems(self.findings)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    run: RunAsOpened
    out: Path
    options: Mapping[str, Any] = field(hash=False)
    """The options `loss` and `layouts`, as in `Run.view`."""
    manifest: Mapping[str, Any] = field(hash=False)
    num_shards: int
    num_workers: int
    call: str
    is_alone: bool
    """True if each worker is a process of this machine. It then keeps the run open between tasks."""


def merge_run(
    run: Run,
    out: Path,
    *,
    executor: Executor | None = None,
    num_workers: int = 1,
    helps: bool = True,
    loss: str = "mean",
    layouts: Sequence[str] = (),
    progress: Progress = lambda title, total_bytes: nullcontext(lambda num_bytes: None),
) -> MergeReport:
    """Write the global view of a run (the tensors of all ranks put together) as a run, or bring such a run up to date.

    Args:
        run: the source. It is not changed, and may still be recorded.
        out: a directory that does not exist yet, is empty, or is a merge of this run with these options.
        executor: shares the units of work with this thread, if there is more than one unit. It is not shut down.
        num_workers: the number of tasks that the executor runs at once.
        helps: True if this thread builds units too. False if it only distributes units.
        loss: as in `Run.view`.
        layouts: as in `Run.view`.
        progress: makes the progress bar.

    Raises:
        WriteError: `out` is another kind of path, or is not writable. Finished units are kept for the next call.
        RunError: the run cannot be read at all, or an option is invalid.
    """
    if (source := run.manifest.merged_from) is not None:
        raise NotARunError(f"{run.path}: is the merge of run {source.run_id} already; every command reads it as it is")
    started_s = time.monotonic()
    check_overrides(layouts, run)
    view = run.view(loss=loss, layouts=layouts)
    unknown = run.unknown_columns()
    out, options = Path(os.path.abspath(out)), {"loss": loss, "layouts": list(layouts)}
    with open_output(out, run, options) as output:
        job = _Job(
            run=RunAsOpened.of(run),
            out=out,
            options=options,
            manifest=of_units(run),
            num_shards=sum(len(writer.shards) for writer in run.writers),
            num_workers=num_workers,
            call=output.call,
            is_alone=isinstance(executor, ProcessPoolExecutor),
        )
        inputs = Inputs(run, options)
        finished = {name for name in output.units() if not read_report(output.manifest_of(name)).is_damaged}
        units = [unit for window in inputs.windows(inputs.kept_windows(finished)) for unit in inputs.units(window)]
        missing = [unit for unit in units if unit.name not in finished]
        merged_bytes = sum(unit.payload_bytes for unit in missing)
        try:
            output.clear({unit.name for unit in units if unit.name in finished})
            with output.building(), progress("merge", merged_bytes) as report:
                builder = UnitBuilder(view, inputs, job.manifest)

                def build(units: Sequence[Unit]) -> None:
                    for unit in units:
                        _build(builder, output, unit)
                        report(unit.payload_bytes)

                if executor is None or (helps and len(missing) < 2):
                    build(missing)
                else:
                    build(_hand_out(executor, job, missing, build if helps else None, report, output.stop_building))
            reports = [read_report(output.manifest_of(unit.name)) for unit in units]
            manifest = of_run(run, {"path": str(run.path.absolute()), **options})
            output.publish([unit.name for unit in units], of_source(run), manifest)
        except (OSError, BrokenExecutor, ClusterError) as error:
            raise WriteError(
                f"{job.out}: the merge stopped ({error or type(error).__name__}); "
                "what is finished is kept: run the same command again once the cause is gone"
            ) from error
    damage = [*run.problems, *(text for part in reports for text in part.damage)]
    return MergeReport(
        path=job.out,
        num_units=len(units),
        num_kept_units=len(units) - len(missing),
        num_tensors=sum(part.num_tensors for part in reports),
        num_rows=sum(part.num_rows for part in reports),
        source_bytes=sum(part.source_bytes for part in reports),
        merged_bytes=merged_bytes,
        written_bytes=sum(part.written_bytes for part in reports),
        elapsed_s=time.monotonic() - started_s,
        findings=combine([of_damage(damage), of_unknown_columns(unknown), *(part.findings for part in reports)]),
    )


def _hand_out(
    executor: Executor,
    job: _Job,
    units: Sequence[Unit],
    build: Callable[[Sequence[Unit]], None] | None,
    report: Report,
    stop: Callable[[], None],
) -> list[Unit]:
    """Let the executor build units from the front of the list, and `build` from the end, until none is left.

    On failure `stop` makes the workers fail too. Return the units that no worker built because the run had changed
    since this process opened it.
    """
    size = 1 if job.is_alone else 1 + job.num_shards // _SHARDS_PER_UNIT
    waiting = deque(units[start : start + size] for start in range(0, len(units), size))
    running: dict[Future[list[Unit]], Sequence[Unit]] = {}
    left: list[Unit] = []
    try:
        while waiting or running:
            # Only a few tasks are submitted at a time, because Python 3.11's pool hangs over cancelled tasks when a
            # worker dies. This thread takes the last task, or else it would wait at the end for a worker with two.
            while len(waiting) > (build is not None) and len(running) < _TASKS_PER_WORKER * job.num_workers:
                task = waiting.popleft()
                running[executor.submit(_work, job, task)] = task
            if waiting and build is not None:
                build(waiting.pop())
            else:
                wait(running, return_when=FIRST_COMPLETED)
            for future in [future for future in running if future.done()]:
                task, undone = running.pop(future), future.result()
                report(sum(unit.payload_bytes for unit in task) - sum(unit.payload_bytes for unit in undone))
                left += undone
    except BaseException:
        stop()
        wait(running)  # workers still write to the output
        raise
    return sorted(left, key=units.index)


def _work(job: _Job, units: Sequence[Unit]) -> list[Unit]:
    """Open the run in this process or thread, and build units. Return units that differ from this run."""
    builder, output = (_open_once if job.is_alone else _open)(job)
    left = []
    for unit in units:
        if builder.is_as_planned(unit):
            _build(builder, output, unit)
        else:
            left.append(unit)
    return left


def _open(job: _Job) -> tuple[UnitBuilder, Output]:
    run = job.run.open()
    builder = UnitBuilder(run.view(**job.options), Inputs(run, job.options), job.manifest)
    output = Output(job.out, job.call)
    _check_reachable(output)
    return builder, output


def _check_reachable(output: Output) -> None:
    for num_tries_left in reversed(range(_SEES_TRIES)):
        try:
            output.begin().rmdir()
        except FileNotFoundError:
            if not num_tries_left:
                raise ClusterError(f"{worker_name()}: does not see the output {output.path}; {SEES_AS_HERE}") from None
            time.sleep(_SEES_PAUSE_S)
        except OSError as error:
            raise ClusterError(
                f"{worker_name()}: cannot write the output {output.path} ({error.strerror}); {SEES_AS_HERE}"
            ) from error
        else:
            return


_open_once = lru_cache(maxsize=1)(_open)


def _build(builder: UnitBuilder, output: Output, unit: Unit) -> None:
    folder = output.begin()
    try:
        builder.build(unit, folder)
        output.finish(folder, unit.name)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


_MAX_SHOWN = 3
_KINDS = {
    "corrupt": "not readable",
    "inconsistent": "not joined, because the ranks' chunks do not fit",
    "layout_changes": "equal on all ranks at some steps, and not at other steps",
    "replicas_differ": "replicas that differ",
    "buffers_differ": "buffers that differ between ranks (the first rank's is taken)",
    "partial": "partial, because ranks are missing",
    "unknown_encoding": "without their values, which a later version of recorder wrote in a way unknown to this one",
    "unknown_column": "without columns that a later version of recorder has written",
    "stranger": "left out, because it belongs to another run",
    "per_rank": "kept per rank",
    "inferred": "put together as their shapes suggest, without other evidence",
    "between_stages": "kept per rank, because it goes from one pipeline stage to another",
    "superseded": "left out, because a newer attempt recorded the same steps",
}
"""For each kind of finding, its text. A kind without a text is printed by name."""
_OF_WRITERS = ("stranger", "superseded")
"""The kinds of findings that count units of work and not rows, so their counts are not printed as rows."""
_NO_FINDINGS = "no findings (of ranks that are missing, replicas that differ, and layouts that contradict each other)"


def reply_of(run: Run, report: MergeReport) -> Reply:
    """Return the reply of `recorder merge`. The exit code is 1 if findings mean an error or missing rows."""
    members = {
        "run": str(run.path), "out": str(report.path), "tensors": report.num_tensors, "rows": report.num_rows,
        "payload_bytes": report.source_bytes, "bytes_in": run.size_bytes, "bytes_out": report.written_bytes,
        "merged_bytes": report.merged_bytes, "seconds": report.elapsed_s, "units": report.num_units,
        "kept_units": report.num_kept_units, "problems": report.num_problems, "findings": report.findings,
    }  # fmt: skip
    return Reply(members=lambda: members, parts=lambda: _lines(run, report), exit_code=int(report.num_problems > 0))


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
        yield f"note: {counted(len(recording), 'writer')} still recording; merge again for later rows"
    for ending in run.endings:
        yield f"note: {ending}"
    num_dropped = sum(writer.balance.num_dropped for writer in run.writers)
    if num_dropped:
        yield f"note: {counted(num_dropped, 'row')} were dropped during the recording; recorder doctor says why"
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


def _describe(example: dict[str, Any]) -> str:
    if example["step"] is None or (example["step"] < 0 and not example["module_path"]):
        return str(example["text"])
    where = ":".join(str(example[name]) for name in ("module_path", "site", "name") if example[name])
    return f"step {example['step']} {where}: {example['text']}"
