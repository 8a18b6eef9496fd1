"""Plans that make a global tensor of chunks, and the planning of chunks whose rows name their position.

Such rows have chunks of DTensors and slices of FSDP1. No chunk is trusted alone: its placements, mesh and offsets are
compared with those of the other chunks, and with DTensor's rules.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from .regions import (
    Ints,
    Region,
    box_region,
    flat_index,
    flat_region,
    overlap,
    ranges_region,
    run_in_local,
    shard,
    strided_shard,
)

REDUCE_OPS = ("sum", "avg", "max", "min", "product")
_MAX_SPLIT_FACTOR = 1 << 12
"""The largest product of a row's split factors. A strided shard has a box for each combination of cuts."""
_MAX_RANKS = 1 << 14
_MAX_TEXT = 1 << 18


class Mesh(NamedTuple):
    """The device mesh of a row's placements, as seen from the row's rank."""

    shape: Ints
    coordinate: Ints
    """The position of the row's rank in the mesh."""
    ranks: Ints
    """All ranks of the mesh, row-major. Empty if the row does not list them."""


def plan_by_placements(chunks: Sequence[RankChunk]) -> Plan | NoPlan:
    """Plan a tensor whose rows name the region of each chunk, as those of DTensor and FSDP1 do."""
    if (problem := _contradiction(chunks)) is not None:
        return problem
    global_shape = chunks[0].global_shape
    assert global_shape is not None
    regions: dict[tuple[Any, ...], list[int]] = {}
    region_by_chunk: list[Region] = []
    for i, chunk in enumerate(chunks):
        region = _region_of(chunk)
        if isinstance(region, str):
            return _inconsistent(f"rank {chunk.rank}: {region}")
        region_by_chunk.append(region)
        regions.setdefault((region.run, region.boxes), []).append(i)
    kinds = [str(placement.get("kind")) for placement in parse_placements(chunks[0].placements)]
    if unknown := [kind for kind in kinds if kind not in _KINDS]:
        return NoPlan("per_rank", f"placement {unknown[0]} cannot be assembled")
    coordinates = [mesh_of(chunk).coordinate for chunk in chunks]
    fills, copies, op = [], [], "sum"
    for same in regions.values():
        region = region_by_chunk[same[0]]
        summands, replicas, op_or_problem = _by_axis(same, kinds, coordinates, chunks)
        if isinstance(op_or_problem, NoPlan):
            return op_or_problem
        op = op_or_problem or op
        if len(replicas) > 1 and region.numel:
            copies.append(replicas)
        if region.numel:
            factor = 1 / len(summands) if op == "avg" else 1.0
            is_local = chunks[same[0]].offsets is None and region.run is None
            terms = tuple(Term(i, factor) for i in summands)
            fills.append(Fill(region, terms, region.start if is_local else None))
    try:
        clash = overlap([fill.region for fill in fills], global_shape)
    except OverflowError as error:
        return NoPlan("per_rank", str(error))
    if clash is not None:
        i, j = (fills[k].terms[0].chunk for k in clash)
        return _inconsistent(f"the chunks of ranks {chunks[i].rank} and {chunks[j].rank} overlap: {_positions(chunks)}")
    num_ranks = math.prod(mesh_of(chunks[0]).shape)
    covered = sum(fill.region.numel for fill in fills)
    is_partial_sum_whole = "Partial" not in kinds or len(chunks) >= num_ranks
    is_complete = covered == math.prod(global_shape) and is_partial_sum_whole
    if not is_complete and len(chunks) >= num_ranks:
        return _inconsistent(f"no rank holds {math.prod(global_shape) - covered} elements: {_positions(chunks)}")
    source = "fsdp" if "FlatShard" in kinds else "dtensor"
    op = "sum" if op == "avg" else op
    return Plan(global_shape, tuple(fills), source, op=op, copies=tuple(copies), is_complete=is_complete)


def _inconsistent(why: str) -> NoPlan:
    return NoPlan("inconsistent", why)


