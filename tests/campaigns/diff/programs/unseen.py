"""A small convolutional and recurrent network, trained soundly or with one silent error, for `unseen`.

    python unseen.py FOLDER NAME...

records each training into ``FOLDER/NAME``. A name is ``LAYOUT-OPTIMIZER[-VARIANT...]``, with ``@ERROR`` behind it for a
training that goes wrong and ``+jitter=1`` for a twin; see `LAYOUTS`, `OPTIMIZERS` and `VARIANTS`. All trainings are
forked from one process, and the ranks of a training share one global batch.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import recorder
from tests.rigs.trainings import record_each

CHANNELS, SIDE, KINDS, CLASSES, BATCH, STEPS = 8, 6, 5, 7, 8, 4
RULES = "site=* keep=tensor,stats,fingerprint"
LAYOUTS = {"one": 1, "ddp": 2, "ddp4": 4, "fsdp2": 2, "fsdp1": 2, "hsdp": 4}
"""The number of ranks of each layout."""
VARIANTS = (
    "halves", "bf16", "checkpointed", "static", "views", "unused", "fused", "loop", "channels", "zeros", "tapped",
    "clipped", "dealt", "reduced", "still",
)  # fmt: skip
"""``halves``: two micro-batches a step. ``dealt``: those of one process have the samples of two ranks' micro-batches.
``views``: gradients are views of DDP's buckets. ``zeros``: gradients are set to zero, not to None. ``tapped``: compiled
with taps. ``reduced``: gradients are recorded after their reduction alone. ``still``: buffers do not move, which
otherwise move once a micro-batch. The others say themselves."""


class Lion(torch.optim.Optimizer):
    """The sign of a mean of gradients as the update (Chen et al., 2023): a discontinuous function of rounding."""

    def __init__(self, groups: Any, lr: float = 1e-3) -> None:
        super().__init__(groups, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                mean = state["exp_avg"]
                parameter.add_((0.9 * mean + 0.1 * parameter.grad).sign_(), alpha=-group["lr"])
                mean.lerp_(parameter.grad, 0.01)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "nadam": lambda groups, **more: torch.optim.NAdam(groups, lr=2e-3, weight_decay=0.01, **more),
    "adagrad": lambda groups, **more: torch.optim.Adagrad(groups, lr=1e-2, **more),
    "radam": lambda groups, **more: torch.optim.RAdam(groups, lr=2e-3, **more),
    "adamax": lambda groups, **more: torch.optim.Adamax(groups, lr=2e-3, **more),
    "rmsprop": lambda groups, **more: torch.optim.RMSprop(groups, lr=1e-3, **more),
    "nesterov": lambda groups, **more: torch.optim.SGD(groups, lr=0.05, momentum=0.8, nesterov=True, **more),
    "adamw": lambda groups, **more: torch.optim.AdamW(groups, lr=2e-3, **more),
    "adadelta": lambda groups, **more: torch.optim.Adadelta(groups, lr=0.5, **more),
    "lion": lambda groups, **more: Lion(groups, lr=1e-3),
}


class Training(NamedTuple):
    layout: str
    optimizer: str
    variants: tuple[str, ...]
    error: str
    jitter: int

    @classmethod
    def read(cls, name: str) -> Training:
        what, _, jitter = name.partition("+jitter=")
        what, _, error = what.partition("@")
        layout, optimizer, *variants = what.split("-")
        assert set(variants) <= set(VARIANTS), variants
        return cls(layout, optimizer, tuple(variants), error, int(jitter or 0))


class Squeeze(nn.Module):
    """A gate for each channel, made of the channel's mean."""

    error = ""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(CHANNELS, CHANNELS)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate(x.mean((2, 3))).sigmoid()
        if self.error == "gate_detached":
            gate = gate.detach()
        return x * gate[:, :, None, None]  # type: ignore[no-any-return]


class Track(nn.Module):
    """Subtracts a running mean that does not depend on the batch's division among the ranks."""

    running: Tensor
    error = ""
    is_still = False

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running", torch.zeros(CHANNELS))

    def forward(self, x: Tensor) -> Tensor:
        if self.training and torch.is_grad_enabled() and not self.is_still:
            rate = 0.3 if self.error == "running_rate" else 0.1
            self.running = self.running.lerp(torch.full((CHANNELS,), 0.5), rate)
        return x - self.running[:, None, None]


class Point(nn.Conv2d):
    error = ""

    def forward(self, x: Tensor) -> Tensor:
        if self.error == "half_point":
            return super().forward(x.bfloat16().float())
        return super().forward(x)


