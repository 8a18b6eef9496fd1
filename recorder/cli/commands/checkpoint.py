"""``recorder checkpoint``: writes tensors for torch, and names those that cannot be written, and why."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from ...analyze.export.model import Model, check_format, write_model
from ...run.run import open_run
from ...system.text import counted, printable_line, size
from ..options import Json, LayoutOption, RunPath
from ..output import print_json, progress, say
from ..paths import local_path

EPILOG = (
    "Examples: recorder checkpoint recordings --to dcp -o checkpoint    "
    "recorder checkpoint recordings --to safetensors --what grad --step 0 -o gradients.safetensors"
)

_MAX_SHOWN = 20
_WHAT = {"param": "parameters and buffers", "grad": "gradients"}


def command(
    out: Annotated[
        Path,
        typer.Option(
            "-o",
            "--out",
            metavar="OUT",
            parser=local_path,
            help="Where: a new file for safetensors, a new or empty directory for dcp.",
        ),
    ],
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
    as_json: Json = False,
) -> int:
    """Write one step's parameters or gradients as torch loads them.

    They have the names of the unwrapped model's state dict, whatever the layout was. Parameters of step n are those
    that its forwards used, before the update.

    Exit code 1: a tensor of the model is missing, lacks a rank's chunk or has replicas that differ; each is named, and
    without --partial nothing is written.
    """
    run = open_run(path)
    check_format(to)
    model = Model(run, what, root=root, step=step, layouts=layout or [])
    num_bytes = None
    if model.entries and (partial or not model.refused):
        with progress("checkpoint", model.total_bytes) as report:
            num_bytes = write_model(model, out, to, report)
    if as_json:
        print_json(_as_json(model, out, to, num_bytes))
    else:
        _say(model, out, num_bytes)
    return int(bool(model.refused) or num_bytes is None)


def _say(model: Model, out: Path, num_bytes: int | None) -> None:
    for refused in model.refused[:_MAX_SHOWN]:
        print(printable_line(f"finding: {refused.name}: {refused.why}"), file=sys.stderr)
    if len(model.refused) > _MAX_SHOWN:
        print(f"and {len(model.refused) - _MAX_SHOWN} more; --json has them all", file=sys.stderr)
    for note in model.notes:
        print(printable_line(f"note: {note}"), file=sys.stderr)
    kind = f"{_WHAT[model.what]} of {model.root!r} at step {model.step}"
    tensors = counted(len(model.entries), "tensor")
    if num_bytes is not None:
        without = f", {len(model.refused)} left out" if model.refused else ""
        say(f"{out}: {kind}: {tensors}, {size(num_bytes)}{without}")
    elif model.entries:
        before = "" if model.step_before is None else f", --step {model.step_before} takes the step before"
        say(
            f"{out}: not written: {len(model.refused)} of the {kind} cannot be given; --partial writes the other "
            f"{tensors}{before}"
        )
    else:
        say(f"{out}: not written: none of the {kind} can be given")


def _as_json(model: Model, out: Path, to: str, num_bytes: int | None) -> dict[str, object]:
    return {
        "path": str(out),
        "format": to,
        "what": model.what,
        "root": model.root,
        "step": model.step,
        "is_written": num_bytes is not None,
        "tensors": len(model.entries),
        "bytes": num_bytes,
        "refused": [refused._asdict() for refused in model.refused],
        "notes": model.notes,
    }
