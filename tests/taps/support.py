"""A model that every transform takes, and what plain hooks see of it untransformed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

import recorder

RULES = "site=output,grad_output,tap keep=tensor"
Seen = dict[tuple[str, str, str, int], np.ndarray[Any, Any]]
"""Values by module path, site, name and call."""
_KEY = ("site", "name", "call", "step", "root", "micro_step", "mode", "phase", "rank")


class Block(nn.Module):
    """A residual block whose activation works in place."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.act(self.linear(self.norm(x)))  # type: ignore[no-any-return]


class Split(nn.Module):
    """Two tensors out of one."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * 2.0, x.sin()


class Net(nn.Module):
    """Layers, a container, a module that is called twice, a nested output, and a tap by hand."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.embed = nn.Linear(4, width)
        self.blocks = nn.Sequential(Block(width), Block(width))
        self.shared = nn.Tanh()
        self.split = Split()
        self.head = nn.Linear(width, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.shared(self.blocks(self.shared(self.embed(x))))
        left, right = self.split(x)
        mixed = recorder.tap("mixed", left * right)
        return self.head(mixed)  # type: ignore[no-any-return]


def make(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def batch(rows: int = 3, seed: int = 1) -> torch.Tensor:
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(seed))


def plain_hooks(model: nn.Module, run: Callable[[nn.Module], object]) -> Seen:
    """What plain hooks see of a copy of the model, untransformed."""
    seen: Seen = {}
    calls: dict[str, int] = {}

    def hook(path: str) -> Callable[..., None]:
        def after(module: nn.Module, args: Any, output: Any) -> None:
            call = calls[path] = calls.get(path, -1) + 1
            for name, tensor in named(output):
                seen[path, "output", name, call] = tensor.detach().clone().numpy()
                if tensor.requires_grad:
                    key = path, "grad_output", name, call
                    tensor.register_hook(lambda gradient, key=key: seen.update({key: gradient.clone().numpy()}))

        return after

    plain = copy.deepcopy(model)
    recorder.strip(plain)
    handles = [module.register_forward_hook(hook(path)) for path, module in plain.named_modules()]
    run(plain)
    for handle in handles:
        handle.remove()
    return seen


def named(value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield "", value
    else:
        yield from ((str(i), item) for i, item in enumerate(value))


def train(model: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    loss = model(x).square().mean()
    loss.backward()
    return loss.detach()


def recorded(run: recorder.Run, **equal: Any) -> Seen:
    """Every module's values in a run, each of which must be there once."""
    found: Seen = {}
    frame = run.to_pandas()
    for column, value in equal.items():
        frame = frame[frame[column] == value]
    for row in frame[frame["site"].isin(["output", "grad_output"])].to_dict("records"):
        key = str(row["module_path"]), str(row["site"]), str(row["name"]), int(row["call"])
        assert key not in found, f"{key} is there twice"
        question: dict[str, Any] = {name: row[name] for name in _KEY}
        found[key] = run.array(key[0], **question)
    return found


def assert_same(found: Seen, wanted: Seen, *, exactly: bool, without: tuple[str, ...] = ()) -> None:
    """The same values under the same keys; modules in ``without`` must be missing."""
    wanted = {key: value for key, value in wanted.items() if key[0] not in without}
    assert sorted(found) == sorted(wanted), f"lacks {set(wanted) - set(found)}, has {set(found) - set(wanted)}"
    for key, value in wanted.items():
        if exactly:
            np.testing.assert_array_equal(found[key], value, err_msg=str(key))
        else:
            np.testing.assert_allclose(found[key], value, rtol=1e-4, atol=1e-6, err_msg=str(key))
