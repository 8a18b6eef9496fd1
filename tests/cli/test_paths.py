"""Which run is meant by what was typed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from recorder.run.run import open_run
from tests.rigs.command_line import Cli
from tests.rigs.handmade import HandmadeWriter, make_row, make_run


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
    assert "2 runs begin so: run-a (1970-01-01 " in found.err and "type more of the name" in found.err
    assert ", up to step 11); run-b (" in found.err and found.err.count("\n") == 1
    exact = cli(command, recorded.parent / "run-b")
    assert "begin so" not in exact.err


NAMED = {"demo-20260101-000000": 1, "demo-20260102-000000": 2, "big=1": 3}


@pytest.fixture
def named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three runs with names of people, in directories that are called by what the launcher said; `big=1` is newest."""
    for number, (name, created) in enumerate(NAMED.items()):
        make_run(tmp_path / "recordings" / f"{number}a-id", name=name, created_ns=created * 10**18)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "recordings"


def headline(cli: Cli, *typed: object) -> str:
    """The run that `top` shows, which needs no rows."""
    found = cli("top", *typed)
    assert found.exit_code == 0, found.err
    return found.out.partition(": ")[0]


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("big=1", "big=1"),
        ("big", "big=1"),
        ("demo-20260102", "demo-20260102-000000"),
        ("0a", "demo-20260101-000000"),
        ("latest", "big=1"),
        ("@-1", "big=1"),
        ("@-3", "demo-20260101-000000"),
    ],
)
def test_a_run_is_meant_by_its_name_its_id_their_beginnings_or_its_age(
    cli: Cli, named: Path, typed: str, name: str
) -> None:
    assert headline(cli, typed) == headline(cli, f"recordings/{typed}") == headline(cli, named / typed) == name
    assert open_run(typed).name == name


@pytest.mark.parametrize("typed", [["recordings"], []])
def test_the_newest_is_the_default_and_said(cli: Cli, named: Path, typed: list[str]) -> None:
    found = cli("top", *typed)
    assert found.out.startswith("big=1: ")
    assert found.err == "recorder: note: recordings: took big=1, the newest of 3 runs\n"
    assert open_run().name == "big=1"


