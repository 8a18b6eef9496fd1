"""Owns the decisions: how the local tensors of several ranks are one global tensor, or why they are not.

Decides from shapes, placements and what the run knows of its ranks; never from values beyond whether they are equal.
A plan never covers less than it says: what is missing is in `is_complete`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

from .regions import Ints, Region, box_region, flat_region, overlap, ranges_region, shard, strided_shard, whole

REDUCE_OPS = ("sum", "avg", "max", "min", "product")
LOSSES = ("mean", "sum", "weighted")
_MAX_NAMED = 8
_NO_NUMBERS = ("float4_e2m1fn_x2",)
"""Elements that are pairs: to be copied, never computed with."""
_MAX_SPLIT_FACTOR = 1 << 16


class Piece(NamedTuple):
    """One rank's local tensor, as its row describes it. Texts are the row's JSON."""

    rank: int
    dtype: str
    shape: Ints
    global_shape: Ints | None = None
    offsets: Ints | None = None
    placements: str | None = None
    mesh: str | None = None


class Term(NamedTuple):
    """A summand: the number of a piece, and what its values are multiplied with."""

    piece: int
    factor: float = 1.0


class Part(NamedTuple):
    """A region of the global tensor and the pieces that make it; one with factor 1 is copied."""

    region: Region
    terms: tuple[Term, ...]

    @property
    def is_copy(self) -> bool:
        return len(self.terms) == 1 and self.terms[0].factor == 1.0


class Plan(NamedTuple):
    """How pieces make one tensor."""

    global_shape: Ints
    parts: tuple[Part, ...]
    source: str
    """The row's `layout_source`."""
    op: str = "sum"
    copies: tuple[Ints, ...] = ()
    """Numbers of pieces that must hold the same values; the first of each stands in a part."""
    scale: str | None = None
    """The row's `scale`."""
    dtype: str | None = None
    """Of the result, where it is not that of the pieces."""
    is_complete: bool = True
    """False where pieces are missing that would have covered the rest."""
    dim: int | None = None
    """Along which batches were laid end to end."""
    note: tuple[tuple[str, Any], ...] = ()
    """More members for the row's `note`."""

    needs_all: bool = False
    """Ranks that are missing might have changed it, although one rank's tensor has all its elements."""

    @property
    def is_replica(self) -> bool:
        """Whether one rank's tensor is all of it."""
        is_whole = self.is_complete and self.dim is None and len(self.parts) == 1
        return is_whole and self.parts[0].is_copy and not self.needs_all


class Apart(NamedTuple):
    """The pieces make no single tensor, and stay with their ranks."""

    kind: str
    """``per_rank``: no rule fits. ``inconsistent``: they contradict each other."""
    why: str


class Batch(NamedTuple):
    """What is known of the batch of a step, where activations are concerned."""

    sizes: tuple[int, ...] | None
    """Rows of each piece's rank, or None where the root's input was not recorded."""
    is_shared: bool = False
    """All ranks were given the same values, so that equal values say nothing."""
    factors: tuple[int, ...] = ()
    """How many rows of a tensor a sample may have where the batch is merged with other dims of the root's input."""
    total: int | None = None
    """Rows of all ranks that should have a piece, where that is known."""


class Values(Protocol):
    """What can be asked of the values of some pieces; it may cost the reading of payloads."""

    def are_equal(self) -> bool:
        """Whether all pieces hold the same values."""

    def is_constant(self) -> bool:
        """Whether every element of every piece has one value, which says nothing of the layout."""

    def is_repeated(self, dim: int) -> bool:
        """Whether a piece is one slice repeated along a dim, as `expand` makes them."""


class Unequal:
    """Values of which nothing is known that would make them one."""

    def are_equal(self) -> bool:
        return False

    def is_constant(self) -> bool:
        return False

    def is_repeated(self, dim: int) -> bool:
        return False


def decide_state(pieces: Sequence[Piece], *, source: str, num_expected: int) -> Plan | Apart:
    """Parameters, gradients, buffers, optimizer state: placed by their own rows, else replicas."""
    if (settled := _settled(pieces, num_expected)) is not None:
        return settled
    return _unequal_shapes(pieces) or _replicas(pieces, source)


