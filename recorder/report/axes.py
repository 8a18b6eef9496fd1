"""Finds what the page of a run draws: the modules, series, steps and lanes. Reads rows in ranges of steps.

A lane is one of the lines that are drawn for a series (one value over time). With few ranks, each rank has a lane. With
many ranks, three lanes hold the lowest, the median and the highest value over the ranks. A few more lanes hold the
ranks that are most often far from the median.

No payload (tensor) is read. Rows of recomputed forwards are left out, because the same values were recorded before.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ..columns import COUNTS, SCHEMA, STATISTICS
from ..errors import CorruptError
from ..numerics.keys import Integers, by_key, codes, group, group_rows, holds
from ..numerics.moments import combine_rows, integers, numbers
from ..read.run import list_paths
from ..run.probe import probe_size, probe_tables
from ..run.run import RecordedModule, RecordedWriter, Run
from ..run.step_ranges import Attempts, cut_rows, first_parts, with_coded_texts
from ..sites import RATE, SITE_OF, Kind
from ..system.text import MODEL
from .blocks import PageBlock

RANGE_ROWS = 200_000
"""The most rows, over all ranks, of a range of steps. They are in memory together. One step alone may have more."""
SERIES_KEY = ("root", "module_path", "site", "name", "mode")
"""The columns that identify a series, which is one value over time. Calls and micro-steps of a step are combined."""
_RECOMPUTED = "recompute"
_COLUMNS = (
    "step", "rank", "attempt", "seq", *SERIES_KEY, "phase", "dtype", "shape", "global_shape", "numel", "note",
    "placements", *STATISTICS, *COUNTS, "micro_step", "call", "repeat", "encoding", "payload_bytes",
    "histogram", "units",
)  # fmt: skip

Steps = tuple[int, int]


class DrawnSeries(NamedTuple):
    """The columns that identify a series, which is one value over time."""

    root: str
    module_path: str
    site: str
    name: str
    mode: str


class StepRows:
    """The rows of a run that are drawn: one table for each range of steps."""

    def __init__(
        self, run: Run, tables_of: Callable[[Steps], Iterator[Any]], ranges: Sequence[Steps], schema: Any
    ) -> None:
        self.ranges = list(ranges)
        self._schema = schema
        self._tables_of = tables_of
        self._attempts = Attempts(run)

    def __iter__(self) -> Iterator[Any]:
        """Yield a table for each range of steps, sorted by rank and `seq`. Rows of superseded attempts are left out."""
        for steps in self.ranges:
            table = pa.concat_tables([self._schema.empty_table(), *self._tables_of(steps)])
            table = self._attempts.counting(table.unify_dictionaries().combine_chunks())
            order = np.lexsort([integers(table.column("seq")), integers(table.column("rank"))])
            yield table.take(pa.array(order))


@contextmanager
def step_rows(
    run: Run, ranges: Sequence[Steps] | None = None, *, further: Sequence[str] = (), max_pending_rows: int = RANGE_ROWS
) -> Iterator[StepRows]:
    """Open the rows of a run for repeated reading. Rows that do not fit in memory are kept on disk meanwhile.

    `ranges` are half-open, ascending ranges of steps that do not overlap. By default they cover all steps, with
    `RANGE_ROWS` rows each. `further` names more columns. At most `max_pending_rows` rows wait in memory for the disk.
    """
    schema = pa.schema(
        [
            pa.field(name, pa.dictionary(pa.int32(), pa.string()))
            if SCHEMA.field(name).type == pa.string()
            else SCHEMA.field(name)
            for name in dict.fromkeys((*_COLUMNS, *further))
        ]
    )
    ranges = run.view().windows(RANGE_ROWS) if ranges is None else ranges
    with cut_rows(run, ranges, partial(_tables, schema), max_pending_rows) as tables_of:
        yield StepRows(run, tables_of, ranges, schema)


def _tables(schema: Any, writers: Sequence[RecordedWriter], steps: Steps) -> Iterator[Any]:
    for table in first_parts(writers, steps, schema.names):
        if _RECOMPUTED in table.column("phase").unique().to_pylist():
            table = table.filter(pc.not_equal(table.column("phase"), _RECOMPUTED))
        yield with_coded_texts(table, schema)


class SeriesValues(NamedTuple):
    """The statistics of each series, step and rank, as parallel arrays. Calls and micro-steps are combined."""

    series: Integers
    steps: Integers
    ranks: Integers
    """The rank of each value. It is -1 for a value of all ranks together."""
    numbers: dict[str, npt.NDArray[np.float64]]
    """The numbers of each statistic or count, by its name. NaN where a row has no number."""


def keys_of(table: Any) -> tuple[Integers, list[DrawnSeries], Integers]:
    """Return the index of each row's series, the series in this table, and the first row of each series."""
    groups = group_rows(table, SERIES_KEY)
    keys = table.select(SERIES_KEY).take(pa.array(groups.firsts)).to_pylist()
    return groups.ids, [DrawnSeries(*(text or "" for text in key.values())) for key in keys], groups.firsts


