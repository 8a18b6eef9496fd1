"""The catalog: all rows of all ranks as one Parquet file, without their values."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from recorder.analyze.export.export import write_catalog
from recorder.columns import METADATA_COLUMNS
from recorder.errors import WriteError
from recorder.format.rundir import index_name
from recorder.run.run import open_run
from tests.rigs.command_line import Cli, cli
from tests.rigs.handmade import HandmadeWriter, make_row, make_run
from tests.rigs.merging import add_steps, make_small_run, roots

__all__ = ["cli"]
ORDER = [(name, "ascending") for name in ("attempt", "step", "rank", "seq")]


def contents(path: Path) -> Any:
    return pq.read_table(path)


def test_it_has_every_row_with_run_and_writer(tmp_path: Path) -> None:
    run = open_run(make_small_run(tmp_path / "run"))
    done = write_catalog(run, tmp_path / "c.parquet")
    found = contents(tmp_path / "c.parquet")
    assert found.column_names == ["run_id", "writer", *METADATA_COLUMNS]
    assert found.select(METADATA_COLUMNS).equals(
        run.table(METADATA_COLUMNS).cast(found.select(METADATA_COLUMNS).schema)
    )
    assert set(found.column("run_id").to_pylist()) == {run.run_id}
    writers = set(zip(found.column("rank").to_pylist(), found.column("writer").to_pylist(), strict=True))
    assert writers == {(writer.rank, writer.name) for writer in run.writers}
    assert (done.num_rows, done.problems, done.num_superseded) == (run.num_rows, [], 0)


@pytest.mark.parametrize("rows_a_block", [1, 10, 30])
def test_small_blocks_hold_the_same_rows_in_order(tmp_path: Path, rows_a_block: int) -> None:
    run = open_run(make_small_run(tmp_path / "run", ranks=(0, 1, 2)))
    write_catalog(run, tmp_path / "whole.parquet")
    write_catalog(run, tmp_path / "c.parquet", rows_a_block=rows_a_block)
    found, whole = contents(tmp_path / "c.parquet"), contents(tmp_path / "whole.parquet")
    assert found.sort_by(ORDER).equals(whole)
    parquet = pq.ParquetFile(tmp_path / "c.parquet")
    assert parquet.num_row_groups > 1
    for number in range(parquet.num_row_groups):
        group = parquet.read_row_group(number)
        assert group.sort_by(ORDER).equals(group)


def test_row_groups_tell_their_steps_and_ranks(tmp_path: Path) -> None:
    run = open_run(make_small_run(tmp_path / "run"))
    write_catalog(run, tmp_path / "c.parquet", rows_a_block=15)
    metadata = pq.ParquetFile(tmp_path / "c.parquet").metadata
    names = metadata.schema.names
    spans = set()
    for number in range(metadata.num_row_groups):
        columns = [metadata.row_group(number).column(names.index(name)) for name in ("step", "rank")]
        assert {column.compression for column in columns} == {"ZSTD"}
        spans.add(tuple((column.statistics.min, column.statistics.max) for column in columns))
    assert spans == {((first, last), (rank, rank)) for first, last in ((0, 1), (2, 3)) for rank in (0, 1)}


def test_steps_that_a_restart_did_again_are_left_out(tmp_path: Path) -> None:
    path = make_small_run(tmp_path / "run")  # steps 0 to 3
    for rank in (0, 1):
        writer = HandmadeWriter(path, rank, "again")
        add_steps(writer, [2, 3, 4])
        writer.finish(roots=roots(), attempt=1, started_ns=1_800_000_000_000_000_000, step_source="optimizer")
    run = open_run(path)
    done = write_catalog(run, tmp_path / "c.parquet", rows_a_block=20)
    found = contents(tmp_path / "c.parquet").group_by("step").aggregate([("writer", "distinct")]).sort_by("step")
    first = run.writers[0].name
    assert found.to_pylist() == [
        {"step": step, "writer_distinct": ["again" if step > 1 else first]} for step in range(5)
    ]
    assert done.num_superseded == run.num_rows - done.num_rows == 2 * 2 * 7


def test_a_merged_run_has_one_too(tmp_path: Path, cli: Cli) -> None:
    cli("merge", make_small_run(tmp_path / "run"), "-o", tmp_path / "merged", "--jobs", 1)
    run = open_run(tmp_path / "merged")
    done = write_catalog(run, tmp_path / "c.parquet")
    assert done.num_rows == run.num_rows and contents(tmp_path / "c.parquet").column("rank").null_count > 0


def test_damage_is_named_and_the_rest_is_written(tmp_path: Path, cli: Cli) -> None:
    path = make_small_run(tmp_path / "run")
    shard = next(one for one in sorted(path.glob("rank=00001/*/stats-*.arrow")))
    shard.with_name(index_name(shard.name)).unlink()
    data = np.frombuffer(shard.read_bytes(), np.uint8).copy()
    data[len(data) // 3 : len(data) // 2] ^= 0xFF
    shard.write_bytes(data.tobytes())
    result = cli("catalog", path, "-o", tmp_path / "c.parquet")
    assert result.exit_code == 1 and f"finding: {shard}" in result.err
    assert contents(tmp_path / "c.parquet").num_rows == open_run(make_small_run(tmp_path / "sound")).num_rows - 2


def test_the_command_says_what_it_wrote(tmp_path: Path, cli: Cli) -> None:
    path = make_small_run(tmp_path / "run")
    result = cli("catalog", path, "-o", tmp_path / "c.parquet")
    assert (result.exit_code, result.err) == (0, "")
    assert result.out.startswith(f"{tmp_path / 'c.parquet'}: 56 rows of 2 ranks, ")
    again = cli("catalog", path, "-o", tmp_path / "c.parquet")
    assert again.exit_code == 2 and "exists; choose another name" in again.err
    told = cli("catalog", path, "-o", tmp_path / "d.parquet", "--json").json
    assert (told["rows"], told["problems"], told["superseded"]) == (56, [], 0)


@pytest.mark.parametrize(
    "options",
    [["--to", "dcp"], ["--step", "1"], ["--loss", "sum"], ["--layout", "*=replicate"], ["--jobs", "2"],
     ["--partial"], ["--what", "grad"], ["--root", "model"]],
)  # fmt: skip
def test_options_that_mean_nothing_beside_it_are_refused(tmp_path: Path, cli: Cli, options: list[str]) -> None:
    run = make_small_run(tmp_path / "run")
    result = cli("catalog", run, "-o", tmp_path / "c.parquet", *options)
    assert result.exit_code == 2 and f"No such option: {options[0]}" in result.err
    assert os.listdir(tmp_path) == ["run"]


def test_a_merge_to_nowhere_is_refused(tmp_path: Path, cli: Cli) -> None:
    result = cli("merge", make_small_run(tmp_path / "run"))
    assert result.exit_code == 2 and "Missing option '-o' / '--out'" in result.err


def test_a_run_is_never_written_into(tmp_path: Path) -> None:
    run = open_run(make_small_run(tmp_path / "run"))
    with pytest.raises(WriteError, match="lies inside the run"):
        write_catalog(run, run.path / "c.parquet")


def test_an_error_leaves_nothing_behind(tmp_path: Path) -> None:
    run = open_run(make_small_run(tmp_path / "run"))

    def fail(done: int) -> None:
        raise RuntimeError("the bar broke")

    with pytest.raises(RuntimeError):
        write_catalog(run, tmp_path / "c.parquet", report=fail)
    assert os.listdir(tmp_path) == ["run"]


_HALFWAY = """
import sys, time
from recorder.analyze.export.export import write_catalog
from recorder.analyze.export.export import Export
from recorder.run.selection import GlobalOptions, Selection
from recorder.run.run import open_run

