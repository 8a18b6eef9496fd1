"""Reads the rows of each writer as numbers, and finds out why rows are missing.

Each row gets its sequence number before it can be dropped. So if no number is missing, no row is missing. The manifests
of writers count the rows that were dropped or removed. This module reads no payload.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntFlag, auto
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ...numerics.dtypes import item_bytes
from ...numerics.keys import Integers, encode, group
from ...run.notes import KNOWN_WORDS
from ...run.run import RecordedWriter
from ...sites import OF_CALLS, PROBE, SITE_OF
from .slots import SLOT_SITES, Flags, Slots, WriterSlots, distinct

ACCOUNTED = ("dropped", "retired")
"""The reasons for missing rows of which writers keep counts in their manifests."""


class Cause(IntFlag):
    """The causes of missing sequence numbers, with the keys of `gaps.REASONS`. The first matching cause counts."""

    CORRUPT = auto()
    RETIRED = auto()
    TRIGGER_MISSED = auto()
    DROPPED = auto()
    DIED = auto()
    LIVE = auto()
    UNACCOUNTED = auto()


_PASSED = Cause(0)
"""The cause of missing sequence numbers whose rows were kept in memory only: no trigger asked for their steps."""
_END = np.iinfo(np.int64).max
FORWARD, BACKWARD, UPDATE, ANYTIME = range(4)
"""The phases of a step in which rows get their sequence numbers. Rows of scalars, or of taps in a compiled graph, get
them at any time."""
_WHEN_OF_PHASE = {"forward": FORWARD, "backward": BACKWARD, "optimizer": UPDATE}
WHEN_OF_SITES = np.array([_WHEN_OF_PHASE[SITE_OF[site].phase] for site in SLOT_SITES])
"""For each site in `SLOT_SITES`, the phase of a step in which its rows get their sequence numbers."""
TOTAL = 3
"""The index in `RankView.room` of all phases together (forward, backward and update)."""
_MANY = 1 << 40
"""The limit for a number of missing rows, because an untrusted file may name any number."""


class DroppedTail(NamedTuple):
    """The number of rows that a rank dropped after its last recorded row."""

    rank: int | None
    step: int
    """The step of the last recorded row."""
    num_rows: int


def accounted(
    lost: Mapping[int | None, Mapping[str, Integers]], writers: Mapping[int | None, Sequence[RecordedWriter]]
) -> dict[str, Integers]:
    """Return how many missing values the losses explain that writers counted: by reason of `ACCOUNTED`, and by site.

    `lost` has the number of missing values by rank, reason and site. The values of a rank and a reason are included
    only if they are no more than the rank's writers count as lost.
    """
    missing = {reason: np.zeros(len(SLOT_SITES), np.int64) for reason in ACCOUNTED}
    for rank, by_reason in lost.items():
        balances = [writer.balance for writer in writers.get(rank, ())]
        known = {
            "dropped": sum(balance.num_dropped for balance in balances),
            "retired": sum(balance.retired_rows for balance in balances if balance.is_possible),
        }
        for reason, by_site in by_reason.items():
            if by_site.sum() <= known[reason]:
                missing[reason] += by_site
    return missing


def retention(writers: Sequence[RecordedWriter]) -> str:
    """Return the name of the setting that made retention remove rows of these writers."""
    kept = [writer.manifest.whole_setting("keep_newest") for writer in writers]
    return " or ".join(dict.fromkeys("keep_newest" if number > 0 else "max_bytes" for number in kept))


class _Gaps(NamedTuple):
    """Ranges of consecutive missing sequence numbers that have one cause."""

    cause: Cause
    first: Integers
    """For each range, the step of the row before the range. `last` has the step of the row after the range."""
    last: Integers
    size: Integers
    earliest: Integers
    """For each range, the earliest phase of a step in which the missing rows can have been numbered."""
    latest: Integers

    @classmethod
    def anytime(cls, cause: Cause, first: Integers, last: Integers, size: int) -> _Gaps:
        return cls(cause, first, last, np.array([size]), np.array([FORWARD]), np.array([UPDATE]))


def lost_steps(
    writers: Sequence[RecordedWriter], rows: Sequence[SlotRows], steps: Integers
) -> tuple[npt.NDArray[np.uint8], Integers]:
    """Return `RankView.bits` and `RankView.room` of one rank, for `steps`, which are ascending.

    The writers are in the order of their start, and `rows` has the rows of each writer.
    """
    changes = {cause: np.zeros(len(steps) + 1, np.int64) for cause in Cause}
    rooms = np.zeros((TOTAL + 1, len(steps) + 1), np.int64)
    begins = [int(one.step[0]) if len(one.step) else None for one in rows]
    for number, (writer, one) in enumerate(zip(writers, rows, strict=True)):
        following = next((begin for begin in begins[number + 1 :] if begin is not None), None)
        for gaps in _gaps_of(writer, one, following):
            begin = np.searchsorted(steps, np.minimum(gaps.first, gaps.last), "left")
            end = np.searchsorted(steps, np.maximum(gaps.first, gaps.last), "right")
            np.add.at(changes[gaps.cause], begin, 1)
            np.add.at(changes[gaps.cause], end, -1)
            for when in range(TOTAL + 1) if gaps.cause == Cause.DROPPED else ():
                size = np.where((when == TOTAL) | (gaps.earliest <= when) & (when <= gaps.latest), gaps.size, 0)
                np.add.at(rooms[when], begin, np.minimum(size, _MANY))
                np.add.at(rooms[when], end, -np.minimum(size, _MANY))
    causes = np.zeros(len(steps), np.uint8)
    for cause, change in changes.items():
        causes[np.cumsum(change[:-1]) > 0] |= cause.value
    return causes, np.cumsum(rooms, axis=1)[:, :-1]


def _gaps_of(writer: RecordedWriter, rows: SlotRows, following: int | None) -> Iterator[_Gaps]:
    """Yield ranges of a writer's missing sequence numbers. `following` is the first step of the rank's next writer."""
    balance = writer.balance
    is_open = {"recording": Cause.LIVE, "unclosed": Cause.DIED}.get(writer.state)
    usual = Cause.DROPPED if balance.num_dropped else Cause.UNACCOUNTED if is_open is None else is_open
    # The cause of a gap between two rows.
    usual_between = _PASSED if balance.passed and not balance.num_dropped else usual
    if balance.passed and not balance.num_missing:
        usual = usual_between
    spans = _removed(writer, rows)
    if not len(rows.seq):
        cause = min((span[2] for span in spans), default=usual)
        if cause != _PASSED and (is_open is not None or balance.observed or cause == Cause.CORRUPT):
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
    writer: RecordedWriter, rows: SlotRows, spans: Sequence[tuple[int, int, Cause]], usual: Cause
) -> Iterator[_Gaps]:
    balance = writer.balance
    indices = np.flatnonzero(np.diff(rows.seq, prepend=-1) > 1)  # the rows before which others are missing
    previous = np.maximum(indices - 1, 0)
    before, after = np.where(indices > 0, rows.seq[previous], -1), rows.seq[indices]
    first, last = rows.step[previous], rows.step[indices]
    earliest, latest = _when(rows, previous, indices)
    causes = np.full(len(before), usual, np.int64)
    for cause in (Cause.RETIRED, Cause.CORRUPT):
        for low, high, kind in spans:
            if kind == cause:
                causes[(after > low + 1) & (before < high - 1)] = cause
    # A row of the probe holds a block of steps. The row has the first step of the block, and gets its number after the
    # last step.
    own = np.flatnonzero(~np.isin(rows.shard, [i for i, shard in enumerate(writer.all_shards) if shard.is_of_probe]))
    steps_after = np.append(rows.step[own], _END)[np.searchsorted(own, np.searchsorted(rows.seq, after))]
    last = np.where((causes == Cause.CORRUPT) | (causes == Cause.UNACCOUNTED), np.maximum(last, steps_after), last)
    for cause in Cause:
        of = causes == cause
        if of.any():
            size = (after - before - 1)[of]
            if cause == Cause.DROPPED and balance.passed:
                size = np.minimum(size, balance.num_dropped)
            yield _Gaps(cause, first[of], last[of], size, earliest[of], latest[of])


def _when(rows: SlotRows, previous: Integers, indices: Integers) -> tuple[Integers, Integers]:
    """Return the earliest and the latest phase in which the rows missing before each row in `indices` were numbered.

    `previous` has the row before the missing ones. For rows that are missing before the first row it is the first row.
    """
    before, after = rows.when[previous], rows.when[indices]
    is_slice = (rows.micro_step[previous] == rows.micro_step[indices]) | (after == UPDATE)
    is_known = (rows.step[previous] == rows.step[indices]) & is_slice & (before <= after) & (after < ANYTIME)
    is_known &= previous < indices
    return np.where(is_known, before, FORWARD), np.where(is_known, after, UPDATE)


def _removed(writer: RecordedWriter, rows: SlotRows) -> list[tuple[int, int, Cause]]:
    """Return ranges (low, high, cause) of sequence numbers in damaged or removed shards. Both ends are excluded."""
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
                removed.append((high, first if first >= 0 else min(rest, default=_END), Cause.RETIRED))
            if is_damaged:
                removed.append((high, min(rest, default=_END), Cause.CORRUPT))
            number, high = following, max(high, last)
        if any(retired == kind and gone > number for retired, gone in writer.retired_shards):
            removed.append((high, _END, Cause.RETIRED))
    return removed


def _limits(rows: SlotRows, num_shards: int) -> list[tuple[int, int]]:
    low, high = np.full(num_shards, _END), np.full(num_shards, -1, np.int64)
    np.minimum.at(low, rows.shard, rows.seq)
    np.maximum.at(high, rows.shard, rows.seq)
    return [(int(a) if b >= 0 else -1, int(b)) for a, b in zip(low, high, strict=True)]


_COLUMNS = ("seq", "step", "micro_step", "mode", "phase", "root", "module_path", "site", "name", "part", "numel",
            "dtype", "encoding", "payload_bytes", "ranks_present", "ranks_expected")  # fmt: skip


class SlotRows(NamedTuple):
    """The rows of one writer, sorted by sequence number, as small integers, since all ranks' rows are in memory."""

    seq: Integers
    step: Integers
    shard: npt.NDArray[np.int32]
    """For each row, the index of the row's shard among the writer's shards."""
    micro_step: npt.NDArray[np.int32]
    when: npt.NDArray[np.int8]
    """For each row, the phase in which the row was made: `FORWARD`, `BACKWARD`, `UPDATE` or `ANYTIME`."""
    slot: npt.NDArray[np.int32]
    """For each row, the index of the slot (site of a module). -1 for rows of taps, scalars or unknown modules."""
    root: npt.NDArray[np.int32]
    module: npt.NDArray[np.int32]
    site: npt.NDArray[Any]
    with_grad: Flags
    is_update: Flags
    mode: npt.NDArray[Any]
    is_forward: Flags
    num_incomplete: int
    unknown: Counter[tuple[str, str]]
    """The number of rows with a name that this version does not know, by kind (site, encoding, column) and name."""
    partial: list[tuple[str, str, str, Integers]]
    """Groups of rows that lack ranks: the present and the expected ranks as JSON, the mode, and the steps."""


