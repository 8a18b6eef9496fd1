"""`diff`: where two runs differ, pair by pair, over layouts and without reading what need not be read."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest

import recorder
from recorder.analyze.diff import culprit_findings, pairs
from recorder.analyze.diff.culprit_events import StepEvent
from recorder.analyze.diff.culprit_search import CulpritSearch
from recorder.analyze.diff.diff import diff, payload_bytes
from recorder.analyze.diff.reply import _by_reason, accusations
from recorder.errors import LookupFailedError
from recorder.format.fingerprint import fingerprint, to_text
from recorder.merge.merge import merge_run
from recorder.numerics.dtypes import item_bytes
from recorder.run.step_ranges import global_step_ranges
from tests.rigs.handmade import HandmadeWriter, Row, make_row, make_run
from tests.rigs.meshes import PARAM, Mesh, grid_facts, mesh_run, plain, root_input, shard

MODULES = ("up", "act", "down")


def with_fingerprint(row: Row, values: npt.NDArray[Any]) -> Row:
    data = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    return row | {"fingerprint": to_text(fingerprint(data, item_bytes(row["dtype"]), values.shape))}


def row(seq: int, values: npt.NDArray[Any], **columns: Any) -> Row:
    return with_fingerprint(make_row(seq, values, **columns), values)


def write(path: Path, *ranks: list[Row], **of_root: Any) -> recorder.Run:
    run = make_run(path, world_size=len(ranks))
    for rank, rows in enumerate(ranks):
        writer = HandmadeWriter(run, rank)
        writer.add_shard([rows])
        facts = {"kind": "ddp", "ranks": [*range(len(ranks))]} if len(ranks) > 1 else None
        root = {"name": "model", "modules": [], "data_parallel": facts} | of_root
        writer.finish(roots=[root], world_size=len(ranks))
    return recorder.open_run(run)


def values_of(step: int, number: int) -> npt.NDArray[np.float32]:
    return np.random.default_rng([step, number]).standard_normal((4, 3)).astype(np.float32)


Change = Callable[[int, str, npt.NDArray[np.float32]], npt.NDArray[Any] | None]


def training(
    path: Path, change: Change = lambda step, module, values: values, num_steps: int = 3, **columns: Any
) -> recorder.Run:
    """Outputs of three modules at each step, in one process."""
    rows: list[Row] = []
    for step in range(num_steps):
        for number, module in enumerate(MODULES):
            values = change(step, module, values_of(step, number))
            if values is not None:
                rows.append(row(len(rows), values, step=step, module_path=module, **columns))
    return write(path, rows)


def at(where: tuple[int, str], value: Any) -> Change:
    """One element of one value changed."""

    def change(step: int, module: str, values: npt.NDArray[np.float32]) -> npt.NDArray[Any]:
        if (step, module) == where:
            values = values.copy()
            values[1, 2] = value(values[1, 2]) if callable(value) else value
        return values

    return change


def test_equal_runs_are_equal_and_no_payload_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = training(tmp_path / "a"), training(tmp_path / "b")
    monkeypatch.setattr(pairs, "compare", lambda *args: pytest.fail("read"))
    found = diff(a, b)
    assert found.is_equal and found.first is None and found.table.num_rows == found.modules.num_rows == 0
    assert (found.num_compared, found.num_by_fingerprint) == (9, 9)


def test_the_first_divergence_is_the_earliest_in_the_order_of_execution(tmp_path: Path) -> None:
    def change(step: int, module: str, values: npt.NDArray[np.float32]) -> npt.NDArray[Any]:
        return values + np.float32(0.5) if step >= 1 and module != "up" else values

    found = diff(training(tmp_path / "a"), training(tmp_path / "b", change))
    assert not found.is_equal and found.first is not None
    assert (found.first.step, found.first.module_path, found.first.site, found.first.kind) == (
        1,
        "act",
        "output",
        "values",
    )
    assert found.first.max_abs == pytest.approx(0.5, rel=1e-6)
    assert found.table.column("module_path").to_pylist() == ["act", "down"] * 2
    modules = found.modules.to_pylist()
    assert [(m["module_path"], m["first_step"], m["differing"], m["compared"]) for m in modules] == [
        ("act", 1, 2, 3),
        ("down", 1, 2, 3),
    ]
    assert (found.num_by_fingerprint, found.num_by_values) == (5, 4)


def test_distances_are_those_of_the_values(tmp_path: Path) -> None:
    a = training(tmp_path / "a")
    b = training(tmp_path / "b", at((1, "act"), lambda x: np.nextafter(x, np.float32(9), dtype=np.float32)))
    (line,) = diff(a, b).table.to_pylist()
    one, two = (run.array("act", step=1).astype(np.float64) for run in (a, b))
    assert (line["numel"], line["num_outside"], line["max_ulp"]) == (12, 1, 1)
    assert line["of_max"] == line["max_abs"] / max(abs(run.array("act", step=1)).max() for run in (a, b))
    assert line["max_abs"] == abs(one - two).max()
    assert (line["dtype_a"], line["shape_b"], line["statistic"]) == ("float32", "[4,3]", None)


@pytest.mark.parametrize(
    ("tolerance", "is_equal"),
    [({"ulp": 1}, True), ({"ulp": 0}, False), ({"rtol": 1e-6}, True), ({"atol": 1e-6}, True), ({"atol": 1e-9}, False)],
)
def test_a_tolerance_decides(tmp_path: Path, tolerance: dict[str, Any], is_equal: bool) -> None:
    a = training(tmp_path / "a")
    b = training(tmp_path / "b", at((1, "act"), lambda x: np.nextafter(x, np.float32(9), dtype=np.float32)))
    assert diff(a, b, **tolerance).is_equal == is_equal


@pytest.mark.parametrize(("num_nans", "verdict"), [(2, "equal"), (0, "different")])
def test_the_bits_of_a_nan_are_no_difference(tmp_path: Path, num_nans: int, verdict: str) -> None:
    numbers = {"nan_count": num_nans, "mean": 1.0, "l2": 1.0}
    rows = [[make_row(0, fingerprint=f"{bits:016x}", encoding=None) | numbers] for bits in (1, 2)]
    found = diff(write(tmp_path / "a", rows[0]), write(tmp_path / "b", rows[1]))
    assert found.verdict == verdict


@pytest.mark.parametrize("tolerance", [{"rtol": math.nan}, {"atol": -1.0}, {"ulp": -1}])
def test_a_tolerance_that_says_nothing_is_refused(tmp_path: Path, tolerance: dict[str, Any]) -> None:
    run = training(tmp_path / "a")
    with pytest.raises(LookupFailedError, match="a tolerance is 0 or more"):
        diff(run, run, **tolerance)


def test_non_finite_values_on_one_side_are_outside_any_tolerance(tmp_path: Path) -> None:
    found = diff(training(tmp_path / "a"), training(tmp_path / "b", at((2, "up"), math.nan)), atol=1e9)
    (line,) = found.table.to_pylist()
    assert (line["nonfinite_a"], line["nonfinite_b"], line["num_outside"]) == (0, 1, 1)


def test_shapes_and_types(tmp_path: Path) -> None:
    def change(step: int, module: str, values: npt.NDArray[np.float32]) -> npt.NDArray[Any]:
        if step == 0:
            return values
        return (
            values[:3]
            if module == "up"
            else values.astype(np.float64)
            if module == "act"
            else values.astype(np.float16)
        )

    a, b = training(tmp_path / "a", num_steps=2), training(tmp_path / "b", change, num_steps=2)
    found = diff(a, b)
    assert [line["kind"] for line in found.table.to_pylist()] == ["shape", "dtype", "values"]
    assert found.table.column("shape_b").to_pylist()[0] == "[3,3]"
    assert found.table.column("dtype_b").to_pylist()[1] == "float64"
    wider = diff(a, b, atol=0.01)
    assert [line["kind"] for line in wider.table.to_pylist()] == ["shape"]


def test_the_parts_of_ranks_of_another_shape_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The output of a culprit's module is asked which rank's part differs, and another model's has other dims."""
    box = SimpleNamespace(start=(0, 0, 0), shape=(2, 3, 5))
    parts = [(rank, 0, SimpleNamespace(run=None, boxes=[box])) for rank in range(2)]

    def side(*shape: int) -> Any:
        rows = SimpleNamespace(chunk_regions=lambda at: parts)
        return SimpleNamespace(rows=rows, table=pa.table({"at": [0]}), array=lambda row: np.ones(shape))

    monkeypatch.setattr(culprit_findings, "_own_rows", lambda side, row: {})
    assert culprit_findings._distances(side(4, 3), side(4, 3, 5), 0, 0) == {}
    assert culprit_findings._distances(side(4, 3, 5), side(4, 3, 5), 0, 0) == {(0, 0): 0.0, (1, 0): 0.0}


