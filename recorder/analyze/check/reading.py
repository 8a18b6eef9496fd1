"""Reads the rows of a run for check rules, as columns of numbers, one range of steps after another. Reads no payload.

Rows of recomputed forwards are left out, because they repeat values of the forward. If a restart repeated a step, only
the rows of the newer attempt are read. The probe has one number of each value at every step. This number becomes a row
where the value has no row. Some columns are computed from the bytes of histograms and of sums of units (channels). They
are null in a row without these bytes, or if the number cannot be computed. No Python loop runs over rows.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, suppress
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ...checks.rows import IS_PROBE, RECORDED, About, Catalog, Rows, SeriesKey, grouped
from ...columns import COUNTS, SCHEMA, parse_shape
from ...errors import CorruptError, RunError
from ...numerics.distributions import Histograms, ManyUnits, histograms_of, units_of
from ...numerics.histogram import NORMAL_EXPONENTS
from ...numerics.keys import by_distinct, encode, group_rows, holds
from ...numerics.moments import integers, numbers
from ...run import step_ranges
from ...run.probe import MOST_PROBED, probe_size, probe_tables
from ...run.run import GlobalView, RecordedWriter, Run
from ...run.step_ranges import Attempts, Mapper, cut_rows, first_parts, map_serially, read_ranges, with_coded_texts
from ...sites import MAX_COUNT, OF_MODULES

RANGE_ROWS = 500_000
"""The most rows, over all ranks, in one range of steps. They are in memory together. A single step may have more."""
_RECOMPUTED = "recompute"
_KEY = ("root", "module_path", "site", "name", "mode", "phase", "scope")
_ABOUT = ("dtype", "shape", "global_shape")
_TEXTS = (*_KEY, *_ABOUT)
_WHOLE = "global_numel"
_ORDER = ("step", "rank", "attempt", "seq")
_EVERY = (-MAX_COUNT, MAX_COUNT)
"""A range that contains every step. With this range, the steps of rows are not compared with the range."""

Steps = tuple[int, int]
Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
ACTIVE = 0.01
"""A unit (a channel or neuron) is alive if at least this share of its values is nonzero."""
LEAST_VALUES = 32
"""A unit (a channel or neuron) of fewer values than this is never judged dead."""
_NO_ENDS = (0, 0)


class RunRows:
    """The rows of a run as check rules read them, with a catalog that describes the values.

    `columns` names columns to read besides the usual statistics. A name that the format does not have is ignored.
    `steps` is (first, last), without the step `last`. None means all steps. `catalog` may be the catalog of earlier
    rows of the run. The probe is read only if `steps` is None, because a block of the probe is written long after its
    first step. `mapper` reads ranges of steps in this process or in others, but the probe is read in this process.
    """

    def __init__(
        self, run: Run, columns: Sequence[str] = (), steps: Steps | None = None, catalog: Catalog | None = None,
        mapper: Mapper = map_serially,
    ) -> None:  # fmt: skip
        self._mapper = mapper
        self._run = run
        self._recorded = RecordedColumns(columns)
        self._schema = self._recorded.schema
        self._steps = steps
        self._probe = probe_size(run.writers) if steps is None else None
        self.catalog = catalog or Catalog(run.modules)
        self.num_rows = 0
        self.steps: set[int] = set()
        """The steps of the rows yielded so far."""
        self.num_probed = 0
        """The number of rows yielded so far that come from the probe. `num_rows` does not count these rows."""
        self.probe_notes: list[str] = []
        """Sentences that say which steps of the probe were left out."""
        self.num_superseded = 0
        """The number of rows left out because a restart repeated their steps."""
        self._view = run.view()
        self._parts_and_peers = _parts_and_peers(self._view, run)
        self.catalog.shared_rates = _shared_rates(run)

    def __iter__(self) -> Iterator[Rows]:
        """Yield the rows of one range of steps after another, each range sorted by step, rank and `seq`."""
        attempts = Attempts(self._run)
        ranges = self._ranges()
        with closing(self._read(ranges)) as tables:
            for table in tables:
                num_rows, table = table.num_rows, attempts.counting(table)
                self.num_superseded += num_rows - table.num_rows
                self.steps |= set(table.column("step").unique().to_pylist())
                if table.num_rows:
                    rows = self._as_rows(table)
                    num_probed = int(rows[IS_PROBE].sum())
                    self.num_rows += len(rows) - num_probed
                    self.num_probed += num_probed
                    yield rows

    def _read(self, ranges: list[Steps]) -> Generator[Any]:
        with (
            closing(read_ranges(self._run, ranges, self._recorded, self._mapper)) as read,
            cut_rows(self._run, ranges, self._probes) as probes_of,
        ):
            for steps, tables in zip(ranges, read, strict=True):
                tables = [self._schema.empty_table(), *tables, *probes_of(steps)]
                yield pa.concat_tables(tables).unify_dictionaries()

    def of_table(self, table: Any) -> Rows:
        """Convert a table with the columns of `RecordedColumns` to `Rows`. Each step must be of a single attempt."""
        return self._as_rows(self._recorded.of(table))

    def _ranges(self) -> list[Steps]:
        if self._steps is not None:
            return [self._steps]
        ranges = [_EVERY] if self._run.num_rows <= RANGE_ROWS else self._view.windows(RANGE_ROWS)
        probe = self._probe
        if probe is None or probe.num_numbers <= RANGE_ROWS:
            return ranges
        of_probe = step_ranges.cut_evenly(probe.first_step, probe.last_step + 1, probe.num_numbers, RANGE_ROWS)
        starts = sorted({first for first, _ in (*ranges[1:], *of_probe[1:])})
        return list(zip([_EVERY[0], *starts], [*starts, _EVERY[1]], strict=True))

    def _probes(self, writers: Sequence[RecordedWriter], steps: Steps) -> Iterator[Any]:
        if self._probe is not None:
            for writer in writers:
                yield from self._probed(writer, steps)

    def _probed(self, writer: RecordedWriter, steps: Steps) -> Iterator[Any]:
        """Yield a writer's probe as rows. A step's rows are in the order in which the writer first saw the values."""
        assert self._probe is not None
        excess = self._probe.num_numbers / MOST_PROBED
        num_steps = self._probe.last_step + 1 - self._probe.first_step
        first = self._probe.last_step + 1 - int(num_steps / excess) if excess > 1 else steps[0]
        if excess > 1:
            self.probe_notes = [f"only the probe's steps from {first} on were judged, because the probe is very large"]
        try:
            for table in probe_tables([writer]):
                at = table.column("step").to_numpy()
                table = table.filter(pa.array((at >= max(steps[0], first)) & (at < steps[1])))
                num = table.num_rows
                known = {name: table.column(name) for name in table.column_names if name in self._schema.names}
                known |= {"seq": pa.array(np.arange(num) - MAX_COUNT), IS_PROBE: pa.array(np.ones(num))}
                known |= {"sum_sq": pc.power(table.column("l2"), 2)}
                columns = [
                    known[field.name].cast(field.type) if field.name in known else pa.nulls(num, field.type)
                    for field in self._schema
                ]
                yield pa.Table.from_arrays(columns, schema=self._schema)
        except CorruptError:  # the error counts as damage of the run from now on
            return

    def _as_rows(self, table: Any) -> Rows:
        steps, ranks, seqs, is_probe = (integers(table.column(name)) for name in ("step", "rank", "seq", IS_PROBE))
        series, parts, peers = self._described(table)
        if is_probe.any():
            ids, is_row = grouped(series, ranks, steps)[0], is_probe == 0
            is_new = is_row | ~np.isin(ids, ids[is_row])  # if a value has two rows, the probe's row is dropped
            table = table.filter(pa.array(is_new))
            steps, ranks, seqs, series, parts, peers = (a[is_new] for a in (steps, ranks, seqs, series, parts, peers))
        order = np.lexsort((seqs, ranks, steps))
        lanes = self.catalog.lanes(series[order], ranks[order], parts[order], peers[order])
        names = (*self._recorded.numbers, *self._recorded.details, IS_PROBE)
        columns = {name: numbers(table.column(name))[order] for name in names}
        return Rows(self.catalog, steps[order], lanes, columns)

    def _described(self, table: Any) -> tuple[Integers, Integers, Integers]:
        """Return numbers for each row's value, for the rank's part of the batch, and for its piece of the model."""
        groups = group_rows(table, _KEY)
        series_of = []
        for row in table.select((*_KEY, *_ABOUT, _WHOLE)).take(pa.array(groups.firsts)).to_pylist():
            key = SeriesKey(*(row[name] or "" for name in _KEY))
            series_of.append(self.catalog.number(key, _about(key.site, *(row[name] for name in (*_ABOUT, _WHOLE)))))

        def part_and_peer(root: str | None, rank: int | None) -> tuple[int, int]:
            rank = -1 if rank is None else rank
            return self._parts_and_peers.get((root or "", rank), (rank, 0))

        parts, peers = by_distinct(table, ("root", "rank"), part_and_peer, np.int64).reshape(-1, 2).T
        return np.array(series_of, np.int64)[groups.ids], parts, peers


class RecordedColumns:
    """The columns that are read for rules that need `columns` besides the usual statistics."""

    def __init__(self, columns: Sequence[str]) -> None:
        self.details = [name for name in SOURCES if name in columns]
        kinds = {name: SCHEMA.field(name).type for name in columns if name in SCHEMA.names}
        more = (name for name, kind in kinds.items() if pa.types.is_integer(kind) or pa.types.is_floating(kind))
        self.numbers = tuple(dict.fromkeys(("numel", *RECORDED, *more)))
        self._wanted = (*_ORDER, *self.numbers, *_TEXTS)
        self.names = list(dict.fromkeys((*self._wanted, *(SOURCES[name] for name in self.details))))
        self.schema = pa.schema(
            [
                *(SCHEMA.field(name) for name in (*_ORDER, *self.numbers)),
                *(pa.field(name, pa.dictionary(pa.int32(), pa.string())) for name in _TEXTS),
                *(pa.field(name, pa.float64()) for name in (*self.details, _WHOLE, IS_PROBE)),
            ]
        )

    def __call__(self, writers: Sequence[RecordedWriter], steps: Steps) -> Iterator[Any]:
        for table in first_parts(writers, None if steps == _EVERY else steps, self.names):
            if _RECOMPUTED in table.column("phase").unique().to_pylist():
                table = table.filter(pc.not_equal(table.column("phase"), _RECOMPUTED))
            yield self.of(table)

    def of(self, table: Any) -> Any:
        columns = [table.column(name) for name in self._wanted]
        columns += [
            *columns_of(self.details, table),
            pa.nulls(table.num_rows, pa.float64()),  # the column global_numel
            pa.array(np.zeros(table.num_rows)),  # the column IS_PROBE
        ]
        return with_coded_texts(pa.table(columns, self.schema.names), self.schema)


def _about(site: str, dtype: str | None, shape: str | None, global_shape: str | None, whole_numel: int | None) -> About:
    dtype = dtype or ""  # the notes of this probe name no dtype
    if shape is None:  # values of the probe have no shape
        return About(dtype, (), int(whole_numel or 0) if site in OF_MODULES else 0)
    whole, own = (shape_or_none(text or "") or () for text in (global_shape, shape))
    is_chunk = site in OF_MODULES and global_shape is not None and whole != own
    return About(dtype, own, min(max(math.prod(whole), 0), MAX_COUNT) if is_chunk else 0)


def _parts_and_peers(view: GlobalView, run: Run) -> dict[tuple[str, int], tuple[int, int]]:
    """Return, by root (model) and rank, the indices of the rank's part of the batch and its piece of the model."""
    pairs: dict[tuple[str, int], tuple[int, int]] = {}
    peers: dict[int, dict[int, int]] = {}
    """For each group of ranks, by its `id`, the index of the piece of the model that each rank holds."""
    for number, writer in enumerate(run.writers):
        for root in writer.manifest.roots:
            if writer.rank is None or (root.name, writer.rank) in pairs:
                continue
            part = view.parts_of_batch.get((root.name, writer.rank, writer.attempt))
            group = run.topology.group(root.name, "", number)
            if id(group) not in peers:
                groups = reversed(group.model_groups)
                peers[id(group)] = {rank: index for ranks in groups for index, rank in enumerate(ranks)}
            peer = peers[id(group)].get(writer.rank, 0)
            if root.stage is not None:  # each stage of a pipeline is a piece of its own
                peer = peer * root.stage.num_stages + root.stage.number
            pairs[root.name, writer.rank] = (writer.rank if part is None else part[0]), peer
    return pairs


