"""What other runs tell the rules: what was normal in sound runs, and how large outputs are at other widths.

`Normal` holds the range of each statistic by value and by phase of training, and what held in every record. A *phase*
is a range of steps, each twice as long as the one before: 0 to 7, 8 to 15, 16 to 31. What `Normal` remembers grows with
the values of the model, the statistics and the logarithm of the steps, never with the ranks. Knows of no file.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ..sites import SKIPPED
from .rows import Catalog, Flags, Floats, Integers, Memory, Rows, SeriesKey, grouped, previous

_FIRST_PHASE = 8
"""Steps of the first phase: enough of them for a spread."""
_NUM_PHASES = 24
_PRIMES = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93], np.uint64)
_STATE = ("param", "buffer", "optim")
"""Sites of values that only a step changes."""
_TINY = 1e-30
_BY_CHANCE = ("grad_scale", SKIPPED)
"""Scalars that a single step, which happened to overflow, may halve."""


class Statistic(NamedTuple):
    """A number that is held against what was normal."""

    name: str
    is_log: bool
    """Whether it is the decimal logarithm of what is meant."""
    floor: float
    """The least spread that counts as normal: what a change of the seed alone may do."""
    floor_of_one: float = 0.0
    """What is added for a tensor of one element, and less as the root of their number for one of several."""
    only_above: bool = False
    """Whether less than normal is fine."""


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
"""What may hold of a value in every record."""
_EQUAL, _DIFFERENT, _CHANGES, _STAYS = range(len(HELD))
_LEAST_HELD = 8
"""Records in which something held before it is expected."""


class Numbers(NamedTuple):
    """One statistic of some rows."""

    statistic: int
    rows: Integers
    """Which rows they are of."""
    values: Floats


class Ranges(NamedTuple):
    """What was normal of some rows, each NaN where nothing is known."""

    low: Floats
    high: Floats
    spread: Floats
    """How far from these bounds is far."""


class Measures:
    """The statistics of rows, as they are learnt and judged. Rows come lane by lane, whole steps at a time."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._movement = Movement()
        self._mark, self._last = Memory(), Memory()

    def numbers(self, rows: Rows) -> Iterator[Numbers]:
        """Each statistic of the rows that have it."""
        is_scalar = self._catalog.mark("scalar", lambda key: key.site == "scalar")[rows.series]
        is_loss = self._catalog.mark("loss", lambda key: key.is_loss)[rows.series]
        with np.errstate(all="ignore"):
            rms = np.where(is_scalar, np.nan, rows.rms)
            yield _known(_SIZE, _log(rms))
            yield _known(_LARGEST, _log(rows["absmax"] / rms))
            yield _known(_OFFSET, rows["mean"] / rms)
            yield _known(_ZEROS, np.where(is_scalar, np.nan, rows["zero_count"] / rows["numel"]))
            is_param = self._catalog.mark("param", lambda key: key.site == "param")[rows.series]
            params = np.flatnonzero(is_param)
            if len(params):
                moved = _known(_UPDATE, _log(self._movement.ratio(rows.take(params))))
                yield moved._replace(rows=params[moved.rows])
            is_number = self._catalog.mark("number", lambda key: key.site == "scalar" and key.name not in _BY_CHANCE)
            for statistic, chosen in ((_LOSS, is_loss), (_NUMBER, is_number[rows.series] & ~is_loss)):
                yield _known(statistic, np.where(chosen, _log(np.abs(rows["mean"])), np.nan))
            yield self._over_ranks(rows, rms)

    def held(self, rows: Rows) -> Iterator[tuple[int, Integers, Flags]]:
        """By what may hold: rows that tell, and whether it holds of each."""
        keys = ("input", *_STATE, "grad")
        of_site = self._catalog.mark("may hold", lambda key: key.site in keys and key.phase != "recompute")
        indices = np.flatnonzero(of_site[rows.series] & ~np.isnan(rows["sum_sq"]))
        rows = rows.take(indices)
        if not len(rows):
            return
        marks = np.zeros(len(rows), np.uint64)
        for name, prime in zip(EXACT, _PRIMES, strict=True):
            marks = (marks ^ (rows[name] + 0.0).view(np.uint64)) * prime
            marks ^= marks >> np.uint64(29)
        is_state = self._catalog.mark("state", lambda key: key.site in _STATE)[rows.series]
        marks_as_floats = (marks >> np.uint64(11)).astype(np.float64)  # exact: 53 bits
        before = previous(rows.lanes, marks_as_floats, self._mark)
        is_new = rows.steps > previous(rows.lanes, rows.steps.astype(np.float64), self._last)
        told = np.flatnonzero(is_new & ~np.isnan(before))
        changed = marks_as_floats[told] != before[told]
        yield _CHANGES, indices[told], changed
        told_state = is_state[told]
        yield _STAYS, indices[told[told_state]], ~changed[told_state]
        ids, firsts, num_ranks = self._peers(rows)
        (several,) = np.nonzero(num_ranks > 1)
        if not len(several):
            return
        _, distinct_firsts = grouped(ids, (marks >> np.uint64(2)).astype(np.int64))
        num_marks = np.bincount(ids[distinct_firsts], minlength=len(firsts))
        is_several = np.isin(ids, several)
        there = np.flatnonzero(is_several)
        yield _EQUAL, indices[there], num_marks[ids[there]] == 1
        parts = self._catalog.part_of[rows.lanes]
        _, firsts_of_parts = grouped(ids, parts)
        num_parts = np.bincount(ids[firsts_of_parts], minlength=len(firsts))
        apart = np.flatnonzero(num_parts[ids] > 1)
        yield _DIFFERENT, indices[apart], num_marks[ids[apart]] >= num_parts[ids[apart]]

    def _peers(self, rows: Rows) -> tuple[Integers, Integers, Integers]:
        """The group of each row with those of its peers that are the same value, their firsts, and their ranks."""
        starts = np.flatnonzero(np.r_[True, (np.diff(rows.lanes) != 0) | (np.diff(rows.steps) != 0)])
        turns = np.arange(len(rows)) - np.repeat(starts, np.diff(np.r_[starts, len(rows)]))
        ids, firsts = grouped(rows.series, self._catalog.peers_of[rows.lanes], rows.steps, turns)
        return ids, firsts, np.bincount(ids)

    def _over_ranks(self, rows: Rows, rms: Floats) -> Numbers:
        """How far the largest rank is from the smallest, at the rank that is farthest from the median."""
        of_rank = self._catalog.mark("of a rank", lambda key: key.differs_by_batch)[rows.series]
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


