"""The pool: what fits, what waits, what is given back; and stagers that finish later."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from recorder.capture.staging import copies
from recorder.capture.staging.pool import Pool, PoolBlock
from recorder.records import Ready
from tests.rigs.capturing import Tiny, batch, flagged

KIB = 1024


class Time:
    """A clock that moves when it is read."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 0.01
        return self.now_s


def make_pool(kib: int, progress_s: float | None = None) -> Pool:
    clock = Time()
    return Pool(kib * KIB, progress_s=lambda: clock.now_s if progress_s is None else progress_s, clock=clock)


WAITS: dict[str, Any] = {"step": 0, "per_step_s": 1.0, "stalled_s": 10.0, "per_run_s": 0.0}


def test_blocks_never_overlap_and_all_bytes_come_back() -> None:
    pool = make_pool(256)
    choose = random.Random(0)
    live: list[PoolBlock] = []
    for i in range(3000):
        if live and choose.random() < 0.5:
            block = live.pop(choose.randrange(len(live)))
            assert (block.data == block.offset % 251).all()
            block.release()
        elif (taken := pool.take(choose.randrange(1, 20 * KIB))) is not None:
            taken.data[:] = taken.offset % 251
            live.append(taken)
        assert pool.used_bytes <= pool.capacity_bytes, i
    for block in live:
        block.release()
    whole = pool.take(pool.capacity_bytes)
    assert whole is not None, "free pieces join again"


def test_a_small_record_is_charged_for_its_objects() -> None:
    pool = make_pool(4)
    assert [pool.take(1) is not None for _ in range(5)] == [True] * 4 + [False]


def test_what_is_used_stays_at_the_low_end() -> None:
    pool = make_pool(1024)
    for _ in range(1000):
        block = pool.take(100 * KIB)
        assert block is not None and block.offset == 0
        block.release()
    assert pool.peak_bytes == 100 * KIB


def test_waiting_is_bounded_in_a_step_then_everything_drops_until_half_is_free() -> None:
    pool = make_pool(8)
    blocks = [pool.take(2 * KIB) for _ in range(4)]
    assert pool.take_or_wait(KIB, **WAITS) is None
    assert 1.0 <= pool.waited_s < 1.1
    waited = pool.waited_s
    blocks[0].release()  # type: ignore[union-attr]
    assert pool.take_or_wait(KIB, **WAITS | {"step": 1}) is not None, "what fits is taken at any time"
    assert pool.take_or_wait(4 * KIB, **WAITS | {"step": 1}) is None
    assert pool.waited_s == waited, "nothing waits while dropping"
    for block in blocks[1:3]:
        block.release()  # type: ignore[union-attr]
    assert pool.take_or_wait(4 * KIB, **WAITS | {"step": 2}) is not None


def test_a_writer_without_progress_is_not_waited_for() -> None:
    pool = make_pool(8, progress_s=-20.0)
    assert pool.take(8 * KIB) is not None
    assert pool.take_or_wait(KIB, **WAITS) is None
    assert pool.waited_s < 0.1


def test_the_wait_of_a_whole_run_can_be_capped() -> None:
    pool = make_pool(8)
    assert pool.take(8 * KIB) is not None
    assert pool.take_or_wait(KIB, **WAITS | {"per_run_s": 0.3}) is None
    assert 0.3 <= pool.waited_s < 0.4


def test_a_wait_ends_when_the_writer_gives_back() -> None:
    pool = Pool(8 * KIB, progress_s=time.monotonic, clock=time.monotonic)
    block = pool.take(8 * KIB)
    assert block is not None
    threading.Timer(0.1, block.release).start()
    assert pool.take_or_wait(KIB, **WAITS) is not None
    assert pool.waited_s < 0.9


def test_a_call_that_interrupts_another_in_the_same_thread_gets_nothing_and_no_deadlock() -> None:
    pool = make_pool(64)
    inner: list[object] = []
    plain = pool._first_fit

    def interrupted(nbytes: int, size: int) -> PoolBlock | None:
        inner.extend([pool.take(KIB), pool.take_or_wait(KIB, **WAITS)])
        return plain(nbytes, size)

    pool._first_fit = interrupted  # type: ignore[method-assign]
    assert pool.take(KIB) is not None
    assert inner == [None, None]


