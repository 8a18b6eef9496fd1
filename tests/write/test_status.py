"""What a writer shows of itself while it runs, and that showing it never costs anything."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recorder.format.rundir import STATUS, STATUS_BYTES, encode_status, read_json
from recorder.write.file import Disk
from recorder.write.manifest import StatusFile
from tests.rigs.fakes import FaultyDisk
from tests.rigs.waiting import wait_until
from tests.rigs.writer import Rig

FACTS: dict[str, Any] = {"step": 7, "rank": 0, "interval_s": 0.1}


def status(rig: Rig) -> dict[str, Any]:
    return read_json(rig.directory / STATUS, STATUS_BYTES)


def shown(tmp_path: Path, disk: FaultyDisk, **settings: Any) -> Rig:
    """A writer that shows itself at every look around."""
    rig = Rig(tmp_path / "run", disk=disk, poll=lambda: rig.writer.set_status(FACTS), **settings)
    return rig.start()


def test_a_writer_shows_its_accounts_and_at_the_end_that_it_is_closed(tmp_path: Path) -> None:
    rig = shown(tmp_path, FaultyDisk(), max_bytes=1 << 30)
    for _ in range(3):
        rig.put()
    rig.writer.count_drop("pool_full", 2)
    rig.num_observed += 2
    assert rig.drain()
    wait_until(lambda: rig.writer.directory and (rig.directory / STATUS).exists())
    wait_until(lambda: (rig.directory / STATUS).stat().st_size and status(rig)["written"] == 3)
    now = status(rig)
    assert (now["state"], now["step"], now["observed"], now["dropped"]) == ("recording", 7, 5, {"pool_full": 2})
    assert now["max_bytes"] == 1 << 30 and now["free_bytes"] > 0 and now["queue_length"] == 0
    assert now["written_bytes"] == now["used_bytes"] > 0
    rig.writer.set_status({**FACTS, "step": 8})
    rig.close()
    assert (status(rig)["state"], status(rig)["step"]) == ("closed", 8)
    assert (rig.directory / STATUS).stat().st_size == STATUS_BYTES


def test_a_status_is_rewritten_in_place_by_single_writes_that_are_never_synced(tmp_path: Path) -> None:
    calls = []

    class Noting(Disk):
        def create(self, path: Path) -> int:
            calls.append("create")
            return super().create(path)

        def write(self, descriptor: int, data: memoryview, offset: int, *behind: memoryview) -> int:
            calls.append(f"write {len(data)} at {offset}")
            return super().write(descriptor, data, offset, *behind)

        def sync(self, descriptor: int) -> None:
            raise AssertionError("nothing waits for a status")

        def sync_directory(self, path: Path) -> None:
            raise AssertionError("nothing waits for a status")

    file = StatusFile(Noting(), lambda: 0.0)
    file.write(tmp_path, {**FACTS, "dropped": {"pool_full": 10**12}}, written_bytes=10**12)
    inode = (tmp_path / STATUS).stat().st_ino
    file.write(tmp_path, {**FACTS, "dropped": {}}, written_bytes=0)
    file.close()
    assert calls == ["create", "write 4096 at 0", "write 4096 at 0"]
    assert (tmp_path / STATUS).stat().st_ino == inode
    assert os.listdir(tmp_path) == [STATUS]
    assert read_json(tmp_path / STATUS, STATUS_BYTES)["written_bytes"] == 0


@pytest.mark.parametrize("method", ["create", "write", "free_bytes"])
def test_a_disk_that_refuses_the_status_loses_no_row_and_says_nothing(
    tmp_path: Path, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Refusing(FaultyDisk):
        """Refuses what is done for the status alone."""

        descriptor: int | None = None

        def create(self, path: Path) -> int:
            if path.name == STATUS and method == "create":
                raise OSError(errno.EMFILE, "too many files")
            descriptor = super().create(path)
            if path.name == STATUS:
                self.descriptor = descriptor
            return descriptor

        def write(self, descriptor: int, data: memoryview, offset: int, *behind: memoryview) -> int:
            if descriptor == self.descriptor and method == "write":
                raise OSError(errno.EIO, "sick")
            return super().write(descriptor, data, offset, *behind)

        def free_bytes(self, path: Path) -> int:
            if method == "free_bytes":
                raise OSError(errno.ESTALE, "stale")
            return super().free_bytes(path)

    rig = shown(tmp_path, Refusing())
    for _ in range(3):
        rig.put()
    report = rig.close()
    assert report.is_complete and report.ledger["written"] == 3
    assert caplog.records == []


def test_rates_are_over_the_last_ten_seconds(tmp_path: Path) -> None:
    now_s = 0.0
    file = StatusFile(FaultyDisk(), lambda: now_s)
    for tick in range(20):
        now_s = 2.0 * tick
        file.write(tmp_path, {"step": 3 * tick if tick < 10 else 100 * tick}, written_bytes=1000 * tick)
    recent = read_json(tmp_path / STATUS, STATUS_BYTES)["recent"]
    assert recent == {"seconds": 10.0, "steps": 500, "bytes": 5000}


def test_a_writer_that_gave_up_shows_it(tmp_path: Path) -> None:
    rig = shown(tmp_path, FaultyDisk())
    rig.put()
    wait_until(lambda: rig.writer.directory and (rig.directory / STATUS).exists())
    wait_until(lambda: (rig.directory / STATUS).stat().st_size)  # it is made first, and then written

    def fail() -> None:
        raise SystemError("a bug of ours")

    rig.writer._poll = fail
    wait_until(lambda: status(rig)["state"] == "failed")
    rig.close()
    assert status(rig)["state"] == "failed"


@given(
    host=st.text(max_size=400),
    dropped=st.dictionaries(st.text(max_size=400), st.integers(0, 1 << 62), max_size=60),
)
def test_a_status_has_one_size_and_counts_every_drop_whatever_the_names(host: str, dropped: dict[str, int]) -> None:
    text = encode_status({**FACTS, "host": host, "dropped": dropped})
    assert len(text) == STATUS_BYTES
    assert sum(json.loads(text)["dropped"].values()) == sum(dropped.values())
