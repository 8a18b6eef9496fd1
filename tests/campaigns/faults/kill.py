"""SIGKILL at random instants of real trainings, on one rank and on two, and what is left against a replay of them.

    python -m tests.campaigns kill --count 500

Each kill ends a process of its own that trains under the flag, forked from one that has imported everything and
recorded nothing; some are launched in full, under torchrun. Every row that is found must be what training had, as
`replay.py` computes it; as many must be found as were handed to the kernel, which the process notes in memory that
outlives it; and the package's own reader must find the same. What was observed and is in no file is the window of
loss: it is measured, by the interval at which rows are flushed.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import importlib
import mmap
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import uuid
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.dataset as ds
import torch

import recorder
from recorder.upkeep.repair import repair_run
from recorder.upkeep.verify import verify
from tests.rigs.jobs import environment

from .replay import Replay
from .support import Progress, batches_of, deadline_s, quantile, shards_of, writer_directories
from .training import make, train

_FORK: Any = multiprocessing.get_context("fork")
_MAX_NOTES = 200_000
_PEER_DEADLINE_S = 30.0
_PEER_GRACE_S = 3.0
_LAST_CASE_S = 150.0
"""What the last case and its check may take once no other begins."""
_WARM = (
    "recorder.lifecycle.active",
    "recorder.write.writer",
    "recorder.capture.staging.measure",
    "torch.distributed",
    "torch._dynamo",
)
"""Imported before the first fork: a kill costs none of it."""
_UNNAMED = "without a manifest"
_RULES = "site=* keep=tensor,stats,fingerprint"
Numbers = npt.NDArray[np.int64]
Victim = tuple[int, Numbers]
"""Of a rank that was killed alive: how many rows were written, and seq, bytes and time of the rows observed."""
Killed = tuple[int, list[Victim | None]]
"""When ranks were killed, and each rank; None for one that was not killed, or not alive."""


@dataclass(frozen=True, kw_only=True)
class Case:
    number: int
    world_size: int
    settings: dict[str, str]
    steps: int
    after_s: float
    """From the first value that was observed; see `is_early`."""
    victim: int | None
    """The rank that is killed; None for all."""
    is_launched: bool = False
    """By torchrun, and killed so long after that."""
    is_early: bool = False
    """Killed so long after the fork: perhaps before it has a directory."""

    @property
    def flush_interval_s(self) -> float:
        return float(self.settings["RECORDER_FLUSH_INTERVAL_S"])

    @property
    def may_retire(self) -> bool:
        return "RECORDER_MAX_BYTES" in self.settings


@dataclass(kw_only=True)
class Verdict:
    case: Case
    problems: list[str] = field(default_factory=list)
    num_rows: int = 0
    num_killed: int = 0
    """Processes that the signal met alive."""
    found: Counter[str] = field(default_factory=Counter)
    """Sealed and open shards, shards under both names, left-over temporary files, writers without a manifest."""
    losses: list[tuple[float, int, int]] = field(default_factory=list)
    """Seconds, bytes and rows of each killed rank."""


class Notes:
    """What a process notes of itself in memory that it shares with whoever kills it."""

    def __init__(self) -> None:
        region = mmap.mmap(-1, 64 + 24 * _MAX_NOTES)
        self._head: Numbers = np.frombuffer(region, np.int64, 8)
        self._notes: Numbers = np.frombuffer(region, np.int64, 3 * _MAX_NOTES, 64).reshape(-1, 3)

    def install(self) -> None:
        from recorder.write.ledger import Ledger
        from recorder.write.writer import Writer

        put, add_written = Writer.put, Ledger.add_written
        head, notes = self._head, self._notes

        def noted_put(writer: Writer, staged: Any) -> None:
            number = int(head[0])
            notes[number] = (staged.seq, len(staged.block.data), time.monotonic_ns())
            head[0] = number + 1
            put(writer, staged)

        def noted_written(ledger: Ledger, num_rows: int) -> None:
            head[1] += num_rows
            add_written(ledger, num_rows)

        setattr(Writer, "put", noted_put)  # noqa: B010 (a method of a class that mypy watches)
        setattr(Ledger, "add_written", noted_written)  # noqa: B010

    @property
    def has_begun(self) -> bool:
        return bool(self._head[0])

    def read(self) -> Victim:
        return int(self._head[1]), self._notes[: int(self._head[0])].copy()


def cases(count: int, seed: int, num_launched: int) -> list[Case]:
    """Trainings and instants; the last ones are launched in full."""
    chance = random.Random(seed)
    found = []
    for number in range(count):
        flush_s = chance.choice(("1.0", "1.0", "0.1", "0.02"))
        settings = {
            "RECORDER": "1",
            "RECORDER_RULES": _RULES,
            "RECORDER_MIN_FREE_BYTES": "0",
            "RECORDER_FLUSH_INTERVAL_S": flush_s,
            "RECORDER_SYNC_INTERVAL_S": chance.choice(("1.0", "0.05", "0")),
            "RECORDER_SHARD_BYTES": chance.choice(("1MiB", "1MiB", "256MiB")),
            "RECORDER_CODEC": chance.choice(("auto", "none", "zstd")),
            "RECORDER_DIRECT_IO": chance.choice(("auto", "off")),
        }
        if chance.random() < 0.1:
            settings["RECORDER_MAX_BYTES"] = "4MiB"
        world_size = chance.choice((1, 2))
        is_launched = number >= count - num_launched
        is_short = chance.random() < 0.3  # so that some instants lie in the orderly end
        longest_s = 0.4 if is_short else 1.6 if flush_s == "1.0" else 0.6
        found.append(
            Case(
                number=number,
                world_size=world_size,
                settings=settings,
                steps=chance.randrange(2, 40) if is_short and not is_launched else 100_000,
                after_s=chance.uniform(6.0, 12.0) if is_launched else chance.uniform(0.0, longest_s),
                victim=chance.choice((None, 0, 1)) if world_size == 2 else 0,
                is_launched=is_launched,
                is_early=chance.random() < 0.15,
            )
        )
    return found


def _train_in_fork(case: Case, rank: int, folder: Path, notes: Notes) -> None:
    """Run one rank, from the point where a fresh interpreter would `import torch`."""
    autoload: Any = importlib.import_module("recorder_autoload")
    output = os.open(folder / f"output.{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    own = {"RECORDER_DIR": str(folder / "runs"), "RANK": str(rank), "WORLD_SIZE": str(case.world_size)}
    os.environ.update({**case.settings, **own, "TORCHELASTIC_RUN_ID": str(uuid.UUID(int=case.number + 1))})
    atexit._clear()
    notes.install()
    autoload.start()
    try:
        train(case.steps, store=f"file://{folder}/store")
    finally:
        atexit._run_exitfuncs()


def run_case(case: Case, folder: Path) -> Killed:
    return _run_launched(case, folder) if case.is_launched else _run_forked(case, folder)


def _run_forked(case: Case, folder: Path) -> Killed:
    notes = [Notes() for _ in range(case.world_size)]
    ranks = [
        _FORK.Process(target=_train_in_fork, args=(case, rank, folder, notes[rank])) for rank in range(case.world_size)
    ]
    try:
        for process in ranks:
            process.start()
        until_s = time.monotonic() + _PEER_DEADLINE_S
        while not case.is_early and time.monotonic() < until_s and not any(one.has_begun for one in notes):
            time.sleep(0.002)
        time.sleep(case.after_s)
        victims = range(case.world_size) if case.victim is None else [case.victim]
        killed_ns = time.monotonic_ns()
        for rank in victims:
            os.kill(ranks[rank].pid, signal.SIGKILL)
        for rank in victims:
            ranks[rank].join(_PEER_DEADLINE_S)
        for process in ranks:  # the peer meets a broken connection, and ends with an exception or by a signal
            process.join(_PEER_GRACE_S)
    finally:  # a driver that fails leaves none that trains on
        for process in ranks:
            if process.is_alive():
                process.kill()
                process.join(_PEER_DEADLINE_S)
    return killed_ns, [
        notes[rank].read() if rank in victims and process.exitcode == -signal.SIGKILL else None
        for rank, process in enumerate(ranks)
    ]


def _run_launched(case: Case, folder: Path) -> Killed:
    """Launch as a user does, and kill every process at once. Without notes, only values and accounts are checked."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*launcher, f"--nproc-per-node={case.world_size}", "-m", "tests.campaigns.faults.training"]
    settings = {**case.settings, "RECORDER_DIR": str(folder / "runs"), "PYTHONPATH": str(Path(__file__).parents[3])}
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(
            command, env=environment(settings), stdout=output, stderr=output, cwd=folder, start_new_session=True
        )
    time.sleep(case.after_s)
    found = [process.pid, *_children(process.pid)]
    killed_ns = time.monotonic_ns()
    for pid in found:
        os.kill(pid, signal.SIGKILL)
    process.wait()
    for pid in found[1:]:  # not ours to wait for
        until_s = time.monotonic() + _PEER_DEADLINE_S
        while _is_running(pid) and time.monotonic() < until_s:
            time.sleep(0.01)
    return killed_ns, [None] * case.world_size


