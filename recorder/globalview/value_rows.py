"""Reads facts about one value and its batch from rows and manifests, before the layout of the value is decided."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..columns import COUNTS, MEASURED, STATISTICS, parse_shape
from ..format.manifest import Stage
from ..layout.levels import BatchGroup, split
from ..layout.placement import OF_ONE_RANK, NoPlan, RankChunk
from ..layout.rules import Batch
from ..numerics.keys import NULL, bits_of, by_key, digest
from ..read.metadata import NONE, MetadataRows
from ..sites import NUMBERS
from .leaves import Comparison, Leaves
from .row_groups import LABELS, GroupedRows, Leaf, ShardingInference
from .run_topology import DataParallelGroup, Topology

NO_BATCH: tuple[Batch, ...] = (Batch(None),)
_MAX_BATCHES = 4
_When = tuple[str, str, int, int]
"""A call of a root (a module under hooks): root, mode, step and micro-step."""


class _Leaf(NamedTuple):
    shape: tuple[int, ...]
    content: str
    """A text that is equal for equal tensors. Empty if the rows do not show whether tensors are equal."""


class _Args(NamedTuple):
    seq: int
    leaves: dict[str, _Leaf]


class RootBatches:
    """The batches of every call of a root (a module under hooks). `varies`: whether an argument differs by rank."""

    def __init__(
        self, rows: MetadataRows, counts: npt.NDArray[np.bool_], varies: Callable[[str, str, str], bool]
    ) -> None:
        self._varies = varies
        self._rows = rows
        self._counts = counts
        self._known: dict[object, tuple[Batch, ...]] = {}

    def of(
        self, when: _When, ranks: tuple[int, ...], seqs: Sequence[int] | None, expected: tuple[int, ...]
    ) -> tuple[Batch, ...]:
        """Return the batches that a value may belong to, the most likely first; never empty.

        `seqs` are the `seq` of the value's rows: the value belongs to the last call that began before its row. `seqs`
        is None for a value of a backward, whose place among the rows does not show the call.
        """
        calls = self._calls.get(when)
        if calls is None:
            return NO_BATCH  # other steps may have other batches, and no answer may depend on the loaded rows
        if seqs is None:
            numbers = [tuple(min(k, len(calls.get(rank, ())) - 1) for rank in expected) for k in range(_MAX_BATCHES)]
        else:
            seq_of = dict(zip(ranks, seqs, strict=True))

            def last_begun(rank: int) -> int:
                return bisect_right([call.seq for call in calls.get(rank, ())], seq_of[rank]) - 1

            numbers = [tuple(last_begun(rank if rank in seq_of else ranks[0]) for rank in expected)]
        key = when, ranks, expected, tuple(numbers)
        if key not in self._known:
            chosen = [
                {
                    rank: calls[rank][number]
                    for rank, number in zip(expected, some, strict=True)
                    if 0 <= number < len(calls.get(rank, ()))
                }
                for some in numbers
            ]
            self._known[key] = _batches(chosen, ranks, expected, partial(self._varies, when[0], when[1]))
        return self._known[key]

    def ran(self, when: _When, rank: int) -> bool:
        return rank in self._calls.get(when, {})

    def micro_batches(self, when: tuple[str, str, int], ranks: set[int]) -> set[int]:
        """Return the micro-steps in which any of these ranks called a root. `when` is root, mode and step."""
        return set().union(*(own for rank, own in self._slices.get(when, {}).items() if rank in ranks))

    @cached_property
    def _slices(self) -> dict[tuple[str, str, int], dict[int, set[int]]]:
        micro_steps: dict[tuple[str, str, int], dict[int, set[int]]] = {}
        for (root, mode, step, micro_step), of_ranks in self._calls.items():
            for rank in of_ranks:
                micro_steps.setdefault((root, mode, step), {}).setdefault(rank, set()).add(micro_step)
        return micro_steps

    @cached_property
    def _calls(self) -> dict[_When, dict[int, list[_Args]]]:
        rows, paths = self._rows, self._rows.module_paths()
        positions = np.flatnonzero(self._counts & (paths.codes == paths.code("")))
        sites, phases = (rows.keys(name, positions) for name in ("site", "phase"))
        is_input = (sites.codes == sites.code("input")) & (phases.codes == phases.code("forward"))
        positions = positions[is_input & (rows.numbers("part")[positions] == 0)]
        positions = positions[np.argsort(rows.numbers("seq")[positions], kind="stable")]
        names = ("root", "mode", "name", "shape", "global_shape", "dtype", "fingerprint")
        columns = {name: rows.keys(name, positions) for name in names}
        numbers = {
            name: rows.numbers(name)[positions].tolist() for name in ("step", "micro_step", "call", "rank", "seq")
        }
        bits = {name: bits_of(rows.take(name, positions)) for name in (*STATISTICS, *COUNTS)}
        is_measured, statistics = bits[MEASURED] != NULL, digest([*bits.values()])
        calls: dict[_When, dict[int, list[_Args]]] = {}
        last: dict[tuple[_When, int], int] = {}
        for i in range(len(positions)):
            root, mode, name, shape, global_shape, dtype, content = (columns[n].text(i) for n in names)
            if not content and is_measured[i] and dtype.startswith(("float", "bfloat")):
                content = str(statistics[i])
            when, rank = (root, mode, numbers["step"][i], numbers["micro_step"][i]), numbers["rank"][i]
            of_rank = calls.setdefault(when, {}).setdefault(rank, [])
            if last.get((when, rank)) != numbers["call"][i]:
                last[when, rank] = numbers["call"][i]
                of_rank.append(_Args(numbers["seq"][i], {}))
            sizes = parse_shape(global_shape or shape)
            if sizes:
                of_rank[-1].leaves[name] = _Leaf(sizes, content)
        return calls


def _batches(
    calls: Iterable[dict[int, _Args]], ranks: tuple[int, ...], expected: tuple[int, ...], varies: Callable[[str], bool]
) -> tuple[Batch, ...]:
    batches: list[Batch] = []
    for of_ranks in calls:
        if all(rank in of_ranks for rank in ranks):
            batches += [batch for batch in _of_call(of_ranks, ranks, expected, varies) if batch not in batches]
    return tuple(batches[:_MAX_BATCHES]) or NO_BATCH


def _of_call(
    of_ranks: dict[int, _Args], ranks: tuple[int, ...], expected: tuple[int, ...], varies: Callable[[str], bool]
) -> list[Batch]:
    """Return the batches that a call's arguments may be; first the batch sizes that most arguments have as dim 0.

    Arguments that differ between ranks are preferred. An argument that is equal on all ranks in this call may still be
    the batch: it may be all zeros, or all ranks may have the same samples.
    """
    leaves = {
        name: [of_ranks[rank].leaves[name] for rank in ranks]
        for name in of_ranks[ranks[0]].leaves
        if all(name in of_ranks[rank].leaves for rank in ranks)
    }
    contents = {name: {leaf.content for leaf in some} for name, some in leaves.items()}
    is_shared = {name: len(ranks) > 1 and len(some) == 1 and "" not in some for name, some in contents.items()}
    differing = {name: some for name, some in leaves.items() if not is_shared[name]}
    own = differing or {name: some for name, some in leaves.items() if len(some) > 1 and varies(name)}
    names_of = by_key((tuple(leaf.shape[0] for leaf in some), name) for name, some in (own or leaves).items())
    by_votes = sorted(
        names_of.items(), key=lambda item: (-len(item[1]), -max(len(leaves[n][0].shape) for n in item[1]))
    )
    batches = []
    for sizes, (name, *_) in by_votes:
        all_leaves = [of_ranks[rank].leaves.get(name) if rank in of_ranks else None for rank in expected]
        known = [leaf.shape[0] for leaf in all_leaves if leaf is not None]
        total = sum(known) if len(known) == len(expected) else None
        inner = {math.prod(leaf.shape[1:stop]) for leaf in all_leaves if leaf for stop in range(2, len(leaf.shape) + 1)}
        batches.append(Batch(sizes, not differing, tuple(sorted(inner - {0, 1})), total))
    return batches


class ValueRows(NamedTuple):
    """The rows of one value, in data-parallel order, and what the manifests say about the ranks."""

    first: int
    """The position of the value's row with the lowest rank."""
    step: int
    stage: Stage | None
    """The pipeline stage that computed the value. None without a pipeline, and for scalars, which have no stage."""
    leaf: Leaf
    group: DataParallelGroup
    indices: list[int]
    """The indexes of the value's rows among the grouped rows."""
    codes: tuple[int, ...]
    chunks: list[RankChunk]
    ranks: tuple[int, ...]
    positions: tuple[int, ...]
    expected: tuple[int, ...]
    batch_groups: tuple[BatchGroup, ...] | NoPlan | None
    """The groups of chunks whose ranks share a part of the batch. None if each rank has a part for itself."""
    local_batches: LocalBatches


