"""What reading a run costs as it grows: synthetic runs of several sizes, each command in a fresh process.

    python -m scripts.benchmarks scale                                  64x1000 256x1000 256x10000 1024x1000 4096x1000
    python -m scripts.benchmarks scale --sizes 64x1000,640x1000,64x10000   growth over a decade of ranks, and of steps
    python -m scripts.benchmarks scale --ranks 256 --steps 1000 --only first

Seconds are those of the clock and of the processor; memory is the most that the process had (`ru_maxrss`, pages of
mapped files included) and the most of it that was its own (`RssAnon`, looked at every 10 ms). A run has one NaN and one
replica that differs, and `first` has to find both. Exit code 1: a command failed or did not answer what is true.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

from scripts.benchmarks import parser_of
from tests.rigs.synthetic import Shape, write_run

ROOT = Path(__file__).parents[2]
SIZES = "64x1000,256x1000,256x10000,1024x1000,4096x1000"
_OPEN = "import sys, recorder; run = recorder.open_run(sys.argv[1]); print(len(run.writers), run.num_rows)"
_LOOK_S = 0.01
_BYTES_A_ROW, _BYTES_A_RANK = 60, 120_000
"""On the disk, the catalog and the manifest included; for the check of free space."""
COMMANDS = ("open", "ls", "show", "doctor", "first", "check")


class Cost(NamedTuple):
    """What one process took."""

    seconds: float
    cpu_s: float
    peak_bytes: int
    peak_anon_bytes: int
    exit_code: int
    output: str


def measure(command: list[str], timeout_s: float) -> Cost:
    """Run one command to its end."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("RECORDER", "_RECORDER"))} | {
        "OMP_NUM_THREADS": "1"
    }
    with tempfile.TemporaryFile() as output:
        began_s = time.monotonic()
        child = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, env=env)
        peaks = [0]
        is_over = threading.Event()

        def look() -> None:
            while not is_over.wait(_LOOK_S):
                peaks[0] = max(peaks[0], anon_bytes(child.pid))
                if time.monotonic() - began_s > timeout_s:
                    child.kill()

        looking = threading.Thread(target=look)
        looking.start()
        try:
            # wait4 and not Popen.wait: what this one child used.
            _, status, used = os.wait4(child.pid, 0)
        finally:
            is_over.set()
            looking.join()
        child.returncode = os.waitstatus_to_exitcode(status)
        seconds = time.monotonic() - began_s
        output.seek(0)
        text = output.read().decode(errors="replace")
    cpu_s = used.ru_utime + used.ru_stime
    return Cost(seconds, cpu_s, used.ru_maxrss * 1024, peaks[0], child.returncode, text)