class Stage(nn.Module):
    def __init__(self, error: str) -> None:
        super().__init__()
        mode: Literal["circular", "zeros"] = "circular" if error == "padding" else "zeros"
        self.depth = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, groups=CHANNELS, padding_mode=mode)
        self.norm = nn.GroupNorm(2 if error == "norm_groups" else 4, CHANNELS)
        self.point = Point(CHANNELS, CHANNELS, 1)
        self.squeeze = Squeeze()
        self.track = Track()
        self.point.error = self.squeeze.error = self.track.error = self.error = error

    def forward(self, x: Tensor) -> Tensor:
        y = F.silu(self.point(self.norm(self.depth(x))))
        if self.error == "swapped_order":
            return x + self.squeeze(self.track(y))  # type: ignore[no-any-return]
        return x + self.track(self.squeeze(y))  # type: ignore[no-any-return]


class Sight(nn.Module):
    """Looks at an image row by row, and says its class and how sure it is."""

    def __init__(self, training: Training, rank: int) -> None:
        super().__init__()
        error = training.error
        self.stem = nn.Conv2d(3, CHANNELS, 3, padding=1)
        self.condition = nn.Embedding(KINDS, 2 * CHANNELS)
        on_rank_1 = ("running_rate",)
        last = error if error not in on_rank_1 or rank == 1 else ""
        self.stages = nn.ModuleList([Stage(""), Stage(last)])
        self.rows = nn.GRUCell(CHANNELS * SIDE, 2 * CHANNELS)
        self.head = nn.Linear(2 * CHANNELS, CLASSES)
        self.doubt = nn.Linear(2 * CHANNELS, 1)
        for module in self.modules():
            if isinstance(module, Track):
                module.is_still = "still" in training.variants
        self.error = error
        self.is_checkpointed = "checkpointed" in training.variants
        self.memory: Tensor | None = None

    def forward(self, image: Tensor, kind: Tensor) -> tuple[Tensor, Tensor]:
        scale, shift = self.condition(kind)[:, :, None, None].chunk(2, 1)
        x = self.stem(image) * (1 + scale) + shift
        for stage in self.stages:
            x = checkpoint(stage, x, use_reentrant=False) if self.is_checkpointed else stage(x)
        hidden = torch.zeros(len(x), 2 * CHANNELS)
        if self.error == "memory_kept" and self.memory is not None:
            hidden = self.memory
        for row in x.unbind(2):
            hidden = self.rows(row.flatten(1), hidden)
        self.memory = hidden.detach()
        return self.head(hidden), self.doubt(hidden)


def batch(step: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7000 + step)
    image = torch.randn(BATCH, 3, SIDE, SIDE, generator=generator)
    kind = torch.randint(KINDS, (BATCH,), generator=generator)
    return image, kind, torch.randint(CLASSES, (BATCH,), generator=generator)


def wrapped(net: Sight, training: Training) -> nn.Module:
    layout, variants, error = training.layout, training.variants, training.error
    if layout in ("ddp", "ddp4"):
        return DistributedDataParallel(
            net,
            broadcast_buffers=error != "running_rate",
            static_graph="static" in variants,
            gradient_as_bucket_view="views" in variants,
            find_unused_parameters="unused" in variants or error == "gate_detached",
        )
    if layout == "fsdp1":
        return FullyShardedDataParallel(
            net,
            auto_wrap_policy=ModuleWrapPolicy({Stage}),
            sharding_strategy=ShardingStrategy.FULL_SHARD,
            use_orig_params=True,
            device_id=torch.device("cpu"),
        )
    if layout in ("fsdp2", "hsdp"):
        shape, names = ((2, 2), ("replicate", "shard")) if layout == "hsdp" else ((2,), ("shard",))
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        for stage in net.stages:
            fully_shard(stage, mesh=mesh)
        fully_shard(net, mesh=mesh)
    return net


def optimizer_of(net: nn.Module, training: Training, rank: int) -> torch.optim.Optimizer:
    head = [p for name, p in net.named_parameters() if name.removeprefix("module.").startswith("head.")]
    others = [p for p in net.parameters() if all(p is not one for one in head)]
    more: dict[str, Any] = {}
    if "fused" in training.variants:
        more = {"fused": True}
    if "loop" in training.variants:
        more = {"foreach": False}
    if training.error == "betas" and rank == 1:
        more |= {"betas": (0.9, 0.99)}
    optimizer = OPTIMIZERS[training.optimizer]([{"params": others}, {"params": head}], **more)
    if training.error == "head_rate":
        optimizer.param_groups[1]["lr"] *= 2
    if training.error == "decay":
        optimizer.param_groups[0]["weight_decay"] = 0.3
    return optimizer


def local(parameter: Tensor) -> Tensor:
    """This rank's part of a parameter, which may be changed in place."""
    value = parameter.detach()
    return cast("Tensor", value.to_local()) if hasattr(value, "to_local") else value


