"""However a process ends: as it would have without the recorder, and what it had is on disk or known to be lost."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from recorder.config import Settings
from tests.rigs.jobs import Finished

from .ends import Trainer, Training

Twins = Callable[..., tuple[Training, Training]]
LIMITS = ("memory.limit_in_bytes", "memory.max")
SIGNALS = ("SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")


@pytest.fixture
def twins(trainer: Trainer, tmp_path: Path) -> Twins:
    """Starts a case without and with the recorder, side by side."""

    def start(**case: object) -> tuple[Training, Training]:
        return trainer.start(tmp_path / "off", **{**case, "record": False}), trainer.start(tmp_path / "on", **case)

    return start


@pytest.fixture(scope="module")
def rows_of_a_step(trainer: Trainer, tmp_path_factory: pytest.TempPathFactory) -> int:
    finished = trainer.start(tmp_path_factory.mktemp("normal") / "on", end="normal").wait()
    sizes = set(finished.run.to_pandas(columns=["step"]).groupby("step").size())
    assert len(sizes) == 1
    return int(sizes.pop())


def said(finished: Finished) -> list[str]:
    """What the program said, without the closing lines of the recorder."""
    dumped = ("recorder: ", "Stack (most recent call first)", "  File ")
    return [line for line in finished.output.splitlines() if line and not line.startswith(dumped)]


def assert_readable(finished: Finished) -> None:
    """What was committed is there, and what is not is accounted for or known to be missing."""
    assert finished.lines("Exception ignored") == finished.lines("Traceback", "recorder") == []
    for writer in finished.run.writers:
        balance = writer.balance
        assert balance.written == writer.num_rows
        assert balance.num_missing >= 0
        assert writer.state in ("closed", "unclosed")
    assert finished.run.problems == []


def assert_steps(finished: Finished, num_steps: int, rows_of_a_step: int) -> None:
    assert_readable(finished)
    rows = finished.run.to_pandas(columns=["step"]).groupby("step").size()
    assert list(rows[rows.index < num_steps]) == [rows_of_a_step] * num_steps


@pytest.mark.parametrize(
    ("end", "code"), [("normal", 0), ("exception", 1), ("sys_exit", 3), ("no memory", 1)], ids=lambda value: str(value)
)
def test_an_end_by_the_program_itself_leaves_every_row(twins: Twins, rows_of_a_step: int, end: str, code: int) -> None:
    without, recorded = (training.wait() for training in twins(end=end))
    assert recorded.returncode == without.returncode == code
    assert recorded.lines("Fatal Python error") == []
    assert said(recorded) == said(without)
    assert_steps(recorded, 20, rows_of_a_step)
    assert [writer.state for writer in recorded.run.writers] == ["closed"]
    assert bool(recorded.run.exceptions) == (code == 1), "the recording knows of an exception that ended the program"


@pytest.mark.parametrize(
    ("end", "code", "rest_s"),
    [
        ("os_exit", 4, 0.4),
        ("os_exit", 4, 0.0),
        ("abort", -6, 0.4),
        ("terminate", -6, 0.4),
        ("segfault", -11, 0.4),
        ("killed", -9, 0.0),
    ],
)
def test_a_sudden_end_leaves_what_was_flushed(
    twins: Twins, rows_of_a_step: int, end: str, code: int, rest_s: float
) -> None:
    without, recorded = (training.wait() for training in twins(end=end, rest_s=rest_s))
    assert recorded.returncode == without.returncode == code
    assert said(recorded) == said(without)
    if rest_s:
        assert_steps(recorded, 20, rows_of_a_step)
        assert [writer.balance.num_missing for writer in recorded.run.writers] == [0]
    elif recorded.run.writers:
        assert_readable(recorded)


@contextlib.contextmanager
def small_memory_group() -> Iterator[Path | None]:
    """A control group with 64 MiB of memory; None where none can be made."""
    mounts = Path("/sys/fs/cgroup")
    base = mounts / "memory" if (mounts / "memory").is_dir() else mounts
    group = base / f"recorder-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError:
        yield None
        return
    try:
        limit = next((group / name for name in LIMITS if (group / name).exists()), None)
        if limit is not None:
            limit.write_text(str(64 << 20))
        yield group if limit is not None else None
    finally:
        until_s = time.monotonic() + 5
        while group.exists() and time.monotonic() < until_s:
            with contextlib.suppress(OSError):
                group.rmdir()
            time.sleep(0.01)


def test_a_process_that_the_kernel_kills_for_its_memory_leaves_what_was_flushed(
    trainer: Trainer, tmp_path: Path, rows_of_a_step: int
) -> None:
    with small_memory_group() as group:
        training = trainer.start(tmp_path / "on", end="out of memory", rest_s=0.4).until(lambda text: "!" in text)
        if group is not None:
            (group / "cgroup.procs").write_text(str(training.pid))
            (training.folder / "go").touch()
        else:
            training.send(signal.SIGKILL)  # what the kernel sends
        finished = training.wait()
    assert finished.returncode == -signal.SIGKILL
    assert_steps(finished, 20, rows_of_a_step)


@pytest.mark.parametrize("name", SIGNALS)
def test_a_signal_without_a_handler_ends_the_process_with_every_row_on_disk(
    twins: Twins, rows_of_a_step: int, name: str
) -> None:
    number = signal.Signals[name]
    pair = twins(end="never", shows=True)
    without, recorded = (training.until(lambda text: len(text) > 30).send(number).wait() for training in pair)
    assert recorded.returncode == without.returncode == -number
    assert said(recorded) == said(without)
    assert_steps(recorded, len(pair[1].progress), rows_of_a_step)
    assert [writer.state for writer in recorded.run.writers] == ["closed"]
    assert set(recorded.run.writers[0].balance.dropped) <= {"closed", "interrupted"}


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize(
    ("kind", "name"), [("sys_exit", "SIGTERM"), ("os_exit", "SIGHUP"), ("default", "SIGTERM"), ("default", "SIGUSR1")]
)
def test_a_handler_of_the_user_ends_the_process_its_own_way(
    twins: Twins, rows_of_a_step: int, moment: str, kind: str, name: str
) -> None:
    number = signal.Signals[name]
    pair = twins(end="never", signal=name, shows=True, **{moment: kind})
    for training in pair:
        training.until(lambda text: len(text) > 30).send(number)
    without, recorded = (training.wait() for training in pair)
    assert recorded.returncode == without.returncode == {"sys_exit": 5, "os_exit": 6, "default": -number}[kind]
    assert said(recorded) == said(without)
    assert_readable(recorded)
    if kind == "sys_exit":
        assert_steps(recorded, pair[1].progress.count("."), rows_of_a_step)


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("kind", ["chain", "ignore", "faulthandler"])
def test_a_signal_that_ends_nothing_ends_nothing_under_the_recorder(
    twins: Twins, rows_of_a_step: int, moment: str, kind: str
) -> None:
    pair = twins(end="goes on", shows=True, **{moment: kind})
    for training in pair:
        training.until(lambda text: len(text) > 30).send(signal.SIGUSR1)
        num_steps = len(training.progress)
        training.until(lambda text, least=num_steps + 30: len(text) > least)  # type: ignore[misc]
        (training.folder / "enough").touch()
    without, recorded = (training.wait() for training in pair)
    assert recorded.returncode == without.returncode == 0
    assert said(recorded) == said(without)
    dumps = [training.lines("Stack (most recent call first)") for training in (recorded, without)]
    assert len(dumps[0]) == len(dumps[1]) == (kind == "faulthandler")
    assert_steps(recorded, pair[1].progress.count("."), rows_of_a_step)


def test_a_handler_in_c_that_chains_ends_the_process_with_every_row(twins: Twins, rows_of_a_step: int) -> None:
    pair = twins(end="never", after="faulthandler chain")
    without, recorded = (t.until(lambda text: len(text) > 30).send(signal.SIGUSR1).wait() for t in pair)
    assert recorded.returncode == without.returncode == -signal.SIGUSR1
    assert recorded.lines("most recent call first") != []
    assert_steps(recorded, len(pair[1].progress), rows_of_a_step)


def test_a_handler_in_c_outlives_the_recording(trainer: Trainer, tmp_path: Path) -> None:
    training = trainer.start(tmp_path / "on", end="closed", after="faulthandler").until(lambda text: "!" in text)
    training.send(signal.SIGUSR1)
    num_steps = len(training.progress)
    training.until(lambda text: len(text) > num_steps + 30)
    assert training.send(signal.SIGKILL).wait().lines("most recent call first") != []


def test_a_second_interrupt_costs_no_row_and_a_third_ends_the_wait(
    trainer: Trainer, tmp_path: Path, rows_of_a_step: int
) -> None:
    case = {"end": "normal", "settings": {"flush_interval_s": 3600, "close_deadline_s": 20}}
    patient = trainer.start(tmp_path / "patient", **case, slow_s=0.2).until(lambda text: len(text) >= 20)
    time.sleep(0.2)
    finished = patient.send(signal.SIGINT).wait()
    assert finished.lines("Exception ignored") == finished.lines("Traceback") == []
    assert_steps(finished, 20, rows_of_a_step)
    impatient = trainer.start(tmp_path / "impatient", **case, stalls="write").until(lambda text: len(text) >= 20)
    began_s = time.monotonic()
    for _ in range(2):
        time.sleep(0.4)
        impatient.send(signal.SIGINT)
    finished = impatient.wait()
    assert time.monotonic() - began_s < 20
    assert finished.lines("Exception ignored") == finished.lines("Traceback") == []
    assert len(finished.lines("what was not written yet is lost")) == 1


@pytest.mark.parametrize("end", ["normal", "attached"])
def test_however_often_it_is_interrupted_the_ledger_is_closed(trainer: Trainer, tmp_path: Path, end: str) -> None:
    case = {"end": end, "settings": {"flush_interval_s": 3600, "close_deadline_s": 20}, "slow_s": 0.2}
    training = trainer.start(tmp_path / "on", **case).until(lambda text: len(text) >= 20)
    for _ in range(5):
        time.sleep(0.02)
        training.send(signal.SIGINT)
    finished = training.wait()
    (writer,) = finished.run.writers
    assert (writer.state, writer.balance.num_missing) == ("closed", 0), finished.output
    assert writer.balance.written == writer.num_rows > 0
    assert finished.lines("what was not written yet is lost") == finished.run.problems == []


def last_words(finished: Finished) -> list[int]:
    """How often each of the two closing lines was said."""
    return [len(finished.lines("recorder: ", sign)) for sign in (", up to step ", "recorder: next: ")]


@pytest.mark.parametrize("num_signals", [1, 3])
def test_a_signal_that_arrives_while_the_recording_ends_does_not_cost_the_last_words(
    trainer: Trainer, tmp_path: Path, rows_of_a_step: int, num_signals: int
) -> None:
    """As torchrun does to a rank that has met an error of its peer."""
    case = {"end": "exception", "settings": {"flush_interval_s": 3600, "close_deadline_s": 20}, "slow_s": 0.2}
    training = trainer.start(tmp_path / "on", **case).until(lambda text: len(text) >= 20)
    until_s = time.monotonic() + 20
    while "ArithmeticError" not in training.output:
        assert time.monotonic() < until_s
        time.sleep(0.005)
    time.sleep(0.2)
    assert "recorder: next:" not in training.output, "the end is under way"
    for _ in range(num_signals):
        training.send(signal.SIGTERM)
        time.sleep(0.02)
    finished = training.wait()
    assert finished.returncode == -signal.SIGTERM
    assert last_words(finished) == [1, 1], finished.output
    assert_steps(finished, 20, rows_of_a_step)


@pytest.mark.parametrize("end", ["stuck", "never"])
def test_a_signal_has_the_last_words_said_once_whichever_thread_ends_the_process(
    trainer: Trainer, tmp_path: Path, end: str
) -> None:
    training = trainer.start(tmp_path / "on", end=end).until(lambda text: len(text) > 20)
    time.sleep(0.3)
    finished = training.send(signal.SIGTERM).send(signal.SIGTERM).wait()
    assert finished.returncode == -signal.SIGTERM
    assert last_words(finished) == [1, 1], finished.output


def test_a_signal_that_the_program_blocks_waits_until_it_does_not(twins: Twins, rows_of_a_step: int) -> None:
    pair = twins(end="blocked")
    without, recorded = (training.wait() for training in pair)
    assert recorded.returncode == without.returncode == -signal.SIGTERM
    assert said(recorded) == said(without) == ["saved"]
    assert_steps(recorded, 40, rows_of_a_step)
    assert recorded.run.writers[0].state == "closed"


def test_a_closed_recording_leaves_no_thread_and_no_handler(twins: Twins) -> None:
    pair = twins(end="closed")
    without, recorded = (t.until(lambda text: "!" in text).send(signal.SIGTERM).wait() for t in pair)
    assert recorded.returncode == without.returncode == -signal.SIGTERM
    assert said(recorded) == said(without)


def test_an_event_loop_keeps_its_signals(twins: Twins) -> None:
    without, recorded = (training.wait() for training in twins(end="wakeup"))
    assert recorded.returncode == without.returncode == 0, recorded.output
    assert said(recorded) == said(without) == ["wakeup -1"]


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR2"])
def test_a_main_thread_that_is_stuck_in_c_does_not_keep_the_rows(twins: Twins, rows_of_a_step: int, name: str) -> None:
    number = signal.Signals[name]
    pair = twins(end="stuck")
    for training in pair:
        training.until(lambda text: text.endswith("!"))
    time.sleep(0.3)
    for training in pair:
        training.send(number)
    sent_s = time.monotonic()
    without, recorded = (training.wait() for training in pair)
    assert time.monotonic() - sent_s < 20
    assert recorded.returncode == without.returncode == -number
    assert_steps(recorded, 20, rows_of_a_step)
    assert [writer.state for writer in recorded.run.writers] == ["closed"]


def test_with_a_handler_of_the_user_a_stuck_main_thread_has_its_rows_flushed_before_it_is_killed(
    trainer: Trainer, tmp_path: Path, rows_of_a_step: int
) -> None:
    """As a preemption goes: SIGTERM to all, SIGKILL to those who are still there."""
    case = {"end": "stuck", "before": "sys_exit", "signal": "SIGTERM", "settings": {"flush_interval_s": 3600}}
    training = trainer.start(tmp_path / "on", **case).until(lambda text: text.endswith("!"))
    time.sleep(0.3)
    training.send(signal.SIGTERM)
    time.sleep(1.0)
    killed = training.send(signal.SIGKILL).wait()
    assert killed.returncode == -signal.SIGKILL
    assert_steps(killed, 20, rows_of_a_step)


def test_a_rank_that_waits_in_a_collective_for_ever_keeps_its_rows(
    trainer: Trainer, tmp_path: Path, rows_of_a_step: int
) -> None:
    case = {"end": "all_reduce", "store": str(tmp_path / "store")}
    ranks = [trainer.start(tmp_path / str(rank), **case, rank=rank) for rank in (0, 1)]
    for rank in ranks:
        rank.until(lambda text: text.endswith("!"))
    time.sleep(0.3)
    stuck = ranks[0].send(signal.SIGTERM).wait()
    ranks[1].send(signal.SIGKILL).wait()
    assert stuck.returncode == -signal.SIGTERM
    assert_steps(stuck, 20, rows_of_a_step)
    assert [writer.state for writer in stuck.run.writers] == ["closed"]


@pytest.mark.parametrize("method", ["write", "sync", "close"])
def test_a_disk_that_is_gone_holds_the_end_no_longer_than_the_deadline_and_the_loss_is_said(
    trainer: Trainer, tmp_path: Path, method: str
) -> None:
    assert Settings().close_deadline_s == 5
    case = {"stalls": method, "settings": {"close_deadline_s": 1.0, "wait_s_per_step": 0.1}}
    ends = [trainer.start(tmp_path / end, **case, end=end) for end in ("exception", "never")]
    ends[1].until(lambda text: len(text) > 25).send(signal.SIGTERM)
    began_s = time.monotonic()
    finished = [training.wait() for training in ends]
    assert time.monotonic() - began_s < 20
    assert [one.returncode for one in finished] == [1, -signal.SIGTERM]
    for one in finished:
        assert one.lines("Fatal Python error") == []
        assert len(one.lines("the recording is incomplete")) == 1, one.output
        assert_readable(one)


def test_a_process_stuck_in_a_collective_on_a_disk_that_is_gone_still_goes(trainer: Trainer, tmp_path: Path) -> None:
    case = {"end": "stuck", "stalls": "sync", "settings": {"close_deadline_s": 1.0}}
    training = trainer.start(tmp_path / "on", **case).until(lambda text: text.endswith("!"))
    time.sleep(0.3)
    began_s = time.monotonic()
    finished = training.send(signal.SIGTERM).send(signal.SIGTERM).wait()
    assert time.monotonic() - began_s < 20
    assert finished.returncode == -signal.SIGTERM


def test_a_handler_that_goes_on_is_not_held_up_by_a_slow_disk(trainer: Trainer, tmp_path: Path) -> None:
    training = trainer.start(tmp_path / "on", end="goes on", before="chain", stalls="sync", settings={
        "close_deadline_s": 1.0
    }).until(lambda text: len(text) > 30)  # fmt: skip
    training.send(signal.SIGUSR1).until(lambda text: "h" in text)
    (training.folder / "enough").touch()
    assert "done" in said(training.wait())
