"""A tensor parallel model that is compiled with taps in its graph."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import recorder
from tests.rigs.leaving import leave
from tests.rigs.parallel import mesh_of


def main() -> None:
    dist.init_process_group("gloo")
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    mesh = mesh_of(("tp", dist.get_world_size()))
    parallelize_module(model, mesh, {"1": ColwiseParallel(), "3": RowwiseParallel()})
    compiled: Any = torch.compile(model, backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rules = "site=output,param keep=stats,fingerprint"
    with recorder.attach(compiled, enabled=True, dir=Path(sys.argv[1]), rules=rules, compiled="tap"):
        for _ in range(2):
            compiled(torch.ones(4, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    leave()


if __name__ == "__main__":
    main()