def values_of(table: Any, series: Integers, names: Sequence[str]) -> SeriesValues:
    """Return the named statistics of a table, combined by series, step and rank. `series` has each row's series."""
    steps, ranks = integers(table.column("step")), integers(table.column("rank"))
    groups = group([series, codes(table.column("step")), ranks + 1])
    if groups.num_groups == table.num_rows:
        columns = {name: numbers(table.column(name)) for name in names}
        return SeriesValues(series, steps, ranks, columns)
    combined = combine_rows(table, groups.ids, groups.num_groups)
    columns = {name: numbers(combined[name]) for name in names}
    return SeriesValues(series[groups.firsts], steps[groups.firsts], ranks[groups.firsts], columns)


def _optimizer_of(rate: str) -> str:
    return rate.removeprefix(RATE).rpartition(".")[0]


@dataclass(slots=True)
class Axes:
    """The series, steps and shapes to draw. Scalars such as the loss have steps of their own."""

    index: dict[DrawnSeries, int] = field(default_factory=dict)
    """The index of each series, in the order in which the series were found."""
    _of_any_root: dict[tuple[str, ...], int] = field(default_factory=dict)
    """The index of a series by its key without the root (the hooked model); -1 if several series share this key. Each
    pipeline stage is a root. A value of the complete model has the root of one stage, or none."""
    is_scalar: list[bool] = field(default_factory=list)
    shapes: list[str] = field(default_factory=list)
    """The global shape of each series. If its first row has none, the shape of that row's local tensor."""
    dtypes: list[str] = field(default_factory=list)
    numels: list[int] = field(default_factory=list)
    first_steps: list[int] = field(default_factory=list)
    steps: set[int] = field(default_factory=set)
    scalar_steps: set[int] = field(default_factory=set)
    num_steps: int = 0
    """The number of steps with at least one row, either of a module or of a scalar."""
    first_step: int | None = None
    last_step: int | None = None
    num_rows: int = 0
    is_probed: bool = False
    """True if numbers of the probe (a number of each value at every step) are among the values."""
    below: str | None = None
    """The path of a module. Only the module, its submodules and scalars are drawn. None draws everything."""
    without: Collection[str] = ()
    """The names of the roots (models under hooks) whose values are not drawn."""
    most_in_step: dict[DrawnSeries, int] = field(default_factory=dict)
    """For a scalar with several values in a step, the most values of one rank. The mean of the values is drawn."""
    optimizer_of_loss: dict[str, str] = field(default_factory=dict)
    """For each loss, by its name, the optimizer that steps next after the loss was computed."""
    _optimizer_of_root: dict[str, str] = field(default_factory=dict)
    _later_losses: dict[tuple[int, int], str] = field(default_factory=dict)
    """The name of each loss that belongs to a later optimizer than the first, by the loss's step and repeat."""

    def with_losses(self, table: Any) -> Any:
        """Return the table with the losses of different models named apart, for example in the training of a GAN.

        A loss belongs to the optimizer that steps next on its rank. If a model has several optimizers, the loss belongs
        to the first of them. The losses of the first optimizer that is found stay named ``loss``. Rows of all ranks
        together get the names that the rows of single ranks got before.
        """
        names, is_scalar = table.column("name"), holds(table.column("site"), is_number)
        losses = np.flatnonzero(is_scalar & holds(names, "loss".__eq__))
        if not len(losses):
            return table
        optimizers = {_optimizer_of(one) for one in names.unique().to_pylist() if one and one.startswith(RATE)}
        if len(optimizers | {*self.optimizer_of_loss.values()}) < 2:  # nearly all runs return here, whatever their size
            if optimizers:
                (self.optimizer_of_loss["loss"],) = optimizers
            return table
        rates = np.flatnonzero(is_scalar & holds(names, lambda name: name.startswith(RATE)))
        ranks, steps = integers(table.column("rank")), integers(table.column("step"))
        stepped: dict[tuple[int, int], dict[str, int]] = {}
        for row in rates.tolist():
            own = _optimizer_of(names[row].as_py())
            optimizer = self._optimizer_of_root.setdefault(table.column("root")[row].as_py(), own)
            stepped.setdefault((int(ranks[row]), int(steps[row])), {})[optimizer] = row
        repeats = integers(table.column("repeat"))[losses].tolist()
        places = [*zip(steps[losses].tolist(), repeats, strict=True)]
        for loss, rank, place in zip(losses.tolist(), ranks[losses].tolist(), places, strict=True):
            if of_step := stepped.get((rank, place[0]), {}):
                later = [name for name, row in of_step.items() if row > loss]  # the losses of the first step come last
                optimizer = later[0] if later else [*of_step][min(place[1], len(of_step) - 1)]
                if self.optimizer_of_loss.setdefault("loss", optimizer) != optimizer:
                    self._later_losses[place] = f"{optimizer} loss"
                    self.optimizer_of_loss[f"{optimizer} loss"] = optimizer
        of_losses = [self._later_losses.get(place, "loss") for place in places]
        if set(of_losses) == {"loss"}:
            return table
        texts = np.array(names.to_pylist(), object)
        texts[losses] = of_losses
        column = pa.array(texts.tolist(), pa.string()).dictionary_encode()
        return table.set_column(table.column_names.index("name"), "name", column)

    def numbers_of(self, table: Any) -> Integers:
        """Return the index of each row's series, -1 where the series is not drawn."""
        ids, keys, _ = keys_of(self.with_losses(table))
        of_table = [self.index[key] if key in self.index else self._of_any_root.get(key[1:], -1) for key in keys]
        of_table = [number if self._is_wanted(key) else -1 for number, key in zip(of_table, keys, strict=True)]
        return np.array([*of_table, -1], np.int64)[ids]

    def _is_wanted(self, key: DrawnSeries) -> bool:
        if is_number(key.site):
            return True
        if key.root in self.without:
            return False
        return not self.below or key.module_path == self.below or key.module_path.startswith(f"{self.below}.")

    def read(
        self, run: Run, rows: Iterable[Any], seen: Callable[[Any], object] = lambda table: None
    ) -> list[SeriesValues]:
        """Add all rows of a run, and the numbers of its probe, which are returned. `seen` gets each table of rows."""
        for table in rows:
            self.add(table)
            seen(table)
        return probe_values(run, self)

    def add(self, table: Any) -> None:
        """Add the rows of a range of steps, which are sorted by rank and `seq`."""
        table = self.with_losses(table)
        ids, keys, firsts = keys_of(table)
        steps, sequence = integers(table.column("step")), integers(table.column("seq"))
        self.num_rows += table.num_rows
        scalar = np.array([is_number(key.site) for key in keys] + [False])[ids]
        of_scalars, of_modules = (set(np.unique(steps[some]).tolist()) for some in (scalar, ~scalar))
        found = of_scalars | of_modules
        self.num_steps += len(found - self.steps - self.scalar_steps)
        self.scalar_steps |= of_scalars
        self.steps |= of_modules
        if found:
            self.first_step = min(found) if self.first_step is None else min(self.first_step, *found)
            self.last_step = max(found) if self.last_step is None else max(self.last_step, *found)
        about = table.select(("global_shape", "shape", "dtype", "numel", "step"))
        for number in np.argsort(sequence[firsts], kind="stable").tolist():
            self._add_series(
                keys[number], {name: about.column(name)[int(firsts[number])].as_py() for name in about.column_names}
            )
        if scalar.any():
            self._count_in_steps(table, ids, keys, scalar)

    def _count_in_steps(
        self, table: Any, ids: Integers, keys: Sequence[DrawnSeries], scalar: npt.NDArray[np.bool_]
    ) -> None:
        steps = integers(table.column("step"))
        groups = group([ids[scalar], steps[scalar] - steps.min(initial=0), integers(table.column("rank"))[scalar] + 1])
        most = np.zeros(len(keys), np.int64)
        np.maximum.at(most, ids[scalar][groups.firsts], np.bincount(groups.ids, minlength=groups.num_groups))
        for number in np.flatnonzero(most > 1).tolist():
            self.most_in_step[keys[number]] = max(int(most[number]), self.most_in_step.get(keys[number], 0))

    def add_probe(self, table: Any) -> None:
        """Add the series and steps in a table of the probe's numbers. From then on `is_probed` is true."""
        _, keys, firsts = keys_of(table)
        found = set(np.unique(integers(table.column("step"))).tolist())
        self.num_steps += len(found - self.steps - self.scalar_steps)
        self.steps |= found
        self.is_probed = True
        for key, first in zip(keys, firsts.tolist(), strict=True):
            about = {name: table.column(name)[first].as_py() for name in ("dtype", "numel", "step")}
            self._add_series(key, about | {"global_shape": "", "shape": ""})

    @property
    def models_alike(self) -> list[str]:
        """The roots (models) whose values have equal names, for example in a GAN. `roots` of map.js finds the same."""
        drawn = (key for key, number in self.index.items() if not self.is_scalar[number])
        roots = by_key((key[1:], key.root) for key in drawn)
        return sorted(set().union(*(some for some in roots.values() if len(some) > 1)))

    def _add_series(self, key: DrawnSeries, about: Mapping[str, Any]) -> None:
        if key in self.index or not self._is_wanted(key):
            return
        self._of_any_root[key[1:]] = -1 if key[1:] in self._of_any_root else len(self.index)
        self.index[key] = len(self.index)
        self.is_scalar.append(is_number(key.site))
        self.shapes.append(about["global_shape"] or about["shape"])
        self.dtypes.append(about["dtype"])
        self.numels.append(about["numel"])
        self.first_steps.append(about["step"])


