"""Unwraps a tensor to its plain local values, or to the tensors inside a composite tensor, each under its own name.

It reads metadata and attributes only: no copy, no collective, no device sync, and no call of a user's
``__torch_function__``. It only waits for the pending result of a collective. A kind that cannot be recorded raises
`UnsupportedKind` with a reason for the ledger.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..numerics.dtypes import ITEM_BYTES
from ..records import Chunk
from ..system.processes import loaded
from .dtensors import compact, dtensor_chunk

PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
"""The types of tensors whose values lie in the tensor's own memory, if dtype and layout permit."""

DTYPES: dict[torch.dtype, str] = {
    dtype: name
    for name in ITEM_BYTES
    if isinstance(dtype := getattr(torch, name, None), torch.dtype) and dtype.itemsize == ITEM_BYTES[name]
}
"""The names of the dtypes that the format knows."""


_is_functorch_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
_dispatch_keys = torch._C._dispatch_keys
_ordinary: set[int] = set()
"""The dispatch keys, as integers, of host tensors that need no more examination. An examination may let the writer
thread take the interpreter's lock, which costs both threads more than the rest of a hook.
"""


class UnsupportedKind(Exception):
    """Raised for a tensor of a kind that cannot be recorded; the text of the error is the drop reason."""


def is_ordinary(tensor: torch.Tensor) -> bool:
    """Whether `plain` has examined a host tensor of this kind, and found a strided one without lazy bits."""
    return _dispatch_keys(tensor).raw_repr() in _ordinary


def local_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a parameter's local values; 0 where only unwrapping the parameter would tell."""
    local = getattr(tensor, "_local_tensor", tensor)
    return 0 if is_lazy(local) or type(local) not in PLAIN else local.numel() * local.itemsize


def plain(tensor: torch.Tensor, chunk: Chunk | None = None) -> tuple[torch.Tensor, Chunk | None]:
    """Return the local values of a tensor as an ordinary strided tensor, and their chunk where there is one.

    A ``chunk`` that the caller knows already is kept.

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
        if tensor._is_zerotensor():  # autograd hands out such tensors: zeros without memory
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


def _as_it_lies(tensor: torch.Tensor) -> torch.Tensor:
    """Return a host tensor without lazy negative and conjugate bits; remember kinds that have no such bits."""
    if tensor.is_neg() or tensor.is_conj():
        with torch.no_grad(), torch._C._DisableTorchDispatch():
            return tensor.detach().resolve_conj().resolve_neg()
    keys = _dispatch_keys(tensor)
    if not keys.has(torch._C.DispatchKey.Functionalize):  # functorch's wrappers have this key, and others do
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
    """Wait for the result of a collective, as its next use would, and return it; return any other tensor unchanged."""
    if type(tensor).__name__ != "AsyncCollectiveTensor":
        return tensor
    with torch.no_grad():
        return tensor.trigger_wait()  # type: ignore[attr-defined,no-any-return]


def requires_gradient(tensor: torch.Tensor) -> bool:
    """Whether a gradient can arrive at a tensor, without a call of a subclass's ``__torch_function__``.

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
    """The composite tensor's name with the path inside it; without a path if the inner tensor is the complete value."""
    tensor: torch.Tensor
    """A tensor of any kind; a tensor that is not plain cannot be recorded."""
    chunk: Chunk | None
    note: str
    """JSON for the row, which names the composite tensor."""


def inner_tensors(name: str, tensor: torch.Tensor, chunk: Chunk | None) -> list[Inner]:
    """Return every tensor inside a composite tensor, at any depth; none where the tensor is not composite.

    In a DTensor around a composite tensor, only inner tensors with the shape of the local tensor have the DTensor's
    chunk; the others have a note that says so. `name` is that of the outer tensor, which is not plain, and no DTensor
    around a plain tensor. An error that a subclass's own ``__tensor_flatten__`` raises is passed on.
    """
    with torch.no_grad(), torch._C.DisableTorchFunction():
        dtensor = loaded("torch.distributed.tensor", "DTensor")
        if dtensor is not None and isinstance(tensor, dtensor):
            chunk = chunk or dtensor_chunk(tensor)
            tensor = arrived(tensor._local_tensor)
        inside = _inside(tensor)
        if not inside:
            return []
        whole = {
            "kind": _kind(tensor),
            "dtype": str(tensor.dtype).removeprefix("torch."),
            # The symbolic sizes of a jagged tensor have no number.
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
    """Return the tensors directly inside a tensor by name; none if the tensor is not composite or of unknown kind."""
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
    """Return the integers of a quantized tensor, and the numbers that turn them into values.

    Nothing is returned for a dtype that packs several integers into one byte.
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
    # These are the private methods, because an uncoalesced tensor, such as an embedding's gradient, refuses the public
    # methods.
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: _CSR,
    torch.sparse_bsr: _CSR,
    torch.sparse_csc: _CSC,
    torch.sparse_bsc: _CSC,
}
"""The methods, by layout, that return the inner tensors without a copy."""

_STORED = {torch.qint8: torch.int8, torch.quint8: torch.uint8, torch.qint32: torch.int32}

_KNOWN: dict[tuple[str, str], Mapping[str, str]] = {
    # This class is a weight in full precision that is marked to be cast later. Its own `__tensor_flatten__` uses a
    # tensor as a bool, which would wait for the device.
    ("torchao.float8.fsdp_utils", "WeightWithDynamicFloat8CastTensor"): {
        "": "_tensor",
        "_precomputed_scale": "_precomputed_scale",
    },
    # The other inner tensors of a NestedTensor are empty: their shapes cache lengths once the program has asked for
    # lengths.
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
"""The attribute of each inner tensor, for each class whose own `__tensor_flatten__` is unsuitable."""
