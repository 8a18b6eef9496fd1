"""What is on disk stays bounded over steps and over restarts, and whoever reads it is told what went."""

from __future__ import annotations

import errno
import os
import stat
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import recorder
from recorder.records import KEEP_STATS
from recorder.write import writer_directory
from tests.rigs.command_line import Cli, cli
from tests.rigs.fakes import FaultyDisk
from tests.rigs.writer import Rig

__all__ = ["cli"]

MEGABYTE = 1 << 20
VALUES = np.random.default_rng(0).integers(0, 256, 100_000, dtype=np.uint8)
RUN: dict[str, Any] = {"run_id": "retention", "world_size": 1, "created_ns": 1}
DEAD_PID = 2**22 + 1  # above the largest that Linux gives


def begin(folder: Path, *, pid: int = DEAD_PID, host: str = os.uname().nodename, **settings: Any) -> Rig:
    """A writer that writes each record as soon as it is there, and which says of itself that it is process `pid`."""
    rig = Rig(folder, **{"batch_bytes": 1, "codec": "none", **settings})
    identity = {"rank": 0, "attempt": settings.get("attempt", 0), "started_ns": len(list(folder.glob("*/*"))) + 1}
    rig.writer.set_manifest({"pid": pid, "host": host, "step_source": "optimizer", "roots": [], **RUN, **identity})
    return rig.start()


def put(rig: Rig, steps: range, **kwargs: Any) -> None:
    for step in steps:
        rig.put(VALUES, step=step, **kwargs)
    rig.drain()


def killed(rig: Rig) -> Rig:
    """What a SIGKILL leaves: the writer stops between two records and says nothing more."""
    rig.drain()
    rig.writer._is_stopped = True
    rig.writer._thread.join()
    return rig


def used_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*-*.*"))


def steps_of(rig: Rig) -> list[int]:
    return sorted({row["step"] for row in rig.rows()})


def test_steps_before_the_newest_are_deleted_shard_by_shard(tmp_path: Path) -> None:
    rig = begin(tmp_path, keep_newest=16)
    for step in range(60):
        rig.put(VALUES, step=step)
        rig.put(VALUES, step=step, keep=KEEP_STATS)
        if step % 7 == 0:
            rig.drain()
            assert step - min(steps_of(rig)) <= 16 + 4 + 7, "no more than a shard beyond the window"
    report = rig.close()
    assert set(range(44, 60)) <= set(steps_of(rig)), "the newest are all there"
    assert report.ledger["dropped"] == {}
    assert len(rig.rows()) == 120 - report.ledger["retired"]["rows"]
    assert recorder.open_run(tmp_path).steps == steps_of(rig)


def test_a_window_of_one_step_keeps_that_step(tmp_path: Path) -> None:
    rig = begin(tmp_path, keep_newest=1)
    put(rig, range(30))
    rig.close()
    assert steps_of(rig)[-1] == 29
    assert len(steps_of(rig)) <= 5


def test_kept_steps_outlive_the_window_and_the_quota(tmp_path: Path, cli: Cli) -> None:
    window = begin(tmp_path / "window", keep_newest=4, keep_steps="::10")
    put(window, range(45))
    window.close()
    assert {0, 10, 20, 30, 40} <= set(steps_of(window))
    assert 15 not in steps_of(window)
    quota = begin(tmp_path / "quota", max_bytes=4 * MEGABYTE, keep_steps="7,20,21")
    put(quota, range(80))
    report = quota.close()
    assert {7, 20, 21, 79} <= set(steps_of(quota))
    assert report.ledger["dropped"] == {}
    assert used_bytes(tmp_path / "quota") <= 3 * MEGABYTE
    assert cli("verify", tmp_path / "quota").exit_code == 0


def test_kept_steps_that_fill_the_quota_are_said_and_new_rows_are_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rig = begin(tmp_path, max_bytes=4 * MEGABYTE, keep_steps="::1")
    put(rig, range(50))
    report = rig.close()
    assert report.ledger["dropped"]["quota"] == 50 - report.ledger["written"]
    assert steps_of(rig) == list(range(report.ledger["written"]))
    assert caplog.text.count("used up their part of max_bytes") == 1


