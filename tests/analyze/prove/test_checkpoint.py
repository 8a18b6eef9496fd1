"""Tests of `recorder prove --checkpoint`: whether it names what a checkpoint does not hold of what the run held."""

from __future__ import annotations

import copy
import json
import os
import random
import re
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import recorder_probe as probe
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed
from torch.optim.swa_utils import AveragedModel

from recorder.analyze.prove.checkpoint import judge_checkpoint, read_contents
from recorder.analyze.prove.launches import Look, Observed, RankSeen
from recorder.errors import LookupFailedError
from recorder.run.status import Proof
from tests.rigs import jobs

PROGRAM = Path(__file__).parent / "resuming.py"
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
NUM_STEPS, SAVED = 6, 4
State = dict[str, Any]


class Training:
    """A training in this process, the looks that the probe would take of it, and its checkpoints."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 2))
        self.model.register_buffer("table", torch.arange(3.0), persistent=False)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, 0.5)
        self.average = AveragedModel(self.model)
        self.looks: list[Look] = []
        self.saved: list[State] = []

    def run(self, num_steps: int) -> None:
        for step in range(num_steps):
            self.saved.append(copy.deepcopy(self.state()))
            self.looks.append(Look(step, self.look()))
            self.model(torch.randn(4, 4)).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.schedule.step()
            self.average.update_parameters(self.model)
            random.random(), np.random.random()

    def state(self) -> State:
        return {
            "model": self.model.state_dict(), "optim": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(), "ema": self.average.state_dict(), "epoch": len(self.saved),
            "rng": {"cpu": torch.get_rng_state(), "numpy": np.random.get_state(), "python": random.getstate()},
        }  # fmt: skip

    def look(self) -> dict[str, str]:
        seen: dict[str, str] = {}
        for name, buffer in self.model.named_buffers():
            seen[f"buffer {name}"] = probe._described(buffer)
        for name, parameter in self.model.named_parameters():
            seen[f"param {name}"] = probe._described(parameter)
            probe._see(seen, f"optim {name}", self.optimizer.state.get(parameter, {}))
            if len(self.saved) > 1:  # a copy of the weights that the program keeps from before its last step
                seen[f"variable before.{name}"] = probe._described(self.saved[-2]["model"][name])
        for name, value in (*self.average.named_parameters(), *self.average.named_buffers()):
            seen[f"other AveragedModel.{name}"] = probe._described(value)
        probe._see(seen, "schedule StepLR", self.schedule.state_dict())
        probe._see_random_states(seen)
        return seen


@pytest.fixture(scope="module")
def training() -> Training:
    trained = Training()
    trained.run(NUM_STEPS)
    return trained


def observed(training: Training) -> Observed:
    return Observed(exit_code=0, ranks={0: RankSeen(pid=1, looks=tuple(training.looks), printed=())})


def judged(training: Training, place: Path, since_ns: int = 0) -> Proof:
    return judge_checkpoint(observed(training), read_contents(place, since_ns, 1))


def as_one_file(state: State, folder: Path) -> None:
    torch.save({"state": {"inner": state}, "kind": PurePathLike("x")}, folder / "step-4.ckpt")


class PurePathLike:
    """A class of the program's own, which a reader of the checkpoint does not import."""

    def __init__(self, text: str) -> None:
        self.text = text


def as_hugging_face(state: State, folder: Path) -> None:
    place = folder / "checkpoint-4"
    place.mkdir()
    save_file(state["model"], place / "model.safetensors")
    torch.save(state["optim"], place / "optimizer.pt")
    torch.save(state["schedule"], place / "scheduler.pt")
    torch.save(state["rng"], place / "rng_state.pth")
    save_file(state["ema"], place / "ema.safetensors")


def as_distributed(state: State, folder: Path) -> None:
    named = {name: value for name, value in state.items() if name != "rng"}
    torch.save(state["rng"], folder / "meta.pt")
    save_distributed(named, checkpoint_id=folder, no_dist=True)


FORMATS = (as_one_file, as_hugging_face, as_distributed)


