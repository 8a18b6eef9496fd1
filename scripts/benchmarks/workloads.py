"""What is trained: the demo's GPT, alone or on the ranks of DDP, chains of modules, and the models of `programs`.

Nothing here may import `recorder`: its own runs differ by environment alone.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

DEMO = Path(__file__).parents[2] / "scripts" / "demo_train.py"
NUM_SMALL = 1000
"""Pairs of small modules."""
COLD_CHAINS = {"cold-small": (200, 16, 16), "cold-large": (60, 128, 768)}
"""The modules of each chain, their width, and the rows of a batch."""
_EVICTED_BYTES = 4 << 20


class Workload(NamedTuple):
    """A training, step by step."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batches: Iterator[tuple[Tensor, Tensor]]
    train_step: Callable[[nn.Module, torch.optim.Optimizer, Tensor, Tensor], float]


def make(name: str) -> Workload:
    """The workload of that name, seeded; each rank has its own batches."""
    torch.manual_seed(1234)
    if name in COLD_CHAINS:
        return _cold_chain(name)
    make_it = {"demo": _demo, "ddp": _ddp, "small": _small}.get(name)
    return _program(name) if make_it is None else make_it()


def load_demo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo_train", DEMO)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _demo() -> Workload:
    demo = load_demo()
    model = demo.GPT()
    batches = demo.batches(demo.load_text(max_bytes=2 << 20), seed=int(os.environ.get("RANK", "0")))
    return Workload(model, demo.make_optimizer(model), batches, demo.train_step)


def _ddp() -> Workload:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", f"file://{os.environ['BENCH_STORE']}", rank=rank, world_size=world_size)
    made = _demo()
    model = nn.parallel.DistributedDataParallel(made.model)
    return made._replace(model=model, optimizer=load_demo().make_optimizer(model))


def _small() -> Workload:
    width = 16
    model = nn.Sequential(
        *[layer for _ in range(NUM_SMALL) for layer in (nn.Linear(width, width), nn.LayerNorm(width))]
    )
    generator = torch.Generator().manual_seed(0)

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            yield torch.randn(16, width, generator=generator), torch.randn(16, width, generator=generator)

    return Workload(model, torch.optim.SGD(model.parameters(), lr=0.01), batches(), _step_of_chain)


class _Evicting(torch.autograd.Function):
    """Returns its argument, and fills the nearer caches with other data, as the rest of a training does."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, memory: Tensor) -> Tensor:
        ctx.memory = memory.add_(1)
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.memory.add_(1)
        return gradient, None


class _ColdLinear(nn.Linear):
    """A linear layer whose hooks find nothing in the nearer caches but its values."""

    def __init__(self, width: int, memory: Tensor) -> None:
        super().__init__(width, width)
        self.memory = [memory]
        """In a list, because it is no buffer."""

    def forward(self, values: Tensor) -> Tensor:
        evicted: Tensor = _Evicting.apply(values, self.memory[0])  # type: ignore[no-untyped-call]
        return super().forward(evicted)


def _cold_chain(name: str) -> Workload:
    num_modules, width, num_rows = COLD_CHAINS[name]
    memory = torch.zeros(_EVICTED_BYTES // 4)
    model = nn.Sequential(*[_ColdLinear(width, memory) for _ in range(num_modules)])
    generator = torch.Generator().manual_seed(0)

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            inputs, targets = (torch.randn(num_rows, width, generator=generator) for _ in range(2))
            yield inputs, targets

    return Workload(model, torch.optim.SGD(model.parameters(), lr=0.01), batches(), _step_of_chain)


def _program(name: str) -> Workload:
    from .programs import make_model

    model, batches = make_model(name, torch.Generator().manual_seed(0))
    return Workload(model, torch.optim.AdamW(model.parameters(), lr=1e-3), batches, _step_of_program)


def _step_of_program(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor, targets: Tensor) -> float:
    loss = nn.functional.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def _step_of_chain(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor, targets: Tensor) -> float:
    loss: Tensor = (model(inputs) - targets).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()
