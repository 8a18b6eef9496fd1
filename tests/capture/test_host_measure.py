"""Where training takes every core, statistics and fingerprints are taken in the hook: the same numbers, and no copy."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from recorder import native
from recorder.capture.host import HostStager
from recorder.capture.measure import measure
from recorder.capture.pool import Pool
from recorder.capture.values import DTYPES
from recorder.records import KEEP_FINGERPRINT, KEEP_STATS, Chunk, Measured

from .support import flagged

BOTH = KEEP_STATS | KEEP_FINGERPRINT
needs_library = pytest.mark.skipif(not native.LIBRARY.exists(), reason="the compiled loops were not built")
COLUMNS = ["mean", "std", "min", "max", "absmax", "l2", "sum", "sum_sq", "nan_count", "inf_count", "zero_count"]


def stager(kernels: native.Kernels | None) -> HostStager:
    return HostStager(Pool(1 << 20, progress_s=time.monotonic, clock=time.monotonic), kernels)


def measured_at_once(tensor: torch.Tensor, chunk: Chunk | None, keep: int) -> Measured | None:
    """What the hook makes of a tensor; None where it would be copied."""
    host = stager(native.load())
    plan = host.plan(tensor, chunk, keep)
    if plan is None:
        return None
    block = Pool(1 << 20, progress_s=time.monotonic, clock=time.monotonic).take(plan.nbytes)
    assert block is not None
    assert host.measure(tensor, block, plan) is None
    tensor.zero_()  # training goes on
    return plan.read(block.data, chunk)


@needs_library
@pytest.mark.parametrize("keep", [KEEP_STATS, KEEP_FINGERPRINT, BOTH])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool]
)
def test_what_the_hook_measures_is_what_the_writer_would(dtype: torch.dtype, keep: int) -> None:
    tensor = (torch.randn(300, 500, generator=torch.Generator().manual_seed(1)) * 3).to(dtype)
    chunk = Chunk((600, 500), (300, 0), "[]", "[]", "given")
    data = np.frombuffer(bytes(tensor.contiguous().view(torch.uint8).numpy().data), np.uint8)
    expected = measure(data, DTYPES[dtype], (300, 500), chunk, keep)
    assert measured_at_once(tensor, chunk, keep) == expected


@needs_library
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_place_that_is_known_later_is_in_the_fingerprint(dtype: torch.dtype) -> None:
    tensor = torch.randn(300, 500, generator=torch.Generator().manual_seed(1)).to(dtype)
    chunk = Chunk((600, 500), (300, 0), "[]", "[]", "inferred")
    data = np.frombuffer(bytes(tensor.view(torch.uint8).numpy().data), np.uint8)
    host = stager(native.load())
    plan = host.plan(tensor, None, BOTH)
    assert plan is not None
    host.measure(tensor, None, plan)  # type: ignore[arg-type]
    assert plan.read(data[:0], chunk) == measure(data, DTYPES[dtype], (300, 500), chunk, BOTH)
    assert plan.read(data[:0], None) == measure(data, DTYPES[dtype], (300, 500), None, BOTH)


@needs_library
@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(100),
        torch.zeros(400, 400).t()[:, :300],
        torch.zeros(1 << 16, dtype=torch.complex64),
        torch.zeros(1 << 16, dtype=torch.complex64).conj(),
    ],
    ids=["small", "strided", "complex", "conjugate"],
)
def test_other_tensors_are_copied(tensor: torch.Tensor) -> None:
    assert stager(native.load()).plan(tensor, None, BOTH) is None


def test_without_the_compiled_loops_all_are_copied() -> None:
    assert stager(None).plan(torch.zeros(1 << 20), None, BOTH) is None


@needs_library
def test_a_tensor_without_memory_is_refused() -> None:
    tensor = torch.zeros(1 << 20)
    host = stager(native.load())
    plan = host.plan(tensor, None, KEEP_STATS)
    tensor.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="no memory stands behind the tensor"):
        host.measure(tensor, None, plan)  # type: ignore[arg-type]


@needs_library
@pytest.mark.parametrize("num_cores", [1, 64])
def test_a_run_says_the_same_with_and_without_a_core_to_spare(
    num_cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rows(folder: Path) -> pd.DataFrame:
        torch.manual_seed(0)
        with flagged(folder, "site=output,grad,param keep=stats,fingerprint") as recording:
            model = nn.Sequential(nn.Linear(256, 256), nn.ReLU())
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(2):
                model(torch.randn(128, 256)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return recording.rows()[["step", "module_path", "site", "name", "fingerprint", *COLUMNS]]

    expected = rows(tmp_path / "free")
    assert len(expected) > 10
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(num_cores)))
    measured: list[Any] = []
    at_once = HostStager.measure

    def measure_(*args: Any) -> None:
        measured.append(args)
        at_once(*args)

    monkeypatch.setattr(HostStager, "measure", measure_)
    pd.testing.assert_frame_equal(rows(tmp_path / "again"), expected)
    assert bool(measured) == (num_cores == 1)