def test_a_quota_below_a_usual_batch_still_records(tmp_path: Path) -> None:
    rig = Rig(tmp_path, max_bytes=MEGABYTE, codec="none").start()
    for number in range(3000):
        rig.put(VALUES[:50], step=number)
        rig.put(VALUES[:50], step=number, keep=KEEP_STATS)
    report = rig.close()
    assert report.ledger["dropped"] == {}
    assert report.ledger["retired"]["rows"] > 500
    assert used_bytes(tmp_path) <= MEGABYTE


@pytest.mark.parametrize("end", ["closed", "killed"])
def test_the_quota_of_a_rank_holds_over_restarts_and_every_reader_agrees(tmp_path: Path, end: str, cli: Cli) -> None:
    rigs = []
    for attempt in range(5):
        rig = begin(tmp_path, max_bytes=4 * MEGABYTE, attempt=attempt)
        for step in range(12 * attempt, 12 * attempt + 12, 4):
            put(rig, range(step, step + 4))
            assert used_bytes(tmp_path) <= 3 * MEGABYTE
        if end == "closed":
            rig.close()
        else:
            killed(rig)
        rigs.append(rig)
    run = recorder.open_run(tmp_path)
    assert run.problems == []
    for writer in run.writers:
        balance = writer.balance
        assert balance.observed == balance.written == 12
        assert writer.num_rows == balance.written - balance.retired_rows
    assert run.writers[0].num_rows > 0, "the first shard of the rank stays"
    assert sum(writer.balance.retired_rows for writer in run.writers) == 60 - run.num_rows > 20
    verified = cli("verify", tmp_path)
    text = verified.out + verified.err
    assert verified.exit_code == 0, text
    assert "expected by its accounts" not in text
    assert "removed by retention" in cli("doctor", tmp_path).out


def test_what_goes_of_an_earlier_writer_is_noted_before_it_goes(tmp_path: Path) -> None:
    class Watching(FaultyDisk):
        def unlink(self, path: Path) -> None:
            if path.parent == earlier.directory and path.suffix == ".arrow":
                noted = rig.manifest()["retired_earlier"][earlier.directory.name]
                assert path.name in noted["shards"]
                gone.append(path.name)
            super().unlink(path)

    gone: list[str] = []
    earlier = begin(tmp_path, max_bytes=4 * MEGABYTE)
    put(earlier, range(25))
    earlier.close()
    rig = begin(tmp_path, max_bytes=4 * MEGABYTE, disk=Watching())
    put(rig, range(25, 45))
    rig.close()
    noted = rig.manifest()["retired_earlier"][earlier.directory.name]
    assert list(noted["shards"]) == gone
    assert noted["rows"] == sum(shard["rows"] for shard in noted["shards"].values()) > 0


def test_a_deletion_that_was_noted_and_never_done_is_no_loss(tmp_path: Path, cli: Cli) -> None:
    class Dies(FaultyDisk):
        def unlink(self, path: Path) -> None:
            if path.parent == earlier.directory:
                raise OSError(errno.EROFS, "as if the process had died here")
            super().unlink(path)

    earlier = begin(tmp_path, max_bytes=4 * MEGABYTE)
    put(earlier, range(25))
    earlier.close()
    rig = begin(tmp_path, max_bytes=4 * MEGABYTE, disk=Dies())
    put(rig, range(25, 30))
    rig.close()
    assert rig.manifest()["retired_earlier"]
    assert recorder.open_run(tmp_path).writers[0].balance.retired_rows == 0
    assert cli("verify", tmp_path).exit_code == 0
    third = begin(tmp_path, max_bytes=4 * MEGABYTE)
    put(third, range(30, 40))
    third.close()
    verified = cli("verify", tmp_path)
    text = verified.out + verified.err
    assert verified.exit_code == 0, text


