"""A device with streams that a test runs by hand, in any order that streams and events allow; its memory is the CPU's.

Work that a stream was given lies in a queue until the test lets it happen, so that a copy that is not ordered behind
what it reads, or before what overwrites it, goes wrong here in some order.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from recorder.capture.staging import copies
from recorder.capture.staging.copies import Stager
from recorder.capture.staging.devices import Device, undisturbed
from recorder.capture.staging.streams import StreamStager


class FakeEvent:
    def __init__(self) -> None:
        self.num_recorded = 0
        self.num_done = 0


class FakeStream:
    """A queue of steps; a step that waits says whether it may go on."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.steps: deque[tuple[Callable[[], bool], Callable[[], None]]] = deque()
        self.is_hung = False

    def advance(self) -> bool:
        """Do the next step. False where there is none, or it has to wait."""
        if self.is_hung or not self.steps or not self.steps[0][0]():
            return False
        self.steps.popleft()[1]()
        return True


class FakeDevice(Device):
    """One device; training's stream is ``main``."""

    def __init__(self, *, is_eager: bool = False, can_pin: bool = True, lag: float = 0.0, seed: int = 0) -> None:
        """Make one.

        Args:
            is_eager: what training's stream is given happens at once, as training on the CPU does.
            can_pin: whether it page-locks.
            lag: how probably a question finds that nothing has moved; without lag only the test moves anything.
            seed: of the order in which things happen.
        """
        self.main = FakeStream("main")
        self.current = self.main
        self.streams = [self.main]
        self.is_eager = is_eager
        self.can_pin = can_pin
        self.lag = lag
        self.choose = random.Random(seed)
        self.captures = False
        self.has_memory = True
        self.error: Exception | None = None
        self.fails: dict[int, Exception] = {}
        """By number of a launch, what it raises."""
        self.num_launches = self.num_events = self.num_questions = self.num_fetched = 0
        self._happening = threading.RLock()
        """The writer's questions and the test let things happen, never two at once."""
        self.allocated: list[int] = []
        self.pinned: list[int] = []

    def is_capturing(self) -> bool:
        return self.captures

    def current_stream(self) -> Any:
        return self.current

    def new_stream(self) -> Any:
        self.streams.append(FakeStream("side"))
        return self.streams[-1]

    def new_event(self) -> Any:
        self.num_events += 1
        return FakeEvent()

    def record(self, event: FakeEvent, stream: FakeStream) -> None:
        assert not self.captures
        event.num_recorded += 1
        number = event.num_recorded

        def happen() -> None:
            event.num_done = max(event.num_done, number)

        self._give(stream, happen)

    def wait(self, stream: FakeStream, event: FakeEvent) -> None:
        assert not self.captures
        number = event.num_recorded
        self._give(stream, lambda: None, lambda: event.num_done >= number)

    def is_done(self, event: FakeEvent) -> bool:
        on_trainings_thread = threading.current_thread() is threading.main_thread()
        assert not (self.captures and on_trainings_thread), "asked while a graph was captured"
        self.num_questions += 1
        if self.error is not None:
            raise self.error
        if self.lag and self.choose.random() >= self.lag:
            self.finish(self.choose.randrange(1, 20))
        return event.num_done >= event.num_recorded

    def run(self, stream: FakeStream, work: Callable[[], None]) -> None:
        assert not self.captures, "launched while a graph was captured"
        self.num_launches += 1
        error = self.fails.pop(self.num_launches, None)
        if error is not None:
            raise error
        self._give(stream, work)

    def fetch(self, stream: FakeStream, host: torch.Tensor, source: torch.Tensor) -> None:
        self.num_fetched += 1
        host.copy_(source)

    def allocate(self, num_bytes: int) -> torch.Tensor:
        if num_bytes and not self.has_memory:
            raise torch.OutOfMemoryError("out of memory")
        self.allocated.append(num_bytes)
        with torch.inference_mode(False), undisturbed():
            return torch.full((num_bytes,), 0xDD, dtype=torch.uint8, device="cpu")

    def pin(self, address: int, num_bytes: int) -> bool:
        if self.can_pin:
            self.pinned.append(address)
        return self.can_pin

    def unpin(self, address: int) -> None:
        self.pinned.remove(address)

    def finish(self, num_steps: int = 1 << 30) -> None:
        """Let things happen, in an order by chance, until nothing can."""
        with self._happening:
            waiting = list(self.streams)
            while waiting and num_steps > 0:
                stream = self.choose.choice(waiting)
                if stream.advance():
                    waiting = list(self.streams)
                    num_steps -= 1
                else:
                    waiting.remove(stream)

    def _give(self, stream: FakeStream, work: Callable[[], None], may_go: Callable[[], bool] = lambda: True) -> None:
        def done() -> None:
            with undisturbed():
                work()

        if stream is self.main and self.is_eager:
            done()
        else:
            stream.steps.append((may_go, done))


class FakeStager(StreamStager, Stager):
    """The stager of fake devices."""


@contextmanager
def fake_gpu(device: FakeDevice, room: int = 1 << 16) -> Iterator[None]:
    """What lies on the CPU is taken for a device's."""
    plain = copies.STAGERS["cpu"]
    copies.STAGERS["cpu"] = lambda pool, settings, say: FakeStager(
        pool, open_device=lambda index: device, room_bytes=room, say=say, min_measured_bytes=64
    )
    try:
        yield
    finally:
        copies.STAGERS["cpu"] = plain
