"""Flat parameters of FSDP1: which elements of which original parameters a rank holds, and values split accordingly.

Reads the wrapper's metadata only: never issues a collective, never keeps a wrapper, a module or a parameter.
"""

from __future__ import annotations

import json
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from ..records import Chunk, Moment
from .parallel import FSDP1, fsdp1_ranks, loaded
from .places import chunk_of, compact, written_ranks
from .watch import Watch

_NAME = "_flat_param"
"""What FSDP1 calls it."""


class Piece(NamedTuple):
    """An original parameter within a flat one."""

    watch: Watch
    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    place: int
    """Its first element in the unsharded flat parameter."""
    begin: int
    """First and one past the last of its own elements in this rank's shard; equal where it has none there."""
    end: int
    chunk: Chunk | None
    """None where the rank holds all of it, or where a slice is no run of elements in C order."""
    note: str | None
    local: Chunk | None = None
    """Where all of it lies that FSDP1 was given, where that is a piece of a tensor parallel parameter."""


class _Mesh(NamedTuple):
    """The ranks over which a parameter is laid, row-major."""

    shape: tuple[int, ...]
    dim_names: tuple[str, ...] | None
    coordinate: tuple[int, ...]
    ranks: list[int]

    @property
    def text(self) -> str:
        """As the column ``mesh`` has it."""
        return compact(self._asdict() | {"ranks": written_ranks(self.ranks, self.shape)})

    def with_axes(self, more: Any) -> _Mesh:
        """The same with the axes of a tensor parallel mesh behind its own; they are taken to form a regular grid."""
        coordinate = more.get_coordinate()
        here = int(more.mesh[tuple(coordinate)])
        beside = [int(rank) - here for rank in more.mesh.flatten().tolist()]
        names = (*(self.dim_names or ()), *(more.mesh_dim_names or ()))
        shape = (*self.shape, *more.shape)
        return _Mesh(
            shape,
            names if len(names) == len(shape) else None,
            (*self.coordinate, *coordinate),
            [rank + step for rank in self.ranks for step in beside],
        )


class FlatParameter:
    """One flat parameter: what an optimizer updates where ``use_orig_params`` is False.

    Its tensors (values, gradient, optimizer state) become a row for each original parameter.
    """

    def __init__(self, wrapper: Any, watch_of: Callable[[nn.Module], Watch | None]) -> None:
        """Read the metadata of a wrapper that has a handle.

        Args:
            wrapper: the FullyShardedDataParallel module.
            watch_of: the watch of a module, or None where it is not under the root.
        """
        handle = wrapper._handle
        flat = handle.flat_param
        self.reference: Callable[[], torch.Tensor | None] = weakref.ref(flat)
        self.is_sharded = bool(handle.uses_sharded_strategy)
        self.uses_original = bool(handle._use_orig_params)
        self._num_sharded = math.prod(flat._sharded_size)
        self._shard_start = handle.rank * self._num_sharded if self.is_sharded else 0
        self._unsharded = {math.prod(flat._unpadded_unsharded_size), self._num_sharded * handle.world_size}
        self._watch = watch_of(handle._fully_sharded_module)
        self.names = [
            (watch, info.param_name)
            for info in (*flat._param_infos, *flat._shared_param_infos)
            if (watch := watch_of(info.module)) is not None
        ]
        """Every name under which a module of the root knows an original parameter, ties included."""
        self.ties = [
            (watch, info.param_name, first, info.prim_param_name)
            for info in flat._shared_param_infos
            if (watch := watch_of(info.module)) is not None and (first := watch_of(info.prim_module)) is not None
        ]
        """Those of ties: of each the module and its name there, and those under which it is recorded."""
        originals = flat._params or [None] * len(flat._shapes)
        mesh, is_hybrid = _mesh(wrapper)
        self.pieces: list[Piece] = []
        self.originals: list[Original] = []
        for index, (place, info) in enumerate(zip(_places(flat), flat._param_infos, strict=True)):
            watch = watch_of(info.module)
            if watch is None:
                continue  # of a module outside the root
            shape, numel = tuple(flat._shapes[index]), flat._numels[index]
            begin, end = (
                min(max(edge - place, 0), numel) for edge in (self._shard_start, self._shard_start + self._num_sharded)
            )
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
            piece = Piece(watch, info.param_name, shape, strides, place, begin, end, chunk, note, local)
            self.pieces.append(piece)
            if originals[index] is not None:
                self.originals.append(Original(self, piece, index, originals[index]))

    @property
    def root_name(self) -> str | None:
        return self.pieces[0].watch.root.name if self.pieces else None

    def holds_slices(self, tensor: torch.Tensor) -> bool:
        """Whether a flat tensor has this rank's shard alone."""
        return self.is_sharded and tensor.dim() == 1 and tensor.numel() == self._num_sharded

    def gradient(self, parameter: torch.Tensor) -> torch.Tensor | None:
        return parameter.grad

    def record(
        self,
        site: str,
        suffix: str,
        tensor: torch.Tensor,
        moment: Moment,
        phase: str,
        repeat: int,
        *,
        scope: str | None = None,
        note: str | None = None,
    ) -> None:
        """Record a tensor of the flat parameter's kind, split; one number stands for every original parameter."""
        values = tensor.detach()
        is_slices, is_whole = self.holds_slices(values), values.dim() == 1 and values.numel() in self._unsharded
        if values.dim() and not is_slices and not is_whole:
            watch = self._watch or (self.pieces[0].watch if self.pieces else None)
            if watch is not None:  # state of a shape of its own, which only the optimizer can tell apart
                watch.record(site, _NAME + suffix, values, moment, phase, repeat, scope=scope, note=note)
            return
        if is_whole and self.is_sharded:
            scope = unsharded_scope(site, scope)
        for piece in self.pieces:
            part = values
            if is_slices:
                start = piece.place + piece.begin - self._shard_start if piece.begin < piece.end else 0
                part = values[start : start + piece.end - piece.begin]
            elif is_whole:
                part = values.as_strided(piece.shape, piece.stride, values.storage_offset() + piece.place)
            chunk = piece.chunk if is_slices else piece.local if values.dim() else None
            note_ = merged(note, piece.note if is_slices else None)
            piece.watch.record(
                site, piece.name + suffix, part, moment, phase, repeat, scope=scope, chunk=chunk, note=note_
            )