def _shared_rates(run: Run) -> set[tuple[str, str]]:
    """Return the learning rates, by root and name, that are those of the same parameters on all data-parallel ranks."""
    of_root: dict[str, set[frozenset[tuple[str, str, str]]]] = {}
    roots = (root for writer in run.writers for root in writer.manifest.roots)
    for root in (root for root in roots if root.data_parallel is not None and root.stage is None):
        rates = ((one.path, name, rate) for one in root.modules for name, rate in one.rates.items())
        of_root.setdefault(root.name, set()).add(frozenset(rates))
    return {(name, rate) for name, some in of_root.items() if len(some) == 1 for _, _, rate in next(iter(some))}


def _dead_share(units: ManyUnits) -> Floats:
    zero_share = units.zero_count / np.maximum(units.num_values, 1)[:, None]
    share = np.mean(1 - zero_share < ACTIVE, axis=1)
    return np.where(units.num_values >= LEAST_VALUES, share, np.nan)


def _largest(units: ManyUnits) -> Floats:
    """Return the largest magnitude in each row, divided by the median rms of the row's nonzero units (channels)."""
    sizes = np.sqrt(units.sum_sq / np.maximum(units.num_values, 1)[:, None])
    num = np.count_nonzero(sizes, axis=1)
    is_told = (num >= 2) & np.isfinite(sizes).all(axis=1)
    ascending = np.sort(np.where(sizes > 0, sizes, np.inf), axis=1)
    indices = np.arange(len(sizes)), np.maximum(num - 1, 0) // 2, np.minimum(num // 2, sizes.shape[1] - 1)
    middle = (ascending[indices[0], indices[1]] + ascending[indices[0], indices[2]]) / 2
    return np.where(is_told, units.absmax.max(axis=1) / middle, np.nan)


