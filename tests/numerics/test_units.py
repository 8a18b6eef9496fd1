"""Sums of units are those of numpy, add up, and are as FORMAT.md says to the last byte."""

from __future__ import annotations

import math
import struct

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recorder.capture.staging.measure import measure
from recorder.errors import CorruptError
from recorder.numerics.moments import ChunkUnits, joined
from recorder.numerics.units import MAX_UNITS, Units, sides_of
from recorder.records import KEEP_STATS, KEEP_UNITS, Chunk, Measured
from tests.rigs import independent

_BOTH = KEEP_STATS | KEEP_UNITS


def _measured(tensor: torch.Tensor, dim: int = -1, chunk: Chunk | None = None) -> Measured:
    data = tensor.reshape(-1).view(torch.uint8).numpy() if tensor.numel() else np.empty(0, np.uint8)
    return measure(data, str(tensor.dtype)[6:], tuple(tensor.shape), chunk, _BOTH, dim)


def _of(tensor: torch.Tensor, dim: int = -1) -> Units:
    data = _measured(tensor, dim).units
    assert data is not None
    return Units.from_bytes(data, tuple(tensor.shape))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int16, torch.bool], ids=str)
@pytest.mark.parametrize("shape", [(5,), (300, 130), (4, 3, 5), (2, 3, 40, 50), (1, 70_000, 1)], ids=str)
def test_each_unit_has_the_sums_of_its_values(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = (3 * torch.randn(shape, generator=torch.Generator().manual_seed(1))).round().to(dtype)
    for dim in range(len(shape)):
        if shape[dim] > MAX_UNITS:
            continue
        found, wide = _of(tensor, dim - len(shape)), tensor.double().movedim(dim, 0).reshape(shape[dim], -1)
        assert (found.dim, len(found), found.num_values) == (dim, shape[dim], wide.shape[1])
        assert found.sum.tolist() == wide.sum(1).tolist(), "sums of whole numbers are exact in any order"
        assert found.sum_sq.tolist() == (wide * wide).sum(1).tolist()
        assert found.absmax.tolist() == wide.abs().amax(1).tolist()
        assert found.zero_count.tolist() == (wide == 0).sum(1).tolist()
        assert found.mean.tolist() == wide.mean(1).tolist()


def test_what_is_not_finite_is_left_out() -> None:
    found = _of(torch.tensor([[1.0, math.nan, math.inf], [-0.0, math.nan, -7.0]]))
    assert (found.sum.tolist(), found.sum_sq.tolist()) == ([1.0, 0.0, -7.0], [1.0, 0.0, 49.0])
    assert (found.absmax.tolist(), found.zero_count.tolist()) == ([1.0, 0.0, 7.0], [1, 0, 0])


def test_the_examples_of_the_page_are_those_bytes() -> None:
    made = [(torch.tensor([[1.0, 0.0], [3.0, 0.0]]), 1), (torch.zeros(0, 1), 1)]
    rows = [row for row in independent.table(independent.section("Units")) if row[0].startswith("float32")]
    for (tensor, dim), (_, shown) in zip(made, rows, strict=True):
        head, _, rest = shown.partition(", then as float64 ")
        floats, _, counts = rest.partition(", then ")
        numbers = [float(word) for word in floats.split(",")]
        packed = struct.pack(f"<{len(numbers)}d", *numbers)
        expected = bytes.fromhex(head.strip("` ")) + packed + bytes.fromhex(counts.strip("` "))
        assert _measured(tensor, dim).units == expected


@pytest.mark.parametrize(
    ("tensor", "dim", "why"),
    [
        (torch.zeros(()), -1, "0 dims, none of which is -1"),
        (torch.zeros(2, 3), 2, "2 dims, none of which is 2"),
        (torch.zeros(1, MAX_UNITS + 1), -1, "32769 units, more than 32768"),
    ],
)
def test_a_tensor_without_units_says_why(tensor: torch.Tensor, dim: int, why: str) -> None:
    found = _measured(tensor, dim)
    assert (found.units, found.note) == (None, f"no_units:{why}")
    assert found.zero_count == tensor.numel(), "the statistics are there"


def test_a_run_of_a_flattened_tensor_has_none() -> None:
    chunk = Chunk((4, 4), None, "", "", "", flat_start=3)
    assert _measured(torch.ones(7), 0, chunk).note == "no_units:a run of a flattened tensor"
    assert _measured(torch.ones(2, dtype=torch.complex64)).note == "no_statistics:complex64"


_ROWS = st.lists(st.tuples(*[st.floats(-1e6, 1e6, width=32)] * 3), min_size=1, max_size=20)


@given(_ROWS, _ROWS)
def test_the_sums_of_all_values_are_those_of_the_parts(
    one: list[tuple[float, ...]], two: list[tuple[float, ...]]
) -> None:
    found, whole = _of(torch.tensor(one)) + _of(torch.tensor(two)), _of(torch.tensor([*one, *two]))
    assert found.zero_count.tolist() == whole.zero_count.tolist() and found.absmax.tolist() == whole.absmax.tolist()
    assert np.allclose(found.sum, whole.sum, atol=1e-3) and np.allclose(found.sum_sq, whole.sum_sq)
    assert found.num_values == whole.num_values


def test_units_of_other_dims_do_not_add_up() -> None:
    with pytest.raises(ValueError, match="do not add up"):
        _of(torch.ones(2, 2), 0) + _of(torch.ones(2, 2), 1)


def test_a_factor_scales_them() -> None:
    tensor = torch.tensor([[1.0, -2.0], [0.0, 4.0]])
    assert _of(tensor).scaled(-0.5) == _of(tensor * -0.5)


def test_chunks_are_laid_side_by_side_or_added() -> None:
    tensor = torch.arange(24.0).reshape(4, 6)
    left, right, below = tensor[:2, :4], tensor[:2, 4:], tensor[2:]
    pieces = [
        ChunkUnits(_of(left.contiguous()), [(0, 0, 4)]),
        ChunkUnits(_of(right.contiguous()), [(0, 4, 2)]),
        ChunkUnits(_of(below), [(3, 3, 3), (0, 0, 3)]),
    ]
    assert joined(pieces, (4, 6), 1) == _of(tensor)
    with pytest.raises(ValueError, match="do not include"):
        joined([ChunkUnits(_of(left.contiguous()), [(0, 4, 4)])], (4, 6), 1)


def test_people_see_the_largest_units_and_how_many_are_dead() -> None:
    shown = str(_of(torch.tensor([[0.0, 3.0, -9.0], [0.0, 1.0, 0.0]]))).splitlines()
    assert [line.split()[0] for line in shown[1:4]] == ["2", "1", "0"] and shown[1].split()[-1] == "50.0%"
    assert shown[-1] == "3 units of dim 1, 2 values each; 1 all zero"


@pytest.mark.parametrize(
    "change",
    [
        lambda data: b"", lambda data: data[:-1], lambda data: data + b"\0", lambda data: b"\3" + data[1:],
        lambda data: data[:1] + b"\2" + data[2:], lambda data: data[:2] + b"\1" + data[3:],
        lambda data: data[:-2] + b"\xff\xff", lambda data: data[:20] + struct.pack("<d", -1.0) + data[28:],
    ],
)  # fmt: skip
def test_bytes_that_are_none_are_damage(change: object) -> None:
    data = _measured(torch.tensor([[1.0, 0.0], [3.0, 0.0]])).units
    assert data is not None and callable(change)
    with pytest.raises(CorruptError, match="units"):
        Units.from_bytes(change(data), (2, 2))


@given(st.binary(max_size=90), st.lists(st.integers(0, 4), max_size=3))
def test_arbitrary_bytes_are_units_or_damage(data: bytes, shape: list[int]) -> None:
    try:
        found = Units.from_bytes(data, shape)
    except CorruptError:
        return
    assert len(found) == shape[found.dim]


def test_sides_count_from_either_end() -> None:
    assert sides_of((2, 3, 4), -2) == sides_of((2, 3, 4), 1) == (1, 3, 4)
