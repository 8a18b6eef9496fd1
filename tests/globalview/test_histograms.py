"""The histogram of a global tensor is the sum of those of its ranks, or the run says why there is none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recorder.capture.staging.measure import measure
from recorder.errors import LookupFailedError
from recorder.merge.merge import merge_run
from recorder.numerics.histogram import Histogram
from recorder.records import KEEP_HISTOGRAM, KEEP_STATS
from recorder.run.run import Run, open_run
from tests.rigs.handmade import Row

from .test_view import Array, root_input, row, run_of, values


def column(array: Array) -> bytes:
    found = measure(
        np.ascontiguousarray(array).reshape(-1).view(np.uint8),
        str(array.dtype),
        array.shape,
        None,
        KEEP_STATS | KEEP_HISTOGRAM,
    ).histogram
    assert found is not None
    return found


def counted(seq: int, array: Array, **columns: Any) -> Row:
    return row(seq, array, histogram=column(array), **columns)


def batches(path: Path, outputs: list[Array], **columns: Any) -> Run:
    ranks = [[root_input(0, values(len(one), 5)), counted(1, one, **columns)] for one in outputs]
    return run_of(path, ranks, {"kind": "ddp", "ranks": list(range(len(outputs)))})


def test_those_of_ranks_add_up_to_that_of_the_whole_tensor(tmp_path: Path) -> None:
    outputs = [values(4, 3), np.array([[0.0, np.nan, -np.inf], [1e-40, 3.0, -8.0]], np.float32)]
    run, whole = batches(tmp_path / "run", outputs), np.concatenate(outputs)
    found = run.histogram("layers.0", step=0)
    assert found.to_bytes() == column(whole)
    assert (found.zero_count, found.nan_count) == ((whole == 0).sum(), 1)
    assert (found.min, found.max) == (whole[np.isfinite(whole)].min(), whole[np.isfinite(whole)].max())
    assert run["layers.0"].histogram(step=0, rank=1).to_bytes() == column(outputs[1])
    assert found == run.histogram("layers.0", step=0, rank=0) + run.histogram("layers.0", step=0, rank=1)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_scaled_gradient_has_one_where_the_factor_is_a_power_of_two(tmp_path: Path, num_ranks: int) -> None:
    gradients = [values(2, 3) for _ in range(num_ranks)]
    run = batches(tmp_path / "run", gradients, site="grad_output", phase="backward")
    (found,) = [one for one in run.view().rows().table.to_pylist() if one["site"] == "grad_output"]
    assert found["scale"] == "assumed_mean_loss" and found["mean"] is not None
    if num_ranks == 2:
        assert found["histogram"] == column(np.concatenate(gradients) / 2)
        assert run.histogram("layers.0", "grad_output", 0).to_bytes() == found["histogram"]
        return
    assert found["histogram"] is None
    assert json.loads(found["note"])["no_histogram"] == "scaled by a factor that is no power of two"
    with pytest.raises(LookupFailedError, match="no power of two"):
        run.histogram("layers.0", "grad_output", 0)


def test_a_merged_run_has_them(tmp_path: Path) -> None:
    run = batches(tmp_path / "run", [values(4, 3), values(4, 3)])
    merge_run(run, tmp_path / "merged")
    merged = open_run(tmp_path / "merged")
    assert merged.histogram("layers.0", step=0) == run.histogram("layers.0", step=0)


def test_without_one_the_message_says_how_to_get_it(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", [[row(0, values(4, 3))]], None)
    with pytest.raises(LookupFailedError, match="without a histogram; a rule with keep=histogram keeps it"):
        run.histogram("layers.0", step=0)


def test_of_a_summand_there_is_none(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", [[row(0, values(4, 3), note='{"no_statistics":"Partial"}')]], None)
    with pytest.raises(LookupFailedError, match=r"it has none \(Partial\)"):
        run.histogram("layers.0", step=0, rank=0)


def test_a_damaged_one_costs_the_histogram_and_no_more(tmp_path: Path) -> None:
    outputs = [values(4, 3), values(4, 3)]
    ranks = [[root_input(0, values(4, 5)), row(1, one, histogram=b"\3\0")] for one in outputs]
    (found,) = [
        one for one in run_of(tmp_path / "run", ranks).view().rows().table.to_pylist() if one["site"] == "output"
    ]
    assert found["histogram"] is None and found["mean"] is not None
    assert json.loads(found["note"])["no_histogram"] == "damaged"


def test_the_default_is_an_empty_histogram() -> None:
    assert Histogram().to_bytes() == column(np.zeros(3, np.float32))
