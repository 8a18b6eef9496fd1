"""Which run is meant by what was typed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Cli
from tests.read.handmade import make_run


def test_the_beginning_of_a_name_is_enough(cli: Cli, recorded: Path) -> None:
    for command in ("ls", "show", "verify", "doctor"):
        assert cli(command, recorded.parent / "ru").out.splitlines()[0].find("run-a") >= 0, command
    assert "'layers.0'" in cli("show", recorded.parent / "run-", "layers.0").out


@pytest.mark.parametrize("command", ["ls", "show", "verify", "doctor"])
def test_an_ambiguous_beginning_lists_the_matches(cli: Cli, recorded: Path, command: str) -> None:
    make_run(recorded.parent / "run-b")
    make_run(recorded.parent / "other")
    found = cli(command, recorded.parent / "run")
    assert (found.exit_code, found.out) == (2, "")
    assert "2 runs begin so: run-b, run-a; type more of the name" in found.err
    exact = cli(command, recorded.parent / "run-b")
    assert "begin so" not in exact.err


def test_several_runs_are_answered_with_the_command_that_was_typed(cli: Cli, recorded: Path) -> None:
    newest = make_run(recorded.parent / "run-b", created_ns=2)
    found = cli("show", recorded.parent, "layers.0", "--site", "grad")
    assert found.exit_code == 2
    assert found.err.endswith(f"name one, the newest: recorder show {newest} layers.0 --site grad\n")
    assert cli("verify", recorded.parent).err.endswith(f"the newest: recorder verify {newest}\n")


def test_a_module_without_a_run_is_told_where_the_run_goes(cli: Cli) -> None:
    found = cli("show", "blocks.0.attn", "--site", "grad")
    assert found.exit_code == 2
    assert "blocks.0.attn: no such directory; the run comes before the module" in found.err
    assert "recorder show RUN blocks.0.attn --site grad" in found.err


def test_an_empty_folder_is_not_answered_with_the_same_command(cli: Cli, tmp_path: Path) -> None:
    found = cli("ls", tmp_path)
    assert found.exit_code == 2
    assert "no run here" in found.err and "recorder ls" not in found.err and "RECORDER=1" in found.err


def test_doctor_of_a_folder_without_a_run_is_not_answered_with_itself(cli: Cli, tmp_path: Path) -> None:
    found = cli("doctor", tmp_path)
    assert found.exit_code == 2
    assert "where it does not, `recorder doctor`, without a path, says what keeps it from it" in found.err


def test_the_version_is_printed(cli: Cli) -> None:
    found = cli("--version")
    assert (found.exit_code, found.out.split()[0]) == (0, "recorder")
