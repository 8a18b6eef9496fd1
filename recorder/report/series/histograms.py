"""How the values of each series are spread over steps: which share of them has which sign and power of two.

Counts of the ranks' rows are added, so that a replica weighs as much on each rank; shares do not change by it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ...analyze.moments import integers
from ...errors import CorruptError
from ...format.numbers.histogram import Histogram
from ..blocks import Block
from .thinned import StepsCollector

_LOWEST, _HIGHEST = -60, 40
"""Exponents that have a bin of their own; what is outside counts with the outermost."""
_NUM_BINS = _HIGHEST - _LOWEST + 1
_MAX_CELLS = 1_500_000
_LEAST_SHARE = 1e-6
_LEVELS = 31


class HistogramCollector(StepsCollector[npt.NDArray[np.float64]]):
    """Collects the bins of each: of the negative values from the largest magnitude on, zeros, the positive."""

    column = "histogram"
    max_collected = _MAX_CELLS // (2 * _NUM_BINS + 1)

    def _take(self, table: Any, series: list[int]) -> None:
        steps, zeros = integers(table.column("step")), integers(table.column("zero_count"), 0)
        packed = table.column("histogram").to_pylist()
        for number, step, num_zeros, data in zip(series, steps.tolist(), zeros.tolist(), packed, strict=True):
            try:
                one = Histogram.from_bytes(data)
            except CorruptError:
                continue  # `recorder verify` tells of it
            line = self._collected.setdefault((number, step), np.zeros(2 * _NUM_BINS + 1))
            at = np.clip(one.exponents, _LOWEST, _HIGHEST) - _LOWEST
            np.add.at(line, _NUM_BINS - 1 - at, one.counts[0])
            line[_NUM_BINS] += num_zeros
            np.add.at(line, _NUM_BINS + 1 + at, one.counts[1])

    def block(self, name: str) -> Block | None:
        """Shares of all series that have histograms; None where none has."""
        if not self._collected:
            return None
        numbers = sorted({number for number, _ in self._collected})
        row_of: Mapping[int, int] = {number: index for index, number in enumerate(numbers)}
        column_of: Mapping[int, int] = {step: index for index, step in enumerate(self.steps)}
        shares = np.zeros((len(numbers), len(self.steps), 2 * _NUM_BINS + 1), np.float32)
        for (number, step), line in self._collected.items():
            shares[row_of[number], column_of[step]] = line / max(line.sum(), 1.0)
        used = np.flatnonzero(shares.any(axis=(0, 1)))
        first, last = (int(used[0]), int(used[-1]) + 1) if len(used) else (_NUM_BINS, _NUM_BINS + 1)
        shares = shares[:, :, first:last]
        with np.errstate(divide="ignore"):
            level = 1 + np.rint((1 - np.log(shares) / np.log(_LEAST_SHARE)) * (_LEVELS - 1))
        codes = np.where(shares > 0, np.clip(level, 1, _LEVELS), 0).astype(np.uint8)
        data = {
            "series": numbers, "steps": self.steps, "ranks": self.ranks, "levels": _LEVELS, "least": _LEAST_SHARE,
            "shape": list(codes.shape), "first": first, "zero": _NUM_BINS, "lowest": _LOWEST,
        }  # fmt: skip
        return Block(name=name, data=data, arrays={"codes": np.ascontiguousarray(codes)})
