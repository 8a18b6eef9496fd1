"""Plans in two levels: ranks with the same part of the batch make one tensor, and these tensors make the global one.

Nothing here may treat plain tensors that differ as copies, or use values other than to compare them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..numerics.keys import by_key
from .placement import Fill, NoPlan, Plan, RankChunk, Term, mesh_of, plan_by_placements
from .regions import Box, Ints, Region, overlap
from .rules import ChunkValues, Replication, concatenated, copies_unless, replicas

Groups = tuple[Ints, ...]
Among = Callable[[Sequence[int]], ChunkValues]
"""Returns what is known about the values of some chunks, given their indexes."""
Infer = Callable[[Sequence[RankChunk]], "int | NoPlan"]
"""Returns the dim along which plain chunks are cut. The chunks differ, and their ranks share a part of the batch."""


class BatchGroup(NamedTuple):
    """The chunks of ranks that have the same part of the batch, as in tensor parallelism."""

    units: Groups
    """Groups of chunks, by index. A group is the chunks of a DTensor on one mesh, or a single plain chunk."""
    ranks: Ints
    """The ranks that should have a chunk."""


def split(chunks: Sequence[RankChunk], model_groups: Groups, expected: Ints) -> tuple[BatchGroup, ...] | NoPlan | None:
    """Group chunks by the part of the batch that their ranks have. Return None if one level is enough.

    `chunks` are in data-parallel order. `model_groups` are the groups of ranks with the same part of the batch, from
    the manifests, in the same order.
    """
    meshes = [_mesh_ranks(chunk, model_groups) for chunk in chunks]
    if (problem := _contradiction(chunks, meshes)) is not None:
        return problem
    known_meshes = {mesh for mesh in meshes if mesh}
    has_micro_batches = len({chunk.micro_step for chunk in chunks}) > 1
    is_one_mesh = len(known_meshes) == 1 and all(meshes) and set(expected) <= set(meshes[0])
    if not has_micro_batches and (is_one_mesh or (not model_groups and len(known_meshes) < 2)):
        return None
    keys = [(chunk.micro_step, mesh or (chunk.rank,)) for chunk, mesh in zip(chunks, meshes, strict=True)]
    units = by_key((key, i) for i, key in enumerate(keys))
    return _in_batch_groups(chunks, units, model_groups)


def _in_batch_groups(
    chunks: Sequence[RankChunk], units: dict[tuple[int, Ints], list[int]], model_groups: Groups
) -> tuple[BatchGroup, ...] | NoPlan:
    instance_of = {rank: number for number, ranks in enumerate(model_groups) for rank in ranks}
    if model_groups and (stray_rank := next((p.rank for p in chunks if p.rank not in instance_of), None)) is not None:
        shown = ", ".join(str(list(ranks)) for ranks in model_groups[:4])
        return NoPlan("inconsistent", f"rank {stray_rank} is in no mesh of this model ({shown})")
    spans = any(len({instance_of.get(rank) for rank in mesh}) > 1 for _, mesh in units) and model_groups
    units_of: dict[tuple[int, int], list[Ints]] = {}
    ranks_of: dict[tuple[int, int], Ints] = {}
    for (micro_step, mesh), numbers in units.items():
        first = chunks[numbers[0]].rank
        # A mesh may span several instances of the model. It then holds copies: FSDP2 keeps copies of a parameter that
        # tensor parallelism does not cut.
        instance = (0 if spans else instance_of[first]) if model_groups else min(numbers)
        key = instance, micro_step
        units_of.setdefault(key, []).append(tuple(numbers))
        known = model_groups[instance] if model_groups and not spans else mesh
        ranks_of[key] = tuple(dict.fromkeys((*ranks_of.get(key, ()), *known)))
    return tuple(BatchGroup(tuple(units_of[key]), ranks_of[key]) for key in sorted(units_of))


def _mesh_ranks(chunk: RankChunk, model_groups: Groups) -> Ints:
    """Return the ranks of a chunk's mesh. Return an empty tuple for a plain chunk, or if the ranks are unknown."""
    if chunk.global_shape is None:
        return ()
    shape, _, ranks = mesh_of(chunk)
    if ranks:
        return ranks
    return next((some for some in model_groups if chunk.rank in some and len(some) == math.prod(shape)), ())


