"""The rows of a block of the probe: for each value its numbers at the steps of the block (section 3 of FORMAT.md)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ..records import ProbedSeries
from ..sites import AT_LEAST

_FLOAT32_MAX = float(np.finfo(np.float32).max)
_L2, _NUM_NAN, _NUM_INF, _NUMEL = range(4)
"""The rows of the payload of a value that was not finite, or whose number of elements changed."""
_BAD = slice(_NUM_NAN, _NUM_INF + 1)


class StepNumbers(NamedTuple):
    """The numbers of one step, by column."""

    step: int
    sums: npt.NDArray[np.float64]
    """The sum of the squares of the finite elements; NaN where a value on a device was not finite."""
    numels: npt.NDArray[np.float64]
    """The elements that were seen; 0 where the value was not seen at this step."""
    bad: dict[int, tuple[int, int]]
    """The NaN and the infinite elements of the columns that have some."""


def block_rows(
    columns: Sequence[ProbedSeries], steps: Sequence[StepNumbers]
) -> Iterator[tuple[int, torch.Tensor, str]]:
    """Yield the number of each column that was seen at one of the steps, with the payload and the note of its row."""
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
        narrow = torch.from_numpy(norms.astype(np.float32)).unbind()
    notes: dict[tuple[Any, ...], str] = {}
    for column in np.flatnonzero(most).tolist():
        facts = columns[column].facts
        if has_norm_alone[column]:
            values = narrow[column] if is_narrow[column] else torch.from_numpy(norms[column])
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
