"""The calls of CUDA's driver that torch does not offer, against a stand-in for the driver."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from recorder.capture.staging.devices import CudaDevice


class Function:
    """One function of a library: takes attributes, notes its calls, returns a code."""

    def __init__(self, name: str, driver: Driver) -> None:
        self.name = name
        self.driver = driver

    def __call__(self, *arguments: Any) -> int:
        self.driver.calls.append(self.name)
        if self.name == "cuThreadExchangeStreamCaptureMode" and self.name not in self.driver.codes:
            mode = arguments[0]._obj
            self.driver.mode, mode.value = mode.value, self.driver.mode
        return self.driver.codes.get(self.name, 0)


class Driver:
    def __init__(self) -> None:
        self.calls: list[str] = []
        self.codes: dict[str, int] = {}
        self.mode = 0
        self._functions: dict[str, Function] = {}

    def __getattr__(self, name: str) -> Function:
        return self._functions.setdefault(name, Function(name, self))


class Event:
    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.modes: list[int] = []

    def query(self) -> bool:
        self.modes.append(self.driver.mode)
        return True


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    found = Driver()

    def load(name: str) -> Driver:
        assert name == "libcuda.so.1"
        return found

    monkeypatch.setattr(ctypes, "CDLL", load)
    return found


def test_a_question_is_asked_in_the_mode_that_spoils_no_capture(driver: Driver) -> None:
    device, event = CudaDevice(0), Event(driver)
    driver.calls.clear()
    assert device.is_done(event)  # type: ignore[arg-type]
    assert event.modes == [2] and driver.mode == 0
    assert driver.calls == [
        "cuCtxPushCurrent_v2",
        "cuThreadExchangeStreamCaptureMode",
        "cuThreadExchangeStreamCaptureMode",
        "cuCtxPopCurrent_v2",
    ]


def test_where_the_driver_refuses_that_mode_nothing_is_asked(driver: Driver) -> None:
    device, event = CudaDevice(0), Event(driver)
    driver.codes["cuThreadExchangeStreamCaptureMode"] = 201
    with pytest.raises(RuntimeError, match="cuThreadExchangeStreamCaptureMode of the CUDA driver returned 201"):
        device.is_done(event)  # type: ignore[arg-type]
    assert event.modes == [] and driver.calls[-1] == "cuCtxPopCurrent_v2"


def test_memory_that_the_driver_does_not_lock_is_said_not_to_be(driver: Driver) -> None:
    device = CudaDevice(0)
    assert device.pin(4096, 4096)
    driver.codes["cuMemHostRegister_v2"] = 2
    assert not device.pin(4096, 4096)
    device.unpin(4096)
    assert driver.calls[-3:] == ["cuMemHostUnregister", "cuThreadExchangeStreamCaptureMode", "cuCtxPopCurrent_v2"]
    assert driver.mode == 0
