"""A training whose every value can be computed again: it is killed, cut and restarted by the campaigns.

As a script it is what a user would launch; `replay.py` repeats the same steps with plain hooks, without the recorder.
It must never depend on the clock, the number of ranks that were before it, or anything but `SEED`, rank and step.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

SEED = 20_260_101
WIDTH, HIDDEN, BATCH = 24, 64, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.act = nn.ReLU(inplace=True)
        self.drop = nn.Dropout(0.25)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.down(self.drop(self.act(self.up(x))))
        return h + x


class Net(nn.Module):
    running: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.register_buffer("running", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        self.running.lerp_(x.detach().mean(0), 0.1)
        return x


def make(rank: int) -> tuple[Net, torch.optim.Optimizer]:
    """Model and optimizer; equal on all ranks. The random state is then this rank's own."""
    torch.manual_seed(SEED)
    net = Net()
    torch.manual_seed(SEED + 1 + rank)
    return net, torch.optim.AdamW(net.parameters(), lr=0.01)


def batch(rank: int, step: int) -> Tensor:
    own = torch.Generator().manual_seed(SEED + 1000 * step + rank)
    return torch.randn(BATCH, WIDTH, generator=own)


def train(
    steps: int,
    *,
    store: str | None = None,
    fail_at: int | None = None,
    save_at: int | None = None,
    die_at: int | None = None,
    seconds: float = math.inf,
    pause_s: float = 0.0,
) -> None:
    """Train as a user would: under DDP where there are several ranks.

    `store` is the `init_method` of the process group, by default the environment's. Rank 0 raises before step
    `fail_at`, and rank 1 kills itself before step `die_at`. A checkpoint is left before step `save_at`, and where there
    is one, training begins from it. All ranks end at the first step after so many seconds, and pause between steps.
    """
    until_s, goes_on = time.monotonic() + seconds, torch.ones(1)
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world_size > 1:
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
    net, optimizer = make(rank)
    model = nn.parallel.DistributedDataParallel(net) if world_size > 1 else net
    checkpoint = Path(f"checkpoint.{rank}.pt")
    first_step = 0
    if save_at is not None and checkpoint.exists():
        found = torch.load(checkpoint, weights_only=False)
        first_step = save_at
        net.load_state_dict(found["net"])
        optimizer.load_state_dict(found["optimizer"])
        torch.set_rng_state(found["random"])
    for step in range(first_step, steps):
        if seconds < math.inf and world_size > 1:
            goes_on.fill_(float(time.monotonic() < until_s))
            dist.broadcast(goes_on, 0)  # all ranks must end at one step
            if not goes_on.item():
                break
        if step == die_at and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if step == fail_at and rank == 0:
            raise ArithmeticError("the end that was asked for")
        if step == save_at and step != first_step:
            states = {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "random": torch.get_rng_state()}
            torch.save(states, checkpoint)
        model(batch(rank, step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(pause_s)
    if world_size > 1:
        del model
        gc.collect()  # DDP that outlives its process group can block the end of the process
        dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--fail-at", type=int, help="rank 0 of the first attempt raises before this step")
    parser.add_argument("--save-at", type=int, help="leave a checkpoint before this step, or begin from it")
    parser.add_argument("--die-at", type=int, help="rank 1 kills itself before this step")
    parser.add_argument("--seconds", type=float, default=math.inf, help="end after so long")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds between two steps")
    options = parser.parse_args()
    is_first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    train(
        options.steps, fail_at=options.fail_at if is_first else None, save_at=options.save_at, die_at=options.die_at,
        seconds=options.seconds, pause_s=options.pause,
    )  # fmt: skip


if __name__ == "__main__":
    main()
