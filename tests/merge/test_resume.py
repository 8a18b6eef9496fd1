"""Kill and resume, grow and merge again: what is finished is kept, what readers see is always whole."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from recorder.errors import NotARunError, WriteError
from recorder.merge.merge import merge_run
from recorder.merge.output import open_output
from recorder.run.run import open_run
from tests.rigs.handmade import HandmadeWriter
from tests.rigs.merging import add_steps, assert_is_merge, batch, content, grow, make_small_run, units

ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """In memory where there is such a directory: hundreds of syncs are not the point."""
    if not Path("/dev/shm").is_dir():
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        yield Path(name)


def kill_and_resume(folder: Path, scenario: str, start: int, stride: int) -> int:
    command = [sys.executable, "-m", "tests.campaigns", "merge", str(folder), scenario, str(start), str(stride)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.parametrize(("scenario", "stride"), [("first", 61), ("grown", 47), ("mended", 41)])
def test_a_merge_that_is_killed_anywhere_goes_on_where_it_was(folder: Path, scenario: str, stride: int) -> None:
    assert kill_and_resume(folder, scenario, 7, stride) >= 4


@pytest.mark.slow
@pytest.mark.parametrize("scenario", ["first", "grown", "mended"])
def test_a_merge_that_is_killed_at_any_instant_goes_on_where_it_was(folder: Path, scenario: str) -> None:
    assert kill_and_resume(folder, scenario, 0, 1) > 100


SLOW_MERGE = """
import sys, time
import recorder.merge.merge as merge, recorder.merge.unit as plan
plan.UNIT_BYTES = 700
build = merge._build
def slow(*args):
    build(*args)
    print("built", flush=True)
    time.sleep(60)
merge._build = slow
if __name__ == "__main__":
    from recorder.cli.app import run_command
    run_command(sys.argv[1:])
