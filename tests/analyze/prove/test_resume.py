"""Tests of `recorder prove --resume`: whether it names what programs fail to restore, and certifies sound ones."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import recorder
from recorder.analyze.prove.launches import Look, Observed, RankSeen
from recorder.analyze.prove.resume import LEFTOVER, judge_resume
from tests.rigs import jobs
from tests.rigs.command_line import Cli, cli

__all__ = ["cli"]
PROGRAM = Path(__file__).parent / "resuming.py"
NUM_STEPS = 7
OMISSIONS = {
    "weight": "parameter 3.weight is as at step 0",
    "statistics": "buffer 1.running_mean is zero; buffer 1.running_var is as at step 0",
    "moments": "optimizer state of 6 parameters is zero: exp_avg",
    "bfloat16": "optimizer state of 6 parameters is rounded to bfloat16: exp_avg_sq",
    "steps": "optimizer state of 6 parameters is 0.0 and not 4.0: step",
    "optimizer": "optimizer state of 6 parameters is missing: step, exp_avg, exp_avg_sq",
    "second": "optimizer state of 2 parameters is missing: momentum_buffer",
    "lr": "optimizer setting lr of group 0 of AdamW(0.weight,...) is 0.01 and not 0.005",
    "settings": "optimizer setting weight_decay of group 0 of AdamW(0.weight,...) is 0.5 and not 0.01",
    "schedule": "learning-rate schedule StepLR.last_epoch is 0 and not 4",
    "scaler": "gradient scaler GradScaler.scale is 16.0 and not 64.0",
    "count": "state beside the model AveragedModel.n_averaged is 0 and not 4",
    "average": "state beside the model AveragedModel.",
    "means": "variables self.means.0.weight, self.means.0.bias, self.means.1.weight, self.means.3.weight and",
    "cpu": "random state of the CPU differs, nothing else: dropout, a new iterator of a DataLoader, or anything else",
    "numpy": "random state of NumPy differs, nothing else: whatever draws from it",
    "python": "random state of Python differs, nothing else: whatever draws from it",
    "noise": "random state of the program's own generator self.noise differs, nothing else: whatever draws from it",
    "sampler": "the resumed run reads the batch of step 0 again: the sampler started anew (ranks 0, 1, step 4)",
    "skips": "the resumed run leaves out batches: it reads the batch of step 5 already (ranks 0, 1, step 4)",
    "workers": "did not read in its steps: the random states of its DataLoader's workers began anew",
    "accumulation": "makes the step from 1 of its 2 batches: the gradients accumulated before are lost",
    "stale": "parameters 0.weight, 0.bias, 1.weight, 1.bias and 2 more are as at step 3",
    "everything": "the resumed run starts anew",
}
"""What the program does not restore, and what is said about it."""
QUICK = ("moments", "sampler")


def seen(*steps: Mapping[str, str], code: int = 0) -> Observed:
    looks = tuple(Look(number, {"param w": "f - 0", **step}) for number, step in enumerate(steps))
    return Observed(exit_code=code, ranks={0: RankSeen(pid=1, looks=looks, printed=())})


def course(first: int, last: int, **more: str) -> list[dict[str, str]]:
    return [
        {"param w": f"float32 - {step}", "batch 0": f"b{step}", "grad w": f"float32 - g{step}", **more}
        for step in range(first, last)
    ]


@pytest.mark.parametrize(
    ("resumed", "verdict", "text"),
    [
        (seen(*course(3, 6)), "unchanged", "3 steps of 1 rank, 9 values, bit by bit"),
        (seen(*course(3, 9)), "unchanged", "3 steps"),
        (seen(*course(0, 6)), "changed", "starts anew"),
        (seen(), "cannot tell", "the resumed launch took no step, and ended with exit code 0"),
        (seen(*course(3, 6, **{"batch 0": "b1"})), "changed", "reads the batch of step 1 again (rank 0, step 3)"),
        (seen(*course(3, 6, **{"batch 0": "x"})), "changed", "that the interrupted run did not read in its steps"),
        (seen(*course(3, 5), {"param w": "float32 - 5", "batch 0": "b0"}), "changed", "from step 5 on"),
        (seen(*course(3, 6, **{"grad w": "x"})), "cannot tell", "gradient w differs on rank 0, although"),
        (seen(*course(3, 4), *course(4, 6, **{"param w": "x"})), "changed", "from step 4 on: parameter w is x"),
    ],
)
def test_the_resumed_run_is_compared_from_where_its_parameters_are_those_of_the_killed_one(
    resumed: Observed, verdict: str, text: str
) -> None:
    proof = judge_resume(seen(*course(0, 6)), resumed, num_steps=6)
    assert proof.verdict == verdict
    assert text in proof.text


def test_where_another_optimizer_steps_what_follows_from_it_is_not_told() -> None:
    update, rate = "update of the step", "optim setting lr of group 0 of A"
    killed = seen(*course(0, 6, **{update: "= A", rate: "= 0.1"}))
    proof = judge_resume(killed, seen(*course(3, 6, **{update: "= B"})), num_steps=6)
    assert proof.text == "changed from step 3 on: optimizer of the step is B and not A"


def test_a_program_that_ends_before_it_is_killed_shows_nothing() -> None:
    proof = judge_resume(seen(*course(0, 4)), seen(*course(2, 4)), num_steps=6)
    assert (proof.verdict, "ask for fewer with --steps" in proof.text) == ("cannot tell", True)


def test_a_random_state_that_no_step_draws_from_is_a_note() -> None:
    proof = judge_resume(
        seen(*course(0, 6, **{"rng python": "a"})), seen(*course(3, 6, **{"rng python": "b"})), num_steps=6
    )
    assert proof.verdict == "unchanged"
    assert "random state of Python differs, and no step draws from it" in proof.notes


@pytest.mark.parametrize(
    ("killed", "resumed", "verdict", "text"),
    [
        ({"flag training of m": "= True"}, {"flag training of m": "= False"}, "unchanged", "no gradient differs"),
        ({"param v": "f - 0"}, {"param v": "f - 0", "param u": "f - 1"}, "unchanged", "parameter u is new, and no"),
        (
            {"flag requires_grad of v": "= False"},
            {"flag requires_grad of v": "= True", "grad v": "f - 1"},
            "changed",
            "flag requires_grad of v is True and not False; gradient v differs on rank 0",
        ),
        ({}, {"grad v": "f - 1"}, "cannot tell", "gradient v differs on rank 0, although"),
    ],
)
def test_what_need_not_be_a_loss_is_one_if_gradients_differ(
    killed: dict[str, str], resumed: dict[str, str], verdict: str, text: str
) -> None:
    proof = judge_resume(seen(*course(0, 6, **killed)), seen(*course(3, 6, **resumed)), num_steps=6)
    assert proof.verdict == verdict
    assert text in "; ".join([proof.text, *proof.notes])


def drawn(first: int, last: int, *, at: int, **more: str) -> list[dict[str, str]]:
    """Steps in each of which one number is drawn from the random state of the CPU, beginning at a number."""
    states = ({"rng cpu": f"s{at + i}", "ahead 1": f"s{at + i + 1}"} for i in range(last - first))
    return [{**step, **state, **more} for step, state in zip(course(first, last), states, strict=True)]


def test_a_number_that_a_new_iterator_drew_is_a_note_unless_gradients_differ() -> None:
    killed, text = (
        seen(*drawn(0, 6, at=0)),
        "random state of the CPU is 1 number ahead: each new iterator of a DataLoader",
    )
    proof = judge_resume(killed, seen(*drawn(3, 6, at=4)), num_steps=6)
    assert proof.verdict == "unchanged"
    assert any(note.startswith(text) and note.endswith("and no gradient differs") for note in proof.notes)
    proof = judge_resume(killed, seen(*drawn(3, 6, at=4, **{"grad w": "x"})), num_steps=6)
    assert proof.text.startswith(f"changed from step 3 on: {text} draws one; gradient w differs")
    assert "CPU differs, nothing else" in judge_resume(killed, seen(*drawn(3, 6, at=9)), num_steps=6).text


@pytest.mark.parametrize(
    ("read", "text"),
    [
        ("120", "reads its batches in another order, here a batch of steps 1, 4"),
        ("012", "unchanged"),
        ("20", "steps 2, 5"),
    ],
)
def test_of_repeated_data_no_wrong_batch_is_named(read: str, text: str) -> None:
    killed = seen(*({**step, "batch 0": f"b{i % 3}"} for i, step in enumerate(course(0, 6))))
    resumed = seen(*({**step, "batch 0": f"b{i}"} for i, step in zip(read, course(3, 6), strict=False)))
    assert text in judge_resume(killed, resumed, num_steps=6).text


def test_an_optimizer_that_makes_no_update_after_the_checkpoint_is_not_certified() -> None:
    names = ["A", "B", "A", "A", "A", "A"]
    killed = [{**step, "update of the step": f"= {name}"} for name, step in zip(names, course(0, 6), strict=True)]
    proof = judge_resume(seen(*killed), seen(*killed[3:]), num_steps=6)
    assert (proof.verdict, "have no update by B; ask for more with --steps" in proof.text) == ("cannot tell", True)
    proof = judge_resume(seen(*killed), seen(*killed[1:]), num_steps=6)
    assert proof.verdict == "unchanged"


def test_a_resumed_launch_that_fails_on_the_way_is_not_certified() -> None:
    proof = judge_resume(seen(*course(0, 6)), seen(*course(3, 4), code=1), num_steps=6)
    assert (proof.verdict, "ended with exit code 1 after 1 step" in proof.text) == ("cannot tell", True)


def test_a_checkpoint_from_before_the_first_launch_is_named() -> None:
    moments = {"optim w.exp_avg": "float32 - x"}
    killed = seen(*course(0, 6, **moments))
    proof = judge_resume(killed, killed, num_steps=6)
    assert proof.verdict == "cannot tell"
    assert "both launches continued from a checkpoint that is from before this run started: remove it" in proof.text
    proof = judge_resume(killed, seen(*course(3, 6, **moments)), num_steps=6)
    assert (proof.verdict, proof.notes[0]) == ("unchanged", LEFTOVER)


def prove_alternating(folder: Path, fault: str, *options: str, code: int) -> Any:
    command = ["--", *jobs.forking_torchrun(), "--nproc-per-node=1", str(PROGRAM.with_name("alternating.py")), fault]
    done = jobs.program(folder, jobs.COMMAND, "prove", "--json", *options, *command).wait(300)
    assert done.returncode == code, done.output
    return json.loads(done.output[done.output.index("{") :])


@pytest.mark.parametrize(
    ("fault", "code", "text"),
    [
        ("lr", 1, "optimizer setting lr of group 0 of SGD(model_1.0.weight,...) is 0.05 and not 0.1"),
        ("sampler", 1, "the resumed run reads the batch of step 0 again: the sampler started anew (rank 0, step 4)"),
        pytest.param("gradients", 2, "gradients model_1.0.weight", marks=pytest.mark.slow),
        pytest.param("frozen", 1, "flags requires_grad of model_1.0.weight, requires_grad of", marks=pytest.mark.slow),
        pytest.param("mode", 1, "flags training of Sequential, training of 0", marks=pytest.mark.slow),
        pytest.param("sound", 0, "goes on as the interrupted one did: 4 steps of 1 rank", marks=pytest.mark.slow),
    ],
)
def test_each_of_two_optimizers_in_evaluation_mode_is_looked_at(
    tmp_path: Path, fault: str, code: int, text: str
) -> None:
    assert text in prove_alternating(tmp_path, fault, "--resume", "--steps", "7", code=code)["text"]


def test_the_schedules_of_a_sequential_schedule_are_found_in_a_checkpoint(tmp_path: Path) -> None:
    found = prove_alternating(tmp_path, "sound", "--checkpoint", ".", "--steps", "6", code=0)
    assert found["compared"]["learning-rate schedules"] > 3


TORCHRUN = (str(Path(sys.executable).parent / "torchrun"),)


def prove_resume(folder: Path, *words: str, code: int, ranks: int = 2, is_launched: bool = False) -> Any:
    torchrun = TORCHRUN if is_launched else jobs.forking_torchrun()
    command = ["--", *torchrun, "--standalone", f"--nproc-per-node={ranks}", str(PROGRAM), *words]
    options = ["prove", "--json", "--resume", "--steps", str(NUM_STEPS)]
    done = jobs.program(folder, jobs.COMMAND, *options, *command).wait(300)
    assert done.returncode == code, done.output
    return json.loads(done.output[done.output.index("{") :])


@pytest.mark.parametrize(
    "omission", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in OMISSIONS]
)
def test_what_a_program_does_not_restore_is_named(tmp_path: Path, omission: str) -> None:
    found = prove_resume(tmp_path, omission, code=1)
    assert OMISSIONS[omission] in found["text"]


@pytest.mark.slow
@pytest.mark.parametrize("omission", ["moments", "sampler", "cpu", "stale", "weight"])
def test_what_one_rank_does_not_restore_is_named_with_the_rank(tmp_path: Path, omission: str) -> None:
    found = prove_resume(tmp_path, omission, "1", code=1)
    assert "rank 1" in found["text"]
    assert "rank 0" not in found["text"] and "ranks" not in found["text"]


@pytest.mark.slow
@pytest.mark.parametrize("omission", ["moments", "cpu"])
def test_what_one_of_four_ranks_does_not_restore_is_named_with_the_rank(tmp_path: Path, omission: str) -> None:
    found = prove_resume(tmp_path, omission, "3", code=1, ranks=4)
    assert "on rank 3" in found["text"]
    assert "rank 0" not in found["text"]


@pytest.mark.slow
@pytest.mark.parametrize("omission", ["sampler", "sound"])
def test_ranks_that_their_launcher_starts_anew_count_as_the_resumed_launch(tmp_path: Path, omission: str) -> None:
    line = f"{TORCHRUN[0]} --standalone --nproc-per-node 2 {PROGRAM} {omission}"
    command = ["--", "sh", "-c", f"{line}; {line}"]  # torchrun's own --max-restarts at times hangs on gloo
    options = ["prove", "--json", "--resume", "--steps", str(NUM_STEPS)]
    done = jobs.program(tmp_path, jobs.COMMAND, *options, *command).wait(300)
    assert done.returncode == int(omission != "sound"), done.output
    found = json.loads(done.output[done.output.index("{") :])
    assert OMISSIONS.get(omission, "unchanged") in found["text"]
    assert len(found["commands"]) == 1


def test_a_sound_resume_is_certified_and_the_certificate_kept_with_both_runs(tmp_path: Path, cli: Cli) -> None:
    found = prove_resume(tmp_path, "sound", code=0, is_launched=True)
    assert found["text"].startswith("unchanged: the resumed run goes on as the interrupted one did: 3 steps of 2 ranks")
    assert found["notes"] == ["the resumed run goes on with step 4, from a checkpoint of 4 steps"]
    killed, resumed = sorted(map(recorder.open_run, found["runs"]), key=lambda run: run.name)
    assert killed.proof == resumed.proof
    proof = resumed.proof
    assert proof is not None
    assert (proof.subject, proof.text, set(proof.versions)) == ("resume", found["text"], {"Python", "torch", "numpy"})
    assert proof.compared["batches"] == 18  # of two ranks and three steps: two micro-batches, and one of the critic
    assert proof.commands == (found["commands"][0],)
    assert "18 batches" in cli("doctor", resumed.path).out
