"""The port of the daemon: /metrics, /healthz and /readyz. It only answers GET, and takes nothing from whoever asks."""

from __future__ import annotations

import base64
import hmac
import socket
import ssl
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from ..errors import ConfigError
from .settings import DaemonSettings

_TIMEOUT_S = 10


class MetricsServer:
    """Serves on one thread a request until `close`."""

    def __init__(
        self,
        settings: DaemonSettings,
        registry: CollectorRegistry,
        is_alive: Callable[[], bool],
        not_ready: Callable[[], str],
    ) -> None:
        """Take the port.

        Raises:
            ConfigError: it is in use, or is nobody's here; or its certificate or its password cannot be used.
        """
        address, certificate = settings.address, settings.listen_certificate
        wanted = _authorization(settings.listen_password_file)
        if certificate:
            _tls(certificate)

        class Handler(BaseHTTPRequestHandler):
            timeout = _TIMEOUT_S
            server_version, sys_version = "recorder-daemon", ""

            def do_GET(self) -> None:
                path = self.path.partition("?")[0]
                given = (self.headers.get("Authorization") or "").encode()
                is_known = wanted is None or hmac.compare_digest(given, wanted)
                if path == "/metrics" and not is_known:
                    self._answer(401, b"a user and a password are wanted\n")
                elif path == "/metrics":
                    encode, content_type = choose_encoder(self.headers.get("Accept") or "")
                    self._answer(200, encode(registry), content_type)
                elif path == "/healthz":
                    self._answer(*((200, b"ok\n") if is_alive() else (503, b"no pass within its time\n")))
                elif path == "/readyz":
                    problem = not_ready()
                    said = problem if is_known else "not ready: the password shows why"
                    self._answer(*((503, f"{said}\n".encode()) if problem else (200, b"ok\n")))
                else:
                    self._answer(404, b"/metrics, /healthz or /readyz\n")

            def _answer(self, code: int, body: bytes, content_type: str = "text/plain; charset=utf-8") -> None:
                self.send_response(code)
                if code == 401:
                    self.send_header("WWW-Authenticate", 'Basic realm="recorder daemon"')
                self.send_header("Content-Type", content_type)
                self.send_header("Content-Length", str(len(body)))
                self.send_header("X-Content-Type-Options", "nosniff")
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *words: Any) -> None:
                """Say nothing: a scrape every few seconds is no news."""

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET

            def get_request(self) -> tuple[Any, Any]:
                connection, client = super().get_request()
                if not certificate:
                    return connection, client
                try:  # the file is read each time, since certificates are renewed; the handler's thread shakes hands
                    return _tls(certificate).wrap_socket(
                        connection, server_side=True, do_handshake_on_connect=False
                    ), client
                except ConfigError as error:
                    connection.close()
                    raise OSError(str(error)) from error

            def handle_error(self, *words: Any) -> None:
                """Say nothing of clients that speak no TLS, or leave."""

        try:
            self._server = Server(address, Handler)
        except OSError as error:
            raise ConfigError(
                f"listen = {settings.listen}: cannot be taken ({error.strerror}); name another port, or none: "
                "--listen ''"
            ) from None
        self.port = self._server.server_port
        host = f"[{address[0]}]" if ":" in address[0] else address[0]
        self.url = f"{'https' if certificate else 'http'}://{host}:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, name="recorder-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(_TIMEOUT_S)


def _tls(certificate: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certificate, password="")  # which no terminal is asked for
    except OSError as error:  # an ssl.SSLError is one
        raise ConfigError(
            f"listen_certificate = {certificate!r}: cannot be used ({error.strerror or error}); expected a PEM file "
            "with a certificate and its key"
        ) from None
    return context


def _authorization(file: str) -> bytes | None:
    """Return the header that a request needs; None where it needs none."""
    if not file:
        return None
    try:
        text = Path(file).read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise ConfigError(f"listen_password_file = {file!r}: cannot be read ({error})") from None
    user, _, password = text.partition(":")
    if not user or not password or "\n" in text:
        raise ConfigError(f"listen_password_file = {file!r}: expected one line, USER:PASSWORD")
    return b"Basic " + base64.b64encode(text.encode())
