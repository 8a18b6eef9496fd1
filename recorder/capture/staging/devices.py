"""Defines the operations of a device with streams, implements them for CUDA, and computes norms on a device.

Only this module calls CUDA. Every call is made in a hook of training or on the writer thread. No call waits for the
device except `Device.fetch`, which the writer alone may call. Norms are computed in hooks and copied once a step.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

_PORTABLE = 1
"""The flag CU_MEMHOSTREGISTER_PORTABLE, with which memory is page-locked for every device of the process."""
_RELAXED = 2
"""The capture mode CU_STREAM_CAPTURE_MODE_RELAXED of the CUDA driver."""


class Device(Protocol):
    """A device that works in streams. Each implementation chooses the classes of its streams and events."""

    def is_capturing(self) -> bool:
        """Return True if the work that this thread launches now is captured into a graph instead of being run."""

    def current_stream(self) -> Any:
        """Return the stream on which this thread launches the work of training."""

    def new_stream(self) -> Any:
        """Make a stream that never waits implicitly for other streams."""

    def new_event(self) -> Any: ...

    def record(self, event: Any, stream: Any) -> None:
        """Record an event that happens once the stream has done all the work that was launched on it so far."""

    def wait(self, stream: Any, event: Any) -> None:
        """Make all future work of the stream wait for the event, as the event was last recorded."""

    def is_done(self, event: Any) -> bool:
        """Return True if the event has happened. Raises an earlier error of the device. Called on any thread."""

    def run(self, stream: Any, work: Callable[[], None]) -> None:
        """Launch the work on the stream. The work may begin only after this method has returned."""

    def fetch(self, stream: Any, host: torch.Tensor, source: torch.Tensor) -> None:
        """Copy a tensor to host memory that is not page-locked, and wait for the copy. Writer thread only."""

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Allocate memory on the device as a flat tensor of bytes."""

    def pin(self, address: int, num_bytes: int) -> bool:
        """Page-lock host memory, so that copies into it need not wait. Return False if the device refuses."""

    def unpin(self, address: int) -> None: ...


class CudaDevice(Device):
    """One NVIDIA GPU, called through torch, or through the CUDA driver where torch's call has a side effect."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._driver = driver = ctypes.CDLL("libcuda.so.1")  # CUDA has loaded the library already
        driver.cuMemHostRegister_v2.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint)
        driver.cuMemHostUnregister.argtypes = (ctypes.c_void_p,)
        driver.cuCtxPushCurrent_v2.argtypes = (ctypes.c_void_p,)
        device, self._context = ctypes.c_int(), ctypes.c_void_p()
        self._call("cuDeviceGet", ctypes.byref(device), index)
        # The context is never released: torch keeps the same context for the life of the process.
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), device)

    def is_capturing(self) -> bool:
        if torch.cuda.is_current_stream_capturing():
            return True
        if torch.cuda.current_device() == self._index:
            return False
        with torch.cuda.device(self._index):
            return torch.cuda.is_current_stream_capturing()

    def current_stream(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._index)

    def new_stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self._index)

    def new_event(self) -> torch.cuda.Event:
        return torch.cuda.Event()

    def record(self, event: torch.cuda.Event, stream: torch.cuda.Stream) -> None:
        event.record(stream)

    def wait(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        event.wait(stream)

    def is_done(self, event: torch.cuda.Event) -> bool:
        with self._beside_captures():
            return bool(event.query())

    def run(self, stream: torch.cuda.Stream, work: Callable[[], None]) -> None:
        with torch.cuda.stream(stream), undisturbed():
            work()

    def fetch(self, stream: torch.cuda.Stream, host: torch.Tensor, source: torch.Tensor) -> None:
        with self._beside_captures(), torch.cuda.stream(stream), undisturbed():
            host.copy_(source)

    def allocate(self, num_bytes: int) -> torch.Tensor:
        # The first value may arrive in inference mode. A tensor allocated in that mode could not be written outside it.
        with torch.inference_mode(False), undisturbed():
            return torch.empty(num_bytes, dtype=torch.uint8, device=torch.device("cuda", self._index))

    def pin(self, address: int, num_bytes: int) -> bool:
        # `torch.cuda.cudart()` is not used. If it failed to page-lock the memory, its error would stay set, and torch
        # would report the error for the next kernel of training. The driver keeps no error.
        with self._beside_captures():
            return int(self._driver.cuMemHostRegister_v2(address, num_bytes, _PORTABLE)) == 0

    def unpin(self, address: int) -> None:
        with self._beside_captures():
            self._call("cuMemHostUnregister", address)

    @contextmanager
    def _beside_captures(self) -> Iterator[None]:
        """Let this thread call the driver while another thread captures a graph, without spoiling the capture.

        The context is set, too: the driver refuses calls by a thread that has never used the device.

        Raises:
            RuntimeError: the driver refuses the context or the capture mode.
        """
        mode, popped = ctypes.c_int(_RELAXED), ctypes.c_void_p()
        self._call("cuCtxPushCurrent_v2", self._context)
        try:
            self._call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
            try:
                yield
            finally:
                self._call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(popped))

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._driver, name)(*arguments)
        if code:
            raise RuntimeError(f"{name} of the CUDA driver returned {code}")


@contextmanager
def undisturbed() -> Iterator[None]:
    """Run the ``with`` block without autograd, autocast, and the user's dispatch and function modes."""
    with (
        torch.no_grad(),
        torch._C._DisableTorchDispatch(),
        torch._C.DisableTorchFunction(),
        torch._C._DisableAutocast(),
    ):
        yield


