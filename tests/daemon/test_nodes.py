"""In a store a node shows all its ranks in one document: readers, `recorder view` and a rank that dies."""

from __future__ import annotations

import http.client
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest

import recorder
from recorder.format.rundir import STATUS, encode_status, parse_json
from recorder.run.finding import fleet_runs
from recorder.run.status import RunWatch
from recorder.storage.locations import location_of
from recorder.system.processes import own_process
from tests.daemon.support import at_work, objects, ship
from tests.daemon.test_shipping import prefix_of, small_run
from tests.rigs.command_line import Cli
from tests.rigs.handmade import HandmadeWriter, make_row, make_run
from tests.rigs.server import BUCKET, StoreServer
from tests.rigs.serving import serving
from tests.rigs.waiting import wait_until

FOUND = {"rule": "nonfinite", "severity": "error", "module": "a", "step": 3, "number": 1, "text": "step 3, 'a': 1 NaN"}

_LIVING = """
import json, time
from recorder.system.processes import own_process
print(json.dumps(own_process()), flush=True)
time.sleep(600)
"""


def show(writer: HandmadeWriter, step: int, **facts: object) -> None:
    known = {
        "writer": writer.directory.name,
        "rank": writer.rank,
        "attempt": 0,
        "state": "recording",
        "interval_s": 1.0,
    }
    known |= {"step": step, "observed": step, "written": step, "time_ns": time.time_ns(), **own_process(), **facts}
    (writer.directory / STATUS).write_bytes(encode_status(known))


def a_node(tmp_path: Path, folder: str = "run-a", num_ranks: int = 3) -> list[HandmadeWriter]:
    run = make_run(tmp_path / "recordings" / folder)
    writers = [HandmadeWriter(run, rank) for rank in range(num_ranks)]
    for writer in writers:
        writer.add_shard([[make_row(step, [1.0], step=step, module_path="a") for step in range(3)]], kind="stats")
        writer.finish(state="recording", **own_process())
        show(writer, 5 + writer.rank)
    return writers


def documents(store: StoreServer, to: str) -> list[str]:
    prefix = f"{prefix_of(to)}/run-a/_nodes/"
    listed = store.client.list_objects_v2(Bucket=BUCKET, Prefix=prefix).get("Contents", ())
    return [one["Key"] for one in listed]


def test_ranks_of_a_node_are_one_object_until_they_end(tmp_path: Path, store: StoreServer, to: str) -> None:
    writers = a_node(tmp_path)
    show(writers[0], 5, findings=[FOUND])
    with at_work(tmp_path, to), store.counting() as counts:
        wait_until(lambda: documents(store, to) and "run-a/_run.json" in objects(store, prefix_of(to)))
        run = location_of(f"{to}/run-a")
        wait_until(lambda: [rank.status.step for rank in RunWatch(run).look()] == [5, 6, 7])
        (key,) = documents(store, to)
        assert not any(name.endswith(STATUS) for name in objects(store, prefix_of(to))), "each would be a request"
        now = RunWatch(run).look()
        assert {rank.status.host for rank in now} == {key.rpartition("/")[2].removesuffix(".json")}
        assert [rank.state for rank in now] == ["recording"] * 3 and now[0].status.findings[0].module == "a"
        opened = recorder.open_run(f"{to}/run-a")
        assert [writer.state for writer in opened.writers] == ["recording"] * 3
        before = counts["PUT"]
        for step in range(10, 14):
            for writer in writers:
                show(writer, step)
            time.sleep(0.5)
        wait_until(lambda: {rank.status.step for rank in RunWatch(run).look()} == {13})
        assert counts["PUT"] - before < 10, "three ranks cost what one costs"
        for writer in writers:
            writer.finish()
            show(writer, 14, state="closed")
        wait_until(lambda: sum(name.endswith(STATUS) for name in objects(store, prefix_of(to))) == 3)
        wait_until(lambda: [rank.state for rank in RunWatch(run).look()] == ["closed"] * 3)


