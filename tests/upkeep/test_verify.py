"""`verify` finds what is wrong, and nothing in a sound run."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recorder.analyze.doctor.reply import checks_of
from recorder.analyze.first.first import first, reply_of
from recorder.format.rundir import encode_status, index_name
from recorder.read.messages import footer_blocks
from recorder.read.shard import CheckedBatch, Shard
from recorder.run.run import open_run
from recorder.storage.untrusted_files import MappedFile
from recorder.upkeep.verify import VerifyResult, verify
from tests.rigs.handmade import HandmadeWriter, flip, ledger, make_row, make_run, shard_bytes
from tests.rigs.small_runs import payload_rows


def findings(run: Path) -> list[VerifyResult]:
    return list(verify(open_run(run)))


def faults(run: Path) -> list[str]:
    return [finding.text for finding in findings(run) if finding.is_fault]


def test_a_sound_run_has_no_findings_and_every_byte_is_reported(run_path: Path) -> None:
    seen: list[int] = []
    run = open_run(run_path)
    assert list(verify(run, seen.append)) == []
    assert sum(seen) == run.size_bytes


def test_each_batch_of_a_sealed_shard_is_read_once(run_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = open_run(run_path)
    num_batches = sum(len(footer_blocks(MappedFile(path))) - 1 for path in run_path.glob("rank=*/*/tensors*.arrow"))
    payloads: list[int] = []
    read = Shard.read

    def counted(shard: Shard, number: int, columns: Sequence[str]) -> CheckedBatch:
        if "data" in shard.schema.names and "part" in columns:
            payloads.append(number)
        return read(shard, number, columns)

    monkeypatch.setattr(Shard, "read", counted)
    monkeypatch.setattr("recorder.upkeep.verify._verify_rows", lambda writer: iter(()))
    assert list(verify(run)) == []
    num_stats = sum(len(footer_blocks(MappedFile(path))) - 1 for path in run_path.glob("rank=*/*/stats*.arrow"))
    assert len(payloads) == num_batches + num_stats > 0


def test_a_missing_index_is_no_fault(run_path: Path) -> None:
    next(run_path.glob("rank=00000/*/_tensors*.index")).unlink()
    (finding,) = findings(run_path)
    assert not finding.is_fault and "missing" in finding.text


@pytest.fixture
def writer(tmp_path: Path) -> HandmadeWriter:
    return HandmadeWriter(make_run(tmp_path / "run"))


def test_a_shard_that_a_closed_writer_left_open_is_no_fault(writer: HandmadeWriter) -> None:
    writer.add_shard([payload_rows()], is_sealed=False)
    writer.finish()
    shard, note = findings(writer.directory.parents[1])
    assert not shard.is_fault and not note.is_fault
    assert "not sealed, 1 batch with 10 rows can be read; the disk refused the shard" in shard.text


def test_a_running_writer_is_no_fault(writer: HandmadeWriter) -> None:
    writer.add_shard([payload_rows()], is_sealed=False, tail=bytes(4096))
    assert findings(writer.directory.parents[1]) == []


def test_accounts_that_do_not_balance_are_a_fault(writer: HandmadeWriter) -> None:
    writer.add_shard([payload_rows()])
    writer.finish(ledger=ledger(10, observed=12, pool_full=1))
    (fault,) = faults(writer.directory.parents[1])
    assert "observed 12, written 10, dropped 1" in fault


def test_a_shard_that_goes_while_nobody_writes_is_a_fault(writer: HandmadeWriter) -> None:
    writer.add_shard([payload_rows()])
    writer.add_shard([[make_row(50, [1.0])]])
    writer.finish()
    run = open_run(writer.directory.parents[1])
    gone = next(writer.directory.glob("tensors-000001.arrow"))
    gone.unlink()
    assert f"{gone}: is gone, and no writer is at work" in [found.text for found in verify(run) if found.is_fault]


def test_rows_that_vanished_are_a_fault(writer: HandmadeWriter) -> None:
    writer.add_shard([payload_rows()])
    writer.add_shard([[make_row(50, [1.0])]])
    writer.finish()
    next(writer.directory.glob("tensors-000001.arrow")).unlink()
    (fault,) = faults(writer.directory.parents[1])
    assert fault.endswith(": 1 of 11 rows that were written are gone; not here: tensors-000001.arrow")
    run = open_run(writer.directory.parents[1])
    assert run.problems and reply_of(run, first(run)).exit_code == 1


def test_a_lost_shard_is_named_by_its_number_its_index_or_its_neighbour(writer: HandmadeWriter) -> None:
    paths = [writer.add_shard([[make_row(n, [1.0], step=n)]], with_index=n == 4) for n in range(5)]
    writer.finish()
    run = writer.directory.parents[1]
    ends = ("; the last shards here: tensors-000003.arrow", "; not here: tensors-000004.arrow")
    content = paths[4].read_bytes()
    for index, end in zip((False, True), ends, strict=True):
        paths[4].unlink()
        if not index:
            (kept := paths[4].with_name(index_name(paths[4].name))).rename(writer.directory / "aside")
        (fault,) = faults(run)
        assert fault.endswith(end), fault
        if not index:
            (writer.directory / "aside").rename(kept)
            paths[4].write_bytes(content)
    for path in paths[1:3]:
        path.unlink()
    (fault,) = faults(run)
    assert fault.endswith("; not here: tensors-000001.arrow to tensors-000002.arrow, tensors-000004.arrow"), fault
    account = ledger(5) | {"retired": {"rows": 1, "bytes": 1}}
    writer.finish(ledger=account)
    assert ", of which retention may have removed some" in faults(run)[0]


def test_retired_rows_are_expected_to_be_gone(writer: HandmadeWriter) -> None:
    writer.add_shard([payload_rows()])
    writer.finish(ledger=ledger(15) | {"retired": {"rows": 5, "bytes": 1}})
    assert findings(writer.directory.parents[1]) == []


@pytest.mark.parametrize("state", ["closed", "recording"])
def test_more_rows_removed_than_ever_written_are_a_fault(writer: HandmadeWriter, state: str) -> None:
    writer.add_shard([payload_rows()])
    writer.finish(state=state, ledger=ledger(15) | {"retired": {"rows": 16, "bytes": 1}})
    (fault,) = faults(writer.directory.parents[1])
    assert fault.endswith("the accounts contradict themselves: 16 rows removed by retention, of 15 written")


def test_a_later_writer_cannot_have_removed_more_than_an_earlier_one_wrote(writer: HandmadeWriter) -> None:
    writer.add_shard([payload_rows()])
    writer.finish()
    note = {"rows": 1000, "bytes": 1, "shards": {"tensors-000007.arrow": {"rows": 1000, "bytes": 1}}}
    later = HandmadeWriter(writer.directory.parents[1], 0, "later")
    later.finish(attempt=1, retired_earlier={writer.directory.name: note})
    (fault,) = faults(writer.directory.parents[1])
    assert str(writer.directory) in fault and "1000 rows removed by retention, of 10 written" in fault


def test_a_copy_of_a_writer_under_another_name_is_a_fault(writer: HandmadeWriter) -> None:
    writer.add_shard([payload_rows()])
    writer.finish()
    for name in ("0-before-it", "backup"):
        shutil.copytree(writer.directory, writer.directory.with_name(name))
    found = faults(writer.directory.parents[1])
    assert [Path(fault.partition(":")[0]).name for fault in found] == ["0-before-it", "backup"]
    assert all(f"is a copy of {writer.directory.name} beside it" in fault for fault in found)
    assert all(fault.endswith("its rows exist twice; remove the copy") for fault in found)


def test_of_two_renamed_copies_one_is_a_fault(writer: HandmadeWriter) -> None:
    writer.add_shard([payload_rows()])
    writer.finish()
    shutil.copytree(writer.directory, writer.directory.with_name("b"))
    writer.directory.rename(writer.directory.with_name("a"))
    (fault,) = faults(writer.directory.parents[1])
    assert "is a copy of a beside it" in fault


def test_what_a_stranger_says_of_a_process_makes_no_copy_and_no_error(writer: HandmadeWriter) -> None:
    nested: list[object] = []
    for _ in range(900):
        nested = [nested]
    for name in ("a", "b"):
        HandmadeWriter(writer.directory.parents[1], 0, name).finish(pid=nested, started_ns={}, writer=["w"])
    assert not any("copy" in finding.text for finding in findings(writer.directory.parents[1]))


def test_a_renamed_writer_and_a_restart_are_no_faults(writer: HandmadeWriter) -> None:
    writer.add_shard([payload_rows()])
    writer.finish()
    writer.directory.rename(writer.directory.with_name("renamed"))
    HandmadeWriter(writer.directory.parents[1], 0, "restart").finish(attempt=1)
    assert findings(writer.directory.parents[1]) == []


def test_damaged_shards_are_named_in_their_order(writer: HandmadeWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever thread is done first: the first shard is the largest."""
    monkeypatch.setattr("recorder.upkeep.verify.available_cores", lambda: 4)
    rows = [make_row(seq, [1.0] * (1000 if seq < 60 else 1)) for seq in range(80)]
    paths = [writer.add_shard([rows[:60]]), *(writer.add_shard([[row]]) for row in rows[60:])]
    writer.finish()
    data = np.array([1.0]).tobytes()
    for path in paths:
        flip(path, 8 * path.read_bytes().rindex(data))
    named = [fault.partition(",")[0] for fault in faults(writer.directory.parents[1])]
    assert named == list(map(str, paths))


