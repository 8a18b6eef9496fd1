"""Cut a random tensor over a random mesh, and put it together again from what the rows would say."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from recorder.layout.placement import NoPlan, Plan, RankChunk
from recorder.layout.regions import Source, assemble, overlap, shard, strided_shard
from recorder.layout.rules import decide_state
from recorder.numerics.dtypes import flat_boxes

Array = npt.NDArray[np.int64]
Placement = dict[str, Any]


def axis_indices(size: int, placements: Sequence[Placement], dim: int, mesh: Sequence[int], at: Sequence[int]) -> Any:
    """Which indices along a dim a rank holds: torch.chunk, axis after axis."""
    indices = torch.arange(size)
    for placement, num, i in zip(placements, mesh, at, strict=True):
        if placement.get("dim") != dim:
            continue
        if placement["kind"] == "StridedShard":
            blocks = chunks(indices, placement["split_factor"])
            indices = torch.cat([chunks(block, num)[i] for block in blocks])
        else:
            indices = chunks(indices, num)[i]
    return indices.numpy()


def chunks(indices: torch.Tensor, num: int) -> list[torch.Tensor]:
    """`torch.chunk`, with empty ones to make up the number."""
    found = list(torch.chunk(indices, num)) if len(indices) else []
    return [*found, *[indices[:0]] * (num - len(found))]


def cut(whole: Array, mesh: Sequence[int], placements: Sequence[Placement]) -> list[tuple[RankChunk, Array]]:
    chunks = []
    for rank, at in enumerate(itertools.product(*map(range, mesh))):
        axes = [axis_indices(size, placements, dim, mesh, at) for dim, size in enumerate(whole.shape)]
        local = np.ascontiguousarray(whole[np.ix_(*axes)]) if whole.ndim else whole.copy()
        is_box = all(len(axis) == 0 or np.array_equal(axis, np.arange(axis[0], axis[0] + len(axis))) for axis in axes)
        offsets = tuple(int(axis[0]) if len(axis) else 0 for axis in axes) if is_box else None
        text = json.dumps({"shape": list(mesh), "dim_names": None, "coordinate": list(at)})
        chunk = RankChunk(rank, "int64", local.shape, whole.shape, offsets, json.dumps(list(placements)), text)
        chunks.append((chunk, local))
    return chunks


def joined(plan: Plan, locals_: Sequence[Array], stretches: Sequence[int]) -> Array:
    """The plan carried out, a stretch of the flattened tensor at a time."""
    total = math.prod(plan.global_shape)
    out = np.full(total, -1, np.int64)

    def fetch_of(fill: Any) -> Any:
        def fetch(low: int, high: int) -> Array:
            summands = np.stack([locals_[term.chunk].reshape(-1)[low:high] for term in fill.terms])
            found: Array = summands.sum(axis=0)
            return found

        return fetch

    sources = [Source(fill.region, fetch_of(fill)) for fill in plan.fills]
    ends = sorted({min(end, total) for end in [*stretches, total]})
    for start, stop in itertools.pairwise([0, *ends]):
        assemble(out[start:stop], start, plan.global_shape, sources)
    return out.reshape(plan.global_shape)


@st.composite
def cuts(draw: st.DrawFn) -> tuple[Array, list[int], list[Placement], list[int]]:
    shape = draw(st.lists(st.integers(0, 9), min_size=0, max_size=4))
    mesh = draw(st.lists(st.integers(1, 4), min_size=1, max_size=2))
    kinds: list[Any] = [st.just({"kind": "Replicate"})]
    if shape:
        dims = st.integers(0, len(shape) - 1)
        kinds.append(st.builds(lambda dim: {"kind": "Shard", "dim": dim}, dims))
        kinds.append(
            st.builds(lambda dim, f: {"kind": "StridedShard", "dim": dim, "split_factor": f}, dims, st.integers(1, 3))
        )
    placements = [draw(st.one_of(kinds)) for _ in mesh]
    whole = np.arange(math.prod(shape), dtype=np.int64).reshape(shape)
    return whole, mesh, placements, draw(st.lists(st.integers(1, 400), max_size=3))


@given(cuts())
def test_a_tensor_cut_over_a_mesh_comes_back(case: tuple[Array, list[int], list[Placement], list[int]]) -> None:
    whole, mesh, placements, stretches = case
    chunks = cut(whole, mesh, placements)
    plan = decide_state([chunk for chunk, _ in chunks], source="fsdp", num_expected=len(chunks))
    assert isinstance(plan, Plan), plan
    assert plan.is_complete
    assert np.array_equal(joined(plan, [local for _, local in chunks], stretches), whole)
    for first, *others in plan.copies:
        assert all(np.array_equal(chunks[first][1], chunks[other][1]) for other in others)


@given(cuts(), st.sampled_from(["sum", "avg"]))
def test_summands_are_added_up(case: tuple[Array, list[int], list[Placement], list[int]], op: str) -> None:
    whole, mesh, placements, stretches = case
    placements = [{"kind": "Partial", "reduce_op": op}, *placements[1:]]
    chunks = [(p._replace(placements=json.dumps(placements)), local) for p, local in cut(whole, mesh, placements)]
    plan = decide_state([chunk for chunk, _ in chunks], source="fsdp", num_expected=len(chunks))
    assert isinstance(plan, Plan), plan
    factors = {term.factor for fill in plan.fills for term in fill.terms}
    assert factors <= {1 / mesh[0] if op == "avg" else 1.0}
    unscaled = plan._replace(
        fills=tuple(p._replace(terms=tuple(t._replace(factor=1.0) for t in p.terms)) for p in plan.fills)
    )
    assert np.array_equal(joined(unscaled, [local for _, local in chunks], stretches), whole * mesh[0])


@given(st.lists(st.integers(1, 6), max_size=4), st.integers(1, 5), st.integers(0, 1), st.data())
def test_slices_of_a_flattened_parameter_come_back(
    shape: list[int], world_size: int, replicas: int, data: st.DataObject
) -> None:
    whole = np.arange(math.prod(shape), dtype=np.int64).reshape(shape)
    ends = sorted(data.draw(st.lists(st.integers(0, whole.size), min_size=world_size - 1, max_size=world_size - 1)))
    chunks: list[RankChunk] = []
    locals_ = []
    for copy in range(replicas + 1):
        for i, (start, stop) in enumerate(itertools.pairwise([0, *ends, whole.size])):
            placements: list[Placement] = [{"kind": "FlatShard", "offset": start}]
            mesh, at = [world_size], [i]
            if replicas:
                placements, mesh, at = [{"kind": "Replicate"}, *placements], [2, world_size], [copy, i]
            text = json.dumps({"shape": mesh, "coordinate": at})
            local = whole.reshape(-1)[start:stop].copy()
            chunk = RankChunk(len(chunks), "int64", local.shape, whole.shape, None, json.dumps(placements), text)
            chunks.append(chunk)
            locals_.append(local)
    plan = decide_state(chunks, source="fsdp", num_expected=len(chunks))
    assert isinstance(plan, Plan), plan
    assert plan.source == "fsdp" and plan.is_complete
    assert np.array_equal(joined(plan, locals_, [3]), whole)


@given(cuts(), st.data())
def test_a_chunk_that_is_missing_is_never_overlooked(
    case: tuple[Array, list[int], list[Placement], list[int]], data: st.DataObject
) -> None:
    whole, mesh, placements, stretches = case
    chunks = cut(whole, mesh, placements)
    if len(chunks) == 1:
        return
    gone = data.draw(st.integers(0, len(chunks) - 1))
    kept = [pair for i, pair in enumerate(chunks) if i != gone]
    plan = decide_state([chunk for chunk, _ in kept], source="fsdp", num_expected=len(chunks))
    assert isinstance(plan, Plan), plan
    if plan.is_complete:
        assert np.array_equal(joined(plan, [local for _, local in kept], stretches), whole)
    else:
        assert (joined(plan, [local for _, local in kept], stretches) == -1).any()


@given(cuts(), st.data())
def test_a_shifted_chunk_is_refused(
    case: tuple[Array, list[int], list[Placement], list[int]], data: st.DataObject
) -> None:
    whole, mesh, placements, _ = case
    chunks = [chunk for chunk, _ in cut(whole, mesh, placements)]
    movable = [i for i, chunk in enumerate(chunks) if chunk.offsets and math.prod(chunk.shape)]
    if not movable:
        return
    i = data.draw(st.sampled_from(movable))
    offsets = list(chunks[i].offsets or ())
    dim = data.draw(st.integers(0, len(offsets) - 1))
    offsets[dim] += data.draw(st.sampled_from([-1, 1]))
    chunks[i] = chunks[i]._replace(offsets=tuple(offsets))
    found = decide_state(chunks, source="fsdp", num_expected=len(chunks))
    assert isinstance(found, NoPlan) and found.kind == "inconsistent"
    assert f"rank {i}" in found.why


@given(st.lists(st.integers(1, 5), max_size=4), st.data())
def test_a_flat_stretch_is_its_boxes_in_order(shape: list[int], data: st.DataObject) -> None:
    whole = np.arange(math.prod(shape)).reshape(shape)
    start = data.draw(st.integers(0, whole.size))
    stop = data.draw(st.integers(start, whole.size))
    boxes = list(flat_boxes(tuple(shape), start, stop))
    picked = [whole[tuple(slice(s, s + n) for s, n in zip(at, sizes, strict=True))].reshape(-1) for at, sizes in boxes]
    assert np.array_equal(np.concatenate([*picked, whole.reshape(-1)[:0]]), np.arange(start, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


@given(cuts())
def test_regions_without_replicas_never_overlap(case: tuple[Array, list[int], list[Placement], list[int]]) -> None:
    whole, mesh, placements, _ = case
    chunks = cut(whole, mesh, placements)
    plan = decide_state([chunk for chunk, _ in chunks], source="fsdp", num_expected=len(chunks))
    assert isinstance(plan, Plan)
    regions = [fill.region for fill in plan.fills]
    assert overlap(regions, whole.shape) is None
    if whole.size:
        assert overlap([*regions, regions[0]], whole.shape) is not None


@pytest.mark.parametrize("second", [Shard(0), Replicate()])
@pytest.mark.parametrize("first", [Shard(0), Replicate(), *(_StridedShard(0, split_factor=f) for f in (1, 2, 3))])
def test_chunks_lie_where_torch_puts_them(first: Any, second: Any) -> None:
    for size, a, b in itertools.product(range(1, 17), (1, 2, 3, 4), (1, 2, 3)):
        for i, j in itertools.product(range(a), range(b)):
            ranges = [(0, size)]
            for placement, num, at in ((first, a, i), (second, b, j)):
                if isinstance(placement, _StridedShard):
                    ranges = strided_shard(ranges, num, at, int(placement.split_factor))
                elif isinstance(placement, Shard):
                    ranges = shard(ranges, num, at)
            shape, offset = _compute_local_shape_and_global_offset((size,), (a, b), (i, j).__getitem__, (first, second))
            assert sum(stop - start for start, stop in ranges) == shape[0]
            assert not ranges or ranges[0][0] == offset[0]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"global_shape": (9, 4)}, "global shapes differ"),
        ({"dtype": "float32"}, "dtypes differ"),
        ({"mesh": '{"shape":[4],"coordinate":[1]}'}, "disagree on the mesh"),
        ({"mesh": '{"shape":[2],"coordinate":[0]}'}, "both say they are at [0]"),
        ({"mesh": "nonsense"}, "disagree on the mesh"),
        ({"placements": '[{"kind":"Shard","dim":1}]'}, "disagree on the placements"),
        ({"placements": '[{"kind":"Shard","dim":7}]'}, "disagree on the placements"),
        ({"offsets": None, "shape": (3, 4)}, "its placements make it"),
        ({"offsets": (0, 0)}, "are not what its placements and mesh make"),
        ({"offsets": (40, 0)}, "lie outside"),
        ({"offsets": (4,)}, "lie outside"),
        ({"global_shape": None, "offsets": None, "placements": None, "mesh": None}, "a plain tensor"),
    ],
)
def test_chunks_that_contradict_each_other_are_refused_by_name(change: dict[str, Any], why: str) -> None:
    whole = np.arange(32).reshape(8, 4)
    chunks = [chunk for chunk, _ in cut(whole, [2], [{"kind": "Shard", "dim": 0}])]
    found = decide_state([chunks[0], chunks[1]._replace(**change)], source="fsdp", num_expected=2)
    assert isinstance(found, NoPlan) and found.kind == "inconsistent"
    assert why in found.why and re.search(r"ranks? (0 and )?1\b", found.why)


def test_two_ranks_that_claim_the_same_elements_are_refused() -> None:
    text = [f'{{"shape":[2],"coordinate":[{i}]}}' for i in range(2)]
    chunks = [RankChunk(i, "int64", (4,), (8,), None, '[{"kind":"FlatShard","offset":2}]', text[i]) for i in range(2)]
    found = decide_state(chunks, source="fsdp", num_expected=2)
    assert isinstance(found, NoPlan) and "ranks 0 and 1 say they hold the same elements" in found.why


def test_slices_that_overlap_are_refused() -> None:
    text = [f'{{"shape":[2],"coordinate":[{i}]}}' for i in range(2)]
    chunks = [
        RankChunk(i, "int64", (5,), (8,), None, f'[{{"kind":"FlatShard","offset":{3 * i}}}]', text[i]) for i in range(2)
    ]
    found = decide_state(chunks, source="fsdp", num_expected=2)
    assert isinstance(found, NoPlan) and "overlap" in found.why


def test_an_element_that_nobody_holds_is_noticed() -> None:
    text = [f'{{"shape":[2],"coordinate":[{i}]}}' for i in range(2)]
    chunks = [
        RankChunk(i, "int64", (3,), (8,), None, f'[{{"kind":"FlatShard","offset":{4 * i}}}]', text[i]) for i in range(2)
    ]
    found = decide_state(chunks, source="fsdp", num_expected=2)
    assert isinstance(found, NoPlan) and "no rank holds 2 elements" in found.why


@pytest.mark.parametrize("field", ["mesh", "global_shape"])
def test_of_many_ranks_the_one_that_disagrees_is_named(field: str) -> None:
    chunks = [
        RankChunk(
            rank, "float32", (1,), (9,), (rank,), '[{"kind":"Shard","dim":0}]', f'{{"shape":[9],"coordinate":[{rank}]}}'
        )
        for rank in range(9)
    ]
    odd: dict[str, Any] = {"mesh": '{"shape":[7],"coordinate":[8]}', "global_shape": (8,)}
    chunks[8] = chunks[8]._replace(**{field: odd[field]})
    problem = decide_state(chunks, source="ddp", num_expected=9)
    assert isinstance(problem, NoPlan) and "rank 8" in problem.why
