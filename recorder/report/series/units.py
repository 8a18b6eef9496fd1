"""How large the units of each series are over steps, sorted: from the largest unit of a layer to the least.

A unit is judged by its root mean square. Those of each rank are sorted on their own, and a position in that order shows
the mean over ranks and calls: so it makes no difference whether ranks hold different units or values of the same ones.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ...columns import parse_shape
from ...errors import RunError
from ...numerics.moments import integers
from ...numerics.units import Units
from ..blocks import Block
from .thinned import StepsCollector

_NUM_QUANTILES = 33
"""Positions among the sorted units, both ends included."""
_MAX_CELLS = 1_000_000
_LEVELS = 254


class _Collected(NamedTuple):
    """What is drawn of the units of a series at a step."""

    squares: list[npt.NDArray[np.float64]]
    """For each rank and call, the mean squares of the units at the positions that are drawn."""
    about: tuple[int, int, int, int]
    """How many units there are, how many of them are dead, which is the largest, and how many have no finite value but
    zeros, by the first rank and call."""


class UnitsCollector(StepsCollector[_Collected]):
    """Collects them range by range of steps, of no more steps and ranks than are drawn."""

    column = "units"
    max_collected = _MAX_CELLS // _NUM_QUANTILES

    def _take(self, table: Any, series: list[int]) -> None:
        columns = [table.column(name).to_pylist() for name in ("step", "units", "shape")]
        num_nonfinite = integers(table.column("nan_count"), 0) + integers(table.column("inf_count"), 0)
        for number, step, data, shape, is_nonfinite in zip(series, *columns, num_nonfinite > 0, strict=True):
            try:
                one = Units.from_bytes(data, parse_shape(shape))
            except RunError:
                continue  # `recorder verify` tells of it
            if not len(one):
                continue
            squares = one.sum_sq / max(1, one.num_values)
            indices = np.rint(np.linspace(len(one) - 1, 0, _NUM_QUANTILES)).astype(int)
            num_dead = int((one.zero_count == one.num_values).sum()) if one.num_values else 0
            largest = int(np.argmax(squares))
            lacks = is_nonfinite & (one.sum_sq == 0) & (one.zero_count < one.num_values)  # sums are of finite values
            squares = np.where(lacks, np.nan, squares)  # which sorts as the largest
            about = len(one), num_dead, largest, int(lacks.sum())
            collected = self._collected.setdefault((number, step), _Collected([], about))
            collected.squares.append(np.sort(squares)[indices])

    def block(self, name: str) -> Block | None:
        """The sorted sizes of all series that have units; None where none has."""
        if not self._collected:
            return None
        numbers = sorted({number for number, _ in self._collected})
        column_of = {step: index for index, step in enumerate(self.steps)}
        row_of = {number: index for index, number in enumerate(numbers)}
        sizes = np.full((len(numbers), len(self.steps), _NUM_QUANTILES), np.nan)
        about = np.zeros((len(numbers), len(self.steps), 4), np.int32)
        for (number, step), one in self._collected.items():
            at = row_of[number], column_of[step]
            sizes[at] = np.sqrt(np.mean(one.squares, axis=0))
            about[at] = one.about
        with np.errstate(divide="ignore", invalid="ignore"):
            exponents = np.log2(np.where(np.isfinite(sizes), sizes, np.nan))
        known = exponents[np.isfinite(exponents)]
        low, high = (float(known.min()), float(known.max())) if known.size else (0.0, 0.0)
        level = 2 + np.rint((exponents - low) / max(high - low, 1e-9) * (_LEVELS - 1))
        codes = np.where(sizes == 0, 1, np.where(np.isfinite(level), level, 0)).astype(np.uint8)
        data = {
            "series": numbers, "steps": self.steps, "ranks": self.ranks, "shape": list(codes.shape),
            "low": low, "high": high, "levels": _LEVELS,
        }  # fmt: skip
        return Block(name=name, data=data, arrays={"codes": codes, "about": about})
