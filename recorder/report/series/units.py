"""How large the units of each series are over steps, sorted: from the largest unit of a layer to the least.

A unit is judged by its root mean square. Those of each rank are sorted on their own, and a place among them shows the
mean over ranks and calls: so it makes no difference whether ranks hold different units or values of the same ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ...errors import RunError
from ...format.numbers.units import Units
from ...read.shards.decode import parse_shape
from ..blocks import Block
from .thinned import ThinnedSteps

_MAX_RANKS = 8
_NUM_PLACES = 33
"""Places among the sorted units, both ends included."""
_MAX_CELLS = 1_000_000
_MAX_COLUMNS = 60
_LEVELS = 254


class UnitsCollector:
    """Collects them range by range of steps, of no more steps and ranks than are drawn."""

    def __init__(self, steps: list[int], ranks: list[int], num_series: int) -> None:
        """Choose the steps and ranks.

        Args:
            steps: all that there are, ascending.
            ranks: all that there are.
            num_series: whose numbers are from 0.
        """
        count = max(min(len(steps), _MAX_COLUMNS, _MAX_CELLS // (max(num_series, 1) * _NUM_PLACES)), min(len(steps), 2))
        places = np.unique(np.linspace(0, len(steps) - 1, count).astype(int)) if steps else np.zeros(0, int)
        self.steps = [steps[place] for place in places.tolist()]
        self.ranks = ranks[:: -(-len(ranks) // _MAX_RANKS)] if ranks else []
        self._sizes: dict[tuple[int, int], list[npt.NDArray[np.float64]]] = {}
        """By series and step: of each rank and call the mean squares of the units in the places that are drawn."""
        self._about: dict[tuple[int, int], list[int]] = {}
        """By series and step: how many units there are, how many of them are dead, and which is the largest."""

    def add(self, table: Any, number_of: Callable[[Any], Any]) -> None:
        """Rows of a range of steps; `number_of` gives the series of each, -1 for none."""
        wanted = pc.and_(
            pc.is_valid(table.column("units")), pc.is_in(table.column("step"), pa.array(self.steps, pa.int64()))
        )
        if self.ranks:
            ranks = table.column("rank")
            wanted = pc.and_(wanted, pc.or_(pc.is_null(ranks), pc.is_in(ranks, pa.array(self.ranks, ranks.type))))
        some = table.filter(wanted)
        if not some.num_rows:
            return
        columns = [some.column(name).to_pylist() for name in ("step", "units", "shape")]
        for number, step, data, shape in zip(number_of(some).tolist(), *columns, strict=True):
            if number < 0:
                continue
            try:
                one = Units.from_bytes(data, parse_shape(shape))
            except RunError:
                continue  # `recorder verify` tells of it
            if len(one):
                self._take(number, step, one)

    def _take(self, number: int, step: int, one: Units) -> None:
        """Keep what is drawn of the units of a row."""
        squares = one.sum_sq / max(1, one.num_values)
        places = np.rint(np.linspace(len(one) - 1, 0, _NUM_PLACES)).astype(int)
        self._sizes.setdefault((number, step), []).append(np.sort(squares)[places])
        num_dead = int((one.zero_count == one.num_values).sum()) if one.num_values else 0
        self._about.setdefault((number, step), [len(one), num_dead, int(np.argmax(squares))])

    def block(self, name: str) -> Block | None:
        """The sorted sizes of all series that have units; None where none has."""
        if not self._sizes:
            return None
        numbers = sorted({number for number, _ in self._sizes})
        column_of = {step: place for place, step in enumerate(self.steps)}
        place_of = {number: place for place, number in enumerate(numbers)}
        sizes = np.full((len(numbers), len(self.steps), _NUM_PLACES), np.nan)
        about = np.zeros((len(numbers), len(self.steps), 3), np.int32)
        for (number, step), rows in self._sizes.items():
            at = place_of[number], column_of[step]
            sizes[at] = np.sqrt(np.mean(rows, axis=0))
            about[at] = self._about[number, step]
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


class GrowingUnits(UnitsCollector):
    """Units of a run to which steps are added."""

    def __init__(self, steps: list[int], ranks: list[int], num_series: int) -> None:
        super().__init__([], ranks, num_series)
        self._thinned = ThinnedSteps(_MAX_COLUMNS)

    def add(self, table: Any, number_of: Callable[[Any], Any]) -> None:
        """Rows of steps behind all those that were added before."""
        if self._thinned.see(table, "units"):
            kept = self._thinned.steps
            self._sizes = {key: rows for key, rows in self._sizes.items() if key[1] in kept}
            self._about = {key: numbers for key, numbers in self._about.items() if key[1] in kept}
        self.steps = self._thinned.steps
        super().add(table, number_of)
