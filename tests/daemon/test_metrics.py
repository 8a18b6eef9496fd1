"""What the daemon shows: each metric is documented, promtool has nothing against them, and TLS and password hold."""

from __future__ import annotations

import base64
import logging
import re
import socket
import ssl
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from recorder.daemon.daemon import Daemon
from recorder.errors import ConfigError
from recorder.records import KEEP_STATS
from recorder.system.text import size
from tests.daemon.support import at_work, objects, settings
from tests.daemon.test_shipping import prefix_of, small_run
from tests.rigs.command_line import Cli
from tests.rigs.programs import needs
from tests.rigs.proxy import FaultyProxy
from tests.rigs.server import BUCKET, StoreServer
from tests.rigs.serving import make_certificate
from tests.rigs.waiting import PATIENCE_S, wait_until
from tests.rigs.writer import Rig

DOCUMENTED = Path(__file__).parents[2] / "docs" / "daemon-reference.md"


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """What a daemon answers that ships a run under way."""
    tmp_path = tmp_path_factory.mktemp("metrics")
    rig = Rig(tmp_path / "recordings" / "run-a", flush_interval_s=0.05).start()
    rig.writer.set_status({"step": 7, "observed": 1, "pool_bytes": 10, "pool_used_bytes": 5, "waited_s": 0.5})
    rig.writer.count_drop("pool_full", 0)
    rig.put(step=7, keep=KEEP_STATS)
    assert rig.drain()
    with at_work(tmp_path, str(tmp_path / "there"), listen="127.0.0.1:0") as daemon:
        wait_until(lambda: daemon.port and (tmp_path / "there" / "run-a" / "_run.json").exists())
        wait_until(lambda: daemon.counters.of("uploads").get("status"))
        run = daemon.runs[0]
        run.findings = {("spike", "warning"): 2}
        daemon.counters.add("refused_contents", "content", 0)

        def get(path: str, accept: str = "") -> str:
            request = urllib.request.Request(f"http://127.0.0.1:{daemon.port}{path}", headers={"Accept": accept})
            with urllib.request.urlopen(request, timeout=20) as answer:
                return f"{answer.status} {answer.headers['Content-Type']}\n{answer.read().decode()}"

        found = {path: get(path) for path in ("/metrics", "/healthz", "/readyz")}
        found["openmetrics"] = get("/metrics", "application/openmetrics-text; version=1.0.0")
        daemon.health.failed("s3://bucket: away")
        with pytest.raises(urllib.error.HTTPError) as not_ready:
            get("/readyz")
        with not_ready.value as answer:
            found["not ready"] = answer.read().decode()
        with pytest.raises(urllib.error.HTTPError) as nothing:
            get("/etc/passwd")
        with nothing.value as answer:
            found["nothing"] = str(answer.code)
    rig.close()
    yield found


def test_every_metric_is_documented_and_every_documented_one_is_there(shown: dict[str, str]) -> None:
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)", shown["/metrics"], re.M))
    names = {name for name in kinds if not name.startswith("process_")}
    documented = set(re.findall(r"`(recorder_\w+)`", DOCUMENTED.read_text()))
    assert names == documented
    assert all(name.endswith("_total") == (kind == "counter") for name, kind in kinds.items() if name in names)


def test_the_numbers_of_a_rank_are_those_of_its_status(shown: dict[str, str]) -> None:
    labels = 'name="run-a",rank="0",run="run-a"'
    for line in (
        f"recorder_step{{{labels}}} 7.0",
        f"recorder_recording{{{labels}}} 1.0",
        f"recorder_unclosed{{{labels}}} 0.0",
        f"recorder_pool_used_bytes{{{labels}}} 5.0",
        f"recorder_waited_seconds_total{{{labels}}} 0.5",
        'recorder_findings{name="run-a",rule="spike",run="run-a",severity="warning"} 2.0',
        "recorder_daemon_store_up 1.0",
        "recorder_daemon_runs 1.0",
    ):
        sides = line.split("{")
        found = [one for one in shown["/metrics"].splitlines() if one.startswith(sides[0])]
        wanted = set(re.findall(r'\w+="[^"]*"', line)), line.rsplit(" ", 1)[1]
        assert wanted in [(set(re.findall(r'\w+="[^"]*"', one)), one.rsplit(" ", 1)[1]) for one in found], found


