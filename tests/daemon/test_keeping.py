"""Keeping house at the destination: what goes, what never goes, and a fleet that is listed with a few requests."""

from __future__ import annotations

import itertools
import os
import re
import time
from pathlib import Path

import numpy as np
import pytest

from recorder.daemon import fleet
from recorder.daemon.daemon import Daemon
from recorder.daemon.destination import Throttle, parse_destination
from recorder.daemon.fleet import NODE, list_runs, node_name, plan_prune, prune, set_keep
from recorder.format.rundir import encode_manifest, index_name
from recorder.system.text import size
from tests.daemon.support import at_work, files, objects, ship
from tests.daemon.test_shipping import prefix_of, small_run
from tests.rigs.command_line import Cli
from tests.rigs.handmade import HandmadeWriter, make_row, make_run
from tests.rigs.server import StoreServer
from tests.rigs.waiting import wait_until

LATER_S = 10 * 86400.0


def test_a_prune_removes_what_is_old_and_neither_marked_nor_under_way(
    tmp_path: Path, store: StoreServer, to: str
) -> None:
    for name in ("run-a", "run-b", "run-c"):
        small_run(tmp_path, name)
    assert ship(tmp_path, to)[0] == 0
    destination = parse_destination(to, Throttle(0))
    set_keep(destination, "run-b", is_kept=True)
    young = plan_prune(destination, older_than_s=0.0, now_s=time.time() + 100)
    assert {(plan.run.key, plan.goes) for plan in young} == {(f"run-{one}", False) for one in "abc"}
    old = plan_prune(destination, older_than_s=86400.0, now_s=time.time() + LATER_S)
    assert {plan.run.key for plan in old if plan.goes} == {"run-a", "run-c"}
    set_keep(destination, "run-b", is_kept=False)
    left = plan_prune(destination, max_bytes=old[0].run.num_bytes * 2, now_s=time.time() + LATER_S)
    assert sum(plan.goes for plan in left) == 1
    assert prune(destination, old[0].run)
    found = objects(store, prefix_of(to))
    assert not any(key.startswith(f"{old[0].run.key}/") for key in found)
    assert f"_pruned/{old[0].run.key}.json" in found
    code, daemon = ship(tmp_path, to)
    assert (code, daemon.counters.total("uploads")) == (0, 0), "a node does not put it there again"


def test_a_mark_is_no_change_of_its_run(tmp_path: Path) -> None:
    small_run(tmp_path)
    there = tmp_path / "there"
    assert ship(tmp_path, str(there))[0] == 0
    for path in there.rglob("*"):
        os.utime(path, (1000, 1000))
    destination = parse_destination(str(there), Throttle(0))
    set_keep(destination, "run-a", is_kept=True)
    assert [run.changed_s for run in list_runs(destination)] == [1000.0]


def test_once_names_what_a_pruned_run_did_not_ship(tmp_path: Path, store: StoreServer, to: str, cli: Cli) -> None:
    run = small_run(tmp_path)
    assert ship(tmp_path, to)[0] == 0
    destination = parse_destination(to, Throttle(0))
    (plan,) = plan_prune(destination, older_than_s=1.0, now_s=time.time() + LATER_S)
    assert prune(destination, plan.run)
    assert ship(tmp_path, to)[0] == 0, "all of it was there"
    late = HandmadeWriter(run, 2)
    late.add_shard([[make_row(0, np.ones(64, np.float32), rank=2)]])
    late.finish(state="closed")
    found = cli("daemon", "--once", "--watch", run.parent, "--to", to, "--state", tmp_path / "state")
    assert found.exit_code == 1
    shard = late.directory / "tensors-000000.arrow"
    assert f"2 files not there: {shard.with_name(index_name(shard.name))}, {shard}; 1 run pruned" in found.out


def test_a_run_that_changes_between_the_look_and_the_prune_stays(tmp_path: Path, store: StoreServer, to: str) -> None:
    small_run(tmp_path)
    assert ship(tmp_path, to)[0] == 0
    destination = parse_destination(to, Throttle(0))
    (plan,) = plan_prune(destination, older_than_s=1.0, now_s=time.time() + LATER_S)
    assert not prune(destination, plan.run._replace(changed_s=plan.run.changed_s - 10))
    assert "run-a/_run.json" in objects(store, prefix_of(to))


