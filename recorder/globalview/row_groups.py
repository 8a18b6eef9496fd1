"""Groups the rows of several ranks by value, and collects findings about the rows.

The module also infers along which dim plain tensors (no DTensors) are cut. The evidence is in rows of the same step
that name their positions. The dim stays unknown if these rows contradict each other, or if either of two dims of equal
size might be cut. The module must never mix two launches within a step, and never read a payload.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc

from ..columns import COUNTS, KEY, MEASURED, STATISTICS, note_members, parse_shape
from ..format.manifest import Stage
from ..layout.placement import OF_ONE_RANK, RANK_BOUND, TURNED, NoPlan, RankChunk, mesh_of, parse_placements
from ..layout.regions import Ints
from ..numerics.keys import NULL, POSITIVE, Integers, array_of, bits_of, digest, pack
from ..read.metadata import NONE, Keys, MetadataRows, MicroBatches, Positions, in_order
from ..sites import ACTIVATIONS, STATES, VALUE_OF, values_of

FORWARD_OF = {gradient: site for gradient, site in VALUE_OF.items() if gradient in ACTIVATIONS}
"""Maps the sites of activation gradients to the sites of the activations, such as ``grad_output`` to ``output``."""
LABELS = ("root", "module_path", "site", "name", "mode", "phase")
_CHUNK = ("dtype", "shape", "global_shape", "offsets", "placements", "mesh", "note")
COLUMNS = (
    *KEY, *_CHUNK, *STATISTICS, *COUNTS, "fingerprint", "rank", "seq", "part", "attempt", "encoding", "payload_bytes",
    "numel", "batch", "row",
)  # fmt: skip
"""The columns that must be loaded before rows are grouped."""

_MINUS_ZERO = np.iinfo(np.int64).min
"""The bits of the float -0.0 as an int64."""


class Leaf(NamedTuple):
    """A tensor that is recorded repeatedly under one name."""

    root: str
    module_path: str
    site: str
    name: str
    mode: str
    phase: str
    stage: int
    call: int
    num_dims: int


class GroupedRows(NamedTuple):
    """Rows grouped by value, with facts about each row and about each value. Values are in the order of their keys."""

    chosen: Positions
    starts: Integers
    ends: Integers
    codes: Integers
    chunks: list[RankChunk]
    equal: Integers
    """For each value: 1 if the ranks' tensors are equal, 0 if they differ, `NONE` if only the payloads could tell."""
    has_same_statistics: npt.NDArray[np.bool_]
    is_blank: npt.NDArray[np.bool_]
    """For each value: True if all rows' statistics show a constant, NaN or nothing finite. Any layout fits."""
    is_zero: npt.NDArray[np.bool_]
    """For each value: True if every row's statistics show only zeros, of either sign."""
    has_nan: npt.NDArray[np.bool_]
    """For each value: True if at least one row's statistics show NaN, or no finite number."""
    is_measured: npt.NDArray[np.bool_]
    fingerprints: Integers
    statistics: Integers
    """For each row, a digest of all its statistics; `NONE` for a row without statistics."""
    labels: dict[str, Keys]
    writers: Integers
    """For each value, the index of the writer of its first row."""
    keys: Integers
    """For each value, the id of its key (root, module, site, name, mode, phase, step and so on)."""
    forward_keys: Integers
    """For each gradient, the key of its activation, or if that was not recorded, a key that no value has. Else -1."""
    order: Integers
    """The indexes of the values in the order of execution."""


