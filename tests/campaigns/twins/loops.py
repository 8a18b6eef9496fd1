"""Ways to train: optimizers, and what people do around them. None knows of the recorder."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, AdamW, Optimizer

from . import models
from .models import Batch
from .transforms import Transform

ROWS = (4, 4, 3)
"""Of the batch at each step: the last is ragged, so that what is compiled is compiled again."""


class Training:
    """A model under way, and everything that it has shown."""

    def __init__(self, model_name: str, transform: Transform, *, is_recorded: bool) -> None:
        self.model_name = model_name
        self.model = models.MODELS[model_name]()
        self.transform = transform
        self.called = transform.apply(self.model, is_recorded=is_recorded)
        self.seen: list[tuple[str, Tensor]] = []
        self.optimizers: list[Optimizer] = []
        self.scaler: torch.amp.GradScaler | None = None

    @property
    def parameters(self) -> list[nn.Parameter]:
        return list(self.model.parameters())

    def batches(self) -> Iterable[Batch]:
        for rows in ROWS:
            yield models.batch(self.model_name, rows)

    def loss(self, batch: Batch) -> Tensor:
        with self.transform.around():
            output = self.called(batch.inputs)
            loss: Tensor = (output.float() - batch.target).square().mean()
        self.saw("output", output)
        self.saw("loss", loss)
        return loss

    def saw(self, name: str, value: Tensor) -> None:
        self.seen.append((f"{len(self.seen)} {name}", value.detach().clone()))

    def saw_gradients(self) -> None:
        for name, value in models.state_of(self.model).items():
            if not name.startswith("param"):
                self.saw(name, value)

    def uses(self, *optimizers: Optimizer) -> tuple[Optimizer, ...]:
        self.optimizers += optimizers
        return optimizers


def _backward(training: Training, batch: Batch) -> None:
    training.loss(batch).backward()


def _backward_twice(training: Training, batch: Batch) -> None:
    loss = training.loss(batch)
    gradients = torch.autograd.grad(loss, training.parameters, create_graph=True)
    penalty = torch.stack([gradient.square().sum() for gradient in gradients]).sum()
    training.saw("penalty", penalty)
    (loss + 0.1 * penalty).backward()


def _train(
    training: Training,
    *optimizers: Optimizer,
    backward: Callable[[Training, Batch], None] = _backward,
    num_micro_batches: int = 1,
    clip: float = 0.0,
) -> None:
    training.uses(*optimizers)
    for step, batch in enumerate(training.batches()):
        backward(training, batch)
        for _ in range(num_micro_batches - 1):
            backward(training, models.batch(training.model_name, len(batch.target)))
        training.saw_gradients()
        if clip:
            training.saw("norm", nn.utils.clip_grad_norm_(training.parameters, clip))
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=step % 2 == 0)


def _sgd(training: Training) -> None:
    _train(training, SGD(training.parameters, 0.1, momentum=0.9))


def _adamw(**options: Any) -> Callable[[Training], None]:
    return lambda training: _train(training, AdamW(training.parameters, 0.01, **options))


def _clipped(training: Training) -> None:
    _train(training, AdamW(training.parameters, 0.01), clip=0.1)


def _two(training: Training) -> None:
    some, others = training.parameters[::2], training.parameters[1::2]
    _train(training, AdamW(some, 0.01), SGD(others, 0.1))


def _accumulated(training: Training) -> None:
    _train(training, AdamW(training.parameters, 0.01), num_micro_batches=3)


def _penalized(training: Training) -> None:
    _train(training, SGD(training.parameters, 0.01), backward=_backward_twice)


def _scaled(**options: Any) -> Callable[[Training], None]:
    def train(training: Training) -> None:
        """Train with a second step that overflows, and is skipped."""
        (optimizer,) = training.uses(AdamW(training.parameters, 0.01, **options))
        scaler = training.scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=1)
        for step, batch in enumerate(training.batches()):
            loss = training.loss(batch)
            scaler.scale(loss * float("inf") if step == 1 else loss).backward()
            training.saw_gradients()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            training.saw("scale", torch.tensor(scaler.get_scale()))

    return train


def _lbfgs(training: Training) -> None:
    (optimizer,) = training.uses(LBFGS(training.parameters, 0.1, max_iter=3, history_size=3))
    for batch in training.batches():

        def closure(batch: Batch = batch) -> Tensor:
            optimizer.zero_grad()
            loss = training.loss(batch)
            loss.backward()
            training.saw_gradients()
            return loss

        optimizer.step(closure)  # type: ignore[arg-type]


LOOPS: dict[str, Callable[[Training], None]] = {
    "sgd": _sgd,
    "adamw foreach": _adamw(foreach=True),
    "adamw fused": _adamw(fused=True),
    "scaler": _scaled(foreach=True),
    "scaler fused": _scaled(fused=True),
    "clipping": _clipped,
    "two optimizers": _two,
    "accumulation": _accumulated,
    "double backward": _penalized,
    "lbfgs": _lbfgs,
}
