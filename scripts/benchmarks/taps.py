"""What taps in a compiled graph cost, in fresh processes, interleaved in one run.

    python -m scripts.benchmarks taps                 5 rounds of 40 steps, one training thread
    python -m scripts.benchmarks taps --threads 2

A small transformer compiled by inductor, with a tap at the output of every module without children and so at its
gradient: against the same graph without taps (twice), with a clone in place of each tap, and with the taps while
nothing records, when compiled code has none.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from scripts.benchmarks import parser_of

ROOT = Path(__file__).parents[2]
RULES = "leaf=yes site=output,grad_output keep="
VARIANTS = {
    "none": ("plain", ""),
    "none again": ("plain", ""),
    "a clone at each output": ("clone", ""),
    "taps, nothing records": ("taps", ""),
    "taps, statistics": ("taps", "stats"),
    "taps, tensors": ("taps", "tensor"),
}


def train(kind: str, steps: int, warmup: int) -> None:
    """One process: prints its median seconds a step, its loss, and how many tensors pass a tap at a step."""
    import torch
    from torch import nn

    import recorder

    torch.manual_seed(0)
    width, num_blocks = 256, 4
    layers = [nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True) for _ in range(num_blocks)]
    model = nn.Sequential(nn.Linear(64, width), *layers, nn.Linear(width, 64))
    leaves = [module for module in model.modules() if next(module.children(), None) is None]
    if kind == "clone":
        for module in leaves:
            module.register_forward_hook(lambda module, args, output: output.clone())
    elif kind == "taps":
        recorder.instrument(model, select="leaf=yes")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    compiled = torch.compile(model)
    batch = torch.randn(8, 128, 64)
    step_s = []
    loss = torch.zeros(())
    for _ in range(steps):
        started = time.perf_counter()
        loss = compiled(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step_s.append(time.perf_counter() - started)
    num_seen = 2 * len(leaves)  # outputs and their gradients
    print(json.dumps({"step_s": statistics.median(step_s[warmup:]), "loss": loss.item(), "num_seen": num_seen}))


def measure(name: str, args: argparse.Namespace) -> dict[str, Any]:
    kind, keep = VARIANTS[name]
    with tempfile.TemporaryDirectory(dir=args.dir, prefix="bench-") as directory:
        env = {k: v for k, v in os.environ.items() if not k.startswith("RECORDER")}
        env["OMP_NUM_THREADS"] = str(args.threads)
        if keep:
            env |= {"RECORDER": "1", "RECORDER_DIR": directory, "RECORDER_RULES": RULES + keep}
        command = [sys.executable, "-m", "scripts.benchmarks.taps", kind, str(args.steps), str(args.warmup)]
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{name} ended with {done.returncode}:\n{done.stderr[-4000:]}")
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        found["rows"] = found["dropped"] = 0
        for manifest in Path(directory).glob("*/rank=*/*/_writer.json"):
            ledger = json.loads(manifest.read_text())["ledger"]
            found["rows"], found["dropped"] = ledger["written"] / args.steps, sum(ledger["dropped"].values())
    return found


def main(arguments: list[str]) -> int:
    parser = parser_of("taps", __doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--warmup", type=int, default=10, help="first steps that are not counted (default 10)")
    parser.add_argument("--threads", type=int, default=1, help="of training (default 1)")
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()), help="where the recorder writes")
    args = parser.parse_args(arguments)
    samples: dict[str, list[dict[str, Any]]] = {name: [] for name in VARIANTS}
    names = list(VARIANTS)
    for number in range(args.rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            if sys.stderr.isatty():
                print(f"\rround {number + 1}: {name:24}\r", end="", file=sys.stderr, flush=True)
            samples[name].append(measure(name, args))
    print(f"{args.threads} training thread(s), {args.rounds} round(s) of {args.steps} steps, inductor\n")
    head = ["graph", "step ms", "ratio", "min to max", "us a tensor", "rows a step", "dropped"]
    print("| " + " | ".join(head) + " |\n|" + "---|" * len(head))
    for name, own in samples.items():
        pairs = list(zip(own, samples["none"], strict=True))
        ratios = sorted(one["step_s"] / base["step_s"] for one, base in pairs)
        beyond_us = statistics.median((one["step_s"] - base["step_s"]) / base["num_seen"] * 1e6 for one, base in pairs)
        cells = [
            name,
            f"{statistics.median(one['step_s'] for one in own) * 1e3:.1f}",
            f"{statistics.median(ratios):.3f}",
            f"{ratios[0]:.2f} to {ratios[-1]:.2f}",
            f"{beyond_us:.0f}",
            f"{own[0]['rows']:.0f}",
            str(sum(one["dropped"] for one in own)),
        ]
        print("| " + " | ".join(cells) + " |")
    return int(any(one["dropped"] for own in samples.values() for one in own))


if __name__ == "__main__":
    train(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
