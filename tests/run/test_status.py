"""A run that is watched while it is under way: ranks that begin, begin again, fall silent, die and end."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recorder.errors import NotARunError
from recorder.format.rundir import STATUS, STATUS_BYTES, encode_manifest, encode_status
from recorder.read.writers import RecordedWriter
from recorder.run.status import RankNow, RunWatch
from recorder.storage.locations import LocalStore
from tests.rigs.handmade import HandmadeWriter, make_run

HERE = os.uname().nodename


def show(run: Path, rank: int, writer: str = "000000-a", *, age_s: float = 0.0, **facts: Any) -> Path:
    """One status as a writer of this process leaves it."""
    directory = run / f"rank={rank:05d}" / writer
    directory.mkdir(parents=True, exist_ok=True)
    common = {"rank": rank, "host": HERE, "pid": os.getpid(), "state": "recording", "interval_s": 2.0, "step": 5}
    path = directory / STATUS
    path.write_bytes(encode_status({**common, "started_ns": 1, **facts}))
    seen_ns = time.time_ns() - round(age_s * 1e9)
    os.utime(path, ns=(seen_ns, seen_ns))
    return path


def look(run: Path) -> RankNow:
    (found,) = RunWatch(run).look()
    return found


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run")


@pytest.fixture(scope="module")
def dead_pid() -> int:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


BEGUN = "000000-0123456789ab"
"""The name of a writer's directory, which alone says that it is one."""


def test_the_state_of_a_rank_is_what_its_writer_and_its_process_show(run: Path, dead_pid: int) -> None:
    show(run, 0)
    show(run, 1, state="closed", pid=dead_pid)
    show(run, 2, pid=dead_pid)
    show(run, 3, age_s=60)
    show(run, 4, host="elsewhere", pid=dead_pid)
    show(run, 5, host="elsewhere", pid=dead_pid, age_s=60)
    show(run, 6, state="failed")
    (run / "rank=00007" / BEGUN).mkdir(parents=True)
    (run / "rank=00008").mkdir()
    (run / "rank=00009" / BEGUN).mkdir(parents=True)  # killed before its first word
    os.utime(run / "rank=00009" / BEGUN, (time.time() - 90, time.time() - 90))
    states = {one.rank: one.state for one in RunWatch(run).look()}
    assert states == {
        **{0: "recording", 1: "closed", 2: "killed", 3: "silent", 4: "recording", 5: "silent", 6: "failed"},
        **{7: "starting", 9: "silent"},
    }
    assert 59 < RunWatch(run).look()[3].silent_s < 89
    assert 89 < RunWatch(run).look()[-1].silent_s < 120