class RowGrouper:
    """Groups rows by value. `COLUMNS` must be loaded. `stages` are the pipeline stages by writer and root."""

    def __init__(self, rows: MetadataRows, stages: Mapping[tuple[int, str], Stage]) -> None:
        self._rows = rows
        self._stages = stages
        self._chunks: list[RankChunk] = []
        self._numbers: dict[RankChunk, int] = {}

    def group(self, chosen: Positions) -> GroupedRows:
        """Group rows by value, and order the rows of each value by rank."""
        rows = self._rows
        micro_batches = MicroBatches(rows, chosen, self._stages)
        keys, forward_keys = self._number_keys(chosen, micro_batches)
        ranks = rows.numbers("rank")[chosen]
        order = np.lexsort([micro_batches.micro_step, ranks, keys])
        chosen, keys, forward_keys = chosen[order], keys[order], forward_keys[order]
        starts = np.flatnonzero(np.r_[True, keys[1:] != keys[:-1]])
        sequence = in_order(rows, chosen[starts], micro_batches.stage[order][starts])
        of_values = keys[starts], forward_keys[starts], sequence
        return self._describe(chosen, starts, micro_batches.micro_step[order], *of_values)

    def _number_keys(self, chosen: Positions, micro_batches: MicroBatches) -> tuple[Integers, Integers]:
        """Return the id of each row's key. For a gradient, also return the id of its activation's key (else -1)."""
        keys = {name: self._rows.keys(name, chosen) for name in KEY}
        columns = {name: key.codes.copy() for name, key in keys.items()}
        columns |= {"micro_step": micro_batches.key, "stage": micro_batches.stage}
        sites = keys["site"]
        forward_site = np.full(len(sites.texts or ()) + 1, NONE)
        for code, site in enumerate(sites.texts or ()):
            if site in FORWARD_OF:
                forward_site[code] = sites.code(FORWARD_OF[site])
        backward, forward = keys["phase"].code("backward"), keys["phase"].code("forward")
        is_gradient = (forward_site[columns["site"]] >= 0) & (columns["phase"] == backward) & (forward >= 0)
        at = np.flatnonzero(is_gradient)
        changed = {
            "site": forward_site[columns["site"][at]],
            "phase": np.full(len(at), forward),
            "repeat": np.zeros(len(at)),
        }
        both = [np.concatenate([columns[name], changed.get(name, columns[name][at])]) for name in columns]
        numbers = pack(both)
        forward_keys = np.full(len(chosen), -1)
        forward_keys[at] = numbers[len(chosen) :]
        is_backward = columns["phase"] == backward
        is_backward &= np.isin(columns["site"], [sites.code(site) for site in FORWARD_OF])
        # No forward row has the activation's site. The largest integer is a key that no value has.
        forward_keys[is_backward & (forward_keys < 0)] = np.iinfo(np.int64).max
        return numbers[: len(chosen)], forward_keys

    def _describe(
        self, chosen: Positions, starts: Integers, micro_steps: Integers, keys: Integers, forward_keys: Integers,
        sequence: Integers,
    ) -> GroupedRows:  # fmt: skip
        rows = self._rows
        ends = np.r_[starts[1:], len(chosen)]
        columns = [self._rows.keys(name, chosen).codes for name in _CHUNK]
        local = pack([*columns, rows.numbers("rank")[chosen], micro_steps])
        _, first_of_code = np.unique(local, return_index=True)
        numbers = []  # sorted, so that chunks have the same indexes in every later query
        for at in first_of_code:
            chunk = self.chunk(int(chosen[at]), int(micro_steps[at]))
            numbers.append(self._numbers.setdefault(chunk, len(self._chunks)))
            if numbers[-1] == len(self._chunks):
                self._chunks.append(chunk)
        codes = np.array(numbers, np.int64)[local]
        of_row = np.repeat(np.arange(len(starts)), ends - starts)
        fingerprints = self._rows.keys("fingerprint", chosen).codes
        firsts = starts[of_row]
        has_fingerprint = np.logical_and.reduceat(fingerprints != NONE, starts)
        same_fingerprint = np.logical_and.reduceat(fingerprints == fingerprints[firsts], starts)
        bits = {name: bits_of(rows.take(name, chosen)) for name in (*STATISTICS, *COUNTS)}
        is_measured = bits[MEASURED] != NULL
        has_statistics = np.logical_and.reduceat(is_measured, starts)
        digests = digest([*bits.values()])
        same_statistics = np.logical_and.reduceat(digests == digests[firsts], starts)
        low, high, nans, infs = (bits[name] for name in ("min", "max", "nan_count", "inf_count"))
        low, high = (np.where(column == _MINUS_ZERO, 0, column) for column in (low, high))
        has_nan = is_measured & ((nans > 0) | (low == NULL))
        is_constant = is_measured & (low == high) & (infs == 0)
        is_blank = has_nan | is_constant
        return GroupedRows(
            chosen=chosen,
            starts=starts,
            ends=ends,
            codes=codes,
            chunks=self._chunks,
            equal=np.where(has_fingerprint, same_fingerprint, np.where(has_statistics & ~same_statistics, False, NONE)),
            has_same_statistics=has_statistics & same_statistics,
            is_blank=np.logical_and.reduceat(is_blank, starts),
            is_zero=np.logical_and.reduceat(is_constant & ~has_nan & (low == 0), starts),
            has_nan=np.logical_or.reduceat(has_nan, starts),
            is_measured=has_statistics,
            fingerprints=fingerprints,
            statistics=np.where(is_measured, digests & POSITIVE, NONE),
            labels={name: self._rows.keys(name, chosen[starts]) for name in LABELS},
            writers=rows.writer_numbers(chosen[starts]),
            keys=keys,
            forward_keys=forward_keys,
            order=sequence,
        )

    def chunk(self, position: int, micro_step: int) -> RankChunk:
        texts = {name: self._rows.text(name, position) for name in _CHUNK}
        note = note_members(texts["note"])
        global_shape, offsets = (texts[name] and parse_shape(texts[name]) for name in ("global_shape", "offsets"))
        return RankChunk(
            int(self._rows.numbers("rank")[position]),
            texts["dtype"] or "",
            parse_shape(texts["shape"]),
            global_shape or (() if texts["global_shape"] else None),
            offsets or (() if texts["offsets"] else None),
            texts["placements"],
            texts["mesh"],
            next((member for member in (*RANK_BOUND, TURNED, OF_ONE_RANK) if member in note), None),
            micro_step,
        )


