"""The host pool: one memory region of fixed size in bytes, which contains every record on its way to disk.

The pool is the only limit on what waits between training and disk. The training thread takes blocks, and the writer
thread gives them back. A part of the pool belongs to the ring: the values of the last steps, which are written only if
a trigger asks for them. Training never waits for room in that part, because steps that pass make room there, not the
writer. Nothing here may allocate more than a small object per record, or hold its lock while bytes are copied.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable
from copy import copy
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ...config import Settings
from ...records import KEEP_RING, StepPosition, ValuePlace
from ...rules import RingWindow
from ...system.log import Events
from ...system.processes import private_memory
from ...system.text import size
from ..local_values import local_bytes

GRAIN_BYTES = 1024
"""Block sizes are multiples of this. It also bounds a record's Python objects, which are about as large."""
_NAP_S = 0.002
"""The seconds between two attempts to take a block, while a thread waits for room in the pool."""


class PoolBlock:
    """A part of the pool that belongs to one record until it is released."""

    __slots__ = ("_pool", "num_bytes", "offset", "size", "when_released")

    def __init__(self, pool: Pool, offset: int, size: int, num_bytes: int) -> None:
        self._pool = pool
        self.size = size
        """The number of bytes that the block takes in the pool, a multiple of `GRAIN_BYTES`."""
        self.offset = offset
        self.num_bytes = num_bytes
        self.when_released: Callable[[], None] | None = None
        """Called by `release` in place of `give_back` if a device may still write into the block. The function gives
        the block back once the device is done.
        """

    @property
    def data(self) -> npt.NDArray[np.uint8]:
        """Return the block's bytes as an array. Called on the writer thread only, to keep hooks fast."""
        return self._pool._bytes[self.offset : self.offset + self.num_bytes]  # type: ignore[no-any-return]

    @property
    def address(self) -> int:
        return self._pool.address + self.offset

    def release(self) -> None:
        """Give the block back to the pool once no device writes into it. Called once, on any thread."""
        if self.when_released is None:
            self.give_back()
        else:
            self.when_released()

    def give_back(self) -> None:
        """Give the block back to the pool, even if a device may still write into it."""
        pool = self._pool
        (pool._small if self.size == GRAIN_BYTES else pool._returned).append(self)

    def as_tensor(self, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
        """Return the block as a tensor in the pool's memory; shape and dtype must match the block's bytes."""
        return self._pool.tensor[self.offset : self.offset + self.num_bytes].view(dtype).view(shape)


class Pool:
    """A region of memory whose blocks are allocated by address-ordered first fit with coalescing.

    So the blocks in use stay at the low end, and the pages behind them stay untouched.
    """

    def __init__(self, capacity_bytes: int, *, progress_s: Callable[[], float], clock: Callable[[], float]) -> None:
        """Reserve address space; the operating system provides a page when it is first used.

        `clock` is monotonic, in seconds. `progress_s` returns the time on `clock` at which the writer was last between
        two records.
        """
        self.capacity_bytes = capacity_bytes - capacity_bytes % GRAIN_BYTES
        try:
            self._region = private_memory(self.capacity_bytes)
        except OSError as error:
            raise MemoryError(
                f"no memory for the pool of {self.capacity_bytes} bytes ({error.strerror}); lower RECORDER_POOL_BYTES, "
                "or raise the limit on this process's memory"
            ) from error
        self._bytes: Any = np.frombuffer(self._region, dtype=np.uint8)
        self.tensor = torch.from_numpy(self._bytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._region))
        self._begin(progress_s, clock)

    def split(self, nbytes: int) -> Pool:
        """Cut off the end of the pool as a second pool in the same memory. Called once, before any block is taken."""
        part = copy(self)
        part.capacity_bytes = min(nbytes, self.capacity_bytes) // GRAIN_BYTES * GRAIN_BYTES
        self.capacity_bytes -= part.capacity_bytes
        for pool in (self, part):
            pool._begin(self._progress_s, self._clock)
        part._free = [(self.capacity_bytes, part.capacity_bytes)]
        return part

    @property
    def region_bytes(self) -> int:
        """Return the size of the complete memory region, which this pool may share with another pool."""
        return len(self._bytes)

    def _begin(self, progress_s: Callable[[], float], clock: Callable[[], float]) -> None:
        self._lock = threading.RLock()
        self._is_taking = False
        self._free = [(0, self.capacity_bytes)]
        self._returned: deque[PoolBlock] = deque()
        self._small: deque[PoolBlock] = deque()
        """Free blocks of `GRAIN_BYTES`. One C call takes or gives back a block, without a lock or a search."""
        self._used_bytes = 0
        self.peak_bytes = 0
        self._progress_s = progress_s
        self._clock = clock
        self._is_dropping = False
        self.waited_s = 0.0
        self.longest_wait_s = 0.0
        self._waited_this_step_s = 0.0
        self._wait_step = -1

    @property
    def used_bytes(self) -> int:
        free_bytes = GRAIN_BYTES * len(self._small) + sum(block.size for block in list(self._returned))
        return self._used_bytes - free_bytes

    def take(self, nbytes: int) -> PoolBlock | None:
        """Return a block of ``nbytes``. Return None if the pool has no room now. Never waits for the writer.

        A call from a signal handler or a finalizer that interrupts another call in the same thread may get None.
        """
        if nbytes <= GRAIN_BYTES and self._small:
            try:
                small = self._small.pop()
                small.num_bytes, small.when_released = nbytes, None
                return small
            except IndexError:  # another thread took the last free block
                pass
        size = -(-nbytes // GRAIN_BYTES) * GRAIN_BYTES or GRAIN_BYTES
        # Ctrl-C and signal handlers interrupt this thread only at calls. Between the lock and `try`, and in `finally`,
        # there are no calls, so `_is_taking` is always reset.
        with self._lock:
            if self._is_taking:
                return None
            self._is_taking = True
            try:
                if self._returned:
                    self._collect()
                block = self._first_fit(nbytes, size)
                if block is None and self._small:
                    self._collect_small()
                    block = self._first_fit(nbytes, size)
                return block
            finally:
                self._is_taking = False

    def _first_fit(self, nbytes: int, size: int) -> PoolBlock | None:
        for i, (offset, free) in enumerate(self._free):
            if free >= size:
                # Each entry is changed by a single store, so that an interrupt can lose a block but never give its
                # memory out twice.
                if free == size:
                    del self._free[i]
                else:
                    self._free[i] = offset + size, free - size
                self._used_bytes = used = self._used_bytes + size
                if used > self.peak_bytes:
                    self.peak_bytes = used
                return PoolBlock(self, offset, size, nbytes)
        return None

    def _collect(self) -> None:
        free, returned = self._free, self._returned
        while returned:
            block = returned.popleft()
            start, size = block.offset, block.size
            while returned and returned[0].offset == start + size:  # blocks mostly come back in order
                size += returned.popleft().size
            self._used_bytes -= size
            first = last = bisect_left(free, (start, 0))
            whole_start, whole_size = start, size
            if first > 0 and sum(free[first - 1]) == start:
                first -= 1
                whole_start, whole_size = free[first][0], free[first][1] + size
            if last < len(free) and start + size == free[last][0]:
                whole_size += free[last][1]
                last += 1
            free[first:last] = [(whole_start, whole_size)]

    def _collect_small(self) -> None:
        """Move free blocks of `GRAIN_BYTES` to the general free list, where adjacent blocks merge into larger ones."""
        blocks: list[PoolBlock] = []
        with contextlib.suppress(IndexError):  # `pop` raises IndexError when no block is left
            while True:
                blocks.append(self._small.pop())
        self._returned.extend(sorted(blocks, key=lambda block: block.offset))
        self._collect()

    def take_or_wait(
        self, nbytes: int, *, step: int, per_step_s: float, stalled_s: float, per_run_s: float
    ) -> PoolBlock | None:
        """Return a block, waiting at most ``per_step_s`` in all calls of one step. Return None to drop the value.

        A wait also fails if the writer made no progress for ``stalled_s``, or if the sum of all waits exceeds
        ``per_run_s`` (0: no limit). After a failed wait no call waits until half of the pool is free, because a dead
        disk must not stop training.
        """
        block = self.take(nbytes)
        if block is not None or nbytes > self.capacity_bytes:
            return block
        with self._lock:  # this thread holds the lock, so no other thread is in `take`
            if self._is_taking:
                return None
        if self._is_dropping:
            if self.used_bytes > self.capacity_bytes // 2:
                return None
            self._is_dropping = False
            return self.take(nbytes)
        if self._wait_step != step:
            self._wait_step, self._waited_this_step_s = step, 0.0
        began = now = self._clock()
        while True:
            waited = now - began
            if (
                waited + self._waited_this_step_s >= per_step_s
                or now - self._progress_s() >= stalled_s
                or (per_run_s and waited + self.waited_s >= per_run_s)
            ):
                self._is_dropping = True
                break
            time.sleep(_NAP_S)  # an interrupt could leave an Event's lock held, which would block the writer
            block = self.take(nbytes)
            now = self._clock()
            if block is not None:
                break
        self.waited_s += now - began
        self._waited_this_step_s += now - began
        self.longest_wait_s = max(self.longest_wait_s, now - began)
        return block


class DevicePool(Pool):
    """A fixed region of a device's memory. The host may not touch the bytes of its blocks."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.capacity_bytes = tensor.numel() - tensor.numel() % GRAIN_BYTES
        self._bytes = range(self.capacity_bytes)
        self.tensor = tensor
        self.address = 0
        self._begin(time.monotonic, time.monotonic)


def default_capacity_bytes(local_world_size: int) -> int:
    """Return 5 % of the host's memory, divided among the local ranks, but at least 256 MiB and at most 1 GiB."""
    host_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(256 << 20, min(1 << 30, host_bytes // 20 // max(1, local_world_size)))


class RingMemory:
    """The part of the pool where the last steps' values wait for a trigger. Used on the training thread only."""

    def __init__(self, pool: Pool, window: RingWindow, *, is_wanted: Callable[[int], bool]) -> None:
        """Begin with an empty ring in its share of the pool.

        `is_wanted` returns True for a step that a trigger has asked for. The values of that step go to the disk.
        """
        self.pool = pool
        self.window = window
        self.is_wanted = is_wanted
        self._first: int | None = None
        """The first step of training that had a value for the ring; None before that step."""
        self._step_bytes = 0
        """The bytes of all blocks that training asked for in the step `_first`."""
        self._is_judged = False

    def take(self, nbytes: int, moment: StepPosition) -> PoolBlock | None:
        """Return a block, or None if there is no room. Waiting would not help: only steps that pass make room."""
        if not self._is_judged and moment.mode == "train":  # an evaluation does not show the size of a training step
            if self._first is None:
                self._first = moment.step
            if moment.step == self._first:
                self._step_bytes += -(-nbytes // GRAIN_BYTES) * GRAIN_BYTES or GRAIN_BYTES
        return self.pool.take(nbytes)

    def judge(self, step: int, num_steps: Callable[[int, int], int]) -> str | None:
        """Return why the window's steps do not fit into the ring, once, after the first step. Otherwise return None.

        `step` is the step that begins. `num_steps` takes a first step and a number of steps, and returns at how many of
        these steps a rule keeps values in the ring.
        """
        if self._is_judged or self._first is None or step <= self._first:
            return None
        self._is_judged = True
        before = self.window.before
        num_held = num_steps(self._first, before + 1)
        need_bytes = num_held * self._step_bytes
        if need_bytes <= self.pool.capacity_bytes:
            return None
        return (
            f"keep=ring cannot hold its steps and is off: {num_held} steps x {size(self._step_bytes)} "
            f"(before={before}, and the step under way) need {size(need_bytes)}; the ring has "
            f"{size(self.pool.capacity_bytes)} of the pool; raise RECORDER_POOL_BYTES or RECORDER_RING_SHARE, lower "
            "before=, or choose fewer values"
        )


class HostMemory:
    """The host memory for copies of values: the pool, and the ring's part of it if there is a ring."""

    def __init__(
        self, pool: Pool, ring: RingMemory | None, settings: Settings, events: Events, before_wait: Callable[[], None]
    ) -> None:
        """Take memory out of `pool` and `ring`. `before_wait` releases what the caller holds without need."""
        self._pool, self._ring, self._settings = pool, ring, settings
        self._events, self._before_wait = events, before_wait

    @property
    def pools(self) -> list[Pool]:
        """The pool of the values that will be written and, if there is a ring, the ring's pool."""
        return [self._pool] if self._ring is None else [self._pool, self._ring.pool]

    def take_in_ring(self, nbytes: int, moment: StepPosition) -> PoolBlock | None:
        """Take a block of the ring. If the ring is full and a trigger asked for the step, take a block of the pool."""
        ring = self._ring
        if ring is None:
            return None
        block = ring.take(nbytes, moment)
        if block is None and ring.is_wanted(moment.step):
            return self._pool.take(nbytes) or self.take_later(nbytes, moment.step)
        return block

    def say_no_room(self, origin: ValuePlace, keep: int, nbytes: int) -> str:
        """Report that no memory is free for a value, and return the drop reason."""
        pool, reason = self._pool, "too_large" if nbytes > self._pool.capacity_bytes else "pool_full"
        if keep & KEEP_RING and self._ring is not None:
            pool, reason = self._ring.pool, "ring_full"
        where = f"{origin.module_path or origin.root}:{origin.site} {origin.name}".rstrip()
        self._events.add(reason, _NO_ROOM[reason].format(where=where, nbytes=nbytes, pool=pool), key=reason)
        return reason

    def take_later(self, nbytes: int, step: int) -> PoolBlock | None:
        """Wait for a free block of the pool, as long as the settings allow. Return None if no block becomes free."""
        self._before_wait()
        settings = self._settings
        if settings.policy != "wait":
            return None
        return self._pool.take_or_wait(
            nbytes, step=step, per_step_s=settings.wait_s_per_step, stalled_s=settings.wait_s_stalled,
            per_run_s=settings.wait_s_per_run,
        )  # fmt: skip

    def say_if_too_large(self, parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Warn if the largest of some named parameters has more bytes than the pool."""
        nbytes, name = max(((local_bytes(parameter), name) for name, parameter in parameters), default=(0, ""))
        if nbytes > self._pool.capacity_bytes:
            self._events.add("too_large", _NO_ROOM["too_large"].format(where=name, nbytes=nbytes, pool=self._pool))


_NO_ROOM = {
    "too_large": "{where} has {nbytes} bytes, more than the pool ({pool.capacity_bytes}): no copy of it is recorded; "
    "raise RECORDER_POOL_BYTES or select less",
    "pool_full": "the pool ({pool.capacity_bytes} bytes) is full: values are dropped and counted until half of it is "
    "free; a faster disk, a larger RECORDER_POOL_BYTES or fewer values help",
    "ring_full": "the ring ({pool.capacity_bytes} bytes) is full: values that no trigger has asked for are dropped and "
    "counted until steps have passed; a larger RECORDER_POOL_BYTES or RECORDER_RING_SHARE, a smaller before=, or fewer "
    "values (call=0:4 leaves most of an evaluation out) help",
}
