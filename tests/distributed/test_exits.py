"""A training that ends badly, as its user sees it; `tests.faults.test_ends` has each way in which a process may end."""

from __future__ import annotations

from pathlib import Path

from tests.rigs import jobs
from tests.rigs.jobs import SCRIPTS, Finished

LOOP = SCRIPTS / "loop.py"
ROWS_OF_A_STEP = 36
"""Of the loop's model under a rule that selects everything, with the loss that is found."""


def progress(folder: Path, rank: int = 0) -> str:
    path = folder / f"progress.{rank}.0"
    return path.read_text() if path.exists() else ""


def assert_all_steps_are_written(finished: Finished, num_steps: int, rank: int = 0) -> None:
    frame = finished.run.to_pandas(columns=["rank", "step", "seq"])
    rows = frame[frame["rank"] == rank].groupby("step").size()
    assert list(rows[rows.index < num_steps]) == [ROWS_OF_A_STEP] * num_steps


def assert_balanced(finished: Finished, *, dropped: set[str], num_lost_at_kill: int = 0) -> None:
    for writer in finished.run.writers:
        balance = writer.balance
        assert set(balance.dropped) <= dropped
        assert 0 <= balance.num_missing <= num_lost_at_kill
        assert balance.written == writer.num_rows
    assert finished.run.problems == []


def assert_quiet(finished: Finished) -> None:
    for sign in ("Fatal Python error", "Exception ignored", "core dumped"):
        assert finished.lines(sign) == []


def test_the_traceback_of_an_exception_has_no_frame_of_ours(tmp_path: Path) -> None:
    on = jobs.python(tmp_path, LOOP, "--end=exception", **jobs.recording()).wait()
    assert on.returncode == 1
    assert on.said.splitlines()[-1:] == ["ArithmeticError: the end that was asked for"]
    assert_quiet(on)
    rooms = ("capture", "lifecycle", "observe", "taps")
    assert [line for room in rooms for line in on.lines(f"recorder/{room}/")] == []
    assert_all_steps_are_written(on, 20)


def test_a_healthy_rank_that_torchrun_ends_keeps_what_it_had(tmp_path: Path) -> None:
    recorded = jobs.torchrun(tmp_path, LOOP, "--end=exception", "--rank=1", **jobs.recording()).wait()
    assert recorded.returncode == 1  # torchrun's own for a rank that failed
    assert len(recorded.lines("ArithmeticError: the end that was asked for")) > 0
    assert_quiet(recorded)
    assert recorded.run.ranks == [0, 1]
    assert_all_steps_are_written(recorded, len(progress(recorded.folder, 0)), rank=0)
    assert_all_steps_are_written(recorded, 20, rank=1)
    assert_balanced(recorded, dropped={"interrupted"}, num_lost_at_kill=1)