def read_slots(writer: RecordedWriter, slots: Slots) -> SlotRows:
    """Return all rows of a writer as integers."""
    batches = [(number, batch) for number, shard in enumerate(writer.all_shards) for batch in shard.columns(_COLUMNS)]
    shard_of = np.concatenate([np.zeros(0), *(np.full(batch.num_rows, number) for number, batch in batches)])
    columns = {
        name: pa.chunked_array([batch.column(name) for _, batch in batches], _TYPES.get(name, pa.string()))
        for name in _COLUMNS
    }
    numbers = {name: columns[name].fill_null(0).to_numpy().astype(np.int64, copy=False) for name in _TYPES}
    coded = ("root", "module_path", "site", "name", "mode", "phase", "dtype", "encoding")
    codes = {name: encode(columns[name]) for name in coded}
    module = _modules(slots, codes["root"], codes["module_path"])
    site_code = _translate(codes["site"], {site: number for number, site in enumerate(SLOT_SITES)})
    name_codes, names = codes["name"]
    name = np.array([*(slots.name_code(text) for text in names), -1], np.int64)[name_codes]
    is_scalar = _is(codes["site"], "scalar")
    rate = np.array([*(text.startswith("lr.") for text in names), False], bool)[name_codes]
    is_state = site_code >= len(OF_CALLS)
    phase = codes["phase"]
    of_rows: dict[str, npt.NDArray[Any]] = {
        "seq": numbers["seq"],
        "step": numbers["step"],
        "shard": shard_of.astype(np.int32),
        "micro_step": numbers["micro_step"].astype(np.int32),
        "when": _WHEN[site_code].astype(np.int8),
        "slot": slots.of_rows(module, site_code, name).astype(np.int32),
        "root": _translate(codes["root"], {root: number for number, root in enumerate(slots.roots)}).astype(np.int32),
        "module": module.astype(np.int32),
        "site": site_code.astype(np.int8),
        "with_grad": ~_is(codes["mode"], "no_grad"),
        "is_update": is_state | _is(phase, "optimizer") | (is_scalar & rate),
        "mode": _translate(codes["mode"], MODES).astype(np.int8),
        "is_forward": _is(phase, "forward") & (numbers["part"] == 0) & (site_code >= 0) & ~is_state,
    }
    order = np.argsort(numbers["seq"], kind="stable")
    return SlotRows(
        **{name: values[order] for name, values in of_rows.items()},
        unknown=_unknown(writer, codes),
        num_incomplete=_incomplete(numbers, codes["dtype"], columns["payload_bytes"]),
        partial=_lacking(columns, numbers["step"]),
    )


