"""Groups the rows of several ranks that must be equal bit by bit. A group is equal, differs, or is undecided.

The manifests say which ranks are replicas. The placements in rows of DTensors, and of tensors that a framework marks,
say it, too. If placements call an activation replicated, only the norms of the ranks' activations must be equal, up to
rounding. This module must never read a payload if the rows decide.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ...columns import COUNTS, STATISTICS, note_members
from ...errors import RunError
from ...layout.placement import coordinate_of, kinds_of, parse_mesh
from ...numerics.keys import SERIES_KEY, VALUE_KEY, Integers, by_distinct, codes, common_ids, group, group_rows, holds
from ...numerics.moments import integers, numbers
from ...run.run import Run
from ...sites import ACTIVATIONS, STATES
from .timeline import NAME, VALUE_COLUMNS, RecordedValue, Timeline, ValueName

BROADCAST, NEVER, OWN = "broadcast", "never", "own"
"""The ways in which ranks treat their buffers. BROADCAST: DDP sends the first rank's buffers to all ranks before each
forward. NEVER: DDP was told not to send them. OWN: FSDP keeps each rank's own buffers."""

_ROUNDING = 1e-3
"""Rounding may make the ranks' `l2` of a replicated activation differ by this share of the largest `l2`."""
SAME = 1e-4
"""The relative distance up to which two ratios between the numbers of two ranks count as equal."""
_MAX_RANKS = 8


class RankValue(NamedTuple):
    """The fingerprint, statistics, shape and dtype of a value on one rank."""

    rank: int
    fingerprint: str | None
    mean: float | None
    l2: float | None
    absmax: float | None
    shape: str
    dtype: str


class Differing(NamedTuple):
    """A value whose replicas on several ranks differ."""

    value: RecordedValue
    """The record of the lowest rank outside the largest group of ranks with equal values."""
    groups: list[list[int]]
    """Groups of ranks that hold equal values, the largest group first."""
    by: str
    """The evidence: ``fingerprint``, ``statistics``, ``values``, ``shape``, or ``merge`` for a note of the merge."""
    ranks: list[RankValue]
    is_assumed: bool
    """True if no DDP, no FSDP and no device mesh says that these ranks share one model."""
    last_equal: RecordedValue | None
    """The last record of the value, at an earlier step, in which all ranks agreed; None if they never agreed."""
    sync: str | None = None
    """How ranks treat a buffer: `BROADCAST`, `NEVER` or `OWN`. None if the manifests do not say."""
    differs_last: bool = True
    """Whether a buffer also differs in its last record. False if the program made the ranks' buffers equal again."""

    @property
    def was_never_equal(self) -> bool:
        """Whether the ranks are only assumed to be replicas, and differ from the first record on."""
        return self.is_assumed and self.last_equal is None

    @property
    def is_stale(self) -> bool:
        """Whether the value is a buffer that DDP was told not to broadcast and that differs in its last record."""
        return self.sync == NEVER and self.differs_last


