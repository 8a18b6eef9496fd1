"""Shows whether a program trains the same with the recorder: `prove` runs the program three times and compares.

`judge` compares two plain launches with a recorded one, without any process or file. torch is never imported here.
"""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from ..config import FLAG, PREFIX, load_settings
from ..errors import LookupFailedError, RecorderError
from ..run.finding import runs_in, typed_for
from ..run.notes import proof_state
from ..run.reply import Reply, StateLine
from ..run.run import Run, open_run
from ..run.status import CHANGED, UNCHANGED, UNKNOWN, Proof, keep_proof
from ..system.text import counted, listed, named, printable

_KINDS = {
    "grad": "gradient",
    "param": "parameter",
    "buffer": "buffer",
    "optim": "optimizer state",
    "rng": "random state",
}
"""The word for each kind of digest. A difference of one kind causes differences of the later kinds."""
_UNSEEDED = ("rng python", "rng numpy")
"""The random states that the operating system seeds in each process, unless the program does."""
_MAX_LISTED = 4


class _Difference(NamedTuple):
    step: int
    rank: int
    key: str


@dataclass(frozen=True, slots=True)
class _Course:
    differences: Sequence[_Difference]
    """The differences on all ranks at the first step with a difference."""
    num_compared: int

    @property
    def step(self) -> int | None:
        return self.differences[0].step if self.differences else None


def judge(plain: Observed, again: Observed, recorded: Observed, *, num_steps: int) -> Proof:
    """Return whether the recorder has changed the training.

    Differences between the two plain launches, `plain` and `again`, are the program's own. Each launch was asked to
    make `num_steps` steps.
    """
    notes: list[str] = []
    compared = min(plain.num_steps, recorded.num_steps)

    def tell(verdict: str, text: str, first_step: int | None = None) -> Proof:
        return Proof(
            verdict=verdict, text=text, steps=compared, ranks=len(plain.ranks), first_step=first_step,
            notes=tuple(notes), time_ns=time.time_ns(),
        )  # fmt: skip

    if not plain.ranks:
        text = "without the recorder no step of an optimizer was seen before the program ended"
        return tell(UNKNOWN, f"{UNKNOWN}: {text} with exit code {plain.exit_code}")
    ignored = _unseeded(plain, again)
    if ignored:
        generators = " and ".join(sorted(key.partition(" ")[2] for key in ignored))
        notes.append(f"the random state of {generators} is not compared: the program does not seed it")
    looks = [seen.looks[0].digests for seen in plain.ranks.values() if seen.looks]
    if unread := sorted({key for look in looks for key, digest in look.items() if digest.startswith("unread")}):
        notes.append(f"not compared, since their bits cannot be read here: {listed(unread, _MAX_LISTED)}")
    itself, other = _compare(plain, again, ignored), _compare(plain, recorded, ignored)
    if (own := _ends(plain, again)) and itself.step is None:
        return tell(UNKNOWN, f"{UNKNOWN}: without the recorder the program differs by itself: {own}")
    if other.step is not None and (itself.step is None or other.step < itself.step):
        text = f"from step {other.step} on: {_described(other.differences)}"
        return tell(CHANGED, f"{CHANGED} {text}", other.step)
    if itself.step is not None:
        text = f"differs by itself from step {itself.step} on: {_described(itself.differences)}"
        if itself.step:
            notes.append(f"up to step {itself.step - 1} the recorder changed nothing")
        return tell(UNKNOWN, f"{UNKNOWN}: {text}", itself.step)
    if ends := _ends(plain, recorded):
        return tell(CHANGED, f"{CHANGED}: {ends}")
    lines, num_lines = _compare_printed(plain, again, recorded, notes)
    if lines:
        return tell(CHANGED, f"{CHANGED}: {lines}")
    if plain.num_steps < num_steps:
        notes.append(f"the program ended by itself after {counted(plain.num_steps, 'step')} of {num_steps}")
    if plain.exit_code:
        notes.append(f"the program ends with exit code {plain.exit_code}, with the recorder and without")
    text = (
        f"{UNCHANGED}: {counted(compared, 'step')} of {counted(len(plain.ranks), 'rank')}, "
        f"{other.num_compared:,} values and {counted(num_lines, 'printed line')}, bit by bit"
    )
    return tell(UNCHANGED, text)


def _unseeded(plain: Observed, again: Observed) -> set[str]:
    unseeded = set()
    for rank, seen in plain.ranks.items():
        other = again.ranks.get(rank)
        if other is not None and other.looks and seen.looks:
            a, b = seen.looks[0].digests, other.looks[0].digests
            unseeded |= {key for key in _UNSEEDED if a.get(key) != b.get(key)}
    return unseeded