def test_the_command_removes_nothing_without_a_yes(tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    small_run(tmp_path)
    there = tmp_path / "there"
    assert ship(tmp_path, str(there))[0] == 0
    monkeypatch.setattr(fleet, "_QUIET_S", -1.0)
    before = files(there)
    found = cli("daemon", "prune", "run-a", "--to", there)
    assert (found.exit_code, files(there)) == (0, before)
    facts = cli("daemon", "prune", "run-a", "--to", there, "--json").json["runs"]
    assert [(one["run"], one["name"], one["objects"]) for one in facts] == [("run-a", "run-a", 9)]
    whole = f"1 run of 1 %s: 9 files with {size(facts[0]['bytes'])}"
    assert found.out.endswith(f"\n{whole % 'would go'}; nothing was removed; --yes removes the runs\n")
    assert re.split(" {2,}", found.out.split("\n")[0]) == ["run", "all files", "size of all", "what", "why"]
    removed = cli("daemon", "prune", "run-a", "--to", there, "--yes")
    assert removed.exit_code == 0 and removed.out.endswith(f"\n{whole % 'removed'}\n")
    assert not (there / "run-a").exists()
    found = cli("ls", there)
    assert (found.exit_code, found.out) == (0, f"{there}: no run is left here; 1 run was pruned: run-a\n")
    found = cli("ls", there / "run-a")
    assert found.exit_code == 2 and f"{there}/run-a: was pruned from {there}: `recorder daemon prune`" in found.err
    found = cli("daemon", "prune", "run-a", "--to", there)
    assert found.exit_code == 2 and f"file://{there}/run-a: was pruned: an earlier prune" in found.err


def test_a_prune_where_nothing_is_says_so(tmp_path: Path, cli: Cli) -> None:
    told = cli("daemon", "prune", "--to", tmp_path / "nothere", "--older-than", "30d")
    assert told.exit_code == 2 and f"{tmp_path / 'nothere'}: no such directory" in told.err
    (tmp_path / "empty").mkdir()
    told = cli("daemon", "prune", "--to", tmp_path / "empty", "--older-than", "30d")
    assert (told.exit_code, told.out) == (0, f"file://{tmp_path / 'empty'}: holds no runs; nothing to remove\n")


def test_a_run_is_named_as_in_every_other_command_and_one_alone(tmp_path: Path, cli: Cli) -> None:
    for name in ("team/run-a1", "team/run-b1", "team/run-b2", "run-c"):
        small_run(tmp_path, name)
    manifest = tmp_path / "recordings" / "run-c" / "_run.json"
    manifest.write_text(manifest.read_text().replace("{", '{"name": "train-7", ', 1))
    there = tmp_path / "there"
    assert ship(tmp_path, str(there))[0] == 0
    url = f"file://{there}"
    assert cli("ls", url).exit_code == 0, "a folder is read by the URL that the daemon shows"
    kept = cli("daemon", "keep", "team/run-a", "train-7", "--to", there)
    assert (kept.exit_code, kept.out) == (0, "team/run-a1, run-c: kept: no prune removes it\n")
    assert {str(path.relative_to(there)) for path in there.rglob("_keep")} == {"team/run-a1/_keep", "run-c/_keep"}
    assert cli("daemon", "unkeep", f"{url}/team/run-a", "--to", there).exit_code == 0
    assert not (there / "team" / "run-a1" / "_keep").exists()
    for typed, why in (
        ("team/run-b", f"{url}/team/run-b: 2 runs begin so; type the directory of one: team/run-b1, team/run-b2"),
        ("run-x", f"{url}/run-x: no such run; `recorder ls {url}` lists them"),
        ("team", f"{url}/team: no such run"),
        (url, f"{url}/: no such run"),
    ):
        found = cli("daemon", "prune", typed, "--to", there, "--yes")
        assert found.exit_code == 2
        assert why in found.err
    told = cli("daemon", "prune", "run-c", "--to", there).out
    (line,) = [line for line in told.splitlines() if "stays  has a _keep mark" in line]
    assert line.split()[0] == "train-7" and line.split()[-1] == "run-c", "a name that is not the directory's"


def test_a_thousand_runs_are_listed_with_a_few_requests(store: StoreServer, to: str, cli: Cli) -> None:
    summary = {"world_size": 16, "created_ns": 1, "last_step": 9, "rows": 10, "bytes": 100, "dropped": {"pool_full": 1}}
    for node in range(2):
        ranks = list(range(8 * node, 8 * node + 8))
        runs = {
            f"run-{n:04d}": summary | {"name": f"run-{n:04d}", "ranks": ranks, "state": "closed"} for n in range(1000)
        }
        store.put(
            f"{prefix_of(to)}/_fleet/node-{node}.json", encode_manifest({"time_ns": time.time_ns(), "runs": runs})
        )
    for n in range(1000):
        store.put(f"{prefix_of(to)}/run-{n:04d}/_run.json", b"{}")
    with store.counting() as requests:
        found = cli("ls", to)
    assert found.exit_code == 0
    assert requests.num_requests <= 8
    last = found.out.splitlines()[-1].split()
    assert len(found.out.splitlines()) == 1001
    assert last[0] == "run-0999"
    assert "16 of 16" in found.out.splitlines()[-1]
    assert "pool_full=2" in found.out.splitlines()[-1]


def node_of(tmp_path: Path, rank: int) -> Path:
    """A node's folder: one rank's part of the same run of two."""
    run = make_run(tmp_path / "recordings" / "run-a", world_size=2)
    writer = HandmadeWriter(run, rank)
    writer.add_shard([[make_row(0, np.ones(64, np.float32), rank=rank)]])
    writer.finish(state="closed")
    return tmp_path


def test_nodes_of_one_host_name_have_each_a_document_of_their_own(
    tmp_path: Path, store: StoreServer, to: str, cli: Cli
) -> None:
    for rank in (0, 1):
        node = node_of(tmp_path / str(rank), rank)
        for _ in range(2):  # a restart goes on under the name that was drawn
            assert ship(node, to)[0] == 0
    assert "2 of 2" in cli("ls", to).out
    keys = [key for key, _ in parse_destination(to, Throttle(0)).listing("")]
    assert sum(key.startswith("_fleet/") and key.endswith(".json") for key in keys) == 2


def has_put(daemon: Daemon) -> bool:
    """Return True if the last document of this node that the daemon has seen is its own."""
    return daemon._fleet is not None and (daemon._fleet._last or ("",))[0] == daemon._fleet._daemon


def test_a_name_that_two_nodes_have_is_said_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = str(tmp_path / "there")
    nodes = [node_of(tmp_path / str(rank), rank) for rank in (0, 1)]
    for node in nodes:  # as where one disk is the image of the other
        (node / "recordings" / NODE).write_text("node-0123456789ab\n")
    monkeypatch.setattr("recorder.daemon.daemon._SUMMARY_S", 0.1)
    with at_work(nodes[0], there) as first:
        wait_until(lambda: has_put(first))
        with at_work(nodes[1], there) as second:
            wait_until(lambda: has_put(second))
            make_run(nodes[0] / "recordings" / "run-b")
            wait_until(lambda: first.counters.of("conflicts").get("node"))
    assert f"another daemon, on host {os.uname().nodename}, writes this node's documents there, too" in caplog.text


def test_a_watched_folder_that_takes_no_file_still_has_a_name_of_its_own(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / NODE).symlink_to("/etc/passwd")
    first, again, other = (node_name([str(tmp_path / name)]) for name in ("a", "a", "b"))
    assert first == again != other


@pytest.mark.parametrize("is_whole", [True, False])
def test_of_two_daemons_that_begin_at_once_the_first_names_the_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_whole: bool
) -> None:
    """The second looks before the first has drawn a name, and draws afterwards."""
    first = f"host-{0:012x}\n"
    (tmp_path / NODE).write_text(first if is_whole else "host-")
    kept, looks = fleet._kept_name, itertools.count()
    monkeypatch.setattr(fleet, "_kept_name", lambda folder: kept(folder) if next(looks) else None)
    name = node_name([str(tmp_path)])
    assert (tmp_path / NODE).read_text() == f"{name}\n"
    assert (f"{name}\n" == first) is is_whole
