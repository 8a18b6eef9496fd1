"""Histograms count what is there, add up, and are as FORMAT.md says to the last byte."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recorder.capture.staging.measure import measure
from recorder.errors import CorruptError
from recorder.numerics.dtypes import ITEM_BYTES
from recorder.numerics.histogram import Histogram, of_row
from recorder.numerics.moments import added
from recorder.records import KEEP_HISTOGRAM, KEEP_STATS
from tests.rigs import independent

_BOTH = KEEP_STATS | KEEP_HISTOGRAM
_REAL = [name for name in ITEM_BYTES if not name.startswith(("complex", "float4"))]
_SUBNORMAL = {"float32": -126, "bfloat16": -126, "float64": -1022}


def _of(tensor: torch.Tensor) -> Histogram:
    data = tensor.reshape(-1).view(torch.uint8).numpy() if tensor.numel() else np.empty(0, np.uint8)
    found = of_row(measure(data, str(tensor.dtype)[6:], tuple(tensor.shape), None, _BOTH))
    assert found is not None
    return found


def _floats(*values: float, dtype: torch.dtype = torch.float32) -> Histogram:
    return _of(torch.tensor(values, dtype=dtype))


def _slowly(values: list[float] | list[int], dtype: str) -> Counter[tuple[bool, int]]:
    """Whether it is positive, and its exponent, of each value that is finite and not zero."""
    found: Counter[tuple[bool, int]] = Counter()
    for value in values:
        if value and math.isfinite(value):
            exponent = abs(value).bit_length() - 1 if isinstance(value, int) else math.frexp(value)[1] - 1
            least = _SUBNORMAL.get(dtype, -(1 << 20))
            found[value > 0, exponent if exponent >= least else least - 1] += 1
    return found


def _counts(histogram: Histogram) -> Counter[tuple[bool, int]]:
    found: Counter[tuple[bool, int]] = Counter()
    for is_positive, counts in enumerate(histogram.counts.tolist()):
        for exponent, count in zip(histogram.exponents.tolist(), counts, strict=True):
            if count:
                found[bool(is_positive), exponent] = count
    return found


@pytest.mark.parametrize("dtype", _REAL)
@pytest.mark.parametrize("num_items", [0, 1, 3, 257, 40_000])
def test_every_bit_pattern_is_counted_by_its_sign_and_power_of_two(dtype: str, num_items: int) -> None:
    raw = np.random.default_rng(num_items).integers(
        0, 2 if dtype == "bool" else 256, num_items * ITEM_BYTES[dtype], np.uint8
    )
    tensor = torch.from_numpy(raw).view(getattr(torch, dtype)) if num_items else torch.zeros(0, dtype=torch.float32)
    values = [int(x) if isinstance(x, bool) else x for x in tensor.tolist()]
    found = _of(tensor)
    assert _counts(found) == _slowly(values, dtype)
    assert found.infinite.tolist() == [values.count(-math.inf), values.count(math.inf)]
    assert (found.zero_count, found.nan_count) == (values.count(0), sum(x != x for x in values))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_subnormal_infinite_and_zero_values_have_a_bin_of_their_own(dtype: str) -> None:
    kind = torch.finfo(getattr(torch, dtype))
    least, inf = kind.smallest_normal, math.inf
    values = [0.0, -0.0, least, -least, least / 2, -least / 4, inf, -inf, -inf, math.nan, kind.max, kind.min]
    tensor = torch.tensor(values, dtype=getattr(torch, dtype))
    found = _of(tensor)
    assert _counts(found) == _slowly(tensor.tolist(), dtype)
    assert (found.zero_count, found.nan_count, found.infinite.tolist()) == (2, 1, [2, 1])


def test_whole_numbers_count_by_their_exact_value() -> None:
    values = [0, 1, -1, (1 << 62) - 1, 1 << 62, (1 << 63) - 1, -(1 << 63)]
    assert _counts(_of(torch.tensor(values))) == _slowly(values, "int64")
    assert _counts(_of(torch.tensor([(1 << 64) - 1], dtype=torch.uint64))) == {(True, 63): 1}


@pytest.mark.parametrize("dtype", ["complex64", "float4_e2m1fn_x2"])
def test_what_has_no_statistics_has_no_histogram(dtype: str) -> None:
    assert measure(np.arange(16, dtype=np.uint8), dtype, (2,), None, _BOTH).histogram is None


def test_the_examples_of_the_page_are_those_bytes() -> None:
    made = [
        torch.zeros(0),
        torch.tensor([1.0, 1.5, -4.0, 0.0, math.inf]),
        torch.tensor([2.0**-24], dtype=torch.float16),
        torch.tensor([2.0**-149]),
    ]
    tables = [row for row in independent.section("Histogram").splitlines() if row.startswith("| float")]
    shown = [bytes.fromhex(row.split("|")[2].strip(" `")) for row in tables]
    assert shown == [_of(tensor).to_bytes() for tensor in made]
    assert _floats(0.0, math.nan).to_bytes() == shown[0]


_ANY = st.lists(st.floats(width=32), max_size=30)


@given(_ANY, _ANY)
def test_the_histogram_of_all_values_is_the_sum_of_those_of_its_parts(one: list[float], two: list[float]) -> None:
    assert _floats(*one) + _floats(*two) == _floats(*one, *two) == added([_floats(*two), _floats(*one)])


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=30), st.floats(0, 1))
def test_a_quantile_lies_between_its_bounds(values: list[float], q: float) -> None:
    low, high = _floats(*values).quantile(q)
    assert low <= sorted(values)[math.floor(q * (len(values) - 1))] <= high


def test_the_ends_are_known_exactly_and_a_bin_is_a_factor_of_two() -> None:
    histogram = _floats(*np.random.default_rng(0).normal(0, 1, 1000))
    assert histogram.quantile(0) == (histogram.min, histogram.quantile(0).high)
    assert histogram.quantile(1).high == histogram.max
    low, high = histogram.quantile(0.9)
    assert high == 2 * low


@pytest.mark.parametrize("q", [-0.1, 1.1, math.nan])
def test_what_is_no_quantile_is_refused(q: float) -> None:
    with pytest.raises(ValueError, match="from 0 to 1"):
        _floats(1.0).quantile(q)


def test_without_values_there_is_no_quantile() -> None:
    with pytest.raises(ValueError, match="without values"):
        _floats(math.nan).quantile(0.5)


@given(_ANY, st.sampled_from([0.5, -0.25, 2.0, -1.0]))
def test_multiplying_with_a_power_of_two_moves_the_bins(values: list[float], factor: float) -> None:
    wide = torch.tensor(values, dtype=torch.float64)
    assert _of(wide).scaled(factor) == _of(wide * factor)


def test_other_factors_would_mix_the_bins() -> None:
    assert _floats(1.0, 5.0).scaled(1 / 3) is None
    assert _floats(1.0, 5.0).scaled(0.0) is None


def test_rebinning_keeps_every_finite_value_between_the_edges() -> None:
    values = [*np.random.default_rng(1).normal(0, 3, 500), 0.0, 0.0, math.inf]
    histogram = _floats(*values)
    assert histogram.min is not None and histogram.max is not None
    found = histogram.rebinned(np.linspace(histogram.min, histogram.max, 9).tolist())
    assert found.sum() == pytest.approx(502) and (found >= 0).all()
    assert _floats(0.0, 0.0).rebinned([-1.0, 0.0, 1.0]).tolist() == [0.0, 2.0]
    with pytest.raises(ValueError, match="ascending"):
        histogram.rebinned([1.0, 1.0])


@given(_ANY, st.sampled_from([1 << 16, 5, 2]))
def test_buckets_hold_every_finite_value_once(values: list[float], most: int) -> None:
    edges, counts = _floats(*values).buckets(most)
    finite = np.array([x for x in values if math.isfinite(x)])
    assert len(edges) == len(counts) + 1 <= max(most, 3) + 1 and (np.diff(edges) > 0).all()
    assert counts.sum() == len(finite)
    for low, high, count in zip(edges, edges[1:], counts, strict=False):
        inside = (finite > low) & (finite <= high) if high <= 0 else (finite >= low) & (finite < high)
        if low < 0 < high:
            inside = (finite > low) & (finite < high)
        assert inside.sum() == count


def _plain(width: int, first: int, counts: list[int], layout: int = 0) -> bytes:
    numbers: npt.NDArray[Any] = np.array(counts, f"<u{width}")
    return bytes([width, layout]) + first.to_bytes(2, "little", signed=True) + numbers.tobytes()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\1\0\0",
        _plain(1, 0, []),
        _plain(1, 0, [1, 2, 3]),
        _plain(1, 0, [0, 0], layout=1),
        bytes([3, 0, 0, 0, 0, 0, 0, 0, 0, 0]),
        _plain(8, 0, [1 << 53, 0]),
        _plain(8, 0, [(1 << 64) - 1, 0]),
        _plain(1, -1075, [0, 0, 1, 1]),
        _plain(1, 1023, [0, 0, 1, 1, 1, 1]),
    ],
)
def test_bytes_that_are_none_are_damage(data: bytes) -> None:
    with pytest.raises(CorruptError, match="histogram"):
        Histogram.from_bytes(data)


@given(st.binary(max_size=60))
def test_arbitrary_bytes_are_a_histogram_or_damage(data: bytes) -> None:
    try:
        found = Histogram.from_bytes(data)
    except CorruptError:
        return
    assert Histogram.from_bytes(found.to_bytes()) == found
