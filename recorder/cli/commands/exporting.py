"""Writes recorded values for other programs: data files, files that torch loads, and tables for SQL."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ...analyze.export.boards import BOARDS, BoardExport
from ...analyze.export.export import Export, checkpoint_reply, format_of, reply_of
from ...analyze.export.model import Model, check_format
from ...analyze.export.tables import catalog_reply, sql_reply
from ...errors import LookupFailedError
from ...run.reply import Reply
from ...run.run import open_run
from ...run.selection import GlobalOptions, Selection
from .. import options, show_pandas
from ..output import progress

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
    out: Annotated[Path, options.out_option("PATH", "The file or the folder to write.")],
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
    root: options.RootOption = None,
    across_ranks: Annotated[
        bool, typer.Option("--global", help="The global tensors instead of each rank's own.")
    ] = False,
    loss: options.LossOption = "mean",
    layout: options.LayoutOption = None,
    partial: options.PartialOption = False,
    payload: Annotated[
        bool, typer.Option("--payload", help="For Parquet: also write the tensors' bytes, in the column data.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
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
    selection = Selection(module=module, site=site, name=name, step=step, rank=rank, root=root)
    question = GlobalOptions(across_ranks=across_ranks, loss=loss, layouts=layout or [], partial=partial)
    to = to or format_of(out)
    plan: type[Export | BoardExport] = BoardExport if to in BOARDS else Export
    with options.mapper_for(scheduler) as mapper:
        if to in BOARDS:
            show_pandas()  # wandb uses pandas if it finds it during its import
        planned = plan(run, to, selection, question, payload=payload, mapper=mapper)
        with progress("export", planned.total_bytes) as report:
            done = planned.write(out, force=force, report=report)
    return reply_of(run, done, to)


def checkpoint_command(
    out: Annotated[Path, options.out_option("OUT", "A new file for safetensors, or a new or empty directory for dcp.")],
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
    root: Annotated[str | None, typer.Option(help="The name of the model, if several were recorded.")] = None,
    layout: options.LayoutOption = None,
    partial: Annotated[
        bool, typer.Option("--partial", help="If some tensors cannot be written, write the others.")
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
    return checkpoint_reply(model, out, to, is_partial=partial, progress=progress)


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
            f"sql {path} --catalog {catalog}: the catalog has runs of its own; leave out the folder or --catalog"
        )
    return sql_reply(question, path, catalog)


def catalog_command(
    path: options.RunsPath = None, catalog: options.CatalogPlace = None, scheduler: options.SchedulerOption = None
) -> Reply:
    """Register runs in an Iceberg catalog, as tables.

    Other programs read the tables, of all runs of a folder or a store: runs, rows (without tensors), probe and
    findings. A run that is registered as it is costs a look at its manifests; one that has grown since is put in place
    of its earlier rows. `recorder sql` asks the tables.

    Exit code 1: something is damaged, or a run cannot be read, and is not in the catalog.
    """
    return catalog_reply(path, catalog, options.mapper_for(scheduler))
