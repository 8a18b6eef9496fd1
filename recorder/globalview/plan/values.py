"""The values of some rows of a run: its rows by value, each with its plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ...layout.plans import RankChunk
from ...read.metadata import MetadataRows, Positions
from ...read.stages import MicroBatches, missing_stages
from ...sites import NUMBERS, STATES
from ..grouping.findings import Finding, FindingLog
from ..grouping.row_grouper import COLUMNS, GroupedValues, RowGrouper
from ..infer.leaves import Leaves, Sample
from ..topology.run_topology import Topology
from .overrides import Overrides
from .planner import GlobalValue, Planner
from .sampling import Sampler
from .value_rows import ValueReader

_MAX_LOOKED_UP = 100_000
"""Rows of which a look-up keeps the values for the next: those of the modules of a step, of some ranks."""


def find_counting_rows(rows: MetadataRows, topology: Topology, findings: FindingLog) -> npt.NDArray[np.bool_]:
    """By position, whether a row counts.

    A row does not count whose step a later launch recorded again, nor one of a writer of another run.
    """
    writers = rows.writer_numbers(np.arange(rows.num_rows, dtype=np.int64))
    counts: npt.NDArray[np.bool_] = ~np.isin(writers, topology.foreign_writers)
    for number in topology.foreign_writers:
        if (writers == number).any():
            text = f"writer {topology.describe(number)} belongs to another run; its rows are left out"
            findings.add("stranger", None, (), text)
    steps = rows.numbers("step")
    of_writer = {number: steps[counts & (writers == number)] for number in np.unique(writers[counts]).tolist()}
    winners = topology.winners({number: np.unique(own).tolist() for number, own in of_writer.items()})
    if not winners:
        return counts
    launches = np.array(topology.launch_indices())[writers]
    known = np.array(sorted(winners))
    wins = np.array([winners[step] for step in known.tolist()])
    is_superseded = counts & (launches != wins[np.minimum(np.searchsorted(known, steps), len(known) - 1)])
    if is_superseded.any():
        text = f"{is_superseded.sum()} rows of earlier attempts at steps that a later one recorded are left out"
        findings.add("superseded", int(np.flatnonzero(is_superseded)[0]), (), text)
    counts &= ~is_superseded
    return counts


class PlannedValues:
    """Values of which each is planned when it is first asked for."""

    def __init__(self, values: GroupedValues, planner: Planner, *, is_micro_batch: bool) -> None:
        """Nothing is planned yet; arguments as of `GlobalValues.values`."""
        self._values = values
        self._planner = planner
        self._is_micro_batch = is_micro_batch
        self._planned: dict[int, GlobalValue] = {}
        self._number_of = {int(key): number for number, key in enumerate(values.keys)}

    def __iter__(self) -> Iterator[GlobalValue]:
        """The values in the order of execution."""
        for number in self._values.order.tolist():
            yield self._plan(number)

    def holding(self, positions: Positions) -> list[GlobalValue]:
        """The values that some rows are of, in the order of execution."""
        rows = self._values.rows
        is_wanted = np.logical_or.reduceat(np.isin(rows.chosen, positions), rows.starts)
        return [self._plan(number) for number in self._values.order.tolist() if is_wanted[number]]

    def _plan(self, number: int) -> GlobalValue:
        """One value; the plan of a gradient needs that of the value itself."""
        if number not in self._planned:
            forward_key = int(self._values.forward_keys[number])
            forward_number = self._number_of.get(forward_key) if forward_key >= 0 else None
            self._planned[number] = self._planner.plan(
                self._values.rows,
                number,
                None if forward_number is None else self._plan(forward_number),
                is_gradient=forward_key >= 0,
                is_micro_batch=self._is_micro_batch,
            )
        return self._planned[number]


class GlobalValues:
    """The values of rows that are loaded. Not thread-safe."""

    def __init__(
        self,
        rows: MetadataRows,
        topology: Topology,
        *,
        loss: str,
        overrides: Overrides,
        is_same: Callable[[Sequence[int]], bool | None],
        items_of: Callable[[int], npt.NDArray[Any] | None],
        leaves: Leaves | None = None,
    ) -> None:
        """Load what is needed.

        Args:
            rows: of a run or of a window of steps of it.
            topology: of the run.
            loss: see `layout.rules.decide_gradient`.
            overrides: what the user says of layouts.
            is_same: whether the tensors of some rows hold the same values; None where a payload is missing.
            items_of: a row's tensor; None where its payload is missing.
            leaves: what all steps of the run say; by default what these rows do.
        """
        rows.load(COLUMNS)
        self._rows = rows
        self._topology = topology
        self._log = FindingLog(rows)
        self.counts = find_counting_rows(rows, topology, self._log)
        """By position, whether a row counts: superseded ones and those of another run do not."""
        for text in missing_stages(topology.stages):
            self._log.add("partial", None, (), text)
        leaves = leaves or Leaves(self.sample)
        self._reader = ValueReader(rows, topology, self.counts, leaves, is_same=is_same, items_of=items_of)
        self._grouper = RowGrouper(rows, topology.stages)
        self._planner = Planner(self._reader, overrides, loss, self._log)
        self._kept: dict[tuple[bytes, bool], PlannedValues] = {}
        self._num_kept_rows = 0

    @property
    def findings(self) -> list[Finding]:
        """What the reader should know of the values that were planned so far."""
        return self._log.findings

    def values(self, positions: Positions | None = None) -> Iterator[GlobalValue]:
        """The values of some rows (all by default), in the order of execution; rows that do not count are skipped."""
        values = self._group(positions)
        if values is not None:
            yield from PlannedValues(values, self._planner, is_micro_batch=False)

    def values_of(self, rows: Positions, module_rows: Positions, *, is_micro_batch: bool) -> list[GlobalValue]:
        """The values that some rows are of.

        Whoever asks for a tensor asks for others of its module and step, so the grouping of their rows is kept.

        Args:
            rows: positions of the rows.
            module_rows: all rows of the module at that step.
            is_micro_batch: they are of one micro-batch of a pipeline, and others do not lack.
        """
        key = module_rows.tobytes(), is_micro_batch
        if key not in self._kept:
            values = self._group(module_rows)
            if values is None:
                return []
            if self._num_kept_rows > _MAX_LOOKED_UP:
                self._kept.clear()
                self._num_kept_rows = 0
            self._num_kept_rows += len(module_rows)
            self._kept[key] = PlannedValues(values, self._planner, is_micro_batch=is_micro_batch)
        return self._kept[key].holding(rows)

    def chunks(self, value: GlobalValue) -> list[RankChunk]:
        """What the rows of a value say of it, as its plan numbers them."""
        positions = np.array(value.positions, np.int64)
        micro_steps = MicroBatches(self._rows, positions, self._topology.stages).micro_step
        return [self._grouper.chunk(int(p), int(m)) for p, m in zip(positions, micro_steps, strict=True)]

    def sample(self, positions: Positions | None = None) -> Sample | None:
        """The values of these rows but parameters and their like, whose layout hangs on no value; None without any."""
        values = self._group(positions, without_sites=(*STATES, *NUMBERS))
        return None if values is None else Sampler(self._reader).sample(values)

    def _group(self, positions: Positions | None, without_sites: Sequence[str] = ()) -> GroupedValues | None:
        """The rows that count by value, each tensor by its part 0; None without any."""
        chosen = np.flatnonzero(self.counts) if positions is None else positions[self.counts[positions]]
        chosen = chosen[self._rows.numbers("part")[chosen] == 0]
        if without_sites:
            sites = self._rows.keys("site", chosen)
            chosen = chosen[~np.isin(sites.codes, [sites.code(site) for site in without_sites])]
        return self._grouper.group(chosen) if len(chosen) else None
