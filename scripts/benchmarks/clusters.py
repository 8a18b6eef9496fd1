"""What Dask and Ray clusters on this machine make of a merge and of statistics, with one worker and with more.

    python -m scripts.benchmarks clusters --gb 2 --rounds 3 --workers 1,2,4

The run is that of `python -m scripts.benchmarks merge`. Each round does every kind once, in turn, and a ratio
is that of two times of one round, so that slow changes of the machine cancel. `here` is one process (`--jobs 1`). The
scheduler and the workers, of one core each, are started before and share the cores with the command. Each worker of Ray
is a node of its own. Exit code 1 where an answer differs.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from recorder.system.text import counted
from scripts.benchmarks import parser_of
from scripts.benchmarks.merge import write_run
from tests.rigs.clusters import Nodes, Workers, started_cluster, started_ray

ROOT = Path(__file__).parents[2]
STARTED: dict[str, Callable[[Path, int], AbstractContextManager[Workers | Nodes]]] = {
    "Dask": started_cluster,
    "Ray": started_ray,
}


def timed(command: list[str], scheduler: str | None) -> tuple[float, bytes]:
    """Seconds of one command in a process of its own, and what it said."""
    options = ["--scheduler", scheduler] if scheduler is not None else []
    begin = time.perf_counter()
    found = subprocess.run(
        [sys.executable, "-m", "recorder", *command, *options],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        check=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    return time.perf_counter() - begin, found.stdout


def main(arguments: list[str]) -> int:
    parser = parser_of("clusters", __doc__)
    parser.add_argument("--gb", type=float, default=2.0, help="payload of the run, decoded (default 2)")
    parser.add_argument("--writers", type=int, default=4, help="ranks (default 4)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", default="1,2", help="numbers of workers (default 1,2)")
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()), help="where the runs lie")
    args = parser.parse_args(arguments)
    sizes = [int(word) for word in args.workers.split(",")]
    kinds = [("here", 0), *((cluster, size) for cluster in STARTED for size in sizes)]
    times: dict[str, dict[tuple[str, int], list[float]]] = {}
    answers: dict[str, set[bytes]] = {}
    with tempfile.TemporaryDirectory(dir=args.dir, prefix="bench-clusters-") as name:
        folder = Path(name)
        run = folder / "run"
        run.mkdir()
        payload_bytes = write_run(run, args.writers, int(args.gb * 1e9), is_mixed=True)
        for number in range(args.rounds):
            for kind in kinds:
                cluster_kind, num_workers = kind
                for what in ("merge", "stats --global"):
                    out = folder / "out"
                    command = ["stats", str(run), "--global", "--by", "step,site", "--json"]
                    if what == "merge":
                        command = ["merge", str(run), "-o", str(out), "--json"]
                    if num_workers:
                        with STARTED[cluster_kind](folder / "cluster", num_workers) as cluster:
                            time.sleep(5)  # until the workers are there
                            seconds, said = timed(command, cluster.address)
                        shutil.rmtree(folder / "cluster")
                    else:
                        seconds, said = timed([*command, *(["--jobs", "1"] if what == "merge" else [])], None)
                    times.setdefault(what, {}).setdefault(kind, []).append(seconds)
                    if what == "merge":
                        told = json.loads(said)
                        said = json.dumps([told["tensors"], told["rows"], told["findings"], shards(out)]).encode()
                        shutil.rmtree(out)
                    answers.setdefault(what, set()).add(said)
            print(f"round {number + 1} of {args.rounds}", file=sys.stderr)
    print(f"{payload_bytes / 1e9:.1f} GB of {args.writers} ranks, medians of {args.rounds} rounds\n")
    heads = [f"{name}, {counted(size, 'worker')}" if size else name for name, size in kinds]
    print(f"| | {' | '.join(heads)} |\n|{'---|' * (len(heads) + 1)}")
    for what, of in times.items():
        ratios = [
            statistics.median(one / two for one, two in zip(of[kind], of[kinds[0]], strict=True)) for kind in kinds
        ]
        cells = [
            f"{statistics.median(of[kind]):.1f} s ({ratio:.2f})" for kind, ratio in zip(kinds, ratios, strict=True)
        ]
        print(f"| {what} | {' | '.join(cells)} |")
    differing = [what for what, found in answers.items() if len(found) > 1]
    for what in differing:
        print(f"FINDING {what}: the answers differ")
    return int(bool(differing))


def shards(out: Path) -> list[tuple[str, int]]:
    """The shards of a merged run with a checksum of their bytes."""
    import zlib

    return [(str(path.relative_to(out)), zlib.crc32(path.read_bytes())) for path in sorted(out.rglob("*.arrow"))]
