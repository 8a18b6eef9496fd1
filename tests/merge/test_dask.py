"""The same commands by the workers of a Dask cluster, real processes that may die: equal to the last byte."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import recorder
from recorder.errors import WriteError, install_line
from recorder.merge.merge import merge_run
from recorder.run.run import open_run
from recorder.system.executors import open_cluster, versions
from tests.rigs.clusters import PATIENCE_S, Workers, started_cluster, wait_for
from tests.rigs.command_line import Cli, cli
from tests.rigs.merging import assert_is_merge, batch, files_of_merge, make_small_run, units

__all__ = ["cli"]

UNIT_BYTES = 400
"""A step of a small run is a unit."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    with started_cluster(tmp_path_factory.mktemp("cluster")) as found:
        yield found


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work is cut by the process that hands it out: units of a step, pieces of one or two."""
    monkeypatch.setattr("recorder.merge.unit.UNIT_BYTES", UNIT_BYTES)
    monkeypatch.setattr("recorder.run.step_ranges.MAX_ROWS", 20)
    monkeypatch.setattr("recorder.analyze.export.tensors.BATCH_BYTES", 200)
    monkeypatch.setattr("recorder.analyze.check.reading.RANGE_ROWS", 20)
    monkeypatch.setattr("recorder.analyze.first.replicas.RANGE_ROWS", 20)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_small_run(tmp_path / "run", steps=6)


def make_astray(path: Path, far: float) -> Path:
    """The same training, whose outputs differ from step 3 on, and two steps more."""

    def astray(step: int, rank: int) -> npt.NDArray[np.float32]:
        found = batch(step, rank)
        return found * np.float32(1 + far) if step >= 3 else found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.rigs.merging.batch", astray)
        return make_small_run(path, steps=8)


def test_a_merge_is_the_same_to_the_last_byte(cli: Cli, cluster: Workers, run: Path, tmp_path: Path) -> None:
    assert cli("merge", run, "-o", tmp_path / "here", "--jobs", 1).exit_code == 0
    there = cli("merge", run, "-o", tmp_path / "there", "--scheduler", cluster.address)
    assert (there.exit_code, there.err) == (0, "")
    assert len(units(tmp_path / "there")) == 6
    assert files_of_merge(tmp_path / "here") == files_of_merge(tmp_path / "there")
    assert_is_merge(tmp_path / "there", run)


@pytest.mark.parametrize(
    "command",
    [
        pytest.param("stats RUN --last 0", marks=pytest.mark.slow),
        "stats RUN --by step,site",
        "stats OTHER --by module",
        pytest.param("stats RUN --global", marks=pytest.mark.slow),
        "stats RUN --global --by module",
        pytest.param("diff RUN OTHER", marks=pytest.mark.slow),
        "diff RUN OTHER --noise TWIN",
        "check OTHER --fail-on never --baseline RUN",
    ],
)
def test_questions_have_the_same_answer(cli: Cli, cluster: Workers, run: Path, tmp_path: Path, command: str) -> None:
    paths = {"RUN": run, "OTHER": make_astray(tmp_path / "other", 0.01), "TWIN": tmp_path / "twin"}
    if "TWIN" in command:
        make_astray(paths["TWIN"], 1e-6)
    words = [paths.get(word, word) for word in command.split()]
    here = cli(*words, "--json")
    assert here.exit_code == (1 if words[0] == "diff" else 0)
    assert cli(*words, "--json", "--scheduler", cluster.address) == here
    assert json.loads(here.out)


def test_a_catalog_has_the_same_findings(cli: Cli, cluster: Workers, run: Path, tmp_path: Path) -> None:
    for name, options in (("here", []), ("there", ["--scheduler", cluster.address])):
        made = cli("catalog", run.parent, "--catalog", tmp_path / name, *options)
        assert made.exit_code == 0, made.err
    answers = [
        cli("sql", "select * from findings order by all", "--catalog", tmp_path / name, "--json").json["rows"]
        for name in ("here", "there")
    ]
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    "command",
    [
        "o.safetensors --global",
        "o.parquet --global --payload",
        *(pytest.param(one, marks=pytest.mark.slow) for one in ("o.npz", "o.parquet", "o.parquet --global")),
    ],
)
def test_exported_files_are_the_same(cli: Cli, cluster: Workers, run: Path, tmp_path: Path, command: str) -> None:
    name, *options = command.split()
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    assert cli("export", run, "-o", tmp_path / "here" / name, *options).exit_code == 0
    there = cli("export", run, "-o", tmp_path / "there" / name, *options, "--scheduler", cluster.address)
    assert (there.exit_code, there.err) == (0, "")
    assert (tmp_path / "here" / name).read_bytes() == (tmp_path / "there" / name).read_bytes()


@pytest.mark.parametrize("command", ["stats RUN --global --by site", "check RUN"])
def test_warnings_of_workers_reach_who_asked(cli: Cli, cluster: Workers, run: Path, command: str) -> None:
    """Damage in a column that only the workers read."""
    shard = next((run / "rank=00000").rglob("*.arrow"))
    for index in run.rglob("*.index*"):
        index.unlink()
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 0xFF
    shard.write_bytes(data)
    words = [run if word == "RUN" else word for word in command.split()]
    here = cli(*words, "--json")
    there = cli(*words, "--json", "--scheduler", cluster.address)
    assert (there.exit_code, there.out) == (here.exit_code, here.out)
    assert here.err and there.err == here.err


@pytest.mark.parametrize("command", ["stats", "check"])
def test_what_is_still_recorded_is_looked_at_here(
    cli: Cli, cluster: Workers, run: Path, monkeypatch: Any, command: str
) -> None:
    """A worker finds another run than this process had opened."""
    here = cli(command, run, "--json")
    monkeypatch.setattr("recorder.run.step_ranges.digest", lambda run: "other")
    assert cli(command, run, "--json", "--scheduler", cluster.address) == here


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ({"pyarrow": "1.0"}, ", but this machine has 1.0; install the same version"),
        ({"python": "3.99"}, "has python 3.11, but this machine has 3.99; install the same version"),
        ({"unknown-package": "2"}, "has no unknown-package; install unknown-package 2, as on this machine"),
    ],
)
def test_workers_of_other_versions_are_refused(
    cli: Cli, cluster: Workers, run: Path, monkeypatch: pytest.MonkeyPatch, found: dict[str, str], said: str
) -> None:
    monkeypatch.setattr("recorder.system.executors.versions", lambda: found)
    monkeypatch.setattr("recorder.system.executors._PACKAGES", ("pyarrow", "unknown-package"))
    result = cli("stats", run, "--scheduler", cluster.address)
    assert (result.exit_code, result.out) == (2, "")
    assert said in result.err and result.err.count("\n") == 1


def test_the_version_of_this_package_is_one_that_workers_must_have() -> None:
    assert versions()["torch-recorder"] == recorder.__version__


@pytest.mark.parametrize(("which", "said"), [("run", "does not see the run"), ("out", "does not see the output")])
def test_a_worker_that_sees_other_files_is_named(
    cli: Cli, cluster: Workers, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, which: str, said: str
) -> None:
    """Under this path every process has the folder that it works in."""
    monkeypatch.chdir(tmp_path)
    mine = Path("/proc/self/cwd")
    paths = {"run": run, "out": tmp_path / "out"} | {which: mine / which}
    result = cli("merge", paths["run"], "-o", paths["out"], "--scheduler", cluster.address)
    assert (result.exit_code, result.out) == (2, "")
    assert f"(worker {socket.gethostname()} (process " in result.err
    assert said in result.err and result.err.count("\n") == 1


def test_no_scheduler_is_said(cli: Cli, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recorder.system.executors._CONNECT_S", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    result = cli("stats", run, "--scheduler", f"tcp://127.0.0.1:{port}")
    assert result.exit_code == 2
    assert result.err.startswith(f"recorder: tcp://127.0.0.1:{port}: no Dask scheduler answers within 1 s")
    assert result.err.count("\n") == 1


def test_what_is_no_address_is_said(cli: Cli, run: Path) -> None:
    result = cli("stats", run, "--scheduler", "nonsense://here")
    assert result.exit_code == 2
    assert result.err.startswith("recorder: nonsense://here: is no address of a scheduler")
    assert result.err.count("\n") == 1


def test_without_dask_it_is_said_how_to_get_it(cli: Cli, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recorder.system.executors.find_spec", lambda name: None)
    result = cli("stats", run, "--scheduler", "tcp://127.0.0.1:1")
    assert result.exit_code == 2
    assert install_line("dask") in result.err


@pytest.mark.parametrize(
    ("command", "options", "message"),
    [
        ("merge", ["--jobs", 2], "--jobs: it cannot be combined with --scheduler"),
        ("checkpoint", ["--to", "dcp"], "No such option: --scheduler"),
    ],
)
def test_options_that_would_change_nothing_are_refused(
    cli: Cli, run: Path, tmp_path: Path, command: str, options: list[Any], message: str
) -> None:
    result = cli(command, run, "-o", tmp_path / "out", "--scheduler", "tcp://127.0.0.1:1", *options)
    assert result.exit_code == 2
    assert message in result.err
    assert not (tmp_path / "out").exists()


def test_a_scheduler_without_workers_is_said(
    cli: Cli, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("recorder.system.executors._WORKERS_S", 1.0)
    with started_cluster(tmp_path / "cluster", 0) as cluster:
        result = cli("stats", run, "--scheduler", cluster.address)
    assert result.exit_code == 2
    assert "the scheduler has no workers after 1 s; start some with `dask worker tcp://" in result.err
    assert result.err.count("\n") == 1


def kill_at_work(cluster: Workers) -> threading.Thread:
    """Kill the first worker once it has begun something."""
    first = cluster.workers[0]

    def kill() -> None:
        wait_for(lambda: any(cluster.marks.glob(f"{first.pid}-*")), "something of the first worker")
        first.send_signal(signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    return killer


def test_what_a_killed_worker_read_for_a_check_is_read_by_another(cli: Cli, run: Path, tmp_path: Path) -> None:
    here = cli("check", run, "--json")
    with started_cluster(tmp_path / "cluster", is_slow=True) as cluster:
        killer = kill_at_work(cluster)
        there = cli("check", run, "--json", "--scheduler", cluster.address)
        killer.join(PATIENCE_S)
        assert cluster.workers[0].wait(PATIENCE_S) == -signal.SIGKILL
        assert any(cluster.marks.glob(f"{cluster.workers[1].pid}-*"))
    assert there == here
    assert json.loads(here.out)["rows"]


def test_units_of_a_killed_worker_are_made_by_another(run: Path, tmp_path: Path) -> None:
    merge_run(open_run(run), tmp_path / "here")
    with started_cluster(tmp_path / "cluster", is_slow=True) as cluster, open_cluster(cluster.address) as (executor, _):
        killer = kill_at_work(cluster)
        try:
            options: dict[str, Any] = {"num_workers": 2, "helps": False}
            merge_run(open_run(run), tmp_path / "there", executor=executor, **options)
        finally:
            killer.join(PATIENCE_S)
        assert cluster.workers[0].wait(PATIENCE_S) == -signal.SIGKILL
    assert files_of_merge(tmp_path / "here") == files_of_merge(tmp_path / "there")
    assert_is_merge(tmp_path / "there", run)


@pytest.mark.slow
def test_a_lost_scheduler_ends_a_merge_that_can_go_on_later(run: Path, tmp_path: Path) -> None:
    with (
        started_cluster(tmp_path / "cluster", 1, is_slow=True) as cluster,
        open_cluster(cluster.address) as (executor, _),
    ):

        def kill() -> None:
            wait_for(lambda: len(list(cluster.marks.iterdir())) > 2, "a unit of the first worker")
            cluster.scheduler.send_signal(signal.SIGKILL)

        killer = threading.Thread(target=kill)
        killer.start()
        try:
            with pytest.raises(WriteError, match=r"scheduler of the cluster is gone.*what is finished is kept"):
                merge_run(open_run(run), tmp_path / "out", executor=executor, helps=False)
        finally:
            killer.join(PATIENCE_S)
    assert not (tmp_path / "out" / "_run.json").exists()
    report = merge_run(open_run(run), tmp_path / "out")
    assert report.num_kept_units >= 1
    assert_is_merge(tmp_path / "out", run)


@pytest.mark.slow
def test_an_interrupt_leaves_nothing_half_written(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    program = (
        f"import sys, recorder.merge.unit; recorder.merge.unit.UNIT_BYTES = {UNIT_BYTES}\n"
        "from recorder.cli.app import run_command; run_command(sys.argv[1:])"
    )
    with started_cluster(tmp_path / "cluster", 1, is_slow=True) as cluster:
        command = [sys.executable, "-c", program, "merge", str(run), "-o", str(out), "--scheduler", cluster.address]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=os.getcwd())
        try:
            wait_for(lambda: len(list(cluster.marks.iterdir())) > 1, "a second unit")
            process.send_signal(signal.SIGINT)
            said, _ = process.communicate(timeout=PATIENCE_S)
        finally:
            process.kill()
        assert process.returncode not in (0, 2)
        assert b"Traceback" not in said
        assert not (out / "_run.json").exists()
        left = [path.name for path in (out / "_merging").iterdir()]
        assert left and all(name.startswith("steps") for name in left)
    merge_run(open_run(run), out)
    assert_is_merge(out, run)
