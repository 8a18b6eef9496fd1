"""One dialect for names, wherever they are chosen: rules, the judgement of rules, commands."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from recorder.analyze.doctor.slots import Slots, match_rule
from recorder.errors import LookupFailedError
from recorder.format.manifest import WriterManifest
from recorder.globalview.planner import parse_overrides
from recorder.rules import choose, nearest, parse_patterns, parse_rules
from recorder.run.run import open_run
from recorder.run.selection import Selection
from tests.rigs.command_line import Cli, module
from tests.rigs.handmade import HandmadeWriter, make_row, make_run

PATHS = ["", "layers.0", "layers.0.mlp", "layers.1", "layers.1.mlp", "head", "odd[0]", "odd0"]
DIALECT = [
    ("layers.*", ["layers.0", "layers.0.mlp", "layers.1", "layers.1.mlp"]),
    ("layers.0", ["layers.0"]),
    ("*.mlp,head", ["layers.0.mlp", "layers.1.mlp", "head"]),
    ("layers.*,!*.mlp", ["layers.0", "layers.1"]),
    ("!layers.*,!odd*", ["", "head"]),
    (r"re:layers\.\d", ["layers.0", "layers.1"]),
    (r"re:[a-z.]{4,4}", ["head"]),
    (r"layers.*,!re:.*\.(0|1)", ["layers.0.mlp", "layers.1.mlp"]),
    ("''", [""]),
    ("", [""]),
    ("'',head", ["", "head"]),
    ("odd[01]", ["odd0"]),
    ("*", PATHS),
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = make_run(tmp_path_factory.mktemp("dialect") / "run")
    writer = HandmadeWriter(run)
    writer.add_shard([[make_row(i, [1.0], module_path=path) for i, path in enumerate(PATHS)]])
    writer.finish()
    return run


@pytest.mark.parametrize(("text", "expected"), DIALECT)
def test_rules_their_judgement_and_the_reading_side_mean_the_same(run: Path, text: str, expected: list[str]) -> None:
    assert choose(parse_patterns(text), PATHS) == expected
    (rule,) = parse_rules({"module": text})
    assert [path for path in PATHS if rule.matches_module(path, "Linear", True)] == expected
    roots = [{"name": "model", "modules": [module(path, "Linear") for path in PATHS]}]
    slots = Slots([WriterManifest.read({"roots": roots})])
    judged = match_rule(slots, rule)
    assert judged is not None and [PATHS[i] for i in np.unique(slots.module[judged.slots])] == expected
    assert Selection(module=text).chosen("module_path", PATHS) == expected
    rows = Selection(module=text).narrow(open_run(run).table(["module_path"])).column("module_path").to_pylist()
    assert rows == expected


@pytest.mark.parametrize(("text", "expected"), DIALECT)
def test_commands_mean_the_same(cli: Cli, run: Path, tmp_path: Path, text: str, expected: list[str]) -> None:
    shown = cli("show", run, text, "--json").json
    assert ([shown["module"]] if "module" in shown else [one["module"] for one in shown["modules"]]) == expected
    assert [row["module_path"] for row in cli("stats", run, text, "--json").json["rows"]] == expected
    diff = cli("diff", run, shutil.copytree(run, tmp_path / "copy"), "--module", text)
    assert f"{len(expected)} value{'s' * (len(expected) > 1)} compared" in diff.out
    out = tmp_path / "out.parquet"
    assert cli("export", run, "-o", out, "--module", text, "--json").json["rows"] == len(expected)


def test_layouts_are_written_in_it(cli: Cli, run: Path) -> None:
    assert parse_overrides(["layers.*,!layers.0=per_rank"]) == [(("layers.*:*", "!layers.0:*"), "per_rank")]
    assert cli("stats", run, "--global", "--layout", r"re:layers\.\d:output:=replicate").exit_code == 0
    found = cli("stats", run, "--global", "--layout", "layer.0=replicate")
    assert found.exit_code == 2 and "'layers.0:output:'" in found.err.partition("nearest ")[2]


@pytest.mark.parametrize(
    "command", ["show RUN {}", "stats RUN {}", "export RUN -o X.npz --module {}", "diff RUN COPY --module {}"]
)
def test_what_matches_nothing_and_what_is_no_expression_are_said_alike(
    cli: Cli, run: Path, tmp_path: Path, command: str
) -> None:
    copy = shutil.copytree(run, tmp_path / "copy")
    typed = command.replace("RUN", str(run)).replace("COPY", str(copy)).split()
    found = cli(*(word.format("layer.0.mlp") for word in typed))
    assert found.exit_code == 2 and "'layers.0.mlp'" in found.err.partition("nearest ")[2]
    wrong = cli(*(word.format("re:(") for word in typed))
    assert wrong.exit_code == 2 and "'re:(' is not a regular expression: missing )" in wrong.err


def test_the_nearest_names_are_those_with_the_same_end_or_alike() -> None:
    assert nearest("mlp", PATHS) == ["layers.0.mlp", "layers.1.mlp"]
    assert nearest("haed", PATHS) == ["head"]
    assert nearest("zzzzz", PATHS) == []


def test_several_modules_are_a_summary_and_are_not_drawn(cli: Cli, run: Path) -> None:
    lines = cli("show", run, "layers.*,!*.mlp").out.splitlines()
    assert lines[0].startswith("run: 2 modules") and [line.split()[0] for line in lines[2:]] == ["layers.0", "layers.1"]
    found = cli("show", run, "layers.*", "--where")
    assert found.exit_code == 2 and "'layers.*' means several: 'layers.0', 'layers.1', 'layers.0.mlp'" in found.err


def test_a_pattern_that_is_no_expression_is_no_rule() -> None:
    with pytest.raises(LookupFailedError, match="not a regular expression"):
        Selection(name="re:[").check()


def test_a_name_that_is_there_means_itself_whatever_it_means_as_a_glob(cli: Cli, run: Path) -> None:
    assert cli("show", run, "odd[0]", "--json").json["module"] == "odd[0]"
    assert [row["module_path"] for row in cli("stats", run, "odd[0]", "--json").json["rows"]] == ["odd[0]"]
    (rule,) = parse_rules("module=odd[0]")
    assert rule.matches_module("odd[0]", "Linear", True), "a rule does not know what there is, and takes both"
