"""Ranges of steps, into which a question about a whole run is split, and the mappers that answer it range by range.

The ranges are the same wherever they are worked on, and the answers are put together in the order of the ranges: no bit
of an answer depends on the machine. A mapper must never hold the answers of more than a few ranges.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from ..globalview.run import Run
from ..globalview.view import GlobalView
from ..globalview.windows import cut_steps

MAX_ROWS = 200_000
"""Rows in a range, of all ranks: this bounds the memory for their columns."""
MAX_BYTES = 256 << 20
"""Payload in a range, decoded and of all ranks: a second of work. A single step may have more of both."""

T = TypeVar("T")
Steps = tuple[int, int]


class Mapper(Protocol):
    """Answers a question range by range, in this process or in others."""

    def __call__(
        self, make: Callable[..., Callable[..., T]], arguments: tuple[Any, ...], ranges: Iterable[tuple[Any, ...]], /
    ) -> Iterator[T]:
        """Yield the answers in the order of the ranges; few answers are computed before they are asked for.

        Args:
            make: makes the function that is called with each range; called once in each process. A class or a
                function of a module.
            arguments: the arguments of `make`; each a run, a tuple of runs, or plain data.
            ranges: the arguments of one call each.
        """


def map_serially(
    make: Callable[..., Callable[..., T]], arguments: tuple[Any, ...], ranges: Iterable[tuple[Any, ...]], /
) -> Iterator[T]:
    """Work on the ranges in this thread, one after the other: the mapper where there is no cluster."""
    work = make(*arguments)
    for arguments_of_one in ranges:
        yield work(*arguments_of_one)


def global_step_ranges(view: GlobalView) -> list[Steps]:
    """Ranges of steps that cover a run's global view, ascending."""
    return view.windows(MAX_ROWS, MAX_BYTES)


class AttemptSteps(NamedTuple):
    """A range of steps of one attempt: from `first` up to, but not including, `last`."""

    attempt: int
    first: int
    last: int


def attempt_step_ranges(run: Run) -> list[AttemptSteps]:
    """Ranges of steps that cover the rows as the ranks recorded them, by attempt, then ascending."""
    sizes_of: dict[int, dict[int, tuple[int, int]]] = {}
    for writer in run.writers:
        for shard in writer.shards:
            for batch in shard.columns(["attempt", "step", "payload_bytes"]):
                attempts, steps = (batch.column(name).to_numpy() for name in ("attempt", "step"))
                nbytes = batch.column("payload_bytes").fill_null(0).to_numpy()
                for attempt in np.unique(attempts).tolist():
                    of_attempt = attempts == attempt
                    known = sizes_of.setdefault(attempt, {})
                    distinct, indices, counts = np.unique(steps[of_attempt], return_inverse=True, return_counts=True)
                    totals = np.zeros(len(distinct), np.int64)
                    np.add.at(totals, indices.reshape(-1), nbytes[of_attempt])
                    for step, rows, total in zip(distinct.tolist(), counts.tolist(), totals.tolist(), strict=True):
                        before = known.get(step, (0, 0))
                        known[step] = before[0] + rows, before[1] + total
    return [
        AttemptSteps(attempt, first, last)
        for attempt, of_steps in sorted(sizes_of.items())
        for first, last in cut_steps(of_steps, MAX_ROWS, MAX_BYTES)
    ]
