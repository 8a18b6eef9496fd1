"""`kill -9` of the daemon and of its store at random instants, over live jobs, until all is there.

Jobs of two gloo ranks under torchrun record all the while, one after the other, beside short runs of one writer; some
are killed. A daemon ships to an S3 server through a proxy that is slow, cuts, answers 500, 503 and 403, damages and
lies, and is killed again and again, now and then after it was stopped for a while; the server is killed, stopped for a
while, and comes back, now and then empty. Between two kills a reader opens what is there. Each sealed shard that is
ever here is kept aside by a hard link. At the end one daemon is left alone with the store: then every byte there must
be that here, nothing may be lost, there twice or left over, `verify` must be clean on both sides, and what was removed
here (`--keep-local 15s`) must be there.

rclone's server is used where `rclone` is installed, else moto's, which is empty after each kill.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError

import recorder
from recorder.daemon.daemon import Daemon
from recorder.daemon.fleet import NODE
from recorder.daemon.settings import DaemonSettings
from recorder.errors import RecorderError
from recorder.format.rundir import index_name
from recorder.records import KEEP_STATS, KEEP_TENSOR
from recorder.system.processes import own_process
from recorder.upkeep.verify import verify
from tests.rigs import jobs
from tests.rigs.jobs import free_port
from tests.rigs.proxy import FAULTS, FaultyProxy
from tests.rigs.server import BUCKET, client_of, store_environment
from tests.rigs.writer import Rig

from .support import deadline_s

_PATIENCE_S = 60.0


class StoreProcess:
    """Serves `BUCKET` from `start` to `kill`."""

    def __init__(self, folder: Path, kind: str) -> None:
        """Prepare ``rclone`` or ``moto``; rclone keeps objects in `folder`, which also has what the server says."""
        self.is_lasting = kind == "rclone"
        """Whether objects outlive a kill."""
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._objects = folder / "objects"
        self._log = folder / "store.log"
        if self.is_lasting:
            (self._objects / BUCKET).mkdir(parents=True)
            self._command = ["rclone", "serve", "s3", "--addr", f"127.0.0.1:{port}", str(self._objects)]
        else:
            self._command = [sys.executable, "-c", "from moto.server import main; main()", "-p", str(port)]
        self.client = client_of(self.url, read_timeout=60, max_attempts=3)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with open(self._log, "ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log)
        until_s = time.monotonic() + _PATIENCE_S
        while True:
            try:
                if self.is_lasting:
                    self.client.head_bucket(Bucket=BUCKET)
                else:
                    self.client.create_bucket(Bucket=BUCKET)
                return
            except (BotoCoreError, ClientError):
                assert time.monotonic() < until_s, f"the store does not start: {self._log}"
                time.sleep(0.05)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def stop(self) -> None:
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGCONT)

    def empty(self) -> None:
        """Lose all objects, while it is not running."""
        assert self._process is None
        if self.is_lasting:
            shutil.rmtree(self._objects / BUCKET)
            (self._objects / BUCKET).mkdir()


_FAULT_SHARE = 0.04
_STOPPED_SHARE = 0.03
"""Daemons that are stopped by SIGSTOP and go on, for some seconds or a minute, before they are killed."""
_PREFIX = "fleet"
_RULES = "site=* keep=stats; site=grad,output steps=::10 keep=tensor"
_KILLS_A_STORE = 10
"""Kills of the daemon for each of the store."""
_NUM_VERIFIED = 12
"""Runs that are verified in the store, too, at the end."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--keep-local", default="all", help="as of the daemon; a time removes what is there")
    parser.add_argument("--store", choices=("rclone", "moto"), help="by default rclone, where it is installed")


