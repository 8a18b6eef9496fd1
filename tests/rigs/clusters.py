"""Dask and Ray clusters of real processes on this machine, which end with the block that asked for them."""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

PATIENCE_S = 60.0


class Workers(NamedTuple):
    """A scheduler and its workers."""

    address: str
    scheduler: subprocess.Popen[bytes]
    workers: list[subprocess.Popen[bytes]]
    marks: Path
    """Where slow workers say what they have begun."""


@contextmanager
def started_cluster(folder: Path, num_workers: int = 2, *, is_slow: bool = False) -> Iterator[Workers]:
    """A scheduler with workers of one thread each, which work in a folder of their own."""
    marks, home, file = folder / "marks", folder / "home", folder / "scheduler.json"
    for one in (marks, home):
        one.mkdir(parents=True)
    processes: list[subprocess.Popen[bytes]] = []

    def start(*arguments: str) -> subprocess.Popen[bytes]:
        environment = os.environ | {"SLOW_WORKER_FOLDER": str(marks), "PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "dask", *arguments, "--scheduler-file", str(file), "--no-dashboard"]
        with (folder / f"{arguments[0]}.log").open("ab") as log:
            process = subprocess.Popen(
                command, cwd=home, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        processes.append(process)
        return process

    try:
        scheduler = start("scheduler", "--host", "127.0.0.1", "--port", "0")
        options = ["--nthreads", "1", "--no-nanny", "--memory-limit", "0", "--local-directory", str(home)]
        if is_slow:
            options += ["--preload", str(Path(__file__).with_name("slow_worker.py"))]
        workers = [start("worker", *options) for _ in range(num_workers)]
        wait_for(lambda: file.exists() and file.read_text().rstrip().endswith("}"), "a scheduler")
        yield Workers(json.loads(file.read_text())["address"], scheduler, workers, marks)
    finally:
        for process in reversed(processes):
            process.kill()
        for process in processes:
            process.wait(PATIENCE_S)


class Nodes(NamedTuple):
    """A Ray cluster, whose first node is its head. Each node is a group of processes."""

    address: str
    nodes: list[subprocess.Popen[bytes]]
    marks: Path
    """Where slowed workers say what they have begun."""


@contextmanager
def started_ray(folder: Path, num_nodes: int = 2) -> Iterator[Nodes]:
    """Ray nodes of one core each; the head is started first."""
    marks = folder / "marks"
    marks.mkdir(parents=True)
    gcs, clients = free_ports(2)
    environment = os.environ | {
        "SLOW_WORKER_FOLDER": str(marks), "PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "GRPC_ENABLE_FORK_SUPPORT": "0",  # else one in ten processes for a client crashes in its fork
    }  # fmt: skip
    nodes: list[subprocess.Popen[bytes]] = []

    def start(*arguments: str) -> None:
        options = ["--block", "--num-cpus", "1", "--object-store-memory", str(80 << 20), "--disable-usage-stats"]
        command = [str(Path(sys.executable).with_name("ray")), "start", *arguments, *options]
        with (folder / f"node-{len(nodes)}.log").open("ab") as log:
            nodes.append(
                subprocess.Popen(
                    command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
                )
            )

    try:
        head = ["--head", "--port", str(gcs), "--ray-client-server-port", str(clients), "--include-dashboard", "false"]
        start(*head, "--node-ip-address", "127.0.0.1")
        wait_for(lambda: answers(clients), "a head of Ray")
        for number in range(num_nodes):  # one after the other, since a node gives up after 30 s
            if number:
                start("--address", f"127.0.0.1:{gcs}", "--node-ip-address", "127.0.0.1")
            log = folder / f"node-{number}.log"
            wait_for(lambda log=log: "Ray runtime started" in log.read_text(), "a node of Ray")  # type: ignore[misc]
        yield Nodes(f"ray://127.0.0.1:{clients}", nodes, marks)
    finally:
        for node in reversed(nodes):
            kill_group(node)


def free_ports(count: int) -> list[int]:
    """Ports that nothing listens on."""
    servers = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [server.getsockname()[1] for server in servers]
    for server in servers:
        server.close()
    return ports


def answers(port: int) -> bool:
    """True if something listens on a port of this machine."""
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and all that it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(PATIENCE_S)


class Slowed(Executor):
    """Hands out work as another executor does, to workers that are slow and say what they have begun."""

    def __init__(self, inner: Executor) -> None:
        self._inner = inner

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        return self._inner.submit(_slowly, fn, *args, **kwargs)


def _slowly(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    importlib.import_module("tests.rigs.slow_worker")
    return fn(*args, **kwargs)


def wait_for(is_so: Callable[[], bool], what: str) -> None:
    """Wait until a function says yes."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline_s, f"waited in vain for {what}"
        time.sleep(0.05)
