"""How bytes of a tensor reach a block of the pool: one small class for each kind of device.

A stager runs on the training thread. It may not wait for a device; where a copy is under way when it returns, the
record carries a `Ready` that the writer waits on. A new device is one class here and one entry of `STAGERS`.
"""

from __future__ import annotations

import ctypes
from typing import Protocol

import torch

from ..records import Ready
from .pool import Pool, PoolBlock

_MEMMOVE_BYTES = 1 << 20
"""Below this memmove wins over the dispatcher (0.4 us a call against 6); above it torch copies with all its threads."""


class Stager(Protocol):
    """Copies tensors of one device type into the pool."""

    def copy(self, tensor: torch.Tensor, block: PoolBlock) -> Ready | None:
        """Copy a dense tensor's elements in C order into ``block``.

        Training may change the tensor as soon as this returns (on its own stream, in program order), and must not find
        the copy changed by that. None means that the bytes are there already. Raises what the copy raises.
        """

    def close(self) -> None:
        """The last copy was asked for; give up threads and streams."""


class HostStager:
    """Host memory to host memory: the copy is complete on return."""

    def __init__(self, pool: Pool) -> None:
        self._address = pool.address

    def copy(self, tensor: torch.Tensor, block: PoolBlock) -> Ready | None:
        nbytes = len(block.data)
        if nbytes < _MEMMOVE_BYTES and tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj():
            source = tensor.data_ptr()
            if not source and nbytes:
                raise ValueError("no memory stands behind the tensor")
            ctypes.memmove(self._address + block.offset, source, nbytes)
            return None
        with torch.no_grad(), torch._C._DisableTorchDispatch():
            block.as_tensor(tensor.dtype, tensor.shape).copy_(tensor.detach())
        return None

    def close(self) -> None:
        pass


STAGERS: dict[str, type[Stager] | type[HostStager]] = {"cpu": HostStager}
"""Stager class by device type; each is made once, with the pool, when its first tensor comes."""
