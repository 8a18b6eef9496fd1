"""Other commands of the package that the daemon runs, each in a process of its own at the lowest priority.

A command that crashes on a damaged run, or takes much memory, takes nothing of the daemon with it. A URL, the webhook,
is told of new findings for a bounded time. The receiver may be slow, gone or malicious: it can waste a thread's few
seconds, and nothing else. Its answer is not read beyond its status, and a redirection is never followed.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import os
import signal
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ..errors import StoreError
from .destination import TakenError
from .shipping.run import RunShipper

logger = logging.getLogger("recorder.daemon")

_LONGEST_COMMAND_S = 1800.0
_MAX_CATALOG_BYTES = 256 << 20
_CATALOG_PAUSE_S = 60.0
_TOLD_MEMBERS = ("rule", "severity", "step", "ranks", "module_path")
"""What the webhook is told of a finding."""


def _run(words: list[str], must_end: Callable[[], bool]) -> tuple[int, str, str]:
    """Run a command of the package; it is killed where it must end or takes too long."""
    package = str(Path(__file__).resolve().parents[2])
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("RECORDER", "_RECORDER"))}
    command = ["nice", "-n", "19", sys.executable, "-m", "recorder", *words]
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, cwd=package, env=environment
        )
        for _ in range(int(_LONGEST_COMMAND_S * 5)):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.2)
                break
            if must_end():
                break
        if process.poll() is None:
            process.kill()
            process.wait()
        texts = []
        for stream in (out, err):
            stream.seek(0)
            texts.append(stream.read(16 << 20).decode(errors="replace"))
    return process.returncode, texts[0], texts[1]


def _why(code: int, said: str) -> str:
    """Return why a command has failed: what it says, or how it ended where it could say nothing."""
    if code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else str(-code)
        how = f"ended by {name}; after {_LONGEST_COMMAND_S:g} s, or where memory is short, it is killed"
    else:
        how = f"exit code {code}"
    return f"{said.strip()[-300:]} ({how})".strip()


def repair(run: RunShipper) -> None:
    """Seal what dead writers of a run have left open."""
    ended = [writer for writer in list(run.writers.values()) if writer.needs_repair]
    code, _, said = _run(["repair", run.path], run.shared.is_over)
    run.shared.counters.add("errands", f"repair {'done' if code in (0, 1) else 'failed'}")
    if code in (0, 1):
        logger.info("%s: open shards of writers that ended were sealed; exit code %d", run.key, code)
    else:
        logger.warning("%s: open shards of writers that ended could not be sealed: %s", run.key, _why(code, said))
    for writer in ended:
        writer.was_repaired = True
    run.look_again()


def catalog(run: RunShipper, folder: Path) -> None:
    """Make the catalog of this node's part of a run anew, and put it beside the run.

    One that cannot be made is tried again after a while. One that the store does not take is tried when the store is
    asked again.
    """
    shard_bytes, name = run.shard_bytes, run.catalog_name
    file = folder / f"catalog-{os.getpid()}-{os.urandom(4).hex()}.parquet"
    run.has_catalog_failed, run.next_catalog_retry_s = True, time.monotonic() + _CATALOG_PAUSE_S
    try:
        code, _, said = _run(["catalog", run.path, "-o", str(file)], run.shared.is_over)
        if run.shared.is_over():
            logger.info("%s: its catalog was not made before the stop; the next start makes it", run.key)
            return
        if code not in (0, 1) or not file.exists() or file.stat().st_size > _MAX_CATALOG_BYTES:
            run.shared.counters.add("errands", "catalog failed")
            logger.warning("%s: no catalog could be made: %s", run.key, _why(code, said))
            return
        content = file.read_bytes()
    finally:
        file.unlink(missing_ok=True)
    key = f"{run.key}/{name}"
    try:
        held = run.shared.destination.get(key)
        is_news = held is None or held[0] != content
        if is_news:
            run.shared.destination.put_if(key, content, None if held is None else held[1])
    except TakenError:
        run.shared.counters.add("errands", "catalog failed")
        return
    except StoreError as error:
        run.has_catalog_failed = False
        run.shared.counters.add("errands", "catalog failed")
        run.shared.failed(error, run.key)
        return
    run.has_catalog_failed = False
    run.shared.counters.add("errands", "catalog done")
    if is_news:
        run.shared.uploaded("catalog", len(content))
    run.there.note(name, len(content), f"bytes:{shard_bytes}")
    run.cataloged_bytes = shard_bytes


def check(run: RunShipper) -> list[dict[str, Any]]:
    """Return the findings of severity error that are new since the last check."""
    code, out, said = _run(["check", run.path, "--json"], run.shared.is_stopping)
    if run.shared.is_stopping():
        return []
    findings: Any = None
    with contextlib.suppress(ValueError):
        findings = json.loads(out)
    if code not in (0, 1) or not isinstance(findings, dict):
        run.shared.counters.add("errands", "check failed")
        logger.info("%s: cannot be checked yet: %s", run.key, _why(code, said or "what it printed is no JSON"))
        return []
    run.shared.counters.add("errands", "check done")
    before, counts, news = run.findings, dict[tuple[str, str], int](), []
    for finding in findings.get("findings", ()):
        what = str(finding.get("rule")), str(finding.get("severity"))
        counts[what] = counts.get(what, 0) + 1
        if what[1] == "error" and counts[what] > before.get(what, 0):
            news.append({"run": run.key, **{name: finding.get(name) for name in _TOLD_MEMBERS}})
    run.findings = counts
    return news


_WEBHOOK_TIMEOUT_S = 5.0
_MAX_TOLD_FINDINGS = 50


def tell_webhook(url: str, findings: list[dict[str, Any]], counted: Callable[[str], None]) -> threading.Thread:
    """Post findings on a thread of its own, and return it; `counted` is told ``sent`` or ``failed`` in ten seconds."""

    def post() -> None:
        try:
            status = _post(url, findings)
        except (OSError, http.client.HTTPException, ValueError) as error:
            counted("failed")
            logger.warning("the webhook at %s cannot be told (%s)", urlsplit(url).hostname, type(error).__name__)
            return
        counted("sent" if 200 <= status < 300 else "failed")
        if not 200 <= status < 300:
            logger.warning("the webhook at %s answers %d, and is not followed", urlsplit(url).hostname, status)

    thread = threading.Thread(target=post, name="recorder-webhook", daemon=True)
    thread.start()
    return thread


def _post(url: str, findings: list[dict[str, Any]]) -> int:
    parts = urlsplit(url)
    assert parts.hostname is not None, "the settings were checked"
    where = parts.hostname, parts.port
    connection: http.client.HTTPConnection
    if parts.scheme == "https":
        context = ssl.create_default_context()
        connection = http.client.HTTPSConnection(*where, timeout=_WEBHOOK_TIMEOUT_S, context=context)
    else:
        connection = http.client.HTTPConnection(*where, timeout=_WEBHOOK_TIMEOUT_S)
    body = json.dumps({"source": "recorder-daemon", "findings": findings[:_MAX_TOLD_FINDINGS], "number": len(findings)})
    killer: threading.Timer | None = None
    try:
        connection.connect()
        sock = connection.sock
        # A receiver that sends its answer byte by byte keeps the timeout of the socket from ever passing.
        killer = threading.Timer(_WEBHOOK_TIMEOUT_S, lambda: sock.shutdown(2))
        killer.daemon = True
        killer.start()
        path = f"{parts.path or '/'}{'?' + parts.query if parts.query else ''}"
        connection.request("POST", path, body.encode(), {"Content-Type": "application/json"})
        with connection.getresponse() as answer:
            return answer.status
    finally:
        if killer is not None:
            killer.cancel()
        connection.close()
