"""What `recorder daemon` costs its node: `python -m scripts.benchmarks daemon [start memory ls fleet beside]`.

start: from the command to the first answer of `/healthz`. memory: 100,000 files of ended runs are shipped to a folder;
then the daemon's memory, and its processor time while nothing happens, with and without Prometheus asking. ls:
`recorder ls` of a store with 1,000 runs, from the command to its end. fleet: the list of `recorder view` and the page
of a run with 4,096 ranks on 512 nodes, by documents as daemons put them: seconds, the server's own of a processor,
requests, and the memory that it takes beside that of its start. beside: steps of one training in one thread, while a
daemon ships its run to an S3 server on this machine, and while that daemon is stopped by SIGSTOP, in turn; the server's
own time counts as the daemon's, and so does what it has put off meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from recorder.format.rundir import encode_manifest
from recorder.system.text import size
from scripts.benchmarks import parser_of
from tests.rigs.jobs import free_port
from tests.rigs.server import BUCKET, StoreServer

from .pairs import spread
from .processes import ROOT, clean_env
from .scale import anon_bytes
from .view import serving

_PATIENCE_S = 600.0
_IDLE_S = 60.0
_SCRAPE_S = 15.0
_NUM_RUNS = 1000
_NUM_NODES = 512
_RANKS_A_NODE = 8
_SETTLE_S = 30.0
"""From the training's first step until the daemon is seen to ship it, at most."""
_RULES = "site=* steps=::5 keep=stats; site=grad,output steps=::50 keep=tensor"


def main(arguments: list[str]) -> int:
    """Print what was asked for."""
    parts: dict[str, Callable[[argparse.Namespace, Path], None]] = {
        "start": _start, "memory": _memory, "ls": _ls, "fleet": _fleet, "beside": _beside,
    }  # fmt: skip
    parser = parser_of("daemon", __doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"some of {', '.join(parts)}; by default all")
    parser.add_argument("--files", type=int, default=100_000, help="files in sight, of memory (default 100000)")
    parser.add_argument("--rounds", type=int, default=8, help="of start, ls and beside (default 8)")
    parser.add_argument("--phase", type=float, default=15.0, help="seconds of each half of a round, of beside (15)")
    options = parser.parse_args(arguments)
    if unknown := set(options.parts) - set(parts):
        parser.error(f"no part is called {', '.join(sorted(unknown))}; there are {', '.join(parts)}")
    for name in options.parts or parts:
        with tempfile.TemporaryDirectory(prefix="bench-daemon-") as folder:
            parts[name](options, Path(folder))
    return 0


@contextmanager
def _daemon(
    folder: Path, to: str, env: Mapping[str, str], *more: str
) -> Iterator[tuple[subprocess.Popen[bytes], int, float]]:
    """A daemon over `folder/recordings`; with its process come its port, and the seconds until it answered."""
    (folder / "recordings").mkdir(exist_ok=True)
    port = free_port()
    command = [
        sys.executable, "-m", "recorder", "daemon", f"--watch={folder / 'recordings'}", f"--to={to}",
        f"--state={folder / 'state'}", f"--listen=127.0.0.1:{port}", *more,
    ]  # fmt: skip
    began_s = time.monotonic()
    process = subprocess.Popen(command, env=env, stderr=subprocess.DEVNULL)
    try:
        while _asked(port, "healthz") is None:
            if process.poll() is not None or time.monotonic() > began_s + _PATIENCE_S:
                raise SystemExit(f"the daemon does not start: {' '.join(command)}")
            time.sleep(0.01)
        yield process, port, time.monotonic() - began_s
    finally:
        process.terminate()
        process.wait(60)


def _asked(port: int, path: str) -> str | None:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/{path}", timeout=10) as answer:
            return str(answer.read().decode())
    except (urllib.error.URLError, OSError):
        return None


def _metric(port: int, name: str) -> float:
    lines = (_asked(port, "metrics") or "").splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.partition(" ")[0] == name)


def _start(options: argparse.Namespace, folder: Path) -> None:
    took_s, cpu_s = [], []
    for _ in range(options.rounds):
        with _daemon(folder, str(folder / "there"), clean_env()) as (process, _, start_s):
            cpu_s.append(_cpu_s(process.pid))
            took_s.append(start_s)
    print(
        f"start: {statistics.median(took_s):.2f} s until it answers, {statistics.median(cpu_s):.2f} s of a processor"
        f" (medians of {options.rounds})",
        flush=True,
    )


