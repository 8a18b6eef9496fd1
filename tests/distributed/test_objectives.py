"""`recorder.objective` under DDP and FSDP2, compiled or not: what each objective pulls, and what `check` says of it."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

import recorder
from recorder.analyze.check.check import joined, sentence
from tests.rigs import jobs
from tests.rigs.jobs import SCRIPTS

from .scripts.objectives import CASES, OBJECTIVES, WEIGHT

NAMES = [f"{layout}-{'compiled' if is_compiled else 'eager'}" for layout, is_compiled in CASES]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("objectives")
    (folder / "out").mkdir()
    jobs.succeeded(jobs.ranks(folder, SCRIPTS / "objectives.py", "out"))
    return folder / "out"


@pytest.mark.parametrize("name", NAMES)
def test_each_objective_has_the_gradient_of_a_backward_of_its_own(folder: Path, name: str) -> None:
    run = recorder.open_run(folder / name)
    for rank in (0, 1):
        saved = torch.load(folder / f"{name}-{rank}.pt")
        assert saved["is_same"], "training is not what it is without the recorder"
        found = {
            one: run.array("", site="tap", name=f"objective.{one}", phase="backward", step=0, rank=rank).ravel()
            for one in OBJECTIVES
        }
        expected = {one: saved["pulls"][one].numpy().ravel() for one in OBJECTIVES}
        for one in OBJECTIVES:
            np.testing.assert_array_equal(found[one], expected[one])
        cosine, wanted = (
            float(pulls["main"] @ pulls["aux"] / np.linalg.norm(pulls["main"]) / np.linalg.norm(pulls["aux"]))
            for pulls in (found, expected)
        )
        assert cosine == wanted and 0 < abs(cosine) < 1
        recorded = run.array("", site="scalar", name="objective.cosine.aux:main", step=0, rank=rank)
        assert abs(float(recorded) - wanted) < 1e-5


@pytest.mark.parametrize("name", NAMES)
def test_one_that_drowns_the_other_is_named_on_all_ranks(folder: Path, name: str) -> None:
    run = recorder.open_run(folder / name)
    checked = recorder.check(run, rules=["objectives"], thresholds={"objectives": {"records": 3}})
    (one,) = joined(checked.findings)
    assert re.fullmatch(
        r"objectives: \(the model\) tap objective\.aux, since step 0, ranks 0,1: the gradient of this objective drowns "
        r"that of another, [\d.e+]+ times the smallest gradient",
        sentence(one),
    )


@pytest.mark.parametrize("name", NAMES)
def test_a_loss_that_is_an_objective_has_its_value_and_its_weight(folder: Path, name: str) -> None:
    run = recorder.open_run(folder / name)
    for loss, weight in (("main_loss", 1.0), ("aux_loss", WEIGHT)):
        gradient, value = (
            float(run.array("", site="tap", name=f"objective.{loss}", step=0, rank=1, phase=phase))
            for phase in ("backward", "forward")
        )
        assert gradient == weight and 0 < value < 2
