"""`keep=probe` has one number of every value at every step, without a row a step, and names what turns non-finite."""

from __future__ import annotations

import contextlib
import gc
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import torch._dynamo
from torch import nn
from torch.utils.checkpoint import checkpoint

import recorder
from recorder.analyze.doctor.expected import compare
from recorder.analyze.doctor.reply import checks_of
from recorder.analyze.first.first import first
from recorder.capture.probe.probe_rows import BLOCK_STEPS
from recorder.capture.staging.pool import Pool
from recorder.columns import COLUMNS, Role
from recorder.config import DEFAULT_RULES
from recorder.rules import parse_rules
from tests.rigs import jobs
from tests.rigs.capturing import Recording, flagged

PROBE = "site=output,param,grad,buffer keep=probe"
_STEPS = BLOCK_STEPS + 6


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(3, 8)
        self.norm = nn.BatchNorm1d(8)
        self.down = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(self.norm(self.up(x)).relu())
        return y


def _train(model: nn.Module, num_steps: int, *, seen: dict[tuple[str, str, str, int], float] | None = None) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(0)
    for step in range(num_steps):
        model(torch.randn(4, 3, generator=generator)).square().mean().backward()
        if seen is not None:
            for name, parameter in model.named_parameters():
                path, _, own = name.rpartition(".")
                assert parameter.grad is not None
                seen[path, "param", own, step] = float(parameter.detach().double().norm())
                seen[path, "grad", own, step] = float(parameter.grad.double().norm())
        optimizer.step()
        optimizer.zero_grad()


def _probe(recording: Recording) -> pd.DataFrame:
    frame: pd.DataFrame = recording.run.probe().to_pandas()
    return frame


def test_every_value_has_a_number_at_every_step_and_no_row(tmp_path: Path) -> None:
    seen: dict[tuple[str, str, str, int], float] = {}
    with flagged(tmp_path, PROBE) as recording:
        torch.manual_seed(0)
        _train(Net(), _STEPS, seen=seen)
    frame = _probe(recording)
    assert recording.run.num_rows == 0 and recording.run.steps == []
    of_state = frame[frame.site.isin(["param", "grad"])]
    found = {(row.module_path, row.site, row.name_, row.step): row.l2 for row in _named(of_state)}
    assert found.keys() == seen.keys()
    moved = {(row.module_path, row.name_, row.step): row.l2 for row in _named(frame[frame.site == "update"])}
    gradients = {(path, name, step): l2 for (path, site, name, step), l2 in seen.items() if site == "grad"}
    assert moved == {key: pytest.approx(0.1 * l2, rel=1e-3, abs=1e-7) for key, l2 in gradients.items()}
    for key, l2 in seen.items():
        assert found[key] == pytest.approx(l2, rel=1e-6), key
    outputs = frame[frame.site == "output"]
    assert set(outputs.module_path) == {"", "up", "norm", "down"}
    assert all(list(some.step) == list(range(_STEPS)) for _, some in outputs.groupby("module_path", observed=True))
    assert (outputs[outputs.module_path == "up"].numel == 4 * 8).all()
    buffers = frame[frame.site == "buffer"]
    assert set(buffers.name) == {"running_mean", "running_var", "num_batches_tracked"}
    counted = buffers[buffers.name == "num_batches_tracked"]
    assert list(counted.l2) == list(range(1, _STEPS + 1))


