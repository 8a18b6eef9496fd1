"""Turns the probe's numbers of many steps into rows, one for each value. Section 3 of FORMAT.md describes them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ...records import ProbedSeries
from ...sites import AT_LEAST

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
