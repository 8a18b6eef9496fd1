"""What a rule finds in training reaches a person: the rank's status, the daemon's metric, and the webhook, once."""

from __future__ import annotations

import http.server
import json
import re
import shutil
import socket
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import recorder
from recorder.checks.live import LIVE_RULES
from recorder.daemon import errands
from recorder.daemon.metrics import _LIVE_RULES
from recorder.daemon.run_shipper import RunShipper
from recorder.format.rundir import STATUS, STATUS_BYTES, Members, encode_status, parse_json
from recorder.run.status import LiveFinding
from tests.daemon.support import at_work, ship
from tests.rigs.command_line import Cli
from tests.rigs.waiting import wait_until

FINDING = {
    "run": "run-a",
    "name": "gpt-a",
    "rule": "spike",
    "severity": "warning",
    "step": 20,
    "ranks": [0, 3],
    "module_path": "",
    "text": "step 20, scalar loss: 3 > 2 & <odd>",
    "command": "recorder check s3://bucket/run-a",
}


@pytest.fixture(scope="module")
def spiked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run whose loss spikes at step 40, and whose block `1` is not finite from step 50 on."""
    folder = tmp_path_factory.mktemp("spiked")
    torch.manual_seed(0)
    second = torch.nn.Linear(8, 8)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), second)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    rules = "site=scalar keep=stats; site=output keep=stats"
    more: dict[str, Any] = {"rules": rules, "min_free_bytes": 0}
    with recorder.attach(model, enabled=True, dir=str(folder / "recordings"), **more):
        for step in range(55):
            optimizer.zero_grad()
            loss = model(torch.randn(16, 8)).square().mean() * (1e3 if step == 40 else 1)
            loss.backward()
            optimizer.step()
            recorder.scalar("loss", loss.detach())
            if step == 49:
                with torch.no_grad():
                    second.weight[0, 0] = float("nan")
    return folder


def findings_of(folder: Path) -> dict[str, LiveFinding]:
    (status,) = folder.rglob(STATUS)
    return {one.rule: one for one in LiveFinding.read_all(parse_json(status.read_bytes(), "status"))}


def test_a_status_says_what_the_rules_have_found(spiked: Path) -> None:
    found = findings_of(spiked)
    assert (found["spike"].step, found["spike"].severity, found["spike"].module) == (40, "warning", "")
    assert found["nonfinite"].text.startswith("step 50, '1' output: not finite (16 NaN of 128 elements)")
    assert (found["nonfinite"].severity, found["nonfinite"].module) == ("error", "1")


def test_a_status_has_room_for_long_findings_and_refuses_what_is_none() -> None:
    long = [{**FINDING, "module": f"{number}" * 900, "number": 1} for number in range(30)]
    text = encode_status({"findings": long, "commands": [{"why": "x" * 200}] * 8, "dropped": {"a" * 90: 1}})
    assert len(text) == STATUS_BYTES
    found = LiveFinding.read_all(parse_json(text, "status"))
    assert [one.module[0] for one in found] == list("01234567")
    assert LiveFinding.read_all({"findings": [1, {"rule": 3, "number": -1, "text": "x" * 900}]})[0].number == 0
    assert Members({}).list_inner("findings") == []


def test_the_rules_that_are_0_at_first_are_those_that_run_in_training() -> None:
    assert {(rule, severity) for rule, severity, _ in _LIVE_RULES} == {
        (rule.name, rule.severity.word) for rule in LIVE_RULES
    }


class Receiver:
    """A webhook's other end on this machine."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        receiver = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                receiver.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *words: Any) -> None: ...

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/hook"
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join(20)


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    one = Receiver()
    yield one
    one.close()


