"""Training in layouts of more than data parallelism, each data-parallel rank on its slice of one global batch.

The model and how it is cut are those of `tests/rigs/parallel.py`. Rank 0 trains it once more, in one
process with the whole batch, under plain hooks.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

import recorder
from tests.campaigns.roundtrip.programs import pipelines
from tests.rigs import parallel
from tests.rigs.leaving import leave
from tests.rigs.parallel import mesh_of, sequence_parallel, sharded, tensor_parallel

STEPS, BATCH = 2, 8
RULES = "site=* keep=tensor,stats,fingerprint"
NAN = "nan, "
"""Before a layout: all parameters are NaN from step 1 on, of which statistics alone are kept; step 2 has tensors."""
NAN_RULES = f"steps=::2 {RULES}; site=* keep=stats"
CPU = torch.device("cpu")


def loss_alone(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Cut the head alone, and the loss with it."""
    head = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    return parallelize_module(model, mesh, {"head": head})


def prepared(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Blocks between which the sequence is cut, by what prepares inputs and outputs alone; of tensors, not modules."""
    whole, cut = (Replicate(),), (Shard(1),)
    plan: dict[str, Any] = {"embed": PrepareModuleOutput(output_layouts=whole, desired_output_layouts=cut)}
    for i in range(2):
        plan[f"blocks.{i}.mlp_norm"] = SequenceParallel(use_local_output=True)
        plan[f"blocks.{i}.attn_norm"] = SequenceParallel(use_local_output=True)
        plan[f"blocks.{i}.attn"] = plan[f"blocks.{i}.mlp"] = PrepareModuleInputOutput(
            input_layouts=cut, desired_input_layouts=whole, use_local_input=True,
            output_layouts=whole, desired_output_layouts=cut,
        )  # fmt: skip
    plan["norm"] = PrepareModuleInput(input_layouts=cut, desired_input_layouts=whole, use_local_output=True)
    return parallelize_module(model, mesh, plan)


def fsdp1(model: nn.Module, mesh: DeviceMesh, how: ShardingStrategy, *, use_orig_params: bool = True) -> nn.Module:
    return FullyShardedDataParallel(
        model, device_mesh=mesh, device_id=CPU, sharding_strategy=how, use_orig_params=use_orig_params
    )


CUTS = {"tp": tensor_parallel, "sp": sequence_parallel, "loss": loss_alone, "prepared": prepared}


class Gather(torch.autograd.Function):
    """Gathers all ranks' keys or values along the sequence, and sums their gradients over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        pieces = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(pieces, x.contiguous())
        return torch.cat(pieces, 2)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        whole = gradients[0].contiguous()
        dist.all_reduce(whole)
        return whole.chunk(dist.get_world_size(), 2)[dist.get_rank()]


class SequenceCore(nn.Module):
    """Attention of some of the sequence to all that was before."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        first = dist.get_rank() * q.shape[2]
        mask = torch.arange(k.shape[2]) <= torch.arange(first, first + q.shape[2])[:, None]
        return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)


class SequenceAttention(parallel.Attention):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, parallel.HEAD)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        k, v = Gather.apply(k), Gather.apply(v)  # type: ignore[no-untyped-call]
        return self.wo(self.core(q, k, v).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def context_parallel(model: Any) -> nn.Module:
    """Context parallel by hand: each rank has a slice of the sequence of all samples, and DDP all parameters."""
    for block in model.blocks:
        block.attn.__class__ = SequenceAttention
        block.attn.core = SequenceCore()
    return nn.parallel.DistributedDataParallel(model)


def parallelized(layout: str, model: nn.Module) -> tuple[nn.Module, int, int]:
    """The model of this rank, which slice of the batch is its own, and of how many."""
    cut, _, around = layout.partition(" x ")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if layout == "cp":
        return context_parallel(model), rank, world_size
    if not around:
        return CUTS[cut](model, mesh_of(("tp", world_size))), 0, 1
    if around in ("hsdp", "hsdp1"):
        mesh = mesh_of(("replicate", 2), ("shard", world_size // 4), ("tp", 2))
        model, two = CUTS[cut](model, mesh["tp"]), mesh["replicate", "shard"]
        model = sharded(model, two) if around == "hsdp" else fsdp1(model, two, ShardingStrategy.HYBRID_SHARD)
        return model, rank // 2, world_size // 2
    mesh = mesh_of(("dp", world_size // 2), ("tp", 2))
    model = CUTS[cut](model, mesh["tp"])
    if around in ("fsdp1", "fsdp1 flat"):
        model = fsdp1(model, mesh["dp"], ShardingStrategy.FULL_SHARD, use_orig_params=around == "fsdp1")
        return model, rank // 2, world_size // 2
    if around == "ddp":
        return nn.parallel.DistributedDataParallel(model, device_mesh=mesh["dp"]), rank // 2, world_size // 2
    return sharded(model, mesh["dp"]), rank // 2, world_size // 2


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(parallel.WORDS, (BATCH, 9), generator=generator)
    return tokens[:, :8], tokens[:, 1:]


def fit(
    model: nn.Module,
    read: Callable[[nn.Module, int, torch.optim.Optimizer], None] = lambda *_: None,
    *,
    slice_: int = 0,
    num_slices: int = 1,
    dim: int = 0,
    is_nan: bool = False,
) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
    for step in range(STEPS + is_nan):
        # DDP takes those that tensor parallel has cut out of their modules.
        for parameter in optimizer.param_groups[0]["params"] if is_nan and step == 1 else ():
            with torch.no_grad():
                parameter.mul_(torch.nan)
        tokens, targets = (tensor.chunk(num_slices, dim)[slice_] for tensor in batch(step))
        logits = model(tokens)
        with loss_parallel() if isinstance(logits, DTensor) else contextlib.nullcontext():
            nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
        read(model, step, optimizer)
        optimizer.step()
        read(model, step, optimizer)
        optimizer.zero_grad()


def one_process(*, is_nan: bool) -> dict[Any, Tensor]:
    """The values that plain hooks see, by site, path, name and step; optimizer state has the recorder's names."""
    optimizer_state: dict[Any, Tensor] = {}

    def watched(model: nn.Module, read: Callable[[nn.Module, int], None] | None = None) -> list[Tensor]:
        def both(model: nn.Module, step: int, optimizer: torch.optim.Optimizer) -> None:
            names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
            is_before = len(optimizer.state) == 0 or optimizer.state[next(iter(names))]["step"] == step
            if is_before and read is not None:
                read(model, step)
            for parameter, state in optimizer.state.items() if not is_before else ():
                path, _, name = names[parameter].rpartition(".")
                for key, value in state.items():
                    optimizer_state["optim", path, f"{name}.{key}", step] = value.detach().clone()

        fit(model, both, is_nan=is_nan)
        return []

    parallel.fit, parallel.STEPS = watched, STEPS + is_nan
    return parallel.plain_values() | optimizer_state


def main() -> None:
    out, layouts = Path(sys.argv[1]), sys.argv[2:]
    parallel.DIM = 16  # two heads for each of four ranks: of one head a rank no reader can tell that it is one
    dist.init_process_group("gloo")
    for layout in layouts:
        if layout.startswith("pp"):
            pipelines.train(layout, out / layout, batch, STEPS)
            continue
        is_nan = layout.startswith(NAN)
        model, slice_, num_slices = parallelized(layout.removeprefix(NAN), parallel.make())
        with recorder.attach(model, enabled=True, dir=out / layout, rules=NAN_RULES if is_nan else RULES):
            fit(model, slice_=slice_, num_slices=num_slices, dim=int(layout == "cp"), is_nan=is_nan)
    for is_nan in sorted({layout.startswith(NAN) for layout in layouts}) if dist.get_rank() == 0 else ():
        torch.save(one_process(is_nan=is_nan), out / ("nan.pt" if is_nan else "one.pt"))
    leave()


if __name__ == "__main__":
    main()