@pytest.mark.parametrize("fill", [-np.inf, np.nan])
def test_a_mask_that_both_runs_have_does_not_hide_which_rank_differs(
    monkeypatch: pytest.MonkeyPatch, fill: float
) -> None:
    parts = [
        (rank, 0, SimpleNamespace(run=None, boxes=[SimpleNamespace(start=(4 * rank,), shape=(4,))]))
        for rank in range(2)
    ]

    def side(last: float) -> Any:
        rows = SimpleNamespace(chunk_regions=lambda at: parts)
        values = np.array([0.0, fill, 2.0, 3.0, 4.0, fill, 6.0, last])
        return SimpleNamespace(rows=rows, table=pa.table({"at": [0], "shape": ["[8]"]}), array=lambda row: values)

    monkeypatch.setattr(culprit_findings, "_own_rows", lambda side, row: {})
    assert culprit_findings._distances(side(7.0), side(8.0), 0, 0) == {(0, 0): 0.0, (1, 0): 1.0}
    assert culprit_findings._owners(side(7.0), side(8.0), 0, 0) == ([1], [])
    assert culprit_findings._distances(side(7.0), side(np.inf), 0, 0) == {(0, 0): 0.0, (1, 0): np.inf}


def test_what_one_side_alone_has_is_grouped(tmp_path: Path) -> None:
    def without_act(step: int, module: str, values: npt.NDArray[np.float32]) -> npt.NDArray[Any] | None:
        return None if module == "act" and step > 0 else values

    a, b = training(tmp_path / "a", num_steps=5), training(tmp_path / "b", without_act, num_steps=4)
    found = diff(a, b)
    assert not found.is_equal and found.first is None
    assert found.only_a.to_pylist() == [
        {
            "root": "model",
            "module_path": "act",
            "site": "output",
            "name": "",
            "rows": 3,
            "first_step": 1,
            "last_step": 3,
        }
    ]
    assert found.only_b.num_rows == 0
    assert (found.steps_only_a, found.steps_only_b) == ([4], [])
    assert diff(a, b, common=True).is_equal


def test_steps_that_one_side_alone_has_are_told_and_do_not_differ(tmp_path: Path) -> None:
    found = diff(training(tmp_path / "a", num_steps=2), training(tmp_path / "b", num_steps=3))
    assert found.is_equal and found.steps_only_b == [2]


def test_doubles_of_opposite_sign_are_more_steps_apart_than_a_double_counts(tmp_path: Path) -> None:
    a, b = (write(tmp_path / name, [make_row(0, np.array([value]))]) for name, value in (("a", 1.0), ("b", -1.0)))
    found = diff(a, b)
    assert found.first is not None and found.first.max_ulp == 2 * int(np.array(1.0).view(np.uint64))
    assert found.modules.num_rows == 1


@pytest.mark.parametrize("has_fingerprint", [True, False])
def test_without_payloads_statistics_are_compared(tmp_path: Path, has_fingerprint: bool) -> None:
    def run(name: str, value: float) -> recorder.Run:
        rows = []
        for step in range(2):
            values = np.full((2, 2), value if step else 1, np.float32)
            one = row(step, values, step=step, encoding=None)
            rows.append(one if has_fingerprint else one | {"fingerprint": None})
        return write(tmp_path / name, rows)

    found = diff(run("a", 2), run("b", 3))
    (line,) = found.table.to_pylist()
    assert (line["step"], line["kind"], line["max_abs"]) == (1, "statistics", None)
    assert (line["statistic"], line["mean_a"], line["mean_b"]) == ("min", 2, 3)
    assert (line["statistic_a"], line["statistic_b"]) == (2, 3)
    assert line["statistic_rel"] == pytest.approx(1 / 3)
    assert found.first is not None and (found.first.statistic, found.first.statistic_b) == ("min", 3)
    (module,) = found.modules.to_pylist()
    assert (module["by_statistics"], module["max_abs"], module["of_max"]) == (1, None, None)
    assert module["statistic_rel"] == pytest.approx(1 / 3)
    assert found.num_by_statistics == (1 if has_fingerprint else 2)
    assert diff(run("c", 2), run("d", 3), rtol=0.34).is_equal


def test_sums_of_squares_that_overflow_on_both_sides_do_not_differ(tmp_path: Path) -> None:
    """A mask of the smallest number of its type has such sums; numpy would warn of the difference of two infinities."""
    over = {"l2": np.inf, "sum_sq": np.inf, "sum_fourth": np.inf, "sum": -np.inf, "mean": -np.inf, "std": np.inf}
    rows = [make_row(0, np.ones(4), encoding=None, **over)]
    found = diff(write(tmp_path / "a", rows), write(tmp_path / "b", rows))
    assert found.is_equal and found.num_by_statistics == 1


