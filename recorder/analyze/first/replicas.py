"""The first replica that differs: values that ranks must share bit by bit, data-parallel or of one mesh.

By fingerprint, else by the bytes; statistics that differ prove a difference, equal ones prove nothing. Who is a
replica, and whether anything makes buffers equal again, the manifests say, and of placed values their own rows; where
nothing does, it is assumed, and the finding says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from ...columns import note_members
from ...numerics.keys import group, holds
from ...run.run import RecordedWriter, Run
from ...run.step_ranges import Attempts, cut_rows
from ...sites import STATES
from ..diff.culprits.events import differing_ranks
from .replica_groups import (
    BROADCAST,
    NAME,
    NEVER,
    OWN,
    Differing,
    ReplicaGroups,
    Uncompared,
    ValueName,
    name_of,
    with_last,
)
from .timeline import RecordedValue, Timeline, whole_rows

RANGE_ROWS = 1_000_000
"""Rows of a range of steps, which are in memory together at about 1 kB each; a step of more is in one range."""
FINDINGS = tuple(site for site in STATES if site != "buffer")
"""Sites at which ranks that differ are a finding."""


class ReplicaSearch(NamedTuple):
    """What was found, and what the search says beside it."""

    first: Differing | None
    """The first difference of parameters, gradients and optimizer state."""
    values: list[RecordedValue]
    """All of these that ever differ, each where it first did, in this order."""
    firsts: list[Differing]
    """The first difference of each of these sites."""
    buffers: list[Differing]
    """The first difference of each buffer, by step."""
    num_compared: dict[str, int]
    """By site, the values that were compared over ranks."""
    steps: list[int]
    """Steps of parameters, gradients and optimizer state that were compared."""
    not_recorded: list[str]
    """The sites at which replicas that differ are a finding, and of which there is no row."""
    why_none: str
    """Why nothing was compared but buffers; empty where something was."""
    notes: list[str]


class ReplicaFinder:
    """Finds the first difference of replicas, by step and then in the order of execution, step range by range."""

    def __init__(self, run: Run, *, reads_payloads: bool = True) -> None:
        """Nothing is compared yet.

        Args:
            run: whose rows.
            reads_payloads: whether values are compared by their bytes where their rows do not tell.
        """
        self._run, self._reads_payloads = run, reads_payloads
        self._first: Differing | None = None
        self._has_buffer = False
        self._values: dict[ValueName, RecordedValue] = {}
        self._firsts: dict[str, Differing] = {}
        self._buffers: dict[ValueName, Differing] = {}
        self._noted: dict[ValueName, Differing] = {}
        self._equal: Any = None
        self._num_compared: Counter[str] = Counter()
        self._steps: set[int] = set()
        self._recorded: set[str] = set()
        self._ranks: set[int] = set()
        self._has_unknown = self._has_statistics_alone = False
        self._num_uncompared = Uncompared(0, 0, 0)
        self._own: set[ValueName] = set()
        self._problems: list[str] = []

    def add(self, timeline: Timeline) -> None:
        """Add the next range of steps."""
        replicas = ReplicaGroups(self._run, timeline, self._equal, reads_payloads=self._reads_payloads)
        is_buffer = replicas.is_of(("buffer",))
        if self._first is None and (first := replicas.search(~is_buffer)) is not None:
            self._first = replicas.describe(first)
        if not self._has_buffer:
            self._has_buffer = replicas.search(is_buffer) is not None
        for number, row in zip(*(some.tolist() for some in replicas.firsts(~is_buffer)), strict=True):
            value = timeline.value(row)
            self._values.setdefault(name_of(value), value)
            if value.site not in self._firsts:
                self._firsts[value.site] = replicas.describe(number)
        for known in (self._buffers, self._noted):
            known |= {name: with_last(one, replicas.differs_last(name)) for name, one in known.items()}
        for number in replicas.first_numbers(is_buffer).tolist():
            buffer = replicas.describe_buffer(number)
            self._buffers.setdefault(name_of(buffer.value), buffer)
        for one in _noted_by_merge(timeline):
            self._noted.setdefault(name_of(one.value), one)
        compared = replicas.compared
        self._num_compared += Counter(compared.column("site").to_pylist())
        is_finding = holds(compared.column("site"), FINDINGS.__contains__)
        self._steps |= set(compared.column("step").to_numpy()[is_finding].tolist())
        self._recorded |= set(timeline.table.column("site").unique().to_pylist())
        self._ranks |= {rank for rank in timeline.table.column("rank").unique().to_pylist() if rank is not None}
        self._has_unknown |= replicas.has_unknown
        self._has_statistics_alone |= replicas.has_statistics_alone
        self._num_uncompared = Uncompared(
            *(a + b for a, b in zip(self._num_uncompared, replicas.uncompared(~is_buffer), strict=True))
        )
        self._own |= replicas.own
        self._problems += replicas.problems
        self._equal = replicas.last_equals()

    def found(self) -> ReplicaSearch:
        """Return the answer."""
        noted = [one for name, one in self._noted.items() if name not in self._buffers]
        syncs = _syncs(self._run)
        buffers = [one._replace(sync=syncs.get(one.value.root)) for one in (*self._buffers.values(), *noted)]
        return ReplicaSearch(
            self._first,
            list(self._values.values()),
            list(self._firsts.values()),
            sorted(buffers, key=lambda one: one.value.step),
            dict(self._num_compared),
            sorted(self._steps),
            [site for site in FINDINGS if site not in self._recorded],
            self._why_none(),
            self._notes(),
        )

    def _notes(self) -> list[str]:
        """What could not be compared."""
        nothing, alone, after = self._num_uncompared
        notes = []
        if nothing:
            notes.append(f"{nothing} replicas have neither fingerprints nor statistics nor values to compare")
        if alone:
            notes.append(f"{alone} replicas have statistics alone: they are equal, which proves nothing")
        if after:
            notes.append(f"{after} replicas after the first that differs have no fingerprints and were not compared")
        if self._own:
            notes.append(
                f"{len(self._own)} parameters, gradients and states are each rank's own, as experts' are: left out"
            )
        return notes + self._problems

    def _why_none(self) -> str:
        """Why nothing could be compared but buffers, if nothing was."""
        if not self._num_compared.keys().isdisjoint(FINDINGS):
            return ""
        if self._has_statistics_alone:
            return "there are statistics alone, and equal ones prove nothing"
        if self._has_unknown:
            return "there are neither fingerprints nor values"
        if len(self._ranks) > 1 and self._recorded.isdisjoint(FINDINGS):
            return "no parameter, gradient or optimizer state was recorded"
        if len(self._ranks) > 1:
            return "no parameter, gradient or optimizer state is held by several ranks; sharded ones are not"
        if len(self._ranks) == 1 and not self._run.is_merged:
            world_size = self._run.world_size
            (rank,) = self._ranks
            return (
                "one rank has no replicas" if (world_size or 1) == 1 else f"only rank {rank} of {world_size} left rows"
            )
        return ""


def compare_replicas(run: Run) -> ReplicaSearch:
    """Compare the replicas of a whole run by their fingerprints and statistics alone; no payload is read."""
    attempts, finder = Attempts(run), ReplicaFinder(run, reads_payloads=False)
    ranges = run.view().windows(RANGE_ROWS)
    with cut_rows(run, ranges, _rows_of_states) as tables_of:
        for steps in ranges:
            finder.add(Timeline(run, attempts, steps, tables=tables_of(steps)))
    return finder.found()


def _rows_of_states(writers: Sequence[RecordedWriter], steps: tuple[int, int]) -> Iterator[Any]:
    for table in whole_rows(writers, steps):
        yield table.filter(pa.array(holds(table.column("site"), STATES.__contains__)))


def _syncs(run: Run) -> dict[str, str]:
    """Return, by root, what wrappers do to buffers, where a manifest says so."""
    syncs: dict[str, str] = {}
    for writer in run.writers:
        for root in writer.manifest.roots:
            data_parallel = root.data_parallel
            if data_parallel is not None and data_parallel.kind in ("fsdp1", "fsdp2"):
                syncs[root.name] = OWN
            elif (
                data_parallel is not None
                and data_parallel.kind == "ddp"
                and data_parallel.broadcast_buffers is not None
            ):
                syncs[root.name] = BROADCAST if data_parallel.broadcast_buffers else NEVER
    return syncs


def _noted_by_merge(timeline: Timeline) -> Iterator[Differing]:
    """Return the buffers of a merged run whose notes say that ranks differed; it has no rows of the ranks."""
    notes = timeline.table.column("note")
    is_told = holds(notes, lambda note: "replicas_differ" in note_members(note))
    is_told &= holds(timeline.table.column("site"), "buffer".__eq__)
    rows = np.flatnonzero(is_told)
    rows = rows[rows >= timeline.num_firsts]
    keys = group([timeline.codes[name] for name in NAME])
    rows_of_all = np.flatnonzero(timeline.is_equal("rank", None))
    for number in group([keys.ids[rows]]).firsts.tolist():
        row = int(rows[number])
        last = int(rows_of_all[keys.ids[rows_of_all] == keys.ids[row]].max(initial=row))
        ranks = list(differing_ranks(notes[row].as_py()))
        if ranks:
            yield Differing(
                value=timeline.value(row)._replace(rank=ranks[0]),
                groups=[ranks],
                by="merge",
                ranks=[],
                is_assumed=False,
                last_equal=None,
                differs_last=last in rows,
            )
