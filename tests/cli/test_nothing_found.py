"""Answers that nothing was found: each says among how many values, or that no value was judged."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import recorder
from tests.rigs.command_line import Cli

RULES = {
    "everything": "site=* keep=stats,fingerprint,probe",
    "scalars": "site=scalar keep=stats",
    "parameters": "site=param keep=stats",
    "one step": "site=output,param,grad steps=2 keep=stats",
    "fingerprints": "site=param,grad keep=fingerprint",
    "ring": "site=output keep=ring",
    "probe": "site=output keep=probe",
}
_CLAIMS = re.compile(r"\b(no|none|nothing)\b", re.IGNORECASE)
_GROUNDS = re.compile(r"[1-9]|judged|not compared|not looked at|is known")
"""The words that say what an answer is about: a number of values, or that nothing was judged, compared or looked at."""


@pytest.fixture(params=RULES)
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with recorder.attach(model, enabled=True, dir=str(tmp_path), rules=RULES[request.param]):
        for _ in range(4):
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    (folder,) = [path for path in tmp_path.iterdir() if path.is_dir()]
    return folder


@pytest.mark.parametrize("command", ["first", "check", "layouts", "verify", "doctor"])
def test_an_answer_that_nothing_was_found_says_among_what(cli: Cli, run: Path, command: str) -> None:
    found = cli(command, run)
    assert found.exit_code in (0, 1) and found.out
    claims = [line.replace(str(run), "") for line in found.out.splitlines() if _CLAIMS.search(line)]
    assert [line for line in claims if not _GROUNDS.search(line)] == []


@pytest.mark.parametrize("run", ["ring", "probe", "fingerprints"], indirect=True)
def test_rows_without_numbers_are_not_called_finite(cli: Cli, run: Path) -> None:
    found = cli("first", run)
    assert "no value was judged for NaN or infinity" in found.out and "no NaN" not in found.out


@pytest.mark.parametrize("run", ["ring"], indirect=True)
def test_a_run_of_no_rows_is_not_called_sound(cli: Cli, run: Path) -> None:
    verdict = next(line for line in cli("check", run).out.splitlines() if " rules judged " in line)
    assert ": nothing is known; " in verdict and verdict.endswith(" of no step")


@pytest.mark.parametrize("run", ["ring", "probe"], indirect=True)
def test_a_run_that_keeps_no_rows_by_its_rules_lacks_none(cli: Cli, run: Path) -> None:
    lines = cli("doctor", run).out.splitlines()
    assert [line for line in lines if line.startswith(f"missing {run.name}:")] == []


KILLED = """
import os, signal, torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(2, 4)).sum().backward()
optimizer.step()
model(torch.ones(2, 4)).sum().backward()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_run_that_was_killed_before_its_first_rows_were_on_disk_is_not_called_sound(cli: Cli, tmp_path: Path) -> None:
    env = os.environ | {"RECORDER": "1", "RECORDER_DIR": str(tmp_path / "runs"), "RECORDER_FLUSH_INTERVAL_S": "60"}
    subprocess.run([sys.executable, "-c", KILLED], env=env, check=False, capture_output=True, timeout=120)
    (why,) = recorder.open_run(tmp_path / "runs").endings
    assert why.endswith("its process ended before its first rows were on disk")
    codes = {"check": 1, "first": 1, "doctor": 1, "verify": 0, "show": 0, "stats": 2, "report": 2}
    for command, exit_code in codes.items():
        found = cli(command, tmp_path / "runs")
        told = found.out + found.err
        assert found.exit_code == exit_code and told.count(why) == 1, command
        unknown = ("RECORDER_RULES", "keep=probe)", "was called", "may be missing")  # no rules would have helped
        assert not any(word in told for word in unknown), command
        assert command != "check" or "nothing is known" in told
