"""The steps of one rank as the writer thread sees them, and the rows that rules read of these steps.

Only one thread may use an object of this module. No function opens a file.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import numpy.ma  # numpy imports it at the first `unique`: on the writer thread, where a failing disk fails the import

from ..format.manifest import RecordedModule
from ..records import Measured, ProbedStep, Staged
from ..sites import OF_MODULES
from .rows import IS_PROBE, RECORDED, About, Catalog, Floats, Integers, Memory, Rows, SeriesKey

_HASH = "fingerprint.hash"
_COLUMNS = ("lane", "numel", "micro_step", _HASH, *RECORDED)
_EXACT = 1 << 53
"""The integers below are exact as a float."""
_MAX_ROWS, _MAX_STEPS = 300_000, 1024
"""The most rows and steps that `KeptSteps` keeps. A row takes 16 bytes (of the probe) or 120 (of a record)."""
_NUM_TELLING, _NUM_LAST = 256, 32
"""The most steps that are kept because they have something new, and because they are the last."""
_SUM_SQ = _COLUMNS.index("sum_sq")
_GOLDEN = 0x9E3779B1
_NONE = np.zeros(0)
NO_RECORDS: Floats = np.zeros((0, len(_COLUMNS)))

_numbers_of = attrgetter(*RECORDED)


class SeenStep(NamedTuple):
    """A step that is over."""

    probed: ProbedStep
    records: Floats
    """For each record a row, with the columns `_COLUMNS`. A statistic that the record does not have is NaN."""


class SeenSteps:
    """Numbers the values of one rank in a catalog that no other object changes, and makes the rows of its steps."""

    def __init__(self, rank: int, catalog: Catalog) -> None:
        self._rank = rank
        self._catalog = catalog
        self._whole_numels: list[int] = []
        """For each lane, the number of elements of the complete tensor if this rank has a chunk of it; else 0."""
        self._lanes: dict[tuple[object, ...], int] = {}
        """Maps a value's place, mode, phase and scope to its lane (the index of a series on this rank)."""
        self._probed_lanes: Integers = np.zeros(0, np.int64)
        """For each series of the probe, its lane."""
        self._records: list[tuple[float | None, ...]] = []

    def add(self, staged: Staged, measured: Measured) -> None:
        """Take the statistics of a record of the current step. A forward that is computed again has no row."""
        if staged.phase == "recompute":
            return
        place, moment = staged.origin, staged.moment
        key = (place, moment.mode, staged.phase, staged.scope)
        lane = self._lanes.get(key)
        if lane is None:
            of_series = SeriesKey(*place[:4], moment.mode, staged.phase, staged.scope or "")
            lane = self._lanes[key] = self._lane(of_series, About(staged.dtype, staged.shape), _whole_numel(staged))
        fingerprint = measured.fingerprint if place.site == "input" and not place.module_path else None
        hashed = None if fingerprint is None else fingerprint % _EXACT
        self._records.append((lane, math.prod(staged.shape), moment.micro_step, hashed, *_numbers_of(measured)))

    def end(self, probed: ProbedStep | None, step: int) -> SeenStep | None:
        """Return the current step, which is over. `probed` is what the probe measured at it. None without numbers."""
        records, self._records = self._records, []
        if probed is None and not records:
            return None
        matrix = np.array(records, np.float64) if records else NO_RECORDS
        return SeenStep(ProbedStep(step, [], _NONE, _NONE) if probed is None else probed, matrix)

    def rows_of(self, steps: Sequence[SeenStep], catalog: Catalog, sites: Collection[str]) -> Rows:
        """Return the rows of steps: of each step the numbers of the probe that no record has, and then the records.

        Args:
            steps: at least one step.
            catalog: the catalog of this object, or one that `copied_catalog` has returned.
            sites: only rows of these sites are returned.
        """
        for one in steps:
            self._know_series(one.probed)
        numbers_of_steps = np.array([one.probed.step for one in steps], np.int64)
        nums = [len(one.probed.sums) for one in steps]
        at, lanes = np.repeat(numbers_of_steps, nums), np.concatenate([self._probed_lanes[:num] for num in nums])
        sums, numels = (np.concatenate(columns) for columns in zip(*(one.probed[2:] for one in steps), strict=True))
        is_wanted = self._catalog.mark(f"at {sites}", lambda key: key.site in sites)
        own_at = np.repeat(numbers_of_steps, [len(one.records) for one in steps])
        own_rows = np.concatenate([one.records for one in steps])
        own_lanes = own_rows[:, 0].astype(np.int64)
        is_own = is_wanted[own_lanes]
        own_at, own_lanes = own_at[is_own], own_lanes[is_own]
        records = dict(zip(_COLUMNS, own_rows[is_own].T, strict=True))
        is_taken, num_lanes = (numels > 0) & is_wanted[lanes], self._catalog.num_lanes
        if len(own_lanes):
            is_taken &= ~np.isin(at * num_lanes + lanes, own_at * num_lanes + own_lanes)
        at, lanes, sums, numels = at[is_taken], lanes[is_taken], sums[is_taken], numels[is_taken]
        ones = np.ones(len(sums))
        known = {"sum_sq": sums, "l2": np.sqrt(sums), "numel": numels, IS_PROBE: ones}
        known |= {"nan_count": ones * 0, "inf_count": ones * 0}
        records[IS_PROBE] = np.zeros(len(own_lanes))
        columns = {name: np.append(known.get(name, ones * np.nan), column) for name, column in records.items()}
        rows = Rows(catalog, np.append(at, own_at), np.append(lanes, own_lanes), columns)
        return rows.take(np.argsort(rows.steps, kind="stable")) if len(own_lanes) and len(steps) > 1 else rows

    def copied_catalog(self, modules: Mapping[tuple[str, str], RecordedModule]) -> Catalog:
        """Return a catalog with the same lanes, with these facts about modules and with the chunks of parameters."""
        copy = Catalog(modules)
        for key, about, whole_numel in zip(self._catalog.series, self._catalog.about, self._whole_numels, strict=True):
            copy.number(key, about._replace(whole_numel=whole_numel))
        numbers = np.arange(len(copy.series))
        copy.lanes(numbers, np.full(len(numbers), self._rank))
        return copy

    def _know_series(self, probed: ProbedStep) -> None:
        new = probed.series[len(self._probed_lanes) : len(probed.sums)]
        if new:
            more = []
            for one in new:
                key = SeriesKey(*one.origin[:4], one.mode, one.phase, one.scope or "")
                whole_numel = int(one.facts.get("global_numel") or 0) if one.origin.site in OF_MODULES else 0
                more.append(self._lane(key, About(str(one.facts.get("dtype", "")), ()), whole_numel))
            self._probed_lanes = np.append(self._probed_lanes, np.array(more, np.int64))

    def _lane(self, key: SeriesKey, about: About, whole_numel: int) -> int:
        number = self._catalog.number(key, about)
        if number == len(self._whole_numels):
            self._whole_numels.append(whole_numel)
        return int(self._catalog.lanes(np.array([number]), np.array([self._rank]))[0])


