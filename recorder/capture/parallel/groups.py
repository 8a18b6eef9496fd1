"""Finds the ranks that share the work of a root (a model under hooks), for the manifest.

Three groups are found: the ranks that split the root's batch (DDP, FSDP), the ranks that work on the same part of the
batch (tensor, sequence and context parallel), and the stages of a pipeline. Parameters such as those of experts are
found, too: they differ between ranks with different batches although these ranks share the rest of the model.

Only metadata is read, of wrappers and of the meshes of DTensor parameters. `torch.distributed.pipelining` has no hooks,
so the call stack shows which stage runs. The stack is read once for each call of a root, and only if the program has
imported pipelining. Nothing here may issue a collective, or keep a wrapper, a parameter, a mesh or a process group.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Collection, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ...system.processes import is_instance, live_instances, loaded
from ..local_values import spec_of
from .marks import MEGATRONS_SCHEDULES, marked_data_parallel, ranks_of, stage_of_schedule
from .topology import is_distributed

DataParallel = dict[str, Any]
"""A data-parallel group, with the keys ``kind`` (``ddp``, ``fsdp1``, ``fsdp2``, ``megatron``), ``ranks`` in
data-parallel order and, for ``ddp``, ``broadcast_buffers``, and ``joins`` inside of ``join()``."""
ModelParallel = dict[str, Any]
"""Ranks with the same part of the batch, as a mesh: ``ranks`` (global, row-major), ``shape``, ``dim_names`` or None."""

FSDP1 = ("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel")
_FSDP2 = ("torch.distributed.fsdp", "FSDPModule")


def find_data_parallel(root: nn.Module, around: Iterable[nn.Module]) -> DataParallel | None:
    """Return the data-parallel group of a root, from wrappers or Megatron's marks. Return None if there is no group.

    The wrapper may be the root, lie inside it, or contain it. `around` are the known wrappers around the root.
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
    return marked_data_parallel(root)


def find_model_parallel(meshes: Iterable[Any], data_parallel: DataParallel | None) -> ModelParallel | None:
    """Return the ranks that work on the same part of the batch as this rank. Return None if this rank is alone.

    If parameters lie on several meshes, the mesh that gives the most ranks is used. Axes of a mesh that lead only to
    ranks of `data_parallel` are left out, because these ranks work on other parts of the batch.
    """
    elsewhere = set(data_parallel["ranks"]) if data_parallel is not None else set()
    distinct = {id(mesh): mesh for mesh in meshes}.values()
    groups = [group for mesh in distinct if (group := _beside(mesh, elsewhere)) is not None]
    return max(groups, key=lambda group: len(group["ranks"]), default=None)


def _beside(mesh: Any, elsewhere: set[int]) -> ModelParallel | None:
    if mesh.get_coordinate() is None:
        return None
    lines = [_along([axis], mesh).tolist() for axis in range(mesh.ndim)]
    axes = [axis for axis, line in enumerate(lines) if len(line) > 1 and not elsewhere.issuperset(line)]
    if not axes:
        return None
    ranks, names = _along(axes, mesh), mesh.mesh_dim_names
    return {
        "ranks": ranks.flatten().tolist(),
        "shape": list(ranks.shape),
        "dim_names": [names[axis] for axis in axes] if names else None,
    }


def _along(axes: Collection[int | None], mesh: Any) -> npt.NDArray[np.int64]:
    """Return the ranks of a mesh that differ from this rank along some axes alone, as a grid of these axes."""
    grid = np.array(mesh.mesh.tolist())
    return grid[tuple(slice(None) if axis in axes else at for axis, at in enumerate(mesh.get_coordinate()))]


