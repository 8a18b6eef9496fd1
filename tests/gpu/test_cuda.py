"""On a GPU: training is what it was, values are what hooks saw, and nothing waits for the device.

Written without one; what the stager does in which order is tested in `capture/test_streams.py`, on a stand-in.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import recorder
from recorder.capture.staging.devices import CudaDevice
from recorder.capture.staging.measure import measure
from recorder.records import KEEP_FINGERPRINT, KEEP_STATS
from tests.rigs.capturing import EVERYTHING, Recording, flagged

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
MIB = 1 << 20


class Net(nn.Module):
    """Layers, an activation in place, dropout, and an output that the loss changes in place."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.first = nn.Linear(64, width)
        self.act = nn.ReLU(inplace=True)
        self.drop = nn.Dropout(0.1)
        self.second = nn.Linear(width, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.drop(self.act(self.first(x))))  # type: ignore[no-any-return]


def inputs(seed: int, rows: int = 128) -> torch.Tensor:
    return torch.randn(rows, 64, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


Optimizer = Callable[[Any], torch.optim.Optimizer]


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-3)


def train(
    num_steps: int = 6,
    *,
    make_optimizer: Optimizer = adam,
    wrap: Callable[[nn.Module], nn.Module] = lambda model: model,
    seen: list[torch.Tensor] | None = None,
    at_step: Callable[[int], None] = lambda step: None,
) -> dict[str, torch.Tensor]:
    """Parameters and the random state after a training; ``seen`` takes what the first layer gave at each step."""
    torch.manual_seed(1)
    model = Net().to(DEVICE)
    if seen is not None:
        model.first.register_forward_hook(lambda module, args, output: seen.append(output.detach().clone()))
    wrapped = wrap(model)
    optimizer = make_optimizer(model.parameters())
    batches = [inputs(step) for step in range(num_steps)]
    for step in range(num_steps):
        at_step(step)
        loss = wrapped(batches[step]).mul_(2.0).square().mean()
        recorder.scalar("loss", loss.detach())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    at_step(num_steps)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    return {**state, "random": torch.cuda.get_rng_state() if DEVICE == "cuda" else torch.get_rng_state()}


def assert_same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert [key for key in first if not torch.equal(first[key], second[key])] == []


def dropped(recording: Recording) -> dict[str, int]:
    return dict(recording.manifest["ledger"]["dropped"])


def tapped(tmp_path: Path, values: dict[str, torch.Tensor], **settings: object) -> Recording:
    """Record tensors by name, and overwrite each right after it was seen."""
    model = nn.Linear(2, 2).to(DEVICE)
    with flagged(tmp_path, "site=tap keep=tensor", **settings) as recording:
        model(torch.ones(1, 2, device=DEVICE))
        for name, value in values.items():
            recorder.tap(name, value)
            if value._base is None and value.is_contiguous():
                value.zero_()
    return recording


def test_training_is_bit_equal_with_and_without(tmp_path: Path) -> None:
    without = train()
    with flagged(tmp_path, EVERYTHING) as recording:
        found = train()
    assert_same(without, found)
    assert not dropped(recording) and len(recording.rows(site="output"))


def test_values_are_those_that_a_hook_saw_whatever_is_done_in_place_later(tmp_path: Path) -> None:
    seen: list[torch.Tensor] = []
    with flagged(tmp_path, "site=output,param keep=tensor") as recording:
        train(seen=seen)
    for step, value in enumerate(seen):  # the activation that follows changes it in place
        assert torch.equal(recording.run.tensor("first", site="output", step=step), value.cpu())


