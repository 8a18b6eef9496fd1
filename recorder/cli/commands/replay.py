"""``recorder replay``: writes one recorded call of a module as a folder that runs alone, or audits a step."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from ...analyze.replay.bundle import (
    CANNOT_TELL,
    NOT_REPRODUCED,
    SCRIPT,
    audit,
    class_without_settings,
    recorded_calls,
    write_bundle,
)
from ...errors import LookupFailedError
from ...run.run import open_run
from ...system.text import counted, printable
from .. import show_pandas
from ..options import Json, RunOrModule
from ..output import print_json, say, say_state
from ..paths import local_path

EPILOG = (
    "Examples: recorder replay recordings blocks.0.mlp.up --step 3 -o bundle    "
    "recorder replay recordings --step 3 --audit"
)
_STATES = {NOT_REPRODUCED: "differs", CANNOT_TELL: "note"}


def command(
    path: RunOrModule = None,
    module: Annotated[str | None, typer.Argument(metavar="MODULE", help="A module's path; '' is the root.")] = None,
    step: Annotated[int | None, typer.Option(min=0, help="The step.")] = None,
    rank: Annotated[int | None, typer.Option(min=0, help="The rank; needed where several recorded the call.")] = None,
    micro_step: Annotated[int, typer.Option("--micro-step", min=0, help="The micro-batch within the step.")] = 0,
    call: Annotated[int, typer.Option(min=0, help="The number of the call within the micro-batch.")] = 0,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", metavar="PATH", help="The folder to write.", parser=local_path)
    ] = None,
    is_audit: Annotated[bool, typer.Option("--audit", help="Run all recorded calls of the step again, here.")] = False,
    factory: Annotated[
        str, typer.Option(metavar="MODULE:FUNCTION", help="Makes the model, for classes not of torch.nn.")
    ] = "",
    as_json: Json = False,
) -> int:
    """Run a recorded call of a module again, alone.

    It needs a recording with a rule such as 'module=blocks.3.mlp steps=100 keep=replay', and writes a folder with the
    call's tensors, how it was made, and a script, replay.py, that runs it and compares. With --audit it runs the calls
    of all modules and ranks of a step here, and names those whose output cannot be reproduced.

    Exit code 1: with --audit, the output or a gradient of a call cannot be reproduced. 2: no call could be judged.
    """
    if step is None:
        raise LookupFailedError("replay needs the step: --step 100")
    run = open_run(path)
    if is_audit:
        if out is not None:
            raise LookupFailedError("--audit writes no folder; leave -o out, or --audit")
        show_pandas()
        sys.path.insert(0, os.getcwd())  # where a factory is
        results = audit(run, step=step, module=module, rank=rank, factory=factory)
        if as_json:
            print_json({"run": str(run.path), "results": [one._asdict() for one in results]})
        else:
            for one in sorted(results, key=lambda one: (one.verdict in _STATES, one.verdict == NOT_REPRODUCED)):
                where = f"{printable(repr(one.module))}, rank {one.rank}"
                say_state(_STATES.get(one.verdict, "ok"), f"{where}: {one.verdict}: {printable(one.why)}")
        num_open = sum(one.verdict == CANNOT_TELL for one in results)
        if num_open == len(results):
            why = printable(results[0].why) if results else "of each, a part is missing"
            raise LookupFailedError(f"none of the {counted(num_open, 'call')} could be judged; the first: {why}")
        if num_open and not as_json:
            say(f"{num_open} of {counted(len(results), 'call')} could not be judged: the exit code leaves them out")
        return int(any(one.verdict == NOT_REPRODUCED for one in results))
    if module is None or out is None:
        raise LookupFailedError(
            "replay needs a module and a folder to write: recorder replay RUN MODULE --step N -o FOLDER; or --audit"
        )
    calls = recorded_calls(run, step=step, module=module, rank=rank)
    ranks = sorted({one.rank for one in calls})
    if len(ranks) > 1:
        raise LookupFailedError(
            f"{counted(len(ranks), 'rank')} recorded this call: name one with --rank, such as {ranks[0]}"
        )
    chosen = [one for one in calls if (one.key["micro_step"] or 0, one.key["call"]) == (micro_step, call)]
    if not chosen:
        there = ", ".join(f"{one.key['micro_step']}/{one.key['call']}" for one in calls[:8])
        raise LookupFailedError(f"no call {call} of micro-step {micro_step}; recorded (micro-step/call): {there}")
    own_class = class_without_settings(run, chosen[0])
    lacks = write_bundle(run, chosen[0], out)
    if as_json:
        print_json({"run": str(run.path), "path": str(out), "lacks": lacks, "needs_factory": own_class is not None})
        return 0
    if own_class is not None and not factory:
        factory = "MODULE:FUNCTION"
        say_state(
            "note",
            f"{SCRIPT} cannot make the class {printable(own_class)} from the recording: name a function without "
            "arguments that makes this module or the whole model, with --factory",
        )
    for text in lacks:
        say_state("note", f"the call cannot be run, something is missing: {printable(text)}")
    words = ["python", str(out / SCRIPT), *(["--factory", factory] if factory else [])]
    say(f"{out}: {shlex.join(words)}")
    return 0
