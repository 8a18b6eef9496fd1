"""Bytes on disk stay within the quota: which shards go, which never do, and what the ledger says of it."""

from __future__ import annotations

import errno
from pathlib import Path

import numpy as np
import pytest

from recorder.records import KEEP_STATS
from recorder.sites import PROBE
from recorder.write import ledger as accounts
from recorder.write.quota import HeldShard, Quota
from recorder.write.shard import StoredShard
from tests.rigs.fakes import FaultyDisk
from tests.rigs.writer import Rig

MEGABYTE = 1 << 20
VALUES = np.random.default_rng(0).integers(0, 256, 100_000, dtype=np.uint8)


def used_bytes(rig: Rig, kind: str) -> int:
    return sum(path.stat().st_size for path in rig.files(f"*{kind}-*"))


def test_the_oldest_shards_but_the_first_are_retired_and_the_newest_never(tmp_path: Path) -> None:
    rig = Rig(tmp_path, max_bytes=4 * MEGABYTE, codec="none", batch_bytes=1).start()
    for _ in range(100):
        rig.put(VALUES)
        rig.drain()
        assert used_bytes(rig, "tensors") <= 3 * MEGABYTE
    report = rig.close()
    assert report.ledger["dropped"] == {}
    assert report.ledger["written"] == 100
    names = [path.name for path in rig.files("*.arrow")]
    numbers = [int(name[8:14]) for name in names]
    assert len(numbers) >= 4
    assert numbers[0] == 0
    assert numbers[1:] == list(range(numbers[1], numbers[-1] + 1))
    seqs = [row["seq"] for row in rig.rows()]
    assert seqs[:2] == [0, 1]
    assert seqs[-1] == 99
    retired = report.ledger["retired"]
    assert len(seqs) == 100 - retired["rows"]
    assert retired["bytes"] > retired["rows"] * len(VALUES)
    assert len(rig.files("_*.index")) == len(names)


def test_a_shard_that_kept_its_open_name_goes_with_both(tmp_path: Path) -> None:
    """As where no descriptor was left to sync the directory with, once the shard had its final name."""
    disk = FaultyDisk()
    rig = Rig(tmp_path, disk=disk, max_bytes=4 * MEGABYTE, codec="none", batch_bytes=1).start()
    for number in range(60):
        if number == 20:
            disk.fail("sync_directory", errno.EMFILE, times=40)
        rig.put(VALUES)
        rig.drain()
        if number == 30:
            disk.recover()
            assert rig.files("_*.arrow.open")
    report = rig.close()
    assert report.ledger["retired"]["rows"] > 20
    assert rig.files("_*.arrow.open") == []
    assert len(rig.rows()) == report.ledger["written"] - report.ledger["retired"]["rows"]


def test_what_is_retired_is_on_disk_before_the_shard_goes(tmp_path: Path) -> None:
    class Watching(FaultyDisk):
        def unlink(self, path: Path) -> None:
            if path.suffix == ".arrow":
                recorded.append(rig.manifest()["ledger"]["retired"]["rows"])
            super().unlink(path)

    recorded: list[int] = []
    rig = Rig(tmp_path, disk=Watching(), max_bytes=4 * MEGABYTE, codec="none", batch_bytes=1).start()
    for _ in range(60):
        rig.put(VALUES)
    report = rig.close()
    assert recorded
    assert recorded == sorted(set(recorded))
    assert recorded[0] > 0
    assert recorded[-1] == report.ledger["retired"]["rows"]


def test_stop_drops_new_rows_and_keeps_the_old(tmp_path: Path) -> None:
    rig = Rig(tmp_path, max_bytes=4 * MEGABYTE, codec="none", batch_bytes=1, on_quota="stop").start()
    for _ in range(60):
        rig.put(VALUES)
    report = rig.close()
    written = report.ledger["written"]
    assert 20 < written < 60
    assert report.ledger["dropped"] == {"quota": 60 - written}
    assert [row["seq"] for row in rig.rows()] == list(range(written))
    assert used_bytes(rig, "tensors") <= 3 * MEGABYTE


def test_statistics_keep_their_quarter_when_tensors_have_used_up_theirs(tmp_path: Path) -> None:
    rig = Rig(tmp_path, max_bytes=4 * MEGABYTE, codec="none", batch_bytes=1, on_quota="stop").start()
    for _ in range(40):
        rig.put(VALUES)
    rig.drain()
    assert rig.writer.stats().ledger["dropped"]["quota"] > 0
    before = rig.writer.stats().ledger["written"]
    for _ in range(100):
        rig.put(VALUES, keep=KEEP_STATS)
    assert rig.close().ledger["written"] == before + 100


