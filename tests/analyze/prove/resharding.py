"""A training under FSDP2 that saves a checkpoint after each four steps, and loads it on any number of ranks.

The first argument names what it does otherwise where it has another number of ranks than two, or ``sound``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

NUM_SAMPLES, NUM_SAMPLES_OF_STEP = 64, 8


def main() -> None:
    fault = sys.argv[1]
    dist.init_process_group("gloo")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    is_other = num_ranks != 2
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 9), nn.ReLU(), nn.Linear(9, 3))
    for module in (model[0], model[2], model):
        fully_shard(module, mesh=init_device_mesh("cpu", (num_ranks,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = torch.randn(NUM_SAMPLES, 5, generator=torch.Generator().manual_seed(7))
    step = 0
    if Path("checkpoint").exists():
        state = state_of(model, optimizer, step)
        load(state, checkpoint_id="checkpoint")
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        step = state["step"]
        if fault == "moments" and is_other:
            for one in optimizer.state.values():
                one["exp_avg"].zero_()
    while step < 40:
        order = torch.arange(step * NUM_SAMPLES_OF_STEP, (step + 1) * NUM_SAMPLES_OF_STEP) % NUM_SAMPLES
        if fault == "sampler" and is_other:
            order = order.roll(step) + step
        own = order.chunk(num_ranks)[rank] if fault != "sequence" else order[rank::num_ranks]
        if fault == "batch" and is_other:
            own = order.chunk(2)[rank % 2]
        loss = model(data[own % NUM_SAMPLES]).square().mean()
        (loss * (num_ranks if fault == "sum" else 2)).backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % 4 == 0:
            save(state_of(model, optimizer, step), checkpoint_id="checkpoint")
    dist.destroy_process_group()


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> dict[str, Any]:
    weights, states = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": states, "step": step}


if __name__ == "__main__":
    main()
