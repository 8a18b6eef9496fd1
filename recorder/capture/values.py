"""What of a tensor can be recorded: its plain local values, and where they lie in a global tensor.

Reads metadata only: no copy, no collective, no device sync; but what a collective is about to bring is waited for. A
kind that cannot be recorded is an `UnsupportedKind` with a reason for the ledger.
"""

from __future__ import annotations

import sys

import torch
from torch.nn.parameter import is_lazy

from ..format.dtypes import ITEM_BYTES
from ..records import Chunk
from .places import dtensor_chunk

PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
"""Types whose values are their own memory, as far as dtype and layout say so."""

DTYPES: dict[torch.dtype, str] = {
    dtype: name
    for name in ITEM_BYTES
    if isinstance(dtype := getattr(torch, name, None), torch.dtype) and dtype.itemsize == ITEM_BYTES[name]
}
"""Names of the dtypes that the format knows."""


_is_functorch_wrapped = torch._C._functorch.is_functorch_wrapped_tensor


class UnsupportedKind(Exception):
    """A tensor of a kind that cannot be recorded; its text is the drop reason."""


def local_bytes(tensor: torch.Tensor) -> int:
    """Of the rank's own values of a parameter; 0 where that cannot be seen at a glance."""
    local = getattr(tensor, "_local_tensor", tensor)
    return 0 if is_lazy(local) or type(local) not in PLAIN else local.numel() * local.itemsize


def plain(tensor: torch.Tensor, chunk: Chunk | None = None) -> tuple[torch.Tensor, Chunk | None]:
    """The rank's own values as an ordinary strided tensor, and its place in the global tensor where it has one.

    A ``chunk`` that the caller knows already is kept.

    Raises:
        UnsupportedKind: it is no plain tensor. `inner_tensors` knows what some of these are made of.
    """
    if type(tensor) not in PLAIN:
        tensor, chunk = _unwrap(tensor, chunk)
    if tensor.layout is not torch.strided:
        raise UnsupportedKind(f"unsupported_type:{str(tensor.layout).removeprefix('torch.').lstrip('_')}")
    if tensor.dtype not in DTYPES:
        raise UnsupportedKind(f"unsupported_type:{str(tensor.dtype).removeprefix('torch.')}")
    if tensor.is_meta:
        raise UnsupportedKind("unsupported_type:meta")
    if tensor.is_quantized or tensor.is_nested:
        raise UnsupportedKind("unsupported_type:" + ("quantized" if tensor.is_quantized else "nested"))
    if _is_functorch_wrapped(tensor):
        raise UnsupportedKind("unsupported_type:functorch")
    if tensor._is_zerotensor():  # zeros that no memory stands behind, as autograd hands out
        return torch.zeros((), dtype=tensor.dtype, device="cpu").expand(tensor.shape), chunk
    # FSDP frees storages; to read such a one of a GPU would end everything that the process does there.
    if (tensor.is_cpu or tensor.is_cuda) and tensor.numel() and tensor.untyped_storage().nbytes() == 0:
        raise UnsupportedKind("storage_freed")
    return tensor, chunk


def _unwrap(tensor: torch.Tensor, chunk: Chunk | None) -> tuple[torch.Tensor, Chunk | None]:
    dtensor_module = sys.modules.get("torch.distributed.tensor")
    if dtensor_module is not None and isinstance(tensor, dtensor_module.DTensor):
        local = arrived(tensor._local_tensor)
        if type(local) not in PLAIN:
            raise UnsupportedKind(f"unsupported_type:DTensor of {type(local).__name__}")
        return local, chunk or dtensor_chunk(tensor)
    if type(found := arrived(tensor)) in PLAIN:
        return found, chunk
    if is_lazy(tensor):
        raise UnsupportedKind("unsupported_type:uninitialized")
    if hasattr(tensor, "__torch_dispatch__") and type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__:
        with torch._C.DisableTorchFunctionSubclass():  # a subclass that only adds Python methods
            return tensor.as_subclass(torch.Tensor), chunk
    raise UnsupportedKind(f"unsupported_type:{type(tensor).__name__}")


def arrived(tensor: torch.Tensor) -> torch.Tensor:
    """What a collective brings, once it is there: the next use of the tensor would wait as well. Others as they are."""
    if type(tensor).__name__ != "AsyncCollectiveTensor":
        return tensor
    with torch.no_grad():
        return tensor.trigger_wait()  # type: ignore[attr-defined,no-any-return]


def requires_gradient(tensor: torch.Tensor) -> bool:
    """Whether a gradient can arrive at a tensor; a subclass's own ``__torch_function__`` is not asked.

    None can at a lazy parameter that is yet to be made.
    """
    if type(tensor) is torch.Tensor:
        return tensor.requires_grad
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.requires_grad and not is_lazy(tensor)
