"""A process that has imported everything and recorded nothing: for each line it forks one that trains and ends so.

Importing torch costs seconds, and dozens of ends are wanted. A child leaves `main` as any program does, so that the
interpreter ends in full. Lines of standard input are JSON: a case, to be started (the answer is its process id), or a
process id to wait for (the answer is its exit code).
"""

from __future__ import annotations

import asyncio
import ctypes
import datetime
import faulthandler
import gc
import json
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch._dynamo  # optimizers import it at their first step
import torch.distributed as dist
from torch import nn
from torch.utils import data as torch_data

import recorder
import recorder.capture.staging.measure
import recorder.lifecycle.active
import recorder.write.writer
from recorder.write.file import Disk

sys.path.insert(0, str(Path(__file__).parent))
import programs  # type: ignore[import-not-found] # beside this script

_ = torch_data  # imported before the first fork
SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def wait(child: int, deadline_s: float = 45.0) -> int:
    """Its exit code; a child that hangs is killed, and none of these is."""
    until_s = time.monotonic() + deadline_s
    while time.monotonic() < until_s:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return -999


def serve() -> dict[str, Any] | None:
    """Answer lines until there are none; in a child, its case."""
    gc.freeze()  # the end of an interpreter goes through all objects of torch, a second each time
    for line in sys.stdin:
        asked = json.loads(line)
        if isinstance(asked, int):
            print(wait(asked), flush=True)
            continue
        child = os.fork()
        if child == 0:
            os.setsid()
            os.chdir(asked["folder"])
            output = os.open("output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(output, 1)
            os.dup2(output, 2)
            for number in (signal.SIGINT, *SIGNALS):  # whatever the test's own process ignores
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
            return asked  # type: ignore[no-any-return]
        print(child, flush=True)
    return None


class Training:
    """The smallest one; a byte in the file ``progress`` for each step that is over."""

    def __init__(self, case: dict[str, Any]) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, 2))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.reopen()
        self.longest_s = 0.0

    def reopen(self) -> None:
        self._progress = os.open("progress", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def steps(self, count: int = 1 << 30, pause_s: float = 0.0) -> None:
        for _ in range(count):
            began = time.monotonic()
            self.model(torch.ones(3, 4)).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.longest_s = max(self.longest_s, time.monotonic() - began)
            self.note(b".")
            time.sleep(pause_s)

    def note(self, word: bytes) -> None:
        os.write(self._progress, word)


def install(kind: str, number: int, training: Training) -> None:
    """A handler of the user, as programs have them."""
    previous: Any = None

    def handle(signum: int, frame: FrameType | None) -> None:
        training.note(b"h")
        if kind == "sys_exit":
            sys.exit(5)
        if kind == "os_exit":
            os._exit(6)
        if kind == "chain" and callable(previous):
            previous(signum, frame)
        if kind == "default":  # do mine, then what would have been done without me
            signal.signal(signum, previous)
            os.kill(os.getpid(), signum)

    if kind == "ignore":
        signal.signal(number, signal.SIG_IGN)
    elif kind in ("faulthandler", "faulthandler chain"):
        # Of this thread alone: it walks the frames of others without the interpreter's lock, and may crash there.
        faulthandler.register(number, all_threads=False, chain=kind.endswith("chain"))
    else:
        previous = signal.signal(number, handle)
        print("before mine:", name_of(previous))


def name_of(handler: Any) -> str:
    return getattr(handler, "__name__", str(handler))


def stall(method: str) -> None:
    """From now on a call of the disk waits for ever in the kernel, as on a mount whose server is gone."""
    read_end, _ = os.pipe()

    def never(self: Disk, *arguments: Any) -> Any:
        return os.read(read_end, 1)

    setattr(Disk, method, never)


def slow(seconds: float) -> None:
    plain = Disk.write

    def write(self: Disk, *arguments: Any) -> int:
        time.sleep(seconds)
        return plain(self, *arguments)

    setattr(Disk, "write", write)  # noqa: B010


def end(case: dict[str, Any], training: Training) -> None:
    how: str = case["end"]
    if how == "exception":
        raise ArithmeticError("the end that was asked for")
    if how == "sys_exit":
        sys.exit(3)
    if how == "os_exit":
        os._exit(4)
    if how == "abort":
        os.abort()
    if how == "segfault":
        ctypes.string_at(0)
    if how == "terminate":  # as gloo does when its peer is gone
        ctypes.CDLL("libstdc++.so.6")["_ZSt9terminatev"]()
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "no memory":
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 20), resource.RLIM_INFINITY))
        torch.empty(1 << 30)
    if how == "out of memory":
        training.note(b"!")
        while not os.path.exists("go"):
            time.sleep(0.005)
        kept = []
        while True:
            kept.append(bytearray(8 << 20))
    if how == "stuck":  # in C, where no Python handler runs
        training.note(b"!")
        mutex = ctypes.create_string_buffer(64)
        for _ in range(2):  # the second never returns, whatever signals come
            ctypes.CDLL(None).pthread_mutex_lock(mutex)
    if how == "all_reduce":
        rank = case["rank"]
        dist.init_process_group(
            "gloo", init_method=f"file://{case['store']}", rank=rank, world_size=2,
            timeout=datetime.timedelta(seconds=60),
        )  # fmt: skip
        training.note(b"!")
        if rank == 0:
            dist.all_reduce(torch.ones(1))
        time.sleep(60)
    if how == "blocked":  # as programs do while they write a checkpoint
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        os.kill(os.getpid(), signal.SIGTERM)
        training.steps(20, pause_s=0.01)
        print("saved", flush=True)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        training.steps(1000, pause_s=0.01)
    if how == "never":
        training.steps(pause_s=0.002)


