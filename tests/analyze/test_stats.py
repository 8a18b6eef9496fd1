"""`stats`: statistics combined from those of rows, against numpy over the very values."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import recorder
from recorder.analyze.stats import as_long, statistics, stats
from recorder.columns import COUNTS, STATISTICS
from recorder.errors import LookupFailedError
from recorder.merge.merge import merge_run
from recorder.numerics.dtypes import numpy_dtype
from recorder.numerics.moments import combine_rows, count_nonfinite
from recorder.run.selection import RANKS_OWN, GlobalOptions, Selection
from tests.rigs.capturing import flagged
from tests.rigs.handmade import HandmadeWriter, Row, make_row, make_run
from tests.rigs.meshes import PARTIAL, Mesh

NUMBERS = (*STATISTICS, *COUNTS)
GLOBAL = GlobalOptions(across_ranks=True)
DDP = {"kind": "ddp", "ranks": [0, 1]}


def of_values(values: npt.NDArray[Any]) -> dict[str, Any]:
    """What the specification says, by plain numpy."""
    wide = values.astype(np.float64).reshape(-1)
    finite = wide[np.isfinite(wide)]
    counts = {"nan_count": np.isnan(wide).sum(), "inf_count": np.isinf(wide).sum(), "zero_count": (wide == 0).sum()}
    if not finite.size:
        return dict.fromkeys(STATISTICS) | counts
    found = {"mean": finite.mean(), "std": finite.std(), "min": finite.min(), "max": finite.max()}
    found |= {"absmax": abs(finite).max(), "l2": np.linalg.norm(finite)}
    found |= {"sum_abs": abs(finite).sum(), "sum_fourth": (finite**4).sum()}
    return found | {"sum": finite.sum(), "sum_sq": (finite**2).sum()} | counts


def agrees(found: dict[str, Any], values: npt.NDArray[Any]) -> None:
    for name, expected in of_values(values).items():
        assert found[name] == (None if expected is None else pytest.approx(expected, rel=1e-9, abs=1e-12)), name


def write(path: Path, *ranks: list[Row]) -> recorder.Run:
    run = make_run(path, world_size=len(ranks))
    for rank, rows in enumerate(ranks):
        writer = HandmadeWriter(run, rank)
        writer.add_shard([rows])
        writer.finish(roots=[{"name": "model", "modules": [], "data_parallel": DDP}])
    return recorder.open_run(run)


@pytest.fixture
def values() -> dict[tuple[int, int, str], npt.NDArray[np.float32]]:
    """Batches by step, rank and module; some not finite."""
    rng = np.random.default_rng(0)
    found = {}
    for step in range(3):
        for rank in range(2):
            for number, module in enumerate(("up", "down")):
                found[step, rank, module] = (rng.standard_normal((4, 2 + number)) * 9 + 1000).astype(np.float32)
    found[1, 0, "up"][0, 0] = np.nan
    found[1, 1, "up"][0, :] = np.inf
    found[2, 0, "up"][:] = np.nan
    found[2, 1, "down"][0, 0] = 0
    return found


@pytest.fixture
def run(tmp_path: Path, values: dict[tuple[int, int, str], npt.NDArray[np.float32]]) -> recorder.Run:
    """Outputs of two modules, a replicated parameter, and a scalar, on two ranks, as statistics alone."""
    ranks: list[list[Row]] = [[], []]
    for step in range(3):
        for rank, rows in enumerate(ranks):
            common: dict[str, Any] = {"step": step, "rank": rank, "encoding": None}
            x = np.ones((4, 1), np.float32)
            rows.append(make_row(len(rows), x, module_path="", site="input", name="x", **common))
            for module in ("up", "down"):
                rows.append(make_row(len(rows), values[step, rank, module], module_path=module, **common))
            state: dict[str, Any] = {"site": "param", "phase": "optimizer", "micro_step": None}
            weight = np.arange(6, dtype=np.float32) + step
            for name in ("weight", "bias"):
                rows.append(make_row(len(rows), weight, module_path="up", name=name, **common, **state))
    return write(tmp_path / "run", *ranks)


def joined(values: dict[tuple[int, int, str], npt.NDArray[np.float32]], **wanted: Any) -> npt.NDArray[np.float32]:
    indices = {"step": 0, "rank": 1, "module": 2}
    chosen = [key for key in values if all(key[indices[name]] == value for name, value in wanted.items())]
    return np.concatenate([values[key].reshape(-1) for key in chosen])


def test_without_a_grouping_each_value_has_its_row(run: recorder.Run) -> None:
    table = statistics(run, Selection(module="up", site="output")).table
    assert table.num_rows == 6
    assert set(NUMBERS) <= set(table.column_names)
    assert table.column("step").to_pylist() == [0, 0, 1, 1, 2, 2]


def test_steps_and_modules_combine_rank_by_rank(run: recorder.Run, values: Any) -> None:
    found = statistics(run, Selection(site="output"), by=("module",)).table.to_pylist()
    assert [(line["module_path"], line["rank"], line["rows"]) for line in found] == [
        ("up", 0, 3),
        ("down", 0, 3),
        ("up", 1, 3),
        ("down", 1, 3),
    ]
    for line in found:
        agrees(line, joined(values, rank=line["rank"], module=line["module_path"]))
        assert line["numel"] == joined(values, rank=line["rank"], module=line["module_path"]).size


@pytest.mark.parametrize("by", [("step",), ("step", "module"), ("module",), ("site",)])
def test_across_ranks_the_global_tensors_are_combined(run: recorder.Run, values: Any, by: tuple[str, ...]) -> None:
    found = statistics(run, Selection(site="output"), GLOBAL, by=by).table.to_pylist()
    keys = {"step": "step", "module": "module_path", "site": "site"}
    assert len(found) == {("step",): 3, ("step", "module"): 6, ("module",): 2, ("site",): 1}[by]
    for line in found:
        agrees(line, joined(values, **{word: line[keys[word]] for word in by if word != "site"}))


def write_gradients(path: Path) -> recorder.Run:
    """Of an activation, on two ranks whose losses are means: each 2.0, so 1.0 of the whole batch."""
    ranks = []
    for rank in range(2):
        x = make_row(0, np.full((2, 1), rank + 1.0), rank=rank, module_path="", site="input", name="x")
        columns: dict[str, Any] = {"rank": rank, "module_path": "up"}
        output = make_row(1, np.arange(4.0).reshape(2, 2) + rank, site="output", **columns)
        gradient = make_row(2, np.full((2, 2), 2.0), site="grad_output", phase="backward", **columns)
        ranks.append([x, output, gradient])
    return write(path, *ranks)


@pytest.mark.parametrize(
    ("options", "mean", "rows"),
    [
        ({}, 1, 1),
        ({"loss": "sum"}, 2, 1),
        ({"loss": "weighted"}, 1, 1),
        ({"layouts": ["up:grad_output:*=per_rank"]}, 2, 2),
    ],
)
def test_a_loss_and_layouts_say_how_global_tensors_are_made(
    tmp_path: Path, options: dict[str, Any], mean: float, rows: int
) -> None:
    run = write_gradients(tmp_path / "run")
    frame = recorder.stats(run, "up", site="grad_output", across_ranks=True, **options)
    assert frame["mean"].tolist() == [mean] * rows


def test_a_loss_or_a_layout_that_would_change_nothing_is_refused(tmp_path: Path) -> None:
    run = write_gradients(tmp_path / "run")
    for options in (GlobalOptions(loss="sum"), GlobalOptions(layouts=["*=per_rank"])):
        with pytest.raises(
            LookupFailedError, match="a loss or a layout says how global tensors are made; add --global"
        ):
            statistics(run, Selection(), options)
    with pytest.raises(LookupFailedError, match="loss 'median': expected one of"):
        statistics(run, Selection(), GlobalOptions(across_ranks=True, loss="median"))
    manifest = json.loads((run.path / "_run.json").read_text())
    (run.path / "_run.json").write_text(json.dumps(manifest | {"merged_from": {"run_id": "a", "path": "a"}}))
    with pytest.raises(LookupFailedError, match="is merged, and its tensors cannot change"):
        statistics(recorder.open_run(run.path), Selection(), GlobalOptions(across_ranks=True, loss="sum"))


def test_replicas_count_once(run: recorder.Run) -> None:
    found = statistics(run, Selection(site="param"), GLOBAL, by=("step",)).table.to_pylist()
    assert [line["rows"] for line in found] == [2, 2, 2]
    for step, line in enumerate(found):
        agrees(line, np.tile(np.arange(6.0) + step, 2))
    assert statistics(run, Selection(site="param"), by=("step",)).table.num_rows == 6


def test_replicas_that_differ_are_left_out_and_named(tmp_path: Path) -> None:
    ranks = [
        [make_row(i, np.full(2, 1.0 + i * rank), site="grad", name=name, rank=rank) for i, name in enumerate("ab")]
        for rank in range(2)
    ]
    found = statistics(write(tmp_path / "run", *ranks), Selection(), GLOBAL, by=("step",))
    assert found.table.column("rows").to_pylist() == [1]
    (note,) = found.notes
    why = "rank 1 differs from rank 0"
    assert (
        note == f"left out, because they stay per rank: 'layers.0' grad b (per rank: {why}); show them with --by rank"
    )


@pytest.mark.parametrize("by", [(), ("module",)])
def test_missing_ranks_are_told(tmp_path: Path, by: tuple[str, ...]) -> None:
    """Of the batch; a replica is whole without them."""
    x = np.ones((2, 3), np.float32)
    ranks = [
        [make_row(step, x, step=step, rank=rank) for step in range(num_steps)]
        + [make_row(9, x, site="param", name="w", rank=rank)][: 1 - rank]
        for rank, num_steps in enumerate((4, 2))
    ]
    run = write(tmp_path / "run", *ranks)
    note = "partial: 2 of 5 values lack rank 1, steps 2..3: they are "
    assert statistics(run, Selection(step="0:2"), GLOBAL, by=by)[1:] == ([], [], True, [])
    assert statistics(run, Selection(), by=by)[1:] == ([], [], True, [])
    merge_run(run, tmp_path / "merged")
    merged = recorder.open_run(tmp_path / "merged")
    for source, options in ((run, GLOBAL), (merged, GLOBAL), (merged, GlobalOptions())):
        left_out = statistics(source, Selection(), options, by=by)
        assert left_out.notes[0] == f"{note}left out; --partial takes what there is"
        assert not left_out.is_whole
        taken = statistics(source, Selection(), replace(options, partial=True), by=by)
        assert taken.notes == [f"{note}of the other ranks alone"]
        assert not taken.is_whole


def test_values_that_lack_ranks_have_no_numbers_unless_they_are_asked_for(tmp_path: Path) -> None:
    x = np.ones((2, 3), np.float32)
    both = [[make_row(step, x, step=step, rank=rank) for step in range(2 - rank)] for rank in (0, 1)]
    run = write(tmp_path / "run", *both)
    found = statistics(run, Selection(), GLOBAL).table
    assert (found.column("mean").to_pylist(), found.column("nan_count").to_pylist()) == ([1.0, None], [0, None])
    assert found.column("why").to_pylist() == [None, "lacks rank 1"]
    assert statistics(run, Selection(), GLOBAL, by=("module",)).table.column("numel").to_pylist() == [12]
    taken = replace(GLOBAL, partial=True)
    assert statistics(run, Selection(), taken).table.column("mean").to_pylist() == [1.0, 1.0]
    assert stats(run, across_ranks=True, partial=True)["mean"].tolist() == [1.0, 1.0]


def test_damage_is_no_whole_answer(tmp_path: Path) -> None:
    run = write(tmp_path / "run", [make_row(0, [1.0])], [make_row(0, [1.0], rank=1)])
    (shard,) = (tmp_path / "run").glob("rank=00001/*/*.arrow")
    os.truncate(shard, shard.stat().st_size // 2)
    assert statistics(run, Selection()).is_whole
    assert not statistics(recorder.open_run(tmp_path / "run"), Selection()).is_whole


def test_phases_and_modes_are_never_mixed(tmp_path: Path) -> None:
    kinds = [("train", "forward"), ("train", "recompute"), ("eval", "forward")]
    rows = [make_row(i, [1.0 * i], mode=mode, phase=phase) for i, (mode, phase) in enumerate(kinds)]
    table = statistics(write(tmp_path / "run", rows), Selection(), by=("module",)).table
    assert table.column("mean").to_pylist() == [0, 1, 2]


def test_rows_without_statistics_are_counted(tmp_path: Path) -> None:
    bare = make_row(1, [5.0], encoding=None) | dict.fromkeys(NUMBERS)
    found = statistics(write(tmp_path / "run", [make_row(0, [1.0]), bare | {"call": 1}]), Selection(), by=("step",))
    (line,) = found.table.to_pylist()
    assert (line["rows"], line["rows_without"], line["mean"], line["numel"]) == (2, 1, 1, 1)
    why = "have no statistics and are in none of these numbers: 1: no rule keeps statistics of it"
    assert found.notes == [f"without: 1 of 2 rows {why}"]


def unmeasured(rank: int, placement: dict[str, Any]) -> Row:
    """A summand, as it is recorded."""
    row = Mesh([0, 1]).row(rank, 0, np.ones((2, 2), np.float32), [placement], encoding=None)
    return row | dict.fromkeys(NUMBERS) | {"rank": rank, "note": '{"no_statistics":"Partial"}'}


def test_a_row_without_statistics_says_why(tmp_path: Path) -> None:
    def whys(run: recorder.Run, options: GlobalOptions = RANKS_OWN) -> list[str | None]:
        return statistics(run, Selection(), options).table.column("why").to_pylist()  # type: ignore[no-any-return]

    summands = [[unmeasured(rank, PARTIAL | {"reduce_op": "max"})] for rank in range(2)]
    run = write(tmp_path / "summands", *summands)
    assert whys(run) == ["a summand, not yet reduced over ranks (max)"] * 2
    assert whys(run, GLOBAL) == ["reduced over ranks: statistics of summands do not add up"]
    halved = write(tmp_path / "halved", summands[0], [])
    assert whys(halved, GLOBAL) == ["lacks rank 1", "a summand, not yet reduced over ranks (max)"]
    plain = [
        make_row(0, [1.0]),
        make_row(1, np.zeros(0, np.float32), call=1) | dict.fromkeys(COUNTS, 0),
        make_row(2, [np.nan], call=2),
        make_row(3, np.zeros(3, np.complex64), call=3) | {"nan_count": 0, "note": '{"no_statistics":"complex64"}'},
        make_row(4, [1.0], call=4) | dict.fromkeys(NUMBERS) | {"note": '["no_statistics"]'},
    ]
    not_asked = "no rule keeps statistics of it"
    expected = [None, "it has no elements", None, "complex64 has none", not_asked]
    assert whys(write(tmp_path / "plain", plain)) == expected


def test_a_value_that_stays_per_rank_says_why_also_once_merged(tmp_path: Path) -> None:
    ranks = [[make_row(0, np.ones((2, 2 + rank), np.float32), site="grad", rank=rank)] for rank in range(2)]
    run = write(tmp_path / "run", *ranks)
    why = "per rank: shapes differ: rank 0 [2, 2], rank 1 [2, 3]"
    assert statistics(run, Selection(), GLOBAL).table.column("why").to_pylist() == [why] * 2
    merge_run(run, tmp_path / "merged")
    merged = recorder.open_run(tmp_path / "merged")
    assert statistics(merged, Selection()).table.column("why").to_pylist() == [why] * 2


def test_a_group_of_nothing_finite_has_counts_alone(tmp_path: Path) -> None:
    rows = [make_row(i, np.full(2, np.nan, np.float32), call=i) for i in range(2)]
    (line,) = statistics(write(tmp_path / "run", rows), Selection(), by=("step",)).table.to_pylist()
    assert (line["nan_count"], line["mean"], line["min"], line["sum"]) == (4, None, None, None)


def test_complex_rows_add_to_the_counts(tmp_path: Path) -> None:
    counts = {"zero_count": 3, "nan_count": 0, "inf_count": 0}
    rows = [make_row(0, [1.0]), make_row(1, np.zeros(3, np.complex64), call=1) | counts]
    (line,) = statistics(write(tmp_path / "run", rows), Selection(), by=("step",)).table.to_pylist()
    assert (line["zero_count"], line["mean"], line["numel"]) == (3, 1, 4)


def test_the_spread_survives_a_large_mean(tmp_path: Path) -> None:
    pieces = [1e9 + np.random.default_rng(i).standard_normal(100) for i in range(5)]
    rows = [make_row(i, piece, call=i) for i, piece in enumerate(pieces)]
    (line,) = statistics(write(tmp_path / "run", rows), Selection(), by=("step",)).table.to_pylist()
    assert line["std"] == pytest.approx(np.concatenate(pieces).std(), rel=1e-6)


def test_the_probe_fills_the_steps_without_rows(tmp_path: Path) -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = []
    with flagged(tmp_path, "steps=::3 site=param keep=stats; site=param,grad keep=probe") as recording:
        for _ in range(8):
            expected.append(float(model.weight.detach().double().norm()))
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
    run = recording.run
    frame = stats(run, "", site="param", name="weight", step="1:8", probe=True)
    assert frame.step.tolist() == [*range(1, 8)]
    assert frame.l2.tolist() == pytest.approx(expected[1:], rel=1e-6)
    assert frame["mean"].notna().tolist() == [step % 3 == 0 for step in range(1, 8)]
    assert frame.why.notna().tolist() == [step % 3 != 0 for step in range(1, 8)]
    assert stats(run, "", site="param", name="weight", step="4", probe=True).numel.tolist() == [8]
    assert stats(run, site="update", name="bias", step="4", probe=True).numel.tolist() == [2]
    with pytest.raises(LookupFailedError, match="no row with"):
        stats(run, "", site="param", name="weight", step="4")
    with pytest.raises(LookupFailedError, match="no site 'update'"):
        stats(run, site="update", step="4")
    with pytest.raises(LookupFailedError, match="leave out --probe, or --global and --by"):
        stats(run, site="param", by="step", probe=True)


def test_the_probe_has_no_norm_of_a_value_without_a_finite_element(tmp_path: Path) -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with flagged(tmp_path, "steps=0 site=param keep=stats; site=param keep=probe") as recording:
        for step in range(4):
            optimizer.zero_grad()
            sum(output.square().mean() for output in model(torch.randn(8, 4)).T).backward()
            optimizer.step()
            with torch.no_grad():
                model.weight[0 if step < 2 else 1] = torch.nan
    frame = stats(recording.run, "", site="param", name="weight", step="2:4", probe=True)
    assert frame.nan_count.tolist() == [4, 8]
    assert frame.l2.isna().tolist() == [False, True]


def test_steps_of_which_the_probe_has_no_number_are_told(tmp_path: Path) -> None:
    run = write(tmp_path / "run", [make_row(step, np.ones(4, np.float32), step=step) for step in range(3)])
    frame = stats(run, probe=True)
    assert frame.attrs["notes"] == ["this run has no numbers of the probe"]


def test_a_frame_in_long_form(run: recorder.Run) -> None:
    frame = recorder.stats(run, "up", site="output", long=True)
    assert {"step", "rank", "root", "module_path", "site", "name", "statistic", "value"} <= set(frame.columns)
    means = frame[(frame["statistic"] == "mean") & (frame["step"] == 0)]
    rows = statistics(run, Selection(module="up", site="output", step=0)).table
    assert means["value"].tolist() == rows.column("mean").to_pylist()
    assert not frame["value"].isna().any()
    wide = statistics(run, Selection(module="up"), by=("step", "site")).table
    assert as_long(wide).num_rows == sum(wide.column(name).is_valid().to_numpy().sum() for name in NUMBERS)


def test_notes_come_with_the_frame(tmp_path: Path) -> None:
    bare = make_row(1, [5.0], encoding=None) | dict.fromkeys(NUMBERS)
    frame = recorder.stats(write(tmp_path / "run", [make_row(0, [1.0]), bare | {"call": 1}]), by="step")
    assert len(frame.attrs["notes"]) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"module": "upp"}, "module_path='upp'; nearest is 'up'"),
        ({"site": "grads"}, r"no site 'grads' \(did you mean 'grad'"),
        ({"step": "x"}, "--step x"),
        ({"step": 9}, r"step=9; there are steps 0 to 2"),
        ({"module": "down", "site": "param"}, "each of these occurs, but never together"),
        ({"by": "modul"}, "by 'modul': choose of step, module"),
        ({"by": "rank", "across_ranks": True}, "have no rank"),
        ({"module": "upp", "across_ranks": True}, "nearest is 'up'"),
    ],
)
def test_what_cannot_be_answered_says_what_there_is(run: recorder.Run, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(LookupFailedError, match=message):
        recorder.stats(run, **arguments)


def test_of_a_value_without_rows_at_a_step_it_is_said_which_steps_have_rows(tmp_path: Path) -> None:
    rows = [make_row(i, np.ones(2, np.float32), module_path="up", step=i, rank=0, encoding=None) for i in range(4)]
    rows.append(make_row(4, np.ones(2, np.float32), module_path="down", step=9, rank=0, encoding=None))
    run = write(tmp_path / "run", rows)
    with pytest.raises(LookupFailedError, match=r"never together; there are rows of steps 0 to 3$"):
        recorder.stats(run, module="up", step=9)


@pytest.mark.parametrize("across_ranks", [False, True])
@pytest.mark.parametrize("by", [(), ("step",)])
def test_a_run_without_rows_says_so(tmp_path: Path, across_ranks: bool, by: tuple[str, ...]) -> None:
    with pytest.raises(LookupFailedError, match="run has no rows"):
        recorder.stats(recorder.open_run(make_run(tmp_path / "run")), by=by, across_ranks=across_ranks)


def test_a_glob_and_an_exact_path(run: recorder.Run, tmp_path: Path) -> None:
    assert set(statistics(run, Selection(module="*")).table.column("module_path").to_pylist()) == {"", "up", "down"}
    assert set(statistics(run, Selection(module="''")).table.column("module_path").to_pylist()) == {""}
    odd = write(tmp_path / "odd", [make_row(i, [1.0], module_path=path) for i, path in enumerate(("a[0]", "a0"))])
    assert statistics(odd, Selection(module="a[0]")).table.column("module_path").to_pylist() == ["a[0]"]


@given(
    st.lists(
        st.lists(st.floats(width=32) | st.sampled_from([0.0, -0.0, math.nan, math.inf]), max_size=6),
        min_size=1,
        max_size=8,
    ),
    st.randoms(use_true_random=False),
)
def test_any_cut_combines_to_the_whole(pieces: list[list[float]], random: Any) -> None:
    groups = np.array([random.randrange(3) for _ in pieces])
    _, groups = np.unique(groups, return_inverse=True)
    rows = [{"numel": len(piece)} | of_values(np.array(piece, np.float32)) for piece in pieces]
    schema = pa.schema(
        [("numel", pa.int64()), *((n, pa.float64()) for n in STATISTICS), *((n, pa.int64()) for n in COUNTS)]
    )
    columns = combine_rows(pa.Table.from_pylist(rows, schema), groups, int(groups.max()) + 1)
    for number in range(int(groups.max()) + 1):
        whole = np.concatenate([np.array(p, np.float32) for p, g in zip(pieces, groups, strict=True) if g == number])
        expected = of_values(whole)
        for name in NUMBERS:
            found = columns[name][number].as_py()
            scale = 1e-9 * float(expected[name if name in ("sum_sq", "sum_fourth") else "absmax"] or 0) * 10
            assert found == (None if expected[name] is None else pytest.approx(expected[name], rel=1e-6, abs=scale)), (
                name
            )


@pytest.mark.parametrize(
    "dtype", ["float32", "float64", "float16", "bfloat16", "float8_e5m2", "complex64", "complex32"]
)
def test_elements_that_are_not_finite_are_counted(dtype: str) -> None:
    values = [1, np.nan, np.inf, 0, -np.inf, -3]
    kind = numpy_dtype(dtype)
    array = np.array([(one, 0) for one in values], kind) if kind.names else np.array(values).astype(kind)
    assert count_nonfinite(np.tile(array, (2, 40_000))) == (80_000, 160_000)
    assert count_nonfinite(array[:0]) == (0, 0)


def test_integers_are_finite_and_a_nan_part_makes_a_complex_nan() -> None:
    assert count_nonfinite(np.arange(3)) == count_nonfinite(np.array([True])) == (0, 0)
    assert count_nonfinite(np.array([complex(np.nan, np.inf), complex(1, -np.inf)])) == (1, 1)


class TestInside:
    """Tensors inside of composite ones: the indices of a sparse gradient are no gradients."""

    @pytest.fixture
    def run(self, tmp_path: Path) -> recorder.Run:
        note = json.dumps({"inner_of": {"kind": "sparse_coo", "dtype": "float32", "shape": [8, 4]}})
        rows = [
            make_row(step, numbers, step=step, module_path="emb", site="grad", name=name, note=note)
            for step in range(2)
            for name, numbers in (("weight.indices", [0.0, 7.0]), ("weight.values", [0.25, -0.5]))
        ]
        rows += [make_row(step, [1.0], step=step, module_path="out", site="grad", name="weight") for step in range(2)]
        return write(tmp_path / "run", rows)

    @pytest.mark.parametrize("words", [("module",), ("site",), ("step", "module")])
    def test_indices_and_values_are_never_pooled(self, run: recorder.Run, words: tuple[str, ...]) -> None:
        found = statistics(run, Selection(site="grad"), by=words).table.to_pylist()
        by_leaf: dict[str | None, set[float]] = {}
        for row in found:
            by_leaf.setdefault(row["inner"], set()).add(row["absmax"])
        assert by_leaf == {"indices": {7.0}, "values": {0.5}, None: {1.0}}

    def test_without_such_tensors_the_table_has_no_such_column(self, run: recorder.Run) -> None:
        table = statistics(run, Selection(module="out"), by=("module",)).table
        assert "inner" not in table.column_names
        assert "note" not in table.column_names
        assert "inner" in as_long(statistics(run, Selection(), by=("module",)).table).column_names
