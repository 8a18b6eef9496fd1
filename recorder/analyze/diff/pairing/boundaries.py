"""What one run has by how it is laid out: what its pipeline stages hand to each other, what it makes again.

What a stage is handed by another, and hands on, has no place in a run that is not cut there, nor has what is recomputed
for the backward in one that kept it. Never reads a payload.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pyarrow as pa

from ....read.stages import HANDED_ON
from ...keys import holds
from ...notes import stage_of
from .pairs import Side


def comparable(a: Side, b: Side) -> tuple[Side, Side, tuple[int, int]]:
    """The sides without what goes between stages, unless the same goes between them in both; and how many rows that is.

    A row of it is known by its rank, its stage, its micro-batch and its size: of ranks that share a batch, or split it.
    """
    marked = [holds(side.table.column("note"), _is_handed_on) for side in (a, b)]
    if not any(flags.any() for flags in marked):
        return a, b, (0, 0)
    places = [_places(side.table.filter(pa.array(flags))) for side, flags in zip((a, b), marked, strict=True)]
    if places[0] == places[1]:
        return a, b, (0, 0)
    one, two = (s._replace(table=s.table.filter(pa.array(~flags))) for s, flags in zip((a, b), marked, strict=True))
    return one, two, (int(np.count_nonzero(marked[0])), int(np.count_nonzero(marked[1])))


def without_recomputed(a: Side, b: Side) -> tuple[Side, Side, tuple[int, int]]:
    """The sides without what one of them alone made again for its backward; and how many rows that is, of each."""
    marked = [holds(side.table.column("phase"), "recompute".__eq__) for side in (a, b)]
    if marked[0].any() == marked[1].any():
        return a, b, (0, 0)
    one, two = (s._replace(table=s.table.filter(pa.array(~flags))) for s, flags in zip((a, b), marked, strict=True))
    return one, two, (int(np.count_nonzero(marked[0])), int(np.count_nonzero(marked[1])))


def _is_handed_on(note: str) -> bool:
    return stage_of(note)[1]


def _places(table: Any) -> set[tuple[Any, ...]]:
    columns = [table.column(name).to_pylist() for name in ("rank", "micro_step", "numel", "note")]
    return {(*place, str(json.loads(note)[HANDED_ON])) for *place, note in zip(*columns, strict=True)}
