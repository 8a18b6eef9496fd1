"""`keep=probe` of values on a device: a stand-in whose streams lag, as those of a GPU do."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
import torch
from torch import nn

from recorder.analyze.first.first import first
from recorder.capture.probe.probe_rows import BLOCK_STEPS
from recorder.capture.staging.devices import DeviceNorms
from recorder.config import DEFAULT_RULES
from tests.capture.staging.fake_device import FakeDevice, fake_gpu
from tests.rigs.capturing import flagged

PROBE = "site=output,param,grad keep=probe"
_KEY = ["module_path", "site", "name", "step"]


@pytest.fixture(autouse=True)
def _on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recorder.capture.probe.probe._is_on_host", lambda tensor: False)


class Net(nn.Module):
    def __init__(self, *, has_wide: bool = False) -> None:
        super().__init__()
        self.up = nn.Linear(3, 8)
        self.act = nn.ReLU(inplace=True)
        self.down = nn.Linear(8, 2, dtype=torch.float64 if has_wide else None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(self.act(self.up(x)).to(self.down.weight.dtype))
        return y


def _train(
    num_steps: int, *, has_wide: bool = False, num_parts: int = 1, before: Callable[[Net, int], None] | None = None
) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = Net(has_wide=has_wide)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(num_steps):
        if before is not None:
            before(model, step)
        for _ in range(num_parts):
            model(torch.randn(4, 3)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {key: value.clone() for key, value in model.state_dict().items()}


def _frame(recording: Any) -> pd.DataFrame:
    frame: pd.DataFrame = recording.run.probe().to_pandas()
    for name in _KEY[:3]:
        frame[name] = frame[name].astype(str)
    return frame.sort_values(_KEY).reset_index(drop=True)


@pytest.mark.parametrize("has_wide", [False, True], ids=["together", "one by one"])
@pytest.mark.parametrize("lag", [0.2, 0.9])
def test_numbers_of_a_device_that_lags_are_those_of_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_wide: bool, lag: float
) -> None:
    num_steps = BLOCK_STEPS + 6
    with fake_gpu(FakeDevice(is_eager=True, lag=lag)), flagged(tmp_path / "device", PROBE) as on_device:
        trained = _train(num_steps, has_wide=has_wide, num_parts=2)
    monkeypatch.undo()
    with flagged(tmp_path / "host", PROBE) as on_host:
        _train(num_steps, has_wide=has_wide, num_parts=2)
    assert all(
        torch.equal(value, trained[key]) for key, value in _train(num_steps, has_wide=has_wide, num_parts=2).items()
    )
    found, expected = _frame(on_device), _frame(on_host)
    pd.testing.assert_frame_equal(found[[*_KEY, "numel"]], expected[[*_KEY, "numel"]])
    assert set(found.step) == set(range(num_steps))
    assert found.l2.to_numpy() == pytest.approx(expected.l2.to_numpy(), rel=1e-5)
    assert not on_device.manifest["ledger"]["dropped"]


def _nan_at_13(model: Net, step: int) -> None:
    if step == 13:
        with torch.no_grad():
            model.down.weight[0, 0] = torch.nan


def test_a_value_that_turns_non_finite_on_a_device_is_named_at_its_step(tmp_path: Path) -> None:
    rules = "; ".join(rule.text for rule in DEFAULT_RULES)
    with fake_gpu(FakeDevice(is_eager=True, lag=0.5)), flagged(tmp_path, rules) as recording:
        _train(30, before=_nan_at_13)
    rows = recording.rows(step=13)
    turned = rows[rows.nan_count > 0]
    assert list(turned[turned.site != "scalar"].module_path[:2]) == ["down", ""]
    assert json.loads(turned[turned.module_path == "down"].note.iloc[0])["counts"] == "at_least"
    found = first(recording.run).nonfinite
    assert found is not None
    assert (found.value.step, found.value.module_path, found.value.site) == (13, "down", "output")
    frame = _frame(recording)
    down = frame[(frame.module_path == "down") & (frame.site == "output")].set_index("step")
    assert (down.nan_count[:13] == 0).all() and down.nan_count[13] == 1 and pd.isna(down.l2[13])
    assert not recording.manifest["ledger"]["dropped"]


def test_norms_one_by_one_may_follow_many() -> None:
    norms = DeviceNorms(FakeDevice(is_eager=True))
    assert norms.measure_many([torch.ones(4)] * 300) and norms.measure(torch.ones(9))
    taken = norms.take()
    assert taken is not None and taken.tolist() == [2.0] * 300 + [3.0]


def test_steps_that_arrive_at_once_make_no_block_too_long(tmp_path: Path) -> None:
    device = FakeDevice(is_eager=True, lag=0.5)

    def hang(model: Net, step: int) -> None:
        for stream in device.streams[1:]:
            stream.is_hung = BLOCK_STEPS - 6 <= step < BLOCK_STEPS + 4

    with fake_gpu(device), flagged(tmp_path, PROBE) as recording:
        _train(BLOCK_STEPS + 20, before=hang)
    assert set(_frame(recording).step) == set(range(BLOCK_STEPS + 20))
    shards = recording.folder.rglob("probe-*.arrow")
    shapes = [shape for path in shards for shape in pa.ipc.open_file(path).read_all().column("shape").to_pylist()]
    assert max(json.loads(str(shape))[-1] for shape in shapes) == BLOCK_STEPS


def test_values_while_a_graph_is_captured_are_not_measured(tmp_path: Path) -> None:
    device = FakeDevice(is_eager=True, lag=0.5)

    def capture(model: Net, step: int) -> None:
        device.captures = step == 5

    with fake_gpu(device), flagged(tmp_path, PROBE) as recording:
        _train(9, before=capture)
        device.captures = False
    assert set(_frame(recording).step) == {0, 1, 2, 3, 6, 7, 8}


def test_a_device_that_hangs_holds_up_no_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recorder.capture.probe.probe._WAIT_S", 0.2)
    device = FakeDevice()
    device.main.is_hung = True
    began_s = time.monotonic()
    with fake_gpu(device), flagged(tmp_path, PROBE, close_deadline_s=1) as recording:
        _train(40)
        during_s = time.monotonic() - began_s
    assert during_s < 60
    assert recording.run.probe().num_rows == 0
