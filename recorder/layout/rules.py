"""Decides how the local tensors of several ranks make one global tensor, or why they make none.

Decisions rest on shapes, placements and recorded facts about ranks. No values are read here, but a rule may ask whether
ranks have equal values over all steps. A plan may be incomplete: `is_complete` is False if chunks are missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any, NamedTuple

from ..columns import BATCH_OR_ONE
from .placement import REDUCE_OPS, Fill, NoPlan, Plan, RankChunk, Term, named, plan_by_placements
from .regions import Ints, ranges_region, whole

AS_ASKED = "as --layout says"
"""The reason for not joining chunks that the user asked not to join."""
CHANGES = (
    "the ranks have it alike at other steps, and not at this one: copies that came apart, or values that were never "
    "meant to be copies; --layout '...=per_rank', '...=replicate' or '...=shard(DIM)' says which"
)
NO_ROOT_INPUT = "unknown: the root's input was not recorded"
_MAX_BLOCKS = 1 << 16
LOSSES = ("mean", "sum", "weighted")
_NO_NUMBERS = ("float4_e2m1fn_x2",)
"""The dtypes whose elements are pairs of numbers. They can be copied, but there is no arithmetic for them."""


class Batch(NamedTuple):
    """The facts about a step's batch that decide layouts."""

    sizes: tuple[int, ...] | None
    """The number of samples on each chunk's rank. None if the recorded model's input was not recorded."""
    is_shared: bool = False
    """True if all ranks got the same batch. Equal values then prove nothing."""
    factors: tuple[int, ...] = ()
    """The possible ratios of dim 0 to the batch, if dim 0 merges the batch with other dims of the model's input."""
    total: int | None = None
    """The total number of samples on all ranks that should have a chunk. None if unknown."""


class Replication(Enum):
    """Whether the tensors of one name are copies on all ranks, according to their values at all steps."""

    REPLICATED = "copies"
    """The ranks' values are equal, although different values were possible."""
    DISTINCT = "own"
    """The ranks' values differ, and no step suggests that they should be equal."""
    UNKNOWN = "unknown"
    """The values prove nothing: they were not recorded, or are NaN, constant or repeated."""


class ChunkValues:
    """Answers the rules' questions about the values of chunks. This base class answers as if no values were known.

    A subclass may read payloads to answer.
    """

    def replication(self) -> Replication:
        """Return whether the chunks are copies, according to their values at all steps."""
        return Replication.DISTINCT

    def are_equal(self) -> bool:
        """Whether all chunks are known to have equal values at this step."""
        return False

    def are_unequal(self) -> bool:
        """Whether some chunks are known to have different values at this step."""
        return False

    def batch_dim(self) -> int | None:
        """Return the dim that was the batch at all steps with evidence. Return None without evidence."""
        return None

    def is_sequence_first(self) -> bool:
        """Whether the inputs of the module (or of the nearest one around it) have their batch in a dim after dim 0."""
        return False


def decide_state(chunks: Sequence[RankChunk], *, source: str, num_expected: int) -> Plan | NoPlan:
    """Plan parameters, gradients, buffers and optimizer state, by the positions in their rows or else as replicas."""
    if (decision := _without_rule(chunks, num_expected)) is not None:
        return decision
    return _unequal_shapes(chunks) or replicas(chunks, source)


def decide_local_gradient(chunks: Sequence[RankChunk], *, num_expected: int) -> Plan | NoPlan:
    """Plan gradients of parameters before they are reduced. The global gradient is the mean over the ranks."""
    if (decision := _without_rule(chunks, num_expected) or _unequal_shapes(chunks)) is not None:
        return decision
    return _mean_of_ranks(chunks)._replace(needs_all=True)


def _mean_of_ranks(chunks: Sequence[RankChunk]) -> Plan:
    terms = tuple(Term(i, 1 / len(chunks)) for i in range(len(chunks)))
    fill, note = Fill(whole(chunks[0].shape), terms), (("mean_of_ranks", len(chunks)),)
    return Plan(chunks[0].shape, (fill,), "assumed", scale="assumed_mean", note=note)


