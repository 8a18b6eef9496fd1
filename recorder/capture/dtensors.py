"""Finds where the local values of a DTensor lie in the global tensor, and writes the position as JSON for the columns.

Nothing here reads a value, issues a collective, or keeps a mesh alive, because a mesh knows its process groups.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..records import Chunk
from ..system.processes import loaded

_MAX_LISTED = 16
"""The most ranks of a mesh that a row lists one by one: a thousand ranks would be larger than the rest of the row."""
_MAX_KNOWN = 4096
_known: dict[tuple[Any, ...], tuple[weakref.ref[Any], Chunk]] = {}
"""The chunks that were computed before (40 us each), by mesh, shape and placements; void once a mesh is deleted."""


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a DTensor. If the program never imported the class, no tensor is."""
    dtensor = loaded("torch.distributed.tensor", "DTensor")
    return dtensor is not None and isinstance(tensor, dtensor)


def dtensor_chunk(tensor: Any) -> Chunk:
    """Return the chunk of a DTensor's local values."""
    return chunk_of(tuple(tensor.shape), tensor.device_mesh, tensor.placements)


def localized_chunk(parameter: torch.Tensor, tensor: torch.Tensor) -> Chunk | None:
    """Return the chunk of a parameter, its gradient or state if DDP took the parameter out of a DTensor; else None."""
    spec = localized_spec(parameter)
    if spec is None or tensor.shape != parameter.shape:
        return None
    return chunk_of(tuple(spec.shape), spec.mesh, spec.placements)


def localized_spec(parameter: torch.Tensor) -> Any:
    """Return the spec of a parameter that was a DTensor until DDP wrapped the model; None for any other parameter."""
    return getattr(parameter, "_st_info", None)


def spec_of(parameter: torch.Tensor) -> Any:
    """Return mesh, placements and global shape of a parameter; None where the parameter never was a DTensor."""
    dtensor = loaded("torch.distributed.tensor", "DTensor")
    if dtensor is not None and isinstance(parameter, dtensor):
        return parameter._spec
    return localized_spec(parameter)


def mesh_of(parameter: torch.Tensor) -> Any:
    """Return the mesh of a parameter; None where the parameter never was a DTensor."""
    return getattr(spec_of(parameter), "mesh", None)


def chunk_of(shape: tuple[int, ...], mesh: Any, placements: Sequence[Any]) -> Chunk:
    """Return this rank's chunk of a tensor with the global ``shape``."""
    if any(
        type(p).__name__ == "_MaskPartial" for p in placements
    ):  # every call of an embedding has a new placement object, with a mask
        return _chunk(shape, mesh, placements)
    key = (id(mesh), shape, tuple(placements))
    cached = _known.get(key)
    if cached is not None and cached[0]() is mesh:
        return cached[1]
    if len(_known) >= _MAX_KNOWN:
        _known.clear()
    chunk = _chunk(shape, mesh, placements)
    _known[key] = weakref.ref(mesh), chunk
    return chunk


def _chunk(shape: tuple[int, ...], mesh: Any, placements: Sequence[Any]) -> Chunk:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    offsets: tuple[int, ...] | None = None
    if all(type(p) in (Shard, Replicate) for p in placements):
        offsets = tuple(compute_local_shape_and_global_offset(torch.Size(shape), mesh, placements)[1])
    return Chunk(
        global_shape=shape,
        offsets=offsets,
        placements=compact([_placement(p, mesh.size(axis)) for axis, p in enumerate(placements)]),
        mesh=compact(
            {
                "shape": list(mesh.shape),
                "dim_names": list(mesh.mesh_dim_names) if mesh.mesh_dim_names else None,
                "coordinate": mesh.get_coordinate(),
                "ranks": written_ranks(mesh.mesh.flatten().tolist(), tuple(mesh.shape)),
            }
        ),
        layout_source="dtensor",
    )


def written_ranks(ranks: list[int], shape: tuple[int, ...]) -> list[int] | dict[str, Any]:
    """Return the ranks of a mesh for the column ``mesh``: a list, or first rank and strides if many and regular."""
    if len(ranks) <= _MAX_LISTED:
        return ranks
    grid = np.array(ranks).reshape(shape)
    ends = [grid.take(min(1, size - 1), axis).flat[0] for axis, size in enumerate(shape)]
    strides = [int(end) - ranks[0] for end in ends]
    regular = ranks[0] + sum(i * stride for i, stride in zip(np.indices(shape), strides, strict=True))
    is_regular = min(strides) >= 0 and np.array_equal(grid, regular)
    return {"first": ranks[0], "strides": strides} if is_regular else ranks


def _placement(placement: Any, num_ranks: int) -> dict[str, Any]:
    kind = type(placement).__name__.lstrip("_")
    if kind == "MaskPartial" and (placement.mask_buffer.data is not None or num_ranks == 1):
        # `without_masked` applies the mask; a mesh of one rank has all rows and needs no mask.
        kind = "Partial"
    details = {key: getattr(placement, key) for key in ("dim", "split_factor", "reduce_op") if hasattr(placement, key)}
    return {"kind": kind, **details}


def without_masked(tensor: Any, local: torch.Tensor) -> torch.Tensor | None:
    """Return an embedding's local output with zeros for the rows of other ranks; None if no mask can be applied.

    Training applies the mask itself, later and in place.
    """
    masks = [p.mask_buffer for p in getattr(tensor, "placements", ()) if type(p).__name__ == "_MaskPartial"]
    masks = [mask for mask in masks if mask.data is not None]
    # A kernel that is launched while a graph is captured joins the graph.
    if not masks or (local.is_cuda and torch.cuda.is_current_stream_capturing()):
        return None
    with torch.no_grad():
        copied = local.detach().clone()
        for mask in masks:
            mask.apply_mask(copied)
    return copied


def compact(value: object) -> str:
    """Return a value as compact JSON text for a column."""
    return json.dumps(value, separators=(",", ":"), default=str)


def merged_notes(note: str | None, more: str | None) -> str | None:
    """Merge the texts of two JSON objects."""
    if note is None or more is None:
        return note or more
    return f"{note[:-1]},{more[1:]}"
