"""Which ranks share a root's batch: the facts of DDP, FSDP1 and FSDP2 wrappers, for the manifest.

Reads metadata only: never issues a collective, never keeps a wrapper, a mesh or a process group.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

DataParallel = dict[str, Any]
"""``kind``: ``ddp``, ``fsdp1`` or ``fsdp2``; ``ranks``: global ranks in data-parallel order."""


def find_data_parallel(root: nn.Module, *, thorough: bool) -> DataParallel | None:
    """The data-parallel facts of a root that is, contains, or is inside a wrapper; None where there is none.

    Args:
        root: the module that is recorded, possibly a wrapper itself.
        thorough: also look among all live objects for the wrapper of a model that is called directly (0.1 s for
            361,000 objects).
    """
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return None
    for module in root.modules():
        facts = _facts(module)
        if facts is not None:
            return facts
    for wrapper in _wrappers_around(root, thorough=thorough):
        facts = _facts(wrapper)
        if facts is not None:
            return facts
    return None


def _wrappers_around(root: nn.Module, *, thorough: bool) -> Iterator[nn.Module]:
    """DDP and FSDP1 wrappers that the root is inside of."""
    active = DistributedDataParallel._active_ddp_module
    if active is not None and any(inner is root for inner in active.modules()):
        yield active
    if thorough:
        fsdp = _loaded("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel")
        kinds = (DistributedDataParallel, fsdp) if fsdp is not None else (DistributedDataParallel,)
        for found in gc.get_objects():
            is_wrapper = issubclass(type(found), kinds) and "_modules" in vars(found)  # else its making has only begun
            if is_wrapper and any(inner is root for inner in found.modules()):
                yield found


def _facts(module: nn.Module) -> DataParallel | None:
    if isinstance(module, DistributedDataParallel):
        return {"kind": "ddp", "ranks": _ranks(module.process_group)}
    fsdp1 = _loaded("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel")
    if fsdp1 is not None and isinstance(module, fsdp1):
        return {"kind": "fsdp1", "ranks": _fsdp1_ranks(module)}
    fsdp2 = _loaded("torch.distributed.fsdp", "FSDPModule")
    if fsdp2 is not None and isinstance(module, fsdp2):
        groups = getattr(module._get_fsdp_state(), "_fsdp_param_groups", ())
        return {"kind": "fsdp2", "ranks": _mesh_ranks(groups[0].mesh_info)} if groups else None
    replicate = _loaded("torch.distributed._composable.replicate", "replicate")
    state = replicate.state(module) if replicate is not None and type(module).__name__.startswith("DDP") else None
    wrapper = getattr(state, "_ddp_weakref", lambda: None)()
    return {"kind": "ddp", "ranks": _ranks(wrapper.process_group)} if wrapper is not None else None


def _loaded(module_name: str, name: str) -> Any:
    """A name of a module if the program has imported that; nothing can be wrapped by what was never imported."""
    return getattr(sys.modules.get(module_name), name, None)


def _ranks(group: Any) -> list[int]:
    from torch.distributed import get_process_group_ranks

    return list(get_process_group_ranks(group))


def _mesh_ranks(info: Any) -> list[int]:
    """Of an FSDP2 mesh the ranks along its data-parallel axes, row-major, at this rank's place on the others."""
    axes = {info.replicate_mesh_dim, info.shard_mesh_dim}
    here = info.mesh.get_coordinate()
    ranks = [info.mesh.mesh.tolist()]
    for axis in range(info.mesh.ndim):
        ranks = [rank for row in ranks for rank in (row if axis in axes else [row[here[axis]]])]
    return ranks


def _fsdp1_ranks(wrapper: Any) -> list[int]:
    """With a hybrid strategy every pair of a replica and a shard, row-major.

    Of two plain groups only those of this rank are known; that they form a regular grid, as the strategy needs, tells
    the others.
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
