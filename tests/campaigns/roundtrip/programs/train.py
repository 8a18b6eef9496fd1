"""Training as users write it, with what is hard to put together again, in every data-parallel layout.

Each rank takes its slice of one global batch, so one process with the whole batch trains the same. In the model: dims
that ranks cannot share evenly, a bias of size 1, a module called twice, weights tied, tables and masks without a batch
dim, sequence-first and merged tensors, nested arguments and outputs, buffers, 0-dim values. No randomness but seeds.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import recorder
from tests.rigs.leaving import leave

VOCABULARY, WIDTH, HIDDEN, HEADS, LENGTH = 13, 9, 12, 3, 5
BATCH = 8
RAGGED = {2: [5, 3], 4: [3, 2, 2, 1]}
LAYOUTS = ("ddp", "fsdp1", "fsdp1-flat", "fsdp2", "hsdp", "hsdp1")


class Positions(nn.Module):
    """A table without a batch dim."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.1)

    def forward(self, index: Tensor) -> Tensor:
        return self.table[index]


class Scores(nn.Module):
    def forward(self, logits: Tensor, masks: dict[str, Tensor]) -> Tensor:
        allowed = masks["causal"] & masks["keep"][:, None, None, :]
        return torch.softmax(logits.masked_fill(~allowed, -torch.inf), -1)


class Attention(nn.Module):
    """Sequence first: [S, B, D]."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.scores = Scores()
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, masks: dict[str, Tensor], *, scale: Tensor) -> Tensor:
        length, batch, _ = x.shape
        heads = self.qkv(x).reshape(length, batch, 3, HEADS, WIDTH // HEADS)
        q, k, v = heads.permute(2, 1, 3, 0, 4)
        mixed = self.scores(q @ k.transpose(-1, -2) * scale, masks) @ v
        out: Tensor = self.out(mixed.permute(2, 0, 1, 3).reshape(length, batch, WIDTH))
        return out


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.act = nn.GELU()
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor, masks: dict[str, Tensor], *, scale: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        x = x + self.attention(self.norm(x), masks, scale=scale)
        rows = x.transpose(0, 1).reshape(-1, WIDTH)  # [B * S, D]
        rows = self.down(self.act(self.up(rows)))
        recorder.tap("rows", rows)
        return x + rows.reshape(-1, len(x), WIDTH).transpose(0, 1), {"rows": rows}


class Energy(nn.Module):
    """A 0-dim value of each rank."""

    def forward(self, x: Tensor) -> Tensor:
        return x.square().mean()


class Running(nn.Module):
    """Buffers: one that differs between ranks, one that counts, one that stays; nothing reads them."""

    average: Tensor
    num_calls: Tensor
    frequencies: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(WIDTH))
        self.register_buffer("num_calls", torch.tensor(0))
        self.register_buffer("frequencies", torch.arange(WIDTH) / 7)

    def forward(self, x: Tensor) -> None:
        if self.training:
            self.num_calls += 1
            self.average.lerp_(x.detach().float().mean((0, 1)), 0.5)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = Positions()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.running = Running()
        self.energy = Energy()
        self.readout = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.readout.weight = self.embed.weight
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, batch: dict[str, Tensor], index: Tensor, *, causal: Tensor, scale: Tensor) -> dict[str, Any]:
        keep = batch["keep"]
        x = self.embed(batch["tokens"]) + self.positions(index) + batch["features"]
        x, hidden, masks = x.transpose(0, 1), [], {"keep": keep, "causal": causal}
        for block in self.blocks:
            x, inner = block(x, masks, scale=scale)
            hidden.append(inner)
        x = self.shared(self.shared(x.transpose(0, 1)))
        self.running(x)
        pooled = (x * keep[..., None]).sum(1) / keep.sum(1, keepdim=True)
        outputs = {"prediction": self.head(pooled * scale), "logits": self.readout(x)}
        return {**outputs, "energy": self.energy(x), "hidden": hidden}


def make_batch(
    step: int, slice_: int, num_samples: int, *, is_training: bool = True
) -> tuple[dict[str, Tensor], Tensor]:
    """The global batch and its target; the same on every rank."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * slice_ + is_training)
    keep = torch.rand(num_samples, LENGTH, generator=generator) > 0.3
    keep[:, 0] = True
    batch = {
        "tokens": torch.randint(VOCABULARY, (num_samples, LENGTH), generator=generator),
        "features": torch.randn(num_samples, LENGTH, WIDTH, generator=generator),
        "keep": keep,
    }
    return batch, torch.randn(num_samples, 1, generator=generator)


def spoil(batch: dict[str, Tensor], step: int, options: argparse.Namespace) -> dict[str, Tensor]:
    """The batch; in a case that is to break, its features are NaN from a step on."""
    if options.nan_from is None or step < options.nan_from:
        return batch
    return {**batch, "features": torch.full_like(batch["features"], torch.nan)}


def deaden(net: Net, options: argparse.Namespace) -> None:
    """In a case that is to be dead, make the activations after `up` zero, so that `down` returns its bias alone."""
    for block in net.blocks if options.dead else ():
        assert isinstance(block, Block)
        block.up.bias.data.fill_(-100)


def constants() -> tuple[Tensor, dict[str, Tensor]]:
    """The inputs without a batch dim: position numbers, the causal mask, and a 0-dim factor."""
    causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    return torch.arange(LENGTH), {"causal": causal, "scale": torch.tensor(0.7)}


