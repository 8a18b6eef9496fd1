"""Training is not changed: the same jobs with and without the recorder, bit by bit, and not one collective more."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.rigs import jobs
from tests.rigs.jobs import SCRIPTS

from .conftest import OPTIONS, Train

LAYOUTS = ["plain", "ddp", "fsdp1", "fsdp1 orig", "fsdp2", "fsdp2 mixed"]
# By default less is recorded, in the same way: one layout says that, the others when they are asked for.
TWINS = [
    *((layout, "everything") for layout in LAYOUTS),
    ("plain", "default"),
    *(pytest.param(layout, "default", marks=pytest.mark.slow) for layout in ("ddp", "fsdp1", "fsdp2")),
]
Saved = list[dict[str, Any]]
"""What `scripts/train.py` saved, by rank."""
Twins = Callable[[str, str], list[tuple[dict[str, Any], dict[str, Any]]]]


@pytest.fixture(scope="module")
def off(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Saved]:
    """Every layout without the recorder, one after the other in the same two processes."""
    folder = tmp_path_factory.mktemp("off")
    cases = [
        "|".join((str(jobs.free_port()), *OPTIONS[layout], "--watch", f"--out={folder / layout}")) for layout in LAYOUTS
    ]
    jobs.succeeded(jobs.torchrun(folder, SCRIPTS / "twins.py", *cases))
    return {layout: _saved(folder / layout) for layout in LAYOUTS}


def _saved(folder: Path) -> Saved:
    return [torch.load(path, weights_only=False) for path in sorted(folder.glob("rank*.pt"))]


@pytest.fixture
def twins(train: Train, off: dict[str, Saved]) -> Twins:
    """What both jobs saved, by rank. The default settings run without any hook of the script's own."""

    def twins(layout: str, recorded: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        own_hooks = ("--watch",) if recorded != "default" else ()
        return list(zip(off[layout], train(layout, recorded, *own_hooks).saved, strict=True))

    return twins


def assert_same_bits(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    differing = [key for key in left if not torch.equal(left[key], right[key])]
    assert differing == []


@pytest.mark.parametrize(("layout", "recorded"), TWINS)
def test_final_parameters_are_bit_equal(twins: Twins, layout: str, recorded: str) -> None:
    for without, on in twins(layout, recorded):
        assert_same_bits(without["params"], on["params"])
        assert_same_bits(without["buffers"], on["buffers"])


@pytest.mark.parametrize(("layout", "recorded"), TWINS)
def test_every_loss_is_bit_equal(twins: Twins, layout: str, recorded: str) -> None:
    for without, on in twins(layout, recorded):
        assert len(without["losses"]) >= 6
        assert torch.equal(without["losses"], on["losses"])


@pytest.mark.parametrize(("layout", "recorded"), TWINS)
def test_random_generators_are_where_they_would_be(twins: Twins, layout: str, recorded: str) -> None:
    for without, on in twins(layout, recorded):
        assert torch.equal(without["rng"]["torch"], on["rng"]["torch"])
        assert without["rng"]["numpy"] == on["rng"]["numpy"]
        assert without["rng"]["python"] == on["rng"]["python"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_hooks_of_the_user_see_is_bit_equal(twins: Twins, layout: str) -> None:
    for without, on in twins(layout, "everything"):
        assert_same_bits(without["values"], on["values"])


@pytest.mark.parametrize("layout", ["ddp", "fsdp1", "fsdp1 orig", "fsdp2", "fsdp2 mixed"])
def test_not_one_collective_more_is_issued(twins: Twins, layout: str) -> None:
    for without, on in twins(layout, "everything"):
        assert without["collectives"]["sequence_numbers"][0] > 10
        assert on["collectives"]["sequence_numbers"] == without["collectives"]["sequence_numbers"]
        assert on["collectives"]["calls"] == without["collectives"]["calls"]
        assert on["collectives"]["by_recorder"] == []


def test_ranks_may_record_alone(train: Train, off: dict[str, Saved]) -> None:
    on = train("fsdp2", "rank 0", "--watch")
    for without, recorded in zip(off["fsdp2"], on.saved, strict=True):
        assert_same_bits(without["params"], recorded["params"])
        assert recorded["collectives"] == without["collectives"]
        assert recorded["seconds"] < 10
    rows = on.run.to_pandas()
    assert set(rows["rank"]) == {0}
    assert len(rows) == len(on.saved[0]["values"])


def test_an_error_in_every_hook_of_one_rank_delays_and_changes_nothing(train: Train, off: dict[str, Saved]) -> None:
    failing = train("ddp", "everything", "--watch", "--fail-hooks-on-rank=1")
    for without, recorded in zip(off["ddp"], failing.saved, strict=True):
        assert_same_bits(without["params"], recorded["params"])
        assert recorded["seconds"] < 10
    sound, broken = failing.run.writers
    assert sound.balance.written == sound.balance.observed == len(failing.saved[0]["values"])
    assert broken.balance.written == 0
    assert broken.balance.dropped == {"no_memory": broken.balance.observed}
    assert len(failing.lines("recording", "failed: MemoryError: on purpose")) > 0


def test_without_the_flag_the_package_is_not_even_imported(train: Train, off: dict[str, Saved]) -> None:
    assert [saved["recorder_is_loaded"] for saved in off["ddp"]] == [False, False]
    assert [saved["recorder_is_loaded"] for saved in train("ddp", "everything", "--watch").saved] == [True, True]
