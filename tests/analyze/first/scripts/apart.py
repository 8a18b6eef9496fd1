"""Training on a 2 x 2 mesh of ranks, in which the last rank's copy of a parameter comes apart just before an update.

    torchrun --nproc-per-node 4 apart.py FOLDER

records each of `CASES` into ``FOLDER/NAME``, and the first of them without that into ``FOLDER/sound``. In
``FOLDER/scaled`` all gradients of the last rank are `FACTOR` times those of the others at one step, of which only the
probe knows.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.tensor import DTensor

import recorder
from tests.rigs import parallel
from tests.rigs.leaving import leave
from tests.rigs.parallel import mesh_of, sharded

RULES = "site=param,grad,optim keep=stats,fingerprint"
STEP, RANK = 1, 3
FACTOR = 10
PROBED = "site=param,grad keep=probe; site=param,grad steps=::2 keep=stats,fingerprint"


class Case(NamedTuple):
    make: Callable[[nn.Module], nn.Module]
    parameter: str
    """That comes apart; for any of which the last rank has a piece, nothing."""
    groups: list[list[int]]
    """The ranks that should have had the same."""


def hsdp(model: nn.Module) -> nn.Module:
    return sharded(model, mesh_of(("replicate", 2), ("shard", 2)))


def hsdp1(model: nn.Module) -> nn.Module:
    mesh = mesh_of(("replicate", 2), ("shard", 2))
    how: dict[str, Any] = {"sharding_strategy": ShardingStrategy.HYBRID_SHARD, "use_orig_params": True}
    return FullyShardedDataParallel(model, device_mesh=mesh, device_id=torch.device("cpu"), **how)


CASES = {
    "tp_ddp": Case(parallel.tp_ddp, "norm.weight", [[0, 1, 2], [3]]),
    "tp_ddp_cut": Case(parallel.tp_ddp, "blocks.1.mlp.up.weight", [[1], [3]]),
    "tp": Case(parallel.tp, "norm.weight", [[0, 1, 2], [3]]),
    "sp": Case(parallel.sp, "norm.weight", [[0, 1, 2], [3]]),
    "tp_fsdp2": Case(parallel.tp_fsdp2, "norm.weight", [[2], [3]]),
    "hsdp": Case(hsdp, "norm.weight", [[1], [3]]),
    "hsdp1": Case(hsdp1, "", [[1], [3]]),
}


def coming_apart(model: nn.Module, name: str) -> Callable[[nn.Module, int], None]:
    """What is to be called before each update."""
    parameters = dict(model.named_parameters())  # those that the optimizer has; DDP lends modules others

    def come_apart(_: nn.Module, step: int) -> None:
        if (step, dist.get_rank()) != (STEP, RANK):
            return
        for found, parameter in parameters.items():
            local = (parameter.to_local() if isinstance(parameter, DTensor) else parameter).detach()
            if (not name or f".{found}".endswith(f".{name}")) and local.numel():
                local.add_(0.25)
                return

    return come_apart


def main() -> None:
    out = Path(sys.argv[1])
    dist.init_process_group("gloo")
    parallel.DIM = 16
    for folder, (make, name, _) in {**CASES, "sound": CASES["tp_ddp"]}.items():
        model = make(parallel.make())

        with recorder.attach(model, enabled=True, dir=out / folder, rules=RULES):
            parallel.fit(model, coming_apart(model, name) if folder != "sound" else None)
    model = nn.parallel.DistributedDataParallel(parallel.make())

    def scale(_: nn.Module, step: int) -> None:
        for parameter in model.parameters() if (step, dist.get_rank()) == (STEP, RANK) else ():
            if parameter.grad is not None:
                parameter.grad.mul_(FACTOR)

    with recorder.attach(model, enabled=True, dir=out / "scaled", rules=PROBED):
        parallel.fit(model, scale)
    leave()


if __name__ == "__main__":
    main()
