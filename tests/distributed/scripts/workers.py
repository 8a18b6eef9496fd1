"""A data set that trains the model in forked workers, and a fork that ends as programs do. Prints the slowest item."""

from __future__ import annotations

import os
import sys
import time

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> None:
    model(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


class Data(Dataset[tuple[Tensor, float]]):
    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __len__(self) -> int:
        return 6

    def __getitem__(self, i: int) -> tuple[Tensor, float]:
        began = time.perf_counter()
        optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        for _ in range(10):
            train(self.model, optimizer, torch.full((4000, 4), float(i)))
        return torch.full((4,), float(i)), time.perf_counter() - began


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    slowest_s = 0.0
    for _ in range(3):
        for batch, seconds in DataLoader(Data(model), batch_size=2, num_workers=2, multiprocessing_context="fork"):
            train(model, optimizer, batch)
            slowest_s = max(slowest_s, float(seconds.max()))
    child = os.fork()
    if child == 0:
        train(model, optimizer, batch)
        sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0
    train(model, optimizer, batch)
    torch.save(model.state_dict(), sys.argv[1])
    print(slowest_s)


if __name__ == "__main__":
    main()