_FORWARD = ("input", "output", "tap")
"""The sites (kinds of value) whose values are recorded in the order in which modules run."""
MAX_PROBED = 4_000_000
"""If the probe (numbers of every step) has more numbers than this, none is drawn. Each takes 48 bytes of memory."""
PROBED = ("l2", "nan_count", "inf_count", "numel")


def probe_values(run: Run, axes: Axes) -> list[SeriesValues]:
    """Return the numbers of the probe, and add their series and steps to the axes.

    The probe has a number of each value at every step. The list is empty if there is no probe, or if it has too many
    ranks or numbers to draw. A later attempt (launch) supersedes earlier attempts from its first step on. Damage ends
    the list, and is reported by `recorder verify`.
    """
    sizes = [(writer, probe_size([writer])) for writer in run.writers] if len(run.ranks) <= MAX_RANKS else []
    if sum(size.num_numbers for _, size in sizes if size) > MAX_PROBED:
        return []
    found = []
    with suppress(CorruptError):
        for writer, own in sizes:
            later = [size.first_step for one, size in sizes if size and one.attempt > writer.attempt]
            for table in probe_tables([writer] if own else []):
                is_counted = pc.not_equal(table.column("phase"), _RECOMPUTED)
                if later:
                    is_counted = pc.and_(is_counted, pc.less(table.column("step"), min(later)))
                table = table.filter(is_counted)
                axes.add_probe(table)
                columns = {name: numbers(table.column(name)) for name in PROBED}
                steps, ranks = integers(table.column("step")), integers(table.column("rank"))
                found.append(SeriesValues(axes.numbers_of(table), steps, ranks, columns))
    return found


