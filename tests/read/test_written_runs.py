"""What the writer wrote is read back: closed, live, across shards, and after a retention."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
import pytest

from recorder.errors import NotARunError
from recorder.read import shard as shard_module
from recorder.records import KEEP_STATS, KEEP_TENSOR, PART_BYTES
from recorder.run.run import open_run
from recorder.upkeep.verify import verify
from tests.rigs.handmade import HandmadeWriter, make_row, make_run
from tests.rigs.writer import Rig

READ = shard_module.read_batch
RNG = np.random.default_rng(0)


def test_a_closed_run_reads_back_bit_for_bit_and_verifies(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "run", shard_bytes=64 << 10).start()
    recorded = {}
    for step in range(40):
        recorded[step] = RNG.standard_normal((40, 50)).astype(np.float32)
        rig.put(recorded[step], step=step)
        rig.put(recorded[step], step=step, site="grad", keep=KEEP_STATS)
        if step % 10 == 9:
            assert rig.drain()
    large = np.arange(PART_BYTES // 8 + 1000, dtype=np.float64)
    rig.put(large, step=40)
    rig.close()
    run = open_run(tmp_path / "run")
    (writer,) = run.writers
    assert len(writer.shards) > 2
    assert (run.problems, writer.state, writer.balance.num_missing) == ([], "closed", 0)
    assert run.num_rows == writer.balance.written == 82
    for step, values in recorded.items():
        np.testing.assert_array_equal(run.array("blocks.0.mlp", step=step), values)
    np.testing.assert_array_equal(run.array("blocks.0.mlp", step=40), large)
    assert run.table(["step"], pc.field("site") == "grad").column("step").to_pylist() == list(range(40))
    assert list(verify(run)) == []


def test_kept_columns_are_read_once_and_wide_rows_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, columns, num_reads in (("narrow", {}, 1), ("wide", {"histogram": bytes(2000)}, 3)):
        writer = HandmadeWriter(make_run(tmp_path / name))
        writer.add_shard([[make_row(seq, [1.0], step=seq, **columns) for seq in range(4)]])
        writer.finish()
        run = open_run(tmp_path / name)
        run.keep_columns()
        (shard,) = run.writers[0].shards
        reads: list[object] = []
        monkeypatch.setattr(shard_module, "read_batch", lambda *what, reads=reads: reads.append(what) or READ(*what))
        assert shard.columns(["step"])[0].column("step").to_pylist() == [0, 1, 2, 3]
        assert shard.columns(["row", "seq"], None)[0].column("seq").to_pylist() == [0, 1, 2, 3]
        assert len(reads) == num_reads


def test_a_live_run_is_read_while_it_is_written(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "run", shard_bytes=64 << 10, flush_interval_s=0.01).start()
    seen, until_s = 0, time.monotonic() + 2
    step = 0
    while time.monotonic() < until_s:
        for _ in range(20):
            rig.put(np.full(1000, step, np.float32), step=step)
            step += 1
        try:
            run = open_run(tmp_path / "run")
        except NotARunError:
            continue  # not begun
        steps = run.steps
        assert run.problems == []
        assert steps == list(range(len(steps))) and len(steps) >= seen
        seen = len(steps)
        if steps:
            assert run.writers[0].state == "recording"
            assert run.array("blocks.0.mlp", step=steps[-1])[0] == steps[-1]
            assert not [finding for finding in verify(run) if finding.is_fault]
    assert seen > 100
    rig.close()


def test_what_retention_removed_is_counted_and_the_rest_verifies(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "run", max_bytes=4 << 20, codec="none", batch_bytes=1).start()
    values = RNG.integers(0, 256, 100_000, dtype=np.uint8)
    for step in range(60):
        rig.put(values, step=step, keep=KEEP_TENSOR)
        assert rig.drain()
    rig.close()
    run = open_run(tmp_path / "run")
    (writer,) = run.writers
    assert writer.balance.retired_rows > 0
    assert (run.steps[0], run.steps[-1]) == (0, 59)
    assert run.num_rows == writer.balance.written - writer.balance.retired_rows
    assert list(verify(run)) == []


@pytest.mark.parametrize("is_sealed_first", [True, False])
def test_payloads_are_decoded_by_whichever_shard_holds_them(tmp_path: Path, is_sealed_first: bool) -> None:
    rig = Rig(tmp_path / "run").start()
    values = RNG.integers(0, 5, (300, 300))
    rig.put(values)
    assert rig.drain()
    if is_sealed_first:
        rig.close()
    run = open_run(tmp_path / "run")
    if not is_sealed_first:
        rig.close()
    np.testing.assert_array_equal(run.array("blocks.0.mlp"), values)
    assert run.tensor("blocks.0.mlp").tolist() == values.tolist()
