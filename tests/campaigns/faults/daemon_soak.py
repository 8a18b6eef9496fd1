"""An hour of shipping, watched from outside: memory, descriptors and threads of the daemon must not grow.

    python -m tests.campaigns daemon-soak --minutes 60

One job of two ranks records slowly all the while; each minute a short run comes and ends, and goes two minutes later,
once it is there. The metrics are asked for as Prometheus does. The daemon's settings are its defaults, but that
catalogs and checks are made every five minutes. The job seals its statistics every quarter of an hour, because an open
shard is in the daemon's memory while it is sent: it would be a shard that grows all the while, and not a daemon.
Judged as `soak` does. Exit code 1 on growth, on more memory than is promised, or if the daemon said an error.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from recorder.daemon.telemetry import running
from tests.rigs import jobs
from tests.rigs.server import BUCKET, StoreServer

from .daemon import record
from .soak import Sample, grown, sample
from .support import Progress, exit_code

_SCRAPE_S = 15.0
_RUN_S = 60.0
_SEAL_S = 900.0
_MAX_RSS_BYTES = 150_000_000
_SETTINGS = ("--keep-local=2m", "--check-s=300", "--listen=127.0.0.1:0")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--minutes", type=float, default=60.0, help="how long to ship (default 60)")
    parser.add_argument("--interval", type=float, default=2.0, help="seconds between two samples (default 2)")


def main(arguments: argparse.Namespace) -> int:
    seconds = 60 * arguments.minutes
    folder = Path(tempfile.mkdtemp(prefix="recorder-daemon-soak-"))
    recordings = folder / "recordings"
    recordings.mkdir()
    server = StoreServer()
    environment = server.environment(os.environ, folder)
    os.environ.clear()
    os.environ.update(environment)
    state = folder / "state"
    command = [sys.executable, "-m", "recorder", "daemon", "--watch", str(recordings), "--state", str(state)]
    with open(folder / "daemon.log", "ab") as log:
        daemon = subprocess.Popen([*command, "--to", f"s3://{BUCKET}/soak", *_SETTINGS], stderr=log)
    settings = jobs.recording(
        "site=* steps=::4 keep=stats; site=grad steps=::400 keep=tensor", dir=str(recordings), seal_stats_s=str(_SEAL_S)
    )
    script = Path(__file__).with_name("training.py")
    job = jobs.torchrun(folder / "job", script, f"--seconds={seconds}", "--pause=0.25", **settings)
    try:
        samples, num_runs = _watch(daemon.pid, folder, seconds, arguments.interval)
        daemon.terminate()
        code = daemon.wait(60)
    finally:
        daemon.kill()
        daemon.wait()
        job.kill()
    warm_up_s = max(0.2 * seconds, min(300.0, 0.4 * seconds))
    problems = [f"the daemon ended with {code}"] * (code != 0)
    problems += grown([one for one in samples if one.time_s >= warm_up_s], warm_up_s)
    most_bytes = max(one.rss_bytes for one in samples)
    problems += [f"{most_bytes} bytes of memory at most; promised are {_MAX_RSS_BYTES}"] * (most_bytes > _MAX_RSS_BYTES)
    log_text = (folder / "daemon.log").read_text(errors="replace")
    problems += [f"it said: {line}" for line in log_text.splitlines() if "rror" in line or "fails" in line]
    left = sorted(path.name for path in recordings.iterdir())
    num_removed = num_runs + 1 - len(left)
    print(
        f"{num_runs} short runs, of which {num_removed} were there and were removed here; {server.requests['PUT']} puts"
    )
    server.close()
    if not problems:
        shutil.rmtree(folder)
    return exit_code(problems)


def _watch(pid: int, folder: Path, seconds: float, interval_s: float) -> tuple[list[Sample], int]:
    """Watch the daemon for some seconds, and return the samples and the number of short runs."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.campaigns.faults.daemon"])
    began_s = time.monotonic()
    samples: list[Sample] = []
    progress, num_runs = Progress(round(seconds), "seconds"), 0
    next_scrape_s = next_run_s = began_s
    while (now_s := time.monotonic()) < began_s + seconds:
        if now_s >= next_run_s:
            next_run_s += _RUN_S
            context.Process(target=record, args=(folder / "recordings" / f"run-{num_runs}", num_runs)).start()
            num_runs += 1
        if now_s >= next_scrape_s:
            next_scrape_s += _SCRAPE_S
            for one in running(folder / "state"):
                if one.get("url"):
                    urllib.request.urlopen(f"{one['url']}/metrics", timeout=10).read()
        found = sample(pid, folder / "recordings", began_s)
        if found is None:
            raise RuntimeError(f"the daemon is gone; {folder}/daemon.log says why")
        samples.append(found)
        progress.show(round(found.time_s), str(found))
        time.sleep(interval_s)
    return samples, num_runs
