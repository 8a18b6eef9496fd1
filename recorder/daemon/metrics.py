"""The Prometheus metrics of the daemon, and of the runs of its node. No metric is ever renamed.

docs/daemon-reference.md lists every metric, and a test compares the list with the served metrics. Computing the metrics
must never make a request to the store. The port answers only GET, to /metrics, /healthz and /readyz.
"""

from __future__ import annotations

import base64
import hmac
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.exposition import choose_encoder

from .. import __version__
from ..errors import ConfigError
from ..format.manifest import RowCounts
from ..format.rundir import SHARD_KINDS, Members
from ..system.processes import tls_context
from .run_shipper import RunShipper
from .settings import DaemonSettings
from .telemetry import Counters, Health, Requests
from .writer_shipper import WriterShipper

_RUN = ("run", "name")
_RANK = (*_RUN, "rank")

_KINDS = (*SHARD_KINDS, "index", "open", "status", "manifest", "document")
_ERRORS = ("unreachable", "refused", "anonymous", "busy", "changed", "failed", "damaged", "local", "internal")
_ERRANDS = tuple(f"{what} {result}" for what in ("repair", "check") for result in ("done", "failed"))
_COMMANDS = ("carried", "invalid", "oversized", "unsigned", "stale", "replayed", "failed")
COUNTED: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "uploads": ("Objects that were put, by kind of file", "kind", _KINDS),
    "uploaded_bytes": ("Bytes that were put, by kind of file", "kind", _KINDS),
    "confirmed_files": (
        "Files that the store has confirmed, by how it was checked", "how", ("etag", "read", "synced", "there"),
    ),
    "errors": ("Jobs that failed and are tried again, by kind of error", "kind", _ERRORS),
    "conflicts": ("Files whose name another object has, by kind of file", "kind", (*_KINDS, "run", "node")),
    "lost_objects": ("Objects that the store had confirmed and has lost", "", ("",)),
    "removed_bytes": ("Bytes of shipped runs that were removed from this disk", "", ("",)),
    "removed_runs": ("Shipped runs that were removed from this disk", "", ("",)),
    "reloads": ("Reloads of the settings, by result", "result", ("done", "refused")),
    "errands": ("Repairs and checks, by result", "result", _ERRANDS),
    "webhooks": ("Calls of the webhook, by result", "result", ("sent", "failed")),
    "commands": ("Commands from the store, by result", "result", _COMMANDS),
    "refused_contents": ("Files whose content is not what their name says", "reason", ("content",)),
}  # fmt: skip
"""The help, the label, and the possible values of the label of each counter, by the counter's name in `Counters`.

A counter's metric is called ``recorder_daemon_`` and the counter's name. Each metric is served as 0 from the start: a
counter that only appears with its first event has no increase to alert on."""
_DROP_REASONS = (
    *("pool_full", "ring_full", "disk_full", "disk_floor", "quota", "no_memory", "write_error:EIO"),
    *("interrupted", "abandoned_at_close", "writer_error", "writer_dead"),
)
"""The reasons whose counts of dropped rows are served as 0 before a row is dropped. FORMAT.md allows more reasons."""

_LIVE_RULES = (("nonfinite", "error", ""), ("spike", "warning", ""), ("jump", "error", ""), ("data", "warning", ""))
"""Findings in training (rule, severity, module) whose counts are served as 0 before there is a finding."""

