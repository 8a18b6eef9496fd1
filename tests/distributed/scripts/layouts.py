"""Every way to shard parameters on four ranks, each recorded into a folder of its own, beside the same plain training.

All ranks see the same data, so a plain model in each process ends up with the same values, but for rounding.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import recorder
from tests.rigs.leaving import leave

STEPS, MICRO_BATCHES = 2, 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 7)
        self.down = nn.Linear(7, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.down(self.up(x).relu()))  # type: ignore[no-any-return]


class Net(nn.Module):
    """A language model in small: its head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(8, 11)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


class Images(nn.Module):
    """A kernel in channels-last memory: its slices are no runs of elements in C order."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 3 * 5 * 5)
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(self.embed(x).reshape(-1, 3, 5, 5)).sum((2, 3))  # type: ignore[no-any-return]


def flat(model: nn.Module, strategy: str, *, nested: bool = True, **options: Any) -> nn.Module:
    if nested:
        options["auto_wrap_policy"] = ModuleWrapPolicy({Block})
    return FullyShardedDataParallel(
        model, device_id=torch.device("cpu"), sharding_strategy=ShardingStrategy[strategy], **options
    )


def hybrid(model: nn.Module, **options: Any) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return flat(model, "HYBRID_SHARD", device_mesh=mesh, **options)


def frozen(model: Any) -> nn.Module:
    model.blocks[0].up.requires_grad_(False)
    return flat(model, "FULL_SHARD", use_orig_params=True)


def checkpointed(model: nn.Module) -> nn.Module:
    model = flat(model, "FULL_SHARD")
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
    return model


def sharded(model: Any, *, mesh: tuple[int, ...] = (4,), names: tuple[str, ...] = ("dp",), **options: Any) -> nn.Module:
    options["mesh"] = init_device_mesh("cpu", mesh, mesh_dim_names=names)
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    return model  # type: ignore[no-any-return]


def by_last_dim(parameter: nn.Parameter) -> Shard:
    """Only dim 0 may be shared unevenly."""
    return Shard(1 if parameter.dim() == 2 and parameter.shape[1] % 4 == 0 else 0)


GRID: dict[str, Any] = {"mesh": (2, 2), "names": ("replicate", "shard")}
CASES: dict[str, Callable[[Any], nn.Module]] = {
    "full": functools.partial(flat, strategy="FULL_SHARD"),
    "full_orig": functools.partial(flat, strategy="FULL_SHARD", use_orig_params=True),
    "full_of_one_unit": functools.partial(flat, strategy="FULL_SHARD", nested=False),
    "grad_op": functools.partial(flat, strategy="SHARD_GRAD_OP"),
    "grad_op_orig": functools.partial(flat, strategy="SHARD_GRAD_OP", use_orig_params=True),
    "no_shard": functools.partial(flat, strategy="NO_SHARD"),
    "no_shard_orig": functools.partial(flat, strategy="NO_SHARD", use_orig_params=True),
    "hybrid": hybrid,
    "hybrid_orig": functools.partial(hybrid, use_orig_params=True),
    "frozen_orig": frozen,
    "checkpointed": checkpointed,
    "images": functools.partial(flat, strategy="FULL_SHARD", nested=False),
    "images_orig": functools.partial(flat, strategy="FULL_SHARD", nested=False, use_orig_params=True),
    "fsdp2": sharded,
    "fsdp2_kept": functools.partial(sharded, reshard_after_forward=False),
    "fsdp2_by_last_dim": functools.partial(sharded, shard_placement_fn=by_last_dim),
    "hsdp": functools.partial(sharded, **GRID),
    "hsdp_kept": functools.partial(sharded, reshard_after_forward=False, **GRID),
    "hsdp_by_last_dim": functools.partial(sharded, shard_placement_fn=by_last_dim, **GRID),
}


def make(name: str) -> nn.Module:
    torch.manual_seed(5)
    return Images() if name.startswith("images") else Net()


def backward(model: nn.Module, step: int) -> None:
    for micro_step in range(MICRO_BATCHES):
        generator = torch.Generator().manual_seed(10 * step + micro_step)
        tokens = torch.randint(11, (3, 4), generator=generator)
        is_last = micro_step == MICRO_BATCHES - 1
        waits = isinstance(model, FullyShardedDataParallel) and not is_last
        with model.no_sync() if waits else contextlib.nullcontext():  # type: ignore[operator]
            (model(tokens).square().mean() / MICRO_BATCHES).backward()


def read(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, sites: tuple[str, ...]) -> dict[Any, Tensor]:
    values: dict[Any, Tensor] = {}
    seen: set[int] = set()
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            if "param" in sites and parameter.grad is not None:
                values["param", path, name, step] = parameter
                values["grad", path, name, step] = parameter.grad
            if "optim" in sites:
                for key, value in optimizer.state.get(parameter, {}).items():
                    values["optim", path, f"{name}.{key}", step] = value
    return {key: value.detach().clone() for key, value in values.items()}


def plain_values(name: str) -> dict[Any, Tensor]:
    """What one process with a plain model has."""
    plain: Any = make(name)
    if name == "frozen_orig":
        plain.blocks[0].up.requires_grad_(False)
    values: dict[Any, Tensor] = {}
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
    for step in range(STEPS):
        backward(plain, step)
        values |= read(plain, optimizer, step, ("param",))
        optimizer.step()
        values |= read(plain, optimizer, step, ("optim",))
        optimizer.zero_grad()
    return values


def fit(model: nn.Module) -> list[Tensor]:
    """Train, and return everything that the recorder must not change."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(STEPS):
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
    kept = [*model.parameters(), *(value for state in optimizer.state.values() for value in state.values())]
    return [local(tensor) for tensor in kept]


