"""Steps that are drawn of a run to which more are added: all of the first, then every second one, and so on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow.compute as pc


class ThinnedSteps:
    """At most so many of the steps that were seen, evenly apart."""

    def __init__(self, max_steps: int) -> None:
        self._max_steps = max_steps
        self._num_seen, self._stride, self._last = 0, 1, -1
        self.steps: list[int] = []

    def see(self, table: Any, column: str) -> bool:
        """Look at the steps of rows that have a column, behind all before; whether steps that were kept are no more."""
        return self._add(sorted(pc.unique(table.filter(pc.is_valid(table.column(column))).column("step")).to_pylist()))

    def _add(self, steps: Sequence[int]) -> bool:
        is_thinner = False
        for step in steps:
            if step <= self._last:
                continue
            self._last = step
            if self._num_seen % self._stride == 0:
                self.steps.append(step)
            self._num_seen += 1
            if len(self.steps) > self._max_steps:
                self.steps, self._stride, is_thinner = self.steps[::2], 2 * self._stride, True
        return is_thinner
