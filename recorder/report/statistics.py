"""The statistics of a run as cubes, with a value for each series, lane (drawn line) and step. Never reads a payload."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ..analyze.stats import WHY, with_why
from ..columns import COUNTS, MEASURED
from ..errors import LookupFailedError
from ..numerics.keys import Integers
from ..numerics.moments import norm_of_parts
from ..run.run import GlobalView, Run
from ..sites import UPDATE
from ..system.text import listed
from .axes import (
    PROBED,
    Axes,
    DrawnSeries,
    Lanes,
    OddRanks,
    SeriesValues,
    StepRows,
    in_order,
    spread_of,
    step_rows,
    values_of,
)  # fmt: skip
from .blocks import Cube, GrowingCube, PageBlock
from .distributions import HistogramCollector, UnitsCollector

DRAWN = ("absmax", "l2", "mean", "std", "min", "max")
"""The statistics that a page may have, the most informative first. A page always has the counts."""
_LEAST_DRAWN = 3
"""A large run's page has at least this many statistics. More are left out to make room for more steps."""
_OF_SCALARS = ("mean", *COUNTS)
_JUDGED_BY = ("l2", "absmax", "mean", "std", "min", "max")
"""The statistics by which ranks may be compared, the best first. The first one that the page has is used."""
_DEVIATION = "deviation"
_MAX_CELLS = 1_400_000
"""The most cells (numbers) of a page, which has at most 2 MB if each cell has one byte."""
_MAX_FINE_CELLS = 250_000
"""A cube with at most this many cells stores each cell in two bytes. A larger cube uses one byte."""
_MIN_COLUMNS, _MAX_COLUMNS = 32, 1000
_MAX_SCALAR_COLUMNS = 2000
_ENOUGH_COLUMNS = 160
"""Statistics are left out, from the last on, until there is room for this many columns or for all steps."""
_MAX_RANK_BINS = 64
_MAX_RANK_CELLS = 300_000
"""The most cells of the map of series and ranks. If there is room, each rank has a column of its own."""
_MAX_GLOBAL_ROWS = 120_000
"""In a run with more rows than this, values of all ranks together are drawn only at some steps."""
_MAX_GLOBAL_STEP_ROWS = 20_000
"""The most rows in an average step for which values of all ranks together are drawn. Assembling a step of thousands of
ranks takes minutes and gigabytes."""
_MAX_REASONS = 2000
_ALIKE = 1e-3
"""The largest relative difference between two norms of one tensor, whose sums were made in different orders."""
_LARGEST = 3e38
_MANY_STEPS = 1 << 30
"""The number of steps that a growing run is assumed to reach."""