class ReplicaGroups:
    """Groups of rows that must be equal, in the order of time. A group is equal, differs, or is not decided yet."""

    def __init__(self, run: Run, timeline: Timeline, equal: Any, *, reads_payloads: bool = True) -> None:
        self._timeline, self._reads_payloads = timeline, reads_payloads
        self._equal = equal
        table = timeline.table
        is_candidate = holds(table.column("site"), STATES.__contains__)
        is_candidate &= ~holds(table.column("phase"), "backward".__eq__)  # a not yet reduced gradient
        leaders, self._assumed = _leaders(run, timeline)
        placements, notes = table.column("placements"), table.column("note")
        is_activation = holds(table.column("site"), ACTIVATIONS.__contains__) & is_replicated(table)
        is_activation &= table.column("l2").is_valid().to_numpy()
        is_candidate |= is_activation
        is_candidate[: timeline.num_firsts] = False
        of_mesh = by_distinct(table, ("mesh",), lambda mesh: min(parse_mesh(mesh).ranks, default=-1), np.int64)
        leaders = np.where(is_activation, of_mesh, leaders)
        # A row without placements is no replica if its chunk's place in the tensor is unknown.
        is_plain = placements.is_null().to_numpy() & ~holds(notes, lambda note: "no_layout" in note_members(note))
        shards = _shards(table)
        has_offsets = table.column("offsets").is_valid().to_numpy()
        # Ranks with equal placements but without offsets may hold different chunks. A piece of a flattened tensor needs
        # no offsets.
        has_placement = has_offsets | ~holds(placements, lambda text: _has_kind(text, "Shard", but="FlatShard"))
        has_placement |= (shards > 0) & holds(placements, lambda text: "Replicate" in kinds_of(text))
        has_placement &= placements.is_valid().to_numpy() & ~holds(placements, lambda text: _has_kind(text, "Partial"))
        has_placement &= integers(table.column("numel")) != 0  # an empty chunk has the offset of the next chunk
        has_own = run.topology.own_parameters.has
        is_own = is_plain & is_candidate & by_distinct(table, ("root", "module_path", "name"), has_own, np.bool_)
        counted = np.flatnonzero(is_own & ~holds(table.column("shape"), "[]".__eq__))
        of_own = group([timeline.codes[name][counted] for name in NAME])
        self.own: set[ValueName] = timeline.texts(NAME, counted[of_own.firsts])
        """The names of the values that each rank holds for itself, such as the parameters of its experts."""
        self._rows = np.flatnonzero(is_candidate & (leaders >= 0) & ((is_plain & ~is_own) | has_placement))
        chunks = [codes(table.column(name)) for name in ("offsets", "placements")]
        keys = [*(timeline.codes[name] for name in VALUE_KEY), leaders, shards, *chunks]
        self._groups = group([key[self._rows] for key in keys])
        self._sizes = np.bincount(self._groups.ids, minlength=self._groups.num_groups)
        self._table = table.take(pa.array(self._rows))
        self._judge()
        self.problems: list[str] = []

    @property
    def compared(self) -> Any:
        """A table of the site and step of each value that was compared over several ranks."""
        compared = self._groups.firsts[(self._sizes > 1) & ~self._is_open & ~self._is_unknown]
        return self._table.select(["site", "step"]).take(pa.array(compared))

    def _judge(self) -> None:
        layouts = self._disagree(group_rows(self._table, ("dtype", "shape")).ids)
        prints = codes(self._table.column("fingerprint"))
        lacks_print = self._any(prints == 0)
        by_print = self._disagree(prints) & ~lacks_print
        lacks_numbers = self._any(integers(self._table.column("nan_count")) < 0)
        by_numbers = np.zeros_like(lacks_print)
        if lacks_print.any():
            bits = (numbers(self._table.column(name)).view(np.int64) for name in STATISTICS)
            ids = group([*bits, *(integers(self._table.column(name)) for name in COUNTS)]).ids
            by_numbers = self._disagree(ids) & lacks_print & ~lacks_numbers
        lacks_payload = self._any(self._table.column("encoding").is_null().to_numpy())
        lacks_payload |= not self._reads_payloads
        is_activation = self.is_of(ACTIVATIONS)
        self._differs = layouts | np.where(is_activation, self._are_apart(), by_print | by_numbers)
        undecided = lacks_print & ~self._differs & (self._sizes > 1) & ~is_activation
        self._is_open = undecided & ~lacks_payload
        self._is_unknown = undecided & lacks_payload
        self._lacks_numbers = lacks_numbers
        by_print &= ~is_activation
        self._by = np.where(layouts, "shape", np.where(by_print, "fingerprint", "statistics")).astype(object)

    def _are_apart(self) -> npt.NDArray[np.bool_]:
        sizes = numbers(self._table.column("l2"))
        low, high = np.full(self._groups.num_groups, np.inf), np.zeros(self._groups.num_groups)
        np.fmin.at(low, self._groups.ids, sizes)
        np.fmax.at(high, self._groups.ids, sizes)
        return np.asarray(high - low > _ROUNDING * high)

    def is_of(self, sites: tuple[str, ...]) -> npt.NDArray[np.bool_]:
        return holds(self._table.column("site"), sites.__contains__)[self._groups.firsts]

    def search(self, asked: npt.NDArray[np.bool_]) -> int | None:
        """Return the first group in the mask `asked` that differs, or None. Payloads decide the groups before it."""
        differing = np.flatnonzero(self._differs & asked)
        limit = int(differing[0]) if len(differing) else self._groups.num_groups
        for number in np.flatnonzero(self._is_open[:limit] & asked[:limit]).tolist():
            if self._read(number):
                return int(number)
        return limit if len(differing) else None

    def firsts(self, asked: npt.NDArray[np.bool_]) -> Iterator[tuple[int, RecordedValue]]:
        """Yield the first group that differs of each value, and a record of the value. `asked` is a mask of groups."""
        numbers = np.flatnonzero(self._differs & asked)
        rows = self._rows[self._groups.firsts[numbers]]
        for first in group([self._timeline.codes[name][rows] for name in NAME]).firsts.tolist():
            yield int(numbers[first]), self._timeline.value(int(rows[first]))

    def describe(self, number: int) -> Differing:
        members = np.flatnonzero(self._groups.ids == number)
        columns = ("rank", "fingerprint", "mean", "l2", "absmax", "shape", "dtype")
        members = members[np.argsort(integers(self._table.column("rank"))[members])]
        values = [RankValue(**row) for row in self._table.select(columns).take(pa.array(members)).to_pylist()]
        signatures: dict[Any, list[int]] = {}
        for value, member in zip(values, members.tolist(), strict=True):
            signatures.setdefault(self._signature(number, member), []).append(value.rank)
        groups = sorted(signatures.values(), key=lambda ranks: (-len(ranks), ranks[0]))
        odd = min(rank for ranks in groups[1:] for rank in ranks)
        member = int(members[[value.rank for value in values].index(odd)])
        row = int(self._rows[member])
        record = self._timeline.value(row)
        is_assumed = record.root in self._assumed and self._table.column("placements")[member].as_py() is None
        by, equal = str(self._by[number]), self._last_equal(row)
        return Differing(record, groups, by, values, is_assumed=is_assumed, last_equal=equal)

    def with_last(self, buffer: Differing) -> Differing:
        """Return a buffer with `differs_last` updated by its last comparable record in these steps, if there is one."""
        differs = self._differs_last(buffer.value.key)
        return buffer if differs is None else buffer._replace(differs_last=differs)

    def _differs_last(self, name: ValueName) -> bool | None:
        timeline = self._timeline
        same = np.all([timeline.is_equal(column, value) for column, value in zip(NAME, name, strict=True)], axis=0)
        same[: timeline.num_firsts] = False
        step = timeline.codes["step"]
        rows = self._rows[self._groups.firsts]
        last_step, differs = -1, None
        for last in np.flatnonzero(same[rows] & (self._sizes > 1))[::-1].tolist():
            if self._is_open[last]:
                self._read(last)
            if not self._is_unknown[last]:
                last_step, differs = int(step[rows[last]]), bool(self._differs[last])
                break
        of_all = np.flatnonzero(same & timeline.is_equal("rank", None) & (step > last_step))
        if len(of_all):  # in a merged run a row stands for all ranks, unless its note says that they differ
            differs = "replicas_differ" in (timeline.table.column("note")[int(of_all[-1])].as_py() or "")
        return differs

    def uncompared(self, asked: npt.NDArray[np.bool_]) -> Counter[str]:
        """Count, by reason, the groups in the mask `asked` that could not be compared.

        ``nothing``: the rows have nothing to compare. ``statistics``: the rows only have equal statistics, which prove
        nothing; a tensor that has NaN on all ranks does not count, because `first` names it. ``after``: only payloads
        could decide, and none is read after the first difference.
        """
        of_nothing, of_statistics = self._is_unknown & self._lacks_numbers, self._is_unknown & ~self._lacks_numbers
        of_statistics &= ~self._any(integers(self._table.column("nan_count")) > 0)
        reasons = {"nothing": of_nothing, "statistics": of_statistics, "after": self._is_open}
        return Counter({reason: int((flags & asked).sum()) for reason, flags in reasons.items()})

    def _signature(self, number: int, member: int) -> Any:
        row = self._table.slice(member, 1).to_pylist()[0]
        if self._by[number] == "values":
            return self._timeline.array(int(self._rows[member])).tobytes()
        names = ("fingerprint",) if self._by[number] == "fingerprint" else (*STATISTICS, *COUNTS)
        return (row["dtype"], row["shape"], *(repr(row[name]) for name in names))

    def _read(self, number: int) -> bool:
        self._is_open[number] = False
        first, *others = self._rows[np.flatnonzero(self._groups.ids == number)].tolist()
        try:
            whole = self._timeline.array(first).tobytes()
            differs = any(self._timeline.array(row).tobytes() != whole for row in others)
        except RunError as error:
            self._is_unknown[number] = True
            self.problems.append(f"could not be compared: {error}")
            return False
        if differs:
            self._differs[number], self._by[number] = True, "values"
        return differs

    def _last_equal(self, row: int) -> RecordedValue | None:
        timeline = self._timeline
        same = self._agrees()
        for name in VALUE_KEY:
            if name != "step":
                same &= timeline.codes[name] == timeline.codes[name][row]
        same &= timeline.codes["step"] < timeline.codes["step"][row]
        equal = np.flatnonzero(same)
        if len(equal):
            return timeline.value(int(equal[-1]))
        if self._equal is None:
            return None
        own, known = common_ids(timeline.table.slice(row, 1), self._equal, SERIES_KEY)
        earlier = np.flatnonzero(known == own[0])
        return timeline.value_in(self._equal, int(earlier[-1])) if len(earlier) else None

    def last_equals(self) -> Any:
        """Return a table with the last record of each value in which all ranks agreed."""
        rows = np.flatnonzero(self._agrees())
        newest = rows[::-1][group([self._timeline.codes[name][rows[::-1]] for name in SERIES_KEY]).firsts]
        table = self._timeline.table.select(VALUE_COLUMNS).take(pa.array(np.sort(newest)))
        if self._equal is None:
            return table
        table = pa.concat_tables([self._equal, table])
        order = np.arange(table.num_rows)[::-1].copy()
        lasts = order[group([codes(table.column(name))[order] for name in SERIES_KEY]).firsts]
        return table.take(pa.array(np.sort(lasts)))

    def _agrees(self) -> npt.NDArray[np.bool_]:
        timeline = self._timeline
        agrees = timeline.is_equal("rank", None)  # in a merged run a row stands for all ranks
        is_equal = ~self._differs & ~self._is_open & ~self._is_unknown & (self._sizes > 1)
        agrees[self._rows] |= is_equal[self._groups.ids]
        agrees[: timeline.num_firsts] = False
        return agrees

    def _disagree(self, signatures: Integers) -> npt.NDArray[np.bool_]:
        return self._any(signatures != signatures[self._groups.firsts[self._groups.ids]])

    def _any(self, rows: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        return np.bincount(self._groups.ids, rows, self._groups.num_groups) > 0


def is_replicated(table: Any) -> npt.NDArray[np.bool_]:
    """Return a mask of the rows whose placements say that several ranks hold the same chunk."""
    return holds(table.column("placements"), lambda text: "Replicate" in kinds_of(text))


def _has_kind(placements: str, end: str, *, but: str = "") -> bool:
    kinds = kinds_of(placements)
    return but not in kinds and any(kind.endswith(end) for kind in kinds)


def _shards(table: Any) -> Integers:
    """Number the rows by the rank's coordinate on the mesh axes that do not replicate. 0 if it is unknown."""
    known: dict[Any, int] = {None: 0}
    return by_distinct(table, ("placements", "mesh"), lambda *of: known.setdefault(coordinate_of(*of), len(known)), int)


def _leaders(run: Run, timeline: Timeline) -> tuple[Integers, set[str]]:
    """Return each row's lowest rank with the same model, and the roots whose ranks are only assumed to share a model.

    Ranks of different pipeline stages hold different models. If manifests contradict each other, each rank's own
    manifest counts. A row for all ranks has -1.
    """
    number_of = {(writer.rank, writer.attempt): number for number, writer in enumerate(run.writers)}
    assumed: set[str] = set()

    def leader(root: str, rank: int | None, attempt: int) -> int:
        number = number_of.get((rank, attempt))
        if rank is None or run.is_merged or number is None:
            return -1 if rank is None else 0  # a merge keeps a row of one rank only where that rank differs
        of_model = run.topology.group(root, "", number)
        ranks = run.topology.own_ranks(root, number) if of_model.conflict else of_model.ranks
        if of_model.source == "assumed" and not of_model.model_groups:
            assumed.add(root)
        return min(ranks) if rank in ranks else rank

    return by_distinct(timeline.table, ("root", "rank", "attempt"), leader, np.int64), assumed


def factor_of(differing: Differing) -> str:
    """Return a sentence if the values of one group of ranks are a multiple of the other group's; else an empty text."""
    held = {value.rank: value for value in differing.ranks}
    sides = [(held[ranks[0]], ranks) for ranks in differing.groups if ranks[0] in held]
    if not len(sides) == len(differing.groups) == 2:
        return ""
    (low, low_ranks), (high, high_ranks) = sorted(sides, key=lambda side: side[0].l2 or 0.0)
    if not (low.l2 and high.l2 and low.absmax and high.absmax):
        return ""
    factor, rounding = high.l2 / low.l2, SAME * high.absmax
    is_factor = math.isclose(high.absmax, factor * low.absmax, abs_tol=rounding)
    if not is_factor or abs((high.mean or 0.0) - factor * (low.mean or 0.0)) > rounding:
        return ""
    return factor_in_words(factor, low_ranks, high_ranks, is_gradient=differing.value.site == "grad")


def factor_in_words(factor: float, low: Sequence[int], high: Sequence[int], *, is_gradient: bool) -> str:
    """Return a sentence: ranks `high` have `factor` times the values of ranks `low`. Empty if `factor` is about 1."""
    if factor < 1 + 100 * SAME:
        return ""
    num_ranks = len(low) + len(high)
    is_sum = is_gradient and math.isclose(factor, num_ranks, rel_tol=SAME)
    hint = f": added up over {num_ranks} ranks, not averaged?" if is_sum else ""
    having = [f"{named_ranks(ranks)} {'has' if len(ranks) == 1 else 'have'}" for ranks in (high, low)]
    return f"{having[0]} {factor:.4g} times what {having[1]}{hint}"


def named_ranks(ranks: Sequence[int]) -> str:
    """Return rank numbers with the noun, such as ``rank 3`` or ``ranks 1,2``."""
    return f"rank{'s' * (len(ranks) > 1)} {ranks_in_words(ranks)}"


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Return rank numbers as a text. Of many ranks, the text has only the first few and the count."""
    return ",".join(map(str, ranks[:_MAX_RANKS])) + (f",... ({len(ranks)})" if len(ranks) > _MAX_RANKS else "")
