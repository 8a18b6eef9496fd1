"""What the writer does when the disk refuses: rows are written, or counted with the reason."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recorder.records import KEEP_STATS, SMALL_BYTES
from recorder.write import file
from recorder.write.file import Disk
from tests.rigs.fakes import FaultyDisk
from tests.rigs.waiting import wait_until
from tests.rigs.writer import Rig

KILOBYTE = np.zeros(1000, np.uint8)


@pytest.fixture
def disk() -> FaultyDisk:
    return FaultyDisk()


def quick(run_dir: Path, disk: Disk, **settings: Any) -> Rig:
    """A writer that writes each record as soon as it is there."""
    return Rig(run_dir, disk=disk, batch_bytes=1, codec="none", **settings).start()


def test_a_full_disk_costs_only_what_came_while_it_was_full(
    tmp_path: Path, disk: FaultyDisk, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("recorder.write.ledger._LONGEST_PAUSE_S", 0.5)  # nobody waits here for half a minute
    rig = quick(tmp_path, disk)
    for _ in range(10):
        rig.put(KILOBYTE)
    assert rig.drain()
    disk.free_for_writes = 3000
    for _ in range(10):
        rig.put(KILOBYTE)
    rig.drain()
    assert rig.writer.stats().ledger["dropped"] == {"disk_full": 10}
    disk.recover()

    def lands() -> bool:
        before = rig.writer.stats().ledger["written"]
        rig.put(KILOBYTE)
        rig.drain()
        return bool(rig.writer.stats().ledger["written"] > before)

    wait_until(lands)
    report = rig.close()
    assert set(report.ledger["dropped"]) == {"disk_full"}
    rows = rig.rows()
    assert len(rows) == report.ledger["written"]
    assert [row["seq"] for row in rows[:10]] == list(range(10))
    assert len(caplog.records) == 1
    rig.assert_blocks_are_released()


def test_while_the_disk_is_left_alone_records_are_dropped_unmeasured(tmp_path: Path, disk: FaultyDisk) -> None:
    num_measured = 0

    def measure(*_: object) -> object:
        nonlocal num_measured
        num_measured += 1
        raise ValueError

    rig = quick(tmp_path, disk, measure=measure)
    disk.free_for_writes = 0
    for _ in range(50):
        rig.put(np.zeros(SMALL_BYTES + 1, np.uint8))
    rig.drain()
    assert num_measured == 1
    assert rig.close().ledger["dropped"] == {"disk_full": 50}


def test_a_failed_write_goes_to_another_shard_and_loses_nothing(tmp_path: Path, disk: FaultyDisk) -> None:
    rig = quick(tmp_path, disk)
    rig.put(KILOBYTE)
    rig.drain()
    disk.fail("write", errno.EIO)
    rig.put(KILOBYTE)
    rig.drain()
    report = rig.close()
    assert report.ledger["dropped"] == {}
    assert [row["seq"] for row in rig.rows()] == [0, 1]
    assert [path.name for path in rig.files("*tensors*")] == [
        *("_tensors-000000.arrow.open", "_tensors-000001.index", "tensors-000001.arrow")
    ]


def test_rows_that_no_shard_takes_are_dropped_with_the_errno(tmp_path: Path, disk: FaultyDisk) -> None:
    rig = quick(tmp_path, disk)
    rig.drain()
    disk.fail("write", errno.EIO, times=2)
    rig.put(KILOBYTE)
    report = rig.close()
    assert report.ledger["dropped"] == {"write_error:EIO": 1}
    assert rig.files("*.open") == []


def test_a_file_is_never_touched_again_after_a_failed_sync(tmp_path: Path, disk: FaultyDisk) -> None:
    rig = quick(tmp_path, disk)
    rig.put(KILOBYTE)
    disk.fail("sync", errno.EIO)
    assert not rig.drain()
    (abandoned,) = rig.files("_*.open")
    content = abandoned.read_bytes()
    rig.put(KILOBYTE)
    assert rig.drain()
    assert rig.close().ledger["written"] == 2
    assert abandoned.read_bytes() == content
    assert [row["seq"] for row in rig.rows()] == [0, 1]
    assert [path.name for path in rig.files("*.arrow")] == ["tensors-000001.arrow"]


@pytest.mark.parametrize("method", ["sync", "truncate", "close"])
def test_a_shard_that_cannot_be_sealed_stays_open_and_readable(tmp_path: Path, disk: FaultyDisk, method: str) -> None:
    rig = quick(tmp_path, disk)
    rig.put(KILOBYTE)
    assert rig.drain()
    disk.fail(method, errno.EIO)
    report = rig.close()
    assert not report.is_complete
    assert report.ledger["written"] == 1
    assert rig.files("*.arrow") == []
    assert [row["seq"] for row in rig.rows()] == [0]


def test_a_shard_whose_new_name_is_refused_stays_open_and_readable(tmp_path: Path, disk: FaultyDisk) -> None:
    rig = quick(tmp_path, disk)
    rig.put(KILOBYTE)
    assert rig.drain()
    for method in ("link", "rename", "replace"):
        disk.fail(method, errno.EIO)
    assert not rig.close().is_complete
    assert rig.files("*.arrow") == []
    assert [row["seq"] for row in rig.rows()] == [0]


@pytest.mark.parametrize("refused", [["link"], ["link", "rename"]])
def test_without_links_a_shard_gets_its_name_by_a_rename(tmp_path: Path, disk: FaultyDisk, refused: list[str]) -> None:
    rig = quick(tmp_path, disk)
    rig.put(KILOBYTE)
    assert rig.drain()
    for method in refused:
        disk.fail(method, errno.EPERM)
    assert rig.close().is_complete
    assert [path.name for path in rig.files("*tensors*arrow*")] == ["tensors-000000.arrow"]
    assert [row["seq"] for row in rig.rows()] == [0]


@pytest.mark.parametrize("code", [errno.EIO, errno.EPERM])
def test_without_links_a_name_that_is_taken_is_never_overwritten(tmp_path: Path, disk: FaultyDisk, code: int) -> None:
    rig = quick(tmp_path, disk)
    rig.put(KILOBYTE)
    assert rig.drain()
    taken = rig.directory / "tensors-000000.arrow"
    taken.write_bytes(b"somebody else's")
    disk.fail("link", code)
    assert not rig.close().is_complete
    assert taken.read_bytes() == b"somebody else's"


@pytest.mark.parametrize("refused", ["sync", "sync_directory"])
def test_a_disk_that_never_syncs_loses_no_row_and_says_which_are_at_risk(
    tmp_path: Path, disk: FaultyDisk, refused: str, caplog: pytest.LogCaptureFixture
) -> None:
    disk.spares_manifests = False
    disk.fail(refused, errno.EIO, times=1000)
    rig = quick(tmp_path, disk)
    for _ in range(5):
        rig.put(KILOBYTE)
    assert not rig.drain()
    report = rig.close()
    assert (report.ledger["written"], report.ledger["dropped"]) == (5, {})
    assert report.ledger["suspect"] == 5
    assert [row["seq"] for row in rig.rows()] == list(range(5))
    assert rig.manifest()["ledger"] == report.ledger
    assert 1 <= len([one for one in caplog.records if "cannot be synced" in one.message]) <= 2


def test_a_sync_that_hangs_holds_up_no_row_and_is_not_repeated(
    tmp_path: Path, disk: FaultyDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file, "_LONGEST_SYNC_S", 0.1)
    rig = quick(tmp_path, disk)
    rig.put(KILOBYTE)
    wait_until(lambda: rig.writer.stats().ledger["written"])
    disk.stalled.add("sync")
    assert not rig.drain()
    num_syncs = disk.calls["sync"]
    for _ in range(5):
        rig.put(KILOBYTE)
    assert not rig.drain()
    assert rig.writer.stats().ledger["written"] == 6
    assert disk.calls["sync"] == num_syncs, "while one hangs, another would only hang behind it"
    disk.recover()
    wait_until(rig.drain)
    report = rig.close()
    assert report.ledger["suspect"] == 1, "of the first nobody knows; the others were synced later"
    assert [row["seq"] for row in rig.rows()] == list(range(6))


def test_a_writer_whose_syncs_hang_has_closed_within_its_deadline(tmp_path: Path, disk: FaultyDisk) -> None:
    disk.spares_manifests = False
    rig = quick(tmp_path, disk)
    rig.put(KILOBYTE)
    assert rig.drain()
    disk.stalled.add("sync")
    rig.put(KILOBYTE)
    wait_until(lambda: rig.writer.stats().ledger["written"] == 2)
    report = rig.writer.close(12.0)  # a busy machine has a share of it left for the last manifest
    manifest = rig.manifest()
    disk.recover()
    assert manifest["state"] == "closed"
    assert manifest["ledger"] == report.ledger
    assert (report.ledger["written"], report.ledger["dropped"]) == (2, {})


def test_a_failing_index_or_directory_sync_leaves_the_shard_sealed(
    tmp_path: Path, disk: FaultyDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = quick(tmp_path, disk)
    rig.put(KILOBYTE)
    assert rig.drain()
    sealed, still_open = rig.directory / "tensors-000000.arrow", rig.directory / "_tensors-000000.arrow.open"
    sync_directory = disk.sync_directory

    def refuse_both_names(path: Path) -> None:
        if sealed.exists() and still_open.exists():  # not the manifest's sync, whenever that is due
            monkeypatch.undo()
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        sync_directory(path)

    monkeypatch.setattr(disk, "sync_directory", refuse_both_names)
    disk.fail("create", errno.EMFILE)
    assert rig.close().is_complete
    assert sorted(rig.files("*tensors*")) == [still_open, sealed]
    assert sealed.samefile(still_open), "the old name goes only once the new one is durable"


def test_a_final_name_that_is_taken_is_never_overwritten(tmp_path: Path, disk: FaultyDisk) -> None:
    rig = quick(tmp_path, disk)
    rig.put(KILOBYTE)
    assert rig.drain()
    (rig.directory / "tensors-000000.arrow").write_bytes(b"somebody else's")
    assert not rig.close().is_complete
    assert (rig.directory / "tensors-000000.arrow").read_bytes() == b"somebody else's"
    assert len(rig.files("_tensors-000000.arrow.open")) == 1


@pytest.mark.parametrize("direct_io", ["auto", "off"])
def test_short_writes_are_continued(tmp_path: Path, disk: FaultyDisk, direct_io: str) -> None:
    rig = quick(tmp_path, disk, direct_io=direct_io)
    disk.max_write_bytes = 5000
    values = np.random.default_rng(0).integers(0, 256, 50_000, dtype=np.uint8)
    rig.put(values)
    assert rig.close().ledger["written"] == 1
    assert rig.rows()[0]["data"] == values.tobytes()


def test_a_disk_that_refuses_direct_writes_gets_buffered_ones(tmp_path: Path, disk: FaultyDisk) -> None:
    rig = quick(tmp_path, disk)
    rig.put(KILOBYTE)
    rig.drain()
    disk.fail("write", errno.EINVAL)
    rig.put(KILOBYTE)
    rig.drain()
    rig.put(KILOBYTE)
    report = rig.close()
    assert report.ledger["written"] == 3
    assert [row["seq"] for row in rig.rows()] == [0, 1, 2]
    assert [path.name for path in rig.files("*.arrow")] == ["tensors-000000.arrow"]


def test_too_few_descriptors_cost_rows_only_while_they_are_missing(tmp_path: Path, disk: FaultyDisk) -> None:
    rig = quick(tmp_path, disk)
    rig.drain()
    disk.fail("create", errno.EMFILE, times=2)
    rig.put(KILOBYTE)
    rig.drain()
    rig.put(KILOBYTE, keep=KEEP_STATS)
    report = rig.close()
    assert report.ledger["dropped"] == {"write_error:EMFILE": 1}
    assert [row["seq"] for row in rig.rows()] == [1]


def test_below_the_floor_nothing_is_written_and_it_is_said_before_the_first_record(
    tmp_path: Path, disk: FaultyDisk, caplog: pytest.LogCaptureFixture
) -> None:
    disk.free_for_others = 1 << 20
    rig = quick(tmp_path, disk, min_free_bytes=2 << 20)
    wait_until(lambda: caplog.records)
    assert "min_free_bytes" in caplog.text
    for _ in range(5):
        rig.put(KILOBYTE)
    rig.drain()
    assert rig.writer.stats().ledger["dropped"] == {"disk_floor": 5}
    assert rig.files("*tensors*") == []
    disk.free_for_others = 1 << 30

    def lands() -> bool:
        rig.put(KILOBYTE)
        rig.drain()
        return bool(rig.writer.stats().ledger["written"])

    wait_until(lands)
    assert set(rig.close().ledger["dropped"]) == {"disk_floor"}
    assert len(caplog.records) == 1


def test_an_unusable_directory_is_said_at_once_and_used_as_soon_as_it_can_be(
    tmp_path: Path, disk: FaultyDisk, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "recordings").write_text("a file where a directory should be")
    rig = quick(tmp_path / "recordings" / "run", disk)
    wait_until(lambda: caplog.records)
    assert caplog.records[0].levelno == logging.ERROR
    assert "recordings" in caplog.text
    rig.put(KILOBYTE)
    rig.drain()
    assert rig.writer.stats().ledger["dropped"] == {"write_error:ENOTDIR": 1}
    (tmp_path / "recordings").unlink()

    def lands() -> bool:
        rig.put(KILOBYTE)
        rig.drain()
        return bool(rig.writer.stats().ledger["written"])

    wait_until(lands)
    report = rig.close()
    assert set(report.ledger["dropped"]) == {"write_error:ENOTDIR"}
    assert len(rig.rows()) == report.ledger["written"]


def test_a_removed_directory_is_noticed_and_the_rows_are_counted(tmp_path: Path, disk: FaultyDisk) -> None:
    rig = quick(tmp_path / "run", disk)
    rig.put(KILOBYTE)
    assert rig.drain()
    (tmp_path / "run").rename(tmp_path / "aside")  # at once: the writer may publish a file while a tree is removed
    shutil.rmtree(tmp_path / "aside", ignore_errors=True)
    rig.put(KILOBYTE)
    rig.drain()
    report = rig.close()
    assert report.ledger["dropped"] == {"write_error:ENOENT": 1}
    assert not report.is_complete
    assert not (tmp_path / "run").exists()


def test_trouble_with_one_kind_of_shard_does_not_stop_the_other(tmp_path: Path, disk: FaultyDisk) -> None:
    rig = quick(tmp_path, disk, flush_interval_s=60.0)
    rig.drain()
    disk.fail("write", errno.EIO, times=2)
    rig.put(KILOBYTE)
    wait_until(lambda: rig.writer.stats().ledger["dropped"])
    rig.put(KILOBYTE, keep=KEEP_STATS)
    report = rig.close()
    assert report.ledger["dropped"] == {"write_error:EIO": 1}
    assert report.ledger["written"] == 1


class FullDevice(Disk):
    """Every file is /dev/full."""

    def create(self, path: Path) -> int:
        descriptor = super().create(path)
        if ".json" in path.name:
            return descriptor
        super().close(descriptor)
        return os.open("/dev/full", os.O_WRONLY)


def test_a_device_that_is_full_from_the_start_leaves_no_file_behind(tmp_path: Path) -> None:
    rig = quick(tmp_path, FullDevice())
    rig.put(KILOBYTE)
    rig.drain()
    assert rig.close().ledger["dropped"] == {"disk_full": 1}
    assert rig.files("*tensors*") == []


_FILL = """
import json, sys
from pathlib import Path
import numpy as np
from tests.rigs.writer import Rig
rig = Rig(Path(sys.argv[1]) / "run", batch_bytes=1, codec="none").start()
values = np.random.default_rng(0).integers(0, 256, 50_000, dtype=np.uint8)
for _ in range(60):
    rig.put(values)