def test_statistics_count_what_is_not_finite(tmp_path: Path) -> None:
    values = np.array([1, 2, np.nan, np.inf])
    a, b = (write(tmp_path / str(n), [make_row(0, values[:n], encoding=None, shape="[4]", numel=4)]) for n in (2, 4))
    found = diff(a, b)
    (line,) = found.table.to_pylist()
    assert (line["kind"], line["nonfinite_a"], line["nonfinite_b"]) == ("statistics", 0, 2)
    assert (line["statistic"], line["statistic_a"], line["statistic_b"]) == ("inf_count", 0, 1)
    assert line["statistic_rel"] is None
    assert [(m["nonfinite_a"], m["nonfinite_b"], m["statistic_rel"]) for m in found.modules.to_pylist()] == [
        (0, 2, None)
    ]


def test_a_statistic_within_the_tolerance_is_not_the_one_that_differs(tmp_path: Path) -> None:
    a, b = (
        write(
            tmp_path / str(n), [make_row(0, [1.0, 100.0], encoding=None) | {"mean": 50 + 9 * n, "l2": 100 + 20.0 * n}]
        )
        for n in range(2)
    )
    (line,) = diff(a, b, rtol=0.1).table.to_pylist()
    assert (line["statistic"], line["statistic_a"], line["statistic_b"]) == ("l2", 100, 120)


def without_a_rank(run: recorder.Run) -> recorder.Run:
    """The same run of two ranks, of which the second left nothing."""
    (run.path / "rank=00001").rename(run.path.parent / f"{run.path.name}-lost")
    return recorder.open_run(run.path)


def sharded(path: Path, num_steps: int = 2) -> recorder.Run:
    """Inputs and outputs along the batch, and a parameter that is the same on both ranks."""
    ranks: list[list[Row]] = [[], []]
    for rank, rows in enumerate(ranks):
        for step in range(num_steps):
            common: dict[str, Any] = {"step": step, "rank": rank}
            x = np.full((2, 1), rank + 1.0)
            rows.append(row(len(rows), x, module_path="", site="input", name="x", **common))
            values = values_of(step, rank)[:2]
            rows.append(row(len(rows), values, module_path="up", **common))
            state: dict[str, Any] = {"site": "param", "name": "weight", "phase": "optimizer", "micro_step": None}
            rows.append(row(len(rows), np.ones(3), module_path="up", **state, **common))
    return write(path, *ranks)


def test_a_run_that_lacks_a_rank_says_so(tmp_path: Path) -> None:
    a, b = sharded(tmp_path / "a"), without_a_rank(sharded(tmp_path / "b"))
    found = diff(a, b)
    assert found.partial == [("b", [1], 4)]
    assert [line["kind"] for line in found.table.to_pylist()] == ["partial"] * 4
    assert found.first is not None and (found.first.kind, found.first.lacks_a, found.first.lacks_b) == (
        "partial",
        None,
        "[1]",
    )
    assert diff(b, a).partial == [("a", [1], 4)]
    again = without_a_rank(sharded(tmp_path / "c"))
    same = diff(b, again)
    assert same.is_equal and same.partial == []


def test_one_ranks_own_parameter_is_not_compared_with_another_ranks(tmp_path: Path) -> None:
    state: dict[str, Any] = {"site": "param", "name": "weight", "phase": "optimizer", "micro_step": None}
    ranks = [
        [row(step, values_of(step, rank), step=step, rank=rank, module_path="up", **state) for step in range(2)]
        for rank in range(2)
    ]
    whole, killed = write(tmp_path / "whole", *ranks), write(tmp_path / "killed", ranks[0][:1], ranks[1])
    found = diff(killed, whole)
    assert found.partial == [("a", [0], 1)]
    assert [(one["step"], one["kind"]) for one in found.table.to_pylist()] == [(1, "partial")]
    assert diff(whole, killed).partial == [("b", [0], 1)]


def test_what_one_run_alone_has_is_no_culprit_where_the_common_values_count(tmp_path: Path) -> None:
    of: dict[str, Any] = {"site": "grad_output", "phase": "backward", "num_steps": 2}
    a = training(tmp_path / "a", **of)
    b = training(tmp_path / "b", lambda step, module, values: None if module == MODULES[-1] else values, **of)
    assert diff(a, b).culprits != []
    found = diff(a, b, common=True)
    assert found.is_equal and found.culprits == []


def test_a_merged_run_that_lacks_a_rank_says_so(tmp_path: Path) -> None:
    a = sharded(tmp_path / "a")
    lost = without_a_rank(sharded(tmp_path / "b"))
    merge_run(lost, tmp_path / "merged")
    found = diff(a, recorder.open_run(tmp_path / "merged"))
    assert found.partial == [("b", [1], 4)]
    assert set(found.table.column("kind").to_pylist()) == {"partial"}


@pytest.mark.parametrize("note", ["5", "[[", '{"partial":5}', '{"partial":["x"]}', '{"partial":[]}'])
def test_a_strangers_note_is_no_error(tmp_path: Path, note: str) -> None:
    a, b = (write(tmp_path / str(n), [make_row(0, np.zeros(n), note=note)]) for n in (1, 2))
    found = diff(a, b)
    assert found.partial == [] and found.table.column("kind").to_pylist() == ["shape"]


def test_a_loss_and_layouts_hold_for_both_runs(tmp_path: Path) -> None:
    def gradients(path: Path) -> recorder.Run:
        ranks = []
        for rank in range(2):
            x = row(0, np.full((2, 1), rank + 1.0), rank=rank, module_path="", site="input", name="x")
            output = row(1, values_of(0, rank)[:2], rank=rank, module_path="up")
            gradient = row(2, values_of(1, rank)[:2], rank=rank, module_path="up", site="grad_output", phase="backward")
            ranks.append([x, output, gradient])
        return write(path, *ranks)

    two = gradients(tmp_path / "two")
    rows = [
        row(0, np.repeat([1.0, 2.0], 2).reshape(4, 1), module_path="", site="input", name="x"),
        row(1, np.concatenate([values_of(0, rank)[:2] for rank in range(2)]), module_path="up"),
        row(
            2,
            np.concatenate([values_of(1, rank)[:2] for rank in range(2)]),
            module_path="up",
            site="grad_output",
            phase="backward",
        ),
    ]
    one = write(tmp_path / "one", rows)
    assert [line["site"] for line in diff(one, two).table.to_pylist()] == ["grad_output"]
    assert diff(one, two, loss="sum").is_equal
    apart = diff(two, two, layouts=["up:output:*=per_rank"], site="output")
    assert (apart.is_equal, apart.num_compared) == (True, 2)


