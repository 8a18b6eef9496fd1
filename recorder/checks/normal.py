"""The facts that rules take from other runs: normal ranges in sound runs, and sizes of outputs at other widths.

A sound run is one that the user knows to have gone well. `Normal` holds the range of each statistic, by value and phase
of training, and the conditions that were true in every record. A *phase* is a range of steps: 0 to 7, 8 to 15, 16 to
31, and so on, each twice as long as the one before. The memory grows with the values, the statistics and the logarithm
of the steps, not with the ranks. No file is opened.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ..sites import SKIPPED, UPDATE
from .rows import Catalog, Flags, Floats, Integers, Memory, Rows, SeriesKey, as_exact_floats, grouped, previous

_FIRST_PHASE = 8
"""The number of steps in the first phase, large enough for a standard deviation."""
_NUM_PHASES = 24
_STATE = ("param", "buffer", "optim")
"""The sites (kinds of values) that only training steps change."""
_TINY = 1e-30
_BY_CHANCE = ("grad_scale", SKIPPED)
"""The names of scalars that a single overflow changes, which happens by chance."""


class Statistic(NamedTuple):
    """A statistic of a value that is compared with its normal range in sound runs."""

    name: str
    is_log: bool
    """Whether the number is the decimal logarithm of the named quantity."""
    floor: float
    """The least standard deviation to assume. Changing only the random seed causes such a deviation."""
    floor_of_one: float = 0.0
    """For a value of n elements, this number over the root of n is added to `floor`."""
    only_above: bool = False
    """Whether only numbers above the normal range are findings."""


STATISTICS = (
    Statistic("root mean square", is_log=True, floor=0.02, floor_of_one=0.3),
    Statistic("largest element over root mean square", is_log=True, floor=0.15),
    Statistic("mean over root mean square", is_log=False, floor=0.1, floor_of_one=0.5),
    Statistic("share of zeros", is_log=False, floor=0.03),
    Statistic("update over weight", is_log=True, floor=0.15, only_above=True),
    Statistic("spread over ranks", is_log=True, floor=0.05, only_above=True),
    Statistic("loss", is_log=True, floor=0.1, only_above=True),
    Statistic("number", is_log=True, floor=0.05),
)
_SIZE, _LARGEST, _OFFSET, _ZEROS, _UPDATE, _RANKS, _LOSS, _NUMBER = range(len(STATISTICS))

HELD = ("equal on all ranks", "different on all ranks", "changes from record to record", "never changes")
"""Conditions that may be true for a value in every record."""
_EQUAL, _DIFFERENT, _CHANGES, _STAYS = range(len(HELD))
_LEAST_HELD = 8
"""The number of records in which a condition must hold before it is expected to hold in other runs."""


class Numbers(NamedTuple):
    """The numbers of one statistic, for the rows that have it."""

    statistic: int
    rows: Integers
    """The indices of the rows that have the statistic."""
    values: Floats


class Ranges(NamedTuple):
    """The normal ranges of a statistic, one for each row; NaN where nothing is known."""

    low: Floats
    high: Floats
    spread: Floats
    """The unit of a distance from `low` or `high`: a standard deviation, enlarged for small samples."""


class Measures:
    """Computes the statistics to learn or to judge. The rows are of complete steps, sorted by value and rank."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._movement = Movement()
        self._before, self._last = Memory(), Memory()

    def numbers(self, rows: Rows) -> Iterator[Numbers]:
        """Yield the numbers of each statistic, for the rows that have it."""
        is_scalar, is_loss = rows.at("scalar"), rows.where("loss", lambda key: key.is_loss)
        with np.errstate(all="ignore"):
            rms = np.where(is_scalar, np.nan, rows.rms)
            yield _known(_SIZE, _log(rms))
            yield _known(_LARGEST, _log(rows["absmax"] / rms))
            yield _known(_OFFSET, rows["mean"] / rms)
            yield _known(_ZEROS, np.where(is_scalar, np.nan, rows["zero_count"] / rows["numel"]))
            params = np.flatnonzero(rows.at("param"))
            if len(params):
                moved = _known(_UPDATE, _log(self._movement.ratio(rows.take(params))))
                yield moved._replace(rows=params[moved.rows])
            is_number = rows.where("number", lambda key: key.site == "scalar" and key.name not in _BY_CHANCE)
            for statistic, chosen in ((_LOSS, is_loss), (_NUMBER, is_number & ~is_loss)):
                yield _known(statistic, np.where(chosen, _log(np.abs(rows["mean"])), np.nan))
            yield self._over_ranks(rows, rms)

    def held(self, rows: Rows) -> Iterator[tuple[int, Integers, Flags]]:
        """Yield each condition of `HELD`, the indices of the rows to which it applies, and for which it holds."""
        is_candidate = rows.at("input", *_STATE, "grad") & rows.where("once", lambda key: key.phase != "recompute")
        indices = np.flatnonzero(is_candidate & ~np.isnan(rows["sum_sq"]))
        rows = rows.take(indices)
        if not len(rows):
            return
        hashes = rows.fingerprints(EXACT)
        numbers = as_exact_floats(hashes)
        before = previous(rows.lanes, numbers, self._before)
        is_new = rows.steps > previous(rows.lanes, rows.steps.astype(np.float64), self._last)
        known = np.flatnonzero(is_new & ~np.isnan(before))
        is_changed = numbers[known] != before[known]
        yield _CHANGES, indices[known], is_changed
        of_state = rows.at(*_STATE)[known]
        yield _STAYS, indices[known[of_state]], ~is_changed[of_state]
        ids, firsts, num_ranks = self._peers(rows)
        if not (num_ranks > 1).any():
            return
        _, distinct = grouped(ids, (hashes >> np.uint64(2)).astype(np.int64))
        num_values = np.bincount(ids[distinct], minlength=len(firsts))
        shared = np.flatnonzero(num_ranks[ids] > 1)
        yield _EQUAL, indices[shared], num_values[ids[shared]] == 1
        _, distinct = grouped(ids, self._catalog.part_of[rows.lanes])
        num_parts = np.bincount(ids[distinct], minlength=len(firsts))
        apart = np.flatnonzero(num_parts[ids] > 1)
        yield _DIFFERENT, indices[apart], num_values[ids[apart]] >= num_parts[ids[apart]]

    def _peers(self, rows: Rows) -> tuple[Integers, Integers, Integers]:
        """Group rows of a value on several ranks. Return each row's group, each group's first row and rank count."""
        starts = np.flatnonzero(np.r_[True, (np.diff(rows.lanes) != 0) | (np.diff(rows.steps) != 0)])
        turns = np.arange(len(rows)) - np.repeat(starts, np.diff(np.r_[starts, len(rows)]))
        ids, firsts = grouped(rows.series, self._catalog.peers_of[rows.lanes], rows.steps, turns)
        return ids, firsts, np.bincount(ids)

    def _over_ranks(self, rows: Rows, rms: Floats) -> Numbers:
        of_rank = rows.where("of a rank", lambda key: key.differs_by_batch)
        (indices,) = np.nonzero((rms > _TINY) & of_rank)
        if not len(indices):
            return Numbers(_RANKS, indices, np.zeros(0))
        ids, _, num_ranks = self._peers(rows.take(indices))
        logs = np.log10(rms[indices])
        order = np.lexsort((logs, ids))
        starts = np.cumsum(num_ranks) - num_ranks
        low, high = order[starts], order[starts + num_ranks - 1]
        middle = logs[order[starts + (num_ranks - 1) // 2]]
        farthest = np.where(logs[high] - middle > middle - logs[low], high, low)
        (several,) = np.nonzero(num_ranks > 1)
        return Numbers(_RANKS, indices[farthest[several]], (logs[high] - logs[low])[several])


_COUNT, _SUM, _SQUARE, _LOW, _HIGH = range(5)
_EMPTY = np.array([0.0, 0.0, 0.0, np.inf, -np.inf])[:, None, None, None]
_HOLDS, _ASKED = range(2)


class Normal:
    """The normal ranges and conditions of some sound runs. Learn the runs first, one after the other; then query."""

    def __init__(self) -> None:
        self._number_of: dict[SeriesKey, int] = {}
        self._sums: Floats = np.zeros((len(_EMPTY), 0, len(STATISTICS), _NUM_PHASES))
        """Count, sum, sum of squares, lowest and highest number; shape (these five, series, statistic, phase)."""
        self._held: Integers = np.zeros((2, 0, len(HELD)), np.int64)
        """In how many records a condition holds, and in how many it is tested; shape (these two, series, condition)."""
        self._num_runs_with: Integers = np.zeros(0, np.int64)
        """By series, the number of runs that have the series."""
        self.num_runs = 0
        self.last_step = -1
        self.said: set[tuple[str, str, str, str, str]] = set()
        """The findings that rules yielded for the sound runs, as (rule, root, module, site, name)."""
        self._grow(1)  # one more place for index -1, which stands for a series that no sound run has

    def __len__(self) -> int:
        return len(self._number_of)

    def learner(self, catalog: Catalog) -> Learner:
        """Return an object that takes the rows of one more sound run."""
        self.num_runs += 1
        return Learner(self, catalog)

    def numbers(self, keys: list[SeriesKey], *, is_new: bool = False) -> Integers:
        """Return the indexes of series. An unknown series has -1, or gets a new index if `is_new` is True."""
        if is_new:
            for key in keys:
                self._number_of.setdefault(key, len(self._number_of))
            self._grow(len(self._number_of))
        return np.array([self._number_of.get(key, -1) for key in keys], np.int64)

    def ranges(self, series: Integers, numbers: Numbers, steps: Integers, numels: Floats) -> Ranges:
        """Return the normal range of a statistic for each row. `series` are indexes from `numbers()`.

        Values of the phases before and after are normal, too: a sound training may be half or twice as fast. The fewer
        records or runs were learnt, the wider is the range, because they say less about differences.
        """
        statistic, phases = STATISTICS[numbers.statistic], phase_of(steps)
        here = self._sums[:, series, numbers.statistic, phases]
        is_known = (series >= 0) & (here[_COUNT] > 0)
        low, high, deviation = np.full(len(series), np.inf), np.full(len(series), -np.inf), np.zeros(len(series))
        for near in (phases - 1, phases, phases + 1):
            sums = self._sums[:, series, numbers.statistic, np.clip(near, 0, _NUM_PHASES - 1)]
            low, high = np.minimum(low, sums[_LOW]), np.maximum(high, sums[_HIGH])
            count = np.maximum(sums[_COUNT], 1)
            variance = sums[_SQUARE] / count - (sums[_SUM] / count) ** 2
            deviation = np.fmax(deviation, np.sqrt(np.maximum(variance, 0)))
        floor = statistic.floor + statistic.floor_of_one / np.sqrt(np.maximum(numels, 1))
        few = 1 + 3 / np.maximum(here[_COUNT], 1)
        spread = np.maximum(deviation, floor) * few * (1 + 2 / max(self.num_runs, 1))
        return Ranges(np.where(is_known, low, np.nan), np.where(is_known, high, np.nan), spread)

    def always(self, series: Integers, what: int) -> Flags:
        """Return, for each series, whether a condition held in all records of all sound runs, if enough."""
        holds, asked = self._held[:, series, what]
        return np.asarray((series >= 0) & (asked >= _LEAST_HELD) & (holds == asked))

    def in_every_run(self) -> list[SeriesKey]:
        """Return the series that every sound run has."""
        return [key for key, number in self._number_of.items() if self._num_runs_with[number] == self.num_runs]

    def add(self, series: Integers, numbers: Numbers, steps: Integers) -> None:
        at = series, np.full(len(series), numbers.statistic), phase_of(steps)
        for which, values in ((_COUNT, 1.0), (_SUM, numbers.values), (_SQUARE, numbers.values**2)):
            np.add.at(self._sums[which], at, values)
        np.minimum.at(self._sums[_LOW], at, numbers.values)
        np.maximum.at(self._sums[_HIGH], at, numbers.values)

    def add_held(self, series: Integers, what: int, holds: Flags) -> None:
        """Learn in which rows of a sound run a condition held."""
        for which, own in ((_HOLDS, series[holds]), (_ASKED, series)):
            self._held[which, :, what] += np.bincount(own, minlength=self._held.shape[1])

    def count_run(self, series: Integers) -> None:
        self._num_runs_with[series] += 1

    def _grow(self, num_series: int) -> None:
        missing = num_series - self._sums.shape[1]
        if missing > 0:
            more = max(missing, self._sums.shape[1] // 2)
            room = np.broadcast_to(_EMPTY, (len(_EMPTY), more, *self._sums.shape[2:]))
            self._sums = np.concatenate([self._sums, room], axis=1)
            self._held = np.concatenate([self._held, np.zeros((2, more, len(HELD)), np.int64)], axis=1)
            self._num_runs_with = np.concatenate([self._num_runs_with, np.zeros(more, np.int64)])


class Learner:
    """Learns the rows of one sound run. Each call takes complete steps."""

    def __init__(self, normal: Normal, catalog: Catalog) -> None:
        self._normal, self._catalog = normal, catalog
        self._measures = Measures(catalog)
        self._series: Integers = np.zeros(0, np.int64)

    def add(self, rows: Rows) -> None:
        if not len(rows):
            return
        normal = self._normal
        normal.last_step = max(normal.last_step, int(rows.steps[-1]))
        new = self._catalog.series[len(self._series) :]
        if new:
            numbers_of_new = normal.numbers(new, is_new=True)
            normal.count_run(numbers_of_new)
            self._series = np.append(self._series, numbers_of_new)
        rows = rows.by_lane()
        series = self._series[rows.series]
        for numbers in self._measures.numbers(rows):
            normal.add(series[numbers.rows], numbers, rows.steps[numbers.rows])
        for what, indices, holds in self._measures.held(rows):
            normal.add_held(series[indices], what, holds)


def phase_of(steps: Integers) -> Integers:
    """Return the phase of training that each step belongs to."""
    phases = np.log2(np.maximum(steps, _FIRST_PHASE // 2)).astype(np.int64) - int(np.log2(_FIRST_PHASE)) + 1
    return np.asarray(np.minimum(phases, _NUM_PHASES - 1))


def steps_of(phase: int) -> tuple[int, int]:
    """Return the first and the last step of a phase."""
    return (0 if phase == 0 else _FIRST_PHASE << (phase - 1)), (_FIRST_PHASE << phase) - 1


def _log(values: Floats) -> Floats:
    return np.asarray(np.where(values > _TINY, np.log10(np.maximum(values, _TINY)), np.nan))


def _known(statistic: int, values: Floats) -> Numbers:
    (rows,) = np.nonzero(np.isfinite(values))
    return Numbers(statistic, rows, values[rows])


class Sizes:
    """The sizes of outputs over the first steps of a run, and the shapes of the run's parameters."""

    def __init__(self, catalog: Catalog, steps: int) -> None:
        self._catalog = catalog
        self._steps = steps
        self._first: int | None = None
        self._sums: dict[SeriesKey, tuple[float, int]] = {}

    def add(self, rows: Rows) -> bool:
        """Take the next rows, ordered by step, and return whether later rows may count.

        Only the second half of the first `steps` steps counts, because the weights have hardly moved before.
        """
        if self._first is None:
            self._first = int(rows.steps[0])
        at = rows.steps - self._first
        is_output = rows.where("trained output", lambda key: (key.site, key.mode) == ("output", "train"))
        is_output &= (at < self._steps) & (at >= self._steps // 2)
        with np.errstate(all="ignore"):
            sizes = np.log2(rows.rms)
        chosen = np.flatnonzero(is_output & np.isfinite(sizes))
        for series in np.unique(rows.series[chosen]).tolist():
            own = sizes[chosen[rows.series[chosen] == series]]
            total, num = self._sums.get(self._catalog.series[series], (0.0, 0))
            self._sums[self._catalog.series[series]] = total + float(own.sum()), num + len(own)
        return bool(at[-1] < self._steps)

    @property
    def outputs(self) -> dict[SeriesKey, float]:
        """For each output, the mean base-2 logarithm of its root mean square."""
        return {key: total / num for key, (total, num) in self._sums.items()}

    @property
    def shapes(self) -> dict[tuple[str, str, str], tuple[int, ...]]:
        """The shape of each parameter, by root, module path and name."""
        series = zip(self._catalog.series, self._catalog.about, strict=True)
        return {(key.root, key.module_path, key.name): about.shape for key, about in series if key.site == "param"}

    def width(self, base: Sizes) -> float:
        """Return this model's width over that of `base`: the most frequent ratio between dims that differ."""
        shapes = base.shapes
        ratios = [
            size / shapes[key][index]
            for key, shape in self.shapes.items()
            if len(shapes.get(key, ())) == len(shape)
            for index, size in enumerate(shape)
            if size != shapes[key][index] > 0
        ]
        return statistics.mode(ratios) if ratios else 1.0


EXACT = ("sum", "sum_sq", "min", "max")
"""The statistics that are compared to find equal tensors. Different tensors hardly ever agree in all of these."""


class Movement:
    """Measures how far a value moves from one record to the next, relative to its size."""

    def __init__(self) -> None:
        self._norm, self._sum, self._step, self._numel = Memory(), Memory(), Memory(), Memory()

    def ratio(self, rows: Rows) -> Floats:
        """Return, for each row, the change per step since the last record, relative to the norm; NaN if unknown.

        The change is a lower bound, from the changes of the norm and the sum. Rows are sorted by value and rank. A
        value with another number of elements is another value, such as a larger head in the place of a smaller one.
        """
        lanes, steps = rows.lanes, rows.steps.astype(np.float64)
        is_finite = np.nan_to_num(rows["nan_count"]) + np.nan_to_num(rows["inf_count"]) == 0
        norm, total = (np.where(is_finite, some, np.nan) for some in (np.sqrt(rows["sum_sq"]), rows["sum"]))
        before = previous(lanes, norm, self._norm)
        by_sum = np.abs(total - previous(lanes, total, self._sum)) / np.sqrt(np.maximum(rows["numel"], 1))
        is_same = rows["numel"] == previous(lanes, rows["numel"], self._numel)
        moved = np.where(is_same, np.fmax(np.abs(norm - before), by_sum), np.nan)
        gap = np.fmax(steps - previous(lanes, steps, self._step), 1)
        with np.errstate(all="ignore"):
            return np.asarray(moved / gap / before)


class Moves:
    """Adds up how far the updates have moved the parameters, by the numbers of the probe."""

    total, num = 0.0, 0
    """The sum of the lengths of all updates, each in parts of the norm of all parameters, and their number."""

    def add(self, rows: Rows) -> Rows:
        """Take the rows of updates and parameters among these rows of whole steps, and return the rows of scalars."""
        ids, squares, is_update = grouped(rows.steps)[0], np.nan_to_num(rows["sum_sq"]), rows.at(UPDATE)
        moved, sizes = np.bincount(ids, squares * is_update), np.bincount(ids, squares * rows.at("param"))
        known = (np.bincount(ids, is_update) > 0) & (sizes > 0)
        self.total += float(np.sqrt(moved[known] / sizes[known]).sum())
        self.num += int(known.sum())
        return rows.take(rows.at("scalar"))
