"""Ranks of which one alone evaluates the model inside a wrapper first come together, and match a run without that."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.rigs import jobs
from tests.rigs.command_line import Cli, cli
from tests.rigs.jobs import SCRIPTS

__all__ = ["cli"]


@pytest.mark.parametrize("kind", ["ddp", "wrapper"])
def test_a_rank_that_evaluates_the_inner_model_first_has_the_paths_of_the_others(
    cli: Cli, tmp_path: Path, kind: str
) -> None:
    finished = jobs.succeeded(jobs.ranks(tmp_path, SCRIPTS / "inner_first.py", kind, TESTS_RECORDER="1"))
    rows = finished.run.to_pandas()
    rows = rows[(rows.site == "output") & (rows["mode"] == "train")]
    assert set(rows.root) == {"model"}
    paths = [set(rows[rows["rank"] == rank].module_path) for rank in (0, 1)]
    assert paths[0] == paths[1] >= {"", "base_model.model.first" if kind == "wrapper" else "first"}
    path = "base_model.model.first" if kind == "wrapper" else "first"
    assert finished.run.array(path, site="output", step=0, mode="train").shape == (6, 8)  # DDP's two halves
    assert cli("doctor", finished.run.path, "--strict").exit_code == 0
    if kind == "ddp":
        plain = jobs.succeeded(jobs.ranks(tmp_path / "plain", SCRIPTS / "inner_first.py", "plain", TESTS_RECORDER="1"))
        assert cli("diff", plain.run.path, finished.run.path, "--common").exit_code == 0