def test_what_neither_run_kept_makes_no_difference(tmp_path: Path) -> None:
    bare = make_row(0, encoding=None) | {"nan_count": None, "fingerprint": None}
    rows = [bare, make_row(1, np.ones(3, np.float32), site="input", name="x")]
    found = diff(write(tmp_path / "a", rows), write(tmp_path / "b", rows))
    assert (found.num_bare, found.num_incomparable, found.num_compared, found.is_equal) == (1, 0, 2, True)
    known = [bare | {"nan_count": 0, "mean": 1.0}, rows[1]]
    assert not diff(write(tmp_path / "c", known), write(tmp_path / "d", rows)).is_equal


def test_a_fingerprint_alone_tells_that_values_differ(tmp_path: Path) -> None:
    rows = [[make_row(0, fingerprint=f"{number:016x}", encoding=None) | {"nan_count": None}] for number in (1, 2)]
    a, b = write(tmp_path / "a", rows[0]), write(tmp_path / "b", rows[1])
    assert diff(a, b).table.column("kind").to_pylist() == ["fingerprint"]
    found = diff(a, b, atol=1)
    assert (found.num_incomparable, found.first, found.is_equal) == (1, None, False)
    assert diff(a, b, atol=1, common=True).is_equal


def test_two_ranks_equal_one_process(tmp_path: Path) -> None:
    """The same training: the batch cut in two, parameters replicated."""
    batches = {
        (step, module): np.arange(24, dtype=np.float32).reshape(8, 3) * (step + 1)
        for step in range(2)
        for module in ("", "up")
    }
    weight = np.ones((3, 3), np.float32)
    param: dict[str, Any] = {
        "site": "param",
        "name": "weight",
        "phase": "optimizer",
        "micro_step": None,
        "module_path": "up",
    }

    def rows(rank: int, cut: slice, broken: float = 1.0) -> list[Row]:
        found: list[Row] = []
        for step in range(2):
            for module, site, name in (("", "input", "x"), ("up", "output", "")):
                values = batches[step, module][cut]
                found.append(row(len(found), values, step=step, rank=rank, module_path=module, site=site, name=name))
            found.append(row(len(found), weight * (broken if step else 1), step=step, rank=rank, **param))
        return found

    one = write(tmp_path / "one", rows(0, slice(None)))
    two = write(tmp_path / "two", rows(0, slice(0, 4)), rows(1, slice(4, 8)))
    found = diff(one, two)
    assert found.is_equal and found.num_compared == 6
    broken = write(tmp_path / "broken", rows(0, slice(0, 4)), rows(1, slice(4, 8), broken=2.0))
    found = diff(two, broken)
    (line,) = found.table.to_pylist()
    assert (line["step"], line["module_path"], line["site"], line["name"]) == (1, "up", "param", "weight")
    assert (line["rank_a"], line["rank_b"], line["max_abs"]) == (None, 1, 1)
    assert found.only_a.num_rows == found.only_b.num_rows == 0
    assert [(r["rank_a"], r["rank_b"]) for r in diff(broken, two).table.to_pylist()] == [(1, None)]


def test_windows_of_steps_find_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = training(tmp_path / "a", num_steps=6), training(tmp_path / "b", at((4, "act"), 7), num_steps=5)
    whole = diff(a, b)
    monkeypatch.setattr("recorder.run.step_ranges.MAX_ROWS", 4)
    cut = diff(a, b)
    assert len(global_step_ranges(a.view())) == 6
    assert (cut.table, cut.modules, cut.steps_only_a) == (whole.table, whole.modules, [5])
    assert cut.first == whole.first is not None


def test_every_payload_byte_is_reported(tmp_path: Path) -> None:
    a = training(tmp_path / "a", num_steps=4)
    b = training(tmp_path / "b", at((1, "act"), 7))
    told: list[int] = []
    diff(a, b, report=told.append)
    assert sum(told) == payload_bytes(a) + payload_bytes(b) == (12 + 9) * 48


def test_a_selection_narrows_both(tmp_path: Path) -> None:
    a, b = training(tmp_path / "a"), training(tmp_path / "b", at((1, "act"), 7))
    assert diff(a, b, "up").num_compared == 3
    assert diff(a, b, "*", step="2:").is_equal
    assert not diff(a, b, "a*", site="output", step=1).is_equal


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"step": 7}, "steps are 0 in one run, 7 in the other"),
        ({"root": "net"}, "roots are 'model' in one run, 'net' in the other"),
        ({"module_path": "other"}, "modules are 'layers.0' in one run, 'other' in the other"),
        ({"site": "grad"}, "sites are 'output' in one run, 'grad' in the other"),
        ({"mode": "eval"}, "no step has the same module, site, name, phase and mode in both"),
    ],
)
def test_nothing_in_common_says_why(tmp_path: Path, columns: dict[str, Any], reason: str) -> None:
    a, b = (write(tmp_path / name, [make_row(0, [1.0], **more)]) for name, more in (("a", {}), ("b", columns)))
    with pytest.raises(LookupFailedError, match="have no value in common: ") as error:
        diff(a, b)
    assert f"have no value in common: {reason}" in str(error.value)


def with_losses(path: Path, losses: dict[int, float], *, name: str = "eval_loss", weight: float = 1.0) -> recorder.Run:
    """A parameter at steps 0, 1 and 5, which is `weight` at step 5, and losses by step that the recorder found."""
    rows = [
        make_row(step, [weight if step == 5 else 1.0] * 4, step=step, **PARAM) | {"module_path": "up"}
        for step in (0, 1, 5)
    ]
    of_scalar: dict[str, Any] = {"site": "scalar", "name": name, "module_path": "", "micro_step": None}
    note = json.dumps({"found": "evaluation" if name == "eval_loss" else "backward"})
    rows += [make_row(9 + step, loss, step=step, note=note, **of_scalar) for step, loss in losses.items()]
    return write(path, sorted(rows, key=lambda one: int(one["step"])))


def test_losses_of_evaluations_that_the_recorder_found_in_both_runs_are_compared(tmp_path: Path) -> None:
    a = with_losses(tmp_path / "a", {1: 0.5, 5: 0.25})
    found = diff(a, with_losses(tmp_path / "b", {1: 0.5, 5: 0.75}))
    assert found.table.select(["step", "name"]).to_pylist() == [{"step": 5, "name": "eval_loss"}]
    assert (found.verdict, found.culprits) == ("different", [])
    found = diff(a, with_losses(tmp_path / "c", {1: 0.5}))
    assert found.is_equal and found.num_compared == 4, "a loss that only one run has is no difference"


def test_a_loss_of_an_evaluation_hides_no_culprit(tmp_path: Path) -> None:
    a, b = with_losses(tmp_path / "a", {1: 0.5}), with_losses(tmp_path / "b", {1: 0.75}, weight=2.0)
    (one,) = diff(a, b).culprits
    assert (one.step, one.phase, one.site) == (5, "start", "param")


