"""Sends commands that change what a run under way records, or make the run write the steps in its memory."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Annotated

import typer

from ...errors import CommandError, ConfigError, LookupFailedError
from ...format.commands import DUMP, PAUSE, RESUME, SET, UNDO, Command, problem_of, rules_of
from ...rules import RingWindow, Rule, nearest, parse_rules, ring_window
from ...run.notes import answer_members, command_members, describe, sent_commands
from ...run.reply import Reply
from ...run.run import Run, open_location, open_run
from ...run.status import RunWatch
from ...sites import PROGRAM_SITES
from ...system.text import counted
from .. import options
from ..sending import Target, find_target, send_and_wait

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
        list[str] | None, typer.Argument(metavar="RULE|pause|resume", help="Rules to add, or pause, or resume.")
    ] = None,
    at: Annotated[
        str | None, typer.Option(metavar="STEP", help="First step: 500, or +20 for twenty ahead. Without: soon.")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, max=1 << 40, help="For so many steps. Without: on.")] = None,
    undo: Annotated[int | None, typer.Option(min=1, metavar="N", help="End command N.")] = None,
    list_all: Annotated[
        bool, typer.Option("--list", help="List the commands that were sent, and what became of each.")
    ] = False,
    timeout: Annotated[float, typer.Option(min=0, max=86_400, help="Longest wait for the ranks' answers, s.")] = 60.0,
    key_file: options.KeyFile = None,
) -> Reply:
    """Change what a run records while it is under way.

    On all ranks, rules are added to the run's own rules from a coming step on; pause records nothing until resume. Each
    rank answers, and set shows the answers. Training is not touched. For a run in a store, the command is left in the
    store, and the daemons of its nodes carry it if they were started with --accept-commands.

    Exit code 0: every rank has it. 1: a rank has not answered, was late or refused.
    """
    words = words or []
    chosen = [bool(words), undo is not None, list_all]
    if path is None or sum(chosen) != 1:
        raise LookupFailedError("set takes a RUN, and then rules, pause, resume, --undo N or --list, one of these")
    if list_all:
        return _list_reply(open_run(path))
    target = find_target(path, key_file)
    made = _made(words, undo, target.step_ahead(at), steps)
    if (problem := problem_of(made)) is not None:
        raise CommandError(problem)
    _check(target, made)
    return send_and_wait(target, made, timeout_s=timeout)


def _made(words: Sequence[str], undo: int | None, first: int, steps: int | None) -> Command:
    if undo is not None or list(words) == [RESUME]:
        kind = RESUME if undo is None else UNDO
        if steps is not None:
            raise LookupFailedError(f"--steps is of rules and of pause; a {kind} lasts")
        return Command(kind=kind, from_step=first, undoes=undo)
    last = None if steps is None else first + steps - 1
    if list(words) == [PAUSE]:
        return Command(kind=PAUSE, from_step=first, to_step=last)
    rules = tuple(text.strip() for word in words for text in word.split(";") if text.strip())
    return Command(kind=SET, from_step=first, to_step=last, rules=rules)


def _check(target: Target, made: Command) -> None:
    run = open_location(target.run)
    if made.kind == UNDO:
        known = {one.number: one for one in run.commands.sound}
        if made.undoes not in known or known[made.undoes].kind not in (SET, PAUSE):
            can = ", ".join(str(one.number) for one in known.values() if one.kind in (SET, PAUSE)) or "none"
            raise CommandError(f"--undo {made.undoes}: {target.name} has no such set or pause; there is: {can}")
        last = known[made.undoes].to_step
        if last is not None and last < made.from_step:
            raise CommandError(
                f"--undo {made.undoes}: it ends by itself with step {last}, before step {made.from_step}"
            )
    if made.kind == SET:
        for rule in rules_of(made):
            if (problem := _unmatched(run, rule)) is not None:
                raise CommandError(problem)


def _unmatched(run: Run, rule: Rule) -> str | None:
    modules = run.modules.values()
    if all(site in PROGRAM_SITES for site in rule.site):
        return None
    if not modules:
        return "no rank has described its modules yet, so that the rule cannot be checked; try again in some seconds"
    paths = list(dict.fromkeys(module.path for module in modules))
    above = {path.rpartition(".")[0] for path in paths if path}
    if any(rule.matches_module(one.path, one.class_name, one.path not in above) for one in modules):
        return None
    classes = list(dict.fromkeys(module.class_name for module in modules))
    by_class = Rule(cls=rule.cls)
    is_class_wrong = not any(by_class.matches_module("", name, True) for name in classes)
    patterns, names, noun = (rule.cls, classes, "classes") if is_class_wrong else (rule.module, paths, "modules")
    wanted = next((pattern for pattern in patterns if not pattern.startswith("!")), "*")
    near = nearest(wanted, names, cutoff=0.3) or names[:3]
    return f"the rule {rule.text!r} matches no module of this run; {noun} near it: {', '.join(map(repr, near))}"


def _list_reply(run: Run) -> Reply:
    commands, shown = run.commands, RunWatch(run.path).look()

    def members() -> dict[str, object]:
        entries = [command_members(one) | {"answers": answer_members(run, one, shown)} for one in commands.sound]
        return {"run": str(run.path), "commands": entries, "problems": list(commands.problems)}

    def parts() -> Iterator[str]:
        for one in sent_commands(run, with_dumps=True, shown=shown):
            yield f"command {one.command.number}: {describe(one.command)}, by {one.command.by or 'somebody'}"
            yield from (f"  {line}" for line in one.lines)
        yield from (f"note: no command: {problem}" for problem in commands.problems)
        if not commands.sound and not commands.problems:
            yield "no command was sent"

    return Reply(members=members, parts=parts, exit_code=int(bool(commands.problems)))


def dump_command(
    path: options.RunPath = None,
    step: Annotated[
        str | None,
        typer.Option(
            metavar="STEP",
            help="Around step 120, or around +20, twenty ahead; or 120:127, steps 120 to 126. Without: now.",
        ),
    ] = None,
    reason: Annotated[str, typer.Option(help="Why, for whoever looks at the run.")] = "asked by recorder dump",
    timeout: Annotated[float, typer.Option(min=0, max=86_400, help="Longest wait for the ranks' answers, s.")] = 60.0,
    key_file: options.KeyFile = None,
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
