"""The global view of a pipeline: stages on several ranks are one model, micro-batches one batch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recorder.analyze.first.first import first
from recorder.columns import COUNTS, STATISTICS
from recorder.errors import LookupFailedError
from recorder.merge.merge import merge_run
from recorder.run.run import Run, open_run
from tests.rigs.handmade import Row
from tests.rigs.meshes import BACK, PARAM, Array, Mesh, finger, grid_facts, mesh_run, plain, root_input, shard

RNG = np.random.default_rng(11)


def values(*shape: int) -> Array:
    return RNG.standard_normal(shape).astype(np.float32)


def same(one: Array, two: Array) -> bool:
    return one.dtype == two.dtype and one.shape == two.shape and one.tobytes() == two.tobytes()


def stage(number: int, num_stages: int = 2) -> dict[str, Any]:
    return {"pipeline": {"stage": number, "num_stages": num_stages}}


class Model:
    """Two layers, a stage each, of which `num_micro` micro-batches went through."""

    def __init__(self, num_micro: int = 3, size: int = 2) -> None:
        self.x, self.hidden, self.y = ([values(size, width) for _ in range(num_micro)] for width in (3, 5, 4))
        self.gradient = [values(size, 5) for _ in range(num_micro)]
        self.weights = [values(5, 3), values(4, 5)]

    def rows(self, number: int) -> list[Row]:
        """What the rank of a stage records: first all forwards, then the backwards."""
        inputs, outputs = (self.x, self.hidden) if number == 0 else (self.hidden, self.y)
        found: list[Row] = []
        for m, (x, y) in enumerate(zip(inputs, outputs, strict=True)):
            path = f"layers.{number}"
            found.append(root_input(len(found), x, micro_step=m))
            found.append(plain(len(found), y, micro_step=m, module_path=path))
            found.append(plain(len(found), y, micro_step=m, module_path=""))
        if number == 0:
            for m, gradient in enumerate(self.gradient):
                found.append(plain(len(found), gradient, micro_step=m, module_path="layers.0", **BACK))
        found.append(plain(len(found), self.weights[number], **PARAM, module_path=f"layers.{number}"))
        return found


def pipeline_run(path: Path, model: Model, **more: Any) -> Run:
    return mesh_run(path, {r: model.rows(r) for r in (0, 1)}, {r: stage(r) for r in (0, 1)}, **more)


def test_stages_are_one_model_and_micro_batches_one_batch(tmp_path: Path) -> None:
    model = Model()
    run = pipeline_run(tmp_path / "run", model)
    assert same(run.array("layers.0", step=0), np.concatenate(model.hidden))
    assert same(run.array("layers.1", step=0), np.concatenate(model.y))
    for number, weight in enumerate(model.weights):
        assert same(run.array(f"layers.{number}", site="param", step=0), weight)
    view = run.view().rows()
    (one,) = (one for one in view.table.to_pylist() if (one["module_path"], one["site"]) == ("layers.1", "output"))
    assert (one["layout_source"], one["fingerprint"]) == ("assumed", finger(np.concatenate(model.y)))
    assert json.loads(one["note"]) == {"micro_batches": 3, "batch_dim": 0, "stage": 1}
    assert one["ranks_present"] == one["ranks_expected"] == "[1]"


def test_the_models_input_is_the_first_stages_and_its_output_the_last_ones(tmp_path: Path) -> None:
    model = Model()
    run = pipeline_run(tmp_path / "run", model)
    assert same(run.array("", site="input", step=0), np.concatenate(model.x))
    assert same(run.array("", site="output", step=0), np.concatenate(model.y))
    rows = run.view().rows()
    assert {finding.kind for finding in rows.findings} == {"between_stages"}
    between = [one for one in rows.table.to_pylist() if one["rank"] is not None]
    assert {(one["rank"], one["module_path"], one["site"]) for one in between} == {(0, "", "output"), (1, "", "input")}
    assert len(between) == 6, "one of each micro-batch"
    notes = [(one["rank"], json.loads(one["note"])) for one in between]
    assert all(note["between_stages"] == [rank, 2] for rank, note in notes)
    assert {note["per_rank"] for _, note in notes} == {f"stage {i} of 2 sends or receives it" for i in (0, 1)}


@pytest.mark.parametrize("note", ["{", "[]", '"x"', "[" * 100_000])
def test_a_note_that_is_none_is_no_obstacle_to_what_goes_between_stages(tmp_path: Path, note: str) -> None:
    model = Model()
    rows = {0: [one | {"note": note} for one in model.rows(0)], 1: model.rows(1)}
    view = mesh_run(tmp_path / "run", rows, {rank: stage(rank) for rank in rows}).view().rows()
    notes = {one["note"] for one in view.table.to_pylist() if one["rank"] == 0}
    assert [json.loads(note)["between_stages"] for note in notes] == [[0, 2]]


def test_values_stand_in_the_order_of_stages_though_each_rank_counts_for_itself(tmp_path: Path) -> None:
    model = Model()
    rows = {rank: model.rows(rank) for rank in (0, 1)}
    late = [one | {"seq": one["seq"] + (50 if one["phase"] == "forward" else 60)} for one in rows[0]]
    late += [plain(62 + m, g, micro_step=m, module_path="", **BACK) for m, g in enumerate(model.gradient)]
    rows[1] += [plain(60 + m, y, micro_step=m, module_path="layers.1", **BACK) for m, y in enumerate(model.y)]
    run = mesh_run(tmp_path / "run", {0: late, 1: rows[1]}, {rank: stage(rank) for rank in (0, 1)})
    table = run.view().rows().table.select(["module_path", "site", "rank"]).to_pylist()
    order = list(dict.fromkeys((one["module_path"], one["site"], one["rank"]) for one in table))
    forward = [("", "input", None), ("layers.0", "output", None), ("", "output", 0), ("", "input", 1)]
    forward += [("layers.1", "output", None), ("", "output", None)]
    backward = [("layers.1", "grad_output", None), ("", "grad_output", 0), ("layers.0", "grad_output", None)]
    assert order == [*forward, *backward, ("layers.0", "param", None), ("layers.1", "param", None)]


@pytest.mark.parametrize("is_merged", [False, True])
def test_the_first_nan_is_where_it_came_up_and_not_in_the_stage_that_was_given_it(
    tmp_path: Path, is_merged: bool
) -> None:
    model = Model()
    rows = {rank: [one | {"rank": rank} for one in model.rows(rank)] for rank in (0, 1)}
    spoiled = np.full((2, 5), np.nan, np.float32)

    def spoil(rank: int, path: str, site: str) -> None:
        for i, one in enumerate(rows[rank]):
            if (one["module_path"], one["site"], one["micro_step"], one["phase"]) == (path, site, 1, "forward"):
                rows[rank][i] = one | {
                    k: v for k, v in plain(0, spoiled).items() if k in (*COUNTS, *STATISTICS, "data")
                }

    for question in ((0, "layers.0", "output"), (0, "", "output"), (1, "", "input"), (1, "layers.1", "output")):
        spoil(*question)
    run = mesh_run(tmp_path / "run", rows, {rank: stage(rank) for rank in rows})
    if is_merged:
        merge_run(run, tmp_path / "merged")
        run = open_run(tmp_path / "merged")
    found = first(run).nonfinite
    assert found is not None
    assert (found.value.module_path, found.value.site, found.nan_count) == ("layers.0", "output", 10)
    assert found.value.rank == (None if is_merged else 0)


def test_gradients_are_scaled_by_micro_batches(tmp_path: Path) -> None:
    model = Model(num_micro=4)
    run = pipeline_run(tmp_path / "run", model)
    assert np.array_equal(run.array("layers.0", site="grad_output", step=0), np.concatenate(model.gradient) / 4)


def test_micro_batches_of_unequal_size_are_laid_by_their_own(tmp_path: Path) -> None:
    model = Model(num_micro=2)
    model.x[1], model.hidden[1], model.y[1], model.gradient[1] = (values(1, width) for width in (3, 5, 4, 5))
    run = pipeline_run(tmp_path / "run", model)
    assert same(run.array("layers.0", step=0), np.concatenate(model.hidden))
    found = run.view(loss="weighted").rows()
    (i,) = (i for i, one in enumerate(found.table.to_pylist()) if one["site"] == "grad_output")
    wanted = np.concatenate([model.gradient[0] * 2 / 3, model.gradient[1] / 3])
    assert np.allclose(found.array(i), wanted, rtol=1e-6)


def test_the_ranks_of_a_stage_are_data_parallel_and_their_micro_batches_in_order(tmp_path: Path) -> None:
    """Ranks 0 and 1 run stage 0, ranks 2 and 3 stage 1; each pair has two batches of three micro-batches."""
    models = [Model(), Model()]
    models[1].weights = models[0].weights
    rows = {rank: models[rank % 2].rows(rank // 2) for rank in range(4)}
    facts = {
        r: {**stage(r // 2), "data_parallel": {"kind": "ddp", "ranks": [[0, 1], [2, 3]][r // 2]}} for r in range(4)
    }
    run = mesh_run(tmp_path / "run", rows, facts)
    assert same(run.array("layers.1", step=0), np.concatenate([*models[0].y, *models[1].y]))
    assert same(run.array("layers.1", site="param", step=0), models[0].weights[1])
    gradients = np.concatenate([*models[0].gradient, *models[1].gradient])
    scaled = (gradients.astype(np.float64) / 6).astype(np.float32)
    assert np.array_equal(run.array("layers.0", site="grad_output", step=0), scaled)


def test_the_ranks_of_a_stage_may_be_tensor_parallel(tmp_path: Path) -> None:
    model, mesh = Model(num_micro=2), Mesh([0, 1])
    rows: dict[int, list[Row]] = {}
    for rank in (0, 1):
        rows[rank] = [root_input(m, x, micro_step=m) for m, x in enumerate(model.x)]
        rows[rank] += [mesh.row(rank, 4 + m, y, [shard(1)], micro_step=m) for m, y in enumerate(model.hidden)]
    run = mesh_run(tmp_path / "run", rows, {rank: {**stage(0, 1), **grid_facts([0, 1], rank)} for rank in rows})
    assert same(run.array("layers.0", step=0), np.concatenate(model.hidden))


def test_a_stage_that_is_missing_is_named_and_the_rest_is_merged(tmp_path: Path) -> None:
    model = Model()
    run = mesh_run(tmp_path / "run", {0: model.rows(0)}, {0: stage(0)}, world_size=2)
    assert same(run.array("layers.0", step=0), np.concatenate(model.hidden))
    texts = [finding.text for finding in run.view().rows().findings if finding.kind == "partial"]
    assert texts == ["no rank left a record of stage 1 (from 0) of a pipeline of 2"]


def test_gradients_before_their_reduction_are_a_mean_over_micro_batches_of_which_none_may_lack(tmp_path: Path) -> None:
    model, local = Model(num_micro=4), PARAM | {"site": "grad", "phase": "backward", "scope": "local"}
    gradients = [values(5, 3) for _ in range(4)]
    rows = {rank: model.rows(rank) for rank in (0, 1)}
    of_each = [plain(70 + m, g, **{**local, "micro_step": m}, module_path="layers.0") for m, g in enumerate(gradients)]
    facts = {rank: stage(rank) for rank in (0, 1)}
    run = mesh_run(tmp_path / "run", {0: rows[0] + of_each, 1: rows[1]}, facts)
    assert np.allclose(run.array("layers.0", site="grad", step=0, phase="backward"), np.mean(gradients, 0), rtol=1e-6)
    run = mesh_run(tmp_path / "lacking", {0: rows[0] + of_each[1:], 1: rows[1]}, facts)
    with pytest.raises(LookupFailedError, match="no row of micro-batch 0 of rank 0"):
        run.array("layers.0", site="grad", step=0, phase="backward")


def test_stages_that_are_roots_of_one_rank_are_one_model(tmp_path: Path) -> None:
    """As interleaved schedules have them: a rank runs several stages, each under a root of its own."""
    model = Model()
    rows = [*model.rows(0), *(one | {"root": "model_1", "seq": one["seq"] + 100} for one in model.rows(1))]
    run = mesh_run(tmp_path / "run", {0: rows}, {0: stage(0)})
    manifest = next(run.path.glob("rank=*/*/_writer.json"))
    found = json.loads(manifest.read_text())
    modules = [{"path": ""}, {"path": "layers.1"}]
    found["roots"].append({"name": "model_1", "modules": modules, **stage(1)})
    manifest.write_text(json.dumps(found))
    run = open_run(run.path)
    assert same(run.array("", step=0), np.concatenate(model.y))
    assert same(run.array("layers.1", step=0), np.concatenate(model.y))
    view = run.view().rows()
    assert {one["root"] for one in view.table.to_pylist() if one["rank"] is None} == {"model"}
    assert {finding.kind for finding in view.findings} == {"between_stages"}


def test_a_micro_batch_that_is_missing_makes_no_smaller_tensor(tmp_path: Path) -> None:
    model = Model()
    rows = {rank: model.rows(rank) for rank in (0, 1)}
    rows[1] = [one for one in rows[1] if (one["module_path"], one["micro_step"]) != ("layers.1", 2)]
    run = mesh_run(tmp_path / "run", rows, {rank: stage(rank) for rank in (0, 1)})
    with pytest.raises(LookupFailedError, match="no row of micro-batch 2 of rank 1"):
        run.array("layers.1", step=0)
    assert same(run.array("layers.0", step=0), np.concatenate(model.hidden))
    assert {finding.kind for finding in run.view().rows().findings} == {"partial", "between_stages"}


def test_numbers_of_the_step_are_the_programs(tmp_path: Path) -> None:
    scalar = {"site": "scalar", "name": "lr", "module_path": "", "micro_step": None}
    model = Model()
    rows = {rank: [*model.rows(rank), plain(90, np.array(np.float32(0.5)), **scalar)] for rank in (0, 1)}
    run = mesh_run(tmp_path / "run", rows, {rank: stage(rank) for rank in (0, 1)})
    assert run.array("", site="scalar", step=0) == 0.5
    assert len([one for one in run.view().rows().table.to_pylist() if one["site"] == "scalar"]) == 1


def test_one_micro_batch_is_that_part_of_the_batch_on_all_ranks_or_on_one(tmp_path: Path) -> None:
    """Ranks 0 and 1 run stage 0 on halves of the batch, ranks 2 and 3 stage 1."""
    models = [Model(), Model()]
    rows = {rank: models[rank % 2].rows(rank // 2) for rank in range(4)}
    facts = {
        r: {**stage(r // 2), "data_parallel": {"kind": "ddp", "ranks": [[0, 1], [2, 3]][r // 2]}} for r in range(4)
    }
    run = mesh_run(tmp_path / "run", rows, facts)
    assert same(run.array("layers.0", step=0, rank=0, micro_step=1), models[0].hidden[1])
    assert same(run.array("layers.0", step=0, micro_step=1), np.concatenate([m.hidden[1] for m in models]))
    gradient = run.array("layers.0", site="grad_output", step=0, micro_step=2)
    assert np.array_equal(gradient, np.concatenate([m.gradient[2] for m in models]) / 2), (
        "of that micro-batch's own loss"
    )
    assert "micro_step=1" in str(run.layout("layers.0", step=0, micro_step=1))
    with pytest.raises(LookupFailedError, match="micro_step=7"):
        run.array("layers.0", step=0, micro_step=7)


@pytest.mark.parametrize(
    "pipeline", [{"stage": 2, "num_stages": 2}, {"stage": True, "num_stages": 2}, {"stage": 0}, []]
)
def test_pipelines_that_are_none_are_taken_for_nothing(tmp_path: Path, pipeline: Any) -> None:
    rows = {0: [root_input(0, values(2, 3)), plain(1, values(2, 2))]}
    run = mesh_run(tmp_path / "run", rows, {0: {"pipeline": pipeline}})
    assert run.array("layers.0", step=0).shape == (2, 2) and run.view().rows().findings == []


def test_what_the_roots_of_stages_have_under_one_path_is_asked_for_by_stage(tmp_path: Path) -> None:
    scales = [values(2), values(2)]
    state = {**PARAM, "site": "buffer", "name": "scale", "scope": None, "module_path": ""}
    rows = {r: [root_input(0, values(2, 3)), plain(1, scales[r], **state)] for r in (0, 1)}
    folder = tmp_path / "run"
    run = mesh_run(folder, rows, {r: stage(r) for r in (0, 1)})
    question: dict[str, Any] = {"site": "buffer", "step": 0}
    with pytest.raises(LookupFailedError, match=r"another tensor in each stage of the pipeline; choose stage=0\|1"):
        run.array("", **question)
    with pytest.raises(LookupFailedError, match=r"no row with stage=5; choose stage=0\|1"):
        run.array("", stage=5, **question)
    for number, scale in enumerate(scales):
        assert same(run.array("", stage=number, **question), scale)
        assert same(run[""].array(stage=number, rank=number, **question), scale)
        assert "[2]" in str(run.layout("", stage=number, **question))
    merge_run(run, tmp_path / "merged")
    merged = open_run(tmp_path / "merged")
    assert same(merged.array("", stage=1, **question), scales[1])
    with pytest.raises(LookupFailedError, match=r"choose stage=0\|1"):
        merged.array("", **question)