_MAX_NORMS = 1 << 14
"""The most norms of one step. Further values of the step get no norm."""
_NARROW = (torch.float32, torch.bfloat16, torch.float16)
_WIDE = (torch.float64, torch.complex64, torch.complex128)


class DeviceNorms:
    """Computes the norms of one step's values on one device, in the order of the calls. Called on training threads."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._room = device.allocate(4 * _MAX_NORMS).view(torch.float32)
        self._slots: list[torch.Tensor] = []
        """0-dim views of the elements of `_room`, one for each norm, made when first needed."""
        self._stream: Any = None
        """The stream that last computed or copied norms; None before the first norm."""
        self._num = 0

    def is_capturing(self) -> bool:
        """Return True while a graph is captured. The device must not be used during a capture."""
        return self._device.is_capturing()

    def measure(self, tensor: torch.Tensor) -> bool:
        """Launch the kernel that computes the Euclidean norm of a tensor. Return False if that is not possible.

        It is not possible for integers and other dtypes without a norm, while a graph is captured, on a stream other
        than that of the step's first norm, and after `_MAX_NORMS` norms.
        """
        if tensor.dtype not in _NARROW and tensor.dtype not in _WIDE:
            return False
        start = self._begin(1)
        if start is None:
            return False
        if start >= len(self._slots):
            self._slots += self._room[len(self._slots) : start + max(256, start)].unbind()
        slot = self._slots[start]

        def launch() -> None:
            if tensor.dtype in _NARROW:
                torch.linalg.vector_norm(tensor, dtype=torch.float32, out=slot)
            else:
                slot.copy_(torch.linalg.vector_norm(tensor))

        self._device.run(self._stream, launch)
        self._num = start + 1
        return True

    def measure_many(self, tensors: list[torch.Tensor]) -> bool:
        """Launch kernels that compute the norms of many tensors together. Return False if that is not possible."""
        start = self._begin(len(tensors)) if all(tensor.dtype in _NARROW for tensor in tensors) else None
        if start is None:
            return False
        out = self._room[start : start + len(tensors)]

        def launch() -> None:
            torch.stack(torch._foreach_norm(tensors, 2, dtype=torch.float32), out=out)

        self._device.run(self._stream, launch)
        self._num = start + len(tensors)
        return True

    def take(self) -> torch.Tensor | None:
        """Return the step's norms on the device, float32 of shape (number of norms,), and begin a new step.

        The norms must be copied on the current stream before the next norm is computed. Return None if there are no
        norms, or if a graph is being captured.
        """
        num, self._num = self._num, 0
        if not num or self._device.is_capturing():
            return None
        self._follow(self._device.current_stream())
        return self._room[:num]

    def _begin(self, num: int) -> int | None:
        """Return the index in `_room` for the next `num` norms. Return None if they cannot be computed now."""
        if self._device.is_capturing() or self._num + num > _MAX_NORMS:
            return None
        stream = self._device.current_stream()
        if self._stream != stream:
            if self._num:
                return None
            self._follow(stream)
        return self._num

    def _follow(self, stream: Any) -> None:
        """Make `stream` wait for the stream that last used `_room`. From now on `stream` is the last user."""
        if self._stream is not None and self._stream != stream:
            event = self._device.new_event()
            self._device.record(event, self._stream)
            self._device.wait(stream, event)
        self._stream = stream
