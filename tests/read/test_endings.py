"""From where on data is missing after a kill."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from recorder.errors import LookupFailedError, install_line
from recorder.format.rundir import encode_status
from recorder.run.run import open_run
from recorder.upkeep.verify import verify
from tests.rigs.command_line import Cli, cli
from tests.rigs.handmade import HandmadeWriter, ledger, make_row, make_run

__all__ = ["cli"]


@pytest.fixture
def dead_pid() -> int:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    return dead.pid


@pytest.fixture
def killed(tmp_path: Path, dead_pid: int) -> Path:
    """Rank 0 was killed in step 23 with 7 rows on their way; rank 1 closed after step 23."""
    run = make_run(tmp_path / "recordings" / "run")
    for rank in (0, 1):
        writer = HandmadeWriter(run, rank)
        writer.add_shard([[make_row(step, [1.0], step=step, rank=rank) for step in range(24)]], is_sealed=rank == 1)
        if rank == 0:
            host = os.uname().nodename
            writer.finish(state="recording", pid=dead_pid, host=host, ledger=ledger(24, observed=31))
        else:
            writer.finish()
    return run


ENDING = (
    "rank 0 (writer 20260101-000000-host-1): its process ended without closing; "
    "the record ends in step 23, and at least 7 rows not written yet are lost"
)


def test_a_killed_writer_says_where_its_record_ends(killed: Path) -> None:
    run = open_run(killed)
    assert run.endings == [ENDING]
    assert repr(run) == "<Run 'run': 2 ranks, steps 0 to 23, 48 rows, 1 unclosed writer>"


def show(run: Path, **facts: object) -> None:
    """Leave a `_status.json` of rank 0's writer, as it shows itself at its end."""
    directory = next(run.glob("rank=00000/*"))
    manifest = json.loads((directory / "_writer.json").read_text())
    known = {"writer": directory.name, "pid": manifest["pid"], "started_ns": manifest.get("started_ns", 0)}
    accounts = {"observed": 31, "written": 24, "dropped": {"write_error:EROFS": 7}, "state": "closed", "step": 30}
    (directory / "_status.json").write_bytes(encode_status({**known, **accounts, **facts}))


def test_a_writer_that_closed_on_a_disk_that_took_no_manifest_has_the_account_of_its_last_status(killed: Path) -> None:
    show(killed)
    run = open_run(killed)
    writer = run.writers[0]
    assert (writer.state, run.endings) == ("closed", [])
    assert (writer.balance.observed, writer.balance.written, writer.balance.num_missing) == (31, 24, 0)
    assert writer.balance.dropped == {"write_error:EROFS": 7}
    assert [finding.text for finding in verify(run) if finding.is_fault] == []


def test_all_commands_give_the_account_of_the_last_status(killed: Path, cli: Cli) -> None:
    show(killed)
    for command in ("doctor", "ls", "show", "first", "merge", "verify"):
        more = ["-o", str(killed.parent / "merged")] if command == "merge" else []
        done = cli(command, str(killed), *more)
        assert "without closing" not in done.out + done.err, command
    assert "7 of 31 rows dropped: write_error:EROFS 7" in cli("doctor", str(killed)).out


@pytest.mark.parametrize(
    "facts", [{"state": "recording"}, {"state": "failed"}, {"writer": "another"}, {"pid": 1}, {"started_ns": 5}]
)
def test_a_status_that_is_not_this_writers_last_word_is_no_account(killed: Path, facts: dict[str, object]) -> None:
    show(killed, **facts)
    assert open_run(killed).endings == [ENDING]


def test_a_status_with_a_flipped_byte_is_no_account(killed: Path) -> None:
    show(killed)
    path = next(killed.glob("rank=00000/*/_status.json"))
    path.write_bytes(path.read_bytes().replace(b'"written":24', b'"written":29'))
    assert open_run(killed).endings == [ENDING]


def test_without_accounts_of_lost_rows_it_says_that_some_may_be_missing(killed: Path) -> None:
    path = next(killed.glob("rank=00000/*/_writer.json"))
    path.write_text(json.dumps(json.loads(path.read_text()) | {"ledger": ledger(24)}))
    (ending,) = open_run(killed).endings
    assert ending.endswith("; the record ends in step 23; rows of the last steps may be missing")


