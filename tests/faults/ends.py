"""Trainings that end in every way, a fork each of one process that has imported everything; and what they leave."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.rigs.jobs import DEADLINE_S, Finished, environment

SCRIPT = Path(__file__).parent / "scripts" / "ends.py"


class Trainer:
    """The process that forks; one for a whole file of tests."""

    def __init__(self, script: Path = SCRIPT) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment({}),
            text=True,
        )

    def ask(self, what: object) -> int:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def start(self, folder: Path, **case: Any) -> Training:
        folder.mkdir(parents=True)
        return Training(self, folder, self.ask({"folder": str(folder), "record": True, "settings": {}, **case}))

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._process.wait(DEADLINE_S)


class Training:
    """One that runs."""

    def __init__(self, trainer: Trainer, folder: Path, pid: int) -> None:
        self._trainer = trainer
        self.folder = folder
        self.pid = pid

    @property
    def progress(self) -> str:
        path = self.folder / "progress"
        return path.read_text() if path.exists() else ""

    @property
    def output(self) -> str:
        return (self.folder / "output.txt").read_text(errors="replace")

    def until(self, is_so: Callable[[str], bool]) -> Training:
        until_s = time.monotonic() + DEADLINE_S
        while not is_so(self.progress):
            assert time.monotonic() < until_s, self.output
            time.sleep(0.005)
        return self

    def send(self, number: int) -> Training:
        os.kill(self.pid, number)
        return self

    def wait(self) -> Finished:
        """Its end; the exit code -999 says that it hung."""
        return Finished(folder=self.folder, returncode=self._trainer.ask(self.pid), output=self.output)