_KINDS = ("Shard", "StridedShard", "Replicate", "Partial", "FlatShard")


def _by_axis(
    same: list[int], kinds: list[str], coordinates: list[Ints], chunks: Sequence[RankChunk]
) -> tuple[list[int], Ints, str | NoPlan | None]:
    """Split the chunks of one region into summands and replicas. Also return the reduction, or a problem as text."""
    op = reduce_op(chunks[0].placements)
    if op and op not in REDUCE_OPS:
        return [], (), NoPlan("per_rank", f"Partial({op}) cannot be reduced")
    by_sharding: dict[Ints, int] = {}
    for i in same:
        sharded = tuple(
            c for c, kind in zip(coordinates[i], kinds, strict=True) if kind not in ("Replicate", "Partial")
        )
        by_sharding.setdefault(sharded, i)
    if len(by_sharding) > 1 and _region_of(chunks[same[0]]).numel:  # type: ignore[union-attr]
        clash = [chunks[i].rank for i in by_sharding.values()]
        why = f"ranks {clash[0]} and {clash[1]} say they hold the same elements: {_positions(chunks)}"
        return [], (), _inconsistent(why)
    if not op:
        return same[:1], tuple(same), None
    replicated = [tuple(c for c, k in zip(coordinates[i], kinds, strict=True) if k == "Replicate") for i in same]
    first = min(replicated)
    return [i for i, at in zip(same, replicated, strict=True) if at == first], (), op


def _region_of(chunk: RankChunk) -> Region | str:
    """Return the region of the global tensor that a chunk covers. If the row is wrong, return the error."""
    assert chunk.global_shape is not None
    placements = parse_placements(chunk.placements)
    flat = [placement for placement in placements if placement.get("kind") == "FlatShard"]
    if flat:
        is_cut = any(placement.get("kind") in ("Shard", "StridedShard") for placement in placements)
        box = _derived(chunk, placements) if is_cut or chunk.offsets is not None else None
        if isinstance(box, str):
            return box
        start, total = flat[0].get("offset"), math.prod(chunk.global_shape if box is None else box.local_shape)
        if type(start) is not int or len(chunk.shape) != 1 or not 0 <= start <= start + chunk.shape[0] <= total:
            return f"its slice of {list(chunk.shape)} elements at {start} lies outside a tensor of {total}"
        if box is None and chunk.offsets is None and not is_cut:
            return flat_region(start, chunk.shape[0])
        if box is None or (box.numel and box.start != chunk.offsets):
            return f"offsets {list(chunk.offsets or ())} are not what its placements and mesh make"
        return run_in_local(box, start, chunk.shape[0])
    if len(chunk.global_shape) != len(chunk.shape):
        return f"its shape {list(chunk.shape)} has not the dims of the global {list(chunk.global_shape)}"
    derived = _derived(chunk, placements)
    if isinstance(derived, str):
        return derived
    if chunk.offsets is None:
        if derived is None:
            return "its offsets are missing"
        if derived.local_shape != chunk.shape:
            return f"its shape is {list(chunk.shape)}, its placements make it {list(derived.local_shape)}"
        return derived
    offsets = chunk.offsets
    if len(offsets) != len(chunk.shape) or any(
        o < 0 or o + n > g for o, n, g in zip(offsets, chunk.shape, chunk.global_shape, strict=True) if n
    ):
        return f"offsets {list(offsets)} with shape {list(chunk.shape)} lie outside {list(chunk.global_shape)}"
    region = box_region(offsets, chunk.shape)
    if derived is not None and derived.boxes != region.boxes:
        return f"offsets {list(offsets)} with shape {list(chunk.shape)} are not what its placements and mesh make"
    return region


