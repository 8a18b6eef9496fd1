"""Launches a program without the recorder and with it, under the probe, and keeps the verdict with the run: `prove`.

Must never import torch: the probe runs in the program's own processes, through the start-up hook.
"""

from __future__ import annotations

import signal
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from ...config import FLAG, PREFIX, load_settings
from ...errors import RecorderError
from ...run.finding import runs_in
from ...run.run import Run, open_run
from ...run.status import CHANGED, UNCHANGED, UNKNOWN, Proof, keep_proof
from .observed import Observed, read_observed
from .verdict import judge

_PROBE, _PROBE_STEPS = "_RECORDER_PROBE", "_RECORDER_PROBE_STEPS"
"""The variables that `recorder_probe`, which imports nothing of the package, reads."""
_END_S = 90.0
"""How long a program may take to end once all its ranks have done their steps."""
_POLL_S = 0.2
_TAIL_LINES = 15


class Proven(NamedTuple):
    """The answer of `prove`."""

    proof: Proof
    runs: tuple[Run, ...]
    """The run with which the verdict is kept; several where the ranks could not agree on one, none without a record."""
    said: str
    """The last lines that the command wrote where it failed; empty where it did not."""


def prove(
    command: Sequence[str], environ: Mapping[str, str], *, num_steps: int, report: Callable[[str], None]
) -> Proven:
    """Run a program three times and say whether the recorder changes it; a fourth time where it seems to.

    Args:
        command: the program with its arguments.
        environ: the environment that records, with the user's settings.
        num_steps: how many optimizer steps each launch takes.
        report: called with what is launched next.

    Raises:
        LookupFailedError: two processes trained as one rank.
        OSError: the command cannot be run.
    """
    ours = (PREFIX, f"_{PREFIX}")
    bare = {name: value for name, value in environ.items() if name != FLAG and not name.startswith(ours)}
    folder = Path(load_settings(environ=environ).settings.dir).absolute()
    before = {run.location.name for run in runs_in(folder)} if folder.is_dir() else set()
    with tempfile.TemporaryDirectory(prefix="recorder-prove-") as temporary:
        launches = _Launches(command, Path(temporary), num_steps, report)
        plain = launches.launch("without the recorder", bare)
        if plain.ranks:
            again = launches.launch("without the recorder once more", bare)
            recorded = launches.launch("with the recorder", environ)
            proof = judge(plain, again, recorded, num_steps=num_steps)
            if proof.verdict == CHANGED:
                third = launches.launch("without the recorder, to be sure", bare)
                sure = judge(plain, third, recorded, num_steps=num_steps)
                proof = sure if sure.verdict != CHANGED else proof
        else:
            proof, recorded = judge(plain, plain, plain, num_steps=num_steps), plain
        said = launches.said
    runs = _runs_of(folder, before, recorded) if proof.ranks else []
    if proof.verdict == UNCHANGED and not any(run.num_rows for run in runs):
        text = f"{UNKNOWN}: the program left no row in a run in {folder}, and nothing shows what recording would do"
        proof = replace(proof, verdict=UNKNOWN, text=text)
    for run in runs:
        keep_proof(proof, run.path)
    return Proven(proof, tuple(runs), said)


class _Launches:
    """The launches of one program, each with a folder for what its probes see."""

    def __init__(self, command: Sequence[str], folder: Path, num_steps: int, report: Callable[[str], None]) -> None:
        self._command = list(command)
        self._folder = folder
        self._num_steps = num_steps
        self._report = report
        self._num_launches = 0
        self.said = ""
        """The end of what the last failed launch wrote."""

    def launch(self, what: str, environ: Mapping[str, str]) -> Observed:
        self._num_launches += 1
        self._report(f"{self._num_launches}: {what}")
        folder = self._folder / str(self._num_launches)
        folder.mkdir()
        its_environ = {**environ, _PROBE: str(folder), _PROBE_STEPS: str(self._num_steps)}
        written = folder / "written.txt"
        with written.open("wb") as file:
            process = subprocess.Popen(
                self._command, env=its_environ, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT
            )
            exit_code = _wait(process, folder)
        if _is_done(folder):
            exit_code = 0
        if exit_code:
            lines = written.read_text(encoding="utf-8", errors="replace").splitlines()
            self.said = "\n".join(lines[-_TAIL_LINES:])
        return read_observed(folder, exit_code)


def _wait(process: subprocess.Popen[bytes], folder: Path) -> int:
    """Wait for the end of a command; one that does not end although its ranks have done their steps is ended."""
    patience_s = _END_S
    try:
        while True:
            try:
                return process.wait(_POLL_S)
            except subprocess.TimeoutExpired:
                patience_s -= _POLL_S if _is_done(folder) else 0
                if patience_s <= 0:
                    _end(process)
                    return 0
    except BaseException:
        _end(process)
        raise


def _is_done(folder: Path) -> bool:
    """Whether the probe has ended the program on all ranks, so that the exit code is not the program's own.

    A process group that nobody has destroyed may abort while the interpreter ends.
    """
    num_done = len(list(folder.glob("*.done")))
    return num_done > 0 and num_done == len(list(folder.glob("*.jsonl")))


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a command that we started; a launcher ends its ranks on SIGTERM."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _runs_of(folder: Path, before: set[str], recorded: Observed) -> list[Run]:
    """Find the new runs of a folder that a process of the recorded launch has written."""
    pids = {rank.pid for rank in recorded.ranks.values()}
    runs = []
    if not folder.is_dir():
        return []
    for listed in runs_in(folder):
        if listed.location.name in before:
            continue
        try:
            run = open_run(listed.location)
        except RecorderError:
            continue
        if any(writer.manifest.pid in pids for writer in run.writers):
            runs.append(run)
    return runs
