"""Shipping: all of a run arrives, once, in order, and nothing there is overwritten with something else."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import recorder
from recorder.daemon.daemon import Daemon
from recorder.daemon.destination import Throttle, parse_destination
from recorder.daemon.fleet import NODE
from recorder.daemon.settings import DaemonSettings
from recorder.daemon.shipped import ShippedRun, Shipping
from recorder.daemon.watching import list_writer, sealed_name
from recorder.daemon.writer_shipper import OpenShards
from recorder.errors import StoreError
from recorder.format.rundir import encode_manifest, encode_status
from recorder.storage.locations import location_of, store_of
from recorder.storage.untrusted_files import FileFacts
from tests.daemon.support import at_work, faults, files, objects, ship
from tests.rigs.command_line import Cli
from tests.rigs.handmade import HandmadeWriter, make_row, make_run
from tests.rigs.proxy import FaultyProxy
from tests.rigs.server import BUCKET, StoreServer
from tests.rigs.waiting import wait_until
from tests.rigs.writer import Rig


def small_run(tmp_path: Path, name: str = "run-a", state: str = "closed") -> Path:
    """Two ranks, each with a shard of tensors and one of statistics."""
    run = make_run(tmp_path / "recordings" / name)
    for rank in (0, 1):
        writer = HandmadeWriter(run, rank)
        writer.add_shard([[make_row(n, np.ones(64, np.float32), step=n, rank=rank) for n in range(4)]])
        rows = [make_row(n, np.ones(2, np.float32), step=n, rank=rank, encoding=None) for n in range(4, 8)]
        writer.add_shard([rows], kind="stats", with_index=False)
        writer.finish(state=state)
    return run


def prefix_of(to: str) -> str:
    return to.removeprefix(f"s3://{BUCKET}/")


def test_once_ships_every_byte_and_a_second_time_puts_nothing(tmp_path: Path, store: StoreServer, to: str) -> None:
    run = small_run(tmp_path)
    for writer in run.glob("rank=*/*"):
        (writer / "_status.json").write_bytes(encode_status({"state": "closed", "step": 3}))
    code, daemon = ship(tmp_path, to)
    assert (code, daemon.counters.of("uploads")["status"]) == (0, 3), "and what both show"
    assert objects(store, prefix_of(to)) == files(run.parent)
    assert faults(f"{to}/run-a") == faults(run) == []
    with store.counting() as requests:
        code, daemon = ship(tmp_path, to)
    assert (code, daemon.counters.of("uploads"), requests["PUT"]) == (0, {}, 0)


def test_a_run_without_rows_is_there_at_once(tmp_path: Path) -> None:
    HandmadeWriter(make_run(tmp_path / "recordings" / "run-a")).finish()
    make_run(tmp_path / "recordings" / "run-b")
    code, daemon = ship(tmp_path, str(tmp_path / "there"), deadline_s=60.0)
    assert (code, daemon.counters.of("errands"), len(daemon.runs)) == (0, {}, 2)


def test_a_large_shard_goes_in_parts(tmp_path: Path, store: StoreServer, to: str) -> None:
    run = make_run(tmp_path / "recordings" / "run-a")
    writer = HandmadeWriter(run)
    values = np.random.default_rng(0).standard_normal(3 << 20).astype(np.float32)
    shard = writer.add_shard([[make_row(0, values)]])
    writer.finish()
    code, daemon = ship(tmp_path, to)
    assert code == 0
    assert daemon.counters.of("confirmed_files") == {"etag": 2}
    assert objects(store, prefix_of(to))[str(shard.relative_to(run.parent))] == shard.read_bytes()


def test_a_run_is_whole_at_the_destination_while_it_grows(tmp_path: Path, store: StoreServer, to: str) -> None:
    (tmp_path / "recordings").mkdir()  # the writer makes its folder in its own time
    rig = Rig(tmp_path / "recordings" / "run-a", flush_interval_s=0.05).start()
    with at_work(tmp_path, to):
        for step in range(5):
            rig.put(step=step, keep=recorder.records.KEEP_STATS)
        assert rig.drain()
        wait_until(lambda: any(name.endswith(".open") for name in objects(store, prefix_of(to))))
        wait_until(lambda: "run-a/_run.json" in objects(store, prefix_of(to)))
        assert recorder.open_run(f"{to}/run-a").num_rows == 5
        for step in range(5, 9):
            rig.put(step=step, keep=recorder.records.KEEP_STATS)
        assert rig.drain()
        wait_until(lambda: recorder.open_run(f"{to}/run-a").num_rows == 9)
        rig.close()
        wait_until(lambda: not any(name.endswith(".open") for name in objects(store, prefix_of(to))))
        wait_until(lambda: objects(store, prefix_of(to)) == files(tmp_path / "recordings"))
    assert faults(f"{to}/run-a") == faults(tmp_path / "recordings" / "run-a") == []


def test_without_its_ledger_it_finds_what_is_there(tmp_path: Path, store: StoreServer, to: str) -> None:
    run = small_run(tmp_path)
    assert ship(tmp_path, to)[0] == 0
    before = objects(store, prefix_of(to))
    (ledger,) = run.glob("_shipped-*")
    ledger.unlink()
    code, daemon = ship(tmp_path, to)
    assert code == 0
    assert daemon.counters.of("confirmed_files") == {"there": 6}
    assert objects(store, prefix_of(to)) == before


def test_a_line_of_its_ledger_that_is_none_is_left_out(tmp_path: Path) -> None:
    run = small_run(tmp_path)
    to = f"file://{tmp_path}/there"
    assert ship(tmp_path, to)[0] == 0
    (ledger,) = run.glob("_shipped-*")
    ledger.write_bytes(b"[" * 100_000 + b"\n\xff\nnull\n[1]\n" + ledger.read_bytes())
    code, daemon = ship(tmp_path, to)
    assert code == 0 and daemon.counters.of("confirmed_files") == {}


def test_what_is_something_else_there_is_never_overwritten(tmp_path: Path, store: StoreServer, to: str) -> None:
    run = small_run(tmp_path)
    (shard,) = run.glob("rank=00000/*/tensors-000000.arrow")
    key = str(shard.relative_to(run.parent))
    store.put(f"{prefix_of(to)}/{key}", b"ARROW1 of somebody else")
    code, daemon = ship(tmp_path, to)
    assert code == 1
    assert daemon.counters.of("conflicts") == {"tensors": 1}
    found = objects(store, prefix_of(to))
    assert found[key] == b"ARROW1 of somebody else"
    manifest = json.loads(found[str(shard.with_name("_writer.json").relative_to(run.parent))])
    assert (manifest["state"], "ledger" in manifest) == ("recording", False), "it promises the shard"
    assert shard.exists()


def test_another_run_of_that_name_is_left_alone(tmp_path: Path, store: StoreServer, to: str) -> None:
    small_run(tmp_path)
    other = encode_manifest({"format": "recorder", "version": [1, 1], "run_id": "another"})
    store.put(f"{prefix_of(to)}/run-a/_run.json", other)
    code, daemon = ship(tmp_path, to)
    assert (code, daemon.counters.of("conflicts")) == (1, {"run": 1})
    assert objects(store, prefix_of(to)) == {"run-a/_run.json": other}


def test_a_closed_manifest_waits_for_its_shards_and_what_is_there_is_a_run_that_grows(
    tmp_path: Path, store: StoreServer, to: str, proxy: FaultyProxy
) -> None:
    run = small_run(tmp_path)
    proxy.fault = lambda method, path: "403" if method == "PUT" and "/tensors-" in path else None
    code, _ = ship(tmp_path, to)
    assert code == 1
    found = objects(store, prefix_of(to))
    assert not any(name.endswith("tensors-000000.arrow") for name in found)
    states = [json.loads(content)["state"] for name, content in found.items() if name.endswith("_writer.json")]
    assert states == ["recording", "recording"]
    assert faults(f"{to}/run-a") == []
    proxy.fault = lambda method, path: None
    assert ship(tmp_path, to)[0] == 0
    assert objects(store, prefix_of(to)) == files(run.parent)


def test_an_open_shard_that_a_killed_daemon_left_there_goes(tmp_path: Path, store: StoreServer, to: str) -> None:
    run = small_run(tmp_path)
    (shard,) = run.glob("rank=00001/*/stats-000000.arrow")
    left = shard.relative_to(run.parent).with_name("_stats-000000.arrow.open")
    store.put(f"{prefix_of(to)}/{left}", shard.read_bytes()[:-200])
    assert ship(tmp_path, to)[0] == 0
    assert objects(store, prefix_of(to)) == files(run.parent)


def test_a_dead_writer_is_sealed_and_shipped(tmp_path: Path, store: StoreServer, to: str) -> None:
    run = make_run(tmp_path / "recordings" / "run-a")
    writer = HandmadeWriter(run)
    writer.add_shard([[make_row(0, np.ones(8, np.float32))]], is_sealed=False, tail=b"\xff\xff\xff\xff\x10")
    writer.add_shard([[make_row(1, np.ones(8, np.float32), step=1, encoding=None)]], kind="stats", is_sealed=False)
    pid = os.fork()
    if not pid:
        os._exit(0)
    os.waitpid(pid, 0)
    writer.finish(state="recording", host=os.uname().nodename, pid=pid)
    (writer.directory / "_status.json").write_bytes(encode_status({"state": "recording", "step": 0, "written": 1}))
    for _ in range(2):
        code, daemon = ship(tmp_path, to)
        (summary,) = (one.summary() for one in daemon.runs)
        assert (code, summary["rows"], summary["last_step"]) == (0, 2, 1), "as the shards have it, not the status"
    found = objects(store, prefix_of(to))
    assert not any(name.endswith(".open") for name in found)
    assert found == files(run.parent)
    assert recorder.open_run(f"{to}/run-a").num_rows == 2


def test_a_writer_that_nobody_can_ask_goes_as_it_is(tmp_path: Path, store: StoreServer, to: str) -> None:
    run = make_run(tmp_path / "recordings" / "run-a")
    writer = HandmadeWriter(run)
    shard = writer.add_shard([[make_row(0, np.ones(8, np.float32))]], is_sealed=False, tail=b"\xff\xff\xff\xff\x10")
    writer.finish(state="recording", host="another")
    assert ship(tmp_path, to)[0] == 0
    found = objects(store, prefix_of(to))[str(shard.relative_to(run.parent))]
    assert found == shard.read_bytes()[:-5]
    assert shard.exists()
    assert recorder.open_run(f"{to}/run-a").num_rows == 1


def test_nothing_but_a_run_is_shipped(tmp_path: Path, store: StoreServer, to: str) -> None:
    run = small_run(tmp_path)
    whole = files(run.parent)
    secret = tmp_path / "shadow"
    secret.write_text("my secret")
    (inner,) = run.glob("rank=00000/*")
    (inner / "tensors-000007.arrow").symlink_to(secret)
    (inner / "stats-000007.arrow").hardlink_to(secret)
    os.mkfifo(inner / "stats-000008.arrow")
    (inner / "stats-000009.arrow\n").write_text("secret")
    (inner / "notes.txt").write_text("secret")
    (run / "rank=00002").symlink_to(tmp_path)
    (run.parent / "linked").symlink_to(tmp_path)
    (run.parent / "notes.txt").write_text("secret")
    code, daemon = ship(tmp_path, to)
    found = objects(store, prefix_of(to))
    assert code == 1
    assert not any(b"secret" in content for content in found.values())
    assert found.keys() <= whole.keys()
    assert daemon.seen() == {"foreign": 2, "refused": 5}
    assert daemon.counters.of("refused_contents")["content"] > 0


def test_once_says_what_is_damaged_or_foreign_in_a_run_and_is_no_success(tmp_path: Path, cli: Cli) -> None:
    for name in ("run-a", "run-b", "run-c"):
        small_run(tmp_path, name)
    watched = tmp_path / "recordings"
    (watched / "notes.txt").write_text("beside the runs")
    words = ("daemon", "--once", "--watch", watched, "--to", tmp_path / "there", "--state", tmp_path / "state")
    assert cli(*words).exit_code == 0
    gone = next((watched / "run-a").glob("rank=00000/*/stats-*"))
    gone.unlink()
    (watched / "run-b" / "mine.txt").write_text("x")
    (watched / "run-b" / "rank=00001" / "mine").mkdir()
    found = cli(*words, "--keep-local", "0s")
    assert found.exit_code == 1
    assert f"damaged here: {gone.parent}: 4 of 8 rows that were written are gone" in found.out
    said = f"part of no run, and not shipped: {watched}/run-b/mine.txt, {watched}/run-b/rank=00001/mine;"
    assert said in found.out
    assert found.out.endswith("; 1 run removed here\n")
    assert {path.name for path in watched.iterdir()} == {"run-a", "run-b", "notes.txt", NODE}


def test_once_names_what_lies_in_a_folder_without_any_run_and_is_no_success(tmp_path: Path, cli: Cli) -> None:
    watched = tmp_path / "recordings"
    (watched / "old").mkdir(parents=True)
    words = ("daemon", "--once", "--watch", watched, "--to", tmp_path / "there", "--state", tmp_path / "state")
    assert cli(*words).exit_code == 0, "a job that records nothing"
    (watched / "old" / "tensors-000000.arrow").write_text("x")
    (watched / "linked").symlink_to(tmp_path)
    found = cli(*words)
    said = f"part of no run, and not shipped: {watched}/linked, {watched}/old/tensors-000000.arrow"
    assert (found.exit_code, found.out) == (1, f"0 runs: nothing new; {said}\n")


def are_settled(daemon: Daemon, num_runs: int) -> bool:
    return len(daemon.runs) == num_runs and all(one.is_settled for one in daemon.runs)


def test_the_index_says_what_once_has_found_damaged_until_once_finds_it_mended(
    tmp_path: Path, store: StoreServer, to: str, cli: Cli
) -> None:
    run = small_run(tmp_path)
    (shard,) = run.glob("rank=00001/*/tensors-000000.arrow")
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-300])
    code, daemon = ship(tmp_path, to)
    (why,) = daemon.damaged
    assert code == 1 and shard.name in why
    for num_runs, name in enumerate(("run-b", "run-c"), 2):
        found = cli("ls", to)
        assert found.exit_code == 1
        assert f"run-a: damaged: {why}" in found.out
        with at_work(tmp_path, to) as other:
            small_run(tmp_path, name)
            wait_until(partial(are_settled, other, num_runs))
    assert [one["problems"] for one in cli("ls", to, "--json").json["runs"]] == [[why], [], []]
    store.client.delete_object(Bucket=BUCKET, Key=f"{prefix_of(to)}/{shard.relative_to(run.parent)}")
    shard.write_bytes(whole)
    assert ship(tmp_path, to)[0] == 0
    assert cli("ls", to).exit_code == 0


def test_once_removes_what_was_there_long_enough(tmp_path: Path, cli: Cli) -> None:
    runs = [small_run(tmp_path, name) for name in ("run-a", "run-b")]
    own = ("--to", tmp_path / "there", "--state", tmp_path / "state", "--keep-local", "12h")
    words = ("daemon", "--once", "--watch", tmp_path / "recordings", *own)
    assert cli(*words).exit_code == 0
    (ledger,) = runs[0].glob("_shipped-*")
    long_ago = ledger.stat().st_mtime - 13 * 3600
    os.utime(ledger, (long_ago, long_ago))
    found = cli(*words)
    assert (found.exit_code, found.out) == (0, "2 runs: nothing new; all files are there; 1 run removed here\n")
    assert [run.exists() for run in runs] == [False, True]
    assert faults(tmp_path / "there" / "run-a") == []


def test_once_removes_nothing_of_which_the_same_call_has_shipped_something(tmp_path: Path) -> None:
    run = small_run(tmp_path)
    there = str(tmp_path / "there")
    code, daemon = ship(tmp_path, there, keep_local="0s")
    assert (code, daemon.counters.total("removed_runs"), run.exists()) == (0, 0, True)
    code, daemon = ship(tmp_path, there, keep_local="0s")
    assert (code, daemon.counters.total("removed_runs"), run.exists()) == (0, 1, False)


def test_a_run_whose_name_no_key_may_have_is_said_and_no_success(tmp_path: Path) -> None:
    small_run(tmp_path, "run b\x1b")
    (tmp_path / "recordings" / "no run").mkdir()
    code, daemon = ship(tmp_path, f"file://{tmp_path}/there")
    assert code == 1
    ((path, why),) = daemon.unshipped.items()
    assert path.endswith("/run b\x1b")
    assert "rename it" in why


def test_a_run_is_removed_here_only_once_it_is_there(tmp_path: Path, store: StoreServer, to: str) -> None:
    run = small_run(tmp_path)
    (run.parent / "notes.txt").write_text("mine")
    expected = files(run)
    with at_work(tmp_path, to, keep_local="0s") as daemon:
        wait_until(lambda: daemon.counters.of("removed_runs") == {"": 1})
        assert not run.exists()
    assert objects(store, f"{prefix_of(to)}/run-a") == expected
    assert {path.name for path in run.parent.iterdir()} == {"notes.txt", NODE}


def test_a_store_that_comes_back_empty_is_filled_again_and_nothing_is_removed(
    tmp_path: Path, store: StoreServer, to: str
) -> None:
    run = small_run(tmp_path)
    with at_work(tmp_path, to) as daemon:
        wait_until(lambda: any(one.is_settled for one in daemon.runs))
        for key in objects(store, prefix_of(to)):
            store.client.delete_object(Bucket=BUCKET, Key=f"{prefix_of(to)}/{key}")
        daemon.shared.settings = dataclasses.replace(daemon.shared.settings, keep_local="0s")
        wait_until(lambda: daemon.counters.total("lost_objects"))
        assert run.exists()
        wait_until(lambda: objects(store, prefix_of(to)) and daemon.counters.total("removed_runs"))
    assert len(objects(store, prefix_of(to))) == 9


@pytest.mark.parametrize("fault", ["cut", "lost", "500", "503", "403", "damage", "lie", "slow"])
def test_a_store_that_fails_now_and_then_costs_nothing(
    tmp_path: Path, store: StoreServer, to: str, proxy: FaultyProxy, fault: str
) -> None:
    run = small_run(tmp_path)
    seen: set[str] = set()

    def first_put_of_a_shard(method: str, path: str) -> str | None:
        is_first = method == "PUT" and path.endswith(".arrow") and path not in seen
        seen.add(path)
        return fault if is_first else None

    proxy.fault = first_put_of_a_shard
    code, _ = ship(tmp_path, to, deadline_s=60.0)
    assert (code, proxy.seen[fault]) == (0, 4)
    assert objects(store, prefix_of(to)) == files(run.parent)


def test_a_folder_is_a_destination_too(tmp_path: Path) -> None:
    run = small_run(tmp_path)
    there = tmp_path / "there"
    assert ship(tmp_path, f"file://{there}")[0] == 0
    found = files(there)
    assert {name: content for name, content in found.items() if not name.startswith("_fleet")} == files(run.parent)
    assert faults(there / "run-a") == []
    shutil.rmtree(there)
    code, daemon = ship(tmp_path, f"file://{there}")
    assert (code, daemon.counters.total("lost_objects")) == (0, 9)
    assert faults(there / "run-a") == []


def test_a_run_that_is_deleted_under_the_daemon_is_let_go(tmp_path: Path, store: StoreServer, to: str) -> None:
    run = small_run(tmp_path)
    with at_work(tmp_path, to) as daemon:
        wait_until(lambda: any(one.is_settled for one in daemon.runs))
        expected = files(run.parent)
        shutil.rmtree(run)
        wait_until(lambda: not daemon.runs)
        small_run(tmp_path, "run-b")
        wait_until(lambda: any(one.is_settled for one in daemon.runs))
        assert daemon.counters.of("errors").get("internal", 0) == 0
    assert objects(store, prefix_of(to)) == expected | files(run.parent)


def test_a_reader_takes_what_was_replaced_since_it_listed_a_run(tmp_path: Path, store: StoreServer, to: str) -> None:
    small_run(tmp_path)
    assert ship(tmp_path, to)[0] == 0
    writer = next(name for name in objects(store, prefix_of(to)) if name.endswith("_writer.json")).rpartition("/")[0]
    opened = f"{prefix_of(to)}/{writer}/_stats-000009.arrow.open"
    store.put(opened, b"0123456789")
    run = location_of(f"{to}/run-a")
    there = store_of(run)
    rank, name = writer.split("/")[1:]
    directory = run / rank / name
    assert "_stats-000009.arrow.open" in there.list_directory(directory, directories=False)
    store.put(f"{prefix_of(to)}/{writer}/_writer.json", encode_manifest({"state": "later"}))
    store.put(opened, b"0123456789abc")
    assert there.read_json(directory / "_writer.json")["state"] == "later"
    assert bytes(there.open_growing(directory / "_stats-000009.arrow.open").read(2, 8)) == b"23456789"
    store.put(f"{prefix_of(to)}/{writer}/stats-000000.arrow", b"another")
    with pytest.raises(StoreError, match="open the run again"):
        there.open_sealed(directory / "stats-000000.arrow").read(0, 5)


def test_what_is_put_while_the_store_lists_what_it_has_is_not_taken_for_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "recordings" / "run-a")
    writer = HandmadeWriter(run)
    writer.add_shard([[make_row(0, np.ones(8, np.float32))]])
    writer.add_shard([[make_row(1, np.ones(2, np.float32), encoding=None)]], kind="stats", is_sealed=False)
    (sealed,), (opened,) = run.glob("*/*/tensors-*.arrow"), run.glob("*/*/_stats-*.open")
    below = f"{sealed.parent.relative_to(run)}/"
    shared = Shipping(destination=parse_destination(str(tmp_path / "there"), Throttle(0)), settings=DaemonSettings())
    there = ShippedRun(str(run.parent), ("run-a",), shared)
    shards = OpenShards(there, below)
    assert there.identify() and there.reconcile() == [], "a run that is new to its daemon is not listed"
    listing = shared.destination.listing

    def put_meanwhile(prefix: str) -> Iterator[tuple[str, FileFacts]]:
        before = list(listing(prefix))
        with there.open() as folder, folder.below(*below.split("/")[:-1]) as inner, inner.open(sealed.name) as file:
            assert there.put_new(below + sealed.name, file)
            shards.put(inner, opened.name, list_writer(inner).opened[opened.name], is_growing=True)
        return iter(before)

    with monkeypatch.context() as patched:
        patched.setattr(shared.destination, "listing", put_meanwhile)
        assert there.reconcile() == []
    shards.reconciled()
    assert there.ledger.names().keys() == {below + sealed.name}
    assert opened.name in shards
    there.note(below + sealed_name(opened.name), 1, "synced")
    shards.remove_sealed()
    assert [name for name in files(tmp_path / "there") if name.endswith(".open")] == []
    (tmp_path / "there" / "run-a" / below / sealed.name).unlink()
    assert set(there.reconcile()) == {below + sealed.name, below + sealed_name(opened.name)}
    there.ledger.close()