def _contradiction(chunks: Sequence[RankChunk], meshes: Sequence[Ints]) -> NoPlan | None:
    of_rank = {chunk.rank: mesh for chunk, mesh in zip(chunks, meshes, strict=True) if mesh}
    if len(set(of_rank.values())) == 1 and all(rank in mesh for rank, mesh in of_rank.items()):
        return None
    for rank, mesh in of_rank.items():
        if rank not in mesh:
            return NoPlan("inconsistent", f"rank {rank} says it is on a mesh of ranks {list(mesh)}")
        other = next((member for member in mesh if of_rank.get(member, mesh) != mesh), None)
        if other is not None:
            shown = f"rank {rank} {list(mesh)}, rank {other} {list(of_rank[other])}"
            return NoPlan("inconsistent", f"ranks disagree on the mesh: {shown}")
    return None


def within(
    chunks: Sequence[RankChunk], batch_group: BatchGroup, *, is_state: bool, among: Among, infer: Infer
) -> Plan | NoPlan:
    """Plan the tensor of ranks that have the same part of the batch. The plan's terms are indexes of `chunks`.

    Parameters, their gradients and their optimizer states (`is_state`) are replicas unless their rows say otherwise;
    the caller compares the replicas. `among` is called only for chunks that may be replicas. `infer` is called only for
    plain chunks that need not be replicas.
    """
    plans: list[Plan] = []
    for unit in batch_group.units:
        own = [chunks[i] for i in unit]
        unit_plan = plan_by_placements(own) if own[0].global_shape is not None else replicas(own[:1], "")
        if isinstance(unit_plan, NoPlan):
            return unit_plan
        plans.append(renumbered(unit_plan, unit))
    is_plain = all(chunks[unit[0]].global_shape is None for unit in batch_group.units)
    if len(plans) == 1:
        if is_plain and len(batch_group.ranks) > 1 and not is_state:
            only, others = chunks[batch_group.units[0][0]].rank, list(batch_group.ranks)
            return NoPlan("per_rank", f"ranks {others} share a batch, and of them rank {only} alone has a plain tensor")
        return plans[0]
    if is_state:
        return _overlay(plans, "inferred" if is_plain else plans[0].source)
    values = WholeTensors(plans, among)
    replication = values.replication()
    if replication is Replication.REPLICATED:
        return copies_unless(values) or _overlay(plans, "inferred")
    differ: Plan | NoPlan = NoPlan(
        "per_rank", f"tensors over several meshes differ, of ranks {list(batch_group.ranks)} that share a batch"
    )
    if is_plain:
        differ = _inferred(chunks, [unit[0] for unit in batch_group.units], infer)
        if isinstance(differ, Plan):
            return differ
    # Constants, and values that were never finite, may be chunks or copies. Equality is the only evidence for copies.
    return _overlay(plans, "inferred") if replication is Replication.UNKNOWN and values.are_equal() else differ


def renumbered(plan: Plan, numbers: Ints) -> Plan:
    """Return a plan of some chunks as a plan of all chunks. `numbers` are the indexes of these chunks among all."""
    fills = tuple(
        fill._replace(terms=tuple(Term(numbers[term.chunk], term.factor) for term in fill.terms)) for fill in plan.fills
    )
    return plan._replace(fills=fills, copies=tuple(tuple(numbers[i] for i in some) for some in plan.copies))


