from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.campaigns.cluster.nodes import Node, Slurm, command, network

SLURM = [("n1",), ("n2",), ("n3",)]
PODS = [
    *((name, f"{name}.train") for name in ("train-0", "train-1", "train-node-0-0", "train-node-0-1")),
    *(("train-master-0",), ("train-worker-0",)),
]


@pytest.fixture(scope="session")
def machines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Node]:
    """Nodes on one switch, by name, not started."""
    if [line.split(":")[1].strip() for line in command("ip", "-oneline", "link").splitlines()] != ["lo"]:
        pytest.exit("these tests change the network and mounts: start them with scripts/test-cluster", returncode=2)
    return {node.name: node for node in network(tmp_path_factory.mktemp("cluster"), [*SLURM, *PODS])}


@pytest.fixture(scope="session")
def slurm(machines: dict[str, Node]) -> Iterator[Slurm]:
    nodes = [machines[name] for (name,) in SLURM]
    with Slurm(nodes[0].folder.parent, nodes) as cluster:
        yield cluster


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder that all nodes see, in which the test runs; nothing in the environment steers a recorder."""
    for name in list(os.environ):
        if name.startswith(("RECORDER", "_RECORDER")):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    return tmp_path
