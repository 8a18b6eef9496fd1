"""Tests of `recorder prove --world`: whether a program is one model on another number of ranks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import recorder
from recorder.analyze.prove.launches import Look, Observed, RankSeen
from recorder.analyze.prove.recording import asked_ranks, compare_batches, judge_world, on_other_ranks
from recorder.errors import LookupFailedError
from tests.rigs import jobs
from tests.rigs.command_line import Cli, cli

__all__ = ["cli"]
PROGRAM = Path(__file__).parent / "resharding.py"


def read(*of_ranks: Sequence[str]) -> Observed:
    """A launch whose ranks read these batches, one a step: texts of samples."""
    ranks = {
        rank: RankSeen(
            pid=rank, looks=tuple(Look(step, {"batch 0": batch}) for step, batch in enumerate(batches)), printed=()
        )
        for rank, batches in enumerate(of_ranks)
    }
    return Observed(exit_code=0, ranks=ranks)


ONE = read(["a b c d", "e f g h"])


@pytest.mark.parametrize(
    ("other", "step", "text"),
    [
        (read(["a b", "e f"], ["c d", "g h"]), None, "in the same order"),
        (read(["a c", "e g"], ["b d", "f h"]), None, "in another order over the ranks"),
        (read(["a b c d", "e f g h"], ["a b c d", "e f g h"]), 4, "a step reads 8 samples and not 4"),
        (read(["a b", "e f"], ["c d", "g x"]), 5, "the step has 3 of its 4 samples in common"),
        (
            read(["a b", "c d"], ["e f", "g h"]),
            4,
            "the step has 2 of its 4 samples in common; over all steps the samples are the same",
        ),
    ],
)
def test_samples_are_compared_as_a_set_and_as_a_sequence(other: Observed, step: int | None, text: str) -> None:
    batches = compare_batches(ONE, other, 4)
    assert batches.step == step
    assert text in f"{batches.problem} {batches.order}"
    assert batches.num_samples == 8


@pytest.mark.parametrize(
    ("command", "changed"),
    [
        ("torchrun --nproc-per-node 2 train.py", "torchrun --nproc-per-node 4 train.py"),
        ("torchrun --nproc_per_node=2 train.py", "torchrun --nproc_per_node 4 train.py"),
        ("accelerate launch --num_processes 2 train.py", "accelerate launch --num_processes 4 train.py"),
        ("mpirun -np 2 python train.py", "mpirun -np 4 python train.py"),
    ],
)
def test_the_command_is_changed_to_start_other_ranks(command: str, changed: str) -> None:
    assert asked_ranks(command.split()) == "2"
    assert " ".join(on_other_ranks(command.split(), 4)) == changed


def test_a_command_without_a_number_of_ranks_is_refused_with_the_option_that_helps() -> None:
    with pytest.raises(LookupFailedError, match="give the command for the other ranks with --with"):
        on_other_ranks(["python", "train.py"], 4)


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (read(["a b c d"]), "on 1 and on 1 rank, the program took 2 and 1 steps (exit codes 0 and 0)"),
        (ONE, "both launches had 1 rank"),
        (read(), "on other ranks, the program took no step, and ended with exit code 0"),
        (read(["a b", "e f"], ["c d", "g h"]), "not every launch has left one run"),
    ],
)
def test_launches_that_cannot_be_compared_show_nothing(other: Observed, text: str) -> None:
    proof = judge_world(ONE, other, [], 0)
    assert (proof.verdict, text in proof.text) == ("cannot tell", True)


def prove_world(folder: Path, fault: str, *options: str, code: int) -> Any:
    command = ["--", *jobs.forking_torchrun(), "--standalone", "--nproc-per-node", "2", str(PROGRAM), fault]
    done = jobs.program(folder, jobs.COMMAND, "prove", "--json", "--world", "1", *options, *command).wait(300)
    assert done.returncode == code, done.output
    return json.loads(done.output[done.output.index("{") :])


def test_a_sound_program_is_one_model_within_rounding_that_is_measured(tmp_path: Path, cli: Cli) -> None:
    found = prove_world(tmp_path, "sequence", "--steps", "2", code=0)
    assert found["text"].startswith("unchanged: 2 steps on 2 and on 1 rank: ")
    assert "the samples of each step are the same, in another order over the ranks" in found["notes"]
    assert any(note.startswith("parameters are at most ") for note in found["notes"])
    assert found["compared"]["samples"] == 16
    assert len(found["runs"]) == 3
    assert "values of the whole model" in cli("doctor", found["runs"][0]).out
    assert sorted(len(recorder.open_run(run).ranks) for run in found["runs"]) == [1, 2, 2]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("batch", "from step 0 on: on 2 and on 1 rank, a step reads 4 samples and not 8"),
        ("sampler", "from step 1 on: on 2 and on 1 rank, the step has"),
        ("sum", "step 0, backward"),
    ],
)
def test_what_is_otherwise_on_other_ranks_is_named(tmp_path: Path, fault: str, text: str) -> None:
    assert text in prove_world(tmp_path, fault, "--steps", "2", code=1)["text"]


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["sound", "moments"])
def test_a_checkpoint_is_resumed_on_other_ranks(tmp_path: Path, fault: str) -> None:
    found = prove_world(tmp_path, fault, "--resume", "--steps", "6", code=int(fault == "moments"))
    said = {"sound": "2 steps on 2 and on 1 rank", "moments": "exp_avg"}
    assert said[fault] in found["text"]
