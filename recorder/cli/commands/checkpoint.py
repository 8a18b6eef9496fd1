from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from ...analyze.export.model import Model, check_format, write_model
from ...run.reply import Aside, Part, Reply
from ...run.run import open_run
from ...system.text import counted, size
from ..options import LayoutOption, RunPath, out_option
from ..output import progress

EPILOG = (
    "Examples: recorder checkpoint recordings --to dcp -o checkpoint    "
    "recorder checkpoint recordings --to safetensors --what grad --step 0 -o gradients.safetensors"
)

_MAX_SHOWN = 20
_WHAT = {"param": "parameters and buffers", "grad": "gradients"}


def command(
    out: Annotated[Path, out_option("OUT", "Where: a new file for safetensors, a new or empty directory for dcp.")],
    to: Annotated[
        str, typer.Option(help="dcp (a directory for torch.distributed.checkpoint) or safetensors (a file).")
    ],
    path: RunPath = None,
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
    layout: LayoutOption = None,
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
