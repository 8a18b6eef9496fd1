"""Parameters that a rank has for itself although ranks with other batches have the rest of the model too, as experts.

Reads metadata only: never issues a collective, never keeps a wrapper, a parameter or a mesh.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import numpy as np
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .parallel import FSDP1, DataParallel, loaded
from .places import spec_of

IGNORED = "ignored"
"""It is trained, and the data-parallel wrapper was told to leave it alone."""
MARKED = "allreduce_false"
"""``parameter.allreduce = False``, which Megatron and DeepSpeed set on experts."""
CUT = "cut_over_batches"
"""A DTensor, of which ranks with other batches compute with other pieces."""


def find_unshared(modules: Collection[nn.Module], data_parallel: DataParallel | None) -> dict[int, str]:
    """Why some parameters, by id, are others on the ranks that share a root and differ in their batches.

    Args:
        modules: those of the root, and the wrappers around it.
        data_parallel: the root's facts.
    """
    elsewhere = set(data_parallel["ranks"]) if data_parallel is not None else set()
    managed = {id(parameter): spec for module in modules for parameter, spec in _managed_by_fsdp2(module)}
    found: dict[int, str] = {}
    for module in modules:
        # A frozen one that the wrapper leaves alone is most often the same on all ranks.
        found |= {id(parameter): IGNORED for parameter in _ignored(module, managed) if parameter.requires_grad}
        for parameter in module._parameters.values():
            if parameter is None:
                continue
            if getattr(parameter, "allreduce", None) is False:
                found[id(parameter)] = MARKED
            spec = managed[id(parameter)] if id(parameter) in managed else spec_of(parameter)
            if spec is not None and _is_cut(spec, elsewhere):
                found[id(parameter)] = CUT
    return found


def _is_cut(spec: Any, elsewhere: set[int]) -> bool:
    """Whether some axis along which it is cut leads to ranks with other batches alone."""
    here, grid = spec.mesh.get_coordinate(), np.array(spec.mesh.mesh.tolist())
    for axis, placement in enumerate(spec.placements if here is not None else ()):
        line = grid[(*here[:axis], slice(None), *here[axis + 1 :])].tolist()
        if len(line) > 1 and "Shard" in type(placement).__name__ and elsewhere.issuperset(line):
            return True
    return False


def _ignored(module: nn.Module, managed: Collection[int]) -> Iterator[nn.Parameter]:
    """The parameters that a wrapper, if the module is one, leaves alone."""
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
    """The parameters that FSDP2 shards at this module, and what they are while it computes, where that is a DTensor."""
    kind = loaded("torch.distributed.fsdp", "FSDPModule")
    if kind is None or not isinstance(module, kind):
        return
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
    for group in groups:
        for one in group.fsdp_params if group is not None else ():
            # The second name is that of torch 2.9.
            info, spec = one._module_info, getattr(one, "_unsharded_dtensor_spec", getattr(one, "_tp_spec", None))
            for owner, name in zip(
                (info.module, *info.shared_modules), (info.param_name, *info.shared_param_names), strict=True
            ):
                if (parameter := owner._parameters.get(name)) is not None:
                    yield parameter, spec
