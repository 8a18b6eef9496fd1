"""The values of a run, each with its plan, and the choice of the few steps from which layouts are inferred."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ..layout.placement import NoPlan, RankChunk
from ..numerics.keys import array_of, encode, pack
from ..read.metadata import NONE, Keys, MetadataRows, MicroBatches, Positions, missing_stages
from ..read.writers import RecordedWriter
from ..sites import ACTIVATIONS, GRADIENTS, NUMBERS, STATES
from .leaves import BatchDims, ChunkKeys, Leaves, Observation, Sample
from .planner import GlobalValue, Overrides, Planner
from .row_groups import COLUMNS, LABELS, FindingLog, GroupedRows, RowFinding, RowGrouper
from .run_topology import Topology, find_superseded
from .value_rows import ValueReader, ValueRows

_MAX_LOOKED_UP = 100_000
"""The most rows that stay grouped between queries. The next query often needs the same module and step."""


def find_counting_rows(rows: MetadataRows, topology: Topology, findings: FindingLog) -> npt.NDArray[np.bool_]:
    """Flag the rows that count. Not those of another run, nor of steps that a later attempt recorded again."""
    writers = rows.writer_numbers(np.arange(rows.num_rows, dtype=np.int64))
    counts: npt.NDArray[np.bool_] = ~np.isin(writers, topology.foreign_writers)
    for number in topology.foreign_writers:
        if (writers == number).any():
            text = f"writer {topology.describe(number)} belongs to another run; its rows are left out"
            findings.add("stranger", None, (), text)
    steps = rows.numbers("step")
    of_writer = {number: steps[counts & (writers == number)] for number in np.unique(writers[counts]).tolist()}
    winners = topology.winners({number: np.unique(own).tolist() for number, own in of_writer.items()})
    launches = np.array(topology.launches, np.int64)[writers]
    is_superseded = counts & find_superseded(winners, launches, steps)
    if is_superseded.any():
        text = f"{is_superseded.sum()} rows of earlier attempts are left out: a later attempt recorded their steps"
        findings.add("superseded", int(np.flatnonzero(is_superseded)[0]), (), text)
    counts &= ~is_superseded
    return counts


class PlannedValues:
    """The values of grouped rows. Each value is planned when it is first needed."""

    def __init__(self, values: GroupedRows, planner: Planner, *, is_micro_batch: bool) -> None:
        self._values = values
        self._planner = planner
        self._is_micro_batch = is_micro_batch
        self._planned: dict[int, GlobalValue] = {}
        self._number_of = {int(key): number for number, key in enumerate(values.keys)}

    def __iter__(self) -> Iterator[GlobalValue]:
        for number in self._values.order.tolist():
            yield self._plan(number)

    def holding(self, positions: Positions) -> list[GlobalValue]:
        """Return the values that have at least one of these rows, in the order of execution."""
        values = self._values
        is_wanted = np.logical_or.reduceat(np.isin(values.chosen, positions), values.starts)
        return [self._plan(number) for number in values.order.tolist() if is_wanted[number]]

    def _plan(self, number: int) -> GlobalValue:
        if number not in self._planned:
            forward_key = int(self._values.forward_keys[number])
            forward_number = self._number_of.get(forward_key) if forward_key >= 0 else None
            self._planned[number] = self._planner.plan(
                self._values,
                number,
                None if forward_number is None else self._plan(forward_number),
                is_gradient=forward_key >= 0,
                is_micro_batch=self._is_micro_batch,
            )
        return self._planned[number]


class GlobalValues:
    """The values of the complete model, found in loaded rows of the ranks. Not thread-safe."""

    def __init__(
        self,
        rows: MetadataRows,
        topology: Topology,
        *,
        loss: str,
        overrides: Overrides,
        is_same: Callable[[Sequence[int]], bool | None],
        items_of: Callable[[int], npt.NDArray[Any] | None],
        leaves: Leaves,
    ) -> None:
        """Load the columns that every query needs."""
        rows.load(COLUMNS)
        self._rows = rows
        self._topology = topology
        self._log = FindingLog(rows)
        self.counts = find_counting_rows(rows, topology, self._log)
        """True for each row that counts: rows of another run do not, nor rows that a later attempt recorded again."""
        for text in missing_stages(topology.stages):
            self._log.add("partial", None, (), text)
        self._reader = ValueReader(rows, topology, self.counts, leaves, is_same=is_same, items_of=items_of)
        self._grouper = RowGrouper(rows, topology.stages)
        self._planner = Planner(self._reader, overrides, loss, self._log)
        self._kept: dict[tuple[bytes, bool], PlannedValues] = {}
        self._num_kept_rows = 0

    @property
    def findings(self) -> list[RowFinding]:
        return self._log.findings

    def values(self, positions: Positions) -> Iterator[GlobalValue]:
        """Yield the values of some rows in the order of execution, except rows that do not count."""
        values = self._group(positions)
        if values is not None:
            yield from PlannedValues(values, self._planner, is_micro_batch=False)

    def values_of(self, rows: Positions, module_rows: Positions, *, is_micro_batch: bool) -> list[GlobalValue]:
        """Return the values that have at least one of these rows.

        `module_rows` are all rows of the same module and step. They stay grouped, because the next query often needs
        them. With `is_micro_batch` only one micro-batch of a pipeline is wanted, so no other one is missing.
        """
        key = module_rows.tobytes(), is_micro_batch
        if key not in self._kept:
            values = self._group(module_rows)
            if values is None:
                return []
            if self._num_kept_rows > _MAX_LOOKED_UP:
                self._kept.clear()
                self._num_kept_rows = 0
            self._num_kept_rows += len(module_rows)
            self._kept[key] = PlannedValues(values, self._planner, is_micro_batch=is_micro_batch)
        return self._kept[key].holding(rows)

    def chunks(self, value: GlobalValue) -> list[RankChunk]:
        """Return a chunk for each row of a value, indexed as in the value's plan."""
        positions = np.array(value.positions, np.int64)
        micro_steps = MicroBatches(self._rows, positions, self._topology.stages).micro_step
        return [self._grouper.chunk(int(p), int(m)) for p, m in zip(positions, micro_steps, strict=True)]

    def source_of(self, value: GlobalValue) -> str:
        """Return the `layout_source` of a value's first row. Empty if the row has none. The column must be loaded."""
        return self._rows.text("layout_source", value.positions[0]) or ""

    def sample(self, positions: Positions) -> Sample | None:
        """Sample these rows' values, without states and scalars, which need no sample. Return None if none are left."""
        values = self._group(positions, without_sites=(*STATES, *NUMBERS))
        apart = cache(partial(self._find_apart, positions))
        return None if values is None else Sampler(self._reader, values, apart)

    def _find_apart(self, positions: Positions) -> set[tuple[str, int, str]]:
        """Return root, stage and path of modules whose first recorded (not constant) parameters differ by rank."""
        sites, steps = self._rows.keys("site", positions), self._rows.numbers("step")[positions]
        chosen, steps = (some[sites.codes == sites.code("param")] for some in (positions, steps))
        grouped = self._group(chosen[steps == steps.min(initial=np.iinfo(np.int64).max)])
        apart, shared, around, owners = (set[tuple[str, int, str]]() for _ in range(4))
        if grouped is None:
            return apart
        for number in range(len(grouped.starts)):
            leaf = self._reader.leaf(grouped, number)
            paths = accumulate(leaf.module_path.split("."), "{}.{}".format)
            *above, own = ((leaf.root, leaf.stage, path) for path in paths)
            around.update(above)
            if grouped.equal[number] == 0 and self._reader.read(grouped, number).chunks[0].global_shape is None:
                owners.add(own)
                apart.update((*above, own))
            elif not grouped.is_blank[number]:
                shared.update((*above, own))
        return (apart - shared) | (owners - around)

    def _group(self, positions: Positions, without_sites: Sequence[str] = ()) -> GroupedRows | None:
        chosen = positions[self.counts[positions]]
        chosen = chosen[self._rows.numbers("part")[chosen] == 0]
        if without_sites:
            sites = self._rows.keys("site", chosen)
            chosen = chosen[~np.isin(sites.codes, [sites.code(site) for site in without_sites])]
        return self._grouper.group(chosen) if len(chosen) else None