def test_a_training_loss_that_the_recorder_found_is_not_compared_and_diff_says_why(tmp_path: Path) -> None:
    a, b = (with_losses(tmp_path / str(loss), {1: loss}, name="loss") for loss in (0.5, 0.75))
    assert diff(a, b).is_equal
    with pytest.raises(LookupFailedError, match="in common: the recorder found the loss by itself"):
        diff(a, b, site="scalar")


def test_parameters_that_came_apart_explain_an_output_that_ranks_had_alike() -> None:
    """A backward that differs is not taken for the forward of the module before it, whose parameters differ."""
    about = ("model", "pos", "output", "", "forward", "train", 0, 0, None, None, False, (), -1)
    made = StepEvent(1.0, 2, *about)._replace(is_open=True)
    tok = made._replace(order=0.0, path="tok", is_open=False)
    back: dict[str, Any] = {"site": "grad_output", "phase": "backward"}
    events = [tok, made, made._replace(order=2.0, **back), tok._replace(order=3.0, differs=True, **back)]
    param = tok._replace(order=4.0, path="pos", site="param", name="weight", phase="optimizer", differs=True)
    for more, wanted in (([], [("forward", "pos")]), ([param], [])):
        search = CulpritSearch()
        search.equal_step(0, ["model"])
        told = [(one.phase, one.path) for one in search.step(2, [*events, *more])]
        assert [one for one in told if one[0] == "forward"] == wanted


def test_nothing_selected_says_what_there_is(tmp_path: Path) -> None:
    a, b = training(tmp_path / "a"), training(tmp_path / "b")
    with pytest.raises(LookupFailedError, match="has no row with module_path='ap'; nearest is 'up'"):
        diff(a, b, "ap")
    with pytest.raises(LookupFailedError, match=r"no site 'outptu' \(did you mean 'output'"):
        diff(a, b, site="outptu")
    empty = make_run(tmp_path / "empty")
    with pytest.raises(LookupFailedError, match="has no rows"):
        diff(a, recorder.open_run(empty))


def damaged(run: recorder.Run) -> recorder.Run:
    """With a flipped bit among the values of its only shard."""
    (shard,) = run.path.rglob("*.arrow")
    content = bytearray(shard.read_bytes())
    at = content.index(values_of(0, 0).tobytes())
    content[at] ^= 1
    shard.write_bytes(content)
    return recorder.open_run(run.path)


def test_statistics_are_compared_where_values_cannot_be_read(tmp_path: Path) -> None:
    broken = damaged(training(tmp_path / "b", at((1, "act"), 5.0)))
    found = diff(training(tmp_path / "a"), broken)
    ((text, count),) = found.unread.items()
    assert "CRC32C" in text and count == 1
    assert [(line["step"], line["module_path"], line["kind"]) for line in found.table.to_pylist()] == [
        (1, "act", "statistics")
    ]
    assert (found.num_by_fingerprint, found.num_by_statistics, found.num_left_out) == (8, 1, 0)
    assert found.culprits[0].module_path == "act"


def test_a_run_of_which_values_cannot_be_read_is_not_equal(tmp_path: Path) -> None:
    rows = [[make_row(0, values_of(0, 0) + n, fingerprint=None)] for n in (0, 0)]
    found = diff(write(tmp_path / "a", rows[0]), damaged(write(tmp_path / "b", rows[1])))
    assert (found.table.num_rows, found.num_by_statistics, len(found.unread)) == (0, 1, 1)
    assert not found.is_equal and found.verdict == "equal as far as compared"
    assert not diff(write(tmp_path / "c", rows[0]), damaged(write(tmp_path / "d", rows[1])), common=True).is_equal


def test_a_noise_run_that_does_not_differ_is_refused(tmp_path: Path) -> None:
    a, b, same = (training(tmp_path / name) for name in ("a", "b", "same"))
    twin = training(tmp_path / "twin", lambda step, module, values: values * np.float32(1 + 1e-6))
    with pytest.raises(LookupFailedError, match=r"the --noise twin moved nothing.*RECORDER_JITTER=1"):
        diff(a, b, noise=[twin, same])
    assert diff(a, b, "down", step=0, noise=[twin]).is_equal
    start = training(tmp_path / "start", lambda step, module, values: values * (1 + 1e-6) if module != "up" else values)
    assert diff(a, b, "up", noise=[start]).is_equal  # what is selected need not be what moved


def test_a_noise_run_of_which_only_inputs_and_numbers_differ_is_refused(tmp_path: Path) -> None:
    def run(name: str, x: float) -> recorder.Run:
        given = row(0, np.full(3, x, np.float32), module_path="", site="input", name="seconds")
        told = row(2, np.full((), x, np.float32), module_path="", site="scalar", name="seconds")
        return write(tmp_path / name, [given, row(1, values_of(0, 0), module_path="up"), told])

    with pytest.raises(LookupFailedError, match="moved nothing"):
        diff(run("a", 1), run("b", 1), noise=[run("twin", 2)])


def scaled(path: Path, seed: int, factors: tuple[float, ...], *, has_values: bool) -> recorder.Run:
    """Gradients of eight modules times a factor each, and what Adam keeps of their squares; roundings by the seed."""
    rows: list[Row] = []
    state: dict[str, Any] = {"phase": "optimizer", "micro_step": None, "encoding": "plain" if has_values else None}
    for step in range(2):
        for number, factor in enumerate(factors):
            values = np.random.default_rng([step, number]).standard_normal(2048)
            noise = np.random.default_rng([seed, step, number]).standard_normal(2048) * 3e-8
            gradient = (values * (1 + noise) * factor).astype(np.float32)
            for site, name, of in (("grad", "weight", gradient), ("optim", "weight.exp_avg_sq", gradient**2)):
                columns = state | {"step": step, "site": site, "name": name, "module_path": f"layers.{number}"}
                rows.append(row(len(rows), of, **columns))
    return write(path, rows)


@pytest.mark.parametrize("has_values", [True, False])
def test_a_factor_of_all_gradients_that_rounding_makes_of_their_norm_is_noise(tmp_path: Path, has_values: bool) -> None:
    def run(name: str, seed: int, factors: tuple[float, ...]) -> recorder.Run:
        return scaled(tmp_path / name, seed, factors, has_values=has_values)

    a, twin = run("a", 1, (1,) * 8), run("twin", 2, (1,) * 8)
    rounded = diff(a, run("rounded", 3, (1 + 3.35e-6,) * 8), noise=[twin])
    assert rounded.is_equal and rounded.culprits == []
    for factor in (1.0001, 1.001, 0.5):  # rounding of 16384 elements comes to 1.5e-5
        (culprit, *_) = diff(a, run(f"wrong{factor}", 3, (factor,) * 8), noise=[twin]).culprits
        assert (culprit.module_path, culprit.step, culprit.num_params) == (None, 0, 8)
    one = diff(a, run("one", 3, (1 + 1e-5, *(1,) * 7)), noise=[twin])  # no norm of all
    assert {culprit.module_path for culprit in one.culprits} == {"layers.0"}
    both = diff(a, run("both", 3, (1.01, *(1 + 3.35e-6,) * 7)), noise=[twin])
    assert {culprit.module_path for culprit in both.culprits} == {"layers.0"}