_TYPES = {"seq": pa.int64(), "step": pa.int64(), "micro_step": pa.int32(), "part": pa.int32(), "numel": pa.int64(),
          "payload_bytes": pa.int64()}  # fmt: skip
_WHEN = np.array([*WHEN_OF_SITES, ANYTIME])
"""The phase in which rows of a site are made, for each site in `SLOT_SITES`. The last entry is for other sites."""
MODES = {"train": 0, "eval": 1, "no_grad": 2}
_Codes = tuple[Integers, list[str]]
"""A column of texts: the index of each row's text (-1 for null), and the list of distinct texts."""


def _translate(codes: _Codes, meaning: dict[str, int]) -> Integers:
    return np.array([*(meaning.get(text, -1) for text in codes[1]), -1], np.int64)[codes[0]]


def _is(codes: _Codes, text: str) -> Flags:
    return np.asarray(_translate(codes, {text: 1}) == 1)


def _modules(slots: Slots, roots: _Codes, paths: _Codes) -> Integers:
    pairs = group([roots[0], paths[0]])
    named = zip(*(ids[pairs.firsts].tolist() for ids, _ in (roots, paths)), strict=True)
    numbers = [slots.number_of.get((roots[1][root], paths[1][path]), -1) for root, path in named]
    return np.array(numbers, np.int64)[pairs.ids]


