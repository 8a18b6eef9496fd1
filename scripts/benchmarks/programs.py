"""What `RECORDER=1` alone costs small programs: whole trainings, with the default rules and without the flag, in turn.

    python -m scripts.benchmarks programs
    python -m scripts.benchmarks programs --only nanogpt --rounds 1 --share 0.1

A program is what somebody tries a recorder on first: a training of about a minute, on one thread a rank, that fills no
machine. What is compared is all of it, from the start of the interpreter to its end: processor time, user and system,
of all ranks together, and wall time. Both runs of a round must come out equal to the last bit. Nothing here imports
`recorder`. Exit code 1 where the median costs more processor time than its limit.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from scripts.benchmarks import parser_of

from .processes import clean_env, progress, run_fresh

LIMIT = 1.05


class Program(NamedTuple):
    """One training."""

    num_ranks: int
    num_steps: int
    """About a minute of it on one core a rank."""
    text: str
    limit: float = LIMIT
    """Of the ratio of processor times."""


PROGRAMS = {
    "nanogpt": Program(2, 600, "a GPT of 0.8 M parameters on characters, two ranks of DDP"),
    "resnet18": Program(2, 250, "torchvision's ResNet-18 on images of 64 x 64, two ranks of DDP"),
    "mnist": Program(1, 600, "PyTorch's example for MNIST, two convolutions, one process"),
    "tiny": Program(1, 600, "a chain of 2,000 linear layers of 4 by 4, one process", 1.25),
}


class Measured(NamedTuple):
    """One run of a program."""

    cpu_s: float
    wall_s: float
    digest: str
    num_bytes: int
    """What it left on the disk."""


def child(name: str, num_steps: int) -> None:
    """The training, which knows of no recorder; prints its figures as JSON."""
    import torch
    import torch.distributed as dist
    from torch import nn

    from .train import digest

    rank, num_ranks = int(os.environ.get("RANK", "0")), PROGRAMS[name].num_ranks
    torch.manual_seed(1234)
    model, batches = make_model(name, torch.Generator().manual_seed(rank))
    if num_ranks > 1:
        dist.init_process_group("gloo", f"file://{os.environ['BENCH_STORE']}", rank=rank, world_size=num_ranks)
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(num_steps):
        inputs, targets = next(batches)
        loss = nn.functional.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(json.dumps({"digest": digest(model, losses), "end_s": time.time()}), flush=True)
    if num_ranks > 1:
        del model  # DDP that outlives its process group can block the end of the process
        dist.destroy_process_group()


def make_model(name: str, generator: Any) -> tuple[Any, Iterator[tuple[Any, Any]]]:
    """A model of `PROGRAMS`, and its batches."""
    import torch
    from torch import nn

    if name == "nanogpt":
        from . import workloads

        demo = workloads.load_demo()
        text = demo.load_text(max_bytes=1 << 20)

        def windows() -> Iterator[tuple[Any, Any]]:
            while True:
                starts = torch.randint(len(text) - 65, (12,), generator=generator)
                rows = torch.stack([text[int(i) : int(i) + 65] for i in starts]).long()
                yield rows[:, :-1], rows[:, 1:]

        return demo.GPT(num_layers=4, width=128, num_heads=4), windows()
    if name == "resnet18":
        from tests.rigs.kernels import vision

        return vision().models.resnet18(num_classes=10), _images((8, 3, 64, 64), generator)
    if name == "tiny":

        def points() -> Iterator[tuple[Any, Any]]:
            while True:
                yield torch.randn((2, 4), generator=generator), torch.randint(4, (2,), generator=generator)

        return nn.Sequential(*[nn.Linear(4, 4) for _ in range(2000)]), points()
    layers: list[nn.Module] = [nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Dropout(0.25), nn.Flatten(), nn.Linear(9216, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10)]
    return nn.Sequential(*layers), _images((64, 1, 28, 28), generator)


def _images(shape: tuple[int, ...], generator: Any) -> Iterator[tuple[Any, Any]]:
    """Noise of ten kinds, which differ by their mean."""
    import torch

    while True:
        labels = torch.randint(10, shape[:1], generator=generator)
        yield torch.randn(shape, generator=generator) + labels.view(-1, 1, 1, 1) / 10, labels


def measure(name: str, num_steps: int, folder: Path, **env: str) -> Measured:
    """One run, with what the environment says."""
    with tempfile.TemporaryDirectory(dir=folder, prefix="bench-programs-") as directory:
        env = {"OMP_NUM_THREADS": "1", "RECORDER_DIR": directory, **env}
        began_s = time.monotonic()
        ended = run_fresh(
            "scripts.benchmarks.programs", [name, str(num_steps)], clean_env(**env), num_ranks=PROGRAMS[name].num_ranks
        )
        wall_s = time.monotonic() - began_s
        for path in Path(directory).rglob("_writer.json"):
            if dropped := json.loads(path.read_text())["ledger"]["dropped"]:
                sys.exit(f"{name}: dropped {dropped}; drops do not count as speed\n{ended.said}")
        num_bytes = sum(path.stat().st_size for path in Path(directory).rglob("*") if path.is_file())
    return Measured(ended.exit_cpu_s, wall_s, "".join(one["digest"] for one in ended.results), num_bytes)


def main(arguments: list[str]) -> int:
    parser = parser_of("programs", __doc__)
    parser.add_argument("--only", action="append", choices=tuple(PROGRAMS), help="this program, and no other")
    parser.add_argument("--rounds", type=int, default=3, help="pairs of runs (default 3)")
    parser.add_argument("--share", type=float, default=1.0, help="of the steps of about a minute (default 1)")
    parser.add_argument("--limit", type=float, help="of the processor time's ratio (default: each program has its own)")
    parser.add_argument("--rules", help="record by these rules; default: the recorder's own")
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()), help="where to record")
    args = parser.parse_args(arguments)
    if args.rounds < 1 or args.share <= 0 or not args.dir.is_dir():
        parser.error("--rounds must be 1 or more, --share more than 0, and --dir a directory")
    env = {"RECORDER": "1"} | ({"RECORDER_RULES": args.rules} if args.rules else {})
    print("| | steps | CPU s | recorded | ratio | min to max | wall s | recorded | ratio | min to max | MB recorded |")
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    is_within = True
    for name in args.only or PROGRAMS:
        num_steps = math.ceil(args.share * PROGRAMS[name].num_steps)
        pairs: list[tuple[Measured, Measured]] = []
        for number in range(args.rounds):
            progress(f"{name}: round {number + 1} of {args.rounds}")
            order = (False, True) if number % 2 == 0 else (True, False)
            found = {on: measure(name, num_steps, args.dir, **(env if on else {})) for on in order}
            if found[True].digest != found[False].digest:
                sys.exit(f"{name}: the recorder changed the training")
            pairs.append((found[False], found[True]))
        cpu = [on.cpu_s / off.cpu_s for off, on in pairs]
        is_within &= statistics.median(cpu) <= (args.limit or PROGRAMS[name].limit)
        print(_line(name, num_steps, pairs), flush=True)
    return int(not is_within)


def _line(name: str, num_steps: int, pairs: list[tuple[Measured, Measured]]) -> str:
    """A row of the table."""
    cells = [f"{name}: {PROGRAMS[name].text}", str(num_steps)]
    cells += _compared([(off.cpu_s, on.cpu_s) for off, on in pairs])
    cells += _compared([(off.wall_s, on.wall_s) for off, on in pairs])
    megabytes = statistics.median(on.num_bytes for _, on in pairs) / 1e6
    return f"| {' | '.join(cells)} | {megabytes:.1f} |"


def _compared(seconds: list[tuple[float, float]]) -> list[str]:
    """Medians without and with, of their ratios, and how far these lie apart."""
    off, on, ratio = (statistics.median(values) for values in zip(*((a, b, b / a) for a, b in seconds), strict=True))
    ratios = [b / a for a, b in seconds]
    return [f"{off:.1f}", f"{on:.1f}", f"{ratio:.3f}", f"{min(ratios):.3f} to {max(ratios):.3f}"]


if __name__ == "__main__":
    child(sys.argv[1], int(sys.argv[2]))