def test_a_writer_without_rows_has_an_ending_too(tmp_path: Path, dead_pid: int) -> None:
    run = make_run(tmp_path / "run")
    HandmadeWriter(run).finish(state="recording", pid=dead_pid, host=os.uname().nodename)
    (ending,) = open_run(run).endings
    assert ending.endswith("): its process ended before its first rows were on disk")
    assert open_run(run).lost == ending


def test_rows_of_another_rank_are_not_lost(killed: Path) -> None:
    HandmadeWriter(killed, 2).finish(state="recording", pid=1 << 30, host=os.uname().nodename)
    run = open_run(killed)
    assert len(run.endings) == 2 and run.endings[1].endswith("before its first rows were on disk")
    assert run.lost == ""


def test_a_closed_run_has_no_endings(run_path: Path) -> None:
    assert open_run(run_path).endings == []


def test_verify_notes_it_and_finds_no_fault(killed: Path) -> None:
    findings = list(verify(open_run(killed)))
    assert (False, ENDING) in findings
    assert not any(finding.is_fault for finding in findings)


@pytest.mark.parametrize("rank", [None, 0])
def test_a_step_behind_the_end_is_answered_with_the_end(killed: Path, rank: int | None) -> None:
    with pytest.raises(LookupFailedError, match=r"step=30; .*; rank 0's record ends in step 23$"):
        open_run(killed).array("layers.0", step=30, rank=rank)


def test_an_orderly_end_is_not_blamed(killed: Path) -> None:
    with pytest.raises(LookupFailedError) as error:
        open_run(killed).array("layers.0", step=30, rank=1)
    assert "record ends" not in str(error.value)


def test_a_restart_that_closed_is_not_blamed_for_the_kill_before_it(killed: Path) -> None:
    again = HandmadeWriter(killed, 0, "restarted")
    again.add_shard([[make_row(step, [1.0], step=step, attempt=1) for step in range(24, 28)]])
    again.finish(attempt=1)
    run = open_run(killed)
    assert len(run.endings) == 1
    with pytest.raises(LookupFailedError) as error:
        run.array("layers.0", step=30, rank=0)
    assert "record ends" not in str(error.value)


@pytest.fixture
def zombie_pid() -> Iterator[int]:
    """A process that was killed and that nobody has asked how it ended."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    yield child.pid
    child.wait()


def test_a_killed_process_is_dead_before_its_parent_asks(tmp_path: Path, zombie_pid: int) -> None:
    run = make_run(tmp_path / "run")
    HandmadeWriter(run).finish(state="recording", pid=zombie_pid, host=os.uname().nodename)
    assert open_run(run).writers[0].state == "unclosed"


class TestCommands:
    def test_a_folder_and_a_run_agree_on_the_state(self, cli: Cli, killed: Path) -> None:
        (folder,) = cli("ls", killed.parent, "--json").json["runs"]
        run = cli("ls", killed, "--json").json
        assert folder["state"] == run["state"] == "unclosed"
        assert folder["endings"] == run["endings"] == [ENDING]
        assert "unclosed" in cli("ls", killed.parent).out

    def test_every_command_says_where_the_record_ends(self, cli: Cli, killed: Path) -> None:
        assert cli("ls", killed).out.splitlines()[-1] == ENDING
        assert f"note: {ENDING}\n" in cli("verify", killed).out
        assert cli("verify", killed).exit_code == 0
        assert f"missing {ENDING}\n" in cli("doctor", killed).out
        report = cli("report", killed, "-o", killed.parent / "report.html")
        assert report.exit_code == 1 and f"note: {ENDING}; and " in report.out
        assert cli("show", killed, "layers.0", "--step", "30").err.endswith("; rank 0's record ends in step 23\n")


def test_a_frame_without_pandas_is_an_import_error(run_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match=re.escape(install_line("analysis"))):
        open_run(run_path).to_pandas()
