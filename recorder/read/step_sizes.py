"""How many rows and bytes each step of some rows has, and ranges of steps that are cut by them; found from the indexes.

Whoever reads a run piece by piece cuts it here: the global view, `merge`, and every question about a whole run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc

Ints = npt.NDArray[np.int64]
SIZE_COLUMNS = ("step", "units", "payload_bytes")
"""The columns that `StepSizes.of` looks at; without `payload_bytes` every step has 0 bytes."""
_ROW_BYTES = 350
"""Bytes of a row in memory, without what it says of each unit."""


class StepRange(NamedTuple):
    """Steps that are read at once."""

    first: int
    end: int
    """The step behind the last one."""
    num_rows: int
    num_bytes: int


class StepSizes(NamedTuple):
    """The steps of some rows, ascending, with how many rows and bytes each of them has."""

    steps: Ints
    rows: Ints
    """A row with sums of its units counts as so many rows as take as much memory."""
    bytes: Ints
    """Bytes of the payloads, decoded."""

    @classmethod
    def of(cls, batches: Sequence[Any]) -> StepSizes:
        """The sizes of the rows of some batches, which have `SIZE_COLUMNS`."""
        every = np.concatenate([*(batch.column("step").to_numpy() for batch in batches), np.zeros(0, np.int64)])
        steps, indices, counts = np.unique(every, return_inverse=True, return_counts=True)
        num_bytes = np.zeros(len(steps), np.int64)
        if len(every) and "payload_bytes" in batches[0].schema.names:
            payloads = [batch.column("payload_bytes").fill_null(0).to_numpy() for batch in batches]
            np.add.at(num_bytes, indices.reshape(-1), np.concatenate(payloads))
        if any(batch.column("units").null_count < batch.num_rows for batch in batches):
            lengths = [pc.binary_length(batch.column("units")).fill_null(0).to_numpy() for batch in batches]
            unit_bytes = np.zeros(len(steps), np.int64)
            np.add.at(unit_bytes, indices.reshape(-1), np.concatenate(lengths))
            counts = counts + unit_bytes // _ROW_BYTES
        return cls(steps, counts, num_bytes)

    @classmethod
    def sum(cls, several: Iterable[StepSizes]) -> StepSizes:
        """The sizes of the rows of several together."""
        parts = [cls(*(np.zeros(0, np.int64),) * 3), *several]
        steps, indices = np.unique(np.concatenate([one.steps for one in parts]), return_inverse=True)
        rows, num_bytes = np.zeros((2, len(steps)), np.int64)
        np.add.at(rows, indices.reshape(-1), np.concatenate([one.rows for one in parts]))
        np.add.at(num_bytes, indices.reshape(-1), np.concatenate([one.bytes for one in parts]))
        return cls(steps, rows, num_bytes)

    def cut(self, max_rows: int, max_bytes: int | None = None) -> Iterator[StepRange]:
        """Half-open ranges that cover the steps, ascending; only a range of one step may exceed the bounds."""
        first, end, num_rows, num_bytes = None, 0, 0, 0
        for step, more_rows, more_bytes in zip(*(column.tolist() for column in self), strict=True):
            is_full = num_rows + more_rows > max_rows or (max_bytes is not None and num_bytes + more_bytes > max_bytes)
            if first is not None and is_full:
                yield StepRange(first, step, num_rows, num_bytes)
                first, num_rows, num_bytes = None, 0, 0
            first = step if first is None else first
            end, num_rows, num_bytes = step + 1, num_rows + more_rows, num_bytes + more_bytes
        if first is not None:
            yield StepRange(first, end, num_rows, num_bytes)
