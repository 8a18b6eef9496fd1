"""What rules are fed: rows of statistics as columns of numbers, and what each row is of. Knows of no file.

A *series* is a value over the steps; a *lane* is a series on one rank, and has a number. What a rule remembers, it
remembers by lane, so that memory grows with the model and the ranks, and never with the steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..sites import is_loss

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

_MAX_RANK = 1 << 26


class SeriesKey(NamedTuple):
    """What a series is called."""

    root: str
    module_path: str
    site: str
    name: str
    mode: str
    phase: str
    scope: str
    """Empty where the row has none."""

    @property
    def is_loss(self) -> bool:
        """Whether it is a scalar that is called a loss."""
        return is_loss(self.site, self.name)

    @property
    def differs_by_batch(self) -> bool:
        """Whether data-parallel ranks have it each of its own batch, so that it may be compared over ranks."""
        return self.site in ("output", "grad_output") or self.is_loss or (self.site == "grad" and self.scope == "local")


class About(NamedTuple):
    """What else is known of a series, from its first row."""

    dtype: str
    shape: tuple[int, ...]
    whole_numel: int = 0
    """Elements of the whole, where each rank has a chunk of a parameter or its gradient; else 0."""


class ModuleFacts(NamedTuple):
    """What is known of a module beside its values."""

    class_name: str
    sites: tuple[str, ...]
    """At which a rule of the recording selects its values."""


class Catalog:
    """The series and lanes that were met, by number; it only grows."""

    def __init__(self, modules: Mapping[tuple[str, str], ModuleFacts] | None = None) -> None:
        self.modules = dict(modules or {})
        """By root and path, as far as it is known."""
        self.series: list[SeriesKey] = []
        self.about: list[About] = []
        self._whole_numel = np.zeros(0)
        self._marks: dict[str, Flags] = {}
        self._number_of: dict[SeriesKey, int] = {}
        self._lane_of: dict[int, int] = {}
        self.series_of: Integers = np.zeros(0, np.int64)
        """By lane."""
        self.rank_of: Integers = np.zeros(0, np.int64)
        """By lane; -1 for a value of all ranks."""
        self.part_of: Integers = np.zeros(0, np.int64)
        """By lane, which part of the batch its rank works on: ranks with the same number share one."""
        self.peers_of: Integers = np.zeros(0, np.int64)
        """By lane, a number that is equal on ranks that hold the same piece of the model, and so may be compared."""

    @property
    def whole_numel(self) -> Floats:
        """By series, the elements of the whole where each rank has a chunk of it, else 0."""
        new = self.about[len(self._whole_numel) :]
        if new:
            self._whole_numel = np.append(self._whole_numel, [float(about.whole_numel) for about in new])
        return self._whole_numel

    @property
    def num_lanes(self) -> int:
        return len(self.series_of)

    def mark(self, name: str, is_one: Callable[[SeriesKey], bool]) -> Flags:
        """By series, whether it is one of a kind. Each series is asked once for each name of a kind."""
        known = self._marks.get(name, np.zeros(0, np.bool_))
        if len(known) < len(self.series):
            new = [is_one(key) for key in self.series[len(known) :]]
            known = self._marks[name] = np.append(known, np.array(new, np.bool_))
        return known

    def find(self, key: SeriesKey, rank: int) -> int | None:
        """The lane of a series on a rank, if it was met."""
        series = self._number_of.get(key)
        return None if series is None else self._lane_of.get(series * _MAX_RANK + rank + 1)

    def number(self, key: SeriesKey, about: About) -> int:
        """The number of a series, a new one where it is new."""
        if key not in self._number_of:
            self._number_of[key] = len(self.series)
            self.series.append(key)
            self.about.append(about)
        return self._number_of[key]

    def lanes(
        self, series: Integers, ranks: Integers, parts: Integers | None = None, peers: Integers | None = None
    ) -> Integers:
        """The lanes of rows, by the number of their series and their rank.

        Args:
            series: of each row.
            ranks: of each row, -1 for all ranks.
            parts: which part of the batch the rank works on; by default each rank has one of its own.
            peers: which piece of the model the rank holds; by default all hold the same.
        """
        mixed, firsts, inverse = np.unique(series * _MAX_RANK + ranks + 1, return_index=True, return_inverse=True)
        known = [self._lane_of.get(one, -1) for one in mixed.tolist()]
        new = [index for index, lane in enumerate(known) if lane < 0]
        if new:
            rows = firsts[new]
            for index in new:
                known[index] = self._lane_of[int(mixed[index])] = len(self._lane_of)
            self.series_of = np.append(self.series_of, series[rows])
            self.rank_of = np.append(self.rank_of, ranks[rows])
            self.part_of = np.append(self.part_of, (ranks if parts is None else parts)[rows])
            self.peers_of = np.append(self.peers_of, (np.zeros_like(ranks) if peers is None else peers)[rows])
        lanes: Integers = np.asarray(known, np.int64)[inverse.reshape(-1)]
        return lanes


class Rows:
    """Rows of whole steps, by step and then in the order of execution of each rank. Some of them cost no copy."""

    __slots__ = ("_indices", "_numbers", "_taken", "catalog", "lanes", "steps")

    def __init__(
        self,
        catalog: Catalog,
        steps: Integers,
        lanes: Integers,
        numbers: Mapping[str, Floats],
        indices: Integers | None = None,
    ) -> None:
        """Rows of a catalog.

        Args:
            catalog: what the lanes are.
            steps: of each row.
            lanes: of each row.
            numbers: statistics, counts and `numel`, NaN where a row has none; a column that the run lacks is not there.
            indices: which rows of `numbers` these are; by default all of them.
        """
        self.catalog, self.steps, self.lanes = catalog, steps, lanes
        self._numbers, self._indices = numbers, indices
        self._taken: dict[str, Floats] = {}

    def __len__(self) -> int:
        return len(self.steps)

    def __getitem__(self, name: str) -> Floats:
        """A column; NaN throughout where the run lacks it."""
        if name not in self._taken:
            column = self._numbers.get(name)
            if column is None:
                column = np.full(len(self), np.nan)
            elif self._indices is not None:
                column = column[self._indices]
            self._taken[name] = column
        return self._taken[name]

    @property
    def names(self) -> list[str]:
        """The columns that the run has."""
        return list(self._numbers)

    @property
    def series(self) -> Integers:
        return np.asarray(self.catalog.series_of[self.lanes])

    @property
    def ranks(self) -> Integers:
        return np.asarray(self.catalog.rank_of[self.lanes])

    def take(self, chosen: Flags | Integers | slice) -> Rows:
        """Some of the rows; a column is copied once it is asked for."""
        if isinstance(chosen, np.ndarray) and chosen.dtype == np.bool_:
            chosen = np.flatnonzero(chosen)
        if self._indices is not None:
            indices = self._indices[chosen]
        else:
            indices = np.arange(len(self))[chosen] if isinstance(chosen, slice) else chosen.astype(np.int64, copy=False)
        return Rows(self.catalog, self.steps[chosen], self.lanes[chosen], self._numbers, indices)

    def by_lane(self) -> Rows:
        """The rows lane by lane, each in the order of time."""
        return self.take(np.argsort(self.lanes, kind="stable"))

    @property
    def rms(self) -> Floats:
        """The root of the mean square of the finite elements of each row's value, of a chunk those of all chunks."""
        num = self.over_chunks(self["numel"] - self["nan_count"] - self["inf_count"])
        with np.errstate(all="ignore"):
            return np.asarray(np.sqrt(self.over_chunks(self["sum_sq"]) / num))

    def over_chunks(self, values: Floats) -> Floats:
        """The values, of rows of chunks the sum over the chunks that ranks have of one value at one step.

        It is NaN where not all chunks are there.
        """
        whole = self.catalog.whole_numel[self.series]
        is_chunk = whole > 0
        if not is_chunk.any():
            return values
        ids, firsts = grouped(self.series[is_chunk], self.steps[is_chunk])
        sums = np.bincount(ids, values[is_chunk])
        sums[np.bincount(ids, self["numel"][is_chunk]) < whole[is_chunk][firsts]] = np.nan
        values = values.astype(np.float64)
        values[is_chunk] = sums[ids]
        return values


