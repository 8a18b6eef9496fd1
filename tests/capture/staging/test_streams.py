"""Copies from a device with streams: in any order of events a record holds what the hook saw, or is counted."""

from __future__ import annotations

import functools
import gc
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from recorder.capture.staging import streams
from recorder.capture.staging.measure import measure
from recorder.capture.staging.pool import Pool, PoolBlock
from recorder.records import KEEP_FINGERPRINT, KEEP_STATS, LostError, Ready
from tests.rigs.capturing import Tiny, batch, flagged

from .fake_device import FakeDevice, FakeStager, fake_gpu

KIB = 1024
BOTH = KEEP_STATS | KEEP_FINGERPRINT


class Rig:
    """A stager on one fake device, and its pool."""

    def __init__(self, device: FakeDevice | None = None, *, room: int = 64 * KIB, pool: int = 256 * KIB) -> None:
        self.device = device or FakeDevice()
        self.pool = Pool(pool, progress_s=time.monotonic, clock=time.monotonic)
        self.said: list[str] = []
        self.stager = FakeStager(
            self.pool,
            open_device=lambda index: self.device,
            room_bytes=room,
            say=self.said.append,
            min_measured_bytes=4 * KIB,
        )

    def stage(self, tensor: torch.Tensor) -> tuple[PoolBlock, Ready]:
        block = self.pool.take(tensor.numel() * tensor.itemsize)
        assert block is not None
        ready = self.stager.copy(tensor, block)
        assert ready is not None
        return block, ready

    def measure(self, tensor: torch.Tensor) -> Any:
        plan = self.stager.plan(tensor, None, BOTH)
        assert plan is not None and plan.nbytes < 100
        block = self.pool.take(plan.nbytes)
        assert block is not None
        ready = self.stager.measure(tensor, block, plan)
        return lambda: (ready.wait(0), plan.read(block.data, None))[1]

    def launch(self, work: Callable[[], object]) -> None:
        """What training does next, on its stream."""
        self.device.run(self.device.main, lambda: (work(), None)[1])


def value_of(block: PoolBlock, like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(block.data.copy()).view(like.dtype).view(like.shape)


def host_measured(tensor: torch.Tensor) -> Any:
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return measure(data, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), None, BOTH)


@pytest.mark.parametrize("room", [64 * KIB, 5 * KIB, 0], ids=["room for all", "room for one", "no room"])
@pytest.mark.parametrize("can_measure", [False, True], ids=["copied", "measured"])
def test_what_training_does_in_place_afterwards_reaches_no_copy(room: int, can_measure: bool) -> None:
    for seed in range(60):
        rig = Rig(FakeDevice(seed=seed), room=room)
        for wanted, got in _changed_again_and_again(rig, can_measure):
            if can_measure:
                assert _exact(got()) == _exact(host_measured(wanted))
            else:
                assert torch.equal(value_of(got, wanted), wanted)


def _changed_again_and_again(rig: Rig, can_measure: bool) -> list[tuple[torch.Tensor, Any]]:
    """What hooks saw of one tensor, and what was recorded of it; all is over on the device."""
    tensor, found = torch.full((1024,), -1.0), []
    for i in range(6):
        wanted = torch.arange(1024) * float(i + 1)
        rig.launch(functools.partial(tensor.copy_, wanted))
        found.append((wanted, rig.measure(tensor) if can_measure else rig.stage(tensor)[0]))
        rig.launch(tensor.neg_)
        rig.device.finish(rig.device.choose.randrange(12))
    rig.launch(tensor.zero_)
    rig.device.finish()
    return found


def _exact(measured: Any) -> Any:
    return measured._replace(sum_sq=None, l2=None, std=None, sum_abs=None, sum_fourth=None)


def test_only_the_writer_waits_and_only_for_its_own_record() -> None:
    rig = Rig()
    first, first_ready = rig.stage(torch.ones(8))
    while rig.device.main.advance() or rig.device.streams[1].advance():
        pass
    second, second_ready = rig.stage(torch.zeros(8))
    assert first_ready.wait(0) and first.data.view(np.float32).tolist() == [1.0] * 8
    assert not second_ready.wait(0)
    rig.device.finish()
    assert second_ready.wait(0) and second.data.view(np.float32).tolist() == [0.0] * 8


