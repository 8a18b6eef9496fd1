"""Mixtures of experts in which each rank has an expert of its own and a slice of one global batch.

The router gives every expert as many rows as every other, so that what an expert works on has the very shape of a
batch. Rank 0 trains all experts once more, in one process with the whole batch, under plain hooks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import recorder
from tests.rigs.leaving import leave
from tests.rigs.parallel import Exchange, mesh_of, watch

STEPS, BATCH, WORDS, DIM = 2, 16, 4, 8
RULES = "site=* keep=tensor,stats,fingerprint"
CPU = torch.device("cpu")


class Experts(nn.Module):
    """Some experts, each on as many rows as any other."""

    def __init__(self, num: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(num, DIM, DIM) / DIM)

    def forward(self, rows: Tensor) -> Tensor:
        weight = self.weight.to_local() if isinstance(self.weight, DTensor) else self.weight
        return torch.bmm(rows.unflatten(0, (len(weight), -1)), weight).flatten(0, 1)


class Mixture(nn.Module):
    def __init__(self, num: int) -> None:
        super().__init__()
        self.gate = nn.Linear(DIM, num)
        self.experts = Experts(num)
        self.num = num
        self.group: dist.ProcessGroup | None = None
        """Ranks that have the other experts."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        chosen = torch.arange(len(rows)) % self.num
        order = chosen.argsort(stable=True)
        if self.group is None:
            worked_on = self.experts(rows[order])
        else:
            sizes = [len(rows) // self.num] * self.num
            own = Exchange.apply(rows[order], sizes, sizes, self.group)  # type: ignore[no-untyped-call]
            worked_on = Exchange.apply(self.experts(own), sizes, sizes, self.group)  # type: ignore[no-untyped-call]
        found = torch.empty_like(rows).index_copy(0, order, worked_on)
        weights = self.gate(rows).softmax(-1).gather(-1, chosen[:, None])
        rows_back: Tensor = (found * weights).unflatten(0, x.shape[:2])
        return rows_back


class Net(nn.Module):
    def __init__(self, num: int) -> None:
        super().__init__()
        self.up, self.moe, self.norm, self.down = (
            nn.Linear(DIM, DIM), Mixture(num), nn.LayerNorm(DIM), nn.Linear(DIM, 1),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.norm(x + self.moe(self.up(x))))  # type: ignore[no-any-return]


def make(num: int) -> Net:
    torch.manual_seed(3)
    return Net(num)


def with_dtensors(num_shards: int) -> tuple[Net, DeviceMesh]:
    """Experts that are pieces of one DTensor, as torchtitan has them; a group of ranks has all."""
    mesh = mesh_of(("efsdp", num_shards), ("ep", dist.get_world_size() // num_shards))
    model = make(mesh["ep"].size())
    model.moe.group = mesh["ep"].get_group()
    whole = model.moe.experts.weight.detach()
    model.moe.experts.weight = nn.Parameter(distribute_tensor(whole, mesh["ep"], [Shard(0)]))
    return model, mesh


def plain() -> Net:
    """An expert of each rank's own, under one name."""
    model = make(dist.get_world_size())
    model.moe.group = dist.group.WORLD
    model.moe.experts.weight = nn.Parameter(model.moe.experts.weight.detach()[dist.get_rank()][None].clone())
    return model


def ddp(model: Net) -> nn.Module:
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["moe.experts.weight"])
    return DistributedDataParallel(model)


def fsdp2(model: Net, mesh: DeviceMesh | None = None) -> nn.Module:
    if mesh is not None:
        fully_shard(model.moe.experts, mesh=mesh["efsdp"])
    ignored = {model.moe.experts.weight} if mesh is None else set()
    fully_shard(model, mesh=mesh_of(("dp", dist.get_world_size())), ignored_params=ignored)
    return model


def fsdp1(model: Net) -> nn.Module:
    return FullyShardedDataParallel(model, ignored_modules=[model.moe.experts], device_id=CPU, use_orig_params=True)


def marked(model: Net) -> nn.Module:
    """Without a wrapper; `fit` averages what is not marked."""
    model.moe.experts.weight.allreduce = False  # type: ignore[attr-defined]
    return model


LAYOUTS: dict[str, Callable[[], nn.Module]] = {
    "dtensor x fsdp2": lambda: fsdp2(*with_dtensors(1)),
    "dtensor and sharded x fsdp2": lambda: fsdp2(*with_dtensors(2)),
    "dtensor x ddp": lambda: ddp(with_dtensors(1)[0]),
    "own x ddp": lambda: ddp(plain()),
    "own x fsdp1": lambda: fsdp1(plain()),
    "own x fsdp2": lambda: fsdp2(plain()),
    "own, marked": lambda: marked(plain()),
}


def num_experts(model: nn.Module) -> int:
    return int(next(module.num for module in model.modules() if isinstance(module, Mixture)))


def batch(step: int) -> Tensor:
    return torch.randn(BATCH, WORDS, DIM, generator=torch.Generator().manual_seed(step))


def fit(model: nn.Module, read: Callable[[nn.Module, int, torch.optim.Optimizer], None] = lambda *_: None) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
    is_alone = not isinstance(model, Net) or getattr(model.moe.experts.weight, "allreduce", True)
    num = 1 if isinstance(model, Net) and model.moe.group is None else dist.get_world_size()
    for step in range(STEPS):
        model(batch(step).chunk(num)[dist.get_rank() % num]).square().mean().backward()
        for name, parameter in model.named_parameters():
            gradient: Any = parameter.grad
            if gradient is None:
                continue
            if name.endswith("moe.experts.weight"):  # a sum over the losses of the ranks that sent rows
                gradient /= num_experts(model) if num > 1 else 1
            elif not is_alone:
                dist.all_reduce(gradient)
                gradient /= num
        read(model, step, optimizer)
        optimizer.step()
        optimizer.zero_grad()


def one_process(num: int) -> dict[Any, Tensor]:
    """The values that plain hooks see, by site, path, name and step."""

    def names_of(path: str, module: nn.Module) -> list[str]:
        return ["rows" if path == "moe.experts" else "input" if list(module._parameters) else "x"]

    model = make(num)
    values, read_parameters = watch(model, names_of)

    def read(_: nn.Module, at: int, optimizer: torch.optim.Optimizer) -> None:
        read_parameters(model, at)
        for key, parameter in model.named_parameters():
            path, name = key.rpartition(".")[::2]
            for what, state in optimizer.state.get(parameter, {}).items():  # after the update of the step before
                values["optim", path, f"{name}.{what}", at - 1] = state.detach().clone()

    fit(model, read)
    return values


def main() -> None:
    out, layouts = Path(sys.argv[1]), sys.argv[2:]
    dist.init_process_group("gloo")
    for layout in layouts:
        model = LAYOUTS[layout]()
        with recorder.attach(model, enabled=True, dir=out / layout, rules=RULES):
            fit(model)
    if dist.get_rank() == 0:
        for num in (dist.get_world_size(), dist.get_world_size() // 2):
            torch.save(one_process(num), out / f"{num}.pt")
    leave()


if __name__ == "__main__":
    main()
