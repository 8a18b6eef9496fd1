"""Owns the guess of how tensors without a place are cut: as the module's parameters are, or as values beside them.

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

from ..layout.placement import mesh_of, parse_placements
from ..layout.plans import Apart, Piece
from ..layout.regions import Ints
from .batches import text_of
from .deciding import STATE_SITES
from .decode import parse_shape
from .light import NONE, LightRows, Positions

_COLUMNS = ("root", "module_path", "site", "shape", "global_shape", "placements", "mesh")
_SHOWN_SITES = ("input", "output", "grad_input", "grad_output", "tap")


class Wanted(NamedTuple):
    """Which tensors."""

    root: str
    module_path: str
    site: str
    step: int


class _Cut(NamedTuple):
    """A dim along which one axis of a mesh cuts a tensor."""

    dim: int
    size: int
    """Of this rank's piece along the dim, if no other axis cut it."""
    ranks: Ints
    """Along the axis, this one included; none where its row does not tell."""


class Cuts:
    """What the placed rows of a run say of tensors that have no place."""

    def __init__(self, rows: LightRows, counts: npt.NDArray[np.bool_], is_linear: Callable[[str, str], bool]) -> None:
        """Nothing is read before the first question.

        Args:
            rows: of a run, with the columns of `groups.COLUMNS`.
            counts: which of them count, by position.
            is_linear: whether a module, by root and path, multiplies its input's last dim with a weight.
        """
        self._is_linear = is_linear
        self._rows = rows
        self._counts = counts
        self._of_step: dict[int, tuple[dict[object, set[_Cut]], dict[object, set[_Cut]]]] = {}
        self._whole: set[object] = set()
        """Of that step, root, rank and shape of values that are whole on every rank."""

    def infer(self, wanted: Wanted, pieces: Sequence[Piece], known: Set[int] = frozenset()) -> int | Apart:
        """The dim along which pieces of ranks that share a batch lie end to end, or why that is not known.

        Args:
            wanted: which tensors.
            pieces: of the ranks.
            known: the dims that were found at the steps that tell of this value; none where no step does.
        """
        parameters, neighbours = self._step(wanted.step)
        ranks = tuple(piece.rank for piece in pieces)
        found: set[int] = {*known}
        if not found and all(piece.shape for piece in pieces) and self._is_linear(wanted.root, wanted.module_path):
            found = _common([_by_parameters(parameters, wanted, piece, ranks) for piece in pieces])
        if not found:
            places = [(wanted.root, piece.rank, piece.shape) for piece in pieces]
            cuts = [neighbours.get(place, set()) if place not in self._whole else set() for place in places]
            found = _common([{cut.dim for cut in some if _is_of(cut, ranks)} for some in cuts])
            if len(found) == 1 and any(piece.shape.count(piece.shape[min(found)]) > 1 for piece in pieces):
                found = set()  # a copy of such a value that is turned round has the same shape
        shapes = ", ".join(str(list(shape)) for shape in dict.fromkeys(piece.shape for piece in pieces))
        why = f"ranks {', '.join(map(str, ranks[:8]))} share a batch, and their tensors of {shapes} differ"
        if len(found) == 1:
            (dim,) = found
            others = {(*piece.shape[:dim], *piece.shape[dim + 1 :]) for piece in pieces}
            return dim if len(others) == 1 else Apart("per_rank", f"{why} in other dims than {dim}, which is cut")
        more = f"values beside them are cut along dims {sorted(found)}" if found else "nothing says how they are one"
        return Apart("per_rank", f"{why}; {more}; --layout '...=shard(DIM)' can")

    def _step(self, step: int) -> tuple[dict[object, set[_Cut]], dict[object, set[_Cut]]]:
        """Of a step, cuts by root, module and rank of parameters, and by root, rank and shape of other values."""
        if step not in self._of_step:
            parameters: dict[object, set[_Cut]] = {}
            neighbours: dict[object, set[_Cut]] = {}
            self._whole = set()
            for site, root, path, rank, shape, cut in self._cuts(step):
                if site in STATE_SITES:
                    parameters.setdefault((root, path, rank), set()).add(cut)
                else:
                    neighbours.setdefault((root, rank, shape), set()).add(cut)
            self._of_step = {step: (parameters, neighbours)}  # values come in the order of steps
            self._whole |= self._equal(step)
        return self._of_step[step]

    def _cuts(self, step: int) -> list[tuple[str, str, str, int, Ints, _Cut]]:
        rows = self._rows
        positions: Positions = np.flatnonzero(self._counts & (rows.numbers("step") == step))
        placed = rows.keys("placements", positions).codes != NONE
        positions = positions[placed & (rows.numbers("part")[positions] == 0)]
        columns = {name: rows.keys(name, positions) for name in _COLUMNS}
        ranks = rows.numbers("rank")[positions]
        codes = np.stack([*(keys.codes for keys in columns.values()), ranks])
        _, firsts = np.unique(codes, axis=1, return_index=True)
        found = []
        for i in firsts.tolist():
            root, path, site, shape, whole, placements, mesh = (text_of(columns[name], i) for name in _COLUMNS)
            piece = Piece(int(ranks[i]), "", parse_shape(shape), parse_shape(whole), None, placements, mesh)
            cuts = _cuts_of(piece)
            if site in _SHOWN_SITES and piece.shape == piece.global_shape:
                self._whole.add((root, piece.rank, piece.shape))
            if site in ("param", "grad") or (site in _SHOWN_SITES and len(cuts) == 1):
                found += [(site, root, path, piece.rank, piece.shape, cut) for cut in cuts]
        return found

    def _equal(self, step: int) -> set[object]:
        """The same of plain values that several ranks have alike, to the last bit; not of constants, nor of NaN."""
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
            root, site, shape, text = (text_of(columns[name], i) for name in ("root", "site", "shape", "fingerprint"))
            if site in _SHOWN_SITES:
                holders.setdefault((root, shape, text), set()).add(int(ranks[i]))
        return {
            (root, rank, parse_shape(shape))
            for (root, shape, _), some in holders.items()
            if len(some) > 1
            for rank in some
        }


