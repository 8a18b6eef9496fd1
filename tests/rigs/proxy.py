"""A proxy between a daemon and its store that is slow, cuts, refuses, damages, lies or hangs, request by request."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

FAULTS = ("slow", "cut", "lost", "500", "503", "403", "damage", "lie")
"""What may happen to a request. ``cut``: it never arrives; ``lost``: its answer never arrives; ``damage``: the store
gets another byte than was sent; ``lie``: the answer names another ETag."""


class FaultyProxy:
    """Forwards to the store at `url`, but for the requests for which `fault` names one of `FAULTS`."""

    def __init__(
        self, url: str, fault: Callable[[str, str], str | None] = lambda method, path: None, *, mends: bool = False
    ) -> None:
        """Start it.

        Args:
            url: the store.
            fault: names what happens to a request, by its method and path.
            mends: whether the proxy does what rclone's server does not: it refuses puts whose conditions do not
                hold, one put after the other, and says of a range that it is one.
        """
        self.fault = fault
        self.seen: Counter[str] = Counter()
        """Requests by method, and by fault."""
        self.slow_s = 0.3
        self.hides_conditions = False
        """Whether the store is not told the conditions of puts, as one that does not know them."""
        target = urlsplit(url)
        proxy = self
        one_put = threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _forward(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                fault = proxy.fault(self.command, self.path)
                proxy.seen[self.command] += 1
                proxy.seen[fault or "none"] += 1
                if fault == "slow":
                    time.sleep(proxy.slow_s)
                if fault == "cut":
                    self.close_connection = True
                    self.connection.shutdown(socket.SHUT_RDWR)
                    return
                if fault in ("500", "503", "403"):
                    code = {"500": "InternalError", "503": "SlowDown", "403": "ExpiredToken"}[fault]
                    self._answer(int(fault), f"<Error><Code>{code}</Code></Error>".encode(), {})
                    return
                if fault == "damage" and body and self.command == "PUT":
                    body = body[:-1] + bytes([body[-1] ^ 1])
                assert target.hostname is not None
                connection = http.client.HTTPConnection(target.hostname, target.port, timeout=30)
                headers = {k: v for k, v in self.headers.items() if k.lower() not in ("connection", "content-length")}
                if proxy.hides_conditions:
                    headers = {k: v for k, v in headers.items() if k.lower() not in ("if-match", "if-none-match")}
                is_judged = mends and (self.headers["If-None-Match"] or self.headers["If-Match"])
                with one_put if is_judged else contextlib.nullcontext():
                    if is_judged and not self._holds(connection):
                        self._answer(412, b"<Error><Code>PreconditionFailed</Code></Error>", {})
                        return
                    connection.request(self.command, self.path, body, headers | {"Content-Length": str(len(body))})
                    answer = connection.getresponse()
                    content, answered = answer.read(), dict(answer.getheaders())
                connection.close()
                if fault == "lost":
                    self.close_connection = True
                    self.connection.shutdown(socket.SHUT_RDWR)
                    return
                if fault == "lie" and self.command == "PUT":
                    answered = {k: v for k, v in answered.items() if k.lower() != "etag"} | {"ETag": f'"{"0" * 32}"'}
                is_range = mends and answer.status == 200 and "Content-Range" in answered
                self._answer(206 if is_range else answer.status, content, answered)

            def _holds(self, connection: http.client.HTTPConnection) -> bool:
                """Whether the conditions of a put hold."""
                connection.request("HEAD", self.path.partition("?")[0])
                answer = connection.getresponse()
                answer.read()
                is_there = answer.status == 200
                if self.headers["If-None-Match"]:
                    return not is_there
                return is_there and answer.getheader("ETag") == self.headers["If-Match"]

            def _answer(self, status: int, content: bytes, headers: dict[str, str]) -> None:
                self.send_response(status)
                for name, value in headers.items():
                    if name.lower() not in ("content-length", "connection", "transfer-encoding", "date", "server"):
                        self.send_header(name, value)
                length = headers.get("Content-Length", "0") if self.command == "HEAD" else str(len(content))
                self.send_header("Content-Length", length)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(content)

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _forward

            def log_message(self, *words: Any) -> None:
                """Say nothing."""

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *words: Any) -> None:
                """Say nothing of clients that were killed."""

        self._server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, name="faulty-proxy", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)
