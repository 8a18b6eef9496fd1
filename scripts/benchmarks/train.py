"""One measured process: a workload under the recorder that is asked for. Prints one line of JSON.

Each step is timed inside the process, so that start-up, imports and the reading of the text enter no figure.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import numpy as np
import torch.distributed as dist
from crc32c import crc32c
from torch import nn

from . import peers, recorders, workloads
from .stopwatch import THREADS, Stopwatch


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("recorder")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--workload", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--warmup", type=int, required=True)
    args = parser.parse_args()

    rank = int(os.environ.get("RANK", "0"))
    work = workloads.make(args.workload)
    counter = recorders.Counter()
    if args.recorder == "count":
        recorders.attach(work.model, work.optimizer, counter.see)
        installed = recorders.Installed(work.model)
    else:
        directory = args.directory / f"rank-{rank}"  # of recorders that know nothing of ranks
        directory.mkdir()
        peer = peers.PEERS.get(args.recorder)
        installed = (
            recorders.install(args.recorder, work.model, work.optimizer, directory)
            if peer is None
            else peer.install(work.model, work.optimizer, directory)
        )

    step_s: list[float] = []
    losses: list[float] = []
    watch = Stopwatch()
    for step in range(args.steps):
        if step == args.warmup:
            watch = Stopwatch()
        inputs, targets = next(work.batches)
        started = time.perf_counter()
        losses.append(work.train_step(installed.model, work.optimizer, inputs, targets))
        installed.end_step(step)
        step_s.append(time.perf_counter() - started)
    lap, end_s, end_cpu_s = watch.lap(), time.time(), time.process_time()
    installed.close()
    num_counted = args.steps - args.warmup
    if args.recorder == "count" and rank == 0:
        counter.save_sample(args.directory / "sample.npy")
    result = {
        "step_s": step_s,
        "cpu_s": {name: lap.cpu_s[name] / num_counted for name in THREADS},
        "digest": digest(work.model, losses),
        "num_tensors": counter.num_tensors / args.steps,
        "num_bytes": counter.num_bytes / args.steps,
        "end_s": end_s,
        "end_cpu_s": end_cpu_s,
    }
    print(json.dumps(result), flush=True)
    if dist.is_initialized():
        del work, installed  # DDP that outlives its process group can block the end of the process
        dist.destroy_process_group()


def digest(model: nn.Module, losses: list[float]) -> str:
    """Of every loss and every parameter, to the last bit."""
    crc = crc32c(np.array(losses).tobytes())
    for parameter in model.parameters():
        crc = crc32c(parameter.detach().numpy().data, crc)
    return f"{crc:08x}"


if __name__ == "__main__":
    main()