@pytest.mark.parametrize(
    ("rates", "moved", "named"),
    [
        ((1.0, 2.0), ["head"], ("head", 1)),
        ((1.0, 2.0), ["head", "norm"], (None, 2)),
        ((1.0, 2.0, 2.0), ["head", "norm"], (None, 2)),
        ((1.0, 2.0), [], (None, 0)),
        ((2.0, 2.0, 2.0), ["head", "norm", "stem"], (None, 1)),
    ],
)
def test_a_learning_rate_of_one_group_alone_is_an_update_of_what_that_group_holds(
    tmp_path: Path, rates: tuple[float, ...], moved: list[str], named: tuple[str | None, int]
) -> None:
    def run(name: str, rates: tuple[float, ...], moved: list[str]) -> recorder.Run:
        rows: list[Row] = []
        state: dict[str, Any] = {"phase": "optimizer", "micro_step": None}
        for step in range(3):
            for module in ("stem", "norm", "head") if named[1] else ():
                values = np.full(4, 1 + step * (2 if module in moved else 1), np.float32)
                for site, of in (("param", values), ("grad", np.ones(4, np.float32))):
                    columns = state | {"step": step, "site": site, "name": "weight", "module_path": module}
                    rows.append(row(len(rows), of, **columns))
            for group, rate in enumerate(rates):
                columns = state | {"step": step, "site": "scalar", "name": f"lr.SGD.{group}", "module_path": ""}
                rows.append(row(len(rows), np.array(rate), **columns))
        return write(tmp_path / name, rows)

    (culprit,) = diff(run("a", (1.0,) * len(rates), []), run("b", rates, moved)).culprits
    assert (culprit.module_path, culprit.num_params) == named
    assert (culprit.phase, culprit.step, culprit.factor) == ("update", 0, 2.0)
    of_some = {1: "the learning rate of one group only", 2: "the learning rates of 2 of 3 groups"}
    why = of_some.get(rates.count(2.0), "the learning rate")
    assert culprit.why == (f"{why}: 'norm', 'head'" if named == (None, 2) else why)


def test_a_root_that_no_noise_run_moves_is_said(tmp_path: Path) -> None:
    def two_roots(path: Path, first: float, second: float) -> recorder.Run:
        ones = np.ones(3, np.float32)
        return write(path, [row(0, ones * first, root="model"), row(1, ones * second, root="critic")])

    a, b, twin = (two_roots(tmp_path / str(n), *values) for n, values in enumerate([(1, 1), (1, 2), (1 + 1e-6, 1)]))
    assert diff(a, b, noise=[twin]).still_roots == ["critic"]
    assert diff(a, b).still_roots == ()


@pytest.mark.parametrize("kept", [{}, {"encoding": None}])
def test_a_gradient_that_one_run_took_behind_the_module_may_differ_by_noise(
    tmp_path: Path, kept: dict[str, Any]
) -> None:
    def run(name: str, apart: float, note: str | None = None) -> recorder.Run:
        values = values_of(0, 0) * np.float32(1 + apart)
        return write(tmp_path / name, [row(0, values, site="grad_output", phase="backward", note=note, **kept)])

    tapped = '{"grad":"after_tap"}'
    a, twin = run("a", 0), run("twin", 3e-7)
    rounded, wrong = (diff(a, run(str(apart), apart, tapped), noise=[twin]) for apart in (6e-7, 1e-3))
    assert rounded.verdict == "equal"
    assert wrong.table.column("kind").to_pylist() == ["after_tap"]


def local_gradients(path: Path, num_ranks: int, **kept: Any) -> recorder.Run:
    """Gradients of a mean loss over 4 samples, of which each rank has a part, and each rank's own output."""
    of_samples = np.random.default_rng(0).standard_normal((4, 3)).astype(np.float32)
    ranks = []
    for rank, part in enumerate(np.split(of_samples, num_ranks)):
        of = {"rank": rank, "module_path": "up", "site": "grad", "name": "weight"}
        local = row(0, part.mean(0), **of, phase="backward", scope="local", **kept)
        final = row(1, of_samples.mean(0), **of, phase="optimizer", micro_step=None, scope="final")
        start = row(2, of_samples, **of | {"site": "param"}, phase="optimizer", micro_step=None)
        ranks.append([local, final, start])
    return write(path, *ranks)


def test_local_gradients_of_other_parts_of_the_batch_are_not_compared(tmp_path: Path) -> None:
    two, four, again = (local_gradients(tmp_path / str(n), num) for n, num in enumerate((2, 4, 2)))
    found = diff(two, four, rtol=1e-5)
    assert found.is_equal and found.verdict == "equal" and found.num_compared == 3  # the mean over ranks
    assert diff(two, again).num_compared == 5
    apart = diff(two, four, rtol=1e-5, layouts=["up:grad:*=per_rank"])
    assert (apart.only_a.num_rows, apart.only_b.num_rows, apart.num_left_out) == (0, 0, 2)
    assert apart.is_equal and apart.verdict == "equal as far as compared"
    with pytest.raises(LookupFailedError, match="worked on different parts of the batch"):
        diff(two, four, site="grad", layouts=["up:grad:*=per_rank"])


def accumulated(path: Path, num_micro_steps: int, num_lost: int = 0, **of_weight: Any) -> recorder.Run:
    """One step of 4 samples in micro-steps, and the gradient of the step."""
    samples = values_of(0, 0)
    rows = [row(9, values_of(0, 1), module_path="up", site="grad", phase="optimizer", micro_step=None, **of_weight)]
    for number, part in enumerate(np.split(samples, num_micro_steps)[num_lost:]):
        rows += [
            row(number, part * factor, module_path=path, micro_step=number) for factor, path in ((1, "up"), (2, ""))
        ]
    return write(path, rows)