def _compare(a: Observed, b: Observed, ignored: set[str]) -> _Course:
    differences: list[_Difference] = []
    num_compared = 0
    for rank in a.ranks.keys() & b.ranks.keys():
        for one, other in zip(a.ranks[rank].looks, b.ranks[rank].looks, strict=False):
            keys = (one.digests.keys() | other.digests.keys()) - ignored
            differing = [key for key in keys if one.digests.get(key) != other.digests.get(key)]
            num_compared += len(keys)
            differences += [_Difference(one.step, rank, key) for key in differing]
            if differing:
                break
    first = min((difference.step for difference in differences), default=None)
    return _Course(sorted(one for one in differences if one.step == first), num_compared)


def _ends(a: Observed, b: Observed) -> str:
    if a.ranks.keys() != b.ranks.keys():
        then = named("rank", sorted(b.ranks)) if b.ranks else "none"
        return f"{named('rank', sorted(a.ranks))} trained, then {then} (exit codes {a.exit_code} and {b.exit_code})"
    for rank in a.ranks:
        if a.ranks[rank].num_steps != b.ranks[rank].num_steps:
            steps = f"{counted(a.ranks[rank].num_steps, 'step')}, then {b.ranks[rank].num_steps}"
            return f"rank {rank} took {steps} (exit codes {a.exit_code} and {b.exit_code})"
        if len(a.ranks[rank].looks) != len(b.ranks[rank].looks):
            return f"rank {rank}: another number of optimizer steps between two steps"
    if a.exit_code != b.exit_code:
        return f"the program ended with exit code {a.exit_code}, then with {b.exit_code}"
    return ""


def _described(differences: Sequence[_Difference]) -> str:
    told = []
    for kind, noun in _KINDS.items():
        ranks_of: dict[str, list[int]] = {}
        for one in differences:
            its_kind, _, name = one.key.partition(" ")
            if its_kind == kind:
                ranks_of.setdefault(name, []).append(one.rank)
        if ranks_of:
            names = listed(list(ranks_of), _MAX_LISTED)
            ranks = sorted({rank for some in ranks_of.values() for rank in some})
            told.append(f"{noun} {names} on {named('rank', ranks)}")
    return "; ".join(told)


def _compare_printed(plain: Observed, again: Observed, recorded: Observed, notes: list[str]) -> tuple[str, int]:
    """Return the first difference in the lines that ranks printed, and how many lines were compared."""
    num_compared = num_left_out = 0
    problem = ""
    for rank in plain.ranks:
        first, second, third = (Counter(seen.ranks[rank].printed) for seen in (plain, again, recorded))
        common = first & second
        own = (first - common).total()
        num_compared, num_left_out = num_compared + common.total(), num_left_out + own
        missing, more = common - third, third - common
        if missing and not problem:
            problem = f"rank {rank} does not print {_shown(missing)} under the recorder"
        elif more.total() > max(own, (second - common).total()) and not problem:
            problem = f"rank {rank} prints {_shown(more)} under the recorder"
    if num_left_out:
        lines = counted(num_left_out, "printed line")
        notes.append(f"{lines} not compared: they differ without the recorder, too, as times do")
    return problem, num_compared


def _shown(lines: Counter[str]) -> str:
    return repr(next(iter(lines))[:80])


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
            printed=tuple(text.splitlines()),
        )
    return Observed(exit_code=exit_code, ranks=dict(sorted(ranks.items())))


def _lines(path: Path) -> list[dict[str, Any]]:
    """Read the JSON objects of a file. The last line of a killed process may be cut, and is left out."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if line[-1] == "\n"]


_PROBE, _PROBE_STEPS = "_RECORDER_PROBE", "_RECORDER_PROBE_STEPS"
"""The environment variables that configure `recorder_probe`, which does not import this package."""
_END_S = 90.0
"""The seconds that a program may take to end once all its ranks have done their steps."""
_POLL_S = 0.2
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
        names = ("verdict", "text", "steps", "ranks", "first_step", "notes")
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


def prove(
    command: Sequence[str], environ: Mapping[str, str], *, num_steps: int, report: Callable[[str], None]
) -> Proven:
    """Run a program three times and judge whether the recorder changes it; if it seems so, run it a fourth time.

    `environ` is the environment that records, with the user's settings. `report` is called with a text about the next
    launch. Raises LookupFailedError if two processes trained as one rank, and OSError if the command cannot be run.
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
    def __init__(self, command: Sequence[str], folder: Path, num_steps: int, report: Callable[[str], None]) -> None:
        self._command = list(command)
        self._folder = folder
        self._num_steps = num_steps
        self._report = report
        self._num_launches = 0
        self.said = ""
        """The last lines that the last failed launch wrote."""

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
    num_done = len(list(folder.glob("*.done")))
    return num_done > 0 and num_done == len(list(folder.glob("*.jsonl")))


def _end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _runs_of(folder: Path, before: set[str], recorded: Observed) -> list[Run]:
    pids = {rank.pid for rank in recorded.ranks.values()}
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
