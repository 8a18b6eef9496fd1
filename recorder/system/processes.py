"""What can be asked about this process and others: cores, imported modules, and whether a recorded process still runs.

A process number alone does not identify a process: the kernel uses numbers again, and each container has its own. Must
never signal a process, or import a module of the program.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import sysconfig
from pathlib import Path
from typing import Any

_IMPORT_S = 1.0
"""Less processor time than an import of torch takes, in seconds."""


def available_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def is_program() -> bool:
    """Whether this process runs a program of the user's, and has left the work to no child.

    It is none where Python was given no file, or an installed one, as in launchers and compile workers. A launcher that
    is a file of the user's has had children that used more processor time than an import of torch.
    """
    main = Path(next(iter(sys.argv), ""))  # `__main__` has lost its file by the time of exit functions
    parent = loaded("multiprocessing", "parent_process")
    installed = {"site-packages", "dist-packages"}.intersection(main.parts)
    is_child = parent is not None and parent() is not None
    if main.suffix != ".py" or installed or is_child or main.is_relative_to(sysconfig.get_path("stdlib")):
        return False
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime < _IMPORT_S


def own_process() -> dict[str, Any]:
    """Return the members by which a manifest names this process, for `runs` to read."""
    pid = os.getpid()
    return {"host": os.uname().nodename, "pid": pid, "process": f"{_realm()}:{_started(pid)}"}


def runs(host: str, pid: int, process: str | None) -> bool | None:
    """Whether the process that wrote a manifest still runs.

    Args:
        host: where it ran.
        pid: its number there.
        process: which process of that number; None where nothing says it.

    Returns:
        None where that cannot be told from here: on another host, in another container, before a boot of this one.
    """
    if host != os.uname().nodename or pid <= 0:
        return None
    if process is None:  # version 1.0 did not say more
        return _exists(pid)
    realm, _, started = process.rpartition(":")
    if realm != _realm():
        return None
    return _exists(pid) and _started(pid) in (started, "")


def _exists(pid: int) -> bool:
    """Whether there is such a process and it has not ended; a zombie has."""
    if _stat(pid)[:1] == ["Z"]:
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def _realm() -> str:
    """Return the boot of this kernel and the namespace in which it numbers processes; empty where there is no /proc."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}:{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


def _started(pid: int) -> str:
    """Return when a process began, in ticks since the boot; empty where /proc does not show it."""
    return next(iter(_stat(pid)[19:20]), "")


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on; none where there is no /proc, or the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except (OSError, ValueError):
        return []


def loaded(module_name: str, name: str) -> Any:
    """Return an attribute of a module if the program has imported the module; else None."""
    return getattr(sys.modules.get(module_name), name, None)


def comes_from_signal_handler(error: BaseException) -> bool:
    """Whether a signal handler of the program raised this error while the recorder's code happened to run.

    Such an error is the program's: the recorder must not catch it.
    """
    handlers = (signal.getsignal(number) for number in signal.valid_signals())
    codes = {code for handler in handlers if (code := getattr(handler, "__code__", None)) is not None}
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code in codes:
            return True
        trace = trace.tb_next
    return False
