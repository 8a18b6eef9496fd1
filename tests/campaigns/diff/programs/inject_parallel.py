"""Tensor and sequence parallel training on two ranks with one silent error, or none; and the same in one process.

    torchrun --nproc-per-node 2 inject_parallel.py FOLDER

records each of `CUTS` into ``FOLDER/NAME``. Without torchrun one process trains, into ``FOLDER/one``, and its twin for
the noise into ``FOLDER/twin``.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import loss_parallel

import recorder
from tests.rigs import parallel
from tests.rigs.trainings import record_as_launched

CUTS = {
    "sound": parallel.tp,
    "dropout_seed": parallel.tp,
    "bias_on_each_rank": parallel.tp,
    "sound_sequence": parallel.sp,
    "norm_not_summed": parallel.sp,
}
BROKEN_STEP, STEPS = 1, 3
RULES = "site=* keep=tensor,stats,fingerprint"


class Drop(nn.Module):
    """Dropout between the blocks; every rank has to make the same mask, or its part of the sequence of that mask."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed, self.step = seed, 0

    def forward(self, x: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * self.seed + self.step)
        self.step += 1
        words = parallel.batch(0)[0].shape
        mask = (torch.rand((*words, parallel.DIM), generator=generator) < 0.9) / 0.9
        return x * (mask if x.shape[1] == words[1] else mask.chunk(2, 1)[dist.get_rank()])


class Net(parallel.Net):
    """The second block is the one that is wrong."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.drop = Drop(seed)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = self.blocks[1](self.drop(self.blocks[0](x)))
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def make(what: str, rank: int) -> Net:
    torch.manual_seed(3)
    return Net(seed=rank if what == "dropout_seed" else 0)


def with_bias_on_each_rank(down: Any) -> Any:
    """A forward that adds the bias to a summand, before the ranks sum up."""

    def forward(x: Tensor) -> Tensor:
        product: Any = nn.functional.linear(x, down.weight)
        local = product.to_local() + down.bias.to_local()
        return DTensor.from_local(local, product.device_mesh, product.placements)

    return forward


def train(model: nn.Module, what: str) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        tokens, targets = parallel.batch(step)
        logits = model(tokens)
        with loss_parallel() if isinstance(logits, DTensor) else contextlib.nullcontext():
            nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
        if what == "norm_not_summed" and step >= BROKEN_STEP:
            weight = cast("Any", model).blocks[1].mlp_norm.weight
            weight.grad = DTensor.from_local(weight.grad.to_local(), weight.device_mesh, [Replicate()])
        optimizer.step()
        optimizer.zero_grad()


def run(folder: Path, what: str) -> None:
    model = make(what, dist.get_rank())
    CUTS[what](model)
    if what == "bias_on_each_rank":
        down: Any = cast("Any", model).blocks[1].mlp.down
        down.forward = with_bias_on_each_rank(down)
    with recorder.attach(model, enabled=True, dir=folder, rules=RULES):
        train(model, what)


def one_process(folder: Path, jitter: int) -> None:
    model = make("sound", 0)
    with recorder.attach(model, enabled=True, dir=folder, rules=RULES, jitter=jitter):
        train(model, "sound")


if __name__ == "__main__":
    record_as_launched(Path(sys.argv[1]), CUTS, run, one_process)