def test_it_says_whether_it_lives_and_is_ready(shown: dict[str, str]) -> None:
    assert shown["/healthz"].startswith("200")
    assert shown["/readyz"].startswith("200")
    assert shown["not ready"] == "s3://bucket: away\n"
    assert shown["nothing"] == "404"


def test_open_metrics_are_told_to_who_asks_for_them(shown: dict[str, str]) -> None:
    assert shown["openmetrics"].startswith("200 application/openmetrics-text")
    assert shown["openmetrics"].endswith("# EOF\n")


def test_promtool_has_nothing_against_the_metrics(shown: dict[str, str]) -> None:
    needs("promtool")
    text = shown["/metrics"].partition("\n")[2]
    done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True, timeout=60)
    own = [line for line in (done.stdout + done.stderr).splitlines() if line.startswith("recorder_")]
    assert own == []


def test_counters_are_there_before_they_count_anything(shown: dict[str, str]) -> None:
    for line in (
        'recorder_daemon_conflicts_total{kind="stats"} 0.0',
        'recorder_daemon_errors_total{kind="internal"} 0.0',
        "recorder_daemon_lost_objects_total 0.0",
        'recorder_rows_dropped_total{name="run-a",rank="0",reason="disk_full",run="run-a"} 0.0',
        'recorder_live_findings_total{module="",name="run-a",rank="0",rule="jump",run="run-a",severity="error"} 0.0',
    ):
        assert line in shown["/metrics"]


def test_a_store_that_hangs_moves_a_counter_while_it_hangs(tmp_path: Path, store: StoreServer, to: str) -> None:
    store.before = lambda method, path: time.sleep(1.0)
    small_run(tmp_path)
    with at_work(tmp_path, to) as daemon:
        wait_until(lambda: daemon.shared.destination.requests.totals()[1] > 0.2)
        assert daemon.health.answered_s == 0.0
        store.before = lambda method, path: None


