"""The layout of a leaf is a property of the leaf: what one step seems to say never decides against the other steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recorder.merge.unit import is_problem
from recorder.run.notes import layout_problems
from recorder.run.run import Run
from tests.rigs.handmade import Row
from tests.rigs.meshes import Mesh, grid_facts, mesh_run, plain, shard

from .test_view import NOT_MEASURED, Array, root_input, row, run_of, same, values

BATCH, STEPS = 6, 5
BACK: dict[str, Any] = {"site": "grad_output", "phase": "backward"}
KEEPS: dict[str, dict[str, Any]] = {
    "tensor and all": {},
    "tensor alone": NOT_MEASURED,
    "statistics": {"encoding": None, "fingerprint": None},
    "fingerprint": {**NOT_MEASURED, "encoding": None},
    "statistics and fingerprint": {"encoding": None},
}
"""What was kept; of a tensor alone there is no fingerprint."""


def kept(one: Row, keep: str) -> Row:
    """A row of which that is left."""
    more = KEEPS[keep]
    return one | {**more, **({"fingerprint": one["fingerprint"]} if keep == "fingerprint" else {})}


def degenerate(kind: str, *shape: int) -> Array:
    """What every rank has alike, whatever its batch."""
    if kind == "nan":
        return np.full(shape, np.nan, np.float32)
    if kind == "mixed with nan":
        found = np.linspace(0, 1, int(np.prod(shape)), dtype=np.float32).reshape(shape)
        found.flat[0] = np.nan
        return found
    if kind == "infinite":
        return np.full(shape, np.inf, np.float32)
    if kind == "bias":
        return np.broadcast_to(np.linspace(-1, 1, shape[-1], dtype=np.float32), shape).copy()
    if kind == "few whole numbers":
        return (np.arange(int(np.prod(shape))) % 2).reshape(shape).astype(np.float32)
    return np.full(shape, {"zero": 0, "constant": 0.1}[kind], np.float32)


def layouts(run: Run, path: str = "layers.0", site: str = "output") -> list[tuple[Any, ...]]:
    """Of each step, the rank, shape and source of its rows."""
    return [
        (one["step"], one["rank"], tuple(json.loads(one["shape"])), one["layout_source"])
        for one in run.view().rows().table.to_pylist()
        if (one["module_path"], one["site"]) == (path, site)
    ]


def training(
    path: Path, kind: str, keep: str, *, width: int = 4, dead_from: int = 2, sizes: tuple[int, int] = (BATCH, BATCH)
) -> tuple[Run, list[Array]]:
    """DDP on two ranks: `dead_from` a step on both have the same, of which `keep` is left; before it, tensors."""
    rows: list[list[Row]] = [[], []]
    outputs: list[list[Array]] = []
    for step in range(STEPS):
        is_dead = step >= dead_from
        own = [degenerate(kind, size, width) if is_dead else values(size, width) for size in sizes]
        outputs.append(own)
        for rank, size in enumerate(sizes):
            seq = len(rows[rank])
            rows[rank].append(root_input(seq, values(size, 9), step=step))
            how = keep if is_dead else "tensor and all"
            rows[rank].append(kept(row(seq + 1, own[rank], step=step), how))
            rows[rank].append(kept(row(seq + 2, own[rank], step=step, **BACK), how))
    return run_of(path, rows), [np.concatenate(some) for some in outputs]


@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("kind", ["nan", "mixed with nan", "infinite", "zero", "constant", "bias", "few whole numbers"])
class TestBatches:
    def test_they_are_batches_also_where_all_ranks_have_the_same(self, tmp_path: Path, kind: str, keep: str) -> None:
        run, outputs = training(tmp_path / "run", kind, keep)
        wanted = [(step, None, (2 * BATCH, 4), "assumed") for step in range(STEPS)]
        assert layouts(run) == wanted and layouts(run, site="grad_output") == wanted
        assert run.view().rows().findings == []
        has_values = [True, True, *[keep.startswith("tensor")] * (STEPS - 2)]
        for step in np.flatnonzero(has_values).tolist():
            assert same(run.array("layers.0", step=step), outputs[step])
            found = run.array("layers.0", site="grad_output", step=step)
            assert np.array_equal(found, outputs[step] / 2, equal_nan=True)

    def test_they_are_that_from_the_first_step_on(self, tmp_path: Path, kind: str, keep: str) -> None:
        """The layout is known only later."""
        rows: list[list[Row]] = [[], []]
        for step in range(STEPS):
            for rank in range(2):
                own = degenerate(kind, BATCH, 4) if step < 3 else values(BATCH, 4)
                rows[rank].append(root_input(2 * step, values(BATCH, 9), step=step))
                rows[rank].append(kept(row(2 * step + 1, own, step=step), keep))
        run = run_of(tmp_path / "run", rows)
        assert layouts(run) == [(step, None, (2 * BATCH, 4), "assumed") for step in range(STEPS)]

    def test_windows_of_steps_answer_as_the_whole_does(self, tmp_path: Path, kind: str, keep: str) -> None:
        run, _ = training(tmp_path / "run", kind, keep)
        whole = run.view().rows().table
        parts = [run.view().rows(step, step + 1).table.to_pylist() for step in range(STEPS)]
        assert repr([one for part in parts for one in part]) == repr(whole.to_pylist())


@pytest.mark.parametrize("kind", ["nan", "zero", "constant", "bias"])
def test_ragged_batches_of_equal_values_are_batches(tmp_path: Path, kind: str) -> None:
    run, _ = training(tmp_path / "run", kind, "statistics", sizes=(4, 2))
    assert layouts(run) == [(step, None, (6, 4), "assumed") for step in range(STEPS)]


@pytest.mark.parametrize("keep", ["tensor and all", "statistics", "fingerprint"])
@pytest.mark.parametrize("kind", ["nan", "zero", "constant"])
def test_where_nothing_else_is_known_it_is_assumed_at_every_step(tmp_path: Path, kind: str, keep: str) -> None:
    run, _ = training(tmp_path / "run", kind, keep, dead_from=0)
    assert layouts(run) == [(step, None, (2 * BATCH, 4), "assumed") for step in range(STEPS)]


@pytest.mark.parametrize("keep", ["tensor and all", "statistics", "statistics and fingerprint"])
def test_what_modules_make_of_constants_is_evidence_of_nothing(tmp_path: Path, keep: str) -> None:
    """A ReLU that was dead from the first step on: its outputs are zeros, and behind it all samples are alike."""
    rows: list[list[Row]] = [[], []]
    zeros, bias, normed = np.zeros((6, 8), np.float32), degenerate("bias", 6, 4), degenerate("bias", 6, 4) / 2
    for step in range(3):
        for rank in range(2):
            chain = [
                root_input(0, values(6, 9)),
                row(1, zeros, module_path="relu"),
                row(2, zeros, module_path="head", site="input", name="input"),
                row(3, bias, module_path="head"),
                row(4, bias, module_path="norm", site="input", name="input"),
                row(5, normed, module_path="norm"),
                row(6, normed, module_path=""),
                row(7, bias, module_path="head", **BACK),
            ]
            for one in chain:
                rows[rank].append(kept(one, keep) | {"step": step, "seq": len(rows[rank])})
    run = run_of(tmp_path / "run", rows)
    for path, site in (("head", "input"), ("head", "output"), ("norm", "input"), ("norm", "output"), ("", "output")):
        width = 8 if (path, site) == ("head", "input") else 4
        assert layouts(run, path, site) == [(step, None, (12, width), "assumed") for step in range(3)]
    assert layouts(run, "head", "grad_output") == [(step, None, (12, 4), "assumed") for step in range(3)]


def chained(path: Path, chains: list[list[Row]], keep: str) -> Run:
    """DDP on two ranks that have the same rows at each of three steps, but inputs of their own."""
    rows: list[list[Row]] = [[], []]
    for step in range(3):
        for rank, chain in enumerate(chains):
            for one in [root_input(0, values(6, 9)), *chain]:
                rows[rank].append(kept(one, keep) | {"step": step, "seq": len(rows[rank])})
    return run_of(path, rows)


def given(path: str, array: Array, name: str = "input") -> Row:
    return row(0, array, module_path=path, site="input", name=name)


ROWS_ALONE = pytest.mark.parametrize("keep", ["statistics", "statistics and fingerprint"])


@ROWS_ALONE
def test_zeros_of_either_sign_are_evidence_of_nothing(tmp_path: Path, keep: str) -> None:
    """A negative number by 0 is -0.0: fingerprints of zeros differ, and what is made of them does not."""
    bias, chains = degenerate("bias", 6, 4), []
    for _ in range(2):
        zeros = values(6, 8) * np.float32(0)
        chains.append([given("head", zeros), row(0, bias, module_path="head"), given("act", bias)])
    run = chained(tmp_path / "run", chains, keep)
    for path, site, width in (("head", "input", 8), ("head", "output", 4), ("act", "input", 4)):
        assert layouts(run, path, site) == [(step, None, (12, width), "assumed") for step in range(3)]


@ROWS_ALONE
def test_what_functions_make_of_constants_is_evidence_of_nothing(tmp_path: Path, keep: str) -> None:
    """No module made it, so that no input tells what it was made of."""
    bias = degenerate("bias", 6, 4)
    chain = [
        row(0, degenerate("zero", 6, 4), module_path="relu"),
        row(0, bias, module_path="silent"),
        given("block", values(6, 4)),
        given("block.head", degenerate("zero", 6, 4)),
        row(0, bias * 3, module_path="block.head"),
        row(0, np.tanh(bias), module_path="block"),
        given("cross", np.exp(bias)),
        given("cross", bias * 5, name="other"),
        row(0, np.sin(bias), module_path="cross"),
        row(0, np.cos(bias), module_path="cross", site="tap", name="tapped"),
    ]
    run = chained(tmp_path / "run", [chain, chain], keep)
    for path, site in (("silent", "output"), ("block", "output"), ("cross", "output"), ("cross", "tap")):
        assert layouts(run, path, site) == [(step, None, (12, 4), "assumed") for step in range(3)], path
    found = layouts(run, "cross", "input")
    assert sorted(found) == [(step, None, (12, 4), "assumed") for step in range(3) for _ in "ab"]


@ROWS_ALONE
def test_copies_whose_origin_is_recorded_are_copies_beside_constants(tmp_path: Path, keep: str) -> None:
    """Of a table as long as the batch: made of what differs, or before anything constant was."""
    sines, cosines, early = (values(6, 4) for _ in range(3))
    chains = [
        [
            root_input(0, np.ones((6, 9), np.int64), name="mask"),
            given("first", early),
            row(0, degenerate("zero", 6, 4), module_path="relu"),
            given("positions", values(6, 4)),
            row(0, sines, module_path="positions", name="0"),
            row(0, cosines, module_path="positions", name="1"),
            given("attention", sines, name="sines"),
            given("attention", early, name="early"),
        ]
        for _ in range(2)
    ]
    run = chained(tmp_path / "run", chains, keep)
    for path, site in (("first", "input"), ("positions", "output"), ("attention", "input")):
        assert {one[2:] for one in layouts(run, path, site)} == {((6, 4), "inferred")}, path


@pytest.mark.parametrize("keep", ["tensor and all", "tensor alone"])
def test_values_tell_copies_also_where_their_origin_is_not_recorded(tmp_path: Path, keep: str) -> None:
    table = values(6, 4)
    chain = [row(0, degenerate("zero", 6, 4), module_path="relu"), given("late", table)]
    run = chained(tmp_path / "run", [chain, chain], keep)
    assert layouts(run, "late", "input") == [(step, None, (6, 4), "inferred") for step in range(3)]


class TestCopies:
    """Of a table of positions as long as the batch, which the sizes alone would make a batch."""

    def table(self, path: Path, later: list[Array] | Array, keep: str, *, from_step: int = 2, **more: Any) -> Run:
        rows: list[list[Row]] = [[], []]
        positions = values(4, 8)
        for step in range(4):
            for rank in range(2):
                own = positions if step < from_step else later[rank] if isinstance(later, list) else later
                one = row(2 * step + 1, own, step=step, **more)
                rows[rank].append(root_input(2 * step, values(4, 3), step=step))
                rows[rank].append(kept(one, "tensor and all" if step < from_step else keep))
        return run_of(path, rows)

    @pytest.mark.parametrize("keep", KEEPS)
    @pytest.mark.parametrize("kind", ["nan", "zero", "constant", "bias"])
    def test_they_are_copies_also_where_values_say_nothing(self, tmp_path: Path, kind: str, keep: str) -> None:
        run = self.table(tmp_path / "run", degenerate(kind, 4, 8), keep)
        assert layouts(run) == [(step, None, (4, 8), "inferred") for step in range(4)]
        assert run.view().rows().findings == []

    @pytest.mark.parametrize("keep", KEEPS)
    @pytest.mark.parametrize("is_last_alone", [False, True])
    def test_copies_that_come_apart_are_a_finding(self, tmp_path: Path, keep: str, is_last_alone: bool) -> None:
        run = self.table(tmp_path / "run", [values(4, 8) for _ in "ab"], keep, from_step=3 if is_last_alone else 2)
        first = 3 if is_last_alone else 2
        wanted = [(step, None, (4, 8), "inferred") for step in range(first)]
        assert layouts(run)[:first] == wanted
        assert [one[:2] for one in layouts(run)[first:]] == [(s, rank) for s in range(first, 4) for rank in (0, 1)]
        (finding,) = run.view().rows().findings
        assert (finding.kind, finding.step, finding.module_path) == ("layout_changes", first, "layers.0")
        assert is_problem(finding.kind) and finding.num_rows == 4 - first
        if keep != "tensor alone":  # of which nothing but the values would tell, and these are not read there
            assert "alike at other steps" in (layout_problems(run) or [""])[0]
            with pytest.MonkeyPatch.context() as patch:  # too many rows are not even loaded
                patch.setattr("recorder.run.notes._MAX_LOADED_ROWS", run.num_rows - 1)
                patch.setattr("recorder.read.metadata.MetadataRows.load", None)
                assert layout_problems(run) is None
        layout = run.layout("layers.0", step=3)
        assert (layout.kind, layout.global_shape) == ("layout_changes", None)

    @pytest.mark.parametrize(("params_from", "num_problems"), [(2, 0), (3, 1)])
    def test_copies_that_come_apart_with_parameters_are_no_contradiction(
        self, tmp_path: Path, params_from: int, num_problems: int
    ) -> None:
        """The record is right: what the model computes from parameters that differ between ranks differs, too."""
        param: dict[str, Any] = {"site": "param", "name": "weight", "phase": "optimizer", "micro_step": None}
        rows: list[list[Row]] = [[], []]
        positions = values(4, 8)
        for step in range(4):
            for rank in range(2):
                own = [positions if rank == 0 or step < since else values(4, 8) for since in (2, params_from)]
                rows[rank].append(root_input(3 * step, values(4, 3), step=step))
                rows[rank].append(row(3 * step + 1, own[0], step=step))
                rows[rank].append(row(3 * step + 2, own[1], step=step, **param))
        run = run_of(tmp_path / "run", rows)
        kinds = {finding.kind for finding in run.view().rows().findings}
        assert kinds == {"layout_changes", "replicas_differ"}
        assert len(layout_problems(run) or []) == num_problems

    def test_parameters_that_come_apart_are_replicas_that_differ(self, tmp_path: Path) -> None:
        more: dict[str, Any] = {"site": "param", "name": "weight", "phase": "optimizer", "micro_step": None}
        run = self.table(tmp_path / "run", [values(4, 8) for _ in "ab"], "statistics", **more)
        (finding,) = run.view().rows().findings
        assert (finding.kind, finding.step) == ("replicas_differ", 2)

    @pytest.mark.parametrize("keep", ["tensor and all", "statistics"])
    def test_copies_of_other_lengths_are_no_finding_of_change(self, tmp_path: Path, keep: str) -> None:
        """Each rank pads to its own longest sample."""
        rows: list[list[Row]] = [[], []]
        for step, lengths in enumerate([(5, 5), (5, 7), (5, 5)]):
            for rank, length in enumerate(lengths):
                positions = np.sin(np.arange(length * 2, dtype=np.float32)).reshape(1, length, 2)
                rows[rank].append(root_input(2 * step, values(3, 3), step=step))
                rows[rank].append(kept(row(2 * step + 1, positions, step=step), keep))
        run = run_of(tmp_path / "run", rows)
        assert {finding.kind for finding in run.view().rows().findings} == {"per_rank"}
        assert [one for one in layouts(run) if one[0] != 1] == [(s, None, (1, 5, 2), "inferred") for s in (0, 2)]


@pytest.mark.parametrize("keep", ["tensor and all", "statistics", "statistics and fingerprint"])
def test_few_classes_that_are_equal_by_chance_are_a_batch(tmp_path: Path, keep: str) -> None:
    rows: list[list[Row]] = [[], []]
    for step in range(6):
        for rank in range(2):
            classes = np.array([1, 0, 1] if step < 5 else [rank, 1, 0], np.float32)
            rows[rank].append(root_input(2 * step, values(3, 9), step=step))
            rows[rank].append(kept(row(2 * step + 1, classes, step=step), keep))
    run = run_of(tmp_path / "run", rows)
    assert layouts(run) == [(step, None, (6,), "assumed") for step in range(6)]
    assert run.view().rows().findings == []


def test_the_gradient_is_laid_out_as_the_value_that_only_other_steps_have(tmp_path: Path) -> None:
    rows: list[list[Row]] = [[], []]
    positions = values(4, 8)
    for step in range(3):
        for rank in range(2):
            rows[rank].append(root_input(3 * step, values(4, 3), step=step))
            if step == 0:
                rows[rank].append(row(1, positions, step=step))
            rows[rank].append(row(3 * step + 2, values(4, 8), step=step, **BACK))
    run = run_of(tmp_path / "run", rows)
    assert [one[2] for one in layouts(run, site="grad_output")] == [(4, 8)] * 3


def test_a_dim_that_is_the_batch_by_chance_at_one_step_is_not_taken_there(tmp_path: Path) -> None:
    """Sequence first, and once as long as the batch."""
    rows: list[list[Row]] = [[], []]
    for step, length in enumerate((5, 3, 7)):
        for rank in range(2):
            rows[rank].append(root_input(2 * step, values(3, 9), step=step))
            rows[rank].append(row(2 * step + 1, values(length, 3, 2), step=step))
    run = run_of(tmp_path / "run", rows)
    assert [one[2] for one in layouts(run)] == [(5, 6, 2), (3, 6, 2), (7, 6, 2)]


def test_calls_without_the_roots_input_have_the_batch_where_other_calls_have_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An inner model is called by itself, without gradients, before its wrapper is."""
    rows: list[list[Row]] = [[], []]
    for own in rows:
        for call in range(2):
            own.append(row(call, values(1, 4, 3), mode="no_grad", call=call))
            own.append(row(2 + call, values(1, 4, 3), mode="no_grad", call=call, module_path="layers.1"))
        own += [root_input(4, values(4, 9)), row(5, values(1, 4, 3))]
    run = run_of(tmp_path / "run", rows)
    assert run.array("layers.0", step=0, mode="no_grad", call=1).shape == (1, 8, 3)
    assert not caplog.messages and "guess" not in str(run.layout("layers.0", step=0, mode="no_grad", call=1))
    assert run.array("layers.1", step=0, mode="no_grad", call=1).shape == (2, 4, 3)
    assert "that the batch is dim 0 is a guess" in caplog.text
    assert "is a guess" in str(run.layout("layers.1", step=0, mode="no_grad", call=1))


