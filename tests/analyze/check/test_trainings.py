"""`check` over trainings, a sample of `python -m scripts.campaigns check`: quiet on sound ones, right on faults."""

from __future__ import annotations

from pathlib import Path

import pytest

import recorder
from recorder.analyze.check.check import check
from recorder.checks.rule import Severity
from scripts.campaigns.check.check import EXPECTED, is_named, record
from scripts.campaigns.check.programs.train import FAULTS, SOUND

SOUND_ONES = ["words", "images-sgd"]
FAULTY = ["zeroed_gradient", "dead_first", "momentum_of_one", "odd_rank"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trainings")
    record(folder, [*SOUND_ONES, *FAULTY])
    return folder


@pytest.mark.parametrize("name", SOUND_ONES)
def test_nothing_above_a_note_is_said_of_a_sound_training(folder: Path, name: str) -> None:
    checked = check(recorder.open_run(folder / name / "recordings"))
    assert [one for one in checked.findings if one.severity > Severity.NOTE] == []
    assert checked.num_judged >= 10


@pytest.mark.parametrize("name", FAULTY)
def test_a_fault_is_named_by_its_rule_at_its_module(folder: Path, name: str) -> None:
    assert is_named(check(recorder.open_run(folder / name / "recordings")), EXPECTED[name])


def test_the_campaign_expects_something_of_each_fault() -> None:
    assert EXPECTED.keys() == FAULTS.keys() and not FAULTS.keys() & SOUND.keys()
