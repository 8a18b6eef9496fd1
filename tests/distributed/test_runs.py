"""Which processes make one run, however they were launched, and that no job touches the run of another."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest

import recorder
from tests.rigs import jobs
from tests.rigs.jobs import SCRIPTS

from .conftest import Train

LOOP, SPAWN = SCRIPTS / "loop.py", SCRIPTS / "spawn.py"


def digests(folder: Path) -> dict[Path, str]:
    return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.rglob("*") if path.is_file()}


def runs_in(folder: Path) -> list[recorder.Run]:
    return [recorder.open_run(path) for path in sorted((folder / "recordings").iterdir())]


@pytest.mark.parametrize("layout", ["ddp", "fsdp2"])
def test_the_ranks_of_one_torchrun_make_one_run(train: Train, layout: str) -> None:
    (run,) = runs_in(train(layout, "everything", "--watch").folder)
    assert run.ranks == [0, 1]
    assert run.world_size == 2
    assert [writer.rank for writer in run.writers] == [0, 1]
    assert {writer.manifest.members["world_size"] for writer in run.writers} == {2}
    assert {writer.manifest.members["step_source"] for writer in run.writers} == {"optimizer"}


def test_spawned_ranks_agree_on_one_run_through_the_store(tmp_path: Path) -> None:
    address = f"tcp://127.0.0.1:{jobs.free_port()}"
    finished = jobs.succeeded(jobs.python(tmp_path, SPAWN, address, **jobs.recording()))
    (run,) = runs_in(tmp_path)
    assert run.ranks == [0, 1]
    assert run.world_size == 2
    assert len(run.writers) == 2, "the process that spawns them records nothing"
    assert re.fullmatch(r"spawn-\d{8}-\d{6}", run.name)
    assert [writer.balance.dropped for writer in run.writers] == [{}, {}]
    assert run.steps == [0, 1, 2]
    closing = [*finished.lines("recorder: ", "nothing dropped"), *finished.lines("recorder: next: ")]
    assert sorted(finished.lines("recorder")) == sorted(closing)


def test_agents_of_a_static_rendezvous_make_one_run_and_touch_no_other(tmp_path: Path) -> None:
    """Their run id says `none`."""
    jobs.succeeded(jobs.program(tmp_path, LOOP, "--steps=3", RECORDER_NAME="one=1", **jobs.recording()))
    (first,) = runs_in(tmp_path)
    assert first.name == "one=1"
    before = digests(first.path)
    assert len(before) > 3

    address = ("--rdzv-backend=static", "--nnodes=2", "--master-addr=127.0.0.1", f"--master-port={jobs.free_port()}")
    agents = [
        jobs.torchrun(
            tmp_path / f"agent{rank}",
            LOOP,
            "--steps=3",
            options=(*address, f"--node-rank={rank}", "--nproc-per-node=1"),
            **jobs.recording(dir=str(tmp_path / "recordings")),
        )
        for rank in (0, 1)
    ]
    for agent in agents:
        jobs.succeeded(agent)
    (second,) = [run for run in runs_in(tmp_path) if run.path != first.path]
    assert second.ranks == [0, 1]
    assert [writer.manifest.members["node_rank"] for writer in second.writers] == [0, 1]
    assert second.run_id != "none"
    assert digests(first.path) == before


def test_a_restarted_job_stays_one_run_with_writers_of_their_own(tmp_path: Path) -> None:
    finished = jobs.succeeded(
        jobs.torchrun(
            tmp_path,
            LOOP,
            *("--end=exception", "--attempt=0"),
            options=("--standalone", "--max-restarts=1"),
            TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",
            **jobs.recording(),
        )
    )
    (run,) = runs_in(finished.folder)
    assert [(writer.rank, writer.attempt) for writer in run.writers] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert len({writer.name for writer in run.writers}) == 4
    assert run.problems == []
    assert re.fullmatch(r"loop-\d{8}-\d{6}", run.name), "the name that the first of the first attempt gave it"
    frame = run.to_pandas()
    last = frame[(frame["attempt"] == 1) & (frame["site"] == "output") & (frame["module_path"] == "0")]
    assert sorted(zip(last["rank"], last["step"], strict=True)) == [(r, s) for r in (0, 1) for s in range(20)]


@pytest.mark.parametrize("options", [(), ("--rdzv-backend=c10d", "--rdzv-id=100")], ids=["static", "c10d"])
def test_a_restart_stays_one_run_where_no_run_id_is_unique(tmp_path: Path, options: tuple[str, ...]) -> None:
    port = jobs.free_port()
    address = f"--rdzv-endpoint=127.0.0.1:{port}" if options else f"--master-port={port}"
    launched = ("--nproc-per-node=1", "--max-restarts=1", address, *options)
    jobs.succeeded(
        jobs.torchrun(tmp_path, LOOP, "--end=exception", "--attempt=0", options=launched, **jobs.recording())
    )
    (run,) = runs_in(tmp_path)
    assert [(writer.rank, writer.attempt) for writer in run.writers] == [(0, 0), (0, 1)]
    assert run.problems == []
