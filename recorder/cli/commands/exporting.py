"""Writes recorded values for other programs: data files, files that torch loads, and tables for SQL."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from ...analyze.export.boards import BOARDS, BoardExport
from ...analyze.export.export import Export, format_of, reply_of
from ...analyze.export.model import Model, check_format, write_model
from ...analyze.export.tables import CONFIGURED, ask, is_configured, opened_tables
from ...errors import LookupFailedError, RecorderError
from ...run.finding import find_folder, find_run
from ...run.notes import damages
from ...run.reply import Aside, Part, Reply, table_of
from ...run.run import Run, open_run
from ...run.selection import GlobalOptions, Selection
from ...system.text import counted, size
from .. import options, show_pandas
from ..output import progress
from ..paths import opened_runs

EXAMPLES = {
    "export": (
        "recorder export recordings -o grads.parquet --site grad",
        "recorder export recordings -o outputs.npz --site output --step 0 --global",
        "recorder export recordings -o board --to tensorboard",
    ),
    "checkpoint": (
        "recorder checkpoint recordings --to dcp -o checkpoint",
        "recorder checkpoint recordings --to safetensors --what grad --step 0 -o gradients.safetensors",
    ),
    "sql": (
        "recorder sql 'select name, state, last_step from runs'",
        "recorder sql 'select rule, count(*) n from findings group by all' recordings --json",
    ),
    "catalog": ("recorder catalog", "recorder catalog recordings --catalog fleet-catalog --json"),
}


def export_command(
    out: Annotated[Path, options.out_option("PATH", "The file to write, or the folder.")],
    path: options.RunPath = None,
    to: Annotated[
        str | None,
        typer.Option(
            help="parquet, npz, safetensors, tensorboard or wandb; by default the file format that PATH ends with."
        ),
    ] = None,
    module: options.ModuleOption = None,
    site: options.SiteOption = None,
    name: options.NameOption = None,
    step: options.StepOption = None,
    rank: options.RankOption = None,
    across_ranks: Annotated[
        bool, typer.Option("--global", help="The global tensors instead of each rank's own.")
    ] = False,
    loss: options.LossOption = "mean",
    layout: options.LayoutOption = None,
    partial: options.PartialOption = False,
    payload: Annotated[
        bool, typer.Option("--payload", help="Parquet with the tensors' bytes, too, in the column data.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that exists.")] = False,
    scheduler: options.SchedulerOption = None,
) -> Reply:
    """Write statistics as Parquet, tensors as npz or safetensors.

    Tensors have names such as step=3/layers.0.mlp/output. --loss and --layout belong to --global. A file with a model's
    own names, for load_state_dict, is written by recorder checkpoint.

    numpy has no bfloat16 and no 8-bit floats: in npz they are float32, which holds them exactly.

    For --to tensorboard and --to wandb PATH is a new folder. It holds statistics and scalars, histograms in the bins in
    which they were recorded, and pictures of recorded tensors of four dims. Each rank is a run of its own, or the whole
    model is one, with --global. W&B's runs are offline, and wandb sync sends them. Each needs the extra of its name.

    A tensor with missing ranks is left out or, with --partial, written as the other ranks have it. Values that cannot
    be read are left out. Each value that is left out is named.

    Exit code 1: something is damaged or missing; with --global also where ranks' rows contradict each other, or
    --layout does not fit them, and the file holds the ranks' own.
    """
    run = open_run(path)
    selection = Selection(module=module, site=site, name=name, step=step, rank=rank)
    question = GlobalOptions(across_ranks=across_ranks, loss=loss, layouts=layout or [], partial=partial)
    to = to or format_of(out)
    with options.mapper_for(scheduler) as mapper:
        planned: Export | BoardExport
        if to in BOARDS:
            show_pandas()  # wandb uses pandas if it finds it during its import
            planned = BoardExport(run, to, selection, question, payload=payload, mapper=mapper)
        else:
            planned = Export(run, to, selection, question, payload=payload, mapper=mapper)
        with progress("export", planned.total_bytes) as report:
            done = planned.write(out, force=force, report=report)
    return reply_of(run, done, to)


_MAX_SHOWN = 20
_WHAT = {"param": "parameters and buffers", "grad": "gradients"}


def checkpoint_command(
    out: Annotated[
        Path, options.out_option("OUT", "Where: a new file for safetensors, a new or empty directory for dcp.")
    ],
    to: Annotated[
        str, typer.Option(help="dcp (a directory for torch.distributed.checkpoint) or safetensors (a file).")
    ],
    path: options.RunPath = None,
    what: Annotated[
        str,
        typer.Option(
            help="param (the state dict: parameters and persistent buffers) or grad (gradients under their parameters' "
            "names)."
        ),
    ] = "param",
    step: Annotated[
        int | None, typer.Option(help="The step; by default the last one whose tensors were recorded.")
    ] = None,
    root: Annotated[str | None, typer.Option(help="Which model, where several were recorded.")] = None,
    layout: options.LayoutOption = None,
    partial: Annotated[
        bool, typer.Option("--partial", help="Write the rest where some tensors cannot be given.")
    ] = False,
) -> Reply:
    """Write one step's parameters or gradients as torch loads them.

    They have the names of the unwrapped model's state dict, whatever the layout was. Parameters of step n are those
    that its forwards used, before the update.

    Exit code 1: a tensor of the model, or a rank's chunk of it, is missing, or replicas differ; each is named, and
    without --partial nothing is written.
    """
    run = open_run(path)
    check_format(to)
    model = Model(run, what, root=root, step=step, layouts=layout or [])
    num_bytes = None
    if model.entries and (partial or not model.refused):
        with progress("checkpoint", model.total_bytes) as report:
            num_bytes = write_model(model, out, to, report)
    return Reply(
        members=lambda: {
            "path": str(out), "format": to, "what": model.what, "root": model.root, "step": model.step,
            "is_written": num_bytes is not None, "tensors": len(model.entries), "bytes": num_bytes,
            "refused": [refused._asdict() for refused in model.refused], "notes": model.notes,
        },
        parts=lambda: _parts(model, out, num_bytes),
        exit_code=int(bool(model.refused) or num_bytes is None),
    )  # fmt: skip


def _parts(model: Model, out: Path, num_bytes: int | None) -> Iterator[Part]:
    for refused in model.refused[:_MAX_SHOWN]:
        yield Aside(f"finding: {refused.name}: {refused.why}")
    if len(model.refused) > _MAX_SHOWN:
        yield Aside(f"and {len(model.refused) - _MAX_SHOWN} more; --json has them all")
    yield from (Aside(f"note: {note}") for note in model.notes)
    kind = f"{_WHAT[model.what]} of {model.root!r} at step {model.step}"
    tensors = counted(len(model.entries), "tensor")
    if num_bytes is not None:
        without = f", {len(model.refused)} left out" if model.refused else ""
        yield f"{out}: {kind}: {tensors}, {size(num_bytes)}{without}"
    elif model.entries:
        before = "" if model.step_before is None else f", --step {model.step_before} takes the step before"
        of = f"{len(model.refused)} of the {kind} cannot be given"
        yield f"{out}: not written: {of}; --partial writes the other {tensors}{before}"
    else:
        yield f"{out}: not written: none of the {kind} can be given"


def sql_command(
    question: Annotated[str, typer.Argument(metavar="QUERY", help="A query in DuckDB's SQL.", show_default=False)],
    path: options.RunsPath = None,
    catalog: options.CatalogPlace = None,
) -> Reply:
    """Ask all runs of a folder, or of a catalog, in SQL.

    DuckDB answers. The tables are runs, rows (a row a value, without tensors), probe (a number of each value at every
    step) and findings (of all rules). Those that a query names are made from the runs, each time; with --catalog they
    are those that `recorder catalog` has registered.
    """
    if catalog and path:
        raise LookupFailedError(
            f"sql {path} --catalog {catalog}: the catalog has runs of its own; leave one of them out"
        )
    problems: list[str] = []

    def opened() -> Iterator[Run]:
        for run in opened_runs(path, problems):
            yield run
            problems.extend(damages(run))

    with opened_tables(catalog) if catalog else nullcontext(opened()) as tables:
        answer = ask(question, tables)
    rows = [["" if value is None else str(value) for value in row] for row in answer.rows]
    is_number = [all(isinstance(row[at], (int, float)) for row in answer.rows) for at in range(len(answer.columns))]
    numbers = [name for name, is_one in zip(answer.columns, is_number, strict=True) if is_one]
    nonfinite = [
        {"row": number, "column": column, "value": repr(value)}
        for number, row in enumerate(answer.rows)
        for column, value in zip(answer.columns, row, strict=True)
        if isinstance(value, float) and not math.isfinite(value)
    ]
    plain = json.loads(json.dumps(answer.rows, default=str))
    return Reply(
        members=lambda: {"columns": answer.columns, "rows": plain, "nonfinite": nonfinite, "problems": problems},
        parts=lambda: [*(Aside(f"note: {one}") for one in problems), table_of(answer.columns, rows, numbers=numbers)],
        exit_code=int(bool(problems)),
    )


def catalog_command(
    path: options.RunsPath = None, catalog: options.CatalogPlace = None, scheduler: options.SchedulerOption = None
) -> Reply:
    """Register runs in an Iceberg catalog, as tables.

    Other programs read the tables, of all runs of a folder or a store: runs, rows (without tensors), probe and
    findings. A run that is registered as it is costs a look at its manifests; one that has grown since is put in place
    of its earlier rows. `recorder sql` asks the tables.

    Exit code 1: something is damaged, or a run cannot be read, and is not in the catalog.
    """
    where = catalog or (CONFIGURED if is_configured(CONFIGURED) else None)
    if where is None:
        where = str((find_folder(path) or find_run(path)[0].parent) / "_catalog")
        if "://" in where:
            raise LookupFailedError(f"--catalog: name a folder of this machine, or a catalog of pyiceberg, for {path}")
    registered: dict[str, int] = {}
    problems: list[str] = []
    num_known = 0

    def lines() -> Iterator[str | Aside]:
        yield from (Aside(f"finding: {problem}") for problem in problems)
        rows = counted(sum(registered.values()), "row")
        yield f"{where}: {counted(len(registered), 'run')} registered, {rows}; {num_known} were there as they are"

    with options.mapper_for(scheduler) as mapper, opened_tables(where, is_new=True) as tables:
        for run in opened_runs(path, problems):
            try:
                if tables.has(run):
                    num_known += 1
                    continue
                registered[str(run.path)] = tables.register(run, mapper)
                problems.extend(run.problems)
            except RecorderError as error:
                problems.append(str(error))
        tables.tidy()
    return Reply(
        members=lambda: {"catalog": where, "registered": registered, "unchanged": num_known, "problems": problems},
        parts=lines,
        exit_code=int(bool(problems)),
    )
