"""How the values of each series are spread over steps: which share of them has which sign and power of two.

Counts of the ranks' rows are added, so that a replica weighs as much on each rank; shares do not change by it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ...analyze.moments import integers
from ...errors import CorruptError
from ...format.numbers.histogram import Histogram
from ..blocks import Block
from .thinned import ThinnedSteps

_MAX_RANKS = 8
_LOWEST, _HIGHEST = -60, 40
"""Exponents that have a bin of their own; what is outside counts with the outermost."""
_NUM_BINS = _HIGHEST - _LOWEST + 1
_MAX_CELLS = 1_500_000
_MAX_COLUMNS = 60
_LEAST_SHARE = 1e-6
_LEVELS = 31


class HistogramCollector:
    """Collects them range by range of steps, of no more steps and ranks than are drawn."""

    def __init__(self, steps: list[int], ranks: list[int], num_series: int) -> None:
        """Choose the steps and ranks.

        Args:
            steps: all that there are, ascending.
            ranks: all that there are.
            num_series: whose numbers are from 0.
        """
        room = _MAX_CELLS // (max(num_series, 1) * (2 * _NUM_BINS + 1))
        count = max(min(len(steps), _MAX_COLUMNS, room), min(len(steps), 2))
        places = np.unique(np.linspace(0, len(steps) - 1, count).astype(int)) if steps else np.zeros(0, int)
        self.steps = [steps[place] for place in places.tolist()]
        self.ranks = ranks[:: -(-len(ranks) // _MAX_RANKS)] if ranks else []
        self._found: dict[tuple[int, int], Any] = {}
        """By series and step: the bins of the negative values from the largest magnitude on, zeros, the positive."""

    def add(self, table: Any, number_of: Callable[[Any], Any]) -> None:
        """Rows of a range of steps; `number_of` gives the series of each, -1 for none."""
        wanted = pc.and_(
            pc.is_valid(table.column("histogram")), pc.is_in(table.column("step"), pa.array(self.steps, pa.int64()))
        )
        if self.ranks:
            ranks = table.column("rank")
            wanted = pc.and_(wanted, pc.or_(pc.is_null(ranks), pc.is_in(ranks, pa.array(self.ranks, ranks.type))))
        some = table.filter(wanted)
        if not some.num_rows:
            return
        series, steps, zeros = number_of(some), integers(some.column("step")), integers(some.column("zero_count"), 0)
        packed = some.column("histogram").to_pylist()
        for number, step, num_zeros, data in zip(series.tolist(), steps.tolist(), zeros.tolist(), packed, strict=True):
            if number < 0:
                continue
            try:
                one = Histogram.from_bytes(data)
            except CorruptError:
                continue  # `recorder verify` tells of it
            line = self._found.setdefault((number, step), np.zeros(2 * _NUM_BINS + 1))
            at = np.clip(one.exponents, _LOWEST, _HIGHEST) - _LOWEST
            np.add.at(line, _NUM_BINS - 1 - at, one.counts[0])
            line[_NUM_BINS] += num_zeros
            np.add.at(line, _NUM_BINS + 1 + at, one.counts[1])

    def block(self, name: str) -> Block | None:
        """Shares of all series that have histograms; None where none has."""
        if not self._found:
            return None
        numbers = sorted({number for number, _ in self._found})
        place_of: Mapping[int, int] = {number: place for place, number in enumerate(numbers)}
        column_of: Mapping[int, int] = {step: place for place, step in enumerate(self.steps)}
        shares = np.zeros((len(numbers), len(self.steps), 2 * _NUM_BINS + 1), np.float32)
        for (number, step), line in self._found.items():
            shares[place_of[number], column_of[step]] = line / max(line.sum(), 1.0)
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


class GrowingHistograms(HistogramCollector):
    """Histograms of a run to which steps are added."""

    def __init__(self, steps: list[int], ranks: list[int], num_series: int) -> None:
        super().__init__([], ranks, num_series)
        self._thinned = ThinnedSteps(_MAX_COLUMNS)

    def add(self, table: Any, number_of: Callable[[Any], Any]) -> None:
        """Rows of steps behind all those that were added before."""
        if self._thinned.see(table, "histogram"):
            self._found = {key: line for key, line in self._found.items() if key[1] in self._thinned.steps}
        self.steps = self._thinned.steps
        super().add(table, number_of)
