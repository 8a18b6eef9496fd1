"""Plain tensors that are cut over ranks and marked as Megatron-Core marks them are one model, without an option."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

import recorder
from recorder.analyze.check.check import check
from recorder.analyze.first.first import first
from recorder.analyze.layouts import layouts, reply_of
from recorder.capture.parallel.cut_calls import cut_calls
from recorder.merge.merge import merge_run
from tests.rigs import jobs
from tests.rigs.jobs import SCRIPTS

OF_ONE = ("whole", "whole_drop", "single_2", "single_4", "row_single_2", "row_single_4")
OF_TWO = (
    "tp", "sp", "mains", "fault", "drop", "drop_seed", "turned", "flag_tp", "flag_unsummed", "flag_sp_forgot",
    "dp_single_2", "parts", "bare_tp", "bare_sp",
)  # fmt: skip
OF_FOUR = (
    "ddp_tp", "ddp_sp", "own_groups", "flag_ddp_tp", "dp_single_4", "tp_single_2", "flag_dp_single_4", "sp_parts",
    "mains_parts",
)  # fmt: skip
FRAMEWORKS = ("nanotron", "colossal")
SOUND = (
    "tp", "sp", "mains", "ddp_tp", "ddp_sp", "own_groups", "parts", "sp_parts", "mains_parts", "bare_tp", "bare_sp",
)  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, recorder.Run]:
    folder = tmp_path_factory.mktemp("marked")
    for num, names in ((1, OF_ONE), (2, OF_TWO), (4, OF_FOUR)):
        jobs.succeeded(jobs.ranks(folder, SCRIPTS / "marked.py", *names, num=num))
    return {name: recorder.open_run(folder / name) for name in (*OF_ONE, *OF_TWO, *OF_FOUR)}


@pytest.fixture(scope="module")
def of_autotp(tmp_path_factory: pytest.TempPathFactory) -> dict[str, recorder.Run]:
    folder = tmp_path_factory.mktemp("autotp")
    names = {
        1: ("whole",),
        2: ("two", "flag_two", "unsummed", "flag_unsummed", "flag_fused", "flag_heads"),
        4: ("four", "flag_four"),
    }
    for num, of_num in names.items():
        jobs.succeeded(jobs.ranks(folder, SCRIPTS / "autotp.py", *of_num, num=num))
    return {name: recorder.open_run(folder / name) for of_num in names.values() for name in of_num}


@pytest.mark.parametrize("name", ["two", "four"])
def test_ranks_of_autotp_are_the_one_process_that_has_the_whole_model(
    of_autotp: dict[str, recorder.Run], name: str
) -> None:
    """The 7 columns between the linears are cut into 4 and 3."""
    found = recorder.diff(of_autotp["whole"], of_autotp[name], rtol=1e-9, atol=1e-12)
    assert (found.verdict, found.num_compared) == ("equal", 172)
    assert not len(found.only_a) and not len(found.only_b) and not found.left_out
    for run in (of_autotp[name], of_autotp[f"flag_{name}"]):
        assert not first(run).is_found and not check(run).findings and layouts(run).contradiction is None
    assert of_autotp[name].array("up", site="output", step=0).shape == (4, 3, 7)
    assert of_autotp[name].array("attention", site="output", name="1", step=0).shape == (4, 2, 3, 3)
    assert of_autotp[name].array("down", site="param", name="weight", step=0).shape == (6, 7)


def test_heads_of_a_query_that_is_a_dtensor_cut_the_attention_weights() -> None:
    """Transformers' `tp_plan` makes DTensors of the linears; eager attention gives a plain tensor of its weights."""
    dist.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    try:
        query = nn.Linear(8, 24)
        attention: Any = nn.Module()
        attention.q_proj, attention.head_dim = query, 4
        assert cut_calls(attention) is None
        parallelize_module(query, init_device_mesh("cpu", (2,)), ColwiseParallel())
        cut = cut_calls(attention)
        assert cut is not None and cut.chunks("output", torch.zeros(5, 7, 8)).value is None
        chunk = cut.chunks("output", torch.zeros(5, 3, 7, 7)).value
        assert chunk is not None and (chunk.global_shape, chunk.offsets) == ((5, 6, 7, 7), (0, 3, 0, 0))
        attention.head_dim = 8  # the ranks have one head and a half each
        assert cut_calls(attention) is None
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("name", ["flag_fused", "flag_heads"])
def test_what_autotp_cuts_as_no_placement_says_stays_with_its_ranks(
    of_autotp: dict[str, recorder.Run], name: str
) -> None:
    """Part by part, or into 5 and 2 columns, where torch would make 4 and 3."""
    run = of_autotp[name]
    assert not first(run).is_found and not check(run).findings and layouts(run).contradiction is None


def test_a_sum_that_autotp_did_not_make_is_named(of_autotp: dict[str, recorder.Run]) -> None:
    culprit = recorder.diff(of_autotp["whole"], of_autotp["unsummed"], rtol=1e-9, atol=1e-12).culprits[0]
    assert (culprit.step, culprit.module_path, culprit.phase) == (0, "down", "forward")
    replica = first(of_autotp["flag_unsummed"]).replica
    assert replica is not None
    assert (replica.value.step, replica.value.module_path, replica.value.site) == (0, "down", "output")
    found = layouts(of_autotp["flag_unsummed"]).contradiction
    assert found is not None and (found.module_path, found.site) == ("down", "output")


