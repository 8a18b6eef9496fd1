"""The writer thread over a healthy disk: what it writes, when, and how it ends."""

from __future__ import annotations

import errno
import gc
import logging
import os
import stat
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recorder.columns import METADATA_COLUMNS, SCHEMA
from recorder.format.codec import decode
from recorder.format.rundir import index_name
from recorder.numerics.dtypes import item_bytes
from recorder.records import (
    KEEP_FINGERPRINT,
    KEEP_STATS,
    KEEP_TENSOR,
    PART_BYTES,
    SMALL_BYTES,
    Chunk,
    LostError,
    Measured,
    MeasuredTogether,
    Staged,
)
from recorder.sites import FORMAT_VERSION
from recorder.system.processes import CoreShare
from recorder.write import shard as shard_module
from recorder.write.file import PageMemory
from recorder.write.rows import MAX_ROWS
from recorder.write.writer_directory import RunTarget
from tests.rigs.fakes import FakeBlock, FaultyDisk, fake_measure, fake_staged
from tests.rigs.waiting import PATIENCE_S, wait_until
from tests.rigs.writer import Rig, read_open, read_sealed


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path / "run").start()
    yield rig
    rig.writer.close(PATIENCE_S)


def payload(row: dict[str, Any]) -> bytes:
    return decode(row["encoding"], row["data"], row["payload_bytes"], item_bytes(row["dtype"])).tobytes()


# -- what is written ----------------------------------------------------------------------------------------------


def test_a_scalar_stays_with_the_statistics_and_keeps_its_value(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "run").start()
    rig.put(keep=KEEP_STATS)
    rig.put(np.float64(0.25).reshape(()), site="scalar", name="loss")
    rig.put(keep=KEEP_STATS)
    assert rig.close().is_complete
    (path,) = rig.files("*.arrow")
    assert path.name == "stats-000000.arrow"
    table = pa.ipc.open_file(path).read_all()
    assert table.column("data").to_pylist() == [None, np.float64(0.25).tobytes(), None]
    assert table.column("encoding").to_pylist() == [None, "plain", None]


def test_a_written_run_reads_back_with_plain_pyarrow_and_equals(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "run", rank=3, attempt=2001).start()
    generator = np.random.default_rng(0)
    chunk = Chunk((4, 6), (2, 0), '["S(0)"]', '{"dp":2}', "dtensor")
    values: list[Any] = [
        generator.standard_normal((64, 128), dtype=np.float32),
        generator.integers(0, 50000, (3, 5)),
        np.float32(1.5).reshape(()),
        np.zeros((0, 7), np.float16),
        np.array([True, False]),
    ]
    rig.put(values[0], module_path="a.b", step=7, micro_step=1, note='{"taken":"total"}', time_ns=5)
    rig.put(values[1], site="grad", phase="optimizer", scope="final", chunk=chunk, micro_step=None, mode="eval")
    rig.put(values[2], name="loss")
    rig.put(values[3])
    rig.put(values[4], keep=KEEP_TENSOR)
    report = rig.close()
    assert report.is_complete
    assert report.error is None
    assert report.ledger["written"] == 5
    assert report.ledger["dropped"] == {}
    rig.assert_blocks_are_released()

    (path,) = rig.files("*.arrow")
    assert path.name == "tensors-000000.arrow"
    assert path.parent.parent == tmp_path / "run" / "rank=00003"
    with pa.OSFile(str(path)) as source:
        assert pa.ipc.open_file(source).schema.equals(SCHEMA, check_metadata=True)
    rows = rig.rows()
    assert [payload(row) for row in rows] == [value.tobytes() for value in values]
    first = {
        "seq": 0,
        "attempt": 2001,
        "step": 7,
        "micro_step": 1,
        "call": 0,
        "repeat": 0,
        "mode": "train",
        "phase": "forward",
        "rank": 3,
        "root": "model",
        "module_path": "a.b",
        "site": "output",
        "name": "",
        "dtype": "float32",
        "shape": "[64,128]",
        "numel": 8192,
        "part": 0,
        "flat_offset": 0,
        "note": '{"taken":"total"}',
        "mean": 32768.0,
        "payload_bytes": 32768,
        "time_ns": 5,
    }
    assert {name: rows[0][name] for name in first} == first
    sums = [sum(value.tobytes()) for value in values[:3]]
    assert [row["fingerprint"] for row in rows[:3]] == [f"{total:016x}" for total in sums]
    layout = ("global_shape", "offsets", "placements", "mesh", "layout_source", "scope", "micro_step", "mode")
    assert [rows[1][name] for name in layout] == [
        *("[4,6]", "[2,0]", '["S(0)"]', '{"dp":2}', "dtensor", "final", None, "eval")
    ]
    assert [rows[0][name] for name in layout[:5]] == [None] * 5
    assert [row["shape"] for row in rows[2:]] == ["[]", "[0,7]", "[2]"]
    assert [row["numel"] for row in rows[2:]] == [1, 0, 2]
    assert rows[4]["mean"] is None
    assert all(row[name] is None for row in rows for name in ("scale", "ranks_present", "ranks_expected"))


