"""Who a process is, by the environments that launchers give: as they were seen, or as their documentation has them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from recorder.capture.parallel.topology import read, run_id

BATCH = {
    **{"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"},
    **{"SLURM_NTASKS": "4", "SLURM_NNODES": "2", "SLURM_TASKS_PER_NODE": "2(x2)"},
}
"""A batch script of Slurm's with four tasks: the process is none of them."""
STEP = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "2(x2)"}
TASK = {**BATCH, **STEP, "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NODEID": "1"}
TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1"}
SHELL = {**BATCH, **STEP, "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "1", "SLURM_PTY_PORT": "40531"}
"""A command in `srun --pty bash`; an `srun` from there inherits the port."""
OPEN_MPI = {
    **{"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4"},
    **{"OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
}
HYDRA = {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
DAEMON = {**TASK, "SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "2"}
"""What a rank of mpirun's inherits under Slurm from its node's daemon, which is a task."""


@pytest.mark.parametrize(
    ("environ", "rank", "local_rank", "node_rank", "world_size", "local_world_size"),
    [
        pytest.param({}, 0, 0, 0, 1, 1, id="no launcher"),
        pytest.param(TORCHRUN, 5, 1, 1, 8, 4, id="torchrun"),
        pytest.param({**TASK, **TORCHRUN}, 5, 1, 1, 8, 4, id="torchrun as a task of Slurm's"),
        pytest.param(BATCH, 0, 0, 0, 1, 1, id="python in a batch script"),
        pytest.param(TASK, 3, 1, 1, 4, 2, id="srun"),
        pytest.param(SHELL, 0, 0, 0, 1, 1, id="a command in a shell of srun's"),
        pytest.param({**SHELL, **TASK}, 3, 1, 1, 4, 2, id="srun in a shell of srun's"),
        pytest.param({**TASK, "RANK": "3", "WORLD_SIZE": "4"}, 3, 1, 1, 4, 2, id="srun, with a rank set by hand"),
        pytest.param({**TASK, "SLURM_STEP_TASKS_PER_NODE": "8,4(x2),1"}, 3, 1, 1, 4, 4, id="srun, unequal nodes"),
        pytest.param({**TASK, "SLURM_STEP_TASKS_PER_NODE": "many"}, 3, 1, 1, 4, 4, id="srun, nonsense"),
        pytest.param(OPEN_MPI, 2, 0, 0, 4, 2, id="Open MPI"),
        pytest.param({**BATCH, **OPEN_MPI}, 2, 0, 0, 4, 2, id="Open MPI, first node of a Slurm job"),
        pytest.param({**DAEMON, **OPEN_MPI}, 2, 0, 0, 4, 2, id="Open MPI, another node of a Slurm job"),
        pytest.param({**DAEMON, **HYDRA}, 2, 0, 0, 4, 2, id="MPICH or Intel MPI in a Slurm job"),
        pytest.param({**TORCHRUN, "RANK": "-1"}, 0, 1, 1, 8, 4, id="a rank that is none"),
    ],
)
def test_a_process_knows_its_rank(
    environ: dict[str, str], rank: int, local_rank: int, node_rank: int, world_size: int, local_world_size: int
) -> None:
    here = read(environ)
    found = here.rank, here.local_rank, here.node_rank, here.world_size, here.local_world_size
    assert found == (rank, local_rank, node_rank, world_size, local_world_size)


def test_only_what_all_ranks_have_names_a_run() -> None:
    def name(environ: dict[str, str]) -> tuple[str, bool]:
        return run_id(read(environ), deadline_s=1.0, environ=environ)

    assert name(TASK) == ("slurm-7-0", True)
    assert name({**TASK, **TORCHRUN, "TORCHELASTIC_RUN_ID": "none"}) == ("slurm-7-0", True)
    uuid = "4f5a0a9e-0c5c-4a58-9f0c-0f1e8b4c2d11"
    assert name({**TASK, **TORCHRUN, "TORCHELASTIC_RUN_ID": uuid.upper()}) == (uuid, True)
    # Only some of mpirun's ranks inherit a step, and two commands in a batch script are two runs.
    assert not name({**DAEMON, **OPEN_MPI})[0].startswith("slurm")
    for environ in (BATCH, SHELL):
        first, second = name(environ), name(environ)
        assert first != second and first[1] and second[1] and not first[0].startswith("slurm")


def test_a_launch_of_torchrun_on_one_node_names_its_run(tmp_path: Path) -> None:
    def name(environ: dict[str, str]) -> tuple[str, bool]:
        return run_id(read(environ), deadline_s=0.1, environ=environ)

    launch = {**TORCHRUN, "RANK": "1", "WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "none"}
    first, other_rank, restarted, again = (
        name({**launch, "TORCHELASTIC_ERROR_FILE": f"/tmp/torchelastic_a/{folder}/error.json"})
        for folder in ("none_b/attempt_0/1", "none_b/attempt_0/0", "none_b/attempt_1/1", "none_c/attempt_0/1")
    )
    assert first == other_rank == restarted != again
    assert re.fullmatch(r"torchrun-[0-9a-f]{16}", first[0]) and first[1]
    several_nodes = {**launch, "WORLD_SIZE": "8", "TORCHELASTIC_ERROR_FILE": "/tmp/a/none_b/attempt_0/1/error.json"}
    assert name(several_nodes)[0].startswith("unjoined")
    alone = {**launch, "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "RANK": "0"}
    for file in ("", "error.json", "/home/me/errors/error.json"):
        assert not name({**alone, "TORCHELASTIC_ERROR_FILE": file})[0].startswith("torchrun")

    script = tmp_path / "nested.py"
    script.write_text(
        "import os, subprocess, sys\n"
        "from recorder.capture.parallel.topology import read, run_id\n"
        "print(run_id(read(os.environ), deadline_s=0.1)[0], flush=True)\n"
        "sys.argv.pop() and subprocess.run(['sh', '-c', f'{sys.executable} nested.py \"\"; :'], check=True)\n"
    )
    environ = {**os.environ, **alone, "TORCHELASTIC_ERROR_FILE": "/tmp/a/none_b/attempt_0/0/error.json"}
    ran = subprocess.run(
        ["sh", "-c", f"{sys.executable} nested.py more; :"], cwd=tmp_path, env=environ, capture_output=True, check=True
    )
    of_rank, of_its_child = ran.stdout.decode().split()
    assert of_rank.startswith("torchrun-") and not of_its_child.startswith("torchrun-")


def test_the_attempt_counts_restarts_of_the_job_and_of_the_launcher() -> None:
    assert read({"SLURM_RESTART_COUNT": "2", "TORCHELASTIC_RESTART_COUNT": "3"}).attempt == 2003
