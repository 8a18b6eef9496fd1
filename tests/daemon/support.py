"""A daemon in this process, and looks at what it has shipped."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import recorder
from recorder.daemon.daemon import Daemon
from recorder.daemon.fleet import NODE
from recorder.daemon.settings import DaemonSettings
from recorder.upkeep.verify import verify
from tests.rigs.server import BUCKET, StoreServer
from tests.rigs.waiting import PATIENCE_S


def settings(tmp_path: Path, to: str, **changes: Any) -> DaemonSettings:
    """Settings of a daemon that is quick and has no port."""
    own: dict[str, Any] = {
        "watch": (str(tmp_path / "recordings"),),
        "to": to,
        "state": str(tmp_path / "state"),
        "listen": "",
        "fresh_s": 1.0,
        "status_s": 0.5,
        "deadline_s": 4.0,
        "stop_s": 20.0,
    }
    return DaemonSettings(**{**own, **changes})


def ship(tmp_path: Path, to: str, **changes: Any) -> tuple[int, Daemon]:
    """Ship what is there now, as `--once` does."""
    daemon = Daemon(settings(tmp_path, to, **changes))
    return daemon.run_once(), daemon


@contextlib.contextmanager
def at_work(tmp_path: Path, to: str, **changes: Any) -> Iterator[Daemon]:
    """A daemon that runs on a thread of its own; it has to end well."""
    daemon = Daemon(settings(tmp_path, to, **changes))
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(daemon.run()), daemon=True)
    thread.start()
    try:
        yield daemon
    finally:
        daemon.stop()
        thread.join(PATIENCE_S)
    assert codes == [0]


def objects(store: StoreServer, prefix: str) -> dict[str, bytes]:
    """What lies below a prefix, but for the fleet's index and the documents of nodes."""
    listed = store.client.list_objects_v2(Bucket=BUCKET, Prefix=f"{prefix}/").get("Contents", ())
    keys = [one["Key"] for one in listed]
    found = {}
    for key in keys:
        with contextlib.suppress(store.client.exceptions.NoSuchKey):  # a daemon at work has removed it since
            found[key] = store.client.get_object(Bucket=BUCKET, Key=key)["Body"].read()
    return {key[len(prefix) + 1 :]: content for key, content in found.items() if not re.search("/_(fleet|nodes)/", key)}


def files(folder: Path) -> dict[str, bytes]:
    """What lies in a folder, but for the daemon's ledgers and the node's name."""
    own = ("_shipped-", NODE)
    paths = [path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(own)]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def faults(run: Path | str) -> list[str]:
    return [finding.text for finding in verify(recorder.open_run(run)) if finding.is_fault]
