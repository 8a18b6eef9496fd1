"""Every kind of data-parallel wrapper on four ranks, each under `recorder.attach` with a name; the flag is off."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import recorder
from tests.rigs.leaving import leave

CPU = torch.device("cpu")
HYBRID: dict[str, Any] = {"device_id": CPU, "sharding_strategy": ShardingStrategy.HYBRID_SHARD}


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 4))


def call(model: nn.Module) -> None:
    model(torch.ones(2, 4))


def plain() -> nn.Module:
    return net()


def ddp() -> nn.Module:
    return DistributedDataParallel(net())


def ddp_of_two() -> nn.Module:
    groups = [dist.new_group(ranks) for ranks in ([2, 0], [3, 1])]
    return DistributedDataParallel(net(), process_group=groups[dist.get_rank() % 2], broadcast_buffers=False)


def ddp_inside() -> nn.Module:
    model = net()
    model[1] = DistributedDataParallel(model[1])
    return model


def fsdp2() -> nn.Module:
    model = net()
    fully_shard(model[0])
    fully_shard(model)
    return model


def fsdp2_inside() -> nn.Module:
    model = net()
    fully_shard(model[1])
    return model


def hsdp() -> nn.Module:
    model = net()
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    return model


def fsdp2_of_larger_mesh() -> nn.Module:
    model = net()
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["dp"])
    return model


def fsdp1() -> nn.Module:
    return FullyShardedDataParallel(net(), device_id=CPU)


def fsdp1_hybrid_of_mesh() -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return FullyShardedDataParallel(net(), device_mesh=mesh, **HYBRID)


def fsdp1_hybrid_of_groups() -> nn.Module:
    shards = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])][dist.get_rank() % 2]
    across = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])][dist.get_rank() // 2]
    return FullyShardedDataParallel(net(), process_group=(shards, across), **HYBRID)


def evaluated_inside_ddp() -> None:
    """The wrapper exists, and only the model in it is ever called."""
    inner = net()
    wrapper = DistributedDataParallel(inner)
    recorder.attach(inner, name="evaluated_inside_ddp", enabled=True)
    with torch.no_grad():
        call(inner)
    del wrapper


def wrapped_after_attach() -> None:
    inner = net()
    recorder.attach(inner, name="wrapped_after_attach", enabled=True)
    call(inner)
    call(DistributedDataParallel(inner))


def ddp_joined() -> None:
    model = DistributedDataParallel(net())
    with model.join():
        recorder.attach(model, name="ddp_joined", enabled=True)
        call(model)


ATTACHED = (
    *(plain, ddp, ddp_of_two, ddp_inside, fsdp1, fsdp1_hybrid_of_mesh, fsdp1_hybrid_of_groups),
    *(fsdp2, fsdp2_inside, fsdp2_of_larger_mesh, hsdp),
)


def main() -> None:
    dist.init_process_group("gloo")
    for make in ATTACHED:
        model = make()
        recorder.attach(model, name=make.__name__, enabled=True)
        call(model)
    evaluated_inside_ddp()
    wrapped_after_attach()
    ddp_joined()
    leave()


if __name__ == "__main__":
    main()