class Original:
    """An original parameter that an optimizer updates slice by slice: ``use_orig_params`` is True."""

    def __init__(self, flat: FlatParameter, piece: Piece, index: int, parameter: torch.Tensor) -> None:
        self.reference: Callable[[], torch.Tensor | None] = weakref.ref(parameter)
        self._flat = flat
        self._piece = piece
        self._index = index

    @property
    def root_name(self) -> str:
        return self._piece.watch.root.name

    def gradient(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """The gradient; an empty slice of it where this rank has none of the parameter, but others do."""
        gradient, flat = parameter.grad, self._flat.reference()
        if gradient is not None or flat is None or flat.grad is None or self._piece.begin < self._piece.end:
            return gradient
        mask = flat._is_grad_none_mask  # type: ignore[attr-defined]
        is_none = mask is not None and mask[self._index]
        return None if is_none or not parameter.requires_grad else flat.grad.detach()[:0]

    def record(
        self,
        site: str,
        suffix: str,
        tensor: torch.Tensor,
        moment: Moment,
        phase: str,
        repeat: int,
        *,
        scope: str | None = None,
        note: str | None = None,
    ) -> None:
        """Record the parameter's slice, that of its gradient, or its state."""
        piece, flat = self._piece, self._flat.reference()
        is_slice = self._flat.is_sharded and tuple(tensor.shape) == (piece.end - piece.begin,)
        if site == "grad" and flat is not None and flat.grad is not None:
            is_slice = is_slice and self._flat.holds_slices(flat.grad)
        if not is_slice and self._flat.is_sharded and tensor.dim():
            scope = unsharded_scope(site, scope)
        piece.watch.record(
            site,
            piece.name + suffix,
            tensor,
            moment,
            phase,
            repeat,
            scope=scope,
            chunk=piece.chunk if is_slice else piece.local if tensor.shape == piece.shape else None,
            note=merged(note, piece.note if is_slice else None),
        )


def find_flat_parameters(
    wrappers: Sequence[nn.Module], watch_of: Callable[[nn.Module], Watch | None]
) -> Iterator[FlatParameter]:
    """The flat parameters of FSDP1 wrappers among some modules."""
    kind = loaded(*FSDP1)
    for module in wrappers:
        if kind is not None and isinstance(module, kind) and getattr(module, "_handle", None) is not None:
            yield FlatParameter(module, watch_of)


def meshes_of_flat(wrappers: Iterable[nn.Module]) -> Iterator[Any]:
    """The meshes of parameters that were DTensors until FSDP1 flattened them."""
    kind = loaded(*FSDP1)
    for module in wrappers if kind is not None else ():
        if isinstance(module, kind) and getattr(module, "_handle", None) is not None:
            for spec in module._handle.flat_param._param_extensions:
                if (mesh := getattr(spec, "mesh", None)) is not None:
                    yield mesh


def unsharded_scope(site: str, scope: str | None) -> str | None:
    """Under `no_sync` the gradients of a step are whole and this rank's own; parameters are whole when gathered."""
    return {"grad": "local", "param": "unsharded"}.get(site, scope)


def merged(note: str | None, more: str | None) -> str | None:
    """Two JSON objects as one."""
    if note is None or more is None:
        return note or more
    return f"{note[:-1]},{more[1:]}"


def _places(flat: Any) -> Iterator[int]:
    """Where each original parameter begins in the unsharded flat parameter; between them there may be padding."""
    place = 0
    for numel, is_padding in zip(flat._numels_with_padding, flat._is_padding_mask, strict=True):
        if not is_padding:
            yield place
        place += numel


def _chunk_of_local(spec: Any, shape: tuple[int, ...]) -> Chunk | None:
    """The place of a tensor parallel parameter's local values; None where they are no single box."""
    if not isinstance(getattr(spec, "placements", None), tuple):
        return None
    chunk = chunk_of(tuple(spec.shape), spec.mesh, spec.placements)
    return chunk if chunk.offsets is not None else None


def _mesh(wrapper: Any) -> tuple[_Mesh, bool]:
    """FSDP1's mesh, and whether shards are replicated across a second group."""
    across = getattr(wrapper, "_inter_node_pg", None)
    groups = [wrapper.process_group] if across is None else [across, wrapper.process_group]
    names = getattr(getattr(wrapper, "_device_mesh", None), "mesh_dim_names", None)
    shape, coordinate = tuple(group.size() for group in groups), tuple(group.rank() for group in groups)
    return _Mesh(
        shape, tuple(names[: len(groups)]) if names else None, coordinate, fsdp1_ranks(wrapper)
    ), across is not None
