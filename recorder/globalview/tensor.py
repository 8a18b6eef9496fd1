"""The one global tensor that a query selects: assembled from the ranks' chunks, or its layout as text."""

from __future__ import annotations

import html
import itertools
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ..columns import DETAILS, METADATA_COLUMNS, note_members, parse_shape
from ..errors import CorruptError, LookupFailedError, RunError
from ..layout.placement import Fill, Plan, RankChunk, coordinate_of, in_words, parse_mesh, reduce_op
from ..layout.regions import Ints, Region
from ..layout.rules import NO_ROOT_INPUT
from ..numerics.dtypes import item_bytes
from ..numerics.histogram import Histogram
from ..numerics.units import Units
from ..read.lookup import TensorRows, several_stages
from ..read.metadata import MetadataRows, Positions
from ..system.text import listed
from .global_columns import GlobalColumns
from .planner import GlobalValue
from .values import GlobalValues
from .view import LoadedRows


def is_partial(metadata: MetadataRows, positions: Positions) -> bool:
    """Return True if a row of a merged run says that ranks are missing."""
    metadata.load(["note"])
    note = metadata.text("note", int(positions[0]))
    return "partial" in note_members(note)


def global_tensor(
    loaded: LoadedRows, tensor_rows: TensorRows, *, partial: bool
) -> tuple[npt.NDArray[np.uint8], str, tuple[int, ...]]:
    """Return bytes, dtype and shape of the global tensor that the ranks' rows form; `partial` allows missing ranks.

    LookupFailedError says why the rows form no single tensor. CorruptError means that the bytes have changed.
    """
    _, values, assembler = loaded
    if not values.counts[tensor_rows.positions].any():
        why = "a later attempt recorded this step again; rank= selects one rank's tensor"
        raise LookupFailedError(f"{tensor_rows.what}: {why}")
    value = value_of(values, tensor_rows)
    plan = plan_of(value, tensor_rows.what, partial=partial)
    if not assembler.has_payload(plan, value.positions):
        ranks = zip(value.present, value.positions, strict=False)
        lacking = [rank for rank, position in ranks if assembler.tensor(position) is None]
        raise LookupFailedError(
            f"{tensor_rows.what}: rank {listed(lacking)} has no values; a rule with keep=tensor keeps values"
        )
    if len(value.present) > 1 and dict(plan.note).get("batch") == NO_ROOT_INPUT:
        _logger.warning(
            "%s: %s; %s", tensor_rows.what, _GUESSED, "--layout, or rank=, says otherwise", extra={"word": "note"}
        )
    dtype = assembler.dtype(plan, value.positions)
    item_bytes(dtype)
    try:
        return assembler.array(plan, value.positions), dtype, plan.global_shape
    except RunError as error:
        raise type(error)(f"{tensor_rows.what}: {error}") from error


def value_of(values: GlobalValues, tensor_rows: TensorRows) -> GlobalValue:
    """Return the value that some ranks' rows hold. Raise LookupFailedError if they hold several values."""
    chosen = values.values_of(tensor_rows.positions, tensor_rows.related, is_micro_batch=tensor_rows.is_micro_batch)
    if len(chosen) > 1:  # between stages, a tensor is named like the model's input or output
        chosen = [value for value in chosen if not value.is_between_stages]
    numbers = [value.stage.number for value in chosen if value.stage is not None]
    if len(chosen) > 1 and len(set(numbers)) == len(chosen):
        raise LookupFailedError(several_stages(tensor_rows.what, numbers))
    if len(chosen) != 1:
        raise LookupFailedError(f"{tensor_rows.what}: {len(chosen)} values of the newest attempt are meant")
    return chosen[0]


def plan_of(value: GlobalValue, what: str, *, partial: bool) -> Plan:
    """Return the plan of a value. Raise LookupFailedError if there is no plan, or if a needed rank is missing."""
    plan = value.plan
    if not isinstance(plan, Plan):
        raise LookupFailedError(
            f"{what} makes no single tensor: {plan.why}; ask for one of rank={listed(value.present)}"
        )
    missing = [rank for rank in value.expected if rank not in value.present]
    if not plan.is_complete:
        raise LookupFailedError(f"{what}: the chunks of rank {listed(missing)} are missing; rank= gives one rank's")
    if missing and not plan.is_replica and not partial:
        raise LookupFailedError(
            f"{what} was recorded on rank {listed(value.present)} alone, not on rank {listed(missing)}; "
            f"partial=True gives what there is, rank= one rank's"
        )
    return plan


_logger = logging.getLogger("recorder")
_COLUMNS = (*DETAILS, "zero_count", "nan_count", "min", "max", "shape", "note")


