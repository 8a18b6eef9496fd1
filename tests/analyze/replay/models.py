"""One model that calls modules of torch.nn in many ways; a factory makes it for those that need one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Scaled(nn.Module):
    """A class of a user's own, whose forward takes more than tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, pair: tuple[Tensor, dict[str, Tensor]], *, scale: float, flags: list[bool]) -> dict[str, Tensor]:
        first, more = pair
        self.calls += 1
        value = first * self.weight * scale + more["bias"] * self.calls
        return {"value": value if flags[0] else -value}


class Zoo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8, padding_idx=0)
        self.norm = nn.LayerNorm(8, bias=False)
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.2, batch_first=True)
        self.rnn = nn.RNN(8, 8, nonlinearity="relu", batch_first=True)
        self.lstm = nn.LSTM(8, 4, bidirectional=True, batch_first=True)
        self.up = nn.Linear(8, 16, bias=False)
        self.act = nn.ReLU(inplace=True)
        self.drop = nn.Dropout(0.3)
        self.down = nn.Linear(16, 8)
        self.cast = nn.Linear(8, 8)
        self.scaled = Scaled()
        self.conv = nn.Conv2d(8, 8, 3, padding="same", groups=2, padding_mode="circular")
        self.batch = nn.BatchNorm2d(8)
        self.group = nn.GroupNorm(2, 8, affine=False)
        self.gelu = nn.GELU(approximate="tanh")
        self.softmax = nn.Softmax(dim=-1)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.embedding(tokens))
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = self.lstm(self.rnn(x)[0])[0]
        x = x + self.down(self.drop(self.act(self.up(x))))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = self.cast(x).float()
        x = self.scaled((x, {"bias": x.mean(0, keepdim=True).expand_as(x)}), scale=0.3, flags=[True])["value"]
        image = x.transpose(1, 2).reshape(2, 8, 2, 3).to(memory_format=torch.channels_last)
        image = self.gelu(self.group(self.batch(self.conv(image))))
        out: Tensor = self.softmax(image)
        return out


def make() -> nn.Module:
    torch.manual_seed(0)
    return Zoo()


def train(model: nn.Module, num_steps: int = 3) -> list[Any]:
    """Losses of a few steps."""
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(num_steps):
        loss = (model(torch.randint(0, 11, (2, 6))) ** 2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