@pytest.fixture(scope="module")
def of_linears(tmp_path_factory: pytest.TempPathFactory) -> dict[str, recorder.Run]:
    folder = tmp_path_factory.mktemp("linears")
    two = [f"{one}_{what}" for one in FRAMEWORKS for what in ("two", "sequence", "flag", "flag_sequence", "unsummed")]
    names = {1: [f"{one}_whole" for one in FRAMEWORKS], 2: two}
    for num, of_num in names.items():
        jobs.succeeded(jobs.ranks(folder, SCRIPTS / "cut_linears.py", *of_num, num=num))
    return {name: recorder.open_run(folder / name) for of_num in names.values() for name in of_num}


@pytest.mark.parametrize("cut", ["two", "sequence"])
@pytest.mark.parametrize(("framework", "num_compared"), [("nanotron", 124), ("colossal", 124)])
def test_ranks_of_marked_linears_are_the_one_process(
    of_linears: dict[str, recorder.Run], framework: str, cut: str, num_compared: int
) -> None:
    """Only what the fused `qkv` has, which is cut into pieces of several sizes, stays with its rank."""
    run = of_linears[f"{framework}_{cut}"]
    found = recorder.diff(of_linears[f"{framework}_whole"], run, rtol=1e-9, atol=1e-12)
    assert (found.num_compared, len(found.table), found.left_out) == (num_compared, 0, [])
    for only in (found.only_a, found.only_b):
        values = {(row["module_path"], row["site"], row["name"].partition(".")[0]) for row in only.to_pylist()}
        of_parameters = {("qkv", site, name) for site in ("param", "grad", "optim") for name in ("weight", "bias")}
        assert values == of_parameters | {("qkv", "output", ""), ("qkv", "grad_output", "")}
    for one in (run, of_linears[f"{framework}_flag{cut.replace('two', '').replace('seq', '_seq')}"]):
        assert not first(one).is_found and not check(one).findings and layouts(one).contradiction is None
    frame = run.to_pandas()
    row = frame[(frame["module_path"] == "down") & (frame["site"] == "output")].iloc[0]
    dim = 0 if framework == "nanotron" else 1
    kind = {"kind": "Shard", "dim": dim} if cut == "sequence" else {"kind": "Replicate"}
    assert (json.loads(row["placements"]), row["layout_source"]) == ([kind], "marked")


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_sum_that_marked_linears_did_not_make_is_named(of_linears: dict[str, recorder.Run], framework: str) -> None:
    run = of_linears[f"{framework}_unsummed"]
    culprit = recorder.diff(of_linears[f"{framework}_whole"], run, rtol=1e-9, atol=1e-12).culprits[0]
    assert (culprit.step, culprit.module_path, culprit.phase) == (0, "down", "forward")
    replica = first(run).replica
    assert replica is not None and (replica.value.module_path, replica.value.site) == ("down", "output")


@pytest.mark.parametrize("name", SOUND)
def test_ranks_are_the_one_process_that_has_the_whole_model(runs: dict[str, recorder.Run], name: str) -> None:
    found = recorder.diff(runs["whole"], runs[name], rtol=1e-9, atol=1e-12)
    assert found.verdict == "equal" and found.num_compared > 180


@pytest.mark.parametrize("name", (*SOUND, "flag_tp", "flag_ddp_tp", "flag_dp_single_4"))
def test_sound_runs_have_no_finding(runs: dict[str, recorder.Run], name: str) -> None:
    assert not first(runs[name]).is_found
    assert not check(runs[name]).findings


@pytest.mark.parametrize("name", ["dp_single_2", "dp_single_4", "tp_single_2"])
@pytest.mark.parametrize("one", ["single", "row_single"])
def test_a_row_that_ranks_of_one_sample_share_is_a_batch_or_one_for_all(
    runs: dict[str, recorder.Run], one: str, name: str
) -> None:
    """Each rank has one sample, and the same places and mask; one process has them for each sample, or once."""
    found = recorder.diff(runs[f"{one}_{name[-1]}"], runs[name], rtol=1e-9, atol=1e-12)
    assert found.verdict == "equal" and found.num_compared > 180 and not found.left_out
    assert not first(runs[name]).is_found and layouts(runs[name]).contradiction is None
    assert not check(runs[name]).findings
    assert runs[name].array("", site="input", name="places", step=0).shape == (int(name[-1]), 6)


def test_a_gradient_that_nobody_added_up_is_named(runs: dict[str, recorder.Run]) -> None:
    """Each rank normalizes its own heads with one weight, whose gradients are then to be summed: q_layernorm's bug."""
    replica = first(runs["fault"]).replica
    assert replica is not None and not replica.is_assumed
    assert (replica.value.module_path, replica.value.site, replica.groups) == (
        "block.attention.head_norm",
        "grad",
        [[0], [1]],
    )
    culprit = recorder.diff(runs["whole"], runs["fault"], rtol=1e-9, atol=1e-12).culprits[0]
    assert (culprit.module_path, culprit.phase) == ("block.attention.head_norm", "reduction")