def histogram_of(
    loaded: LoadedRows | None, metadata: MetadataRows, tensor_rows: TensorRows, partial: bool
) -> Histogram:
    """Return the histogram of the value that a query selects; `partial` allows missing ranks.

    `loaded` holds all rows of the run, or is None if the query selects a single row. LookupFailedError says why there
    is no histogram. CorruptError means that the recorded bytes are not a histogram.
    """
    row = _row_of(loaded, metadata, tensor_rows, partial)
    _check_recorded(row, "histogram", tensor_rows, "a histogram", "it")
    try:
        counts = Histogram.from_bytes(
            row["histogram"], zero_count=row["zero_count"] or 0, nan_count=row["nan_count"] or 0
        )
    except CorruptError as error:
        raise CorruptError(f"{tensor_rows.what}: {error}") from error
    return replace(counts, min=row["min"], max=row["max"])


def units_of(loaded: LoadedRows | None, metadata: MetadataRows, tensor_rows: TensorRows, partial: bool) -> Units:
    """Return the sums over each unit (neuron, channel) of a value. Arguments and errors are `histogram_of`'s."""
    row = _row_of(loaded, metadata, tensor_rows, partial)
    _check_recorded(row, "units", tensor_rows, "sums of its units", "them")
    try:
        return Units.from_bytes(row["units"], parse_shape(row["shape"]))
    except CorruptError as error:
        raise CorruptError(f"{tensor_rows.what}: {error}") from error


def _check_recorded(row: dict[str, Any], column: str, tensor_rows: TensorRows, what: str, them: str) -> None:
    if row[column] is not None:
        return
    note = note_members(row["note"])
    why = note.get(f"no_{column}", note.get("no_statistics"))
    reason = f"it has none ({why})" if why else f"a rule with keep={column} keeps {them}"
    raise LookupFailedError(f"{tensor_rows.what} was recorded without {what}; {reason}")


def _row_of(
    loaded: LoadedRows | None, metadata: MetadataRows, tensor_rows: TensorRows, partial: bool
) -> dict[str, Any]:
    if loaded is None:
        metadata.load(_COLUMNS)
        first = np.array(tensor_rows.positions[:1])
        return {name: metadata.take(name, first)[0].as_py() for name in _COLUMNS}
    value = value_of(loaded.values, tensor_rows)
    plan_of(value, tensor_rows.what, partial=partial)
    metadata.load(METADATA_COLUMNS)
    columns = GlobalColumns(metadata, loaded.assembler, [value]).by_name()
    return {name: columns[name][0] for name in _COLUMNS}


_MAX_LISTED = 64
_MAX_CELLS = 16
_MAX_MESHES = 4
_MAX_CHARACTERS = 100
_GUESSED = "that the batch is dim 0 is a guess, for no call of this tensor has the root's input beside it"
_SOURCES = {
    "dtensor": "rows name their positions (DTensor, or the framework's marks)",
    "marked": "replicas, by the framework's process groups",
    "fsdp": "rows name their positions (FSDP, ZeRO), or replicas that FSDP keeps",
    "ddp": "replicas that DDP keeps",
    "single": "one rank has it",
    "inferred": "from equal values and from shapes",
    "override": "as the layout that was given says",
}


