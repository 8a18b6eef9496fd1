"""One run directory, many processes: restarts, relaunches with another number of ranks, two jobs at once."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest

import recorder
from recorder.merge.merge import merge_run
from tests.campaigns.faults import training
from tests.campaigns.faults.replay import Replay
from tests.campaigns.faults.support import batches_of
from tests.rigs import jobs
from tests.rigs.command_line import Cli, cli
from tests.rigs.jobs import Finished

__all__ = ["cli"]

RUN_ID = "5a1d9c1e-2f04-4e7b-9d0c-8f6f5e0a7b31"
SAVE_AT, FAIL_AT, STEPS = 4, 7, 9
MODULE = ["-m", training.__name__]
UP = "blocks.0.up"


def settings(folder: Path) -> dict[str, str]:
    return {
        **jobs.recording(dir=str(folder / "recordings"), min_free_bytes="0"),
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }


def launch(folder: Path, *options: str, num_ranks: int, **more: str) -> jobs.Job:
    """A torchrun that was given the run's id."""
    rendezvous = ("--rdzv-backend=c10d", f"--rdzv-id={RUN_ID}", f"--rdzv-endpoint=127.0.0.1:{jobs.free_port()}")
    options_of_launcher = (*rendezvous, f"--nproc-per-node={num_ranks}", "--max-restarts=1")
    return jobs.torchrun(folder, *MODULE, *options, options=options_of_launcher, **settings(folder), **more)


def alone(folder: Path, *options: str) -> jobs.Job:
    """A process of one rank that was given the run's id."""
    return jobs.program(folder, training.__file__, *options, **settings(folder.parent), TORCHELASTIC_RUN_ID=RUN_ID)


def digests(folder: Path) -> dict[Path, str]:
    return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.rglob("*") if path.is_file()}