class Unrolled(nn.Module):
    """It calls its modules often, and with fewer rows from its third call on."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.zeros(len(x), 8)
        for t in range(x.shape[1]):
            h = self.cell(h + x[:, t]).relu()
            if t == 2:
                h = h[: len(h) // 2]
                x = x[: len(h)]
        y: torch.Tensor = self.out(h)
        return y


def test_a_module_called_often_has_the_numbers_of_its_first_calls(tmp_path: Path) -> None:
    found = []
    for native in ("yes", "no"):  # without the loops no output takes the short way
        rules = "; ".join(rule.text for rule in DEFAULT_RULES)
        with flagged(tmp_path / native, rules, native=native) as recording:
            torch.manual_seed(0)
            model = Unrolled()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            for step in range(20):
                model.train()(torch.randn(6 if step % 3 else 4, 7, 8)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                with torch.no_grad():
                    model.eval()(torch.randn(4, 5, 8))
        frame = _probe(recording)
        outputs = frame[frame.site == "output"].drop(columns="site")  # a category of updates needs the loops
        found.append(outputs.reset_index(drop=True))
    by_loops, by_python = found
    assert (by_loops[by_loops.module_path == "cell"].groupby("mode", observed=True).size() == 20).all()
    assert set(by_loops[(by_loops.module_path == "cell") & (by_loops["mode"] == "train")].numel) == {14 * 8, 21 * 8}
    pd.testing.assert_frame_equal(by_loops.drop(columns="l2"), by_python.drop(columns="l2"), check_categorical=False)
    assert list(by_loops.l2) == pytest.approx(list(by_python.l2), rel=1e-12)


class GivesAnything(nn.Module):
    """Its output is what it was given, however that lies in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def test_an_output_that_changes_its_kind_is_measured_as_it_is(tmp_path: Path) -> None:
    usual = torch.arange(1.0, 13.0).reshape(3, 4)
    base = torch.arange(40.0)
    outputs = [
        *[usual * step for step in range(4)],  # measured as the first was
        usual.t(),
        base[7:19].view(3, 4),  # with an offset
        torch.complex(usual, usual).conj().imag.contiguous(),
        torch.complex(torch.zeros(3, 4), usual).conj().imag,  # with a lazy sign
        torch.arange(24.0).reshape(3, 8)[:, ::2],
        usual.double(),
        usual.to(torch.int64),
        torch.view_as_complex(usual.reshape(6, 2).contiguous()).conj(),
        usual[:1].expand(3, 4),
        usual * torch.tensor(float("nan")),
        torch.full((3, 4), float("inf")),
        torch.full((3, 4), 3e38),  # its squares are no float32
        torch.zeros(0, 4),
        usual.repeat(2, 1),
        usual,
    ]
    with flagged(tmp_path, "site=output keep=probe") as recording:
        model = GivesAnything()
        optimizer = torch.optim.SGD(model.parameters())
        for given in outputs:
            for mode in (True, False):
                model.train(mode)
                model(given)
            model.weight.grad = torch.ones(1)
            optimizer.step()
    frame = _probe(recording)
    for _, own in frame[frame.site == "output"].groupby("mode", observed=True):
        found = own.set_index("step").sort_index()
        assert list(found.index) == [step for step, given in enumerate(outputs) if given.numel()]
        for step in found.index:
            assert found.dtype[step] == str(outputs[step].dtype).removeprefix("torch."), step
            values = outputs[step].resolve_conj().resolve_neg().numpy().astype(np.complex128)
            finite = values[np.isfinite(values)]
            assert found.l2[step] == pytest.approx(float(np.linalg.norm(finite)), rel=1e-6), step
            assert (
                found.nan_count[step] == np.isnan(values).sum() and found.inf_count[step] == np.isinf(values).sum()
            ), step
            assert found.numel[step] == values.size


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_size_of_an_update_of_a_large_parameter_is_that_of_a_sample(tmp_path: Path, dtype: torch.dtype) -> None:
    wide, moved = nn.Linear(300, 400, dtype=dtype), list[float]()
    with flagged(tmp_path, "; ".join(rule.text for rule in DEFAULT_RULES)) as recording:
        optimizer = torch.optim.AdamW(wide.parameters(), lr=0.01)
        for step in range(12):
            wide(torch.randn(4, 300, dtype=dtype)).square().mean().backward()
            before = wide.weight.detach().clone().double()
            optimizer.step()
            if step == 7:
                with torch.no_grad():
                    wide.weight.mul_(3)  # whatever writes into a parameter moves it
            if step < 7:
                moved.append(float((wide.weight.detach().double() - before).norm()))
            optimizer.zero_grad()
    frame = _probe(recording)
    own = frame[(frame.site == "update") & (frame.name == "weight")].set_index("step").l2
    assert list(own.index) == list(range(12))
    assert list(own[:7]) == pytest.approx(moved, rel=0.2)
    assert own[8] > 10 * own[6]
    findings = recorder.check(recording.run).findings
    assert [(one.rule, one.step, one.name) for one in findings if one.rule == "update"] == [("update", 8, "weight")]


def test_a_parameter_without_a_gradient_at_a_step_has_not_moved(tmp_path: Path) -> None:
    with flagged(tmp_path, PROBE) as recording:
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for step in range(6):
            model(torch.randn(4, 3)).square().mean().backward()
            if step % 2:
                model.down.weight.grad = None
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    frame = _probe(recording)
    updates = frame[(frame.site == "update") & (frame.module_path == "down") & (frame.name == "weight")]
    l2 = updates.set_index("step").l2
    assert list(l2.index) == list(range(6))
    assert all(l2[step] > 0 for step in (0, 2, 4)) and all(l2[step] == 0 for step in (1, 3, 5))


