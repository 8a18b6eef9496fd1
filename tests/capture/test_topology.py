"""Who a process is, by the environments that launchers give: as they were seen, or as their documentation has them."""

from __future__ import annotations

import pytest

from recorder.capture.topology import read, run_id

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


def test_ranks_of_torchrun_share_a_name_before_there_is_a_process_group() -> None:
    from torch._C._distributed_c10d import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    agent = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "none", "MASTER_ADDR": "127.0.0.1"}
    environ = {**TORCHRUN, **agent, "MASTER_PORT": str(store.port)}
    first, again, other = (
        run_id(read(changed), deadline_s=5.0, environ=changed)
        for changed in (environ, {**environ, "RANK": "0"}, {**environ, "TORCHELASTIC_RUN_ID": "101"})
    )
    assert first == again and first[1]
    assert other != first, "of another job on this store"
    del store
    name, is_shared = run_id(read(environ), deadline_s=0.1, environ=environ)
    assert name.startswith("unjoined") and not is_shared


def test_the_attempt_counts_restarts_of_the_job_and_of_the_launcher() -> None:
    assert read({"SLURM_RESTART_COUNT": "2", "TORCHELASTIC_RESTART_COUNT": "3"}).attempt == 2003
