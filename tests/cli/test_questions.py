"""`recorder first`, `stats`, `diff` and `export`: what they print, as text and as JSON, and their exit codes."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recorder import open_run
from recorder.analyze.diff.diff import diff
from recorder.analyze.diff.reply import accusations
from recorder.analyze.first.first import first, reply_of
from recorder.analyze.first.replicas import ApartByProbe
from recorder.columns import STATISTICS
from tests.analyze.diff import test_drift as drift
from tests.cli.test_hostile_text import NAMES, is_harmless
from tests.rigs.command_line import Cli, module, on_a_terminal
from tests.rigs.handmade import HandmadeWriter, Row, make_row, make_run


def cells(line: str) -> list[str]:
    return line.split()


def write(path: Path, *ranks: list[Row], **parallel: Any) -> Path:
    run = make_run(path, world_size=len(ranks))
    for rank, rows in enumerate(ranks):
        writer = HandmadeWriter(run, rank)
        writer.add_shard([rows])
        facts = {"kind": "ddp", "ranks": list(range(len(ranks)))} | parallel
        roots = [
            {"name": "model", "modules": [module("up", "Linear"), module("down", "Linear")], "data_parallel": facts}
        ]
        writer.finish(roots=roots, world_size=len(ranks))
    return run


def training(
    path: Path, nan_at: int = 99, weight_at: int = 99, bonus: float = 0.0, steps: Sequence[int] = range(4)
) -> Path:
    """Two ranks; rank 1 may yield a NaN, or drift away with a parameter."""
    ranks: list[list[Row]] = [[], []]
    for rank, rows in enumerate(ranks):
        for step in steps:
            for name in ("up", "down"):
                values = (
                    np.arange(6, dtype=np.float32).reshape(2, 3) + step + 10 * rank + (bonus if name == "down" else 0)
                )
                if (step, rank, name) == (nan_at, 1, "up"):
                    values[0, 1] = math.nan
                rows.append(make_row(len(rows), values, step=step, rank=rank, module_path=name))
            weight = np.full(3, 1 + (step >= weight_at) * rank, np.float32)
            common: dict[str, Any] = {"site": "param", "name": "weight", "phase": "optimizer", "micro_step": None}
            rows.append(make_row(len(rows), weight, step=step, rank=rank, module_path="up", **common))
    return write(path, *ranks)


def test_first_tells_what_where_and_when(cli: Cli, tmp_path: Path) -> None:
    found = cli("first", training(tmp_path / "run", nan_at=2))
    assert found.exit_code == 1
    head, titles, *lines = found.out.splitlines()
    assert head == "run: first NaN or infinity: step 2, 'up' output, rank 1"
    assert cells(titles) == ["what", "found"]
    facts = {line[:20].rstrip(): line[20:].strip() for line in lines if line.startswith(("module", "counts", "last"))}
    assert facts["module"] == "up, Linear train.py:7"
    assert facts["counts"] == "1 NaN, 0 infinite of 6 elements"
    assert facts["last healthy record"] == "step 1 (recorded healthy at 2 steps)"
    assert facts["last healthy value"].startswith("'up' param weight, step 1")


def test_first_tells_which_steps_before_the_first_nan_were_not_recorded(cli: Cli, tmp_path: Path) -> None:
    found = cli("first", training(tmp_path / "run", nan_at=9, steps=(0, 5, 9)))
    assert "step 5 (recorded healthy at 2 steps; no record of it at steps 6 to 8)" in found.out


def test_first_tells_which_ranks_differ(cli: Cli, tmp_path: Path) -> None:
    run = training(tmp_path / "run", weight_at=1)
    found = cli("first", run)
    assert found.exit_code == 1
    assert "run: first replica that differs: step 1, 'up' param weight, ranks 0 | 1" in found.out.splitlines()
    as_json = cli("first", run, "--json")
    assert as_json.exit_code == 1 and as_json.json["found"] is True
    replica = as_json.json["replica"]
    assert (replica["value"]["step"], replica["groups"], replica["last_equal"]["step"]) == (1, [[0], [1]], 0)
    assert as_json.json["nonfinite"] is None
    answer = first(open_run(run))
    probed = ApartByProbe(("model", "up", "grad", "weight"), 1, 0, (1,), True, "rank 1 has 2 times what rank 0 has")
    parts = reply_of(open_run(run), answer._replace(replica_probed=probed)).parts()
    titles = [part if isinstance(part, str) else str(getattr(part, "title", "")) for part in parts]
    assert titles[1:3] == [
        "run: first replica that differs: step 1, 'up' grad weight, rank 1 unlike the other ranks, by the probe "
        "(equal at step 0); rank 1 has 2 times what rank 0 has",
        "run: first replica that differs in the rows: step 1, 'up' param weight, ranks 0 | 1",
    ]


def test_replicas_that_differ_from_the_first_record_on_were_equal_in_none_before(cli: Cli, tmp_path: Path) -> None:
    found = cli("first", training(tmp_path / "run", weight_at=0))
    (line,) = [line for line in found.out.splitlines() if line.startswith("last equal")]
    assert line.endswith("no earlier record shows them equal")


def test_first_of_a_healthy_run(cli: Cli, tmp_path: Path) -> None:
    found = cli("first", training(tmp_path / "run"))
    assert found.exit_code == 0
    assert found.out.splitlines() == [
        "run: no NaN or infinity in 24 recorded values of steps 0 to 3",
        "run: no parameter differs between its replicas "
        "(4 values of steps 0 to 3 compared; gradients and optimizer states not recorded)",
    ]


@pytest.mark.parametrize(
    ("facts", "exit_code", "meaning"),
    [
        ({"broadcast_buffers": False}, 1, "in no later record are they equal: DDP has broadcast_buffers=False"),
        ({"broadcast_buffers": True}, 0, "no finding: the forward updates each rank's own, and DDP broadcasts"),
        ({"kind": "fsdp2"}, 0, "no finding: FSDP does not broadcast buffers, and keeps each rank's own buffers"),
        (
            {},
            0,
            "no finding: a forward may update each rank's own buffers, and it is unknown whether they are broadcast",
        ),
    ],
)
def test_first_says_what_buffers_that_differ_mean(
    cli: Cli, tmp_path: Path, facts: dict[str, Any], exit_code: int, meaning: str
) -> None:
    columns: dict[str, Any] = {"site": "buffer", "name": "mean", "module_path": "up", "step": 2}
    ranks = [[make_row(0, np.full(2, rank + 1.0), rank=rank, **columns)] for rank in range(2)]
    found = cli("first", write(tmp_path / "run", *ranks, **facts))
    assert found.exit_code == exit_code
    *_, head, why, line = found.out.splitlines()
    assert head == "run: 1 buffer of which ranks hold different values"
    assert why.startswith(f"  {meaning}")
    assert line == "  'up' buffer mean: first at step 2, ranks 0 | 1 (by statistics)"
    assert all(len(line) <= 120 for line in found.out.splitlines())


def test_first_tells_of_the_module_s_own_weight(cli: Cli, tmp_path: Path) -> None:
    bad = np.array([1, math.nan, math.inf], np.float32)
    param: dict[str, Any] = {"site": "param", "name": "weight", "phase": "optimizer", "micro_step": None}
    rows = [make_row(0, bad, step=3, module_path="up"), make_row(1, bad, step=3, module_path="up", **param)]
    found = cli("first", write(tmp_path / "run", rows))
    (line,) = [line for line in found.out.splitlines() if line.startswith("at the same step")]
    assert line.endswith(" its weight holds 1 NaN and 1 infinite")
    assert found.out.splitlines()[-1] == "run: replicas: not compared, because one rank has no replicas"


def test_stats_as_a_table(cli: Cli, tmp_path: Path) -> None:
    run = training(tmp_path / "run")
    found = cli("stats", run, "up", "--site", "output", "--step", "0:2")
    title, titles, *lines = found.out.splitlines()
    assert title == "run: statistics of each rank's own"
    names = ["step", "rank", "module", "site", "shape", "numel", "mean", "std", "min", "max", "absmax", "l2"]
    assert cells(titles) == [*names, "nan", "inf", "zero"]
    assert [cells(line)[:4] for line in lines] == [[str(s), str(r), "up", "output"] for s in (0, 1) for r in (0, 1)]
    assert cells(lines[0])[6:10] == ["2.5", "1.708", "0", "5"]


def test_stats_combined_over_ranks_and_steps(cli: Cli, tmp_path: Path) -> None:
    run = training(tmp_path / "run")
    found = cli("stats", run, "--by", "module,site", "--global", "--json")
    assert found.exit_code == 0
    lines = {(row["module_path"], row["site"]): row for row in found.json["rows"]}
    assert lines["up", "param"]["numel"] == 12 and lines["up", "param"]["rows"] == 4
    values = [np.arange(6) + step + 10 * rank for step in range(4) for rank in range(2)]
    assert lines["up", "output"]["std"] == pytest.approx(np.std(values))
    cut = cli("stats", run, "--last", "3").out.splitlines()
    assert cut[0].endswith("the last 3 of 24 rows (--last 0 shows all)") and len(cut) == 5


def test_diff_puts_the_first_module_on_top(cli: Cli, tmp_path: Path) -> None:
    a, b = training(tmp_path / "a"), training(tmp_path / "b", bonus=0.5)
    found = cli("diff", a, b, "--limit", "1")
    assert found.exit_code == 1
    lines = found.out.splitlines()
    apart = "by up to 0.5, 0.03226 of the largest magnitude"
    answer = [
        "different: 12 values compared: 8 equal exactly, 4 differ "
        "(compared by: fingerprint 0, values 12, statistics 0)",
        f"culprit: step 0, forward of 'down', ranks 0, 1: output differs {apart}",
        f"first difference: step 0, micro_step 0, 'down' output: values {apart}",
    ]
    assert [line.split(", started ")[0] for line in lines[:2]] == [f"A: {a}", f"B: {b}"]
    assert lines[2:5] == answer
    assert cli("diff", a, b, "--brief").out.splitlines() == lines[:5]
    del lines[2:4]
    assert lines[3] == "modules that differ (1), in the order in which they do"
    assert lines[4] == "of max: max abs relative to the largest magnitude in either tensor"
    titles = ["module", "first step", "first value", "differ", "compared", "max abs", "of max", "cosine", "nonfinite"]
    assert re.split("  +", lines[5]) == titles
    assert cells(lines[6])[:7] == ["down", "0", "output", "4", "4", "0.5", "0.03226"]
    assert lines[7].endswith("; the first 1 (--limit 0 shows all)")
    assert re.split("  +", lines[8])[-5:] == ["max abs", "of max", "cosine", "max rel", "max ulp"]
    assert cells(lines[9])[-1] == ">9999" and len(lines) == 10
    few = cli("diff", a, b).out.splitlines()
    assert few[7:-1] == lines[5:7]
    assert few[-1].startswith("4 values in all: --limit 20 lists the first of them")


@pytest.mark.parametrize(
    ("kept", "is_said"),
    [({"has_values": lambda step: False}, True), ({"sites": ("output", "param", "optim")}, False)],
    ids=["statistics", "values"],
)
def test_diff_says_what_would_tell_an_update_from_a_rounding(
    cli: Cli, tmp_path: Path, kept: dict[str, Any], is_said: bool
) -> None:
    for name, seed, sign in (("a", 0, 1.0), ("b", 2, -1.0), ("twin", 1, 1.0)):
        drift.training(tmp_path / name, seed, sign, **kept)
    found = cli("diff", tmp_path / "a", tmp_path / "b", "--noise", tmp_path / "twin")
    assert found.exit_code == 1 and "culprit: step 0, update of 'add'" in found.out
    assert ("two or three more twins (--noise again)" in found.out) == is_said


def test_diff_within_a_tolerance(cli: Cli, tmp_path: Path) -> None:
    a, b = training(tmp_path / "a"), training(tmp_path / "b", bonus=0.5)
    found = cli("diff", a, b, "--atol", "0.5")
    assert found.exit_code == 0 and found.out.splitlines()[-1].startswith("equal: 12 values compared: 12 equal within")
    assert "12 equal within atol 0.5" in found.out
    assert cli("diff", a, b, "--rtol", "0.01").exit_code == 1
    assert cli("diff", a, b, "--module", "up").exit_code == 0


def test_diff_of_statistics_says_which_and_by_what(cli: Cli, tmp_path: Path) -> None:
    runs = []
    for n in range(2):
        rows = [make_row(0, [0.0, 4.0 + 1e-6 * n], encoding=None, module_path="up")]
        rows.append(make_row(1, [1.0, 2.0 + n], module_path="down"))
        runs.append(write(tmp_path / str(n), rows))
    lines = cli("diff", *runs, "--limit", "9").out.splitlines()
    assert lines.pop(2).startswith("different: 2 values compared")
    how = "statistics, without values to compare: max 4 | 4.000001, 2.5e-07 apart"
    assert lines.pop(2) == "culprit: step 0, forward of 'up': output differs: max 4 in A, 4.000001 in B"
    assert lines[2] == f"first difference: step 0, micro_step 0, 'up' output: {how}"
    assert "stats apart: if only statistics were recorded" in lines[4]
    assert lines[5].index("of max") < lines[5].index("stats apart")
    assert [cells(line)[0:2] + cells(line)[5:8] for line in lines[6:8]] == [
        ["up", "0", "-", "-", "2.5e-07"],
        ["down", "0", "1", "0.3333", "-"],
    ]
    assert cells(lines[10])[:2] == ["0", "up"] and "max 4 | 4.000001, 2.5e-07 apart" in lines[10]
    assert cells(lines[11])[:2] == ["0", "down"] and "apart" not in lines[11]
    narrow = on_a_terminal("diff", *map(str, runs), "--module", "up", "--limit", "9", width=90, is_plain=True)
    assert "max 4 | 4.000001" in narrow.partition("values that differ")[2] and "of max (all -)" in narrow
    far = cli("diff", *runs, "--module", "down").out
    assert "statistics" not in far.splitlines()[6] and "stats apart" not in far


def test_diff_says_counts_as_whole_numbers_and_that_one_culprit_may_follow_from_another(
    cli: Cli, tmp_path: Path
) -> None:
    runs = []
    for n in range(2):
        values = [float("nan") if n else 1.0] * 16384
        runs.append(write(tmp_path / str(n), [make_row(0, values, encoding=None, module_path="up")]))
    lines = cli("diff", *runs).out.splitlines()
    (culprit,) = [line for line in lines if line.startswith("culprit: ")]
    assert culprit.endswith("differs: nan 0 in A, 16384 in B")
    assert not any("several culprits" in line for line in lines)
    culprits = diff(open_run(runs[0]), open_run(runs[1])).culprits
    assert list(accusations([*culprits, *culprits], 0)) == [
        culprit,
        culprit,
        "note: of several culprits only the first is certain; the others may follow from it",
    ]
    (one,) = culprits
    later = one._replace(step=1, phase="start", module_path=None, num_params=40, site="param", name="weight")
    assert list(accusations([one, later], 0))[1] == (
        "may follow: step 1, before the step: 40 parameters, e.g. param weight of 'up' differs: nan 0 in A, 16384 in B"
    )
    rate, update = (culprits[0]._replace(phase="update", module_path=path) for path in (None, "up"))
    of_rate, follows = accusations([rate, update], 0)
    assert "alike" in of_rate and follows == "  the update of 'up' differs, too, which may be a consequence"


def test_diff_names_the_model_of_a_process_with_several(cli: Cli, tmp_path: Path) -> None:
    runs = [write(tmp_path / str(n), [make_row(0, [1.0 + n], root="model_1", module_path="up")]) for n in range(2)]
    lines = cli("diff", *runs, "--brief").out.splitlines()
    assert lines[-2].startswith("culprit: step 0, model_1: forward of 'up': output ")
    assert lines[-1].startswith("first difference: step 0, micro_step 0, model_1: 'up' output: ")


def test_diff_names_the_first_model_too_where_there_are_several(cli: Cli, tmp_path: Path) -> None:
    runs = []
    for n in range(2):
        writer = HandmadeWriter(make_run(tmp_path / str(n)))
        writer.add_shard([
            [make_row(seq, [1.0 + n], root=root, module_path="up") for seq, root in enumerate(("model", "model_1"))]
            + [make_row(2, [1.0], root="model", module_path="down", site=("output", "input")[n])]
        ])  # fmt: skip
        facts = {"evaluated": 3} if n else {}
        writer.finish(
            roots=[{"name": name, "modules": [module("up", "Linear", **facts)]} for name in ("model", "model_1")]
        )
        runs.append(tmp_path / str(n))
    lines = cli("diff", *runs, "--limit", "9").out.splitlines()
    assert any(line.endswith(" while the model is trained (model: 'up', model_1: 'up')") for line in lines)
    assert any(line.startswith("culprit: step 0, model: forward of 'up': ") for line in lines)
    assert any(line.startswith("first difference: step 0, micro_step 0, model: 'up' output: ") for line in lines)
    assert [line.split()[1:3] for line in lines if line.split()[0] == "0"] == [["model:", "up"], ["model_1:", "up"]]
    only_b = lines[next(n for n, line in enumerate(lines) if line.startswith("only in B")) + 2]
    assert cells(only_b) == ["model", "down", "input", "1", "0"]


def test_diff_of_a_run_that_lacks_a_rank_says_so(cli: Cli, tmp_path: Path) -> None:
    a, b = training(tmp_path / "a"), training(tmp_path / "b")
    (b / "rank=00001").rename(tmp_path / "lost")
    found = cli("diff", a, b)
    lines = found.out.splitlines()
    assert found.exit_code == 1
    assert lines[3] == "first difference: step 0, micro_step 0, 'up' output: B lacks rank 1"
    assert lines[4] == "B lacks rank 1 in 8 values"
    assert cli("diff", a, b, "--json").json["partial"] == [{"run": "b", "ranks": [1], "num_values": 8}]


@pytest.mark.parametrize(
    ("command", "needs_global"), [("diff RUN COPY", False), ("stats RUN", True), ("export RUN -o OUT", True)]
)
def test_a_loss_and_a_layout_reach_the_view(cli: Cli, tmp_path: Path, command: str, needs_global: bool) -> None:
    typed_paths = {name: training(tmp_path / name) for name in ("RUN", "COPY")} | {"OUT": tmp_path / "out.parquet"}
    typed = [typed_paths.get(word, word) for word in command.split()]
    for options in (("--loss", "median"), ("--layout", "up"), ("--layout", "spread")):
        found = cli(*typed, *options, *["--global"] * needs_global)
        assert (found.exit_code, found.out, found.err.count("\n")) == (2, "", 1)
        assert options[1] in found.err
    if needs_global:
        assert "add --global" in cli(*typed, "--loss", "sum").err
    found = cli(*typed, "--layout", "up:output:*=per_rank", *["--global"] * needs_global, "--json")
    assert found.exit_code == 0
    if command.startswith("stats"):
        rows = [row for row in found.json["rows"] if row["site"] == "output"]
        assert [row["rank"] for row in rows if row["module_path"] == "up"] == [0, 1] * 4
        assert [row["rank"] for row in rows if row["module_path"] == "down"] == [None] * 4
    else:
        assert found.json["num_compared" if command.startswith("diff") else "rows"] == 16


def test_diff_as_json(cli: Cli, tmp_path: Path) -> None:
    a, b = training(tmp_path / "a"), training(tmp_path / "b", nan_at=1)
    found = cli("diff", a, b, "--json")
    assert found.exit_code == 1 and found.json["is_equal"] is False
    assert (found.json["first"]["step"], found.json["first"]["module_path"]) == (1, "up")
    assert (found.json["num_differing"], found.json["differing"][0]["nonfinite_b"]) == (1, 1)
    assert found.json["modules"][0]["module_path"] == "up"


def test_diff_groups_what_one_side_lacks(cli: Cli, tmp_path: Path) -> None:
    b = write(tmp_path / "b", [make_row(i, np.ones(2), step=i, module_path="up") for i in range(2)])
    c = write(
        tmp_path / "c", [make_row(i, np.ones(2), step=i // 2, module_path=("up", "act")[i % 2]) for i in range(6)]
    )
    found = cli("diff", b, c)
    assert found.exit_code == 1
    lines = found.out.splitlines()
    assert "only in B, at steps that both have" in lines
    assert cells(lines[lines.index("only in B, at steps that both have") + 2]) == ["act", "output", "2", "0..1"]
    assert "steps only in B: 2 (not compared; no difference by itself)" in lines
    assert lines[2].startswith(
        "equal where both runs have it; 2 in B alone: 2 values compared: 2 equal exactly, 0 differ ("
    )
    assert lines[3].startswith("one run lacks values that the other run has, so the exit code is 1; --common")
    assert cli("diff", b, c, "--brief").out.splitlines() == [*lines[:4], lines[-1]]
    common = cli("diff", b, c, "--common", "--brief")
    left_aside = ["note: 2 values that only one run has do not count (--common)", lines[-1]]
    assert common.exit_code == 0 and common.out.splitlines()[3:] == left_aside


def test_diff_of_runs_without_a_common_module_does_not_call_them_equal(cli: Cli, tmp_path: Path) -> None:
    runs = []
    for path in ("mlp", "gru"):
        rate = make_row(1, np.ones(()), module_path="", site="scalar", name="lr.AdamW.0")
        runs.append(write(tmp_path / path, [make_row(0, np.ones(2), module_path=path), rate]))
    found = cli("diff", *runs, "--common", "--brief")
    assert found.exit_code == 1
    answer, why, *_ = found.out.splitlines()[2:]
    assert (
        answer.startswith("equal as far as compared: 1 value compared: 1 equal")
        and "no module has a record in both runs" in why
    )


def test_diff_of_a_folder_with_one_run_asks_for_a_second(cli: Cli, tmp_path: Path) -> None:
    write(tmp_path / "runs" / "a", [make_row(0, np.ones(2))])
    found = cli("diff", tmp_path / "runs")
    assert found.exit_code == 2 and "holds 1 run; name a second run, or a folder with two" in found.err


def test_diff_says_by_what_values_were_compared_and_the_numbers_add_up(cli: Cli, tmp_path: Path) -> None:
    runs = []
    for number in (1, 2):
        values = np.full(3, float(number))
        rows = [
            make_row(0, np.ones(2), module_path="same") | {"fingerprint": "1" * 32},
            make_row(1, values, module_path="values"),
            make_row(2, values, module_path="statistics", encoding=None),
            make_row(3, np.ones(number), module_path="shape"),
            make_row(4, np.ones(2, np.int64), module_path="print", encoding=None) | {"fingerprint": f"{number}" * 32},
        ]
        runs.append(write(tmp_path / f"{number}", rows))
    ways = "(compared by: fingerprint 2, values 1, statistics 1, shape 1)"
    line = cli("diff", *runs, "--brief").out.splitlines()[2]
    assert line == f"different: 5 values compared: 1 equal exactly, 4 differ {ways}"


def test_diff_proposes_lines_for_modules_that_may_be_renamed(cli: Cli, tmp_path: Path) -> None:
    runs = []
    for name in ("up", "ff"):
        paths = ["", f"{name}.0", f"{name}.1"]
        rows = [make_row(i, np.ones(i + 1), module_path=path) for i, path in enumerate(paths)]
        runs.append(write(tmp_path / name, rows))
    found = cli("diff", *runs)
    assert found.exit_code == 1
    at = found.out.splitlines().index("  up = ff")
    assert found.out.splitlines()[at - 1] == (
        "hint: 2 modules that only A has, and as many of B, have tensors of the same shapes; "
        "if the modules are the same, --rename FILE pairs them, with these lines"
    )
    as_json = cli("diff", *runs, "--json").json
    assert as_json["hints"] == [{"old": "up", "new": "ff", "num_modules": 2, "num_same": 0}]
    (tmp_path / "names.txt").write_text("up = ff\n")
    assert cli("diff", *runs, "--rename", tmp_path / "names.txt").exit_code == 0


def test_diff_of_runs_with_nothing_in_common(cli: Cli, tmp_path: Path) -> None:
    a, b = (write(tmp_path / name, [make_row(0, [1.0], step=step)]) for name, step in (("a", 3), ("b", 8)))
    found = cli("diff", a, b)
    assert found.exit_code == 2 and found.out == ""
    assert found.err == f"recorder: {a} and {b} have no value in common: steps are 3 in one run, 8 in the other\n"


@pytest.mark.parametrize("suffix", ["parquet", "npz", "safetensors"])
def test_export_says_what_it_wrote(cli: Cli, tmp_path: Path, suffix: str) -> None:
    run, out = training(tmp_path / "run"), tmp_path / f"out.{suffix}"
    found = cli("export", run, "-o", out, "--site", "param", "--global")
    what = "4 rows" if suffix == "parquet" else "4 tensors"
    assert found.exit_code == 0 and found.out.startswith(f"{out}: {what}, ")
    assert found.err == ""
    again = cli("export", run, "-o", out)
    assert again.exit_code == 2 and "exists; choose another name, or --force" in again.err
    forced = cli("export", run, "-o", out, "--force", "--json")
    facts = {"path": str(out), "format": suffix, "rows": 24, "bytes": out.stat().st_size}
    assert forced.json == facts | {"problems": [], "notes": []}


def test_stats_and_export_tell_of_missing_ranks(cli: Cli, tmp_path: Path) -> None:
    x = np.ones((2, 3), np.float32)
    run = write(tmp_path / "run", *([make_row(n, x, step=n, rank=rank) for n in range(2 - rank)] for rank in (0, 1)))
    note = "partial: 1 of 2 values lack rank 1, step 1: they are left out; --partial takes what there is"
    taken = "partial: 1 of 2 values lack rank 1, step 1: they are of the other ranks alone"
    stats = cli("stats", run, "--global")
    assert (stats.exit_code, stats.out.splitlines()[-1]) == (1, f"note: {note}")
    stats = cli("stats", run, "--global", "--json", "--partial")
    assert (stats.exit_code, stats.json["notes"]) == (1, [taken])
    own = cli("stats", run)
    assert (own.exit_code, own.out.count("note")) == (0, 0)
    export = cli("export", run, "-o", tmp_path / "out.npz", "--global")
    assert (export.exit_code, export.err) == (1, f"note: {note}\n")
    export = cli("export", run, "-o", tmp_path / "out.parquet", "--global", "--json", "--partial")
    assert (export.exit_code, export.json["notes"], export.err) == (1, [taken], "")


def test_stats_and_export_of_a_shard_that_was_cut_say_so_once_and_exit_with_1(cli: Cli, tmp_path: Path) -> None:
    x = np.ones((2, 3), np.float32)
    run = write(tmp_path / "run", *([make_row(n, x, step=n, rank=rank) for n in range(4)] for rank in (0, 1)))
    (shard,) = run.glob("rank=00001/*/tensors-*.arrow")
    os.truncate(shard, shard.stat().st_size // 2)
    out = tmp_path / "out.npz"
    for arguments in (["stats"], ["stats", "--global"], ["export", "-o", out], ["export", "-o", out, "--global"]):
        done = cli(arguments[0], run, *arguments[1:])
        warnings = [line for line in done.err.splitlines() if "warning" in line]
        assert len(warnings) == 1 and "has no footer, so it was cut or never sealed" in warnings[0]
        assert done.exit_code == (2 if "--global" in arguments and "export" in arguments else 1)
        out.unlink(missing_ok=True)
    assert cli("export", run, "-o", out, "--global", "--partial").exit_code == 1


def test_first_of_a_run_that_is_damaged_is_no_clean_bill(cli: Cli, tmp_path: Path) -> None:
    run = write(tmp_path / "run", [make_row(0, [1.0])], [make_row(0, [1.0], rank=1)])
    assert cli("first", run).exit_code == 0
    (shard,) = run.glob("rank=00001/*/tensors-*.arrow")
    os.truncate(shard, shard.stat().st_size // 2)
    done = cli("first", run)
    assert done.exit_code == 1 and "note: the run is damaged, and what cannot be read was not looked at" in done.out
    found = cli("first", run, "--json")
    assert found.exit_code == 1 and len(found.json["problems"]) == 1


def test_export_stays_out_of_the_run(cli: Cli, tmp_path: Path) -> None:
    run = write(tmp_path / "run", [make_row(0, [1.0])])
    inside = cli("export", run, "-o", run / "out.npz")
    assert inside.exit_code == 2 and "lies inside the run" in inside.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["stats", "RUN", "upp"], "module_path='upp'; nearest is 'up'"),
        (["stats", "RUN", "--by", "colour"], "by 'colour': choose of step, module"),
        (["export", "RUN", "-o", "out.csv"], "the name does not say which format"),
        (["export", "RUN", "-o", "out.npz", "--step", "77"], "step='77'; there are steps 0 to 3"),
        (["diff", "RUN", "COPY", "--site", "weights"], "no site 'weights'"),
        (["first", "nowhere"], "no such directory"),
    ],
)
def test_misuse_is_one_line_and_exit_code_2(cli: Cli, tmp_path: Path, arguments: list[str], message: str) -> None:
    paths = {"RUN": str(training(tmp_path / "run")), "COPY": str(training(tmp_path / "copy"))}
    found = cli(*(paths.get(argument, argument) for argument in arguments))
    assert found.exit_code == 2 and found.out == ""
    assert message in found.err and found.err.count("\n") == 1


def test_help_says_what_columns_and_tolerances_mean(cli: Cli) -> None:
    text = " ".join(cli("diff", "--help").out.split())
    assert (
        "relative to the larger of |a| and |b|" in text and "of max is that difference relative to the largest" in text
    )
    assert "--rtol 1e-4 --atol 1e-6" in text
    assert "the column without counts those of them that have no statistics" in " ".join(
        cli("stats", "--help").out.split()
    )


def test_a_terminal_gets_tables_with_lines(tmp_path: Path) -> None:
    a, b = training(tmp_path / "a", nan_at=2), training(tmp_path / "b", bonus=0.5)
    text = on_a_terminal("diff", str(a), str(b), is_plain=True)
    assert "first difference: step 0" in text and "──" in text
    narrow = on_a_terminal("first", str(a), is_plain=True, width=60)
    assert "first NaN or infinity: step 2" in narrow and all(len(line) <= 130 for line in narrow.splitlines())


@pytest.fixture
def hostile(tmp_path: Path) -> tuple[Path, Path]:
    names = [name for name in NAMES if name != "\ud800"]
    runs = []
    for number, label in enumerate("ab"):
        ranks: list[list[Row]] = [[], []]
        for rank, rows in enumerate(ranks):
            for i, name in enumerate(names):
                texts = {"module_path": name, "name": name, "root": name}
                values = np.array([math.nan, i + rank + number])
                rows.append(make_row(i, values, rank=rank, site="grad", **texts))
                rows.append(make_row(100 + i, values, rank=rank, site="buffer", **texts))
            rows.append(make_row(900 + number, [1.0], rank=rank, module_path=f"\x1b[2J{label}"))
        run = write(tmp_path / label, *ranks)
        runs.append(run)
    return runs[0], runs[1]


@pytest.mark.parametrize("command", ["first", "stats", "stats --global --by step", "diff"])
def test_names_of_strangers_are_harmless(cli: Cli, hostile: tuple[Path, Path], command: str) -> None:
    a, b = hostile
    word, *options = command.split()
    paths = [a, b] if word == "diff" else [a]
    found = cli(word, *paths, *options)
    assert is_harmless(found.out) and is_harmless(found.err) and found.out
    as_json = cli(word, *paths, *options, "--json")
    assert as_json.out.isascii() and is_harmless(as_json.out) and as_json.json


def test_stats_keep_the_column_of_modules_where_only_the_root_is_left(cli: Cli, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    writer = HandmadeWriter(run)
    writer.add_shard([[make_row(i, [float(i)], module_path=path) for i, path in enumerate(["m", "", ""])]])
    writer.finish()
    _, titles, *lines = cli("stats", run, "--sort", "-absmax", "--top", "2").out.splitlines()
    assert "module" in titles.split() and all("''" in line.split() for line in lines)
    assert "module" in cli("stats", run, "''", "--by", "module").out.splitlines()[1].split()


def test_stats_are_sorted_by_any_column_and_cut_from_the_top(cli: Cli, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    writer = HandmadeWriter(run)
    values = [[3.0], [-5.0, np.nan], [1.0, 0.0], [4.0]]
    rows = [make_row(i, value, step=i, module_path=f"m{i}") for i, value in enumerate(values)]
    rows[3] |= dict.fromkeys(STATISTICS)
    writer.add_shard([rows])
    writer.finish()

    def steps(*options: str) -> list[int]:
        return [row["step"] for row in cli("stats", run, *options, "--json").json["rows"]]

    assert steps("--sort", "absmax") == steps("--sort", "absmax:asc") == [2, 0, 1, 3], "what has none stands last"
    assert steps("--sort", "-absmax") == steps("--sort", "absmax:desc") == steps("--sort=-absmax") == [1, 0, 2, 3]
    assert steps("--sort", "-nan")[0] == 1 and steps("--sort", "zero_count:desc")[0] == 2
    assert steps("--sort", "-module") == [3, 2, 1, 0]
    assert steps("--sort", "-absmax", "--top", "2") == [1, 0] and steps("--top", "1") == [0]
    assert steps("--by", "step", "--sort", "-l2", "--top", "1") == [1]

    lines = cli("stats", run, "--sort", "-sum", "--top", "2").out.splitlines()
    assert lines[0].endswith(", the first 2 of 4 rows (--top 0 shows all)") and "sum" in lines[1].split()
    assert [line.split()[0] for line in lines[2:]] == ["0", "2"]
    for typed, why in (
        (["--sort", "l22"], "no column 'l22'; nearest is 'l2'"),
        (["--sort", "l2:up"], "expected COLUMN, COLUMN:asc"),
        (["--top", "1", "--last", "1"], "--last: not with --top"),
    ):
        found = cli("stats", run, *typed)
        assert (found.exit_code, found.out) == (2, "") and why in found.err


def test_show_draws_and_lists_the_statistic_that_is_asked_for(cli: Cli, recorded: Path) -> None:
    rows = open_run(recorded).table(["module_path", "site", "step", "rank", "l2", "min"]).to_pylist()
    last = [row for row in rows if (row["module_path"], row["site"], row["step"]) == ("layers.0", "output", 11)]
    lines = cli("show", recorded, "layers.0", "--statistic", "l2", "--rank", "0").out.splitlines()
    assert lines[1].startswith("trend: l2 over steps") and "last l2" in " ".join(lines[2].split())
    assert f"{last[0]['l2']:.4g}" in lines[3].split()
    titles = lines[6].split()
    assert "l2" in titles and "absmax" not in titles and lines[-1].split()[titles.index("l2")] == f"{last[0]['l2']:.4g}"
    assert cli("show", recorded, "layers.0", "--rank", "0").out != "\n".join(lines) + "\n"
    for statistic, most in (("l2", max), ("min", min)):
        (found,) = cli("show", recorded, "layers.*", "--statistic", statistic, "--json").json["series"][:1]
        assert found["rows"][0][statistic] is not None
        modules = {
            one["module"]: one for one in cli("show", recorded, "--statistic", statistic, "--json").json["modules"]
        }
        assert modules["layers.0"][f"last_{statistic}"] == most(row[statistic] for row in last)
    wrong = cli("show", recorded, "--statistic", "l3")
    assert wrong.exit_code == 2 and "choose of mean, std, " in wrong.err and "nearest" in wrong.err