def local(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().clone()


def num_collectives() -> int:
    backends: list[Any] = [group._get_backend(torch.device("cpu")) for group in dist.distributed_c10d._world.pg_map]
    return sum(backend._get_sequence_number_for_group() for backend in backends)


def train(name: str, folder: Path, *, inside: bool = False) -> dict[Any, Tensor]:
    """The same training without and with the recorder; what differed is saved beside the run."""
    counts = [num_collectives()]
    without = fit(CASES[name](make(name)))
    counts.append(num_collectives())
    model = CASES[name](make(name))
    root = model.module if inside else model
    rules = "site=param,grad,optim,output keep=tensor,stats,fingerprint"
    with recorder.attach(root, enabled=True, dir=folder, rules=rules):  # type: ignore[arg-type]
        recorded = fit(model)
    counts.append(num_collectives())
    twins = {
        "same": len(recorded) == len(without) and all(map(torch.equal, recorded, without)),
        "num_collectives": (counts[1] - counts[0], counts[2] - counts[1]),
    }
    torch.save(twins, folder.with_name(f"{folder.name}.twins{dist.get_rank()}"))
    return plain_values(name)


def tensor_parallel(folder: Path, *, use_orig_params: bool) -> dict[Any, Tensor]:
    """FSDP1 takes the pieces of tensor parallelism for whole parameters."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    block = nn.Sequential(OrderedDict(up=nn.Linear(8, 16), act=nn.ReLU(), down=nn.Linear(16, 8)))
    parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    model = flat(block, "FULL_SHARD", nested=False, device_mesh=mesh["dp"], use_orig_params=use_orig_params)
    with recorder.attach(model, enabled=True, dir=folder, rules="site=param,grad,optim keep=tensor,fingerprint"):
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(2, 8)).square().sum().backward()
        optimizer.step()
    return {}


class Odd(torch.optim.SGD):
    """Its state has a shape of its own."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["odd"] = torch.tensor([1.0, 2.0, 3.0])
        return super().step(closure)


def state_of_its_own_shape(folder: Path) -> dict[Any, Tensor]:
    model = flat(make("full"), "FULL_SHARD")
    with recorder.attach(model, enabled=True, dir=folder, rules="site=optim keep=tensor"):
        optimizer = Odd(model.parameters(), lr=0.01)
        backward(model, 0)
        optimizer.step()
    return {}


def infer(folder: Path, **options: Any) -> dict[Any, Tensor]:
    """Without an optimizer each call is a step; parameters are read when the call is over."""
    model = flat(make("full"), **options)
    rules = "site=param keep=tensor,fingerprint"
    with recorder.attach(model, enabled=True, dir=folder, rules=rules, roots="any"), torch.no_grad():
        model(torch.zeros(1, 1, dtype=torch.int64))
    plain = make("full")
    return {("param", *key.rpartition(".")[::2], 0): value.detach() for key, value in plain.named_parameters()}


def step_under_no_sync(folder: Path, *, use_orig_params: bool) -> dict[Any, Tensor]:
    """A gradient that was never reduced, at a step that the wrapper does not mean to happen."""
    model = flat(make("full"), "FULL_SHARD", use_orig_params=use_orig_params)
    plain = make("full")
    with recorder.attach(model, enabled=True, dir=folder, rules="site=grad keep=tensor,fingerprint"):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for m in (plain, model):
            tokens = torch.full((1, 1), dist.get_rank() if m is model else 0)
            with m.no_sync() if m is model else contextlib.nullcontext():  # type: ignore[operator]
                m(tokens).square().mean().backward()
        with contextlib.suppress(RuntimeError):
            optimizer.step()
    return read(plain, torch.optim.SGD(plain.parameters()), 0, ("param",))


def main() -> None:
    out = Path(sys.argv[1])
    dist.init_process_group("gloo")
    jobs: dict[str, Callable[[Path], dict[Any, Tensor]]] = {
        **{name: functools.partial(train, name) for name in CASES},
        "inside": functools.partial(train, "full_orig", inside=True),
        "tensor_parallel": functools.partial(tensor_parallel, use_orig_params=False),
        "tensor_parallel_orig": functools.partial(tensor_parallel, use_orig_params=True),
        "odd": state_of_its_own_shape,
        "infer": functools.partial(infer, strategy="FULL_SHARD"),
        "infer_orig": functools.partial(infer, strategy="FULL_SHARD", use_orig_params=True),
        "infer_grad_op_orig": functools.partial(infer, strategy="SHARD_GRAD_OP", use_orig_params=True),
        "no_sync": functools.partial(step_under_no_sync, use_orig_params=False),
        "no_sync_orig": functools.partial(step_under_no_sync, use_orig_params=True),
    }
    for name, job in jobs.items():
        values = job(out / name)
        if dist.get_rank() == 0:
            torch.save(values, out / f"{name}.pt")
    leave()


if __name__ == "__main__":
    main()
