"""A trainer of two ranks, under DDP or FSDP2, that computes on the tokens that an engine wrote: FOLDER LAYOUT.

With the layout tp it is the engine, in tensor parallel, that writes these tokens.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import recorder
from tests.rigs.rollouts import RULES, llama, prompts, whole_mask, write


def engine(folder: Path) -> None:
    model = llama()
    plan: dict[str, ParallelStyle] = {}
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
        plan[f"model.layers.*.{name}"] = ColwiseParallel()
    plan |= {f"model.layers.*.{name}": RowwiseParallel() for name in ("self_attn.o_proj", "mlp.down_proj")}
    parallelize_module(model, init_device_mesh("cpu", (2,)), plan)
    sequences = write(folder / "engine", model, *prompts(4))
    if dist.get_rank() == 0:
        torch.save({"ids": sequences, "mask": whole_mask(prompts(4)[1])}, folder / "written.pt")


def main(folder: Path, layout: str) -> None:
    dist.init_process_group("gloo")
    if layout == "tp":
        engine(folder)
        dist.destroy_process_group()
        return
    rank, size = dist.get_rank(), dist.get_world_size()
    written = torch.load(folder / "written.pt")
    ids, mask = (written[name].chunk(size)[rank] for name in ("ids", "mask"))
    model = llama()
    if layout == "fsdp":
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    else:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recorder.attach(model, enabled=True, dir=str(folder / "trainer"), rules=RULES):
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        model(input_ids=ids, attention_mask=mask, position_ids=positions, labels=ids).loss.backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