MAX_ROWS = 50_000
"""A run with at most this many rows, over all ranks, has all its steps sampled. That takes half a second."""
_COLUMNS = ("step", "site", "mode", "payload_bytes", "min", "max", "nan_count")
_SITES = tuple(site for site in ACTIVATIONS if site not in GRADIENTS)
_NUM_STEPS = 4
"""The number of steps that are sampled for each pair of a site and a mode."""
_MAX_STEPS = 12


def choose_steps(writers: Sequence[RecordedWriter]) -> list[int] | None:
    """Return the steps from which layouts are inferred, ascending; None means all steps."""
    if sum(writer.num_rows for writer in writers) <= MAX_ROWS:
        return None
    ranks = [writer.rank for writer in writers if writer.rank is not None and writer.num_rows]
    shards = [shard for writer in writers if writer.rank == min(ranks, default=None) for shard in writer.shards]
    batches = [batch for shard in shards for batch in shard.columns(_COLUMNS)]
    if not batches:
        return []
    columns = {name: pa.chunked_array([batch.column(name) for batch in batches]) for name in _COLUMNS}
    steps = array_of(columns["step"])
    sites, modes = (Keys(*encode(columns[name])) for name in ("site", "mode"))
    low, high = (array_of(columns[name], np.nan) for name in ("min", "max"))
    is_telling = (low < high) & (array_of(columns["nan_count"]) == 0)
    is_unmeasured = array_of(columns["nan_count"].is_null())
    has_values = array_of(columns["payload_bytes"].is_valid())
    chosen: dict[int, None] = {}
    for mode in range(len(modes.texts or ())):
        for site in _SITES:
            of_stream = (modes.codes == mode) & (sites.codes == sites.code(site))
            chosen |= dict.fromkeys(_choose(steps, of_stream & (is_telling | is_unmeasured), has_values))
    return sorted(list(chosen)[:_MAX_STEPS] or steps[:1].tolist())


