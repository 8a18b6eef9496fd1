"""The guess of how tensors without a position are cut: as the module's parameters are, or as values beside them.

Must never choose between two answers: what rows of the same step do not agree on is not known, nor which of two dims of
one size is cut.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence, Set
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc

from ...columns import parse_shape
from ...layout.placement import mesh_of, parse_placements
from ...layout.plans import NoPlan, RankChunk
from ...layout.regions import Ints
from ...read.metadata import NONE, MetadataRows, Positions
from ...sites import ACTIVATIONS, STATES, values_of

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