def _unknown(writer: RecordedWriter, codes: Mapping[str, _Codes]) -> Counter[tuple[str, str]]:
    unknown = Counter({("column", name): count for name, count in writer.unknown_columns().items()})
    for kind, known in KNOWN_WORDS.items():
        numbers, texts = codes[kind]
        counts = np.bincount(numbers[numbers >= 0], minlength=len(texts)).tolist()
        unknown += Counter(
            {(kind, text): count for text, count in zip(texts, counts, strict=True) if text not in known}
        )
    return unknown


def _incomplete(numbers: dict[str, Integers], dtypes: _Codes, payload: Any) -> int:
    if not numbers["part"].any():
        return 0
    sizes = []
    for text in dtypes[1]:
        try:
            sizes.append(item_bytes(text))
        except Exception:  # a later version has added this dtype
            sizes.append(-1)
    item = np.array([*sizes, -1], np.int64)[dtypes[0]]
    columns = {"first": numbers["seq"] - numbers["part"], "bytes": payload, "whole": numbers["numel"] * item}
    parts = pa.table(columns).filter(pa.array(payload.is_valid().to_numpy() & (item > 0)))
    tensors = parts.group_by("first").aggregate([("bytes", "sum"), ("whole", "max")])
    return int(pc.sum(pc.less(tensors["bytes_sum"], tensors["whole_max"])).as_py() or 0)


def _lacking(columns: dict[str, Any], step: Integers) -> list[tuple[str, str, str, Integers]]:
    names = {"present": "ranks_present", "expected": "ranks_expected", "mode": "mode"}
    rows = pa.table({name: columns[column] for name, column in names.items()} | {"step": step})
    some = rows.filter(pc.not_equal(rows["present"], rows["expected"]))  # a row without ranks is left out
    groups = some.group_by(["present", "expected", "mode"]).aggregate([("step", "list")]).to_pylist()
    return [(row["present"], row["expected"], row["mode"], np.array(row["step_list"], np.int64)) for row in groups]


