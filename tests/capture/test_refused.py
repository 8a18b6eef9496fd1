"""While the writer refuses rows, as on a full disk, hooks count them and copy nothing."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from recorder.capture.staging.pool import Pool
from recorder.lifecycle import active
from recorder.write.quota import DiskFloor
from tests.rigs.capturing import Tiny, batch, flagged


def train_step(model: Tiny, optimizer: torch.optim.Optimizer, number: int) -> None:
    model(batch(number)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def wait_until_refused(*, refused: bool, model: Tiny, optimizer: torch.optim.Optimizer) -> None:
    current: Any = active._current
    until_s = time.monotonic() + 20
    train_step(model, optimizer, 0)
    while bool(current.capture.refused) != refused:
        assert time.monotonic() < until_s
        train_step(model, optimizer, 0)
        time.sleep(0.02)


@pytest.mark.parametrize("keep", ["tensor", "stats", "tensor,stats,fingerprint"])
def test_what_would_be_dropped_is_not_copied_and_all_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: str
) -> None:
    takes: list[int] = []
    plain = Pool.take

    def take(self: Pool, nbytes: int) -> Any:
        takes.append(nbytes)
        return plain(self, nbytes)

    model = Tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rules = f"site=input,output,grad,param keep={keep}"
    with flagged(tmp_path, rules, min_free_bytes="500TB", flush_interval_s=0.1) as recording:
        wait_until_refused(refused=True, model=model, optimizer=optimizer)
        monkeypatch.setattr(Pool, "take", take)
        for i in range(5):
            train_step(model, optimizer, i)
        num_observed = active._current.capture.observed  # type: ignore[union-attr]
    assert takes == []
    ledger = recording.manifest["ledger"]
    assert ledger["observed"] == num_observed > 0
    assert ledger["dropped"] == {"disk_floor": num_observed}


def test_large_tensors_count_for_as_many_rows_as_they_would_have_made(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, (40 << 20) // 4)  # 40 MiB a row of its output: two parts
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with flagged(tmp_path, "site=output keep=tensor", min_free_bytes="500TB", flush_interval_s=0.1) as recording:
        capture: Any = None
        num_steps, until_s = 0, time.monotonic() + 20
        while capture is None or not capture.refused or num_steps < 3:
            assert time.monotonic() < until_s
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
            num_steps += 1
            capture = active._current.capture  # type: ignore[union-attr]
        model(torch.ones(1, 4))
    ledger = recording.manifest["ledger"]
    assert ledger["dropped"] == {"disk_floor": 2 * (num_steps + 1)}


def test_it_goes_on_once_there_is_room_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DiskFloor, "refusal", lambda self, directory, num_bytes: "disk_floor")
    model = Tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with flagged(tmp_path, "site=output keep=stats", flush_interval_s=0.1) as recording:
        wait_until_refused(refused=True, model=model, optimizer=optimizer)
        monkeypatch.undo()
        wait_until_refused(refused=False, model=model, optimizer=optimizer)
        train_step(model, optimizer, 1)
        last_step = active._current.capture.clock.step  # type: ignore[union-attr]
    rows = recording.rows(module_path="first")
    assert rows.step.max() == last_step
    ledger = recording.manifest["ledger"]
    assert ledger["observed"] == ledger["written"] + ledger["dropped"]["disk_floor"]
