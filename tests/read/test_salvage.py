"""Shards without a footer: cut, killed, being written, damaged."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import numpy as np
import pytest

from recorder.run.run import Run, open_run
from recorder.upkeep.verify import verify
from tests.rigs.handmade import HandmadeWriter, make_row, make_run, shard_bytes
from tests.rigs.small_runs import payload_rows

BATCHES = [payload_rows()[:2], payload_rows()[2:5], payload_rows()[5:]]


def open_with(tmp_path: Path, data: bytes, name: str = "_tensors-000000.arrow.open") -> Run:
    run = tmp_path / "run"
    if not run.exists():
        HandmadeWriter(make_run(run))
    (run / "rank=00000" / "20260101-000000-host-1" / name).write_bytes(data)
    return open_run(run)


def open_quiet(tmp_path: Path, data: bytes) -> Run:
    """As of a writer that has shown nothing new for long, and so is dead."""
    run = open_with(tmp_path, data).path
    for path in [*run.rglob("*")]:
        os.utime(path, (0, 0))
    return open_run(run)


def batch_ends() -> list[int]:
    return [len(shard_bytes(BATCHES[:number], is_sealed=False)) for number in range(len(BATCHES) + 1)]


def test_an_open_shard_is_read_to_its_last_batch(tmp_path: Path) -> None:
    run = open_with(tmp_path, shard_bytes(BATCHES, is_sealed=False))
    (shard,) = run.writers[0].shards
    assert (shard.is_sealed, shard.num_trailing_bytes, shard.damage) == (False, 0, [])
    assert run.table(["seq"]).column("seq").to_pylist() == list(range(10))
    np.testing.assert_array_equal(run.array("layers.0", step=6), run.array("layers.0", step=5))


def test_a_zero_tail_is_no_damage(tmp_path: Path) -> None:
    run = open_with(tmp_path, shard_bytes(BATCHES, is_sealed=False) + bytes(5001))
    assert run.num_rows == 10
    assert run.writers[0].shards[0].num_trailing_bytes == 0


def test_a_cut_at_any_byte_leaves_whole_batches(tmp_path: Path) -> None:
    data = shard_bytes(BATCHES, is_sealed=False)
    ends = batch_ends()
    num_rows = np.cumsum([0, *map(len, BATCHES)])
    for cut in [*range(0, len(data), 97), *(end + by for end in ends for by in (-1, 0, 1) if end + by <= len(data))]:
        run = open_with(tmp_path, data[:cut])
        num_batches = max((n for n, end in enumerate(ends) if end <= cut), default=0)
        assert run.num_rows == num_rows[num_batches], cut
        assert run.problems == []
        shard = run.writers[0].shards[0]
        assert shard.num_trailing_bytes == max(0, cut - (ends[num_batches] if cut >= ends[0] else 8))


def test_a_flip_in_the_last_batch_is_no_cut_write(tmp_path: Path) -> None:
    data = shard_bytes(BATCHES[:2], is_sealed=False)
    start, whole = batch_ends()[1], open_with(tmp_path, data).table()
    offsets = random.Random(0).sample(range(start, len(data)), 60)
    for at in [*range(start, start + 1000, 15), *offsets]:
        damaged = bytearray(data)
        damaged[at] ^= 1 << at % 8
        run = open_quiet(tmp_path, bytes(damaged))
        assert run.problems or run.table().equals(whole), at
        if run.num_rows < whole.num_rows:
            assert [finding for finding in verify(run) if finding.is_fault], at


def test_a_message_of_a_length_that_only_damage_can_give_it_is_no_cut_write(tmp_path: Path) -> None:
    data = shard_bytes(BATCHES[:2], is_sealed=False)
    prefix = batch_ends()[1] + 4
    for bit in range(32):
        damaged = bytearray(data)
        damaged[prefix + bit // 8] ^= 1 << bit % 8
        assert open_quiet(tmp_path, bytes(damaged)).problems, bit


def test_what_a_writer_at_work_has_not_written_yet_is_no_damage(tmp_path: Path) -> None:
    data = bytearray(shard_bytes(BATCHES[:2], is_sealed=False))
    data[-1] ^= 1  # of `time_ns`
    run = open_with(tmp_path, bytes(data))
    assert (run.writers[0].state, run.num_rows, run.problems) == ("recording", 2, [])
    (finding,) = verify(run)
    assert (finding.is_fault, "may be at work" in finding.text) == (False, True)


@pytest.mark.parametrize("name", ["_tensors-000000.arrow.open", "tensors-000000.arrow"])
def test_what_a_file_claims_to_hold_costs_no_time(tmp_path: Path, name: str) -> None:
    open_with(tmp_path, shard_bytes(BATCHES, is_sealed=False), name)
    (path,) = tmp_path.rglob(name)
    os.truncate(path, 1 << 40)
    started_s = time.monotonic()
    run = open_run(tmp_path / "run")
    findings = list(verify(run))
    assert time.monotonic() - started_s < 10
    assert run.num_rows == 10
    assert any(name in finding.text for finding in findings) == (name[0] != "_")  # a writer at work is none


def test_a_byte_far_behind_a_hole_is_found(tmp_path: Path) -> None:
    data = shard_bytes(BATCHES, is_sealed=False)
    open_with(tmp_path, data)
    (path,) = tmp_path.rglob("_tensors-000000.arrow.open")
    with open(path, "r+b") as file:
        file.seek(1 << 36)
        file.write(b"x")
    for one in (tmp_path / "run").rglob("*"):
        os.utime(one, (0, 0))
    (problem,) = open_run(tmp_path / "run").problems
    assert f"{(1 << 36) + 1 - len(data)} bytes" in problem


def test_a_cut_sealed_shard_is_salvaged_and_named(tmp_path: Path) -> None:
    data = shard_bytes(BATCHES)
    run = open_with(tmp_path, data[:-1], "tensors-000000.arrow")
    assert run.num_rows == 10
    (problem,) = run.problems
    assert "tensors-000000.arrow" in problem and "footer" in problem


def test_a_damaged_batch_costs_itself_alone(tmp_path: Path) -> None:
    data = bytearray(shard_bytes(BATCHES, is_sealed=False))
    start = batch_ends()[1]
    data[start] ^= 0xFF
    run = open_with(tmp_path, bytes(data))
    assert run.table(["seq"]).column("seq").to_pylist() == [0, 1, *range(5, 10)]
    (problem,) = run.problems
    assert f"{batch_ends()[2] - start} bytes skipped" in problem


def test_a_damaged_schema_costs_nothing(tmp_path: Path) -> None:
    data = bytearray(shard_bytes(BATCHES, is_sealed=False))
    data[8] ^= 0xFF
    run = open_with(tmp_path, bytes(data))
    assert run.num_rows == 10
    assert len(run.problems) == 1


def test_garbage_behind_the_last_batch_is_counted(tmp_path: Path) -> None:
    data = shard_bytes(BATCHES, is_sealed=False)
    run = open_with(tmp_path, data + b"\xff" * 100_000)
    assert run.num_rows == 10
    assert run.writers[0].shards[0].num_trailing_bytes == 100_000


def test_an_end_of_stream_mark_before_the_seal_hides_no_batch(tmp_path: Path) -> None:
    data = bytearray(shard_bytes(BATCHES, is_sealed=False))
    start = batch_ends()[1]
    data[start + 4 : start + 8] = bytes(4)
    run = open_with(tmp_path, bytes(data))
    assert run.num_rows == 7


def test_a_seal_that_was_never_published_is_read(tmp_path: Path) -> None:
    run = open_with(tmp_path, shard_bytes(BATCHES))
    assert run.num_rows == 10
    assert run.writers[0].shards[0].num_trailing_bytes == 0


def test_a_shard_under_both_names_counts_once(tmp_path: Path) -> None:
    open_with(tmp_path, shard_bytes(BATCHES))
    run = open_with(tmp_path, shard_bytes(BATCHES), "tensors-000000.arrow")
    assert run.num_rows == 10


def test_payloads_stay_readable_when_the_shard_is_sealed_meanwhile(tmp_path: Path) -> None:
    run = open_with(tmp_path, shard_bytes(BATCHES[:2], is_sealed=False) + bytes(4096))
    open_path = run.writers[0].shards[0].path
    open_path.unlink()
    (open_path.parent / "tensors-000000.arrow").write_bytes(shard_bytes(BATCHES))
    assert run.array("layers.0", step=3).shape == (3, 5)


def test_a_shard_retired_meanwhile_is_said(tmp_path: Path) -> None:
    run_path = make_run(tmp_path / "run")
    path = HandmadeWriter(run_path).add_shard(BATCHES)
    run = open_run(run_path)
    path.unlink()
    assert run.num_rows == 10
    with pytest.raises(Exception, match=r"is gone .*open it again"):
        run.array("layers.0", step=3)


def test_large_payloads_are_not_read_for_the_light_columns(tmp_path: Path) -> None:
    values = np.arange(100_000.0)
    data = shard_bytes([[make_row(0, values)]], is_sealed=False)
    payload = data.index(values.tobytes())
    flipped = bytearray(data)
    flipped[payload + 400_000] ^= 1
    run = open_with(tmp_path, bytes(flipped))
    assert run.table(["mean"]).column("mean").to_pylist() == [values.mean()]
    with pytest.raises(Exception, match=r"'data'.*CRC32C"):
        run.array("layers.0")


@pytest.mark.parametrize("state, expected", [("closed", "closed"), ("recording", "recording")])
def test_the_state_of_a_writer_is_known(tmp_path: Path, state: str, expected: str) -> None:
    run = make_run(tmp_path / "run")
    HandmadeWriter(run).finish(state=state)
    assert open_run(run).writers[0].state == expected


def test_a_killed_writer_is_known_on_its_own_host(tmp_path: Path) -> None:
    import os
    import subprocess

    child = subprocess.Popen(["true"])
    child.wait()
    run = make_run(tmp_path / "run")
    writer = HandmadeWriter(run)
    writer.add_shard(BATCHES, is_sealed=False)
    writer.finish(state="recording", host=os.uname().nodename, pid=child.pid, ledger={"written": 3})
    (found,) = open_run(run).writers
    assert found.state == "unclosed"
    assert found.balance.written == 10  # the last batch knows better than the manifest
