"""Pages that are typed as a reader types them: their commands, the changes of the training, and what is printed."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from recorder.cli.app import run_command
from tests.rigs import jobs

ROOT = Path(__file__).parents[2]
TRAINING = (ROOT / "tests" / "small_training.py").read_text(encoding="utf-8")
WIDTH = 118
"""Columns of the terminal that the pages show."""


def run(command: str | list[str], cwd: Path, allowed: tuple[int, ...] = (0,)) -> str:
    """What a command prints; fails where the command does. Its interpreter is the one that runs the tests."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("RECORDER", "_RECORDER"))}
    env |= {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}", "OMP_NUM_THREADS": "1"}
    env["COLUMNS"] = str(WIDTH)
    with socket.create_server(("127.0.0.1", 0)) as server:
        env["PET_MASTER_PORT"] = str(server.getsockname()[1])  # torchrun's own default may be taken by another test
    done = subprocess.run(
        command, shell=isinstance(command, str), cwd=cwd, env=env, capture_output=True, text=True, timeout=240
    )
    assert done.returncode in allowed, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def apply_change(change: str, script: str) -> str:
    """The script after a change that is written as a diff without its head."""
    lines = [(line[:1], line[1:]) for line in change.splitlines(keepends=True)]
    old = "".join(text for sign, text in lines if sign != "+")
    assert script.count(old) == 1, old
    return script.replace(old, "".join(text for sign, text in lines if sign != "-"))


