"""Small trainings, sound ones and some with one fault each: what `check` must be quiet on, and what it must name.

    python train.py FOLDER NAME...

records each into ``FOLDER/NAME``. A name is one of `SOUND` or of `FAULTS`. All of them are forked from one process.
"""

from __future__ import annotations

import functools
import gc
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch._dynamo  # an optimizer imports it at its first step: once, before all forks
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import recorder
import recorder.lifecycle.recorder  # as dynamo
import recorder.write.writer
from tests.forking import fork

RULES = "site=* keep=stats,fingerprint"
WIDTH, BATCH = 16, 16
STEPS = 160
"""More than the hundred first records by which a jump is judged."""


class Block(nn.Module):
    """A layer of a deep net: `up` makes `act`'s input."""

    def __init__(self, act: type[nn.Module]) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(WIDTH, 2 * WIDTH), act(), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))  # type: ignore[no-any-return]


class Net(nn.Module):
    """Blocks, with or without residual connections and norms, and a head of four classes."""

    def __init__(self, depth: int = 4, act: type[nn.Module] = nn.ReLU, *, is_residual: bool = True) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(act) for _ in range(depth))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 4)
        self.is_residual = is_residual
        self.detached = -1

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            y = block(x)
            y = y.detach() if number == self.detached else y
            x = x + y if self.is_residual else y
        return self.head(self.norm(x) if self.is_residual else x)  # type: ignore[no-any-return]


class Images(nn.Module):
    """Convolutions and batch norms."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1, self.act1 = nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()
        self.conv2, self.bn2, self.act2 = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act1(self.bn1(self.conv1(x.view(-1, 1, 4, 4))))
        x = self.act2(self.bn2(self.conv2(x)))
        return self.head(x.mean((2, 3)))  # type: ignore[no-any-return]


class Words(nn.Module):
    """An embedding and an encoder layer with attention, dropout and GELU."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, activation="gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        words = (x.abs() * 10).long().clamp(max=31)
        return self.head(self.encoder(self.embed(words)).mean(1))  # type: ignore[no-any-return]


