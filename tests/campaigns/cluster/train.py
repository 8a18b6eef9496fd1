"""A training that goes on from its checkpoint, as a user's own script: it knows nothing of any recorder.

It says each step that is over, so that a test knows when to strike.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

from tests.rigs.leaving import leave
from tests.small_training import Model


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds that a step takes at least")
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--fail-at", type=int, default=-1, help="the step at which the last rank fails")
    parser.add_argument("--until", type=Path, help="a file that ends the training once it exists")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(7)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    start = 0
    if args.checkpoint is not None and args.checkpoint.exists():
        saved = torch.load(args.checkpoint)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        start = saved["step"] + 1
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    for step in range(start, args.steps):
        if step == args.fail_at and rank == world_size - 1:
            raise RuntimeError("a step that fails")
        torch.manual_seed(1000 * step + rank)
        wrapped(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and args.checkpoint is not None:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, f"{args.checkpoint}.tmp")
            os.replace(f"{args.checkpoint}.tmp", args.checkpoint)
        is_last = torch.tensor(args.until is not None and args.until.exists(), dtype=torch.int32)
        dist.all_reduce(is_last, dist.ReduceOp.MIN)
        print(f"rank {rank} of {world_size}: step {step} is over", flush=True)
        if is_last:
            break
        time.sleep(args.pause)
    leave()


if __name__ == "__main__":
    main()
