"""What a record costs in counts that hold on a busy machine, against stored ones; for every change.

    python -m scripts.benchmarks keep              compare with scripts/benchmarks/keep.json
    python -m scripts.benchmarks keep --write      store what is found

Of a small training under five kinds of rules: bytes written, calls on the training thread (of Python and of C, beyond
those of the same training without a recorder), calls of the writer's work on a record, and memory blocks that a record
under way holds. Wall time is never looked at; CPU time is shown, the least of many steps, and not judged. Exit code 1
where something is more than 10 % above what was stored, 2 where what was stored is of another Python or torch.
"""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from recorder import native
from scripts.benchmarks import parser_of

from .processes import ROOT, clean_env, progress, run_fresh

STORED = Path(__file__).with_suffix(".json")
TOLERANCE = 0.1
FIGURES = {
    "written_bytes": "bytes written a record",
    "training_calls": "calls on the training thread a record",
    "writer_calls": "calls of the writer's work a record",
    "blocks": "memory blocks that a record under way holds",
    "instructions": "thousand instructions of the whole process a record",
}
SHOWN = {"training_us": "us of CPU on the training thread a record, the least of many steps"}
CASES = {
    "tensors": "keep=tensor",
    "statistics": "keep=stats",
    "histograms": "keep=histogram",
    "units": "keep=units",
    "fingerprints": "keep=fingerprint",
    "nothing at this step": "keep=tensor steps=1000000000",
}
NUM_STEPS, NUM_CPU_STEPS, NUM_LAYERS = 8, 60, 40
WORK_FILES = (
    "write/rows.py",
    *(f"format/{name}.py" for name in ("codec", "encodings", "fingerprint")),
    *(f"numerics/{name}.py" for name in ("histogram", "units")),
    "staging/measure.py",
)
"""What runs for each record; the rest of the writer also looks at clocks."""


class Calls:
    """Counts the calls of a thread while it is the profiler."""

    def __init__(self, files: tuple[str, ...] = ()) -> None:
        self.num = 0
        self.files = files

    def __call__(self, frame: FrameType, event: str, _arg: object) -> None:
        if event in ("call", "c_call") and (not self.files or frame.f_code.co_filename.endswith(self.files)):
            self.num += 1


def train(rules: str | None, folder: Path) -> tuple[dict[str, float], int]:
    """The figures of one training, not yet divided by its records, and how many values its hooks see at a step."""
    import torch
    from torch import nn

    import recorder

    from .written import gated_writer

    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(*[layer for _ in range(NUM_LAYERS) for layer in (nn.Linear(32, 32), nn.ReLU())])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs = torch.randn(64, 32)
    gate = gated_writer()

    def step() -> None:
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    work = Calls(WORK_FILES)
    threading.setprofile(work)
    attached = None
    if rules is not None:
        settings: dict[str, Any] = {"flush_interval_s": 600.0, "sync_interval_s": 600.0, "min_free_bytes": 0}
        attached = recorder.attach(model, enabled=True, dir=str(folder), rules=rules, **settings)
    threading.setprofile(None)

    def drain() -> None:
        if attached is not None:
            assert attached.flush(60.0)

    for _ in range(3):
        step()
    drain()
    counts = []
    for _ in range(NUM_STEPS):
        counts.append(_calls(step))
        drain()
    found = {"training_calls": float(min(counts)) * NUM_STEPS}  # more where the pool was given back late
    gate.clear()
    found["blocks"] = float(_blocks(step)) * NUM_STEPS
    gate.set()
    drain()
    num_before = work.num
    for _ in range(NUM_STEPS):
        step()
    drain()
    found["writer_calls"] = float(work.num - num_before)
    times = []
    for _ in range(NUM_CPU_STEPS):
        begun_s = time.thread_time()
        step()
        times.append(time.thread_time() - begun_s)
        drain()
    found["training_us"] = min(times) * 1e6 * NUM_STEPS
    num_steps = 3 + NUM_STEPS + 1 + NUM_STEPS + NUM_CPU_STEPS
    if attached is not None:
        attached.close()
    written = sum(path.stat().st_size for path in folder.rglob("*.arrow"))
    found["written_bytes"] = written / num_steps * NUM_STEPS
    return found, 2 * NUM_LAYERS + 2 * NUM_LAYERS


def _calls(step: Callable[[], None]) -> int:
    calls = Calls()
    sys.setprofile(calls)
    try:
        step()
    finally:
        sys.setprofile(None)
    return calls.num


def _blocks(step: Callable[[], None]) -> int:
    """How many more memory blocks of Python there are after a step than before it."""
    tracemalloc.start()
    try:
        before = tracemalloc.take_snapshot()
        step()
        after = tracemalloc.take_snapshot()
    finally:
        tracemalloc.stop()
    kept = [tracemalloc.Filter(False, tracemalloc.__file__)]
    return sum(
        difference.count_diff
        for difference in after.filter_traces(kept).compare_to(before.filter_traces(kept), "lineno")
    )