def corresponding(plans: Sequence[Plan]) -> list[Ints] | None:
    """Return, for each region, the chunks of all tensors that cover it; None if tensors are cut differently."""
    first = {fill.region: fill.terms for fill in plans[0].fills}
    chunks_at: dict[tuple[Region, int], list[int]] = {
        (region, k): [term.chunk] for region, terms in first.items() for k, term in enumerate(terms)
    }
    for plan in plans[1:]:
        others = {fill.region: fill.terms for fill in plan.fills}
        if {region: len(terms) for region, terms in others.items()} != {r: len(terms) for r, terms in first.items()}:
            return None
        for region, terms in others.items():
            for k, term in enumerate(terms):
                chunks_at[region, k].append(term.chunk)
    return [tuple(some) for some in chunks_at.values()]


class WholeTensors(ChunkValues):
    """Compares the values of complete tensors, each made of several chunks, chunk by chunk."""

    def __init__(self, wholes: Sequence[Plan], among: Among) -> None:
        self._wholes = wholes
        self._among = among

    def replication(self) -> Replication:
        answers = {values.replication() for values in self._pairs()}
        if Replication.DISTINCT in answers or not answers:
            return Replication.DISTINCT
        return Replication.REPLICATED if Replication.REPLICATED in answers else Replication.UNKNOWN

    def are_equal(self) -> bool:
        pairs = self._pairs()
        return bool(pairs) and all(values.are_equal() for values in pairs)

    def are_unequal(self) -> bool:
        return any(values.are_unequal() for values in self._pairs())

    def batch_dim(self) -> int | None:
        return next((values.batch_dim() for values in self._pairs()), None)

    def is_sequence_first(self) -> bool:
        return self._among((0,)).is_sequence_first()

    def _pairs(self) -> list[ChunkValues]:
        if len({plan.global_shape for plan in self._wholes}) > 1:
            return []
        return [self._among(some) for some in corresponding(self._wholes) or ()]


def _overlay(plans: Sequence[Plan], source: str) -> Plan | NoPlan:
    plans = sorted(plans, key=lambda plan: not plan.is_complete)
    base = plans[0]
    inner = {some[0]: some for plan in plans for some in plan.copies}
    fills: dict[Region, Fill] = {}
    replicas: dict[tuple[Region, int], list[int]] = {}
    for plan in plans:
        if plan.global_shape != base.global_shape:
            shapes = f"{list(base.global_shape)} and {list(plan.global_shape)}"
            return NoPlan("inconsistent", f"copies of the tensor have different shapes: {shapes}")
        for fill in plan.fills:
            chosen = fills.setdefault(fill.region, fill)
            for k, term in enumerate(fill.terms if len(fill.terms) == len(chosen.terms) else ()):
                replicas.setdefault((fill.region, k), []).extend(inner.get(term.chunk, (term.chunk,)))
    regions = list(fills)
    try:
        is_alike = len(regions) == len(base.fills) if base.is_complete else overlap(regions, base.global_shape) is None
    except OverflowError as error:
        return NoPlan("per_rank", str(error))
    if not is_alike:
        return NoPlan("per_rank", "copies of the tensor are cut in different ways, so their chunks cannot be compared")
    is_whole = base.is_complete or (
        sum(region.numel for region in regions) == math.prod(base.global_shape)
        and all(len(fill.terms) == 1 for fill in fills.values())
    )
    copies = tuple(tuple(some) for some in replicas.values() if len(some) > 1)
    return base._replace(fills=tuple(fills.values()), source=source, copies=copies, is_complete=is_whole)