def test_interrupts_at_any_instant_neither_deadlock_nor_hand_out_bytes_twice() -> None:
    class InterruptError(Exception):
        pass

    def ring(*args: Any) -> None:
        raise InterruptError

    pool = make_pool(64 * 1024)  # a take that is interrupted may lose its piece
    live: dict[int, PoolBlock] = {}
    num_interrupts = 0
    previous = signal.signal(signal.SIGALRM, ring)
    try:
        until = time.monotonic() + 30  # a busy machine interrupts seldom
        while num_interrupts < 1000 and time.monotonic() < until:
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.0005)
                for _ in range(300):  # Python loses what is raised while it frees an object: do not wait for it
                    block = pool.take(3 * KIB)
                    if block is not None:
                        ends = block.offset + len(block.data)
                        overlaps = [b for b in live.values() if b.offset < ends and block.offset < b.offset + 3 * KIB]
                        assert not overlaps
                        live[block.offset] = block
                    if block is None or len(live) > 20:
                        live.popitem()[1].release()
            except InterruptError:
                num_interrupts += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert num_interrupts > 100


class LateStager(copies.Stager):
    """A device that copies in program order but finishes 20 ms later, on a thread of its own."""

    def __init__(self, pool: Pool) -> None:
        pass

    def copy(self, tensor: torch.Tensor, block: PoolBlock) -> Ready:
        snapshot = tensor.detach().clone().reshape(-1).view(torch.uint8).numpy()
        block.data[:] = 0xEE
        done = threading.Event()

        def arrive() -> None:
            time.sleep(0.02)
            np.copyto(block.data, snapshot)
            done.set()

        threading.Thread(target=arrive).start()

        class Arrival:
            def wait(self, timeout_s: float) -> bool:
                return done.wait(timeout_s)

        return Arrival()


@pytest.fixture
def late_device() -> Iterator[None]:
    plain = copies.STAGERS["cpu"]
    copies.STAGERS["cpu"] = lambda pool, settings, say: LateStager(pool)
    yield
    copies.STAGERS["cpu"] = plain


@pytest.mark.usefixtures("late_device")
def test_a_copy_that_finishes_later_is_waited_for_by_the_writer(tmp_path: Path) -> None:
    with flagged(tmp_path, rules="site=output keep=tensor,stats") as recording:
        model = Tiny()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        expected = []
        model.second.register_forward_hook(lambda m, a, o: expected.append(o.detach().clone()))
        for i in range(5):
            model(batch(i)).sum().backward()
            optimizer.step()
    for step, value in enumerate(expected):
        assert torch.equal(recording.run.tensor("second", step=step), value)


def test_a_parameter_larger_than_the_pool_is_said_before_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(512, 1024))
    with flagged(tmp_path, rules="site=grad keep=tensor", pool_bytes="1MiB"), pytest.raises(RuntimeError):
        model(torch.zeros(1, 4))  # no gradient was ever seen
    (said,) = [record.getMessage() for record in caplog.records if "pool" in record.getMessage()]
    assert said.startswith("1.weight has 2097152 bytes, more than the pool (1048576)")
    assert said.endswith("raise RECORDER_POOL_BYTES or select less")


def test_a_tensor_larger_than_the_pool_is_counted_and_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    import recorder

    with flagged(tmp_path, rules="site=output,tap keep=tensor", pool_bytes="1MiB") as recording:
        Tiny()(batch())
        for _ in range(3):
            recorder.tap("large", torch.zeros(1 << 20))
    assert recording.manifest["ledger"]["dropped"] == {"too_large": 3}
    assert len([r for r in caplog.records if "more than the pool" in r.getMessage()]) == 1


def test_free_small_blocks_are_taken_again_and_make_room_for_a_large_one() -> None:
    pool = make_pool(16)
    small = [block for block in (pool.take(10 + number) for number in range(16)) if block is not None]
    assert len(small) == 16 and pool.take(1) is None and pool.used_bytes == pool.capacity_bytes
    for block in small[::2]:
        block.release()
    assert pool.used_bytes == pool.capacity_bytes // 2
    again = pool.take(700)
    assert again is not None and again.num_bytes == 700 and again in small[::2]
    assert pool.take(2 * KIB) is None, "no two of the free blocks lie side by side"
    for block in (again, *small[1::2]):
        block.release()
    whole = pool.take(pool.capacity_bytes)
    assert whole is not None and pool.used_bytes == pool.capacity_bytes
