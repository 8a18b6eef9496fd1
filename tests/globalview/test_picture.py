"""`Run.layout`: where the pieces of a tensor came from, as people read it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from recorder.errors import LookupFailedError
from recorder.merge.merge import merge_run
from recorder.run.run import open_run
from tests.rigs.meshes import PARAM, PARTIAL, REPLICATE, Mesh, grid_facts, mesh_run, plain, root_input, shard

GRID = Mesh([[0, 1], [2, 3]])
TP = GRID.axis(1)
WHOLE = np.arange(48, dtype=np.float32).reshape(6, 8)


def test_a_tensor_over_a_mesh_is_drawn_with_its_ranks(tmp_path: Path) -> None:
    rows = {r: [GRID.row(r, 0, WHOLE, [shard(0), shard(1)], **PARAM, encoding=None)] for r in range(4)}
    facts = {rank: grid_facts(GRID.ranks.tolist(), rank, "fsdp2") for rank in rows}
    layout = mesh_run(tmp_path / "run", rows, facts).layout("layers.0", site="param", name="weight", step=0)
    assert (layout.global_shape, layout.source, layout.mesh_shape) == ((6, 8), "dtensor", (2, 2))
    assert [(p.rank, p.coordinate, p.offsets, p.shape) for p in layout.pieces][2] == (2, (1, 0), (3, 0), (3, 4))
    assert str(layout).splitlines() == [
        "'layers.0' site='param' step=0 name='weight': [6, 8]",
        "  dtensor: rows name their positions (DTensor, or the framework's marks)",
        "",
        "mesh [2, 2], Shard(0) Shard(1)",
        "  0 1",
        "  2 3",
        "",
        "cut along dim 0 down, dim 1 across; in each piece the ranks that have it",
        "  +---+---+",
        "  | 0 | 1 |",
        "  +---+---+",
        "  | 2 | 3 |",
        "  +---+---+",
        "",
        "rank  mesh    offsets  shape",
        "0     [0, 0]  [0, 0]   [3, 4]",
        "1     [0, 1]  [0, 4]   [3, 4]",
        "2     [1, 0]  [3, 0]   [3, 4]",
        "3     [1, 1]  [3, 4]   [3, 4]",
    ]
    assert layout._repr_html_().startswith("<pre>&#x27;layers.0&#x27;")


def test_copies_and_batches_say_which_ranks_have_them(tmp_path: Path) -> None:
    rows = {
        rank: [
            root_input(0, np.ones((6, 3), np.float32) * rank),
            TP.row(rank, 1, WHOLE + rank // 2, [shard(1)]),
            TP.row(rank, 2, WHOLE, [shard(0)], **PARAM),
        ]
        for rank in range(4)
    }
    run = mesh_run(tmp_path / "run", rows, {rank: grid_facts(GRID.ranks.tolist(), rank) for rank in rows})
    output, weight = run.layout("layers.0", step=0), run.layout("layers.0", site="param", step=0)
    assert (output.global_shape, output.source) == ((12, 8), "assumed")
    assert [chunk.offsets for chunk in output.pieces] == [(0, 0), (0, 4), (6, 0), (6, 4)]
    assert [chunk.is_copy for chunk in weight.pieces] == [False, False, True, True]
    assert "mesh [2], Shard(0)\n  0 1\n\n  2 3\n" in str(weight)
    assert "cut along dim 0;" in str(weight) and "  | 0,2 | 1,3 |" in str(weight)


def test_pieces_that_make_no_tensor_say_why(tmp_path: Path) -> None:
    rows = {r: [root_input(0, np.ones((4, 3), np.float32)), plain(1, WHOLE + r)] for r in (0, 1)}
    run = mesh_run(tmp_path / "run", rows, {r: grid_facts([0, 1], r) for r in rows})
    layout = run.layout("layers.0", step=0)
    assert layout.global_shape is None and "share a batch" in layout.why
    assert str(layout).startswith("'layers.0' site='output' step=0: no single tensor\n  ranks 0, 1 share a batch")


def test_a_missing_rank_is_named(tmp_path: Path) -> None:
    rows = {0: [Mesh([0, 1]).row(0, 0, WHOLE, [shard(0)], **PARAM)]}
    run = mesh_run(tmp_path / "run", rows, {0: grid_facts([0, 1], 0)}, world_size=2)
    layout = run.layout("layers.0", site="param", step=0)
    assert layout.missing == (1,) and "  missing: rank 1" in str(layout)


def test_a_merged_run_sends_to_the_run_that_it_is_of(tmp_path: Path) -> None:
    run = mesh_run(tmp_path / "run", {0: [plain(0, WHOLE, **PARAM)]}, {0: {}})
    assert run.layout("layers.0", site="param", step=0).source == "single"
    merge_run(run, tmp_path / "merged")
    with pytest.raises(LookupFailedError, match="ask the run that was merged"):
        open_run(tmp_path / "merged").layout("layers.0", site="param", step=0)


SUMMED = "rank 0, 1 are summands, not copies"


def test_summands_are_no_copies(tmp_path: Path) -> None:
    rows = {r: [Mesh([0, 1]).row(r, 0, WHOLE, [PARTIAL], **PARAM, encoding=None)] for r in (0, 1)}
    layout = mesh_run(tmp_path / "run", rows, {r: grid_facts([0, 1], r) for r in rows}).layout(
        "layers.0", site="param", step=0
    )
    assert [(chunk.reduce_op, chunk.is_copy) for chunk in layout.pieces] == [("sum", False)] * 2
    text = str(layout)
    assert f"  reduced by sum: the chunks of {SUMMED}" in text.splitlines()
    assert [line.rpartition("  ")[2] for line in text.splitlines()[-2:]] == ["summand (sum)"] * 2


@pytest.mark.parametrize("wrapper", ["one mesh", "ddp"])
def test_what_repeats_a_sum_is_its_copy(tmp_path: Path, wrapper: str) -> None:
    """Ranks 0 and 1 add up to the tensor, and so do ranks 2 and 3."""
    mesh, placements = (GRID, [REPLICATE, PARTIAL]) if wrapper == "one mesh" else (TP, [PARTIAL])
    rows = {r: [mesh.row(r, 0, WHOLE, placements, **PARAM, encoding=None)] for r in range(4)}
    facts = {r: grid_facts(GRID.ranks.tolist(), r) for r in rows}
    layout = mesh_run(tmp_path / "run", rows, facts).layout("layers.0", site="param", step=0)
    assert f"  reduced by sum: the chunks of {SUMMED}" in str(layout).splitlines()
    assert [chunk.is_copy for chunk in layout.pieces] == [False, False, True, True]
    assert {chunk.offsets for chunk in layout.pieces} == {(0, 0)}


def test_a_cut_tensor_of_summands_is_drawn_as_their_sums(tmp_path: Path) -> None:
    rows = {r: [GRID.row(r, 0, WHOLE, [shard(0), PARTIAL], **PARAM, encoding=None)] for r in range(4)}
    rows = {
        r: [one | {"placements": one["placements"].replace("sum", "max")} for one in own] for r, own in rows.items()
    }
    facts = {r: grid_facts(GRID.ranks.tolist(), r, "fsdp2") for r in rows}
    text = str(mesh_run(tmp_path / "run", rows, facts).layout("layers.0", site="param", step=0))
    assert "in each piece the ranks that have it, + between summands" in text
    assert "  | 0+1 | 2+3 |" in text and "summand (max)" in text


def test_a_mean_that_was_asked_for_says_so(tmp_path: Path) -> None:
    rows = {r: [root_input(0, np.ones((4, 3), np.float32)), plain(1, WHOLE + r)] for r in (0, 1)}
    run = mesh_run(tmp_path / "run", rows, {r: grid_facts([0, 1], r) for r in rows})
    layout = run.layout("layers.0", step=0, layouts=["layers.0=partial(avg)"])
    assert layout.source == "override" and [chunk.reduce_op for chunk in layout.pieces] == ["avg", "avg"]
    assert "reduced by avg" in str(layout)