def concatenate(some: Sequence[Rows]) -> Rows:
    """Rows one after the other; of one catalog, and at least one."""
    if len(some) == 1:
        return some[0]
    names = dict.fromkeys(name for rows in some for name in rows.names)
    numbers = {name: np.concatenate([rows[name] for rows in some]) for name in names}
    steps, lanes = (np.concatenate([getattr(rows, name) for rows in some]) for name in ("steps", "lanes"))
    return Rows(some[0].catalog, steps, lanes, numbers)


class Memory:
    """One number for each lane, which is there again when the next rows come."""

    def __init__(self, initial: float = np.nan) -> None:
        self._initial = initial
        self._values = np.zeros(0)

    def __getitem__(self, lanes: Integers) -> Floats:
        self._grow(lanes)
        return self._values[lanes]

    def __setitem__(self, lanes: Integers, values: Floats) -> None:
        self._grow(lanes)
        self._values[lanes] = values

    def _grow(self, lanes: Integers) -> None:
        missing = int(lanes.max(initial=-1)) + 1 - len(self._values)
        if missing > 0:
            self._values = np.append(self._values, np.full(max(missing, len(self._values)), self._initial))


def begins(lanes: Integers) -> Flags:
    """Which rows are the first of their lane, where rows stand lane by lane."""
    return np.r_[True, lanes[1:] != lanes[:-1]] if len(lanes) else np.zeros(0, np.bool_)


