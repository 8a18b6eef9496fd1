"""Small models that a recorder could disturb, what is made of them before training, and ways to train them.

None of the ways to train knows of the recorder. The batches come from the global random generators.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, AdamW, Optimizer
from torch.utils.checkpoint import checkpoint

import recorder

WIDTH = 6
NUM_TOKENS = 11


class Batch(NamedTuple):
    inputs: Tensor
    target: Tensor


class Mlp(nn.Sequential):
    """Dropout, and an activation that works in place."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, 8), nn.ReLU(inplace=True), nn.Dropout(0.25), nn.Linear(8, 3))


class Conv(nn.Module):
    """Batch norm: buffers that move in training."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.act = nn.ReLU(inplace=True)
        self.pool = nn.MaxPool2d(2)
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.pool(self.act(self.norm(self.conv(x)))).flatten(1))  # type: ignore[no-any-return]


class Transformer(nn.Module):
    """Fused attention, dropout inside of torch's own modules."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, 0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(x)).mean(1))  # type: ignore[no-any-return]


class Lstm(nn.Module):
    """Nested outputs, and parameters that torch may flatten."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, 5, num_layers=2, dropout=0.2, batch_first=True)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden, (last, _) = self.lstm(x)
        return self.head(hidden.mean(1) + last[-1])  # type: ignore[no-any-return]


class Tied(nn.Module):
    """One weight in two modules."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(NUM_TOKENS, WIDTH)
        self.body = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, NUM_TOKENS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(self.embed(tokens)))).mean(1)[:, :3]  # type: ignore[no-any-return]


