"""What `recorder set` says before it sends anything: one line, exit code 2, and no file in the run's directory."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from recorder.format.commands import COMMANDS
from recorder.format.manifest import RunManifest
from recorder.run.status import RankNow, Status
from recorder.run.telling import Target
from tests.rigs.capturing import Tiny, batch, flagged
from tests.rigs.command_line import Cli, Result
from tests.rigs.waiting import wait_until


def test_a_run_that_is_over_is_told_nothing(cli: Cli, tmp_path: Path) -> None:
    """Before the run that stays open, since a process records one at a time."""
    with flagged(tmp_path, "site=grad") as recording:
        model = Tiny()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        optimizer.zero_grad()
        model(batch()).sum().backward()
        optimizer.step()
    found = cli("set", recording.folder, "site=output")
    assert found.exit_code == 2 and "it is over (its ranks are closed), so no rank can receive a command" in found.err
    listed = cli("set", recording.folder, "--list")
    assert (listed.exit_code, listed.out) == (0, "no command was sent\n")
    assert cli("set", recording.folder, "--list", "--json").json["commands"] == []


def test_twenty_steps_ahead_lie_ahead_in_a_run_that_has_just_begun(cli: Cli, tmp_path: Path) -> None:
    """Before the run that stays open. The first step is slow, as one that compiles: no status shows the speed yet.

    The rule asks for no new hook: in a process in which another test has compiled something, that would be refused.
    """
    found: list[Result] = []
    with flagged(tmp_path, "site=grad", status_interval_s=0.3) as recording:
        model = Tiny()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

        def tell() -> None:
            wait_until(lambda: _is_described(recording.folder))
            found.append(cli("set", recording.folder, "site=param keep=stats", "--at", "+20", "--steps", "5"))

        teller = threading.Thread(target=tell)
        teller.start()
        until_s, step = time.monotonic() + 60, 0
        while teller.is_alive() and time.monotonic() < until_s:
            optimizer.zero_grad()
            model(batch(step)).sum().backward()
            optimizer.step()
            step += 1
            time.sleep(1.0 if step == 1 else 0.005)
        teller.join(10)
    (said,) = found
    assert said.exit_code == 0, said
    assert "missed" not in said.out


@dataclass
class FakeWatch:
    """Ranks of a job that take 50 steps a second, and show it each half a second of a clock that sleep moves."""

    now_s: float = 0.0
    began_s: float = 0.0

    def look(self) -> list[RankNow]:
        shown_s = self.now_s - self.now_s % 0.5
        step = int(50 * max(shown_s - 1, 0))  # the first step takes a second
        recent = {"recent_s": shown_s, "recent_steps": step} if shown_s else {}
        return [
            RankNow(
                rank=rank,
                state="recording",
                silent_s=self.now_s - shown_s,
                status=Status(writer=f"w{rank}", step=step, **recent),  # type: ignore[arg-type]
                num_writers=1,
                num_alive=1,
            )
            for rank in range(8)
        ]


@pytest.mark.parametrize("began_s", [0.3, 1.2, 5.0, 60.0])
def test_a_relative_step_leaves_eight_ranks_the_time_to_hear_of_it(
    began_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = FakeWatch(now_s=began_s)
    monkeypatch.setattr(time, "monotonic", lambda: watch.now_s)
    monkeypatch.setattr(time, "sleep", lambda s: setattr(watch, "now_s", watch.now_s + s))
    manifest = RunManifest(world_size=8)
    target = Target(run=tmp_path, name="r", manifest=manifest, watch=watch, ranks=watch.look())  # type: ignore[arg-type]
    first = target.step_ahead("+20")
    at_hand = 50 * max(watch.now_s - 1, 0)
    assert at_hand + 2.0 * 50 <= first <= at_hand + 4.0 * 50
    assert watch.now_s - began_s < 4.0
    far = target.step_ahead("+5000")
    assert far - 50 * max(watch.now_s - 1, 0) == pytest.approx(5000, abs=60)


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run of one process that has taken three steps, and takes no more."""
    with flagged(tmp_path_factory.mktemp("live"), "site=grad", status_interval_s=0.05) as recording:
        model = Tiny()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(3):
            optimizer.zero_grad()
            model(batch(step)).sum().backward()
            optimizer.step()
        until_s = time.monotonic() + 60
        while not _is_described(recording.folder) and time.monotonic() < until_s:
            time.sleep(0.02)
        (manifest,) = recording.folder.glob("*/_run.json")
        yield manifest.parent


def _is_described(folder: Path) -> bool:
    """Whether the run shows its step and its modules."""
    has_status = [True for _ in folder.glob("*/rank=*/*/_status.json")]
    return bool(has_status) and any(
        '"path":"second"' in one.read_text() for one in folder.glob("*/rank=*/*/_writer.json")
    )


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ([], "set takes a RUN, and then one of: rules, pause, resume, --undo N, --list"),
        (["site=output", "--list"], "and then one of"),
        (["sit=output"], "unknown key 'sit' (did you mean 'site'?)"),
        (["module=secnd site=output"], "matches no module of this run; modules near it: 'second'"),
        (["class=Linaer site=output"], "matches no module of this run; classes near it: 'Linear'"),
        (["module='re:f.*' site=output"], "regular expression"),
        (["dir=/tmp"], "unknown key 'dir'"),
        (["site=output", "--at", "1"], "--at 1: that step has passed, for the run is at about step"),
        (["site=output", "--at", "soon"], "--at 'soon': expected a step, such as 500"),
        (["resume", "--steps", "3"], "--steps is of rules and of pause; a resume lasts"),
        (["--undo", "7"], "--undo 7: "),
        (["pause", "resume"], "'pause' in 'pause' is not of the form key=value"),
    ],
)
def test_what_cannot_be_done_is_refused_before_it_is_sent(cli: Cli, live: Path, words: list[str], why: str) -> None:
    found = cli("set", live, *words)
    assert found.exit_code == 2
    assert why in found.err and found.err.count("\n") == 1 and found.out == ""
    assert not (live / COMMANDS).exists()


def test_a_run_without_a_ring_has_nothing_to_dump(cli: Cli, live: Path) -> None:
    found = cli("dump", live)
    assert found.exit_code == 2 and "no rule of this run has keep=ring, so no step is kept in memory" in found.err


def test_whoever_may_not_write_there_is_told_so(cli: Cli, live: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(os, "mkdir", refuse)
    found = cli("set", live, "site=output")
    assert found.exit_code == 2
    assert "cannot be written (Permission denied); send it as the user who trains" in found.err