def ends(lanes: Integers) -> Flags:
    """Which rows are the last of their lane, where rows stand lane by lane."""
    return np.r_[lanes[1:] != lanes[:-1], True] if len(lanes) else np.zeros(0, np.bool_)


def previous(lanes: Integers, values: Floats, memory: Memory) -> Floats:
    """The value before each one in its lane, where rows stand lane by lane; `memory` has those of earlier rows."""
    before = np.r_[np.nan, values[:-1]] if len(values) else values
    is_first = begins(lanes)
    before[is_first] = memory[lanes[is_first]]
    is_last = ends(lanes)
    memory[lanes[is_last]] = values[is_last]
    return before


def began(lanes: Integers, values: Floats, memory: Memory) -> Floats:
    """The first value of each one's lane, where rows stand lane by lane; `memory` has those of earlier rows."""
    firsts = np.flatnonzero(begins(lanes))
    new = firsts[np.isnan(memory[lanes[firsts]])]
    memory[lanes[new]] = values[new]
    return memory[lanes]


def streaks(lanes: Integers, flags: Flags, memory: Memory) -> Integers:
    """How many rows in a row of its lane are flagged, up to each row, where rows stand lane by lane."""
    indices = np.arange(len(lanes))
    firsts = np.maximum.accumulate(np.where(begins(lanes), indices, 0))
    last_unset = np.maximum.accumulate(np.where(flags, -1, indices))
    is_unbroken = last_unset < firsts
    lengths = indices - np.where(is_unbroken, firsts - 1, last_unset)
    lengths = lengths + np.where(is_unbroken, memory[lanes], 0).astype(np.int64)
    is_last = ends(lanes)
    memory[lanes[is_last]] = lengths[is_last].astype(np.float64)
    return np.asarray(lengths, np.int64)


class Reached(NamedTuple):
    """A row at which something has held for enough records in a row."""

    row: int
    num: int
    """Records for which it has held."""
    since: int | None
    """The step of the first of these; None where there is but one."""


