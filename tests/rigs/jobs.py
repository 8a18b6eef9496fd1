"""Processes that tests start: a clean environment, a deadline, and what they left behind."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

import recorder

SCRIPTS = Path(__file__).parents[1] / "distributed" / "scripts"
COMMAND = Path(sys.executable).with_name("recorder")
"""The command line, as a script to be forked."""
EVERYTHING = "site=* keep=tensor,stats,fingerprint"
PATIENT = {"RECORDER_CLOSE_DEADLINE_S": "60"}
"""A disk that others keep busy may take longer than the seconds for which a program waits at its end."""
DEADLINE_S = 90.0
INDUCTOR = ("TORCHINDUCTOR_COMPILE_THREADS", "TORCHINDUCTOR_VEC_ISA_OK")  # of `tests/conftest.py`
_OURS = ("RECORDER", "_RECORDER", "TORCH", "SLURM", "OMPI", "PMI", "MASTER_", "PYTHON", "COV")
_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK")


def environment(settings: Mapping[str, str]) -> dict[str, str]:
    """This process's environment without what would steer a recorder or a launcher, with these variables on top."""
    kept = {k: v for k, v in os.environ.items() if (not k.startswith(_OURS) and k not in _RANKS) or k in INDUCTOR}
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", **PATIENT, **settings}


def recording(rules: str = EVERYTHING, **more: str) -> dict[str, str]:
    """The environment that records, into ``recordings`` where the process runs."""
    return {"RECORDER": "1", "RECORDER_RULES": rules, **{f"RECORDER_{k.upper()}": v for k, v in more.items()}}


@dataclass(frozen=True, kw_only=True)
class Finished:
    """A process that has ended, in the folder where it ran."""

    folder: Path
    returncode: int
    output: str
    """Standard output and standard error as they came."""

    @cached_property
    def run(self) -> recorder.Run:
        return recorder.open_run(self.folder / "recordings")

    @cached_property
    def saved(self) -> list[dict[str, Any]]:
        """What `scripts/train.py` saved, by rank."""
        return [torch.load(path, weights_only=False) for path in sorted((self.folder / "out").glob("rank*.pt"))]

    @property
    def said(self) -> str:
        """What the program said, without the closing lines of the recorder."""
        return "\n".join(line for line in self.output.splitlines() if not line.startswith("recorder: "))

    def lines(self, *words: str) -> list[str]:
        """Lines of the output in which all of these words occur."""
        return [line for line in self.output.splitlines() if all(word in line for word in words)]


class Forked:
    """What `Job` asks of a process, of one that `tests.rigs.ranks` forks. Its server starts with the first."""

    _server: subprocess.Popen[str] | None = None
    _socket = ""
    _one_at_a_time = threading.Lock()

    def __init__(self, words: Sequence[str], folder: Path, output: Path, environment: Mapping[str, str]) -> None:
        order = {"words": words, "folder": str(folder), "output": str(output.absolute()), "environment": environment}
        self.pid = int(self._ask(order) or 0)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._ask(self.pid)
        return self.returncode

    def wait(self, timeout_s: float = DEADLINE_S) -> int:
        until_s = time.monotonic() + timeout_s
        while (code := self.poll()) is None:
            if time.monotonic() > until_s:
                raise subprocess.TimeoutExpired("ranks", timeout_s)
            time.sleep(0.02)
        return code

    def terminate(self) -> None:
        os.kill(self.pid, signal.SIGTERM)

    @classmethod
    def address(cls) -> str:
        """The socket of the server, which runs from now on."""
        if cls._server is None:
            cls._socket = str(Path(tempfile.mkdtemp(prefix="ranks-")) / "socket")
            command = [sys.executable, "-m", "tests.rigs.ranks", cls._socket]
            cls._server = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment({}), text=True
            )
            atexit.register(shutil.rmtree, Path(cls._socket).parent)
            atexit.register(cls._server.communicate)  # which ends it
            assert cls._server.stdout is not None
            cls._server.stdout.readline()
        return cls._socket

    @classmethod
    def _ask(cls, what: object) -> int | None:
        with cls._one_at_a_time:
            cls.address()
            assert cls._server is not None and cls._server.stdin is not None and cls._server.stdout is not None
            cls._server.stdin.write(json.dumps(what) + "\n")
            cls._server.stdin.flush()
            answer: int | None = json.loads(cls._server.stdout.readline())
            return answer


def forking_torchrun() -> tuple[str, ...]:
    """The words for `torchrun` in a command whose launcher is not what is tested, and whose ranks are forked."""
    return sys.executable, "-SE", str(Path(__file__).with_name("launcher.py")), Forked.address()


class Job:
    """A process that is running, leader of a process group of its own."""

    def __init__(
        self, command: Sequence[str], folder: Path, settings: Mapping[str, str], *, forks: bool = False
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._command = " ".join(command)
        self._output = folder / "output.txt"
        self.process: subprocess.Popen[bytes] | Forked
        with self._output.open("wb") as file:
            if forks:
                self.process = Forked(command, folder, self._output, environment(settings))
                return
            self.process = subprocess.Popen(
                command,
                cwd=folder,
                env=environment(settings),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait(self, deadline_s: float = DEADLINE_S) -> Finished:
        """Its end; one that does not come is an AssertionError with what it said."""
        try:
            returncode = self.process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self._command} hangs; it said:\n{self._text()}") from None
        finally:
            self.kill()
        return Finished(folder=self.folder, returncode=returncode, output=self._text())

    def kill(self) -> None:
        """Leave nothing of it behind. A launcher is asked first: its ranks lead sessions of their own."""
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(10)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def _text(self) -> str:
        return self._output.read_text(errors="replace")


def python(folder: Path, *arguments: str | Path, **settings: str) -> Job:
    """Start this interpreter."""
    return Job([sys.executable, *map(str, arguments)], folder, settings)


def torchrun(folder: Path, *arguments: str | Path, options: Sequence[str] = ("--standalone",), **settings: str) -> Job:
    """Start a script on two ranks of one agent, or as the options say."""
    options = (*options, *([] if any("nproc" in option for option in options) else ["--nproc-per-node=2"]))
    launcher = Path(sysconfig.get_path("scripts")) / "torchrun"
    return Job([str(launcher), *options, *map(str, arguments)], folder, settings)


def ranks(folder: Path, script: Path, *arguments: str | Path, num: int = 2, **settings: str) -> Job:
    """Start a script on some ranks without the cost of a launch, which is not what its tests are about."""
    return Job([str(num), str(script), *map(str, arguments)], folder, settings, forks=True)


def program(folder: Path, script: str | Path, *arguments: str | Path, **settings: str) -> Job:
    """Start a script without the cost of an interpreter that imports torch, and end it as an interpreter does.

    Under the flag it begins to record before its first line, and not at its `import torch`.
    """
    return ranks(folder, Path(script), *arguments, num=0, **settings)


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def succeeded(job: Job) -> Finished:
    """Its end, which must be a good one."""
    finished = job.wait()
    assert finished.returncode == 0, finished.output
    return finished


def record_trainings(script: Path, folder: Path, names: Iterable[str]) -> None:
    """Let a script record trainings into ``folder / name``, where the folder has none of the name yet.

    Raises:
        RuntimeError: a training failed.
    """
    missing = [name for name in dict.fromkeys(names) if not (folder / name).exists()]
    if not missing:
        return
    ended = program(folder, script, folder.absolute(), *missing).wait(3600)
    if ended.returncode:
        raise RuntimeError(f"trainings failed:\n{ended.output[-4000:]}")