@dataclass(eq=False)
class RankView:
    """The values that one rank should have recorded, and the values that it did record.

    A value is identified by its slot (a site of a module) and its step.
    """

    slots: Slots
    axis: Integers
    promised: WriterSlots
    """What the manifests of the rank say of each slot."""
    code: Integers
    """For each slot, the index of its group in `when`."""
    when: Flags
    """For each group of slots with equal expected steps, a mask of these steps. Group 0 has none."""
    rank: int | None
    writers: Sequence[RecordedWriter] = ()
    rows: Sequence[SlotRows] = ()
    """The rows of each writer."""
    is_merged: bool = False
    is_lossy: bool = False
    """True for a merged run whose source lost rows at unknown steps."""

    def __post_init__(self) -> None:
        num_roots, num_steps, num_modules = len(self.slots.roots), len(self.axis), len(self.slots.modules)
        self.bits = np.zeros(num_steps, np.uint8)
        """For each step, the bits of all causes of missing rows."""
        self.room = np.zeros((TOTAL + 1, num_steps), np.int64)
        """For each phase (forward, backward, update, all) and step, the most rows that may have been dropped."""
        self.room_taken = np.zeros((TOTAL + 1, num_steps), np.int64)
        """For each phase and step, the number of missing values that dropped rows explain so far."""
        self.alive = np.zeros(num_steps, bool)
        """For each step, whether the step has a row of a module."""
        self.called = np.zeros((num_roots, num_steps), bool)
        self.called_with_grad = np.zeros((num_roots, num_steps), bool)
        self.updated = np.zeros((num_roots, num_steps), bool)
        """For each root (model) and step, whether an optimizer stepped."""
        self.recorded = np.zeros(0, np.int64)
        """The keys of the recorded values, ascending. A key is slot index x number of steps + step index."""
        self.recorded_with_grad = np.zeros(0, np.int64)
        self.called_ever = np.zeros(num_modules, bool)
        self.graded_ever = np.zeros(num_modules, bool)
        self.first_step: int | None = None
        self.last_step: int | None = None

    def add(self, rows: SlotRows) -> None:
        axis, step = self.axis, rows.step
        if not len(step):
            return
        ends = [int(step.min()), int(step.max()), self.first_step, self.last_step]
        self.first_step, self.last_step = (pick(end for end in ends if end is not None) for pick in (min, max))
        if not len(axis):
            return
        index = np.minimum(np.searchsorted(axis, step), len(axis) - 1)
        there = axis[index] == step
        in_tree = there & (rows.slot >= 0)
        self.alive[index[in_tree]] = True
        of_root = there & (rows.root >= 0)
        forward = (rows.site >= 0) & (rows.site < len(OF_CALLS))
        for flags, wanted in (
            (self.called, of_root & forward),
            (self.called_with_grad, of_root & forward & rows.with_grad),
            (self.updated, of_root & rows.is_update),
        ):
            flags[rows.root[wanted], index[wanted]] = True
        keys = rows.slot.astype(np.int64) * len(axis) + index
        self.recorded = _joined(self.recorded, distinct(keys[in_tree]))
        graded = _joined(self.recorded_with_grad, distinct(keys[in_tree & forward & rows.with_grad]))
        self.recorded_with_grad = graded
        slots = self.slots
        self.called_ever[slots.module[rows.slot[in_tree & forward]]] = True
        self.graded_ever[slots.module[graded // len(axis)]] = True

    def cells(self, keys: Integers, low: int, high: int, columns: Integers) -> Flags:
        """Return a mask, slots from `low` to `high` by steps `columns`, of the values whose key is in `keys`."""
        num_steps = self.when.shape[1]
        has_value = np.zeros((high - low, len(columns)), bool)
        begin, end = np.searchsorted(keys, [low * num_steps, high * num_steps])
        slot, step = np.divmod(keys[begin:end], num_steps)
        column = np.full(num_steps, -1)
        column[columns] = np.arange(len(columns))
        there = column[step] >= 0
        has_value[slot[there] - low, column[step[there]]] = True
        return has_value

    def take_room(self, columns: Integers, wanted: Flags, site: Integers, num_found: Integers) -> Flags:
        """Return which missing values dropped rows explain: at most as many as were dropped in each phase of a step.

        The slots with the most recorded values come first.
        """
        chosen = np.zeros_like(wanted)
        order = np.argsort(-num_found, kind="stable")
        for when in (FORWARD, BACKWARD, UPDATE):
            room = (self.room - self.room_taken)[:, columns][[when, TOTAL]].min(axis=0)
            in_order = (wanted & (WHEN_OF_SITES[site] == when)[:, None])[order]
            in_order &= np.cumsum(in_order, axis=0) <= room
            chosen[order] |= in_order
            for row in (when, TOTAL):
                self.room_taken[row, columns] += in_order.sum(axis=0)
        return chosen


def _joined(some: Integers, more: Integers) -> Integers:
    return distinct(np.concatenate([some, more])) if len(some) and len(more) else some if len(some) else more
