"""Storage that behaves like NFS, and other oddities that no limit or mount can bring about: by the one seam."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import recorder
from recorder.analyze.doctor import reply
from recorder.upkeep.verify import verify
from recorder.write import ledger as accounts
from recorder.write.file import Disk
from tests.rigs.fakes import FaultyDisk
from tests.rigs.writer import Rig

VALUES = np.arange(1000, dtype=np.float32)
RUN: dict[str, Any] = {"run_id": "nfs", "world_size": 1, "created_ns": 1}


class Retransmitting(FaultyDisk):
    """A network that loses answers: the first calls of some methods succeed and are then repeated."""

    def __init__(self, *methods: str, times: int) -> None:
        super().__init__()
        self._left = dict.fromkeys(methods, times)

    def _repeat(self, method: str, code: int, path: Path) -> None:
        if self._left.get(method, 0) > 0:
            self._left[method] -= 1
            raise OSError(code, os.strerror(code), str(path))

    def make_directory(self, path: Path) -> None:
        super().make_directory(path)
        self._repeat("make_directory", errno.EEXIST, path)

    def create(self, path: Path) -> int:
        descriptor = super().create(path)
        try:
            if path.suffix == ".open":
                self._repeat("create", errno.EEXIST, path)
        except OSError:
            os.close(descriptor)
            raise
        return descriptor

    def link(self, path: Path, final: Path) -> None:
        super().link(path, final)
        self._repeat("link", errno.EEXIST, final)

    def replace(self, path: Path, final: Path) -> None:
        super().replace(path, final)
        self._repeat("replace", errno.ENOENT, path)

    def unlink(self, path: Path) -> None:
        super().unlink(path)
        self._repeat("unlink", errno.ENOENT, path)


def begin(folder: Path, disk: Disk, **settings: Any) -> Rig:
    rig = Rig(folder, disk=disk, **{"batch_bytes": 1, "codec": "none", **settings})
    identity = {"rank": 0, "attempt": 0, "started_ns": 1, "pid": os.getpid(), "host": os.uname().nodename}
    rig.writer.set_manifest({**RUN, **identity, "step_source": "user", "roots": []})
    return rig.start()


def put(rig: Rig, steps: range) -> None:
    for step in steps:
        rig.put(VALUES, step=step)
        rig.drain()


def assert_whole(folder: Path, rig: Rig, num_rows: int) -> None:
    assert rig.close().ledger["dropped"] == {}
    run = recorder.open_run(folder)
    assert run.num_rows == num_rows
    assert [finding.text for finding in verify(run) if finding.is_fault] == []
    assert [writer.state for writer in run.writers] == ["closed"]


@pytest.mark.parametrize("method", ["make_directory", "create", "link", "replace", "unlink"])
def test_a_request_that_is_repeated_after_it_has_succeeded_costs_no_row(tmp_path: Path, method: str) -> None:
    rig = begin(tmp_path / "run", Retransmitting(method, times=1), shard_bytes=10_000, keep_newest=1000)
    put(rig, range(12))
    assert_whole(tmp_path / "run", rig, 12)


def test_a_final_name_that_is_not_visible_yet_leaves_the_row_under_the_open_one(tmp_path: Path) -> None:
    class Late(Retransmitting):
        def is_same(self, path: Path, final: Path) -> bool:
            raise FileNotFoundError(errno.ENOENT, "the attributes are from before", str(final))

    rig = begin(tmp_path / "run", Late("link", times=1))
    put(rig, range(3))
    rig.close()
    run = recorder.open_run(tmp_path / "run")
    assert sorted(run.to_pandas().step) == [0, 1, 2], "under both names it counts once"


@pytest.mark.parametrize("method", ["is_linked", "write", "sync", "free_bytes"])
def test_a_stale_handle_begins_another_file(tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accounts, "_FIRST_PAUSE_S", 0.0)
    disk = FaultyDisk()
    rig = begin(tmp_path / "run", disk, min_free_bytes=1)
    put(rig, range(3))
    stale = OSError(errno.ESTALE, os.strerror(errno.ESTALE))
    plain: Callable[..., Any] = getattr(Disk, method)
    errors = [stale]

    def once(self: Disk, *args: Any) -> Any:
        if errors:
            raise errors.pop()
        return plain(self, *args)

    monkeypatch.setattr(FaultyDisk, method, once)
    put(rig, range(3, 8))
    report = rig.close()
    lost = report.ledger["dropped"].get("write_error:ESTALE", 0)
    assert lost == (1 if method == "free_bytes" else 0)
    assert len(rig.rows()) == report.ledger["written"] == 8 - lost


def test_a_sync_without_a_descriptor_for_it_is_done_later_and_nothing_is_suspect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accounts, "_FIRST_PAUSE_S", 0.0)
    disk = FaultyDisk()
    rig = begin(tmp_path / "run", disk)
    rig.drain()
    disk.fail("sync_directory", errno.EMFILE, times=10_000)  # the manifest's, too, whenever it is due
    rig.put(VALUES)
    assert not rig.drain()
    disk.recover()
    assert rig.drain()
    assert "suspect" not in rig.writer.stats().ledger
    assert_whole(tmp_path / "run", rig, 1)


def test_a_disk_that_fails_every_sync_gets_fewer_of_them_and_fewer_files(tmp_path: Path) -> None:
    disk = FaultyDisk()
    rig = begin(tmp_path / "run", disk, sync_interval_s=0.01)
    rig.drain()
    disk.fail("sync", errno.EIO, times=10_000)
    until_s = time.monotonic() + 1.2
    while time.monotonic() < until_s:
        rig.put(VALUES)
        time.sleep(0.01)
    assert len(rig.files("_tensors-*.open")) <= 4, "the first, and one after half a second"
    report = rig.close()
    assert report.ledger["suspect"] == report.ledger["written"] == len(rig.rows())
    assert not report.is_complete


def test_rows_synced_before_the_sync_that_failed_are_not_suspect(tmp_path: Path) -> None:
    disk = FaultyDisk()
    rig = begin(tmp_path / "run", disk)
    put(rig, range(5))
    disk.fail("sync", errno.EIO)
    put(rig, range(5, 7))
    put(rig, range(7, 9))
    report = rig.close()
    assert report.ledger["suspect"] == 1, "the row of that very sync"
    assert report.ledger["written"] == 9
    run = recorder.open_run(tmp_path / "run")
    assert run.writers[0].balance.suspect == 1
    (check,) = [check for check in reply._accounts(run) if "a sync failed" in check.text]
    assert check.state == "missing" and "1 row written" in check.text


def test_a_writer_that_began_anew_is_told_of_by_doctor(tmp_path: Path) -> None:
    class Lost:
        def wait(self, timeout_s: float) -> bool:
            raise RuntimeError("the copy failed")

    rig = begin(tmp_path / "run", FaultyDisk())
    put(rig, range(3))
    for _ in range(3):
        rig.put(VALUES, ready=Lost())
    put(rig, range(3, 5))
    assert rig.close().ledger["dropped"] == {"writer_error": 3}
    run = recorder.open_run(tmp_path / "run")
    assert run.num_rows == 5
    assert [finding.text for finding in verify(run) if finding.is_fault] == []
    assert any(
        "the writer failed once and restarted: RuntimeError: the copy failed" in check.text
        for check in reply._accounts(run)
    )


def test_a_shard_that_a_failed_write_ends_is_synced_before_it_is_left(tmp_path: Path) -> None:
    disk = FaultyDisk()
    rig = begin(tmp_path / "run", disk, sync_interval_s=3600.0)
    rig.put(VALUES)
    while rig.writer.stats().ledger["written"] < 1:
        time.sleep(0.01)
    before = disk.calls["sync"]
    disk.fail("write", errno.EIO)
    rig.put(VALUES)
    while rig.writer.stats().ledger["written"] < 2:
        time.sleep(0.01)
    assert disk.calls["sync"] == before + 1
    assert "suspect" not in rig.close().ledger


def test_a_writer_that_runs_out_of_memory_drops_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accounts, "_FIRST_PAUSE_S", 0.05)
    monkeypatch.setattr(accounts, "_LONGEST_PAUSE_S", 0.05)
    is_short = threading.Event()

    class Hungry(FaultyDisk):
        def write(self, descriptor: int, data: memoryview, offset: int, *behind: memoryview) -> int:
            if is_short.is_set():
                raise MemoryError
            return super().write(descriptor, data, offset, *behind)

    rig = begin(tmp_path / "run", Hungry())
    put(rig, range(3))
    is_short.set()
    for step in range(3, 30):
        rig.put(VALUES, step=step)
        rig.drain()
        time.sleep(0.01)
    is_short.clear()
    time.sleep(0.1)
    put(rig, range(30, 33))
    report = rig.close()
    assert report.ledger["dropped"] == {"no_memory": 27}
    assert report.error is None and "restarted" not in rig.manifest()
    assert {row["step"] for row in rig.rows()} == {0, 1, 2, 30, 31, 32}


def test_an_index_without_memory_costs_the_index_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from recorder.write.shard import Index

    def refuse(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(Index, "add", refuse)
    rig = begin(tmp_path / "run", FaultyDisk())
    put(rig, range(5))
    assert_whole(tmp_path / "run", rig, 5)
    assert rig.files("*.index") == []


def test_an_error_of_ours_while_a_shard_is_sealed_is_counted_once(tmp_path: Path) -> None:
    class Broken(FaultyDisk):
        def truncate(self, descriptor: int, nbytes: int) -> None:
            raise ZeroDivisionError

    rig = begin(tmp_path / "run", Broken(), shard_bytes=10_000)
    for step in range(30):
        rig.put(VALUES, step=step)
    report = rig.close()
    assert report.ledger["written"] == len(rig.rows())
    assert report.ledger["written"] + sum(report.ledger["dropped"].values()) == 30