def _derived(chunk: RankChunk, placements: tuple[dict[str, Any], ...]) -> Region | str | None:
    """Return the region that follows from placements and mesh. Return None if these are incomplete, a text if wrong."""
    mesh_shape, coordinate, _ = mesh_of(chunk)
    if not placements or len(mesh_shape) != len(placements) or len(coordinate) != len(placements):
        return None
    assert chunk.global_shape is not None
    ranges = [[(0, size)] if size else [] for size in chunk.global_shape]
    num_strides = 1
    for placement, num_chunks, index in zip(placements, mesh_shape, coordinate, strict=True):
        kind, dim = placement.get("kind"), placement.get("dim")
        if kind not in ("Shard", "StridedShard"):
            continue
        if type(dim) is not int or not 0 <= dim < len(ranges) or not 0 <= index < num_chunks:
            return f"placement {placement} at {index} of {num_chunks} does not fit {list(chunk.global_shape)}"
        factor = placement.get("split_factor")
        if kind == "Shard":
            ranges[dim] = shard(ranges[dim], num_chunks, index)
        elif type(factor) is int and 0 < factor * num_strides <= _MAX_SPLIT_FACTOR:
            num_strides *= factor
            ranges[dim] = strided_shard(ranges[dim], num_chunks, index, factor)
        else:
            return f"placement {placement} has no split_factor of at most {_MAX_SPLIT_FACTOR}"
    return ranges_region(ranges)


def _contradiction(chunks: Sequence[RankChunk]) -> NoPlan | None:
    for field, fault in (("global_shape", "global shapes differ"), ("dtype", "dtypes differ")):
        if len({getattr(chunk, field) for chunk in chunks}) > 1:
            return _inconsistent(f"{fault}: {named(chunks, field)}")
    meshes = {mesh_of(chunk).shape for chunk in chunks}
    if len(meshes) > 1:
        shown = values_of_ranks(chunks, lambda chunk: list(mesh_of(chunk).shape))
        return _inconsistent(f"ranks disagree on the mesh: {shown}")
    kinds = {str([(p.get("kind"), p.get("dim")) for p in parse_placements(chunk.placements)]) for chunk in chunks}
    if len(kinds) > 1:
        shown = values_of_ranks(chunks, lambda chunk: in_words(chunk.placements))
        return _inconsistent(f"ranks disagree on the placements: {shown}")
    mesh_shape, coordinate, _ = mesh_of(chunks[0])
    if len(coordinate) != len(parse_placements(chunks[0].placements)) or len(mesh_shape) != len(coordinate):
        return _inconsistent(f"rank {chunks[0].rank}: its mesh and its placements have different numbers of axes")
    taken: dict[Ints, int] = {}
    for chunk in chunks:
        other = taken.setdefault(mesh_of(chunk).coordinate, chunk.rank)
        if other != chunk.rank:
            at = list(mesh_of(chunk).coordinate)
            return _inconsistent(f"ranks {other} and {chunk.rank} both say they are at {at} of the mesh")
    return next((problem for chunk in chunks if (problem := _coordinate_problem(chunk)) is not None), None)


def _coordinate_problem(chunk: RankChunk) -> NoPlan | None:
    shape, coordinate, ranks = mesh_of(chunk)
    if len(coordinate) != len(shape):
        return _inconsistent(f"rank {chunk.rank} says it is at {list(coordinate)} of a mesh of {list(shape)}")
    if not ranks:
        return None
    shown = list(ranks[:MAX_NAMED])
    if len(ranks) != math.prod(shape) or len(set(ranks)) < len(ranks):
        return _inconsistent(f"rank {chunk.rank}: its mesh of {list(shape)} has ranks {shown}")
    at = flat_index(coordinate, shape)
    if not 0 <= at < len(ranks) or ranks[at] != chunk.rank:
        return _inconsistent(f"rank {chunk.rank} says it is at {list(coordinate)} of a mesh of ranks {shown}")
    return None


def _positions(chunks: Sequence[RankChunk]) -> str:
    shown = []
    for chunk in chunks[:MAX_NAMED]:
        flat = [p.get("offset") for p in parse_placements(chunk.placements) if p.get("kind") == "FlatShard"]
        at = flat[0] if flat else chunk.offsets and list(chunk.offsets)
        shown.append(f"rank {chunk.rank} {list(chunk.shape)} at {at}")
    return ", ".join(shown)


