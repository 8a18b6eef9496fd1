"""The part of the pool in which values wait for a trigger, and what they need of it.

The training thread takes blocks here and never waits for any: values that wait are given back as steps pass, and not
by a writer that catches up.
"""

from __future__ import annotations

from collections.abc import Callable

from ...records import Moment
from ...rules import RingWindow
from ...system.text import size
from .pool import GRAIN_BYTES, Pool, PoolBlock


class RingMemory:
    """The share of the pool that belongs to the ring. The training thread calls all methods."""

    def __init__(self, pool: Pool, window: RingWindow, *, is_wanted: Callable[[int], bool]) -> None:
        """Begin with nothing taken.

        Args:
            pool: the share.
            window: the steps around a trigger that the ring is to hold.
            is_wanted: whether a trigger has asked for a step, so that it is on its way to the disk like any other.
        """
        self.pool = pool
        self.window = window
        self.is_wanted = is_wanted
        self._first: int | None = None
        """The first step of training of which a value came."""
        self._step_bytes = 0
        """What training took in that step, or would have."""
        self._is_judged = False

    def take(self, nbytes: int, moment: Moment) -> PoolBlock | None:
        """Take a block; None where there is no room, which only steps that pass can make."""
        if not self._is_judged and moment.mode == "train":  # an evaluation before training is no measure of a step
            if self._first is None:
                self._first = moment.step
            if moment.step == self._first:
                self._step_bytes += -(-nbytes // GRAIN_BYTES) * GRAIN_BYTES or GRAIN_BYTES
        return self.pool.take(nbytes)

    def judge(self, step: int, num_steps: Callable[[int, int], int]) -> str | None:
        """Judge, once the first step is over, whether the window fits; return why not.

        Args:
            step: the step that begins.
            num_steps: returns at how many of so many steps from a step on the rules keep values in the ring.
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
