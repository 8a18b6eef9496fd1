"""However a process ends: the same exit code as without the recorder, what was observed is on disk, and no hang."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from . import jobs
from .jobs import SCRIPTS, Finished, Job

LOOP = SCRIPTS / "loop.py"
ROWS_OF_A_STEP = 35
"""Of the loop's model under a rule that selects everything."""
Pair = Callable[..., tuple[Job, Job]]


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    """Starts the same job without and with the recorder, side by side."""
    started: list[Job] = []

    def start(*arguments: str, launch: Callable[..., Job] = jobs.python, **settings: str) -> tuple[Job, Job]:
        off = launch(tmp_path / "off", LOOP, *arguments)
        on = launch(tmp_path / "on", LOOP, *arguments, **jobs.recording(), **settings)
        started.extend((off, on))
        return off, on

    yield start
    for job in started:
        job.kill()


def progress(folder: Path, rank: int = 0) -> str:
    path = folder / f"progress.{rank}.0"
    return path.read_text() if path.exists() else ""


def wait_until(job: Job, is_so: Callable[[str], bool]) -> None:
    until = time.monotonic() + jobs.DEADLINE_S
    while not is_so(progress(job.folder)):
        assert job.process.poll() is None and time.monotonic() < until, job.wait(0.1).output
        time.sleep(0.02)


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


@pytest.mark.parametrize(
    ("end", "returncode", "last_words"),
    [("normal", 0, ["done"]), ("sys_exit", 3, []), ("exception", 1, ["ArithmeticError: the end that was asked for"])],
)
def test_a_process_that_ends_by_itself_leaves_every_row(
    tmp_path: Path, end: str, returncode: int, last_words: list[str]
) -> None:
    on = jobs.python(tmp_path, LOOP, f"--end={end}", **jobs.recording()).wait()
    assert on.returncode == returncode
    assert on.output.splitlines()[-1:] == last_words
    assert_quiet(on)
    ours = [*on.lines("recorder/capture/"), *on.lines("recorder/recorder.py")]
    assert ours == [], "no frame of ours in a traceback"
    assert_all_steps_are_written(on, 20)
    assert_balanced(on, dropped=set())
    assert [writer.state for writer in on.run.writers] == ["closed"]


def test_sigint_is_a_keyboard_interrupt_and_leaves_every_row(pair: Pair) -> None:
    off, on = pair("--end=never")
    for job in (off, on):
        wait_until(job, lambda text: len(text) > 30)
        job.process.send_signal(signal.SIGINT)
    without, recorded = off.wait(), on.wait()
    assert recorded.returncode == without.returncode == -signal.SIGINT
    assert_quiet(recorded)
    assert recorded.lines("KeyboardInterrupt") == without.lines("KeyboardInterrupt")
    assert_all_steps_are_written(recorded, len(progress(on.folder)))
    assert_balanced(recorded, dropped={"interrupted"})
    assert [writer.state for writer in recorded.run.writers] == ["closed"]


def test_sigterm_ends_the_process_as_it_would_have_with_every_row_on_disk(pair: Pair) -> None:
    off, on = pair("--end=never")
    for job in (off, on):
        wait_until(job, lambda text: len(text) > 30)
        job.process.send_signal(signal.SIGTERM)
    without, recorded = off.wait(), on.wait()
    assert recorded.returncode == without.returncode == -signal.SIGTERM
    assert recorded.output == without.output == ""
    assert_all_steps_are_written(recorded, len(progress(on.folder)))
    assert_balanced(recorded, dropped=set(), num_lost_at_kill=1)


def test_a_sigterm_handler_of_the_user_does_what_it_did(pair: Pair) -> None:
    off, on = pair("--end=never", "--handler")
    for job in (off, on):
        wait_until(job, lambda text: len(text) > 30)
        job.process.send_signal(signal.SIGTERM)
    without, recorded = off.wait(), on.wait()
    assert recorded.returncode == without.returncode == 5
    assert recorded.output == without.output == ""
    assert_all_steps_are_written(recorded, len(progress(on.folder)))
    assert_balanced(recorded, dropped={"interrupted"})
    assert [writer.state for writer in recorded.run.writers] == ["closed"]


def test_sigterm_ends_a_process_whose_main_thread_is_stuck_in_c(pair: Pair) -> None:
    off, on = pair("--end=stuck")
    for job in (off, on):
        wait_until(job, lambda text: text.endswith("!"))
        time.sleep(0.2)
        job.process.send_signal(signal.SIGTERM)
    sent = time.monotonic()
    without, recorded = off.wait(), on.wait()
    assert time.monotonic() - sent < 10
    assert recorded.returncode == without.returncode == -signal.SIGTERM
    assert_quiet(recorded)
    assert_all_steps_are_written(recorded, 20)
    assert_balanced(recorded, dropped=set())


def test_a_killed_process_loses_no_more_than_the_last_moments(tmp_path: Path) -> None:
    job = jobs.python(tmp_path, LOOP, "--end=never", **jobs.recording())
    wait_until(job, lambda text: len(text) > 30)
    num_steps = len(progress(tmp_path))
    time.sleep(3)
    job.process.kill()
    killed = job.wait()
    assert killed.returncode == -signal.SIGKILL
    assert_all_steps_are_written(killed, num_steps)
    (writer,) = killed.run.writers
    assert writer.state == "unclosed"
    assert writer.balance.dropped == {}
    assert killed.run.problems == []


def test_a_healthy_rank_that_torchrun_ends_keeps_what_it_had(tmp_path: Path) -> None:
    arguments = (LOOP, "--end=exception", "--rank=1")
    without = jobs.torchrun(tmp_path / "off", *arguments).wait()
    recorded = jobs.torchrun(tmp_path / "on", *arguments, **jobs.recording()).wait()
    assert recorded.returncode == without.returncode == 1
    assert len(recorded.lines("ArithmeticError: the end that was asked for")) > 0
    assert_quiet(recorded)
    assert recorded.run.ranks == [0, 1]
    assert_all_steps_are_written(recorded, len(progress(recorded.folder, 0)), rank=0)
    assert_all_steps_are_written(recorded, 20, rank=1)
    assert_balanced(recorded, dropped={"interrupted"}, num_lost_at_kill=1)
