"""Records parameters as their modules registered them, as FSDP1 flattened them, or as an optimizer holds them.

For a flat parameter of FSDP1, this module finds the elements of the original parameters that a rank has, and splits
values accordingly. Only the wrapper's metadata is read: nothing here issues a collective, reads a tensor's values, or
keeps a wrapper, a module or a parameter.

Under ZeRO and Megatron, each rank's optimizer holds only this rank's elements of parameters, often in a wider type.
DeepSpeed keeps them in one flat tensor, and notes at each parameter where its elements lie (0.19.8:
`utils/tensor_fragment.py`, `runtime/zero/stage3.py`). Megatron-Core's distributed optimizer has a tensor per parameter,
and its DDP has the ranges (0.20: `distributed/param_and_grad_buffer.py`, `optimizer/distrib_optimizer.py`). Only the
attributes with these tensors and ranges are read. Neither package is imported, and no parameter is gathered.
"""

from __future__ import annotations

import json
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from ...records import Chunk
from ...system.processes import is_instance
from ..local_values import chunk_of, compact, dtensor_chunk, localized_chunk, merged_notes, written_ranks
from ..parallel.groups import FSDP1, fsdp1_ranks
from ..parallel.marks import group_ranks, is_marked, ranks_of
from .module import HookedModule, StateTime

_NAME = "_flat_param"
"""FSDP1's name for a flat parameter."""


class ModuleParameter:
    """Records a parameter as its module has registered it: a plain tensor, or a DTensor."""

    __slots__ = ("_is_marked", "_module", "_name", "reference")

    def __init__(self, parameter: torch.Tensor, hooked: HookedModule, name: str) -> None:
        self.reference: Callable[[], torch.Tensor | None] = weakref.ref(parameter)
        self._is_marked = is_marked(parameter)
        self._module = hooked
        self._name = name

    @property
    def root_name(self) -> str:
        return self._module.root_name

    def gradient(self, parameter: torch.Tensor) -> torch.Tensor | None:
        return parameter.grad

    def record(
        self, site: str, suffix: str, tensor: torch.Tensor, at: StateTime, *, scope: str | None = None,
        note: str | None = None,
    ) -> None:  # fmt: skip
        if not self._module.keeps(site):  # most calls end here, because at most steps no rule keeps the site
            return
        chunk, name = self._chunk_of(tensor), self._name + suffix
        if self._is_marked:
            note = merged_notes(note, self._module.note_of_mark(self.reference(), tensor))
        self._module.record(site, name, tensor, at, scope=scope, chunk=chunk, note=note)

    def _chunk_of(self, tensor: torch.Tensor) -> Chunk | None:
        if getattr(tensor, "placements", None) is not None:
            return dtensor_chunk(tensor)
        parameter = self.reference()
        if parameter is None:
            return None
        chunk = localized_chunk(parameter, tensor)
        return self._module.marked_chunk(parameter, tensor) if chunk is None and self._is_marked else chunk


class OriginalSlice(NamedTuple):
    """An original parameter inside a flat parameter, and the range of its elements (slice) that this rank has."""

    hooked: HookedModule
    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    start: int
    """The index of the original parameter's first element in the unsharded flat parameter."""
    begin: int
    """The index, in the original parameter, of the first element in this rank's part of the flat parameter."""
    end: int
    """The index, in the original parameter, after this rank's last element. Equals `begin` if this rank has none."""
    chunk: Chunk | None
    """The chunk of this rank's slice. None if the slice is the complete parameter, or if no chunk describes it."""
    note: str | None
    local: Chunk | None = None
    """The tensor parallel chunk of the original parameter, if FSDP1 was given only this chunk. Otherwise None."""


