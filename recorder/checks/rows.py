"""The rows of statistics that rules read, as columns of numbers, and the catalog that identifies the value of each row.

A *series* is one value over the steps. A *lane* is a series on one rank; lanes have indexes. Rules keep numbers by
lane, so that memory grows with the model and the ranks, but not with the steps. This module must never open a file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..format.manifest import RecordedModule
from ..sites import RATE, is_loss

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

RECORDED = (
    "mean", "std", "min", "max", "absmax", "l2", "sum", "sum_sq", "nan_count", "inf_count", "zero_count",
)  # fmt: skip
"""The names of the columns of `Rows` that each record with statistics has, besides `numel`."""
IS_PROBE = "is_probe"
"""The column that is 1 in a row of the probe (one number of a value at every step), and 0 or NaN in other rows."""
_LEAST_STEPS = 10
"""The fewest steps of a training, where the next optimizer trains a model that was trained before."""
_MAX_RANK = 1 << 26
MAX_STEPS = 1 << 40
_PRIMES = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93], np.uint64)


class SeriesKey(NamedTuple):
    """The names that identify a series."""

    root: str
    module_path: str
    site: str
    name: str
    mode: str
    phase: str
    scope: str
    """The scope of a gradient, such as ``local``; empty if a row has no scope."""

    @property
    def is_loss(self) -> bool:
        """Whether the series is a scalar whose name marks it as a loss."""
        return is_loss(self.site, self.name)

    @property
    def is_rate(self) -> bool:
        """Whether the series is a learning rate."""
        return self.site == "scalar" and self.name.startswith(RATE)

    @property
    def differs_by_batch(self) -> bool:
        """Whether the value depends on the rank's own batch. By such values, data-parallel ranks can be compared."""
        return self.site in ("output", "grad_output") or self.is_loss or (self.site == "grad" and self.scope == "local")


class About(NamedTuple):
    """Further facts about a series, taken from its first row."""

    dtype: str
    shape: tuple[int, ...]
    whole_numel: int = 0
    """The number of elements of the complete parameter or gradient, if each rank has a chunk of it; else 0."""


