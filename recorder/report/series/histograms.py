"""How the values of each series are spread over steps: the shares by sign and power of two, and what is not finite.

Counts of the ranks' rows are added, so that a replica weighs as much on each rank; shares do not change by it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ...errors import CorruptError
from ...numerics.histogram import Histogram
from ...numerics.moments import integers
from ..blocks import Block
from .thinned import StepsCollector

_LOWEST, _HIGHEST = -60, 40
"""Exponents that have a bin of their own; what is outside counts with the outermost."""
_NUM_BINS = _HIGHEST - _LOWEST + 1
_NUM_COLLECTED = 2 * _NUM_BINS + 2
_MAX_CELLS = 1_500_000
_LEAST_SHARE = 1e-6
_LEVELS = 31


class HistogramCollector(StepsCollector[npt.NDArray[np.float64]]):
    """Collects the bins of each: negative values from the largest magnitude on, zeros, positive, not finite."""

    column = "histogram"
    max_collected = _MAX_CELLS // _NUM_COLLECTED

    def _take(self, table: Any, series: list[int]) -> None:
        steps, zeros = integers(table.column("step")), integers(table.column("zero_count"), 0)
        nonfinite = integers(table.column("nan_count"), 0) + integers(table.column("inf_count"), 0)
        packed = table.column("histogram").to_pylist()
        counts = zip(steps.tolist(), zeros.tolist(), nonfinite.tolist(), packed, strict=True)
        for number, (step, num_zeros, num_nonfinite, data) in zip(series, counts, strict=True):
            try:
                one = Histogram.from_bytes(data)
            except CorruptError:
                continue  # `recorder verify` tells of it
            line = self._collected.setdefault((number, step), np.zeros(_NUM_COLLECTED))
            at = np.clip(one.exponents, _LOWEST, _HIGHEST) - _LOWEST
            np.add.at(line, _NUM_BINS - 1 - at, one.counts[0])
            line[_NUM_BINS] += num_zeros
            np.add.at(line, _NUM_BINS + 1 + at, one.counts[1])
            line[-1] += num_nonfinite

    def block(self, name: str) -> Block | None:
        """Shares of all series that have histograms; None where none has."""
        if not self._collected:
            return None
        numbers = sorted({number for number, _ in self._collected})
        row_of: Mapping[int, int] = {number: index for index, number in enumerate(numbers)}
        column_of: Mapping[int, int] = {step: index for index, step in enumerate(self.steps)}
        shares = np.zeros((len(numbers), len(self.steps), _NUM_COLLECTED), np.float32)
        for (number, step), line in self._collected.items():
            shares[row_of[number], column_of[step]] = line / max(line.sum(), 1.0)
        codes = _codes(shares)
        nonfinite, codes = np.ascontiguousarray(codes[:, :, -1]), codes[:, :, :-1]
        used = np.flatnonzero(codes.any(axis=(0, 1)))
        first, last = (int(used[0]), int(used[-1]) + 1) if len(used) else (_NUM_BINS, _NUM_BINS + 1)
        codes = np.ascontiguousarray(codes[:, :, first:last])
        data = {
            "series": numbers, "steps": self.steps, "ranks": self.ranks, "levels": _LEVELS, "least": _LEAST_SHARE,
            "shape": list(codes.shape), "first": first, "zero": _NUM_BINS, "lowest": _LOWEST,
        }  # fmt: skip
        return Block(name=name, data=data, arrays={"codes": codes, "nonfinite": nonfinite})


def _codes(shares: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    """How large shares are, by their logarithm; 0 for none."""
    with np.errstate(divide="ignore"):
        level = 1 + np.rint((1 - np.log(shares) / np.log(_LEAST_SHARE)) * (_LEVELS - 1))
    return np.where(shares > 0, np.clip(level, 1, _LEVELS), 0).astype(np.uint8)