def halfway(done):
    print("halfway", flush=True)
    time.sleep(120)

run, out = open_run(sys.argv[2]), sys.argv[3]
if sys.argv[1] == "catalog":
    write_catalog(run, out, report=halfway)
else:
    from pathlib import Path
    Export(run, "npz", Selection(), GlobalOptions()).write(Path(out), report=halfway)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("what", ["catalog", "export"])
def test_a_signal_halfway_leaves_nothing_behind(tmp_path: Path, what: str, number: signal.Signals) -> None:
    run = make_run(tmp_path / "run", world_size=1)
    writer = HandmadeWriter(run, 0)
    writer.add_shard([[make_row(0, [1.0, 2.0])]])
    writer.finish()
    words = [sys.executable, "-c", _HALFWAY, what, str(run), str(tmp_path / "out")]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as child:
        try:
            assert child.stdout is not None and child.stdout.readline() == "halfway\n"
            assert any(name.startswith(".recorder-") for name in os.listdir(tmp_path))
            child.send_signal(number)
            ended = child.wait(timeout=60)
        finally:
            child.kill()
    assert ended == (143 if number == signal.SIGTERM else -signal.SIGINT)
    assert os.listdir(tmp_path) == ["run"]


def test_a_statistic_over_the_cluster_is_one_query(tmp_path: Path) -> None:
    duckdb = pytest.importorskip("duckdb")
    run = open_run(make_small_run(tmp_path / "run"))
    write_catalog(run, tmp_path / "c.parquet")
    query = f"SELECT step, max(l2) FROM '{tmp_path / 'c.parquet'}' WHERE site = 'grad' GROUP BY step ORDER BY step"
    grads = run.table(["step", "l2"], pc.field("site") == "grad")
    expected = grads.group_by("step").aggregate([("l2", "max")]).sort_by("step")
    assert duckdb.sql(query).fetchall() == list(zip(*(expected.column(n).to_pylist() for n in (0, 1)), strict=True))
    assert pa.types.is_string(pq.read_schema(tmp_path / "c.parquet").field("writer").type)
