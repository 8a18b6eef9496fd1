"""A server of `recorder view` in a thread of the test."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from recorder.cli.commands.report import told_by_check, told_by_doctor
from recorder.cli.commands.view import listen
from recorder.view.server import ViewServer, Watching


@contextmanager
def serving(
    folder: Path | None = None, run: Path | None = None, port: int = 0, token: str = ""
) -> Iterator[ViewServer]:
    """Serve a folder of runs, or one run."""
    with listen("127.0.0.1", port) as listener:
        server = ViewServer(Watching(folder, run, told_by_check, told_by_doctor), listener, "127.0.0.1", token)
        thread = threading.Thread(target=server.serve)
        thread.start()
        try:
            yield server
        finally:
            server.stop()
            thread.join(30)
            assert not thread.is_alive()