def is_number(site: str) -> bool:
    """Return True if the values of a site (kind of value) are scalars of a step, such as the loss."""
    return site in SITE_OF and SITE_OF[site].kind is Kind.NUMBER


def modules_block(run: Run, series: list[DrawnSeries]) -> tuple[PageBlock, Mapping[str, int]]:
    """Return the block that lists the modules in the order in which they ran, and each module's index by path."""
    order = dict.fromkeys(in_order(run, series))
    # Modules without rows, such as pure containers, come last. The page places each beside its children.
    known = list_paths((path for _, path in run.modules), order)
    paths = [*order, *(path for path in known if path not in order)]
    infos = {path: info for (_, path), info in run.modules.items()}
    are_told = any(info.rates for info in infos.values())
    why = {path: _why_no_parameters(info, are_told=are_told) for path, info in infos.items()}
    # Two models may have modules of the same path.
    classes = by_key((path, info.class_name) for (_, path), info in run.modules.items())
    facts = {path: [" or ".join(dict.fromkeys(classes[path])), info.source] for path, info in infos.items()}
    rows = [[path, *facts.get(path, ["", ""]), why.get(path, "")] for path in paths]
    block = PageBlock(name="modules", data={"modules": rows, "num_executed": len(order)})
    return block, {path: number for number, path in enumerate(paths)}


