"""The files of deploy/ start a recorded training; the Slurm one as the plain script that it is without Slurm."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import recorder

ROOT = Path(__file__).parents[2]
TRAINING = ROOT / "tests" / "small_training.py"
COMMANDS: dict[str, tuple[str | Path, ...]] = {"torchrun.sh": ("2", TRAINING), "single-node.sbatch": (TRAINING,)}


def start(cwd: Path, *command: str | Path) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("RECORDER", "_RECORDER", "SLURM_"))}
    env |= {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}", "OMP_NUM_THREADS": "1"}
    with socket.create_server(("127.0.0.1", 0)) as server:
        env["PET_MASTER_PORT"] = str(server.getsockname()[1])
    return subprocess.run(["bash", *command], cwd=cwd, env=env, capture_output=True, text=True, timeout=240)


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, subprocess.CompletedProcess[str]]]:
    """Where each template ran and how it ended, side by side."""
    folders = {name: tmp_path_factory.mktemp(name) for name in COMMANDS}
    with ThreadPoolExecutor() as executor:
        ends = {
            name: executor.submit(start, folders[name], ROOT / "deploy" / name, *words)
            for name, words in COMMANDS.items()
        }
    return {name: (folders[name], end.result()) for name, end in ends.items()}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_template_records_every_rank(
    launched: dict[str, tuple[Path, subprocess.CompletedProcess[str]]], name: str
) -> None:
    folder, done = launched[name]
    assert done.returncode == 0, done.stderr
    assert recorder.open_run(folder / "recordings").ranks == [0, 1]


@pytest.mark.parametrize("name", COMMANDS)
def test_a_template_without_a_script_says_how_it_is_used(tmp_path: Path, name: str) -> None:
    done = start(tmp_path, ROOT / "deploy" / name)
    assert done.returncode == 2
    assert done.stderr.startswith("usage: ")