def loss_of(output: dict[str, Any], tokens: Tensor, target: Tensor, *, with_energy: bool) -> Tensor:
    loss: Tensor = (output["prediction"].float() - target).square().mean()
    loss = loss + F.cross_entropy(output["logits"].float().flatten(0, 1), tokens.flatten())
    return loss + 0.25 * output["energy"].float() if with_energy else loss


def shares(world_size: int, options: argparse.Namespace) -> list[int]:
    """How many samples of the global batch each rank takes."""
    if options.ragged:
        return RAGGED[world_size]
    return [LENGTH if options.square else BATCH // world_size] * world_size


def take(batch: dict[str, Tensor], start: int, stop: int) -> dict[str, Tensor]:
    return {name: tensor[start:stop] for name, tensor in batch.items()}


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)


def parallelize(net: Net, options: argparse.Namespace) -> nn.Module:
    if options.checkpoint:
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

        for i, block in enumerate(net.blocks):
            net.blocks[i] = checkpoint_wrapper(block)
    if options.layout == "ddp":
        return nn.parallel.DistributedDataParallel(net, broadcast_buffers=not options.ragged)
    if options.layout.startswith(("fsdp1", "hsdp1")):
        return _fsdp1(net, options)
    return _fsdp2(net, options)


def _mesh(layout: str) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    world_size = dist.get_world_size()
    if layout.startswith("hsdp"):
        return init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("replicate", "shard"))
    return init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp",))


def _fsdp1(net: Net, options: argparse.Namespace) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    hybrid = options.layout.startswith("hsdp")
    return FullyShardedDataParallel(
        net,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        sharding_strategy=ShardingStrategy.HYBRID_SHARD if hybrid else ShardingStrategy.FULL_SHARD,
        device_mesh=_mesh(options.layout) if hybrid else None,
        device_id=torch.device("cpu"),
        use_orig_params=not options.layout.endswith("-flat"),
    )


def _fsdp2(net: Net, options: argparse.Namespace) -> nn.Module:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor import Shard

    mesh = _mesh(options.layout)
    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    settings: dict[str, Any] = {"mesh": mesh, "mp_policy": bf16 if options.mixed else MixedPrecisionPolicy()}
    if options.columns:  # only even sharding is allowed along other dims than the first
        settings["shard_placement_fn"] = lambda p: (
            Shard(1) if p.ndim == 2 and p.shape[1] % mesh.shape[-1] == 0 else None
        )
    for block in net.blocks:
        fully_shard(block, reshard_after_forward=not options.keep_unsharded, **settings)
    fully_shard(net, **settings)
    return net


@contextlib.contextmanager
def accumulating(model: Any, is_last: bool) -> Iterator[None]:
    """The context in which a layout does not reduce gradients yet."""
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(is_last)
        yield
    elif not is_last:
        with model.no_sync():
            yield
    else:
        yield


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layout", choices=LAYOUTS, required=True)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--accumulate", action="store_true", help="two micro-batches a step")
    parser.add_argument("--checkpoint", action="store_true", help="activation checkpointing of the blocks")
    parser.add_argument("--ragged", action="store_true", help="unequal batches; the last rank lacks the last ones")
    parser.add_argument("--square", action="store_true", help="as many samples on a rank as positions in a sample")
    parser.add_argument("--dead", action="store_true", help="activations that are zeros for all samples")
    parser.add_argument("--nan-from", type=int, help="the step from which on the features are NaN")
    parser.add_argument("--mixed", action="store_true", help="FSDP2: compute in bfloat16")
    parser.add_argument("--columns", action="store_true", help="FSDP2: Shard(1) where it is even")
    parser.add_argument("--keep-unsharded", action="store_true", help="FSDP2: no reshard after forward")
    return parser.parse_args(argv)


def main() -> None:
    options = arguments()
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    sizes = shares(world_size, options)
    stop = sum(sizes[: rank + 1])
    start, is_last_rank = stop - sizes[rank], rank == world_size - 1
    torch.manual_seed(7)
    net = Net()
    deaden(net, options)
    model: Any = parallelize(net, options)
    optimizer = make_optimizer(model)
    index, fixed = constants()
    num_slices = 2 if options.accumulate else 1
    evaluated: Callable[..., Any] = net if options.layout == "ddp" else model  # DDP evaluates without a word to others

    with model.join() if options.layout == "ddp" and options.ragged else contextlib.nullcontext():
        for step in range(options.steps):
            if options.layout == "ddp" and options.ragged and is_last_rank and step == options.steps - 1:
                break
            for slice_ in range(num_slices):
                batch, target = make_batch(step, slice_, sum(sizes))
                mine, target = take(spoil(batch, step, options), start, stop), target[start:stop]
                with accumulating(model, slice_ == num_slices - 1):
                    output = model(mine, index, **fixed)
                    loss = loss_of(output, mine["tokens"], target, with_energy=not options.ragged)
                    (loss / num_slices).backward()
                recorder.scalar("loss", loss.detach())
            optimizer.step()
            optimizer.zero_grad()

            model.eval()
            with torch.no_grad():
                evaluated(take(make_batch(step, 0, sum(sizes), is_training=False)[0], start, stop), index, **fixed)
                if options.ragged and not (is_last_rank and options.layout == "ddp"):
                    end = start if is_last_rank else stop
                    evaluated(take(make_batch(step, 1, sum(sizes), is_training=False)[0], start, end), index, **fixed)
            model.train()
    leave()


if __name__ == "__main__":
    main()
