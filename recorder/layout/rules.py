"""Owns the decisions: how the local tensors of several ranks are one global tensor, or why they are not.

Decides from shapes, placements and what the run knows of its ranks; of values only from whether ranks have them alike,
which is asked of all steps, never of one. A plan never covers less than it says: what is missing is in `is_complete`.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any, NamedTuple, Protocol

from .placement import REDUCE_OPS, place
from .plans import Apart, Part, Piece, Plan, Term, named
from .regions import Ints, box_region, whole

AS_ASKED = "as --layout says"
"""Why pieces stay with their ranks that the user wants to."""
CHANGES = (
    "the ranks have it alike at other steps, and not at this one: copies that came apart, or values that were never "
    "meant to be copies; --layout '...=per_rank', '...=replicate' or '...=shard(DIM)' says which"
)
LOSSES = ("mean", "sum", "weighted")
_NO_NUMBERS = ("float4_e2m1fn_x2",)
"""Elements that are pairs: to be copied, never computed with."""


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


class Kinship(Enum):
    """What the values of all steps say of how the ranks' tensors of one name stand to each other."""

    COPIES = "copies"
    """The same on all ranks, where they could have differed."""
    OWN = "own"
    """Each rank has its own: they differ, and at no step is it certain that they should not."""
    UNKNOWN = "unknown"
    """Nothing: they were never seen, or they are NaN, constant or repeated, which copies and batches are alike."""


class Values(Protocol):
    """What can be asked of the values of some pieces; it may cost the reading of payloads."""

    def kinship(self) -> Kinship:
        """What all steps say of them."""

    def are_equal(self) -> bool:
        """Whether all pieces hold the same values at this step, as far as can be told."""

    def are_unequal(self) -> bool:
        """Whether they certainly do not."""

    def batch_dim(self) -> int | None:
        """The dim that is the batch at all steps of which the batch is known; None where no step tells."""


class Unequal:
    """Values of which nothing is known that would make them one."""

    def kinship(self) -> Kinship:
        return Kinship.OWN

    def are_equal(self) -> bool:
        return False

    def are_unequal(self) -> bool:
        return False

    def batch_dim(self) -> int | None:
        return None


def decide_state(pieces: Sequence[Piece], *, source: str, num_expected: int) -> Plan | Apart:
    """Parameters, gradients, buffers, optimizer state: placed by their own rows, else replicas."""
    if (settled := _settled(pieces, num_expected)) is not None:
        return settled
    return _unequal_shapes(pieces) or _replicas(pieces, source)


def decide_local_gradient(pieces: Sequence[Piece], *, num_expected: int) -> Plan | Apart:
    """Gradients of parameters before their reduction: the mean over ranks is what that should make of them."""
    if (settled := _settled(pieces, num_expected) or _unequal_shapes(pieces)) is not None:
        return settled
    terms = tuple(Term(i, 1 / len(pieces)) for i in range(len(pieces)))
    note = (("mean_of_ranks", len(pieces)),)
    part = Part(whole(pieces[0].shape), terms)
    return Plan(pieces[0].shape, (part,), "assumed", scale="assumed_mean", needs_all=True, note=note)


