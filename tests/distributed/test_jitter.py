"""The setting `jitter` where tensors are distributed: replicas are moved alike, and a twin that is none says so."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import recorder
from recorder.analyze.first.first import first
from recorder.cli.commands.showing import ls_command
from recorder.cli.output import print_reply
from tests.rigs import jobs
from tests.rigs.jobs import SCRIPTS

CASES = ["tp", "tp_late", "sp"]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> jobs.Finished:
    return jobs.succeeded(jobs.ranks(tmp_path_factory.mktemp("jitter"), SCRIPTS / "jittered.py", "out"))


@pytest.fixture(scope="module")
def by_rank(job: jobs.Finished) -> list[Any]:
    return [torch.load(job.folder / "out" / f"rank{rank}.pt") for rank in range(2)]


def run_of(job: jobs.Finished, name: str) -> recorder.Run:
    return recorder.open_run(job.folder / "out" / name)


@pytest.mark.parametrize("case", CASES)
def test_a_twin_of_a_tensor_parallel_training_differs_by_roundings(by_rank: list[Any], case: str) -> None:
    for rank in range(2):
        (plain, num_plain), (twin, num_twin) = by_rank[rank][0][case]
        assert num_plain == num_twin
        assert torch.equal(plain[-1], twin[-1])  # the random state
        assert not torch.equal(plain[2], twin[2])  # what the trained model returns
        for one, other in zip(plain[:3], twin[:3], strict=True):
            assert torch.allclose(one, other, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("case", CASES)
def test_what_ranks_share_stays_equal_in_a_twin(job: jobs.Finished, by_rank: list[Any], case: str) -> None:
    (_, (one, _)), (_, (other, _)) = (found[0][case] for found in by_rank)
    assert torch.equal(one[0], other[0]) and torch.equal(one[1], other[1])  # the losses
    twin = run_of(job, f"{case}.twin")
    assert twin.jitter_moved == ("embeddings",)
    assert first(twin).replica is None


def test_what_is_distributed_and_given_to_the_root_is_moved_and_stays_the_programs_own(by_rank: list[Any]) -> None:
    for name, (before, after, seen, num_collectives) in by_rank[0][1].items():
        assert torch.equal(before, after), name
        assert (seen != before).all() and torch.allclose(seen, before, rtol=1e-6), name
        assert num_collectives == 0, name
        assert torch.equal(seen, by_rank[1][1][name][2]), name


def test_a_twin_of_which_nothing_could_be_moved_says_so(
    job: jobs.Finished, by_rank: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    (plain, _), (twin, _) = by_rank[0][0]["unknown"]
    assert all(map(torch.equal, plain, twin))
    assert len(job.lines("model: jitter changed nothing")) == 2  # on each rank
    run = run_of(job, "unknown.twin")
    assert (run.jitter, run.jitter_moved) == (1, ())
    print_reply(ls_command(str(run.path)), as_json=False)
    said = capsys.readouterr().out
    assert "no value of the model was changed" in said and "on purpose" not in said
    assert run_of(job, "unknown.plain").jitter_moved is None
