"""Blocks whose residual is outside of them, under DDP and with each block sharded by FSDP2, recorded and not."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import recorder
from tests.rigs.leaving import leave


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(self.norm(x)).tanh()  # type: ignore[no-any-return]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.out = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.blocks[0](x)  # a leaf, where the program wants the gradient of its input
        x = self.first(x)
        x = x + self.blocks[1](x)
        x = x + checkpoint(self.blocks[2], x, use_reentrant=False)
        return self.out(x)  # type: ignore[no-any-return]


def train(kind: str, out: Path | None) -> torch.Tensor:
    torch.manual_seed(0)
    net = Net()
    model: nn.Module = net
    if kind == "ddp":
        model = DistributedDataParallel(net)
    else:
        for block in net.blocks:
            fully_shard(block)
        fully_shard(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    recording = (
        nullcontext() if out is None else recorder.attach(model, enabled=True, dir=str(out / kind), rules="site=*")
    )
    losses = []
    with recording:
        for step in range(3):
            torch.manual_seed(100 * step + dist.get_rank())
            optimizer.zero_grad()
            for _ in range(2):
                x = torch.randn(4, 8).requires_grad_()
                loss = model(x).square().mean()
                loss.backward()
                losses += [loss.detach(), x.grad]
            optimizer.step()
    return torch.cat([one.flatten() for one in losses if one is not None])


def main() -> None:
    out = Path(sys.argv[1])
    dist.init_process_group("gloo")
    for kind in ("ddp", "fsdp2"):
        assert torch.equal(train(kind, out), train(kind, None)), kind
    leave()


if __name__ == "__main__":
    main()