def load_sample(metadata: MetadataRows, steps: Sequence[int] | None) -> Positions:
    """Load the rows of a sample, and return the positions of those in the sampled steps (None: all steps)."""
    metadata.load(COLUMNS)
    numbers = metadata.numbers("step")
    return np.arange(len(numbers)) if steps is None else np.flatnonzero(np.isin(numbers, steps))


def _choose(
    steps: npt.NDArray[np.int64], is_telling: npt.NDArray[np.bool_], has_values: npt.NDArray[np.bool_]
) -> list[int]:
    """Return up to four steps: two with the most payloads that are neither constant nor NaN, and two far apart.

    The steps far apart are the first and the last step with at least half as many such values as the best step.
    """
    known, indices = np.unique(steps[is_telling], return_inverse=True)
    if not len(known):
        return []
    num = np.bincount(indices.reshape(-1), minlength=len(known))
    num_values = np.bincount(indices.reshape(-1), weights=has_values[is_telling], minlength=len(known))
    best = np.lexsort([known, -num, -num_values])[: _NUM_STEPS - 2]
    full = np.flatnonzero(2 * num >= num.max())
    return list(dict.fromkeys(known[[*best, full[0], full[-1]]].tolist()))


_MIN_BITS = 10
"""Integer tensors with fewer bits of information than this, such as a few samples' classes, may be equal by chance."""


