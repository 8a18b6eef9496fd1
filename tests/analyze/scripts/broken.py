"""Small trainings under DDP with one thing wrong, or nothing: what `first` and `diff` have to find."""

from __future__ import annotations

import gc
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import recorder
from tests.rigs.leaving import leave

RULES = "site=input,output,grad,param,buffer keep=tensor,stats,fingerprint"
BROKEN_STEP, BROKEN_RANK = 2, 1


class Act(nn.Module):
    """A ReLU that yields one NaN, once, on one rank, if it is the broken one."""

    num_calls = 0
    is_broken = False

    def forward(self, x: Tensor) -> Tensor:
        out = torch.relu(x)
        if self.is_broken and self.num_calls == BROKEN_STEP and dist.get_rank() == BROKEN_RANK:
            out = out.index_fill(0, torch.tensor([1]), torch.nan)
        self.num_calls += 1
        return out


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.act = Act()
        self.down = nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.act(self.norm(self.up(x))))
        return out


def train(what: str) -> None:
    torch.manual_seed(0)
    net = Net()
    net.act.is_broken = what == "nan"
    if what == "skipped":
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["down.weight"])
    model = DistributedDataParallel(net, broadcast_buffers=what != "stale")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    torch.manual_seed(10 + dist.get_rank())
    with recorder.attach(model, enabled=True, dir=f"{what}/recordings", rules=RULES):
        for _ in range(4):
            model(torch.randn(4, 6)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


def main(kinds: list[str]) -> None:
    """One after the other, a recording each."""
    dist.init_process_group("gloo")
    for what in kinds:
        train(what)
        gc.collect()  # a recording would count its steps on from an optimizer that is still there
    leave()


if __name__ == "__main__":
    main(sys.argv[1:])
