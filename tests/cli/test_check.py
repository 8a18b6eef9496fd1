"""``recorder check``: sentences, JSON, exit codes and refusals."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from recorder.analyze.check.check import joined, sentence, told_of
from recorder.checks.causes import words_of
from recorder.checks.rule import Finding, Severity
from tests.rigs.command_line import Cli, module
from tests.rigs.handmade import HandmadeWriter, Row, make_row, make_run


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """Two ranks, eight steps; the outputs of three layers of four are dead, and nothing is worse than that."""
    run = make_run(tmp_path / "recordings" / "run-a")
    for rank in (0, 1):
        writer = HandmadeWriter(run, rank)
        rows: list[Row] = []
        for step in range(8):
            for number in range(4):
                values = np.random.default_rng((rank, step, number)).normal(size=8).astype(np.float32)
                path = f"blocks.{number}.act"
                values = values if number == 3 else values * 0
                rows.append(make_row(len(rows), values, encoding=None, rank=rank, step=step, module_path=path))
        writer.add_shard([rows])
        modules = [module("", "Net"), *(module(f"blocks.{number}.act", "ReLU") for number in range(4))]
        writer.finish(roots=[{"name": "model", "class": "Net", "modules": modules}])
    return run


def test_what_many_modules_have_is_one_sentence_with_the_number_and_a_command(cli: Cli, trained: Path) -> None:
    found = cli("check", trained)
    first, second, *_ = found.out.splitlines()
    assert first == (
        "warning dead: 'blocks.{0..2}.act' output, since step 0, ranks 0,1: the output is zero in nearly all elements "
        "(100 % of them)"
    )
    assert second.endswith(f"recorder stats {trained} blocks.0.act --site output --step 0:6")
    assert found.exit_code == 0, "a warning is no error"
    shown = cli(*second.partition("recorder ")[2].split())
    assert shown.exit_code == 0 and "blocks.0.act" in shown.out


def test_each_name_in_a_sentence_holds_of_each_of_its_modules() -> None:
    def finding(path: str, name: str) -> Finding:
        where = {"root": "model", "module_path": path, "site": "grad", "name": name, "ranks": (0,)}
        said = {"what": "w", "measure": "m", "value": 1.0, "threshold": 2.0, "advice": "a"}
        return Finding(rule="no_gradient", severity=Severity.WARNING, step=3, **where, **said)  # type: ignore[arg-type]

    pairs = [("up", "weight"), ("up", "bias"), ("down", "weight"), ("out", "weight")]
    folded = joined([finding(*pair) for pair in pairs])
    assert [(one.paths, one.names) for one in folded] == [
        (["up"], ["weight", "bias"]),
        (["down", "out"], ["weight"]),
    ]


def test_what_is_said_of_several_names_is_one_finding_with_the_others_below_it() -> None:
    def finding(path: str, name: str, severity: Severity, what: str = "w", cause: str = "") -> Finding:
        where = {"root": "model", "module_path": path, "site": "param", "name": name, "ranks": (0,)}
        said = {"what": what, "measure": "m", "value": 1.0, "threshold": 2.0, "advice": "a", "cause": cause}
        return Finding(rule="unchanged", severity=severity, step=3, **where, **said)  # type: ignore[arg-type]

    raised, warned = finding("up", "weight", Severity.ERROR), finding("", "bias", Severity.WARNING)
    noted = finding("out", "weight", Severity.NOTE, "another reason")
    follower = finding("down", "weight", Severity.NOTE, cause=words_of(warned))
    ((first, under),) = told_of([raised, warned, noted, follower])
    assert first.paths == ["up"] and [one.paths for one in under] == [[""], ["out"], ["down"]]
    assert sentence(under[0]).startswith("unchanged: (the model) param bias, step 3, rank 0: w (")
    assert len(list(told_of([raised, noted._replace(rule="update")]))) == 2
    ((first, _),) = told_of([warned], has_models=True)
    assert sentence(first).startswith("unchanged: model: (the model) param bias, step 3, rank 0: w (")


@pytest.mark.parametrize(("fail_on", "code"), [("note", 1), ("warning", 1), ("error", 0), ("never", 0)])
def test_the_exit_code_is_1_from_a_severity_on(cli: Cli, trained: Path, fail_on: str, code: int) -> None:
    assert cli("check", trained, "--fail-on", fail_on).exit_code == code


def test_an_error_is_exit_code_1(cli: Cli, recorded: Path) -> None:
    found = cli("check", recorded)
    assert found.exit_code == 1 and found.out.startswith("error   nonfinite: 'layers.0' output, step 9, rank 1:")


def test_what_is_not_judged_is_one_line_unless_it_is_asked_for(cli: Cli, trained: Path) -> None:
    unjudged = cli("check", trained, "--json").json["not_judged"]
    lines = [
        line
        for line in cli("check", trained).out.splitlines()
        if " more rules lack something that they judge by: " in line
    ]
    assert len(unjudged) > 5 and len(lines) == 1
    assert lines[0].startswith(f"{len(unjudged)} more rules lack something that they judge by: ")
    assert " rules), " in lines[0] and lines[0].endswith("; --verbose names each")
    told = cli("check", trained, "--verbose").out
    assert all(one["rule"] in told and one["why"] in told for one in unjudged)
    assert "not judged: width: needs --width RUN" in cli("check", trained, "--rule", "width").out


def test_json_has_every_finding_and_what_was_not_judged(cli: Cli, trained: Path) -> None:
    found = cli("check", trained, "--json").json
    assert [(one["module_path"], one["severity"], one["ranks"]) for one in found["findings"]] == [
        (f"blocks.{number}.act", "warning", [0, 1]) for number in range(3)
    ]
    assert {"rule": "vanishing", "setting": "site=grad keep=stats"}.items() <= next(
        one for one in found["not_judged"] if one["rule"] == "vanishing"
    ).items()
    assert {(one["since"], one["step"]) for one in found["findings"]} == {(0, 4)}
    assert found["rows"] == 64


def test_thresholds_come_from_a_file_and_from_options(cli: Cli, trained: Path, tmp_path: Path) -> None:
    file = tmp_path / "check.toml"
    file.write_text('[dead]\nrecords = 9\n[[rule]]\nname = "mine"\nsite = "output"\nstatistic = "std"\nabove = 0.1\n')
    found = cli("check", trained, "--settings", file)
    assert "dead" not in found.out.splitlines()[0] and found.out.startswith("warning mine: 'blocks.3.act' output")
    assert "dead:" in cli("check", trained, "--settings", file, "--set", "dead.records=2", "--rule", "dead").out
    assert "2 rules" in cli("check", trained, "--rule", "dead", "--rule", "update").out


def test_a_rule_of_ones_own_that_matches_no_module_is_told_the_nearest(cli: Cli, trained: Path, tmp_path: Path) -> None:
    file = tmp_path / "check.toml"
    own = '[[rule]]\nname = "mine"\nsite = "output"\nmodule = "{}"\nstatistic = "std"\nabove = 0.1\n'
    file.write_text(own.format("blocks.*.acts"))
    (verdict, why) = cli("check", trained, "--settings", file, "--rule", "mine").out.splitlines()
    assert verdict.startswith("run-a: nothing is known; 0 of 1 rule judged")
    assert why.startswith("not judged: mine: no module of the run matches 'blocks.*.acts'; nearest are 'blocks.")
    file.write_text(own.format("blocks.3.*"))
    assert "mine: 'blocks.3.act'" in cli("check", trained, "--settings", file, "--rule", "mine").out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rule", "ded"], "no rule 'ded' (did you mean 'dead'?)"),
        (["--set", "dead.shares=1"], "did you mean 'share'"),
        (["--set", "dead"], "expected RULE.SETTING=NUMBER"),
        (["--fail-on", "eror"], "nearest is 'error'"),
        (["--settings", "nowhere.toml"], "nowhere.toml"),
    ],
)
def test_what_is_typed_wrong_is_refused_with_the_nearest(
    cli: Cli, trained: Path, words: list[str], message: str
) -> None:
    found = cli("check", trained, *words)
    assert (found.exit_code, found.out) == (2, "") and message in found.err


def test_a_file_that_is_no_toml_is_refused(cli: Cli, trained: Path, tmp_path: Path) -> None:
    file = tmp_path / "check.toml"
    file.write_text("[dead\n")
    assert "is no TOML" in cli("check", trained, "--settings", file).err
    file.write_text(f"[spike]\nsigmas = 1{'0' * 5_000}\n")
    found = cli("check", trained, "--settings", file)
    assert found.exit_code == 2 and "is no TOML" in found.err
    file.write_text("a = " + "[" * 100_000)
    assert cli("check", trained, "--settings", file).exit_code == 2
    found = cli("check", trained, "--settings", "/dev/zero")
    assert found.exit_code == 2 and "/dev/zero: is larger than" in found.err


def test_the_list_has_every_rule_and_threshold(cli: Cli) -> None:
    found = cli("check", "--list", "--set", "spike.sigmas=9", "--json").json
    assert {"rule": "spike", "setting": "sigmas", "threshold": "9"}.items() <= next(
        one for one in found["settings"] if one["rule"] == "spike"
    ).items()
    assert "OLMo-core" in cli("check", "--list").out


def sound(folder: Path, factor: float = 1.0, seed: int = 9) -> Path:
    """A run like `trained` of which no layer is dead."""
    run = make_run(folder)
    for rank in (0, 1):
        writer = HandmadeWriter(run, rank)
        rows: list[Row] = []
        for step in range(8):
            for number in range(4):
                values = np.random.default_rng((rank, step, number, seed)).normal(size=64).astype(np.float32) * factor
                path = f"blocks.{number}.act"
                rows.append(make_row(len(rows), values, encoding=None, rank=rank, step=step, module_path=path))
        writer.add_shard([rows])
        writer.finish()
    return run


def test_sound_runs_say_what_is_normal(cli: Cli, trained: Path, tmp_path: Path) -> None:
    one, two, loud = (sound(tmp_path / name / name, factor, seed)
                      for name, factor, seed in (("one", 1, 1), ("two", 1, 2), ("loud", 30, 3)))  # fmt: skip
    assert cli("check", two, "--baseline", one, "--fail-on", "warning").exit_code == 0
    found = cli("check", loud, "--baseline", one, "--baseline", two, "--fail-on", "warning")
    assert found.exit_code == 1
    assert found.out.startswith(
        "warning unusual: 'blocks.{0..3}.act' output, since step 0, ranks 0,1: root mean square is above"
    )
    assert "there at steps 0 to 7)" in found.out.splitlines()[0]
    excused = cli("check", trained, "--baseline", trained_again(tmp_path, trained), "--fail-on", "warning")
    assert (
        excused.exit_code == 0 and "note    dead:" in excused.out and "a sound run has this finding, too" in excused.out
    )


def trained_again(folder: Path, run: Path) -> Path:
    copy = folder / "again" / "run-b"
    shutil.copytree(run, copy)
    return copy


def test_a_baseline_that_is_none_is_refused_in_one_line(cli: Cli, trained: Path, tmp_path: Path) -> None:
    for other, words in ((trained, "the same run as the run to check"), (tmp_path / "nowhere", "nowhere")):
        refused = cli("check", trained, "--baseline", other)
        assert refused.exit_code == 2 and words in refused.err and len(refused.err.splitlines()) == 1


def test_a_finding_of_many_long_paths_is_a_line_that_can_be_read(cli: Cli, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    writer = HandmadeWriter(run)
    paths = [f"experts.{n * n}.{'projection_' * 20}{word}" for n in range(60) for word in ("up", "down")]
    values = [np.ones(8, np.float32) * (step < 2) for step in range(12)]
    moments = [(step, path) for step in range(12) for path in paths]
    rows = [
        make_row(seq, values[step], encoding=None, step=step, module_path=path)
        for seq, (step, path) in enumerate(moments)
    ]
    writer.add_shard([rows])
    writer.finish()
    found = cli("check", run, "--rule", "dead")
    assert found.out.startswith("warning dead: 'experts.")
    assert all(len(line) < 600 for line in found.out.splitlines() if not line.startswith(" "))
    assert len(cli("check", run, "--rule", "dead", "--json").json["findings"]) == len(paths)
