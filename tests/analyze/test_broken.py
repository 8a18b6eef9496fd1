"""Real runs of two ranks with one thing wrong: `first` and `diff` name the step, the module, the site and the rank."""

from __future__ import annotations

from pathlib import Path

import pytest

import recorder
from recorder.analyze.diff.diff import diff
from recorder.analyze.first.first import first
from tests.rigs import jobs

BROKEN = Path(__file__).parent / "scripts" / "broken.py"
KINDS = ("sound", "nan", "skipped", "stale")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, recorder.Run]:
    """One run of each kind, all of the same two ranks: interpreters cost more than trainings."""
    root = tmp_path_factory.mktemp("broken")
    jobs.succeeded(jobs.ranks(root, BROKEN, *KINDS))
    return {kind: recorder.open_run(root / kind / "recordings") for kind in KINDS}


def test_a_sound_run_has_no_finding(runs: dict[str, recorder.Run]) -> None:
    found = first(runs["sound"])
    assert not found.is_found and found.num_compared > 0
    assert diff(runs["sound"], runs["sound"]).is_equal


def test_first_names_the_nan(runs: dict[str, recorder.Run]) -> None:
    bad = first(runs["nan"]).nonfinite
    assert bad is not None
    value = bad.value
    assert (value.step, value.module_path, value.site, value.rank, value.module_class) == (2, "act", "output", 1, "Act")
    assert (bad.nan_count, bad.inf_count, bad.numel) == (8, 0, 32)
    assert bad.before is not None
    assert (bad.before.step, bad.before.module_path, bad.before.site, bad.before.rank) == (2, "act", "input", 1)
    assert bad.last_healthy is not None and bad.last_healthy.step == 1
    assert "broken.py:" in value.source


def test_diff_names_where_the_nan_begins(runs: dict[str, recorder.Run]) -> None:
    found = diff(runs["sound"], runs["nan"])
    assert found.first is not None
    assert (found.first.step, found.first.module_path, found.first.site) == (2, "act", "output")
    line = found.table.to_pylist()[0]
    assert (line["nonfinite_a"], line["nonfinite_b"], line["num_outside"]) == (0, 8, 8)
    assert found.modules.column("module_path").to_pylist()[0] == "act"
    assert not [row for row in found.table.to_pylist() if row["step"] < 2]


def test_first_names_the_gradient_that_is_not_reduced(runs: dict[str, recorder.Run]) -> None:
    found = first(runs["skipped"])
    assert found.nonfinite is None and found.replica is not None
    value = found.replica.value
    assert (value.step, value.module_path, value.site, value.name) == (0, "down", "grad", "weight")
    assert (found.replica.groups, found.replica.is_assumed) == ([[0], [1]], False)
    assert set(found.differing) == {("down", "grad", "weight"), ("down", "param", "weight")}


def test_diff_names_the_gradient_that_is_not_reduced_and_its_ranks(runs: dict[str, recorder.Run]) -> None:
    found = diff(runs["sound"], runs["skipped"])
    assert found.first is not None
    assert (found.first.step, found.first.module_path, found.first.site, found.first.name) == (
        0,
        "down",
        "grad",
        "weight",
    )
    at_first = [row for row in found.table.to_pylist() if row["step"] == 0 and row["site"] == "grad"]
    assert [(row["rank_a"], row["rank_b"]) for row in at_first] == [(None, 0), (None, 1)]
    assert found.only_a.num_rows == found.only_b.num_rows == 0


def test_a_stale_buffer_is_found_by_first_and_by_diff(runs: dict[str, recorder.Run]) -> None:
    told = first(runs["stale"])
    assert told.is_found and told.replica is None
    buffers = {(one.value.module_path, one.value.name): one for one in told.buffers}
    assert set(buffers) == {("norm", "running_mean"), ("norm", "running_var")}
    assert buffers["norm", "running_mean"].groups == [[0], [1]]
    found = diff(runs["sound"], runs["stale"])
    assert found.first is not None
    assert (found.first.step, found.first.module_path, found.first.site) == (1, "norm", "buffer")
    assert (found.first.rank_a, found.first.rank_b) == (1, 1)
    assert found.modules.column("module_path").to_pylist() == ["norm"]
