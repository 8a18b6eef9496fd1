"""Two ranks load checkpoints that were written out of runs, by torch's own loader; and train models with tied weights.

Each folder under the first argument holds a ``param`` and a ``grad`` checkpoint of `train.Net`. What was loaded is
saved there, whole, as ``loaded.pt``. The tied models are trained under the recorder into ``tied-LAYOUT``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_loader import load as load_checkpoint
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor

import recorder
from recorder.analyze.export.model import Model, write_model
from tests.rigs.leaving import leave

if __name__ == "__main__":
    from train import Net  # type: ignore[import-not-found]  # beside this file, which runs as a script

LAYOUTS = ("ddp", "fsdp1", "fsdp1 orig", "fsdp2")
STEPS = 2


class Tied(nn.Module):
    """A parameter with two names, a module with two, a buffer that no state dict has, and one of whole numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.first = nn.Linear(5, 5)
        self.norm = nn.BatchNorm1d(5)
        self.second = self.first
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor([1.5]))  # of two ranks only one has a piece of it
        self.register_buffer("cache", torch.ones(3), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.second(self.norm(self.first(self.embed(tokens))))
        return self.head(x) * self.scale  # type: ignore[no-any-return]


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def load(folder: Path) -> None:
    """Parameters and buffers as a state dict, gradients as one that is sharded like the parameters."""
    model = Net()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    state = model.state_dict()
    for value in state.values():
        (value.to_local() if isinstance(value, DTensor) else value).zero_()
    load_checkpoint(state, checkpoint_id=folder / "param")
    model.load_state_dict(state)
    gradients = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
    load_checkpoint(gradients, checkpoint_id=folder / "grad")
    assert all(isinstance(gradient, DTensor) for gradient in gradients.values())
    loaded = {
        "param": {name: whole(value) for name, value in model.state_dict().items()},
        "grad": {name: whole(value) for name, value in gradients.items()},
    }
    if dist.get_rank() == 0:
        torch.save(loaded, folder / "loaded.pt")


def wrap(layout: str) -> nn.Module:
    torch.manual_seed(3)
    model: nn.Module = Tied()
    if layout == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if layout == "fsdp2":
        fully_shard(model)
        return model
    return FullyShardedDataParallel(model, use_orig_params=layout.endswith("orig"), device_id=torch.device("cpu"))


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """What a checkpoint of the whole model would hold just now."""
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model, writeback=False):
            return {name: whole(value) for name, value in model.module.state_dict().items()}
    inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    return {name: whole(value) for name, value in inner.state_dict().items()}


def train(layout: str, folder: Path) -> dict[str, Tensor]:
    """The state before the last update, which is what that step's rows hold."""
    model = wrap(layout)
    state: dict[str, Tensor] = {}
    with recorder.attach(model, enabled=True, dir=folder, rules="site=param,grad,buffer keep=tensor,fingerprint"):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for step in range(STEPS):
            generator = torch.Generator().manual_seed(2 * step + dist.get_rank())
            model(torch.randint(7, (6,), generator=generator)).square().mean().backward()
            state = state_of(model)
            optimizer.step()
            optimizer.zero_grad()
    return state


def tied(layout: str, out: Path) -> None:
    folder = out / f"tied-{layout}"
    state: dict[str, Any] = train(layout, folder)
    dist.barrier()  # both have closed their recordings
    if dist.get_rank() == 0:
        torch.save(state, out / f"tied-{layout}.pt")
        write_model(Model(recorder.open_run(folder), "param"), out / f"tied-{layout}.dcp", "dcp")
    dist.barrier()
    if layout.startswith("fsdp1"):
        return
    model = Tied()
    fully_shard(model)
    loaded = model.state_dict()
    load_checkpoint(loaded, checkpoint_id=out / f"tied-{layout}.dcp")
    buffers = dict(model.named_buffers())
    same = {n: torch.equal(whole(v), state[n]) for n, v in loaded.items() if n not in buffers}
    assert all(same.values()), (layout, same)


def main() -> None:
    dist.init_process_group("gloo")
    folders = Path(sys.argv[1])
    for folder in sorted(folders.iterdir()):
        load(folder)
    for layout in LAYOUTS:
        tied(layout, Path(sys.argv[2]))
    leave()


if __name__ == "__main__":
    main()
