"""A real Prometheus, Debian's, on a port of this machine."""

from __future__ import annotations

import json
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.rigs.clusters import free_ports
from tests.rigs.programs import needs


class Prometheus:
    """Looks at what its configuration names until `close`; a test that lacks the program is skipped."""

    def __init__(self, folder: Path, configuration: dict[str, Any]) -> None:
        (self._port,) = free_ports(1)
        folder.mkdir()
        (folder / "prometheus.yaml").write_text(json.dumps(configuration))
        words = ["--config.file", str(folder / "prometheus.yaml"), "--storage.tsdb.path", str(folder / "data")]
        words += ["--web.listen-address", f"127.0.0.1:{self._port}"]
        with (folder / "log").open("wb") as log:
            self.process = subprocess.Popen([needs("prometheus"), *words], stdout=log, stderr=log)

    def ask(self, path: str, **values: str) -> Any:
        """What its interface answers; None while it does not answer yet."""
        url = f"http://127.0.0.1:{self._port}/api/v1/{path}?{urllib.parse.urlencode(values)}"
        try:
            with urllib.request.urlopen(url, timeout=20) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            with error:
                if error.code != 503:  # it starts
                    pytest.fail(f"{values}: {error.read().decode()}")
        except OSError:
            return None

    def series(self, query: str) -> list[dict[str, str]]:
        """The labels of what a panel shows of the last minute."""
        now_s = time.time()
        found = self.ask("query_range", query=query, start=str(now_s - 60), end=str(now_s), step="5")
        return [one["metric"] for one in found["result"]] if found else []

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
