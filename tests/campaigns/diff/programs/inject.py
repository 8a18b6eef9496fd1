"""A small training with one silent error, or none: what `diff` has to name. All of them forked from one process.

    python inject.py FOLDER NAME...

records each into ``FOLDER/NAME``: two gloo ranks, or one process where the name begins with ``one``. Each rank takes
its half of one global batch, and what is random depends on the step and the sample alone, so that one process trains
the same. What follows a ``+`` in a name is a setting, such as ``+jitter=1``, or tells two trainings apart.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import recorder
from tests.rigs.trainings import record_each

WORDS, WIDTH, LENGTH, BATCH, STEPS = 11, 8, 5, 4, 4
BROKEN_STEP = 1
"""Where an error that does not hold from the beginning begins."""
RULES = "site=* keep=tensor,stats,fingerprint"


class Halved(torch.autograd.Function):
    """The identity, whose gradient is half of what it should be."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * 0.5


class Part(nn.Module):
    """A module that knows the error of its training and its rank; the first block never has an error."""

    what, rank, size, num_calls = "", 0, 1, 0

    def masked(self, x: Tensor, seed: int) -> Tensor:
        """Dropout whose mask depends on the seed and the sample, not on the rank."""
        kept = torch.rand(BATCH, LENGTH, x.shape[-1], generator=torch.Generator().manual_seed(seed)) < 0.9
        return x * kept.chunk(self.size)[self.rank] / 0.9


class Net(Part):
    """A tiny transformer. Each error is a line in it, or in `train`."""

    def __init__(self, what: str, rank: int, size: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH)
        self.position = nn.Parameter(torch.randn(LENGTH + 1, WIDTH) * 0.1)
        self.drop = Drop()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight
        self.frozen.requires_grad_(what == "frozen_trained")
        for name, module in self.named_modules():
            vars(module).update(what="" if name.startswith("blocks.0") else what, rank=rank, size=size)
        if what == "norm_eps":
            self.last.norm2.eps = 1e-2
        if what == "wrong_buffer":
            self.last.gain.fill_(1.1)

    @property
    def last(self) -> Block:
        return cast("Block", self.blocks[1])

    def forward(self, words: Tensor, features: Tensor) -> Tensor:
        offset = 1 if self.what == "position_offset" else 0
        x = self.embed(words) + self.frozen(features) + self.position[offset : offset + LENGTH]
        x = self.drop(x)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class Drop(Part):
    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        is_wrong = self.what == "dropout_seed" and self.rank == 1
        return self.masked(x, self.num_calls - 1 + 100 * is_wrong)


class Block(Part):
    temperature: Tensor
    gain: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.norm2 = nn.LayerNorm(WIDTH)
        self.mlp = Mlp()
        self.register_buffer("temperature", torch.ones(()))
        self.register_buffer("gain", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if not (self.what == "stale_buffer" and self.rank == 1 and self.num_calls >= BROKEN_STEP):
            self.temperature.mul_(0.9)
        self.num_calls += 1
        x = x + self.attention(self.norm1(x)) * self.temperature
        is_again = self.what in ("checkpointed", "other_recompute")
        normed = self.norm2(x)
        branch = (checkpoint(self.mlp, normed, use_reentrant=False) if is_again else self.mlp(normed)) * self.gain
        if self.what == "detached":
            branch = branch.detach()
        if self.what == "no_residual":
            return branch  # type: ignore[no-any-return]
        return x + branch  # type: ignore[no-any-return]


class Out(nn.Linear):
    what = ""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.T if self.what == "transposed" else self.weight, self.bias)


class Up(nn.Linear):
    what = ""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + (self.bias if self.what == "bias_twice" else 0)


class Attention(Part):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = Out(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        if self.what == "swapped":
            k, v = v, k
        scale = 1.0 if self.what == "attention_scale" else WIDTH**-0.5
        future = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(0 if self.what == "mask" else 1)
        scores = (q @ k.transpose(-1, -2) * scale).masked_fill(future, -1e4)
        mixed: Tensor = self.out(scores.softmax(-1) @ v)
        return mixed


class Act(Part):
    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        if self.what == "nan_on_one_rank" and self.rank == 1 and self.num_calls > BROKEN_STEP:
            x = x.where(torch.arange(x.shape[-1]) != 3, torch.nan)
        if self.what == "custom_backward":
            x = Halved.apply(x)  # type: ignore[no-untyped-call]
        return F.relu(x) if self.what == "activation" else F.gelu(x)


class Thin(Part):
    """Dropout in a block whose forward runs twice a step, the second time to compute it again."""

    def forward(self, x: Tensor) -> Tensor:
        if self.what not in ("checkpointed", "other_recompute"):
            return x
        step, again = divmod(self.num_calls, 2)
        self.num_calls += 1
        return self.masked(x, step + 100 * again * (self.what == "other_recompute"))


class Mlp(Part):
    def __init__(self) -> None:
        super().__init__()
        self.up = Up(WIDTH, 2 * WIDTH)
        self.act = Act()
        self.thin = Thin()
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.thin(self.act(self.up(x))))
        return out