def main(arguments: argparse.Namespace) -> int:
    count = arguments.count or 1000
    until_s = deadline_s(arguments.minutes)
    draw = random.Random(arguments.seed)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.campaigns.faults.daemon"])
    folder = Path(tempfile.mkdtemp(prefix="recorder-daemon-"))
    recordings = folder / "recordings"
    store = StoreProcess(folder, arguments.store or ("rclone" if shutil.which("rclone") else "moto"))
    store.start()
    proxy = FaultyProxy(
        store.url,
        lambda method, path: draw.choice(FAULTS) if draw.random() < _FAULT_SHARE else None,
        mends=store.is_lasting,
    )
    proxy.slow_s = 0.05
    door = FaultyProxy(store.url, mends=store.is_lasting)
    environment = store_environment(store.url, os.environ, folder)
    os.environ.clear()
    os.environ.update(environment | {"AWS_ENDPOINT_URL": proxy.url})
    problems: list[str] = []
    outages = _Outages(store, draw, may_lose=arguments.keep_local == "all")
    shards = _Shards(recordings, folder / "aside")
    jobs_begun, num_runs = 0, 0
    writer: Any = None
    job: jobs.Job | None = None
    try:
        num_kills = num_reads = num_stops = 0
        while num_kills < count and time.monotonic() < until_s:
            if writer is None or not writer.is_alive():
                writer = context.Process(target=record, args=(recordings / f"run-{num_runs}", num_runs))
                writer.start()
                num_runs += 1
            if job is None or job.process.poll() is not None:
                job = _begin_job(folder, jobs_begun, draw)
                jobs_begun += 1
            daemon = context.Process(target=_ship, args=(folder, arguments.keep_local, False, proxy.url))
            daemon.start()
            time.sleep(draw.uniform(0.02, 1.5))
            assert daemon.pid is not None
            if draw.random() < _STOPPED_SHARE:
                os.kill(daemon.pid, signal.SIGSTOP)
                time.sleep(60.0 if draw.random() < 0.1 else draw.uniform(0.5, 5.0))
                os.kill(daemon.pid, signal.SIGCONT)
                num_stops += 1
                time.sleep(draw.uniform(0.02, 1.5))
            daemon.kill()
            daemon.join()
            num_kills += 1
            if daemon.exitcode != -signal.SIGKILL:
                problems.append(f"kill {num_kills}: the daemon had ended with {daemon.exitcode}")
            if num_kills % _KILLS_A_STORE == 0:
                outages.next()
            if num_kills % 25 == 0 and outages.is_over:
                num_reads += 1
                problems += _look(store, door.url, num_kills)
            if num_kills % 50 == 0:
                num_faults = sum(proxy.seen[fault] for fault in FAULTS)
                print(
                    f"{num_kills} kills, {outages}, {jobs_begun} jobs, {num_runs} short runs, {num_faults} faults",
                    flush=True,
                )
        outages.end()
        if writer is not None:
            writer.join()
        if job is not None:
            job.process.wait(jobs.DEADLINE_S)
        proxy.fault = lambda method, path: None
        last = context.Process(target=_ship, args=(folder, "all", True, proxy.url))
        last.start()
        last.join()
        shards.close()
        if last.exitcode != 0:
            problems.append(f"the last daemon ended with {last.exitcode}")
        problems += _compare(store, door.url, folder, shards.folder)
        faults = {fault: proxy.seen[fault] for fault in FAULTS}
        num_requests = sum(proxy.seen.values()) - proxy.seen["none"] - sum(faults.values())
        print(
            f"{num_kills} kills of the daemon ({num_stops} times it was stopped before), {outages};"
            f" {jobs_begun} jobs of 2 ranks and {num_runs} short runs"
        )
        print(f"{shards.num_linked} sealed shards were here; {num_reads} looks between; {num_requests} requests")
        print(f"faults of requests: {faults}")
    finally:
        shards.close()
        if job is not None:
            job.kill()
        outages.end()
        proxy.close()
        door.close()
        store.kill()
    log = (folder / "daemon.log").read_text(errors="replace")
    problems += [f"daemon.log has {log.count('Traceback')} tracebacks"] * ("Traceback" in log)
    for problem in problems:
        print(f"FOUND: {problem}")
    if not problems:
        shutil.rmtree(folder)
        print("nothing lost, nothing twice, every byte equal, verify clean here and there")
    else:
        print(f"kept: {folder}")
    return int(bool(problems))