def test_events_and_rooms_are_used_again() -> None:
    rig = Rig(FakeDevice())
    for i in range(500):
        tensor = torch.full((2048,), float(i))
        block, ready = rig.stage(tensor)
        rig.device.finish()
        assert ready.wait(0) and torch.equal(value_of(block, tensor), tensor)
        block.release()
    assert rig.device.num_events == 1
    assert rig.device.allocated == [64 * KIB]
    assert rig.pool.used_bytes == 0


def test_events_are_used_again_where_the_writer_asks_late() -> None:
    rig = Rig(pool=4096 * KIB, room=1024 * KIB)
    staged = []
    for _ in range(1000):
        staged.append(rig.stage(torch.ones(8)))
        rig.device.finish()
    assert rig.device.num_events <= streams._MANY + 2
    assert all(ready.wait(0) for _, ready in staged)


def test_a_block_that_is_given_up_waits_for_the_device() -> None:
    rig = Rig(pool=8 * KIB)
    tensor = torch.arange(2048, dtype=torch.float32)
    block, _ = rig.stage(tensor)
    block.release()
    assert rig.pool.take(8 * KIB) is None, "the device may still write into it"
    rig.stager.look()
    assert rig.pool.take(8 * KIB) is None
    rig.device.finish()
    rig.stager.look()
    assert rig.pool.take(8 * KIB) is not None
    assert rig.pool.take(1) is None, "once"


def test_a_record_that_is_over_gives_its_block_back_at_once() -> None:
    rig = Rig()
    block, ready = rig.stage(torch.ones(8))
    rig.device.finish()
    assert ready.wait(0)
    block.release()
    assert rig.pool.used_bytes == 0


def test_a_tensor_that_is_not_contiguous_is_made_so_on_the_device() -> None:
    wide = torch.arange(48 * 64, dtype=torch.float32).view(48, 64)
    turned = wide.to(torch.complex64) * (1 + 2j)
    for room in (64 * KIB, 25 * KIB):
        rig = Rig(room=room)
        if room < 64 * KIB:
            rig.stage(torch.zeros(25 * 256))  # the room is taken: training's stream copies
        for tensor in (wide.t(), wide[::2, 1::3], wide[:1].expand(9, 64), turned[:9].conj(), turned[:9].conj().imag):
            block, ready = rig.stage(tensor)
            rig.device.finish()
            assert ready.wait(0)
            assert torch.equal(value_of(block, tensor), tensor.resolve_conj().resolve_neg()), (room, tensor.shape)
            if room < 64 * KIB:
                rig.stage(torch.zeros(25 * 256))
            block.release()


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.bfloat16, torch.float8_e4m3fn, torch.uint16, torch.complex128, torch.int64], ids=str
)
def test_every_kind_of_value_arrives_bit_for_bit(dtype: torch.dtype) -> None:
    rig = Rig()
    bits = torch.randint(0, 2 if dtype == torch.bool else 256, (5, 16), dtype=torch.uint8)
    tensor = bits.view(dtype) if dtype != torch.bool else bits.bool()
    for value in (tensor, tensor[0, 0], tensor[:0]):
        block = rig.pool.take(value.numel() * value.itemsize)
        assert block is not None
        ready = rig.stager.copy(value, block)
        rig.device.finish()
        assert ready is None or ready.wait(0)
        assert block.data.tobytes() == value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def test_what_finds_no_room_and_cannot_be_copied_as_it_lies_is_lost_with_the_reason() -> None:
    rig = Rig(room=4 * KIB)
    wide = torch.zeros(64, 64).t()
    block = rig.pool.take(16 * KIB)
    assert block is not None
    with pytest.raises(LostError, match="device_pool_full"):
        rig.stager.copy(wide, block)
    block.release()
    assert rig.pool.used_bytes == 0 and rig.device.num_launches == 0


def test_nothing_is_launched_and_nothing_asked_while_a_graph_is_captured() -> None:
    rig = Rig()
    block, ready = rig.stage(torch.ones(8))
    launches = rig.device.num_launches
    rig.device.captures = True
    other = rig.pool.take(32)
    assert other is not None
    with pytest.raises(LostError, match="cuda_graph"):
        rig.stager.copy(torch.ones(8), other)
    rig.stager.look()
    rig.device.captures = False
    assert (rig.device.num_launches, rig.device.num_questions) == (launches, 0)
    rig.device.finish()
    assert ready.wait(0) and block.data.view(np.float32).tolist() == [1.0] * 8


