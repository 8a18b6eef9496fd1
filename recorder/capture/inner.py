"""What a tensor that is not one plain array is made of: the tensors inside it, each to be recorded under its own name.

Reads metadata and attributes only: no copy, no collective, no device sync, and nothing that a user's
``__torch_function__`` would see.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple, cast

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..records import Chunk
from .parallel import loaded
from .places import compact, dtensor_chunk
from .values import PLAIN, arrived

_Inner = Mapping[str, torch.Tensor]


class Inner(NamedTuple):
    """One tensor inside another."""

    name: str
    """The outer tensor's, and its place inside of it; the outer tensor's alone where it is simply the value."""
    tensor: torch.Tensor
    """Of any kind; what is no plain tensor after all cannot be recorded."""
    chunk: Chunk | None
    note: str
    """JSON for the row: what it was found inside of."""


def inner_tensors(name: str, tensor: torch.Tensor, chunk: Chunk | None) -> list[Inner]:
    """Every tensor inside one that is composite, at any depth; none where it is not.

    Of a DTensor around a composite tensor only what has the shape of the local tensor can have its place; everything
    else has a note that it has none.

    Args:
        name: of the outer tensor.
        tensor: not plain, and not a DTensor around a plain tensor.
        chunk: its place in a global tensor, where the caller knows.

    Raises:
        Exception: out of a subclass's own ``__tensor_flatten__``.
    """
    with torch.no_grad(), torch._C.DisableTorchFunction():
        dtensor = loaded("torch.distributed.tensor", "DTensor")
        if dtensor is not None and isinstance(tensor, dtensor):
            chunk = chunk or dtensor_chunk(tensor)
            tensor = arrived(tensor._local_tensor)
        found = _inside(tensor)
        if not found:
            return []
        whole = {
            "kind": _kind(tensor),
            "dtype": str(tensor.dtype).removeprefix("torch."),
            # Sizes that a jagged tensor makes up have no number.
            "shape": [size if isinstance(size, int) else None for size in tensor.shape],
        }
        return list(_flat(tensor.shape, found, name, chunk, {"inner_of": whole}))


def _flat(
    shape: torch.Size, found: _Inner, prefix: str, chunk: Chunk | None, note: dict[str, object]
) -> Iterator[Inner]:
    for name, tensor in found.items():
        path = f"{prefix}.{name}" if prefix and name else prefix or name
        has_place = chunk is None or (chunk.offsets is not None and tensor.shape == shape)
        its_note = note if has_place else {**note, "no_layout": "inner_tensor"}
        its_chunk = chunk if has_place else None
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
    """The tensors right inside one, by name; empty where it is not composite, or of a kind not known here."""
    if type(tensor) in PLAIN:
        if tensor.is_meta or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            return {}
        with torch._C._DisableTorchDispatch():
            if tensor.is_quantized:
                return _quantized(tensor)
            return {name: read(tensor) for name, read in _SPARSE.get(tensor.layout, {}).items()}
    if (value := arrived(tensor)) is not tensor:
        return {"": value}
    known = _KNOWN.get((type(tensor).__module__, type(tensor).__name__))
    if known is None and is_traceable_wrapper_subclass(tensor):
        known = {name: name for name in tensor.__tensor_flatten__()[0]}
    values = {name: getattr(tensor, attribute, None) for name, attribute in (known or {}).items()}
    return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}


def _quantized(tensor: torch.Tensor) -> _Inner:
    """The whole numbers in memory, where each has bytes of its own, and what turns them into values."""
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


_Readers = Mapping[str, Callable[[torch.Tensor], torch.Tensor]]
_CSR = cast(
    "_Readers",
    {
        "crow_indices": torch.Tensor.crow_indices,
        "col_indices": torch.Tensor.col_indices,
        "values": torch.Tensor.values,
    },
)
_CSC = cast(
    "_Readers",
    {
        "ccol_indices": torch.Tensor.ccol_indices,
        "row_indices": torch.Tensor.row_indices,
        "values": torch.Tensor.values,
    },
)
_SPARSE: dict[torch.layout, _Readers] = {
    # As they lie in memory: an uncoalesced tensor, such as an embedding's gradient, refuses to show them otherwise.
    torch.sparse_coo: cast("_Readers", {"indices": torch.Tensor._indices, "values": torch.Tensor._values}),
    torch.sparse_csr: _CSR,
    torch.sparse_bsr: _CSR,
    torch.sparse_csc: _CSC,
    torch.sparse_bsc: _CSC,
}
"""By layout, what holds the values, and how it is read without a copy."""

_STORED = {torch.qint8: torch.int8, torch.quint8: torch.uint8, torch.qint32: torch.int32}

_KNOWN: dict[tuple[str, str], Mapping[str, str]] = {
    # A weight in full precision, marked to be cast later. Its own flattening asks for the truth of a tensor, which
    # would wait for the device.
    ("torchao.float8.fsdp_utils", "WeightWithDynamicFloat8CastTensor"): {
        "": "_tensor",
        "_precomputed_scale": "_precomputed_scale",
    },
    # Its other tensors are empty ones whose shapes cache lengths, as soon as somebody has asked for these.
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
"""Classes of which the attributes to be read are known better than by asking: by name inside, the attribute."""
