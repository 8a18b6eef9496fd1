"""What the accounts of the writers know of missing values. Never looks for a gap itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ...run.run import RecordedWriter

Integers = npt.NDArray[np.int64]

ACCOUNTED = ("dropped", "retired")
"""Reasons of which writers keep accounts."""


class DroppedTail(NamedTuple):
    """Rows that a rank saw and dropped after the last one that it recorded."""

    rank: int | None
    step: int
    """The step of the last recorded row."""
    num_rows: int


def accounted(
    lost: Mapping[int | None, Mapping[str, Integers]], writers: Mapping[int | None, Sequence[RecordedWriter]]
) -> dict[str, Integers]:
    """Return the missing values that accounts explain, by reason and site.

    A rank counts where it lacks no more values than its own accounts say.

    Args:
        lost: missing values by site, by rank and reason.
        writers: the writers of each rank.
    """
    missing: dict[str, Integers] = {}
    for rank, by_reason in lost.items():
        balances = [writer.balance for writer in writers.get(rank, ())]
        known = {
            "dropped": sum(balance.num_dropped for balance in balances),
            "retired": sum(balance.retired_rows for balance in balances if balance.is_possible),
        }
        for reason, by_site in by_reason.items():
            if by_site.sum() <= known[reason]:
                missing[reason] = missing.get(reason, 0) + by_site
    return missing


def dropped_tail(
    rank: int | None, writers: Sequence[RecordedWriter], last_seq: int, last_step: int
) -> DroppedTail | None:
    """What the newest writer of a rank dropped after its last row; None where it dropped nothing there.

    Args:
        rank: whose.
        writers: of the rank, in the order of their start.
        last_seq: number of the last row of the newest; -1 where it has none.
        last_step: the last step of the rank's rows.
    """
    newest = writers[-1]
    if newest.balance.passed:
        return None  # numbers without a row are mostly those that passed
    rest = min(newest.balance.observed - last_seq - 1, newest.balance.num_dropped)
    return DroppedTail(rank, last_step, rest) if rest > 0 and newest.state == "closed" else None


def retention(writers: Sequence[RecordedWriter]) -> str:
    """The setting by which rows of these writers were removed."""
    kept = [writer.manifest.whole_setting("keep_newest") for writer in writers]
    return " or ".join(dict.fromkeys("keep_newest" if number > 0 else "max_bytes" for number in kept))
