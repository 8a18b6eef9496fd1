"""Who this process is: rank, attempt and the run's name, from the launcher's environment and the process group.

The only other place that reads the environment beside `config`. Store look-ups run on the writer thread, with a
deadline, on a connection of their own; no collective is issued.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

_STORE_KEY = "recorder/run_id"
_UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """This process among all of the job."""

    rank: int
    local_rank: int
    node_rank: int
    world_size: int
    local_world_size: int
    attempt: int
    """Slurm's restart count x 1000 + torchrun's."""
    host: str


def _number(environ: Mapping[str, str], names: tuple[str, ...], default: int) -> int:
    for name in names:
        if re.fullmatch(r"\d{1,9}", environ.get(name, "")):
            return int(environ[name])
    return default


def read(environ: Mapping[str, str] | None = None) -> Topology:
    """The process group where there is one, else the environment of torchrun, Slurm or MPI, else one rank."""
    environ = os.environ if environ is None else environ
    rank = _number(environ, ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"), 0)
    world_size = _number(environ, ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"), 1)
    if _is_distributed():
        import torch.distributed as dist

        rank, world_size = dist.get_rank(), dist.get_world_size()
    return Topology(
        rank=rank,
        local_rank=_number(environ, ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK"), rank),
        node_rank=_number(environ, ("GROUP_RANK", "SLURM_NODEID"), 0),
        world_size=world_size,
        local_world_size=_number(environ, ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"), world_size),
        attempt=1000 * _number(environ, ("SLURM_RESTART_COUNT",), 0)
        + _number(environ, ("TORCHELASTIC_RESTART_COUNT",), 0),
        host=socket.gethostname(),
    )


def _is_distributed() -> bool:
    dist = sys.modules.get("torch.distributed")
    return dist is not None and bool(dist.is_available()) and bool(dist.is_initialized())


def run_id(topology: Topology, *, deadline_s: float, environ: Mapping[str, str] | None = None) -> tuple[str, bool]:
    """The run's name, and whether all ranks are known to share it. Runs on the writer thread.

    torchrun's run id where it is a UUID; Slurm's job and step; else a fresh name that the ranks agree on through the
    process group's store (compare-and-set); failing that a name of this process alone.
    """
    environ = os.environ if environ is None else environ
    elastic = environ.get("TORCHELASTIC_RUN_ID", "")
    if _UUID.fullmatch(elastic):
        return elastic.lower(), True
    job, step = environ.get("SLURM_JOB_ID", ""), environ.get("SLURM_STEP_ID", "")
    if job.isdigit() and step.isdigit():  # a batch script's own shell has no step: two commands there are two runs
        return f"slurm-{job}-{step}", True
    fresh = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime()) + "-" + secrets.token_hex(4)
    if topology.world_size == 1:
        return fresh, True
    agreed = _agree(fresh, deadline_s)
    if agreed is not None:
        return agreed, True
    host = re.sub(r"[^A-Za-z0-9.]+", "-", topology.host)[:64]
    return f"unjoined-{host}-{os.getpid()}-{fresh}", False


def _agree(fresh: str, deadline_s: float) -> str | None:
    if not _is_distributed():
        return None
    from datetime import timedelta

    from torch.distributed.distributed_c10d import _get_default_store

    try:
        store: Any = _get_default_store()
        clone: Callable[[], Any] | None = getattr(store, "clone", None)
        if clone is not None:
            store = clone()  # a connection of its own: the training thread may hold the other one in a barrier
        store.set_timeout(timedelta(seconds=max(0.1, deadline_s)))
        answer = store.compare_set(_STORE_KEY, "", fresh)
        text = answer.decode() if isinstance(answer, bytes) else str(answer)
        return text if re.fullmatch(r"[0-9A-Za-z-]{1,80}", text) else None
    except Exception:  # a store that is gone, or of a kind without compare-and-set: the caller has a name without it
        return None
