"""``recorder top``: one line a rank, the worst first where they do not fit, and what it says of a run's trouble."""

from __future__ import annotations

import io
import os
import re
import threading
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from recorder.cli.output import fitted, follow
from recorder.run import listing
from recorder.run.listing import RanksTop
from recorder.run.reply import LiveTable
from recorder.run.status import RunWatch
from tests.rigs.command_line import Cli, on_a_terminal
from tests.rigs.handmade import make_run
from tests.run.test_status import show

RATES: dict[str, Any] = {"recent": {"seconds": 10.0, "steps": 25, "bytes": 50_000_000}}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Three of four ranks: one is well, one waits and drops, one is silent."""
    run = make_run(tmp_path / "recordings" / "run-a", world_size=4)
    facts: dict[str, Any] = {"used_bytes": 1_500_000, "free_bytes": 7_000_000_000, "pool_bytes": 1000, **RATES}
    show(run, 0, step=120, pool_used_bytes=0, **facts)
    show(run, 1, step=118, pool_used_bytes=430, waited_s=3.2, longest_wait_s=1.0, dropped={"pool_full": 12}, **facts)
    show(run, 2, step=90, age_s=75, **facts)
    return run


def test_a_pipe_gets_one_snapshot_with_a_line_for_each_rank(cli: Cli, run: Path) -> None:
    result = cli("top", run)
    assert result.exit_code == 1, "values are dropped, and a rank is silent"
    title, accounts, _, *ranks = result.out.splitlines()
    assert title == "run-a: 3 of 4 ranks: 1 silent, 2 recording"
    assert accounts == (
        "step 90..120, 2.50 steps/s, 10.0 MB/s, 4.5 MB, 7.0 GB left, waited 3.2 s (longest 1.0 s), dropped pool_full=12"
    )
    assert [re.sub(r"for \d+ s", "for a while", " ".join(line.split())) for line in ranks] == [
        "0 recording 120 2.50 5.0 .......... 0% 0.0 s 0 1.5 MB 7.0 GB",
        "1 recording 118 2.50 5.0 ####...... 43% 3.2 s pool_full=12 1.5 MB 7.0 GB",
        "2 silent for a while 90 - - - 0.0 s 0 1.5 MB 7.0 GB",
    ]


def test_json_has_every_number_and_its_unit(cli: Cli, run: Path) -> None:
    found = cli("top", "--json", run.parent).json
    assert (found["world_size"], found["is_over"], found["states"]) == (4, False, {"silent": 1, "recording": 2})
    rank = found["ranks"][1]
    assert (rank["rank"], rank["step"], rank["steps_per_s"], rank["bytes_per_s"]) == (1, 118, 2.5, 5e6)
    assert (rank["dropped"], rank["waited_s"], rank["pool_used_bytes"]) == ({"pool_full": 12}, 3.2, 430)


def test_a_run_without_trouble_is_no_finding(cli: Cli, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    assert cli("top", run).exit_code == 0
    assert "no rank has begun yet" in cli("top", run).out
    show(run, 0, state="closed")
    assert cli("top", run).exit_code == 0
    show(run, 1, state="failed")
    assert cli("top", run).exit_code == 1


def test_of_a_folder_of_several_runs_the_newest_is_watched_as_everywhere(cli: Cli, run: Path) -> None:
    make_run(run.parent / "run-b", created_ns=2)
    result = cli("top", run.parent)
    assert result.out.startswith("run-b: ") and "took run-b, the newest of 2 runs" in result.err
    assert cli("top", run.parent / "nowhere").exit_code == 2


def test_where_ranks_do_not_fit_the_worst_and_slowest_stay_and_the_rest_are_counted(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", world_size=64)
    for rank in range(64):
        show(run, rank, step=1000 + rank, **RATES)
    show(run, 40, step=1040, age_s=60)
    show(run, 50, step=1050, dropped={"pool_full": 1}, **RATES)
    show(run, 60, step=3, **RATES)
    ranks = RunWatch(run).look()
    table = listing._table(run.name, ranks, 64, 6)
    assert [row[0] for row in table.rows] == ["40", "50", "60", "0", "1", "..."]
    assert table.rows[-1][:3] == ["...", "59 more: 59 recording", "1002..1063"]
    assert [row[0] for row in listing._table(run.name, ranks, 64, 64).rows] == [str(rank) for rank in range(64)]


def test_hostile_text_reaches_no_terminal(cli: Cli, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run\x1b[31m")
    show(run, 0, dropped={"\x1b]0;owned\x07[bold]": 3}, host="\x1b[2J", state="\x1b[5m")
    result = cli("top", run)
    assert "\x1b" not in result.out and "\x07" not in result.out
    assert "\\x1b]0;owned\\x07[bold]=3" in result.out
    assert "\\x1b]0;owned" in on_a_terminal("top", "--once", str(run), is_plain=True).replace("\n", "")


def test_a_terminal_follows_a_run_until_it_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "run", world_size=2)
    monkeypatch.setattr(listing, "_OVER_AFTER_S", 0.0)
    ticks = iter(range(100))

    def sleep(seconds: float) -> None:
        assert seconds == 1.0
        match next(ticks):
            case 0:
                show(run, 0, step=1)
            case 1:
                show(run, 1, step=2)
            case 2:
                show(run, 0, state="closed", step=10)
            case 3:
                show(run, 1, state="closed", step=11)

    top = RanksTop(run, "run", 2)
    follow(LiveTable(lambda max_rows: top.tables(max_rows, sleep)))
    assert [one.status.step for one in top.ranks] == [10, 11]
    assert next(ticks) in (4, 5)
    assert "2 of 2 ranks: 2 closed" in capsys.readouterr().out


def test_ctrl_c_leaves_the_last_picture_and_no_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run")
    show(run, 0)

    def sleep(seconds: float) -> None:
        raise KeyboardInterrupt

    top = RanksTop(run, "run", 1)
    follow(LiveTable(lambda max_rows: top.tables(max_rows, sleep)))
    assert [one.rank for one in top.ranks] == [0]
    assert "1 recording" in capsys.readouterr().out


def test_a_run_that_was_over_is_shown_once_on_a_terminal(run: Path) -> None:
    for rank in range(3):
        show(run, rank, state="closed", step=7)
    shown = on_a_terminal("top", str(run), is_plain=True)
    assert "run-a: 3 of 4 ranks: 3 closed" in shown


def test_thousands_of_ranks_are_looked_at_in_less_than_two_seconds(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", world_size=4096)
    for rank in range(4096):
        show(run, rank, **RATES)
    watch = RunWatch(run)
    watch.look()
    began_s = os.times()
    ranks = watch.look()
    fitted(listing._table(run.name, ranks, 4096, 40), 120)
    ended_s = os.times()
    assert len(ranks) == 4096
    assert ended_s.user + ended_s.system - began_s.user - began_s.system < 2.0


def test_statuses_that_change_while_they_are_read_are_never_torn_for_people(tmp_path: Path) -> None:
    """A writer rewrites in place as fast as it can; every look finds one of its statuses, whole."""
    from recorder.write.file import Disk
    from recorder.write.manifest import StatusFile

    run = make_run(tmp_path / "run")
    path = show(run, 0, step=0)
    path.unlink()
    file, is_over = StatusFile(Disk(), lambda: 0.0), threading.Event()

    def write_step(step: int) -> None:
        file.write(path.parent, {"step": step, "observed": step, "written": step}, written_bytes=step)

    def write() -> None:
        step = 1
        while not is_over.is_set():
            step += 1
            write_step(step)

    write_step(1)  # a directory without a file of a writer is none
    thread = threading.Thread(target=write)
    thread.start()
    watch, seen = RunWatch(run), []
    try:
        for _ in range(200):
            (now,) = watch.look()
            assert now.status.step == now.status.observed == now.status.written == now.status.written_bytes
            seen.append(now.status.step)
    finally:
        is_over.set()
        thread.join()
    assert seen == sorted(seen) and seen[-1] > 0


def test_a_narrow_terminal_keeps_rank_state_and_step(run: Path) -> None:
    console = Console(width=40, record=True, file=io.StringIO())
    for piece in fitted(listing._table(run.name, RunWatch(run).look(), 4, 10), 40):
        console.print(piece)
    text = console.export_text()
    assert "recording" in text and "118" in text and "left out" in text
