"""Writes recorded values for other programs: tables, tensors, and what torch loads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from ...analyze.export.boards import BOARDS, BoardExport
from ...analyze.export.export import Export, format_of, reply_of
from ...analyze.export.model import Model, check_format, write_model
from ...run.reply import Aside, Part, Reply
from ...run.run import open_run
from ...run.selection import GlobalOptions, Selection
from ...system.text import counted, size
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