class FlatMesh(NamedTuple):
    """The mesh of ranks over which a parameter is sharded; ranks are row-major."""

    shape: tuple[int, ...]
    dim_names: tuple[str, ...] | None
    coordinate: tuple[int, ...]
    ranks: list[int]

    @property
    def text(self) -> str:
        return compact(self._asdict() | {"ranks": written_ranks(self.ranks, self.shape)})

    def with_axes(self, more: Any) -> FlatMesh:
        """Return this mesh with the axes of a tensor parallel mesh appended, as one regular grid."""
        ranks = [int(rank) for rank in more.mesh.flatten().tolist()]
        return self.crossed(tuple(more.shape), tuple(more.get_coordinate()), ranks, more.mesh_dim_names or ())

    def crossed(
        self, shape: tuple[int, ...], coordinate: tuple[int, ...], ranks: Sequence[int], names: Sequence[str] = ()
    ) -> FlatMesh:
        """Return this mesh with another grid's axes appended. `coordinate` is this rank's position in that grid."""
        own_rank = ranks[sum(at * math.prod(shape[axis + 1 :]) for axis, at in enumerate(coordinate))]
        shapes, all_names = (*self.shape, *shape), (*(self.dim_names or ()), *names)
        return FlatMesh(
            shapes,
            all_names if len(all_names) == len(shapes) else None,
            (*self.coordinate, *coordinate),
            [rank + one - own_rank for rank in self.ranks for one in ranks],
        )


