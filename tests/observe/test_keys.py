"""No two rows have one key, whatever a program does between two updates, and a run is equal to its repetition."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import recorder
from tests.rigs.capturing import EVERYTHING, Recording, batch, flagged
from tests.rigs.command_line import Cli, cli

__all__ = ["cli"]
KEY = [
    "root",
    "module_path",
    "site",
    "name",
    "phase",
    "mode",
    "step",
    "micro_step",
    "call",
    "repeat",
    "rank",
    "attempt",
]


class Shared(nn.Module):
    """Modules that are called several times: plainly, under checkpoints of both kinds, without gradients, and alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.act = nn.Tanh()
        self.last = nn.Linear(4, 1)

    def block(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.act(self.first(x))
        recorder.tap("hidden", hidden)
        return hidden

    def forward(self, x: torch.Tensor, how: str = "plain", depth: int = 0) -> torch.Tensor:
        x = self.block(x)
        if how in ("reentrant", "checkpoint"):
            for _ in range(2):
                x = checkpoint(self.block, x, use_reentrant=how == "reentrant")
        elif how == "teacher":
            with torch.no_grad():
                x = x + self.block(x)
        elif how == "raises":
            self.act(self.first(x))
            raise ArithmeticError("on purpose")
        if depth:
            x = x + self(x, how, depth - 1)
        recorder.tap("hidden", x)
        output: torch.Tensor = self.last(x)
        return output


class Program:
    """A program that does some of what programs do, in an order that a seed gives."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        torch.manual_seed(seed)
        self._models = [Shared(), Shared()]
        self._optimizer = torch.optim.SGD([p for model in self._models for p in model.parameters()], lr=0.01)
        self._losses: list[torch.Tensor] = []
        self._acts: list[Callable[[nn.Module, torch.Tensor], object]] = [
            *(self._forward(how) for how in ("plain", "reentrant", "checkpoint", "teacher")),
            self._without_gradients,
            self._in_eval,
            self._part,
            self._raises,
            self._itself,
            self._backward,
            self._backward_twice,
            self._update,
            self._closure,
            self._scalar,
        ]

    def run(self) -> None:
        for model in self._models:
            self._losses.append(model(batch(1)).sum())
        self._backward(self._models[0], batch(1))
        for _ in range(25):
            act, model = self._random.choice(self._acts), self._random.choice(self._models)
            act(model, batch(self._random.randrange(1 << 20)))
        self._update(self._models[0], batch(1))

    def _forward(self, how: str) -> Callable[[nn.Module, torch.Tensor], object]:
        def forward(model: nn.Module, x: torch.Tensor) -> None:
            self._losses.append(model(x.requires_grad_(self._random.random() < 0.5), how).sum())

        return forward

    def _without_gradients(self, model: nn.Module, x: torch.Tensor) -> None:
        with torch.no_grad():
            model.train(self._random.random() < 0.5)
            model(x)
            model.train()

    def _in_eval(self, model: nn.Module, x: torch.Tensor) -> None:
        model.eval()
        self._losses.append(model(x, self._random.choice(["plain", "reentrant"])).sum())
        model.train()

    def _part(self, model: Any, x: torch.Tensor) -> None:
        with torch.set_grad_enabled(self._random.random() < 0.5):
            loss = model.block(model.block(x)).sum()
        self._losses += [loss] * loss.requires_grad

    def _raises(self, model: nn.Module, x: torch.Tensor) -> None:
        with torch.set_grad_enabled(self._random.random() < 0.5), pytest.raises(ArithmeticError):
            model(x, "raises")

    def _itself(self, model: nn.Module, x: torch.Tensor) -> None:
        self._losses.append(model(x, "plain", 2).sum())

    def _backward(self, model: nn.Module, x: torch.Tensor) -> None:
        if self._losses:
            torch.stack(self._losses).sum().backward()
            self._losses.clear()

    def _backward_twice(self, model: nn.Module, x: torch.Tensor) -> None:
        if self._losses:
            torch.stack(self._losses).sum().backward(retain_graph=True)
            self._backward(model, x)

    def _update(self, model: nn.Module, x: torch.Tensor) -> None:
        self._losses.clear()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _closure(self, model: nn.Module, x: torch.Tensor) -> None:
        def closure() -> float:
            loss = model(x).square().mean()
            with torch.no_grad():
                model(x)
            loss.backward()
            return float(loss.detach())

        self._losses.clear()
        self._optimizer.step(closure)

    def _scalar(self, model: nn.Module, x: torch.Tensor) -> None:
        recorder.scalar("number", 1.0)


def recorded(folder: Path, program: Callable[[], None], rules: str = EVERYTHING, **settings: object) -> Recording:
    gc.collect()  # optimizers of other recordings
    with flagged(folder, rules, **settings) as recording:
        program()
    return recording


def shared_keys(recording: Recording) -> list[tuple[Any, ...]]:
    frame = recording.run.to_pandas()[[*KEY, "part"]].astype(object)
    return [tuple(row) for row in frame[frame.duplicated(keep=False)].itertuples(index=False)]


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("seed", range(6))
def test_each_row_of_a_program_has_a_key_of_its_own(tmp_path: Path, cli: Cli, seed: int) -> None:
    runs = [recorded(tmp_path / name, Program(seed).run, local_gradients=seed % 2) for name in ("a", "b")]
    assert shared_keys(runs[0]) == []
    assert (told := cli("doctor", runs[0].run.path, "--strict")).exit_code == 0, told.out
    assert (told := cli("diff", runs[0].run.path, runs[1].run.path)).exit_code == 0, told.out


def test_calls_are_counted_on_when_training_comes_back(tmp_path: Path) -> None:
    def program() -> None:
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            loss = model(batch()).sum()
            with torch.no_grad():
                model(batch())
            loss = loss + model(2 * batch()).sum()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                model(3 * batch())

    recording = recorded(tmp_path, program)
    outputs = recording.rows(site="output")
    seen = [(row.step, row.mode, row.call) for row in outputs.itertuples()]
    one = [("train", 0), ("no_grad", 0), ("train", 1), ("no_grad", 1)]
    assert seen == [(step, mode, call) for step in range(2) for mode, call in one]
    assert len(recording.run.array("", site="input", step=1, mode="train", call=1)) == 3


def test_the_gradients_of_a_recompute_have_the_number_of_their_forward(tmp_path: Path) -> None:
    def program() -> None:
        model = Shared()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss = model(batch(), "reentrant").sum()
        with torch.no_grad():
            model(batch())
        loss.backward()
        optimizer.step()

    gradients = recorded(tmp_path, program).rows(site="grad_output", module_path="first")
    assert sorted(zip(gradients.call, gradients.repeat, strict=True)) == [(0, 0), (1, 0), (2, 0)]


def test_parts_that_are_called_alone_have_their_recompute_in_their_own_step(tmp_path: Path) -> None:
    def program() -> None:
        model = Shared()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(batch()).sum().backward()
        optimizer.step()
        model(batch()).sum().backward()
        recorder.step(5)
        checkpoint(model.block, batch(), use_reentrant=False).sum().backward()
        optimizer.step()

    assert set(recorded(tmp_path, program).rows(phase="recompute").step) == {5}


def test_a_root_that_a_wrapper_takes_over_goes_on_counting(tmp_path: Path) -> None:
    def program() -> None:
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for called in (model, nn.DataParallel(model)):
            called(batch()).sum().backward()
        optimizer.step()

    recording = recorded(tmp_path, program)
    assert list(recording.rows(site="output").micro_step) == [0, 1] and shared_keys(recording) == []


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace.* is deprecated")
@pytest.mark.parametrize("how", ["compiled", "compiled in place", "traced"])
def test_steps_are_counted_where_the_forward_is_hidden_from_some_step_on(tmp_path: Path, how: str) -> None:
    norms = []

    def program() -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
        called: Callable[..., Any] = model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(8):
            if step == 3 and how == "traced":
                called = torch.jit.trace(model, batch())
            elif step == 3 and how == "compiled":
                called = torch.compile(model, backend="aot_eager")
            elif step == 3:
                model.compile(backend="aot_eager")
            called(batch()).square().mean().backward()
            norms.append(float(next(model.parameters()).grad.norm()))  # type: ignore[union-attr]
            optimizer.step()
            optimizer.zero_grad()

    try:
        recording = recorded(tmp_path, program)
    finally:
        torch.compiler.reset()
    assert shared_keys(recording) == []
    gradients = recording.rows(site="grad", module_path="0", name="weight").sort_values("step")
    assert list(gradients.step) == list(range(8))
    assert gradients.l2.to_numpy() == pytest.approx(norms, rel=1e-6)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch itself
def test_no_hook_becomes_a_graph_where_a_compiled_function_takes_whole_steps(tmp_path: Path) -> None:
    """The first call of the model that is seen is that of its graph, inside of the compiled function."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    graphs = []

    def program() -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

        def backend(graph: Any, given: Any) -> Any:
            graphs.append(graph)
            return graph

        @torch.compile(backend=backend)
        def step(x: torch.Tensor) -> None:
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(6):
            step(batch())

    try:
        recording = recorded(tmp_path, program)
    finally:
        torch.compiler.reset()
    assert len(graphs) == 2 and recording.events("hook_error") == []


def test_a_step_that_is_named_twice_in_a_row_goes_on_counting(tmp_path: Path) -> None:
    def program() -> None:
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            model(batch()).sum().backward()
            recorder.step(3)
            recorder.scalar("number", 1.0)
            optimizer.step()

    recording = recorded(tmp_path, program)
    assert list(recording.rows(site="scalar", name="number").repeat) == [0, 1] and shared_keys(recording) == []


def test_buffers_of_two_calls_in_one_named_step_of_inference_are_told_apart(tmp_path: Path) -> None:
    def program() -> None:
        model = nn.BatchNorm1d(4)
        with torch.no_grad():
            for step in (0, 0, 1):
                model(batch())
                recorder.step(step)

    recording = recorded(tmp_path, program, roots="any")
    assert shared_keys(recording) == []


def test_a_step_that_is_named_again_is_told(tmp_path: Path, cli: Cli) -> None:
    def program() -> None:
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in (0, 1, 0):
            recorder.step(step)
            model(batch(step)).sum().backward()
            optimizer.step()

    recording = recorded(tmp_path, program)
    (event,) = recording.events("step_went_back")
    assert "recorder.step was given 0 after step 1" in event and "numbers that only grow" in event
    told = cli("doctor", recording.run.path, "--strict")
    assert told.exit_code == 1 and "rank 0 has several rows with the same key" in told.out
    with pytest.raises(recorder.errors.LookupFailedError, match="several rows have one and the same key"):
        recording.run.array("", site="output", step=0)
