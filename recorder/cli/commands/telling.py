"""Sends commands that change what a run under way records, or make the run write the steps in its memory."""

from __future__ import annotations

from typing import Annotated

import typer

from ...errors import LookupFailedError
from ...run.finding import Location
from ...run.reply import Reply
from ...run.run import open_run
from ...run.telling import Send, dump_reply, find_target, list_reply, set_reply
from .. import options

EXAMPLES = {
    "set": (
        "recorder set latest 'module=blocks.3.* site=* keep=tensor' --at +20 --steps 5",
        "recorder set latest --list",
    ),
    "dump": ("recorder dump latest --reason 'the reward fell'", "recorder dump latest --step 41250"),
}


def set_command(
    path: options.RunPath = None,
    words: Annotated[
        list[str] | None, typer.Argument(metavar="RULE|pause|resume", help="Rules, or `pause`, or `resume`.")
    ] = None,
    at: Annotated[
        str | None, typer.Option(metavar="STEP", help="The first step: 500, or +20 for twenty ahead. By default soon.")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, max=1 << 40, help="Number of steps. By default no end.")] = None,
    undo: Annotated[int | None, typer.Option(min=1, metavar="N", help="End command N.")] = None,
    list_all: Annotated[
        bool, typer.Option("--list", help="List the commands that were sent, and what became of each.")
    ] = False,
    timeout: Annotated[float, typer.Option(min=0, max=86_400, help="Seconds to wait for answers.")] = 60.0,
    key_file: options.KeyFile = None,
) -> Reply:
    """Change what a run records while it is under way.

    On all ranks, rules are added to the run's own rules from a coming step on; pause records nothing until resume. Each
    rank answers, and set shows the answers. Training is not touched. For a run in a store, the command is left in the
    store, and the daemons of its nodes carry it if they were started with --accept-commands.

    Exit code 0: every rank has it. 1: a rank has not answered, was late or refused.
    """
    words = words or []
    if path is None or sum([bool(words), undo is not None, list_all]) != 1:
        raise LookupFailedError("set takes a RUN, and then one of: rules, pause, resume, --undo N, --list")
    if list_all:
        return list_reply(open_run(path))
    target = find_target(path, key_file, _by_daemons)
    return set_reply(target, words, undo=undo, at=at, steps=steps, timeout_s=timeout)


def _by_daemons(run: Location, key_file: str | None) -> Send:
    from ...daemon.errands import by_daemons

    return by_daemons(run, key_file)


def dump_command(
    path: options.RunPath = None,
    step: Annotated[
        str | None,
        typer.Option(
            metavar="STEP",
            help="Steps around step 120, or around +20, twenty ahead; or 120:127, steps 120 to 126. By default now.",
        ),
    ] = None,
    reason: Annotated[str, typer.Option(help="The reason, for people who look at the run.")] = "asked by recorder dump",
    timeout: Annotated[float, typer.Option(min=0, max=86_400, help="Seconds to wait for answers.")] = 60.0,
    key_file: options.KeyFile = None,
) -> Reply:
    """Have a run write what its memory holds of the last steps.

    The run has rules with keep=ring. All ranks write the same steps, and dump shows which of them each rank still had.
    For a run in a store, the command is left in the store, and its step lies far enough ahead for the daemons.

    Exit code 0: every rank wrote all the steps. 1: a rank has not answered, or no longer had some of the steps.
    """
    return dump_reply(find_target(path, key_file, _by_daemons), step, reason, timeout_s=timeout)