def anon_bytes(pid: int) -> int:
    """Memory of a process that is its own, now; 0 where it is over."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("RssAnon:")), 0)


def ask(what: str, run: Path, timeout_s: float) -> Cost:
    """Run a command over a run."""
    if what == "open":
        return measure([sys.executable, "-c", _OPEN, str(run)], timeout_s)
    return measure([sys.executable, "-m", "recorder", what, str(run), "--json"], timeout_s)


def wrong(what: str, cost: Cost, shape: Shape) -> str:
    """What of an answer is not as it must be; empty where all is."""
    if cost.exit_code != (1 if what in ("first", "check") else 0):
        return f"exit code {cost.exit_code}: {cost.output[-500:]}"
    if what == "first":
        found = json.loads(cost.output)
        bad, replica = found["nonfinite"]["value"], found["replica"]["value"]
        named = [(one["module_path"], one["step"], one["rank"]) for one in (bad, replica)]
        if named != [(shape.nan_module, *(shape.nan or ())), (shape.differing_module, *(shape.differs or ()))]:
            return f"named {named}"
        if found["num_compared"] != 2 * shape.modules * len(shape.recorded):
            return f"compared {found['num_compared']} values"
    if what == "check":
        found = json.loads(cost.output)
        named = [
            (one["module_path"], one["step"], one["ranks"]) for one in found["findings"] if one["rule"] == "nonfinite"
        ]
        step, rank = shape.nan or (None, None)
        if named != [(shape.nan_module, step, [rank])] or found["rows"] != shape.ranks * shape.rows_a_rank:
            return f"named {named} in {found['rows']} rows"
    return ""


def main(arguments: list[str]) -> int:
    parser = parser_of("scale", __doc__)
    parser.add_argument("--sizes", default=SIZES, help=f"RANKSxSTEPS, with commas (default {SIZES})")
    parser.add_argument("--ranks", type=int, help="one size, with --steps")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--every", type=int, default=10, help="steps from one that is recorded to the next")
    parser.add_argument("--only", action="append", choices=COMMANDS)
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes that make the runs")
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds that a command may take")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every figure")
    args = parser.parse_args(arguments)
    if (args.ranks is None) != (args.steps is None):
        parser.error("--ranks and --steps belong together")
    if args.ranks is None and not re.fullmatch(r"\d+x\d+(,\d+x\d+)*", args.sizes):
        parser.error(f"--sizes {args.sizes}: expected RANKSxSTEPS, with commas")
    sizes = [(args.ranks, args.steps)] if args.ranks else [tuple(map(int, s.split("x"))) for s in args.sizes.split(",")]
    figures: list[dict[str, Any]] = []
    failures = []
    print("| ranks x steps | rows | run | command | s | CPU s | peak MB | of it its own | bytes of its own a row |")
    print("|---|---|---|---|---|---|---|---|---|")
    for ranks, steps in sizes:
        middle = steps // args.every // 2 * args.every
        shape = Shape(
            ranks=ranks,
            steps=steps,
            every=args.every,
            nan=(middle, ranks // 2),
            differs=(middle + args.every, ranks // 3),
        )
        num_rows = shape.ranks * shape.rows_a_rank
        need = num_rows * _BYTES_A_ROW * 2 + ranks * _BYTES_A_RANK
        if (free := shutil.disk_usage(args.dir).free) < need + (2 << 30):
            parser.error(f"--dir {args.dir}: {free / 1e9:.1f} GB free, {need / 1e9:.1f} GB needed for {ranks}x{steps}")
        with tempfile.TemporaryDirectory(dir=args.dir, prefix="scale-") as folder:
            run = Path(folder) / "run"
            write_run(run, shape, jobs=args.jobs)
            num_bytes = sum(path.stat().st_size for path in run.rglob("*") if path.is_file())
            for what in args.only or COMMANDS:
                cost = ask(what, run, args.timeout)
                if found := wrong(what, cost, shape):
                    failures.append(f"{ranks}x{steps} {what}: {found}")
                print(
                    f"| {ranks}x{steps} | {num_rows:,} | {num_bytes / 1e6:,.0f} MB | {what} | {cost.seconds:.1f} "
                    f"| {cost.cpu_s:.1f} | {cost.peak_bytes / 1e6:,.0f} | {cost.peak_anon_bytes / 1e6:,.0f} "
                    f"| {cost.peak_anon_bytes / num_rows:,.0f} |",
                    flush=True,
                )
                one = {"ranks": ranks, "steps": steps, "rows": num_rows, "run_bytes": num_bytes, "command": what}
                figures.append(one | {k: v for k, v in cost._asdict().items() if k != "output"})
    _print_growth(figures)
    for line in failures:
        print(f"FINDING {line}")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")
    return int(bool(failures))


def _print_growth(figures: list[dict[str, Any]]) -> None:
    """How many times as much each larger size takes as the one with as many steps, or as many ranks, before it."""
    of = {(one["ranks"], one["steps"], one["command"]): one for one in figures}
    print("\n| from | to | rows | command | CPU s | own memory |\n|---|---|---|---|---|---|")
    for ranks, steps, what in of:
        is_smaller = {(r, s) for r, s, w in of if w == what and r <= ranks and s <= steps and (r, s) != (ranks, steps)}
        smaller = [(r, s) for r, s in is_smaller if r == ranks or s == steps]
        if smaller:
            before, now = of[(*max(smaller), what)], of[ranks, steps, what]
            grown = [now[name] / max(before[name], 1e-9) for name in ("rows", "cpu_s", "peak_anon_bytes")]
            print(
                f"| {before['ranks']}x{before['steps']} | {ranks}x{steps} | {grown[0]:.0f} times | {what} "
                f"| {grown[1]:.1f} times | {grown[2]:.1f} times |"
            )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
