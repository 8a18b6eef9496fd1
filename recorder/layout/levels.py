"""Owns values of two levels: ranks that share a part of the batch make one tensor, and those tensors become one.

Must never take plain tensors that differ for one, and never look at values beyond whether they are equal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from .placement import mesh_of, place
from .plans import Apart, Part, Piece, Plan, Term
from .regions import Box, Ints, Region, overlap, whole
from .rules import Kinship, Values, concatenated, copies_unless

Groups = tuple[Ints, ...]
Among = Callable[[Sequence[int]], Values]
"""What is known of the values of some pieces, by their numbers."""
Infer = Callable[[Sequence[Piece]], "int | Apart"]
"""Along which dim plain pieces of ranks that share a batch, which hold different values, are cut."""


class Block(NamedTuple):
    """The pieces of ranks that share a part of the batch."""

    units: Groups
    """Numbers of the pieces that are placed over one mesh, or of one plain piece."""
    ranks: Ints
    """Which should have a piece."""


def split(pieces: Sequence[Piece], instances: Groups, expected: Ints) -> tuple[Block, ...] | Apart | None:
    """Blocks in data-parallel order; None where there is one level alone.

    Args:
        pieces: in data-parallel order, of one rank by micro-batch.
        instances: ranks that share a part of the batch, in data-parallel order; none where no manifest says so.
        expected: ranks that should have a piece.
    """
    meshes = [_mesh_ranks(piece, instances) for piece in pieces]
    if (problem := _contradiction(pieces, meshes)) is not None:
        return problem
    told = {mesh for mesh in meshes if mesh}
    has_slices = len({piece.micro_step for piece in pieces}) > 1
    is_one_mesh = len(told) == 1 and all(meshes) and set(expected) <= set(meshes[0])
    if not has_slices and (is_one_mesh or (not instances and len(told) < 2)):
        return None
    units: dict[tuple[int, Ints], list[int]] = {}
    for i, (piece, mesh) in enumerate(zip(pieces, meshes, strict=True)):
        units.setdefault((piece.micro_step, mesh or (piece.rank,)), []).append(i)
    return _in_blocks(pieces, units, instances)


def _in_blocks(
    pieces: Sequence[Piece], units: dict[tuple[int, Ints], list[int]], instances: Groups
) -> tuple[Block, ...] | Apart:
    instance_of = {rank: number for number, ranks in enumerate(instances) for rank in ranks}
    if instances and (strange := next((p.rank for p in pieces if p.rank not in instance_of), None)) is not None:
        shown = ", ".join(str(list(ranks)) for ranks in instances[:4])
        return Apart("inconsistent", f"rank {strange} is in no mesh of this model ({shown})")
    spans = any(len({instance_of.get(rank) for rank in mesh}) > 1 for _, mesh in units) and instances
    found: dict[tuple[int, int], list[Ints]] = {}
    ranks_of: dict[tuple[int, int], Ints] = {}
    for (micro_step, mesh), numbers in units.items():
        first = pieces[numbers[0]].rank
        # Meshes across instances hold copies of a parameter, as FSDP2 keeps of one that tensor parallel does not cut.
        place_of = (0 if spans else instance_of[first]) if instances else min(numbers)
        key = place_of, micro_step
        found.setdefault(key, []).append(tuple(numbers))
        known = instances[place_of] if instances and not spans else mesh
        ranks_of[key] = tuple(dict.fromkeys((*ranks_of.get(key, ()), *known)))
    return tuple(Block(tuple(found[key]), ranks_of[key]) for key in sorted(found))


def _mesh_ranks(piece: Piece, instances: Groups) -> Ints:
    """The ranks that a piece's placements are over; none of a plain piece, and where nothing tells."""
    if piece.global_shape is None:
        return ()
    shape, _, ranks = mesh_of(piece)
    if ranks:
        return ranks
    return next((some for some in instances if piece.rank in some and len(some) == math.prod(shape)), ())


def _contradiction(pieces: Sequence[Piece], meshes: Sequence[Ints]) -> Apart | None:
    """Ranks that name each other's meshes differently."""
    of_rank = {piece.rank: mesh for piece, mesh in zip(pieces, meshes, strict=True) if mesh}
    if len(set(of_rank.values())) == 1 and all(rank in mesh for rank, mesh in of_rank.items()):
        return None
    for rank, mesh in of_rank.items():
        if rank not in mesh:
            return Apart("inconsistent", f"rank {rank} says it is on a mesh of ranks {list(mesh)}")
        other = next((one for one in mesh if of_rank.get(one, mesh) != mesh), None)
        if other is not None:
            shown = f"rank {rank} {list(mesh)}, rank {other} {list(of_rank[other])}"
            return Apart("inconsistent", f"ranks disagree on the mesh: {shown}")
    return None


