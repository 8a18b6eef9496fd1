"""The mode of a row is that of the model inside a wrapper, whose own training flag need not follow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from recorder.observe.tree import Signature
from tests.rigs.capturing import Recording, Tiny, batch, flagged


class Wrapper(nn.Module):
    """Holds a model as ``module``, as DDP does."""

    def __init__(self, model: nn.Module, name: str = "module") -> None:
        super().__init__()
        self._modules[name] = model
        self._name = name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self._modules[self._name](x)  # type: ignore[misc]
        return output


class DistributedDataParallel(Wrapper):
    """Has the name of DDP, by which it is known."""


class Engine(Wrapper):
    """Sets the flag of the model alone, as DeepSpeed's engine does."""

    def train(self, mode: bool = True) -> Engine:
        self._modules[self._name].train(mode)  # type: ignore[union-attr]
        return self


class DeepSpeedEngine(Engine):
    """Has the name of DeepSpeed's engine, and a child of its own."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.own = nn.Identity()


class FabricModule(Engine):
    """Holds the model twice, as Fabric does around DDP."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(DistributedDataParallel(model), "_forward_module")
        self._original_module = model


def trained(folder: Path, model: nn.Module, *, flag: bool | None) -> Recording:
    """Train two steps with an evaluation between them, in which gradients are on; ``flag`` is the wrapper's own."""
    with flagged(folder) as recording:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            for is_training in (True, False):
                model.train(is_training)
                if flag is not None:
                    model.training = flag
                loss = model(batch()).square().mean()
                if is_training:
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
    return recording


@pytest.mark.parametrize(
    ("kind", "flag", "prefix"),
    [
        (DistributedDataParallel, False, ""),
        (DistributedDataParallel, True, ""),
        (Wrapper, False, "module."),
        (Engine, None, "module."),
        (DeepSpeedEngine, None, ""),
        (FabricModule, None, ""),
        (lambda model: torch.compile(DistributedDataParallel(model), backend="eager"), False, ""),
    ],
)
def test_the_mode_is_that_of_the_model_in_a_wrapper(tmp_path: Path, kind: Any, flag: bool | None, prefix: str) -> None:
    recording = trained(tmp_path, kind(Tiny()), flag=flag)
    outputs = recording.rows(site="output", module_path="")
    assert list(zip(outputs.step, outputs["mode"], strict=True)) == [
        (step, mode) for step in range(2) for mode in ("train", "eval")
    ]
    paths = {path for path in recording.run.module_paths if path.endswith("first")}
    assert paths == {f"{prefix}first"}
    assert recording.run.array("", site="output", step=1, mode="train").shape == (3, 2)


def test_a_model_that_is_no_wrapper_has_a_mode_of_its_own(tmp_path: Path) -> None:
    """Such a model may keep a frozen part in eval."""
    model = Wrapper(Tiny(), "backbone")
    model.backbone.eval()  # type: ignore[union-attr]
    model.train = lambda mode=True: setattr(model, "training", mode)  # type: ignore[method-assign,assignment,return-value]
    outputs = trained(tmp_path, model, flag=None).rows(site="output", module_path="")
    assert list(outputs["mode"]) == ["train", "eval"] * 2


def test_a_wrapper_around_one_modules_forward_leaves_the_names_of_its_arguments() -> None:
    """Transformers' tensor parallelism puts such a wrapper on every module that it cuts."""
    linear, x = nn.Linear(2, 2), torch.zeros(1, 2)
    forward = linear.forward
    linear.forward = lambda *args, **kwargs: forward(*args, **kwargs)  # type: ignore[method-assign]
    assert [name for name, _ in Signature(linear).leaves((x,), {})] == ["input"]