class _Outages:
    """The outages of the store: usually it is killed, sometimes it hangs or loses everything."""

    def __init__(self, store: StoreProcess, draw: random.Random, *, may_lose: bool) -> None:
        self._store, self._draw, self._may_lose = store, draw, may_lose
        self._thread: threading.Thread | None = None
        self.num_kills = self.num_stops = self.num_losses = 0

    def __str__(self) -> str:
        return f"{self.num_kills} of the store ({self.num_losses} times it came back empty), {self.num_stops} stops"

    @property
    def is_over(self) -> bool:
        return self._thread is None or not self._thread.is_alive()

    def next(self) -> None:
        """Kill the store once the last outage is over; its return goes on in parallel with the kills of the daemon."""
        self.end()
        seconds, kind = self._draw.uniform(0.05, 4), self._draw.random()
        self._store.kill()
        self.num_kills += 1
        if self._may_lose and (kind < 0.1 or not self._store.is_lasting):
            self._store.empty()
            self.num_losses += 1
        is_stop = kind > 0.85
        self.num_stops += is_stop

        def come_back() -> None:
            time.sleep(seconds)
            self._store.start()
            if is_stop:
                self._store.stop()
                time.sleep(60.0 if kind > 0.97 else 5.0)
                self._store.go_on()

        self._thread = threading.Thread(target=come_back)
        self._thread.start()

    def end(self) -> None:
        if self._thread is not None:
            self._thread.join()


class _Shards:
    """Keeps a hard link to each sealed shard, because the daemon may remove the shard, and a run may lose it."""

    def __init__(self, recordings: Path, folder: Path) -> None:
        self.folder = folder
        self._recordings = recordings
        self._is_ending = threading.Event()
        self._thread = threading.Thread(target=self._keep)
        self._thread.start()

    @property
    def num_linked(self) -> int:
        return sum(path.is_file() for path in self.folder.rglob("*"))

    def close(self) -> None:
        self._is_ending.set()
        self._thread.join()

    def _keep(self) -> None:
        seen: set[Path] = set()
        while not self._is_ending.wait(1.0):
            for path in self._recordings.rglob("*.arrow"):
                if path in seen:
                    continue
                kept = self.folder / path.relative_to(self._recordings)
                kept.parent.mkdir(parents=True, exist_ok=True)
                with contextlib.suppress(FileNotFoundError, FileExistsError):
                    os.link(path, kept)
                    seen.add(path)


def _begin_job(folder: Path, number: int, draw: random.Random) -> jobs.Job:
    """Start a torchrun of two ranks; every third job loses a rank by SIGKILL."""
    settings = jobs.recording(
        _RULES, dir=str(folder / "recordings"), shard_bytes=str(draw.choice((1, 1, 6)) << 20), min_free_bytes="0"
    )
    script = Path(__file__).with_name("training.py")
    options = [f"--seconds={draw.uniform(30, 80):.0f}", "--pause=0.04"]
    if number % 3 == 2:
        options.append(f"--die-at={draw.randrange(50, 600)}")
    return jobs.torchrun(folder / f"job-{number}", script, *options, **settings)


def _ship(folder: Path, keep_local: str, is_once: bool, url: str) -> None:
    os.environ["AWS_ENDPOINT_URL"] = url
    sys.stderr = open(folder / "daemon.log", "a", buffering=1)  # noqa: SIM115 # as long as the process
    (folder / "recordings").mkdir(exist_ok=True)
    settings = DaemonSettings(
        watch=(str(folder / "recordings"),), to=f"s3://{BUCKET}/{_PREFIX}", state=str(folder / "state"), listen="",
        fresh_s=1.0, status_s=0.5, keep_local=keep_local, deadline_s=60.0,
    )  # fmt: skip
    daemon = Daemon(settings)
    code = daemon.run_once() if is_once else daemon.run()
    os._exit(code)


def record(path: Path, seed: int) -> None:
    """Record as a writer for a while, then close or die."""
    draw = random.Random(seed)
    rig = Rig(path, flush_interval_s=0.05, shard_bytes=1 << 20, shard_rows=draw.choice((40, 400)))
    rig.writer.set_manifest(own_process())  # by which a daemon knows whether its writer is gone
    rig.start()
    for step in range(draw.randrange(50, 400)):
        rig.put(step=step, keep=KEEP_STATS)
        if step % 4 == 0:
            rig.put(step=step, keep=KEEP_STATS | KEEP_TENSOR)
        time.sleep(draw.uniform(0, 0.04))
    if seed % 3 == 2:
        rig.drain()
        os.kill(os.getpid(), signal.SIGKILL)
    rig.close()


