"""One daemon a node and destination: the lock, who holds it, and what that one says of itself.

The folder of the state belongs to the user alone, because names in a folder for temporary files are anybody's.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import ConfigError, WriteError


def state_folder(setting: str) -> Path:
    """Return the folder of the state, and make it.

    Raises:
        ConfigError: it cannot be made, or belongs to somebody else.
    """
    runtime = os.environ.get("RUNTIME_DIRECTORY", "").partition(":")[0] or os.environ.get("XDG_RUNTIME_DIR", "")
    if setting:
        path = Path(setting).absolute()  # errands have another working directory
    elif runtime:
        path = Path(runtime) / "recorder-daemon"
    elif os.getuid() == 0:
        path = Path("/run/recorder-daemon")
    else:
        path = Path(tempfile.gettempdir()) / f"recorder-daemon-{os.getuid()}"
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.lstat()
    except OSError as error:
        raise ConfigError(
            f"state = {str(path)!r}: cannot be made ({error.strerror}); name a folder of your own"
        ) from None
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise ConfigError(f"state = {str(path)!r}: is no folder of this user; name another")
    return path


def _name(destination: str) -> str:
    return hashlib.sha256(destination.encode()).hexdigest()[:16]


@contextlib.contextmanager
def held_lock(folder: Path, destination: str, watched: list[str]) -> Iterator[Path]:
    """Hold the lock of a destination and of the watched folders; yield the file for the daemon's state.

    Raises:
        WriteError: another daemon has it; the message says which one.
    """
    others = folder / ".starting"
    with open(others, "a") as gate:
        fcntl.flock(gate, fcntl.LOCK_EX)  # two that start at once look one after the other
        for other in running(folder):
            who = f"process {other.get('pid')} (to {other.get('to')}, watching {', '.join(other.get('watch', ()))})"
            if other.get("to") == destination:
                raise WriteError(f"{destination}: another daemon of this node ships there: {who}; stop it first")
            for mine in watched:
                for its in other.get("watch", ()):
                    if _contains(its, mine) or _contains(mine, its):
                        raise WriteError(f"{mine}: is, holds or lies in what another daemon watches: {who}")
        lock = open(folder / f"{_name(destination)}.lock", "a+")  # noqa: SIM115 # held until the end
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            raise WriteError(f"{destination}: another daemon of this node begins to ship there; try again") from None
        state = folder / f"{_name(destination)}.json"
        write_state(state, {"pid": os.getpid(), "to": destination, "watch": watched})
    try:
        yield state
    finally:
        with contextlib.suppress(OSError):
            state.unlink()
        lock.close()


def running(folder: Path) -> list[dict[str, Any]]:
    """Return what the daemons that hold a lock in the folder say of themselves."""
    daemons = []
    for path in sorted(folder.glob("*.lock")):
        with contextlib.suppress(OSError, ValueError), open(path) as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError:
                daemons.append(json.loads(path.with_suffix(".json").read_text()))
    return daemons


def write_state(path: Path, state: dict[str, Any]) -> None:
    """Replace the state; an error leaves it old."""
    with contextlib.suppress(OSError):
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(state))
        temporary.replace(path)


def _contains(outer: str, inner: str) -> bool:
    return inner == outer or inner.startswith(outer.rstrip("/") + "/")
