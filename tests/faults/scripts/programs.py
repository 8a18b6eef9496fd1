"""What trainings do with processes and interrupts, in short. Each prints what a test compares, or ends by an assert."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import recorder


class Data(Dataset[Tensor]):
    """Its items call the model that the parent records, with gradients, as an augmentation might."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> Tensor:
        began = time.monotonic()
        recorder.scalar("of a worker", i)
        self.model(recorder.tap("of a worker", torch.ones(2, 4))).sum().backward()
        assert [t.name for t in threading.enumerate() if t.name.startswith("recorder")] == []
        return torch.tensor(time.monotonic() - began)


def loaders(training: Any, attach: Callable[[], Any]) -> None:
    """Many epochs of forked workers, while the writer is busy all the time."""
    with attach():
        slowest_s = 0.0
        for _ in range(5):
            loader = DataLoader(Data(training.model), batch_size=2, num_workers=2, multiprocessing_context="fork")
            for seconds in loader:
                slowest_s = max(slowest_s, float(seconds.max()))
                training.steps(3)
    assert slowest_s < 20, slowest_s


def forks(training: Any, attach: Callable[[], Any]) -> None:
    """Children that train on and end in each way, and a child of a child; the parent's files are the parent's."""
    attachment = attach()
    training.steps(5)
    gc.freeze()  # each child ends as an interpreter does
    for how in ("exit", "_exit", "exception", "grandchild", "attach", "flush"):
        child = os.fork()
        if child == 0:
            training.steps(5)
            if how == "_exit":
                os._exit(7)
            if how == "exception":
                sys.stderr = open(os.devnull, "w")  # noqa: SIM115
                raise ArithmeticError("of a child")
            if how == "grandchild":
                grandchild = os.fork()
                training.steps(2)
                sys.exit(8 if grandchild == 0 else os.waitstatus_to_exitcode(os.waitpid(grandchild, 0)[1]))
            if how == "attach":  # asked for, so it is a recording of its own
                with recorder.attach(training.model, enabled=True, rules="site=output keep=stats", dir="of_child"):
                    training.steps(3)
            if how == "flush":
                assert attachment.flush() or True
                attachment.close()
                assert attachment.run_dir is not None
            sys.exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(how, code, flush=True)
        training.steps(1)
    attachment.close()


def forks_and_signals(training: Any, attach: Callable[[], Any]) -> None:
    """A signal to a child that has only just begun is not the parent's, at whatever instant it comes."""
    with attach():
        codes = set()
        for i in range(60):
            child = os.fork()
            if child == 0:
                time.sleep(5)
                os._exit(0)
            if i % 3 == 0:
                time.sleep(0.0003 * (i % 5))
            os.kill(child, signal.SIGUSR1)
            codes.add(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
            training.steps(1)
        time.sleep(0.8)  # were the signal taken for ours, the process would end now
        print(codes == {-signal.SIGUSR1})


def threads_and_forks(training: Any, attach: Callable[[], Any]) -> None:
    """Forks of one thread while another records: whatever it holds at that instant, the child does not wait for it."""
    with attach():
        is_over = threading.Event()

        def record() -> None:
            while not is_over.is_set():
                recorder.scalar("beside", 1.0)
                recorder.tap("beside", torch.ones(1000))

        thread = threading.Thread(target=record)
        thread.start()
        for _ in range(8):
            child = os.fork()
            if child == 0:
                recorder.scalar("of a child", 1.0)
                training.model(torch.ones(3, 4))
                with recorder.attach(training.model, enabled=True, rules="site=tap keep=stats", dir="of_child"):
                    pass
                os._exit(0)
            until_s = time.monotonic() + 10
            while os.waitpid(child, os.WNOHANG) == (0, 0):
                assert time.monotonic() < until_s, "a child hangs"
                time.sleep(0.001)
        is_over.set()
        thread.join()


def interrupts(training: Any, attach: Callable[[], Any]) -> None:
    """A timer of 100 us whose handler records and flushes, finalizers and collector callbacks that record."""
    counts = {"handler": 0, "finalizer": 0, "collector": 0}

    def handle(number: int, frame: FrameType | None) -> None:
        counts["handler"] += 1
        recorder.scalar("of the handler", 1.0)
        recorder.tap("of the handler", torch.ones(10))
        if counts["handler"] % 300 == 0:
            attachment.flush(0.2)
        signal.setitimer(signal.ITIMER_REAL, 0.0001)  # not periodic: it would leave no time for anything else

    class Finalized:
        def __init__(self) -> None:
            self.me = self

        def __del__(self) -> None:
            counts["finalizer"] += 1
            recorder.scalar("of a finalizer", 1.0)

    def collected(phase: str, info: dict[str, int]) -> None:
        counts["collector"] += 1
        recorder.scalar("of the collector", 1.0)

    faulthandler.dump_traceback_later(40)  # a deadlock prints every stack before it is ended
    signal.signal(signal.SIGALRM, handle)
    attachment = attach()
    gc.callbacks.append(collected)
    gc.set_threshold(50)
    signal.setitimer(signal.ITIMER_REAL, 0.0001)
    until_s = time.monotonic() + 2
    while time.monotonic() < until_s:
        training.steps(1)
        Finalized()
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    gc.set_threshold(700)
    gc.callbacks.remove(collected)
    gc.collect()
    attachment.close()
    assert min(counts.values()) > 10, counts
    print("done")


def cycles(training: Any, attach: Callable[[], Any]) -> None:
    """Attach and close again and again: no thread, descriptor or hook more than after the first time."""

    def state() -> tuple[int, int, int]:
        hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in training.model.modules())
        return len(os.listdir("/proc/self/fd")), threading.active_count(), hooks

    os.environ["TORCHELASTIC_RUN_ID"] = "00000000-0000-0000-0000-000000000001"  # one run of many writers
    found = set()
    for i in range(12):
        with attach():
            training.steps(2)
        if i:
            found.add(state())
    print(len(found))
    with attach(), contextlib.suppress(ZeroDivisionError), attach():
        training.steps(1)
        raise ZeroDivisionError
    print(state() in found)


def small_memory(training: Any, attach: Callable[[], Any]) -> None:
    """No room for the pool: said, and training goes on."""
    import resource

    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()  # noqa: SIM115
    resource.setrlimit(resource.RLIMIT_AS, (used + (128 << 20), resource.RLIM_INFINITY))
    attachment = attach()
    training.steps(3)
    recorder.scalar("loss", 1.0)
    attachment.close()
    print(attachment.run_dir, [t.name for t in threading.enumerate()])


def no_threads(training: Any, attach: Callable[[], Any]) -> None:
    """No thread can be started: said, and training goes on."""
    start = threading.Thread.start

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    threading.Thread.start = refuse  # type: ignore[method-assign]
    attachment = attach()
    training.steps(3)
    attachment.close()
    threading.Thread.start = start  # type: ignore[method-assign]
    print([signal.getsignal(n) == signal.SIG_DFL for n in (signal.SIGTERM, signal.SIGUSR1)], signal.set_wakeup_fd(-1))


def closes_descriptors(training: Any, attach: Callable[[], Any]) -> None:
    """What a program does that becomes a daemon: it closes all there is, and opens files of its own."""
    with attach():
        training.steps(20, pause_s=0.01)
        os.closerange(3, 256)
        files = [os.open(f"file.{i}", os.O_RDWR | os.O_CREAT) for i in range(24)]
        training.reopen()
        training.steps(60, pause_s=0.01)
    print([os.fstat(file).st_size for file in files] == [0] * 24)
    print([os.write(file, b"mine") for file in files] == [4] * 24)
