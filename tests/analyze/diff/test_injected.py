"""Real trainings with one silent error: `diff` names its module and its phase, and nothing in a sound one.

A sample of the errors; `python -m tests.campaigns injected` has all of them.
"""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import recorder
from recorder.analyze.diff.diff import diff
from recorder.analyze.diff.step_range import Diff
from recorder.analyze.first.first import first
from recorder.cli.commands.showing import ls_command
from recorder.cli.output import print_reply
from recorder.merge.merge import merge_run
from tests.campaigns.diff import injected, judging

pytestmark = pytest.mark.usefixtures("read_once")
SAMPLE = ("skipped", "scale_on_one_rank", "momentum", "clipping_skipped")
WITH_HINT = ("no_zero_grad", "old_gradient", "summed", "unclipped", "reduced_in_bf16", "doubled_loss")
ERRORS = (
    *SAMPLE, *WITH_HINT, "left_alone", "dropout_seed", "gradient_scaled_on_one_rank", "stale_buffer", "bit_flip",
    "nan_on_one_rank", "other_recompute", "attention_scale", "wrong_start",
)  # fmt: skip
"""At least one of each phase, on all ranks and on one."""
compared = functools.cache(injected.compared)
"""Several tests look at one comparison."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trainings, forked from one process."""
    folder = tmp_path_factory.mktemp("injected")
    injected.record(folder, list(ERRORS))
    return folder


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_is_named_against_the_same_layout(folder: Path, name: str) -> None:
    verdict = judging.judge(compared(folder, name), injected.ERRORS[name])
    assert verdict.word == "correctly", verdict


@pytest.mark.parametrize("name", SAMPLE)
def test_an_error_is_named_against_one_process_beyond_the_noise(folder: Path, name: str) -> None:
    verdict = judging.judge(compared(folder, name, one=True), injected.ERRORS[name])
    assert verdict.word == "correctly", verdict


@pytest.mark.parametrize("name", ["sound", "clipped"])
def test_two_ranks_and_one_process_differ_by_noise_alone(folder: Path, name: str) -> None:
    exactly = diff(judging.opened(folder, f"one_{name}"), judging.opened(folder, name))
    assert exactly.table.num_rows > 100
    found = compared(folder, name, one=True)
    assert found.is_equal and found.culprits == [] and found.num_compared > 700


@pytest.fixture(scope="module")
def parallel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("injected_parallel")
    injected.PARALLEL.record(folder)
    return folder


@pytest.mark.parametrize("one", [False, True], ids=["same layout", "one process"])
@pytest.mark.parametrize("name", injected.PARALLEL.errors)
def test_an_error_of_tensor_parallel_ranks_is_named(parallel: Path, name: str, one: bool) -> None:
    verdict = judging.judge(injected.PARALLEL.compared(parallel, name, one=one), injected.PARALLEL.errors[name])
    assert verdict.word == "correctly", verdict


@pytest.mark.parametrize("name", ["sound", "sound_sequence"])
def test_tensor_parallel_ranks_and_one_process_differ_by_noise_alone(parallel: Path, name: str) -> None:
    found = injected.PARALLEL.compared(parallel, name, one=True)
    assert found.is_equal and found.culprits == [] and found.num_compared > 600


def test_a_factor_is_told(folder: Path) -> None:
    def factor(found: Diff) -> float | None:
        return found.culprits[0].factor

    assert factor(compared(folder, "doubled_loss")) == pytest.approx(2, rel=1e-3)
    assert factor(compared(folder, "gradient_scaled_on_one_rank")) == pytest.approx(3, rel=1e-3)


def test_a_hint_says_what_a_person_would_guess(folder: Path) -> None:
    def hints(name: str) -> set[str]:
        return {compared(folder, name, one=one).culprits[0].hint for one in (False, True)}

    assert hints("no_zero_grad") == {"B's gradient is A's of steps 0 and 1 added: not zeroed?"}
    assert hints("old_gradient") == {
        "B's gradient is A's of step 1 again: is the gradient not computed, or not reduced, anew?"
    }
    assert hints("summed") == {"B's value is 2 times A's: added up over 2 ranks, not averaged?"}
    (unclipped,) = hints("unclipped")
    assert unclipped.startswith("the norm of all gradients is 0.1 in A") and unclipped.endswith("not clipped?")
    assert hints("skipped") == hints("reduced_in_bf16") == hints("doubled_loss") == {""}


def test_a_twin_says_what_it_is_and_was_moved_by_a_last_place(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, twin = judging.opened(folder, "one_sound"), judging.opened(folder, f"one_sound{judging.TWIN}")
    assert (one.jitter, twin.jitter) == (0, 1)
    moved = {(line["step"], line["name"]): line for line in diff(one, twin, "", site="input").table.to_pylist()}
    assert set(moved) == {(step, "features") for step in range(4)}  # the words are whole numbers
    assert all(1 <= line["max_ulp"] <= 2 for line in moved.values())
    for path in (twin.path, twin.path.parent):
        print_reply(ls_command(str(path)), as_json=False)
        assert "jitter" in capsys.readouterr().out
    print_reply(ls_command(str(one.path)), as_json=False)
    assert "jitter" not in capsys.readouterr().out


def test_the_command_says_it_on_top_in_one_line_and_as_json(folder: Path) -> None:
    runs = [str(judging.opened(folder, name).path) for name in ("sound", "dropout_seed")]
    command = [sys.executable, "-m", "recorder", "diff", *runs]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60)
    lines = said.stdout.splitlines()
    assert said.returncode == 1
    assert re.fullmatch(r"culprit: step 0, forward of 'drop', rank 1: output differs by up to .*", lines[3])
    assert lines[2].startswith("different: ") and lines[4].startswith("first difference: ")
    as_json = subprocess.run([*command, "--json", "--limit", "1"], capture_output=True, text=True, timeout=60)
    (culprit,) = json.loads(as_json.stdout)["culprits"]
    told = {"step": 0, "module_path": "drop", "site": "output", "phase": "forward", "rank": 1}
    assert told.items() <= culprit.items() and culprit["max_abs"] > 0


def test_a_parameter_that_ddp_leaves_alone_and_that_began_equal_is_no_rank_s_own(folder: Path, tmp_path: Path) -> None:
    run = judging.opened(folder, "left_alone")
    (told,) = [root["unshared"] for root in run.writers[0].manifest.members["roots"]]
    assert told == {"blocks.1.mlp.down.weight": "ignored"}
    summary = merge_run(run, tmp_path / "merged").findings["replicas_differ"]
    assert summary["num_problems"] > 0 and "told to leave it alone" in summary["first"][0]["text"]
    for one in (run, recorder.open_run(tmp_path / "merged")):
        found = first(one)
        assert found.replica is not None and found.replica.value.module_path == "blocks.1.mlp.down"
        culprit = diff(judging.opened(folder, "sound"), one).culprits[0]
        assert (culprit.module_path, culprit.phase) == ("blocks.1.mlp.down", "reduction")
