"""The global view of a run: the rows of all ranks as the tensors of the complete model.

The rows of a merged run are passed through unchanged. The global view must never show a tensor as complete while one of
its chunks is missing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ..columns import COUNTS, HANDED_ON, METADATA_COLUMNS, SCHEMA, STATISTICS, note_members, parse_shape
from ..errors import LookupFailedError, RunError
from ..format.manifest import Stage
from ..layout.placement import NoPlan, Plan, in_words
from ..layout.regions import Region
from ..layout.rules import AS_ASKED, LOSSES
from ..numerics.dtypes import ITEM_BYTES, as_array
from ..numerics.keys import array_of, encode
from ..read.metadata import NONE, SIZE_COLUMNS, MetadataRows, Positions, StepSizes, whole_roots
from ..read.payload import Payloads, is_same
from ..read.run import RecordedRun
from .assembler import Assembler, PayloadPart, as_items
from .global_columns import NO_VALUES, GlobalColumns, as_json
from .leaves import Leaves, Sample
from .planner import GlobalValue, parse_overrides
from .row_groups import COLUMNS, RowFinding
from .run_topology import Topology
from .values import GlobalValues, choose_steps, load_sample

_FIRST_CLAUSE = re.compile(r"(?:[^;(]|\([^)]*\)?)*")
"""Matches the text before the first semicolon that is not in parentheses."""


class LoadedRows(NamedTuple):
    """Loaded rows, the values of the complete model in them, and the assembler of their tensors."""

    metadata: MetadataRows
    values: GlobalValues
    assembler: Assembler


class GlobalView:
    """The rows of a run's ranks as tensors of the complete model. Made by `Run.view`."""

    def __init__(self, run: RecordedRun, *, loss: str = "mean", layouts: Sequence[str] = ()) -> None:
        """Read nothing yet.

        Args:
            run: a recorded or a merged run.
            loss: how each rank's loss depends on its samples: ``mean`` (activation gradients of W ranks are divided by
                W), ``weighted`` (by the ranks' batch sizes) or ``sum`` (not scaled).
            layouts: ``PATTERN=LAYOUT``. PATTERN is a glob over ``module_path:site:name``. LAYOUT is ``shard(DIM)``,
                ``replicate``, ``partial(sum)`` or ``per_rank``. The last pattern that matches a value is used.

        Raises:
            LookupFailedError: `loss` or a layout is none of the allowed texts.
        """
        if loss not in LOSSES:
            raise LookupFailedError(f"loss {loss!r}: expected one of {', '.join(LOSSES)}")
        self._overrides = parse_overrides(layouts)
        self._run = run
        self._loss = loss
        self._topology = Topology(run.writers, run.run_id, run.world_size)
        self.leaves = Leaves(self._sample)
        self.stages: Mapping[tuple[int, str], Stage] = self._topology.stages
        """The pipeline stages, by writer number and root."""
        self.has_pipeline = bool(self.stages)
        """True for a pipeline run, where the micro-batches of a step together make one batch."""
        self._kept: tuple[int, LoadedRows] | None = None

    @cached_property
    def parts_of_batch(self) -> dict[tuple[str, int, int], tuple[int, int]]:
        """By root, rank and attempt: which part of the batch the rank works on, if known, and the number of parts."""
        part_of_writer: dict[tuple[str, int, int], tuple[int, int]] = {}
        of_models = whole_roots(self.stages)
        parts: dict[int, tuple[dict[int, int], int]] = {}
        """For the `id` of a group of ranks: the index of each rank's part of the batch, and the number of parts."""
        for number, writer in enumerate(self._run.writers):
            for root in writer.manifest.roots:
                group = self._topology.group(root.name, "", number)
                if id(group) not in parts:
                    lines = group.model_groups or tuple((rank,) for rank in group.ranks)
                    parts[id(group)] = {rank: at for at, ranks in enumerate(lines) for rank in ranks}, len(lines)
                part_of, num_parts = parts[id(group)]
                is_unknown = bool(group.conflict) or (writer.rank is None and root.model_parallel is not None)
                own = part_of if writer.rank is None else {writer.rank} & part_of.keys()
                for rank in () if is_unknown else own:
                    part_of_writer[of_models.get(root.name, root.name), rank, writer.attempt] = part_of[rank], num_parts
        return part_of_writer

    def windows(self, max_rows: int = 200_000, max_bytes: int | None = None) -> list[tuple[int, int]]:
        """Return half-open ranges of steps that cover all recorded steps, in order. Only indexes are read.

        A range of several steps has at most `max_rows` rows over all ranks, and at most `max_bytes` of decoded payload.
        """
        columns = [name for name in SIZE_COLUMNS if max_bytes is not None or name != "payload_bytes"]
        shards = (shard for writer in self._run.writers for shard in writer.shards)
        sizes = StepSizes.sum(StepSizes.of(shard.columns(columns)) for shard in shards)
        return [step_range[:2] for step_range in sizes.cut(max_rows, max_bytes)]

    def rows(
        self,
        first: int | None = None,
        last: int | None = None,
        only: Sequence[int] | npt.NDArray[np.int64] | None = None,
    ) -> GlobalRows:
        """Return the rows of the steps in [first, last). `only` restricts them to the listed steps."""
        low, high = NONE if first is None else first, 1 << 62 if last is None else last
        metadata = MetadataRows(self._run.writers, None if first is last is None else (low, high))
        metadata.load((*METADATA_COLUMNS, *COLUMNS))
        steps = metadata.numbers("step")
        is_wanted = (steps >= low) & (steps < high)
        if only is not None:
            is_wanted &= np.isin(steps, only)
        positions = np.flatnonzero(is_wanted)
        if self._run.is_merged:
            return GlobalRows(metadata, None, [], positions)
        _, values, assembler = self.load(metadata)
        planned = list(values.values(positions))
        return GlobalRows(metadata, assembler, planned, positions, values.findings, whole_roots(self.stages))

    def kept(self, metadata: MetadataRows) -> LoadedRows:
        """Return all rows of the run with their values. The result is cached until damage removes rows."""
        metadata.load(COLUMNS)
        if self._kept is None or self._kept[0] != metadata.num_rows or self._kept[1].metadata is not metadata:
            self._kept = metadata.num_rows, self.load(metadata)
        return self._kept[1]

    def load(self, metadata: MetadataRows) -> LoadedRows:
        metadata.load(COLUMNS)
        payloads = Payloads(metadata, len(self._run.writers))
        assembler = Assembler(metadata, payloads)

        def same(positions: Sequence[int]) -> bool | None:
            tensors = [assembler.tensor(position) for position in positions]
            if any(tensor is None for tensor in tensors):
                return None
            try:
                return is_same(payloads, [tensor.positions for tensor in tensors if tensor is not None])
            except RunError:
                return None  # the error is raised again when the values are read

        def items_of(position: int) -> npt.NDArray[Any] | None:
            tensor = assembler.tensor(position)
            if tensor is None or len(tensor.positions) > 1:
                return None  # a tensor of several parts is too large to be the result of `expand`
            try:
                return as_items(assembler.local(position), tensor.dtype).reshape(tensor.shape)
            except RunError:
                return None

        values = GlobalValues(
            metadata,
            self._topology,
            loss=self._loss,
            overrides=self._overrides,
            is_same=same,
            items_of=items_of,
            leaves=self.leaves,
        )
        return LoadedRows(metadata, values, assembler)

    def sample_batches(self) -> tuple[MetadataRows, list[int] | None]:
        """Return the rows from which layouts are inferred, not yet loaded, and the sampled steps (None: all steps).

        The result does not depend on the part of the run that is queried.
        """
        steps = choose_steps(self._run.writers)
        ranges = None if steps is None else tuple((step, step + 1) for step in steps)
        return MetadataRows(self._run.writers, ranges), steps

    def _sample(self) -> Sample | None:
        metadata, steps = self.sample_batches()
        positions = load_sample(metadata, steps)
        return self.load(metadata).values.sample(positions)


