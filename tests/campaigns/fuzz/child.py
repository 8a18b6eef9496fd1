"""Owns the containment: checks over hostile files run in forked children with little memory, little time, no reach.

A crash, a hang or a write elsewhere is named with the case that caused it, and the next child goes on behind it. Must
never let a child return into the caller's stack.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import json
import os
import resource
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

MEMORY_BYTES = 3 << 29
"""What a child may take beyond what it was forked with: 1.5 GiB."""
LIMIT_S = 20.0
"""For one case, on a machine that is busy with others."""

_WRITES = {
    "os.mkdir": ((0, 2),), "os.chmod": ((0, 2),), "os.remove": ((0, 1),), "os.rmdir": ((0, 1),),
    "os.truncate": ((0, 9),), "os.rename": ((0, 2), (1, 3)), "os.link": ((1, 3),), "os.symlink": ((1, 2),),
}  # fmt: skip
"""Audit events, with the argument indices of paths and of the directory descriptors that these are relative to."""
_NEVER = ("pickle.find_class", "socket.connect", "socket.bind", "subprocess.Popen", "os.system", "os.exec",
          "os.posix_spawn", "os.fork")  # fmt: skip


class Verdict(NamedTuple):
    case: int
    finding: str
    """Empty where all is well."""
    max_bytes: int
    """Most memory of the child so far, resident, beyond what it was forked with."""


class Reach:
    """Where code may write, and what it must never do; kept by Python's own audit events."""

    def __init__(self) -> None:
        self.allowed: tuple[str, ...] | None = None
        self.broken: list[str] = []

    def audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        """The hook; it never raises, so that code under test goes its own way."""
        if self.allowed is None:
            return
        if event == "open":
            path, mode, flags = (*arguments, None, None)[:3]
            is_write = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC)
            if is_write or (isinstance(mode, str) and set(mode) & set("wax+")):
                self._judge(event, path)
        elif event in _WRITES:
            for at, folder in _WRITES[event]:
                self._judge(event, arguments[at], arguments[folder] if folder < len(arguments) else -1)
        elif event in _NEVER:
            self.broken.append(f"{event} {arguments!r:.200}")

    def _judge(self, event: str, path: Any, folder: int | None = -1) -> None:
        """Judge a path, relative to a directory descriptor where that is not -1."""
        if not isinstance(path, str | bytes):
            return  # a descriptor, which was opened by name before
        text = os.fsdecode(path)
        if folder is not None and folder >= 0 and not os.path.isabs(text):
            text = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), text)
        real = os.path.join(os.path.realpath(os.path.dirname(text) or "."), os.path.basename(text))
        if self.allowed is not None and not real.startswith(self.allowed):
            self.broken.append(f"{event} of {text!r}, outside {self.allowed}")


REACH = Reach()
_is_hooked = False


@contextlib.contextmanager
def reaching(*folders: Path) -> Iterator[list[str]]:
    """Only in a child: what is done elsewhere than in `folders`, or never to be done, is in the list at the end."""
    global _is_hooked
    if not _is_hooked:
        sys.addaudithook(REACH.audit)
        _is_hooked = True
    REACH.broken = []
    REACH.allowed = (*(os.path.realpath(folder) for folder in folders), "/dev/null", "/dev/fd/")
    try:
        yield REACH.broken
    finally:
        REACH.allowed = None


def contain(
    check: Callable[[int], str],
    cases: Sequence[int],
    *,
    memory_bytes: int = MEMORY_BYTES,
    limit_s: float = LIMIT_S,
    cases_a_child: int = 200,
) -> Iterator[Verdict]:
    """Run `check(case)` for each case in forked children; what it returns or raises is a finding.

    A child has `memory_bytes` of address space beyond what it is forked with, and `limit_s` for each case. A fresh
    child comes after `cases_a_child`, so that memory that is never given back does not add up.
    """
    done = 0
    while done < len(cases):
        chunk = cases[done : done + cases_a_child]
        for verdict in _one_child(check, chunk, memory_bytes, limit_s):
            done += 1
            yield verdict


def _one_child(
    check: Callable[[int], str], cases: Sequence[int], memory_bytes: int, limit_s: float
) -> Iterator[Verdict]:
    """Verdicts up to and including the case that ends the child."""
    with tempfile.TemporaryFile() as trace:
        reader, writer = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            os.close(reader)
            _be_child(check, cases, memory_bytes, limit_s, writer, trace)
        os.close(writer)
        at = 0
        try:
            for line in _lines(reader, limit_s + 2):
                if line is None:
                    os.kill(pid, signal.SIGKILL)
                    break
                case, finding, max_bytes = json.loads(line)
                yield Verdict(case, finding, max_bytes)
                at += 1
        finally:
            os.close(reader)
            with contextlib.suppress(ProcessLookupError):
                if at < len(cases):
                    os.kill(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
        if at < len(cases):
            trace.seek(0)
            said = trace.read().decode(errors="replace")
            ended = os.waitstatus_to_exitcode(status)
            how = "took longer than allowed" if ended == -signal.SIGKILL else f"ended by {ended}"
            yield Verdict(cases[at], f"CRASH: the process {how}\n{said[-3000:]}", 0)


def _be_child(
    check: Callable[[int], str], cases: Sequence[int], memory_bytes: int, limit_s: float, writer: int, trace: BinaryIO
) -> None:
    gc.freeze()  # so that no child walks through, and copies, what all share
    try:
        faulthandler.enable(trace)
        # Not `dump_traceback_later`: where pytest called that in the parent, it waits here for a thread that is not.
        faulthandler.register(signal.SIGALRM, trace, all_threads=True)
        limit_bytes = _address_bytes() + memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        at_first = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for case in cases:
            signal.setitimer(signal.ITIMER_REAL, limit_s)
            try:
                finding = check(case)
            except BaseException:  # whatever comes out of it is the finding
                finding = traceback.format_exc(limit=-5)[-4000:]
            signal.setitimer(signal.ITIMER_REAL, 0)
            max_bytes = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - at_first)
            os.write(writer, json.dumps([case, finding[:8000], max_bytes]).encode() + b"\n")
    finally:
        os._exit(0)


def _address_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _lines(reader: int, limit_s: float) -> Iterator[bytes | None]:
    """The lines of a pipe; None where no line comes for too long."""
    pending, deadline_s = b"", time.monotonic() + limit_s
    while True:
        if not select.select([reader], [], [], max(deadline_s - time.monotonic(), 0))[0]:
            yield None
            return
        piece = os.read(reader, 1 << 16)
        if not piece:
            return
        *whole, pending = (pending + piece).split(b"\n")
        for line in whole:
            deadline_s = time.monotonic() + limit_s
            yield line
