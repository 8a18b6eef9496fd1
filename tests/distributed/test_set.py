"""A job under torchrun is told what to record: from one step on, on all ranks, and training stays as it is."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import recorder
from recorder.analyze.doctor.expected import compare
from recorder.analyze.doctor.reply import checks_of
from recorder.cli.commands.showing import ls_command, top_command
from recorder.cli.commands.telling import set_command
from recorder.cli.output import print_reply
from recorder.errors import CommandError
from recorder.format.commands import COMMANDS, command_name
from recorder.read.run import read_modules
from recorder.run.status import RankNow, RunWatch
from tests.rigs import jobs
from tests.rigs.jobs import SCRIPTS, Finished

SCRIPT = SCRIPTS / "commanded.py"
NUM_STEPS = 40
PATIENCE_S = 80.0


def until(watch: RunWatch, is_so: Callable[[list[RankNow]], bool]) -> list[RankNow]:
    until_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < until_s:
        ranks = watch.look()
        if len(ranks) == 2 and is_so(ranks):
            return ranks
        time.sleep(0.05)
    raise AssertionError(f"not in {PATIENCE_S:g} s: {watch.look()}")


class Told:
    """The job, what each `recorder set` returned and printed, and how it ended."""

    def __init__(self) -> None:
        self.codes: dict[str, int] = {}
        self.printed: dict[str, str] = {}
        self.finished: Finished | None = None

    @property
    def run(self) -> recorder.Run:
        assert self.finished is not None
        return self.finished.run


def call_set(run: Path, *words: str, at: str, steps: int | None = None, timeout: float = 0.5) -> int:
    reply = set_command(path=str(run), words=list(words), at=at, steps=steps, timeout=timeout)
    return print_reply(reply, as_json=False)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    """A job that waits at step 10 while it is told four things, one of them while a rank is stopped."""
    folder = tmp_path_factory.mktemp("set")
    (limit := folder / "limit.txt").write_text("10")
    settings = jobs.recording("site=grad steps=::10 keep=stats", status_interval_s="0.1")
    arguments = (f"--steps={NUM_STEPS}", f"--out={folder / 'out'}", f"--limit={limit}")
    job = jobs.ranks(folder, SCRIPT, *arguments, num=2, TESTS_RECORDER="1", **settings)
    found = Told()
    try:
        until_s = time.monotonic() + PATIENCE_S
        while not (runs := list((folder / "recordings").glob("*/_run.json"))) and time.monotonic() < until_s:
            time.sleep(0.05)
        run = runs[0].parent
        watch = RunWatch(run)
        until(watch, lambda ranks: all(rank.status.step == 9 for rank in ranks))
        # A manifest with the modules may come a moment after a status with the step.
        until(watch, lambda _: bool(read_modules(recorder.open_run(run).writers)))

        def call(name: str, *words: str, **options: Any) -> None:
            found.codes[name] = call_set(run, *words, **options)

        at_once = [
            threading.Thread(
                target=call, args=("a", "module=0 site=output,input keep=tensor"), kwargs={"at": "20", "steps": 5}
            ),
            threading.Thread(target=call, args=("b", "site=grad keep=tensor"), kwargs={"at": "22", "steps": 3}),
        ]
        for thread in at_once:
            thread.start()
        for thread in at_once:
            thread.join()
        stopped = next(rank.status.pid for rank in watch.look() if rank.rank == 1)
        os.kill(stopped, signal.SIGSTOP)
        try:
            call("stopped", "pause", at="30", steps=2)
        finally:
            os.kill(stopped, signal.SIGCONT)
        (run / COMMANDS / command_name(4)).write_bytes(b'{"kind":"set","rules":["dir=/tmp"]}')
        until(watch, lambda ranks: all(len(r.status.commands) == 3 and r.status.num_commands_refused for r in ranks))
        limit.write_text(str(NUM_STEPS))
        found.finished = jobs.succeeded(job)
    finally:
        job.kill()
    return found


def test_a_set_waits_for_the_ranks_and_shows_that_one_has_not_answered(
    told: Told, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert told.codes == {"a": 1, "b": 1, "stopped": 1}  # nobody began a step meanwhile, and then one was stopped
    assert print_reply(set_command(path=str(told.run.path), list_all=True), as_json=False) == 1
    printed = capsys.readouterr().out
    assert "2 ranks (0..1): ended, from step 30 to 31" in printed
    assert "no command: _commands/000004.json: its format is None" in printed


def test_all_ranks_are_in_force_at_the_steps_that_were_named(told: Told) -> None:
    frame = told.run.to_pandas(columns=["rank", "step", "site", "encoding"])
    for rank in (0, 1):
        own = frame[frame["rank"] == rank]
        assert sorted(set(own[own["site"] == "output"]["step"])) == [20, 21, 22, 23, 24]
        assert sorted(set(own[own["site"] == "input"]["step"])) == [20, 21, 22, 23, 24]
        gradients = own[own["site"] == "grad"]
        assert sorted(set(gradients["step"])) == [0, 10, 20, 22, 23, 24]
        assert sorted(set(gradients[gradients["encoding"].notna()]["step"])) == [22, 23, 24]
    numbers = [[answer.number for answer in writer.manifest.commands] for writer in told.run.writers]
    assert numbers == [[1, 2, 3], [1, 2, 3]]
    assert all(answer.state == "ended" for writer in told.run.writers for answer in writer.manifest.commands)


def test_doctor_expects_by_the_rules_that_were_in_force(told: Told) -> None:
    expectation = compare(told.run)
    assert expectation.problems == []
    assert {gap.reason.key for gap in expectation.gaps} <= {"no_gradient"}
    assert all(total.found + total.explained == total.expected > 0 for total in expectation.totals)
    by_site = {total.site: total.found for total in expectation.totals}
    assert by_site["output"] == 2 * 5 and by_site["grad"] == 2 * 4 * 6


def test_a_hostile_file_is_refused_with_a_line(told: Told) -> None:
    assert told.finished is not None
    assert told.finished.lines("a command is not done", "000004.json", "its format is None")


def test_training_is_bit_equal_to_that_of_ranks_without_a_recorder(told: Told, tmp_path: Path) -> None:
    plain = jobs.succeeded(jobs.ranks(tmp_path, SCRIPT, f"--steps={NUM_STEPS}", f"--out={tmp_path / 'out'}"))
    assert told.finished is not None
    for with_recorder, without in zip(told.finished.saved, plain.saved, strict=True):
        torch.testing.assert_close(with_recorder, without, rtol=0, atol=0)


def test_a_run_that_is_over_a_step_that_has_passed_and_an_unknown_module_are_refused(told: Told) -> None:
    with pytest.raises(CommandError, match=r"it is over \(its ranks are closed\)"):
        call_set(Path(told.run.path), "site=output", at="+5")


def test_ls_show_top_and_doctor_tell_what_was_sent(told: Told, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(told.run.path)
    print_reply(ls_command(run), as_json=False)
    listed = capsys.readouterr().out
    assert "command 3: pause at steps 30 to 31: 2 ranks (0..1): ended, from step 30 to 31" in listed
    print_reply(top_command(run, once=True), as_json=False)
    shown = capsys.readouterr().out
    assert "1 file refused that held no command" in shown and "command 3 (pause): 2 ended" in shown
    lines = {
        check.text: check.state
        for check in checks_of(told.run)
        if check.text.startswith(("told by", "not a valid command"))
    }
    assert sorted(lines.values()) == ["note", "ok", "ok", "ok"]  # three commands, and the file that is none
    assert any("set at steps 22 to 24: site=grad keep=tensor: 2 ranks (0..1): ended" in text for text in lines)
