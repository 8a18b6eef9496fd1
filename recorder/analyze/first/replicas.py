"""Finds the first value whose replicas differ. Replicas are values that several ranks must hold with the same bits.

Replicas are compared by fingerprint, or else by their bytes. Different statistics prove a difference, but equal
statistics prove nothing. Manifests say which ranks are replicas, and whether buffers are made equal again. For DTensors
the placements in rows say it. If neither manifests nor rows say which ranks are replicas, data-parallel ranks are
assumed, and the finding says so. The probe has one number of each parameter at every step, also between the steps with
rows. Different numbers on the ranks prove when replicas came apart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from ...columns import note_members
from ...errors import CorruptError
from ...numerics.keys import Integers, array_of, by_distinct, column_of, group, group_rows, holds
from ...numerics.moments import integers
from ...run.notes import differing_ranks
from ...run.probe import MOST_PROBED, probe_size, probe_tables
from ...run.run import RecordedWriter, Run
from ...run.step_ranges import Attempts, Mapper, map_serially, read_ranges
from ...sites import STATES
from .replica_groups import BROADCAST, NEVER, OWN, SAME, Differing, ReplicaGroups, factor_in_words, is_replicated
from .timeline import NAME, RecordedValue, Timeline, ValueName, whole_rows

RANGE_ROWS = 1_000_000
"""The most rows in a range of steps. They are in memory together, at about 1 kB each. One step may have more rows."""
FINDINGS = tuple(site for site in STATES if site != "buffer")
"""The sites at which a difference between ranks is a finding: state such as parameters, but not buffers."""


class ReplicaFinder:
    """Finds the first difference of replicas by step and order of execution. It takes one range of steps after another.

    `reads_payloads` says whether payloads are compared where the rows alone do not decide.
    """

    def __init__(self, run: Run, *, reads_payloads: bool = True) -> None:
        self._run, self._reads_payloads = run, reads_payloads
        self.first: Differing | None = None
        """The first difference of replicas, except in buffers; None while all replicas are equal."""
        self.firsts: dict[str, Differing] = {}
        """The first difference at each site in `FINDINGS`, and under ``activation`` of an activation that ranks of a
        mesh share. Assumed replicas that were never equal are kept under ``<site>, never equal``."""
        self.values: dict[ValueName, RecordedValue] = {}
        """The first record that differs of each value, except buffers, in the order of time."""
        self.num_compared: Counter[str] = Counter()
        """The number of values that were compared over ranks, by site."""
        self.steps: set[int] = set()
        """The steps at which parameters, gradients or optimizer states were compared."""
        self._has_buffer = False
        self._buffers: dict[ValueName, Differing] = {}
        self._noted: dict[ValueName, Differing] = {}
        self._equal: Any = None
        self._recorded: set[str] = set()
        self._ranks: set[int] = set()
        self._why_uncompared: set[str] = set()
        self._num_uncompared: Counter[str] = Counter()
        self._own: set[ValueName] = set()
        self._problems: list[str] = []

    def add(self, timeline: Timeline) -> None:
        replicas = ReplicaGroups(self._run, timeline, self._equal, reads_payloads=self._reads_payloads)
        is_buffer = replicas.is_of(("buffer",))
        if self.first is None and (first := replicas.search(~is_buffer)) is not None:
            self.first = replicas.describe(first)
        if not self._has_buffer:
            self._has_buffer = replicas.search(is_buffer) is not None
        for number, value in replicas.firsts(~is_buffer):
            self.values.setdefault(value.key, value)
            kind = value.site if value.site in FINDINGS else "activation"
            if kind not in self.firsts:
                one = replicas.describe(number)
                self.firsts.setdefault(f"{kind}, never equal" if one.was_never_equal else kind, one)
        for known in (self._buffers, self._noted):
            known |= {name: replicas.with_last(one) for name, one in known.items()}
        for number, value in replicas.firsts(is_buffer):
            if value.key not in self._buffers:
                self._buffers[value.key] = replicas.with_last(replicas.describe(number))
        for one in _noted_by_merge(timeline):
            self._noted.setdefault(one.value.key, one)
        compared = replicas.compared
        self.num_compared += Counter(compared.column("site").to_pylist())
        is_finding = holds(compared.column("site"), FINDINGS.__contains__)
        self.steps |= set(array_of(compared.column("step"))[is_finding].tolist())
        self._recorded |= set(timeline.table.column("site").unique().to_pylist())
        self._ranks |= {rank for rank in timeline.table.column("rank").unique().to_pylist() if rank is not None}
        self._why_uncompared |= (replicas.uncompared(is_buffer | ~is_buffer) + Counter()).keys()
        self._num_uncompared += replicas.uncompared(~is_buffer)
        self._own |= replicas.own
        self._problems += replicas.problems
        self._equal = replicas.last_equals()

    @property
    def buffers(self) -> list[Differing]:
        """The first difference of each buffer, sorted by step."""
        noted = [one for name, one in self._noted.items() if name not in self._buffers]
        syncs = _syncs(self._run)
        buffers = [one._replace(sync=syncs.get(one.value.root)) for one in (*self._buffers.values(), *noted)]
        return sorted(buffers, key=lambda one: one.value.step)

    @property
    def equal_values(self) -> set[ValueName]:
        """The names of the values that were equal on all their ranks in at least one record."""
        if self._equal is None:
            return set()
        return set(zip(*(self._equal.column(name).to_pylist() for name in NAME), strict=True))

    @property
    def not_recorded(self) -> list[str]:
        """The sites in `FINDINGS` of which no row was added."""
        return [site for site in FINDINGS if site not in self._recorded]

    def notes(self) -> list[str]:
        texts = {
            "nothing": "have neither fingerprints nor statistics nor values to compare",
            "statistics": "have only statistics, which are equal and prove nothing"
            if self._reads_payloads
            else "have equal statistics and no fingerprints, which proves nothing: "
            "check reads no tensors, recorder first compares those that were recorded",
            "after": "after the first difference have no fingerprints, and were not compared",
        }
        notes = [f"{num} replicas {texts[why]}" for why in texts if (num := self._num_uncompared[why])]
        if num := len(self._own):
            notes.append(f"left out: {num} parameters, gradients and states that each rank has for itself, as experts")
        return notes + self._problems

    def why_none(self) -> str:
        """Return the reason why only buffers could be compared; empty if other values were compared, too."""
        if not self.num_compared.keys().isdisjoint(FINDINGS):
            return ""
        if "statistics" in self._why_uncompared:
            return "there are only statistics, and equal statistics prove nothing"
        if "nothing" in self._why_uncompared:
            return "there are neither fingerprints nor values"
        if len(self._ranks) > 1 and self._recorded.isdisjoint(FINDINGS):
            return "no parameter, gradient or optimizer state was recorded"
        if len(self._ranks) > 1:
            roots = [(root.name, number) for number, one in enumerate(self._run.writers) for root in one.manifest.roots]
            conflicts = (self._run.topology.group(root, "", number).conflict for root, number in roots)
            if conflict := next(filter(None, conflicts), ""):
                return f"the ranks that are replicas are not known: {conflict}"
            return "no parameter, gradient or optimizer state is held by several ranks; sharded ones are not"
        if len(self._ranks) == 1 and not self._run.is_merged:
            (rank,), world_size = self._ranks, self._run.world_size or 1
            return f"only rank {rank} of {world_size} left rows" if world_size > 1 else "one rank has no replicas"
        return ""


def compare_replicas(run: Run, mapper: Mapper = map_serially) -> ReplicaFinder:
    """Compare the replicas of a run by their fingerprints and statistics alone. No payload is read.

    `mapper` reads ranges of steps, in this process or in others.
    """
    attempts, finder = Attempts(run), ReplicaFinder(run, reads_payloads=False)
    ranges = run.view().windows(RANGE_ROWS)
    for steps, tables in zip(ranges, read_ranges(run, ranges, _rows_of_states, mapper), strict=True):
        finder.add(Timeline(run, attempts, steps, tables))
    return finder


def _rows_of_states(writers: Sequence[RecordedWriter], steps: tuple[int, int]) -> Iterator[Any]:
    for table in whole_rows(writers, steps):
        yield table.filter(column_of(holds(table.column("site"), STATES.__contains__) | is_replicated(table)))


def _syncs(run: Run) -> dict[str, str]:
    syncs: dict[str, str] = {}
    for writer in run.writers:
        for root in writer.manifest.roots:
            if (wrapper := root.data_parallel) is None:
                continue
            if wrapper.kind in ("fsdp1", "fsdp2"):
                syncs[root.name] = OWN
            elif wrapper.kind == "ddp" and wrapper.broadcast_buffers is not None:
                syncs[root.name] = BROADCAST if wrapper.broadcast_buffers else NEVER
    return syncs


def _noted_by_merge(timeline: Timeline) -> Iterator[Differing]:
    """Yield the buffers that differ between ranks by the notes in a merged run. The merge kept no rows of the ranks."""
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
        if ranks := list(differing_ranks(notes[row].as_py())):
            value = timeline.value(row)._replace(rank=ranks[0])
            told = Differing(value, [ranks], "merge", [], is_assumed=False, last_equal=None)
            yield told._replace(differs_last=last in rows)


_LEAST_FACTORS = 3
"""The fewest pairs of norms of two ranks that show a common factor. A single pair always has some ratio."""


class ApartByProbe(NamedTuple):
    """The first value of a site that differs between ranks in the probe, which has one number per value and step."""

    key: ValueName
    step: int
    equal_step: int
    """The last earlier step at which all ranks had the same number in the probe."""
    ranks: tuple[int, ...]
    """The ranks outside the largest group of equal ranks. All ranks if several groups are the largest."""
    is_odd: bool
    """True if one group of equal ranks is the largest and so counts as right. With two ranks, either may be right."""
    factor: str
    """A text on which ranks hold a multiple of other ranks' values. Empty unless all values of the site agree on it."""


