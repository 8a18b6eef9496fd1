"""The flat parts that ZeRO's optimizers update are recorded as what they are: parts of the model's parameters."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import recorder
from recorder.analyze.check.check import check
from recorder.analyze.doctor.expected import compare
from recorder.analyze.first.first import first
from recorder.analyze.layouts import layouts
from tests.rigs import jobs
from tests.rigs.jobs import SCRIPTS

STAGES = {"stage_1": 2, "stage_3": 2, "stage_1_of_three": 3, "stage_3_of_three": 3}
GROUPS = ("stage_1_groups", "stage_3_groups")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, recorder.Run]:
    folder = tmp_path_factory.mktemp("zero")
    jobs.succeeded(jobs.ranks(folder, SCRIPTS / "zero.py", "whole", "whole_groups", num=1))
    for num in (2, 3):
        names = [name for name, of in STAGES.items() if of == num] + [*GROUPS] * (num == 2)
        jobs.succeeded(jobs.ranks(folder, SCRIPTS / "zero.py", *names, num=num))
    return {name: recorder.open_run(folder / name) for name in ("whole", "whole_groups", *GROUPS, *STAGES)}


@pytest.mark.parametrize("name", STAGES)
def test_the_ranks_are_the_one_process_that_has_the_whole_model(runs: dict[str, recorder.Run], name: str) -> None:
    """Among the values are 5 parameters, their gradients and the two moments and the step of each, at 3 steps."""
    found = recorder.diff(runs["whole"], runs[name], rtol=1e-9, atol=1e-12)
    assert (found.verdict, found.num_compared) == ("equal", 120)
    assert not first(runs[name]).is_found and not check(runs[name]).findings
    ways = {way[:2] for way in layouts(runs[name]).ways}
    assert ("partition", "zero") in ways and "fsdp" not in {ground for _, ground in ways}
    for site, tensor in (("param", "weight"), ("grad", "weight"), ("optim", "weight.exp_avg")):
        assert runs[name].array("up", site=site, name=tensor, step=2).shape == (7, 6)


@pytest.mark.parametrize("name", GROUPS)
def test_groups_that_zero_steps_one_by_one_are_those_of_one_step(runs: dict[str, recorder.Run], name: str) -> None:
    """Each of the two learning rates has its name, and the state of a group is recorded once, after its own step."""
    for run in (runs["whole_groups"], runs[name]):
        frame = run.to_pandas()
        assert ((frame["site"] == "buffer") & (frame["rank"] == 0)).sum() == 3
        assert (frame["name"].str.startswith("lr.") & (frame["rank"] == 0)).sum() == 2 * 3
        rates = frame[frame["name"].str.startswith("lr.") & (frame["step"] == 1) & (frame["rank"] == 0)]
        assert dict(zip(rates["name"], rates["mean"], strict=True)) == {"lr.Adam.0": 0.01, "lr.Adam.1": 0.02}
    found = recorder.diff(runs["whole_groups"], runs[name], rtol=1e-9, atol=1e-12)
    assert (found.verdict, len(found.only_a), len(found.only_b)) == ("equal", 0, 0)
    assert not first(runs[name]).is_found and not check(runs[name]).findings


@pytest.mark.parametrize("name", STAGES)
def test_doctor_misses_the_frozen_parameter_alone(runs: dict[str, recorder.Run], name: str) -> None:
    """A rank without an element of a parameter has rows of no elements; the frozen one is in no optimizer."""
    totals = {total.site: (total.expected, total.found) for total in compare(runs[name]).totals}
    num = STAGES[name] * 3
    assert totals["param"] == totals["grad"] == (6 * num, 5 * num)


def test_attributes_of_another_version_cost_no_row_of_the_optimizer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Linear(2, 2)
    model.weight._z3_optimizer = object()  # type: ignore[attr-defined]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recorder.attach(model, enabled=True, dir=tmp_path / "run", rules="site=param,grad keep=stats"):
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
    assert recorder.open_run(tmp_path / "run").num_rows == 8
    assert "flat parameters of ZeRO are not recorded: AttributeError" in caplog.text


SHARED_OUT = {2: ("zero_groups", "zero_late", "zero_views", "zero_scaled", "zero_flag_skips"), 4: ("zero_four_groups",)}


@pytest.fixture(scope="module")
def shared_out(tmp_path_factory: pytest.TempPathFactory) -> dict[str, recorder.Run]:
    """Trainings with torch's ZeroRedundancyOptimizer, which updates each parameter on one rank alone."""
    folder = tmp_path_factory.mktemp("redundancy")
    of = {1: ("whole", "whole_groups", "whole_flag")} | SHARED_OUT
    for num, names in of.items():
        jobs.succeeded(jobs.ranks(folder, SCRIPTS / "redundancy.py", *names, num=num))
    return {name: recorder.open_run(folder / name) for names in of.values() for name in names}


@pytest.mark.parametrize("name", ["zero_groups", "zero_four_groups", "zero_late", "zero_views"])
def test_parameters_shared_out_to_ranks_have_the_names_and_states_of_one_process(
    shared_out: dict[str, recorder.Run], name: str
) -> None:
    """Among the values are 3 states of each of 6 parameters, and the rate of each group, at 4 steps."""
    has_groups = "groups" in name
    whole = shared_out["whole_groups" if has_groups else "whole"]
    found = recorder.diff(whole, shared_out[name], rtol=1e-9, atol=1e-12)
    assert (found.verdict, found.num_compared) == ("equal", 184 if has_groups else 180)
    assert not first(shared_out[name]).is_found and not check(shared_out[name]).findings
    lies = layouts(shared_out[name])
    assert lies.contradiction is None and ("whole", "single", 18) in {way[:3] for way in lies.ways}
    frame = shared_out[name].to_pandas()
    assert (frame["site"] == "optim").sum() == 3 * 6 * 4
    rates = frame[frame["name"].str.startswith("lr.") & (frame["rank"] == 1)].pivot(columns="name", values="mean")
    last = {"lr.AdamW.0": [0.02, 0.02, 0.01, 0.01]} if has_groups else {}
    assert {one: [*rates[one].dropna()] for one in rates} == last | {f"lr.AdamW.{len(last)}": [0.01] * 4}


def test_a_rank_whose_update_reaches_no_other_is_named(shared_out: dict[str, recorder.Run]) -> None:
    run = shared_out["zero_flag_skips"]
    found = recorder.diff(shared_out["whole_flag"], run, rtol=1e-9, atol=1e-12).culprits[0]
    assert (found.step, found.phase, found.ranks) == (1, "update", [0])
    wrong = first(run).replica
    assert wrong is not None and (wrong.value.step, wrong.value.site) == (2, "param")
    assert [one.rule for one in check(run).findings] == ["replica"]


def test_a_state_that_one_rank_scales_is_named(shared_out: dict[str, recorder.Run]) -> None:
    found = recorder.diff(shared_out["whole"], shared_out["zero_scaled"], rtol=1e-9, atol=1e-12).culprits
    assert [(one.step, one.phase, one.site, one.name) for one in found] == [(2, "update", "optim", "weight.exp_avg")]