def decide_activation(pieces: Sequence[Piece], *, batch: Batch, values: Values, num_expected: int) -> Plan | Apart:
    """Inputs, outputs and taps of data-parallel ranks: the batch laid end to end, or the same on all ranks.

    A tensor that is equal on ranks with different batches has nothing of the batch in it, whatever its sizes; unless it
    is constant, or one slice repeated along the batch, as expanded positions and masks are.

    Args:
        pieces: in data-parallel order.
        batch: of their root's call.
        values: asked only where shapes do not decide.
        num_expected: ranks that should have a piece.
    """
    if (settled := _settled(pieces, num_expected)) is not None:
        return settled
    ndims = {len(piece.shape) for piece in pieces}
    if len(ndims) != 1:
        return Apart("per_rank", f"the ranks' tensors have different numbers of dims: {_shapes(pieces)}")
    if ndims == {0}:
        return decide_scalar(pieces, values)._replace(needs_all=True)
    if len(pieces) == 1:
        values = Unequal()  # to nothing: one of several ranks tells nothing of the others
    has_one_shape = _unequal_shapes(pieces) is None
    sizes: tuple[int, ...] | None = batch.sizes
    if sizes is None:
        if has_one_shape and not values.is_constant() and values.are_equal():
            return _replicas(pieces, "inferred")
        if (problem := _unequal_shapes(pieces, but=0)) is None:
            return _concatenated(pieces, 0, (("batch", "unknown: the root's input was not recorded"),))
        return problem
    fits = [
        dim
        for dim in range(len(pieces[0].shape))
        if all(piece.shape[dim] == size for piece, size in zip(pieces, sizes, strict=True))
        and _unequal_shapes(pieces, but=dim) is None
    ]
    may_be_equal = has_one_shape and not batch.is_shared and not values.is_constant()
    if fits:
        is_repeated = max(sizes) > 1 and may_be_equal and values.are_equal() and values.is_repeated(fits[0])
        if may_be_equal and values.are_equal() and not is_repeated:
            return _replicas(pieces, "inferred")
        return _concatenated(pieces, fits[0], (("batch_dims", tuple(fits)),) if len(fits) > 1 else ())
    of_pieces = zip(pieces, sizes, strict=True)  # an empty batch has no rows, whatever the factor
    ratios = {piece.shape[0] / size if size else 0.0 for piece, size in of_pieces if size or piece.shape[0]}
    is_multiple = len(ratios) == 1 and ratios <= {float(factor) for factor in batch.factors}
    if is_multiple and _unequal_shapes(pieces, but=0) is None and not (may_be_equal and values.are_equal()):
        return _concatenated(pieces, 0, (("batch_factor", int(min(ratios))),))
    if has_one_shape and values.are_equal():
        return _replicas(pieces, "inferred")
    return Apart("per_rank", f"no dim of {_shapes(pieces)} is the batch of {', '.join(map(str, dict.fromkeys(sizes)))}")


def _settled(pieces: Sequence[Piece], num_expected: int) -> Plan | Apart | None:
    """What needs no rule: pieces that say where they belong, or contradict each other, or have no others."""
    if (problem := _mixed(pieces)) is not None:
        return problem
    if pieces[0].global_shape is not None:
        return _place(pieces, num_expected)
    return _replicas(pieces, "single") if num_expected == 1 else None


def decide_scalar(pieces: Sequence[Piece], values: Values) -> Plan:
    """0-dim values: one where all ranks agree, else their mean, beside which the ranks' own rows stay."""
    if len(pieces) == 1 or values.are_equal():
        return _replicas(pieces, "inferred")
    dtype = pieces[0].dtype
    terms = tuple(Term(i, 1 / len(pieces)) for i in range(len(pieces)))
    is_float = dtype.startswith(("float", "bfloat", "complex"))
    plan = Plan((), (Part(whole(()), terms),), "assumed", scale="assumed_mean", dtype=None if is_float else "float64")
    return plan._replace(note=(("mean_of_ranks", len(pieces)),))


