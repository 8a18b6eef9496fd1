"""Statistics are those of the values, for every element type and size; the fingerprint is the specification's."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recorder.capture.staging import measure as module
from recorder.capture.staging.measure import measure
from recorder.errors import UnsupportedError
from recorder.format.fingerprint import MODULUS
from recorder.numerics.dtypes import ITEM_BYTES
from recorder.records import KEEP_FINGERPRINT, KEEP_STATS, KEEP_TENSOR, Chunk, Measured
from tests.rigs import independent

_REAL = [name for name in ITEM_BYTES if not name.startswith(("complex", "float4"))]
_STATISTICS = ("mean", "std", "min", "max", "absmax", "l2", "sum", "sum_sq", "sum_abs", "sum_fourth")


def _bytes(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    return tensor.reshape(-1).view(torch.uint8).numpy() if tensor.numel() else np.empty(0, np.uint8)


def _measure(tensor: torch.Tensor, keep: int = KEEP_STATS) -> Measured:
    name = str(tensor.dtype).removeprefix("torch.")
    return measure(_bytes(tensor), name, tuple(tensor.shape), None, keep)


def _exact(values: list[float]) -> dict[str, Any]:
    """Statistics the slow way, with sums that are exact to the last bit."""
    finite = [value for value in values if math.isfinite(value)]
    counts = {
        "nan_count": sum(map(math.isnan, values)),
        "inf_count": sum(map(math.isinf, values)),
        "zero_count": values.count(0),
    }
    if not finite:
        return dict.fromkeys(_STATISTICS) | counts
    mean = math.fsum(finite) / len(finite)
    sum_sq = math.fsum(value * value for value in finite)
    return {
        "mean": mean,
        "std": math.sqrt(math.fsum((value - mean) ** 2 for value in finite) / len(finite)),
        "min": min(finite),
        "max": max(finite),
        "absmax": max(map(abs, finite)),
        "l2": math.sqrt(sum_sq),
        "sum": math.fsum(finite),
        "sum_sq": sum_sq,
        "sum_abs": math.fsum(map(abs, finite)),
        "sum_fourth": math.fsum(value**4 for value in finite),
    } | counts


def _assert_equal(measured: Measured, values: list[float]) -> None:
    expected = _exact(values)
    magnitude = math.fsum(abs(value) for value in values if math.isfinite(value))
    for name, value in expected.items():
        found = getattr(measured, name)
        if value is None or name in ("min", "max", "absmax", "nan_count", "inf_count", "zero_count"):
            assert found == value, name
        else:
            scale = {"sum": magnitude, "mean": magnitude / len(values)}.get(name, abs(value))
            # The deviations of nearly equal values lose what the values themselves cannot hold.
            slack = 1e-15 * expected["absmax"] if name == "std" else 0
            assert abs(found - value) <= 1e-12 * scale + slack, (name, found, value)


@pytest.fixture(params=[3, 1 << 15], ids=["small_chunks", "one_chunk"])
def chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(module, "_CHUNK_ITEMS", request.param)
    yield


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("dtype", _REAL)
@pytest.mark.parametrize("num_items", [0, 1, 3, 10, 257])
def test_every_bit_pattern_of_every_real_type(dtype: str, num_items: int) -> None:
    raw = np.random.default_rng(num_items).integers(
        0, 2 if dtype == "bool" else 256, num_items * ITEM_BYTES[dtype], np.uint8
    )
    tensor = torch.zeros(num_items, dtype=getattr(torch, dtype))
    if num_items:
        tensor = torch.from_numpy(raw).view(tensor.dtype)
    if dtype == "float64":
        tensor = tensor.to(torch.float32).to(torch.float64)  # squares of any double overflow
    _assert_equal(_measure(tensor), [float(value) for value in tensor.tolist()])


@pytest.mark.parametrize(
    "dtype", ["float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"]
)
def test_all_256_values_of_the_8_bit_floats(dtype: str) -> None:
    tensor = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(getattr(torch, dtype))
    _assert_equal(_measure(tensor), tensor.to(torch.float64).tolist())


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_all_65536_values_of_the_16_bit_floats(dtype: str) -> None:
    tensor = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(getattr(torch, dtype))
    _assert_equal(_measure(tensor), tensor.to(torch.float64).tolist())


_FLOATS = st.floats(width=32) | st.sampled_from(
    [0.0, -0.0, math.nan, math.inf, -math.inf, 2.0**-149, 3.4028234663852886e38]
)


@given(st.lists(_FLOATS, max_size=40))
def test_any_floats(values: list[float]) -> None:
    _assert_equal(_measure(torch.tensor(values, dtype=torch.float32)), values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int32])
def test_a_tensor_of_many_chunks(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(5)
    tensor = (torch.randn(100_003, generator=generator) * 50).to(dtype)
    _assert_equal(_measure(tensor), [float(value) for value in tensor.tolist()])


def test_one_chunk_of_nothing_finite_leaves_the_others() -> None:
    tensor = torch.ones(3 << 15)
    tensor[1 << 15 : 2 << 15] = -math.inf
    measured = _measure(tensor)
    assert (measured.mean, measured.std, measured.inf_count) == (1.0, 0.0, 1 << 15)


def test_the_spread_of_values_far_from_zero_is_not_lost() -> None:
    tensor = 1e6 + torch.randn(200_000, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    measured = _measure(tensor)
    assert measured.std == pytest.approx(float(tensor.std(correction=0)), rel=1e-9)


def test_a_constant_tensor_has_no_spread_at_all() -> None:
    measured = _measure(torch.full((99_999,), 0.02))
    assert measured.std == 0.0
    assert measured.mean == measured.min == measured.max


@pytest.mark.usefixtures("chunks")
def test_sums_beyond_the_largest_double_are_infinite_and_never_nan() -> None:
    measured = _measure(torch.tensor([1.7e308] * 3 + [-1.7e308] * 6, dtype=torch.float64))
    assert measured.sum_sq == measured.l2 == math.inf
    assert not any(math.isnan(getattr(measured, name)) for name in _STATISTICS)
    assert measured.max == 1.7e308


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
@pytest.mark.parametrize("dtype", [torch.complex32, torch.complex64, torch.complex128])
def test_complex_tensors_are_counted_only(dtype: torch.dtype) -> None:
    nan, inf = math.nan, math.inf
    values = [
        1 + 2j,
        0j,
        complex(nan, inf),
        complex(0, inf),
        complex(-inf, 1),
        complex(nan, 0),
        complex(0, 1),
        complex(1, 0),
    ]
    tensor = torch.tensor(values, dtype=torch.complex128).to(dtype)
    name = str(dtype).removeprefix("torch.")
    assert _measure(tensor) == Measured(nan_count=2, inf_count=2, zero_count=1, note=f"no_statistics:{name}")


def test_packed_pairs_have_no_statistics() -> None:
    found = measure(np.arange(9, dtype=np.uint8), "float4_e2m1fn_x2", (9,), None, KEEP_STATS)
    assert found == Measured(note="no_statistics:float4_e2m1fn_x2")


def test_an_unknown_type_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="'int3'"):
        measure(np.zeros(4, np.uint8), "int3", (4,), None, KEEP_STATS)


def test_only_what_is_asked_for_is_computed() -> None:
    tensor = torch.ones(4)
    assert _measure(tensor, KEEP_TENSOR) == Measured()
    assert _measure(tensor, KEEP_STATS).fingerprint is None
    fingerprint_only = _measure(tensor, KEEP_FINGERPRINT)
    assert fingerprint_only.mean is None
    assert fingerprint_only.fingerprint is not None


@pytest.mark.parametrize("dtype", ["bool", "int8", "bfloat16", "float32", "float64", "complex64", "complex128"])
@pytest.mark.parametrize("offsets", [None, (3, 0, 10)])
def test_the_fingerprint_is_the_specifications(dtype: str, offsets: tuple[int, ...] | None) -> None:
    tensor = torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(2)).to(getattr(torch, dtype))
    expected = independent.fingerprint(_bytes(tensor).tobytes(), ITEM_BYTES[dtype], (4, 3, 5), offsets)
    chunk = None if offsets is None else Chunk((9, 9, 99), offsets, "[]", "{}", "dtensor")
    assert measure(_bytes(tensor), dtype, (4, 3, 5), chunk, KEEP_FINGERPRINT).fingerprint == expected


@pytest.mark.parametrize("dtype", ["bool", "bfloat16", "float32", "float64", "complex128"])
def test_slices_of_the_flattened_tensor_add_up_to_its_fingerprint(dtype: str) -> None:
    tensor = torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(2)).to(getattr(torch, dtype))
    total = 0
    for start, stop in ((0, 7), (7, 7), (7, 41), (41, 60)):
        piece = tensor.reshape(-1)[start:stop]
        chunk = Chunk((4, 3, 5), None, "[]", "{}", "fsdp", start)
        found = measure(_bytes(piece), dtype, tuple(piece.shape), chunk, KEEP_FINGERPRINT).fingerprint
        assert found is not None
        total += found
    assert total % MODULUS == independent.fingerprint(_bytes(tensor).tobytes(), ITEM_BYTES[dtype], (4, 3, 5), None)