def in_order(run: Run, series: Iterable[DrawnSeries]) -> list[str]:
    """Return the paths of modules in the order in which they ran, or in the model's order without a recorded forward.

    The order of other rows is not used: gradients begin at the last module, and parameters are in the order of the
    optimizer's groups.
    """
    recorded = dict.fromkeys(key.module_path for key in series)
    order = dict.fromkeys(key.module_path for key in series if key.site in _FORWARD)
    if not order:
        order = dict.fromkeys(path for _, path in run.modules if path in recorded)
    return [*(order | recorded)]


def _why_no_parameters(info: RecordedModule, *, are_told: bool) -> str:
    """Return why no optimizer step recorded a module's parameters. Empty if one did, or if the reason is unknown."""
    if "param" not in info.sites or not info.params:
        return ""
    if len(info.params) == len(info.frozen):
        return "frozen"
    return "in no optimizer" if are_told and not info.rates and len(info.tied) < len(info.params) else ""


MAX_RANKS = 8
"""With at most this many ranks, each has a lane (drawn line). With more, three lanes show low, median and high."""
MAX_ODD = 4
SPREAD = ("low", "median", "high")
_FAR = 8.0
"""A rank's value is far from the ranks' median if it is more than this many interquartile ranges away."""
_LEAST_SHARE = 1e-3
"""The least interquartile range, as a fraction of the median. Without it, mere rounding would make a rank odd."""
_MIN_RANKS = 3
"""The fewest ranks whose values are compared. If only two ranks differ, nobody knows which is the odd one."""


class Lanes:
    """The lanes (drawn lines of each series) of a run's page, and the index of the lane of each rank."""

    def __init__(self, run: Run, *, can_have_global: bool = True) -> None:
        self.ranks: list[int] = run.ranks
        self.is_merged = run.is_merged
        self.has_spread = len(self.ranks) > MAX_RANKS
        self.has_global = self.is_merged or (can_have_global and len(self.ranks) > 1)
        self.described: list[dict[str, Any]] = [{"kind": "global", "rank": None}] * self.has_global
        """The kind and the rank of each lane, as the page gets them."""
        first = len(self.described)
        self.spread_lanes = range(first, first + len(SPREAD))
        self.odd: list[int] = []
        self._lane_of_rank = np.full((max(self.ranks, default=0) + 2), -1, np.int64)
        if self.has_spread:
            self.described += [{"kind": kind, "rank": None} for kind in SPREAD]
        else:
            self._add("rank", self.ranks)
        self.most = len(self.described) + MAX_ODD * self.has_spread
        if self.is_merged:
            self._lane_of_rank[-1] = 0  # a value of all ranks together has rank -1

    def set_odd(self, ranks: Sequence[int]) -> None:
        """Add a lane for each rank that was found odd, up to `MAX_ODD` ranks."""
        self.odd = list(ranks)[:MAX_ODD]
        self._add("odd", self.odd)

    def _add(self, kind: str, ranks: Sequence[int]) -> None:
        for rank in ranks:
            self._lane_of_rank[rank] = len(self.described)
            self.described.append({"kind": kind, "rank": rank})

    def of_ranks(self, ranks: Integers) -> Integers:
        """Return the lane of each rank, -1 for a rank without a lane."""
        return np.asarray(self._lane_of_rank[ranks], np.int64)


class Spread(NamedTuple):
    """How the ranks' values of each series are distributed at each step."""

    ids: Integers
    """For each rank's value, the index of its series and step in the arrays below."""
    series: Integers
    steps: Integers
    numbers: dict[str, tuple[npt.NDArray[np.float64], ...]]
    """The lowest, median and highest value over the ranks, by statistic. NaN where no rank has a value."""
    deviation: npt.NDArray[np.float64]
    """The distance of each rank's value from the median, in interquartile ranges. NaN if unknown."""


