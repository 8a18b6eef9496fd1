"""One rank hears commands: through its node's mark, each once, and whatever goes wrong ends in an answer."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from recorder.capture.parallel.topology import JobRank
from recorder.errors import CommandError
from recorder.format.commands import COMMANDS, DUMP, PAUSE, Command, command_name, send
from recorder.lifecycle.commands import Commands
from recorder.system.log import Events

ALONE = JobRank(rank=0, local_rank=0, node_rank=0, world_size=1, local_world_size=1, attempt=0, host="here")


class Clock:
    """A clock that moves when it is told to."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Heard:
    """A rank under test, and the numbers of the dumps that it was told of."""

    def __init__(self, tmp_path: Path, topology: JobRank = ALONE) -> None:
        self.run = tmp_path / "run"
        self.run.mkdir(exist_ok=True)
        marks = tmp_path / "marks"
        marks.mkdir(exist_ok=True)
        self.clock = Clock()
        self.events = Events()
        self.commands = Commands(topology, self.events, clock=self.clock, marks=marks)
        self.numbers: list[int] = []
        self.commands.on(DUMP, lambda command: self.numbers.append(command.number))

    def poll(self, seconds: float = 0.2) -> list[int]:
        self.clock.now_s += seconds
        self.commands.poll(self.run)
        return self.numbers

    @property
    def states(self) -> list[str]:
        return [answer.state for answer in self.commands.answers()]


def dump(step: int = 5, **members: object) -> Command:
    return replace(Command(kind=DUMP, from_step=step, to_step=step + 2), **members)  # type: ignore[arg-type]


def test_a_command_is_given_once_to_who_takes_its_kind_and_answered(tmp_path: Path) -> None:
    rank = Heard(tmp_path)
    rank.commands.poll(None)  # the run has no directory yet
    assert rank.poll() == []
    command = send(rank.run, dump())
    assert rank.poll() == [1]
    assert rank.poll(9) == [1]
    assert rank.states == ["waiting"]
    rank.commands.answer(command, "ended", since=5, until=7, why="70 rows")
    (answer,) = rank.commands.answers()
    assert (answer.state, answer.since, answer.until, answer.why) == ("ended", 5, 7, "70 rows")


def test_a_rank_that_sends_hears_itself_at_once(tmp_path: Path) -> None:
    rank = Heard(tmp_path, replace(ALONE, attempt=2))
    with pytest.raises(CommandError, match="no directory yet"):
        rank.commands.send(dump())
    rank.poll()
    sent = rank.commands.send(dump(reason="NaN"))
    assert (sent.number, sent.attempt, rank.numbers) == (1, 2, [1])


def test_what_cannot_be_done_is_refused_with_a_line_and_the_next_is_done(tmp_path: Path) -> None:
    rank = Heard(tmp_path)

    def fail(command: Command) -> None:
        raise ValueError("no such thing")

    rank.commands.on(PAUSE, fail)
    send(rank.run, Command(kind=PAUSE, from_step=1))
    send(rank.run, Command(kind="resume", from_step=1))
    (rank.run / COMMANDS / command_name(3)).symlink_to("/etc/passwd")
    send(rank.run, dump())
    assert rank.poll() == [4]
    assert rank.states == ["refused", "refused", "waiting"]
    assert rank.commands.num_refused == 1
    lines = [event["message"] for event in rank.events.as_list() if event["kind"] == "command_refused"]
    assert len(lines) == 3 and "no such thing" in lines[0] and "takes commands of kind resume" in lines[1]


def test_a_command_that_comes_twice_is_done_once(tmp_path: Path) -> None:
    rank = Heard(tmp_path)
    command = dump()
    send(rank.run, command)
    send(rank.run, command)
    assert rank.poll() == [1]
    assert rank.states == ["waiting", "ended"]


def test_a_dump_is_not_done_again_after_a_restart(tmp_path: Path) -> None:
    rank = Heard(tmp_path, replace(ALONE, attempt=1))
    send(rank.run, dump())
    send(rank.run, dump(attempt=1))
    assert rank.poll() == [2]
    assert rank.states == ["ended", "waiting"]


def test_one_rank_of_a_node_looks_and_the_others_look_at_its_mark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    topology = replace(ALONE, world_size=4, local_world_size=4)
    leader = Heard(tmp_path, topology)
    other = Heard(tmp_path, replace(topology, rank=3, local_rank=3))
    leader.poll()
    looked: list[str] = []
    real = os.stat

    def note(path: Any, **more: Any) -> os.stat_result:
        looked.append(str(path))
        return real(path, **more)

    monkeypatch.setattr(os, "stat", note)
    for _ in range(20):
        assert other.poll() == []
    assert len(looked) == 20 and all(str(tmp_path / "marks") in path for path in looked)
    send(other.run, dump())
    assert other.poll() == []
    assert leader.poll() == [1]
    assert other.poll() == [1]
    leader.commands.close()
    assert list((tmp_path / "marks").iterdir()) == []


def test_a_rank_looks_for_itself_where_nobody_on_its_node_does(tmp_path: Path) -> None:
    topology = replace(ALONE, world_size=4, local_world_size=4)
    other = Heard(tmp_path, replace(topology, rank=3, local_rank=3))
    other.poll()
    send(other.run, dump())
    assert other.poll() == []
    assert other.poll(2.5) == [1]


def test_a_mark_that_is_old_or_a_link_or_somebody_elses_counts_as_none(tmp_path: Path) -> None:
    topology = replace(ALONE, world_size=4, local_world_size=4)
    leader = Heard(tmp_path, topology)
    leader.poll()
    (mark,) = (tmp_path / "marks").iterdir()
    os.utime(mark, (1, 1))  # the rank that looks has stopped
    other = Heard(tmp_path, replace(topology, rank=3, local_rank=3))
    send(other.run, dump())
    assert other.poll(2.5) == [1]
    mark.unlink()
    target = tmp_path / "target"
    target.write_bytes(b"kept")
    mark.symlink_to(target)
    leader.poll()
    leader.commands.send(dump())
    leader.poll()
    assert target.read_bytes() == b"kept"
    other.poll()
    assert other.poll(2.5) == [1, 2]


def test_a_large_job_makes_no_more_looks_than_its_file_system_bears(tmp_path: Path) -> None:
    """Ranks of 512 nodes: their first ranks look every two seconds, 250 times a second together."""
    topology = replace(ALONE, world_size=4096, local_world_size=8)
    leader = Heard(tmp_path, topology)
    num_looks = 0
    real = os.stat

    def count(path: Any, **more: Any) -> os.stat_result:
        nonlocal num_looks
        num_looks += str(path).endswith(COMMANDS)
        return real(path, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "stat", count)
        for _ in range(100):
            leader.poll(0.2)
    assert 512 * num_looks / 20 <= 260