def decide_gradient(
    pieces: Sequence[Piece], forward: Plan | Apart | None, *, batch: Batch, loss: str, num_expected: int
) -> Plan | Apart:
    """The gradient of an activation: laid out as that is, and scaled to the loss of the whole batch.

    Args:
        pieces: in data-parallel order.
        forward: what was decided of the value itself; None where it was not recorded.
        batch: of the root's call.
        loss: what each rank's loss is of its samples: ``mean``; ``weighted``, a mean over batches of unequal size
            of which each sample counts once; or ``sum``.
        num_expected: ranks that should have a piece.
    """
    if (settled := _settled(pieces, num_expected)) is not None:
        return settled
    if pieces[0].dtype in _NO_NUMBERS and loss != "sum":
        return Apart("per_rank", f"{pieces[0].dtype} cannot be scaled")
    is_same_for_all = isinstance(forward, Plan) and len(forward.parts) == 1 and forward.dim is None
    if is_same_for_all or all(piece.shape == () for piece in pieces):
        if (problem := _unequal_shapes(pieces)) is not None:
            return problem
        factors, scale = _loss_factors(batch.sizes, batch.total, len(pieces), loss, num_expected)
        terms = tuple(Term(i, factor) for i, factor in enumerate(factors))
        part = Part(whole(pieces[0].shape), terms)
        source = "inferred" if is_same_for_all else "assumed"
        return Plan(pieces[0].shape, (part,), source, scale=scale, needs_all=True)
    if isinstance(forward, Apart):
        return forward
    if forward is None:
        forward = decide_activation(pieces, batch=batch, values=Unequal(), num_expected=num_expected)
        if isinstance(forward, Apart):
            return forward
    if forward.dim is None:
        return Apart("per_rank", "the value itself is placed by its own row, the gradient is a plain tensor")
    if len({len(piece.shape) for piece in pieces}) != 1 or _unequal_shapes(pieces, but=forward.dim) is not None:
        return Apart("per_rank", f"gradients of {_shapes(pieces)} cannot be laid end to end along dim {forward.dim}")
    plan = _concatenated(pieces, forward.dim, forward.note)
    sizes = batch.sizes or tuple(piece.shape[forward.dim] for piece in pieces)
    factors, scale = _loss_factors(sizes, batch.total, len(pieces), loss, num_expected)
    parts = tuple(
        Part(part.region, (Term(i, factor),)) for i, (part, factor) in enumerate(zip(plan.parts, factors, strict=True))
    )
    return plan._replace(parts=parts, scale=scale)


def decide_override(pieces: Sequence[Piece], wanted: str) -> Plan | Apart:
    """What the user says: ``shard(d)``, ``replicate``, ``partial(op)`` or ``per_rank``."""
    word, argument = parse_override(wanted)
    if word == "per_rank":
        return Apart("per_rank", "as --layout says")
    if len({piece.dtype for piece in pieces}) > 1:
        return Apart("inconsistent", f"dtypes differ: {_named(pieces, 'dtype')}")
    if word == "shard":
        dim = int(argument)
        if any(dim >= len(piece.shape) for piece in pieces) or _unequal_shapes(pieces, but=dim) is not None:
            return Apart("inconsistent", f"--layout {wanted} does not fit {_shapes(pieces)}")
        return _concatenated(pieces, dim, ())._replace(source="override")
    if (problem := _unequal_shapes(pieces)) is not None:
        return Apart("inconsistent", f"--layout {wanted} does not fit {problem.why}")
    if word == "replicate":
        return _replicas(pieces, "override")
    if pieces[0].dtype in _NO_NUMBERS:
        return Apart("per_rank", f"{pieces[0].dtype} cannot be reduced")
    terms = tuple(Term(i, 1 / len(pieces) if argument == "avg" else 1.0) for i in range(len(pieces)))
    op = "sum" if argument == "avg" else argument
    return Plan(pieces[0].shape, (Part(whole(pieces[0].shape), terms),), "override", op=op)


def parse_override(wanted: str) -> tuple[str, str]:
    """Word and argument of an override.

    Raises:
        ValueError: it is none; the message says what is allowed.
    """
    word, _, argument = wanted.strip().partition("(")
    argument = argument.removesuffix(")").strip()
    if word == "shard" and argument.isdecimal():
        return word, argument
    if word == "partial" and (argument or "sum") in REDUCE_OPS:
        return word, argument or "sum"
    if word in ("replicate", "per_rank") and not argument:
        return word, ""
    raise ValueError(f"layout {wanted!r}: expected shard(DIM), replicate, partial({'|'.join(REDUCE_OPS)}) or per_rank")


