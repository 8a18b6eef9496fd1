"""Many rows at once say what each row says alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from recorder.capture.staging.measure import measure
from recorder.errors import RunError
from recorder.numerics.distributions import histograms_of, units_of
from recorder.numerics.histogram import Histogram
from recorder.numerics.units import Units
from recorder.records import KEEP_HISTOGRAM, KEEP_STATS, KEEP_UNITS

RNG = np.random.default_rng(11)
KEEP = KEEP_STATS | KEEP_HISTOGRAM | KEEP_UNITS
SHAPES = [(3, 4), (40, 7), (2, 300, 5), (1,), (0, 4), (4, 0), ()]


def rows_of(column: str) -> list[tuple[bytes, tuple[int, ...]]]:
    """Bytes as the writer makes them, of several shapes and types, and the same with a byte changed or cut off."""
    rows = []
    for shape in SHAPES:
        for dtype in (np.float32, np.float16, np.int32):
            for scale in (0.01, 1.0, 1000.0):
                with np.errstate(over="ignore"):
                    array = np.asarray(RNG.normal(0, scale, shape) * (RNG.random(shape) < 0.7)).astype(dtype)
                made = measure(array.reshape(-1).view(np.uint8), str(array.dtype), shape, None, KEEP)
                if (own := getattr(made, column)) is not None:
                    rows.append((own, shape))
    for own, shape in rows[:]:
        rows.append((own[: int(RNG.integers(len(own)))], shape))
        for _ in range(3):
            offset = int(RNG.integers(min(len(own), 12)))
            rows.append((own[:offset] + bytes([int(RNG.integers(256))]) + own[offset + 1 :], shape))
        rows.append((own, (len(shape), 3)))
    return [rows[index] for index in RNG.permutation(len(rows))]


def column_of(rows: Sequence[tuple[bytes, Any]], *, is_cut: bool) -> Any:
    """A column, which may begin in the middle of a buffer as that of a part of a table does."""
    if is_cut:
        return pa.array([b"another", None, *(data for data, _ in rows)], pa.binary())[2:]
    return pa.chunked_array([pa.array([data for data, _ in rows], pa.binary())])


@pytest.mark.parametrize("is_cut", [False, True])
def test_histograms_of_many_rows_are_those_of_each(is_cut: bool) -> None:
    rows = rows_of("histogram")
    found = {}
    for some in histograms_of(column_of(rows, is_cut=is_cut), np.arange(len(rows))):
        for index, row in enumerate(some.rows.tolist()):
            found[row] = some.exponents[index].tolist(), some.counts[index].tolist(), some.infinite[index].tolist()
    wanted = {}
    for row, (data, _) in enumerate(rows):
        try:
            one = Histogram.from_bytes(data)
        except RunError:
            continue
        exponents = one.exponents if one.counts.size else np.zeros(0)
        wanted[row] = exponents.tolist(), one.counts.tolist(), one.infinite.tolist()
    assert 50 < len(wanted) < len(rows) and found == wanted


@pytest.mark.parametrize("is_cut", [False, True])
def test_units_of_many_rows_are_those_of_each(is_cut: bool) -> None:
    rows = rows_of("units")
    shapes = list(dict.fromkeys(shape for _, shape in rows))
    shape_of = np.array([shapes.index(shape) for _, shape in rows])
    found = {}
    for some in units_of(column_of(rows, is_cut=is_cut), np.arange(len(rows)), shapes, shape_of):
        for index, row in enumerate(some.rows.tolist()):
            of_units = (some.sum, some.sum_sq, some.absmax, some.zero_count)
            found[row] = [one[index].tolist() for one in of_units], int(some.num_values[index])
    wanted = {}
    for row, (data, shape) in enumerate(rows):
        try:
            one = Units.from_bytes(data, shape)
        except RunError:
            continue
        if len(one):
            of_units = (one.sum, one.sum_sq, one.absmax, one.zero_count)
            wanted[row] = [of.tolist() for of in of_units], one.num_values
    assert 50 < len(wanted) < len(rows) and repr(found) == repr({row: wanted[row] for row in found})
    assert found.keys() == wanted.keys()


def test_a_column_without_bytes_says_nothing() -> None:
    empty = pa.array([None, None], pa.binary())
    assert list(histograms_of(empty, np.zeros(0, np.int64))) == []
    assert list(units_of(empty, np.zeros(0, np.int64), [(2, 3)], np.zeros(2, np.int64))) == []
    assert list(histograms_of(pa.array([b""], pa.binary()), np.array([0]))) == []
