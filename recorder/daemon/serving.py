"""The port of the daemon: /metrics, /healthz and /readyz. It only answers GET, and takes nothing from whoever asks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from ..errors import ConfigError

_TIMEOUT_S = 10


class MetricsServer:
    """Serves on one thread a request until `close`."""

    def __init__(
        self,
        address: tuple[str, int],
        registry: CollectorRegistry,
        is_alive: Callable[[], bool],
        not_ready: Callable[[], str],
    ) -> None:
        """Take the port.

        Raises:
            ConfigError: it is in use, or is nobody's here.
        """

        class Handler(BaseHTTPRequestHandler):
            timeout = _TIMEOUT_S
            server_version, sys_version = "recorder-daemon", ""

            def do_GET(self) -> None:
                path = self.path.partition("?")[0]
                if path == "/metrics":
                    encode, content_type = choose_encoder(self.headers.get("Accept") or "")
                    self._answer(200, encode(registry), content_type)
                elif path == "/healthz":
                    self._answer(*((200, b"ok\n") if is_alive() else (503, b"no pass within its time\n")))
                elif path == "/readyz":
                    problem = not_ready()
                    self._answer(*((503, f"{problem}\n".encode()) if problem else (200, b"ok\n")))
                else:
                    self._answer(404, b"/metrics, /healthz or /readyz\n")

            def _answer(self, code: int, body: bytes, content_type: str = "text/plain; charset=utf-8") -> None:
                self.send_response(code)
                self.send_header("Content-Type", content_type)
                self.send_header("Content-Length", str(len(body)))
                self.send_header("X-Content-Type-Options", "nosniff")
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *words: Any) -> None:
                """Say nothing: a scrape every few seconds is no news."""

        try:
            self._server = ThreadingHTTPServer(address, Handler)
        except OSError as error:
            where = f"listen = {address[0]}:{address[1]}"
            raise ConfigError(
                f"{where}: cannot be taken ({error.strerror}); name another port, or none: --listen ''"
            ) from None
        self._server.daemon_threads = True
        self.port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, name="recorder-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(_TIMEOUT_S)
