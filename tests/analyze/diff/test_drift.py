"""A parameter of which rounding decided the sign of an update: noise, though the twin has none there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import recorder
from recorder.analyze.diff.diff import diff
from recorder.analyze.diff.noise import BeyondNoise
from recorder.analyze.diff.step_range import Diff
from recorder.errors import LookupFailedError

from .test_diff import row, write

STEPS, NUMEL, RATE, OPEN = 5, 64, 1e-3, 3
"""Element `OPEN` has a gradient of roundings alone at first."""
Vector = npt.NDArray[np.float64]
Change = Callable[[int, str, Vector], Vector]


def training(
    path: Path,
    seed: int,
    sign: float = 1.0,
    change: Change = lambda step, site, values: values,
    sites: tuple[str, ...] = ("output", "param", "grad", "optim"),
    has_values: Callable[[int], bool] = lambda step: True,
) -> recorder.Run:
    """Adam's steps of one parameter that is added to a batch; what noise does hangs on the seed."""
    rng = np.random.default_rng([seed])
    values, mean, square = np.full(NUMEL, 0.1), np.zeros(NUMEL), np.zeros(NUMEL)
    rows: list[Any] = []

    def noisy(exact: Vector) -> Vector:
        return exact * (1 + 1e-6 * rng.standard_normal(exact.shape))

    def add(step: int, site: str, name: str, tensor: Vector) -> None:
        if site in sites:
            is_forward = site == "output"
            of = {} if is_forward else {"phase": "optimizer", "micro_step": None, "scope": "final"}
            kept = {} if has_values(step) else {"encoding": None}
            numbers = change(step, site, tensor).astype(np.float32)
            columns = {"step": step, "module_path": "add", "site": site, "name": name, **of, **kept}
            rows.append(row(len(rows), numbers, **columns))

    for step in range(STEPS):
        exact = np.random.default_rng([step])
        add(step, "output", "", noisy(exact.standard_normal((8, NUMEL))) + values)
        gradient = noisy(exact.standard_normal(NUMEL))
        if step == 0:
            gradient[OPEN] = sign * 1e-7
        add(step, "param", "weight", values)
        add(step, "grad", "weight", gradient)
        mean, square = 0.9 * mean + 0.1 * gradient, 0.999 * square + 0.001 * gradient**2
        update = mean / (1 - 0.9 ** (step + 1)) / np.sqrt(square / (1 - 0.999 ** (step + 1)))
        values = change(step, "update", values - RATE * update)
        add(step, "optim", "weight.exp_avg", mean)
        add(step, "optim", "weight.exp_avg_sq", square)
    return write(path, rows)


def compared(path: Path, change: Change = lambda step, site, values: values, **kept: Any) -> Diff:
    """A training beside one in which the sign is the other, beyond the noise of a twin in which it is not."""
    a, twin = (training(path / str(seed), seed, **kept) for seed in (0, 1))
    return diff(a, training(path / "b", 2, -1.0, change, **kept), noise=[twin])


def test_an_update_whose_sign_is_a_rounding_is_noise_and_so_is_what_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = compared(tmp_path)
    assert found.is_equal and found.culprits == []
    assert found.drifted is not None
    assert (found.drifted.step, found.drifted.num_params) == (1, 1) and found.drifted.times_noise > 10
    monkeypatch.setattr(BeyondNoise, "_follow", lambda *args: None)
    found = compared(tmp_path / "by the twin alone")
    assert (
        found.drifted is None
        and found.culprits[0].phase == "update"
        and {"param", "output"} <= set(found.table.column("site").to_pylist())
    )


@pytest.mark.parametrize("size", [RATE, 0.05 * RATE])
def test_an_update_that_is_wrong_in_another_element_is_not(tmp_path: Path, size: float) -> None:
    def change(step: int, site: str, values: Vector) -> Vector:
        if (step, site) == (2, "update"):
            values[10] += size
        return values

    (culprit,) = compared(tmp_path, change).culprits
    assert (culprit.step, culprit.phase, culprit.module_path) == (2, "update", "add")


@pytest.mark.parametrize(("site", "phase"), [("output", "forward"), ("grad", "reduction")])
def test_an_error_after_it_is_found(tmp_path: Path, site: str, phase: str) -> None:
    found = compared(tmp_path, lambda step, of, values: values * 1.5 if (step, of) == (3, site) else values)
    culprit = found.culprits[0]
    assert (culprit.step, culprit.module_path, culprit.site) == (3, "add", site)


def test_without_the_gradient_nothing_says_that_it_is_noise(tmp_path: Path) -> None:
    found = compared(tmp_path, sites=("output", "param", "optim"))
    assert (found.culprits[0].step, found.culprits[0].phase) == (0, "update")


def test_steps_of_which_statistics_alone_were_kept_go_on_from_the_last_values(tmp_path: Path) -> None:
    assert compared(tmp_path / "some", has_values=lambda step: step in (0, 1, 4)).is_equal
    assert not compared(tmp_path / "none", has_values=lambda step: False).is_equal


def test_a_noise_run_that_is_none_is_said_to_be(tmp_path: Path) -> None:
    a, b, twin = (training(tmp_path / str(seed), seed) for seed in (0, 1, 2))
    assert diff(a, b, noise=[twin]).loud_noise is None
    other = training(tmp_path / "other", 3, change=lambda step, site, values: values * 1.1)
    loud = diff(a, b, noise=[other]).loud_noise
    assert loud is not None and (loud.step, round(loud.of_norm, 2)) == (0, 0.1)
    with pytest.raises(LookupFailedError, match="one of the two compared runs"):
        diff(a, b, noise=[b])


def test_a_multiple_is_no_drift(tmp_path: Path) -> None:
    found = compared(tmp_path, lambda step, of, values: values * 1.01 if (step, of) == (3, "grad") else values)
    assert found.culprits[0].factor == pytest.approx(1.01, rel=1e-4)
