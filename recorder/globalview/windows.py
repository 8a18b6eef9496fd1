"""Ranges of steps that are read at once, cut by how many rows and bytes the steps have; found from the indexes."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc

from ..read.shards.rows import ShardRows

Ints = npt.NDArray[np.int64]
_ROW_BYTES = 350
"""Bytes of a row in memory, without what it says of each unit."""


def cut_steps(
    sizes_of: Mapping[int, tuple[int, int]], max_rows: int, max_bytes: int | None = None
) -> list[tuple[int, int]]:
    """Half-open ranges that cover steps, from the rows and bytes of each; see `GlobalView.windows`."""
    ranges: list[tuple[int, int]] = []
    first, num_rows, num_bytes = None, 0, 0
    for step in sorted(sizes_of):
        more_rows, more_bytes = sizes_of[step]
        is_full = num_rows + more_rows > max_rows or (max_bytes is not None and num_bytes + more_bytes > max_bytes)
        if first is not None and is_full:
            ranges.append((first, step))
            first, num_rows, num_bytes = None, 0, 0
        first = step if first is None else first
        num_rows, num_bytes = num_rows + more_rows, num_bytes + more_bytes
    return [*ranges, (first, max(sizes_of) + 1)] if first is not None else []


def step_sizes(shard: ShardRows, *, has_bytes: bool) -> tuple[Ints, Ints, Ints]:
    """The steps of which a shard has rows, ascending, how many, and the bytes of their payloads or zeros.

    A row with sums of its units counts as so many rows as take as much memory.
    """
    columns = shard.columns(["step", "units", *(["payload_bytes"] if has_bytes else [])])
    every = np.concatenate([*(batch.column("step").to_numpy() for batch in columns), np.zeros(0, np.int64)])
    steps, indices, counts = np.unique(every, return_inverse=True, return_counts=True)
    nbytes = np.zeros(len(steps), np.int64)
    if has_bytes and len(every):
        payloads = [batch.column("payload_bytes").fill_null(0).to_numpy() for batch in columns]
        np.add.at(nbytes, indices.reshape(-1), np.concatenate(payloads))
    if any(batch.column("units").null_count < batch.num_rows for batch in columns):
        lengths = [pc.binary_length(batch.column("units")).fill_null(0).to_numpy() for batch in columns]
        unit_bytes = np.zeros(len(steps), np.int64)
        np.add.at(unit_bytes, indices.reshape(-1), np.concatenate(lengths))
        counts = counts + unit_bytes // _ROW_BYTES
    return steps, counts, nbytes
