"""The first value that is not finite: said once when it happens and in the last words, and never of a mask."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import recorder
from recorder.analyze.first.first import reply_of
from recorder.capture.nonfinite import FirstNonFinite
from recorder.observe.clock import Clock
from recorder.records import Measured
from tests.rigs import jobs
from tests.rigs.capturing import flagged
from tests.rigs.fakes import fake_staged

RANKS = """
import torch
import torch.distributed as dist
from torch import nn
import recorder
from tests.rigs.leaving import leave

def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recorder.attach(model, enabled=True, dir="recordings", rules="site=* keep=stats"):
        for step in range(6):
            if dist.get_rank() == 1 and step == 3:
                model.module[0].weight.data[0, 0] = float("nan")
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
    leave()

if __name__ == "__main__":
    main()
"""
SEEN = re.compile(r"recorder: rank (\d): the first value that is not finite: (.*); recorder first (\S+) tells where")


def test_each_rank_says_its_first_once_and_rank_0_says_at_the_end_what_to_type(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(RANKS)
    finished = jobs.succeeded(jobs.ranks(tmp_path, script))
    said = {int(found[1]): found for found in map(SEEN.match, finished.output.splitlines()) if found}
    assert len(said) == len(finished.lines("first value that is not finite")) == 2
    assert said[1][2] == "step 3, '0' output (2 NaN of 8 elements)"
    assert said[0][2] == "step 3, '1' grad weight (2 NaN of 8 elements)"  # what the reduction brought
    assert said[0][3] == said[1][3] == f"recordings/{finished.run.name}", "as the program named its folder"
    (written,) = finished.lines("rows of rank 0")
    rest = "not finite since step 3, '1' grad weight (of rank 0; recorder first looks at all ranks); nothing dropped"
    assert f"; rank 1: step 3, '0' output: not finite (2 NaN of 8 elements); {rest}" in written
    assert finished.lines("recorder: next: ") == [f"recorder: next: recorder first recordings/{finished.run.name}"]


@pytest.fixture
def said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Callable[..., list[str]]:
    """What a training of a model says, step by step, of values that are not finite."""

    def run(model: nn.Module, train: Callable[[nn.Module, int], None], num_steps: int = 3) -> list[str]:
        with recorder.attach(model, enabled=True, dir=str(tmp_path), rules="site=* keep=stats"):
            for step in range(num_steps):
                train(model, step)
        return [text for record in caplog.records if "not finite" in (text := record.getMessage())]

    return run


class Masks(nn.Module):
    """Attention that masks with infinities: in an input, in a buffer, in an output and in what hands it on."""

    mask: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.full((4, 4), -math.inf).triu(1))
        self.logits = nn.Linear(4, 4)
        self.hand_on = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.hand_on(self.logits(x) + self.mask)  # type: ignore[no-any-return]


def test_masks_are_no_finding(said: Callable[..., list[str]]) -> None:
    model = Masks()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(model: nn.Module, step: int) -> None:
        model(torch.randn(4, 4)).softmax(-1)[:, 0].sum().backward()
        recorder.scalar("best", math.inf)  # of nothing so far
        optimizer.step()

    assert said(model, train) == []


class Grows(nn.Module):
    """Divides exponentials by their sum, after a mask that holds infinities from the first step on."""

    def __init__(self) -> None:
        super().__init__()
        self.logits, self.keep, self.exponentials = nn.Linear(4, 4), Masks(), Exponentials()
        self.hand_on = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        masked = self.keep(x).softmax(-1)
        made = self.hand_on(self.exponentials(self.logits(x)))
        return masked + made / made.sum(-1, keepdim=True)  # type: ignore[no-any-return]


class Exponentials(nn.Module):
    gain = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.gain * x).abs().exp()


@pytest.mark.parametrize("was_harmless", [False, True])
def test_an_output_that_becomes_infinite_is_the_first_where_it_makes_a_nan(
    said: Callable[..., list[str]], was_harmless: bool
) -> None:
    """What is infinite from the first step on is a mask, as is what was infinite at an earlier step without harm."""
    model = Grows()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(model: nn.Module, step: int) -> None:
        assert isinstance(model, Grows)
        model.exponentials.gain = 1e5 if step == 2 else 1.0
        if was_harmless and step == 1:
            model.hand_on(model.exponentials(torch.full((4, 4), 1e3)))
        model(torch.randn(4, 4)).square().sum().backward()
        optimizer.step()

    (text,) = said(model, train)
    assert ("step 2, 'exponentials' output (" in text) == (not was_harmless)
    assert ("NaN of" in text) == was_harmless


def scaled(scale: float) -> Callable[[nn.Module, int], None]:
    """Training under a GradScaler that begins with this scale, in float32."""
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    made: list[torch.optim.Optimizer] = []

    def train(model: nn.Module, step: int) -> None:
        made[:] = made or [torch.optim.SGD(model.parameters(), lr=1e-3)]
        made[0].zero_grad()
        scaler.scale(model(torch.full((2, 4), 1e6)).sum()).backward()
        scaler.step(made[0])
        scaler.update()

    return train


def test_infinite_gradients_of_a_step_that_gradscaler_skips_are_no_finding(said: Callable[..., list[str]]) -> None:
    assert said(nn.Linear(4, 2), scaled(2.0**127), 3) == []


def test_infinite_gradients_of_a_step_that_is_taken_are_one(said: Callable[..., list[str]]) -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def train(model: nn.Module, step: int) -> None:
        weight = model.weight
        assert isinstance(weight, torch.Tensor)
        root_of_zero = (weight - weight.detach()).sum().sqrt()
        (root_of_zero + model(torch.ones(2, 4)).sum()).backward()
        optimizer.step()

    (text,) = said(model, train)
    assert "step 0, (the model) grad weight (8 infinite of 8 elements)" in text


def test_nan_in_what_the_model_is_given_comes_before_what_it_makes_of_it(said: Callable[..., list[str]]) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(model: nn.Module, step: int) -> None:
        model(torch.tensor([[math.nan if step == 1 else 1.0, 1.0]])).sum().backward()
        optimizer.step()

    (text,) = said(model, train)
    assert "step 1, (the model) input" in text and "(1 NaN of 2 elements)" in text


@pytest.mark.parametrize(("name", "is_said"), [("loss", True), ("train/loss", True), ("loss_scale", False)])
def test_an_infinite_scalar_counts_where_it_is_called_a_loss(
    said: Callable[..., list[str]], name: str, is_said: bool
) -> None:
    def train(model: nn.Module, step: int) -> None:
        model(torch.ones(2, 4))
        recorder.scalar(name, math.inf)

    assert len(said(nn.Linear(4, 2), train)) == is_said


def test_a_gradient_is_said_before_the_state_that_an_optimizer_made_of_it(said: Callable[..., list[str]]) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def train(model: nn.Module, step: int) -> None:
        optimizer.zero_grad()
        out = model(torch.ones(2, 4))
        root_of_zero = (out - out.detach()).sum().sqrt() if step == 1 else 0.0  # its gradient is infinite
        (out.square().sum() + root_of_zero).backward()
        optimizer.step()

    (text,) = said(model, train)
    assert "step 1, '1' grad_output (4 infinite of 4 elements)" in text


@pytest.mark.parametrize("step", [0, 1])
def test_a_loss_that_is_not_finite_is_named(said: Callable[..., list[str]], step: int) -> None:
    """The first step's is recorded at the end of the step, for the program may give one of its own until then."""
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def train(model: nn.Module, at: int) -> None:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).square().sum()
        (loss * math.nan if at == step else loss).backward()
        optimizer.step()

    (text,) = said(model, train)
    first = "step 1, scalar loss (1 NaN of 1 element)"
    late = "step 0, (the model) grad_output (4 NaN of 4 elements; scalar loss of this step is not finite, either)"
    assert (first if step else late) in text


