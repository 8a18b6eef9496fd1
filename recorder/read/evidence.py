"""Owns what rows say of the values of several ranks: whether they are equal, constant, repeated along a dim.

Payloads are asked for only where rows say nothing that decides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..layout.plans import Piece
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
    constant: npt.NDArray[np.bool_]
    fingerprints: Ints
    statistics: Ints
    """Of each row, a number that is equal where all statistics are; `NONE` without any."""
    labels: dict[str, Keys]
    """Of each value, the texts that name it."""
    writers: Ints
    """Of each value, the number of its first row's writer."""

    def equal_of(self, number: int) -> bool | None:
        return None if self.equal[number] == NONE else bool(self.equal[number])


class Evidence:
    """What rows, and where they must be read payloads, say of the values of one group."""

    def __init__(
        self,
        described: Described,
        number: int,
        places: Sequence[int],
        is_same: Callable[[Sequence[int]], bool | None],
        is_repeated: Callable[[int, int], bool | None],
        *,
        is_float: bool,
    ) -> None:
        """Of a value.

        Args:
            described: rows grouped by value.
            number: of the value.
            places: of its rows among those described, in data-parallel order.
            is_same: whether the tensors of rows at some positions are equal; None where a payload is missing.
            is_repeated: whether the tensor of a row is one slice repeated along a dim; None likewise.
            is_float: whether equal sums tell that values are equal.
        """
        self.has_read = False
        self.is_by_statistics = False
        """Whether equality was judged by statistics alone."""
        self._described = described
        self._places = places
        self._is_float = is_float
        self._equal = described.equal_of(number)
        self._has_same_statistics = bool(described.has_same_statistics[number])
        self._is_constant = bool(described.constant[number])
        self._is_same = is_same
        self._is_repeated = is_repeated

    def without_payloads(self) -> tuple[bool | None, bool, bool]:
        """All that is known from the rows."""
        return self._equal, self._has_same_statistics, self._is_constant

    def pattern(self) -> tuple[tuple[int, ...], ...]:
        """Which rows have the same fingerprint, and which the same statistics: of each the first of its like."""
        found = []
        for column in (self._described.fingerprints, self._described.statistics):
            numbers = column[self._places].tolist()
            first: dict[int, int] = {}
            found.append(tuple(NONE if n == NONE else first.setdefault(n, i) for i, n in enumerate(numbers)))
        return tuple(found)

    def are_equal(self) -> bool:
        """By fingerprint, else by value, else by statistics: of floats, whose sums tell, and the row says so.

        Whole numbers are indices, masks and permutations often enough, which have equal statistics in any order.
        """
        if self._equal is None:
            self._equal = self._judged(self._places, has_same_statistics=self._has_same_statistics)
        return self._equal

    def among(self, numbers: Sequence[int]) -> bool:
        """The same of some of the pieces."""
        places = [self._places[i] for i in numbers]
        fingerprints, statistics = self._described.fingerprints[places], self._described.statistics[places]
        if (fingerprints != NONE).all():
            return bool((fingerprints == fingerprints[0]).all())
        is_measured = bool((statistics != NONE).all())
        is_alike = bool((statistics == statistics[0]).all())
        return (is_alike or not is_measured) and self._judged(places, has_same_statistics=is_measured and is_alike)

    def _judged(self, places: Sequence[int], *, has_same_statistics: bool) -> bool:
        self.has_read = True
        found = self._is_same(self._described.chosen[list(places)].tolist())
        self.is_by_statistics |= found is None and has_same_statistics and self._is_float
        return (has_same_statistics and self._is_float) if found is None else found

    def is_constant(self) -> bool:
        return self._is_constant

    def is_repeated(self, dim: int) -> bool:
        self.has_read = True
        return bool(self._is_repeated(int(self._described.chosen[self._places[0]]), dim))


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