class KeptSteps:
    """Some steps of the whole run, so many as a fixed amount of memory holds: of irregular distances in a long run.

    Steps at which a value is zero, or not zero, for the first time are kept in any case, and so are the last steps.
    """

    def __init__(self) -> None:
        self._steps: dict[int, SeenStep] = {}
        """By the number of steps before it. The programs that never count steps have one step number."""
        self._num_seen = 0
        self._telling: list[SeenStep] = []
        self._last: deque[SeenStep] = deque()
        self._num_rows_of_last = 0
        self._one_of = 1
        """Of the other steps, one of so many is kept. A power of two."""
        self._num_rows = 0
        self._of_probe, self._of_records = _Zeros(), _Zeros()

    @property
    def steps(self) -> Sequence[SeenStep]:
        kept = {id(one): one for one in (*self._telling, *self._steps.values(), *self._last)}
        return sorted(kept.values(), key=lambda one: one.probed.step)

    def add(self, steps: Iterable[SeenStep]) -> None:
        """Keep the next steps. If they are too many, half of all are dropped, and half of those that follow."""
        for one in steps:
            self._last.append(one)
            self._num_rows_of_last += _num_rows_of(one)
            while len(self._last) > 1 and (len(self._last) > _NUM_LAST or self._num_rows_of_last > _MAX_ROWS // 4):
                self._num_rows_of_last -= _num_rows_of(self._last.popleft())
            seen = np.flatnonzero(one.probed.numels)
            is_telling = self._of_probe.has_news(seen, one.probed.sums[seen])
            is_telling |= self._of_records.has_news(one.records[:, 0].astype(np.int64), one.records[:, _SUM_SQ])
            if is_telling and len(self._telling) < _NUM_TELLING and self._num_rows < _MAX_ROWS:
                self._telling.append(one)
                self._num_rows += _num_rows_of(one)
            elif self._is_kept(self._num_seen):
                self._steps[self._num_seen] = one
                self._num_rows += _num_rows_of(one)
            self._num_seen += 1
        while len(self._steps) > 1 and (self._num_rows > _MAX_ROWS or len(self._steps) > _MAX_STEPS):
            self._one_of *= 2
            self._steps = {number: one for number, one in self._steps.items() if self._is_kept(number)}
            self._num_rows = sum(map(_num_rows_of, (*self._telling, *self._steps.values())))

    def _is_kept(self, number: int) -> bool:
        # Irregular distances, because some trainings alternate.
        return (number * _GOLDEN >> 16) % self._one_of == 0


class _Zeros:
    """Remembers of each value whether it was ever zero in all elements, and whether it was ever not."""

    def __init__(self) -> None:
        self._was = Memory(0.0)
        """At twice a value's number, 1 if the value was ever zero; at the next place, 1 if it was ever not."""

    def has_news(self, values: Integers, sums: Floats) -> bool:
        """Take the sums of squares of some values. Return whether a value is zero, or is not, for the first time."""
        places = 2 * values + (sums != 0)
        is_new = not self._was[places].all()
        if is_new:
            self._was[places] = 1.0
        return is_new


def _num_rows_of(one: SeenStep) -> int:
    return len(one.probed.sums) + len(one.records)


def _whole_numel(staged: Staged) -> int:
    chunk = staged.chunk
    is_part = chunk is not None and staged.origin.site in OF_MODULES and chunk.global_shape != staged.shape
    return math.prod(chunk.global_shape) if is_part and chunk is not None else 0