def _children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [found for child in map(int, text.split()) for found in (child, *_children(child))]


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


class Checker:
    """Checks the files that a kill left behind."""

    def __init__(self) -> None:
        self._replays = {world_size: Replay(world_size) for world_size in (1, 2)}

    def check(self, case: Case, folder: Path, killed_ns: int, victims: list[Victim | None]) -> Verdict:
        verdict = Verdict(case=case)
        directories = writer_directories(folder / "runs")
        ranks = [int(path.parent.name.removeprefix("rank=")) for path in directories]
        if len(set(ranks)) != len(ranks):
            verdict.problems.append(f"several writers of one rank: {directories}")
        seqs = {rank: self._check_writer(path, verdict) for rank, path in zip(ranks, directories, strict=True)}
        for rank, path in zip(ranks, directories, strict=True):
            if not (path / "_writer.json").exists():
                self._let_a_minute_pass(path, len(seqs[rank]), verdict)
        for rank, victim in enumerate(victims):
            if victim is not None:
                self._measure(verdict, seqs.get(rank, np.zeros(0, np.int64)), victim, killed_ns)
        verdict.num_killed = sum(victim is not None for victim in victims) or int(case.is_launched)
        self._check_reader(folder / "runs", seqs, verdict)
        if case.number % 2:
            self._check_repair(folder / "runs", verdict)
        return verdict

    def _check_writer(self, directory: Path, verdict: Verdict) -> Numbers:
        """Every row of a writer; returns their numbers."""
        replay = self._replays[verdict.case.world_size]
        for path, is_sealed in shards_of(directory):
            verdict.found["sealed" if is_sealed else "open"] += 1
            verdict.found["both names"] += is_sealed and (directory / f"_{path.name}.open").exists()
        verdict.found["temporary files"] += len(list(directory.glob("*.tmp")))
        seqs: list[int] = []
        written = [0]
        try:
            for batch, header in batches_of(directory):
                written.append(header.ledger["written"] - header.ledger["retired"]["rows"])
                if header.ledger["dropped"]:
                    verdict.problems.append(f"{directory}: dropped {header.ledger['dropped']}")
                for row in batch.to_pylist():
                    seqs.append(row["seq"])
                    if problem := replay.problem(row):
                        verdict.problems.append(problem)
        except Exception as error:
            verdict.problems.append(f"{directory}: cannot be read: {type(error).__name__}: {error}")
        verdict.num_rows += len(seqs)
        if len(set(seqs)) != len(seqs):
            verdict.problems.append(f"{directory}: {len(seqs) - len(set(seqs))} rows are there twice")
        if not verdict.case.may_retire and max(written) != len(seqs):
            verdict.problems.append(f"{directory}: {len(seqs)} rows, its accounts say {max(written)}")
        return np.array(seqs, np.int64)

    @staticmethod
    def _let_a_minute_pass(directory: Path, num_rows: int, verdict: Verdict) -> None:
        """Of one killed before there was a manifest nobody can tell whether it lives; quiet, it is taken for dead."""
        verdict.found[_UNNAMED] += 1
        if num_rows:
            verdict.problems.append(f"{directory}: has {num_rows} rows and no manifest")
        for path in [*directory.iterdir(), directory]:
            os.utime(path, (time.time() - 61, time.time() - 61))

    @staticmethod
    def _measure(verdict: Verdict, seqs: Numbers, victim: Victim, killed_ns: int) -> None:
        num_written, notes = victim
        if verdict.case.may_retire:
            return
        if len(seqs) < num_written:
            verdict.problems.append(f"{len(seqs)} rows are there, {num_written} were written when it was killed")
        seen = notes[notes[:, 2] <= killed_ns]
        lost = seen[~np.isin(seen[:, 0], seqs)]
        window_s = (killed_ns - int(lost[:, 2].min())) / 1e9 if len(lost) else 0.0
        verdict.losses.append((window_s, int(lost[:, 1].sum()), len(lost)))

    @staticmethod
    def _check_reader(runs: Path, seqs: Mapping[int, Numbers], verdict: Verdict) -> None:
        """The package's own reader finds the same, and says that it is not whole."""
        for path in sorted(runs.glob("*/_run.json")):
            try:
                run = recorder.open_run(path.parent)
                for writer in run.writers:
                    found = np.sort(writer.column("seq").to_numpy())
                    if writer.rank is None or not np.array_equal(found, np.sort(seqs[writer.rank])):
                        verdict.problems.append(f"{writer.directory}: the package reads {len(found)} rows, others more")
                    if writer.state == "recording":
                        verdict.problems.append(f"{writer.directory}: is said to be recording yet")
                    if writer.state == "unclosed" and not writer.ending:
                        verdict.problems.append(f"{writer.directory}: nothing is said of its end")
                verdict.problems += run.problems
                verdict.problems += [finding.text for finding in verify(run) if finding.is_fault]
            except Exception as error:
                verdict.problems.append(f"{path.parent}: {type(error).__name__}: {error}")

    @staticmethod
    def _check_repair(runs: Path, verdict: Verdict) -> None:
        """After a repair every Arrow reader finds the rows that there were, and nothing is left to complain of."""
        for path in sorted(runs.glob("*/_run.json")):
            try:
                before = _all_seqs(path.parent)
                for outcome in repair_run(recorder.open_run(path.parent), assume_dead=_UNNAMED in verdict.found):
                    verdict.found[f"shards {outcome.what}" if outcome.what == "sealed" else outcome.what] += 1
                    if outcome.what in ("failed", "skipped", "kept"):
                        verdict.problems.append(f"repair: {outcome}")
                after = _all_seqs(path.parent)
                table = ds.dataset(path.parent, format="ipc").to_table(columns=["seq"]) if any(after.values()) else []
                if after != before or len(table) != sum(map(len, after.values())):
                    verdict.problems.append(f"{path.parent}: repair changed which rows there are")
                left = [str(one) for one in path.parent.rglob("*") if one.name.endswith((".open", ".tmp"))]
                faults = [found.text for found in verify(recorder.open_run(path.parent)) if found.is_fault]
                verdict.problems += [f"after repair: {text}" for text in left + faults]
            except Exception as error:
                verdict.problems.append(f"{path.parent}: repair: {type(error).__name__}: {error}")


