"""Facts about the program that the recorder notes at updates, and what the rules on the program say of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from recorder.analyze.check.check import check
from recorder.checks.rule import Severity
from tests.rigs.capturing import flagged

RULES = "site=grad,output keep=stats"


def trained(
    path: Path, model: nn.Module, *, clear: Callable[[nn.Module], object], has_one_batch: bool = False
) -> list[tuple[str, str]]:
    """The rule and the module of what the rules on the program find in a training."""
    with flagged(path, RULES) as recording:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        batch = torch.randn(8, 4)
        for _ in range(20):
            model(batch if has_one_batch else torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
            clear(model)
    found = check(recording.run, rules=["not_cleared", "evaluation_mode"]).findings
    return [(one.rule, one.module_path) for one in found]


def zero_behind_autograd(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.data.zero_()


@pytest.mark.parametrize("has_one_batch", [False, True])
def test_gradients_that_nothing_clears_are_named(tmp_path: Path, has_one_batch: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    assert trained(tmp_path, model, clear=str, has_one_batch=has_one_batch) == [("not_cleared", "")]


def test_gradients_of_one_batch_may_be_cleared_behind_autograd(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    assert trained(tmp_path, model, clear=zero_behind_autograd, has_one_batch=True) == []


@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_frozen_norm_may_be_in_evaluation_mode(tmp_path: Path, is_frozen: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4), nn.BatchNorm1d(4))
    model[1].eval().requires_grad_(not is_frozen)
    expected = [] if is_frozen else [("evaluation_mode", "1")]
    assert trained(tmp_path, model, clear=nn.Module.zero_grad) == expected


def test_a_frozen_layer_that_the_optimizer_has_is_a_note(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    with flagged(tmp_path, "site=grad,param,output keep=stats") as recording:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(12):
            model(torch.randn(4, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    findings = [one for one in check(recording.run).findings if one.rule == "no_gradient"]
    assert {(one.module_path, one.name, one.severity) for one in findings} == {
        ("0", "weight", Severity.NOTE), ("0", "bias", Severity.NOTE),
    }  # fmt: skip
    assert {one.what for one in findings} == {"never had a gradient: its requires_grad is False"}
