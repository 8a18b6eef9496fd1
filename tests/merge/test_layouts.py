"""Merges of ranks that share a batch, and of stages: what fits is merged, what does not is a finding."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from recorder.merge.merge import merge_run
from recorder.run.run import open_run
from tests.rigs.meshes import PARAM, Mesh, grid_facts, mesh_run, plain, root_input, shard

GRID = Mesh([[0, 1], [2, 3]])
TP = GRID.axis(1)


def test_a_merge_of_cut_batches_is_the_global_view(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    inputs, outputs, weight = (
        rng.standard_normal((2, 4, 3)),
        rng.standard_normal((2, 4, 6)),
        rng.standard_normal((6, 3)),
    )
    rows = {
        rank: [
            root_input(0, inputs[rank // 2]),
            TP.row(rank, 1, outputs[rank // 2], [shard(1)]),
            TP.row(rank, 2, weight, [shard(0)], **PARAM),
        ]
        for rank in range(4)
    }
    run = mesh_run(tmp_path / "run", rows, {rank: grid_facts(GRID.ranks.tolist(), rank) for rank in rows})
    report = merge_run(run, tmp_path / "merged")
    assert report.num_problems == 0 and report.num_rows == 3
    merged = open_run(tmp_path / "merged")
    assert np.array_equal(merged.array("layers.0", step=0), np.concatenate(outputs))
    assert np.array_equal(merged.array("layers.0", site="param", step=0), weight)


def test_ranks_that_disagree_and_a_stage_that_is_missing_are_findings(tmp_path: Path) -> None:
    whole = np.arange(16.0).reshape(4, 4)
    rows = {rank: [TP.row(rank, 0, whole, [shard(int(rank == 3))], **PARAM)] for rank in range(4)}
    for rank, own in rows.items():
        own.append(plain(1, whole, **(PARAM | {"name": "bias"}), rank=rank))
    facts = {r: grid_facts(GRID.ranks.tolist(), r) | {"pipeline": {"stage": 0, "num_stages": 2}} for r in rows}
    report = merge_run(mesh_run(tmp_path / "run", rows, facts), tmp_path / "merged")
    assert report.num_problems == 2 and {"inconsistent", "partial"} <= set(report.findings)
    assert np.array_equal(open_run(tmp_path / "merged").array("layers.0", site="param", name="bias", step=0), whole)