class Streaks:
    """What holds for some records in a row, told once for each lane."""

    def __init__(self, told: Memory | None = None) -> None:
        """Nothing has held yet.

        Args:
            told: the lanes of which it was told; several kinds that have it in common tell a lane once together.
        """
        self._lengths, self._since = Memory(0.0), Memory()
        self._told = Memory(0.0) if told is None else told

    def lengths(self, lanes: Integers, steps: Integers, flags: Flags) -> tuple[Integers, Floats]:
        """For how many records it has held at each row, and since which step; rows stand lane by lane."""
        lengths = streaks(lanes, flags, self._lengths)
        indices = np.arange(len(lanes))
        firsts = np.maximum.accumulate(np.where(begins(lanes), indices, 0))
        starts = indices - np.maximum(lengths, 1) + 1
        since = np.where(starts >= firsts, steps[np.maximum(starts, 0)], self._since[lanes])
        is_last = ends(lanes)
        self._since[lanes[is_last]] = since[is_last]
        return lengths, since

    def reached(self, lanes: Integers, steps: Integers, flags: Flags, records: float) -> list[Reached]:
        """By lane, the first of these rows with which it has held for so many records; rows stand lane by lane."""
        lengths, since = self.lengths(lanes, steps, flags)
        new = np.flatnonzero((lengths >= records) & (self._told[lanes] == 0))
        new = new[begins(lanes[new])]
        self._told[lanes[new]] = np.ones(len(new))
        return [
            Reached(row, num, first if num > 1 else None)
            for row, num, first in zip(
                new.tolist(), lengths[new].tolist(), since[new].astype(np.int64).tolist(), strict=True
            )
        ]


class Spells:
    """What holds for a good while, told once for each lane, and whether it ended later."""

    def __init__(self, weight: float = 1.0) -> None:
        """Nothing has held yet.

        Args:
            weight: how many records in which it holds one counts for in which it does not, once it was told.
        """
        self._streaks, self._was_long = Streaks(), Memory(0.0)
        self._weight = weight
        self._balance = Memory()
        """Records in which it holds, less the weight of all others, since what was told began; else NaN."""

    def begun(
        self, lanes: Integers, steps: Integers, flags: Flags, records: float, lasting: Floats
    ) -> Iterator[tuple[int, int]]:
        """Rows at which it has held for long enough, and since which step; once more where it ended in between.

        Args:
            lanes: of rows that stand lane by lane.
            steps: of each row.
            flags: whether it holds of each row.
            records: for how many records in a row it has to hold.
            lasting: by row, for how many steps.
        """
        lengths, since = self._streaks.lengths(lanes, steps, flags)
        is_long = (lengths >= records) & (steps - since + 1 >= lasting)
        was_long = previous(lanes, is_long.astype(np.float64), self._was_long)
        known = self._balance[lanes]
        if not is_long.any() and np.isnan(known).all():
            return
        signs = np.where(flags, 1.0, -self._weight)
        sums = np.cumsum(signs)
        starts = np.flatnonzero(begins(lanes))
        before = np.repeat(sums[starts] - signs[starts], np.diff(np.r_[starts, len(lanes)]))
        balance = sums - before + known
        for row in np.flatnonzero(is_long & (was_long == 0)).tolist():
            if not balance[row] - lengths[row] >= 0:
                end = int(np.searchsorted(lanes, lanes[row], side="right"))
                balance[row:end] = sums[row:end] - sums[row] + lengths[row]
                yield row, int(since[row])
        is_last = ends(lanes)
        self._balance[lanes[is_last]] = balance[is_last]

    def has_ended(self, lane: int) -> bool:
        """Whether what was told of a lane did not hold for most records since, by the weight of those."""
        return bool(self._balance[np.array([lane])][0] < 0)


def grouped(*columns: Integers) -> tuple[Integers, Integers]:
    """For each row the number of its group of rows that agree in all columns, and the first row of each group.

    Groups are in the order of their numbers in the columns, the first column before the second.
    """
    ids = np.zeros(len(columns[0]), np.int64)
    span = 1
    for column in columns:
        low = int(column.min()) if len(column) else 0
        width = int(column.max()) - low + 1 if len(column) else 1
        if span * width >= 1 << 62:  # keep the mixed number within 64 bits
            distinct, ids = np.unique(ids, return_inverse=True)
            span = len(distinct)
        ids = ids * width + (column - low)
        span *= width
    _, firsts, ids = np.unique(ids, return_index=True, return_inverse=True)
    return ids.reshape(-1).astype(np.int64), firsts.astype(np.int64)
