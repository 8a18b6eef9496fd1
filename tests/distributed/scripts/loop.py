"""A small training loop that notes each finished step in a file, and ends in the way that is asked for."""

from __future__ import annotations

import argparse
import datetime
import os
import signal
import sys
import time
from types import FrameType

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import TCPStore


def stop(number: int, frame: FrameType | None) -> None:
    sys.exit(5)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--end", default="normal", choices=("normal", "exception", "sys_exit", "stuck", "never"))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rank", type=int, help="the only one to end so; the others never do")
    parser.add_argument("--attempt", type=int, help="the only one to end so; later ones end normally")
    parser.add_argument("--handler", action="store_true", help="leave with code 5 on SIGTERM")
    options = parser.parse_args()
    rank, attempt = int(os.environ.get("RANK", 0)), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    end = options.end
    if options.rank not in (None, rank):
        end = "never"
    if options.attempt not in (None, attempt):
        end = "normal"
    if options.handler:
        signal.signal(signal.SIGTERM, stop)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")

    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(inplace=True), nn.Linear(64, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    progress = os.open(f"progress.{rank}.{attempt}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    step = 0
    while step < options.steps or end == "never":
        model(torch.randn(8, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        os.write(progress, b".")
        step += 1
        if end == "never":
            time.sleep(0.002)
    if end == "exception":
        raise ArithmeticError("the end that was asked for")
    if end == "sys_exit":
        sys.exit(3)
    if end == "stuck":  # in C++, where no Python handler runs
        store = TCPStore("127.0.0.1", 0, is_master=True)
        os.write(progress, b"!")
        store.wait(["never"], datetime.timedelta(seconds=60))
    if dist.is_initialized():
        dist.destroy_process_group()
    print("done")


if __name__ == "__main__":
    main()