@pytest.mark.parametrize("kind", ["zero", "nan", "constant"])
def test_an_argument_that_is_once_equal_on_all_ranks_is_the_batch_there_too(tmp_path: Path, kind: str) -> None:
    rows: list[list[Row]] = [[], []]
    table, other = values(8, 2, 2), values(8, 2, 2, 2)
    for step in range(3):
        for rank in range(2):
            x = degenerate(kind, 3, 9) if step == 1 else values(3, 9)
            inputs = {"x": x, "table": table, "other": other}
            own = [root_input(0, one, name=name) for name, one in inputs.items()] + [row(0, values(3, 8))]
            rows[rank] += [one | {"step": step, "seq": len(rows[rank]) + i} for i, one in enumerate(own)]
    run = run_of(tmp_path / "run", rows)
    assert [one[2] for one in layouts(run)] == [(6, 8)] * 3


class TestTensorParallel:
    """Of plain tensors of two ranks that share a batch."""

    def run(self, path: Path, acts: list[list[Array]], keep: str, *, has_neighbour: list[bool]) -> Run:
        """The act's tensors by step and rank; of a neighbour beside it, which is a DTensor, at some steps."""
        mesh, rows = Mesh([0, 1]), dict[int, list[Row]]({0: [], 1: []})
        for step, own in enumerate(acts):
            x, hidden = values(5, 2), values(5, 6)
            for rank in rows:
                seq = len(rows[rank])
                rows[rank].append(plain(seq, x, module_path="", site="input", name="x", step=step))
                if has_neighbour[step]:
                    rows[rank].append(mesh.row(rank, seq + 1, hidden, [shard(1)], module_path="fc1", step=step))
                one = plain(seq + 2, own[rank], module_path="act", step=step)
                rows[rank].append(kept(one, keep if step else "tensor and all"))
        return mesh_run(path, rows, {rank: grid_facts([0, 1], rank) for rank in rows})

    @pytest.mark.parametrize("has_neighbour", [True, False])
    @pytest.mark.parametrize("keep", KEEPS)
    @pytest.mark.parametrize("kind", ["nan", "zero", "constant", "bias"])
    def test_pieces_are_pieces_also_where_both_have_the_same(
        self, tmp_path: Path, kind: str, keep: str, has_neighbour: bool
    ) -> None:
        same_ = degenerate(kind, 5, 3)
        run = self.run(
            tmp_path / "run", [[values(5, 3) for _ in "ab"], [same_, same_]], keep, has_neighbour=[True, has_neighbour]
        )
        assert [one[:3] for one in layouts(run, "act")] == [(step, None, (5, 6)) for step in range(2)]

    @pytest.mark.parametrize("keep", KEEPS)
    @pytest.mark.parametrize("kind", ["nan", "zero", "constant"])
    def test_copies_are_copies_also_where_values_say_nothing(self, tmp_path: Path, kind: str, keep: str) -> None:
        copy, later = values(5, 3), degenerate(kind, 5, 3)
        run = self.run(tmp_path / "run", [[copy, copy], [later, later]], keep, has_neighbour=[True, True])
        assert layouts(run, "act") == [(step, None, (5, 3), "inferred") for step in range(2)]

    def test_copies_that_come_apart_are_a_finding_and_no_pieces(self, tmp_path: Path) -> None:
        copy = values(5, 3)
        run = self.run(
            tmp_path / "run", [[copy, copy], [copy, values(5, 3)]], "statistics", has_neighbour=[False, True]
        )
        assert [one[:2] for one in layouts(run, "act")] == [(0, None), (1, 0), (1, 1)]
        assert [finding.kind for finding in run.view().rows().findings] == ["layout_changes"]