def _by_parameters(parameters: dict[object, set[_Cut]], wanted: Wanted, piece: Piece, ranks: Ints) -> set[int]:
    """The last dim, where it has the size of what this rank has of a linear module's weight or bias."""
    cuts = parameters.get((wanted.root, wanted.module_path, piece.rank), set())
    last = len(piece.shape) - 1
    if wanted.site in ("input", "grad_input"):
        fitting = [cut.size for cut in cuts if _is_of(cut, ranks) and cut.dim == 1]
    else:
        fitting = [cut.size for cut in cuts if _is_of(cut, ranks) and cut.dim == 0 and wanted.site != "tap"]
    return {last} if piece.shape[last] in fitting else set()


def _is_of(cut: _Cut, ranks: Ints) -> bool:
    return not cut.ranks or cut.ranks == ranks


def _cuts_of(piece: Piece) -> list[_Cut]:
    """What each axis of a mesh does to a piece; nothing where one of them does more than cutting."""
    shape, coordinate, ranks = mesh_of(piece)
    placements = parse_placements(piece.placements)
    if not len(shape) == len(coordinate) == len(placements) or (ranks and len(ranks) != math.prod(shape)):
        return []
    if any(at >= num for at, num in zip(coordinate, shape, strict=True)):
        return []
    found = []
    for axis, (placement, num) in enumerate(zip(placements, shape, strict=True)):
        kind, dim = placement.get("kind"), placement.get("dim")
        if kind == "Replicate" or num == 1:
            continue
        if kind not in ("Shard", "StridedShard") or type(dim) is not int or piece.global_shape is None:
            return []
        if not 0 <= dim < len(piece.global_shape):
            return []
        total = piece.global_shape[dim]
        each = -(-total // num)
        size = max(0, min(each, total - coordinate[axis] * each))
        at: list[int | slice] = [*coordinate]
        at[axis] = slice(None)
        along = np.array(ranks).reshape(shape)[tuple(at)].tolist() if ranks else []
        found.append(_Cut(dim, size, tuple(along)))
    return found


def _common(of_ranks: Sequence[set[int]]) -> set[int]:
    """What all ranks say; nothing where they do not say the same."""
    return of_ranks[0] if all(some == of_ranks[0] for some in of_ranks) else set()
