"""The types of assembly: chunks, and the plan that makes one tensor of them, or the reason why there is none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from .regions import Ints, Region

RANK_BOUND = {
    "no_layout": "it is a chunk of a tensor in which its position is not known",
    "inner_of": "it is a part of a composite tensor, which means nothing without the rank's other parts",
}
"""Members of a row's note that keep its chunk with its rank, and why."""
MAX_NAMED = 8
"""Ranks that a message names."""


class RankChunk(NamedTuple):
    """One rank's local tensor, as its row describes it. Texts are the row's JSON."""

    rank: int
    dtype: str
    shape: Ints
    global_shape: Ints | None = None
    offsets: Ints | None = None
    placements: str | None = None
    mesh: str | None = None
    rank_bound: str | None = None
    """The member of `RANK_BOUND` that its row has."""
    micro_step: int = 0
    """The number of the micro-batch, where a pipeline ran the batch in several."""


class Term(NamedTuple):
    """A summand: the number of a chunk, and the factor of its values."""

    chunk: int
    factor: float = 1.0


class Fill(NamedTuple):
    """A region of the global tensor and the chunks that make it; a single chunk with factor 1 is copied."""

    region: Region
    terms: tuple[Term, ...]
    moved: Ints | None = None
    """The distance of the region's start from where its chunk's fingerprint has it; None where both are the same."""

    @property
    def is_copy(self) -> bool:
        return len(self.terms) == 1 and self.terms[0].factor == 1.0


class Plan(NamedTuple):
    """The way in which chunks make one tensor."""

    global_shape: Ints
    fills: tuple[Fill, ...]
    source: str
    """The row's `layout_source`."""
    op: str = "sum"
    copies: tuple[Ints, ...] = ()
    """Groups of chunks that must hold the same values, by number; the first of a group stands in a fill."""
    scale: str | None = None
    """The row's `scale`."""
    dtype: str | None = None
    """The dtype of the result, where it is not that of the chunks."""
    is_complete: bool = True
    """False where chunks are missing that would have covered the rest."""
    dim: int | None = None
    """The dim along which batches were laid end to end."""
    note: tuple[tuple[str, Any], ...] = ()
    """More members for the row's `note`."""

    across: Plan | None = None
    """Where ranks share a batch: the plan that joins the groups' tensors, as if each were a single rank's."""
    needs_all: bool = False
    """True where a missing rank might have changed the tensor, although one rank's tensor has all its elements."""

    @property
    def is_replica(self) -> bool:
        """Whether the chunks that are there make the whole tensor, so that any others are copies."""
        is_whole = self.is_complete and self.dim is None and not self.needs_all
        return is_whole and all(fill.is_copy for fill in self.fills)


class NoPlan(NamedTuple):
    """The chunks make no single tensor, and stay with their ranks."""

    kind: str
    """``per_rank``: no rule fits. ``inconsistent``: they contradict each other."""
    why: str


def named(chunks: Sequence[RankChunk], field: str) -> str:
    """Return the value of a field on each rank, for messages."""
    return values_of_ranks(chunks, lambda chunk: list(v) if isinstance(v := getattr(chunk, field), tuple) else v)


def values_of_ranks(chunks: Sequence[RankChunk], value_of: Callable[[RankChunk], object]) -> str:
    """Return a value of each rank's chunk, for messages. Of many ranks some are shown, one for each value."""
    values = [str(value_of(chunk)) for chunk in chunks]
    firsts = set({value: i for i, value in reversed([*enumerate(values)])}.values())
    shown = sorted([*sorted(firsts), *(i for i in range(len(chunks)) if i not in firsts)][:MAX_NAMED])
    return ", ".join(f"rank {chunks[i].rank} {values[i]}" for i in shown)