class Recurrent(nn.Module):
    """An LSTM over the features."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTM(4, WIDTH, batch_first=True), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cell(x.view(-1, 4, 4))[0][:, -1])  # type: ignore[no-any-return]


class Case(NamedTuple):
    """A training."""

    model: Callable[[], nn.Module] = Net
    rate: float = 1e-3
    optimizer: str = "adamw"
    ranks: int = 1
    dtype: torch.dtype = torch.float32
    begin: Callable[[Any], None] = lambda net: None
    """What is done to the model before training."""
    batch: Callable[[Tensor, int, int], Tensor] = lambda x, step, rank: x
    """What becomes of the samples of a step and rank."""
    gradients: Callable[[Any, int], None] = lambda net, step: None
    """What is done to the gradients of a step."""
    groups: Callable[[Any], Any] = lambda net: net.parameters()
    has_own_batches: bool = True


SOUND: dict[str, Case] = {
    "mlp-adamw": Case(),
    "mlp-adam-high": Case(optimizer="adam", rate=1e-2),
    "mlp-sgd": Case(optimizer="sgd", rate=0.1),
    "mlp-bfloat16": Case(dtype=torch.bfloat16),
    "plain-tanh": Case(lambda: Net(4, nn.Tanh, is_residual=False)),
    "plain-sigmoid": Case(lambda: Net(3, nn.Sigmoid, is_residual=False), rate=1e-2),
    "deep-relu": Case(lambda: Net(12)),
    "images": Case(Images),
    "images-sgd": Case(Images, optimizer="sgd", rate=0.1),
    "words": Case(Words),
    "recurrent": Case(Recurrent, rate=1e-2),
    "ddp4": Case(ranks=4),
    "ddp4-images": Case(Images, ranks=4),
}


def _scaled(path: str, factor: float) -> Callable[[Any], None]:
    def begin(net: Any) -> None:
        with torch.no_grad():
            net.get_parameter(path).mul_(factor)

    return begin


def _filled(path: str, value: float) -> Callable[[Any], None]:
    def begin(net: Any) -> None:
        with torch.no_grad():
            net.get_parameter(path).fill_(value)

    return begin


def _detached(net: Any) -> None:
    net.is_residual, net.detached = False, 1


def _all_scaled(factor: float) -> Callable[[Any], None]:
    def begin(net: Any) -> None:
        with torch.no_grad():
            for name, parameter in net.named_parameters():
                if parameter.ndim > 1 and name.startswith("blocks"):
                    parameter.mul_(factor)

    return begin


def _spoil(net: Any, step: int) -> None:
    if step == 20:
        net.blocks[2].down.weight.grad[0, 0] = float("nan")


def _jump(net: Any, step: int) -> None:
    if step == 130:
        net.blocks[1].up.weight.grad.mul_(1e4)


def _zeroed(net: Any, step: int) -> None:
    net.blocks[2].up.weight.grad.zero_()


def _without(net: Any) -> list[dict[str, Any]]:
    still = [net.blocks[1].down.weight]
    rest = [one for one in net.parameters() if one is not still[0]]
    return [{"params": rest}, {"params": still, "lr": 0.0}]


def _loud(x: Tensor, step: int, rank: int) -> Tensor:
    return x * 40 if step == 90 else x


def _odd(x: Tensor, step: int, rank: int) -> Tensor:
    return x * 4 if rank == 2 else x


def _forgetful(net: Any) -> None:
    net.bn1.momentum = 1.0


def _leaping(x: Tensor, step: int, rank: int) -> Tensor:
    return x * (10 if step % 2 else 0.1)


FAULTS: dict[str, Case] = {
    "nan_gradient": Case(gradients=_spoil),
    "nan_weight": Case(begin=_filled("blocks.1.up.bias", float("nan"))),
    "loud_batch": Case(lambda: Net(4, is_residual=False), batch=_loud),
    "one_huge_gradient": Case(gradients=_jump),
    "rate_of_zero": Case(rate=0.0),
    "rate_far_too_high": Case(rate=3.0, optimizer="adam"),
    "rate_too_high_sgd": Case(lambda: Net(4, is_residual=False), rate=300.0, optimizer="sgd"),
    "deep_sigmoids": Case(lambda: Net(8, nn.Sigmoid, is_residual=False), begin=_all_scaled(0.3)),
    "weights_too_large": Case(lambda: Net(6, nn.ReLU, is_residual=False), begin=_all_scaled(10.0)),
    "detached_block": Case(begin=_detached),
    "zeroed_gradient": Case(gradients=_zeroed),
    "group_without_rate": Case(groups=_without),
    "frozen_layer": Case(begin=lambda net: net.blocks[2].up.weight.requires_grad_(False)),
    "dead_by_bias": Case(begin=_filled("blocks.1.up.bias", -20.0)),
    "dead_first": Case(lambda: Net(4, is_residual=False), begin=_filled("blocks.0.up.bias", -20.0)),
    "saturated_tanh": Case(lambda: Net(4, nn.Tanh), begin=_scaled("blocks.2.up.weight", 300.0)),
    "one_layer_scaled": Case(begin=_scaled("blocks.3.down.weight", 20.0)),
    "constant_weight": Case(begin=_filled("blocks.2.up.weight", 0.1)),
    "odd_rank": Case(ranks=4, batch=_odd),
    "same_batches": Case(ranks=4, has_own_batches=False),
    "momentum_of_one": Case(Images, batch=_leaping, begin=_forgetful),
}


def optimizer_of(case: Case, net: nn.Module) -> torch.optim.Optimizer:
    groups = case.groups(net)
    if case.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=case.rate, momentum=0.9)
    kinds: dict[str, Any] = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
    return cast("torch.optim.Optimizer", kinds[case.optimizer](groups, lr=case.rate))


def run(folder: Path, case: Case, rank: int) -> None:
    """One rank, in a process of its own: classes are the quadrants of the first two features."""
    size = case.ranks
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    folder.mkdir(parents=True, exist_ok=True)
    if size > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=size)
    torch.manual_seed(0)
    net = case.model()
    case.begin(net)
    net.to(case.dtype)
    model = DistributedDataParallel(net) if size > 1 else net
    optimizer = optimizer_of(case, net)
    with recorder.attach(model, enabled=True, dir=str(folder / "recordings"), rules=RULES, pool_bytes="64 MB"):
        for step in range(STEPS):
            seed = step * size + (rank if case.has_own_batches else 0)
            x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(seed))
            labels = (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long()
            loss = F.cross_entropy(model(case.batch(x, step, rank).to(case.dtype)).float(), labels)
            loss.backward()
            case.gradients(net, step)
            optimizer.step()
            optimizer.zero_grad()
    if size > 1:
        dist.barrier()


def main(folder: Path, names: list[str]) -> int:
    """Record them one after the other."""
    torch.set_num_threads(1)
    gc.freeze()  # so that no child walks through, and copies, what all share
    failed = 0
    for name in names:
        case = (SOUND | FAULTS)[name]
        pids = [fork(functools.partial(run, folder / name, case, rank)) for rank in range(case.ranks)]
        failed += sum(os.waitpid(pid, 0)[1] for pid in pids)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).absolute(), sys.argv[2:]))
