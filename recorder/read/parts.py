"""Owns which parts of the batch a value's pieces are of: of a rank each, of ranks together, or of micro-batches."""

from __future__ import annotations

from typing import NamedTuple

from ..layout.levels import Block
from ..layout.plans import Apart, Piece
from .grid import Group


class Parts(NamedTuple):
    """The parts of the batch that pieces are of."""

    pieces: tuple[int, ...]
    """The first piece of each part."""
    ranks: tuple[int, ...]
    """Its rank."""
    micro_steps: tuple[int, ...]
    expected: tuple[int, ...]
    """A rank of each part that there should be."""
    num_expected: int

    @property
    def has_slices(self) -> bool:
        """Whether they are micro-batches of a pipeline."""
        return any(self.micro_steps)


def parts_of_batch(
    pieces: list[Piece], blocks: tuple[Block, ...] | Apart | None, group: Group, expected: tuple[int, ...]
) -> Parts:
    """The parts of the batch that a value's pieces are of.

    Args:
        pieces: in data-parallel order.
        blocks: pieces of ranks that share a part, where ranks do.
        group: of the value's module.
        expected: ranks that should have a piece.
    """
    ranks = tuple(piece.rank for piece in pieces)
    micro_steps = tuple(piece.micro_step for piece in pieces)
    if blocks is None or isinstance(blocks, Apart):
        return Parts(tuple(range(len(pieces))), ranks, micro_steps, expected, len(expected))
    at = tuple(block.units[0][0] for block in blocks)
    leads = tuple(ranks[i] for i in at)
    others = (some[0] for some in group.instances if not set(some) & set(leads))
    num_ranks = len(group.instances) or (len(expected) if pieces[0].mesh is None else 0)
    num_expected = max(len(blocks), num_ranks * len(set(micro_steps)))
    return Parts(at, leads, tuple(micro_steps[i] for i in at), (*dict.fromkeys(leads), *others), num_expected)
