"""The errands of the daemon for a run: repairs, checks, reports of findings, and commands carried to the run.

Repairs and checks are `recorder` commands in separate processes at the lowest priority. So a command that crashes on a
damaged run, or takes much memory, does not harm the daemon.

Commands from the store change only what a run records, whoever sends them. The daemon validates each command, and each
writer validates it again. Commands are carried only with `accept_commands`. If there is a key, a command needs a
signature over its run, its number and its text. So nobody can send a signed command to another run, or a second time.
The daemon must never carry a file that is not a command.

Each daemon logs a finding, but only one daemon of the fleet posts it to the webhook: 512 nodes may see one jump of the
loss. The daemon whose mark file is first at the destination posts. The webhook's receiver may be slow, unreachable or
malicious. It can waste only a few seconds of one thread, because only the status of its response is read, and a
redirect is never followed.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import http.client
import json
import logging
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from ..errors import CommandError, ConfigError, RunError, StoreError
from ..format.commands import (
    COMMAND_BYTES,
    COMMANDS,
    MAX_COMMANDS,
    UNDO,
    Command,
    CommandFolder,
    command_name,
    parse_command_name,
    send,
)
from ..format.commands import read_command as read_members
from ..format.rundir import RUN_MANIFEST, encode_manifest, parse_json
from ..read.writers import find_writers
from ..run.finding import Location
from .destination import Destination, TakenError, parse_destination
from .run_shipper import RunShipper
from .settings import load_daemon_settings

logger = logging.getLogger("recorder.daemon")

_LONGEST_COMMAND_S = 1800.0


def _run(words: list[str], must_end: Callable[[], bool]) -> tuple[int, str, str]:
    """Run a `recorder` command in a process. Kill the process if `must_end` returns True, or if it takes too long."""
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
    if code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else str(-code)
        how = f"ended by {name}"
        if -code == signal.SIGKILL:
            how += f"; a command is killed after {_LONGEST_COMMAND_S:g} s, and where memory is short"
    else:
        how = f"exit code {code}"
    return f"{said.strip()[-300:]} ({how})".strip()


def repair(run: RunShipper) -> None:
    """Seal the shards that dead writers of a run left open."""
    ended = [writer for writer in run.all_writers if writer.needs_repair]
    code, _, said = _run(["repair", run.path], run.shared.is_over)
    run.shared.counters.add("errands", f"repair {'done' if code in (0, 1) else 'failed'}")
    if code in (0, 1):
        logger.info("%s: open shards of writers that ended were sealed; exit code %d", run.key, code)
    else:
        logger.warning("%s: open shards of writers that ended could not be sealed: %s", run.key, _why(code, said))
    for writer in ended:
        writer.was_repaired = True
    run.look_again()


def count(run: RunShipper) -> None:
    """Read the number of rows and the last step of killed writers from their shards: their status is seconds older."""
    uncounted = [writer for writer in run.all_writers if writer.needs_count]
    for writer in uncounted:
        writer.counted = writer.num_rows, writer.summary()["step"]  # the error may be that the run cannot be read
    found = {(one.rank, one.name): one for one in find_writers(Path(run.path))}
    for writer in uncounted:
        if one := found.get((writer.rank, writer.names[1])):
            writer.counted = one.num_rows, one.last_step


def check(run: RunShipper) -> list[dict[str, Any]]:
    """Run `recorder check`. Return new findings of severity error, except those that rules in training have found."""
    code, out, said = _run(["check", run.path, "--json"], run.shared.is_stopping)
    if run.shared.is_stopping():
        return []
    findings: Any = None
    with contextlib.suppress(ValueError):
        findings = json.loads(out)
    if code not in (0, 1) or not isinstance(findings, dict):
        run.shared.counters.add("errands", "check failed")
        logger.info("%s: cannot be checked yet: %s", run.key, _why(code, said or "its output is no JSON"))
        return []
    run.shared.counters.add("errands", "check done")
    before, counts, news = run.findings, dict[tuple[str, str], int](), []
    in_training = {(one.rule, one.module) for writer in run.all_writers for one in writer.findings}
    for finding in findings.get("findings", ()):
        what = str(finding.get("rule")), str(finding.get("severity"))
        counts[what] = counts.get(what, 0) + 1
        is_told = (what[0], finding.get("module_path")) in in_training
        if what[1] == "error" and counts[what] > before.get(what, 0) and not is_told:
            news.append({name: finding.get(name) for name in MEMBERS})
    run.findings = counts
    return news


_OLDEST_S = 3600.0
"""A command that is older than this many seconds when it is found is refused: its sender no longer waits for it."""
_NEWEST_S = 300.0
"""A command may be dated up to this many seconds after this node's time, because the sender's clock may differ."""
_LEAST_KEY_BYTES = 16


def read_key(path: str) -> bytes:
    """Return the key in the file `path`, or no bytes without a path.

    Raise ConfigError for an unreadable or short key.
    """
    if not path:
        return b""
    try:
        key = Path(path).read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"key_file = {path!r}: cannot be read ({error.strerror})") from None
    if len(key) < _LEAST_KEY_BYTES:
        raise ConfigError(f"key_file = {path!r}: holds {len(key)} bytes; a key has {_LEAST_KEY_BYTES} at least")
    return key


def signature(key: bytes, run_id: str, number: int, text: bytes) -> bytes:
    """Return the signature of a command: hexadecimal HMAC-SHA256 over its run, its number and its text."""
    words = b"\0".join((b"recorder command", run_id.encode(), b"%d" % number, text))
    return hmac.new(key, words, hashlib.sha256).hexdigest().encode()


def _signature_name(number: int, command: Command) -> str:
    """Return the name of a signature. With the command's id, as two senders may try one number."""
    return f"{number:06d}-{command.id}.hmac"