def _all_seqs(run: Path) -> dict[Path, list[int]]:
    return {writer.directory: sorted(writer.column("seq").to_pylist()) for writer in recorder.open_run(run).writers}


class CampaignError(Exception):
    """A process of the campaign itself has failed: nothing is shown."""


def _drive(mine: list[Case], base: Path, report: Connection, until_s: float, is_over: Event) -> None:
    """Run cases one after the other while another process checks the one before."""
    ours, theirs = _FORK.Pipe()
    checker = _FORK.Process(target=_serve, args=(theirs, ours, report))
    checker.start()
    theirs.close()
    problem = None
    try:
        for case in mine:
            if time.monotonic() > until_s or is_over.is_set():
                break
            folder = base / str(case.number)
            folder.mkdir()
            ours.send((case, folder, *run_case(case, folder)))
            ours.recv()  # the checker has taken the one before: at most two wait on the disk
    except (EOFError, ConnectionError):
        pass  # the checker has failed, and says so itself
    except Exception:
        problem = f"a driver failed:\n{traceback.format_exc()}"
    ours.close()
    checker.join()  # it has the pipe to itself until it ends
    if problem is None and checker.exitcode:
        problem = f"a checker ended with {checker.exitcode}"
    if problem is not None:
        report.send(CampaignError(problem))


