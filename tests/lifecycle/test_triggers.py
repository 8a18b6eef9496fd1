"""Triggers: which count and when, what window they name, what is sent to other ranks, and what is answered."""

from __future__ import annotations

from typing import Any, cast

import pytest

from recorder.config import Settings
from recorder.errors import CommandError
from recorder.format.commands import DUMP, Command
from recorder.lifecycle.ring import Triggers
from recorder.rules import RingWindow
from recorder.system.log import Events
from recorder.write.ring import MAX_DUMPS, Dump


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Ring:
    """A writer that begins each dump at once, and writes nothing more of it."""

    def __init__(self) -> None:
        self.dumps: list[Dump] = []
        self.missed: list[int] = []

    def dump(self, dump: Dump) -> None:
        dump.has_begun = True
        dump.missed = list(self.missed)
        dump.num_rows = 0 if self.missed else 12
        self.dumps.append(dump)

    def pass_all(self) -> None:
        for dump in self.dumps:
            dump.is_over = True


class Room:
    """A run's directory: gives each command to all ranks at their next look."""

    def __init__(self) -> None:
        self.commands: list[Command] = []


class Sender:
    def __init__(self, room: Room) -> None:
        self._room = room
        self._num_seen = 0
        self.triggers: Triggers | None = None
        self.answers: dict[int, tuple[str, str]] = {}
        self.is_broken = False

    def look(self) -> None:
        new = self._room.commands[self._num_seen :]
        self._num_seen = len(self._room.commands)
        for command in new:
            assert self.triggers is not None
            self.triggers.take(command)

    def send(self, command: Command) -> Command:
        if self.is_broken:
            raise CommandError("the disk is full")
        self._room.commands.append(Command(**{**_members(command), "number": len(self._room.commands) + 1}))
        self.look()
        return self._room.commands[-1]

    def answer(self, command: Command, state: str, **more: Any) -> None:
        self.answers[command.number] = (state, more.get("why", ""))


def _members(command: Command) -> dict[str, Any]:
    return {name: getattr(command, name) for name in ("kind", "from_step", "to_step", "reason", "by", "id")}


class Rank:
    """One rank's triggers, with a fake ring."""

    def __init__(self, room: Room | None = None, *, rank: int = 0, has_ring: bool = True, **settings: Any) -> None:
        self.clock = Clock()
        self.ring = Ring()
        self.events = Events()
        self.sender = Sender(room or Room())
        self.sender.triggers = self.triggers = Triggers(
            settings=Settings(**settings),
            rank=rank,
            world_size=2,
            window=RingWindow(4, 2),
            channel=cast(Any, self.ring) if has_ring else None,
            sender=cast(Any, self.sender),
            events=self.events,
            clock=self.clock,
        )

    def look(self, step: int, seconds: float = 0.2) -> None:
        self.clock.now_s += seconds
        self.sender.look()
        self.triggers.look(step)

    @property
    def windows(self) -> list[tuple[int, int]]:
        return [(dump.first_step, dump.last_step) for dump in self.ring.dumps]

    @property
    def kinds(self) -> list[str]:
        return [event["kind"] for event in self.events.as_list()]


def test_a_trigger_names_the_window_around_its_step_and_all_ranks_write_it() -> None:
    room = Room()
    one, other = Rank(room, rank=0), Rank(room, rank=1)
    one.triggers.ask("nonfinite", "NaN in the loss", step=30)
    one.look(33)
    other.look(34)
    assert one.windows == other.windows == [(26, 32)]
    assert [(dump.reason, dump.by, dump.command) for dump in other.ring.dumps] == [("NaN in the loss", "rank 0", 1)]
    assert other.sender.answers[1] == ("in force", "")
    for rank in (one, other):
        rank.ring.pass_all()
        rank.look(35)
    assert one.sender.answers[1] == other.sender.answers[1] == ("ended", "12 rows, 0 B")


def test_a_trigger_in_the_first_step_begins_at_step_0() -> None:
    rank = Rank()
    rank.triggers.ask("program", "now", step=1)
    rank.look(1)
    assert rank.windows == [(0, 3)]


def test_two_ranks_that_see_the_same_make_one_dump() -> None:
    room = Room()
    one, other = Rank(room, rank=0), Rank(room, rank=1)
    for rank in (one, other):
        rank.triggers.ask("nonfinite", "NaN in the loss", step=30)
    one.triggers.look(31)
    other.triggers.look(31)
    for rank in (one, other):
        for _ in range(3):
            rank.look(40)
        assert rank.windows == [(26, 32)]
    assert len(room.commands) == 1


def test_only_the_words_of_the_setting_count_and_what_somebody_asks_for() -> None:
    rank = Rank(triggers="hang", trigger_cooldown_s=0)
    for number, kind in enumerate(("nonfinite", "exception", "signal", "program", "user")):
        rank.triggers.ask(kind, kind, step=100 * number)
    rank.look(500)
    assert [dump.reason for dump in rank.ring.dumps] == ["program", "user"]
    silent = Rank(triggers="none")
    silent.triggers.ask("hang", "hang", step=1)
    silent.look(1)
    assert silent.windows == []


def test_after_a_trigger_others_count_for_nothing_for_a_while_but_the_end_and_a_person_do() -> None:
    rank = Rank()
    rank.triggers.ask("spike", "a spike", step=10)
    rank.look(10)
    rank.triggers.ask("spike", "another", step=20)
    rank.look(20)
    assert rank.windows == [(6, 12)]
    assert rank.kinds == ["trigger_passed"]
    rank.triggers.ask("user", "signal SIGUSR2", step=30)
    rank.triggers.ask("exception", "ValueError", step=50)
    rank.look(50)
    assert rank.windows == [(6, 12), (26, 32), (46, 52)]
    rank.look(51, seconds=61)
    rank.triggers.ask("spike", "a third", step=90)
    rank.look(90)
    assert rank.windows[-1] == (86, 92)