def _subnormal_share(histograms: Histograms, ends: Integers) -> Floats:
    counts = histograms.counts.sum(axis=1)
    return _share((counts * (histograms.exponents < ends[:, :1])).sum(axis=1), histograms)


def _fill_from_statistics(columns: dict[str, Floats], table: Any, ends: Integers) -> None:
    """Fill the shares of float16 and float8 rows without a histogram with the least that their statistics allow.

    Of the nonzero values, at most `rms ** 2 / least ** 2` are as large as the least normal number.
    """
    numel, square, *others = (numbers(table.column(name)) for name in ("numel", "sum_sq", *COUNTS))
    num, least = numel - np.nan_to_num(others).sum(axis=0), ends[:, 0]
    is_judged = (least < 0) & (least > NORMAL_EXPONENTS["float32"][0]) & (num > 0) & ~np.isnan(square)
    for name, column in columns.items():
        at = np.flatnonzero(is_judged & np.isnan(column))
        largest = square[at] / num[at] / 4.0 ** least[at] if name == "histogram.subnormal_share" else 1.0
        column[at] = np.maximum(1 - largest, 0.0)


def _top_share(histograms: Histograms, ends: Integers) -> Floats:
    """Return the share of each row's nonzero values that are infinite or in the dtype's highest power of two.

    Only positive values count as such, because large negative values may be a mask.
    """
    counts = histograms.counts[:, 1] * (histograms.exponents >= ends[:, 1:])
    return _share(counts.sum(axis=1) + histograms.infinite[:, 1], histograms)


