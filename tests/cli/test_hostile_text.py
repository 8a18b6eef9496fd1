"""Names of foreign_writers: nothing in them reaches a terminal as a command, or rich as markup."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from recorder.system.text import MAX_CELL, printable
from tests.rigs.command_line import Cli, on_a_terminal
from tests.rigs.handmade import HandmadeWriter, make_row, make_run

NAMES = ["\x1b[2J\x1b]0;owned\x07", "[red]x[/red]", "[/]", "a\nb\tc\rd", "\u202eevil", "\x9b31m", "\ud800", "n" * 300]


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    run = make_run(tmp_path / "run", world_size=1)
    names = [name for name in NAMES if name != "\ud800"]
    writer = HandmadeWriter(run, name="[bold]w\x1b[2J")
    rows = [make_row(i, [1.0], module_path=name, name=name, root=name, site=name) for i, name in enumerate(names)]
    writer.add_shard([rows])
    modules = [{"path": name, "class": name, "source": name, "sites": ["output"]} for name in [*names, "\x1b[1mlost"]]
    events = [{"kind": name, "message": name} for name in names]
    dropped = dict.fromkeys(names, 1)
    writer.finish(
        host=NAMES[0],
        roots=[{"name": name, "class": name, "modules": modules} for name in names],
        events=events,
        rules=names,
        settings={name: {"value": name, "source": name} for name in names},
        ledger={"observed": 14, "written": 7, "dropped": dropped},
    )
    return run


def is_harmless(text: str) -> bool:
    return all(char.isprintable() or char == "\n" for char in text)


@pytest.mark.parametrize("command", ["ls", "show", "verify", "doctor"])
def test_a_pipe_gets_printable_text_alone(cli: Cli, hostile: Path, command: str) -> None:
    found = cli(command, hostile)
    assert is_harmless(found.out), found.out
    assert is_harmless(found.err), found.err
    as_json = cli(command, hostile, "--json")
    assert as_json.out.isascii() and is_harmless(as_json.out)
    assert as_json.json


@pytest.mark.parametrize("name", [name for name in NAMES if name != "\ud800"])
def test_a_module_of_any_name_is_shown_harmlessly(cli: Cli, hostile: Path, name: str) -> None:
    found = cli("show", hostile, name)
    assert found.exit_code == 0
    assert is_harmless(found.out)


def test_an_error_repeats_a_name_harmlessly(cli: Cli, hostile: Path, tmp_path: Path) -> None:
    for arguments in (["show", hostile, "\x1b[31mno"], ["ls", tmp_path / "\x1b[31mno\nno"]):
        found = cli(*arguments)
        assert found.exit_code == 2
        assert is_harmless(found.err) and found.err.count("\n") == 1


@pytest.mark.parametrize("name", NAMES)
def test_printable_says_what_was_there(name: str) -> None:
    shown = printable(name)
    assert shown.isprintable() and len(shown) <= MAX_CELL
    assert "\\x1b" in shown or "\x1b" not in name


@pytest.mark.parametrize("command", ["ls", "show", "doctor", "verify"])
def test_a_terminal_gets_no_control_sequence_but_our_own(hostile: Path, command: str) -> None:
    output = on_a_terminal(command, str(hostile))
    ours = re.sub(r"\x1b\[[0-9;]*[mKAG]|\x1b\[\?25[lh]", "", output).replace("\r\n", "\n").replace("\r", "")
    assert is_harmless(ours), ours
    assert "\x1b[2J" not in output and "\x1b]" not in output
    if command == "show":
        assert "[red]x[/red]" in ours
