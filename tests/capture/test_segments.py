"""Payloads that are encoded in the hook: the pool bounds them as it bounds copies."""

from __future__ import annotations

import dis
import itertools
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, ModuleType
from typing import Any

import pytest
import torch

from recorder import native
from recorder.capture import host as host_module
from recorder.capture import segments as segment_module
from recorder.capture.host import HostStager
from recorder.capture.pool import GRAIN_BYTES, Pool
from recorder.capture.segments import Segments, segment_bytes
from recorder.config import Settings
from recorder.format.codec import PLAIN
from recorder.records import KEEP_STATS, KEEP_TENSOR, Origin

pytestmark = pytest.mark.skipif(not native.LIBRARY.exists(), reason="the compiled loops were not built")
ORIGIN = Origin("model", "layer", "output", "")


@pytest.mark.parametrize("pool_bytes", [1 << 20, 4 << 20])
def test_small_payloads_that_wait_take_as_much_of_the_pool_as_copies(pool_bytes: int) -> None:
    pool = Pool(pool_bytes, progress_s=time.monotonic, clock=time.monotonic)
    host, most = HostStager(pool, native.load(), Settings()), pool_bytes // GRAIN_BYTES
    held: list[Any] = []
    while len(held) <= most and (encoded := host.encode(torch.ones(2), None, KEEP_TENSOR, ORIGIN)) is not None:
        held.append(encoded)
    assert most // 2 < len(held) <= most
    encoded = None
    held.clear()
    assert pool.used_bytes == 0


@pytest.mark.parametrize(
    ("codec", "level", "is_encoded"),
    [
        ("auto", 1, True),
        ("zstd", 1, True),
        ("zstd", -7, True),
        ("none", 19, True),
        ("auto", 2, False),
        ("zstd", 19, False),
    ],
)
def test_a_codec_that_takes_its_time_is_left_to_the_writer(codec: str, level: int, is_encoded: bool) -> None:
    pool = Pool(1 << 20, progress_s=time.monotonic, clock=time.monotonic)
    host = HostStager(pool, native.load(), Settings(codec=codec, codec_level=level))
    assert (host.encode(torch.randn(5000), None, KEEP_TENSOR, ORIGIN) is not None) == is_encoded


class _Interrupt:
    """Raises at one of the instants at which a signal's handler may run: as a function begins, or behind one in C."""

    def __init__(self, module: ModuleType, instant: int) -> None:
        self.left = instant
        self._file = module.__file__
        self._is_behind_call = False

    def __call__(self, frame: FrameType, event: str, argument: object) -> Any:
        is_behind_call = self._is_behind_call and event == "opcode"
        self._is_behind_call = False
        if frame.f_code.co_filename != self._file:
            return None
        if event == "opcode":
            self._is_behind_call = dis.opname[frame.f_code.co_code[frame.f_lasti]].startswith("CALL")
        if event == "call" or is_behind_call:
            self.left -= 1
            if self.left == -1:
                raise KeyboardInterrupt
        frame.f_trace_opcodes = True
        return self


@contextmanager
def _interrupted(module: ModuleType, instant: int) -> Iterator[_Interrupt]:
    """What is inside ends at that instant of the module, if it has so many."""
    interrupt, before = _Interrupt(module, instant), sys.gettrace()
    sys.settrace(interrupt)
    try:
        yield interrupt
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)


@pytest.mark.parametrize("nbytes", [100, 5000, 200_000, 1 << 20])
def test_an_interrupt_of_a_segment_takes_no_memory_and_gives_none_out_twice(nbytes: int) -> None:
    """At each instant as a segment takes one more payload, or is left for another, which the pool may not have."""
    instant = 0
    while True:
        pool = Pool(1 << 20, progress_s=time.monotonic, clock=time.monotonic)
        segments = Segments(pool)
        segment = segments.with_room(60_000)
        assert segment is not None
        held = [segment.add(60_000, PLAIN, 60_000)]
        segment = None
        with _interrupted(segment_module, instant) as interrupt:
            segments.with_room(nbytes)
        while (segment := segments.with_room(30_000)) is not None:
            held.append(segment.add(30_000, PLAIN, 30_000))
        blocks = []
        while (block := pool.take(1024)) is not None:
            blocks.append(block)
        places = [(piece.segment.address + piece.start, piece.stop - piece.start) for piece in held if piece.segment]
        places = sorted(places + [(pool.address + block.offset, block.num_bytes) for block in blocks])
        assert all(start + size <= following for (start, size), (following, _) in itertools.pairwise(places)), instant
        for block in blocks:
            block.release()
        held.clear()
        segment = None
        assert pool.used_bytes == 0, instant
        if interrupt.left >= 0:
            break
        instant += 1
    assert instant > 5


@pytest.mark.parametrize("module", [host_module, segment_module])
def test_after_an_interrupt_hooks_encode_as_before(module: ModuleType) -> None:
    instant = 0
    while True:
        pool = Pool(1 << 20, progress_s=time.monotonic, clock=time.monotonic)
        host = HostStager(pool, native.load(), Settings())
        with _interrupted(module, instant) as interrupt:
            host.encode(torch.randn(40_000), None, KEEP_TENSOR | KEEP_STATS, ORIGIN)
        encoded = host.encode(torch.randn(40_000), None, KEEP_TENSOR, ORIGIN)
        assert encoded is not None, instant
        encoded = None
        assert pool.used_bytes == 0, instant
        if interrupt.left >= 0:
            break
        instant += 1
    assert instant > 5


def test_what_a_handler_raises_as_a_segment_goes_is_not_swallowed() -> None:
    pool = Pool(1 << 20, progress_s=time.monotonic, clock=time.monotonic)
    segment, called = Segments(pool).with_room(1000), []
    assert segment is not None
    before = sys.gettrace()
    sys.settrace(lambda frame, event, argument: called.append(frame.f_code.co_name))
    segment = None
    sys.settrace(before)
    assert called == []  # what no Python runs in, no handler does
    assert pool.used_bytes == 0


@pytest.mark.parametrize(
    ("max_bytes", "shard_bytes", "pool_bytes", "expected"),
    [
        (16 << 30, 256 << 20, 1 << 30, 32 << 20),
        (16 << 30, 256 << 20, 64 << 20, (8 << 20) * 4 // 5),
        (16 << 30, 64 << 20, 1 << 30, 16 << 20),
        (16 << 30, 1 << 20, 1 << 30, 8 << 20),
        (43 << 20, 256 << 20, 1 << 30, 1 << 20),
    ],
)
def test_a_segment_holds_a_part_of_the_quota_of_a_shard_and_of_the_pool(
    max_bytes: int, shard_bytes: int, pool_bytes: int, expected: int
) -> None:
    pool = Pool(pool_bytes, progress_s=time.monotonic, clock=time.monotonic)
    segment = Segments(pool, segment_bytes(max_bytes, shard_bytes)).with_room(100)
    assert segment is not None and segment.max_bytes == expected
    assert len(segment.data) >= expected
