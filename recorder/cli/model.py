"""Owns ``recorder merge --to``: what was written for torch, and which tensors were not, and why."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ..analyze.model import Model
from ..analyze.model_files import check_format, write_model
from ..read.run import Run
from ..units import size
from .output import counted, print_json, printable_line, progress, say

_MAX_SHOWN = 20
_WHAT = {"param": "parameters and buffers", "grad": "gradients"}


class Wanted(NamedTuple):
    """What was typed."""

    to: str
    what: str
    step: int | None
    root: str | None
    layouts: Sequence[str]
    partial: bool


def write_typed(run: Run, out: Path, wanted: Wanted, *, as_json: bool) -> int:
    """Write the file and return the exit code: 1 if a tensor of the model is not in it, or nothing was written."""
    check_format(wanted.to)
    model = Model(run, wanted.what, root=wanted.root, step=wanted.step, layouts=wanted.layouts)
    num_bytes = None
    if model.entries and (wanted.partial or not model.refused):
        with progress("merge", model.total_bytes) as report:
            num_bytes = write_model(model, out, wanted.to, report)
    if as_json:
        print_json(_as_json(model, out, wanted, num_bytes))
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
    what = f"{_WHAT[model.what]} of {model.root!r} at step {model.step}"
    tensors = counted(len(model.entries), "tensor")
    if num_bytes is not None:
        without = f", {len(model.refused)} left out" if model.refused else ""
        say(f"{out}: {what}: {tensors}, {size(num_bytes)}{without}")
    elif model.entries:
        before = "" if model.step_before is None else f", --step {model.step_before} takes the step before"
        say(
            f"{out}: not written: {len(model.refused)} of the {what} cannot be given; --partial writes the other "
            f"{tensors}{before}"
        )
    else:
        say(f"{out}: not written: none of the {what} can be given")


def _as_json(model: Model, out: Path, wanted: Wanted, num_bytes: int | None) -> dict[str, object]:
    return {
        "path": str(out),
        "format": wanted.to,
        "what": model.what,
        "root": model.root,
        "step": model.step,
        "is_written": num_bytes is not None,
        "tensors": len(model.entries),
        "bytes": num_bytes,
        "refused": [refused._asdict() for refused in model.refused],
        "notes": model.notes,
    }
