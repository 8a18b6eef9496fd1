"""What commands say of values that lie on several ranks: ``show --where``, and why there is no number."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from recorder.columns import COUNTS, STATISTICS
from recorder.merge.merge import merge_run
from recorder.run.run import Run
from tests.rigs.command_line import Cli
from tests.rigs.meshes import PARAM, PARTIAL, Mesh, grid_facts, mesh_run, plain, root_input, shard

TP = Mesh([0, 1])
WHOLE = np.arange(48, dtype=np.float32).reshape(6, 8)
SUMMAND = dict.fromkeys((*STATISTICS, *COUNTS)) | {"note": '{"no_statistics":"Partial"}'}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Two tensor parallel ranks, two steps: an output cut along dim 1, summands, and plain values that differ."""
    rows = {
        rank: [
            row
            for step in (0, 1)
            for row in (
                root_input(9 * step, np.ones((6, 3), np.float32), step=step),
                TP.row(rank, 9 * step + 1, WHOLE, [shard(1)], step=step, module_path="fc1"),
                TP.row(rank, 9 * step + 2, WHOLE + rank, [PARTIAL], step=step, module_path="fc2", **SUMMAND),
                TP.row(rank, 9 * step + 3, WHOLE, [shard(0)], step=step, module_path="fc2", **PARAM),
                plain(9 * step + 4, WHOLE[:, :2] + rank, step=step, module_path="core"),
            )
        ]
        for rank in (0, 1)
    }
    return mesh_run(tmp_path / "run", rows, {rank: grid_facts([0, 1], rank) for rank in rows})


def test_a_module_s_outputs_are_drawn_at_the_last_step(cli: Cli, run: Run) -> None:
    found = cli("show", run.path, "fc1", "--where")
    assert (found.exit_code, found.out.splitlines()) == (0, str(run.layout("fc1", step=1)).splitlines())
    assert found.out.startswith("'fc1' site='output' step=1: [6, 8]\n") and "  | 0 | 1 |\n" in found.out
    param = cli("show", run.path, "fc2", "--where", "--site", "param", "--step", "0").out
    assert param.splitlines() == str(run.layout("fc2", "param", 0)).splitlines()


def test_the_drawing_as_json(cli: Cli, run: Run) -> None:
    (layout,) = cli("show", run.path, "fc2", "--where", "--json").json["layouts"]
    assert (layout["global_shape"], layout["source"], layout["why"]) == ([6, 8], "dtensor", "")
    assert [(piece["rank"], piece["reduce_op"]) for piece in layout["pieces"]] == [(0, "sum"), (1, "sum")]


def test_values_that_differ_in_more_than_their_moment_are_drawn_each(cli: Cli, tmp_path: Path) -> None:
    rows = {0: [plain(i, WHOLE, **(PARAM | {"name": "wb"[i % 2], "call": i // 2})) for i in range(4)]}
    found = cli("show", mesh_run(tmp_path / "run", rows, {0: {}}).path, "layers.0", "--where")
    heads = [line for line in found.out.splitlines() if line.startswith("'layers.0'")]
    assert heads == [f"'layers.0' site='param' step=0 name='{name}' call=0: [6, 8]" for name in "wb"]
    found = cli("show", tmp_path / "run", "layers.0", "--where", "--name", "b")
    assert found.out.splitlines()[0] == "'layers.0' site='param' step=0 name='b' call=0: [6, 8]", found.err


def test_a_layout_can_be_tried(cli: Cli, run: Run) -> None:
    apart = cli("show", run.path, "core", "--where").out
    assert apart.splitlines()[0] == "'core' site='output' step=1: no single tensor"
    tried = cli("show", run.path, "core", "--where", "--layout", "core=shard(1)").out
    assert tried.splitlines()[:2] == [
        "'core' site='output' step=1: [6, 4]",
        "  override: as the layout that was given says",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--where"], "--where: name the module"),
        (["fc1", "--where", "--rank", "0"], "--rank: not with --where"),
        (["fc1", "--layout", "fc1=replicate"], "--layout: only with --where"),
        (["fc7", "--where"], "no module 'fc7' in this run; nearest are 'fc2', 'fc1'"),
        (["fc1", "--where", "--site", "grad"], "'fc1' has no row with site='grad'; there is 'output'"),
        (["fc1", "--where", "--layout", "fc1=diagonal"], "layout 'diagonal': expected shard(DIM)"),
    ],
)
def test_what_cannot_be_drawn_is_said_in_one_line(cli: Cli, run: Run, arguments: list[str], message: str) -> None:
    found = cli("show", run.path, *arguments)
    assert (found.exit_code, found.out, found.err.count("\n")) == (2, "", 1)
    assert found.err.startswith(f"recorder: {message}")


def test_a_merged_run_sends_to_the_run_that_it_is_of(cli: Cli, run: Run, tmp_path: Path) -> None:
    merge_run(run, tmp_path / "merged")
    found = cli("show", tmp_path / "merged", "fc1", "--where")
    assert found.exit_code == 2 and str(run.path) in found.err


def test_a_missing_piece_makes_it_a_finding(cli: Cli, tmp_path: Path) -> None:
    rows = {0: [TP.row(0, 0, WHOLE, [shard(0)], **PARAM)]}
    found = cli(
        "show", mesh_run(tmp_path / "run", rows, {0: grid_facts([0, 1], 0)}, world_size=2).path, "layers.0", "--where"
    )
    assert found.exit_code == 1 and "  missing: rank 1\n" in found.out


def test_a_dash_has_its_reason_beside_it(cli: Cli, run: Run) -> None:
    summand, summed = "a summand, not yet reduced over ranks (sum)", "reduced over ranks: statistics of summands do not"
    for arguments, num_lines, why in [
        (["show", run.path], 1, summand),
        (["show", run.path, "fc2", "--site", "output"], 2 + 4, summand),
        (["stats", run.path, "fc2", "--site", "output"], 4, summand),
        (["stats", run.path, "fc2", "--site", "output", "--global"], 2, summed),
        (["stats", run.path, "core", "--global"], 4, "  per rank: ranks 0, 1 share a batch, and their tensors"),
    ]:
        lines = cli(*arguments).out.splitlines()
        assert len([line for line in lines if why in line]) == num_lines, lines
        assert any(line.endswith("  why") for line in lines)
    assert cli("show", run.path, "fc1").out.count("why") == 0
    (module,) = [m for m in cli("show", run.path, "--json").json["modules"] if m["module"] == "fc2"]
    assert (module["last_absmax"], module["why"]) == (None, summand)
    rows = cli("stats", run.path, "fc2", "--global", "--site", "output", "--json").json["rows"]
    assert [row["why"].startswith(summed) for row in rows] == [True] * 2


def test_an_assumed_layout_names_what_says_how_a_batch_is_cut(tmp_path: Path) -> None:
    grid = [[0, 1], [2, 3]]
    rows = {
        rank: [
            root_input(0, np.ones((6, 3), np.float32) * (rank // 2)),
            Mesh(grid[rank // 2]).row(rank, 1, WHOLE + rank // 2, [shard(1)], module_path="fc1"),
        ]
        for rank in range(4)
    }
    run = mesh_run(tmp_path / "run", rows, {rank: grid_facts(grid, rank) for rank in rows})
    how = "  assumed: the batches of data-parallel ranks end to end; within a batch by the placements of DTensors"
    assert str(run.layout("fc1", step=0)).splitlines()[1] == how
