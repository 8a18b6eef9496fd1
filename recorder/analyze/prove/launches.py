"""Launches a program together with `recorder_probe`, and reads what this probe saw of each rank.

All proofs use this module. A proof launches a program several times, and compares the launches. Never imports torch.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from ...config import load_settings
from ...errors import LookupFailedError, RecorderError
from ...run.finding import runs_in, shortest_text_of
from ...run.notes import proof_state
from ...run.reply import Reply, StateLine
from ...run.run import Run, open_run
from ...run.status import CHANGED, UNCHANGED, UNKNOWN, Proof, keep_proof
from ...system.text import listed, named, plural, printable

NOUNS = {
    "param": "parameter",
    "buffer": "buffer",
    "optim": "optimizer state",
    "update": "optimizer",
    "setting": "optimizer setting",
    "schedule": "learning-rate schedule",
    "scaler": "gradient scaler",
    "flag": "flag",
    "other": "state beside the model",
    "variable": "variable",
    "rng": "random state",
    "batch": "batch",
    "grad": "gradient",
}
"""The noun in messages for each kind of value. The kind is the first word of a key of `Look.digests`."""
GENERATORS = {"cpu": "the CPU", "cuda": "the GPU", "python": "Python", "numpy": "NumPy"}
MAX_LISTED = 4
"""The most values that a message names."""


def values_named(keys: Iterable[str]) -> str:
    """Return words that name values of one kind, such as ``parameters w, b`` or ``random state of the CPU``."""
    keys = list(dict.fromkeys(keys))
    kind = keys[0].partition(" ")[0]
    if kind == "rng":
        names = (key.removeprefix("rng ") for key in keys)
        words = (GENERATORS.get(name, f"the program's own generator {name}") for name in names)
        return f"random state of {listed(words, MAX_LISTED)}"
    noun = NOUNS[kind] if kind == "other" else plural(NOUNS[kind], len(keys))
    return f"{noun} {listed((key.partition(' ')[2] for key in keys), MAX_LISTED)}"


def on_ranks(ranks: Collection[int]) -> str:
    """Return words that name ranks, such as `` on ranks 0, 1``. Return an empty string if there are no ranks."""
    return f" on {named('rank', sorted(ranks))}" if ranks else ""


def count_kinds(keys: Iterable[str]) -> Counter[str]:
    """Return how many values there are of each kind, under the plural of the kind's noun."""
    nouns = {kind: plural(noun, 2) for kind, noun in NOUNS.items()} | {"other": "values beside the model"}
    return Counter(nouns[kind] for key in keys if (kind := key.partition(" ")[0]) in nouns)


class Look(NamedTuple):
    """The digests (hashes) of one rank's values, taken around one update by one optimizer."""

    step: int
    digests: Mapping[str, str]
    """The digest of each value, by its kind and name with a space between, such as ``param blocks.0.weight``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSeen:
    """What the probe saw of one rank in one launch: the updates, and the printed lines."""

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

    what: str = ""
    """The launch of the proof, in words, such as ``resumed``."""
    exit_code: int
    """The exit code of the command. A negative code is the signal that ended it."""
    ranks: Mapping[int, RankSeen]

    @property
    def num_steps(self) -> int:
        return min((rank.num_steps for rank in self.ranks.values()), default=0)

    @property
    def steps(self) -> list[int]:
        """The step of each update, by any optimizer, that was seen on every rank."""
        return [look.step for look in min((rank.looks for rank in self.ranks.values()), key=len, default=())]


def read_observed(folder: Path, exit_code: int, what: str) -> Observed:
    """Read the files that the probes of one launch wrote.

    Raises LookupFailedError if two processes trained as the same rank, so that ranks cannot be compared.
    """
    ranks: dict[int, RankSeen] = {}
    for path in sorted(folder.glob("*.jsonl")):
        written = path.read_text(encoding="utf-8").splitlines(keepends=True)
        head, *lines = (json.loads(line) for line in written if line[-1] == "\n")  # a kill may cut the last line
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
    return Observed(what=what, exit_code=exit_code, ranks=dict(sorted(ranks.items())))


_PROBE, _PROBE_STEPS, _PROBE_RESUME = "_RECORDER_PROBE", "_RECORDER_PROBE_STEPS", "_RECORDER_PROBE_RESUME"
"""The environment variables that configure `recorder_probe`, which does not import this package."""
RESUMED = "resumed"
"""The subfolder of a killed launch's folder in which the resumed processes write. `recorder_probe` makes it, too."""
_END_S = 90.0
"""How many seconds a program may take to end once all its ranks have done their steps."""
_POLL_S = 0.2
_TAIL_LINES = 15


