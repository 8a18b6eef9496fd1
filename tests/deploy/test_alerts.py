"""Each alert rule fires in the incident that it is for, and not before, by what the daemon's collector shows then.

The series that promtool is given are scrapes of the collector, a minute apart: a series that is not there before its
first event is not there for the rule either.
"""

from __future__ import annotations

import contextlib
import http.server
import itertools
import re
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from recorder.daemon.metrics import DaemonCollector
from recorder.daemon.telemetry import Counters, Health, Requests
from recorder.run.status import LiveFinding
from recorder.storage.untrusted_files import FileFacts
from tests.rigs.clusters import wait_for
from tests.rigs.programs import needs
from tests.rigs.prometheus import Prometheus

ALERTS = Path(__file__).parents[2] / "deploy" / "prometheus" / "alerts.yaml"
NUM_SCRAPES, BEGINS = 90, 30
"""Minutes, and the minute in which an incident begins."""


class Node:
    """What a daemon knows of one run with some ranks at work, minute by minute; an incident is of the first rank."""

    def __init__(self, num_ranks: int) -> None:
        self.minute = 0
        self.counters, self.health = Counters(), Health()
        self.requests = Requests(lambda: 60.0 * self.minute)
        writers: list[Any] = [
            SimpleNamespace(
                rank=rank,
                state="alive",
                status={"step": 1, "observed": 10, "written": 10, "dropped": {}},
                lifetime=SimpleNamespace(attempt=0, started_ns=1),
                findings=(),
            )
            for rank in range(num_ranks)
        ]
        self.writer = writers[0]
        self.run: Any = SimpleNamespace(
            key="run-a",
            name="name-a",
            writers=dict(enumerate(writers)),
            all_writers=writers,
            newest_writers=writers,
            backlog={},
            is_settled=False,
            has_looked=True,
            findings={},
        )
        self.hanging = contextlib.ExitStack()
        self.free_bytes = 1e12
        self.is_stuck = self.is_stale = self.is_hung = False

    def drop(self, num_rows: int) -> None:
        self.writer.status["dropped"] = {"pool_full": num_rows}

    def text(self, collector: DaemonCollector) -> str:
        """Show what the daemon knows now."""
        now = time.time()
        for writer in self.run.all_writers:
            is_first = writer is self.writer
            writer.step_changed_s = writer.step_changed_s - 60 if self.is_stuck and is_first else now
            writer.small_since_s = now - 60.0 * self.minute if self.is_stale and is_first else now
        if not self.is_hung:
            with self.requests.one():
                pass
        registry = CollectorRegistry()
        registry.register(collector)
        return generate_latest(registry).decode()

    def scrape(self, collector: DaemonCollector) -> dict[str, float]:
        """Show one minute's metrics; times are those of promtool's clock, which begins at 0."""
        now, found = time.time(), {}
        for family in text_string_to_metric_families(self.text(collector)):
            for sample in family.samples:
                labels = ",".join(f'{name}="{value}"' for name, value in sorted(sample.labels.items()))
                value = sample.value
                if sample.name.endswith("_timestamp_seconds") and value:
                    value = 60.0 * self.minute - (now - value)
                found[f"{sample.name}{{{labels}}}"] = value
        return found


def grow_backlog(node: Node) -> None:
    begun_ns = int((time.time() - 60 * (node.minute - BEGINS)) * 1e9)
    node.run.backlog = {str(n): FileFacts(1 << 20, begun_ns, 1) for n in range(node.minute - BEGINS + 1)}


def hang(node: Node) -> None:
    if not node.is_hung:
        node.is_hung = True
        node.hanging.enter_context(node.requests.one())


Incident = Callable[[Node], None]
"""Called each minute from the incident's first on."""

FOUND = LiveFinding(rule="nonfinite", severity="error", module="blocks.3", step=7, number=1, text="step 7, ...")

