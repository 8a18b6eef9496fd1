"""Large models and many ranks: how long starting takes, and asking afterwards, and in how much memory.

    python -m tests.campaigns scale                            # 50,000 modules; 4,096 ranks
    python -m tests.campaigns scale --modules 2000 --ranks 64

A model of so many modules is trained for three steps in a fresh process. Files of so many ranks are written by the
real writer, a few rows each, that of the last rank left open as by a kill. Every command then runs in a process of its
own. Exit code 1: starting took more than 2 s, a refresh of `top` more than 2 s, or a command failed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from recorder.records import KEEP_STATS, KEEP_TENSOR
from recorder.run.status import RunWatch
from recorder.write.file import Disk
from recorder.write.writer_directory import RunTarget
from tests.rigs.writer import Rig

from .support import Progress

MAX_START_S = 2.0
MAX_LOOK_S = 2.0
_CHAIN = 4
"""Modules of a small chain: a container and three leaves."""
_OPEN_RUN = "import sys, recorder; run = recorder.open_run(sys.argv[1]); print(len(run.writers), run.num_rows)"
_TRAIN = """
import json, sys, time
import torch
from tests.campaigns.faults.scale import make_model
import recorder

torch.manual_seed(0)
model = make_model(int(sys.argv[1]))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
x = torch.ones(1, 1)
model(x).sum().backward()
began = time.perf_counter()
model(x)
bare_s = time.perf_counter() - began
began, began_cpu = time.perf_counter(), time.thread_time()
attached = recorder.attach(model, enabled=True, dir=sys.argv[2])
attach_s = time.perf_counter() - began
out = model(x)
forward_s = time.perf_counter() - began - attach_s
cpu_s = time.thread_time() - began_cpu
out.sum().backward()
optimizer.step()
began = time.perf_counter()
attached.flush(60.0)
flush_s = time.perf_counter() - began
for _ in range(2):
    model(x).sum().backward()
    optimizer.step()
