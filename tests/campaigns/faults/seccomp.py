"""Owns real failures of system calls: a seccomp filter makes the kernel answer with an errno, from an instant on.

Needs no privilege and no tool. A filter stays until its process (or thread) ends; nothing here can take it back.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import platform
import select
import struct
import sys
import threading
from collections.abc import Collection, Mapping

NUMBERS = {
    "write": 1,
    "close": 3,
    "pwritev": 296,
    "pwritev2": 328,
    "fsync": 74,
    "ftruncate": 77,
    "rename": 82,
    "mkdir": 83,
    "link": 86,
    "unlink": 87,
    "statfs": 137,
    "openat": 257,
    "linkat": 265,
    "renameat2": 316,
    "fstatfs": 138,
}
"""System calls by name, as x86_64 numbers them."""
_PR_SET_NO_NEW_PRIVS = 38
_SECCOMP = 317
_SET_MODE_FILTER = 1
_EVERY_THREAD, _NEW_LISTENER, _ERROR_IF_UNEQUAL = 1, 8, 16
_LOAD_NUMBER = (0x20, 0, 0, 0)
_RETURN, _IF_EQUAL = 0x06, 0x15
_ALLOW, _ERRNO, _ASK = 0x7FFF0000, 0x00050000, 0x7FC00000
_RECEIVE, _SEND, _CONTINUE = 0xC0502100, 0xC0182101, 1
_QUESTION_BYTES = 80


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def is_possible() -> bool:
    return sys.platform == "linux" and platform.machine() == "x86_64"


def fail(calls: Mapping[str, int], *, every_thread: bool = True) -> None:
    """Let these system calls, names of `NUMBERS`, fail from now on with their errno, here and in all children.

    Without `every_thread`, they fail in the calling thread and those that it starts. OSError: the kernel refused the
    filter.
    """
    answers = {name: _ERRNO | code for name, code in calls.items()}
    if _install(answers, _EVERY_THREAD if every_thread else 0) != 0:
        raise OSError("a thread has another filter")


class Stall:
    """System calls that hang in the kernel, in every thread of this process, while `is_on` is not set to False."""

    def __init__(self, calls: Collection[str]) -> None:
        """Put the filter in place; nothing hangs yet. OSError: the kernel refused the filter."""
        self._goes_on = threading.Event()
        self._goes_on.set()
        flags = _EVERY_THREAD | _NEW_LISTENER | _ERROR_IF_UNEQUAL
        self._listener = _install(dict.fromkeys(calls, _ASK), flags)
        self.num_held = 0
        threading.Thread(target=self._answer, name="stall", daemon=True).start()

    def begin(self) -> None:
        self._goes_on.clear()

    def end(self) -> None:
        """Those that hang are done, and so is what comes."""
        self._goes_on.set()

    def _answer(self) -> None:
        while True:
            select.select([self._listener], [], [])
            question = bytearray(_QUESTION_BYTES)
            fcntl.ioctl(self._listener, _RECEIVE, question)
            if not self._goes_on.is_set():
                self.num_held += 1
                self._goes_on.wait()
            (number,) = struct.unpack_from("<Q", question)
            fcntl.ioctl(self._listener, _SEND, bytearray(struct.pack("<QqiI", number, 0, 0, _CONTINUE)))


def _install(answers: Mapping[str, int], flags: int) -> int:
    instructions = [_LOAD_NUMBER]
    for name, answer in answers.items():
        instructions += [(_IF_EQUAL, 0, 1, NUMBERS[name]), (_RETURN, 0, 0, answer)]
    instructions.append((_RETURN, 0, 0, _ALLOW))
    text = b"".join(struct.pack("<HBBI", *instruction) for instruction in instructions)
    memory = ctypes.create_string_buffer(text, len(text))
    program = _Program(len(instructions), ctypes.addressof(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    result: int = libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if result == 0:
        result = libc.syscall(_SECCOMP, _SET_MODE_FILTER, flags, ctypes.byref(program))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), "seccomp")
    return result
