"""The labels that a loss saves for its backward, as the input `loss.labels` of the model."""

from __future__ import annotations

import gc
import itertools
import os
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import recorder
from recorder.analyze.check.check import check
from recorder.checks.rule import Severity
from recorder.sites import LABELS

RULES = (
    "module='' site=input keep=tensor,stats; module='' site=input name=loss.labels keep=tensor,stats;"
    "site=scalar keep=stats"
)
_Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]


def labels(folder: Path) -> list[tuple[int, int, list[Any]]]:
    """Step, micro-step and values of each."""
    run = recorder.open_run(folder)
    frame: Any = run.to_pandas(columns=["step", "micro_step", "site", "name", "module_path"])
    found = frame[(frame.site == "input") & (frame.name == LABELS)]
    return [
        (step, part, run.array("", site="input", name=LABELS, step=step, micro_step=part).tolist())
        for step, part in zip(found.step, found.micro_step, strict=True)
    ]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def train(model: nn.Module, loss_of: _Loss, folder: Path | None, num_parts: int = 1, **settings: Any) -> list[Tensor]:
    """Three steps; the parameters after them."""
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with recorder.attach(model, enabled=folder is not None, dir=str(folder), **({"rules": RULES} | settings)):
        for _ in range(3):
            for _ in range(num_parts):
                x = torch.randn(3, 4, generator=generator)
                y = torch.randint(0, 3, (3,), generator=generator)
                loss_of(model, x, y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()]


def drawn(num: int) -> list[list[int]]:
    generator, found = torch.Generator().manual_seed(1), []
    for _ in range(num):
        torch.randn(3, 4, generator=generator)
        found.append(torch.randint(0, 3, (3,), generator=generator).tolist())
    return found