def test_gradients_and_state_are_those_of_the_same_training_recorded_by_hand(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = Net().to(DEVICE)
    optimizer = adam(model.parameters())
    gradients, moments = [], []
    with flagged(tmp_path, "site=grad,optim keep=tensor") as recording:
        for step in range(4):
            model(inputs(step)).square().mean().backward()
            gradients.append(model.second.weight.grad.clone())  # type: ignore[union-attr]
            optimizer.step()
            moments.append(optimizer.state[model.second.weight]["exp_avg"].clone())
            optimizer.zero_grad(set_to_none=False)
    for step in range(4):
        grad = recording.run.tensor("second", site="grad", name="weight", step=step)
        moment = recording.run.tensor("second", site="optim", name="weight.exp_avg", step=step)
        assert torch.equal(grad, gradients[step].cpu()) and torch.equal(moment, moments[step].cpu())


def test_every_kind_of_tensor_arrives_bit_for_bit(tmp_path: Path) -> None:
    wide = torch.randn(96, 80, device=DEVICE)
    values = {
        "bfloat16": wide.bfloat16(),
        "half": wide.half(),
        "double": wide.double(),
        "float8": wide.to(torch.float8_e4m3fn),
        "bool": wide > 0,
        "int64": (wide * 1e6).long(),
        "complex64": torch.complex(wide, -wide),
        "conj": torch.complex(wide, -wide).conj(),
        "imag": torch.complex(wide, -wide).conj().imag,
        "turned": wide.t(),
        "sliced": wide[3::2, 1::3],
        "expanded": wide[:1].expand(50, 80),
        "scalar": wide[0, 0].clone(),
        "empty": wide[:0],
    }
    expected = {name: value.resolve_conj().resolve_neg().cpu() for name, value in values.items()}
    recording = tapped(tmp_path, {**{k: v.clone() if v._base is None else v for k, v in values.items()}})
    assert not dropped(recording)
    for name, value in expected.items():
        found = recording.run.tensor("", site="tap", name=name, step=0)
        assert found.dtype == value.dtype and found.shape == value.shape, name
        assert torch.equal(*(x.contiguous().reshape(-1).view(torch.uint8) for x in (found, value))), name


def test_memory_that_is_freed_and_used_again_at_once_reaches_no_copy(tmp_path: Path) -> None:
    model = nn.Linear(2, 2).to(DEVICE)
    with flagged(tmp_path, "site=tap keep=tensor") as recording:
        model(torch.ones(1, 2, device=DEVICE))
        for i in range(50):
            value = torch.full((MIB,), float(i), device=DEVICE)
            recorder.tap(f"value{i}", value)
            del value
            torch.full((MIB,), -1.0, device=DEVICE)
    assert not dropped(recording)
    for i in range(50):
        assert (recording.array("", site="tap", name=f"value{i}", step=0) == i).all()


@pytest.mark.parametrize("device_pool_bytes", ["1MiB", "0"])
def test_a_tensor_larger_than_the_devices_pool_is_copied_in_order(tmp_path: Path, device_pool_bytes: str) -> None:
    values = {f"value{i}": torch.full((4 * MIB,), float(i), device=DEVICE) for i in range(4)}
    recording = tapped(tmp_path, values, device_pool_bytes=device_pool_bytes)
    assert not dropped(recording)
    for i in range(4):
        assert (recording.array("", site="tap", name=f"value{i}", step=0) == i).all()


def test_a_tensor_larger_than_the_pool_is_counted(tmp_path: Path) -> None:
    recording = tapped(tmp_path, {"large": torch.zeros(MIB, device=DEVICE)}, pool_bytes="1MiB")
    assert dropped(recording) == {"too_large": 1}


def test_a_model_that_runs_on_streams_of_the_users_is_recorded_in_their_order(tmp_path: Path) -> None:
    model = Net().to(DEVICE).eval()
    own = [torch.cuda.Stream() for _ in range(3)]
    expected, batches = [], [inputs(i, rows=4096) for i in range(12)]
    torch.cuda.synchronize()
    with flagged(tmp_path, "site=output keep=tensor", roots="any") as recording:
        for i, batch in enumerate(batches):
            with torch.cuda.stream(own[i % 3]), torch.no_grad():
                torch.cuda._sleep(1_000_000)
                output = model(batch)
                expected.append(output.clone())
                output.fill_(-1.0)
    for step, value in enumerate(expected):
        assert torch.equal(recording.run.tensor("", site="output", step=step), value.cpu())


@pytest.mark.parametrize("rules", [EVERYTHING, "site=* keep=stats,fingerprint", "site=output,param,grad keep=probe"])
def test_no_call_waits_for_the_device(tmp_path: Path, rules: str) -> None:
    large = torch.randn(2 * MIB, device=DEVICE)  # so large that the device measures it

    def forbid(step: int) -> None:  # the first step opens the device, and reads the optimizer's step
        torch.cuda.set_sync_debug_mode("error" if 1 <= step < 6 else "default")
        recorder.tap("large", large)

    def capturable(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, lr=torch.tensor(1e-3, device=DEVICE), capturable=True)

    without = train(make_optimizer=capturable)
    try:
        with flagged(tmp_path, rules) as recording:
            found = train(make_optimizer=capturable, at_step=forbid)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_same(without, found)
    assert not dropped(recording) and not recording.events("hook_error")


def test_the_probe_has_the_norm_of_every_output_at_every_step(tmp_path: Path) -> None:
    seen: list[torch.Tensor] = []
    with flagged(tmp_path, "site=output,param,grad keep=probe") as recording:
        train(seen=seen)
    frame = recording.run.probe().to_pandas()
    assert set(frame.site) == {"output", "param", "grad"}
    found = frame[(frame.site == "output") & (frame.module_path == "first")].sort_values("step").l2
    assert found.to_numpy() == pytest.approx([float(one.double().norm()) for one in seen], rel=1e-5)


def test_hooks_return_while_the_device_is_still_busy(tmp_path: Path) -> None:
    model = Net().to(DEVICE)
    batch = inputs(0)
    with flagged(tmp_path, "site=output keep=tensor,stats") as recording:
        model(batch)  # opens the device
        torch.cuda.synchronize()
        torch.cuda._sleep(4_000_000_000)  # a second and more
        began = time.monotonic()
        model(batch)
        launched_s = time.monotonic() - began
        torch.cuda.synchronize()
        done_s = time.monotonic() - began
    assert launched_s < done_s / 4, (launched_s, done_s)
    assert not dropped(recording)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool], ids=str)