def proven_by(low: float | None, high: float | None, total: float | None, numel: int, *, is_float: bool) -> Observation:
    """Return what equal tensors prove with this least and greatest finite element, sum and number of elements.

    Whole numbers may be indices, masks or classes, so they never prove as much as floats do.
    """
    if low is None or high is None:
        return Observation.NOTHING
    if is_float and not (low.is_integer() and high.is_integer() and total is not None and float(total).is_integer()):
        return Observation.EQUAL
    bits = numel * math.log2(high - low + 1)
    return Observation.PERHAPS if bits >= _MIN_BITS else Observation.NOTHING


def proven_by_items(items: npt.NDArray[Any]) -> Observation:
    """Return what equal tensors with these elements prove. A constant or NaN proves nothing."""
    kind = items.dtype.kind
    try:
        wide = items.astype(np.float64 if kind != "c" else np.complex128)
    except (TypeError, ValueError):  # the elements are not numbers but pairs or bytes
        return Observation.EQUAL if items.size and (items != items.flat[0]).any() else Observation.NOTHING
    if not items.size or np.isnan(wide).any():
        return Observation.NOTHING
    if kind == "c":
        return Observation.EQUAL if (wide != wide.flat[0]).any() else Observation.NOTHING
    finite = wide[np.isfinite(wide)]
    if not finite.size or (finite.size == wide.size and finite.min() == finite.max()):
        return Observation.NOTHING
    low, high = float(finite.min()), float(finite.max())
    return proven_by(low, high, float(finite.sum()), items.size, is_float=kind not in "biu")


