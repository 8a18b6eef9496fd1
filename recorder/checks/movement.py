"""How far a value moved from record to record, as its statistics tell. Knows of no file."""

from __future__ import annotations

import numpy as np

from .rows import Floats, Memory, Rows, previous

EXACT = ("sum", "sum_sq", "min", "max")
"""Statistics that are all equal where two tensors are; two that differ in one element hardly ever agree in all."""


class Movement:
    """Changes of values from record to record, over their size."""

    def __init__(self) -> None:
        self._norm, self._sum, self._step = Memory(), Memory(), Memory()

    def ratio(self, rows: Rows) -> Floats:
        """How far each value moved for each step since the record before, over its norm; NaN where nothing tells.

        The norm and the sum tell the least that it moved, and never more. Rows stand lane by lane.
        """
        lanes, steps = rows.lanes, rows.steps.astype(np.float64)
        is_finite = np.nan_to_num(rows["nan_count"]) + np.nan_to_num(rows["inf_count"]) == 0
        norm, total = np.where(is_finite, np.sqrt(rows["sum_sq"]), np.nan), rows["sum"]
        before = previous(lanes, norm, self._norm)
        by_sum = np.abs(total - previous(lanes, total, self._sum)) / np.sqrt(np.maximum(rows["numel"], 1))
        moved = np.fmax(np.abs(norm - before), by_sum)
        gap = np.fmax(steps - previous(lanes, steps, self._step), 1)
        with np.errstate(all="ignore"):
            return np.asarray(moved / gap / before)
