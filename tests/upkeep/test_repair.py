"""`recorder repair` on what a training left that was killed, and on what disks and foreign_writers do to it then."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pytest

import recorder
from recorder.cli.app import run_command
from recorder.format.rundir import encode_manifest, open_name, read_json
from recorder.read.shard import salvage
from recorder.run.run import open_run
from recorder.storage.untrusted_files import GrowingFile
from recorder.system.processes import own_process
from recorder.upkeep.repair import Outcome, repair_run
from recorder.upkeep.verify import verify
from tests.campaigns.faults.support import batches_of
from tests.rigs import jobs
from tests.rigs.jobs import environment, recording

TENSORS, STATS = "tensors-000000.arrow", "stats-000000.arrow"
SOME_ROWS = 100
KILL_STRIDE = 5
"""1 for every change of the disk, as `python -m tests.campaigns repair 1`."""


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on one rank, killed while it recorded: a few sealed shards, and an open one of each kind.

    A shard has room for several batches, also where the writer is behind and each has 1 or 2 MB.
    """
    folder = tmp_path_factory.mktemp("killed")
    settings = recording(flush_interval_s="0.01", shard_bytes="4MiB", min_free_bytes="0", dir=str(folder))
    # Shards that are full after a few steps, and pauses in which the writer catches up: so the run has few rows.
    train = folder / "train.py"
    train.write_text("from tests.campaigns.faults import training; training.BATCH = 64; training.main()")
    process = jobs.program(folder, train, "--pause=0.05", **settings).process
    until_s = time.monotonic() + 60
    try:
        while True:
            os.kill(process.pid, signal.SIGSTOP)  # what is looked at is what will be left
            while process.poll() is None and not is_stopped(process.pid):
                time.sleep(0.001)
            if is_ready(folder):
                break
            os.kill(process.pid, signal.SIGCONT)
            assert process.poll() is None and time.monotonic() < until_s
            time.sleep(0.05)
    finally:
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
    assert process.wait(60) == -signal.SIGKILL
    (run,) = [path for path in folder.iterdir() if path.is_dir()]
    return run


