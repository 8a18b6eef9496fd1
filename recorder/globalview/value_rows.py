"""What the rows and the manifests say of one value, before anything is decided of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..format.roots import Stage
from ..layout.levels import BatchGroup, split
from ..layout.placement import NoPlan, RankChunk
from ..layout.rules import Batch
from ..read.metadata import NONE, MetadataRows
from ..sites import NUMBERS
from .leaves import Comparison, Leaf, LeafAcrossSteps, Leaves
from .row_groups import LABELS, GroupedRows
from .run_topology import DataParallelGroup, Topology
from .sharding import NO_BATCH, RootBatches, ShardingInference


class ValueKey(NamedTuple):
    """What a value is called, by the columns of `grouping.LABELS`."""

    root: str
    module_path: str
    site: str
    name: str
    mode: str
    phase: str


class ValueRows(NamedTuple):
    """The rows of one value, in data-parallel order, with what the manifests say of their ranks."""

    first: int
    """Position of its first row in the order of execution."""
    step: int
    key: ValueKey
    writer: int
    """Number of the first row's writer."""
    stage: Stage | None
    """The pipeline stage that ran it; the numbers of a step are of the whole program."""
    leaf: Leaf
    """What it is one of, step by step."""
    group: DataParallelGroup
    indices: list[int]
    """Indices of the value's rows among the grouped rows."""
    codes: tuple[int, ...]
    """For each row, the number that stands for its chunk."""
    chunks: list[RankChunk]
    ranks: tuple[int, ...]
    """The rank of each row."""
    positions: tuple[int, ...]
    expected: tuple[int, ...]
    """Ranks that should have a row."""
    batch_groups: tuple[BatchGroup, ...] | NoPlan | None
    """Ranks that share a local batch, where ranks do."""
    local_batches: LocalBatches


class LocalBatches(NamedTuple):
    """The parts of the batch that chunks are of."""

    chunks: tuple[int, ...]
    """The first chunk of each part."""
    ranks: tuple[int, ...]
    """Its rank."""
    micro_steps: tuple[int, ...]
    expected: tuple[int, ...]
    """A rank of each part that there should be."""
    num_expected: int

    @property
    def has_micro_batches(self) -> bool:
        """Whether they are micro-batches of a pipeline."""
        return any(self.micro_steps)


def find_local_batches(
    chunks: list[RankChunk],
    batch_groups: tuple[BatchGroup, ...] | NoPlan | None,
    group: DataParallelGroup,
    expected: tuple[int, ...],
) -> LocalBatches:
    """The parts of the batch that a value's chunks are of.

    Args:
        chunks: in data-parallel order.
        batch_groups: chunks of ranks that share a part, where ranks do.
        group: of the value's module.
        expected: ranks that should have a chunk.
    """
    ranks = tuple(chunk.rank for chunk in chunks)
    micro_steps = tuple(chunk.micro_step for chunk in chunks)
    if batch_groups is None or isinstance(batch_groups, NoPlan):
        return LocalBatches(tuple(range(len(chunks))), ranks, micro_steps, expected, len(expected))
    at = tuple(batch_group.units[0][0] for batch_group in batch_groups)
    leads = tuple(ranks[i] for i in at)
    others = (some[0] for some in group.model_groups if not set(some) & set(leads))
    num_ranks = len(group.model_groups) or (len(expected) if chunks[0].mesh is None else 0)
    num_expected = max(len(batch_groups), num_ranks * len(set(micro_steps)))
    return LocalBatches(at, leads, tuple(micro_steps[i] for i in at), (*dict.fromkeys(leads), *others), num_expected)


