"""Tensor, sequence and pipeline parallel training: nothing is changed, and rows say of what they are pieces."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import recorder
from tests.campaigns.roundtrip import meshes
from tests.rigs import jobs, parallel
from tests.rigs.jobs import SCRIPTS, Finished

OF_TWO = ["tp", "tp_late", "sp"]
OF_FOUR = ["tp_ddp", "tp_fsdp2", "sp_fsdp2", "tp_hsdp"]
PIPELINED = [*meshes.PIPELINES]
OF_FOUR_STAGES = ("interleaved", "looped", "zero_bubble", "zero_bubble_v", "dual_pipe_v")
CASES = [*OF_TWO, *OF_FOUR]
GROUPS = {0: ([0, 2], [0, 1]), 1: ([1, 3], [0, 1]), 2: ([0, 2], [2, 3]), 3: ([1, 3], [2, 3])}
"""By rank of a 2 x 2 mesh, data parallel and model parallel ranks."""
Key = tuple[str, str, str, int]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Finished]:
    """By case, the job that trained it."""
    started = {}
    for world_size in (2, 4):
        folder = tmp_path_factory.mktemp("parallel")
        started[world_size] = jobs.ranks(folder, Path(parallel.__file__), "out", num=world_size)
    found: dict[str, Finished] = dict.fromkeys(OF_TWO, jobs.succeeded(started[2]))
    found |= dict.fromkeys(OF_FOUR, jobs.succeeded(started[4]))
    found["experts"] = found["tp"]
    return found


@pytest.fixture(scope="module")
def runs(finished: dict[str, Finished]) -> dict[str, recorder.Run]:
    return {case: recorder.open_run(job.folder / "out" / case) for case, job in finished.items()}


@pytest.mark.parametrize("case", CASES)
def test_hooks_of_parallel_styles_and_wrappers_are_no_hooks_of_the_program(
    runs: dict[str, recorder.Run], case: str
) -> None:
    assert not any(info.foreign_hooks for info in runs[case].modules.values())


@pytest.mark.parametrize("case", [*CASES, "experts"])
def test_training_is_not_changed(finished: dict[str, Finished], case: str) -> None:
    for rank in range(4 if case in OF_FOUR else 2):
        twins = torch.load(finished[case].folder / "out" / f"{case}.twins{rank}")
        assert twins["same"]
        without, recorded = twins["num_collectives"]
        assert without == recorded > 0


def test_experts_on_ranks_of_their_own_are_recorded_rank_by_rank(runs: dict[str, recorder.Run]) -> None:
    """Nothing tells what the rows that they exchange are pieces of."""
    frame = runs["experts"].to_pandas()
    assert frame["placements"].isna().all()
    rows = frame[(frame["module_path"] == "blocks.0.mlp.expert") & (frame["site"] == "input") & (frame["step"] == 0)]
    sizes = [json.loads(shape)[0] for shape in rows["shape"]]
    assert len(sizes) == 2 and sum(sizes) == 2 * 3 * 8
    assert facts(runs["experts"]) == [(None, None)] * 2


def facts(run: recorder.Run) -> list[tuple[Any, Any]]:
    roots = [writer.manifest.members["roots"] for writer in run.writers]
    return [(root.get("data_parallel"), root.get("model_parallel")) for (root,) in roots]


@pytest.mark.parametrize("case", OF_TWO)
def test_tensor_parallel_ranks_work_on_the_same_batch(runs: dict[str, recorder.Run], case: str) -> None:
    assert facts(runs[case]) == [(None, {"ranks": [0, 1], "shape": [2], "dim_names": ["tp"]})] * 2


@pytest.mark.parametrize("case", OF_FOUR)
def test_a_grid_has_ranks_beside_each_other_and_ranks_elsewhere(runs: dict[str, recorder.Run], case: str) -> None:
    for rank, (data, model) in enumerate(facts(runs[case])):
        elsewhere, beside = GROUPS[rank]
        assert data["ranks"] == elsewhere
        assert model == {"ranks": beside, "shape": [2], "dim_names": ["tp"]}


@pytest.mark.parametrize("case", CASES)
def test_a_row_names_the_ranks_that_its_placements_are_over(runs: dict[str, recorder.Run], case: str) -> None:
    frame = runs[case].to_pandas()
    frame = frame[frame["placements"].notna()]
    assert {"param", "grad", "optim", "input", "output"} <= set(frame["site"])
    for row in frame.itertuples():
        mesh = json.loads(str(row.mesh))
        ranks = np.array(mesh["ranks"]).reshape(mesh["shape"])
        assert ranks[tuple(mesh["coordinate"])] == row.rank


class Wholes:
    """What the pieces of a case make up, wherever their rows say where they lie."""

    def __init__(self, finished: Finished, run: recorder.Run) -> None:
        self.run = run
        self.expected: dict[Key, torch.Tensor] = torch.load(finished.folder / "out" / "plain.pt")
        frame = run.to_pandas()
        self.frame = frame[(frame["mode"] == "train") & frame["site"].isin([key[0] for key in self.expected])]
        self.by_key: dict[Key, list[Any]] = {}
        row: Any
        for row in self.frame.sort_values("rank").itertuples():
            self.by_key.setdefault((row.site, row.module_path, row.name, row.step), []).append(row)

    def of(self, key: Key) -> list[torch.Tensor]:
        """Of every group of ranks that have the same tensor, that tensor."""
        groups: dict[tuple[int, ...], list[Any]] = {}
        for row in self.by_key[key]:
            ranks = tuple(json.loads(row.mesh)["ranks"]) if isinstance(row.mesh, str) else (row.rank,)
            groups.setdefault(ranks, []).append(row)
        return [self._assembled(key, rows) for rows in groups.values()]

    def _assembled(self, key: Key, rows: list[Any]) -> torch.Tensor:
        question: dict[str, Any] = {"site": key[0], "name": key[2], "step": key[3], "mode": "train"}
        pieces = [self.run.tensor(key[1], **question, rank=row.rank) for row in rows]
        if not isinstance(rows[0].placements, str):
            return pieces[0]
        whole = torch.zeros(json.loads(rows[0].global_shape), dtype=pieces[0].dtype)
        for row, piece in zip(rows, pieces, strict=True):
            if '"Partial"' in row.placements:
                whole += piece
            else:
                starts = json.loads(row.offsets)
                whole[tuple(slice(i, i + size) for i, size in zip(starts, piece.shape, strict=True))] = piece
        return whole


@pytest.fixture(scope="module")
def wholes(finished: dict[str, Finished], runs: dict[str, recorder.Run]) -> dict[str, Wholes]:
    return {case: Wholes(finished[case], run) for case, run in runs.items()}


def is_strided(row: Any) -> bool:
    return isinstance(row.placements, str) and "StridedShard" in row.placements


@pytest.mark.parametrize("case", CASES)
def test_pieces_make_up_the_tensors_of_one_process(wholes: dict[str, Wholes], case: str) -> None:
    """Activations, their gradients, parameters and their gradients; what names no position is a replica."""
    found = wholes[case]
    assert set(found.by_key) == set(found.expected)
    for key, expected in found.expected.items():
        if key[3] == 1 and not any(map(is_strided, found.by_key[key])):
            for whole in found.of(key):
                torch.testing.assert_close(whole, expected, rtol=1e-4, atol=1e-6, msg=str(key))


@pytest.mark.parametrize("case", ["sp", "sp_fsdp2"])
def test_every_activation_of_a_sequence_parallel_model_has_a_position(wholes: dict[str, Wholes], case: str) -> None:
    frame = wholes[case].frame
    frame = frame[frame["site"].isin(["input", "output", "grad_input", "grad_output"])]
    assert frame[frame["placements"].isna()].groupby(["site", "module_path"]).size().to_dict() == {}


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("tp")])
def test_plain_tensors_between_two_linears_have_a_position(wholes: dict[str, Wholes], case: str) -> None:
    frame = wholes[case].frame
    for path, sites in (("blocks.0.mlp.act", 4), ("blocks.1.attn.core", 8)):
        rows = frame[(frame["module_path"] == path) & (frame["step"] == 1) & (frame["rank"] == 0)]
        assert len(rows) == sites
        assert all("Shard" in placements for placements in rows["placements"])


@pytest.mark.parametrize("case", OF_TWO)
def test_what_a_program_taps_in_a_region_has_a_position_too(runs: dict[str, recorder.Run], case: str) -> None:
    frame = runs[case].to_pandas()
    rows = frame[(frame["site"] == "tap") & (frame["mode"] == "train") & (frame["rank"] == 0)]
    assert dict(rows.groupby("phase").size()) == {"backward": 4, "forward": 4}
    assert set(rows["placements"]) == {'[{"kind":"Shard","dim":2}]'} and set(rows["global_shape"]) == {"[3,8,12]"}


def test_summands_have_no_statistics_and_masked_rows_are_zero(wholes: dict[str, Wholes]) -> None:
    rows = wholes["tp"].by_key["output", "embed", "", 0]
    assert {row.note for row in rows} == {'{"masked":true,"no_statistics":"Partial"}'}
    assert all(np.isnan(row.mean) and row.nan_count != row.nan_count for row in rows)
    (whole,) = wholes["tp"].of(("output", "embed", "", 0))
    pieces = [wholes["tp"].run.tensor("embed", site="output", step=0, rank=rank) for rank in range(2)]
    is_zero = [(piece == 0).all(-1) for piece in pieces]
    assert torch.equal(is_zero[0], ~is_zero[1]) and whole.count_nonzero() == whole.numel()


def test_gradients_of_sequence_parallel_norms_are_summands_still(wholes: dict[str, Wholes]) -> None:
    for row in wholes["sp"].by_key["grad", "blocks.0.attn_norm", "weight", 0]:
        assert json.loads(row.placements) == [{"kind": "Partial", "reduce_op": "sum"}]
        assert row.note == '{"no_statistics":"Partial"}' and np.isnan(row.mean)


@pytest.mark.parametrize("case", [*CASES, "experts"])
def test_nothing_was_lost_and_nothing_went_wrong(runs: dict[str, recorder.Run], case: str) -> None:
    for writer in runs[case].writers:
        assert writer.balance.dropped == {}
        assert writer.manifest.members["events"] == []


@pytest.fixture(scope="module")
def pipelined(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    if torch.__version__ < "2.13":
        pytest.skip("on gloo the pipelining of torch 2.9 aborts, without the recorder too")
    folder = tmp_path_factory.mktemp("pipelined")
    return jobs.succeeded(jobs.ranks(folder, SCRIPTS / "pipelined.py", "out"))


@pytest.fixture(scope="module")
def stages(pipelined: Finished) -> dict[str, recorder.Run]:
    return {case: recorder.open_run(pipelined.folder / "out" / case) for case in PIPELINED}


@pytest.mark.parametrize("case", PIPELINED)
def test_a_pipeline_is_not_changed(pipelined: Finished, case: str) -> None:
    for rank in range(2):
        twins = torch.load(pipelined.folder / "out" / f"{case}.twins{rank}")
        assert twins["same"]
        without, recorded = twins["num_collectives"]
        assert without == recorded > 0


@pytest.mark.parametrize("case", PIPELINED)
def test_a_root_says_which_stage_it_is(stages: dict[str, recorder.Run], case: str) -> None:
    roots = [writer.manifest.members["roots"] for writer in stages[case].writers]
    found = [sorted((root["pipeline"] for root in mine), key=lambda facts: facts["stage"]) for mine in roots]
    num_stages = 4 if case in OF_FOUR_STAGES else 2
    expected = [(0, 3), (1, 2)] if case.endswith("_v") else [range(rank, num_stages, 2) for rank in range(2)]
    assert found == [[{"stage": stage, "num_stages": num_stages} for stage in mine] for mine in expected]


@pytest.mark.parametrize("case", PIPELINED)
def test_the_loss_of_each_micro_batch_is_found_by_the_last_stage_alone(
    stages: dict[str, recorder.Run], case: str
) -> None:
    frame = stages[case].to_pandas()
    last = 0 if case.endswith("_v") else 1
    found = frame[(frame["site"] == "scalar") & (frame["name"] == "loss")]
    outputs = frame[(frame["site"] == "output") & (frame["mode"] == "train") & (frame["rank"] == last)]
    assert set(found["rank"]) == {last}
    num_losses = found.groupby("step").size().to_dict()
    assert num_losses == outputs.groupby("step")["micro_step"].nunique().to_dict()


@pytest.mark.parametrize("case", [*CASES])
def test_the_loss_that_tensor_parallel_ranks_share_is_found_on_each_of_them(
    finished: dict[str, Finished], runs: dict[str, recorder.Run], case: str
) -> None:
    frame = runs[case].to_pandas()
    found = frame[(frame["site"] == "scalar") & (frame["name"] == "loss")]
    assert found.groupby(["step", "rank"]).size().tolist() == [1] * 2 * len(runs[case].ranks)
    assert found.groupby("step")["mean"].nunique().tolist() == [1, 1]


@pytest.mark.parametrize("case", PIPELINED)
def test_stages_together_have_each_value_of_one_process_once(
    pipelined: Finished, stages: dict[str, recorder.Run], case: str
) -> None:
    """Micro-batches are slices, and a run that only learns shapes is none."""
    expected: dict[Any, torch.Tensor] = torch.load(pipelined.folder / "out" / "plain.pt")
    run = stages[case]
    frame = run.to_pandas()
    frame = frame[(frame["phase"] != "recompute") & ~frame["module_path"].isin(["", "layers"])]
    found = []
    row: Any
    for row in frame[frame["site"].isin([key[0] for key in expected])].itertuples():
        path = f"{row.module_path}.{row.name}" if row.site in ("param", "grad", "optim") else row.module_path
        key = (row.site, path, row.step, None if np.isnan(row.micro_step) else int(row.micro_step))
        found.append(key)
        question: dict[str, Any] = {"site": row.site, "name": row.name, "step": row.step, "phase": row.phase}
        question |= {"rank": row.rank} if key[3] is None else {"rank": row.rank, "micro_step": key[3]}
        value = run.tensor(row.module_path, **question)
        torch.testing.assert_close(value, expected[key], rtol=1e-4, atol=1e-6, msg=str(key))
    assert len(found) == len(set(found)) and set(found) == set(expected)


@pytest.mark.parametrize("case", PIPELINED)
def test_the_global_view_of_a_pipeline_is_the_whole_batch_in_one_process(
    pipelined: Finished, stages: dict[str, recorder.Run], case: str
) -> None:
    seen: dict[Any, torch.Tensor] = torch.load(pipelined.folder / "out" / "plain.pt")
    values = meshes.of_pipeline(seen, meshes.NUM_MICRO_BATCHES, is_traced=case == "split")
    counts, problems = meshes.compare(stages[case], values)
    assert problems == []
    assert sum(counts["grad_input"].values()) == 18


def test_a_recomputed_block_is_of_the_micro_batch_that_goes_back(stages: dict[str, recorder.Run]) -> None:
    frame = stages["checkpointed"].to_pandas()
    frame = frame[(frame["module_path"] == "layers.0.linear") & (frame["site"] == "input") & (frame["step"] == 1)]
    by_phase = frame.groupby(["phase", "micro_step"])["fingerprint"].agg(list).unstack(0)
    assert list(by_phase.index) == [0, 1, 2, 3]
    assert (by_phase["forward"] == by_phase["recompute"]).all()


@pytest.mark.parametrize("case", PIPELINED)
def test_nothing_of_a_pipeline_was_lost(stages: dict[str, recorder.Run], case: str) -> None:
    for writer in stages[case].writers:
        assert writer.balance.dropped == {}
        assert writer.manifest.members["events"] == []


@pytest.mark.slow
def test_doctor_says_that_dtensors_pass_a_graph_untapped(tmp_path: Path) -> None:
    jobs.succeeded(jobs.torchrun(tmp_path, SCRIPTS / "compiled_parallel.py", "out"))
    found = jobs.succeeded(jobs.python(tmp_path, "-m", "recorder", "doctor", "out"))
    (line,) = found.lines("which pass a graph untapped")
    assert "output: 8 values missing" in line and line.endswith(": '1', '3'")
