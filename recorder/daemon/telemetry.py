"""What a daemon shows of itself: counters, the health of the store, the log, its lock and its state file.

The folder of the daemon's lock and state must belong to this user, because anybody may create names in a folder for
temporary files. Any thread may call.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import random
import stat
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ..errors import ConfigError, WriteError
from ..run.reply import Reply
from ..system.text import counted, moment, printable_line, size

logger = logging.getLogger("recorder.daemon")

_LONGEST_WAIT_S = 30.0
_SILENT_S = 60
"""A daemon's state that is older than this many seconds is printed with its time."""


class Counters:
    """The daemon's counters. Each has a sum for each value of its label, such as a reason."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: dict[str, Counter[str]] = {}

    def add(self, name: str, word: str = "", amount: int = 1) -> None:
        with self._lock:
            self._sums.setdefault(name, Counter())[word] += amount

    def of(self, name: str) -> dict[str, int]:
        with self._lock:
            return dict(self._sums.get(name, ()))

    def total(self, name: str) -> int:
        return sum(self.of(name).values())


class Requests:
    """Counts the requests to the store, and sums their seconds. A running request counts with its seconds so far.

    Only these numbers reveal a store that hangs, or that answers just before a request times out.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._num_ended = 0
        self._ended_s = 0.0
        self._began_s: dict[object, float] = {}

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        key = object()
        with self._lock:
            self._began_s[key] = self._clock()
        try:
            yield
        finally:
            with self._lock:
                self._num_ended += 1
                self._ended_s += self._clock() - self._began_s.pop(key)

    def totals(self) -> tuple[int, float]:
        """Return the number of requests and the sum of their seconds. Both only grow."""
        with self._lock:
            now_s = self._clock()
            under_way_s = sum(now_s - began_s for began_s in self._began_s.values())
            return self._num_ended + len(self._began_s), self._ended_s + under_way_s


class Health:
    """Whether the store works. After each error, requests pause for a time that doubles up to half a minute."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._wait_s = 0.0
        self._until_s = 0.0
        self.problem = ""
        """The last error, as a sentence. Empty while the store works."""
        self.answered_s = 0.0
        """The wall-clock time of the store's last success. 0 means never."""
        self.recovered_s = 0.0
        """The monotonic time of the last success after an error. Before that the store may have lost files."""

    @property
    def is_open(self) -> bool:
        return self._clock() >= self._until_s

    def succeeded(self) -> None:
        with self._lock:
            if self.problem:
                self.recovered_s = self._clock()
                logger.info("the store answers again")
            self._wait_s, self._until_s, self.problem, self.answered_s = 0.0, 0.0, "", time.time()

    def failed(self, problem: str) -> None:
        with self._lock:
            if self._clock() < self._until_s:  # jobs that failed at the same time count as one failure
                return
            self._wait_s = min(max(2 * self._wait_s, 0.5), _LONGEST_WAIT_S)
            self._until_s = self._clock() + self._wait_s * random.uniform(0.7, 1.3)
            self.problem = problem


_PLAIN = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime"}


class JsonFormatter(logging.Formatter):
    """Formats a log record as a JSON object: ``time``, ``level``, ``message``, and the extra members of the record."""

    def format(self, record: logging.LogRecord) -> str:
        members: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "message": record.getMessage(),
        }
        members |= {name: value for name, value in record.__dict__.items() if name not in _PLAIN}
        if record.exc_info:
            members["error"] = self.formatException(record.exc_info)
        return json.dumps(members, default=str)


class TextFormatter(logging.Formatter):
    """Formats a log record as one line. Unprintable characters are escaped, because names may come from anywhere."""

    def format(self, record: logging.LogRecord) -> str:
        when = time.strftime("%H:%M:%S", time.localtime(record.created))
        text = f"recorder daemon: {when} {record.levelname.lower()}: {record.getMessage()}"
        return printable_line(text) + (f"\n{self.formatException(record.exc_info)}" if record.exc_info else "")


