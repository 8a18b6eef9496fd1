"""A server of `recorder view` in a thread of the test."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from recorder.cli.commands.pages import listen
from recorder.storage.locations import Location
from recorder.view.server import ViewServer, Watching
from tests.rigs.programs import needs


@contextmanager
def serving(
    folder: Location | None = None,
    run: Path | None = None,
    port: int = 0,
    token: str = "",
    certificate: Path | None = None,
) -> Iterator[ViewServer]:
    """Serve a folder of runs, or one run."""
    with listen("127.0.0.1", port) as listener:
        watching = Watching(folder, run)
        server = ViewServer(watching, listener, "127.0.0.1", token, certificate)
        thread = threading.Thread(target=server.serve)
        thread.start()
        try:
            yield server
        finally:
            server.stop()
            thread.join(30)
            assert not thread.is_alive()


def make_certificate(folder: Path) -> Path:
    """A PEM file with a certificate of this machine and its key, made by openssl; a test that lacks it is skipped."""
    needs("openssl")
    key, certificate = folder / "key", folder / "certificate"
    words = f"req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -keyout {key} -out {certificate}"
    subject = ("-addext", "subjectAltName=IP:127.0.0.1")
    subprocess.run(["openssl", *words.split(), *subject], check=True, capture_output=True, timeout=60)
    key.write_text(key.read_text() + certificate.read_text())
    return key