def test_a_setting_says_where_runs_are(cli: Cli, named: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    monkeypatch.setenv("RECORDER_DIR", str(named))
    assert headline(cli) == headline(cli, "big") == "big=1"
    assert [run["name"] for run in cli("ls", "--json").json["runs"]] == list(NAMED)


@pytest.mark.parametrize("typed", ["demo", "recordings/demo"])
def test_an_ambiguous_name_is_one_line_with_name_time_and_steps(cli: Cli, named: Path, typed: str) -> None:
    HandmadeWriter(named / "0a-id").add_shard([[make_row(0, [1.0], step=7)]])
    found = cli("show", typed)
    assert (found.exit_code, found.out, found.err.count("\n")) == (2, "", 1)
    time = r"\(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d, "
    assert re.search(rf"demo-20260101-000000 {time}up to step 7\); demo-20260102-000000 {time}no steps\)", found.err)


@pytest.mark.parametrize("typed", ["big=1", "big"])
def test_of_several_runs_of_one_name_the_newest_is_taken_and_said(cli: Cli, named: Path, typed: str) -> None:
    older = make_run(named / "3a-id", name="big=1", created_ns=9)
    found = cli("top", typed)
    assert found.exit_code == 0
    note = f"{typed}: took recordings/2a-id, the newest of 2 runs called big=1"
    assert found.err == f"recorder: note: {note}\n"
    assert open_run(typed).path.name == "2a-id" and open_run("3a-id").path.resolve() == older
    assert cli("top", "2a-id").err == "", "directories tell them apart"


def test_a_merged_run_does_not_compete_by_the_id_of_its_source(cli: Cli, named: Path) -> None:
    for number, directory in enumerate([named / "mm60", named.parent / "mm80"]):
        make_run(directory, run_id="0a-id", created_ns=10**19 + number, merged_from={"run_id": "0a-id"})
    for typed in ("0a-id", "0a"):
        assert headline(cli, typed) == headline(cli, f"recordings/{typed}") == "demo-20260101-000000"
    assert headline(cli, "mm60") == "mm60" and headline(cli, "mm8") == "mm80"


def test_a_directory_goes_before_a_name_and_an_exact_one_before_beginnings(cli: Cli, named: Path) -> None:
    make_run(named / "big=1", name="other", created_ns=1)
    make_run(named / "0a-id-2", created_ns=2)
    assert headline(cli, "big=1") == "other" and headline(cli, "0a-id") == "demo-20260101-000000"


def test_a_run_is_named_in_what_to_type_next_if_its_name_means_it_from_here(
    cli: Cli, named: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    older = make_run(named / "3a-id", name="big=1", created_ns=9)

    def typed(run: Path) -> str:
        (line,) = [line for line in cli("doctor", run).out.splitlines() if "recorder verify " in line]
        word = line.rpartition("recorder verify ")[2]
        assert open_run(word).path.resolve() == run
        return word

    assert typed(named / "0a-id") == "demo-20260101-000000"
    for one in (named / "2a-id", older):
        assert typed(one) == str(one), "two runs have the name"
    monkeypatch.chdir("/")
    assert typed(named / "0a-id") == str(named / "demo-20260101-000000")
    assert repr(open_run(named / "0a-id")).startswith("<Run 'demo-20260101-000000': ")


def test_a_program_is_told_in_the_words_of_the_command_line_which_run_was_taken(
    cli: Cli, named: Path, caplog: pytest.LogCaptureFixture
) -> None:
    open_run()
    assert [record.getMessage() for record in caplog.records] == ["recordings: took big=1, the newest of 3 runs"]


@pytest.mark.parametrize(
    ("typed", "why"),
    [("@-4", "holds 3 runs, the oldest is @-3"), ("bigg", "nearest is big=1"), ("@0", "@-1 is the newest")],
)
def test_a_run_that_is_not_there_is_one_line(cli: Cli, named: Path, typed: str, why: str) -> None:
    found = cli("top", typed)
    assert (found.exit_code, found.out, found.err.count("\n")) == (2, "", 1)
    assert why in found.err


def test_ls_shows_names_times_and_steps_the_newest_last(cli: Cli, named: Path) -> None:
    HandmadeWriter(named / "1a-id").add_shard([[make_row(0, [1.0], step=7)]])
    titles, *lines = cli("ls").out.splitlines()
    assert [line.split()[0] for line in lines] == list(NAMED)
    assert "started" in titles and lines[1].split()[6] == "7"
    assert [line.split()[-1] for line in lines] == ["0a-id", "1a-id", "2a-id"]


def test_two_runs_are_compared_by_their_age(cli: Cli, named: Path) -> None:
    for number in range(3):
        writer = HandmadeWriter(named / f"{number}a-id")
        writer.add_shard([[make_row(0, [float(number)])]])
        writer.finish()
    runs = [("demo-20260102-000000", "recordings/1a-id"), ("big=1", "recordings/2a-id")]
    for typed in ([], ["recordings"], [named], ["@-2", "@-1"], ["demo-20260102", "big"], ["@-2", "@-1", "--brief"]):
        found = cli("diff", *typed)
        assert (found.exit_code, found.err) == (1, "")
        for line, side, (name, path) in zip(found.out.splitlines(), "AB", runs, strict=False):
            assert re.fullmatch(rf"{side}: {name} \(\S*{path}\), started \d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d", line)
        members = cli("diff", *typed, "--json").json
        for side, (name, path) in zip("ab", runs, strict=True):
            assert members[f"name_{side}"] == name and members[side].endswith(path) and members[f"started_ns_{side}"]
    assert "noise: demo-20260101-000000 (recordings/0a-id)" in cli("diff", "--noise", "@-3").out


@pytest.mark.parametrize(
    ("typed", "why"),
    [
        ("diff @-1", "@-1: is big=1, one run; name a second one, or a folder to take its last two"),
        ("diff @-1 link", "link: is big=1, the same run as A"),
        ("diff 2a-id recordings/../link/2a-id", "the same run as A"),
        ("diff @-1 big=1 --json", "the same run as A"),
        ("diff @-2 @-1 --noise link/@-2", "--noise link/@-2: is demo-20260102-000000, the same run as A"),
        ("diff @-2 @-1 --noise @-3 --noise link/@-3", "the same run as --noise @-3"),
        ("diff one", "one holds 1 run"),
        ("report --against link/@-1", "--against link/@-1: is big=1, the same run as the run to draw"),
        ("check --baseline link", "--baseline link: is big=1, the same run as the run to check"),
        ("check --baseline @-2 --baseline link/1a-id", "the same run as --baseline @-2"),
    ],
)
def test_a_run_is_not_held_against_itself_however_it_is_spelled(cli: Cli, named: Path, typed: str, why: str) -> None:
    (named.parent / "link").symlink_to(named)
    make_run(named.parent / "one" / "run", created_ns=10**18)
    found = cli(*typed.split())
    assert found.exit_code == 2 and why in found.out + found.err


def test_a_name_that_a_stranger_wrote_is_none(cli: Cli, tmp_path: Path) -> None:
    for number, name in enumerate(["\x1b[31m", "../x", 7, "a" * 101, ""]):
        make_run(tmp_path / "recordings" / f"run-{number}", name=name)
    assert [run["name"] for run in cli("ls", tmp_path / "recordings", "--json").json["runs"]] == [
        f"run-{i}" for i in range(5)
    ]


def test_one_word_is_a_run_or_a_module_of_the_newest(cli: Cli, recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(recorded.parent.parent)
    for command in ("show", "stats"):
        assert cli(command, "layers.0").out == cli(command, "recordings", "layers.0").out
        assert cli(command, "run-").out == cli(command, "recordings").out
    neither = cli("show", "layer.0")
    assert (neither.exit_code, neither.err.count("\n")) == (2, 1)
    assert "layer.0: no such directory, and no run of this name in . or recordings; " in neither.err
    assert "run-a, the newest, has no module 'layer.0'; nearest are 'layers.0'" in neither.err
    Path("empty").mkdir()
    assert "no module" not in cli("show", "empty").err


def test_a_module_where_nothing_was_recorded_is_one_line(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = cli("show", "blocks.0.attn", "--site", "grad")
    assert (found.exit_code, found.err) == (
        2,
        "recorder: blocks.0.attn: no such directory, and no run of this name in .\n",
    )


def test_an_empty_folder_is_not_answered_with_the_same_command(cli: Cli, tmp_path: Path) -> None:
    found = cli("ls", tmp_path)
    assert found.exit_code == 2
    assert "no run here" in found.err and "recorder ls" not in found.err and "RECORDER=1" in found.err


@pytest.mark.parametrize("words", [("set", "latest", "pause"), ("show", "latest"), ("top", "@-1")])
def test_the_latest_before_there_is_a_run_says_how_there_is_one(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    found = cli(*words)
    assert found.exit_code == 2
    assert found.err == "recorder: no run in recordings yet; start the training with RECORDER=1 in front\n"


def test_doctor_of_a_folder_without_a_run_is_not_answered_with_itself(cli: Cli, tmp_path: Path) -> None:
    found = cli("doctor", tmp_path)
    assert found.exit_code == 2
    assert "if it does not, `recorder doctor`, without a path, gives the reason" in found.err


def test_the_version_is_printed(cli: Cli) -> None:
    found = cli("--version")
    assert (found.exit_code, found.out.split()[0]) == (0, "recorder")