def test_a_number_given_twice_is_a_fault(writer: HandmadeWriter) -> None:
    writer.add_shard([payload_rows() + payload_rows()[:1]])
    writer.finish()
    (fault,) = faults(writer.directory.parents[1])
    assert "1 rows have the number of another" in fault


def test_rows_of_another_rank_are_a_fault(writer: HandmadeWriter) -> None:
    writer.add_shard([payload_rows(rank=3)])
    writer.finish()
    (fault,) = faults(writer.directory.parents[1])
    assert "rows of rank {3}, not of 0 alone" in fault


def test_bytes_between_the_batches_and_the_footer_are_a_fault(writer: HandmadeWriter) -> None:
    rows = payload_rows()
    path = writer.add_shard([rows], with_index=False)
    sealed, is_open = shard_bytes([rows]), shard_bytes([rows], is_sealed=False)
    end_of_stream = sealed.index(b"\xff\xff\xff\xff\0\0\0\0", len(is_open))
    path.write_bytes(sealed[:end_of_stream] + bytes(64) + sealed[end_of_stream:])
    writer.finish()
    assert any("the footer does not follow the last batch" in fault for fault in faults(writer.directory.parents[1]))


@pytest.mark.parametrize("make", [Path.touch, os.mkfifo, Path.mkdir, lambda path: path.symlink_to("/etc/hostname")])
@pytest.mark.parametrize("name", ["zzz.arrow", "0000000.arrow"])
def test_what_is_no_shard_and_readers_by_name_take_for_one_is_a_fault(
    run_path: Path, name: str, make: Callable[[Path], None]
) -> None:
    of_writer = next(run_path.glob("rank=00000/*/"))
    for folder in (run_path, run_path / "rank=00000", of_writer) if make is Path.touch else (of_writer,):
        make(folder / name)
        (fault,) = faults(run_path)
        assert str(folder / name) in fault and "none of the run's shards" in fault
        (folder / name).rmdir() if (folder / name).is_dir() else (folder / name).unlink()


