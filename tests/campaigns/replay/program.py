"""A training on two ranks in which a machine computes one bit of one output wrongly, at steps that a seed draws."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

NUM_STEPS = 100
ROUNDING = 64 * torch.finfo(torch.float32).eps


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.attention = nn.MultiheadAttention(16, 2, dropout=0.1, batch_first=True)
        self.up = nn.Linear(16, 32)
        self.act = nn.GELU()
        self.drop = nn.Dropout(0.1)
        self.down = nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        out: Tensor = x + self.down(self.drop(self.act(self.up(x))))
        return out


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(16, 32)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.blocks(self.embedding(tokens)))
        return out


def flip(output: Tensor, draw: random.Random) -> None:
    """Flip a bit that changes an element by more than rounding could."""
    flat = torch.as_strided(output.data, (output.numel(),), (1,))  # dense, in whatever order
    bits = flat.view(torch.int32)
    largest = output.abs().max().item()
    while True:
        index, bit = draw.randrange(bits.numel()), draw.randrange(32)
        before = flat[index].item()
        bits[index] ^= -(1 << 31) if bit == 31 else 1 << bit
        after = flat[index].item()
        if abs(after) < 1e6 and abs(after - before) > 4 * ROUNDING * max(largest, abs(after)):
            return
        flat[index] = before


def main() -> None:
    draw = random.Random(int(sys.argv[1]))
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = Model()
    leaves = [name for name, module in model.named_modules() if not list(module.children()) and "out_proj" not in name]
    leaves += ["blocks.0.attention", "blocks.1.attention"]
    wrong = {step: (draw.choice(leaves), draw.randrange(2)) for step in draw.sample(range(NUM_STEPS), NUM_STEPS // 2)}
    if dist.get_rank() == 0:
        Path("wrong.json").write_text(json.dumps(wrong))
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(NUM_STEPS):
        name, rank = wrong.get(step, ("", -1))
        if rank == dist.get_rank():
            module = model.get_submodule(name)
            right = module.forward

            def broken(*args: Any, _right: Any = right, **kwargs: Any) -> Any:
                output = _right(*args, **kwargs)
                flip(output[0] if isinstance(output, tuple) else output, draw)
                return output

            module.forward = broken
        wrapped(torch.randint(0, 32, (2, 6))).square().mean().backward()
        if rank == dist.get_rank():
            del module.forward
        optimizer.step()
        optimizer.zero_grad()
    del model, wrapped
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
