"""The files of deploy/ start a recorded training; the Slurm one as the plain script that it is without Slurm."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import recorder

ROOT = Path(__file__).parents[2]
TRAINING = ROOT / "tests" / "small_training.py"


def start(cwd: Path, *command: str | Path) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("RECORDER", "_RECORDER", "SLURM_"))}
    env |= {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}", "OMP_NUM_THREADS": "1"}
    with socket.create_server(("127.0.0.1", 0)) as server:
        env["PET_MASTER_PORT"] = str(server.getsockname()[1])
    return subprocess.run(["bash", *command], cwd=cwd, env=env, capture_output=True, text=True, timeout=240)


@pytest.mark.parametrize(
    "command", [("torchrun.sh", "2", TRAINING), ("single-node.sbatch", TRAINING)], ids=lambda command: command[0]
)
def test_a_template_records_every_rank(tmp_path: Path, command: tuple[str | Path, ...]) -> None:
    done = start(tmp_path, ROOT / "deploy" / command[0], *command[1:])
    assert done.returncode == 0, done.stderr
    assert recorder.open_run(tmp_path / "recordings").ranks == [0, 1]


@pytest.mark.parametrize("name", ["torchrun.sh", "single-node.sbatch"])
def test_a_template_without_a_script_says_how_it_is_used(tmp_path: Path, name: str) -> None:
    done = start(tmp_path, ROOT / "deploy" / name)
    assert done.returncode == 2
    assert done.stderr.startswith("usage: ")
