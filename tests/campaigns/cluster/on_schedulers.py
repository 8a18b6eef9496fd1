"""`--scheduler` with workers on two machines of their own, one of which goes away. `scripts/test-cluster`.

pytest finds this file only where it is named, since it needs to be root. The machines share the files and the network
of this one and nothing else. The scheduler, or the head of Ray, is on the machine of the command.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from recorder.merge.merge import merge_run
from recorder.run.run import open_run
from recorder.system.executors import open_cluster
from tests.campaigns.cluster.nodes import LOGIN, Node, wait_for
from tests.rigs.clusters import PATIENCE_S, Slowed, kill_group
from tests.rigs.merging import assert_is_merge, files_of_merge, make_small_run

ROOT = Path(__file__).parents[3]
SETTINGS = {
    "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0",
    "GRPC_ENABLE_FORK_SUPPORT": "0",  # else one in ten processes for a client crashes in its fork
    # A machine that is gone answers nothing, which Ray's own periods of five and two minutes would take long to notice.
    "RAY_grpc_client_keepalive_time_ms": "10000", "RAY_grpc_client_keepalive_timeout_ms": "10000",
}  # fmt: skip
RAY = str(Path(sys.executable).with_name("ray"))
RAY_NODE = ("--block", "--num-cpus=1", f"--object-store-memory={80 << 20}", "--disable-usage-stats")


def dask_worker(node: Node) -> list[str]:
    options = ("--nthreads=1", "--no-nanny", "--memory-limit=0", "--no-dashboard", f"--local-directory={node.scratch}")
    return [sys.executable, "-m", "dask", "worker", f"tcp://{LOGIN}:8786", f"--host={node.address}", *options]


def ray_worker(node: Node) -> list[str]:
    return [RAY, "start", f"--address={LOGIN}:6379", f"--node-ip-address={node.address}", *RAY_NODE]


CLUSTERS: dict[str, tuple[str, list[str], Callable[[Node], list[str]]]] = {
    "dask": (
        f"tcp://{LOGIN}:8786",
        [sys.executable, "-m", "dask", "scheduler", f"--host={LOGIN}", "--port=8786", "--no-dashboard"],
        dask_worker,
    ),
    "ray": (
        f"ray://{LOGIN}:10001",
        [RAY, "start", "--head", f"--node-ip-address={LOGIN}", "--port=6379", "--ray-client-server-port=10001",
         "--include-dashboard=false", *RAY_NODE, "--num-cpus=0"],
        ray_worker,
    ),
}  # fmt: skip
"""By kind: the address for `--scheduler`, the command on this machine, and that of a worker's machine."""


IS_UP = {"dask": re.compile("Scheduler at:|Registered to:"), "ray": re.compile("Ray runtime started")}
"""By kind: what the log of a scheduler or worker says once it is up."""


@contextmanager
def started(kind: str, nodes: list[Node], folder: Path) -> Iterator[tuple[str, Callable[[Node], bool]]]:
    """A cluster of two machines: its address, and a function that says whether a machine has begun a unit."""
    address, scheduler, worker = CLUSTERS[kind]
    marks = {node: folder / f"marks-{node.name}" for node in nodes}
    processes: list[subprocess.Popen[bytes]] = []

    def wait_for_log(path: Path) -> None:
        wait_for(f"the start of {path.stem}", lambda: IS_UP[kind].search(path.read_text()) is not None)

    try:
        with (folder / "scheduler.log").open("wb") as log:
            environment = os.environ | SETTINGS | {"SLOW_WORKER_FOLDER": str(folder)}
            processes.append(
                subprocess.Popen(scheduler, env=environment, stdout=log, stderr=log, start_new_session=True)
            )
        wait_for_log(folder / "scheduler.log")
        for node in nodes:  # one after the other, since a node of Ray gives up after 30 s
            marks[node].mkdir()
            node.start()
            settings = os.environ | SETTINGS | {"SLOW_WORKER_FOLDER": str(marks[node])}
            processes.append(node.popen(worker(node), settings, folder / f"{node.name}.log"))
            wait_for_log(folder / f"{node.name}.log")
        yield address, lambda node: any(marks[node].iterdir())
    finally:
        for node in nodes:
            node.kill()
        for process in processes[:1]:
            kill_group(process)
        for process in processes[1:]:
            process.wait(PATIENCE_S)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning:ray", "ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", CLUSTERS)
def test_a_merge_by_two_machines_outlives_one_of_them(
    kind: str, machines: dict[str, Node], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("recorder.merge.unit.UNIT_BYTES", 400)  # a step of the run is a unit
    run, nodes = make_small_run(folder / "run", steps=12), [machines["train-0"], machines["train-1"]]
    merge_run(open_run(run), folder / "here")
    with started(kind, nodes, folder) as (address, has_begun), open_cluster(address) as (executor, num_workers):
        assert num_workers == len(nodes)

        def kill() -> None:
            wait_for("a unit on both machines", lambda: all(map(has_begun, nodes)))
            nodes[1].kill()

        killer = threading.Thread(target=kill)
        killer.start()
        try:
            merge_run(open_run(run), folder / "there", executor=Slowed(executor), num_workers=num_workers, helps=False)
        finally:
            killer.join(PATIENCE_S)
    assert not (folder / "train-1" / "up").exists() and all(map(has_begun, nodes))
    assert files_of_merge(folder / "here") == files_of_merge(folder / "there")
    assert_is_merge(folder / "there", run)
