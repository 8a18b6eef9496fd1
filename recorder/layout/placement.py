"""Owns the pieces that say where they belong: DTensor's shards and FSDP1's slices, by placements, mesh and offsets.

Must never trust one of them: what they say is checked against the others, and against what DTensor's rules make of it.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from .plans import MAX_NAMED, Apart, Part, Piece, Plan, Term, named, told
from .regions import (
    Ints,
    Region,
    box_region,
    flat_index,
    flat_region,
    overlap,
    ranges_region,
    run_in_box,
    shard,
    strided_shard,
)

REDUCE_OPS = ("sum", "avg", "max", "min", "product")
_MAX_SPLIT_FACTOR = 1 << 12
"""Product of all split factors of a row: a strided shard has a box for each, and so has every combination of dims."""
_MAX_RANKS = 1 << 14
_MAX_TEXT = 1 << 18


class Mesh(NamedTuple):
    """The ranks that placements are over, as a row says."""

    shape: Ints
    coordinate: Ints
    """Of the row's rank."""
    ranks: Ints
    """All of them, row-major; none where the row does not say."""


def place(pieces: Sequence[Piece], num_expected: int) -> Plan | Apart:
    """By the place that each row names: DTensor's or FSDP1's."""
    if (problem := _contradiction(pieces)) is not None:
        return problem
    global_shape = pieces[0].global_shape
    assert global_shape is not None
    regions: dict[tuple[Any, ...], list[int]] = {}
    found: list[Region] = []
    for i, piece in enumerate(pieces):
        region = _region_of(piece)
        if isinstance(region, str):
            return Apart("inconsistent", f"rank {piece.rank}: {region}")
        found.append(region)
        regions.setdefault((region.run, region.boxes), []).append(i)
    kinds = [str(placement.get("kind")) for placement in _placements(pieces[0])]
    if unknown := [kind for kind in kinds if kind not in _KINDS]:
        return Apart("per_rank", f"placement {unknown[0]} cannot be assembled")
    coordinates = [mesh_of(piece).coordinate for piece in pieces]
    parts, copies, op = [], [], "sum"
    for same in regions.values():
        region = found[same[0]]
        summands, replicas, op_or_problem = _by_axis(same, kinds, coordinates, pieces)
        if isinstance(op_or_problem, Apart):
            return op_or_problem
        op = op_or_problem or op
        if len(replicas) > 1 and region.numel:
            copies.append(replicas)
        if region.numel:
            factor = 1 / len(summands) if op == "avg" else 1.0
            is_local = pieces[same[0]].offsets is None and region.run is None
            terms = tuple(Term(i, factor) for i in summands)
            parts.append(Part(region, terms, region.start if is_local else None))
    try:
        clash = overlap([part.region for part in parts], global_shape)
    except OverflowError as error:
        return Apart("per_rank", str(error))
    if clash is not None:
        i, j = (parts[k].terms[0].piece for k in clash)
        return Apart(
            "inconsistent", f"the pieces of ranks {pieces[i].rank} and {pieces[j].rank} overlap: {_places(pieces)}"
        )
    num_places = math.prod(mesh_of(pieces[0]).shape)
    covered = sum(part.region.numel for part in parts)
    is_partial_sum_whole = "Partial" not in kinds or len(pieces) >= num_places
    is_complete = covered == math.prod(global_shape) and is_partial_sum_whole
    if not is_complete and len(pieces) >= num_places:
        return Apart("inconsistent", f"no rank holds {math.prod(global_shape) - covered} elements: {_places(pieces)}")
    source = "fsdp" if "FlatShard" in kinds else "dtensor"
    op = "sum" if op == "avg" else op
    return Plan(global_shape, tuple(parts), source, op=op, copies=tuple(copies), is_complete=is_complete)


_KINDS = ("Shard", "StridedShard", "Replicate", "Partial", "FlatShard")


def _by_axis(
    same: list[int], kinds: list[str], coordinates: list[Ints], pieces: Sequence[Piece]
) -> tuple[list[int], Ints, str | Apart | None]:
    """Of the pieces of one region: those to be reduced, those that are replicas, and how to reduce."""
    op = reduce_op(pieces[0].placements)
    if op and op not in REDUCE_OPS:
        return [], (), Apart("per_rank", f"Partial({op}) cannot be reduced")
    by_sharding: dict[Ints, int] = {}
    for i in same:
        sharded = tuple(
            c for c, kind in zip(coordinates[i], kinds, strict=True) if kind not in ("Replicate", "Partial")
        )
        by_sharding.setdefault(sharded, i)
    if len(by_sharding) > 1 and _region_of(pieces[same[0]]).numel:  # type: ignore[union-attr]
        clash = [pieces[i].rank for i in by_sharding.values()]
        why = f"ranks {clash[0]} and {clash[1]} say they hold the same elements: {_places(pieces)}"
        return [], (), Apart("inconsistent", why)
    if not op:
        return same[:1], tuple(same), None
    replicated = [tuple(c for c, k in zip(coordinates[i], kinds, strict=True) if k == "Replicate") for i in same]
    first = min(replicated)
    return [i for i, at in zip(same, replicated, strict=True) if at == first], (), op


