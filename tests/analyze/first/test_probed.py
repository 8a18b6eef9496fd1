"""`first`: what it says of the values before the first NaN where the probe alone has seen them, in real trainings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import recorder
from recorder.analyze.first.first import reply_of
from recorder.config import DEFAULT_RULES
from tests.rigs.capturing import flagged

BAD_STEP = 7
"""A step at which the default rules keep a row of the model's input, and of nothing else."""


class Shared(nn.Module):
    """A block that is called some times in each forward. At `BAD_STEP` its last call gets a NaN."""

    def __init__(self, num_calls: int) -> None:
        super().__init__()
        self.block, self.head = nn.Linear(4, 4), nn.Linear(4, 1)
        self.num_calls, self.step = num_calls, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for call in range(self.num_calls):
            is_bad = (self.step, call) == (BAD_STEP, self.num_calls - 1) and self.num_calls > 4
            x = torch.tanh(self.block(x * torch.nan if is_bad else x))
        self.step += 1
        return self.head(x)  # type: ignore[no-any-return]


def _healthy(tmp_path: Path, model: nn.Module, spoil: Callable[[int], None] = lambda step: None) -> str:
    """What is said of the last healthy value, of a training of twelve steps by the default rules."""
    with flagged(tmp_path, "; ".join(rule.text for rule in DEFAULT_RULES)) as recording:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for step in range(12):
            optimizer.zero_grad()
            model(torch.randn(3, 4)).square().mean().backward()
            spoil(step)
            optimizer.step()
    run = recording.run
    told = "\n".join(str(part) for part in reply_of(run, recorder.first(run)).parts())
    (line,) = (line for line in told.splitlines() if "last healthy value" in line)
    return line


def test_a_module_of_which_later_calls_were_not_looked_at_is_called_healthy_in_its_first(tmp_path: Path) -> None:
    line = _healthy(tmp_path, Shared(6))
    assert f"'block' output, step {BAD_STEP} (by keep=probe, of the first 4 of its 6 calls in a step)" in line


def test_of_a_gradient_the_last_value_with_a_row_is_said_to_be_that(tmp_path: Path) -> None:
    model = Shared(2)

    def spoil(step: int) -> None:
        if step == BAD_STEP:
            assert model.block.weight.grad is not None
            model.block.weight.grad[0, 0] = torch.inf

    line = _healthy(tmp_path, model, spoil)
    assert "scalar loss" in line and "(the last that has a row; the order of a backward is not known)" in line