def decide_activation(
    chunks: Sequence[RankChunk], *, batch: Batch, values: ChunkValues, num_expected: int
) -> Plan | NoPlan:
    """Plan inputs, outputs and taps (tensors that the program names) of data-parallel ranks: as a batch, or as copies.

    A tensor that is equal on ranks with different batches does not depend on the batch, whatever its sizes. Equality is
    judged over all steps and not at one step: see `Replication`.
    """
    if (decision := _without_rule(chunks, num_expected)) is not None:
        return decision
    ndims = {len(chunk.shape) for chunk in chunks}
    if len(ndims) != 1:
        return NoPlan("per_rank", f"the ranks' tensors have different numbers of dims: {_shapes(chunks)}")
    if ndims == {0}:
        return decide_scalar(chunks, values)._replace(needs_all=True)
    if len(chunks) == 1 and values.replication() is Replication.REPLICATED:
        return replicas(chunks, "inferred")
    known, values = values, values if len(chunks) > 1 else ChunkValues()  # one rank's values prove nothing about others
    has_one_shape, sizes = _unequal_shapes(chunks) is None, batch.sizes
    note = ((BATCH_OR_ONE, True),) if has_one_shape and _may_be_batch_or_one(chunks, batch, values) else ()
    if has_one_shape and values.replication() is Replication.REPLICATED:
        return copies_unless(values) or replicas(chunks, "inferred")._replace(note=note)
    usual = values.batch_dim()
    if sizes is None:
        return _as_in_other_calls(chunks, usual)
    fits, factor = _dims_of_batch(chunks, sizes), _rows_per_sample(chunks, sizes, batch.factors)
    # With several samples, a dim 0 of exactly their number of rows is no accident. A later dim may have the batch's
    # size by accident, unless the module's inputs have their batch in that dim.
    may_be_rows = factor is not None and fits[:1] != [0] and max(sizes) > 1
    if fits and not (may_be_rows and (len(chunks[0].shape) < 3 or not known.is_sequence_first())):
        dim = usual if usual in fits else fits[0]
        return concatenated(chunks, dim, (*note, ("batch_dims", tuple(fits))) if len(fits) > 1 else note)
    if factor is not None:
        if not known.is_sequence_first():
            return concatenated(chunks, 0, (("batch_factor", factor),))
        if batch.factors == (factor,) and factor * len(chunks) <= _MAX_BLOCKS:
            return concatenated(chunks, 0, (("batch_blocks", factor),), factor)
        return NoPlan("per_rank", "the order of its rows is unknown: it is made of tensors whose batch is not dim 0")
    if has_one_shape and values.replication() is Replication.UNKNOWN and values.are_equal():
        return replicas(chunks, "inferred")  # every other relation was excluded above
    of_batch = ", ".join(map(str, dict.fromkeys(sizes)))
    return NoPlan("per_rank", f"no dim of {_shapes(chunks)} is the batch of {of_batch}")


def _may_be_batch_or_one(chunks: Sequence[RankChunk], batch: Batch, values: ChunkValues) -> bool:
    """Return whether the chunks may be either copies or a batch: each rank has one sample, and they are equal."""
    is_single = batch.sizes is not None and {*batch.sizes} == {1} and 1 in chunks[0].shape
    return is_single and len(chunks) > 1 and not batch.is_shared and values.are_equal()


def _as_in_other_calls(chunks: Sequence[RankChunk], usual: int | None) -> Plan | NoPlan:
    dim = usual if usual is not None and usual < len(chunks[0].shape) else 0
    how = NO_ROOT_INPUT if usual is None else f"dim {dim}, as in other calls; the root's input was not recorded"
    return _unequal_shapes(chunks, but=dim) or concatenated(chunks, dim, (("batch", how),))


def _dims_of_batch(chunks: Sequence[RankChunk], sizes: Sequence[int]) -> list[int]:
    return [
        dim
        for dim in range(len(chunks[0].shape))
        if all(chunk.shape[dim] == size for chunk, size in zip(chunks, sizes, strict=True))
        and _unequal_shapes(chunks, but=dim) is None
    ]


def _rows_per_sample(chunks: Sequence[RankChunk], sizes: Sequence[int], factors: Sequence[int]) -> int | None:
    """Return the ratio of dim 0 of every chunk to its batch. Return None without a common, known ratio."""
    of_chunks = zip(chunks, sizes, strict=True)  # an empty batch has no rows, whatever the factor
    ratios = {chunk.shape[0] / size if size else 0.0 for chunk, size in of_chunks if size or chunk.shape[0]}
    is_factor = len(ratios) == 1 and ratios <= {float(factor) for factor in factors}
    return int(min(ratios)) if is_factor and _unequal_shapes(chunks, but=0) is None else None


def copies_unless(values: ChunkValues) -> NoPlan | None:
    """Return a NoPlan if tensors that are copies at other steps differ at this step; else None."""
    return NoPlan("layout_changes", CHANGES) if values.are_unequal() else None


