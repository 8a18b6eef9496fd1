"""Silent errors of one stage of a real pipeline: `diff` names the module or the stage, and its rank."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from recorder.cli.commands.comparing import diff_command
from recorder.cli.output import print_reply
from tests.campaigns.diff.injected import PIPELINE
from tests.campaigns.diff.judging import judge

pytestmark = [
    pytest.mark.skipif(
        torch.__version__ < "2.13", reason="on gloo the pipelining of torch 2.9 aborts, without the recorder too"
    ),
    pytest.mark.usefixtures("read_once"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("injected_pipeline")
    PIPELINE.record(folder)
    return folder


@pytest.mark.parametrize("name", PIPELINE.errors)
def test_an_error_is_named_against_the_same_stages(folder: Path, name: str) -> None:
    verdict = judge(PIPELINE.compared(folder, name, one=False), PIPELINE.errors[name])
    assert verdict.word == "correctly", verdict


@pytest.mark.parametrize("name", ["rate", "stale", "scaled_micro_batch", "handed_back", "dropout_seed"])
def test_an_error_is_named_against_one_process_beyond_the_noise(folder: Path, name: str) -> None:
    verdict = judge(PIPELINE.compared(folder, name, one=True), PIPELINE.errors[name])
    assert verdict.word == "correctly", verdict


def test_a_pipeline_and_one_process_agree_and_what_stages_hand_on_is_no_difference(folder: Path) -> None:
    found = PIPELINE.compared(folder, "sound", one=True)
    assert found.is_equal and found.culprits == [] and found.num_compared > 400
    # Of each step and micro-batch: what goes forward and what comes back, on either side.
    assert (found.num_handed_on_a, found.num_handed_on_b) == (0, 3 * 4 * 2 * 2)
    assert found.only_a.num_rows == found.only_b.num_rows == 0


def test_what_stages_hand_on_is_compared_where_both_runs_have_the_same_stages(folder: Path) -> None:
    found = PIPELINE.compared(folder, "transposed", one=False)
    first = found.culprits[0]
    assert (first.site, first.seen_at, first.why) == ("input", "", "stage 1 got something else from stage 0")
    assert first.stages == [1] and found.num_handed_on_a == found.num_handed_on_b == 0


def test_the_stage_and_the_micro_batch_are_told(folder: Path) -> None:
    stale, scaled = (PIPELINE.compared(folder, name, one=False).culprits[0] for name in ("stale", "scaled_micro_batch"))
    assert (stale.stages, stale.num_params, stale.micro_batches) == ([1], 10, [])
    assert (scaled.why, scaled.stages, scaled.micro_batches) == ("the loss", [1], [2])


@pytest.mark.parametrize("one", [False, True], ids=["same layout", "one process"])
def test_of_a_number_that_differs_between_ranks_the_wrong_ranks_own_is_told(folder: Path, one: bool) -> None:
    rate = PIPELINE.compared(folder, "rate", one=one).culprits[0]
    assert (rate.site, rate.why, rate.ranks) == ("scalar", "the learning rate", [1])
    assert rate.factor == pytest.approx(1.1) and rate.max_abs == pytest.approx(0.01)


def test_the_command_says_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def said(name: str) -> list[str]:
        reply = diff_command(str(folder / "one"), str(folder / name), noise=[str(folder / "twin")], limit=5)
        print_reply(reply, as_json=False)
        return capsys.readouterr().out.splitlines()

    line = "culprit: step 1, update of 10 parameters of stage 1 alike, rank 1: param weight of 'layers.2.norm' differs"
    assert any(one.startswith(line) for one in said("stale")[:8])
    note = "note: 48 rows of B that go between stages, or to experts and back, are not compared: A is not cut so"
    lines = said("sound")
    assert note in lines and any(one.startswith("equal") for one in lines)