_VARIES = (
    (r"\b\w+-\d{8}-\d{6}\b", "NAME"),  # a run's
    (r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", "TIME"),
    (r"\b\d+(\.\d+)? [kMG]?B\b", "SIZE"),  # manifests hold the names of the host and of folders
    (r"[▁▂▃▄▅▆▇█]+", "COURSE"),  # a value at the edge of two heights
)


def words_of(line: str) -> list[str]:
    for pattern, word in _VARIES:
        line = re.sub(pattern, word, line)
    return line.split()


def is_same(shown: str, printed: str) -> bool:
    """Whether two words are equal; of numbers the last digits may depend on the processor."""
    if shown == printed:
        return True
    try:
        return float(shown.strip(",")) == pytest.approx(float(printed.strip(",")), rel=1e-2)
    except ValueError:
        return False


def assert_printed(shown: str, printed: str) -> None:
    """Each line that is shown was printed, in this order; ``...`` stands for the rest of a line, or for lines."""
    lines = iter([words_of(line) for line in printed.splitlines()])
    for line in filter(None, map(words_of, shown.splitlines())):
        words, is_cut = (line[:-1], True) if line[-1] == "..." else (line, False)
        if words:
            assert any(
                (len(words) == len(other) or (is_cut and len(words) < len(other)))
                and all(is_same(*pair) for pair in zip(words, other, strict=False))
                for other in lines
            ), f"{' '.join(line)}\nis not, or not there, in\n{printed}"


class Block(NamedTuple):
    """A fenced block of a page."""

    line: int
    language: str
    file: str
    """The name under which it is saved; may be empty."""
    text: str


class Launched(NamedTuple):
    """A training that was launched: what it was, and the folder of its recording."""

    programs: tuple[tuple[str, str], ...]
    line: str
    recording: Path


def find_blocks(text: str) -> list[Block]:
    found = re.finditer(r"^```(\w+)(?: ([\w.]+))?\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    return [Block(text.count("\n", 0, one.start()) + 1, one[1], one[2] or "", one[3]) for one in found]


def typed_lines(block: Block) -> list[str]:
    """The commands of a block; one goes on where a line ends in a backslash."""
    return [line for line in block.text.replace("\\\n", " ").splitlines() if line and not line.startswith("#")]


class Desk:
    """A folder in which a page is typed."""

    def __init__(self, folder: Path, launched: list[Launched]) -> None:
        self.folder = folder
        self._launched = launched
        (folder / "train.py").write_text(TRAINING)
        self._programs = folder.with_name(f"{folder.name}-programs")
        self._programs.mkdir()
        launcher = self._programs / "torchrun"
        launcher.write_text(f'#!/bin/sh\nexec {shlex.join(jobs.forking_torchrun())} "$@"\n')
        launcher.chmod(0o755)

    def type_block(self, block: Block) -> str:
        """Do what a block says, and return what is printed."""
        if block.file:
            (self.folder / block.file).write_text(block.text)
            return ""
        if block.language == "diff":
            script = self.folder / "train.py"
            script.write_text(apply_change(block.text, script.read_text()))
            return ""
        if block.language == "python":
            with self._sit_down() as out:
                exec(compile(block.text, "snippet", "exec"), {"__name__": "__main__"})
            return out.getvalue()
        assert block.language == "bash", block
        return "\n".join(self.type_line(line, allowed=(0, 1)) for line in typed_lines(block))  # 1 is a finding

    def type_line(self, line: str, allowed: tuple[int, ...] = (0,)) -> str:
        """What a command prints; fails where the command does."""
        if "torchrun" in line:
            time.sleep(1 - time.time() % 1)  # a run is called by the second of its start; a forked launch takes less
        if line.startswith("recorder ") and "--factory" not in line:  # which imports `train`, of this folder
            return self._ask(shlex.split(line.partition(" > ")[0], comments=True)[1:], allowed)
        if "RECORDER=1" not in line:
            return self._run(line, allowed)
        programs = tuple((path.name, path.read_text()) for path in sorted(self.folder.glob("*.py")))
        recording = self.folder / dict(re.findall(r"(\w+)=(\S+)", line)).get("RECORDER_DIR", "recordings")
        for other in self._launched:
            if (other.programs, other.line) == (programs, line) and not recording.exists():
                shutil.copytree(other.recording, recording)
                return ""
        printed = self._launch(shlex.split(line, comments=True)) if "torchrun" in line else self._run(line, (0,))
        kept = self.folder.with_name(f"{self.folder.name}-{len(self._launched)}")
        shutil.copytree(recording, kept)
        self._launched.append(Launched(programs, line, kept))
        return printed

    def _run(self, line: str, allowed: tuple[int, ...]) -> str:
        """What a command prints; a program is forked."""
        words = shlex.split(line, comments=True)
        settings = dict(word.split("=", 1) for word in itertools.takewhile(lambda word: "=" in word, words))
        python, *arguments = words[len(settings) :]
        if python != "python" or not arguments[0].endswith(".py"):
            return run(line, self.folder, allowed)
        environment = jobs.environment(settings)
        for name in jobs.PATIENT.keys() - settings.keys():
            del environment[name]  # pages show which settings are not the defaults
        output = self._programs / "output.txt"
        output.write_bytes(b"")
        code = jobs.Forked(["0", *arguments], self.folder, output, environment).wait(240)
        printed = output.read_text()
        assert code in allowed, f"{line}\n{printed}"
        return printed

    def _launch(self, words: list[str]) -> str:
        """The ranks of a training, forked."""
        launch = words.index("torchrun")
        settings = dict(word.split("=", 1) for word in words[:launch]) | {"TESTS_RECORDER": "1"}
        option, num, script, *arguments = words[launch + 1 :]
        assert (option, settings.pop("RECORDER")) == ("--nproc-per-node", "1")
        finished = jobs.succeeded(jobs.ranks(self.folder, Path(script), *arguments, num=int(num), **settings))
        (self.folder / "output.txt").unlink()
        return finished.output

    def _ask(self, words: list[str], allowed: tuple[int, ...]) -> str:
        """What a command of the recorder prints."""
        error = io.StringIO()
        with self._sit_down() as out, contextlib.redirect_stderr(error):
            try:
                run_command(words)
            except SystemExit as end:
                assert (end.code or 0) in allowed, f"{words}\n{out.getvalue()}\n{error.getvalue()}"
        return out.getvalue()

    @contextlib.contextmanager
    def _sit_down(self) -> Iterator[io.StringIO]:
        """Be in the folder, in this process, which has imported everything already; what is printed is caught."""
        with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as out:
            patch.chdir(self.folder)
            patch.setenv("COLUMNS", str(WIDTH))
            for programs in (Path(sys.executable).parent, self._programs):  # for `recorder prove`
                patch.setenv("PATH", str(programs), prepend=os.pathsep)
            yield out
