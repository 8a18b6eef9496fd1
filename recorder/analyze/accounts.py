"""Owns what the accounts of the writers know of missing values. Never looks for a hole itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..read.writers import RecordedWriter

Integers = npt.NDArray[np.int64]

ACCOUNTED = ("dropped", "retired")
"""Reasons of which writers keep accounts."""


class Tail(NamedTuple):
    """Rows that a rank saw and dropped after the last one that it recorded."""

    rank: int | None
    step: int
    """Of that last one."""
    num_rows: int


def accounted(
    lost: Mapping[int | None, Mapping[str, Integers]], writers: Mapping[int | None, Sequence[RecordedWriter]]
) -> dict[str, Integers]:
    """By reason, values by site that the accounts explain: of ranks that lack no more than their accounts say.

    Args:
        lost: by rank and reason, missing values by site.
        writers: by rank.
    """
    found: dict[str, Integers] = {}
    for rank, by_reason in lost.items():
        balances = [writer.balance for writer in writers.get(rank, ())]
        known = {
            "dropped": sum(balance.num_dropped for balance in balances),
            "retired": sum(balance.retired_rows for balance in balances if balance.is_possible),
        }
        for reason, by_site in by_reason.items():
            if by_site.sum() <= known[reason]:
                found[reason] = found.get(reason, 0) + by_site
    return found


def dropped_tail(rank: int | None, writers: Sequence[RecordedWriter], last_seq: int, last_step: int) -> Tail | None:
    """What the newest writer of a rank dropped after its last row; None where it dropped nothing there.

    Args:
        rank: whose.
        writers: of the rank, in the order of their start.
        last_seq: number of the last row of the newest; -1 where it has none.
        last_step: the last step of the rank's rows.
    """
    newest = writers[-1]
    rest = min(newest.balance.observed - last_seq - 1, newest.balance.num_dropped)
    return Tail(rank, last_step, rest) if rest > 0 and newest.state == "closed" else None


def retention(writers: Sequence[RecordedWriter]) -> str:
    """The setting by which rows of these writers were removed."""
    return " or ".join(dict.fromkeys(_retention(writer.manifest.get("settings")) for writer in writers))


def _retention(settings: Any) -> str:
    keep_newest = settings.get("keep_newest") if isinstance(settings, dict) else None
    number = keep_newest.get("value") if isinstance(keep_newest, dict) else None
    return "keep_newest" if type(number) is int and number > 0 else "max_bytes"
