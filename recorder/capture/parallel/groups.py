"""Finds the ranks that split a root's batch, and those that work on the same part of it, for the manifest.

It reads the metadata of DDP, FSDP1 and FSDP2 wrappers, and of the meshes of DTensor parameters. Nothing here may issue
a collective, or keep a wrapper, a mesh or a process group.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterable
from typing import Any

import numpy as np
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ...system.processes import loaded
from .topology import is_distributed

DataParallel = dict[str, Any]
"""``kind``: ``ddp``, ``fsdp1`` or ``fsdp2``; ``ranks``: global ranks in data-parallel order; ``broadcast_buffers``: of
``ddp`` alone."""
ModelParallel = dict[str, Any]
"""``ranks``: global ranks, row-major in a mesh of ``shape`` whose axes have ``dim_names``, or None."""

FSDP1 = ("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel")


def find_data_parallel(root: nn.Module, around: Iterable[nn.Module]) -> DataParallel | None:
    """Return the data-parallel group of a root that is, contains, or is inside of a wrapper; None without one.

    Args:
        root: the module that is recorded, possibly a wrapper itself.
        around: wrappers that the root is known to be inside of.
    """
    if not is_distributed():
        return None
    active = DistributedDataParallel._active_ddp_module
    if active is not None and any(inner is root for inner in active.modules()):
        around = (*around, active)
    for module in itertools.chain(root.modules(), around):
        group = _data_parallel(module)
        if group is not None:
            return group
    return None


def find_model_parallel(meshes: Iterable[Any], data_parallel: DataParallel | None) -> ModelParallel | None:
    """Return the ranks that work on the same part of the batch as this rank; None where it is alone.

    Args:
        meshes: the meshes over which parameters are laid; the one with the most such ranks counts.
        data_parallel: the ranks that work on other parts: the axes that lead to them are left out.
    """
    elsewhere = set(data_parallel["ranks"]) if data_parallel is not None else set()
    distinct = {id(mesh): mesh for mesh in meshes}.values()
    groups = [group for mesh in distinct if (group := _beside(mesh, elsewhere)) is not None]
    return max(groups, key=lambda group: len(group["ranks"]), default=None)


def _beside(mesh: Any, elsewhere: set[int]) -> ModelParallel | None:
    coordinate, grid = mesh.get_coordinate(), np.array(mesh.mesh.tolist())
    if coordinate is None:
        return None
    index: list[Any] = list(coordinate)
    for axis in range(mesh.ndim):
        line = grid[(*coordinate[:axis], slice(None), *coordinate[axis + 1 :])].tolist()
        if len(line) > 1 and not elsewhere.issuperset(line):
            index[axis] = slice(None)
    axes = [axis for axis, at in enumerate(index) if isinstance(at, slice)]
    if not axes:
        return None
    ranks, names = grid[tuple(index)], mesh.mesh_dim_names
    return {
        "ranks": ranks.flatten().tolist(),
        "shape": list(ranks.shape),
        "dim_names": [names[axis] for axis in axes] if names else None,
    }


def wrappers_around(root: nn.Module) -> list[nn.Module]:
    """Return DDP and FSDP1 wrappers of a model that is called directly, among all live objects (0.1 s for 361,000)."""
    if not is_distributed() or _data_parallel(root) is not None:
        return []
    fsdp1 = loaded(*FSDP1)
    kinds = (DistributedDataParallel,) if fsdp1 is None else (DistributedDataParallel, fsdp1)
    return [
        item
        for item in gc.get_objects()
        if issubclass(type(item), kinds)
        and "_modules" in vars(item)  # else its __init__ has only begun
        and any(inner is root for inner in item.modules())
    ]


def _data_parallel(module: nn.Module) -> DataParallel | None:
    if isinstance(module, DistributedDataParallel):
        return _ddp(module)
    fsdp1 = loaded(*FSDP1)
    if fsdp1 is not None and isinstance(module, fsdp1):
        return {"kind": "fsdp1", "ranks": fsdp1_ranks(module)}
    fsdp2 = loaded("torch.distributed.fsdp", "FSDPModule")
    if fsdp2 is not None and isinstance(module, fsdp2):
        state = module._get_fsdp_state()
        group = next(iter(getattr(state, "_fsdp_param_groups", ())), None)
        group = group or getattr(state, "_fsdp_param_group", None)  # the only one, in torch 2.9
        return {"kind": "fsdp2", "ranks": _mesh_ranks(group.mesh_info)} if group is not None else None
    replicate = loaded("torch.distributed._composable.replicate", "replicate")
    state = replicate.state(module) if replicate is not None and type(module).__name__.startswith("DDP") else None
    wrapper = getattr(state, "_ddp_weakref", lambda: None)()
    return _ddp(wrapper) if wrapper is not None else None


def _ddp(wrapper: Any) -> DataParallel:
    broadcasts = bool(wrapper.broadcast_buffers)
    return {"kind": "ddp", "ranks": _ranks(wrapper.process_group), "broadcast_buffers": broadcasts}


def _ranks(group: Any) -> list[int]:
    from torch.distributed import get_process_group_ranks

    return list(get_process_group_ranks(group))


def _mesh_ranks(info: Any) -> list[int]:
    """Return the ranks of an FSDP2 mesh along its data-parallel axes, row-major, at its coordinates on the others."""
    axes = {info.replicate_mesh_dim, info.shard_mesh_dim}
    coordinate = info.mesh.get_coordinate()
    ranks = [info.mesh.mesh.tolist()]
    for axis in range(info.mesh.ndim):
        ranks = [rank for row in ranks for rank in (row if axis in axes else [row[coordinate[axis]]])]
    return ranks


def fsdp1_ranks(wrapper: Any) -> list[int]:
    """Return the ranks of an FSDP1 wrapper; with a hybrid strategy row-major over replicas and shards.

    Of two plain groups only those of this rank are known. The others follow, because the strategy needs a regular grid.
    """
    shards = _ranks(wrapper.process_group)
    across = getattr(wrapper, "_inter_node_pg", None)
    if across is None:
        return shards
    mesh = getattr(wrapper, "_device_mesh", None)
    if mesh is not None and mesh.ndim == 2:
        return [rank for row in mesh.mesh.tolist() for rank in row]
    from torch.distributed import get_rank

    return [replica + shard - get_rank() for replica in _ranks(across) for shard in shards]
