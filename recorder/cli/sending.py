"""Sends a command of ``set`` or ``dump`` to a run that is recording, and prints which ranks received it."""

from __future__ import annotations

import getpass
import math
import os
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import CommandError
from ..format.commands import IN_FORCE, MISSED, REFUSED, WAITING, Command, send
from ..run.finding import Location, RunManifest, find_run, is_shipped
from ..run.notes import command_members, describe, state_word, steps_phrase
from ..run.reply import Reply, StateLine
from ..run.status import ENDED, RankNow, RunWatch
from ..system.text import span

if TYPE_CHECKING:
    from ..daemon.destination import Destination

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
_SILENT = ("silent", "starting")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A run that is recording, with the state of its ranks when it was found."""

    run: Location
    name: str
    manifest: RunManifest
    watch: RunWatch
    ranks: Sequence[RankNow]
    """The ranks that may receive a command."""
    store: Destination | None = None
    """The store in which the run was found, whose commands daemons carry. None for a run found where it records."""
    key: bytes = b""
    """The key that signs a command for daemons. Empty if daemons require no signature."""

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
        lead_s = _LEAD_S + 2 * num_nodes / _LOOKS_PER_S + (0.0 if self.store is None else _CARRYING_S)
        return step + max(int(text or 0), 2 + math.ceil(lead_s * steps_per_s))

    def _pace(self, option: str) -> tuple[int, float]:
        """Return the estimated present step of the fastest rank, and its steps per second.

        The statuses of a young run have no speed, or the speed of its slow first steps. The speed is then measured
        here.
        """
        until_s = time.monotonic() + _PACE_S + (0.0 if self.store is None else _CARRYING_S)
        ranks, began = self.ranks, dict[str, tuple[float, int]]()
        while True:
            now_s = time.monotonic()
            shown = [rank for rank in ranks if rank.status.has_step and rank.state not in ENDED]
            speeds = [_speed(rank, now_s - rank.silent_s, began) for rank in shown]
            is_known = bool(shown) and None not in speeds
            may_come = bool(shown) or any(rank.silent_s < _PACE_S for rank in ranks)
            if is_known or not may_come or now_s >= until_s:
                break
            time.sleep(_POLL_S if self.store is None else _POLL_OF_STORE_S)
            ranks = self.watch.look()
        if not shown:
            raise CommandError(
                f"{self.name}: no rank shows its step (status_interval_s = 0); name a step ahead with {option} 500"
            )
        fastest = max(speed or 0.0 for speed in speeds)
        return max(rank.status.step + math.ceil(min(rank.silent_s, 60.0) * fastest) for rank in shown), fastest

    def send(self, command: Command) -> Command:
        """Write a command where ranks, or the daemons of their nodes, find it. Return the command with its number."""
        if self.store is None:
            assert isinstance(self.run, Path), "what lies in an object store was shipped there"
            return send(self.run, command)
        from ..daemon.errands import send_to_store

        return send_to_store(self.store, self.run.name, command, self.key)


def _speed(rank: RankNow, shown_s: float, began: dict[str, tuple[float, int]]) -> float | None:
    """Return a rank's steps per second. Return None for a young rank that was not watched for long enough.

    `shown_s` is the monotonic time of the rank's status. `began` has the first time and step that were read of each
    writer.
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


def find_target(path: str | None, key_file: str | None) -> Target:
    """Find a run that can receive a command.

    Raise CommandError if the run is over, if no rank has begun to record it, or if `key_file` is given for a run that
    is not in a store. Without `key_file` the key comes from the environment, if it names one.
    """
    location, manifest = find_run(path)
    name = manifest.name or location.name
    store: Destination | None = None
    if is_shipped(location):
        from ..daemon.destination import parse_destination

        folder = location.parent
        store = parse_destination(str(folder.absolute() if isinstance(folder, Path) else folder))
    if key_file is not None and store is None:
        raise CommandError(f"--key-file {key_file}: {name} lies where it records; what is sent there is not signed")
    watch = RunWatch(location)
    seen = watch.look()
    ranks = [rank for rank in seen if rank.state not in ENDED]
    if not ranks:
        states = ", ".join(sorted({rank.state for rank in seen}))
        what = f"it is over (its ranks are {states})" if seen else "no rank has begun to record it"
        raise CommandError(f"{name}: {what}, so that there is nobody to be told; RECORDER_RULES is for the next run")
    key = b"" if store is None else _key(key_file)
    return Target(run=location, name=name, manifest=manifest, watch=watch, ranks=ranks, store=store, key=key)


def _key(file: str | None) -> bytes:
    from ..daemon.errands import read_key
    from ..daemon.settings import load_daemon_settings

    return read_key(load_daemon_settings(None, {"key_file": file}).key_file)


