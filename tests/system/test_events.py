"""What a person is told while training goes on: a few lines of each kind, then how many more there were."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from recorder.capture.staging import copies
from recorder.system.log import Events
from tests.rigs.capturing import flagged


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record.getMessage() for record in caplog.records if record.name == "recorder"]
    caplog.clear()
    return found


def test_of_a_thousand_failures_a_few_are_said_and_the_rest_counted(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    events = Events(clock)
    for number in range(1000):
        events.add("hook_error", f"recording layers.{number} failed", key=str(number))
        if number % 7 == 0:
            events.say()
    events.say()
    assert lines(caplog) == [f"recording layers.{number} failed" for number in range(5)]
    clock.now_s += 301
    events.say()
    assert lines(caplog) == ["and 995 more of this kind (hook_error); recorder doctor lists them"]
    events.say(is_last=True)
    assert lines(caplog) == []
    kept = events.as_list()
    assert len(kept) == 101
    assert sum(event["count"] for event in kept) == 1000


def test_one_kind_does_not_silence_another(caplog: pytest.LogCaptureFixture) -> None:
    events = Events(Clock())
    for number in range(500):
        events.add("hook_error", "failed", key=str(number))
    events.add("pool_full", "the pool is full")
    events.say(is_last=True)
    assert lines(caplog)[-2:] == [
        "the pool is full",
        "and 495 more of this kind (hook_error); recorder doctor lists them",
    ]


def test_after_five_minutes_a_kind_is_heard_again(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    events = Events(clock)
    for round_ in range(2):
        for number in range(8):
            events.add("hook_error", f"failed {round_} {number}", key=f"{round_} {number}")
        events.say()
        clock.now_s += 301
    events.say()
    said = lines(caplog)
    assert said[5] == said[11] == "and 3 more of this kind (hook_error); recorder doctor lists them"
    assert said[6] == "failed 1 0" and len(said) == 12


def test_the_same_event_again_is_counted_and_not_said_again(caplog: pytest.LogCaptureFixture) -> None:
    events = Events(Clock())
    for _ in range(50):
        events.add("unsupported", "meta tensors have no values", key="meta")
    events.say(is_last=True)
    assert lines(caplog) == ["meta tensors have no values"]
    assert [event["count"] for event in events.as_list()] == [50]


def test_what_a_full_pipe_does_not_take_is_said_once_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    os.set_blocking(reader, False)
    events = Events(Clock())
    with open(reader, "rb", buffering=0) as incoming, open(writer, "w", buffering=1) as full:
        monkeypatch.setattr(sys, "stderr", full)
        while True:
            try:
                os.write(writer, b"x" * 4096)
            except BlockingIOError:
                break
        events.add("pool_full", "the pool is full")
        events.say()  # it would raise, for the pipe does not block here
        assert incoming.read(1 << 20) is not None
        events.say()
        assert incoming.read(1 << 20) == b"recorder: the pool is full\n"


def test_training_with_a_thousand_failing_modules_goes_on_and_says_so_in_a_few_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(self: object, local: torch.Tensor, block: object) -> None:
        raise RuntimeError("no copy today")

    monkeypatch.setattr(copies.HostStager, "copy", refuse)
    model = nn.Sequential(*(nn.Identity() for _ in range(1000)), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with flagged(tmp_path, "site=output keep=stats") as recording:
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
    said = [line for line in lines(caplog) if "hook_error" in line or "no copy today" in line]
    assert len(said) == 6
    assert said[-1].startswith("and ") and "recorder doctor lists them" in said[-1]
    (writer,) = recording.run.writers
    assert writer.balance.dropped == {"hook_error": 2 * 1002}
    assert (
        sum(event["count"] for event in writer.manifest.members["events"] if event["kind"] == "hook_error") == 2 * 1002
    )
