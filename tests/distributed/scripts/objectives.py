"""Two objectives that share a trunk, under DDP and FSDP2, compiled or not; what each pulls, as autograd says it alone.

``objectives.py OUT`` trains each case of `CASES` twice, without a recorder and with one, on each rank.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import recorder
from tests.rigs.leaving import leave

CASES = [(layout, is_compiled) for layout in ("ddp", "fsdp2") for is_compiled in (False, True)]
OBJECTIVES = ("main", "aux")
STEPS = 4
WEIGHT = 300.0


class Losses(NamedTuple):
    total: Tensor
    main: Tensor
    aux: Tensor
    shared: Tensor


class Net(nn.Module):
    """A trunk and two heads, of which the second is weighed far too high. Its losses are objectives, too."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.head, self.aux = nn.Linear(6, 8), nn.Linear(8, 2), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Losses:
        shared = self.trunk(x).tanh()
        main = self.head(recorder.objective("main", shared)).square().mean()
        aux = self.aux(recorder.objective("aux", shared)).exp().mean()
        total = recorder.objective("main_loss", main) + WEIGHT * recorder.objective("aux_loss", aux)
        return Losses(total, main, aux, shared)


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(100 * step + rank))


def made() -> Net:
    torch.manual_seed(0)
    return Net()


def pulls(rank: int) -> dict[str, Tensor]:
    """The gradient of each objective at the shared tensor, each by a backward of its own, of the first step."""
    losses = made()(batch(rank, 0))
    weighed = {"main": losses.main, "aux": WEIGHT * losses.aux}
    return {name: torch.autograd.grad(loss, losses.shared, retain_graph=True)[0] for name, loss in weighed.items()}


def trained(layout: str, *, is_compiled: bool, out: Path | None) -> list[Tensor]:
    """The parameters after training, recorded where there is a directory to record to."""
    torch.compiler.reset()
    rank, net = dist.get_rank(), made()
    model: Any = nn.parallel.DistributedDataParallel(net) if layout == "ddp" else fully_shard(net)
    run = torch.compile(model, backend="aot_eager") if is_compiled else model
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)

    def train() -> None:
        for step in range(STEPS):
            optimizer.zero_grad()
            run(batch(rank, step)).total.backward()
            optimizer.step()

    if out is None:
        train()
    else:
        with recorder.attach(model, enabled=True, dir=str(out), rules="site=tap keep=tensor,stats"):
            train()
    return [getattr(one, "_local_tensor", one).detach().clone() for one in net.parameters()]


def main(out: Path) -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank = dist.get_rank()
    for layout, is_compiled in CASES:
        name = f"{layout}-{'compiled' if is_compiled else 'eager'}"
        plain = trained(layout, is_compiled=is_compiled, out=None)
        recorded = trained(layout, is_compiled=is_compiled, out=out / name)
        is_same = all(torch.equal(one, other) for one, other in zip(plain, recorded, strict=True))
        torch.save({"is_same": is_same, "pulls": pulls(rank)}, out / f"{name}-{rank}.pt")
    leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
