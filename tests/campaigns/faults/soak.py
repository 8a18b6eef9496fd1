"""An hour of recording, watched from outside: memory, descriptors, threads and disk must not grow.

    python -m tests.campaigns soak --minutes 60

A training of its own process (`soak_train.py`) with small shards and a small quota, so that retention runs all the
time. After a warm-up, slopes are fitted to means over blocks of time, so that neighbouring samples, which are alike,
do not pass for evidence. A quantity grows if its slope is above what is allowed with 99 % confidence. Where the
interval is wider than what is allowed nothing is known of it: that is said, and longer soaks tell. Exit code 1 on
growth, on more bytes than the quota, and on an account that does not balance.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import recorder
from tests.rigs.jobs import environment

from .support import Progress, exit_code

MIB = 1 << 20
QUOTA_BYTES = 24 * MIB
_SETTINGS = {
    "RECORDER_RULES": "site=* keep=stats; site=* steps=::5 keep=tensor,fingerprint",
    "RECORDER_MAX_BYTES": str(QUOTA_BYTES),
    "RECORDER_SHARD_BYTES": str(MIB),
    "RECORDER_POOL_BYTES": str(8 * MIB),
    "RECORDER_MIN_FREE_BYTES": str(64 * MIB),
}
_BLOCKS = 20
_LONG_S = 1200.0
"""From here on what certainly grows is growth, however wide its interval; before, memory is still settling."""
_T_99 = 2.55
"""One-sided 99 % of Student's t at 18 degrees of freedom: 20 blocks, two fitted numbers."""


class Sample(NamedTuple):
    time_s: float
    rss_bytes: int
    descriptors: int
    threads: int
    shards: int
    disk_bytes: int

    def __str__(self) -> str:
        return (
            f"{self.rss_bytes / MIB:7.1f} MiB  {self.descriptors} descriptors  {self.threads} threads"
            f"  {self.shards} files  {self.disk_bytes / MIB:5.1f} MiB on disk"
        )


@dataclass(frozen=True, kw_only=True)
class Slope:
    """Growth per hour, with half the width of its interval."""

    per_hour: float
    margin: float

    @property
    def certain(self) -> float:
        """It grows by at least this much an hour, with 99 % confidence."""
        return self.per_hour - self.margin


ALLOWED_PER_HOUR = {"rss_bytes": 4.0 * MIB, "descriptors": 1.0, "threads": 0.5}
"""What a soak must not certainly exceed. Of memory: the allocator's and CPython's own slow growth, seen without us."""


