"""Runs that are made without a training are as good as recorded ones, and what was put into them is found."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import recorder
from recorder.analyze.export.tables import tables_of
from recorder.analyze.first.timeline import whole_rows
from recorder.run.step_ranges import cut_rows
from tests.rigs.command_line import Cli, cli
from tests.rigs.synthetic import Shape, write_run

__all__ = ["cli"]
SHAPE = Shape(ranks=6, steps=100, modules=3, batch_rows=36, shard_rows=50, nan=(40, 4), differs=(70, 1))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("synthetic") / "run"
    write_run(path, SHAPE)
    return path


def test_it_is_sound_and_whole(run: Path, cli: Cli) -> None:
    verified = cli("verify", run)
    assert verified.exit_code == 0 and "no faults" in verified.out
    told = cli("doctor", run, "--strict")
    assert told.exit_code == 0
    assert all(line.startswith("ok ") for line in told.out.splitlines())
    opened = recorder.open_run(run)
    assert (opened.num_rows, len(opened.ranks), opened.steps) == (6 * 10 * 9, 6, list(range(0, 100, 10)))
    assert all(len(writer.shards) == 2 for writer in opened.writers)
    assert (
        len({id(writer.manifest.members["roots"]) for writer in opened.writers}) == 1
    )  # in memory once, as each lists all ranks


def test_both_faults_are_found(run: Path) -> None:
    found = recorder.first(recorder.open_run(run))
    assert found.nonfinite is not None and found.replica is not None
    value = found.nonfinite.value
    assert (value.module_path, value.site, value.step, value.rank) == ("blocks.1", "output", 40, 4)
    assert (found.num_nonfinite, found.nonfinite.num_steps_healthy) == (1, 4)
    value = found.replica.value
    assert (value.module_path, value.site, value.step, value.rank) == ("blocks.2", "param", 70, 1)
    assert found.replica.groups == [[0, 2, 3, 4, 5], [1]]
    assert found.num_compared == 10 * 2 * 3
    assert found.replica.last_equal is not None and found.replica.last_equal.step == 60


@pytest.mark.parametrize("rows", [1, 100, 200])
def test_ranges_of_steps_find_the_same(run: Path, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = recorder.first(recorder.open_run(run))
    monkeypatch.setattr("recorder.analyze.first.first.RANGE_ROWS", rows)
    assert recorder.first(recorder.open_run(run)) == whole


@pytest.mark.parametrize("is_full", [False, True], ids=["no folder", "no room"])
def test_ranges_find_the_same_without_temporary_files(
    run: Path, is_full: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = recorder.first(recorder.open_run(run))
    monkeypatch.setattr("recorder.analyze.first.first.RANGE_ROWS", 100)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path if is_full else tmp_path / "nowhere"))
    if is_full:
        monkeypatch.setattr("recorder.run.step_ranges._BYTES_A_ROW", 1 << 60)
    assert recorder.first(recorder.open_run(run)) == whole
    assert list(tmp_path.iterdir()) == []


def test_a_range_without_rows_has_no_tables(run: Path) -> None:
    opened = recorder.open_run(run)
    with cut_rows(opened, [(0, 1000), (1000, 1001)], whole_rows) as tables_of:
        assert sum(table.num_rows for table in tables_of((0, 1000))) == opened.num_rows
        assert list(tables_of((1000, 1001))) == []


def test_its_table_of_rows_has_every_row(run: Path) -> None:
    assert sum(len(part) for _, part in tables_of(recorder.open_run(run), ["rows"], max_rows=100)) == 6 * 10 * 9


def test_a_run_without_faults_has_none(tmp_path: Path) -> None:
    write_run(tmp_path / "run", Shape(ranks=2, steps=20, modules=2))
    assert not recorder.first(recorder.open_run(tmp_path / "run")).is_found


def test_the_command_makes_one(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "scripts.benchmarks", "synthetic", str(tmp_path / "run")]
    words += ["--ranks", "2", "--steps", "30", "--modules", "1", "--jobs", "1", "--nan-step", "20", "--nan-rank", "1"]
    done = subprocess.run(words, cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and ": 18 rows, " in done.stdout, done.stderr
    first = recorder.first(recorder.open_run(tmp_path / "run")).nonfinite
    assert first is not None and (first.value.step, first.value.rank) == (20, 1)
    refused = subprocess.run(
        [*words[:4], str(tmp_path / "other"), "--ranks", "2", "--steps", "30", "--nan-step", "21", "--nan-rank", "1"],
        cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert refused.returncode == 2 and "no row is recorded there" in refused.stderr


@pytest.mark.slow
def test_the_costs_of_a_small_one_are_measured(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "scripts.benchmarks", "scale", "--sizes", "4x100,8x100"]
    words += ["--dir", str(tmp_path), "--jobs", "1", "--json", str(tmp_path / "f.json")]
    done = subprocess.run(words, cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads((tmp_path / "f.json").read_text())
    assert len(figures) == 12 and all(one["peak_anon_bytes"] > 1e7 and one["seconds"] > 0 for one in figures)
    assert "| 4x100 | 8x100 | 2 times | first |" in done.stdout