class Odd(nn.Module):
    """It has a parameter or a gradient that not every way of measuring can take, beside usual ones."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.conv, self.line, self.table = nn.Conv2d(3, 8, 3), nn.Linear(8, 2), nn.Embedding(9, 8, sparse=True)
        self.odd = nn.Parameter(torch.randn(6, 4))
        if kind == "channels_last":
            self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if kind == "transposed":
            self.odd = nn.Parameter(torch.randn(4, 6).t())
        if kind == "complex":
            self.odd = nn.Parameter(torch.randn(6, 4, dtype=torch.complex64))
        if kind == "with gaps":
            self.odd = nn.Parameter(torch.randn(6, 8)[:, ::2])
        if kind != "sparse gradient":
            self.table = nn.Embedding(9, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.line(self.conv(x).flatten(1) + self.table(torch.tensor([1, 5])))
        return y * self.odd.abs().square().mean()


@pytest.mark.parametrize(
    ("kind", "without"),
    [
        ("channels_last", ()),
        ("transposed", ()),
        ("outside the model", ()),
        ("sparse gradient", ()),
        ("expanded gradient", ()),
        ("transposed gradient", ()),
        ("complex", ("odd",)),
        ("with gaps", ("odd",)),
    ],
)
def test_an_odd_parameter_or_gradient_leaves_the_updates_of_others(
    tmp_path: Path, kind: str, without: tuple[str, ...]
) -> None:
    moved: dict[tuple[str, int], float] = {}
    with flagged(tmp_path, "; ".join(rule.text for rule in DEFAULT_RULES)) as recording:
        torch.manual_seed(0)
        model, outside = Odd(kind), nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([*model.parameters(), *([outside] if kind == "outside the model" else [])], lr=0.1)
        for step in range(13):
            (model(torch.randn(2, 3, 3, 3)).square().mean() + outside.sum()).backward()
            if kind == "expanded gradient":
                model.line.weight.grad = torch.ones(1, 1).expand(2, 8)
            if kind == "transposed gradient":
                model.line.weight.grad = torch.ones(8, 2).t()
            before = {name: one.detach().clone() for name, one in model.named_parameters()}
            optimizer.step()
            optimizer.zero_grad()
            moved |= {
                (name, step): float((one.detach() - before[name]).norm()) for name, one in model.named_parameters()
            }
    frame = _probe(recording)
    updates = _named(frame[frame.site == "update"])
    found = {(f"{row.module_path}.{row.name_}".strip("."), row.step): row.l2 for row in updates}
    assert found == {key: pytest.approx(l2, rel=1e-4) for key, l2 in moved.items() if key[0] not in without}


def test_a_parameter_that_gets_another_order_in_memory_has_not_moved(tmp_path: Path) -> None:
    with flagged(tmp_path, PROBE) as recording:
        model = nn.Conv2d(3, 8, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for step in range(6):
            if step == 3:
                model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            model(torch.randn(2, 3, 3, 3)).square().mean().backward()
            optimizer.step()
    frame = _probe(recording)
    updates = frame[(frame.site == "update") & (frame.name == "weight")]
    assert list(updates.step) == list(range(6)) and not updates.l2.any()


def test_gradients_of_each_sample_lose_no_block(tmp_path: Path) -> None:
    with flagged(tmp_path, PROBE) as recording:
        model = Net().eval()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(_STEPS):
            weights = {name: one.detach() for name, one in model.named_parameters()}
            of_sample = torch.func.grad(lambda own, x: torch.func.functional_call(model, own, x[None]).square().sum())
            gradients = torch.func.vmap(of_sample, (None, 0))(weights, torch.randn(4, 3))
            for name, one in model.named_parameters():
                one.grad = gradients[name].mean(0)
            optimizer.step()
    frame = _probe(recording)
    own = frame[(frame.module_path == "up") & (frame.name == "bias")]
    for site, begin in (("param", 0), ("grad", 0), ("update", 1)):  # the probe begins inside the first step
        assert list(own[own.site == site].step) == list(range(begin, _STEPS))


def test_names_that_end_with_a_space_are_names_of_their_own(tmp_path: Path) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"a": x * self.weight, "a ": 5 * x * self.weight}

    with flagged(tmp_path, "site=output keep=probe") as recording:
        model = Twice()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for _ in range(3):
            model(torch.ones(1))["a"].sum().backward()
            optimizer.step()
    frame = _probe(recording)
    assert {name: list(some.l2) for name, some in frame.groupby("name", observed=True)} == {
        "a": [1.0] * 3, "a ": [5.0] * 3
    }  # fmt: skip


def _named(frame: pd.DataFrame) -> Any:
    return frame.rename(columns={"name": "name_"}).itertuples()


def test_the_accounts_of_a_run_with_a_probe_are_whole(tmp_path: Path) -> None:
    with flagged(tmp_path, f"{PROBE}; site=output steps=::10 keep=stats") as recording:
        _train(Net(), _STEPS)
    command = [sys.executable, "-m", "recorder"]
    for words in (("verify",), ("doctor", "--strict")):
        done = subprocess.run([*command, *words, str(recording.folder)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout
    assert "rows" in done.stdout
    assert recording.run.num_rows == 4 * len(range(0, _STEPS, 10))


def test_a_value_that_turns_non_finite_is_named_at_its_step_with_the_flag_alone(tmp_path: Path) -> None:
    with flagged(tmp_path, "; ".join(rule.text for rule in DEFAULT_RULES)) as recording:
        torch.manual_seed(0)
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(30):
            if step == 13:
                with torch.no_grad():
                    model.down.weight[0, 0] = torch.nan
            model(torch.randn(4, 3)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    bad = first(recording.run).nonfinite
    assert bad is not None
    assert (bad.value.step, bad.value.module_path, bad.value.site) == (13, "down", "output")
    assert (bad.nan_count, bad.numel) == (4, 8)
    assert bad.probed is not None
    assert (bad.probed.before, bad.probed.last_step) == (("norm", "output", ""), 12)
    rows = recording.rows(site="output", module_path="down")
    assert list(rows[rows.step.between(11, 19)].step) == [13, 14, 15, 16]  # as it turns, and three steps after trouble


class Spills(nn.Module):
    """Its part `side` gives a NaN at some calls, of which nothing is made."""

    def __init__(self, *bad: int) -> None:
        super().__init__()
        self.net, self.side = Net(), nn.Identity()
        self.bad, self.num_calls = bad, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.side(x.detach() * (torch.nan if self.num_calls in self.bad else 1.0))
        self.num_calls += 1
        y: torch.Tensor = self.net(x)
        return y


def _spilt(*bad: int, num_steps: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = Spills(*bad)
    _train(model, num_steps)
    return [*model.state_dict().values(), torch.rand(2)]


def test_after_trouble_statistics_of_three_steps_are_kept_thrice_a_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bad = 2, 33, 35, 61, 62, 72, 79
    plain = _spilt(*bad, num_steps=90)
    with flagged(tmp_path, "; ".join(rule.text for rule in DEFAULT_RULES)) as recording:
        recorded = _spilt(*bad, num_steps=90)
    assert all(torch.equal(a, b) for a, b in zip(plain, recorded, strict=True))
    ordinary = {0, 1, 2, 3, 4, *range(10, 90, 10)}
    more = [(3, 5), (34, 36), (62, 64)]
    steps = {step for first, last in more for step in range(first, last + 1)}
    for site in ("output", "grad_output", "param", "grad", "buffer"):
        assert set(recording.rows(site=site, module_path="net.norm").step) == ordinary | steps, site
    said = [
        f"'side' output turned NaN at step {first - 1}; statistics of steps {first} to {last} are kept, too"
        for first, last in more
    ]
    assert recording.events("trouble") == said
    assert [one for one in caplog.messages if one.endswith("are kept, too")] == [f"rank 0: {text}" for text in said]
    texts = {check.text for check in checks_of(recording.run)}
    assert {f"event trouble (rank 0): {text}" for text in said} <= texts
    assert [(one["since"], one["until"]) for one in recording.manifest["commands"]] == more
    expectation = compare(recording.run)
    assert expectation.problems == [] and {gap.reason.key for gap in expectation.gaps} <= {"no_gradient"}


def test_gradients_that_a_scaler_skips_are_no_trouble(tmp_path: Path) -> None:
    with flagged(tmp_path, "; ".join(rule.text for rule in DEFAULT_RULES)) as recording:
        model = Net()
        for parameter in model.parameters():
            parameter.register_hook(lambda grad: grad * torch.inf)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        scaler = torch.amp.GradScaler("cpu")
        for _ in range(9):
            scaler.scale(model(torch.randn(4, 3)).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert recording.manifest["commands"] == []


def test_what_is_infinite_again_is_told_again(tmp_path: Path) -> None:
    with flagged(tmp_path, "site=output keep=probe") as recording:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(8):
            y = model(torch.full((1, 2), torch.inf if step in (2, 3, 6) else 1.0)).sum()
            if y.isfinite():
                y.backward()
            optimizer.step()
            optimizer.zero_grad()
    rows = recording.rows(site="output")
    assert list(rows.step) == [2, 6]
    frame = _probe(recording)
    assert list(frame[(frame.nan_count > 0) | (frame.inf_count > 0)].step) == [2, 3, 6]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool])
@pytest.mark.parametrize("native", ["yes", "no"])
def test_numbers_are_those_of_numpy_for_every_type(tmp_path: Path, dtype: torch.dtype, native: str) -> None:
    values = (torch.arange(70_001) % 251 - 100).to(dtype)

    class Gives(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(()))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            return x * self.weight, values, values[:70_000].reshape(700, 100).t()

    with flagged(tmp_path, "site=output keep=probe", native=native) as recording:
        model = Gives()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        model(torch.ones(3))[0].sum().backward()
        optimizer.step()
    frame = _probe(recording).set_index("name")
    numbers = values.to(torch.float64).numpy()
    assert frame.l2["1"] == pytest.approx(np.sqrt((numbers**2).sum()), rel=1e-6)
    assert frame.l2["2"] == pytest.approx(np.sqrt((numbers[:70_000] ** 2).sum()), rel=1e-6)
    assert frame.dtype["1"] == str(dtype).removeprefix("torch.")


def test_steps_that_the_program_names_far_apart_are_one_block(tmp_path: Path) -> None:
    with flagged(tmp_path, "site=param keep=probe") as recording:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in (0, 10, 20, 30, 31, 32):
            recorder.step(step)
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    frame = _probe(recording)
    assert list(frame[frame.name == "weight"].step) == [0, 10, 20, 30, 31, 32]
    (writer,) = recording.run.writers
    blocks = [
        step for shard in writer.probe_shards for batch in shard.columns(["step"]) for step in batch["step"].to_pylist()
    ]
    assert sorted(set(blocks)) == [0, 31]


def test_a_value_that_is_not_seen_at_a_step_has_no_number_there(tmp_path: Path) -> None:
    with flagged(tmp_path, "site=output keep=probe") as recording:
        model = nn.ModuleDict({"often": nn.Linear(2, 2), "seldom": nn.Linear(2, 2)})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        recorder.attach(model)
        for step in range(6):
            loss = model["often"](torch.ones(1, 2)).sum()
            if step % 3 == 0:
                loss = loss + model["seldom"](torch.ones(1, 2)).sum() + model["seldom"](torch.ones(2, 2)).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    frame = _probe(recording)
    seldom = frame[frame.module_path == "seldom"]
    assert list(seldom.step) == [0, 3]
    assert list(seldom.numel) == [6, 6]  # both calls of the step together
    assert list(frame[frame.module_path == "often"].step) == list(range(6))


_KILLED = """
import os, signal, torch
from torch import nn
import recorder
import recorder.capture.probe.probe_rows as probe_rows
probe_rows._BLOCK_S = 0.0
model = nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(9):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
assert recorder.attach(model).flush(30)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_process_leaves_the_blocks_that_were_over(tmp_path: Path) -> None:
    (tmp_path / "killed.py").write_text(_KILLED)
    killed = jobs.program(tmp_path, "killed.py", **jobs.recording("site=param keep=probe", dir="runs")).wait()
    assert killed.returncode == -signal.SIGKILL
    (writer,) = recorder.open_run(tmp_path / "runs").writers
    assert not any(shard.is_sealed for shard in writer.probe_shards)
    frame = recorder.open_run(tmp_path / "runs").probe().to_pandas()
    assert list(frame[frame.name == "weight"].step) == list(range(8))  # the numbers of step 8 wait for its end


