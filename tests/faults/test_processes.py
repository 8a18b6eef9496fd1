"""Forks, workers and interrupts beside a recording: a child records nothing and waits for nothing, nobody deadlocks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import recorder
from tests.rigs.jobs import Finished

from .ends import Trainer


def run(trainer: Trainer, tmp_path: Path, name: str, **settings: Any) -> Finished:
    finished = trainer.start(tmp_path / "on", end="program", name=name, settings=settings).wait()
    assert finished.returncode == 0, finished.output
    for sign in ("Fatal Python error", "Exception ignored", "Traceback"):
        assert finished.lines(sign) == [], finished.output
    return finished


def said(finished: Finished) -> list[str]:
    return [line for line in finished.output.splitlines() if not line.startswith("recorder: ")]


def assert_one_writer(finished: Finished, num_steps: int, *, dropped: set[str] = frozenset()) -> None:  # type: ignore[assignment]
    """The parent's, whole, with one call of the model a step."""
    (writer,) = finished.run.writers
    balance = writer.balance
    assert writer.state == "closed"
    assert set(balance.dropped) <= dropped
    assert balance.num_missing == 0 and balance.written == writer.num_rows
    assert balance.observed == balance.written + sum(balance.dropped.values())
    assert finished.run.problems == []
    frame = finished.run.to_pandas(columns=["seq", "step", "module_path", "site", "call"])
    assert frame["seq"].is_unique
    outputs = frame[(frame["module_path"] == "0") & (frame["site"] == "output")]
    assert list(zip(outputs["step"], outputs["call"], strict=True)) == [(step, 0) for step in range(num_steps)]


def test_workers_that_call_the_recorded_model_record_nothing_over_many_epochs(trainer: Trainer, tmp_path: Path) -> None:
    finished = run(trainer, tmp_path, "loaders", flush_interval_s=0.01)
    assert_one_writer(finished, 5 * 2 * 3)
    assert "of a worker" not in set(finished.run.to_pandas(columns=["name"])["name"])


def test_children_of_the_user_end_as_they_would_and_touch_no_file_of_the_parent(
    trainer: Trainer, tmp_path: Path
) -> None:
    finished = run(trainer, tmp_path, "forks", flush_interval_s=0.01)
    assert said(finished) == ["exit 0", "_exit 7", "exception 1", "grandchild 8", "attach 0", "flush 0"]
    assert_one_writer(finished, 5 + 6)
    of_child = recorder.open_run(finished.folder / "of_child")
    assert [writer.state for writer in of_child.writers] == ["closed"]
    assert of_child.steps == [0, 1, 2]


def test_a_signal_to_a_child_that_has_just_begun_never_ends_the_parent(trainer: Trainer, tmp_path: Path) -> None:
    finished = run(trainer, tmp_path, "forks_and_signals")
    assert said(finished) == ["True"]
    assert_one_writer(finished, 60)


def test_a_child_waits_for_no_lock_that_another_thread_held(trainer: Trainer, tmp_path: Path) -> None:
    finished = run(trainer, tmp_path, "threads_and_forks", policy="drop")
    (writer,) = finished.run.writers
    balance = writer.balance
    assert balance.observed == balance.written + sum(balance.dropped.values()) > 40
    assert "of a child" not in set(finished.run.to_pandas(columns=["name"])["name"])


def test_handlers_finalizers_and_collector_callbacks_that_record_never_deadlock(
    trainer: Trainer, tmp_path: Path
) -> None:
    finished = run(trainer, tmp_path, "interrupts", flush_interval_s=0.01)
    assert said(finished) == ["done"]
    (writer,) = finished.run.writers
    balance = writer.balance
    assert writer.state == "closed"
    assert balance.written == writer.num_rows
    assert balance.observed == balance.written + sum(balance.dropped.values())
    frame = finished.run.to_pandas(columns=["seq", "name"])
    assert frame["seq"].is_unique
    assert {"of the handler", "of a finalizer", "of the collector"} <= set(frame["name"])


def test_attaching_again_and_again_leaves_no_thread_descriptor_or_hook(trainer: Trainer, tmp_path: Path) -> None:
    finished = run(trainer, tmp_path, "cycles")
    assert said(finished) == ["1", "True"]
    assert len(finished.run.writers) == 13
    assert [writer.state for writer in finished.run.writers] == ["closed"] * 13


@pytest.mark.parametrize(("name", "word"), [("small_memory", "memory"), ("no_threads", "thread")])
def test_a_recording_that_cannot_start_is_said_and_training_goes_on(
    trainer: Trainer, tmp_path: Path, name: str, word: str
) -> None:
    finished = run(trainer, tmp_path, name, pool_bytes=1 << 30)
    (problem,) = finished.lines("recorder: not recording")
    assert word in problem
    (last,) = said(finished)
    assert last in ("None ['MainThread']", "[True, True] -1")


def test_a_program_that_closes_all_descriptors_finds_nothing_of_ours_in_the_files_it_opens_then(
    trainer: Trainer, tmp_path: Path
) -> None:
    settings = {"flush_interval_s": 0.02, "sync_interval_s": 0.05, "status_interval_s": 0.05, "wait_s_per_step": 0.1}
    finished = run(trainer, tmp_path, "closes_descriptors", **settings)
    assert said(finished) == ["True", "True"]
    assert {path.read_text() for path in finished.folder.glob("file.*")} == {"mine"}
    (writer,) = finished.run.writers
    balance = writer.balance
    assert writer.state == "closed"
    assert balance.num_missing == 0
    assert balance.observed == balance.written + sum(balance.dropped.values())
    assert finished.run.problems == []
    assert finished.run.to_pandas(columns=["step"])["step"].max() == 79, "another shard has what came later"
    status = json.loads((writer.directory / "_status.json").read_bytes().rstrip(b" \n\0"))
    assert status["state"] == "closed"