"""
"""The command, but after each unit it takes its time; its workers do, too."""


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT])
def test_workers_end_with_a_merge_that_is_killed_or_interrupted(
    folder: Path, monkeypatch: pytest.MonkeyPatch, end: signal.Signals
) -> None:
    """They go within moments, an interrupt leaves no traceback, and the next call finishes."""
    run, out = make_small_run(folder / "run", steps=6), folder / "out"
    script = folder / "slow_merge.py"
    script.write_text(SLOW_MERGE)
    command = [sys.executable, str(script), "merge", str(run), "-o", str(out), "--jobs", "2"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with (folder / "stderr").open("w+") as stderr:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=stderr, env=environment, start_new_session=True
        )
        assert process.stdout is not None
        try:
            for _ in range(2):  # one by the command, one by its worker
                assert process.stdout.readline() == b"built\n"
            if end == signal.SIGINT:
                os.killpg(process.pid, end)  # as a terminal does
            else:
                process.kill()
            process.wait(timeout=60)
            until_s = time.monotonic() + 60
            while _is_group_alive(process.pid):
                assert time.monotonic() < until_s, "workers outlive the merge"
                time.sleep(0.05)
        finally:
            process.stdout.close()
            if process.poll() is None:
                process.kill()
        stderr.seek(0)
        said = stderr.read()
    assert "Traceback" not in said
    again = f"recorder merge {run} -o {out}"
    assert (again in said) == (end == signal.SIGINT)
    assert process.returncode != 0
    with pytest.raises(NotARunError, match=f"an unfinished merge; run it again, what is finished is kept: {again}"):
        open_run(out)
    monkeypatch.setattr("recorder.merge.unit.UNIT_BYTES", 700)
    report = merge_run(open_run(run), out)
    assert 2 <= report.num_kept_units < report.num_units
    assert_is_merge(out, run)


def _is_group_alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    # A zombie that nobody has asked for yet is no worker.
    states = [
        path.read_text().rpartition(")")[2].split() for path in Path("/proc").glob("[0-9]*/stat") if _is_there(path)
    ]
    return any(int(fields[2]) == group and fields[0] != "Z" for fields in states)


def _is_there(path: Path) -> bool:
    try:
        path.read_text()
    except OSError:
        return False
    return True


def test_a_second_call_has_nothing_to_do_and_changes_nothing(tmp_path: Path) -> None:
    run, out = make_small_run(tmp_path / "run"), tmp_path / "out"
    merge_run(open_run(run), out)
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    report = merge_run(open_run(run), out)
    assert report.num_kept_units == report.num_units
    assert report.merged_bytes == 0
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before


def test_a_run_that_has_grown_merges_only_what_is_new(tmp_path: Path) -> None:
    run, out = make_small_run(tmp_path / "run", steps=4), tmp_path / "out"
    merge_run(open_run(run), out)
    old = units(out)
    grow(run, [4, 5])
    report = merge_run(open_run(run), out)
    assert (report.num_kept_units, report.num_units) == (1, 2)
    assert set(old) < set(units(out))
    assert_is_merge(out, run)


def test_steps_that_were_recorded_again_are_merged_again(tmp_path: Path) -> None:
    run, out = make_small_run(tmp_path / "run", steps=4), tmp_path / "out"
    merge_run(open_run(run), out)
    old = units(out)
    grow(run, [3])
    report = merge_run(open_run(run), out)
    assert report.num_kept_units == 0
    assert not set(old) & set(units(out))
    assert_is_merge(out, run)


def test_what_a_live_writer_adds_is_merged_by_the_next_call(tmp_path: Path) -> None:
    """An open shard that grew with later steps leaves the earlier ones as they are; sealing it does not."""
    run, out = make_small_run(tmp_path / "run", steps=2), tmp_path / "out"
    for rank in (0, 1):
        writer = HandmadeWriter(run, rank, "live")
        add_steps(writer, [2], is_sealed=False)
        writer.finish(state="recording")
    merge_run(open_run(run), out)
    for rank in (0, 1):
        for path in (run / f"rank={rank:05d}" / "live").glob("_*.open"):
            path.unlink()
        writer = HandmadeWriter.__new__(HandmadeWriter)
        writer.__dict__ = {"rank": rank, "directory": run / f"rank={rank:05d}" / "live", "num_rows": 0}
        writer._num_shards, writer.manifest = (
            {"tensors": 0, "stats": 0},
            dict(open_run(run).writers[-1].manifest.members),
        )
        add_steps(writer, [2, 3], is_sealed=False)
    report = merge_run(open_run(run), out)
    assert (report.num_kept_units, report.num_units) == (1, 2)
    assert_is_merge(out, run)


def test_a_damaged_shard_that_was_restored_is_merged_again(tmp_path: Path) -> None:
    run, out = make_small_run(tmp_path / "run", steps=4), tmp_path / "out"
    shard = sorted((run / "rank=00001").rglob("tensors-*.arrow"))[0]
    sound = shard.read_bytes()
    at = sound.index((batch(0, 1) * 4).tobytes())
    shard.write_bytes(sound[:at] + bytes([sound[at] ^ 1]) + sound[at + 1 :])
    assert merge_run(open_run(run), out).findings["corrupt"]["num_problems"] > 0
    shard.write_bytes(sound)
    report = merge_run(open_run(run), out)
    assert report.num_problems == 0
    assert_is_merge(out, run)


def test_two_merges_at_once_are_refused(tmp_path: Path) -> None:
    run, out = open_run(make_small_run(tmp_path / "run")), tmp_path / "out"
    with (
        open_output(out, run, {"loss": "mean", "layouts": []}),
        pytest.raises(WriteError, match="another merge works in this folder"),
    ):
        merge_run(run, out)
    merge_run(run, out)


def test_findings_of_kept_units_are_said_again(tmp_path: Path) -> None:
    run, out = make_small_run(tmp_path / "run", steps=4), tmp_path / "out"
    grow(run, [4, 5], ranks=[0], name="20260103-000000-host-3")
    first = merge_run(open_run(run), out)
    assert first.findings["partial"]["num_problems"] > 0
    again = merge_run(open_run(run), out)
    assert again.num_kept_units == again.num_units
    assert again.findings == first.findings
    assert content(open_run(out)) == content(open_run(out))