def test_a_run_whose_folder_goes_while_it_is_recorded_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    a_node(tmp_path)
    small_run(tmp_path, "run-b")
    with at_work(tmp_path, str(tmp_path / "there")) as daemon:
        wait_until(lambda: sorted(run.is_put for run in daemon.runs) == [True, True])
        for name in ("run-a", "run-b"):
            shutil.rmtree(tmp_path / "recordings" / name)
        wait_until(lambda: not daemon.runs)
    said = [record.getMessage() for record in caplog.records if "vanished" in record.getMessage()]
    assert said == ["run-a: its folder vanished during the recording; shipped files stay"]


def test_a_rank_that_was_killed_is_so_for_those_who_cannot_ask_its_host(
    tmp_path: Path, store: StoreServer, to: str
) -> None:
    process = subprocess.Popen([sys.executable, "-c", _LIVING], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    *_, last = a_node(tmp_path)
    dying = json.loads(process.stdout.readline())
    last.finish(state="recording", **dying)
    show(last, 7, **dying)
    with at_work(tmp_path, to):
        run = location_of(f"{to}/run-a")
        wait_until(lambda: bool(documents(store, to)))  # by which the host is not this one, and cannot be asked
        wait_until(lambda: [rank.state for rank in RunWatch(run).look()] == ["recording"] * 3)
        process.kill()
        process.communicate()
        wait_until(lambda: [rank.state for rank in RunWatch(run).look()] == ["recording", "recording", "killed"])


def test_an_earlier_writer_of_a_rank_is_counted_and_takes_no_room(tmp_path: Path, store: StoreServer, to: str) -> None:
    first, *_ = a_node(tmp_path, num_ranks=1)
    first.finish()
    show(first, 5, state="closed", text="x" * 100)
    again = HandmadeWriter(tmp_path / "recordings" / "run-a", name="20260102-000000-host-2")
    again.finish(state="recording", attempt=1, **own_process())
    show(again, 9, attempt=1)
    assert ship(tmp_path, to)[0] == 0
    (rank,) = RunWatch(location_of(f"{to}/run-a")).look()
    assert (rank.status.step, rank.num_writers, rank.num_alive) == (9, 2, 1)
    (key,) = documents(store, to)
    body = store.client.get_object(Bucket=BUCKET, Key=key)["Body"].read()
    assert b"x" * 100 not in body
    store.put(key, b'{"writers":{"../../x":1,"rank=00000/y":{"changed_ns":-1,"step":"9"},"rank=0x":{}}}')
    assert [rank.status.step for rank in RunWatch(location_of(f"{to}/run-a")).look()] == [0], "untrusted"


def test_the_fleet_is_listed_and_a_run_has_its_ranks_without_a_listing_of_the_run(
    tmp_path: Path, store: StoreServer, to: str
) -> None:
    writers = a_node(tmp_path, "team/run-a")
    show(writers[1], 5, findings=[FOUND], dropped={"pool_full": 2}, free_bytes=7)
    assert ship(tmp_path, to)[0] == 0
    (summary,) = fleet_runs(location_of(to)).values()
    assert summary["findings"] == {"nonfinite: step 3, 'a': 1 NaN"}
    with serving(location_of(to)) as server:
        address = urlsplit(server.address)

        def ask(path: str) -> tuple[int, str]:
            connection = http.client.HTTPConnection(address.hostname or "", address.port or 0, timeout=30)
            connection.request("GET", address.path + path)
            answer = connection.getresponse()
            found = answer.status, answer.read().decode()
            connection.close()
            return found

        with store.counting() as counts:
            (run,) = json.loads(ask("runs")[1])
        assert (run["directory"], run["step"], run["ranks"]) == ("team/run-a", 7, 3)
        assert run["found"] == ["nonfinite: step 3, 'a': 1 NaN"] and run["states"] == {"recording": 3}
        assert counts["LIST"] <= 2
        assert ask("ranks?run=team%2Frun-a")[0] == 200
        ask("run/team%2Frun-a/ranks")
        with store.counting() as counts:
            status, text = ask("run/team%2Frun-a/ranks")
        ranks = json.loads(text)["ranks"]
        assert (counts["LIST"], counts["GET"], status) == (1, 0, 200), "one listing, and no document twice"
        assert [(one["rank"], one["step"], one["dropped"], one["free_bytes"]) for one in ranks] == [
            (0, 5, {}, None), (1, 5, {"pool_full": 2}, 7), (2, 7, {}, None)
        ]  # fmt: skip
        assert ranks[1]["findings"][0]["text"] == FOUND["text"]
        show(writers[1], 6)
        assert ship(tmp_path, to)[0] == 0
        with store.counting() as counts:
            ranks = json.loads(ask("run/team%2Frun-a/ranks")[1])["ranks"]
        assert ([one["step"] for one in ranks], counts["GET"]) == ([5, 6, 7], 1)
        assert ask("run/team%2Frun-b/ranks")[0] == 404
        assert ask("run/..%2Frun-a/ranks")[0] == 404


def test_a_node_that_is_silent_is_so_in_the_list_and_in_top(
    tmp_path: Path, store: StoreServer, to: str, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_node(tmp_path, "team/run-a")
    assert ship(tmp_path, to)[0] == 0

    def states() -> set[str]:
        ranks = cli("top", f"{to}/team/run-a", "--once", "--json").json["ranks"]
        return {rank["state"] for rank in ranks} | {run["state"] for run in cli("ls", to, "--json").json["runs"]}

    assert states() == {"recording"} and " up to 7 " in cli("ls", to).out
    monkeypatch.setattr("recorder.run.status._GRACE_S", -60.0)
    assert states() == {"silent"}
    monkeypatch.setattr("recorder.run.finding._QUIET_S", -1.0)  # the index alone shows that the node is gone
    assert {one["state"] for one in fleet_runs(location_of(to)).values()} == {"silent"}


def test_the_end_of_a_run_is_listed_at_once(
    tmp_path: Path, store: StoreServer, to: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("recorder.daemon.daemon._SUMMARY_S", 1e6)
    writers = a_node(tmp_path)
    with at_work(tmp_path, to):
        wait_until(lambda: [one["state"] for one in fleet_runs(location_of(to)).values()] == ["recording"])
        for writer in writers:
            writer.finish()
            show(writer, 11, state="closed")
        wait_until(lambda: [one["state"] for one in fleet_runs(location_of(to)).values()] == ["closed"])


def test_a_daemon_that_stops_puts_once_more_what_it_shows(tmp_path: Path, store: StoreServer, to: str) -> None:
    writers = a_node(tmp_path, num_ranks=1)
    with at_work(tmp_path, to, status_s=1000.0) as daemon:
        run = location_of(f"{to}/run-a")
        wait_until(lambda: documents(store, to) and fleet_runs(location_of(to)))
        wait_until(lambda: "run-a/_run.json" in objects(store, prefix_of(to)))
        show(writers[0], 9)
        wait_until(lambda: [(one.shown or {}).get("step") for one in daemon.runs[0].all_writers] == [9])
        assert [rank.status.step for rank in RunWatch(run).look()] == [5]
    assert [rank.status.step for rank in RunWatch(run).look()] == [9]
    assert [one["last_step"] for one in fleet_runs(location_of(to)).values()] == [9]


def test_a_number_that_no_document_may_have_stops_nothing(tmp_path: Path, store: StoreServer, to: str) -> None:
    writers = a_node(tmp_path)
    (writers[0].directory / STATUS).write_text('{"state": "recording", "step": 1, "waited_s": NaN}')
    code, daemon = ship(tmp_path, to)
    assert (code, daemon.counters.of("errors")) == (0, {})
    (key,) = documents(store, to)
    body = store.client.get_object(Bucket=BUCKET, Key=key)["Body"].read()
    assert set(parse_json(body, key)["writers"]) == {
        f"rank={rank:05d}/{writers[0].directory.name}" for rank in range(3)
    }
