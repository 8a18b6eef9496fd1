"""What `recorder.objective` costs a step: in one process, steps with no, two and three objectives take turns.

    python -m scripts.benchmarks objectives

A trunk of transformer layers and three heads, which are the same at each step. The heads read the shared tensor
through `recorder.objective`, or as it is. A ratio is of the processor time of the training thread in two steps of one
round, so that it holds on a busy machine, too; printed are the median and the quartiles.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

import recorder
from scripts.benchmarks import parser_of

NAMES = ("first", "second", "third")
WARMUP = 5


class Heads(nn.Module):
    """Three heads on one trunk; `num` of them get the shared tensor through an objective of their own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.trunk = nn.Sequential(
            *[nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True) for _ in range(2)]
        )
        self.heads = nn.ModuleList([nn.Linear(width, 8) for _ in NAMES])
        self.num = 0

    def forward(self, x: Tensor) -> Tensor:
        shared = self.trunk(x)
        views = [recorder.objective(name, shared) if at < self.num else shared for at, name in enumerate(NAMES)]
        losses = [head(view).square().mean() for head, view in zip(self.heads, views, strict=True)]
        return torch.stack(losses).sum()


def stepper(model: Heads, batch: Tensor) -> Callable[[int], float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step(num: int) -> float:
        model.num = num
        began_s = time.thread_time()
        model(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.thread_time() - began_s

    return step


def main(arguments: list[str]) -> int:
    parser = parser_of("objectives", __doc__)
    parser.add_argument("--rounds", type=int, default=100, help="of a step of each (default 100)")
    parser.add_argument("--width", type=int, default=256, help="of the shared tensor of 8 by 128 by this (default 256)")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, nums = Heads(args.width), (0, 2, 3)
    step = stepper(model, torch.randn(8, 128, args.width))
    with (
        tempfile.TemporaryDirectory(prefix="bench-") as folder,
        recorder.attach(model, enabled=True, dir=folder, rules="site=scalar keep=stats"),
    ):
        seconds: dict[int, list[float]] = {num: [] for num in nums}
        for number in range(WARMUP + args.rounds):
            for num in nums[number % 3 :] + nums[: number % 3]:
                spent_s = step(num)
                if number >= WARMUP:
                    seconds[num].append(spent_s)
    print("| objectives | step ms | ratio | quartiles |\n|---|---|---|---|")
    for num, own in seconds.items():
        ratios = [one / base for one, base in zip(own, seconds[0], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        print(f"| {num} | {1e3 * statistics.median(own):.1f} | {middle:.3f} | {low:.3f} to {high:.3f} |")
    return 0