class Catalog:
    """The series (values over the steps) and the lanes (series on one rank) so far, by index. Entries stay."""

    def __init__(self, modules: Mapping[tuple[str, str], RecordedModule] | None = None) -> None:
        self.modules = dict(modules or {})
        """Facts about modules, by root (the model's name) and path. A module of which nothing is known has no entry."""
        self.series: list[SeriesKey] = []
        self.about: list[About] = []
        self._whole_numel = np.zeros(0)
        self._marks: dict[tuple[str, int], Flags] = {}
        self._number_of: dict[SeriesKey, int] = {}
        self._lane_of: dict[int, int] = {}
        self.series_of: Integers = np.zeros(0, np.int64)
        self.rank_of: Integers = np.zeros(0, np.int64)
        """By lane (a series on one rank), the rank; -1 for a value that all ranks have in common."""
        self.part_of: Integers = np.zeros(0, np.int64)
        """By lane (a series on a rank), the number of the part of the batch of the rank. Ranks may share a part."""
        self.shared_rates: set[tuple[str, str]] = set()
        """By root, the learning rates that are of the same parameters on all data-parallel ranks."""
        self.first_arguments: dict[str, str] = {}
        """By root, the name of the first argument that is no label."""
        self.peers_of: Integers = np.zeros(0, np.int64)
        """By lane (a series on one rank), a number that is equal on ranks with the same piece of the model."""
        self.recovered_at: list[int] = []
        """The steps at which all spikes before them had been over for some records in a row."""
        self.trainings: list[int] = []
        """The first step of each training of the process but the first, as of the folds of a cross-validation."""
        self._rates: set[int] = set()
        """The series of the learning rates of the last step that has any."""
        self._changed_at = 0
        self._trained: set[str] = set()
        """The roots (models) of the learning rates so far."""
        self.is_at_end = False
        """Whether only the rows of the last step are still to be judged. The last step may be incomplete."""

    @property
    def whole_numel(self) -> Floats:
        """For each series, the number of elements of the complete tensor if each rank has a chunk of it; else 0."""
        new = self.about[len(self._whole_numel) :]
        if new:
            self._whole_numel = np.append(self._whole_numel, [float(about.whole_numel) for about in new])
        return self._whole_numel

    @property
    def num_lanes(self) -> int:
        return len(self.series_of)

    def key_of(self, lane: int) -> SeriesKey:
        return self.series[int(self.series_of[lane])]

    def about_of(self, lane: int) -> About:
        return self.about[int(self.series_of[lane])]

    def class_of(self, key: SeriesKey) -> str:
        """Return the class name of the module that a series belongs to. Return an empty string if it is not known."""
        module = self.modules.get((key.root, key.module_path))
        return "" if module is None else module.class_name

    def rate_of(self, root: str, module_path: str, name: str) -> str:
        """Return the name of the learning rate of a parameter, such as ``lr.AdamW.0``. Empty if it has none."""
        module = self.modules.get((root, module_path))
        return "" if module is None else module.rates.get(name, "")

    @property
    def parallel_roots(self) -> set[str]:
        """The models whose ranks are known to be data-parallel, because a wrapper was seen around them."""
        return {root for root, _ in self.shared_rates}

    def mark(self, name: str, is_one: Callable[[SeriesKey], bool]) -> Flags:
        """Return, for each series, whether `is_one` is true of the series.

        Results are kept by `name` and by the code of `is_one`, which is the same for each object made of one `lambda`.
        """
        place = name, id(getattr(is_one, "__code__", None))
        known = self._marks.get(place, np.zeros(0, np.bool_))
        if len(known) < len(self.series):
            new = [is_one(key) for key in self.series[len(known) :]]
            known = self._marks[place] = np.append(known, np.array(new, np.bool_))
        return known

    def note_trainings(self, rows: Rows) -> None:
        """Note the steps at which all optimizers are others than at the step before: another training begins.

        Where a model is trained again, some programs make an optimizer anew for every few steps of one training.
        """
        rates = rows.take(rows.where("rate", attrgetter("is_rate")))
        series, steps = rates.series, rates.steps
        if not len(rates) or self._rates == set(np.unique(series).tolist()):
            return
        for at in np.split(np.arange(len(rates)), np.flatnonzero(np.diff(steps)) + 1):
            now, step = set(series[at].tolist()), int(steps[at[0]])
            roots = {self.series[one].root for one in now}
            if self._rates and self._rates.isdisjoint(now):
                if self._trained.isdisjoint(roots) or step - self._changed_at >= _LEAST_STEPS:
                    self.trainings.append(step)
                self._changed_at = step
            self._rates, self._trained = now, self._trained | roots

    def find(self, key: SeriesKey, rank: int) -> int | None:
        """Return the lane (index) of a series on a rank. Return None if the rank has no row of the series."""
        series = self._number_of.get(key)
        return None if series is None else self._lane_of.get(series * _MAX_RANK + rank + 1)

    def number(self, key: SeriesKey, about: About) -> int:
        """Return the index of a series. A new series gets the next index."""
        if key not in self._number_of:
            self._number_of[key] = len(self.series)
            self.series.append(key)
            self.about.append(about)
        return self._number_of[key]

    def lanes(
        self, series: Integers, ranks: Integers, parts: Integers | None = None, peers: Integers | None = None
    ) -> Integers:
        """Return the lane of each row: the index of its series on its rank. Rank -1 stands for all ranks.

        `parts` and `peers` set `part_of` and `peers_of` of new lanes. By default each rank works on its own part of the
        batch, and all ranks hold the same piece of the model.
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
        return np.asarray(np.array(known, np.int64)[inverse.reshape(-1)])


class Rows:
    """Rows of complete steps, ordered by step and by each rank's order of execution. `take` copies no column."""

    __slots__ = ("_indices", "_numbers", "_taken", "catalog", "lanes", "steps")

    def __init__(
        self, catalog: Catalog, steps: Integers, lanes: Integers, numbers: Mapping[str, Floats],
        indices: Integers | None = None,
    ) -> None:  # fmt: skip
        """Make rows of these steps and lanes (series on one rank). `indices` selects rows of `numbers`; None: all rows.

        The columns in `numbers` are statistics, counts and `numel`. They are NaN where a row has no value. Columns that
        no row has are absent.
        """
        self.catalog, self.steps, self.lanes = catalog, steps, lanes
        self._numbers, self._indices = numbers, indices
        self._taken: dict[str, Floats] = {}

    def __len__(self) -> int:
        return len(self.steps)

    def __getitem__(self, name: str) -> Floats:
        """Return a column. Every element is NaN if the run does not have the column."""
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
        return list(self._numbers)

    @property
    def series(self) -> Integers:
        return np.asarray(self.catalog.series_of[self.lanes])

    @property
    def ranks(self) -> Integers:
        return np.asarray(self.catalog.rank_of[self.lanes])

    def where(self, name: str, is_one: Callable[[SeriesKey], bool]) -> Flags:
        """Return, for each row, whether `is_one` is true of its series. Results are cached by `name`."""
        return np.asarray(self.catalog.mark(name, is_one)[self.series])

    def at(self, *sites: str) -> Flags:
        """Return, for each row, whether its value has one of these sites."""
        return self.where(f"at {sites}", lambda key: key.site in sites)

    def are_float(self) -> Flags:
        return np.array(["float" in about.dtype for about in self.catalog.about], np.bool_)[self.series]

    def take(self, chosen: Flags | Integers | slice) -> Rows:
        """Return some of the rows. A column is copied only when it is read."""
        if isinstance(chosen, np.ndarray) and chosen.dtype == np.bool_:
            chosen = np.flatnonzero(chosen)
        if self._indices is not None:
            indices = self._indices[chosen]
        else:
            indices = np.arange(len(self))[chosen] if isinstance(chosen, slice) else chosen.astype(np.int64, copy=False)
        return Rows(self.catalog, self.steps[chosen], self.lanes[chosen], self._numbers, indices)

    def without_probe(self) -> Rows:
        """Return the rows that have statistics. A row of the probe has `sum_sq`, `l2` and counts of elements alone."""
        is_probe = self[IS_PROBE] == 1
        return self.take(~is_probe) if is_probe.any() else self

    def by_lane(self) -> Rows:
        """Return the rows sorted by lane (a series on one rank), and by time within each lane."""
        return self.take(np.argsort(self.lanes, kind="stable"))

    @property
    def rms(self) -> Floats:
        """For each row, the root mean square of the finite elements: of the whole tensor, not of a rank's chunk."""
        num = self.over_chunks(self["numel"] - self["nan_count"] - self["inf_count"])
        with np.errstate(all="ignore"):
            return np.asarray(np.sqrt(self.over_chunks(self["sum_sq"]) / num))

    def over_chunks(self, values: Floats) -> Floats:
        """Return the values. A chunk's value is replaced by the sum over the chunks of all ranks at the same step.

        The sum is NaN if a chunk is missing.
        """
        whole = self.catalog.whole_numel[self.series]
        is_chunk = whole > 0
        if not is_chunk.any():
            return values
        from ..numerics.moments import sum_of_chunks  # imported late, because the module loads pyarrow

        ids, firsts = grouped(self.series[is_chunk], self.steps[is_chunk])
        sums = sum_of_chunks(values[is_chunk], self["numel"][is_chunk], ids, whole[is_chunk][firsts])
        values = values.astype(np.float64)
        values[is_chunk] = sums[ids]
        return values

    def fingerprints(self, names: Sequence[str]) -> npt.NDArray[np.uint64]:
        """Return a hash of the four columns `names` for each row. Rows that agree in the columns have equal hashes."""
        hashes = np.zeros(len(self), np.uint64)
        for name, prime in zip(names, _PRIMES, strict=True):
            hashes = (hashes ^ (self[name] + 0.0).view(np.uint64)) * prime
            hashes ^= hashes >> np.uint64(29)
        return hashes