def test_a_daemon_with_nothing_to_ship_knows_whether_the_store_answers(
    tmp_path: Path, to: str, proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_run(tmp_path)
    with at_work(tmp_path, to) as daemon:
        wait_until(lambda: any(run.is_settled for run in daemon.runs))
        proxy.fault = lambda method, path: "500"
        monkeypatch.setattr("recorder.daemon.daemon._ASK_S", 0.0)
        wait_until(lambda: daemon.health.problem)
        proxy.fault = lambda method, path: None
        wait_until(lambda: not daemon.health.problem)


def test_a_store_that_answers_again_is_listed_at_once_and_filled(
    tmp_path: Path, store: StoreServer, to: str, proxy: FaultyProxy, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    caplog.set_level(logging.INFO, "recorder.daemon")
    small_run(tmp_path)
    with at_work(tmp_path, to) as daemon:
        wait_until(lambda: any(run.is_settled for run in daemon.runs))
        before = objects(store, prefix_of(to))
        proxy.fault = lambda method, path: "500"
        monkeypatch.setattr("recorder.daemon.daemon._ASK_S", 0.0)
        wait_until(lambda: daemon.health.problem)
        for key in before:
            store.client.delete_object(Bucket=BUCKET, Key=f"{prefix_of(to)}/{key}")
        assert "answers again" not in caplog.text
        proxy.fault = lambda method, path: None
        wait_until(lambda: objects(store, prefix_of(to)) == before)
    assert caplog.text.count("the store answers again") == 1


def test_a_run_that_ends_while_the_store_hangs_is_to_go(tmp_path: Path, store: StoreServer, to: str, cli: Cli) -> None:
    (tmp_path / "recordings").mkdir()
    is_over = threading.Event()

    def hang(method: str, path: str) -> None:
        is_over.wait(PATIENCE_S)

    with at_work(tmp_path, to) as daemon:
        wait_until(lambda: daemon.health.answered_s)
        store.before = hang
        try:
            run = small_run(tmp_path)
            sealed = [path for path in run.rglob("*") if path.suffix in (".arrow", ".index")]
            wait_until(lambda: daemon.runs)
            (one,) = daemon.runs
            assert len(one.backlog) == len(sealed) > 0
            text = f"{len(sealed)} files with {size(sum(path.stat().st_size for path in sealed))} to go"
            wait_until(lambda: text in cli("daemon", "status", "--state", tmp_path / "state").out)
        finally:
            is_over.set()
            store.before = lambda method, path: None
        wait_until(lambda: one.is_settled)
        assert one.backlog == {}


def test_the_age_of_statistics_grows_while_nothing_of_a_run_can_be_shipped(
    tmp_path: Path, to: str, proxy: FaultyProxy
) -> None:
    proxy.fault = lambda method, path: "500"
    small_run(tmp_path)
    with at_work(tmp_path, to, listen="127.0.0.1:0") as daemon:
        wait_until(lambda: daemon.runs)

        def age_s() -> float:
            with urllib.request.urlopen(f"{daemon.url}/metrics", timeout=20) as answer:
                found = re.search(r"^recorder_daemon_statistics_age_seconds (\S+)", answer.read().decode(), re.M)
            assert found is not None
            return float(found[1])

        wait_until(lambda: age_s() > 0.1)


def test_the_port_speaks_tls_and_asks_for_a_password_if_that_is_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, password = make_certificate(tmp_path), tmp_path / "password"
    password.write_text("prometheus:correct horse\n")
    context = ssl.create_default_context(cafile=str(key))
    small_run(tmp_path)
    own = {"listen_certificate": str(key), "listen_password_file": str(password)}
    with at_work(tmp_path, str(tmp_path / "there"), listen="127.0.0.1:0", **own) as daemon:
        wait_until(lambda: daemon.port and any(run.is_settled for run in daemon.runs))

        def get(path: str, given: str = "") -> tuple[int, str]:
            headers = {"Authorization": f"Basic {base64.b64encode(given.encode()).decode()}"} if given else {}
            request = urllib.request.Request(f"{daemon.url}{path}", headers=headers)
            try:
                with urllib.request.urlopen(request, timeout=20, context=context) as answer:
                    return answer.status, answer.read().decode()
            except urllib.error.HTTPError as error:
                with error:
                    return error.code, error.read().decode()

        assert get("/metrics")[0] == get("/metrics", "prometheus:wrong")[0] == 401
        assert get("/metrics", "prometheus:correct horse")[0] == 200
        assert get("/healthz") == (200, "ok\n")
        monkeypatch.setattr(daemon.health, "problem", "s3://bucket: away")
        assert get("/readyz") == (503, "not ready: the password shows why\n")
        with socket.create_connection(
            ("127.0.0.1", daemon.port), 20
        ) as silent:  # who never shakes hands holds nobody up
            assert get("/healthz") == (200, "ok\n")
            silent.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            assert b"recorder_" not in silent.recv(1000)


@pytest.mark.parametrize(("listen", "is_said"), [("127.0.0.1:0", False), ("0.0.0.0:0", True)])
def test_a_port_that_is_open_to_other_machines_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listen: str, is_said: bool
) -> None:
    said: list[str] = []
    monkeypatch.setattr("recorder.daemon.daemon.logger.warning", lambda text, *words: said.append(text % words))
    small_run(tmp_path)
    with at_work(tmp_path, str(tmp_path / "there"), listen=listen) as daemon:
        wait_until(lambda: any(run.is_settled for run in daemon.runs))
    text = "reads names and figures of runs: listen_certificate and listen_password_file not set"
    assert any(text in one for one in said) == is_said


@pytest.mark.parametrize("name", ["listen_certificate", "listen_password_file"])
def test_a_file_for_the_port_that_cannot_be_used_is_said(tmp_path: Path, name: str) -> None:
    small_run(tmp_path)
    (tmp_path / "file").write_text("nothing of that kind\n")
    with pytest.raises(ConfigError, match=f"{name} = .*expected"):
        Daemon(
            settings(tmp_path, str(tmp_path / "there"), listen="127.0.0.1:0", **{name: str(tmp_path / "file")})
        ).run()
