"""The training of the daemon's campaigns: two ranks under DDP that step slowly, and of which one may die at a step.

torchrun --nproc-per-node=2 daemon_train.py --seconds=60 --pause=0.03 [--die-at=300]
"""

from __future__ import annotations

import argparse
import os
import signal
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

WIDTH = 48


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--pause", type=float, required=True, help="seconds between two steps")
    parser.add_argument("--die-at", type=int, default=-1, help="a step before which rank 1 kills itself")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    layers = [nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)]
    model = DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    until_s, step = time.monotonic() + options.seconds, 0
    goes_on = torch.ones(1)
    while True:
        # Both ranks must end at one step: rank 0 decides.
        goes_on.fill_(float(time.monotonic() < until_s))
        dist.broadcast(goes_on, 0)
        if not goes_on.item():
            break
        if rank == 1 and step == options.die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        model(torch.randn(16, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        time.sleep(options.pause)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
