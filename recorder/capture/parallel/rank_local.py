"""Finds parameters that differ between ranks with other batches although the rest of the model is shared, as experts.

It reads metadata only: never issues a collective, never keeps a wrapper, a parameter or a mesh.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import numpy as np
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ...system.processes import loaded
from ..tensors.dtensors import spec_of
from .groups import FSDP1, DataParallel

IGNORED = "ignored"
"""The parameter is trained, and the data-parallel wrapper was told to ignore it."""
MARKED = "allreduce_false"
"""The parameter has ``allreduce = False``, which Megatron and DeepSpeed set on experts."""
CUT = "cut_over_batches"
"""The parameter is a DTensor, and ranks with other batches compute with other chunks of it."""


def find_rank_local(modules: Collection[nn.Module], data_parallel: DataParallel | None) -> dict[int, str]:
    """Return the reasons why parameters, by id, differ between ranks with other batches.

    Args:
        modules: the modules of the root, and the wrappers around it.
        data_parallel: the root's data-parallel group.
    """
    elsewhere = set(data_parallel["ranks"]) if data_parallel is not None else set()
    managed = {id(parameter): spec for module in modules for parameter, spec in _managed_by_fsdp2(module)}
    reasons: dict[int, str] = {}
    for module in modules:
        # A frozen parameter that the wrapper ignores is most often the same on all ranks.
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
    """Whether a DTensor is cut along an axis that leads only to ranks with other batches."""
    coordinate, grid = spec.mesh.get_coordinate(), np.array(spec.mesh.mesh.tolist())
    for axis, placement in enumerate(spec.placements if coordinate is not None else ()):
        line = grid[(*coordinate[:axis], slice(None), *coordinate[axis + 1 :])].tolist()
        if len(line) > 1 and "Shard" in type(placement).__name__ and elsewhere.issuperset(line):
            return True
    return False


def _ignored(module: nn.Module, managed: Collection[int]) -> Iterator[nn.Parameter]:
    """Yield the parameters that a module ignores, if it is a wrapper."""
    fsdp1, fsdp2 = loaded(*FSDP1), loaded("torch.distributed.fsdp", "FSDPModule")
    if isinstance(module, DistributedDataParallel):
        later = {id(parameter) for parameter in module._delay_all_reduce_params}
        for name, parameter in module.module.named_parameters():
            if name in module.parameters_to_ignore and id(parameter) not in later:
                yield parameter
    elif fsdp1 is not None and isinstance(module, fsdp1):
        yield from module._ignored_params
    elif fsdp2 is not None and isinstance(module, fsdp2):
        for parameter in module.parameters():
            if id(parameter) not in managed and spec_of(parameter) is None:
                yield parameter


def _managed_by_fsdp2(module: nn.Module) -> Iterator[tuple[nn.Parameter, Any]]:
    """Yield the parameters that FSDP2 shards at this module, with their DTensor spec while the module computes."""
    kind = loaded("torch.distributed.fsdp", "FSDPModule")
    if kind is None or not isinstance(module, kind):
        return
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
    for group in groups:
        for managed in group.fsdp_params if group is not None else ():
            info = managed._module_info
            # The second name is that of torch 2.9.
            spec = getattr(managed, "_unsharded_dtensor_spec", getattr(managed, "_tp_spec", None))
            for owner, name in zip(
                (info.module, *info.shared_modules), (info.param_name, *info.shared_param_names), strict=True
            ):
                if (parameter := owner._parameters.get(name)) is not None:
                    yield parameter, spec