def _serve(tasks: Connection, drivers: Connection, report: Connection) -> None:
    drivers.close()  # or its end would never be seen
    try:
        checker = Checker()
        while True:
            try:
                case, folder, killed_ns, victims = tasks.recv()
            except EOFError:
                return
            tasks.send(None)
            try:
                verdict = checker.check(case, folder, killed_ns, victims)
            except Exception as error:
                verdict = Verdict(case=case, problems=[f"the check failed: {type(error).__name__}: {error}"])
            if not verdict.problems:
                shutil.rmtree(folder)
            report.send(verdict)
    except Exception:
        report.send(CampaignError(f"a checker failed:\n{traceback.format_exc()}"))


def campaign(wanted: list[Case], base: Path, jobs: int, minutes: float | None = None) -> list[Verdict]:
    """Run cases, in several processes, and begin none after so many minutes.

    CampaignError: a process of the campaign itself failed, or did not end in time.
    """
    until_s = deadline_s(minutes)
    torch.set_num_threads(1)
    for name in _WARM:
        importlib.import_module(name)
    make(0)  # the first optimizer of a process costs a second of imports
    is_over = _FORK.Event()
    drivers: dict[Connection, Any] = {}
    for job in range(jobs):
        ours, theirs = _FORK.Pipe(duplex=False)
        driver = _FORK.Process(target=_drive, args=(wanted[job::jobs], base, theirs, until_s, is_over))
        driver.start()
        theirs.close()
        drivers[ours] = driver
    verdicts: list[Verdict] = []
    failure: CampaignError | None = None
    progress = Progress(len(wanted), "kills")
    while drivers:
        for pipe in wait(list(drivers), 1.0):
            assert isinstance(pipe, Connection)
            try:
                found = pipe.recv()
            except EOFError:
                driver = drivers.pop(pipe)
                driver.join()
                if driver.exitcode and failure is None:
                    failure = CampaignError(f"a driver ended with {driver.exitcode}")
                continue
            if isinstance(found, Verdict):
                verdicts.append(found)
            else:
                failure = failure or found
        if failure is not None:
            is_over.set()  # the others end after the case they are at
            until_s = min(until_s, time.monotonic())
        if time.monotonic() > until_s + _LAST_CASE_S:
            for driver in drivers.values():
                for pid in [*_children(driver.pid), driver.pid]:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            raise failure or CampaignError(f"{len(drivers)} processes hang")
        progress.show(len(verdicts), f"{sum(len(v.problems) for v in verdicts)} problems")
    if failure is not None:
        raise failure
    return verdicts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--count", type=int, default=500, help="kills (default 500)")
    parser.add_argument("--jobs", type=int, default=2, help="trainings at a time (default 2)")
    parser.add_argument("--launched", type=int, default=4, help="of them launched in full, by torchrun (default 4)")
    parser.add_argument("--dir", type=Path, help="where to record; what failed is left there")