def test_a_block_does_not_wait_for_a_step_that_takes_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recorder.capture.probe.probe_rows._BLOCK_S", 0.2)
    appended: list[int] = []
    with flagged(tmp_path, PROBE) as recording:
        model = Net()
        _train(model, 9)
        until_s = time.monotonic() + 20
        while not appended and time.monotonic() < until_s:
            time.sleep(0.1)
            table = recorder.open_run(recording.folder).probe()
            appended = sorted(set(table.column("step").to_pylist()))
    assert appended == list(range(8))  # the numbers of step 8 wait for its end
    assert sorted(set(_probe(recording).step)) == list(range(9))


def test_the_default_rules_probe_what_trains() -> None:
    rules = [rule for rule in DEFAULT_RULES if "keep=probe" in rule.text]
    assert [parse_rules(rule.text) for rule in rules] == [(rule,) for rule in rules]
    assert [rule.site for rule in rules] == [("output", "param", "grad"), ("input",)]


def test_numbers_are_right_when_what_trains_changes(tmp_path: Path) -> None:
    seen: dict[tuple[str, str, str, int], float] = {}
    with flagged(tmp_path, "site=param,grad keep=probe; site=grad steps=25 keep=stats") as recording:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
        optimizer = torch.optim.SGD(model[:2].parameters(), lr=0.01, momentum=0.9)
        second = None
        for step in range(40):
            if step == 8:
                model[0].weight.requires_grad_(False)
            if step == 12:
                model[0].weight.requires_grad_(True)
            if step == 16:
                optimizer.add_param_group({"params": list(model[2].parameters())})
            if step == 20:
                optimizer.param_groups.reverse()
            if step == 30:
                optimizer = torch.optim.SGD(reversed(list(model.parameters())), lr=0.01)
                second = torch.optim.SGD(model[0].parameters(), lr=0.0)
            loss = model(torch.randn(2, 3)).square().mean()
            loss.backward()
            if step in (22, 23, 24):
                bias = model[1].bias
                assert isinstance(bias, nn.Parameter) and bias.grad is not None
                bias.grad[0] = torch.inf
            known = {id(one) for group in optimizer.param_groups for one in group["params"]}
            for name, parameter in model.named_parameters():
                path, _, own = name.rpartition(".")
                if id(parameter) in known:
                    values = {"param": parameter.detach(), "grad": parameter.grad}
                    for site, value in values.items():
                        if value is not None:
                            finite = value[torch.isfinite(value)].double()
                            times = 2**0.5 if step >= 30 and path == "0" else 1.0  # two optimizers see it
                            seen[path, site, own, step] = float(finite.norm()) * times
            if second is not None:
                second.step()
            if step in (22, 23, 24):
                with torch.no_grad():
                    before = [one.clone() for one in model.parameters()]
                optimizer.step()
                with torch.no_grad():
                    for one, was in zip(model.parameters(), before, strict=True):
                        one.copy_(was)
                for state in optimizer.state.values():
                    state["momentum_buffer"].zero_()
            else:
                optimizer.step()
            optimizer.zero_grad()
    frame = _probe(recording)
    found = {(row.module_path, row.site, row.name_, row.step): row.l2 for row in _named(frame[frame.site != "update"])}
    assert found.keys() == seen.keys()
    for key, l2 in seen.items():
        assert found[key] == pytest.approx(l2, rel=1e-5), key
    bad = frame[frame.inf_count > 0]
    assert set(zip(bad.step, bad.module_path, bad.site, bad.name, strict=True)) == {
        (step, "1", "grad", "bias") for step in (22, 23, 24)
    }
    rows = recording.rows(site="grad", module_path="1", name="bias")
    assert list(rows.step) == [22, 25]