def test_what_the_device_measures_is_what_the_host_would(tmp_path: Path, dtype: torch.dtype) -> None:
    value = (torch.randn(700, 5000, device=DEVICE) * 3).to(dtype)
    if dtype.is_floating_point:
        value[0, :3] = torch.tensor([float("nan"), float("inf"), 0.0], device=DEVICE).to(dtype)
    host = value.cpu()
    data = host.reshape(-1).view(torch.uint8).numpy()
    wanted = measure(data, str(dtype)[6:], tuple(host.shape), None, KEEP_STATS | KEEP_FINGERPRINT)
    model = nn.Linear(2, 2).to(DEVICE)
    with flagged(tmp_path, "site=tap keep=stats,fingerprint") as recording:
        model(torch.ones(1, 2, device=DEVICE))
        recorder.tap("value", value)
        value.zero_()
    assert not recording.events("hook_error")
    (row,) = recording.rows(site="tap").to_dict("records")
    assert row["fingerprint"] == f"{wanted.fingerprint:016x}"
    for name in ("min", "max", "absmax", "nan_count", "inf_count", "zero_count"):
        assert row[name] == getattr(wanted, name), name
    for name in ("mean", "std", "l2", "sum", "sum_sq", "sum_abs", "sum_fourth"):
        np.testing.assert_allclose(row[name], getattr(wanted, name), rtol=1e-9)


def test_gradient_scaling_is_recorded_without_reading_the_device(tmp_path: Path) -> None:
    def run(scales: list[float]) -> dict[str, torch.Tensor]:
        torch.manual_seed(1)
        model = Net().to(DEVICE)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cuda", init_scale=1024.0, growth_interval=2)
        for step in range(6):
            with torch.autocast("cuda", dtype=torch.float16):
                loss = model(inputs(step)).float().square().mean()
            scales.append(scaler.get_scale())
            scaler.scale(loss if step != 3 else loss * float("inf")).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return dict(model.state_dict())

    without = run([])
    scales: list[float] = []
    with flagged(tmp_path, EVERYTHING) as recording:
        found = run(scales)
    assert_same(without, found)
    rows = recording.rows(site="scalar")
    assert rows[rows.name == "grad_scale"]["mean"].tolist() == scales
    assert rows[rows.name == "skipped"]["mean"].tolist() == [0.0, 0.0, 0.0, 1.0, 0.0, 0.0]


