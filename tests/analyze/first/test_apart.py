"""`first`: replicas that come apart where ranks are data-parallel and share a batch, on real ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

import recorder
from tests.analyze.first.scripts.apart import CASES, STEP
from tests.rigs import jobs

SCRIPT = Path(__file__).parent / "scripts" / "apart.py"


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("apart")
    return jobs.succeeded(jobs.ranks(folder, SCRIPT, "out", num=4)).folder / "out"


@pytest.mark.parametrize("case", CASES)
def test_a_copy_that_comes_apart_is_named_with_its_ranks(out: Path, case: str) -> None:
    found = recorder.first(recorder.open_run(out / case)).replica
    assert found is not None and not found.is_assumed
    assert (found.value.step, found.value.site, found.groups) == (STEP, "param", CASES[case].groups)
    name = f"{found.value.module_path}.{found.value.name}"
    assert name == CASES[case].parameter or not CASES[case].parameter


def test_sound_ranks_have_equal_copies(out: Path) -> None:
    sound = recorder.first(recorder.open_run(out / "sound"))
    assert not sound.is_found and sound.notes == []
    assert sound.num_compared > 200
