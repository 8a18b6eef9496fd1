"""Modules of several stages that have one name by accident are kept apart, and never put together."""

from __future__ import annotations

import pytest

import recorder
from recorder.analyze.check.check import check
from recorder.analyze.first.first import first
from recorder.analyze.layouts import layouts
from recorder.errors import LookupFailedError
from tests.rigs import jobs
from tests.rigs.jobs import SCRIPTS

PLAIN = {
    "plain": "rank 1 is given what rank 0 gives: their modules of one name are different stages",
    "flag_plain": "rank 1 is given what rank 0 gives: their modules of one name are different stages",
    "others": "ranks 0 and 1 have different modules of one name: '1' is a Tanh and a ReLU",
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, recorder.Run]:
    folder = tmp_path_factory.mktemp("local_names")
    jobs.succeeded(jobs.ranks(folder, SCRIPTS / "local_names.py", *PLAIN, "schedule", "apart", "cut", num=2))
    return {name: recorder.open_run(folder / name) for name in (*PLAIN, "schedule", "apart", "cut")}


@pytest.mark.parametrize("name", PLAIN)
def test_what_nobody_explains_stays_with_its_rank(runs: dict[str, recorder.Run], name: str) -> None:
    rows = runs[name].view().rows().table
    of_whole = rows.filter(rows.column("rank").is_null()).column("site").unique().to_pylist()
    assert set(of_whole) <= {"scalar"}
    (apart,) = (way for way in layouts(runs[name]).ways if way.layout == "each rank its own")
    assert apart.ground == PLAIN[name] and layouts(runs[name]).contradiction is None
    assert not first(runs[name]).is_found and not check(runs[name]).findings
    assert first(runs[name]).why_none_compared == f"the ranks that are replicas are not known: {PLAIN[name]}"


def test_the_stages_of_a_schedule_are_told_apart(runs: dict[str, recorder.Run]) -> None:
    run = runs["schedule"]
    with pytest.raises(LookupFailedError, match=r"another tensor in each stage of the pipeline; choose stage=0\|1"):
        run.array("0", site="param", name="weight", step=0)
    with pytest.raises(LookupFailedError, match=r"another tensor in each stage of the pipeline; choose stage=0\|1"):
        run.array("0", site="output", step=0, micro_step=0)
    for stage in range(2):
        of_stage = run.array("0", site="output", step=0, micro_step=0, stage=stage)
        assert (of_stage == run.array("0", site="output", step=0, micro_step=0, rank=stage)).all()
        whole = run.array("0", site="param", name="weight", step=0, stage=stage)
        assert (whole == run.array("0", site="param", name="weight", step=0, rank=stage)).all()
        assert run.array("1", step=0, rank=stage, micro_step=0).shape == (3, 4)
    assert not first(run).is_found and layouts(run).contradiction is None and not check(run).findings


@pytest.mark.parametrize("site", ["input", "output", "grad_input", "grad_output"])
@pytest.mark.parametrize("path", ["1", "1.0", "1.1"])
@pytest.mark.parametrize("name", ["apart", "cut"])
def test_what_a_module_with_other_parameters_on_each_rank_makes_stays_with_its_rank(
    runs: dict[str, recorder.Run], name: str, path: str, site: str
) -> None:
    with pytest.raises(LookupFailedError, match="its parameters are the rank's own"):
        runs[name].array(path, site=site, step=1)
    assert runs[name].array("0", site="output", step=1).shape == (12, 4)


def test_a_mark_without_a_group_is_named(runs: dict[str, recorder.Run]) -> None:
    unknown = "it is marked as cut, but its group is not known (tp_group on the module, or --layout)"
    ways = {way.ground: way.num_values for way in layouts(runs["cut"]).ways}
    assert ways[unknown] == 2 and layouts(runs["cut"]).contradiction is not None  # the bias is not marked
