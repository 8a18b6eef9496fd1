"""Unwraps a tensor to its plain local values, and finds where they lie in a global tensor.

It reads metadata only: no copy, no collective, no device sync; but it waits for the pending result of a collective. A
kind that cannot be recorded raises `UnsupportedKind` with a reason for the ledger.
"""

from __future__ import annotations

import sys

import torch
from torch.nn.parameter import is_lazy

from ...numerics.dtypes import ITEM_BYTES
from ...records import Chunk
from .dtensors import dtensor_chunk

PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
"""Types whose values lie in their own memory, if dtype and layout allow it."""

DTYPES: dict[torch.dtype, str] = {
    dtype: name
    for name in ITEM_BYTES
    if isinstance(dtype := getattr(torch, name, None), torch.dtype) and dtype.itemsize == ITEM_BYTES[name]
}
"""The names of the dtypes that the format knows."""


_is_functorch_wrapped = torch._C._functorch.is_functorch_wrapped_tensor


class UnsupportedKind(Exception):
    """A tensor of a kind that cannot be recorded; its text is the drop reason."""


def local_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a parameter's local values; 0 where only unwrapping would tell."""
    local = getattr(tensor, "_local_tensor", tensor)
    return 0 if is_lazy(local) or type(local) not in PLAIN else local.numel() * local.itemsize


def plain(tensor: torch.Tensor, chunk: Chunk | None = None) -> tuple[torch.Tensor, Chunk | None]:
    """Return the local values as an ordinary strided tensor, and their chunk where there is one.

    A ``chunk`` that the caller knows already is kept.

    Raises:
        UnsupportedKind: the tensor is not plain. `inner_tensors` finds the tensors inside some of these.
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
    if tensor._is_zerotensor():  # zeros without memory, which autograd hands out
        return torch.zeros((), dtype=tensor.dtype, device="cpu").expand(tensor.shape), chunk
    # FSDP frees storages; reading a freed storage on a GPU would break the CUDA context of the process.
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
    if type(local := arrived(tensor)) in PLAIN:
        return local, chunk
    if is_lazy(tensor):
        raise UnsupportedKind("unsupported_type:uninitialized")
    if hasattr(tensor, "__torch_dispatch__") and type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__:
        with torch._C.DisableTorchFunctionSubclass():  # a subclass that only adds Python methods
            return tensor.as_subclass(torch.Tensor), chunk
    raise UnsupportedKind(f"unsupported_type:{type(tensor).__name__}")


def arrived(tensor: torch.Tensor) -> torch.Tensor:
    """Return the result of a collective, after waiting as its next use would; other tensors as they are."""
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
