"""The callback that Lightning's Trainer gets from the recorder. A package made by hand stands for Lightning here."""

from __future__ import annotations

import copy
import importlib
import pickle
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import recorder

autoload: Any = importlib.import_module("recorder_autoload")


class Callback:
    """The base of Lightning's callbacks, as far as the recorder's needs it."""

    def on_train_start(self, trainer: Any, module: Any) -> None: ...


class OtherCallback(Callback):
    """The base in the package ``pytorch_lightning``, which Lightning's own code does not know."""


@pytest.fixture(autouse=True)
def packages(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, base in (("lightning.pytorch", Callback), ("pytorch_lightning", OtherCallback)):
        made: Any = ModuleType(name)
        made.Callback = base
        monkeypatch.setitem(sys.modules, name.partition(".")[0], made)
        monkeypatch.setitem(sys.modules, name, made)


def trainer(metrics: Any, *, is_sanity_check: bool = False) -> Any:
    return SimpleNamespace(sanity_checking=is_sanity_check, callback_metrics=metrics)


def test_validation_losses_that_lightning_logs_are_scalars(tmp_path: Path) -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recorder.attach(model, enabled=True, dir=str(tmp_path), rules="site=scalar keep=stats"):
        (callback,) = autoload.lightning()
        callback.on_validation_end(trainer({"val_loss": torch.tensor(9.0)}, is_sanity_check=True), model)
        for step in range(3):
            model(torch.ones(3, 4)).sum().backward()
            optimizer.step()
            metrics = {"val_loss": torch.tensor(float(step)), "val_acc": torch.tensor(0.5), "train_loss": 3.0}
            callback.on_validation_end(trainer(metrics | {"valid/loss/dataloader_idx_1": 7.0}), model)
        callback.on_validation_end(SimpleNamespace(), model)  # another version may lack the attributes
    frame: Any = recorder.open_run(tmp_path).to_pandas(columns=["step", "name", "mean"])
    by_name = {name: rows["mean"].tolist() for name, rows in frame.groupby("name")}
    assert by_name["val_loss"] == [0.0, 1.0, 2.0] and by_name["valid/loss/dataloader_idx_1"] == [7.0] * 3
    assert not {"val_acc", "train_loss"} & set(by_name)


def test_each_package_gets_its_own_kind_of_callback_also_by_copies_and_in_other_processes() -> None:
    (one,), (other,) = autoload.lightning(), autoload.pytorch_lightning()
    assert not isinstance(one, OtherCallback) and isinstance(other, OtherCallback)
    for made in (copy.deepcopy(other), pickle.loads(pickle.dumps(other))):
        assert isinstance(made, OtherCallback) and type(made).__name__ == "ValidationLosses"


def test_without_a_recorder_or_where_the_package_is_another_there_is_no_callback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "lightning.pytorch", ModuleType("lightning.pytorch"))
    assert autoload.lightning() == [] and "no attribute" in capsys.readouterr().err
    monkeypatch.delitem(sys.modules, "recorder.lifecycle.active")
    assert autoload.pytorch_lightning() == []
