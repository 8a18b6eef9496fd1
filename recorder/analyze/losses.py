"""Owns at which steps a writer's rows are incomplete, and why: holes in the numbers that every row was given.

A value is numbered before anything can be dropped, so where no number is missing nothing is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..format.rundir import parse_shard_name
from ..read.writers import RecordedWriter

Integers = npt.NDArray[np.int64]

DAMAGED, RETIRED, DROPPED, CUT, LIVE, UNACCOUNTED = (1 << bit for bit in range(6))
CAUSES = (DAMAGED, RETIRED, DROPPED, CUT, LIVE, UNACCOUNTED)
"""Why numbers are missing; the first that holds for a hole is its cause."""
_END = np.iinfo(np.int64).max


class Numbered(NamedTuple):
    """The rows of one writer in the order of their numbers."""

    seq: Integers
    step: Integers
    shard: Integers
    """Which of the writer's shards a row is in."""


def lost_steps(writers: Sequence[RecordedWriter], rows: Sequence[Numbered], steps: Integers) -> npt.NDArray[np.uint8]:
    """Of each step the causes, as bits, for which rows of one rank are missing there.

    Args:
        writers: of the rank, in the order of their start.
        rows: of each writer.
        steps: the steps that are asked about, in order.
    """
    changes = {cause: np.zeros(len(steps) + 1, np.int64) for cause in CAUSES}
    begins = [int(one.step[0]) if len(one.step) else None for one in rows]
    for number, (writer, one) in enumerate(zip(writers, rows, strict=True)):
        following = next((begin for begin in begins[number + 1 :] if begin is not None), None)
        for cause, first, last in _holes(writer, one, following):
            np.add.at(changes[cause], np.searchsorted(steps, np.minimum(first, last), "left"), 1)
            np.add.at(changes[cause], np.searchsorted(steps, np.maximum(first, last), "right"), -1)
    found = np.zeros(len(steps), np.uint8)
    for cause, change in changes.items():
        found[np.cumsum(change[:-1]) > 0] |= cause
    return found


def _holes(writer: RecordedWriter, rows: Numbered, following: int | None) -> list[tuple[int, Integers, Integers]]:
    """Runs of missing numbers: the cause, and the steps of the rows around each."""
    state, balance = writer.state, writer.balance
    is_open = {"recording": LIVE, "unclosed": CUT}.get(state)
    if balance.num_dropped:
        usual = DROPPED
    else:
        usual = UNACCOUNTED if is_open is None else is_open
    everything = np.zeros(1, np.int64), np.full(1, _END)
    found: list[tuple[int, Integers, Integers]] = []
    spans = _removed(writer, rows)
    if not len(rows.seq):
        cause = DAMAGED if any(span[2] == DAMAGED for span in spans) else usual
        return [(cause, *everything)] if is_open is not None or balance.observed or cause == DAMAGED else []
    places = np.flatnonzero(np.diff(rows.seq) > 1)
    before, after = rows.seq[places], rows.seq[places + 1]
    first, last = rows.step[places], rows.step[places + 1]
    if rows.seq[0] > 0:
        before, after = np.insert(before, 0, -1), np.insert(after, 0, rows.seq[0])
        first, last = np.insert(first, 0, rows.step[0]), np.insert(last, 0, rows.step[0])
    causes = np.full(len(before), usual, np.int64)
    for cause in (RETIRED, DAMAGED):
        for low, high, kind in spans:
            if kind == cause:
                causes[(after > low + 1) & (before < high - 1)] = cause
    found += [(cause, first[causes == cause], last[causes == cause]) for cause in CAUSES if (causes == cause).any()]
    end = np.array([_END if following is None else following - 1])
    tail = np.array([rows.step[-1]])
    if any(high == _END and kind == DAMAGED for _, high, kind in spans) and balance.observed > rows.seq[-1] + 1:
        found.append((DAMAGED, tail, np.maximum(tail, end)))
    elif is_open is not None:
        found.append((is_open, tail, np.maximum(tail, end)))
    elif balance.observed > rows.seq[-1] + 1:
        found.append((usual, tail, np.maximum(tail, end)))
    return found


def _removed(writer: RecordedWriter, rows: Numbered) -> list[tuple[int, int, int]]:
    """Numbers (exclusive on both sides) between which shards are damaged or were removed to keep the quota."""
    found = []
    limits = _limits(rows, len(writer.shards))
    for kind in ("tensors", "stats"):
        shards = []
        for place, shard in enumerate(writer.shards):
            name = parse_shard_name(shard.path.name)
            if name is not None and name.kind == kind:
                shards.append((name.number, *limits[place], bool(shard.damage)))
        number, high = -1, -1
        for position, (following, first, last, is_damaged) in enumerate(shards):
            rest = [low for _, low, _, _ in shards[position + 1 :] if low >= 0]
            if following > number + 1 and writer.balance.retired_rows:
                found.append((high, first if first >= 0 else min(rest, default=_END), RETIRED))
            if is_damaged:
                found.append((high, min(rest, default=_END), DAMAGED))
            number, high = following, max(high, last)
    return found


def _limits(rows: Numbered, num_shards: int) -> list[tuple[int, int]]:
    """Smallest and largest number in each shard; -1 where it has no rows."""
    low, high = np.full(num_shards, _END), np.full(num_shards, -1, np.int64)
    np.minimum.at(low, rows.shard, rows.seq)
    np.maximum.at(high, rows.shard, rows.seq)
    return [(int(a) if b >= 0 else -1, int(b)) for a, b in zip(low, high, strict=True)]
