"""A trainer of two ranks, under DDP or FSDP2, that computes on the tokens that an engine wrote: FOLDER LAYOUT."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import recorder
from tests.rigs.rollouts import RULES, llama


def main(folder: Path, layout: str) -> None:
    dist.init_process_group("gloo")
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
