"""`ls`, `verify`, `config`, `doctor`: what they print and how they end."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

import recorder
from recorder.config import PRESETS, Settings, load_settings
from tests.rigs.command_line import Cli, on_a_terminal
from tests.rigs.handmade import HandmadeWriter, flip, ledger, make_row, make_run


class TestLs:
    def test_a_folder_is_a_table_of_runs(self, cli: Cli, recorded: Path) -> None:
        make_run(recorded.parent / "run-b", created_ns=2)
        found = cli("ls", recorded.parent)
        assert found.exit_code == 0
        titles, older, newest = (line.split() for line in found.out.splitlines())
        assert titles == ["run", "started", "ranks", "steps", "rows", "size", "dropped", "state"]
        assert (newest[0], newest[-2:]) == ("run-b", ["0", "empty"])
        assert (older[0], older[3:6], older[6], older[7], older[-2:]) == (
            "run-a",
            ["2", "of", "2"],
            "0..11",
            "96",
            ["pool_full=6", "closed"],
        )

    def test_a_run_is_a_table_of_writers(self, cli: Cli, recorded: Path) -> None:
        lines = cli("ls", recorded).out.splitlines()
        assert lines[0].startswith("run-a: 2 of 2 ranks, steps 0..11, 96 rows, ")
        assert [line.split()[0] for line in lines[2:]] == ["0", "1"]
        assert all("pool_full=3" in line and "closed" in line for line in lines[2:])

    def test_a_run_that_is_damaged_or_lost_a_manifest_says_so_in_a_line(self, cli: Cli, recorded: Path) -> None:
        where = next(recorded.glob("rank=00000/*"))
        (where / "tensors-000000.arrow").rename(recorded.parent / "kept")
        told = f"damaged: {where}: 12 of 48 rows that were written are gone; not here: tensors-000000.arrow"
        for asked, line in ((recorded, told), (recorded.parent, f"run-a: {told}")):
            found = cli("ls", asked)
            assert found.exit_code == 1 and line in found.out.splitlines()
        (recorded.parent / "kept").rename(where / "tensors-000000.arrow")
        manifest = (where / "_writer.json").read_bytes()
        for content, why in (
            (b"", "_writer.json: the file is empty"),
            (None, ": has rows and no manifest, which is lost"),
        ):
            (where / "_writer.json").unlink() if content is None else (where / "_writer.json").write_bytes(content)
            for asked in (recorded, recorded.parent):
                found = cli("ls", asked)
                assert found.exit_code == 1 and f"damaged: {where}" in found.out and why in found.out
        (where / "_writer.json").write_bytes(manifest)
        assert cli("ls", recorded).exit_code == 0
        (recorded / "_run.json").write_bytes(b"")
        found = cli("ls", recorded.parent)
        assert found.exit_code == 1 and f"unreadable: {recorded}/_run.json: the file is empty" in found.out

    def test_a_folder_of_another_program_in_a_ranks_folder_is_no_writer(self, cli: Cli, recorded: Path) -> None:
        before = cli("ls", recorded).out
        top = cli("top", recorded, "--once").out
        for name, file in (("mine", "notes.txt"), ("empty", "")):
            (folder := recorded / "rank=00000" / name).mkdir()
            (folder / file).write_text("") if file else None
        assert cli("ls", recorded).out == before
        assert cli("top", recorded, "--once").out == top

    def test_a_folder_whose_runs_were_all_pruned_says_which(self, cli: Cli, tmp_path: Path) -> None:
        for name in ("run-b", "team/run-a"):
            (mark := tmp_path / "_pruned" / f"{name}.json").parent.mkdir(parents=True, exist_ok=True)
            mark.write_text("{}")
        told = f"{tmp_path}: no run is left here; 2 runs were pruned: run-b, team/run-a"
        found = cli("ls", tmp_path)
        assert (found.exit_code, found.out) == (0, f"{told}\n")
        assert cli("ls", tmp_path, "--json").json["pruned"] == ["run-b", "team/run-a"]
        found = cli("verify", tmp_path)
        assert found.exit_code == 2 and told in found.err

    def test_rows_of_the_probe_are_counted_alike_in_a_run_and_its_writers(self, cli: Cli, tmp_path: Path) -> None:
        model = torch.nn.Linear(2, 2)
        more: dict[str, Any] = {"rules": "site=output keep=probe; site=output steps=::2 keep=stats"}
        with recorder.attach(model, enabled=True, dir=str(tmp_path), **more):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(4):
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()
        (run,) = tmp_path.iterdir()
        found = cli("ls", run, "--json").json
        assert (found["rows"], found["probe_rows"]) == (found["writers"][0]["rows"], 1) == (3, 1)
        assert "steps 0..2 (2), 3 rows (1 of the probe), " in cli("ls", run).out
        assert "2 shards, 3 rows, " in cli("verify", run).out

    def test_a_merged_run_has_a_line_for_each_rank_and_one_for_all(self, cli: Cli, recorded: Path) -> None:
        merged = recorded.parent / "merged"
        assert cli("merge", recorded, "-o", merged).exit_code in (0, 1)
        lines = [line.split() for line in cli("ls", merged).out.splitlines()]
        assert [line[0] for line in lines[2:]] in (["global"], ["global", "0", "1"])
        assert len(cli("ls", merged, "--json").json["writers"]) >= len(lines) - 2

    def test_json_holds_the_same(self, cli: Cli, recorded: Path) -> None:
        (run,) = cli("ls", recorded.parent, "--json").json["runs"]
        assert (run["run"], run["ranks"], run["steps"][-1], run["rows"]) == ("run-a", [0, 1], 11, 96)
        writers = cli("ls", recorded, "--json").json["writers"]
        assert [writer["dropped"] for writer in writers] == [{"pool_full": 3}] * 2
        assert writers[0]["bytes"] > 1000

    def test_an_unreadable_run_is_listed_as_such(self, cli: Cli, recorded: Path) -> None:
        broken = make_run(recorded.parent / "run-c")
        (broken / "_run.json").write_text("{")
        found = cli("ls", recorded.parent)
        assert found.exit_code == 1
        assert "unreadable" in found.out and "run-a" in found.out

    def test_a_folder_says_what_the_disk_may_have_lost_and_who_was_killed(self, cli: Cli, tmp_path: Path) -> None:
        run = make_run(tmp_path / "recordings" / "run-a")
        HandmadeWriter(run).finish(ledger=ledger(0, observed=5, disk_full=5) | {"suspect": 2})
        dead = subprocess.Popen([sys.executable, "-c", ""])
        dead.wait()
        HandmadeWriter(run, 1).finish(state="recording", pid=dead.pid, host=os.uname().nodename)
        (_, line) = cli("ls", run.parent).out.splitlines()
        assert line.split()[-3:] == ["disk_full=5", "suspect=2", "unclosed"]
        (found,) = cli("ls", run.parent, "--json").json["runs"]
        assert (found["dropped"], found["suspect_rows"], found["state"]) == ({"disk_full": 5}, 2, "unclosed")

    def test_damage_is_a_finding(self, cli: Cli, recorded: Path) -> None:
        shard = next(recorded.glob("rank=00001/*/stats-000000.arrow"))
        shard.write_bytes(shard.read_bytes()[:-3])
        for index in recorded.glob("rank=00001/*/_stats*.index"):
            index.unlink()
        found = cli("ls", recorded)
        assert found.exit_code == 1
        assert found.err.startswith("recorder: warning: ") and "stats-000000.arrow" in found.err


class TestVerify:
    def test_a_sound_run_ends_with_zero(self, cli: Cli, recorded: Path) -> None:
        for writer in recorded.glob("rank=*/*"):
            (writer / "_writer.json").write_text((writer / "_writer.json").read_text())
        found = cli("verify", recorded)
        assert (found.exit_code, found.err) == (0, "")
        assert found.out.endswith("checked: no faults\n")
        assert cli("verify", recorded, "--json").json["findings"] == []

    def test_a_flipped_bit_is_a_finding_with_the_file(self, cli: Cli, recorded: Path) -> None:
        shard = next(recorded.glob("rank=00001/*/tensors-000000.arrow"))
        flip(shard, 8 * shard.read_bytes().rindex(b"layers.0"))
        found = cli("verify", recorded)
        assert found.exit_code == 1
        assert any(line.startswith("fault: ") and str(shard) in line for line in found.out.splitlines())
        assert found.out.endswith("checked: 1 fault\n")
        (fault, *_) = cli("verify", recorded, "--json").json["findings"]
        assert fault["fault"] is True


class TestConfig:
    def test_every_setting_is_shown_with_its_source(
        self, cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        (tmp_path / "settings.toml").write_text('codec = "none"\n')
        monkeypatch.setenv("RECORDER_CONFIG", str(tmp_path / "settings.toml"))
        monkeypatch.setenv("RECORDER_MAX_BYTES", "4GB")
        found = cli("config", "--show")
        assert found.exit_code == 0
        sources = {line.split()[0]: line for line in found.out.splitlines()}
        assert "4000000000" in sources["max_bytes"] and "environment" in sources["max_bytes"]
        assert "none" in sources["codec"] and "settings.toml" in sources["codec"]
        assert "default" in sources["policy"]
        settings = cli("config", "--json").json
        assert settings["max_bytes"]["value"] == 4_000_000_000
        assert settings["max_bytes"]["source"] == "environment"

    def test_bytes_are_readable(self, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("RECORDER_MIN_FREE_BYTES", "4GB")
        out = " ".join(cli("config").out.split())
        assert "max_bytes 16 GiB (17179869184)" in out
        assert "min_free_bytes 4 GB (4000000000)" in out
        assert "pool_bytes 0 (automatic)" in out

    def test_a_wrong_setting_is_one_line(self, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("RECORDER_MAX_BITES", "4GB")
        found = cli("config", "--show")
        assert (found.exit_code, found.out, found.err.count("\n")) == (2, "", 1)
        assert "RECORDER_MAX_BITES" in found.err

    def test_a_preset_is_shown_with_its_rules(self, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("RECORDER_PRESET", "twin")
        settings = cli("config", "--json").json
        assert settings["preset"]["value"] == "twin"
        assert settings["rules"]["source"] == "preset twin"
        assert settings["rules"]["value"] == [rule.text for rule in PRESETS["twin"]]

    def test_a_wrong_preset_names_those_that_there_are(self, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("RECORDER_PRESET", "lite")
        found = cli("config")
        assert (found.exit_code, found.out, found.err.count("\n")) == (2, "", 1)
        assert "none or default or light or nan or blackbox or rollout or full or twin" in found.err


class TestInit:
    def test_the_file_has_every_setting_with_its_default(self, cli: Cli, tmp_path: Path) -> None:
        path = tmp_path / "recorder.toml"
        assert cli("init", path).exit_code == 0
        assert tomllib.loads(path.read_text()) == {}  # as it is it changes nothing
        path.write_text(re.sub(r"^# ", "", path.read_text(), flags=re.MULTILINE))
        loaded = load_settings(environ={"RECORDER_CONFIG": str(path)})
        assert loaded.settings == Settings()
        assert set(loaded.sources) == {item.name for item in fields(Settings)}

    def test_a_file_that_is_there_is_kept(self, cli: Cli, tmp_path: Path) -> None:
        path = tmp_path / "recorder.toml"
        path.write_text("codec = 'none'\n")
        found = cli("init", path)
        assert (found.exit_code, found.out, found.err.count("\n")) == (2, "", 1)
        assert "is there already" in found.err
        assert path.read_text() == "codec = 'none'\n"


class TestDoctor:
    def test_the_environment_is_examined(self, cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "recorder.py").write_text("")
        monkeypatch.setenv("RECORDER", "1")
        monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
        found = cli("doctor")
        assert found.exit_code == 1
        assert "ok      RECORDER: recording is on" in found.out
        assert "missing TORCH_DEVICE_BACKEND_AUTOLOAD=0" in found.out
        assert "recorder.py: hides the package" in found.out
        assert "torch: 2." in found.out
        assert "free, recording pauses below" in found.out

    def test_a_wrong_setting_and_a_folder_that_cannot_be_written_are_said(
        self, cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("RECORDER_DIR", str(tmp_path / "file" / "below"))
        monkeypatch.setenv("RECORDER", "perhaps")
        found = cli("doctor")
        assert found.exit_code == 1
        assert "cannot be written; set RECORDER_DIR" in found.out
        assert "'perhaps'" in found.out
        monkeypatch.setenv("RECORDER_POLICY", "never")
        assert "missing settings: RECORDER_POLICY" in cli("doctor").out

    def test_a_run_tells_what_is_missing_and_why(self, cli: Cli, recorded: Path) -> None:
        found = cli("doctor", recorded)
        assert found.exit_code == 1
        checks = found.out.splitlines()
        assert "ok      run-a: 96 rows, ranks 0..1, steps 0..11" in checks
        assert "ok      rule: site=output keep=tensor" in checks
        assert "ok      root model: Net, 5 modules, 4 selected" in checks
        silent = [check for check in checks if "left no rows" in check]
        assert any("never called" in check and check.endswith("'layers.1'") for check in silent)
        assert not any("compiled" in check for check in silent), "told once, with what is missing by it"
        assert any(
            "missing, ranks 0..1, " in one and "compiled: " in one and one.endswith("'layers.2'") for one in checks
        )
        assert "note    event compiled (rank 0, 1): values inside compiled modules are not recorded" in checks
        assert sum("3 of 51 rows dropped: pool_full 3" in check for check in checks) == 2

    def test_missing_ranks_and_a_killed_writer_are_named(self, cli: Cli, tmp_path: Path) -> None:
        run = make_run(tmp_path / "run", world_size=3)
        writer = HandmadeWriter(run, rank=1)
        writer.add_shard(
            [[make_row(0, [1.0], rank=1)]], is_sealed=False, tail=b"\xff\xff\xff\xff\x00\x10\x00\x00".ljust(100, b"x")
        )
        dead = subprocess.Popen([sys.executable, "-c", ""])
        dead.wait()
        writer.finish(state="recording", pid=dead.pid, host=os.uname().nodename)
        found = cli("doctor", run)
        assert "missing ranks: no files of 0, 2 of 3" in found.out
        ending = "its process ended without closing; the record ends in step 0; rows of the last steps may be missing"
        assert f"missing rank 1 (writer {writer.directory.name}): {ending}" in found.out
        assert "ends with 100 bytes of a write that was cut" in found.out
        assert "missing roots: none" in found.out

    def test_what_is_missing_stands_last(self, cli: Cli, recorded: Path) -> None:
        states = [line.split()[0] for line in cli("doctor", recorded).out.splitlines()]
        assert states == sorted(states, key=["ok", "note", "missing"].index)
        assert {"ok", "note", "missing"} == set(states)

    def test_bytes_are_said_to_be_unchecked(self, cli: Cli, recorded: Path) -> None:
        oks = [line for line in cli("doctor", recorded).out.splitlines() if line.startswith("ok")]
        where = f"recorder verify {recorded}"
        assert oks[-1] == f"ok      not checked here: whether bytes have changed; to check all bytes: {where}"

    def test_json_is_a_list_of_checks(self, cli: Cli, recorded: Path) -> None:
        states = {check["state"] for check in cli("doctor", recorded, "--json").json["checks"]}
        assert states == {"ok", "note", "missing"}


class TestEveryCommand:
    def test_the_list_of_commands_is_whole(self) -> None:
        text = on_a_terminal("--help", width=80, is_plain=True)
        commands = text.partition("Commands:")[2].partition("\n\n")[0].splitlines()[1:]
        assert [line.split()[0] for line in commands][-1] == "run"
        assert all(line.endswith(".") and not line.endswith("...") for line in commands)

    def test_no_command_shows_the_help(self, cli: Cli) -> None:
        found = cli()
        assert found.exit_code == 2
        assert "verify" in found.out + found.err

    @pytest.mark.parametrize("command", ["ls", "show", "verify", "doctor"])
    @pytest.mark.parametrize("kind", ["missing", "file", "foreign", "corrupt", "newer", "several", "linked"])
    def test_unreadable_input_is_one_line_and_two(self, cli: Cli, tmp_path: Path, command: str, kind: str) -> None:
        path = tmp_path / "input"
        if kind == "file":
            path.write_text("x")
        elif kind == "foreign":
            (path / "folder").mkdir(parents=True)
        elif kind == "corrupt":
            (make_run(path) / "_run.json").write_bytes(b"\0\xff")
        elif kind == "newer":
            make_run(path, version=[9, 0])
        elif kind == "linked":
            run = make_run(path)
            (run / "_run.json").rename(tmp_path / "elsewhere.json")
            (run / "_run.json").symlink_to(tmp_path / "elsewhere.json")
        elif kind == "several":
            make_run(path.with_name("input-a"))
            make_run(path.with_name("input-b"))
        found = cli(command, path)
        assert (found.exit_code, found.out) == (2, "")
        assert found.err.startswith("recorder: ") and found.err.count("\n") == 1
        assert str(path) in found.err

    def test_misuse_is_two(self, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)  # in a checkout in which the demo ran there are recordings, which `verify` takes
        assert cli("verify").exit_code == 2
        assert cli("nothing").exit_code == 2
        assert cli("show", "x", "--last", "-3").exit_code == 2


def test_recorder_run_loads_no_ui_package() -> None:
    code = (
        "import sys; sys.argv = ['recorder', 'run', '--help']\n"
        "from recorder.__main__ import main\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "assert not {'typer', 'click', 'rich', 'torch', 'pyarrow'} & set(sys.modules)\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert "recorder run train.py" in found.stdout
    assert all(len(line) <= 80 for line in found.stdout.splitlines())


def test_the_commands_load_no_torch() -> None:
    code = (
        "import sys\n"
        "from recorder.cli.app import COMMANDS, load_command\n"
        "for name in COMMANDS: load_command(name)\n"
        "assert not {'torch', 'pandas'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_reader_that_goes_away_is_no_error(recorded: Path) -> None:
    command = f"{sys.executable} -m recorder show {recorded} layers.0 --json | head -1"
    found = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert (found.stdout, found.stderr) == ("{\n", "")


def test_a_reader_that_goes_away_is_no_finding(tmp_path: Path) -> None:
    """More than a pipe holds, so that the command is cut off in the middle."""
    run = make_run(tmp_path / "run")
    writer = HandmadeWriter(run)
    writer.add_shard([[make_row(i, encoding=None, step=i) for i in range(3000)]])
    writer.finish()
    for command in ("show RUN layers.0 --json", "stats RUN --last 0"):
        line = f"{sys.executable} -m recorder {command.replace('RUN', str(run))} | head -1; exit ${{PIPESTATUS[0]}}"
        found = subprocess.run(["bash", "-c", line], capture_output=True, text=True)
        assert (found.returncode, found.stderr) == (141, "")


def test_a_command_ends_without_a_teardown_of_the_interpreter(recorded: Path) -> None:
    """During a teardown a thread of Arrow's pool may take the interpreter's lock, which aborts the process."""
    code = (
        "import atexit, os\n"
        "class Last:\n"
        "    def __del__(self, write=os.write): write(1, b'teardown')\n"
        "last = Last()\n"
        "atexit.register(print, 'registered')\n"
        "from recorder.__main__ import main\n"
        "main()\n"
    )
    found = subprocess.run([sys.executable, "-c", code, "verify", str(recorded)], capture_output=True, text=True)
    assert (found.returncode, found.stderr) == (0, "")
    assert found.stdout.splitlines()[-1] == "registered"


def test_a_closed_output_is_no_finding(recorded: Path) -> None:
    command = f"{sys.executable} -m recorder"
    line = f"{command} verify {recorded} >&-; echo $?; {command} ls nowhere 2>&-; echo $?"
    found = subprocess.run(["bash", "-c", line], capture_output=True, text=True)
    assert (found.stdout, found.stderr) == ("0\n2\n", "")


def test_an_empty_text_is_no_run(cli: Cli, recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not mean the folder where one stands: ``recorder repair "$RUN"`` would write there."""
    monkeypatch.chdir(recorded.parent)
    for command in ("verify", "repair", "ls"):
        found = cli(command, "")
        assert (found.exit_code, found.out) == (2, "")
        assert found.err == "recorder: an empty text is no run; name a run, or a folder of runs\n"
