"""Training is not changed: the same jobs with and without the recorder, bit by bit, and not one collective more."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from .conftest import Train

LAYOUTS = ["plain", "ddp", "fsdp1", "fsdp1 orig", "fsdp2", "fsdp2 mixed"]
BY_DEFAULT = ["plain", "ddp", "fsdp1", "fsdp2"]
TWINS = [(layout, "everything") for layout in LAYOUTS] + [(layout, "default") for layout in BY_DEFAULT]


def twins(train: Train, layout: str, recorded: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """What both jobs saved, by rank. The default settings run without any hook of the script's own."""
    own_hooks = ("--watch",) if recorded != "default" else ()
    return list(zip(train(layout, "off", "--watch").saved, train(layout, recorded, *own_hooks).saved, strict=True))


def assert_same_bits(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    differing = [key for key in left if not torch.equal(left[key], right[key])]
    assert differing == []


@pytest.mark.parametrize(("layout", "recorded"), TWINS)
def test_final_parameters_are_bit_equal(train: Train, layout: str, recorded: str) -> None:
    for off, on in twins(train, layout, recorded):
        assert_same_bits(off["params"], on["params"])
        assert_same_bits(off["buffers"], on["buffers"])


@pytest.mark.parametrize(("layout", "recorded"), TWINS)
def test_every_loss_is_bit_equal(train: Train, layout: str, recorded: str) -> None:
    for off, on in twins(train, layout, recorded):
        assert len(off["losses"]) >= 6
        assert torch.equal(off["losses"], on["losses"])


@pytest.mark.parametrize(("layout", "recorded"), TWINS)
def test_random_generators_are_where_they_would_be(train: Train, layout: str, recorded: str) -> None:
    for off, on in twins(train, layout, recorded):
        assert torch.equal(off["rng"]["torch"], on["rng"]["torch"])
        assert off["rng"]["numpy"] == on["rng"]["numpy"]
        assert off["rng"]["python"] == on["rng"]["python"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_hooks_of_the_user_see_is_bit_equal(train: Train, layout: str) -> None:
    for off, on in twins(train, layout, "everything"):
        assert_same_bits(off["values"], on["values"])


@pytest.mark.parametrize("layout", ["ddp", "fsdp1", "fsdp1 orig", "fsdp2", "fsdp2 mixed"])
def test_not_one_collective_more_is_issued(train: Train, layout: str) -> None:
    for off, on in twins(train, layout, "everything"):
        assert off["collectives"]["sequence_numbers"][0] > 10
        assert on["collectives"]["sequence_numbers"] == off["collectives"]["sequence_numbers"]
        assert on["collectives"]["calls"] == off["collectives"]["calls"]
        assert on["collectives"]["by_recorder"] == []


def test_ranks_may_record_alone(train: Train) -> None:
    off, on = train("fsdp2", "off", "--watch"), train("fsdp2", "rank 0", "--watch")
    for without, recorded in zip(off.saved, on.saved, strict=True):
        assert_same_bits(without["params"], recorded["params"])
        assert recorded["collectives"] == without["collectives"]
        assert recorded["seconds"] < 10
    rows = on.run.to_pandas()
    assert set(rows["rank"]) == {0}
    assert len(rows) == len(on.saved[0]["values"])


def test_an_error_in_every_hook_of_one_rank_delays_and_changes_nothing(train: Train) -> None:
    off, failing = train("ddp", "off", "--watch"), train("ddp", "everything", "--watch", "--fail-hooks-on-rank=1")
    for without, recorded in zip(off.saved, failing.saved, strict=True):
        assert_same_bits(without["params"], recorded["params"])
        assert recorded["seconds"] < 10
    sound, broken = failing.run.writers
    assert sound.balance.written == sound.balance.observed == len(failing.saved[0]["values"])
    assert broken.balance.written == 0
    assert broken.balance.dropped == {"hook_error": broken.balance.observed}
    assert len(failing.lines("recording", "failed: MemoryError: on purpose")) > 0


def test_without_the_flag_the_package_is_not_even_imported(train: Train) -> None:
    assert [saved["recorder_is_loaded"] for saved in train("ddp", "off", "--watch").saved] == [False, False]
    assert [saved["recorder_is_loaded"] for saved in train("ddp", "default").saved] == [True, True]