def spread_of(values: SeriesValues, judged_by: str | None) -> Spread:
    """Return the spread of the ranks' values. Deviations are computed only for the statistic `judged_by`."""
    groups = group([values.series, values.steps - values.steps.min(initial=0)])
    ids = groups.ids
    quantiles: dict[str, tuple[npt.NDArray[np.float64], ...]] = {}
    deviation = np.full(len(ids), np.nan)
    for name, column in values.numbers.items():
        order = np.lexsort([column, ids])  # sorting puts NaN last
        in_order = column[order]
        starts = np.searchsorted(ids[order], np.arange(groups.num_groups))
        counts = np.bincount(ids, ~np.isnan(column), groups.num_groups).astype(np.int64)

        def at(share: float, starts: Integers = starts, counts: Integers = counts,
               in_order: npt.NDArray[np.float64] = in_order) -> npt.NDArray[np.float64]:  # fmt: skip
            index = starts + np.maximum((share * (counts - 1)).astype(np.int64), 0)
            return np.where(counts > 0, in_order[index], np.nan)

        quantiles[name] = at(0.0), at(0.5), at(1.0)
        if name == judged_by:
            median = quantiles[name][1]
            quartiles = np.maximum(at(0.75) - at(0.25), _LEAST_SHARE * np.abs(median))
            apart = np.abs(column - median[ids])
            with np.errstate(divide="ignore", invalid="ignore"):
                deviation = np.where(apart == 0, 0.0, apart / quartiles[ids])
            deviation[(counts < _MIN_RANKS)[ids]] = np.nan
            deviation = np.where(np.isinf(deviation), 1e6, np.minimum(deviation, 1e6))
    return Spread(ids, values.series[groups.firsts], values.steps[groups.firsts], quantiles, deviation)


class OddRanks:
    """Counts for each rank how many of its values are far from the median of all ranks."""

    def __init__(self, ranks: Sequence[int]) -> None:
        size = max(ranks, default=0) + 1
        self.far = np.zeros(size, np.int64)
        """For each rank, how many of its values are far from the median of all ranks."""
        self.alone = np.zeros(size, np.int64)
        """For each rank, how many of its values are not finite where most ranks' values are."""
        self.compared = np.zeros(size, np.int64)
        self._most = np.full(size, _FAR)
        """For each rank, the largest deviation of its values from the median of all ranks, at least `_FAR`."""
        self._farthest = np.full((size, 2), -1, np.int64)
        """For each rank, the series' index and the step of its farthest value. Both are -1 if no value is far."""

    def add(self, values: SeriesValues, spread: Spread) -> None:
        """Count values that are far from the median in `spread`, and nonfinite values where most ranks' are finite."""
        is_own = values.ranks >= 0
        ranks, deviation = values.ranks[is_own], spread.deviation[is_own]
        size = len(self.far)
        self.compared += np.bincount(ranks[~np.isnan(deviation)], minlength=size)
        self.far += np.bincount(ranks[deviation > _FAR], minlength=size)
        worse = np.flatnonzero(deviation > self._most[ranks])
        worse = worse[np.argsort(deviation[worse])]  # of a rank's several values, the last and largest one is kept
        self._most[ranks[worse]] = deviation[worse]
        self._farthest[ranks[worse]] = np.column_stack([values.series[is_own][worse], values.steps[is_own][worse]])
        if {"nan_count", "inf_count"} <= values.numbers.keys():
            bad = (values.numbers["nan_count"] > 0) | (values.numbers["inf_count"] > 0)
            share = np.bincount(spread.ids, bad) / np.bincount(spread.ids)
            self.alone += np.bincount(values.ranks[is_own & bad & (share < 0.5)[spread.ids]], minlength=size)

    def farthest(self, rank: int, series: Sequence[DrawnSeries]) -> str:
        """Return the name and the step of the rank's value farthest from the median. Empty if no value is far."""
        number, step = self._farthest[rank]
        if number < 0:
            return ""
        key = series[number]
        return " ".join(filter(None, [key.module_path or MODEL, key.site, key.name])) + f", step {step}"

    def found(self) -> list[int]:
        """Return the odd ranks, the oddest first. Empty if all ranks are alike."""
        score = self.far + self.alone
        usual = float(np.median(score)) if len(score) else 0.0
        order = np.argsort(-score, kind="stable")
        return [int(rank) for rank in order if score[rank] > 3 * usual + 2]