class ValueReader:
    """Reads what is known of values. Decides nothing."""

    def __init__(
        self,
        rows: MetadataRows,
        topology: Topology,
        counts: npt.NDArray[np.bool_],
        leaves: Leaves,
        *,
        is_same: Callable[[Sequence[int]], bool | None],
        items_of: Callable[[int], npt.NDArray[Any] | None],
    ) -> None:
        """Nothing is read before the first question.

        Args:
            rows: of a run or of a window of steps of it, with `grouping.COLUMNS`.
            topology: of the run.
            counts: by position, whether a row counts.
            leaves: what all steps of the run say.
            is_same: whether the tensors of some rows hold the same values; None where a payload is missing.
            items_of: a row's tensor; None where its payload is missing.
        """
        self.rows = rows
        self.topology = topology
        self.leaves = leaves
        self.is_same = is_same
        self.items_of = items_of
        self.root_batches = RootBatches(rows, counts, leaves.varies)
        self.sharding = ShardingInference(rows, counts, topology.is_linear)
        self._counts = counts
        self._split: dict[Any, tuple[tuple[BatchGroup, ...] | NoPlan | None, LocalBatches]] = {}

    def read(self, grouped: GroupedRows, number: int) -> ValueRows:
        """The rows of a value, by its number."""
        start, end = int(grouped.starts[number]), int(grouped.ends[number])
        first = int(grouped.chosen[start])
        step = int(self.rows.numbers("step")[first])
        key = ValueKey(*(grouped.labels[label].text(number) for label in LABELS))
        writer = int(grouped.writers[number])
        stage = None if key.site in NUMBERS else self.topology.stages.get((writer, key.root))
        group = self.topology.group(key.root, key.module_path, writer)
        indices = list(range(start, end))
        if len(indices) > 1 and not group.is_sorted:
            order = {rank: i for i, rank in enumerate(group.ranks)}
            indices.sort(key=lambda i: order.get(grouped.chunks[grouped.codes[i]].rank, len(order)))
        codes = tuple(grouped.codes[indices].tolist())
        chunks = [grouped.chunks[code] for code in codes]
        ranks = tuple(chunk.rank for chunk in chunks)
        expected = self._expected_ranks(key, step, group, chunks)
        batch_groups, local_batches = self._split_batch(codes, chunks, group, expected)
        positions = tuple(grouped.chosen[indices].tolist())
        return ValueRows(
            first=first,
            step=step,
            key=key,
            writer=writer,
            stage=stage,
            leaf=self.leaf(grouped, number),
            group=group,
            indices=indices,
            codes=codes,
            chunks=chunks,
            ranks=ranks,
            positions=positions,
            expected=expected,
            batch_groups=batch_groups,
            local_batches=local_batches,
        )

    def _expected_ranks(
        self, key: ValueKey, step: int, group: DataParallelGroup, chunks: Sequence[RankChunk]
    ) -> tuple[int, ...]:
        ranks = tuple(chunk.rank for chunk in chunks)
        expected = group.ranks if set(ranks) <= set(group.ranks) else tuple(dict.fromkeys((*group.ranks, *ranks)))
        if key.site in NUMBERS:  # the program decides who reports a number
            reporting = self._reporting_ranks.get((key.root, key.name), set())
            return tuple(rank for rank in expected if rank in reporting or self.topology.last_step(rank) < step)
        if key.site == "optim" and group.source == "fsdp" and all(chunk.shape == () for chunk in chunks):
            return ranks  # FSDP1 keeps no step where a rank holds nothing of a parameter
        return expected

    @cached_property
    def _reporting_ranks(self) -> dict[tuple[str, str], set[int]]:
        """Which ranks have rows of a number of the step, by root and name."""
        rows, everything = self.rows, np.flatnonzero(self._counts)
        sites = rows.keys("site", everything)
        positions = everything[np.isin(sites.codes, [sites.code(site) for site in NUMBERS])]
        roots, names = (rows.keys(name, positions) for name in ("root", "name"))
        codes = np.stack([roots.codes, names.codes, rows.numbers("rank")[positions]])
        ranks_of: dict[tuple[str, str], set[int]] = {}
        for root, name, rank in np.unique(codes, axis=1).T.tolist():
            ranks_of.setdefault(((roots.texts or [])[root], (names.texts or [])[name]), set()).add(rank)
        return ranks_of

    def _split_batch(
        self, codes: tuple[int, ...], chunks: list[RankChunk], group: DataParallelGroup, expected: tuple[int, ...]
    ) -> tuple[tuple[BatchGroup, ...] | NoPlan | None, LocalBatches]:
        """The chunks by local batch, where several ranks share one, and those local batches."""
        key = codes, id(group), expected
        if key not in self._split:
            batch_groups = split(chunks, () if group.conflict else group.model_groups, expected)
            self._split[key] = batch_groups, find_local_batches(chunks, batch_groups, group, expected)
        return self._split[key]

    def compare(self, grouped: GroupedRows, number: int, value: ValueRows) -> Comparison:
        """What is known of whether the ranks' chunks are equal."""
        across_steps = LeafAcrossSteps(self.leaves, value.leaf, value.chunks)
        is_float = value.chunks[0].dtype.startswith(("float", "bfloat"))
        return Comparison(grouped, number, value.indices, self.is_same, across_steps, is_float=is_float)

    def leaf(self, grouped: GroupedRows, number: int) -> Leaf:
        """What a value is one of, step by step."""
        root, path, site, name, mode, phase = (grouped.labels[label].text(number) for label in LABELS)
        stage = self.topology.stages.get((int(grouped.writers[number]), root))
        start = grouped.starts[number]
        return Leaf(
            root,
            NONE if stage is None else stage.number,
            path,
            site,
            name,
            mode,
            phase,
            call=int(self.rows.numbers("call")[grouped.chosen[start]]),
            num_dims=len(grouped.chunks[grouped.codes[start]].shape),
        )

    def batches(self, value: ValueRows, *, is_later: bool) -> tuple[Batch, ...]:
        """What the root's input says of the batch, likeliest first.

        Args:
            value: an activation, or the gradient of one.
            is_later: it came after the root's call, with a backward, so that its position among the rows says nothing.
        """
        local = value.local_batches
        seqs = None
        if not is_later:
            at = value.positions
            if len(local.chunks) < len(at):
                at = tuple(value.positions[i] for i in local.chunks)
            seqs = self.rows.numbers("seq")[list(at)].tolist()
        root, mode, step = value.key.root, value.key.mode, value.step
        if not local.has_micro_batches:
            when = root, mode, step, int(self.rows.numbers("micro_step")[value.first])
            return self.root_batches.of(when, local.ranks, seqs, local.expected)
        of_micro_batches = [
            self.root_batches.of((root, mode, step, micro_step), (rank,), seqs and seqs[i : i + 1], (rank,))[0]
            for i, (rank, micro_step) in enumerate(zip(local.ranks, local.micro_steps, strict=True))
        ]
        sizes = [batch.sizes[0] for batch in of_micro_batches if batch.sizes]
        if len(sizes) < len(of_micro_batches):
            return NO_BATCH
        return (of_micro_batches[0]._replace(sizes=tuple(sizes), total=None),)
