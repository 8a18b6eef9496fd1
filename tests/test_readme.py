"""Every snippet of README.md runs as it stands there, on a small run that README's own command recorded."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
README = (HERE.parent / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)
PYTHON = [text for language, text in BLOCKS if language == "python"]
SHELL = [line for language, text in BLOCKS if language == "bash" for line in text.splitlines()]


def run(command: str | list[str], cwd: Path) -> str:
    """What a command prints; fails where the command does. Its interpreter is the one that runs the tests."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("RECORDER", "_RECORDER"))}
    env |= {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}", "OMP_NUM_THREADS": "1"}
    with socket.create_server(("127.0.0.1", 0)) as server:
        env["PET_MASTER_PORT"] = str(server.getsockname()[1])  # torchrun's own default may be taken by another test
    done = subprocess.run(
        command, shell=isinstance(command, str), cwd=cwd, env=env, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def record(folder: Path, command: str) -> Path:
    shutil.copy(HERE / "small_training.py", folder / "train.py")
    run(command, folder)
    return folder


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which README's first command was typed."""
    command = SHELL[0]
    assert command.startswith("RECORDER=1 torchrun ")
    return record(tmp_path_factory.mktemp("readme"), command)


def name_of(snippet: str) -> str:
    """The first module of the reading kind that a snippet imports, with its line in README."""
    modules = re.findall(r"^import (\S+)", snippet, flags=re.MULTILINE)
    return f"{'+'.join(modules)}-line{README[: README.index(snippet)].count(chr(10)) + 1}"


@pytest.mark.parametrize("snippet", PYTHON, ids=map(name_of, PYTHON))
def test_a_python_snippet_runs_and_prints(recorded: Path, snippet: str) -> None:
    assert run([sys.executable, "-W", "error", "-c", snippet], recorded).strip()


@pytest.mark.parametrize("line", [line for line in SHELL if line.startswith("recorder ")])
def test_a_command_of_recorder_answers(recorded: Path, line: str) -> None:
    assert run(line, recorded).strip()


def test_the_rules_of_the_readme_record_what_they_say(tmp_path: Path) -> None:
    (command,) = [line for line in SHELL if line.startswith("RECORDER_RULES=")]
    record(tmp_path, command)
    import recorder

    rows = recorder.open_run(tmp_path / "recordings").table(columns=["site", "module_path", "step", "encoding"])
    found = {(r["site"], r["step"], r["encoding"] is not None) for r in rows.to_pylist()}
    assert found == {("output", 0, True), ("grad", 0, True)} | {("param", step, False) for step in range(5)}
    outputs = {r["module_path"] for r in rows.to_pylist() if r["site"] == "output"}
    assert outputs == {f"blocks.{i}{end}" for i in range(2) for end in ("", ".mlp", ".mlp.up", ".mlp.down")}


def test_every_reader_has_a_snippet() -> None:
    text = "".join(PYTHON)
    for call in ("pd.read_feather", "ds.dataset", "pl.scan_ipc", "duckdb.sql", "recorder.open_run", "recorder.decode"):
        assert call in text


def test_the_table_of_rules_names_every_key() -> None:
    from recorder.config import Rule

    table = README.partition("| key | value |\n")[2].partition("\n\n")[0]
    named = [key for line in table.splitlines()[1:] for key in re.findall(r"`(\w+)`", line.split("|")[1])]
    assert sorted(named) == sorted(Rule.KEYS)


def test_settings_that_the_readme_states_are_the_defaults() -> None:
    from recorder.config import Settings

    defaults = Settings()
    assert f"{defaults.max_bytes >> 30} GiB a rank on disk" in README
    assert f"less than {defaults.min_free_bytes >> 30} GiB free" in README
    assert (defaults.on_quota, defaults.wait_s_per_step) == ("retire", 1.0)