def sender() -> str:
    """Return the user and the host that send a command, as ``user@host``."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # in a container, the user may have no name
        user = str(os.geteuid())
    return f"{user}@{os.uname().nodename}"


@dataclass(frozen=True, slots=True)
class _Heard:
    rank: int
    state: str
    """The state of the rank's answer, or ``unheard`` if there is none."""
    since: int | None
    until: int | None
    why: str


def send_and_wait(target: Target, command: Command, *, timeout_s: float, until_done: bool = False) -> Reply:
    """Send a command. Return a reply that waits until every rank has answered, and prints the answers.

    With `until_done` the reply waits until every rank has carried out the command, and not only accepted it. It waits
    no longer than `timeout_s`.
    """
    text = describe(command)
    command = target.send(replace(command, by=sender(), attempt=target.attempt))

    @cache
    def heard() -> list[_Heard]:
        until_s = time.monotonic() + timeout_s
        while True:
            answers = [_heard(rank, command) for rank in target.watch.look() if rank.state not in ENDED]
            is_open = not answers or any(_is_open(one, until_done=until_done) for one in answers)
            if not is_open or time.monotonic() >= until_s:
                return answers
            time.sleep(_POLL_S if target.store is None else _POLL_OF_STORE_S)

    def members() -> dict[str, object]:
        ranks = [{"rank": one.rank, "state": one.state, "since": one.since, "why": one.why} for one in heard()]
        return {"run": str(target.run), "command": command_members(command), "ranks": ranks}

    def parts() -> Iterator[StateLine]:
        yield StateLine("sent", f"command {command.number} of {target.name}: {text}")
        yield from _lines(command, heard(), timeout_s)
        world_size = target.manifest.world_size or 0
        num_elsewhere = world_size - len(target.watch.look())
        if target.store is None and num_elsewhere > 0:
            who = f"{num_elsewhere} of {world_size} ranks"
            where = "they record on nodes with a file system of their own, or not yet"
            yield StateLine("note", f"{who} are not seen here: {where}")
        if target.store is not None and any(one.state == "unheard" for one in heard()):
            how = "commands are carried by daemons that were started with --accept-commands, and the key"
            yield StateLine("note", how)

    return Reply(
        members=members,
        parts=parts,
        exit_code=lambda: int(not heard() or any(_is_bad(command, one) for one in heard())),
    )


def _is_open(one: _Heard, *, until_done: bool) -> bool:
    if until_done and one.state == IN_FORCE:
        return True
    return one.state in ("unheard", WAITING) and one.since is None


def _heard(rank: RankNow, command: Command) -> _Heard:
    answer = next((one for one in rank.status.commands if one.id == command.id), None)
    if answer is None:
        silent = f", silent for {rank.silent_s:.0f} s" if rank.state in _SILENT else ""
        return _Heard(rank.rank, "unheard", None, None, f"{rank.state}{silent}")
    return _Heard(rank.rank, answer.state, answer.since, answer.until, answer.why)


def _is_bad(command: Command, one: _Heard) -> bool:
    is_late = one.since is not None and one.since > command.from_step
    return one.state in ("unheard", REFUSED, MISSED) or (one.state == WAITING and one.since is None) or is_late


def _lines(command: Command, heard: Sequence[_Heard], timeout_s: float) -> Iterator[StateLine]:
    groups: dict[_Heard, list[int]] = {}
    for one in heard:
        groups.setdefault(replace(one, rank=0), []).append(one.rank)
    for said, ranks in groups.items():
        yield _line(command, said, f"rank{'s' * (len(ranks) > 1)} {span(ranks)}", timeout_s)
    if not groups:
        yield StateLine("note", "the run ended before any rank had answered")


def _line(command: Command, said: _Heard, who: str, timeout_s: float) -> StateLine:
    state, since = said.state, said.since
    because = f" ({said.why})" if said.why else ""
    if state == "unheard":
        later = "recorder set RUN --list shows it once there is one"
        return StateLine("note", f"{who}: no answer in {timeout_s:g} s{because}; {later}")
    if state == WAITING and since is None:
        return StateLine("note", f"{who}: heard of it, and no step began in {timeout_s:g} s{because}")
    if state in (REFUSED, MISSED):
        return StateLine("missing", f"{who}: {state}{because}")
    is_late = since is not None and since > command.from_step
    at = f", {steps_phrase(since, said.until)}" if since is not None else ""
    word = "ready" if state == WAITING else state_word(command.kind, state)
    return StateLine("late" if is_late else "ok", f"{who}: {word}{at}{because}")
