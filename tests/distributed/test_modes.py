"""The mode of a row is the model's own in each wrapper of torch; `tests/observe/test_wrappers.py` has stand-ins."""

from __future__ import annotations

from pathlib import Path

import pytest

import recorder
from tests.rigs import jobs
from tests.rigs.jobs import SCRIPTS

from .scripts.modes import WRAPPERS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("modes")
    jobs.succeeded(jobs.ranks(folder, SCRIPTS / "modes.py", "out"))
    return folder / "out"


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_the_mode_is_that_of_the_model_and_not_of_its_wrapper(folder: Path, wrapper: str) -> None:
    run = recorder.open_run(folder / wrapper)
    rows = run.to_pandas()
    modes = rows.groupby(["rank", "module_path", "step"])["mode"].agg(list)
    assert set(map(tuple, modes)) == {("train", "eval", "no_grad")}
    assert {step for _, _, step in modes.index} == {0, 1}
    paths = {""} if wrapper.startswith("compiled") else {"", "first", "act", "second"}
    assert {path for _, path, _ in modes.index} == paths
    assert run.array("", site="output", step=1, mode="train").shape == (6, 2)
