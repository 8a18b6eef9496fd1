"""A run in a store is the run that was copied there: the same answers, findings and merged bytes."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import recorder
from recorder.errors import NotARunError
from recorder.storage.locations import ObjectPath
from tests.rigs.clusters import started_cluster
from tests.rigs.command_line import Cli
from tests.rigs.handmade import HandmadeWriter, make_row, make_run
from tests.rigs.merging import ROWS_PER_STEP, loss_of, roots, rows_of
from tests.rigs.server import BUCKET, StoreServer

NUM_STEPS = 6


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Two ranks, and a third writer that was killed and left an open shard."""
    run = make_run(tmp_path / "recordings" / "run-a")
    for rank in (0, 1):
        writer = HandmadeWriter(run, rank)
        rows = [rows_of(step, rank, ROWS_PER_STEP * step) for step in range(NUM_STEPS)]
        writer.add_shard([[*rows[0], *rows[1]], [*rows[2], *rows[3]]])
        writer.add_shard([[*rows[4], *rows[5]]])
        losses = [loss_of(step, rank, ROWS_PER_STEP * step + 6) for step in range(NUM_STEPS)]
        writer.add_shard([losses], kind="stats")
        writer.finish(roots=roots())
    return run


@pytest.fixture
def url(store: StoreServer, path: Path) -> str:
    return store.upload(path, f"{path.parent.parent.name}/run-a")


def add_killed(run: Path) -> None:
    """A later life of rank 1 that was killed, on a host that cannot be asked."""
    writer = HandmadeWriter(run, 1, name="20260102-000000-host-2")
    writer.add_shard([rows_of(NUM_STEPS, 1, 0), rows_of(NUM_STEPS + 1, 1, ROWS_PER_STEP)], is_sealed=False)
    writer.finish(state="recording", host="another", attempt=1, roots=roots())
    for file in run.rglob("*"):
        os.utime(file, (1, 1))


def both(cli: Cli, command: str, path: Path, url: str, *rest: object) -> tuple[Any, Any]:
    """The JSON of a command of the run here, and of that in the store with its place put back."""
    local, remote = cli(command, path, *rest, "--json"), cli(command, url, *rest, "--json")
    assert (remote.exit_code, remote.err.replace(url, str(path))) == (local.exit_code, local.err)
    return local.json, type(remote)(0, remote.out.replace(url, str(path)), "").json


@pytest.mark.parametrize(
    "command",
    [
        "ls",
        "show",
        "show layers.0",
        "show layers.0 --where",
        "doctor",
        "verify",
        "first",
        "stats",
        "stats --by module --global",
    ],
)
def test_a_command_says_the_same_of_a_run_in_a_store(cli: Cli, path: Path, url: str, command: str) -> None:
    name, *options = command.split()
    local, remote = both(cli, name, path, url, *options)
    assert local and remote == local


def test_top_says_the_same_but_for_how_long_ago(cli: Cli, path: Path, url: str) -> None:
    found = both(cli, "top", path, url)
    for told in found:
        for rank in told["ranks"]:
            assert rank.pop("silent_s") >= 0
    assert found[0] == found[1]


def test_a_run_in_a_store_equals_its_copy(cli: Cli, path: Path, url: str) -> None:
    result = cli("diff", url, path, "--json")
    assert result.exit_code == 0
    assert cli("diff", path, url).exit_code == 0


