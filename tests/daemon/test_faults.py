"""What may happen under a daemon: permissions, credentials and the ledger are lost, clocks jump, runs are replaced."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import recorder
from recorder.daemon.daemon import Daemon
from recorder.daemon.shipping.ledger import ledger_name
from tests.cli.conftest import Cli
from tests.daemon.proxy import FaultyProxy
from tests.daemon.support import at_work, files, objects, settings, ship
from tests.daemon.test_shipping import prefix_of, small_run
from tests.distributed.jobs import environment
from tests.read.handmade import HandmadeWriter, make_row, make_run
from tests.storage.server import ACCESS_KEY, SECRET_KEY, StoreServer
from tests.waiting import wait_until
from tests.write.rig import Rig

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
        words = ("--once", "--watch=recordings", "--to=there", "--state=state", "--catalog-s=0", "--deadline-s=60")
        done = subprocess.run(
            [*command, *words], cwd=tmp_path, env=environment({}), capture_output=True, text=True, timeout=50
        )
    finally:
        for path in closed:
            path.chmod(0o755)
    assert done.returncode == 1, done.stderr
    assert "1 file not there; not shipped: " in done.stdout
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


def test_a_full_disk_costs_the_ledger_and_nothing_else(tmp_path: Path, store: StoreServer, to: str) -> None:
    run = small_run(tmp_path)
    (run / ledger_name(to)).mkdir()  # nobody can write it
    code, daemon = ship(tmp_path, to)
    assert code == 0
    assert objects(store, prefix_of(to)) == files(run.parent)
    assert daemon.counters.of("errors") == {}
    (run / ledger_name(to)).rmdir()
    code, daemon = ship(tmp_path, to)
    assert (code, daemon.counters.of("uploads"), daemon.counters.of("confirmed")) == (0, {}, {"there": 6})


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
    tmp_path: Path, store: StoreServer, to: str
) -> None:
    (tmp_path / "recordings").mkdir()
    rig = Rig(tmp_path / "recordings" / "run-a", flush_interval_s=0.05, shard_rows=5).start()
    with (
        at_work(tmp_path, to) as one,
        at_work(tmp_path, to, state=str(tmp_path / "state-2")) as two,
    ):
        for step in range(40):
            rig.put(step=step)
            time.sleep(0.02)
        rig.close()
        wait_until(
            lambda: all(run.is_settled for daemon in (one, two) for run in daemon.runs) and one.runs and two.runs
        )
        assert one.counters.of("conflicts") == two.counters.of("conflicts") == {}
    assert objects(store, prefix_of(to)) == files(tmp_path / "recordings")
