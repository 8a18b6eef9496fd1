"""Layers and experts that each rank numbers from 0 stand under the names that they have in the whole model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import recorder
from recorder.analyze.check.check import check
from recorder.analyze.first.first import first
from recorder.analyze.layouts import layouts
from recorder.merge.merge import merge_run
from tests.rigs import jobs
from tests.rigs.jobs import SCRIPTS

OF_ONE = ("whole", "whole_recompute", "whole_grouped")
OF_TWO = ("dp", "ep", "pp", "pp_recompute", "vpp", "ep_grouped")
OF_FOUR = ("ep_four", "pp_ep", "ep_forgot", "pp_ep_grouped", "ep_four_grouped")
SOUND = ("dp", "ep", "pp", "vpp", "ep_four", "pp_ep")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, recorder.Run]:
    folder = tmp_path_factory.mktemp("numbered")
    for num, names in ((1, OF_ONE), (2, OF_TWO), (4, OF_FOUR)):
        jobs.succeeded(jobs.ranks(folder, SCRIPTS / "numbered.py", *names, num=num))
    return {name: recorder.open_run(folder / name) for name in (*OF_ONE, *OF_TWO, *OF_FOUR)}


@pytest.mark.parametrize("name", SOUND)
def test_the_ranks_are_the_one_process_that_has_the_whole_model(runs: dict[str, recorder.Run], name: str) -> None:
    """All but what experts are given and give: 556 values, among them the router's, whose rows lie sequence first."""
    found = recorder.diff(runs["whole"], runs[name], rtol=1e-9, atol=1e-12)
    assert (found.verdict, found.num_compared) == ("equal", 556)
    assert not first(runs[name]).is_found and layouts(runs[name]).contradiction is None
    assert not check(runs[name]).findings


def test_a_recomputed_layer_is_of_the_micro_batch_that_goes_back(runs: dict[str, recorder.Run]) -> None:
    found = recorder.diff(runs["whole_recompute"], runs["pp_recompute"], rtol=1e-9, atol=1e-12)
    assert found.verdict == "equal" and found.num_compared > 460


@pytest.mark.parametrize("name", ["pp", "vpp"])
def test_a_parameter_that_a_stage_gives_has_the_gradient_of_each_micro_batch(
    runs: dict[str, recorder.Run], name: str
) -> None:
    """Hooks of all micro-batches under way are on the one bias, and the first gradient is none of the second's."""
    path = "decoder.layers.3.proj"
    bias: dict[str, Any] = {"site": "grad_output", "name": "1", "step": 1}
    of_each = [runs[name].array(path, **bias, micro_step=number) for number in range(2)]
    assert abs(of_each[0] - of_each[1]).max() > 1e-6
    assert abs(sum(of_each) - runs["whole"].array(path, **bias)).max() < 1e-12


def test_parameters_stand_under_the_names_of_the_whole_model(runs: dict[str, recorder.Run], tmp_path: Path) -> None:
    whole = {path for _, path in runs["whole"].modules if "local_experts." in path}
    assert len(whole) == 16
    for name in ("ep", "vpp", "pp_ep"):
        report = merge_run(runs[name], tmp_path / name)
        assert report.num_problems == 0
        merged = recorder.open_run(tmp_path / name)
        assert {path for _, path in merged.modules if "local_experts." in path} == whole
        path = "decoder.layers.3.mlp.experts.local_experts.2"
        one, other = (run.array(path, site="param", name="weight", step=1) for run in (runs["whole"], merged))
        assert abs(one - other).max() < 1e-12


@pytest.mark.parametrize("name", ["ep_grouped", "ep_four_grouped", "pp_ep_grouped"])
def test_parameters_of_grouped_experts_have_the_numbers_of_the_whole_model(
    runs: dict[str, recorder.Run], name: str
) -> None:
    found = recorder.diff(runs["whole_grouped"], runs[name], rtol=1e-9, atol=1e-12)
    assert (found.verdict, found.num_compared) == ("equal", 460)
    assert not first(runs[name]).is_found and layouts(runs[name]).contradiction is None
    assert not check(runs[name]).findings
    weight: dict[str, Any] = {"site": "param", "name": "weight3", "step": 1}
    path = "decoder.layers.3.mlp.experts.linear_fc1"
    assert abs(runs["whole_grouped"].array(path, **weight) - runs[name].array(path, **weight)).max() < 1e-12


def test_gradients_of_experts_that_ranks_share_are_compared(runs: dict[str, recorder.Run]) -> None:
    """Of four ranks two each have an expert; nobody added up its gradients."""
    replica = first(runs["ep_forgot"]).replica
    assert replica is not None and not replica.is_assumed
    assert (replica.value.step, replica.value.site, replica.groups) == (0, "grad", [[0], [2]])
    assert replica.value.module_path == "decoder.layers.0.mlp.experts.local_experts.0"
    culprit = recorder.diff(runs["whole"], runs["ep_forgot"], rtol=1e-9, atol=1e-12).culprits[0]
    assert (culprit.module_path, culprit.phase) == ("decoder.layers.0.mlp.experts.local_experts.0", "reduction")


def test_what_experts_are_given_is_compared_where_they_are_on_the_same_ranks(runs: dict[str, recorder.Run]) -> None:
    found = recorder.diff(runs["ep"], runs["ep"])
    assert found.verdict == "equal" and found.num_handed_on_a == 0 and found.num_compared > 600
