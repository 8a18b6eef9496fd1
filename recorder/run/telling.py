"""Tells a run that is recording what `recorder set` and `recorder dump` say, and replies which ranks received it."""

from __future__ import annotations

import getpass
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from ..errors import CommandError, ConfigError, LookupFailedError
from ..format.commands import DUMP, IN_FORCE, MISSED, PAUSE, REFUSED, RESUME, SET, UNDO, WAITING, Answer, Command, send
from ..numerics.keys import by_key
from ..rules import RingWindow, Rule, nearest, parse_rules, ring_window
from ..sites import PROGRAM_SITES
from ..system.text import counted, plural, span
from .finding import Location, RunManifest, find_run, is_shipped
from .notes import answer_members, command_members, describe, sent_commands, state_word, steps_phrase
from .reply import Reply, StateLine
from .run import Run, open_location
from .status import ENDED, RankNow, RunWatch

Send = Callable[[Command], Command]
"""A function that sends a command, and returns the command with its number."""
_LEAD_S = 2.0
"""A command takes effect at least this many seconds after it is sent, plus the time that ranks need to find it."""
_LOOKS_PER_S = 250
"""The most scans for commands per second by all nodes together, as `lifecycle.commands` limits them."""
_RANKS_OF_A_NODE = 8
_POLL_S, _POLL_OF_STORE_S = 0.2, 1.0
_CARRYING_S = 15.0
"""The seconds that daemons need to carry a command and its answers: twice their `status_s` of 5 s, and a margin."""
_YOUNG_S = 8.0
"""A rank is young while its speed was measured over fewer seconds than this. The first steps are the slowest."""
_WATCHED_S = 0.5
"""The speed of a young rank is measured over at least this many seconds."""
_PACE_S = 10.0
"""The most seconds to wait for the speed of a young run. It is a few times `status_interval_s`, which is 2 s."""
_SILENT, _UNHEARD = ("silent", "starting"), "unheard"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A run that is recording, with the state of its ranks when it was found."""

    run: Location
    name: str
    manifest: RunManifest
    watch: RunWatch
    ranks: Sequence[RankNow]
    """The ranks that may receive a command."""
    by_daemons: Send | None = None
    """Leaves a command in the run's store, from which daemons carry it. None for a run on this disk."""

    @property
    def attempt(self) -> int:
        """The index of the newest launch of the job."""
        return max(rank.status.attempt for rank in self.ranks)

    @property
    def step(self) -> int | None:
        """The estimated present step of the fastest rank, from the ranks' last statuses. None if none has a step."""
        steps = [
            rank.status.step + math.ceil(min(rank.silent_s, 60.0) * rank.status.steps_per_s)
            for rank in self.ranks
            if rank.status.has_step
        ]
        return max(steps, default=None)

    def step_ahead(self, at: str | None, option: str = "--at") -> int:
        """Return the first step of a command from the text `at` of the option `option`.

        ``+20`` means 20 steps ahead, or more if the ranks cannot receive the command sooner. None means the first step
        that begins after every rank can have received the command. Raise CommandError if `at` is not a step, if the
        step has passed, or if the run's present step is unknown.
        """
        text = "" if at is None else at.strip()
        if text and re.fullmatch(r"\+?[0-9]{1,14}", text) is None:
            raise CommandError(f"{option} {at!r}: expected a step, such as 500, or so many steps ahead, such as +20")
        if text and not text.startswith("+"):
            step, now = int(text), self.step
            if now is not None and step <= now:
                raise CommandError(
                    f"{option} {step}: that step has passed, for the run is at about step {now}; name a step that lies "
                    "ahead, or +20 for twenty steps ahead"
                )
            return step
        step, steps_per_s = self._pace(option)
        num_nodes = max(len(self.ranks), self.manifest.world_size or 0) / _RANKS_OF_A_NODE
        lead_s = _LEAD_S + 2 * num_nodes / _LOOKS_PER_S + (0.0 if self.by_daemons is None else _CARRYING_S)
        return step + max(int(text or 0), 2 + math.ceil(lead_s * steps_per_s))

    def _pace(self, option: str) -> tuple[int, float]:
        """Return the estimated present step of the fastest rank, and its steps per second.

        The statuses of a young run have no speed, or the speed of its slow first steps. Then measure the speed here.
        """
        until_s = time.monotonic() + _PACE_S + (0.0 if self.by_daemons is None else _CARRYING_S)
        ranks, began = self.ranks, dict[str, tuple[float, int]]()
        while True:
            now_s = time.monotonic()
            shown = [rank for rank in ranks if rank.status.has_step and rank.state not in ENDED]
            speeds = [_speed(rank, now_s - rank.silent_s, began) for rank in shown]
            is_known = bool(shown) and None not in speeds
            may_come = bool(shown) or any(rank.silent_s < _PACE_S for rank in ranks)
            if is_known or not may_come or now_s >= until_s:
                break
            time.sleep(_POLL_S if self.by_daemons is None else _POLL_OF_STORE_S)
            ranks = self.watch.look()
        if not shown:
            raise CommandError(
                f"{self.name}: no rank shows its step (status_interval_s = 0); name a step ahead with {option} 500"
            )
        fastest = max(speed or 0.0 for speed in speeds)
        return max(rank.status.step + math.ceil(min(rank.silent_s, 60.0) * fastest) for rank in shown), fastest

    def send(self, command: Command) -> Command:
        """Write a command where ranks, or the daemons of their nodes, find it. Return the command with its number."""
        if self.by_daemons is not None:
            return self.by_daemons(command)
        assert isinstance(self.run, Path), "a run in an object store was shipped there"
        return send(self.run, command)


