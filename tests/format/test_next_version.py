"""The format survives its next column, site and encoding, in both directions; `tests.golden.coming` has one of each.

A package that knows them reads the runs of every earlier version; today's package reads a run that has them.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

import recorder
from recorder.columns import COLUMN_OF, METADATA_COLUMNS
from recorder.errors import UnsupportedError
from recorder.format.encodings import ENCODINGS
from recorder.format.rundir import open_name
from recorder.sites import FORMAT_VERSION, PROBE, SITES
from tests.golden.coming import COLUMN, ENCODING, MINOR, MIRRORED, REPOSITORY, RUN, SITE, patched_package, updates
from tests.golden.make_coming import make
from tests.golden.test_golden import RUNS, VALUES, assert_statistics, rows_by_key, same_bits
from tests.golden.values import WORLD_SIZE, Value
from tests.rigs import jobs
from tests.rigs.command_line import Cli, cli

__all__ = ["cli"]

EVERY_VALUE = [*VALUES, *updates()]
NUM_ROWS = len(EVERY_VALUE) * WORLD_SIZE
NUM_MIRRORED = sum(value[:3] in MIRRORED for value in VALUES) * WORLD_SIZE
UNREADABLE = f"payload encoding '{ENCODING}' is unknown to this version of recorder, which reads plain, raw,"


def question(value: Value, rank: int | None) -> dict[str, Any]:
    names = ("site", "module_path", "name", "step", "phase")
    return dict(zip(names, value[:5], strict=True)) | ({} if rank is None else {"rank": rank})


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return patched_package(tmp_path_factory.mktemp("package"))


def run_with(package: Path, code: str, *arguments: str | Path) -> str:
    """What Python prints with this package first on its path, in its folder."""
    guard = f"import recorder; assert recorder.__file__ == {str(package / 'recorder/__init__.py')!r}\n"
    path = f"{package}:{REPOSITORY}"
    return jobs.succeeded(jobs.python(package, "-c", guard + code, *arguments, PYTHONPATH=path)).output


@pytest.fixture(scope="module")
def told(package: Path) -> dict[str, str]:
    """What is said of each run, by one process."""
    code = (
        "import sys; from recorder.cli.app import run_command\n"
        "for path in sys.argv[1:]:\n"
        "    for command in ('verify', 'doctor'):\n"
        "        try:\n"
        "            run_command([command, path])\n"
        "        except SystemExit as end:\n"
        "            assert not end.code\n"
        "    print('END', flush=True)\n"
    )
    return dict(zip([path.name for path in RUNS], run_with(package, code, *RUNS).split("END\n"), strict=False))


class TestPackageThatKnowsThem:
    """Each is one entry in one registry; nothing else of the package is touched."""

    def test_reads_the_runs_of_every_version(self, package: Path) -> None:
        (package / "pytest.ini").write_text("[pytest]\n")
        options = ["-q", "-c", str(package / "pytest.ini"), "--import-mode=importlib", "-p", "no:cacheprovider"]
        # That it is sound is looked at by a process of its own, with a path of its own.
        options += [f"--rootdir={REPOSITORY}", "-k", "not sound", str(REPOSITORY / "tests/golden/test_golden.py")]
        told = run_with(package, "import pytest, sys; raise SystemExit(pytest.main(sys.argv[1:]))", *options)
        assert " passed" in told

    @pytest.mark.parametrize("name", [path.name for path in RUNS])
    def test_takes_nothing_amiss_in_an_earlier_run(self, told: dict[str, str], name: str) -> None:
        said = told[name]
        assert "no faults" in said and "unknown" not in said and SITE not in said

    def test_gives_nulls_where_an_earlier_run_has_no_such_column(self, package: Path) -> None:
        code = (
            "import sys\n"
            f"for path in sys.argv[1:]: print(recorder.open_run(path).table(['{COLUMN}']).column(0).null_count)\n"
        )
        found = run_with(package, code, *RUNS).split()
        assert found == [str(len(VALUES) * WORLD_SIZE)] * len(RUNS)

    def test_reads_what_is_new(self, package: Path) -> None:
        code = (
            "import json, sys; from tests.golden import coming, test_golden\n"
            "run, numbers = recorder.open_run(sys.argv[1]), []\n"
            f"rows = run.table(['step', 'rank', 'site', 'module_path', 'name', 'phase', '{COLUMN}']).to_pylist()\n"
            "for value in [*test_golden.VALUES, *coming.updates()]:\n"
            "    for rank, wanted in enumerate(value.locals):\n"
            "        site, module_path, name, step, phase = value[:5]\n"
            "        found = run.array(module_path, site, step, name, rank, phase=phase)\n"
            "        assert test_golden.same_bits(found, wanted), value[:5]\n"
            "        (row,) = [row for row in rows if row['rank'] == rank and test_golden.key_of(row) == value[:5]]\n"
            f"        assert row['{COLUMN}'] == coming.negative_count(wanted), value[:5]\n"
            "        numbers.append(site)\n"
            "from recorder.cli.app import run_command\n"
            "print(len(numbers)); run_command(['doctor', '--strict', sys.argv[1]])\n"
        )
        told = run_with(package, code, RUN)
        assert told.split()[0] == str(NUM_ROWS)
        assert f"ok      {SITE}   all 12 values were recorded" in told
        assert "unknown" not in told


class TestReading:
    """Today's package, and a run that has them."""

    def test_the_run_is_what_its_command_makes_of_the_newest_golden_run(self, tmp_path: Path) -> None:
        make(tmp_path / "coming")
        made, committed = (sorted(p for p in run.rglob("*") if p.is_file()) for run in (tmp_path / "coming", RUN))
        assert [path.relative_to(tmp_path / "coming") for path in made] == [path.relative_to(RUN) for path in committed]
        for one, other in zip(made, committed, strict=True):
            if one.suffix == ".arrow":
                tables = [pa.ipc.open_file(path).read_all() for path in (one, other)]
                assert tables[0].equals(tables[1], check_metadata=True), "python -m tests.golden.make_coming"
            elif one.suffix == ".json":
                assert one.read_bytes() == other.read_bytes(), "python -m tests.golden.make_coming"

    def test_the_run_is_of_a_later_version_than_this_package(self) -> None:
        run = recorder.open_run(RUN)
        assert run.version == (FORMAT_VERSION[0], MINOR) > FORMAT_VERSION
        assert COLUMN not in COLUMN_OF and SITE not in SITES and ENCODING not in ENCODINGS
        assert run.unknown_columns() == {COLUMN: NUM_ROWS}

    def test_every_row_is_there_with_its_statistics(self) -> None:
        run = recorder.open_run(RUN)
        assert run.problems == []
        for rank in range(WORLD_SIZE):
            rows = rows_by_key(run, rank)
            assert set(rows) == {value[:5] for value in EVERY_VALUE}
            for value in EVERY_VALUE:
                assert_statistics(rows[value[:5]], value.locals[rank])
                assert list(rows[value[:5]]) == list(METADATA_COLUMNS)

    @pytest.mark.parametrize("rank", [0, 1, None])
    def test_every_payload_is_read_but_those_in_the_unknown_encoding(self, rank: int | None) -> None:
        run = recorder.open_run(RUN)
        for value in EVERY_VALUE:
            asked = question(value, rank)
            if value[:3] in MIRRORED:
                with pytest.raises(UnsupportedError, match=r"tensors-000000.arrow, row seq=\d+: " + UNREADABLE):
                    run.array(**asked)
            else:
                assert same_bits(run.array(**asked), value.array if rank is None else value.locals[rank]), asked

    def test_a_row_of_another_reader_is_decoded_or_refused(self) -> None:
        rows = ds.dataset(RUN, format="ipc").to_table().to_pylist()
        assert sum(row["encoding"] == ENCODING for row in rows) == NUM_MIRRORED
        for row in rows:
            if row["encoding"] == ENCODING:
                with pytest.raises(UnsupportedError, match=UNREADABLE):
                    recorder.decode(row)
            else:
                assert recorder.decode(row).shape == tuple(json.loads(row["shape"]))