class Sampler(Sample):
    """Infers the layouts of leaves (named tensors) from their values at the sampled steps."""

    def __init__(
        self, reader: ValueReader, grouped: GroupedRows, apart: Callable[[], set[tuple[str, int, str]]]
    ) -> None:
        self._reader, self.apart = reader, apart
        rows, sequence = reader.rows, grouped.order
        self.grouped = grouped
        firsts = grouped.chosen[grouped.starts]
        stages, roots = np.full(len(firsts), NONE), grouped.labels["root"]
        for (writer, root), stage in reader.topology.stages.items():
            stages[(grouped.writers == writer) & (roots.codes == roots.code(root))] = stage.number
        labels = [grouped.labels[name].codes for name in LABELS]
        calls, steps, micro_steps = (rows.numbers(name)[firsts] for name in ("call", "step", "micro_step"))
        num_dims = np.array([len(chunk.shape) for chunk in grouped.chunks], np.int64)
        num_dims = num_dims[grouped.codes[grouped.starts]]
        codes = pack([*labels, calls, stages, num_dims])[sequence]
        by_leaf = np.argsort(codes, kind="stable")
        bounds = np.flatnonzero(np.r_[True, np.diff(codes[by_leaf]) > 0])
        self.leaves = {reader.leaf(grouped, int(some[0])): some for some in np.split(sequence[by_leaf], bounds[1:])}
        of_call = [grouped.labels[name].codes for name in ("root", "module_path", "mode", "phase")]
        moments = [steps, micro_steps, stages]
        self.calls = np.stack([pack(moments), pack([*of_call, *moments, calls])], axis=1)

    def look(self, number: int, some: ChunkKeys | None) -> Observation:
        grouped, value = self.grouped, self._reader.read(self.grouped, number)
        numbers = _numbers_of(value.chunks, some)
        shapes = {value.chunks[i].shape for i in numbers}
        if len(numbers) < 2 or (some is None and len(shapes) > 1):
            return Observation.NOTHING  # even copies, such as position indices, may differ in length between ranks
        is_equal = self._reader.compare(grouped, number, value).among(numbers).equality() if len(shapes) == 1 else False
        if is_equal is None or (is_equal and grouped.is_blank[number]):
            return Observation.NOTHING
        if not is_equal:
            return Observation.UNEQUAL
        proven, items = self._proven(number, value.positions[numbers[0]], value.chunks[numbers[0]])
        if proven is Observation.NOTHING:
            return proven
        if some is not None and _are_of_one_batch(value, numbers):
            return proven
        batch_dims, is_shared = self._batch_dims_of(value)
        if is_shared:
            return Observation.NOTHING
        if batch_dims is not None and not batch_dims.dims:
            return proven
        items = self._reader.items_of(value.positions[numbers[0]]) if items is None else items
        if items is None:
            return Observation.PERHAPS
        dims = range(items.ndim) if batch_dims is None else batch_dims.dims
        if any(items.shape[dim] > 1 and (items == items.take([0], axis=dim)).all() for dim in dims):
            return Observation.REPEATED
        return proven if batch_dims is not None and max(batch_dims.sizes) > 1 else Observation.PERHAPS

    def _proven(self, number: int, position: int, chunk: RankChunk) -> tuple[Observation, npt.NDArray[Any] | None]:
        """Return what equal chunks prove by their content, and their elements if they were read, else None."""
        if not self.grouped.is_measured[number]:
            items = self._reader.items_of(position)
            # A fingerprint does not show whether the elements are zeros or NaN.
            return (Observation.NOTHING if items is None else proven_by_items(items)), items
        at = np.array([position], np.int64)
        low, high, total = (self._reader.rows.take(name, at)[0].as_py() for name in ("min", "max", "sum"))
        numel = int(self._reader.rows.numbers("numel")[position])
        is_float = chunk.dtype.startswith(("float", "bfloat"))
        return proven_by(low, high, total, numel, is_float=is_float), None

    def moment(self, number: int) -> BatchDims | None:
        return self._batch_dims_of(self._reader.read(self.grouped, number))[0]

    def _batch_dims_of(self, value: ValueRows) -> tuple[BatchDims | None, bool]:
        """Return the dims that may be the batch (None if unknown), and whether all ranks had the same batch."""
        batch = self._reader.batches(value, is_later=value.leaf.phase in ("recompute", "backward"))[0]
        shapes = [value.chunks[i].shape for i in value.local_batches.chunks]
        if batch.sizes is None or len(batch.sizes) != len(shapes) or len({len(shape) for shape in shapes}) > 1:
            return None, batch.is_shared
        both = list(zip(shapes, batch.sizes, strict=True))
        dims = {d for d in range(len(shapes[0])) if all(shape[d] == size for shape, size in both)}
        first = min(dims, default=None)
        if shapes[0] and any(all(shape[0] == size * factor for shape, size in both) for factor in batch.factors):
            if 0 not in dims and (max(batch.sizes) > 1 or len(shapes[0]) < 3):
                first = None  # if dim 0 has the rows of all samples, a later dim of the batch's size is not the batch
            dims.add(0)
        are_single = len(batch.sizes) > 1 and {*batch.sizes} == {1} and not batch.is_shared
        return BatchDims(batch.sizes, frozenset(dims), first, are_single), batch.is_shared

    def cut(self, number: int, some: ChunkKeys) -> int | NoPlan | None:
        value = self._reader.read(self.grouped, number)
        numbers = _numbers_of(value.chunks, some)
        chunks = [value.chunks[i] for i in numbers]
        return self._reader.sharding.infer(value.leaf, value.step, chunks) if chunks else None


def _are_of_one_batch(value: ValueRows, numbers: Sequence[int]) -> bool:
    """Return whether the ranks of these chunks worked on the same part of the batch."""
    if isinstance(value.batch_groups, NoPlan):
        return False
    units = ({i for unit in one.units for i in unit} for one in value.batch_groups or ())
    return value.batch_groups is None or any(one.issuperset(numbers) for one in units)


def _numbers_of(chunks: Sequence[RankChunk], some: ChunkKeys | None) -> list[int]:
    """Return the indexes of the chunks with the keys `some` (None: all chunks). Empty if a chunk is missing."""
    if some is None:
        return list(range(len(chunks)))
    at = {(chunk.rank, chunk.micro_step): i for i, chunk in enumerate(chunks)}
    return [at[key] for key in some] if all(key in at for key in some) else []
