"""Which values of two runs belong together. Never reads a payload, never loops over rows."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ...numerics.keys import VALUE_KEY, Integers, common_ids, join
from ...numerics.moments import integers

PART = "part_of_batch"
"""A column: on which part of the batch the rank of a row worked."""


class Alignment(NamedTuple):
    """Positions in two tables of rows of global views."""

    a: Integers
    """For each pair the row of the one run, in its order."""
    b: Integers
    only_a: Integers
    """Rows of values that the other run does not have."""
    only_b: Integers
    on_other_parts: Integers = np.zeros(0, np.int64)
    """Rows of the one run, of single ranks, that both runs have and that cannot be compared: the ranks worked on other
    parts of the batch, and neither run has the value of all ranks."""


def align(a: Any, b: Any) -> Alignment:
    """Pair the rows of two tables by all that names a value.

    A row of all ranks is paired with its like; where the other run has the value only rank by rank (replicas differ,
    no layout fits), with each of these that has its shape. A rank's row beside one of all ranks says nothing new; it is
    paired only with that of the rank which worked on the same part of the batch.
    """
    id_a, id_b = common_ids(a, b, VALUE_KEY)
    rank_a, rank_b = (integers(table.column("rank")) for table in (a, b))
    num_ids = int(max(id_a.max(initial=-1), id_b.max(initial=-1))) + 1
    width = int(max(rank_a.max(initial=-1), rank_b.max(initial=-1))) + 2
    left, right = join(id_a * width + rank_a + 1, id_b * width + rank_b + 1)
    is_same = _have_one_part(a, b, left, right) | (rank_a[left] < 0)
    has_whole_a, has_whole_b = (_flags(ids[ranks < 0], num_ids) for ids, ranks in ((id_a, rank_a), (id_b, rank_b)))
    # Of the values that only one run has as a whole.
    whole_a = np.flatnonzero((rank_a < 0) & ~has_whole_b[id_a])
    whole_b = np.flatnonzero((rank_b < 0) & ~has_whole_a[id_b])
    pieces_a = np.flatnonzero((rank_a >= 0) & ~has_whole_a[id_a] & has_whole_b[id_a])
    pieces_b = np.flatnonzero((rank_b >= 0) & ~has_whole_b[id_b] & has_whole_a[id_b])
    one, two = join(id_a[whole_a], id_b[pieces_b])
    three, four = join(id_a[pieces_a], id_b[whole_b])
    cross_a = np.concatenate([whole_a[one], pieces_a[three]])
    cross_b = np.concatenate([pieces_b[two], whole_b[four]])
    is_alike = _shapes(a, b, cross_a, cross_b)
    pairs_a = np.concatenate([left[is_same], cross_a[is_alike]])
    pairs_b = np.concatenate([right[is_same], cross_b[is_alike]])
    order = np.lexsort((pairs_b, pairs_a))
    is_other = _flags(id_a[left[~is_same]], num_ids)  # where some ranks worked on other parts, so did the rest
    is_said_a = _flags(pairs_a, len(id_a)) | ((rank_a >= 0) & (has_whole_a | is_other)[id_a])
    is_said_b = _flags(pairs_b, len(id_b)) | ((rank_b >= 0) & (has_whole_b | is_other)[id_b])
    is_on_other_part = (rank_a >= 0) & (is_other & ~has_whole_a & ~has_whole_b)[id_a] & ~_flags(pairs_a, len(id_a))
    return Alignment(
        pairs_a[order],
        pairs_b[order],
        np.flatnonzero(~is_said_a),
        np.flatnonzero(~is_said_b),
        np.flatnonzero(is_on_other_part),
    )


def _have_one_part(a: Any, b: Any, rows_a: Integers, rows_b: Integers) -> npt.NDArray[np.bool_]:
    """Whether the ranks of paired rows worked on the same part of the batch, or nothing says on which."""
    if PART not in a.column_names or PART not in b.column_names:
        return np.ones(len(rows_a), np.bool_)
    parts_a, parts_b = common_ids(a, b, (PART,))
    is_open_a, is_open_b = (table.column(PART).is_null().to_numpy() for table in (a, b))
    return np.asarray((parts_a[rows_a] == parts_b[rows_b]) | is_open_a[rows_a] | is_open_b[rows_b])


def _flags(indices: Integers, length: int) -> npt.NDArray[np.bool_]:
    flags = np.zeros(length, np.bool_)
    flags[indices] = True
    return flags


def _shapes(a: Any, b: Any, rows_a: Integers, rows_b: Integers) -> npt.NDArray[np.bool_]:
    """Whether the rows of pairs are of one shape."""
    shapes_a, shapes_b = common_ids(a, b, ("shape",))
    return np.asarray(shapes_a[rows_a] == shapes_b[rows_b])