def test_a_file_below_a_writers_directory_is_a_fault_too(run_path: Path) -> None:
    folder = next(run_path.glob("rank=00000/*/")) / "copy"
    folder.mkdir()
    assert faults(run_path) == []
    (folder / "tensors-000000.arrow").touch()
    (fault,) = faults(run_path)
    assert str(folder / "tensors-000000.arrow") in fault and "none of the run's shards" in fault


def test_a_shard_in_a_folder_that_is_no_writers_is_a_fault(run_path: Path) -> None:
    shard = next(run_path.glob("rank=00000/*/*.arrow"))
    folder = run_path / "notes"
    folder.mkdir()
    shutil.copy(shard, folder)
    (fault,) = faults(run_path)
    assert str(folder / shard.name) in fault and "none of the run's shards" in fault


def test_a_rank_of_which_nothing_is_here_is_told(run_path: Path) -> None:
    shutil.rmtree(run_path / "rank=00001")
    assert any(not one.is_fault and "rank 1 of 2, whose files are not here" in one.text for one in findings(run_path))


def test_each_of_several_strays_of_a_directory_is_named(run_path: Path) -> None:
    folder = next(run_path.glob("rank=00000/*/"))
    os.mkfifo(folder / "a.arrow")
    (folder / "b.arrow").symlink_to("/etc/hostname")
    (folder / "c.arrow").touch()
    (folder / "d.arrow").mkdir()
    os.mkfifo(folder / "e.arrow")
    told = faults(run_path)
    assert len(told) == 5
    for name in "abcde":
        assert sum(str(folder / f"{name}.arrow") in fault for fault in told) == 1, name


@pytest.mark.parametrize("told_by", ["manifest", "status"])
def test_synced_rows_that_are_gone_are_a_fault_and_rows_on_their_way_a_note(
    writer: HandmadeWriter, told_by: str
) -> None:
    rows = payload_rows()
    writer.add_shard([rows], is_sealed=False)
    run, is_told = writer.directory.parents[1], dict[str, dict[str, int]](manifest={}, status={})
    about: dict[str, Any] = {"pid": 1 << 22, "host": os.uname().nodename, "state": "recording"}
    for num_synced, is_lost in ((len(rows), False), (len(rows) + 3, True)):
        is_told[told_by] = {"synced": num_synced}
        writer.finish(**about, ledger=ledger(len(rows) + 5) | is_told["manifest"])
        status = {**about, "writer": writer.directory.name, "started_ns": writer.manifest["started_ns"]}
        (writer.directory / "_status.json").write_bytes(encode_status(status | is_told["status"]))
        found = findings(run)
        lost = "3 rows lost after they were synced, or not shipped yet by a daemon"
        assert [one.text for one in found if one.is_fault and lost not in one.text] == []
        assert any(one.is_fault for one in found) == is_lost
        assert any(lost in check.text for check in checks_of(open_run(run)) if check.state == "missing") == is_lost
        assert is_lost or any("has 10 rows, expected by its accounts are 15" in one.text for one in found)


def test_synced_rows_that_are_gone_are_not_counted_as_on_their_way_too(writer: HandmadeWriter) -> None:
    rows = payload_rows()
    writer.add_shard([rows], is_sealed=False)
    accounts = ledger(len(rows), len(rows) + 5) | {"synced": len(rows) + 3}
    writer.finish(pid=1 << 22, host=os.uname().nodename, state="recording", ledger=accounts)
    texts = [one.text for one in findings(writer.directory.parents[1])]
    assert any("3 rows lost after they were synced" in text for text in texts)
    assert any("at least 2 rows not written yet are lost" in text for text in texts)