class RowFinding(NamedTuple):
    """A finding about the rows of ranks that is shown to the user."""

    kind: str
    """One of ``replicas_differ``, ``buffers_differ``, ``inconsistent``, ``partial``, ``per_rank``, ``superseded`` (by a
    later attempt), ``stranger`` (of another run), ``layout_changes`` (ranks have equal values at some steps only) and
    ``alone`` (other ranks did not run the module)."""
    step: int
    module_path: str
    site: str
    name: str
    ranks: tuple[int, ...]
    text: str
    num_rows: int = 1


class FindingLog:
    """A list of findings without duplicates. Each finding counts the values or steps to which it applies."""

    def __init__(self, rows: MetadataRows) -> None:
        self.findings: list[RowFinding] = []
        self._rows = rows
        self._index_of: dict[Any, int] = {}

    def add(
        self,
        kind: str,
        position: int | None,
        ranks: tuple[int, ...],
        text: str,
        module_path: str = "",
        site: str = "",
        name: str = "",
    ) -> None:
        """Add a finding about the row at `position`, or about the run if `position` is None."""
        key = (kind, ranks, text) if kind == "partial" else (kind, ranks, text, module_path, site, name)
        index = self._index_of.get(key)
        if index is not None:
            known = self.findings[index]
            self.findings[index] = known._replace(num_rows=known.num_rows + 1)
            return
        self._index_of[key] = len(self.findings)
        step = int(self._rows.numbers("step")[position]) if position is not None else NONE
        self.findings.append(RowFinding(kind, step, module_path, site, name, ranks, text))


_COLUMNS = ("root", "module_path", "site", "shape", "global_shape", "placements", "mesh")


class _ShardedDim(NamedTuple):
    dim: int
    size: int
    """The size that this rank's chunk would have along the dim if no other mesh axis cut the tensor."""
    ranks: Ints
    """The ranks along the mesh axis, including this rank. Empty if the row does not name them."""


class _StepCuts(NamedTuple):
    parameters: dict[object, set[_ShardedDim]]
    """How parameters are cut. The key is root, module and rank."""
    activations: dict[object, set[_ShardedDim]]
    """How activations are cut. The key is root, rank and shape."""
    uncut: set[object]
    """The activations that are complete on a rank, as root, rank and shape."""


