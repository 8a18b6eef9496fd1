"""Where training takes every core, payloads are encoded in the hook: the same rows, and the pool gets all back."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor, nn

import recorder
from recorder import native
from recorder.capture.host import HostStager, host_stager
from recorder.capture.pool import Pool
from recorder.capture.segments import Segments
from recorder.config import Settings, load_settings
from recorder.format.codec import PLAIN, PLANES_PLAIN, decode
from recorder.read.verify import verify
from recorder.records import KEEP_STATS, KEEP_TENSOR, PART_BYTES, Origin
from recorder.write.rows import RowBatch

from .support import flagged

needs_library = pytest.mark.skipif(not native.LIBRARY.exists(), reason="the compiled loops were not built")

ORIGIN = Origin("model", "layer", "output", "")


def pool(capacity_bytes: int = 64 << 20) -> Pool:
    return Pool(capacity_bytes, progress_s=time.monotonic, clock=time.monotonic)


class Odd(nn.Module):
    """Outputs of many kinds: large and small, strided, of other dtypes, empty, equal in all elements, conjugate."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds = nn.ModuleList(nn.Identity() for _ in range(12))
        self.linear = nn.Linear(300, 300)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x)
        outputs = (
            hidden.t(),
            hidden[::3, ::2],
            hidden.bfloat16(),
            hidden.double(),
            hidden.to(torch.float8_e4m3fn),
            (hidden * 100).to(torch.int16),
            hidden > 0,
            hidden[:0],
            hidden[0, 0],
            hidden.relu().mul(0),
            torch.complex(hidden, hidden).conj(),
            hidden.expand(3, *hidden.shape),
        )
        for kind, output in zip(self.kinds, outputs, strict=True):
            kind(output.detach())
        result: Tensor = hidden
        return result


def train() -> None:
    torch.manual_seed(0)
    model = Odd()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.randn(200, 300)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def content(run: recorder.Run) -> dict[tuple[Any, ...], Tensor]:
    rows = run.to_pandas()
    keys = set(zip(*(rows[name] for name in ("module_path", "site", "name", "step")), strict=True))
    return {key: run.tensor(key[0], site=key[1], name=key[2], step=int(key[3])) for key in keys}


@needs_library
@pytest.mark.parametrize("codec", ["auto", "none", "zstd"])
@pytest.mark.parametrize("keep", ["tensor", "tensor,stats,fingerprint"])
def test_a_run_says_the_same_with_and_without_a_core_to_spare(
    codec: str, keep: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, frames, num_pieces = [], [], []
    encode = HostStager.encode
    for num_cores in (64, 1):
        pieces: list[Any] = []

        def noted(*args: Any, pieces: list[Any] = pieces) -> Any:
            found = encode(*args)
            pieces += [found] if found is not None else []
            return found

        monkeypatch.setattr(HostStager, "encode", noted)
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, num=num_cores: set(range(num)))
        with flagged(tmp_path / str(num_cores), f"site=output,grad,param keep={keep}", codec=codec) as recording:
            train()
        runs.append(recording.run)
        frames.append(recording.rows().drop(columns=["time_ns", "run_id"], errors="ignore"))
        num_pieces.append(len(pieces))
        assert recording.manifest["hooks"] == {64: "copy", 1: "measure and encode"}[num_cores]
        assert not [finding for finding in verify(recording.run) if finding.is_fault]
    same = [name for name in frames[0].columns if name not in ("encoding",)]
    pd.testing.assert_frame_equal(frames[1][same], frames[0][same])
    assert num_pieces[1] >= len(frames[1]) - 10
    assert num_pieces[0] == (num_pieces[1] if codec == "none" else 0)
    expected, found = map(content, runs)
    assert expected.keys() == found.keys() and len(found) > 40
    for key, tensor in expected.items():
        assert tensor.dtype == found[key].dtype
        assert torch.equal(tensor.reshape(-1).view(torch.uint8), found[key].reshape(-1).view(torch.uint8)), key


def stager(pool_: Pool, num_threads: int = 1) -> HostStager:
    kernels = native.load()
    assert kernels is not None
    team = native.find_team(num_threads, Path(torch.__file__).parent / "lib")
    return HostStager(pool_, kernels, load_settings({}).settings, team)


@needs_library
def test_pieces_lie_end_to_end_and_the_last_one_gives_the_memory_back() -> None:
    memory = pool()
    host, values = stager(memory, 2), [torch.randn(100_000), torch.arange(10), torch.zeros(0), torch.randn(70_000)]
    pieces = []
    for value in values:
        found = host.encode(value, None, KEEP_TENSOR, ORIGIN)
        assert found is not None
        pieces.append(found[0])
    assert [piece.start for piece in pieces] == [0, *(piece.stop for piece in pieces[:-1])]
    assert [piece.encoding for piece in pieces] == [PLANES_PLAIN, PLAIN, PLAIN, PLANES_PLAIN]
    assert all(piece.segment is pieces[0].segment for piece in pieces)
    assert pieces[0].data.ctypes.data % 4096 == 0
    for piece, value in zip(pieces, values, strict=True):
        data = decode(piece.encoding, piece.data, piece.payload_bytes, value.itemsize)
        assert (data == value.numpy().view(np.uint8)).all()
    del found, piece
    for number, piece in enumerate(pieces):
        assert bool(memory.used_bytes) and number < len(pieces)
        piece.release()
    assert memory.used_bytes == 0


