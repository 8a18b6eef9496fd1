"""Two stages of a pipeline whose modules have the names that each rank gives them, from 0.

Each word of the command line is a training, recorded into a folder of its name: `plain` and `others` hand tensors on
without any framework, and `schedule` is torch's, which knows the number of each stage.
`apart` is no pipeline: one linear of each rank differs; `cut` marks that linear as a part, without a group.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

import recorder
from recorder.config import DEFAULT_RULES
from tests.rigs.leaving import train_each

DIM, BATCH, STEPS = 4, 6, 2


def pass_on(stage: nn.Module, x: torch.Tensor) -> None:
    """Go forward and back through both ranks' modules, with a call for each direction."""
    if dist.get_rank() == 0:
        out = stage(x)
        dist.send(out.detach(), 1)
        dist.recv(gradient := torch.empty_like(out), 1)
        out.backward(gradient)
    else:
        dist.recv(given := torch.empty_like(x), 0)
        stage(given.requires_grad_()).square().mean().backward()
        assert given.grad is not None
        dist.send(given.grad, 0)


def train_apart(name: str) -> None:
    """Train two linears whose first has other weights on each rank, as an expert or an unexplained part of a model."""
    torch.manual_seed(0)
    inner = nn.Linear(DIM, DIM)
    model = nn.Sequential(nn.Linear(DIM, DIM), nn.Sequential(inner, nn.Tanh()))
    torch.manual_seed(dist.get_rank())
    nn.init.normal_(inner.weight)
    nn.init.zeros_(inner.bias)
    if name == "cut":
        vars(inner.weight).update(tensor_model_parallel=True, partition_dim=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with recorder.attach(model, enabled=True, dir=name, rules="site=* keep=tensor,stats,fingerprint"):
        for _ in range(STEPS):
            optimizer.zero_grad()
            model(torch.randn(BATCH, DIM)).square().mean().backward()
            for parameter in model[0].parameters():
                dist.all_reduce(parameter.grad)
            optimizer.step()


def train(name: str) -> None:
    if name in ("apart", "cut"):
        return train_apart(name)
    rank = dist.get_rank()
    torch.manual_seed(rank)
    middle = nn.ReLU() if "others" in name and rank else nn.Tanh()
    stage = nn.Sequential(nn.Linear(DIM, DIM), middle, nn.Linear(DIM, DIM))
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.05)
    rules = "; ".join(rule.text for rule in DEFAULT_RULES) if "flag" in name else "site=* keep=tensor,stats,fingerprint"
    with recorder.attach(stage, enabled=True, dir=name, rules=rules):
        schedule = ScheduleGPipe(
            PipelineStage(stage, rank, 2, torch.device("cpu")), 2, loss_fn=lambda out, _: out.square().mean()
        )
        for step in range(STEPS):
            x = torch.randn(BATCH, DIM, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            if name == "schedule":
                schedule.step(*([] if rank else [x]), target=x)
            else:
                pass_on(stage, x)
            optimizer.step()


if __name__ == "__main__":
    train_each(train)
