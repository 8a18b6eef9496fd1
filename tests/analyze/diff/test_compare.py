"""How far two arrays are apart, against what plain numpy and Python's own functions say."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recorder.analyze.diff.compare import Tolerance, are_identical, compare
from recorder.errors import LookupFailedError
from recorder.numerics.dtypes import numpy_dtype

EXACT = Tolerance()


def f32(*values: float) -> npt.NDArray[np.float32]:
    return np.array(values, np.float32)


def test_equal_arrays_are_no_distance_apart() -> None:
    values = f32(1, -2, math.nan, math.inf, 0.0)
    found = compare(values, values.copy(), EXACT)
    assert (found.num_outside, found.max_abs, found.max_rel, found.max_ulp) == (0, 0, 0, 0)
    assert (found.nonfinite_a, found.nonfinite_b) == (2, 2)
    assert found.cosine == pytest.approx(1)


def test_the_largest_distances() -> None:
    found = compare(f32(1, 100, 0, 5), f32(1.5, 101, 0, 5), EXACT)
    assert (found.num_outside, found.numel) == (2, 4)
    assert found.max_abs == 1
    assert found.max_rel == pytest.approx(0.5 / 1.5)
    assert found.l2_apart == pytest.approx(math.sqrt(0.25 + 1))
    a, b = np.array([1, 100, 0, 5.0]), np.array([1.5, 101, 0, 5])
    assert found.cosine == pytest.approx(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


def test_of_max_is_of_the_whole_tensor() -> None:
    """What rounding does near zero is large against the element, and small against the tensor."""
    found = compare(f32(1e-9, 100, -250), f32(-1e-9, 100, -250), EXACT)
    assert found.max_rel == 2 and found.max_ulp is not None and found.max_ulp > 1e9
    assert found.of_max == pytest.approx(2e-9 / 250)
    assert compare(f32(1, 2), f32(1, -8), EXACT).of_max == 10 / 8
    assert compare(f32(1, 2, math.inf), f32(1.5, 2, 0), EXACT).of_max == 0.25
    assert compare(np.array([3 + 4j, 1]), np.array([0, 1 + 0j]), EXACT).of_max == 1
    far = np.zeros(100_000)
    far[[7, 99_999]] = 1, -50
    assert compare(far, np.where(far == 1, 2, far), EXACT).of_max == 1 / 50
    assert compare(f32(0, 0), f32(0, 0), EXACT).of_max == 0


@pytest.mark.parametrize(
    ("tolerance", "num_outside"),
    [
        (Tolerance(atol=1), 0),
        (Tolerance(atol=0.9), 1),
        (Tolerance(rtol=0.34), 0),
        (Tolerance(rtol=0.01), 1),
        (Tolerance(rtol=0.01, atol=0.5), 0),
        (Tolerance(ulp=1 << 23), 0),
    ],
)
def test_an_element_within_any_tolerance_is_equal(tolerance: Tolerance, num_outside: int) -> None:
    assert compare(f32(1, 100), f32(1.5, 101), tolerance).num_outside == num_outside


def test_what_is_not_finite_is_equal_only_to_its_like() -> None:
    found = compare(
        f32(math.nan, math.inf, math.inf, 1, 2), f32(math.nan, math.inf, -math.inf, math.nan, 2), Tolerance(1, 9, 9)
    )
    assert (found.num_outside, found.nonfinite_a, found.nonfinite_b) == (2, 3, 4)
    assert found.max_abs == 0


def test_zeros_of_either_sign_are_equal() -> None:
    found = compare(f32(0.0), f32(-0.0), EXACT)
    assert (found.num_outside, found.max_ulp, found.cosine) == (0, 0, None)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_units_in_the_last_place_count_representable_numbers(dtype: str) -> None:
    kind = numpy_dtype(dtype)
    tiny = np.array([1], f"<u{kind.itemsize}").view(kind)[0]
    values = np.array([1, -1, 0, tiny, -tiny], kind)
    if dtype == "bfloat16":
        up = (values.view(np.uint16) + np.array([1, -1, 1, 1, -1], np.int32)).astype(np.uint16).view(kind)
        up[4] = 0
    else:
        up = np.nextafter(values, np.array(np.inf, kind))
    found = compare(values, up, EXACT)
    assert found.max_ulp == 1 and found.num_outside == 5
    assert compare(values, up, Tolerance(ulp=1)).num_outside == 0
    assert compare(np.array([-tiny], kind), np.array([tiny], kind), EXACT).max_ulp == 2


def test_the_widest_distance_in_units_does_not_overflow() -> None:
    ends = np.finfo(np.float64)
    found = compare(np.array([ends.min]), np.array([ends.max]), EXACT)
    assert found.max_ulp == 2 * int(np.array(ends.max).view(np.uint64))
    assert found.max_abs == math.inf


@pytest.mark.parametrize("wider", ["float16", "float32", "float64"])
def test_different_types_are_compared_in_the_wider(wider: str) -> None:
    narrow = np.array([1, 2.5, -3], ml_dtypes.bfloat16)
    found = compare(narrow, narrow.astype(wider), EXACT)
    assert (found.num_outside, found.max_ulp) == (0, None)
    assert compare(narrow, np.array([1, 2.5, -3.001], np.float64), EXACT).max_abs == pytest.approx(0.001)


@pytest.mark.parametrize(
    "dtype", ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"]
)
def test_eight_bit_floats(dtype: str) -> None:
    a, b = (np.array(values).astype(numpy_dtype(dtype)) for values in ([1.0, 2], [1.0, 4]))
    found = compare(a, b, EXACT)
    assert (found.num_outside, found.max_abs, found.max_ulp) == (1, 2, None)


def test_integers_beyond_float64_are_compared_exactly() -> None:
    found = compare(np.array([2**62, 7]), np.array([2**62 + 1, 7]), EXACT)
    assert found.num_outside == 1
    assert compare(np.array([2**62]), np.array([2**62]), EXACT).num_outside == 0


def test_flags_and_complex_numbers() -> None:
    assert compare(np.array([True, False]), np.array([True, True]), EXACT).max_abs == 1
    found = compare(np.array([3 + 4j, 1]), np.array([0, 1 + 0j]), EXACT)
    assert (found.num_outside, found.max_abs, found.max_rel) == (1, 5, 1)
    half = np.array([(1, 2), (0, 0)], numpy_dtype("complex32"))
    other = np.array([(1, 3), (0, 0)], numpy_dtype("complex32"))
    assert compare(half, other, EXACT).max_abs == 1


def test_empty_arrays_are_equal() -> None:
    found = compare(np.zeros((0, 3)), np.zeros((0, 3)), EXACT)
    assert (found.numel, found.num_outside, found.max_abs, found.cosine) == (0, 0, 0, None)


@given(
    st.lists(st.tuples(st.floats(width=32), st.floats(width=32)), min_size=1, max_size=20),
    st.sampled_from([0.0, 1e-6, 0.1]),
    st.sampled_from([0.0, 1e-3, 10.0]),
)
def test_tolerances_mean_what_isclose_means(pairs: list[tuple[float, float]], rtol: float, atol: float) -> None:
    a, b = (np.array(values, np.float32) for values in zip(*pairs, strict=True))
    expected = sum(
        not (math.isclose(x, y, rel_tol=rtol, abs_tol=atol) or (math.isnan(x) and math.isnan(y))) for x, y in pairs
    )
    assert compare(a, b, Tolerance(rtol, atol)).num_outside == expected


def test_a_large_array_is_compared_piece_by_piece() -> None:
    a = np.zeros(2_500_000, np.float32)
    b = a.copy()
    b[[1, 1_500_000, 2_400_000]] = 1, 3, 2
    found: Any = compare(a, b, EXACT)
    assert (found.num_outside, found.max_abs, found.numel) == (3, 3, 2_500_000)


def test_whole_numbers_are_compared_in_integers() -> None:
    big = 1 << 53
    a, b = np.array([big + 1, 5, -(1 << 63)]), np.array([big, 5, (1 << 63) - 1])
    found = compare(a, b, Tolerance(atol=0.5))
    assert (found.num_outside, found.max_abs) == (2, 2.0**64)
    assert compare(a[:2], b[:2], Tolerance(atol=1)).num_outside == 0
    assert compare(a[:1], b[:1], EXACT).max_abs == 1
    unsigned = np.array([(1 << 64) - 1], np.uint64)
    assert compare(unsigned, unsigned - np.uint64(1), Tolerance(atol=0.5)).num_outside == 1
    assert compare(unsigned, np.array([-1]), Tolerance(rtol=0.9)).num_outside == 1


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "complex128", "complex64"])
def test_a_whole_number_that_no_float_holds_is_none(dtype: str) -> None:
    whole = np.array([(1 << 54) + 1])
    floats = (whole - 1).astype(numpy_dtype(dtype))
    assert compare(whole - 1, floats, EXACT).num_outside == 0
    for one, two in ((whole, floats), (floats, whole)):
        assert compare(one, two, EXACT).num_outside == 1
        assert compare(one, two, Tolerance(atol=0.5)).num_outside == 1
        assert compare(one, two, Tolerance(atol=1)).num_outside == 0
        assert compare(one, two, EXACT).max_abs == 1


@pytest.mark.parametrize("real", ["float32", "bfloat16", "int64", "bool"])
def test_complex_numbers_are_compared_with_real_ones(real: str) -> None:
    a, b = np.array([1, 1 + 2j, 1, 0], np.complex64), np.array([1, 1, 1, 1]).astype(numpy_dtype(real))
    for one, two in ((a, b), (b, a)):
        found = compare(one, two, EXACT)
        assert (found.num_outside, found.max_abs) == (2, 2)


def test_infinities_of_half_complex_numbers_keep_their_sign() -> None:
    pairs = (
        np.array([(1.0, math.inf)], numpy_dtype("complex32")),
        np.array([(1.0, -math.inf)], numpy_dtype("complex32")),
    )
    assert compare(pairs[0], pairs[0], EXACT).num_outside == 0
    assert compare(*pairs, EXACT).num_outside == 1


@pytest.mark.parametrize("name", ["rtol", "atol", "ulp"])
@pytest.mark.parametrize("value", [math.nan, -1])
def test_a_tolerance_that_says_nothing_is_refused(name: str, value: float) -> None:
    with pytest.raises(LookupFailedError, match=rf"{name} (nan|-1): a tolerance is 0 or more"):
        Tolerance(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["float32", "int64", "bool", "complex64"])
def test_identical_arrays_are_so_by_their_bits(dtype: str) -> None:
    values = np.random.default_rng(0).integers(0, 2, (700, 900)).astype(dtype)
    assert are_identical(values, values.copy()) and are_identical(values.T, values.T.copy())
    other = values.copy()
    other[-1, -1] = not other[-1, -1]
    assert not are_identical(values, other)
    assert not are_identical(values, values.astype("complex128"))
    assert are_identical(values[:0], values[:0]) and are_identical(values[0, 0].reshape(()), values[0, 0].reshape(()))


def test_a_nan_is_identical_and_a_negative_zero_is_not() -> None:
    assert are_identical(np.array([np.nan, 1]), np.array([np.nan, 1]))
    assert not are_identical(np.array([0.0]), np.array([-0.0]))
