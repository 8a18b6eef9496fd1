"""The files of deploy/: one machine is recorded, and a value that was not set is said. More: `scripts/test-cluster`."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import recorder
from tests.rigs.merging import make_small_run

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
TRAINING = ROOT / "tests" / "small_training.py"


def start(cwd: Path, *command: str | Path, **values: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("RECORDER", "_RECORDER", "SLURM_"))}
    env |= {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}", "OMP_NUM_THREADS": "1", **values}
    with socket.create_server(("127.0.0.1", 0)) as server:
        env["PET_MASTER_PORT"] = str(server.getsockname()[1])
    return subprocess.run(["bash", *command], cwd=cwd, env=env, capture_output=True, text=True, timeout=240)


def test_one_machine_records_every_rank(tmp_path: Path) -> None:
    done = start(tmp_path, DEPLOY / "torchrun.sh", "2", TRAINING)
    assert done.returncode == 0, done.stderr
    assert recorder.open_run(tmp_path / "recordings").ranks == [0, 1]


@pytest.mark.parametrize(
    "name",
    [
        "torchrun.sh",
        "slurm/train.sbatch",
        "slurm/merge.sbatch",
        "slurm/dask-merge.sbatch",
        "slurm/submit.sh",
    ],
)
def test_a_template_without_a_script_says_how_it_is_used(tmp_path: Path, name: str) -> None:
    done = start(tmp_path, DEPLOY / name)
    assert done.returncode == 2
    assert done.stderr.startswith("usage: ")


@pytest.mark.parametrize(
    ("name", "values", "said"),
    [
        ("train.sbatch", {}, "'recordings' is still SET_ME: give it a value at the top of the file"),
        ("train.sbatch", {"ACTIVATE": ". SET_ME/bin/activate"}, "is still SET_ME"),
        ("train.sbatch", {"RECORDER_DIR": "recordings", "AT_LIMIT": "go on"}, "must be 'stop' or 'requeue'"),
        ("train.sbatch", {"RECORDER_DIR": "recordings", "RANKS_PER_NODE": "all"}, "must be a number from 1"),
        ("train.sbatch", {"RECORDER_DIR": "recordings", "SHIP_TO": "s3://b"}, "ship_to needs scratch"),
        ("train.sbatch", {"RECORDER_DIR": "recordings"}, "this is no Slurm job: start it with sbatch"),
        ("merge.sbatch", {}, "'recordings' is still SET_ME"),
        ("merge.sbatch", {"RECORDER_DIR": "recordings"}, "no run in 'recordings/train.py': did the training begin?"),
    ],
)
def test_a_wrong_value_of_a_slurm_job_is_said(tmp_path: Path, name: str, values: dict[str, str], said: str) -> None:
    done = start(tmp_path, DEPLOY / "slurm" / name, "train.py", **values)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"{name}: ")
    assert said in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "values", "said"),
    [
        (("train", "SET_ME"), {}, "the argument 'SET_ME' is still SET_ME: give it a value in the manifest"),
        (("train", "train.py"), {"BUCKET": "s3://SET_ME"}, "BUCKET is still 's3://SET_ME'"),
        (("train", "train.py"), {"RECORDER_DIR": "nowhere"}, "'nowhere' is no folder: is the volume mounted?"),
        (("train",), {}, "usage: train SCRIPT"),
        (("merge",), {}, "no run in '.': did the training begin?"),
        ((), {}, "usage: train SCRIPT [ARGUMENT ...], or merge [RUN ...]"),
    ],
)
def test_a_wrong_value_of_a_pod_is_said(
    tmp_path: Path, words: tuple[str, ...], values: dict[str, str], said: str
) -> None:
    done = start(tmp_path, DEPLOY / "container" / "entrypoint.sh", *words, **{"RECORDER_DIR": ".", **values})
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("recorder-entrypoint: ")
    assert said in done.stderr


def test_a_value_that_was_not_set_ends_a_skypilot_task(tmp_path: Path) -> None:
    run = yaml.safe_load((DEPLOY / "skypilot" / "train.yaml").read_text())["run"]
    (tmp_path / "run").write_text(run)
    done = start(tmp_path, "run")
    assert done.returncode == 2
    assert done.stderr == "train.yaml: 'script' is still SET_ME: give it a value\n"


def test_a_value_that_was_not_set_stops_a_ray_job_while_torch_is_imported(tmp_path: Path) -> None:
    environment = yaml.safe_load((DEPLOY / "ray" / "runtime-env.yaml").read_text())["env_vars"]
    done = start(tmp_path, "-c", "python -c 'import torch; print(torch)'", **environment)
    assert (done.returncode, done.stdout) == (2, "")
    assert "RECORDER_DIR (environment): dir = 'SET_ME': still has its placeholder" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"ACTIVATE": ". SET_ME/bin/activate"}, "'activate' is still SET_ME: give it a value at the top of the file"),
        ({}, "this is no Slurm job: start it with sbatch"),
    ],
)
def test_a_wrong_value_of_a_merge_by_dask_is_said(tmp_path: Path, values: dict[str, str], said: str) -> None:
    done = start(tmp_path, DEPLOY / "slurm" / "dask-merge.sbatch", "run", "out", **values)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"dask-merge.sbatch: {said}\n"
    assert list(tmp_path.iterdir()) == []


def test_a_merge_by_dask_starts_and_ends_its_cluster(tmp_path: Path) -> None:
    """With what a Slurm job has, but for `srun`, which starts two workers here."""
    run = make_small_run(tmp_path / "run")
    (tmp_path / "srun").write_text('#!/bin/sh\nshift\n"$@" & "$@" & trap "kill $! %1" TERM; wait\n')
    (tmp_path / "srun").chmod(0o755)
    values = {"SLURM_JOB_ID": str(os.getpid()), "ACTIVATE": f"PATH={tmp_path}:$PATH"}
    done = start(tmp_path, DEPLOY / "slurm" / "dask-merge.sbatch", run, tmp_path / "out", **values)
    assert done.returncode == 0, done.stderr
    assert "out: no findings" in done.stdout
    assert recorder.open_run(tmp_path / "out").is_merged


def test_every_file_is_on_a_page() -> None:
    pages = {page: page.read_text() for page in DEPLOY.rglob("*.md")}
    linked = {
        (page.parent / name).resolve() for page, text in pages.items() for name in re.findall(r"\]\(([^)#]+)", text)
    }
    assert {path for path in DEPLOY.rglob("*") if path.is_file()} - set(pages) <= linked
    assert all(path.exists() for path in linked)