def concatenate(some: Sequence[Rows]) -> Rows:
    """Join one or more batches of rows. All batches must have the same catalog."""
    if len(some) == 1:
        return some[0]
    names = dict.fromkeys(name for rows in some for name in rows.names)
    numbers = {name: np.concatenate([rows[name] for rows in some]) for name in names}
    steps, lanes = (np.concatenate([getattr(rows, name) for rows in some]) for name in ("steps", "lanes"))
    return Rows(some[0].catalog, steps, lanes, numbers)


def modules_of(rows: Rows) -> tuple[Integers, list[tuple[str, str]]]:
    """Return the number of each row's module, and the modules, by root and path, in the order of their numbers."""
    numbers: dict[tuple[str, str], int] = {}
    of_series = [numbers.setdefault((key.root, key.module_path), len(numbers)) for key in rows.catalog.series]
    return np.array(of_series, np.int64)[rows.series], list(numbers)


class Memory:
    """One number for each lane (a series on one rank), kept between batches of rows. Other indexes may be used, too."""

    def __init__(self, initial: float = np.nan) -> None:
        self._initial = initial
        self._values = np.zeros(0)

    def __getitem__(self, lanes: Integers) -> Floats:
        try:
            return self._values[lanes]
        except IndexError:
            self._grow(lanes)
            return self._values[lanes]

    def __setitem__(self, lanes: Integers, values: Floats | float) -> None:
        try:
            self._values[lanes] = values
        except IndexError:  # nothing was set
            self._grow(lanes)
            self._values[lanes] = values

    def sums(self, lanes: Integers, values: Floats) -> Floats:
        """Add values to their lanes, and return each lane's sum up to each row. The rows are sorted by lane."""
        sums, starts = np.cumsum(values), np.flatnonzero(begins(lanes))
        sums += self[lanes] - np.repeat((sums - values)[starts], np.diff(np.r_[starts, len(lanes)]))
        self[lanes[ends(lanes)]] = sums[ends(lanes)]
        return sums

    def of(self, lane: int) -> float:
        return float(self._values[lane]) if lane < len(self._values) else self._initial

    def _grow(self, lanes: Integers) -> None:
        missing = int(lanes.max()) + 1 - len(self._values)
        self._values = np.append(self._values, np.full(max(missing, len(self._values)), self._initial))