def test_rows_without_a_payload_go_to_compressed_stats_shards(rig: Rig) -> None:
    for number in range(100):
        rig.put(np.full(1000, number, np.float32), keep=KEEP_STATS | KEEP_FINGERPRINT)
    rig.close()
    (path,) = rig.files("*.arrow")
    assert path.name == "stats-000000.arrow"
    assert path.stat().st_size < 100 * 300
    rows = rig.rows()
    assert [row["mean"] for row in rows] == [4000.0] * 100
    assert {(row["encoding"], row["data"], row["payload_bytes"]) for row in rows} == {(None, None, None)}
    assert rig.files("_*.index") == []


def test_a_large_tensor_becomes_parts_with_statistics_on_the_first(rig: Rig) -> None:
    values = np.arange(2 * PART_BYTES // 4 + 1000, dtype=np.float32)
    staged = rig.put(values)
    rig.put(np.ones(3, np.float32))
    report = rig.close()
    assert staged.num_parts == 3
    assert report.ledger["written"] == 4
    rows = rig.rows()
    assert [row["seq"] for row in rows] == [0, 1, 2, 3]
    assert [row["part"] for row in rows] == [0, 1, 2, 0]
    assert [row["flat_offset"] for row in rows] == [0, PART_BYTES // 4, PART_BYTES // 2, 0]
    assert [row["payload_bytes"] for row in rows] == [PART_BYTES, PART_BYTES, 4000, 12]
    assert {row["shape"] for row in rows[:3]} == {f"[{len(values)}]"}
    assert [row["mean"] for row in rows] == [float(values.nbytes), None, None, 12.0]
    assert [row["fingerprint"] is None for row in rows] == [False, True, True, False]
    assert b"".join(map(payload, rows[:3])) == values.tobytes()
    rig.assert_blocks_are_released()


def test_why_statistics_are_missing_joins_the_note(tmp_path: Path) -> None:
    def measure(data: Any, dtype: str, *_: Any) -> Measured:
        return Measured(note=f"no_statistics:{dtype}")

    rig = Rig(tmp_path, measure=measure).start()
    rig.put(note='{"taken":"total"}')
    rig.put()
    rig.close()
    notes = [row["note"] for row in rig.rows()]
    assert notes == ['{"taken":"total","no_statistics":"float32"}', '{"no_statistics":"float32"}']


def test_a_module_named_by_half_a_surrogate_pair_costs_no_row(rig: Rig) -> None:
    rig.put(module_path="fine")
    rig.put(module_path="half\ud800")
    assert rig.close().ledger["dropped"] == {}
    assert [row["module_path"] for row in rig.rows()] == ["fine", "half\\ud800"]


@pytest.mark.parametrize("index_batch_rows", [1, 5, 8192])
def test_shards_end_at_their_size_and_an_index_fits_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, index_batch_rows: int
) -> None:
    monkeypatch.setattr(shard_module, "_INDEX_BATCH_ROWS", index_batch_rows)
    rig = Rig(tmp_path, shard_bytes=300_000, batch_bytes=50_000, codec="none").start()
    for _ in range(40):
        rig.put(np.zeros(5000, np.float32))
    rig.close()
    shards = rig.files("*.arrow")
    assert len(shards) == 3
    assert all(path.stat().st_size < 500_000 for path in shards)
    for shard in shards:
        batches = [batch for batch, _ in read_sealed(shard)]
        index = shard.with_name(index_name(shard.name))
        with pa.OSFile(str(index)) as source:
            schema = pa.ipc.open_file(source).schema
        assert schema.metadata[b"recorder_shard_bytes"] == b"%d" % shard.stat().st_size
        assert schema.names == [*METADATA_COLUMNS, "batch", "row"]
        found = pa.Table.from_batches([batch for batch, _ in read_sealed(index)])
        assert found.select(METADATA_COLUMNS).equals(pa.Table.from_batches(batches).select(METADATA_COLUMNS))
        positions = [(number, row) for number, batch in enumerate(batches) for row in range(batch.num_rows)]
        assert list(zip(*found.select(["batch", "row"]).to_pydict().values(), strict=True)) == positions


def test_every_batch_carries_the_ledger_so_far(tmp_path: Path) -> None:
    rig = Rig(tmp_path).start()
    rig.put()
    rig.drain()
    rig.num_observed += 2
    rig.writer.count_drop("pool_full", 2)
    rig.put()
    rig.drain()
    rig.close()
    (shard,) = rig.files("*.arrow")
    ledgers = [header.ledger for _, header in read_sealed(shard)]
    assert [ledger["written"] for ledger in ledgers] == [1, 2]
    assert [ledger["dropped"] for ledger in ledgers] == [{}, {"pool_full": 2}]
    assert rig.manifest()["ledger"] == {
        "observed": 4,
        "written": 2,
        "dropped": {"pool_full": 2},
        "retired": {"rows": 0, "bytes": 0},
        "synced": 2,
    }


@pytest.mark.parametrize("direct_io", ["auto", "off"])
@settings(max_examples=12)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 300_000),
            st.sampled_from(["float32", "float16", "int64", "uint8", "bool"]),
            st.sampled_from([KEEP_TENSOR, KEEP_STATS, KEEP_TENSOR | KEEP_STATS | KEEP_FINGERPRINT]),
            st.sampled_from(["put", "drain", "drop", "lose"]),
        ),
        max_size=25,
    ),
    st.sampled_from(["auto", "none", "zstd"]),
)
def test_any_mix_of_records_is_written_or_counted(
    tmp_path_factory: pytest.TempPathFactory,
    direct_io: str,
    records: list[tuple[int, str, int, str]],
    codec: str,
) -> None:
    rig = Rig(
        tmp_path_factory.mktemp("mix"), direct_io=direct_io, codec=codec, batch_bytes=200_000, shard_bytes=400_000
    ).start()
    generator = np.random.default_rng(len(records))
    expected: dict[int, bytes | None] = {}
    dropped = {"hook_error": 0, "interrupted": 0}
    for size, dtype, keep, action in records:
        if action == "drop":
            rig.num_observed += 1
            rig.writer.count_drop("hook_error")
            dropped["hook_error"] += 1
        elif action == "lose":
            rig.num_observed += 1
            dropped["interrupted"] += 1
        else:
            values = generator.standard_normal(size // np.dtype(dtype).itemsize).astype(dtype)
            staged = rig.put(values, keep=keep)
            expected[staged.seq] = values.tobytes() if keep & KEEP_TENSOR else None
            if action == "drain":
                assert rig.drain()
    report = rig.close()
    assert report.is_complete
    assert report.ledger["dropped"] == {reason: count for reason, count in dropped.items() if count}
    rows = rig.rows()
    assert [row["seq"] for row in rows] == list(expected)
    assert [row["encoding"] and payload(row) for row in rows] == list(expected.values())
    rig.assert_blocks_are_released()


# -- when ---------------------------------------------------------------------------------------------------------


def test_an_open_shard_is_a_readable_stream_once_the_flush_interval_has_passed(tmp_path: Path) -> None:
    rig = Rig(tmp_path, flush_interval_s=0.1).start()
    rig.put()
    rig.put(keep=KEEP_STATS)
    wait_until(lambda: rig.writer.directory)
    wait_until(lambda: len(rig.rows()) == 2)
    for path in rig.files("_*.open"):
        assert path.stat().st_size % 4096 == 0
        assert len(read_open(path)) == 1
    assert rig.files("*.arrow") == []
    rig.close()
    assert rig.files("_*.open") == []
    assert len(rig.rows()) == 2


def test_drain_returns_once_everything_put_before_is_synced(tmp_path: Path) -> None:
    disk = FaultyDisk()
    rig = Rig(tmp_path, disk=disk, flush_interval_s=60.0, sync_interval_s=60.0).start()
    rig.put()
    assert rig.drain()
    assert disk.calls["sync"] == 1
    assert len(rig.rows()) == 1
    assert rig.drain()
    assert disk.calls["sync"] == 1
    rig.close()
    assert rig.drain()


def test_what_was_written_is_synced_after_the_sync_interval(tmp_path: Path) -> None:
    disk = FaultyDisk()
    rig = Rig(tmp_path, disk=disk, flush_interval_s=0.0, sync_interval_s=0.1).start()
    rig.put()
    wait_until(lambda: disk.calls["sync"] == 1)
    rig.close()


def test_a_block_is_released_before_its_batch_is_written(tmp_path: Path) -> None:
    rig = Rig(tmp_path, flush_interval_s=60.0).start()
    rig.put()
    wait_until(lambda: rig.staged[0].block.num_releases)  # type: ignore[attr-defined]
    time.sleep(0.1)
    assert rig.files("*tensors*") == []
    rig.close()


def test_the_owner_is_polled_while_the_writer_is_idle_and_while_it_works(tmp_path: Path) -> None:
    polls: list[threading.Thread] = []
    rig = Rig(tmp_path, poll=lambda: polls.append(threading.current_thread())).start()
    wait_until(lambda: len(polls) == 3)
    assert {thread.name for thread in polls} == {"recorder-writer"}
    rig.close()


def test_what_the_owner_said_while_it_was_polled_is_the_last_word(tmp_path: Path) -> None:
    polled, said = threading.Event(), threading.Event()

    def poll() -> dict[str, Any]:
        polled.set()
        said.wait(PATIENCE_S)
        return {"roots": []}

    rig = Rig(tmp_path, poll=poll).start()
    polled.wait(PATIENCE_S)
    rig.writer.set_manifest({"roots": ["model"]})
    said.set()
    rig.close()
    assert rig.manifest()["roots"] == ["model"]


def test_progress_is_reported_while_idle(rig: Rig) -> None:
    before = rig.writer.last_progress_s
    wait_until(lambda: rig.writer.last_progress_s > before)
    assert rig.writer.stats().is_alive
    rig.close()
    assert not rig.writer.stats().is_alive


def test_a_copy_is_awaited_before_its_bytes_are_read(rig: Rig) -> None:
    class Arriving:
        def wait(self, timeout_s: float) -> bool:
            staged.block.data[:] = 7
            return True

    staged = fake_staged(np.zeros(4, np.uint8), ready=Arriving())
    rig.num_observed = 1
    rig.writer.put(staged)
    rig.close()
    assert [payload(row) for row in rig.rows()] == [b"\7\7\7\7"]


class Late:
    """A copy that arrives when the test says so."""

    def __init__(self) -> None:
        self.has_arrived = False
        self.num_waits = 0

    def wait(self, timeout_s: float) -> bool:
        self.num_waits += 1
        time.sleep(timeout_s)
        return self.has_arrived


def test_the_writer_keeps_up_while_it_waits_for_a_copy(rig: Rig) -> None:
    rig.put()
    late = Late()
    rig.put(ready=late)
    wait_until(lambda: late.num_waits > 0)
    before = rig.writer.last_progress_s
    wait_until(lambda: rig.writer.last_progress_s > before)
    late.has_arrived = True
    assert rig.close().is_complete
    assert [row["seq"] for row in rig.rows()] == [0, 1]


def test_a_copy_that_never_arrives_does_not_outlast_close(rig: Rig) -> None:
    rig.put()
    rig.put(ready=Late())
    rig.put()
    report = rig.close(1.0)
    assert not report.is_complete
    assert report.ledger["dropped"] == {"abandoned_at_close": 2}
    assert [row["seq"] for row in rig.rows()] == [0]
    rig.assert_blocks_are_released()


def test_a_value_that_its_device_lost_is_counted_with_its_reason(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    class Lost:
        def wait(self, timeout_s: float) -> bool:
            raise LostError("copy_failed") from RuntimeError("the device is gone")

    for _ in range(6):
        rig.put(ready=Lost())
    rig.put()
    report = rig.close()
    assert report.is_complete, "a sick device is no reason for the writer to begin anew"
    assert report.ledger["dropped"] == {"copy_failed": 6}
    assert [row["seq"] for row in rig.rows()] == [6]
    assert caplog.text.count("the device is gone") == 1
    rig.assert_blocks_are_released()


# -- where --------------------------------------------------------------------------------------------------------


def test_memory_that_a_wider_batch_cannot_have_costs_no_row(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    num_refused = 0
    map_ = PageMemory._map

    def refuse_once(nbytes: int) -> Any:
        nonlocal num_refused
        if num_refused == 0:
            num_refused += 1
            raise OSError(errno.ENOMEM, "no memory")
        return map_(nbytes)

    for number in range(500):
        rig.put(np.full(8, number, np.float32), module_path="m" * 9000 + str(number))
        if number == 0:
            assert rig.drain()  # the memory that every batch has is there
            monkeypatch.setattr(PageMemory, "_map", staticmethod(refuse_once))
    assert rig.drain()
    assert num_refused == 1
    assert rig.close().ledger["dropped"] == {}
    assert [np.frombuffer(row["data"], np.float32)[0] for row in rig.rows()] == list(range(500))


def test_files_and_directories_are_for_the_owner_alone(rig: Rig, tmp_path: Path) -> None:
    rig.put()
    rig.drain()
    (open_shard,) = rig.files("_*.open")
    assert stat.S_IMODE(open_shard.stat().st_mode) == 0o600
    rig.put(keep=KEEP_STATS)
    rig.close()
    found = list((tmp_path / "run").rglob("*"))
    assert {stat.S_IMODE(path.stat().st_mode) for path in found if path.is_file()} == {0o600}
    assert {stat.S_IMODE(path.stat().st_mode) for path in found if path.is_dir()} == {0o700}
    assert sorted(path.name for path in found if path.is_file()) == [
        *("_run.json", "_tensors-000000.index", "_writer.json", "stats-000000.arrow", "tensors-000000.arrow")
    ]


def test_two_writers_of_one_rank_write_side_by_side(tmp_path: Path) -> None:
    rigs = [Rig(tmp_path / "run", rank=1).start() for _ in range(2)]
    for number, rig in enumerate(rigs):
        rig.put(np.full(3, number, np.uint8))
    for rig in rigs:
        assert rig.close().is_complete
    assert [[payload(row) for row in rig.rows()] for rig in rigs] == [[b"\0\0\0"], [b"\1\1\1"]]
    assert rigs[0].directory.parent == rigs[1].directory.parent
    assert rigs[0].directory != rigs[1].directory


def test_the_manifest_holds_what_the_owner_says_and_what_the_writer_knows(rig: Rig) -> None:
    rig.writer.set_manifest({"host": "a", "state": "not the owner's to say"})
    wait_until(lambda: rig.writer.directory and rig.files("_writer.json"))
    wait_until(lambda: rig.manifest().get("host") == "a")
    assert rig.manifest()["state"] == "recording"
    rig.put()
    rig.writer.set_manifest({"host": "b"})
    rig.close()
    manifest = rig.manifest()
    assert manifest["host"] == "b"
    assert manifest["state"] == "closed"
    assert manifest["ledger"]["written"] == 1
    assert manifest["closed_ns"] > 0
    assert manifest["writer"] == rig.directory.name
    assert (manifest["format"], manifest["version"]) == ("recorder", list(FORMAT_VERSION))


def test_a_writer_without_records_leaves_a_closed_manifest_and_no_shard(rig: Rig) -> None:
    assert rig.close().is_complete
    assert [path.name for path in rig.files("*")] == ["_writer.json"]


# -- the end ------------------------------------------------------------------------------------------------------


def test_close_says_the_same_again_and_later_records_are_counted(rig: Rig) -> None:
    rig.put()
    report = rig.close()
    late = fake_staged(seq=1)
    rig.writer.put(late)
    rig.writer.count_drop("late")
    assert rig.writer.close(1.0) is report
    assert late.block.num_releases == 1  # type: ignore[attr-defined]
    assert not rig.writer.stats().is_alive


def test_a_backlog_beyond_the_deadline_is_counted_and_the_rest_is_sealed(tmp_path: Path) -> None:
    def slow_measure(*_: Any) -> Measured:
        time.sleep(0.05)
        return Measured()

    rig = Rig(tmp_path, measure=slow_measure).start()
    for _ in range(100):
        rig.put(np.zeros(SMALL_BYTES + 1, np.uint8))
    report = rig.close(deadline_s=3.2)  # a quarter of it is for the seal, also on a machine that is busy
    assert not report.is_complete
    assert 1 <= report.ledger["written"] <= 3.2 / 0.05
    assert report.ledger["dropped"] == {"abandoned_at_close": 100 - report.ledger["written"]}
    rig.assert_blocks_are_released()
    (shard,) = rig.files("*.arrow")
    assert sum(batch.num_rows for batch, _ in read_sealed(shard)) == report.ledger["written"]
    assert rig.manifest()["ledger"] == report.ledger


@pytest.mark.parametrize("method", ["write", "sync", "link", "create", "make_directory"])
def test_close_returns_at_its_deadline_while_the_disk_hangs(
    tmp_path: Path, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    disk = FaultyDisk()
    rig = Rig(tmp_path / "run", disk=disk)
    if method == "make_directory":
        disk.stalled.add(method)
    rig.start()
    if method != "make_directory":
        wait_until(lambda: rig.writer.directory)
        disk.stalled.add(method)
    for _ in range(5):
        rig.put()
    began_s = time.monotonic()
    report = rig.close(deadline_s=0.3)
    assert time.monotonic() - began_s < 0.3 + 10, "the disk stands still for ever"
    assert not report.is_complete
    if method in ("write", "create", "make_directory"):
        assert report.ledger["dropped"] == {"abandoned_at_close": 5}
    assert "incomplete" in caplog.text
    before = dict(report.ledger)
    disk.recover()
    rig.writer._thread.join(PATIENCE_S)
    assert rig.writer.close(1.0).ledger == before
    rig.assert_blocks_are_released()


@pytest.mark.parametrize("method", ["write", "create"])
def test_a_writer_that_was_given_up_closes_its_files_once_the_disk_lets_it(tmp_path: Path, method: str) -> None:
    disk = FaultyDisk()
    rig = Rig(tmp_path / "run", disk=disk, batch_bytes=1).start()
    wait_until(lambda: rig.writer.directory)
    disk.stalled.add(method)
    rig.put()
    wait_until(lambda: disk.calls[method])
    assert not rig.close(deadline_s=0.1).is_complete
    disk.recover()
    rig.writer._thread.join(PATIENCE_S)
    held = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if os.path.lexists(path)]
    assert not any(path.startswith(str(tmp_path)) for path in held)


def test_put_never_waits_for_the_disk(tmp_path: Path) -> None:
    disk = FaultyDisk()
    rig = Rig(tmp_path, disk=disk, batch_bytes=1000, direct_io="off").start()
    disk.delay_s = 0.1
    began_s = time.perf_counter()
    for _ in range(200):
        rig.put(np.zeros(1000, np.uint8))
    assert time.perf_counter() - began_s < 15.0, "each write takes 0.1 s, which makes 20 s for 200 of them"
    disk.recover()
    assert rig.close().ledger["written"] == 200


@pytest.mark.parametrize("end", ["close", "drain"])
def test_the_owner_may_end_the_writer_from_poll(tmp_path: Path, end: str) -> None:
    results: list[Any] = []

    def poll() -> None:
        if busy.num_observed == 50 and not results:
            results.append(getattr(busy.writer, end)(PATIENCE_S))

    busy = Rig(tmp_path, poll=poll).start()
    for _ in range(50):
        busy.put()
    wait_until(lambda: results)
    assert len(busy.rows()) == 50
    report = busy.close()
    assert report.is_complete
    assert results == ([report] if end == "close" else [True])


def test_the_owner_may_end_the_writer_between_the_parts_of_a_large_tensor(tmp_path: Path) -> None:
    def poll() -> None:
        if busy.num_observed and busy.writer.stats().ledger["written"]:
            busy.writer.close(PATIENCE_S)

    disk = FaultyDisk()
    disk.delay_s = 0.15
    busy = Rig(tmp_path, poll=poll, disk=disk, codec="none").start()
    busy.put(np.zeros(5 * PART_BYTES, np.uint8))
    wait_until(lambda: not busy.writer.stats().is_alive)
    report = busy.close()
    assert 1 <= report.ledger["written"] < 5
    assert report.ledger["dropped"] == {"interrupted": 5 - report.ledger["written"]}
    busy.assert_blocks_are_released()
    assert [row["part"] for row in busy.rows()] == list(range(report.ledger["written"]))


def test_a_forked_child_can_drop_a_busy_writer(tmp_path: Path) -> None:
    rig = Rig(tmp_path).start()
    for _ in range(200):
        rig.put(np.zeros(100_000, np.uint8))
    child = os.fork()
    if child == 0:
        status = 1
        try:
            del rig
            gc.collect()
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert rig.close().ledger["written"] == 200
    assert len(rig.rows()) == 200


# -- our own mistakes ---------------------------------------------------------------------------------------------


class Broken:
    def wait(self, timeout_s: float) -> bool:
        raise RuntimeError("the copy failed")


def test_one_bad_record_costs_only_itself(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(12):
        rig.put(ready=Broken() if number % 3 else None)
    report = rig.close()
    assert report.ledger["dropped"] == {"writer_error": 8}
    assert [row["seq"] for row in rig.rows()] == [0, 3, 6, 9]
    rig.assert_blocks_are_released()
    assert caplog.text.count("the copy failed") == 1


def test_three_bad_records_in_a_row_begin_new_shards_once(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    rig.put()
    rig.drain()
    rig.put()
    for _ in range(3):
        rig.put(ready=Broken())
    rig.put()
    report = rig.close()
    assert report.is_complete
    assert report.ledger["dropped"] == {"writer_error": 4}, "the row that waited is lost with the three"
    assert [row["seq"] for row in rig.rows()] == [0, 5]
    assert [path.name for path in rig.files("*tensors*.arrow*")] == [
        *("_tensors-000000.arrow.open", "tensors-000001.arrow")
    ]
    assert rig.manifest()["restarted"] == "RuntimeError: the copy failed"
    assert caplog.text.count("begins anew") == 1
    rig.assert_blocks_are_released()


def test_a_writer_that_fails_again_after_its_restart_gives_up(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    rig.put()
    for _ in range(6):
        rig.put(ready=Broken())
    wait_until(lambda: not rig.writer.stats().is_alive)
    rig.put()
    report = rig.close()
    assert not report.is_complete
    assert report.ledger["dropped"] == {"writer_error": 7, "writer_dead": 1}
    assert isinstance(report.error, Exception)
    assert isinstance(report.error.__cause__, RuntimeError)
    assert [record.levelno for record in caplog.records].count(logging.ERROR) == 1
    assert not rig.drain()
    rig.assert_blocks_are_released()


def test_a_record_survives_its_failing_statistics(tmp_path: Path) -> None:
    def measure(*_: Any) -> Measured:
        raise ZeroDivisionError

    rig = Rig(tmp_path, measure=measure).start()
    for _ in range(5):
        rig.put()
    assert rig.close().ledger["dropped"] == {}
    assert [(row["mean"], row["note"]) for row in rig.rows()] == [(None, '{"no_statistics":"error"}')] * 5


def test_a_directory_that_cannot_be_resolved_is_said_and_everything_is_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def resolve_dir() -> RunTarget:
        raise TimeoutError("no answer from the store")

    rig = Rig(tmp_path, resolve_dir=resolve_dir).start()
    rig.put()
    report = rig.close()
    assert report.ledger["dropped"] == {"writer_dead": 1}
    assert report.directory is None
    assert "no answer from the store" in caplog.text
    rig.assert_blocks_are_released()


def test_a_record_put_at_the_very_moment_the_thread_ends_is_released(rig: Rig) -> None:
    class LateQueue:
        def __init__(self, queue: Any) -> None:
            self.get_nowait = queue.get_nowait
            self._put = queue.put

        def put(self, staged: Any) -> None:
            rig.writer.close(PATIENCE_S)
            self._put(staged)

    rig.writer._queue = LateQueue(rig.writer._queue)  # type: ignore[assignment]
    staged = rig.put()
    assert rig.close().ledger["dropped"] == {"interrupted": 1}
    assert staged.block.num_releases == 1  # type: ignore[attr-defined]


def test_records_put_while_the_writer_closes_are_never_left_behind(tmp_path: Path) -> None:
    def put_many() -> None:
        for _ in range(2000):
            staged = fake_staged()
            blocks.append(staged.block)
            rig.writer.put(staged)
            has_begun.set()

    for _ in range(5):
        rig = Rig(tmp_path).start()
        has_begun = threading.Event()
        blocks: list[Any] = []
        producer = threading.Thread(target=put_many)
        producer.start()
        has_begun.wait(PATIENCE_S)
        rig.writer.close(PATIENCE_S)
        producer.join(PATIENCE_S)
        assert len(blocks) == 2000
        assert {block.num_releases for block in blocks} == {1}


def test_a_shard_of_statistics_is_sealed_in_time_where_that_is_wanted(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "run", flush_interval_s=0.02, seal_stats_s=0.2).start()
    rig.put(keep=KEEP_STATS)
    assert rig.drain()
    wait_until(lambda: rig.files("stats-000000.arrow"))
    rig.put(keep=KEEP_STATS)
    rig.put(keep=KEEP_TENSOR)
    wait_until(lambda: rig.files("stats-000001.arrow"))
    assert not rig.files("tensors-*.arrow")
    rig.close()
    assert [row["seq"] for row in rig.rows()] == [0, 1, 2]


def _measured_together(records: Sequence[Staged]) -> list[Measured]:
    return [fake_measure(one.block.data, one.dtype, one.shape, one.chunk, one.keep) for one in records]


def _write_small_and_large(rig: Rig) -> list[dict[str, Any]]:
    for step in range(300):  # before the writer begins, so that all of them are in its queue
        rig.put(np.full(8, step, np.float32), step=step, keep=KEEP_STATS | KEEP_FINGERPRINT)
        if step % 50 == 7:
            rig.put(np.full(5000, step, np.float32), step=step, keep=KEEP_STATS)
            rig.put(step=step)
            rig.put(step=step, keep=KEEP_TENSOR)
            rig.put(np.float32(step), step=step, site="scalar")
    rig.start()
    assert rig.close().is_complete
    rig.assert_blocks_are_released()
    return list(rig.rows())


def test_small_records_that_are_measured_together_make_the_rows_of_records_measured_alone(tmp_path: Path) -> None:
    sizes: list[int] = []

    def together(records: Sequence[Staged]) -> list[Measured]:
        sizes.append(len(records))
        return _measured_together(records)

    rows = _write_small_and_large(Rig(tmp_path / "together", measure_small=together))
    assert len(rows) == 324 and sum(sizes) > 290 and max(sizes) > 20
    assert rows == _write_small_and_large(Rig(tmp_path / "alone"))


def _put_measured(rig: Rig, num_rows: int) -> FakeBlock:
    """Hand over records that were measured where their values lie, with one block for all."""
    block = FakeBlock(np.zeros(0, np.uint8))
    records = []
    for _ in range(num_rows):
        records.append(fake_staged(seq=rig.num_observed, keep=KEEP_STATS)._replace(block=block))
        rig.num_observed += 1
    measured = [Measured(mean=float(one.seq)) for one in records]
    rig.writer.put(MeasuredTogether(num_rows, lambda: (records, measured), block))
    return block


def test_records_measured_in_the_hook_are_written_as_they_are(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.put(keep=KEEP_STATS)
    block = _put_measured(rig, MAX_ROWS + 3)
    rig.start()
    assert rig.close().is_complete
    assert block.num_releases == 1
    assert [row["mean"] for row in rig.rows()][1:] == list(range(1, MAX_ROWS + 4))


def test_records_measured_in_the_hook_that_cannot_be_made_are_counted(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.put(keep=KEEP_STATS)
    block = FakeBlock(np.zeros(0, np.uint8))
    rig.num_observed += 3

    def fails() -> NoReturn:
        raise ValueError("no statistics")

    rig.writer.put(MeasuredTogether(3, fails, block))
    rig.start()
    assert rig.close().ledger["dropped"] == {"writer_error": 3}
    assert block.num_releases == 1 and len(rig.rows()) == 1


def test_small_records_that_are_all_refused_are_no_failure_of_the_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(tmp_path)
    seen: list[int] = []
    monkeypatch.setattr(rig.writer._intake, "_saw", lambda records, measured: seen.append(len(records)))
    monkeypatch.setattr(rig.writer._writer_directory, "refusal", lambda kind: "disk_full")
    block = _put_measured(rig, 5)
    rig.start()
    assert rig.close().ledger["dropped"] == {"disk_full": 5}
    assert block.num_releases == 1 and not seen


def test_records_measured_in_the_hook_are_counted_where_nothing_takes_them(tmp_path: Path) -> None:
    rig = Rig(tmp_path)  # its writer never starts
    block = _put_measured(rig, 5)
    assert rig.close(0.0).ledger["dropped"] == {"abandoned_at_close": 5}
    assert block.num_releases == 1


def test_more_small_records_than_a_batch_holds_are_all_written(tmp_path: Path) -> None:
    def first_values(records: Sequence[Staged]) -> list[Measured]:
        return [Measured(mean=float(one.block.data.view(np.float32)[0])) for one in records]

    rig = Rig(tmp_path, measure_small=first_values)
    for number in range(MAX_ROWS + 300):
        rig.put(np.full(2, number, np.float32), step=number // 3000, keep=KEEP_STATS)
    rig.start()
    assert rig.close().is_complete
    rig.assert_blocks_are_released()
    rows = rig.rows()
    assert [row["seq"] for row in rows] == list(range(MAX_ROWS + 300))
    assert all(row["mean"] == row["seq"] and row["step"] == row["seq"] // 3000 for row in rows)


def test_where_measuring_together_fails_each_record_is_measured_alone(tmp_path: Path) -> None:
    def fails(records: Sequence[Staged]) -> list[Measured]:
        raise ValueError(len(records))

    rows = _write_small_and_large(Rig(tmp_path / "fails", measure_small=fails))
    assert rows == _write_small_and_large(Rig(tmp_path / "alone"))


@pytest.mark.parametrize(("num_values", "nap_s"), [(8, 0.1), (5000, 0.002)])
def test_the_writer_naps_long_behind_small_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_values: int, nap_s: float
) -> None:
    naps: list[float] = []
    rig = Rig(tmp_path, measure_small=_measured_together)
    pause = rig.writer._nap

    def nap(seconds: float) -> None:
        if not rig.held_bytes():
            naps.append(seconds)
        pause(seconds)

    rig.put(np.zeros(num_values, np.float32), keep=KEEP_STATS)
    monkeypatch.setattr(rig.writer, "_nap", nap)
    rig.start()
    wait_until(lambda: bool(naps))
    rig.close()
    assert naps[0] == nap_s


@pytest.mark.parametrize("num_values", [8, 5000])
def test_only_a_large_record_ends_a_long_pause(tmp_path: Path, num_values: int) -> None:
    rig = Rig(tmp_path, measure_small=_measured_together)
    assert rig.writer._sleeps.locked()
    rig.put(np.zeros(num_values, np.float32), keep=KEEP_STATS)
    assert rig.writer._sleeps.locked() == (num_values == 8)
    rig.put(np.zeros(num_values, np.float32), keep=KEEP_STATS)
    rig.start()
    rig.close()


def test_a_thread_that_waits_for_room_ends_a_long_pause(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    assert rig.writer.hurried_progress_s() == rig.writer.last_progress_s and not rig.writer._sleeps.locked()
    rig.start()
    rig.close()


def test_the_codec_rests_while_training_uses_every_core(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="recorder")
    answer: list[float | None] = [None]
    looks: list[float | None] = []

    def look(self: CoreShare) -> float | None:
        looks.append(answer[0])
        return answer[0]

    monkeypatch.setattr(CoreShare, "look", look)
    monkeypatch.setattr("recorder.write.writer_directory._LOOK_S", 0.0)
    rig = Rig(tmp_path).start()
    values = np.linspace(1, 2, 20_000, dtype=np.float32)
    for answer[0] in (None, 0.5, 0.8, 0.95):
        wait_until(lambda: looks[-2:] == [answer[0]] * 2)
        rig.put(values, keep=KEEP_TENSOR)
        assert rig.drain()
    rig.close()
    encoded, *hurried, again = [row["encoding"] for row in rig.rows()]
    assert hurried == ["plain", "plain"] and encoded == again != "plain"
    assert len([one for one in caplog.records if "while training uses every core" in one.getMessage()]) == 1
    assert "every core" in rig.manifest()["codec"]