def child(case: str) -> None:
    """One process: print the figures of a case."""
    with tempfile.TemporaryDirectory(prefix="bench-keep-") as folder:
        rules = None if case == "none" else f"leaf=yes site=output {CASES[case]}; site=grad {CASES[case]}"
        found, num_values = train(rules, Path(folder))
    print(json.dumps({"figures": found, "num_records": num_values * NUM_STEPS, "end_s": 0.0}))


def measure_instructions(case: str) -> float | None:
    """Instructions of the process of a case; None where there is no `perf` that may count them."""
    if shutil.which("perf") is None:
        return None
    command = ["perf", "stat", "-x", ",", "-e", "instructions:u", sys.executable, "-m", "scripts.benchmarks.keep", case]
    done = subprocess.run(
        command, cwd=ROOT, env=clean_env(OMP_NUM_THREADS="1"), capture_output=True, text=True, timeout=600
    )
    counts = [line.split(",")[0] for line in done.stderr.splitlines() if ",instructions" in line]
    return float(counts[0]) if done.returncode == 0 and counts and counts[0].isdigit() else None


def measure_all() -> dict[str, dict[str, float]]:
    """The figures of each case, a record."""
    env = clean_env(OMP_NUM_THREADS="1", PYTHONHASHSEED="0")
    progress("keep: no recording")
    base = run_fresh("scripts.benchmarks.keep", ["none"], env).results[0]["figures"]
    base_instructions = measure_instructions("none")
    found: dict[str, dict[str, float]] = {}
    for case in CASES:
        progress(f"keep: {case}")
        result = run_fresh("scripts.benchmarks.keep", [case], env).results[0]
        num_records = result["num_records"]
        found[case] = {name: (value - base[name]) / num_records for name, value in result["figures"].items()}
        instructions = None if base_instructions is None else measure_instructions(case)
        if base_instructions is not None and instructions is not None:
            found[case]["instructions"] = (instructions - base_instructions) / 1e3 / num_records
    return found


def compare(stored: dict[str, dict[str, float]], found: dict[str, dict[str, float]]) -> tuple[list[str], list[str]]:
    """A line for each figure, and of them those that are worse than was stored."""
    lines, worse = [], []
    for case, figures in found.items():
        for name, text in FIGURES.items():
            if name not in figures or name not in stored.get(case, {}):
                continue
            before, now = stored[case][name], figures[name]
            allowed = before + max(TOLERANCE * abs(before), 0.1)  # a tenth of a call is none
            line = f"{case}: {now:.2f} {text}, stored {before:.2f}"
            if now > allowed:
                line = f"REGRESSION {line}, allowed {allowed:.2f}"
                worse.append(line)
            elif now < before - max(TOLERANCE * abs(before), 0.1):
                line += "; better, so store it (--write)"
            lines.append(line)
        lines += [f"{case}: {figures[name]:.1f} {text}; not judged" for name, text in SHOWN.items() if name in figures]
    return lines, worse


def versions() -> dict[str, str]:
    from importlib.metadata import version

    return {
        "python": ".".join(platform.python_version_tuple()[:2]),
        "torch": version("torch").partition("+")[0],
        "pyarrow": version("pyarrow"),
        "loops": native.in_force().partition(" ")[0],
    }


def main(arguments: list[str]) -> int:
    parser = parser_of("keep", __doc__)
    parser.add_argument("--write", action="store_true", help="store what is found")
    parser.add_argument("--file", type=Path, default=STORED, help=f"where it is stored (default {STORED.name})")
    args = parser.parse_args(arguments)
    of = versions()
    stored: dict[str, Any] = {"of": of, "figures": {}}
    if not args.write:
        try:
            stored = json.loads(args.file.read_text())
        except (OSError, ValueError) as error:
            print(f"keep: {args.file} cannot be read ({error}); --write makes it", file=sys.stderr)
            return 2
        if stored["of"] != of:
            print(f"keep: {args.file} is of {stored['of']}, this is {of}; --write stores anew", file=sys.stderr)
            return 2
    found = measure_all()
    if args.write:
        judged = {
            case: {name: round(figures[name], 3) for name in FIGURES if name in figures}
            for case, figures in found.items()
        }
        args.file.write_text(json.dumps({"of": of, "figures": judged}, indent=1) + "\n")
    lines, worse = compare(stored["figures"] or found, found)
    print("\n".join(lines))
    if not any("instructions" in figures for figures in found.values()):
        print("instructions: skipped, there is no `perf` here that may count them")
    print("system calls: skipped, counting them needs a tracer; bytes and calls of the writer stand for them")
    return 1 if worse else 0


if __name__ == "__main__":
    child(sys.argv[1])
