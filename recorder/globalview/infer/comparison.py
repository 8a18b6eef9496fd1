"""What the rows of one step say of the values of several ranks: whether they are equal, and what that proves.

Payloads are asked for only where rows say nothing that decides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from ...layout.rules import Replication, Unequal
from ...read.metadata import NONE
from ..grouping.row_grouper import GroupedRows


class AcrossSteps(Protocol):
    """What all steps say of one value; see `leaves.Leaves`."""

    def replication(self, numbers: Sequence[int] | None) -> Replication:
        """How all chunks of the value, or those with some numbers, are replicated."""

    def batch_dim(self) -> int | None:
        """See `layout.rules.Values`."""


class Comparison:
    """What rows, and where they must be read payloads, say of the values of one group."""

    def __init__(
        self,
        grouped: GroupedRows,
        number: int,
        rows: Sequence[int],
        is_same: Callable[[Sequence[int]], bool | None],
        across_steps: AcrossSteps,
        *,
        is_float: bool,
    ) -> None:
        """Hold what is known of one value.

        Args:
            grouped: rows grouped by value.
            number: of the value.
            rows: the indices of its rows among those described, in data-parallel order.
            is_same: whether the tensors of rows at some positions are equal; None where a payload is missing.
            across_steps: what other steps say.
            is_float: whether equal sums tell that values are equal.
        """
        self.has_read = False
        self.is_by_statistics = False
        """Whether equality was judged by statistics alone."""
        self._grouped = grouped
        self._rows = rows
        self._is_float = is_float
        self.known = grouped.equal_of(number), bool(grouped.has_same_statistics[number])
        """What the rows say of all chunks: whether they are equal, None where nothing tells, and their statistics."""
        self._is_same = is_same
        self._across_steps = across_steps
        self._equal: dict[tuple[int, ...], bool | None] = {}

    def pattern(self) -> tuple[tuple[int, ...], ...]:
        """Which rows have the same fingerprint, and which the same statistics: of each the first of its like."""
        patterns = []
        for column in (self._grouped.fingerprints, self._grouped.statistics):
            numbers = column[self._rows].tolist()
            first: dict[int, int] = {}
            patterns.append(tuple(NONE if n == NONE else first.setdefault(n, i) for i, n in enumerate(numbers)))
        return tuple(patterns)

    def replication(self) -> Replication:
        return self._across_steps.replication(None)

    def are_equal(self) -> bool:
        return self.equality() is True

    def are_unequal(self) -> bool:
        return self.equality() is False

    def batch_dim(self) -> int | None:
        return self._across_steps.batch_dim()

    def among(self, numbers: Sequence[int]) -> ComparisonOfSome:
        """What is known of some of the chunks."""
        return ComparisonOfSome(self, numbers, self._across_steps)

    def equality(self, numbers: Sequence[int] | None = None) -> bool | None:
        """Whether all chunks, or some of them, are equal; None where nothing tells.

        By fingerprint, else by value, else by statistics: of floats, whose sums tell, and the row says so. Whole
        numbers are indices, masks and permutations often enough, which have equal statistics in any order.
        """
        rows = self._rows if numbers is None else [self._rows[i] for i in numbers]
        key = tuple(rows)
        if key not in self._equal:
            self._equal[key] = self._judged(rows)
        return self._equal[key]

    def _judged(self, rows: Sequence[int]) -> bool | None:
        fingerprints, statistics = self._grouped.fingerprints[rows], self._grouped.statistics[rows]
        if (fingerprints != NONE).all():
            return bool((fingerprints == fingerprints[0]).all())
        is_measured = bool((statistics != NONE).all())
        if is_measured and (statistics != statistics[0]).any():
            return False
        self.has_read = True
        is_same = self._is_same(self._grouped.chosen[list(rows)].tolist())
        if is_same is None and is_measured and self._is_float:
            self.is_by_statistics = is_same = True
        return is_same


class ComparisonOfSome:
    """What is known of some chunks of a value."""

    def __init__(self, comparison: Comparison, numbers: Sequence[int], across_steps: AcrossSteps) -> None:
        self._comparison = comparison
        self._numbers = numbers
        self._across_steps = across_steps

    def replication(self) -> Replication:
        return self._across_steps.replication(self._numbers)

    def are_equal(self) -> bool:
        return self._comparison.equality(self._numbers) is True

    def are_unequal(self) -> bool:
        return self._comparison.equality(self._numbers) is False

    def batch_dim(self) -> int | None:
        return self._across_steps.batch_dim()


class UnrecordedValue(Unequal):
    """What other steps say of a value that was not recorded at this one."""

    def __init__(self, across_steps: AcrossSteps, numbers: Sequence[int] | None = None) -> None:
        self._across_steps = across_steps
        self._numbers = numbers

    def replication(self) -> Replication:
        return self._across_steps.replication(self._numbers)

    def batch_dim(self) -> int | None:
        return self._across_steps.batch_dim()

    def among(self, numbers: Sequence[int]) -> UnrecordedValue:
        """The value with some of its chunks alone."""
        return UnrecordedValue(self._across_steps, numbers)
