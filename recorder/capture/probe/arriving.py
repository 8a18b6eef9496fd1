"""The steps that are over and whose numbers are still on their way to the host, and what has turned NaN or infinite.

Called on training threads, under the lock of the probe. Only a flush waits for a device.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from itertools import compress
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ...records import LostError, StepPosition, ValuePlace
from ...sites import UPDATE, may_mask, may_overflow
from ...system.text import value_in_words
from .device_probe import DeviceProbe, NormsOnWay, SeenOnDevice
from .probe_rows import StepNumbers


class _ArrivingStep(NamedTuple):
    """The numbers of a step that is over, with the norms that are still on their way to the host."""

    numbers: StepNumbers
    on_way: list[NormsOnWay]


class TurnedValues:
    """The values that are not finite, each of which is reported once until it is finite again."""

    def __init__(self, on_trouble: Callable[[str, str], None]) -> None:
        self._on_trouble = on_trouble
        self.were_bad: dict[int, tuple[bool, float]] = {}
        """For each column (one value) that was not finite when last seen: whether it had a NaN, and the largest
        fraction of elements that was infinite."""
        self.spoilt: dict[int, tuple[SeenOnDevice, bool]] = {}
        """For each column, the last update that was not finite, and whether that update was NaN."""

    def has_turned(self, column: int, has_nan: bool, share: float) -> bool:
        """Remember that a value is not finite. Return True for its first NaN, or for more infinities than before."""
        had_nan, share_before = self.were_bad.get(column, (False, 0.0))
        now = self.were_bad[column] = had_nan or has_nan, max(share_before, share)
        return now != (had_nan, share_before)

    def tell(self, origin: ValuePlace, moment: StepPosition, *, is_nan: bool) -> None:
        """Report a value that turned NaN or infinite, unless it is a gradient (`GradScaler` seeks these) or a mask."""
        if not may_overflow(origin.site) and (is_nan or not may_mask(origin.site, origin.name)):
            where = value_in_words(*origin[1:4])
            mode = "" if moment.mode == "train" else f" in {moment.mode} mode"
            turned = f"turned {'NaN' if is_nan else 'infinite'} at step {moment.step}"
            self._on_trouble(origin.root, f"{where}{mode} {turned}")

    def forget_recovered(self, numels: npt.NDArray[np.float64], bad: Mapping[int, object]) -> None:
        """Forget that values were not finite if they were seen at a step (`numels` is not 0) and were finite then."""
        if self.were_bad:
            self.were_bad = {c: how for c, how in self.were_bad.items() if c in bad or not numels[c : c + 1].any()}


class ArrivingSteps:
    """The steps that are over, in order, until the norms of all their values have arrived."""

    def __init__(self, on_device: DeviceProbe, turned: TurnedValues) -> None:
        self._on_device, self._turned = on_device, turned
        self._steps: deque[_ArrivingStep] = deque()

    def add(self, numbers: StepNumbers) -> None:
        """Take the numbers of a step that ends, and begin to copy its norms from devices."""
        self._steps.append(_ArrivingStep(numbers, self._on_device.bring()))

    def arrived(self, until_s: float = 0.0) -> Iterator[StepNumbers]:
        """Yield, in order, the steps whose numbers have all arrived. Wait for numbers until `until_s` (monotonic)."""
        while self._steps:
            numbers, on_way = self._steps[0]
            while on_way:
                try:
                    if not on_way[0].has_arrived():
                        if time.monotonic() > until_s:
                            return
                        time.sleep(0.001)
                        continue
                    self._add_norms(on_way[0].seen, on_way[0].read(), numbers)
                except LostError:
                    pass  # the norms are lost, so the values count as not seen at this step
                on_way.pop(0).block.release()
            self._steps.popleft()
            yield numbers

    def _add_norms(self, seen: list[SeenOnDevice], norms: npt.NDArray[np.float32], numbers: StepNumbers) -> None:
        squares = np.square(norms.astype(np.float64))
        if not np.isfinite(squares).all():  # a non-finite update shows in the parameter's row
            is_counted = np.isfinite(squares) | np.array([one.value.origin.site != UPDATE for one in seen])
            for i in np.flatnonzero(~is_counted).tolist():
                self._turned.spoilt[seen[i].value.column] = seen[i]._replace(has_row=False), bool(np.isnan(norms[i]))
            seen, norms, squares = list(compress(seen, is_counted)), norms[is_counted], squares[is_counted]
        columns = np.array([one.value.column for one in seen])
        numels = np.array([one.value.numel for one in seen], np.float64)
        np.add.at(numbers.sums, columns, squares)
        np.add.at(numbers.numels, columns, numels)
        told = set()
        for i in np.flatnonzero(~np.isfinite(squares)).tolist():
            one, is_nan = seen[i], bool(np.isnan(norms[i]))
            column = one.value.column
            had_nan, had_inf = numbers.bad.get(column, (0, 0))
            numbers.bad[column] = max(had_nan, int(is_nan)), max(had_inf, int(not is_nan))
            numbers.sums[column] = np.nan
            if self._turned.has_turned(column, is_nan, float(not is_nan)) and column not in told:
                told.add(column)  # one row a step: a second row would have the same key
                self._turned.tell(one.value.origin, one.moment, is_nan=is_nan)
                self._on_device.record_turned(one, is_nan=is_nan)
        there = np.zeros(len(numbers.numels))
        there[columns] = 1
        self._turned.forget_recovered(there, numbers.bad)
