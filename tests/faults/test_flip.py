"""A sample of the campaign of flips; `python -m tests.campaigns flip` does 20,000, `--every` a bit of each byte."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from recorder.format import integrity
from recorder.read import shard
from tests.campaigns.fuzz.flip import Flips, flip

NUM_FLIPS = 150
NUM_BYTES = 200


@pytest.fixture(scope="module")
def flips(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Flips]:
    yield Flips(tmp_path_factory.mktemp("flips"), seed=1)


def test_a_damaged_byte_gives_no_wrong_value_and_is_never_silent(flips: Flips) -> None:
    found = [verdict.finding for verdict in flip(flips, range(NUM_FLIPS)) if verdict.finding]
    assert not found, found[0]


def test_no_byte_of_a_sealed_file_can_change_without_verify_saying_so(flips: Flips) -> None:
    chosen = random.Random(0).sample(range(flips.num_bytes), NUM_BYTES)
    found = [finding for finding in map(flips.check_byte, chosen) if finding]
    assert not found, found[0]


def test_every_kind_of_file_is_damaged(flips: Flips) -> None:
    wanted = {
        "_run.json",
        "_writer.json",
        "stats.arrow",
        "stats.open",
        "tensors.arrow",
        "tensors.index",
        "tensors.open",
    }
    assert set(flips.kinds()) == wanted


def test_the_campaign_sees_what_a_reader_without_checksums_gives(flips: Flips, monkeypatch: pytest.MonkeyPatch) -> None:
    def unchecked(batch: Any, metadata: Mapping[Any, Any], *, where: str, **_: object) -> integrity.BatchHeader:
        return integrity._header(integrity._parse(metadata, where), where)

    monkeypatch.setattr(shard, "check_batch", unchecked)
    found = [flips.check(case) for case in range(80)]
    assert any(text.startswith("WRONG VALUE") for text in found)