def within(pieces: Sequence[Piece], block: Block, *, is_state: bool, among: Among, infer: Infer) -> Plan | Apart:
    """The one tensor of ranks that share a part of the batch; its terms are numbers of all `pieces`.

    Args:
        pieces: of all ranks.
        block: whose tensor it is.
        is_state: of a parameter and what goes with it: replicas unless they say more, to be compared by the caller.
        among: asked only where pieces might be replicas.
        infer: asked only of plain pieces that are no replicas, or of which that is not known.
    """
    plans: list[Plan] = []
    for unit in block.units:
        own = [pieces[i] for i in unit]
        found = place(own, len(own)) if own[0].global_shape is not None else _plain(own[0])
        if isinstance(found, Apart):
            return found
        plans.append(renumbered(found, unit))
    is_plain = all(pieces[unit[0]].global_shape is None for unit in block.units)
    if len(plans) == 1:
        if is_plain and len(block.ranks) > 1 and not is_state:
            only, others = pieces[block.units[0][0]].rank, list(block.ranks)
            return Apart("per_rank", f"ranks {others} share a batch, and of them rank {only} alone has a plain tensor")
        return plans[0]
    if is_state:
        return _overlay(plans, "inferred" if is_plain else plans[0].source)
    values = OfWholes(plans, among)
    kinship = values.kinship()
    if kinship is Kinship.COPIES:
        return copies_unless(values) or _overlay(plans, "inferred")
    differ: Plan | Apart = Apart(
        "per_rank", f"tensors over several meshes differ, of ranks {list(block.ranks)} that share a batch"
    )
    if is_plain:
        differ = _inferred(pieces, [unit[0] for unit in block.units], infer)
        if isinstance(differ, Plan):
            return differ
    # Of constants, and of what was never finite, nothing else says that they are pieces.
    return _overlay(plans, "inferred") if kinship is Kinship.UNKNOWN and values.are_equal() else differ


def _plain(piece: Piece) -> Plan:
    return Plan(piece.shape, (Part(whole(piece.shape), (Term(0),)),), "")


def renumbered(plan: Plan, numbers: Ints) -> Plan:
    """A plan of some pieces as one of all of them, where `numbers` says which they are."""
    parts = tuple(
        part._replace(terms=tuple(Term(numbers[term.piece], term.factor) for term in part.terms)) for part in plan.parts
    )
    return plan._replace(parts=parts, copies=tuple(tuple(numbers[i] for i in some) for some in plan.copies))


def corresponding(plans: Sequence[Plan]) -> list[Ints] | None:
    """Of tensors that are cut alike, the pieces that hold the same place in each; None where they are not."""
    first = {part.region: part.terms for part in plans[0].parts}
    found: dict[tuple[Region, int], list[int]] = {
        (region, k): [term.piece] for region, terms in first.items() for k, term in enumerate(terms)
    }
    for plan in plans[1:]:
        others = {part.region: part.terms for part in plan.parts}
        if {region: len(terms) for region, terms in others.items()} != {r: len(terms) for r, terms in first.items()}:
            return None
        for region, terms in others.items():
            for k, term in enumerate(terms):
                found[region, k].append(term.piece)
    return [tuple(some) for some in found.values()]


class OfWholes:
    """What is known of the values of whole tensors, each of several pieces: what is known of all that correspond."""

    def __init__(self, wholes: Sequence[Plan], among: Among) -> None:
        self._wholes = wholes
        self._among = among

    def kinship(self) -> Kinship:
        found = {values.kinship() for values in self._pairs()}
        if Kinship.OWN in found or not found:
            return Kinship.OWN
        return Kinship.COPIES if Kinship.COPIES in found else Kinship.UNKNOWN

    def are_equal(self) -> bool:
        pairs = self._pairs()
        return bool(pairs) and all(values.are_equal() for values in pairs)

    def are_unequal(self) -> bool:
        return any(values.are_unequal() for values in self._pairs())

    def batch_dim(self) -> int | None:
        return next((values.batch_dim() for values in self._pairs()), None)

    def _pairs(self) -> list[Values]:
        """Of each place of the tensor, what all of them have there; nothing where they are not cut alike."""
        if len({plan.global_shape for plan in self._wholes}) > 1:
            return []
        return [self._among(some) for some in corresponding(self._wholes) or ()]


