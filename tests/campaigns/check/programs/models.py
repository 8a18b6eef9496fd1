"""The models of the small trainings that `check` judges."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import recorder

WIDTH = 16


class Block(nn.Module):
    """A layer of a deep net: `up` makes `act`'s input."""

    def __init__(self, act: type[nn.Module], width: int = WIDTH) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(width, 2 * width), act(), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))  # type: ignore[no-any-return]


class Net(nn.Module):
    """Blocks, with or without residual connections and norms, and a head of four classes."""

    def __init__(
        self,
        depth: int = 4,
        act: type[nn.Module] = nn.ReLU,
        *,
        is_residual: bool = True,
        norm: type[nn.Module] = nn.LayerNorm,
        dropout: float = 0.0,
        width: int = WIDTH,
    ) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, width) if width != WIDTH else nn.Identity()
        self.blocks = nn.ModuleList(Block(act, width) for _ in range(depth))
        self.norm = norm(width)
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(width, 4)
        self.is_residual = is_residual
        self.detached = -1

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        for number, block in enumerate(self.blocks):
            y = block(x)
            y = y.detach() if number == self.detached else y
            x = x + y if self.is_residual else y
        return self.head(self.drop(self.norm(x) if self.is_residual else x))  # type: ignore[no-any-return]


class Labelled(nn.Module):
    """A net that is called with its labels, and that returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net(2)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.net(x), labels)


class TwoHeads(nn.Module):
    """Blocks that two objectives share, and a head for each: a class, and the samples themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.ModuleList(Block(nn.GELU) for _ in range(3))
        self.head, self.rebuild = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, WIDTH)
        self.weight = 1.0
        self.other: Tensor | None = None
        """The loss of the second objective, of the last call."""

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for block in self.trunk:
            y = y + block(y)
        rebuilt = self.rebuild(recorder.objective("rebuilt", y))
        self.other = self.weight * (rebuilt - x).square().mean()
        return self.head(recorder.objective("class", y))  # type: ignore[no-any-return]


class Images(nn.Module):
    def __init__(self, norm: Any = nn.BatchNorm2d) -> None:
        super().__init__()
        self.conv1, self.bn1, self.act1 = nn.Conv2d(1, 8, 3, padding=1), norm(8), nn.ReLU()
        self.conv2, self.bn2, self.act2 = nn.Conv2d(8, 8, 3, padding=1), norm(8), nn.ReLU()
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act1(self.bn1(self.conv1(x.view(-1, 1, 4, 4))))
        x = self.act2(self.bn2(self.conv2(x)))
        return self.head(x.mean((2, 3)))  # type: ignore[no-any-return]


class Words(nn.Module):
    """An embedding and an encoder with attention, dropout and GELU."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout, activation="gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        words = (x.abs() * 10).long().clamp(max=31)
        return self.head(self.encoder(self.embed(words)).mean(1))  # type: ignore[no-any-return]


class Attention(nn.Module):
    """Attention of one head, whose softmax is a module."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.softmax = nn.Softmax(dim=-1)

    def forward(self, x: Tensor) -> Tensor:
        logits = self.query(x) @ self.key(x).transpose(1, 2) / WIDTH**0.5
        mask = torch.full(logits.shape[-2:], float("-inf")).triu(1)
        return self.softmax(logits + mask) @ self.value(x)  # type: ignore[no-any-return]


class Causal(nn.Module):
    """A small causal transformer of pre-norm layers, whose attention is plain to see."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(32, WIDTH), nn.Embedding(WIDTH, WIDTH)
        self.attention = nn.ModuleList(Attention() for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(4))
        self.mlps = nn.ModuleList(Block(nn.GELU) for _ in range(2))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        words = (x.abs() * 10).long().clamp(max=31)
        y = self.embed(words) + self.position(torch.arange(words.shape[1]))
        for number, (attention, mlp) in enumerate(zip(self.attention, self.mlps, strict=True)):
            y = y + attention(self.norms[2 * number](y))
            y = y + mlp(self.norms[2 * number + 1](y))
        return self.head(y.mean(1))  # type: ignore[no-any-return]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTM(4, WIDTH, batch_first=True), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cell(x.view(-1, 4, 4))[0][:, -1])  # type: ignore[no-any-return]


class Tied(nn.Module):
    """An embedding whose rows are the weights of the head, most of them never looked up, and blocks that share one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(256, WIDTH), nn.Linear(WIDTH, 256, bias=False)
        nn.init.normal_(self.embed.weight, std=0.02)
        self.head.weight = self.embed.weight
        blocks = [Block(nn.GELU) for _ in range(3)]
        blocks[1].up.weight = blocks[0].up.weight
        self.blocks, self.norm = nn.ModuleList(blocks), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.embed((x.abs() * 10).long().clamp(max=31)).mean(1) + x
        for block in self.blocks:
            y = y + block(y)
        return self.head(self.norm(y))  # type: ignore[no-any-return]


class Adapter(nn.Module):
    """A frozen layer with an addition of low rank, which begins at zero."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner.requires_grad_(requires_grad=False)
        self.down, self.up = nn.Linear(inner.in_features, 4, bias=False), nn.Linear(4, inner.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.up(self.down(x))  # type: ignore[no-any-return]


class Adapted(nn.Module):
    """A frozen net whose layers have adapters, and a head that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net().requires_grad_(requires_grad=False)
        self.net.head.requires_grad_(requires_grad=True)
        for block in self.net.blocks:
            for name in ("up", "down"):
                setattr(block, name, Adapter(getattr(block, name)))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)  # type: ignore[no-any-return]


class Experts(nn.Module):
    """Eight experts; each sample goes to one of them. Some experts hardly ever get a sample, and two never do."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.norm, self.head = nn.Linear(WIDTH, 8), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(Block(nn.GELU) for _ in range(8))
        with torch.no_grad():
            self.router.bias[5:] = torch.tensor([-1.5, -30.0, -30.0])

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).max(-1)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            if (chosen == number).any():
                y = y.index_add(0, (at := (chosen == number).nonzero()[:, 0]), weights[at, None] * expert(x[at]))
        return self.head(self.norm(x + y))  # type: ignore[no-any-return]


class Adversaries(nn.Module):
    """A net that makes samples, and another that tells them from true ones."""

    def __init__(self) -> None:
        super().__init__()
        self.maker = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, WIDTH))
        self.judge = nn.Sequential(nn.Linear(WIDTH, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))

    def forward(self, x: Tensor, *, is_of_judge: bool) -> Tensor:
        made = self.maker(torch.randn(len(x), 8))
        if not is_of_judge:
            return nn.functional.softplus(-self.judge(made)).mean()
        return nn.functional.softplus(self.judge(made.detach())).mean() + nn.functional.softplus(-self.judge(x)).mean()