class GlobalRows:
    """Rows of the global view. All methods take the index of a row in `table`."""

    def __init__(
        self,
        metadata: MetadataRows,
        assembler: Assembler | None,
        values: Sequence[GlobalValue],
        positions: Positions,
        findings: Sequence[RowFinding] = (),
        roots: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Made by `GlobalView.rows`. `roots` maps the root of each pipeline stage to the root of the complete model."""
        self._roots = roots
        self.findings = list(findings)
        """Findings for the user. A finding that concerns several values appears once."""
        self._metadata = metadata
        self._is_merged = assembler is None
        apart = [(value, value.plan) for value in values if isinstance(value.plan, NoPlan)]
        self._whys = {at: plan.why for value, plan in apart if plan.why != AS_ASKED for at in value.positions}
        self._differing = {at: value.differing for value, _ in apart if value.differing for at in value.positions}
        self._assembler = assembler or Assembler(metadata, Payloads(metadata))
        if self._is_merged:
            part_0 = positions[metadata.numbers("part")[positions] == 0]
            # The merge wrote each unit of work of a step with a writer of its own, in the order of execution.
            keys = (metadata.numbers("seq")[part_0], metadata.writer_numbers(part_0), metadata.numbers("rank")[part_0])
            order = np.lexsort([*keys, metadata.numbers("step")[part_0]])
            self._sources: list[GlobalValue | int] = part_0[order].tolist()
        else:
            self._sources = list(_rows_of_values(values))
        self._handed_on = {p: one.stage for one in values if one.is_between_stages for p in one.positions}
        self.table = self._make_table()
        """The metadata columns. Each row is a tensor, in the order of execution; `rank` is null for a global tensor."""
        whole_bytes = _whole_bytes(self.table.column("dtype"), self.table.column("numel"))
        self.payload_bytes = np.where(array_of(self.table.column("encoding").is_valid()), whole_bytes, 0)
        """The size in bytes of each row's decoded tensor; 0 for a row without values."""

    def __len__(self) -> int:
        return len(self._sources)

    def array(self, i: int) -> npt.NDArray[Any]:
        """Return the tensor of row `i`; bfloat16 and 8-bit floats have ml_dtypes' types. Raises what `parts` raises."""
        source = self._with_payload(i)
        shape = parse_shape(self.table.column("shape")[i].as_py())
        dtype = self.table.column("dtype")[i].as_py()
        if isinstance(source, int):
            return as_array(self._assembler.local(source), dtype, shape)
        assert isinstance(source.plan, Plan)
        return as_array(self._assembler.array(source.plan, source.positions), dtype, shape)

    def chunk_regions(self, i: int) -> list[tuple[int, int, Region]]:
        """Return rank, micro-step and region of each chunk of row `i`. Empty if the tensor is a reduction of chunks."""
        source = self._sources[i]
        if isinstance(source, int) or not isinstance(source.plan, Plan):
            return []
        fills = source.plan.fills
        if any(len(fill.terms) != 1 for fill in fills):
            return []
        ranks, micro_steps = (self._metadata.numbers(name) for name in ("rank", "micro_step"))
        at = [source.positions[fill.terms[0].chunk] for fill in fills]
        return [(int(ranks[p]), int(micro_steps[p]), fill.region) for p, fill in zip(at, fills, strict=True)]

    def how_it_lies(self, i: int) -> tuple[str, str] | None:
        """Return how the ranks' chunks form the tensor of row `i`, and how this is known, both in words.

        Returns:
            None for a single rank's row of a value that also has a global row.
        """
        source = self._sources[i]
        if isinstance(source, int):
            why = note_members(self.table.column("note")[i].as_py()).get("per_rank")
            return None if why is None else ("each rank its own", _FIRST_CLAUSE.match(str(why))[0])  # type: ignore[index] # it matches any text
        plan, at = source.plan, source.positions[0]
        assert isinstance(plan, Plan)
        dim = plan.dim if plan.across is None else plan.across.dim
        placements = in_words(self._metadata.text("placements", at))
        grounds = [self._metadata.text("layout_source", at) or "", plan.source]
        if placements and grounds[0] in ("marked", "zero"):  # the framework's name, not the kind of placement
            grounds = [ground for ground in grounds if ground not in ("dtensor", "fsdp")]
            placements = re.sub(r"FlatShard\(\d+\)", "partition", placements)
        elif len(source.positions) > 1:
            is_sum = any(len(fill.terms) > 1 for fill in plan.fills)
            starts = zip(*(fill.region.start for fill in plan.fills if fill.region.start is not None), strict=True)
            cut = [f"Shard({number})" for number, at in enumerate(starts) if number != dim and len({*at}) > 1]
            placements = "added up" if is_sum else "replicas" if plan.copies else " ".join(cut)
        batches = "" if dim is None else f"batches along dim {dim}"
        return ", ".join(filter(None, (placements, batches))) or "whole", ", ".join(
            dict.fromkeys(filter(None, grounds))
        )

    def statistics_of_chunks(self, i: int) -> list[dict[str, Any]]:
        """Return rank, micro-step and statistics of each chunk of row `i`. Empty if the row is a single rank's."""
        source = self._sources[i]
        if isinstance(source, int) or not isinstance(source.plan, Plan):
            return []
        at = [source.positions[term.chunk] for fill in source.plan.fills for term in fill.terms]
        names = ("rank", "micro_step", *STATISTICS, *COUNTS)
        columns = {name: self._metadata.take(name, np.array(at, np.int64)).to_pylist() for name in names}
        return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]

    def parts(self, i: int) -> Iterator[PayloadPart]:
        """Yield the encoded payload of row `i` in parts of at most 32 MiB. Raise LookupFailedError if there is none."""
        source = self._with_payload(i)
        if isinstance(source, int):
            yield from self._assembler.local_parts(source)
            return
        assert isinstance(source.plan, Plan)
        yield from self._assembler.parts(source.plan, source.positions)

    def _with_payload(self, i: int) -> GlobalValue | int:
        if self.table.column("encoding")[i].as_py() is None:
            row = {n: self.table.column(n)[i].as_py() for n in ("module_path", "site", "name", "step", "note")}
            note = f" ({row['note']})" if row["note"] else ""
            what = f"{row['module_path']!r} site={row['site']!r} name={row['name']!r} step={row['step']}"
            raise LookupFailedError(f"{what} has no values in the global view{note}")
        return self._sources[i]

    def _make_table(self) -> Any:
        metadata, sources = self._metadata, self._sources
        firsts = np.array([s if isinstance(s, int) else s.positions[0] for s in sources], np.int64)
        values = [source for source in sources if not isinstance(source, int)]
        is_global = pa.array([not isinstance(source, int) for source in sources], pa.bool_())
        changed = GlobalColumns(metadata, self._assembler, values).by_name() if values else {}
        if values and self._roots:
            at = np.array([value.positions[0] for value in values], np.int64)
            changed["root"] = [self._roots.get(root, root) for root in metadata.take("root", at).to_pylist()]
        columns = {}
        for name in METADATA_COLUMNS:
            kind = SCHEMA.field(name).type
            if name in changed and len(values) == len(sources):
                columns[name] = pa.array(changed[name], kind)
                continue
            column = metadata.take(name, firsts).combine_chunks()
            if name in changed:
                column = pc.replace_with_mask(column, is_global, pa.array(changed[name], kind))
            columns[name] = column
        is_cut = self._find_cut(columns)
        if is_cut.any():
            for name in ("encoding", "payload_bytes"):
                columns[name] = pc.if_else(pa.array(is_cut), None, columns[name])
        columns["note"] = self._with_reasons(columns["note"], is_cut)
        fields = [SCHEMA.field(name) for name in METADATA_COLUMNS]
        return pa.table(columns, schema=pa.schema([f.with_nullable(True) if f.name == "rank" else f for f in fields]))

    def _with_reasons(self, notes: Any, is_cut: npt.NDArray[np.bool_]) -> Any:
        """Add to the notes of single ranks' rows why a row was not joined with others, or why it has no values."""
        changed: dict[int, str] = {}
        if not (self._whys or self._handed_on or is_cut.any()):
            return notes
        for i, source in enumerate(self._sources):
            if not isinstance(source, int):
                continue
            members: dict[str, Any] = {}
            if why := self._whys.get(source):
                members["per_rank"] = why
                if differing := self._differing.get(source):
                    members["replicas_differ"] = list(differing)
            if (stage := self._handed_on.get(source)) is not None:
                members[HANDED_ON] = [stage.number, stage.num_stages]
            if is_cut[i]:
                members[NO_VALUES] = "a part of the tensor is missing"
            if members:
                changed[i] = as_json(note_members(notes[i].as_py()) | members)
        is_changed = np.zeros(len(self._sources), bool)
        is_changed[[*changed]] = True
        return pc.replace_with_mask(notes, pa.array(is_changed), pa.array([*changed.values()], pa.string()))

    def _find_cut(self, columns: dict[str, Any]) -> npt.NDArray[np.bool_]:
        """Flag the rows of single ranks whose tensors are incomplete, because a later part is missing."""
        payload_bytes = array_of(columns["payload_bytes"], NONE)
        is_cut = np.zeros(len(self._sources), bool)
        for i in np.flatnonzero(
            (payload_bytes != NONE) & (payload_bytes < _whole_bytes(columns["dtype"], columns["numel"]))
        ).tolist():
            source = self._sources[i]
            is_cut[i] = isinstance(source, int) and self._assembler.tensor(source) is None
        return is_cut


def _whole_bytes(dtype: Any, numel: Any) -> npt.NDArray[np.int64]:
    codes, texts = encode(dtype)
    widths = np.array([ITEM_BYTES.get(text, 0) for text in texts] + [0], np.int64)
    total: npt.NDArray[np.int64] = array_of(numel) * widths[codes]
    return total


def _rows_of_values(values: Sequence[GlobalValue]) -> Iterator[GlobalValue | int]:
    """Yield the global row of each value that has one, and the ranks' rows if the global row lacks facts."""
    for value in values:
        plan = value.plan
        if isinstance(plan, Plan):
            yield value
        if isinstance(plan, NoPlan) or plan.scale == "assumed_mean" or value.differing or not plan.is_complete:
            yield from value.positions
