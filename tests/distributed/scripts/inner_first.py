"""Trains a wrapper around a model under DDP. Rank 0 alone evaluates the model inside both, before the first step."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn

from tests.cli.test_inner_first import Wrapper
from tests.rigs.capturing import Tiny, batch
from tests.rigs.leaving import leave


def main(kind: str) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    inner = Tiny()
    model = nn.parallel.DistributedDataParallel(Wrapper(inner) if kind == "wrapper" else inner)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        if dist.get_rank() == 0 and kind != "plain":
            with torch.no_grad():
                inner(batch(step))
        model(batch(step + 10 * dist.get_rank())).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    leave()


if __name__ == "__main__":
    main(sys.argv[1])
