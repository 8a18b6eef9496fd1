"""What recording asks of a file system: one process trains with the default settings, and every call is counted.

    python -m scripts.benchmarks storage
    python -m scripts.benchmarks storage --seconds 60 --layers 24 --width 512

The calls are counted where all files of a recording are made (`Disk` in write/file.py), and directories that
are listed by Python's audit events. They are told apart by when they come: at the start, until the first step is on
disk, in the seconds after that, and at the end. Steps take as long as `--step-s` says at least: as in a large training
it is then the seconds, and not the steps, that make the calls.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from scripts.benchmarks import parser_of

ROOT = Path(__file__).parents[2]
CREATES = ("create", "make_directory", "link")
"""What takes a new name in a directory."""
METADATA = (*CREATES, "unlink", "replace", "remove_directory", "truncate", "free_bytes", "is_linked", "list")
"""Without `sync` and `sync_directory`, which stand apart, and `write` and `close`."""
KINDS = (*METADATA, "sync", "sync_directory", "write", "written_bytes")


def train(folder: str, args: argparse.Namespace) -> dict[str, Any]:
    """In a process of its own: the counts by part."""
    import torch
    from torch import nn

    import recorder
    from recorder.write.file import Disk

    counts: Counter[str] = Counter()
    for name in ("create", "make_directory", "remove_directory", "link", "replace", "unlink", "truncate", "sync",
                 "sync_directory", "free_bytes", "is_linked", "write"):  # fmt: skip
        _count(Disk, name, counts)

    def listed(event: str, values: tuple[Any, ...]) -> None:
        if event in ("os.listdir", "os.scandir") and str(values[0]).startswith(folder):
            counts["list"] += 1

    sys.addaudithook(listed)
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(args.width, args.width), nn.GELU()) for _ in range(args.layers // 2))
    model = nn.Sequential(*blocks)
    optimizer = torch.optim.AdamW(model.parameters())
    parts = {}
    attached = recorder.attach(model, enabled=True, dir=folder)
    assert attached is not None
    num_steps = 0

    def step() -> None:
        nonlocal num_steps
        began_s = time.monotonic()
        model(torch.randn(32, args.width)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        num_steps += 1
        time.sleep(max(0.0, args.step_s - (time.monotonic() - began_s)))

    def part(name: str, seconds: float) -> None:
        parts[name] = {"seconds": seconds, "steps": num_steps, **counts}
        counts.clear()

    began_s = time.monotonic()
    step()
    attached.flush(60.0)
    part("start", time.monotonic() - began_s)
    began_s, num_steps = time.monotonic(), 0
    while time.monotonic() < began_s + args.seconds:
        step()
    part("while it trains", time.monotonic() - began_s)
    began_s, num_steps = time.monotonic(), 0
    attached.close()
    part("end", time.monotonic() - began_s)
    return parts


def _count(disk: Any, name: str, counts: Counter[str]) -> None:
    method = getattr(disk, name)

    def counting(*values: Any) -> Any:
        counts[name] += 1
        if name == "write":
            counts["written_bytes"] += len(values[2])
        return method(*values)

    setattr(disk, name, counting)


def main(arguments: list[str]) -> int:
    parser = parser_of("storage", __doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--step-s", type=float, default=0.5, help="seconds of a step, at least")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.child:
        print(json.dumps(train(args.child, args)))
        return 0
    with tempfile.TemporaryDirectory(prefix="storage-") as folder:
        child = subprocess.run(
            [sys.executable, "-m", "scripts.benchmarks", "storage", *arguments, "--child", folder],
            cwd=ROOT, capture_output=True, text=True, timeout=600 + 2 * args.seconds,
        )  # fmt: skip
        if child.returncode:
            sys.exit(f"the training failed:\n{child.stderr}")
        parts = json.loads(child.stdout.splitlines()[-1])
        files = [path for path in Path(folder).rglob("*") if path.is_file()]
        left = {path.name: path.stat().st_size for path in sorted(files)}
    print(f"one rank: {len(left)} files, {sum(left.values()) / 1e6:.1f} MB")
    print(", ".join(f"{name} {size / 1e6:.3f} MB" for name, size in left.items()))
    titles = [f"{name}, {one['seconds']:.0f} s" for name, one in parts.items()]
    print(f"| call | {' | '.join(titles)} | a second |")
    print("|---|---|---|---|---|")
    steady = parts["while it trains"]
    for kind in KINDS:
        found = [one.get(kind, 0) for one in parts.values()]
        if any(found):
            print(
                f"| {kind} | {' | '.join(f'{n:,}' for n in found)} | {steady.get(kind, 0) / steady['seconds']:,.2f} |"
            )
    creates, metadata = (sum(steady.get(name, 0) for name in names) for names in (CREATES, METADATA))
    print(
        f"\nwhile it trains: {steady['steps']} steps; {creates / steady['seconds']:.3f} creates, "
        f"{metadata / steady['seconds']:.2f} metadata operations, "
        f"{(steady.get('sync', 0) + steady.get('sync_directory', 0)) / steady['seconds']:.2f} syncs, "
        f"{steady.get('written_bytes', 0) / steady['seconds'] / 1e6:.3f} MB a second; "
        f"{steady.get('written_bytes', 0) / max(steady['steps'], 1) / 1e6:.3f} MB a step"
    )
    if args.json:
        args.json.write_text(json.dumps({"parts": parts, "files": left}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
