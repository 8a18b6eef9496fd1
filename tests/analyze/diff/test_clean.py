"""Trainings without an error, under several layouts: `diff` names nothing. And what goes wrong later, it does."""

from __future__ import annotations

from pathlib import Path

import pytest

from recorder.analyze.diff.noise import BeyondNoise
from tests.campaigns.diff import clean, judging

DRIFTING, PLAIN = "drifting-float32", "adamw-float32"
SAMPLE = ((DRIFTING, "no_decay"), (DRIFTING, "scaled_loss"), (PLAIN, "scaled_gradient"))

pytestmark = pytest.mark.usefixtures("read_once")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trainings with AdamW, each forked from one process."""
    folder = tmp_path_factory.mktemp("clean")
    errors = [f"ddp-{kind}-0@{name}" for kind, name in SAMPLE]
    ones = [f"one-{kind}-0{end}" for kind in (DRIFTING, PLAIN) for end in ("", "+jitter=1")]
    clean.record(folder, [*ones, f"ddp-{DRIFTING}-0", *errors])
    return folder


def test_nothing_is_named_where_rounding_decided_the_sign_of_updates(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = f"one-{DRIFTING}-0", f"ddp-{DRIFTING}-0"
    found = judging.compared(folder, *pair)
    assert found.is_equal and found.culprits == [] and found.num_compared > 1000
    monkeypatch.setattr(BeyondNoise, "_follow", lambda *args: None)  # what the twin alone says
    assert judging.compared(folder, *pair).table.num_rows > 500


@pytest.mark.parametrize(("kind", "name"), SAMPLE)
def test_an_error_of_a_later_step_is_named(folder: Path, kind: str, name: str) -> None:
    found = judging.compared(folder, f"one-{kind}-0", f"ddp-{kind}-0@{name}")
    verdict = judging.judge(found, clean.LATER_ERRORS[name])
    assert verdict.word == "correctly", verdict
