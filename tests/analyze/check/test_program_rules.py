"""Facts about the program that the recorder notes at updates, and what the rules on the program say of them."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import recorder
from recorder.analyze.check.check import check, command_of, told_of
from recorder.analyze.first.first import first
from recorder.analyze.first.nonfinite import NonFiniteTensor
from recorder.checks.rule import Finding, Severity
from recorder.merge.merge import merge_run
from tests.rigs.capturing import flagged
from tests.rigs.handmade import HandmadeWriter, make_row, make_run

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


@pytest.mark.parametrize("forgotten", [0, 1])
def test_of_two_models_the_one_that_is_not_cleared_is_named(tmp_path: Path, forgotten: int) -> None:
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.ReLU(), nn.Linear(4, 2))]
    with flagged(tmp_path, RULES) as recording:
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in models]
        for _ in range(20):
            models[1](models[0](torch.randn(8, 4))).square().mean().backward()
            optimizers[forgotten].step()  # the first that steps is the one that is looked at
            optimizers[1 - forgotten].step()
            optimizers[1 - forgotten].zero_grad()
    findings = check(recording.run, rules=["not_cleared"]).findings
    assert [(one.module_path, one.site, one.detail) for one in findings] == [("", "grad", f"seen at '{forgotten}'")]
    ((told, _),) = told_of(findings)
    assert command_of("run", told).startswith("recorder stats run --site grad --step 0:")


def clip(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def halve(model: nn.Module) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad /= 2


def copy_of_gradients(model: nn.Module) -> None:
    """As programs do that work out gradients in another way, and write them over the old ones."""
    gradients = torch.autograd.grad(model(torch.randn(8, 4)).square().mean(), list(model.parameters()))
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        parameter.grad = gradient.clone() if parameter.grad is None else parameter.grad.copy_(gradient)


CLEARINGS: dict[str, Callable[[nn.Module], object]] = {
    "zero_grad": lambda model: model.zero_grad(),
    "zeros": lambda model: model.zero_grad(set_to_none=False),
    "behind autograd": zero_behind_autograd,
    "nothing": str,
}


@pytest.mark.parametrize("name", CLEARINGS)
@pytest.mark.parametrize("change", [clip, halve])
def test_gradients_that_are_clipped_before_an_update_may_be_uncleared(
    tmp_path: Path, change: Callable[[nn.Module], None], name: str
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    with flagged(tmp_path, f"{RULES}; site=scalar keep=stats") as recording:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(20):
            for _ in range(1 + step % 3):  # the gradients of some batches are added up on purpose
                model(torch.randn(8, 4)).square().mean().backward()
            change(model)
            optimizer.step()
            CLEARINGS[name](model)
    found = check(recording.run, rules=["not_cleared"]).findings
    assert [one.step for one in found] == [1] * (name == "nothing")


def test_gradients_that_grow_in_one_direction_and_are_cleared_behind_autograd_are_cleared(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, batch = nn.Linear(8, 2), torch.randn(64, 8)
    with flagged(tmp_path, f"{RULES}; site=scalar keep=stats") as recording:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for _ in range(20):
            zero_behind_autograd(model)
            (-model(batch).square().mean()).backward()
            optimizer.step()
    assert not check(recording.run, rules=["not_cleared"]).findings


def test_an_optimizer_that_is_made_later_has_its_parameters(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2), nn.Linear(2, 2))
    optimizers = {}
    with flagged(tmp_path, RULES) as recording:
        for _ in range(20):
            model(torch.randn(8, 4)).square().mean().backward()
            for number in (0, 3):
                if number not in optimizers:
                    optimizers[number] = torch.optim.SGD(model[number].parameters(), lr=0.01)
                optimizers[number].step()
            model.zero_grad()
    found = check(recording.run, rules=["not_optimized"]).findings
    assert [(one.module_path, one.name, one.step) for one in found] == [("2", "weight", 0), ("2", "bias", 0)]


def test_gradients_that_a_program_writes_over_need_no_clearing(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    with flagged(tmp_path, f"{RULES}; site=scalar keep=stats") as recording:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(20):
            copy_of_gradients(model)
            optimizer.step()
    assert not check(recording.run, rules=["not_cleared"]).findings


@pytest.mark.parametrize("forgotten", ["g", "d", ""])
@pytest.mark.parametrize("is_generator_first", [False, True])
def test_of_a_gan_either_optimizer_may_be_the_one_that_is_not_cleared(
    tmp_path: Path, forgotten: str, is_generator_first: bool
) -> None:
    torch.manual_seed(0)
    g, d = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), nn.Sequential(nn.Linear(2, 8), nn.Linear(8, 1))
    loss = nn.functional.softplus
    with flagged(tmp_path, RULES) as recording:
        optimizers = {"g": torch.optim.Adam(g.parameters()), "d": torch.optim.Adam(d.parameters())}
        for _ in range(20):
            for name in ("g", "d") if is_generator_first else ("d", "g"):
                if name != forgotten:
                    optimizers[name].zero_grad(set_to_none=False)
                fake = g(torch.randn(64, 4))
                real = torch.randn(64, 2) + 1
                (loss(-d(fake)) if name == "g" else loss(d(fake.detach())) + loss(-d(real))).mean().backward()
                optimizers[name].step()
    found = check(recording.run, rules=["not_cleared"]).findings
    classes = {one.root for one in found}
    assert len(found) == len(classes) == bool(forgotten)


@pytest.mark.parametrize("is_whole", [False, True])
def test_the_step_at_which_evaluation_mode_began_is_named(tmp_path: Path, is_whole: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 4), nn.Dropout(0.5))
    with flagged(tmp_path, RULES) as recording:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for number in range(40):
            if number == 21:
                (model if is_whole else model[1]).eval()
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    found = check(recording.run, rules=["evaluation_mode"]).findings
    may_be_earlier = {one.what.endswith("; it may have begun before this step") for one in found}
    assert ({one.step for one in found}, may_be_earlier) == (({21}, {False}) if is_whole else ({32}, {True}))


def test_one_step_of_lbfgs_is_a_search_and_no_large_update(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(first := nn.Linear(2, 20), nn.Tanh(), nn.Linear(20, 1))
    x = torch.rand(200, 2)
    y = x[:, :1] * x[:, 1:]
    with flagged(tmp_path, "site=param,grad keep=stats,probe; site=scalar keep=stats") as recording:
        optimizer = torch.optim.LBFGS(model.parameters(), line_search_fn="strong_wolfe")

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = (model(x) - y).square().mean()
            loss.backward()
            return loss

        before = first.weight.detach().clone()
        optimizer.step(closure)
        moved = float((first.weight.detach() - before).norm() / before.norm())
        for _ in range(5):
            optimizer.step(closure)
    assert moved > 0.5, "any other optimizer's step of this size would be named"
    assert check(recording.run, rules=["update"]).findings == []


def _binary(values: torch.Tensor) -> torch.Tensor:
    return nn.functional.binary_cross_entropy_with_logits(values, torch.ones_like(values))


def _ctc(values: torch.Tensor) -> torch.Tensor:
    """The loss of values [8, 1, 5] of the time, the batch and the classes."""
    return nn.functional.ctc_loss(values, torch.tensor([[1, 2]]), torch.tensor([8]), torch.tensor([2]))


def _soft(values: torch.Tensor, dim: int) -> torch.Tensor:
    return -(torch.rand(values.shape) * values.log_softmax(dim)).sum(1).mean()


def _product_of_differences(values: torch.Tensor) -> torch.Tensor:
    return (values * values).mean()


def _divergence_of_rows(
    values: torch.Tensor, dim: int, *, is_transposed: bool = False, num_units: int = 6
) -> torch.Tensor:
    logits = nn.functional.linear(values.view(2, 4, 5), torch.ones(num_units, 5)) / 2
    logits = logits.transpose(1, 2) if is_transposed else logits
    return nn.functional.kl_div(logits.log_softmax(dim), torch.rand(logits.shape).softmax(dim), reduction="batchmean")


def _divergence(values: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    targets = nn.functional.one_hot(classes, 5).float()
    return 4 * nn.functional.kl_div(values, targets, reduction="batchmean")


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (lambda y, c: nn.functional.cross_entropy(y, c), ""),
        (lambda y, c: nn.functional.cross_entropy(y.softmax(1), c), "logits, and gets the probabilities that a s"),
        (lambda y, c: nn.functional.cross_entropy(y.softmax(1).view(2, -1, 5).flatten(0, 1), c), "a softmax has made"),
        (lambda y, c: 3 * nn.functional.cross_entropy(y.sigmoid(), c) + y.square().mean(), "a sigmoid has made"),
        (lambda y, c: nn.functional.cross_entropy(y.relu(), c), "gets the result of a ReLU, which is never below zero"),
        (lambda y, c: nn.functional.cross_entropy(y.softmax(1).log(), c), ""),
        (lambda y, c: nn.functional.nll_loss(y.log_softmax(1), c), ""),
        (lambda y, c: nn.functional.nll_loss(y, c), "expects log-probabilities, and gets the result of a layer"),
        (lambda y, c: nn.functional.nll_loss(y.softmax(1), c), "nll_loss expects log-probabilities, and gets"),
        (lambda y, c: nn.functional.nll_loss(y.softmax(1)[c > 1], c[c > 1]), "nll_loss expects log-probabilities, and"),
        (lambda y, c: nn.functional.nll_loss(y.log_softmax(0), c), "log_softmax over the samples of the batch"),
        (lambda y, c: nn.functional.nll_loss(y.softmax(0).log(), c), "log_softmax over the samples of the batch"),
        (lambda y, c: nn.functional.nll_loss(y.softmax(1).log(), c), ""),
        (lambda y, c: nn.functional.nll_loss((y @ y.T).log_softmax(0), torch.arange(8)), ""),
        (lambda y, c: _ctc(y[:, None].log_softmax(-1)), ""),
        (lambda y, c: _ctc(y[None].log_softmax(-1).transpose(0, 1)), ""),
        (lambda y, c: _ctc((y @ torch.randn(5, 9)).log_softmax(-1)[:, None, :5]), ""),
        (lambda y, c: _ctc(y[:, None]), "ctc_loss expects log-probabilities, and gets the result of a layer"),
        (lambda y, c: _ctc(y[:, None].softmax(-1)), "ctc_loss expects log-probabilities, and gets the probabilities"),
        (lambda y, c: _ctc(y[:, None].log_softmax(0)), "gets a log_softmax over the time or the batch, and not over"),
        (lambda y, c: _ctc(y[None].log_softmax(1).permute(1, 0, 2)), "gets a log_softmax over the time or the batch"),
        (lambda y, c: _divergence(y.softmax(1), c) + y.square().mean(), "kl_div expects log-probabilities, and gets"),
        (lambda y, c: _divergence(y.log_softmax(1), c), ""),
        (lambda y, c: _divergence(y.log_softmax(0), c), "gets a log_softmax over the samples of the batch"),
        (lambda y, c: _soft(y, 0), "the cross-entropy of soft labels expects log-probabilities, and gets a log_soft"),
        (lambda y, c: _soft(y, 1), ""),
        (lambda y, c: _soft(y @ y.T, 0), ""),
        (lambda y, c: nn.functional.cross_entropy(y, torch.rand(8, 5).softmax(1)), ""),
        (lambda y, c: _divergence_of_rows(y, 1), "gets a log_softmax over the time or the batch, and not over"),
        (lambda y, c: _divergence_of_rows(y, -1), ""),
        (lambda y, c: _divergence_of_rows(y, 1, is_transposed=True), ""),
        (lambda y, c: (torch.rand(8, 5) - 0.5 * y.sigmoid()).square().mean(), ""),
        (lambda y, c: nn.functional.mse_loss(y, torch.randn(8, 5)), ""),
        (lambda y, c: nn.functional.mse_loss(torch.randn(8), y[:, :1]), "compares each output with all labels"),
        (lambda y, c: nn.functional.mse_loss(y[:, :1], torch.randn(8)), "compares each output with all labels"),
        (lambda y, c: nn.functional.mse_loss(y[:, 0], torch.randn(8, 8)), ""),
        (lambda y, c: nn.functional.mse_loss(y[:, :1], torch.randn(8, 8)), "compares each output with all labels"),
        (lambda y, c: nn.functional.mse_loss(y[:, :1], torch.randn(8, 3)), ""),
        (lambda y, c: (y[:, :1] - torch.randn(8)).square().mean(), "compares each output with all labels"),
        (lambda y, c: (torch.randn(8) - y[:, :1].sigmoid()).abs().mean(), "compares each output with all labels"),
        (lambda y, c: (y[:, :1] - torch.randn(8)).square().min(1).values.mean(), ""),
        (lambda y, c: (-(y[:, :1] - torch.randn(8)).square()).exp().mean(), ""),
        (lambda y, c: (y[:, :1] - y[:, :1].detach().T).sigmoid().log().mean(), ""),
        (lambda y, c: nn.functional.mse_loss(y @ torch.randn(5, 8), torch.randn(8, 1).expand(8, 8)), ""),
        (lambda y, c: _soft(y[:, :1], 0), ""),
        (lambda y, c: _soft((y[:6] @ y.T), 0), ""),
        (lambda y, c: _divergence_of_rows(y, 1, num_units=1), ""),
        (lambda y, c: _divergence_of_rows(y, 1, num_units=2), ""),
        (lambda y, c: _product_of_differences(torch.rand(8, 5) - y.sigmoid() * torch.rand(8, 5)), ""),
        (lambda y, c: (y[:, :1] - torch.randn(8, 1)).square().mean(), ""),
        (lambda y, c: (y[:, 0, None] - torch.randn(8)).square().mean(), ""),
        (lambda y, c: (y[:, 0, None] - y[:, 0]).abs().mean(), ""),
        (lambda y, c: (y[:3, :1] - torch.randn(3)).square().mean(), ""),
        (lambda y, c: nn.functional.binary_cross_entropy_with_logits(y.detach(), y.sigmoid()), ""),
        (lambda y, c: _binary(y), ""),
        (lambda y, c: _binary(y.sigmoid()[:, 0]), "binary_cross_entropy_with_logits expects logits, and gets the prob"),
    ],
)  # fmt: skip
def test_a_loss_that_gets_no_logits_is_named(tmp_path: Path, loss: Any, expected: str) -> None:
    model = nn.Linear(4, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    warnings.filterwarnings("ignore", "Using a target size")
    with flagged(tmp_path, "site=scalar keep=stats") as recording:
        for _ in range(3):
            optimizer.zero_grad()
            loss(model(torch.randn(8, 4)), torch.randint(0, 5, (8,))).backward()
            optimizer.step()
    found = check(recording.run, rules=["loss_argument"]).findings
    assert [one.module_path for one in found] == ([""] if expected else [])
    assert not expected or expected in found[0].what


def test_the_model_that_made_the_argument_of_a_loss_is_named(tmp_path: Path) -> None:
    """It is not the model that was called last, nor the first one whose loss has these functions."""
    with flagged(tmp_path, "site=scalar keep=stats") as recording:
        for wrong in (False, True):
            model, other = nn.Linear(4, 5), nn.Linear(4, 5)
            optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)
            for _ in range(10):
                optimizer.zero_grad()
                y = model(torch.randn(8, 4))
                loss = nn.functional.cross_entropy(y.softmax(1) if wrong else y, torch.randint(0, 5, (8,)))
                other(torch.randn(8, 4)).square().mean().backward()
                loss.backward()
                optimizer.step()
    (one,) = check(recording.run, rules=["loss_argument"]).findings
    assert one.root == "model_2"


@pytest.mark.parametrize(("is_unfrozen", "severity"), [(False, Severity.NOTE), (True, Severity.WARNING)])
def test_what_was_frozen_before_is_meant_to_be_trained(tmp_path: Path, is_unfrozen: bool, severity: Severity) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    model[0].requires_grad_(not is_unfrozen)
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.01)
    with flagged(tmp_path, "site=param keep=stats") as recording:
        for step in range(40):
            if step == 10:
                model[0].requires_grad_(True)
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
            model.zero_grad()
    found = check(recording.run, rules=["not_optimized"]).findings
    assert {(one.module_path, one.severity) for one in found} == {("0", severity)}


@pytest.mark.parametrize("is_perceptual", [False, True])
def test_an_encoder_that_no_optimizer_has_is_a_note_and_a_perceptual_loss_is_not(
    tmp_path: Path, is_perceptual: bool
) -> None:
    encoder, decoder = nn.Linear(4, 2), nn.Linear(2, 4)
    optimizer = torch.optim.SGD(decoder.parameters(), lr=0.01)
    with flagged(tmp_path, "site=param keep=stats") as recording:
        for _ in range(40):
            x = torch.randn(8, 4)
            wanted = encoder(x)
            made = decoder(wanted.detach() if is_perceptual else wanted)
            (encoder(made) - wanted.detach() if is_perceptual else made - x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            encoder.zero_grad()
    found = check(recording.run, rules=["not_optimized"]).findings
    assert {(one.root, one.severity) for one in found} == (set() if is_perceptual else {("model", Severity.NOTE)})


def test_a_module_that_is_replaced_is_watched_and_what_was_seen_before_is_kept(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with flagged(tmp_path, "site=scalar,output,param,grad keep=stats") as recording:
        for step in range(52):
            if step == 9:
                model[2] = nn.Linear(8, 5)
            optimizer.zero_grad()
            model.zero_grad()
            y = model(torch.randn(8, 4))
            nn.functional.cross_entropy(y.softmax(1) if step < 9 else y, torch.randint(0, 5, (8,))).backward()
            optimizer.step()
    found = check(recording.run, rules=["loss_argument", "not_optimized"]).findings
    assert {(one.rule, one.module_path, one.since) for one in found} == {
        ("loss_argument", "", 0),
        ("not_optimized", "2", 16),
    }
    assert recording.rows(module_path="2", site="output").step.max() == 51


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


@pytest.mark.parametrize("is_frozen", [True, False])
def test_a_frozen_model_may_be_in_evaluation_mode_inside_of_a_trained_one(tmp_path: Path, is_frozen: bool) -> None:
    torch.manual_seed(0)
    body, first = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5)), nn.Linear(8, 2)
    whole = nn.Sequential(body, nn.Linear(8, 2))
    with flagged(tmp_path, RULES) as recording:
        optimizer = torch.optim.SGD([*body.parameters(), *first.parameters()], lr=0.01)
        for step in range(60):
            if step == 20:  # the body was a model of its own before
                body.eval().requires_grad_(not is_frozen)
                optimizer = torch.optim.SGD(whole[1].parameters() if is_frozen else whole.parameters(), lr=0.01)
            optimizer.zero_grad()
            x = torch.randn(8, 4)
            (first(body(x)) if step < 20 else whole(x)).square().mean().backward()
            optimizer.step()
    found = check(recording.run, rules=["evaluation_mode"]).findings
    assert [one.module_path for one in found] == ([] if is_frozen else ["1"])


class DropPath(nn.Module):
    """A module with a rate of its own, as many libraries have one."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.drop_prob = rate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(x, self.drop_prob, self.training)