INCIDENTS: dict[str, tuple[Incident, int]] = {
    "RecorderStoreAway": (lambda node: setattr(node.health, "problem", "it is away"), 7),
    "RecorderStoreSlow": (hang, 12),
    "RecorderBacklogGrows": (grow_backlog, 35),
    "RecorderStatisticsStale": (lambda node: setattr(node, "is_stale", True), 10),
    "RecorderDiskFull": (lambda node: setattr(node, "free_bytes", 1e9), 4),
    "RecorderRowsDropped": (lambda node: node.drop(5), 7),
    "RecorderStepStuck": (lambda node: setattr(node, "is_stuck", True), 38),
    "RecorderRankKilled": (lambda node: setattr(node.writer, "state", "dead"), 3),
    "RecorderConflict": (lambda node: once(node, "conflicts", "stats"), 1),
    "RecorderObjectsLost": (lambda node: once(node, "lost_objects", ""), 1),
    "RecorderFindingInTraining": (lambda node: setattr(node.writer, "findings", (FOUND,)), 1),
    "RecorderFinding": (lambda node: node.run.findings.update({("spike", "error"): 1}), 1),
    "RecorderDaemonErrors": (lambda node: once(node, "errors", "internal"), 1),
}
"""By rule: what happens, and after how many minutes the alert must be firing."""


def once(node: Node, name: str, word: str) -> None:
    if not node.counters.of(name):
        node.counters.add(name, word)


def collector_of(node: Node) -> DaemonCollector:
    seen = {"foreign": 0, "refused": 0}
    return DaemonCollector(
        counters=node.counters, health=node.health, requests=node.requests, runs=lambda: [node.run],
        seen=lambda: seen, watched=["/recordings"], to="s3://bucket/runs",
    )  # fmt: skip


def series_of(incident: Incident, begins: int, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, str]]:
    node = Node(1)
    monkeypatch.setattr(
        "recorder.daemon.metrics.os.statvfs", lambda folder: SimpleNamespace(f_bavail=node.free_bytes, f_frsize=1)
    )
    collector = collector_of(node)
    scrapes = []
    for node.minute in range(NUM_SCRAPES):
        if node.minute >= begins:
            incident(node)
        scrapes.append(node.scrape(collector))
    names = dict.fromkeys(itertools.chain.from_iterable(scrapes))
    return [
        {
            "series": name.replace("{", '{instance="a",', 1),
            "values": " ".join(str(scrape.get(name, "_")) for scrape in scrapes),
        }
        for name in names
    ]


def firing(name: str, minute: int, *, is_wanted: bool) -> dict[str, Any]:
    return {
        "expr": f'count(ALERTS{{alertname="{name}",alertstate="firing"}})',
        "eval_time": f"{minute}m",
        "exp_samples": [{"labels": "{}", "value": 1}] if is_wanted else [],
    }