def _numbers_of(folder: Path, keep: str) -> pd.DataFrame:
    """The statistics of small parameters and gradients of two optimizers, at steps of two kinds."""
    with flagged(folder, f"site=param,grad keep=probe; site=param,grad steps=::2 keep={keep}") as recording:
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(5, 5) for _ in range(140)], nn.Linear(5, 900)).to(torch.bfloat16)
        optimizers = [torch.optim.SGD(half.parameters(), lr=0.01) for half in (model[:90], model[90:])]
        for _ in range(6):
            model(torch.randn(3, 5, dtype=torch.bfloat16)).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    return pd.DataFrame([row for row in recording.rows().to_dict("records") if row["site"] in ("param", "grad")])


def test_small_values_measured_together_have_the_numbers_of_values_that_were_copied(tmp_path: Path) -> None:
    together = _numbers_of(tmp_path / "together", "stats,fingerprint")
    alone = _numbers_of(tmp_path / "alone", "tensor,stats,fingerprint")
    columns = [column.name for column in COLUMNS if column.role in (Role.KEY, Role.STATISTIC, Role.COUNT)]
    columns = [*(name for name in columns if name != "attempt"), "shape", "dtype", "fingerprint"]
    assert len(together) == 3 * 2 * 282
    pd.testing.assert_frame_equal(together[columns], alone[columns])


