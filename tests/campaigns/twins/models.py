"""Small models, each with something that a recorder could disturb, and batches from the global generators."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

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


def batch(model: str, rows: int) -> Batch:
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
