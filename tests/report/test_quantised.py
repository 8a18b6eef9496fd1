"""Numbers as codes: close enough for a screen, whatever their range, and holes stay holes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from recorder.report.series.cube import Cube
from recorder.report.series.quantised import COARSE, FINE, quantise
from tests.rigs.report_pages import Read, values_of


def read_back(values: np.ndarray[tuple[int, int, int], np.dtype[np.float32]], levels: int) -> np.ndarray:
    cube = Cube(
        steps=range(values.shape[2]), num_columns=values.shape[2], num_series=len(values),
        num_lanes=values.shape[1], statistics=("l2",),
    )  # fmt: skip
    cube.values["l2"] = values
    cube.has_row = ~np.isnan(values)
    (block,) = cube.blocks("values", values.size if levels == FINE else 0)
    return values_of(Read(dict(block.data), dict(block.arrays)))[0]


@given(
    arrays.arrays(
        np.float32, st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(0, 5)),
        elements=st.floats(-(2.0**127), 2.0**127, width=32) | st.just(float("nan")) | st.floats(-1, 1, width=32),
    ),
    st.sampled_from([COARSE, FINE]),
)  # fmt: skip
def test_any_numbers_come_back_within_a_share_of_their_series_range(
    values: np.ndarray[tuple[int, int, int], np.dtype[np.float32]], levels: int
) -> None:
    found = read_back(values, levels)
    assert (np.isnan(found) == np.isnan(values)).all()
    for one, back in zip(values.reshape(len(values), -1), found.reshape(len(values), -1), strict=True):
        known = ~np.isnan(one)
        if known.any():
            wide = one[known].astype(np.float64)
            span = wide.max() - wide.min()
            # Where magnitudes span decades the error is one of the magnitude: a few percent with one byte.
            error = np.abs(back[known] - wide)
            assert (error <= span / levels + 0.11 * np.abs(wide) + np.abs(wide).max() * 1e-8).all()


def test_decades_keep_their_relative_size() -> None:
    values = np.logspace(-6, 3, 40, dtype=np.float32).reshape(1, 1, 40)
    assert read_back(values, FINE) == pytest.approx(values, rel=2e-2)
    assert read_back(values, COARSE) == pytest.approx(values, rel=8e-2)


def test_a_constant_and_zero_are_exact() -> None:
    values = np.array([[[3.25, 3.25]], [[0.0, 0.0]], [[0.0, 17.0]]], np.float32)
    assert (read_back(values, COARSE) == values).all()


def test_replicas_cost_nothing() -> None:
    one = np.random.default_rng(0).standard_normal((4, 1, 50)).astype(np.float32)
    codes = quantise(np.repeat(one, 3, axis=1), np.ones((4, 3, 50), bool), COARSE).codes
    assert not codes[:, 1:].any() and codes[:, 0].any()


def test_a_spike_among_many_steps_of_a_column_does_not_vanish() -> None:
    cube = Cube(steps=range(1000), num_columns=10, num_series=1, num_lanes=1, statistics=("l2", "min"))
    steps = np.arange(1000)
    values = np.where(steps == 437, 50.0, 1.0)
    nothing = np.zeros(1000, np.int64)
    cube.put(nothing, nothing, steps, {"l2": values, "min": -values})
    assert cube.values["l2"][0, 0].tolist() == [1.0] * 4 + [50.0] + [1.0] * 5
    assert cube.values["min"][0, 0].tolist() == [-1.0] * 4 + [-50.0] + [-1.0] * 5
    assert cube.first_steps == list(range(0, 1000, 100))