def _replicas(pieces: Sequence[Piece], source: str) -> Plan:
    copies = (tuple(range(len(pieces))),) if len(pieces) > 1 else ()
    return Plan(pieces[0].shape, (Part(whole(pieces[0].shape), (Term(0),)),), source, copies=copies)


def _concatenated(pieces: Sequence[Piece], dim: int, note: tuple[tuple[str, Any], ...]) -> Plan:
    parts, position = [], 0
    for i, piece in enumerate(pieces):
        start = tuple(position if d == dim else 0 for d in range(len(piece.shape)))
        parts.append(Part(box_region(start, piece.shape), (Term(i),)))
        position += piece.shape[dim]
    shape = pieces[0].shape
    return Plan((*shape[:dim], position, *shape[dim + 1 :]), tuple(parts), "assumed", dim=dim, note=note)


def _loss_factors(
    sizes: tuple[int, ...] | None, total: int | None, num_pieces: int, loss: str, num_expected: int
) -> tuple[list[float], str | None]:
    """What each piece is multiplied with, and how the row calls it."""
    if loss == "sum":
        return [1.0] * num_pieces, None
    total = total or sum(sizes or ())
    if loss == "weighted" and sizes is not None and total:
        return [size / total for size in sizes], "weighted_mean_loss"
    return [1 / num_expected] * num_pieces, "assumed_mean_loss"


def _place(pieces: Sequence[Piece], num_expected: int) -> Plan | Apart:
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
    coordinates = [_mesh(piece)[1] for piece in pieces]
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
            parts.append(Part(region, tuple(Term(i, factor) for i in summands)))
    if (clash := overlap([part.region for part in parts], global_shape)) is not None:
        i, j = (parts[k].terms[0].piece for k in clash)
        return Apart(
            "inconsistent", f"the pieces of ranks {pieces[i].rank} and {pieces[j].rank} overlap: {_places(pieces)}"
        )
    num_places = math.prod(_mesh(pieces[0])[0])
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
    op = next((str(p.get("reduce_op", "sum")) for p in _placements(pieces[0]) if p.get("kind") == "Partial"), None)
    if op is not None and op not in REDUCE_OPS:
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
    if op is None:
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
        start, total = flat[0].get("offset"), math.prod(piece.global_shape)
        if type(start) is not int or len(piece.shape) != 1 or not 0 <= start <= start + piece.shape[0] <= total:
            return f"its slice of {list(piece.shape)} elements at {start} lies outside a tensor of {total}"
        return flat_region(start, piece.shape[0])
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
    mesh_shape, coordinate = _mesh(piece)
    if not placements or len(mesh_shape) != len(placements) or len(coordinate) != len(placements):
        return None
    assert piece.global_shape is not None
    ranges = [[(0, size)] if size else [] for size in piece.global_shape]
    for placement, num_pieces, index in zip(placements, mesh_shape, coordinate, strict=True):
        kind, dim = placement.get("kind"), placement.get("dim")
        if kind not in ("Shard", "StridedShard"):
            continue
        if type(dim) is not int or not 0 <= dim < len(ranges) or not 0 <= index < num_pieces:
            return f"placement {placement} at {index} of {num_pieces} does not fit {list(piece.global_shape)}"
        factor = placement.get("split_factor")
        if kind == "Shard":
            ranges[dim] = shard(ranges[dim], num_pieces, index)
        elif type(factor) is int and 0 < factor <= _MAX_SPLIT_FACTOR:
            ranges[dim] = strided_shard(ranges[dim], num_pieces, index, factor)
        else:
            return f"placement {placement} has no split_factor of at most {_MAX_SPLIT_FACTOR}"
    return ranges_region(ranges)


