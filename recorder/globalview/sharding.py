"""How many samples each rank had, and how tensors are cut whose rows name no position.

This module reads metadata rows alone, and must never choose between two answers. Where the rows of a step contradict
each other, or where two dims of one size might be cut, the answer is that nothing is known.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Sequence, Set
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc

from ..columns import COUNTS, MEASURED, STATISTICS, parse_shape
from ..layout.placement import NoPlan, RankChunk, mesh_of, parse_placements
from ..layout.regions import Ints
from ..layout.rules import Batch
from ..numerics.keys import NULL, bits_of, digest
from ..read.metadata import NONE, MetadataRows, Positions
from ..sites import ACTIVATIONS, STATES, values_of

_COLUMNS = ("root", "module_path", "site", "shape", "global_shape", "placements", "mesh")


class Wanted(NamedTuple):
    """Which tensors."""

    root: str
    module_path: str
    site: str
    step: int


class _ShardedDim(NamedTuple):
    """A dim along which one axis of a mesh cuts a tensor."""

    dim: int
    size: int
    """Size of this rank's chunk along the dim, if no other axis cut the tensor."""
    ranks: Ints
    """Along the axis, this one included; none where its row does not tell."""


class ShardingInference:
    """What rows that name their position say of tensors whose rows name none."""

    def __init__(
        self, rows: MetadataRows, counts: npt.NDArray[np.bool_], is_linear: Callable[[str, str], bool]
    ) -> None:
        """Nothing is read before the first question.

        Args:
            rows: of a run, with the columns of `groups.COLUMNS`.
            counts: which of them count, by position.
            is_linear: whether a module, by root and path, multiplies its input's last dim with a weight.
        """
        self._is_linear = is_linear
        self._rows = rows
        self._counts = counts
        self._of_step: dict[int, tuple[dict[object, set[_ShardedDim]], dict[object, set[_ShardedDim]]]] = {}
        self._whole: set[object] = set()
        """Root, rank and shape of the values of the step that are whole on every rank."""

    def infer(self, wanted: Wanted, chunks: Sequence[RankChunk], known: Set[int] = frozenset()) -> int | NoPlan:
        """The dim along which chunks of ranks that share a batch lie end to end, or why that is not known.

        Args:
            wanted: which tensors.
            chunks: of the ranks.
            known: the dims that were found at the steps that tell of this value; none where no step does.
        """
        parameters, dims_beside = self._step(wanted.step)
        ranks = tuple(chunk.rank for chunk in chunks)
        dims: set[int] = {*known}
        if not dims and all(chunk.shape for chunk in chunks) and self._is_linear(wanted.root, wanted.module_path):
            dims = _common([_by_parameters(parameters, wanted, chunk, ranks) for chunk in chunks])
        if not dims:
            sought = [(wanted.root, chunk.rank, chunk.shape) for chunk in chunks]
            cuts = [dims_beside.get(key, set()) if key not in self._whole else set() for key in sought]
            dims = _common([{cut.dim for cut in some if _is_of(cut, ranks)} for some in cuts])
            if len(dims) == 1 and any(chunk.shape.count(chunk.shape[min(dims)]) > 1 for chunk in chunks):
                dims = set()  # a copy of such a value that is turned round has the same shape
        shapes = ", ".join(str(list(shape)) for shape in dict.fromkeys(chunk.shape for chunk in chunks))
        why = f"ranks {', '.join(map(str, ranks[:8]))} share a batch, and their tensors of {shapes} differ"
        if len(dims) == 1:
            (dim,) = dims
            others = {(*chunk.shape[:dim], *chunk.shape[dim + 1 :]) for chunk in chunks}
            return dim if len(others) == 1 else NoPlan("per_rank", f"{why} in other dims than {dim}, which is cut")
        more = f"values beside them are cut along dims {sorted(dims)}" if dims else "nothing says how they are one"
        return NoPlan("per_rank", f"{why}; {more}; --layout '...=shard(DIM)' can")

    def _step(self, step: int) -> tuple[dict[object, set[_ShardedDim]], dict[object, set[_ShardedDim]]]:
        """The cuts of a step: of parameters by root, module and rank, of other values by root, rank and shape."""
        if step not in self._of_step:
            parameters: dict[object, set[_ShardedDim]] = {}
            dims_beside: dict[object, set[_ShardedDim]] = {}
            self._whole = set()
            for site, root, path, rank, shape, cut in self._cuts(step):
                if site in STATES:
                    parameters.setdefault((root, path, rank), set()).add(cut)
                else:
                    dims_beside.setdefault((root, rank, shape), set()).add(cut)
            self._of_step = {step: (parameters, dims_beside)}  # values come in the order of steps
            self._whole |= self._equal(step)
        return self._of_step[step]

    def _cuts(self, step: int) -> list[tuple[str, str, str, int, Ints, _ShardedDim]]:
        rows = self._rows
        positions: Positions = np.flatnonzero(self._counts & (rows.numbers("step") == step))
        is_distributed = rows.keys("placements", positions).codes != NONE
        positions = positions[is_distributed & (rows.numbers("part")[positions] == 0)]
        columns = {name: rows.keys(name, positions) for name in _COLUMNS}
        ranks = rows.numbers("rank")[positions]
        codes = np.stack([*(keys.codes for keys in columns.values()), ranks])
        _, firsts = np.unique(codes, axis=1, return_index=True)
        sharded = []
        for i in firsts.tolist():
            root, path, site, shape, whole, placements, mesh = (columns[name].text(i) for name in _COLUMNS)
            chunk = RankChunk(int(ranks[i]), "", parse_shape(shape), parse_shape(whole), None, placements, mesh)
            cuts = _cuts_of(chunk)
            if site in ACTIVATIONS and chunk.shape == chunk.global_shape:
                self._whole.add((root, chunk.rank, chunk.shape))
            if values_of(site) == "param" or (site in ACTIVATIONS and len(cuts) == 1):
                sharded += [(site, root, path, chunk.rank, chunk.shape, cut) for cut in cuts]
        return sharded

    def _equal(self, step: int) -> set[object]:
        """Root, rank and shape of plain values that several ranks have alike to the last bit; no constants, no NaN."""
        rows = self._rows
        positions: Positions = np.flatnonzero(self._counts & (rows.numbers("step") == step))
        columns = {name: rows.keys(name, positions) for name in ("root", "site", "shape", "fingerprint", "placements")}
        is_plain = (columns["placements"].codes == NONE) & (columns["fingerprint"].codes != NONE)
        low, high, nans = (rows.take(name, positions) for name in ("min", "max", "nan_count"))
        is_plain &= ~pc.fill_null(pc.equal(low, high), pc.is_valid(nans)).to_numpy()
        is_plain &= ~pc.fill_null(pc.greater(nans, 0), False).to_numpy()
        ranks = rows.numbers("rank")[positions]
        holders: dict[tuple[str, str, str], set[int]] = {}
        for i in np.flatnonzero(is_plain).tolist():
            root, site, shape, text = (columns[name].text(i) for name in ("root", "site", "shape", "fingerprint"))
            if site in ACTIVATIONS:
                holders.setdefault((root, shape, text), set()).add(int(ranks[i]))
        return {
            (root, rank, parse_shape(shape))
            for (root, shape, _), some in holders.items()
            if len(some) > 1
            for rank in some
        }


