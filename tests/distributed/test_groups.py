"""The manifest says which ranks share a root's batch, in their order, whatever wrapper does it."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.rigs import jobs
from tests.rigs.capturing import Tiny, batch, flagged
from tests.rigs.jobs import SCRIPTS, Finished

from .conftest import Train

WORLD = [0, 1, 2, 3]
EXPECTED: dict[str, tuple[str, list[list[int]]]] = {
    "ddp": ("ddp", [WORLD] * 4),
    "ddp_of_two": ("ddp", [[0, 2], [1, 3], [0, 2], [1, 3]]),
    "ddp_joined": ("ddp", [WORLD] * 4),
    "ddp_inside": ("ddp", [WORLD] * 4),
    "evaluated_inside_ddp": ("ddp", [WORLD] * 4),
    "wrapped_after_attach": ("ddp", [WORLD] * 4),
    "fsdp1": ("fsdp1", [WORLD] * 4),
    "fsdp1_hybrid_of_mesh": ("fsdp1", [WORLD] * 4),
    "fsdp1_hybrid_of_groups": ("fsdp1", [[0, 2, 1, 3]] * 4),
    "fsdp2": ("fsdp2", [WORLD] * 4),
    "fsdp2_inside": ("fsdp2", [WORLD] * 4),
    "fsdp2_of_larger_mesh": ("fsdp2", [[0, 2], [1, 3], [0, 2], [1, 3]]),
    "hsdp": ("fsdp2", [WORLD] * 4),
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    folder = tmp_path_factory.mktemp("groups")
    return jobs.succeeded(jobs.ranks(folder, SCRIPTS / "groups.py", num=4))


def facts(finished: Finished, name: str) -> list[Any]:
    roots = [{root["name"]: root for root in writer.manifest.members["roots"]} for writer in finished.run.writers]
    return [by_name[name].get("data_parallel") for by_name in roots]


@pytest.mark.parametrize("name", EXPECTED)
def test_ranks_stand_in_data_parallel_order(finished: Finished, name: str) -> None:
    kind, ranks = EXPECTED[name]
    more = {"broadcast_buffers": name != "ddp_of_two"} if kind == "ddp" else {}
    more |= {"joins": True} if name == "ddp_joined" else {}
    assert facts(finished, name) == [{"kind": kind, "ranks": expected} | more for expected in ranks]


def test_a_model_without_a_wrapper_says_nothing(finished: Finished) -> None:
    assert facts(finished, "plain") == [None] * 4


def test_an_object_of_the_program_outlives_the_search_for_wrappers_no_longer_than_without_it(tmp_path: Path) -> None:
    """The search looks at all live objects."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    gc.disable()
    try:
        model, bystander = Tiny(), Tiny()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with flagged(tmp_path) as recording:
            model(batch()).sum().backward()
        dropped = weakref.ref(bystander)
        del bystander
        assert dropped() is None
    finally:
        gc.enable()
        dist.destroy_process_group()
    assert recording.rows(site="output", module_path="").step.tolist() == [0]
    del optimizer


@pytest.mark.parametrize(("layout", "kind"), [("ddp", "ddp"), ("fsdp1", "fsdp1"), ("fsdp2", "fsdp2")])
def test_training_under_the_flag_says_it_too(train: Train, layout: str, kind: str) -> None:
    """Rank 0 of the ddp job also evaluates the inner model by itself."""
    for writer in train(layout, "everything", "--watch").run.writers:
        (root,) = writer.manifest.members["roots"]
        more = {"broadcast_buffers": True} if kind == "ddp" else {}
        assert root["data_parallel"] == {"kind": kind, "ranks": [0, 1]} | more


def test_a_single_process_says_nothing(train: Train) -> None:
    ((root,),) = [writer.manifest.members["roots"] for writer in train("plain", "everything", "--watch").run.writers]
    assert "data_parallel" not in root