def main(arguments: argparse.Namespace) -> int:
    base = arguments.dir or Path(tempfile.mkdtemp(prefix="kill-"))
    base.mkdir(parents=True, exist_ok=True)
    wanted = cases(arguments.count, arguments.seed, arguments.launched)
    start_s = time.monotonic()
    try:
        verdicts = campaign(wanted, base, arguments.jobs, arguments.minutes)
    except CampaignError as error:
        print(f"PROBLEM: {error}")
        return 1
    print_table(verdicts, time.monotonic() - start_s)
    missing = len(wanted) - len(verdicts)
    if missing and arguments.minutes:
        print(f"{missing} cases were left out: {arguments.minutes:g} minutes were over")
        missing = 0
    elif missing:
        print(f"{missing} cases never came to an end")
    if not sum(verdict.num_rows for verdict in verdicts):
        print("nothing was recorded, so nothing was shown")
        missing = missing or 1
    problems = [(verdict.case, text) for verdict in verdicts for text in verdict.problems]
    for case, text in problems[:20]:
        print(f"PROBLEM in case {case.number} ({base / str(case.number)}): {text}")
    if not problems and not missing and not arguments.dir:
        shutil.rmtree(base)
    return 1 if problems or missing else 0


def print_table(verdicts: list[Verdict], spent_s: float) -> None:
    """Counts, then the window of loss by flush interval."""
    found: Counter[str] = sum((v.found for v in verdicts), Counter())
    ranks = Counter(verdict.case.world_size for verdict in verdicts)
    print(f"{len(verdicts)} trainings in {spent_s:.0f} s: {ranks[1]} on 1 rank, {ranks[2]} on 2 ranks")
    print(f"processes killed alive  {sum(v.num_killed for v in verdicts)}")
    print(f"rows compared           {sum(v.num_rows for v in verdicts)}")
    print(f"problems                {sum(len(v.problems) for v in verdicts)}")
    words = ("sealed", "open", "both names", "temporary files", _UNNAMED)
    for word in words:
        print(f"{word:<23} {found[word]}")
    outcomes = ", ".join(f"{number} {word}" for word, number in sorted(found.items()) if word not in words)
    print(f"every other one repaired: {outcomes}")
    print("\nobserved before the kill and in no file:")
    print(f"{'flush interval':<15} {'kills':>6}  " + "  ".join(f"{w:>24}" for w in ("seconds", "KB", "rows")))
    print(" " * 22 + "  ".join([f"{'median':>8}{'p99':>8}{'max':>8}"] * 3))
    for flush_s in sorted({verdict.case.flush_interval_s for verdict in verdicts}):
        losses = [loss for v in verdicts if v.case.flush_interval_s == flush_s for loss in v.losses]
        columns = [[s for s, _, _ in losses], [b / 1000 for _, b, _ in losses], [float(r) for _, _, r in losses]]
        texts = []
        for values, digits in zip(columns, (2, 0, 0), strict=True):
            texts.append("".join(f"{quantile(values, share):>8.{digits}f}" for share in (0.5, 0.99, 1.0)))
        print(f"{flush_s:<15g} {len(losses):>6}  " + "  ".join(texts))
