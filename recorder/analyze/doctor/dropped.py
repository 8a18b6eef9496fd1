"""How many missing values the drops of a step explain. Never says why one of the others is missing."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .rank_view import RankView
from .sequence_gaps import BACKWARD, FORWARD, TOTAL, UPDATE, WHEN_OF_SITES
from .slots import Flags

Integers = npt.NDArray[np.int64]


def take_room(view: RankView, columns: Integers, wanted: Flags, site: Integers, num_found: Integers) -> Flags:
    """Which values the drops explain: no more than were dropped at a step and in its phase, the most regular first."""
    chosen = np.zeros_like(wanted)
    order = np.argsort(-num_found, kind="stable")
    for when in (FORWARD, BACKWARD, UPDATE):
        room = (view.room - view.room_taken)[:, columns][[when, TOTAL]].min(axis=0)
        in_order = (wanted & (WHEN_OF_SITES[site] == when)[:, None])[order]
        in_order &= np.cumsum(in_order, axis=0) <= room
        chosen[order] |= in_order
        for row in (when, TOTAL):
            view.room_taken[row, columns] += in_order.sum(axis=0)
    return chosen
