"""`first`: replicas that come apart where ranks are data-parallel and share a batch, on real ranks."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import recorder
from recorder.analyze.check.check import check
from recorder.analyze.first.first import reply_of
from recorder.run.run import Run
from tests.analyze.first.scripts.apart import CASES, FACTOR, RANK, STEP
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


def test_a_rank_with_a_multiple_of_all_gradients_is_named_with_the_factor(out: Path) -> None:
    run = recorder.open_run(out / "scaled")
    told = f"rank 3 has {FACTOR} times what ranks 0,1,2 have"
    (finding,) = [one for one in check(run, ["replica"]).findings if one.site == "grad"]
    assert (finding.step, finding.ranks) == (STEP, (3,))
    assert finding.detail == f"by the probe, equal at step 0, {told}"
    assert told in said(run)


def test_a_damaged_probe_is_named_by_what_would_have_read_it(out: Path, tmp_path: Path) -> None:
    run = recorder.open_run(shutil.copytree(out / "scaled", tmp_path / "runs"))
    path = Path(str(run.writers[RANK].probe_shards[0].path))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)
    damaged = recorder.open_run(run.path)
    assert f"what cannot be read was not looked at: {path}" in said(damaged)
    assert "by the probe" not in said(damaged) and reply_of(damaged, recorder.first(damaged)).exit_code == 1


def said(run: Run) -> str:
    return "\n".join(str(part) for part in reply_of(run, recorder.first(run)).parts())
