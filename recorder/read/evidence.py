"""Owns what the rows of one step say of the values of several ranks: whether they are equal, and what that proves.

Payloads are asked for only where rows say nothing that decides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from ..layout.plans import Piece
from ..layout.rules import Kinship
from .light import NONE, Keys, Positions

Ints = npt.NDArray[np.int64]
POSITIVE = np.int64((1 << 63) - 1)
NULL = np.iinfo(np.int64).min + 7
"""Stands for null among the bits of statistics; as a float64 it is a denormal that no statistic is."""


class Described(NamedTuple):
    """Rows grouped by value: what is known of each row and of each group."""

    chosen: Positions
    starts: Ints
    ends: Ints
    codes: Ints
    pieces: list[Piece]
    equal: Ints
    """1 where all rows of a value are equal, 0 where they are not, `NONE` where only their payloads can tell."""
    has_same_statistics: npt.NDArray[np.bool_]
    is_blank: npt.NDArray[np.bool_]
    """Whether all rows of a value are measured and hold one number each, or nothing finite: any layout has that."""
    is_zero: npt.NDArray[np.bool_]
    """Whether all rows of a value are measured and hold zeros alone, of either sign."""
    has_nan: npt.NDArray[np.bool_]
    """Whether some row of a value has a NaN, or is measured and has no finite number."""
    is_measured: npt.NDArray[np.bool_]
    """Whether all rows of a value have statistics."""
    fingerprints: Ints
    statistics: Ints
    """Of each row, a number that is equal where all statistics are; `NONE` without any."""
    labels: dict[str, Keys]
    """Of each value, the texts that name it."""
    writers: Ints
    """Of each value, the number of its first row's writer."""

    def equal_of(self, number: int) -> bool | None:
        return None if self.equal[number] == NONE else bool(self.equal[number])


class OfAllSteps(Protocol):
    """What all steps say of one value; see `leaves.Leaves`."""

    def kinship(self, numbers: Sequence[int] | None) -> Kinship:
        """Of all its pieces, or of some by their numbers."""

    def batch_dim(self) -> int | None:
        """See `layout.rules.Values`."""


class Evidence:
    """What rows, and where they must be read payloads, say of the values of one group."""

    def __init__(
        self,
        described: Described,
        number: int,
        places: Sequence[int],
        is_same: Callable[[Sequence[int]], bool | None],
        of_all_steps: OfAllSteps,
        *,
        is_float: bool,
    ) -> None:
        """Of a value.

        Args:
            described: rows grouped by value.
            number: of the value.
            places: of its rows among those described, in data-parallel order.
            is_same: whether the tensors of rows at some positions are equal; None where a payload is missing.
            of_all_steps: what other steps say.
            is_float: whether equal sums tell that values are equal.
        """
        self.has_read = False
        self.is_by_statistics = False
        """Whether equality was judged by statistics alone."""
        self._described = described
        self._places = places
        self._is_float = is_float
        self._known = described.equal_of(number), bool(described.has_same_statistics[number])
        self._is_same = is_same
        self._of_all_steps = of_all_steps
        self._equal: dict[tuple[int, ...], bool | None] = {}

    def without_payloads(self) -> tuple[bool | None, bool]:
        """All that is known from the rows."""
        return self._known

    def pattern(self) -> tuple[tuple[int, ...], ...]:
        """Which rows have the same fingerprint, and which the same statistics: of each the first of its like."""
        found = []
        for column in (self._described.fingerprints, self._described.statistics):
            numbers = column[self._places].tolist()
            first: dict[int, int] = {}
            found.append(tuple(NONE if n == NONE else first.setdefault(n, i) for i, n in enumerate(numbers)))
        return tuple(found)

    def kinship(self) -> Kinship:
        return self._of_all_steps.kinship(None)

    def are_equal(self) -> bool:
        return self.equality() is True

    def are_unequal(self) -> bool:
        return self.equality() is False

    def batch_dim(self) -> int | None:
        return self._of_all_steps.batch_dim()

    def among(self, numbers: Sequence[int]) -> SomeEvidence:
        """What is known of some of the pieces."""
        return SomeEvidence(self, numbers, self._of_all_steps)

    def equality(self, numbers: Sequence[int] | None = None) -> bool | None:
        """Whether all pieces, or some of them, are equal; None where nothing tells.

        By fingerprint, else by value, else by statistics: of floats, whose sums tell, and the row says so. Whole
        numbers are indices, masks and permutations often enough, which have equal statistics in any order.
        """
        places = self._places if numbers is None else [self._places[i] for i in numbers]
        key = tuple(places)
        if key not in self._equal:
            self._equal[key] = self._judged(places)
        return self._equal[key]

    def _judged(self, places: Sequence[int]) -> bool | None:
        fingerprints, statistics = self._described.fingerprints[places], self._described.statistics[places]
        if (fingerprints != NONE).all():
            return bool((fingerprints == fingerprints[0]).all())
        is_measured = bool((statistics != NONE).all())
        if is_measured and (statistics != statistics[0]).any():
            return False
        self.has_read = True
        found = self._is_same(self._described.chosen[list(places)].tolist())
        if found is None and is_measured and self._is_float:
            self.is_by_statistics = found = True
        return found