_Value = str | Callable[[WriterShipper], float | None]
"""The source of a metric's number: a member of the rank's status, or a function of the rank's writer."""
_OF_RANK: tuple[tuple[str, str, _Value], ...] = (
    ("recorder_step", "Step that the rank is in", "step"),
    ("recorder_step_changed_timestamp_seconds", "When the rank's step last changed",
     lambda w: w.step_changed_s or None),
    ("recorder_status_timestamp_seconds", "When the rank's status was written",
     lambda w: None if (time_ns := _number(w.status.get("time_ns"))) is None else time_ns / 1e9),
    ("recorder_recording", "1 while the rank's writer is at work, else 0", lambda w: float(w.state == "alive")),
    ("recorder_unclosed", "1 where the rank's writer was killed or is silent, else 0",
     lambda w: float(w.state not in ("alive", "closed"))),
    ("recorder_pool_bytes", "Size of the rank's pool of host memory", "pool_bytes"),
    ("recorder_pool_used_bytes", "Bytes in use of the rank's pool", "pool_used_bytes"),
    ("recorder_disk_free_bytes", "Bytes left on the disk of the rank's files", "free_bytes"),
)  # fmt: skip
_SUMS_OF_RANK: tuple[tuple[str, str, _Value], ...] = (
    ("recorder_rows_observed", "Rows that the rank has numbered", "observed"),
    ("recorder_rows_written", "Rows that the rank has written", "written"),
    ("recorder_rows_retired", "Rows that the rank's retention has deleted", lambda w: float(_balance(w).retired_rows)),
    ("recorder_written_bytes", "Bytes that the rank has written", "written_bytes"),
    ("recorder_waited_seconds", "Time that training has waited for the pool", "waited_s"),
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)  # a registry identifies collectors by `id`
class DaemonCollector:
    """Computes the metrics of the daemon and of its runs at each request."""

    counters: Counters
    health: Health
    requests: Requests
    runs: Callable[[], list[RunShipper]]
    seen: Callable[[], dict[str, int]]
    watched: list[str]
    to: str

    def collect(self) -> Iterable[Any]:
        yield InfoMetricFamily("recorder_daemon", "The daemon", value={"version": __version__, "to": self.to})
        for name, (text, label, words) in COUNTED.items():
            family = CounterMetricFamily(f"recorder_daemon_{name}", text, labels=[label] if label else [])
            for word, total in (dict.fromkeys(words, 0) | self.counters.of(name)).items():
                family.add_metric([word] if label else [], total)
            yield family
        yield from self._of_store()
        yield from self._of_ranks()
        seen = self.seen()
        yield _gauge("foreign_files", "Files in watched folders that belong to no run", seen["foreign"])
        yield _gauge("refused_files", "Links, devices and files whose names no key may have", seen["refused"])
        free = GaugeMetricFamily(
            "recorder_daemon_free_bytes", "Free bytes on the disk of a watched folder", labels=["folder"]
        )
        for folder in self.watched:
            try:
                status = os.statvfs(folder)
            except OSError:
                continue
            free.add_metric([folder], status.f_bavail * status.f_frsize)
        yield free

    def _of_store(self) -> Iterator[Any]:
        runs, now = self.runs(), time.time()
        backlog = [stamp for run in runs for stamp in run.backlog.values()]
        oldest_s = min((stamp.changed_ns / 1e9 for stamp in backlog), default=now)
        live = [one.small_since_s for run in runs for one in run.all_writers if one.state == "alive"]
        live += [run.found_s for run in runs if not (run.has_looked or run.there.conflict or run.unreadable)]
        gauges: tuple[tuple[str, str, float], ...] = (
            ("store_up", "1 while requests to the store succeed, else 0", not self.health.problem),
            ("store_answered_timestamp_seconds", "When a request to the store last succeeded; 0: never",
             self.health.answered_s),
            ("runs", "Runs in watched folders", len(runs)),
            ("settled_runs", "Runs that are shipped completely", sum(run.is_settled for run in runs)),
            ("backlog_files", "Sealed files that the store has not confirmed", len(backlog)),
            ("backlog_bytes", "Bytes of the sealed files that the store has not confirmed",
             sum(stamp.size_bytes for stamp in backlog)),
            ("lag_seconds", "Age of the oldest sealed file that the store has not confirmed", now - oldest_s),
            ("statistics_age_seconds", "Age of the shipped statistics, of the rank that is furthest behind",
             now - min(live, default=now)),
        )  # fmt: skip
        for name, text, value in gauges:
            yield _gauge(name, text, value)
        num_requests, requests_s = self.requests.totals()
        sums = (
            ("requests", "Requests to the store, without uploads in parts", num_requests),
            ("request_seconds", "Time of these requests together, including requests under way", requests_s),
        )
        for name, text, total in sums:
            yield CounterMetricFamily(f"recorder_daemon_{name}", text, value=total)

    def _of_ranks(self) -> Iterator[Any]:
        writers = [(run, writer) for run in self.runs() for writer in run.newest_writers]
        families: list[tuple[GaugeMetricFamily | CounterMetricFamily, _Value]] = [
            *((GaugeMetricFamily(name, text, labels=_RANK), read) for name, text, read in _OF_RANK),
            *((CounterMetricFamily(name, text, labels=_RANK), read) for name, text, read in _SUMS_OF_RANK),
        ]
        for family, read in families:
            for run, writer in writers:
                value = _number(writer.status.get(read)) if isinstance(read, str) else read(writer)
                if value is not None:
                    family.add_metric([run.key, run.name, str(writer.rank)], value)
            yield family
        dropped = CounterMetricFamily("recorder_rows_dropped", "Rows that were dropped", labels=(*_RANK, "reason"))
        for run, writer in writers:
            for reason, count in (dict.fromkeys(_DROP_REASONS, 0) | dict(_balance(writer).dropped)).items():
                dropped.add_metric([run.key, run.name, str(writer.rank), reason], count)
        yield dropped
        live = CounterMetricFamily(
            "recorder_live_findings", "Findings of rules in training", labels=(*_RANK, "rule", "severity", "module")
        )
        for run, writer in writers:
            told = {(one.rule, one.severity, one.module): one.number for one in writer.findings}
            for words, count in (dict.fromkeys(_LIVE_RULES, 0) | told).items():
                live.add_metric([run.key, run.name, str(writer.rank), *words], count)
        yield live
        findings = GaugeMetricFamily(
            "recorder_findings", "Findings of the last check", labels=(*_RUN, "rule", "severity")
        )
        for run in self.runs():
            for (rule, severity), count in list(run.findings.items()):
                findings.add_metric([run.key, run.name, rule, severity], count)
        yield findings