def as_exact_floats(hashes: npt.NDArray[np.uint64]) -> Floats:
    """Return the upper 53 bits of hashes as floats, for a `Memory`. A float holds 53 bits exactly."""
    return (hashes >> np.uint64(11)).astype(np.float64)


def begins(lanes: Integers) -> Flags:
    """Return whether each row is the first of its value on its rank. The rows are sorted by value and rank."""
    return np.r_[True, lanes[1:] != lanes[:-1]] if len(lanes) else np.zeros(0, np.bool_)


def ends(lanes: Integers) -> Flags:
    """Return whether each row is the last of its value on its rank. The rows are sorted by value and rank."""
    return np.r_[lanes[1:] != lanes[:-1], True] if len(lanes) else np.zeros(0, np.bool_)


def previous(lanes: Integers, values: Floats, memory: Memory) -> Floats:
    """Return the number before each row in its lane (a value on one rank). The rows are sorted by lane.

    `memory` has each lane's last number of earlier batches, and gets the last one of this batch.
    """
    before = np.r_[np.nan, values[:-1]] if len(values) else values
    is_first, is_last = begins(lanes), ends(lanes)
    before[is_first] = memory[lanes[is_first]]
    memory[lanes[is_last]] = values[is_last]
    return before


def began(lanes: Integers, values: Floats, memory: Memory) -> Floats:
    """Return the first number that each row's lane (a value on one rank) ever had. The rows are sorted by lane.

    `memory` keeps the first numbers between batches.
    """
    firsts = np.flatnonzero(begins(lanes))
    new = firsts[np.isnan(memory[lanes[firsts]])]
    memory[lanes[new]] = values[new]
    return memory[lanes]


class Streaks:
    """Finds, for each value on each rank, when a condition has first held for some records in a row."""

    def __init__(self, reported: Memory | None = None) -> None:
        """Take a memory with 1 for reported lanes (series on a rank). Objects that share it report a lane only once."""
        self._lengths, self._since = Memory(0.0), Memory()
        self._reported = Memory(0.0) if reported is None else reported

    def lengths(self, lanes: Integers, steps: Integers, flags: Flags) -> tuple[Integers, Floats]:
        """Return, for each row, for how many records and since which step the condition has held.

        Rows are sorted by lane (a series on one rank).
        """
        indices = np.arange(len(lanes))
        firsts = np.maximum.accumulate(np.where(begins(lanes), indices, 0))
        last_unset = np.maximum.accumulate(np.where(flags, -1, indices))
        is_unbroken = last_unset < firsts  # in this batch; the streak may have begun in an earlier one
        lengths = indices - np.where(is_unbroken, firsts - 1, last_unset)
        lengths += np.where(is_unbroken, self._lengths[lanes], 0).astype(np.int64)
        starts = indices - np.maximum(lengths, 1) + 1
        since = np.where(starts >= firsts, steps[np.maximum(starts, 0)], self._since[lanes])
        is_last = ends(lanes)
        self._lengths[lanes[is_last]] = lengths[is_last].astype(np.float64)
        self._since[lanes[is_last]] = since[is_last]
        return lengths, since

    def since(self, lane: int) -> int:
        """Return since which step the condition has held in a lane (series on a rank), if the condition holds."""
        return int(self._since.of(lane))

    def length(self, lane: int) -> int:
        """Return for how many records the condition has held in a lane (a series on one rank)."""
        return int(self._lengths.of(lane))

    def reached(
        self, lanes: Integers, steps: Integers, flags: Flags, records: float
    ) -> Iterator[tuple[int, int, int | None]]:
        """Yield, for each value on each rank, the first row at which the condition has held for `records` records.

        The rows must be sorted by value and rank. Each result is the row, for how many records the condition has held,
        and since which step (None for one record).
        """
        lengths, since = self.lengths(lanes, steps, flags)
        new = np.flatnonzero((lengths >= records) & (self._reported[lanes] == 0))
        new = new[begins(lanes[new])]
        self._reported[lanes[new]] = 1.0
        for row in new.tolist():
            yield row, int(lengths[row]), int(since[row]) if lengths[row] > 1 else None