@lru_cache(maxsize=4096)
def parse_placements(text: str | None) -> tuple[dict[str, Any], ...]:
    """Parse the column `placements`. Return an empty tuple if the text is no list of objects."""
    parsed = _json(text)
    return tuple(item for item in parsed if isinstance(item, dict)) if isinstance(parsed, list) else ()


def kinds_of(text: str | None) -> tuple[str, ...]:
    """Return the kind of placement on each axis of the mesh, such as ``Shard``. Empty for a plain tensor."""
    return tuple(str(placement.get("kind")) for placement in parse_placements(text))


def reduce_op(text: str | None) -> str:
    """Return the reduction of the column's ``Partial`` placement, such as ``sum``. Empty without a ``Partial``."""
    return next((str(p.get("reduce_op", "sum")) for p in parse_placements(text) if p.get("kind") == "Partial"), "")


def in_words(text: str | None) -> str:
    """Return the column `placements` for people, such as ``Shard(0) Partial(sum)``. Empty for a plain tensor."""
    words = []
    for placement in parse_placements(text):
        kind = str(placement.get("kind"))
        argument = next((placement[key] for key in ("dim", "reduce_op", "offset") if key in placement), None)
        words.append(kind if argument is None else f"{kind}({argument})")
    return " ".join(words)


def mesh_of(chunk: RankChunk) -> Mesh:
    """Return the mesh that a chunk's row names."""
    return parse_mesh(chunk.mesh)


@lru_cache(maxsize=4096)
def parse_mesh(text: str | None) -> Mesh:
    """Parse the column `mesh`. A member that is no list of integers becomes empty."""
    parsed = _json(text)
    members = parsed if isinstance(parsed, dict) else {}
    shape, coordinate = (_ints(members.get(name), 64) for name in ("shape", "coordinate"))
    ranks = members.get("ranks")
    return Mesh(shape, coordinate, _regular(ranks, shape) if isinstance(ranks, dict) else _ints(ranks, _MAX_RANKS))


def coordinate_of(placements: str | None, mesh: str | None) -> Ints | None:
    """Return a rank's coordinate on the mesh axes that do not replicate. None if it is unknown."""
    kinds, coordinate = kinds_of(placements), parse_mesh(mesh).coordinate
    if not coordinate or len(kinds) != len(coordinate):
        return None
    return tuple(at for at, kind in zip(coordinate, kinds, strict=True) if kind != "Replicate")


def _regular(members: dict[str, Any], shape: Ints) -> Ints:
    first, strides = _ints([members.get("first")], 1), _ints(members.get("strides"), 64)
    if not first or len(strides) != len(shape) or not 0 < math.prod(shape) <= _MAX_RANKS:
        return ()
    coordinates = itertools.product(*(range(size) for size in shape))
    return tuple(first[0] + sum(i * n for i, n in zip(coordinate, strides, strict=True)) for coordinate in coordinates)


def _ints(value: Any, max_items: int) -> Ints:
    is_list = isinstance(value, list) and len(value) <= max_items
    return tuple(value) if is_list and all(type(v) is int and 0 <= v < 1 << 48 for v in value) else ()


def _json(text: str | None) -> Any:
    if text is None or len(text) > _MAX_TEXT:
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


RANK_BOUND = {
    "no_group": "it is marked as cut, but its group is not known (tp_group on the module, or --layout)",
    "no_layout": "it is a chunk of a tensor in which its position is not known",
    "inner_of": "it is a part of a composite tensor, which means nothing without the rank's other parts",
}
"""The keys in a row's `note` that forbid joining its chunk with those of other ranks, each with the reason."""
TURNED = "turned"
"""The key in the `note` of a row that no rule asked for: one rank wrote it when its value turned non-finite."""
OF_ONE_RANK = "of_one_rank"
"""The key in the `note` of a row that only one rank has, because the optimizer distributes parameters over ranks."""
MAX_NAMED = 8
"""The most ranks that a message names."""


