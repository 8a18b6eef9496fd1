"""Owns the words of assembly: pieces, and the plan that makes one tensor of them, or why there is none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from .regions import Ints, Region

MAX_NAMED = 8
"""Ranks that a message names."""


class Piece(NamedTuple):
    """One rank's local tensor, as its row describes it. Texts are the row's JSON."""

    rank: int
    dtype: str
    shape: Ints
    global_shape: Ints | None = None
    offsets: Ints | None = None
    placements: str | None = None
    mesh: str | None = None
    alone: str | None = None
    """Why its row says that it has no place beside other ranks' pieces, or that it was inside of another tensor:
    ``no_layout``, ``inner_of``."""
    micro_step: int = 0
    """Which slice of the batch, where a pipeline ran it slice by slice."""


class Term(NamedTuple):
    """A summand: the number of a piece, and what its values are multiplied with."""

    piece: int
    factor: float = 1.0


class Part(NamedTuple):
    """A region of the global tensor and the pieces that make it; one with factor 1 is copied."""

    region: Region
    terms: tuple[Term, ...]
    moved: Ints | None = None
    """Where the region begins, from where its piece's fingerprint has it begin; None where that is the same."""

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

    across: Plan | None = None
    """Where ranks share a batch: how their tensors are one, as if each were a single rank's."""
    needs_all: bool = False
    """Ranks that are missing might have changed it, although one rank's tensor has all its elements."""

    @property
    def is_replica(self) -> bool:
        """Whether those that are there are all of it, and more would be copies."""
        is_whole = self.is_complete and self.dim is None and not self.needs_all
        return is_whole and all(part.is_copy for part in self.parts)


class Apart(NamedTuple):
    """The pieces make no single tensor, and stay with their ranks."""

    kind: str
    """``per_rank``: no rule fits. ``inconsistent``: they contradict each other."""
    why: str


def named(pieces: Sequence[Piece], field: str) -> str:
    """What each rank says of something, for messages."""
    return told(pieces, lambda piece: list(v) if isinstance(v := getattr(piece, field), tuple) else v)


def told(pieces: Sequence[Piece], say: Callable[[Piece], object]) -> str:
    """The same of what is said of a piece; of many ranks a few, among them one of each word."""
    words = [str(say(piece)) for piece in pieces]
    firsts = set({word: i for i, word in reversed([*enumerate(words)])}.values())
    few = sorted([*sorted(firsts), *(i for i in range(len(pieces)) if i not in firsts)][:MAX_NAMED])
    return ", ".join(f"rank {pieces[i].rank} {words[i]}" for i in few)