@pytest.mark.parametrize("save", FORMATS)
def test_a_checkpoint_that_holds_all_is_certified_in_each_format(
    training: Training, tmp_path: Path, save: Callable[[State, Path], None]
) -> None:
    save(training.saved[SAVED], tmp_path)
    proof = judged(training, tmp_path)
    assert proof.text.startswith("unchanged: the checkpoint holds the state of the run after 4 steps:")
    tables = ("buffer table", "state beside the model AveragedModel.module.table")
    assert proof.notes == tuple(f"{name} is missing, and no step changes it" for name in tables)
    assert proof.compared["optimizer states"] == 3 * 6
    assert proof.compared["random states"] == 3


def without(key: str, inner: str, state: State, _: Training) -> None:
    del state[key][inner]


def member(change: Callable[[torch.Tensor], torch.Tensor], name: str, state: State, _: Training) -> None:
    for one in state["optim"]["state"].values():
        one[name] = change(one[name])


def earlier(key: str, step: int, state: State, training: Training) -> None:
    state[key] = training.saved[step][key]


def rounded(value: torch.Tensor) -> torch.Tensor:
    return value.bfloat16()


FAULTS: dict[str, tuple[Callable[[State, Training], None], str]] = {
    "lost moments": (
        lambda state, _: state["optim"]["state"].clear(),
        "optimizer state of 6 parameters is missing: step, exp_avg, exp_avg_sq",
    ),
    "a moment in bfloat16": (
        partial(member, rounded, "exp_avg_sq"),
        "optimizer state of 6 parameters is bfloat16 and not float32: exp_avg_sq",
    ),
    "a rounded moment": (
        partial(member, lambda value: rounded(value).float(), "exp_avg"),
        "optimizer state of 6 parameters is rounded to bfloat16: exp_avg",
    ),
    "zero moments": (partial(member, torch.zeros_like, "exp_avg"), "6 parameters is zero: exp_avg"),
    "counts of steps": (partial(member, torch.zeros_like, "step"), "6 parameters is 0.0 and not 4.0: step"),
    "a lost weight": (partial(without, "model", "3.weight"), "parameter 3.weight is missing"),
    "a lost buffer": (partial(without, "model", "1.running_var"), "buffer 1.running_var is missing"),
    "stale weights": (
        partial(earlier, "model", 3),
        "parameters 0.weight, 0.bias, 1.weight, 1.bias and 2 more are as at",
    ),
    "a stale schedule": (partial(earlier, "schedule", 3), "learning-rate schedule StepLR.last_epoch is 3 and not 4"),
    "a lost average": (lambda state, _: state["ema"].clear(), "state beside the model AveragedModel.module.0.weight"),
    "a lost random state": (partial(without, "rng", "cpu"), "random state of the CPU is missing"),
}


@pytest.mark.parametrize("save", FORMATS)
@pytest.mark.parametrize("fault", FAULTS)
def test_what_a_checkpoint_does_not_hold_is_named(
    training: Training, tmp_path: Path, fault: str, save: Callable[[State, Path], None]
) -> None:
    change, text = FAULTS[fault]
    state = copy.deepcopy(training.saved[SAVED])
    change(state, training)
    save(state, tmp_path)
    proof = judged(training, tmp_path)
    assert proof.verdict == "changed"
    assert "in the checkpoint after 4 steps, " in proof.text
    assert text in proof.text
    assert proof.text.count(";") == {"stale weights": 2, "a stale schedule": 1}.get(fault, 0)


def test_what_is_too_much_and_what_moved_on_are_notes(training: Training, tmp_path: Path) -> None:
    state = copy.deepcopy(training.saved[SAVED])
    state["teacher"] = {"weight": torch.ones(2, 2)}
    state["rng"]["cpu"] = torch.Generator().manual_seed(5).get_state()
    as_one_file(state, tmp_path)
    proof = judged(training, tmp_path)
    assert proof.verdict == "unchanged"
    assert "the checkpoint also holds values that the run did not have: state.inner.teacher.weight" in proof.notes
    assert "random state of the CPU changed before step 4 began: --resume shows whether it is restored" in proof.notes