def test_of_many_triggers_at_once_the_first_and_the_one_that_ends_it_count_and_the_others_are_told() -> None:
    rank = Rank()
    for step in range(100, 300):
        rank.triggers.ask("nonfinite", "NaN", step=step)
    rank.triggers.ask("exception", "ValueError", step=300)
    rank.look(300)
    assert rank.windows == [(96, 102), (296, 302)]
    assert [(event["kind"], event["count"]) for event in rank.events.as_list()] == [("trigger_passed", 199)]


def test_a_window_that_lies_ahead_keeps_nobody_from_a_trigger_now() -> None:
    rank = Rank()
    rank.look(10)
    rank.triggers.take(Command(kind=DUMP, from_step=5000, to_step=5006))
    rank.triggers.ask("nonfinite", "NaN", step=10)
    rank.look(10)
    assert rank.windows == [(5000, 5006), (6, 12)]


class _Textless:
    def __str__(self) -> str:
        raise ValueError("no text")


@pytest.mark.parametrize(
    ("reason", "shown"),
    [
        ("\x1b[2Jred\r\nrecorder: all is well\0", "\\x1b[2Jred recorder: all is well\\x00"),
        ("\ud800", "\\ud800"),
        (" \n", "program"),
        (None, "None"),
        (_Textless(), "a _Textless that cannot be shown"),
        ("x" * 1000, "x" * 200),
    ],
)
def test_a_reason_is_one_line_that_no_terminal_obeys(reason: object, shown: str) -> None:
    rank = Rank()
    rank.triggers.ask("program", reason)
    rank.look(10)
    assert [dump.reason for dump in rank.ring.dumps] == [shown]


def test_a_rank_that_learns_of_it_too_late_says_so() -> None:
    room = Room()
    one, other = Rank(room, rank=0), Rank(room, rank=1)
    other.ring.missed = [26, 27, 28]
    one.triggers.ask("program", "now", step=30)
    one.look(30)
    other.look(90)
    other.ring.pass_all()
    other.look(91)
    assert other.sender.answers[1] == ("missed", "0 rows, 0 B; steps 26 to 28 had been dropped from the ring already")
    assert other.kinds == ["trigger_missed"]
    other.look(92)
    assert other.events.as_list()[0]["count"] == 1, "it is said once"


def test_a_hang_is_a_step_that_does_not_end_and_is_said_once() -> None:
    rank = Rank(hang_s=10)
    rank.look(0, seconds=100)
    assert rank.windows == [], "the first step compiles, and may take its time"
    rank.look(1)
    rank.look(1, seconds=9)
    assert rank.windows == []
    rank.look(1, seconds=2)
    rank.look(1, seconds=100)
    assert rank.windows == [(0, 3)]
    assert "step 1 has not ended in 10 s" in rank.ring.dumps[0].reason
    rank.look(2)
    rank.look(2, seconds=100)
    assert rank.windows == [(0, 3), (0, 4)]
    assert Rank(hang_s=0).windows == []


def test_a_window_larger_than_the_rings_is_refused() -> None:
    rank = Rank()
    with pytest.raises(CommandError, match="the dump asks for 8 steps, and the ring holds 7"):
        rank.triggers.take(Command(kind=DUMP, from_step=1, to_step=8))


def test_there_is_a_bound_on_the_number_of_dumps() -> None:
    rank = Rank(trigger_cooldown_s=0)
    for number in range(MAX_DUMPS + 3):
        rank.triggers.ask("program", "again", step=10 * number)
        rank.look(10 * number)
    assert len(rank.windows) == MAX_DUMPS
    assert rank.kinds == ["trigger_refused"]
    with pytest.raises(CommandError, match=f"has made {MAX_DUMPS} dumps"):
        rank.triggers.take(Command(kind=DUMP, from_step=99999, to_step=99999))


def test_a_command_that_cannot_be_sent_is_said_and_the_rank_writes_its_own() -> None:
    rank = Rank()
    rank.sender.is_broken = True
    rank.triggers.ask("program", "now", step=30)
    rank.look(30)
    assert rank.windows == [(26, 32)]
    assert rank.kinds == ["trigger_unsent"]


def test_a_rank_without_a_ring_tells_the_others() -> None:
    room = Room()
    without, other = Rank(room, rank=0, has_ring=False), Rank(room, rank=1)
    without.triggers.ask("nonfinite", "NaN", step=30)
    without.look(30)
    other.look(30)
    assert without.windows == [] and other.windows == [(26, 32)]
    assert without.sender.answers[1] == ("ended", "no rule keeps a ring on this rank")


def test_a_ring_that_is_off_writes_nothing_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    rank = Rank()
    rank.triggers.turn_off()
    rank.triggers.ask("program", "why not", step=30)
    rank.look(30)
    assert rank.windows == []
    assert rank.sender.answers[1] == ("ended", "the ring is off, because it cannot hold its steps")
    assert "nothing is written, for the ring is off" in caplog.text


def test_the_last_look_answers_what_is_still_open() -> None:
    rank = Rank()
    rank.triggers.ask("exception", "ValueError: x", step=30)
    rank.triggers.end(30)
    rank.triggers.end(30)
    assert rank.windows == [(26, 32)]
    assert rank.sender.answers[1][0] == "ended"
