"""The trainings that `check` judges: `SOUND` ones, and `FAULTS`, each of them a sound one with one thing changed."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .models import Adapted, Adversaries, Causal, Experts, Images, Labelled, Net, Recurrent, Tied, TwoHeads, Words

ANY = "*"
FLAG_ALONE = "flag-alone:"
"""Begins the name of a training that is recorded by the default rules."""


class Named(NamedTuple):
    rule: str
    module: str = ANY
    """`ANY` where all of the model has it."""
    ranks: tuple[int, ...] = (0,)
    needs_baseline: bool = False
    """Whether nobody can know without sound trainings."""
    by_default: tuple[str, ...] = ()
    """The rule, and the module, that name it where the default rules recorded; empty if they are the same."""
    noted_by: str = ""
    """The rule that names it in a note where the default rules recorded."""


Change = Callable[[Any], object]
"""What is done to a model."""


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
    weight: Callable[[int], float] = lambda step: 1.0
    """Of the loss, by the number of the batch."""
    clears: bool = True
    """Whether the gradients are cleared after an update."""
    schedule: Callable[[int], float] = lambda step: 1.0
    """Of the learning rate."""
    anew_at: int = 0
    """The step at which a new optimizer begins to train the model for another task, with other `labels`; 0 if none."""
    is_validated: bool = False
    num_batches: int = 0
    """Batches of the training set; 0 for ever new ones."""
    keeps_batch: bool = False
    """Whether the program has one batch, a tensor that it gives the model at each step."""
    noisy_labels: bool = False
    shares_buffers: bool = True
    has_own_batches: bool = True
    begin: Change = lambda net: None
    """What is done to the model before training; like `after`, without gradients."""
    batch: Callable[[Tensor, int, int], Tensor] = lambda x, step, rank: x
    """What becomes of the samples of a step and rank."""
    labels: Callable[[Tensor, int], Tensor] = lambda labels, step: labels
    loss: Callable[[Any, Tensor, Tensor, Tensor], Tensor] = lambda net, x, out, labels: nn.functional.cross_entropy(
        out, labels
    )
    gradients: Callable[[Any, int, int], None] = lambda net, step, rank: None
    """What is done to the gradients of a step."""
    after: Callable[[Any, int, int], object] = lambda net, step, rank: None
    """What is done to the model after a step."""
    groups: Callable[[Any], Any] = lambda net: [one for one in net.parameters() if one.requires_grad]
    other_groups: Callable[[Any], Any] = lambda net: []
    """What a second optimizer has, SGD."""


def _frozen_trunk(net: Any) -> None:
    for block in net.blocks[:2]:
        block.requires_grad_(requires_grad=False)


def _cosine(warm_steps: int, steps: int, share: float = 0.5) -> Callable[[int], float]:
    return lambda step: min(step / warm_steps, 1.0) * (1 - share + share * math.cos(math.pi * step / steps))


def _in_list(net: Any) -> None:
    blocks = [*net.blocks]
    del net.blocks
    net.blocks = blocks


def _with_average(net: Any) -> None:
    net.average = copy.deepcopy(net).requires_grad_(requires_grad=False)


def _with_frozen_norms(net: Any) -> None:
    for norm in (net.bn1, net.bn2):
        norm.eval().requires_grad_(requires_grad=False)


def _renewed(net: Any, step: int, rank: int) -> None:
    if step % 50 == 49:
        net.average.load_state_dict({name: one for name, one in net.state_dict().items() if "average" not in name})


def _bootstrapped(net: Any, x: Tensor, out: Tensor, labels: Tensor) -> Tensor:
    """The loss of a value function, whose targets a copy of the net makes, as in Q-learning."""
    with torch.no_grad():
        targets = labels.float() + 0.9 * net.average(x).amax(1)
    return nn.functional.smooth_l1_loss(out.amax(1), targets)


def _pairwise(net: Any, x: Tensor, out: Tensor, labels: Tensor) -> Tensor:
    """The loss of a reward model: only differences of scores enter it."""
    (first, second), (one, other) = out.mean(1).chunk(2), labels.chunk(2)
    return -nn.functional.logsigmoid((first - second) * (one - other).sign()).mean()


def _ranked(net: Any, x: Tensor, out: Tensor, labels: Tensor) -> Tensor:
    """The loss of a ranking: of each eight samples the first is the right one."""
    scores = out.mean(1).view(-1, 8)
    return nn.functional.cross_entropy(scores, torch.zeros(len(scores), dtype=torch.long))


def _first_of_eight(x: Tensor, step: int, rank: int) -> Tensor:
    x[::8, :2] = x[::8, :2].abs()
    return x


def _average(net: Any, step: int, rank: int) -> None:
    for mean, parameter in zip(net.average.parameters(), list(net.parameters()), strict=False):
        mean.lerp_(parameter, 0.05)


SOUND: dict[str, Case] = {
    "mlp-adamw": Case(),
    "mlp-adam-high": Case(optimizer="adam", rate=1e-2),
    "mlp-another-task": Case(
        optimizer="adam", rate=1e-2, anew_at=160, labels=lambda labels, number: (labels + 2 * (number >= 160)) % 4
    ),
    "mlp-sgd": Case(optimizer="sgd", rate=0.03),
    "mlp-rmsprop": Case(optimizer="rmsprop"),
    "mlp-adagrad": Case(optimizer="adagrad", rate=1e-2),
    "mlp-nadam": Case(optimizer="nadam"),
    "mlp-bfloat16": Case(dtype=torch.bfloat16),
    "mlp-autocast": Case(autocast=torch.bfloat16),
    "mlp-float16": Case(autocast=torch.float16, scale=2.0**16),
    "mlp-clipped": Case(clip=1.0),
    "mlp-clipped-hard": Case(clip=1e-3),
    "sgd-clipped": Case(optimizer="sgd", rate=0.03, clip=0.05),
    "summed-and-clipped": Case(clip=1.0, loss_factor=1000.0),
    "scaler-clipped": Case(autocast=torch.float16, scale=2.0**18, clip=1.0),
    "fsdp2-clipped": Case(ranks=2, layout="fsdp", clip=0.5),
    "slow": Case(rate=1e-5),
    "slow-warm-up": Case(schedule=_cosine(3000, 9999)),
    "mlp-accumulated": Case(accumulated=3),
    "mlp-scheduled": Case(schedule=_cosine(30, 320, 0.45), rate=3e-3),
    "mlp-dropout": Case(model=lambda: Net(dropout=0.3)),
    "mlp-small-set": Case(num_batches=16),
    "full-batch": Case(num_batches=1, keeps_batch=True),
    "validated": Case(is_validated=True, rate=3e-3),
    "fine-tuned": Case(begin=_frozen_trunk),
    "frozen-in-optimizer": Case(begin=_frozen_trunk, groups=lambda net: net.parameters()),
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
        model=lambda: Net(dropout=0.2), autocast=torch.bfloat16, steps=700, rate=1e-2, clip=1.0,
        schedule=_cosine(60, 700), samples=16,
    ),
    "plain-4-samples": Case(model=lambda: Net(4, is_residual=False), samples=4),
    "plain-tanh-16-samples": Case(model=lambda: Net(4, nn.Tanh, is_residual=False), samples=16),
    "plain-sigmoid-16-samples": Case(model=lambda: Net(3, nn.Sigmoid, is_residual=False), rate=1e-2, samples=16),
    "words-4-samples": Case(model=Words, samples=4),
    "ddp2-8-samples": Case(ranks=2, samples=8),
    "restarted": Case(schedule=lambda step: 0.5 + 0.5 * math.cos(math.pi * (step % 80) / 80), rate=3e-3),
    "stepped-rate": Case(schedule=lambda step: 0.1 if step >= 200 else 1.0, optimizer="sgd", rate=0.03),
    "curriculum": Case(batch=lambda x, step, rank: x * (0.2 + step / 320)),
    "sparse-reward": Case(weight=lambda step: 1.0 if step % 10 == 0 else 0.0),
    "norms-frozen": Case(model=Images, begin=_with_frozen_norms),
    "norms-in-eval": Case(model=Images, begin=lambda net: [net.bn1.eval(), net.bn2.eval()]),
    "images-validated": Case(model=Images, is_validated=True),
    "words-validated": Case(model=Words, is_validated=True),
    "average-with-gradients": Case(begin=lambda net: setattr(net, "average", copy.deepcopy(net)), after=_average),
    "scaler-skips": Case(autocast=torch.float16, scale=2.0**18),
    "bfloat16-warmed": Case(dtype=torch.bfloat16, schedule=_cosine(60, 320)),
    "zero-residual": Case(begin=lambda net: net.blocks[1].down.weight.zero_()),
    "learnt-by-heart": Case(num_batches=16, steps=700, rate=3e-3),
    "ddp2-accumulated": Case(ranks=2, accumulated=2, samples=16),
    "fsdp4-words": Case(model=lambda: Words(dropout=0.0), ranks=4, layout="fsdp"),
    "bootstrapped": Case(begin=_with_average, after=_renewed, loss=_bootstrapped),
    "pairwise": Case(loss=_pairwise),
    "ranked": Case(loss=_ranked, batch=_first_of_eight),
}  # fmt: skip


def _scaled(path: str, factor: float) -> Change:
    return lambda net: net.get_parameter(path).mul_(factor)


def _filled(path: str, value: float) -> Change:
    return lambda net: net.get_parameter(path).fill_(value)


def _all_scaled(factor: float) -> Change:
    return lambda net: [
        one.mul_(factor) for name, one in net.named_parameters() if one.ndim > 1 and name.startswith("blocks")
    ]


def _sharpened(layer: int, factor: float) -> Change:
    """Make the logits of an attention too large."""
    return lambda net: [net.get_parameter(f"attention.{layer}.{one}.weight").mul_(factor) for one in ("query", "key")]


def _without_channels(net: Any) -> None:
    """Close six of eight channels, so that no value opens them any more."""
    net.bn1.weight[:6], net.bn1.bias[:6] = 0.0, -5.0


def _with(path: str, **attributes: object) -> Change:
    return lambda net: vars(net.get_submodule(path)).update(attributes)


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


def _nan(values: Tensor) -> Tensor:
    return values.view(-1)[0].fill_(math.nan)


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


def _from(first: int, change: Change, last: int = 9999, rank: int = -1) -> Callable[[Any, int, int], object]:
    """A function that changes the model after some steps, on one rank or on all."""
    return lambda net, step, own: change(net) if first <= step <= last and rank in (-1, own) else None


def _stuck(x: Tensor, step: int, rank: int) -> Tensor:
    """The same batch again and again, from some step on."""
    return torch.randn(x.shape, generator=torch.Generator().manual_seed(7 + rank)) if step >= 150 else x


def _leaping(x: Tensor, step: int, rank: int) -> Tensor:
    return x * (10 if step % 2 else 0.1)


def _fault(
    rule: str, module: str = ANY, ranks: tuple[int, ...] = (0,), *, beside: bool = False,
    by_default: tuple[str, ...] = (), noted_by: str = "", **changed: Any,
) -> tuple[Named, dict[str, Any]]:  # fmt: skip
    """A fault that the rule names at the module, `beside` sound trainings; with what is changed of its training."""
    return Named(rule, module, ranks, beside, by_default, noted_by), changed


BASES: dict[str, dict[str, tuple[Named, dict[str, Any]]]] = {
    "mlp-adamw": {
        "nan_gradient": _fault("nonfinite", "blocks.2.down", gradients=_gradient("blocks.2.down.weight", _nan, 20)),
        "nan_weight": _fault("nonfinite", "blocks.1.up", begin=_filled("blocks.1.up.bias", float("nan"))),
        "one_huge_gradient": _fault(
            "jump", "blocks.1.up", gradients=_gradient("blocks.1.up.weight", lambda one: one.mul_(1e4), 130)
        ),
        "large_gradient": _fault(
            "jump", "blocks.3.up", gradients=_gradient("blocks.3.up.weight", lambda one: one.mul_(200), range(200, 203))
        ),
        "rate_of_zero": _fault("unchanged", rate=0.0),
        "rate_tiny": _fault("unchanged", rate=1e-9),
        "rate_of_three": _fault("unusual", beside=True, rate=4e-3),
        "group_rate_too_high": _fault("update", "blocks.2.up", groups=_hot_group),
        "clipped_away": _fault("clipping", "", (), clip=1e-12),
        "rate_of_almost_zero": _fault("loss", "", rate=1e-7 / 3),
        "group_without_rate": _fault("unchanged", "blocks.1.down", groups=_without),
        "zeroed_gradient": _fault(
            "no_gradient",
            "blocks.2.up",
            gradients=_gradient("blocks.2.up.weight", lambda one: one.zero_(), range(9999)),
        ),
        "frozen_layer": _fault(
            "invariant",
            "blocks.2.up",
            (),
            beside=True,
            by_default=("no_gradient",),
            begin=lambda net: net.blocks[2].up.weight.requires_grad_(False),
            groups=lambda net: net.parameters(),
        ),
        "frozen_and_left_out": _fault(
            "invariant",
            "blocks.1.down",
            (),
            beside=True,
            by_default=("no_gradient",),
            begin=_frozen("blocks.1.down"),
        ),
        "frozen_head": _fault("invariant", "head", (), beside=True, begin=_frozen("head")),
        "dead_by_bias": _fault("dead", "blocks.1.act", begin=_filled("blocks.1.up.bias", -20.0)),
        "one_layer_scaled": _fault("initialisation", "blocks.3.down", begin=_scaled("blocks.3.down.weight", 20.0)),
        "one_layer_doubled": _fault(
            "unusual",
            "blocks.3.down",
            beside=True,
            by_default=("initialisation",),
            begin=_scaled("blocks.3.down.weight", 2.5),
        ),
        "one_layer_tiny": _fault("initialisation", "blocks.0.up", begin=_scaled("blocks.0.up.weight", 0.02)),
        "constant_weight": _fault("initialisation", "blocks.2.up", begin=_filled("blocks.2.up.weight", 0.1)),
        "shuffled_labels": _fault("unusual", "", beside=True, noisy_labels=True),
        "one_label": _fault("data", "", labels=lambda labels, step: torch.zeros_like(labels)),
        "missing_norm": _fault("unusual", beside=True, model=lambda: Net(norm=lambda width: nn.Identity())),  # type: ignore[arg-type]
        "loss_scaled": _fault("unusual", beside=True, loss_factor=8.0),
        "no_decay_but_l2": _fault("unusual", beside=True, by_default=("update",), options={"weight_decay": 20.0}),
        "repeating_loader": _fault("data", "", num_batches=1),
        "short_cycle": _fault("data", "", num_batches=3),
        "constant_input": _fault("data", "", batch=lambda x, step, rank: torch.ones_like(x)),
        "labels_stuck": _fault(
            "data", "", labels=lambda labels, step: labels if step < 150 else torch.arange(len(labels)) % 3
        ),
        "scaled_input": _fault(
            "unusual", "blocks.0.up", beside=True, noted_by="data", batch=lambda x, step, rank: x * 5 + 3
        ),
        "weight_shaken": _fault(
            "update", "blocks.3.down", after=_from(150, _scaled("blocks.3.down.weight", 60.0), 150)
        ),
        "forgotten_block": _fault(
            "not_optimized",
            "blocks.1.up",
            (),
            groups=lambda net: [one for name, one in net.named_parameters() if not name.startswith("blocks.1.")],
        ),
        "blocks_in_a_list": _fault("not_optimized", "", (), begin=_in_list),
        "optimizer_of_a_copy": _fault(
            "not_optimized", "blocks.1.up", (), groups=lambda net: [*copy.deepcopy(net).parameters()]
        ),
        "never_cleared": _fault("not_cleared", "", (), clears=False),
        "stuck_loader": _fault("data", "", batch=_stuck),
        "nan_in_batch": _fault("nonfinite", batch=lambda x, step, rank: x * (math.nan if step == 171 else 1)),
        "loud_unit": _fault(
            "outlier_units",
            "blocks.1.up",
            by_default=("initialisation",),
            begin=lambda net: net.blocks[1].up.weight[3].mul_(3e4),
        ),
    },
    "mlp-sgd": {
        "clipped_to_nothing": _fault("clipping", "", (), clip=1e-6),
        "rate_tiny_sgd": _fault("loss", "", rate=1e-8),
        "rate_too_high_sgd": _fault("update", rate=60.0),
        "rate_burst": _fault("spike", schedule=lambda step: 200.0 if step == 120 else 1.0),
    },
    "fsdp2": {"clipped_to_nothing_in_fsdp": _fault("clipping", "", (), clip=1e-12)},
    "mlp-dropout": {
        "never_in_training": _fault("evaluation_mode", "drop", (), begin=lambda net: net.eval()),
        "left_in_evaluation": _fault("evaluation_mode", "drop", (), after=_from(100, lambda net: net.eval(), 100)),
    },
    "mlp-bfloat16": {
        "rounded_away": _fault("unchanged", rate=1e-6),
        "rounded_away_later": _fault("unchanged", schedule=lambda step: 1.0 if step < 60 else 1e-4),
    },
    "images-validated": {
        "statistics_of_another": _fault(
            "evaluation_output",
            "bn1",
            begin=lambda net: [_scaled("conv1.weight", 100)(net), _with("bn1", momentum=1e-6)(net)],
        ),
    },
    "mlp-adam-high": {"rate_far_too_high": _fault("update", rate=3.0)},
    "mlp-float16": {
        "float16_overflow": _fault("nonfinite", "blocks.0.up", batch=lambda x, step, rank: x * 3e4),
        "scale_too_low": _fault("low_precision", scale=2.0**-16),
        "scale_too_high": _fault("skipped", "", scale=2.0**60, backoff=0.9999),
    },
    "plain": {
        "loud_batch": _fault("spike", batch=_at(90, 40.0)),
        "loud_batch_later": _fault("spike", batch=_at(250, 60.0)),
        "weights_too_large": _fault("exploding", begin=_all_scaled(10.0)),
        "detached_block": _fault("no_gradient", "blocks.0.up", begin=_with("", is_residual=False, detached=1)),
        "dead_first": _fault("dead", "blocks.0.act", begin=_filled("blocks.0.up.bias", -20.0)),
        "rate_kills_units": _fault("dead", rate=1.0),
    },
    "deep-relu": {
        "missing_norm_deep": _fault("exploding", begin=_all_scaled(6.0), model=lambda: Net(12, is_residual=False)),
        "vanishing_deep": _fault(
            "vanishing", "blocks.0.up", begin=_all_scaled(0.3), model=lambda: Net(12, is_residual=False)
        ),
    },
    "plain-sigmoid": {
        "deep_sigmoids": _fault(
            "vanishing", "blocks.0.up", model=lambda: Net(8, nn.Sigmoid, is_residual=False), begin=_all_scaled(0.3)
        )
    },
    "deep-sigmoid": {
        "saturated_sigmoid": _fault("saturated", "blocks.1.act", begin=_scaled("blocks.1.up.weight", 500.0))
    },
    "residual-tanh": {
        "saturated_tanh": _fault("saturated", "blocks.2.act", begin=_scaled("blocks.2.up.weight", 300.0)),
        "saturated_by_bias": _fault("saturated", "blocks.0.act", begin=_filled("blocks.0.up.bias", 8.0)),
    },
    "labelled": {
        "labels_never_change": _fault("data", "", labels=lambda labels, step: torch.arange(len(labels)) % 4),
        "labels_all_alike": _fault("data", "", labels=lambda labels, step: torch.full_like(labels, step % 4)),
    },
    "recurrent": {"batch_for_time": _fault("batch_first", "cell", (), begin=_with("cell", batch_first=False))},
    "validated": {
        "overfitting": _fault("overfitting", "", num_batches=2),
        "overfitting_later": _fault("overfitting", "", num_batches=6, rate=3e-3),
    },
    "images": {
        "momentum_of_zero": _fault("running_statistics", "bn1", begin=_with("bn1", momentum=0.0)),
        "momentum_of_one": _fault("running_statistics", "bn1", batch=_leaping, begin=_with("bn1", momentum=1.0)),
        "norm_in_eval": _fault("evaluation_mode", "bn2", (), begin=_evaluated("bn2")),
        "dead_channels": _fault("dead_units", "act1", by_default=("no_gradient", "bn1"), begin=_without_channels),
    },
    "words": {"frozen_embedding": _fault("invariant", "embed", (), beside=True, begin=_frozen("embed"))},
    "causal": {
        "attention_logits": _fault("attention", "attention.1.softmax", begin=_sharpened(1, 40.0)),
        "attention_sharp": _fault("attention", "attention.0.softmax", begin=_sharpened(0, 14.0)),
    },
    "two-heads": {
        "aux_too_strong": _fault("objectives", "", (), begin=_with("", weight=300.0)),
        "aux_without_weight": _fault("objectives", "", (), begin=_with("", weight=1e-4)),
        "aux_ten_times": _fault("unusual", beside=True, begin=_with("", weight=10.0)),
    },
    "ddp2": {
        "nan_on_one_rank": _fault(
            "nonfinite", "blocks.1.up", (1,), after=_from(40, lambda net: _nan(net.blocks[1].up.weight), 40, rank=1)
        ),
        "replica_apart": _fault(
            "replica", "blocks.2.down", (1,), after=_from(100, _scaled("blocks.2.down.weight", 1.0001), rank=1)
        ),
        "replica_apart_at_the_end": _fault(
            "replica", "blocks.2.down", (1,), after=_from(312, _scaled("blocks.2.down.weight", 1.0001), 312, rank=1)
        ),
        "gradient_of_one_rank": _fault(
            "replica",
            "blocks.2.up",
            (1,),
            gradients=_gradient("blocks.2.up.weight", lambda one: one.mul_(1.01), range(100, 9999), rank=1),
        ),
        "empty_on_one_rank": _fault(
            "data", "", (1,), batch=lambda x, step, rank: x * 0 if (rank, step > 99) == (1, True) else x
        ),
        "never_cleared_in_ddp": _fault("not_cleared", "", (), clears=False),
        "odd_rank_of_two": _fault(
            "unusual", "blocks.0.up", (1,), beside=True, by_default=("outlier_rank",), batch=_on_rank(1, 6.0)
        ),
        "same_batches_of_two": _fault("data", "", (1,), has_own_batches=False),
        "jump_on_one_rank": _fault("jump", ranks=(1,), gradients=_all_gradients(3e3, range(200, 201), 1)),
    },
    "ddp4": {
        "odd_rank": _fault("outlier_rank", "", (2,), batch=_on_rank(2, 4.0)),
        "odd_rank_mild": _fault("outlier_rank", "", (3,), batch=_on_rank(3, 2.2)),
        "odd_rank_shifted": _fault("outlier_rank", "", (1,), batch=_on_rank(1, 1.0, 4.0)),
        "same_batches": _fault("data", "", (1,), has_own_batches=False),
    },
    "ddp4-images": {
        "norms_apart": _fault("running_statistics", "bn1", (2,), shares_buffers=False, batch=_on_rank(2, 3.0))
    },
}
"""By the sound training that it was, each with what has to name it, and what is changed of that training."""


BASE = {name: base for base, faults in BASES.items() for name in faults}
"""By fault, the sound training that it was."""
EXPECTED = {name: wanted for faults in BASES.values() for name, (wanted, _) in faults.items()}
FAULTS = {
    name: replace(SOUND[base], **change) for base, faults in BASES.items() for name, (_, change) in faults.items()
}
