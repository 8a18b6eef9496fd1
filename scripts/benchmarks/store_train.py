"""A training of two ranks whose record is some tens of megabytes."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(*(nn.Sequential(nn.Linear(192, 768), nn.GELU(), nn.Linear(768, 192)) for _ in range(3)))
    parallel = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(parallel.parameters())
    for _ in range(40):
        parallel(torch.randn(64, 192)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    del parallel
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
