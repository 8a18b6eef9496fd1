"""Unwraps a tensor to plain local values. A composite tensor is unwrapped to the tensors inside it, by name.

For a DTensor, the position of the local values in the global tensor is found, too, and written as JSON for the columns.
Only metadata and attributes are read: no copy, no collective, no device sync, and no call of a user's
``__torch_function__``. The only wait is for the pending result of a collective. No mesh is kept alive, because a mesh
holds process groups. A tensor that cannot be recorded raises `UnsupportedKind` with the drop reason.
"""

from __future__ import annotations

import json
import operator
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

import numpy as np
import torch
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..numerics.dtypes import ITEM_BYTES
from ..records import Chunk
from ..system.processes import loaded

_MAX_LISTED = 16
"""The most ranks of a mesh that a row lists one by one. A thousand ranks would be larger than the rest of the row."""
_MAX_KNOWN = 4096
_known: dict[tuple[Any, ...], tuple[weakref.ref[Any], Chunk]] = {}
"""Cached chunks (40 us each), by mesh id, shape and placements. An entry is void once its mesh is deleted."""


def is_dtensor(tensor: torch.Tensor) -> TypeGuard[Any]:
    """Whether a tensor is a DTensor; False if the program never imported the class."""
    dtensor = loaded("torch.distributed.tensor", "DTensor")
    return dtensor is not None and isinstance(tensor, dtensor)


def dtensor_chunk(tensor: Any) -> Chunk:
    """Return the chunk of a DTensor's local values."""
    return chunk_of(tuple(tensor.shape), tensor.device_mesh, tensor.placements)


def localized_chunk(parameter: torch.Tensor, tensor: torch.Tensor) -> Chunk | None:
    """Return the chunk of a parameter that DDP made local, of its gradient or state. Return None for others."""
    spec = localized_spec(parameter)
    if spec is None or tensor.shape != parameter.shape:
        return None
    return chunk_of(tuple(spec.shape), spec.mesh, spec.placements)


def localized_spec(parameter: torch.Tensor) -> Any:
    """Return the spec that a DTensor parameter had until DDP wrapped the model. Return None for other parameters."""
    return getattr(parameter, "_st_info", None)


def spec_of(parameter: torch.Tensor) -> Any:
    """Return mesh, placements and global shape of a parameter. Return None if the parameter never was a DTensor."""
    return parameter._spec if is_dtensor(parameter) else localized_spec(parameter)


def mesh_of(parameter: torch.Tensor) -> Any:
    """Return the mesh of a parameter. Return None if the parameter never was a DTensor."""
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
    """Return a mesh's ranks for the column ``mesh``: a list, or the first rank and strides of a large regular grid."""
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
        # `without_masked` applies the mask. A mesh of one rank has all rows of the embedding and needs no mask.
        kind = "Partial"
    details = {key: getattr(placement, key) for key in ("dim", "split_factor", "reduce_op") if hasattr(placement, key)}
    return {"kind": kind, **details}


def without_masked(tensor: Any, local: torch.Tensor) -> torch.Tensor | None:
    """Return a sharded embedding's local output, masked to this rank's tokens. Return None if no mask can be applied.

    Training applies the mask later and in place, so the mask is applied to a copy here.
    """
    masks = [p.mask_buffer for p in getattr(tensor, "placements", ()) if type(p).__name__ == "_MaskPartial"]
    masks = [mask for mask in masks if mask.data is not None]
    # A kernel that is launched while a CUDA graph is captured would become part of the graph.
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
    """Return one JSON text with the members of two JSON objects, each given as text or None."""
    if note is None or more is None:
        return note or more
    return f"{note[:-1]},{more[1:]}"


PLAIN = frozenset((torch.Tensor, torch.nn.Parameter, torch.nn.Buffer))
"""The types of tensors whose values lie in the tensor's own memory, if dtype and layout permit."""

DTYPES: dict[torch.dtype, str] = {
    dtype: name
    for name in ITEM_BYTES
    if isinstance(dtype := getattr(torch, name, None), torch.dtype) and dtype.itemsize == ITEM_BYTES[name]
}
"""Maps each dtype that the format knows to the dtype's name in the format."""