def _overlay(plans: Sequence[Plan], source: str) -> Plan | Apart:
    """One tensor of which there are several copies, some perhaps with holes."""
    plans = sorted(plans, key=lambda plan: not plan.is_complete)
    base = plans[0]
    inner = {some[0]: some for plan in plans for some in plan.copies}
    parts: dict[Region, Part] = {}
    replicas: dict[tuple[Region, int], list[int]] = {}
    for plan in plans:
        if plan.global_shape != base.global_shape:
            shapes = f"{list(base.global_shape)} and {list(plan.global_shape)}"
            return Apart("inconsistent", f"copies of it are of different shapes: {shapes}")
        for part in plan.parts:
            chosen = parts.setdefault(part.region, part)
            for k, term in enumerate(part.terms if len(part.terms) == len(chosen.terms) else ()):
                replicas.setdefault((part.region, k), []).extend(inner.get(term.piece, (term.piece,)))
    regions = list(parts)
    try:
        is_alike = len(regions) == len(base.parts) if base.is_complete else overlap(regions, base.global_shape) is None
    except OverflowError as error:
        return Apart("per_rank", str(error))
    if not is_alike:
        return Apart("per_rank", "copies of it are cut in different ways, and their pieces cannot be compared")
    is_whole = base.is_complete or (
        sum(region.numel for region in regions) == math.prod(base.global_shape)
        and all(len(part.terms) == 1 for part in parts.values())
    )
    copies = tuple(tuple(some) for some in replicas.values() if len(some) > 1)
    return base._replace(parts=tuple(parts.values()), source=source, copies=copies, is_complete=is_whole)


def compose(across: Plan, wholes: Sequence[Plan]) -> Plan | Apart:
    """One plan out of two levels.

    Args:
        across: how the blocks' tensors are one; its terms are numbers of `wholes`.
        wholes: of each block, in its order; their terms are numbers of pieces.
    """
    if len({plan.op for plan in wholes}) > 1:
        return Apart("inconsistent", f"they are reduced in different ways: {', '.join(plan.op for plan in wholes)}")
    source = _source(across, wholes)
    if across.copies:
        base = _overlay(wholes, source)
        if isinstance(base, Apart):
            return base
        return base._replace(note=across.note, needs_all=across.needs_all, across=across)
    parts: list[Part] = []
    copies = tuple(some for plan in wholes for some in plan.copies)
    for part in across.parts:
        found = _moved(part, across, wholes) if len(part.terms) == 1 else _reduced(part, wholes)
        if isinstance(found, Apart):
            return found
        parts += found
    used = {term.piece for part in across.parts for term in part.terms}
    is_complete = all(wholes[i].is_complete for i in used)
    op = wholes[0].op
    return across._replace(
        parts=tuple(parts), source=source, copies=copies, is_complete=is_complete, op=op, across=across
    )


def _source(across: Plan, wholes: Sequence[Plan]) -> str:
    """The least that the layout hangs on: what was assumed of the batch, then what was inferred, then what rows say."""
    sources = [plan.source for plan in wholes]
    for word in ("override", "assumed", "inferred"):
        if word in sources or across.source == word:
            return word
    return next((word for word in sources if word), across.source)


def _moved(part: Part, across: Plan, wholes: Sequence[Plan]) -> list[Part] | Apart:
    """The parts of one block's tensor, where this lies in the whole."""
    term = part.terms[0]
    plan = wholes[term.piece]
    start = part.region.start if across.dim is not None else (0,) * len(across.global_shape)
    if start is None:
        return []
    found = []
    for inner in plan.parts:
        if inner.region.run is not None and any(start):
            return Apart("per_rank", "slices of a flattened tensor are no part of a batch")
        terms = tuple(
            # a product takes a factor once
            Term(i, factor * term.factor if plan.op != "product" or k == 0 else factor)
            for k, (i, factor) in enumerate(inner.terms)
        )
        found.append(Part(_shifted(inner.region, start), terms, _sum(inner.moved, start)))
    return found


def _reduced(part: Part, wholes: Sequence[Plan]) -> list[Part] | Apart:
    """A sum of several blocks' tensors, place by place."""
    chosen = [wholes[term.piece] for term in part.terms]
    if any(plan.op != "sum" for plan in chosen):
        return Apart("per_rank", f"a sum of what is reduced by {chosen[0].op} cannot be computed in one go")
    regions = [{inner.region: inner for inner in plan.parts} for plan in chosen]
    if any(some.keys() != regions[0].keys() for some in regions):
        return Apart("per_rank", "tensors that would be added up are cut in different ways")
    return [
        inner._replace(
            terms=tuple(
                Term(i, factor * term.factor)
                for term, some in zip(part.terms, regions, strict=True)
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


def _sum(one: Ints | None, two: Ints) -> Ints | None:
    if one is None:
        return two if any(two) else None
    return tuple(a + b for a, b in zip(one, two, strict=True))


def _inferred(pieces: Sequence[Piece], numbers: Sequence[int], infer: Infer) -> Plan | Apart:
    """Plain pieces laid end to end along a dim that something else tells."""
    own = [pieces[i] for i in numbers]
    dim = infer(own)
    if isinstance(dim, Apart):
        return dim
    plan = renumbered(concatenated(own, dim, ()), tuple(numbers))
    return plan._replace(source="inferred", dim=None)