class WithAttention(nn.Module):
    def __init__(self, rate: float) -> None:
        super().__init__()
        self.one, self.two = (nn.MultiheadAttention(4, 2, dropout=rate) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.one(x, x, x)[0]
        return x + self.two(x, x, x)[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("rate", [0.0, 0.1])
@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_module_that_applies_a_dropout_itself_may_be_in_evaluation_mode(
    tmp_path: Path, rate: float, is_frozen: bool
) -> None:
    torch.manual_seed(0)
    attention = WithAttention(rate)
    model = nn.Sequential(nn.Linear(4, 4), attention, DropPath(rate), nn.Linear(4, 4), DropPath(rate))
    attention.one.eval().requires_grad_(not is_frozen)
    model[2].eval()
    named = [("evaluation_mode", "1.one")] * (not is_frozen) + [("evaluation_mode", "2")]
    assert trained(tmp_path, model, clear=nn.Module.zero_grad) == (named if rate else [])


def test_a_dropout_that_the_models_own_train_keeps_in_evaluation_mode_is_named(tmp_path: Path) -> None:
    class Stubborn(nn.Sequential):
        def train(self, mode: bool = True) -> Stubborn:
            super().train(mode)
            self[1].eval()
            return self

    model = nn.Sequential(nn.Linear(4, 4), Stubborn(nn.Linear(4, 4), nn.Dropout(0.1)), nn.Dropout(0.1)).train()
    assert trained(tmp_path, model, clear=nn.Module.zero_grad) == [("evaluation_mode", "1.1")]


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


@pytest.mark.parametrize("has_copies", [False, True])
def test_what_is_left_out_by_an_optimizer_of_frozen_parameters_is_named(tmp_path: Path, has_copies: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    copies = [one.detach().clone() for one in model.parameters()]
    with flagged(tmp_path, "site=grad,param,output keep=stats") as recording:
        optimizer = torch.optim.SGD(copies if has_copies else model[2].parameters(), lr=0.1)
        model.requires_grad_(False)[1].requires_grad_(True)
        for _ in range(4):
            model(torch.randn(8, 4)).square().mean().backward()
            for copied, parameter in zip(copies, model.parameters(), strict=True) if has_copies else ():
                copied.grad = parameter.grad
            optimizer.step()
            model.zero_grad()
    findings = check(recording.run, rules=["not_optimized"]).findings
    named = {(one.module_path, one.name) for one in findings}
    if findings:
        typed = command_of("RUN", next(iter(told_of(findings)))[0])
        assert typed == "recorder show RUN 1", "no row has the parameter"
    assert named == (set() if has_copies else {("1", "weight"), ("1", "bias")})


def test_a_model_whose_optimizer_has_copies_of_its_parameters_is_recorded(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).bfloat16()
    masters = [one.detach().float() for one in model.parameters()]
    with flagged(tmp_path, "site=grad,param keep=stats") as recording:
        optimizer = torch.optim.SGD(masters, lr=0.1)
        for _ in range(4):
            model(torch.randn(8, 4).bfloat16()).square().mean().backward()
            for master, parameter in zip(masters, model.parameters(), strict=True):
                assert parameter.grad is not None
                master.grad = parameter.grad.float()
            optimizer.step()
            for master, parameter in zip(masters, model.parameters(), strict=True):
                parameter.data.copy_(master)
            model.zero_grad()
    for site in ("param", "grad"):
        assert list(recording.rows(site=site, module_path="0", name="weight").step) == [0, 1, 2, 3]


@pytest.mark.parametrize("is_late", [False, True])
def test_gradients_that_are_cleared_before_each_update_are_named(tmp_path: Path, is_late: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).requires_grad_(True)
    with flagged(tmp_path, "site=grad,param,output keep=stats") as recording:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(8):
            model(torch.randn(8, 4)).square().mean().backward()
            if not is_late or step < 4:
                optimizer.zero_grad()
            optimizer.step()
    findings = check(recording.run, rules=["unchanged"]).findings
    named = {(one.module_path, one.name) for one in findings if "no parameter ever has a gradient" in one.what}
    assert named == (set() if is_late else {(path, name) for path in ("0", "2") for name in ("weight", "bias")})


def test_gradients_that_all_are_zero_are_the_cause_of_what_stays(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    with flagged(tmp_path, "site=grad,param,output keep=stats") as recording:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(8):
            optimizer.zero_grad()
            (0.0 * model(torch.randn(8, 4)).square()).mean().backward()
            optimizer.step()
    findings = [one for one in check(recording.run).findings if one.rule in ("no_gradient", "unchanged")]
    assert {(one.rule, one.cause[:11]) for one in findings} == {("no_gradient", ""), ("unchanged", "no_gradient")}
    what = "every gradient is zero as the optimizer steps, and the parameter does not change"
    assert {one.what for one in findings if one.rule == "unchanged"} == {what}


@pytest.mark.parametrize(("momentum", "is_training"), [(0.0, True), (0.1, True), (0.0, False)])
def test_running_statistics_that_never_move_are_named(tmp_path: Path, momentum: float, is_training: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8, momentum=momentum), nn.Linear(8, 4))
    model[1].train(is_training)
    with flagged(tmp_path, "site=buffer keep=stats") as recording:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(8):
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
    found = check(recording.run, rules=["running_statistics"]).findings
    assert [one.module_path for one in found] == ["1"] * (is_training and not momentum)


def test_a_parameter_of_which_no_gradient_was_recorded_is_not_said_to_have_one(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    with flagged(tmp_path, "site=grad,param,output keep=stats") as recording:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(12):
            model(torch.randn(8, 4)).square().mean().backward()
            if 3 <= step < 9:  # as FSDP2 has none without a sync
                optimizer.zero_grad()
            optimizer.step()
            optimizer.zero_grad()
    found = check(recording.run, rules=["unchanged"]).findings
    words = {one.what for one in found}
    assert words == {"the parameter does not change, and no gradient was recorded at these steps"}


def test_gradients_of_weights_that_no_optimizer_has_are_not_asked_for(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    model[0].requires_grad_(False)
    with flagged(tmp_path, "site=param,grad keep=stats steps=::2") as recording:
        optimizer = torch.optim.AdamW(model[0].parameters())
        for _ in range(6):
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
    told = {one.rule: one for one in check(recording.run).unjudged}
    assert told["vanishing"].setting == "" and told["vanishing"].why == "no optimizer has a parameter with a gradient"


def test_a_rate_that_ends_the_training_is_said(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    with flagged(tmp_path, "site=param,grad,scalar keep=stats") as recording:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1)
        for _ in range(20):
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
            schedule.step()
    findings = check(recording.run, rules=["unchanged"]).findings
    words = re.compile(r"its learning rate has fallen to (\S+) from 0.01, and the parameter does not change")
    told = {one.step: found for one in findings if (found := words.fullmatch(one.what)) is not None}
    assert told and len(told) == len({one.step for one in findings})
    assert {step: float(one[1]) for step, one in told.items()} == pytest.approx(
        {step: 0.01 * 0.1**step for step in told}, rel=1e-3
    )


@pytest.mark.parametrize("begins", [6, 99])
def test_a_group_that_begins_late_is_a_note(tmp_path: Path, begins: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    with flagged(tmp_path, "site=param,grad,scalar keep=stats") as recording:
        groups: list[dict[str, Any]] = [{"params": model[0].parameters(), "lr": 0.0}, {"params": model[2].parameters()}]
        optimizer = torch.optim.SGD(groups, lr=0.1)
        for step in range(12):
            optimizer.param_groups[0]["lr"] = 0.1 * (step >= begins)
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
    findings = check(recording.run, rules=["unchanged"]).findings
    severity = Severity.NOTE if begins < 12 else Severity.WARNING
    assert {(one.module_path, one.severity) for one in findings} == {("0", severity)}


def test_inputs_of_a_model_of_which_only_parts_are_called_are_not_asked_for(tmp_path: Path) -> None:
    model = nn.ModuleDict({"g": nn.Linear(4, 4), "d": nn.Linear(4, 2)})
    with flagged(tmp_path, "module='' site=input keep=stats steps=::2; site=output keep=stats") as recording:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(6):
            model["d"](model["g"](torch.randn(8, 4))).square().mean().backward()
            optimizer.step()
    (told,) = check(recording.run, rules=["data"]).unjudged
    assert (told.setting, told.why) == ("", "the whole model has no input: only parts of it are called")


def _ascended(path: Path, loss: Any, *, rate: float) -> list[tuple[Severity, str]]:
    """The severity and the sentence of what the rule on the loss finds in a training."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    with flagged(path, "site=scalar keep=stats") as recording:
        for _ in range(80):
            x = torch.randn(32, 4)
            optimizer.zero_grad()
            loss(model(x), x[:, :3].argmax(1)).backward()
            optimizer.step()
    return [(one.severity, one.what) for one in check(recording.run, rules=["loss"]).findings]


@pytest.mark.parametrize(
    "loss",
    [
        lambda y, c: -nn.functional.cross_entropy(y, c),
        lambda y, c: nn.functional.cross_entropy(y, c) * -0.5 / 4,
        lambda y, c: -(-1 * nn.functional.mse_loss(y, torch.zeros_like(y))) * -1,
    ],
)
def test_a_loss_with_the_wrong_sign_is_named(tmp_path: Path, loss: Any) -> None:
    what = "the loss falls without bound: it is the negative of a loss that is never negative"
    assert _ascended(tmp_path, loss, rate=0.03) == [(Severity.WARNING, what)]


@pytest.mark.parametrize(
    ("loss", "found"),
    [
        (lambda y, c: -nn.functional.cross_entropy(y.tanh(), c), []),  # negative and bounded
        (lambda y, c: -y.mean(), []),  # as of a critic
        (lambda y, c: -y.exp().mean(), [(Severity.WARNING, "the loss falls below zero without bound")]),
    ],
)
def test_a_loss_below_zero_may_be_meant(tmp_path: Path, loss: Any, found: list[tuple[Severity, str]]) -> None:
    assert _ascended(tmp_path, loss, rate=0.03) == found


class Coder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 3))
        self.decoder = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decoder(self.encoder(x))  # type: ignore[no-any-return]


NEVER_STEPS = "it has a gradient, and the optimizer that has it never steps"
NO_OPTIMIZER = "it has a gradient, and no optimizer has it"
ONLY_LAST = f"{NO_OPTIMIZER}; only modules after it are trained"


@pytest.mark.parametrize(
    ("stepped", "made", "found"),
    [
        (["encoder", "decoder"], [], set()),
        (["encoder"], ["decoder"], {("decoder", Severity.WARNING, NEVER_STEPS)}),
        (["encoder"], [], {("decoder", Severity.WARNING, NO_OPTIMIZER)}),
        (["decoder"], [], {("encoder", Severity.NOTE, ONLY_LAST)}),
        ([], ["encoder", "decoder"], {(name, Severity.WARNING, NEVER_STEPS) for name in ("encoder", "decoder")}),
    ],
)
@pytest.mark.parametrize("is_one_model", [True, False])
def test_an_optimizer_that_never_steps_is_named(
    tmp_path: Path, stepped: list[str], made: list[str], found: Any, is_one_model: bool
) -> None:
    torch.manual_seed(0)
    coder = Coder()
    first, second = (coder.encoder, coder.decoder) if is_one_model else (Coder().encoder, Coder().decoder)
    modules = {"encoder": first, "decoder": second}
    of = {name: torch.optim.SGD(modules[name].parameters(), lr=0.01) for name in (*stepped, *made)}
    with flagged(tmp_path, "site=grad,scalar keep=stats") as recording:
        for _ in range(160):
            x = torch.randn(8, 4)
            (coder(x) if is_one_model else second(first(x))).sub(x).square().mean().backward()
            for name in stepped:
                of[name].step()
            for module in modules.values():
                module.zero_grad()
    findings = check(recording.run, rules=["not_optimized"]).findings
    if is_one_model:
        assert {(one.module_path.partition(".")[0], one.severity, one.what) for one in findings} == found
    elif stepped == ["decoder"] and not made:  # a model that is called before may have been left out by mistake
        assert {(one.root, one.severity, one.what) for one in findings} == {("model", Severity.NOTE, ONLY_LAST)}
    else:  # a model without an optimizer may only pass gradients on
        assert bool(findings) is bool(made)


class CutOff(nn.Module):
    """A model whose head gets no gradient back to the body, unless `is_whole`. A side branch is never used."""

    def __init__(self, *, is_whole: bool, has_graph: bool = True, is_checkpoint: bool = False) -> None:
        super().__init__()
        self.body, self.head, self.side = nn.Linear(4, 4), nn.Linear(4, 2), nn.Linear(4, 4)
        self.is_whole, self.has_graph, self.is_checkpoint = is_whole, has_graph, is_checkpoint

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.set_grad_enabled(self.has_graph):
            hidden = checkpoint(self.body, x, use_reentrant=True) if self.is_checkpoint else self.body(x)
        result: torch.Tensor = self.head(hidden if self.is_whole else hidden.detach())
        self.side(hidden)
        return result


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("name", ["cut off", "whole", "moved", "frozen", "no_grad", "checkpoint", "sound checkpoint"])
def test_a_module_that_is_cut_off_from_the_loss_is_named(tmp_path: Path, name: str) -> None:
    torch.manual_seed(0)
    is_sound = name in ("whole", "sound checkpoint")
    model = CutOff(is_whole=is_sound, has_graph=name != "no_grad", is_checkpoint="checkpoint" in name)
    model.body.requires_grad_(name != "frozen")
    with flagged(tmp_path, "site=grad,param,output keep=stats") as recording:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(6):
            optimizer.zero_grad()
            model(torch.randn(8, 4, requires_grad=name == "sound checkpoint")).square().mean().backward()
            optimizer.step()
            if name == "moved":  # as the moving average of another model
                with torch.no_grad():
                    model.body.weight.mul_(0.9), model.body.bias.mul_(0.9)
    findings = check(recording.run, rules=["no_gradient"]).findings
    warned = {one.module_path: one.what for one in findings if one.severity is Severity.WARNING}
    what = "never had a gradient, though modules that are called after it have"
    assert warned == ({"body": what} if name in ("cut off", "checkpoint") else {})
    assert "side" in {one.module_path for one in findings if one.severity is Severity.NOTE}


def test_an_optimizer_whose_parameters_never_have_a_gradient_is_named(tmp_path: Path) -> None:
    torch.manual_seed(0)
    made, judge = nn.Linear(4, 3), nn.Linear(3, 1)
    with flagged(tmp_path, "site=grad,param,output keep=stats") as recording:
        optimizers = [torch.optim.Adam(model.parameters(), lr=0.01) for model in (made, judge)]
        for _ in range(6):
            for optimizer in optimizers:
                optimizer.zero_grad()
                judge(made(torch.randn(8, 4)).detach()).square().mean().backward()
                optimizer.step()
    findings = check(recording.run, rules=["no_gradient"]).findings
    assert {(one.root, one.severity, one.what) for one in findings} == {
        ("model", Severity.WARNING, "never had a gradient, nor had any other parameter of its optimizer")
    }


@pytest.mark.parametrize("is_detached", [True, False])
def test_a_model_without_a_gradient_is_named_beside_another_of_its_optimizer(tmp_path: Path, is_detached: bool) -> None:
    torch.manual_seed(0)
    body, head = nn.Sequential(nn.Linear(4, 3)), nn.Linear(3, 1)
    with flagged(tmp_path, "site=grad,param,output keep=stats") as recording:
        optimizer = torch.optim.Adam([*body.parameters(), *head.parameters()], lr=0.01)
        for _ in range(6):
            optimizer.zero_grad()
            hidden = body(torch.randn(8, 4))
            head(hidden.detach() if is_detached else hidden).square().mean().backward()
            optimizer.step()
    findings = check(recording.run, rules=["no_gradient"]).findings
    what = "never had a gradient, though another model of its optimizer has"
    assert {(one.root, one.module_path, one.severity, one.what) for one in findings} == (
        {("model", "0", Severity.WARNING, what)} if is_detached else set()
    )


@pytest.mark.parametrize("name", ["cleared", "accumulated", "one batch", "now and then"])
def test_gradients_that_are_cleared_between_the_backward_passes_of_an_update_are_named(
    tmp_path: Path, name: str
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    rules = "site=grad,param,grad_output keep=stats; module='' site=input name=loss.labels keep=stats"
    with flagged(tmp_path, rules) as recording:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for step in range(6):
            for part in range(1 if name == "now and then" and step == 3 else 3):
                if not part or name != "one batch":  # as a step to the worst point near by (SAM)
                    inputs, labels = torch.randn(16, 4), torch.randint(3, (16,))
                if not part or name != "accumulated":
                    optimizer.zero_grad()
                nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
    found = check(recording.run, rules=["no_gradient"]).findings
    what = "the update gets the gradients of the last of 3 backward passes alone: the others are cleared before"
    assert [(one.step, one.module_path, one.what) for one in found] == [(0, "", what)] * (name == "cleared")


@pytest.mark.parametrize("num", [1, 8])
def test_a_norm_over_one_element_is_the_cause_of_what_vanishes(tmp_path: Path, num: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, num), nn.LayerNorm(num), nn.Linear(num, 3))
    with flagged(tmp_path, "site=grad,param,output,scalar keep=stats") as recording:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for _ in range(30):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(torch.randn(16, 4)), torch.randint(3, (16,))).backward()
            optimizer.step()
    found = [one for one in check(recording.run).findings if not one.cause and one.severity is Severity.WARNING]
    assert [(one.rule, one.module_path) for one in found] == [("vanishing", "3")] * (num == 1)
    assert all("the norm is over one element" in one.what for one in found)


@pytest.mark.parametrize(("dtype", "eps"), [("float16", 1e-8), ("float16", 1e-4), ("float32", 1e-8)])
def test_an_eps_that_is_zero_in_float16_is_the_advice(tmp_path: Path, dtype: str, eps: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 3)).to(getattr(torch, dtype))
    with flagged(tmp_path, "site=grad,param,output,scalar keep=stats") as recording:
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=eps)
        for step in range(8):
            optimizer.zero_grad()
            inputs = torch.randn(16, 4, dtype=getattr(torch, dtype)) * (math.inf if eps > 1e-8 and step == 5 else 1)
            nn.functional.cross_entropy(model(inputs), torch.randint(3, (16,))).backward()
            optimizer.step()
    advice = [one.advice for one in check(recording.run, rules=["nonfinite"]).findings]
    assert len(advice) == (dtype == "float16")
    assert all(("an eps of 1e-8 is 0 in float16" in one) == (eps == 1e-8) for one in advice)


@pytest.mark.parametrize(("rate", "is_found"), [(0.1, True), (0.003, False)])
def test_updates_that_go_too_far_behind_a_warm_up_are_named(tmp_path: Path, rate: float, is_found: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16), nn.Linear(16, 4))
    with flagged(tmp_path, "site=param,grad keep=probe") as recording:
        optimizer = torch.optim.Adam(model.parameters(), lr=rate)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 40))
        for _ in range(100):
            x = torch.randn(16, 16)
            optimizer.zero_grad()
            model(x).sub(10 * torch.randn(16, 4)).square().mean().backward()
            optimizer.step()
            schedule.step()
    what = "update after update moves the weights of the model far"
    found = [one for one in check(recording.run, rules=["update"]).findings if one.what == what]
    assert [(one.module_path, one.severity) for one in found] == [("", Severity.WARNING)] * is_found
    assert all(20 <= one.first_step <= 60 for one in found)


OF_LABELS = "site=output,input,grad keep=stats; module='' site=input name=loss.labels keep=stats"


class OverTime(nn.Module):
    """A model of sequences that has the batch in the first dim, or else the time."""

    def __init__(self, core: nn.Module, *, has_batch_first: bool) -> None:
        super().__init__()
        self.core, self.head, self.has_batch_first = core, nn.Linear(4, 3), has_batch_first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self.has_batch_first else x.transpose(0, 1)
        hidden = self.core(x, x, x) if isinstance(self.core, nn.MultiheadAttention) else self.core(x)
        hidden = hidden[0] if isinstance(hidden, tuple) else hidden
        result: torch.Tensor = self.head(hidden.mean(1 if self.has_batch_first else 0))
        return result


@pytest.mark.parametrize("labels", ["classes", "numbers"])
@pytest.mark.parametrize(
    ("make", "path"),
    [
        (lambda first: nn.LSTM(4, 4, batch_first=first), "core"),
        (lambda first: nn.GRU(4, 4, batch_first=first), "core"),
        (lambda first: nn.MultiheadAttention(4, 2, batch_first=first), "core"),
        (lambda first: nn.TransformerEncoderLayer(4, 2, 8, batch_first=first), "core.self_attn"),
    ],
)
@pytest.mark.parametrize(
    ("expects", "gets", "batch", "time", "is_found"),
    [
        (False, True, 8, 5, True),
        (True, True, 8, 5, False),
        (False, False, 8, 5, False),
        (False, True, 8, 1, False),
        (False, True, 8, 8, False),  # nobody can tell by lengths
    ],
)
def test_a_module_that_takes_the_batch_for_the_time_is_named(
    tmp_path: Path, make: Any, path: str, labels: str, expects: bool, gets: bool, batch: int, time: int, is_found: bool
) -> None:
    torch.manual_seed(0)
    model = OverTime(make(expects), has_batch_first=gets)
    with flagged(tmp_path, OF_LABELS) as recording:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(6):
            x = torch.randn(batch, time, 4)
            if labels == "classes":
                loss = nn.functional.cross_entropy(model(x), torch.randint(3, (batch,)))
            else:
                loss = nn.functional.mse_loss(model(x), torch.randn(batch, 3))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    findings = check(recording.run, rules=["batch_first"]).findings
    assert [(one.module_path, one.severity) for one in findings] == [(path, Severity.WARNING)] * is_found


class EachStep(nn.Module):
    """An LSTM that has the time in the first dim, with a result at each time step."""

    def __init__(self) -> None:
        super().__init__()
        self.core, self.head = nn.LSTM(4, 4), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.core(x)[0])
        return result


@pytest.mark.parametrize("batch", [8, 5])
def test_labels_of_each_time_step_do_not_tell_the_batch(tmp_path: Path, batch: int) -> None:
    torch.manual_seed(0)
    model = EachStep()
    with flagged(tmp_path, OF_LABELS) as recording:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(6):
            x = torch.randn(5, batch, 4)  # the time, the batch
            loss = nn.functional.mse_loss(model(x), torch.randn(5, batch, 3))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert not check(recording.run, rules=["batch_first"]).findings


class InList(nn.Module):
    """A model whose layers are in a list or dict of Python, or registered."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        layers = [nn.Linear(4, 4) for _ in range(1 if kind == "one" else 3)]
        self.layers: Any = nn.ModuleList(layers) if kind in ("registered", "alias") else layers
        if kind == "dict":
            self.layers = {f"layer {i}": layer for i, layer in enumerate(layers)}
        self.alias = layers if kind == "alias" else ["a", 1]
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values() if isinstance(self.layers, dict) else self.layers:
            x = layer(x)
        return self.head(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "kind", ["list", "one", "dict", "registered", "alias", "with optimizer", "frozen", "without graph"]
)
def test_layers_in_a_list_of_python_are_named(tmp_path: Path, kind: str) -> None:
    torch.manual_seed(0)
    model = InList(kind)
    layers = model.layers.values() if kind == "dict" else model.layers
    parameters = [*model.parameters()]
    if kind == "with optimizer":
        parameters += [one for layer in layers for one in layer.parameters()]
    for layer in layers if kind == "frozen" else ():
        layer.requires_grad_(False)
    if kind == "without graph":
        for layer in layers:
            layer.register_forward_hook(lambda _module, _args, output: output.detach())
    with flagged(tmp_path, "site=output,grad keep=stats") as recording:
        optimizer = torch.optim.SGD(parameters, lr=0.01)
        for _ in range(6):
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
            for one in (model, *layers):
                one.zero_grad()
    findings = check(recording.run, rules=["not_optimized"]).findings
    severity = {"list": Severity.WARNING, "dict": Severity.WARNING, "one": Severity.NOTE}.get(kind)
    assert [(one.name, one.severity) for one in findings] == ([] if severity is None else [("layers", severity)])
    assert all("in a list or dict" in one.what or "ModuleList" in one.advice for one in findings)
    if findings:
        ((told, _),) = told_of(findings)
        assert command_of("RUN", told) == "recorder show RUN ''"


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_model_or_a_head_that_was_made_anew_after_its_optimizer_is_named(tmp_path: Path, is_whole: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    if is_whole:
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    else:
        model[2] = nn.Linear(8, 2)
    with flagged(tmp_path, "site=output,grad keep=stats") as recording:
        for _ in range(6):
            optimizer.zero_grad()
            model.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
    findings = check(recording.run, rules=["not_optimized"]).findings
    named = {(one.module_path, one.severity, one.what) for one in findings}
    assert named == {(path, Severity.WARNING, NO_OPTIMIZER) for path in (("0", "2") if is_whole else ("2",))}


def validate(model: nn.Module, num_calls: int = 6) -> None:
    with torch.no_grad():
        for _ in range(num_calls):
            model(torch.randn(8, 4))


@pytest.mark.parametrize(
    ("case", "step"),
    [
        ("forgotten", 9),
        ("at the end", 39),
        ("no dropout", None),
        ("in evaluation mode", None),
        ("evaluated later", None),
        ("before each update", None),
        ("two calls", None),
        ("between micro-batches", None),
    ],
)
def test_a_validation_in_training_mode_is_named(tmp_path: Path, case: str, step: int | None) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.0 if case == "no dropout" else 0.1), nn.Linear(8, 2))
    with flagged(tmp_path, "site=output,grad keep=stats") as recording:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for number in range(40):
            for _ in range(6 if case == "between micro-batches" else 1):
                if case == "between micro-batches":
                    validate(model, 1)
                model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if case == "before each update" or (number % 10 == 9 and case != "at the end"):
                model.train(case != "in evaluation mode")
                validate(model, 2 if case == "two calls" else 6)
                model.train()
        if case == "at the end":
            validate(model)
        if case == "evaluated later":
            model.eval()
            validate(model, 1)
    findings = check(recording.run, rules=["evaluation_mode"]).findings
    found = [(one.module_path, one.severity, one.first_step) for one in findings]
    assert found == ([] if step is None else [("", Severity.NOTE, step)])
    assert all("in training mode" in one.what and "model.eval()" in one.advice for one in findings)


@pytest.mark.parametrize("num_updates", [1, 4])
def test_optimizers_that_are_made_anew_step(tmp_path: Path, num_updates: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    with flagged(tmp_path, "site=grad keep=stats") as recording:
        for number in range(200):
            if number % num_updates == 0:
                optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
    findings = check(recording.run, rules=["not_optimized"]).findings
    assert not any(one.what in (NEVER_STEPS, NO_OPTIMIZER) for one in findings)


@pytest.mark.parametrize("how", ["by hand", "through data", "in one step", "without grad", "few"])
def test_a_program_that_trains_in_another_way_is_not_said_to_need_a_step(tmp_path: Path, how: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=100, tolerance_change=0.0, tolerance_grad=0.0)

    def backward() -> torch.Tensor:
        model.zero_grad()
        loss: torch.Tensor = model(torch.randn(8, 4)).square().mean()
        loss.backward()
        return loss

    with flagged(tmp_path, "site=grad,output,scalar keep=stats") as recording:
        if how == "in one step":
            optimizer.step(backward)
        for _ in range({"in one step": 0, "few": 60}.get(how, 100)):
            if how == "without grad":
                torch.autograd.grad(model(torch.randn(8, 4)).square().mean(), [*model.parameters()])
                continue
            backward()
            with torch.no_grad():
                for one in model.parameters() if how in ("by hand", "through data") else ():
                    assert one.grad is not None
                    (one.data if how == "through data" else one).sub_(0.01 * one.grad)
    assert not check(recording.run, rules=["not_optimized", "update"]).findings


@pytest.mark.parametrize("name", ["Adam", "SGD", "momentum", "of two", "each epoch", "once"])
def test_an_optimizer_that_is_made_anew_for_each_update_is_named(tmp_path: Path, name: str) -> None:
    torch.manual_seed(0)
    model, other = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), nn.Linear(2, 2)

    def make() -> torch.optim.Optimizer:
        if name in ("SGD", "momentum"):
            return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9 * (name == "momentum"))
        return torch.optim.Adam(model.parameters(), lr=0.01)

    every = {"each epoch": 10, "once": 1000}.get(name, 1)
    with flagged(tmp_path, "site=output,grad keep=stats") as recording:
        of_other = torch.optim.Adam(other.parameters(), lr=0.01)
        for number in range(40):
            if number % every == 0:
                optimizer = make()
            optimizer.zero_grad()
            of_other.zero_grad()
            output = model(torch.randn(8, 4))
            (other(output) if name == "of two" else output).square().mean().backward()
            optimizer.step()
            if name == "of two":
                of_other.step()
    findings = check(recording.run, rules=["not_optimized"]).findings
    kinds = {"Adam": "Adam", "momentum": "SGD"}
    assert [one.what.partition(" makes")[0] for one in findings] == ([f"a new {kinds[name]}"] if name in kinds else [])


@pytest.mark.parametrize("odd", [0, 1, None])
def test_what_one_rank_alone_does_names_the_rank(tmp_path: Path, odd: int | None) -> None:
    run = make_run(tmp_path / "run", world_size=2)
    for rank in range(2):
        writer = HandmadeWriter(run, rank)
        writer.add_shard([[make_row(0, torch.ones(8).numpy(), rank=rank, module_path="drop")]])
        facts = {"evaluated": 3} if odd in (rank, None) else {}
        known = {"path": "drop", "class": "Dropout", "sites": ["output"], **facts}
        others = [{"path": path, "class": "Net", "sites": ["output"]} for path in ("", "up")]
        writer.finish(roots=[{"name": "model", "class": "Net", "modules": [*others, known]}])
    (found,) = check(recorder.open_run(run), rules=["evaluation_mode"]).findings
    assert (found.module_path, found.first_step) == ("drop", 3)
    assert (found.ranks, found.severity) == (((), Severity.NOTE) if odd is None else ((odd,), Severity.WARNING))
    assert recorder.open_run(run).modules["model", "drop"].evaluated == 3


@pytest.mark.parametrize("case", ["stages", "an earlier attempt", "merged"])
def test_a_rank_is_named_only_among_ranks_that_have_the_module(tmp_path: Path, case: str) -> None:
    run = make_run(tmp_path / "run", world_size=2)
    for rank, attempt in [(0, 0), (1, 0), *([(0, 1), (1, 1)] if case == "an earlier attempt" else [])]:
        writer = HandmadeWriter(run, rank, name=f"2026010{1 + attempt}-000000-host-1")
        writer.add_shard([[make_row(0, torch.ones(8).numpy(), rank=rank, attempt=attempt, module_path="drop")]])
        is_fact = attempt == 1 or rank == 1
        paths = ["", "up"] + ["drop"] * (rank == 1 or case != "stages")
        described: list[dict[str, Any]] = [{"path": path, "class": "Net", "sites": ["output"]} for path in paths]
        if paths[-1] == "drop":
            described[-1] |= {"class": "Dropout"} | ({"evaluated": 3} if is_fact or case == "merged" else {})
        writer.finish(roots=[{"name": "model", "class": "Net", "modules": described}], attempt=attempt)
    if case == "merged":
        merge_run(recorder.open_run(run), tmp_path / "merged")
        run = tmp_path / "merged"
    (found,) = check(recorder.open_run(run), rules=["evaluation_mode"]).findings
    assert (found.ranks, found.severity) == ((), Severity.NOTE)


def test_a_model_whose_modules_name_the_whole_model_in_lists_is_searched_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(20)])
    beside = nn.Linear(2, 2)
    for layer in model:
        layer.holders = [model, beside]  # type: ignore[assignment]
    searched: list[nn.Module] = []
    plain = nn.Module.named_parameters

    def counted(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        searched.append(module)
        return plain(module, *args, **kwargs)

    with flagged(tmp_path, "site=output,grad keep=stats") as recording:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        monkeypatch.setattr(nn.Module, "named_parameters", counted)
        for _ in range(4):
            model(torch.randn(2, 2)).square().mean().backward()
            optimizer.step()
    assert searched.count(beside) == 1
    assert not check(recording.run, rules=["not_optimized"]).findings


def test_a_recurrent_module_without_the_attribute_is_recorded(tmp_path: Path) -> None:
    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.attention = nn.Linear(2, 2), nn.MultiheadAttention(2, 1, batch_first=True)
            del self.attention.batch_first

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.inner(x)
            return result

    model = Attending()
    with flagged(tmp_path, "site=output keep=stats") as recording:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(2):
            model(torch.randn(2, 2)).square().mean().backward()
            optimizer.step()
    assert [path for _, path in recording.run.modules][:3] == ["", "inner", "attention"]


@pytest.mark.parametrize("is_varied", [False, True])
def test_a_loss_over_a_varying_number_of_calls_is_only_a_note(tmp_path: Path, is_varied: bool) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    with flagged(tmp_path, "site=scalar,grad keep=stats") as recording:
        for step in range(120):
            num_calls = 5 + step % 8 if is_varied and step < 100 else 5
            optimizer.zero_grad()
            loss = torch.stack([model(torch.ones(1, 4)).square().sum() for _ in range(num_calls)]).sum()
            (loss * (100 if step == 110 else 1)).backward()
            optimizer.step()
    found = check(recording.run, rules=["spike", "jump", "loss"]).findings
    expected = {Severity.NOTE} if is_varied else {Severity.ERROR, Severity.WARNING}
    assert {one.severity for one in found if one.first_step == 110} == expected


@pytest.mark.parametrize("held", ["generator", "critic"])
def test_a_model_is_named_whose_optimizer_has_another_model_by_mistake(tmp_path: Path, held: str) -> None:
    torch.manual_seed(0)
    generator, critic = nn.Linear(4, 8), nn.Linear(8, 1)
    of_critic = torch.optim.SGD(critic.parameters(), lr=1e-3)
    of_generator = torch.optim.SGD((generator if held == "generator" else critic).parameters(), lr=1e-3)
    with flagged(tmp_path, "site=scalar keep=stats") as recording:
        for _ in range(20):
            noise = torch.randn(16, 4)
            of_critic.zero_grad()
            (critic(generator(noise).detach()).mean() - critic(torch.randn(16, 8)).mean()).backward()
            of_critic.step()
            of_generator.zero_grad()
            generator.zero_grad()
            (-critic(generator(noise)).mean()).backward()
            of_generator.step()
    found = check(recording.run, rules=["not_optimized"]).findings
    assert {one.name for one in found} == (set() if held == "generator" else {"weight", "bias"})


def test_a_parameter_that_was_made_in_inference_mode_disturbs_no_look(tmp_path: Path) -> None:
    """Such a tensor has no version counter. Two optimizers share a model, so that versions are looked at."""

    def make() -> nn.Module:
        model = nn.Linear(4, 1)
        with torch.inference_mode():
            model.table = nn.Parameter(torch.ones(3), requires_grad=False)
        return model

    forgotten, shared = make(), make()
    optimizers = [torch.optim.SGD(shared.parameters(), lr=1e-3) for _ in range(2)]
    with flagged(tmp_path, "site=scalar keep=stats") as recording:
        for _ in range(10):
            for optimizer in optimizers:
                optimizer.zero_grad()
                x = torch.randn(8, 4)
                (forgotten(x) + shared(x)).square().mean().backward()
                optimizer.step()
    assert recording.events("hook_error") == []
    found = check(recording.run, rules=["not_optimized"]).findings
    assert {one.name for one in found} == {"weight", "bias"}


def _nonfinite(model: nn.Module, folder: Path) -> tuple[list[Finding], NonFiniteTensor | None]:
    """Three steps with a validation after each: what `check` says that is no note, and what `first` names."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with flagged(folder) as recording:
        for _ in range(3):
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                model.eval()(torch.randn(8, 4))
            model.train()
    found = check(recording.run, rules=["nonfinite"]).findings
    return [one for one in found if one.severity != Severity.NOTE], first(recording.run).nonfinite


@pytest.mark.parametrize(("where", "is_sound"), [("2", False), ("0", True)], ids=["as NaN", "behind a tanh"])
def test_an_infinite_weight_from_the_first_step_on_is_no_mask(tmp_path: Path, where: str, is_sound: bool) -> None:
    """As of a bad checkpoint. An infinity that leaves all else finite is a note, as that of a mask is."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Sigmoid(), nn.Linear(8, 2), nn.Softmax(1))
    dict(model.named_parameters())[f"{where}.weight"].data[1, 2] = math.inf if is_sound else -math.inf
    if not is_sound:
        model[3] = nn.LayerNorm(8)
    found, named = _nonfinite(model, tmp_path)
    assert (found == []) is (named is None) is is_sound
    if named is not None:
        assert (found[0].module_path, found[0].site) == (named.value.module_path, named.value.site) == (where, "output")
        assert "neither is a parameter of the module: weight" in found[0].what


class Masked(nn.Linear):
    """Scores of a linear layer, of which a mask takes some away."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).masked_fill(torch.arange(self.out_features) > 5, -math.inf)


@pytest.mark.parametrize("is_nan", [False, True])
def test_scores_that_a_module_of_weights_masks_are_not_named(tmp_path: Path, is_nan: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Masked(4, 8), nn.Softmax(1), nn.Linear(8, 2))
    if is_nan:
        dict(model.named_parameters())["2.weight"].data[1, 2] = math.nan
    found, named = _nonfinite(model, tmp_path)
    assert (named is not None) is bool(found) is is_nan
    assert named is None or named.value.module_path == found[0].module_path == "2"
