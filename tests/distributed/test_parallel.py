"""Tensor, sequence and pipeline parallel training: nothing is changed, and rows say of what they are pieces."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

import recorder

from . import jobs
from .jobs import SCRIPTS, Finished

OF_TWO = ["tp", "sp"]
OF_FOUR = ["tp_ddp", "tp_fsdp2", "sp_fsdp2", "tp_hsdp"]
CASES = [*OF_TWO, *OF_FOUR]
GROUPS = {0: ([0, 2], [0, 1]), 1: ([1, 3], [0, 1]), 2: ([0, 2], [2, 3]), 3: ([1, 3], [2, 3])}
"""By rank of a 2 x 2 mesh, data parallel and model parallel ranks."""


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Finished]:
    """By case, the job that trained it."""
    found: dict[str, Finished] = {}
    for world_size, cases in ((2, OF_TWO), (4, OF_FOUR)):
        folder = tmp_path_factory.mktemp("parallel")
        options = ("--standalone", f"--nproc-per-node={world_size}")
        job = jobs.succeeded(jobs.torchrun(folder, SCRIPTS / "parallel.py", "out", options=options))
        found |= dict.fromkeys(cases, job)
    return found


@pytest.fixture(scope="module")
def runs(finished: dict[str, Finished]) -> dict[str, recorder.Run]:
    return {case: recorder.open_run(job.folder / "out" / case) for case, job in finished.items()}


@pytest.mark.parametrize("case", CASES)
def test_training_is_not_changed(finished: dict[str, Finished], case: str) -> None:
    for rank in range(2 if case in OF_TWO else 4):
        twins = torch.load(finished[case].folder / "out" / f"{case}.twins{rank}")
        assert twins["same"]
        without, recorded = twins["num_collectives"]
        assert without == recorded > 0


def facts(run: recorder.Run) -> list[tuple[Any, Any]]:
    roots = [writer.manifest["roots"] for writer in run.writers]
    return [(root.get("data_parallel"), root.get("model_parallel")) for (root,) in roots]


@pytest.mark.parametrize("case", OF_TWO)
def test_tensor_parallel_ranks_work_on_the_same_batch(runs: dict[str, recorder.Run], case: str) -> None:
    assert facts(runs[case]) == [(None, {"ranks": [0, 1], "shape": [2], "dim_names": ["tp"]})] * 2


@pytest.mark.parametrize("case", OF_FOUR)
def test_a_grid_has_ranks_beside_each_other_and_ranks_elsewhere(runs: dict[str, recorder.Run], case: str) -> None:
    for rank, (data, model) in enumerate(facts(runs[case])):
        elsewhere, beside = GROUPS[rank]
        assert data["ranks"] == elsewhere
        assert model == {"ranks": beside, "shape": [2], "dim_names": ["tp"]}


@pytest.mark.parametrize("case", CASES)
def test_a_row_names_the_ranks_that_its_placements_are_over(runs: dict[str, recorder.Run], case: str) -> None:
    frame = runs[case].to_pandas()
    frame = frame[frame["placements"].notna()]
    assert {"param", "grad", "optim", "input", "output"} <= set(frame["site"])
    for row in frame.itertuples():
        mesh = json.loads(str(row.mesh))
        ranks = np.array(mesh["ranks"]).reshape(mesh["shape"])
        assert ranks[tuple(mesh["coordinate"])] == row.rank