class LocalBatches(NamedTuple):
    """The parts of the batch that a value's chunks were computed from."""

    chunks: tuple[int, ...]
    """For each part of the batch, the index of the first chunk that was computed from it."""
    ranks: tuple[int, ...]
    micro_steps: tuple[int, ...]
    expected: tuple[int, ...]
    """For each part of the batch that should have a chunk, one of the part's ranks."""
    num_expected: int

    @property
    def has_micro_batches(self) -> bool:
        return any(self.micro_steps)


def find_local_batches(
    chunks: list[RankChunk],
    batch_groups: tuple[BatchGroup, ...] | NoPlan | None,
    group: DataParallelGroup,
    expected: tuple[int, ...],
) -> LocalBatches:
    """Return the parts of the batch for chunks in data-parallel order. The `expected` ranks should have a chunk."""
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
    """Reads facts about values from rows with the columns `row_groups.COLUMNS`. It decides nothing.

    `counts` flags the rows that may be used. `is_same` compares the tensors of some rows, and `items_of` reads a row's
    tensor. Both return None if a payload is missing.
    """

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
        start, end = int(grouped.starts[number]), int(grouped.ends[number])
        first = int(grouped.chosen[start])
        step = int(self.rows.numbers("step")[first])
        leaf = self.leaf(grouped, number)
        writer = int(grouped.writers[number])
        stage = None if leaf.site in NUMBERS else self.topology.stages.get((writer, leaf.root))
        group = self.topology.group(leaf.root, leaf.module_path, writer)
        indices = list(range(start, end))
        if len(indices) > 1 and not group.is_sorted:
            order = {rank: i for i, rank in enumerate(group.ranks)}
            indices.sort(key=lambda i: order.get(grouped.chunks[grouped.codes[i]].rank, len(order)))
        codes = tuple(grouped.codes[indices].tolist())
        chunks = [grouped.chunks[code] for code in codes]
        ranks = tuple(chunk.rank for chunk in chunks)
        expected = self._expected_ranks(leaf, step, group, chunks)
        positions = tuple(grouped.chosen[indices].tolist())
        own = first, step, stage, leaf, group, indices, codes, chunks, ranks, positions, expected
        return ValueRows(*own, *self._split_batch(codes, chunks, group, expected))

    def _expected_ranks(
        self, leaf: Leaf, step: int, group: DataParallelGroup, chunks: Sequence[RankChunk]
    ) -> tuple[int, ...]:
        ranks = tuple(chunk.rank for chunk in chunks)
        expected = group.ranks if set(ranks) <= set(group.ranks) else tuple(dict.fromkeys((*group.ranks, *ranks)))
        if leaf.site in NUMBERS:  # the program decides which ranks record a scalar
            reporting = self._reporting_ranks.get((leaf.root, leaf.name), set())
            return tuple(
                rank for rank in expected if rank in reporting or self.topology.last_steps.get(rank, -1) < step
            )
        if all(chunk.rank_bound == OF_ONE_RANK for chunk in chunks):
            return ranks
        if leaf.site == "optim" and group.source == "fsdp" and all(chunk.shape == () for chunk in chunks):
            return ranks  # FSDP1 keeps no step count on a rank without a part of the parameter
        return expected

    @cached_property
    def _reporting_ranks(self) -> dict[tuple[str, str], set[int]]:
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
        key = codes, id(group), expected
        if key not in self._split:
            batch_groups = split(chunks, () if group.conflict else group.model_groups, expected)
            self._split[key] = batch_groups, find_local_batches(chunks, batch_groups, group, expected)
        return self._split[key]

    def compare(self, grouped: GroupedRows, number: int, value: ValueRows) -> Comparison:
        return Comparison(self.leaves, value.leaf, value.chunks, grouped, number, value.indices, self.is_same)

    def leaf(self, grouped: GroupedRows, number: int) -> Leaf:
        root, path, site, name, mode, phase = (grouped.labels[label].text(number) for label in LABELS)
        stage = self.topology.stages.get((int(grouped.writers[number]), root))
        start = grouped.starts[number]
        call = int(self.rows.numbers("call")[grouped.chosen[start]])
        num_dims = len(grouped.chunks[grouped.codes[start]].shape)
        return Leaf(root, path, site, name, mode, phase, NONE if stage is None else stage.number, call, num_dims)

    def batches(self, value: ValueRows, *, is_later: bool) -> tuple[Batch, ...]:
        """Return the possible batches of an activation or its gradient, the most likely first.

        The batches are found in the root's inputs. With `is_later` the value came with a backward, after the root's
        call, so the value's place among the rows does not show the call.
        """
        local = value.local_batches
        seqs = None
        if not is_later:
            at = value.positions
            if len(local.chunks) < len(at):
                at = tuple(value.positions[i] for i in local.chunks)
            seqs = self.rows.numbers("seq")[list(at)].tolist()
        root, mode, step = value.leaf.root, value.leaf.mode, value.step
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
