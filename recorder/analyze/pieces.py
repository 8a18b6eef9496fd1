"""Owns how a question about a whole run is cut into pieces, ranges of steps, and how these are worked on.

The pieces are the same wherever they are worked on, and so is the order in which answers are put together: no bit of an
answer depends on the place. Must never hold the answers of more than a few pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from ..read.run import Run
from ..read.view import GlobalView, cut

MAX_ROWS = 200_000
"""Rows of a piece, of all ranks: what bounds the memory for their columns."""
MAX_BYTES = 256 << 20
"""Payload of a piece, decoded and of all ranks: a second of work. A single step may have more of both."""

T = TypeVar("T")
Steps = tuple[int, int]


class Spread(Protocol):
    """Works on pieces, here or elsewhere."""

    def __call__(
        self, make: Callable[..., Callable[..., T]], arguments: tuple[Any, ...], pieces: Iterable[tuple[Any, ...]]
    ) -> Iterator[T]:
        """The answers, in the order of the pieces; few are there before they are asked for.

        Args:
            make: makes what is called with each piece; once in each place. A class or a function of a module.
            arguments: for `make`; each a run, a tuple of runs, or plain data.
            pieces: arguments for one call each.
        """


def here(
    make: Callable[..., Callable[..., T]], arguments: tuple[Any, ...], pieces: Iterable[tuple[Any, ...]]
) -> Iterator[T]:
    """Work on pieces in this thread, one after the other."""
    work = make(*arguments)
    for piece in pieces:
        yield work(*piece)


def global_pieces(view: GlobalView) -> list[Steps]:
    """The pieces of a run's global view."""
    return view.windows(MAX_ROWS, MAX_BYTES)


class OwnPiece(NamedTuple):
    """Some steps of one attempt."""

    attempt: int
    first: int
    last: int


def own_pieces(run: Run) -> list[OwnPiece]:
    """The pieces of the rows as the ranks recorded them, in their order: by attempt, then by steps."""
    sizes_of: dict[int, dict[int, tuple[int, int]]] = {}
    for writer in run.writers:
        for shard in writer.shards:
            for batch in shard.columns(["attempt", "step", "payload_bytes"]):
                attempts, steps = (batch.column(name).to_numpy() for name in ("attempt", "step"))
                nbytes = batch.column("payload_bytes").fill_null(0).to_numpy()
                for attempt in np.unique(attempts).tolist():
                    of_attempt = attempts == attempt
                    known = sizes_of.setdefault(attempt, {})
                    found, places, counts = np.unique(steps[of_attempt], return_inverse=True, return_counts=True)
                    totals = np.zeros(len(found), np.int64)
                    np.add.at(totals, places.reshape(-1), nbytes[of_attempt])
                    for step, rows, total in zip(found.tolist(), counts.tolist(), totals.tolist(), strict=True):
                        before = known.get(step, (0, 0))
                        known[step] = before[0] + rows, before[1] + total
    return [
        OwnPiece(attempt, first, last)
        for attempt, of_steps in sorted(sizes_of.items())
        for first, last in cut(of_steps, MAX_ROWS, MAX_BYTES)
    ]