def _without_rule(chunks: Sequence[RankChunk], num_expected: int) -> Plan | NoPlan | None:
    """Plan a single chunk, and chunks that state their position or contradict each other; else return None."""
    if (problem := mixed(chunks)) is not None:
        return problem
    if chunks[0].global_shape is not None:
        return plan_by_placements(chunks)
    return replicas(chunks, "single") if num_expected == 1 else None


def decide_scalar(chunks: Sequence[RankChunk], values: ChunkValues) -> Plan:
    """Plan 0-dim tensors: one value if all ranks agree, or else their mean, with each rank's value kept as well."""
    if len(chunks) == 1 or values.are_equal():
        return replicas(chunks, "inferred")
    is_float = chunks[0].dtype.startswith(("float", "bfloat", "complex"))
    return _mean_of_ranks(chunks)._replace(dtype=None if is_float else "float64")


def decide_gradient(
    chunks: Sequence[RankChunk],
    forward: Plan | NoPlan | None,
    *,
    batch: Batch,
    loss: str,
    num_expected: int,
    values: ChunkValues | None = None,
) -> Plan | NoPlan:
    """Plan the gradient of an activation. It has the activation's layout, and is scaled to the loss of the whole batch.

    `chunks` are in data-parallel order. `forward` is the plan of the activation. It is None if the activation was not
    recorded, and then `values` describes the activation at other steps. `loss` says how a rank's loss reduces its
    samples: ``mean``; ``weighted``, a mean over batches of unequal size in which each sample counts once; or ``sum``.
    """
    if (decision := _without_rule(chunks, num_expected)) is not None:
        return decision
    if chunks[0].dtype in _NO_NUMBERS and loss != "sum":
        return NoPlan("per_rank", f"{chunks[0].dtype} cannot be scaled")
    if forward is None and not all(chunk.shape == () for chunk in chunks):
        forward = decide_activation(chunks, batch=batch, values=values or ChunkValues(), num_expected=num_expected)
    is_same_for_all = isinstance(forward, Plan) and len(forward.fills) == 1 and forward.dim is None
    if is_same_for_all or all(chunk.shape == () for chunk in chunks):
        if (problem := _unequal_shapes(chunks)) is not None:
            return problem
        factors, scale = _loss_factors(batch.sizes, batch.total, len(chunks), loss, num_expected)
        terms = tuple(Term(i, factor) for i, factor in enumerate(factors))
        fill = Fill(whole(chunks[0].shape), terms)
        source = "inferred" if is_same_for_all else "assumed"
        note = tuple(one for one in forward.note if one[0] == BATCH_OR_ONE) if isinstance(forward, Plan) else ()
        return Plan(chunks[0].shape, (fill,), source, scale=scale, needs_all=True, note=note)
    if isinstance(forward, NoPlan):
        return forward
    assert forward is not None
    if forward.dim is None:
        return NoPlan("per_rank", "the value's own row names its position, the gradient is a plain tensor")
    if len({len(chunk.shape) for chunk in chunks}) != 1 or _unequal_shapes(chunks, but=forward.dim) is not None:
        return NoPlan("per_rank", f"gradients of {_shapes(chunks)} cannot be laid end to end along dim {forward.dim}")
    plan = concatenated(chunks, forward.dim, forward.note, dict(forward.note).get("batch_blocks", 1))
    sizes = batch.sizes or tuple(chunk.shape[forward.dim] for chunk in chunks)
    factors, scale = _loss_factors(sizes, batch.total, len(chunks), loss, num_expected)
    fills = tuple(
        fill._replace(terms=(Term(i, factor),))
        for i, (fill, factor) in enumerate(zip(plan.fills, factors, strict=True))
    )
    return plan._replace(fills=fills, scale=scale)


def decide_override(chunks: Sequence[RankChunk], wanted: str, rule: str) -> Plan | NoPlan:
    """Plan as the user asks by ``shard(d)``, ``replicate``, ``partial(op)`` or ``per_rank``. Errors quote `rule`."""
    word, argument = parse_override(wanted)
    if word == "per_rank":
        return NoPlan("per_rank", AS_ASKED)
    if len({chunk.dtype for chunk in chunks}) > 1:
        return _misfit(rule, f"dtypes differ: {named(chunks, 'dtype')}")
    if word == "shard":
        dim = int(argument)
        if any(dim >= len(chunk.shape) for chunk in chunks):
            return _misfit(rule, f"there is no dim {dim} in {named(chunks, 'shape')}")
        if _unequal_shapes(chunks, but=dim) is not None:
            return _misfit(rule, f"shapes differ in more than dim {dim}: {named(chunks, 'shape')}")
        return concatenated(chunks, dim, ())._replace(source="override")
    if (problem := _unequal_shapes(chunks)) is not None:
        return _misfit(rule, problem.why)
    if word == "replicate":
        return replicas(chunks, "override")
    if chunks[0].dtype in _NO_NUMBERS:
        return NoPlan("per_rank", f"{chunks[0].dtype} cannot be reduced")
    terms = tuple(Term(i, 1 / len(chunks) if argument == "avg" else 1.0) for i in range(len(chunks)))
    op = "sum" if argument == "avg" else argument
    return Plan(chunks[0].shape, (Fill(whole(chunks[0].shape), terms),), "override", op=op)


