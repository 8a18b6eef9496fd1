"""`check` over trainings, a sample of `python -m tests.campaigns check`: quiet on sound ones, right on faults."""

from __future__ import annotations

from pathlib import Path

import pytest

import recorder
from recorder.checks.rule import Severity
from tests.campaigns.check.check import is_named, judged, loud, record, twins
from tests.campaigns.check.programs.cases import BASE, EXPECTED, FAULTS, FLAG_ALONE, SOUND

SOUND_ONES = ["mlp-adamw"]
FAULTY = ["zeroed_gradient", "one_layer_doubled"]
SOUND_BY_DEFAULT = ["scaler-skips", "norms-in-eval"]
FAULTY_BY_DEFAULT = [
    "large_gradient", "stuck_loader", "forgotten_block", "left_in_evaluation", "rounded_away", "empty_on_one_rank",
    "replica_apart_at_the_end", "never_cleared_in_ddp",
]  # fmt: skip
"""Faults that the default rules show, most of them between two steps of which they keep rows."""
EARLY = {
    *SOUND_BY_DEFAULT,
    "forgotten_block",
    "left_in_evaluation",
    "rounded_away",
    "empty_on_one_rank",
    "never_cleared_in_ddp",
}
"""Those that show in the first half of a training."""


def short(name: str) -> str:
    """The name of a training with as few steps as all rules need that judge one of 320 steps."""
    return f"{name}%120"


def by_default(name: str) -> str:
    return f"{FLAG_ALONE}{name}{'%160' if name in EARLY else ''}"


TWINS = [short(name) for name in twins("mlp-adamw")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trainings")
    defaults = [by_default(name) for name in (*SOUND_BY_DEFAULT, *FAULTY_BY_DEFAULT)]
    record(folder, [*map(short, (*SOUND_ONES, *FAULTY)), *TWINS, *defaults])
    return folder


@pytest.mark.parametrize("name", SOUND_ONES)
def test_nothing_above_a_note_is_said_of_a_sound_training(folder: Path, name: str) -> None:
    checked = judged(folder, short(name), TWINS if name == "mlp-adamw" else [])
    assert loud(checked) == []
    assert checked.num_judged >= 10


@pytest.mark.parametrize("name", FAULTY)
def test_a_fault_is_named_by_its_rule_at_its_module(folder: Path, name: str) -> None:
    wanted = EXPECTED[name]
    assert is_named(judged(folder, short(name), TWINS if wanted.needs_baseline else []), wanted)


@pytest.mark.parametrize("name", SOUND_BY_DEFAULT)
def test_nothing_is_said_of_a_sound_training_that_the_default_rules_recorded(folder: Path, name: str) -> None:
    assert loud(judged(folder, by_default(name), [])) == []


@pytest.mark.parametrize("name", FAULTY_BY_DEFAULT)
def test_the_default_rules_are_enough_to_name_a_fault_and_one_finding_is_the_cause(folder: Path, name: str) -> None:
    checked = judged(folder, by_default(name), [])
    causes = [one for one in checked.findings if not one.cause]
    assert is_named(checked._replace(findings=causes), EXPECTED[name])
    assert {one.rule for one in causes if one.severity > Severity.NOTE} == {EXPECTED[name].rule}


def test_a_replica_that_comes_apart_between_two_records_is_dated_by_the_probe(folder: Path) -> None:
    (one,) = judged(folder, f"{FLAG_ALONE}replica_apart_at_the_end", []).findings
    assert (one.rule, one.step, one.ranks) == ("replica", 313, (0, 1))
    assert one.detail == "by the probe, equal at step 312"
    answer = recorder.first(recorder.open_run(folder / f"{FLAG_ALONE}replica_apart_at_the_end" / "recordings"))
    assert answer.is_found and answer.replica is None and answer.replica_probed is not None
    assert (answer.replica_probed.step, answer.replica_probed.equal_step, answer.replica_probed.ranks) == (
        313,
        312,
        (0, 1),
    )


def test_the_campaign_expects_something_of_each_fault() -> None:
    assert EXPECTED.keys() == FAULTS.keys() and not FAULTS.keys() & SOUND.keys()
    assert set(BASE.values()) <= SOUND.keys()