def _speed(rank: RankNow, shown_s: float, began: dict[str, tuple[float, int]]) -> float | None:
    """Return a rank's steps per second. Return None for a young rank that was not watched for long enough.

    `shown_s` is the monotonic time of the rank's status. `began` has each writer's first time and step.
    """
    status = rank.status
    if status.recent_s >= _YOUNG_S or rank.state == "silent":
        return status.steps_per_s
    if status.step == 0:  # step 0 may take minutes, for example if a model is compiled
        return None
    first_s, first_step = began.setdefault(status.writer, (shown_s, status.step))
    if shown_s - first_s < _WATCHED_S or status.step == first_step:
        return None
    return max(status.steps_per_s, (status.step - first_step) / (shown_s - first_s))


def find_target(path: str | None, key_file: str | None, by_daemons: Callable[[Location, str | None], Send]) -> Target:
    """Find a run that can receive a command. `by_daemons` makes the sender to a run in a store, with its key file.

    Raise CommandError if the run is over, if no rank has begun to record it, or if `key_file` is given for a run that
    is not in a store. Without `key_file` the key comes from the environment, if it names one.
    """
    location, manifest = find_run(path)
    name, is_in_store = manifest.name or location.name, is_shipped(location)
    if key_file is not None and not is_in_store:
        raise CommandError(f"--key-file {key_file}: {name} lies where it records; what is sent there is not signed")
    watch = RunWatch(location)
    seen = watch.look()
    ranks = [rank for rank in seen if rank.state not in ENDED]
    if not ranks:
        states = ", ".join(sorted({rank.state for rank in seen}))
        what = f"it is over (its ranks are {states})" if seen else "no rank has begun to record it"
        raise CommandError(f"{name}: {what}, so no rank can receive a command; for the next run, set RECORDER_RULES")
    to_store = by_daemons(location, key_file) if is_in_store else None
    return Target(run=location, name=name, manifest=manifest, watch=watch, ranks=ranks, by_daemons=to_store)