def test_the_flag_alone_names_a_sum_that_nobody_made(runs: dict[str, recorder.Run]) -> None:
    """A linear that is cut by rows gives every rank the sum; whoever leaves out the sum gives each rank a summand."""
    replica = first(runs["flag_unsummed"]).replica
    assert replica is not None
    assert (replica.value.step, replica.value.module_path, replica.value.site) == (0, "block.down", "output")
    of_replicas = [one for one in check(runs["flag_unsummed"]).findings if one.rule == "replica"]
    assert [one.module_path for one in of_replicas if one.site == "output"] == ["block.down"]
    found = layouts(runs["flag_unsummed"]).contradiction
    assert found is not None and (found.module_path, found.site) == ("block.down", "output")


def test_the_flag_alone_names_a_gradient_that_sequence_parallel_did_not_sum(runs: dict[str, recorder.Run]) -> None:
    (one, *_) = [one for one in check(runs["flag_sp_forgot"]).findings if one.rule == "replica"]
    assert (one.step, one.module_path, one.site) == (0, "block.norm", "grad")


def test_what_follows_a_dropout_of_each_ranks_own_is_not_blamed(runs: dict[str, recorder.Run]) -> None:
    """Behind the dropout nothing says how the ranks' values lie, so what is made of them may inherit the difference."""
    assert recorder.diff(runs["whole_drop"], runs["drop"], rtol=1e-9, atol=1e-12).verdict == "equal"
    (culprit,) = recorder.diff(runs["whole_drop"], runs["drop_seed"], rtol=1e-9, atol=1e-12, step=0).culprits
    assert (culprit.module_path, culprit.phase) == ("drop", "forward")


def test_the_parts_of_a_gated_mlp_lie_among_each_other(runs: dict[str, recorder.Run]) -> None:
    frame = runs["tp"].to_pandas()
    rows = frame[(frame["module_path"] == "block.up") & (frame["site"].isin(["param", "output", "grad_output"]))]
    assert set(rows["placements"]) == {
        json.dumps([{"kind": "StridedShard", "dim": dim, "split_factor": 2}], separators=(",", ":")) for dim in (0, 2)
    }
    assert set(rows["layout_source"]) == {"marked"}


def test_the_manifest_names_every_process_group(runs: dict[str, recorder.Run]) -> None:
    for rank, writer in enumerate(runs["ddp_tp"].writers):
        groups = {group["name"]: (group["ranks"], group["backend"]) for group in writer.manifest.members["groups"]}
        first_of_pair = rank - rank % 2
        assert groups["TENSOR_MODEL_PARALLEL_GROUP"] == ([first_of_pair, first_of_pair + 1], "gloo")
        assert groups["DATA_PARALLEL_GROUP"] == ([rank % 2, rank % 2 + 2], "gloo")
        assert ([0, 1, 2, 3], "gloo") in groups.values()


def test_layouts_says_how_values_lie_and_on_which_ground(runs: dict[str, recorder.Run]) -> None:
    answer = layouts(runs["ddp_sp"])
    ways = {(way.layout, way.ground): way.num_values for way in answer.ways}
    assert ways["StridedShard(0)", "marked"] == 6  # weight and bias of the gated linear: values, gradients, momentum
    assert ways["Shard(2), batches along dim 1", "marked, assumed"] > 5
    assert ways["Shard(0), batches along dim 1", "assumed"] > 5
    assert answer.contradiction is None and reply_of(runs["ddp_sp"], answer).exit_code == 0
    of_value = runs["turned"].to_pandas()[["module_path", "site", "name"]].drop_duplicates()
    answer = layouts(runs["turned"])  # one value is a rank's own at one step, and global at the other
    assert answer.num_values == len(of_value) == sum(way.num_values for way in answer.ways) - 1
    assert {way.layout for way in layouts(runs["whole"]).ways} == {"whole"}


def test_what_turned_nan_on_one_rank_is_not_missing_on_the_others(
    runs: dict[str, recorder.Run], tmp_path: Path
) -> None:
    """Without records at these steps, only the rank whose part turned NaN wrote a row of it."""
    report = merge_run(runs["turned"], tmp_path / "merged")
    assert report.num_problems == 0
    frame = recorder.open_run(tmp_path / "merged").to_pandas()
    rows = frame[(frame["site"] == "output") & (frame["step"] == 0)].set_index("module_path")["rank"]
    assert rows["block.up"] == 1
    assert rows[["block.down", "block"]].isna().all()  # summed over the ranks, so all of them have NaN


def test_layouts_names_the_first_value_that_contradicts_its_layout(runs: dict[str, recorder.Run]) -> None:
    answer = layouts(runs["fault"])
    assert answer.contradiction is not None
    found = answer.contradiction
    assert (found.step, found.module_path, found.site) == (0, "block.attention.head_norm", "grad")
    assert reply_of(runs["fault"], answer).exit_code == 1