class Proven(NamedTuple):
    """The result of `prove`."""

    proof: Proof
    runs: tuple[Run, ...]
    """The runs in which the verdict is stored: no run without a recording, several if the ranks have no common run."""
    said: str
    """The last lines that the command wrote if it failed, or an empty string."""


def reply_of(proved: Proven) -> Reply:
    """Return the reply of `recorder prove`. The exit code is 0 for unchanged, 1 for changed, 2 for anything else."""
    proof = proved.proof

    def parts() -> Iterator[str | StateLine]:
        yield from (f"  | {printable(line)}" for line in proved.said.splitlines())
        yield from (StateLine("note", note) for note in proof.notes)
        yield StateLine(proof_state(proof), proof.text)
        for run in proved.runs:
            command = f"recorder doctor {shlex.quote(shortest_text_of(run.path, run.name))}"
            yield f"kept with {printable(run.name)}; {command} shows it"

    return Reply(
        members=lambda: {**asdict(proof), "runs": [str(run.path) for run in proved.runs], "said": proved.said},
        parts=parts,
        exit_code={UNCHANGED: 0, CHANGED: 1}.get(proof.verdict, 2),
    )


class Launches:
    """The launches of one proof. The probes of each launch write into a temporary folder of their own."""

    def __init__(self, environ: Mapping[str, str], num_steps: int, report: Callable[[str], None]) -> None:
        """Take `environ`, which turns recording on as the user set it. `report` gets a text before each launch."""
        self.environ = environ
        self.num_steps = num_steps
        self._report = report
        self._recordings = Path(load_settings(environ=environ).settings.dir).absolute()
        self._before = os.listdir(self._recordings) if self._recordings.is_dir() else []
        self._temporary = tempfile.TemporaryDirectory(prefix="recorder-prove-")
        self._commands: list[str] = []
        self._said = ""
        """The last lines of the output of the last launch that failed."""

    def __enter__(self) -> Launches:
        return self

    def __exit__(self, *error: object) -> None:
        self._temporary.cleanup()

    def launch(
        self, what: str, command: Sequence[str], environ: Mapping[str, str] | None = None, *,
        num_steps: int | None = None, resume: str = "", folder: Path | None = None,
    ) -> Observed:  # fmt: skip
        """Run a command until each rank has made its steps, and return what the probes saw.

        With `resume` (``killed`` or `RESUMED`), the probe reads the state before each step. Raises LookupFailedError if
        two processes trained as one rank, and OSError if the command cannot be run.
        """
        self._commands.append(shlex.join(command))
        self._report(f"{len(self._commands)}: {what}")
        folder = folder or Path(self._temporary.name) / str(len(self._commands))
        folder.mkdir()
        probing = {_PROBE: str(folder), _PROBE_STEPS: str(num_steps or self.num_steps)}
        probing |= {_PROBE_RESUME: resume} if resume else {}
        written = folder / "written.txt"
        with written.open("wb") as file:
            process = subprocess.Popen(
                command, env={**(environ or self.environ), **probing},
                stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
            )  # fmt: skip
            exit_code = _wait(process, folder)
        if _is_done(folder):
            exit_code = 0
        if exit_code:
            lines = written.read_text(encoding="utf-8", errors="replace").splitlines()
            summaries = [i for i, line in enumerate(lines) if i and "failed (exitcode: " in line]
            del lines[max(summaries, default=len(lines)) :]  # torchrun adds such lines to the output of the rank
            prefix = next((found[0] for line in lines if (found := re.match(r"\[rank\d+\]: ", line))), "")
            # The other ranks fail because the first one has failed.
            lines = [line for line in lines if line.startswith(prefix)]
            self._said = "\n".join(lines[-_TAIL_LINES:])
        return read_observed(folder, exit_code, what)

    def launch_to_resume(
        self, command: Sequence[str], again: str, resumed_command: Sequence[str], num_resumed_steps: int | None = None
    ) -> tuple[Observed, Observed]:
        """Run `command` until its ranks kill themselves, then `resumed_command`, unless the launcher restarts them."""
        folder = Path(self._temporary.name) / "killed"
        what = f"to be killed at the end of step {self.num_steps - 1}"
        killed = self.launch(what, command, resume="killed", folder=folder)
        if (folder / RESUMED).exists():
            return killed, read_observed(folder / RESUMED, killed.exit_code, again)
        if killed.num_steps < self.num_steps:
            return killed, Observed(exit_code=killed.exit_code, ranks={})
        self._said = ""
        resumed = self.launch(
            again, resumed_command, num_steps=num_resumed_steps, resume=RESUMED, folder=folder / RESUMED
        )
        return killed, resumed

    def proven(self, proof: Proof, *recorded: Observed) -> Proven:
        """Write the proof into the runs that these launches have recorded, and return it with these runs."""
        seen = [rank for launch in recorded for rank in launch.ranks.values()]
        commands = tuple(dict.fromkeys(self._commands))
        proof = replace(proof, commands=commands, commit=_commit(), time_ns=time.time_ns())
        if seen:
            proof = replace(proof, versions=seen[0].versions, machine=seen[0].machine)
        runs = self.runs_of(*recorded)
        pids = {writer.manifest.pid for run in runs for writer in run.writers}
        notes = (
            f"launch {one.what!r}: no run was recorded, so that it keeps no certificate; if it ended before its writer "
            f"had begun one, ask for more than {self.num_steps} steps with --steps; else see that RECORDER=1 reaches it"
            for one in recorded
            if one.ranks and pids.isdisjoint(rank.pid for rank in one.ranks.values())
        )
        proof = replace(proof, notes=(*proof.notes, *notes))
        if proof.verdict == UNCHANGED and proof.subject == "recording" and not any(run.num_rows for run in runs):
            text = f"the program left no row in a run in {self._recordings}, so the effect of recording is unknown"
            proof = replace(proof, verdict=UNKNOWN, text=f"{UNKNOWN}: {text}")
        for run in runs:
            keep_proof(proof, run.path)
        return Proven(proof, runs, self._said)

    def runs_of(self, *recorded: Observed) -> tuple[Run, ...]:
        """Return the runs that these launches have recorded. Runs from before the first launch do not count."""
        pids = {rank.pid for launch in recorded for rank in launch.ranks.values()}
        runs = []
        for found in runs_in(self._recordings, without=self._before) if self._recordings.is_dir() else ():
            with suppress(RecorderError):
                run = open_run(found.location)
                runs += [run] if any(writer.manifest.pid in pids for writer in run.writers) else []
        return tuple(runs)


def _wait(process: subprocess.Popen[bytes], folder: Path) -> int:
    patience_s = _END_S
    try:
        while patience_s > 0:
            with suppress(subprocess.TimeoutExpired):
                return process.wait(_POLL_S)
            patience_s -= _POLL_S if _is_done(folder) else 0
        return 0
    finally:
        if process.poll() is None:
            _end(process)


def _is_done(folder: Path) -> bool:
    """Return whether the probe ended the program on all ranks. If so, the exit code is not the program's own."""
    if (folder / RESUMED).is_dir():  # the launcher has restarted the ranks after they were killed
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


def _commit() -> str:
    """Return the git commit of the current folder, and whether files have changed since; empty if git knows none."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], capture_output=True, text=True, check=True, timeout=30)
        return done.stdout.strip()

    try:
        commit = git("rev-parse", "HEAD")
        return f"{commit}, changed" if git("status", "--porcelain", "--untracked-files=no") else commit
    except (OSError, subprocess.SubprocessError):
        return ""
