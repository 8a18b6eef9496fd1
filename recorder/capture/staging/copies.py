"""Stagers: each copies the tensors of one kind of device into the pool of host memory.

A stager runs on the training thread and may not wait for a device while it takes values. If a copy is not over when the
stager returns, the record carries a `Ready` that the writer thread waits on. Some devices finish a copy at once, others
only when the step's graph has run. A new device needs one class here and one entry of `STAGERS`.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from ... import native
from ...config import Settings
from ...records import KEEP_STATS, SMALL_BYTES, Chunk, LostError, Measured, Ready
from ..local_values import DTYPES, UnsupportedKind
from .devices import CudaDevice, DeviceNorms
from .pool import Pool, PoolBlock
from .streams import COPY_FAILED, CUDA_GRAPH, NO_DEVICE_ROOM, StreamStager

if TYPE_CHECKING:
    from .measure import HostMeasure

_NO_BOUNDARY = "no_step_boundary"
_MEMMOVE_BYTES = 1 << 20
"""Smaller tensors are copied by memmove (0.3 us a call), larger ones by torch (6 us a call) on all its threads."""
_HELD_BYTES = 1 << 22
"""Measuring a tensor of up to this many bytes keeps the GIL, mostly for under a millisecond. Taking the GIL back from a
busy writer thread costs up to five milliseconds.
"""
_memmove: Callable[[int, int, int], None] = ctypes.PyDLL(None).memmove
"""A memmove that keeps the GIL; `ctypes.memmove` would release the GIL to the writer thread."""
_memmove.argtypes, _memmove.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t), None  # type: ignore[attr-defined]


class MeasurePlan(Protocol):
    """A plan to compute the statistics of a tensor in place, for a tensor whose payload is not kept."""

    nbytes: int
    """The number of bytes that the results take in the pool block."""

    def read(self, data: npt.NDArray[np.uint8], chunk: Chunk | None) -> Measured:
        """Return the statistics. `data` contains the results of this plan. Called on the writer thread."""


class Stager(Protocol):
    """Copies tensors of one device type into the pool of host memory."""

    copied_bytes: int = -1
    """Tensors of up to this many bytes are copied even if their payload is not kept. No `plan` is made for them."""

    def copy(self, tensor: torch.Tensor, block: PoolBlock) -> Ready | None:
        """Copy a dense tensor's elements in C order into ``block``.

        Return an object to wait for the bytes with, or None if the bytes have arrived already. Once this method has
        returned, training may change the tensor, in program order on the current stream, without changing the copy.
        Raises `LostError` if the tensor should not be copied, and any error of the copy itself.
        """

    def plan(self, tensor: torch.Tensor, chunk: Chunk | None, keep: int, unit_dim: int = -1) -> MeasurePlan | None:
        """Return a plan to measure a dense tensor in place. Return None if the tensor must be copied instead."""
        return None

    def measure(self, tensor: torch.Tensor, block: PoolBlock, plan: Any) -> Ready | None:
        """Measure a tensor by a plan that this stager made, and copy the results into the block as `copy` does."""
        raise LostError(COPY_FAILED)

    def norms(self, tensor: torch.Tensor) -> DeviceNorms | None:
        """Return the object that computes norms on the tensor's device. Return None if the device cannot.

        `copy` copies the step's norms to the host. Raises `LostError` if a graph is being captured.
        """
        return None

    def look(self) -> None:
        """Let the writer have the copies that have arrived. Called when a recorded model is called; never waits."""
        return

    def fetch(self) -> None:
        """Let the writer have all copies made so far, for `flush`. May wait until they have reached the host."""
        return

    def close(self) -> None:
        """Fetch or drop the copies that have not reached the host, and release the stager's memory and streams."""
        return


