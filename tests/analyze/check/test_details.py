"""What rules read out of histograms and sums of units, and what they say of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import recorder
from recorder.analyze.check.check import check
from recorder.capture.staging.measure import measure
from recorder.records import KEEP_HISTOGRAM, KEEP_STATS, KEEP_UNITS
from tests.rigs.handmade import HandmadeWriter, Row, make_row, make_run

Array = npt.NDArray[Any]
RULES = ("dead_units", "outlier_units", "low_precision")
RNG = np.random.default_rng(3)


def detailed(seq: int, step: int, array: Array, **columns: Any) -> Row:
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    keep = KEEP_STATS | KEEP_HISTOGRAM | KEEP_UNITS
    found = measure(data, str(array.dtype), array.shape, None, keep)
    details = {"histogram": found.histogram, "units": found.units}
    return make_row(seq, array, encoding=None, step=step, **(details | columns))


def said(path: Path, arrays: dict[str, list[Array]], **columns: Any) -> list[tuple[str, str, int, float]]:
    """What the rules say of outputs by module, one array a step."""
    run = make_run(path / "run")
    writer = HandmadeWriter(run)
    rows: list[Row] = []
    for module, some in arrays.items():
        rows += [detailed(len(rows) + i, i, one, module_path=module, **columns) for i, one in enumerate(some)]
    rows = [row | {"seq": seq} for seq, row in enumerate(sorted(rows, key=lambda row: int(row["step"])))]
    writer.add_shard([rows])
    writer.finish()
    found = check(recorder.open_run(run), rules=RULES)
    assert not any("there is no" in one.why for one in found.unjudged)
    return [(one.rule, one.module_path, one.step, round(one.value, 2)) for one in found.findings]


def sound() -> Array:
    return np.maximum(RNG.normal(0, 1, (64, 40)), 0).astype(np.float32)


def test_a_sound_layer_is_not_named(tmp_path: Path) -> None:
    assert said(tmp_path, {"act": [sound() for _ in range(8)]}) == []


def test_dead_units_are_named_after_some_records(tmp_path: Path) -> None:
    dead = [sound() for _ in range(8)]
    for one in dead[2:]:
        one[:, :30] = 0
    assert said(tmp_path, {"act": dead, "other": [sound() for _ in range(8)]}) == [("dead_units", "act", 6, 0.75)]


def test_units_that_are_dead_as_a_training_begins_are_none_of_its_mistakes(tmp_path: Path) -> None:
    for num_dead, expected in ((26, []), (30, [("dead_units", "act", 4, 0.75)])):
        begun = [sound() for _ in range(8)]
        for one in begun:
            one[:, :num_dead] = 0
        assert said(tmp_path / str(num_dead), {"act": begun}) == expected


def test_a_unit_far_larger_than_the_others_is_named(tmp_path: Path) -> None:
    loud = [RNG.normal(0, 1, (64, 40)).astype(np.float32) for _ in range(4)]
    for one in loud:
        one[0, 7] = 5000
    found = said(tmp_path, {"up": loud})
    assert [one[:3] for one in found] == [("outlier_units", "up", 2)] and found[0][3] == pytest.approx(5000, rel=0.1)


@pytest.mark.parametrize(("factor", "is_named"), [(1e-6, True), (1e-3, False), (1.0, False), (4e4, True)])
def test_values_at_either_end_of_float16_are_named(tmp_path: Path, factor: float, is_named: bool) -> None:
    values = [(RNG.normal(0, 1, (64, 40)) * factor).clip(-65504, 65504).astype(np.float16) for _ in range(4)]
    assert [one[:3] for one in said(tmp_path, {"up": values})] == [("low_precision", "up", 2)] * is_named


@pytest.mark.parametrize(
    ("factor", "kind", "is_named"),
    [(1e-6, np.float16, True), (1e-3, np.float16, False), (1e-6, np.float32, False)],
)
def test_values_too_small_for_float16_are_named_without_a_histogram(
    tmp_path: Path, factor: float, kind: Any, is_named: bool
) -> None:
    """The root mean square alone shows that most values lie below the least normal number; zeros do not count."""
    values = (RNG.normal(0, 1, (4, 64, 40)) * factor * (RNG.random((4, 64, 40)) < 0.5)).astype(kind)
    run = make_run(tmp_path / "run")
    writer = HandmadeWriter(run)
    writer.add_shard([[make_row(step, one, encoding=None, step=step) for step, one in enumerate(values)]])
    writer.finish()
    checked = check(recorder.open_run(run), rules=["low_precision"])
    assert [(one.rule, one.step) for one in checked.findings] == [("low_precision", 2)] * is_named
    assert checked.num_judged == (kind is np.float16)


def test_masks_of_the_least_number_are_no_overflow(tmp_path: Path) -> None:
    masked = [np.where(RNG.random((64, 40)) < 0.5, np.float16(-65504), np.float16(1)) for _ in range(4)]
    assert said(tmp_path, {"mask": masked}) == []


@pytest.mark.parametrize(("scale", "is_named"), [(30.0, False), (4.48e14, True), (1e-16, True)])
def test_a_scale_at_its_end_is_named(tmp_path: Path, scale: float, is_named: bool) -> None:
    found = said(tmp_path, {"up": [np.full((1,), scale, np.float32)] * 32}, site="param", name="weight._scale")
    assert [one[0] for one in found if one[0] == "low_precision"] == ["low_precision"] * is_named


def test_damaged_bytes_are_passed_over(tmp_path: Path) -> None:
    rows = [sound() for _ in range(8)]
    run = make_run(tmp_path / "run")
    writer = HandmadeWriter(run)
    writer.add_shard([[detailed(i, i, one, units=b"\3\0", histogram=b"x") for i, one in enumerate(rows)]])
    writer.finish()
    found = check(recorder.open_run(run), rules=RULES)
    assert found.findings == [] and {one.rule for one in found.unjudged} == set(RULES)
