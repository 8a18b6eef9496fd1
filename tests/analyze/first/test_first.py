"""`first`: the first value that is not finite, and the first replica that differs."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import recorder
from recorder.analyze.check.check import check
from recorder.analyze.first.first import First, reply_of
from recorder.columns import COUNTS, STATISTICS
from tests.rigs.handmade import HandmadeWriter, Row, ledger, make_parts, make_row, make_run
from tests.rigs.meshes import grid_facts, mesh_run, plain

DDP = {"kind": "ddp", "ranks": [0, 1]}
MODULES = [{"path": "up", "class": "Linear", "source": "train.py:7", "sites": ["output"]}]


def write(path: Path, *ranks: list[Row], data_parallel: Any = DDP, **manifest: Any) -> recorder.Run:
    run = make_run(path, world_size=len(ranks))
    for rank, rows in enumerate(ranks):
        writer = HandmadeWriter(run, rank)
        writer.add_shard([rows])
        roots = [{"name": "model", "class": "Net", "modules": MODULES, "data_parallel": data_parallel}]
        writer.finish(roots=roots, **manifest)
    return recorder.open_run(run)


def steps(rank: int, *modules: str, num_steps: int = 4, **columns: Any) -> list[Row]:
    """Statistics of an output of each module at each step, all healthy."""
    moments = [(step, module) for step in range(num_steps) for module in modules]
    return [
        make_row(
            seq, np.full(4, seq + 1, np.float32), encoding=None, rank=rank, step=step, module_path=module, **columns
        )
        for seq, (step, module) in enumerate(moments)
    ]


def spoil(row: Row, value: float = np.nan, count: int = 1) -> None:
    values = np.ones(4, np.float32)
    values[:count] = value
    row |= {k: v for k, v in make_row(row["seq"], values).items() if k.endswith("_count")}


def found(run: recorder.Run) -> First:
    """What went wrong first, which must not depend on how many steps are in memory at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("recorder.analyze.first.first.RANGE_ROWS", 1)
        step_by_step = recorder.first(recorder.open_run(run.path))
    whole = recorder.first(run)
    assert step_by_step == whole
    return whole


def test_a_healthy_run_has_no_finding(tmp_path: Path) -> None:
    nothing = found(write(tmp_path / "run", steps(0, "up", "down"), steps(1, "up", "down")))
    assert not nothing.is_found
    assert (nothing.nonfinite, nothing.replica, nothing.buffers) == (None, None, [])


def test_the_earliest_step_wins_then_the_order_on_the_rank(tmp_path: Path) -> None:
    one, two = steps(0, "up", "down"), steps(1, "up", "down")
    for row in (one[5], two[5], two[4], one[6]):  # step 2 down, step 2 down, step 2 up, step 3 up
        spoil(row)
    bad = found(write(tmp_path / "run", one, two)).nonfinite
    assert bad is not None
    assert (bad.value.step, bad.value.module_path, bad.value.site, bad.value.rank) == (2, "up", "output", 1)
    assert (bad.nan_count, bad.inf_count, bad.numel, bad.num_before) == (1, 0, 4, 0)
    assert (bad.value.module_class, bad.value.source) == ("Linear", "train.py:7")
    assert bad.before is not None and (bad.before.step, bad.before.module_path, bad.before.rank) == (1, "down", 1)
    assert bad.last_healthy is not None and (bad.last_healthy.step, bad.last_healthy.module_path) == (1, "up")
    assert bad.num_steps_healthy == 2


def test_that_the_order_of_gradients_tells_nothing_is_said(tmp_path: Path) -> None:
    ranks = [steps(rank, "up", "down", site="grad", name="weight", phase="optimizer") for rank in range(2)]
    for row in (*ranks[0][4:], *ranks[1][4:6]):
        spoil(row)
    bad = found(write(tmp_path / "run", *ranks)).nonfinite
    assert bad is not None and (bad.value.step, bad.value.site, bad.num_gradients) == (2, "grad", 4)


def test_how_far_it_spread_is_counted(tmp_path: Path) -> None:
    rows = steps(0, "up", "down")
    for row in rows[3:]:
        spoil(row)
    result = found(write(tmp_path / "run", rows))
    assert (result.num_nonfinite, result.num_nonfinite_modules) == (5, 2)


def test_a_learning_rate_is_no_last_healthy_value_and_a_killed_rank_is_told(tmp_path: Path) -> None:
    rows = steps(0, "layers.0", num_steps=2)
    rates = [make_row(9, np.ones(()), module_path="", site="scalar", name="lr.AdamW.0", step=step) for step in range(2)]
    spoil(rows[1])
    run = write(tmp_path / "run", [rows[0], *rates, rows[1] | {"seq": 99}])
    bad = found(run).nonfinite
    assert bad is not None and bad.before is not None and bad.before.site == "output"
    writer = HandmadeWriter(tmp_path / "run", 1)
    writer.add_shard([steps(1, "layers.0", num_steps=1)])
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    writer.finish(state="recording", pid=gone.pid, host=os.uname().nodename)
    (note,) = found(recorder.open_run(tmp_path / "run")).notes
    assert note.startswith("rank 1 ") and "the record ends in step 0" in note


def test_a_nan_in_the_very_first_value_has_nothing_before_it(tmp_path: Path) -> None:
    rows = steps(0, "up")
    spoil(rows[0])
    bad = found(write(tmp_path / "run", rows)).nonfinite
    assert bad is not None and (bad.before, bad.last_healthy, bad.value.step) == (None, None, 0)


