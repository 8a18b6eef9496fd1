"""The norms of values on one device: computed there in the hook, and copied to the host once a step.

Nothing here may read a value on the device, or wait for it.
"""

from __future__ import annotations

from typing import Any

import torch

from .devices import Device

_MAX_NORMS = 1 << 14
"""The most norms of a step; further values of the step are not measured."""
_NARROW = (torch.float32, torch.bfloat16, torch.float16)
_WIDE = (torch.float64, torch.complex64, torch.complex128)


class DeviceNorms:
    """The norms of one step's values on one device, in the order in which they were measured. Training threads."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._room = device.allocate(4 * _MAX_NORMS).view(torch.float32)
        self._slots: list[torch.Tensor] = []
        """The elements of the room that were ever used, as tensors of no dims."""
        self._stream: Any = None
        """The stream on which the values of the step under way, or else of the last step, were measured."""
        self._num = 0

    def is_capturing(self) -> bool:
        """Whether a graph is being captured, so that the device must not be asked anything."""
        return self._device.is_capturing()

    def measure(self, tensor: torch.Tensor) -> bool:
        """Launch the kernel that computes the Euclidean norm of a tensor; return whether that was possible.

        It is not possible for integers, while a graph is captured, and for a value on another stream than that of the
        step's first value.
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
        """Launch the kernels that compute the norms of many tensors together; return whether that was possible."""
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
        """Return the norms of the step, float32 of shape (number,) on the device, and begin another step.

        They must be copied on the current stream before the next value is measured. None if there are no norms, or if a
        graph is captured now.
        """
        num, self._num = self._num, 0
        if not num or self._device.is_capturing():
            return None
        self._follow(self._device.current_stream())
        return self._room[:num]

    def _begin(self, num: int) -> int | None:
        """Return the place of the next `num` norms; None if they cannot be measured now."""
        if self._device.is_capturing() or self._num + num > _MAX_NORMS:
            return None
        stream = self._device.current_stream()
        if self._stream != stream:
            if self._num:
                return None
            self._follow(stream)
        return self._num

    def _follow(self, stream: Any) -> None:
        """Make a stream wait for the stream that used the room before."""
        if self._stream is not None and self._stream != stream:
            event = self._device.new_event()
            self._device.record(event, self._stream)
            self._device.wait(stream, event)
        self._stream = stream
