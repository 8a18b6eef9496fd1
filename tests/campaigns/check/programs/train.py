"""Small trainings, sound ones and some with one fault each: what `check` must be quiet on, and what it must name.

    python train.py FOLDER NAME...

records each into ``FOLDER/NAME``. A name is one of `SOUND` or of `FAULTS`, or one of these with ``@SEED``: another
training of its kind. With `FLAG_ALONE` in front it is recorded by the default rules, and with ``%STEPS`` at its end it
has so many steps. All of them are forked from one process.
"""

from __future__ import annotations

import contextlib
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import recorder
from recorder.config import DEFAULT_RULES
from tests.campaigns.check.programs.cases import FAULTS, FLAG_ALONE, SOUND, Case
from tests.campaigns.check.programs.models import WIDTH, Adversaries, Labelled, TwoHeads
from tests.rigs.trainings import record_each

RULES = "site=* keep=stats,fingerprint,histogram,units"
OF_CHANNELS = "; class=ReLU site=output keep=units unit_dim=1"
_VALIDATION_STEPS = 10


def optimizer_of(case: Case, net: nn.Module) -> torch.optim.Optimizer:
    groups = case.groups(net)
    if case.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=case.rate, momentum=0.9)
    kinds: dict[str, Any] = {
        "adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "rmsprop": torch.optim.RMSprop,
        "adagrad": torch.optim.Adagrad, "nadam": torch.optim.NAdam,
    }  # fmt: skip
    return cast("torch.optim.Optimizer", kinds[case.optimizer](groups, lr=case.rate, **case.options))


def wrapped(case: Case, net: nn.Module) -> nn.Module:
    if case.layout == "fsdp":
        for child in [*getattr(net, "blocks", []), net]:
            fully_shard(child)
        return net
    return DistributedDataParallel(net, broadcast_buffers=case.shares_buffers) if case.ranks > 1 else net


class Data:
    """The samples: classes are the quadrants of the first two features."""

    def __init__(self, case: Case, rank: int, seed: int) -> None:
        self._case, self._rank, self._seed = case, rank, seed
        self._kept: tuple[Tensor, Tensor] | None = None

    def batch(self, number: int, *, is_training: bool = True) -> tuple[Tensor, Tensor]:
        case = self._case
        if is_training and case.keeps_batch:
            if self._kept is None:
                self._kept = self._made(0, is_training=True)
            return self._kept
        return self._made(number, is_training=is_training)

    def _made(self, number: int, *, is_training: bool) -> tuple[Tensor, Tensor]:
        case = self._case
        if is_training and case.num_batches:
            number %= case.num_batches
        index = number * case.ranks + (self._rank if case.has_own_batches else 0)
        generator = torch.Generator().manual_seed(1_000_003 * self._seed + index + (0 if is_training else 500_000))
        x = torch.randn(case.samples, WIDTH, generator=generator)
        labels = (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long()
        if is_training and case.noisy_labels:
            labels = torch.randint(0, 4, (case.samples,), generator=generator)
        return (case.batch(x, number, self._rank), case.labels(labels, number)) if is_training else (x, labels)


def loss_of(case: Case, model: nn.Module, net: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    """The loss of a batch, with the terms that the model adds to it."""
    if isinstance(net, Labelled):
        return model(x, labels)  # type: ignore[no-any-return]
    if isinstance(net, Adversaries):
        return model(x, is_of_judge=True)  # type: ignore[no-any-return]
    with torch.autocast("cpu", case.autocast) if case.autocast is not None else contextlib.nullcontext():
        out = model(x.to(case.dtype)).float()
        loss = case.loss(net, x, out, labels)
    if isinstance(net, TwoHeads):
        assert net.other is not None
        loss = loss + net.other
    return loss * case.loss_factor


def run(folder: Path, name: str, rank: int, size: int) -> None:
    case, seed = case_of(name), int(name.partition("%")[0].partition("@")[2] or 0)
    torch.manual_seed(seed)
    net = case.model()
    with torch.no_grad():
        case.begin(net)
    net.to(case.dtype)
    model = wrapped(case, net)
    optimizer = optimizer_of(case, net.judge if isinstance(net, Adversaries) else net)
    others = [optimizer_of(case, net.maker)] if isinstance(net, Adversaries) else []
    others += [torch.optim.SGD(groups, lr=0.03) for groups in [case.other_groups(net)] if groups]
    data = Data(case, rank, seed)
    scaler = torch.amp.GradScaler("cpu", init_scale=case.scale, backoff_factor=case.backoff) if case.scale else None
    rules: Any = RULES + (OF_CHANNELS if any(isinstance(one, nn.ReLU) for one in model.modules()) else "")
    if name.startswith(FLAG_ALONE):
        rules = DEFAULT_RULES
    with recorder.attach(model, enabled=True, dir=str(folder / "recordings"), rules=rules, pool_bytes="64 MB"):
        for step in range(case.steps):
            if case.anew_at and step == case.anew_at:
                optimizer = optimizer_of(case, net)
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] = group.get("initial_lr", group["lr"])
                group["lr"] = group["initial_lr"] * case.schedule(step)
            for number in range(case.accumulated):
                batch = step * case.accumulated + number
                loss = loss_of(case, model, net, *data.batch(batch)) * case.weight(batch) / case.accumulated
                (loss if scaler is None else scaler.scale(loss)).backward()
            if scaler is not None:
                scaler.unscale_(optimizer)
            case.gradients(net, step, rank)
            if case.clip:
                nn.utils.clip_grad_norm_(net.parameters(), case.clip)
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
            if case.clears:
                optimizer.zero_grad()
            if isinstance(net, Adversaries):
                net.zero_grad()
                model(data.batch(step)[0], is_of_judge=False).backward()
            for other in others:
                other.step()
                other.zero_grad()
            with torch.no_grad():
                case.after(net, step, rank)
            if case.is_validated and step % _VALIDATION_STEPS == 0:
                model.eval()
                with torch.no_grad():
                    losses = [loss_of(case, model, net, *data.batch(k, is_training=False)) for k in range(4)]
                    recorder.scalar("validation/loss", torch.stack(losses).mean())
                model.train()


def case_of(name: str) -> Case:
    what, _, steps = name.removeprefix(FLAG_ALONE).partition("%")
    case = (SOUND | FAULTS)[what.partition("@")[0]]
    return replace(case, steps=int(steps)) if steps else case


if __name__ == "__main__":
    sys.exit(record_each(Path(sys.argv[1]).absolute(), sys.argv[2:], lambda name: case_of(name).ranks, run))