def _balance(writer: WriterShipper) -> RowCounts:
    return RowCounts.read(Members(writer.status))


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _gauge(name: str, text: str, value: float) -> Any:
    return GaugeMetricFamily(f"recorder_daemon_{name}", text, value=float(value))


_TIMEOUT_S = 10


class MetricsServer:
    """Serves the metrics of the daemon and of its process on a thread of its own until `close` is called."""

    def __init__(
        self,
        settings: DaemonSettings,
        collector: DaemonCollector,
        is_alive: Callable[[], bool],
        not_ready: Callable[[], str],
    ) -> None:
        """Bind the port. Raise ConfigError if the port, the certificate or the password cannot be used."""
        address, certificate = settings.address, settings.listen_certificate
        setting = f"listen_certificate = {certificate!r}"
        wanted = _authorization(settings.listen_password_file)
        registry = CollectorRegistry()
        registry.register(collector)
        ProcessCollector(registry=registry)
        if certificate:
            tls_context(certificate, setting)

        class Handler(BaseHTTPRequestHandler):
            timeout = _TIMEOUT_S
            server_version, sys_version = "recorder-daemon", ""

            def do_GET(self) -> None:
                path = self.path.partition("?")[0]
                given = (self.headers.get("Authorization") or "").encode()
                is_known = wanted is None or hmac.compare_digest(given, wanted)
                if path == "/metrics" and not is_known:
                    self._answer(401, b"a user and a password are wanted\n")
                elif path == "/metrics":
                    encode, content_type = choose_encoder(self.headers.get("Accept") or "")
                    self._answer(200, encode(registry), content_type)
                elif path == "/healthz":
                    self._answer(*((200, b"ok\n") if is_alive() else (503, b"no pass within its time\n")))
                elif path == "/readyz":
                    problem = not_ready()
                    said = problem if is_known else "not ready: the password shows why"
                    self._answer(*((503, f"{said}\n".encode()) if problem else (200, b"ok\n")))
                else:
                    self._answer(404, b"/metrics, /healthz or /readyz\n")

            def _answer(self, code: int, body: bytes, content_type: str = "text/plain; charset=utf-8") -> None:
                self.send_response(code)
                if code == 401:
                    self.send_header("WWW-Authenticate", 'Basic realm="recorder daemon"')
                self.send_header("Content-Type", content_type)
                self.send_header("Content-Length", str(len(body)))
                self.send_header("X-Content-Type-Options", "nosniff")
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *words: Any) -> None:
                """Log nothing, because scrapes come every few seconds."""

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET

            def get_request(self) -> tuple[Any, Any]:
                connection, client = super().get_request()
                if not certificate:
                    return connection, client
                try:  # certificates are renewed, so the file is read again; the handler's thread does the handshake
                    return tls_context(certificate, setting).wrap_socket(
                        connection, server_side=True, do_handshake_on_connect=False
                    ), client
                except ConfigError as error:
                    connection.close()
                    raise OSError(str(error)) from error

            def handle_error(self, *words: Any) -> None:
                """Log nothing about clients that do not speak TLS or disconnect."""

        try:
            self._server = Server(address, Handler)
        except OSError as error:
            raise ConfigError(
                f"listen = {settings.listen}: cannot be taken ({error.strerror}); name another port, or none: "
                "--listen ''"
            ) from None
        self.port = self._server.server_port
        host = f"[{address[0]}]" if ":" in address[0] else address[0]
        self.url = f"{'https' if certificate else 'http'}://{host}:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, name="recorder-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(_TIMEOUT_S)


def _authorization(file: str) -> bytes | None:
    if not file:
        return None
    try:
        text = Path(file).read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise ConfigError(f"listen_password_file = {file!r}: cannot be read ({error})") from None
    user, _, password = text.partition(":")
    if not user or not password or "\n" in text:
        raise ConfigError(f"listen_password_file = {file!r}: expected one line, USER:PASSWORD")
    return b"Basic " + base64.b64encode(text.encode())