def test_a_first_value_inside_a_capture_opens_nothing() -> None:
    rig = Rig()
    rig.device.captures = True
    block = rig.pool.take(32)
    assert block is not None
    with pytest.raises(LostError, match="cuda_graph"):
        rig.stager.copy(torch.ones(8), block)
    assert not rig.device.allocated and not rig.device.pinned


def test_an_error_of_the_device_loses_the_value_and_gives_everything_back() -> None:
    rig = Rig()
    block, ready = rig.stage(torch.ones(8))
    rig.device.error = RuntimeError("an illegal memory access was encountered")
    with pytest.raises(LostError, match="copy_failed") as caught:
        ready.wait(0)
    assert caught.value.__cause__ is rig.device.error
    block.release()
    assert rig.pool.used_bytes == 0
    with pytest.raises(LostError):
        ready.wait(0)


@pytest.mark.parametrize("number", [1, 2])
def test_a_launch_that_fails_half_way_leaves_no_memory_to_be_used_twice(number: int) -> None:
    rig = Rig(pool=8 * KIB, room=8 * KIB)
    rig.device.fails[number] = RuntimeError("launch failed")
    block = rig.pool.take(8 * KIB)
    assert block is not None
    with pytest.raises(RuntimeError, match="launch failed"):
        rig.stager.copy(torch.ones(2048), block)
    block.release()
    rig.device.finish()
    rig.stager.look()
    is_free = rig.pool.take(8 * KIB) is not None
    assert is_free == (number == 1), "once the copy to the host was asked for, nobody knows whether it comes"
    assert rig.stager._by_device[0]._take_room(8 * KIB) is None or number == 1


def test_a_device_that_cannot_measure_a_type_copies_it_from_then_on() -> None:
    rig = Rig()
    tensor = torch.ones(2048)
    rig.device.fails[2] = NotImplementedError("no kernel")
    with pytest.raises(NotImplementedError):
        rig.measure(tensor)
    assert rig.stager.plan(tensor, None, BOTH) is None
    assert rig.stager.plan(tensor.double(), None, BOTH) is not None
    rig.device.finish()
    rig.stager.look()
    assert rig.stager._by_device[0]._take_room(64 * KIB) is not None, "its room is free again"


def test_what_is_small_or_not_for_the_device_is_copied() -> None:
    rig = Rig()
    assert rig.stager.plan(torch.ones(8), None, BOTH) is None
    assert rig.stager.plan(torch.ones(4096, dtype=torch.complex64), None, BOTH) is None


def test_a_device_without_memory_for_a_room_lets_trainings_stream_copy() -> None:
    device = FakeDevice()
    device.has_memory = False
    rig = Rig(device)
    tensor = torch.arange(100.0)
    block, ready = rig.stage(tensor)
    rig.launch(tensor.zero_)
    rig.device.finish()
    assert ready.wait(0) and torch.equal(value_of(block, tensor), torch.arange(100.0))
    assert len(rig.said) == 1 and "no 65536 bytes" in rig.said[0]


def test_memory_that_cannot_be_locked_is_filled_by_the_writer() -> None:
    rig = Rig(FakeDevice(can_pin=False), room=8 * KIB)
    tensor = torch.arange(1024.0)
    block, ready = rig.stage(tensor)
    rig.launch(tensor.zero_)
    assert not ready.wait(0)
    rig.device.finish()
    rig.stager.look()
    assert rig.device.num_fetched == 0, "the training thread would wait for it"
    assert ready.wait(0) and torch.equal(value_of(block, tensor), torch.arange(1024.0))
    measured = rig.measure(torch.arange(1024.0))
    rig.device.finish()
    assert measured().fingerprint == host_measured(torch.arange(1024.0)).fingerprint
    assert len(rig.said) == 1 and "could not be page-locked" in rig.said[0]
    given_up, _ = rig.stage(torch.ones(1024))
    rig.stage(torch.ones(1024))
    other = rig.pool.take(4 * KIB)
    assert other is not None
    with pytest.raises(LostError, match="device_pool_full"):
        rig.stager.copy(torch.ones(1024), other)
    given_up.release()
    rig.device.finish()
    assert rig.stager.copy(torch.ones(1024), other) is not None, "what nobody reads any more makes room"
    assert rig.device.num_fetched == 2