def loss_of(outputs: tuple[Tensor, Tensor], labels: Tensor, error: str, step: int) -> Tensor:
    logits, doubt = outputs
    smoothing = 0.1 if error == "smoothed" and step >= 2 else 0.0
    wrong = F.cross_entropy(logits, labels, reduction="none", label_smoothing=smoothing)
    aux = (doubt.squeeze(1) - wrong.detach()).square().mean()
    return wrong.mean() + (0.3 if error == "aux_weight" else 0.1) * aux


def parts_of(training: Training, step: int, rank: int, size: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    error = training.error
    image, kind, label = batch(step)
    index = 0 if error == "same_part" and step >= 2 and rank == 1 else rank
    image, kind, label = (whole.chunk(size)[index] for whole in (image, kind, label))
    if error == "kinds_shifted" and step >= 1:
        kind = (kind + 1) % KINDS
    if error == "unnormalised" and rank == 1:
        image = image * 1.5
    if "channels" in training.variants:
        image = image.contiguous(memory_format=torch.channels_last)
    if "halves" not in training.variants:
        return [(image, kind, label)]
    wholes = (image, kind, label)
    if "dealt" in training.variants:
        wholes = tuple(torch.cat([whole[:2], whole[4:6], whole[2:4], whole[6:]]) for whole in wholes)  # type: ignore[assignment]
    return list(zip(*(whole.chunk(2) for whole in wholes), strict=True))


def backward_all(model: nn.Module, net: Sight, training: Training, step: int, rank: int, size: int) -> None:
    error = training.error
    parts = parts_of(training, step, rank, size)
    for i, (image, kind, label) in enumerate(parts):
        is_last = i == len(parts) - 1
        waits = not is_last or (error == "never_reduced" and step >= 1)
        no_sync = isinstance(model, DistributedDataParallel) and waits
        with (
            cast("DistributedDataParallel", model).no_sync() if no_sync else contextlib.nullcontext(),
            torch.autocast("cpu", torch.bfloat16, enabled="bf16" in training.variants),
        ):
            loss = loss_of(model(image, kind), label, error, step)
            if error != "undivided":
                loss = loss / len(parts)
            loss.backward()
        if error == "part_lost" and not is_last and rank == 1:
            net.zero_grad()


def spoil_gradients(model: nn.Module, net: Sight, training: Training, step: int, rank: int) -> None:
    error = training.error
    if error == "clamped" and rank == 0 and step >= 1:
        cast("Tensor", cast("Stage", net.stages[0]).depth.weight.grad).clamp_(-1e-3, 1e-3)
    if error == "clipped_by_value":
        torch.nn.utils.clip_grad_value_(model.parameters(), 1e-2)
    elif "clipped" in training.variants:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)


def spoil_state(net: Sight, optimizer: torch.optim.Optimizer, training: Training, step: int, rank: int) -> None:
    error = training.error
    if error == "state_lost" and step == 2:
        for parameter in net.rows.parameters():
            optimizer.state.pop(parameter, None)
    if error == "rows_swapped" and step == 2:
        weight = local(net.condition.weight)
        weight.copy_(weight.flip(0))
    if error == "stale_shard" and step == 2 and rank == 1:
        local(cast("Stage", net.stages[1]).point.weight).mul_(0.9)


def train(net: Sight, training: Training, rank: int, size: int) -> None:
    error = training.error
    if error == "frozen":
        cast("Stage", net.stages[0]).point.requires_grad_(False)
    model = wrapped(net, training)
    if "channels" in training.variants:
        net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if error == "whole_sum":
        for module in (net, *net.stages):
            cast("Any", module).set_gradient_divide_factor(1.0)
            cast("Any", module).set_force_sum_reduction_for_comms(True)
    optimizer = optimizer_of(model, training, rank)
    if "tapped" in training.variants:
        model = cast("nn.Module", torch.compile(model, backend="aot_eager"))
    for step in range(STEPS):
        spoil_state(net, optimizer, training, step, rank)
        if error == "not_replicated" and step >= 1:
            cast("Any", net).set_requires_all_reduce(False)
        backward_all(model, net, training, step, rank, size)
        spoil_gradients(model, net, training, step, rank)
        optimizer.step()
        optimizer.zero_grad(set_to_none="zeros" not in training.variants)


def run(folder: Path, name: str, rank: int, size: int) -> None:
    training = Training.read(name)
    settings: dict[str, Any] = {"local_gradients": "reduced" not in training.variants}
    if training.jitter:
        settings["jitter"] = training.jitter
    if "tapped" in training.variants:
        settings["compiled"] = "tap"
    torch.manual_seed(3)
    net = Sight(training, rank)
    with recorder.attach(net, enabled=True, dir=str(folder / "recordings"), rules=RULES, **settings):
        train(net, training, rank, size)


def num_ranks_of(text: str) -> int:
    return LAYOUTS[Training.read(text).layout]


if __name__ == "__main__":
    sys.exit(record_each(Path(sys.argv[1]).absolute(), sys.argv[2:], num_ranks_of, run))