class Spells:
    """Finds conditions that hold for a long time, by value and rank. Remembers whether such a condition has ended."""

    def __init__(self, weight: float = 1.0) -> None:
        """Take `weight`: one record without a reported condition cancels this many records with the condition."""
        self._streaks, self._was_long = Streaks(), Memory(0.0)
        self._weight = weight
        self._balance = Memory()
        """By value and rank, the records with the condition less `weight` times those without; NaN before it began."""

    def begun(
        self, lanes: Integers, steps: Integers, flags: Flags, records: float, lasting: Floats
    ) -> Iterator[tuple[int, int]]:
        """Yield the rows at which the condition has held long enough, each with the step at which it began.

        Long enough means for `records` records in a row, and for the number of steps in `lasting`, which has one number
        for each row. After a break, a lane (a series on one rank) may be yielded again. Rows are sorted by lane.
        """
        lengths, since = self._streaks.lengths(lanes, steps, flags)
        is_long = (lengths >= records) & (steps - since + 1 >= lasting)
        was_long = previous(lanes, is_long.astype(np.float64), self._was_long)
        if not is_long.any() and np.isnan(self._balance[lanes]).all():
            return
        signs = np.where(flags, 1.0, -self._weight)
        balance = self._balance.sums(lanes, signs)
        for row in np.flatnonzero(is_long & (was_long == 0)).tolist():
            if not balance[row] - lengths[row] >= 0:
                end = int(np.searchsorted(lanes, lanes[row], side="right"))
                balance[row:end] = np.cumsum(signs[row:end]) - signs[row] + lengths[row]
                self._balance[lanes[row : row + 1]] = balance[end - 1]
                yield row, int(since[row])

    def has_ended(self, lane: int) -> bool:
        """Return whether a reported condition has ended: `weight` times the records without it exceed the others."""
        return self._balance.of(lane) < 0


HARMLESS = "what was recorded after it in this step is finite, as behind a mask"


def harmless(are_masked: Flags, are_bad: Flags, are_told: Flags, ids: Integers) -> Flags:
    """Return which rows of `are_masked` are followed in their group by rows of `are_told`, all of them finite."""
    indices, last_told, last_bad = np.arange(len(ids)), *np.full((2, len(ids)), -1)
    np.maximum.at(last_told, ids, np.where(are_told & ~are_bad, indices, -1))
    np.maximum.at(last_bad, ids, np.where(are_bad & ~are_masked, indices, -1))
    return np.asarray(are_masked & (last_told[ids] > indices) & (last_bad[ids] < indices))


THROWN_AWAY = "the optimizer got finite gradients: the program threw this backward away, or replaced what is not finite"


def thrown_away(are_bad: Flags, are_passed: Flags, are_final: Flags, steps: Integers, modules: Integers) -> Flags:
    """Return which rows belong to a backward that the program threw away, as where its own loss scale was too large.

    Nothing is non-finite at this step but gradients of outputs and inputs, and the optimizer got finite gradients of
    the parameters of a module with such a gradient.

    Args:
        are_bad: whether each row is not finite.
        are_passed: whether it is a gradient of an output or an input.
        are_final: whether it is a gradient of a parameter, as the optimizer got it, and is finite.
        steps: a number for each step and rank.
        modules: a number for each module at each step and rank.
    """
    are_passed = are_bad & are_passed
    finite = are_passed & np.isin(modules, modules[are_final])
    return np.asarray(are_passed & np.isin(steps, steps[finite]) & ~np.isin(steps, steps[are_bad & ~are_passed]))


def grouped(*columns: Integers) -> tuple[Integers, Integers]:
    """Group the rows that agree in all columns. Return the group of each row, and the first row of each group.

    The groups are sorted by the values of the columns, first by the first column.
    """
    from ..numerics.keys import mix  # imported late, because a training loads pyarrow only with its writer

    _, firsts, ids = np.unique(mix(columns), return_index=True, return_inverse=True)
    return ids.reshape(-1).astype(np.int64), firsts.astype(np.int64)
