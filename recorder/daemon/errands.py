"""Other commands of the package that the daemon runs, each in a process of its own at the lowest priority.

A command that crashes on a damaged run, or takes much memory, takes nothing of the daemon with it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import StoreError
from .destination import TakenError
from .shipping.run import RunShipper

logger = logging.getLogger("recorder.daemon")

_LONGEST_S = 1800.0
_MAX_CATALOG_BYTES = 256 << 20
_CATALOG_PAUSE_S = 60.0
_TOLD = ("rule", "severity", "step", "ranks", "module_path")
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
        for _ in range(int(_LONGEST_S * 5)):
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
        how = f"ended by {name}; after {_LONGEST_S:g} s, or where memory is short, it is killed"
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
            news.append({"run": run.key, **{name: finding.get(name) for name in _TOLD}})
    run.findings = counts
    return news