def wrappers_around(root: nn.Module) -> list[nn.Module]:
    """Return the DDP and FSDP1 wrappers around a module, found among all live objects."""
    if not is_distributed() or _data_parallel(root) is not None:
        return []
    fsdp1 = loaded(*FSDP1)
    kinds = (DistributedDataParallel,) if fsdp1 is None else (DistributedDataParallel, fsdp1)
    return [
        item
        for kind in kinds
        for item in live_instances(kind)
        if "_modules" in vars(item)  # an object without `_modules` is a module whose `__init__` still runs
        and any(inner is root for inner in item.modules())
    ]


def _data_parallel(module: nn.Module) -> DataParallel | None:
    if isinstance(module, DistributedDataParallel):
        return _ddp(module)
    if is_instance(module, *FSDP1):
        return {"kind": "fsdp1", "ranks": fsdp1_ranks(module)}
    if is_instance(module, *_FSDP2):
        state = module._get_fsdp_state()
        group = next(iter(getattr(state, "_fsdp_param_groups", ())), None)
        group = group or getattr(state, "_fsdp_param_group", None)  # torch 2.9 has one parameter group, under this name
        if group is None:
            return None
        axes = [group.mesh_info.replicate_mesh_dim, group.mesh_info.shard_mesh_dim]
        return {"kind": "fsdp2", "ranks": _along(axes, group.mesh_info.mesh).flatten().tolist()}
    replicate = loaded("torch.distributed._composable.replicate", "replicate")
    state = replicate.state(module) if replicate is not None and type(module).__name__.startswith("DDP") else None
    wrapper = getattr(state, "_ddp_weakref", lambda: None)()
    return _ddp(wrapper) if wrapper is not None else None


def _ddp(wrapper: Any) -> DataParallel:
    broadcasts = bool(wrapper.broadcast_buffers)
    is_joined = getattr(getattr(wrapper, "_join_config", None), "enable", False)  # not public
    joins = {"joins": True} if is_joined else {}
    return {"kind": "ddp", "ranks": [*ranks_of(wrapper.process_group)], "broadcast_buffers": broadcasts, **joins}


def fsdp1_ranks(wrapper: Any) -> list[int]:
    """Return the ranks of an FSDP1 wrapper. With a hybrid strategy, they are row-major over replicas and shards.

    If a hybrid strategy was given two process groups, only the two groups of this rank are known. The other ranks
    follow from these two groups, because the strategy needs a regular grid.
    """
    shards = [*ranks_of(wrapper.process_group)]
    across = getattr(wrapper, "_inter_node_pg", None)
    if across is None:
        return shards
    mesh = getattr(wrapper, "_device_mesh", None)
    if mesh is not None and mesh.ndim == 2:
        return [rank for row in mesh.mesh.tolist() for rank in row]
    from torch.distributed import get_rank

    return [replica + shard - get_rank() for replica in ranks_of(across) for shard in shards]


_MODULE = "torch.distributed.pipelining.stage"

Pipeline = dict[str, int]
"""A pipeline stage: ``stage`` (counted from 0), ``num_stages``, and ``parts_of_loss`` as in `format.manifest.Stage`."""


class StageCall(NamedTuple):
    """A call of a pipeline stage's module."""

    pipeline: Pipeline
    is_trial: bool = False
    """True for a call outside of training, by which a stage only infers the shapes that it will send."""


def is_whole_pipe(module: object) -> bool:
    """Whether a module is the `Pipe` of all stages. Nobody calls a `Pipe`, because each rank runs its own stages."""
    return is_instance(module, "torch.distributed.pipelining", "Pipe")


def stage_call() -> StageCall | None:
    """Return the pipeline stage's call that this thread is executing. Return None if there is no such call."""
    kind = loaded(_MODULE, "_PipelineStageBase")
    frame = sys._getframe(1) if kind is not None or MEGATRONS_SCHEDULES in sys.modules else None
    while frame is not None:
        module, name = frame.f_globals.get("__name__"), frame.f_code.co_name
        if module == MEGATRONS_SCHEDULES and name == "forward_step":
            pipeline = stage_of_schedule(frame.f_locals)
            return None if pipeline is None else StageCall(pipeline)
        if module == _MODULE and isinstance(stage := frame.f_locals.get("self"), kind):
            pipeline = {"stage": int(stage.stage_index), "num_stages": int(stage.num_stages)}
            if name == "forward_one_chunk" or "infer" in name:
                return StageCall(pipeline, is_trial=name != "forward_one_chunk")
        frame = frame.f_back
    return None


