"""Launches a program under the probe, and reads what the probe saw of each rank: what all proofs need.

A proof launches the program several times and compares. torch is never imported here.
"""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from ...errors import LookupFailedError, RecorderError
from ...run.finding import runs_in, typed_for
from ...run.notes import proof_state
from ...run.reply import Reply, StateLine
from ...run.run import Run, open_run
from ...run.status import CHANGED, UNCHANGED, UNKNOWN, Proof, keep_proof
from ...system.text import printable

KINDS = {
    "param": "parameters",
    "grad": "gradients",
    "buffer": "buffers",
    "optim": "optimizer states",
    "lr": "learning rates",
    "schedule": "members of learning-rate schedules",
    "scaler": "members of gradient scalers",
    "other": "values beside the model",
    "rng": "random states",
    "batch": "batches",
}
"""What the values of each kind are called; the kind is the first word of a key of `Look.digests`."""


class Look(NamedTuple):
    """The state of one rank after one step of one optimizer."""

    step: int
    digests: Mapping[str, str]
    """The digest of each value; a key is kind and name with a space between: ``param blocks.0.weight``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSeen:
    """The steps and the printed lines of one rank in one launch."""

    pid: int
    looks: tuple[Look, ...]
    versions: Mapping[str, str] = field(default_factory=dict)
    machine: str = ""
    printed: tuple[str, ...]
    """The lines that the rank wrote to its standard output after `import torch`."""

    @property
    def num_steps(self) -> int:
        return self.looks[-1].step + 1 if self.looks else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """The exit code and the ranks of one launch of the program."""

    exit_code: int
    """The exit code of the command; a negative code is the signal that ended it."""
    ranks: Mapping[int, RankSeen]

    @property
    def num_steps(self) -> int:
        return min((rank.num_steps for rank in self.ranks.values()), default=0)


def read_observed(folder: Path, exit_code: int) -> Observed:
    """Read the files that the probes of one launch wrote.

    Raises LookupFailedError if two processes trained as the same rank, so that ranks cannot be compared.
    """
    ranks: dict[int, RankSeen] = {}
    for path in sorted(folder.glob("*.jsonl")):
        head, *lines = _lines(path)
        rank = int(head["rank"])
        if rank in ranks:
            raise LookupFailedError(
                f"two processes trained as rank {rank} (process ids {ranks[rank].pid} and {head['pid']}): "
                "prove compares one process a rank; start them with torchrun, or set RANK for each"
            )
        text = path.with_suffix(".out").read_text(encoding="utf-8", errors="replace")
        ranks[rank] = RankSeen(
            pid=int(head["pid"]),
            looks=tuple(Look(line["step"], line["digests"]) for line in lines),
            versions=head["versions"],
            machine=head["machine"],
            printed=tuple(text.splitlines()),
        )
    return Observed(exit_code=exit_code, ranks=dict(sorted(ranks.items())))


def _lines(path: Path) -> list[dict[str, Any]]:
    """Read the JSON objects of a file. The last line of a killed process may be cut, and is left out."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if line[-1] == "\n"]


_PROBE, _PROBE_STEPS, _PROBE_RESUME = "_RECORDER_PROBE", "_RECORDER_PROBE_STEPS", "_RECORDER_PROBE_RESUME"
"""The environment variables that configure `recorder_probe`, which does not import this package."""
RESUMED = "resumed"
"""The folder, inside that of a killed launch, for the processes that go on; `recorder_probe` makes it as well."""
_END_S = 90.0
"""The seconds that a program may take to end once all its ranks have done their steps."""
_POLL_S = 0.2
_GIT_S = 30.0
_TAIL_LINES = 15


class Proven(NamedTuple):
    """The result of `prove`."""

    proof: Proof
    runs: tuple[Run, ...]
    """The runs in which the verdict is kept: several if the ranks could not agree on one, none without a recording."""
    said: str
    """The last lines that the command wrote if it failed; else empty."""


def reply_of(proved: Proven) -> Reply:
    """Return the reply of `recorder prove`: exit code 0 for unchanged, 1 for changed, and 2 for anything else."""
    proof = proved.proof

    def members() -> dict[str, Any]:
        names = (
            "subject",
            "verdict",
            "text",
            "steps",
            "ranks",
            "first_step",
            "notes",
            "compared",
            "commands",
            "commit",
        )
        runs = [str(run.path) for run in proved.runs]
        return {**{name: getattr(proof, name) for name in names}, "runs": runs, "said": proved.said}

    def parts() -> Iterator[str | StateLine]:
        yield from (f"  | {printable(line)}" for line in proved.said.splitlines())
        yield from (StateLine("note", note) for note in proof.notes)
        yield StateLine(proof_state(proof), proof.text)
        for run in proved.runs:
            command = f"recorder doctor {shlex.quote(typed_for(run.path, run.name))}"
            yield f"kept with {printable(run.name)}; {command} shows it"

    return Reply(members=members, parts=parts, exit_code={UNCHANGED: 0, CHANGED: 1}.get(proof.verdict, 2))


