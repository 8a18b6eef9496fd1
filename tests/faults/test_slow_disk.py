"""A disk that is slow, stalls or fills up: training waits a bounded time, then values are dropped and counted."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from recorder.write.file import Disk
from tests.rigs.capturing import Recording, flagged

RULES = "site=output,grad keep=tensor"


class Wide(nn.Module):
    """64 KiB of outputs a layer, so that few steps fill a small pool."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def train(num_steps: int = 12) -> tuple[list[torch.Tensor], list[float]]:
    torch.manual_seed(0)
    model = Wide()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step_s = []
    for i in range(num_steps):
        began = time.monotonic()
        model(torch.randn(256, 64, generator=torch.Generator().manual_seed(i))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        step_s.append(time.monotonic() - began)
    return [p.detach().clone() for p in model.parameters()], step_s


def assert_balanced(recording: Recording) -> dict[str, int]:
    ledger = recording.manifest["ledger"]
    assert ledger["observed"] == ledger["written"] + sum(ledger["dropped"].values())
    assert len(recording.rows()) == ledger["written"]
    return dict(ledger["dropped"])


@pytest.fixture
def on_write(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Callable[[], None]], None]]:
    plain = Disk.write

    def replace(before: Callable[[], None]) -> None:
        def write(self: Disk, descriptor: int, data: memoryview, offset: int, *behind: memoryview) -> int:
            before()
            return plain(self, descriptor, data, offset, *behind)

        monkeypatch.setattr(Disk, "write", write)

    return replace  # type: ignore[return-value]


# A disk hangs for HANG_S: what waits for it in vain fails, and what a busy machine holds up for SLACK_S passes.
HANG_S = 60
SLACK_S = 10

SMALL: dict[str, Any] = {"pool_bytes": "1MiB", "flush_interval_s": 0.05}


def test_a_slow_disk_is_waited_for_and_nothing_is_lost(tmp_path: Path, on_write: Any) -> None:
    expected, _ = train()
    on_write(lambda: time.sleep(0.02))
    with flagged(tmp_path, RULES, **SMALL) as recording:
        actual, _ = train()
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    assert assert_balanced(recording) == {}
    assert recording.manifest["pool_peak_bytes"] > 400 << 10


def test_a_stalled_disk_holds_a_step_no_longer_than_configured_and_the_loss_is_counted(
    tmp_path: Path, on_write: Any, caplog: pytest.LogCaptureFixture
) -> None:
    expected, _ = train(60)
    gate = threading.Event()
    on_write(lambda: gate.wait(HANG_S))
    with flagged(tmp_path, RULES, **SMALL, wait_s_per_step=0.4, wait_s_stalled=0.8) as recording:
        actual, step_s = train(60)
        assert 0.3 < max(step_s) < 0.4 + SLACK_S
        gate.set()
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    dropped = assert_balanced(recording)
    assert set(dropped) == {"pool_full"}
    assert len([r for r in caplog.records if "the pool" in r.getMessage()]) == 1


@pytest.mark.parametrize(("policy", "allowed_s"), [("wait", 0.2), ("drop", 0.0)])
def test_a_disk_that_hangs_from_the_start_holds_the_first_step_no_longer_than_a_step_may_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str, allowed_s: float
) -> None:
    expected, _ = train(3)
    gate = threading.Event()
    monkeypatch.setattr(Disk, "make_directory", lambda self, path: gate.wait(HANG_S))
    with flagged(tmp_path, RULES, policy=policy, wait_s_per_step=0.2, close_deadline_s=0.2):
        actual, step_s = train(3)
        ends = time.monotonic()
    assert time.monotonic() - ends < 0.2 + SLACK_S
    gate.set()
    assert allowed_s <= step_s[0] < allowed_s + SLACK_S
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def test_with_the_drop_policy_no_step_waits(tmp_path: Path, on_write: Any) -> None:
    gate = threading.Event()
    on_write(lambda: gate.wait(HANG_S))
    with flagged(tmp_path, RULES, **SMALL, policy="drop") as recording:
        train(60)
        gate.set()
    assert recording.manifest["waited_s"] == 0.0
    assert assert_balanced(recording)["pool_full"] > 0


def test_a_disk_that_stays_dead_at_the_end_is_left_within_the_deadline(tmp_path: Path, on_write: Any) -> None:
    gate = threading.Event()
    on_write(lambda: gate.wait(HANG_S))
    with flagged(tmp_path, RULES, close_deadline_s=0.5, flush_interval_s=0.05) as recording:
        train(2)
        ends = time.monotonic()
    assert time.monotonic() - ends < 0.5 + SLACK_S
    gate.set()
    del recording


def test_a_full_disk_drops_with_its_reason_and_recording_goes_on_when_there_is_room(
    tmp_path: Path, on_write: Any
) -> None:
    full = [True]

    def refuse() -> None:
        if full[0]:
            raise OSError(errno.ENOSPC, "No space left on device")

    on_write(refuse)
    with flagged(tmp_path, RULES, flush_interval_s=0.05) as recording:
        train(3)
        time.sleep(0.3)
        full[0] = False
        for _ in range(100):  # until the writer, which leaves a sick disk alone for a while, has tried again
            train(1)
            if any(recording.folder.rglob("*.arrow*")):
                break
            time.sleep(0.1)
        train(3)
    dropped = assert_balanced(recording)
    assert set(dropped) == {"disk_full"}
    assert len(recording.rows()) > 0