@pytest.mark.parametrize("site", ["grad_output", "grad"])
def test_a_gradient_is_no_finding_where_the_optimizer_got_a_finite_one(site: str) -> None:
    watch = FirstNonFinite(rank=0, clock=Clock())
    watch.saw([fake_staged(module_path="up", site=site)], [Measured(inf_count=1)])
    watch.saw([fake_staged(module_path="up", site="grad", name="bias", scope="final")], [Measured()])
    watch.saw([fake_staged(module_path="up", step=1)], [Measured()])
    watch.look(None, is_last=True)
    assert (watch.first is None) == (site == "grad_output")


@pytest.mark.parametrize(("is_skipped", "where"), [(True, "scalar train/loss"), (False, "'up' grad")])
def test_what_comes_after_a_gradient_is_the_first_where_its_step_is_skipped(is_skipped: bool, where: str) -> None:
    watch = FirstNonFinite(rank=0, clock=Clock())
    bad = Measured(mean=0.0, nan_count=1)
    watch.saw([fake_staged(module_path="up", site="grad")], [bad])
    watch.saw([fake_staged(module_path="up", site="grad", name="bias")], [bad])
    watch.saw([fake_staged(site="scalar", name="train/loss")], [bad])
    if is_skipped:
        watch.skipped(0)
    watch.saw([fake_staged(module_path="down", step=1)], [bad])
    assert watch.first is not None and (watch.first.step, watch.first.where) == (0, where)


def test_of_a_step_that_is_decided_on_a_device_the_row_that_says_so_is_waited_for() -> None:
    clock = Clock()
    watch = FirstNonFinite(rank=0, clock=clock)
    watch.is_told_by_rows = True
    bad = Measured(mean=0.0, nan_count=1)
    watch.saw([fake_staged(site="grad", name="weight", phase="optimizer")], [bad])
    clock.step = 5
    watch.look(None)
    assert watch.first is None
    watch.saw([fake_staged(site="scalar", name="skipped")], [Measured(mean=1.0)])
    watch.saw([fake_staged(site="output", step=1)], [Measured()])
    watch.look(None)
    watch.saw([fake_staged(site="grad", name="weight", phase="optimizer", step=1)], [bad])
    watch.saw([fake_staged(site="scalar", name="skipped", step=1)], [Measured(mean=0.0)])
    watch.look(None)
    assert watch.first is None
    watch.look(None, is_last=True)
    assert watch.first is not None and watch.first.step == 1


def test_of_several_models_the_one_with_the_value_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    makes, judges = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in (makes, judges)]
    with flagged(tmp_path, "site=output,param,grad steps=0:3 keep=stats; site=output keep=probe") as recording:
        for step in range(4):
            if step == 2:
                nn.init.constant_(judges[0].bias, math.nan)  # type: ignore[arg-type]
            judges(makes(torch.randn(8, 4))).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    said = [text for record in caplog.records if "not finite: step" in (text := record.getMessage())]
    assert len(said) == 1 and "step 2, model_1: '0' output (32 NaN of 32 elements)" in said[0]
    lines = [str(part) for part in reply_of(recording.run, recorder.first(recording.run)).parts()]
    assert "first NaN or infinity: step 2, model_1: '0' output, rank 0" in lines[0]
    assert recording.events("trouble")[0].startswith("model_1: '0' output turned NaN at step 2; statistics of steps ")
