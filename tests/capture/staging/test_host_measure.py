"""What is measured in the hook has the bits of what the writer measures, and takes a few bytes of the pool."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import nn

from recorder import native
from recorder.capture.staging.copies import HostStager
from recorder.capture.staging.measure import measure
from recorder.capture.staging.pool import Pool
from recorder.config import Settings
from recorder.records import KEEP_FINGERPRINT, KEEP_HISTOGRAM, KEEP_STATS, KEEP_UNITS, SMALL_BYTES, Chunk
from tests.rigs.capturing import flagged

pytestmark = pytest.mark.skipif(native.load() is None, reason="no C compiler here, so nothing is compiled")
_EVERYTHING = KEEP_STATS | KEEP_FINGERPRINT | KEEP_HISTOGRAM | KEEP_UNITS
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.float8_e4m3fn)


def _pool(num_bytes: int) -> Pool:
    return Pool(num_bytes, progress_s=time.monotonic, clock=time.monotonic)


def _values(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 20).to(dtype)


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
@pytest.mark.parametrize("keep", [KEEP_STATS, KEEP_FINGERPRINT, KEEP_STATS | KEEP_FINGERPRINT, _EVERYTHING])
@pytest.mark.parametrize("chunk", [None, Chunk((900, 1100), (3, 100), "[]", "{}", "dtensor")])
def test_a_tensor_is_measured_where_it_lies(dtype: torch.dtype, keep: int, chunk: Chunk | None) -> None:
    pool, tensor = _pool(1 << 22), _values(dtype, 700, 1000)
    stager = HostStager(pool, Settings())
    plan = stager.plan(tensor, chunk, keep, -1)
    assert plan is not None and plan.nbytes < 1 << 16
    block = pool.take(plan.nbytes)
    assert block is not None
    block.data[:] = 255  # what was there before
    stager.measure(tensor, block, plan)
    data = tensor.reshape(-1).view(torch.uint8).numpy()
    name = str(dtype).removeprefix("torch.")
    assert plan.read(block.data, chunk) == measure(data, name, (700, 1000), chunk, keep)


@pytest.mark.parametrize(
    ("tensor", "chunk"),
    [
        (torch.zeros(300, 200).t(), None),
        (torch.zeros(1).expand(5000), None),
        (torch.zeros(5000, dtype=torch.complex64), None),
        (torch.zeros(5000), Chunk((100, 100), (0, 0), "[]", "{}", "fsdp", 17)),
    ],
    ids=["transposed", "expanded", "complex", "run of a flattened tensor"],
)
def test_what_the_loops_cannot_take_as_it_lies_is_copied(tensor: torch.Tensor, chunk: Chunk | None) -> None:
    assert HostStager(_pool(1 << 20), Settings()).plan(tensor, chunk, KEEP_STATS | KEEP_FINGERPRINT) is None


def test_small_tensors_are_copied_and_measured_together_later() -> None:
    assert HostStager(_pool(1 << 20), Settings()).copied_bytes == SMALL_BYTES


class _Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 2000), nn.Linear(2000, 3)

    def forward(self, x: torch.Tensor) -> Any:
        return self.second(torch.relu(self.first(x)))


def test_a_recording_has_the_rows_of_one_in_python(tmp_path: Path) -> None:
    rules = "site=* keep=stats; site=param,grad keep=stats,fingerprint; site=output keep=stats,histogram,units"
    tables = []
    for compiled in ("1", "0"):
        torch.manual_seed(0)
        model = _Wide()
        optimizer = torch.optim.AdamW(model.parameters())
        with flagged(tmp_path / compiled, rules, NATIVE=compiled) as recording:
            for _ in range(3):
                optimizer.zero_grad()
                model(torch.randn(100, 64)).square().mean().backward()
                optimizer.step()
        tables.append(recording.rows().drop(columns=["time_ns", "run_id", "writer"], errors="ignore"))
    assert len(tables[0]) > 60 and (tables[0]["numel"] > 100_000).any()
    pd.testing.assert_frame_equal(tables[0], tables[1], check_exact=True)