_POSITIONS = {"dtensor": "the placements of DTensors", "marked": "the framework's marks"}
"""For a row's `layout_source`, in words: what states where the row's chunk lies in the tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutChunk:
    """One rank's chunk of a tensor."""

    rank: int
    shape: Ints
    coordinate: Ints | None
    """The chunk's coordinate in its device mesh. None for a plain tensor, whose row names no mesh."""
    mesh: Ints
    """The ranks of the chunk's device mesh, row-major. Empty if the row does not list them."""
    placements: str
    """The placements on the device mesh, such as ``Shard(0) Replicate``. Empty for a plain tensor."""
    offsets: Ints | None
    """The index of the chunk's first element in the global tensor. None if the chunk is empty or no box."""
    micro_step: int
    """The index of the micro-batch, in a pipeline."""
    is_copy: bool
    """True if an equal chunk of another rank was used instead of this chunk."""
    reduce_op: str = ""
    """The reduction that joins the partial sums, such as ``sum``. Empty if this chunk is no partial sum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorLayout:
    """Where the chunks of a global tensor lie. Made by `Run.layout`; `print` shows it as text."""

    what: str
    global_shape: Ints | None
    """The shape of the global tensor. None if the chunks form no single tensor."""
    source: str
    """How the layout is known, as in the column `layout_source`. Empty if the chunks form no single tensor."""
    how: str
    """The meaning of `source` as a sentence."""
    why: str
    """Why the chunks form no single tensor. Empty if they do."""
    kind: str
    """The kind of finding, such as ``per_rank``, that a merge reports if chunks form no single tensor; else empty."""
    scale: str | None
    mesh_shape: Ints | None
    pieces: tuple[LayoutChunk, ...]
    """The ranks' chunks, named ``pieces`` as in the output of `show --where --json`."""
    missing: Ints

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"

    def _lines(self) -> list[str]:
        if self.global_shape is None:
            lines = [f"{self.what}: no single tensor", f"  {self.why}"]
        else:
            lines = [f"{self.what}: {_sizes(self.global_shape)}", f"  {self.source}: {self.how}"]
        if summed := [chunk.rank for chunk in self.pieces if chunk.reduce_op and not chunk.is_copy]:
            ops = " ".join(dict.fromkeys(chunk.reduce_op for chunk in self.pieces if chunk.reduce_op))
            ranks = listed(tuple(dict.fromkeys(summed)))
            lines.append(f"  reduced by {ops}: the chunks of rank {ranks} are summands, not copies")
        if self.scale:
            lines.append(f"  scaled: {self.scale}")
        if self.missing:
            lines.append(f"  missing: rank {', '.join(map(str, self.missing))}")
        return [*lines, *self._mesh(), *self._cut(), "", *self._table()]

    def _mesh(self) -> list[str]:
        """Draw the ranks of each mesh. The last mesh axis runs across the text, the other axes run down."""
        if not self.mesh_shape or math.prod(self.mesh_shape) > _MAX_LISTED:
            return []
        meshes = dict.fromkeys(chunk.mesh for chunk in self.pieces if chunk.coordinate)
        kinds = {chunk.placements for chunk in self.pieces if chunk.coordinate}
        lines = [
            "",
            f"mesh {_sizes(self.mesh_shape)}" + (f", {kind}" if len(kinds) == 1 and (kind := min(kinds)) else ""),
        ]
        for number, mesh in enumerate(list(meshes)[:_MAX_MESHES]):
            rank_at = {p.coordinate: p.rank for p in self.pieces if p.coordinate and p.mesh == mesh}
            lines += [""] * (number > 0) + _grid(rank_at, self.mesh_shape)
        return lines + (["  ..."] if len(meshes) > _MAX_MESHES else [])

    def _cut(self) -> list[str]:
        """Draw the tensor as a box with the ranks that have each chunk. It must be cut along one or two dims."""
        if self.global_shape is None or any(chunk.offsets is None for chunk in self.pieces):
            return []
        starts = [sorted({(chunk.offsets or ())[d] for chunk in self.pieces}) for d in range(len(self.global_shape))]
        cut = [dim for dim, some in enumerate(starts) if len(some) > 1]
        if not cut or len(cut) > 2 or max(len(starts[dim]) for dim in cut) > _MAX_CELLS:
            return []
        down, across = (cut[0], cut[1]) if len(cut) == 2 else (None, cut[0])
        rows = starts[down] if down is not None else [0]
        held: dict[tuple[int, int], list[LayoutChunk]] = {}
        for chunk in self.pieces:
            if chunk.offsets is not None and all(chunk.shape):
                held.setdefault((0 if down is None else chunk.offsets[down], chunk.offsets[across]), []).append(chunk)
        cells = [[_together(held.get((row, column), [])) for column in starts[across]] for row in rows]
        width = max(len(cell) for line in cells for cell in line)
        if len(starts[across]) * (width + 3) > _MAX_CHARACTERS:
            return []
        edge = "  +" + "+".join("-" * (width + 2) for _ in starts[across]) + "+"
        dims = f"dim {across}" if down is None else f"dim {down} down, dim {across} across"
        summed = ", + between summands" if any("+" in cell for line in cells for cell in line) else ""
        lines = ["", f"cut along {dims}; in each piece the ranks that have it{summed}", edge]
        for line in cells:
            lines += ["  |" + "|".join(f" {cell.center(width)} " for cell in line) + "|", edge]
        return lines

    def _table(self) -> list[str]:
        shown = self.pieces[:_MAX_LISTED]
        columns = [["rank", *(str(chunk.rank) for chunk in shown)]]
        if any(chunk.micro_step for chunk in self.pieces):
            columns.append(["micro-batch", *(str(chunk.micro_step) for chunk in shown)])
        columns.append(["mesh", *("-" if chunk.coordinate is None else _sizes(chunk.coordinate) for chunk in shown)])
        if len({chunk.placements for chunk in self.pieces}) > 1:
            columns.append(["placement", *(chunk.placements or "-" for chunk in shown)])
        columns.append(["offsets", *("-" if chunk.offsets is None else _sizes(chunk.offsets) for chunk in shown)])
        columns.append(["shape", *(_sizes(chunk.shape) for chunk in shown)])
        summands = (f"summand ({chunk.reduce_op})" if chunk.reduce_op else "" for chunk in shown)
        columns.append(["", *("copy" if chunk.is_copy else text for chunk, text in zip(shown, summands, strict=True))])
        widths = [max(map(len, column)) for column in columns]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in zip(*columns, strict=True)]
        more = len(self.pieces) - _MAX_LISTED
        return lines + ([f"and {more} more"] if more > 0 else [])


