"""Handles signals that end the process: data in memory is written first, and the process ends as without the recorder.

A signal is taken over only if its action is the default one. The program cannot notice: `signal.getsignal` returns
SIG_DFL. Ignored signals and handlers of other code, in Python or in C, are never touched. While such a Python handler
runs, a thread of the recorder flushes the data. If the main thread is stuck in a collective and never runs a handler,
the thread of the recorder ends the process, by the same signal.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found] # what the module `signal` wraps
import builtins
import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType

from ..system.processes import Descriptor

_ENDING = frozenset({signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2})
"""The signals by which launchers and schedulers announce the end, or request a checkpoint before the end."""
_STOP = 0
_MAIN_THREAD_GRACE_S = 0.5
"""The seconds in which the main thread may run its handler before the watching thread acts."""
_NAP_S = 0.05
"""The seconds that the watching thread sleeps after each wake-up, so that a profiler's timer cannot keep it busy."""
_SIGACTION_BYTES = 512
"""A size in bytes, larger than ``struct sigaction`` on any system. The struct begins with the handler."""

_OF_THREADS = frozenset({signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT, signal.SIGTRAP})
"""The signals that a thread causes itself by a fault. They must not be blocked."""

_leftover_pipes: list[_Pipe] = []
"""Pipes of former watches. Other code may restore one as wake-up descriptor. So pipes are reused, and never closed."""
_masks: dict[int, set[signal.Signals]] = {}


class _Pipe:
    """The pipe that wakes the watching thread. The program may close an end, and reuse its number for another file."""

    def __init__(self) -> None:
        self.read_end, self.write_end = map(Descriptor.of, os.pipe())
        os.set_blocking(self.write_end, False)

    @property
    def is_ours(self) -> bool:
        return self.read_end.is_ours and self.write_end.is_ours

    def read(self) -> bytes:
        """Wait for bytes in the pipe, and return them. Return no bytes if the pipe is closed."""
        with contextlib.suppress(OSError):
            if self.read_end.is_ours:
                return os.read(self.read_end, 4096)
        return b""

    def write(self, number: int) -> None:
        """Wake the watching thread, unless the pipe is full."""
        with contextlib.suppress(OSError):
            if self.write_end.is_ours:
                os.write(self.write_end, bytes([number]))

    def empty(self) -> None:
        os.set_blocking(self.read_end, False)
        with contextlib.suppress(BlockingIOError):
            while os.read(self.read_end, 4096):
                pass
        os.set_blocking(self.read_end, True)

    def close(self) -> None:
        for end in (self.read_end, self.write_end):
            if end.is_ours:
                os.close(end)


class _Handler(int):
    """A handler that equals SIG_DFL, so that `signal.getsignal` and `signal.signal` answer as without the recorder.

    A program that checks whether a signal is free, or calls the old handler from its own handler, behaves as usual.
    """

    watch: TerminationWatch | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.watch is not None:
            self.watch._handle(number)
        else:
            _die_of(number)


def _die_of(number: int) -> None:
    ctypes.CDLL(None).signal(int(number), 0)  # C code sets SIG_DFL, because signal.signal works only in the main thread
    os.kill(os.getpid(), number)


def _action(number: int) -> int:
    """Return the address of a signal's handler, from the kernel. 0 is the default action; 1 ignores the signal.

    Python does not know handlers that C code installs, for example by `faulthandler.register`.
    """
    action = ctypes.create_string_buffer(_SIGACTION_BYTES)
    if ctypes.CDLL(None).sigaction(int(number), None, action) != 0:
        return 1
    return ctypes.c_void_p.from_buffer(action).value or 0


