"""The global view of ranks that share a part of the batch: what they hold together, and what copies and batches are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recorder.analyze.diff.diff import diff
from recorder.errors import LookupFailedError
from recorder.run.run import Run, open_run
from tests.rigs.handmade import Row
from tests.rigs.meshes import (
    BACK,
    PARAM,
    PARTIAL,
    REPLICATE,
    Array,
    Mesh,
    finger,
    grid_facts,
    mesh_run,
    plain,
    root_input,
    shard,
)

RNG = np.random.default_rng(7)
GRID = Mesh([[0, 1], [2, 3]])
TP, DP = GRID.axis(1), GRID.axis(0)


def values(*shape: int) -> Array:
    return RNG.standard_normal(shape).astype(np.float32)


def same(one: Array, two: Array) -> bool:
    return one.dtype == two.dtype and one.shape == two.shape and one.tobytes() == two.tobytes()


def grid_run(path: Path, rows: dict[int, list[Row]], ranks: Any = None, **more: Any) -> Run:
    grid = GRID.ranks.tolist() if ranks is None else ranks
    return mesh_run(path, rows, {rank: grid_facts(grid, rank) for rank in rows}, **more)


def batches(*sizes: int) -> dict[int, list[Row]]:
    """The root's inputs of a 2 x 2 grid, each pair of ranks with a batch of its own."""
    inputs = [values(size, 2) for size in sizes]
    return {rank: [root_input(0, inputs[rank // 2])] for rank in range(4)}


class TestTensorParallelWithDDP:
    def test_a_cut_activation_is_put_together_first_and_then_laid_along_the_batch(self, tmp_path: Path) -> None:
        rows, outputs = batches(4, 3), [values(4, 6), values(3, 6)]
        for rank in rows:
            rows[rank].append(TP.row(rank, 1, outputs[rank // 2], [shard(1)]))
        run = grid_run(tmp_path / "run", rows)
        whole = np.concatenate(outputs)
        assert same(run.array("layers.0", step=0), whole)
        view = run.view().rows()
        (one,) = (one for one in view.table.to_pylist() if one["site"] == "output")
        assert (one["layout_source"], one["fingerprint"]) == ("assumed", finger(whole))
        assert one["ranks_present"] == "[0,1,2,3]" and json.loads(one["note"])["batch_dim"] == 0
        assert one["mean"] == pytest.approx(whole.mean(dtype=np.float64), rel=1e-9)
        assert view.findings == []

    @pytest.mark.parametrize("placements", [[shard(0)], [shard(1)], [REPLICATE]])
    def test_parameters_are_copies_of_cut_ones(self, tmp_path: Path, placements: list[Any]) -> None:
        weight = values(5, 4)
        rows = {rank: [TP.row(rank, 0, weight, placements, **PARAM)] for rank in range(4)}
        run = grid_run(tmp_path / "run", rows)
        assert same(run.array("layers.0", site="param", step=0), weight)
        (one,) = run.view().rows().table.to_pylist()
        assert (one["layout_source"], one["fingerprint"]) == ("dtensor", finger(weight))

    def test_a_copy_that_differs_is_named_with_the_rank_that_it_is_a_copy_of(self, tmp_path: Path) -> None:
        weight = values(4, 4)
        other = weight.copy()
        other[3] += 1
        rows = {r: [TP.row(r, 0, other if r == 3 else weight, [shard(0)], **PARAM)] for r in range(4)}
        (finding,) = grid_run(tmp_path / "run", rows).view().rows().findings
        assert (finding.kind, finding.ranks) == ("replicas_differ", (1, 3))
        assert finding.text == "rank 3 differs from rank 1"

    def test_diff_names_where_copies_came_apart(self, tmp_path: Path) -> None:
        rows, outputs = batches(4, 3), [values(4, 6), values(3, 6)]
        runs = []
        for name, ranks in (("sound", ()), ("broken", (1, 3))):
            own = {
                rank: [
                    *rows[rank],
                    TP.row(rank, 1, outputs[rank // 2] * (1 + (rank in ranks)), [REPLICATE], module_path="norm"),
                ]
                for rank in rows
            }
            runs.append(grid_run(tmp_path / name, own))
        sound, broken = runs
        (culprit,) = diff(sound, broken).culprits
        assert (culprit.phase, culprit.module_path, culprit.ranks) == ("forward", "norm", [1, 3])
        assert diff(broken, sound).culprits == []

    def test_what_a_missing_rank_held_another_instance_has(self, tmp_path: Path) -> None:
        weight = values(4, 4)
        rows = {rank: [TP.row(rank, 0, weight, [shard(0)], **PARAM)] for rank in (0, 2, 3)}
        run = grid_run(tmp_path / "run", rows, world_size=4)
        assert same(run.array("layers.0", site="param", step=0), weight)
        assert [finding.kind for finding in run.view().rows().findings] == ["partial"]

    def test_a_piece_of_the_batch_that_is_missing_leaves_no_tensor(self, tmp_path: Path) -> None:
        rows, outputs = batches(4, 3), [values(4, 6), values(3, 6)]
        for rank in (0, 1, 2):
            rows[rank].append(TP.row(rank, 1, outputs[rank // 2], [shard(1)]))
        run = grid_run(tmp_path / "run", rows)
        with pytest.raises(LookupFailedError, match="the chunks of rank 3 are missing"):
            run.array("layers.0", step=0)

    def test_a_whole_instance_that_is_missing_makes_it_partial(self, tmp_path: Path) -> None:
        rows, output = batches(4, 3), values(4, 6)
        for rank in (0, 1):
            rows[rank].append(TP.row(rank, 1, output, [shard(1)]))
        run = grid_run(tmp_path / "run", rows)
        with pytest.raises(LookupFailedError, match="rank 0, 1 alone, not on rank 2, 3; partial=True"):
            run.array("layers.0", step=0)
        assert same(run.array("layers.0", step=0, partial=True), output)

    def test_sums_over_a_mesh_are_reduced_before_the_batch(self, tmp_path: Path) -> None:
        rows, outputs = batches(4, 3), [[values(n, 6) for _ in range(2)] for n in (4, 3)]
        for rank in rows:
            rows[rank].append(TP.row(rank, 1, outputs[rank // 2][rank % 2], [PARTIAL]))
        run = grid_run(tmp_path / "run", rows)
        wanted = np.concatenate([(a.astype(np.float64) + b).astype(np.float32) for a, b in outputs])
        assert same(run.array("layers.0", step=0), wanted)

    @pytest.mark.parametrize(("factor", "is_one"), [(1, False), (0, True)])
    def test_summands_that_are_equal_on_all_ranks_may_be_the_sum_already(
        self, tmp_path: Path, factor: int, is_one: bool
    ) -> None:
        """An all-reduce through ``.data`` leaves no trace; of zeros it does not matter."""
        rows, outputs = batches(4, 3), [values(n, 6) * factor + 0.0 for n in (4, 3)]
        for rank in rows:
            rows[rank].append(TP.row(rank, 1, outputs[rank // 2], [PARTIAL]))
        run = grid_run(tmp_path / "run", rows)
        findings = run.view().rows().findings
        assert [(one.kind, "after a sum in place" in one.text) for one in findings] == [("per_rank", True)] * (
            not is_one
        )
        said = run.view(layouts=["layers.0=partial(sum)"]).rows()
        assert [one["rank"] for one in said.table.to_pylist() if one["site"] == "output"] == [None]

    @pytest.mark.parametrize(("loss", "factors"), [("mean", (0.5, 0.5)), ("weighted", (0.75, 0.25)), ("sum", (1, 1))])
    def test_gradients_are_scaled_by_the_parts_of_the_batch(
        self, tmp_path: Path, loss: str, factors: tuple[float, float]
    ) -> None:
        rows, gradients = batches(3, 1), [values(3, 6), values(1, 6)]
        for rank in rows:
            own = gradients[rank // 2]
            rows[rank] += [TP.row(rank, 1, own, [shard(1)]), TP.row(rank, 2, own, [shard(1)], **BACK)]
        view = grid_run(tmp_path / "run", rows).view(loss=loss).rows()
        (i,) = (i for i, one in enumerate(view.table.to_pylist()) if one["site"] == "grad_output")
        wanted = [(g.astype(np.float64) * f).astype(np.float32) for g, f in zip(gradients, factors, strict=True)]
        assert same(view.array(i), np.concatenate(wanted))
        if loss == "sum":
            assert view.table.column("fingerprint")[i].as_py() == finger(np.concatenate(gradients))

    def test_a_gradient_of_what_is_the_same_for_all_is_the_mean(self, tmp_path: Path) -> None:
        positions, gradients = values(8, 2), [values(8, 2) for _ in range(2)]
        rows = batches(4, 3)
        for rank in rows:
            rows[rank] += [
                TP.row(rank, 1, positions, [shard(0)]),
                TP.row(rank, 2, gradients[rank // 2], [shard(0)], **BACK),
            ]
        run = grid_run(tmp_path / "run", rows)
        assert same(run.array("layers.0", step=0), positions)
        wanted = ((gradients[0].astype(np.float64) + gradients[1]) / 2).astype(np.float32)
        assert np.array_equal(run.array("layers.0", site="grad_output", step=0), wanted)

    def test_plain_tensors_that_are_equal_within_an_instance_are_one(self, tmp_path: Path) -> None:
        rows, outputs = batches(4, 3), [values(4, 6), values(3, 6)]
        for rank in rows:
            rows[rank].append(plain(1, outputs[rank // 2]))
        run = grid_run(tmp_path / "run", rows)
        assert same(run.array("layers.0", step=0), np.concatenate(outputs))
        assert run.array("", site="input", step=0).shape == (7, 2)

    def test_plain_tensors_that_differ_within_an_instance_are_never_guessed(self, tmp_path: Path) -> None:
        rows = batches(4, 4)
        for rank in rows:
            rows[rank].append(plain(1, values(4, 6)))
        (finding,) = grid_run(tmp_path / "run", rows).view().rows().findings
        assert finding.kind == "per_rank" and "ranks 0, 1 share a batch" in finding.text

    def test_a_plain_tensor_of_one_rank_of_an_instance_is_not_taken_for_all(self, tmp_path: Path) -> None:
        rows = batches(4, 4)
        rows[0].append(plain(1, values(4, 6)))
        kinds = {finding.kind for finding in grid_run(tmp_path / "run", rows).view().rows().findings}
        assert kinds == {"per_rank", "partial"}

    def test_plain_parameters_are_compared_over_all_ranks(self, tmp_path: Path) -> None:
        bias = values(4)
        rows = {
            rank: [plain(0, bias + (rank == 1), **PARAM), plain(1, bias, **(PARAM | {"name": "b"}))]
            for rank in range(4)
        }
        run = grid_run(tmp_path / "run", rows)
        assert same(run.array("layers.0", site="param", name="b", step=0), bias)
        (finding,) = run.view().rows().findings
        assert (finding.kind, finding.text) == ("replicas_differ", "rank 1 differs from rank 0")

    def test_the_order_of_batches_is_that_of_the_wrapper(self, tmp_path: Path) -> None:
        rows, outputs = batches(4, 3), [values(4, 6), values(3, 6)]
        for rank in rows:
            rows[rank].append(TP.row(rank, 1, outputs[rank // 2], [shard(1)]))
        run = grid_run(tmp_path / "run", rows, ranks=[[2, 3], [0, 1]])
        assert same(run.array("layers.0", step=0), np.concatenate(outputs[::-1]))

    def test_a_layout_that_is_said_holds_within_each_instance(self, tmp_path: Path) -> None:
        rows, outputs = batches(4, 3), [values(4, 6), values(3, 6)]
        for rank in rows:
            rows[rank].append(plain(1, np.split(outputs[rank // 2], 2, axis=1)[rank % 2].copy()))
        view = grid_run(tmp_path / "run", rows).view(layouts=["layers.*:output:=shard(1)"]).rows()
        (i,) = (i for i, one in enumerate(view.table.to_pylist()) if one["site"] == "output")
        assert same(view.array(i), np.concatenate(outputs))
        assert view.table.column("layout_source")[i].as_py() == "override"
        assert view.table.column("fingerprint")[i].as_py() == finger(np.concatenate(outputs))

    def test_a_layout_that_does_not_fit_says_which_rule_and_which_shapes(self, tmp_path: Path) -> None:
        rows = batches(4, 3)
        for rank in rows:
            rows[rank].append(plain(1, values(4, 6 - rank % 2)))
        view = grid_run(tmp_path / "run", rows).view(layouts=["layers.*:output:=shard(0)"]).rows()
        (finding,) = view.findings
        assert (finding.kind, finding.module_path, finding.site) == ("inconsistent", "layers.0", "output")
        why = "shapes differ in more than dim 0: rank 0 [4, 6], rank 1 [4, 5]"
        assert f"--layout 'layers.*:output:=shard(0)' does not fit: {why}" in finding.text


class TestInference:
    """Of plain tensors that differ between ranks which share a batch."""

    def mlp(
        self, *, with_neighbour: bool = True, sizes: tuple[int, int] = (5, 4), **more: Any
    ) -> tuple[dict[int, list[Row]], list[Array]]:
        """A column-wise layer `fc1`, whose output is a DTensor, and an activation behind it, whose output is plain."""
        rows, hidden = batches(*sizes), [values(size, 6) for size in sizes]
        for rank, own in rows.items():
            if with_neighbour:
                own.append(TP.row(rank, 1, hidden[rank // 2], [shard(1)], module_path="fc1"))
            cut = np.split(hidden[rank // 2], 2, axis=1)[rank % 2].copy()
            own.append(plain(2, cut, **({"module_path": "act"} | more)))
        return rows, hidden

    def test_they_are_cut_as_values_of_that_shape_beside_them(self, tmp_path: Path) -> None:
        rows, hidden = self.mlp()
        run = grid_run(tmp_path / "run", rows)
        assert same(run.array("act", step=0), np.concatenate(hidden))
        (one,) = (one for one in run.view().rows().table.to_pylist() if one["module_path"] == "act")
        assert (one["layout_source"], one["fingerprint"]) == ("assumed", finger(np.concatenate(hidden)))

    def test_that_of_one_batch_is_said_to_be_inferred(self, tmp_path: Path) -> None:
        rows, hidden = self.mlp()
        rows = {rank: rows[rank] for rank in (0, 1)}
        run = mesh_run(tmp_path / "run", rows, {rank: grid_facts([0, 1], rank) for rank in rows})
        (one,) = (one for one in run.view().rows().table.to_pylist() if one["module_path"] == "act")
        assert one["layout_source"] == "inferred" and same(run.array("act", step=0), hidden[0])
        found = [finding for finding in run.view().rows().findings if finding.kind == "inferred"]
        assert [finding.module_path for finding in found] == ["act"] and "by their shapes alone" in found[0].text

    def test_where_a_whole_value_has_that_shape_too_nothing_is_guessed(self, tmp_path: Path) -> None:
        rows, _ = self.mlp()
        beside = values(*json.loads(rows[0][-1]["shape"]))
        for own in rows.values():
            own.append(plain(3, beside, module_path="beside"))
        findings = grid_run(tmp_path / "run", rows).view().rows().findings
        assert ("per_rank", "act") in [(one.kind, one.module_path) for one in findings]

    def test_pieces_of_a_constant_are_no_copies(self, tmp_path: Path) -> None:
        rows, hidden = self.mlp()
        for own in rows.values():
            shape = json.loads(own[-1]["shape"])
            own.append(plain(3, np.ones(shape, np.float32), module_path="ones"))
        whole = grid_run(tmp_path / "run", rows).array("ones", step=0)
        assert same(whole, np.ones_like(np.concatenate(hidden)))

    def test_where_two_dims_have_the_size_of_the_cut_one_nothing_is_guessed(self, tmp_path: Path) -> None:
        """A transposed copy has the same shape."""
        rows, _ = self.mlp(sizes=(3, 3))
        findings = grid_run(tmp_path / "run", rows).view().rows().findings
        assert [(one.kind, one.module_path) for one in findings] == [("per_rank", "act")]

    def test_values_of_another_step_say_nothing(self, tmp_path: Path) -> None:
        rows, _ = self.mlp(step=1)
        findings = grid_run(tmp_path / "run", rows).view().rows().findings
        assert [(one.kind, one.module_path) for one in findings] == [("per_rank", "act")]

    def test_values_that_disagree_say_nothing(self, tmp_path: Path) -> None:
        rows, _ = self.mlp()
        for rank, own in rows.items():
            size = 5 - rank // 2
            own.append(TP.row(rank, 3, values(2 * size, 3), [shard(0)], module_path="other"))
        findings = grid_run(tmp_path / "run", rows).view().rows().findings
        (text,) = (finding.text for finding in findings if finding.module_path == "act")
        assert "ranks 0, 1 share a batch" in text and "along dims [0, 1]" in text

    @pytest.mark.parametrize(("site", "dim"), [("output", 0), ("input", 1)])
    @pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
    def test_they_are_cut_as_the_weight_of_their_layer(self, tmp_path: Path, site: str, dim: int, kind: str) -> None:
        rows, hidden = self.mlp(with_neighbour=False, module_path="fc", site=site)
        weight = values(6, 6)
        for rank, own in rows.items():
            if kind == "ddp":
                own.append(TP.row(rank, 3, weight, [shard(dim)], **PARAM, module_path="fc"))
            else:
                own.append(GRID.row(rank, 3, weight, [shard(0), shard(dim)], **PARAM, module_path="fc"))
        facts = {rank: grid_facts(GRID.ranks.tolist(), rank, kind) for rank in rows}
        run = mesh_run(tmp_path / "run", rows, facts)
        assert same(run.array("fc", site=site, step=0), np.concatenate(hidden))

    def test_a_layer_that_is_no_linear_one_tells_nothing_by_its_weight(self, tmp_path: Path) -> None:
        rows, _ = self.mlp(with_neighbour=False)
        for rank, own in rows.items():
            own.append(TP.row(rank, 3, values(6, 6), [shard(0)], **PARAM, module_path="act"))
        kinds = {one.kind for one in grid_run(tmp_path / "run", rows).view().rows().findings if one.site == "output"}
        assert kinds == {"per_rank"}


class TestWholeMeshes:
    def test_parameters_over_data_and_tensor_parallel_ranks_are_one(self, tmp_path: Path) -> None:
        weight = values(6, 8)
        facts = {rank: grid_facts(GRID.ranks.tolist(), rank, "fsdp2") for rank in range(4)}
        rows = {rank: [GRID.row(rank, 0, weight, [shard(0), shard(1)], **PARAM)] for rank in range(4)}
        run = mesh_run(tmp_path / "run", rows, facts)
        assert same(run.array("layers.0", site="param", step=0), weight)

    def test_parameters_over_the_data_parallel_axis_are_copies_across_the_other(self, tmp_path: Path) -> None:
        norm = values(6)
        facts = {rank: grid_facts(GRID.ranks.tolist(), rank, "fsdp2") for rank in range(4)}
        rows = {rank: [DP.row(rank, 0, norm, [shard(0)], **PARAM)] for rank in range(4)}
        run = mesh_run(tmp_path / "run", rows, facts)
        assert same(run.array("layers.0", site="param", step=0), norm)
        rows[3] = [DP.row(3, 0, norm + 1, [shard(0)], **PARAM)]
        (finding,) = mesh_run(tmp_path / "other", rows, facts).view().rows().findings
        assert finding.text == "rank 3 differs from rank 2"

    def test_tensor_parallel_alone_has_one_batch(self, tmp_path: Path) -> None:
        x, y = values(4, 3), values(4, 6)
        mesh = Mesh([0, 1])
        rows = {
            r: [root_input(0, x), mesh.row(r, 1, y, [shard(1)]), mesh.row(r, 2, y, [shard(1)], **BACK)] for r in (0, 1)
        }
        run = mesh_run(tmp_path / "run", rows, {r: grid_facts([0, 1], r) for r in (0, 1)})
        for found, wanted in ((run.array("", site="input", step=0), x), (run.array("layers.0", step=0), y)):
            assert same(found, wanted)
        assert same(run.array("layers.0", site="grad_output", step=0), y), "not scaled: one batch"
        sources = {one["site"]: one["layout_source"] for one in run.view().rows().table.to_pylist()}
        assert sources == {"input": "inferred", "output": "dtensor", "grad_output": "dtensor"}

    def test_hybrid_sharding_times_tensor_parallel_is_one_mesh(self, tmp_path: Path) -> None:
        weight, cube = values(8, 6), Mesh(np.arange(8).reshape(2, 2, 2))
        facts = {r: grid_facts([[0, 1], [2, 3], [4, 5], [6, 7]], r, "fsdp2") for r in range(8)}
        rows = {r: [cube.row(r, 0, weight, [REPLICATE, shard(0), shard(1)], **PARAM)] for r in range(8)}
        run = mesh_run(tmp_path / "run", rows, facts)
        assert same(run.array("layers.0", site="param", step=0), weight)


class TestContradictions:
    def sound(self, rank: int, seq: int) -> Row:
        return TP.row(rank, seq, np.arange(8, dtype=np.float32).reshape(2, 4), [shard(1)], **PARAM, module_path="sound")

    def refused(self, path: Path, rows: dict[int, list[Row]], facts: dict[int, dict[str, Any]] | None = None) -> str:
        """The one finding of kind ``inconsistent``; the module `sound` must have come through."""
        rows = {rank: [*own, self.sound(rank, 9)] for rank, own in rows.items() if rank < 4}
        run = mesh_run(path, rows, facts or {rank: grid_facts(GRID.ranks.tolist(), rank) for rank in rows})
        assert run.array("sound", site="param", step=0).shape == (2, 4)
        (finding,) = (one for one in run.view().rows().findings if one.kind == "inconsistent")
        return finding.text

    def test_ranks_that_disagree_on_a_placement_are_named(self, tmp_path: Path) -> None:
        weight = values(4, 4)
        rows = {rank: [TP.row(rank, 0, weight, [shard(int(rank == 3))], **PARAM)] for rank in range(4)}
        assert "ranks disagree on the placements: rank 2 " in self.refused(tmp_path / "run", rows)

    def test_ranks_that_name_each_others_mesh_differently_are_named(self, tmp_path: Path) -> None:
        weight, other = values(4, 4), Mesh([[0, 2], [1, 3]]).axis(1)
        rows = {r: [(other if r == 3 else TP).row(r, 0, weight, [shard(0)], **PARAM)] for r in range(4)}
        assert "ranks disagree on the mesh: rank 2 [2, 3], rank 3 [1, 3]" in self.refused(tmp_path / "run", rows)

    @pytest.mark.parametrize(
        ("change", "why"),
        [
            ({"coordinate": [0]}, "both say they are at [0] of the mesh"),
            ({"ranks": [2, 3, 1]}, "disagree on the mesh"),
            ({"ranks": [3, 2]}, "disagree on the mesh"),
            ({"coordinate": [1, 0]}, "rank 3 says it is at [1, 0] of a mesh of [2]"),
            ({"coordinate": [5]}, "rank 3 says it is at [5] of a mesh of ranks [2, 3]"),
        ],
    )
    def test_a_rank_that_is_not_where_it_says_is_named(self, tmp_path: Path, change: dict[str, Any], why: str) -> None:
        rows = {rank: [TP.row(rank, 0, values(4, 4), [shard(0)], **PARAM)] for rank in range(4)}
        mesh = json.loads(rows[3][0]["mesh"]) | change
        rows[3][0]["mesh"] = json.dumps(mesh)
        assert why in self.refused(tmp_path / "run", rows)

    def test_a_rank_in_no_mesh_is_named_and_what_it_has_no_part_in_is_merged(self, tmp_path: Path) -> None:
        x = values(2, 3)
        rows = {rank: [plain(0, x, **PARAM)] for rank in range(3)}
        mesh = Mesh([0, 1])
        for rank in (0, 1):
            rows[rank].append(mesh.row(rank, 1, x, [shard(0)], **(PARAM | {"name": "cut"})))
        facts: dict[int, dict[str, Any]] = {0: grid_facts([0, 1], 0), 1: grid_facts([0, 1], 1), 2: {}}
        run = mesh_run(tmp_path / "run", rows, facts)
        assert same(run.array("layers.0", site="param", name="cut", step=0), x)
        texts = {one.kind: one.text for one in run.view().rows().findings}
        assert texts == {
            "inconsistent": "rank 2 is in no mesh of this model ([0, 1])",
            "partial": "no row of rank 2 of 0, 1, 2",
        }

    def test_wrappers_and_meshes_that_form_no_grid_are_named(self, tmp_path: Path) -> None:
        facts = {rank: grid_facts(GRID.ranks.tolist(), rank) for rank in range(4)}
        facts[2]["model_parallel"]["ranks"] = [2, 1]
        rows = batches(2, 2)
        run = mesh_run(tmp_path / "run", rows, facts)
        (finding,) = run.view().rows().findings
        assert finding.kind == "inconsistent" and "several model-parallel meshes ([2, 1], [2, 3])" in finding.text

    @pytest.mark.parametrize("ranks", [[True, False], [-1, 0], [0] * 300_000, "01", None, [10**30]])
    def test_meshes_that_are_none_are_taken_for_nothing(self, tmp_path: Path, ranks: Any) -> None:
        rows = {r: [root_input(0, values(2, 3)), plain(1, values(2, 2))] for r in (0, 1)}
        facts = {
            r: {"data_parallel": {"kind": "ddp", "ranks": [0, 1]}, "model_parallel": {"ranks": ranks}} for r in (0, 1)
        }
        assert mesh_run(tmp_path / "run", rows, facts).array("layers.0", step=0).shape == (4, 2)


def test_files_without_the_ranks_of_a_mesh_are_read_as_before(tmp_path: Path) -> None:
    weight = values(6, 8)
    rows = {rank: [GRID.row(rank, 0, weight, [shard(0), shard(1)], **PARAM)] for rank in range(4)}
    for own in rows.values():
        mesh = json.loads(own[0]["mesh"])
        del mesh["ranks"]
        own[0]["mesh"] = json.dumps(mesh)
    facts = {rank: {"data_parallel": {"kind": "fsdp2", "ranks": [rank % 2, rank % 2 + 2]}} for rank in range(4)}
    mesh_run(tmp_path / "run", rows, facts)
    assert same(open_run(tmp_path / "run").array("layers.0", site="param", step=0), weight)


class TestLayoutsThatAreGiven:
    """`--layout` of plain tensors of two ranks that no wrapper was seen around."""

    def run(self, path: Path, *, facts: dict[int, dict[str, Any]] | None = None) -> tuple[Run, Array]:
        """Two ranks with one input and a `head` that is cut along its last dim, as the gradient that arrives there."""
        x, whole = values(4, 2), values(4, 6)
        cut = np.split(whole, 2, axis=1)
        rows = {
            rank: [
                root_input(0, x),
                plain(1, cut[rank].copy(), module_path="head"),
                plain(2, cut[rank].copy(), **(BACK | {"module_path": "head"})),
            ]
            for rank in (0, 1)
        }
        return mesh_run(path, rows, facts or {0: {}, 1: {}}), whole

    def test_a_gradient_that_is_cut_along_another_dim_than_the_batch_is_not_divided(self, tmp_path: Path) -> None:
        run, whole = self.run(tmp_path / "run")
        view = run.view(layouts=["head=shard(1)"]).rows()
        (i,) = (i for i, one in enumerate(view.table.to_pylist()) if one["site"] == "grad_output")
        assert same(view.array(i), whole)

    def test_under_a_wrapper_each_rank_has_a_loss_of_its_own(self, tmp_path: Path) -> None:
        facts = {rank: {"data_parallel": {"kind": "ddp", "ranks": [0, 1]}} for rank in (0, 1)}
        run, whole = self.run(tmp_path / "run", facts=facts)
        view = run.view(layouts=["head=shard(1)"]).rows()
        (i,) = (i for i, one in enumerate(view.table.to_pylist()) if one["site"] == "grad_output")
        assert same(view.array(i), whole / 2)

    def test_of_two_layouts_that_fit_the_last_holds_and_a_warning_names_both(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        run, _ = self.run(tmp_path / "run")
        layouts = ["*=per_rank", "head=shard(1)"]
        run.check_layouts(layouts)
        said = "--layout '*:*=per_rank' and --layout 'head:*=shard(1)' both fit 2 values, such as head:"
        assert said in caplog.text and "the last one that was given holds" in caplog.text
        caplog.clear()
        run.check_layouts(["head=shard(1)", "head:output:=shard(1)"])
        assert not caplog.records


def test_ranks_of_one_mesh_that_got_different_inputs_are_not_said_to_share_a_batch(tmp_path: Path) -> None:
    """Experts over a mesh, without a wrapper: nothing but the mesh says that these ranks belong together."""
    rows = {rank: [root_input(0, values(4, 2)), plain(1, values(4, 6))] for rank in (0, 1)}
    run = mesh_run(tmp_path / "run", rows, {rank: grid_facts([0, 1], rank) for rank in (0, 1)})
    texts = [finding.text for finding in run.view().rows().findings]
    assert len(texts) == 2 and not any("share a batch" in text for text in texts)
    assert all("ranks 0, 1 have parameters over one mesh, and were given different inputs" in text for text in texts)
