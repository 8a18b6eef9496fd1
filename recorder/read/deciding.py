"""Owns what is asked of `layout` for one value: which rule, of which pieces, with which batch.

Must never see rows: pieces, groups and evidence alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..layout.levels import Block, OfWholes, compose, renumbered, within
from ..layout.plans import Apart, Piece, Plan
from ..layout.rules import (
    Batch,
    Values,
    decide_activation,
    decide_gradient,
    decide_local_gradient,
    decide_override,
    decide_scalar,
    decide_state,
    mixed,
)
from .evidence import Evidence, Unrecorded
from .grid import Group

STATE_SITES = ("param", "grad", "buffer", "optim")
LOCAL_GRADIENT = "local_grad"
"""Stands for site `grad` of phase `backward`: before any reduction."""
ALONE = {
    "no_layout": "it is a piece of something, and its place there is not known",
    "inner_of": "it is a part of a composite tensor, which means nothing without the rank's other parts",
}
"""Members of a note for which ranks' values are not laid side by side."""
Infer = Callable[[Sequence[Piece]], "int | Apart"]
"""Along which dim plain pieces of ranks that share a batch are cut."""
Decided = tuple[Plan | Apart, Batch]


class Override(NamedTuple):
    """What the user says of a value."""

    wanted: str
    rule: str
    """Pattern and layout, as given."""


class Question(NamedTuple):
    """All that the plan of a value hangs on."""

    pieces: list[Piece]
    """In data-parallel order."""
    site: str
    group: Group
    num_expected: int
    """Ranks that should have a piece; of a value of two levels, parts of the batch that should."""
    evidence: Evidence
    override: Override | None
    batches: tuple[Batch, ...]
    """Likeliest first."""
    forward: Plan | Apart | None
    unrecorded: Unrecorded | None
    """Of the value that this is the gradient of, where it was not recorded; it has the same pieces."""
    is_gradient: bool
    loss: str
    infer: Infer


def decide(question: Question, blocks: tuple[Block, ...] | Apart | None) -> Decided:
    """The plan of a value, and the batch that it was taken to be of.

    Args:
        question: about it.
        blocks: pieces of ranks that share a part of the batch, where ranks do.
    """
    pieces, site, group = question.pieces, question.site, question.group
    keys = [(piece.rank, piece.micro_step) for piece in pieces]
    if len(set(keys)) < len(keys):
        twice = next(key[0] for i, key in enumerate(keys) if key in keys[:i])
        return Apart("inconsistent", f"rank {twice} has two rows of this value"), question.batches[0]
    is_scalar = site == "scalar" and len({p.dtype for p in pieces}) == 1 and not any(p.shape for p in pieces)
    if is_scalar and question.override is None:
        return decide_scalar(pieces, question.evidence), question.batches[0]
    if group.conflict and question.override is None and (pieces[0].global_shape is None or blocks is not None):
        kind = "inconsistent" if group.instances else "per_rank"
        return Apart(kind, group.conflict), question.batches[0]
    alone = next((piece.alone for piece in pieces if piece.alone and piece.global_shape is None), None)
    is_one_of_several = question.num_expected > 1 or len(pieces) > 1
    is_strange = alone == "no_layout" or site not in STATE_SITES
    if alone is not None and is_strange and is_one_of_several and question.override is None:
        return Apart("per_rank", ALONE[alone]), question.batches[0]
    if isinstance(blocks, Apart):
        if question.override is None:
            return blocks, question.batches[0]
    elif blocks is not None:
        return _of_two_levels(question, blocks)
    if question.override is not None:
        return _overridden(question, question.override), question.batches[0]
    return _of_one_level(question, pieces, question.unrecorded or question.evidence)


def _overridden(question: Question, override: Override) -> Plan | Apart:
    plan = decide_override(question.pieces, override.wanted, override.rule)
    if question.is_gradient and isinstance(plan, Plan) and plan.dim is not None:  # a layout says nothing of the loss
        batch, loss = question.batches[0], question.loss
        plan = decide_gradient(question.pieces, plan, batch=batch, loss=loss, num_expected=question.num_expected)
        plan = plan._replace(source="override") if isinstance(plan, Plan) else plan
    return plan


def _of_one_level(question: Question, pieces: Sequence[Piece], values: Values) -> Decided:
    num_expected, loss = question.num_expected, question.loss
    if question.site == LOCAL_GRADIENT:
        return decide_local_gradient(pieces, num_expected=num_expected), question.batches[0]
    if question.site in STATE_SITES:
        plan = decide_state(pieces, source=question.group.source, num_expected=num_expected)
        return plan, question.batches[0]
    for batch in question.batches:
        if question.is_gradient:
            of_value = values if question.unrecorded is not None else None
            plan = decide_gradient(
                pieces, question.forward, batch=batch, loss=loss, num_expected=num_expected, values=of_value
            )
        else:
            plan = decide_activation(pieces, batch=batch, values=values, num_expected=num_expected)
            if question.evidence.is_by_statistics and isinstance(plan, Plan) and plan.source == "inferred":
                plan = plan._replace(note=(*plan.note, ("equal_by", "statistics")))
        if isinstance(plan, Plan):
            break
    return plan, batch


def _of_two_levels(question: Question, blocks: tuple[Block, ...]) -> Decided:
    pieces = question.pieces
    if (problem := mixed(pieces)) is not None and question.override is None:
        return problem, question.batches[0]
    wholes: list[Plan] = []
    for block in blocks:
        whole = _of_block(question, block)
        if isinstance(whole, Apart):
            return whole, question.batches[0]
        wholes.append(whole)
    tensors = [
        Piece(block.ranks[0], pieces[block.units[0][0]].dtype, whole.global_shape)
        for block, whole in zip(blocks, wholes, strict=True)
    ]
    forward = question.forward
    if isinstance(forward, Plan) and forward.across is not None:
        forward = forward.across
    values = OfWholes(wholes, (question.unrecorded or question.evidence).among)
    across, batch = _of_one_level(question._replace(forward=forward), tensors, values)
    return (across if isinstance(across, Apart) else compose(across, wholes)), batch


def _of_block(question: Question, block: Block) -> Plan | Apart:
    """The tensor of ranks that share a part of the batch."""
    pieces, override = question.pieces, question.override
    if override is not None:
        numbers = tuple(i for unit in block.units for i in unit)
        plan = decide_override([pieces[i] for i in numbers], override.wanted, override.rule)
        return plan if isinstance(plan, Apart) else renumbered(plan, numbers)
    is_state = question.site in STATE_SITES
    return within(pieces, block, is_state=is_state, among=question.evidence.among, infer=question.infer)
