"""Thresholds and rules of the user's, out of the file of `recorder check`, are triggers of the ring."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import recorder
from recorder.errors import ConfigError
from recorder.lifecycle.launch import prepare

FILE = """
[spike]
least = 8

[[rule]]
name = "loud"
site = "output"
statistic = "absmax"
above = 1000
"""


def test_a_spike_of_the_loss_and_a_rule_of_the_users_each_fire_a_dump(tmp_path: Path) -> None:
    (file := tmp_path / "check.toml").write_text(FILE)
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    rules = "site=output keep=ring,stats; site=scalar keep=stats"
    own: dict[str, Any] = {"triggers": "spike", "check_settings": str(file), "trigger_cooldown_s": 0}
    patient: dict[str, Any] = {"ring_hold_s": 60, "close_deadline_s": 60, "min_free_bytes": 0}
    with recorder.attach(model, enabled=True, dir=str(tmp_path), rules=rules, **own, **patient):
        for step in range(45):
            optimizer.zero_grad()
            is_loud = step == 33
            output = model(torch.randn(16, 8) * (1e5 if is_loud else 1))
            loss = (output * (1e-5 if is_loud else 1)).square().mean() * (1e3 if step == 20 else 1)
            loss.backward()
            optimizer.step()
            recorder.scalar("loss", loss.detach())
    run = recorder.open_run(tmp_path)
    assert {(dump.reason.split(":")[0], dump.first_step, dump.last_step) for dump in run.dumps} == {
        ("spike", 16, 22),
        ("loud", 29, 35),
    }
    kept = run.to_pandas().query("site == 'output' and payload_bytes > 0").step
    assert sorted(kept) == [*range(16, 23), *range(29, 36)]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (None, "cannot be read"),
        ("[spike", "is no TOML"),
        ("[spike]\nsigma = 3", "spike has no setting 'sigma' .did you mean 'sigmas'"),
        ('[[rule]]\nname = "loud"', "rule loud: statistic = None"),
    ],
)
def test_a_wrong_file_stops_a_launch_in_one_line(tmp_path: Path, text: str | None, why: str) -> None:
    file = tmp_path / "check.toml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=rf"check_settings \(argument\): {file}: .*{why}"):
        recorder.attach(torch.nn.Linear(2, 2), enabled=True, dir=str(tmp_path), check_settings=str(file))
    with pytest.raises(ConfigError, match=rf"check_settings \(environment\): {file}"):
        prepare(dict(os.environ) | {"RECORDER_CHECK_SETTINGS": str(file)}, ["train.py"])
    assert not list(tmp_path.glob("*/_run.json"))