class ShardingInference:
    """Infers along which dim plain tensors (no DTensors) are cut.

    The evidence is in rows of the same step that state where a chunk lies in its tensor. `counts` flags the rows that
    may be used. `is_linear` says whether a module is a linear layer.
    """

    def __init__(
        self, rows: MetadataRows, counts: npt.NDArray[np.bool_], is_linear: Callable[[str, str], bool]
    ) -> None:
        self._is_linear = is_linear
        self._rows = rows
        self._counts = counts
        self._kept: tuple[int, _StepCuts] | None = None

    def infer(self, leaf: Leaf, step: int, chunks: Sequence[RankChunk], known: Set[int] = frozenset()) -> int | NoPlan:
        """Return the dim along which the chunks of ranks that share a batch are concatenated, or why it is unknown.

        The chunks are of `leaf` at `step`. `known` are the dims along which the leaf is cut at other steps; it is empty
        if no step shows them.
        """
        step_cuts = self._cuts_at(step)
        ranks = tuple(chunk.rank for chunk in chunks)
        dims: set[int] = {*known}
        if not dims and all(chunk.shape for chunk in chunks) and self._is_linear(leaf.root, leaf.module_path):
            dims = _common([_by_parameters(step_cuts.parameters, leaf, chunk, ranks) for chunk in chunks])
        if not dims:
            sought = [(leaf.root, chunk.rank, chunk.shape) for chunk in chunks]
            cuts = [set() if key in step_cuts.uncut else step_cuts.activations.get(key, set()) for key in sought]
            dims = _common([{cut.dim for cut in some if _is_of(cut, ranks)} for some in cuts])
            if len(dims) == 1 and any(chunk.shape.count(chunk.shape[min(dims)]) > 1 for chunk in chunks):
                dims = set()  # the transposed tensor would have the same shape
        shapes = ", ".join(str(list(shape)) for shape in dict.fromkeys(chunk.shape for chunk in chunks))
        why = f"ranks {', '.join(map(str, ranks[:8]))} share a batch, and their tensors of {shapes} differ"
        if len(dims) == 1:
            (dim,) = dims
            others = {(*chunk.shape[:dim], *chunk.shape[dim + 1 :]) for chunk in chunks}
            return dim if len(others) == 1 else NoPlan("per_rank", f"{why} in other dims than the cut dim {dim}")
        more = f"related values are cut along dims {sorted(dims)}" if dims else "nothing says how they join"
        return NoPlan("per_rank", f"{why}; {more}; --layout '...=shard(DIM)' can")

    def _cuts_at(self, step: int) -> _StepCuts:
        if self._kept is not None and self._kept[0] == step:  # values come in the order of steps
            return self._kept[1]
        rows = self._rows
        positions: Positions = np.flatnonzero(self._counts & (rows.numbers("step") == step))
        cuts = _StepCuts({}, {}, self._equal(positions))
        self._kept = step, cuts
        is_distributed = rows.keys("placements", positions).codes != NONE
        positions = positions[is_distributed & (rows.numbers("part")[positions] == 0)]
        columns = {name: rows.keys(name, positions) for name in _COLUMNS}
        ranks = rows.numbers("rank")[positions]
        codes = np.stack([*(keys.codes for keys in columns.values()), ranks])
        _, firsts = np.unique(codes, axis=1, return_index=True)
        for i in firsts.tolist():
            root, path, site, shape, global_shape, placements, mesh = (columns[name].text(i) for name in _COLUMNS)
            chunk = RankChunk(int(ranks[i]), "", parse_shape(shape), parse_shape(global_shape), None, placements, mesh)
            sharded_dims = _cuts_of(chunk)
            if site in ACTIVATIONS and chunk.shape == chunk.global_shape:
                cuts.uncut.add((root, chunk.rank, chunk.shape))
            if site in STATES and values_of(site) == "param":
                cuts.parameters.setdefault((root, path, chunk.rank), set()).update(sharded_dims)
            elif site in ACTIVATIONS and len(sharded_dims) == 1:
                cuts.activations.setdefault((root, chunk.rank, chunk.shape), set()).update(sharded_dims)
        return cuts

    def _equal(self, positions: Positions) -> set[object]:
        """Return root, rank and shape of plain activations (not constant, no NaN) that are equal on several ranks."""
        rows = self._rows
        columns = {name: rows.keys(name, positions) for name in ("root", "site", "shape", "fingerprint", "placements")}
        is_plain = (columns["placements"].codes == NONE) & (columns["fingerprint"].codes != NONE)
        low, high, nans = (rows.take(name, positions) for name in ("min", "max", "nan_count"))
        is_plain &= ~array_of(pc.fill_null(pc.equal(low, high), pc.is_valid(nans)))
        is_plain &= array_of(nans) <= 0
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


def _by_parameters(parameters: dict[object, set[_ShardedDim]], leaf: Leaf, chunk: RankChunk, ranks: Ints) -> set[int]:
    """Return the tensor's last dim if it has the size of this rank's part of the linear layer's weight or bias."""
    cuts = parameters.get((leaf.root, leaf.module_path, chunk.rank), set())
    last = len(chunk.shape) - 1
    if values_of(leaf.site) == "input":
        fitting = [cut.size for cut in cuts if _is_of(cut, ranks) and cut.dim == 1]
    else:
        fitting = [cut.size for cut in cuts if _is_of(cut, ranks) and cut.dim == 0 and leaf.site != "tap"]
    return {last} if chunk.shape[last] in fitting else set()


def _is_of(cut: _ShardedDim, ranks: Ints) -> bool:
    return not cut.ranks or cut.ranks == ranks


def _cuts_of(chunk: RankChunk) -> list[_ShardedDim]:
    """Return how each mesh axis cuts this chunk. Empty if an axis neither shards nor replicates the tensor."""
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
        if kind == "StridedShard" and len(placements) == 1:
            return []  # the ranks' parts are interleaved, not end to end
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
    return of_ranks[0] if all(some == of_ranks[0] for some in of_ranks) else set()
