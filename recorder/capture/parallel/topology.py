"""Finds the rank, the attempt and the run's name of this process, from the environment and the process group.

Besides `config`, only this module reads the environment. The writer thread asks the process group's store, with a
deadline. It uses a connection of the recorder's own, because training may be in a barrier on the other connection. A
call of torch's store client never returns if the store is stopped. If it does return in a thread while the interpreter
shuts down, the process aborts. So a `JobStore` sets a timeout on the connection's socket, and the thread that ends the
recording can cut the connection. Nothing here issues a collective.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import socket
import struct
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_STORE_KEY = "recorder/run_id"
_STORE_DEADLINE_S = 5.0
_HANDLE = re.compile(r"client=TCPClient\(SocketImpl\(fd=([0-9]{1,9}),")
_UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRank:
    """The rank and related numbers of this process among all processes of the job."""

    rank: int
    local_rank: int
    node_rank: int
    world_size: int
    local_world_size: int
    attempt: int
    """Slurm's restart count times 1000, plus torchrun's restart count."""
    host: str


def _number(environ: Mapping[str, str], names: tuple[str, ...], default: int) -> int:
    for name in names:
        if re.fullmatch(r"\d{1,9}", environ.get(name, "")):
            return int(environ[name])
    return default


def _is_mpi(environ: Mapping[str, str]) -> bool:
    """Whether ``mpirun`` or ``mpiexec`` started this process. Slurm's task is then only MPI's daemon on the node."""
    return "OMPI_COMM_WORLD_RANK" in environ or "MPI_LOCALRANKID" in environ


def _is_slurm_task(environ: Mapping[str, str]) -> bool:
    """Whether ``srun`` started this process for a rank.

    A batch script has the variables of a task, too, but no step id. A shell that ``srun --pty`` started does not count:
    it is a task, and every command that is run in the shell inherits the task's variables.
    """
    is_shell = "SLURM_PTY_PORT" in environ and environ.get("SLURM_STEP_NUM_TASKS") == "1"
    return not _is_mpi(environ) and not is_shell and environ.get("SLURM_STEP_ID", "").isdigit()


_TORCHRUN = {
    "rank": ("RANK",),
    "local_rank": ("LOCAL_RANK",),
    "node_rank": ("GROUP_RANK", "NODE_RANK"),
    "world_size": ("WORLD_SIZE",),
    "local_world_size": ("LOCAL_WORLD_SIZE",),
}
_MPI = {
    "rank": ("OMPI_COMM_WORLD_RANK", "PMI_RANK"),
    "local_rank": ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID"),
    "node_rank": (),
    "world_size": ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"),
    "local_world_size": ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"),
}
_SLURM = {
    "rank": ("SLURM_PROCID",),
    "local_rank": ("SLURM_LOCALID",),
    "node_rank": ("SLURM_NODEID",),
    "world_size": ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
    "local_world_size": (),
}
_NONE: dict[str, tuple[str, ...]] = dict.fromkeys(_TORCHRUN, ())


def read(environ: Mapping[str, str] | None = None) -> JobRank:
    """Return this process's place in the job, from the process group, torchrun, MPI or Slurm, else as the only rank."""
    environ = os.environ if environ is None else environ
    scheduler = _MPI if _is_mpi(environ) else _SLURM if _is_slurm_task(environ) else _NONE

    def number(field: str, default: int) -> int:
        return _number(environ, _TORCHRUN[field] + scheduler[field], default)

    rank, world_size = number("rank", 0), number("world_size", 1)
    if is_distributed():
        import torch.distributed as dist

        rank, world_size = dist.get_rank(), dist.get_world_size()
    node_rank = number("node_rank", 0)
    tasks = _slurm_tasks_here(environ) if scheduler is _SLURM else None
    return JobRank(
        rank=rank,
        local_rank=number("local_rank", rank),
        node_rank=node_rank,
        world_size=world_size,
        local_world_size=number("local_world_size", tasks or world_size),
        attempt=1000 * _number(environ, ("SLURM_RESTART_COUNT",), 0)
        + _number(environ, ("TORCHELASTIC_RESTART_COUNT",), 0),
        host=socket.gethostname(),
    )


def _slurm_tasks_here(environ: Mapping[str, str]) -> int | None:
    """Return the number of tasks on this node, from a variable such as ``8(x3),4``. Return None for any other value."""
    node = _number(environ, ("SLURM_NODEID",), 0)
    for part in environ.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        match = re.fullmatch(r"(\d{1,9})(?:\(x(\d{1,9})\))?", part)
        if match is None:
            return None
        num_nodes = int(match[2] or 1)
        if node < num_nodes:
            return int(match[1])
        node -= num_nodes
    return None


def is_distributed() -> bool:
    """Whether the default process group is initialized."""
    dist = sys.modules.get("torch.distributed")
    return dist is not None and bool(dist.is_available()) and bool(dist.is_initialized())


