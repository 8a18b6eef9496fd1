"""Experts of each rank's own: the global view has the rest as one process has it, and never joins theirs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import recorder
from recorder.errors import LookupFailedError
from recorder.merge.merge import merge_run
from tests.campaigns.roundtrip.meshes import EXPERTS, EXPERTS_SCRIPT, STATE, compare, of_experts, train

LAYOUTS = EXPERTS[2]


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("experts"), 2, LAYOUTS, EXPERTS_SCRIPT)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_not_an_experts_is_as_in_one_process(out: Path, layout: str) -> None:
    """With the experts themselves, where their pieces say what they are pieces of."""
    values, own = of_experts(out, 2, layout)
    assert any(key[1] == "moe.experts" and key[0] in STATE and key not in own for key in values)
    assert compare(recorder.open_run(out / layout), values).problems == []


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_an_experts_stays_with_its_rank(out: Path, layout: str) -> None:
    run = recorder.open_run(out / layout)
    _, own = of_experts(out, 2, layout)
    assert {key[0] for key in own} >= {"input", "output", "grad_input", "grad_output"}
    for (site, path, name, step), whole in own.items():
        phase = "backward" if site.startswith("grad_") else None
        question = {"site": site, "name": name, "step": step} | ({"phase": phase} if phase else {})
        with pytest.raises(LookupFailedError, match=r"rank's own|of its own"):
            run.tensor(path, **question)
        for rank, expected in enumerate(whole.chunk(2)):
            found = run.tensor(path, **question, rank=rank)
            if site in STATE:
                torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
            else:
                assert found.shape == expected.shape


@pytest.mark.parametrize("layout", LAYOUTS)
def test_experts_are_no_replicas(out: Path, layout: str) -> None:
    found = recorder.first(recorder.open_run(out / layout))
    assert not found.is_found and found.num_compared
    own = "left out: 4 parameters, gradients and states that each rank has for itself"
    expected = [] if layout.startswith("dtensor") else [own]
    assert [note.partition(", as experts")[0] for note in found.notes] == expected


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_merged_run_keeps_them_apart(out: Path, layout: str, tmp_path: Path) -> None:
    merge_run(recorder.open_run(out / layout), tmp_path / "merged")
    assert not recorder.first(recorder.open_run(tmp_path / "merged")).is_found


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [4, 8])
def test_more_ranks_have_the_values_of_one_process(tmp_path: Path, num_ranks: int) -> None:
    out = train(tmp_path, num_ranks, EXPERTS[num_ranks], EXPERTS_SCRIPT)
    for layout in EXPERTS[num_ranks]:
        values, own = of_experts(out, num_ranks, layout)
        run = recorder.open_run(out / layout)
        assert own and compare(run, values).problems == [] and not recorder.first(run).is_found
