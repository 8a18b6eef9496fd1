"""A sample of `python -m tests.campaigns unseen`: a convolutional and recurrent model under another optimizer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.campaigns.diff import unseen

pytestmark = pytest.mark.usefixtures("read_once")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("unseen")


@pytest.mark.parametrize("name", ["norm_groups", "clamped"])
def test_an_error_of_another_model_is_named(folder: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert unseen.show_error(folder, name) == 0, capsys.readouterr().out


def test_of_a_sound_pair_under_autocast_nothing_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert unseen.show_pair(folder, "one-nadam-bf16", "ddp-nadam-bf16") == 0, capsys.readouterr().out