class Launches:
    """The launches of one proof, each of which leaves what its probes write in a folder of its own."""

    def __init__(self, command: Sequence[str], folder: Path, num_steps: int, report: Callable[[str], None]) -> None:
        self._command = list(command)
        self._folder = folder
        self._num_steps = num_steps
        self._report = report
        self._num_launches = 0
        self.said = ""
        """The last lines that the last failed launch wrote."""

    def launch(self, what: str, environ: Mapping[str, str]) -> Observed:
        """Run the command until each rank has made its steps."""
        return read_observed(*self._launch(what, self._command, environ, self._new_folder()))

    def launch_to_resume(
        self, what: str, again: str, resumed_command: Sequence[str], environ: Mapping[str, str]
    ) -> tuple[Observed, Observed]:
        """Run the command until its ranks kill themselves, and run the other command, unless the launcher restarts."""
        folder = self._new_folder()
        resumed_folder = folder / RESUMED
        _, exit_code = self._launch(what, self._command, {**environ, _PROBE_RESUME: "killed"}, folder)
        killed = read_observed(folder, exit_code)
        if not resumed_folder.exists() and killed.num_steps == self._num_steps:
            self.said = ""
            resumed_folder.mkdir()
            environ = {**environ, _PROBE_RESUME: RESUMED}
            _, exit_code = self._launch(again, resumed_command, environ, resumed_folder)
        return killed, read_observed(resumed_folder, exit_code)

    def _new_folder(self) -> Path:
        folder = self._folder / str(self._num_launches + 1)
        folder.mkdir()
        return folder

    def _launch(self, what: str, command: Sequence[str], environ: Mapping[str, str], folder: Path) -> tuple[Path, int]:
        self._num_launches += 1
        self._report(f"{self._num_launches}: {what}")
        its_environ = {**environ, _PROBE: str(folder), _PROBE_STEPS: str(self._num_steps)}
        written = folder / "written.txt"
        with written.open("wb") as file:
            process = subprocess.Popen(
                command, env=its_environ, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT
            )
            exit_code = _wait(process, folder)
        if _is_done(folder):
            exit_code = 0
        if exit_code:
            lines = written.read_text(encoding="utf-8", errors="replace").splitlines()
            summary = next((i for i, line in enumerate(lines) if i and "failed (exitcode: " in line), len(lines))
            del lines[summary:]  # what torchrun adds to the rank's own words
            self.said = "\n".join(lines[-_TAIL_LINES:])
        return folder, exit_code


def _wait(process: subprocess.Popen[bytes], folder: Path) -> int:
    """Wait for a command to end. If its ranks have done their steps and it does not end, end it."""
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
    """Return whether the probe has ended the program on all ranks, so that the exit code is not the program's own.

    For example, a process group that was never destroyed may abort at the interpreter's end.
    """
    if (folder / RESUMED).is_dir():  # the launcher started the ranks anew after they were killed
        folder = folder / RESUMED
    num_done = len(list(folder.glob("*.done")))
    return num_done > 0 and num_done == len(list(folder.glob("*.jsonl")))


def _end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def keep(
    proof: Proof, commands: Sequence[Sequence[str]], folder: Path, before: set[str], launches: Sequence[Observed]
) -> tuple[Proof, tuple[Run, ...]]:
    """Write the certificate into the runs that launches have recorded in a folder, and return both.

    Runs that were there `before` stay as they are.
    """
    seen = [rank for launch in launches for rank in launch.ranks.values()]
    lines = tuple(dict.fromkeys(map(shlex.join, commands)))
    proof = replace(proof, commands=lines, commit=_commit(), time_ns=time.time_ns())
    if seen:
        proof = replace(proof, versions=seen[0].versions, machine=seen[0].machine)
    runs = _runs_of(folder, before, {rank.pid for rank in seen})
    if proof.verdict == UNCHANGED and proof.subject == "recording" and not any(run.num_rows for run in runs):
        text = f"{UNKNOWN}: the program left no row in a run in {folder}, and nothing shows what recording would do"
        proof = replace(proof, verdict=UNKNOWN, text=text)
    for run in runs:
        keep_proof(proof, run.path)
    return proof, tuple(runs)


def _commit() -> str:
    """Return the commit of the folder in which the program is started; empty where git does not know it."""
    try:
        commit = _git("rev-parse", "HEAD")
        return f"{commit}, changed" if _git("status", "--porcelain", "--untracked-files=no") else commit
    except (OSError, subprocess.SubprocessError):
        return ""


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], capture_output=True, text=True, check=True, timeout=_GIT_S)
    return done.stdout.strip()


def _runs_of(folder: Path, before: set[str], pids: set[int]) -> list[Run]:
    runs = []
    if not folder.is_dir():
        return []
    for found in runs_in(folder):
        if found.location.name in before:
            continue
        try:
            run = open_run(found.location)
        except RecorderError:
            continue
        if any(writer.manifest.pid in pids for writer in run.writers):
            runs.append(run)
    return runs
