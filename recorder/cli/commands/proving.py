"""Runs a program, or one recorded call of a module, again and compares the results."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ...analyze.prove.checkpoint import prove_checkpoint
from ...analyze.prove.launches import Launches, reply_of
from ...analyze.prove.recording import asked_ranks, on_other_ranks, prove, prove_world
from ...analyze.prove.resume import prove_resume
from ...analyze.replay.bundle import audit, audit_reply, bundle_reply, recorded_calls, the_call, write_bundle
from ...errors import ConfigError, LookupFailedError
from ...lifecycle.launch import prepare, split_assignments
from ...run.reply import Reply
from ...run.run import open_run
from .. import options, show_pandas

EXAMPLES = {
    "prove": (
        "recorder prove --steps 20 -- torchrun --nproc-per-node 2 train.py",
        "recorder prove RECORDER_PRESET=full -- python train.py",
        "recorder prove --resume --steps 7 -- torchrun --nproc-per-node 2 train.py",
    ),
    "replay": (
        "recorder replay recordings blocks.0.mlp.up --step 3 -o bundle",
        "recorder replay recordings --step 3 --audit",
    ),
}
SETTINGS: dict[str, Any] = {
    "prove": {"context_settings": {"help_option_names": ["-h", "--help"], "allow_interspersed_args": False}},
}


def prove_command(
    words: Annotated[
        list[str],
        typer.Argument(metavar="[NAME=VALUE]... COMMAND...", help="The command of the training, after settings."),
    ],
    steps: Annotated[int, typer.Option(min=1, max=100_000, help="The number of optimizer steps of each launch.")] = 10,
    resume: Annotated[
        bool, typer.Option("--resume", help="Kill and resume the program, and show whether it goes on equally.")
    ] = False,
    checkpoint: Annotated[
        Path | None, options.path_option("FOLDER", "The checkpoints' folder: judge the last one.")
    ] = None,
    world: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Show whether N ranks train the same model. Also with --resume."),
    ] = None,
    other: Annotated[
        str | None,
        typer.Option("--with", metavar="COMMAND", help="The command that resumes, or launches N ranks."),
    ] = None,
) -> Reply:
    """Show that a program trains with the recorder as without.

    It launches the program twice without the recorder and once with it, each for some optimizer steps, and compares
    parameters, gradients, buffers, optimizer state, random states and printed lines bit by bit on every rank. The
    program must begin each time from the same state: no checkpoint that a launch leaves may be loaded by the next.

    With --resume it kills the program after the steps, launches it again, and names what was not restored from the
    program's own checkpoint, and batches that are read again or left out. The first launch must find no checkpoint,
    and save one some steps before the last.

    With --checkpoint it compares the last checkpoint in that folder with what the run held: missing, stale, too much.

    With --world N it compares the program on its ranks with N ranks: is it one model, within rounding that is
    measured, and are the samples of each step the same?

    The certificate is kept with the run; ls, doctor and report show it.

    Exit code 0: unchanged. 1: changed. 2: cannot tell, because the program differs by itself, or takes no step.
    """
    environ, rest = split_assignments(words)
    if rest[:1] == ["--"]:
        del rest[0]
    if not rest:
        raise LookupFailedError("prove needs a command: recorder prove -- torchrun --nproc-per-node 2 train.py")
    launched = prepare(environ, rest)
    if shutil.which(launched[0], path=environ.get("PATH")) is None:
        raise ConfigError(f"cannot run {launched[0]!r}: no such program")
    if checkpoint is not None and (resume or world is not None):
        raise LookupFailedError("--checkpoint cannot be combined with --resume or --world: use one after the other")
    if other is not None and not (resume or world is not None):
        raise LookupFailedError("--with is the command that resumes, or for other ranks: add --resume or --world")
    second = prepare(environ, shlex.split(other)) if other else launched
    with Launches(
        environ, steps, lambda text: print(f"recorder: launch {text}", file=sys.stderr, flush=True)
    ) as launches:
        if checkpoint is not None:
            return reply_of(prove_checkpoint(launches, launched, checkpoint))
        if world is not None:
            is_for_them = other is not None and asked_ranks(second) in (str(world), "")
            there = second if is_for_them else on_other_ranks(second, world)
            again = (launched if is_for_them else second) if resume else ()
            return reply_of(prove_world(launches, launched, there, again))
        return reply_of(prove_resume(launches, launched, second) if resume else prove(launches, launched))


def replay_command(
    path: options.RunOrModule = None,
    module: Annotated[str | None, typer.Argument(metavar="MODULE", help="A module's path; '' is the root.")] = None,
    step: Annotated[int | None, typer.Option(min=0, help="The step.")] = None,
    rank: Annotated[int | None, typer.Option(min=0, help="The rank; needed if several have the call.")] = None,
    micro_step: Annotated[int, typer.Option("--micro-step", min=0, help="The micro-batch within the step.")] = 0,
    call: Annotated[int, typer.Option(min=0, help="The number of the call within the micro-batch.")] = 0,
    out: Annotated[Path | None, options.out_option("PATH", "The folder to write.")] = None,
    is_audit: Annotated[bool, typer.Option("--audit", help="Run all recorded calls of the step here.")] = False,
    factory: Annotated[
        str, typer.Option(metavar="MODULE:FUNCTION", help="Makes the model, if it is not of torch.nn.")
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
        return audit_reply(run, audit(run, step=step, module=module, rank=rank, factory=factory))
    calls = recorded_calls(run, step=step, module=module, rank=rank)
    if module is None or out is None:
        raise LookupFailedError(
            "replay needs a module and a folder to write: recorder replay RUN MODULE --step N -o FOLDER; or --audit"
        )
    chosen = the_call(calls, micro_step, call)
    lacks = write_bundle(run, chosen, out)
    return bundle_reply(run, chosen, out, lacks, factory)
