"""Finds why rows are missing, from the writers' counts of rows and from the sequence numbers of the rows.

Each row gets its number before it can be dropped. So if no number is missing, no value is missing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ...run.run import RecordedWriter
from ...sites import PROBE, SITE_OF
from .slots import SLOT_SITES

Integers = npt.NDArray[np.int64]

ACCOUNTED = ("dropped", "retired")
"""The reasons for missing rows that writers count in their manifests."""
DAMAGED, RETIRED, MISSED, DROPPED, CUT, LIVE, UNACCOUNTED = (1 << bit for bit in range(7))
CAUSES = (DAMAGED, RETIRED, MISSED, DROPPED, CUT, LIVE, UNACCOUNTED)
"""The causes of missing sequence numbers. If several causes fit a gap, the first one counts."""
_PASSED = 0
"""The cause of missing sequence numbers whose rows were kept in memory only: no trigger asked for their steps."""
_END = np.iinfo(np.int64).max
FORWARD, BACKWARD, UPDATE, ANYTIME = range(4)
"""The phases of a step in which a row gets its sequence number. A tap or a scalar may come at any time."""
_WHEN_OF_PHASE = {"forward": FORWARD, "backward": BACKWARD, "optimizer": UPDATE}
WHEN_OF_SITES = np.array([_WHEN_OF_PHASE[SITE_OF[site].phase] for site in SLOT_SITES])
"""For each of `SLOT_SITES`, the phase of a step in which its rows are made."""
TOTAL = 3
"""The index in `LostRows.room` of the limit for all three phases together."""
_MANY = 1 << 40
"""The largest number of missing rows that is counted, whatever an untrusted file says."""


class DroppedTail(NamedTuple):
    """The values that a rank counted and dropped after the last row that it recorded."""

    rank: int | None
    step: int
    """The step of the last recorded row."""
    num_rows: int


def accounted(
    lost: Mapping[int | None, Mapping[str, Integers]], writers: Mapping[int | None, Sequence[RecordedWriter]]
) -> dict[str, Integers]:
    """Return the missing values that the writers' counts explain, by reason and site.

    A rank's values are included if it lacks no more of them than its own counts say. `lost` has the missing values by
    rank, reason and site.
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
    """Return the values that the newest writer of a rank dropped after its last row; None if there are none.

    `last_seq` is the number of the newest writer's last row, -1 without rows; `last_step` is the last step of the rank.
    """
    newest = writers[-1]
    if newest.balance.passed:
        return None  # numbers without a row belong mostly to rows kept in memory
    rest = min(newest.balance.observed - last_seq - 1, newest.balance.num_dropped)
    return DroppedTail(rank, last_step, rest) if rest > 0 and newest.state == "closed" else None


def retention(writers: Sequence[RecordedWriter]) -> str:
    """Return the name of the setting by which rows of these writers were removed."""
    kept = [writer.manifest.whole_setting("keep_newest") for writer in writers]
    return " or ".join(dict.fromkeys("keep_newest" if number > 0 else "max_bytes" for number in kept))


class NumberedRows(NamedTuple):
    """The rows of one writer, sorted by their sequence numbers."""

    seq: Integers
    step: Integers
    shard: npt.NDArray[np.int32]
    """The index of the shard that each row is in."""
    micro_step: npt.NDArray[np.int32]
    when: npt.NDArray[np.int8]
    """The phase of each row: `FORWARD`, `BACKWARD`, `UPDATE` or `ANYTIME`."""


class LostRows(NamedTuple):
    """The causes of missing rows of one rank, and how many may have been dropped, step by step."""

    bits: npt.NDArray[np.uint8]
    """The bits of all causes that apply at each step."""
    room: Integers
    """The most rows that can have been dropped: in the forward, in the backward, around the update, and in total."""


class _Gaps(NamedTuple):
    """Ranges of consecutive missing sequence numbers that have one cause."""

    cause: int
    first: Integers
    """The step of the row before each range; `last` has the step of the row after it."""
    last: Integers
    size: Integers
    earliest: Integers
    """For each range, the earliest phase of a step in which its rows can have been numbered."""
    latest: Integers

    @classmethod
    def anytime(cls, cause: int, first: Integers, last: Integers, size: int) -> _Gaps:
        return cls(cause, first, last, np.array([size]), np.array([FORWARD]), np.array([UPDATE]))


def lost_steps(writers: Sequence[RecordedWriter], rows: Sequence[NumberedRows], steps: Integers) -> LostRows:
    """Return why rows of one rank are missing at each of some ascending steps, and how many were dropped.

    The writers are in the order of their start, and `rows` has the rows of each writer.
    """
    changes = {cause: np.zeros(len(steps) + 1, np.int64) for cause in CAUSES}
    rooms = np.zeros((TOTAL + 1, len(steps) + 1), np.int64)
    begins = [int(one.step[0]) if len(one.step) else None for one in rows]
    for number, (writer, one) in enumerate(zip(writers, rows, strict=True)):
        following = next((begin for begin in begins[number + 1 :] if begin is not None), None)
        for gaps in _gaps_of(writer, one, following):
            begin = np.searchsorted(steps, np.minimum(gaps.first, gaps.last), "left")
            end = np.searchsorted(steps, np.maximum(gaps.first, gaps.last), "right")
            np.add.at(changes[gaps.cause], begin, 1)
            np.add.at(changes[gaps.cause], end, -1)
            for when in range(TOTAL + 1) if gaps.cause == DROPPED else ():
                size = np.where((when == TOTAL) | (gaps.earliest <= when) & (when <= gaps.latest), gaps.size, 0)
                np.add.at(rooms[when], begin, np.minimum(size, _MANY))
                np.add.at(rooms[when], end, -np.minimum(size, _MANY))
    causes = np.zeros(len(steps), np.uint8)
    for cause, change in changes.items():
        causes[np.cumsum(change[:-1]) > 0] |= cause
    return LostRows(causes, np.cumsum(rooms, axis=1)[:, :-1])


