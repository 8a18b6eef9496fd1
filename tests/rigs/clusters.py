"""Dask clusters of real processes on this machine, which end with the block that asked for them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

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


def wait_for(is_so: Callable[[], bool], what: str) -> None:
    """Wait until a function says yes."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline_s, f"waited in vain for {what}"
        time.sleep(0.05)