@pytest.mark.parametrize("options", ["a.parquet --payload", "a.npz --global", "a.safetensors --site output"])
def test_an_export_out_of_a_store_is_the_same_file(
    cli: Cli, path: Path, url: str, tmp_path: Path, options: str
) -> None:
    name, *rest = options.split()
    for folder, source in (("local", path), ("remote", url)):
        (tmp_path / folder).mkdir()
        assert cli("export", source, "-o", tmp_path / folder / name, *rest).exit_code == 0
    assert (tmp_path / "local" / name).read_bytes() == (tmp_path / "remote" / name).read_bytes()


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_merge_out_of_a_store_has_the_same_shards(cli: Cli, path: Path, url: str, tmp_path: Path, jobs: int) -> None:
    for folder, source in (("local", path), ("remote", url)):
        assert cli("merge", source, "-o", tmp_path / folder, "--jobs", jobs).exit_code == 0
    names = {
        folder: sorted(str(file.relative_to(tmp_path / folder)) for file in (tmp_path / folder).rglob("*.*"))
        for folder in ("local", "remote")
    }
    assert names["local"] == names["remote"]
    shards = [name for name in names["local"] if name.endswith((".arrow", ".index"))]
    assert shards
    for name in shards:
        assert (tmp_path / "local" / name).read_bytes() == (tmp_path / "remote" / name).read_bytes()


def test_workers_of_a_cluster_read_the_store_themselves(cli: Cli, path: Path, url: str, tmp_path: Path) -> None:
    with started_cluster(tmp_path / "cluster") as cluster:
        local = cli("stats", path, "--by", "step,site", "--global", "--json")
        spread = cli("stats", url, "--by", "step,site", "--global", "--json", "--scheduler", cluster.address)
        merged = cli("merge", url, "-o", tmp_path / "remote", "--scheduler", cluster.address)
    assert (spread.exit_code, spread.out.replace(url, str(path))) == (0, local.out)
    assert (merged.exit_code, merged.err) == (0, "")
    assert cli("merge", path, "-o", tmp_path / "local", "--jobs", 1).exit_code == 0
    for shard in (tmp_path / "local").rglob("*.arrow"):
        assert shard.read_bytes() == (tmp_path / "remote" / shard.relative_to(tmp_path / "local")).read_bytes()


