"""Hooks of the program, which run after what is recorded of their modules: named, with file and line."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from torch import nn

import recorder
from recorder.analyze.doctor.reply import checks_of, reply_of
from recorder.analyze.first.first import first
from recorder.capture.hooks.module_facts import foreign_hooks


def zap(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output * float("nan")


def look(module: nn.Module, *values: Any) -> None:
    """Changes nothing."""


class Counts:
    """A hook that is an object."""

    def __call__(self, module: nn.Module, args: Any, output: torch.Tensor) -> None:
        pass

    def seen(self, module: nn.Module, *values: Any) -> None:
        pass


def train(model: nn.Module, folder: Path, *, at_step: Any = None) -> recorder.Run:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recorder.attach(model, enabled=True, dir=str(folder), rules="site=output,grad_output keep=stats"):
        for step in range(3):
            if step == 2 and at_step is not None:
                at_step()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
    return recorder.open_run(folder)


def of_module(run: recorder.Run, path: str) -> tuple[str, ...]:
    return run.modules["model", path].foreign_hooks


def test_a_nan_that_a_hook_makes_is_not_laid_on_the_next_module_alone(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    model[1].register_forward_hook(zap)
    run = train(model, tmp_path)
    found = first(run)
    assert found.nonfinite is not None and found.nonfinite.value.module_path == "2"
    (note,) = [note for note in found.notes if "hooks of the program" in note]
    assert note.startswith("between the last healthy value and this one ran hooks of the program on '1' (forward zap ")
    assert f"{__file__}:{zap.__code__.co_firstlineno}" in note


def test_without_a_nan_first_says_nothing_of_them_and_doctor_names_them(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model[0].register_forward_hook(look)
    run = train(model, tmp_path)
    assert not any("hooks" in note for note in first(run).notes)
    checks = list(checks_of(run))
    assert reply_of(run, checks, is_strict=True).exit_code == 0
    told = "the program's own hooks may change these modules' values after they were recorded: '0' (forward look "
    assert any(check.state == "note" and check.text.startswith(told) for check in checks)


def test_a_hook_that_came_after_the_first_step_is_told_too(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))

    def put_on() -> None:
        model[1].register_full_backward_hook(look)

    (told,) = of_module(train(model, tmp_path, at_step=put_on), "1")
    assert told.startswith("backward look ")


def test_every_kind_of_callable_is_named() -> None:
    module, counts = nn.Linear(4, 4), Counts()
    for hook in (look, functools.partial(look), counts, counts.seen, lambda *_: None):
        module.register_forward_hook(hook)
    names = [told.split()[1] for told in foreign_hooks(module)]
    lambda_name = "test_every_kind_of_callable_is_named.<locals>.<lambda>"
    assert names == ["look", "look", "Counts.__call__", "Counts.seen", lambda_name]


def test_hooks_of_torch_and_of_the_recorder_are_none(tmp_path: Path) -> None:
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), nn.Linear(4, 2))
    nn.utils.parametrize.register_parametrization(model[1], "weight", nn.Identity())
    with recorder.attach(model, enabled=True, dir=str(tmp_path), jitter=1):
        model(torch.ones(2, 4)).sum().backward()
        assert not any(foreign_hooks(module) for module in model.modules())