def _look(server: StoreProcess, url: str, num_kills: int) -> list[str]:
    """Read the runs in the store as a reader does that has nothing but the store; rows may be on the way there."""
    os.environ["AWS_ENDPOINT_URL"] = url
    listed = server.client.list_objects_v2(Bucket=BUCKET, Prefix=f"{_PREFIX}/", Delimiter="/").get("CommonPrefixes", ())
    names = [name for one in listed if not (name := one["Prefix"].split("/")[1]).startswith("_")]
    problems = []
    for name in random.Random(num_kills).sample(names, min(len(names), 3)):
        where = f"s3://{BUCKET}/{_PREFIX}/{name}"
        try:
            found = recorder.open_run(where)
        except RecorderError as error:
            if "_run.json is missing" not in str(error):
                problems.append(f"kill {num_kills}: {where} cannot be opened: {error}")
            continue
        faults = [finding.text for finding in verify(found) if finding.is_fault]
        problems += [f"kill {num_kills}: {text}" for text in faults if "on the way" not in text]
    return problems


def _compare(server: StoreProcess, url: str, folder: Path, aside: Path) -> list[str]:
    os.environ["AWS_ENDPOINT_URL"] = url
    there: dict[str, bytes] = {}
    for page in server.client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=f"{_PREFIX}/"):
        for one in page.get("Contents", ()):
            key = one["Key"].removeprefix(f"{_PREFIX}/")
            if not key.startswith("_") and "/_nodes/" not in key:
                there[key] = server.client.get_object(Bucket=BUCKET, Key=one["Key"])["Body"].read()
    root = folder / "recordings"
    own = ("_shipped-", NODE)
    paths = [path for path in root.rglob("*") if path.is_file() and not path.name.startswith(own)]
    here = {str(path.relative_to(root)): path.read_bytes() for path in paths}
    problems = [f"lost: {name}" for name in sorted(here.keys() - there.keys())]
    problems += [f"other bytes: {name}" for name in sorted(here.keys() & there.keys()) if here[name] != there[name]]
    was_here = {str(path.relative_to(aside)): path for path in aside.rglob("*.arrow")}
    for name in sorted(was_here.keys() - here.keys()):
        if there.get(name) != was_here[name].read_bytes():
            problems.append(f"removed here and {'other bytes' if name in there else 'lost'} there: {name}")
        directory, _, shard = name.rpartition("/")
        if shard.startswith("tensors") and f"{directory}/{index_name(shard)}" not in there:
            problems.append(f"removed here and without its index there: {name}")
    num_open = sum(name.endswith(".open") for name in here)
    problems += [f"{num_open} shards of dead writers are still open"] * (num_open > 0)
    problems += [f"open there: {name}" for name in sorted(there) if name.endswith(".open") and name not in here]
    left_runs = {name.partition("/")[0] for name in here}
    problems += [f"left over: {n}" for n in sorted(there.keys() - here.keys()) if n.partition("/")[0] in left_runs]
    runs = sorted({name.partition("/")[0] for name in there})
    for name in runs:
        if name in left_runs:
            problems += [f"here: {one.text}" for one in verify(recorder.open_run(root / name)) if one.is_fault]
    for name in random.Random(0).sample(runs, min(len(runs), _NUM_VERIFIED)):  # of the others the bytes are equal
        found = recorder.open_run(f"s3://{BUCKET}/{_PREFIX}/{name}")
        problems += [f"there: {finding.text}" for finding in verify(found) if finding.is_fault]
        if name in left_runs:
            local = recorder.open_run(root / name)
            if local.num_rows != found.num_rows:
                problems.append(f"{name}: {local.num_rows} rows here and {found.num_rows} there")
    print(f"{len(here)} files here, {len(there)} there; {len(was_here.keys() - here.keys())} shards were removed here")
    return problems
