"""Turns the probe's numbers of many steps into rows, one for each value. Section 3 of FORMAT.md describes them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ...records import KEEP_TENSOR, ProbedSeries, SeenValue, StepPosition, ValuePlace
from ...sites import AT_LEAST, PROBE

BLOCK_STEPS = 64
_BLOCK_S = 30.0
"""The longest time of a block, in seconds. A killed process loses the numbers of this time and of the current step."""

_FLOAT32_MAX = float(np.finfo(np.float32).max)
_L2, _NUM_NAN, _NUM_INF, _NUMEL = range(4)
"""The rows of the payload of a value that was not finite, or changed its size, in the block. Others only have norms."""
_BAD = slice(_NUM_NAN, _NUM_INF + 1)


class StepNumbers(NamedTuple):
    """The probe's numbers of one step. Each value has one column: an index into the arrays."""

    step: int
    sums: npt.NDArray[np.float64]
    """For each value, the sum of the squares of its finite elements; NaN where a value on a device was not finite."""
    numels: npt.NDArray[np.float64]
    """For each value, the number of elements that were seen at this step. 0 if the value was not seen."""
    bad: dict[int, tuple[int, int]]
    """For each column (one value) with non-finite elements, the number of NaN and the number of infinite elements."""


def block_rows(
    columns: Sequence[ProbedSeries], steps: Sequence[StepNumbers]
) -> Iterator[tuple[int, torch.Tensor, str]]:
    """Yield index, payload and note of a row for each column (one value) that was seen at a step of the block."""
    every = steps[1].step - steps[0].step if len(steps) > 1 else 1
    block = np.zeros((4, len(columns), len(steps)))
    for at, one in enumerate(steps):
        block[_L2, : len(one.sums), at] = np.sqrt(one.sums)
        block[_NUMEL, : len(one.sums), at] = one.numels
        for column, counts in one.bad.items():
            block[_BAD, column, at] = counts
    is_there = block[_NUMEL] > 0
    most = block[_NUMEL].max(axis=1)
    has_norm_alone = (np.where(is_there, block[_NUMEL], np.inf).min(axis=1) == most) & ~block[_BAD].any(axis=(0, 2))
    norms = np.where(is_there, block[_L2], np.nan)
    is_narrow = np.fmax.reduce(norms, axis=1) < _FLOAT32_MAX
    with np.errstate(over="ignore"):
        narrow = norms.astype(np.float32)
    notes: dict[tuple[Any, ...], str] = {}
    for column in np.flatnonzero(most).tolist():
        facts = columns[column].facts
        if has_norm_alone[column]:
            values = torch.from_numpy((narrow if is_narrow[column] else norms)[column])
            facts = facts | {"numel": int(most[column])}
        else:
            values = torch.from_numpy(block[:, column].copy())
            if np.isnan(block[_L2, column]).any():
                facts = facts | {"counts": AT_LEAST}
        key = tuple(facts.items())
        note = notes.get(key)
        if note is None:
            of_row = facts if every == 1 else facts | {"every": every}
            note = notes[key] = json.dumps(of_row, separators=(",", ":"))
        yield column, values, note


class ProbeBlock:
    """The steps of the block under way, in order. The last step has the most columns. Used under the probe's lock."""

    def __init__(self, columns: Sequence[ProbedSeries], observe: Callable[..., None]) -> None:
        """Begin empty. The probe adds to `columns`; `observe` records a tensor, as `Capture.observe` does."""
        self._columns, self._observe = columns, observe
        self._origins: list[ValuePlace] = []
        """For each column (one value) recorded before, the origin (module and name) of its rows of site ``probe``."""
        self._steps: list[StepNumbers] = []
        self._began_s = 0.0

    def make_room(self, step: int) -> None:
        """Record the block if `step` does not follow its steps at their distance."""
        done = self._steps
        if (len(done) > 1 and step - done[-1].step != done[1].step - done[0].step) or (done and step <= done[-1].step):
            self.record()
        if not self._steps:
            self._began_s = time.monotonic()

    def append(self, numbers: StepNumbers) -> None:
        """Append a step for which `make_room` has made room, and record the block if it is full or old."""
        self._steps.append(numbers)
        if len(self._steps) == BLOCK_STEPS or self.is_old:
            self.record()

    @property
    def is_old(self) -> bool:
        """Whether the block is older than `_BLOCK_S`. Any thread may ask."""
        return bool(self._steps) and time.monotonic() - self._began_s > _BLOCK_S

    def record(self) -> None:
        """Record the block, one row for each value, and begin a new one."""
        steps, self._steps = self._steps, []
        if not steps:
            return
        for its in self._columns[len(self._origins) :]:
            name = f"{its.origin.site} {its.origin.name}" if its.origin.name else its.origin.site
            self._origins.append(its.origin._replace(site=PROBE, name=name))
        moments = {mode: StepPosition(steps[0].step, None, mode) for mode in {its.mode for its in self._columns}}
        for column, values, note in block_rows(self._columns, steps):
            its, origin = self._columns[column], self._origins[column]
            moment = moments[its.mode]
            self._observe(SeenValue(origin, moment, its.phase, scope=its.scope, note=note), KEEP_TENSOR, values)