def test_a_killed_writers_open_shard_is_read_in_the_store(
    cli: Cli, store: StoreServer, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_killed(path)
    url = store.upload(path, f"{tmp_path.name}/killed/run-a")
    local = recorder.open_run(path)
    remote = recorder.open_run(url)
    assert remote.table().equals(local.table())
    assert remote.num_rows == local.num_rows > 2 * NUM_STEPS * ROWS_PER_STEP
    assert np.array_equal(
        remote.array("layers.0", step=NUM_STEPS + 1, rank=1), local.array("layers.0", step=NUM_STEPS + 1, rank=1)
    )
    monkeypatch.setattr("recorder.read.writers._QUIET_S", 0.0)  # what was copied up a moment ago is not at work
    here, there = both(cli, "verify", path, url)
    assert [finding["text"] for finding in there["findings"]] == [
        finding["text"].replace(f"repair {path}` seals it", "repair COPY` seals it in a copy on a disk")
        for finding in here["findings"]
    ]
    assert any("not sealed, 2 batches with 12 rows can be read" in finding["text"] for finding in there["findings"])


@pytest.mark.parametrize("what", ["payload", "footer", "index", "manifest", "cut"])
def test_damage_is_found_in_a_store_as_on_a_disk(
    cli: Cli, store: StoreServer, path: Path, tmp_path: Path, what: str
) -> None:
    folder = next(path.glob("rank=00001/*"))
    shard = folder / "tensors-000000.arrow"
    name = {"index": "_tensors-000000.index", "manifest": "_writer.json"}.get(what, shard.name)
    content = bytearray((folder / name).read_bytes())
    offset = len(content) - 40 if what == "footer" else len(content) // 2
    if what == "payload":
        offset = content.index(rows_of(0, 1, 0)[3]["data"]) + 10
    content[offset] ^= 0x10
    (folder / name).write_bytes(content[:-3000] if what == "cut" else content)
    url = store.upload(path, f"{tmp_path.name}/{what}/run-a")
    for command in ("verify", "ls", "doctor"):
        local, remote = both(cli, command, path, url)
        assert remote == local
        if command == "verify":
            assert [finding for finding in local["findings"] if finding["fault"]]


def test_a_run_is_found_as_on_a_disk(cli: Cli, store: StoreServer, path: Path, tmp_path: Path) -> None:
    """By a folder that holds one, by the beginning of its name; and a part of one, or one of several, is said."""
    folder = f"s3://{BUCKET}/{tmp_path.name}/several"
    url = store.upload(path, f"{tmp_path.name}/several/run-a")
    assert cli("show", folder).exit_code == cli("show", f"{folder}/run").exit_code == 0
    assert cli("show", f"{url}/").out == cli("show", url).out
    part = cli("show", f"{url}/rank=00000")
    assert (part.exit_code, part.err.count("\n")) == (2, 1)
    assert f"is a part of a run; open the run: recorder ls {url}" in part.err

    shutil.copytree(path, path.parent / "run-b")
    store.upload(path.parent / "run-b", f"{tmp_path.name}/several/run-b")
    assert [run["run"] for run in cli("ls", folder, "--json").json["runs"]] == ["run-a", "run-b"]
    several, beginning = cli("first", folder), cli("first", f"{folder}/run")
    assert (several.exit_code, beginning.exit_code) == (0, 2)
    assert f"{folder}: took run-b, the newest of 2 runs" in several.err and several.out.startswith("run-b: ")
    above = cli("ls", folder.rpartition("/")[0])
    assert above.exit_code == 2 and above.err.endswith(f"no run here, but in several: name {folder}\n")
    assert "2 runs begin so: run-a (" in beginning.err and "run-b (" in beginning.err
    for name, found in (("run-b", "run-b"), ("@-1", "run-b"), ("latest", "run-b"), ("@-2", "run-a")):
        assert cli("first", f"{folder}/{name}").out.startswith(f"{found}: ")


def test_check_types_the_run_and_not_its_folder(cli: Cli, store: StoreServer, tmp_path: Path) -> None:
    writer = HandmadeWriter(make_run(tmp_path / "run-n"), 0)
    writer.add_shard([[make_row(0, np.full(4, np.nan, np.float32))]])
    writer.finish()
    url = store.upload(tmp_path / "run-n", f"{tmp_path.name}/bad/run-n")
    found = cli("check", url.rpartition("/")[0])
    assert f"recorder stats {url} layers.0" in found.out
    told = cli("sql", "select 1.5::double as x, 'nan'::double as y", url, "--json").json
    assert told["rows"] == [[1.5, None]] and told["nonfinite"] == [{"row": 0, "column": "y", "value": "nan"}]


def test_open_run_takes_text_and_what_pathlib_makes_of_it(path: Path, url: str) -> None:
    run = recorder.open_run(url)
    assert (str(run.path), run.path.name) == (url, "run-a")
    assert recorder.open_run(Path(url)).path == recorder.open_run(run.path).path == run.path
    assert pickle.loads(pickle.dumps(run.path)) == run.path
    assert isinstance(run.path, ObjectPath) and isinstance(recorder.open_run(str(path)).path, Path)
    assert np.array_equal(run.array("layers.0", step=2), recorder.open_run(path).array("layers.0", step=2))
    assert run.dataset().to_table().num_rows == run.num_rows


def test_a_run_is_looked_at_anew_when_it_is_opened_again(store: StoreServer, path: Path, url: str) -> None:
    before = recorder.open_run(url)
    add_killed(path)
    store.upload(path, url.partition(f"{BUCKET}/")[2])
    assert recorder.open_run(before.path).num_rows == recorder.open_run(path).num_rows > before.num_rows


def test_a_process_that_has_read_a_store_ends_well(store: StoreServer, url: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "recorder", "ls", url], capture_output=True, text=True, timeout=60, env=dict(os.environ)
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "run-a: 2 of 2 ranks" in done.stdout


def test_a_missing_run_raises(store: StoreServer) -> None:
    with pytest.raises(NotARunError, match="no such directory"):
        recorder.open_run(f"s3://{BUCKET}/nothing/here")
