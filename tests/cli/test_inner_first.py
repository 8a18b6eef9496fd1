"""One module has one path, whether the program calls it or a model around it first."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import recorder
from tests.rigs.capturing import Recording, Tiny, batch, flagged
from tests.rigs.command_line import Cli

PATHS = {"", "base_model", "head", *(f"base_model.model{part}" for part in ("", ".first", ".act", ".second"))}


class Adapter(nn.Module):
    """A wrapper that calls the forward of the model inside it, as PEFT does."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model.forward(x)  # type: ignore[no-any-return]


class Wrapper(nn.Module):
    """A wrapper around a wrapper, with a module of its own and further ways in."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.base_model = Adapter(model)
        self.head = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.base_model(x))  # type: ignore[no-any-return]

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.base_model(x)).sum()  # type: ignore[no-any-return]


def train(model: nn.Module, evaluate: Callable[[int], object] = lambda _: None) -> None:
    """Train a model for three steps, with an evaluation before each."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i in range(3):
        with torch.no_grad():
            evaluate(i)
        model(batch(i)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def paths(recording: Recording) -> set[str]:
    """The paths of rows, each of which the manifest describes."""
    described = {(root["name"], one["path"]) for root in recording.manifest["roots"] for one in root["modules"]}
    rows = recording.rows()
    rows = rows[rows.site != "scalar"]
    found = set(zip(rows.root, rows.module_path, strict=True))
    assert found <= described
    assert len({path for _, path in found}) == len(found)
    return {path for _, path in found}


@pytest.mark.parametrize("first", ["wrapper", "adapter", "inner", "layer"])
def test_whatever_is_called_first_a_module_has_its_path_in_the_outermost_model(
    cli: Cli, tmp_path: Path, first: str
) -> None:
    inner = Tiny()
    model = Wrapper(inner)
    called = {"wrapper": model, "adapter": model.base_model, "inner": inner, "layer": model.head}[first]
    with flagged(tmp_path) as recording:
        train(model, lambda i: called(batch(i, 2 if first == "layer" else 4)))
    (root,) = recording.manifest["roots"]
    assert (root["name"], root["class"]) == ("model", "Wrapper")
    assert paths(recording) | {"base_model.model"} == PATHS
    doctor = cli("doctor", recording.folder, "--strict")
    assert doctor.exit_code == 0
    assert "root model: Wrapper, 7 modules, 7 selected" in doctor.out and "two rows" not in doctor.out
    shown = {line.split()[0].strip("'") for line in cli("show", recording.folder).out.splitlines()[2:]}
    assert shown | {"base_model.model"} == PATHS


def test_transparent_wrappers_around_the_called_module_leave_its_path(tmp_path: Path) -> None:
    model = Wrapper(inner := Tiny())
    wrapped = nn.DataParallel(model)
    with flagged(tmp_path) as recording:
        train(wrapped, lambda i: inner(batch(i)))
    assert paths(recording) == PATHS


def test_an_evaluation_on_both_sides_of_a_wrapper_has_no_two_rows_of_one_key(cli: Cli, tmp_path: Path) -> None:
    wrapped = nn.DataParallel(inner := Tiny())
    with flagged(tmp_path) as recording:
        train(wrapped, lambda i: inner(batch(i)))
    calls = recording.rows(site="output", module_path="first", mode="no_grad", step=0)
    assert list(calls.call) == [0, 1]
    assert "two rows" not in cli("doctor", recording.folder, "--strict").out


def test_a_forward_without_gradients_does_not_end_the_calls_of_the_one_before(cli: Cli, tmp_path: Path) -> None:
    model = Tiny()
    with flagged(tmp_path) as recording:
        train(model, lambda i: model(batch(i)))
    assert list(recording.rows(site="output", module_path="first", step=0, mode="no_grad").call) == [0, 1]
    assert cli("doctor", recording.folder, "--strict").exit_code == 0


def test_a_model_whose_parts_alone_are_called_is_one_root_whose_micro_steps_count(tmp_path: Path) -> None:
    model = Wrapper(Tiny())
    with flagged(tmp_path) as recording:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for i in range(4):
            model.loss(batch(i)).backward()
            if i % 2:
                optimizer.step()
    (root,) = recording.manifest["roots"]
    assert root["class"] == "Wrapper"
    calls = recording.rows(site="output", module_path="head")
    assert list(zip(calls.step, calls.micro_step, calls.call, strict=True)) == [
        (step, micro, 0) for step in range(2) for micro in range(2)
    ]


def test_a_wrapper_that_comes_later_is_a_root_of_its_own_with_the_modules_that_are_new(
    cli: Cli, tmp_path: Path
) -> None:
    inner = Tiny()
    with flagged(tmp_path) as recording:
        train(inner)
        train(Wrapper(inner), lambda i: inner(batch(i)))
    assert [(root["name"], root["class"]) for root in recording.manifest["roots"]] == [
        ("model", "Tiny"),
        ("model_1", "Wrapper"),
    ]
    rows = recording.rows(site="output")
    assert set(zip(rows.root, rows.module_path, strict=True)) == {
        *(("model", path) for path in ("", "first", "act", "second")),
        *(("model_1", path) for path in ("", "base_model", "head")),
    }
    assert list(rows[(rows.module_path == "first") & (rows["mode"] == "train")].step) == [*range(6)]
    doctor = cli("doctor", recording.folder, "--strict")
    assert doctor.exit_code == 0, doctor.out
    assert "root model: Tiny, 4 modules" in doctor.out and "root model_1: Wrapper, 3 modules" in doctor.out


def test_what_only_holds_a_model_and_is_trained_in_part_is_no_model_around_it(tmp_path: Path) -> None:
    inner = Tiny()
    held = nn.Sequential(inner, nn.Linear(2, 2))
    with flagged(tmp_path) as recording:
        train(inner)
    (root,) = recording.manifest["roots"]
    assert root["class"] == "Tiny" and len(held) == 2


def test_a_model_whose_parts_are_called_is_one_root_also_if_an_optimizer_lacks_a_part(tmp_path: Path) -> None:
    """As the training_step of a LightningModule calls them."""
    model = nn.ModuleDict({"trunk": nn.Linear(4, 4), "head": nn.Linear(4, 2), "lost": nn.Linear(4, 2)})
    with flagged(tmp_path) as recording:
        optimizer = torch.optim.SGD([*model["trunk"].parameters(), *model["head"].parameters()], lr=0.1)
        for _ in range(3):
            trunk = model["trunk"](batch())
            (model["head"](trunk).sum() + model["lost"](trunk).sum()).backward()
            optimizer.step()
    (root,) = recording.manifest["roots"]
    assert root["class"] == "ModuleDict"
    assert set(recording.rows(site="output").module_path) == {"trunk", "head", "lost"}


def test_a_module_that_two_models_share_has_one_path(tmp_path: Path) -> None:
    inner = Tiny()
    first, second = Wrapper(inner), nn.Sequential(inner, nn.Linear(2, 2))
    with flagged(tmp_path) as recording:
        optimizer = torch.optim.SGD([*{*first.parameters(), *second.parameters()}], lr=0.1)
        for model in (first, second, first):
            model(batch()).sum().backward()
            optimizer.step()
    found = recording.rows(site="output")
    assert set(found[found.root == "model_1"].module_path) == {"", "1"}
    assert list(found[found.module_path == "base_model.model.first"].step) == [0, 1, 2]


def test_an_attached_wrapper_leaves_the_paths_of_an_attached_model(tmp_path: Path) -> None:
    model = Wrapper(inner := Tiny())
    with (
        recorder.attach(inner, enabled=True, dir=tmp_path, name="inner"),
        recorder.attach(model, enabled=True, name="outer"),
    ):
        train(model)
    rows = recorder.open_run(tmp_path).to_pandas()
    rows = rows[rows.site == "output"]
    assert set(rows[rows.root == "outer"].module_path) == {"", "base_model", "head"}
    assert set(rows[rows.root == "inner"].module_path) == {"first", "act", "second"}