def test_nothing_of_an_earlier_writer_goes_while_its_loss_cannot_be_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    earlier = begin(tmp_path, max_bytes=4 * MEGABYTE)
    put(earlier, range(25))
    earlier.close()
    before = earlier.files("*.arrow")
    rig = begin(tmp_path, max_bytes=4 * MEGABYTE)
    rig.drain()
    monkeypatch.setattr(writer_directory, "replace_manifest", refuse)
    put(rig, range(25, 35))
    monkeypatch.undo()
    rig.close()
    assert earlier.files("*.arrow") == before
    assert cli("verify", tmp_path).exit_code == 0


def refuse(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_damaged_shard_of_an_earlier_writer_is_left_alone(tmp_path: Path) -> None:
    earlier = begin(tmp_path, max_bytes=4 * MEGABYTE)
    put(earlier, range(25))
    earlier.close()
    victim = earlier.files("tensors-*.arrow")[1]
    content = bytearray(victim.read_bytes())
    content[1000:4000] = bytes(3000)
    victim.write_bytes(content)
    rig = begin(tmp_path, max_bytes=4 * MEGABYTE)
    put(rig, range(25, 60))
    assert rig.close().ledger["written"] == 35
    assert victim.read_bytes() == bytes(content)
    assert rig.manifest()["retired_earlier"][earlier.directory.name]["rows"] > 0


@pytest.mark.parametrize(("pid", "host"), [(os.getppid(), os.uname().nodename), (DEAD_PID, "elsewhere")])
def test_what_may_still_be_alive_is_neither_counted_nor_touched(tmp_path: Path, pid: int, host: str) -> None:
    other = killed(begin(tmp_path, max_bytes=4 * MEGABYTE, pid=pid, host=host))
    living = begin(tmp_path, max_bytes=4 * MEGABYTE, pid=pid, host=host)
    put(living, range(25))
    before = living.files("*")
    rig = begin(tmp_path, max_bytes=4 * MEGABYTE)
    put(rig, range(40))
    assert living.files("*") == before
    rig.close()
    assert "retired_earlier" not in rig.manifest()
    del other
    living.close()


def test_steps_that_are_kept_are_kept_for_later_writers_too(tmp_path: Path, cli: Cli) -> None:
    earlier = begin(tmp_path, max_bytes=4 * MEGABYTE, keep_steps="5,17")
    put(earlier, range(25))
    earlier.close()
    rig = begin(tmp_path, max_bytes=4 * MEGABYTE, keep_steps="5,17")
    put(rig, range(25, 70))
    rig.close()
    assert {5, 17} <= set(recorder.open_run(tmp_path).steps)
    assert rig.manifest()["retired_earlier"]
    assert cli("verify", tmp_path).exit_code == 0


@pytest.mark.parametrize(
    ("permissions", "directories", "files"), [("owner", 0o700, 0o600), ("group", 0o750, 0o640), ("all", 0o755, 0o644)]
)
def test_permissions_are_those_asked_for_whatever_the_umask(
    tmp_path: Path, permissions: str, directories: int, files: int
) -> None:
    mask = os.umask(0o077)
    try:
        rig = begin(tmp_path / "recordings" / "run", permissions=permissions, max_bytes=4 * MEGABYTE)
        put(rig, range(6))
        rig.close()
    finally:
        os.umask(mask)
    found = {path: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "recordings").rglob("*")}
    names = {path.name for path in found}
    assert {"_run.json", "_writer.json", "_tensors-000000.index", "tensors-000000.arrow"} <= names
    for path, mode in found.items():
        assert mode == (directories if path.is_dir() else files), path


def test_a_reader_meets_no_error_while_shards_are_retired_under_it(tmp_path: Path) -> None:
    def produce() -> None:
        for step in range(150):
            rig.put(VALUES, step=step)
            time.sleep(0.008)

    killed(begin(tmp_path, max_bytes=4 * MEGABYTE))
    rig = begin(tmp_path, max_bytes=4 * MEGABYTE, keep_newest=16)
    rig.put(VALUES)
    rig.drain()
    producer = threading.Thread(target=produce)
    producer.start()
    num_reads = 0
    while producer.is_alive():
        steps = recorder.open_run(tmp_path).to_pandas(columns=["step", "seq"])
        assert steps.seq.is_unique
        num_reads += 1
    assert num_reads > 3
    assert rig.close().ledger["retired"]["rows"] > 50