run_dir = str(attached.run_dir)
attached.close()
took = {"bare_s": bare_s, "attach_s": attach_s, "forward_s": forward_s, "cpu_s": cpu_s, "flush_s": flush_s}
print(json.dumps({**took, "run": run_dir}))
"""


class Cost(NamedTuple):
    what: str
    seconds: float
    peak_mb: float
    exit_code: int
    output: str


def make_model(num_modules: int):  # type: ignore[no-untyped-def]  # torch is the child's alone
    """So many modules and a root: blocks side by side, of chains one after the other, of three leaves each.

    Not one long chain: torch itself overflows the stack when it frees a graph of more than some 30,000 nodes in a row
    of which any was seen from Python.
    """
    from torch import nn

    class Wide(nn.Sequential):
        def forward(self, x):  # type: ignore[no-untyped-def]
            return sum(block(x) for block in self)

    num_chains = num_modules // _CHAIN
    chains = [nn.Sequential(nn.Linear(1, 1), nn.Tanh(), nn.Linear(1, 1)) for _ in range(num_chains)]
    return Wide(*(nn.Sequential(*chains[i : i + 50]) for i in range(0, num_chains, 50)))


def measure(what: str, command: Sequence[str | Path], timeout_s: float = 900.0) -> Cost:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("RECORDER", "_RECORDER"))}
    with tempfile.TemporaryFile() as output:
        began_s = time.monotonic()
        child = subprocess.Popen(
            [str(word) for word in command],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**environment, "OMP_NUM_THREADS": "1"},
        )
        # wait4 and not Popen.wait: the peak memory of this one child.
        _, status, used = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        seconds = time.monotonic() - began_s
        output.seek(0)
        text = output.read().decode(errors="replace")
    assert seconds < timeout_s, f"{what} took {seconds:.0f} s"
    return Cost(what, seconds, used.ru_maxrss / 1024, child.returncode, text)


def ask(what: str, *arguments: str | Path) -> Cost:
    return measure(what, [sys.executable, "-m", "recorder", *arguments])


class _Quick(Disk):
    """The real disk without waiting for the medium, of which nothing is asked here."""

    def sync(self, descriptor: int) -> None:
        pass

    def sync_directory(self, path: Path) -> None:
        pass


def write_ranks(run: Path, num_ranks: int, show: Callable[[int], None] = lambda done: None) -> None:
    """Files of so many ranks by the real writer; the last one is not closed."""

    def one(rank: int) -> Rig:
        manifest = {"run_id": run.name, "world_size": num_ranks, "created_ns": 1_700_000_000_000_000_000}
        target = RunTarget(run_dir=run, run_manifest=manifest, rank=rank, attempt=0)
        rig = Rig(run, resolve_dir=lambda: target, disk=_Quick())
        about = {"rank": rank, "host": os.uname().nodename, "pid": os.getpid(), "attempt": 0, "started_ns": 1}
        rig.writer.set_manifest({**about, "world_size": num_ranks, "step_source": "counted"})
        rig.writer.set_status({**about, "step": 2, "interval_s": 2.0})
        rig.start()
        for step in range(3):
            for name in ("layers.0", "layers.1"):
                values = np.full(16, rank + step, np.float32)
                rig.put(values, module_path=name, step=step, keep=KEEP_STATS | KEEP_TENSOR)
                rig.put(values, module_path=name, step=step, site="grad", name="weight", keep=KEEP_STATS)
        if rank < num_ranks - 1:
            rig.close()
        else:
            rig.drain()
        return rig

    with ThreadPoolExecutor(4) as threads:
        for done, _ in enumerate(threads.map(one, range(num_ranks))):
            show(done + 1)


def table(costs: Sequence[Cost]) -> str:
    lines = [f"{'':<34}{'seconds':>9}{'peak MB':>9}{'exit':>6}"]
    lines += [f"{c.what:<34}{c.seconds:>9.2f}{c.peak_mb:>9.0f}{c.exit_code:>6}" for c in costs]
    return "\n".join(lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--modules", type=int, default=50_000)
    parser.add_argument("--ranks", type=int, default=4096)
    parser.add_argument("--dir", type=Path, help="where; by default a temporary folder that goes afterwards")


def main(arguments: argparse.Namespace) -> int:
    folder = Path(tempfile.mkdtemp(prefix="scale-", dir=arguments.dir))
    try:
        findings = many_modules(folder / "modules", arguments.modules) if arguments.modules else []
        findings += many_ranks(folder / "ranks", arguments.ranks) if arguments.ranks else []
    finally:
        shutil.rmtree(folder)
    print("\n".join(f"FINDING: {finding}" for finding in findings) or "no findings")
    return int(bool(findings))


def many_modules(folder: Path, num_modules: int) -> list[str]:
    """Train, ask, print a table; what is not as it should be."""
    trained = measure("train, 3 steps", [sys.executable, "-c", _TRAIN, str(num_modules), folder])
    if trained.exit_code:
        return [f"training {num_modules} modules failed: {trained.output[-2000:]}"]
    took = json.loads(trained.output.splitlines()[-1])
    (manifest,) = folder.glob("*/rank=*/*/_writer.json")
    start_s = took["attach_s"] + took["forward_s"] - took["bare_s"]
    print(
        f"{num_modules:,} modules: starting until the first forward is recorded {start_s:.2f} s, "
        f"{took['cpu_s']:.2f} s of it work of the training thread"
    )
    print(
        f"  attach {took['attach_s']:.2f} s, first forward {took['forward_s']:.2f} s (bare {took['bare_s']:.2f} s), "
        f"then {took['flush_s']:.2f} s until it is on disk"
    )
    print(f"  manifest {manifest.stat().st_size / 1e6:.1f} MB")
    run = took["run"]
    costs = [
        trained,
        ask("ls", "ls", run),
        ask("show", "show", run),
        ask("show a module", "show", run, "3.7.0"),
        ask("doctor", "doctor", run),
        ask("top", "top", run),
    ]
    print(table(costs), flush=True)
    findings = [f"{c.what}: exit code {c.exit_code}: {c.output[-500:]}" for c in costs if c.exit_code not in (0, 1)]
    if start_s > MAX_START_S:
        findings.append(f"starting took {start_s:.2f} s, more than {MAX_START_S} s")
    return findings


def many_ranks(folder: Path, num_ranks: int) -> list[str]:
    """Write, ask, print a table; what is not as it should be."""
    run = folder / "run"
    began_s = time.monotonic()
    write_ranks(run, num_ranks, Progress(num_ranks, "ranks").show)
    num_files = sum(len(files) for _, _, files in os.walk(run))
    print(f"{num_ranks:,} ranks written in {time.monotonic() - began_s:.0f} s: {num_files:,} files")
    watch = RunWatch(run)
    watch.look()
    began_s = time.monotonic()
    assert len(watch.look()) == num_ranks
    look_s = time.monotonic() - began_s
    costs = [
        measure("open_run", [sys.executable, "-c", _OPEN_RUN, run]),
        ask("ls", "ls", run),
        ask("doctor", "doctor", run),
        ask("verify", "verify", run),
        ask("first", "first", run),
        ask("top --once", "top", "--once", run),
    ]
    print(table(costs))
    print(f"a refresh of top: {look_s:.2f} s", flush=True)
    findings = [f"{c.what}: exit code {c.exit_code}: {c.output[-500:]}" for c in costs if c.exit_code not in (0, 1)]
    if look_s > MAX_LOOK_S:
        findings.append(f"a refresh of top took {look_s:.2f} s, more than {MAX_LOOK_S} s")
    return findings
