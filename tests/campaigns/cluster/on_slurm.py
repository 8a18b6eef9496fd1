"""deploy/slurm under a real Slurm: two nodes with two ranks each, and what may happen to a job. `scripts/test-cluster`.

pytest finds this file only where it is named, since it needs Slurm and to be root.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import recorder
from tests.campaigns.cluster.nodes import Slurm, command, wait_for

ROOT = Path(__file__).parents[3]
SLURM = ROOT / "deploy" / "slurm"
TRAIN = Path(__file__).with_name("train.py")
SWITCH = (("off", 0), ("on", 1))
PROGRAMS = Path(__file__).with_name("programs.py")
ACTIVATE = f". {sys.prefix}/bin/activate; export PYTHONPATH={ROOT} OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=1"


def recorder_says(*words: str | Path) -> tuple[int, str]:
    done = subprocess.run([sys.executable, "-m", "recorder", *map(str, words)], capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


@dataclass(frozen=True, kw_only=True)
class Job:
    """A training that was submitted together with the job that merges it."""

    slurm: Slurm
    folder: Path
    id: str
    merge: str

    @property
    def output(self) -> str:
        path = self.folder / f"{self.id}.out"
        return path.read_text() if path.exists() else ""

    @property
    def merge_output(self) -> str:
        return (self.folder / f"{self.merge}.out").read_text()

    def reaches(self, step: int, times: int = 1) -> None:
        """Wait until every rank has finished the step for the n-th time."""
        said = f"step {step} is over"
        wait_for(f"{said} in job {self.id}", lambda: self.output.count(said) >= 4 * times, 240)

    def ended(self) -> tuple[str, str, str, str]:
        training, merge = self.slurm.ended(self.id), self.slurm.ended(self.merge)
        for job in (self.id, self.merge):
            print(command("scontrol", "show", "job", job), (self.folder / f"{job}.out").read_text(), sep="\n")
        codes = [self.slurm.shown(job)["ExitCode"].partition(":")[0] for job in (self.id, self.merge)]
        return training, codes[0], merge, codes[1]

    def writers(self) -> list[dict[str, Any]]:
        folders = (self.folder / "recordings" / self.id).glob("*/rank=*/*/_writer.json")
        return [json.loads(path.read_text()) for path in folders]

    @property
    def run(self) -> recorder.Run:
        return recorder.open_run(self.folder / "recordings" / self.id)

    @property
    def merged(self) -> recorder.Run:
        return recorder.open_run(self.folder / "recordings" / "merged" / self.id)


class Submit:
    """`submit.sh` as a person calls it, with values in the environment."""

    def __init__(self, slurm: Slurm, folder: Path) -> None:
        self._slurm = slurm
        self._folder = folder

    def __call__(self, *program: str, options: tuple[str, ...] = (), scratch: bool = False, **values: str) -> Job:
        settings = {
            "RECORDER_DIR": str(self._folder / "recordings"),
            "RECORDER_RULES": "site=* keep=tensor,stats,fingerprint",
            "RANKS_PER_NODE": "2",
            "SCRATCH": str(next(iter(self._slurm.nodes.values())).scratch) if scratch else "",
            "ACTIVATE": ACTIVATE,
            "SBATCH_OUTPUT": str(self._folder / "%A.out"),
            **values,
        }
        words: list[str | Path] = [SLURM / "submit.sh", "--cpus-per-task=4", *options, "--", TRAIN, *program]
        said = command(*words, **settings)
        print("$", *words, "\n", said)
        found = re.fullmatch(r"training: job (\d+); merge: job (\d+), when it is over\n", said)
        assert found, said
        return Job(slurm=self._slurm, folder=self._folder, id=found[1], merge=found[2])


@pytest.fixture
def submit(slurm: Slurm, folder: Path) -> Iterator[Submit]:
    wait_for("three idle nodes", lambda: len(slurm.idle()) == 3)
    yield Submit(slurm, folder)
    command("scancel", "--user=root")


def assert_whole(run: recorder.Run, steps: range) -> None:
    """Each of the four ranks has every step, and every byte is right."""
    assert run.ranks == [0, 1, 2, 3]
    frame = run.to_pandas(columns=["rank", "step", "site", "module_path"])
    frame = frame[(frame.site == "grad") & (frame.module_path == "blocks.1.mlp.down")]
    for rank in range(4):
        assert sorted(set(frame[frame["rank"] == rank].step)) == list(steps)
    code, said = recorder_says("verify", run.path)
    assert code == 0, said


def assert_merged(job: Job, step: int) -> None:
    """The global view holds the step: batches of all ranks end to end, gradients once."""
    merged, run = job.merged, job.run
    output = merged.array("blocks.1", site="output", step=step)
    pieces = [run.array("blocks.1", site="output", step=step, rank=rank) for rank in range(4)]
    assert np.array_equal(output, np.concatenate(pieces))
    gradient = merged.array("blocks.1.mlp.down", site="grad", name="weight", step=step)
    assert np.array_equal(gradient, run.array("blocks.1.mlp.down", site="grad", name="weight", step=step, rank=3))


def assert_only_the_last_step_may_be_partial(job: Job, merge: tuple[str, str]) -> None:
    """Ranks that a signal stops may be in different steps; then the merge says so, and of no other step."""
    found = re.findall(r"^  step (\d+) .*: no row of", job.merge_output, re.MULTILINE)
    assert merge == (("FAILED", "1") if found else ("COMPLETED", "0"))
    assert set(map(int, found)) <= {job.run.steps[-1]}
    assert {writer["state"] for writer in job.writers()} == {"closed"}
    assert_merged(job, job.run.steps[-1] - 1)


def left_on_scratch(slurm: Slurm) -> list[str]:
    out = command("srun", "--nodes=3", "bash", "-c", f"ls {next(iter(slurm.nodes.values())).scratch}")
    return out.split()


def test_a_job_that_finishes_is_merged(slurm: Slurm, submit: Submit) -> None:
    job = submit("--steps=5", scratch=True)
    assert job.ended() == ("COMPLETED", "0", "COMPLETED", "0")
    assert job.run.run_id == f"slurm-{job.id}-0"
    assert_whole(job.run, range(5))
    assert_merged(job, 4)
    hosts = {writer["rank"]: writer["host"] for writer in job.writers()}
    assert hosts == {0: "n1", 1: "n1", 2: "n2", 3: "n2"}
    assert left_on_scratch(slurm) == []


@pytest.mark.slow
def test_a_cancelled_job_keeps_what_it_recorded_on_scratch(slurm: Slurm, submit: Submit) -> None:
    job = submit("--steps=5000", "--pause=0.2", scratch=True)
    job.reaches(3)
    command("scancel", job.id)
    states = job.ended()
    assert states[0] == "CANCELLED"
    assert job.run.steps[-1] >= 3
    assert_only_the_last_step_may_be_partial(job, states[2:])
    assert left_on_scratch(slurm) == []


def test_a_preempted_job_goes_on_in_the_same_run(slurm: Slurm, submit: Submit, folder: Path) -> None:
    job = submit("--steps=14", "--pause=0.3", f"--checkpoint={folder}/checkpoint.pt", scratch=True)
    job.reaches(3)
    urgent = command("sbatch", "--parsable", "--partition=high", "--nodes=3", "--exclusive", "--wrap=sleep 1").strip()
    assert slurm.ended(urgent) == "COMPLETED"
    assert job.ended()[:2] == ("COMPLETED", "0")
    assert slurm.shown(job.id)["Restarts"] == "1"
    assert {writer["attempt"] for writer in job.writers()} == {0, 1000}
    assert_whole(job.run, range(14))
    assert_merged(job, 13)


@pytest.mark.slow
@pytest.mark.parametrize("at_limit", ["stop", "requeue"])
def test_a_job_stops_before_its_time_is_over(slurm: Slurm, submit: Submit, folder: Path, at_limit: str) -> None:
    end = folder / "end"
    job = submit(
        *("--steps=5000", "--pause=0.2", f"--checkpoint={folder}/checkpoint.pt", f"--until={end}"),
        options=("--time=60", "--signal=B:USR1@120"),
        AT_LIMIT=at_limit,
    )
    job.reaches(3)
    hours, minutes, _ = map(int, slurm.shown(job.id)["RunTime"].split(":"))
    command("scontrol", "update", f"JobId={job.id}", f"TimeLimit={60 * hours + minutes + 2}")
    if at_limit == "stop":
        states = job.ended()
        assert states[:2] == ("FAILED", "124")
        assert_only_the_last_step_may_be_partial(job, states[2:])
        return
    wait_for("the restart", lambda: slurm.shown(job.id)["Restarts"] == "1", 240)
    command("scontrol", "update", f"JobId={job.id}", "TimeLimit=60")
    end.touch()
    states = job.ended()
    assert states[:2] == ("COMPLETED", "0")
    assert {writer["attempt"] for writer in job.writers()} == {0, 1000}
    assert_whole(job.run, range(job.run.steps[-1] + 1))
    assert_merged(job, job.run.steps[-1])


@pytest.mark.slow
def test_a_rank_that_fails_ends_the_job_on_all_nodes(slurm: Slurm, submit: Submit) -> None:
    job = submit("--steps=5000", "--fail-at=4", scratch=True)
    state, code, *merge = job.ended()
    # srun says the largest code: 143 where it stopped the other node's torchrun before that had seen its ranks fail.
    assert (state, code in ("1", "143"), *merge) == ("FAILED", True, "FAILED", "1")
    assert re.search("finding: partial, .*\n  step 4 .*: no row of rank 3 of 0, 1, 2, 3", job.merge_output)
    assert {writer["state"] for writer in job.writers()} == {"closed"}
    assert_merged(job, 3)
    assert left_on_scratch(slurm) == []


@pytest.mark.slow
def test_what_a_kill_left_on_scratch_arrives_when_the_job_starts_again(
    slurm: Slurm, submit: Submit, folder: Path
) -> None:
    end = folder / "end"
    job = submit("--steps=5000", "--pause=0.2", f"--checkpoint={folder}/checkpoint.pt", f"--until={end}", scratch=True)
    job.reaches(15)  # for longer than the interval of flushes
    for process in Path("/proc").glob("[0-9]*"):  # tasks, torchrun and ranks; only this cluster's are in sight
        with contextlib.suppress(OSError):
            words, name = (process / "cmdline").read_text(), (process / "comm").read_text().strip()
            if str(TRAIN) in words and "slurm_script" not in words and name != "srun":
                os.kill(int(process.name), signal.SIGKILL)
    assert job.ended() == ("FAILED", "137", "FAILED", "2")
    assert job.writers() == []
    assert "did the training begin?" in job.merge_output
    end.touch()
    command("scontrol", "requeue", job.id)
    wait_for("the restart", lambda: slurm.shown(job.id)["Restarts"] == "1" and slurm.state(job.id) != "FAILED")
    assert slurm.ended(job.id) == "COMPLETED", job.output
    assert sorted((writer["attempt"], writer["rank"], writer["state"]) for writer in job.writers()) == [
        *((0, rank, "recording") for rank in range(4)),
        *((1000, rank, "closed") for rank in range(4)),
    ]
    assert job.run.steps[0] == 0
    assert left_on_scratch(slurm) == []


@pytest.mark.slow
def test_a_job_survives_the_death_of_a_node(slurm: Slurm, submit: Submit, folder: Path) -> None:
    job = submit("--steps=14", "--pause=0.5", f"--checkpoint={folder}/checkpoint.pt")
    job.reaches(3)
    slurm.nodes["n2"].kill()
    job.reaches(13)
    states = job.ended()
    slurm.boot(slurm.nodes["n2"])
    # The job itself ends well. What the dead node's ranks had not flushed yet is lost, and the merge says so.
    assert states == ("COMPLETED", "0", "FAILED", "1")
    hosts = {(writer["attempt"], writer["rank"]): writer["host"] for writer in job.writers()}
    assert [hosts[0, rank] for rank in range(4)] == ["n1", "n1", "n2", "n2"]
    assert [hosts[1000, rank] for rank in range(4)] == ["n1", "n1", "n3", "n3"]
    assert not list((folder / "recordings").rglob("_*.open"))
    assert re.search(r"rank 2 \(writer .*\): not closed, .* the record ends in step", job.merge_output)
    assert job.run.steps == list(range(14))
    assert_merged(job, 0)
    assert_merged(job, 13)


@pytest.mark.slow
@pytest.mark.usefixtures("submit")
def test_tasks_without_torchrun_are_one_run_and_train_the_same(slurm: Slurm, folder: Path) -> None:
    steps = [f"mkdir {d}; cd {d}; RECORDER={on} HEAD=n1 srun python {PROGRAMS} by_slurm; cd .." for d, on in SWITCH]
    (folder / "job").write_text("\n".join(["#!/bin/bash -e", ACTIVATE, *steps, ""]))
    options = ("--nodes=2", "--ntasks=4", "--ntasks-per-node=2", f"--output={folder}/out.txt")
    job = command("sbatch", "--parsable", *options, folder / "job").strip()
    assert slurm.ended(job) == "COMPLETED", (folder / "out.txt").read_text()
    assert not (folder / "off" / "recordings").exists()
    run = recorder.open_run(folder / "on" / "recordings")
    assert (run.run_id, run.world_size, run.ranks, run.steps) == (f"slurm-{job}-1", 4, [0, 1, 2, 3], [0, 1, 2])
    assert set(run.to_pandas(columns=["micro_step"]).micro_step.dropna()) == {0, 1}
    writers = [json.loads(path.read_text()) for path in folder.glob("on/recordings/*/*/*/_writer.json")]
    all_ranks = sorted((w["rank"], w["local_rank"], w["node_rank"], w["host"]) for w in writers)
    assert all_ranks == [(0, 0, 0, "n1"), (1, 1, 0, "n1"), (2, 0, 1, "n2"), (3, 1, 1, "n2")]
    for rank in range(4):
        off, on = (torch.load(folder / name / "out" / f"rank{rank}.pt") for name, _ in SWITCH)
        assert all(map(torch.equal, off, on))


@pytest.mark.slow
def test_each_task_of_an_array_is_a_run_of_its_own(submit: Submit, folder: Path) -> None:
    job = submit("--steps=3", options=("--nodes=1", "--array=4-5"), RANKS_PER_NODE="1")
    wait_for("the merge", lambda: (folder / f"{job.merge}.out").exists(), 240)
    assert job.slurm.ended(job.merge) == "COMPLETED"
    for task in (4, 5):
        run = recorder.open_run(folder / "recordings" / f"{job.id}_{task}")
        assert (run.ranks, run.steps) == ([0], [0, 1, 2])
        assert recorder.open_run(folder / "recordings" / "merged" / f"{job.id}_{task}").steps == [0, 1, 2]


def test_a_value_that_was_not_set_ends_both_jobs(submit: Submit) -> None:
    job = submit(RECORDER_DIR="")
    assert job.ended() == ("FAILED", "2", "FAILED", "2")
    assert job.output.startswith("train.sbatch: 'recordings' is still SET_ME")
    assert job.merge_output.startswith("merge.sbatch: 'recordings' is still SET_ME")