def test_a_mask_that_is_infinite_from_its_first_record_on_is_a_note(tmp_path: Path) -> None:
    rows = steps(0, "mask", "up")
    for row in rows[::2]:
        spoil(row, -np.inf, count=2)
    result = found(write(tmp_path / "run", rows))
    assert result.nonfinite is None and not result.is_found
    (note,) = [note for note in result.notes if "mask" in note]
    assert note.startswith("'mask' output holds 2 infinite values from its first record on (step 0)")


def test_a_mask_of_another_shape_is_measured_by_its_own_first_record(tmp_path: Path) -> None:
    rows = steps(0, "mask")
    for row, count in zip(rows, (1, 3, 1, 3), strict=True):
        spoil(row, -np.inf, count=count)
        row["shape"] = f"[{count},4]"
    assert found(write(tmp_path / "run", rows)).nonfinite is None


def test_infinities_that_grow_are_a_finding(tmp_path: Path) -> None:
    rows = steps(0, "mask")
    for row, count in zip(rows, (2, 2, 3, 2), strict=True):
        spoil(row, -np.inf, count=count)
    bad = found(write(tmp_path / "run", rows)).nonfinite
    assert bad is not None and (bad.value.step, bad.inf_count) == (2, 3)


def test_infinities_that_reach_no_later_value_are_a_note_and_hide_no_nan(tmp_path: Path) -> None:
    def padded(*spoiled: int) -> list[Row]:
        rows = steps(0, "mask", "up", num_steps=6)
        for row, count in zip(rows[::2], (0, 1, 2, 1, 3, 2), strict=True):
            spoil(row, -np.inf, count=count)
        for index in spoiled:
            spoil(rows[index])
        return rows

    sound = found(write(tmp_path / "sound", padded()))
    assert not sound.is_found and sound.num_nonfinite == 0
    assert sound.all_finite.startswith("no NaN, and no infinity that reached a later value, in 12")
    assert any(note.startswith("'mask' output holds 1 infinite values at step 1; ") for note in sound.notes)
    for module, step, spoiled in (("up", 5, 11), ("up", 3, 7), ("mask", 4, 9)):
        bad = found(write(tmp_path / f"{spoiled}", padded(spoiled))).nonfinite
        assert bad is not None and (bad.value.module_path, bad.value.step) == (module, step)


@pytest.mark.parametrize(("site", "value"), [("grad", np.inf), ("optim", np.inf), ("output", np.nan)])
def test_what_no_mask_can_be_counts_from_the_first_record(tmp_path: Path, site: str, value: float) -> None:
    rows = steps(0, "up", site=site)
    for row in rows:
        spoil(row, value)
    bad = found(write(tmp_path / "run", rows)).nonfinite
    assert bad is not None and bad.value.step == 0


def test_an_infinity_after_healthy_records_is_a_finding(tmp_path: Path) -> None:
    rows = steps(0, "up")
    spoil(rows[2], np.inf)
    bad = found(write(tmp_path / "run", rows)).nonfinite
    assert bad is not None and (bad.value.step, bad.inf_count, bad.nan_count) == (2, 1, 0)


def without_statistics(row: Row) -> Row:
    return row | dict.fromkeys((*STATISTICS, *COUNTS))


@pytest.mark.parametrize("dtype", ["float32", "float16", "complex64", "bfloat16", "float8_e5m2"])
def test_values_without_statistics_are_decoded(tmp_path: Path, dtype: str) -> None:
    numpy = pytest.importorskip("ml_dtypes")
    kind = np.dtype(getattr(numpy, dtype, dtype))
    values = [np.array([1, 2, np.nan if step == 1 else 3]).astype(kind) for step in range(3)]
    rows = [without_statistics(make_row(step, values[step], step=step, dtype=dtype)) for step in range(3)]
    bad = found(write(tmp_path / "run", rows)).nonfinite
    assert bad is not None and (bad.value.step, bad.nan_count, bad.value.dtype) == (1, 1, dtype)
    assert bad.last_healthy is not None and bad.last_healthy.step == 0


def test_masks_without_statistics_do_not_end_the_search(tmp_path: Path) -> None:
    rows = []
    for step in range(4):
        mask = np.array([0, -np.inf], np.float32)
        values = np.array([1, np.nan if step == 3 else 2], np.float32)
        rows += [make_row(2 * step, mask, step=step, name="mask"), make_row(2 * step + 1, values, step=step)]
    result = found(write(tmp_path / "run", [without_statistics(row) for row in rows]))
    assert result.nonfinite is not None and (result.nonfinite.value.step, result.nonfinite.value.name) == (3, "")
    assert any("'layers.0' output mask holds 1 infinite values" in note for note in result.notes)


def test_an_infinity_that_was_decoded_first_excuses_a_counted_one(tmp_path: Path) -> None:
    rows = [make_row(step, np.array([0, -np.inf], np.float32), step=step) for step in range(3)]
    rows[0] = without_statistics(rows[0])
    assert found(write(tmp_path / "run", rows)).nonfinite is None


def test_a_decoded_value_comes_before_a_counted_one_of_a_later_step(tmp_path: Path) -> None:
    rows = steps(0, "up")
    spoil(rows[3])
    values = np.array([np.nan, 1], np.float32)
    rows.append(without_statistics(make_row(9, values, step=1, module_path="down")))
    bad = found(write(tmp_path / "run", rows)).nonfinite
    assert bad is not None and (bad.value.step, bad.value.module_path) == (1, "down")


