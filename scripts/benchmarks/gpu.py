"""What recording costs on a GPU, in fresh processes, interleaved in one run; it has never been run on one.

    python -m scripts.benchmarks gpu                    5 rounds of 40 steps
    python -m scripts.benchmarks gpu --dir /dev/shm     where the disk shall not be the limit

A transformer in bfloat16 autocast; every leaf module's output and every gradient. The last columns set the bytes of a
step against what the bus takes to bring as many (a page-locked copy, measured first): `of the bus` is the share of its
speed that recording reached, `hidden` the share of the copying that training did not feel. Exit code 1 where something
was dropped or the loss is another, 2 without a device.
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
RULES = "leaf=yes site=output keep={keep}; site=grad keep={keep}"
VARIANTS = {
    "none": "",
    "none again": "",
    "recorder, tensors": "tensor",
    "recorder, statistics": "stats",
    "recorder, statistics and fingerprints": "stats,fingerprint",
}
_COPY_BYTES, _NUM_COPIES = 256 << 20, 20


def train(steps: int, warmup: int, width: int) -> None:
    """One process: prints its median seconds a step and its loss."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    blocks = [nn.TransformerEncoderLayer(width, 16, 4 * width, dropout=0.0, batch_first=True) for _ in range(8)]
    model = nn.Sequential(*blocks, nn.Linear(width, 256)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    batch = torch.randn(8, 512, width, device="cuda")
    step_s = []
    loss = torch.zeros(())
    for _ in range(steps):
        torch.cuda.synchronize()
        started = time.perf_counter()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(batch).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        step_s.append(time.perf_counter() - started)
    print(json.dumps({"step_s": statistics.median(step_s[warmup:]), "loss": loss.item()}))


def bus_bytes_per_s() -> None:
    """Another: prints how fast the device writes to page-locked memory of the host."""
    import torch

    source = torch.zeros(_COPY_BYTES, dtype=torch.uint8, device="cuda")
    host = torch.empty(_COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    host.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(_NUM_COPIES):
        host.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    print(json.dumps({"bytes_per_s": _NUM_COPIES * _COPY_BYTES / seconds, "device": torch.cuda.get_device_name()}))


def run_child(arguments: list[str], env: dict[str, str]) -> dict[str, Any]:
    command = [sys.executable, "-m", "scripts.benchmarks.gpu", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=1800)
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-4000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """One sample: seconds a step, the loss, bytes that were seen of a step, and what was dropped."""
    keep = VARIANTS[name]
    with tempfile.TemporaryDirectory(dir=args.dir, prefix="bench-") as directory:
        env = {k: v for k, v in os.environ.items() if keep or not k.startswith("RECORDER")}
        if keep:
            env |= {"RECORDER": "1", "RECORDER_DIR": directory, "RECORDER_RULES": RULES.format(keep=keep)}
            env.setdefault("RECORDER_MAX_BYTES", "1TB")
        found = run_child(["train", str(args.steps), str(args.warmup), str(args.width)], env)
        found |= {"num_bytes": 0, "dropped": {}}
        if keep:
            found |= look_at_run(Path(directory))
    return found


def look_at_run(directory: Path) -> dict[str, Any]:
    import recorder
    from recorder.numerics.dtypes import item_bytes

    (manifest,) = directory.glob("*/rank=*/*/_writer.json")
    rows = recorder.open_run(directory).table(columns=["step", "part", "dtype", "numel"]).to_pylist()
    last = max(row["step"] for row in rows)
    of_step = [row for row in rows if row["step"] == last and row["part"] == 0]
    return {
        "num_bytes": sum(row["numel"] * item_bytes(row["dtype"]) for row in of_step),
        "dropped": json.loads(manifest.read_text())["ledger"]["dropped"],
    }


def print_table(samples: dict[str, list[dict[str, Any]]], bus_bytes: float) -> None:
    head = ["", "step ms", "ratio", "min to max", "MB a step", "of the bus", "hidden", "dropped"]
    print("| " + " | ".join(head) + " |\n|" + "---|" * len(head))
    for name, own in samples.items():
        pairs = list(zip(own, samples["none"], strict=True))
        ratios = sorted(one["step_s"] / base["step_s"] for one, base in pairs)
        step_s, num_bytes = statistics.median(one["step_s"] for one in own), own[0]["num_bytes"]
        copying_s = num_bytes / bus_bytes
        felt_s = statistics.median(one["step_s"] - base["step_s"] for one, base in pairs)
        is_copied = VARIANTS[name] == "tensor"
        cells = [
            *(name, f"{step_s * 1e3:.1f}", f"{statistics.median(ratios):.3f}", f"{ratios[0]:.2f} to {ratios[-1]:.2f}"),
            f"{num_bytes / 1e6:.1f}",
            f"{copying_s / step_s:.2f}" if is_copied else "",
            f"{1 - felt_s / copying_s:.2f}" if is_copied else "",
            str(sum(sum(one["dropped"].values()) for one in own)),
        ]
        print("| " + " | ".join(cells) + " |")


def main(arguments: list[str]) -> int:
    parser = parser_of("gpu", __doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--warmup", type=int, default=10, help="first steps that are not counted (default 10)")
    parser.add_argument("--width", type=int, default=1024, help="of the model (default 1024)")
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()), help="where the recorder writes")
    args = parser.parse_args(arguments)
    import torch

    if not torch.cuda.is_available():
        print(
            f"scripts.benchmarks gpu: no CUDA device (torch {torch.__version__}); run it on a machine with one",
            file=sys.stderr,
        )
        return 2
    clean = {k: v for k, v in os.environ.items() if not k.startswith("RECORDER")}
    bus = run_child(["bus"], clean)
    samples: dict[str, list[dict[str, Any]]] = {name: [] for name in VARIANTS}
    names = list(VARIANTS)
    for number in range(args.rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            samples[name].append(measure(name, args))
    print(
        f"{bus['device']}, {args.rounds} round(s) of {args.steps} steps, the bus {bus['bytes_per_s'] / 1e9:.1f} GB/s\n"
    )
    print_table(samples, bus["bytes_per_s"])
    everything = [one for own in samples.values() for one in own]
    return int(any(one["dropped"] for one in everything) or len({one["loss"] for one in everything}) > 1)


if __name__ == "__main__":
    if sys.argv[1] == "bus":
        bus_bytes_per_s()
    else:
        train(*map(int, sys.argv[2:5]))
