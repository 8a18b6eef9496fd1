"""The units of a global tensor are laid side by side or added up, or the run says why there are none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recorder.capture.staging.measure import measure
from recorder.errors import CorruptError, LookupFailedError
from recorder.merge.merge import merge_run
from recorder.numerics.units import Units
from recorder.records import KEEP_STATS, KEEP_UNITS
from recorder.run.run import Run, open_run
from tests.rigs.handmade import Row

from .test_view import Array, root_input, row, run_of, values


def column(array: Array, dim: int = -1) -> bytes:
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    found = measure(data, str(array.dtype), array.shape, None, KEEP_STATS | KEEP_UNITS, dim).units
    assert found is not None
    return found


def summed(seq: int, array: Array, dim: int = -1, **columns: Any) -> Row:
    return row(seq, array, units=column(array, dim), **columns)


def batches(path: Path, outputs: list[Array], **columns: Any) -> Run:
    ranks = [[root_input(0, values(len(one), 5)), summed(1, one, **columns)] for one in outputs]
    return run_of(path, ranks, {"kind": "ddp", "ranks": list(range(len(outputs)))})


def shards(path: Path, whole: Array, sharded: int, units: int) -> Run:
    """A run of two ranks that hold a parameter in shards along one dim, with units along another or the same."""
    rows = []
    for rank, own in enumerate(np.array_split(whole, 2, axis=sharded)):
        offsets = [0] * whole.ndim
        offsets[sharded] = rank * -(-whole.shape[sharded] // 2)
        layout = {
            "global_shape": json.dumps(whole.shape),
            "offsets": json.dumps(offsets),
            "placements": json.dumps([{"kind": "Shard", "dim": sharded}]),
            "mesh": json.dumps({"shape": [2], "coordinate": [rank]}),
            "layout_source": "dtensor",
        }
        own = np.ascontiguousarray(own)
        rows.append([summed(0, own, units, site="param", name="weight", fingerprint=None, **layout)])
    return run_of(path, rows, {"kind": "fsdp2", "ranks": [0, 1]})


def assert_near(found: Units, array: Array, dim: int) -> None:
    wanted = Units.from_bytes(column(array, dim), array.shape)
    assert (found.dim, found.num_values) == (wanted.dim, wanted.num_values)
    assert np.allclose(found.sum, wanted.sum) and np.allclose(found.sum_sq, wanted.sum_sq)
    assert found.absmax.tolist() == wanted.absmax.tolist() and found.zero_count.tolist() == wanted.zero_count.tolist()


@pytest.mark.parametrize("sharded", [0, 1])
@pytest.mark.parametrize("units", [0, 1])
def test_shards_along_the_units_are_laid_side_by_side_and_others_are_added(
    tmp_path: Path, sharded: int, units: int
) -> None:
    whole = np.round(values(7, 5))
    run = shards(tmp_path / "run", whole, sharded, units)
    assert_near(run.units("layers.0", "param", step=0), whole, units)
    (found,) = run.view().rows().table.to_pylist()
    assert Units.from_bytes(found["units"], (7, 5)) == run.units("layers.0", "param", step=0)


def test_those_of_parts_of_a_batch_are_added(tmp_path: Path) -> None:
    outputs = [values(4, 3), np.array([[0.0, np.nan, -np.inf], [1e-40, 3.0, -8.0]], np.float32)]
    run = batches(tmp_path / "run", outputs)
    assert_near(run.units("layers.0", step=0), np.concatenate(outputs), 1)
    assert run["layers.0"].units(step=0, rank=1).to_bytes() == column(outputs[1])
    merge_run(run, tmp_path / "merged")
    assert open_run(tmp_path / "merged").units("layers.0", step=0) == run.units("layers.0", step=0)


def test_replicas_have_those_of_one(tmp_path: Path) -> None:
    weight = values(3, 4)
    rows = [[summed(0, weight, 0, site="param", name="weight")] for _ in range(2)]
    assert run_of(tmp_path / "run", rows).units("layers.0", "param", 0).to_bytes() == column(weight, 0)


def test_a_scaled_gradient_has_scaled_ones(tmp_path: Path) -> None:
    gradients = [values(2, 3) for _ in range(3)]
    run = batches(tmp_path / "run", gradients, site="grad_output", phase="backward")
    found, wanted = run.units("layers.0", "grad_output", 0), np.concatenate(gradients).astype(np.float64) / 3
    assert np.allclose(found.sum, wanted.sum(0)) and np.allclose(found.absmax, abs(wanted).max(0))


def test_without_them_the_message_says_how_to_get_them(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", [[row(0, values(4, 3))]], None)
    with pytest.raises(LookupFailedError, match="without sums of its units; a rule with keep=units keeps them"):
        run.units("layers.0", step=0)


def test_of_a_summand_and_of_too_many_units_there_are_none(tmp_path: Path) -> None:
    summand = row(0, values(4, 3), note='{"no_statistics":"Partial"}')
    wide = row(1, values(4, 3), module_path="wide", note='{"no_units":"50257 units, more than 32768"}')
    run = run_of(tmp_path / "run", [[summand, wide]], None)
    with pytest.raises(LookupFailedError, match=r"it has none \(Partial\)"):
        run.units("layers.0", step=0, rank=0)
    with pytest.raises(LookupFailedError, match="50257 units"):
        run.units("wide", step=0)


def test_damaged_ones_cost_the_units_and_no_more(tmp_path: Path) -> None:
    ranks = [[root_input(0, values(4, 5)), row(1, values(4, 3), units=b"\3\0")] for _ in range(2)]
    run = run_of(tmp_path / "run", ranks)
    (found,) = [one for one in run.view().rows().table.to_pylist() if one["site"] == "output"]
    assert found["units"] is None and found["mean"] is not None
    assert json.loads(found["note"])["no_units"] == "damaged"
    with pytest.raises(CorruptError, match=r"layers\.0"):
        run.units("layers.0", step=0, rank=0)


def test_units_bound_how_many_steps_are_read_at_once(tmp_path: Path) -> None:
    rows = [[summed(step, values(2, 4096), step=step) for step in range(4)]]
    view = run_of(tmp_path / "run", rows, None).view()
    assert len(view.windows(max_rows=600)) == 2, "4096 units take as much memory as 293 rows"