class _Stderr(logging.StreamHandler[Any]):
    """A log handler that looks up `sys.stderr` again for each line."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> Any:
        return sys.stderr


def log_to_stderr(kind: str) -> None:
    """Write the daemon's log to standard error, as ``text`` or ``json``."""
    handler = _Stderr()
    handler.setFormatter(JsonFormatter() if kind == "json" else TextFormatter())
    logger.handlers = [handler]
    logger.propagate = False
    logger.setLevel(logging.INFO)


def state_folder(setting: str) -> Path:
    """Create and return the folder of the daemon's lock and state. Raise ConfigError if another user owns it."""
    runtime = os.environ.get("RUNTIME_DIRECTORY", "").partition(":")[0] or os.environ.get("XDG_RUNTIME_DIR", "")
    if setting:
        path = Path(setting).absolute()  # the path is absolute, because errands have another working directory
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
    """Hold the daemon's lock inside the `with` block. Yield the path of the daemon's state file.

    Raise WriteError if another daemon of this node ships to this destination, or watches one of these folders.
    """
    others = folder / ".starting"
    with open(others, "a") as gate:
        fcntl.flock(gate, fcntl.LOCK_EX)  # daemons that start at the same time check one after the other
        for other in running(folder):
            who = f"process {other.get('pid')} (to {other.get('to')}, watching {', '.join(other.get('watch', ()))})"
            if other.get("to") == destination:
                raise WriteError(f"{destination}: another daemon of this node ships to it: {who}; stop it first")
            for mine in watched:
                for its in other.get("watch", ()):
                    if holds_folder(its, mine) or holds_folder(mine, its):
                        raise WriteError(f"{mine}: another daemon watches this folder, or one in or around it: {who}")
        lock = open(folder / f"{_name(destination)}.lock", "a+")  # noqa: SIM115 # held until the end
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            raise WriteError(f"{destination}: another daemon of this node begins to ship to it; try again") from None
        state = folder / f"{_name(destination)}.json"
        write_state(state, {"pid": os.getpid(), "to": destination, "watch": watched})
    try:
        yield state
    finally:
        with contextlib.suppress(OSError):
            state.unlink()
        lock.close()


def running(folder: Path) -> list[dict[str, Any]]:
    """Return the content of the state file of each running daemon. A running daemon holds a lock in the folder."""
    daemons = []
    for path in sorted(folder.glob("*.lock")):
        with contextlib.suppress(OSError, ValueError), open(path) as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError:
                daemons.append(json.loads(path.with_suffix(".json").read_text()))
    return daemons


def write_state(path: Path, state: dict[str, Any]) -> None:
    """Replace a daemon's state file. If the write fails, the old file stays."""
    with contextlib.suppress(OSError):
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(state))
        temporary.replace(path)


def holds_folder(outer: str, inner: str) -> bool:
    """Return True if `outer` is the folder `inner`, or contains it at any depth."""
    return inner == outer or inner.startswith(outer.rstrip("/") + "/")


def status_reply(state: str) -> Reply:
    """Return the reply of `recorder daemon status` about the daemons of this node. `state` is the setting."""
    daemons = running(state_folder(state))
    return Reply(
        members=lambda: {"daemons": daemons},
        parts=lambda: [line for one in daemons for line in _status_lines(one)] or ["no daemon is running on this node"],
        exit_code=int(not daemons),
    )


def _status_lines(one: dict[str, Any]) -> Iterator[str]:
    runs = f"{counted(one.get('runs', 0), 'run')}, of which {one.get('settled', 0)} shipped completely"
    left = f"{counted(one.get('backlog_files', 0), 'file')} with {size(one.get('backlog_bytes', 0))} to go"
    done = f"{counted(one.get('uploads', 0), 'upload')} with {size(one.get('uploaded_bytes', 0))} since its start"
    yield f"process {one.get('pid')} ships {', '.join(one.get('watch', ()))} to {one.get('to')}: {runs}; {left}; {done}"
    if url := one.get("url"):
        yield f"metrics: {url}/metrics"
    if problem := one.get("problem"):
        yield f"the store fails: {problem}"
    if one.get("conflicts"):
        yield f"{counted(one['conflicts'], 'conflict')}: another object has the name of a file"
    if time.time() - one.get("time_s", 0) > _SILENT_S:
        yield f"no news of it since {moment(int(one.get('time_s', 0) * 1e9))}"