@dataclass(eq=False, kw_only=True)
class TerminationWatch:
    """Handles the signals that end the process while a recording runs. It has a watching thread; see `install`."""

    flush: Callable[[], object]
    """Brings the data in memory to disk, in bounded time. Called on any thread."""
    finish: Callable[[], object]
    """Does what `flush` does and ends the recording, because the process is about to end."""
    deadline_s: float
    """The seconds for `finish`. The process ends soon after them, whatever `finish` does."""
    ending: Callable[[int], object]
    """A function that is called with the signal just before `finish`. It must not wait."""
    trigger: int | None
    """A signal on which `triggered` is called. Only the program's own handler may end the process."""
    triggered: Callable[[], object]
    """A function that is called on a thread of the recorder or in the main thread, perhaps twice. It must not wait."""

    def __post_init__(self) -> None:
        self._handlers: dict[int, tuple[_Handler, int]] = {}
        """For each signal, the recorder's handler and the address that the kernel has for this handler."""
        self._pipe: _Pipe | None = None
        self._thread: threading.Thread | None = None
        self._is_ending = self._is_main_ending = False
        self._pid = os.getpid()

    def install(self) -> None:
        """Take over signals whose action is the default, and the wake-up descriptor if it is free. Main thread only."""
        if threading.current_thread() is not threading.main_thread():
            return
        _leftover_pipes[:] = [pipe for pipe in _leftover_pipes if pipe.is_ours]
        self._pipe = _leftover_pipes.pop() if _leftover_pipes else _Pipe()
        self._pipe.empty()
        other = signal.set_wakeup_fd(self._pipe.write_end, warn_on_full_buffer=False)
        if other != -1:  # an event loop uses the wake-up descriptor, and needs it more
            signal.set_wakeup_fd(other)
        self._thread = threading.Thread(target=self._watch, name="recorder-signals", daemon=True)
        with blocked_in_new_threads():
            self._thread.start()
        for number in _ENDING:
            if _action(number) == 0 or isinstance(_signal.getsignal(number), _Handler):
                handler = _Handler(signal.SIG_DFL)
                handler.watch = self
                _signal.signal(number, handler)
                self._handlers[number] = handler, _action(number)

    def _is_ours(self, number: int) -> bool:
        return number in self._handlers and _signal.getsignal(number) is self._handlers[number][0]

    def _handle(self, number: int) -> None:
        if number == self.trigger and os.getpid() == self._pid:
            self.triggered()
            return
        if self._pid == 1:
            return  # the kernel ignores the signal for process 1 of a container, and the watching thread flushes
        if self._is_main_ending:
            return  # the handler of the first signal is still running
        if os.getpid() == self._pid:
            self._is_main_ending = True
            while self._is_ending:  # the watching thread is ending the process
                time.sleep(_NAP_S)
            self._is_ending = True
            if self._pipe is not None:  # the watching thread bounds the time of the code below
                self._pipe.write(number)
            self.ending(number)
            self.finish()
        _die_of(number)

    def _watch(self) -> None:
        """Run the watching thread. A signal that was taken over ends the process; any other signal causes a flush."""
        pipe = self._pipe
        assert pipe is not None
        while numbers := pipe.read():
            if self.trigger is not None and self.trigger in numbers:  # the main thread may be stuck and run no handler
                self.triggered()
                numbers = bytes(number for number in numbers if number != self.trigger)
            ending = next((number for number in numbers if self._is_ours(number)), None)
            if ending is not None and self._pid != 1:
                self._end_process(ending)
                return
            if _STOP in numbers:
                return
            if not _ENDING.isdisjoint(numbers):
                if signal.SIGTERM in numbers:  # the program's handler ends the process, or process 1 goes on
                    self.ending(signal.SIGTERM)
                with contextlib.suppress(Exception):
                    self.flush()
            time.sleep(_NAP_S)

    def _end_process(self, number: int) -> None:
        until_s = time.monotonic() + _MAIN_THREAD_GRACE_S + self.deadline_s + 1.0
        time.sleep(_MAIN_THREAD_GRACE_S)
        if not self._is_ending:  # the main thread is stuck, perhaps in a collective
            self._is_ending = True
            self.ending(number)
            # Another thread runs `finish`, because a log handler may wait for a lock that the main thread holds.
            ender = threading.Thread(target=self.finish, name="recorder-end", daemon=True)
            with contextlib.suppress(RuntimeError):
                ender.start()
                ender.join(self.deadline_s + 1.0)
        else:
            while time.monotonic() < until_s:
                time.sleep(_NAP_S)
        _die_of(number)

    def uninstall(self) -> None:
        """Restore handlers and wake-up descriptor, unless the program has replaced them."""
        if self._is_ending or self._pipe is None:
            return
        self._give_back_handlers()
        is_pipe_free = False
        with contextlib.suppress(ValueError):  # signal.signal works only in the main thread
            is_pipe_free = _release_wakeup(self._pipe.write_end)
        pipe, self._pipe = self._pipe, None
        pipe.write(_STOP)
        assert self._thread is not None
        if self._thread is not threading.current_thread():
            self._thread.join(self.deadline_s)
        if is_pipe_free and not self._thread.is_alive():
            pipe.close()
        elif not self._thread.is_alive():
            _leftover_pipes.append(pipe)

    def _give_back_handlers(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            for handler, _ in self._handlers.values():
                handler.watch = None  # the handler stays installed, and acts like the default action
            return
        for number, (handler, action) in self._handlers.items():
            handler.watch = None
            if _signal.getsignal(number) is handler and _action(number) == action:
                # The kernel's handler is reset first. Python warns of a signal that comes while a handler is being
                # removed.
                ctypes.CDLL(None).signal(int(number), 0)
                signal.signal(number, signal.SIG_DFL)

    def abandon(self) -> None:
        """Restore the default actions in a forked child, without writing a byte into the parent's pipe."""
        if self._pipe is None:
            return
        with contextlib.suppress(ValueError):
            self._give_back_handlers()
            _release_wakeup(self._pipe.write_end)
        self._pipe.close()
        self._pipe = None

    def hold(self) -> None:
        """Block signals before a fork. A signal to the child would enter the parent's pipe, and end the parent."""
        ours = {number for number in self._handlers if self._is_ours(number)}
        _masks[threading.get_ident()] = signal.pthread_sigmask(signal.SIG_BLOCK, ours)  # type: ignore[assignment]

    @staticmethod
    def release() -> None:
        """Unblock signals after a fork, in both processes."""
        mask = _masks.pop(threading.get_ident(), None)
        if mask is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def unhandled_exception() -> BaseException | None:
    """Return the exception that ends the program, as the interpreter has stored it, or None.

    In an interactive session the result is None, because an exception ends one line only.
    """
    if hasattr(sys, "ps1") or hasattr(builtins, "__IPYTHON__"):
        return None
    error = getattr(sys, "last_value", None)
    return error if isinstance(error, BaseException) else None


@contextlib.contextmanager
def replaced_interrupts(handle: Callable[[], None]) -> Iterator[None]:
    """Let Ctrl-C call a function instead of raising KeyboardInterrupt, while the interpreter shuts down."""
    is_replaced = False
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        with contextlib.suppress(ValueError):  # signal.signal works only in the main thread
            signal.signal(signal.SIGINT, lambda number, frame: handle())
            is_replaced = True
    try:
        yield
    finally:
        if is_replaced:
            signal.signal(signal.SIGINT, signal.default_int_handler)


@contextlib.contextmanager
def blocked_in_new_threads() -> Iterator[None]:
    """Block all signals in the threads that are started in the ``with`` block.

    Otherwise a signal that a program blocks, for example during a checkpoint, would go to a thread of the recorder.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - _OF_THREADS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _release_wakeup(write_end: int) -> bool:
    current = signal.set_wakeup_fd(-1)
    if current not in (-1, write_end):
        signal.set_wakeup_fd(current)
    return current == write_end
