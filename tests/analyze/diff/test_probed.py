"""`diff` of two trainings with the default rules that differ at a step of which only the probe has kept numbers."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from recorder import Run, diff, first
from recorder.analyze.diff.culprit_findings import BY_PROBE
from recorder.analyze.diff.reply import accusations, unlike_models
from recorder.config import DEFAULT_RULES
from tests.rigs.capturing import flagged
from tests.rigs.command_line import Cli, cli

__all__ = ["cli"]

BAD_STEP = 15
"""A step of which the default rules keep nothing but scalars and the numbers of the probe."""
NUM_STEPS = 22

Spoil = Callable[[nn.Sequential, torch.Tensor, int], torch.Tensor]


def train(path: Path, spoil: Spoil = lambda model, x, step: x) -> Run:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Linear(8, 1))
    with flagged(path, "; ".join(rule.text for rule in DEFAULT_RULES)) as recording:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for step in range(NUM_STEPS):
            torch.manual_seed(step)
            x = spoil(model, torch.randn(3, 4), step)
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    return recording.run


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train(tmp_path_factory.mktemp("sound"))


def weight(model: nn.Sequential, number: int) -> torch.Tensor:
    layer = model[number]
    assert isinstance(layer, nn.Linear)
    return layer.weight


def written(model: nn.Sequential, x: torch.Tensor, step: int) -> torch.Tensor:
    if step == BAD_STEP:
        with torch.no_grad():
            weight(model, 2).mul_(1.5)
    return x


def other_input(model: nn.Sequential, x: torch.Tensor, step: int) -> torch.Tensor:
    return x * 1.01 if step == BAD_STEP else x


def evaluated(model: nn.Sequential, x: torch.Tensor, step: int) -> torch.Tensor:
    model[1].train(step != BAD_STEP)
    return x


def other_gradient(model: nn.Sequential, x: torch.Tensor, step: int) -> torch.Tensor:
    if step == BAD_STEP:
        handle = weight(model, 2).register_hook(lambda gradient: 2 * gradient)
        weight(model, 0).register_hook(lambda gradient: handle.remove())
    return x


@pytest.mark.parametrize(
    ("spoil", "phase", "module_path", "site"),
    [
        (written, "start", "2", "param"),
        (other_input, "forward", "", "input"),
        (evaluated, "forward", "1", "output"),
        (other_gradient, "backward", "2", "grad"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_first_number_of_the_probe_that_differs_is_the_culprit(
    sound: Run, tmp_path: Path, spoil: Spoil, phase: str, module_path: str, site: str
) -> None:
    bad = train(tmp_path, spoil)
    found = diff(sound, bad)
    culprit, *later = found.culprits
    assert (culprit.step, culprit.phase, culprit.module_path, culprit.site) == (BAD_STEP, phase, module_path, site)
    assert culprit.kind == BY_PROBE and all(one.step > BAD_STEP for one in later)
    assert found.verdict == "different" and not found.is_equal
    assert 0 < found.num_probes_differing < found.num_probed
    assert "(by keep=probe; all norms before it are equal)" in next(iter(accusations(found.culprits, 0)))


def test_elements_that_are_not_finite_are_told_in_place_of_a_norm_that_leaves_them_out(
    sound: Run, tmp_path: Path
) -> None:
    def poisoned(model: nn.Sequential, x: torch.Tensor, step: int) -> torch.Tensor:
        if step == BAD_STEP:
            with torch.no_grad():
                weight(model, 2)[0, :2] = float("nan")
        return x

    bad = train(tmp_path, poisoned)
    for a, b, expected in ((sound, bad, r"l2 \S+ in A; 2 {} in B"), (bad, sound, r"2 {} in A; l2 \S+ in B")):
        line = next(iter(accusations(diff(a, b).culprits, 0)))
        expected = expected.format("NaN or infinite elements")
        assert re.search(rf"before the step: '2': param weight differs: {expected} \(by keep=probe; ", line)


def test_a_batch_of_another_size_at_a_step_without_rows_is_the_culprit(sound: Run, tmp_path: Path) -> None:
    def half(model: nn.Sequential, x: torch.Tensor, step: int) -> torch.Tensor:
        return x[: len(x) // 2] if step == BAD_STEP else x

    culprit = diff(sound, train(tmp_path, half)).culprits[0]
    assert (culprit.step, culprit.phase, culprit.module_path, culprit.site) == (BAD_STEP, "forward", "", "input")
    assert (culprit.statistic, culprit.statistic_a, culprit.statistic_b) == ("numel", 12, 4)
    assert "another number of samples" in culprit.why


def test_equal_trainings_have_equal_numbers(sound: Run, tmp_path: Path) -> None:
    found = diff(sound, train(tmp_path))
    assert (found.verdict, found.culprits, found.num_probes_differing) == ("equal", [], 0)
    assert found.num_probed > 100


def test_a_difference_after_the_last_row_is_one(sound: Run, tmp_path: Path) -> None:
    """The last rows of outputs are those of step 20."""

    def last(model: nn.Sequential, x: torch.Tensor, step: int) -> torch.Tensor:
        return 2 * x if step == NUM_STEPS - 1 else x

    found = diff(sound, train(tmp_path, last), site="output")
    assert (found.verdict, found.table.num_rows) == ("different", 0)
    assert [(one.step, one.module_path) for one in found.culprits] == [(NUM_STEPS - 1, "0")]


def test_differences_that_are_allowed_are_no_differences_of_numbers(sound: Run, tmp_path: Path) -> None:
    found = diff(sound, train(tmp_path, other_input), rtol=1e3, atol=1e3)
    assert (found.verdict, found.num_probed) == ("equal", 0)


def test_modules_that_only_one_run_evaluates_are_told(sound: Run, tmp_path: Path) -> None:
    def always(model: nn.Sequential, x: torch.Tensor, step: int) -> torch.Tensor:
        model[1].eval()
        return x

    lines = list(unlike_models(sound, train(tmp_path, always)))
    assert lines == ["the models differ: in B alone modules are in evaluation mode while the model is trained ('1')"]


def evaluated_on(factor: float) -> Spoil:
    def spoil(model: nn.Sequential, x: torch.Tensor, step: int) -> torch.Tensor:
        if step == BAD_STEP:
            model.eval()
            with torch.no_grad():
                model(x * factor)
            model.train()
        return x

    return spoil


def test_runs_that_only_the_probe_tells_apart_are_different_by_it_alone(cli: Cli, tmp_path: Path) -> None:
    a, b = (train(tmp_path / str(factor), evaluated_on(factor)) for factor in (1.0, 1.01))
    _, _, verdict, probed, culprit, *_ = cli("diff", a.path, b.path).out.splitlines()
    assert verdict.startswith("different by the numbers of the probe alone: ") and " 0 differ " in verdict
    assert probed.startswith("keep=probe, ")
    where = f"step {BAD_STEP - 1}"  # an evaluation belongs to the training step before it
    assert f"{where}, forward of '' (the root was called with another input in an evaluation): " in culprit


def train_two(path: Path, *, bad_step: int = NUM_STEPS, judge_first: bool = False, is_nan: bool = True) -> Run:
    """Train a generator and a judge of its output. From `bad_step` on, weights of the generator's layer 1 are wrong."""
    torch.manual_seed(0)
    maker, judge = (nn.Sequential(nn.Linear(3, 8), nn.Linear(8, 8), nn.Linear(8, num)) for num in (3, 1))
    with flagged(path, "; ".join(rule.text for rule in DEFAULT_RULES)) as recording:
        of_maker, of_judge = (torch.optim.SGD(model.parameters(), lr=1e-3) for model in (maker, judge))
        for step in range(NUM_STEPS):
            if step == bad_step:
                with torch.no_grad():
                    weight(maker, 1)[0].mul_(float("nan") if is_nan else 1.5)
            real, noise = torch.randn(4, 3), torch.randn(4, 3)
            made = None if judge_first else maker(noise)
            loss = judge(real).mean()
            made = maker(noise) if made is None else made
            of_judge.zero_grad()
            (judge(made.detach()).mean() - loss).backward()
            of_judge.step()
            of_maker.zero_grad()
            judge(made).mean().neg().backward()
            of_maker.step()
    return recording.run


@pytest.mark.parametrize("bad_step", [BAD_STEP, 20], ids=["by the probe", "by rows"])
@pytest.mark.parametrize("is_nan", [True, False], ids=["nan", "finite"])
@pytest.mark.parametrize("judge_first", [False, True], ids=["generator first", "judge first"])
def test_an_input_that_another_model_made_is_no_first_culprit(
    tmp_path: Path, bad_step: int, *, judge_first: bool, is_nan: bool
) -> None:
    a = train_two(tmp_path / "a", judge_first=judge_first)
    b = train_two(tmp_path / "b", judge_first=judge_first, bad_step=bad_step, is_nan=is_nan)
    culprit = diff(a, b).culprits[0]
    maker = "model_1" if judge_first else "model"
    assert (culprit.step, culprit.root, culprit.module_path, culprit.site) == (bad_step, maker, "1", "output")
    named = first(b).nonfinite
    assert named is None or (named.value.root, named.value.module_path, named.value.site) == (maker, "1", "output")