IGNORED = "ignored"
"""Why a parameter differs between ranks: it is trained, but the data-parallel wrapper is configured to ignore it."""
EXPERT = "expert"
"""Why a parameter differs between ranks: it is an expert's. Its name has the expert's number in the whole model."""
MARKED = "allreduce_false"
"""Why a parameter differs between ranks: it has ``allreduce = False``, which Megatron and DeepSpeed set on experts."""
CUT = "cut_over_batches"
"""Why a parameter differs between ranks: it is a DTensor, and ranks with different batches have different chunks."""


def find_rank_local(modules: Collection[nn.Module], data_parallel: DataParallel | None) -> dict[int, str]:
    """Map the id of each parameter that differs between ranks with different batches to the reason.

    `modules` are the modules of the root, and the wrappers around it.
    """
    elsewhere = set(data_parallel["ranks"]) if data_parallel is not None else set()
    managed = {id(parameter): spec for module in modules for parameter, spec in _managed_by_fsdp2(module)}
    reasons: dict[int, str] = {}
    for module in modules:
        # A frozen parameter that the wrapper ignores is usually equal on all ranks.
        reasons |= {id(parameter): IGNORED for parameter in _ignored(module, managed) if parameter.requires_grad}
        for parameter in module._parameters.values():
            if parameter is None:
                continue
            if getattr(parameter, "allreduce", None) is False:
                reasons[id(parameter)] = MARKED
            spec = managed[id(parameter)] if id(parameter) in managed else spec_of(parameter)
            if spec is not None and _is_cut(spec, elsewhere):
                reasons[id(parameter)] = CUT
    return reasons


def _is_cut(spec: Any, elsewhere: set[int]) -> bool:
    """Whether a DTensor is sharded along a mesh axis on which all ranks are in `elsewhere`, the data-parallel ranks."""
    is_outside = spec.mesh.get_coordinate() is None
    for axis, placement in enumerate(() if is_outside else spec.placements):
        line = _along([axis], spec.mesh).tolist()
        if len(line) > 1 and "Shard" in type(placement).__name__ and elsewhere.issuperset(line):
            return True
    return False


def _ignored(module: nn.Module, managed: Collection[int]) -> Iterator[nn.Parameter]:
    if isinstance(module, DistributedDataParallel):
        later = {id(parameter) for parameter in module._delay_all_reduce_params}
        for name, parameter in module.module.named_parameters():
            if name in module.parameters_to_ignore and id(parameter) not in later:
                yield parameter
    elif is_instance(module, *FSDP1):
        yield from module._ignored_params
    elif is_instance(module, *_FSDP2):
        for parameter in module.parameters():
            if id(parameter) not in managed and spec_of(parameter) is None:
                yield parameter


def _managed_by_fsdp2(module: nn.Module) -> Iterator[tuple[nn.Parameter, Any]]:
    """Yield each parameter that FSDP2 shards at this module, with the DTensor spec of the unsharded parameter."""
    if not is_instance(module, *_FSDP2):
        return
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
    for group in groups:
        for managed in group.fsdp_params if group is not None else ():
            info = managed._module_info
            # Torch 2.9 has only the second attribute.
            spec = getattr(managed, "_unsharded_dtensor_spec", getattr(managed, "_tp_spec", None))
            for owner, name in zip(
                (info.module, *info.shared_modules), (info.param_name, *info.shared_param_names), strict=True
            ):
                if (parameter := owner._parameters.get(name)) is not None:
                    yield parameter, spec