class Shared(nn.Module):
    """A module that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 8)
        self.shared = nn.Sequential(nn.Linear(8, 8), nn.GELU())
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.head(x + self.shared(self.shared(x)))  # type: ignore[no-any-return]


class Buffers(nn.Module):
    """Buffers that the forward changes in place, and one that it replaces."""

    running: Tensor
    num_calls: Tensor
    latest: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running", torch.zeros(WIDTH))
        self.register_buffer("num_calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("latest", torch.zeros(WIDTH))
        self.layer = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.latest = x.mean(0)
            self.running.mul_(0.9).add_(self.latest, alpha=0.1)
            self.num_calls += 1
        return self.layer(x - self.running.clone())  # type: ignore[no-any-return]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": Mlp,
    "conv": Conv,
    "transformer": Transformer,
    "lstm": Lstm,
    "tied": Tied,
    "shared": Shared,
    "buffers": Buffers,
}
_SHAPES = {"conv": (2, 4, 4), "transformer": (5, WIDTH), "lstm": (5, WIDTH)}


def next_batch(model: str, rows: int) -> Batch:
    """The next one: every generator of the process has a part in it."""
    gain, shift = random.random(), float(np.random.rand())
    target = torch.randn(rows, 3) + shift
    if model == "tied":
        return Batch(torch.randint(NUM_TOKENS, (rows, 5)), target)
    return Batch(torch.randn(rows, *_SHAPES.get(model, (WIDTH,))) * (1 + gain), target)


def state_of(model: nn.Module) -> dict[str, Any]:
    """Parameters, gradients and buffers by name; of a buffer that a symbolic trace made a proxy there is no value."""
    return {
        **{f"param {name}": value for name, value in model.named_parameters()},
        **{f"grad {name}": value.grad for name, value in model.named_parameters() if value.grad is not None},
        **{f"buffer {name}": value for name, value in model.named_buffers() if isinstance(value, Tensor)},
    }


@dataclass(frozen=True, kw_only=True)
class Transform:
    make: Callable[[nn.Module], nn.Module] = lambda model: model
    without: str = ""
    """The transform of the twin that is not recorded, where it is another: one without taps."""
    settings: Mapping[str, str] = field(default_factory=dict)
    is_instrumented: bool = False
    """`recorder.instrument` was called on the model that is recorded."""
    around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    """What the forward and the loss run under."""

    @property
    def has_taps(self) -> bool:
        """Taps are in the graph, which must show the values of modules, and is not the same graph."""
        return bool(self.without) and self.without != "none"

    def apply(self, model: nn.Module, *, is_recorded: bool) -> nn.Module:
        if self.is_instrumented and is_recorded:
            recorder.instrument(model)
        return self.make(model)


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module, *, use_reentrant: bool) -> None:
        super().__init__()
        self.inner = inner
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        # Reentrant checkpointing gives gradients only where an argument requires one.
        return checkpoint(self._run, x, torch.ones((), requires_grad=True), use_reentrant=self.use_reentrant)  # type: ignore[no-any-return]

    def _run(self, x: Tensor, _: Tensor) -> Tensor:
        return self.inner(x)  # type: ignore[no-any-return]


def _compiled(backend: str) -> Callable[[nn.Module], nn.Module]:
    return lambda model: torch.compile(model, backend=backend)  # type: ignore[return-value]


_TAP = {"compiled": "tap"}

TRANSFORMS: dict[str, Transform] = {
    "none": Transform(),
    "instrument": Transform(without="none", is_instrumented=True),
    "compile eager": Transform(make=_compiled("eager")),
    "compile aot_eager": Transform(make=_compiled("aot_eager")),
    "compile inductor": Transform(make=_compiled("inductor")),
    "tap eager": Transform(make=_compiled("eager"), without="compile eager", settings=_TAP),
    "tap aot_eager": Transform(make=_compiled("aot_eager"), without="compile aot_eager", settings=_TAP),
    "instrument aot_eager": Transform(make=_compiled("aot_eager"), without="compile aot_eager", is_instrumented=True),
    "checkpoint": Transform(make=lambda model: Checkpointed(model, use_reentrant=False)),
    "checkpoint reentrant": Transform(make=lambda model: Checkpointed(model, use_reentrant=True)),
    "fx": Transform(make=torch.fx.symbolic_trace),
    "instrument fx": Transform(make=torch.fx.symbolic_trace, without="fx", is_instrumented=True),
    "autocast bf16": Transform(around=lambda: torch.autocast("cpu", dtype=torch.bfloat16)),
}


ROWS = (4, 4, 3)
"""Of the batch at each step: the last is ragged, so that what is compiled is compiled again."""


class Training:
    """A model under way, and everything that it has shown."""

    def __init__(self, model_name: str, transform: Transform, *, is_recorded: bool) -> None:
        self.model_name = model_name
        self.model = MODELS[model_name]()
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
            yield next_batch(self.model_name, rows)

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
        for name, value in state_of(self.model).items():
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
            backward(training, next_batch(training.model_name, len(batch.target)))
        training.saw_gradients()
        if clip:
            training.saw("norm", nn.utils.clip_grad_norm_(training.parameters, clip))
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=step % 2 == 0)


def _adamw(training: Training, **options: Any) -> None:
    _train(training, AdamW(training.parameters, 0.01, **options))


def _two(training: Training) -> None:
    some, others = training.parameters[::2], training.parameters[1::2]
    _train(training, AdamW(some, 0.01), SGD(others, 0.1))


def _scaled(training: Training, **options: Any) -> None:
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
    "sgd": lambda training: _train(training, SGD(training.parameters, 0.1, momentum=0.9)),
    "adamw foreach": partial(_adamw, foreach=True),
    "adamw fused": partial(_adamw, fused=True),
    "scaler": partial(_scaled, foreach=True),
    "scaler fused": partial(_scaled, fused=True),
    "clipping": lambda training: _train(training, AdamW(training.parameters, 0.01), clip=0.1),
    "two optimizers": _two,
    "accumulation": lambda training: _train(training, AdamW(training.parameters, 0.01), num_micro_batches=3),
    "double backward": lambda training: _train(training, SGD(training.parameters, 0.01), backward=_backward_twice),
    "lbfgs": _lbfgs,
}
