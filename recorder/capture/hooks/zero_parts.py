"""The flat tensors that DeepSpeed's ZeRO updates in place of a model's parameters.

Each rank's optimizer has one tensor of a wider type with this rank's elements of many parameters. DeepSpeed leaves at
each parameter where its elements lie (0.19.8: `utils/tensor_fragment.py`, `runtime/zero/stage3.py`). Only these
attributes are read. DeepSpeed is never imported, and no parameter is gathered.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from ...records import Chunk
from ..dtensors import compact
from ..marks import ranks_of
from .module import HookedModule
from .parameter_rows import FlatMesh, FlatParameter, OriginalSlice


def find_zero_parameters(parameters: Iterable[tuple[HookedModule, str, torch.Tensor]]) -> Iterator[FlatParameter]:
    """Yield the flat tensors of ZeRO 1 to 3 that have elements of some parameters."""
    found: dict[int, FlatParameter] = {}
    elsewhere = []
    for hooked, name, parameter in parameters:
        place = _of_stage_3(parameter) if hasattr(parameter, "_z3_optimizer") else _of_stages_1_and_2(parameter)
        if place is None:
            continue
        flat, start, begin, numel, shape, group = place
        chunk = _chunk(shape, begin, [*ranks_of(group)])
        part = OriginalSlice(hooked, name, shape, (), start - begin, begin, begin + numel, chunk, None)
        if flat is None:
            elsewhere.append(part)
        else:
            found.setdefault(id(flat), FlatParameter(flat, flat.numel())).slices.append(part)
    for first in [*found.values()][:1]:
        first.slices += elsewhere
    yield from found.values()


_Place = tuple[torch.Tensor | None, int, int, int, tuple[int, ...], Any]
"""The flat tensor, the index in it, the index in the parameter, the number of elements; the parameter's shape and its
ranks' group. The tensor is None if all elements lie on other ranks: this rank's rows then have no elements."""


def _of_stages_1_and_2(parameter: Any) -> _Place | None:
    if not hasattr(parameter, "_hp_mapping"):
        return None
    if (mapping := parameter._hp_mapping) is None:
        return None, 0, 0, 0, tuple(parameter.shape), parameter._dp_group
    if mapping.hp_fragment is None:
        return None
    here, start = mapping.lp_fragment_address, mapping.hp_fragment_address.start
    return mapping.hp_fragment._base, start, here.start, here.numel, tuple(parameter.shape), parameter._dp_group


def _of_stage_3(parameter: Any) -> _Place | None:
    optimizer = parameter._z3_optimizer
    position = optimizer.grad_position.get(optimizer.get_param_id(parameter))
    if position is None:
        return None  # frozen, or not given to the optimizer
    size, group = parameter.ds_tensor.ds_numel, parameter.ds_process_group
    begin = min(ranks_of(group).index(torch.distributed.get_rank()) * size, parameter.ds_numel)
    flat = optimizer.fp32_partitioned_groups_flat[position[0]]
    return flat, position[1], begin, min(size, parameter.ds_numel - begin), tuple(parameter.ds_shape), group


def _chunk(shape: tuple[int, ...], begin: int, ranks: Sequence[int]) -> Chunk:
    mesh = FlatMesh((len(ranks),), None, (ranks.index(torch.distributed.get_rank()),), [*ranks])
    return Chunk(shape, None, compact([{"kind": "FlatShard", "offset": begin}]), mesh.text, "fsdp", begin)