class StoreCarrier:
    """Carries commands for one run from the store to the run's directory. Only one job at a time may call `carry`."""

    def __init__(self, run: RunShipper) -> None:
        self._run = run
        self._folder = CommandFolder(Path(run.path))
        self._known: dict[str, int] = {}
        """The number of each command in the run's directory on this disk, by the command's id."""
        self._ids: dict[int, str] = {}
        """The id of each command in the store, by the command's number in the store."""
        self._next = 1

    def carry(self) -> None:
        """Carry the run's new commands from the store to this disk. Without a new command, this costs one request."""
        run = self._run
        key = read_key(run.shared.settings.key_file)
        while self._next <= MAX_COMMANDS:
            name = f"{run.key}/{COMMANDS}/{command_name(self._next)}"
            held = run.shared.destination.get(name)
            if held is None:
                return
            result, why = self._take(self._next, held[0], key)
            if result:
                run.shared.counters.add("commands", result)
                logger.log(
                    logging.INFO if result == "carried" else logging.ERROR, "%s: command %d: %s%s",
                    run.key, self._next, result, f": {why}" if why else "",
                )  # fmt: skip
            self._next += 1

    def _take(self, number: int, text: bytes, key: bytes) -> tuple[str, str]:
        """Carry one command unless it is refused. Return the result (empty if it was carried before) and the reason."""
        for one in self._folder.look(is_told=True):
            if isinstance(one, Command):
                self._known.setdefault(one.id, one.number)
        if len(text) > COMMAND_BYTES:
            return "oversized", f"{len(text)} bytes"
        try:
            command = read_members(parse_json(text, command_name(number)), command_name(number), number)
        except (CommandError, RunError) as error:
            return "invalid", str(error)
        if key:
            signed = self._run.shared.destination.get(f"{self._run.key}/{COMMANDS}/{_signature_name(number, command)}")
            wanted = signature(key, self._run.there.run_id, number, text)
            if signed is None or not hmac.compare_digest(signed[0], wanted):
                return "unsigned", "its signature is missing or wrong"
        if command.id in self._ids.values():
            return "replayed", f"its id {command.id} was seen under another number"
        self._ids[number] = command.id
        if command.id in self._known:
            return "", ""
        age_s = time.time() - command.created_ns / 1e9
        if not -_NEWEST_S <= age_s <= _OLDEST_S:
            return "stale", f"it was made {age_s:.0f} s ago"
        if command.kind == UNDO:
            undone = self._known.get(self._ids.get(command.undoes or 0, ""))
            if undone is None:
                return "invalid", f"command {command.undoes}, which it undoes, is not on this node"
            command = replace(command, undoes=undone)
        try:
            self._known[command.id] = send(Path(self._run.path), command).number
        except CommandError as error:
            return "failed", str(error)
        return "carried", ""


def by_daemons(run: Location, key_file: str | None) -> Callable[[Command], Command]:
    """Return a function that leaves a command for a run in the store where the run lies, signed if there is a key."""
    store = parse_destination(str(run.parent.absolute() if isinstance(run, Path) else run.parent))
    key = read_key(load_daemon_settings(None, {"key_file": key_file}).key_file)
    return lambda command: send_to_store(store, run.name, command, key)