class Normal:
    """What was normal in some sound runs. `learn` one after the other, then ask."""

    def __init__(self) -> None:
        self._number_of: dict[SeriesKey, int] = {}
        self._count: Floats = np.zeros((0, len(STATISTICS), _NUM_PHASES))
        self._sum, self._square = self._count.copy(), self._count.copy()
        self._low, self._high = self._count.copy(), self._count.copy()
        self._num_held: Integers = np.zeros((0, len(HELD)), np.int64)
        self._num_told: Integers = np.zeros((0, len(HELD)), np.int64)
        self._num_runs_with: Integers = np.zeros(0, np.int64)
        """By series, runs that have it."""
        self.num_runs = 0
        self.last_step = -1
        self.said: set[tuple[str, str, str, str, str]] = set()
        """What rules say of the sound runs themselves: rule, root, module, site and name."""
        self._grow(1)  # room that an unknown series, -1, may look at where no sound run has a row

    def __len__(self) -> int:
        return len(self._number_of)

    def learner(self, catalog: Catalog) -> Learner:
        """What takes in the rows of one more sound run."""
        self.num_runs += 1
        return Learner(self, catalog)

    def numbers(self, keys: list[SeriesKey], *, is_new: bool = False) -> Integers:
        """The numbers of series here; -1 for one that no sound run has, unless new ones are taken in."""
        if is_new:
            for key in keys:
                self._number_of.setdefault(key, len(self._number_of))
            self._grow(len(self._number_of))
        return np.array([self._number_of.get(key, -1) for key in keys], np.int64)

    def ranges(self, series: Integers, numbers: Numbers, steps: Integers, numels: Floats) -> Ranges:
        """What was normal of a statistic of rows, by the numbers that their series have here.

        What was there one phase before or after is normal, too: a sound training may be half or twice as fast. Few
        records and few runs say little of how far apart two sound runs may be, so the spread grows with fewer.
        """
        statistic, phases = STATISTICS[numbers.statistic], phase_of(steps)
        is_known = (series >= 0) & (self._count[series, numbers.statistic, phases] > 0)
        low, high, deviation = np.full(len(series), np.inf), np.full(len(series), -np.inf), np.zeros(len(series))
        for near in (phases - 1, phases, phases + 1):
            at = series, numbers.statistic, np.clip(near, 0, _NUM_PHASES - 1)
            low, high = np.minimum(low, self._low[at]), np.maximum(high, self._high[at])
            count = np.maximum(self._count[at], 1)
            deviation = np.fmax(
                deviation, np.sqrt(np.maximum(self._square[at] / count - (self._sum[at] / count) ** 2, 0))
            )
        floor = statistic.floor + statistic.floor_of_one / np.sqrt(np.maximum(numels, 1))
        few = 1 + 3 / np.maximum(self._count[series, numbers.statistic, phases], 1)
        spread = np.maximum(deviation, floor) * few * (1 + 2 / max(self.num_runs, 1))
        return Ranges(np.where(is_known, low, np.nan), np.where(is_known, high, np.nan), spread)

    def always(self, series: Integers, what: int) -> Flags:
        """Whether something held of series in each record of each sound run, and in enough of them."""
        told = self._num_told[series, what]
        return np.asarray((series >= 0) & (told >= _LEAST_HELD) & (self._num_held[series, what] == told))

    def in_every_run(self) -> list[SeriesKey]:
        """The series that each sound run has."""
        return [key for key, number in self._number_of.items() if self._num_runs_with[number] == self.num_runs]

    def add(self, series: Integers, numbers: Numbers, steps: Integers) -> None:
        """Take in a statistic of rows of a sound run."""
        at = series, np.full(len(series), numbers.statistic), phase_of(steps)
        for held, values in (
            (self._count, 1.0),
            (self._sum, numbers.values),
            (self._square, numbers.values**2),
        ):
            np.add.at(held, at, values)
        np.minimum.at(self._low, at, numbers.values)
        np.maximum.at(self._high, at, numbers.values)

    def add_held(self, series: Integers, what: int, holds: Flags) -> None:
        """Take in whether something held of rows of a sound run."""
        num_series = len(self._num_told)
        self._num_told[:, what] += np.bincount(series, minlength=num_series)
        self._num_held[:, what] += np.bincount(series[holds], minlength=num_series)

    def count_run(self, series: Integers) -> None:
        """Note that a run has these series."""
        self._num_runs_with[series] += 1

    def _grow(self, num_series: int) -> None:
        missing = num_series - len(self._count)
        if missing > 0:
            more = max(missing, len(self._count) // 2)
            shape = (more, *self._count.shape[1:])
            for name, value in (("_count", 0.0), ("_sum", 0.0), ("_square", 0.0), ("_low", np.inf), ("_high", -np.inf)):
                setattr(self, name, np.concatenate([getattr(self, name), np.full(shape, value)]))
            for name in ("_num_held", "_num_told"):
                setattr(self, name, np.concatenate([getattr(self, name), np.zeros((more, len(HELD)), np.int64)]))
            self._num_runs_with = np.concatenate([self._num_runs_with, np.zeros(more, np.int64)])


class Learner:
    """Takes in the rows of one sound run, whole steps at a time."""

    def __init__(self, normal: Normal, catalog: Catalog) -> None:
        self._normal, self._catalog = normal, catalog
        self._measures = Measures(catalog)
        self._series: Integers = np.zeros(0, np.int64)

    def add(self, rows: Rows) -> None:
        """The next rows, by step."""
        if not len(rows):
            return
        normal = self._normal
        normal.last_step = max(normal.last_step, int(rows.steps[-1]))
        new = self._catalog.series[len(self._series) :]
        if new:
            of_rows = normal.numbers(new, is_new=True)
            normal.count_run(of_rows)
            self._series = np.append(self._series, of_rows)
        rows = rows.by_lane()
        series = self._series[rows.series]
        for numbers in self._measures.numbers(rows):
            normal.add(series[numbers.rows], numbers, rows.steps[numbers.rows])
        for what, indices, holds in self._measures.held(rows):
            normal.add_held(series[indices], what, holds)


def phase_of(steps: Integers) -> Integers:
    """The phase of training that each step lies in."""
    phases = np.log2(np.maximum(steps, _FIRST_PHASE // 2)).astype(np.int64) - int(np.log2(_FIRST_PHASE)) + 1
    return np.asarray(np.minimum(phases, _NUM_PHASES - 1))


def steps_of(phase: int) -> tuple[int, int]:
    """The first and the last step of a phase."""
    return (0 if phase == 0 else _FIRST_PHASE << (phase - 1)), (_FIRST_PHASE << phase) - 1


def _log(values: Floats) -> Floats:
    return np.asarray(np.where(values > _TINY, np.log10(np.maximum(values, _TINY)), np.nan))


def _known(statistic: int, values: Floats) -> Numbers:
    (rows,) = np.nonzero(np.isfinite(values))
    return Numbers(statistic, rows, values[rows])


class Sizes:
    """How large outputs were over the first steps of a run, and the shapes of its parameters."""

    def __init__(self, catalog: Catalog, steps: int) -> None:
        self._catalog = catalog
        self._steps = steps
        self._first: int | None = None
        self._sums: dict[SeriesKey, tuple[float, int]] = {}

    def add(self, rows: Rows) -> bool:
        """Take in the next rows, by step; whether later ones may count, too.

        Of the first steps the second half counts: at the beginning weights have not moved.
        """
        if self._first is None:
            self._first = int(rows.steps[0])
        at = rows.steps - self._first
        is_output = self._catalog.mark("trained output", lambda key: (key.site, key.mode) == ("output", "train"))
        with np.errstate(all="ignore"):
            sizes = np.log2(rows.rms)
        chosen = np.flatnonzero(
            is_output[rows.series] & (at < self._steps) & (at >= self._steps // 2) & np.isfinite(sizes)
        )
        for series in np.unique(rows.series[chosen]).tolist():
            own = sizes[chosen[rows.series[chosen] == series]]
            total, num = self._sums.get(self._catalog.series[series], (0.0, 0))
            self._sums[self._catalog.series[series]] = total + float(own.sum()), num + len(own)
        return bool(at[-1] < self._steps)

    @property
    def outputs(self) -> dict[SeriesKey, float]:
        """By output, the mean of the binary logarithms of its root mean squares."""
        return {key: total / num for key, (total, num) in self._sums.items()}

    @property
    def shapes(self) -> dict[tuple[str, str, str], tuple[int, ...]]:
        """By root, module and name of a parameter."""
        series = zip(self._catalog.series, self._catalog.about, strict=True)
        return {(key.root, key.module_path, key.name): about.shape for key, about in series if key.site == "param"}

    def width(self, base: Sizes) -> float:
        """How wide the model is beside another: the ratio that most dims of parameters have, of those that differ."""
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