def test_payloads_after_the_finding_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = steps(0, "up")
    spoil(rows[1])
    rows.append(without_statistics(make_row(9, np.ones(2, np.float32), step=3, module_path="down")))
    run = write(tmp_path / "run", rows)
    monkeypatch.setattr(recorder.Run, "array", lambda *args, **more: pytest.fail("read"))
    assert found(run).nonfinite is not None


def test_all_parts_of_a_large_tensor_are_looked_at(tmp_path: Path) -> None:
    values = np.ones(12, np.float32)
    values[11] = np.inf
    healthy = make_parts(0, np.ones(12, np.float32), 3, step=0)
    rows = [without_statistics(row) for row in [*healthy, *make_parts(3, values, 3, step=1)]]
    bad = found(write(tmp_path / "run", rows)).nonfinite
    assert bad is not None and (bad.value.step, bad.inf_count, bad.numel) == (1, 1, 12)


def test_rows_that_cannot_be_looked_at_are_told(tmp_path: Path) -> None:
    rows = [without_statistics(row) for row in steps(0, "up")]
    result = found(write(tmp_path / "run", rows))
    assert result.nonfinite is None
    assert any(note.startswith("4 rows have neither statistics nor values") for note in result.notes)


def test_a_step_that_the_scaler_skipped_says_so(tmp_path: Path) -> None:
    rows = steps(0, "up", site="grad")
    spoil(rows[2], np.inf)
    rows.append(make_row(9, np.float64(1), step=2, module_path="", site="scalar", name="skipped"))
    bad = found(write(tmp_path / "run", rows)).nonfinite
    assert bad is not None and bad.is_skipped


def test_a_gradient_that_overflows_at_a_skipped_step_hides_nothing(tmp_path: Path) -> None:
    gradients, outputs = steps(0, "up", site="grad"), steps(0, "down")
    spoil(gradients[1], np.inf)
    skips = [
        make_row(10 + step, np.float64(step == 1), step=step, module_path="", site="scalar", name="skipped")
        for step in range(4)
    ]
    result = found(write(tmp_path / "sound", [*gradients, *outputs, *skips]))
    assert result.nonfinite is None and result.num_nonfinite == 0
    assert "gradients overflowed at step 1, whose updates GradScaler skipped; not counted as a finding" in result.notes
    spoil(outputs[3])
    bad = found(write(tmp_path / "wrong", [*gradients, *outputs, *skips])).nonfinite
    assert bad is not None and (bad.value.step, bad.value.site) == (3, "output")


@pytest.mark.parametrize("is_used", [False, True])
def test_a_backward_that_the_program_threw_away_does_not_count(tmp_path: Path, is_used: bool) -> None:
    rows = steps(0, "up", site="grad_output", phase="backward")
    final = [make_row(10 + step, np.ones(4, np.float32), step=step, module_path="up", site="grad") for step in range(4)]
    for row in (rows[1], final[1])[: 1 + is_used]:
        spoil(row, np.inf)
    result = found(write(tmp_path / "run", [*rows, *final]))
    told = "gradients overflowed at step 1, and the program threw them away; not counted as a finding"
    assert (result.nonfinite is None, told in result.notes) == (not is_used, not is_used)