def is_stopped(pid: int) -> bool:
    """Whether every thread of a process stands still: a signal takes its time."""
    states = [path.read_text().rpartition(")")[2].split()[0] for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    return set(states) == {"T"}


def is_ready(folder: Path) -> bool:
    """Whether there are sealed shards, open ones with several whole batches, and nothing half done."""
    num_batches = {}
    for path in folder.glob("*/rank=*/*/_*.arrow.open"):
        found = salvage(partial(GrowingFile, path))
        if found.num_trailing_bytes or path.with_name(path.name[1:].removesuffix(".open")).exists():
            return False
        num_batches[path.name.partition("-")[0]] = len(found.blocks)
    num_sealed, num_indexes = (len(list(folder.glob(f"*/rank=*/*/{name}"))) for name in ("tensors-*.arrow", "_*.index"))
    is_clean = num_sealed == num_indexes and not list(folder.rglob("*.tmp")) and not list(folder.rglob("_*.index.open"))
    enough = num_batches.get("_tensors", 0) >= 3 and num_batches.get("_stats", 0) >= 3
    return is_clean and num_sealed >= 2 and enough


@pytest.fixture
def run(killed: Path, tmp_path: Path) -> Path:
    """A copy to be repaired."""
    return Path(shutil.copytree(killed, tmp_path / "run"))


def writer_of(run: Path) -> Path:
    (directory,) = run.glob("rank=*/*")
    return directory


def opened(run: Path, kind: str = "tensors") -> Path:
    (path,) = writer_of(run).glob(f"_{kind}-*.arrow.open")
    return path


def repair(run: Path, **options: Any) -> list[Outcome]:
    return list(repair_run(open_run(run), **options))


def words(outcomes: list[Outcome]) -> set[str]:
    return {outcome.what for outcome in outcomes}


def rows_of(run: Path) -> dict[int, dict[str, Any]]:
    """Every row that pyarrow finds, in sealed and open shards."""
    rows = [row for batch, _ in batches_of(writer_of(run)) for row in batch.to_pylist()]
    found = {row["seq"]: row for row in rows}
    assert len(found) == len(rows)
    return found


def digests(run: Path) -> dict[str, str]:
    return {
        str(path.relative_to(run)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(run.rglob("*"))
        if path.is_file()
    }


def faults(run: Path) -> list[str]:
    return [finding.text for finding in verify(open_run(run)) if finding.is_fault]


def flip(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 0x10
    path.write_bytes(content)


def set_manifest(run: Path, **members: object) -> None:
    path = writer_of(run) / "_writer.json"
    path.write_bytes(encode_manifest(read_json(path) | members))


def run_app(*words: object) -> int:
    with pytest.raises(SystemExit) as stopped:
        run_command([str(word) for word in words])
    assert isinstance(stopped.value.code, int)
    return stopped.value.code


class TestSealing:
    def test_every_arrow_reader_sees_all_rows_afterwards(self, run: Path) -> None:
        before = rows_of(run)
        seen = ds.dataset(run, format="ipc").count_rows()
        assert seen + SOME_ROWS < len(before)
        outcomes = repair(run)
        assert words(outcomes) <= {"sealed", "lost", "removed", "indexed"}
        assert [outcome.what for outcome in outcomes].count("sealed") == 2
        table = ds.dataset(run, format="ipc").to_table()
        assert sorted(table["seq"].to_pylist()) == sorted(before)
        assert rows_of(run) == before
        assert not list(run.rglob("*.open")) and not list(run.rglob("*.tmp"))
        assert all(shard.is_sealed for writer in open_run(run).writers for shard in writer.shards)

    def test_verify_is_content_and_the_end_of_the_record_is_still_said(self, run: Path) -> None:
        (before,) = open_run(run).endings
        repair(run)
        assert faults(run) == []
        found = [finding.text for finding in verify(open_run(run))]
        assert found == [before]

    def test_every_tensors_shard_has_an_index_that_is_used(self, run: Path) -> None:
        repair(run)
        (writer,) = open_run(run).writers
        assert {shard.is_indexed for shard in writer.shards if shard.path.name.startswith("tensors")} == {True}

    def test_a_second_repair_finds_nothing_to_do(self, run: Path) -> None:
        repair(run)
        before = digests(run)
        assert repair(run) == []
        assert digests(run) == before

    def test_a_dry_run_says_the_same_and_changes_nothing(self, run: Path) -> None:
        (writer_of(run) / "_writer.json.7-aa.tmp").write_text("{")
        before = digests(run)
        said = repair(run, is_dry=True)
        assert digests(run) == before
        assert said == repair(run)

    def test_what_is_copied_is_what_was_written_byte_by_byte(self, run: Path) -> None:
        path = opened(run)
        content = path.read_bytes()
        ends = [8 + end for end in stream_ends(content[8:])]
        repair(run)
        sealed = path.with_name(path.name[1:].removesuffix(".open")).read_bytes()
        assert sealed[: ends[-1]] == content[: ends[-1]]

    @pytest.mark.parametrize("mode", [0o600, 0o640, 0o644])
    def test_who_may_read_the_open_shard_may_read_the_sealed_one(self, run: Path, mode: int) -> None:
        writer_of(run).chmod(0o100 | mode | (mode & 0o044) >> 2)
        path = opened(run)
        path.chmod(mode)
        repair(run)
        sealed = path.with_name(path.name[1:].removesuffix(".open"))
        assert stat.S_IMODE(sealed.stat().st_mode) == mode

    def test_the_zeros_of_aligned_writes_are_no_loss(self, run: Path) -> None:
        for kind in ("tensors", "stats"):
            path = opened(run, kind)
            content = path.read_bytes()
            end = 8 + stream_ends(content[8:])[-1]
            path.write_bytes(content[:end] + bytes(4096))
        assert "lost" not in words(repair(run))

    def test_a_closed_writers_abandoned_shard_is_sealed_too(self, run: Path) -> None:
        set_manifest(run, state="closed", pid=os.getpid())
        assert "sealed" in words(repair(run))


def stream_ends(content: bytes) -> list[int]:
    source = pa.BufferReader(content)
    stream = pa.ipc.open_stream(source)
    ends = [source.tell()]
    try:
        while stream.read_next_batch() is not None:
            ends.append(source.tell())
    except (StopIteration, pa.ArrowInvalid, OSError):
        pass
    return ends


class TestLosses:
    def test_a_write_that_was_cut_is_said_with_its_bytes(self, run: Path) -> None:
        path = opened(run)
        *_, before, end = (8 + end for end in stream_ends(path.read_bytes()[8:]))
        os.truncate(path, end - 100)
        (lost,) = [o for o in repair(run) if o.what == "lost" and o.path == path]
        assert lost.num_bytes == end - 100 - before
        assert str(lost.num_bytes) in lost.text
        assert not path.exists() and not list(run.rglob("*.damaged"))
        assert faults(run) == []

    def test_damage_costs_its_batch_alone_and_the_damaged_file_is_kept(self, run: Path) -> None:
        path = opened(run)
        before, content = rows_of(run), path.read_bytes()
        flip(path, content.index(b'{"number":1'))
        outcomes = repair(run)
        assert {"sealed", "lost", "kept"} <= words(outcomes)
        (kept,) = run.rglob("*.damaged")
        assert len(kept.read_bytes()) == len(content)
        after = rows_of(run)
        assert 0 < len(before) - len(after) < len(before) / 2
        assert {seq: before[seq] for seq in after} == after
        assert faults(run) == []
        assert repair(run) == []

    def test_a_damaged_payload_costs_the_payloads_of_its_batch_and_no_row(self, run: Path) -> None:
        path = opened(run)
        before, content = rows_of(run), path.read_bytes()
        source = pa.BufferReader(content)
        source.seek(8)
        batch = pa.ipc.open_stream(source).read_next_batch()
        payload = max(batch.column("data").to_pylist(), key=len)  # a short one may stand elsewhere, too
        flip(path, content.index(payload) + len(payload) // 2)
        assert {"sealed", "lost", "kept"} <= words(repair(run))
        after = rows_of(run)
        assert set(after) == set(before)
        bare = {seq for seq, row in after.items() if row != before[seq]}
        assert bare == set(batch.column("seq").to_pylist())
        light = ("encoding", "payload_bytes", "data", "note")
        for seq in bare:
            assert {k: v for k, v in after[seq].items() if k not in light} == {
                k: v for k, v in before[seq].items() if k not in light
            }
            assert after[seq]["data"] is None
            assert json.loads(after[seq]["note"])["no_payload"] == "damaged"
        assert faults(run) == []

    def test_what_nobody_can_read_is_kept(self, run: Path) -> None:
        path = opened(run)
        path.write_bytes(os.urandom(5000))
        assert {"lost", "kept"} <= words(repair(run))
        (kept,) = run.rglob("*.damaged")
        assert kept.stat().st_size == 5000

    @pytest.mark.parametrize("num_bytes", [0, 5, 8, 900])
    def test_an_open_shard_without_a_batch_goes(self, run: Path, num_bytes: int) -> None:
        path = opened(run)
        os.truncate(path, num_bytes)
        repair(run)
        assert not path.exists()
        assert not list(run.rglob("*.damaged"))
        assert faults(run) == []


class TestRemains:
    def test_an_open_twin_of_a_sealed_shard_goes(self, run: Path) -> None:
        path = opened(run)
        os.link(path, path.with_name("again"))
        before = rows_of(run)
        repair(run)
        os.link(path.with_name("again"), path)
        assert "removed" in words(repair(run))
        assert not path.exists()
        assert rows_of(run) == before

    def test_a_stranger_under_the_final_name_is_never_overwritten(self, run: Path) -> None:
        path = opened(run)
        final = path.with_name(path.name[1:].removesuffix(".open"))
        shutil.copy(next(writer_of(run).glob("tensors-000000.arrow")), final)
        before = path.read_bytes(), final.read_bytes()
        (lost,) = [outcome for outcome in repair(run) if outcome.what == "lost" and outcome.path == path]
        assert lost.rows > 0
        assert (path.read_bytes(), final.read_bytes()) == before

    @pytest.mark.parametrize("harm", ["missing", "damaged", "of another shard"])
    def test_an_index_is_made_again(self, run: Path, harm: str) -> None:
        path = writer_of(run) / "_tensors-000000.index"
        sound = path.read_bytes()
        if harm == "missing":
            path.unlink()
        elif harm == "damaged":
            flip(path, len(sound) // 2)
        else:
            path.write_bytes(sound.replace(b"recorder_shard_bytes", b"recorder_shard_bytez"))
        (outcome,) = [outcome for outcome in repair(run) if outcome.what == "indexed"]
        assert outcome.path == path
        assert path.read_bytes() == sound

    def test_half_written_files_go(self, run: Path) -> None:
        remains = [
            run / "_run.json.77-0a0b0c0d.tmp",
            writer_of(run) / "_writer.json.77-0a0b0c0d.tmp",
            writer_of(run) / f"_{TENSORS}.77-0a0b0c0d.tmp",
            writer_of(run) / open_name("_tensors-000007.index"),
        ]
        foreign = writer_of(run) / "notes.tmp"
        for path in [*remains, foreign]:
            path.write_text("half")
        repair(run)
        assert [path for path in remains if path.exists()] == []
        assert foreign.exists()


class TestLife:
    def test_a_writer_whose_process_runs_is_left_alone_and_named(self, run: Path) -> None:
        set_manifest(run, **own_process())
        for path in [*writer_of(run).iterdir(), writer_of(run)]:
            os.utime(path, (1e9, 1e9))  # it may be stopped, or stuck
        before = digests(run)
        (outcome,) = repair(run, assume_dead=True)
        assert outcome.what == "skipped"
        assert outcome.path == writer_of(run)
        assert str(os.getpid()) in outcome.text
        assert digests(run) == before

    def test_a_writer_on_another_host_is_left_alone_unless_the_user_knows(self, run: Path) -> None:
        set_manifest(run, host="node-7")
        assert words(repair(run, assume_dead=True)) == {"skipped"}, "it wrote a moment ago"
        for path in [*writer_of(run).iterdir(), writer_of(run)]:
            os.utime(path, (1e9, 1e9))
        (outcome,) = repair(run)
        assert "node-7" in outcome.text
        assert "--assume-dead" in outcome.text
        assert "sealed" in words(repair(run, assume_dead=True))
        (ending,) = recorder.open_run(run).endings  # the repair did not make it look alive
        assert "not closed, out of sight from here and quiet" in ending

    def test_a_writer_killed_before_its_manifest_is_left_alone_unless_the_user_knows(self, run: Path) -> None:
        begun = run / "rank=00003" / "000000-0123456789ab"
        begun.mkdir(parents=True)
        (begun / "_writer.json.77-0a0b0c0d.tmp").write_text("{")
        (outcome,) = [outcome for outcome in repair(run, assume_dead=True) if outcome.what == "skipped"]
        assert outcome.path == begun
        assert outcome.text == "may be alive: it began within the last minute, on an unknown host"
        for path in [*begun.iterdir(), begun]:
            os.utime(path, (1e9, 1e9))
        (outcome,) = repair(run)
        assert "its host is unknown" in outcome.text
        assert "--assume-dead" in outcome.text
        assert words(repair(run, assume_dead=True)) == {"removed"}
        assert list(begun.iterdir()) == []
        assert [finding.text for finding in verify(recorder.open_run(run)) if finding.is_fault] == []

    def test_a_process_number_that_is_in_use_again_holds_nothing_up(self, run: Path) -> None:
        set_manifest(run, pid=os.getpid())
        assert "sealed" in words(repair(run))

    def test_a_writer_in_a_container_of_its_own_is_left_alone_unless_the_user_knows(self, run: Path) -> None:
        set_manifest(run, process="another-namespace:1")
        assert words(repair(run, assume_dead=True)) == {"skipped"}, "it wrote a moment ago"
        for path in [*writer_of(run).iterdir(), writer_of(run)]:
            os.utime(path, (1e9, 1e9))
        (outcome,) = repair(run)
        assert "out of sight" in outcome.text
        assert "sealed" in words(repair(run, assume_dead=True))

    def test_two_repairs_at_once_are_one_too_many(self, run: Path) -> None:
        first = repair_run(open_run(run))
        next(first)
        with pytest.raises(recorder.RecorderError, match="another repair"):
            repair(run)
        list(first)

    def test_a_repair_killed_at_any_change_of_the_disk_goes_on(self, tmp_path: Path) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "tests.campaigns", "repair", str(KILL_STRIDE)],
            cwd=Path(__file__).parents[2],
            env=environment({"TMPDIR": str(tmp_path)}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stdout
        assert int(done.stdout.split()[-1]) >= 5


class TestCommands:
    COMMANDS: tuple[Callable[[Path], tuple[object, ...]], ...] = (
        lambda run: ("ls", run),
        lambda run: ("show", run, "blocks.0.up"),
        lambda run: ("stats", run, "--by", "step,module", "--last", "0"),
        lambda run: ("first", run),
        lambda run: ("diff", run, run.parent / "copy", "--common"),
        lambda run: ("export", run, "-o", run.parent / "out.parquet", "--payload", "--force"),
        lambda run: ("merge", run, "-o", run.parent / "merged", "--jobs", "1"),
        lambda run: ("doctor", run),
        lambda run: ("verify", run),
    )

    @pytest.mark.parametrize("command", COMMANDS, ids=lambda command: str(command(Path("run"))[0]))
    def test_every_command_reads_a_killed_run_as_it_does_a_repaired_one(
        self, run: Path, command: Callable[[Path], tuple[object, ...]], capsys: pytest.CaptureFixture[str]
    ) -> None:
        num_rows = len(rows_of(run))
        shutil.copytree(run, run.parent / "copy")
        codes, said = [], []
        for _ in range(2):
            codes.append(run_app(*command(run), "--json"))
            said.append(json.loads(capsys.readouterr().out))
            repair(run)
            shutil.rmtree(run.parent / "merged", ignore_errors=True)
        assert codes[0] == codes[1] < 2
        name = str(command(run)[0])
        if name == "export":
            table = pa.parquet.read_table(run.parent / "out.parquet")
            assert table.num_rows == num_rows
        if name in ("show", "stats", "first", "diff"):
            assert said[0] == said[1]

    def test_repair_prints_a_table_and_exits_with_1_only_where_something_is_lost(
        self, run: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = opened(run)
        os.truncate(path, 8 + stream_ends(path.read_bytes()[8:])[-1] - 100)
        os.truncate(opened(run, "stats"), 8 + stream_ends(opened(run, "stats").read_bytes()[8:])[-1])
        assert run_app("repair", run, "--dry-run") == 1
        assert "nothing was changed" in capsys.readouterr().out
        assert run_app("repair", run, "--json") == 1
        outcomes = json.loads(capsys.readouterr().out)["outcomes"]
        assert {outcome["what"] for outcome in outcomes} >= {"sealed", "lost"}
        assert run_app("repair", run) == 0
        assert "nothing to repair" in capsys.readouterr().out
