from __future__ import annotations

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
from ...errors import ConfigError, LookupFailedError
from ...lifecycle.launch import prepare, split_assignments
from ...run.reply import Reply
from ..options import local_path

EPILOG = (
    "Examples: recorder prove --steps 20 -- torchrun --nproc-per-node 2 train.py    "
    "recorder prove RECORDER_PRESET=full -- python train.py    "
    "recorder prove --resume --steps 7 -- torchrun --nproc-per-node 2 train.py"
)
SETTINGS: dict[str, Any] = {
    "context_settings": {"help_option_names": ["-h", "--help"], "allow_interspersed_args": False}
}


def command(
    words: Annotated[
        list[str],
        typer.Argument(metavar="[NAME=VALUE]... COMMAND...", help="What starts the training, after settings if any."),
    ],
    steps: Annotated[int, typer.Option(min=1, max=100_000, help="Optimizer steps of each launch.")] = 10,
    resume: Annotated[
        bool, typer.Option("--resume", help="Kill the program, resume it, and show whether it goes on as it did.")
    ] = False,
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", parser=local_path, help="Where the program saves: show what its last one holds."
        ),
    ] = None,
    world: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Show whether N ranks train the same model; also with --resume."),
    ] = None,
    other: Annotated[
        str | None,
        typer.Option("--with", metavar="COMMAND", help="The command that resumes, or for N ranks, where it differs."),
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
        raise LookupFailedError("--checkpoint asks something else than --resume and --world: ask one after the other")
    if other is not None and not (resume or world is not None):
        raise LookupFailedError("--with is the command that resumes, or for other ranks: add --resume or --world")
    second = prepare(environ, shlex.split(other)) if other else launched
    with Launches(environ, steps, _say_launch) as launches:
        if checkpoint is not None:
            return reply_of(prove_checkpoint(launches, launched, checkpoint))
        if world is not None:
            is_for_them = other is not None and asked_ranks(second) in (str(world), "")
            there = second if is_for_them else on_other_ranks(second, world)
            again = (launched if is_for_them else second) if resume else ()
            return reply_of(prove_world(launches, launched, there, again))
        return reply_of(prove_resume(launches, launched, second) if resume else prove(launches, launched))


def _say_launch(text: str) -> None:
    print(f"recorder: launch {text}", file=sys.stderr, flush=True)
