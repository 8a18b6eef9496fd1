"""Trains a model in each wrapper of torch, evaluating it at each step; the wrapper's own training flag stays False.

Lightning leaves the flag of its DDP so once it has validated.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import recorder
from tests.rigs.capturing import Tiny, batch
from tests.rigs.leaving import leave

CPU = torch.device("cpu")


def fsdp1_of_each_layer(model: Tiny) -> nn.Module:
    model.first = FullyShardedDataParallel(model.first, device_id=CPU, use_orig_params=True)  # type: ignore[assignment]
    return FullyShardedDataParallel(model, device_id=CPU, use_orig_params=True)


def fsdp2(model: Tiny) -> nn.Module:
    fully_shard(model.first)
    fully_shard(model)
    return model


WRAPPERS: dict[str, Callable[[Tiny], nn.Module]] = {
    "ddp": DistributedDataParallel,
    "fsdp1": lambda model: FullyShardedDataParallel(model, device_id=CPU),
    "fsdp1_of_each_layer": fsdp1_of_each_layer,
    "fsdp2": fsdp2,
    "compiled_ddp": lambda model: torch.compile(DistributedDataParallel(model), backend="eager"),  # type: ignore[dict-item,return-value]
    "compiled_fsdp2": lambda model: torch.compile(fsdp2(model), backend="eager"),  # type: ignore[dict-item,return-value]
}


def main(out: Path) -> None:
    dist.init_process_group("gloo")
    for name, wrap in WRAPPERS.items():
        inner = Tiny()
        model = wrap(inner)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with recorder.attach(model, enabled=True, dir=out / name, rules="site=output keep=tensor"):
            for step in range(2):
                for is_training in (True, False):
                    model.train(is_training)
                    for wrapper in model.modules():
                        if isinstance(wrapper, (DistributedDataParallel, FullyShardedDataParallel)):
                            wrapper.training = False
                    loss = model(batch(step + 10 * dist.get_rank())).square().mean()
                    if is_training:
                        loss.backward()
                        optimizer.step()
                        optimizer.zero_grad()
                with torch.no_grad():
                    model(batch(step))
    leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