def wakeup(training: Training, attach: Callable[[], Any]) -> None:
    """An event loop that handles a signal, around a recording and beside it."""

    async def main(attach_inside: bool) -> None:
        arrived = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGUSR1, arrived.set)
        attachment = attach() if attach_inside else None
        training.steps(2)
        os.kill(os.getpid(), signal.SIGUSR1)
        await asyncio.wait_for(arrived.wait(), 5)
        if attachment is not None:
            attachment.close()
        arrived.clear()
        os.kill(os.getpid(), signal.SIGUSR1)
        await asyncio.wait_for(arrived.wait(), 5)
        loop.remove_signal_handler(signal.SIGUSR1)

    asyncio.run(main(attach_inside=True))
    attachment = attach()
    asyncio.run(main(attach_inside=False))
    training.steps(2)
    attachment.close()
    print("wakeup", signal.set_wakeup_fd(-1))


def run(case: dict[str, Any]) -> None:
    training = Training(case)
    number = getattr(signal, case.get("signal", "SIGUSR1"))

    def attach() -> Any:
        settings = {"rules": "site=* keep=tensor", "dir": "recordings", "flush_interval_s": 0.05, **case["settings"]}
        return recorder.attach(training.model, enabled=case["record"], **settings)

    if case["end"] == "program":
        getattr(programs, case["name"])(training, attach)
        return
    if case["end"] == "wakeup":
        wakeup(training, attach)
        return
    if case.get("before"):
        install(case["before"], number, training)
    attachment = attach()
    training.steps(1)
    if case.get("after"):
        install(case["after"], number, training)
    if case.get("shows"):
        print([name_of(signal.getsignal(one)) for one in SIGNALS])
    if case.get("stalls"):
        attachment.flush()
        stall(case["stalls"])
    if case.get("slow_s"):
        slow(case["slow_s"])
    training.steps(19)
    time.sleep(case.get("rest_s", 0.0))
    if case["end"] == "closed":
        attachment.close()
        print([thread.name for thread in threading.enumerate()])
        print([name_of(signal.getsignal(one)) for one in SIGNALS], signal.set_wakeup_fd(-1))
        training.note(b"!")
        training.steps(pause_s=0.002)
    if case["end"] == "goes on":
        while not os.path.exists("enough"):
            training.steps(1, pause_s=0.002)
        print("slow" if training.longest_s > 1.0 else "done")
        return
    if case["end"] == "attached":
        with attachment:
            training.steps(pause_s=0.002)
    end(case, training)


if __name__ == "__main__":
    asked = serve()
    if asked is not None:
        run(asked)