def _region_of(piece: Piece) -> Region | str:
    """What a piece holds of the global tensor, or what is wrong with what its row says."""
    assert piece.global_shape is not None
    placements = _placements(piece)
    flat = [placement for placement in placements if placement.get("kind") == "FlatShard"]
    if flat:
        box = _derived(piece, placements) if piece.offsets is not None else None
        if isinstance(box, str):
            return box
        start, total = flat[0].get("offset"), math.prod(piece.global_shape if box is None else box.local_shape)
        if type(start) is not int or len(piece.shape) != 1 or not 0 <= start <= start + piece.shape[0] <= total:
            return f"its slice of {list(piece.shape)} elements at {start} lies outside a tensor of {total}"
        if piece.offsets is None:
            return flat_region(start, piece.shape[0])
        if box is None or (box.numel and box.start != piece.offsets):
            return f"offsets {list(piece.offsets)} are not what its placements and mesh make"
        return run_in_box(box, start, piece.shape[0])
    if len(piece.global_shape) != len(piece.shape):
        return f"its shape {list(piece.shape)} has not the dims of the global {list(piece.global_shape)}"
    derived = _derived(piece, placements)
    if isinstance(derived, str):
        return derived
    if piece.offsets is None:
        if derived is None:
            return "its offsets are missing"
        if derived.local_shape != piece.shape:
            return f"its shape is {list(piece.shape)}, its placements make it {list(derived.local_shape)}"
        return derived
    offsets = piece.offsets
    if len(offsets) != len(piece.shape) or any(
        o < 0 or o + n > g for o, n, g in zip(offsets, piece.shape, piece.global_shape, strict=True) if n
    ):
        return f"offsets {list(offsets)} with shape {list(piece.shape)} lie outside {list(piece.global_shape)}"
    region = box_region(offsets, piece.shape)
    if derived is not None and derived.boxes != region.boxes:
        return f"offsets {list(offsets)} with shape {list(piece.shape)} are not what its placements and mesh make"
    return region


def _derived(piece: Piece, placements: tuple[dict[str, Any], ...]) -> Region | str | None:
    """What DTensor's rules make of placements and mesh; None where these do not say."""
    mesh_shape, coordinate, _ = mesh_of(piece)
    if not placements or len(mesh_shape) != len(placements) or len(coordinate) != len(placements):
        return None
    assert piece.global_shape is not None
    ranges = [[(0, size)] if size else [] for size in piece.global_shape]
    num_strides = 1
    for placement, num_pieces, index in zip(placements, mesh_shape, coordinate, strict=True):
        kind, dim = placement.get("kind"), placement.get("dim")
        if kind not in ("Shard", "StridedShard"):
            continue
        if type(dim) is not int or not 0 <= dim < len(ranges) or not 0 <= index < num_pieces:
            return f"placement {placement} at {index} of {num_pieces} does not fit {list(piece.global_shape)}"
        factor = placement.get("split_factor")
        if kind == "Shard":
            ranges[dim] = shard(ranges[dim], num_pieces, index)
        elif type(factor) is int and 0 < factor * num_strides <= _MAX_SPLIT_FACTOR:
            num_strides *= factor
            ranges[dim] = strided_shard(ranges[dim], num_pieces, index, factor)
        else:
            return f"placement {placement} has no split_factor of at most {_MAX_SPLIT_FACTOR}"
    return ranges_region(ranges)


