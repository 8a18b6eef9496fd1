from __future__ import annotations

import re
from typing import Annotated

import typer

from ...errors import CommandError, ConfigError
from ...format.commands import DUMP, Command
from ...rules import RingWindow, Rule, parse_rules, ring_window
from ...run.reply import Reply
from ...run.run import Run, open_location
from ...system.text import counted
from ..options import KeyFile, RunPath
from ..sending import Target, find_target, send_and_wait

EPILOG = "Examples: recorder dump latest --reason 'the reward fell'    recorder dump latest --step 41250"


def command(
    path: RunPath = None,
    step: Annotated[
        str | None,
        typer.Option(
            metavar="STEP",
            help="Around step 120, or around +20, twenty ahead; or 120:127, steps 120 to 126. Without: now.",
        ),
    ] = None,
    reason: Annotated[str, typer.Option(help="Why, for whoever looks at the run.")] = "asked by recorder dump",
    timeout: Annotated[float, typer.Option(min=0, max=86_400, help="Longest wait for the ranks' answers, s.")] = 60.0,
    key_file: KeyFile = None,
) -> Reply:
    """Have a run write what its memory holds of the last steps.

    The run has rules with keep=ring. All ranks write the same steps, and dump shows which of them each rank still had.
    For a run in a store, the command is left in the store, and its step lies far enough ahead for the daemons.

    Exit code 0: every rank wrote all the steps. 1: a rank has not answered, or no longer had some of the steps.
    """
    target = find_target(path, key_file)
    window = _window(open_location(target.run), target.name)
    first, last = _steps(target, step, window)
    made = Command(kind=DUMP, from_step=first, to_step=last, reason=reason)
    return send_and_wait(target, made, timeout_s=timeout, until_done=True)


def _window(run: Run, name: str) -> RingWindow:
    rules: list[Rule] = []
    for text in dict.fromkeys(text for writer in run.writers for text in writer.manifest.rules):
        try:
            rules += parse_rules(text, takes_unknown_sites=True)
        except ConfigError:  # the rule is from a later version
            continue
    window = ring_window(rules)
    if window is None:
        raise CommandError(
            f"{name}: no rule of it has keep=ring, so that no step is held in memory; RECORDER_PRESET=blackbox from "
            "the start of a run holds the last ones, and recorder set records steps to come"
        )
    return window


def _steps(target: Target, text: str | None, window: RingWindow) -> tuple[int, int]:
    now = target.step
    if text is None:
        if now is None:
            raise CommandError(f"{target.name}: no rank shows its step (status_interval_s = 0); name one with --step")
        if target.store is not None:  # before a daemon carries this command, the ring will have lost the present step
            now = target.step_ahead(None)
        return max(now - window.before, 0), now + window.after
    if re.fullmatch(r"\+[0-9]{1,14}", text.strip()):
        text = str(target.step_ahead(text, "--step"))
    match = re.fullmatch(r"([0-9]{1,14})(?::([0-9]{1,14}))?", text.strip())
    if match is None:
        raise CommandError(
            f"--step {text!r}: expected a step, such as 120, or so many ahead, such as +20, or steps, such as 120:127"
        )
    start = int(match[1])
    first, last = (
        (max(start - window.before, 0), start + window.after) if match[2] is None else (start, int(match[2]) - 1)
    )
    if last < first:
        raise CommandError(f"--step {text}: holds no step; 120:127 is steps 120 to 126")
    most = window.before + 1 + window.after
    if last - first + 1 > most:
        raise CommandError(
            f"--step {text}: {counted(last - first + 1, 'step')}, and the ring holds {most} (before={window.before}, "
            f"the step itself, after={window.after}); name fewer"
        )
    if now is not None and last < now - window.before:
        raise CommandError(
            f"--step {text}: these steps have passed, for the run is at about step {now} and its ring holds the "
            f"{counted(window.before, 'step')} before; leave --step out for those"
        )
    return first, last