def apart_by_probe(run: Run, names: set[ValueName]) -> list[ApartByProbe]:
    """Return, for each site, the first value in `names` that differs between ranks in the probe after it was equal.

    The probe has one number of each value at every step. It is not read if it has more than `MOST_PROBED` numbers.
    """
    size = probe_size(run.writers)
    if size is None or size.num_numbers > MOST_PROBED or not names:
        return []
    tables: list[Any] = []
    try:
        for table in probe_tables(run.writers):
            is_named = by_distinct(table, NAME, lambda *name: name in names, np.bool_)
            tables.append(table.filter(column_of(is_named & array_of(table.column("global_numel").is_null()))))
    except CorruptError:  # the error counts as damage of the run from now on
        return []
    table = pa.concat_tables(tables).unify_dictionaries()
    steps, ranks = integers(table.column("step")), integers(table.column("rank"))
    # The numbers in a shard may have only the digits of a float32.
    sizes = array_of(table.column("l2")).astype(np.float32)
    values = group_rows(table, NAME)
    groups = group_rows(table, (*NAME, "phase", "scope", "attempt", "step"))
    low, high = np.full(groups.num_groups, np.inf, np.float32), np.zeros(groups.num_groups, np.float32)
    np.minimum.at(low, groups.ids, sizes)
    np.maximum.at(high, groups.ids, sizes)
    value_of, step_of, differs = values.ids[groups.firsts], steps[groups.firsts], low != high
    first = np.full(values.num_groups, np.iinfo(np.int64).max)
    np.minimum.at(first, value_of[differs], step_of[differs])
    last_equal = np.full(values.num_groups, -1)
    is_before = ~differs & (step_of < first[value_of])
    np.maximum.at(last_equal, value_of[is_before], step_of[is_before])
    apart = np.flatnonzero(np.isin(np.arange(values.num_groups), value_of[differs]) & (last_equal >= 0))
    found: dict[str, ApartByProbe] = {}
    apart = apart[np.argsort(first[apart], kind="stable")]
    keys = table.select(NAME).take(column_of(values.firsts[apart])).to_pylist()
    for value, key in zip(apart.tolist(), (tuple(row.values()) for row in keys), strict=True):
        if key[2] not in found:
            rows = np.flatnonzero((values.ids == value) & (steps == first[value]))
            rows = rows[np.argsort(ranks[rows])]
            _, inverse, counts = np.unique(sizes[rows], return_inverse=True, return_counts=True)
            largest = np.flatnonzero(counts == counts.max())
            is_odd = inverse != largest[0] if len(largest) == 1 else np.ones(len(rows), np.bool_)
            odd = tuple(ranks[rows][is_odd].tolist())
            sides = [ranks[rows][inverse == side].tolist() for side in range(len(counts))]
            factor = ""
            if len(sides) == 2:
                is_site = holds(table.column("site"), key[2].__eq__)[groups.firsts]
                at = differs & is_site & (step_of >= first[value])
                factor = _common_factor(sizes, ranks, groups.ids, at, sides, is_gradient=key[2] == "grad")
            found[key[2]] = ApartByProbe(key, int(first[value]), int(last_equal[value]), odd, len(largest) == 1, factor)
    return list(found.values())


def _common_factor(
    sizes: Any, ranks: Integers, ids: Integers, asked: Any, sides: list[list[int]], *, is_gradient: bool
) -> str:
    """Return a sentence on the factor between two sets of ranks. Empty if the groups in `asked` disagree on it."""
    of_sides = []
    for side in sides:
        column = np.full(len(asked), np.nan)
        at = ranks == side[0]
        column[ids[at]] = sizes[at]
        of_sides.append(column[asked])
    with np.errstate(divide="ignore", invalid="ignore"):
        factors = of_sides[1] / of_sides[0]
        factors = factors[~np.isnan(factors)]
        if len(factors) < _LEAST_FACTORS or not np.ptp(factors) <= SAME * factors[0]:
            return ""
    return factor_in_words(float(factors[0]), *sides, is_gradient=is_gradient)