def _misfit(rule: str, why: str) -> NoPlan:
    return NoPlan("inconsistent", f"--layout '{rule}' does not fit: {why}")


def parse_override(wanted: str) -> tuple[str, str]:
    """Split a layout such as ``shard(0)`` into its word and its argument. Raises ValueError for any other text."""
    word, _, argument = wanted.strip().partition("(")
    argument = argument.removesuffix(")").strip()
    if word == "shard" and argument.isdecimal():
        return word, argument
    if word == "partial" and (argument or "sum") in REDUCE_OPS:
        return word, argument or "sum"
    if word in ("replicate", "per_rank") and not argument:
        return word, ""
    raise ValueError(f"layout {wanted!r}: expected shard(DIM), replicate, partial({'|'.join(REDUCE_OPS)}) or per_rank")


def replicas(chunks: Sequence[RankChunk], source: str) -> Plan:
    """Plan chunks that are copies of one tensor."""
    copies = (tuple(range(len(chunks))),) if len(chunks) > 1 else ()
    return Plan(chunks[0].shape, (Fill(whole(chunks[0].shape), (Term(0),)),), source, copies=copies)


def concatenated(chunks: Sequence[RankChunk], dim: int, note: tuple[tuple[str, Any], ...], num_blocks: int = 1) -> Plan:
    """Plan chunks that are joined end to end along `dim`, as batches are, within each of `num_blocks` blocks."""
    fills, position = [], 0
    block = sum(chunk.shape[dim] for chunk in chunks) // num_blocks
    for i, chunk in enumerate(chunks):
        size = chunk.shape[dim] // num_blocks
        ranges = [[(0, length)] for length in chunk.shape]
        ranges[dim] = [(at * block + position, at * block + position + size) for at in range(num_blocks)]
        start = tuple(position if d == dim else 0 for d in range(len(chunk.shape))) if num_blocks == 1 else None
        fills.append(Fill(ranges_region(ranges), (Term(i),), start))
        position += size
    shape = chunks[0].shape
    return Plan((*shape[:dim], block * num_blocks, *shape[dim + 1 :]), tuple(fills), "assumed", dim=dim, note=note)


def _loss_factors(
    sizes: tuple[int, ...] | None, total: int | None, num_chunks: int, loss: str, num_expected: int
) -> tuple[list[float], str | None]:
    """Return the factor of each chunk, and the text for the column `scale` of the global row."""
    if loss == "sum":
        return [1.0] * num_chunks, None
    total = total or sum(sizes or ())
    if loss == "weighted" and sizes is not None and total:
        return [size / total for size in sizes], "weighted_mean_loss"
    return [1 / num_expected] * num_chunks, "assumed_mean_loss"


def mixed(chunks: Sequence[RankChunk]) -> NoPlan | None:
    """Return the problem if only some chunks state their position, or if their dtypes differ; else None."""
    if len({chunk.global_shape is None for chunk in chunks}) > 1:
        without = next(chunk.rank for chunk in chunks if chunk.global_shape is None)
        return NoPlan("inconsistent", f"rank {without} holds a plain tensor, other ranks hold chunks of a global one")
    if len({chunk.dtype for chunk in chunks}) > 1:
        return NoPlan("inconsistent", f"dtypes differ: {named(chunks, 'dtype')}")
    return None


def _unequal_shapes(chunks: Sequence[RankChunk], but: int | None = None) -> NoPlan | None:
    def without(shape: Ints) -> Ints:
        return shape if but is None else (*shape[:but], *shape[but + 1 :])

    if len({(len(chunk.shape), without(chunk.shape)) for chunk in chunks}) == 1:
        return None
    return NoPlan("inconsistent" if but is None else "per_rank", f"shapes differ: {_shapes(chunks)}")


def _shapes(chunks: Sequence[RankChunk]) -> str:
    if len({chunk.shape for chunk in chunks}) == 1:
        return str(list(chunks[0].shape))
    return named(chunks, "shape")
