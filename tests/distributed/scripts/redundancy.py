"""Trainings with torch's ZeroRedundancyOptimizer, and the same training of one process with the optimizer inside it.

Each word of the command line is a training of the same model and batches, recorded into a folder of its name. What the
name has in it: `zero` the sharded optimizer, `groups` two groups with rates of their own, of which a scheduler halves
one, `views` parameters as views of buckets, `skips` a rank whose update reaches no other rank, `scaled` a state that
one rank scales, `flag` the rules of the flag alone, `late` an optimizer that is made after the recording has begun.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

import recorder
from tests.rigs.jobs import EVERYTHING
from tests.rigs.leaving import train_each

BATCH, STEPS = 12, 4


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(6, 7), nn.LayerNorm(7), nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.norm(self.up(x).tanh()))
        return out


class SkipsBroadcast(ZeroRedundancyOptimizer):
    """Leaves out the broadcast of one rank at the second step."""

    num_steps = 0

    def _sync_params(self) -> None:
        self.num_steps += 1
        for rank in range(self.world_size):
            if (rank, self.num_steps) != (1, 2):
                for work in self._broadcast_params_from_rank(rank):  # type: ignore[attr-defined]
                    work.wait()


def batch_of_rank(step: int) -> Tensor:
    """Return this rank's part of the batch of a step."""
    batch = torch.randn(BATCH, 6, generator=torch.Generator().manual_seed(step))
    return batch.chunk(dist.get_world_size())[dist.get_rank()]


def make(name: str, model: nn.Module) -> Any:
    groups: Any = list(model.parameters())
    if "groups" in name:
        groups = [{"params": groups[:2], "lr": 0.02}, {"params": groups[2:]}]
    if "zero" not in name:
        return AdamW(groups, lr=0.01, weight_decay=0.1)
    kind, views = SkipsBroadcast if "skips" in name else ZeroRedundancyOptimizer, "views" in name
    return kind(groups, optimizer_class=AdamW, parameters_as_bucket_view=views, lr=0.01, weight_decay=0.1)


def train(name: str) -> None:
    torch.manual_seed(0)
    model, rank, size = Net(), dist.get_rank(), dist.get_world_size()
    ddp = DistributedDataParallel(model) if size > 1 else model
    optimizer = None if "late" in name else make(name, model)
    rules = None if "flag" in name else EVERYTHING
    with recorder.attach(model, enabled=True, dir=name, **({"rules": rules} if rules else {})):
        for step in range(STEPS):
            loss = ddp(batch_of_rank(step)).square().mean()
            optimizer = optimizer or make(name, model)
            optimizer.zero_grad()
            loss.backward()
            if "scaled" in name and (step, rank) == (2, 1):
                next(iter(optimizer.optim.state.values()))["exp_avg"].mul_(1.5)
            optimizer.step()
            if "groups" in name and step == 1:
                optimizer.param_groups[0]["lr"] /= 2


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    train_each(train)