class TestOtherReaders:
    """Those of docs/readers.md: they show the new column, too, which is an ordinary one."""

    def test_pandas_reads_each_file(self) -> None:
        pd = pytest.importorskip("pandas")
        frames = [pd.read_feather(path) for path in RUN.glob("*/*/*.arrow")]
        assert sum(map(len, frames)) == NUM_ROWS
        assert all(COLUMN in frame.columns for frame in frames)

    def test_a_dataset_polars_and_duckdb_read_all_of_it(self) -> None:
        duckdb, pl = pytest.importorskip("duckdb"), pytest.importorskip("polars")
        rows = ds.dataset(RUN, format="ipc")
        wanted = rows.to_table(columns=["site", COLUMN]).group_by("site").aggregate([(COLUMN, "sum")])
        expected = dict(zip(*(wanted.column(name).to_pylist() for name in ("site", f"{COLUMN}_sum")), strict=True))
        assert set(expected) == {value.site for value in EVERY_VALUE}
        lazy = pl.scan_ipc(str(RUN / "**/*.arrow")).group_by("site").agg(pl.col(COLUMN).sum()).collect()
        assert dict(lazy.iter_rows()) == expected
        assert dict(duckdb.sql(f"select site, sum({COLUMN}) from rows group by site").fetchall()) == expected

    def test_runs_of_two_versions_are_read_together_as_the_page_says(self) -> None:
        pl, num_rows = pytest.importorskip("polars"), NUM_ROWS + len(VALUES) * WORLD_SIZE
        paths = [str(path) for run in (RUNS[-1], RUN) for path in sorted(run.glob("*/*/*s-*.arrow"))]
        table = ds.dataset(paths, format="ipc").to_table()
        assert COLUMN not in table.column_names and table.num_rows == num_rows
        parts = [ds.dataset(run, format="ipc") for run in (RUNS[-1], RUN)]
        table = ds.dataset(parts, schema=pa.unify_schemas([part.schema for part in parts]))
        table = table.to_table(filter=ds.field("site") != PROBE)
        assert COLUMN in table.column_names and table.num_rows == num_rows
        with pytest.raises(pl.exceptions.SchemaError, match=COLUMN):
            pl.scan_ipc(paths).collect()
        frames = [pl.scan_ipc(str(run / "**/*s-*.arrow")) for run in (RUNS[-1], RUN)]
        assert pl.concat(frames, how="diagonal").collect().shape == (num_rows, len(COLUMN_OF) + 1)

    def test_its_own_dataset_has_the_columns_that_it_knows(self) -> None:
        assert recorder.open_run(RUN).dataset().to_table().column_names == list(COLUMN_OF)


