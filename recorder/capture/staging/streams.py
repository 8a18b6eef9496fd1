"""Copies values from a device that works in streams. Training waits for no copy, and cannot change a copy.

A value is cloned on training's own stream, in program order, into a block of a fixed region of the device's memory. A
stream of the recorder then copies the clone to the host. If training changes the tensor in place or frees it, the
change comes after the clone on training's stream and cannot reach the copy. The clone reads and writes each byte of the
value once. That takes about a thirtieth of the time of the copy over the bus.

If the region is full, training's stream makes the copy to the host itself, at the speed of the bus. The copy is still
in program order, and the host does not wait. The writer polls events to see which copies are over. A copy that is over
gives back its device block, event and pool block. A block that a device may still write into is never reused.

Nothing here may wait for a device, launch anything while a graph is captured, or allocate memory in each step.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ...records import Chunk, LostError, Ready
from ...system.processes import comes_from_signal_handler
from .devices import Device, DeviceNorms
from .pool import DevicePool, Pool, PoolBlock

if TYPE_CHECKING:
    from .device_measure import DeviceMeasure, Weights

COPY_FAILED = "copy_failed"
CUDA_GRAPH = "cuda_graph"
NO_DEVICE_ROOM = "device_pool_full"

_MIN_MEASURED_BYTES = 1 << 20
"""Smaller tensors are measured on the host. A guess: a larger copy should cost over 20 kernel launches."""
_MANY = 64
"""If more copies than this are under way, the training thread checks whether the oldest are over."""
_unfinished: set[StreamStager] = set()
"""The closed stagers into whose memory a device may still write. The memory is freed once the device is done."""


class StreamStager:
    """Copies tensors of one kind of device into the pool; `copies.Stager` describes the methods."""

    def __init__(
        self, pool: Pool, *, open_device: Callable[[int], Device], room_bytes: int, say: Callable[[str], None],
        min_measured_bytes: int = _MIN_MEASURED_BYTES,
    ) -> None:  # fmt: skip
        """Store the settings. A device is not used before its first tensor arrives.

        `pool` is page-locked at the first tensor. `room_bytes` of each device's memory hold values on their way to the
        host. Tensors of at least `min_measured_bytes` are measured on the device if their payload is not kept. `say`
        takes a line of text that a person should read.
        """
        self._pool = pool
        self._open_device = open_device
        self._room_bytes = room_bytes
        self._say = say
        self._min_measured_bytes = min_measured_bytes
        self._by_device: dict[int, _DeviceCopies] = {}
        self._opening = threading.RLock()
        self._pinned_by: Device | None = None
        self._has_tried_to_pin = False
        self._is_closed = False
        self._pid = os.getpid()
        self._unmeasurable: set[torch.dtype] = set()

    def plan(self, tensor: torch.Tensor, chunk: Chunk | None, keep: int, unit_dim: int = -1) -> DeviceMeasure | None:
        """Return a plan to measure the tensor on the device. Return None if the tensor must be copied instead."""
        if tensor.numel() * tensor.itemsize < self._min_measured_bytes or tensor.dtype in self._unmeasurable:
            return None
        from .device_measure import (
            DeviceMeasure,
            can_measure,
        )  # the import loads pyarrow, which `import torch` need not wait for

        if not can_measure(tensor, chunk, keep):
            return None
        return DeviceMeasure(tensor.dtype, tuple(tensor.shape), keep, unit_dim)

    def copy(self, tensor: torch.Tensor, block: PoolBlock) -> Ready | None:
        if not block.num_bytes:
            return None
        if tensor.dtype == torch.float4_e2m1fn_x2:
            tensor = tensor.view(torch.uint8)  # torch 2.9 cannot copy this dtype
        return self._copies_of(tensor).stage(tensor, block, None)

    def measure(self, tensor: torch.Tensor, block: PoolBlock, plan: DeviceMeasure) -> Ready:
        try:
            return self._copies_of(tensor).stage(tensor, block, plan)
        except (LostError, torch.OutOfMemoryError):
            raise
        except RuntimeError:
            # The device has no kernel for this dtype. From now on tensors of this dtype are measured on the host.
            self._unmeasurable.add(tensor.dtype)
            raise

    def norms(self, tensor: torch.Tensor) -> DeviceNorms:
        """Return the object that computes this step's norms on the device. `copy` copies the norms to the host.

        Raises:
            LostError: a graph is being captured.
        """
        copies = self._copies_of(tensor)
        if copies.norms is None:
            copies.norms = DeviceNorms(copies.device)
        return copies.norms

    def look(self) -> None:
        for copies in list(self._by_device.values()):
            if not copies.device.is_capturing():
                copies.poll_oldest()

    def fetch(self) -> None:
        """Do nothing. All copies are on their way already, and the writer waits for them."""

    def close(self) -> None:
        """Free the memory. If copies are under way, the thread that finds the last one over frees the memory."""
        if os.getpid() != self._pid:
            return
        self._is_closed = True
        _unfinished.add(self)
        with contextlib.suppress(RuntimeError):
            self.look()
        self.release_if_over()

    def release_if_over(self) -> None:
        """Free the memory if `close` was called and the last copy is over. Otherwise do nothing."""
        if not self._is_closed or any(copies.is_busy for copies in list(self._by_device.values())):
            return
        _unfinished.discard(self)
        pinned_by, self._pinned_by = self._pinned_by, None
        self._by_device.clear()
        if pinned_by is not None:
            with contextlib.suppress(RuntimeError):
                pinned_by.unpin(self._pool.address)

    def _copies_of(self, tensor: torch.Tensor) -> _DeviceCopies:
        index = tensor.device.index or 0
        copies = self._by_device.get(index)
        if copies is None:
            with self._opening:
                copies = self._by_device.get(index) or self._open(index)
        if copies.device.is_capturing():
            raise LostError(CUDA_GRAPH)
        return copies

    def _open(self, index: int) -> _DeviceCopies:
        device = self._open_device(index)
        if device.is_capturing():
            raise LostError(CUDA_GRAPH)
        for earlier in list(_unfinished):
            earlier.look()
            earlier.release_if_over()
        if not self._has_tried_to_pin:
            self._has_tried_to_pin = True
            if device.pin(self._pool.address, self._pool.region_bytes):
                self._pinned_by = device
            else:
                self._say(
                    f"the pool ({self._pool.region_bytes} bytes) could not be page-locked, so the writer thread "
                    "copies from the device: slower, and values wait on the device meanwhile; a smaller "
                    "RECORDER_POOL_BYTES or a higher limit of locked memory helps"
                )
        room_bytes = self._room_bytes
        try:
            room = device.allocate(room_bytes)
        except torch.OutOfMemoryError:
            self._say(f"device {index} has no {room_bytes} bytes for copies, so training's stream copies instead")
            room = device.allocate(0)
        copies = self._by_device[index] = _DeviceCopies(
            device, DevicePool(room), self.release_if_over, self._pinned_by is not None
        )
        return copies


class _DeviceCopies:
    """The recorder's state for one device: the region for clones, the recorder's stream, and the copies under way."""

    def __init__(self, device: Device, room: DevicePool, on_over: Callable[[], None], is_pinned: bool) -> None:
        self.device = device
        self.on_over = on_over
        self.side = device.new_stream()
        self.events: deque[Any] = deque()
        self._room = room
        self._is_pinned = is_pinned
        self._under_way: deque[_Arrival] = deque()
        self._launching: set[_Arrival] = set()
        """The copies that the device may have begun, but whose event may not be recorded yet."""
        self._weights: Weights = {}
        self.norms: DeviceNorms | None = None

    @property
    def is_busy(self) -> bool:
        return bool(self._launching) or any(not arrival.is_over for arrival in list(self._under_way))

    def stage(self, tensor: torch.Tensor, block: PoolBlock, plan: DeviceMeasure | None) -> _Arrival:
        """Begin to copy a tensor, or the results of measuring it, into the block."""
        self._forget_what_is_over()
        room = self._take_room(tensor.numel() * tensor.itemsize)
        if room is not None:
            return self._stage_through_room(tensor, block, plan, room)
        is_dense = tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
        fits = is_dense or tensor.numel() * tensor.itemsize <= self._room.capacity_bytes
        if not (self._is_pinned and fits):
            raise LostError(NO_DEVICE_ROOM)
        current = self.device.current_stream()
        made = [tensor] if is_dense else self._make(current, lambda: _dense(tensor))
        if plan is not None:
            values, measured = made, plan
            made = self._make(current, lambda: measured.launch(values[0], {}))
        return self._bring(current, made, block, None, self._event())

    def _stage_through_room(
        self, tensor: torch.Tensor, block: PoolBlock, plan: DeviceMeasure | None, room: PoolBlock
    ) -> _Arrival:
        device, side = self.device, self.side
        stream = current = device.current_stream()
        event = self._event()
        try:
            copied = self._make(current, lambda: _filled(room, tensor))
            device.record(event, current)
            device.wait(side, event)
            stream = side
            if plan is not None:
                clone, measured = copied, plan
                copied = self._make(side, lambda: measured.launch(clone[0], self._weights))
            return self._bring(side, copied, block, room, event)
        except BaseException:
            # `room` is not given back while a copy into it may be under way. Losing the memory is better.
            if block.when_released is None:
                self._keep_until_done(room, stream, event)
            raise

    def _make(self, stream: Any, work: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
        """Launch work that makes a tensor. Return a list, which contains the tensor once the work is launched."""
        made: list[torch.Tensor] = []
        self.device.run(stream, lambda: made.append(work()))
        return made

    def _bring(
        self, stream: Any, made: list[torch.Tensor], block: PoolBlock, room: PoolBlock | None, event: Any
    ) -> _Arrival:
        """Copy a tensor to the host. Event, device memory and pool block are given back only once the copy is over."""
        device = self.device
        arrival = _Arrival(self, event, block, room)
        if self._is_pinned:
            self._launching.add(arrival)  # the entry stays in the list if the launch fails half-way
            block.when_released = arrival.released
            device.run(stream, lambda: _bring_now(block, made))
            device.record(event, stream)
        else:
            arrival.fetch = lambda: device.fetch(self.side, _host(block, made[0]), made[0])
            device.record(event, stream)
            block.when_released = arrival.released
        self._launched(arrival)
        return arrival

    def _launched(self, arrival: _Arrival) -> None:
        arrival.is_launched = True
        self._under_way.append(arrival)
        self._launching.discard(arrival)

    def _keep_until_done(self, room: PoolBlock, stream: Any, event: Any) -> None:
        """Keep the device memory of a failed copy until no work on the device can use it any more."""
        arrival = _Arrival(self, event, None, room)
        with contextlib.suppress(RuntimeError):
            self.device.record(event, stream)
            self._launched(arrival)

    def _take_room(self, num_bytes: int) -> PoolBlock | None:
        if num_bytes > self._room.capacity_bytes:
            return None
        room = self._room.take(num_bytes)
        if room is None:
            self.poll_oldest()
            room = self._room.take(num_bytes)
        return room

    def _event(self) -> Any:
        try:
            return self.events.popleft()
        except IndexError:
            return self.device.new_event()

    def _forget_what_is_over(self) -> None:
        under_way = self._under_way
        while under_way and under_way[0].is_over:
            under_way.popleft()
        if len(under_way) > _MANY:
            with contextlib.suppress(IndexError):  # other threads pop from this queue, too
                under_way[0].poll()
                under_way[1].poll()

    def poll_oldest(self) -> None:
        """Poll copies, oldest first, until one is not over: they end about in order. Not during a graph capture."""
        for arrival in list(self._under_way):
            if not arrival.poll():
                break
        self._forget_what_is_over()


class _Arrival:
    """One copy under way. The first thread that finds it over gives back its event, device memory and pool block."""

    __slots__ = (
        *("_block", "_blocks_left", "_event", "_copies", "_room", "_may_end"),
        *("error", "fetch", "is_launched", "is_over", "is_released"),
    )

    def __init__(self, copies: _DeviceCopies, event: Any, block: PoolBlock | None, room: PoolBlock | None) -> None:
        self._copies = copies
        self._event = event
        self._block = block
        self._room = room
        # A list of one entry, not a lock: only one thread can pop the entry, and no interrupt can leave a lock held.
        self._may_end = [True]
        self._blocks_left = [block] if block is not None else []
        self.fetch: Callable[[], None] | None = None
        """The function that copies on the writer thread; None if the device itself writes to the host."""
        self.error: Exception | None = None
        self.is_launched = False
        self.is_over = False
        self.is_released = False

    def wait(self, timeout_s: float) -> bool:
        """Wait for the copy; `records.Ready` describes the arguments. Called on the writer thread."""
        if not self.poll(is_reader=True):
            time.sleep(timeout_s)
            if not self.poll(is_reader=True):
                return False
        if self.error is not None:
            raise LostError(COPY_FAILED) from self.error
        return True

    def poll(self, *, is_reader: bool = False) -> bool:
        """Return True if the copy is over. The first call that finds it over frees its memory. Any thread."""
        if self.is_over or not self.is_launched:
            return self.is_over
        error: Exception | None = None
        try:
            if not self._copies.device.is_done(self._event):
                return False
            if self.fetch is not None and self._block is not None and not self.is_released:
                if not is_reader:
                    return False
                self.fetch()
        except Exception as problem:
            if comes_from_signal_handler(problem):
                raise
            error = problem
        try:
            self._may_end.pop()
        except IndexError:
            return self.is_over
        self._end(error)
        return True

    def released(self) -> None:
        """Note that the record no longer needs the pool block."""
        self.is_released = True
        if self.is_over:
            self._give_block_back()

    def _end(self, error: Exception | None) -> None:
        self.error = error
        self.fetch = None
        if self._room is not None:
            self._room.release()
        if error is None:
            self._copies.events.append(self._event)
        self.is_over = True
        if self.is_released:
            self._give_block_back()
        self._copies.on_over()

    def _give_block_back(self) -> None:
        with contextlib.suppress(IndexError):
            self._blocks_left.pop().give_back()


def _filled(room: PoolBlock, tensor: torch.Tensor) -> torch.Tensor:
    return room.as_tensor(tensor.dtype, tensor.shape).copy_(tensor)


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor contiguous, without lazy bits (conjugate, negative), which torch would resolve too early."""
    return tensor.resolve_conj().resolve_neg().contiguous()


def _host(block: PoolBlock, made: torch.Tensor) -> torch.Tensor:
    return block.as_tensor(made.dtype, made.shape)


def _bring_now(block: PoolBlock, made: list[torch.Tensor]) -> None:
    _host(block, made[0]).copy_(made[0], non_blocking=True)