def test_statistics_are_retired_within_their_own_part(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(tmp_path, max_bytes=MEGABYTE).start()
    rig.put(VALUES)
    for _ in range(60):
        rig.put(VALUES, keep=KEEP_STATS)
        rig.drain()
        assert used_bytes(rig, "stats") <= MEGABYTE // 4
    report = rig.close()
    assert report.ledger["dropped"] == {}
    seqs = [row["seq"] for row in rig.rows()]
    assert len(seqs) == 61 - report.ledger["retired"]["rows"] < 61
    assert seqs[:2] == [0, 1]
    assert seqs[-1] == 60
    assert caplog.text == ""


def test_a_batch_above_the_whole_quota_is_dropped_and_nothing_is_retired_for_it(tmp_path: Path) -> None:
    rig = Rig(tmp_path, max_bytes=2 * MEGABYTE, codec="none", batch_bytes=1).start()
    for _ in range(10):
        rig.put(VALUES)
    rig.drain()
    rig.put(np.zeros(2 * MEGABYTE, np.uint8))
    rig.drain()
    before = rig.writer.stats().ledger
    assert before["dropped"] == {"quota": 1}
    assert rig.close().ledger["retired"]["rows"] == before["retired"]["rows"] == 0


def test_an_abandoned_open_shard_is_retired_in_its_turn(tmp_path: Path) -> None:
    disk = FaultyDisk()
    rig = Rig(tmp_path, disk=disk, max_bytes=4 * MEGABYTE, codec="none", batch_bytes=1).start()
    for number in range(60):
        if number == 6:
            disk.fail("write", errno.EIO)
        rig.put(VALUES)
        rig.drain()
        assert used_bytes(rig, "tensors") <= 3 * MEGABYTE
    report = rig.close()
    assert report.ledger["dropped"] == {}
    assert rig.files("_*.open") == []
    assert len(rig.rows()) == 60 - report.ledger["retired"]["rows"]


def test_the_quota_knows_what_is_on_the_disk_whatever_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accounts, "_FIRST_PAUSE_S", 0.0)
    disk = FaultyDisk()
    rig = Rig(tmp_path, disk=disk, max_bytes=8 * MEGABYTE, shard_bytes=150_000, codec="none", batch_bytes=1).start()
    for number in range(40):
        if number % 7 == 0:
            disk.free_for_writes = 5000  # enough for the beginning of a shard, not for a batch
        if number % 5 == 0:
            disk.fail("write", errno.EIO, times=1 + number % 3)
        if number % 10 == 0:
            disk.fail("link", errno.EIO)
        rig.put(VALUES)
        rig.drain()
        disk.free_for_writes = None
    disk.recover()
    assert rig.close().ledger["retired"]["rows"] == 0
    assert rig.files("_*.open")
    assert len(rig.files("*.arrow")) > 2
    shards = rig.writer._writer_directory.shards_by_kind["tensors"]
    assert shards.quota.used_bytes("tensors") == used_bytes(rig, "tensors")


def test_a_shard_that_cannot_be_deleted_does_not_stop_the_writer(tmp_path: Path) -> None:
    disk = FaultyDisk()
    rig = Rig(tmp_path, disk=disk, max_bytes=4 * MEGABYTE, codec="none", batch_bytes=1).start()
    rig.drain()
    disk.fail("unlink", errno.EACCES)
    for _ in range(60):
        rig.put(VALUES)
    report = rig.close()
    assert report.ledger["dropped"] == {}
    assert report.ledger["written"] == 60


@pytest.mark.parametrize("num_shards", range(6))
def test_only_what_lies_between_the_first_and_the_newest_can_go(num_shards: int) -> None:
    quota = Quota(1000)
    for number in range(num_shards):
        quota.add("tensors", 100)
        quota.keep("tensors", HeldShard(StoredShard(Path(str(number)), 1, 100), number, False))
    removable = max(0, num_shards - 2)
    room = 750 - 100 * num_shards
    assert quota.fits("tensors", room)
    assert not quota.fits("tensors", room + 1)
    assert quota.could_fit("tensors", room + 100 * removable)
    assert not quota.could_fit("tensors", room + 100 * removable + 1)
    assert quota.could_fit("stats", 250 - 13) and quota.could_fit("probe", 13)
    for number in range(1, 1 + removable):
        oldest = quota.most_dispensable("tensors")
        assert oldest is not None and oldest.last_step == number
        quota.remove("tensors", oldest)
    assert quota.most_dispensable("tensors") is None
    assert quota.used_bytes("tensors") == 100 * (num_shards - removable)


def test_half_of_the_probe_is_of_the_newest_steps_and_the_rest_lies_evenly(tmp_path: Path) -> None:
    rig = Rig(tmp_path, max_bytes=24 * MEGABYTE, codec="none", batch_bytes=1).start()
    for step in range(600):
        rig.put(VALUES[:4096], site=PROBE, name="param weight", step=64 * step)
        rig.drain()
        assert used_bytes(rig, "probe") <= 24 * MEGABYTE // 72
    report = rig.close()
    assert report.ledger["dropped"] == {}
    assert report.ledger["retired"]["rows"] == 600 - len(rig.rows())
    kept = [row["step"] // 64 for row in rig.rows()]
    older = [step for step in kept if step < 599 - len(kept) // 2 + 2]
    gaps = np.diff(older)
    assert kept[0] == 0 and kept[-1] == 599 and set(np.diff(kept[len(older) :])) == {1}
    assert len(older) > len(kept) // 3 and gaps.max() <= 4 * gaps.mean()


def test_tokens_have_more_room_than_numbers(tmp_path: Path) -> None:
    assert not Quota(7200).fits(PROBE, 101)
    assert Quota(7200, keeps_tokens=True).fits(PROBE, 225)
