"""Tells a URL of findings, for a bounded time, and never follows where it is sent.

The receiver may be slow, gone or malicious: it can waste a thread's few seconds, and nothing else. Its answer is not
read beyond its status.
"""

from __future__ import annotations

import http.client
import json
import logging
import ssl
import threading
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

logger = logging.getLogger("recorder.daemon")

_TIMEOUT_S = 5.0
_MAX_FINDINGS = 50


def send(url: str, findings: list[dict[str, Any]], counted: Callable[[str], None]) -> threading.Thread:
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
    connection: http.client.HTTPConnection
    if parts.scheme == "https":
        context = ssl.create_default_context()
        connection = http.client.HTTPSConnection(parts.hostname, parts.port, timeout=_TIMEOUT_S, context=context)
    else:
        connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=_TIMEOUT_S)
    body = json.dumps({"source": "recorder-daemon", "findings": findings[:_MAX_FINDINGS], "number": len(findings)})
    killer: threading.Timer | None = None
    try:
        connection.connect()
        sock = connection.sock
        # A receiver that sends its answer byte by byte keeps the timeout of the socket from ever passing.
        killer = threading.Timer(_TIMEOUT_S, lambda: sock.shutdown(2))
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
