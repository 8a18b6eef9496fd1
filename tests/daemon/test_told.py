"""A job that is shipped while it trains is told at the destination what to record, and its answers are seen there."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import recorder
from recorder.cli.commands.telling import dump_command, set_command
from recorder.cli.output import print_reply
from recorder.format.commands import PAUSE, Command, send
from recorder.run.finding import FLEET
from recorder.run.reply import Reply
from recorder.run.status import RankNow, RunWatch
from tests.daemon.support import files
from tests.rigs import jobs
from tests.rigs.command_line import Cli

NUM_STEPS = 60
PATIENCE_S = 80.0
RULES = "site=grad steps=::20 keep=stats; site=grad keep=ring before=1 after=1"


def until(is_so: Callable[[], object]) -> None:
    until_s = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < until_s, f"not in {PATIENCE_S:g} s"
        time.sleep(0.05)


def test_set_and_dump_at_the_destination_reach_the_job_and_the_answers_come_back(
    tmp_path: Path, cli: Cli, capsys: pytest.CaptureFixture[str]
) -> None:
    """The job waits at a step until both ranks have heard, so that no clock decides."""
    (limit := tmp_path / "limit.txt").write_text("10")
    (key := tmp_path / "key").write_text("0123456789abcdef")
    settings = jobs.recording(RULES, status_interval_s="0.1")
    script = jobs.SCRIPTS / "commanded.py"
    there = tmp_path / "there"
    (tmp_path / "recordings").mkdir()
    options = (f"--watch={tmp_path / 'recordings'}", f"--to={there}", f"--state={tmp_path / 'state'}", "--listen=")
    periods = ("--status-s=0.2", "--fresh-s=1", "--accept-commands", f"--key-file={key}")
    job = jobs.ranks(
        tmp_path, script, f"--steps={NUM_STEPS}", f"--out={tmp_path / 'out'}", f"--limit={limit}",
        num=2, TESTS_RECORDER="1", **settings,
    )  # fmt: skip
    daemon = jobs.python(tmp_path / "daemon", "-m", "recorder", "daemon", *options, *periods)
    codes: dict[str, int] = {}

    def ranks(folder: Path) -> list[RankNow]:
        return [one for run in folder.glob("*/_run.json") for one in RunWatch(run.parent).look()]

    def tell(name: str, function: Callable[[], Reply], num_heard: int, next_limit: int) -> None:
        """Send something, and let the job go on once both ranks have heard it."""
        thread = threading.Thread(target=lambda: codes.update({name: print_reply(function(), as_json=False)}))
        thread.start()
        local = tmp_path / "recordings"
        until(lambda: [len(one.status.commands) for one in ranks(local)] == [num_heard] * 2)
        limit.write_text(str(next_limit))
        thread.join(PATIENCE_S)

    try:
        until(lambda: [one.status.step for one in ranks(there)] == [9, 9] and (there / FLEET).is_dir())
        (run,) = (path.parent for path in there.glob("*/_run.json"))
        until(lambda: recorder.open_run(run).modules)  # rules are checked against the modules that have been shipped
        send(
            tmp_path / "recordings" / run.name, Command(kind=PAUSE, from_step=12, to_step=12)
        )  # so that numbers differ
        words = ["module=0 site=output keep=tensor"]
        tell(
            "set",
            lambda: set_command(str(run), words, at="20", steps=3, timeout=PATIENCE_S, key_file=str(key)),
            2,
            30,
        )
        tell(
            "dump",
            lambda: dump_command(path=str(run), step="40", timeout=PATIENCE_S, key_file=str(key)),
            3,
            50,
        )
        printed = capsys.readouterr().out
        limit.write_text(str(NUM_STEPS))
        jobs.succeeded(job)
        until(lambda: [one.state for one in ranks(there)] == ["closed", "closed"])
    finally:
        job.kill()
        daemon.kill()
    assert codes == {"set": 0, "dump": 0}, printed
    assert "command 1 of" in printed and "ranks 0..1: done, from step 39 to 41 (" in printed
    frame = recorder.open_run(run).to_pandas(columns=["rank", "step", "site", "encoding"])
    for rank in (0, 1):
        own = frame[(frame["rank"] == rank) & frame["encoding"].notna()]
        assert sorted(set(own[own["site"] == "output"]["step"])) == [20, 21, 22]
        assert sorted(set(own[own["site"] == "grad"]["step"])) == [39, 40, 41]
    listed = cli("set", run, "--list")
    said = [listed.out.count(f"2 ranks (0..1): {word}, from step") for word in ("ended", "done")]
    assert (listed.exit_code, said) == (0, [1, 1]), listed
    local = files(tmp_path / "recordings" / run.name)
    assert {name: there for name, there in files(run).items() if name in local and "_commands" not in name} == {
        name: here for name, here in local.items() if "_commands" not in name
    }