def _memory(options: argparse.Namespace, folder: Path) -> None:
    num_runs = max(options.files // 1000, 1)
    num_files = _make_runs(folder / "recordings", num_runs, options.files // num_runs)
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as there,
        _daemon(folder, there, clean_env(), "--threads=8") as (process, port, _),
    ):
        began_s = time.monotonic()
        while _metric(port, "recorder_daemon_settled_runs") < num_runs:
            if process.poll() is not None:
                raise SystemExit("the daemon has ended")
            time.sleep(2)
        took_s = time.monotonic() - began_s
        print(f"memory: {num_files} files of {num_runs} runs shipped in {took_s:.0f} s", flush=True)
        time.sleep(10)
        _say_memory(process.pid)
        for is_asked in (False, True):
            share = _idle_share(process.pid, port, is_asked=is_asked)
            how = f"asked for its metrics every {_SCRAPE_S:.0f} s" if is_asked else "left alone"
            print(f"idle, {how}: {share:.2%} of a core over {_IDLE_S:.0f} s", flush=True)
        _say_memory(process.pid)


def _say_memory(pid: int) -> None:
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    now, peak = (int(status[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM"))
    print(f"memory: {size(now)} resident, {size(peak)} at most", flush=True)


def _idle_share(pid: int, port: int, *, is_asked: bool) -> float:
    before_s, began_s = _cpu_s(pid), time.monotonic()
    while time.monotonic() < began_s + _IDLE_S:
        time.sleep(_SCRAPE_S)
        if is_asked:
            _asked(port, "metrics")
    return (_cpu_s(pid) - before_s) / (time.monotonic() - began_s)


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _make_runs(recordings: Path, num_runs: int, files_a_run: int) -> int:
    """Make ended runs of two writers, of shards that a daemon takes for some. Returns the number of files."""
    for run in range(num_runs):
        path = recordings / f"run-{run:04d}"
        for rank in range(2):
            writer = path / f"rank={rank:05d}" / "000000-0123456789ab"
            writer.mkdir(parents=True)
            for number in range(files_a_run // 2 - 1):
                (writer / f"stats-{number:06d}.arrow").write_bytes(b"ARROW1\0\0" + number.to_bytes(8, "little"))
            members = {"format": "recorder", "version": [1, 2], "rank": rank, "state": "closed"}
            (writer / "_writer.json").write_bytes(encode_manifest(members))
        manifest = {"format": "recorder", "version": [1, 2], "run_id": path.name, "world_size": 2, "created_ns": 1}
        (path / "_run.json").write_bytes(encode_manifest(manifest))
    return num_runs * (2 * (files_a_run // 2 - 1) + 3)


def _ls(options: argparse.Namespace, folder: Path) -> None:
    """List a store with an index of two nodes, as daemons keep it."""
    server = StoreServer()
    try:
        summary = {"world_size": 16, "created_ns": 1, "last_step": 9, "rows": 10, "bytes": 100, "state": "closed"}
        for node in range(2):
            ranks = list(range(8 * node, 8 * node + 8))
            runs = {f"run-{n:04d}": summary | {"name": f"run-{n:04d}", "ranks": ranks} for n in range(_NUM_RUNS)}
            members = {"time_ns": time.time_ns(), "runs": runs}
            server.put(f"fleet/_fleet/node-{node}.json", encode_manifest(members))
        for n in range(_NUM_RUNS):
            server.put(f"fleet/run-{n:04d}/_run.json", b"{}")
        env, took_s, cpu_s, num_requests = server.environment(clean_env(), folder), [], [], 0
        for _ in range(options.rounds):
            with server.counting() as requests:
                began_s, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
                command = [sys.executable, "-m", "recorder", "ls", f"s3://{BUCKET}/fleet"]
                subprocess.run(command, env=env, check=True, stdout=subprocess.DEVNULL)
                took_s.append(time.monotonic() - began_s)
                after = resource.getrusage(resource.RUSAGE_CHILDREN)
                cpu_s.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
            num_requests = requests.num_requests
        print(
            f"ls: {_NUM_RUNS} runs in {statistics.median(took_s):.2f} s, {statistics.median(cpu_s):.2f} s of a"
            f" processor, with {num_requests} requests (medians of {options.rounds}; moto's server on this machine)",
            flush=True,
        )
    finally:
        server.close()


def _fleet(options: argparse.Namespace, folder: Path) -> None:
    server, now_ns = StoreServer(), time.time_ns()
    try:
        run = {"name": "run-a", "created_ns": now_ns, "world_size": _NUM_NODES * _RANKS_A_NODE, "state": "recording"}
        server.put("fleet/run-a/_run.json", encode_manifest({"format": "recorder", "version": [1, 4], **run}))
        for node in range(_NUM_NODES):
            ranks = list(range(_RANKS_A_NODE * node, _RANKS_A_NODE * (node + 1)))
            shown = {f"rank={rank:05d}/000000-{rank:012x}": _shown(rank, node, now_ns) for rank in ranks}
            server.put(f"fleet/run-a/_nodes/node-{node}.json", encode_manifest({"writers": shown}))
            runs = {"run-a": {**run, "ranks": ranks, "last_step": 100, "rows": 10**6, "bytes": 10**10}}
            server.put(f"fleet/_fleet/node-{node}.json", encode_manifest({"time_ns": now_ns, "runs": runs}))
        with serving(f"s3://{BUCKET}/fleet", server.environment(clean_env(), folder)) as view:
            before_bytes = anon_bytes(view.pid)
            for what, path in (("list", "runs"), ("ranks, at first", "run/run-a/ranks"), ("ranks", "run/run-a/ranks")):
                cpu_s, began_s = _cpu_s(view.pid), time.monotonic()
                with server.counting() as requests, urllib.request.urlopen(view.address + path) as answer:
                    num_bytes = len(answer.read())
                took_s, own_s = time.monotonic() - began_s, _cpu_s(view.pid) - cpu_s
                more_bytes = anon_bytes(view.pid) - before_bytes
                print(
                    f"fleet, {what}: {took_s:.1f} s, {own_s:.1f} s of a processor, {requests['LIST']} LIST and"
                    f" {requests['GET']} GET, an answer of {size(num_bytes)}, {size(more_bytes)} more memory",
                    flush=True,
                )
    finally:
        server.close()


def _shown(rank: int, node: int, now_ns: int) -> dict[str, object]:
    """A rank as its daemon shows it."""
    return {
        "writer": f"000000-{rank:012x}", "rank": rank, "attempt": 0, "state": "recording", "host": f"node-{node}",
        "pid": 1000 + rank, "process": "0123456789abcdef:123456", "started_ns": now_ns, "interval_s": 7.0, "step": 100,
        "observed": 10**6, "written": 10**6, "dropped": {}, "retired": {"rows": 0, "bytes": 0}, "written_bytes": 10**9,
        "used_bytes": 10**9, "max_bytes": 1 << 34, "free_bytes": 10**12 - rank, "pool_bytes": 1 << 30,
        "pool_used_bytes": 1 << 20, "waited_s": 0.5, "longest_wait_s": 0.01, "queue_length": 3, "time_ns": now_ns,
        "recent": {"seconds": 10.0, "steps": 12, "bytes": 10**6}, "commands": [], "findings": [], "changed_ns": now_ns,
        "padding": "",
    }  # fmt: skip


def _beside(options: argparse.Namespace, folder: Path) -> None:
    server = StoreServer()
    env = server.environment(clean_env(), folder)
    seconds = options.rounds * 2 * options.phase
    recorded = env | {
        "RECORDER": "1", "RECORDER_DIR": str(folder / "recordings"), "RECORDER_RULES": _RULES,
        "RECORDER_MIN_FREE_BYTES": "0", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    phases: list[tuple[bool, float, float]] = []
    try:
        with tempfile.TemporaryFile() as out, _daemon(folder, f"s3://{BUCKET}/beside", env) as (daemon, port, _):
            command = [sys.executable, "-m", "scripts.benchmarks.stepping", str(seconds + _SETTLE_S)]
            training = subprocess.Popen(command, env=recorded, stdout=out, stderr=subprocess.DEVNULL, cwd=ROOT)
            try:
                while not _uploads(port):
                    if training.poll() is not None:
                        raise SystemExit("the training has ended, and the daemon has seen nothing of it")
                    time.sleep(0.2)
                for number in range(2 * options.rounds):
                    is_stopped = number % 4 in (1, 2)  # the order changes from round to round
                    daemon.send_signal(signal.SIGSTOP if is_stopped else signal.SIGCONT)
                    began_s = time.time()
                    time.sleep(options.phase)
                    phases.append((is_stopped, began_s, time.time()))
            finally:
                daemon.send_signal(signal.SIGCONT)
                num_puts = _uploads(port)
                if len(phases) < 2 * options.rounds:
                    training.kill()
                training.wait(_PATIENCE_S)
            out.seek(0)
            ended_s = json.loads(out.read().splitlines()[-1])["ended_s"]
    finally:
        server.close()
    step_s = {(is_stopped, began_s): _mean_step_s(ended_s, began_s, to_s) for is_stopped, began_s, to_s in phases}
    sides = {side: [taken for (is_stopped, _), taken in step_s.items() if is_stopped is side] for side in (False, True)}
    found = spread([with_s / without_s for with_s, without_s in zip(sides[False], sides[True], strict=True)])
    print(
        f"beside: a step takes {statistics.median(sides[False]) * 1e3:.2f} ms with a daemon and"
        f" {statistics.median(sides[True]) * 1e3:.2f} ms without; ratio {found.median:.3f}"
        f" (quartiles {found.low:.3f} to {found.high:.3f}, {found.num_pairs} pairs of {options.phase:.0f} s;"
        f" {num_puts:.0f} uploads, {len(ended_s)} steps)",
        flush=True,
    )


def _uploads(port: int) -> float:
    lines = (_asked(port, "metrics") or "").splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith("recorder_daemon_uploads_total{"))


def _mean_step_s(ended_s: list[float], began_s: float, to_s: float) -> float:
    """Mean of the steps that lie in a span: a burst of the daemon's is in a mean, and not in a median."""
    inside = [moment_s for moment_s in ended_s if began_s <= moment_s <= to_s]
    if len(inside) < 2:
        raise SystemExit("the training made no steps for a while; take a quieter machine, or a longer --phase")
    return (inside[-1] - inside[0]) / (len(inside) - 1)
