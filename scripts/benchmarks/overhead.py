"""What recording costs: trainings with and without, in fresh processes, interleaved in one run.

    python -m scripts.benchmarks overhead                            all settings, 5 rounds of 30 steps
    python -m scripts.benchmarks overhead --settings spare --rounds 15 --json bench.json
    python -m scripts.benchmarks overhead --peers --settings busy    also other tools, of `pip install '.[peers]'`
    python -m scripts.benchmarks overhead --sync                     also what syncing more or less often costs
    python -m scripts.benchmarks                                     the other benchmarks, by name

Every leaf module's output and every parameter's gradient at every step. Each round runs every recorder once, in an
order that moves on from round to round; a ratio is that of the median step times of one round, so that slow changes of
the machine cancel. `no recording, again` is the same as `no recording`: its ratios are the spread below which nothing
can be told. CPU seconds are those of a step, the end of the process included, beyond that of a process without a
recorder. What the machine allows is measured in each round, too. RECORDER_* variables of the caller reach our own runs,
so that settings can be compared. Slow tools take part in every third round. Exit code 1 where a recorder dropped
something, did not see the same tensors, or changed the training.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from scripts.benchmarks import parser_of

from . import machine, table
from .processes import ROOT, Ended, clean_env, progress, run_fresh
from .ways import AGAIN, BASE, SETTINGS, WAYS, Setting, chosen

STEP_BYTES = 200 << 20
"""About what one step of a rank writes; for the check of free space."""


def train(recorder: str, directory: Path, setting: Setting, env: dict[str, str], steps: int, warmup: int) -> Ended:
    """One training, in processes of its own."""
    arguments = [recorder, str(directory), "--workload", setting.workload]
    arguments += ["--steps", str(steps), "--warmup", str(warmup)]
    env |= {"OMP_NUM_THREADS": str(setting.num_threads), "WANDB_MODE": "offline"}
    return run_fresh("scripts.benchmarks.train", arguments, env, num_ranks=setting.num_ranks)


def measure(name: str, setting: Setting, args: argparse.Namespace) -> dict[str, Any]:
    """Train once under the recorder of that name, in a directory that is removed afterwards; its figures."""
    way = WAYS[name]
    with tempfile.TemporaryDirectory(dir=args.dir, prefix="bench-", ignore_cleanup_errors=True) as folder:
        env = clean_env()
        if way.env:
            own = {key: value for key, value in os.environ.items() if key.startswith("RECORDER")}
            env |= {"RECORDER_MAX_BYTES": "1TB", **own, **way.env, "RECORDER_DIR": folder}
        ended = train(way.recorder, Path(folder), setting, env, args.steps, args.warmup)
        written = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
        seen: dict[str, Any] = {}
        if way.env:
            seen = look_at_run(Path(folder), args.steps, ended.said)
    steps_of_ranks = zip(*(result["step_s"][args.warmup :] for result in ended.results), strict=True)
    num_counted = args.steps - args.warmup
    return {
        "step_s": statistics.median(max(times) for times in steps_of_ranks),
        "cpu_s": {key: sum(result["cpu_s"][key] for result in ended.results) for key in ended.results[0]["cpu_s"]},
        "exit_cpu_s": ended.exit_cpu_s / num_counted,
        "drain_s": ended.drain_s,
        "digest": [result["digest"] for result in ended.results],
        "peak_rss_bytes": ended.peak_rss_bytes,
        "written_bytes": written / args.steps,
        **seen,
    }


def look_at_run(folder: Path, steps: int, said: str) -> dict[str, Any]:
    """Tensors and bytes that a recorded run holds of its last step, and what it dropped, by reason."""
    import recorder
    from recorder.numerics.dtypes import item_bytes

    manifests = list(folder.glob("*/rank=*/*/_writer.json"))
    if not manifests:
        sys.exit(f"nothing was recorded; the process said: {said or 'nothing'}")
    drops: dict[str, int] = {}
    for manifest in manifests:
        for reason, number in json.loads(manifest.read_text())["ledger"]["dropped"].items():
            drops[reason] = drops.get(reason, 0) + int(number)
    rows = recorder.open_run(folder).table(columns=["step", "part", "dtype", "numel"]).to_pylist()
    last = max((row["step"] for row in rows), default=0)
    of_step = [row for row in rows if row["step"] == last and row["part"] == 0]
    if missing := steps * len(of_step) - sum(row["part"] == 0 for row in rows) - sum(drops.values()):
        drops["missing"] = missing
    return {
        "num_tensors": len(of_step),
        "num_bytes": sum(row["numel"] * item_bytes(row["dtype"]) for row in of_step),
        "drops": {reason: number for reason, number in drops.items() if number},
    }


def count(setting: Setting, args: argparse.Namespace) -> tuple[dict[str, float], Any]:
    """What hooks see at a step, of all ranks, and a sample of the values."""
    with tempfile.TemporaryDirectory(dir=args.dir, prefix="bench-") as folder:
        ended = train("count", Path(folder), setting, clean_env(), steps=1, warmup=0)
        sample = np.load(Path(folder) / "sample.npy")
    return {key: sum(result[key] for result in ended.results) for key in ("num_tensors", "num_bytes")}, sample


def findings(name: str, samples: Sequence[dict[str, Any] | None], base: list[Any], seen: dict[str, float]) -> list[str]:
    """What makes the figures of a recorder worthless: drops, other tensors than the hooks see, another training."""
    found = []
    for number, sample in enumerate(samples):
        if sample is None:
            continue
        if sample.get("drops"):
            found.append(f"{name}, round {number + 1}: dropped {sample['drops']}")
        if sample["digest"] != base[number]["digest"]:
            found.append(f"{name}, round {number + 1}: losses or parameters differ from those without a recorder")
        if "num_tensors" in sample and WAYS[name].keeps_rows:
            recorded = {key: sample[key] for key in seen}
            if recorded != seen:
                found.append(f"{name}, round {number + 1}: {recorded} a step, the hooks see {seen}")
    return found


def import_ms(rounds: int = 7) -> float:
    """Median milliseconds of `import recorder` in a fresh interpreter, which must not load torch."""
    code = (
        "import time, sys; t = time.perf_counter(); import recorder; t = time.perf_counter() - t; "
        "assert 'torch' not in sys.modules; print(t)"
    )
    command = [sys.executable, "-c", code]
    times = [
        float(subprocess.run(command, cwd=ROOT, env=clean_env(), capture_output=True, check=True, timeout=60).stdout)
        for _ in range(rounds)
    ]
    return statistics.median(times) * 1000


def peers_there() -> dict[str, Any]:
    """Which peers can be imported here, and why the others cannot."""
    peers: dict[str, Any] = run_fresh("scripts.benchmarks.peers", [], clean_env()).results[0]["peers"]
    return peers


def run_setting(name: str, args: argparse.Namespace, left_out: set[str]) -> Iterator[dict[str, Any]]:
    """All rounds of one setting; what is known so far after each."""
    setting = SETTINGS[name]
    seen, sample = count(setting, args)
    names = [way for way in chosen(name, only=args.only, peers=args.peers, sync=args.sync) if way not in left_out]
    samples: dict[str, list[dict[str, Any] | None]] = {way: [] for way in names}
    limits = []
    for number in range(args.rounds):
        first = number % len(names)
        for way in names[first:] + names[:first]:
            if number % WAYS[way].every:
                samples[way].append(None)
                continue
            progress(f"{name}, round {number + 1} of {args.rounds}: {way}")
            samples[way].append(measure(way, setting, args))
        limits.append(machine.limits(sample, args.dir))
        yield {
            "text": setting.text,
            "seen": seen,
            "keeps_tensors": [way for way in names if WAYS[way].keeps_tensors],
            "limits": {key: statistics.median(one[key] for one in limits) for key in limits[0]},
            "findings": [line for way in names for line in findings(way, samples[way], samples[BASE], seen)],
            "samples": samples,
        }


def main(arguments: list[str]) -> int:
    args = parse_args(arguments)
    report: dict[str, Any] = {
        "machine": f"{os.cpu_count()} cores, Python {platform.python_version()}",
        "import_ms": import_ms(),
        "rounds": args.rounds,
        "steps": args.steps,
        "warmup": args.warmup,
        "base": [BASE, AGAIN],
        "peers": peers_there() if args.peers else {},
        "settings": {},
    }
    left_out = {
        name for name, way in WAYS.items() if way.group == "peers" and "reason" in report["peers"].get(way.recorder, {})
    }
    for name in args.settings:
        for so_far in run_setting(name, args, left_out):
            report["settings"][name] = so_far
            if args.json:  # an hour's figures must not be lost with the last one's
                args.json.write_text(json.dumps(report, indent=1) + "\n")
    print(table.markdown(report))
    return 1 if any(one["findings"] for one in report["settings"].values()) else 0


def parse_args(arguments: list[str]) -> argparse.Namespace:
    parser = parser_of("overhead", __doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=30, help="steps of each process (default 30)")
    parser.add_argument("--warmup", type=int, default=5, help="first steps that are not counted (default 5)")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS), metavar="SETTING")
    parser.add_argument(
        "--only", action="append", default=[], metavar="NAME", choices=WAYS, help="beside no recording; repeatable"
    )
    parser.add_argument("--peers", action="store_true", help="also the tools of the extra `peers`")
    parser.add_argument("--sync", action="store_true", help="also other sync intervals")
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()), help="where the recorders write")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every figure of every process")
    args = parser.parse_args(arguments)
    if args.rounds < 1 or not 0 <= args.warmup < args.steps:
        parser.error("--rounds must be 1 or more, and --steps more than --warmup")
    if not args.dir.is_dir():
        parser.error(f"--dir {args.dir} is no directory")
    if any(WAYS[name].group == "peers" for name in args.only):
        args.peers = True
    free = shutil.disk_usage(args.dir).free
    num_ranks = max(SETTINGS[name].num_ranks for name in args.settings)
    if free < (need := num_ranks * args.steps * STEP_BYTES * (4 if args.peers else 1) + (3 << 30)):
        parser.error(
            f"--dir {args.dir} has {free / 1e9:.1f} GB free, {need / 1e9:.1f} GB are needed for {args.steps} steps"
        )
    if not (ROOT / "scripts" / "demo_train.py").exists():
        parser.error("scripts/demo_train.py is not there; run it from a clone")
    return args
