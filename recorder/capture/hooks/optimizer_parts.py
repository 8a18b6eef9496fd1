"""The parts of a model's parameters that an optimizer updates in their place: those of ZeRO and of Megatron.

Each rank's optimizer has this rank's elements of many parameters, often of a wider type. DeepSpeed keeps them in one
flat tensor and leaves at each parameter where its elements lie (0.19.8: `utils/tensor_fragment.py`,
`runtime/zero/stage3.py`). Megatron-Core's distributed optimizer has one part a parameter, and its DDP has the places
(0.20: `distributed/param_and_grad_buffer.py`, `optimizer/distrib_optimizer.py`). Only these attributes are read.
Neither package is imported, and no parameter is gathered.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ...records import Chunk
from ..local_values import compact
from ..marks import group_ranks, is_marked, ranks_of
from .module import HookedModule
from .parameter_rows import FlatMesh, FlatParameter, OriginalSlice

_Parameters = Iterable[tuple[HookedModule, str, torch.Tensor]]


def find_zero_parameters(parameters: _Parameters) -> Iterator[FlatParameter]:
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
    yield from _with_empty([*found.values()], elsewhere)


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
    placements, mesh = _over({"kind": "FlatShard", "offset": begin}, ranks)
    return Chunk(shape, None, placements, mesh, "fsdp", begin)


def _over(flat: dict[str, Any], ranks: Sequence[int], *axes: tuple[Sequence[int], dict[str, Any]]) -> tuple[str, str]:
    """Return the placements and the mesh of a part of the ranks' parameters, with further axes that this rank has."""
    rank, more = torch.distributed.get_rank(), [axis for axis in axes if len(axis[0]) > 1]
    mesh = FlatMesh((len(ranks),), None, (ranks.index(rank),), [*ranks])
    for others, _ in more:
        mesh = mesh.crossed((len(others),), (others.index(rank),), others)
    return compact([flat, *(placement for _, placement in more)]), mesh.text


def _with_empty(found: Sequence[FlatParameter], elsewhere: Sequence[OriginalSlice]) -> Sequence[FlatParameter]:
    """Let the first flat tensor record the parameters of which all elements are on other ranks, too."""
    for first in found[:1]:
        first.slices += elsewhere
    return found


def find_megatron_parts(
    modules: Iterable[nn.Module], parameters: _Parameters, updated: Iterable[torch.Tensor]
) -> Iterator[FlatParameter]:
    """Yield the parts of parameters that Megatron's distributed optimizer updates on this rank.

    The part of a 16-bit parameter is its `main_param`. Any other is a view into the parameter's memory, and one of the
    tensors that an optimizer has (`updated`).
    """
    places = {id(parameter): place for module in modules for parameter, place in _places_in(module)}
    views = {(one.data_ptr(), one.shape): one for one in updated} if places else {}
    found, elsewhere = list[FlatParameter](), list[OriginalSlice]()
    for hooked, name, parameter in parameters if places else ():
        if (place := places.get(id(parameter))) is None:
            continue
        begin, end, *groups = place
        shape, (chunk, note) = tuple(parameter.shape), _part_of_marked(hooked, parameter, begin, *groups)
        part = OriginalSlice(hooked, name, shape, (), -begin, begin, end, chunk, note)
        address = parameter.data_ptr() + begin * parameter.element_size()
        flat = getattr(parameter, "main_param", None) if getattr(parameter, "main_param_sharded", False) else None
        flat = views.get((address, torch.Size((end - begin,)))) if flat is None else flat
        if begin == end:
            elsewhere.append(part)
        elif flat is not None:
            found.append(FlatParameter(flat, flat.numel()))
            found[-1].slices.append(part)
    yield from _with_empty(found, elsewhere)


def _places_in(
    module: nn.Module,
) -> Iterator[tuple[torch.Tensor, tuple[int, int, Sequence[int], Sequence[int]]]]:
    """Yield each parameter of Megatron's DDP with the range of this rank's elements.

    Behind the range stand the ranks with the other elements, and those with the same ones, in other instances of the
    optimizer.
    """
    own: dict[str, Any] = vars(module)
    if getattr(own.get("ddp_config"), "use_distributed_optimizer", False) is not True:
        return
    copies = ranks_of(own.get("inter_dist_opt_group"))
    for buffer in (*own["buffers"], *own.get("expert_parallel_buffers", ())):
        ranks = ranks_of(buffer.data_parallel_group)
        for parameter, (start, end, number) in buffer.param_index_map.items():
            bucket = buffer.buckets[number]
            size = bucket.grad_data.numel() // len(ranks)
            first = bucket.offset + size * ranks.index(torch.distributed.get_rank())
            begin, stop = (min(max(edge, start), end) - start for edge in (first, first + size))
            yield parameter, (begin, stop, ranks, copies)


def _part_of_marked(
    hooked: HookedModule, parameter: torch.Tensor, begin: int, ranks: Sequence[int], copies: Sequence[int]
) -> tuple[Chunk | None, str | None]:
    """Return the chunk of a part of a parameter that may be cut by tensor parallel, too; a note if nothing names it."""
    shape, local = tuple(parameter.shape), hooked.marked_chunk(parameter, parameter)
    beside = _ranks_with_copies(parameter) if local is None else hooked.tensor_ranks()
    if len(beside) > 1 and is_marked(parameter) is (local is None):
        return None, compact({"no_layout": "marked"})
    cut = {"kind": "Replicate"} if local is None else json.loads(local.placements)[0]
    flat = {"kind": "FlatShard", "offset": begin}
    placements, mesh = _over(flat, ranks, (copies, {"kind": "Replicate"}), (beside, cut))
    if local is None:
        return Chunk(shape, None, placements, mesh, "fsdp", begin), None
    return Chunk(local.global_shape, local.offsets, placements, mesh, "fsdp", begin, flat_shape=shape), None


def _ranks_with_copies(parameter: torch.Tensor) -> Sequence[int]:
    """Return the ranks with copies of a parameter that is not cut; none of an expert's, which they do not have."""
    return () if getattr(parameter, "allreduce", True) is False else group_ranks("TENSOR_MODEL_PARALLEL")