def test_a_zombie_is_dead(run: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    show(run, 0, pid=child.pid)
    until_s = time.monotonic() + 20
    while look(run).state != "killed" and time.monotonic() < until_s:
        time.sleep(0.05)
    assert look(run).state == "killed"
    child.wait()


def test_ranks_that_begin_later_begin_again_and_end_are_followed(run: Path, dead_pid: int) -> None:
    watch = RunWatch(run)
    assert watch.look() == []
    show(run, 1, pid=dead_pid, step=30)
    assert [(one.rank, one.state) for one in watch.look()] == [(1, "killed")]
    show(run, 0)
    show(run, 1, "000001-b", attempt=1, step=20, started_ns=9)
    first, second = watch.look()
    assert (first.rank, first.num_writers) == (0, 1)
    assert (second.state, second.status.step, second.num_writers, second.num_alive) == ("recording", 20, 2, 1)
    show(run, 1, "000001-b", attempt=1, step=40, started_ns=9, state="closed")
    assert [one.state for one in watch.look()] == ["recording", "closed"]


def test_two_writers_of_a_rank_at_once_are_told(run: Path) -> None:
    show(run, 0, "000000-a")
    show(run, 0, "000000-b", started_ns=2, step=9)
    assert (look(run).num_alive, look(run).status.step) == (2, 9)


def test_a_torn_status_leaves_what_was_known(run: Path) -> None:
    watch = RunWatch(run)
    path = show(run, 0, step=7)
    watch.look()
    good = encode_status({"step": 8})
    for torn in (b"", good[:100], good[:300] + b"\0" * (STATUS_BYTES - 300), good.replace(b'"step":8', b'"step":9')):
        path.write_bytes(torn)
        assert [one.status.step for one in watch.look()] == [7]


def test_what_has_not_changed_is_not_read_again(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """4,096 ranks are as many files, and most of a page's time was to read and parse those of before."""
    watch, path, read = RunWatch(run), show(run, 0, step=7, age_s=60), LocalStore.read_json
    asked: list[tuple[Any, ...]] = []
    show(run, 1, step=7)

    def counted(*words: Any) -> Any:
        asked.append(words)
        return read(*words)

    monkeypatch.setattr(LocalStore, "read_json", counted)
    assert [one.status.step for one in watch.look()] == [7, 7] and len(asked) == 2
    assert [one.status.step for one in watch.look()] == [7, 7]
    assert [path.parts[-3] for _, path, _ in asked[2:]] == ["rank=00001"], "a clock may not tell two quick writes"
    seen_ns = path.stat().st_mtime_ns + 1
    path.write_bytes(encode_status({"step": 8}))
    os.utime(path, ns=(seen_ns, seen_ns))
    assert [one.status.step for one in watch.look()] == [8, 7]
    shown = {"rank=00000/000000-a": (time.time_ns(), {"step": 9, "interval_s": 2.0, "host": "elsewhere"})}
    monkeypatch.setattr(LocalStore, "shown_statuses", lambda self, run: shown)
    (first,), (second,) = watch.look(), watch.look()
    assert first.status.step == 9 and second.status is first.status, "nor is the document of a node parsed again"


def test_links_pipes_and_large_files_are_no_status(run: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(encode_status({"step": 99}))
    for rank in range(4):
        (run / f"rank={rank:05d}" / BEGUN).mkdir(parents=True)
    (run / "rank=00000" / BEGUN / STATUS).symlink_to(secret)
    os.mkfifo(run / "rank=00001" / BEGUN / STATUS)
    (run / "rank=00002" / BEGUN / STATUS).write_bytes(b" " * (1 << 20) + secret.read_bytes())
    (run / "rank=00003" / BEGUN / STATUS).mkdir()
    found = RunWatch(run).look()
    assert [(one.rank, one.state, one.status.has_step) for one in found] == [(n, "starting", False) for n in range(4)]
    (run / "rank=00004").symlink_to(run / "rank=00000")
    with pytest.raises(NotARunError, match="rank=00004: is a symbolic link"):
        RunWatch(run).look()


NUMBERS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text(max_size=5)
)
JSON = st.recursive(
    NUMBERS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=8,
)  # small: drawing what is large took longer than Hypothesis waits on a busy machine
MEMBERS = (
    *("attempt", "state", "host", "pid", "started_ns", "interval_s", "step", "observed", "written", "dropped"),
    *("written_bytes", "used_bytes", "max_bytes", "free_bytes", "pool_bytes", "pool_used_bytes", "waited_s"),
    *("longest_wait_s", "queue_length", "recent"),
)


@given(members=st.dictionaries(st.sampled_from(MEMBERS), JSON))
def test_nonsense_is_zero_and_never_an_error(members: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> None:
    run = tmp_path_factory.getbasetemp() / "nonsense"
    directory = run / "rank=00000" / "w"
    directory.mkdir(parents=True, exist_ok=True)
    facts = {"format": "recorder", "version": [1, 1], **members}
    (directory / STATUS).write_bytes(encode_manifest(facts)[:STATUS_BYTES])
    status = look(run).status
    assert 0 <= status.steps_per_s < 1e20 and 0 <= status.bytes_per_s < 1e30 and 0 <= status.waited_s < 1e13
    assert all(type(count) is int and count > 0 for count in status.dropped.values())


def test_a_writer_without_a_status_is_known_by_its_manifest(run: Path) -> None:
    writer = HandmadeWriter(run, 0)
    writer.finish(state="recording", host=HERE, pid=os.getpid(), attempt=3)
    found = look(run)
    assert (found.state, found.status.attempt, found.status.has_step) == ("recording", 3, False)
    watch = RunWatch(run)
    watch.look()
    writer.finish(state="closed")
    assert [one.state for one in watch.look()] == ["closed"]


def test_a_run_that_is_removed_is_an_error_of_one_line(run: Path) -> None:
    watch = RunWatch(run)
    watch.look()
    for path in sorted(run.rglob("*"), reverse=True):
        path.unlink()
    run.rmdir()
    with pytest.raises(NotARunError, match="cannot be listed"):
        watch.look()


def test_a_status_that_is_rewritten_shows_that_a_writer_on_another_host_lives(run: Path) -> None:
    writer = HandmadeWriter(run, 0)
    writer.finish(state="recording", host="elsewhere")
    long_ago_s = time.time() - 3600
    for path in (*writer.directory.iterdir(), writer.directory):
        os.utime(path, (long_ago_s, long_ago_s))
    assert RecordedWriter(writer.directory, 0, []).state == "unclosed"
    (writer.directory / STATUS).write_bytes(encode_status({"step": 1}))
    os.utime(writer.directory, (long_ago_s, long_ago_s))
    assert RecordedWriter(writer.directory, 0, []).state == "recording"