def test_micro_steps_of_a_batch_that_is_divided_otherwise_are_left_out_and_said(tmp_path: Path) -> None:
    whole, halves, again = (accumulated(tmp_path / str(n), num) for n, num in enumerate((1, 2, 2)))
    found = diff(whole, halves)
    assert (found.num_compared, found.num_left_out, found.table.num_rows, found.only_b.num_rows) == (3, 2, 0, 0)
    assert found.is_equal and found.verdict == "equal as far as compared"
    assert [one.num_values for one in found.left_out] == [2] and "accumulation" in found.left_out[0].why
    assert diff(halves, again).verdict == "equal"
    with pytest.raises(LookupFailedError, match="into different numbers of micro-steps"):
        diff(whole, halves, site="output")


def test_a_micro_batch_that_one_run_lost_is_a_difference(tmp_path: Path) -> None:
    found = diff(accumulated(tmp_path / "a", 4), accumulated(tmp_path / "b", 4, num_lost=1))
    assert not found.is_equal and found.only_a.num_rows == 2 and not found.left_out


def test_sums_over_ranks_without_values_are_left_out_and_said(tmp_path: Path) -> None:
    two, four = (local_gradients(tmp_path / str(num), num, encoding=None) for num in (2, 4))
    found = diff(two, four)
    assert [one.num_values for one in found.left_out] == [1] and "sums over ranks" in found.left_out[0].why
    assert found.is_equal and found.verdict == "equal as far as compared"


def test_sums_over_the_same_ranks_are_compared_rank_by_rank(tmp_path: Path) -> None:
    one, same = (local_gradients(tmp_path / name, 2, encoding=None) for name in "ab")
    found = diff(one, same)
    assert (found.verdict, found.left_out, found.num_by_statistics) == ("equal", [], 1)
    found = diff(one, local_gradients(tmp_path / "c", 2, encoding=None, l2=99.0))
    assert found.first is not None and (found.first.kind, found.first.statistic_b) == ("statistics", 99.0)


def test_fingerprints_alone_say_nothing_beyond_noise(tmp_path: Path) -> None:
    def run(name: str, number: int) -> recorder.Run:
        return write(tmp_path / name, [make_row(0, fingerprint=f"{number:016x}", encoding=None) | {"nan_count": None}])

    found = diff(run("a", 1), run("b", 2), noise=[run("twin", 3)])
    assert [one.num_values for one in found.left_out] == [1] and found.verdict == "equal as far as compared"


@pytest.mark.parametrize("has_start", [True, False])
def test_no_module_is_named_for_a_parameter_that_may_be_each_rank_s_own(tmp_path: Path, has_start: bool) -> None:
    """DDP was told to leave it alone: a skipped reduction where it began equal, and where that is known."""

    def run(name: str, apart: float, **of_root: Any) -> recorder.Run:
        ranks: list[list[Row]] = [[], []]
        for rank, rows in enumerate(ranks):
            for step in range(2):
                of: dict[str, Any] = {"rank": rank, "module_path": "up", "step": step}
                final = of | {"name": "weight", "phase": "optimizer", "micro_step": None}
                x = np.full((2, 1), rank + 1.0 + step)
                rows.append(row(len(rows), x, **of | {"module_path": ""}, site="input", name="x"))
                weight = values_of(9, 0) + np.float32(apart * rank * step)
                if has_start:
                    rows.append(row(len(rows), weight, **final, site="param"))
                rows.append(row(len(rows), weight[:2] + np.float32(rank), **of))
                rows.append(
                    row(len(rows), values_of(step, 7) + np.float32(apart * (1 - 2 * rank)), **final, site="grad")
                )
        return write(tmp_path / name, *ranks, **of_root)

    broken = run("b", 0.5, unshared={"up.weight": "ignored"})
    named = [(one.step, one.phase, one.module_path) for one in diff(run("a", 0), broken).culprits]
    assert named == ([(0, "reduction", "up")] if has_start else [])


@pytest.mark.parametrize(("fact", "why"), [
    ("untrained", "no optimizer of B has weight"), ("frozen", "weight requires no gradient in B"), ("", ""),
])  # fmt: skip
def test_a_parameter_that_no_optimizer_of_the_other_run_has_is_called_that(tmp_path: Path, fact: str, why: str) -> None:
    def run(name: str, modules: tuple[str, ...], **facts: Any) -> recorder.Run:
        rows = [
            row(step * 10 + number, values_of(step, number), step=step, module_path=module, site=site, name="weight")
            | {"phase": "optimizer", "scope": "final" if site == "grad" else None}
            for step in range(2)
            for number, (module, site) in enumerate((m, s) for m in modules for s in ("param", "grad"))
        ]
        described = [{"path": path, "class": "Linear", **(facts if path == "down" else {})} for path in MODULES]
        return write(tmp_path / name, rows, modules=described)

    found = diff(run("a", ("up", "down")), run("b", ("up",), **({fact: ["weight"]} if fact else {})))
    (culprit,) = found.culprits
    assert (culprit.module_path, culprit.alone_in, culprit.why) == ("down", "a", why)


def test_a_gradient_of_statistics_alone_that_one_rank_did_not_average_has_the_hint(tmp_path: Path) -> None:
    def run(name: str, factor: float) -> recorder.Run:
        of: dict[str, Any] = {"site": "grad", "name": "weight", "phase": "optimizer", "micro_step": None}
        gradient = np.random.default_rng(1).standard_normal((4, 8)).astype(np.float32)
        ranks = [
            [row(0, gradient, rank=rank, **PARAM), row(1, gradient * one, rank=rank, encoding=None, **of)]
            for rank, one in enumerate((1, factor))
        ]
        return write(tmp_path / name, *ranks)

    a = run("a", 1)
    (culprit,) = diff(a, run("b", 2)).culprits
    assert (culprit.phase, culprit.rank, culprit.factor) == ("reduction", 1, pytest.approx(2))  # type: ignore[comparison-overlap]
    assert culprit.hint == "B's value is 2 times A's: added up over 2 ranks, not averaged?"
    (culprit,) = diff(a, run("c", -2)).culprits
    assert (culprit.factor, culprit.hint) == (None, "")


def test_an_update_of_rounding_alone_is_called_that_behind_the_others(tmp_path: Path) -> None:
    """Both gradients of the bias are within the tolerance; Adam has made steps of one size of them."""

    def run(name: str, seed: int, factor: float) -> recorder.Run:
        rows: list[Row] = []
        noise = np.random.default_rng(seed).standard_normal((4, 3)).astype(np.float32)
        gradients = {("key", "bias"): noise * np.float32(1e-9), ("key", "weight"): values_of(0, 1)}
        gradients |= {("out", "weight"): values_of(0, 2)}
        for step in range(2):
            for (module, leaf), gradient in gradients.items():
                of: dict[str, Any] = {"phase": "optimizer", "micro_step": None, "name": leaf, "step": step}
                update = np.sign(gradient) * np.float32(1e-3 * (factor if module == "out" else 1))
                for site, values in (("param", step * update), ("grad", gradient)):
                    rows.append(row(len(rows), values, module_path=module, site=site, **of))
        return write(tmp_path / name, rows)

    a = run("a", 1, 1)
    found = diff(a, run("b", 2, 3), atol=1e-6)
    assert [(one.phase, one.module_path, one.why) for one in found.culprits] == [
        ("update", "out", ""), ("update", "key", "its gradient is only rounding")
    ]  # fmt: skip
    assert [line.split(":")[0] for line in accusations(found.culprits, 0)].count("note") == 2
    alone = diff(a, run("c", 2, 1), atol=1e-6)
    lines = list(accusations(alone.culprits, 0))
    assert alone.verdict == "different" and "is certain" not in str(lines) and len(lines) == 2