def test_a_step_done_again_by_a_later_attempt_does_not_count(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", world_size=1)
    for attempt, bad_step in ((0, 2), (1, 3)):
        writer = HandmadeWriter(run, 0, name=f"writer-{attempt}")
        rows = [row | {"attempt": attempt} for row in steps(0, "up")]
        spoil(rows[bad_step])
        writer.add_shard([rows])
        writer.finish(attempt=attempt, started_ns=1_700_000_000_000_000_000 + attempt)
    result = found(recorder.open_run(run))
    assert result.nonfinite is not None and result.nonfinite.value[0] == 3
    assert "4 rows were left out, because a restart repeated their steps" in result.notes


PARAM: dict[str, Any] = {"site": "param", "name": "weight", "phase": "optimizer", "micro_step": None}


def params(rank: int, values: list[float], *, seq: int = 0, **columns: Any) -> list[Row]:
    usual = PARAM | {"encoding": None, "rank": rank}
    return [
        make_row(
            seq + step,
            np.full(3, value, np.float32),
            **(usual | {"step": step, "fingerprint": f"{np.float32(value).view(np.uint32):016x}"} | columns),
        )
        for step, value in enumerate(values)
    ]


def test_replicas_that_are_nan_on_all_ranks_need_no_fingerprint(tmp_path: Path) -> None:
    ranks = [params(rank, [1.0, 2.0, float("nan")]) for rank in (0, 1)]
    for rows in ranks:
        rows[2]["fingerprint"] = None
    result = found(write(tmp_path / "run", *ranks))
    assert result.replica is None and result.notes == [] and result.num_compared == 2


@pytest.mark.parametrize("by", ["fingerprint", "statistics", "values"])
def test_the_first_replica_that_differs(tmp_path: Path, by: str) -> None:
    ranks = []
    for rank, values in enumerate(([1.0, 2, 3, 4], [1.0, 2, 5, 6])):
        rows = params(rank, values, encoding="plain" if by == "values" else None)
        if by != "fingerprint":
            rows = [row | {"fingerprint": None} for row in rows]
        ranks.append(rows if by == "statistics" else [without_statistics(row) for row in rows])
    result = found(write(tmp_path / "run", *ranks))
    differing = result.replica
    assert differing is not None and result.is_found
    value = differing.value
    assert (value.step, value.module_path, value.site, value.name, value.rank) == (2, "layers.0", "param", "weight", 1)
    assert (differing.by, differing.groups, differing.is_assumed) == (by, [[0], [1]], False)
    if by == "statistics":  # of the steps before they say nothing
        assert differing.last_equal is None
        assert result.notes == ["2 replicas have only statistics, which are equal and prove nothing"]
    else:
        assert differing.last_equal is not None and differing.last_equal.step == 1
    assert result.differing == [("layers.0", "param", "weight")]


@pytest.mark.parametrize("others", [[3.0, 2, 1], [1.0, 2, 3]])
@pytest.mark.parametrize("encoding", ["plain", None])
def test_equal_statistics_prove_nothing(tmp_path: Path, others: list[float], encoding: str | None) -> None:
    ranks = [
        [make_row(0, np.array(values, np.float32), rank=rank, encoding=encoding, **PARAM)]
        for rank, values in enumerate([[1.0, 2, 3], others])
    ]
    result = found(write(tmp_path / "run", *ranks))
    if encoding is None:
        assert (result.is_found, result.num_compared) == (False, 0)
        assert result.why_none_compared == "there are only statistics, and equal statistics prove nothing"
    else:
        assert (result.is_found, result.num_compared) == (others[0] == 3, 1)
        assert result.replica is None or result.replica.by == "values"


def test_nan_at_another_index_differs(tmp_path: Path) -> None:
    ranks = [
        [make_row(0, np.roll(np.array([np.nan, 2, 2], np.float32), rank), rank=rank, **PARAM)] for rank in range(2)
    ]
    differing = found(write(tmp_path / "run", *ranks)).replica
    assert differing is not None and (differing.by, differing.groups) == ("values", [[0], [1]])


@pytest.mark.parametrize("ranks", [[True, False], [0.0, 1.0], [-(10**30), 0, 1], [0, 1, "2"], [], {"0": 1}, None])
def test_ranks_that_are_none_tell_nothing(tmp_path: Path, ranks: Any) -> None:
    rows = [params(rank, [float(rank)]) for rank in range(2)]
    differing = found(write(tmp_path / "run", *rows, data_parallel={"kind": "ddp", "ranks": ranks})).replica
    assert differing is not None and differing.is_assumed


def flat_slice(rank: int, offset: int, values: list[float], mesh: str | None) -> list[Row]:
    placements = json.dumps([REPLICATE, FLAT | {"offset": offset}])
    row = make_row(0, np.array(values, np.float32), rank=rank, **PARAM, placements=placements, mesh=mesh)
    return [row | {"global_shape": "[2]", "layout_source": "fsdp"}]


@pytest.mark.parametrize("is_told", [True, False])
def test_an_empty_slice_is_no_replica_of_the_one_that_begins_where_it_does(tmp_path: Path, is_told: bool) -> None:
    """HYBRID_SHARD on two by two ranks: the parameter lies in the second shard whole."""
    ranks = []
    for rank in range(4):
        mesh = json.dumps({"shape": [2, 2], "dim_names": None, "coordinate": list(divmod(rank, 2))})
        values = [1.0, 2.0 + (rank == 3)] if rank % 2 else []
        ranks.append(flat_slice(rank, 0, values, mesh if is_told else None))
    run = write(tmp_path / "run", *ranks, data_parallel={"kind": "fsdp1", "ranks": [0, 1, 2, 3]})
    result = found(run)
    assert result.replica is not None and result.num_compared == 1
    assert (result.replica.groups, result.replica.by) == ([[1], [3]], "statistics")


def test_pieces_are_told_apart_by_their_shards(tmp_path: Path) -> None:
    """Where offsets say nothing, the mesh does."""
    ranks = []
    for rank in range(4):
        where = json.dumps([REPLICATE, {"kind": "StridedShard", "dim": 0, "split_factor": 2}])
        mesh = json.dumps({"shape": [2, 2], "coordinate": list(divmod(rank, 2))})
        ranks.append(params(rank, [1.0 + rank % 2, 5.0 + (rank == 2)], placements=where, mesh=mesh))
    result = found(write(tmp_path / "run", *ranks, data_parallel={"kind": "fsdp2", "ranks": [0, 1, 2, 3]}))
    assert result.replica is not None and result.num_compared == 4
    assert (result.replica.value.step, result.replica.groups) == (1, [[0], [2]])


def test_the_rank_that_differs_from_most_is_named(tmp_path: Path) -> None:
    ranks = [params(rank, [1.0, 7.0 if rank == 0 else 2.0]) for rank in range(4)]
    differing = found(write(tmp_path / "run", *ranks, data_parallel=DDP | {"ranks": [0, 1, 2, 3]})).replica
    assert differing is not None and (differing.groups, differing.value.rank) == ([[1, 2, 3], [0]], 0)
    assert [value.mean for value in differing.ranks] == [7, 2, 2, 2]


def test_ranks_that_share_a_batch_hold_replicas_too(tmp_path: Path) -> None:
    """Plain parameters of a tensor parallel model, under DDP and alone."""
    for number, grid in enumerate(([[0, 1], [2, 3]], [0, 1, 2, 3])):
        rows = {rank: params(rank, [1.0, 2.0 + (rank == 1)]) for rank in range(4)}
        run = mesh_run(tmp_path / str(number), rows, {rank: grid_facts(grid, rank) for rank in rows})
        differing = found(run).replica
        assert differing is not None and not differing.is_assumed
        assert (differing.value.step, differing.groups) == (1, [[0, 2, 3], [1]])


@pytest.mark.parametrize(
    ("sites", "told"),
    [
        (["grad"], "no gradient differs between its replicas (1 value of step 0 compared; {} not recorded)"),
        (
            ["grad", "optim", "buffer"],
            "no gradient or optimizer state differs between its replicas (2 values of step 0 compared",
        ),
        (
            ["param", "grad", "optim"],
            "no parameter, gradient or optimizer state differs {} (3 values of step 0 compared)",
        ),
        (["buffer"], ""),
    ],
)
def test_what_agrees_is_what_was_compared_and_the_rest_is_named(tmp_path: Path, sites: list[str], told: str) -> None:
    ranks = [[row for site in sites for row in params(rank, [1.0], site=site)] for rank in range(2)]
    result = found(write(tmp_path / "run", *ranks))
    middle = "between its replicas" if len(sites) == 3 else "parameters and optimizer states"
    assert result.replicas_agree.startswith(told.format(middle)) and bool(result.replicas_agree) == bool(told)
    assert (result.why_none_compared == "") == bool(told)


def test_replicas_are_not_called_equal_at_a_step_at_which_none_was_recorded(tmp_path: Path) -> None:
    """Parameters of every tenth step agree; the NaN comes at step 57."""
    ranks = []
    for rank in range(2):
        rows = [row for step in range(0, 60, 10) for row in params(rank, [1.0], seq=step, step=step)]
        values = [np.array([1.0, np.nan if (rank, step) == (1, 57) else 2.0]) for step in range(60)]
        rows += [make_row(100 + step, values[step], rank=rank, step=step, module_path="up") for step in range(60)]
        ranks.append(rows)
    result = found(write(tmp_path / "run", *ranks))
    assert result.nonfinite is not None and result.nonfinite.value.step == 57 and not result.all_finite
    assert "(6 values of steps 0 to 50 (one in 10) compared" in result.replicas_agree
    assert "replicas were not compared at step 57, because none was recorded" in result.replicas_agree


def test_that_nothing_was_found_says_in_how_many_values_and_what_is_not_there(tmp_path: Path) -> None:
    result = found(write(tmp_path / "run", steps(0, "up", "down"), steps(1, "up", "down")))
    assert result.all_finite.startswith("no NaN or infinity in ") and " recorded values of step" in result.all_finite
    masked = np.array([1.0, -np.inf])
    rows = [make_row(step, masked, step=step, module_path="mask") for step in range(2)]
    result = found(write(tmp_path / "masked", rows))
    assert result.all_finite.startswith("no NaN, and no value turned infinite, in 2")


def test_rows_that_retention_deleted_are_told_with_the_steps_around_them(tmp_path: Path) -> None:
    rows = steps(0, "up", num_steps=8)
    run = make_run(tmp_path / "run")
    writer = HandmadeWriter(run)
    for first in range(0, 8, 2):
        writer.add_shard([rows[first : first + 2]])
    for number in (1, 2):
        (writer.directory / f"tensors-{number:06}.arrow").unlink()
    writer.finish(ledger=ledger(8) | {"retired": {"rows": 4, "bytes": 1}})
    told = "not looked at: 4 rows removed for the quota, between steps 1 and 6"
    assert any(note.startswith(told) for note in recorder.first(recorder.open_run(run)).notes)


def test_stages_of_a_pipeline_hold_no_replicas(tmp_path: Path) -> None:
    rows = {rank: params(rank, [float(rank)]) for rank in range(2)}
    facts = {rank: {"pipeline": {"stage": rank, "num_stages": 2}} for rank in rows}
    result = found(mesh_run(tmp_path / "run", rows, facts))
    assert not result.is_found and result.num_compared == 0


@pytest.mark.parametrize("told", [{"up.weight": "ignored"}, {}, 5, ["up.weight"]])
def test_parameters_that_each_rank_has_for_itself_are_no_replicas(tmp_path: Path, told: Any) -> None:
    rows = {rank: params(rank, [float(rank)], module_path="up", name="weight") for rank in range(2)}
    facts = {rank: {"data_parallel": DDP, "unshared": told} for rank in rows}
    result = found(mesh_run(tmp_path / "run", rows, facts))
    assert result.is_found == (told != {"up.weight": "ignored"})


def test_chunks_whose_position_nobody_knows_are_no_replicas(tmp_path: Path) -> None:
    ranks = [params(rank, [float(rank)], note='{"no_layout":"memory_format"}') for rank in range(2)]
    assert not found(write(tmp_path / "run", *ranks)).is_found


def test_a_rank_of_which_nothing_is_here_is_told(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", world_size=3)
    for rank in (0, 2):
        writer = HandmadeWriter(run, rank)
        writer.add_shard([params(rank, [1.0])])
        writer.finish()
    notes = found(recorder.open_run(run)).notes
    assert any("not looked at: rank 1 of 3, whose files are not here" in note for note in notes)


def test_groups_of_replicas_are_compared_apart(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", world_size=4)
    for rank in range(4):
        writer = HandmadeWriter(run, rank)
        writer.add_shard([params(rank, [float(rank // 2)])])
        facts = {"kind": "ddp", "ranks": [rank // 2 * 2, rank // 2 * 2 + 1]}
        writer.finish(roots=[{"name": "model", "modules": [], "data_parallel": facts}])
    result = found(recorder.open_run(run))
    assert result.replica is None and result.num_compared == 2


def test_shards_and_activations_are_no_replicas(tmp_path: Path) -> None:
    shards = [params(rank, [float(rank)], placements='[{"kind":"Shard","dim":0}]') for rank in range(2)]
    outputs = [[make_row(5, [float(rank)], rank=rank)] for rank in range(2)]
    ranks = [shard + output for shard, output in zip(shards, outputs, strict=True)]
    assert not found(write(tmp_path / "run", *ranks)).is_found


REPLICATE, SHARD, FLAT = ({"kind": kind} for kind in ("Replicate", "Shard", "FlatShard"))


@pytest.mark.parametrize(
    ("placements", "offsets"),
    [
        ([REPLICATE, SHARD | {"dim": 0}], [["[0]", "[3]"], ["[0]", "[3]"]]),
        ([REPLICATE, FLAT], [[None, None], [None, None]]),
        ([REPLICATE, REPLICATE], [["[0]"] * 2] * 2),
    ],
)
def test_pieces_that_a_mesh_replicates_are_compared(
    tmp_path: Path, placements: list[dict[str, Any]], offsets: list[list[str | None]]
) -> None:
    """HSDP on two by two ranks: ranks 0 and 2, and 1 and 3, hold the same."""
    ranks = []
    is_whole = placements[1]["kind"] == "Replicate"
    for rank in range(4):
        replica, shard = divmod(rank, 2)
        where = [placements[0], placements[1] | ({"offset": 3 * shard} if placements[1] == FLAT else {})]
        values = [1.0 if is_whole else 1.0 + shard, 2.0 + (rank == 3)]
        ranks.append(params(rank, values, placements=json.dumps(where), offsets=offsets[replica][shard]))
    result = found(write(tmp_path / "run", *ranks, data_parallel={"kind": "fsdp2", "ranks": [0, 1, 2, 3]}))
    assert result.replica is not None
    assert (result.replica.value.step, result.replica.is_assumed) == (1, False)
    assert result.replica.groups == ([[0, 1, 2], [3]] if is_whole else [[1], [3]])
    assert result.num_compared == (2 if is_whole else 4)


def test_chunks_of_unknown_position_and_partial_sums_are_no_replicas(tmp_path: Path) -> None:
    for number, where in enumerate(([REPLICATE, {"kind": "StridedShard", "dim": 0}], [REPLICATE, {"kind": "Partial"}])):
        ranks = [params(rank, [float(rank)], placements=json.dumps(where)) for rank in range(2)]
        assert found(write(tmp_path / str(number), *ranks)).replica is None


def test_without_a_wrapper_replicas_are_assumed(tmp_path: Path) -> None:
    differing = found(write(tmp_path / "run", params(0, [1.0]), params(1, [2.0]), data_parallel=None)).replica
    assert differing is not None and differing.is_assumed and differing.last_equal is None


def test_a_buffer_that_differs_is_told_apart(tmp_path: Path) -> None:
    ranks = [params(rank, [1.0, 1.0 + rank, 2.0 + rank], site="buffer", name="running_mean") for rank in range(2)]
    result = found(write(tmp_path / "run", *ranks))
    assert not result.is_found
    (buffer,) = result.buffers
    assert (buffer.value.step, buffer.value.name, buffer.groups) == (1, "running_mean", [[0], [1]])


def buffers(rank: int, values: list[float], **columns: Any) -> list[Row]:
    return params(rank, values, site="buffer", name="mean", **columns)


@pytest.mark.parametrize(
    ("facts", "sync", "is_found"),
    [
        (DDP | {"broadcast_buffers": True}, "broadcast", False),
        (DDP | {"broadcast_buffers": False}, "never", True),
        (DDP | {"broadcast_buffers": 0}, None, False),
        (DDP, None, False),
        (DDP | {"kind": "fsdp1"}, "own", False),
        (DDP | {"kind": "fsdp2"}, "own", False),
        (None, None, False),
    ],
)
def test_buffers_that_nothing_makes_equal_again_are_a_finding(
    tmp_path: Path, facts: Any, sync: str | None, is_found: bool
) -> None:
    ranks = [buffers(rank, [1.0, 1.0 + rank, 2.0 + rank]) for rank in range(2)]
    result = found(write(tmp_path / "run", *ranks, data_parallel=facts))
    (buffer,) = result.buffers
    assert (buffer.sync, buffer.is_stale, buffer.value.step, buffer.groups) == (sync, is_found, 1, [[0], [1]])
    assert result.is_found == is_found


@pytest.mark.parametrize("has_statistics", [True, False])
def test_buffers_that_the_program_makes_equal_again_are_none(tmp_path: Path, has_statistics: bool) -> None:
    ranks = [buffers(rank, [1.0 + rank, 2.0 + rank, 3.0], encoding="plain") for rank in range(2)]
    if not has_statistics:
        ranks = [[without_statistics(row) for row in rows] for rows in ranks]
    result = found(write(tmp_path / "run", *ranks, data_parallel=DDP | {"broadcast_buffers": False}))
    (buffer,) = result.buffers
    assert (buffer.differs_last, buffer.is_stale, result.is_found) == (False, False, False)


def write_merged(path: Path, *ranks: list[Row], of_all: list[Row], data_parallel: Any = DDP) -> recorder.Run:
    """A merged run: some rows of all ranks, and some that stayed with theirs."""
    run = make_run(path, merged_from={"run_id": "a", "path": "a"}, world_size=2)
    writer = HandmadeWriter(run, 0, name="merge")
    (run / "global").mkdir()
    writer.directory = writer.directory.rename(run / "global" / "merge")
    writer.add_shard([[row | {"rank": None} for row in of_all]])
    writer.finish(rank=None, roots=[{"name": "model", "modules": [], "data_parallel": data_parallel}])
    for rank, rows in enumerate(ranks):
        apart = HandmadeWriter(run, rank, name="merge")
        apart.add_shard([rows])
        apart.finish()
    return recorder.open_run(run)


@pytest.mark.parametrize(("num_noted", "is_found"), [(2, True), (1, False)])
def test_a_merged_run_tells_stale_buffers_by_its_notes(tmp_path: Path, num_noted: int, is_found: bool) -> None:
    rows = buffers(0, [1.0, 1.0])
    for row in rows[:num_noted]:
        row["note"] = '{"replicas_differ":[1]}'
    facts = DDP | {"broadcast_buffers": False}
    result = found(write_merged(tmp_path / "run", of_all=rows, data_parallel=facts))
    assert result.is_found == is_found and [one.differs_last for one in result.buffers] == [is_found]


@pytest.mark.parametrize("differs", [True, False])
def test_a_merged_run_tells_whether_buffers_became_equal(tmp_path: Path, differs: bool) -> None:
    """A merge leaves the ranks' own rows where they differ, and beside them the first rank's as that of all."""
    of_all = buffers(0, [1.0, 2.0])
    for row in of_all[: 1 + differs]:
        row["note"] = '{"replicas_differ":[1]}'
    ranks = [buffers(rank, [1.0 + rank]) for rank in range(2)]
    facts = DDP | {"broadcast_buffers": False}
    result = found(write_merged(tmp_path / "run", *ranks, of_all=of_all, data_parallel=facts))
    (buffer,) = result.buffers
    assert (buffer.groups, buffer.value.step, buffer.differs_last) == ([[0], [1]], 0, differs)
    assert result.is_found == differs


def test_a_value_that_all_ranks_shared_before_was_healthy_before(tmp_path: Path) -> None:
    bad = params(1, [math.nan], seq=8)
    bad[0]["step"] = 2
    result = found(write_merged(tmp_path / "run", [], bad, of_all=params(0, [1.0, 2.0])))
    assert result.nonfinite is not None and result.nonfinite.value.rank == 1
    healthy = result.nonfinite.last_healthy
    assert healthy is not None and (healthy.step, healthy.rank, result.nonfinite.num_steps_healthy) == (1, None, 2)
    assert result.nonfinite.before == healthy


@pytest.mark.parametrize("has_statistics", [True, False])
def test_what_else_of_the_module_is_not_finite_is_told(tmp_path: Path, has_statistics: bool) -> None:
    ranks: list[list[Row]] = [[], []]
    for rank, rows in enumerate(ranks):
        value = np.array([1, np.nan if rank else 2], np.float32)
        rows.append(make_row(0, value, rank=rank, step=3, module_path="up"))
        rows.append(make_row(1, value, rank=rank, step=3, module_path="down", **PARAM))
        rows.append(make_row(2, value, rank=rank, step=3, module_path="up", **PARAM))
        rows.append(make_row(3, value, rank=rank, step=4, module_path="up", **PARAM | {"name": "bias"}))
        rows.append(make_row(4, np.ones(2, np.float32), rank=rank, step=3, module_path="up", **PARAM | {"name": "b"}))
    if not has_statistics:
        ranks = [[without_statistics(row) for row in rows] for rows in ranks]
    bad = found(write(tmp_path / "run", *ranks)).nonfinite
    assert bad is not None and (bad.value.site, bad.value.rank) == ("output", 1)
    assert bad.beside == [("param", "weight", 1, 0)]


def test_the_rank_with_the_bad_chunk_of_a_parameter_is_named_before_those_that_gathered_it(tmp_path: Path) -> None:
    ranks: list[list[Row]] = [[], []]
    for rank, rows in enumerate(ranks):
        rows.append(make_row(0, np.array([1, np.nan], np.float32), rank=rank, step=3, module_path="up"))
        chunk = np.array([1, np.nan if rank else 2], np.float32)
        rows.append(make_row(1, chunk, rank=rank, step=3, module_path="up", **PARAM))
    bad = found(write(tmp_path / "run", *ranks)).nonfinite
    assert bad is not None and (bad.value.site, bad.value.rank) == ("output", 1)
    assert bad.beside == [("param", "weight", 1, 0)]


def test_a_loss_that_is_not_finite_is_told_beside_and_is_no_mask(tmp_path: Path) -> None:
    def scalar(seq: int, step: int, value: float, name: str = "train/loss") -> Row:
        columns = {"site": "scalar", "name": name, "module_path": "", "phase": "forward"}
        return make_row(seq, np.array(value, np.float32), step=step, **columns)

    rows = [scalar(0, 0, math.inf, "best"), make_row(1, np.full(4, math.nan, np.float32), module_path="up", step=1)]
    late = [scalar(2, 1, math.nan), scalar(3, 1, math.inf, "loss"), scalar(4, 1, math.inf, "best")]
    bad = found(write(tmp_path / "late", rows + late)).nonfinite
    assert bad is not None and (bad.value.module_path, bad.value.site) == ("up", "output")
    assert bad.beside == [("scalar", "train/loss", 1, 0), ("scalar", "loss", 0, 1)]
    bad = found(write(tmp_path / "early", [rows[0], scalar(1, 0, math.inf), scalar(2, 0, math.nan)])).nonfinite
    assert bad is not None and (bad.value.name, bad.inf_count, bad.beside) == ("train/loss", 1, [])


def test_a_run_that_lacks_ranks_says_why_nothing_was_compared(tmp_path: Path) -> None:
    run = write(tmp_path / "run", params(0, [1.0]), params(1, [2.0]))
    assert found(run).why_none_compared == ""
    (run.path / "rank=00001").rename(tmp_path / "away")
    result = found(recorder.open_run(run.path))
    assert (result.num_compared, result.why_none_compared) == (0, "only rank 0 of 2 left rows")
    alone = found(write(tmp_path / "alone", params(0, [1.0]), data_parallel=None))
    assert alone.why_none_compared == "one rank has no replicas"
    shards = [params(rank, [1.0], placements='[{"kind":"Shard","dim":0}]') for rank in range(2)]
    assert "sharded ones are not" in found(write(tmp_path / "shards", *shards)).why_none_compared


def test_a_merged_run_keeps_its_findings(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", merged_from={"run_id": "a", "path": "a"})
    writer = HandmadeWriter(run, 0, name="merge")
    writer.directory.rename(run / "global-away")
    (run / "global").mkdir()
    (run / "global-away").rename(run / "global" / "merge")
    writer.directory = run / "global" / "merge"
    note = '{"replicas_differ":[1]}'
    rows = params(0, [1.0]) + params(0, [1.0, 1.0], seq=4, site="buffer", name="mean", note=note)
    writer.add_shard([[row | {"rank": None} for row in rows]])
    writer.finish(rank=None)
    for rank in (0, 1):
        apart = HandmadeWriter(run, rank, name="merge")
        apart.add_shard([[row | {"step": 1} for row in params(rank, [float(rank)], seq=9)]])
        apart.finish()
    result = found(recorder.open_run(run))
    assert result.replica is not None
    assert (result.replica.value.step, result.replica.groups, result.replica.is_assumed) == (1, [[0], [1]], False)
    assert result.replica.last_equal is not None and result.replica.last_equal.step == 0
    assert [(buffer.value.name, buffer.value.step, buffer.groups) for buffer in result.buffers] == [("mean", 0, [[1]])]


def test_the_first_nan_of_a_merged_run_is_the_first_in_time(tmp_path: Path) -> None:
    """The rows that stayed with a rank are numbered from 0, beside those of the whole model."""
    run = make_run(tmp_path / "run", merged_from={"run_id": "a", "path": "a"})
    (run / "global").mkdir()
    writer = HandmadeWriter(run, 0, name="merge")
    writer.directory = writer.directory.rename(run / "global" / "merge")
    rows = [plain(number, np.full(2, 1.0 if number < 3 else np.nan), module_path=f"l{number}") for number in range(5)]
    writer.add_shard([[row | {"rank": None} for row in rows]])
    writer.finish(rank=None)
    apart = HandmadeWriter(run, 1, name="merge")
    apart.add_shard([[plain(9, np.full(2, np.nan), module_path="later") | {"seq": 0, "rank": 1}]])
    apart.finish()
    result = found(recorder.open_run(run))
    assert result.nonfinite is not None and result.nonfinite.value.module_path == "l3"


@pytest.mark.parametrize(
    "roots", [5, [5], [{"data_parallel": 5}], [{"name": "model", "data_parallel": {"ranks": ["0"]}}]]
)
@pytest.mark.parametrize(
    "note", ['{"replicas_differ":5}', '{"replicas_differ":["x"]}', "replicas_differ", '["replicas_differ"]']
)
def test_strangers_json_is_no_error(tmp_path: Path, roots: Any, note: str) -> None:
    run = make_run(tmp_path / "run")
    for rank in range(2):
        writer = HandmadeWriter(run, rank)
        writer.add_shard([params(rank, [1.0], site="buffer", note=note) + params(rank, [1.0], seq=5)])
        writer.finish(roots=roots)
    assert not found(recorder.open_run(run)).is_found


def test_an_empty_run_has_no_finding(tmp_path: Path) -> None:
    result = found(recorder.open_run(make_run(tmp_path / "run")))
    assert not result.is_found and result.num_compared == 0


def test_a_gradient_that_one_rank_added_up_has_the_hint(tmp_path: Path) -> None:
    gradient = np.random.default_rng(1).standard_normal(32).astype(np.float32)
    of: dict[str, Any] = {"encoding": None, "module_path": "up", "site": "grad", "name": "weight", "phase": "optimizer"}

    def factor(name: str, times: float) -> list[str]:
        run = write(
            tmp_path / name, *([make_row(0, gradient * one, rank=rank, **of)] for rank, one in enumerate((1, times)))
        )
        return [
            line for part in reply_of(run, found(run)).parts() for line in str(part).splitlines() if "factor" in line
        ]

    assert "rank 1 has 2 times what rank 0 has: added up over 2 ranks, not averaged?" in str(factor("two", 2))
    told = check(recorder.open_run(tmp_path / "two"), ["replica"]).findings[0].detail
    assert told == "by statistics, rank 1 has 2 times what rank 0 has: added up over 2 ranks, not averaged?"
    assert factor("other", 0.25) and "averaged" not in str(factor("quarter", 0.25)) and not factor("turned", -2)
