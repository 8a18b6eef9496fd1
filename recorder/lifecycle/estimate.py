"""Estimates, after the first recorded step, how many bytes the rules will have written by later steps.

Counts the records of the first step on the writer thread. Nothing here may touch a tensor or raise.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache

from ..numerics.units import sides_of
from ..records import KEEP_HISTOGRAM, KEEP_TENSOR, KEEP_UNITS, Staged
from ..rules import Rule, Schedule
from ..system.text import size

ROW_BYTES = 100
"""Bytes of a row of statistics on disk; 85 to 110 were measured."""
HISTOGRAM_BYTES = 40
"""Bytes that a histogram adds to a row on disk; 37 to 46 were measured."""
UNIT_BYTES = 19
"""Bytes that the sums of one unit add to a row on disk."""
_AHEAD = (100, 1000)
"""The numbers of steps ahead for which the estimate gives bytes."""


class Estimate:
    """The bytes that a rank will write. The writer thread calls all methods."""

    def __init__(self, rules: Sequence[Rule], *, rank: int, world_size: int, max_bytes: int) -> None:
        self._rules = [rule for rule in rules if rank in rule.rank]
        self._whose = f"rank {rank} (of {world_size}) writes " if world_size > 1 else ""
        self._max_bytes = max_bytes
        self._first: int | None = None
        self._num_rows: Counter[str] = Counter()
        self._num_bytes: Counter[tuple[str, int]] = Counter()
        """Bytes of what the first step kept beside its rows, by the site and the bit of `keep`."""
        self._num_looked_at = 0
        """The number of rows at the last call of `look`."""
        self._is_over = False

    def saw(self, staged: Staged) -> None:
        """Count a record that is about to be written."""
        step = staged.moment.step
        if self._first is None:
            self._first = step
        if step == self._first:
            site = staged.origin.site
            self._num_rows[site] += 1
            if staged.keep & KEEP_TENSOR:
                self._num_bytes[site, KEEP_TENSOR] += staged.block.data.nbytes
            if staged.keep & KEEP_HISTOGRAM:
                self._num_bytes[site, KEEP_HISTOGRAM] += HISTOGRAM_BYTES
            if staged.keep & KEEP_UNITS:
                sides = sides_of(staged.shape, staged.origin.unit_dim)
                self._num_bytes[site, KEEP_UNITS] += 0 if isinstance(sides, str) else UNIT_BYTES * sides.num

    def look(self, step: int) -> str | None:
        """Return the estimate, once: when the first step is over, and no record of it came since the last call.

        Args:
            step: the current step.
        """
        if self._is_over or self._first is None or step <= self._first:
            return None
        num_rows = self._num_rows.total()
        if num_rows != self._num_looked_at:
            self._num_looked_at = num_rows
            return None
        self._is_over = True
        first = self._first
        is_least = any(self._begins_later(site, first) for rule in self._rules for site in rule.site)
        until = [f"{size(self.num_bytes(first, ahead + 1))} by step {first + ahead:,}" for ahead in _AHEAD]
        how = "at least" if is_least else "about"
        bound = f"{size(self._max_bytes)}{' a rank' if self._whose else ''} (max_bytes)"
        at_first = f"{size(self.num_bytes(first, 1))} at step {first:,}"
        return f"at these rules {self._whose}{how} {at_first}, {' and '.join(until)}; at most {bound}"

    def num_bytes(self, first: int, num_steps: int) -> int:
        """Return the bytes that `num_steps` steps write, by the counts of the first of them."""

        @cache
        def times(schedules: frozenset[Schedule]) -> int:
            return sum(any(step in schedule for schedule in schedules) for step in range(first, first + num_steps))

        of_rows = sum(ROW_BYTES * num * times(self._schedules(site, -1)) for site, num in self._num_rows.items())
        return of_rows + sum(num * times(self._schedules(*kept)) for kept, num in self._num_bytes.items())

    def _schedules(self, site: str, keep: int) -> frozenset[Schedule]:
        return frozenset(rule.steps for rule in self._rules if site in rule.site and rule.keep & keep)

    def _begins_later(self, site: str, first: int) -> bool:
        """Whether tensors of a site will be kept soon, but none was kept at the first step."""
        schedules = self._schedules(site, KEEP_TENSOR)
        soon = range(first, first + _AHEAD[-1] + 1)
        return not any(first in schedule for schedule in schedules) and any(
            step in schedule for schedule in schedules for step in soon
        )
