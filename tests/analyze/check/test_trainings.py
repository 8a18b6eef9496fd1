"""`check` over trainings, a sample of `python -m tests.campaigns check`: quiet on sound ones, right on faults."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.campaigns.check.check import is_named, judged, loud, record, twins
from tests.campaigns.check.programs.cases import BASE, EXPECTED, FAULTS, SOUND

SOUND_ONES = ["mlp-adamw", "words"]
FAULTY = ["zeroed_gradient", "one_layer_doubled", "momentum_of_one"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trainings")
    record(folder, [*SOUND_ONES, *FAULTY, *twins("mlp-adamw")])
    return folder


@pytest.mark.parametrize("name", SOUND_ONES)
def test_nothing_above_a_note_is_said_of_a_sound_training(folder: Path, name: str) -> None:
    checked = judged(folder, name, twins(name) if name == "mlp-adamw" else [])
    assert loud(checked) == []
    assert checked.num_judged >= 10


@pytest.mark.parametrize("name", FAULTY)
def test_a_fault_is_named_by_its_rule_at_its_module(folder: Path, name: str) -> None:
    wanted = EXPECTED[name]
    assert is_named(judged(folder, name, twins(name) if wanted.needs_baseline else []), wanted)


def test_the_campaign_expects_something_of_each_fault() -> None:
    assert EXPECTED.keys() == FAULTS.keys() and not FAULTS.keys() & SOUND.keys()
    assert set(BASE.values()) <= SOUND.keys()
