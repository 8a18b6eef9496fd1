"""Numbers as codes: close enough for a screen, whatever their range, and holes stay holes."""

from __future__ import annotations

import json
import subprocess
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import recorder.report
from recorder.report.blocks import COARSE, FINE, Cube, quantise
from tests.rigs.programs import needs
from tests.rigs.report_pages import Read, values_of

ASSETS = Path(recorder.report.__file__).parent / "assets"


def block_of(values: np.ndarray[tuple[int, int, int], np.dtype[np.float32]], levels: int) -> Read:
    cube = Cube(
        steps=range(values.shape[2]), num_columns=values.shape[2], num_series=len(values),
        num_lanes=values.shape[1], statistics=("l2",),
    )  # fmt: skip
    cube.values["l2"] = values
    cube.has_row = ~np.isnan(values)
    (block,) = cube.blocks("values", values.size if levels == FINE else 0)
    return Read(dict(block.data), dict(block.arrays))


def read_back(values: np.ndarray[tuple[int, int, int], np.dtype[np.float32]], levels: int) -> np.ndarray:
    return values_of(block_of(values, levels))[0]


def shown(block: Read) -> list[str]:
    """What the page's own scripts write for each number of a block."""
    needs("node")
    arrays = {name: array.tolist() for name, array in block.arrays.items()}
    scripts = [(ASSETS / name).read_text(encoding="utf-8") for name in ("format.js", "data.js")]
    ask = f"const cube = new Cube({json.dumps({'data': block.data, 'arrays': arrays})});"
    ask += (
        "console.log(JSON.stringify(Array.from(cube.values, (value, at) => shortNumber(value, 4, cube.digits[at]))));"
    )
    command = ["node", "-"]
    done = subprocess.run(command, input="\n".join([*scripts, ask]), capture_output=True, text=True, check=True)
    texts: list[str] = json.loads(done.stdout)
    return texts


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


def test_a_run_that_diverges_keeps_its_healthy_values() -> None:
    values = np.logspace(-2, 38, 40, dtype=np.float32).reshape(1, 1, 40)
    assert read_back(values, FINE) == pytest.approx(values, rel=2e-2)
    assert (read_back(values, COARSE)[0, 0, 20:] > 0).all()


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


@pytest.mark.parametrize("levels", [COARSE, FINE])
def test_each_digit_that_is_shown_is_true(levels: int) -> None:
    """Series of one size, of decades, of both signs, around zero, and far from zero."""
    rng = np.random.default_rng(0)
    noise = rng.standard_normal((6, 2, 200))
    values = np.stack(
        [noise[0], 1e3 * np.exp(3 * noise[1]), 1e-3 * noise[2] ** 5, 0.02 + 1e-4 * noise[3], 1e6 + noise[4],
         np.rint(np.abs(1e4 * noise[5]))]
    ).astype(np.float32)  # fmt: skip
    values[5, 0, :20] = 0
    texts = shown(block_of(values, levels))
    num_digits = []
    for text, value in zip(texts, values.reshape(-1).tolist(), strict=True):
        if text == "0":
            assert abs(value) < 1
        elif not text.startswith("\u2248"):
            _, digits, exponent = Decimal(text).as_tuple()
            assert isinstance(exponent, int) and abs(float(text) - value) <= 1.01 * 10.0**exponent, (text, value)
            num_digits.append(len(digits))
    assert np.mean(num_digits) > (3 if levels == FINE else 1.5)
