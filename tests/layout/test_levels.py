"""Tensors cut over a mesh in each of several parts of the batch: two levels, put together and carried out."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recorder.layout.levels import BatchGroup, compose, corresponding, split, within
from recorder.layout.placement import REDUCE_OPS, NoPlan, Plan, RankChunk, named
from recorder.layout.rules import Batch, ChunkValues, decide_activation, decide_gradient, decide_state

from .test_assembly import Placement, cut

Array = npt.NDArray[np.float64]
_OPS: dict[str, Any] = {"sum": np.add, "max": np.maximum, "min": np.minimum, "product": np.multiply}


class Case(NamedTuple):
    """Parts of a batch, each a tensor that the ranks of an instance have cut over a mesh."""

    wholes: list[Array]
    model_groups: tuple[tuple[int, ...], ...]
    chunks: list[RankChunk]
    locals_: list[Array]
    num_dims: int


def spread(whole: Array, mesh: Sequence[int], placements: Sequence[Placement]) -> list[tuple[RankChunk, Array]]:
    """Chunks over a mesh; a `Partial` is made of chunks that reduce to the whole."""
    plain = [{"kind": "Replicate"} if p["kind"] == "Partial" else p for p in placements]
    found = []
    ops = [str(p["reduce_op"]) for p in placements if p["kind"] == "Partial"]
    for chunk, local in cut(whole.astype(np.int64), mesh, plain):
        coordinate = json.loads(chunk.mesh or "")["coordinate"]
        summand = sum(at for at, p in zip(coordinate, placements, strict=True) if p["kind"] == "Partial")
        values = local.astype(np.float64)
        if ops and summand:  # the first summand has the value, the others what changes nothing
            values = {
                "sum": values * 0,
                "max": values - 1,
                "min": values + 1,
                "product": values * 0 + 1,
                "avg": values,
            }[ops[0]]
        offsets = None if ops else chunk.offsets
        text = json.dumps(list(placements))
        found.append((chunk._replace(dtype="float64", placements=text, offsets=offsets), values))
    return found


@st.composite
def cases(draw: st.DrawFn, *, is_batch: bool) -> Case:
    num_dims = draw(st.integers(1, 3))
    mesh = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    num_model_groups = draw(st.integers(1, 3))
    dims = st.integers(int(is_batch), max(num_dims - 1, int(is_batch)))
    kinds: list[Any] = [st.just({"kind": "Replicate"})]
    if num_dims > is_batch:
        kinds.append(st.builds(lambda d: {"kind": "Shard", "dim": d}, dims))
        kinds.append(
            st.builds(lambda d, f: {"kind": "StridedShard", "dim": d, "split_factor": f}, dims, st.integers(1, 3))
        )
    placements = [draw(st.one_of(kinds)) for _ in mesh]
    if draw(st.booleans()):
        axis = draw(st.integers(0, len(mesh) - 1))
        placements[axis] = {"kind": "Partial", "reduce_op": draw(st.sampled_from(REDUCE_OPS))}
    inner = draw(st.lists(st.integers(0, 7), min_size=num_dims - 1, max_size=num_dims - 1))
    size = math.prod(mesh)
    first = draw(st.integers(0, 5))
    wholes, chunks, locals_ = list[Array](), list[RankChunk](), list[Array]()
    for number in range(num_model_groups):
        rows = draw(st.integers(0, 5)) if is_batch else first
        shape = (rows, *inner)
        start = 1 + (sum(w.size for w in wholes) if is_batch else 0)
        wholes.append(np.arange(start, start + math.prod(shape), dtype=np.float64).reshape(shape))
        ranks = list(range(number * size, (number + 1) * size))
        for (chunk, local), rank in zip(spread(wholes[-1], mesh, placements), ranks, strict=True):
            text = json.dumps(json.loads(chunk.mesh or "") | {"ranks": ranks})
            chunks.append(chunk._replace(rank=rank, mesh=text))
            locals_.append(local)
    model_groups = tuple(tuple(range(n * size, (n + 1) * size)) for n in range(num_model_groups))
    return Case(wholes, model_groups, chunks, locals_, num_dims)


def no_guess(chunks: Sequence[RankChunk]) -> int | NoPlan:
    raise AssertionError("no plain tensors here")


def put_together(
    chunks: list[RankChunk], case: Case, *, loss: str | None = None, is_state: bool = False
) -> Plan | NoPlan:
    """What a reader decides, of one value."""
    expected = tuple(rank for ranks in case.model_groups for rank in ranks)
    batch_groups = split(chunks, case.model_groups, expected)
    if isinstance(batch_groups, NoPlan):
        return batch_groups
    if batch_groups is None:
        return decide_state(chunks, source="ddp", num_expected=len(expected))
    wholes = []
    for batch_group in batch_groups:
        whole = within(chunks, batch_group, is_state=is_state, among=lambda numbers: ChunkValues(), infer=no_guess)
        if isinstance(whole, NoPlan):
            return whole
        wholes.append(whole)
    tensors = [
        RankChunk(batch_group.ranks[0], "float64", w.global_shape)
        for batch_group, w in zip(batch_groups, wholes, strict=True)
    ]
    batch = Batch(tuple(w.global_shape[0] for w in wholes))
    num = len(case.model_groups)
    if is_state:
        across = decide_state(tensors, source="ddp", num_expected=num)
    else:
        across = decide_activation(tensors, batch=batch, values=ChunkValues(), num_expected=num)
        if loss is not None:
            across = decide_gradient(tensors, across, batch=batch, loss=loss, num_expected=num)
    return across if isinstance(across, NoPlan) else compose(across, wholes)


def carried_out(plan: Plan, locals_: Sequence[Array]) -> Array:
    """The tensor that a plan makes; NaN where no part is."""
    out = np.full(plan.global_shape, np.nan)
    for fill in plan.fills:
        for box in fill.region.boxes:
            source = tuple(slice(a, a + n) for a, n in zip(box.local_start, box.shape, strict=True))
            values = [locals_[term.chunk][source] * term.factor for term in fill.terms]
            total = values[0]
            for other in values[1:]:
                total = _OPS[plan.op](total, other)
            out[tuple(slice(a, a + n) for a, n in zip(box.start, box.shape, strict=True))] = total
    return out


@given(cases(is_batch=True))
def test_batches_that_are_cut_over_meshes_come_back(case: Case) -> None:
    plan = put_together(case.chunks, case)
    assert isinstance(plan, Plan), plan
    assert plan.is_complete
    assert np.allclose(carried_out(plan, case.locals_), np.concatenate(case.wholes), rtol=1e-12)


@given(cases(is_batch=True), st.sampled_from(["mean", "weighted", "sum"]))
def test_their_gradients_are_scaled_once_for_each_part_of_the_batch(case: Case, loss: str) -> None:
    if len(case.model_groups) == 1:
        return
    plan = put_together(case.chunks, case, loss=loss)
    assert isinstance(plan, Plan), plan
    total = sum(len(whole) for whole in case.wholes)
    if loss == "weighted" and not total:
        return
    factors = {"mean": [1 / len(case.wholes)] * len(case.wholes), "sum": [1.0] * len(case.wholes)}
    factors["weighted"] = [len(whole) / total for whole in case.wholes] if total else []
    wanted = np.concatenate([whole * factor for whole, factor in zip(case.wholes, factors[loss], strict=True)])
    assert np.allclose(carried_out(plan, case.locals_), wanted, rtol=1e-12)


@given(cases(is_batch=False))
def test_copies_that_are_cut_over_meshes_come_back_and_are_all_compared(case: Case) -> None:
    plan = put_together(case.chunks, case, is_state=True)
    assert isinstance(plan, Plan), plan
    assert np.allclose(carried_out(plan, case.locals_), case.wholes[0], rtol=1e-12)
    if plan.op == "sum" and case.wholes[0].size and len(case.model_groups) > 1:
        compared = {i for some in plan.copies for i in some} | {t.chunk for fill in plan.fills for t in fill.terms}
        holds = {i for i, chunk in enumerate(case.chunks) if math.prod(chunk.shape)}
        assert holds <= compared or '"Partial"' in (case.chunks[0].placements or "")


@given(cases(is_batch=True), st.data())
@settings(max_examples=60)
def test_a_chunk_that_is_missing_is_never_overlooked(case: Case, data: st.DataObject) -> None:
    if len(case.chunks) == 1:
        return
    gone = data.draw(st.integers(0, len(case.chunks) - 1))
    chunks = [chunk for i, chunk in enumerate(case.chunks) if i != gone]
    plan = put_together(chunks, case)
    if isinstance(plan, NoPlan):
        return
    if plan.is_complete and len(plan.across.fills if plan.across else ()) == len(case.wholes):
        locals_ = [local for i, local in enumerate(case.locals_) if i != gone]
        assert np.allclose(carried_out(plan, locals_), np.concatenate(case.wholes), rtol=1e-12)


@given(cases(is_batch=False), st.data())
@settings(max_examples=60)
def test_a_chunk_that_contradicts_the_others_is_named(case: Case, data: st.DataObject) -> None:
    size = len(case.model_groups[0])
    if size == 1:
        return
    wrong = data.draw(st.integers(0, len(case.chunks) - 1))
    chunk = case.chunks[wrong]
    mesh = json.loads(chunk.mesh or "")
    changes = [{"ranks": [*mesh["ranks"][1:], mesh["ranks"][0]]}, {"ranks": mesh["ranks"][:-1]}, {"shape": [size, 7]}]
    changed = chunk._replace(mesh=json.dumps(mesh | data.draw(st.sampled_from(changes))))
    found = put_together([*case.chunks[:wrong], changed, *case.chunks[wrong + 1 :]], case, is_state=True)
    assert isinstance(found, NoPlan) and found.kind == "inconsistent"
    assert str(chunk.rank) in found.why


@pytest.mark.parametrize("op", ["max", "min", "product"])
def test_a_sum_of_what_is_reduced_otherwise_is_refused(op: str) -> None:
    placements = json.dumps([{"kind": "Partial", "reduce_op": op}])
    chunks = []
    for rank in range(4):
        mesh = {"shape": [2], "coordinate": [rank % 2], "ranks": [rank // 2 * 2, rank // 2 * 2 + 1]}
        chunks.append(RankChunk(rank, "float32", (3,), (3,), None, placements, json.dumps(mesh)))
    batch_groups = split(chunks, ((0, 1), (2, 3)), (0, 1, 2, 3))
    assert isinstance(batch_groups, tuple) and all(isinstance(batch_group, BatchGroup) for batch_group in batch_groups)
    wholes = [
        within(chunks, b, is_state=False, among=lambda numbers: ChunkValues(), infer=no_guess)  # type: ignore[arg-type]
        for b in batch_groups
    ]
    plans = [whole for whole in wholes if isinstance(whole, Plan)]
    assert corresponding(plans) == [(0, 2), (1, 3)]
    tensors = [RankChunk(rank, "float32", (3,)) for rank in (0, 2)]
    same_for_all = decide_state(tensors, source="ddp", num_expected=2)
    across = decide_gradient(tensors, same_for_all, batch=Batch(None), loss="mean", num_expected=2)
    assert isinstance(across, Plan)
    found = compose(across, plans)
    assert isinstance(found, NoPlan) and f"reduced by {op}" in found.why


def test_of_many_ranks_the_one_that_says_otherwise_is_named() -> None:
    chunks = [RankChunk(rank, "float32", (2, 3) if rank == 11 else (2, 2)) for rank in range(16)]
    assert named(chunks, "shape").endswith(", rank 6 [2, 2], rank 11 [2, 3]")
    assert named(chunks[:3], "shape") == "rank 0 [2, 2], rank 1 [2, 2], rank 2 [2, 2]"
