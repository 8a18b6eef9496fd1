"""A training on all ranks that may be unsound: what it does wrong is its first argument."""

from __future__ import annotations

import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn


def main() -> None:
    fault = sys.argv[1]
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    first, last = nn.Linear(4, 8), nn.Linear(8, 2)
    model = nn.Sequential(first, nn.BatchNorm1d(8), nn.Dropout(0.1), last)
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(100):
        loss = wrapped(torch.randn(4, 4)).square().mean()
        loss.backward()
        with torch.no_grad():
            if fault == "noise" and step == 3:
                first.bias.grad = torch.full((8,), time.time() % 1)
            if fault == "looks" and step == 2 and rank == 1 and os.environ.get("RECORDER") == "1":
                last.weight[0, 0] += 1e-7
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step} loss {loss.item():.6f}", flush=True)
        print(f"took {time.time_ns()} ns")
        if fault == "says" and step == 1 and "RECORDER" in os.environ:
            print("recorded!")
    raise AssertionError("the probe has not ended the program")


if __name__ == "__main__":
    main()
