"""Ranks without a launcher: ``mp.spawn`` and a process group."""

from __future__ import annotations

import gc
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import spawn


def work(rank: int, address: str, num_ranks: int) -> None:
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=num_ranks)
    torch.manual_seed(rank)
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.randn(3, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    del model  # DDP that outlives its process group can block the end of the process
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    spawn(work, args=(sys.argv[1], 2), nprocs=2)