def test_of_several_checkpoints_the_newest_counts_and_files_from_before_the_launch_do_not(
    training: Training, tmp_path: Path
) -> None:
    state = copy.deepcopy(training.saved[SAVED])
    member(torch.zeros_like, "exp_avg", state, training)
    for step, saved in ((2, training.saved[2]), (SAVED, state)):
        torch.save(saved, tmp_path / f"step-{step}.pt")
        os.utime(tmp_path / f"step-{step}.pt", ns=(step, step))
    assert "zero: exp_avg" in judged(training, tmp_path).text
    old = f"no checkpoint there before it was ended (step-{SAVED}.pt is from before this run started)"
    with pytest.raises(LookupFailedError, match=re.escape(old)):
        judged(training, tmp_path, time.time_ns())


@pytest.mark.parametrize("num_begun", [SAVED, SAVED + 1])
def test_a_checkpoint_that_is_stale_as_a_whole_is_a_note(training: Training, tmp_path: Path, num_begun: int) -> None:
    as_one_file(training.saved[SAVED], tmp_path)
    looks = (Look(look.step, {**look.digests, "began": str(i)}) for i, look in enumerate(training.looks, 1))
    contents = read_contents(tmp_path, 0, 1)
    contents.saved_ns = num_begun + 1
    run = Observed(exit_code=0, ranks={0: RankSeen(pid=1, looks=tuple(looks), printed=())})
    notes = judge_checkpoint(run, contents).notes
    assert any("was written after step 4 had begun: the checkpoint is stale" in note for note in notes) == (
        num_begun > SAVED
    )


def test_a_file_that_cannot_be_read_accuses_nobody(training: Training, tmp_path: Path) -> None:
    state = training.saved[SAVED]
    torch.save(state["model"], tmp_path / "model.pt")
    torch.save(state["optim"], tmp_path / "optimizer.pt")
    spoiled = (tmp_path / "optimizer.pt").read_bytes().replace(b"\x80\x02}", b"\x80\x02\xff")
    (tmp_path / "optimizer.pt").write_bytes(spoiled)
    proof = judged(training, tmp_path)
    assert proof.verdict == "cannot tell", proof
    assert any(note.startswith("not read: optimizer.pt (") for note in proof.notes)


def test_the_named_state_of_an_optimizer_is_matched_by_its_names(training: Training, tmp_path: Path) -> None:
    model, optim = get_state_dict(training.model, training.optimizer)
    training.looks.append(Look(NUM_STEPS, training.look()))
    save_distributed({"model": model, "optim": optim}, checkpoint_id=tmp_path, no_dist=True)
    proof = judged(training, tmp_path)
    training.looks.pop()
    assert proof.compared["optimizer states"] == 3 * 6
    assert "optimizer state" not in proof.text


def test_each_rank_holds_its_part_of_a_whole_tensor(training: Training, tmp_path: Path) -> None:
    as_distributed(training.saved[SAVED], tmp_path)
    whole = training.saved[SAVED]["model"]["0.weight"]
    ranks = {}
    for rank, digests in ((0, {}), (1, {"param 0.bias": "float32 - another [8] [4] [4]"})):
        part = f"{probe._described(whole[4 * rank : 4 * rank + 4])} [8,4] [{4 * rank},0] [4,4]"
        looks = list(training.looks)
        looks[SAVED] = Look(SAVED, {**looks[SAVED].digests, "param 0.weight": part, **digests})
        ranks[rank] = RankSeen(pid=rank, looks=tuple(looks), printed=())
    proof = judge_checkpoint(Observed(exit_code=0, ranks=ranks), read_contents(tmp_path, 0, 2))
    assert proof.text == "changed: in the checkpoint after 4 steps, parameter 0.bias has other values on rank 1"


def test_a_launched_program_shows_what_its_checkpoint_holds(tmp_path: Path) -> None:
    environment = ["RANK=0", "WORLD_SIZE=1", "MASTER_ADDR=127.0.0.1", "MASTER_PORT=0"]
    options = ["prove", "--json", "--checkpoint", ".", "--steps", "5"]
    done = jobs.python(tmp_path, "-m", "recorder", *options, *environment, "--", str(PROGRAM), "sound").wait(240)
    assert done.returncode == 0, done.output
    found = json.loads(done.output[done.output.index("{") :])
    assert "holds the state of the run after 4 steps" in found["text"]
    assert found["subject"] == "checkpoint"
    seeded = "random state of the program's own generator fresh was seeded anew before step 4, and need not be saved"
    assert seeded in found["notes"]
    assert sys.executable in found["commands"][0]