def send_to_store(destination: Destination, run: str, command: Command, key: bytes) -> Command:
    """Put a command for a run at a destination, signed if there is a key. Return the command with its number.

    Raise CommandError if there is no such run, if the command is invalid, or if the run takes no more commands.
    """
    held = destination.get(f"{run}/{RUN_MANIFEST}")
    if held is None:
        raise CommandError(f"{destination.url}/{run}: no such run; `recorder ls {destination.url}` lists them")
    run_id = str(parse_json(held[0], run).get("run_id"))
    text = command.encode()
    names = [name.rpartition("/")[2] for name, _ in destination.listing(f"{run}/{COMMANDS}/")]
    first = max((number for name in names if (number := parse_command_name(name)) is not None), default=0) + 1
    for number in range(first, MAX_COMMANDS + 1):
        with contextlib.suppress(TakenError):  # another sender has taken this number
            if key:  # the signature comes first, because a daemon may look at any moment
                signed = f"{run}/{COMMANDS}/{_signature_name(number, command)}"
                destination.put_if(signed, signature(key, run_id, number, text), None)
            destination.put_if(f"{run}/{COMMANDS}/{command_name(number)}", text, None)
            return replace(command, number=number)
    raise CommandError(f"{destination.url}/{run}: the run has had {MAX_COMMANDS} commands, and takes no more")


MEMBERS = ("rule", "severity", "step", "ranks", "module_path", "text")
"""The members of a finding of `recorder check` that are logged and posted. Members that name the run are added."""
_TOLD = "_told"
"""The folder of a run's mark files at the destination. A mark says that a rule's findings were posted on a day."""
_SLACK = "hooks.slack.com"
_WEBHOOK_TIMEOUT_S = 5.0
_MAX_TOLD_FINDINGS = 50


def tell(run: RunShipper, findings: list[dict[str, Any]]) -> None:
    """Log findings of a run. Post to the webhook the findings of rules for which no daemon has posted today.

    With ``--once`` the daemon remembers no earlier call. It leaves out the rules that `_told_rules` returns.
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
    first = {rule: mark for rule in rules if _is_first(run, mark := f"{run.key}/{_TOLD}/{_today()}-{_slug(rule)}.json")}

    def counted(result: str) -> None:
        run.shared.counters.add("webhooks", result)
        if result == "failed":  # the next daemon that finds the same may try to put the mark
            with contextlib.suppress(StoreError):
                run.shared.destination.delete(list(first.values()))

    if (due := [finding for finding in findings if finding["rule"] in first]) and url:
        posting = tell_webhook(url, due, counted)
        if is_once:
            posting.join()  # the thread has a deadline of its own, and the process ends soon


def _told_rules(run: RunShipper) -> set[str]:
    """Return the rules that have a mark from today, or a mark newer than the writers' statuses, which list findings."""
    stamps = [status for writer in run.all_writers if (status := writer.files.status) is not None]
    changed_ns = max((stamp.changed_ns for stamp in stamps), default=0)
    told, today = set[str](), _today()
    for key, mark in run.shared.destination.listing(f"{run.key}/{_TOLD}/"):
        day, rule = (name := key.rpartition("/")[2])[:10], name[11:].removesuffix(".json")
        if day == today or mark.changed_ns >= changed_ns:
            told.add(rule)
    return told


def _today() -> str:
    return time.strftime("%Y-%m-%d", time.gmtime())


def _slug(rule: str) -> str:
    return re.sub(r"[^A-Za-z0-9.-]", "-", rule)[:60]


def _is_first(run: RunShipper, key: str) -> bool:
    """Put today's mark for a rule.

    Return False if it existed, else True, so that no finding is lost if the store fails.
    """
    try:
        run.shared.destination.put_if(key, encode_manifest({"node": run.shared.node, "time_ns": time.time_ns()}), None)
    except TakenError:
        return False
    except StoreError as error:
        run.shared.failed(error, run.key)
    return True


def tell_webhook(url: str, findings: list[dict[str, Any]], counted: Callable[[str], None]) -> threading.Thread:
    """Post findings on a new thread, and return it. Within 10 s `counted` is called with ``sent`` or ``failed``."""
    host = urlsplit(url).hostname

    def post() -> None:
        try:
            status = _post(url, message(findings, is_slack=host == _SLACK))
        except (OSError, http.client.HTTPException, ValueError) as error:
            counted("failed")
            logger.warning("the webhook at %s cannot be reached (%s)", host, type(error).__name__)
            return
        counted("sent" if 200 <= status < 300 else "failed")
        if not 200 <= status < 300:
            logger.warning("the webhook at %s answers %d, and redirects are not followed", host, status)

    thread = threading.Thread(target=post, name="recorder-webhook", daemon=True)
    thread.start()
    return thread


def message(findings: list[dict[str, Any]], *, is_slack: bool) -> dict[str, Any]:
    """Return the JSON body of a post. For Slack it has only a text, in which ``&``, ``<`` and ``>`` are escaped."""
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
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname, parts.port, timeout=_WEBHOOK_TIMEOUT_S)
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