class RankChunk(NamedTuple):
    """One rank's chunk of a tensor, as the rank's row describes it. `placements` and `mesh` are JSON texts."""

    rank: int
    dtype: str
    shape: Ints
    global_shape: Ints | None = None
    offsets: Ints | None = None
    placements: str | None = None
    mesh: str | None = None
    rank_bound: str | None = None
    """The key in the row's `note` that is `TURNED`, `OF_ONE_RANK` or in `RANK_BOUND`; else None."""
    micro_step: int = 0


class Term(NamedTuple):
    """A chunk, by its index, and the factor by which its values are multiplied."""

    chunk: int
    factor: float = 1.0


class Fill(NamedTuple):
    """A region of the global tensor, filled by a weighted sum of chunks. A single chunk with factor 1 is copied."""

    region: Region
    terms: tuple[Term, ...]
    moved: Ints | None = None
    """The distance of the region from the position for which the chunk's fingerprint was computed. None if it is 0."""

    @property
    def is_copy(self) -> bool:
        return len(self.terms) == 1 and self.terms[0].factor == 1.0


class Plan(NamedTuple):
    """How chunks make one global tensor."""

    global_shape: Ints
    fills: tuple[Fill, ...]
    source: str
    op: str = "sum"
    copies: tuple[Ints, ...] = ()
    """Groups of chunks, by index, that must have equal values. The first chunk of each group is part of a fill."""
    scale: str | None = None
    dtype: str | None = None
    """The dtype of the global tensor. None if it is the dtype of the chunks."""
    is_complete: bool = True
    """False if some elements of the tensor are not filled, because chunks are missing."""
    dim: int | None = None
    """The dim along which the ranks' batches are joined end to end; else None."""
    note: tuple[tuple[str, Any], ...] = ()
    """More keys and values for the `note` of the global tensor's row."""

    across: Plan | None = None
    """If several ranks have the same part of the batch: the plan that joins the tensors of such groups. Else None."""
    needs_all: bool = False
    """True if a missing rank might change the result, even though the present chunks cover all elements."""

    @property
    def is_replica(self) -> bool:
        """Whether the present chunks make the complete tensor, so that missing chunks can only be copies."""
        is_whole = self.is_complete and self.dim is None and not self.needs_all
        return is_whole and all(fill.is_copy for fill in self.fills)

    def times(self, factor: float) -> Plan:
        """Return the plan of the tensor times a factor."""
        scaled = [[term._replace(factor=term.factor * factor) for term in fill.terms] for fill in self.fills]
        fills = (fill._replace(terms=tuple(terms)) for fill, terms in zip(self.fills, scaled, strict=True))
        return self._replace(fills=tuple(fills))


class NoPlan(NamedTuple):
    """The reason why chunks make no global tensor. Each chunk then stays a value of its rank."""

    kind: str
    """``per_rank``: no rule applies. ``inconsistent``: the chunks contradict each other. ``layout_changes``: the chunks
    are copies at other steps, but differ at this step."""
    why: str


def named(chunks: Sequence[RankChunk], field: str) -> str:
    """Return, as text for messages, the value of a field of each chunk, with its rank."""
    return values_of_ranks(chunks, lambda chunk: list(v) if isinstance(v := getattr(chunk, field), tuple) else v)


def values_of_ranks(chunks: Sequence[RankChunk], value_of: Callable[[RankChunk], object]) -> str:
    """Return, as text for messages, the value of each rank. Of many ranks, the first rank with each value is named."""
    values = [str(value_of(chunk)) for chunk in chunks]
    firsts = set({value: i for i, value in reversed([*enumerate(values)])}.values())
    shown = sorted([*sorted(firsts), *(i for i in range(len(chunks)) if i not in firsts)][:MAX_NAMED])
    return ", ".join(f"rank {chunks[i].rank} {values[i]}" for i in shown)