def _gaps_of(writer: RecordedWriter, rows: NumberedRows, following: int | None) -> Iterator[_Gaps]:
    """Yield the missing sequence numbers of a writer; `following` is the first step of the rank's next writer."""
    balance = writer.balance
    is_open = {"recording": LIVE, "unclosed": CUT}.get(writer.state)
    usual = DROPPED if balance.num_dropped else UNACCOUNTED if is_open is None else is_open
    usual_between = _PASSED if balance.passed and not balance.num_dropped else usual  # for gaps between two rows
    if balance.passed and not balance.num_missing:
        usual = usual_between
    spans = _removed(writer, rows)
    if not len(rows.seq):
        cause = min((span[2] for span in spans), default=usual)
        if cause != _PASSED and (is_open is not None or balance.observed or cause == DAMAGED):
            yield _Gaps.anytime(cause, np.zeros(1, np.int64), np.full(1, _END), balance.observed)
        return
    yield from _gaps_between(writer, rows, spans, usual_between)
    rest = balance.observed - int(rows.seq[-1]) - 1
    at_end = min((kind for _, high, kind in spans if high == _END), default=None) if rest > 0 else None
    cause = next((one for one in (at_end, is_open, usual if rest > 0 else _PASSED) if one is not None), _PASSED)
    if cause != _PASSED:
        tail, end = np.array([rows.step[-1]]), np.array([_END if following is None else following - 1])
        yield _Gaps.anytime(cause, tail, np.maximum(tail, end), rest)


def _gaps_between(
    writer: RecordedWriter, rows: NumberedRows, spans: Sequence[tuple[int, int, int]], usual: int
) -> Iterator[_Gaps]:
    balance = writer.balance
    indices = np.flatnonzero(np.diff(rows.seq) > 1)
    before, after = rows.seq[indices], rows.seq[indices + 1]
    first, last = rows.step[indices], rows.step[indices + 1]
    if rows.seq[0] > 0:
        before, after = np.insert(before, 0, -1), np.insert(after, 0, rows.seq[0])
        first, last = np.insert(first, 0, rows.step[0]), np.insert(last, 0, rows.step[0])
    earliest, latest = _when(rows, indices)
    causes = np.full(len(before), usual, np.int64)
    for cause in (RETIRED, DAMAGED):
        for low, high, kind in spans:
            if kind == cause:
                causes[(after > low + 1) & (before < high - 1)] = cause
    # A row of the probe has the first step of its block, and is numbered after the last step of the block.
    own = np.flatnonzero(~np.isin(rows.shard, [i for i, shard in enumerate(writer.all_shards) if shard.is_of_probe]))
    steps_after = np.append(rows.step[own], _END)[np.searchsorted(own, np.searchsorted(rows.seq, after))]
    last = np.where((causes == DAMAGED) | (causes == UNACCOUNTED), np.maximum(last, steps_after), last)
    for cause in CAUSES:
        of = causes == cause
        if of.any():
            size = (after - before - 1)[of]
            if cause == DROPPED and balance.passed:
                size = np.minimum(size, balance.num_dropped)
            yield _Gaps(cause, first[of], last[of], size, earliest[of], latest[of])


def _when(rows: NumberedRows, indices: Integers) -> tuple[Integers, Integers]:
    """Return the earliest and latest phase in which the missing rows after each of these rows were numbered."""
    before, after = rows.when[indices], rows.when[indices + 1]
    is_slice = (rows.micro_step[indices] == rows.micro_step[indices + 1]) | (after == UPDATE)
    is_known = (rows.step[indices] == rows.step[indices + 1]) & is_slice & (before <= after) & (after < ANYTIME)
    earliest, latest = np.where(is_known, before, FORWARD), np.where(is_known, after, UPDATE)
    if rows.seq[0] > 0:
        earliest, latest = np.insert(earliest, 0, FORWARD), np.insert(latest, 0, UPDATE)
    return earliest, latest


def _removed(writer: RecordedWriter, rows: NumberedRows) -> list[tuple[int, int, int]]:
    """Return ranges of sequence numbers, without both ends, whose shards are damaged or removed by retention."""
    removed = []
    limits = _limits(rows, len(writer.all_shards))
    for kind in ("tensors", "stats", PROBE):
        shards = []
        for index, shard in enumerate(writer.all_shards):
            if (name := shard.name) is not None and name.kind == kind:
                shards.append((name.number, *limits[index], bool(shard.damage)))
        number, high = -1, -1
        for position, (following, first, last, is_damaged) in enumerate(shards):
            rest = [low for _, low, _, _ in shards[position + 1 :] if low >= 0]
            if following > number + 1 and writer.balance.retired_rows:
                removed.append((high, first if first >= 0 else min(rest, default=_END), RETIRED))
            if is_damaged:
                removed.append((high, min(rest, default=_END), DAMAGED))
            number, high = following, max(high, last)
        if any(retired == kind and gone > number for retired, gone in writer.retired_shards):
            removed.append((high, _END, RETIRED))
    return removed


def _limits(rows: NumberedRows, num_shards: int) -> list[tuple[int, int]]:
    low, high = np.full(num_shards, _END), np.full(num_shards, -1, np.int64)
    np.minimum.at(low, rows.shard, rows.seq)
    np.maximum.at(high, rows.shard, rows.seq)
    return [(int(a) if b >= 0 else -1, int(b)) for a, b in zip(low, high, strict=True)]
