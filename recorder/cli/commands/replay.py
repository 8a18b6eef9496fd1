from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from ...analyze.replay.bundle import audit, audit_reply, bundle_reply, recorded_calls, the_call, write_bundle
from ...errors import LookupFailedError
from ...run.reply import Reply
from ...run.run import open_run
from .. import show_pandas
from ..options import RunOrModule, out_option

EPILOG = (
    "Examples: recorder replay recordings blocks.0.mlp.up --step 3 -o bundle    "
    "recorder replay recordings --step 3 --audit"
)


def command(
    path: RunOrModule = None,
    module: Annotated[str | None, typer.Argument(metavar="MODULE", help="A module's path; '' is the root.")] = None,
    step: Annotated[int | None, typer.Option(min=0, help="The step.")] = None,
    rank: Annotated[int | None, typer.Option(min=0, help="The rank; needed where several recorded the call.")] = None,
    micro_step: Annotated[int, typer.Option("--micro-step", min=0, help="The micro-batch within the step.")] = 0,
    call: Annotated[int, typer.Option(min=0, help="The number of the call within the micro-batch.")] = 0,
    out: Annotated[Path | None, out_option("PATH", "The folder to write.")] = None,
    is_audit: Annotated[bool, typer.Option("--audit", help="Run all recorded calls of the step again, here.")] = False,
    factory: Annotated[
        str, typer.Option(metavar="MODULE:FUNCTION", help="Makes the model, for classes not of torch.nn.")
    ] = "",
) -> Reply:
    """Run a recorded call of a module again, alone.

    It needs a recording with a rule such as 'module=blocks.3.mlp steps=100 keep=replay', and writes a folder with the
    call's tensors, how it was made, and a script, replay.py, that runs it and compares. With --audit it runs the calls
    of all modules and ranks of a step here, and names those whose output cannot be reproduced.

    Exit code 1: with --audit, the output or a gradient of a call cannot be reproduced. 2: no call could be judged.
    """
    run = open_run(path)
    if is_audit:
        if out is not None:
            raise LookupFailedError("--audit writes no folder; leave -o out, or --audit")
        show_pandas()
        sys.path.insert(0, os.getcwd())  # a factory may be in the current directory
        results = audit(run, step=step, module=module, rank=rank, factory=factory)
        return audit_reply(run, results)
    calls = recorded_calls(run, step=step, module=module, rank=rank)
    if module is None or out is None:
        raise LookupFailedError(
            "replay needs a module and a folder to write: recorder replay RUN MODULE --step N -o FOLDER; or --audit"
        )
    chosen = the_call(calls, micro_step, call)
    lacks = write_bundle(run, chosen, out)
    return bundle_reply(run, chosen, out, lacks, factory)
