"""Layouts that contradict themselves, and overrides that do not fit: named by every command, and the rest is given."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recorder.run.run import open_run
from tests.rigs.command_line import Cli
from tests.rigs.meshes import PARAM, Mesh, grid_facts, mesh_run, plain, root_input, shard

WHOLE = np.arange(48, dtype=np.float32).reshape(6, 8)
TP = Mesh([0, 1])
RUN, COPY, OUT = "RUN", "COPY", "OUT"
COMMANDS = {
    "merge": ["merge", RUN, "-o", OUT],
    "checkpoint": ["checkpoint", RUN, "--to", "safetensors", "-o", OUT],
    "where": ["show", RUN, "fc1", "--where", "--site", "param"],
    "stats": ["stats", RUN, "--global"],
    "grouped": ["stats", RUN, "--global", "--by", "site"],
    "diff": ["diff", RUN, COPY],
    "export": ["export", RUN, "--global", "--to", "npz", "-o", OUT],
    "parquet": ["export", RUN, "--global", "--to", "parquet", "-o", OUT],
}
OF_RUNS = {**COMMANDS, "doctor": ["doctor", RUN]}


def two_layers(rank: int, first: dict[str, Any], width: int = 8) -> list[Any]:
    """The values of a rank: of ``fc1`` as told, of ``fc2`` a piece of the same whole."""
    return [
        root_input(0, np.ones((6, 3), np.float32)),
        TP.row(rank, 1, WHOLE[:, :width], [first], module_path="fc1"),
        TP.row(rank, 2, WHOLE, [shard(0)], module_path="fc2"),
        TP.row(rank, 3, WHOLE[:, :width], [first], module_path="fc1", **PARAM),
        TP.row(rank, 4, WHOLE, [shard(0)], module_path="fc2", **PARAM),
    ]


def disagreeing(path: Path) -> Path:
    rows = {rank: two_layers(rank, shard(rank)) for rank in (0, 1)}
    return mesh_run(path, rows, {rank: grid_facts([0, 1], rank) for rank in rows}).path


def beyond_the_mesh(path: Path) -> Path:
    """Ranks 2 and 3 hold plain tensors, and no mesh has them."""
    rows = {rank: two_layers(rank, shard(0)) for rank in (0, 1)}
    others = [root_input(0, np.ones((6, 3), np.float32)), plain(3, WHOLE, module_path="fc1", **PARAM)]
    facts = {rank: grid_facts([0, 1], rank) if rank < 2 else {} for rank in range(4)}
    return mesh_run(path, rows | {2: others, 3: others}, facts, world_size=4).path


def typed(words: list[str], run: Path, folder: Path) -> list[Any]:
    copy = shutil.copytree(run, folder / "copy") if COPY in words else None
    return [{RUN: run, COPY: copy, OUT: folder / "out"}.get(word, word) for word in words]


@pytest.mark.parametrize("command", OF_RUNS)
@pytest.mark.parametrize(
    ("make", "why"),
    [
        (disagreeing, "ranks disagree on the placements: rank 0 Shard(0), rank 1 Shard(1)"),
        (beyond_the_mesh, "rank 2 is in no mesh of this model ([0, 1])"),
    ],
)
def test_a_contradiction_is_named(cli: Cli, tmp_path: Path, make: Any, why: str, command: str) -> None:
    found = cli(*typed(OF_RUNS[command], make(tmp_path / "run"), tmp_path))
    assert found.exit_code == 1
    assert any(why in line and "fc1" in line for line in (found.out + found.err).splitlines()) or command == "where"
    assert why in found.out + found.err


def test_the_rest_of_a_contradiction_is_given(cli: Cli, tmp_path: Path) -> None:
    run = disagreeing(tmp_path / "run")
    cli("merge", run, "-o", tmp_path / "merged")
    assert open_run(tmp_path / "merged").array("fc2", "param", 0).tolist() == WHOLE.tolist()
    assert cli("export", run, "--global", "-o", tmp_path / "rest.npz", "--json").json["rows"] == 7
    with np.load(tmp_path / "rest.npz") as found:
        assert found["step=0/fc2/param/weight"].tolist() == WHOLE.tolist()
    drawn = cli("show", run, "fc1", "--where").out.splitlines()
    assert [line.split()[:3] for line in drawn[-2:]] == [["0", "[0]", "Shard(0)"], ["1", "[1]", "Shard(1)"]]


def test_what_is_not_asked_for_is_not_complained_of(cli: Cli, tmp_path: Path) -> None:
    run = disagreeing(tmp_path / "run")
    copy = shutil.copytree(run, tmp_path / "copy")
    for words in (["stats", run, "fc2", "--global"], ["diff", run, copy, "--module", "fc2"]):
        assert cli(*words).exit_code == 0
    assert cli("stats", run, "fc1", "--global", "--json").json["problems"]
    found = cli("diff", run, copy, "--json")
    assert (found.exit_code, found.json["is_equal"], len(found.json["problems_a"])) == (1, True, 2)


@pytest.mark.parametrize("command", ["merge", "grouped", "stats", "diff", "export", "doctor"])
def test_a_pipeline_without_a_stage_is_named(cli: Cli, tmp_path: Path, command: str) -> None:
    rows = {r: [plain(1, WHOLE, module_path=f"fc{r}", **PARAM)] for r in (0, 1)}
    facts = {r: {"pipeline": {"stage": r, "num_stages": 2}} for r in rows}
    run = mesh_run(tmp_path / "run", rows, facts, world_size=2).path
    shutil.rmtree(run / "rank=00001")
    found = cli(*typed(OF_RUNS[command], run, tmp_path))
    assert found.exit_code == 1
    assert "no rank left a record of stage 1 (from 0) of a pipeline of 2" in found.out + found.err


def test_what_several_stages_have_under_one_path_is_drawn_by_stage(cli: Cli, tmp_path: Path) -> None:
    rows = {r: [plain(1, WHOLE + r, module_path="", **PARAM)] for r in (0, 1)}
    run = mesh_run(tmp_path / "run", rows, {r: {"pipeline": {"stage": r, "num_stages": 2}} for r in rows}).path
    found = cli("show", run, "''", "--where", "--site", "param")
    assert found.exit_code == 2 and "choose stage=0|1" in found.out + found.err
    found = cli("show", run, "''", "--where", "--site", "param", "--stage", "1")
    assert found.exit_code == 0 and "stage=1: [6, 8]" in found.out
    assert cli("show", run, "''", "--stage", "1").exit_code == 2, "only with --where"


def test_first_says_what_it_could_not_compare(cli: Cli, tmp_path: Path) -> None:
    out = cli("first", disagreeing(tmp_path / "run")).out
    assert "note: not compared: 'fc1' param weight: ranks disagree on the placements" in out


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("layout", "why"),
    [
        ("fc1:param:*=shard(2)", "does not fit: there is no dim 2 in rank 0 [3, 8], rank 1 [3, 5]"),
        ("fc1:param:*=shard(1)", None),
        ("fc1:param:*=shard(0)", "does not fit: shapes differ in more than dim 0: rank 0 [3, 8], rank 1 [3, 5]"),
        ("fc1:param:*=partial(max)", "does not fit: shapes differ: rank 0 [3, 8], rank 1 [3, 5]"),
        ("fc1:param:*=replicate", "does not fit: shapes differ: rank 0 [3, 8], rank 1 [3, 5]"),
        ("fc2:param:*=replicate", "does not fit: rank 1 differs from rank 0: rank 0 [3, 8], rank 1 [3, 8]"),
    ],
)
def test_an_override_that_does_not_fit_is_named(
    cli: Cli, tmp_path: Path, command: str, layout: str, why: str | None
) -> None:
    rows = {rank: two_layers(rank, shard(0), width=(8, 5)[rank]) for rank in (0, 1)}
    rows = {rank: [row for row in own if row["site"] == "param"] for rank, own in rows.items()}
    run = mesh_run(tmp_path / "run", rows, {rank: grid_facts([0, 1], rank) for rank in rows}).path
    words = [layout[:3] if word == "fc1" else word for word in typed(COMMANDS[command], run, tmp_path)]
    found = cli(*words, "--layout", layout)
    text = found.out + found.err
    if why is None:
        assert found.exit_code == 0 and "does not fit" not in text
        return
    assert found.exit_code == 1
    assert any(f"--layout '{layout}' {why}" in line for line in text.splitlines()), text
    assert layout[:3] in text.replace(layout, "")


@pytest.mark.parametrize("command", COMMANDS)
def test_an_override_that_no_value_fits_is_refused(cli: Cli, tmp_path: Path, command: str) -> None:
    rows = {rank: two_layers(rank, shard(0)) for rank in (0, 1)}
    run = mesh_run(tmp_path / "run", rows, {rank: grid_facts([0, 1], rank) for rank in rows}).path
    found = cli(*typed(COMMANDS[command], run, tmp_path), "--layout", "fc3:param:weight=replicate")
    assert (found.exit_code, found.out, found.err.count("\n")) == (2, "", 1)
    assert "--layout 'fc3:param:weight=replicate': no value fits 'fc3:param:weight'" in found.err
    assert "'fc1:param:weight'" in found.err and not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", [command for command in OF_RUNS if command != "checkpoint"])  # of parameters alone
def test_a_layout_that_changes_from_step_to_step_is_a_finding(cli: Cli, tmp_path: Path, command: str) -> None:
    """A table that both ranks have alike, until at step 1 they do not."""
    draw = np.random.default_rng(3).standard_normal
    table = draw((5, 8)).astype(np.float32)
    rows: dict[int, list[Any]] = {0: [], 1: []}
    for step in range(2):
        for rank, own in rows.items():
            own.append(root_input(2 * step, draw((3, 4)).astype(np.float32), step=step))
            own.append(plain(2 * step + 1, table + rank * step, module_path="fc1", step=step))
    facts = {rank: {"data_parallel": {"kind": "ddp", "ranks": [0, 1]}} for rank in rows}
    run = mesh_run(tmp_path / "run", rows, facts).path
    found = cli(*[{"param": "output"}.get(word, word) for word in typed(OF_RUNS[command], run, tmp_path)])
    assert found.exit_code == 1, found.out + found.err
    assert "alike" in " ".join((found.out + found.err).split())
