"""`kill -9` of the daemon at random instants, over recordings that grow and a store that fails, until all is there.

Writers record all the while; some close, some are killed. A daemon ships to moto's S3 server through a proxy that is
slow, cuts, answers 500, 503 and 403, damages and lies, and is killed again and again. Between two kills a reader opens
what is there. At the end one daemon is left alone with the store: then every byte there must be that here, nothing may
be lost, there twice or left over, and `verify` must be clean on both sides.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import recorder
from recorder.daemon.daemon import Daemon
from recorder.daemon.settings import DaemonSettings
from recorder.errors import RecorderError
from recorder.records import KEEP_STATS, KEEP_TENSOR
from recorder.system.processes import own_process
from recorder.upkeep.verify import verify
from tests.daemon.proxy import FAULTS, FaultyProxy
from tests.storage.server import BUCKET, StoreServer
from tests.write.rig import Rig

_NUM_WRITERS = 2
_FAULT_SHARE = 0.04
_PREFIX = "fleet"
_NUM_VERIFIED = 12
"""Runs that are verified in the store, too, at the end: through moto's server each takes seconds."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this campaign's options."""
    parser.add_argument("--keep-local", default="all", help="as of the daemon; a time removes what is there")


def main(arguments: argparse.Namespace) -> int:
    """Run the campaign."""
    count = arguments.count or 1000
    until_s = time.monotonic() + 60 * arguments.minutes if arguments.minutes else float("inf")
    draw = random.Random(arguments.seed)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["scripts.campaigns.faults.daemon"])
    folder = Path(tempfile.mkdtemp(prefix="recorder-daemon-"))
    server = StoreServer()
    proxy = FaultyProxy(server.url, lambda method, path: draw.choice(FAULTS) if draw.random() < _FAULT_SHARE else None)
    proxy.slow_s = 0.05
    environment = server.environment(os.environ, folder)
    os.environ.clear()
    os.environ.update(environment | {"AWS_ENDPOINT_URL": proxy.url})
    problems: list[str] = []
    try:
        num_kills, num_reads, num_runs = 0, 0, 0
        writers: list[Any] = []
        while num_kills < count and time.monotonic() < until_s:
            writers = [writer for writer in writers if writer.is_alive()]
            while len(writers) < _NUM_WRITERS:
                writer = context.Process(target=_record, args=(folder / "recordings" / f"run-{num_runs}", num_runs))
                writer.start()
                writers.append(writer)
                num_runs += 1
            daemon = context.Process(target=_ship, args=(folder, arguments.keep_local, False, proxy.url))
            daemon.start()
            time.sleep(draw.uniform(0.02, 0.8))
            assert daemon.pid is not None
            os.kill(daemon.pid, signal.SIGKILL)
            daemon.join()
            num_kills += 1
            if num_kills % 10 == 0:
                num_reads += 1
                problems += _look(server, num_kills)
            if num_kills % 50 == 0:
                print(f"{num_kills} kills, {num_runs} runs, {sum(proxy.seen[f] for f in FAULTS)} faults", flush=True)
        for writer in writers:
            writer.join()
        proxy.fault = lambda method, path: None
        expected = {path: path.stat().st_size for path in (folder / "recordings").rglob("*") if path.is_file()}
        last = context.Process(target=_ship, args=(folder, "all", True, proxy.url))
        last.start()
        last.join()
        if last.exitcode != 0:
            problems.append(f"the last daemon ended with {last.exitcode}")
        problems += _compare(server, folder)
        faults = {fault: proxy.seen[fault] for fault in FAULTS}
        print(f"{num_kills} kills of the daemon over {num_runs} runs, {len(expected)} files; {num_reads} looks between")
        print(f"{sum(proxy.seen.values()) - proxy.seen['none'] - sum(faults.values())} requests, faults {faults}")
    finally:
        proxy.close()
        server.close()
    for problem in problems:
        print(f"FOUND: {problem}")
    if not problems:
        shutil.rmtree(folder)
        print("nothing lost, nothing twice, every byte equal, verify clean here and there")
    else:
        print(f"kept: {folder}")
    return int(bool(problems))


def _ship(folder: Path, keep_local: str, is_once: bool, url: str) -> None:
    """Be a daemon."""
    os.environ["AWS_ENDPOINT_URL"] = url
    sys.stderr = open(folder / "daemon.log", "a", buffering=1)  # noqa: SIM115 # as long as the process
    (folder / "recordings").mkdir(exist_ok=True)
    settings = DaemonSettings(
        watch=(str(folder / "recordings"),), to=f"s3://{BUCKET}/{_PREFIX}", state=str(folder / "state"), listen="",
        fresh_s=1.0, status_s=0.5, catalog_s=0.0, keep_local=keep_local, deadline_s=60.0,
    )  # fmt: skip
    daemon = Daemon(settings)
    code = daemon.run_once() if is_once else daemon.run()
    os._exit(code)


def _record(path: Path, seed: int) -> None:
    """Be a writer: record for a while, then close, or be killed."""
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


def _look(server: StoreServer, num_kills: int) -> list[str]:
    """Read what is there as a reader would, who has the store to himself."""
    os.environ["AWS_ENDPOINT_URL"] = server.url
    listed = server.client.list_objects_v2(Bucket=BUCKET, Prefix=f"{_PREFIX}/", Delimiter="/").get("CommonPrefixes", ())
    names = [one["Prefix"].split("/")[1] for one in listed if "/run-" in one["Prefix"]]
    problems = []
    for name in sorted(names, key=lambda name: int(name.partition("-")[2]))[-3:]:
        where = f"s3://{BUCKET}/{_PREFIX}/{name}"
        try:
            found = recorder.open_run(where)
        except RecorderError as error:
            if "_run.json is missing" not in str(error):
                problems.append(f"kill {num_kills}: {where} cannot be opened: {error}")
            continue
        problems += [f"kill {num_kills}: {finding.text}" for finding in verify(found) if finding.is_fault]
    return problems


def _compare(server: StoreServer, folder: Path) -> list[str]:
    os.environ["AWS_ENDPOINT_URL"] = server.url
    there: dict[str, bytes] = {}
    for page in server.client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=f"{_PREFIX}/"):
        for one in page.get("Contents", ()):
            key = one["Key"].removeprefix(f"{_PREFIX}/")
            if not key.startswith("_"):
                there[key] = server.client.get_object(Bucket=BUCKET, Key=one["Key"])["Body"].read()
    root = folder / "recordings"
    paths = [path for path in root.rglob("*") if path.is_file() and not path.name.startswith("_shipped-")]
    here = {str(path.relative_to(root)): path.read_bytes() for path in paths}
    problems = [f"lost: {name}" for name in sorted(here.keys() - there.keys())]
    problems += [f"other bytes: {name}" for name in sorted(here.keys() & there.keys()) if here[name] != there[name]]
    num_open = sum(name.endswith(".open") for name in here)
    problems += [f"{num_open} shards of dead writers are still open"] * (num_open > 0)
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
    return problems