class StatisticsBlocks:
    """Collects the statistics of one run as cubes for its page."""

    def __init__(
        self, run: Run, axes: Axes, *, asked: Sequence[str] = (), steps: Sequence[int] | None = None,
        share: float = 1.0, prefix: str = "", is_growing: bool = False, has_global: bool | None = None,
    ) -> None:  # fmt: skip
        """Make room for the statistics, and read nothing yet.

        `asked` names the statistics to draw. Raise LookupFailedError for an unknown one. By default there are as many
        as fit into `share` (a fraction) of the page's room. `steps` are the steps of the columns, by default those of
        this run, which a second run may not share. `prefix` begins the block names. `is_growing` means that any number
        of steps may follow. Odd ranks then have no lanes of their own. `has_global` says whether to assemble values of
        all ranks together, by default only if that does not take minutes.
        """
        self._run, self._axes, self._prefix = run, axes, prefix
        if has_global is None:
            has_global = axes.num_rows <= _MAX_GLOBAL_STEP_ROWS * max(len(axes.steps | axes.scalar_steps), 1)
        self.lanes = Lanes(run, can_have_global=has_global)
        for name in asked:
            if name not in DRAWN:
                raise LookupFailedError(f"no statistic {name!r} to draw; there are {', '.join(DRAWN)}")
        self.series = [key for key, number in axes.index.items() if not axes.is_scalar[number]]
        self.scalars = [key for key, number in axes.index.items() if axes.is_scalar[number]]
        self._number = np.full(len(axes.index) + 1, -1, np.int64)
        for keys in (self.series, self.scalars):
            for number, key in enumerate(keys):
                self._number[axes.index[key]] = number
        self._is_scalar = np.array([*axes.is_scalar, False])
        self._steps = sorted(axes.steps) if steps is None else steps
        num_lanes = len(self.lanes.described) if is_growing else self.lanes.most
        self._make = GrowingCube if is_growing else Cube
        self.names, num_columns = _fit(
            len(self.series), num_lanes, _MANY_STEPS if is_growing else len(self._steps), asked, share
        )
        self.cube = self._make(
            steps=self._steps, num_columns=num_columns, num_series=len(self.series), num_lanes=num_lanes,
            statistics=(*self.names, *COUNTS, "numel"),
        )  # fmt: skip
        scalar_steps = sorted(axes.scalar_steps)
        self.scalar_cube = self._make(
            steps=scalar_steps, num_columns=_MAX_COLUMNS if is_growing else min(len(scalar_steps), _MAX_SCALAR_COLUMNS),
            num_series=len(self.scalars), num_lanes=num_lanes, statistics=_OF_SCALARS,
        )  # fmt: skip
        self.odd = OddRanks(self.lanes.ranks)
        self._judged_by = next((name for name in _JUDGED_BY if name in self.names), None)
        self.histograms, self.units = HistogramCollector(self.lanes.ranks), UnitsCollector(self.lanes.ranks)
        self.reasons: dict[tuple[int, bool], str] = {}
        """Why a series has no statistics, by its index and a flag. The flag is True for values of all ranks."""
        self.global_steps: int | None = None
        """The number of steps that have values of all ranks together. None if every step has such values."""
        self._make_rank_cubes()

    def _make_rank_cubes(self) -> None:
        ranks, num_bins = self.lanes.ranks, min(len(self.lanes.ranks), _MAX_RANK_BINS)
        self._sites = list(dict.fromkeys(key.site for key in self.series))
        self._site_of = np.array([self._sites.index(key.site) for key in self.series] or [0], np.int64)
        names = (_DEVIATION, "nan_count", "inf_count")
        self.by_rank: Cube | None = None
        self.rank_steps: Cube | None = None
        if self.lanes.has_spread:
            num_series = len(self.series)
            num_columns = max(num_bins, min(len(ranks), _MAX_RANK_CELLS // max(num_series, 1)))
            self.by_rank = Cube(
                steps=ranks, num_columns=num_columns, num_series=num_series, num_lanes=1, statistics=names
            )
            self.rank_steps = self._make(
                steps=self._steps, num_columns=min(self.cube.shape[2], 200), num_series=len(self._sites),
                num_lanes=num_bins, statistics=names,
            )  # fmt: skip

    def collect(
        self, rows: StepRows, probe: Sequence[SeriesValues], report: Callable[[int], None] = lambda num_rows: None
    ) -> None:
        """Read all rows, assemble the values of all ranks, and add the numbers of the probe.

        `report` is called with each table's number of rows.
        """
        for table in rows:
            self.add(table)
            report(table.num_rows)
        if self.lanes.has_spread:
            self.lanes.set_odd(self.odd.found())
            odd = [writer for writer in self._run.writers if writer.rank in self.lanes.odd]
            with step_rows(Run(self._run.path, self._run.manifest, odd), rows.ranges) as of_odd:
                for values, cube in (pair for table in (of_odd if odd else ()) for pair in self._split(table)):
                    self._put_own(values, cube)
        if self.lanes.has_global and not self.lanes.is_merged:
            self._add_global()
        self.add_probe(probe)

    def add_probe(self, values: Sequence[SeriesValues]) -> None:
        """Add the numbers of the probe. Compute the norms of global tensors from the norms that the ranks have."""
        for one in values:
            series = np.where(one.series >= 0, self._number[one.series], -1)
            is_drawn = series >= 0
            numbers = {
                name: one.numbers[name][is_drawn] if name in one.numbers else np.full(is_drawn.sum(), np.nan)
                for name in self.cube.values
            }
            self._put_own(SeriesValues(series[is_drawn], one.steps[is_drawn], one.ranks[is_drawn], numbers), self.cube)
        if values and self.lanes.has_global and "l2" in self.names:
            self._join_probe()

    def _join_probe(self) -> None:
        """Compute the norms of global tensors at the steps at which only the probe has norms, of single ranks.

        The probe has a number of each value at every step. If ranks have chunks of a tensor, the squares of their norms
        add up. If ranks have the same tensor, their norms are equal. The case that is true at most of the steps with
        rows is assumed. A parameter's rows decide for its update, too.
        """
        number_of = {key: number for number, key in enumerate(self.series)}
        told_by = [
            number_of.get(key._replace(site="param"), n) if key.site == UPDATE else n for key, n in number_of.items()
        ]
        norms, whole = self.cube.values["l2"][:, 1:].astype(np.float64), self.cube.values["l2"][:, 0]
        counts = [self.cube.values[name] for name in ("nan_count", "inf_count")]
        is_bad = np.logical_or.reduce([of[:, 1:].max(axis=1) > 0 for of in counts])
        is_missing = np.isnan(whole)
        for joined, join in ((norm_of_parts(norms, axis=1), np.sum), (norms.mean(axis=1), np.max)):
            is_known = ~is_missing & ~is_bad & ~np.isnan(joined)
            is_close = is_known & (np.abs(whole - joined) <= _ALIKE * joined)
            is_so = (2 * is_close.sum(axis=1) > is_known.sum(axis=1))[told_by]
            is_new = is_so[:, None] & is_missing & ~np.isnan(joined)
            whole[is_new] = joined[is_new]
            self.cube.has_row[:, 0] |= is_new
            for of in counts:
                of[:, 0][is_new] = join(of[:, 1:], axis=1)[is_new]
            if isinstance(self.cube, GrowingCube):
                self.cube.changed[is_new.any(axis=0)] = self.cube.version

    @property
    def paths(self) -> list[str]:
        """The paths of the modules that have series, in the order in which they ran."""
        return in_order(self._run, self.series)

    @property
    def growing_cubes(self) -> list[GrowingCube]:
        """The cubes to which steps are added while the run grows."""
        cubes = (self.cube, self.scalar_cube, self.rank_steps)
        return [cube for cube in cubes if isinstance(cube, GrowingCube)]

    def add_steps(self, steps: Sequence[int], scalar_steps: Sequence[int]) -> None:
        """Make room for more steps of tensors, and for more steps of scalars."""
        for cube, more in ((self.cube, steps), (self.rank_steps, steps), (self.scalar_cube, scalar_steps)):
            if isinstance(cube, GrowingCube):
                cube.add_steps(more)

    def adopt(self, older: StatisticsBlocks) -> None:
        """Take over the values of `older`, which is growing too. It has the same lanes, and maybe fewer series."""
        for new, old in zip(self.growing_cubes, older.growing_cubes, strict=True):
            new.adopt(old)
        if self.by_rank is not None and older.by_rank is not None:
            for name, values in older.by_rank.values.items():
                self.by_rank.values[name][: len(values)] = values
            self.by_rank.has_row[: older.by_rank.shape[0]] = older.by_rank.has_row
        self.odd, self.reasons = older.odd, older.reasons
        self.histograms, self.units = older.histograms, older.units
        self.global_steps = older.global_steps

    def add(self, table: Any, *, is_final: bool = True) -> None:
        """Add the rows of a range of steps. `is_final` says that no more rows of these steps will follow."""
        if is_final:
            self._note_reasons(table, is_global=False)
            self.histograms.add(table, self._numbers_of)
            self.units.add(table, self._numbers_of)
        for values, cube in self._split(table):
            self._put_own(values, cube)
            if len(self.lanes.ranks) < 3:
                continue
            spread = spread_of(values, self._judged_by if cube is self.cube else None)
            if cube is self.cube and is_final:
                self.odd.add(values, spread)
            if self.lanes.has_spread:
                for index, lane in enumerate(self.lanes.spread_lanes):
                    numbers = {name: column[index] for name, column in spread.numbers.items()}
                    cube.put(spread.series, np.full(len(spread.series), lane), spread.steps, numbers)
                if cube is self.cube and is_final:
                    self._put_deviations(values, spread.deviation)

    def _numbers_of(self, table: Any) -> Integers:
        ids = self._axes.numbers_of(table)
        return np.asarray(np.where(self._is_scalar[ids], -1, self._number[ids]), np.int64)

    def _put_own(self, values: SeriesValues, cube: Cube) -> None:
        lanes = self.lanes.of_ranks(values.ranks)
        chosen = np.flatnonzero(lanes >= 0)
        numbers = {name: column[chosen] for name, column in values.numbers.items()}
        cube.put(values.series[chosen], lanes[chosen], values.steps[chosen], numbers)

    def _put_deviations(self, values: SeriesValues, deviation: Any) -> None:
        assert self.by_rank is not None and self.rank_steps is not None
        is_own = values.ranks >= 0
        numbers = {name: values.numbers[name][is_own] for name in ("nan_count", "inf_count")}
        numbers[_DEVIATION] = deviation[is_own]
        series, ranks, steps = values.series[is_own], values.ranks[is_own], values.steps[is_own]
        self.by_rank.put(series, np.zeros(len(series), np.int64), ranks, numbers)
        bins = np.searchsorted(self.lanes.ranks, ranks) * self.rank_steps.shape[1] // len(self.lanes.ranks)
        self.rank_steps.put(self._site_of[series], bins, steps, numbers)

    def _split(self, table: Any) -> Iterator[tuple[SeriesValues, Cube]]:
        ids = self._axes.numbers_of(table)
        for is_scalar, cube in ((False, self.cube), (True, self.scalar_cube)):
            is_of_it = (ids >= 0) & (self._is_scalar[ids] == is_scalar)
            if is_of_it.any():
                own = table.filter(pa.array(is_of_it))
                yield values_of(own, self._number[ids[is_of_it]], list(cube.values)), cube

    def _add_global(self) -> None:
        view = self._run.view()
        steps = sorted(self._axes.steps | self._axes.scalar_steps)
        a_step = max(self._axes.num_rows / max(len(steps), 1), 1.0)
        num_steps = max(int(_MAX_GLOBAL_ROWS / a_step), 2)
        chosen = np.array(steps)
        if num_steps < len(steps):
            chosen = chosen[np.unique(np.linspace(0, len(steps) - 1, num_steps).astype(int))]
            self.global_steps = len(chosen)
        for first, last in view.windows():  # a batch of the probe spans many steps, and is read once per window
            only = chosen[np.searchsorted(chosen, first) : np.searchsorted(chosen, last)]
            if len(only):
                self.add_global(view, int(only[0]), int(only[-1]) + 1, only)

    def add_global(self, view: GlobalView, first: int, last: int, only: Integers | None = None) -> None:
        """Add the values of all ranks together, for the steps from `first` up to, but not including, `last`.

        `only` names the steps that are added. None adds all steps of the range.
        """
        table = view.rows(first, last, only).table
        table = table.filter(pc.not_equal(table.column("phase"), "recompute"))
        at = table.column("step").to_numpy()
        known = [s for s in np.unique(at).tolist() if s in self._axes.steps or s in self._axes.scalar_steps]
        table = table.filter(pa.array(np.isin(at, known)))
        self._note_reasons(table, is_global=True)
        whole = table.filter(pc.is_null(table.column("rank")))
        for values, cube in self._split(whole):
            cube.put(values.series, np.zeros(len(values.series), np.int64), values.steps, values.numbers)

    def _note_reasons(self, table: Any, *, is_global: bool) -> None:
        lacks = pc.is_null(table.column(MEASURED))
        if is_global:
            lacks = pc.or_(lacks, pc.is_valid(table.column("rank")))
        lacking = table.filter(pc.or_(lacks, pc.is_null(table.column("mean"))))
        if not lacking.num_rows or len(self.reasons) >= _MAX_REASONS:
            return
        ids = self._axes.numbers_of(lacking)
        whys = with_why(lacking).column(WHY).to_pylist()
        for number, why in dict.fromkeys(zip(ids.tolist(), whys, strict=True)):
            if number >= 0 and why and not self._is_scalar[number]:
                self.reasons.setdefault((int(self._number[number]), is_global), why)

    @property
    def has_numbers(self) -> bool:
        """True if any series has a drawn statistic or a count. Counts exist even if all values are NaN."""
        return any(bool((~np.isnan(self.cube.values[name])).any()) for name in (*self.names, MEASURED))

    def blocks(self, modules: Mapping[str, int]) -> Iterator[PageBlock]:
        for cube in (self.cube, self.scalar_cube):
            cube.keep_lanes(len(self.lanes.described))
        yield from self.step_blocks(modules)
        yield from self.further_blocks()

    def step_blocks(self, modules: Mapping[str, int]) -> Iterator[PageBlock]:
        yield self._axes_block(modules)
        yield from self.cube.blocks(f"{self._prefix}values", _MAX_FINE_CELLS)
        if self.scalars:
            yield from self.scalar_cube.blocks(f"{self._prefix}scalars", _MAX_FINE_CELLS)

    def _axes_block(self, modules: Mapping[str, int]) -> PageBlock:
        axes = self._axes
        return PageBlock(
            name=f"{self._prefix}axes",
            data={
                **self.steps_known(),
                "lanes": self.lanes.described,
                "statistics": list(self.names),
                "bare": self._bare(),
                "global_steps": self.global_steps,
                "has_global": self.lanes.has_global,
                "series": [_described(axes, modules, key) for key in self.series],
                "scalars": [_described(axes, modules, key) for key in self.scalars],
                "reasons": [[number, int(whole), why] for (number, whole), why in self.reasons.items()],
                "ranks": self.lanes.ranks[:: max(len(self.lanes.ranks) // _MAX_RANK_BINS, 1)],
                "num_ranks": len(self.lanes.ranks),
                "sites": self._sites,
            },
        )

    def _bare(self) -> list[str]:
        """Return the sites and modes whose rows have no statistics, for example because only tensors are kept."""
        has_some = np.zeros(len(self.series), np.bool_)
        for name in self.names:
            has_some |= ~np.isnan(self.cube.values[name]).all(axis=(1, 2))
        told = {f"{key.site} {key.mode}" for key, known in zip(self.series, has_some.tolist(), strict=True) if known}
        return sorted({f"{key.site} {key.mode}" for key in self.series} - told)

    def steps_known(self) -> dict[str, Any]:
        """Return what changes about the axes while a run grows: steps, gradient norms, and notes on scalars."""
        firsts = [cube.first_steps[0] for cube in (self.cube, self.scalar_cube) if cube.first_steps]
        lasts = [cube.last_step for cube in (self.cube, self.scalar_cube) if cube.last_step is not None]
        return {
            "probed": self._axes.is_probed,
            "gradient_norms": self._gradient_norms(),
            "losses": [*self._axes.optimizer_of_loss],
            "is_of_models": bool(self._axes.models_alike) or len(self._axes.optimizer_of_loss) > 1,
            "scalar_notes": [self.note_of(key) for key in self.scalars],
            "ends": [min(firsts), max(lasts)] if firsts and lasts else [],
            "steps": self.cube.first_steps,
            "num_steps": self.cube.num_steps,
            "last_step": self.cube.last_step,
            "scalar_steps": self.scalar_cube.first_steps,
            "num_scalar_steps": self.scalar_cube.num_steps,
        }

    def note_of(self, key: DrawnSeries) -> str:
        """Return a note on a scalar's numbers, such as the mean of 4 values in a step. Empty if its name suffices."""
        of, number = self._axes.optimizer_of_loss, self._axes.most_in_step.get(key, 1)
        notes = []
        if len(of) > 1 and key.name in of:
            trained = listed(self._models_of(of[key.name]))
            notes = [f"before the steps of {of[key.name]}" + (f", which trains {trained}" if trained else "")]
        return ", ".join(notes + [f"the mean of its {number} values in a step"] * (number > 1))

    def _models_of(self, optimizer: str) -> list[str]:
        rates = {root: list(info.rates.values()) for (root, _), info in self._run.modules.items() if info.rates}
        return [root for root, own in rates.items() if own[0].startswith(f"lr.{optimizer}.")]

    def _gradient_norms(self) -> dict[int, list[float | None]]:
        """Return the norm of all gradients in each column, by lane. -1 means not finite, None means unknown.

        The lane of a rank is left out if its norms equal the norms of all ranks together, as norms of replicas do.
        """
        grads = [number for number, key in enumerate(self.series) if key.site == "grad" and key.mode == "train"]
        if not grads or "l2" not in self.names:
            return {}
        norms: dict[int, list[float | None]] = {}
        whole = self._norms_of(grads, 0) if self.lanes.has_global else None
        for lane, one in enumerate(self.lanes.described):
            own = self._norms_of(grads, lane)
            if one["rank"] is None and one["kind"] != "global":
                continue  # these lanes have the lowest or highest value of each gradient, not the gradients of one rank
            is_of_rank = one["rank"] is not None
            if is_of_rank and whole is not None and np.allclose(own, whole, _ALIKE, 0, equal_nan=True):
                continue
            if not np.isnan(own).all():
                norms[lane] = [None if np.isnan(norm) else float(f"{norm:.5g}") for norm in own.tolist()]
        return norms

    def _norms_of(self, grads: Sequence[int], lane: int) -> npt.NDArray[np.float64]:
        of_lane = {
            name: self.cube.values[name][grads, lane, : len(self.cube.first_steps)].astype(np.float64)
            for name in PROBED
        }
        norms = norm_of_parts(np.nan_to_num(of_lane["l2"], posinf=np.inf), axis=0)
        num_known = (~np.isnan(of_lane["l2"])).sum(axis=0)
        is_bad = (of_lane["nan_count"] > 0).any(axis=0) | (of_lane["inf_count"] > 0).any(axis=0)
        return np.where(is_bad, -1.0, np.where(2 * num_known > num_known.max(initial=0), norms, np.nan))

    def updates(self) -> tuple[list[int], npt.NDArray[np.float64]]:
        """Return the series indexes of matrices that have updates, and the sizes of the updates in each column.

        The size of an update is its norm divided by the norm of its matrix, as in `updates` of data.js.
        """
        update_of = {key._replace(site="param"): number for number, key in enumerate(self.series) if key.site == UPDATE}
        shapes = {key: self._axes.shapes[self._axes.index[key]] or "" for key in update_of if key in self.series}
        chosen = [number for number, key in enumerate(self.series) if "," in shapes.get(key, "")]
        is_whole = len(self.lanes.described) == 1 or self.lanes.has_global
        if not chosen or not is_whole or "l2" not in self.names:
            return [], np.zeros((0, 0))
        norms = self.cube.values["l2"][:, 0, : len(self.cube.first_steps)].astype(np.float64)
        with np.errstate(all="ignore"):
            sizes = norms[[update_of[self.series[one]] for one in chosen]] / norms[chosen]
        return chosen, np.where(sizes < _LARGEST, sizes, np.nan)

    def further_blocks(self) -> Iterator[PageBlock]:
        """Yield blocks of histograms and of units (channels). With many ranks, yield each rank's deviations, too."""
        for name, collector in (("histograms", self.histograms), ("units", self.units)):
            if (block := collector.block(f"{self._prefix}{name}")) is not None:
                yield block
        if self.by_rank is not None and self.rank_steps is not None:
            yield from self.by_rank.blocks(f"{self._prefix}by-rank", 0)
            yield from self.rank_steps.blocks(f"{self._prefix}rank-steps", 0)


def check_statistics(run: Run, axes: Axes, collected: StatisticsBlocks) -> None:
    """Raise LookupFailedError if there is nothing to draw. The message says what to record next time."""
    if run.lost:
        raise LookupFailedError(f"{run.name} has no rows to draw: {run.lost}")
    if not axes.index and run.num_all_rows and not (run.num_rows or run.problems):
        raise LookupFailedError(
            f"{run.name} has no rows to draw but those of keep=tokens; the next time add "
            "the rule 'site=output keep=stats'"
        )
    if not axes.index:
        raise LookupFailedError(
            f"{run.name} has no rows to draw; `recorder doctor` says why, and RECORDER_RULES='keep=stats' records "
            "statistics of everything"
        )
    if not collected.has_numbers and not collected.scalars:
        names = ", ".join(collected.names)
        raise LookupFailedError(
            f"{run.name} has no statistics to draw ({names}): its rules kept none; the next time add the rule "
            "'site=output,grad_output,param,grad keep=stats'"
        )


def _described(axes: Axes, modules: Mapping[str, int], key: DrawnSeries) -> list[Any]:
    of = axes.index[key]
    named = [modules[key.module_path], key.site, key.name, key.mode, key.root]
    return [*named, axes.shapes[of], axes.dtypes[of], axes.numels[of]]


def _fit(
    num_series: int, num_lanes: int, num_steps: int, asked: Sequence[str], share: float
) -> tuple[tuple[str, ...], int]:
    names = tuple(dict.fromkeys(asked)) or DRAWN
    a_column = max(num_series, 1) * (1 + (num_lanes - 1) / 2)  # lanes of replicas cost nothing

    def columns(num_names: int) -> int:
        fitting = int(_MAX_CELLS * share / (a_column * num_names))
        return min(max(fitting, _MIN_COLUMNS), _MAX_COLUMNS, num_steps)

    while not asked and len(names) > _LEAST_DRAWN and columns(len(names)) < min(num_steps, _ENOUGH_COLUMNS):
        names = names[:-1]
    return names, columns(len(names))
