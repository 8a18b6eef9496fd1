"""What may happen under a daemon: permissions, credentials and the ledger are lost, clocks jump, runs are replaced."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import recorder
from recorder.daemon.daemon import Daemon
from recorder.daemon.destination import Throttle, parse_destination
from recorder.daemon.errands import send_to_store
from recorder.daemon.fleet import FleetDocument, remove_from_fleet
from recorder.daemon.shipped import ledger_name
from recorder.errors import WriteError
from recorder.format.commands import COMMANDS, SET, Command, command_name
from recorder.system.processes import own_process
from tests.daemon.support import at_work, files, objects, settings, ship
from tests.daemon.test_shipping import prefix_of, small_run
from tests.rigs.command_line import Cli
from tests.rigs.handmade import HandmadeWriter, make_row, make_run
from tests.rigs.jobs import environment
from tests.rigs.proxy import FaultyProxy
from tests.rigs.server import ACCESS_KEY, SECRET_KEY, StoreServer
from tests.rigs.waiting import PATIENCE_S, wait_until
from tests.rigs.writer import Rig

WITHOUT_ROOTS_RIGHTS = ("setpriv", "--bounding-set=-dac_override,-dac_read_search")


@pytest.mark.skipif(
    os.getuid() == 0 and shutil.which("setpriv") is None, reason="root may read everything; needs setpriv"
)
def test_what_may_not_be_read_is_said_and_ends_an_epilog_and_the_rest_is_there(tmp_path: Path) -> None:
    run = {name: small_run(tmp_path, name) for name in ("run-a", "run-b", "run-c", "run-d")}
    (writer_b,) = run["run-b"].glob("rank=00001/*")
    (shard_c,) = run["run-c"].glob("rank=00001/*/tensors-000000.arrow")
    (run["run-d"] / "_run.json").write_bytes(b'{"run')
    expected = set(files(tmp_path / "recordings"))
    closed = [run["run-a"] / "rank=00001", writer_b, shard_c]
    try:
        for path in closed:
            path.chmod(0)
        command = [*(WITHOUT_ROOTS_RIGHTS if os.getuid() == 0 else ()), sys.executable, "-m", "recorder", "daemon"]
        words = ("--once", "--watch=recordings", "--to=there", "--state=state", "--deadline-s=60")
        done = subprocess.run(
            [*command, *words], cwd=tmp_path, env=environment({}), capture_output=True, text=True, timeout=50
        )
    finally:
        for path in closed:
            path.chmod(0o755)
    assert done.returncode == 1, done.stderr
    assert f"1 file not there: {shard_c}; not shipped: " in done.stdout
    for path in (run["run-a"] / "rank=00001", writer_b, run["run-d"] / "_run.json"):
        assert str(path) in done.stdout
    assert str(shard_c) in done.stderr
    assert "Traceback" not in done.stderr
    hidden = ("run-a/rank=00001/", f"run-b/rank=00001/{writer_b.name}/", "run-d/")
    seen = {name for name in expected if not name.startswith((*hidden, "run-c/rank=00001/"))}
    assert seen <= files(tmp_path / "there").keys()
    assert ship(tmp_path, f"file://{tmp_path}/there")[0] == 1  # run-d stays broken
    assert {name for name in expected if not name.startswith("run-d/")} <= files(tmp_path / "there").keys()


def test_credentials_that_expire_are_found_anew(
    tmp_path: Path, store: StoreServer, to: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "credentials"
    text = f"[default]\naws_access_key_id = {{}}\naws_secret_access_key = {SECRET_KEY}\n"
    file.write_text(text.format(ACCESS_KEY))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    small_run(tmp_path)
    with at_work(tmp_path, to) as daemon:
        wait_until(lambda: any(one.is_settled for one in daemon.runs))
        file.write_text(text.format("AKIAEXPIRED"))
        daemon.shared.destination.renew()
        second = small_run(tmp_path, "run-b")
        wait_until(lambda: daemon.counters.of("errors").get("refused"))
        assert "refuses the credentials" in daemon.health.problem
        file.write_text(text.format(ACCESS_KEY))
        wait_until(lambda: len(daemon.runs) == 2 and all(one.is_settled for one in daemon.runs))
        assert not daemon.health.problem
    assert objects(store, prefix_of(to)) == files(second.parent)


def test_a_put_that_fails_does_not_take_the_machines_role_away(
    tmp_path: Path, store: StoreServer, to: str, proxy: FaultyProxy
) -> None:
    small_run(tmp_path)
    proxy.fault = lambda method, path: "500" if method == "PUT" else None
    daemon = Daemon(settings(tmp_path, to, deadline_s=0.5))
    with pytest.raises(Exception, match="failed \\(InternalError HTTP 500"):
        daemon.check_store()


def test_a_daemon_that_begins_while_the_store_damages_a_put_goes_on(
    tmp_path: Path, store: StoreServer, to: str, proxy: FaultyProxy
) -> None:
    run = small_run(tmp_path)
    faults = iter(["damage"])
    proxy.fault = lambda method, path: next(faults, None) if method == "PUT" else None
    with at_work(tmp_path, to) as daemon:
        wait_until(lambda: any(one.is_settled for one in daemon.runs))
    assert daemon.counters.of("errors") == {"damaged": 1}
    assert objects(store, prefix_of(to)) == files(run.parent)


def test_a_store_that_would_overwrite_is_refused_before_anything_is_moved(
    tmp_path: Path, store: StoreServer, to: str, proxy: FaultyProxy, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy.hides_conditions = True
    small_run(tmp_path)
    found = cli("daemon", "--once", "--watch", tmp_path / "recordings", "--to", to, "--state", tmp_path / "state")
    assert found.exit_code == 2, found
    assert "takes puts whose conditions (If-None-Match, If-Match) do not hold" in found.err
    assert objects(store, prefix_of(to)) == {}


def test_a_run_that_is_replaced_by_another_of_its_name_is_not_mixed_with_it(
    tmp_path: Path, store: StoreServer, to: str
) -> None:
    run = small_run(tmp_path)
    with at_work(tmp_path, to) as daemon:
        wait_until(lambda: any(one.is_settled for one in daemon.runs))
        expected = files(run.parent)
        other = small_run(tmp_path / "other")
        manifest = json.loads((other / "_run.json").read_bytes()) | {"run_id": "another"}
        (other / "_run.json").write_text(json.dumps(manifest))
        for writer in other.glob("rank=*/*"):
            writer.rename(writer.with_name(f"{writer.name}9"))
        run.rename(tmp_path / "old")
        other.rename(run)
        wait_until(lambda: daemon.counters.of("conflicts") == {"run": 1})
    assert objects(store, prefix_of(to)) == expected


def test_a_ledger_that_cannot_be_kept_costs_nothing_else(tmp_path: Path, store: StoreServer, to: str) -> None:
    run = small_run(tmp_path)
    (run / ledger_name(to)).mkdir()  # nobody can write it
    code, daemon = ship(tmp_path, to)
    assert code == 0
    assert objects(store, prefix_of(to)) == files(run.parent)
    assert daemon.counters.of("errors") == {}
    (run / ledger_name(to)).rmdir()
    code, daemon = ship(tmp_path, to)
    assert (code, daemon.counters.of("uploads"), daemon.counters.of("confirmed_files")) == (0, {}, {"there": 6})


@pytest.mark.skipif(
    subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode != 0, reason="needs mount namespaces"
)
def test_a_disk_without_a_byte_left_costs_the_ledger_which_is_said_once(
    tmp_path: Path, store: StoreServer, to: str
) -> None:
    run = small_run(tmp_path / "kept")
    script = """