def outputs(replay: Replay, step: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    """What all ranks together gave at a step."""
    return np.concatenate([replay.at(rank, step)["output", UP, ""] for rank in range(replay.world_size)])


def wrong_rows(writer: recorder.read.writers.RecordedWriter, replay: Replay) -> list[str]:
    rows = [row for batch, _ in batches_of(writer.directory) for row in batch.to_pylist()]
    assert rows
    return [problem for row in rows if (problem := replay.problem(row))]


@pytest.fixture(scope="module")
def replays() -> dict[int, Replay]:
    return {world_size: Replay(world_size) for world_size in (1, 2)}


@pytest.fixture(scope="module")
def restarted(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """Two ranks; the first attempt leaves a checkpoint and fails, the second begins from it."""
    options = (f"--steps={STEPS}", f"--save-at={SAVE_AT}", f"--fail-at={FAIL_AT}")
    for _ in range(3):
        finished = jobs.succeeded(launch(tmp_path_factory.mktemp("restarts"), *options, num_ranks=2))
        if "EADDRINUSE" not in finished.output:  # else the first attempt ended before it began: torchrun picks a port
            break  # that is free, and others may take it before rank 0 does
    return finished


@pytest.fixture(scope="module")
def shared(restarted: Finished) -> tuple[dict[Path, str], list[Finished]]:
    """Then two jobs of one rank at once, into the same run; what was there before them, and their ends."""
    before = digests(restarted.folder / "recordings")
    both = [alone(restarted.folder / name, f"--steps={steps}") for name, steps in (("a", 3), ("b", 2))]
    return before, [jobs.succeeded(job) for job in both]


class TestARestart:
    def test_each_attempt_has_writers_of_its_own_and_what_training_had_in_them(
        self, restarted: Finished, replays: dict[int, Replay]
    ) -> None:
        writers = recorder.open_run(restarted.folder / "recordings" / RUN_ID).writers
        of_two = [writer for writer in writers if writer.manifest.members["world_size"] == 2]
        assert [(writer.rank, writer.attempt) for writer in of_two] == [(0, 0), (0, 1), (1, 0), (1, 1)]
        assert {writer.state for writer in of_two} == {"closed"}
        assert [problem for writer in of_two for problem in wrong_rows(writer, replays[2])] == []

    def test_the_steps_that_were_done_again_count_once_and_the_older_stay_reachable(
        self, restarted: Finished, replays: dict[int, Replay]
    ) -> None:
        run = recorder.open_run(restarted.folder / "recordings" / RUN_ID)
        for step in range(SAVE_AT, STEPS):
            assert np.array_equal(run.array(UP, site="output", step=step), outputs(replays[2], step))
            own = run.array(UP, site="output", step=step, rank=1)
            assert np.array_equal(own, replays[2].at(1, step)["output", UP, ""])
        frame = run.to_pandas(columns=["attempt", "step", "rank", "site", "module_path"])
        twice = frame[(frame.site == "output") & (frame.module_path == UP) & (frame["rank"] == 1)]
        assert sorted(twice[twice.step == SAVE_AT].attempt) == [0, 1]
        assert sorted(twice[twice.step == FAIL_AT].attempt) == [1]


class TestSeveralJobsInOneRun:
    def test_nothing_of_the_others_is_touched(
        self, restarted: Finished, shared: tuple[dict[Path, str], list[Finished]]
    ) -> None:
        before, _ = shared
        after = digests(restarted.folder / "recordings")
        assert {path: after.get(path) for path in before} == before
        assert len(after) > len(before) > 8

    def test_each_job_has_a_writer_with_what_it_had(
        self, restarted: Finished, shared: object, replays: dict[int, Replay]
    ) -> None:
        run = recorder.open_run(restarted.folder / "recordings" / RUN_ID)
        own = [writer for writer in run.writers if writer.manifest.members["world_size"] == 1]
        assert sorted(writer.last_step or 0 for writer in own) == [1, 2]
        assert [problem for writer in own for problem in wrong_rows(writer, replays[1])] == []
        assert run.problems == []
        assert run.endings == []

    def test_the_newest_attempt_at_a_step_counts_with_as_many_ranks_as_it_had(
        self, restarted: Finished, shared: object, replays: dict[int, Replay]
    ) -> None:
        run = recorder.open_run(restarted.folder / "recordings" / RUN_ID)
        assert np.array_equal(run.array(UP, site="output", step=0), outputs(replays[1], 0))
        assert np.array_equal(run.array(UP, site="output", step=3), outputs(replays[2], 3))
        assert np.array_equal(run.array(UP, site="output", step=0, rank=0, attempt=0), outputs(replays[1], 0))
        assert np.array_equal(run.array(UP, site="output", step=0, rank=1), replays[2].at(1, 0)["output", UP, ""]), (
            "what only an older attempt has stays reachable"
        )

    def test_a_merge_mixes_no_attempts_and_says_what_it_left_out(
        self, restarted: Finished, shared: object, replays: dict[int, Replay], tmp_path: Path
    ) -> None:
        report = merge_run(recorder.open_run(restarted.folder / "recordings" / RUN_ID), tmp_path / "merged")
        assert report.findings["superseded"]["count"] > 0
        assert set(report.findings) == {"superseded", "buffers_differ"}, "each rank has its own running mean"
        merged = recorder.open_run(tmp_path / "merged")
        for step, world_size in ((0, 1), (3, 2), (SAVE_AT, 2), (STEPS - 1, 2)):
            found = merged.array(UP, site="output", step=step)
            assert np.array_equal(found, outputs(replays[world_size], step))

    def test_both_are_told_of_each_other(self, shared: tuple[dict[Path, str], list[Finished]]) -> None:
        _, both = shared
        for job in both:
            (line,) = job.lines("rank=00000", "more of this attempt")
            assert "nothing is overwritten" in line

    def test_the_list_of_writers_shows_them_all(self, restarted: Finished, shared: object, cli: Cli) -> None:
        listed = cli("ls", restarted.folder / "recordings" / RUN_ID)
        closed = [line for line in listed.out.splitlines() if "  closed" in line]
        assert listed.exit_code == 0
        assert len(closed) == 6  # a rank that ended with "Connection closed by peer" has a line, too
