"""Trains under DDP, and waits before each step until a file allows it, so that a test may tell it something meanwhile.

commanded.py --steps=40 --out=FOLDER [--limit=FILE]
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limit", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    torch.manual_seed(1 + rank)
    losses = []
    for step in range(options.steps):
        while options.limit is not None and step >= int(options.limit.read_text() or 0):
            time.sleep(0.01)
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append([loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
        optimizer.zero_grad()
    made = {
        "losses": losses,
        "parameters": [p.detach() for p in model.parameters()],
        "state": [value for state in optimizer.state.values() for value in state.values()],
        "rng": torch.get_rng_state(),
    }
    options.out.mkdir(parents=True, exist_ok=True)
    torch.save(made, options.out / f"rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
