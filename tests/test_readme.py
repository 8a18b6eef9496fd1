"""Every snippet of README.md runs as it stands there, on a small run that README's own command recorded."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest

HERE = Path(__file__).parent
README = (HERE.parent / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)
PYTHON = [text for language, text in BLOCKS if language == "python"]
SHELL = [line for language, text in BLOCKS if language == "bash" for line in text.splitlines()]
COMMANDS = [line for line in SHELL if line.startswith("recorder ")]
SAID = [line for language, text in BLOCKS if language == "text" for line in text.splitlines()]


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


class Typed(NamedTuple):
    """A folder in which everything was typed that README says, and what it said."""

    folder: Path
    said: dict[str, str]
    snippets: dict[str, Future[str]]


@pytest.fixture(scope="module")
def side_by_side() -> Iterator[ThreadPoolExecutor]:
    """Two processes at a time: most of each is an interpreter that imports, on one core."""
    with ThreadPoolExecutor(2) as executor:
        yield executor
        executor.shutdown(cancel_futures=True)


@pytest.fixture(scope="module")
def typed(side_by_side: ThreadPoolExecutor, tmp_path_factory: pytest.TempPathFactory) -> Typed:
    command, others = SHELL[0], [line for line in SHELL if line.startswith("RECORDER_DIR=") and " torchrun " in line]
    assert command.startswith("RECORDER=1 torchrun ")
    assert len(others) == 2  # another run, and a twin
    folder = tmp_path_factory.mktemp("readme")
    shutil.copy(HERE / "small_training.py", folder / "train.py")
    list(side_by_side.map(partial(run, cwd=folder), (command, *others)))
    said = {line: run(line, folder) for line in COMMANDS}
    snippets = {
        snippet: side_by_side.submit(run, [sys.executable, "-W", "error", "-c", snippet], folder) for snippet in PYTHON
    }
    return Typed(folder, said, snippets)


def name_of(snippet: str) -> str:
    """The first module of the reading kind that a snippet imports, with its line in README."""
    modules = re.findall(r"^import (\S+)", snippet, flags=re.MULTILINE)
    return f"{'+'.join(modules)}-line{README[: README.index(snippet)].count(chr(10)) + 1}"


@pytest.mark.parametrize("snippet", PYTHON, ids=map(name_of, PYTHON))
def test_a_python_snippet_runs_and_prints(typed: Typed, snippet: str) -> None:
    assert typed.snippets[snippet].result().strip()


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_of_recorder_answers(typed: Typed, line: str) -> None:
    assert typed.said[line].strip()


def test_the_answers_are_those_of_a_run_that_is_whole(typed: Typed) -> None:
    answers = {line.split()[1]: said for line, said in typed.said.items()}
    assert all(line.startswith("ok ") for line in answers["doctor"].splitlines())
    assert "no NaN" in answers["first"]
    assert "180 equal exactly, 0 differ" in typed.said["recorder diff recordings other"]
    assert "no findings" in typed.said["recorder merge recordings -o merged"]
    steps = {line.split()[0] for line in answers["stats"].splitlines()[2:]}
    assert steps == {"0", "1", "2", "3", "4"}


def test_what_the_commands_leave_is_ignored_by_git(typed: Typed) -> None:
    for snippet in typed.snippets.values():
        snippet.result()
    ignored = {line.strip("/") for line in (HERE.parent / ".gitignore").read_text().splitlines()}
    assert {path.name for path in typed.folder.iterdir()} - ignored == {"train.py"}


def test_the_demo_installs_what_the_snippets_import() -> None:
    project = tomllib.loads((HERE.parent / "pyproject.toml").read_text())["project"]
    (extra,) = re.findall(r"^prepare (\w+)", (HERE.parent / "scripts" / "demo").read_text(), flags=re.MULTILINE)
    installed = project["dependencies"] + project["optional-dependencies"][extra]
    names = {re.split(r"[<>=\[]", one)[0] for one in installed} | {project["name"]}
    imported = {name for text in PYTHON for name in re.findall(r"^(?:import|from) (\w+)", text, flags=re.MULTILINE)}
    assert imported - set(sys.stdlib_module_names) <= names


def test_the_global_tensor_is_that_of_both_ranks(typed: Typed) -> None:
    (snippet,) = [snippet for snippet in PYTHON if "of which rank 1 had" in snippet]
    assert "(8, 8) of which rank 1 had (4, 8)" in typed.snippets[snippet].result()


def test_what_went_wrong_first_is_what_the_readme_shows(tmp_path: Path) -> None:
    script = (HERE / "small_training.py").read_text()
    broken = script.replace(
        "    for _ in range(5):\n",
        "    for step in range(5):\n"
        "        if (step, dist.get_rank()) == (3, 1):\n"
        "            model.module.blocks[1].mlp.up.weight.data[0, 0] = float('nan')\n",
    )
    assert broken != script
    (tmp_path / "train.py").write_text(broken)
    run(SHELL[0], tmp_path)
    said = " ".join(run("recorder first recordings || test $? = 1", tmp_path).split())
    assert len(SAID) == 3
    for line in SAID:
        assert " ".join(line.split()) in said


def test_the_table_of_commands_names_every_command_but_run() -> None:
    from recorder.cli.app import app

    table = README.partition("| command | answers |\n")[2].partition("\n\n")[0]
    named = {
        name for cell in re.findall(r"^\| ([^|]*) \|", table, flags=re.MULTILINE) for name in re.findall(r"\w+", cell)
    }
    known = {command.name or getattr(command.callback, "__name__", "") for command in app.registered_commands}
    assert named - {"recorder"} == known - {"run"}


def test_the_rules_of_the_readme_record_what_they_say(tmp_path: Path) -> None:
    (command,) = [line for line in SHELL if line.startswith("RECORDER_RULES=")]
    shutil.copy(HERE / "small_training.py", tmp_path / "train.py")
    run(command, tmp_path)
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

    defaults, text = Settings(), " ".join(README.split())
    assert f"{defaults.max_bytes >> 30} GiB a rank on disk" in text
    assert f"less than {defaults.min_free_bytes >> 30} GiB free" in text
    assert (defaults.on_quota, defaults.wait_s_per_step) == ("retire", 1.0)