def _by_parameters(
    parameters: dict[object, set[_ShardedDim]], wanted: Wanted, chunk: RankChunk, ranks: Ints
) -> set[int]:
    """The last dim, where it has the size of what this rank has of a linear module's weight or bias."""
    cuts = parameters.get((wanted.root, wanted.module_path, chunk.rank), set())
    last = len(chunk.shape) - 1
    if values_of(wanted.site) == "input":
        fitting = [cut.size for cut in cuts if _is_of(cut, ranks) and cut.dim == 1]
    else:
        fitting = [cut.size for cut in cuts if _is_of(cut, ranks) and cut.dim == 0 and wanted.site != "tap"]
    return {last} if chunk.shape[last] in fitting else set()


def _is_of(cut: _ShardedDim, ranks: Ints) -> bool:
    return not cut.ranks or cut.ranks == ranks


def _cuts_of(chunk: RankChunk) -> list[_ShardedDim]:
    """What each axis of a mesh does to a chunk; nothing where one of them does more than cutting."""
    shape, coordinate, ranks = mesh_of(chunk)
    placements = parse_placements(chunk.placements)
    if not len(shape) == len(coordinate) == len(placements) or (ranks and len(ranks) != math.prod(shape)):
        return []
    if any(at >= num for at, num in zip(coordinate, shape, strict=True)):
        return []
    sharded_dims = []
    for axis, (placement, num) in enumerate(zip(placements, shape, strict=True)):
        kind, dim = placement.get("kind"), placement.get("dim")
        if kind == "Replicate" or num == 1:
            continue
        if kind not in ("Shard", "StridedShard") or type(dim) is not int or chunk.global_shape is None:
            return []
        if not 0 <= dim < len(chunk.global_shape):
            return []
        total = chunk.global_shape[dim]
        each = -(-total // num)
        size = max(0, min(each, total - coordinate[axis] * each))
        at: list[int | slice] = [*coordinate]
        at[axis] = slice(None)
        along = np.array(ranks).reshape(shape)[tuple(at)].tolist() if ranks else []
        sharded_dims.append(_ShardedDim(dim, size, tuple(along)))
    return sharded_dims


def _common(of_ranks: Sequence[set[int]]) -> set[int]:
    """What all ranks say; nothing where they do not say the same."""
    return of_ranks[0] if all(some == of_ranks[0] for some in of_ranks) else set()


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
