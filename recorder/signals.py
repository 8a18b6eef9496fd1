"""Signals that end a process: what is in memory reaches the disk before it goes, and it goes as it would have.

A signal is taken over only where its action is the default one, and nobody can tell: a program that asks is told
SIG_DFL. Handlers of others, of Python or of C, and ignored signals are never touched; where one of Python runs, the
data are flushed beside it, on a thread of ours. The main thread may be stuck in a collective and never run a handler:
then that thread ends the process, by the same signal.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found] # what the module `signal` wraps
import contextlib
import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

from .descriptors import Descriptor

_ENDING = frozenset({signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2})
"""Signals by which launchers and schedulers announce the end, or ask for a checkpoint before it."""
_STOP = 0
_MAIN_THREAD_GRACE_S = 0.5
"""How long the main thread has to run its handler before the watching thread acts."""
_NAP_S = 0.05
"""Signals of others, such as a profiler's timer, wake the watching thread no oftener than this."""
_SIGACTION_BYTES = 512
"""More than any system's ``struct sigaction``, which begins with the handler."""

_OF_THREADS = frozenset({signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT, signal.SIGTRAP})
"""What a thread brings upon itself; these may not be blocked."""

_leftover_pipes: list[_Pipe] = []
"""Pipes that somebody may still make the wake-up descriptor again; reused, and never closed."""
_masks: dict[int, set[signal.Signals]] = {}


class _Pipe:
    """By which the watching thread is woken. The program may have closed either end, or both, and reused its number."""

    def __init__(self) -> None:
        self.read_end, self.write_end = map(Descriptor.of, os.pipe())
        os.set_blocking(self.write_end, False)

    @property
    def is_ours(self) -> bool:
        return self.read_end.is_ours and self.write_end.is_ours

    def read(self) -> bytes:
        """What has come, or comes next; nothing where the pipe is gone."""
        with contextlib.suppress(OSError):
            if self.read_end.is_ours:
                return os.read(self.read_end, 4096)
        return b""

    def write(self, number: int) -> None:
        """Wake the thread, if the pipe has room."""
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
    """Callable, and equal to SIG_DFL: `signal.getsignal` and `signal.signal` answer as they would without us.

    So a program that looks whether a signal is free, or chains to the handler before its own, does what it would do.
    """

    watch: TerminationWatch | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.watch is not None:
            self.watch._handle(number)
        else:
            _die_of(number)


def _die_of(number: int) -> None:
    ctypes.CDLL(None).signal(int(number), 0)  # SIG_DFL; signal.signal works in the main thread only
    os.kill(os.getpid(), number)


def _action(number: int) -> int:
    """The address of a signal's handler as the kernel has it; 0 is the default action, 1 is to ignore.

    Python does not know of handlers that C code installs, as `faulthandler.register` does.
    """
    found = ctypes.create_string_buffer(_SIGACTION_BYTES)
    if ctypes.CDLL(None).sigaction(int(number), None, found) != 0:
        return 1
    return ctypes.c_void_p.from_buffer(found).value or 0


