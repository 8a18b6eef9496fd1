"""`recorder show`: the table that a person looks at first."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from recorder.numerics.distributions import spark_line
from recorder.run.run import open_run
from recorder.system.text import number
from tests.rigs.command_line import Cli, module, on_a_terminal
from tests.rigs.handmade import HandmadeWriter, make_row, make_run


def cells(line: str) -> list[str]:
    return line.split()


def test_all_modules_in_brief(cli: Cli, recorded: Path) -> None:
    found = cli("show", recorded)
    assert found.exit_code == 0
    head, bad, titles, *lines = found.out.splitlines()
    assert head == "run-a: 2 modules, ranks 0..1, steps 0..11"
    assert bad == "first NaN or infinity: 'layers.0' output, step 9, rank 1"
    assert cells(titles) == ["module", "class", "sites", "rows", "last", "step", "absmax", "nan", "inf", "first", "bad"]
    absmax = max(row["absmax"] for row in layer_rows(recorded, step=11))
    assert cells(lines[0]) == ["layers.0", "Linear", "output", "grad", "48", "11", f"{absmax:.4g}", "2", "0", "9"]
    assert cells(lines[1])[:5] == ["''", "Net", "output", "scalar", "48"]


def test_the_last_step_of_a_module_is_that_of_any_of_its_values(cli: Cli, tmp_path: Path) -> None:
    writer = HandmadeWriter(make_run(tmp_path / "run"), 0)
    rate = {"module_path": "", "site": "scalar", "name": "lr.SGD.0"}
    writer.add_shard([[make_row(0, np.ones(2), module_path=""), make_row(1, np.ones(()), step=9, **rate)]])
    writer.finish()
    assert [one["last_step"] for one in cli("show", tmp_path / "run", "--json").json["modules"]] == [9]


def test_one_of_several_models_is_chosen(cli: Cli, tmp_path: Path) -> None:
    writer = HandmadeWriter(make_run(tmp_path / "run"), 0)
    roots = ("model", "model_1")
    rows = [make_row(seq, np.full(2, seq + 1.0), root=root, module_path="up") for seq, root in enumerate(roots)]
    writer.add_shard([rows])
    described = [{"path": "up", "class": f"Of{root}", "sites": ["output"]} for root in roots]
    writer.finish(roots=[{"name": root, "modules": [one]} for root, one in zip(roots, described, strict=True)])
    run = tmp_path / "run"
    assert [one["root"] for one in cli("show", run, "--root", "model_1", "--json").json["modules"]] == ["model_1"]
    (series,) = cli("show", run, "up", "--root", "model_1", "--json").json["series"]
    assert [row["absmax"] for row in series["rows"]] == [2.0]
    assert "Ofmodel_1" in (shown := cli("show", run, "up", "--root", "model_1").out) and "Ofmodel " not in shown
    for command in (["stats"], ["stats", "--by", "module"], ["stats", "--global"]):
        assert [row["absmax"] for row in cli(*command, run, "--root", "*_1", "--json").json["rows"]] == [2.0], command
    cli("export", run, "--out", tmp_path / "one.parquet", "--root", "model_1")
    assert pq.read_table(tmp_path / "one.parquet").column("root").to_pylist() == ["model_1"]
    for name in ("show", "stats"):
        wrong = cli(name, run, "--root", "model_2")
        assert wrong.exit_code == 2 and "root='model_2'; nearest are 'model_1'" in wrong.err


def test_what_the_program_does_with_a_module_is_said(cli: Cli, tmp_path: Path) -> None:
    writer = HandmadeWriter(make_run(tmp_path / "run"), 0)
    paths = ("drop", "plain", "up")
    writer.add_shard([[make_row(seq, np.ones(2), module_path=path) for seq, path in enumerate(paths)]])
    known: dict[str, dict[str, Any]] = {
        "drop": {"evaluated": 73, "graphless": True},
        "up": {"frozen": ["bias"], "untrained": ["weight"], "untrained_since": 16, "uncleared": 1},
    }
    described = [{"path": path, "class": "Net", "sites": ["output"], **known.get(path, {})} for path in paths]
    writer.finish(roots=[{"name": "model", "class": "Net", "modules": described}])
    expected = {
        "drop": ["in evaluation mode while the model is trained, since step 73", "called without gradients"],
        "plain": [],
        "up": [
            "in no optimizer that steps: weight, since step 16", "frozen: bias", "gradients not cleared, since step 1",
        ],
    }  # fmt: skip
    found = cli("show", tmp_path / "run", "--json").json["modules"]
    assert {one["module"]: one["facts"] for one in found} == expected
    _, titles, *lines = cli("show", tmp_path / "run").out.splitlines()
    assert titles.endswith("facts")
    assert [line.partition("  -  ")[2] for line in lines] == ["; ".join(expected[path]) or "-" for path in paths]
    for path in paths:
        assert cli("show", tmp_path / "run", path, "--json").json["facts"] == expected[path]
        assert cli("show", tmp_path / "run", path).out.splitlines()[1:][: len(expected[path])] == expected[path]


def layer_rows(run: Path, **equal: Any) -> list[dict[str, Any]]:
    rows = open_run(run).table().to_pylist()
    wanted = {"module_path": "layers.0", "site": "output"} | equal
    return [row for row in rows if all(row[name] == value for name, value in wanted.items())]


def test_one_module_has_a_line_a_series_and_a_line_a_step(cli: Cli, recorded: Path) -> None:
    found = cli("show", recorded.parent, "layers.0")
    assert found.exit_code == 0
    lines = found.out.splitlines()
    assert lines[0] == "run-a: 'layers.0', Linear train.py:7"
    assert "! stands for NaN" in lines[1]
    assert cells(lines[2]) == ["site", "name", "rank", "dtype", "shape", "rows", "steps", "last", "absmax", "trend"]
    series = [cells(line) for line in lines[3:7]]
    assert [line[:3] for line in series] == [
        ["output", "-", "0"],
        ["output", "-", "1"],
        ["grad", "weight", "0"],
        ["grad", "weight", "1"],
    ]
    assert series[0][3:7] == ["float32", "[2,4]", "12", "0..11"]
    courses = [line[-1] for line in series]
    assert [len(course) for course in courses] == [12] * 4
    assert [course.find("!") for course in courses] == [-1, 9, -1, 9]
    assert lines[7] == "output, the last 10 of 12 steps (--last 0 shows all)"
    assert cells(lines[8]) == [
        "step",
        "rank",
        "mean",
        "std",
        "min",
        "max",
        "absmax",
        "l2",
        "nan",
        "inf",
        "zero",
        "values",
    ]
    assert [cells(line)[:2] for line in lines[9:]] == [[str(s), str(r)] for s in range(2, 12) for r in (0, 1)]
    (row,) = layer_rows(recorded, step=9, rank=1)
    line = next(cells(line) for line in lines[9:] if cells(line)[:2] == ["9", "1"])
    names = ("mean", "std", "min", "max", "absmax", "l2")
    assert line[2:] == [f"{row[name]:.4g}" for name in names] + ["1", "0", "0", "yes"]


def test_options_narrow_what_is_shown(cli: Cli, recorded: Path) -> None:
    found = cli("show", recorded, "layers.0", "--site", "grad", "--step", "3:5", "--rank", "1", "--json")
    (series,) = found.json["series"]
    assert (series["site"], series["name"], series["rank"]) == ("grad", "weight", 1)
    assert [row["step"] for row in series["rows"]] == [3, 4]
    assert series["rows"][0]["encoding"] is None


def test_a_scalar_is_drawn_by_its_value(cli: Cli, recorded: Path) -> None:
    found = cli("show", recorded, "", "--site", "scalar", "--name", "loss", "--rank", "0")
    course = found.out.splitlines()[3].split()[-1]
    assert course[0] == "█" and course[-1] == "▁"
    assert cli("show", recorded, "''", "--site", "scalar", "--name", "loss", "--rank", "0").out == found.out


def test_what_varies_gets_a_column(cli: Cli, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    rows = [make_row(i, [1.0], step=0, micro_step=i % 2, phase=("forward", "recompute")[i // 2]) for i in range(4)]
    HandmadeWriter(run).add_shard([rows])
    lines = cli("show", run, "layers.0").out.splitlines()
    assert cells(lines[2])[:3] == ["site", "phase", "rank"]
    assert cells(lines[6])[:4] == ["step", "micro_step", "phase", "rank"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["layer.0"], "no module 'layer.0' in this run; nearest is 'layers.0'"),
        (["layers.0", "--site", "input"], "'layers.0' has no row with site='input'; nearest is 'output'"),
        (["layers.0", "--step", "50"], "'layers.0' has no row with step='50'; there are steps 0 to 11"),
        (["layers.0", "--rank", "7"], "'layers.0' has no row with rank='7'; there are ranks 0 to 1"),
        (["--rank", "7"], "this run has no row with rank='7'; there are ranks 0 to 1"),
        (["layers.0", "--name", "wieght"], "'layers.0' has no row with name='wieght'; nearest is 'weight'"),
        (["--site", "outputs"], "this run has no row with site='outputs'; nearest is 'output'"),
        (["layers.0", "--step", "x"], "--step x: 'x' is no number"),
    ],
)
def test_what_is_not_there_is_said_in_one_line(cli: Cli, recorded: Path, arguments: list[str], message: str) -> None:
    found = cli("show", recorded, *arguments)
    assert (found.exit_code, found.out) == (2, "")
    assert found.err.startswith(f"recorder: {message}")
    assert found.err.count("\n") == 1


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ([], ""),
        ([1.0], "▁"),
        ([0.0, 1.0], "▁█"),
        ([0.0, None, 1.0], "▁ █"),
        ([math.nan, math.inf], "  "),
        ([-1e308, 1e308], "▁█"),
        ([1e-300, 1e300], "▁█"),
        ([1.0, 10.0, 100.0, 1e7], "▁▂▃█"),
        ([5e-324, 1e308], "▁█"),
    ],
)
def test_a_spark_line_takes_any_numbers(values: list[float | None], line: str) -> None:
    assert spark_line(values, [False] * len(values)) == line


def test_a_long_spark_line_keeps_the_peaks() -> None:
    values: list[float | None] = [0.0] * 1000
    values[777] = 1.0
    line = spark_line(values, [index == 100 for index in range(1000)], width=20)
    assert len(line) == 20
    assert (line[15], line[2]) == ("█", "!")


def test_rows_of_a_step_stand_as_they_were_observed(cli: Cli, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    for rank in (0, 1):
        rows = [make_row(0, [1.0], rank=rank, mode="train"), make_row(1, [2.0], rank=rank, mode="eval")]
        rows += [make_row(2, [3.0], rank=rank, mode="no_grad"), make_row(3, [4.0], rank=rank, step=1)]
        HandmadeWriter(run, rank).add_shard([rows[::-1]])
    lines = cli("show", run, "layers.0").out.splitlines()
    start = next(header for header, line in enumerate(lines) if line.startswith("step"))
    modes = [(line.split()[0], line.split()[1], line.split()[2]) for line in lines[start + 1 :]]
    expected = [("0", mode, rank) for mode in ("train", "eval", "no_grad") for rank in ("0", "1")]
    assert modes == [*expected, ("1", "train", "0"), ("1", "train", "1")]


def test_the_first_bad_value_is_the_first_that_was_observed(cli: Cli, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    writer = HandmadeWriter(run)
    rows = [make_row(0, [1.0], module_path="a", step=0), make_row(1, [np.inf], module_path="z", step=1, name="x")]
    rows += [make_row(2, [np.nan], module_path="a", step=1), make_row(3, [1.0], module_path="m", step=1)]
    writer.add_shard([rows[::-1]])
    found = cli("show", run, "--json").json
    assert [(module["module"], module["first_bad"]) for module in found["modules"]] == [("a", 1), ("z", 1), ("m", None)]
    assert (found["first_bad"]["module_path"], found["first_bad"]["step"]) == ("z", 1)
    lines = cli("show", run).out.splitlines()
    assert lines[1] == "first NaN or infinity: 'z' output x, step 1, rank 0"
    assert [line.split()[-1] for line in lines[3:]] == ["1", "1", "-"]


def test_the_first_bad_value_is_named_with_its_model_where_there_are_several(cli: Cli, tmp_path: Path) -> None:
    writer = HandmadeWriter(run := make_run(tmp_path / "run"))
    writer.add_shard([[make_row(0, [np.nan], module_path="up"), make_row(1, [1.0], module_path="up", root="model_1")]])
    writer.finish(roots=[{"name": name, "modules": [module("up", "Linear")]} for name in ("model", "model_1")])
    assert cli("show", run).out.splitlines()[1] == "first NaN or infinity: model: 'up' output, step 0, rank 0"


def test_a_chunk_is_shown_with_the_shape_of_the_whole(cli: Cli, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    writer = HandmadeWriter(run)
    writer.add_shard([[make_row(0, np.zeros((1, 2)), global_shape="[2,2]"), make_row(1, [0.0], site="param")]])
    source = "/v/lib/python3.11/site-packages/torch/nn/modules/linear.py:50"
    writer.finish(roots=[{"name": "model", "modules": [module("layers.0", "Linear", source=source)]}])
    lines = cli("show", run, "layers.0").out.splitlines()
    assert lines[0] == "run: 'layers.0', Linear"
    assert "[1,2] of [2,2]" in lines[3] and " of " not in lines[4]
    assert " -0 " not in "\n".join(lines)


@pytest.mark.parametrize("width", [80, 100, 120])
@pytest.mark.parametrize("arguments", [["show"], ["show", "layers.0", "--last", "2"], ["ls"], ["config"]])
def test_nothing_is_wrapped_or_cut_on_a_terminal(recorded: Path, width: int, arguments: list[str]) -> None:
    command, *rest = arguments
    paths = [] if command == "config" else [str(recorded)]
    lines = on_a_terminal(command, *paths, *rest, width=width, is_plain=True).splitlines()
    assert max(map(len, lines)) <= width
    assert not any("\u2026" in line for line in lines)
    if command == "config":
        assert any("steps=0:5,10:100:10,100::50" in line for line in lines)
    if rest:
        course = next(line.split()[-1] for line in lines if line.split()[:1] == ["output"])
        assert len(course) == 12
        step = next(line.split() for line in lines if line.split()[:2] == ["10", "0"])
        (row,) = layer_rows(recorded, step=10, rank=0)
        assert {f"{row['mean']:.4g}", f"{row['absmax']:.4g}"} <= set(step)
        assert "left out: nan (all 0), inf (all 0), zero (all 0)" in lines[-1] and "--json has all" in lines[-1]


def test_a_narrow_terminal_does_without_the_least_columns_and_says_which(recorded: Path) -> None:
    wide, narrow = (on_a_terminal("show", str(recorded), "layers.0", width=width, is_plain=True) for width in (160, 60))
    assert "dtype" in wide and "\u2500" in wide
    assert "left out: dtype" in narrow and "\u2500" not in narrow
    assert "(all 0), min" in " ".join(narrow.split())


def test_a_negative_zero_is_a_zero() -> None:
    assert (number(-0.0), number(-0.5), number(0)) == ("0", "-0.5", "0")


def test_the_absmax_of_a_module_is_of_values_and_not_of_indices(cli: Cli, tmp_path: Path) -> None:
    inside = '{"inner_of":{"kind":"sparse_coo","dtype":"float32","shape":[8,4]}}'
    names = (("weight.indices", [0.0, 7.0]), ("weight.values", [0.25, -0.5]))
    run = make_run(tmp_path / "run")
    writer = HandmadeWriter(run)
    writer.add_shard([[make_row(i, v, site="grad", name=name, note=inside) for i, (name, v) in enumerate(names)]])
    writer.finish()
    (module,) = cli("show", run, "--json").json["modules"]
    assert module["last_absmax"] == 0.5
    rows = cli("stats", run, "--by", "module", "--json").json["rows"]
    assert {row["inner"]: row["absmax"] for row in rows} == {"indices": 7.0, "values": 0.5}
    assert "inner" in cli("stats", run, "--by", "module").out