report = rig.close()
assert [row["data"] for row in rig.rows()] == [values.tobytes()] * report.ledger["written"]
print(json.dumps(report.ledger))
"""


def fill(run_dir: Path, prelude: str, wrapper: Sequence[str] = ()) -> dict[str, Any]:
    """The ledger of a process of its own that writes 3 MB and reads back what it has written."""
    done = subprocess.run(
        [*wrapper, sys.executable, "-c", prelude + _FILL, str(run_dir)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    ledger: dict[str, Any] = json.loads(done.stdout)
    return ledger


def test_a_real_file_system_that_fills_up_keeps_every_row_that_was_counted_as_written(tmp_path: Path) -> None:
    if subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode != 0:
        pytest.skip("this machine gives no mount namespace")
    mount = f"import subprocess; subprocess.run('mount -t tmpfs -o size=1m none {tmp_path}'.split(), check=True)\n"
    ledger = fill(tmp_path, mount, ["unshare", "-rm"])
    assert ledger["written"] >= 10
    assert ledger["dropped"] == {"disk_full": 60 - ledger["written"]}


def test_a_real_limit_on_file_size_begins_another_shard(tmp_path: Path) -> None:
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (333_333, 333_333))\n"
    ledger = fill(tmp_path, limit)
    assert ledger["written"] == 60
    assert len(list(tmp_path.rglob("*tensors*.open"))) >= 9
