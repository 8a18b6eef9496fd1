"""What is drawn of no more steps and ranks than there is room for, of a run that is whole or of one that grows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ...numerics.keys import Integers

_MAX_RANKS = 8
_MAX_STEPS = 60
T = TypeVar("T")


class ThinnedSteps:
    """Steps that are drawn of a run to which more are added: all of the first, then every second one, and so on."""

    def __init__(self) -> None:
        self._num_seen, self._stride, self._last = 0, 1, -1
        self.steps: list[int] = []

    def see(self, steps: Sequence[int]) -> None:
        """Look at some more, ascending; those that are not behind all before were seen already."""
        for step in steps:
            if step <= self._last:
                continue
            self._last = step
            if self._num_seen % self._stride == 0:
                self.steps.append(step)
            self._num_seen += 1
            if len(self.steps) > _MAX_STEPS:
                self.halve()

    def halve(self) -> None:
        """Leave out every second one from now on."""
        self.steps, self._stride = self.steps[::2], 2 * self._stride


class StepsCollector(ABC, Generic[T]):
    """Collects what one column says, range by range of steps, of no more steps and ranks than are drawn."""

    column: str
    """Of rows that have it."""
    max_collected: int
    """For how many values, each of a series at a step, there is room; there is for two steps in any case."""

    def __init__(self, steps: Sequence[int] | None, ranks: Sequence[int], num_series: int) -> None:
        """Choose the steps and ranks.

        Args:
            steps: all that there are, ascending; None where more and more come.
            ranks: all that there are.
            num_series: whose numbers are from 0, where the steps are known.
        """
        self._thinned = ThinnedSteps() if steps is None else None
        room = min(len(steps or ()), _MAX_STEPS, self.max_collected // max(num_series, 1))
        count = max(room, min(len(steps or ()), 2))
        indices = np.unique(np.linspace(0, len(steps or ()) - 1, count).astype(int)).tolist() if count else []
        self.steps = [] if steps is None else [steps[index] for index in indices]
        self.ranks = list(ranks[:: -(-len(ranks) // _MAX_RANKS)]) if ranks else []
        self._collected: dict[tuple[int, int], T] = {}
        """By series and step."""

    def add(self, table: Any, number_of: Callable[[Any], Integers]) -> None:
        """Rows of a range of steps behind all before; `number_of` gives the series of each, -1 for none."""
        some = table.filter(pc.is_valid(table.column(self.column)))
        if self._thinned is not None:
            self._thinned.see(sorted(pc.unique(some.column("step")).to_pylist()))
            self._keep(self._thinned.steps)
        wanted = pc.is_in(some.column("step"), pa.array(self.steps, pa.int64()))
        if self.ranks:
            ranks = some.column("rank")
            wanted = pc.and_(wanted, pc.or_(pc.is_null(ranks), pc.is_in(ranks, pa.array(self.ranks, ranks.type))))
        some = some.filter(wanted)
        if not some.num_rows:
            return
        numbers = number_of(some)
        self._take(some.filter(pa.array(numbers >= 0)), numbers[numbers >= 0].tolist())
        while self._thinned is not None and len(self._collected) > self.max_collected and len(self.steps) > 2:
            self._thinned.halve()
            self._keep(self._thinned.steps)

    def _keep(self, steps: list[int]) -> None:
        if steps != self.steps:
            self.steps = list(steps)
            self._collected = {key: one for key, one in self._collected.items() if key[1] in steps}

    @abstractmethod
    def _take(self, table: Any, series: list[int]) -> None:
        """Collect rows of these series."""
