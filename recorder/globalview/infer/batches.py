"""What the inputs of a root say of the batch: how many samples each rank had, call by call. Reads no payload."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ...columns import COUNTS, MEASURED, STATISTICS, parse_shape
from ...layout.rules import Batch
from ...numerics.keys import NULL, bits_of, digest
from ...read.metadata import MetadataRows

NO_BATCH: tuple[Batch, ...] = (Batch(None),)
_MAX_BATCHES = 4
_When = tuple[str, str, int, int]
"""Root, mode, step and micro-step."""


class _Leaf(NamedTuple):
    """An argument with dims."""

    shape: tuple[int, ...]
    content: str
    """Equal where the values are, as far as rows tell; empty where they do not."""


class _Call(NamedTuple):
    """One call of a root on one rank."""

    seq: int
    """The `seq` of the first argument of the call."""
    leaves: dict[str, _Leaf]


class RootBatches:
    """The batches of all calls of all roots."""

    def __init__(
        self, rows: MetadataRows, counts: npt.NDArray[np.bool_], varies: Callable[[str, str, str], bool]
    ) -> None:
        """Read nothing before the first question.

        Args:
            rows: the rows of a run, with the columns of `groups.COLUMNS`.
            counts: which rows count, by position.
            varies: whether ranks were ever given different values for an argument, named by root, mode and name.
        """
        self._varies = varies
        self._rows = rows
        self._counts = counts
        self._known: dict[object, tuple[Batch, ...]] = {}

    def of(
        self, when: _When, ranks: tuple[int, ...], seqs: Sequence[int] | None, expected: tuple[int, ...]
    ) -> tuple[Batch, ...]:
        """Return the batches that values may belong to, the likeliest first; never empty.

        Args:
            when: root, mode, step and micro-step of the values.
            ranks: the ranks that have such a value.
            seqs: the numbers of their rows: a value belongs to the last call that began before it. None for values
                that came later, with a backward.
            expected: the ranks that should have such a value.
        """
        calls = self._calls.get(when)
        if calls is None:
            return NO_BATCH  # that of another step might be another: windows of steps must answer as the whole does
        if seqs is None:
            numbers = [tuple(min(k, len(calls.get(rank, ())) - 1) for rank in expected) for k in range(_MAX_BATCHES)]
        else:
            at = dict(zip(ranks, seqs, strict=True))
            first = bisect_right([call.seq for call in calls.get(ranks[0], ())], at[ranks[0]]) - 1
            numbers = [
                tuple(
                    bisect_right([call.seq for call in calls.get(rank, ())], at[rank]) - 1 if rank in at else first
                    for rank in expected
                )
            ]
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
        """Whether a call of the root was recorded on a rank."""
        return rank in self._calls.get(when, {})

    def micro_batches(self, when: tuple[str, str, int], ranks: set[int]) -> set[int]:
        """The micro-steps of a root, mode and step in which some of these ranks called the root."""
        return set().union(*(own for rank, own in self._slices.get(when, {}).items() if rank in ranks))

    @cached_property
    def _slices(self) -> dict[tuple[str, str, int], dict[int, set[int]]]:
        micro_steps: dict[tuple[str, str, int], dict[int, set[int]]] = {}
        for (root, mode, step, micro_step), of_ranks in self._calls.items():
            for rank in of_ranks:
                micro_steps.setdefault((root, mode, step), {}).setdefault(rank, set()).add(micro_step)
        return micro_steps

    @cached_property
    def _calls(self) -> dict[_When, dict[int, list[_Call]]]:
        """The calls in their order, by slice and rank."""
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
        calls: dict[_When, dict[int, list[_Call]]] = {}
        last: dict[tuple[_When, int], int] = {}
        for i in range(len(positions)):
            root, mode, name, shape, global_shape, dtype, content = (columns[n].text(i) for n in names)
            if not content and is_measured[i] and dtype.startswith(("float", "bfloat")):
                content = str(statistics[i])
            when, rank = (root, mode, numbers["step"][i], numbers["micro_step"][i]), numbers["rank"][i]
            of_rank = calls.setdefault(when, {}).setdefault(rank, [])
            if last.get((when, rank)) != numbers["call"][i]:
                last[when, rank] = numbers["call"][i]
                of_rank.append(_Call(numbers["seq"][i], {}))
            sizes = parse_shape(global_shape or shape)
            if sizes:
                of_rank[-1].leaves[name] = _Leaf(sizes, content)
        return calls


def _batches(
    calls: Iterable[dict[int, _Call]],
    ranks: tuple[int, ...],
    expected: tuple[int, ...],
    varies: Callable[[str], bool],
) -> tuple[Batch, ...]:
    batches: list[Batch] = []
    for of_ranks in calls:
        if all(rank in of_ranks for rank in ranks):
            batches += [batch for batch in _of_call(of_ranks, ranks, expected, varies) if batch not in batches]
    return tuple(batches[:_MAX_BATCHES]) or NO_BATCH


def _of_call(
    of_ranks: dict[int, _Call], ranks: tuple[int, ...], expected: tuple[int, ...], varies: Callable[[str], bool]
) -> list[Batch]:
    """The sizes of dim 0 of the arguments of one call: of those that differ between ranks, the most frequent first.

    What all ranks were given alike in this call may be the batch nevertheless: zeros, or the same samples for all.
    """
    leaves = {
        name: [of_ranks[rank].leaves[name] for rank in ranks]
        for name in of_ranks[ranks[0]].leaves
        if all(name in of_ranks[rank].leaves for rank in ranks)
    }
    differing = {name: some for name, some in leaves.items() if not _are_shared(some)}
    own = differing or {name: some for name, some in leaves.items() if len(some) > 1 and varies(name)}
    votes = Counter(tuple(leaf.shape[0] for leaf in some) for some in (own or leaves).values())
    num_dims: dict[tuple[int, ...], int] = {}
    for some in (own or leaves).values():
        sizes = tuple(leaf.shape[0] for leaf in some)
        num_dims[sizes] = max(num_dims.get(sizes, 0), len(some[0].shape))
    batches = []
    for sizes in sorted(votes, key=lambda sizes: (-votes[sizes], -num_dims[sizes])):
        name = next(name for name, some in (own or leaves).items() if tuple(leaf.shape[0] for leaf in some) == sizes)
        all_leaves = [of_ranks[rank].leaves.get(name) if rank in of_ranks else None for rank in expected]
        known = [leaf.shape[0] for leaf in all_leaves if leaf is not None]
        total = sum(known) if len(known) == len(expected) else None
        inner = {math.prod(leaf.shape[1:stop]) for leaf in all_leaves if leaf for stop in range(2, len(leaf.shape) + 1)}
        batches.append(Batch(sizes, not differing, tuple(sorted(inner - {0, 1})), total))
    return batches


def _are_shared(leaves: Sequence[_Leaf]) -> bool:
    return len(leaves) > 1 and bool(leaves[0].content) and len({leaf.content for leaf in leaves}) == 1