def test_small_values_without_room_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    take = Pool.take
    monkeypatch.setattr(Pool, "take", lambda pool, nbytes: None if nbytes == 8 << 10 else take(pool, nbytes))
    monkeypatch.setattr(Pool, "take_or_wait", lambda *_, **__: None)
    with flagged(tmp_path, "site=param,grad keep=probe,stats") as recording:
        _train(nn.Sequential(nn.Linear(3, 8), nn.Linear(8, 2)), 5)
    ledger = recording.manifest["ledger"]
    num_known = 3 * 8  # the probe begins inside the first step, and learns the values at the second
    assert ledger["dropped"] == {"pool_full": num_known} and ledger["observed"] == ledger["written"] + num_known
    assert [len(rows) for _, rows in recording.rows(site="param").groupby("step")] == [4, 4]


def _train_watched(model: nn.Module, inputs: list[Any]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for x in inputs:
        model(x)[0].sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_each_row_is_read_from_its_own_batch(tmp_path: Path) -> None:
    seen: list[float] = []
    with flagged(tmp_path, "site=param keep=probe") as recording:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        attachment = recorder.attach(model)
        for _ in range(40):  # more batches than are read together
            seen.append(float(model.weight.detach().double().norm()))
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            model(torch.ones(1, 2))  # the step is over
            assert attachment.flush(30)
    frame = _probe(recording)
    weight = frame[frame.name == "weight"]
    assert list(weight.step) == list(range(40))
    assert list(weight.l2) == pytest.approx(seen, rel=1e-6)


class Masked(nn.Module):
    """Gives scores with a mask, an expanded tensor and a complex one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return scores + self.weight, torch.ones(3, 1).expand(3, 1 << 34), torch.full((5,), 3 + 4j)


def test_a_nan_behind_a_mask_and_a_mask_that_grows_are_told(tmp_path: Path) -> None:
    masked, more, nan = (torch.zeros(3) for _ in range(3))
    masked[0] = more[:2] = nan[0] = -torch.inf
    nan[2] = torch.nan
    with flagged(tmp_path, "site=output name=0 keep=probe") as recording:
        model = Masked()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for scores in (masked, masked, more, masked, nan, nan):
            model(scores)[0].nan_to_num().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    rows = recording.rows(site="output")
    assert list(rows.step) == [0, 2, 4]
    assert list(rows.nan_count) == [0, 0, 1]


def test_repeated_elements_and_complex_ones_count_without_a_copy(tmp_path: Path) -> None:
    with flagged(tmp_path, "site=output keep=probe") as recording:
        _train_watched(Masked(), [torch.zeros(3)] * 2)
    frame = _probe(recording).set_index(["name", "step"])
    assert frame.l2["1", 0] == pytest.approx((3 * 2.0**34) ** 0.5)
    assert frame.numel["1", 0] == 3 << 34
    assert frame.l2["2", 1] == pytest.approx(5**0.5 * 5)


def test_hooks_rest_where_every_value_is_on_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recorder.capture.probe.probe._is_on_host", lambda tensor: False)
    torch._dynamo.utils.counters.clear()  # other tests of this process may have compiled something
    with flagged(tmp_path, "; ".join(rule.text for rule in DEFAULT_RULES)) as recording:
        model = Net()
        _train(model, 13)
        assert not any(module._forward_hooks for module in (model.up, model.norm, model.down))
    assert recording.run.probe().num_rows == 0
    assert set(recording.rows(site="param").step) == {*range(5), 10}


def test_a_plan_of_known_values_heeds_calls_and_shapes_and_lazy_bits(tmp_path: Path) -> None:
    rules = (
        "site=param call=1:2 keep=stats steps=0::2; site=param call=0:1 keep=stats steps=1::2; "
        "site=param,grad keep=probe; site=grad keep=stats"
    )
    with flagged(tmp_path, rules) as recording:
        model = nn.Linear(2, 2, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for step in range(8):
            model(torch.ones(1, 2)).sum().backward()
            if step >= 5:
                model.weight.grad = torch._neg_view(-torch.ones(2, 2))
            if step == 7:
                model.weight.grad = None
                model.weight.data = torch.ones(1, 4)
            optimizer.step()
            optimizer.zero_grad()
    parameters, gradients = recording.rows(site="param"), recording.rows(site="grad")
    assert list(parameters.step) == [1, 3, 5, 7]
    assert list(parameters["shape"].astype(str)) == ["[2,2]"] * 3 + ["[1,4]"]
    assert list(gradients[gradients.step >= 5]["mean"]) == [1.0, 1.0]


def test_a_step_that_only_the_probe_measures_makes_the_garbage_collector_run_no_more_often(tmp_path: Path) -> None:
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(500)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def collections_of_a_step() -> int:
        before: int = gc.get_stats()[0]["collections"]
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        after: int = gc.get_stats()[0]["collections"]
        return after - before

    without = max(collections_of_a_step() for _ in range(5))
    with flagged(tmp_path, PROBE):
        for _ in range(9):  # the last of the early steps whose models are looked at
            collections_of_a_step()
        with_probe = min(collections_of_a_step() for _ in range(5))
    assert with_probe <= without + 2  # 6 with a list of the dtypes and shapes, and 2 without a recorder


def test_an_optimizer_without_a_hash_is_recorded(tmp_path: Path) -> None:
    class Equal(torch.optim.SGD):
        def __eq__(self, other: object) -> bool:
            return self is other

    with flagged(tmp_path, PROBE) as recording:
        model = Net()
        optimizer = Equal(model.parameters(), lr=0.1)
        for _ in range(4):
            model(torch.randn(4, 3)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    frame = _probe(recording)
    assert set(frame[frame.site == "grad"].step) == {0, 1, 2, 3} and not recording.events("hook_error")


def test_an_update_that_is_not_finite_is_not_seen(tmp_path: Path) -> None:
    with flagged(tmp_path, PROBE) as recording:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(6):
            model(torch.randn(4, 3)).square().mean().backward()
            if step == 3:
                assert model.down.bias.grad is not None
                model.down.bias.grad[0] = torch.nan
            optimizer.step()
            optimizer.zero_grad()
    frame = _probe(recording)
    updates = frame[(frame.site == "update") & (frame.module_path == "down") & (frame.name == "bias")]
    assert list(updates.step) == [0, 1, 2] and not updates.nan_count.any()
    assert first(recording.run).nonfinite is not None


def test_a_parameter_that_the_last_update_turns_nan_is_named(tmp_path: Path) -> None:
    with flagged(tmp_path, PROBE) as recording:
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for step in range(6):
            model(torch.randn(4, 3)).square().mean().backward()
            if step == 5:
                optimizer.state[model.down.bias]["exp_avg_sq"].fill_(-1.0)
            optimizer.step()
            optimizer.zero_grad()
        assert model.down.bias.isnan().all()
    bad = first(recording.run).nonfinite
    assert bad is not None
    assert (bad.value.step, bad.value.module_path, bad.value.site, bad.value.name) == (5, "down", "update", "bias")
    findings = recorder.check(recording.run).findings
    assert [(one.site, one.name, one.step) for one in findings if one.rule == "nonfinite"] == [("update", "bias", 5)]
    assert compare(recording.run).problems == []


def test_a_parameter_whose_memory_moves_during_a_step_still_has_an_update(tmp_path: Path) -> None:
    with flagged(tmp_path, PROBE) as recording:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def move(*_: Any) -> None:
            model.up.weight.data = model.up.weight.data.clone()

        optimizer.register_step_pre_hook(move)
        for _ in range(6):
            model(torch.randn(4, 3)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    frame = _probe(recording)
    updates = frame[(frame.site == "update") & (frame.module_path == "up") & (frame.name == "weight")]
    assert list(updates.step) == list(range(6)) and (updates.l2 > 0).all()


def test_an_output_without_strided_memory_does_not_go_the_short_way(tmp_path: Path) -> None:
    usual = torch.arange(1.0, 13.0).reshape(3, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch calls some of these kinds a prototype
        nested = torch.nested.nested_tensor([usual[0, :2], usual.reshape(-1)[2:]])
        kinds = [usual.to_sparse(), usual.to_sparse_csr(), usual.to_mkldnn(), torch._efficientzerotensor(3, 4), nested]
        kinds.append(torch._to_functional_tensor(usual))
    found = []
    for native in ("yes", "no"):  # without the loops no output takes the short way
        with flagged(tmp_path / native, "site=output keep=probe", native=native) as recording:
            model = GivesAnything()
            optimizer = torch.optim.SGD(model.parameters())
            for given in [usual, usual, *kinds, usual]:
                model(given)
                model.weight.grad = torch.ones(1)
                optimizer.step()
        frame = _probe(recording)
        outputs = frame[frame.site == "output"]
        found.append(list(zip(outputs.step, outputs.numel, outputs.l2.round(6), strict=True)))
    assert found[0] == found[1]
    assert {step for step, _, _ in found[0]} == {
        0,
        1,
        2,
        3,
        5,
        8,
    }  # not those of mkldnn, the nested and the functional one


class CallsElsewhere(nn.Module):
    """Calls its inner module for a graph at one step, in a thread of its own at another, and in a backward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.num_calls = nn.Sequential(nn.Linear(3, 3), nn.Tanh()), 0
        self.graph: list[str] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        if self.num_calls == 8:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # an error in a hook would leave the call out, too
                traced = torch.jit.trace(self.inner, x, check_trace=False)
            self.graph = [node.kind() for node in traced.inlined_graph.nodes()]
        if self.num_calls == 9:
            other = threading.Thread(target=torch.no_grad()(self.inner), args=(x,))
            other.start()
            other.join()
        if self.num_calls == 10:
            self.earlier.sum().backward()
        self.earlier: torch.Tensor = checkpoint(self.inner, x.requires_grad_(), use_reentrant=False)
        y: torch.Tensor = self.earlier
        return y


def test_what_is_called_for_a_graph_by_a_thread_or_in_a_backward_is_no_call_of_a_forward(tmp_path: Path) -> None:
    graphs = []
    for is_recorded in (True, False):
        with flagged(tmp_path, PROBE) if is_recorded else contextlib.nullcontext() as recording:
            torch.manual_seed(0)
            model = CallsElsewhere()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(12):
                model(torch.ones(2, 3)).square().mean().backward(retain_graph=True)
                optimizer.step()
                optimizer.zero_grad()
            graphs.append(model.graph)
        if recording is not None:
            frame = _probe(recording)
    assert graphs[0] == graphs[1] and graphs[0][-2:] == ["aten::linear", "aten::tanh"]
    numels = frame[(frame.module_path == "inner.0") & (frame.site == "output")].groupby("mode").numel.agg(list)
    assert numels.to_dict() == {"train": 12 * [6], "no_grad": [6]}


def test_values_beyond_the_most_that_have_a_number_at_every_step_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("recorder.capture.probe.probe.MAX_COLUMNS", 3)
    with flagged(tmp_path, PROBE) as recording:
        _train(Net(), 9)
    assert len(_probe(recording).groupby(["module_path", "site", "name"])) == 3
    (told,) = recording.events("probe_full")
    assert told.startswith("the numbers of every step are kept of 65,536 values, and further values have none: select")
    assert any(told in check.text for check in checks_of(recording.run)), "doctor lists it"


def test_a_value_of_a_step_that_is_over_is_no_number_of_another_step(tmp_path: Path) -> None:
    """Another thread evaluates, and its call lasts from one step into the next."""
    entered, leave = threading.Event(), threading.Event()

    class Waits(nn.Module):
        def forward(self, given: torch.Tensor) -> torch.Tensor:
            if not torch.is_grad_enabled():
                entered.set()
                leave.wait()
            return given

    def evaluate() -> None:
        with torch.no_grad():
            model(torch.ones(2, 4))

    norms = []
    with flagged(tmp_path, "site=output,grad keep=probe") as recording:
        model = nn.Sequential(first := nn.Linear(4, 4), Waits(), nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        for step in range(8):
            if step == 4:
                (other := threading.Thread(target=evaluate)).start()
                entered.wait()
            model(torch.full((2, 4), step + 1.0)).square().mean().backward()
            assert first.weight.grad is not None
            norms.append(float(first.weight.grad.norm()))
            optimizer.step()
            optimizer.zero_grad()
            if step == 4:
                leave.set()
                other.join()
    frame = _probe(recording)
    found = frame[(frame.site == "grad") & (frame.module_path == "0") & (frame.name == "weight")]
    assert list(found.step) == list(range(8))
    assert found.l2.to_numpy() == pytest.approx(norms, rel=1e-6)
    assert len(recording.events("probe_missed")) == 1