mkdir recordings && mount -t tmpfs -o size=256k none recordings && cp -r kept/recordings/run-a recordings/
cat /dev/zero > recordings/ballast 2> /dev/null
exec "$@"
"""
    words = ["daemon", "--once", "--watch=recordings", f"--to={to}", "--state=recordings/state"]
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", script, "sh", sys.executable, "-m", "recorder", *words],
        cwd=tmp_path, env=environment({}), capture_output=True, text=True, timeout=50,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("cannot be written (No space left on device); what it lacks is found in the store") == 1
    assert len(done.stderr.splitlines()) == 1
    assert objects(store, prefix_of(to)) == files(run.parent)


def test_a_daemon_that_stands_still_keeps_its_lock_and_goes_on_where_it_was(
    tmp_path: Path, store: StoreServer, to: str, proxy: FaultyProxy
) -> None:
    """While it is stopped its connections are cut, its run ends, a second daemon comes, and it is told something."""
    config = tmp_path / "daemon.toml"
    config.write_text("fresh_s = 1\nstatus_s = 0.5\naccept_commands = true\n")
    recordings = tmp_path / "recordings"
    rig = Rig(recordings / "run-a", flush_interval_s=0.05, shard_rows=5)
    rig.writer.set_manifest(own_process())
    rig.start()
    words = ["--watch=recordings", f"--to={to}", "--state=state", f"--config={config}", "--listen="]
    log = tmp_path / "daemon.log"
    with open(log, "wb") as err:
        daemon = subprocess.Popen(
            [sys.executable, "-m", "recorder", "daemon", *words], cwd=tmp_path, env=environment({}), stderr=err
        )
    try:
        rig.put(step=0, keep=recorder.records.KEEP_STATS)
        wait_until(lambda: "run-a/_run.json" in objects(store, prefix_of(to)))
        config.write_text("fresh_s = -1\n")
        daemon.send_signal(signal.SIGHUP)
        for step in range(1, 12):
            rig.put(step=step)
        assert rig.drain()
        wait_until(lambda: "the old ones stay in force" in log.read_text())
        wait_until(lambda: any("/tensors-" in name for name in objects(store, prefix_of(to))))
        daemon.send_signal(signal.SIGSTOP)
        num_cut = itertools.count()
        proxy.fault = lambda method, path: "cut" if next(num_cut) < 3 else None
        told = Command(kind=SET, from_step=100, rules=("site=grad keep=tensor",))
        with pytest.MonkeyPatch.context() as direct:
            direct.setenv("AWS_ENDPOINT_URL", store.url)
            send_to_store(parse_destination(to, Throttle(0)), "run-a", told, b"")
            with pytest.raises(WriteError, match=f"another daemon of this node ships to it: process {daemon.pid} "):
                Daemon(settings(tmp_path, to)).run_once()
        assert not (recordings / "run-a" / COMMANDS).exists()
        daemon.send_signal(signal.SIGCONT)
        wait_until(lambda: (recordings / "run-a" / COMMANDS / command_name(1)).exists())
        daemon.send_signal(signal.SIGSTOP)
        rig.close()
        daemon.send_signal(signal.SIGCONT)
        wait_until(lambda: _without_commands(objects(store, prefix_of(to))) == _without_commands(files(recordings)))
        daemon.terminate()
        assert daemon.wait(30) == 0
    finally:
        daemon.kill()
        daemon.wait()


def _without_commands(found: dict[str, bytes]) -> dict[str, bytes]:
    return {name: content for name, content in found.items() if f"/{COMMANDS}/" not in name}


def test_a_node_that_was_started_anew_ships_what_its_writers_left(tmp_path: Path, store: StoreServer, to: str) -> None:
    """Nobody can tell of a process before the boot whether it runs: what it left goes as it is, and stays here."""
    run = make_run(tmp_path / "recordings" / "run-a")
    writer = HandmadeWriter(run)
    writer.add_shard([[make_row(0, np.ones(8, np.float32))]], is_sealed=False)
    writer.finish(state="recording", host=os.uname().nodename, pid=os.getpid(), process="another-boot:1:7")
    for path in run.rglob("*"):
        os.utime(path, (1e9, 1e9))
    with at_work(tmp_path, to, keep_local="0s") as daemon:
        wait_until(lambda: any(one.is_settled for one in daemon.runs))
        assert daemon.counters.of("removed_runs") == {}
    assert objects(store, prefix_of(to)) == files(run.parent)
    assert recorder.open_run(f"{to}/run-a").num_rows == 1


@pytest.mark.parametrize("jump_s", [-86400.0, 86400.0])
def test_a_clock_that_jumps_costs_nothing(
    tmp_path: Path, store: StoreServer, to: str, monkeypatch: pytest.MonkeyPatch, jump_s: float
) -> None:
    (tmp_path / "recordings").mkdir()
    rig = Rig(tmp_path / "recordings" / "run-a", flush_interval_s=0.05).start()
    now = time.time
    with at_work(tmp_path, to) as daemon:
        rig.put(step=0, keep=recorder.records.KEEP_STATS)
        assert rig.drain()
        wait_until(lambda: any(name.endswith(".open") for name in objects(store, prefix_of(to))))
        monkeypatch.setattr(time, "time", lambda: now() + jump_s)
        rig.put(step=1, keep=recorder.records.KEEP_STATS)
        rig.close()
        wait_until(lambda: any(one.is_settled for one in daemon.runs))
        assert daemon.counters.of("errors") == daemon.counters.of("conflicts") == {}
    assert objects(store, prefix_of(to)) == files(tmp_path / "recordings")


def test_two_daemons_that_do_not_know_of_each_other_ship_a_run_once(
    tmp_path: Path, store: StoreServer, to: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each counts once that the other writes their node's document: when its own put finds the other's there."""
    monkeypatch.setattr("recorder.daemon.daemon._SUMMARY_S", 0.1)
    (tmp_path / "recordings").mkdir()
    rig = Rig(tmp_path / "recordings" / "run-a", flush_interval_s=0.05, shard_rows=5).start()
    with (
        at_work(tmp_path, to) as one,
        at_work(tmp_path, to, state=str(tmp_path / "state-2")) as two,
    ):
        steps, next_s = itertools.count(), time.monotonic()

        def have_met() -> bool:
            """Put a step now and then, so that each daemon has a new summary to put, and no queue of shards."""
            nonlocal next_s
            if time.monotonic() >= next_s:
                rig.put(step=next(steps))
                next_s = time.monotonic() + 0.05
            return all(daemon.counters.of("conflicts") for daemon in (one, two))

        wait_until(have_met, 4 * PATIENCE_S)  # several rounds of both daemons
        rig.close()
        wait_until(
            lambda: all(run.is_settled for daemon in (one, two) for run in daemon.runs) and one.runs and two.runs
        )
        assert one.counters.of("conflicts") == two.counters.of("conflicts") == {"node": 1}
    assert objects(store, prefix_of(to)) == files(tmp_path / "recordings")


def test_a_daemon_whose_summaries_are_always_put_already_finds_the_other_daemon(to: str) -> None:
    """The daemons see the same files at the same times, so the second never has anything to put."""
    seen: dict[str, list[str]] = {"one": [], "two": []}
    one, two = (
        FleetDocument(parse_destination(to, Throttle(0)), "node-0123456789ab", seen[name].append) for name in seen
    )
    for step in range(4):
        one.put({"run-a": {"last_step": step}})
        two.put({"run-a": {"last_step": step}})
    assert list(seen.values()) == [[os.uname().nodename]] * 2


def test_a_restarted_daemon_and_a_prune_are_no_other_daemon(to: str) -> None:
    seen: list[str] = []
    destination = parse_destination(to, Throttle(0))
    for life in range(2):
        document = FleetDocument(destination, "node-0123456789ab", seen.append)
        for step in range(3):
            document.put({f"run-{name}": {"last_step": 3 * life + step} for name in "ab"})
            remove_from_fleet(destination, "run-b")
    assert seen == []