_is_functorch_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
_dispatch_keys = torch._C._dispatch_keys
is_like_subclass = torch._C._dispatch_isTensorSubclassLike
"""True for functorch's, functional, sparse, jagged and meta tensors, and for subclasses with their own dispatch."""
_layout, _is_nested = operator.attrgetter("layout"), operator.attrgetter("is_nested")
_ordinary: set[int] = set()
"""The dispatch keys, as integers, of the kinds of host tensors that `plain` need not examine again. An examination may
let the writer thread take the interpreter's lock, which costs both threads more than the rest of a hook."""


class UnsupportedKind(Exception):
    """Raised for a tensor that cannot be recorded. The text of the error is the drop reason."""


def is_ordinary(tensor: torch.Tensor) -> bool:
    """Whether `plain` has examined a host tensor of this kind and found it strided and without lazy bits."""
    return _dispatch_keys(tensor).raw_repr() in _ordinary


def are_plain(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether all tensors have a type of `PLAIN`. There may be thousands, so no Python code runs for each."""
    return PLAIN.issuperset(map(type, tensors))


def are_ordinary(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether `is_ordinary` is true of all tensors."""
    return all(map(is_ordinary, tensors))


def lie_strided(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether plain tensors of known dtypes have memory with strides. Their elements may have lazy signs.

    This takes a fifth of the time of `is_ordinary`, and keeps the interpreter's lock.
    """
    return not (
        any(map(is_like_subclass, tensors))
        or set(map(_layout, tensors)) != {torch.strided}
        or any(map(_is_nested, tensors))
    )


def local_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a parameter's local values. Return 0 if only unwrapping the parameter would tell."""
    local = getattr(tensor, "_local_tensor", tensor)
    return 0 if is_lazy(local) or type(local) not in PLAIN else local.numel() * local.itemsize


def plain(tensor: torch.Tensor, chunk: Chunk | None = None) -> tuple[torch.Tensor, Chunk | None]:
    """Return the local values of a tensor as an ordinary strided tensor, and their chunk, if there is one.

    A ``chunk`` that the caller passes is returned unchanged.

    Raises:
        UnsupportedKind: the tensor is not plain. Where it is composite, `inner_tensors` finds the tensors inside it.
    """
    if type(tensor) not in PLAIN:
        tensor, chunk = _unwrap(tensor, chunk)
    if tensor.dtype not in DTYPES:
        raise UnsupportedKind(f"unsupported_type:{str(tensor.dtype).removeprefix('torch.')}")
    is_usual = tensor.is_cpu and is_ordinary(tensor)
    if not is_usual:
        _refuse_kinds(tensor)
        if tensor._is_zerotensor():  # autograd creates tensors without memory for gradients that are zero
            return torch.zeros((), dtype=tensor.dtype, device="cpu").expand(tensor.shape), chunk
    if is_usual and not tensor.storage_offset() and tensor.data_ptr():
        return tensor, chunk  # asking its storage would make an object that lives as long as the storage
    # FSDP frees storages; reading a freed storage on a GPU would break the CUDA context of the process.
    if (tensor.is_cpu or tensor.is_cuda) and not tensor.untyped_storage().nbytes() and tensor.numel():
        raise UnsupportedKind("storage_freed")
    return tensor if is_usual or not tensor.is_cpu else _as_it_lies(tensor), chunk


def _refuse_kinds(tensor: torch.Tensor) -> None:
    if tensor.layout is not torch.strided:
        raise UnsupportedKind(f"unsupported_type:{str(tensor.layout).removeprefix('torch.').lstrip('_')}")
    if tensor.is_meta:
        raise UnsupportedKind("unsupported_type:meta")
    if tensor.is_quantized or tensor.is_nested:
        raise UnsupportedKind("unsupported_type:" + ("quantized" if tensor.is_quantized else "nested"))
    if _is_functorch_wrapped(tensor):
        raise UnsupportedKind("unsupported_type:functorch")
    if torch._is_functional_tensor(tensor):
        raise UnsupportedKind("unsupported_type:functional")


def _as_it_lies(tensor: torch.Tensor) -> torch.Tensor:
    """Return a host tensor with lazy negative and conjugate bits resolved. Kinds without such bits are remembered."""
    if tensor.is_neg() or tensor.is_conj():
        with torch.no_grad(), torch._C._DisableTorchDispatch():
            return tensor.detach().resolve_conj().resolve_neg()
    keys = _dispatch_keys(tensor)
    if not keys.has(torch._C.DispatchKey.Functionalize):  # as functorch's wrappers and others have
        _ordinary.add(keys.raw_repr())
    return tensor


def _unwrap(tensor: torch.Tensor, chunk: Chunk | None) -> tuple[torch.Tensor, Chunk | None]:
    dtensor_module = sys.modules.get("torch.distributed.tensor")
    if dtensor_module is not None and isinstance(tensor, dtensor_module.DTensor):
        local = arrived(tensor._local_tensor)
        if type(local) not in PLAIN:
            raise UnsupportedKind(f"unsupported_type:DTensor of {type(local).__name__}")
        return local, chunk or dtensor_chunk(tensor)
    if type(local := arrived(tensor)) in PLAIN:
        return local, chunk
    if is_lazy(tensor):
        raise UnsupportedKind("unsupported_type:uninitialized")
    if hasattr(tensor, "__torch_dispatch__") and type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__:
        with torch._C.DisableTorchFunctionSubclass():  # the subclass only adds Python methods
            return tensor.as_subclass(torch.Tensor), chunk
    raise UnsupportedKind(f"unsupported_type:{type(tensor).__name__}")


def arrived(tensor: torch.Tensor) -> torch.Tensor:
    """Wait for a collective's result, as the next use would, and return the result. Return other tensors unchanged."""
    if type(tensor).__name__ != "AsyncCollectiveTensor":
        return tensor
    with torch.no_grad():
        return tensor.trigger_wait()  # type: ignore[attr-defined,no-any-return]


def requires_gradient(tensor: torch.Tensor) -> bool:
    """Whether a gradient can arrive at a tensor. A subclass's ``__torch_function__`` is not called.

    No gradient can arrive at a lazy parameter before it is initialised.
    """
    if type(tensor) is torch.Tensor:
        return tensor.requires_grad
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.requires_grad and not is_lazy(tensor)


_Inner = Mapping[str, torch.Tensor]


class Inner(NamedTuple):
    """One tensor inside a composite tensor."""

    name: str
    """The composite tensor's name and the path inside it, if the inner tensor is not the complete value."""
    tensor: torch.Tensor
    """The inner tensor, of any kind. It is recorded only if it is plain."""
    chunk: Chunk | None
    note: str
    """JSON text that describes the composite tensor, for the note of the row."""


def inner_tensors(name: str, tensor: torch.Tensor, chunk: Chunk | None) -> list[Inner]:
    """Return every tensor inside a composite tensor, at any depth. Return an empty list for other tensors.

    If a DTensor wraps a composite tensor, only inner tensors of the local tensor's shape get the DTensor's chunk. Other
    inner tensors get a note that says so. `name` is the name of the given tensor, which is neither plain nor a DTensor
    around a plain tensor. An error that a subclass's own ``__tensor_flatten__`` raises is passed on.
    """
    with torch.no_grad(), torch._C.DisableTorchFunction():
        if is_dtensor(tensor):
            chunk = chunk or dtensor_chunk(tensor)
            tensor = arrived(tensor._local_tensor)
        inside = _inside(tensor)
        if not inside:
            return []
        whole = {
            "kind": _kind(tensor),
            "dtype": str(tensor.dtype).removeprefix("torch."),
            # Sizes of a jagged tensor may be symbolic instead of integers.
            "shape": [size if isinstance(size, int) else None for size in tensor.shape],
        }
        return list(_flat(tensor.shape, inside, name, chunk, {"inner_of": whole}))


def _flat(
    shape: torch.Size, inside: _Inner, prefix: str, chunk: Chunk | None, note: dict[str, object]
) -> Iterator[Inner]:
    for name, tensor in inside.items():
        path = f"{prefix}.{name}" if prefix and name else prefix or name
        has_position = chunk is None or (chunk.offsets is not None and tensor.shape == shape)
        its_note = note if has_position else {**note, "no_layout": "inner_tensor"}
        its_chunk = chunk if has_position else None
        deeper = _inside(tensor)
        if deeper:
            yield from _flat(tensor.shape, deeper, path, its_chunk, its_note)
        else:
            yield Inner(path, tensor, its_chunk, compact(its_note))


def _kind(tensor: torch.Tensor) -> str:
    if type(tensor) not in PLAIN:
        return type(tensor).__name__
    return str(tensor.dtype if tensor.is_quantized else tensor.layout).removeprefix("torch.")


def _inside(tensor: torch.Tensor) -> _Inner:
    """Return the tensors directly inside a composite tensor, by name. Return an empty dict for other tensors."""
    if type(tensor) in PLAIN:
        if tensor.is_meta or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            return {}
        with torch._C._DisableTorchDispatch():
            if tensor.is_quantized:
                return _quantized(tensor)
            return {name.lstrip("_"): getattr(tensor, name)() for name in _SPARSE.get(tensor.layout, ())}
    if (value := arrived(tensor)) is not tensor:
        return {"": value}
    known = _KNOWN.get((type(tensor).__module__, type(tensor).__name__))
    if known is None and is_traceable_wrapper_subclass(tensor):
        known = {name: name for name in tensor.__tensor_flatten__()[0]}
    values = {name: getattr(tensor, attribute, None) for name, attribute in (known or {}).items()}
    return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}


def _quantized(tensor: torch.Tensor) -> _Inner:
    """Return the integers of a quantized tensor, and the scales and zero points that turn them into values.

    The result is empty for a dtype that packs several integers into one byte.
    """
    stored = _STORED.get(tensor.dtype)
    if stored is None:
        return {}
    numbers = torch.empty(0, dtype=stored, device=tensor.device)
    numbers.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
    if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return {
            "int_repr": numbers,
            "scale": torch.tensor(tensor.q_scale(), dtype=torch.float64, device="cpu"),
            "zero_point": torch.tensor(tensor.q_zero_point(), dtype=torch.int64, device="cpu"),
        }
    return {
        "int_repr": numbers,
        "scale": tensor.q_per_channel_scales(),
        "zero_point": tensor.q_per_channel_zero_points(),
        "axis": torch.tensor(tensor.q_per_channel_axis(), dtype=torch.int64, device="cpu"),
    }


_CSR, _CSC = ("crow_indices", "col_indices", "values"), ("ccol_indices", "row_indices", "values")
_SPARSE: dict[torch.layout, tuple[str, ...]] = {
    # The private methods also work for an uncoalesced tensor, such as an embedding's gradient. The public methods
    # refuse it.
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: _CSR,
    torch.sparse_bsr: _CSR,
    torch.sparse_csc: _CSC,
    torch.sparse_bsc: _CSC,
}
"""For each sparse layout, the methods of a tensor that return the inner tensors without a copy."""

_STORED = {torch.qint8: torch.int8, torch.quint8: torch.uint8, torch.qint32: torch.int32}

_KNOWN: dict[tuple[str, str], Mapping[str, str]] = {
    # This class is a weight in full precision that is marked to be cast later. Its own `__tensor_flatten__` uses a
    # tensor as a bool, which would wait for the device.
    ("torchao.float8.fsdp_utils", "WeightWithDynamicFloat8CastTensor"): {
        "": "_tensor",
        "_precomputed_scale": "_precomputed_scale",
    },
    # The other inner tensors of a NestedTensor have no elements. Their shapes are cached lengths.
    ("torch.nested._internal.nested_tensor", "NestedTensor"): {
        "_values": "_values",
        "_offsets": "_offsets",
        "_lengths": "_lengths",
    },
    ("torch.masked.maskedtensor.core", "MaskedTensor"): {
        "_masked_data": "_masked_data",
        "_masked_mask": "_masked_mask",
    },
}
"""For each class whose own `__tensor_flatten__` is unsuitable, the name and the attribute of each inner tensor."""
