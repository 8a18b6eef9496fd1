"""The training of a soak: runs for so many seconds and does, now and then, all that long trainings do.

    python tests/campaigns/faults/soak_train.py SECONDS SEED

Evaluations, data loaders with forked workers that call the recorded model, averaged copies, checkpoints, forwards that
raise, taps and scalars, threads that call another model, and closing and attaching again. Settings come from the
environment. Prints what it did.
"""

from __future__ import annotations

import copy
import io
import json
import sys
import threading
import time
from collections import Counter

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import recorder

WIDTH = 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.act = nn.GELU()
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(self.act(self.up(self.norm(x))))
        return recorder.tap("residual", x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor, *, fails: bool = False) -> Tensor:
        for block in self.blocks:
            x = block(x)
        if fails:
            raise ArithmeticError("a batch that is skipped")
        return self.head(x)  # type: ignore[no-any-return]


class Data(Dataset[Tensor]):
    """Its items need the model that is being recorded."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __len__(self) -> int:
        return 8

    def __getitem__(self, i: int) -> Tensor:
        with torch.no_grad():
            self.model(torch.full((2, WIDTH), float(i)))
        return torch.full((WIDTH,), i / 8)


def main() -> None:
    seconds, seed = float(sys.argv[1]), int(sys.argv[2])
    torch.manual_seed(seed)
    until_s = time.monotonic() + seconds
    model, other = Model(), nn.Linear(WIDTH, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    done: Counter[str] = Counter()
    batch = torch.randn(16, WIDTH)
    while time.monotonic() < until_s:
        with recorder.attach(model, enabled=True), recorder.attach(other, enabled=True):
            done["attachments"] += 1
            # A first cycle is short, so that everything has been done once before the measuring begins.
            cycle_s = time.monotonic() + (3.0 if done["attachments"] < 4 else min(20.0, seconds / 10))
            while time.monotonic() < min(cycle_s, until_s):
                train(model, optimizer, batch, done)
                if done["steps"] % 50 == 0:
                    sometimes(model, other, batch, done)
                if done["steps"] % 400 == 0:
                    for _ in DataLoader(Data(model), batch_size=4, num_workers=2, multiprocessing_context="fork"):
                        done["loaded"] += 1
    print(json.dumps(done))


def train(model: Model, optimizer: torch.optim.Optimizer, batch: Tensor, done: Counter[str]) -> None:
    loss = model(batch).square().mean()
    loss.backward()
    recorder.scalar("loss", loss)
    optimizer.step()
    optimizer.zero_grad()
    done["steps"] += 1


def sometimes(model: Model, other: nn.Module, batch: Tensor, done: Counter[str]) -> None:
    model.eval()
    with torch.no_grad():
        model(batch)
    model.train()
    average = copy.deepcopy(model)
    average(batch).sum().backward()
    torch.save(model, io.BytesIO())
    torch.save(model.state_dict(), io.BytesIO())
    try:
        model(batch, fails=True)
    except ArithmeticError:
        done["failed forwards"] += 1
    threads = [threading.Thread(target=other, args=(batch,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    done["evaluations"] += 1


if __name__ == "__main__":
    main()