def run_id(topology: JobRank, *, deadline_s: float, environ: Mapping[str, str] | None = None) -> tuple[str, bool]:
    """Return the run's name, and whether all ranks are known to share the name. Runs on the writer thread.

    The name is torchrun's run id if that is a UUID, Slurm's job and step if Slurm started the ranks, or that of the one
    torchrun that has started all ranks. Otherwise the ranks agree on a fresh name through the process group's store
    (compare-and-set). If they cannot, this process has its own name.
    """
    environ = os.environ if environ is None else environ
    elastic = environ.get("TORCHELASTIC_RUN_ID", "")
    if _UUID.fullmatch(elastic):
        return elastic.lower(), True
    job, step = environ.get("SLURM_JOB_ID", ""), environ.get("SLURM_STEP_ID", "")
    # A batch script's shell has no step id, so two commands in it are two runs. Only some of MPI's ranks have a step
    # id.
    if job.isdigit() and _is_slurm_task(environ):
        return f"slurm-{job}-{step}", True
    fresh = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime()) + "-" + secrets.token_hex(4)
    launch = _launch(environ) if topology.world_size == topology.local_world_size else None
    if launch is not None or topology.world_size == 1:
        return launch or fresh, True
    agreed = _agree(fresh, deadline_s)
    if agreed is not None:
        return agreed, True
    host = re.sub(r"[^A-Za-z0-9.]+", "-", topology.host)[:64]
    return f"unjoined-{host}-{os.getpid()}-{fresh}", False


def _agree(fresh: str, deadline_s: float) -> str | None:
    if not is_distributed():
        return None
    from datetime import timedelta

    from torch.distributed.distributed_c10d import _get_default_store

    try:
        store: Any = _get_default_store()
        clone: Callable[[], Any] | None = getattr(store, "clone", None)
        if clone is not None:
            store = clone()  # the training thread may be using the present connection in a barrier
        store.set_timeout(timedelta(seconds=max(0.1, deadline_s)))
        answer = store.compare_set(_STORE_KEY, "", fresh)
        text = answer.decode() if isinstance(answer, bytes) else str(answer)
        return text if re.fullmatch(r"[0-9A-Za-z-]{1,80}", text) else None
    except Exception:  # the store is gone or has no compare-and-set, and the caller has another name
        return None


def _launch(environ: Mapping[str, str]) -> str | None:
    """Return a name for the launch of torchrun that has started this process as a rank, the same for all its attempts.

    It comes from the folder that each launch makes for the errors of its attempts: ``.../none_zrbp3x3k/attempt_0/1``.
    """
    given = environ.get("TORCHELASTIC_ERROR_FILE", "")
    folder, attempt = Path(given).parts[:-3], Path(given).parts[-3:-2]
    if not folder or not attempt[0].startswith("attempt_") or _is_started_by_rank(given):
        return None
    return f"torchrun-{hashlib.sha256(f'{socket.gethostname()} {folder}'.encode()).hexdigest()[:16]}"


def _is_started_by_rank(error_file: str) -> bool:
    """Return whether a rank has started this process: a Python above it has the same file for errors."""
    line, pid = f"TORCHELASTIC_ERROR_FILE={error_file}".encode(), os.getppid()
    with contextlib.suppress(OSError, ValueError, IndexError):  # no /proc, or the process of another user
        while line in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            if "python" in os.readlink(f"/proc/{pid}/exe"):
                return True
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return False


class JobStore:
    """The key-value store of the job. All keys get a prefix of the recorder's.

    One thread calls the methods and may wait in them. Another thread may `cut` the connection. All methods pass on
    torch's errors.
    """

    def __init__(self, client: Any, connection: socket.socket, prefix: str) -> None:
        self._client = client
        self._connection = connection
        self._prefix = prefix

    def add(self, key: str, amount: int) -> int:
        """Add to the number at a key and return the sum. A missing number counts as 0."""
        return int(self._client.add(self._prefix + key, amount))

    def put(self, key: str, value: bytes) -> None:
        self._client.set(self._prefix + key, value)

    def get(self, key: str) -> bytes | None:
        """Return the value at a key. Return None if the key has no value."""
        return bytes(self._client.get(self._prefix + key)) if self._client.check([self._prefix + key]) else None

    def first(self, key: str, value: str) -> str:
        """Set a key that has no value yet. Return the value that the key has now."""
        answer = self._client.compare_set(self._prefix + key, "", value)
        return answer.decode(errors="replace") if isinstance(answer, bytes) else str(answer)

    def cut(self) -> None:
        """Make the call that is under way, and all later calls, fail with an error. Called on any thread."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._client = None
        self._connection.close()


def open_job_store(prefix: str) -> JobStore | None:
    """Connect to the store of the process group. The names of all keys begin with `prefix`. May wait.

    Return None if the process group has no store on a server, or if waiting for the store cannot be bounded. Torch's
    errors are passed on.
    """
    if not is_distributed():
        return None
    from torch._C._distributed_c10d import TCPStore
    from torch.distributed.distributed_c10d import _get_default_store

    store: Any = _get_default_store()
    while (inner := getattr(store, "underlying_store", None)) is not None:
        store = inner
    if not isinstance(store, TCPStore) or not hasattr(store, "clone"):
        return None
    client = store.clone()
    connection = _connection_of(client)
    return None if connection is None else JobStore(client, connection, prefix)


def _connection_of(client: Any) -> socket.socket | None:
    """Return a second handle of the client's socket, with a timeout set. Return None if no socket is found."""
    match = _HANDLE.search(repr(client))
    if match is None:
        return None
    descriptor = os.dup(int(match[1]))
    try:
        connection = socket.socket(fileno=descriptor)
    except OSError:
        os.close(descriptor)
        return None
    try:
        if connection.getpeername()[1] == client.port:
            deadline = struct.pack("@ll", int(_STORE_DEADLINE_S), 0)
            for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                connection.setsockopt(socket.SOL_SOCKET, option, deadline)
            return connection
    except OSError:
        pass
    connection.close()
    return None
