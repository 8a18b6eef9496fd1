"""Owns whether the process that a manifest names still runs, and how many cores this one has. Must never signal one.

A number alone does not tell: it is used again, and each container counts its own.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def own_process() -> dict[str, Any]:
    """What a manifest says of this process, for `runs`."""
    pid = os.getpid()
    return {"host": os.uname().nodename, "pid": pid, "process": f"{_realm()}:{_started(pid)}"}


def runs(manifest: Mapping[str, Any]) -> bool | None:
    """Whether the process that wrote a manifest still runs.

    Returns:
        None where that cannot be told from here: on another host, in another container, before a boot of this one.
    """
    pid, process = manifest.get("pid"), manifest.get("process")
    if manifest.get("host") != os.uname().nodename or type(pid) is not int or pid <= 0:
        return None
    if process is None:  # version 1.0 did not say more
        return _exists(pid)
    realm, _, started = str(process).rpartition(":")
    if realm != _realm():
        return None
    return _exists(pid) and _started(pid) in (started, "")


def _exists(pid: int) -> bool:
    """Whether there is such a process that has not ended; one that waits for its parent to ask how it ended has."""
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
    """The boot of this kernel and the namespace in which it numbers processes; empty where there is no such thing."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}:{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


def _started(pid: int) -> str:
    """When a process began, in ticks since the boot; empty where it is not shown."""
    return next(iter(_stat(pid)[19:20]), "")


def _stat(pid: int) -> list[str]:
    """The fields of its /proc/PID/stat from the state on; none where it is not Linux, or gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except (OSError, ValueError):
        return []
