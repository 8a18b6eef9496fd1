"""Trains a byte-level GPT of about 10 million parameters on the source files of Python's standard library.

An ordinary training script: it knows nothing of any recorder. Start it with torchrun, on one rank or several:

    torchrun --standalone --nproc-per-node 2 scripts/demo_train.py --layout fsdp2 --steps 36
"""

from __future__ import annotations

import argparse
import os
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

BLOCK = 128
"""Length of a training example, in bytes of text."""
BATCH = 8
"""Examples a rank sees at each step."""
VOCABULARY = 256


class Attention(nn.Module):
    """Causal self-attention with all heads in one projection."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.proj(y.transpose(1, 2).reshape(batch, length, width))
        return out


class MLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.act = nn.GELU()
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.act(self.up(x)))
        return out


class Block(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.ln1 = nn.LayerNorm(width)
        self.attn = Attention(width, num_heads)
        self.ln2 = nn.LayerNorm(width)
        self.mlp = MLP(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln1(x))
        out: Tensor = x + self.mlp(self.ln2(x))
        return out


class GPT(nn.Module):
    """A decoder-only transformer over bytes."""

    def __init__(self, num_layers: int = 6, width: int = 384, num_heads: int = 6) -> None:
        super().__init__()
        self.tok_emb = nn.Embedding(VOCABULARY, width)
        self.pos_emb = nn.Embedding(BLOCK, width)
        self.blocks = nn.ModuleList([Block(width, num_heads) for _ in range(num_layers)])
        self.ln_f = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.apply(self._init_weights)

    @staticmethod
    def _init_weights(module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, idx: Tensor) -> Tensor:
        x = self.tok_emb(idx) + self.pos_emb(torch.arange(idx.shape[1], device=idx.device))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.ln_f(x))
        return logits


def load_text(max_bytes: int = 16 << 20) -> Tensor:
    """The standard library's own source files, end to end, as one tensor of bytes."""
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    parts: list[bytes] = []
    num_bytes = 0
    for path in sorted(root.rglob("*.py")):
        if skipped.isdisjoint(path.relative_to(root).parts):
            parts.append(path.read_bytes())
            num_bytes += len(parts[-1])
            if num_bytes >= max_bytes:
                break
    return torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8)


def batches(text: Tensor, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Random examples for ever: the bytes, and the bytes that follow them. Shapes (BATCH, BLOCK), int64."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(text) - BLOCK - 1, (BATCH,), generator=generator)
        rows = torch.stack([text[int(i) : int(i) + BLOCK + 1] for i in starts]).long()
        yield rows[:, :-1], rows[:, 1:]


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor, targets: Tensor) -> float:
    """One update; returns the loss."""
    loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


@torch.no_grad()
def evaluate(model: nn.Module, text: Tensor, num_batches: int = 4) -> float:
    """Mean loss on held-out text, the same batches each time."""
    model.eval()
    held_out = batches(text, seed=10_000)
    losses = []
    for _ in range(num_batches):
        inputs, targets = next(held_out)
        losses.append(F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).item())
    model.train()
    return sum(losses) / len(losses)


def wrap(model: nn.Module, layout: str) -> nn.Module:
    """The model as the layout wants it: as it is, replicated on every rank, or sharded over the ranks."""
    if layout == "single":
        return model
    if layout == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    assert isinstance(model, GPT)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layout", choices=("single", "ddp", "fsdp2"), default="single")
    parser.add_argument("--steps", type=int, default=36)
    args = parser.parse_args()

    rank = int(os.environ.get("RANK", "0"))
    if args.layout != "single":
        dist.init_process_group("gloo")
    torch.manual_seed(1234)
    text = load_text()
    train_text, held_out_text = text[: -len(text) // 10], text[-len(text) // 10 :]
    model = wrap(GPT(), args.layout)
    optimizer = make_optimizer(model)
    train_batches = batches(train_text, seed=rank)
    if rank == 0:
        num_parameters = sum(p.numel() for p in model.parameters())
        print(f"GPT with {num_parameters:,} parameters, {len(text):,} bytes of text, layout {args.layout}", flush=True)

    started = time.perf_counter()
    for step in range(args.steps):
        loss = train_step(model, optimizer, *next(train_batches))
        if rank == 0 and (step % 10 == 0 or step == args.steps - 1):
            print(f"step {step:4d}  loss {loss:.4f}  {time.perf_counter() - started:6.1f} s", flush=True)
    held_out_loss = evaluate(model, held_out_text)
    if rank == 0:
        print(f"held-out loss {held_out_loss:.4f}", flush=True)

    if dist.is_initialized():
        del model  # DDP that outlives its process group can block the end of the process
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