class TerminationWatch:
    """The signals that end the process, while a recording runs; owns the watching thread."""

    def __init__(self, *, flush: Callable[[], object], finish: Callable[[], object], deadline_s: float) -> None:
        """Nothing happens before `install`.

        Args:
            flush: bring what is in memory to disk; bounded in time, any thread.
            finish: the same and end the recording; the process is about to go.
            deadline_s: what `finish` may take; the process goes soon after, whatever `finish` does.
        """
        self._flush = flush
        self._finish = finish
        self._deadline_s = deadline_s
        self._handlers: dict[int, tuple[_Handler, int]] = {}
        """With what the kernel has since we took each signal over."""
        self._pipe: _Pipe | None = None
        self._thread: threading.Thread | None = None
        self._is_ending = self._is_main_ending = False
        self._pid = os.getpid()

    def install(self) -> None:
        """Take over the default actions, and share the wake-up descriptor; only the main thread can."""
        if threading.current_thread() is not threading.main_thread():
            return
        _leftover_pipes[:] = [pipe for pipe in _leftover_pipes if pipe.is_ours]
        self._pipe = _leftover_pipes.pop() if _leftover_pipes else _Pipe()
        self._pipe.empty()
        other = signal.set_wakeup_fd(self._pipe.write_end, warn_on_full_buffer=False)
        if other != -1:  # an event loop needs it more than we do
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
        """In the main thread: end the recording, and go."""
        if self._pid == 1:
            return  # the kernel spares the first process of a container; the watching thread flushes
        if self._is_main_ending:
            return  # to the signal that came first
        if os.getpid() == self._pid:
            self._is_main_ending = True
            while self._is_ending:  # the watching thread could not wait for us
                time.sleep(_NAP_S)
            self._is_ending = True
            if self._pipe is not None:  # so that the watching thread bounds what follows
                self._pipe.write(number)
            self._finish()
        _die_of(number)

    def _watch(self) -> None:
        """The watching thread: end the process where a signal says so, flush where somebody else handles it."""
        pipe = self._pipe
        assert pipe is not None
        while numbers := pipe.read():
            ending = next((number for number in numbers if self._is_ours(number)), None)
            if ending is not None and self._pid != 1:
                self._end_process(ending)
                return
            if _STOP in numbers:
                return
            if not _ENDING.isdisjoint(numbers):
                with contextlib.suppress(Exception):
                    self._flush()
            time.sleep(_NAP_S)

    def _end_process(self, number: int) -> None:
        until_s = time.monotonic() + _MAIN_THREAD_GRACE_S + self._deadline_s + 1.0
        time.sleep(_MAIN_THREAD_GRACE_S)
        if not self._is_ending:  # the main thread is stuck, perhaps in a collective
            self._is_ending = True
            # Not in this thread: a log handler may hang on a lock that the main thread holds.
            ender = threading.Thread(target=self._finish, name="recorder-end", daemon=True)
            with contextlib.suppress(RuntimeError):
                ender.start()
                ender.join(self._deadline_s + 1.0)
        else:
            while time.monotonic() < until_s:
                time.sleep(_NAP_S)
        _die_of(number)

    def uninstall(self) -> None:
        """Give everything back, unless someone else has taken it since."""
        if self._is_ending or self._pipe is None:
            return
        self._give_back_handlers()
        is_pipe_free = False
        with contextlib.suppress(ValueError):  # not the main thread
            is_pipe_free = _release_wakeup(self._pipe.write_end)
        pipe, self._pipe = self._pipe, None
        pipe.write(_STOP)
        assert self._thread is not None
        if self._thread is not threading.current_thread():
            self._thread.join(self._deadline_s)
        if is_pipe_free and not self._thread.is_alive():
            pipe.close()
        elif not self._thread.is_alive():
            _leftover_pipes.append(pipe)

    def _give_back_handlers(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            for handler, _ in self._handlers.values():
                handler.watch = None  # it stays, and does what the default action does
            return
        for number, (handler, action) in self._handlers.items():
            handler.watch = None
            if _signal.getsignal(number) is handler and _action(number) == action:
                # The kernel first: Python warns of a signal that comes while its handler is being taken away.
                ctypes.CDLL(None).signal(int(number), 0)
                signal.signal(number, signal.SIG_DFL)

    def abandon(self) -> None:
        """In a forked child: the default actions again, and no byte into the parent's pipe."""
        if self._pipe is None:
            return
        with contextlib.suppress(ValueError):
            self._give_back_handlers()
            _release_wakeup(self._pipe.write_end)
        self._pipe.close()
        self._pipe = None

    def hold(self) -> None:
        """Before a fork: a signal to the child must not be written into the parent's pipe, which would end it."""
        ours = {number for number in self._handlers if self._is_ours(number)}
        _masks[threading.get_ident()] = signal.pthread_sigmask(signal.SIG_BLOCK, ours)  # type: ignore[assignment]

    @staticmethod
    def release() -> None:
        """After it, in both processes."""
        mask = _masks.pop(threading.get_ident(), None)
        if mask is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@contextlib.contextmanager
def replaced_interrupts(handle: Callable[[], None]) -> Iterator[None]:
    """While the interpreter ends: Ctrl-C calls this function, where it would raise KeyboardInterrupt."""
    is_replaced = False
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        with contextlib.suppress(ValueError):  # not the main thread
            signal.signal(signal.SIGINT, lambda number, frame: handle())
            is_replaced = True
    try:
        yield
    finally:
        if is_replaced:
            signal.signal(signal.SIGINT, signal.default_int_handler)


@contextlib.contextmanager
def blocked_in_new_threads() -> Iterator[None]:
    """Threads that are started here take no signal that is sent to the process.

    A program that blocks a signal, while it writes a checkpoint say, would have it delivered to a thread of ours.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - _OF_THREADS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _release_wakeup(write_end: int) -> bool:
    """Whether the wake-up descriptor was ours; it is nobody's then."""
    current = signal.set_wakeup_fd(-1)
    if current not in (-1, write_end):
        signal.set_wakeup_fd(current)
    return current == write_end
