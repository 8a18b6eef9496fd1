"""Flipped bits: each is detected or harmless, and none gives a value that was not recorded."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from recorder.errors import CorruptError, RunError
from recorder.format.rundir import index_name
from recorder.run.run import Run, open_run
from recorder.upkeep.verify import verify
from tests.rigs.handmade import HandmadeWriter, flip, make_row, make_run
from tests.rigs.small_runs import payload_rows

NUM_FLIPS = 150
STEPS = range(8)


def make_damaged_run(tmp_path: Path, kind: str) -> tuple[Path, Path]:
    """A run, and the file of it to damage."""
    path = make_run(tmp_path / "run")
    writer = HandmadeWriter(path)
    rows = payload_rows()
    if kind == "stats":
        shard = writer.add_shard([[make_row(s, step=s, mean=s / 7, encoding=None) for s in STEPS]], kind="stats")
        (shard.parent / index_name(shard.name)).unlink()
    else:
        shard = writer.add_shard([rows[:4], rows[4:]], is_sealed=kind != "open", with_index=kind != "sealed")
    writer.finish(state="recording" if kind == "open" else "closed")
    target = {"index": shard.parent / index_name(shard.name), "manifest": shard.parent / "_writer.json"}
    return path, target.get(kind, shard)


def light(run: Run) -> dict[int, dict[str, Any]]:
    return {row["seq"]: row for row in run.table().to_pylist()}


def check_nothing_is_wrong(path: Path, arrays: dict[int, Any], rows: dict[int, dict[str, Any]]) -> bool:
    """Read all there is; every answer is an error or the truth. Returns whether anything was amiss."""
    is_amiss = False
    try:
        run = open_run(path)
        found = light(run)
    except RunError:
        return True
    assert found.items() <= rows.items()
    shard = run.writers[0].shards[0]
    if found != rows:
        assert run.problems or shard.num_trailing_bytes or not shard.is_sealed
        is_amiss = True
    for step, expected in arrays.items():
        try:
            np.testing.assert_array_equal(run.array("layers.0", step=step), expected)
        except RunError:
            is_amiss = True
    return is_amiss or bool(run.problems)


@pytest.mark.parametrize("kind", ["sealed", "open", "index", "stats", "manifest"])
def test_a_flipped_bit_never_gives_a_wrong_value(tmp_path: Path, kind: str) -> None:
    path, target = make_damaged_run(tmp_path, kind)
    run = open_run(path)
    arrays = {} if kind == "stats" else {step: run.array("layers.0", step=step) for step in STEPS}
    rows = light(run)
    rng = random.Random(kind)
    num_bits = 8 * target.stat().st_size
    num_seen = 0
    for bit in rng.sample(range(num_bits), NUM_FLIPS):
        flip(target, bit)
        num_seen += check_nothing_is_wrong(path, arrays, rows)
        flip(target, bit)
    if kind == "index":
        assert num_seen == 0  # it is derived: whatever happens to it, the shard has the rows
    else:
        assert num_seen > NUM_FLIPS // 10


@pytest.mark.parametrize("kind", ["sealed", "open", "index", "stats"])
@pytest.mark.parametrize("num_zeros", [8, 4096])
def test_a_hole_of_zeros_never_gives_a_wrong_value(tmp_path: Path, kind: str, num_zeros: int) -> None:
    path, target = make_damaged_run(tmp_path, kind)
    run = open_run(path)
    arrays = {} if kind == "stats" else {step: run.array("layers.0", step=step) for step in STEPS}
    rows = light(run)
    data = target.read_bytes()
    for start in range(0, len(data), 712):
        target.write_bytes(data[:start] + bytes(num_zeros) + data[start + num_zeros :])
        check_nothing_is_wrong(path, arrays, rows)
        list(verify(open_run(path)))


@pytest.mark.parametrize("kind", ["sealed", "open", "index"])
def test_every_value_byte_that_flips_is_found_by_verify(tmp_path: Path, kind: str) -> None:
    path, target = make_damaged_run(tmp_path, kind)
    assert not [finding for finding in verify(open_run(path)) if finding.is_fault]
    data = target.read_bytes()
    offsets = [
        data.rindex(b"layers.0"),
        data.rindex(np.float64(open_run(path).table(["l2"])["l2"][0].as_py()).tobytes()),
    ]
    for offset in offsets:
        flip(target, 8 * offset + 3)
        assert any(target.name in finding.text for finding in verify(open_run(path)))
        flip(target, 8 * offset + 3)


def test_a_damaged_payload_is_named_when_it_is_asked_for(tmp_path: Path) -> None:
    path, target = make_damaged_run(tmp_path, "sealed")
    run = open_run(path)
    row = run.table(["data", "step"]).slice(0, 1).to_pylist()[0]
    flip(target, 8 * target.read_bytes().index(row["data"]))
    run = open_run(path)
    assert run.problems == []  # payloads are read when they are asked for
    with pytest.raises(CorruptError, match=rf"{target.name}.*'data'.*CRC32C"):
        run.array("layers.0", step=row["step"])


def test_one_damaged_shard_leaves_the_others_readable(tmp_path: Path) -> None:
    path, target = make_damaged_run(tmp_path, "sealed")
    second = HandmadeWriter(path, rank=1)
    second.add_shard([payload_rows(rank=1)])
    target.write_bytes(b"nothing of ours")
    run = open_run(path)
    assert [writer.num_rows for writer in run.writers] == [0, 10]
    assert target.name in run.problems[0]
    assert run.array("layers.0", step=3, rank=1).shape == (3, 5)


def test_damage_found_late_takes_its_batch_out_of_every_column(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run")
    writer = HandmadeWriter(path)
    batches = [[make_row(10 * b + i, step=b, mean=b + i / 7, encoding=None) for i in range(3)] for b in range(3)]
    shard = writer.add_shard(batches, with_index=False)
    flip(shard, 8 * shard.read_bytes().index(np.float64(1 + 2 / 7).tobytes()))
    run = open_run(path)
    assert run.steps == [0, 1, 2]  # nothing of that batch has been looked at but its steps
    assert (run.num_rows, run.problems) == (9, [])
    assert run.table(["mean"]).column("mean").to_pylist() == [row["mean"] for b in (0, 2) for row in batches[b]]
    assert run.table(["step"]).column("step").to_pylist() == [0, 0, 0, 2, 2, 2]
    assert run.num_rows == 6
    assert "'mean'" in run.problems[0]


def test_damage_in_a_column_that_only_the_look_up_reads_leaves_the_other_values(tmp_path: Path) -> None:
    """Which rows count is decided after all that the question reads: else it would be of rows that have moved."""
    path = make_run(tmp_path / "run", world_size=2)
    for rank in range(2):
        batches = [
            [make_row(step, np.full(4, 10 * rank + step, "<f4"), rank=rank, step=step, scope=f"scope-{step}")]
            for step in range(4)
        ]
        shard = HandmadeWriter(path, rank=rank).add_shard(batches, with_index=False)
        if rank == 0:
            flip(shard, 8 * shard.read_bytes().index(b"scope-1"))
    run = open_run(path)
    assert run.array("layers.0", step=3).tolist() == [3.0] * 4 + [13.0] * 4
    assert len(run.problems) == 1


def test_an_index_damaged_after_opening_is_replaced_by_the_shard(tmp_path: Path) -> None:
    path, index = make_damaged_run(tmp_path, "index")
    expected = open_run(path).table(["fingerprint", "l2"])
    offset = index.read_bytes().rindex(np.float64(expected["l2"][0].as_py()).tobytes())
    flip(index, 8 * offset)
    found = open_run(path).table(["fingerprint", "l2"])
    assert found.equals(expected)


def test_an_index_that_lies_about_positions_is_noticed(tmp_path: Path) -> None:
    from tests.rigs.handmade import index_bytes

    path, index = make_damaged_run(tmp_path, "index")
    rows = payload_rows()
    shard = index.parent / "tensors-000000.arrow"
    index.write_bytes(index_bytes([rows[4:], rows[:4]], shard.stat().st_size))
    with pytest.raises(CorruptError):
        open_run(path).array("layers.0", step=1)
    with pytest.raises(CorruptError):
        open_run(path).table(["data"])
    assert any("differs from batch 0" in finding.text for finding in verify(open_run(path)))


def test_arrow_agrees_with_the_handmade_files(tmp_path: Path) -> None:
    _, target = make_damaged_run(tmp_path, "sealed")
    assert pa.ipc.open_file(target).read_all().num_rows == 10