class HostStager(Stager):
    """Copies CPU tensors. A copy is complete when `copy` returns. The writer thread encodes it later.

    If no payload is kept, compiled C loops compute the statistics from the tensor's own memory. The loops make no copy
    and read each byte once. They run on training's OpenMP threads, which are idle while a hook runs. Small tensors are
    copied instead, because the writer measures many of them with one call.
    """

    copied_bytes = SMALL_BYTES

    def __init__(self, pool: Pool, settings: Settings) -> None:
        self._address = pool.address
        self._kernels = native.load(settings.native)
        from .measure import host_measure  # the import loads pyarrow, which `import torch` need not wait for

        self._host_measure = host_measure

    def plan(self, tensor: torch.Tensor, chunk: Chunk | None, keep: int, unit_dim: int = -1) -> HostMeasure | None:
        if (
            self._kernels is None
            or not tensor.is_contiguous()
            or (chunk is not None and chunk.flat_start is not None and keep & ~KEEP_STATS)
        ):
            return None
        return self._host_measure(DTYPES[tensor.dtype], tuple(tensor.shape), keep, unit_dim, self._kernels)

    def measure(self, tensor: torch.Tensor, block: PoolBlock, plan: HostMeasure) -> None:
        source = tensor.data_ptr()
        if not source:
            raise ValueError("the tensor has no memory")
        plan.launch(source, self._address + block.offset, torch.get_num_threads(), _HELD_BYTES)

    def copy(self, tensor: torch.Tensor, block: PoolBlock) -> Ready | None:
        nbytes = block.num_bytes
        if nbytes < _MEMMOVE_BYTES and tensor.is_contiguous():  # `plain` has resolved negative and conjugate views
            source = tensor.data_ptr()
            if not source and nbytes:
                raise ValueError("the tensor has no memory")
            _memmove(self._address + block.offset, source, nbytes)
            return None
        with torch.no_grad(), torch._C._DisableTorchDispatch():
            values = tensor.detach()
            if values.dtype == torch.float4_e2m1fn_x2:
                values = values.view(torch.uint8)  # torch 2.9 cannot copy this dtype
            block.as_tensor(values.dtype, values.shape).copy_(values)
        return None


class XlaStager(Stager):
    """Copies XLA's lazy tensors on the device in the hook, and to the host once the step's own graph has run.

    A copy to the host in the hook would cut the graph in two. The copy on the device becomes one more output of the
    graph that the program runs at its next step boundary (`torch_xla.sync`), so no further graph is compiled or run. A
    program may also run graphs without ending a step; these graphs do not compute the copies. The recorder then runs a
    graph for the copies when the next call of a recorded model begins. Otherwise the program's next graph would have to
    compute more and more copies.
    """

    def __init__(self, pool: Pool) -> None:
        lazy = sys.modules["torch_xla"]._XLAC  # torch has no lazy tensors without torch_xla
        self._needs_graph: Callable[[list[torch.Tensor]], list[bool]] = lazy._check_tensor_need_materialization
        self._to_host: Callable[[list[torch.Tensor]], list[torch.Tensor]] = lazy._xla_get_cpu_tensors
        self._counter: Callable[[str], int | None] = lazy._xla_counter_value
        self._copying = threading.Lock()
        self._seen: list[weakref.ref[_LazyCopy]] = []
        self._pid = os.getpid()
        atexit.register(self.close)  # registered last, so that it runs before torch_xla shuts down

    def copy(self, tensor: torch.Tensor, block: PoolBlock) -> Ready | None:
        with torch.no_grad(), torch._C._DisableTorchDispatch():
            copied = tensor.detach().clone()
        value = _LazyCopy(copied, block, self._copying, self._num_boundaries(), self._num_graphs())
        self._seen.append(weakref.ref(value))
        return value

    def look(self) -> None:
        seen, self._seen = self._seen, []
        values = _unread(seen)
        num_boundaries, num_graphs = self._num_boundaries(), self._num_graphs()
        waiting = [value for value in values if not value.is_free]
        needs_graph = self._needs_graph([value.tensor for value in waiting if value.tensor is not None])
        left_behind = []
        for value, is_pending in zip(waiting, needs_graph, strict=True):
            if value.num_boundaries != num_boundaries and not is_pending:
                value.is_free = True
            elif value.num_graphs != num_graphs:
                left_behind.append(value)
        self._seen += [weakref.ref(value) for value in values]
        self._bring(left_behind)

    def fetch(self) -> None:
        self._bring([value for value in _unread(self._seen) if not value.is_free])

    def close(self) -> None:
        atexit.unregister(self.close)
        values = _unread(self._seen)
        self._seen.clear()
        if os.getpid() != self._pid:
            return
        if threading.current_thread().name.startswith("recorder-"):
            # When a signal ends the process, the main thread may be building a graph. No other thread may run a graph
            # then.
            for value in values:
                if not value.is_free:
                    value.lost_for = _NO_BOUNDARY
            return
        self._bring(values)
        with self._copying:
            pass  # the writer may be reading a tensor

    def _bring(self, values: list[_LazyCopy]) -> None:
        """Bring lazy copies to the host. One graph computes all that need it. The writer counts failed copies."""
        lazy = [(value, tensor) for value in values if (tensor := value.tensor) is not None]
        if not lazy:
            return
        try:
            arrived = self._to_host([tensor for _, tensor in lazy])
        except Exception as error:
            for value, _ in lazy:
                value.lost_for, value.error = COPY_FAILED, error
            return
        for (value, _), tensor in zip(lazy, arrived, strict=True):
            value.tensor, value.is_free = tensor, True

    def _num_boundaries(self) -> int:
        return self._counter("MarkStep") or 0

    def _num_graphs(self) -> int:
        return (self._counter("CachedCompile") or 0) + (self._counter("UncachedCompile") or 0)


