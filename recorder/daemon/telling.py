"""Tells people of findings: a line in the daemon's log, and a message to the webhook, once in the whole fleet.

Of all daemons that find the same, the one whose mark is first at the destination posts: 512 nodes see one jump of the
loss. The webhook's receiver may be slow, unreachable or malicious, and can waste only a few seconds of one thread: only
the status of its answer is read, and a redirect is never followed.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import re
import shlex
import ssl
import threading
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import quote, urlsplit

from ..errors import StoreError
from ..format.rundir import encode_manifest
from .destination import TakenError
from .shipping.run import RunShipper

logger = logging.getLogger("recorder.daemon")

MEMBERS = ("rule", "severity", "step", "ranks", "module_path", "text")
"""The members of a finding that are told, besides those of its run."""
_TOLD = "_told"
"""The folder of a run at the destination with a mark for each day and rule that was posted."""
_SLACK = "hooks.slack.com"
_WEBHOOK_TIMEOUT_S = 5.0
_MAX_TOLD_FINDINGS = 50


def tell(run: RunShipper, findings: list[dict[str, Any]]) -> None:
    """Log findings of a run, and post those of rules that no daemon has posted today.

    With ``--once``, which remembers nothing of earlier calls, findings that a mark shows to be told are left out.
    """
    where = f"{run.shared.destination.url}/{run.key}"
    is_once, page = run.shared.is_once, run.shared.settings.page_url
    told = _told_rules(run) if is_once else set()
    findings = [finding for finding in findings if _slug(finding["rule"]) not in told]
    for finding in findings:
        command = f"recorder {'first' if finding['rule'] == 'nonfinite' else 'check'} {shlex.quote(where)}"
        finding |= {"run": run.key, "name": run.name, "command": command}
        if page:
            step = "" if finding["step"] is None else f"#view=map&step={finding['step']}"
            finding["page"] = f"{page.rstrip('/')}/run/{quote(run.key, safe='')}/{step}"
        logger.warning("%s; type: %s", _line(finding), command, extra={"finding": finding})
    url = run.shared.settings.webhook
    rules = {str(finding["rule"]) for finding in findings} if url or is_once else set()
    first = {rule: mark for rule in rules if _is_first(run, mark := _mark_of(run, rule))}

    def counted(result: str) -> None:
        run.shared.counters.add("webhooks", result)
        if result == "failed":  # whoever finds the same next may try
            with contextlib.suppress(StoreError):
                run.shared.destination.delete(list(first.values()))

    if (due := [finding for finding in findings if finding["rule"] in first]) and url:
        posting = tell_webhook(url, due, counted)
        if is_once:
            posting.join()  # it has its own deadline, and the process ends soon


def _told_rules(run: RunShipper) -> set[str]:
    """Return the rules with a mark of today, or of after the last change of the run's statuses, which have findings."""
    stamps = [status for writer in run.all_writers if (status := writer.files.status) is not None]
    changed_s = max((stamp.changed_ns for stamp in stamps), default=0) / 1e9
    told, today = set[str](), _today()
    for key, mark in run.shared.destination.listing(f"{run.key}/{_TOLD}/"):
        day, rule = (name := key.rpartition("/")[2])[:10], name[11:].removesuffix(".json")
        if day == today or mark.changed_s >= changed_s:
            told.add(rule)
    return told


def _today() -> str:
    return time.strftime("%Y-%m-%d", time.gmtime())


def _slug(rule: str) -> str:
    return re.sub(r"[^A-Za-z0-9.-]", "-", rule)[:60]


def _mark_of(run: RunShipper, rule: str) -> str:
    return f"{run.key}/{_TOLD}/{_today()}-{_slug(rule)}.json"


def _is_first(run: RunShipper, key: str) -> bool:
    """Put the mark of today for a rule; return False if it was there. A store that fails stops no message."""
    try:
        run.shared.destination.put_if(key, encode_manifest({"node": run.shared.node, "time_ns": time.time_ns()}), None)
    except TakenError:
        return False
    except StoreError as error:
        run.shared.failed(error, run.key)
    return True


def tell_webhook(url: str, findings: list[dict[str, Any]], counted: Callable[[str], None]) -> threading.Thread:
    """Post findings in a new thread, and return it; within 10 s `counted` is called with ``sent`` or ``failed``."""
    host = urlsplit(url).hostname

    def post() -> None:
        try:
            status = _post(url, message(findings, is_slack=host == _SLACK))
        except (OSError, http.client.HTTPException, ValueError) as error:
            counted("failed")
            logger.warning("the webhook at %s cannot be told (%s)", host, type(error).__name__)
            return
        counted("sent" if 200 <= status < 300 else "failed")
        if not 200 <= status < 300:
            logger.warning("the webhook at %s answers %d, and is not followed", host, status)

    thread = threading.Thread(target=post, name="recorder-webhook", daemon=True)
    thread.start()
    return thread


def message(findings: list[dict[str, Any]], *, is_slack: bool) -> dict[str, Any]:
    """Return the body of a post. Slack takes the text alone, in which it reads ``&``, ``<`` and ``>`` as markup."""
    told = findings[:_MAX_TOLD_FINDINGS]
    text = "\n".join("\n".join([_line(one), f"`{one['command']}`", *filter(None, [one.get("page")])]) for one in told)
    if is_slack:
        return {"text": text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")}
    return {"source": "recorder-daemon", "text": text, "findings": told, "number": len(findings)}


def _line(finding: dict[str, Any]) -> str:
    ranks = ", ".join(map(str, finding["ranks"])) or "all"
    which = f"rank {ranks}" if len(finding["ranks"]) == 1 else f"ranks {ranks}"
    return f"{finding['name']} ({finding['run']}), {which}: {finding['rule']}: {finding['text']}"


def _post(url: str, body: dict[str, Any]) -> int:
    parts = urlsplit(url)
    assert parts.hostname is not None, "the settings were checked"
    where = parts.hostname, parts.port
    connection: http.client.HTTPConnection
    if parts.scheme == "https":
        context = ssl.create_default_context()
        connection = http.client.HTTPSConnection(*where, timeout=_WEBHOOK_TIMEOUT_S, context=context)
    else:
        connection = http.client.HTTPConnection(*where, timeout=_WEBHOOK_TIMEOUT_S)
    killer: threading.Timer | None = None
    try:
        connection.connect()
        sock = connection.sock
        # The timer is needed because an answer that arrives byte by byte would never exceed the socket's timeout.
        killer = threading.Timer(_WEBHOOK_TIMEOUT_S, lambda: sock.shutdown(2))
        killer.daemon = True
        killer.start()
        path = f"{parts.path or '/'}{'?' + parts.query if parts.query else ''}"
        connection.request("POST", path, json.dumps(body).encode(), {"Content-Type": "application/json"})
        with connection.getresponse() as answer:
            return answer.status
    finally:
        if killer is not None:
            killer.cancel()
        connection.close()
