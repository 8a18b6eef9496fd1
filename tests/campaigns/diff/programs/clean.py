"""A small GPT trained without any error under several layouts and optimizers: what `diff` must find nothing in.

    python clean.py FOLDER NAME...

records each into ``FOLDER/NAME``; a name is ``LAYOUT-OPTIMIZER-DTYPE-SEED``, see `LAYOUTS` and `OPTIMIZERS`, and
``+jitter=1`` behind it makes its twin. Where ``@ERROR`` follows, the training is wrong from `BROKEN_STEP` on.
All of them are forked from one process; the ranks of a training share one global batch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import recorder
from tests.rigs.trainings import record_each

WORDS, USED_WORDS, WIDTH, HEADS, LENGTH, BATCH, STEPS = 32, 24, 16, 2, 8, 8, 6
BROKEN_STEP = 3
RULES = "site=* keep=tensor,stats,fingerprint"
LAYOUTS = {"one": 1, "untied": 1, "ddp": 2, "ddp4": 4, "fsdp": 2, "tp": 2}
"""Ranks of each. Of ``untied`` and ``tp`` the head has weights of its own."""
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
    "adam": lambda groups: torch.optim.Adam(groups, lr=1e-3),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=3e-3, weight_decay=0.1),
    "clipped": lambda groups: torch.optim.AdamW(groups, lr=1e-3, weight_decay=0.1, betas=(0.9, 0.95)),
    "drifting": lambda groups: torch.optim.AdamW(groups, lr=3e-3, weight_decay=0.1),
}
"""With ``clipped`` gradients are clipped; with ``drifting`` half of one parameter's gradient is roundings alone."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Training(NamedTuple):
    layout: str
    optimizer: str
    dtype: str
    seed: int
    error: str
    jitter: int

    @classmethod
    def read(cls, name: str) -> Training:
        what, _, jitter = name.partition("+jitter=")
        what, _, error = what.partition("@")
        layout, optimizer, dtype, seed = what.split("-")
        return cls(layout, optimizer, dtype, int(seed), error, int(jitter or 0))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (of(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for of in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Act(nn.Module):
    is_rough = False

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(x, approximate="tanh" if self.is_rough else "none")


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(WIDTH, 4 * WIDTH), Act(), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.norm2, self.mlp = nn.LayerNorm(WIDTH), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]


class Unbalanced(torch.autograd.Function):
    """The identity, whose gradient is a mean over the batch of noise that a twin shares."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, noise: Tensor) -> Tensor:
        ctx.save_for_backward(noise)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (noise,) = ctx.saved_tensors
        return noise.mean(0).to(gradients[0].dtype), None


class Net(nn.Module):
    """A GPT; some rows of its embeddings never get a gradient, or get only the gradient of the head."""

    def __init__(self, *, is_tied: bool, is_drifting: bool) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH + 2, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.shift = nn.Parameter(torch.zeros(WIDTH)) if is_drifting else None
        self.noise = torch.zeros(0)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        if is_tied:
            self.head.weight = self.embed.weight

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words) + self.position(torch.arange(LENGTH))
        if self.shift is not None:
            x = x + Unbalanced.apply(self.shift, self.noise)  # type: ignore[no-untyped-call]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def batch(step: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * seed + step)
    words = torch.randint(USED_WORDS, (BATCH, LENGTH + 1), generator=generator)
    return words[:, :-1], words[:, 1:]


def laid_out(net: Net, layout: str) -> Any:
    if layout.startswith("ddp"):
        return DistributedDataParallel(net)
    if layout == "fsdp":
        for block in net.blocks:
            fully_shard(block)
        return fully_shard(net)
    if layout == "tp":
        plan: dict[str, Any] = {
            "embed": RowwiseParallel(input_layouts=Replicate()),
            "head": ColwiseParallel(output_layouts=Replicate()),
            "blocks.*.attention.out": RowwiseParallel(),
            "blocks.*.mlp.up": ColwiseParallel(),
            "blocks.*.mlp.down": RowwiseParallel(),
        }
        plan |= {f"blocks.*.attention.{name}": ColwiseParallel() for name in "qkv"}
        return parallelize_module(net, init_device_mesh("cpu", (2,)), plan)
    return net


def unbalanced(step: int) -> Tensor:
    """Noise that adds up to zero over the batch in every other column, but for roundings that depend on the order."""
    noise = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step)) * 1000
    return noise - noise.mean(0) + 1000 * (torch.arange(WIDTH) % 2)


def groups(net: Net) -> list[dict[str, Any]]:
    """Three parameter groups: one weight alone, norms and biases, and all others."""
    of: list[list[nn.Parameter]] = [[], [], []]
    for name, parameter in net.named_parameters():
        is_flat = parameter.ndim < 2 and name != "shift"
        of[0 if name == "blocks.1.mlp.up.weight" else 1 if is_flat else 2].append(parameter)
    return [{"params": parameters} for parameters in of]


def clip(net: Net) -> None:
    """Clip by the norm of all gradients; torch's own function refuses sharded gradients together with plain ones."""
    gradients = [parameter.grad for parameter in net.parameters() if parameter.grad is not None]
    norms = [(one.full_tensor() if isinstance(one, DTensor) else one).norm() for one in gradients]
    for one in gradients:
        one.mul_(min(1.0, 0.5 / float(torch.stack(norms).norm())))


def train(net: Net, model: Any, name: Training, rank: int) -> None:
    """Train, with the error that the name gives from `BROKEN_STEP` on."""
    optimizer = OPTIMIZERS[name.optimizer](groups(net))
    num_parts = 1 if name.layout == "tp" else LAYOUTS[name.layout]
    for step in range(STEPS):
        error = name.error if step >= BROKEN_STEP else ""
        words, targets, net.noise = (
            part.chunk(num_parts)[rank % num_parts] for part in (*batch(step, name.seed), unbalanced(step))
        )
        last = cast("Block", net.blocks[1]).mlp
        last.act.is_rough = error == "rough_activation"
        loss = F.cross_entropy(model(words).flatten(0, 1).float(), targets.flatten())
        if error == "scaled_loss":
            loss = loss * 1.5
        loss.backward()
        if error == "scaled_gradient":
            cast("Tensor", last.down.weight.grad).mul_(1.01)
        if name.optimizer == "clipped":
            clip(net)
        if error == "no_decay":
            optimizer.param_groups[0]["weight_decay"] = 0.0
        if error == "betas":
            for group in optimizer.param_groups:
                group["betas"] = (0.8, 0.999)
        skipped = optimizer.param_groups[1]["params"] if error == "skipped_group" else []
        kept = [parameter.detach().clone() for parameter in skipped]
        optimizer.step()
        for parameter, values in zip(skipped, kept, strict=True):
            parameter.data.copy_(values)
        optimizer.zero_grad()


def run(folder: Path, text: str, rank: int, size: int) -> None:
    name = Training.read(text)
    torch.manual_seed(name.seed)
    net = Net(is_tied=name.layout not in ("untied", "tp"), is_drifting=name.optimizer == "drifting")
    net.to(DTYPES[name.dtype])
    model = laid_out(net, name.layout)
    has_local = name.layout not in ("untied", "tp")  # no layout is known of those of sharded parameters
    settings: dict[str, Any] = {"jitter": name.jitter, "local_gradients": has_local}
    with recorder.attach(net, enabled=True, dir=str(folder / "recordings"), rules=RULES, **settings):
        train(net, model, name, rank)


def num_ranks_of(text: str) -> int:
    return LAYOUTS[Training.read(text).layout]


if __name__ == "__main__":
    sys.exit(record_each(Path(sys.argv[1]).absolute(), sys.argv[2:], num_ranks_of, run))