@dataclass(slots=True, weakref_slot=True, eq=False)
class _LazyCopy:
    """A lazy copy of a tensor. Only the record holds the copy, so a dropped record's copy is never computed."""

    tensor: torch.Tensor | None
    """The tensor, lazy or already on the host; None after the writer has read the tensor."""
    block: PoolBlock
    copying: threading.Lock
    num_boundaries: int
    num_graphs: int
    is_free: bool = False
    """True once the writer may read the tensor. Until then only the thread that builds graphs may use it."""
    lost_for: str | None = None
    error: Exception | None = None

    def wait(self, timeout_s: float) -> bool:
        if not self.is_free and self.lost_for is None:
            time.sleep(timeout_s)  # an interrupted wait for a lock could leave the lock held
        if self.lost_for is not None:
            raise LostError(self.lost_for) from self.error
        tensor = self.tensor
        if not self.is_free or tensor is None:
            return False
        try:
            with self.copying, torch.no_grad():
                self.block.as_tensor(tensor.dtype, tensor.shape).copy_(tensor)
        except Exception as error:
            raise LostError(COPY_FAILED) from error
        self.tensor = None
        return True


def _unread(seen: list[weakref.ref[_LazyCopy]]) -> list[_LazyCopy]:
    return [value for ref in seen if (value := ref()) is not None and value.tensor is not None]


class CudaStager(StreamStager, Stager):
    """Copies from NVIDIA GPUs on a stream that belongs to the recorder."""

    def __init__(self, pool: Pool, settings: Settings, say: Callable[[str], None]) -> None:
        if torch.version.hip is not None:
            raise UnsupportedKind("unsupported_device:hip")
        super().__init__(pool, open_device=CudaDevice, room_bytes=settings.device_pool_bytes, say=say)


STAGERS: dict[str, Callable[[Pool, Settings, Callable[[str], None]], Stager]] = {
    "cpu": lambda pool, settings, say: HostStager(pool, settings),
    "xla": lambda pool, settings, say: XlaStager(pool),
    "cuda": CudaStager,
}
"""Maps a device type to the function that makes its stager, called when the first tensor of that type is recorded. The
arguments are the pool, the settings and a function that logs a line.
"""

WHY_LOST = {
    CUDA_GRAPH: "a CUDA graph was being captured: nothing can be recorded then, nor when the graph is replayed",
    NO_DEVICE_ROOM: "the device's pool had no room for the value; a larger RECORDER_DEVICE_POOL_BYTES helps",
}
"""Maps each reason of a `LostError` that `Stager.copy` raises to a sentence that explains the reason."""