def slope(times_s: Sequence[float], values: Sequence[float], blocks: int = _BLOCKS) -> Slope:
    """Fit least squares over means of equal blocks of time. ValueError: there are fewer samples than blocks."""
    if len(times_s) < blocks:
        raise ValueError(f"{len(times_s)} samples for {blocks} blocks; soak for longer")
    edges = [len(times_s) * i // blocks for i in range(blocks + 1)]
    parts = [slice(low, high) for low, high in itertools.pairwise(edges)]
    x = [statistics.fmean(times_s[part]) / 3600 for part in parts]
    y = [statistics.fmean(values[part]) for part in parts]
    rate, at_zero = statistics.linear_regression(x, y)
    rest = sum((b - at_zero - rate * a) ** 2 for a, b in zip(x, y, strict=True))
    return Slope(
        per_hour=rate, margin=_T_99 * math.sqrt(rest / (blocks - 2)) / (statistics.pstdev(x) * math.sqrt(blocks))
    )


def sample(pid: int, folder: Path, began_s: float) -> Sample | None:
    """A look at a process and its directory; None where the process is gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        descriptors = len(os.listdir(f"/proc/{pid}/fd"))
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = dict(line.split(":", 1) for line in status.splitlines())
    if "VmRSS" not in fields:
        return None
    files = [path for path in folder.rglob("*") if ".arrow" in path.name or path.name.endswith(".index")]
    sizes: dict[int, int] = {}  # by inode: a shard that is being published has two names
    for path in files:
        try:
            found = path.stat()
        except FileNotFoundError:  # retired in between
            continue
        sizes[found.st_ino] = found.st_size
    return Sample(
        time_s=time.monotonic() - began_s,
        rss_bytes=int(fields["VmRSS"].split()[0]) * 1024,
        descriptors=descriptors,
        threads=int(fields["Threads"]),
        shards=len(sizes),
        disk_bytes=sum(sizes.values()),
    )


def watch(folder: Path, seconds: float, seed: int, interval_s: float) -> tuple[list[Sample], str]:
    """Train for so long; return the samples, and what the training said of itself. RuntimeError: it ended badly."""
    script = Path(__file__).with_name("soak_train.py")
    settings = {**_SETTINGS, "RECORDER_DIR": str(folder), "TORCHELASTIC_RUN_ID": str(uuid.UUID(int=seed + 1))}
    output = folder.parent / "output.txt"
    with output.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, str(script), str(seconds), str(seed)],
            env=environment(settings),
            stdout=file,
            stderr=subprocess.STDOUT,
            cwd=folder.parent,
        )
    began_s = time.monotonic()
    samples: list[Sample] = []
    progress = Progress(round(seconds), "seconds")
    try:
        while process.poll() is None and time.monotonic() < began_s + seconds + 120:
            found = sample(process.pid, folder, began_s)
            if found is not None:
                samples.append(found)
                progress.show(round(found.time_s), str(found))
            time.sleep(interval_s)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
    said = output.read_text(errors="replace")
    if process.returncode != 0:
        raise RuntimeError(f"the training ended with {process.returncode}:\n{said[-4000:]}")
    return samples, said


def judge(samples: Sequence[Sample], warm_up_s: float) -> list[str]:
    """Print each quantity's slope, and of which nothing is known. Returns what grew."""
    warm = [one for one in samples if one.time_s >= warm_up_s]
    problems = grown(warm, warm_up_s) if len(warm) >= _BLOCKS else []
    if len(warm) < _BLOCKS:
        print(f"too short to judge: {len(warm)} samples after {warm_up_s:.0f} s of warm-up")
    most_bytes = max((one.disk_bytes for one in samples), default=0)
    if most_bytes > QUOTA_BYTES:
        problems.append(f"{most_bytes} bytes on disk; the quota is {QUOTA_BYTES}")
    return problems


def grown(warm: Sequence[Sample], warm_up_s: float) -> list[str]:
    """Print each quantity's slope after the warm-up. Returns what grew."""
    times_s = [one.time_s for one in warm]
    span_s = times_s[-1] - times_s[0]
    problems, unknown = [], []
    print(f"{len(warm)} samples over {span_s:.0f} s, after {warm_up_s:.0f} s of warm-up")
    print(f"{'':<12} {'first':>10} {'last':>10} {'least':>10} {'most':>10} {'per hour':>10} {'+-':>10} {'allowed':>10}")
    for name in ("rss_bytes", "descriptors", "threads", "shards", "disk_bytes"):
        values = [float(getattr(one, name)) for one in warm]
        scale = MIB if name.endswith("_bytes") else 1
        found, allowed = slope(times_s, values), ALLOWED_PER_HOUR.get(name)
        numbers = [values[0], values[-1], min(values), max(values), found.per_hour, found.margin]
        shown = "".join(f" {number / scale:>10.2f}" for number in numbers)
        label = name.replace("_bytes", ", MiB")
        print(f"{label:<12}{shown} {'-' if allowed is None else f'{allowed / scale:.1f}':>10}")
        if allowed is None:
            continue
        is_certain = found.certain > allowed
        if found.margin > allowed and not (is_certain and span_s >= _LONG_S):
            unknown.append(
                f"too short to judge: {label} (+- {found.margin / scale:.1f}, allowed {allowed / scale:.1f})"
            )
        elif is_certain:
            problems.append(f"{label} grows by {found.per_hour / scale:.2f} an hour (allowed {allowed / scale:.1f})")
    for text in unknown:
        print(text)
    return problems


def accounts(folder: Path, said: str) -> list[str]:
    """What does not balance in the run that is left, and was not said while it was recorded."""
    run = recorder.open_run(folder)
    problems = [str(problem) for problem in run.problems]
    dropped: dict[str, int] = {}
    unclosed = []
    for writer in run.writers:
        balance = writer.balance
        for reason, count in balance.dropped.items():
            dropped[reason] = dropped.get(reason, 0) + count
        if balance.num_missing or writer.state != "closed":
            unclosed.append(f"{writer.directory}: {writer.state}, {balance.num_missing} rows without an account")
    if len(unclosed) > said.count("the recording is incomplete"):  # a disk too slow for the deadline, and it was said
        problems += unclosed
    total = sum(writer.balance.written for writer in run.writers)
    print(f"{len(run.writers)} writers, {total} rows written, dropped {dropped or 'none'}")
    return problems


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--minutes", type=float, default=60.0, help="how long to train (default 60)")
    parser.add_argument("--interval", type=float, default=2.0, help="seconds between two samples (default 2)")
    parser.add_argument("--dir", type=Path, help="keep the run here")


def main(arguments: argparse.Namespace) -> int:
    seconds = 60 * arguments.minutes
    base = arguments.dir or Path(tempfile.mkdtemp(prefix="soak-"))
    folder = base / "recordings"
    folder.mkdir(parents=True, exist_ok=True)
    try:
        samples, said = watch(folder, seconds, arguments.seed, min(arguments.interval, seconds / 60))
        print(f"\nthe training: {json.loads(said.splitlines()[-1])}", flush=True)
        problems = judge(samples, warm_up_s=max(0.2 * seconds, min(300.0, 0.4 * seconds)))
        problems += accounts(folder, said)
    except (RuntimeError, ValueError) as error:
        problems = [str(error)]
    finally:
        if arguments.dir is None:
            shutil.rmtree(base, ignore_errors=True)
    return exit_code(problems)
