"""The tables of runs: every row that counts, in SQL and in an Iceberg catalog, which stays as the runs are."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sqlite3
import sqlite3.dbapi2
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import recorder
from recorder.analyze.export import tables
from recorder.analyze.export.tables import TABLES, RunTables, ask, tables_of
from recorder.columns import METADATA_COLUMNS
from recorder.errors import LookupFailedError
from recorder.format.rundir import index_name
from recorder.run.run import Run, open_run
from tests.daemon.support import ship
from tests.rigs.command_line import Cli, cli, recorded
from tests.rigs.handmade import HandmadeWriter, make_row, make_run
from tests.rigs.merging import grow, make_small_run, roots
from tests.rigs.server import BUCKET, StoreServer
from tests.rigs.stores import server, store

__all__ = ["cli", "recorded", "server", "store"]
COUNT = "select run_id, count(*) from rows group by all order by all"


def table(run: Run, name: str, max_rows: int = 1 << 19) -> Any:
    parts = [part for _, part in tables_of(run, [name], max_rows=max_rows)]
    return pa.concat_tables([TABLES[name].empty_table(), *parts])


@pytest.mark.parametrize("max_rows", [1, 30, 1 << 19])
def test_rows_has_every_row_of_the_run(tmp_path: Path, max_rows: int) -> None:
    run = open_run(make_small_run(tmp_path / "run"))
    order = [(name, "ascending") for name in ("attempt", "step", "rank", "seq")]
    found = table(run, "rows", max_rows).sort_by(order).select(METADATA_COLUMNS)
    assert found.equals(run.table(METADATA_COLUMNS).cast(found.schema))


def test_steps_that_a_restart_did_again_are_there_once(tmp_path: Path) -> None:
    path = make_small_run(tmp_path / "run")  # steps 0 to 3
    for rank in (0, 1):
        writer = HandmadeWriter(path, rank, "again")
        of_step = [[make_row(step, [1.0], step=step, rank=rank, attempt=1)] for step in (2, 3, 4)]
        writer.add_shard(of_step)
        writer.finish(roots=roots(), attempt=1, started_ns=1_800_000_000_000_000_000, step_source="optimizer")
    attempts = table(open_run(path), "rows", 20).group_by("step").aggregate([("attempt", "distinct")]).sort_by("step")
    assert [row["attempt_distinct"] for row in attempts.to_pylist()] == [[0], [0], [1], [1], [1]]


def test_runs_findings_and_probe_say_what_the_run_says(recorded: Path) -> None:
    run = recorder.open_run(recorded)
    (facts,) = table(run, "runs").to_pylist()
    assert (facts["num_rows"], facts["num_ranks"], facts["state"]) == (run.num_rows, len(run.ranks), "closed")
    assert (facts["size_bytes"], facts["num_probe_rows"], facts["num_problems"]) == (run.size_bytes, 0, 0)
    assert facts["hosts"] == sorted({writer.manifest.host or "" for writer in run.writers})
    found = table(run, "findings").to_pylist()
    assert [(one["rule"], one["step"], one["ranks"]) for one in found] == [
        (one.rule, one.step, list(one.ranks)) for one in recorder.check(run).findings
    ]
    assert all(one["hosts"] == facts["hosts"] for one in found if one["ranks"])
    assert table(run, "probe").num_rows == run.probe().num_rows


def test_a_catalog_is_made_once_and_follows_a_run_that_grows(tmp_path: Path, cli: Cli) -> None:
    for name in ("a", "b"):
        make_small_run(tmp_path / "runs" / name)
    made = cli("catalog", tmp_path / "runs")
    where = tmp_path / "runs" / "_catalog"
    assert (made.exit_code, made.err) == (0, "")
    assert made.out == f"{where}: 2 runs registered, 112 rows; 0 were registered already\n"
    grow(tmp_path / "runs" / "b", [4, 5])
    again = cli("catalog", tmp_path / "runs", "--json").json
    assert (again["registered"], again["unchanged"]) == ({str(tmp_path / "runs" / "b"): 84}, 1)
    assert ask(COUNT, RunTables(str(where))).rows == [("a", 56), ("b", 84)]
    assert cli("sql", COUNT, tmp_path / "runs", "--json").json["rows"] == [["a", 56], ["b", 84]]


def test_what_ls_and_the_tables_count_is_the_same_and_foreign_shards_are_problems(tmp_path: Path, cli: Cli) -> None:
    run = make_run(tmp_path / "runs" / "run")
    writer = HandmadeWriter(run)
    writer.add_shard([[make_row(0, [1.0]), make_row(1, [1.0], step=1)]])
    writer.add_shard([[make_row(2, np.ones(5), site="probe", name="output")]], kind="probe")
    writer.finish(roots=roots())
    listed = cli("ls", run, "--json").json
    asked = "select num_rows, num_probe_rows, size_bytes, num_problems from runs"
    expected = [listed["rows"], listed["probe_rows"], listed["bytes"], 0]
    assert cli("sql", asked, tmp_path / "runs", "--json").json["rows"] == [expected]
    assert cli("catalog", tmp_path / "runs").exit_code == 0
    where = tmp_path / "runs" / "_catalog"
    assert cli("sql", asked, "--catalog", where, "--json").json["rows"] == [expected]
    assert "0 runs registered" in cli("catalog", tmp_path / "runs").out
    (writer.directory / "mine.arrow").write_bytes(b"x")
    assert cli("sql", asked, tmp_path / "runs", "--json").json["rows"] == [[*expected[:3], 1]]


def test_a_folder_and_a_catalog_are_not_asked_together(tmp_path: Path, cli: Cli) -> None:
    told = cli("sql", COUNT, tmp_path, "--catalog", "there")
    assert (
        told.exit_code == 2
        and "--catalog there: the catalog has runs of its own; leave out the folder or --catalog" in told.err
    )


def test_a_catalog_that_another_program_holds_is_said(
    tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_small_run(tmp_path / "runs" / "a")
    assert cli("catalog", tmp_path / "runs").exit_code == 0
    where = tmp_path / "runs" / "_catalog"
    with contextlib.closing(sqlite3.connect(where / "catalog.db", isolation_level=None)) as holder:
        holder.execute("begin exclusive")
        # SQLite itself waits for 5 s, several times.
        monkeypatch.setattr(sqlite3.dbapi2, "connect", functools.partial(sqlite3.connect, timeout=0.1))
        for words in (("catalog", tmp_path / "runs"), ("sql", COUNT, "--catalog", where)):
            told = cli(*words)
            assert told.exit_code == 2 and told.err.count("\n") == 1
            assert f"{where}: the catalog's database does not answer (database is locked)" in told.err


def test_other_programs_read_it_and_its_files_lie_by_run_and_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POLARS_ICEBERG_PLANNER", "pyiceberg")
    run = open_run(make_small_run(tmp_path / "run"))
    made = RunTables(str(tmp_path / "catalog"), is_new=True)
    assert made.register(run) == 56
    of_iceberg = made._tables["rows"]
    assert pl.scan_iceberg(of_iceberg).select(pl.len()).collect().item() == 56
    (task,) = of_iceberg.scan("run_id = 'run'").plan_files()
    assert "/run_id=run/day=1970-01-01/" in task.file.file_path
    assert pq.read_table(task.file.file_path.removeprefix("file://"), partitioning=None).num_rows == 56
    assert list(of_iceberg.scan("run_id = 'another'").plan_files()) == []


def test_a_kill_before_the_last_table_leaves_a_run_that_is_registered_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = open_run(make_small_run(tmp_path / "run"))
    plain = tables._run

    def killed(run: Run) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(tables, "_run", killed)
    with pytest.raises(KeyboardInterrupt):
        RunTables(str(tmp_path / "catalog"), is_new=True).register(run)
    monkeypatch.setattr(tables, "_run", plain)
    again = RunTables(str(tmp_path / "catalog"))
    assert not again.has(run) and ask(COUNT, again).rows == [("run", 56)]
    again.register(run)
    again = RunTables(str(tmp_path / "catalog"))
    assert again.has(run) and ask(COUNT, again).rows == [("run", 56)]


def test_small_files_are_joined_and_old_ones_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "_MAX_FILES", 1)
    made = RunTables(str(tmp_path / "catalog"), is_new=True)
    for name in ("a", "b"):
        made.register(open_run(make_small_run(tmp_path / name)))
    made.register(open_run(tmp_path / "a"))
    data = tmp_path / "catalog" / "recorder"
    made.tidy()
    assert (len(list(data.glob("runs/data/**/*.parquet"))), len(list(data.glob("rows/data/**/*.parquet")))) == (4, 3)
    monkeypatch.setattr(tables, "_KEPT", -tables._KEPT)
    time.sleep(0.01)
    made.tidy()
    assert (len(list(data.glob("runs/data/**/*.parquet"))), len(list(data.glob("rows/data/**/*.parquet")))) == (1, 2)
    assert ask(COUNT, RunTables(str(tmp_path / "catalog"))).rows == [("a", 56), ("b", 56)]


def test_a_catalog_of_an_older_version_gets_the_columns_that_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, where = open_run(make_small_run(tmp_path / "run")), str(tmp_path / "catalog")
    older = TABLES["runs"].remove(TABLES["runs"].get_field_index("hosts"))
    with monkeypatch.context() as patch:
        patch.setitem(TABLES, "runs", older)
        RunTables(where, is_new=True).register(run)
    newer = RunTables(where)
    assert ask("select run_id, hosts from runs", newer).rows == [("run", None)]
    newer.register(run)
    assert ask("select run_id, len(hosts) from runs", newer).rows == [("run", 1)]


def test_damage_is_named_and_the_rest_is_registered(tmp_path: Path, cli: Cli) -> None:
    path = make_small_run(tmp_path / "runs" / "run")
    shard = next(one for one in sorted(path.glob("rank=00001/*/stats-*.arrow")))
    shard.with_name(index_name(shard.name)).unlink()
    data = np.frombuffer(shard.read_bytes(), np.uint8).copy()
    data[len(data) // 3 : len(data) // 2] ^= 0xFF
    shard.write_bytes(data.tobytes())
    result = cli("catalog", tmp_path / "runs")
    assert result.exit_code == 1 and f"finding: {shard}" in result.err
    assert ask("select num_problems from runs", RunTables(str(tmp_path / "runs" / "_catalog"))).rows == [(1,)]


def test_a_run_that_cannot_be_read_is_said_and_a_merged_one_left_out(tmp_path: Path, cli: Cli) -> None:
    make_small_run(tmp_path / "runs" / "a")
    cli("merge", tmp_path / "runs" / "a", "-o", tmp_path / "runs" / "merged", "--jobs", 1)
    (tmp_path / "runs" / "broken").mkdir()
    (tmp_path / "runs" / "broken" / "_run.json").write_text('{"format": "recorder", "version": [9, 0], "run_id": "x"}')
    result = cli("sql", "select name from runs", tmp_path / "runs", "--json")
    assert result.exit_code == 1 and result.json["rows"] == [["a"]]
    assert "format version 9.0" in result.json["problems"][0]
    (tmp_path / "runs" / "broken" / "_run.json").write_text("{")
    result = cli("sql", "select name from runs", tmp_path / "runs", "--json")
    assert result.exit_code == 1 and result.json["rows"] == [["a"]]
    assert "_run.json" in result.json["problems"][0] and len(result.json["problems"]) == 1
    assert cli("catalog", tmp_path / "runs").exit_code == 1


def test_a_query_that_is_empty_is_refused_and_a_damaged_probe_is_said(tmp_path: Path, cli: Cli) -> None:
    path = make_small_run(tmp_path / "runs" / "run")
    refused = cli("sql", " ; ", path)
    assert refused.exit_code == 2 and "the query is empty" in refused.err
    rows = [make_row(0, np.ones(5, np.float32), step=0, site="probe", name="output", note='{"numel":4}')]
    writer = HandmadeWriter(path, rank=7)
    shard = writer.add_shard([rows], kind="probe")
    writer.finish()
    data = bytearray(shard.read_bytes())
    at = data.index(np.ones(5, np.float32).tobytes())
    data[at : at + 4] = b"\xff" * 4
    shard.write_bytes(data)
    result = cli("sql", "select count(*) from probe", path, "--json")
    assert result.exit_code == 1 and result.json["rows"] == [[0]] and str(shard) in result.json["problems"][0]


@pytest.mark.parametrize(
    ("question", "why"),
    [
        ("select nothing from rows", 'column "nothing" not found'),
        ("select from from", "syntax error"),
        ("select * from row", "Table with name row does not exist"),
        ("select * from read_text('/etc/hostname')", "disabled by configuration"),
    ],
)
def test_a_wrong_question_is_answered_in_duckdbs_words(tmp_path: Path, cli: Cli, question: str, why: str) -> None:
    result = cli("sql", question, make_small_run(tmp_path / "run"))
    assert result.exit_code == 2 and "recorder: the query: " in result.err and why in result.err


def test_no_catalog_is_said_and_what_makes_one(tmp_path: Path) -> None:
    with pytest.raises(LookupFailedError, match=r"nowhere: no catalog; `recorder catalog --catalog .*nowhere` makes"):
        RunTables(str(tmp_path / "nowhere"))
    assert not (tmp_path / "nowhere").exists()


def test_a_catalog_that_pyiceberg_is_configured_for_is_taken_by_its_name(tmp_path: Path) -> None:
    make_small_run(tmp_path / "run")
    of_it = {"TYPE": "sql", "URI": f"sqlite:///{tmp_path}/of.db", "WAREHOUSE": f"file://{tmp_path}/w"}
    environment = os.environ | {f"PYICEBERG_CATALOG__RECORDER__{name}": value for name, value in of_it.items()}

    def typed(*words: str) -> str:
        command = [sys.executable, "-m", "recorder", *words]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    assert typed("catalog", "run") == "recorder: 1 run registered, 56 rows; 0 were registered already\n"
    assert json.loads(typed("sql", COUNT, "--catalog", "recorder", "--json"))["rows"] == [["run", 56]]
    assert (tmp_path / "of.db").exists()


def test_runs_in_a_store_are_registered_in_a_catalog_on_a_disk(
    tmp_path: Path, store: StoreServer, cli: Cli, request: pytest.FixtureRequest
) -> None:
    to, catalog = f"s3://{BUCKET}/{request.node.name[:20]}", str(tmp_path / "catalog")
    make_small_run(tmp_path / "recordings" / "a")
    assert ship(tmp_path, to)[0] == 0
    refused = cli("catalog", to)
    assert refused.exit_code == 2 and "--catalog: name a folder of this machine" in refused.err
    assert cli("catalog", to, "--catalog", catalog, "--json").json["registered"] == {f"{to}/a": 56}
    with store.counting() as requests:
        assert cli("catalog", to, "--catalog", catalog, "--json").json["unchanged"] == 1
    assert requests["PUT"] == 0
    assert cli("sql", COUNT, "--catalog", catalog, "--json").json["rows"] == [["a", 56]]
    assert cli("sql", COUNT, to, "--json").json["rows"] == [["a", 56]]