def batch(step: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    words = torch.randint(WORDS, (BATCH, LENGTH + 1), generator=generator)
    return words[:, :-1], torch.randn(BATCH, LENGTH, WIDTH, generator=generator), words[:, 1:]


def reduce_in_bf16(state: Any, bucket: Any) -> Any:
    short = bucket.buffer().bfloat16().div_(dist.get_world_size())
    work = dist.all_reduce(short, async_op=True)
    return work.get_future().then(lambda done: done.value()[0].float())


reduce_in_bf16.__annotations__.clear()  # DDP refuses annotations that are texts


def wrapped(net: Net, what: str, size: int) -> Callable[..., Tensor]:
    if size == 1:
        return net
    if what in ("skipped", "left_alone"):
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["blocks.1.mlp.down.weight"])
    options: dict[str, Any] = {"broadcast_buffers": False} if what == "stale_buffer" else {}
    model = DistributedDataParallel(net, find_unused_parameters=what == "detached", **options)
    if what == "reduced_in_bf16":
        model.register_comm_hook(None, reduce_in_bf16)
    return model


def groups(net: Net, what: str) -> list[dict[str, Any]]:
    decayed = [p for name, p in net.named_parameters() if "norm" not in name]
    others = [p for name, p in net.named_parameters() if "norm" in name]
    if what == "decayed_norm":
        decayed, others = [*decayed, net.norm.weight], [p for p in others if p is not net.norm.weight]
    return [{"params": decayed, "weight_decay": 0.1}, {"params": others}]


def train(net: Net, model: Callable[..., Tensor], what: str, rank: int, size: int) -> None:
    """Four steps with one thing wrong."""
    broken_rank = rank == 1
    if what == "wrong_start" and broken_rank:  # DDP has made all ranks equal
        with torch.no_grad():
            net.last.norm1.weight.mul_(1.1)
    momentum = 0.5 if what == "momentum" and broken_rank else 0.9
    rate = 0.11 if what == "rate" else 0.1
    optimizer = torch.optim.SGD(groups(net, what), lr=rate, momentum=momentum)
    previous = torch.zeros(())
    for step in range(STEPS):
        is_broken = step >= BROKEN_STEP
        if what == "untied" and step == BROKEN_STEP:
            net.head.weight = nn.Parameter(net.embed.weight.detach().clone())
        if what == "bit_flip" and step == BROKEN_STEP and broken_rank:
            with torch.no_grad():
                net.last.mlp.up.weight[0, 0] *= 1024
        part_number = 0 if what == "data" and is_broken else rank
        words, features, labels = (part.chunk(size)[part_number] for part in batch(step))
        if what == "label_shift":
            labels = labels.roll(1, -1)
        if what == "word_order" and is_broken:
            words = words.flip(0)
        loss = F.cross_entropy(model(words, features).flatten(0, 1), labels.flatten())
        if what == "doubled_loss" or (what == "scale_on_one_rank" and broken_rank):
            loss = loss * 2
        loss.backward()
        gradients = [parameter.grad for parameter in net.parameters() if parameter.grad is not None]
        down = cast("Tensor", net.last.mlp.down.weight.grad)
        if what == "summed":
            torch._foreach_mul_(gradients, 2)
        if what == "old_gradient":
            now = down.clone()
            down.copy_(now if step < 2 else previous)
            previous = now
        if what == "gradient_scaled_on_one_rank" and is_broken and broken_rank:
            down.mul_(3)
        if what == "clipped" or (what == "clipping_skipped" and not broken_rank):
            nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        kept = net.last.mlp.up.weight.detach().clone()
        optimizer.step()
        if what == "not_updated" and broken_rank:
            net.last.mlp.up.weight.data.copy_(kept)
        if what != "no_zero_grad":
            optimizer.zero_grad()


def run(folder: Path, name: str, rank: int, size: int) -> None:
    what, _, option = name.removeprefix("one_").partition("+")
    setting, _, value = option.partition("=")
    settings: dict[str, Any] = {"local_gradients": True, **({setting: value} if value else {})}
    torch.manual_seed(0)
    net = Net(what, rank, size)
    recording: dict[str, Any] = {"enabled": True, "dir": str(folder / "recordings"), "rules": RULES, **settings}
    model = wrapped(net, what, size) if what == "left_alone" else None  # the recorder then knows what DDP was told
    with recorder.attach(net, **recording):
        train(net, model or wrapped(net, what, size), what, rank, size)


if __name__ == "__main__":
    sys.exit(
        record_each(Path(sys.argv[1]).absolute(), sys.argv[2:], lambda name: 1 if name.startswith("one") else 2, run)
    )
