"""Rows that nobody but recorder reads: who says so, who says what to do, and how."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rigs.command_line import Cli
from tests.rigs.handmade import HandmadeWriter, make_row, make_run


@pytest.fixture
def dead_pid() -> int:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    return dead.pid


@pytest.fixture
def run(tmp_path: Path, dead_pid: int) -> Path:
    """Rank 0 was killed with two open shards, rank 1 closed with one, rank 2 records."""
    run = make_run(tmp_path / "a run")
    for rank, pid in ((0, dead_pid), (1, dead_pid), (2, os.getpid())):
        writer = HandmadeWriter(run, rank)
        writer.add_shard([[make_row(0, [1.0], rank=rank)]])
        writer.add_shard([[make_row(number, [1.0], rank=rank) for number in (1, 2, 3)]], is_sealed=False)
        if rank == 0:
            writer.add_shard([[make_row(4, rank=rank)]], kind="stats", is_sealed=False)
        writer.finish(state="closed" if rank == 1 else "recording", pid=pid, host=os.uname().nodename)
    return run


def test_every_command_says_that_repair_seals_what_was_left_open(cli: Cli, run: Path) -> None:
    note = (
        f"7 rows are in 3 open files: recorder reads them, other readers do not; `recorder repair '{run}'` seals them"
    )
    assert cli("ls", run).out.splitlines().count(note) == 1
    assert cli("doctor", run).out.splitlines().count(f"note    {note}") == 1
    found = cli("verify", run)
    assert found.out.splitlines().count(f"note: {note}") == 1 and found.exit_code == 0
    listed = cli("ls", run, "--json").json
    assert (listed["open_rows"], listed["open_files"]) == (7, 3)


def test_one_row_in_one_file_is_said_as_that(cli: Cli, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    writer = HandmadeWriter(run)
    writer.add_shard([[make_row(0, [1.0])]], is_sealed=False)
    writer.finish()
    note = f"1 row is in 1 open file: recorder reads it, other readers do not; `recorder repair {run}` seals it\n"
    assert cli("ls", run).out.endswith(note)


def test_open_files_of_a_writer_that_records_are_no_news(cli: Cli, run: Path) -> None:
    for rank in (0, 1):
        shutil.rmtree(run / f"rank={rank:05d}")
    for command in ("ls", "verify", "doctor"):
        assert "recorder repair" not in cli(command, run).out


def test_after_a_repair_and_of_its_merge_nothing_is_said(cli: Cli, run: Path, tmp_path: Path) -> None:
    shutil.rmtree(run / "rank=00002")
    merged = tmp_path / "merged"
    assert cli("merge", run, "-o", merged).exit_code in (0, 1)
    assert "recorder repair" not in cli("ls", merged).out
    assert cli("repair", run).exit_code == 0
    for command in ("ls", "verify", "doctor"):
        assert "recorder repair" not in cli(command, run).out


def test_writers_that_may_be_alive_are_counted_in_words(cli: Cli, run: Path) -> None:
    assert "1 writer left alone, because it may be alive" in cli("repair", run, "--dry-run").out
    writer = HandmadeWriter(run, 3)
    writer.finish(state="recording", pid=os.getpid(), host=os.uname().nodename)
    assert "2 writers left alone, because they may be alive" in cli("repair", run, "--dry-run").out


def test_the_loss_of_one_row_is_told_as_at_least_one(cli: Cli, tmp_path: Path, dead_pid: int) -> None:
    run = make_run(tmp_path / "run")
    writer = HandmadeWriter(run)
    writer.add_shard([[make_row(0, [1.0])]])
    accounts = {"observed": 2, "written": 1, "dropped": {}, "retired": {"rows": 0, "bytes": 0}}
    writer.finish(state="recording", pid=dead_pid, host=os.uname().nodename, ledger=accounts)
    ending = "the record ends in step 0, and at least 1 row not written yet is lost"
    merged = tmp_path / "merged"
    for arguments in (("ls", run), ("doctor", run), ("verify", run), ("merge", run, "-o", merged), ("doctor", merged)):
        assert ending in cli(*arguments).out, arguments


def test_a_copied_writer_is_told_by_every_command(cli: Cli, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    writer = HandmadeWriter(run)
    writer.add_shard([[make_row(0, [1.0])]])
    writer.finish()
    shutil.copytree(writer.directory, writer.directory.with_name("backup"))
    for command in ("ls", "doctor", "verify"):
        found = cli(command, run)
        assert found.exit_code == 1 and "remove the copy" in found.out + found.err, command