def test_what_a_signal_handler_of_the_users_raises_is_no_error_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    class TimeIsUpError(Exception):
        pass

    def ring(*args: Any) -> None:
        raise TimeIsUpError

    rig = Rig()
    block, ready = rig.stage(torch.ones(8))
    previous = signal.signal(signal.SIGUSR1, ring)
    try:
        with monkeypatch.context() as patch, pytest.raises(TimeIsUpError):
            patch.setattr(rig.device, "is_done", lambda event: signal.raise_signal(signal.SIGUSR1))
            rig.stager.look()
    finally:
        signal.signal(signal.SIGUSR1, previous)
    rig.device.finish()
    assert ready.wait(0) and block.data.view(np.float32).tolist() == [1.0] * 8


def test_close_lets_go_once_the_last_copy_is_over() -> None:
    rig = Rig()
    _, ready = rig.stage(torch.ones(8))
    assert rig.device.pinned == [rig.pool.address]
    rig.stager.close()
    assert rig.device.pinned, "a copy is under way"
    rig.device.finish()
    assert ready.wait(0)
    assert not rig.device.pinned and not streams._unfinished


def test_close_does_not_wait_for_a_device_that_hangs_and_keeps_its_memory() -> None:
    rig = Rig()
    block, ready = rig.stage(torch.ones(8))
    for stream in rig.device.streams:
        stream.is_hung = True
    began = time.monotonic()
    rig.stager.close()
    assert time.monotonic() - began < 10 and not ready.wait(0)
    block.release()
    device, pool_address = rig.device, rig.pool.address
    del rig, block, ready
    gc.collect()
    assert device.pinned == [pool_address] and len(streams._unfinished) == 1
    for stream in device.streams:
        stream.is_hung = False
    device.finish()
    Rig(device).stage(torch.ones(8))
    assert pool_address not in device.pinned, "a later recording clears up"


def test_each_device_has_its_own_room_and_stream() -> None:
    devices = {0: FakeDevice(), 1: FakeDevice()}
    pool = Pool(64 * KIB, progress_s=time.monotonic, clock=time.monotonic)
    stager = FakeStager(pool, open_device=devices.__getitem__, room_bytes=8 * KIB, say=print)
    assert stager._open(0).device is devices[0] and stager._open(1).device is devices[1]
    assert devices[0].allocated == devices[1].allocated == [8 * KIB]
    assert (len(devices[0].pinned), len(devices[1].pinned)) == (1, 0), "the pool is locked once, for all devices"


def test_the_threads_of_a_backward_may_stage_at_once() -> None:
    rig = Rig(FakeDevice(), room=512 * KIB, pool=4096 * KIB)
    found: list[tuple[torch.Tensor, PoolBlock, Ready]] = []
    failures: list[BaseException] = []

    def stage(number: int) -> None:
        try:
            for i in range(100):
                tensor = torch.full((512,), float(1000 * number + i))
                found.append((tensor, *rig.stage(tensor)))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=stage, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    rig.device.finish()
    assert not failures and len(found) == 400
    for tensor, block, ready in found:
        assert ready.wait(0) and torch.equal(value_of(block, tensor), tensor)
    assert rig.device.allocated == [512 * KIB]


# -- whole recordings -------------------------------------------------------------------------------------------------


def train(seen: dict[int, torch.Tensor] | None = None, *, capture_at: int = -1, device: Any = None) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Tiny()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for step in range(8):
        if device is not None:
            device.captures = step == capture_at
        output = model(batch(step))
        if seen is not None:
            seen[step] = output.detach().clone()
        output.mul_(2.0)  # in place, after the hook
        output.sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    if device is not None:
        device.captures = False
    return {key: value.clone() for key, value in model.state_dict().items()}