def cross_entropy(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def test_the_labels_of_each_micro_step_are_recorded_and_training_is_not_changed(tmp_path: Path) -> None:
    plain = train(net(), cross_entropy, None, num_parts=2)
    recorded = train(net(), cross_entropy, tmp_path, num_parts=2)
    assert all(map(torch.equal, plain, recorded))
    assert labels(tmp_path) == [(number // 2, number % 2, values) for number, values in enumerate(drawn(6))]


@pytest.mark.parametrize(
    "loss_of",
    [
        lambda model, x, y: (F.cross_entropy(model(x), y) + 1e-3 * x.square().mean() * model(x).square().mean()) / 2,
        lambda model, x, y: F.cross_entropy(model(x)[None].transpose(1, 2), y[None]).sum() * 0.5,
        lambda model, x, y: F.nll_loss(model(x).log_softmax(-1), y),
        lambda model, x, y: torch.amp.GradScaler("cpu", init_scale=8.0).scale(F.cross_entropy(model(x), y)),
    ],
)
def test_they_are_found_below_sums_factors_and_scales(tmp_path: Path, loss_of: _Loss) -> None:
    train(net(), loss_of, tmp_path)
    assert [torch.tensor(values).flatten().tolist() for _, _, values in labels(tmp_path)] == drawn(3)


@pytest.mark.parametrize(
    ("loss_of", "name"),
    [
        (F.mse_loss, "MseLoss"),
        (F.binary_cross_entropy_with_logits, "BinaryCrossEntropyWithLogits"),
        (F.smooth_l1_loss, "SmoothL1Loss"),
        (F.huber_loss, "HuberLoss"),
        (lambda x, y: F.mse_loss(x.sigmoid(), y), "MseLoss of Sigmoid"),
        (lambda x, y: F.huber_loss(x[:, None].tanh()[:, 0], y, reduction="sum"), "HuberLoss of Tanh summed"),
        (lambda x, y: F.mse_loss(2 * x.sigmoid(), y), "MseLoss"),
    ],
)
def test_targets_of_other_losses_are_recorded(tmp_path: Path, loss_of: Any, name: str) -> None:
    train(net(), lambda model, x, y: loss_of(model(x)[:, 0], y.float()), tmp_path)
    assert [values for _, _, values in labels(tmp_path)] == drawn(3)
    (module, *_) = recorder.open_run(tmp_path).writers[0].manifest.roots[0].modules
    assert module.labels_of == name


def test_a_weight_of_each_element_counts_as_a_loss_by_element(tmp_path: Path) -> None:
    def weighted(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(model(x)[:, 0], y.float(), weight=(y > 0).float())

    train(net(), weighted, tmp_path)
    (module, *_) = recorder.open_run(tmp_path).writers[0].manifest.roots[0].modules
    assert module.labels_of == "BinaryCrossEntropyWithLogits by element"


def test_of_losses_by_turns_it_is_not_said_which_one_has_the_labels(tmp_path: Path) -> None:
    losses = itertools.cycle([F.mse_loss, F.smooth_l1_loss])
    train(net(), lambda model, x, y: next(losses)(model(x)[:, 0], y.float()), tmp_path, num_parts=2)
    (module, *_) = recorder.open_run(tmp_path).writers[0].manifest.roots[0].modules
    assert module.labels_of == ""


def test_a_part_of_a_loss_is_not_the_whole_loss(tmp_path: Path) -> None:
    train(net(), lambda model, x, y: cross_entropy(model, x, y) + model(x).square().mean(), tmp_path)
    (module, *_) = recorder.open_run(tmp_path).writers[0].manifest.roots[0].modules
    assert module.labels_of == "Add of NllLoss of 3 classes"
    train(net(), lambda model, x, y: F.cross_entropy(model(x), y, reduction="none").mean(), tmp_path / "none")
    (module, *_) = recorder.open_run(tmp_path / "none").writers[0].manifest.roots[0].modules
    assert module.labels_of == "Mean of NllLoss of 3 classes by element"


@pytest.mark.parametrize("has_many", [False, True])
def test_the_manifest_says_if_a_loss_has_several_labels(tmp_path: Path, has_many: bool) -> None:
    def sum_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        other = torch.zeros_like(y) if has_many else y
        return F.cross_entropy(model(x), y) + F.cross_entropy(model(x), other)

    train(net(), sum_of, tmp_path)
    (module, *_) = recorder.open_run(tmp_path).writers[0].manifest.roots[0].modules
    assert module.has_many_labels is has_many


class Given(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = net()

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.inner(x), labels.clone())


def test_labels_that_the_model_is_given_are_not_recorded_twice(tmp_path: Path) -> None:
    train(Given(), lambda model, x, y: model(x, labels=y), tmp_path / "given")
    assert labels(tmp_path / "given") == []
    model = nn.Sequential(nn.Linear(4, 4))
    train(model, lambda model, x, y: F.mse_loss(model(x), x), tmp_path / "itself")
    assert labels(tmp_path / "itself") == []


def test_labels_of_samples_that_are_compared_are_no_classes(tmp_path: Path) -> None:
    def contrast(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        out = model(x)
        logits = torch.cat([out.square().sum(1, keepdim=True), out @ x[:, :3].T], 1) / 0.1
        return F.cross_entropy(logits, torch.zeros_like(y))

    train(net(), contrast, tmp_path)
    assert labels(tmp_path) == []


def test_saved_tensors_with_hooks_are_left_alone(tmp_path: Path) -> None:
    num_unpacked = 0

    def unpack(saved: Tensor) -> Tensor:
        nonlocal num_unpacked
        num_unpacked += 1
        return saved

    def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, unpack):
            return F.cross_entropy(model(x), y)

    train(net(), loss_of, None)
    num_plain, num_unpacked = num_unpacked, 0
    train(net(), loss_of, tmp_path)
    assert labels(tmp_path) == [] and num_unpacked == num_plain


def test_neither_the_graph_nor_the_labels_are_kept(tmp_path: Path) -> None:
    model, kept = net(), []
    with recorder.attach(model, enabled=True, dir=str(tmp_path), rules=RULES):
        for _ in range(2):
            y = torch.randint(0, 3, (3,))
            kept.append(weakref.ref(y))
            loss = F.cross_entropy(model(torch.randn(3, 4)), y)
            loss.backward(retain_graph=True)
            loss.backward()
            del loss, y
            gc.collect()
            assert kept[-1]() is None
    run = recorder.open_run(tmp_path)
    assert [writer.balance.dropped for writer in run.writers] == [{}]


def test_a_backward_that_fails_fails_as_without_the_recorder(tmp_path: Path) -> None:
    model = net()
    with recorder.attach(model, enabled=True, dir=str(tmp_path), rules=RULES):
        y = torch.randint(0, 3, (3,))
        loss = F.cross_entropy(model(torch.randn(3, 4)), y)
        loss.backward()
        with pytest.raises(RuntimeError, match="a second time"):
            loss.backward()
        loss = F.cross_entropy(model(torch.randn(3, 4)), y)
        y.add_(0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    assert [writer.balance.dropped for writer in recorder.open_run(tmp_path).writers] == [{}]


@pytest.mark.parametrize("is_kept", [False, True])
def test_the_manifest_says_if_the_model_was_always_given_one_tensor(tmp_path: Path, is_kept: bool) -> None:
    model, x = net(), torch.randn(3, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recorder.attach(model, enabled=True, dir=str(tmp_path), rules=RULES):
        for _ in range(40):
            model(x if is_kept else x.clone()).square().mean().backward()
            optimizer.step()
            with torch.no_grad():
                model(torch.randn(3, 4))
    (module, *_) = recorder.open_run(tmp_path).writers[0].manifest.roots[0].modules
    assert (module.given_again is not None) is is_kept


@pytest.mark.parametrize(
    ("loader", "sets"),
    [
        ("DataLoader(data, batch_size=8)", (8,)),
        ("DataLoader(data, batch_size=9, shuffle=True)", (8,)),
        ("DataLoader(data, batch_size=4)", ()),
        ("DataLoader(Own(), batch_size=8)", ()),
        ("DataLoader(data, batch_sampler=Batches())", ()),
        ("[data[:]] * 3", ()),
    ],
)
def test_the_manifest_says_which_loaders_give_all_samples_in_one_batch(
    tmp_path: Path, loader: str, sets: tuple[int, ...]
) -> None:
    """No code of the program is run for this."""
    program = f"""
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

class Own(Dataset):
    num_asked = 0
    def __len__(self):
        Own.num_asked += 1
        return 8
    def __getitem__(self, index):
        return torch.ones(4),

class Batches:
    def __iter__(self):
        return iter([[0, 1]])
    def __len__(self):
        raise SystemExit(3)

data = TensorDataset(torch.randn(8, 4))
loader = {loader}
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, in iter(loader):
    before = Own.num_asked
    model(x).square().mean().backward()
    optimizer.step()
    assert Own.num_asked == before
"""
    env = os.environ | {"RECORDER": "1", "RECORDER_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", program], env=env, check=True, timeout=120)
    (module, *_) = recorder.open_run(tmp_path).writers[0].manifest.roots[0].modules
    assert module.whole_sets == sets


@pytest.mark.parametrize(("is_new", "since"), [(lambda step: False, 0), (lambda step: step == 9, 9), (bool, None)])
def test_the_manifest_says_since_when_a_model_was_given_a_few_tensors_by_turns(
    tmp_path: Path, is_new: Callable[[int], bool], since: int | None
) -> None:
    model, kept = net(), [torch.randn(3, 4) for _ in range(2)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recorder.attach(model, enabled=True, dir=str(tmp_path), rules=RULES):
        for step in range(70):
            given = torch.randn(3, 4) if is_new(step) else kept[1]
            (model(kept[0]).square().mean() + model(given).mean()).backward()
            optimizer.step()
    (module, *_) = recorder.open_run(tmp_path).writers[0].manifest.roots[0].modules
    assert module.given_again == since


def test_slices_of_one_tensor_are_one_tensor_if_they_have_the_same_elements(tmp_path: Path) -> None:
    for name, begin in (("kept", lambda step: 1), ("moving", lambda step: step % 20)):
        model, whole = net(), torch.randn(24, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with recorder.attach(model, enabled=True, dir=str(tmp_path / name), rules=RULES):
            for step in range(70):
                model(whole[begin(step) : begin(step) + 3]).square().mean().backward()
                optimizer.step()
        (module, *_) = recorder.open_run(tmp_path / name).writers[0].manifest.roots[0].modules
        assert module.given_again == (0 if name == "kept" else None)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_view_of_a_nested_tensor_as_first_argument_is_no_error(tmp_path: Path) -> None:
    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = net()

        def forward(self, rows: Tensor) -> Tensor:
            return self.inner(rows.to_padded_tensor(0.0))  # type: ignore[no-any-return]

    model = Padded()
    rows = torch.nested.nested_tensor([torch.randn(2, 4), torch.randn(3, 4)])
    given = rows.transpose(1, 2).transpose(1, 2)
    assert given._base is not None
    with recorder.attach(model, enabled=True, dir=tmp_path, rules=RULES):
        model(given).square().mean().backward()
    assert "hook_error" not in recorder.open_run(tmp_path).writers[0].balance.dropped


@pytest.mark.parametrize("num_new", [0, 40])
def test_the_manifest_takes_back_that_a_model_is_given_one_tensor(tmp_path: Path, num_new: int) -> None:
    model, x = net(), torch.randn(3, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recorder.attach(model, enabled=True, dir=str(tmp_path), rules=RULES):
        for step in range(40 + num_new):
            model(x if step < 40 else torch.randn(3, 4)).square().mean().backward()
            optimizer.step()
    (module, *_) = recorder.open_run(tmp_path).writers[0].manifest.roots[0].modules
    assert module.given_again == (None if num_new else 0)


@pytest.mark.parametrize(("rule", "is_asked"), [("name=loss.labels keep=tensor", True), ("keep=tensor", False)])
def test_a_rule_that_names_them_is_enough_and_one_without_a_name_is_not(
    tmp_path: Path, rule: str, is_asked: bool
) -> None:
    train(net(), cross_entropy, tmp_path, num_parts=2, rules=f"module='' site=input {rule}")
    wanted = [(number // 2, number % 2, values) for number, values in enumerate(drawn(6))]
    assert labels(tmp_path) == wanted * is_asked


@pytest.mark.parametrize("is_stuck", [False, True])
def test_classes_of_equal_size_are_labels_that_change(tmp_path: Path, is_stuck: bool) -> None:
    model, generator = net(), torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    y = torch.arange(12) % 3
    with recorder.attach(model, enabled=True, dir=str(tmp_path)):  # the default rules
        for _ in range(40):
            y = y if is_stuck else y[torch.randperm(12, generator=generator)]
            optimizer.zero_grad()
            cross_entropy(model, torch.randn(12, 4, generator=generator), y).backward()
            optimizer.step()
    found = recorder.check(recorder.open_run(tmp_path), rules=["data"]).findings
    assert [one.what for one in found] == ["the labels never change"] * is_stuck


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(50, 8), nn.Linear(8, 50)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embedding(tokens))  # type: ignore[no-any-return]


def _padded(tokens: Tensor, shift: int) -> Tensor:
    return F.pad(tokens[:, shift:], (0, shift), value=-100)


def predict(
    model: nn.Module,
    folder: Path,
    labels_of: Callable[[Tensor, int], Tensor],
    shape: tuple[int, int] = (4, 12),
    *,
    more_given: Callable[[Tensor], tuple[Tensor, ...]] = lambda labels: (),
) -> list[tuple[str, Severity]]:
    """Five steps on tokens; what is said of the loss's arguments."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recorder.attach(model, enabled=True, dir=folder, rules="site=input,scalar keep=stats"):
        for step in range(5):
            tokens = torch.randint(0, 50, shape)
            labels = labels_of(tokens, step)
            given = tokens.clone()
            logits = model(given, *more_given(labels))
            logits = logits[:, : labels.shape[1]] if labels.dim() > 1 else logits[:, 0]
            del given  # as Hugging Face's Trainer does
            F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)).backward()
            optimizer.step()
            optimizer.zero_grad()
    found = check(recorder.open_run(folder), ["loss_argument"]).findings
    assert all(one.step in (0, 3) for one in found)
    return [(one.what, one.severity) for one in found]


@pytest.mark.parametrize(
    ("labels_of", "shift"),
    [
        (lambda tokens: tokens.clone(), 0),
        (lambda tokens: tokens[:, 1:], None),
        (lambda tokens: _padded(tokens, 1), None),
        (lambda tokens: tokens[:, 2:], None),  # perhaps a copy of what follows two words of a task
        (lambda tokens: _padded(tokens, 2), 2),
        (lambda tokens: torch.where(torch.arange(12) < 9, tokens, -100), 0),
        (lambda tokens: torch.full_like(tokens, -100).index_fill(1, torch.tensor([3]), 7), None),
        (lambda tokens: tokens.flip(1), None),
        (lambda tokens: _padded(tokens, 3), None),
        (lambda tokens: tokens[:, 3:], None),
        (lambda tokens: tokens[:, 0], None),
        (lambda tokens: torch.where(torch.arange(12) < 7, tokens, -100), None),  # fewer than 32 may agree by chance
        (lambda tokens: torch.full_like(tokens, -100), None),
    ],
)  # fmt: skip
def test_how_far_labels_are_from_the_tokens_of_the_input(tmp_path: Path, labels_of: Any, shift: int | None) -> None:
    torch.manual_seed(0)
    assert predict(Tokens(), tmp_path, lambda tokens, step: labels_of(tokens)) == SAID.get(shift, [])


SAID: dict[int | None, list[tuple[str, Severity]]] = {
    0: [("the labels of the loss are the tokens of the input 'tokens', each at its place", Severity.NOTE)],
    2: [
        (
            "each label of the loss is the token after the next one of the input 'tokens': "
            "the labels are shifted twice",
            Severity.WARNING,
        )
    ],
}


@pytest.mark.parametrize(
    ("given", "is_said"),
    [
        (lambda labels: (labels,), True),  # the very tensor that the loss gets
        (lambda labels: (torch.ones_like(labels), labels.clone()), True),
        (lambda labels: (F.pad(labels[:, :-1], (1, 0), value=1),), False),  # as a decoder should get them
        (lambda labels: (torch.arange(12).repeat(4, 1), torch.ones_like(labels)), False),
        (lambda labels: (labels.float(),), False),
    ],
    ids=["equal", "third", "shifted", "positions", "numbers"],
)
def test_the_input_of_a_decoder_that_is_the_labels_is_a_note(tmp_path: Path, given: Any, is_said: bool) -> None:
    class Decoder(Tokens):
        def forward(self, tokens: Tensor, y: Tensor, second: Tensor | None = None) -> Tensor:  # type: ignore[override]
            return super().forward(tokens) + super().forward((y if second is None else second).long())

    torch.manual_seed(0)
    found = predict(Decoder(), tmp_path, lambda tokens, step: tokens.flip(1), more_given=given)
    name = "second" if len(given(torch.zeros(4, 12))) > 1 else "y"
    words = f"the labels of the loss are the tokens of the input '{name}', each at its place"
    assert found == [(words, Severity.NOTE)] * is_said


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_labels_of_a_model_that_computes_its_own_loss_are_no_input_of_a_decoder(tmp_path: Path, reduction: str) -> None:
    class WithLoss(Tokens):
        def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
            loss = F.cross_entropy(super().forward(tokens).flatten(0, 1), labels.flatten(), reduction=reduction)
            return loss if reduction == "mean" else loss.view_as(labels)

    torch.manual_seed(0)
    model = WithLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recorder.attach(model, enabled=True, dir=tmp_path, rules="site=input,scalar keep=stats"):
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.randint(0, 50, (4, 12)), torch.randint(0, 50, (4, 12))).mean().backward()
            optimizer.step()
    assert check(recorder.open_run(tmp_path), ["loss_argument"]).findings == []


def test_labels_that_are_shifted_by_chance_or_in_turns_are_not_named(tmp_path: Path) -> None:
    torch.manual_seed(0)
    said = predict(Tokens(), tmp_path / "turns", lambda tokens, step: _padded(tokens, 2 - step % 2))
    assert said == []
    said = predict(Tokens(), tmp_path / "rare", lambda tokens, step: _padded(tokens.fill_(3), 2))
    assert said == []
    # A reversal of three tokens, with which a curriculum begins: its first label is two places before the last token.
    assert predict(Tokens(), tmp_path / "short", lambda tokens, step: tokens.flip(1), shape=(64, 3)) == []


def test_another_argument_takes_the_place_of_labels_that_may_be_meant(tmp_path: Path) -> None:
    class Late(Tokens):
        num = 0

        def forward(self, tokens: Tensor) -> Tensor:
            self.num += 1
            made = super().forward(tokens)
            return made.softmax(-1) if self.num > 3 else made

    torch.manual_seed(0)
    ((what, severity),) = predict(Late(), tmp_path, lambda tokens, step: tokens.clone())
    assert "softmax" in what and severity == Severity.WARNING