def test_a_captured_graph_is_as_without_the_recorder_and_counted(tmp_path: Path) -> None:
    def run() -> torch.Tensor:
        torch.manual_seed(1)
        model = Net().to(DEVICE).eval()
        static = inputs(0)
        warm = torch.cuda.Stream()
        warm.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(warm), torch.no_grad():
            for _ in range(30):  # copies are under way, of which the writer asks while the graph is captured
                model(static)
        torch.cuda.current_stream().wait_stream(warm)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph), torch.no_grad():
            output = model(static)
        results = []
        for step in range(3):
            static.copy_(inputs(step))
            graph.replay()
            results.append(output.clone())
        return torch.stack(results)

    without = run()
    with flagged(tmp_path, "site=output keep=tensor", roots="any") as recording:
        found = run()
    assert torch.equal(without, found)
    assert dropped(recording) == {"cuda_graph": 5}
    assert len(recording.rows(site="output", module_path="")) == 30, "replays show no hooks"


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("compiled", ["skip", "tap"])
def test_a_compiled_training_is_as_without_the_recorder(tmp_path: Path, mode: str, compiled: str) -> None:
    def wrap(model: nn.Module) -> nn.Module:
        torch.compiler.reset()
        return torch.compile(model, mode=mode)  # type: ignore[return-value]

    if compiled == "skip":
        without = train(wrap=wrap)
    with flagged(tmp_path, "site=output,grad keep=tensor", compiled=compiled) as recording:
        found = train(wrap=wrap)
    if compiled == "skip":  # a tap is an op of the graph, and may be fused differently
        assert_same(without, found)
    assert set(dropped(recording)) <= {"cuda_graph"}
    assert len(recording.rows(site="grad"))


def test_ddp_on_nccl(tmp_path: Path) -> None:
    torch.distributed.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:

        def wrap(model: nn.Module) -> nn.Module:
            return nn.parallel.DistributedDataParallel(model, device_ids=[0])

        without = train(wrap=wrap)
        with flagged(tmp_path, EVERYTHING) as recording:
            found = train(wrap=wrap)
        assert_same(without, found)
        assert not dropped(recording) and set(recording.rows(site="grad").scope) == {"final"}
    finally:
        torch.distributed.destroy_process_group()


def test_a_recompute_in_the_backwards_own_thread_is_marked(tmp_path: Path) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.head = Net(), nn.Linear(32, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(checkpoint(self.inner, x, use_reentrant=False))  # type: ignore[no-any-return]

    model = Outer().to(DEVICE)
    optimizer = adam(model.parameters())
    with flagged(tmp_path, "site=output keep=tensor") as recording:
        for step in range(3):
            model(inputs(step)).sum().backward()
            optimizer.step()
    rows = recording.rows(module_path="inner.first")
    assert rows.phase.tolist() == ["forward", "recompute"] * 3 and rows.step.tolist() == [0, 0, 1, 1, 2, 2]
    assert not dropped(recording) and len({*recording.rows().root}) == 1


def test_a_pool_that_cannot_be_locked_is_filled_by_the_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CudaDevice, "pin", lambda self, address, num_bytes: False)
    seen: list[torch.Tensor] = []
    without = train()
    with flagged(tmp_path, "site=output keep=tensor") as recording:
        found = train(seen=seen)
    assert_same(without, found)
    for step, value in enumerate(seen):
        assert torch.equal(recording.run.tensor("first", site="output", step=step), value.cpu())
    (said,) = recording.events("device")
    assert "could not be page-locked" in said


def test_a_registration_that_fails_leaves_no_error_for_trainings_next_kernel() -> None:
    torch.zeros(1, device=DEVICE)
    assert not CudaDevice(0).pin(0x1000, 4096)
    assert torch.ones(3, device=DEVICE).sum().item() == 3


def test_one_recording_after_another_gives_its_memory_back(tmp_path: Path) -> None:
    before = None
    for i in range(4):
        with flagged(tmp_path / str(i), "site=output keep=tensor", pool_bytes="64MiB") as recording:
            train()
        assert not dropped(recording) and not recording.events("device")
        torch.cuda.synchronize()
        now = torch.cuda.memory_allocated()
        assert before is None or now <= before
        before = now


def test_memory_of_the_device_does_not_grow_with_the_steps(tmp_path: Path) -> None:
    sizes = []
    with flagged(tmp_path, "site=output,grad keep=stats,fingerprint; site=output keep=tensor steps=::7"):
        train(200, at_step=lambda step: sizes.append(torch.cuda.memory_allocated()))
    assert max(sizes[150:]) <= max(sizes[20:60])


def test_each_of_two_gpus_has_its_own_copies(tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one CUDA device")
    values = {f"value{i}": torch.full((MIB,), float(i), device=f"cuda:{i % 2}") for i in range(8)}
    recording = tapped(tmp_path, values)
    assert not dropped(recording)
    for i in range(8):
        assert (recording.array("", site="tap", name=f"value{i}", step=0) == i).all()