def test_the_output_of_a_module_tells_the_rank_that_has_a_wrong_part_of_a_parameter(tmp_path: Path) -> None:
    """By the default rules a parameter has statistics, and the output of the first step its values."""
    weight, given = np.arange(48, dtype=np.float32).reshape(8, 6), np.ones((4, 6), np.float32)

    def rows(of: Callable[..., Row], weight: npt.NDArray[Any]) -> list[Row]:
        return [
            root_input(0, given),
            of(1, given @ weight.T, 1, module_path="fc1"),
            of(2, weight, 0, module_path="fc1", encoding=None, fingerprint=None, **PARAM),
        ]

    def whole(seq: int, values: npt.NDArray[Any], _: int, **columns: Any) -> Row:
        return plain(seq, values, **columns)

    def part(rank: int) -> Callable[..., Row]:
        return lambda seq, values, dim, **columns: Mesh([0, 1]).row(rank, seq, values, [shard(dim)], **columns)

    wrong = np.concatenate([weight[:4], weight[:4]])  # rank 1 has loaded the part of rank 0
    a = mesh_run(tmp_path / "a", {0: rows(whole, weight)}, {0: {}})
    facts = {rank: grid_facts([0, 1], rank) for rank in range(2)}
    b = mesh_run(tmp_path / "b", {rank: rows(part(rank), wrong) for rank in range(2)}, facts)
    (culprit,) = diff(a, b, rtol=1e-6).culprits
    assert (culprit.phase, culprit.module_path, culprit.kind, culprit.rank) == ("start", "fc1", "statistics", 1)


def test_contradictions_of_one_reason_share_a_line() -> None:
    problems = ["'up' output: they differ", "'down' output: they differ", "stage 1: nobody recorded it"]
    assert list(_by_reason(problems)) == ["'up' output, 'down' output: they differ", "stage 1: nobody recorded it"]
    assert next(iter(_by_reason([*problems, "'x' output: they differ"]))) == (
        "'up' output and 2 more (--limit 0 lists them): they differ"
    )


def test_what_one_run_alone_recomputes_is_no_difference(tmp_path: Path) -> None:
    kept = [row(0, values_of(0, 0), module_path="up"), row(1, values_of(0, 1), module_path="down")]
    again = [*kept, row(2, values_of(0, 0), module_path="up", phase="recompute")]
    a, b = write(tmp_path / "a", kept), write(tmp_path / "b", again)
    found = diff(a, b)
    assert (found.verdict, found.num_recomputed_a, found.num_recomputed_b, found.only_b.num_rows) == ("equal", 0, 1, 0)
    assert diff(b, write(tmp_path / "c", again)).num_compared == 3


@pytest.mark.parametrize("has_values", [True, False])
def test_a_nan_names_the_rank_that_has_it(tmp_path: Path, has_values: bool) -> None:
    def run(name: str, value: float) -> recorder.Run:
        ranks = []
        for rank in range(2):
            x = row(0, np.full((2, 1), rank + 1.0), rank=rank, module_path="", site="input", name="x")
            values = values_of(0, rank)[:2].copy()
            values[1, 1] = value if rank else 0
            kept = {} if has_values else {"encoding": None}
            ranks.append([x, row(1, values, rank=rank, module_path="up", **kept)])
        return write(tmp_path / name, *ranks)

    (culprit,) = diff(run("a", 0), run("b", math.nan)).culprits
    assert (culprit.module_path, culprit.ranks, culprit.rank) == ("up", [1], 1)
    assert (culprit.nonfinite_a, culprit.nonfinite_b, culprit.max_abs, culprit.factor) == (0, 1, None, None)


def test_a_step_of_numbers_alone_does_not_show_the_state_before_the_next(tmp_path: Path) -> None:
    """Parameters are recorded at steps 0 and 4 and the learning rate at each: they parted anywhere between."""

    def run(name: str, factor: float) -> recorder.Run:
        rows = [row(i, np.ones(8) * (factor if i else 1), step=4 * i, site="param", name="weight") for i in range(2)]
        for step in range(5):
            rate = row(len(rows), np.array(0.1), step=step, module_path="", site="scalar", name="lr.SGD.0")
            rows.append(rate)
        return write(tmp_path / name, rows)

    (culprit,) = diff(run("a", 1.0), run("b", 2.0)).culprits
    assert (culprit.phase, culprit.step) == ("start", 4)


def test_local_gradients_that_one_run_alone_has_are_no_culprit(tmp_path: Path) -> None:
    values = values_of(0, 0)
    of = {"module_path": "up", "site": "grad", "name": "weight"}
    final = row(0, values, **of, phase="optimizer", micro_step=None, scope="final")
    local = row(1, values, **of, phase="backward", scope="local")
    found = diff(write(tmp_path / "a", [final, local]), write(tmp_path / "b", [final]))
    assert found.only_a.num_rows == 1 and found.culprits == []


@pytest.mark.parametrize("between", [None, "scalar", "input", "output"])
def test_state_behind_steps_that_show_none_follows_from_an_earlier_difference(
    tmp_path: Path, between: str | None
) -> None:
    def run(name: str, apart: float) -> recorder.Run:
        rows: list[Row] = []

        def add(step: int, path: str, site: str, far: float, **columns: Any) -> None:
            values = np.array([1.0, 2.0 + far], np.float32)
            rows.append(row(len(rows), values, step=step, module_path=path, site=site, **columns))

        for step in (4, 9, 10):
            for path in ("a", "b", "c") if step != 9 else ():
                add(step, path, "param", apart * (step == 10), name="weight", phase="optimizer")
                add(step, path, "grad", apart, name="weight", phase="optimizer")
            if step != 9:
                add(step, "a", "output", apart)
            elif between is not None:
                add(step, "b" if between == "output" else "", between, 0.0, name="epoch")
        return write(tmp_path / name, rows)

    culprits = diff(run("one", 0.0), run("two", 0.5)).culprits
    found = [(one.step, one.phase, one.module_path) for one in culprits]
    assert found == [(4, "forward", "a"), *([(9, "update", None)] if between == "output" else [])]