def _together(chunks: Sequence[LayoutChunk]) -> str:
    """Describe the ranks of one region of the tensor: copies as ``0,2``, partial sums as ``0+1``."""
    summands = [str(chunk.rank) for chunk in chunks if chunk.reduce_op and not chunk.is_copy]
    return "+".join(summands) or ",".join(str(chunk.rank) for chunk in chunks)


def _grid(rank_at: Mapping[Ints, int], shape: Ints) -> list[str]:
    width = max(len(str(rank)) for rank in rank_at.values())
    lines = []
    for lead in itertools.product(*map(range, shape[:-1])):
        row = [rank_at.get((*lead, column)) for column in range(shape[-1])]
        lines.append("  " + " ".join("." * width if rank is None else str(rank).rjust(width) for rank in row))
    return lines


def explain(values: GlobalValues, tensor_rows: TensorRows) -> TensorLayout:
    """Return the layout of the selected tensor. Raise LookupFailedError if the rows hold several values."""
    value = value_of(values, tensor_rows)
    chunks, plan = values.chunks(value), value.plan
    made, refused = (plan, None) if isinstance(plan, Plan) else (None, plan)
    how = _in_words(made) if made else ""
    by = _POSITIONS.get(values.source_of(value), "")
    if by and made and made.source != "dtensor" and any(chunk.placements for chunk in chunks):
        how += f"; within a batch by {by}"
    starts: dict[int, Ints | None] = {}
    copies: set[int] = set()
    ops: dict[int, str] = {i: reduce_op(chunk.placements) for i, chunk in enumerate(chunks)}
    if made is not None:
        starts = {term.chunk: _start(fill.region) for fill in made.fills for term in fill.terms}
        for first, *others in made.copies:
            starts |= {other: starts.get(first) for other in others}
            copies |= set(others)
        for fill in made.fills:
            if len(fill.terms) > 1:
                ops |= {term.chunk: ops[term.chunk] or _op_of(fill, made) for term in fill.terms}
        again = {i for i, op in ops.items() if op and i not in starts}  # the mesh has two copies of the complete sum
        copies |= again
        starts |= {i: _beside(chunks, i, starts) for i in again}
    meshes = [parse_mesh(chunk.mesh) for chunk in chunks]
    shapes = {mesh.shape for mesh in meshes if mesh.shape}
    ranks = {chunk.rank for chunk in chunks}
    return TensorLayout(
        what=tensor_rows.what,
        global_shape=made.global_shape if made else None,
        source=made.source if made else "",
        how=how,
        why=refused.why if refused else "",
        kind=refused.kind if refused else "",
        scale=made.scale if made else None,
        mesh_shape=next(iter(shapes)) if len(shapes) == 1 else None,
        pieces=tuple(
            LayoutChunk(
                rank=chunk.rank,
                shape=chunk.shape,
                coordinate=mesh.coordinate or None,
                mesh=mesh.ranks,
                placements=in_words(chunk.placements),
                offsets=starts.get(i),
                micro_step=chunk.micro_step,
                is_copy=i in copies and chunk.rank not in value.differing,
                reduce_op=ops[i],
            )
            for i, (chunk, mesh) in enumerate(zip(chunks, meshes, strict=True))
        ),
        missing=tuple(rank for rank in value.expected if rank not in ranks),
    )


def _in_words(plan: Plan) -> str:
    if plan.source != "assumed":
        return _SOURCES.get(plan.source, "")
    if plan.dim is not None:
        told = dict(plan.note).get("batch")
        return "the batches of data-parallel ranks end to end" + (f"; {_GUESSED}" if told == NO_ROOT_INPUT else "")
    return "replicas, of which no wrapper was seen" if plan.copies else "a mean or a sum over the ranks"


def _beside(chunks: Sequence[RankChunk], number: int, starts: Mapping[int, Ints | None]) -> Ints | None:
    """Return the offsets of the partial sum that this chunk repeats: only coordinates on replicated axes differ."""
    own = [coordinate_of(chunk.placements, chunk.mesh) for chunk in chunks]
    return next((starts[i] for i in starts if own[i] == own[number]), None)


def _op_of(fill: Fill, plan: Plan) -> str:
    """Return the reduction of chunks whose rows do not name one."""
    is_mean = plan.op == "sum" and {term.factor for term in fill.terms} == {1 / len(fill.terms)}
    return "avg" if is_mean and plan.scale in (None, "assumed_mean") else plan.op


def _start(region: Region) -> Ints | None:
    return (0,) * len(region.local_shape) if not region.boxes and region.run is None else region.start


def _sizes(numbers: Ints) -> str:
    return "[" + ", ".join(map(str, numbers)) + "]"