@pytest.mark.parametrize("room", [64 * KIB, 2 * KIB, 0])
@pytest.mark.parametrize("can_pin", [True, False])
def test_a_training_on_a_late_device_is_recorded_as_it_was(tmp_path: Path, room: int, can_pin: bool) -> None:
    expected = train()
    seen: dict[int, torch.Tensor] = {}
    device = FakeDevice(is_eager=True, lag=0.5, can_pin=can_pin)
    with fake_gpu(device, room), flagged(tmp_path) as recording:
        found = train(seen)
    assert all(torch.equal(expected[key], found[key]) for key in expected)
    dropped = recording.manifest["ledger"]["dropped"]
    if can_pin:
        assert not dropped
        for step, value in seen.items():
            assert torch.equal(recording.run.tensor("second", step=step), value)
    else:
        assert set(dropped) <= {"device_pool_full"} and (room or dropped)
    assert not device.pinned and not streams._unfinished


def test_statistics_of_a_device_are_those_of_the_writer(tmp_path: Path) -> None:
    rules = "site=output,grad,param,optim keep=stats,fingerprint"
    tables = []
    for name, device in (("host", None), ("device", FakeDevice(is_eager=True, lag=0.3))):
        if device is None:
            with flagged(tmp_path / name, rules) as recording:
                train()
        else:
            with fake_gpu(device), flagged(tmp_path / name, rules) as recording:
                train()
        key = ["step", "module_path", "site", "name"]
        tables.append(recording.rows().sort_values(key).reset_index(drop=True))
    host, found = tables
    exact = ["fingerprint", "shape", "min", "max", "absmax", "nan_count", "inf_count", "zero_count", "note"]
    assert host[exact].equals(found[exact])
    for column in ("mean", "std", "l2", "sum", "sum_sq", "sum_abs", "sum_fourth"):
        np.testing.assert_allclose(host[column], found[column], rtol=1e-12, atol=1e-14)


def test_a_step_inside_a_graph_capture_is_counted_by_that_reason(tmp_path: Path) -> None:
    expected, device = train(), FakeDevice(is_eager=True, lag=0.5)
    with fake_gpu(device), flagged(tmp_path, "site=output,grad keep=tensor") as recording:
        found = train(capture_at=3, device=device)
    assert all(torch.equal(expected[key], found[key]) for key in expected)
    dropped = recording.manifest["ledger"]["dropped"]
    assert dropped == {"cuda_graph": 8}, "the outputs of four modules, and four gradients"
    (said,) = recording.events("cuda_graph")
    assert "nothing can be recorded" in said
    assert set(recording.rows(site="output")["step"]) == {0, 1, 2, 4, 5, 6, 7}


def test_a_device_that_hangs_costs_its_values_and_no_more_than_the_deadline(tmp_path: Path) -> None:
    expected, device = train(), FakeDevice(is_eager=True)
    with fake_gpu(device), flagged(tmp_path, "site=output keep=tensor", close_deadline_s=0.5) as recording:
        found = train()
        began = time.monotonic()
    assert time.monotonic() - began < 5
    assert all(torch.equal(expected[key], found[key]) for key in expected)
    ledger = recording.manifest["ledger"]
    assert ledger["observed"] == ledger["written"] + sum(ledger["dropped"].values())
    assert ledger["dropped"] == {"abandoned_at_close": 32}
    device.finish()
    for stager in list(streams._unfinished):
        stager.look()
    assert not device.pinned and not streams._unfinished


def test_errors_of_every_copy_are_counted_and_training_goes_on(tmp_path: Path) -> None:
    expected, device = train(), FakeDevice(is_eager=True)
    device.error = RuntimeError("device-side assert triggered")
    with fake_gpu(device), flagged(tmp_path, "site=output keep=tensor") as recording:
        found = train()
    assert all(torch.equal(expected[key], found[key]) for key in expected)
    assert recording.manifest["ledger"]["dropped"] == {"copy_failed": 32}


def test_a_first_value_in_inference_mode_does_not_spoil_the_later_ones(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with fake_gpu(FakeDevice(is_eager=True, lag=0.5)), flagged(tmp_path, "site=output keep=tensor,stats") as recording:
        with torch.inference_mode():
            model(torch.ones(2, 4))
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    assert not recording.manifest["ledger"]["dropped"] and len(recording.rows(site="output")) == 2
