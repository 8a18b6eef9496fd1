"""Scaled values are those of float64, rounded once, whatever way they were computed."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from recorder.run.run import open_run
from tests.rigs.handmade import HandmadeWriter, make_row, make_run
from tests.rigs.merging import roots


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_gradients_are_scaled_as_in_float64_and_rounded_once(tmp_path: Path, dtype: str, world_size: int) -> None:
    """Subnormal numbers, infinities and NaN too."""
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 256, (world_size, 2, 40_000, kind.itemsize), np.uint8)
    values = bits.view(kind).reshape(world_size, 2, 40_000)
    run = make_run(tmp_path / "run", world_size=world_size)
    for rank in range(world_size):
        writer = HandmadeWriter(run, rank)
        own = values[rank]
        row = make_row(1, own.view(np.uint8), dtype=dtype, rank=rank, site="grad_output", phase="backward")
        x = make_row(0, np.zeros((2, 1), np.float32), rank=rank, module_path="", site="input", name="x")
        writer.add_shard([[x, row | {"shape": "[2,40000]", "numel": own.size}]])
        writer.finish(roots=roots(range(world_size)))
    found = open_run(run).array("layers.0", "grad_output", step=0)
    with np.errstate(all="ignore"):
        expected = (values.astype(np.float64) / world_size).astype(kind).reshape(world_size * 2, 40_000)
        if world_size == 3:
            expected = (values.astype(np.float64) * (1 / 3)).astype(kind).reshape(world_size * 2, 40_000)
        is_nan = np.isnan(expected.astype(np.float64))
        assert np.array_equal(np.isnan(found.astype(np.float64)), is_nan)
    assert found[~is_nan].tobytes() == expected[~is_nan].tobytes()