def compose(across: Plan, wholes: Sequence[Plan]) -> Plan | NoPlan:
    """Join the plans of two levels into one plan.

    `across` joins the tensors of groups, and its terms are indexes of `wholes`. `wholes` are the plans of these
    tensors, and their terms are indexes of chunks.
    """
    if len({plan.op for plan in wholes}) > 1:
        return NoPlan("inconsistent", f"tensors are reduced in different ways: {', '.join(plan.op for plan in wholes)}")
    source = _source(across, wholes)
    if across.copies:
        base = _overlay(wholes, source)
        if isinstance(base, NoPlan):
            return base
        return base._replace(note=across.note, needs_all=across.needs_all, across=across)
    fills: list[Fill] = []
    copies = tuple(some for plan in wholes for some in plan.copies)
    for fill in across.fills:
        part = _moved(fill, across, wholes) if len(fill.terms) == 1 else _reduced(fill, wholes)
        if isinstance(part, NoPlan):
            return part
        fills += part
    used = {term.chunk for fill in across.fills for term in fill.terms}
    is_complete = all(wholes[i].is_complete for i in used)
    op = wholes[0].op
    return across._replace(
        fills=tuple(fills), source=source, copies=copies, is_complete=is_complete, op=op, across=across
    )


def _source(across: Plan, wholes: Sequence[Plan]) -> str:
    """Return the weakest source of a joined plan. From weak to strong: override, assumption, inference, the rows."""
    sources = [plan.source for plan in wholes]
    for word in ("override", "assumed", "inferred"):
        if word in sources or across.source == word:
            return word
    return next((word for word in sources if word), across.source)


def _moved(fill: Fill, across: Plan, wholes: Sequence[Plan]) -> list[Fill] | NoPlan:
    term = fill.terms[0]
    plan = wholes[term.chunk]
    start = fill.region.start if across.dim is not None else (0,) * len(across.global_shape)
    if start is None and fill.region.boxes:
        if len(plan.fills) > 1 or plan.fills[0].region.numel != fill.region.numel:
            return NoPlan("per_rank", "its batch lies in blocks, and ranks that share a batch have parts of each block")
        return [fill._replace(terms=tuple(Term(i, factor * term.factor) for i, factor in plan.fills[0].terms))]
    if start is None:
        return []
    moved_fills = []
    for inner in plan.fills:
        if inner.region.run is not None and any(start):
            return NoPlan("per_rank", "slices of a flattened tensor are no part of a batch")
        terms = tuple(
            # The factor multiplies a product once, so only the first term of the product gets it.
            Term(i, factor * term.factor if plan.op != "product" or k == 0 else factor)
            for k, (i, factor) in enumerate(inner.terms)
        )
        moved_fills.append(Fill(_shifted(inner.region, start), terms, _sum(inner.moved, start)))
    return moved_fills


def _reduced(fill: Fill, wholes: Sequence[Plan]) -> list[Fill] | NoPlan:
    chosen = [wholes[term.chunk] for term in fill.terms]
    if any(plan.op != "sum" for plan in chosen):
        return NoPlan("per_rank", f"a sum of tensors that are reduced by {chosen[0].op} cannot be computed in one step")
    regions = [{inner.region: inner for inner in plan.fills} for plan in chosen]
    if any(some.keys() != regions[0].keys() for some in regions):
        return NoPlan("per_rank", "tensors that would be added up are cut in different ways")
    return [
        inner._replace(
            terms=tuple(
                Term(i, factor * term.factor)
                for term, some in zip(fill.terms, regions, strict=True)
                for i, factor in some[region].terms
            )
        )
        for region, inner in regions[0].items()
    ]


def _shifted(region: Region, by: Ints) -> Region:
    if not any(by):
        return region
    boxes = tuple(Box(_sum(box.start, by) or (), box.shape, box.local_start) for box in region.boxes)
    return region._replace(boxes=boxes)


def _sum(first: Ints | None, second: Ints) -> Ints | None:
    if first is None:
        return second if any(second) else None
    return tuple(a + b for a, b in zip(first, second, strict=True))


def _inferred(chunks: Sequence[RankChunk], numbers: Sequence[int], infer: Infer) -> Plan | NoPlan:
    own = [chunks[i] for i in numbers]
    dim = infer(own)
    if isinstance(dim, NoPlan):
        return dim
    plan = renumbered(concatenated(own, dim, ()), tuple(numbers))
    return plan._replace(source="inferred", dim=None)
