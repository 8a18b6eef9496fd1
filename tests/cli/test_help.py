"""What is there before a run is looked at: help, versions, completion, and errors for programs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import recorder.cli.commands
from recorder.cli.commands import COMMANDS
from recorder.cli.options import complete_run
from tests.rigs.command_line import Cli, module
from tests.rigs.handmade import HandmadeWriter, make_row, make_run


@pytest.mark.parametrize("command", [name for name in COMMANDS if name != "run"])
def test_help_of_a_command_is_its_own_help(cli: Cli, command: str) -> None:
    found = cli("help", command)
    assert (found.exit_code, found.err) == (0, "")
    assert found.out.startswith(f"Usage: recorder {command} ") and "[[" not in found.out
    assert found.out == cli(command, "--help").out == cli(command, "-h").out
    assert found.out.splitlines()[2].strip() == COMMANDS[command][1]


def test_every_file_of_a_command_is_known_and_the_help_of_all_loads_none() -> None:
    folder = Path(recorder.cli.commands.__file__).parent
    assert {path.stem for path in folder.glob("*.py")} - {"__init__"} == {file for file, _ in COMMANDS.values()}
    code = "import sys\nfrom recorder.cli.app import run_command\ntry: run_command(['--help'])\nfinally: "
    code += "assert not {'pyarrow', 'numpy', 'rich'} & set(sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (found.returncode, found.stderr) == (0, "") and "..." not in found.stdout.partition("Commands:")[2]


def test_help_alone_lists_the_commands_and_help_of_none_is_misuse(cli: Cli) -> None:
    assert cli("help").out == cli("--help").out
    found = cli("help", "shwo")
    assert (found.exit_code, found.out) == (2, "") and "No such command 'shwo'" in found.err


def test_the_version_has_a_letter(cli: Cli) -> None:
    assert cli("-V").out == cli("--version").out
    assert (cli("-V").exit_code, cli("-V").out.split()[0]) == (0, "recorder")


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (["show", "nowhere"], "nowhere: no such directory"),
        (["stats", "RUN", "layers.9"], "has no row with module_path='layers.9'"),
        (["stats", "RUN", "--by", "colour"], "by 'colour': choose of"),
        (["show", "RUN", "--last", "-3"], "Invalid value for '--last'"),
        (["show", "--nothing"], "No such option: --nothing"),
        (["export", "RUN"], "Missing option"),
        (["nothing"], "No such command 'nothing'"),
    ],
)
def test_errors_are_json_where_json_is_asked_for(
    cli: Cli, recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, typed: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [str(recorded) if word == "RUN" else word for word in typed]
    found = cli(*words, "--json")
    assert found.exit_code == found.json["error"]["exit_code"] == 2
    assert message in found.json["error"]["message"]
    assert message in found.err, "people see it all the same"
    plain = cli(*words)
    assert (plain.exit_code, plain.out) == (2, "") and message in plain.err


def test_a_wrong_setting_is_json_too(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RECORDER_POLICY", "never")
    assert "RECORDER_POLICY" in cli("config", "--json").json["error"]["message"]


def completions(folder: Path, line: str) -> list[str]:
    """What bash offers at the end of a line."""
    words = line.split()
    index = len(words) - (not line.endswith(" "))
    told = {"COMP_WORDS": line, "COMP_CWORD": str(index), "_RECORDER_COMPLETE": "complete_bash"}
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RECORDER")} | told
    command = [sys.executable, "-m", "recorder"]
    found = subprocess.run(
        command, cwd=folder, env=environment | {"PYTHONPATH": os.getcwd()}, capture_output=True, text=True
    )
    assert found.stderr == ""
    return found.stdout.split()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number, name in enumerate(["demo-1", "demo-2"]):
        run = make_run(tmp_path / "recordings" / f"{number}a-id", name=name, created_ns=number)
        writer = HandmadeWriter(run)
        writer.add_shard([[make_row(0, [1.0])]])
        paths = ["", f"layers.{number}", "layers.$(rm)", "head"]
        writer.finish(roots=[{"name": "model", "class": "Net", "modules": [module(path, "Net") for path in paths]}])
    return tmp_path


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("recorder sta", ["stats"]),
        ("recorder help d", ["diff", "dump", "daemon", "doctor"]),
        ("recorder first ", ["demo-2", "demo-1", "latest", "recordings/"]),
        ("recorder diff @", ["@-1", "@-2"]),
        ("recorder diff latest de", ["demo-2", "demo-1"]),
        ("recorder first recordings/d", ["recordings/demo-2", "recordings/demo-1"]),
        ("recorder show l", ["latest", "layers.1"]),
        ("recorder show demo-1 l", ["layers.0"]),
        ("recorder show latest h", ["head"]),
        ("recorder show nothing h", []),
    ],
)
def test_runs_and_modules_complete(folder: Path, line: str, offered: list[str]) -> None:
    assert completions(folder, line) == offered


def test_nothing_that_a_shell_would_obey_is_offered(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    make_run(folder / "recordings" / "x$(rm -r)")
    assert complete_run("x") == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_is_given_its_script(shell: str, tmp_path: Path) -> None:
    told = {"HOME": str(tmp_path)}
    command = [sys.executable, "-m", "recorder", "--show-completion", shell]
    found = subprocess.run(command, env=os.environ | told, capture_output=True, text=True)
    assert (found.returncode, found.stderr) == (0, "") and f"_RECORDER_COMPLETE=complete_{shell}" in found.stdout
    subprocess.run(
        [*command[:-2], "--install-completion", shell], env=os.environ | told, capture_output=True, check=True
    )
    assert any("RECORDER_COMPLETE" in path.read_text() for path in tmp_path.rglob("*") if path.is_file())


def test_a_shell_that_nobody_knows_is_misuse(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "")  # set by the command, and taken back here
    found = cli("--show-completion", "foo")
    assert (found.exit_code, found.out) == (2, "") and "'foo'" in found.err
