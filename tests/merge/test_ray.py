"""The same commands by the nodes of a Ray cluster, real processes that may die: equal to the last byte."""

from __future__ import annotations

import itertools
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from recorder.errors import install_line
from recorder.merge.merge import merge_run
from recorder.run.run import open_run
from recorder.system.executors import open_cluster
from tests.merge.test_dask import UNIT_BYTES, make_astray
from tests.rigs.clusters import PATIENCE_S, Nodes, Slowed, kill_group, started_ray, wait_for
from tests.rigs.command_line import Cli, cli
from tests.rigs.merging import assert_is_merge, files_of_merge, make_small_run, units

__all__ = ["cli"]

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning:ray", "ignore::DeprecationWarning")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    with started_ray(tmp_path_factory.mktemp("ray")) as found:
        yield found


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recorder.merge.unit.UNIT_BYTES", UNIT_BYTES)
    monkeypatch.setattr("recorder.run.step_ranges.MAX_ROWS", 20)
    monkeypatch.setattr("recorder.analyze.check.reading.RANGE_ROWS", 20)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_small_run(tmp_path / "run", steps=6)


def test_a_merge_is_the_same_to_the_last_byte(cli: Cli, cluster: Nodes, run: Path, tmp_path: Path) -> None:
    assert cli("merge", run, "-o", tmp_path / "here", "--jobs", 1).exit_code == 0
    there = cli("merge", run, "-o", tmp_path / "there", "--scheduler", cluster.address)
    assert (there.exit_code, there.err) == (0, "")
    assert len(units(tmp_path / "there")) == 6
    assert files_of_merge(tmp_path / "here") == files_of_merge(tmp_path / "there")
    assert_is_merge(tmp_path / "there", run)


@pytest.mark.parametrize("command", ["stats RUN --global --by module", "diff RUN OTHER", "check OTHER"])
def test_questions_have_the_same_answer(cli: Cli, cluster: Nodes, run: Path, tmp_path: Path, command: str) -> None:
    paths = {"RUN": run, "OTHER": make_astray(tmp_path / "other", 0.01)}
    words = [paths.get(word, word) for word in command.split()]
    here = cli(*words, "--json")
    assert cli(*words, "--json", "--scheduler", cluster.address) == here
    assert here.out


def test_a_worker_that_sees_other_files_is_named(
    cli: Cli, cluster: Nodes, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under this path every process has the folder that it works in."""
    monkeypatch.chdir(tmp_path)
    result = cli("merge", run, "-o", Path("/proc/self/cwd/out"), "--scheduler", cluster.address)
    assert (result.exit_code, result.out) == (2, "")
    assert f"(worker {socket.gethostname()} (process " in result.err
    assert "does not see the output" in result.err and result.err.count("\n") == 1


def test_no_cluster_is_said(cli: Cli, run: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    result = cli("stats", run, "--scheduler", f"ray://127.0.0.1:{port}")
    assert result.exit_code == 2
    assert result.err.startswith(f"recorder: ray://127.0.0.1:{port}: no Ray cluster that can be used")
    assert "`ray start --head` starts one" in result.err and result.err.count("\n") == 1


def test_a_head_that_starts_no_process_is_asked_again(
    cli: Cli, cluster: Nodes, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    here, connect, numbers = cli("stats", run, "--global"), ray.init, itertools.count(1)

    def fail_twice(*arguments: object, **options: object) -> object:
        if next(numbers) < 3:
            raise ConnectionAbortedError("Initialization failure from server:\nTraceback")
        return connect(*arguments, **options)

    monkeypatch.setattr("ray.init", fail_twice)
    there = cli("stats", run, "--global", "--scheduler", cluster.address)
    assert (there.exit_code, there.out) == (0, here.out)
    assert [line.rpartition("; ")[2] for line in there.err.splitlines()] == ["try 2 of 3", "try 3 of 3"]


def test_a_head_that_never_starts_a_process_is_said(
    cli: Cli, cluster: Nodes, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **options: object) -> None:
        raise ConnectionAbortedError("Initialization failure from server:\nTraceback")

    monkeypatch.setattr("ray.init", fail)
    result = cli("stats", run, "--scheduler", cluster.address)
    assert result.exit_code == 2
    last = result.err.splitlines()[-1]
    assert "in 3 tries (Initialization failure from server: Traceback)" in last
    assert last.endswith("start the cluster's head with GRPC_ENABLE_FORK_SUPPORT=0")


def test_without_ray_it_is_said_how_to_get_it(cli: Cli, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recorder.system.executors.find_spec", lambda name: None)
    result = cli("stats", run, "--scheduler", "ray://127.0.0.1:1")
    assert result.exit_code == 2
    assert install_line("ray") in result.err


def test_units_of_a_killed_node_are_made_by_another(cluster: Nodes, run: Path, tmp_path: Path) -> None:
    """The last test of the file, as the cluster has one node less then."""
    merge_run(open_run(run), tmp_path / "here")
    with open_cluster(cluster.address) as (executor, num_workers):
        assert num_workers == 2

        def kill() -> None:
            wait_for(lambda: len({mark.name.split("-")[0] for mark in cluster.marks.iterdir()}) == 2, "both nodes")
            kill_group(cluster.nodes[1])

        killer = threading.Thread(target=kill)
        killer.start()
        try:
            merge_run(open_run(run), tmp_path / "there", executor=Slowed(executor), num_workers=2, helps=False)
        finally:
            killer.join(PATIENCE_S)
        assert cluster.nodes[1].returncode is not None
    assert files_of_merge(tmp_path / "here") == files_of_merge(tmp_path / "there")
    assert_is_merge(tmp_path / "there", run)