@needs_library
def test_a_segment_that_takes_no_more_gives_the_rest_back() -> None:
    memory = pool(512 << 20)
    host, kept = stager(memory), []
    for _ in range(30):
        found = host.encode(torch.randint(0, 255, (4 << 20,), dtype=torch.uint8), None, KEEP_TENSOR, ORIGIN)
        assert found is not None
        kept.append(found[0])
    assert len({id(piece.segment) for piece in kept}) == 4
    assert (120 << 20) < memory.used_bytes < (120 << 20) + (18 << 20)


@needs_library
def test_what_a_segment_cannot_take_is_copied() -> None:
    assert stager(pool()).encode(torch.zeros(PART_BYTES + 1, dtype=torch.uint8), None, KEEP_TENSOR, ORIGIN) is None
    small = pool(1 << 16)
    assert stager(small).encode(torch.randn(1 << 15), None, KEEP_TENSOR, ORIGIN) is None  # the pool has no room
    assert (
        stager(pool()).encode(torch.zeros(1 << 16, dtype=torch.complex64), None, KEEP_TENSOR | KEEP_STATS, ORIGIN)
        is None
    )
    assert small.used_bytes == 0


@needs_library
def test_a_closed_segment_is_followed_by_another() -> None:
    segments = Segments(pool())
    first = segments.with_room(100)
    assert first is not None and segments.with_room(100) is first
    first.is_closed = True
    assert segments.with_room(100) is not first


@needs_library
@pytest.mark.parametrize("num_cores", [64, 1])
@pytest.mark.parametrize(
    ("settings", "pool_mib", "is_lent"),
    [
        (Settings(), 64, True),
        (Settings(policy="drop"), 64, False),
        (Settings(wait_s_per_step=0.0), 64, False),
        (Settings(policy="drop"), 256, True),
    ],
)
def test_a_small_pool_lends_no_segment_where_training_does_not_wait_for_its_return(
    settings: Settings, pool_mib: int, is_lent: bool, num_cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(num_cores)))
    memory = pool(pool_mib << 20)
    stager = host_stager(memory, replace(settings, codec="none"))
    encoded = stager.encode(torch.ones(100_000), None, KEEP_TENSOR, ORIGIN)
    assert (encoded is not None) == is_lent
    assert (memory.used_bytes > 0) == is_lent


class Mixed(nn.Module):
    """Tiny outputs, and one that nearly fills a pool of 64 MiB."""

    def __init__(self) -> None:
        super().__init__()
        self.tiny = nn.ModuleList(nn.Identity() for _ in range(4))
        self.large = nn.Identity()
        self.content = torch.arange(15 << 20, dtype=torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        for module in self.tiny:
            x = module(x)
        return x + self.large(self.content).sum()  # type: ignore[no-any-return]


@needs_library
@pytest.mark.parametrize("num_cores", [64, 1])
def test_what_batches_hold_of_the_pool_is_given_back_when_training_waits_for_it(
    num_cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(num_cores)))
    model, steps = Mixed(), 3
    recording = recorder.attach(
        model,
        enabled=True,
        dir=tmp_path,
        rules="site=output keep=tensor",
        codec="none",
        pool_bytes=64 << 20,
        flush_interval_s=30.0,
        wait_s_per_step=20.0,
    )
    for step in range(steps):
        with torch.no_grad():
            model(torch.ones(10))
        recorder.step(step + 1)
    recording.close()
    run = recorder.open_run(tmp_path)
    assert run.num_rows == 7 * steps  # the large one is in two parts
    assert torch.equal(run.tensor("large", site="output", step=steps - 1), model.content)


@needs_library
@pytest.mark.parametrize("num_cores", [64, 1])
@pytest.mark.parametrize("max_bytes", [1 << 30, 1 << 25])
def test_batches_borrow_all_that_hooks_encode_however_far_the_writer_is_behind(
    max_bytes: int, num_cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(num_cores)))
    is_over, borrowed, add_piece = threading.Event(), [], RowBatch.add_piece

    def noted(batch: RowBatch, *arguments: Any) -> bool:
        is_over.wait(60.0)
        has_room = add_piece(batch, *arguments)
        borrowed.append(batch.is_borrowing)
        return has_room

    monkeypatch.setattr(RowBatch, "add_piece", noted)
    model = nn.Sequential(*[nn.Identity() for _ in range(10)])
    settings: dict[str, Any] = {"codec": "none", "max_bytes": max_bytes, "flush_interval_s": 3600.0}
    recording = recorder.attach(model, enabled=True, dir=tmp_path, rules="site=output keep=tensor", **settings)
    for step in range(10):
        with torch.no_grad():
            model(torch.full((30_000,), float(step)))
        recorder.step(step + 1)
    is_over.set()
    recording.close()
    assert len(borrowed) >= 110 and all(borrowed)