def sender() -> str:
    """Return the user and the host that send a command, as ``user@host``."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # in a container, the user may have no name
        user = str(os.geteuid())
    return f"{user}@{os.uname().nodename}"


def send_and_wait(target: Target, command: Command, *, timeout_s: float, until_done: bool = False) -> Reply:
    """Send a command. Return a reply that waits until every rank has answered, and prints the answers.

    With `until_done` the reply waits until every rank has carried out the command, and not only accepted it. It waits
    no longer than `timeout_s`.
    """
    text = describe(command)
    command = target.send(replace(command, by=sender(), attempt=target.attempt))

    @cache
    def heard() -> list[tuple[int, Answer]]:
        until_s = time.monotonic() + timeout_s
        while True:
            answers = [_heard(rank, command) for rank in target.watch.look() if rank.state not in ENDED]
            is_open = not answers or any(_is_open(one, until_done=until_done) for _, one in answers)
            if not is_open or time.monotonic() >= until_s:
                return answers
            time.sleep(_POLL_S if target.by_daemons is None else _POLL_OF_STORE_S)

    def members() -> dict[str, object]:
        ranks = [{"rank": rank, "state": one.state, "since": one.since, "why": one.why} for rank, one in heard()]
        return {"run": str(target.run), "command": command_members(command), "ranks": ranks}

    def parts() -> Iterator[StateLine]:
        yield StateLine("sent", f"command {command.number} of {target.name}: {text}")
        yield from _lines(command, heard(), timeout_s)
        world_size = target.manifest.world_size or 0
        num_elsewhere = world_size - len(target.watch.look())
        if target.by_daemons is None and num_elsewhere > 0:
            where = "they record on nodes with a file system of their own, or not yet"
            yield StateLine("note", f"{num_elsewhere} of {world_size} ranks are not seen here: {where}")
        if target.by_daemons is not None and any(one.state == _UNHEARD for _, one in heard()):
            how = "commands are carried by daemons that were started with --accept-commands, and the key"
            yield StateLine("note", how)

    def exit_code() -> int:
        return int(not heard() or any(_is_bad(command, one) for _, one in heard()))

    return Reply(members=members, parts=parts, exit_code=exit_code)


def _is_open(one: Answer, *, until_done: bool) -> bool:
    return (until_done and one.state == IN_FORCE) or (one.state in (_UNHEARD, WAITING) and one.since is None)


def _heard(rank: RankNow, command: Command) -> tuple[int, Answer]:
    answer = next((one for one in rank.status.commands if one.id == command.id), None)
    if answer is None:
        silent = f", silent for {rank.silent_s:.0f} s" if rank.state in _SILENT else ""
        why = f"{rank.state}{silent}"
        answer = Answer(number=command.number, id=command.id, kind=command.kind, state=_UNHEARD, why=why)
    return rank.rank, answer


def _is_bad(command: Command, one: Answer) -> bool:
    is_late = one.since is not None and one.since > command.from_step
    return one.state in (_UNHEARD, REFUSED, MISSED) or (one.state == WAITING and one.since is None) or is_late


def _lines(command: Command, heard: Sequence[tuple[int, Answer]], timeout_s: float) -> Iterator[StateLine]:
    # The command may have another number on another node.
    groups = by_key((replace(one, number=0, by="", rules=()), rank) for rank, one in heard)
    for said, ranks in groups.items():
        yield _line(command, said, f"{plural('rank', len(ranks))} {span(ranks)}", timeout_s)
    if not groups:
        yield StateLine("note", "the run ended before any rank had answered")


def _line(command: Command, said: Answer, who: str, timeout_s: float) -> StateLine:
    state, since = said.state, said.since
    because = f" ({said.why})" if said.why else ""
    if state == _UNHEARD:
        later = "recorder set RUN --list shows a later answer"
        return StateLine("note", f"{who}: no answer in {timeout_s:g} s{because}; {later}")
    if state == WAITING and since is None:
        return StateLine("note", f"{who}: received it, but no step began in {timeout_s:g} s{because}")
    if state in (REFUSED, MISSED):
        return StateLine("missing", f"{who}: {state}{because}")
    is_late = since is not None and since > command.from_step
    at = f", {steps_phrase(since, said.until)}" if since is not None else ""
    word = "ready" if state == WAITING else state_word(command.kind, state)
    return StateLine("late" if is_late else "ok", f"{who}: {word}{at}{because}")


def set_reply(
    target: Target, words: Sequence[str], *, undo: int | None, at: str | None, steps: int | None, timeout_s: float
) -> Reply:
    """Send the command that `recorder set` is typed with, once it was checked against the run. Return the reply."""
    made = _made(words, undo, target.step_ahead(at), steps)
    made.encode()  # this raises CommandError for a command that no writer would accept
    _check(target, made)
    return send_and_wait(target, made, timeout_s=timeout_s)


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
    for rule in parse_rules(list(made.rules)):
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


def list_reply(run: Run) -> Reply:
    """Return the reply of `recorder set --list`: the commands that were sent, and what became of each."""
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


def dump_reply(target: Target, step: str | None, reason: str, *, timeout_s: float) -> Reply:
    """Send the command that `recorder dump` is typed with, and return the reply."""
    first, last = _steps(target, step, _window(open_location(target.run), target.name))
    made = Command(kind=DUMP, from_step=first, to_step=last, reason=reason)
    return send_and_wait(target, made, timeout_s=timeout_s, until_done=True)


def _window(run: Run, name: str) -> RingWindow:
    rules: list[Rule] = []
    for text in dict.fromkeys(text for writer in run.writers for text in writer.manifest.rules):
        with suppress(ConfigError):  # a later version has written the rule
            rules += parse_rules(text, takes_unknown_sites=True)
    window = ring_window(rules)
    if window is None:
        raise CommandError(
            f"{name}: no rule of this run has keep=ring, so no step is kept in memory; RECORDER_PRESET=blackbox from "
            "the start of a run holds the last ones, and recorder set records steps to come"
        )
    return window


def _steps(target: Target, text: str | None, window: RingWindow) -> tuple[int, int]:
    now = target.step
    if text is None:
        if now is None:
            raise CommandError(f"{target.name}: no rank shows its step (status_interval_s = 0); name one with --step")
        if target.by_daemons is not None:  # the ring would lose this step before a daemon could carry the command
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
        raise CommandError(f"--step {text}: contains no step; 120:127 means steps 120 to 126")
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
