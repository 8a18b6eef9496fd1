"""Statistics and fingerprints by torch's kernels are those that the writer computes; here on tensors of the CPU."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from recorder.capture.staging import device_measure
from recorder.capture.staging.device_measure import DeviceMeasure, can_measure
from recorder.capture.staging.measure import measure
from recorder.numerics.units import Units
from recorder.records import KEEP_FINGERPRINT, KEEP_STATS, KEEP_UNITS, Chunk, Measured

BOTH = KEEP_STATS | KEEP_FINGERPRINT | KEEP_UNITS
EXACT = ("min", "max", "absmax", "nan_count", "inf_count", "zero_count", "fingerprint", "note")
TOLERANCE = 1e-12
"""Sums in another order: relative, of sums to the sum of magnitudes."""


def on_device(tensor: torch.Tensor, keep: int = BOTH, chunk: Chunk | None = None) -> Measured:
    plan, before = DeviceMeasure(tensor.dtype, tuple(tensor.shape), keep), tensor.clone()
    results = plan.launch(tensor, {})
    bits = [x.reshape(-1).view(torch.uint8) for x in (tensor.contiguous(), before.contiguous())]
    assert torch.equal(*bits), "the value may be training's own"
    assert results.dtype == torch.int64 and results.numel() * 8 == plan.nbytes
    return plan.read(results.numpy().reshape(-1).view(np.uint8), chunk)


def on_host(tensor: torch.Tensor, keep: int = BOTH, chunk: Chunk | None = None) -> Measured:
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return measure(data, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), chunk, keep)


def assert_equal(tensor: torch.Tensor, **more: Any) -> None:
    found, wanted = on_device(tensor, **more), on_host(tensor, **more)
    for name in EXACT:
        assert getattr(found, name) == getattr(wanted, name), name
    finite = tensor.double()[torch.isfinite(tensor.double())]
    magnitudes = float(finite.abs().sum()) or 1.0
    for name, scale in (("sum", magnitudes), ("mean", magnitudes / max(1, len(finite)))):
        assert_near(getattr(found, name), getattr(wanted, name), scale, name)
    assert_units_equal(found, wanted, tuple(tensor.shape))
    for name in ("std", "l2", "sum_sq", "sum_abs", "sum_fourth"):
        assert_near(getattr(found, name), getattr(wanted, name), getattr(wanted, name) or 0.0, name)


def assert_units_equal(found: Measured, wanted: Measured, shape: tuple[int, ...]) -> None:
    if found.units is None or wanted.units is None:
        assert found.units == wanted.units
        return
    own, host = Units.from_bytes(found.units, shape), Units.from_bytes(wanted.units, shape)
    assert (own.dim, own.zero_count.tolist(), own.absmax.tolist()) == (
        host.dim, host.zero_count.tolist(), host.absmax.tolist(),
    )  # fmt: skip
    assert np.allclose(own.sum_sq, host.sum_sq, rtol=1e-12)
    assert (abs(own.sum - host.sum) <= 1e-12 * host.absmax * max(1, host.num_values)).all()


def assert_near(found: float | None, wanted: float | None, scale: float, name: str) -> None:
    if found is None or wanted is None or math.isinf(wanted):
        assert found == wanted, name
    else:
        assert abs(found - wanted) <= TOLERANCE * scale, (name, found, wanted)


@pytest.fixture
def small_boxes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces and factors small enough that every way to cut a tensor is taken."""
    monkeypatch.setattr(device_measure, "_BOX_ITEMS", 24)
    monkeypatch.setattr(device_measure, "_MAX_WEIGHTS", 6)


def values(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return (torch.randn(shape, generator=generator, dtype=torch.float64) * 3).to(dtype)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator, dtype=torch.uint8).bool()
    info = torch.iinfo(dtype)
    return torch.randint(info.min, info.max, shape, generator=generator, dtype=torch.int64).to(dtype)