def _share(counts: Integers, histograms: Histograms) -> Floats:
    totals = histograms.counts.sum(axis=(1, 2)) + histograms.infinite.sum(axis=1)
    return np.asarray(counts / totals)


_OF_UNITS = {"units.dead_share": _dead_share, "units.largest": _largest}
_OF_HISTOGRAMS = {"histogram.subnormal_share": _subnormal_share, "histogram.top_share": _top_share}
_HASH = "fingerprint.hash"
"""A number for the fingerprint of an input of a whole model; NaN for other values."""
SOURCES = dict.fromkeys(_OF_UNITS, "units") | dict.fromkeys(_OF_HISTOGRAMS, "histogram") | {_HASH: "fingerprint"}
"""For each number that is computed from bytes, the column that has these bytes."""


def columns_of(names: Sequence[str], table: Any) -> list[Any]:
    """Compute the numbers `names` for each row of a table that has `dtype`, `shape` and the columns in `SOURCES`."""
    columns = {name: np.full(table.num_rows, np.nan) for name in names}
    dtype_of, dtypes = encode(table.column("dtype"))
    of_units, of_histograms = ([name for name in names if name in some] for some in (_OF_UNITS, _OF_HISTOGRAMS))
    with np.errstate(all="ignore"):
        if of_units:
            is_float = np.array([*("float" in dtype for dtype in dtypes), False], np.bool_)[dtype_of]
            shape_of, texts = encode(table.column("shape"))
            shapes = [*map(shape_or_none, texts), None]
            for units in units_of(table.column("units"), _there(table, "units", is_float), shapes, shape_of):
                for name in of_units:
                    columns[name][units.rows] = _OF_UNITS[name](units)
        if of_histograms:
            ends_of = [*(NORMAL_EXPONENTS.get(dtype, _NO_ENDS) for dtype in dtypes), _NO_ENDS]
            # For each row, the exponents of the smallest normal number and of the largest number of the dtype.
            ends = np.array(ends_of, np.int64)[dtype_of]
            rows = _there(table, "histogram", ends[:, 0] < ends[:, 1])
            for histograms in histograms_of(table.column("histogram"), rows):
                for name in of_histograms:
                    columns[name][histograms.rows] = _OF_HISTOGRAMS[name](histograms, ends[histograms.rows])
            _fill_from_statistics({name: columns[name] for name in of_histograms}, table, ends)
    if _HASH in names:
        is_input = holds(table.column("site"), "input".__eq__) & holds(table.column("module_path"), "".__eq__)
        rows = _there(table, "fingerprint", is_input)
        texts = table.column("fingerprint").take(pa.array(rows)).to_pylist()
        columns[_HASH][rows] = [zlib.crc32(text.encode()) for text in texts]
    return [pa.array(columns[name]) for name in names]


def _there(table: Any, column: str, chosen: npt.NDArray[np.bool_]) -> Integers:
    return np.flatnonzero(chosen & table.column(column).is_valid().to_numpy(zero_copy_only=False))


def shape_or_none(text: str) -> tuple[int, ...] | None:
    """Parse a shape from an untrusted text. Return None if the text is no shape."""
    with suppress(RunError):
        return parse_shape(text)
    return None
