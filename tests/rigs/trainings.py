"""Small trainings that a script records one after the other, each in ranks that are forked from one process.

What is imported here is imported once, before all forks: an optimizer imports dynamo at its first step, and `attach`
the recorder.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import torch
import torch._dynamo
import torch.distributed as dist

import recorder.lifecycle.recorder
import recorder.write.writer  # noqa: F401
from tests.rigs.forking import fork
from tests.rigs.leaving import leave

Training = Callable[[Path, str, int, int], object]
"""What a rank does, with its folder, the name of the training, the rank and the number of ranks."""


def record_each(folder: Path, names: Iterable[str], num_ranks_of: Callable[[str], int], train: Training) -> int:
    """Record each training into ``folder / name``, on gloo ranks; the exit code is 1 where a rank failed."""
    torch.set_num_threads(1)
    gc.freeze()  # so that no child walks through, and copies, what all share
    num_failed = 0
    for name in names:
        size = num_ranks_of(name)
        pids = [fork(partial(_as_rank, folder / name, name, rank, size, train)) for rank in range(size)]
        num_bad = sum(os.waitpid(pid, 0)[1] != 0 for pid in pids)
        if num_bad:
            print(f"{name}: {num_bad} ranks failed", file=sys.stderr)
        num_failed += num_bad
    return int(num_failed > 0)


def _as_rank(folder: Path, name: str, rank: int, size: int, train: Training) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    folder.mkdir(parents=True, exist_ok=True)
    if size > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=size)
    train(folder, name, rank, size)
    if size > 1:
        dist.barrier()


def record_as_launched(
    folder: Path, names: Iterable[str], as_ranks: Callable[[Path, str], object], as_one: Callable[[Path, int], object]
) -> None:
    """Record each training under torchrun; without it one process alone, into ``one``, and its twin into ``twin``."""
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
        for name in names:
            as_ranks(folder / name, name)
        leave()
    for name, jitter in (("one", 0), ("twin", 1)):
        as_one(folder / name, jitter)