@pytest.mark.parametrize("name", [rule["alert"] for rule in yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"]])
def test_an_alert_fires_in_its_incident_and_not_before(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs("promtool")
    incident, after = INCIDENTS[name]
    tests = [
        {
            "interval": "1m",
            "input_series": series_of(incident, begins, monkeypatch),
            "promql_expr_test": [
                *([firing(name, begins - 1, is_wanted=False)] if begins else []),
                firing(name, begins + after, is_wanted=True),
                *(firing(other, begins + after, is_wanted=False) for other in INCIDENTS if other != name),
            ],
            "alert_rule_test": [
                {"alertname": name, "eval_time": f"{begins + after}m", "exp_alerts": [SAID[name]]}
                for name in [name]
                if name in SAID
            ],
        }
        for begins in ((BEGINS, 0) if name in BEFORE_THE_FIRST_SCRAPE else (BEGINS,))
    ]
    test = {"rule_files": [str(ALERTS)], "evaluation_interval": "1m", "tests": tests}
    (tmp_path / "test.yaml").write_text(yaml.safe_dump(test))
    done = subprocess.run(
        ["promtool", "test", "rules", tmp_path / "test.yaml"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr


SAID = {
    "RecorderFindingInTraining": {
        "exp_labels": {
            **{"severity": "warning", "instance": "a", "run": "run-a", "name": "name-a", "rule": "nonfinite"},
            **{"module": "blocks.3", "to": "s3://bucket/runs"},
        },
        "exp_annotations": {
            "summary": "name-a (run-a): nonfinite in blocks.3",
            "description": "`recorder first s3://bucket/runs/run-a` says where it comes from.",
        },
    }
}
"""What an alert says to the person that it wakes."""
BEFORE_THE_FIRST_SCRAPE = {
    "RecorderFindingInTraining",
    *("RecorderRowsDropped", "RecorderRankKilled", "RecorderConflict", "RecorderObjectsLost", "RecorderDaemonErrors"),
}
"""Rules on what may have happened before Prometheus first looks."""

NUM_NODES, RANKS_A_NODE, SICK = 512, 8, 200
AT_ONCE = [name for name, (_, after) in INCIDENTS.items() if after <= 3]
"""The rules that wait for a minute at most."""


class Fleet:
    """512 daemons of eight ranks, of which one has all these incidents once it is told to."""

    def __init__(self) -> None:
        nodes = Node(RANKS_A_NODE), Node(RANKS_A_NODE)
        self._collectors = [(node, collector_of(node)) for node in nodes]
        self._sick = nodes[1]
        fleet = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = fleet._metrics(int(self.path.strip("/"))).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args: Any) -> None:
                """Say nothing."""

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def _metrics(self, number: int) -> str:
        node, collector = self._collectors[number == SICK]
        return re.sub(
            r'rank="(\d)"', lambda rank: f'rank="{RANKS_A_NODE * number + int(rank[1])}"', node.text(collector)
        )

    def fall_ill(self) -> None:
        for name in AT_ONCE:
            INCIDENTS[name][0](self._sick)

    @property
    def configuration(self) -> dict[str, Any]:
        target = f"127.0.0.1:{self._server.server_port}"
        targets = [
            {"targets": [target], "labels": {"__metrics_path__": f"/{number}", "instance": f"node-{number}"}}
            for number in range(NUM_NODES)
        ]
        return {
            "global": {"scrape_interval": "15s", "evaluation_interval": "15s", "scrape_timeout": "14s"},
            "rule_files": [str(ALERTS)],
            "scrape_configs": [{"job_name": "recorder", "static_configs": targets}],
        }

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.mark.slow
def test_of_4096_ranks_the_alerts_name_one_node(tmp_path: Path) -> None:
    """In a real Prometheus, since promtool asks for 10,000 samples at most."""
    with contextlib.ExitStack() as ending:
        fleet = ending.enter_context(contextlib.closing(Fleet()))
        started = Prometheus(tmp_path / "prometheus", fleet.configuration)
        prometheus = ending.enter_context(contextlib.closing(started))

        def firing_of() -> set[tuple[str, str]]:
            found = [one["labels"] for one in prometheus.ask("alerts")["alerts"] if one["state"] == "firing"]
            return {(one["alertname"], one["instance"]) for one in found}

        def rules() -> list[dict[str, Any]]:
            return [rule for group in prometheus.ask("rules")["groups"] for rule in group["rules"]]

        wait_for(lambda: bool(prometheus.series(f"count(up) == {NUM_NODES}")), "all nodes")
        wait_for(lambda: all(rule["evaluationTime"] for rule in rules()), "a look of all rules")
        assert firing_of() == set()
        fleet.fall_ill()
        deadline_s = time.monotonic() + 180
        while firing_of() != {(name, f"node-{SICK}") for name in AT_ONCE}:
            assert time.monotonic() < deadline_s, firing_of()
            time.sleep(1)
        took = {rule["name"]: rule["evaluationTime"] for rule in rules()}
        (num_series,) = prometheus.ask("query", query='count({__name__=~".+"})')["result"]
        status = Path(f"/proc/{prometheus.process.pid}/status").read_text()
    (memory,) = re.findall(r"VmRSS:\s+(\d+)", status)
    print(f"{num_series['value'][1]} series; all rules {sum(took.values()):.2f} s; {int(memory) // 1000} MB")
    print(*(f"{name} {seconds:.3f} s" for name, seconds in sorted(took.items(), key=lambda one: -one[1])), sep="\n")