@pytest.mark.parametrize("dtype", device_measure._DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1,), (), (7, 1, 5), (300, 257), (70_001,), (3, 2, 4, 5, 6)], ids=str)
def test_every_dtype_gives_the_numbers_of_the_host(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = values(dtype, shape)
    assert can_measure(tensor, None, BOTH)
    assert_equal(tensor)


@pytest.mark.usefixtures("small_boxes")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64], ids=str)
@pytest.mark.parametrize("shape", [(50,), (5, 7, 11), (3, 1, 50), (2, 3, 4, 5), (25, 1), (1, 1, 1, 100)], ids=str)
def test_pieces_make_the_whole(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    assert len(DeviceMeasure(dtype, shape, BOTH)._boxes) > 1
    assert_equal(values(dtype, shape))


@pytest.mark.usefixtures("small_boxes")
@given(
    shape=st.lists(st.integers(1, 9), min_size=0, max_size=4),
    seed=st.integers(0, 1000),
    special=st.lists(st.sampled_from([math.nan, math.inf, -math.inf, 0.0, -0.0, 5e-324, 1e30]), max_size=12),
)
def test_any_shape_and_special_values(shape: list[int], seed: int, special: list[float]) -> None:
    tensor = values(torch.float64, tuple(shape), seed)
    flat = tensor.reshape(-1)
    count = min(len(special), len(flat))
    flat[:count] = torch.tensor(special[:count], dtype=torch.float64)
    assert_equal(tensor)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.full((40, 40), 0.1),
        torch.full((40,), math.nan),
        torch.full((40,), -math.inf),
        torch.zeros(33),
        torch.full((1000,), 1e308, dtype=torch.float64),
        torch.tensor([1e308, -1e308] * 50 + [1.0], dtype=torch.float64),
        1e8 + torch.randn(1000, generator=torch.Generator().manual_seed(3), dtype=torch.float64),
    ],
    ids=["constant", "nan", "inf", "zero", "overflow", "both signs", "small spread"],
)
def test_what_is_hard_to_sum(tensor: torch.Tensor) -> None:
    if tensor.double().abs().max() == 1e308:  # sums overflow to infinity at other elements
        found, wanted = on_device(tensor), on_host(tensor)
        assert (found.std, found.l2, found.sum_sq) == (wanted.std, wanted.l2, wanted.sum_sq)
        assert found.l2 == math.inf
        assert all(getattr(found, name) == getattr(wanted, name) for name in EXACT)
        return
    assert_equal(tensor)


def test_a_fingerprint_is_moved_to_its_position_in_the_whole() -> None:
    whole = values(torch.float32, (12, 10))
    top, bottom = (Chunk((12, 10), (row, 0), "", "", "dtensor") for row in (0, 7))
    parts = [on_device(whole[:7], KEEP_FINGERPRINT, top), on_device(whole[7:], KEEP_FINGERPRINT, bottom)]
    wanted = on_host(whole).fingerprint
    assert sum(part.fingerprint or 0 for part in parts) % (1 << 64) == wanted
    assert parts[1] == on_host(whole[7:], KEEP_FINGERPRINT, bottom)


def test_only_what_is_asked_for_is_measured() -> None:
    tensor = values(torch.float32, (5, 5))
    assert on_device(tensor, KEEP_STATS).fingerprint is None
    assert on_device(tensor, KEEP_FINGERPRINT) == Measured(fingerprint=on_host(tensor).fingerprint)


def test_what_the_device_cannot_measure_is_left_to_the_host() -> None:
    run = Chunk((12, 10), (0, 0), "", "", "fsdp", flat_start=5)
    assert not can_measure(torch.zeros(7), run, KEEP_FINGERPRINT)
    assert can_measure(torch.zeros(7), run, KEEP_STATS)
    assert not can_measure(torch.zeros(7, dtype=torch.complex64), None, BOTH)


def test_the_weights_are_made_once_for_a_shape() -> None:
    weights: device_measure.Weights = {}
    tensor = values(torch.float32, (300, 700))
    plan = DeviceMeasure(tensor.dtype, tuple(tensor.shape), KEEP_FINGERPRINT)
    first = plan.launch(tensor, weights)
    kept = {group: found.data_ptr() for group, found in weights.items()}
    assert kept and torch.equal(plan.launch(tensor, weights), first)
    assert {group: found.data_ptr() for group, found in weights.items()} == kept


class Calls(TorchDispatchMode):
    """Notes which kernels are asked for."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(str(func.overloadpacket).removeprefix("aten."))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bool, torch.int64], ids=str)
def test_no_kernel_is_used_that_waits_for_a_gpu(dtype: torch.dtype) -> None:
    """`where` with a number, `item`, `nonzero` and copies from the host do; a new kernel is to be looked at first."""
    plan, tensor = DeviceMeasure(dtype, (300, 700), BOTH), values(dtype, (300, 700))
    with Calls() as calls:
        plan.launch(tensor, {})
    assert "amin" in calls.names
    assert calls.names <= {
        *("view", "reshape", "_unsafe_view", "alias", "slice", "detach", "unsqueeze", "stack", "cat", "zeros", "ones"),
        *("_to_copy", "ne", "eq", "abs", "sum", "isnan", "logical_not_", "masked_fill", "masked_fill_", "amin", "amax"),
        *("abs_", "sub", "div", "mul", "mul_", "clone", "bitwise_and", "maximum", "add_", "unbind", "permute"),
    }
