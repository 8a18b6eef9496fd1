"""Decides which rule of `layout` is asked for one value, and of which chunks; parses the user's overrides.

This module never sees rows. It sees chunks, groups of ranks and comparisons.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..errors import LookupFailedError
from ..layout.levels import BatchGroup, WholeTensors, compose, renumbered, within
from ..layout.placement import RANK_BOUND, NoPlan, Plan, RankChunk
from ..layout.rules import (
    Batch,
    ChunkValues,
    decide_activation,
    decide_gradient,
    decide_local_gradient,
    decide_override,
    decide_scalar,
    decide_state,
    mixed,
    parse_override,
)
from ..read.run import RecordedRun
from ..rules import hint, matches, parse_patterns
from ..sites import CALL, NUMBERS, SITES, STATES
from .leaves import Comparison, UnrecordedValue
from .run_topology import DataParallelGroup

LOCAL_GRADIENT = "local_grad"
"""Stands for site `grad` of phase `backward`: before any reduction."""
KNOWN_SITES = frozenset((*SITES, LOCAL_GRADIENT))
_OF_A_CALL = "it is of the call of one rank, which a replay runs again as that rank ran it"
_UNKNOWN_SITE = "this version does not know what stands at the site: it may be of a later one"
Infer = Callable[[Sequence[RankChunk]], "int | NoPlan"]
"""Along which dim plain chunks of ranks that share a batch are cut."""
Decided = tuple[Plan | NoPlan, Batch]


class Override(NamedTuple):
    """What the user says of a value."""

    wanted: str
    rule: str
    """Pattern and layout, as given."""


class Question(NamedTuple):
    """All that the plan of a value hangs on."""

    chunks: list[RankChunk]
    """In data-parallel order."""
    site: str
    group: DataParallelGroup
    num_expected: int
    """Ranks that should have a chunk; of a value of two levels, parts of the batch that should."""
    comparison: Comparison
    override: Override | None
    batches: tuple[Batch, ...]
    """Likeliest first."""
    forward: Plan | NoPlan | None
    unrecorded: UnrecordedValue | None
    """The value whose gradient this is, where that value was not recorded; both have the same chunks."""
    is_gradient: bool
    loss: str
    infer: Infer


def decide(question: Question, batch_groups: tuple[BatchGroup, ...] | NoPlan | None) -> Decided:
    """The plan of a value, and the batch that it was taken to be of.

    Args:
        question: about it.
        batch_groups: chunks of ranks that share a part of the batch, where ranks do.
    """
    chunks, site, group = question.chunks, question.site, question.group
    keys = [(chunk.rank, chunk.micro_step) for chunk in chunks]
    if len(set(keys)) < len(keys):
        twice = next(key[0] for i, key in enumerate(keys) if key in keys[:i])
        text = f"rank {twice} has several rows with one and the same key, so nobody can tell which value is which"
        return NoPlan("inconsistent", text), question.batches[0]
    is_scalar = site in NUMBERS and len({p.dtype for p in chunks}) == 1 and not any(p.shape for p in chunks)
    if is_scalar and question.override is None:
        return decide_scalar(chunks, question.comparison), question.batches[0]
    if group.conflict and question.override is None and (chunks[0].global_shape is None or batch_groups is not None):
        kind = "inconsistent" if group.model_groups else "per_rank"
        return NoPlan(kind, group.conflict), question.batches[0]
    rank_bound = next((chunk.rank_bound for chunk in chunks if chunk.rank_bound and chunk.global_shape is None), None)
    is_one_of_several = question.num_expected > 1 or len(chunks) > 1
    is_strange = rank_bound == "no_layout" or site not in STATES
    if rank_bound is not None and is_strange and is_one_of_several and question.override is None:
        return NoPlan("per_rank", RANK_BOUND[rank_bound]), question.batches[0]
    if site not in KNOWN_SITES and chunks[0].global_shape is None and is_one_of_several and question.override is None:
        return NoPlan("per_rank", _OF_A_CALL if site == CALL else _UNKNOWN_SITE), question.batches[0]
    if isinstance(batch_groups, NoPlan):
        if question.override is None:
            return batch_groups, question.batches[0]
    elif batch_groups is not None:
        return _of_two_levels(question, batch_groups)
    if question.override is not None:
        return _overridden(question, question.override), question.batches[0]
    return _of_one_level(question, chunks, question.unrecorded or question.comparison)


def _overridden(question: Question, override: Override) -> Plan | NoPlan:
    plan = decide_override(question.chunks, override.wanted, override.rule)
    if question.is_gradient and isinstance(plan, Plan) and plan.dim is not None:  # a layout says nothing of the loss
        batch, loss = question.batches[0], question.loss
        plan = decide_gradient(question.chunks, plan, batch=batch, loss=loss, num_expected=question.num_expected)
        plan = plan._replace(source="override") if isinstance(plan, Plan) else plan
    return plan


def _of_one_level(question: Question, chunks: Sequence[RankChunk], values: ChunkValues) -> Decided:
    num_expected, loss = question.num_expected, question.loss
    if question.site == LOCAL_GRADIENT:
        return decide_local_gradient(chunks, num_expected=num_expected), question.batches[0]
    if question.site in STATES:
        plan = decide_state(chunks, source=question.group.source, num_expected=num_expected)
        return plan, question.batches[0]
    for batch in question.batches:
        if question.is_gradient:
            of_value = values if question.unrecorded is not None else None
            plan = decide_gradient(
                chunks, question.forward, batch=batch, loss=loss, num_expected=num_expected, values=of_value
            )
        else:
            plan = decide_activation(chunks, batch=batch, values=values, num_expected=num_expected)
            if question.comparison.is_by_statistics and isinstance(plan, Plan) and plan.source == "inferred":
                plan = plan._replace(note=(*plan.note, ("equal_by", "statistics")))
        if isinstance(plan, Plan):
            break
    return plan, batch


def _of_two_levels(question: Question, batch_groups: tuple[BatchGroup, ...]) -> Decided:
    chunks = question.chunks
    if (problem := mixed(chunks)) is not None and question.override is None:
        return problem, question.batches[0]
    wholes: list[Plan] = []
    for batch_group in batch_groups:
        whole = _of_batch_group(question, batch_group)
        if isinstance(whole, NoPlan):
            return whole, question.batches[0]
        wholes.append(whole)
    tensors = [
        RankChunk(batch_group.ranks[0], chunks[batch_group.units[0][0]].dtype, whole.global_shape)
        for batch_group, whole in zip(batch_groups, wholes, strict=True)
    ]
    forward = question.forward
    if isinstance(forward, Plan) and forward.across is not None:
        forward = forward.across
    values = WholeTensors(wholes, (question.unrecorded or question.comparison).among)
    across, batch = _of_one_level(question._replace(forward=forward), tensors, values)
    return (across if isinstance(across, NoPlan) else compose(across, wholes)), batch


def _of_batch_group(question: Question, batch_group: BatchGroup) -> Plan | NoPlan:
    """The tensor of ranks that share a part of the batch."""
    chunks, override = question.chunks, question.override
    if override is not None:
        numbers = tuple(i for unit in batch_group.units for i in unit)
        plan = decide_override([chunks[i] for i in numbers], override.wanted, override.rule)
        return plan if isinstance(plan, NoPlan) else renumbered(plan, numbers)
    is_state = question.site in STATES
    return within(chunks, batch_group, is_state=is_state, among=question.comparison.among, infer=question.infer)


Overrides = list[tuple[tuple[str, ...], str]]
"""Patterns over ``module_path:site:name``, and the layout of what fits them; the last that fits wins."""
_LEAF = ["module_path", "site", "name"]


def check_overrides(layouts: Sequence[str], *runs: RecordedRun) -> None:
    """Refuse an override that would change nothing.

    Args:
        layouts: ``PATTERN=LAYOUT``; see `Run.view`.
        runs: of the values that are meant.

    Raises:
        LookupFailedError: one is of another form, or no value of any run fits its pattern; the message says which.
    """
    try:
        overrides = parse_overrides(layouts)
    except (ValueError, AttributeError, TypeError) as error:
        raise LookupFailedError(str(error)) from error
    if not overrides:
        return
    leaves = [leaf for run in runs for leaf in run.table(_LEAF).group_by(_LEAF).aggregate([]).to_pylist()]
    there = list(dict.fromkeys(":".join(leaf[name] or "" for name in _LEAF) for leaf in leaves))
    for patterns, wanted in overrides:
        if not any(matches(patterns, leaf) for leaf in there):
            pattern = ",".join(patterns)
            near = hint(patterns[0], there)
            raise LookupFailedError(
                f"--layout '{pattern}={wanted}': no value fits {pattern!r}, patterns over module_path:site:name{near}"
            )


def parse_overrides(layouts: Sequence[str]) -> Overrides:
    """``PATTERN=LAYOUT`` as patterns over ``module_path:site:name`` and layout; without a colon all of a module's.

    Raises:
        ValueError: one of them is not of this form.
    """
    overrides = []
    for layout in layouts:
        pattern, equals, wanted = layout.rpartition("=")
        if not equals or not pattern:
            raise ValueError(f"layout {layout!r}: expected PATTERN=LAYOUT, such as 'layers.*:output:=shard(1)'")
        parse_override(wanted)
        overrides.append((tuple(one if ":" in one else f"{one}:*" for one in parse_patterns(pattern)), wanted))
    return overrides


def find_override(overrides: Overrides, module_path: str, site: str, name: str) -> Override | None:
    """The last override that fits a value; None where none does."""
    for patterns, wanted in reversed(overrides):
        if matches(patterns, f"{module_path}:{site}:{name}"):
            return Override(wanted, f"{','.join(patterns)}={wanted}")
    return None