def decide_activation(pieces: Sequence[Piece], *, batch: Batch, values: Values, num_expected: int) -> Plan | Apart:
    """Inputs, outputs and taps of data-parallel ranks: the batch laid end to end, or the same on all ranks.

    A tensor that ranks with different batches have alike has nothing of the batch in it, whatever its sizes. Whether
    they have it alike is a property of the tensor, not of a step: see `Kinship`.

    Args:
        pieces: in data-parallel order.
        batch: of their root's call.
        values: what is known of them.
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
        known, values = values, Unequal()  # equal to nothing: one of several ranks tells nothing of the others
        if known.kinship() is Kinship.COPIES:
            return _replicas(pieces, "inferred")
    has_one_shape = _unequal_shapes(pieces) is None
    sizes: tuple[int, ...] | None = batch.sizes
    if has_one_shape and values.kinship() is Kinship.COPIES:
        return copies_unless(values) or _replicas(pieces, "inferred")
    usual = values.batch_dim()
    if sizes is None:
        dim = usual if usual is not None and usual < min(ndims) else 0
        if (problem := _unequal_shapes(pieces, but=dim)) is None:
            return concatenated(pieces, dim, (("batch", "unknown: the root's input was not recorded"),))
        return problem
    fits = [
        dim
        for dim in range(len(pieces[0].shape))
        if all(piece.shape[dim] == size for piece, size in zip(pieces, sizes, strict=True))
        and _unequal_shapes(pieces, but=dim) is None
    ]
    of_pieces = zip(pieces, sizes, strict=True)  # an empty batch has no rows, whatever the factor
    ratios = {piece.shape[0] / size if size else 0.0 for piece, size in of_pieces if size or piece.shape[0]}
    is_multiple = len(ratios) == 1 and ratios <= {float(factor) for factor in batch.factors}
    is_multiple = is_multiple and _unequal_shapes(pieces, but=0) is None
    # Of a batch of several samples a dim 0 with just their words is no accident, a later dim of its size may be one.
    if fits and not (is_multiple and fits[0] > 0 and max(sizes) > 1):
        dim = usual if usual in fits else fits[0]
        return concatenated(pieces, dim, (("batch_dims", tuple(fits)),) if len(fits) > 1 else ())
    if is_multiple:
        return concatenated(pieces, 0, (("batch_factor", int(min(ratios))),))
    if has_one_shape and values.kinship() is Kinship.UNKNOWN and values.are_equal():
        return _replicas(pieces, "inferred")  # there is nothing else that it could be
    return Apart("per_rank", f"no dim of {_shapes(pieces)} is the batch of {', '.join(map(str, dict.fromkeys(sizes)))}")


def copies_unless(values: Values) -> Apart | None:
    """Why tensors that are copies of each other at other steps are none at this one."""
    return Apart("layout_changes", CHANGES) if values.are_unequal() else None


def _settled(pieces: Sequence[Piece], num_expected: int) -> Plan | Apart | None:
    """What needs no rule: pieces that say where they belong, or contradict each other, or have no others."""
    if (problem := mixed(pieces)) is not None:
        return problem
    if pieces[0].global_shape is not None:
        return place(pieces, num_expected)
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
    pieces: Sequence[Piece],
    forward: Plan | Apart | None,
    *,
    batch: Batch,
    loss: str,
    num_expected: int,
    values: Values | None = None,
) -> Plan | Apart:
    """The gradient of an activation: laid out as that is, and scaled to the loss of the whole batch.

    Args:
        pieces: in data-parallel order.
        forward: what was decided of the value itself; None where it was not recorded.
        batch: of the root's call.
        loss: what each rank's loss is of its samples: ``mean``; ``weighted``, a mean over batches of unequal size
            of which each sample counts once; or ``sum``.
        num_expected: ranks that should have a piece.
        values: what other steps say of the value itself, where it was not recorded at this one.
    """
    if (settled := _settled(pieces, num_expected)) is not None:
        return settled
    if pieces[0].dtype in _NO_NUMBERS and loss != "sum":
        return Apart("per_rank", f"{pieces[0].dtype} cannot be scaled")
    if forward is None and not all(piece.shape == () for piece in pieces):
        forward = decide_activation(pieces, batch=batch, values=values or Unequal(), num_expected=num_expected)
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
    assert forward is not None
    if forward.dim is None:
        return Apart("per_rank", "the value itself is placed by its own row, the gradient is a plain tensor")
    if len({len(piece.shape) for piece in pieces}) != 1 or _unequal_shapes(pieces, but=forward.dim) is not None:
        return Apart("per_rank", f"gradients of {_shapes(pieces)} cannot be laid end to end along dim {forward.dim}")
    plan = concatenated(pieces, forward.dim, forward.note)
    sizes = batch.sizes or tuple(piece.shape[forward.dim] for piece in pieces)
    factors, scale = _loss_factors(sizes, batch.total, len(pieces), loss, num_expected)
    parts = tuple(
        part._replace(terms=(Term(i, factor),))
        for i, (part, factor) in enumerate(zip(plan.parts, factors, strict=True))
    )
    return plan._replace(parts=parts, scale=scale)


def decide_override(pieces: Sequence[Piece], wanted: str, rule: str) -> Plan | Apart:
    """What the user says: ``shard(d)``, ``replicate``, ``partial(op)`` or ``per_rank``; `rule` names it in messages."""
    word, argument = parse_override(wanted)
    if word == "per_rank":
        return Apart("per_rank", AS_ASKED)
    if len({piece.dtype for piece in pieces}) > 1:
        return _misfit(rule, f"dtypes differ: {named(pieces, 'dtype')}")
    if word == "shard":
        dim = int(argument)
        if any(dim >= len(piece.shape) for piece in pieces):
            return _misfit(rule, f"there is no dim {dim} in {named(pieces, 'shape')}")
        if _unequal_shapes(pieces, but=dim) is not None:
            return _misfit(rule, f"shapes differ in more than dim {dim}: {named(pieces, 'shape')}")
        return concatenated(pieces, dim, ())._replace(source="override")
    if (problem := _unequal_shapes(pieces)) is not None:
        return _misfit(rule, problem.why)
    if word == "replicate":
        return _replicas(pieces, "override")
    if pieces[0].dtype in _NO_NUMBERS:
        return Apart("per_rank", f"{pieces[0].dtype} cannot be reduced")
    terms = tuple(Term(i, 1 / len(pieces) if argument == "avg" else 1.0) for i in range(len(pieces)))
    op = "sum" if argument == "avg" else argument
    return Plan(pieces[0].shape, (Part(whole(pieces[0].shape), terms),), "override", op=op)


def _misfit(rule: str, why: str) -> Apart:
    return Apart("inconsistent", f"--layout '{rule}' does not fit: {why}")


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


def concatenated(pieces: Sequence[Piece], dim: int, note: tuple[tuple[str, Any], ...]) -> Plan:
    """Pieces laid end to end along a dim, as batches are."""
    parts, position = [], 0
    for i, piece in enumerate(pieces):
        start = tuple(position if d == dim else 0 for d in range(len(piece.shape)))
        parts.append(Part(box_region(start, piece.shape), (Term(i),), start))
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


def mixed(pieces: Sequence[Piece]) -> Apart | None:
    """Pieces of which only some know their place, or of different dtypes."""
    if len({piece.global_shape is None for piece in pieces}) > 1:
        without = next(piece.rank for piece in pieces if piece.global_shape is None)
        return Apart("inconsistent", f"rank {without} holds a plain tensor, others a piece of a global one")
    if len({piece.dtype for piece in pieces}) > 1:
        return Apart("inconsistent", f"dtypes differ: {named(pieces, 'dtype')}")
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
    return named(pieces, "shape")
