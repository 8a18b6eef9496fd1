"""What one run has by how it is laid out: what pipeline stages hand to each other, what is recomputed, micro-steps.

What a stage is handed by another, and hands on, has no match in a run that is not cut there. What is recomputed for the
backward has none in a run that kept it. A micro-step has none in a run that takes the same batch in other micro-steps.
Never reads a payload.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pyarrow as pa

from ....columns import HANDED_ON, stage_of
from ....numerics.keys import VALUE_KEY, Integers, common_ids, group_rows, holds
from ....numerics.moments import integers
from .pairs import Side

_SLICED = ("step", "root", "mode")
"""What is counted in micro-steps by itself."""
_WHOLE_KEY = (*(name for name in VALUE_KEY if name != "micro_step"), "rank")
"""What names a value over all micro-steps of its step."""


def comparable(a: Side, b: Side) -> tuple[Side, Side, tuple[int, int]]:
    """Leave out what pipeline stages hand to each other, unless both runs have the same stages.

    Returns:
        The sides, and how many rows of each were left out.

    A row of it is known by its rank, its stage, its micro-batch and its size: of ranks that share a batch, or split it.
    """
    marked = [holds(side.table.column("note"), _is_handed_on) for side in (a, b)]
    if not any(flags.any() for flags in marked):
        return a, b, (0, 0)
    handed_on = [_handed_on(side.table.filter(pa.array(flags))) for side, flags in zip((a, b), marked, strict=True)]
    if handed_on[0] == handed_on[1]:
        return a, b, (0, 0)
    one, two = (s._replace(table=s.table.filter(pa.array(~flags))) for s, flags in zip((a, b), marked, strict=True))
    return one, two, (int(np.count_nonzero(marked[0])), int(np.count_nonzero(marked[1])))


def without_recomputed(a: Side, b: Side) -> tuple[Side, Side, tuple[int, int]]:
    """Leave out what one run alone recomputed for its backward; return the sides, and how many rows of each went."""
    marked = [holds(side.table.column("phase"), "recompute".__eq__) for side in (a, b)]
    if marked[0].any() == marked[1].any():
        return a, b, (0, 0)
    one, two = (s._replace(table=s.table.filter(pa.array(~flags))) for s, flags in zip((a, b), marked, strict=True))
    return one, two, (int(np.count_nonzero(marked[0])), int(np.count_nonzero(marked[1])))


def without_other_micro_steps(a: Side, b: Side) -> tuple[Side, Side, int]:
    """Leave out the micro-steps of a batch that the two runs divide into other numbers of micro-steps.

    Two runs divide one batch where a value has as many elements over all micro-steps of a step in both. A micro-batch
    that one run has lost is therefore still a difference.

    Returns:
        The sides, and how many values of the first one were left out.
    """
    slices = common_ids(a.table, b.table, _SLICED)
    num_slices = 1 + max(int(ids.max(initial=-1)) for ids in slices)
    lasts = [_last_micro_steps(side.table, ids, num_slices) for side, ids in zip((a, b), slices, strict=True)]
    is_uneven = (lasts[0] != lasts[1]) & (lasts[0] >= 0) & (lasts[1] >= 0)
    if not is_uneven.any():
        return a, b, 0
    uneven = [np.flatnonzero(is_uneven[ids] & _has_micro_step(s)) for s, ids in zip((a, b), slices, strict=True)]
    left, right = (side.table.take(pa.array(rows)) for side, rows in zip((a, b), uneven, strict=True))
    wholes = common_ids(left, right, _WHOLE_KEY)
    num_wholes = 1 + max(int(ids.max(initial=-1)) for ids in wholes)
    totals = [
        np.bincount(w, integers(t.column("numel"), 0), num_wholes) for w, t in zip(wholes, (left, right), strict=True)
    ]
    is_one_batch = np.zeros(num_slices, np.bool_)
    is_equal = (totals[0] == totals[1]) & (totals[0] > 0)
    is_one_batch[slices[0][uneven[0]][is_equal[wholes[0]]]] = True
    dropped = [is_one_batch[ids] & _has_micro_step(side) for side, ids in zip((a, b), slices, strict=True)]
    num_values = group_rows(a.table.filter(pa.array(dropped[0])), VALUE_KEY).num_groups
    one, two = (s._replace(table=s.table.filter(pa.array(~flags))) for s, flags in zip((a, b), dropped, strict=True))
    return one, two, num_values


def _has_micro_step(side: Side) -> Any:
    return side.table.column("micro_step").is_valid().to_numpy()


def _last_micro_steps(table: Any, slices: Integers, num_slices: int) -> Integers:
    """The last micro-step of each step of a root and a mode; -1 where there is none."""
    lasts = np.full(num_slices, -1, np.int64)
    np.maximum.at(lasts, slices, integers(table.column("micro_step"), -1))
    return lasts


def _is_handed_on(note: str) -> bool:
    return stage_of(note)[1]


def _handed_on(table: Any) -> set[tuple[Any, ...]]:
    columns = [table.column(name).to_pylist() for name in ("rank", "micro_step", "numel", "note")]
    return {(*key, str(json.loads(note)[HANDED_ON])) for *key, note in zip(*columns, strict=True)}