def test_a_finding_moves_its_counter_and_is_posted_by_one_of_the_daemons(
    spiked: Path, receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    there = spiked / "there"
    own = {"listen": "127.0.0.1:0", "webhook": receiver.url}
    with at_work(spiked, str(there), **own) as daemon:
        wait_until(lambda: daemon.counters.of("webhooks").get("sent"))
        with urllib.request.urlopen(f"{daemon.url}/metrics", timeout=20) as answer:
            lines = [line for line in answer.read().decode().splitlines() if line.startswith("recorder_live_findings")]
        (run,) = daemon.runs
    (body,) = receiver.bodies
    told = {one["rule"]: one for one in body["findings"]}
    assert sorted(told) == ["nonfinite", "spike"] and body["number"] == 2
    assert told["nonfinite"]["command"] == f"recorder first file://{there}/{run.key}"
    assert told["spike"]["name"] == run.name and told["spike"]["ranks"] == [0]
    text = told["spike"]["text"]
    assert re.search(r": it is \d[\d.]+, where at most 0\.\d+ was expected$", text), text
    line = f"{run.name} ({run.key}), rank 0: nonfinite: step 50, '1' output"
    assert line in body["text"] and line in caplog.text
    assert any('module="1"' in line and 'rule="nonfinite"' in line and line.endswith(" 1.0") for line in lines), lines
    assert any('module=""' in line and 'rule="jump"' in line and line.endswith(" 0.0") for line in lines), lines
    marks = sorted(path.name[11:] for path in (there / run.key / "_told").iterdir())
    assert marks == ["nonfinite.json", "spike.json"]
    (spiked / "state2").mkdir()
    with at_work(spiked, str(there), **own, state=str(spiked / "state2")) as daemon:  # as another node sees the same
        wait_until(lambda: daemon.runs and not daemon.runs[0].live_news() and daemon.runs[0].is_settled)
    assert len(receiver.bodies) == 1


def test_a_message_that_could_not_be_posted_is_not_marked_as_posted(spiked: Path, receiver: Receiver) -> None:
    there = spiked / "elsewhere"
    for name in ("state3", "state4"):
        (spiked / name).mkdir()
    with socket.create_server(("127.0.0.1", 0)) as server:
        refused = f"http://127.0.0.1:{server.getsockname()[1]}/hook"
    with at_work(spiked, str(there), webhook=refused, state=str(spiked / "state3")) as daemon:
        wait_until(lambda: daemon.counters.of("webhooks").get("failed"))
        (run,) = daemon.runs
        wait_until(lambda: not list((there / run.key / "_told").glob("*.json")))
    with at_work(spiked, str(there), webhook=receiver.url, state=str(spiked / "state4")) as daemon:
        wait_until(lambda: daemon.counters.of("webhooks").get("sent"))
    assert len(receiver.bodies) == 1


def test_once_tells_a_finding_once_and_with_a_link_to_the_page(
    spiked: Path, receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    there = spiked / "once"
    own = {"webhook": receiver.url, "page_url": "https://view.example/token/", "state": str(spiked / "state5")}
    assert ship(spiked, str(there), **own)[0] == 0
    (body,) = receiver.bodies
    (run,) = (path for path in there.iterdir() if not path.name.startswith("_"))
    page = f"https://view.example/token/run/{run.name}/#view=map&step=50"
    (told,) = [one for one in body["findings"] if one["rule"] == "nonfinite"]
    assert told["page"] == page and f"`{told['command']}`\n{page}\n" in f"{body['text']}\n"
    assert "nonfinite: step 50" in caplog.text
    for mark in (run / "_told").iterdir():  # as on the next day
        mark.rename(mark.with_name(f"2020-01-01{mark.name[10:]}"))
    caplog.clear()
    assert ship(spiked, str(there), **own)[0] == 0
    assert "nonfinite" not in caplog.text and len(receiver.bodies) == 1
    shutil.rmtree(run / "_told")
    assert ship(spiked, str(there), **own | {"webhook": ""})[0] == 0
    assert "nonfinite: step 50" in caplog.text
    assert sorted(path.name[11:] for path in (run / "_told").iterdir()) == ["nonfinite.json", "spike.json"]


def test_slack_gets_its_text_and_nothing_else() -> None:
    assert errands.message([FINDING], is_slack=True) == {
        "text": "gpt-a (run-a), ranks 0, 3: spike: step 20, scalar loss: 3 &gt; 2 &amp; &lt;odd&gt;\n"
        "`recorder check s3://bucket/run-a`"
    }
    assert errands.message([FINDING], is_slack=False)["findings"] == [FINDING]


def test_check_says_rank_and_module_of_what_is_new(cli: Cli, recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = cli("check", recorded, "--json")
    monkeypatch.setattr(errands, "_run", lambda words, is_stopping: (told.exit_code, told.out, told.err))
    shared = SimpleNamespace(is_stopping=lambda: False, counters=SimpleNamespace(add=lambda *words: None))
    run: Any = SimpleNamespace(path=str(recorded), key="run-a", shared=shared, findings={}, all_writers=[])
    first, *others = errands.check(run)
    assert first.pop("text").startswith("step 9, 'layers.0' ")
    assert first == {"rule": "nonfinite", "severity": "error", "step": 9, "ranks": [1], "module_path": "layers.0"}
    assert errands.check(run) == [], "what was told is no news"
    live = LiveFinding(rule="nonfinite", severity="error", module="layers.0", step=9, number=1, text="step 9, ...")
    run.findings, run.all_writers = {}, [SimpleNamespace(rank=1, findings=(live,))]
    assert errands.check(run) == others, "nor is what a rule said in training"


def test_what_two_ranks_find_at_one_step_is_said_once() -> None:
    one = LiveFinding(rule="nonfinite", severity="error", module="a", step=9, number=1, text="step 9, ...")
    writers = [SimpleNamespace(rank=rank, findings=found) for rank, found in enumerate([(one,), (one,), (), ()])]
    run: Any = SimpleNamespace(all_writers=writers, _seen_findings=set())
    assert [news["ranks"] for news in RunShipper.live_news(run)] == [[0, 1]]
    writers[2].findings = (one,)  # its status came a second later
    assert RunShipper.live_news(run) == []
    writers[3].findings = (replace(one, step=30),)
    assert [(news["step"], news["ranks"]) for news in RunShipper.live_news(run)] == [(30, [3])]


def test_what_two_ranks_find_of_one_fault_is_said_in_the_order_of_causes() -> None:
    """The first rank kept no statistics but of gradients, which the second rank's forward has broken."""
    first = LiveFinding(rule="spike", severity="warning", module="b", step=9, number=1, text="...", site="output")
    others = [
        replace(first, rule=rule, severity=severity, module=module, site="grad")
        for rule, severity, module in (("nonfinite", "error", "a"), ("jump", "warning", "a"), ("spike", "warning", "a"))
    ]
    later = replace(first, rule="nonfinite", severity="error", step=10)
    writers = [SimpleNamespace(rank=0, findings=(*others[::-1], later)), SimpleNamespace(rank=1, findings=(first,))]
    run: Any = SimpleNamespace(all_writers=writers, _seen_findings=set())
    said = [(news["step"], news["rule"], news["module_path"]) for news in RunShipper.live_news(run)]
    assert said == [
        (9, "spike", "b"),
        (9, "nonfinite", "a"),
        (9, "jump", "a"),
        (9, "spike", "a"),
        (10, "nonfinite", "b"),
    ]


@pytest.mark.parametrize("kind", ["fine", "slow", "redirect", "endless", "refuses", "down"])
def test_a_webhook_is_told_once_and_cannot_hurt(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errands, "_WEBHOOK_TIMEOUT_S", 0.5)
    bodies: list[bytes] = []

    class Receiver(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
            if kind == "slow":
                time.sleep(2)
            if kind == "endless":
                for _ in range(40):
                    self.wfile.write(b"H")
                    time.sleep(0.1)
            if kind == "redirect":
                self.send_response(307)
                self.send_header("Location", "http://127.0.0.1:9/again")
                self.end_headers()
                return
            self.send_response(500 if kind == "refuses" else 200)
            self.end_headers()

        def log_message(self, *words: Any) -> None: ...

    class Server(http.server.ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *words: Any) -> None: ...

    server = Server(("127.0.0.1", 0), Receiver)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    if kind == "down":
        server.shutdown()
        server.server_close()
    results: Counter[str] = Counter()
    try:
        url = f"http://127.0.0.1:{server.server_address[1]}/hook"
        errands.tell_webhook(url, [FINDING], lambda result: results.update([result])).join(20)
    finally:
        if kind != "down":
            server.shutdown()
            server.server_close()
        thread.join(10)
    assert results == {"sent" if kind == "fine" else "failed": 1}
    assert len(bodies) == int(kind != "down")