def _contradiction(pieces: Sequence[Piece]) -> Apart | None:
    """What ranks may not disagree on."""
    for field, what in (("global_shape", "global shapes differ"), ("dtype", "dtypes differ")):
        if len({getattr(piece, field) for piece in pieces}) > 1:
            return Apart("inconsistent", f"{what}: {_named(pieces, field)}")
    meshes = {_mesh(piece)[0] for piece in pieces}
    if len(meshes) > 1:
        found = ", ".join(f"rank {piece.rank} {list(_mesh(piece)[0])}" for piece in pieces[:_MAX_NAMED])
        return Apart("inconsistent", f"ranks disagree on the mesh: {found}")
    kinds = {str([(p.get("kind"), p.get("dim")) for p in _placements(piece)]) for piece in pieces}
    if len(kinds) > 1:
        return Apart("inconsistent", f"ranks disagree on the placements: {_named(pieces, 'placements')}")
    mesh_shape, coordinate = _mesh(pieces[0])
    if len(coordinate) != len(_placements(pieces[0])) or len(mesh_shape) != len(coordinate):
        return Apart(
            "inconsistent", f"rank {pieces[0].rank}: its mesh and its placements have different numbers of axes"
        )
    taken: dict[Ints, int] = {}
    for piece in pieces:
        other = taken.setdefault(_mesh(piece)[1], piece.rank)
        if other != piece.rank:
            at = list(_mesh(piece)[1])
            return Apart("inconsistent", f"ranks {other} and {piece.rank} both say they are at {at} of the mesh")
    return None


def _mixed(pieces: Sequence[Piece]) -> Apart | None:
    """Pieces of which only some know their place, or of different dtypes."""
    if len({piece.global_shape is None for piece in pieces}) > 1:
        without = next(piece.rank for piece in pieces if piece.global_shape is None)
        return Apart("inconsistent", f"rank {without} holds a plain tensor, others a piece of a global one")
    if len({piece.dtype for piece in pieces}) > 1:
        return Apart("inconsistent", f"dtypes differ: {_named(pieces, 'dtype')}")
    return None


def _unequal_shapes(pieces: Sequence[Piece], but: int | None = None) -> Apart | None:
    def without(shape: Ints) -> Ints:
        return shape if but is None else (*shape[:but], *shape[but + 1 :])

    if len({(len(piece.shape), without(piece.shape)) for piece in pieces}) == 1:
        return None
    return Apart("inconsistent" if but is None else "per_rank", f"shapes differ: {_shapes(pieces)}")


def _shapes(pieces: Sequence[Piece]) -> str:
    if len({piece.shape for piece in pieces}) == 1:
        return str(list(pieces[0].shape))
    return _named(pieces, "shape")


def _places(pieces: Sequence[Piece]) -> str:
    shown = []
    for piece in pieces[:_MAX_NAMED]:
        flat = [p.get("offset") for p in _placements(piece) if p.get("kind") == "FlatShard"]
        at = flat[0] if flat else piece.offsets and list(piece.offsets)
        shown.append(f"rank {piece.rank} {list(piece.shape)} at {at}")
    return ", ".join(shown)


def _named(pieces: Sequence[Piece], field: str) -> str:
    values = ((piece.rank, getattr(piece, field)) for piece in pieces[:_MAX_NAMED])
    return ", ".join(f"rank {rank} {list(v) if isinstance(v, tuple) else v}" for rank, v in values)


def _placements(piece: Piece) -> tuple[dict[str, Any], ...]:
    return parse_placements(piece.placements)


@lru_cache(maxsize=4096)
def parse_placements(text: str | None) -> tuple[dict[str, Any], ...]:
    """The column `placements`; nothing of what is no list of objects."""
    found = _json(text)
    return tuple(item for item in found if isinstance(item, dict)) if isinstance(found, list) else ()


def _mesh(piece: Piece) -> tuple[Ints, Ints]:
    return parse_mesh(piece.mesh)


@lru_cache(maxsize=4096)
def parse_mesh(text: str | None) -> tuple[Ints, Ints]:
    """Shape and this rank's coordinate, out of the column `mesh`; empty where they are no lists of numbers."""
    found = _json(text)
    found = found if isinstance(found, dict) else {}
    shape, coordinate = (found.get(name) for name in ("shape", "coordinate"))
    return _ints(shape), _ints(coordinate)


def _ints(value: Any) -> Ints:
    is_list = isinstance(value, list) and len(value) <= 64 and all(type(v) is int and 0 <= v < 1 << 48 for v in value)
    return tuple(value) if is_list else ()


def _json(text: str | None) -> Any:
    if text is None or len(text) > 65536:
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
