from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ...analyze.export.boards import BOARDS, BoardExport
from ...analyze.export.export import Export, format_of, reply_of
from ...run.reply import Reply
from ...run.run import open_run
from ...run.selection import GlobalOptions, Selection
from .. import options, show_pandas
from ..output import progress

EPILOG = (
    "Examples: recorder export recordings -o grads.parquet --site grad    "
    "recorder export recordings -o outputs.npz --site output --step 0 --global    "
    "recorder export recordings -o board --to tensorboard"
)


def command(
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
