"""Ranges are worked on by the workers of any executor, which are refused where they would answer otherwise."""

from __future__ import annotations

import multiprocessing
import socket
import struct
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from pathlib import Path

import pyarrow as pa
import pytest

import recorder
from recorder.analyze.check.check import check
from recorder.analyze.stats import statistics
from recorder.errors import ClusterError
from recorder.run import step_ranges
from recorder.run.selection import Selection
from recorder.run.step_ranges import cut_evenly, cut_rows, map_serially, spread_over
from tests.rigs.merging import make_small_run


@pytest.fixture(scope="module")
def executor() -> Iterator[Executor]:
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as executor:
        yield executor


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> recorder.Run:
    monkeypatch.setattr("recorder.run.step_ranges.MAX_ROWS", 20)
    return recorder.open_run(make_small_run(tmp_path / "run", steps=6))


def test_steps_of_which_only_the_sum_of_rows_is_known_are_cut_within_the_bound() -> None:
    assert cut_evenly(2, 12, 100, 40) == [(2, 6), (6, 10), (10, 12)]
    assert cut_evenly(2, 4, 100, 40) == [(2, 3), (3, 4)], "a step is never cut"
    assert cut_evenly(2, 4, 0, 40) == cut_evenly(2, 4, 40, 40) == [(2, 4)]


def test_processes_answer_as_this_one_does(executor: Executor, run: recorder.Run) -> None:
    here = statistics(run, Selection(), by=["step"])
    there = statistics(run, Selection(), by=["step"], mapper=spread_over(executor, 2))
    assert there.table.equals(here.table) and there.notes == here.notes


def cut_in_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recorder.analyze.check.reading.RANGE_ROWS", 20)
    monkeypatch.setattr("recorder.analyze.first.replicas.RANGE_ROWS", 20)


@pytest.mark.parametrize("column", ["time_ns", "l2"])
def test_damage_is_said_once_and_leaves_out_the_same_rows_whichever_process_meets_it(
    executor: Executor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, column: str
) -> None:
    """`time_ns` is read for the replicas alone, and `l2` for them and for the rules."""
    cut_in_ranges(monkeypatch)
    path = make_small_run(tmp_path / "run", steps=6)
    value = recorder.open_run(path).table([column], steps=(3, 4)).column(column).drop_null()[0].as_py()
    content = struct.pack("<d" if column == "l2" else "<q", value)
    shard = next(one for one in path.rglob("tensors-*.arrow") if content in one.read_bytes())
    shard.write_bytes(shard.read_bytes().replace(content, bytes(byte ^ 1 for byte in content), 1))
    for index in path.rglob("*.index*"):
        index.unlink()
    answers = []
    for mapper in (map_serially, spread_over(executor, 2)):
        caplog.clear()
        run = recorder.open_run(path)
        answers.append((check(run, mapper=mapper), run.problems, caplog.messages))
    assert answers[0] == answers[1]
    assert len(answers[0][1]) == len(answers[0][2]) == 1


def test_processes_read_for_check(executor: Executor, run: recorder.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    cut_in_ranges(monkeypatch)
    here = check(run)
    assert check(run, mapper=spread_over(executor, 2)) == here
    monkeypatch.setattr(step_ranges, "versions", lambda: {"pyarrow": "1.0"})
    with pytest.raises(ClusterError, match="install the same version"):
        check(run, mapper=spread_over(executor, 2))


def test_an_executor_that_ended_is_no_damage(run: recorder.Run) -> None:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as ended:
        pass
    with pytest.raises(RuntimeError, match="shutdown"):
        statistics(run, Selection(), by=["step"], mapper=spread_over(ended, 1))


def test_a_process_of_other_versions_is_refused(
    executor: Executor, run: recorder.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_ranges, "versions", lambda: {"pyarrow": "1.0"})
    expected = rf"worker {socket.gethostname()} .*but this machine has 1.0; install the same version"
    with pytest.raises(ClusterError, match=expected):
        statistics(run, Selection(), by=["step"], mapper=spread_over(executor, 2))


@pytest.mark.parametrize(("other", "said"), [("none", "does not see the run"), ("another", "sees another run at")])
def test_a_process_that_sees_other_files_is_refused(
    executor: Executor, run: recorder.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: str, said: str
) -> None:
    """It is told another path, as under which another file system may be mounted."""
    if other == "another":
        make_small_run(tmp_path / "another", steps=2)
    opened = step_ranges.RunAsOpened.of(run)
    wrong = opened._replace(path=str(tmp_path / other))
    monkeypatch.setattr(step_ranges.RunAsOpened, "of", classmethod(lambda cls, run: wrong))
    with pytest.raises(ClusterError, match=f"worker {socket.gethostname()} .*{said}"):
        statistics(run, Selection(), by=["step"], mapper=spread_over(executor, 2))


def test_a_reader_that_yields_no_row_leaves_every_range_empty(tmp_path: Path) -> None:
    run = recorder.open_run(make_small_run(tmp_path / "run"))
    ranges = [(0, 1), (1, 100)]
    empty = pa.table({"step": pa.array([], pa.int64())})
    with cut_rows(run, ranges, lambda writers, steps: iter([empty, empty])) as tables_of:
        assert [sum(table.num_rows for table in tables_of(steps)) for steps in ranges] == [0, 0]