class SomeEvidence:
    """What is known of some pieces of a value."""

    def __init__(self, evidence: Evidence, numbers: Sequence[int], of_all_steps: OfAllSteps) -> None:
        self._evidence = evidence
        self._numbers = numbers
        self._of_all_steps = of_all_steps

    def kinship(self) -> Kinship:
        return self._of_all_steps.kinship(self._numbers)

    def are_equal(self) -> bool:
        return self._evidence.equality(self._numbers) is True

    def are_unequal(self) -> bool:
        return self._evidence.equality(self._numbers) is False

    def batch_dim(self) -> int | None:
        return self._of_all_steps.batch_dim()


class Unrecorded:
    """What other steps say of a value that was not recorded at this one."""

    def __init__(self, of_all_steps: OfAllSteps, numbers: Sequence[int] | None = None) -> None:
        self._of_all_steps = of_all_steps
        self._numbers = numbers

    def kinship(self) -> Kinship:
        return self._of_all_steps.kinship(self._numbers)

    def are_equal(self) -> bool:
        return False

    def are_unequal(self) -> bool:
        return False

    def batch_dim(self) -> int | None:
        return self._of_all_steps.batch_dim()

    def among(self, numbers: Sequence[int]) -> Unrecorded:
        """Of some of its pieces."""
        return Unrecorded(self._of_all_steps, numbers)


def pack(columns: Sequence[npt.NDArray[Any]]) -> Ints:
    """One number per row, equal where all columns are; numbers count up in the order of the columns."""
    packed, size = np.zeros(len(columns[0]), np.int64), 1
    for column in columns:
        values = column.astype(np.int64)
        low = int(values.min()) if len(values) else 0
        span = int(values.max()) - low + 1 if len(values) else 1
        if size * span >= 1 << 62:
            packed = np.unique(packed, return_inverse=True)[1].reshape(-1)
            size = int(packed.max()) + 1
        if size * span >= 1 << 62:
            values = np.unique(values, return_inverse=True)[1].reshape(-1)
            low, span = 0, int(values.max()) + 1
        packed = packed * span + (values - low)
        size *= span
    numbers: Ints = np.unique(packed, return_inverse=True)[1].reshape(-1)
    return numbers


def bits_of(column: Any) -> Ints:
    """A column of numbers as integers that are equal where the values are, NaN and null included."""
    values = (column.fill_null(0) if column.null_count else column).to_numpy()
    found: Ints = values.view(np.int64).copy()
    if column.null_count:
        found[column.is_null().to_numpy()] = NULL
    return found


def digest(columns: Sequence[Ints]) -> Ints:
    """One number per row out of several, equal where all are (and, one time in 2^64, where they are not)."""
    total = np.zeros(len(columns[0]), np.uint64)
    for column in columns:
        total = (total ^ (total >> np.uint64(29)) ^ column.view(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
    return total.view(np.int64)
