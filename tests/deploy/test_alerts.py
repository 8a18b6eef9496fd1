"""Each alert rule fires in the incident that it is for, and not before, by what the daemon's collector shows then.

The series that promtool is given are scrapes of the collector, a minute apart: a series that is not there before its
first event is not there for the rule either.
"""

from __future__ import annotations

import contextlib
import itertools
import subprocess
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
from recorder.daemon.watching import Stamp
from recorder.run.status import LiveFinding
from tests.rigs.programs import needs

ALERTS = Path(__file__).parents[2] / "deploy" / "prometheus" / "alerts.yaml"
NUM_SCRAPES, BEGINS = 90, 30
"""Minutes, and the minute in which an incident begins."""


class Node:
    """What a daemon knows of one run with one rank at work, minute by minute; an incident changes it."""

    def __init__(self) -> None:
        self.minute = 0
        self.counters, self.health = Counters(), Health()
        self.requests = Requests(lambda: 60.0 * self.minute)
        self.writer: Any = SimpleNamespace(
            rank=0,
            state="alive",
            status={"step": 1, "observed": 10, "written": 10, "dropped": {}},
            lifetime=SimpleNamespace(attempt=0, started_ns=1),
            findings=(),
        )
        self.run: Any = SimpleNamespace(
            key="run-a",
            name="name-a",
            writers={"": self.writer},
            all_writers=[self.writer],
            newest_writers=[self.writer],
            backlog=[],
            is_settled=False,
            findings={},
        )
        self.hanging = contextlib.ExitStack()
        self.free_bytes = 1e12
        self.is_stuck = self.is_stale = self.is_hung = False

    def drop(self, num_rows: int) -> None:
        self.writer.status["dropped"] = {"pool_full": num_rows}

    def scrape(self, collector: DaemonCollector) -> dict[str, float]:
        """Show one minute's metrics; times are those of promtool's clock, which begins at 0."""
        now = time.time()
        if not self.is_stuck:
            self.writer.step_changed_s = now
        else:
            self.writer.step_changed_s -= 60
        self.writer.small_since_s = now - 60.0 * self.minute if self.is_stale else now
        if not self.is_hung:
            with self.requests.one():
                pass
        registry = CollectorRegistry()
        registry.register(collector)
        found = {}
        for family in text_string_to_metric_families(generate_latest(registry).decode()):
            for sample in family.samples:
                labels = ",".join(f'{name}="{value}"' for name, value in sorted(sample.labels.items()))
                value = sample.value
                if sample.name.endswith("_timestamp_seconds") and value:
                    value = 60.0 * self.minute - (now - value)
                found[f"{sample.name}{{{labels}}}"] = value
        return found


def grow_backlog(node: Node) -> None:
    begun_ns = int((time.time() - 60 * (node.minute - BEGINS)) * 1e9)
    node.run.backlog = [Stamp(1 << 20, begun_ns, 1)] * (node.minute - BEGINS + 1)


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


def series_of(incident: Incident, begins: int, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, str]]:
    node = Node()
    monkeypatch.setattr(
        "recorder.daemon.metrics.os.statvfs", lambda folder: SimpleNamespace(f_bavail=node.free_bytes, f_frsize=1)
    )
    seen = {"foreign": 0, "refused": 0}
    collector = DaemonCollector(
        counters=node.counters, health=node.health, requests=node.requests, runs=lambda: [node.run],
        seen=lambda: seen, watched=["/recordings"], to="s3://bucket/runs",
    )  # fmt: skip
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
