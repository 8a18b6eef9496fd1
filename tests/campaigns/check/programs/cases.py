"""The trainings that `check` judges: `SOUND` ones, and `FAULTS`, each of them a sound one with one thing changed."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from .models import Adapted, Adversaries, Causal, Experts, Images, Labelled, Net, Recurrent, Tied, TwoHeads, Words


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    model: Callable[[], nn.Module] = Net
    rate: float = 1e-3
    optimizer: str = "adamw"
    options: dict[str, Any] = field(default_factory=dict)
    ranks: int = 1
    layout: str = "ddp"
    dtype: torch.dtype = torch.float32
    autocast: torch.dtype | None = None
    scale: float = 0.0
    """With which `GradScaler` begins; 0 for none."""
    backoff: float = 0.5
    steps: int = 320
    clip: float = 0.0
    samples: int = 32
    """Of a micro-batch; of fewer than 32 a unit has too few values to be judged."""
    accumulated: int = 1
    """Micro-batches of a step."""
    loss_factor: float = 1.0
    schedule: Callable[[int], float] = lambda step: 1.0
    """Of the learning rate."""
    is_validated: bool = False
    num_batches: int = 0
    """Batches of the training set; 0 for ever new ones."""
    noisy_labels: bool = False
    shares_buffers: bool = True
    has_own_batches: bool = True
    begin: Callable[[Any], None] = lambda net: None
    """What is done to the model before training."""
    begin_again: Callable[[Any], None] = lambda net: None
    """What is done to the model after each validation."""
    batch: Callable[[Tensor, int, int], Tensor] = lambda x, step, rank: x
    """What becomes of the samples of a step and rank."""
    labels: Callable[[Tensor, int], Tensor] = lambda labels, step: labels
    gradients: Callable[[Any, int, int], None] = lambda net, step, rank: None
    """What is done to the gradients of a step."""
    after: Callable[[Any, int, int], None] = lambda net, step, rank: None
    """What is done to the model after a step."""
    groups: Callable[[Any], Any] = lambda net: [one for one in net.parameters() if one.requires_grad]
    other_groups: Callable[[Any], Any] = lambda net: []
    """What a second optimizer has, SGD."""


def _frozen_trunk(net: Any) -> None:
    for block in net.blocks[:2]:
        block.requires_grad_(requires_grad=False)


def _cosine(step: int) -> float:
    return min(step / 30, 1.0) * (0.55 + 0.45 * math.cos(math.pi * step / 320))


def _long_cosine(step: int) -> float:
    return min(step / 60, 1.0) * (0.5 + 0.5 * math.cos(math.pi * step / 700))


def _with_average(net: Any) -> None:
    net.average = copy.deepcopy(net).requires_grad_(requires_grad=False)


def _average(net: Any, step: int, rank: int) -> None:
    with torch.no_grad():
        for mean, parameter in zip(net.average.parameters(), list(net.parameters()), strict=False):
            mean.lerp_(parameter, 0.05)


SOUND: dict[str, Case] = {
    "mlp-adamw": Case(),
    "mlp-adam-high": Case(optimizer="adam", rate=1e-2),
    "mlp-sgd": Case(optimizer="sgd", rate=0.03),
    "mlp-rmsprop": Case(optimizer="rmsprop"),
    "mlp-adagrad": Case(optimizer="adagrad", rate=1e-2),
    "mlp-nadam": Case(optimizer="nadam"),
    "mlp-bfloat16": Case(dtype=torch.bfloat16),
    "mlp-autocast": Case(autocast=torch.bfloat16),
    "mlp-float16": Case(autocast=torch.float16, scale=2.0**16),
    "mlp-clipped": Case(clip=1.0),
    "mlp-accumulated": Case(accumulated=3),
    "mlp-scheduled": Case(schedule=_cosine, rate=3e-3),
    "mlp-dropout": Case(model=lambda: Net(dropout=0.3)),
    "mlp-small-set": Case(num_batches=16),
    "validated": Case(is_validated=True, rate=3e-3),
    "fine-tuned": Case(begin=_frozen_trunk),
    "labelled": Case(model=Labelled),
    "plain": Case(model=lambda: Net(4, is_residual=False)),
    "plain-tanh": Case(model=lambda: Net(4, nn.Tanh, is_residual=False)),
    "plain-sigmoid": Case(model=lambda: Net(3, nn.Sigmoid, is_residual=False), rate=1e-2),
    "deep-sigmoid": Case(model=lambda: Net(4, nn.Sigmoid)),
    "deep-relu": Case(model=lambda: Net(12)),
    "residual-tanh": Case(model=lambda: Net(4, nn.Tanh)),
    "images": Case(model=Images),
    "images-sgd": Case(model=Images, optimizer="sgd", rate=0.1),
    "images-group": Case(model=lambda: Images(lambda width: nn.GroupNorm(2, width))),
    "words": Case(model=Words),
    "causal": Case(model=Causal),
    "recurrent": Case(model=Recurrent, rate=1e-2),
    "two-heads": Case(model=TwoHeads),
    "ddp2": Case(ranks=2),
    "ddp4": Case(ranks=4),
    "ddp4-images": Case(model=Images, ranks=4),
    "fsdp2": Case(ranks=2, layout="fsdp"),
    "tied": Case(model=Tied, rate=3e-3),
    "adapters": Case(model=Adapted, rate=1e-2),
    "experts": Case(model=Experts, rate=3e-3),
    "adversaries": Case(model=Adversaries, optimizer="adam", rate=1e-3),
    "averaged": Case(begin=_with_average, after=_average),
    "two-optimizers": Case(
        groups=lambda net: net.blocks.parameters(),
        other_groups=lambda net: [*net.norm.parameters(), *net.head.parameters()],
    ),
    "long": Case(
        model=lambda: Net(dropout=0.2),
        autocast=torch.bfloat16,
        steps=700,
        rate=1e-2,
        clip=1.0,
        schedule=_long_cosine,
        samples=16,
    ),
    "plain-4-samples": Case(model=lambda: Net(4, is_residual=False), samples=4),
    "plain-tanh-16-samples": Case(model=lambda: Net(4, nn.Tanh, is_residual=False), samples=16),
    "plain-sigmoid-16-samples": Case(model=lambda: Net(3, nn.Sigmoid, is_residual=False), rate=1e-2, samples=16),
    "words-4-samples": Case(model=Words, samples=4),
    "ddp2-8-samples": Case(ranks=2, samples=8),
    "fsdp4-words": Case(model=lambda: Words(dropout=0.0), ranks=4, layout="fsdp"),
}


def _scaled(path: str, factor: float) -> Callable[[Any], None]:
    def begin(net: Any) -> None:
        with torch.no_grad():
            net.get_parameter(path).mul_(factor)

    return begin


def _filled(path: str, value: float) -> Callable[[Any], None]:
    def begin(net: Any) -> None:
        with torch.no_grad():
            net.get_parameter(path).fill_(value)

    return begin


def _all_scaled(factor: float) -> Callable[[Any], None]:
    def begin(net: Any) -> None:
        with torch.no_grad():
            for name, parameter in net.named_parameters():
                if parameter.ndim > 1 and name.startswith("blocks"):
                    parameter.mul_(factor)

    return begin


def _without_channels(net: Any) -> None:
    """Six of eight channels that no value opens any more."""
    with torch.no_grad():
        net.bn1.weight[:6], net.bn1.bias[:6] = 0.0, -5.0


def _loud_unit(net: Any) -> None:
    with torch.no_grad():
        net.blocks[1].up.weight[3] *= 3e4


def _detached(net: Any) -> None:
    net.is_residual, net.detached = False, 1


def _weighed(factor: float) -> Callable[[Any], None]:
    def begin(net: Any) -> None:
        net.weight = factor

    return begin


def _frozen(path: str) -> Callable[[Any], None]:
    return lambda net: net.get_submodule(path).requires_grad_(requires_grad=False)


def _evaluated(path: str) -> Callable[[Any], None]:
    return lambda net: net.get_submodule(path).eval()


def _gradient(path: str, change: Callable[[Tensor], object], at: range | int, rank: int = -1) -> Any:
    """A function that changes a gradient at some steps, on one rank or on all."""

    def gradients(net: Any, step: int, own_rank: int) -> None:
        if (step == at if isinstance(at, int) else step in at) and rank in (-1, own_rank):
            change(net.get_parameter(path).grad)

    return gradients


def _all_gradients(factor: float, at: range, rank: int) -> Any:
    def gradients(net: Any, step: int, own_rank: int) -> None:
        if step in at and rank == own_rank:
            for parameter in net.parameters():
                parameter.grad.mul_(factor)

    return gradients


def _nan(gradient: Tensor) -> None:
    gradient.view(-1)[0] = float("nan")


def _without(net: Any) -> list[dict[str, Any]]:
    still = [net.blocks[1].down.weight]
    rest = [one for one in net.parameters() if one is not still[0]]
    return [{"params": rest}, {"params": still, "lr": 0.0}]


def _hot_group(net: Any) -> list[dict[str, Any]]:
    hot = [net.blocks[2].up.weight]
    return [{"params": [one for one in net.parameters() if one is not hot[0]]}, {"params": hot, "lr": 2.0}]


def _at(step: int, factor: float, rank: int = -1) -> Callable[[Tensor, int, int], Tensor]:
    return lambda x, at, own: x * factor if at == step and rank in (-1, own) else x


def _on_rank(rank: int, factor: float, shift: float = 0.0) -> Callable[[Tensor, int, int], Tensor]:
    return lambda x, step, own: x * factor + shift if own == rank else x


def _poisoned(net: Any, step: int, rank: int) -> None:
    if step == 40 and rank == 1:
        with torch.no_grad():
            net.blocks[1].up.weight.view(-1)[0] = float("nan")


def _nudged(net: Any, step: int, rank: int) -> None:
    if step >= 100 and rank == 1:
        with torch.no_grad():
            net.blocks[2].down.weight.mul_(1.0001)


def _shaken(net: Any, step: int, rank: int) -> None:
    if step == 150:
        with torch.no_grad():
            net.blocks[3].down.weight.mul_(60.0)


def _forgetful(path: str) -> Callable[[Any], None]:
    def begin(net: Any) -> None:
        net.get_submodule(path).momentum = 1.0

    return begin


def _leaping(x: Tensor, step: int, rank: int) -> Tensor:
    return x * (10 if step % 2 else 0.1)


def _squared(net: Any) -> None:
    """Attention whose logits are far too large."""
    with torch.no_grad():
        for name in ("query", "key"):
            net.get_parameter(f"attention.1.{name}.weight").mul_(40.0)


def _sharp(net: Any) -> None:
    with torch.no_grad():
        for name in ("query", "key"):
            net.get_parameter(f"attention.0.{name}.weight").mul_(14.0)


def _but(**changed: Any) -> dict[str, Any]:
    return changed


BASES: dict[str, dict[str, dict[str, Any]]] = {
    "mlp-adamw": {
        "nan_gradient": _but(gradients=_gradient("blocks.2.down.weight", _nan, 20)),
        "nan_weight": _but(begin=_filled("blocks.1.up.bias", float("nan"))),
        "one_huge_gradient": _but(gradients=_gradient("blocks.1.up.weight", lambda one: one.mul_(1e4), 130)),
        "large_gradient": _but(gradients=_gradient("blocks.3.up.weight", lambda one: one.mul_(200), range(200, 203))),
        "rate_of_zero": _but(rate=0.0),
        "rate_tiny": _but(rate=1e-9),
        "rate_of_three": _but(rate=4e-3),
        "group_rate_too_high": _but(groups=_hot_group),
        "group_without_rate": _but(groups=_without),
        "zeroed_gradient": _but(gradients=_gradient("blocks.2.up.weight", lambda one: one.zero_(), range(9999))),
        "frozen_layer": _but(
            begin=lambda net: net.blocks[2].up.weight.requires_grad_(False), groups=lambda net: net.parameters()
        ),
        "frozen_and_left_out": _but(begin=_frozen("blocks.1.down")),
        "frozen_head": _but(begin=_frozen("head")),
        "dead_by_bias": _but(begin=_filled("blocks.1.up.bias", -20.0)),
        "one_layer_scaled": _but(begin=_scaled("blocks.3.down.weight", 20.0)),
        "one_layer_doubled": _but(begin=_scaled("blocks.3.down.weight", 2.5)),
        "one_layer_tiny": _but(begin=_scaled("blocks.0.up.weight", 0.02)),
        "constant_weight": _but(begin=_filled("blocks.2.up.weight", 0.1)),
        "shuffled_labels": _but(noisy_labels=True),
        "one_label": _but(labels=lambda labels, step: torch.zeros_like(labels)),
        "missing_norm": _but(model=lambda: Net(norm=lambda width: nn.Identity())),  # type: ignore[arg-type]
        "loss_scaled": _but(loss_factor=8.0),
        "no_decay_but_l2": _but(options={"weight_decay": 20.0}),
        "repeating_loader": _but(num_batches=1),
        "short_cycle": _but(num_batches=3),
        "constant_input": _but(batch=lambda x, step, rank: torch.ones_like(x)),
        "scaled_input": _but(batch=lambda x, step, rank: x * 5 + 3),
        "weight_shaken": _but(after=_shaken),
        "loud_unit": _but(begin=_loud_unit),
    },
    "mlp-sgd": {
        "rate_too_high_sgd": _but(rate=60.0),
        "rate_burst": _but(schedule=lambda step: 200.0 if step == 120 else 1.0),
    },
    "mlp-adam-high": {"rate_far_too_high": _but(rate=3.0)},
    "mlp-float16": {
        "float16_overflow": _but(batch=lambda x, step, rank: x * 3e4),
        "scale_too_low": _but(scale=2.0**-16),
        "scale_too_high": _but(scale=2.0**60, backoff=0.9999),
    },
    "plain": {
        "loud_batch": _but(batch=_at(90, 40.0)),
        "loud_batch_later": _but(batch=_at(250, 60.0)),
        "weights_too_large": _but(begin=_all_scaled(10.0)),
        "detached_block": _but(begin=_detached),
        "dead_first": _but(begin=_filled("blocks.0.up.bias", -20.0)),
        "rate_kills_units": _but(rate=1.0),
    },
    "deep-relu": {
        "missing_norm_deep": _but(begin=_all_scaled(6.0), model=lambda: Net(12, is_residual=False)),
        "vanishing_deep": _but(begin=_all_scaled(0.3), model=lambda: Net(12, is_residual=False)),
    },
    "plain-sigmoid": {
        "deep_sigmoids": _but(model=lambda: Net(8, nn.Sigmoid, is_residual=False), begin=_all_scaled(0.3)),
    },
    "deep-sigmoid": {
        "saturated_sigmoid": _but(begin=_scaled("blocks.1.up.weight", 500.0)),
    },
    "residual-tanh": {
        "saturated_tanh": _but(begin=_scaled("blocks.2.up.weight", 300.0)),
        "saturated_by_bias": _but(begin=_filled("blocks.0.up.bias", 8.0)),
    },
    "labelled": {
        "labels_never_change": _but(labels=lambda labels, step: torch.arange(len(labels)) % 4),
        "labels_all_alike": _but(labels=lambda labels, step: torch.full_like(labels, step % 4)),
    },
    "validated": {
        "overfitting": _but(num_batches=2),
        "overfitting_later": _but(num_batches=6, rate=3e-3),
    },
    "images": {
        "momentum_of_one": _but(batch=_leaping, begin=_forgetful("bn1")),
        "norm_in_eval": _but(begin=_evaluated("bn2")),
        "dead_channels": _but(begin=_without_channels),
    },
    "words": {"frozen_embedding": _but(begin=_frozen("embed"))},
    "causal": {
        "attention_logits": _but(begin=_squared),
        "attention_sharp": _but(begin=_sharp),
    },
    "two-heads": {
        "aux_too_strong": _but(begin=_weighed(300.0)),
        "aux_without_weight": _but(begin=_weighed(1e-4)),
        "aux_ten_times": _but(begin=_weighed(10.0)),
    },
    "ddp2": {
        "nan_on_one_rank": _but(after=_poisoned),
        "replica_apart": _but(after=_nudged),
        "odd_rank_of_two": _but(batch=_on_rank(1, 6.0)),
        "same_batches_of_two": _but(has_own_batches=False),
        "jump_on_one_rank": _but(gradients=_all_gradients(3e3, range(200, 201), 1)),
    },
    "ddp4": {
        "odd_rank": _but(batch=_on_rank(2, 4.0)),
        "odd_rank_mild": _but(batch=_on_rank(3, 2.2)),
        "odd_rank_shifted": _but(batch=_on_rank(1, 1.0, 4.0)),
        "same_batches": _but(has_own_batches=False),
    },
    "ddp4-images": {
        "norms_apart": _but(shares_buffers=False, batch=_on_rank(2, 3.0)),
    },
}  # fmt: skip
"""By the sound training that it was, each with what is changed of it alone."""


BASE = {name: base for base, faults in BASES.items() for name in faults}
"""By fault, the sound training that it was."""
FAULTS = {name: replace(SOUND[base], **change) for base, faults in BASES.items() for name, change in faults.items()}
