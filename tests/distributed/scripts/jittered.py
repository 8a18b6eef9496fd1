"""Tensor parallel trainings of two ranks, each as it is and as a twin whose inputs are moved by a last place."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

import recorder
from tests.rigs.leaving import leave
from tests.rigs.parallel import Net, fit, local, make, mesh_of, num_collectives, sp, tp

RULES = "site=output,param keep=tensor"
KINDS: dict[str, Placement] = {"replicate": Replicate(), "shard": Shard(0), "partial": Partial()}


class Table(nn.Module):
    """An embedding of a class that nobody knows."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.detach().clone())

    def forward(self, words: Tensor) -> Tensor:
        return self.weight[words]


def unknown(model: nn.Module) -> nn.Module:
    assert isinstance(model, Net)
    model.embed = Table(model.embed.weight)  # type: ignore[assignment]
    return model


class Twice(nn.Module):
    """What is given DTensors."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: DTensor) -> Tensor:
        return x.to_local() * self.weight


def train(case: Callable[[nn.Module], nn.Module], folder: Path, jitter: int, *, late: bool) -> tuple[list[Tensor], int]:
    """Everything that a training ends with, and its collectives."""
    model = make() if late else case(make())
    before = num_collectives()
    with recorder.attach(model, enabled=True, dir=folder, rules=RULES, jitter=jitter):
        model = case(model) if late else model
        return fit(model), num_collectives() - before


def of_inputs(folder: Path) -> dict[str, tuple[Tensor, Tensor, Tensor, int]]:
    """By kind the local input before and after, what the model saw of it, and the collectives of it."""
    found = {}
    mesh = mesh_of(("tp", dist.get_world_size()))
    for name, placement in KINDS.items():
        values = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))
        given = DTensor.from_local(values, mesh, [placement], run_check=False)
        model = Twice()
        num_before = num_collectives()
        with recorder.attach(model, enabled=True, dir=folder / name, rules=RULES, jitter=1):
            seen = model(given)
            seen.sum().backward()
        found[name] = values.clone(), local(given), seen.detach(), num_collectives() - num_before
    return found


def main() -> None:
    out = Path(sys.argv[1])
    dist.init_process_group("gloo")
    found = {}
    for name, case, late in (("tp", tp, False), ("tp_late", tp, True), ("sp", sp, False), ("unknown", unknown, False)):
        plain = train(case, out / f"{name}.plain", 0, late=late)
        twin = train(case, out / f"{name}.twin", 1, late=late)
        found[name] = plain, twin
    torch.save((found, of_inputs(out)), out / f"rank{dist.get_rank()}.pt")
    leave()


if __name__ == "__main__":
    main()