class TestCommands:
    def test_ls_lists_the_run_and_the_unknown_site(self, cli: Cli) -> None:
        assert f"{recorder.open_run(RUN).name}  " in cli("ls", RUN.parent).out
        result = cli("ls", RUN, "--json")
        assert result.exit_code == 0
        assert all(SITE in writer["sites"] for writer in result.json["writers"])

    def test_show_shows_the_unknown_site_behind_the_others(self, cli: Cli) -> None:
        result = cli("show", RUN, "gain")
        assert result.exit_code == 0
        lines = [line for line in result.out.splitlines() if line.startswith(("optim ", f"{SITE} "))]
        assert [line.split()[:2] for line in lines[-2:]] == [[SITE, "weight"]] * 2
        assert cli("show", RUN, "gain", "--site", SITE).exit_code == 0

    def test_verify_finds_no_fault(self, cli: Cli) -> None:
        result = cli("verify", RUN)
        assert result.exit_code == 0 and "no faults" in result.out

    def test_doctor_names_the_unknown_site_encoding_and_column(self, cli: Cli) -> None:
        result = cli("doctor", RUN)
        assert result.exit_code == 0
        assert not any(line.startswith("missing ") for line in result.out.splitlines())
        num_updates = len(list(updates())) * WORLD_SIZE
        told = {line for line in result.out.splitlines() if "unknown to this version" in line}
        assert {line.partition(" is unknown")[0] for line in told if " is unknown" in line} == {
            f"note    site {SITE} of {num_updates} rows",
            f"note    encoding {ENCODING} of {NUM_MIRRORED} rows",
            f"note    column {COLUMN} of {NUM_ROWS} rows",
        }
        (of_rule,) = (line for line in told if " is unknown" not in line)
        assert of_rule.startswith(f"note    rule 'site=param,{SITE} keep=stats' names sites")
        facts = [check for check in cli("doctor", RUN, "--json").json["checks"] if "unknown" in check]
        assert {(check["unknown"], check["name"]) for check in facts} == {
            ("site", SITE), ("encoding", ENCODING), ("column", COLUMN),
        }  # fmt: skip

    def test_doctor_is_not_content_with_what_nobody_can_judge_if_it_is_to_be_strict(self, cli: Cli) -> None:
        assert cli("doctor", RUN, "--strict").exit_code == 1

    def test_first_looks_at_every_row(self, cli: Cli) -> None:
        result = cli("first", RUN)
        assert result.exit_code == cli("first", RUNS[-1]).exit_code
        assert "(the model) tap extremes" in result.out
        assert "not compared, because no parameter, gradient or optimizer state is held by several" in result.out

    def test_stats_know_the_site_of_a_later_run(self, cli: Cli) -> None:
        rows = cli("stats", RUN, "--site", SITE, "--global", "--json").json["rows"]
        assert {(row["module_path"], row["name"], row["step"]): row["sum"] for row in rows} == {
            (value.module_path, value.name, value.step): pytest.approx(value.array.sum()) for value in updates()
        }
        refused = cli("stats", RUN, "--site", SITE[:-1])
        assert refused.exit_code == 2 and f"nearest is '{SITE}'" in refused.err

    def test_diff_compares_it_with_a_copy_and_with_a_run_of_today(self, cli: Cli, tmp_path: Path) -> None:
        assert "60 equal exactly, 0 differ" in cli("diff", RUN, shutil.copytree(RUN, tmp_path / "copy")).out
        result = cli("diff", RUN, RUNS[-1])
        assert "; 6 in A alone: " in result.out and "54 equal exactly, 0 differ (" in result.out
        assert [line.split()[1] for line in result.out.splitlines()[-3:]] == [SITE] * 3

    def test_export_leaves_out_what_it_cannot_read_and_names_it(self, cli: Cli, tmp_path: Path) -> None:
        result = cli("export", RUN, "-o", tmp_path / "all.npz")
        assert result.exit_code == 1
        left_out = [line for line in result.err.splitlines() if line.startswith("finding: left out: ")]
        assert len(left_out) == NUM_MIRRORED and all(UNREADABLE in line for line in left_out)
        with np.load(tmp_path / "all.npz") as arrays:
            assert sum(name.startswith("step=") for name in arrays) == NUM_ROWS - NUM_MIRRORED
            assert f"step=1/gain/{SITE}/weight/rank=0/phase=optimizer" in arrays
        assert cli("export", RUN, "-o", tmp_path / "all.parquet").exit_code == 0
        assert pq.read_table(tmp_path / "all.parquet").num_rows == NUM_ROWS

    def test_report_draws_it(self, cli: Cli, tmp_path: Path) -> None:
        assert cli("report", RUN, "-o", tmp_path / "run.html").exit_code == 0
        assert (tmp_path / "run.html").stat().st_size > 10_000

    def test_sql_has_every_row(self, cli: Cli) -> None:
        assert cli("sql", "select count(*) from rows", RUN, "--json").json["rows"] == [[NUM_ROWS]]

    def test_checkpoint_refuses_values_that_it_cannot_read_and_writes_others(self, cli: Cli, tmp_path: Path) -> None:
        options = ("--to", "safetensors", "-o", tmp_path / "model.safetensors")
        refused = cli("checkpoint", RUN, "--what", "grad", *options)
        assert refused.exit_code == 2 and UNREADABLE in refused.err
        assert cli("checkpoint", RUN, *options).exit_code == 0

    def test_merge_says_what_it_leaves_out(self, cli: Cli, tmp_path: Path) -> None:
        result = cli("merge", RUN, "-o", tmp_path / "merged", "--json")
        findings = result.json["findings"]
        assert result.exit_code == 1 and set(findings) == {"unknown_column", "unknown_encoding"}
        assert findings["unknown_encoding"]["num_problems"] == NUM_MIRRORED // WORLD_SIZE
        assert findings["unknown_column"]["num_problems"] == 0
        assert UNREADABLE in findings["unknown_encoding"]["first"][0]["text"]
        merged = recorder.open_run(tmp_path / "merged")
        assert merged.version == FORMAT_VERSION
        for value in EVERY_VALUE:
            asked = question(value, None)
            if value[:3] in MIRRORED:
                rows = merged.table(["note"], (ds.field("name") == value.name) & (ds.field("site") == value.site))
                assert (
                    "a later version wrote the values in a way that this version does not know"
                    in rows.column("note")[0].as_py()
                )
            else:
                assert same_bits(merged.array(**asked), value.array), asked
        assert cli("verify", tmp_path / "merged").exit_code == 0

    def test_repair_seals_an_open_shard_with_all_that_is_in_it(self, cli: Cli, tmp_path: Path) -> None:
        run = Path(shutil.copytree(RUN, tmp_path / "run"))
        (shard,) = run.glob("rank=00001/*/tensors-000000.arrow")
        before = pa.ipc.open_file(shard).read_all()
        shard.rename(shard.with_name(open_name(shard.name)))
        assert cli("verify", run).exit_code == 0 and not shard.exists()
        assert cli("repair", run).exit_code == 0
        after = pa.ipc.open_file(shard).read_all()
        assert after.equals(before) and COLUMN in after.column_names
        assert cli("verify", run).exit_code == 0
