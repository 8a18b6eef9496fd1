"""What recording costs: the demo's training with and without, in fresh processes, interleaved in one run.

    python -m tests.bench                      both core settings, 5 rounds of 30 steps
    python -m tests.bench --cores spare --rounds 15 --json bench.json
    python -m tests.bench --sync               what syncing more or less often costs
    python -m tests.bench merge --help         what merging costs
    python -m tests.bench diff --help          what comparing equal runs costs
    python -m tests.bench taps --help          what taps in a compiled graph cost
    python -m tests.bench scale --help         what reading large runs costs
    python -m tests.bench storage --help       what recording asks of a file system
    python -m tests.bench gpu --help           what recording costs on a GPU

Every leaf module's output and every parameter's gradient at every step. Each round runs every recorder once, in an
order that moves on from round to round; a ratio is that of the median step times of one round, so that slow changes of
the machine cancel. `none again` is the same as `none`: its ratio is the spread below which nothing can be told.
RECORDER_* variables of the caller reach our own runs, so that settings can be compared. Exit code 1 where a recorder
dropped something or did not see the same tensors.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
CORES = {"busy": 2, "spare": 1}
"""Threads that train; the machine is taken to have two cores. `busy` leaves none for a writer."""
STEP_BYTES = 200 << 20
"""About what one step writes; for the check of free space."""
LEAVES = "leaf=yes site=output keep={keep}; site=grad keep={keep}"
TENSORS = {"RECORDER": "1", "RECORDER_RULES": LEAVES.format(keep="tensor")}
RECORDERS: dict[str, tuple[str, dict[str, str]]] = {
    "none": ("none", {}),
    "none again": ("none", {}),
    "hooks that do nothing": ("hooks", {}),
    "hooks, copy, drop": ("pool", {}),
    "torch.save per step": ("torch.save", {}),
    "safetensors per step": ("safetensors", {}),
    "recorder, tensors": ("none", TENSORS),
    "recorder, statistics": ("none", {"RECORDER": "1", "RECORDER_RULES": LEAVES.format(keep="stats")}),
}
"""What it is called in the table: the name that `tests.bench.train` knows, and the environment."""
SYNCS = {
    f"tensors, sync_interval_s={interval_s}": ("none", {**TENSORS, "RECORDER_SYNC_INTERVAL_S": interval_s})
    for interval_s in ("0", "0.1", "60")
}
"""What surviving a loss of power costs; with `--sync`."""


@dataclass
class Sample:
    """One process: its figures. Sizes in bytes, times in seconds."""

    step_s: float
    cpu_s_per_step: float
    loss: float
    exit_s: float
    peak_rss_bytes: int
    written_bytes_per_step: float
    num_tensors: int | None
    """Seen at a step; None where the recorder itself does not tell."""
    num_bytes: int | None
    drops: dict[str, int] = field(default_factory=dict)


def run_process(name: str, threads: int, args: argparse.Namespace) -> Sample:
    """Train once under the recorder of that name, in a directory that is removed afterwards."""
    recorder, extra = (RECORDERS | SYNCS)[name]
    with tempfile.TemporaryDirectory(dir=args.dir, prefix="bench-") as directory:
        env = {k: v for k, v in os.environ.items() if extra or not k.startswith("RECORDER")}
        env |= {"OMP_NUM_THREADS": str(threads), **extra}
        if extra:
            env["RECORDER_DIR"] = directory
            env.setdefault("RECORDER_MAX_BYTES", "1TB")
        result, exit_s, peak_rss_bytes, said = measure(recorder, directory, env, args)
        files = [path for path in Path(directory).rglob("*") if path.is_file()]
        written = sum(path.stat().st_size for path in files)
        if extra and not any(path.name == "_writer.json" for path in files):
            sys.exit(f"{name}: nothing was recorded; the process said: {said or 'nothing'}")
        num_tensors, num_bytes, drops = look_at_run(Path(directory), args) if extra else (None, None, {})
    return Sample(
        step_s=statistics.median(result["step_s"][args.warmup :]),
        cpu_s_per_step=result["cpu_s_per_step"],
        loss=result["loss"],
        exit_s=exit_s,
        peak_rss_bytes=peak_rss_bytes,
        written_bytes_per_step=written / args.steps,
        num_tensors=num_tensors,
        num_bytes=num_bytes,
        drops=drops,
    )


def measure(
    recorder: str, directory: str, env: dict[str, str], args: argparse.Namespace
) -> tuple[dict[str, Any], float, int, str]:
    """The figures of the process, the seconds from its last step to its end, its peak memory in bytes, its stderr."""
    command = [sys.executable, "-m", "tests.bench.train", recorder, directory]
    command += ["--steps", str(args.steps), "--warmup", str(args.warmup)]
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=stdout, stderr=stderr)
        _, status, usage = os.wait4(process.pid, 0)
        ended = time.time()
        process.returncode = os.waitstatus_to_exitcode(status)
        stdout.seek(0)
        stderr.seek(0)
        said = stderr.read().decode(errors="replace")[-4000:]
        if process.returncode != 0:
            sys.exit(f"{' '.join(command)} ended with {process.returncode}:\n{said}")
        result: dict[str, Any] = json.loads(stdout.read().splitlines()[-1])
    return result, ended - result["end_s"], usage.ru_maxrss * 1024, said


def look_at_run(directory: Path, args: argparse.Namespace) -> tuple[int, int, dict[str, int]]:
    """Tensors and bytes that a recorded run holds of one step, and what it dropped, by reason."""
    import recorder
    from recorder.format.dtypes import item_bytes

    (manifest,) = directory.glob("*/rank=*/*/_writer.json")
    ledger = json.loads(manifest.read_text())["ledger"]
    rows = recorder.open_run(directory).table(columns=["step", "part", "site", "dtype", "numel"]).to_pylist()
    last = max(row["step"] for row in rows)
    of_step = [row for row in rows if row["step"] == last and row["part"] == 0]
    num_bytes = sum(row["numel"] * item_bytes(row["dtype"]) for row in of_step)
    drops = {reason: int(number) for reason, number in ledger["dropped"].items() if number}
    if missing := args.steps * len(of_step) - sum(row["part"] == 0 for row in rows) - sum(drops.values()):
        drops["missing"] = missing
    return len(of_step), num_bytes, drops


def import_time_ms(rounds: int = 7) -> float:
    """Median milliseconds of `import recorder` in a fresh interpreter, which must not load torch."""
    code = (
        "import time, sys; t = time.perf_counter(); import recorder; t = time.perf_counter() - t; "
        "assert 'torch' not in sys.modules; print(t)"
    )
    env = {k: v for k, v in os.environ.items() if not k.startswith("RECORDER")}
    times = [
        float(subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, check=True).stdout)
        for _ in range(rounds)
    ]
    return statistics.median(times) * 1000


def summary(name: str, samples: dict[str, list[Sample]]) -> dict[str, Any]:
    """The figures of one recorder over all rounds, against `none` of the same round."""
    own, base = samples[name], samples["none"]

    def median(attribute: str, of: list[Sample] = own) -> float:
        return float(statistics.median(getattr(sample, attribute) for sample in of))

    ratios = sorted(a.step_s / b.step_s for a, b in zip(own, base, strict=True))
    return {
        "recorder": name,
        "step_s": median("step_s"),
        "ratio": statistics.median(ratios),
        "ratio_min": ratios[0],
        "ratio_max": ratios[-1],
        "cpu_s_per_step": median("cpu_s_per_step"),
        "written_mb_per_step": median("written_bytes_per_step") / 1e6,
        "drain_s": statistics.median(a.exit_s - b.exit_s for a, b in zip(own, base, strict=True)),
        "peak_rss_mb": median("peak_rss_bytes") / 1e6,
        "peak_rss_above_none_mb": (median("peak_rss_bytes") - median("peak_rss_bytes", base)) / 1e6,
        "drops": sum(sum(sample.drops.values()) for sample in own),
        "loss_equal": all(a.loss == b.loss for a, b in zip(own, base, strict=True)),
    }


def print_table(rows: list[dict[str, Any]]) -> None:
    """Markdown, so that it can be put into a page as it is."""
    head = ["recorder", "step s", "ratio", "min to max", "CPU s/step", "MB/step", "drain s", "peak MB", "drops", "loss"]
    body = [
        [
            row["recorder"],
            f"{row['step_s']:.3f}",
            f"{row['ratio']:.3f}",
            f"{row['ratio_min']:.2f} to {row['ratio_max']:.2f}",
            f"{row['cpu_s_per_step']:.2f}",
            f"{row['written_mb_per_step']:.1f}",
            f"{row['drain_s']:.1f}",
            f"{row['peak_rss_mb']:.0f}",
            str(row["drops"]),
            "equal" if row["loss_equal"] else "DIFFERS",
        ]
        for row in rows
    ]
    widths = [max(len(line[i]) for line in [head, *body]) for i in range(len(head))]
    for line in [head, ["-" * width for width in widths], *body]:
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |")


def findings(samples: dict[str, list[Sample]], seen: tuple[int, int]) -> list[str]:
    """What makes the figures of a recorder worthless: drops, and another set of tensors than the hooks see."""
    found = []
    for name, own in samples.items():
        for number, sample in enumerate(own):
            if sample.drops:
                found.append(f"{name}, round {number}: dropped {sample.drops}")
            if sample.num_tensors is not None and (sample.num_tensors, sample.num_bytes) != seen:
                found.append(
                    f"{name}, round {number}: {sample.num_tensors} tensors of {sample.num_bytes} bytes a step, "
                    f"the hooks see {seen[0]} of {seen[1]}"
                )
    return found


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=30, help="steps of each process (default 30)")
    parser.add_argument("--warmup", type=int, default=5, help="first steps that are not counted (default 5)")
    parser.add_argument("--cores", choices=[*CORES, "both"], default="both")
    parser.add_argument("--only", action="append", metavar="NAME", choices=RECORDERS, help="beside none; repeatable")
    parser.add_argument("--sync", action="store_true", help="compare sync intervals, and nothing else")
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()), help="where the recorders write")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every figure of every process")
    args = parser.parse_args()
    if args.rounds < 1 or not 0 <= args.warmup < args.steps:
        parser.error("--rounds must be 1 or more, and --steps more than --warmup")
    if not args.dir.is_dir():
        parser.error(f"--dir {args.dir} is no directory")
    free = shutil.disk_usage(args.dir).free
    if free < (need := args.steps * STEP_BYTES + (3 << 30)):
        parser.error(
            f"--dir {args.dir} has {free / 1e9:.1f} GB free, {need / 1e9:.1f} GB are needed for {args.steps} steps"
        )
    return args


def main() -> int:
    args = parse_args()
    names = [name for name in RECORDERS if name == "none" or not args.only or name in args.only]
    if args.sync:
        names = ["none", "none again", "recorder, tensors", *SYNCS]
    count_args = argparse.Namespace(steps=1, warmup=0)
    counted, *_ = measure(
        "count", str(args.dir), {k: v for k, v in os.environ.items() if k[:8] != "RECORDER"}, count_args
    )
    seen = (counted["num_tensors"], counted["num_bytes"])
    report: dict[str, Any] = {
        "cores_of_machine": os.cpu_count(),
        "python": sys.version.split()[0],
        "import_ms": import_time_ms(),
        "tensors_per_step": seen[0],
        "bytes_per_step": seen[1],
        **{key: getattr(args, key) for key in ("rounds", "steps", "warmup")},
        "settings": {},
    }
    print(f"import recorder: {report['import_ms']:.1f} ms, without torch")
    print(f"a step: {seen[0]} tensors, {seen[1] / 1e6:.1f} MB")
    failures: list[str] = []
    for cores in CORES if args.cores == "both" else [args.cores]:
        threads = CORES[cores]
        samples: dict[str, list[Sample]] = {name: [] for name in names}
        for number in range(args.rounds):
            first = number % len(names)
            for name in names[first:] + names[:first]:
                if sys.stderr.isatty():
                    print(f"\r{cores}, round {number + 1}: {name:24}\r", end="", file=sys.stderr, flush=True)
                samples[name].append(run_process(name, threads, args))
        rows = [summary(name, samples) for name in names]
        found = findings(samples, seen)
        print(f"\n{cores}: {threads} training thread(s), {args.rounds} round(s) of {args.steps} steps\n")
        print_table(rows)
        for line in found:
            print(f"FINDING {line}")
        failures += found
        report["settings"][cores] = {
            "threads": threads,
            "rows": rows,
            "findings": found,
            "samples": {name: [asdict(sample) for sample in own] for name, own in samples.items()},
        }
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if failures else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["diff"]:
        from tests.bench.diff import main as main_of_diff

        sys.exit(main_of_diff(sys.argv[2:]))
    if sys.argv[1:2] == ["merge"]:
        from tests.bench.merge import main as main_of_merge

        sys.exit(main_of_merge(sys.argv[2:]))
    if sys.argv[1:2] == ["scale"]:
        from tests.bench.scale import main as main_of_scale

        sys.exit(main_of_scale(sys.argv[2:]))
    if sys.argv[1:2] == ["storage"]:
        from tests.bench.storage import main as main_of_storage

        sys.exit(main_of_storage(sys.argv[2:]))
    if sys.argv[1:2] == ["taps"]:
        from tests.bench.taps import main as main_of_taps

        sys.exit(main_of_taps(sys.argv[2:]))
    if sys.argv[1:2] == ["gpu"]:
        from tests.bench.gpu import main as main_of_gpu

        sys.exit(main_of_gpu(sys.argv[2:]))
    sys.exit(main())
