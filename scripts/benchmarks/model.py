"""A model of what recording costs, and how well it predicts: the price of a record and the price of a KiB.

    python -m scripts.benchmarks model
    python -m scripts.benchmarks model --rounds 4

Two chains of modules, one of values of 1 KiB and one of values of 384 KiB, give the two prices on this machine.
Between two hooks, the chains fill the nearer caches with other data, as a training does. With these prices the steps of
three programs are predicted from the number of their values and bytes, and then measured, as `blocks` measures. Time is
the processor time of the training thread, and the writer thread has a core.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np

from scripts.benchmarks import parser_of

from . import blocks
from .processes import clean_env, progress, run_fresh
from .ways import Setting

CHAINS = ("cold-small", "cold-large")
PROGRAMS = ("demo", "nanogpt", "resnet18")
KEPT = {"statistics": "recorder, statistics", "tensors": "recorder, tensors"}


class Step(NamedTuple):
    """A step of the training thread, in milliseconds of its processor time."""

    without_ms: float
    with_ms: float


def count(workload: str) -> tuple[float, float]:
    """The values of a step, and their KiB."""
    with tempfile.TemporaryDirectory(prefix="bench-model-") as folder:
        arguments = ["count", folder, "--workload", workload, "--steps", "2", "--warmup", "1"]
        (result,) = run_fresh("scripts.benchmarks.train", arguments, clean_env(OMP_NUM_THREADS="1")).results
    return result["num_tensors"], result["num_bytes"] / 1024


def measure(workload: str, kept: str, args: argparse.Namespace) -> Step:
    progress(f"model: {workload}, {kept}")
    rounds = blocks.measure(KEPT[kept], Setting(workload, 1, 1, workload), args)
    without_ms = 1e3 * statistics.median(off["cpu_s"]["training"] for _, off in rounds)
    beyond_ms = 1e3 * statistics.median(on["cpu_s"]["training"] - off["cpu_s"]["training"] for on, off in rounds)
    return Step(without_ms, without_ms + beyond_ms)


def main(arguments: list[str]) -> int:
    parser = parser_of("model", __doc__)
    parser.add_argument("--rounds", type=int, default=8, help="pairs of blocks of each training (default 8)")
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()), help="where to record")
    args = parser.parse_args(arguments)
    if args.rounds < 2 or not args.dir.is_dir():
        parser.error("--rounds must be 2 or more, and --dir a directory")
    args.steps = 5
    counts = {workload: count(workload) for workload in (*CHAINS, *PROGRAMS)}
    print("| | kept | values | MiB | step, ms | with the recorder: predicted | measured | off by |")
    print("|---|---|---|---|---|---|---|---|")
    for kept in KEPT:
        chains = [measure(chain, kept, args) for chain in CHAINS]
        beyond_us = [1e3 * (step.with_ms - step.without_ms) for step in chains]
        record_us, kib_us = np.linalg.solve(np.array([counts[chain] for chain in CHAINS]), beyond_us).tolist()
        print(f"| the model | {kept} | {record_us:.1f} us each | {1.024 * kib_us:.2f} ms each | | | | |", flush=True)
        for program in PROGRAMS:
            step = measure(program, kept, args)
            values, kib = counts[program]
            predicted_ms = step.without_ms + 1e-3 * (record_us * values + kib_us * kib)
            cells = f"{values:.0f} | {kib / 1024:.1f} | {step.without_ms:.1f} | {predicted_ms:.1f} | {step.with_ms:.1f}"
            print(f"| {program} | {kept} | {cells} | {predicted_ms / step.with_ms - 1:+.1%} |", flush=True)
    return 0
