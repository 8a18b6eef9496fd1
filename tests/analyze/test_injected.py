"""Real trainings with one silent error: `diff` names its module and its phase, and nothing in a sound one."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from recorder.analyze.diff import Diff, diff

from . import injected


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All trainings, forked from one process."""
    folder = tmp_path_factory.mktemp("injected")
    injected.record(folder, list(injected.ERRORS))
    return folder


@pytest.mark.parametrize("name", injected.ERRORS)
def test_an_error_is_named(folder: Path, name: str) -> None:
    verdict = injected.judge(injected.compared(folder, name), injected.ERRORS[name])
    assert verdict.word == "correctly", verdict


def test_a_repeat_names_nothing(folder: Path) -> None:
    found = diff(injected.opened(folder, "sound"), injected.opened(folder, "sound+again"))
    assert found.is_equal and found.culprits == []


def test_a_factor_is_told(folder: Path) -> None:
    def factor(found: Diff) -> float | None:
        return found.culprits[0].factor

    assert factor(injected.compared(folder, "doubled_loss")) == pytest.approx(2, rel=1e-3)
    assert factor(injected.compared(folder, "gradient_scaled_on_one_rank")) == pytest.approx(3, rel=1e-3)


def test_the_command_says_it_on_top_in_one_line_and_as_json(folder: Path) -> None:
    runs = [str(injected.opened(folder, name).path) for name in ("sound", "dropout_seed")]
    command = [sys.executable, "-m", "recorder", "diff", *runs]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60)
    lines = said.stdout.splitlines()
    assert said.returncode == 1
    assert re.fullmatch(r"culprit: step 0, forward of 'drop', rank 1: output differs by up to .*", lines[2])
    assert lines[3].startswith("first difference: ")
    as_json = subprocess.run([*command, "--json", "--limit", "1"], capture_output=True, text=True, timeout=60)
    (culprit,) = json.loads(as_json.stdout)["culprits"]
    told = {"step": 0, "module_path": "drop", "site": "output", "phase": "forward", "rank": 1}
    assert told.items() <= culprit.items() and culprit["max_abs"] > 0