def _contradiction(pieces: Sequence[Piece]) -> Apart | None:
    """What ranks may not disagree on."""
    for field, what in (("global_shape", "global shapes differ"), ("dtype", "dtypes differ")):
        if len({getattr(piece, field) for piece in pieces}) > 1:
            return Apart("inconsistent", f"{what}: {named(pieces, field)}")
    meshes = {mesh_of(piece).shape for piece in pieces}
    if len(meshes) > 1:
        found = told(pieces, lambda piece: list(mesh_of(piece).shape))
        return Apart("inconsistent", f"ranks disagree on the mesh: {found}")
    kinds = {str([(p.get("kind"), p.get("dim")) for p in _placements(piece)]) for piece in pieces}
    if len(kinds) > 1:
        found = told(pieces, lambda piece: in_words(piece.placements))
        return Apart("inconsistent", f"ranks disagree on the placements: {found}")
    mesh_shape, coordinate, _ = mesh_of(pieces[0])
    if len(coordinate) != len(_placements(pieces[0])) or len(mesh_shape) != len(coordinate):
        return Apart(
            "inconsistent", f"rank {pieces[0].rank}: its mesh and its placements have different numbers of axes"
        )
    taken: dict[Ints, int] = {}
    for piece in pieces:
        other = taken.setdefault(mesh_of(piece).coordinate, piece.rank)
        if other != piece.rank:
            at = list(mesh_of(piece).coordinate)
            return Apart("inconsistent", f"ranks {other} and {piece.rank} both say they are at {at} of the mesh")
    return next((problem for piece in pieces if (problem := _misplaced(piece)) is not None), None)


def _misplaced(piece: Piece) -> Apart | None:
    """A rank that is not where its own mesh has it."""
    mesh = mesh_of(piece)
    if len(mesh.coordinate) != len(mesh.shape):
        why = f"rank {piece.rank} says it is at {list(mesh.coordinate)} of a mesh of {list(mesh.shape)}"
        return Apart("inconsistent", why)
    if not mesh.ranks:
        return None
    if len(mesh.ranks) != math.prod(mesh.shape) or len(set(mesh.ranks)) < len(mesh.ranks):
        return Apart(
            "inconsistent",
            f"rank {piece.rank}: its mesh of {list(mesh.shape)} has ranks {list(mesh.ranks[:MAX_NAMED])}",
        )
    at = flat_index(mesh.coordinate, mesh.shape)
    if not 0 <= at < len(mesh.ranks) or mesh.ranks[at] != piece.rank:
        why = (
            f"rank {piece.rank} says it is at {list(mesh.coordinate)} of a mesh of ranks {list(mesh.ranks[:MAX_NAMED])}"
        )
        return Apart("inconsistent", why)
    return None


def _places(pieces: Sequence[Piece]) -> str:
    shown = []
    for piece in pieces[:MAX_NAMED]:
        flat = [p.get("offset") for p in _placements(piece) if p.get("kind") == "FlatShard"]
        at = flat[0] if flat else piece.offsets and list(piece.offsets)
        shown.append(f"rank {piece.rank} {list(piece.shape)} at {at}")
    return ", ".join(shown)


def _placements(piece: Piece) -> tuple[dict[str, Any], ...]:
    return parse_placements(piece.placements)


@lru_cache(maxsize=4096)
def parse_placements(text: str | None) -> tuple[dict[str, Any], ...]:
    """The column `placements`; nothing of what is no list of objects."""
    found = _json(text)
    return tuple(item for item in found if isinstance(item, dict)) if isinstance(found, list) else ()


def reduce_op(text: str | None) -> str:
    """By what the summands that the column `placements` speaks of are reduced; empty where it is of none."""
    return next((str(p.get("reduce_op", "sum")) for p in parse_placements(text) if p.get("kind") == "Partial"), "")


def in_words(text: str | None) -> str:
    """The column `placements` for people: ``Shard(0) Partial(sum)``; empty for a plain tensor."""
    found = []
    for placement in parse_placements(text):
        kind = str(placement.get("kind"))
        argument = next((placement[key] for key in ("dim", "reduce_op", "offset") if key in placement), None)
        found.append(kind if argument is None else f"{kind}({argument})")
    return " ".join(found)


def mesh_of(piece: Piece) -> Mesh:
    """Where a piece's row says that its rank is."""
    return parse_mesh(piece.mesh)


@lru_cache(maxsize=4096)
def parse_mesh(text: str | None) -> Mesh:
    """The column `mesh`; of what is no list of numbers, nothing."""
    found = _json(text)
    found = found if isinstance(found, dict) else {}
    shape, coordinate = (_ints(found.get(name), 64) for name in ("shape", "coordinate"))
    ranks = found.get("ranks")
    return Mesh(shape, coordinate, _regular(ranks, shape) if isinstance(ranks, dict) else _ints(ranks, _MAX_RANKS))


def _regular(told: dict[str, Any], shape: Ints) -> Ints:
    """The ranks of a mesh in which each axis goes on by a stride."""
    first, strides = _ints([told.get("first")], 1), _ints(told.get("strides"), 64)
    if not first or len(strides) != len(shape) or not 0 < math.prod(shape) <= _MAX_RANKS:
        return ()
    places = itertools.product(*(range(size) for size in shape))
    return tuple(first[0] + sum(i * n for i, n in zip(place, strides, strict=True)) for place in places)


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
