"""An S3 server in a process of its own, which can be killed, stopped and started again: rclone's, else moto's.

`rclone serve s3` keeps objects as files, so that they outlive a kill. moto's server keeps them in memory, and comes
back empty. rclone does not judge the conditions of a put (as of 1.75), so that the proxy before it has to.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from botocore.exceptions import BotoCoreError, ClientError

from tests.rigs.jobs import free_port
from tests.rigs.server import BUCKET, client_of

_PATIENCE_S = 60.0


class StoreProcess:
    """Serves `BUCKET` from `start` to `kill`."""

    def __init__(self, folder: Path, kind: str) -> None:
        """Prepare it.

        Args:
            folder: where rclone keeps objects, and what the server says.
            kind: ``rclone`` or ``moto``.
        """
        self.is_lasting = kind == "rclone"
        """Whether objects outlive a kill."""
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._objects = folder / "objects"
        self._log = folder / "store.log"
        if self.is_lasting:
            (self._objects / BUCKET).mkdir(parents=True)
            self._command = ["rclone", "serve", "s3", "--addr", f"127.0.0.1:{port}", str(self._objects)]
        else:
            self._command = [sys.executable, "-c", "from moto.server import main; main()", "-p", str(port)]
        self.client = client_of(self.url, read_timeout=60, max_attempts=3)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with open(self._log, "ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log)
        until_s = time.monotonic() + _PATIENCE_S
        while True:
            try:
                if self.is_lasting:
                    self.client.head_bucket(Bucket=BUCKET)
                else:
                    self.client.create_bucket(Bucket=BUCKET)
                return
            except (BotoCoreError, ClientError):
                assert time.monotonic() < until_s, f"the store does not start: {self._log}"
                time.sleep(0.05)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def stop(self) -> None:
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGCONT)

    def empty(self) -> None:
        """Lose all objects, while it is not running."""
        assert self._process is None
        if self.is_lasting:
            shutil.rmtree(self._objects / BUCKET)
            (self._objects / BUCKET).mkdir()