class FlatParameter:
    """Records one flat tensor that an optimizer updates in place of the parameters inside it.

    Values, gradient and optimizer state of the flat tensor become one row each for every original parameter.
    """

    uses_original = False
    """Whether the optimizer updates `originals` instead of the flat tensor."""

    def __init__(self, flat: torch.Tensor, num_local: int, *, start: int = 0, is_sharded: bool = True) -> None:
        """Prepare the rows of a flat tensor. This rank has `num_local` of its elements, from `start` on."""
        self.reference: Callable[[], torch.Tensor | None] = weakref.ref(flat)
        self.is_sharded = is_sharded
        self.slices: list[OriginalSlice] = []
        self.originals: list[OriginalParameter] = []
        self._num_local = num_local
        self._start = start
        self._unsharded: set[int] = set()
        self._module: HookedModule | None = None

    @property
    def root_name(self) -> str | None:
        return self.slices[0].hooked.root_name if self.slices else None

    def holds_slices(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor of the flat parameter has only this rank's elements."""
        return self.is_sharded and tensor.dim() == 1 and tensor.numel() == self._num_local

    def gradient(self, parameter: torch.Tensor) -> torch.Tensor | None:
        return parameter.grad

    def record(
        self, site: str, suffix: str, tensor: torch.Tensor, at: StateTime, *, scope: str | None = None,
        note: str | None = None,
    ) -> None:  # fmt: skip
        """Split and record a tensor of the flat parameter. A single number is recorded once per original parameter."""
        values = tensor.detach()
        is_slices, is_whole = self.holds_slices(values), values.dim() == 1 and values.numel() in self._unsharded
        if values.dim() and not is_slices and not is_whole:
            hooked = self._module or (self.slices[0].hooked if self.slices else None)
            if hooked is not None:  # only the optimizer knows how to split state of another shape
                hooked.record(site, _NAME + suffix, values, at, scope=scope, note=note)
            return
        if is_whole and self.is_sharded:
            scope = unsharded_scope(site, scope)
        for slice_ in self.slices:
            part = values
            if is_slices:
                start = slice_.start + slice_.begin - self._start if slice_.begin < slice_.end else 0
                part = values[start : start + slice_.end - slice_.begin]
            elif is_whole:
                part = values.as_strided(slice_.shape, slice_.stride, values.storage_offset() + slice_.start)
            chunk = slice_.chunk if is_slices else slice_.local if values.dim() else None
            note_ = merged_notes(note, slice_.note if is_slices else None)
            slice_.hooked.record(site, slice_.name + suffix, part, at, scope=scope, chunk=chunk, note=note_)


class FsdpParameter(FlatParameter):
    """Records one flat parameter of FSDP1. An optimizer updates the flat parameter if ``use_orig_params`` is False."""

    def __init__(self, wrapper: Any, module_of: Callable[[nn.Module], HookedModule | None]) -> None:
        """Read the metadata of a FullyShardedDataParallel wrapper that has flattened parameters.

        `module_of` returns the hooked module of a module, or None where the module is not under the root.
        """
        handle = wrapper._handle
        flat = handle.flat_param
        num_local, is_sharded = math.prod(flat._sharded_size), bool(handle.uses_sharded_strategy)
        super().__init__(flat, num_local, start=handle.rank * num_local if is_sharded else 0, is_sharded=is_sharded)
        self.uses_original = bool(handle._use_orig_params)
        self._unsharded = {math.prod(flat._unpadded_unsharded_size), num_local * handle.world_size}
        self._module = module_of(handle._fully_sharded_module)
        self.names = [
            (hooked, info.param_name)
            for info in (*flat._param_infos, *flat._shared_param_infos)
            if (hooked := module_of(info.module)) is not None
        ]
        """Each module of the root with the name of an original parameter in it. Tied names are included."""
        self.ties = [
            (hooked, info.param_name, first, info.prim_param_name)
            for info in flat._shared_param_infos
            if (hooked := module_of(info.module)) is not None and (first := module_of(info.prim_module)) is not None
        ]
        """Each tied name with its module, and the module and name under which the parameter is recorded."""
        originals = flat._params or [None] * len(flat._shapes)
        mesh, is_hybrid = _mesh(wrapper)
        for index, (start, info) in enumerate(zip(_starts(flat), flat._param_infos, strict=True)):
            hooked = module_of(info.module)
            if hooked is None:
                continue  # the root does not contain the parameter's module
            shape, numel = tuple(flat._shapes[index]), flat._numels[index]
            begin, end = (min(max(edge - start, 0), numel) for edge in (self._start, self._start + num_local))
            spec, reason = flat._param_extensions[index], None
            local = None if spec is None else _chunk_of_local(spec, shape)
            if self.is_sharded and not flat._contiguities[index]:
                reason = "memory_format"
            elif spec is not None and local is None:
                reason = "tensor_parallel"
            chunk = None
            if self.is_sharded and reason is None:
                placements = [{"kind": "FlatShard", "offset": begin}]
                if is_hybrid:
                    placements.insert(0, {"kind": "Replicate"})
                if local is None:
                    chunk = Chunk(shape, None, compact(placements), mesh.text, "fsdp", begin)
                else:
                    placements += json.loads(local.placements)
                    within = mesh.with_axes(spec.mesh).text
                    chunk = Chunk(
                        local.global_shape, local.offsets, compact(placements), within, "fsdp", begin, flat_shape=shape
                    )
            note = None if reason is None else compact({"no_layout": reason})
            strides = tuple(flat._strides[index])
            slice_ = OriginalSlice(hooked, info.param_name, shape, strides, start, begin, end, chunk, note, local)
            self.slices.append(slice_)
            if originals[index] is not None:
                self.originals.append(OriginalParameter(self, slice_, index, originals[index]))


class OriginalParameter:
    """Records an original parameter that an optimizer updates itself, because ``use_orig_params`` is True."""

    def __init__(self, flat: FsdpParameter, slice_: OriginalSlice, index: int, parameter: torch.Tensor) -> None:
        self.reference: Callable[[], torch.Tensor | None] = weakref.ref(parameter)
        self._flat = flat
        self._slice = slice_
        self._index = index

    @property
    def root_name(self) -> str:
        return self._slice.hooked.root_name

    def gradient(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Return the gradient. It is an empty tensor if only other ranks have elements of the parameter."""
        gradient, flat = parameter.grad, self._flat.reference()
        if gradient is not None or flat is None or flat.grad is None or self._slice.begin < self._slice.end:
            return gradient
        mask = flat._is_grad_none_mask  # type: ignore[attr-defined]
        is_none = mask is not None and mask[self._index]
        return None if is_none or not parameter.requires_grad else flat.grad.detach()[:0]

    def record(
        self, site: str, suffix: str, tensor: torch.Tensor, at: StateTime, *, scope: str | None = None,
        note: str | None = None,
    ) -> None:  # fmt: skip
        """Record this rank's slice of the parameter, of its gradient, or of its state."""
        slice_, flat = self._slice, self._flat.reference()
        is_slice = self._flat.is_sharded and tuple(tensor.shape) == (slice_.end - slice_.begin,)
        if site == "grad" and flat is not None and flat.grad is not None:
            is_slice = is_slice and self._flat.holds_slices(flat.grad)
        if not is_slice and self._flat.is_sharded and tensor.dim():
            scope = unsharded_scope(site, scope)
        chunk = slice_.chunk if is_slice else slice_.local if tensor.shape == slice_.shape else None
        note = merged_notes(note, slice_.note if is_slice else None)
        slice_.hooked.record(site, slice_.name + suffix, tensor, at, scope=scope, chunk=chunk, note=note)


ParameterRows = ModuleParameter | FlatParameter | OriginalParameter
"""The classes by which hooks on optimizers record a parameter. `record` appends a suffix to the parameter's name."""


def find_flat_parameters(
    wrappers: Iterable[nn.Module], module_of: Callable[[nn.Module], HookedModule | None]
) -> Iterator[FsdpParameter]:
    """Yield the flat parameters of the FSDP1 wrappers among the given modules."""
    for wrapper in _flattening(wrappers):
        yield FsdpParameter(wrapper, module_of)


def meshes_of_flat(wrappers: Iterable[nn.Module]) -> Iterator[Any]:
    """Yield the meshes of parameters that were DTensors until FSDP1 flattened them."""
    for wrapper in _flattening(wrappers):
        for spec in wrapper._handle.flat_param._param_extensions:
            if (mesh := getattr(spec, "mesh", None)) is not None:
                yield mesh


def _flattening(wrappers: Iterable[nn.Module]) -> Iterator[Any]:
    return (one for one in wrappers if is_instance(one, *FSDP1) and getattr(one, "_handle", None) is not None)


def unsharded_scope(site: str, scope: str | None) -> str | None:
    """Return an unsharded tensor's scope: ``local`` for a gradient (`no_sync`), ``unsharded`` for a parameter."""
    return {"grad": "local", "param": "unsharded"}.get(site, scope)


def _starts(flat: Any) -> Iterator[int]:
    """Yield the first index of each original parameter in the unsharded flat parameter. Padding may separate them."""
    start = 0
    for numel, is_padding in zip(flat._numels_with_padding, flat._is_padding_mask, strict=True):
        if not is_padding:
            yield start
        start += numel


def _chunk_of_local(spec: Any, shape: tuple[int, ...]) -> Chunk | None:
    """Return the chunk of a tensor parallel parameter's local values. Return None if they are not one box."""
    if not isinstance(getattr(spec, "placements", None), tuple):
        return None
    chunk = chunk_of(tuple(spec.shape), spec.mesh, spec.placements)
    return chunk if chunk.offsets is not None else None


def _mesh(wrapper: Any) -> tuple[FlatMesh, bool]:
    """Return the mesh of an FSDP1 wrapper, and whether shards are replicated across a second group."""
    across = getattr(wrapper, "_inter_node_pg", None)
    groups = [wrapper.process_group] if across is None else [across, wrapper.process_group]
    names = getattr(getattr(wrapper, "_device_mesh", None), "mesh_dim_names", None)
    shape, coordinate = tuple(group.size() for group in groups), tuple(group.rank() for group in groups)
    return FlatMesh(
        shape, tuple(names[: len(groups)]) if names else None, coordinate, fsdp1_ranks(wrapper)
    ), across is not None


_Parameters = Iterable[tuple[HookedModule, str, torch.Tensor]]


def find_zero_parameters(parameters: _Parameters) -> Iterator[FlatParameter]:
    """Yield the flat tensors of ZeRO 1 to 3 that have elements of the given parameters."""
    found: dict[int, FlatParameter] = {}
    elsewhere = []
    for hooked, name, parameter in parameters:
        place = _of_stage_3(parameter) if hasattr(parameter, "_z3_optimizer") else _of_stages_1_and_2(parameter)
        if place is None:
            continue
        flat, start, begin, numel, shape, group = place
        placements, mesh = _over({"kind": "FlatShard", "offset": begin}, [*ranks_of(group)])
        chunk = Chunk(shape, None, placements, mesh, "zero", begin)
        part = OriginalSlice(hooked, name, shape, (), start - begin, begin, begin + numel, chunk, None)
        if flat is None:
            elsewhere.append(part)
        else:
            found.setdefault(id(flat), FlatParameter(flat, flat.numel())).slices.append(part)
    yield from _with_empty([*found.values()], elsewhere)


_Place = tuple[torch.Tensor | None, int, int, int, tuple[int, ...], Any]
"""Where this rank's elements of a parameter lie: the flat tensor, the index in it, the index in the parameter, the
number of elements, the parameter's shape and its process group. The tensor is None if all elements lie on other ranks.
This rank's rows then have no elements."""


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


def _over(flat: dict[str, Any], ranks: Sequence[int], *axes: tuple[Sequence[int], dict[str, Any]]) -> tuple[str, str]:
    """Return, as JSON, placements and mesh of a parameter that is cut flat over `ranks`, with further mesh `axes`."""
    rank, more = torch.distributed.get_rank(), [axis for axis in axes if len(axis[0]) > 1]
    mesh = FlatMesh((len(ranks),), None, (ranks.index(rank),), [*ranks])
    for others, _ in more:
        mesh = mesh.crossed((len(others),), (others.index(rank),), others)
    return compact([flat, *(placement for _, placement in more)]), mesh.text


def _with_empty(found: Sequence[FlatParameter], elsewhere: Sequence[OriginalSlice]) -> Sequence[FlatParameter]:
    """Let the first flat tensor also record, without elements, the parameters that lie only on other ranks."""
    for first in found[:1]:
        first.slices += elsewhere
    return found


def find_megatron_parts(
    modules: Iterable[nn.Module], parameters: _Parameters, updated: Iterable[torch.Tensor]
) -> Iterator[FlatParameter]:
    """Yield the parts of parameters that Megatron's distributed optimizer updates on this rank.

    The part of a 16-bit parameter is its `main_param`. The part of any other parameter is a view into the parameter's
    memory, and is found among the tensors that optimizers have (`updated`).
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
    """Yield each parameter of Megatron's DDP, with the range of this rank's elements and two lists of ranks.

    The first list has the ranks among which the elements are divided. The second list has the ranks with the same
    elements, in other instances of the optimizer.
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
    """Return the chunk of a part of a parameter that tensor parallel may also cut, or a note why it is unknown."""
    shape, local = tuple(parameter.shape), hooked.marked_chunk(parameter, parameter)
    beside = _ranks_with_copies(parameter) if local is None else hooked.tensor_ranks()
    if len(beside) > 1 and is_marked(parameter) is (local is None):
        return None, compact({"no_layout": "marked"})
    cut = {"kind": "Replicate"} if local is None else json.loads(local.placements)[0]
    flat = {"kind": "FlatShard", "offset": begin}
    placements, mesh = _over(flat, ranks, (copies, {"kind": "Replicate"}), (beside, cut))
    if local is None:
        return Chunk(shape, None, placements, mesh, "marked", begin), None
    return Chunk(local.global_shape, local.offsets, placements, mesh, "marked", begin, flat_shape=shape), None


def _ranks_with_copies(parameter: torch.Tensor) -> Sequence[int]:
    """Return the ranks with copies of a parameter that is not cut. An expert's parameter has no copies."""
    return () if getattr(parameter, "allreduce", True) is False else group_ranks("TENSOR_MODEL_PARALLEL")
