"""Models that change under a recording, and copies of recorded models: recorded once, rightly, and never broken."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import recorder
from tests.rigs.capturing import Recording, Tiny, batch, flagged

RULES = "site=output,grad,param keep=tensor"


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int = 0) -> torch.Tensor:
    y: torch.Tensor = model(batch(seed))
    y.square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return y.detach()


def outputs(recording: Recording, path: str) -> list[int]:
    """The steps at which a module's output was recorded, once each call."""
    rows = recording.rows(site="output", module_path=path)
    return [int(number) for number in rows["step"]]


def assert_balanced(recording: Recording) -> None:
    ledger = recording.manifest["ledger"]
    assert ledger["observed"] == ledger["written"] == len(recording.rows())
    assert ledger["dropped"] == {}


def test_a_module_that_is_added_is_recorded_once_it_is_trained(tmp_path: Path) -> None:
    with flagged(tmp_path, RULES) as recording:
        model = nn.Sequential(nn.Linear(4, 4))
        step(model, torch.optim.SGD(model.parameters(), lr=0.1))
        model.append(nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            step(model, optimizer)
    assert_balanced(recording)
    assert outputs(recording, "0") == [0, 1, 2, 3]
    assert outputs(recording, "1")[-2:] == [2, 3]
    assert set(recording.rows(site="grad", module_path="1")["step"]) >= {2, 3}


def test_a_module_that_is_removed_leaves_its_rows_and_no_hook(tmp_path: Path) -> None:
    with flagged(tmp_path, RULES) as recording:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step(model, optimizer)
        removed = model[1]
        del model[1]
        for _ in range(2):
            step(model, optimizer)
        removed(torch.ones(1, 4))
    assert_balanced(recording)
    assert outputs(recording, "0") == [0, 1, 2]
    assert removed._forward_hooks == {}
    assert set(recording.rows(site="output", module_path="1")["step"]) <= {0, 2}


def test_a_head_that_is_replaced_is_recorded_under_the_same_path(tmp_path: Path) -> None:
    with flagged(tmp_path, RULES) as recording:
        model = Tiny()
        step(model, torch.optim.SGD(model.parameters(), lr=0.1))
        model.second = nn.Linear(8, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        shown = [step(model, optimizer) for _ in range(3)]
    assert_balanced(recording)
    assert outputs(recording, "second")[-2:] == [2, 3]
    for number in (2, 3):
        assert torch.equal(torch.from_numpy(recording.array("second", step=number)), shown[number - 1])
    assert set(recording.rows(site="grad", module_path="second", name="bias")["shape"]) == {"[2]", "[3]"}


def test_frozen_and_thawed_parameters_have_gradients_when_they_are_trained(tmp_path: Path) -> None:
    with flagged(tmp_path, RULES) as recording:
        model = Tiny()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for is_trained in (True, False, False, True):
            model.first.requires_grad_(is_trained)
            step(model, optimizer)
    assert_balanced(recording)
    assert list(recording.rows(site="grad", module_path="first", name="weight")["step"]) == [0, 3]
    assert list(recording.rows(site="grad", module_path="second", name="weight")["step"]) == [0, 1, 2, 3]


def test_a_parameter_that_is_exchanged_is_the_one_that_is_recorded(tmp_path: Path) -> None:
    with flagged(tmp_path, RULES) as recording:
        model = Tiny()
        step(model, torch.optim.SGD(model.parameters(), lr=0.1))
        model.second.weight = nn.Parameter(torch.full((2, 8), 7.0))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        step(model, optimizer)
        step(model, optimizer)
    assert_balanced(recording)
    kept = recording.array("second", step=2, site="param", name="weight")  # the step after its first update at latest
    assert (kept == 7.0).all()


def test_a_parameter_that_is_exchanged_after_the_steps_look_is_found_at_the_next(tmp_path: Path) -> None:
    with flagged(tmp_path, RULES) as recording:
        model = Tiny()
        other = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)  # of no module: looked for after each step
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step(model, optimizer)
        model.second.weight = nn.Parameter(torch.full((2, 8), 7.0))
        optimizer.param_groups[0]["params"] = list(model.parameters())
        for _ in range(3):
            step(model, optimizer)
    del other
    steps = set(recording.rows(site="param", module_path="second", name="weight")["step"])
    assert steps >= {0, 2, 3}, "all but the step of its first update at most"


@pytest.mark.parametrize("kind", ["deepcopy", "ema", "swa", "pickle", "save"])
def test_copies_of_a_recorded_model_work_and_are_not_recorded_twice(tmp_path: Path, kind: str) -> None:
    with flagged(tmp_path, RULES) as recording:
        model = Tiny()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step(model, optimizer)
        twin: nn.Module
        if kind == "deepcopy":
            twin = copy.deepcopy(model)
        elif kind == "pickle":
            twin = pickle.loads(pickle.dumps(model))
        elif kind == "save":
            buffer = io.BytesIO()
            torch.save(model, buffer)
            buffer.seek(0)
            twin = torch.load(buffer, weights_only=False)
        else:
            average = get_ema_multi_avg_fn(0.9) if kind == "ema" else None
            twin = AveragedModel(model, multi_avg_fn=average)
        for _ in range(3):
            if isinstance(twin, AveragedModel):
                twin.update_parameters(model)
            with torch.no_grad():
                assert twin(batch()).shape == (3, 2)
            step(model, optimizer)
    assert_balanced(recording)
    assert outputs(recording, "second") == [0, 1, 2, 3]
    assert {root["name"] for root in recording.manifest["roots"]} == {"model"}


def test_the_state_of_an_attached_model_is_that_of_a_plain_one(tmp_path: Path) -> None:
    with flagged(tmp_path, RULES):
        model, plain = Tiny(), Tiny()
        step(model, torch.optim.SGD(model.parameters(), lr=0.1))
        assert list(model.state_dict()) == list(plain.state_dict())
        assert plain.load_state_dict(model.state_dict()).missing_keys == []
        model.load_state_dict(plain.state_dict())
        assert [name for name, _ in model.named_modules()] == [name for name, _ in plain.named_modules()]
        assert set(vars(model)) == set(vars(plain))


def test_a_copy_that_is_attached_is_recorded_as_itself(tmp_path: Path) -> None:
    model = Tiny()
    with recorder.attach(model, enabled=True, rules=RULES, dir=tmp_path) as first:
        step(model, torch.optim.SGD(model.parameters(), lr=0.1))
        twin = copy.deepcopy(model)
        with recorder.attach(twin, enabled=True):
            twin(batch())
            model(batch())
        assert first.flush()
        twin(batch())
    frame = recorder.open_run(tmp_path).to_pandas()
    rows = frame[(frame["site"] == "output") & (frame["module_path"] == "second")]
    assert sorted(rows["root"]) == ["model", "model", "model_1"]
